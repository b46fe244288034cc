"""Feedback methods: one file a family. Importing this registers every one of them."""

from prf.feedback.base import Docs, Feedback, Query, TermFeedback, TextFeedback, VectorFeedback
from prf.feedback.terms import RM3, RocchioTerms
from prf.feedback.vector import AveragePrf, Rocchio

__all__ = [
    "RM3",
    "AveragePrf",
    "Docs",
    "Feedback",
    "Query",
    "Rocchio",
    "RocchioTerms",
    "TermFeedback",
    "TextFeedback",
    "VectorFeedback",
]

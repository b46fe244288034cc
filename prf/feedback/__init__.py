"""Feedback methods: one file a family. Importing this registers every one of them."""

from prf.feedback.base import (
    Docs,
    Feedback,
    Query,
    TermFeedback,
    Terms,
    TextFeedback,
    VectorFeedback,
)
from prf.feedback.encoder import EncoderPrf, SparseEncoderPrf
from prf.feedback.learned import TPRF
from prf.feedback.sparse import SparseAverage, SparseRocchio
from prf.feedback.terms import RM3, BM25Prf, RocchioTerms
from prf.feedback.terrier import KL, Bo1, TerrierRM3
from prf.feedback.text import ConcatenateText, TextFeedbackReranker
from prf.feedback.vector import AveragePrf, Rocchio

__all__ = [
    "KL",
    "RM3",
    "TPRF",
    "AveragePrf",
    "BM25Prf",
    "Bo1",
    "ConcatenateText",
    "Docs",
    "EncoderPrf",
    "Feedback",
    "Query",
    "Rocchio",
    "RocchioTerms",
    "SparseAverage",
    "SparseEncoderPrf",
    "SparseRocchio",
    "TermFeedback",
    "Terms",
    "TerrierRM3",
    "TextFeedback",
    "TextFeedbackReranker",
    "VectorFeedback",
]

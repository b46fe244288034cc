"""Vector feedback: the query moves towards the vectors of its first documents.

Li, Mourad, Zhuang, Koopman, Zuccon: Pseudo Relevance Feedback with Deep Language Models and Dense
Retrievers: Successes and Pitfalls. ACM TOIS, arXiv 2108.11044.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prf.errors import SpecError
from prf.feedback.base import Docs, Query, VectorFeedback
from prf.frames import FloatArray
from prf.pipeline import Depth


def average(query_vec: FloatArray, doc_vecs: FloatArray) -> npt.NDArray[np.float64]:
    """Returns the mean of the query vector and its feedback vectors.

    Args:
        query_vec: (d,).
        doc_vecs: (n, d), n >= 1.

    Returns:
        (d,) float64, not normalised; the query weighs as much as one document.

    >>> average(np.array([1.0, 0, 2]), np.array([[0.0, 1, 1], [2, 1, 0], [1, 1, 2]])).tolist()
    [1.0, 0.75, 1.25]
    """
    total: npt.NDArray[np.float64] = query_vec + doc_vecs.sum(axis=0, dtype=np.float64)
    return total / (len(doc_vecs) + 1)


def rocchio(
    query_vec: FloatArray,
    positive: FloatArray,
    negative: FloatArray,
    alpha: float,
    beta: float,
    gamma: float,
) -> npt.NDArray[np.float64]:
    """Returns ``alpha * query + beta * mean(positive) - gamma * mean(negative)``.

    Args:
        query_vec: (d,).
        positive: (n, d), n >= 1.
        negative: (m, d); m = 0 leaves the last term out.
        alpha: Weight of the query.
        beta: Weight of the mean positive vector.
        gamma: Weight of the mean negative vector.

    Returns:
        (d,) float64; nothing is normalised, scores are not used.

    >>> docs = np.array([[0.0, 1, 1], [2, 1, 0]])
    >>> rocchio(np.array([1.0, 0, 2]), docs, docs[:0], 0.4, 0.6, 0.0).round(6).tolist()
    [1.0, 0.6, 1.1]
    """
    new: npt.NDArray[np.float64] = alpha * query_vec.astype(np.float64)
    new = new + beta * positive.mean(axis=0, dtype=np.float64)
    if len(negative):
        new = new - gamma * negative.mean(axis=0, dtype=np.float64)
    return new


@dataclass(frozen=True, repr=False)
class AveragePrf(VectorFeedback):
    """Mean of the query vector and the vectors of its first documents.

    Needs: qid, query, query_vec, docno, score, doc_vec
    Gives: qid, query, query_vec

    Fewer than ``fb_docs`` documents are divided by their own number; with none the query stays.
    The new vector is float32 and not normalised.

    Source: Li et al., ACM TOIS, arXiv 2108.11044, section 4 (Average); its dense runs use depth 3.

    Args:
        fb_docs: Feedback depth.
    """

    fb_docs: Depth = 3

    def reformulate(self, query: Query, docs: Docs) -> npt.NDArray[np.float64]:
        return average(query.vec, docs.vecs)


@dataclass(frozen=True, repr=False)
class Rocchio(VectorFeedback):
    """Weighted sum of the query vector, the mean of its first documents, less that of its last.

    Needs: qid, query, query_vec, docno, score, doc_vec
    Gives: qid, query, query_vec

    Fewer than ``fb_docs`` documents are divided by their own number; with none the query stays.
    Nothing is normalised, scores are not used, the new vector is float32. With ``neg_docs`` the
    last documents of the given list count as not relevant, so the first pass decides how deep that
    is (a short list may hold a document on both sides, as in Pyserini).

    Source: Li et al., ACM TOIS, arXiv 2108.11044, section 4 (Rocchio with alpha and beta) and its
    Table 4 for the defaults; the negative part is Pyserini's, off as in the paper.

    Args:
        fb_docs: How many of the first documents are taken as relevant.
        alpha: Weight of the query vector.
        beta: Weight of the mean vector of the first documents.
        gamma: Weight of the mean vector of the last documents.
        neg_docs: How many of the last documents are taken as not relevant.
    """

    fb_docs: Depth = 5
    alpha: float = 0.4
    beta: float = 0.6
    gamma: float = 0.0
    neg_docs: Depth = 0

    def check(self) -> None:
        if (self.gamma == 0) != (self.neg_docs == 0):
            raise SpecError(
                f"Rocchio.gamma is {self.gamma} and Rocchio.neg_docs is {self.neg_docs}; "
                "negative feedback needs both, none needs neither"
            )

    @property
    def last_docs(self) -> int:
        return self.neg_docs

    def reformulate(self, query: Query, docs: Docs) -> npt.NDArray[np.float64]:
        positive = docs.vecs[: self.fb_docs]
        negative = docs.vecs[len(docs) - min(self.neg_docs, len(docs)) :]
        return rocchio(query.vec, positive, negative, self.alpha, self.beta, self.gamma)

"""Vector feedback on learned sparse vectors: Average and Rocchio over weighted terms.

The arithmetic is that of dense vectors over the union of the terms; what is added is pruning to the
heaviest terms and rounding to whole weights, so that the new query is like one from the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prf.errors import SpecError
from prf.feedback.base import Docs, Query, TermFeedback
from prf.feedback.terms import joined
from prf.feedback.vector import average, rocchio
from prf.frames import FloatArray
from prf.pipeline import Depth


def prune(
    names: Sequence[str], weights: npt.NDArray[np.float64], max_terms: int, whole: bool
) -> dict[str, float]:
    """Returns the heaviest terms with a weight above 0, heaviest first, equal ones by term.

    Args:
        names: (v,) terms.
        weights: (v,) their weights.
        max_terms: How many stay; 0 for all.
        whole: Round to whole numbers, halves to even; what becomes 0 is left out.

    >>> prune(["fish", "cat", "dog"], np.array([2.0, 2.0, 0.4]), 2, True)
    {'cat': 2.0, 'fish': 2.0}
    >>> prune(["fish", "cat", "dog"], np.array([2.6, -1.0, 0.4]), 0, True)
    {'fish': 3.0}
    """
    weights = np.rint(weights) if whole else weights
    order = sorted(np.flatnonzero(weights > 0).tolist(), key=lambda i: (-weights[i], names[i]))
    return {str(names[i]): float(weights[i]) for i in order[: max_terms or None]}


class SparseFeedback(TermFeedback, abstract=True):
    """Base of vector feedback on sparse vectors; ``combine`` returns the new weights."""

    max_terms: Depth
    whole: bool

    needs = ("qid", "query", "query_toks", "docno", "score")

    def combine(self, query: FloatArray, docs: FloatArray) -> npt.NDArray[np.float64]:
        """Returns the new weights of all terms, (v,), from those of the query and documents."""
        raise NotImplementedError

    def reformulate(self, query: Query, docs: Docs) -> dict[str, float]:
        names, own, theirs = joined(query.toks, docs.terms.names)
        old = np.zeros(len(names), dtype=np.float32)
        old[own] = list(query.toks.values())
        table = np.zeros((len(docs), len(names)), dtype=np.float32)
        table[:, theirs] = docs.terms.tf
        return prune(names, self.combine(old, table), self.max_terms, self.whole)


@dataclass(frozen=True, repr=False)
class SparseAverage(SparseFeedback):
    """Mean of the query's weighted terms and those of its first documents.

    Needs: qid, query, query_toks, docno, score
    Gives: qid, query, query_toks

    Document weights are those of the impact index; queries and index must share one quantisation,
    since nothing is normalised. Fewer than ``fb_docs`` documents are divided by their own number;
    with none the query stays. Terms come heaviest first.

    Source: Li et al., ACM TOIS, arXiv 2108.11044, section 4 (Average), carried from dense vectors
    to sparse ones; pruning and rounding are ours.

    Args:
        index: Impact index that holds the feedback documents.
        fb_docs: Feedback depth.
        max_terms: Keeps the heaviest terms of the new query; 0 keeps all.
        whole: Round weights to whole numbers, as the encoder's are.
    """

    index: str
    fb_docs: Depth = 3
    max_terms: Depth = 64
    whole: bool = True

    def combine(self, query: FloatArray, docs: FloatArray) -> npt.NDArray[np.float64]:
        return average(query, docs)


@dataclass(frozen=True, repr=False)
class SparseRocchio(SparseFeedback):
    """Weighted sum of the query's terms, the mean of its first documents, less that of its last.

    Needs: qid, query, query_toks, docno, score
    Gives: qid, query, query_toks

    Document weights are those of the impact index; queries and index must share one quantisation,
    since nothing is normalised. Weights that end at 0 or below are left out. With ``neg_docs`` the
    last documents of the given list count as not relevant. With no documents the query stays. Terms
    come heaviest first.

    Source: Li et al., ACM TOIS, arXiv 2108.11044, section 4 (Rocchio), carried from dense vectors
    to sparse ones; pruning, rounding and the defaults are ours.

    Args:
        index: Impact index that holds the feedback documents.
        fb_docs: How many of the first documents are taken as relevant.
        alpha: Weight of the query.
        beta: Weight of the mean of the first documents.
        gamma: Weight of the mean of the last documents.
        neg_docs: How many of the last documents are taken as not relevant.
        max_terms: Keeps the heaviest terms of the new query; 0 keeps all.
        whole: Round weights to whole numbers, as the encoder's are.
    """

    index: str
    fb_docs: Depth = 3
    alpha: float = 0.8
    beta: float = 0.2
    gamma: float = 0.0
    neg_docs: Depth = 0
    max_terms: Depth = 64
    whole: bool = True

    def check(self) -> None:
        if (self.gamma == 0) != (self.neg_docs == 0):
            raise SpecError(
                f"SparseRocchio.gamma is {self.gamma} and SparseRocchio.neg_docs is "
                f"{self.neg_docs}; negative feedback needs both, none needs neither"
            )

    @property
    def last_docs(self) -> int:
        return self.neg_docs

    def combine(self, query: FloatArray, docs: FloatArray) -> npt.NDArray[np.float64]:
        last = docs[len(docs) - min(self.neg_docs, len(docs)) :]
        return rocchio(query, docs[: self.fb_docs], last, self.alpha, self.beta, self.gamma)

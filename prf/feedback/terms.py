"""Term feedback: the query gains weighted terms of its first documents.

Both methods follow Anserini (``Rm3Reranker``, ``RocchioReranker``, ``FeatureVector``), in single
precision and in its order of summation, so that near-ties between terms fall the same way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prf.errors import SpecError
from prf.feedback.base import Docs, Query, TermFeedback
from prf.frames import FloatArray, IntArray, ObjectArray
from prf.pipeline import Count, Depth

_TINY = np.float32(0.001)  # documents without usable terms have norm 0 and are skipped
_FREQUENT = np.float32(0.1)  # terms in more than a tenth of the documents are no feedback terms
_ALNUM = re.compile("[a-z0-9]+")


def anserini_terms(
    terms: ObjectArray, df: IntArray, n_docs: int, alphanumeric: bool
) -> npt.NDArray[np.bool_]:
    """Tells which terms Anserini admits: 2 to 20 characters, in at most a tenth of the documents.

    Args:
        terms: (v,) terms.
        df: (v,) document frequencies.
        n_docs: Documents in the index.
        alphanumeric: Admit only terms of ``a-z0-9``.
    """
    frequent = df.astype(np.float32) / np.float32(max(n_docs, 1)) > _FREQUENT
    spelling = [
        2 <= len(term) <= 20 and (not alphanumeric or _ALNUM.fullmatch(term) is not None)
        for term in terms
    ]
    return np.array(spelling, dtype=bool) & ~frequent


def _largest(weights: FloatArray, k: int) -> FloatArray:
    """Returns the weights with all but the k largest set to 0; of equal ones the earlier stay."""
    out = np.zeros_like(weights)
    best = np.argsort(-weights, kind="stable")[:k]
    out[best] = weights[best]
    return out


def _unit(weights: FloatArray, order: int) -> FloatArray:
    """Returns the weights divided by their L1 or L2 norm; zeros stay zeros."""
    wide = weights.astype(np.float64)
    norm = np.abs(wide).sum() if order == 1 else np.sqrt((wide**2).sum())
    return (wide / norm).astype(np.float32) if norm > 0 else weights


def joined(query: Mapping[str, float], terms: ObjectArray) -> tuple[list[str], IntArray, IntArray]:
    """Returns the terms of both, and where those of the query and of the documents stand.

    >>> joined({"fish": 1, "cat": 2}, np.array(["cat", "dog"], dtype=object))
    (['fish', 'cat', 'dog'], array([0, 1]), array([1, 2]))
    """
    names = list(dict.fromkeys([*query, *terms]))
    place = {name: i for i, name in enumerate(names)}
    return (
        names,
        np.array([place[name] for name in query], dtype=np.int64),
        np.array([place[name] for name in terms], dtype=np.int64),
    )


def rm3(
    query: Mapping[str, float],
    terms: ObjectArray,
    tf: FloatArray,
    scores: npt.NDArray[np.float64],
    fb_terms: int,
    fb_lambda: float,
) -> dict[str, float]:
    """Returns the RM3 query as Anserini computes it.

    Each document is cut to its ``fb_terms`` most frequent terms *before* mixing; documents are
    mixed with their raw scores as weights; the mixture is cut again and L1-normalised; the query,
    also L1-normalised, gets the weight ``fb_lambda``. Ties keep the alphabetically earlier term.

    Args:
        query: Analysed terms and their counts.
        terms: (v,) admitted terms of the documents, ascending.
        tf: (n, v) counts.
        scores: (n,) first-pass scores.
        fb_terms: Terms kept per document and in the mixture.
        fb_lambda: Weight of the original query, 0 to 1.

    >>> terms = np.array(["cat", "dog", "fish", "mouse"], dtype=object)
    >>> tf = np.array([[2, 0, 1, 1], [0, 1, 0, 2]], dtype=np.float32)
    >>> new = rm3({"cat": 1, "dog": 1}, terms, tf, np.array([3.0, 1.0]), 3, 0.5)
    >>> {term: round(weight, 6) for term, weight in new.items()}
    {'cat': 0.454545, 'dog': 0.25, 'fish': 0.102273, 'mouse': 0.193182}
    """
    mixture = np.zeros(len(terms), dtype=np.float32)
    for counts, score in zip(tf, scores.astype(np.float32), strict=True):
        counts = _largest(counts, fb_terms)
        norm = np.float32(counts.sum(dtype=np.float64))
        if norm > _TINY:
            mixture += (counts / norm) * score
    mixture = _unit(_largest(mixture, fb_terms), 1)
    names, own, theirs = joined(query, terms)
    new = np.zeros(len(names), dtype=np.float64)
    weights = np.array(list(query.values()), dtype=np.float32)
    new[own] = np.float32(fb_lambda) * _unit(weights, 1)
    new[theirs] += (1.0 - float(np.float32(fb_lambda))) * mixture
    return _positive(names, new)


def rocchio_terms(
    query: Mapping[str, float],
    terms: ObjectArray,
    positive: FloatArray,
    negative: FloatArray,
    fb_terms: int,
    neg_terms: int,
    alpha: float,
    beta: float,
    gamma: float,
) -> dict[str, float]:
    """Returns Rocchio's query over term counts as Anserini computes it.

    The query and every document are L2-normalised; the mean of a side's documents is cut to its
    largest terms and L2-normalised again; only weights above 0 stay. Scores and idf are not used.

    Args:
        query: Analysed terms and their counts.
        terms: (v,) admitted terms of the documents, ascending.
        positive: (n, v) counts of the documents taken as relevant.
        negative: (m, v) counts of those taken as not relevant, last document first; m may be 0.
        fb_terms: Terms kept of the positive side.
        neg_terms: Terms kept of the negative side.
        alpha: Weight of the query.
        beta: Weight of the positive side.
        gamma: Weight of the negative side.

    >>> terms = np.array(["cat", "dog", "fish", "mouse"], dtype=object)
    >>> tf = np.array([[2, 0, 1, 1], [0, 1, 0, 2]], dtype=np.float32)
    >>> new = rocchio_terms({"cat": 1, "dog": 1}, terms, tf, tf[:0], 3, 3, 1.0, 0.75, 0.0)
    >>> {term: round(weight, 5) for term, weight in new.items()}
    {'cat': 1.08957, 'dog': 0.91659, 'mouse': 0.6102}
    """
    names, own, theirs = joined(query, terms)
    new = np.zeros(len(names), dtype=np.float32)
    weights = np.array(list(query.values()), dtype=np.float32)
    new[own] = np.float32(alpha) * _unit(weights, 2)
    new[theirs] += np.float32(beta) * _mean_direction(positive, fb_terms)
    if len(negative):
        new[theirs] -= np.float32(gamma) * _mean_direction(negative, neg_terms)
    return _positive(names, new)


def _mean_direction(tf: FloatArray, k: int) -> FloatArray:
    total = np.zeros(tf.shape[1], dtype=np.float32)
    for counts in tf:
        norm = np.float32(np.sqrt((counts.astype(np.float64) ** 2).sum()))
        if norm > _TINY:
            total += counts / norm
    return _unit(_largest(total / np.float32(len(tf)), k), 2)


def _positive(names: list[str], weights: npt.NDArray[np.floating]) -> dict[str, float]:
    single = weights.astype(np.float32).tolist()
    return {name: weight for name, weight in zip(names, single, strict=True) if weight > 0}


def bm25_prf(
    query: Mapping[str, float],
    terms: ObjectArray,
    r: IntArray,
    n_feedback: int,
    df: IntArray,
    n_docs: int,
    fb_terms: int,
    new_term_weight: float,
) -> dict[str, float]:
    """Returns the query with relevance weights, as Anserini's BM25PRF computes it.

    A term's weight is ``max(1e-6, w ln[(r+.5)(N-n-R+r+.5) / ((n-r+.5)(R-r+.5))])`` with w = 1 for
    query terms and ``new_term_weight`` for others. Query terms stay; of the others those with the
    largest weight times ln r are added.

    Args:
        query: Analysed terms and their counts (the counts are not used).
        terms: (v,) the admitted terms of the documents, ascending, and those of the query.
        r: (v,) feedback documents with the term.
        n_feedback: R, the number of feedback documents.
        df: (v,) n, documents with the term.
        n_docs: N, documents in the collection.
        fb_terms: How many terms are added.
        new_term_weight: w of a term that the query does not have.

    >>> one = np.array(["cat"], dtype=object), np.array([2])
    >>> bm25_prf({"cat": 1}, *one, 2, np.array([20]), 1000, 20, 0.2)
    {'cat': 5.579730033874512}
    """
    own = np.array([name in query for name in terms], dtype=bool)
    # A term in nearly all documents would have the logarithm of a negative number: no weight.
    odds = np.maximum((r + 0.5) * (n_docs - df - n_feedback + r + 0.5), 1e-300)
    rel = np.log(odds) - np.log((df - r + 0.5) * (n_feedback - r + 0.5))
    weight = np.maximum(1e-6, np.where(own, 1.0, np.float32(new_term_weight)) * rel)
    offer = np.where(own | (r < 2), -np.inf, weight * np.log(np.maximum(r, 1)))
    best = np.argsort(-offer, kind="stable")[:fb_terms]
    chosen = np.flatnonzero(own).tolist() + [i for i in best if np.isfinite(offer[i])]
    return {str(terms[i]): float(np.float32(weight[i])) for i in chosen}


@dataclass(frozen=True, repr=False)
class RM3(TermFeedback):
    """Relevance model mixed with the query, as Anserini and Pyserini compute it.

    Needs: qid, query, docno, score
    Gives: qid, query, query_toks

    ``query_toks`` sums to 1. A query without feedback documents keeps its analysed terms.

    Source: Abdul-Jaleel et al., UMass at TREC 2004 (RM3), in the form of Anserini's
    ``Rm3Reranker``, whose defaults these are.

    Args:
        index: Lucene index with term vectors.
        fb_docs: Feedback depth.
        fb_terms: Expansion terms, also kept per document.
        fb_lambda: Weight of the original query, 0 to 1.
        filter_terms: Admit only terms of a-z and 0-9.
    """

    index: str
    fb_docs: Depth = 10
    fb_terms: Count = 10
    fb_lambda: float = 0.5
    filter_terms: bool = True

    def check(self) -> None:
        if not 0 <= self.fb_lambda <= 1:
            raise SpecError(f"RM3.fb_lambda is {self.fb_lambda}; it must be between 0 and 1")

    def usable(self, terms: ObjectArray, df: IntArray, n_docs: int) -> npt.NDArray[np.bool_]:
        return anserini_terms(terms, df, n_docs, self.filter_terms)

    def reformulate(self, query: Query, docs: Docs) -> dict[str, float]:
        return rm3(
            query.toks,
            docs.terms.names,
            docs.terms.tf,
            docs.scores,
            self.fb_terms,
            self.fb_lambda,
        )


@dataclass(frozen=True, repr=False)
class RocchioTerms(TermFeedback):
    """Rocchio over term counts, as Anserini and Pyserini compute it.

    Needs: qid, query, docno, score
    Gives: qid, query, query_toks

    Weights are not normalised as a whole. With ``gamma`` the last documents of the given list count
    as not relevant, so the first pass decides how deep that is (a short list may hold a document on
    both sides, as in Anserini). A query without feedback documents keeps its analysed terms.

    Source: Rocchio, The SMART Retrieval System 1971, in the form of Anserini's ``RocchioReranker``,
    whose defaults these are (negative feedback off).

    Args:
        index: Lucene index with term vectors.
        fb_docs: How many of the first documents are taken as relevant.
        fb_terms: Terms kept of the relevant side.
        alpha: Weight of the query.
        beta: Weight of the relevant side.
        gamma: Weight of the side that is not relevant; 0 turns it off. Anserini uses 0.15.
        neg_docs: How many of the last documents are taken as not relevant.
        neg_terms: Terms kept of that side.
    """

    index: str
    fb_docs: Depth = 10
    fb_terms: Count = 10
    alpha: float = 1.0
    beta: float = 0.75
    gamma: float = 0.0
    neg_docs: Count = 10
    neg_terms: Count = 10

    @property
    def last_docs(self) -> int:
        return self.neg_docs if self.gamma != 0 else 0

    def usable(self, terms: ObjectArray, df: IntArray, n_docs: int) -> npt.NDArray[np.bool_]:
        return anserini_terms(terms, df, n_docs, alphanumeric=False)

    def reformulate(self, query: Query, docs: Docs) -> dict[str, float]:
        last = docs.terms.tf[len(docs) - min(self.neg_docs, len(docs)) :][::-1]
        return rocchio_terms(
            query.toks,
            docs.terms.names,
            docs.terms.tf[: self.fb_docs],
            last if self.gamma != 0 else last[:0],
            self.fb_terms,
            self.neg_terms,
            self.alpha,
            self.beta,
            self.gamma,
        )


_DIGITS = re.compile("[0-9]+")


@dataclass(frozen=True, repr=False)
class BM25Prf(TermFeedback):
    """Relevance weighting and expansion after Robertson and Sparck Jones, as Anserini computes it.

    Needs: qid, query, docno, score
    Gives: qid, query, query_toks

    The weights take the place of idf, so search with ``BM25(index, idf=False)``. Scores of the
    feedback documents are not used. A query without feedback documents keeps its analysed terms
    with their counts.

    Source: Robertson and Sparck Jones, Relevance weighting of search terms, JASIS 1976, with
    Robertson's offer weight, in the form of Anserini's ``BM25PrfReranker``, whose defaults these
    are.

    Args:
        index: Lucene index with term vectors.
        fb_docs: Feedback depth.
        fb_terms: How many terms are added.
        new_term_weight: Factor on the weight of added terms.
    """

    index: str
    fb_docs: Depth = 10
    fb_terms: Depth = 20
    new_term_weight: float = 0.2

    def usable(self, terms: ObjectArray, df: IntArray, n_docs: int) -> npt.NDArray[np.bool_]:
        return np.ones(len(terms), dtype=bool)  # query terms count whatever they look like

    def reformulate(self, query: Query, docs: Docs) -> dict[str, float]:
        table = docs.terms
        spelling = [
            2 <= len(name) <= 20
            and _ALNUM.fullmatch(name) is not None
            and _DIGITS.fullmatch(name) is None
            for name in table.names
        ]
        keep = np.array(spelling, dtype=bool) | np.array(
            [name in query.toks for name in table.names], dtype=bool
        )
        absent = [name for name in query.toks if name not in set(table.names)]
        return bm25_prf(
            query.toks,
            np.concatenate([table.names[keep], np.array(absent, dtype=object)]),
            np.concatenate([(table.tf[:, keep] > 0).sum(axis=0), np.zeros(len(absent))]),
            len(docs),
            np.concatenate([table.df[keep], [table.query_df[name] for name in absent]]),
            table.n_docs,
            self.fb_terms,
            self.new_term_weight,
        )

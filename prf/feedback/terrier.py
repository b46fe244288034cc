"""Term feedback as Terrier defines it: RM3 on exponentiated scores, and the DFR models Bo1 and KL.

Analysis and statistics are those of the Lucene index at hand, so figures differ from Terrier's own
where its analysis does; the formulas are Terrier's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prf.errors import SpecError
from prf.feedback.base import Docs, Query, TermFeedback, Terms
from prf.frames import IntArray, ObjectArray
from prf.pipeline import Count, Depth

WideArray = npt.NDArray[np.float64]


def terrier_rm3(
    query: Mapping[str, float],
    terms: Terms,
    scores: WideArray,
    fb_terms: int,
    fb_lambda: float,
) -> dict[str, float]:
    """Returns the RM3 query as Terrier computes it.

    A document weighs exp(score), its terms by their share of the whole document; the largest
    ``fb_terms`` are kept and L1-normalised, the query is L1-normalised and gets ``fb_lambda``.

    Args:
        query: Analysed terms and their counts.
        terms: Admitted terms of the documents.
        scores: (n,) first-pass scores; only differences matter.
        fb_terms: Expansion terms.
        fb_lambda: Weight of the original query, 0 to 1.
    """
    prior = np.exp(scores - scores.max())
    share = terms.tf / np.maximum(terms.lengths, 1)[:, None]
    mixture = (prior / prior.sum()) @ share.astype(np.float64)
    best = np.argsort(-mixture, kind="stable")[:fb_terms]
    total = mixture[best].sum()
    new = {name: fb_lambda * weight / sum(query.values()) for name, weight in query.items()}
    for i in best if total > 0 else ():
        name = terms.names[i]
        new[name] = new.get(name, 0.0) + (1 - fb_lambda) * mixture[i] / total
    return {name: float(weight) for name, weight in new.items() if weight > 0}


def bo1(tfx: WideArray, cf: WideArray, n_docs: int) -> WideArray:
    """Returns Bo1's weight of terms: ``tfx log2((1+f)/f) + log2(1+f)`` with ``f = F/N``.

    Args:
        tfx: (v,) occurrences in the feedback documents together.
        cf: (v,) F, occurrences in the collection.
        n_docs: N, documents in the collection.

    >>> bo1(np.array([3.0, 2.0]), np.array([20.0, 50.0]), 1000).round(5).tolist()
    [17.04585, 8.85502]
    """
    f = cf / n_docs
    return tfx * np.log2((1 + f) / f) + np.log2(1 + f)


def kl(tfx: WideArray, length: float, cf: WideArray, tokens: int) -> WideArray:
    """Returns the terms' part of the Kullback-Leibler divergence, 0 where it would be negative.

    ``(tfx/lx) log2[(tfx/lx) / (F/T)]``.

    Args:
        tfx: (v,) occurrences in the feedback documents together.
        length: lx, the length of these documents together.
        cf: (v,) F, occurrences in the collection.
        tokens: T, occurrences of all terms in the collection.

    >>> kl(np.array([4.0, 1.0]), 8.0, np.array([100.0, 200.0]), 1000).round(6).tolist()
    [1.160964, 0.0]
    """
    share = tfx / length
    ratio = share / (cf / tokens)
    return np.where(ratio > 1, share * np.log2(np.maximum(ratio, 1.0)), 0.0)


def expanded(
    query: Mapping[str, float],
    names: ObjectArray,
    weights: WideArray,
    normaliser: float,
    fb_terms: int,
) -> dict[str, float]:
    """Returns ``qtf / max qtf + weight / normaliser`` for the largest ``fb_terms`` weights.

    Args:
        query: Analysed terms and their counts.
        names: (v,) terms, ascending; of equal weights the earlier are kept.
        weights: (v,) weights; 0 adds nothing.
        normaliser: What a term of weight 1 in the expansion part has.
        fb_terms: How many terms the expansion part has.
    """
    most = max(query.values(), default=1.0)
    new = {name: count / most for name, count in query.items()}
    for i in np.argsort(-weights, kind="stable")[:fb_terms]:
        if weights[i] > 0 and normaliser > 0:
            new[names[i]] = new.get(names[i], 0.0) + float(weights[i] / normaliser)
    return new


@dataclass(frozen=True, repr=False)
class TerrierRM3(TermFeedback):
    """Relevance model mixed with the query, as Terrier and PyTerrier compute it.

    Needs: qid, query, docno, score
    Gives: qid, query, query_toks

    Document weights grow with exp(score), so BM25's first document usually decides. ``query_toks``
    sums to 1. A query without feedback documents keeps its analysed terms.

    Source: Abdul-Jaleel et al., UMass at TREC 2004 (RM3), in the form of terrier-prf's ``RM3``,
    whose defaults these are.

    Args:
        index: Lucene index with term vectors.
        fb_docs: Feedback depth.
        fb_terms: Expansion terms.
        fb_lambda: Weight of the original query, 0 to 1.
    """

    index: str
    fb_docs: Depth = 3
    fb_terms: Count = 10
    fb_lambda: float = 0.6

    def check(self) -> None:
        if not 0 <= self.fb_lambda <= 1:
            raise SpecError(f"TerrierRM3.fb_lambda is {self.fb_lambda}; it must be between 0 and 1")

    def usable(self, terms: ObjectArray, df: IntArray, n_docs: int) -> npt.NDArray[np.bool_]:
        return (df >= 2) & (df < 0.1 * n_docs)

    def reformulate(self, query: Query, docs: Docs) -> dict[str, float]:
        return terrier_rm3(query.toks, docs.terms, docs.scores, self.fb_terms, self.fb_lambda)


class _Divergence(TermFeedback, abstract=True):
    """What Bo1 and KL share: one bag of terms from all documents, one rule for rare terms."""

    fb_terms: Count

    def reformulate(self, query: Query, docs: Docs) -> dict[str, float]:
        terms = docs.terms
        tfx = terms.tf.sum(axis=0, dtype=np.float64)
        if len(docs) > 1:
            rare = (terms.tf > 0).sum(axis=0) < 2
            foreign = np.array([name not in query.toks for name in terms.names], dtype=bool)
            allowed = ~(rare & foreign)
        else:
            allowed = np.ones(len(tfx), dtype=bool)
        weights = np.where(allowed, self.weights(tfx, terms), 0.0)
        if not (weights > 0).any():
            return expanded(query.toks, terms.names, weights, 1.0, self.fb_terms)
        most = float(tfx[np.argmax(weights)])
        return expanded(
            query.toks, terms.names, weights, self.normaliser(most, terms), self.fb_terms
        )

    def weights(self, tfx: WideArray, terms: Terms) -> WideArray:
        """Returns the weight of every term."""
        raise NotImplementedError

    def normaliser(self, most: float, terms: Terms) -> float:
        """Returns the divisor, from the frequency of the term with the largest weight."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Bo1(_Divergence):
    """Bose-Einstein expansion of divergence from randomness, as Terrier computes it.

    Needs: qid, query, docno, score
    Gives: qid, query, query_toks

    A term that is not in the query needs two feedback documents (unless there is only one).
    Weights are relative to the most frequent query term, which has 1. Scores of the documents are
    not used. A query without feedback documents keeps its analysed terms with their counts.

    Source: Amati, Probability models for information retrieval based on divergence from randomness,
    PhD thesis, Glasgow 2003, in the form of Terrier's ``Bo1``, whose defaults these are.

    Args:
        index: Lucene index with term vectors.
        fb_docs: Feedback depth.
        fb_terms: Expansion terms.
    """

    index: str
    fb_docs: Depth = 3
    fb_terms: Count = 10

    def weights(self, tfx: WideArray, terms: Terms) -> WideArray:
        return bo1(tfx, terms.cf.astype(np.float64), terms.n_docs)

    def normaliser(self, most: float, terms: Terms) -> float:
        return float(bo1(np.array([most]), np.array([most]), terms.n_docs)[0])


@dataclass(frozen=True, repr=False)
class KL(_Divergence):
    """Kullback-Leibler expansion of divergence from randomness, as Terrier computes it.

    Needs: qid, query, docno, score
    Gives: qid, query, query_toks

    A term that is not in the query needs two feedback documents (unless there is only one).
    Weights are relative to the most frequent query term, which has 1. Scores of the documents are
    not used. A query without feedback documents keeps its analysed terms with their counts.

    Source: Amati, PhD thesis, Glasgow 2003, in the form of Terrier's ``KL``, whose defaults these
    are.

    Args:
        index: Lucene index with term vectors.
        fb_docs: Feedback depth.
        fb_terms: Expansion terms.
    """

    index: str
    fb_docs: Depth = 3
    fb_terms: Count = 10

    def weights(self, tfx: WideArray, terms: Terms) -> WideArray:
        length = float(terms.lengths.sum())
        return kl(tfx, length, terms.cf.astype(np.float64), terms.tokens)

    def normaliser(self, most: float, terms: Terms) -> float:
        length = float(terms.lengths.sum())
        return float(most * np.log2(terms.tokens / length) / length)

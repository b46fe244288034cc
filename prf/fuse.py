"""Fusion: several result lists for the same queries made into one, by scores or by ranks.

A fusion is a stage that holds stages. Each runs on the same input, and what they find is one list:
the union of their documents. Query columns come from the query, never from one side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyterrier as pt

from prf.errors import SpecError
from prf.frames import IntArray, head, query_codes
from prf.pipeline import Count, Depth, Transformer, _Combine

Normalisation = Literal["minmax", "zscore", "none"]
Missing = Literal["zero", "minimum"]
Table = npt.NDArray[np.float64]


def min_max(scores: Table, codes: IntArray) -> Table:
    """Brings the scores of every query to 0 to 1; a list whose scores are all equal gets 1.

    Args:
        scores: (n,), NaN where a document is not in the list.
        codes: (n,) query of each row, numbered from 0.

    Returns:
        (n,), NaN where it was.

    >>> min_max(np.array([10.0, 8, 4, 7]), np.array([0, 0, 0, 1])).round(6).tolist()
    [1.0, 0.666667, 0.0, 1.0]
    """
    low = _per_query(np.fmin, scores, codes, np.inf)
    spread = _per_query(np.fmax, scores, codes, -np.inf) - low
    out = np.where(np.isnan(scores), np.nan, 1.0)
    return np.divide(scores - low, spread, out=out, where=spread > 0)


def z_score(scores: Table, codes: IntArray) -> Table:
    """Brings the scores of every query to mean 0 and variance 1 (of the list, not of a sample).

    Arguments are those of `min_max`; a list whose scores are all equal gets 0.

    >>> z_score(np.array([3.0, 1.0, 7.0]), np.array([0, 0, 1])).tolist()
    [1.0, -1.0, 0.0]
    """
    there = ~np.isnan(scores)
    size = np.bincount(codes[there], minlength=_queries(codes)).astype(np.float64)
    size = np.maximum(size, 1)

    def mean(values: Table) -> Table:
        return (np.bincount(codes[there], values[there], _queries(codes)) / size)[codes]

    centred = scores - mean(scores)
    deviation = np.sqrt(mean(centred * centred))
    flat = _per_query(np.fmin, scores, codes, np.inf) == _per_query(np.fmax, scores, codes, -np.inf)
    out = np.where(there, 0.0, np.nan)
    return np.divide(centred, deviation, out=out, where=(deviation > 0) & ~flat)


def _queries(codes: IntArray) -> int:
    return int(codes.max(initial=-1)) + 1


def _per_query(function: np.ufunc, scores: Table, codes: IntArray, start: float) -> Table:
    """Returns the smallest or largest score of each row's query; ``start`` if it has none."""
    out = np.full(_queries(codes), start)
    function.at(out, codes, scores)  # fmin and fmax pass over NaN
    values: Table = out[codes]
    return values


def _as_they_are(scores: Table, codes: IntArray) -> Table:
    return scores


NORMALISE: dict[Normalisation, Callable[[Table, IntArray], Table]] = {
    "minmax": min_max,
    "zscore": z_score,
    "none": _as_they_are,
}


class Lists(NamedTuple):
    """All documents of all lists: one row for each query and docno, one column for each list.

    ``codes`` is (n,), the query of each row; ``scores`` and ``ranks`` (from 1) are (n, lists), NaN
    where the list does not hold the document.
    """

    codes: IntArray
    scores: Table
    ranks: Table

    def filled(self, values: Table, missing: Missing) -> Table:
        """Returns (n, lists) values with 0, or the least of query and list, for what is missing."""
        out = np.zeros_like(values)
        for side in range(values.shape[1]):
            own = values[:, side]
            least = np.zeros(len(own))
            if missing == "minimum":
                least = _per_query(np.fmin, own, self.codes, np.inf)
                least[np.isinf(least)] = 0.0  # the list holds nothing for this query
            out[:, side] = np.where(np.isnan(own), least, own)
        return out


class Fuse(_Combine, abstract=True):
    """Base of fusions: `score` gives the fused score of every document of the union.

    The field ``k`` says how many documents are kept; the lists themselves are as deep as their
    stages make them, and that depth is part of the result.
    """

    k: Count

    flat: ClassVar[bool] = False
    spec_form = "mapping"

    __repr__ = Transformer.__repr__

    @property
    def label(self) -> str:
        own = [item for item in fields(self) if item.name != "stages"]
        shown = [f"{item.name}={getattr(self, item.name)!r}" for item in own]
        return f"{type(self).__name__}({', '.join(shown)})"

    def score(self, lists: Lists) -> Table:
        """Returns (n,) fused scores, larger is better."""
        raise NotImplementedError

    def combine(self, lists: Sequence[pd.DataFrame]) -> pd.DataFrame:
        rows = pd.concat([part[["qid", "docno", "rank", "score"]] for part in lists])
        side = np.repeat(np.arange(len(lists)), [len(part) for part in lists])
        pair = rows.groupby(["qid", "docno"], sort=False).ngroup().to_numpy()
        first = ~pd.Series(pair).duplicated().to_numpy()  # pairs are numbered as they appear
        keys = rows[["qid", "docno"]][first].reset_index(drop=True)
        scores, ranks = (np.full((len(keys), len(lists)), np.nan) for _ in range(2))
        scores[pair, side] = rows["score"].to_numpy()
        ranks[pair, side] = rows["rank"].to_numpy() + 1
        codes, _ = query_codes(keys["qid"])
        fused = self.score(Lists(codes, scores, ranks))
        return head(keys.assign(score=fused), self.k)[["qid", "docno", "score"]]

    def cut(self, k: int) -> Self:
        return self if k >= self.k else replace(self, k=k)  # type: ignore[call-arg]

    def at_most(self, documents: int | None) -> int | None:
        found = super().at_most(documents)
        return self.k if found is None else min(found, self.k)

    def _check_weights(self, weights: Sequence[float]) -> None:
        if weights and len(weights) != len(self.stages):
            raise SpecError(
                f"{type(self).__name__}.weights has {len(weights)} numbers for "
                f"{len(self.stages)} stages; give one each, or none to weigh all alike"
            )


def _weighted_sum(values: Table, weights: Sequence[float]) -> Table:
    """Returns the sum over lists, in their order; no weights are all 1."""
    total = np.zeros(len(values))
    for side in range(values.shape[1]):
        total += values[:, side] * (weights[side] if weights else 1.0)
    return total


@dataclass(frozen=True, repr=False)
class Interpolate(Fuse):
    """Weighted sum of a sparse and a dense list: ``weight * sparse + (1 - weight) * dense``.

    Needs: qid
    Gives: qid, docno, score, rank

    ``score`` is float64, within 0 to 1 if both sides are normalised. Normalised scores are
    ``(s - min) / (max - min)`` over the list of the query; a list whose scores are all equal gets
    1. The lists' depth decides their minimum and so every score. A query that only one side finds
    has that side's documents; one that none finds has no rows.

    Source: Li et al., To Interpolate or not to Interpolate: PRF, Dense and Sparse Retrievers, SIGIR
    2022, arXiv 2205.00235; Wang, Zhuang and Zuccon, ICTIR 2021. Their equations put the normalised
    sign on the sparse score alone (``normalise="sparse"``); their code normalises both.

    Args:
        stages: The sparse side, then the dense one.
        weight: Weight of the sparse side, 0 to 1.
        normalise: Which side's scores are brought to 0 to 1.
        missing: What a document scores in a list that does not hold it: 0, or the list's minimum
            (the same where that list is normalised).
        k: How many documents per query.
    """

    stages: tuple[pt.Transformer, ...]
    weight: float = 0.5
    normalise: Literal["both", "sparse", "none"] = "both"
    missing: Missing = "zero"
    k: Count = 1000

    def check(self) -> None:
        if len(self.stages) != 2:
            raise SpecError(
                f"Interpolate takes two stages, sparse and dense, not {len(self.stages)}; "
                "CombSum with weights takes more"
            )
        if not 0 <= self.weight <= 1:
            raise SpecError(f"Interpolate.weight is {self.weight}; it must be from 0 to 1")

    def score(self, lists: Lists) -> Table:
        values = lists.scores.copy()
        for side in {"both": (0, 1), "sparse": (0,), "none": ()}[self.normalise]:
            values[:, side] = min_max(values[:, side], lists.codes)
        return _weighted_sum(lists.filled(values, self.missing), (self.weight, 1 - self.weight))


@dataclass(frozen=True, repr=False)
class CombSum(Fuse):
    """Weighted sum of the scores of several lists, normalised list by list.

    Needs: qid
    Gives: qid, docno, score, rank

    ``score`` is float64. For what the normalisations do see `min_max` and `z_score`; each is over
    the list of one query.

    Source: Fox and Shaw, Combination of Multiple Searches, TREC-2 1994 (CombSUM); z-scores as in
    Montague and Aslam, Relevance Score Normalization for Metasearch, CIKM 2001.

    Args:
        stages: Two stages or more.
        weights: One factor for each stage; none weighs all alike.
        normalise: ``minmax`` (0 to 1), ``zscore`` (mean 0, variance 1) or ``none``.
        missing: What a document scores in a list that does not hold it: 0, or the minimum of that
            list. After ``zscore`` 0 is the list's mean, so take ``minimum`` there.
        k: How many documents per query.
    """

    stages: tuple[pt.Transformer, ...]
    weights: tuple[float, ...] = ()
    normalise: Normalisation = "minmax"
    missing: Missing = "zero"
    k: Count = 1000

    def check(self) -> None:
        self._check_weights(self.weights)

    def score(self, lists: Lists) -> Table:
        values = lists.scores.copy()
        for side in range(values.shape[1]):
            values[:, side] = NORMALISE[self.normalise](values[:, side], lists.codes)
        return _weighted_sum(lists.filled(values, self.missing), self.weights)


@dataclass(frozen=True, repr=False)
class CombMnz(CombSum):
    """CombSum times the number of lists that hold the document.

    Needs: qid
    Gives: qid, docno, score, rank

    ``score`` is float64; arguments are those of `CombSum`.

    Source: Fox and Shaw, Combination of Multiple Searches, TREC-2 1994 (CombMNZ).
    """

    def score(self, lists: Lists) -> Table:
        holding = np.count_nonzero(~np.isnan(lists.ranks), axis=1)
        return np.asarray(super().score(lists) * holding, dtype=np.float64)


@dataclass(frozen=True, repr=False)
class ReciprocalRankFusion(Fuse):
    """Sum over lists of ``1 / (c + rank)``, ranks from 1; scores are not used.

    Needs: qid
    Gives: qid, docno, score, rank

    ``score`` is float64, above 0; a list that does not hold a document adds nothing.

    Source: Cormack, Clarke and Büttcher, Reciprocal Rank Fusion outperforms Condorcet and
    individual Rank Learning Methods, SIGIR 2009 (k = 60 there is c here).

    Args:
        stages: Two stages or more.
        c: Flattens the difference between ranks; 0 or more.
        weights: One factor for each stage; none weighs all alike.
        k: How many documents per query.
    """

    stages: tuple[pt.Transformer, ...]
    c: Depth = 60
    weights: tuple[float, ...] = ()
    k: Count = 1000

    def check(self) -> None:
        self._check_weights(self.weights)

    def score(self, lists: Lists) -> Table:
        return _weighted_sum(lists.filled(1 / (self.c + lists.ranks), "zero"), self.weights)


@dataclass(frozen=True, repr=False)
class BordaFusion(Fuse):
    """Borda count: of n documents the one at rank r gets ``(n - r + 1) / n`` points of a list.

    Needs: qid
    Gives: qid, docno, score, rank

    ``score`` is float64, above 0; n is how many documents all lists of the query hold together, so
    complete lists have n documents each. Ranks count from 1, scores are not used.

    Source: Aslam and Montague, Models for Metasearch, SIGIR 2001, divided by n as in Li et al., ACM
    TOIS, arXiv 2108.11044, section 4.

    Args:
        stages: Two stages or more.
        weights: One factor for each stage; none weighs all alike.
        missing: What documents get from a list that does not hold them: an equal share of the
            points that are left (``share``, Aslam and Montague's rule) or ``zero``.
        k: How many documents per query.
    """

    stages: tuple[pt.Transformer, ...]
    weights: tuple[float, ...] = ()
    missing: Literal["share", "zero"] = "share"
    k: Count = 1000

    def check(self) -> None:
        self._check_weights(self.weights)

    def score(self, lists: Lists) -> Table:
        n = np.bincount(lists.codes)[lists.codes].astype(np.float64)[:, None]
        points = n - lists.ranks + 1
        if self.missing == "share":
            for side in range(points.shape[1]):
                there = ~np.isnan(points[:, side])
                left = n[:, 0] - np.bincount(lists.codes, there)[lists.codes]
                # The points left are left, ..., 2, 1.
                points[~there, side] = (left[~there] + 1) / 2
        return _weighted_sum(lists.filled(points, "zero"), self.weights) / n[:, 0]

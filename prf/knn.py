"""Exact nearest neighbours by inner product: fast candidates, exact scores, one order.

The score of a query and a document is *defined* as their exact inner product, correctly rounded to
float32. It is therefore one number, whatever the batch, threads, BLAS, back end, block size or k:
a fast float32 product only proposes candidates, with a margin no rounding error can exceed.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from prf.errors import FrameError, SpecError, require
from prf.frames import FloatArray, Hits, IntArray, ObjectArray

Backend = Literal["numpy", "faiss"]
WideArray = npt.NDArray[np.float64]
Item = TypeVar("Item")
Result = TypeVar("Result")

BLOCK_BYTES = 32 * 2**20
"""Memory for the float32 scores of one block of documents, all queries of a group together."""

_GROUP = 512  # queries scored together: enough for the matrix product, few enough for long blocks
_PRODUCT_ROWS = 2048  # documents per matrix product: one thread's piece of a block
_RESCORE_ROWS = 4096  # documents widened to float64 at a time
_SPARE = 2**16  # candidates a query may hold above 2 k before they are settled exactly


def unit(vectors: FloatArray) -> FloatArray:
    """Returns the rows at length 1, computed in float64: (n, d) float32; a zero row stays zero."""
    wide = vectors.astype(np.float64)
    length = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    np.divide(wide, length, out=wide, where=length > 0)
    return wide.astype(np.float32)


def top_k(
    vectors: FloatArray,
    queries: FloatArray,
    k: int,
    docnos: Callable[[IntArray], ObjectArray],
    *,
    max_norm: float,
    threads: int = 0,
    backend: Backend = "numpy",
    block_bytes: int = BLOCK_BYTES,
) -> Hits:
    """Returns the k documents of largest exact inner product, ties by docno.

    Scores are the exact inner products, correctly rounded to float32.

    Args:
        vectors: (n, d) float32, finite, C-contiguous.
        queries: (m, d) float32, finite, C-contiguous.
        k: At least 1; if it is larger than n all documents are returned.
        docnos: The docnos of given rows; asked for tied documents only.
        max_norm: At least the largest Euclidean length of a row of ``vectors``.
        threads: 0 for all cores.
        backend: ``numpy``, or ``faiss`` (slower; for comparison and for odd machines).
        block_bytes: Memory for the scores of one block.

    Raises:
        SpecError: For k below 1, threads below 0 or an unknown back end.
        FrameError: If scores of a query may overflow float32.
    """
    _check(k, threads)
    if backend not in ("numpy", "faiss"):
        raise SpecError(f"search: backend is {backend!r}; one of 'numpy', 'faiss'")
    knn = require("faiss", "cpu", "backend='faiss'") if backend == "faiss" else None
    k = min(int(k), len(vectors))
    parts = []
    with _workers(threads or _cores()) as workers:
        for first in range(0, len(queries), _GROUP):
            group = _Group(vectors, queries[first : first + _GROUP], k, docnos, max_norm, first)
            rows = max(1, block_bytes // (4 * len(group.queries)))
            for start in range(0, len(vectors), rows):
                if knn is None:
                    _propose(group, range(len(group.queries)), start, start + rows, workers)
                else:
                    _propose_faiss(knn, group, start, start + rows, workers)
            parts.extend(workers.split(group.finish, range(len(group.queries))))
    return _joined(parts)


def rescored(
    vectors: FloatArray,
    queries: FloatArray,
    ids: Sequence[IntArray],
    k: int,
    docnos: Callable[[IntArray], ObjectArray],
    max_norm: float,
    threads: int = 0,
) -> Hits:
    """Returns the k best of given rows of each query, scored and ordered as `top_k` does.

    Args:
        vectors: As `top_k` takes them.
        queries: (m, d) float32, finite.
        ids: The rows to score for each query; each row once, there may be none.
        k: How many to return, at least 1.
        docnos: The docnos of given rows; asked for tied documents only.
        max_norm: At least the largest Euclidean length of a row of ``vectors``.
        threads: 0 for all cores.
    """
    _check(k, threads)
    done = []
    for first in range(0, len(queries), _GROUP):
        part = slice(first, first + _GROUP)
        group = _Group(vectors, queries[part], k, docnos, max_norm, first)
        group.ids = list(ids[part])
        done.extend(parallel(group.finish, len(group.ids), threads))
    return _joined(done)


def in_order(
    scores: Sequence[FloatArray],
    ids: Sequence[IntArray],
    k: int,
    docnos: Callable[[IntArray], ObjectArray],
) -> Hits:
    """Returns the k best of given rows by given scores, ties by docno."""
    _check(k, 0)
    keys = [_keys(s + np.float32(0), i) for s, i in zip(scores, ids, strict=True)]
    return _ordered(keys, k, docnos) if keys else _joined([])


def parallel(function: Callable[[range], Result], number: int, threads: int) -> list[Result]:
    """Returns the function's value for contiguous parts of range(number), in their order."""
    if number == 0:
        return []
    with _workers(threads or _cores()) as workers:
        return workers.split(function, range(number))


def _check(k: int, threads: int) -> None:
    if k < 1:
        raise SpecError(f"search: k is {k}; it must be at least 1")
    if threads < 0:
        raise SpecError(f"search: threads is {threads}; give 0 for all cores, or their number")


def _joined(parts: Sequence[Hits]) -> Hits:
    sizes = [np.diff(part.ptr) for part in parts]
    return Hits(
        np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int64),
        np.concatenate([np.zeros(0, np.int64), *(part.ids for part in parts)]),
        np.concatenate([np.zeros(0, np.float32), *(part.scores for part in parts)]),
    )


def exact_scores(
    vectors: FloatArray, queries: FloatArray, rows: Sequence[IntArray], *, max_norm: float
) -> FloatArray:
    """Returns the scores of given rows, query after query: those that `top_k` gives them.

    Args:
        vectors: (n, d) float32, finite, C-contiguous.
        queries: (m, d) float32, finite, C-contiguous.
        rows: For each query, rows of ``vectors``.
        max_norm: At least the largest Euclidean length of a row of ``vectors``.

    Raises:
        FrameError: If scores of a query may overflow float32.
    """
    parts = [np.zeros(0, dtype=np.float32)]
    with _one_blas_thread:
        for start in range(0, len(queries), _GROUP):
            batch = queries[start : start + _GROUP]
            group = _Group(vectors, batch, 1, lambda _: np.empty(0, object), max_norm, start)
            parts += [
                _exact_scores(vectors, ids, group.wide[row], group.error[row], group.reach[row])
                for row, ids in enumerate(rows[start : start + _GROUP])
            ]
    return np.concatenate(parts)


class _Group:
    """Some queries on their way through the documents: candidates so far and the bar to pass.

    With u = 2**-24, an inner product of length d in float32 is off by at most d u / (1 - d u)
    |q| |v|, in whatever order it is summed. Twice that below the k-th best no candidate is lost.
    """

    def __init__(
        self,
        vectors: FloatArray,
        queries: FloatArray,
        k: int,
        docnos: Callable[[IntArray], ObjectArray],
        max_norm: float,
        first: int,
    ) -> None:
        self.vectors, self.queries, self.k, self.docnos = vectors, queries, k, docnos
        self.wide = queries.astype(np.float64)
        # The factor covers the rounding of the lengths; two dimensions more that of the scores.
        self.reach = np.sqrt((self.wide * self.wide).sum(axis=1)) * max_norm * (1 + 1e-9)
        terms = vectors.shape[1] + 2
        gamma = terms * 2.0**-24 / (1 - terms * 2.0**-24)
        far = np.flatnonzero(self.reach * (1 + gamma) >= np.finfo(np.float32).max)
        if far.size:
            raise FrameError(
                f"search: scores of query {first + far[0]} (counted from 0) may reach "
                f"{self.reach[far[0]]:.3g}, more than float32 holds; scale the vectors down"
            )
        self.margin = 2 * (gamma * self.reach + terms * 2.0**-149)
        self.error = terms * 2.0**-53 / (1 - terms * 2.0**-53) * self.reach
        self.low = np.full(len(queries), -np.inf, dtype=np.float32)
        self.ids = [np.zeros(0, dtype=np.int64)] * len(queries)
        self.scores = [np.zeros(0, dtype=np.float32)] * len(queries)

    def offer(self, query: int, start: int, scores: FloatArray) -> None:
        """Takes what may be among the best from the scores of the rows from ``start`` on."""
        low = self.low[query]
        if low == -np.inf and len(scores) > self.k:
            low = self._bar(query, scores)
        found = np.flatnonzero(scores >= low)
        self.add(query, found + start, scores[found])

    def add(self, query: int, ids: IntArray, scores: FloatArray) -> None:
        """Adds candidates, raises the bar and drops what no longer passes it."""
        ids = np.concatenate([self.ids[query], ids])
        scores = np.concatenate([self.scores[query], scores])
        if len(ids) > self.k:
            self.low[query] = self._bar(query, scores)
            keep = scores >= self.low[query]
            ids, scores = ids[keep], scores[keep]
        self.ids[query], self.scores[query] = ids, scores
        if len(ids) > 2 * self.k + _SPARE:
            # Very many ties: settle them now, so that memory does not grow with the index.
            best = self.finish(range(query, query + 1))
            self.ids[query], self.scores[query] = best.ids, best.scores

    def _bar(self, query: int, scores: FloatArray) -> np.float32:
        at = len(scores) - self.k
        kth = float(np.partition(scores, at)[at])
        return _below(kth - self.margin[query])

    def finish(self, queries: Sequence[int]) -> Hits:
        """Returns the exact result of some queries from their candidates."""
        keys = []
        for query in queries:
            ids = self.ids[query]
            scores = _exact_scores(
                self.vectors, ids, self.wide[query], self.error[query], self.reach[query]
            )
            keys.append(_keys(scores, ids))
        return _ordered(keys, self.k, self.docnos)


def _propose(group: _Group, queries: Sequence[int], start: int, stop: int, run: _Workers) -> None:
    """Offers the rows from start to stop to some queries, by one matrix product in pieces."""
    block = group.vectors[start:stop]
    batch = group.queries if len(queries) == len(group.queries) else group.queries[list(queries)]
    scores = np.empty((len(batch), len(block)), dtype=np.float32)

    def multiply(first: int) -> None:
        last = min(first + _PRODUCT_ROWS, len(block))
        np.matmul(batch, block[first:last].T, out=scores[:, first:last])

    def select(places: Sequence[int]) -> None:
        for place in places:
            group.offer(queries[place], start, scores[place])

    run.map(multiply, range(0, len(block), _PRODUCT_ROWS))
    run.split(select, range(len(batch)))


def _propose_faiss(faiss: Any, group: _Group, start: int, stop: int, run: _Workers) -> None:
    """Offers the rows from start to stop to all queries; FAISS finds the best of them."""
    # The vectors of a FAISS file lie off the four-byte grid, which C++ must not see.
    block = np.require(group.vectors[start:stop], np.float32, ["C", "A"])
    depth = min(len(block), group.k + 64)
    before = faiss.omp_get_max_threads()  # a setting of this thread only
    faiss.omp_set_num_threads(run.threads)
    try:
        scores, ids = faiss.knn(group.queries, block, depth, metric=faiss.METRIC_INNER_PRODUCT)
    finally:
        faiss.omp_set_num_threads(before)
    unsure = []
    for query in range(len(group.queries)):
        bar = group.low[query]
        if depth >= group.k:
            kth = float(scores[query, group.k - 1])
            bar = max(bar, _below(kth - group.margin[query]))
        # What FAISS left out scores at most as much as its last one, which must miss the bar.
        if depth == len(block) or scores[query, -1] < bar:
            found = np.flatnonzero(scores[query] >= bar)
            group.add(query, ids[query, found] + start, scores[query, found])
        else:
            unsure.append(query)
    if unsure:
        _propose(group, unsure, start, stop, run)


def _below(value: float) -> np.float32:
    """Returns a float32 below the value."""
    return np.float32(np.nextafter(np.float32(value), np.float32(-np.inf)))


def _exact_scores(
    vectors: FloatArray, ids: IntArray, query: WideArray, error: float, reach: float
) -> FloatArray:
    """Returns the inner products of some rows with a query, correctly rounded to float32.

    The float64 product is off by at most ``error``. Where that could change the rounding, and only
    there (about one in a million), the sum is done again exactly.
    """
    scores = np.empty(len(ids), dtype=np.float32)
    for start in range(0, len(ids), _RESCORE_ROWS):
        piece = slice(start, start + _RESCORE_ROWS)
        wide = vectors[ids[piece]].astype(np.float64)
        product = wide @ query
        low = (product - error).astype(np.float32)
        unsure = np.flatnonzero(low != (product + error).astype(np.float32))
        if unsure.size:
            low[unsure] = _rounded_sums(wide[unsure] * query, reach)
        scores[piece] = low
    return scores + np.float32(0)  # -0.0 becomes 0.0: they are one score


def _rounded_sums(terms: WideArray, reach: float) -> FloatArray:
    """Returns the row sums correctly rounded to float32; their absolute values sum to <= reach.

    ``terms`` are products of two float32, which float64 holds exactly.
    """
    # Whole multiples of a grid that float64 resolves up to ``reach`` sum without any rounding.
    # This settles zeros and small integers, which would otherwise be many slow sums.
    grid = 2.0 ** (math.frexp(reach)[1] - 53)
    exact = np.asarray((np.rint(terms / grid) * grid == terms).all(axis=1))
    sums: FloatArray = terms.sum(axis=1).astype(np.float32)
    for row in np.flatnonzero(~exact):
        sums[row] = _rounded_sum(terms[row].tolist())
    return sums


def _rounded_sum(terms: list[float]) -> np.float32:
    """Returns the exact sum of the terms, correctly rounded to float32.

    >>> float(_rounded_sum([1.0, 2.0**-24, 2.0**-80]))  # just above halfway between two float32
    1.0000001192092896
    """
    total = math.fsum(terms)
    rest = math.fsum([*terms, -total])
    if rest and not np.float64(total).view(np.int64) & 1:
        # Rounding twice is safe if the first result is odd wherever it is not exact.
        total = math.nextafter(total, math.copysign(math.inf, rest))
    return np.float32(total)


def _keys(scores: FloatArray, ids: IntArray) -> IntArray:
    """Returns integers that sort as (score descending, row ascending): sorted, (n,) int64."""
    bits = scores.view(np.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = ((~ascending).astype(np.int64) << 32) | ids
    keys.sort()
    return keys


def _ordered(keys: list[IntArray], k: int, docnos: Callable[[IntArray], ObjectArray]) -> Hits:
    """Returns the first k of each query from sorted keys, equal scores by docno."""
    sizes = np.array([len(part) for part in keys], dtype=np.int64)
    ends = np.cumsum(sizes)
    joined = np.concatenate(keys)
    if not len(joined):
        return Hits(np.zeros(len(keys) + 1, np.int64), joined, np.zeros(0, np.float32))
    ids = joined & 0xFFFFFFFF
    ascending = ~(joined >> 32).astype(np.int32)
    scores = (ascending ^ ((ascending >> 31) & 0x7FFFFFFF)).view(np.float32)
    opens = np.append(True, ascending[1:] != ascending[:-1])
    starts = ends[:-1]
    opens[starts[starts < len(opens)]] = True  # the last ones may be empty
    if not opens.all():
        # Only ties need the docnos, so text is read, compared and sorted for them alone.
        tied = np.flatnonzero(~opens | ~np.append(opens[1:], True))
        rows, place = np.unique(ids[tied], return_inverse=True)
        rank = np.empty(len(rows), dtype=np.int64)
        rank[np.argsort(docnos(rows), kind="stable")] = np.arange(len(rows))
        order = np.lexsort((rank[place], np.cumsum(opens)[tied]))
        ids[tied] = ids[tied][order]
    inside = np.arange(len(ids)) - np.repeat(ends - sizes, sizes) < k
    ptr = np.concatenate([[0], np.cumsum(np.minimum(sizes, k))]).astype(np.int64)
    return Hits(ptr, ids[inside], scores[inside])


class _Workers:
    """Runs a function over items in threads, or right here for one thread or one item."""

    def __init__(self, threads: int, pool: ThreadPoolExecutor | None) -> None:
        self.threads, self.pool = threads, pool

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Returns the function's value for every item, in their order."""
        with _one_blas_thread:
            if self.pool is None or len(items) < 2:
                return [function(item) for item in items]
            return list(self.pool.map(function, items))

    def split(self, function: Callable[[range], Result], items: range) -> list[Result]:
        """Returns the function's value for contiguous parts of the items, in their order."""
        parts = min(len(items), self.threads)
        cuts = [len(items) * part // parts for part in range(parts + 1)]
        return self.map(function, [items[a:b] for a, b in pairwise(cuts)])


@contextmanager
def _workers(threads: int) -> Iterator[_Workers]:
    if threads == 1:
        yield _Workers(1, None)
    else:
        with ThreadPoolExecutor(threads) as pool:
            yield _Workers(threads, pool)


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _OneBlasThread:
    """Keeps BLAS to one thread while any search computes, since searches bring their own threads.

    The setting belongs to the process: two searches at once that each saved and restored it could
    leave it at 1, so it is the last one out that restores.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.limits: Any = None

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.limits = _blas().limit(limits=1, user_api="blas")
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.limits.restore_original_limits()


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    # Looking for loaded libraries takes milliseconds; numpy's own is there since its import.
    return ThreadpoolController()


_one_blas_thread = _OneBlasThread()

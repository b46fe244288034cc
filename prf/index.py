"""The dense index: building it from text or vectors, opening it, looking up and searching exactly.

A dense index is a folder that any tool can read:

    vectors.f32   raw little-endian float32, row major, one row per document
    docid         one docno per line, UTF-8, in row order (name and form as in Pyserini)
    texts.bin     optional: the texts one after another, UTF-8
    texts.idx     optional: int64 offsets into texts.bin, one more than there are documents
    meta.json     what it is, and sizes and checksums; written last

The score of a query and a document is *defined* as their exact inner product, correctly rounded to
float32. It is therefore one number, whatever the batch, threads, BLAS, back end, block size or k:
a fast float32 product only proposes candidates, with a margin no rounding error can exceed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from tqdm import tqdm

from prf.errors import (
    FileFormatError,
    FrameError,
    IndexStateError,
    PrfWarning,
    SpecError,
    did_you_mean,
    require,
    shorten,
)
from prf.frames import FloatArray, Hits, IntArray, ObjectArray

Similarity = Literal["dot", "cosine"]
OnEmpty = Literal["error", "skip", "keep"]
Backend = Literal["numpy", "faiss"]
WideArray = npt.NDArray[np.float64]
Item = TypeVar("Item")
Result = TypeVar("Result")

FORMAT = 1
BLOCK_BYTES = 32 * 2**20
"""Memory for the float32 scores of one block of documents, all queries of a group together."""

_GROUP = 512  # queries scored together: enough for the matrix product, few enough for long blocks
_PRODUCT_ROWS = 2048  # documents per matrix product: one thread's piece of a block
_RESCORE_ROWS = 4096  # documents widened to float64 at a time
_SPARE = 2**16  # candidates a query may hold above 2 k before they are settled exactly
_COPY_ROWS = 8192  # rows copied or measured at a time


# ---------------------------------------------------------------------------------------------
# Opening


def open_index(path: str | os.PathLike[str]) -> VectorIndex:
    """Opens a dense index; the same folder gives the same object until it is rebuilt.

    Nothing large is read: vectors are memory-mapped, docnos are read when first needed.

    Raises:
        IndexStateError: If it is missing, half built, of an unknown format, or if a file does not
            have the size that meta.json says.
    """
    folder = Path(path)
    try:
        stamp = (folder / "meta.json").stat().st_mtime_ns
    except OSError as error:
        raise IndexStateError(_missing(folder)) from error
    index = _open(str(folder.resolve()), stamp)
    _check_sizes(index.path, index.meta)  # reading past the end of a cut file kills the process
    return index


@lru_cache(maxsize=16)
def _open(path: str, stamp: int) -> VectorIndex:
    return VectorIndex(Path(path), _read_meta(Path(path)))


def verify(path: str | os.PathLike[str]) -> None:
    """Recomputes the checksums of all files of an index.

    Raises:
        IndexStateError: Naming the first file that differs or has no recorded checksum.
    """
    index = open_index(path)
    files = index.meta.get("files", {})
    for name in _file_names(index.has_text):
        recorded = files.get(name, {}).get("sha256")
        found = _sha256(index.path / name)
        if recorded != found:
            raise IndexStateError(
                f"index {index.path}: {name} has sha256 {found}, meta.json says {recorded}; "
                "the file was changed after the build, so build the index again"
            )


def _missing(folder: Path) -> str:
    progress = _building(folder) / "progress.json"
    if progress.exists():
        rows = _read_json(progress).get("rows", 0)
        return (
            f"index {folder} is incomplete: {rows:,} documents done; "
            "run `prf index` again to finish"
        )
    if folder.is_dir():
        return f"{folder} is no dense index: it has no meta.json; build one with `prf index`"
    return f"there is no index at {folder}; build it with `prf index`"


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, or an empty one if it holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _read_meta(folder: Path) -> dict[str, Any]:
    meta = _read_json(folder / "meta.json")
    if not meta or meta.get("kind") != "dense":
        raise IndexStateError(
            f"{folder}: meta.json is not that of a dense index "
            f"(kind {shorten(meta.get('kind'))}); build one with `prf index`"
        )
    if meta.get("format") != FORMAT:
        raise IndexStateError(
            f"index {folder} has format {shorten(meta.get('format'))}, this version reads "
            f"{FORMAT}; update prf or build the index again"
        )
    documents, dim = meta.get("documents"), meta.get("dim")
    if (
        meta.get("complete") is not True
        or not (isinstance(documents, int) and documents > 0)
        or not (isinstance(dim, int) and dim > 0)
        or meta.get("similarity") not in ("dot", "cosine")
    ):
        raise IndexStateError(
            f"index {folder}: meta.json does not describe a finished index (complete "
            f"{shorten(meta.get('complete'))}, documents {shorten(documents)}, dim {shorten(dim)}, "
            f"similarity {shorten(meta.get('similarity'))}); build it again"
        )
    return meta


def _check_sizes(folder: Path, meta: Mapping[str, Any]) -> None:
    files = meta.get("files", {})
    expected = {name: entry.get("bytes") for name, entry in files.items()}
    expected["vectors.f32"] = meta["documents"] * meta["dim"] * 4
    expected.setdefault("docid", None)
    if "texts.idx" in expected:
        expected["texts.idx"] = (meta["documents"] + 1) * 8
    for name, size in expected.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise IndexStateError(f"index {folder}: {name} is missing; build it again") from error
        if size is not None and found != size:
            raise IndexStateError(
                f"index {folder}: {name} has {found:,} bytes, {meta['documents']:,} documents "
                f"need {size:,}; the file was cut or exchanged, so build the index again"
            )


class VectorIndex:
    """An open dense index; get one from ``open_index``. Everything in it is read-only.

    Attributes:
        path: Its folder.
        meta: What meta.json says.
        vectors: (n, d) float32, memory-mapped.
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self.vectors: FloatArray = np.memmap(
            path / "vectors.f32", dtype="<f4", mode="r", shape=(meta["documents"], meta["dim"])
        )

    def __repr__(self) -> str:
        return f"VectorIndex({str(self.path)!r}: {len(self):,} x {self.dim}, {self.similarity})"

    def __len__(self) -> int:
        return int(self.meta["documents"])

    @property
    def n_docs(self) -> int:
        """The number of documents, at least 1."""
        return len(self)

    @property
    def dim(self) -> int:
        """The number of dimensions."""
        return int(self.meta["dim"])

    @property
    def similarity(self) -> Similarity:
        """``dot``, or ``cosine``: then vectors are stored at length 1 and queries brought to it."""
        return "cosine" if self.meta["similarity"] == "cosine" else "dot"

    @property
    def has_text(self) -> bool:
        """Whether the index stores the texts."""
        return "texts.bin" in self.meta.get("files", {})

    @cached_property
    def docnos(self) -> ObjectArray:
        """The docno of every row: (n,) of str.

        Raises:
            IndexStateError: If their number is not that of the vectors.
        """
        lines = (self.path / "docid").read_bytes().decode("utf-8").split("\n")
        if lines[-1] == "":
            lines.pop()
        if len(lines) != len(self):
            raise IndexStateError(
                f"index {self.path}: docid has {len(lines):,} lines for {len(self):,} vectors; "
                "build the index again"
            )
        return np.array(lines, dtype=object)

    @cached_property
    def docno_rank(self) -> IntArray:
        """The place of every row's docno in ascending text order: (n,) int64."""
        rank = np.empty(len(self), dtype=np.int64)
        rank[np.argsort(self.docnos, kind="stable")] = np.arange(len(self))
        return rank

    @cached_property
    def _row_of(self) -> dict[str, int]:
        row_of = dict(zip(self.docnos, range(len(self)), strict=True))
        if len(row_of) != len(self):
            raise IndexStateError(
                f"index {self.path}: docid holds {len(self) - len(row_of):,} docnos twice; "
                "build the index again"
            )
        return row_of

    @cached_property
    def max_norm(self) -> float:
        """The largest length of a document vector, from meta.json or measured once.

        Raises:
            IndexStateError: If a vector holds NaN or infinity.
        """
        norm = self.meta.get("max_norm")
        if isinstance(norm, float) and math.isfinite(norm):
            return norm
        norm = max(
            _longest(np.asarray(self.vectors[start : start + _COPY_ROWS]))
            for start in range(0, len(self), _COPY_ROWS)
        )
        if not math.isfinite(norm):
            raise IndexStateError(
                f"index {self.path}: a vector holds NaN or infinity; build the index again"
            )
        return norm

    def rows(self, docnos: Iterable[str]) -> IntArray:
        """Returns the row of each docno: (n,) int64, all in [0, n_docs).

        Raises:
            IndexStateError: Naming the first docno that the index does not hold.
        """
        row_of = self._row_of
        wanted = list(docnos)
        try:
            return np.fromiter((row_of[docno] for docno in wanted), np.int64, len(wanted))
        except KeyError as error:
            raise IndexStateError(
                f"index {self.path} has no docno {shorten(error.args[0])}; "
                "is it the index that these results came from?"
            ) from error

    def names(self, rows: npt.ArrayLike) -> ObjectArray:
        """Returns the docno of each row: (n,) of str.

        Raises:
            IndexStateError: For a row below 0 (FAISS's "none" among them) or past the end.
        """
        at = np.asarray(rows, dtype=np.int64)
        outside = np.flatnonzero((at < 0) | (at >= len(self)))
        if outside.size:
            raise IndexStateError(
                f"index {self.path} has no row {at[outside[0]]}; rows are 0 to {len(self) - 1:,}"
            )
        return np.asarray(self.docnos[at], dtype=object)

    def get(self, docnos: Iterable[str]) -> FloatArray:
        """Returns a copy of the documents' vectors as stored: (n, d) float32.

        Raises:
            IndexStateError: Naming the first docno that the index does not hold.
        """
        return np.asarray(np.asarray(self.vectors)[self.rows(docnos)], dtype=np.float32)

    def texts(self, docnos: Iterable[str]) -> list[str]:
        """Returns the documents' texts.

        Raises:
            IndexStateError: If the index stores none, or for a docno that it does not hold.
        """
        if not self.has_text:
            raise IndexStateError(
                f"index {self.path} stores no texts; build it with `--with-text` "
                "(with_text=True), or read them from the collection"
            )
        rows = self.rows(docnos)
        offsets = np.memmap(self.path / "texts.idx", dtype="<i8", mode="r", shape=(len(self) + 1,))
        texts = []
        with open(self.path / "texts.bin", "rb") as source:
            for start, stop in zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True):
                source.seek(start)
                texts.append(source.read(stop - start).decode("utf-8"))
        return texts

    def search(
        self,
        queries: FloatArray,
        k: int,
        *,
        threads: int = 0,
        backend: Backend = "numpy",
        block_bytes: int = BLOCK_BYTES,
    ) -> Hits:
        """Returns the k best documents of every query, exactly; fewer if the index is smaller.

        Args:
            queries: (n, d) float32; with cosine similarity brought to length 1 here, and a zero
                query stays zero. No queries give no hits.
            k: How many documents, at least 1.
            threads: 0 for all cores. Changes nothing but the time.
            backend: Who proposes the candidates. Changes nothing but the time.
            block_bytes: Memory for scores at any time. Changes nothing but the time.

        Raises:
            IndexStateError: If the queries have another number of dimensions than the index.
            FrameError: If a query holds NaN or infinity, or is so long that scores overflow.
            SpecError: For k below 1 or an unknown back end.
        """
        queries = self._checked(queries)
        if self.similarity == "cosine":
            queries = unit(queries)
        return top_k(
            np.asarray(self.vectors),
            queries,
            k,
            self.names,
            max_norm=self.max_norm,
            threads=threads,
            backend=backend,
            block_bytes=block_bytes,
        )

    def _checked(self, queries: FloatArray) -> FloatArray:
        if len(queries) == 0:
            return np.zeros((0, self.dim), dtype=np.float32)
        with np.errstate(over="ignore"):  # becomes an infinity, which is reported below
            queries = np.ascontiguousarray(queries, dtype=np.float32)
        if queries.ndim != 2:
            raise FrameError(
                f"search in {self.path}: queries have shape {queries.shape}; "
                f"give one row per query, (n, {self.dim})"
            )
        if queries.shape[1] != self.dim:
            encoder = self.meta.get("encoder") or {}
            built = encoder.get("model") or encoder.get("name") or "an encoder it does not name"
            raise IndexStateError(
                f"query vectors have {queries.shape[1]} dimensions, index {self.path} has "
                f"{self.dim} (built with {built}); encode the queries with the same model"
            )
        bad = np.flatnonzero(~np.isfinite(queries).all(axis=1))
        if bad.size:
            raise FrameError(
                f"search in {self.path}: the vector of query {bad[0]} (counted from 0) holds NaN "
                "or infinity; encode it again"
            )
        return queries


# ---------------------------------------------------------------------------------------------
# Exact search


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
    if k < 1:
        raise SpecError(f"search: k is {k}; it must be at least 1")
    if threads < 0:
        raise SpecError(f"search: threads is {threads}; give 0 for all cores, or their number")
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
    sizes = [np.diff(part.ptr) for part in parts]
    return Hits(
        np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int64),
        np.concatenate([np.zeros(0, np.int64), *(part.ids for part in parts)]),
        np.concatenate([np.zeros(0, np.float32), *(part.scores for part in parts)]),
    )


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
    block = group.vectors[start:stop]
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
    ids = joined & 0xFFFFFFFF
    ascending = ~(joined >> 32).astype(np.int32)
    scores = (ascending ^ ((ascending >> 31) & 0x7FFFFFFF)).view(np.float32)
    opens = np.append(True, ascending[1:] != ascending[:-1])
    opens[ends[:-1]] = True
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


# ---------------------------------------------------------------------------------------------
# Building


def build(
    path: str | os.PathLike[str],
    docs: Iterable[tuple[str, str]],
    encode: Callable[[Sequence[str]], FloatArray],
    *,
    encoder: Mapping[str, object],
    similarity: Similarity = "dot",
    with_text: bool = False,
    on_empty: OnEmpty = "error",
    shard_size: int = 4096,
    force: bool = False,
    progress: bool = False,
    total: int | None = None,
    source: str = "",
) -> dict[str, Any]:
    """Builds a dense index from (docno, text) pairs and returns its metadata.

    Documents are encoded ``shard_size`` at a time in the folder ``<path>.building``, which takes
    the name ``path`` when all is done. Stopped at any moment, even by a kill, a second call with
    the same input and options reads the input again, keeps the shards whose documents are still
    the same and goes on after them; the outcome is that of an uninterrupted build, byte for byte
    but for the date. Memory is that of one shard and the docnos.

    Args:
        path: The new folder.
        docs: (docno, text); read once.
        encode: Texts to (n, d) float vectors, called with one shard at a time.
        encoder: What describes ``encode``, for meta.json; must go into JSON.
        similarity: ``cosine`` stores vectors at length 1.
        with_text: Whether to store the texts too.
        on_empty: What to do with a missing or blank text: ``keep`` stores a zero vector.
        shard_size: Documents between two safe points.
        force: Whether to replace an index that is there.
        progress: Whether to show a bar on stderr.
        total: The number of documents, for the bar.
        source: Where the documents come from, for messages and meta.json.

    Raises:
        IndexStateError: If ``path`` exists, or another process is building it.
        FileFormatError: For no documents, a bad or repeated docno, or a text that is missing.
        FrameError: If ``encode`` returns another shape, NaN or infinity.
        SpecError: For an unknown option.
    """
    plan = _plan(encoder, similarity, with_text, on_empty, shard_size)
    reader = _Reader(on_empty, source or "documents")
    with _workplace(Path(path), force) as place:
        writer = _Writer(place, plan)
        try:
            with tqdm(total=total, unit="doc", disable=not progress) as bar:
                for shard in reader.shards(docs, shard_size):
                    writer.take(shard, encode)
                    bar.update(len(shard))
            writer.end(reader.where)
            meta = writer.finish(Path(path), source, force)
        finally:
            writer.close()
    reader.report()
    return meta


def build_from_vectors(
    path: str | os.PathLike[str],
    vectors: str | os.PathLike[str] | npt.NDArray[np.floating[Any]],
    ids: str | os.PathLike[str] | Sequence[str],
    *,
    similarity: Similarity = "dot",
    encoder: Mapping[str, object] | None = None,
    force: bool = False,
    source: str = "",
    texts: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Builds a dense index from vectors that are there already and returns its metadata.

    Args:
        path: The new folder; it appears when it is complete.
        vectors: (n, d) float array, or the .npy file of one, which is read piece by piece.
        ids: n docnos, or a text file with one a line (the whole line is the docno).
        similarity: ``cosine`` stores vectors at length 1.
        encoder: What made the vectors, for meta.json, if known.
        force: Whether to replace an index that is there.
        source: Where they come from, for messages and meta.json.
        texts: n texts to store, or None.

    Raises:
        IndexStateError: If ``path`` exists, or another process is building it.
        FileFormatError: If numbers of vectors, docnos and texts differ, a docno is bad or repeated,
            there are none, or a vector holds NaN or infinity.
    """
    plan = _plan(encoder, similarity, texts is not None, "keep", _COPY_ROWS)
    array, where = _vectors_of(vectors)
    names = _ids_of(ids)
    for what, count in (("docnos", len(names)), ("texts", len(array if texts is None else texts))):
        if count != len(array):
            raise FileFormatError(
                f"{where}: {len(array):,} vectors but {count:,} {what}; give one for each vector"
            )
    reader = _Reader("keep", where if isinstance(ids, (list, tuple, np.ndarray)) else str(ids))
    with _workplace(Path(path), force) as place:
        writer = _Writer(place, plan, resume=False)
        try:
            pairs = (
                (name, texts[row] if texts is not None else "") for row, name in enumerate(names)
            )
            for shard in reader.shards(pairs, _COPY_ROWS):
                rows = slice(writer.rows, writer.rows + len(shard))
                writer.append(shard, _finite(array[rows], shard, FileFormatError, where))
            writer.end(where)
            meta = writer.finish(Path(path), source, force)
        finally:
            writer.close()
    reader.report()
    return meta


def _plan(
    encoder: Mapping[str, object] | None,
    similarity: str,
    with_text: bool,
    on_empty: str,
    shard_size: int,
) -> dict[str, Any]:
    """Returns what decides the bytes of an index besides the documents, as JSON gives it back."""
    for name, value, known in (
        ("similarity", similarity, ("dot", "cosine")),
        ("on_empty", on_empty, ("error", "skip", "keep")),
    ):
        if value not in known:
            raise SpecError(
                f"index: {name} is {shorten(value)}; one of {', '.join(known)}"
                f"{did_you_mean(str(value), known)}"
            )
    if shard_size < 1:
        raise SpecError(f"index: shard_size is {shard_size}; it must be at least 1")
    plan = {
        "encoder": None if encoder is None else dict(encoder),
        "similarity": similarity,
        "with_text": bool(with_text),
        "on_empty": on_empty,
        "shard_size": int(shard_size),
    }
    try:
        back: dict[str, Any] = json.loads(json.dumps(plan))
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"index: the encoder's description does not go into JSON: {error}"
        ) from error
    return back


def _vectors_of(
    vectors: str | os.PathLike[str] | npt.NDArray[np.floating[Any]],
) -> tuple[npt.NDArray[np.floating[Any]], str]:
    if isinstance(vectors, np.ndarray):
        array, where = vectors, "vectors"
    else:
        where = str(vectors)
        try:
            array = np.load(Path(vectors), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise FileFormatError(f"{where}: not a .npy file of numbers: {error}") from error
    if array.ndim != 2 or 0 in array.shape or not np.issubdtype(array.dtype, np.floating):
        raise FileFormatError(
            f"{where}: {array.dtype} of shape {array.shape}; "
            "vectors are floats of shape (documents, dimensions), both at least 1"
        )
    return array, where


def _ids_of(ids: str | os.PathLike[str] | Sequence[str]) -> Sequence[str]:
    if not isinstance(ids, (str, os.PathLike)):
        return ids
    try:
        lines = Path(ids).read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{os.fspath(ids)}: cannot read docnos: {error}") from error
    return lines[:-1] if lines[-1] == "" else lines


Shard = list[tuple[str, str]]


class _Reader:
    """Checks documents as they come: docnos good and unique, texts there."""

    def __init__(self, on_empty: str, where: str) -> None:
        self.on_empty, self.where = on_empty, where
        self.seen: dict[str, None] = {}
        self.spaced: list[str] = []
        self.spaced_count = 0

    def shards(self, docs: Iterable[tuple[str, str]], size: int) -> Iterator[Shard]:
        shard: Shard = []
        for doc in docs:
            shard.append(self._checked(doc))
            if len(shard) == size:
                yield shard
                shard = []
        if shard:
            yield shard

    def _checked(self, doc: tuple[str, str]) -> tuple[str, str]:
        position = len(self.seen) + 1
        try:
            docno, text = doc
        except (TypeError, ValueError) as error:
            raise FileFormatError(
                f"{self.where}: document {position} is {shorten(doc)}; give pairs of docno and text"
            ) from error
        self._check_docno(docno, position)
        if text is None or (isinstance(text, float) and math.isnan(text)):
            text = ""
        if not isinstance(text, str):
            raise FileFormatError(
                f"{self.where}: the text of document {position} (docno {shorten(docno)}) is "
                f"{shorten(text)}, not text"
            )
        if self.on_empty == "error" and not text.strip():
            raise FileFormatError(
                f"{self.where}: document {position} (docno {shorten(docno)}) has no text; "
                "correct it, or choose --on-empty skip or keep"
            )
        return docno, text

    def _check_docno(self, docno: str, position: int) -> None:
        if not isinstance(docno, str) or not docno or "\n" in docno or "\r" in docno:
            raise FileFormatError(
                f"{self.where}: the docno of document {position} is {shorten(docno)}; "
                "a docno is text on one line, not empty"
            )
        if docno in self.seen:
            first = next(at for at, name in enumerate(self.seen, start=1) if name == docno)
            raise FileFormatError(
                f"{self.where}: docno {shorten(docno)} stands at documents {first} and {position}; "
                "docnos must be unique, so drop one or rename it"
            )
        _utf8(docno, docno)
        self.seen[docno] = None
        if docno.split() != [docno]:
            self.spaced_count += 1
            self.spaced = self.spaced or [docno]

    def report(self) -> None:
        if self.spaced:
            warnings.warn(
                f"{self.where}: {self.spaced_count:,} of {len(self.seen):,} docnos have white "
                f"space, such as {shorten(self.spaced[0])}; run files cannot hold them",
                PrfWarning,
                stacklevel=3,
            )


class _Point(NamedTuple):
    """Where the files stand after a shard, and the documents that led there."""

    sha256: str
    rows: int
    docid: int
    texts: int
    max_norm: float
    empty: int


_START = _Point("", 0, 0, 0, 0.0, 0)


class _Writer:
    """The growing files of an index; after every shard they are safe and can be gone back to."""

    def __init__(self, place: Path, plan: dict[str, Any], resume: bool = True) -> None:
        self.place, self.plan = place, plan
        self.folder = place / "index"
        self.dim = 0
        self.points: list[_Point] = []
        self.checked = 0  # shards of the input so far that are those of the interrupted build
        self.resuming = False
        self._load(resume)
        self.folder.mkdir(exist_ok=True)
        self.files: dict[str, BinaryIO] = {
            name: open(self.folder / name, "ab") for name in _file_names(plan["with_text"])
        }

    @property
    def rows(self) -> int:
        return self._last().rows

    def _last(self) -> _Point:
        return self.points[-1] if self.points else _START

    def _load(self, resume: bool) -> None:
        """Takes up an interrupted build, or clears the folder if it cannot be continued."""
        note = self.place / "progress.json"
        if note.exists():
            state = _read_json(note)
            why = self._obstacle(state) if resume else "is replaced by ready vectors"
            if not why:
                self.points = [_Point(*point) for point in state["shards"]]
                self.dim = state["dim"]
                self.resuming = True
                return
            warnings.warn(
                f"index {self.place}: an unfinished build of {state.get('rows', 0):,} documents "
                f"{why}; starting from zero",
                PrfWarning,
                stacklevel=4,
            )
            note.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _obstacle(self, state: Mapping[str, Any]) -> str:
        """Returns why an interrupted build cannot be continued, or an empty string."""
        try:
            if state["format"] != FORMAT or state["plan"] != self.plan:
                return f"had other options ({_difference(state['plan'], self.plan)})"
            last = [_START, *(_Point(*point) for point in state["shards"])][-1]
            sizes = _sizes(last, state["dim"], self.plan["with_text"])
            if any((self.folder / name).stat().st_size < size for name, size in sizes.items()):
                return "has lost part of its files"
        except OSError:
            return "has lost part of its files"
        except (AttributeError, KeyError, TypeError):
            return "left an unreadable progress.json"
        return ""

    def take(self, shard: Shard, encode: Callable[[Sequence[str]], FloatArray]) -> None:
        """Writes the next shard, unless the interrupted build has done so already."""
        digest = _digest(shard)
        if self.resuming:
            if self.checked < len(self.points) and self.points[self.checked].sha256 == digest:
                self.checked += 1
                return
            self._rewind()
        kept = [doc for doc in shard if self.plan["on_empty"] != "skip" or doc[1].strip()]
        vectors = np.zeros((0, self.dim), dtype=np.float32)
        if kept:
            vectors = _encoded(encode, kept, self.dim)
        self.append(kept, vectors, digest, len(shard) - len(kept))
        self._sync()
        self._note()

    def _rewind(self) -> None:
        """Goes back to the last shard that the input still has, and stops comparing."""
        self.resuming = False
        if self.checked < len(self.points):
            lost = self.rows
            del self.points[self.checked :]
            kept = f"keeping the first {self.rows:,}" if self.rows else "starting from zero"
            warnings.warn(
                f"index {self.place}: the documents are no longer those of the unfinished build "
                f"of {lost:,}; {kept}",
                PrfWarning,
                stacklevel=4,
            )
            # Noted before the files change, or a kill here would leave new bytes under old hashes.
            self._note()
        for name, size in _sizes(self._last(), self.dim, self.plan["with_text"]).items():
            self.files[name].truncate(size)
        if not self.rows:
            self.dim = 0

    def append(self, docs: Shard, vectors: FloatArray, digest: str = "", skipped: int = 0) -> None:
        """Appends documents and their vectors, and notes the new state."""
        if self.plan["similarity"] == "cosine":
            vectors = unit(vectors)
        last = self._last()
        if docs:
            self.dim = vectors.shape[1]
        self.files["vectors.f32"].write(np.ascontiguousarray(vectors, dtype="<f4").data)
        names = "".join(f"{docno}\n" for docno, _ in docs).encode("utf-8")
        self.files["docid"].write(names)
        text_bytes = 0
        if self.plan["with_text"]:
            texts = [_utf8(docno, text) for docno, text in docs]
            ends = last.texts + np.cumsum([len(text) for text in texts], dtype="<i8")
            first = np.zeros(0 if self.points else 1, dtype="<i8")
            self.files["texts.bin"].write(b"".join(texts))
            self.files["texts.idx"].write(np.concatenate([first, ends]).astype("<i8").tobytes())
            text_bytes = sum(len(text) for text in texts)
        blank = sum(not text.strip() for _, text in docs) if digest else 0
        self.points.append(
            _Point(
                digest,
                last.rows + len(docs),
                last.docid + len(names),
                last.texts + text_bytes,
                max(last.max_norm, _longest(vectors)),
                last.empty + blank + skipped,
            )
        )

    def _sync(self) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())

    def _note(self) -> None:
        """Replaces progress.json by the present state."""
        state = {"format": FORMAT, "plan": self.plan, "dim": self.dim, "rows": self.rows}
        _write_json(self.place / "progress.json", {**state, "shards": self.points}, indent=None)

    def end(self, where: str) -> None:
        """Notes that there are no more documents.

        Raises:
            FileFormatError: If there were none at all; an interrupted build is left as it is.
        """
        if not (self.checked if self.resuming else self.points):
            raise FileFormatError(f"{where}: no documents; is it the right file and format?")
        if self.resuming:
            self._rewind()
        if not self.rows:
            raise FileFormatError(f"{where}: all {self._last().empty:,} documents have no text")

    def finish(self, path: Path, source: str, force: bool) -> dict[str, Any]:
        """Writes meta.json and gives the folder its name; returns the metadata."""
        self._sync()
        self.close()
        last = self._last()
        sizes = _sizes(last, self.dim, self.plan["with_text"])
        meta = {
            "format": FORMAT,
            "kind": "dense",
            "complete": True,
            "documents": last.rows,
            "dim": self.dim,
            **{name: self.plan[name] for name in ("similarity", "encoder")},
            "empty_documents": last.empty,
            "max_norm": last.max_norm,
            "source": source,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            "files": {
                name: {"bytes": size, "sha256": _sha256(self.folder / name)}
                for name, size in sizes.items()
            },
        }
        _write_json(self.folder / "meta.json", meta, indent=2)
        _refuse_existing(path, force)  # somebody may have put something there meanwhile
        if path.exists():
            shutil.rmtree(self.place / "old", ignore_errors=True)
            os.rename(path, self.place / "old")
        os.rename(self.folder, path)
        _sync_folder(path.parent)
        (self.place / "progress.json").unlink(missing_ok=True)
        return meta

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _encoded(encode: Callable[[Sequence[str]], FloatArray], docs: Shard, dim: int) -> FloatArray:
    """Returns the vectors of some documents after checking them; blank texts get zeros."""
    vectors = encode([text for _, text in docs])
    shape = np.shape(vectors)
    wanted = (len(docs), dim) if dim else (len(docs), shape[1] if len(shape) == 2 else 0)
    if shape != wanted or 0 in shape or not np.issubdtype(np.asarray(vectors).dtype, np.floating):
        raise FrameError(
            f"encoder returned {np.asarray(vectors).dtype} of shape {shape} for {len(docs)} texts "
            f"(docnos {shorten(docs[0][0])} to {shorten(docs[-1][0])}); expected floats of shape "
            f"({len(docs)}, {dim or 'dimensions'})"
        )
    out = np.array(vectors, copy=True)
    out[[not text.strip() for _, text in docs]] = 0
    return _finite(out, docs, FrameError, "encoder")


def _finite(
    vectors: npt.NDArray[np.floating[Any]],
    docs: Shard,
    kind: type[FrameError] | type[FileFormatError],
    where: str,
) -> FloatArray:
    """Returns the vectors as float32 if all are finite in it."""
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(vectors, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(out).all(axis=1))
    if bad.size:
        raise kind(
            f"{where}: the vector of docno {shorten(docs[bad[0]][0])} holds NaN, infinity or a "
            "number too large for float32; encode it again"
        )
    return out


def _longest(vectors: FloatArray) -> float:
    """Returns the largest Euclidean length of a row, 0 without rows."""
    wide = vectors.astype(np.float64)
    return math.sqrt(float((wide * wide).sum(axis=1).max(initial=0.0)))


def _utf8(docno: str, text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FileFormatError(
            f"the docno or text of {shorten(docno)} is not valid Unicode: {error}; repair it"
        ) from error


def _digest(shard: Shard) -> str:
    """Returns the SHA-256 of docnos and texts; lengths keep the borders unambiguous."""
    sha = hashlib.sha256()
    for docno, text in shard:
        sha.update(f"{len(docno)},{len(text)},{docno}{text}".encode("utf-8", "surrogatepass"))
    return sha.hexdigest()


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    name = next((name for name in new if old.get(name) != new[name]), "format")
    return f"{name} {shorten(old.get(name))}, now {shorten(new.get(name))}"


def _file_names(with_text: bool) -> list[str]:
    return ["vectors.f32", "docid", *(["texts.bin", "texts.idx"] if with_text else [])]


def _sizes(point: _Point, dim: int, with_text: bool) -> dict[str, int]:
    sizes = {"vectors.f32": point.rows * dim * 4, "docid": point.docid}
    if with_text:
        # The first shard, even if all of it was skipped, writes the offset 0 as well.
        offsets = point.rows + (point is not _START)
        sizes |= {"texts.bin": point.texts, "texts.idx": offsets * 8}
    return sizes


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("prf-ir")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {"prf-ir": own, "numpy": np.__version__, "python": platform.python_version()}


def _sha256(path: Path) -> str:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _write_json(path: Path, data: Mapping[str, Any], indent: int | None) -> None:
    """Replaces a JSON file in one step, and not before its content is on disk."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "w", encoding="utf-8", newline="\n") as out:
        json.dump(data, out, indent=indent, ensure_ascii=False)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _building(path: Path) -> Path:
    path = path.absolute()
    return path.with_name(f"{path.name}.building")


@contextmanager
def _workplace(path: Path, force: bool) -> Iterator[Path]:
    """Gives the locked folder in which ``path`` is built; without progress it is removed again."""
    _refuse_existing(path, force)
    place = _building(path)
    lock = _lock(place)
    try:
        _refuse_existing(path, force)  # another build may have finished in between
        yield place
    finally:
        if not (place / "progress.json").exists():
            _remove(place)
        lock.close()


def _remove(place: Path) -> None:
    """Removes a working folder, the lock last: until then nobody else begins in it."""
    for entry in place.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != "lock":
            entry.unlink()
    with suppress(OSError):  # another build may have begun, or the system keeps open files
        (place / "lock").unlink()
        place.rmdir()


def _refuse_existing(path: Path, force: bool) -> None:
    if not path.exists():
        return
    if not force:
        raise IndexStateError(f"{path} exists; choose another name, or force to replace it")
    ours = _read_json(path / "meta.json").get("kind") == "dense"
    if not ours and not (path.is_dir() and not any(path.iterdir())):
        raise IndexStateError(
            f"{path} exists and is no dense index, so it is not replaced; remove it yourself"
        )


def _lock(place: Path) -> BinaryIO:
    """Locks a folder for this process; the system frees the lock when the process dies."""
    while True:
        place.mkdir(parents=True, exist_ok=True)
        try:
            file = open(place / "lock", "ab")
        except FileNotFoundError:
            continue  # another build has just finished and removed the folder
        if not _try_lock(file):
            file.close()
            raise IndexStateError(
                f"another process is building in {place}; wait for it, or choose another name"
            )
        try:
            if os.path.samestat(os.fstat(file.fileno()), os.stat(place / "lock")):
                return file
        except FileNotFoundError:
            pass
        file.close()  # we locked what another build has just removed; try again


def _try_lock(file: BinaryIO) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True

"""The dense index: opening it, looking up vectors, texts and docnos, and searching exactly.

A dense index is a folder that any tool can read:

    vectors.f32   raw little-endian float32, row major, one row per document
    docid         one docno per line, UTF-8, in row order (name and form as in Pyserini)
    texts.bin     optional: the texts one after another, UTF-8
    texts.idx     optional: int64 offsets into texts.bin, one more than there are documents
    faiss-*.index optional: FAISS indexes of the vectors (`prf.faiss_index`)
    meta.json     what it is, and sizes and checksums; written last

Folders of Pyserini (FAISS) and pyterrier_dr (FlexIndex) open as well (`prf.foreign`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from prf.errors import FrameError, IndexStateError, PrfWarning, SpecError, shorten
from prf.foreign import Decoded, Foreign, foreign_files, read_foreign
from prf.frames import FloatArray, Hits, IntArray, ObjectArray
from prf.knn import BLOCK_BYTES, Backend, exact_scores, top_k, unit
from prf.prebuilt import local_path

Similarity = Literal["dot", "cosine"]
"""What an index is built for. A foreign one may also be of FAISS's L2, which is not searched."""

FORMAT = 1
COPY_ROWS = 8192
"""Rows copied or measured at a time."""


def open_index(path: str | os.PathLike[str]) -> VectorIndex:
    """Opens a dense index; the same folder gives the same object until it is rebuilt.

    Nothing large is read: vectors are memory-mapped, docnos are read when first needed. Only those
    of a coded FAISS index of Pyserini's (PQ, SQ, ...) are decoded as they are needed.

    Args:
        path: Our folder, one of Pyserini's (``index``, ``docid``) or pyterrier_dr's (FlexIndex), or
            ``pyserini:NAME`` for a prebuilt one that was downloaded.

    Raises:
        IndexStateError: If it is missing, half built, of an unknown format, or if a file does not
            have the size that meta.json says.
    """
    folder = local_path(path)
    if not (folder / "meta.json").exists() and (files := foreign_files(folder)):
        return _open_foreign(str(folder.resolve()), _stamps(folder, files))
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


def _stamps(folder: Path, files: Iterable[Path]) -> tuple[tuple[int, int], ...]:
    try:
        states = [file.stat() for file in files]
    except OSError as error:
        name = Path(str(error.filename)).name
        raise IndexStateError(
            f"index {folder}: {name} is missing; copy the folder again"
        ) from error
    return tuple((state.st_mtime_ns, state.st_size) for state in states)


@lru_cache(maxsize=16)
def _open_foreign(path: str, stamps: tuple[tuple[int, int], ...]) -> VectorIndex:
    found = read_foreign(Path(path))
    return VectorIndex(Path(path), found.meta, found)


def verify(path: str | os.PathLike[str]) -> None:
    """Recomputes the checksums of all files of an index; one of another library is only read.

    Raises:
        IndexStateError: Naming the first file that differs or has no recorded checksum.
    """
    index = open_index(path)
    if index.meta.get("form"):
        index.rows(index.docnos[:1])  # docnos as many as vectors, and none twice
        _ = index.max_norm
        return
    files = index.meta.get("files", {})
    checksums = {name: files.get(name, {}).get("sha256") for name in file_names(index.has_text)}
    checksums |= {e.get("file"): e.get("sha256") for e in index.meta.get("faiss", {}).values()}
    for name, recorded in checksums.items():
        try:
            found = sha256_of(index.path / name)
        except FileNotFoundError as error:
            raise IndexStateError(
                f"index {index.path}: {name} is missing; build it again"
            ) from error
        if recorded != found:
            raise IndexStateError(
                f"index {index.path}: {name} has sha256 {found}, meta.json says {recorded}; "
                "the file was changed after the build, so build the index again"
            )


def _missing(folder: Path) -> str:
    progress = building_folder(folder) / "progress.json"
    if progress.exists():
        rows = read_json(progress).get("rows", 0)
        return (
            f"index {folder} is incomplete: {rows:,} documents done; "
            "run `prf index` again to finish"
        )
    if folder.is_dir():
        return f"{folder} is no dense index: it has no meta.json; build one with `prf index`"
    return f"there is no index at {folder}; build it with `prf index`"


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, or an empty one if it holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _read_meta(folder: Path) -> dict[str, Any]:
    meta = read_json(folder / "meta.json")
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
        vectors: (n, d) float32, memory-mapped; or what decodes them, by rows.
    """

    def __init__(self, path: Path, meta: dict[str, Any], foreign: Foreign | None = None) -> None:
        self.path = path
        self.meta = meta
        self._foreign = foreign
        self._told = False
        self.vectors: FloatArray | Decoded = (
            np.memmap(
                path / "vectors.f32", dtype="<f4", mode="r", shape=(meta["documents"], meta["dim"])
            )
            if foreign is None
            else foreign.vectors
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
    def table(self) -> FloatArray:
        """The vectors, to be cut and indexed by rows, without the notice of `get`."""
        table: Any = self.vectors if isinstance(self.vectors, Decoded) else np.asarray(self.vectors)
        found: FloatArray = table  # `Decoded` answers all that is asked of it
        return found

    @property
    def lossy(self) -> bool:
        """Whether vectors are decoded from codes (PQ, SQ, ...), so not quite the encoder's."""
        return bool(self.meta.get("lossy"))

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
        if self._foreign is not None:
            lines = self._foreign.docnos()
        else:
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
            longest(np.asarray(self.vectors[start : start + COPY_ROWS]))
            for start in range(0, len(self), COPY_ROWS)
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

        Warns:
            PrfWarning: Once, if they are decoded from a lossy FAISS type.
        """
        if self.lossy and not self._told:
            self._told = True
            warnings.warn(
                f"index {self.path} stores coded vectors: those given back are decoded and not "
                "quite the encoder's; feedback from them differs a little from feedback from a "
                "flat index",
                PrfWarning,
                stacklevel=2,
            )
        return np.asarray(self.table[self.rows(docnos)], dtype=np.float32)

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
        queries = self.checked(queries)
        if self.similarity == "cosine":
            queries = unit(queries)
        return top_k(
            self.table,
            queries,
            k,
            self.names,
            max_norm=self.max_norm,
            threads=threads,
            backend=backend,
            block_bytes=block_bytes,
        )

    def score(self, queries: FloatArray, docnos: Sequence[Iterable[str]]) -> FloatArray:
        """Returns the scores of given documents, query after query: those that `search` gives.

        Args:
            queries: (n, d) float32; with cosine similarity brought to length 1 here.
            docnos: For each query, the documents to score.

        Raises:
            IndexStateError: Naming the first docno that the index does not hold, or if the queries
                have another number of dimensions than the index.
            FrameError: If a query holds NaN or infinity, or is so long that scores overflow.
        """
        queries = self.checked(queries)
        if self.similarity == "cosine":
            queries = unit(queries)
        rows = [self.rows(names) for names in docnos]
        return exact_scores(self.table, queries, rows, max_norm=self.max_norm)

    def checked(self, queries: FloatArray) -> FloatArray:
        """Returns queries that fit this index: (n, d) float32, finite, C-contiguous.

        Raises:
            IndexStateError: If they have another number of dimensions.
            FrameError: If they are no table, or one holds NaN or infinity.
            SpecError: If the index is of L2 distances, which are no scores.
        """
        if self.meta["similarity"] == "l2":
            raise SpecError(
                f"index {self.path} is of FAISS's L2 distance, and only inner products are "
                "searched here; build a dense index from its vectors"
            )
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


def file_names(with_text: bool) -> list[str]:
    """Returns the files of an index besides meta.json."""
    return ["vectors.f32", "docid", *(["texts.bin", "texts.idx"] if with_text else [])]


def sha256_of(path: Path) -> str:
    """Returns the checksum of a file, in hexadecimal."""
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def building_folder(path: Path) -> Path:
    """Returns where an index is built before it gets its name."""
    path = path.absolute()
    return path.with_name(f"{path.name}.building")


def longest(vectors: FloatArray) -> float:
    """Returns the largest Euclidean length of a row, 0 without rows."""
    wide = vectors.astype(np.float64)
    return math.sqrt(float((wide * wide).sum(axis=1).max(initial=0.0)))

"""Dense index folders that other libraries made, opened in place.

    Pyserini    index, docid                        a FAISS index of any type, and its docnos
    FlexIndex   vecs.f4, docnos.npids, pt_meta.json  pyterrier_dr's; vectors as ours

Vectors are memory-mapped where they lie in the file as float32; those of coded FAISS types (PQ, SQ,
...) are decoded as they are asked for, and are not the encoder's any more.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from prf.errors import IndexStateError, require, shorten
from prf.frames import FloatArray, IntArray

_FLAT = {b"IxFI": 0, b"IxF2": 1, b"IxFl": None}
_HEADER = struct.Struct("<4siqqq?iQ")


class Decoded:
    """The vectors of a coded FAISS index, decoded on demand: like (n, d) float32, read-only."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self.shape: tuple[int, int] = (int(index.ntotal), int(index.d))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: IntArray | slice | SupportsIndex) -> FloatArray:
        """Returns the vectors of these rows; (d,) for one."""
        at = np.arange(len(self))[rows]
        if at.ndim == 0:
            one: FloatArray = self[at.reshape(1)][0]
            return one
        if not len(at):
            return np.zeros((0, self.shape[1]), dtype=np.float32)
        out: FloatArray = self._index.reconstruct_batch(np.ascontiguousarray(at, dtype=np.int64))
        return out


@dataclass(frozen=True)
class Foreign:
    """What an index is made of: as meta.json would say it, vectors, and how to read its docnos."""

    meta: dict[str, Any]
    vectors: FloatArray | Decoded
    docnos: Callable[[], list[str]]


def foreign_files(folder: Path) -> list[Path]:
    """Returns the files of an index of another library in a folder; none if it holds no such."""
    for names in (("index", "docid"), ("pt_meta.json", "vecs.f4", "docnos.npids")):
        if (folder / names[0]).is_file() and (folder / names[1]).is_file():
            return [folder / name for name in names]
    return []


def read_foreign(folder: Path) -> Foreign:
    """Opens a folder of Pyserini or of pyterrier_dr.

    Raises:
        IndexStateError: If a file is missing, damaged, or does not fit the others.
        MissingDependency: Without FAISS, or without the package that reads a FlexIndex's docnos.
    """
    if (folder / "index").is_file():
        return _pyserini(folder)
    return _flex(folder)


def _pyserini(folder: Path) -> Foreign:
    flat = _flat_vectors(folder / "index")
    vectors: FloatArray | Decoded
    if flat is not None:
        vectors, metric = flat
        lossy = False
    else:
        faiss = require("faiss", "cpu", f"index {folder}")
        made = read_faiss(folder / "index")
        lists = faiss.try_extract_index_ivf(made)
        if lists is not None:
            lists.make_direct_map(True)  # rows to places in lists; without it none is found again
        vectors, metric, lossy = Decoded(made), int(made.metric_type), _lossy(faiss, made)
        _check_decodes(vectors, folder)
    if not len(vectors):
        raise IndexStateError(f"index {folder} holds no vectors")
    similarity = {0: "dot", 1: "l2"}.get(metric)
    if similarity is None:
        raise IndexStateError(
            f"index {folder} has FAISS's metric {metric}; only inner product and L2 are known"
        )
    meta = _meta("Pyserini", vectors, similarity, lossy)
    meta["faiss"] = {"index": {"file": "index", "factory": "", "parameters": {}}}
    return Foreign(meta, vectors, lambda: _lines(folder / "docid"))


def _meta(form: str, vectors: FloatArray | Decoded, similarity: str, lossy: bool) -> dict[str, Any]:
    return {
        "kind": "dense",
        "form": form,
        "documents": len(vectors),
        "dim": int(vectors.shape[1]),
        "similarity": similarity,
        "lossy": lossy,
        "encoder": None,
        "empty_documents": 0,
    }


def _flat_vectors(file: Path) -> tuple[FloatArray, int] | None:
    """Returns the memory-mapped vectors and the metric of a flat FAISS index, else None.

    The header is: kind, dimensions, rows, two fillers, whether trained, metric, number of floats.
    """
    with open(file, "rb") as source:
        head = source.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:4] not in _FLAT:
        return None
    kind, dim, rows, _, _, _, metric, floats = _HEADER.unpack(head)
    expected = _FLAT[kind]
    if (expected is not None and metric != expected) or metric not in (0, 1):
        return None
    size = os.path.getsize(file)
    if dim < 1 or rows < 0 or floats != dim * rows or size != _HEADER.size + 4 * floats:
        raise IndexStateError(
            f"{file} has {size:,} bytes, {rows:,} x {dim} vectors need "
            f"{_HEADER.size + 4 * dim * rows:,}; the file was cut or is of an unknown version"
        )
    if not floats:
        return np.zeros((0, dim), dtype=np.float32), metric
    offset = _HEADER.size
    table = np.memmap(file, dtype="<f4", mode="r", offset=offset, shape=(rows, dim))
    return table, metric


def read_faiss(file: Path) -> Any:
    """Returns the FAISS index of a file, memory-mapped as far as its type allows.

    Raises:
        IndexStateError: If FAISS cannot read it.
        MissingDependency: Without FAISS.
    """
    faiss = require("faiss", "cpu", f"FAISS index {file}")
    try:
        return faiss.read_index(str(file), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
    except RuntimeError as error:
        raise IndexStateError(
            f"FAISS {faiss.__version__} cannot read {file}: {faiss_error(error)}; "
            "was it cut, or made by a newer version?"
        ) from error


def faiss_error(error: RuntimeError) -> str:
    """Returns the part of FAISS's message that is for users."""
    return str(error).rpartition("Error: ")[2].splitlines()[0].strip()[:200]


def parts(faiss: Any, index: Any) -> Iterator[Any]:
    """Yields a FAISS index and those inside it: after a transform, in a graph, of the lists."""
    index = faiss.downcast_index(index)
    yield index
    for name in ("index", "storage", "quantizer", "base_index", "refine_index"):
        inner = getattr(index, name, None)
        if isinstance(inner, faiss.Index):
            yield from parts(faiss, inner)


def _lossy(faiss: Any, made: Any) -> bool:
    """Whether vectors come back changed: exact are only flat ones, also in lists or a graph."""
    index = faiss.downcast_index(made)
    if isinstance(index, faiss.IndexHNSW):
        index = faiss.downcast_index(index.storage)
    return not isinstance(index, (faiss.IndexFlat, faiss.IndexIVFFlat))


def _check_decodes(vectors: Decoded, folder: Path) -> None:
    try:
        vectors[:1]
    except RuntimeError as error:
        raise IndexStateError(
            f"index {folder}: its FAISS type gives no vectors back: {faiss_error(error)}"
        ) from error


def _lines(file: Path) -> list[str]:
    lines = file.read_bytes().decode("utf-8").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _flex(folder: Path) -> Foreign:
    try:
        meta = json.loads((folder / "pt_meta.json").read_text(encoding="utf-8"))
        known = meta["type"], meta["format"]
        rows, dim = int(meta["doc_count"]), int(meta["vec_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IndexStateError(
            f"{folder}: pt_meta.json is not that of a FlexIndex: {shorten(str(error))}"
        ) from error
    if known != ("dense_index", "flex") or rows < 1 or dim < 1:
        raise IndexStateError(
            f"{folder}: pt_meta.json says {shorten(meta)}; no FlexIndex, or empty"
        )
    size, needed = os.path.getsize(folder / "vecs.f4"), 4 * rows * dim
    if size != needed:
        raise IndexStateError(
            f"index {folder}: vecs.f4 has {size:,} bytes, {rows:,} x {dim} vectors need {needed:,}"
        )
    table = np.memmap(folder / "vecs.f4", dtype="<f4", mode="r", shape=(rows, dim))
    return Foreign(
        _meta("pyterrier_dr", table, "dot", False), table, lambda: _npids(folder / "docnos.npids")
    )


def _npids(file: Path) -> list[str]:
    npids = require("npids", "flex", f"docnos of {file}")
    try:
        return [str(name) for name in npids.Lookup(str(file))]
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise IndexStateError(f"{file} cannot be read: {error}; was it cut?") from error

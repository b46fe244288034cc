"""Building indexes from documents: what ``prf index`` calls, and the way to do it from Python."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from prf import dense_build, lucene_build
from prf.checkpoints import weights_digest
from prf.dense_build import OnEmpty
from prf.encode import load_encoder
from prf.encoders import Encoder, Layouts, Precision
from prf.errors import IndexStateError, PrfWarning
from prf.frames import FloatArray, IntArray
from prf.index import Similarity
from prf.trec import PathLike, read_docs
from prf.vectors_io import read_vectors_jsonl

Documents = PathLike | Iterable[tuple[str, str]]
"""A document file, an ``ir_datasets:`` name, or (docno, text) pairs."""


def read_first(docs: Documents, fields: Sequence[str]) -> tuple[Iterable[tuple[str, str]], str]:
    """Returns the documents, the first of them read, and their file's name."""
    if not isinstance(docs, (str, os.PathLike)):
        return docs, ""
    # A wrong path or format shows here, before Java or a model takes its time to start.
    pairs = iter(read_docs(docs, fields))
    return chain(list(islice(pairs, 1)), pairs), os.fspath(docs)


def refuse_existing(path: PathLike, force: bool) -> None:
    """Raises if the folder is there and may not be replaced, before any work."""
    if os.path.exists(path) and not force:
        raise IndexStateError(
            f"index '{os.fspath(path)}' exists; choose another name or overwrite it (--force)"
        )


def build_lucene(
    path: PathLike,
    docs: Documents,
    *,
    fields: Sequence[str] = (),
    on_empty: OnEmpty = "error",
    force: bool = False,
    progress: bool = False,
    threads: int = 0,
    source: str = "",
) -> dict[str, Any]:
    """Builds a Lucene index for BM25 and term feedback; Pyserini opens the folder in place.

    The folder appears only when it is complete. Analysis is Anserini's default English one.

    Args:
        path: The folder to make.
        docs: What to index.
        fields: JSON fields to join instead of ``text``, for a ``.jsonl`` file.
        on_empty: A document without text: ``error``, ``skip`` it, or ``keep`` it.
        force: Replace an index that is there.
        progress: Show a bar on stderr.
        threads: Java threads; 0 for all cores.
        source: Where the documents come from, for the metadata; the file's name unless given.

    Returns:
        The index's metadata.
    """
    refuse_existing(path, force)
    pairs, name = read_first(docs, fields)
    return lucene_build.build(
        path,
        pairs,
        on_empty=on_empty,
        force=force,
        progress=progress,
        threads=threads,
        source=source or name,
    )


def build_impact(
    path: PathLike,
    vectors: PathLike | Sequence[PathLike],
    *,
    on_empty: OnEmpty = "error",
    force: bool = False,
    progress: bool = False,
    threads: int = 0,
    source: str = "",
) -> dict[str, Any]:
    """Builds an impact index from weighted terms that are there already.

    Pyserini's ``LuceneImpactSearcher`` opens the folder in place.

    Args:
        path: The folder to make.
        vectors: JSON lines in Anserini's form, ``{"id": ..., "contents": ..., "vector": {term:
            whole number}}``: a file, several files, or a folder of ``*.jsonl`` and ``*.jsonl.gz``.
        on_empty: A document without a weight above 0: ``error``, ``skip`` it, or ``keep`` it.
        force: Replace an index that is there.
        progress: Show a bar on stderr.
        threads: Java threads; 0 for all cores.
        source: Where the documents come from, for the metadata; the name of ``vectors`` unless
            given.

    Returns:
        The index's metadata.

    Raises:
        IndexStateError: If the folder exists.
        FileFormatError: For a missing or malformed file, or a repeated docno.
    """
    refuse_existing(path, force)
    name = os.fspath(vectors) if isinstance(vectors, (str, os.PathLike)) else ""
    return lucene_build.build_impact(
        path,
        read_vectors_jsonl(vectors),
        on_empty=on_empty,
        force=force,
        progress=progress,
        threads=threads,
        source=source or name,
    )


class _Counted:
    """Encodes documents and counts those longer than the model takes."""

    def __init__(self, model: Encoder, batch_size: int) -> None:
        self.encoded = self.cut = 0
        self._model, self._batch_size = model, batch_size

    def __call__(self, texts: Sequence[str]) -> FloatArray:
        self.encoded += len(texts)
        return self._model.encode(
            texts, "document", batch_size=self._batch_size, truncated=self._note
        )

    def _note(self, rows: IntArray) -> None:
        self.cut += len(rows)


def build_dense(
    path: PathLike,
    docs: Documents,
    encoder: str,
    *,
    fields: Sequence[str] = (),
    with_text: bool = False,
    on_empty: OnEmpty = "error",
    batch_size: int = 32,
    device: str = "cpu",
    layout: Layouts = "auto",
    precision: Precision = "float32",
    max_length: int = 0,
    force: bool = False,
    progress: bool = False,
    source: str = "",
) -> dict[str, Any]:
    """Encodes documents into a dense index; a build that was stopped goes on where it was.

    Args:
        path: The folder to make.
        docs: What to index.
        encoder: ``minilm``, a local folder, or a hub id.
        fields: JSON fields to join instead of ``text``, for a ``.jsonl`` file.
        with_text: Store the texts too, for `Text`.
        on_empty: A document without text: ``error``, ``skip`` it, or ``keep`` it.
        batch_size: Texts per forward pass.
        device: ``cpu``, ``cuda``, ...
        layout: What the encoder reads and how its output is pooled (see `QueryEncoder`).
        precision: ``float32``, ``autocast`` or ``bfloat16`` (see `QueryEncoder`).
        max_length: Tokens, special ones included, at which a document is cut; 0 for the layout's.
        force: Replace an index that is there.
        progress: Show a bar on stderr.
        source: Where the documents come from, for the metadata; the file's name unless given.

    Returns:
        The index's metadata.

    Warns:
        PrfWarning: If documents were longer than the model takes and were cut; says how many.
    """
    refuse_existing(path, force)
    pairs, name = read_first(docs, fields)
    model = load_encoder(
        encoder, device, layout=layout, precision=precision, document_length=max_length
    )
    description = {**model.description, "weights_sha256": weights_digest(encoder)}
    similarity: Similarity = "cosine" if description["similarity"] == "cosine" else "dot"

    encode = _Counted(model, batch_size)
    meta = dense_build.build(
        path,
        pairs,
        encode,
        encoder=description,
        similarity=similarity,
        with_text=with_text,
        on_empty=on_empty,
        force=force,
        progress=progress,
        source=source or name,
    )
    if encode.cut:
        warnings.warn(
            f"{encode.cut:,} of the {encode.encoded:,} documents encoded now are longer than the "
            f"{model.max_length['document']} tokens of '{encoder}' and were cut",
            PrfWarning,
            stacklevel=2,
        )
    return meta


def build_vectors(
    path: PathLike,
    vectors: PathLike | np.ndarray[Any, Any],
    ids: PathLike | Sequence[str],
    *,
    similarity: Similarity = "dot",
    encoder: str | None = None,
    texts: Sequence[str] | None = None,
    force: bool = False,
    source: str = "",
) -> dict[str, Any]:
    """Builds a dense index from vectors that are there already.

    Args:
        path: The folder to make.
        vectors: ``.npy`` file or array, (n, d) float16 or float32.
        ids: Text file with one docno a line, or the docnos.
        similarity: ``cosine`` stores vectors at length 1.
        encoder: The model that made them, if known; queries of another are then refused.
        texts: The documents' texts, to be stored for `Text`.
        force: Replace an index that is there.
        source: Where they come from, for the metadata.

    Returns:
        The index's metadata.
    """
    refuse_existing(path, force)
    return dense_build.build_from_vectors(
        path,
        vectors,
        ids,
        similarity=similarity,
        encoder=None if encoder is None else {"model": encoder},
        texts=texts,
        force=force,
        source=source or (os.fspath(vectors) if isinstance(vectors, (str, os.PathLike)) else ""),
    )

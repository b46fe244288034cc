"""Encoding documents into an impact index, in steps that a killed build does not repeat."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from prf.build import Documents, read_first, refuse_existing
from prf.checkpoints import weights_digest
from prf.errors import FileFormatError, PrfWarning, SpecError
from prf.frames import IntArray
from prf.lucene_build import OnEmpty, build_impact
from prf.sparse_models import (
    PYSERINI,
    Kind,
    Quantisation,
    SparseModel,
    load_splade,
    load_unicoil,
)
from prf.trec import PathLike, atomic, read_docs
from prf.vectors_io import read_vectors_jsonl


def encode_documents(
    model: SparseModel,
    texts: Sequence[str],
    *,
    expansions: Sequence[str] | None = None,
    quantisation: Quantisation = PYSERINI,
    max_length: int = 0,
    max_terms: int = 0,
    batch_size: int = 32,
    truncated: Callable[[IntArray], None] | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[dict[str, int]]:
    """Returns term to whole weight of each document, as ``build_impact`` takes them.

    Arguments are those of `SparseModel.encode`, and how weights become whole numbers.
    """
    weights = model.encode(
        texts,
        "document",
        expansions=expansions,
        max_length=max_length,
        max_terms=max_terms,
        batch_size=batch_size,
        truncated=truncated,
        progress=progress,
    )
    return model.terms(weights, quantisation)


def build_sparse(
    path: PathLike,
    docs: Documents,
    encoder: str,
    kind: Kind,
    *,
    fields: Sequence[str] = (),
    expansions: PathLike | Mapping[str, str] | None = None,
    quantisation: Quantisation = PYSERINI,
    max_length: int = 0,
    max_terms: int = 0,
    with_text: bool = False,
    on_empty: OnEmpty = "error",
    batch_size: int = 32,
    device: str = "cpu",
    shard_size: int = 4096,
    force: bool = False,
    progress: bool = False,
    threads: int = 0,
    source: str = "",
) -> dict[str, Any]:
    """Encodes documents into an impact index; a build that was stopped goes on where it was.

    Encoded documents stay in the folder ``<path>.vectors``, in Anserini's form for pretokenised
    collections: ``NUMBER-DIGEST.jsonl.gz`` of ``shard_size`` documents. A later call keeps every
    file whose documents, model and settings are the same, and removes the others. The folder may be
    deleted; nothing reads it after the build.

    Args:
        path: The folder to make.
        docs: A document file, an ``ir_datasets:`` name, or (docno, text) pairs.
        encoder: Local folder or hub id of the model.
        kind: ``unicoil`` or ``splade``.
        fields: JSON fields to join instead of ``text``, for a ``.jsonl`` file.
        expansions: Text to add to every document, by docno, or a document file of it (uniCOIL after
            doc2query).
        quantisation: How weights become whole numbers.
        max_length: Tokens at which a document is cut; 0 for the model's.
        max_terms: Keeps the heaviest terms of each document; 0 keeps all.
        with_text: Store the texts too, for `Text`.
        on_empty: A document without a weight above 0: ``error``, ``skip`` it, or ``keep`` it.
        batch_size: Texts per forward pass.
        device: ``cpu``, ``cuda``, ...
        shard_size: Documents between two safe points.
        force: Replace an index that is there.
        progress: Show a bar on stderr.
        threads: Java threads; 0 for all cores.
        source: Where the documents come from, for the metadata; the file's name unless given.

    Returns:
        The index's metadata.

    Raises:
        IndexStateError: If the folder exists, or the model cannot be read.
        FileFormatError: For a bad or repeated docno, a document without text or expansion, or no
            documents.

    Warns:
        PrfWarning: If documents were longer than the model takes and were cut; says how many.
    """
    refuse_existing(path, force)
    name = os.fspath(path)
    docs, file = read_first(docs, fields)
    source = source or file
    if kind not in get_args(Kind):
        raise SpecError(f"kind is {kind!r}; one of 'unicoil', 'splade'")
    model: SparseModel = (load_unicoil if kind == "unicoil" else load_splade)(encoder, device)
    about = {
        "kind": kind,
        "model": encoder,
        "weights_sha256": weights_digest(encoder),
        "max_length": max_length or model.limits["document"],
        "max_terms": max_terms,
        "expansions": expansions is not None,
    }

    def encode(texts: Sequence[str], more: Sequence[str] | None, **tell: Any) -> Any:
        return encode_documents(
            model,
            texts,
            expansions=more,
            quantisation=quantisation,
            max_length=max_length,
            max_terms=max_terms,
            batch_size=batch_size,
            **tell,
        )

    settings = {**about, "quantisation": asdict(quantisation), "with_text": with_text}
    shards = _Shards(Path(f"{name}.vectors"), settings, encode, on_empty, source)
    with tqdm(desc="encode", unit=" docs", disable=not progress) as bar:
        files = shards.write(docs, _by_docno(expansions), shard_size, bar.update)
    shards.report(max_length or model.limits["document"])
    return build_impact(
        path,
        read_vectors_jsonl(files),
        encoder=about,
        quantisation=asdict(quantisation),
        on_empty=on_empty,
        force=force,
        progress=progress,
        threads=threads,
        source=source,
    )


def _by_docno(expansions: PathLike | Mapping[str, str] | None) -> Mapping[str, str] | None:
    if expansions is None or isinstance(expansions, Mapping):
        return expansions
    return dict(read_docs(expansions))


class _Shards:
    """Encoded documents in files named after what they were made from."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        encode: Callable[..., list[dict[str, int]]],
        on_empty: OnEmpty,
        source: str,
    ) -> None:
        self.folder, self.encode = folder, encode
        self.with_text, self.on_empty = bool(settings["with_text"]), on_empty
        self.where = source or "documents"
        self.encoded = self.cut = 0
        self._settings = json.dumps(settings, sort_keys=True).encode()
        self._first: dict[str, int] = {}

    def write(
        self,
        docs: Iterable[tuple[str, str]],
        expansions: Mapping[str, str] | None,
        size: int,
        progress: Callable[[int], object],
    ) -> list[Path]:
        """Encodes what is not there yet; returns the files in the order of the documents."""
        files: list[Path] = []
        stream = iter(docs)
        while part := list(islice(stream, size)):
            for docno, text in part:
                self._check(docno, text)
            more = None if expansions is None else [self._more(expansions, d) for d, _ in part]
            file = self.folder / f"{len(files):05d}-{self._digest(part, more)}.jsonl.gz"
            if file.exists():
                progress(len(part))
            else:
                self._encode(file, part, more, progress)
            files.append(file)
        if not files:
            raise FileFormatError(f"{self.where}: no documents; an index needs at least one")
        for old in self.folder.iterdir():
            if old not in files and re.fullmatch(r"\d{5,}-[0-9a-f]{16}\.jsonl\.gz", old.name):
                old.unlink()
        return files

    def report(self, max_length: int) -> None:
        """Warns of documents that were cut."""
        if self.cut:
            warnings.warn(
                f"{self.cut:,} of the {self.encoded:,} documents encoded now are longer than "
                f"{max_length} tokens and were cut",
                PrfWarning,
                stacklevel=3,
            )

    def _check(self, docno: object, text: object) -> None:
        number = len(self._first) + 1
        where = f"{self.where}: document {number}"
        if not isinstance(docno, str) or not docno:
            raise FileFormatError(f"{where} has docno {docno!r}; a docno is text and never empty")
        if not isinstance(text, str):
            raise FileFormatError(f"{where} (docno {docno!r}) has text {text!r}; it must be text")
        first = self._first.setdefault(docno, number)
        if first != number:
            raise FileFormatError(
                f"{self.where}: docno {docno!r} stands at documents {first} and {number}; "
                "docnos must be unique"
            )

    def _more(self, expansions: Mapping[str, str], docno: str) -> str:
        if docno not in expansions:
            raise FileFormatError(
                f"{self.where}: no expansion for docno {docno!r}; give it one, if an empty one"
            )
        return expansions[docno]

    def _digest(self, part: Sequence[tuple[str, str]], more: Sequence[str] | None) -> str:
        digest = hashlib.sha256(self._settings)
        for row, (docno, text) in enumerate(part):
            for value in (docno, text, *([] if more is None else [more[row]])):
                content = value.encode("utf-8", "surrogatepass")
                digest.update(b"%d\n" % len(content) + content)
        return digest.hexdigest()[:16]

    def _encode(
        self,
        file: Path,
        part: Sequence[tuple[str, str]],
        more: Sequence[str] | None,
        progress: Callable[[int], object],
    ) -> None:
        texts = [text for _, text in part]
        vectors = self.encode(texts, more, truncated=self._note, progress=progress)
        self.encoded += len(part)
        empty = next((row for row, vector in enumerate(vectors) if not vector), None)
        if empty is not None and self.on_empty == "error":
            raise FileFormatError(
                f"{self.where}: docno {part[empty][0]!r} has no term with a weight above 0; leave "
                "such documents out with on_empty='skip' or keep them unfindable with 'keep'"
            )
        with atomic(file) as out:
            for (docno, text), vector in zip(part, vectors, strict=True):
                contents = text if self.with_text else ""
                line = {"id": docno, "contents": contents, "vector": vector}
                out.write(json.dumps(line) + "\n")

    def _note(self, rows: IntArray) -> None:
        self.cut += len(rows)

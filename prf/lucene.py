"""Lucene indexes: open, search bags of weighted terms, read term vectors and texts.

An index is a folder that Anserini and Pyserini open as theirs, plus ``prf.json`` with what went
into it; ``prf.lucene_build`` makes it. There are two kinds: of texts, analysed as Anserini does and
searched with BM25, and of impacts, whose terms come with whole-number weights from a learned sparse
encoder and are searched by dot product. Indexes that Anserini built open as well.

Documents have internal numbers (*ids*); in an index built here they are the documents in input
order. Whole batches cross into Java and back, and rankings depend neither on the number of threads
nor on the order in which documents were added.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prf import jvm
from prf.errors import IndexStateError, SpecError, shorten
from prf.frames import Hits, ObjectArray, objects
from prf.jvm import pack_int32, pack_strings, unpack_strings, utf8
from prf.lucene_build import (
    BATCH_DOCUMENTS,
    META,
    Kind,
    batches,
    digest_document,
    digest_impacts,
    leftovers,
    read_meta,
)
from prf.prebuilt import local_path

_QUERIES_PER_THREAD = 64
_ANSWER_BYTES = 1 << 28
_KINDS = {"lucene": "texts", "impact": "impacts"}
_INSTEAD = {"lucene": "BM25", "impact": "UniCoil, Splade or EncodedQueries, then Impact"}

IntIds = npt.NDArray[np.int64] | Sequence[int]


class TermVectors(NamedTuple):
    """Indexed terms of n documents; document i owns the slice ``ptr[i]:ptr[i + 1]``.

    ``terms`` are positions in ``vocabulary``, ``tf`` frequencies in the document, ``df`` the number
    of documents of the whole index that hold a vocabulary term, ``cf`` how often all of them hold
    it, ``lengths`` the tokens of each document. A document without terms has an empty slice. In an
    impact index, weights stand for frequencies throughout.
    """

    ptr: npt.NDArray[np.int64]
    terms: npt.NDArray[np.int32]
    tf: npt.NDArray[np.float32]
    vocabulary: list[str]
    df: npt.NDArray[np.int64]
    cf: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class Statistics(NamedTuple):
    """Counts of a collection: all documents, those with at least one term, and all tokens."""

    documents: int
    documents_with_terms: int
    tokens: int


def open_index(path: str | os.PathLike[str]) -> LuceneIndex:
    """Opens an index folder, ours or Anserini's; the same unchanged folder gives the same object.

    Args:
        path: The folder, or ``pyserini:NAME`` for a prebuilt one that was downloaded.

    Raises:
        IndexStateError: If there is no index, it is half built, or this Lucene cannot read it.
        MissingDependency: Without a usable Java.
    """
    folder = Path(os.path.realpath(local_path(path)))
    if not folder.is_dir():
        if leftovers(folder):
            raise IndexStateError(f"index {folder} is half built; run `prf index` again")
        found = "it is a file" if folder.exists() else "there is no such folder"
        raise IndexStateError(f"index {folder}: {found}; build it with `prf index`")
    files = [entry for entry in folder.iterdir() if entry.name.startswith(("segments_", META))]
    meta = read_meta(folder)
    if meta and not meta.get("complete"):
        raise IndexStateError(f"index {folder} is half built; run `prf index --force` again")
    if not any(entry.name != META for entry in files):
        inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:3]) or "nothing"
        raise IndexStateError(
            f"{folder} is not a Lucene index: it has no segments file, found {inside}; "
            "build one with `prf index`"
        )
    # Inode numbers come back at once after a folder was replaced, times do not; hence both.
    state = sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_ino) for entry in files)
    return _open(str(folder), tuple(state))


def verify(path: str | os.PathLike[str]) -> None:
    """Reads all stored documents of an index again and compares them with ``prf.json``.

    An index without ``prf.json`` (one of Anserini's) is only opened.

    Raises:
        IndexStateError: If it does not open, or if the number of documents or the checksum differs.
    """
    index = open_index(path)
    if not index.meta:
        return
    _expect(index, "documents", index.meta.get("documents"), index.n_docs)
    digest = hashlib.sha256()
    for start in range(0, index.n_docs, BATCH_DOCUMENTS):
        _digest(index, range(start, min(start + BATCH_DOCUMENTS, index.n_docs)), digest)
    _expect(index, "sha256", index.meta.get("sha256"), digest.hexdigest())


class LuceneIndex:
    """An open index; read-only, usable from any thread, closed when nothing refers to it.

    Get one from ``open_index``. Pickles as its path.
    """

    def __init__(self, path: Path, meta: dict[str, Any], reader: Any) -> None:
        self.path = path
        self.meta = meta
        """What ``prf.json`` says; empty for an index that Anserini built."""
        self.kind: Kind | None = meta.get("kind")
        """What it holds; None for an index that Anserini built, which does not say."""
        self._reader = reader
        self._call = jvm.Caller(f"index {path}")
        weakref.finalize(self, _close, reader).atexit = False
        answer = self._call(reader.statistics)
        size, documents, filled, tokens, usable, vectors = np.frombuffer(answer, "<i8").tolist()
        self._size = size
        self.n_docs: int = documents
        self.has_term_vectors = bool(vectors)
        self.statistics = Statistics(documents, filled, tokens)
        if documents and not usable:
            raise IndexStateError(
                f"index {path} is a Lucene index without the fields 'id' and 'contents'; "
                "only indexes of Anserini and `prf index` can be searched"
            )

    def __repr__(self) -> str:
        """Names path and size."""
        return f"LuceneIndex({str(self.path)!r}, {self.n_docs} documents)"

    def __reduce__(self) -> tuple[Callable[[str], LuceneIndex], tuple[str]]:
        """Pickles as the path, to be opened again."""
        return open_index, (str(self.path),)

    @property
    def avg_length(self) -> float:
        """Mean number of terms of the documents that have any, as BM25 takes it; 0 without any."""
        filled = self.statistics.documents_with_terms
        return self.statistics.tokens / filled if filled else 0.0

    @cached_property
    def docnos(self) -> ObjectArray:
        """The docnos by id, as text."""
        answer = self._call(self._reader.docnos)
        names = objects(unpack_strings(answer, 0, self._size))
        names.setflags(write=False)
        return names

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {docno: i for i, docno in enumerate(self.docnos)}

    def docids(self, docnos: Iterable[str]) -> npt.NDArray[np.int64]:
        """Returns the ids of the docnos, in their order.

        Raises:
            IndexStateError: For a docno that is not in the index, naming both.
        """
        docnos = list(docnos)
        known = self._ids
        ids = [known.get(docno, -1) for docno in docnos]
        if -1 in ids:
            raise IndexStateError(
                f"docno {shorten(docnos[ids.index(-1)])} is not in index {self.path} "
                f"({ids.count(-1)} of {len(ids)} are not); "
                "use the index that these results are from"
            )
        return np.array(ids, dtype=np.int64)

    def analyze(self, texts: Sequence[str]) -> list[dict[str, float]]:
        """Returns the terms of each text with their counts; see the function ``analyze``.

        Raises:
            IndexStateError: For an impact index, whose terms are those of its encoder.
        """
        self._expect_kind("lucene", "analysed text", _INSTEAD["impact"])
        return analyze(texts)

    def search(
        self,
        queries: Sequence[Mapping[str, float]],
        k: int,
        k1: float,
        b: float,
        threads: int = 0,
        idf: bool = True,
    ) -> Hits:
        """Finds the best k documents for each bag of analysed terms under BM25.

        A document's score is the sum over the terms of weight times BM25, as Lucene computes it.
        Equal scores are ordered by docno, also where the list is cut, so that a shorter list is
        always the beginning of a longer one. Terms that the index does not have and weights that
        are not above 0 count nothing; a query without terms finds nothing.

        Args:
            queries: Term to weight; the terms as ``analyze`` gives them.
            k: Results wanted for each query, at least 1.
            k1: BM25's saturation, 0 or more.
            b: BM25's length normalisation, 0 to 1.
            threads: Java threads; 0 for all cores.
            idf: False takes 1 for every term's idf, as the second pass of Anserini's BM25PRF.

        Raises:
            IndexStateError: For an impact index.
            SpecError: For a weight that is not a finite number, and k, k1, b or threads out of
                range.
        """
        self._expect_kind("lucene", "BM25", _INSTEAD["impact"])
        _check_k(k)
        _check_bm25(k1, b)

        def ask(request: bytes, depth: int, workers: int) -> bytes:
            answer: bytes = self._call(
                self._reader.search, request, depth, float(k1), float(b), bool(idf), workers
            )
            return answer

        return self._search(queries, k, threads, ask)

    def search_impacts(
        self, queries: Sequence[Mapping[str, float]], k: int, threads: int = 0
    ) -> Hits:
        """Finds the best k documents for each bag of weighted terms by dot product.

        A document's score is the sum over the terms of the query's weight times the document's,
        as Anserini's impact search computes it; whole numbers are exact up to 2^24. Order and what
        counts nothing are as in ``search``.

        Args:
            queries: Term to weight; the terms as the encoder gives them.
            k: Results wanted for each query, at least 1.
            threads: Java threads; 0 for all cores.

        Raises:
            IndexStateError: For an index of texts.
            SpecError: For a weight that is not a finite number, and k or threads out of range.
        """
        self._expect_kind("impact", "impact search", _INSTEAD["lucene"])
        _check_k(k)

        def ask(request: bytes, depth: int, workers: int) -> bytes:
            answer: bytes = self._call(self._reader.searchImpacts, request, depth, workers)
            return answer

        return self._search(queries, k, threads, ask)

    def _search(
        self,
        queries: Sequence[Mapping[str, float]],
        k: int,
        threads: int,
        ask: Callable[[bytes, int, int], bytes],
    ) -> Hits:
        workers = jvm.workers(threads)
        depth = max(1, min(int(k), self._size))
        chunk = min(_QUERIES_PER_THREAD * workers, max(1, _ANSWER_BYTES // (8 * depth)))
        counts, ids, scores = [], [], []
        # Ctrl-C is seen between two calls into Java, hence several.
        for start in range(0, len(queries), chunk):
            part = queries[start : start + chunk]
            answer = ask(_pack_queries(part, start), depth, workers)
            found = np.frombuffer(answer, "<i4", len(part))
            hits = int(found.sum(dtype=np.int64))
            counts.append(found)
            ids.append(np.frombuffer(answer, "<i4", hits, 4 * len(part)))
            scores.append(np.frombuffer(answer, "<f4", hits, 4 * (len(part) + hits)))
        return Hits(
            _pointers(_joined(counts, np.int32)),
            _joined(ids, np.int32).astype(np.int64),
            _joined(scores, np.float32).astype(np.float32),
        )

    def _expect_kind(self, kind: Kind, what: str, instead: str) -> None:
        if self.kind not in (None, kind):
            raise IndexStateError(
                f"{what} needs an index of {_KINDS[kind]} (kind {kind!r}); index {self.path} is of "
                f"kind {self.kind!r}; use {instead}, or another index"
            )

    def term_vectors(self, ids: IntIds) -> TermVectors:
        """Returns the terms of the documents with their frequencies; ids may repeat.

        Raises:
            IndexStateError: If the index stores none, or if an id is out of range.
        """
        rows = self._check_ids(ids)
        if not self.has_term_vectors:
            which = f" (for docno {shorten(self.docnos[rows[0]])})" if len(rows) else ""
            raise IndexStateError(
                f"term feedback needs term vectors{which}; index {self.path} has none; "
                "rebuild it with `prf index`"
            )
        n = len(rows)
        answer = self._call(self._reader.vectors, rows.astype("<i4").tobytes())
        sizes = np.frombuffer(answer, "<i4", n)
        ptr = _pointers(sizes)
        words = int(np.frombuffer(answer, "<i4", 1, 4 * n)[0])
        total, offset = int(ptr[-1]), 4 * (n + 1)
        terms = np.frombuffer(answer, "<i4", total, offset)
        frequencies = np.frombuffer(answer, "<i4", total, offset + 4 * total)
        offset += 8 * total
        sums = np.concatenate([[0], np.cumsum(frequencies, dtype=np.int64)])
        return TermVectors(
            ptr=ptr,
            terms=terms.astype(np.int32),
            tf=frequencies.astype(np.float32),
            vocabulary=unpack_strings(answer, offset + 12 * words, words),
            df=np.frombuffer(answer, "<i4", words, offset).astype(np.int64),
            cf=np.frombuffer(answer, "<i8", words, offset + 4 * words).astype(np.int64),
            lengths=sums[ptr[1:]] - sums[ptr[:-1]],
        )

    def frequencies(self, terms: Sequence[str]) -> npt.NDArray[np.int64]:
        """Returns how many documents hold each analysed term: (n,); 0 for one it does not have."""
        request = pack_int32([len(terms)]) + pack_strings([utf8(term) for term in terms])
        answer = self._call(self._reader.frequencies, request)
        return np.frombuffer(answer, "<i4").astype(np.int64)

    def texts(self, ids: IntIds) -> list[str]:
        """Returns the texts of the documents as they were indexed.

        Raises:
            IndexStateError: If the index does not store a text, naming the docno, or if an id is
                out of range.
        """
        rows = self._check_ids(ids)
        answer = self._call(self._reader.texts, rows.astype("<i4").tobytes())
        kinds = np.frombuffer(answer, "<i4", len(rows))
        stored = unpack_strings(answer, 4 * len(rows), len(rows))
        return [
            text if kind == 1 else self._contents(text, bool(kind), row)
            for kind, text, row in zip(kinds, stored, rows, strict=True)
        ]

    def _contents(self, raw: str, stored: bool, row: int) -> str:
        """Returns ``contents`` of a stored JSON document."""
        try:
            document = json.loads(raw) if stored else None
        except ValueError:
            document = None
        if isinstance(document, dict) and isinstance(document.get("contents"), str):
            return str(document["contents"])
        found = f"only {shorten(raw)}" if stored else "nothing"
        raise IndexStateError(
            f"index {self.path} stores no text for docno {shorten(self.docnos[row])}, "
            f"found {found}; rebuild it with `prf index`, or take the texts from the "
            "collection's file"
        )

    def _check_ids(self, ids: IntIds) -> npt.NDArray[np.int64]:
        rows = np.asarray(ids, dtype=np.int64).reshape(-1)
        bad = rows[(rows < 0) | (rows >= self._size)]
        if bad.size:
            raise IndexStateError(
                f"id {bad[0]} is not in index {self.path}, which has {self._size} ids; "
                "use the index that these results are from"
            )
        return rows


def analyze(texts: Sequence[str]) -> list[dict[str, float]]:
    """Returns the terms of each text with their counts, in the order of their first appearance.

    The analysis is that of Anserini's default English analyzer (lower case, possessives, stop
    words, Porter). A text is plain text; nothing in it is query syntax. One without terms gives
    ``{}``.

    Raises:
        MissingDependency: Without a usable Java.
    """
    java = jvm.java_class("PrfLucene")
    call = jvm.Caller("analysis")
    out: list[dict[str, float]] = []
    for part in batches(texts, len):
        encoded = [utf8(text) for text in part]
        n = len(encoded)
        answer = call(java.analyze, pack_int32([n]) + pack_strings(encoded))
        sizes = np.frombuffer(answer, "<i4", n)
        total = int(sizes.sum(dtype=np.int64))
        counts = np.frombuffer(answer, "<i4", total, 4 * n).astype(np.float64).tolist()
        terms = unpack_strings(answer, 4 * (n + total), total)
        start = 0
        for size in sizes.tolist():
            stop = start + size
            out.append(dict(zip(terms[start:stop], counts[start:stop], strict=True)))
            start = stop
    return out


@lru_cache(maxsize=8)
def _open(folder: str, state: tuple[tuple[str, int, int], ...]) -> LuceneIndex:
    path = Path(folder)
    java = jvm.java_class("PrfLucene")
    reader = jvm.Caller(f"index {path}")(java.open, os.fsencode(folder))
    return LuceneIndex(path, read_meta(path), reader)


def _close(reader: Any) -> None:
    # The interpreter may be ending; there is nobody to tell.
    with contextlib.suppress(Exception):
        reader.close()


def _pack_queries(queries: Sequence[Mapping[str, float]], first: int) -> bytes:
    sizes: list[int] = []
    weights: list[bytes] = []
    terms: list[bytes] = []
    for number, query in enumerate(queries, start=first):
        # Sorted, so that equal bags are scored alike to the last bit.
        kept = sorted((term, weight) for term, weight in query.items() if not weight <= 0)
        values = np.array([weight for _, weight in kept], dtype=np.float64)
        with np.errstate(over="ignore"):
            narrow = values.astype("<f4")
        bad = np.flatnonzero(~np.isfinite(narrow))
        if bad.size:
            term, weight = kept[int(bad[0])]
            raise SpecError(
                f"query {number}: term {shorten(term)} has weight {weight}; "
                "weights must be finite numbers"
            )
        encoded = [utf8(term) for term, _ in kept]
        keep = np.flatnonzero(narrow)  # a weight below the smallest float32 counts nothing
        sizes.append(len(keep))
        weights.append(narrow[keep].tobytes())
        terms.extend(encoded[i] for i in keep)
    return b"".join([pack_int32([len(sizes)]), pack_int32(sizes), *weights, pack_strings(terms)])


def _check_k(k: int) -> None:
    if not isinstance(k, (int, np.integer)) or isinstance(k, bool) or k < 1:
        raise SpecError(f"k={k!r}; it must be a whole number of 1 or more")


def _check_bm25(k1: float, b: float) -> None:
    if not 0 <= k1 < float("inf"):
        raise SpecError(f"k1={k1!r}; it must be a number of 0 or more")
    if not 0 <= b <= 1:
        raise SpecError(f"b={b!r}; it must be a number from 0 to 1")


def _pointers(sizes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def _joined(parts: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _digest(index: LuceneIndex, ids: Sequence[int], digest: Any) -> None:
    """Adds documents to a checksum as the build did."""
    vectors = index.term_vectors(ids) if index.kind == "impact" else None
    words = [word.encode() for word in vectors.vocabulary] if vectors else []
    for i, (row, text) in enumerate(zip(ids, index.texts(ids), strict=True)):
        digest_document(digest, index.docnos[row].encode(), text.encode())
        if vectors:
            part = slice(vectors.ptr[i], vectors.ptr[i + 1])
            terms = [words[term] for term in vectors.terms[part].tolist()]
            digest_impacts(digest, terms, vectors.tf[part].astype("<i4").tobytes())


def _expect(index: LuceneIndex, what: str, expected: object, found: object) -> None:
    if expected != found:
        raise IndexStateError(
            f"index {index.path} is damaged: {what} should be {expected}, found {found}; "
            "rebuild it with `prf index --force`"
        )

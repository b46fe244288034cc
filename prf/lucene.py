"""Lucene indexes: build, open, search bags of weighted terms, read term vectors and texts.

An index is a folder that Anserini and Pyserini open as theirs, plus ``prf.json`` with what went
into it. Indexes that Anserini built open as well. The analysis is always Anserini's English one.

Documents have internal numbers (*ids*); in an index built here they are the documents in input
order. Whole batches cross into Java and back, and rankings depend neither on the number of threads
nor on the order in which documents were added.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from prf import jvm
from prf.errors import (
    FileFormatError,
    IndexStateError,
    PrfError,
    PrfWarning,
    SpecError,
    did_you_mean,
    shorten,
)
from prf.frames import Hits, ObjectArray, objects

try:
    import fcntl
except ImportError:  # Windows: two builds of one index at a time are not told apart
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
"""Version of ``prf.json``."""

META = "prf.json"
ANALYZER = "anserini DefaultEnglishAnalyzer (porter)"

_LOCK_FILE = "prf.lock"
_BATCH_DOCUMENTS = 5_000
_BATCH_CHARACTERS = 4_000_000
_QUERIES_PER_THREAD = 64
_ANSWER_BYTES = 1 << 28

OnEmpty = Literal["error", "skip", "keep"]
IntIds = npt.NDArray[np.int64] | Sequence[int]


class TermVectors(NamedTuple):
    """Analysed terms of n documents; document i owns the slice ``ptr[i]:ptr[i + 1]``.

    ``terms`` are positions in ``vocabulary``, ``tf`` frequencies in the document, ``df`` the number
    of documents of the whole index that hold a vocabulary term, ``lengths`` the tokens of each
    document. A document without terms has an empty slice.
    """

    ptr: npt.NDArray[np.int64]
    terms: npt.NDArray[np.int32]
    tf: npt.NDArray[np.float32]
    vocabulary: list[str]
    df: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class Statistics(NamedTuple):
    """Counts of a collection: all documents, those with at least one term, and all tokens."""

    documents: int
    documents_with_terms: int
    tokens: int


def build(
    path: str | os.PathLike[str],
    docs: Iterable[tuple[str, str]],
    *,
    on_empty: OnEmpty = "error",
    force: bool = False,
    progress: bool = False,
    threads: int = 0,
    source: str = "",
) -> dict[str, Any]:
    """Builds an index folder from (docno, text) pairs and returns what its ``prf.json`` says.

    The folder appears under its name only when it is complete. What an interrupted build leaves in
    the same parent folder (``.NAME.building-…``) is removed by the next build.

    Args:
        path: The folder to make; missing parents are made too.
        docs: The documents; read once, never held in memory as a whole.
        on_empty: What to do with a document whose text is empty or white space: refuse, leave it
            out, or index it, so that it has a number but is never found.
        force: Replaces an index that is there already, once the new one is complete.
        progress: Shows a progress bar on stderr.
        threads: Java threads; 0 for all cores. The index is the same whatever it is.
        source: Where the documents come from, for ``prf.json``.

    Raises:
        IndexStateError: If the folder exists and ``force`` is not set, if it holds something that
            is no index, or if another process is building it.
        FileFormatError: For a repeated, empty or unencodable docno, a value that is not text, an
            empty text under ``on_empty="error"``, or no documents at all; names the document.
        SpecError: For an unknown ``on_empty`` or a negative number of threads.
        MissingDependency: Without a usable Java.
    """
    target = Path(os.path.abspath(path))
    if on_empty not in ("error", "skip", "keep"):
        raise SpecError(
            f"on_empty={on_empty!r} is none of error, skip, keep"
            f"{did_you_mean(str(on_empty), ['error', 'skip', 'keep'])}"
        )
    workers = _workers(threads)
    _check_target(target, force)
    java = jvm.java_class("PrfLucene")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    folder = target.with_name(f"{_prefix(target)}{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    lock: IO[bytes] | None = _lock(folder)
    try:
        meta = _write(java, folder, target, docs, on_empty, progress, workers, source)
        _check_target(target, force)
        _unlock(folder, lock)
        lock = None
        _move(folder, target)
    except BaseException:
        _unlock(folder, lock)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return meta


def open_index(path: str | os.PathLike[str]) -> LuceneIndex:
    """Opens an index folder, ours or Anserini's; the same unchanged folder gives the same object.

    Raises:
        IndexStateError: If there is no index, it is half built, or this Lucene cannot read it.
        MissingDependency: Without a usable Java.
    """
    folder = Path(os.path.realpath(path))
    if not folder.is_dir():
        if _leftovers(folder):
            raise IndexStateError(f"index {folder} is half built; run `prf index` again")
        found = "it is a file" if folder.exists() else "there is no such folder"
        raise IndexStateError(f"index {folder}: {found}; build it with `prf index`")
    files = [entry for entry in folder.iterdir() if entry.name.startswith(("segments_", META))]
    meta = _read_meta(folder)
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
    for start in range(0, index.n_docs, _BATCH_DOCUMENTS):
        ids = np.arange(start, min(start + _BATCH_DOCUMENTS, index.n_docs))
        for docno, text in zip(index.docnos[ids], index.texts(ids), strict=True):
            _digest(digest, docno.encode(), text.encode())
    _expect(index, "sha256", index.meta.get("sha256"), digest.hexdigest())


class LuceneIndex:
    """An open index; read-only, usable from any thread, closed when nothing refers to it.

    Get one from ``open_index``. Pickles as its path.
    """

    def __init__(self, path: Path, meta: dict[str, Any], reader: Any) -> None:
        self.path = path
        self.meta = meta
        """What ``prf.json`` says; empty for an index that Anserini built."""
        self._reader = reader
        self._call = _Caller(f"index {path}")
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
                "only text indexes of Anserini and `prf index` can be searched"
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
        names = objects(_strings(answer, 0, self._size))
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
        """Returns the terms of each text with their counts; see the function ``analyze``."""
        return analyze(texts)

    def search(
        self,
        queries: Sequence[Mapping[str, float]],
        k: int,
        k1: float,
        b: float,
        threads: int = 0,
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

        Raises:
            SpecError: For a weight that is not a finite number, and k, k1, b or threads out of
                range.
        """
        _check_search(k, k1, b)
        workers = _workers(threads)
        depth = max(1, min(int(k), self._size))
        chunk = min(_QUERIES_PER_THREAD * workers, max(1, _ANSWER_BYTES // (8 * depth)))
        counts, ids, scores = [], [], []
        # Ctrl-C is seen between two calls into Java, hence several.
        for start in range(0, len(queries), chunk):
            part = queries[start : start + chunk]
            request = _pack_queries(part, start)
            answer = self._call(self._reader.search, request, depth, float(k1), float(b), workers)
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

    def term_vectors(self, ids: IntIds) -> TermVectors:
        """Returns the terms of the documents with their frequencies; ids may repeat.

        Raises:
            IndexStateError: If the index stores none, or if an id is out of range.
        """
        rows = self._check_ids(ids)
        if not self.has_term_vectors:
            which = f" (for docno {shorten(self.docnos[rows[0]])})" if len(rows) else ""
            raise IndexStateError(
                f"RM3 needs term vectors{which}; index {self.path} has none; "
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
            vocabulary=_strings(answer, offset + 4 * words, words),
            df=np.frombuffer(answer, "<i4", words, offset).astype(np.int64),
            lengths=sums[ptr[1:]] - sums[ptr[:-1]],
        )

    def texts(self, ids: IntIds) -> list[str]:
        """Returns the texts of the documents as they were indexed.

        Raises:
            IndexStateError: If the index does not store a text, naming the docno, or if an id is
                out of range.
        """
        rows = self._check_ids(ids)
        answer = self._call(self._reader.texts, rows.astype("<i4").tobytes())
        kinds = np.frombuffer(answer, "<i4", len(rows))
        stored = _strings(answer, 4 * len(rows), len(rows))
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
    call = _Caller("analysis")
    out: list[dict[str, float]] = []
    for part in _batches(texts, len):
        encoded = [_utf8(text) for text in part]
        n = len(encoded)
        answer = call(java.analyze, _int32([n]) + _block(encoded))
        sizes = np.frombuffer(answer, "<i4", n)
        total = int(sizes.sum(dtype=np.int64))
        counts = np.frombuffer(answer, "<i4", total, 4 * n).astype(np.float64).tolist()
        terms = _strings(answer, 4 * (n + total), total)
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
    reader = _Caller(f"index {path}")(java.open, os.fsencode(folder))
    return LuceneIndex(path, _read_meta(path), reader)


def _close(reader: Any) -> None:
    # The interpreter may be ending; there is nobody to tell.
    with contextlib.suppress(Exception):
        reader.close()


class _Caller:
    """Calls Java, turns byte arrays into bytes and Java's exceptions into ours."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        import jnius

        try:
            answer = function(*args)
        except jnius.JavaException as error:
            raise self._translate(error) from error
        return answer.tostring() if hasattr(answer, "tostring") else answer

    def _translate(self, error: Any) -> PrfError:
        name = str(error.classname or "").rsplit(".", 1)[-1].rsplit("$", 1)[-1]
        detail = shorten(str(error.innermessage or ""), 300)
        if name == "OutOfMemoryError":
            return PrfError(
                f"{self.where}: Java ran out of memory ({detail}); use fewer threads or a smaller "
                "batch, or give it more: JAVA_TOOL_OPTIONS=-Xmx8g"
            )
        if name.startswith("IndexFormatToo"):
            age = "an older" if name.endswith("OldException") else "a newer"
            return IndexStateError(
                f"{self.where} was written by {age} Lucene than this one can read ({detail}); "
                "rebuild it with `prf index`"
            )
        if name == "InvalidPathException":
            return SpecError(
                f"{self.where}: Java cannot write this name in the locale that it was started in; "
                "set LC_ALL=C.UTF-8, or choose a name in ASCII"
            )
        if name == "IllegalStateException":
            return PrfError(f"{self.where}: {error.innermessage}")
        return IndexStateError(
            f"{self.where} cannot be used; Lucene says {name}: {detail}; "
            "check the disk, or rebuild it with `prf index --force`"
        )


def _write(
    java: Any,
    folder: Path,
    target: Path,
    docs: Iterable[tuple[str, str]],
    on_empty: OnEmpty,
    progress: bool,
    threads: int,
    source: str,
) -> dict[str, Any]:
    """Fills the folder and returns its metadata, written last."""
    call = _Caller(f"index {target}")
    reader = _Documents(docs, on_empty, f"index {target}")
    writer = call(java.create, os.fsencode(folder), threads)
    try:
        row = 0
        with _bar(progress) as advance:
            for part in _batches(reader, lambda pair: len(pair[0]) + len(pair[1])):
                docnos, texts = [pair[0] for pair in part], [pair[1] for pair in part]
                call(writer.add, _int32([len(part)]) + _block(docnos) + _block(texts), row)
                row += len(part)
                advance(len(part))
        if row == 0:
            raise FileFormatError(
                f"index {target}: no documents"
                f"{f', all {reader.empty} are empty' if reader.empty else ''}"
                f"{f' in {source}' if source else ''}; an index needs at least one"
            )
        call(writer.finish)
    except BaseException:
        with contextlib.suppress(PrfError):
            call(writer.abort)
        raise
    reader.warn()
    meta = {
        "format": FORMAT,
        "kind": "lucene",
        "complete": True,
        "documents": row,
        "empty_documents": reader.empty,
        "source": source,
        "analyzer": ANALYZER,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "prf": _own_version(),
            "anserini": jvm.anserini_version(),
            "lucene": java.luceneVersion(),
        },
        "sha256": reader.digest.hexdigest(),
    }
    with open(folder / META, "w", encoding="utf-8", newline="\n") as file:
        json.dump(meta, file, ensure_ascii=False, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    return meta


class _Documents:
    """Checks documents on their way into the index; yields docno and text as UTF-8."""

    def __init__(self, docs: Iterable[tuple[str, str]], on_empty: OnEmpty, where: str) -> None:
        self.docs = docs
        self.on_empty = on_empty
        self.where = where
        self.digest = hashlib.sha256()
        self.empty = 0
        self.spaced = 0
        self.example = ""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        seen: dict[str, int] = {}
        for number, (docno, text) in enumerate(self.docs, start=1):
            where = f"{self.where}: document {number}"
            if not isinstance(docno, str) or not docno:
                raise FileFormatError(
                    f"{where} has docno {shorten(docno)}; a docno is text and never empty"
                )
            first = seen.setdefault(docno, number)
            if first != number:
                raise FileFormatError(
                    f"{self.where}: docno {shorten(docno)} stands at documents {first} and "
                    f"{number}; docnos must be unique"
                )
            if text is not None and not isinstance(text, str):
                raise FileFormatError(
                    f"{where} (docno {shorten(docno)}) has text {shorten(text)}; it must be text"
                )
            if text is None or not text.strip():
                if self.on_empty == "error":
                    raise FileFormatError(
                        f"{where} (docno {shorten(docno)}) has no text; leave such documents out "
                        "with on_empty='skip' or keep them unfindable with on_empty='keep'"
                    )
                self.empty += 1
                if self.on_empty == "skip":
                    continue
            try:
                name = docno.encode()
            except UnicodeEncodeError as error:
                raise FileFormatError(
                    f"{where} has docno {shorten(docno)}, which is not valid Unicode: "
                    f"{error.reason}"
                ) from error
            if len(name) > 32_766:
                raise FileFormatError(
                    f"{where} has docno {shorten(docno)} of {len(name)} bytes; Lucene takes 32766"
                )
            if docno.split() != [docno]:
                self.spaced += 1
                self.example = self.example or docno
            content = _utf8(text or "")
            _digest(self.digest, name, content)
            yield name, content

    def warn(self) -> None:
        if self.spaced:
            warnings.warn(
                f"{self.where}: {self.spaced} docnos hold white space, such as "
                f"{shorten(self.example)}; TREC run files cannot express them",
                PrfWarning,
                stacklevel=4,
            )


def _batches(items: Iterable[Any], size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Cuts a stream into lists that are neither too many items nor too many characters."""
    part: list[Any] = []
    total = 0
    for item in items:
        part.append(item)
        total += size(item)
        if len(part) >= _BATCH_DOCUMENTS or total >= _BATCH_CHARACTERS:
            yield part
            part, total = [], 0
    if part:
        yield part


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
        encoded = [_utf8(term) for term, _ in kept]
        keep = np.flatnonzero(narrow)  # a weight below the smallest float32 counts nothing
        sizes.append(len(keep))
        weights.append(narrow[keep].tobytes())
        terms.extend(encoded[i] for i in keep)
    return b"".join([_int32([len(sizes)]), _int32(sizes), *weights, _block(terms)])


def _check_search(k: int, k1: float, b: float) -> None:
    if not isinstance(k, (int, np.integer)) or isinstance(k, bool) or k < 1:
        raise SpecError(f"k={k!r}; it must be a whole number of 1 or more")
    if not 0 <= k1 < float("inf"):
        raise SpecError(f"k1={k1!r}; it must be a number of 0 or more")
    if not 0 <= b <= 1:
        raise SpecError(f"b={b!r}; it must be a number from 0 to 1")


def _workers(threads: int) -> int:
    if not isinstance(threads, (int, np.integer)) or threads < 0:
        raise SpecError(f"threads={threads!r}; it must be 0 (all cores) or more")
    if threads:
        return int(threads)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _int32(values: Sequence[int]) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def _block(encoded: Sequence[bytes]) -> bytes:
    return _int32([len(item) for item in encoded]) + b"".join(encoded)


def _strings(answer: bytes, offset: int, n: int) -> list[str]:
    """Reads a block of n strings."""
    lengths = np.frombuffer(answer, "<i4", n, offset)
    start = offset + 4 * n
    ends = (start + np.cumsum(lengths, dtype=np.int64)).tolist()
    return [
        answer[left:right].decode("utf-8")
        for left, right in zip([start, *ends[:-1]], ends, strict=False)
    ]


def _pointers(sizes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def _joined(parts: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _utf8(text: str) -> bytes:
    """Encodes text; half a surrogate pair, which is no character, becomes a question mark."""
    return text.encode("utf-8", "replace")


def _digest(digest: Any, docno: bytes, text: bytes) -> None:
    """Adds a document to a checksum; lengths first, so that no two lists look alike."""
    digest.update(b"%d %d\n" % (len(docno), len(text)))
    digest.update(docno)
    digest.update(text)


def _expect(index: LuceneIndex, what: str, expected: object, found: object) -> None:
    if expected != found:
        raise IndexStateError(
            f"index {index.path} is damaged: {what} should be {expected}, found {found}; "
            "rebuild it with `prf index --force`"
        )


@contextlib.contextmanager
def _bar(show: bool) -> Iterator[Callable[[int], object]]:
    if not show:
        yield lambda n: None
        return
    from tqdm import tqdm

    with tqdm(desc="index", unit=" docs") as bar:
        yield bar.update


def _own_version() -> str:
    try:
        return version("prf-ir")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


def _read_meta(folder: Path) -> dict[str, Any]:
    """Returns what ``prf.json`` says; {} without one."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise IndexStateError(
            f"index {folder}: {META} cannot be read ({error}); rebuild it with `prf index --force`"
        ) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or meta.get("kind") != "lucene":
        kind = meta.get("kind") if isinstance(meta, dict) else None
        form = meta.get("format") if isinstance(meta, dict) else None
        raise IndexStateError(
            f"index {folder}: {META} says kind {kind!r}, format {form!r}; this version of prf "
            f"reads kind 'lucene', format {FORMAT} here; open it as what it is, or rebuild it"
        )
    return meta


def _check_target(target: Path, force: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise IndexStateError(f"index {target} exists already; take another name, or --force")
    if not target.is_dir() or target.is_symlink():
        raise IndexStateError(f"{target} is not a folder; --force replaces index folders only")
    names = [entry.name for entry in target.iterdir()]
    if names and META not in names and not any(name.startswith("segments_") for name in names):
        raise IndexStateError(
            f"{target} holds {shorten(sorted(names)[0])} and no index; --force replaces index "
            "folders only"
        )


def _prefix(target: Path) -> str:
    return f".{target.name}.building-"


def _leftovers(target: Path) -> list[Path]:
    if not target.parent.is_dir():
        return []
    prefix = _prefix(target)
    return [entry for entry in target.parent.iterdir() if entry.name.startswith(prefix)]


def _remove_leftovers(target: Path) -> None:
    for folder in _leftovers(target):
        lock = _lock(folder) if (folder / _LOCK_FILE).exists() else None
        shutil.rmtree(folder, ignore_errors=True)
        if lock:
            lock.close()


def _lock(folder: Path) -> IO[bytes]:
    """Locks a folder that is being built; the system releases it even if the process is killed.

    Raises:
        IndexStateError: If another process has it.
    """
    file = open(folder / _LOCK_FILE, "ab")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise IndexStateError(
            f"index {folder} is being built by another process; wait for it, or stop it"
        ) from error
    except OSError:
        # A file system without locks; a build that is really running is on its own then.
        pass
    return file


def _unlock(folder: Path, lock: IO[bytes] | None) -> None:
    if lock:
        (folder / _LOCK_FILE).unlink(missing_ok=True)
        lock.close()


def _move(folder: Path, target: Path) -> None:
    """Puts the finished folder in place; an old one goes away only after the new one stands."""
    old = target.with_name(f"{_prefix(target)}old-{uuid.uuid4().hex[:8]}")
    had = target.exists()
    if had:
        os.replace(target, old)
    try:
        os.replace(folder, target)
    except OSError:
        if had:
            os.replace(old, target)
        raise
    if had:
        shutil.rmtree(old, ignore_errors=True)

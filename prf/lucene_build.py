"""Building Lucene indexes: from texts, for BM25, and from weighted terms, for impact scores.

The folder is one that Anserini and Pyserini open as theirs, plus ``prf.json`` with what went into
it. An index of texts has the fields that Anserini's IndexCollection writes under ``-storeDocvectors
-storeRaw``, one of weighted terms those under ``-impact -pretokenized`` as well. Internal numbers
are the documents in input order, whatever the number of threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import numpy as np

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
from prf.jvm import pack_int32, pack_strings, utf8

try:
    import fcntl
except ImportError:  # Windows: two builds of one index at a time are not told apart
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
"""Version of ``prf.json``."""

META = "prf.json"
ANALYZER = "anserini DefaultEnglishAnalyzer (porter)"

MAX_WEIGHT = 65_535
"""The largest weight of a term in a document of an impact index."""

BATCH_DOCUMENTS = 5_000
BATCH_CHARACTERS = 4_000_000
_LOCK_FILE = "prf.lock"
_MAX_BYTES = 32_766  # of a docno or term; Lucene's limit
_MAX_TOTAL = 2**31 - 1  # of a document's weights; Lucene counts them as one document's tokens

OnEmpty = Literal["error", "skip", "keep"]
Kind = Literal["lucene", "impact"]
KINDS: tuple[Kind, ...] = ("lucene", "impact")


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
    about = {"kind": "lucene", "source": source, "analyzer": ANALYZER}
    return _build(
        target, _Texts(docs, on_empty, source or f"index {target}"), about, force, progress, threads
    )


def build_impact(
    path: str | os.PathLike[str],
    vectors: Iterable[tuple[str, Mapping[str, int], str]],
    *,
    encoder: Mapping[str, object] | None = None,
    quantisation: Mapping[str, object] | None = None,
    on_empty: OnEmpty = "error",
    force: bool = False,
    progress: bool = False,
    threads: int = 0,
    source: str = "",
) -> dict[str, Any]:
    """Builds an impact index from (docno, weighted terms, text) and returns its ``prf.json``.

    For learned sparse vectors (uniCOIL, SPLADE) quantised to whole numbers. Terms are indexed as
    they are. A weight of 0 or less is left out, as rounding makes such. Pyserini's
    ``LuceneImpactSearcher`` opens the folder and gives the same scores.

    Args:
        path: The folder to make; missing parents are made too.
        vectors: The documents; read once. The text is stored, never searched, and may be empty.
        encoder: What made the vectors, for ``prf.json``.
        quantisation: How weights became whole numbers, for ``prf.json``.
        on_empty: What to do with a document without any weight above 0: refuse, leave it out, or
            index it, so that it has a number but is never found.
        force: Replaces an index that is there already, once the new one is complete.
        progress: Shows a progress bar on stderr.
        threads: Java threads; 0 for all cores. The index is the same whatever it is.
        source: Where the documents come from, for ``prf.json``.

    Raises:
        IndexStateError: As ``build``.
        FileFormatError: As ``build``; also for a weight that is no whole number or above
            ``MAX_WEIGHT``, and a term that is empty or no text.
        SpecError: As ``build``; also for an encoder or quantisation that JSON cannot express.
        MissingDependency: Without a usable Java.
    """
    target = Path(os.path.abspath(path))
    about = {
        "kind": "impact",
        "source": source,
        "analyzer": None,
        "encoder": _plain(encoder, "encoder"),
        "quantisation": _plain(quantisation, "quantisation"),
    }
    return _build(
        target,
        _Vectors(vectors, on_empty, source or f"index {target}"),
        about,
        force,
        progress,
        threads,
    )


def _plain(value: Mapping[str, object] | None, name: str) -> Any:
    """Returns what a JSON file will give back."""
    try:
        return json.loads(json.dumps(None if value is None else dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"{name}={shorten(value)} cannot be written as JSON: {error}; "
            "use text, finite numbers, lists and dicts"
        ) from error


def _build(
    target: Path,
    documents: _Documents,
    about: dict[str, Any],
    force: bool,
    progress: bool,
    threads: int,
) -> dict[str, Any]:
    workers = jvm.workers(threads)
    _check_target(target, force)
    java = jvm.java_class("PrfLucene")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    folder = target.with_name(f"{_prefix(target)}{uuid.uuid4().hex[:8]}")
    lock: IO[bytes] | None = None
    try:
        folder.mkdir()
        lock = _lock(folder)
        _fill(java, folder, documents, progress, workers)
        documents.warn()
        meta = _write_meta(folder, documents, about, java.luceneVersion())
        _check_target(target, force)
        _unlock(folder, lock)
        lock = None
        _move(folder, target)
    except BaseException:
        _unlock(folder, lock)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return meta


def _fill(java: Any, folder: Path, documents: _Documents, progress: bool, threads: int) -> None:
    """Writes the Lucene files."""
    call = jvm.Caller(f"index {folder}")
    writer = call(java.create, os.fsencode(folder), documents.impacts, threads)
    try:
        with _bar(progress) as advance:
            for part in batches(documents, documents.size):
                call(writer.add, documents.pack(part), documents.written)
                documents.written += len(part)
                advance(len(part))
        if documents.written == 0:
            raise FileFormatError(
                f"{documents.where}: no documents"
                f"{f', all {documents.empty} are empty' if documents.empty else ''}"
                "; an index needs at least one"
            )
        call(writer.finish)
    except BaseException:
        with contextlib.suppress(PrfError):
            call(writer.abort)
        raise


def _write_meta(
    folder: Path, documents: _Documents, about: dict[str, Any], lucene: str
) -> dict[str, Any]:
    """Writes ``prf.json``, the last file, and returns it."""
    meta = {
        "format": FORMAT,
        "kind": about["kind"],
        "complete": True,
        "documents": documents.written,
        "empty_documents": documents.empty,
        **about,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "prf": _own_version(),
            "anserini": jvm.anserini_version(),
            "lucene": lucene,
        },
        "sha256": documents.digest.hexdigest(),
    }
    with open(folder / META, "w", encoding="utf-8", newline="\n") as file:
        json.dump(meta, file, ensure_ascii=False, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    return meta


def read_meta(folder: Path) -> dict[str, Any]:
    """Returns what ``prf.json`` says; {} without one.

    Raises:
        IndexStateError: If it cannot be read or says something else.
    """
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise IndexStateError(
            f"index {folder}: {META} cannot be read ({error}); rebuild it with `prf index --force`"
        ) from error
    kind, form = (meta.get("kind"), meta.get("format")) if isinstance(meta, dict) else (None, None)
    if kind not in KINDS or form != FORMAT:
        raise IndexStateError(
            f"index {folder}: {META} says kind {kind!r}, format {form!r}; this version of prf "
            f"reads kinds 'lucene' and 'impact', format {FORMAT}, here; open it as what it is, or "
            "rebuild it"
        )
    return dict(meta)


class _Documents:
    """Checks documents on their way into the index, counts them, and packs them for Java."""

    impacts: ClassVar[bool]

    def __init__(self, items: Iterable[Any], on_empty: OnEmpty, where: str) -> None:
        if on_empty not in ("error", "skip", "keep"):
            raise SpecError(
                f"on_empty={on_empty!r} is none of error, skip, keep"
                f"{did_you_mean(str(on_empty), ['error', 'skip', 'keep'])}"
            )
        self.items = items
        self.on_empty = on_empty
        self.where = where
        self.digest = hashlib.sha256()
        self.seen: dict[str, int] = {}
        self.written = 0
        self.empty = 0
        self.spaced = 0
        self.example = ""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def size(self, item: Any) -> int:
        raise NotImplementedError

    def pack(self, part: list[Any]) -> bytes:
        names, texts = [item[0] for item in part], [item[1] for item in part]
        return pack_int32([len(part)]) + pack_strings(names) + pack_strings(texts)

    def identify(self, docno: Any, number: int) -> str:
        """Returns where the document stands, for messages, once its docno is known to be new."""
        where = f"{self.where}: document {number}"
        if not isinstance(docno, str) or not docno:
            raise FileFormatError(
                f"{where} has docno {shorten(docno)}; a docno is text and never empty"
            )
        first = self.seen.setdefault(docno, number)
        if first != number:
            raise FileFormatError(
                f"{self.where}: docno {shorten(docno)} stands at documents {first} and "
                f"{number}; docnos must be unique"
            )
        return f"{where} (docno {shorten(docno)})"

    def leave_out(self, where: str, what: str) -> bool:
        """Counts an empty document and tells whether it is to be left out."""
        if self.on_empty == "error":
            raise FileFormatError(
                f"{where} has no {what}; correct it, or choose --on-empty skip or keep"
            )
        self.empty += 1
        return self.on_empty == "skip"

    def encode(self, docno: str, number: int) -> bytes:
        where = f"{self.where}: document {number}"
        try:
            name = docno.encode()
        except UnicodeEncodeError as error:
            raise FileFormatError(
                f"{where} has docno {shorten(docno)}, which is not valid Unicode: {error.reason}"
            ) from error
        if len(name) > _MAX_BYTES:
            raise FileFormatError(
                f"{where} has docno {shorten(docno)} of {len(name)} bytes; "
                f"Lucene takes {_MAX_BYTES}"
            )
        if docno.split() != [docno]:
            self.spaced += 1
            self.example = self.example or docno
        return name

    def warn(self) -> None:
        if self.spaced:
            warnings.warn(
                f"{self.where}: {self.spaced} docnos hold white space, such as "
                f"{shorten(self.example)}; TREC run files cannot express them",
                PrfWarning,
                stacklevel=4,
            )


class _Texts(_Documents):
    """Yields docno and text as UTF-8."""

    impacts = False

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        for number, (docno, text) in enumerate(self.items, start=1):
            where = self.identify(docno, number)
            if text is not None and not isinstance(text, str):
                raise FileFormatError(f"{where} has text {shorten(text)}; it must be text")
            if (text is None or not text.strip()) and self.leave_out(where, "text"):
                continue
            name, content = self.encode(docno, number), utf8(text or "")
            digest_document(self.digest, name, content)
            yield name, content

    def size(self, item: tuple[bytes, bytes]) -> int:
        return len(item[0]) + len(item[1])


class _Vectors(_Documents):
    """Yields docno and text as UTF-8, terms in the order of their bytes, and their weights."""

    impacts = True

    def __iter__(self) -> Iterator[tuple[bytes, bytes, list[bytes], bytes]]:
        for number, (docno, vector, text) in enumerate(self.items, start=1):
            where = self.identify(docno, number)
            if not isinstance(text, str):
                raise FileFormatError(f"{where} has text {shorten(text)}; it must be text")
            terms, weights = _impacts(vector, where)
            if not terms and self.leave_out(where, "term with a weight above 0"):
                continue
            name, content = self.encode(docno, number), utf8(text)
            packed = pack_int32(weights)
            digest_document(self.digest, name, content)
            digest_impacts(self.digest, terms, packed)
            yield name, content, terms, packed

    def size(self, item: tuple[bytes, bytes, list[bytes], bytes]) -> int:
        return len(item[0]) + len(item[1]) + 4 * len(item[3])

    def pack(self, part: list[Any]) -> bytes:
        sizes = pack_int32([len(item[2]) for item in part])
        weights = b"".join(item[3] for item in part)
        terms = [term for item in part for term in item[2]]
        return super().pack(part) + sizes + weights + pack_strings(terms)


def _impacts(vector: Any, where: str) -> tuple[list[bytes], Sequence[int]]:
    """Returns the terms of a document in the order of their bytes, and their weights above 0."""
    if not isinstance(vector, Mapping):
        raise FileFormatError(
            f"{where} has vector {shorten(vector)}; it must be a dict from term to weight"
        )
    weights = list(vector.values())
    if not set(map(type, weights)) <= {int}:
        weights = [_whole(weight, term, where) for term, weight in vector.items()]
    try:
        pairs = sorted(zip(map(str.encode, vector), weights, strict=True))
    except (TypeError, UnicodeEncodeError) as error:
        raise FileFormatError(
            f"{where} has a term that is not text: {error}; terms are valid Unicode text"
        ) from error
    if pairs and min(weights) <= 0:
        pairs = [(term, weight) for term, weight in pairs if weight > 0]
    if not pairs:
        return [], []
    terms, values = zip(*pairs, strict=True)
    _check_impacts(terms, values, where)
    return list(terms), values


def _whole(weight: Any, term: Any, where: str) -> int:
    number = isinstance(weight, (int, float, np.integer, np.floating))
    if not number or isinstance(weight, bool) or weight != weight // 1:
        raise FileFormatError(
            f"{where}: term {shorten(term)} has weight {shorten(weight)}; impact weights are whole "
            "numbers: quantise them first, such as round(100 * weight)"
        )
    return int(weight)


def _check_impacts(terms: Sequence[bytes], weights: Sequence[int], where: str) -> None:
    if not terms[0]:
        raise FileFormatError(f"{where} has an empty term; leave it out")
    longest, heaviest = max(terms, key=len), max(weights)
    if len(longest) > _MAX_BYTES:
        raise FileFormatError(
            f"{where} has term {shorten(longest.decode())} of {len(longest)} bytes; "
            f"Lucene takes {_MAX_BYTES}"
        )
    if heaviest > MAX_WEIGHT:
        term = terms[weights.index(heaviest)].decode()
        raise FileFormatError(
            f"{where}: term {shorten(term)} has weight {heaviest}; the largest is {MAX_WEIGHT}: "
            "quantise with a smaller factor"
        )
    if sum(weights) > _MAX_TOTAL:
        raise FileFormatError(
            f"{where} has weights that sum to {sum(weights)}; Lucene takes {_MAX_TOTAL}: "
            "quantise with a smaller factor"
        )


def digest_document(digest: Any, docno: bytes, text: bytes) -> None:
    """Adds a document to a checksum; lengths first, so that no two lists look alike."""
    digest.update(b"%d %d\n" % (len(docno), len(text)))
    digest.update(docno)
    digest.update(text)


def digest_impacts(digest: Any, terms: Sequence[bytes], weights: bytes) -> None:
    """Adds a document's terms, in the order of their bytes, and int32 weights to a checksum."""
    digest.update(pack_int32([len(terms)]) + weights + pack_strings(terms))


def batches(items: Iterable[Any], size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Cuts a stream into lists that are neither too many items nor too large."""
    part: list[Any] = []
    total = 0
    for item in items:
        part.append(item)
        total += size(item)
        if len(part) >= BATCH_DOCUMENTS or total >= BATCH_CHARACTERS:
            yield part
            part, total = [], 0
    if part:
        yield part


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


def leftovers(target: Path) -> list[Path]:
    """Returns the folders in which an index of this name is being built, or was."""
    if not target.parent.is_dir():
        return []
    prefix = _prefix(target)
    return [entry for entry in target.parent.iterdir() if entry.name.startswith(prefix)]


def _remove_leftovers(target: Path) -> None:
    for folder in leftovers(target):
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

"""Building a dense index: from texts, resumable after a kill, or from vectors that are there."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from prf.errors import (
    FileFormatError,
    FrameError,
    IndexStateError,
    PrfWarning,
    SpecError,
    did_you_mean,
    shorten,
)
from prf.frames import FloatArray
from prf.index import (
    COPY_ROWS,
    FORMAT,
    Similarity,
    building_folder,
    file_names,
    longest,
    read_json,
    sha256_of,
)
from prf.knn import unit
from prf.vectors_io import read_npy

OnEmpty = Literal["error", "skip", "keep"]


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
    plan = _plan(encoder, similarity, texts is not None, "keep", COPY_ROWS)
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
            for shard in reader.shards(pairs, COPY_ROWS):
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
    if not isinstance(vectors, np.ndarray):
        return read_npy(vectors), str(vectors)
    array, where = vectors, "vectors"
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
            name: open(self.folder / name, "ab") for name in file_names(plan["with_text"])
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
            state = read_json(note)
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
                max(last.max_norm, longest(vectors)),
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
        write_json(self.place / "progress.json", {**state, "shards": self.points}, indent=None)

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
                name: {"bytes": size, "sha256": sha256_of(self.folder / name)}
                for name, size in sizes.items()
            },
        }
        write_json(self.folder / "meta.json", meta, indent=2)
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


def write_json(path: Path, data: Mapping[str, Any], indent: int | None) -> None:
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


def sync_file(path: Path) -> None:
    """Returns when the content of a file is on disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def building(path: Path) -> Iterator[None]:
    """Keeps other builds away from an index while something is added to it."""
    place = building_folder(path)
    was = place.exists()
    lock = _lock(place)
    try:
        yield
    finally:
        if not was:
            _remove(place)
        lock.close()


@contextmanager
def _workplace(path: Path, force: bool) -> Iterator[Path]:
    """Gives the locked folder in which ``path`` is built; without progress it is removed again."""
    _refuse_existing(path, force)
    place = building_folder(path)
    lock = None
    try:
        lock = _lock(place)
        _refuse_existing(path, force)  # another build may have finished in between
        yield place
    except KeyboardInterrupt:
        # Ctrl-C may come before the lock is ours to hold; an empty folder is nobody's.
        if lock is None:
            _remove_empty(place)
        raise
    finally:
        if lock is not None:
            if not (place / "progress.json").exists():
                _remove(place)
            lock.close()


def _remove_empty(place: Path) -> None:
    if place.exists() and {entry.name for entry in place.iterdir()} <= {"lock"}:
        _remove(place)


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
    ours = read_json(path / "meta.json").get("kind") == "dense"
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

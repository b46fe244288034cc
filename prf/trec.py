"""Topics, documents, judgments and runs: strict readers, atomic writers.

Readers take a path (``str`` or ``os.PathLike``) or an ``ir_datasets:`` name. Files are UTF-8;
``.gz`` is unpacked by suffix; nothing else is guessed. Identifiers stay text: ``007``, ``NA`` and
``1e3`` are what they were. An error names file and line.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from prf.errors import FileFormatError, FrameError, SpecError, require, shorten
from prf.frames import canonical_order, column, need, normalise, query_codes, ranks_of

PathLike = str | os.PathLike[str]

IR_DATASETS = "ir_datasets:"


# Reading lines


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def read_lines(path: PathLike, what: str) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its end) of a UTF-8 file, ``.gz`` unpacked.

    Args:
        path: The file.
        what: What it should hold, for messages ("topics", "run", ...).

    Raises:
        FileFormatError: If it is missing, a folder, unreadable, not UTF-8, or empty.
    """
    file = Path(path)
    if file.is_dir():
        raise FileFormatError(f"{what} file '{file}' is a folder; name the file in it")
    number = 0
    try:
        with _open(file) as stream:
            for number, raw in enumerate(stream, start=1):
                if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                    raw = raw[3:]
                try:
                    line = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise FileFormatError(
                        f"{file}:{number}: byte {raw[error.start]:#04x} at column "
                        f"{error.start + 1} is not UTF-8; convert the file to UTF-8"
                    ) from error
                yield number, line.rstrip("\r\n")
    except FileNotFoundError as error:
        raise FileFormatError(f"{what} file '{file}' does not exist; check the path") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FileFormatError(
            f"{file}: not a complete gzip file ({error}); copy it again"
        ) from error
    except OSError as error:
        raise FileFormatError(f"{what} file '{file}' cannot be read: {error.strerror}") from error
    if number == 0:
        raise FileFormatError(f"{what} file '{file}' is empty")


def _suffix(path: PathLike) -> str:
    file = Path(path)
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def _dataset(name: str) -> Any:
    library = require("ir_datasets", "datasets", f"reading {name!r}")
    try:
        return library.load(name[len(IR_DATASETS) :])
    except KeyError as error:
        raise FileFormatError(
            f"{name}: ir_datasets has no such collection; see https://ir-datasets.com"
        ) from error


def _records(path: PathLike, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in read_lines(path, what):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise FileFormatError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise FileFormatError(
                f"{path}:{number}: expected a JSON object, found {shorten(record)}"
            )
        yield number, record


def _field(record: dict[str, Any], names: Sequence[str], where: str) -> Any:
    for name in names:
        if name in record:
            return record[name]
    raise FileFormatError(
        f"{where}: no field {' or '.join(map(repr, names))}; found {', '.join(record) or 'none'}"
    )


def _identifier(value: Any, where: str, name: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and value:
        return value
    raise FileFormatError(f"{where}: {name} is {shorten(value)}; it must be non-empty text")


# Topics


def read_topics(source: PathLike) -> pd.DataFrame:
    """Reads topics into a query frame.

    Args:
        source: ``.tsv`` (``qid<TAB>query``), ``.jsonl`` (``qid``, ``query``; also BEIR's ``_id``,
            ``text``), any other suffix as TREC topics (``<num>``, ``<title>``), each also with
            ``.gz``; or ``ir_datasets:NAME``.

    Returns:
        Columns ``qid`` and ``query``, text, in file order. An empty query is legal.

    Raises:
        FileFormatError: For a missing, empty or malformed file, or a repeated qid (names both
            lines).
    """
    name = os.fspath(source)
    if name.startswith(IR_DATASETS):
        dataset = _dataset(name)
        rows = [
            (i, str(q.query_id), _query_text(q)) for i, q in enumerate(dataset.queries_iter(), 1)
        ]
    else:
        readers: dict[str, Callable[[str], Iterator[tuple[int, str, str]]]] = {
            ".tsv": _topics_tsv,
            ".jsonl": _topics_jsonl,
        }
        rows = list(readers.get(_suffix(name), _topics_trec)(name))
    if not rows:
        raise FileFormatError(f"{name}: holds no topics")
    seen: dict[str, int] = {}
    for number, qid, _ in rows:
        if qid in seen:
            raise FileFormatError(
                f"{name}:{number}: qid {qid!r} was already given in line {seen[qid]}; "
                "one line per query"
            )
        seen[qid] = number
    return pd.DataFrame(
        {
            "qid": column(np.array([qid for _, qid, _ in rows], dtype=object)),
            "query": column(np.array([query for _, _, query in rows], dtype=object)),
        }
    )


def _query_text(query: Any) -> str:
    for name in ("text", "title", "query"):
        if hasattr(query, name):
            return str(getattr(query, name))
    return str(query.default_text())


def _topics_tsv(name: str) -> Iterator[tuple[int, str, str]]:
    for number, line in read_lines(name, "topics"):
        if not line:
            continue
        fields = line.split("\t")
        if len(fields) != 2:
            found = "no tab" if len(fields) == 1 else f"{len(fields) - 1} tabs"
            raise FileFormatError(
                f"{name}:{number}: expected qid<TAB>query, found {found} in {shorten(line)}"
            )
        yield number, _identifier(fields[0], f"{name}:{number}", "qid"), fields[1]


def _topics_jsonl(name: str) -> Iterator[tuple[int, str, str]]:
    for number, record in _records(name, "topics"):
        where = f"{name}:{number}"
        query = _field(record, ("query", "text"), where)
        if not isinstance(query, str):
            raise FileFormatError(f"{where}: query is {shorten(query)}; it must be text")
        yield number, _identifier(_field(record, ("qid", "_id"), where), where, "qid"), query


_TAG = re.compile(r"<(/?[A-Za-z]+)>")


def _topics_trec(name: str) -> Iterator[tuple[int, str, str]]:
    start, parts, current = 0, {"num": "", "title": ""}, ""
    for number, line in read_lines(name, "topics"):
        for piece in re.split(r"(?=<)", line):
            match = _TAG.match(piece)
            if match:
                current = match[1].lower()
                if current == "top":
                    start, parts = number, {"num": "", "title": ""}
                elif current == "/top":
                    qid = re.sub(r"^\s*Number:", "", parts["num"]).strip()
                    where = f"{name}:{start}"
                    yield start, _identifier(qid, where, "<num>"), " ".join(parts["title"].split())
                    start = 0
                piece = piece[match.end() :]
            if current in parts:
                parts[current] += piece
        if current in parts:
            parts[current] += " "
    if start:
        raise FileFormatError(f"{name}:{start}: <top> is never closed by </top>")
    if current == "":
        raise FileFormatError(
            f"{name}: no <top> found; topics are read as .tsv, .jsonl, or TREC <top> blocks, "
            "by suffix"
        )


# Documents


def read_docs(source: PathLike, fields: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields (docno, text) of a collection, one document at a time.

    Args:
        source: ``.jsonl`` (``docno`` or ``id`` or ``_id``; ``text`` or ``contents``), ``.tsv``
            (``docno<TAB>text``), ``.trec``/``.xml`` (TREC ``<DOC>`` blocks), each also with
            ``.gz``; or ``ir_datasets:NAME``.
        fields: JSON fields to join with line breaks instead of ``text`` (``("title", "text")``).

    Raises:
        FileFormatError: For a missing, empty or malformed file, naming file and line. A missing
            text is not refused here but given as the empty text; the index decides.
    """
    name = os.fspath(source)
    if name.startswith(IR_DATASETS):
        return ((str(doc.doc_id), str(doc.default_text())) for doc in _dataset(name).docs_iter())
    readers: dict[str, Callable[[str], Iterator[tuple[str, str]]]] = {
        ".jsonl": lambda path: _docs_jsonl(path, fields),
        ".tsv": _docs_tsv,
        ".trec": _docs_trec,
        ".xml": _docs_trec,
    }
    suffix = _suffix(name)
    if os.path.isdir(name):
        raise FileFormatError(f"documents '{name}' is a folder; name the file in it")
    if suffix not in readers:
        raise FileFormatError(
            f"documents '{name}': unknown suffix {suffix!r}; accepted are .jsonl, .tsv, .trec, "
            ".xml (each also with .gz) and ir_datasets:NAME"
        )
    return readers[suffix](name)


def _docs_jsonl(name: str, fields: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, record in _records(name, "documents"):
        where = f"{name}:{number}"
        docno = _identifier(_field(record, ("docno", "id", "_id"), where), where, "docno")
        if fields:
            values = [_field(record, (field,), where) for field in fields]
        else:
            values = [_field(record, ("text", "contents"), where)]
        for value in values:
            if value is not None and not isinstance(value, str):
                raise FileFormatError(
                    f"{where}: text of docno {docno!r} is {shorten(value)}, not text"
                )
        yield docno, "\n".join(value for value in values if value)


def _docs_tsv(name: str) -> Iterator[tuple[str, str]]:
    for number, line in read_lines(name, "documents"):
        if not line:
            continue
        docno, tab, text = line.partition("\t")
        if not tab:
            raise FileFormatError(
                f"{name}:{number}: expected docno<TAB>text, found no tab in {shorten(line)}"
            )
        yield _identifier(docno, f"{name}:{number}", "docno"), text


def _docs_trec(name: str) -> Iterator[tuple[str, str]]:
    start, lines = 0, list[str]()
    for number, line in read_lines(name, "documents"):
        if line.strip().upper() == "<DOC>":
            if start:
                break
            start, lines = number, []
        elif line.strip().upper() == "</DOC>" and start:
            block = "\n".join(lines)
            match = re.search(r"<DOCNO>(.*?)</DOCNO>", block, re.DOTALL | re.IGNORECASE)
            if match is None:
                raise FileFormatError(f"{name}:{start}: <DOC> without <DOCNO>")
            text = re.sub(r"<[^<>]*>", " ", block[: match.start()] + block[match.end() :])
            yield _identifier(match[1].strip(), f"{name}:{start}", "docno"), text.strip()
            start = 0
        elif start:
            lines.append(line)
    if start:
        raise FileFormatError(f"{name}:{start}: <DOC> is never closed by </DOC>")


# Judgments and runs


def read_qrels(source: PathLike) -> pd.DataFrame:
    """Reads judgments in TREC form (``qid iteration docno grade``) or from ``ir_datasets:NAME``.

    Returns:
        Columns ``qid``, ``docno`` (text) and ``label`` (int64 grade, larger is more relevant).

    Raises:
        FileFormatError: For a missing, empty or malformed file, a grade that is not a whole number,
            or a document judged twice for a query (both lines named).
    """
    name = os.fspath(source)
    if name.startswith(IR_DATASETS):
        rows = [
            (i, q.query_id, q.doc_id, int(q.relevance))
            for i, q in enumerate(_dataset(name).qrels_iter(), 1)
        ]
    else:
        rows = []
        for number, line in read_lines(name, "judgments"):
            fields = line.split()
            if not fields:
                continue
            if len(fields) != 4:
                raise FileFormatError(
                    f"{name}:{number}: expected 4 fields (qid iteration docno grade), "
                    f"found {len(fields)} in {shorten(line)}"
                )
            rows.append((number, fields[0], fields[2], _grade(fields[3], f"{name}:{number}")))
    if not rows:
        raise FileFormatError(f"judgments file '{name}' is empty")
    seen: dict[tuple[str, str], int] = {}
    for number, qid, docno, _ in rows:
        first = seen.setdefault((qid, docno), number)
        if first != number:
            raise FileFormatError(
                f"{name}:{number}: docno {docno!r} of qid {qid!r} was already judged in line "
                f"{first}"
            )
    return pd.DataFrame(
        {
            "qid": column(np.array([row[1] for row in rows], dtype=object)),
            "docno": column(np.array([row[2] for row in rows], dtype=object)),
            "label": np.array([row[3] for row in rows], dtype=np.int64),
        }
    )


def _number(text: str) -> float:
    """Returns a decimal number, NaN for anything else; ``1_0`` is none, whatever Python says."""
    try:
        return float(text) if text.isascii() and "_" not in text else float("nan")
    except ValueError:
        return float("nan")


def _grade(text: str, where: str) -> int:
    value = _number(text)
    if not value.is_integer() or abs(value) >= 2**31:
        raise FileFormatError(
            f"{where}: grade {text!r} is not a whole number; grades are 0, 1, 2, ..."
        )
    return int(value)


def read_run(
    path: PathLike,
    *,
    on_duplicate: Literal["error", "first"] = "error",
    ties: Literal["ascending", "descending"] = "ascending",
) -> pd.DataFrame:
    """Reads a TREC run (``qid Q0 docno rank score tag``) into a result frame.

    The rank column is ignored, as trec_eval does: the order is by score.

    Args:
        path: The file, also ``.gz``.
        on_duplicate: What to do with a docno that stands twice for a query: refuse the file, or
            keep the better-scored line.
        ties: Order of the docnos of equal scores. Ours is ascending; trec_eval's is descending,
            with scores compared in single precision.

    Returns:
        Columns ``qid``, ``docno``, ``score`` (float64, larger is better) and ``rank`` (from 0),
        queries in file order.

    Raises:
        FileFormatError: For a missing, empty or malformed file or a score that is not a finite
            number.
    """
    name = os.fspath(path)
    rows = list(_run_rows(name))
    if not rows:
        raise FileFormatError(f"run file '{name}' is empty")
    qid = np.array([row[1] for row in rows], dtype=object)
    docno = np.array([row[2] for row in rows], dtype=object)
    score = np.array([row[3] for row in rows], dtype=np.float64)
    codes, _ = query_codes(qid)
    if ties == "ascending":
        order = canonical_order(codes, score, docno)
    else:
        with np.errstate(over="ignore"):
            single = score.astype(np.float32).astype(np.float64)
        backwards = np.argsort(docno, kind="stable")[::-1]
        order = backwards[np.lexsort((-single[backwards], codes[backwards]))]
    order = order[_first_of_each(name, rows, order, on_duplicate)]
    return pd.DataFrame(
        {
            "qid": column(qid[order]),
            "docno": column(docno[order]),
            "score": score[order],
            "rank": ranks_of(codes[order]),
        }
    )


_RunRow = tuple[int, str, str, float]
"""Line number, qid, docno, score."""


def _first_of_each(
    name: str, rows: Sequence[_RunRow], order: npt.NDArray[np.int64], on_duplicate: str
) -> npt.NDArray[np.bool_]:
    """Tells which places of the order hold a document not seen before for its query."""
    first: dict[tuple[str, str], int] = {}
    keep = np.ones(len(order), dtype=bool)
    for place, row in enumerate(order):
        number, qid, docno, _ = rows[row]
        other = first.setdefault((qid, docno), number)
        if other != number:
            if on_duplicate == "error":
                lines = sorted((other, number))
                raise FileFormatError(
                    f"{name}:{lines[1]}: docno {docno!r} of qid {qid!r} already stands in line "
                    f"{lines[0]}; pass on_duplicate='first' to keep the better one"
                )
            keep[place] = False
    return keep


def _run_rows(name: str) -> Iterator[_RunRow]:
    for number, line in read_lines(name, "run"):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 6:
            raise FileFormatError(
                f"{name}:{number}: expected 6 fields (qid Q0 docno rank score tag), found "
                f"{len(fields)} in {shorten(line)}; identifiers cannot hold white space"
            )
        score = _number(fields[4])
        if not np.isfinite(score):
            raise FileFormatError(f"{name}:{number}: score {fields[4]!r} is not a finite number")
        yield number, fields[0], fields[2], score


# Writing


@contextmanager
def atomic(path: PathLike) -> Iterator[IO[str]]:
    """Opens a text file that replaces ``path`` only when the block ends without an error.

    UTF-8, ``\\n``; compressed when the name ends in ``.gz`` (same input, same bytes). The folder is
    made if needed. After an error or a kill the old file is untouched.

    Raises:
        FileFormatError: If the folder cannot be written.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(file)
        handle, name = tempfile.mkstemp(
            prefix=f".{file.name}.{os.getpid()}.", suffix=".tmp", dir=file.parent
        )
    except (FileExistsError, NotADirectoryError) as error:
        raise FileFormatError(
            f"'{file}' cannot be written: '{error.filename}' is a file, not a folder"
        ) from error
    except OSError as error:
        raise FileFormatError(f"'{file}' cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as raw:
            if file.suffix == ".gz":
                with (
                    gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
                    io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as compressed,
                ):
                    yield compressed
            else:
                text = io.TextIOWrapper(raw, encoding="utf-8", newline="\n")
                yield text
                text.flush()
                os.fsync(raw.fileno())
                text.detach()
        # mkstemp makes files only their owner can read; a result file is an ordinary one.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, file)
    except OSError as error:
        raise FileFormatError(f"'{file}' cannot be written: {error.strerror}") from error
    finally:
        Path(name).unlink(missing_ok=True)


def _remove_stale(file: Path) -> None:
    """Removes what a killed process left of an earlier try; a living one keeps its own."""
    for old in file.parent.glob(f".{glob.escape(file.name)}.*.tmp"):
        process = old.name[len(file.name) + 2 :].split(".")[0]
        if process.isdigit() and not _runs(int(process)):
            old.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    if os.name != "posix":
        return True  # asking would end the process there
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# Larger than any float32 key, so that the running minimum starts anew with every query.
_KEY_OFFSET = 1 << 40


def strictly_decreasing(
    scores: npt.ArrayLike, codes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Returns float32 scores that fall strictly within each query, changed as little as possible.

    Going down a list, a score that is not below its predecessor becomes the next float32 below it.
    trec_eval compares in single precision and breaks ties its own way; this keeps our order.

    Args:
        scores: (n,) in the order to keep, not increasing within a query.
        codes: (n,) query number of each row, rows of a query together.

    Raises:
        FrameError: If a score does not fit float32.

    >>> strictly_decreasing([2.0, 2.0, 1.0], np.zeros(3, dtype=np.int64)).tolist()
    [2.0, 1.9999998807907104, 1.0]
    """
    with np.errstate(over="ignore"):
        single = np.asarray(scores, dtype=np.float64).astype(np.float32) + np.float32(0.0)
    bits = single.view(np.int32).astype(np.int64)
    key = np.where(bits < 0, np.int64(-(2**31)) - bits, bits)  # monotone in the float
    place = ranks_of(codes)
    change = np.concatenate([[0], np.cumsum(np.diff(codes) != 0)]) if len(codes) else codes
    low = np.minimum.accumulate(key + place - change * _KEY_OFFSET) + change * _KEY_OFFSET - place
    back = np.where(low < 0, np.int64(-(2**31)) - low, low).astype(np.int32)
    out: npt.NDArray[np.float32] = back.view(np.float32)
    if not (np.isfinite(single) & np.isfinite(out)).all():
        raise FrameError("a score does not fit single precision; scale the scores down")
    return out


_WHITE = re.compile(r"\s")
TAG = re.compile(r"[A-Za-z0-9._-]+")


class RunWriter:
    """Writes a TREC run batch by batch; the file appears only when the ``with`` block succeeds.

    Ranks count from 1. Scores are the shortest decimals that restore the float32, strictly
    decreasing, so that trec_eval sees exactly our order.

    Raises:
        SpecError: For a tag that is not letters, digits, ``.``, ``-``, ``_``, or an existing file
            without ``force``.
        FrameError: For identifiers with white space, NaN scores or missing columns.
    """

    def __init__(self, path: PathLike, tag: str = "prf", *, force: bool = False) -> None:
        self.path = Path(path)
        if not TAG.fullmatch(tag):
            raise SpecError(f"run tag {tag!r}: use letters, digits, '.', '-' and '_' only")
        if self.path.exists() and not force:
            raise SpecError(
                f"run '{self.path}' exists; choose another name or overwrite it (--force)"
            )
        self._tag = tag
        self._context = atomic(self.path)
        self._seen: set[str] = set()

    def __enter__(self) -> RunWriter:
        self._stream = self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.__exit__(kind, error, trace)

    def flush(self) -> None:
        """Hands what was written to the system, so that a full disk shows now."""
        try:
            self._stream.flush()
        except OSError as error:
            raise FileFormatError(f"'{self.path}' cannot be written: {error.strerror}") from error

    def write(self, results: pd.DataFrame) -> None:
        """Appends the results of some queries; no query may come in two batches."""
        where = f"writing run '{self.path}'"
        need(results, ("qid", "docno", "score"), where)
        frame = normalise(results, where)
        codes, names = query_codes(frame["qid"])
        twice = self._seen.intersection(names)
        if twice:
            raise FrameError(f"{where}: qid {min(twice)!r} comes in two batches")
        self._seen.update(names)
        docno = frame["docno"].to_numpy(dtype=object)
        order = canonical_order(codes, frame["score"], docno)
        for name, values in (("qid", names), ("docno", docno)):
            bad = next((value for value in values if _WHITE.search(value)), None)
            if bad is not None:
                raise FrameError(
                    f"{where}: {name} {bad!r} holds white space, which a TREC run cannot express; "
                    "rename it"
                )
        codes = codes[order]
        scores = strictly_decreasing(frame["score"].to_numpy()[order], codes).astype(str)
        rows = zip(names[codes], docno[order], (ranks_of(codes) + 1).tolist(), scores, strict=True)
        self._stream.writelines(
            f"{qid} Q0 {docno} {rank} {score} {self._tag}\n" for qid, docno, rank, score in rows
        )


def write_run(
    results: pd.DataFrame, path: PathLike, tag: str = "prf", *, force: bool = False
) -> None:
    """Writes a result frame as a TREC run, whole and atomically; see `RunWriter`."""
    with RunWriter(path, tag, force=force) as writer:
        writer.write(results)


def write_json(value: Any, path: PathLike) -> None:
    """Writes a value as readable JSON, atomically."""
    with atomic(path) as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: PathLike) -> Any:
    """Reads a JSON file.

    Raises:
        FileFormatError: If it is missing or not JSON.
    """
    text = "\n".join(line for _, line in read_lines(path, "JSON"))
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise FileFormatError(f"{path}: not JSON: {error}") from error


__all__ = [
    "PathLike",
    "RunWriter",
    "atomic",
    "read_docs",
    "read_json",
    "read_lines",
    "read_qrels",
    "read_run",
    "read_topics",
    "strictly_decreasing",
    "write_json",
    "write_run",
]

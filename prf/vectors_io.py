"""Readers for vectors made elsewhere: dense ones (``.npy``), sparse ones in Anserini's forms.

uniCOIL and SPLADE vectors are published as JSON lines (documents) and as repeated terms (queries).
Files are UTF-8; ``.gz`` is unpacked by suffix. Readers are strict: an error names file and line.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prf.errors import FileFormatError, shorten
from prf.trec import PathLike, read_lines

_SUFFIXES = (".jsonl", ".jsonl.gz")


def read_npy(path: PathLike) -> npt.NDArray[np.floating[Any]]:
    """Opens a table of dense vectors, memory-mapped, without pickle.

    Returns:
        (rows, dimensions) of the floating type that the file has.

    Raises:
        FileFormatError: If it is missing, not ``.npy``, or not a table of floats with at least one
            row and dimension.
    """
    file = Path(path)
    if not file.is_file():
        found = "is a folder" if file.is_dir() else "does not exist"
        raise FileFormatError(f"vectors '{file}': it {found}; name an .npy file")
    try:
        table = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise FileFormatError(
            f"vectors '{file}': not an .npy file of numbers; write one with numpy.save"
        ) from error
    if not isinstance(table, np.ndarray) or table.ndim != 2 or 0 in table.shape:
        shape = getattr(table, "shape", "none")
        raise FileFormatError(f"vectors '{file}' have shape {shape}; expected (rows, dimensions)")
    if not np.issubdtype(table.dtype, np.floating):
        raise FileFormatError(f"vectors '{file}' have type {table.dtype}; expected floats")
    return table


def read_vectors_jsonl(
    path: PathLike | Sequence[PathLike],
) -> Iterator[tuple[str, dict[str, int], str]]:
    """Yields (docno, term to weight, text) of documents, as ``build_impact`` takes them.

    A line is ``{"id": …, "contents": …, "vector": {term: weight, …}}``; ``contents`` may be
    missing, weights are whole numbers, other fields are passed over, and so are empty lines.

    Args:
        path: A file, several files, or a folder, whose ``*.jsonl`` and ``*.jsonl.gz`` are read in
            the order of their names.

    Raises:
        FileFormatError: For a missing, empty or malformed file, a folder without such files, a
            weight that is no whole number, or a name that stands twice in one object.
    """
    for file in _files(path):
        for number, line in read_lines(file, "vectors"):
            if line.strip():
                yield _document(line, f"{os.fspath(file)}:{number}")


def read_encoded_queries(path: PathLike) -> dict[str, dict[str, int]]:
    """Returns term to weight of each query by qid, in file order.

    A line is ``qid<TAB>term term term``; a term's weight is how often it stands there. Terms are
    parted by blanks. A query without terms is legal.

    Raises:
        FileFormatError: For a missing, empty or malformed file, or a repeated qid (names both
            lines).
    """
    queries: dict[str, dict[str, int]] = {}
    lines: dict[str, int] = {}
    for number, line in read_lines(path, "encoded queries"):
        if not line:
            continue
        where = f"{os.fspath(path)}:{number}"
        qid, tab, terms = line.partition("\t")
        if not tab or "\t" in terms:
            found = f"{1 + terms.count(chr(9))} tabs" if tab else "no tab"
            raise FileFormatError(
                f"{where}: expected qid<TAB>terms, found {found} in {shorten(line)}"
            )
        if not qid:
            raise FileFormatError(f"{where}: the qid is empty; give every query one")
        if terms.startswith('{"') and terms.endswith("}"):
            raise FileFormatError(
                f"{where}: the terms are JSON; write each term as often as its weight says, "
                "qid<TAB>term term term"
            )
        if qid in lines:
            raise FileFormatError(
                f"{where}: qid {qid!r} was already given in line {lines[qid]}; one line per query"
            )
        lines[qid] = number
        queries[qid] = dict(Counter(term for term in terms.split(" ") if term))
    if not queries:
        raise FileFormatError(f"{os.fspath(path)}: holds no queries")
    return queries


def _files(path: PathLike | Sequence[PathLike]) -> Sequence[PathLike]:
    if not isinstance(path, (str, os.PathLike)):
        return path
    folder = Path(path)
    if not folder.is_dir():
        return [path]
    files = sorted(file for file in folder.iterdir() if file.name.endswith(_SUFFIXES))
    if not files:
        inside = sorted(entry.name for entry in folder.iterdir())[:3]
        raise FileFormatError(
            f"vectors folder '{folder}' holds no *.jsonl or *.jsonl.gz, found "
            f"{', '.join(inside) or 'nothing'}; name the files themselves"
        )
    return files


def _document(line: str, where: str) -> tuple[str, dict[str, int], str]:
    try:
        record = json.loads(line, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except json.JSONDecodeError as error:
        raise FileFormatError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise FileFormatError(f"{where}: expected a JSON object, found {shorten(record)}")
    for name in ("id", "vector"):
        if name not in record:
            raise FileFormatError(
                f"{where}: no field {name!r}; found {', '.join(record) or 'none'}"
            )
    docno, vector, text = record["id"], record["vector"], record.get("contents")
    if isinstance(docno, int) and not isinstance(docno, bool):
        docno = str(docno)
    if not isinstance(docno, str) or not docno:
        raise FileFormatError(f"{where}: id is {shorten(docno)}; it must be non-empty text")
    if text is not None and not isinstance(text, str):
        raise FileFormatError(f"{where}: contents is {shorten(text)}; it must be text")
    if not isinstance(vector, dict):
        raise FileFormatError(
            f"{where}: vector is {shorten(vector)}; it must be an object of term: weight"
        )
    if not set(map(type, vector.values())) <= {int}:
        vector = {term: _weight(weight, term, where) for term, weight in vector.items()}
    return docno, vector, text or ""


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise FileFormatError(f"{where}: {shorten(name)} stands twice in one object; give it once")
    return out


def _weight(weight: Any, term: str, where: str) -> int:
    if isinstance(weight, float) and weight.is_integer():
        return int(weight)
    if isinstance(weight, int) and not isinstance(weight, bool):
        return weight
    raise FileFormatError(
        f"{where}: term {shorten(term)} has weight {shorten(weight)}; impact weights are whole "
        "numbers: quantise them first, such as round(100 * weight)"
    )

"""Query and result frames: columns, checks, the one order, grouping by query.

A *query frame* has one row per qid; a *result frame* has one row per (qid, docno). Both are pandas
tables with PyTerrier's column names, so PyTerrier's own stages read and write them too.

Order is data here, never row position: documents of a query are ordered by score descending, then
docno ascending (as text). ``rank`` counts from 0 and is always derived from that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from prf.errors import FrameError, shorten

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
ObjectArray = npt.NDArray[np.object_]

RESULT_COLUMNS = ("docno", "score", "rank")
"""What makes a query frame a result frame."""

DOCUMENT_COLUMNS = frozenset(
    {"docno", "docid", "score", "rank", "text", "title", "doc_vec", "toks", "features", "label"}
)
"""Columns that belong to a document of a query and therefore end with the result list."""

PROVIDERS = {
    "query_vec": "QueryEncoder(model) or QueryVectors(vectors, ids)",
    "query_toks": "a sparse encoder such as Splade(model), or a term feedback such as RM3(index)",
    "docno": "a retriever such as BM25(index) or DenseRetriever(index)",
    "score": "a retriever such as BM25(index) or DenseRetriever(index)",
    "doc_vec": "Vectors(index)",
    "text": "Text(source)",
}
"""Who gives a column, for messages."""

_ALIASES = {
    "qid": ("query_id", "q_id", "topic", "topic_id"),
    "docno": ("doc_id", "docid", "pid", "document_id"),
    "query": ("text", "question", "title"),
    "score": ("sim", "relevance"),
}


class Hits(NamedTuple):
    """Results of a batch of queries as arrays; query i owns the slice ``ptr[i]:ptr[i + 1]``.

    ``ids`` are row numbers of one index, ``scores`` float32. Within a query the hits stand in the
    canonical order and no id occurs twice.
    """

    ptr: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]


def objects(values: Iterable[object]) -> ObjectArray:
    """Returns a 1-d object array, also when the values are arrays themselves."""
    values = list(values)
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def column(values: ObjectArray) -> pd.Series:
    """Returns a column that keeps Python strings as they are, whatever pandas prefers."""
    return pd.Series(values, dtype=object)


def identifiers(values: pd.Series, name: str, where: str) -> ObjectArray:
    """Returns identifiers as text: text unchanged, whole numbers as their digits.

    Raises:
        FrameError: For missing or empty values and for floats, with row number and value.
    """
    out = np.asarray(values, dtype=object)
    if all(type(value) is str for value in out):
        text = out
    else:
        text = objects(_identifier(value, name, row, where) for row, value in enumerate(out))
    if "" in set(text):
        row = int(np.flatnonzero(text == "")[0])
        raise FrameError(
            f"{where}: column '{name}' is empty in row {row}; give every row an identifier"
        )
    return text


def _identifier(value: object, name: str, row: int, where: str) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_)):
        return str(int(value))
    raise FrameError(
        f"{where}: column '{name}' holds {shorten(value)} ({type(value).__name__}) in row {row}; "
        "identifiers are text (or whole numbers), never missing"
    )


def need(frame: pd.DataFrame, columns: Sequence[str], where: str) -> None:
    """Checks that the columns are there.

    Raises:
        FrameError: Naming the stage, the first missing column, the stage that provides it, and a
            likely rename where one column looks like another package's name for it.
    """
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise missing_error(missing, list(frame.columns), where)


def missing_error(missing: Sequence[str], found: Sequence[str], where: str) -> FrameError:
    """Returns the error for missing columns; shared by the frame and the static check."""
    name = missing[0]
    rename = next((alias for alias in _ALIASES.get(name, ()) if alias in found), None)
    if rename:
        hint = f"rename column '{rename}' to '{name}'"
    elif name in PROVIDERS:
        hint = f"add {PROVIDERS[name]} before it"
    else:
        hint = f"add a column '{name}'"
    error = FrameError(
        f"{where} needs {', '.join(missing)}, found only {', '.join(found) or 'no columns'}; {hint}"
    )
    error.missing = tuple(missing)
    return error


def is_results(frame: pd.DataFrame) -> bool:
    """Tells a result frame from a query frame: it has a docno."""
    return "docno" in frame.columns


def normalise(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """Returns the frame with text identifiers, a fresh row index and no duplicate keys.

    Scored documents stand in canonical order, a ``rank`` is recomputed. The input is never changed;
    columns are shared, not copied.

    Raises:
        FrameError: For bad identifiers, a repeated key, or a score that is not a finite number.
    """
    out = frame.reset_index(drop=True)
    if "qid" not in out.columns:
        raise missing_error(["qid"], list(out.columns), where)
    qid = identifiers(out["qid"], "qid", where)
    out = out.assign(qid=column(qid))
    if not is_results(out):
        if len(set(qid)) < len(qid):
            again = out["qid"][out["qid"].duplicated()].iloc[0]
            rows = [int(row) for row in np.flatnonzero(qid == again)[:2]]
            raise FrameError(
                f"{where}: qid {again!r} stands in rows {rows[0]} and {rows[1]} of the query "
                "frame; one row per query"
            )
        return out
    docno = identifiers(out["docno"], "docno", where)
    out = out.assign(docno=column(docno))
    keys = pd.MultiIndex.from_arrays([qid, docno])
    if keys.has_duplicates:
        first = int(np.flatnonzero(keys.duplicated())[0])
        raise FrameError(
            f"{where}: docno {docno[first]!r} stands twice in the results of qid {qid[first]!r}; "
            "drop one of the two rows"
        )
    if "score" in out.columns:
        out = out.assign(score=finite_scores(out, qid, docno, where))
        out = ranked(out)[list(frame.columns)]
    return out


def finite_scores(
    frame: pd.DataFrame, qid: ObjectArray, docno: ObjectArray, where: str
) -> npt.NDArray[np.float64]:
    """Returns the score column as float64.

    Raises:
        FrameError: If a score is missing, infinite or not a number, naming qid and docno.
    """
    try:
        score = frame["score"].to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise FrameError(f"{where}: column 'score' is not numeric: {error}") from error
    bad = np.flatnonzero(~np.isfinite(score))
    if bad.size:
        row = int(bad[0])
        raise FrameError(
            f"{where}: score of docno {docno[row]!r} for qid {qid[row]!r} is "
            f"{score[row]}; scores must be finite numbers"
        )
    return score


def query_codes(qid: Sequence[str] | ObjectArray | pd.Series) -> tuple[IntArray, ObjectArray]:
    """Numbers the queries by first appearance: (code per row, the qids in that order)."""
    codes, names = pd.factorize(np.asarray(qid, dtype=object), sort=False)
    return np.asarray(codes, dtype=np.int64), np.asarray(names, dtype=object)


def canonical_order(
    codes: IntArray, score: npt.ArrayLike, docno: Sequence[str] | ObjectArray
) -> IntArray:
    """Returns the row order: query by first appearance, score descending, docno ascending."""
    score = np.asarray(score, dtype=np.float64)
    # Sorting text is the slow part and only ties need it, so docnos are compared only among them.
    order: IntArray = np.lexsort((-score, codes)).astype(np.int64)
    same = (codes[order][1:] == codes[order][:-1]) & (score[order][1:] == score[order][:-1])
    if same.any():
        docno = np.asarray(docno, dtype=object)
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        stops = np.append(starts[1:], len(order))
        tied = stops - starts > 1
        for start, stop in zip(starts[tied], stops[tied], strict=True):
            rows = order[start:stop]
            order[start:stop] = rows[np.argsort(docno[rows], kind="stable")]
    return order


def ranked(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the result frame in canonical order with ``rank`` recomputed from 0.

    The frame must be normalised. Queries keep the order of their first row.
    """
    codes, _ = query_codes(frame["qid"])
    order = canonical_order(codes, frame["score"], frame["docno"].to_numpy(dtype=object))
    out = frame.take(order).reset_index(drop=True)
    return out.assign(rank=ranks_of(codes[order]))


def ranks_of(sorted_codes: IntArray) -> IntArray:
    """Returns 0, 1, 2, … within each run of equal codes."""
    n = len(sorted_codes)
    if n == 0:
        return np.zeros(0, dtype=np.int64)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(sorted_codes)) + 1])
    lengths = np.diff(np.append(starts, n))
    ranks: IntArray = np.arange(n, dtype=np.int64) - np.repeat(starts, lengths)
    return ranks


def head(frame: pd.DataFrame, k: int) -> pd.DataFrame:
    """Returns the first k documents of every query, in canonical order."""
    out = ranked(frame)
    return out[out["rank"] < k].reset_index(drop=True)


def query_columns(columns: Iterable[str]) -> list[str]:
    """Returns the columns that describe the query, by list: all but the document's own."""
    return [name for name in columns if name not in DOCUMENT_COLUMNS]


def queries_of(results: pd.DataFrame) -> pd.DataFrame:
    """Returns the query frame behind a result frame: its queries in order, without documents."""
    return (
        results[query_columns(results.columns)]
        .drop_duplicates("qid", ignore_index=True)
        .reset_index(drop=True)
    )


def attach_queries(queries: pd.DataFrame, results: pd.DataFrame) -> pd.DataFrame:
    """Returns the document columns of ``results`` with the query columns of ``queries``.

    Row order is kept; a query that has no results has no row.
    """
    position = pd.Series(np.arange(len(queries)), index=queries["qid"])
    rows = position.reindex(results["qid"]).to_numpy()
    if np.isnan(rows.astype(np.float64)).any():
        stray = results["qid"][np.isnan(rows.astype(np.float64))].iloc[0]
        raise FrameError(f"results hold qid {stray!r}, which is not among the queries")
    left = queries.take(rows.astype(np.int64)).reset_index(drop=True)
    right = results[[name for name in results.columns if name not in queries.columns]]
    return pd.concat([left, right.reset_index(drop=True)], axis=1)


_EARLIER = re.compile(r"query_(\d+)")


def push_query(frame: pd.DataFrame, text: ObjectArray) -> pd.DataFrame:
    """Returns the frame with a new ``query``; the old text becomes ``query_0``, that ``query_1``.

    Term weights of the old text (``query_toks``) and its vector (``query_vec``) are dropped, since
    they no longer belong to the text.
    """
    earlier = [name for name in frame.columns if _EARLIER.fullmatch(name)]
    renames = {name: f"query_{int(name[6:]) + 1}" for name in earlier}
    renamed = frame.rename(columns={**renames, "query": "query_0"}).drop(
        columns=["query_toks", "query_vec"], errors="ignore"
    )
    return renamed.assign(query=column(text))[
        ["qid", "query", *[name for name in renamed.columns if name not in ("qid", "query")]]
    ]


def original_query(frame: pd.DataFrame) -> pd.Series:
    """Returns the user's own text: the ``query_N`` with the highest number, else ``query``."""
    numbers = [int(match[1]) for name in frame.columns if (match := _EARLIER.fullmatch(name))]
    return frame[f"query_{max(numbers)}"] if numbers else frame["query"]


def stack(
    vectors: pd.Series,
    where: str,
    qids: Sequence[str] | ObjectArray | pd.Series,
    docnos: Sequence[str] | ObjectArray | pd.Series | None = None,
) -> FloatArray:
    """Stacks a column of vectors into (n, d) float32, C-contiguous.

    Args:
        vectors: One flat vector per row.
        where: The stage, for messages.
        qids: Query of each row, for messages.
        docnos: Document of each row, for messages, where the vectors are documents'.

    Raises:
        FrameError: If one is missing, not a vector, of another length, or not finite; names column,
            qid and docno.
    """

    def cell(row: int) -> str:
        docno = "" if docnos is None else f", docno {np.asarray(docnos, dtype=object)[row]!r},"
        qid = np.asarray(qids, dtype=object)[row]
        return f"{where}: column '{vectors.name}' of qid {qid!r}{docno} holds"

    rows: list[npt.NDArray[np.number]] = []
    for row, value in enumerate(vectors.to_numpy(dtype=object)):
        numbers = _numbers(value)
        if numbers is None:
            raise FrameError(f"{cell(row)} {shorten(value)}; every row needs a flat vector")
        if rows and len(numbers) != len(rows[0]):
            raise FrameError(
                f"{cell(row)} {len(numbers)} numbers; every row needs a vector of {len(rows[0])}"
            )
        rows.append(numbers)
    if not rows:
        return np.zeros((0, 0), dtype=np.float32)
    with np.errstate(over="ignore"):
        out: FloatArray = np.stack(rows, dtype=np.float32, casting="unsafe")
    bad = np.flatnonzero(~np.isfinite(out).all(axis=1))
    if bad.size:
        raise FrameError(f"{cell(int(bad[0]))} NaN or infinity; encode it again")
    return out


def _numbers(value: object) -> npt.NDArray[np.number] | None:
    """Returns a flat array of real numbers, or None for anything else."""
    if not isinstance(value, (np.ndarray, list, tuple)):
        return None
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        return None
    return array if array.ndim == 1 and array.dtype.kind in "fiu" else None

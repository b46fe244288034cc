"""The scaffold of every feedback method: which documents, which queries, which columns.

A method implements one function of one query and its feedback documents. Everything around it is
here: the first ``fb_docs`` in canonical order, fewer where there are fewer; queries without results
pass through unchanged; document columns end; errors name stage and query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from prf.errors import FrameError, PrfError, shorten
from prf.frames import (
    FloatArray,
    IntArray,
    ObjectArray,
    column,
    missing_error,
    need,
    objects,
    push_query,
    queries_of,
    query_columns,
    ranked,
    stack,
)
from prf.lucene import LuceneIndex
from prf.lucene import open_index as open_lucene
from prf.pipeline import Depth, Resource, Transformer

# The fields below are typed as present, so that a method need not ask; a method's ``needs`` and its
# base class decide which ones are.


@dataclass(frozen=True)
class Query:
    """One query as a method sees it; a column that is not there is None."""

    qid: str
    text: str
    vec: FloatArray = None  # type: ignore[assignment]
    toks: dict[str, float] = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Terms:
    """The v usable terms of n feedback documents, ascending, and what the collection says of them.

    ``names`` is (v,); ``tf`` (n, v) float32, occurrences in each document (impacts, in an impact
    index); ``df`` and ``cf`` (v,) int64, documents with the term and occurrences in the collection;
    ``lengths`` (n,) int64, all occurrences in each document, of terms that are not usable too;
    ``n_docs`` and ``tokens`` the documents and occurrences of the collection; ``query_df`` the
    documents with each term of the query, of which not all need occur in the feedback documents.
    """

    names: ObjectArray
    tf: FloatArray
    df: IntArray
    cf: IntArray
    lengths: IntArray
    n_docs: int
    tokens: int
    query_df: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Docs:
    """Feedback documents of one query, best first; what the method does not need is None.

    ``scores`` is (n,) float64, larger is better; ``vecs`` (n, d) float32; ``texts`` (n,) str.
    """

    docnos: ObjectArray
    scores: npt.NDArray[np.float64]
    vecs: FloatArray = None  # type: ignore[assignment]
    texts: ObjectArray = None  # type: ignore[assignment]
    terms: Terms = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.docnos)


class Feedback(Transformer, abstract=True):
    """Base of all feedback: a result frame in, a query frame out.

    A subclass has a field ``fb_docs`` (how many of the first documents are used; 0 leaves the query
    as it is) and, where it reads the end of the list too, says how far in `last_docs`.
    """

    fb_docs: Depth

    needs: ClassVar[tuple[str, ...]] = ("qid", "query", "docno", "score")

    @property
    def last_docs(self) -> int:
        """How many of the last documents are read besides the first ``fb_docs``."""
        return 0

    @property
    def depth(self) -> int | None:
        return None if self.last_docs else self.fb_docs

    def at_most(self, documents: int | None) -> None:
        return None  # queries, without documents

    def outputs(self, columns: Sequence[str]) -> list[str]:
        missing = [name for name in self.needs if name not in columns]
        if missing:
            raise missing_error(missing, columns, repr(self))
        kept = query_columns(columns)
        return [*kept, *(name for name in self.gives if name not in kept)]

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        results = self._read(ranked(frame))
        if queries is None:
            queries = queries_of(frame)
        queries = queries[query_columns(queries.columns)].reset_index(drop=True)
        need(queries, [n for n in self.needs if n in query_columns(self.needs)], repr(self))
        return self.new_queries(results, queries)

    def _read(self, results: pd.DataFrame) -> pd.DataFrame:
        rank = results["rank"]
        if not self.last_docs:
            return results[rank < self.fb_docs].reset_index(drop=True)
        size = results.groupby("qid", sort=False)["rank"].transform("size")
        return results[(rank < self.fb_docs) | (rank >= size - self.last_docs)].reset_index(
            drop=True
        )

    def new_queries(self, frame: pd.DataFrame, queries: pd.DataFrame) -> pd.DataFrame:
        """Returns the new queries; ``frame`` holds the feedback documents in canonical order."""
        raise NotImplementedError

    def feedback(
        self, frame: pd.DataFrame, queries: pd.DataFrame
    ) -> Iterator[tuple[int, Query, Docs]]:
        """Yields (row of the query, query, its documents) for queries that have any."""
        position = {qid: row for row, qid in enumerate(queries["qid"])}
        if self.fb_docs == 0 or len(frame) == 0:
            return
        qids = frame["qid"].to_numpy(dtype=object)
        starts = np.flatnonzero(np.concatenate([[True], qids[1:] != qids[:-1]]))
        stops = np.append(starts[1:], len(qids))
        docnos = frame["docno"].to_numpy(dtype=object)
        scores = frame["score"].to_numpy(dtype=np.float64)
        cells = [
            queries[name].to_numpy(dtype=object)
            if name in queries.columns
            else [None] * len(queries)
            for name in ("qid", "query", "query_vec", "query_toks")
        ]
        read: dict[str, Any] = {}
        if "doc_vec" in self.needs:
            read["vecs"] = stack(frame["doc_vec"], repr(self), qids, docnos)
        if "text" in self.needs:
            read["texts"] = frame["text"].to_numpy(dtype=object)
        for start, stop in zip(starts, stops, strict=True):
            row = position.get(qids[start])
            if row is None:
                raise FrameError(
                    f"{self!r}: results hold qid {qids[start]!r}, which is not a query"
                )
            part = slice(start, stop)
            yield (
                row,
                Query(*(values[row] for values in cells)),  # type: ignore[arg-type]
                Docs(
                    docnos[part],
                    scores[part],
                    **{name: values[part] for name, values in read.items()},
                ),
            )

    def reformulated(self, query: Query, docs: Docs) -> object:
        """Calls the method; an error names stage and query, with the original as its cause."""
        try:
            return self.reformulate(query, docs)
        except PrfError:
            raise
        except Exception as error:
            raise PrfError(
                f"{self!r}, qid {query.qid!r}: {type(error).__name__}: {error}; "
                "the method failed for this query"
            ) from error

    def reformulate(self, query: Query, docs: Docs) -> object:
        """Returns the new query; ``docs`` has at least one document.

        They are the first ``fb_docs`` or fewer; with `last_docs`, the last ones of the list follow
        (in a short list a document may be both, and stands once).
        """
        raise NotImplementedError


class VectorFeedback(Feedback, abstract=True):
    """Feedback that returns a new dense vector; ``reformulate`` returns (d,)."""

    needs: ClassVar[tuple[str, ...]] = (
        "qid",
        "query",
        "query_vec",
        "docno",
        "score",
        "doc_vec",
    )

    def new_queries(self, frame: pd.DataFrame, queries: pd.DataFrame) -> pd.DataFrame:
        old = objects(stack(queries["query_vec"], repr(self), queries["qid"]))
        queries = queries.assign(query_vec=column(old))
        new = old.copy()
        for row, query, docs in self.feedback(frame, queries):
            new[row] = self._checked(query, docs)
        return queries.assign(query_vec=column(new))

    def _checked(self, query: Query, docs: Docs) -> FloatArray:
        where = f"{self!r}, qid {query.qid!r}"
        if query.vec.shape != docs.vecs.shape[1:]:
            raise FrameError(
                f"{where}: the query vector has {len(query.vec)} numbers, the document vectors "
                f"{docs.vecs.shape[1]}; take both from one encoder"
            )
        given = self.reformulated(query, docs)
        try:
            with np.errstate(over="ignore"):
                vec = np.asarray(given, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise FrameError(f"{where}: the new vector is {shorten(given)}: {error}") from error
        if vec.shape != query.vec.shape or not np.isfinite(vec).all():
            raise FrameError(
                f"{where}: the new vector has shape {vec.shape} or is not finite; "
                "check the weights and the vectors"
            )
        return vec


class TermFeedback(Feedback, abstract=True):
    """Feedback that returns weighted terms; ``reformulate`` returns ``{term: weight}``.

    Term vectors come from ``index``, so the documents may come from any ranker. Where the frame has
    no ``query_toks`` yet, the query is the analysed text with counts as weights.
    """

    index: str

    gives = ("query_toks",)

    def usable(self, terms: ObjectArray, df: IntArray, n_docs: int) -> npt.NDArray[np.bool_]:
        """Tells which of the terms may be used, by spelling and document frequency; here all."""
        return np.ones(len(terms), dtype=bool)

    def resources(self) -> list[Resource]:
        return [Resource("term vectors of Lucene index", self.index, self.index)]

    def new_queries(self, frame: pd.DataFrame, queries: pd.DataFrame) -> pd.DataFrame:
        index = open_lucene(self.index)
        queries = queries.assign(query_toks=query_terms(queries, index))
        new = queries["query_toks"].to_numpy(dtype=object).copy()
        if self.fb_docs > 0 and len(frame) > 0:
            vectors = _TermCounts(self, index, frame["docno"].to_numpy(dtype=object))
            own = _query_frequencies(index, list(new))
            for row, query, docs in self.feedback(frame, queries):
                terms = replace(vectors.of(docs.docnos), query_df=own[row])
                docs = replace(docs, terms=terms)
                new[row] = self.reformulated(query, docs)
        return queries.assign(query_toks=column(new))


def query_terms(queries: pd.DataFrame, index: LuceneIndex) -> pd.Series:
    """Returns each query as weighted terms: ``query_toks`` if there, else its analysed text."""
    if "query_toks" in queries.columns:
        return queries["query_toks"]
    for qid, text in zip(queries["qid"], queries["query"], strict=True):
        if not isinstance(text, str):
            raise FrameError(f"query of qid {qid!r} is {text!r}, not text")
    return column(objects(index.analyze(list(queries["query"]))))


def _query_frequencies(
    index: LuceneIndex, queries: Sequence[dict[str, float]]
) -> list[dict[str, int]]:
    """Returns the document frequency of every term of every query, asked for in one go."""
    names = list(dict.fromkeys(name for query in queries for name in query))
    df = dict(zip(names, index.frequencies(names).tolist(), strict=True))
    return [{name: df[name] for name in query} for query in queries]


class _TermCounts:
    """Usable terms of all feedback documents of a batch, fetched from the index in one go."""

    def __init__(self, stage: TermFeedback, index: LuceneIndex, docnos: ObjectArray) -> None:
        unique = np.array(sorted(set(docnos)), dtype=object)
        self._row = {docno: row for row, docno in enumerate(unique)}
        self._vectors = index.term_vectors(index.docids(unique))
        self._names = np.array(self._vectors.vocabulary, dtype=object)
        self._usable = stage.usable(self._names, self._vectors.df, index.n_docs)
        self._statistics = index.statistics

    def of(self, docnos: ObjectArray) -> Terms:
        """Returns the terms of some documents."""
        vectors, rows = self._vectors, [self._row[docno] for docno in docnos]
        ids, counts = [], []
        for row in rows:
            part = slice(vectors.ptr[row], vectors.ptr[row + 1])
            keep = self._usable[vectors.terms[part]]
            ids.append(vectors.terms[part][keep])
            counts.append(vectors.tf[part][keep])
        vocabulary = np.unique(np.concatenate(ids))
        vocabulary = vocabulary[np.argsort(self._names[vocabulary], kind="stable")]
        place = np.empty(len(self._names), dtype=np.int64)
        place[vocabulary] = np.arange(len(vocabulary))
        tf = np.zeros((len(rows), len(vocabulary)), dtype=np.float32)
        for number, (own, count) in enumerate(zip(ids, counts, strict=True)):
            tf[number, place[own]] = count
        return Terms(
            self._names[vocabulary],
            tf,
            vectors.df[vocabulary],
            vectors.cf[vocabulary],
            vectors.lengths[rows],
            self._statistics.documents,
            self._statistics.tokens,
        )


class TextFeedback(Feedback, abstract=True):
    """Feedback that returns a new text; the old one moves to ``query_0``."""

    needs: ClassVar[tuple[str, ...]] = ("qid", "query", "docno", "score", "text")

    def outputs(self, columns: Sequence[str]) -> list[str]:
        kept = super().outputs(columns)
        return list(push_query(pd.DataFrame(columns=kept, dtype=object), objects([])).columns)

    def new_queries(self, frame: pd.DataFrame, queries: pd.DataFrame) -> pd.DataFrame:
        text = queries["query"].to_numpy(dtype=object).copy()
        for row, query, docs in self.feedback(frame, queries):
            text[row] = str(self.reformulated(query, docs))
        return push_query(queries, text)

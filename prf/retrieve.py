"""Retrievers (a query frame in, a result frame out) and loaders of what documents hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyterrier as pt

from prf.errors import FileFormatError, FrameError, IndexStateError, SpecError
from prf.feedback.base import Feedback, query_terms
from prf.frames import (
    Hits,
    ObjectArray,
    column,
    is_results,
    missing_error,
    objects,
    queries_of,
    query_codes,
    query_columns,
    ranks_of,
    stack,
)
from prf.index import open_index as open_vectors
from prf.lucene import open_index as open_lucene
from prf.pipeline import Count, Depth, Resource, Transformer, notice
from prf.trec import IR_DATASETS, read_docs, read_run


class Retriever(Transformer, abstract=True):
    """Base of retrievers: field ``k``; query columns are kept, results in canonical order."""

    k: Count

    gives = ("docno", "score", "rank")

    def cut(self, k: int) -> Self:
        return self if k >= self.k else replace(self, k=k)

    def at_most(self, documents: int | None) -> int:
        return self.k

    def outputs(self, columns: Sequence[str]) -> list[str]:
        missing = [name for name in self.needs if name not in columns]
        if missing:
            raise missing_error(missing, columns, repr(self))
        return [*query_columns(columns), *self.gives]

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        if is_results(frame):
            frame = queries if queries is not None else queries_of(frame)
        frame = frame[query_columns(frame.columns)]
        hits, docnos = self.search(frame)
        return result_frame(frame, hits, docnos)

    def search(self, queries: pd.DataFrame) -> tuple[Hits, ObjectArray]:
        """Returns the hits of every query and the docno of every row of the index."""
        raise NotImplementedError


def result_frame(queries: pd.DataFrame, hits: Hits, docnos: ObjectArray) -> pd.DataFrame:
    """Returns hits as a result frame: query columns repeated, docno, score float64, rank from 0."""
    rows = np.repeat(np.arange(len(queries)), np.diff(hits.ptr))
    columns = {name: column(queries[name].to_numpy(dtype=object)[rows]) for name in queries.columns}
    return pd.DataFrame(
        {
            **columns,
            "docno": column(docnos[hits.ids]),
            "score": hits.scores.astype(np.float64),
            "rank": ranks_of(rows),
        }
    )


@dataclass(frozen=True, repr=False)
class BM25(Retriever):
    """BM25 over a Lucene index, scored as Anserini scores it.

    Needs: qid, query
    Gives: qid, query, docno, score, rank

    ``score`` is Lucene's BM25 sum (no ``k1 + 1`` in the numerator, document length in one byte),
    above 0; comparable within a query only. Where the frame has ``query_toks`` (after term
    feedback) those weighted terms are searched, else the analysed text: plain text, never a query
    language. A query with no indexed term has no rows and is named once.

    Source: Robertson et al., TREC-3, in the form of Lucene's ``BM25Similarity`` with Anserini's
    default parameters.

    Args:
        index: Folder of a Lucene index (``prf index``, or any Anserini index).
        k1: Saturation of term frequency.
        b: Strength of length normalisation, 0 to 1.
        k: How many documents per query.
        threads: Searching threads; 0 for all cores. Does not change results.
        idf: False leaves idf out, for queries whose weights take its place (`BM25Prf`).
    """

    index: str
    k1: float = 0.9
    b: float = 0.4
    k: Count = 1000
    threads: Depth = 0
    idf: bool = True

    needs = ("qid", "query")

    def check(self) -> None:
        if self.k1 < 0 or not 0 <= self.b <= 1:
            raise SpecError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, not k1={self.k1}, b={self.b}")

    def resources(self) -> list[Resource]:
        return [Resource("Lucene index", self.index, self.index)]

    def search(self, queries: pd.DataFrame) -> tuple[Hits, ObjectArray]:
        index = open_lucene(self.index)
        toks = list(query_terms(queries, index))
        hits = index.search(toks, self.k, self.k1, self.b, threads=self.threads, idf=self.idf)
        _notice_empty(queries, toks, hits, "have no term left after analysis and retrieve nothing")
        return hits, index.docnos


@dataclass(frozen=True, repr=False)
class Impact(Retriever):
    """Learned sparse retrieval: the inner product of weighted terms, over an impact index.

    Needs: qid, query, query_toks
    Gives: qid, query, query_toks, docno, score, rank

    ``score`` is the sum over shared terms of query weight times the document's whole-number weight,
    above 0. A query without terms has no rows and is named once.

    Source: Lin and Ma, A Few Brief Notes on DeepImpact, COIL, and a Conceptual Framework for
    Information Retrieval Techniques, arXiv 2106.14807; scored as Anserini's impact search.

    Args:
        index: Folder of an impact index (ours, or Anserini's ``-impact -pretokenized``).
        k: How many documents per query.
        threads: Searching threads; 0 for all cores. Does not change results.
    """

    index: str
    k: Count = 1000
    threads: Depth = 0

    needs = ("qid", "query", "query_toks")

    def resources(self) -> list[Resource]:
        return [Resource("impact index", self.index, self.index)]

    def search(self, queries: pd.DataFrame) -> tuple[Hits, ObjectArray]:
        index = open_lucene(self.index)
        toks = list(queries["query_toks"])
        hits = index.search_impacts(toks, self.k, threads=self.threads)
        _notice_empty(queries, toks, hits, "have no weighted term and retrieve nothing")
        return hits, index.docnos


def _notice_empty(
    queries: pd.DataFrame, toks: Sequence[dict[str, float]], hits: Hits, what: str
) -> None:
    """Tells of queries without terms, and of those whose terms no document has."""
    rows = list(zip(queries["qid"], toks, np.diff(hits.ptr), strict=True))
    notice(what, [qid for qid, terms, _ in rows if not terms])
    notice("match no document", [qid for qid, terms, found in rows if terms and found == 0])


@dataclass(frozen=True, repr=False)
class DenseRetriever(Retriever):
    """Exact nearest neighbours in a dense index.

    Needs: qid, query, query_vec
    Gives: qid, query, query_vec, docno, score, rank

    ``score`` is the inner product (of unit vectors in a cosine index), rounded once to float32, so
    that it depends neither on batch, threads and ``k`` nor on the back end. Larger is better.

    Args:
        index: Folder of a dense index (``prf index``).
        k: How many documents per query.
        backend: Who computes the candidates; results are the same.
        threads: Searching threads; 0 for all cores. Does not change results.
        force_encoder: Accept query vectors of another encoder than the index was built with.
    """

    index: str
    k: Count = 1000
    backend: Literal["numpy", "faiss"] = "numpy"
    threads: Depth = 0
    force_encoder: bool = False

    needs = ("qid", "query", "query_vec")

    def resources(self) -> list[Resource]:
        return [Resource("dense index", self.index, self.index)]

    def check_after(self, earlier: Sequence[pt.Transformer]) -> None:
        if not self.force_encoder:
            check_encoder(self, self.index, earlier)

    def search(self, queries: pd.DataFrame) -> tuple[Hits, ObjectArray]:
        index = open_vectors(self.index)
        vectors = stack(queries["query_vec"], repr(self), queries["qid"])
        if len(vectors) == 0:
            vectors = np.zeros((0, index.dim), dtype=np.float32)
        hits = index.search(vectors, self.k, threads=self.threads, backend=self.backend)
        return hits, index.docnos


def check_encoder(stage: Transformer, index: str, earlier: Sequence[pt.Transformer]) -> None:
    """Refuses query vectors of another encoder than the dense index was built with.

    Raises:
        IndexStateError: If both are known and differ, or for an index that cannot be opened.
    """
    # A feedback encoder is another model than the index's by design, and trained for it.
    encoders = [
        other
        for other in earlier
        if "query_vec" in getattr(other, "gives", ()) and not isinstance(other, Feedback)
    ]
    built = open_vectors(index).meta.get("encoder") or {}
    for name in ("model", "layout"):
        given = getattr(encoders[-1], name, None) if encoders else None
        theirs = built.get(name)
        if not given or given == "auto" or not theirs or given == theirs:
            continue
        raise IndexStateError(
            f"{stage!r}: index '{index}' was built with encoder {built.get('model')!r}"
            f"{'' if name == 'model' else f', layout {theirs!r}'}, the queries come from "
            f"{given!r}; use the same one, or force_encoder=True if they are equal"
        )


@dataclass(frozen=True, repr=False)
class RunFile(Retriever):
    """The results that a TREC run holds for each query, by qid.

    Needs: qid
    Gives: qid, docno, score, rank

    ``score`` is the run's, float64, larger is better; its rank column is not read, equal scores
    stand by docno. A query that the run does not hold has no rows and is named once. The file is
    read whole, once, and again after it changed.

    After vector feedback the same stage brings the same candidates back, for the new query:
    ``RunFile(r) >> Vectors(i) >> Rocchio() >> RunFile(r) >> DenseRescorer(i)``.

    Args:
        path: The run file, also ``.gz``.
        k: How many documents per query.
    """

    path: str
    k: Count = 1000

    def resources(self) -> list[Resource]:
        return [Resource("run file", self.path, self.path)]

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        if is_results(frame):
            frame = queries if queries is not None else queries_of(frame)
        frame = frame[query_columns(frame.columns)]
        bounds, docnos, scores = _run(self.path, _stamp(self.path))
        notice(
            f"are not in run '{self.path}' and have no results",
            [qid for qid in frame["qid"] if qid not in bounds],
        )
        pairs = [bounds.get(qid, (0, 0)) for qid in frame["qid"]]
        starts, stops = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        sizes = np.minimum(stops - starts, self.k)
        ptr = np.concatenate([[0], np.cumsum(sizes)])
        rows = np.arange(ptr[-1]) + np.repeat(starts - ptr[:-1], sizes)
        hits = Hits(ptr, rows, scores[rows].astype(np.float32))
        # Hits are float32; a run may say more.
        return result_frame(frame, hits, docnos).assign(score=scores[rows])


@lru_cache(maxsize=4)
def _run(
    path: str, stamp: int
) -> tuple[dict[str, tuple[int, int]], ObjectArray, npt.NDArray[np.float64]]:
    """Returns where each query starts and stops in the run, and its docnos and scores."""
    run = read_run(path)
    codes, qids = query_codes(run["qid"])
    edges = np.searchsorted(codes, np.arange(len(qids) + 1)).tolist()  # queries stand together
    bounds = dict(zip(qids.tolist(), pairwise(edges), strict=True))
    return bounds, run["docno"].to_numpy(dtype=object), run["score"].to_numpy(dtype=np.float64)


class Loader(Transformer, abstract=True):
    """Base of stages that add a column to documents, by docno."""

    needs = ("qid", "docno")

    @property
    def rowwise(self) -> bool:
        return True

    def load(self, docnos: ObjectArray) -> Sequence[object]:
        """Returns the value for each of the distinct docnos.

        Raises:
            IndexStateError: If one is not there; names it and the source.
        """
        raise NotImplementedError

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        codes, unique = pd.factorize(frame["docno"].to_numpy(dtype=object))
        values = objects(self.load(unique)) if len(unique) else np.empty(0, dtype=object)
        return frame.assign(**{self.gives[0]: column(values[codes])})


@dataclass(frozen=True, repr=False)
class Vectors(Loader):
    """Adds the document vectors stored in a dense index.

    Needs: qid, docno
    Gives: qid, docno, doc_vec

    ``doc_vec`` is (d,) float32 as stored (unit length in a cosine index). The documents may come
    from any ranker; a docno the index does not hold is an error.

    Args:
        index: Folder of a dense index.
    """

    index: str

    gives = ("doc_vec",)

    def resources(self) -> list[Resource]:
        return [Resource("dense index", self.index, self.index)]

    def load(self, docnos: ObjectArray) -> Sequence[object]:
        return list(open_vectors(self.index).get(list(docnos)))


@dataclass(frozen=True, repr=False)
class Text(Loader):
    """Adds the documents' text.

    Needs: qid, docno
    Gives: qid, docno, text

    A docno the source does not hold is an error that names both.

    Args:
        source: A Lucene index, a dense index built with texts, a document file (read whole, once),
            or ``ir_datasets:NAME``.
    """

    source: str

    gives = ("text",)

    def resources(self) -> list[Resource]:
        if self.source.startswith(IR_DATASETS):
            return [Resource("texts of", self.source)]
        return [Resource("texts of", self.source, self.source)]

    def load(self, docnos: ObjectArray) -> Sequence[object]:
        names = list(docnos)
        if not self.source.startswith(IR_DATASETS) and os.path.isdir(self.source):
            if os.path.exists(os.path.join(self.source, "meta.json")):
                return open_vectors(self.source).texts(names)
            lucene = open_lucene(self.source)
            return lucene.texts(lucene.docids(names))
        store = _texts(self.source, _stamp(self.source))
        missing = next((name for name in names if name not in store), None)
        if missing is not None:
            raise FrameError(f"{self!r}: '{self.source}' holds no docno {missing!r}")
        return [store[name] for name in names]


def _stamp(source: str) -> int:
    try:
        return os.stat(source).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=2)
def _texts(source: str, stamp: int) -> dict[str, str]:
    store: dict[str, str] = {}
    for number, (docno, text) in enumerate(read_docs(source), start=1):
        if docno in store:
            raise FileFormatError(
                f"{source}: docno {docno!r} stands twice, again as document {number}"
            )
        store[docno] = text
    return store

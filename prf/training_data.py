"""What a training reads: queries, their feedback, positives and negatives, as rows of an index.

Made once by running the first pass, then kept on disk under a fingerprint of all that decides it
(topics, judgments, stages, index, depths): the same inputs find it again, others never do. A folder
gets its name when it is whole; until then finished batches of the first pass lie beside it, so that
an interrupted one goes on. Documents are not copied: rows point into the index.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyterrier as pt
from tqdm import tqdm

from prf.batch import batches, checksums
from prf.errors import EvaluationError, FileFormatError, FrameError
from prf.frames import FloatArray, IntArray, ObjectArray, column, need, ranked, stack
from prf.index import open_index, read_json
from prf.lucene import open_index as open_lucene
from prf.pipeline import Compose, Resource, notice
from prf.retrieve import DenseRetriever, Impact
from prf.spec import to_spec
from prf.training_config import QuerySet
from prf.trec import PathLike, read_qrels, read_run, read_topics, write_json

FORMAT = 2
BATCH = 500


@dataclass(frozen=True, eq=False)
class Lists:
    """One list of document rows for each query; that of query i is ``rows[ptr[i]:ptr[i + 1]]``."""

    ptr: IntArray
    rows: IntArray

    def of(self, queries: IntArray) -> Lists:
        """Returns the lists of some queries, in their order."""
        sizes = self.ptr[queries + 1] - self.ptr[queries]
        ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        places = np.arange(ptr[-1]) + np.repeat(self.ptr[queries] - ptr[:-1], sizes)
        return Lists(ptr, np.asarray(self.rows)[places])

    @property
    def owners(self) -> IntArray:
        """The number of the query of every row: ascending."""
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Queries ready for training; arrays are memory-mapped.

    Attributes:
        qids: (n,) of str.
        texts: (n,) of str.
        vectors: (n, d) float32, the queries' own; (n, 0) if none were asked for.
        feedback: (n, depth) rows of the index, best first; -1 where the first pass found no more.
        positives: Relevant documents that the index holds, ascending by row.
        negatives: Retrieved ones that are not relevant, best first.
        counts: What was left out, and why.
        fingerprint: SHA-256 of all inputs.
    """

    qids: ObjectArray
    texts: ObjectArray
    vectors: FloatArray
    feedback: IntArray
    positives: Lists
    negatives: Lists
    counts: dict[str, int]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.qids)

    @property
    def queries(self) -> pd.DataFrame:
        """The query frame: qid, query."""
        return pd.DataFrame({"qid": column(self.qids), "query": column(self.texts)})


def prepare(
    queries: QuerySet,
    index: PathLike,
    cache: PathLike,
    *,
    fb_docs: int,
    negative_depth: int = 0,
    sparse: bool = False,
    vectors: bool = True,
    all_queries: bool = False,
    progress: bool = False,
) -> TrainingData:
    """Returns the training data of a query set, from the cache if it is there.

    Args:
        queries: Where everything comes from.
        index: Dense index, or impact index for ``sparse``.
        cache: Folder in which the data is kept, in a folder named by its fingerprint.
        fb_docs: How many documents of the first pass are kept as feedback.
        negative_depth: How many of its first documents, less the positives, are negatives.
        sparse: Rows are those of an impact index.
        vectors: Keep the queries' vectors.
        all_queries: Keep queries without a positive in the index too, as for a dev set.
        progress: Show a bar on stderr.

    Raises:
        EvaluationError: If no query has a positive in the index.
        IndexStateError: If the first pass returns a document that the index does not hold.
        PrfError: Whatever a stage or a reader raises; nothing is kept then.
    """
    inputs = {
        "format": FORMAT,
        **_sources(queries, os.fspath(index), sparse),
        "fb_docs": fb_docs,
        "negative_depth": negative_depth,
        "vectors": vectors,
        "all_queries": all_queries,
    }
    fingerprint = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    folder = Path(cache) / fingerprint[:16]
    if read_json(folder / "meta.json").get("fingerprint") != fingerprint:
        parts = _Parts(folder.with_name(f"{folder.name}.parts"))
        data = _Maker(queries, os.fspath(index), sparse, vectors, fb_docs, negative_depth, parts)
        arrays, lines, counts = data.make(all_queries, progress)
        _keep(folder, arrays, lines, {"fingerprint": fingerprint, "counts": counts, **inputs})
        parts.remove()
    return _read(folder)


def _sources(queries: QuerySet, index: str, sparse: bool) -> dict[str, Any]:
    """Returns where the data comes from, as JSON: names with checksums of what they hold."""
    stages = [queries.queries, _search(queries, index, sparse)]
    pipeline = [stage for stage in stages if stage is not None]
    kind = "impact index" if sparse else "dense index"
    resources = [Resource(kind, index, index)]
    for stage in pipeline:
        resources += stage.resources()
    for name in (queries.topics, queries.qrels, queries.run):
        if name is not None and os.path.isfile(name):
            resources.append(Resource("file", name, name))
    return {
        "queries": {
            item.name: getattr(queries, item.name)
            for item in fields(QuerySet)
            if item.name not in ("queries", "first_pass")
        },
        "pipeline": [to_spec(stage, defaults=True) for stage in pipeline],
        "checksums": checksums(resources),
        "sparse": sparse,
    }


def _search(queries: QuerySet, index: str, sparse: bool) -> pt.Transformer | None:
    """Returns the stage from queries to first results; None where a run file has them."""
    if queries.run is not None:
        return None
    return queries.first_pass or (Impact(index) if sparse else DenseRetriever(index))


class _Parts:
    """Finished batches of a first pass: vectors, rows of all queries, and how many each has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, start: int) -> list[npt.NDArray[Any]] | None:
        """Returns the batch that begins with a query, None if it is not there."""
        try:
            with np.load(self.folder / f"{start:09d}.npz", allow_pickle=False) as held:
                return [held[name] for name in ("vectors", "rows", "sizes")]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None

    def put(self, start: int, vectors: FloatArray, rows: IntArray, sizes: IntArray) -> None:
        """Keeps a batch; another training may be doing the same."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                np.savez(file, vectors=vectors, rows=rows, sizes=sizes)
            os.replace(file.name, self.folder / f"{start:09d}.npz")
        except OSError as error:
            raise FileFormatError(
                f"cache '{self.folder.parent}' cannot be written: {error}"
            ) from error

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class _Maker:
    """Makes the data of one query set."""

    def __init__(
        self,
        queries: QuerySet,
        index: str,
        sparse: bool,
        vectors: bool,
        fb_docs: int,
        negatives: int,
        parts: _Parts,
    ) -> None:
        self.queries, self.vectors, self.parts = queries, vectors, parts
        self.search = _search(queries, index, sparse)
        self.fb_docs, self.negatives = fb_docs, negatives
        self.depth = max(fb_docs, negatives)
        if sparse:
            lucene = open_lucene(index)
            self.docnos, self.rows = lucene.docnos, lucene.docids
        else:
            dense = open_index(index)
            self.docnos, self.rows = dense.docnos, dense.rows

    def make(
        self, all_queries: bool, progress: bool
    ) -> tuple[dict[str, npt.NDArray[Any]], list[tuple[str, str]], dict[str, int]]:
        """Returns the arrays by name, (qid, text) of every query, and the counts."""
        topics = read_topics(self.queries.topics)
        positives, counts = self._positives()
        judged = np.array([qid in positives for qid in topics["qid"]], dtype=bool)
        counts |= {"topics": len(topics), "without_positive": int((~judged).sum())}
        if not judged.any():
            raise EvaluationError(
                f"no query of '{self.queries.topics}' has a document of grade "
                f"{self.queries.rel} in '{self.queries.qrels}' that the index holds"
            )
        frame = topics if all_queries else topics[judged].reset_index(drop=True)
        vectors, found = self._first_pass(frame, progress)
        alone = [qid for qid, rows in zip(frame["qid"], found, strict=True) if len(rows) == 0]
        counts["without_first_results"] = len(alone)
        if self.depth:
            notice("have no first results, so they are trained on alone", alone)
        relevant = [positives.get(qid, np.zeros(0, dtype=np.int64)) for qid in frame["qid"]]
        feedback = np.full((len(frame), self.fb_docs), -1, dtype=np.int64)
        negatives = []
        for number, (rows, known) in enumerate(zip(found, relevant, strict=True)):
            first = rows[: self.fb_docs]
            feedback[number, : len(first)] = first
            first = rows[: self.negatives]
            negatives.append(first[~np.isin(first, known)])
        arrays: dict[str, npt.NDArray[Any]] = {"vectors": vectors, "feedback": feedback}
        for name, lists in (("positives", relevant), ("negatives", negatives)):
            sizes = [len(rows) for rows in lists]
            arrays[f"{name}_ptr"] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            arrays[name] = np.concatenate([np.zeros(0, dtype=np.int64), *lists])
        return arrays, list(zip(frame["qid"], frame["query"], strict=True)), counts

    def _positives(self) -> tuple[dict[str, IntArray], dict[str, int]]:
        """Returns the rows of the relevant documents of each query that has any, ascending."""
        qrels = read_qrels(self.queries.qrels)
        qrels = qrels[qrels["label"] >= self.queries.rel]
        wanted = set(qrels["docno"])
        row_of = {name: row for row, name in enumerate(self.docnos) if name in wanted}
        rows = np.array([row_of.get(docno, -1) for docno in qrels["docno"]], dtype=np.int64)
        there = rows >= 0
        out: dict[str, list[int]] = {}
        for qid, row in zip(qrels["qid"].to_numpy()[there], rows[there].tolist(), strict=True):
            out.setdefault(qid, []).append(row)
        counts = {"positives": int(there.sum()), "positives_not_in_index": int((~there).sum())}
        return {qid: np.array(sorted(of)) for qid, of in out.items()}, counts

    def _first_pass(self, frame: pd.DataFrame, progress: bool) -> tuple[FloatArray, list[IntArray]]:
        """Returns the query vectors, and the rows of the first results of every query."""
        stage, search = self.queries.queries, self.search
        run = pd.DataFrame() if self.queries.run is None else read_run(self.queries.run)
        if search is not None:
            search = search % max(1, self.depth)
            Compose((stage, search) if stage is not None else (search,)).check_after(())
        parts: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        with tqdm(total=len(frame), unit="query", disable=not progress) as bar:
            for number, batch in enumerate(batches(frame, BATCH)):
                made = self.parts.get(number * BATCH)
                if made is None or len(made[2]) != len(batch):
                    made = list(self._batch(batch, search, run))
                    self.parts.put(number * BATCH, *made)
                for held, part in zip(parts, made, strict=True):
                    held.append(part)
                bar.update(len(batch))
        vectors, rows, sizes = (np.concatenate(held) for held in parts)
        return vectors, np.split(rows, np.cumsum(sizes)[:-1])

    def _batch(
        self, batch: pd.DataFrame, search: pt.Transformer | None, run: pd.DataFrame
    ) -> tuple[FloatArray, IntArray, IntArray]:
        """Returns the vectors of some queries, the rows of their first results, and how many."""
        stage = self.queries.queries
        encoded = batch if stage is None else stage.transform(batch)
        vectors = np.zeros((len(batch), 0), dtype=np.float32)
        if self.vectors:
            need(encoded, ["query_vec"], repr(stage))
            vectors = stack(encoded["query_vec"], repr(stage), encoded["qid"])
        if self.depth == 0:
            results = batch.head(0).assign(docno="")
        elif search is not None:
            results = search.transform(encoded)
        else:
            results = ranked(run[run["qid"].isin(set(batch["qid"]))])
            results = results[results["rank"] < self.depth]
        found = self._found(batch["qid"], results)
        sizes = np.array([len(rows) for rows in found], dtype=np.int64)
        return vectors, np.concatenate(found), sizes

    def _found(self, qids: pd.Series, results: pd.DataFrame) -> list[IntArray]:
        rows = self.rows(results["docno"])
        place = {qid: number for number, qid in enumerate(qids)}
        other = next((qid for qid in results["qid"] if qid not in place), None)
        if other is not None:
            raise FrameError(
                f"{self.search!r} gave results for qid {other!r}, which it was not asked"
            )
        owner = np.array([place[qid] for qid in results["qid"]], dtype=np.int64)
        order = np.argsort(owner, kind="stable")
        cuts = np.searchsorted(owner[order], np.arange(1, len(qids)))
        return np.split(rows[order], cuts)


def _keep(
    folder: Path,
    arrays: dict[str, npt.NDArray[Any]],
    lines: Sequence[tuple[str, str]],
    meta: dict[str, Any],
) -> None:
    """Writes everything under another name, which becomes the folder's at the end."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise FileFormatError(f"cache '{folder.parent}' cannot be written: {error}") from error
    try:
        for name, array in arrays.items():
            np.save(place / f"{name}.npy", array, allow_pickle=False)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (place / "queries.jsonl").write_text(text, encoding="utf-8")
        write_json(meta, place / "meta.json")
        shutil.rmtree(folder, ignore_errors=True)  # one of another fingerprint, or damaged
        os.replace(place, folder)
    except OSError:
        # Another training may just have put the same data there.
        if read_json(folder / "meta.json").get("fingerprint") != meta["fingerprint"]:
            raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _read(folder: Path) -> TrainingData:
    def array(name: str) -> Any:
        return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    try:
        meta = read_json(folder / "meta.json")
        text = (folder / "queries.jsonl").read_text(encoding="utf-8")
        pairs = [json.loads(line) for line in text.split("\n") if line]
        return TrainingData(
            np.array([qid for qid, _ in pairs], dtype=object),
            np.array([query for _, query in pairs], dtype=object),
            array("vectors"),
            array("feedback"),
            Lists(np.asarray(array("positives_ptr")), array("positives")),
            Lists(np.asarray(array("negatives_ptr")), array("negatives")),
            meta["counts"],
            meta["fingerprint"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise FileFormatError(
            f"prepared data '{folder}' cannot be read ({error}); remove the folder"
        ) from error

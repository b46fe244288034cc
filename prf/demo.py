"""The embedded collection, and the main job run on it from end to end."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from prf.batch import search
from prf.build import build_dense, build_lucene
from prf.comparison import Comparison, compare
from prf.errors import IndexStateError
from prf.evaluation import evaluate
from prf.frames import ranked
from prf.index import open_index as open_vectors
from prf.lucene import open_index as open_lucene
from prf.spec import load, shipped
from prf.trec import read_docs, read_qrels, read_run, read_topics

PIPELINES = (
    "bm25",
    "bm25_rm3",
    "dense",
    "dense_average",
    "dense_prf",
    "bm25_dense_prf",
)
"""Shipped pipelines the demo runs, the baseline first."""

MEASURES = ("nDCG@10", "AP(rel=2)", "R(rel=2)@10", "RR(rel=2)")

EXAMPLE = ("dense", "dense_prf")
"""The two pipelines whose difference the examples show."""

LUCENE, DENSE = "indexes/demo-bm25", "indexes/demo-minilm"


class Collection(NamedTuple):
    """Paths of a test collection: documents, topics, judgments."""

    docs: Path
    topics: Path
    qrels: Path


def collection() -> Collection:
    """Returns the embedded test collection.

    336 original passages on 16 everyday topics, 80 short queries, grades 0 to 3 for every passage
    of a query's topic. Written for this package, judged by its writers before any system was run.
    """
    folder = Path(__file__).parent / "collection"
    return Collection(folder / "docs.jsonl", folder / "topics.tsv", folder / "qrels.txt")


class Move(NamedTuple):
    """One passage whose rank changed; ranks count from 1, None for not among the first ten."""

    docno: str
    grade: int
    before: int | None
    after: int | None
    text: str


class Example(NamedTuple):
    """A query whose first ten passages changed, with its nDCG@10 before and after."""

    qid: str
    query: str
    before: float
    after: float
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Demo:
    """What the demo measured."""

    comparison: Comparison
    examples: tuple[Example, ...]
    runs: tuple[Path, ...]


def build_demo_indexes(folder: Path, progress: bool = False) -> None:
    """Builds both indexes of the embedded collection under ``folder``, unless they are current."""
    docs = collection().docs
    source = f"embedded collection, sha256 {hashlib.sha256(docs.read_bytes()).hexdigest()}"
    sparse, dense = folder / LUCENE, folder / DENSE
    if _source(open_lucene, sparse) != source:
        build_lucene(sparse, docs, force=True, progress=progress, source=source)
    if _source(open_vectors, dense) != source:
        build_dense(
            dense, docs, "minilm", with_text=True, force=True, progress=progress, source=source
        )


def _source(opener: Callable[[Path], Any], path: Path) -> str | None:
    try:
        return str(opener(path).meta.get("source"))
    except IndexStateError:
        return None


def run_demo(folder: str | os.PathLike[str] = ".", progress: bool = False) -> Demo:
    """Indexes the embedded collection, runs the shipped pipelines, evaluates and compares them.

    Indexes lie in ``indexes/demo-*`` and runs in ``runs/demo`` under ``folder``; indexes of an
    earlier call are used again if the collection is the same, runs are written anew.

    Args:
        folder: Where to work.
        progress: Show bars on stderr.

    Raises:
        MissingDependency: If Java, FAISS or the MiniLM package is missing; names the extra.
    """
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    build_demo_indexes(folder, progress)
    topics = read_topics(collection().topics)
    runs = []
    # The shipped pipelines name their indexes relative to the working directory.
    with chdir(folder):
        for name in PIPELINES:
            run = folder / "runs" / "demo" / f"{name}.run"
            search(load(shipped(f"{name}.yaml")), topics, run, tag=name, force=True)
            runs.append(run)
    frame_of = {name: read_run(run) for name, run in zip(PIPELINES, runs, strict=True)}
    judged = read_qrels(collection().qrels)
    by_name = {n: evaluate(frame, judged, MEASURES, name=n) for n, frame in frame_of.items()}
    before, after = (by_name[name].per_query["nDCG@10"] for name in EXAMPLE)
    gain = after - before
    examples = [
        example(qid, topics, frame_of[EXAMPLE[0]], frame_of[EXAMPLE[1]], (before[qid], after[qid]))
        for qid in (str(gain.idxmax()), str(gain.idxmin()))
    ]
    return Demo(compare(list(by_name.values()), PIPELINES[0]), tuple(examples), tuple(runs))


def example(
    qid: str,
    topics: pd.DataFrame,
    before: pd.DataFrame,
    after: pd.DataFrame,
    values: tuple[float, float],
) -> Example:
    """Returns which passages entered, left or moved in the first ten of a query.

    Args:
        qid: The query.
        topics: Where its text stands.
        before: A result frame.
        after: Another one.
        values: The measure of the query in both, for show.
    """
    texts = dict(read_docs(collection().docs))
    judged = read_qrels(collection().qrels)
    judged = judged[judged["qid"] == qid]
    grades = dict(zip(judged["docno"], judged["label"], strict=True))
    old, new = (_top(results, qid) for results in (before, after))
    moved = [d for d in dict.fromkeys([*new, *old]) if new.get(d) != old.get(d)]
    moves = tuple(Move(d, grades.get(d, 0), old.get(d), new.get(d), texts[d]) for d in moved)
    query = topics.loc[topics["qid"] == qid, "query"].iloc[0]
    return Example(qid, query, float(values[0]), float(values[1]), moves)


def _top(results: pd.DataFrame, qid: str) -> dict[str, int]:
    frame = ranked(results)
    frame = frame[(frame["qid"] == qid) & (frame["rank"] < 10)]
    return {docno: rank + 1 for docno, rank in zip(frame["docno"], frame["rank"], strict=True)}

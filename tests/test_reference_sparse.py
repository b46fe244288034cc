"""BM25, RM3 and Rocchio over terms give what Pyserini gives on the same index; known figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import reference
from reference import DL19, DL20, NFCORPUS, Topics, figure, pyserini, readme_table

import prf
from prf import BM25, RM3, RocchioTerms

pytestmark = [
    pytest.mark.java,
    pytest.mark.slow,
    reference.needs_data,
    pytest.mark.filterwarnings("ignore:.*match no document:prf.errors.PrfWarning"),
]

CACM = Topics("cacm", "all")
VASWANI = Topics("vaswani", "all")
TOPICS = [NFCORPUS, DL19, DL20, CACM, VASWANI]
Indexes = Callable[[str], str]


@pytest.fixture(scope="session")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Indexes:
    """Returns a function that builds an index over ``text`` or other fields, once each."""
    folder = tmp_path_factory.mktemp("lucene")

    @cache
    def build(collection: str, *fields: str) -> str:
        path = folder / "-".join([collection, *fields])
        docs = reference.SHARED / collection / "docs.jsonl.gz"
        prf.build_lucene(path, docs, fields=fields)
        return str(path)

    return build


def pipeline(system: str, index: str, first: int = 1000) -> prf.Transformer:
    """Returns our ranking of that name; ``first`` is the depth of the first pass."""
    return expansion(system, index, first) >> BM25(index) if system != "bm25" else BM25(index)


def expansion(system: str, index: str, first: int) -> prf.Transformer:
    method = {
        "rm3": RM3(index),
        "rocchio": RocchioTerms(index),
        "rocchio-negative": RocchioTerms(index, gamma=0.15),
    }[system]
    return BM25(index, k=first) >> method


def queries(topics: Topics) -> tuple[pd.DataFrame, dict[str, str]]:
    frame = prf.read_topics(topics.topics)
    return frame, dict(zip(frame["qid"], frame["query"], strict=True))


def reported(scores: np.ndarray) -> np.ndarray:
    """Returns scores as Anserini reports them: its ``ScoreTiesAdjusterReranker``, the last stage.

    They are rounded to four decimals, and every score at most 1e-4 below its neighbour is lowered
    by 1e-6 times its place in the tie, so that tools that sort by score keep the order.
    """
    out = (np.floor(scores.astype(np.float64) * 1e4 + 0.5) / 1e4).astype(np.float32)
    place = 0
    for i in range(1, len(out)):
        place = 0 if out[i - 1] - out[i] > np.float32(1e-4) else place + 1
        out[i] -= np.float32(1e-6) * np.float32(place)
    return out


@pytest.mark.parametrize(
    "system",
    [
        # Its expanded queries are compared below in any case; what follows is as for the others.
        pytest.param(name, marks=pytest.mark.long if name == "rocchio-negative" else ())
        for name in reference.SYSTEMS
    ],
)
@pytest.mark.parametrize("topics", TOPICS, ids=str)
def test_first_thousand_equal_pyserini(topics: Topics, system: str, indexes: Indexes) -> None:
    index = indexes(topics.collection)
    frame, texts = queries(topics)
    expected = pyserini().search(Path(index), system, texts)
    results = {qid: part for qid, part in pipeline(system, index)(frame).groupby("qid")}
    assert results.keys() == expected.keys()
    assert len(expected) > 40
    for qid, (docnos, scores) in expected.items():
        assert results[qid]["docno"].tolist() == docnos, qid
        ours = reported(results[qid]["score"].to_numpy())
        np.testing.assert_allclose(ours, scores, rtol=0, atol=1e-4, err_msg=qid)


@pytest.mark.parametrize("system", ["rm3", "rocchio", "rocchio-negative"])
@pytest.mark.parametrize("topics", TOPICS, ids=str)
def test_expanded_queries_equal_pyserini(topics: Topics, system: str, indexes: Indexes) -> None:
    index = indexes(topics.collection)
    frame, texts = queries(topics)
    # Pyserini expands from the first 10 here, which are then the last 10 as well.
    expected = pyserini().terms(Path(index), system, texts)
    new = expansion(system, index, first=10)(frame)
    found = set(BM25(index, k=1)(frame)["qid"])
    assert set(new["qid"]) == expected.keys()
    for qid, toks in zip(new["qid"], new["query_toks"], strict=True):
        assert toks.keys() == expected[qid].keys(), qid
        # Where nothing is found we leave the query as it is, while Anserini mixes it with nothing,
        # so that all weights differ by one factor; neither finds anything with them.
        if qid in found:
            assert toks == pytest.approx(expected[qid], abs=1e-4), qid


ROWS = [
    row | {"topics": (row["collection"], row["topics"])}
    for row in readme_table("published BM25 nDCG@10")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row["topics"]))
def test_figures(row: dict, indexes: Indexes) -> None:
    collection, *more = row["topics"][0].split(" ", 1)
    topics = Topics(collection, row["topics"][1], rel=2 if collection == reference.POOL else 1)
    index = indexes(collection, *(["text", "meta"] if more else []))
    frame = prf.read_topics(topics.topics)
    for system in ("bm25", "rm3"):
        results = pipeline(system, index)(frame)
        found = prf.evaluate(results, topics.qrels, topics.measures).mean.tolist()
        prefix = {"bm25": "BM25", "rm3": "RM3"}[system]
        names = [f"{prefix} nDCG@10", f"{prefix}: R@100", f"{prefix}: AP"]
        expected = [figure(row[name]) for name in names]
        assert found == pytest.approx(expected, abs=1e-4), system
        if system == "bm25" and row["published BM25 nDCG@10"]:
            assert found[0] == pytest.approx(figure(row["published BM25 nDCG@10"]), abs=1e-4)

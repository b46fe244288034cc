"""The demo, from an empty folder to its table."""

import json
from pathlib import Path

import pandas as pd
import pytest

from prf.cli import main
from prf.demo import PIPELINES, collection, example
from prf.spec import load, shipped
from prf.trec import read_docs, read_qrels, read_topics


def test_the_collection_is_complete() -> None:
    docs = dict(read_docs(collection().docs))
    topics, qrels = read_topics(collection().topics), read_qrels(collection().qrels)
    assert (len(docs), len(topics)) == (336, 80)
    assert set(qrels["docno"]) <= set(docs)
    assert set(qrels["qid"]) == set(topics["qid"])
    assert set(qrels["label"]) == {0, 1, 2, 3}


def test_the_shipped_pipelines_are_there() -> None:
    for name in PIPELINES:
        assert load(shipped(f"{name}.yaml"))


def test_an_example_tells_who_moved() -> None:
    topics = read_topics(collection().topics)
    qid = topics["qid"].iloc[0]
    names = [docno for docno, _ in read_docs(collection().docs)][:12]

    def ranking(docnos: list[str]) -> pd.DataFrame:
        scores = [float(-i) for i in range(len(docnos))]
        return pd.DataFrame({"qid": qid, "docno": docnos, "score": scores})

    # The second goes up, the first down; the eleventh comes in for the tenth.
    after = [names[1], names[0], *names[2:9], names[10], names[9]]
    found = example(qid, topics, ranking(names), ranking(after), (0.25, 0.5))
    moves = [(move.docno, move.before, move.after) for move in found.moves]
    assert moves == [
        (names[1], 2, 1), (names[0], 1, 2), (names[10], None, 10), (names[9], 10, None)
    ]  # fmt: skip
    assert (found.before, found.after) == (0.25, 0.5)


@pytest.mark.java
@pytest.mark.models
@pytest.mark.slow
def test_the_demo_from_end_to_end_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs, stamps, runs = [], [], []
    for _ in range(2):
        assert main(["demo", "--dir", "here", "--no-progress"]) == 0
        outputs.append(capsys.readouterr())
        indexes = sorted(Path("here/indexes").glob("*/*.json"))
        stamps.append([(path.name, path.stat().st_mtime_ns) for path in indexes])
        runs.append([path.read_bytes() for path in sorted(Path("here/runs/demo").glob("*.run"))])
    assert outputs[0] == outputs[1]
    assert stamps[0] == stamps[1]  # the indexes are used again
    assert runs[0] == runs[1]
    table, *examples = outputs[0].out.split("\n\nq")
    assert [line.split()[0] for line in table.splitlines()[1:7]] == list(PIPELINES)
    assert len(examples) == 2
    assert outputs[0].err == "runs and their records are in here/runs/demo\n"
    for name in PIPELINES:
        record = json.loads(Path(f"here/runs/demo/{name}.run.json").read_text(encoding="utf-8"))
        assert record["counts"]["queries"] == 80
    assert sorted(path.name for path in Path().iterdir()) == ["here"]

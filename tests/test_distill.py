"""Distillation: what teachers say, files of pairs, and students that are trained and served."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import save_checkpoint

import prf
from prf import PRP, CrossEncoder, Judge, SpecError
from prf.cli import main
from prf.distill.config import Distillation, ListSet, Sample, Teacher
from prf.distill.teachers import groups, read_lists, read_pairs, teach, write_pairs
from prf.errors import FileFormatError
from prf.rerank import load_pair_model
from prf.spec import to_spec

pytestmark = pytest.mark.models

WORDS = "cat dog fish oil the of and information retrieval hypertension".split()
ASKED: list[tuple[str, str]] = []


def more_cats(query: str, first: str, second: str) -> float:
    """Prefers the passage that says ``cat`` more often."""
    ASKED.append((first, second))
    return float(first.split().count("cat") - second.split().count("cat"))


class Lists:
    """Twelve queries with lists of eight passages, in which ``cat`` stands 0 to 4 times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(3)
        docs, run, teacher, qrels = [], [], [], []
        for q in range(12):
            for d in range(8):
                name, cats = f"d{q}_{d}", int(rng.integers(5))
                words = [*["cat"] * cats, *rng.choice(WORDS[1:], 6 - cats)]
                docs.append({"docno": name, "text": " ".join(rng.permutation(words))})
                run.append(f"q{q} Q0 {name} {d + 1} {8 - d} bm25")
                qrels.append(f"q{q} 0 {name} {cats}")
                if d < 7:  # the teacher's run lacks the last one
                    teacher.append(f"q{q} Q0 {name} 1 {cats} teacher")
        (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
        for name, lines in (("run", run), ("teacher", teacher), ("qrels", qrels)):
            (folder / name).write_text("\n".join(lines) + "\n")
        (folder / "topics.tsv").write_text("".join(f"q{q}\tfish\n" for q in range(12)))
        save_checkpoint(folder / "base", "splade")

    def part(self, teacher: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        f = self.folder
        files = {"topics": f"{f}/topics.tsv", "run": f"{f}/run", "texts": f"{f}/docs.jsonl"}
        return {**files, "teacher": teacher or {"run": f"{f}/teacher"}, **more}

    def spec(self, output: str = "m", **more: Any) -> dict[str, Any]:
        return {
            "method": "cross_encoder",
            "output": f"{self.folder}/{output}",
            "train": self.part(sample={"sampler": "random", "rate": 0.5}),
            "dev": self.part(measure="OPA", sample={"sampler": "all"}),
            "network": {"base": f"{self.folder}/base", "max_length": 16, "dropout": 0.0},
            "loop": {"epochs": 6, "batch_size": 4, "learning_rate": 0.01, "threads": 1},
            **more,
        }

    def config(self, output: str = "m", **more: Any) -> Distillation:
        return Distillation.read(self.spec(output, **more))

    def taught(self, **more: Any) -> tuple[list[Any], list[Any]]:
        config = ListSet.read(self.part(**more))
        lists = read_lists(config)
        return lists, teach(config, lists)


@pytest.fixture
def lists(tmp_path: Path) -> Lists:
    return Lists(tmp_path)


ALL = {"sampler": "all"}


# Teachers


def test_run_decides_by_its_scores_and_what_it_lacks_loses(lists: Lists) -> None:
    given, pairs = lists.taught(sample=ALL)
    assert len(pairs) == 12 * 28
    cats = {
        n: t.split().count("cat") for g in given for n, t in zip(g.docnos, g.texts, strict=True)
    }
    for pair in pairs:
        one, two = cats[pair.docno_i], cats[pair.docno_j]
        expected = 1 if pair.docno_j.endswith("_7") else int(np.sign(one - two))
        assert pair.outcome == expected
        assert pair.p == (1 + expected) / 2
        assert pair.rank_i < pair.rank_j


def test_two_documents_that_the_run_lacks_are_no_pair(lists: Lists, tmp_path: Path) -> None:
    (tmp_path / "few").write_text("q0 Q0 d0_0 1 2.0 t\nq0 Q0 d0_3 2 1.0 t\n")
    _, pairs = lists.taught(teacher={"run": f"{tmp_path}/few"}, sample=ALL)
    assert {pair.qid for pair in pairs} == {"q0"}
    assert len(pairs) == 28 - 15


def test_soft_labels_are_the_sigmoid_of_the_margin(lists: Lists) -> None:
    teacher = {"run": f"{lists.folder}/teacher", "labels": "soft", "temperature": 2.0}
    _, pairs = lists.taught(teacher=teacher, sample=ALL)
    for pair in pairs:
        assert pair.margin == pair.margin_ij == -pair.margin_ji
        assert pair.p == pytest.approx(1 / (1 + math.exp(-pair.margin / 2)), abs=1e-12)


def test_ties_and_small_margins_are_left_out_on_request(lists: Lists) -> None:
    teacher = {"run": f"{lists.folder}/teacher", "drop_ties": True, "min_abs_margin": 2.0}
    _, every = lists.taught(sample=ALL)
    _, pairs = lists.taught(teacher=teacher, sample=ALL)
    kept = [pair for pair in every if pair.outcome and abs(pair.margin) >= 2]
    assert [(p.docno_i, p.docno_j) for p in pairs] == [(p.docno_i, p.docno_j) for p in kept]
    assert 0 < len(pairs) < len(every)


def test_importance_weighs_by_one_over_the_probability(lists: Lists) -> None:
    sample = {"sampler": "random", "rate": 0.25, "importance": True}
    _, pairs = lists.taught(sample=sample)
    assert len(pairs) == 12 * 7
    assert {round(pair.weight, 9) for pair in pairs} == {4.0}
    _, pairs = lists.taught(sample={**sample, "most_weight": 2.0})
    assert {pair.weight for pair in pairs} == {2.0}


def prp_teacher(cache: Path, **more: Any) -> dict[str, Any]:
    stage = PRP(Judge("test_distill:more_cats"), cache=str(cache), **more)
    return {"prp": to_spec(stage)}


def test_teacher_shares_the_cache_of_a_reranking(lists: Lists, tmp_path: Path) -> None:
    cache = tmp_path / "answers.sqlite"
    teacher = prp_teacher(cache)
    ASKED.clear()
    _, pairs = lists.taught(teacher=teacher, sample=ALL)
    asked = len(ASKED)
    assert asked
    given, again = lists.taught(teacher=teacher, sample=ALL)
    assert again == pairs
    assert len(ASKED) == asked
    frame = pd.DataFrame(
        [
            (g.qid, g.query, docno, float(-place), text)
            for g in given
            for place, (docno, text) in enumerate(zip(g.docnos, g.texts, strict=True))
        ],
        columns=["qid", "query", "docno", "score", "text"],
    )
    PRP(Judge("test_distill:more_cats"), variant="allpair", cache=str(cache))(frame)
    assert len(ASKED) == asked
    for pair in pairs:
        if pair.verdict_ij is not None:
            assert pair.verdict_ij == -pair.verdict_ji
            assert pair.template_hash


def test_offline_teacher_takes_the_pairs_that_the_cache_holds(lists: Lists, tmp_path: Path) -> None:
    cache = tmp_path / "answers.sqlite"
    _, some = lists.taught(teacher=prp_teacher(cache), sample={"sampler": "window"})
    ASKED.clear()
    _, found = lists.taught(teacher=prp_teacher(cache, offline=True), sample=ALL)
    assert not ASKED
    assert {(p.docno_i, p.docno_j, p.p) for p in some} <= {
        (p.docno_i, p.docno_j, p.p) for p in found
    }
    assert len(found) < 12 * 28


def test_pairs_come_back_from_their_file_as_they_were(lists: Lists, tmp_path: Path) -> None:
    _, pairs = lists.taught(sample=ALL)
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    assert read_pairs(tmp_path / "pairs.jsonl") == pairs
    _, again = lists.taught(teacher={"pairs": f"{tmp_path}/pairs.jsonl"})
    assert again == pairs


@pytest.mark.parametrize("line", ["{", "[]", '{"qid": "1"}'])
def test_line_that_is_no_pair_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "p").write_text(f"{line}\n")
    with pytest.raises(FileFormatError, match=r"p:1: no pair"):
        read_pairs(tmp_path / "p")


def test_pair_of_a_document_outside_the_list_is_refused(lists: Lists) -> None:
    given, pairs = lists.taught(sample=ALL)
    short = [g._replace(docnos=g.docnos[:4], texts=g.texts[:4]) for g in given]
    with pytest.raises(FileFormatError, match="its list of 4 does not hold"):
        groups(short, pairs)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "is empty; give one of"),
        ({"run": "a", "pairs": "b"}, "names run and pairs"),
        ({"run": "a", "temperature": 0}, "above 0"),
        ({"run": "a", "min_abs_margin": -1}, "at least 0"),
        ({"prp": CrossEncoder("m")}, "give a PRP stage"),
    ],
)
def test_wrong_teachers_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Teacher(**values)


def test_rates_are_shares() -> None:
    with pytest.raises(SpecError, match="above 0, at most 1"):
        Sample(rate=0)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"loop": {"depths": [1]}}, "are of feedback"),
        ({"network": {"base": "b", "layout": "mean"}}, "unknown key 'layout' in network"),
        ({"loss": {"kind": "logistik"}}, "logistic"),
        ({"dev": None, "loop": {"patience": 1}}, "needs dev"),
    ],
)
def test_wrong_configs_are_refused(lists: Lists, more: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        lists.config(**more)


# Students


def test_student_learns_its_teachers_order_and_serves(lists: Lists) -> None:
    record = prf.train(lists.config())
    assert record["dev"] > 0.8
    assert record["epochs"][0]["dev"] < record["dev"]
    told = json.loads((lists.folder / "m" / "prp_distill.json").read_text())
    assert told["pairs"] == 12 * 14
    assert told["fingerprints"] == record["fingerprints"]
    text = {"qid": "1", "query": "fish", "docno": ["a", "b"], "text": ["oil of the", "cat cat cat"]}
    found = CrossEncoder(f"{lists.folder}/m")(pd.DataFrame({**text, "score": [2.0, 1.0]}))
    assert found["docno"].tolist() == ["b", "a"]


def test_students_length_is_what_it_was_trained_with(lists: Lists) -> None:
    prf.train(lists.config(loop={"epochs": 1, "batch_size": 12, "threads": 1}))
    student = load_pair_model(f"{lists.folder}/m", "cross-encoder")
    assert student.length(None) == 16
    with pytest.raises(SpecError, match="from 4 to 16"):
        student.length(512)


@pytest.mark.parametrize(
    "kind",
    ["margin_mse", "hinge", "lambda", "softmax", "listnet", "listmle", "rmse", "mse", "bce"],
)
def test_every_loss_trains(lists: Lists, kind: str) -> None:
    loop = {"epochs": 2, "batch_size": 6, "learning_rate": 0.003, "threads": 1}
    record = prf.train(lists.config(loss={"kind": kind}, loop=loop))
    assert [math.isfinite(entry["loss"]) for entry in record["epochs"]] == [True] * 2


def test_bi_encoder_learns_too_and_is_read_as_an_encoder(lists: Lists) -> None:
    save_checkpoint(lists.folder / "bert", "cross-encoder")
    network = {"base": "minilm", "layout": "mean-l2", "max_length": 16, "query_length": 8}
    loop = {"epochs": 1, "batch_size": 4, "learning_rate": 1e-4, "threads": 1}
    record = prf.train(lists.config(method="bi_encoder", network=network, loop=loop))
    assert 0 <= record["dev"] <= 1
    encoder = prf.QueryEncoder(f"{lists.folder}/m", layout="mean-l2")
    vector = encoder(pd.DataFrame({"qid": ["1"], "query": ["fish"]}))["query_vec"].iloc[0]
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_batch_of_queries_has_the_losses_of_each_alone(lists: Lists) -> None:
    from prf.distill.students import CrossStudent

    task = CrossStudent(lists.config())
    task.groups[1] = task.groups[1]._replace(first=task.groups[1].first[:1])  # other sizes
    every = np.arange(4)
    for kind in ("logistic", "lambda", "rmse"):
        task = CrossStudent(lists.config(loss={"kind": kind}))
        whole = task.losses(every, slice(0, 4)).detach().numpy()
        alone = [task.losses(every, slice(i, i + 1)).item() for i in range(4)]
        np.testing.assert_allclose(whole, alone, rtol=1e-4, atol=1e-6)


def test_training_interrupted_and_resumed_gives_the_same_weights(
    lists: Lists, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = {"epochs": 2, "batch_size": 4, "learning_rate": 0.01, "threads": 1}
    prf.train(lists.config("whole", loop=loop))
    from prf.distill.students import CrossStudent

    losses, calls = CrossStudent.losses, [0]

    def stopped(self: Any, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt
        return losses(self, *given)

    monkeypatch.setattr(CrossStudent, "losses", stopped)
    with pytest.raises(KeyboardInterrupt):
        prf.train(lists.config("cut", loop=loop))
    prf.train(lists.config("cut", loop=loop))
    both = [lists.folder / name / "model.safetensors" for name in ("whole", "cut")]
    assert both[0].read_bytes() == both[1].read_bytes()


# Command line


def test_pairs_are_written_and_trained_on(
    lists: Lists, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "student.yaml"
    config.write_text(json.dumps(lists.spec()), encoding="utf-8")
    out = tmp_path / "pairs.jsonl"
    assert main(["pairs", str(config), "-o", str(out)]) == 0
    assert "168 pairs of 12 queries" in capsys.readouterr().err
    change = f"train.teacher={{pairs: {out}}}"
    fast = ["--set", "loop.epochs=1", "--set", change]
    assert main(["train", str(config), *fast]) == 0
    assert "update" in capsys.readouterr().err


def test_feedback_config_has_no_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parents[1] / "pipelines" / "training" / "tprf_nfcorpus.yaml"
    assert main(["pairs", str(config), "-o", str(tmp_path / "p")]) == 2
    assert "learns from judgments" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()

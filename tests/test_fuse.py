"""Fusion: hand values, plain numpy on real runs, and what must not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
from conftest import queries, results
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import DL19

import prf
from prf import (
    BordaFusion,
    CombMnz,
    CombSum,
    Cutoff,
    DenseRetriever,
    Interpolate,
    QueryVectors,
    ReciprocalRankFusion,
    Rocchio,
    RunFile,
    SpecError,
    Vectors,
    dumps,
    explain,
    loads,
)
from prf.pipeline import Transformer
from prf.spec import override, shipped

SPARSE = {"a": 10.0, "b": 8.0, "c": 4.0}
DENSE = {"b": 700.0, "d": 690.0, "a": 680.0}
Lists = list[dict[str, float]]
Fusion = Callable[[tuple[RunFile, ...]], Transformer]


@pytest.fixture
def runs(tmp_path) -> Callable[..., tuple[RunFile, ...]]:
    """Returns a function that writes lists of query 1 (or of several queries) as runs."""

    def write(*lists: dict[str, Any]) -> tuple[RunFile, ...]:
        stages = []
        for number, found in enumerate(lists):
            by_query = found if any(isinstance(v, dict) for v in found.values()) else {"1": found}
            path = tmp_path / f"{number}.run"
            lines = (
                f"{qid} Q0 {docno} 1 {score!r} x\n"
                for qid, scores in by_query.items()
                for docno, score in scores.items()
            )
            path.write_text("".join(lines), encoding="utf-8")
            stages.append(RunFile(path))
        return tuple(stages)

    return write


def fused(stage: Transformer, qid: str = "1") -> dict[str, float]:
    found = stage.transform(queries((qid, "x")))
    return dict(zip(found["docno"], found["score"].tolist(), strict=True))


# Hand values


@pytest.mark.parametrize(
    ("fusion", "expected"),
    [
        (Interpolate, {"b": 5 / 6, "a": 0.5, "d": 0.25, "c": 0.0}),
        (
            lambda s: Interpolate(s, normalise="sparse"),
            {"b": 1 / 3 + 350, "d": 345, "a": 340.5, "c": 0},
        ),
        (
            lambda s: Interpolate(s, normalise="sparse", missing="minimum"),
            {"b": 1 / 3 + 350, "d": 345, "a": 340.5, "c": 340},
        ),
        (
            lambda s: Interpolate(s, 0.25, "none"),
            {"b": 2 + 525, "d": 517.5, "a": 2.5 + 510, "c": 1},
        ),
        (
            lambda s: Interpolate(s, 0.25, "none", "minimum"),
            {"b": 527, "d": 1 + 517.5, "a": 512.5, "c": 1 + 510},
        ),
        (
            ReciprocalRankFusion,
            {"b": 1 / 62 + 1 / 61, "a": 1 / 61 + 1 / 63, "d": 1 / 62, "c": 1 / 63},
        ),
        (
            lambda s: ReciprocalRankFusion(s, c=0, weights=(1, 2)),
            {"b": 2.5, "a": 1 + 2 / 3, "d": 1, "c": 1 / 3},
        ),
        (CombSum, {"b": 5 / 3, "a": 1, "d": 0.5, "c": 0}),
        (lambda s: CombSum(s, (3, 1)), {"b": 3, "a": 3, "d": 0.5, "c": 0}),
        (CombMnz, {"b": 10 / 3, "a": 2, "d": 0.5, "c": 0}),
        (lambda s: CombMnz(s, normalise="none"), {"b": 1416, "a": 1380, "d": 690, "c": 4}),
        # Four documents: 4, 3, 2 points, and 1 for the one that is missing.
        (BordaFusion, {"b": (3 + 4) / 4, "a": (4 + 2) / 4, "d": (1 + 3) / 4, "c": (2 + 1) / 4}),
        (
            lambda s: BordaFusion(s, missing="zero"),
            {"b": 7 / 4, "a": 6 / 4, "d": 3 / 4, "c": 2 / 4},
        ),
    ],
)
def test_worked_example(runs, fusion: Fusion, expected: dict[str, float]) -> None:
    found = fused(fusion(runs(SPARSE, DENSE)))
    assert found == pytest.approx(expected, rel=1e-12)
    assert list(found) == sorted(expected, key=lambda docno: (-expected[docno], docno))


def test_borda_of_complete_lists(runs) -> None:
    lists = ({"d1": 4, "d2": 3, "d3": 2, "d4": 1}, {"d3": 4, "d1": 3, "d4": 2, "d2": 1})
    assert fused(BordaFusion(runs(*lists))) == {"d1": 1.75, "d3": 1.5, "d2": 1.0, "d4": 0.75}


def test_zscore_has_mean_0_and_variance_1(runs) -> None:
    found = fused(CombSum(runs({"a": 3, "b": 1}, {"a": 5, "b": 5}), normalise="zscore"))
    assert found == {"a": 1.0, "b": -1.0}


@pytest.mark.parametrize("sparse", [{"a": 7.0}, {"a": 7.0, "b": 7.0}])
def test_list_of_equal_scores_is_normalised_to_1(runs, sparse: dict[str, float]) -> None:
    found = fused(Interpolate(runs(sparse, {"c": 2, "d": 1})))
    assert {docno: found[docno] for docno in sparse} == dict.fromkeys(sparse, 0.5)


def test_normalisation_is_per_query(runs) -> None:
    stages = runs(
        {"1": {"a": 100, "b": 90}, "2": {"a": 2, "b": 1}},
        {"1": {"a": 1, "b": 0}, "2": {"a": 10, "b": 5}},
    )
    assert fused(Interpolate(stages), "1") == fused(Interpolate(stages), "2") == {"a": 1, "b": 0}


def test_query_that_one_side_misses_has_the_other_side(runs) -> None:
    stages = runs({"1": {"a": 2, "b": 1}}, {"2": {"a": 1}})
    with pytest.warns(prf.PrfWarning, match="are not in run"):
        assert fused(Interpolate(stages, missing="minimum")) == {"a": 0.5, "b": 0.0}


def test_query_that_no_side_finds_has_no_rows(runs) -> None:
    with pytest.warns(prf.PrfWarning, match="are not in run"):
        assert fused(Interpolate(runs(SPARSE, DENSE)), "absent") == {}


def test_fusion_is_cut_after_it_is_made(runs) -> None:
    assert list(fused(Interpolate(runs(SPARSE, DENSE), k=2))) == ["b", "a"]


def test_equal_scores_stand_by_docno(runs) -> None:
    assert list(fused(ReciprocalRankFusion(runs({"b": 1}, {"a": 1})))) == ["a", "b"]


def test_query_columns_come_from_the_query(runs) -> None:
    frame = queries(("2", "two", [2.0]), ("1", "one", [1.0]), names="qid query query_vec")
    stages = runs({"1": {"a": 1}, "2": {"a": 2}}, {"1": {"b": 1}})
    with pytest.warns(prf.PrfWarning, match=r"not in run .*: 1 \(2\)"):
        found = CombSum(stages)(frame)
    assert found[["qid", "query", "query_vec"]].to_numpy().tolist() == [
        ["2", "two", [2.0]],
        ["1", "one", [1.0]],
        ["1", "one", [1.0]],
    ]


# What must not matter


scores = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 5).map(float), max_size=8)


@settings(max_examples=10)
@given(st.lists(scores, min_size=2, max_size=4), st.randoms(use_true_random=False))
@pytest.mark.parametrize("kind", [CombSum, CombMnz, ReciprocalRankFusion, BordaFusion])
def test_order_of_candidates_does_not_matter(kind: Any, lists: Lists, random: Any) -> None:
    rows = [(q, "x", d, s) for q, found in enumerate(lists) for d, s in found.items()]
    shuffled = random.sample(rows, len(rows))

    def fuse(some: list[Any]) -> list[Any]:
        frame = results(*((str(q), *rest) for q, *rest in some))
        found = kind((Cutoff(3), Cutoff(5) * -1))(frame).sort_values(["qid", "rank"])
        return found[["qid", "docno", "score", "rank"]].to_numpy().tolist()

    assert fuse(rows) == fuse(shuffled)


@settings(max_examples=30)
@given(scores, scores, st.sampled_from(["zero", "minimum"]))
def test_missing_rules_agree_after_min_max(sparse: Any, dense: Any, missing: Any) -> None:
    lists = prf.fuse.Lists(
        np.zeros(8, dtype=np.int64),
        np.array([[found.get(d, np.nan) for found in (sparse, dense)] for d in "abcdefgh"]),
        np.zeros((8, 2)),
    )
    kept = ~np.isnan(lists.scores).all(axis=1)
    lists = prf.fuse.Lists(*(part[kept] for part in lists))
    stage = Interpolate((Cutoff(1), Cutoff(1)), missing=missing)
    lists_zero = Interpolate(stage.stages).score(lists)
    constant = [len(set(found.values())) == 1 for found in (sparse, dense)]
    if not any(constant):  # a list of equal scores has minimum 1
        assert stage.score(lists).tolist() == lists_zero.tolist()
    assert ((lists_zero >= 0) & (lists_zero <= 1)).all()


# As values


@pytest.mark.parametrize(
    ("fusion", "message"),
    [
        (lambda: Interpolate((Cutoff(1),)), "takes two stages"),
        (lambda: Interpolate((Cutoff(1),) * 3), "CombSum with weights takes more"),
        (lambda: Interpolate((Cutoff(1),) * 2, 1.5), "must be from 0 to 1"),
        (lambda: CombSum((Cutoff(1),) * 2, (1.0,)), "1 numbers for 2 stages"),
        (lambda: CombSum((Cutoff(1),)), "joins two stages or more"),
        (lambda: ReciprocalRankFusion((Cutoff(1),) * 2, c=-1), "at least 0"),
        (lambda: Interpolate((Cutoff(1),) * 2, normalise="max"), "one of 'both', 'sparse'"),
    ],
)
def test_bad_argument_is_refused(fusion: Callable[[], object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fusion()


def test_fusion_in_yaml() -> None:
    text = "Interpolate: {stages: [{BM25: {index: b}}, [{BM25: {index: c}}, {Cutoff: 5}]], k: 7}"
    stage = Interpolate((prf.BM25("b"), prf.BM25("c") >> Cutoff(5)), k=7)
    assert loads(text) == stage
    assert loads(dumps(stage, defaults=True)) == stage
    assert eval(repr(stage >> Cutoff(1)), vars(prf) | {n: getattr(prf, n) for n in prf.__all__})


def test_settings_reach_the_fusion_and_its_stages() -> None:
    stage = CombSum((prf.BM25("b"), prf.BM25("c")))
    assert override(stage, ["pipeline.k=5", "1.k=9"]) == CombSum(
        (prf.BM25("b"), prf.BM25("c", k=9)), k=5
    )
    chain = override(stage >> Cutoff(5), ["0.normalise=zscore", "0.0.k=3"])
    assert chain[0] == CombSum((prf.BM25("b", k=3), prf.BM25("c")), normalise="zscore")


def test_explain_shows_arguments_and_stages_apart() -> None:
    steps = explain(Interpolate((prf.BM25("b"), prf.BM25("c")), 0.3))
    assert [step.position for step in steps] == ["pipeline", "0", "1"]
    assert steps[0].stage == "Interpolate(weight=0.3, normalise='both', missing='zero', k=1000)"


# Real runs, against plain Python


@pytest.fixture(scope="session")
def pool(tmp_path_factory) -> tuple[str, QueryVectors, pd.DataFrame]:
    """Returns an index of the pool's shared vectors, their queries, and 20 topics."""
    index = tmp_path_factory.mktemp("pool") / "minilm"
    prf.build_vectors(index, *DL19.encoded("docs"))
    encoder = QueryVectors(*map(str, DL19.encoded("queries")))
    return str(index), encoder, prf.read_topics(DL19.topics).head(20)


def bm25_run() -> str:
    return str(reference.SHARED / reference.POOL / "runs" / "dl19.bm25.trec.gz")


def lists_of(frame: pd.DataFrame) -> dict[str, dict[str, float]]:
    return {
        qid: dict(zip(part["docno"], part["score"].tolist(), strict=True))
        for qid, part in frame.groupby("qid", sort=False)
    }


def by_hand_interpolation(sparse: dict[str, float], dense: dict[str, float]) -> dict[str, float]:
    def normalised(found: dict[str, float]) -> dict[str, float]:
        low, high = min(found.values()), max(found.values())
        return {docno: (score - low) / (high - low) for docno, score in found.items()}

    left, right = normalised(sparse), normalised(dense)
    return {d: 0.5 * left.get(d, 0.0) + 0.5 * right.get(d, 0.0) for d in {**sparse, **dense}}


def by_hand_rrf(*lists: dict[str, float]) -> dict[str, float]:
    out: dict[str, float] = {}
    for found in lists:
        order = sorted(found, key=lambda docno: (-found[docno], docno))
        for rank, docno in enumerate(order, 1):
            out[docno] = out.get(docno, 0.0) + 1 / (60 + rank)
    return out


def first(found: dict[str, float], k: int = 1000) -> list[tuple[str, float]]:
    return sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:k]


def assert_lists(found: pd.DataFrame, expected: dict[str, list[tuple[str, float]]]) -> None:
    ours = lists_of(found)
    assert list(ours) == list(expected)
    for qid, pairs in expected.items():
        assert list(ours[qid]) == [docno for docno, _ in pairs]
        np.testing.assert_allclose(list(ours[qid].values()), [s for _, s in pairs], rtol=1e-12)


@reference.needs_data
@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [(Interpolate, by_hand_interpolation), (ReciprocalRankFusion, by_hand_rrf)],
)
def test_runs_equal_the_plain_formula(pool, kind: Any, by_hand: Any) -> None:
    index, encoder, topics = pool
    sparse, dense = RunFile(bm25_run()), DenseRetriever(index, k=100)
    found = (encoder >> kind((sparse, dense)))(topics)
    left, right = lists_of(sparse(topics)), lists_of((encoder >> dense)(topics))
    assert_lists(found, {qid: first(by_hand(left[qid], right[qid])) for qid in topics["qid"]})


@reference.needs_data
@pytest.mark.parametrize("name", ["no", "pre", "post", "both"])
def test_shipped_arrangement_equals_the_plain_formula(pool, name: str) -> None:
    """The four arrangements as they are shipped, with BM25's published run for its stage."""
    index, encoder, topics = pool
    topics = topics.head(8)
    text = shipped(f"interpolation_{name}.yaml").read_text("utf-8")
    text = text.replace("- BM25: {index: indexes/demo-bm25}", f"- RunFile: {{path: {bm25_run()}}}")
    text = text.replace("indexes/demo-minilm", index)
    vectors = dict(zip(topics["qid"], encoder(topics)["query_vec"], strict=True))
    sparse = lists_of(RunFile(bm25_run())(topics))
    table = np.load(DL19.encoded("docs")[0]).astype(np.float64)
    names = DL19.encoded("docs")[1].read_text().split()
    row_of = {docno: row for row, docno in enumerate(names)}

    def dense(vector: Any) -> dict[str, float]:
        exact = (table @ vector.astype(np.float64)).astype(np.float32)
        best = np.argsort(-exact, kind="stable")[:1100]
        return dict(first({names[i]: float(exact[i]) for i in best}))

    expected = {}
    for qid in topics["qid"]:
        found = dense(vectors[qid])
        if name in ("no", "pre", "both"):
            found = dict(first(by_hand_interpolation(sparse[qid], found)))
        if name != "no":
            best = [table[row_of[docno]] for docno, _ in first(found, 3)]
            mean = np.mean(best, axis=0, dtype=np.float64)
            found = dense((0.4 * vectors[qid].astype(np.float64) + 0.6 * mean).astype(np.float32))
        if name in ("post", "both"):
            found = by_hand_interpolation(sparse[qid], found)
        expected[qid] = first(found)
    stages = loads(text)[1:]  # the vectors are given
    assert_lists(prf.Compose((encoder, *stages))(topics), expected)


@reference.needs_data
def test_feedback_from_the_sparse_list_alone_finds_its_vectors(pool) -> None:
    index, encoder, topics = pool
    stages = (RunFile(bm25_run()), DenseRetriever(index))
    sparse_only = encoder >> Interpolate(stages, weight=1.0) >> Vectors(index) >> Rocchio(3)
    plain = encoder >> RunFile(bm25_run()) >> Vectors(index) >> Rocchio(3)
    left, right = (np.stack(p(topics)["query_vec"].tolist()) for p in (sparse_only, plain))
    np.testing.assert_array_equal(left, right)

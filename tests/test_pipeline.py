"""Operators, pipelines as values, trimming, positions in errors, PyTerrier around us, imports."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from conftest import ROOT, Material, plain, queries, results
from hypothesis import given
from hypothesis import strategies as st

import prf
from prf import (
    Compose,
    Concatenate,
    Cutoff,
    DenseRetriever,
    Features,
    FrameError,
    IndexStateError,
    Intersection,
    PrfWarning,
    QueryVectors,
    Rocchio,
    Scale,
    SpecError,
    Sum,
    Text,
    Union,
    Vectors,
)
from prf.pipeline import REGISTRY, Log, Transformer, logging_to, notice

FOUND = results(
    ("1", "one", "a", 3.0),
    ("1", "one", "b", 2.0),
    ("1", "one", "c", 1.0),
    ("2", "two", "b", 5.0),
    ("2", "two", "a", 4.0),
)
KEEP, FIRST, TWICE, BACK = Scale(1.0), Cutoff(1), Scale(2.0), Scale(-1.0)


def scores(frame: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Returns {qid: {docno: score}}, documents in rank order."""
    ordered = frame.sort_values("rank", kind="stable")
    return {
        qid: dict(zip(part["docno"], part["score"], strict=True))
        for qid, part in ordered.groupby("qid", sort=False)
    }


def order(frame: pd.DataFrame) -> dict[str, list[str]]:
    return {qid: list(docs) for qid, docs in scores(frame).items()}


# What each operator does


def test_then_runs_left_to_right() -> None:
    assert order((BACK >> FIRST)(FOUND)) == {"1": ["c"], "2": ["a"]}


def test_cutoff_keeps_the_first_k_by_score_not_by_position() -> None:
    assert order((KEEP % 2)(FOUND.iloc[::-1])) == {"2": ["b", "a"], "1": ["a", "b"]}


def test_scale_multiplies_scores() -> None:
    assert scores((KEEP * 0.5)(FOUND))["2"] == {"b": 2.5, "a": 2.0}


def test_negative_scale_turns_the_order_round() -> None:
    assert order((KEEP * -1)(FOUND)) == {"1": ["c", "b", "a"], "2": ["a", "b"]}


def test_sum_adds_scores_and_counts_a_missing_document_zero() -> None:
    assert scores((KEEP + FIRST)(FOUND))["1"] == {"a": 6.0, "b": 2.0, "c": 1.0}


def test_sum_keeps_the_query_of_documents_only_the_right_side_has() -> None:
    assert set((FIRST + KEEP)(FOUND)["query"]) == {"one", "two"}


def test_union_scores_the_best_rank() -> None:
    """A5."""
    found = (KEEP | BACK)(FOUND)
    assert scores(found)["1"] == {"a": 1.0, "c": 1.0, "b": 0.5}


def test_union_may_be_cut() -> None:
    """A5."""
    assert order(((FIRST | BACK) % 2)(FOUND)) == {"1": ["a", "c"], "2": ["a", "b"]}


def test_union_keeps_query_columns_and_text() -> None:
    """A5."""
    frame = FOUND.assign(text="words", mine=1)
    assert list((KEEP | BACK)(frame).columns) == [
        "qid",
        "query",
        "mine",
        "docno",
        "score",
        "text",
        "rank",
    ]


def test_intersection_keeps_what_all_sides_have_by_the_worst_rank() -> None:
    found = ((KEEP % 2) & KEEP & (BACK % 2))(FOUND)
    assert scores(found) == {"1": {"b": 0.5}, "2": {"a": 0.5, "b": 0.5}}


def test_concatenate_appends_what_only_the_right_side_has() -> None:
    assert scores((FIRST ^ BACK)(FOUND))["1"] == {"a": 3.0, "c": 2.0, "b": 1.0}


def test_concatenate_serves_a_query_the_left_side_lacks() -> None:
    only_one = pt.apply.generic(lambda frame: frame[frame["qid"] == "1"])
    assert order(Concatenate((only_one, KEEP))(FOUND)) == order(FOUND_RANKED)


FOUND_RANKED = KEEP(FOUND)


def test_features_stand_side_by_side_and_order_stays() -> None:
    out = (TWICE**FIRST)(FOUND_RANKED)
    assert [row.tolist() for row in out["features"]] == [[6, 3], [4, 0], [2, 0], [10, 5], [8, 0]]
    assert order(out) == order(FOUND_RANKED)


def test_features_of_a_stage_that_gives_features_are_spread() -> None:
    out = ((TWICE**FIRST) ** KEEP)(FOUND)
    assert [len(row) for row in out["features"]] == [3] * 5


COMBINED = [KEEP + BACK, KEEP | BACK, KEEP & BACK, KEEP ^ BACK, KEEP**BACK]


@pytest.mark.parametrize("pipeline", COMBINED, ids=repr)
def test_operator_ranks_from_zero_within_each_query(pipeline: Transformer) -> None:
    out = pipeline(FOUND_RANKED)
    assert out.groupby("qid")["rank"].apply(list).to_dict() == {"1": [0, 1, 2], "2": [0, 1]}


@pytest.mark.parametrize("pipeline", COMBINED, ids=repr)
def test_operator_with_an_empty_side_keeps_its_columns(pipeline: Transformer) -> None:
    nothing = pt.apply.generic(lambda frame: frame.head(0))
    out = type(pipeline)((KEEP, nothing)).transform(FOUND_RANKED)
    assert list(out.columns) == pipeline.outputs(list(FOUND_RANKED.columns))


def test_operators_bind_as_python_says() -> None:
    """``a | b >> c`` is ``a | (b >> c)``."""
    assert KEEP | BACK >> FIRST == Union((KEEP, Compose((BACK, FIRST))))
    assert KEEP + BACK >> FIRST == Compose((Sum((KEEP, BACK)), FIRST))


@pytest.mark.parametrize("kind", [Compose, Sum, Union, Intersection, Concatenate, Features])
def test_operator_of_one_kind_is_flat(kind: type) -> None:
    assert kind((KEEP, kind((BACK, FIRST)))) == kind((KEEP, BACK, FIRST))


@pytest.mark.parametrize("kind", [Compose, Sum, Union, Intersection, Concatenate, Features])
def test_operator_of_one_stage_is_refused(kind: type) -> None:
    with pytest.raises(SpecError, match=f"{kind.__name__} joins two stages or more, not 1"):
        kind((KEEP,))


@pytest.mark.parametrize(
    "sign", ["__rshift__", "__add__", "__or__", "__and__", "__xor__", "__pow__"]
)
@pytest.mark.parametrize("other", [5, None, "Cutoff", Cutoff])
def test_operator_with_something_else_is_refused(sign: str, other: object) -> None:
    with pytest.raises(SpecError, match=r"joins stages; .* is not one"):
        getattr(KEEP, sign)(other)


def test_caching_operator_is_refused() -> None:
    with pytest.raises(SpecError, match="nothing is cached silently"):
        KEEP.__invert__()


@pytest.mark.parametrize("k", [3, np.int64(3), np.uint8(3)])
def test_cut_takes_any_whole_number(k: Any) -> None:
    assert KEEP % k == KEEP >> Cutoff(3)


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "3", None])
def test_cut_refuses_other_numbers(k: Any) -> None:
    """B4."""
    with pytest.raises(SpecError, match=r"Cutoff\.k"):
        KEEP % k


@pytest.mark.parametrize("factor", [0.5, np.float32(0.5), np.float64(0.5), np.float16(0.5)])
def test_scale_takes_any_real_number_on_either_side(factor: Any) -> None:
    assert factor * KEEP == KEEP * factor == KEEP >> Scale(0.5)


@pytest.mark.parametrize("factor", [0.5, np.float32(0.5), np.int64(2)])
def test_scale_takes_a_number_left_of_a_chain(factor: Any) -> None:
    assert factor * (KEEP >> FIRST) == KEEP >> FIRST >> Scale(float(factor))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), True, "0.5", None])
def test_scale_refuses_other_factors(factor: Any) -> None:
    with pytest.raises(SpecError, match=r"Scale\.factor"):
        KEEP * factor


# Values


def test_number_field_keeps_no_numpy_type() -> None:
    assert repr(Cutoff(np.int64(3))) == "Cutoff(3)"


def test_path_becomes_text() -> None:
    assert Text(Path("a") / "b") == Text("a/b")


def test_wrong_type_names_stage_and_field() -> None:
    with pytest.raises(
        SpecError, match=r"Rocchio\.beta must be float, not '1e-3' \(in YAML write 0\.001"
    ):
        Rocchio(beta="1e-3")


def test_literal_names_the_choices() -> None:
    with pytest.raises(
        SpecError, match=r"DenseRetriever\.backend is 'gpu'; one of 'numpy', 'faiss'"
    ):
        DenseRetriever("i", backend="gpu")


STAGE = st.one_of(
    st.builds(Cutoff, st.integers(1, 9)),
    st.builds(Scale, st.floats(-10, 10)),
    st.builds(Text, st.text()),
    st.builds(DenseRetriever, st.text(), st.integers(1, 2000), threads=st.integers(0, 4)),
)
PIPELINE = st.recursive(
    STAGE,
    lambda inner: st.builds(
        lambda kind, parts: kind(tuple(parts)),
        st.sampled_from([Compose, Sum, Union, Intersection, Concatenate, Features]),
        st.lists(inner, min_size=2, max_size=3),
    ),
    max_leaves=8,
)


@given(PIPELINE)
def test_every_pipeline_prints_as_the_expression_that_makes_it(pipeline: Transformer) -> None:
    assert eval(repr(pipeline), dict(REGISTRY)) == pipeline


@given(PIPELINE)
def test_every_pipeline_is_pickled_with_an_equal_hash(pipeline: Transformer) -> None:
    again = pickle.loads(pickle.dumps(pipeline))
    assert (again, hash(again)) == (pipeline, hash(pipeline))


def test_building_and_printing_a_pipeline_opens_nothing() -> None:
    pipeline = QueryVectors("no.npy", "no.txt") >> DenseRetriever("nowhere") >> Vectors("nowhere")
    assert "nowhere" in repr(pipeline)
    assert hash(pipeline) == hash(replace(pipeline))


# Stages of PyTerrier in our pipelines, and ours in PyTerrier's

FOREIGN = pt.apply.generic(lambda frame: frame.assign(score=1.0 + (frame["docno"] == "c")))


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        (KEEP >> FOREIGN >> FIRST, {"1": ["c"], "2": ["a"]}),
        (KEEP + FOREIGN, {"1": ["a", "b", "c"], "2": ["b", "a"]}),
        (KEEP | FOREIGN, {"1": ["a", "c", "b"], "2": ["a", "b"]}),
        (KEEP & FOREIGN, {"1": ["a", "b", "c"], "2": ["a", "b"]}),
        (FIRST ^ FOREIGN, {"1": ["a", "c", "b"], "2": ["b", "a"]}),
        (FOREIGN >> FIRST, {"1": ["c"], "2": ["a"]}),
    ],
    ids=["then", "sum", "union", "intersection", "concatenate", "foreign first"],
)
def test_foreign_stage_works_in_every_operator(
    pipeline: Any, expected: dict[str, list[str]]
) -> None:
    assert order(pipeline(FOUND_RANKED)) == expected


def test_foreign_stage_works_in_features() -> None:
    assert (KEEP**FOREIGN)(FOUND_RANKED)["features"].iat[0].tolist() == [3, 1]


def test_foreign_stage_that_writes_into_its_input_changes_nothing_else() -> None:
    def spoil(frame: pd.DataFrame) -> pd.DataFrame:
        frame["query"] = "spoilt"
        return frame.head(0)

    before = plain(FOUND_RANKED)
    (KEEP >> pt.apply.generic(spoil))(FOUND_RANKED)
    assert plain(FOUND_RANKED) == before


def test_foreign_stage_with_a_wrong_rank_is_ranked_by_score() -> None:
    wrong = pt.apply.generic(lambda frame: frame.assign(rank=7))
    assert order((wrong >> FIRST)(FOUND)) == {"1": ["a"], "2": ["b"]}


def test_foreign_stage_that_loses_qid_is_named() -> None:
    bad = pt.apply.generic(lambda frame: frame.drop(columns="qid"))
    with pytest.raises(FrameError, match=r"pipeline\[1\] pt\.apply\.generic\(\) needs qid"):
        (KEEP >> bad)(FOUND)


def test_experiment_runs_our_pipelines_beside_a_foreign_one() -> None:
    def source() -> pt.Transformer:  # PyTerrier warns about parts that pipelines share
        return pt.Transformer.from_df(FOUND_RANKED)

    qrels = pd.DataFrame({"qid": ["1", "2"], "docno": ["c", "b"], "label": [1, 1]})
    systems = [source() >> KEEP, source() >> (BACK >> FIRST), source() >> FOREIGN]
    table = pt.Experiment(
        systems, queries(("1", "one"), ("2", "two")), qrels, ["recip_rank"], validate="ignore"
    )
    assert table["recip_rank"].round(4).tolist() == [0.6667, 0.5, 1.0]


def test_experiment_accepts_our_pipeline_without_a_warning(material: Material) -> None:
    """The columns of every stage are known to PyTerrier's check."""
    stage = QueryVectors(*material.query_vectors) >> DenseRetriever(material.dense, k=3)
    qrels = pd.DataFrame({"qid": ["1"], "docno": ["d1"], "label": [1]})
    table = pt.Experiment([stage, stage % 1], material.topics, qrels, ["recip_rank"])
    assert len(table) == 2


OPERATORS = [KEEP, FIRST, KEEP >> FIRST, *COMBINED, KEEP * 2, (KEEP + BACK) >> FIRST]


@pytest.mark.parametrize("pipeline", OPERATORS, ids=repr)
def test_pyterrier_sees_the_columns_of_every_operator(pipeline: Transformer) -> None:
    assert set(pt.inspect.transformer_inputs(pipeline)[0]) == {"qid", "docno", "score"}
    columns = list(FOUND_RANKED.columns)
    assert set(pt.inspect.transformer_outputs(pipeline, columns)) == set(pipeline(FOUND_RANKED))


@pytest.mark.parametrize("pipeline", OPERATORS[2:], ids=repr)
def test_pyterrier_sees_the_stages_of_every_operator(pipeline: Transformer) -> None:
    assert pt.inspect.subtransformers(pipeline) == {"stages": list(pipeline.stages)}


@pytest.mark.parametrize("pipeline", OPERATORS, ids=repr)
def test_pyterrier_draws_every_operator_without_the_network(pipeline: Transformer) -> None:
    """A8, I6."""
    drawn = pt.schematic.draw(pipeline)
    assert all(type(stage).__name__ in drawn for stage in getattr(pipeline, "stages", ()))


def test_pyterrier_draws_a_feedback_chain() -> None:
    """A8."""
    chain = (
        QueryVectors("v", "i")
        >> DenseRetriever("x")
        >> Vectors("x")
        >> Rocchio()
        >> DenseRetriever("x")
    )
    drawn = pt.schematic.draw(chain)
    assert all(name in drawn for name in ("QueryVectors", "DenseRetriever", "Vectors", "Rocchio"))


# Feedback in a pipeline


def dense_chain(material: Material, k: int, fb_docs: int = 3) -> Compose:
    dense = material.dense
    return (
        QueryVectors(*material.query_vectors)
        >> DenseRetriever(dense, k=k)
        >> Vectors(dense)
        >> Rocchio(fb_docs=fb_docs)
        >> DenseRetriever(dense, k=7)
    )


def untrimmed(pipeline: Compose, frame: pd.DataFrame) -> pd.DataFrame:
    carried: pd.DataFrame | None = frame
    for stage in pipeline:
        frame, carried = stage.step(frame, carried)
    return frame


def test_first_pass_reaches_only_as_deep_as_feedback_reads(material: Material) -> None:
    trimmed = dense_chain(material, k=1000).trimmed()
    assert [getattr(stage, "k", None) for stage in trimmed] == [None, 3, None, None, 7]


@pytest.mark.parametrize("k", [1, 3, 5, 50, 500])
def test_trimmed_first_pass_gives_identical_output(material: Material, k: int) -> None:
    """P3: the feedback set does not depend on how much was retrieved."""
    pipeline = dense_chain(material, k)
    assert plain(pipeline(material.topics)) == plain(untrimmed(pipeline, material.topics))


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (Cutoff(9), 3),
        (Cutoff(2), 2),
        (Scale(2.0), 3),
        (Scale(-1.0), 1000),
        (Scale(-1.0) >> Cutoff(2), 1000),
        (pt.apply.generic(lambda frame: frame), 1000),
    ],
    ids=str,
)
def test_trimming_stops_where_the_order_may_change(middle: Any, expected: int) -> None:
    chain = DenseRetriever("i") >> middle >> Vectors("i") >> Rocchio(fb_docs=3)
    assert chain.trimmed()[0].k == expected


def test_negative_feedback_reads_the_whole_list() -> None:
    chain = DenseRetriever("i", k=50) >> Rocchio(gamma=0.1, neg_docs=2)
    assert chain.trimmed()[0].k == 50


def test_batches_change_nothing(material: Material) -> None:
    """P7, B5."""
    pipeline, topics = dense_chain(material, k=10), material.topics
    single = [pipeline(topics.iloc[[row]]) for row in range(len(topics))]
    assert plain(pd.concat(single)) == plain(pipeline(topics))


def test_retriever_keeps_query_vec(material: Material) -> None:
    """V11: one shared object per query."""
    found = (QueryVectors(*material.query_vectors) >> DenseRetriever(material.dense, k=4))(
        material.topics
    )
    assert found.groupby("qid")["query_vec"].agg(lambda part: len({id(v) for v in part})).max() == 1


def test_query_without_results_survives_feedback(material: Material) -> None:
    """Q4."""
    lost = pt.apply.generic(lambda frame: frame[frame["qid"] != "007"])
    dense = material.dense
    chain = (
        QueryVectors(*material.query_vectors)
        >> DenseRetriever(dense, k=5)
        >> lost
        >> Vectors(dense)
        >> Rocchio(fb_docs=2)
    )
    out = chain(material.topics)
    assert out["qid"].tolist() == material.topics["qid"].tolist()


def test_feedback_alone_falls_back_to_the_queries_in_the_results(material: Material) -> None:
    first = (
        QueryVectors(*material.query_vectors)
        >> DenseRetriever(material.dense)
        >> Vectors(material.dense)
    )
    found = first(material.topics)
    assert Rocchio()(found[found["qid"] != "007"])["qid"].tolist() == [
        qid for qid in material.topics["qid"] if qid != "007"
    ]


def test_feedback_takes_integer_qids_in_both_frames(material: Material) -> None:
    topics = pd.DataFrame({"qid": [1, 2], "query": ["a", "b"]})
    topics["query_vec"] = [np.ones(2), np.zeros(2)]
    found = pd.DataFrame({"qid": [1], "query": ["a"], "docno": ["d"], "score": [1.0]})
    found["query_vec"], found["doc_vec"] = [np.ones(2)], [np.zeros(2)]
    out = Rocchio(1).transform(found, topics)
    assert [vec.tolist() for vec in out["query_vec"]] == [[np.float32(0.4)] * 2, [0, 0]]


def test_query_encoder_after_a_retriever_works_on_the_queries(material: Material) -> None:
    stage = QueryVectors(*material.query_vectors)
    found = results(("007", "cats and dogs", "d1", 1.0))
    out = (KEEP >> stage)(found)
    assert plain(out[["docno", "query_vec"]]) == [
        {"docno": "d1", "query_vec": material.vectors[1].tolist()}
    ]


# Errors name position, stage, query


def test_error_starts_with_position_and_expression() -> None:
    """A1."""
    with pytest.raises(
        FrameError, match=r"^pipeline\[1\] Rocchio\(fb_docs=2\) needs query_vec, doc_vec"
    ):
        (KEEP >> Rocchio(fb_docs=2))(FOUND)


def test_error_inside_an_operator_gives_both_positions() -> None:
    """A1."""
    with pytest.raises(FrameError, match=r"^pipeline\[0\]\[1\] Rocchio\(\) needs"):
        (Sum((KEEP, Rocchio())) >> FIRST)(FOUND)


def test_error_names_the_stage_that_provides_the_column() -> None:
    """A4."""
    with pytest.raises(FrameError, match=r"add Vectors\(index\) before it"):
        (QueryVectors("v", "i") >> DenseRetriever("i") >> Rocchio()).outputs(["qid", "query"])


def test_missing_index_is_named_with_position(tmp_path: Path) -> None:
    with pytest.raises(IndexStateError, match=r"^pipeline\[1\] .*nowhere"):
        (KEEP >> Vectors(tmp_path / "nowhere"))(FOUND)


def test_qid_without_vector_is_named(material: Material) -> None:
    """A2."""
    with pytest.raises(prf.FileFormatError, match=r"holds no qid 'unknown'; encode it first"):
        QueryVectors(*material.query_vectors)(queries(("unknown", "x")))


def test_vectors_of_another_dimension_are_named(material: Material, tmp_path: Path) -> None:
    """V8."""
    prf.build_vectors(tmp_path / "flat", np.ones((2, 3), dtype=np.float32), ["a", "b"])
    chain = QueryVectors(*material.query_vectors) >> DenseRetriever(tmp_path / "flat")
    with pytest.raises(prf.PrfError, match=r"^pipeline\[1\].*8.*3"):
        chain(material.topics)


def test_query_vector_with_nan_names_the_qid(material: Material) -> None:
    """V12."""
    frame = material.topics.head(1).assign(query_vec=[np.full(8, np.nan)])
    with pytest.raises(FrameError, match="'query_vec' of qid '1' holds NaN or infinity"):
        DenseRetriever(material.dense)(frame)


def test_docno_that_is_not_in_the_index_is_named(material: Material) -> None:
    """Q7."""
    with pytest.raises(prf.PrfError, match="'nobody'"):
        Vectors(material.dense)(results(("1", "x", "nobody", 1.0)))


def test_docno_that_is_not_in_the_text_source_is_named_with_the_source(tmp_path: Path) -> None:
    """X8."""
    (tmp_path / "d.tsv").write_text("d1\ttext\n", encoding="utf-8")
    with pytest.raises(FrameError, match=r"d\.tsv' holds no docno 'nobody'"):
        Text(tmp_path / "d.tsv")(results(("1", "x", "nobody", 1.0)))


def test_text_comes_from_a_dense_index_with_texts(material: Material) -> None:
    """X8."""
    out = Text(material.dense)(results(("1", "x", "1e3", 1.0)))
    assert out["text"].tolist() == ["fish oil"]


@dataclass(frozen=True, repr=False)
class _Encoder(prf.pipeline.QueryTransformer):
    """Stands for an encoder: has a model's name, gives a vector of ones."""

    model: str

    gives = ("query_vec",)

    def run_queries(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(query_vec=[np.ones(2, dtype=np.float32)] * len(frame))


@pytest.fixture
def named_index(tmp_path: Path) -> str:
    vectors = np.ones((2, 2), dtype=np.float32)
    prf.build_vectors(tmp_path / "named", vectors, ["a", "b"], encoder="one")
    return str(tmp_path / "named")


@pytest.mark.parametrize(
    "around", [lambda chain: chain, lambda chain: chain + chain], ids=["chain", "sum"]
)
def test_queries_of_another_encoder_are_refused(around: Any, named_index: str) -> None:
    """X9, L9."""
    with pytest.raises(
        IndexStateError, match="built with encoder 'one', the queries come from 'two'"
    ):
        around(_Encoder("two") >> DenseRetriever(named_index))(queries(("1", "x")))


def test_queries_of_another_encoder_are_accepted_when_forced(named_index: str) -> None:
    """X9."""
    chain = _Encoder("two") >> DenseRetriever(named_index, force_encoder=True)
    assert len(chain(queries(("1", "x")))) == 2


def test_queries_of_the_same_encoder_are_accepted(named_index: str) -> None:
    assert len((_Encoder("one") >> DenseRetriever(named_index))(queries(("1", "x")))) == 2


# Notices


def test_notice_warns_once_with_count_and_queries() -> None:
    """Q4."""
    with pytest.warns(PrfWarning, match=r"^queries that are odd: 6 \(1, 2, 3, 4, 5, ...\)$"):
        notice("are odd", list("123456"))


def test_notice_goes_to_the_log_of_a_run() -> None:
    with logging_to(Log()) as log, warnings.catch_warnings():
        warnings.simplefilter("error")
        notice("are odd", ["1"])
        notice("are odd", ["2"])
    assert log.notices == {"are odd": ["1", "2"]}


def test_log_holds_seconds_of_every_stage() -> None:
    with logging_to(Log()) as log:
        (KEEP >> FIRST)(FOUND)
    assert list(log.seconds) == ["0 Scale", "1 Cutoff"]


# Registry and imports


def test_base_classes_are_no_stages() -> None:
    assert not {"Feedback", "VectorFeedback", "Retriever", "Loader", "QueryTransformer"} & set(
        REGISTRY
    )


HEAVY = {
    "torch",
    "faiss",
    "jnius",
    "pyserini",
    "sentence_transformers",
    "transformers",
    "ir_datasets",
}
TOUCH = """
import sys, prf
{touch}
print(*sorted(set(sys.modules) & {heavy!r}))
"""


@pytest.mark.parametrize(
    "touch", ["", "[getattr(prf, name) for name in prf.__all__]"], ids=["import", "every name"]
)
def test_import_loads_nothing_heavy(touch: str) -> None:
    """I1."""
    code = TOUCH.format(touch=touch, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_public_names_are_all_there_once() -> None:
    assert len(set(prf.__all__)) == len(prf.__all__)
    assert set(prf.__all__) <= set(dir(prf))


LAYERS = [
    {"errors"},
    {"frames", "jvm"},
    {"trec", "pipeline", "lamb"},
    {"vectors_io", "lucene_build", "checkpoints", "layouts", "prebuilt", "foreign"},
    {"networks", "ranks"},
    {"encoders"},
    {"knn", "lucene", "encode", "evaluation", "spec", "fuse", "sparse_models"},
    {"index", "training_config"},
    {"dense_build", "tprf", "losses", "sparse_network"},
    {"faiss_index"},
    {"feedback", "comparison", "sparse", "exchange"},
    {"retrieve", "build", "tables"},
    {"batch", "check", "prp", "rerank", "sparse_build", "training_state"},
    {"training_data"},
    {"training_tasks"},
    {"training_loop"},
    {"training"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
"""A module imports only from layers above its own line; ``__init__`` names everything lazily."""
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}
PACKAGES = ("feedback", "prp")
MODULES = sorted(
    path for path in (ROOT / "prf").rglob("*.py") if path.parent.name in ("prf", *PACKAGES)
)


def imported(path: Path) -> set[str]:
    """Returns the modules of this package that a file imports, anywhere in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Import(names=aliases):
                names += [alias.name for alias in aliases]
            case ast.ImportFrom(module="prf", names=aliases):
                names += [f"prf.{alias.name}" for alias in aliases]
            case ast.ImportFrom(module=str(module)):
                names.append(module)
    return {name.split(".")[1] for name in names if name.startswith("prf.")} & set(LEVEL)


def module_of(path: Path) -> str:
    return path.parent.name if path.parent.name in PACKAGES else path.stem


@pytest.mark.parametrize(
    "path", [p for p in MODULES if module_of(p) in LEVEL], ids=lambda p: p.stem
)
def test_no_module_imports_upwards(path: Path) -> None:
    own = module_of(path)
    higher = {name for name in imported(path) - {own} if LEVEL[name] >= LEVEL[own]}
    assert not higher, f"prf/{path.name} may not import {higher}"


def test_every_module_has_a_layer() -> None:
    new = {module_of(path) for path in MODULES} - {"__init__"} - set(LEVEL)
    assert not new, f"say in LAYERS where {new} stands"


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Importing such a module would put it in the function's place."""
    import prf

    modules = {path.stem for path in (ROOT / "prf").glob("*.py")}
    assert not modules & set(prf.__all__)

"""Feedback on learned sparse vectors, and what no term feedback may stumble over."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Material, queries, results
from hypothesis import given
from hypothesis import strategies as st

from prf import (
    BM25,
    KL,
    RM3,
    BM25Prf,
    Bo1,
    Impact,
    IndexStateError,
    PrfWarning,
    RocchioTerms,
    SparseAverage,
    SparseRocchio,
    SpecError,
    TerrierRM3,
    build_impact,
    build_lucene,
    build_sparse,
)
from prf.feedback.base import Docs, Query, Terms
from prf.feedback.sparse import prune
from prf.frames import column, objects

CAT, DOG, FISH = {"cat": 40, "dog": 20}, {"dog": 60, "fish": 30}, {"mouse": 10}
TERM_STAGES = [RM3, RocchioTerms, BM25Prf, Bo1, KL, TerrierRM3]


def docs(*vectors: dict[str, int]) -> Docs:
    names = sorted({term for vector in vectors for term in vector})
    tf = np.array([[vector.get(term, 0) for term in names] for vector in vectors], np.float32)
    zeros = np.zeros(len(names), dtype=np.int64)
    lengths = tf.sum(axis=1).astype(np.int64)
    terms = Terms(objects(names), tf, zeros, zeros, lengths, len(vectors), 0)
    return Docs(objects(map(str, range(len(vectors)))), np.ones(len(vectors)), terms=terms)


def new_query(stage: Any, toks: dict[str, float], *vectors: dict[str, int]) -> dict[str, float]:
    given = dict(stage.reformulate(Query("1", "x", toks=toks), docs(*vectors)))
    assert list(given) == sorted(given, key=lambda term: (-given[term], term))
    return given


# By hand


def test_average_counts_the_query_as_one_document() -> None:
    found = new_query(SparseAverage("i"), {"cat": 50.0, "owl": 5.0}, CAT, DOG)
    assert found == {"cat": 30.0, "dog": 27.0, "fish": 10.0, "owl": 2.0}  # 26.67, 1.67 round up


def test_rocchio_weighs_query_and_mean() -> None:
    found = new_query(SparseRocchio("i", alpha=0.8, beta=0.2), {"cat": 50.0}, CAT, DOG)
    assert found == {"cat": 44.0, "dog": 8.0, "fish": 3.0}


def test_rocchio_takes_the_last_documents_off_and_drops_what_falls_below_zero() -> None:
    stage = SparseRocchio("i", fb_docs=1, alpha=1.0, beta=0.5, gamma=0.5, neg_docs=1)
    assert new_query(stage, {"cat": 10.0}, CAT, DOG) == {"cat": 30.0}  # dog 10 - 30, fish -15


def test_pruning_keeps_the_heaviest_and_of_equal_ones_the_first() -> None:
    stage = SparseAverage("i", max_terms=2, whole=False)
    found = new_query(stage, {"owl": 20.0}, CAT, DOG)
    assert found == pytest.approx({"dog": 80 / 3, "cat": 40 / 3})
    assert list(prune(["b", "a"], np.array([1.0, 1.0]), 1, True)) == ["a"]


def test_whole_weights_can_be_left_as_they_are() -> None:
    found = new_query(SparseRocchio("i", alpha=0.5, beta=0.05, whole=False), {"cat": 1.0}, FISH)
    assert found == {"cat": 0.5, "mouse": 0.5}


def test_negative_side_needs_both_arguments() -> None:
    with pytest.raises(SpecError, match=r"SparseRocchio\.gamma"):
        SparseRocchio("i", gamma=0.1)


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 300), max_size=6),
    st.lists(
        st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 300), min_size=1),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 4),
)
def test_average_is_rocchio_with_these_weights(
    toks: dict[str, int], vectors: list[dict[str, int]], max_terms: int
) -> None:
    """methods.md 5.1: alpha = 1/(k+1), beta = k/(k+1); here but for the last bit."""
    k = len(vectors)
    query = {term: float(weight) for term, weight in toks.items()}
    same = {"fb_docs": k, "max_terms": max_terms, "whole": False}
    average = new_query(SparseAverage("i", **same), query, *vectors)
    rocchio = new_query(
        SparseRocchio("i", alpha=1 / (k + 1), beta=k / (k + 1), **same), query, *vectors
    )
    if max_terms == 0:
        assert average.keys() == rocchio.keys()
        assert all(math.isclose(average[t], rocchio[t], rel_tol=1e-6) for t in average)
    else:
        assert len(average) == len(rocchio) <= max_terms


# On an index


@pytest.mark.java
def test_feedback_on_an_impact_index_reads_its_weights(tmp_path: Path) -> None:
    lines = [{"id": f"d{i}", "vector": v} for i, v in enumerate((CAT, DOG, FISH))]
    (tmp_path / "v.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    index = str(tmp_path / "impact")
    assert build_impact(index, tmp_path / "v.jsonl")["documents"] == 3
    frame = queries(("1", "x")).assign(query_toks=column(objects([{"cat": 50.0}])))
    search = Impact(index)
    out = (search >> SparseRocchio(index, fb_docs=1) >> search)(frame)
    # cat .8 * 50 + .2 * 40 = 48, dog .2 * 20 = 4
    assert out["query_toks"][0] == {"cat": 48.0, "dog": 4.0}
    assert dict(zip(out["docno"], out["score"], strict=True)) == {"d0": 2000.0, "d1": 240.0}


@pytest.mark.java
@pytest.mark.models
def test_encoder_and_feedback_join_in_one_pipeline(material: Material, tmp_path: Path) -> None:
    from prf import Splade

    index = str(tmp_path / "splade")
    build_sparse(index, [("a", "cat dog"), ("b", "fish oil")], material.splade, "splade")
    pipeline = Splade(material.splade) >> Impact(index) >> SparseAverage(index) >> Impact(index)
    assert set(pipeline(queries(("1", "cat")))["docno"]) == {"a", "b"}


# Edges of all term feedback


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of rare terms, one of stop words only, one in another script."""
    texts = {
        "plain": "cats eat fish",
        "stop": "the of and",
        "other": "größe 漢字 naïve",
        **{f"filler{i}": f"filler{i} words{i} here{i}" for i in range(40)},
    }
    folder = tmp_path_factory.mktemp("edges") / "index"
    build_lucene(folder, list(texts.items()), on_empty="keep")
    return str(folder)


@pytest.mark.java
@pytest.mark.parametrize("stage", TERM_STAGES)
def test_document_without_indexed_terms_leaves_the_query(edges: str, stage: Any) -> None:
    out = stage(edges)(results(("1", "cats", "stop", 1.0)))
    assert set(out["query_toks"][0]) == {"cat"}


@pytest.mark.java
@pytest.mark.parametrize("stage", TERM_STAGES)
def test_terms_of_any_script_are_fed_back_unless_the_method_filters(edges: str, stage: Any) -> None:
    out = stage(edges)(results(("1", "cats", "other", 1.0)))
    new = set(out["query_toks"][0]) - {"cat"}
    assert new <= {"größ", "größe", "漢", "字", "naïv", "naïve"}
    # Anserini's RM3 and BM25PRF take letters a-z and digits only, and BM25PRF wants a term in two
    # documents; Rocchio and Terrier's RM3 take any, the DFR models a term that occurs once too.
    assert bool(new) == (stage in (RocchioTerms, Bo1, KL))


@pytest.mark.java
@pytest.mark.parametrize("stage", TERM_STAGES)
def test_query_terms_the_index_does_not_have_do_no_harm(edges: str, stage: Any) -> None:
    frame = results(("1", "zzzz cats", "plain", 1.0))
    out = (stage(edges) >> BM25(edges))(frame)
    assert out["docno"].tolist()[0] == "plain"


@pytest.mark.java
@pytest.mark.parametrize("stage", TERM_STAGES)
def test_query_that_expands_to_nothing_retrieves_nothing(edges: str, stage: Any) -> None:
    frame = results(("1", "the of", "stop", 1.0), ("2", "cats", "plain", 1.0))
    with pytest.warns(PrfWarning, match=r"no term left .*1 \(1\)"):
        out = (stage(edges) >> BM25(edges))(frame)
    assert set(out["qid"]) == {"2"}


@pytest.mark.java
@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_terms_of_weight_zero_or_below_count_nothing(edges: str, weight: float) -> None:
    frame = queries(("1", "x"), ("2", "x"))
    toks = [{"cat": 1.0, "filler1": weight}, {"cat": 1.0}]
    out = BM25(edges)(frame.assign(query_toks=column(objects(toks))))
    one, two = (out.loc[out["qid"] == qid, ["docno", "score"]].values.tolist() for qid in "12")
    assert one == two


@pytest.mark.java
@pytest.mark.parametrize("stage", [*TERM_STAGES, SparseAverage])
def test_index_without_term_vectors_names_the_command(tmp_path: Path, stage: Any) -> None:
    from test_lucene import foreign

    index = foreign(tmp_path / "index", vectors=False, raw=None).path
    frame = results(("1", "cats", "a", 1.0)).assign(query_toks=column(objects([{"cat": 1.0}])))
    with pytest.raises(IndexStateError, match=r"term vectors.*'a'.*`prf index`"):
        stage(str(index))(frame)

"""Text feedback: new texts word by word, how scores combine, and the reranker called once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from conftest import Material, queries, results
from hypothesis import given, settings
from hypothesis import strategies as st

import prf
from prf import (
    BM25,
    ConcatenateText,
    CrossEncoder,
    Cutoff,
    FrameError,
    PrfWarning,
    Scale,
    SpecError,
    TextFeedbackReranker,
    explain,
)
from prf.feedback.text import combined, concatenate, new_texts, windows, words
from prf.frames import ranked
from prf.pipeline import Transformer, notice

COLUMNS = "qid query docno score text"
CALLS: list[pd.DataFrame] = []


@dataclass(frozen=True, repr=False)
class _SharedWords(Transformer):
    """Scores that can be counted by hand: how many words query and text share."""

    needs = ("qid", "query", "docno", "text")
    gives = ("score", "rank")

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        CALLS.append(frame)
        pairs = zip(frame["query"], frame["text"], strict=True)
        shared = [float(len(set(q.split()) & set(t.split()))) for q, t in pairs]
        return ranked(frame.assign(score=shared))


@dataclass(frozen=True, repr=False)
class _Another(Transformer):
    """Retrieves one document that nobody asked for."""

    needs = ("qid", "docno")
    gives = ("score", "rank")

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        return frame.head(1).assign(docno="z", score=1.0, rank=0)


@dataclass(frozen=True, repr=False)
class _Renoticed(_SharedWords):
    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        notice("were cut", list(frame["qid"].unique()))
        return super().run(frame, queries)


DOCS = [("a", 3.0, "cat sat mat"), ("b", 2.0, "cat fish"), ("c", 1.0, "mat fish fish oil")]


def found(*qids: str, docs=DOCS) -> pd.DataFrame:
    return results(*((q, "the cat", *doc) for q in qids for doc in docs), names=COLUMNS)


def pairs(frame: pd.DataFrame) -> list[tuple[str, float]]:
    return list(zip(frame["docno"], frame["score"].tolist(), strict=True))


# Texts


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (100, [(0, 65), (32, 97), (64, 100)]),
        (65, [(0, 65)]),
        (66, [(0, 65), (32, 66)]),
        (3, [(0, 3)]),
        (0, [(0, 0)]),
    ],
)
def test_windows_of_the_worked_example(length: int, expected: list[tuple[int, int]]) -> None:
    assert windows(length, 65, 32) == expected


@given(st.integers(0, 400), st.integers(1, 80), st.integers(1, 80))
def test_windows_cover_the_text(length: int, window: int, stride: int) -> None:
    found = windows(length, window, min(stride, window))
    assert (found[0][0], found[-1][1]) == (0, length)
    assert all(a[1] >= b[0] and b[0] - a[0] == min(stride, window) for a, b in pairwise(found))
    assert all(start + window < length for start, _ in found[:-1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \t\n", []),
        ("A cat, 3.5 kg.", ["A", "cat", ",", "3.5", "kg", "."]),
        ("ü漢 état-major", ["ü漢", "état-major"]),
        ("what?!", ["what", "?", "!"]),
        ("a...b", ["a", ".", ".", ".", "b"]),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@given(st.text(max_size=60))
def test_words_lose_nothing_but_white_space(text: str) -> None:
    assert "".join(words(text)) == "".join(text.split())


def test_text_of_256_words_at_most() -> None:
    assert len(concatenate(["q", "w " * 400], 256).split()) == 256


def test_new_texts_of_each_kind() -> None:
    docs = ["a b c.", "d e"]
    assert new_texts("q?", docs, "truncate", max_words=5) == ["q ? a b c"]
    assert new_texts("q?", docs, "aggregate", max_words=4) == ["q ? a b", "q ? d e"]
    assert new_texts("q?", docs, "window", 4, 2) == ["q ? a b c .", "q ? c . d e"]


# Scores


def test_borda_of_the_worked_example() -> None:
    ranks = np.array([[0, 1, 2, 3], [1, 3, 0, 2]])  # d1 d2 d3 d4 and d3 d1 d4 d2
    assert combined(-1.0 * ranks, ranks, "borda").tolist() == [1.75, 1.0, 1.5, 0.75]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        # New texts "the cat cat sat mat" and "the cat cat fish" share 3 1 1 and 1 2 1 words with
        # a b c; in order a b c and b a c.
        ("average", [("a", 2.0), ("b", 1.5), ("c", 1.0)]),
        ("max", [("a", 3.0), ("b", 2.0), ("c", 1.0)]),
        ("borda", [("a", 5 / 3), ("b", 5 / 3), ("c", 2 / 3)]),
    ],
)
def test_aggregate_by_hand(aggregate, expected) -> None:
    stage = TextFeedbackReranker(_SharedWords(), "aggregate", aggregate, fb_docs=2)
    assert pairs(stage(found("1"))) == expected


def test_truncate_by_hand() -> None:
    stage = TextFeedbackReranker(_SharedWords(), "truncate", "max", fb_docs=2, max_words=6)
    # "the cat cat sat mat cat": fish does not fit.
    assert pairs(stage(found("1"))) == [("a", 3.0), ("b", 1.0), ("c", 1.0)]


def test_window_by_hand() -> None:
    stage = TextFeedbackReranker(_SharedWords(), "window", "average", fb_docs=3, window=5, stride=4)
    # Windows "cat sat mat cat fish" and "fish mat fish fish oil": 3 2 2 and 2 2 3 words shared.
    assert pairs(stage(found("1"))) == [("a", 2.5), ("c", 2.5), ("b", 2.0)]


def test_reranker_is_called_once_for_all_pairs() -> None:
    CALLS.clear()
    TextFeedbackReranker(_SharedWords(), fb_docs=2)(found("1", "2#0", "2"))
    assert [len(frame) for frame in CALLS] == [3 * 2 * 3]
    assert CALLS[0]["qid"].nunique() == 6


def test_new_texts_start_with_the_users_text_whatever_came_since() -> None:
    CALLS.clear()
    frame = found("1").assign(query_0="cat", query_1="who sings", query_vec=0)
    out = TextFeedbackReranker(_SharedWords(), "truncate", fb_docs=1)(frame)
    assert set(CALLS[0]["query"]) == {"who sings cat sat mat"}
    assert not {"query_0", "query_1", "query_vec"} & set(CALLS[0].columns)
    assert set(out["query"]) == {"the cat"}
    assert set(out.columns) == {*frame.columns, "rank"}


@settings(max_examples=15)
@given(st.randoms(use_true_random=False), st.sampled_from(["truncate", "aggregate", "window"]))
def test_order_of_candidates_does_not_matter(rng: random.Random, how) -> None:
    frame = found("1", "2")
    order = rng.sample(range(len(frame)), len(frame))
    stage = TextFeedbackReranker(_SharedWords(), how, fb_docs=2, window=3, stride=2)
    left, right = (
        stage(part).sort_values(["qid", "rank"])[["qid", "docno", "score"]].to_numpy().tolist()
        for part in (frame, frame.iloc[order])
    )
    assert left == right


def test_fewer_documents_than_asked_for() -> None:
    CALLS.clear()
    TextFeedbackReranker(_SharedWords(), fb_docs=10)(found("1", docs=DOCS[:1]))
    assert len(CALLS[0]) == 1


def test_fb_docs_0_leaves_the_list() -> None:
    frame = found("1", "2")
    out = TextFeedbackReranker(_SharedWords(), fb_docs=0)(frame)
    assert pairs(out) == pairs(frame)


def test_notices_name_the_users_queries() -> None:
    with pytest.warns(PrfWarning, match=r"were cut: 2 \(1, 2#0\)"):
        TextFeedbackReranker(_Renoticed(), fb_docs=2)(found("1", "2#0"))


def test_reranker_that_drops_documents_is_refused() -> None:
    with pytest.raises(FrameError, match=r"no score for docno 'c' of qid '1'; it must return ev"):
        TextFeedbackReranker(_SharedWords() >> Cutoff(2), fb_docs=1)(found("1"))


def test_stage_that_retrieves_other_documents_is_refused() -> None:
    more = _SharedWords() ^ _Another()
    with pytest.raises(FrameError, match=r"returned 4 documents for the 3 it was given"):
        TextFeedbackReranker(more, fb_docs=1)(found("1"))


def test_reranker_that_lacks_a_column_is_found_without_running() -> None:
    stage = BM25("i") >> prf.Text("t") >> TextFeedbackReranker(prf.DenseRescorer("d"))
    with pytest.raises(FrameError, match=r"DenseRescorer.* needs query_vec"):
        stage.outputs(["qid", "query"])


def test_text_that_is_none_is_refused() -> None:
    frame = found("1", docs=[("a", 1.0, None)])
    with pytest.raises(FrameError, match="qid '1' has None where"):
        TextFeedbackReranker(_SharedWords())(frame)


@pytest.mark.parametrize(("field", "value"), [("how", "sum"), ("aggregate", "mean"), ("window", 0)])
def test_bad_argument_is_refused(field: str, value: object) -> None:
    with pytest.raises(SpecError, match=field):
        TextFeedbackReranker(_SharedWords(), **{field: value})


# Concatenation as feedback


def test_concatenated_text_replaces_the_query() -> None:
    out = ConcatenateText(2, max_words=6)(found("1"))
    assert out[["query", "query_0"]].to_numpy().tolist() == [["the cat cat sat mat cat", "the cat"]]


def test_query_without_documents_keeps_its_text() -> None:
    out = ConcatenateText(2).transform(found("1"), queries(("1", "the cat"), ("2", "no, don't")))
    assert out["query"].tolist()[1] == "no, don't"


@pytest.mark.java
def test_concatenated_text_searches_again(material: Material) -> None:
    search = BM25(material.lucene, k=5)
    pipeline = search >> prf.Text(material.lucene) >> ConcatenateText(1, 8) >> search
    out = pipeline(queries(("1", "fish")))
    assert (set(out["query_0"]), out["query"].iat[0].split()[0]) == ({"fish"}, "fish")


# What it will cost


@pytest.mark.parametrize(
    ("stage", "note"),
    [
        (CrossEncoder("m"), "scores at most 50 pairs for each query"),
        (
            TextFeedbackReranker(CrossEncoder("m"), fb_docs=3),
            "scores at most 150 pairs for each query: 50 documents with 3 new texts",
        ),
        (
            TextFeedbackReranker(CrossEncoder("m"), "truncate"),
            "scores at most 50 pairs for each query: 50 documents with 1 new texts",
        ),
        (
            TextFeedbackReranker(CrossEncoder("m"), "window", fb_docs=10),
            "scores about (for passages of 65 words) 1,000 pairs for each query: 50 documents "
            "with 20 new texts",
        ),
    ],
)
def test_explain_predicts_the_pairs(stage: Transformer, note: str) -> None:
    chain = BM25("i", k=80) >> prf.Text("t") >> Scale(2.0) >> Cutoff(50) >> stage
    assert explain(chain)[-1].note == note


def test_explain_knows_the_depth_of_fusions_and_inside_operators() -> None:
    lists = prf.CombSum((BM25("i", k=80), BM25("j", k=30)))
    chain = lists >> prf.Text("t") >> (CrossEncoder("m") ** CrossEncoder("n"))
    assert [step.note for step in explain(chain)][-1] == "scores at most 110 pairs for each query"


def test_explain_says_so_where_the_depth_is_not_known() -> None:
    columns = ["qid", "query", "docno", "text"]
    (step,) = explain(CrossEncoder("m"), columns)
    assert step.note == "scores one pair for each document of a query"

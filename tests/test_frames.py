"""Query and result frames: identifiers, the one order, checks and their messages."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from conftest import plain, queries, results
from hypothesis import given
from hypothesis import strategies as st

from prf import FrameError, original_query
from prf.frames import (
    attach_queries,
    canonical_order,
    head,
    identifiers,
    need,
    normalise,
    objects,
    push_query,
    queries_of,
    query_codes,
    query_columns,
    ranked,
    ranks_of,
    stack,
)

ODD = ["30_1", "007", "1e3", "1_000", "+1", "１２", "NA", "null", "nan", "None", "-", "d" * 300]


@pytest.mark.parametrize("name", ODD)
def test_text_identifier_stays_what_it_is(name: str) -> None:
    """D1, D2, D3, D8."""
    assert normalise(queries((name, "x")), "here")["qid"].tolist() == [name]


@pytest.mark.parametrize("number", [7, np.int64(7), np.uint8(7), 10**30])
def test_whole_number_becomes_its_digits(number: object) -> None:
    """D4: exactly, without ``.0``."""
    assert normalise(queries((number, "x")), "here")["qid"].tolist() == [str(number)]


def test_integer_column_becomes_text() -> None:
    frame = pd.DataFrame({"qid": [1, 2], "query": ["a", "b"]})
    assert normalise(frame, "here")["qid"].tolist() == ["1", "2"]


@pytest.mark.parametrize("value", [1.0, None, float("nan"), pd.NA, True, b"q1", ("q1",)])
def test_other_identifier_is_refused_with_column_and_row(value: object) -> None:
    """D4."""
    with pytest.raises(FrameError, match=r"here: column 'qid' holds .* in row 1"):
        normalise(queries(("a", "x"), (value, "y")), "here")


def test_empty_identifier_is_refused() -> None:
    with pytest.raises(FrameError, match="column 'docno' is empty in row 1"):
        identifiers(pd.Series(["a", ""], dtype=object), "docno", "here")


@pytest.mark.parametrize("dtype", [object, "string", "category"])
def test_identifier_column_may_have_any_text_dtype(dtype: str) -> None:
    frame = pd.DataFrame({"qid": pd.Series(["007", "NA"], dtype=dtype), "query": ["a", "b"]})
    assert [type(qid) for qid in normalise(frame, "here")["qid"]] == [str, str]


def test_repeated_qid_is_refused_with_both_rows() -> None:
    """Q13."""
    frame = queries(("a", "x"), ("b", "y"), ("a", "z"))
    with pytest.raises(FrameError, match="qid 'a' stands in rows 0 and 2 of the query frame"):
        normalise(frame, "here")


def test_repeated_docno_is_refused() -> None:
    """D6."""
    frame = results(("a", "x", "d1", 1.0), ("a", "x", "d1", 2.0))
    with pytest.raises(FrameError, match="docno 'd1' stands twice in the results of qid 'a'"):
        normalise(frame, "here")


def test_same_docno_for_two_queries_is_fine() -> None:
    assert len(normalise(results(("a", "x", "d", 1.0), ("b", "y", "d", 1.0)), "here")) == 2


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_score_that_is_not_finite_is_refused_with_qid_and_docno(score: float) -> None:
    """R11."""
    with pytest.raises(FrameError, match="here: score of docno 'd' for qid 'a' is"):
        normalise(results(("a", "x", "d", score)), "here")


def test_missing_score_is_refused() -> None:
    frame = results(("a", "x", "d", 1.0)).assign(score=pd.Series([pd.NA], dtype="Float64"))
    with pytest.raises(FrameError, match="score of docno 'd' for qid 'a' is nan"):
        normalise(frame, "here")


def test_score_that_is_no_number_is_refused() -> None:
    frame = results(("a", "x", "d", 1.0)).assign(score=["high"])
    with pytest.raises(FrameError, match="column 'score' is not numeric"):
        normalise(frame, "here")


@pytest.mark.parametrize("dtype", [np.int64, np.float16, np.float32, "Int64", object])
def test_score_may_have_any_numeric_dtype(dtype: str) -> None:
    """E8."""
    frame = results(("a", "x", "d", 3.0)).astype({"score": dtype})
    assert normalise(frame, "here")["score"].dtype == np.float64


def test_normalise_puts_documents_in_canonical_order() -> None:
    frame = results(
        ("a", "x", "z", 1.0), ("b", "y", "m", 5.0), ("a", "x", "k", 1.0), ("a", "x", "l", 2.0)
    )
    out = normalise(frame, "here")
    assert out["docno"].tolist() == ["l", "k", "z", "m"]


def test_normalise_never_trusts_a_rank() -> None:
    frame = results(("a", "x", "d1", 1.0), ("a", "x", "d2", 2.0)).assign(rank=[0, 1])
    out = normalise(frame, "here")
    assert dict(zip(out["docno"], out["rank"], strict=True)) == {"d2": 0, "d1": 1}


def test_normalise_adds_no_rank() -> None:
    assert "rank" not in normalise(results(("a", "x", "d1", 1.0)), "here")


def test_normalise_leaves_its_input_alone() -> None:
    frame = results((1, "x", "d1", 1.0), (1, "x", "d2", 2.0))
    before = plain(frame)
    normalise(frame, "here")
    assert plain(frame) == before


def test_ties_fall_to_the_smaller_docno_as_text() -> None:
    """R1."""
    docnos = ["10", "9", "a", "B", "é"]
    frame = results(*[("q", "x", docno, 1.0) for docno in docnos])
    assert ranked(frame)["docno"].tolist() == sorted(docnos)


def test_ranks_count_from_zero_within_each_query() -> None:
    assert ranks_of(np.array([0, 0, 1, 2, 2, 2])).tolist() == [0, 1, 0, 0, 1, 2]


def test_ranks_of_nothing() -> None:
    assert ranks_of(np.zeros(0, dtype=np.int64)).dtype == np.int64


ROWS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.text("xyz19", min_size=1, max_size=3),
        st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 1e300, 5e-324]),
    ),
    unique_by=lambda row: row[:2],
)


@given(ROWS)
def test_canonical_order_is_that_of_a_plain_sort(rows: list[tuple[str, str, float]]) -> None:
    codes, names = query_codes(objects(qid for qid, _, _ in rows))
    order = canonical_order(codes, [score for _, _, score in rows], objects(d for _, d, _ in rows))
    expected = sorted(rows, key=lambda row: (names.tolist().index(row[0]), -row[2], row[1]))
    assert [rows[i] for i in order] == expected


@given(ROWS, st.integers(0, 5), st.integers(0, 5))
def test_top_k_is_a_prefix_of_top_k_plus_more(
    rows: list[tuple[str, str, float]], k: int, more: int
) -> None:
    """P3."""
    frame = results(*[(qid, "text", docno, score) for qid, docno, score in rows])
    deeper = head(frame, k + more)
    assert plain(deeper[deeper["rank"] < k]) == plain(head(frame, k))


@given(ROWS, st.randoms(use_true_random=False))
def test_order_does_not_depend_on_row_position(
    rows: list[tuple[str, str, float]], random: object
) -> None:
    """P4."""
    shuffled = rows.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    lists = [
        {qid: part["docno"].tolist() for qid, part in ranked(frame).groupby("qid")}
        for frame in (
            results(*[(qid, "text", docno, score) for qid, docno, score in version])
            for version in (rows, shuffled)
        )
    ]
    assert lists[0] == lists[1]


def test_query_columns_go_by_list_not_by_prefix() -> None:
    columns = ["qid", "query", "quality", "query_vec", "docno", "text", "doc_vec", "mine"]
    assert query_columns(columns) == ["qid", "query", "quality", "query_vec", "mine"]


def test_queries_of_keeps_order_and_drops_documents() -> None:
    frame = results(("b", "y", "d1", 1.0), ("a", "x", "d1", 1.0), ("b", "y", "d2", 0.5))
    assert plain(queries_of(frame)) == [{"qid": "b", "query": "y"}, {"qid": "a", "query": "x"}]


def test_attach_queries_takes_query_columns_from_the_queries() -> None:
    found = results(("a", "old", "d1", 1.0))
    assert attach_queries(queries(("a", "new")), found)["query"].tolist() == ["new"]


def test_attach_queries_refuses_results_of_an_unknown_query() -> None:
    with pytest.raises(FrameError, match="qid 'b', which is not among the queries"):
        attach_queries(queries(("a", "x")), results(("b", "y", "d", 1.0)))


def test_push_query_keeps_earlier_texts_newest_first() -> None:
    frame = queries(("a", "first"))
    for text in ("second", "third"):
        frame = push_query(frame, objects([text]))
    assert plain(frame) == [{"qid": "a", "query": "third", "query_0": "second", "query_1": "first"}]


def test_push_query_counts_beyond_nine() -> None:
    frame = queries(("a", "0"))
    for number in range(1, 13):
        frame = push_query(frame, objects([str(number)]))
    assert original_query(frame).tolist() == ["0"]


def test_push_query_drops_what_belonged_to_the_old_text() -> None:
    frame = queries(("a", "x")).assign(query_vec=[1], query_toks=[2])
    assert list(push_query(frame, objects(["y"])).columns) == ["qid", "query", "query_0"]


def test_original_query_of_an_unchanged_frame_is_the_query() -> None:
    assert original_query(queries(("a", "x"))).tolist() == ["x"]


def test_missing_columns_are_listed_with_those_found() -> None:
    """E15."""
    with pytest.raises(
        FrameError, match="here needs docno, score, found only qid, query"
    ) as caught:
        need(queries(("a", "x")), ("docno", "score"), "here")
    assert caught.value.missing == ("docno", "score")


@pytest.mark.parametrize(
    ("other", "ours"),
    [("query_id", "qid"), ("doc_id", "docno"), ("question", "query"), ("sim", "score")],
)
def test_likely_rename_is_suggested(other: str, ours: str) -> None:
    """E15."""
    with pytest.raises(FrameError, match=f"rename column '{other}' to '{ours}'"):
        need(pd.DataFrame({other: ["a"]}), (ours,), "here")


# Vectors


def test_stack_gives_contiguous_float32() -> None:
    out = stack(pd.Series([np.arange(3.0), [1, 2, 3]]), "here", ["a", "b"])
    assert (out.dtype, out.shape, out.flags.c_contiguous) == (np.float32, (2, 3), True)


@pytest.mark.parametrize(
    "value",
    [None, 1.0, "vector", [[1.0, 2.0]], np.zeros((1, 2)), [[1.0], [1.0, 2.0]], ["a", "b"], [1j, 2]],
)
def test_stack_refuses_what_is_no_vector_naming_the_qid(value: object) -> None:
    """A3."""
    column = pd.Series(objects([np.zeros(2), value]), name="query_vec")
    with pytest.raises(FrameError, match="here: column 'query_vec' of qid 'b' holds"):
        stack(column, "here", ["a", "b"])


def test_stack_refuses_another_length_with_both_numbers() -> None:
    """V8."""
    column = pd.Series(objects([np.zeros(2), np.zeros(3)]), name="query_vec")
    with pytest.raises(FrameError, match="qid 'b' holds 3 numbers; every row needs a vector of 2"):
        stack(column, "here", ["a", "b"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_stack_refuses_numbers_that_are_not_finite_in_single_precision(bad: float) -> None:
    """V12."""
    column = pd.Series(objects([np.zeros(2), np.array([0.0, bad])]), name="doc_vec")
    with pytest.raises(FrameError, match="'doc_vec' of qid 'b', docno 'd2', holds NaN or infinity"):
        stack(column, "here", ["a", "b"], ["d1", "d2"])

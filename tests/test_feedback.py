"""Feedback methods by hand-computed examples, and what the scaffold around them owes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Material, plain, queries, results
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from prf import (
    BM25,
    RM3,
    AveragePrf,
    FrameError,
    IndexStateError,
    PrfError,
    Rocchio,
    RocchioTerms,
    SpecError,
    TextFeedback,
    VectorFeedback,
    build_lucene,
    original_query,
)
from prf.feedback import KL, BM25Prf, Bo1, TerrierRM3
from prf.feedback.base import Docs, Query, Terms
from prf.feedback.terms import anserini_terms, rm3, rocchio_terms
from prf.feedback.vector import average, rocchio
from prf.frames import objects
from prf.pipeline import REGISTRY

# methods.md section 17: vectors

QUERY = np.array([1, 0, 2], dtype=np.float32)
DOCS = np.array([[0, 1, 1], [2, 1, 0], [1, 1, 2]], dtype=np.float32)


@pytest.mark.parametrize(
    ("k", "expected"), [(3, [1, 0.75, 1.25]), (2, [1, 2 / 3, 1])], ids=["k 3", "k 2"]
)
def test_average_of_the_worked_example(k: int, expected: list[float]) -> None:
    assert average(QUERY, DOCS[:k]).tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("alpha", "beta", "k", "expected"),
    [(0.4, 0.6, 2, [1, 0.6, 1.1]), (0.4, 0.6, 3, [1, 0.6, 1.4]), (1.0, 0.2, 3, [1.2, 0.2, 2.2])],
)
def test_rocchio_of_the_worked_example(
    alpha: float, beta: float, k: int, expected: list[float]
) -> None:
    new = rocchio(QUERY, DOCS[:k], DOCS[:0], alpha, beta, 0.0)
    assert new.tolist() == pytest.approx(expected, abs=1e-15)


def found(n: int = 3) -> pd.DataFrame:
    """Returns the worked example as a result frame: v1, v2, v3 in this order, worst row first."""
    rows = [("q", "text", QUERY, f"v{i + 1}", 9.0 - i, DOCS[i]) for i in reversed(range(n))]
    return results(*rows, names="qid query query_vec docno score doc_vec")


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (AveragePrf(), [1, 0.75, 1.25]),
        (AveragePrf(fb_docs=2), [1, 2 / 3, 1]),
        (AveragePrf(fb_docs=1), [0.5, 0.5, 1.5]),
        (Rocchio(fb_docs=2), [1, 0.6, 1.1]),
        (Rocchio(fb_docs=3), [1, 0.6, 1.4]),
        (Rocchio(3, 1.0, 0.2), [1.2, 0.2, 2.2]),
        (Rocchio(1, 1.0, 1.0, gamma=0.5, neg_docs=1), [0.5, 0.5, 2]),
        (Rocchio(1, 1.0, 1.0, gamma=0.5, neg_docs=2), [0.25, 0.5, 2.5]),
    ],
    ids=repr,
)
def test_stage_gives_the_worked_example_in_single_precision(
    stage: Any, expected: list[float]
) -> None:
    """fb_docs is honoured exactly, by canonical order and not by row position."""
    out = stage(found())
    assert out["query_vec"].iat[0].tolist() == np.array(expected, dtype=np.float32).tolist()


@pytest.mark.parametrize("n", [1, 2])
def test_fewer_documents_are_divided_by_their_own_number(n: int) -> None:
    assert plain(AveragePrf(3)(found(n))) == plain(AveragePrf(n)(found()))


@pytest.mark.parametrize("n", [1, 2])
def test_rocchio_with_fewer_documents_takes_their_own_mean(n: int) -> None:
    assert plain(Rocchio(5)(found(n))) == plain(Rocchio(n)(found()))


def test_short_list_may_hold_a_document_on_both_sides() -> None:
    """As in Pyserini: with one document, it is the first and the last."""
    out = Rocchio(3, 1.0, 1.0, gamma=1.0, neg_docs=3)(found(1))
    assert out["query_vec"].iat[0].tolist() == QUERY.tolist()


def test_no_documents_leave_the_query_as_it_is() -> None:
    out = Rocchio().transform(found().head(0), found().head(1)[["qid", "query", "query_vec"]])
    assert plain(out) == [{"qid": "q", "query": "text", "query_vec": [1, 0, 2]}]


@pytest.mark.parametrize(("gamma", "neg_docs"), [(0.1, 0), (0.0, 1)])
def test_rocchio_refuses_half_of_a_negative_side(gamma: float, neg_docs: int) -> None:
    with pytest.raises(SpecError, match="negative feedback needs both, none needs neither"):
        Rocchio(gamma=gamma, neg_docs=neg_docs)


def test_nothing_is_normalised_and_scores_do_not_count() -> None:
    large = found().assign(score=lambda frame: frame["score"] * 1e6)
    assert plain(Rocchio()(large)) == plain(Rocchio()(found()))


def test_result_columns_end_and_query_columns_stay() -> None:
    frame = found().assign(mine=1, quality=2, text="t", rank=0, label=1)
    assert list(AveragePrf()(frame).columns) == ["qid", "query", "query_vec", "mine", "quality"]


# Pyserini's vectors


@pytest.fixture(scope="module")
def pyserini_prf() -> SimpleNamespace:
    """The classes of Pyserini's own file; importing it the usual way would start Java."""
    spec = importlib.util.find_spec("pyserini")
    if spec is None:
        pytest.skip("pyserini is not installed")
    path = Path(spec.submodule_search_locations[0]) / "search" / "faiss" / "_prf.py"
    lines = path.read_text("utf-8").splitlines()
    names: dict[str, Any] = {"AnceQueryEncoder": object, "LuceneSearcher": object}
    code = "\n".join(line for line in lines if not line.startswith("from pyserini"))
    exec(compile(code, str(path), "exec"), names)
    return SimpleNamespace(**names)


NUMBERS = st.floats(-700, 700, width=32)
VECTORS = hn.arrays(np.float32, st.tuples(st.integers(2, 8), st.just(4)), elements=NUMBERS)


def one_query(vectors: np.ndarray[Any, Any]) -> pd.DataFrame:
    """Returns results of a query: row 0 is its vector, the others its documents, best first."""
    rows = [("q", "x", vectors[0], f"{i:03}", -float(i), vec) for i, vec in enumerate(vectors[1:])]
    return results(*rows, names="qid query query_vec docno score doc_vec")


def theirs(method: Any, vectors: np.ndarray[Any, Any], n: int | None = None) -> list[float]:
    candidates = [SimpleNamespace(vectors=vec) for vec in vectors[1:][:n]]
    return method.get_prf_q_emb(vectors[0], candidates).tolist()


def exact(vector: np.ndarray[Any, Any]) -> Any:
    """Both sides round in single precision: 1e-6 of the largest number that occurs."""
    return pytest.approx(vector.tolist(), rel=1e-6, abs=1e-6 * 700)


@given(vectors=VECTORS, k=st.integers(1, 9))
def test_average_equals_pyserini(pyserini_prf: Any, vectors: np.ndarray[Any, Any], k: int) -> None:
    new = AveragePrf(k)(one_query(vectors))["query_vec"].iat[0]
    assert theirs(pyserini_prf.DenseVectorAveragePrf(), vectors, k) == exact(new)


@given(vectors=VECTORS, k=st.integers(1, 9), last=st.integers(1, 9))
def test_rocchio_equals_pyserini(
    pyserini_prf: Any, vectors: np.ndarray[Any, Any], k: int, last: int
) -> None:
    """Negative part included, on lists of any length."""
    new = Rocchio(k, 0.4, 0.6, 0.3, last)(one_query(vectors))["query_vec"].iat[0]
    assert theirs(pyserini_prf.DenseVectorRocchioPrf(0.4, 0.6, 0.3, k, last), vectors) == exact(new)


# methods.md section 17: terms

CAT_DOG = {"cat": 1.0, "dog": 1.0}
TERMS = np.array(["cat", "dog", "fish", "mouse"], dtype=object)
TF = np.array([[2, 0, 1, 1], [0, 1, 0, 2]], dtype=np.float32)
SCORES = np.array([3.0, 1.0])


@pytest.mark.parametrize(
    ("fb_terms", "expected"),
    [
        (3, {"cat": 0.454545, "dog": 0.25, "mouse": 0.193182, "fish": 0.102273}),
        (2, {"cat": 0.583333, "dog": 0.25, "fish": 0.166667}),
    ],
)
def test_rm3_of_the_worked_example(fb_terms: int, expected: dict[str, float]) -> None:
    """A11. With two terms, the tie in D1 goes to the alphabetically first."""
    new = rm3(CAT_DOG, TERMS, TF, SCORES, fb_terms, 0.5)
    assert new == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(
    ("fb_terms", "expected"),
    [
        (3, {"cat": 1.089568, "dog": 0.916590, "mouse": 0.610197}),
        (2, {"cat": 1.105421, "dog": 0.707107, "mouse": 0.635489}),
    ],
)
def test_rocchio_terms_of_the_worked_example(fb_terms: int, expected: dict[str, float]) -> None:
    """A11."""
    new = rocchio_terms(CAT_DOG, TERMS, TF, TF[:0], fb_terms, fb_terms, 1.0, 0.75, 0.0)
    assert new == pytest.approx(expected, abs=5e-7)


@given(fb_lambda=st.floats(0, 1), fb_terms=st.integers(1, 5))
def test_rm3_weights_sum_to_one(fb_lambda: float, fb_terms: int) -> None:
    new = rm3(CAT_DOG, TERMS, TF, SCORES, fb_terms, fb_lambda)
    assert sum(new.values()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("fb_lambda", "expected"), [(1.0, {"cat": 0.5, "dog": 0.5}), (0.0, {"cat", "mouse", "fish"})]
)
def test_rm3_lambda_is_the_weight_of_the_query(fb_lambda: float, expected: Any) -> None:
    """A9."""
    new = rm3(CAT_DOG, TERMS, TF, SCORES, 3, fb_lambda)
    assert type(expected)(new) == expected


def test_rocchio_terms_takes_the_negative_side_off() -> None:
    new = rocchio_terms({"cat": 1.0}, TERMS, TF[:1], TF[1:], 4, 4, 1.0, 1.0, 1.0)
    # cat 1 + 2/sqrt 6, fish 1/sqrt 6, mouse 1/sqrt 6 - 2/sqrt 5 and dog -1/sqrt 5 fall away
    assert new == pytest.approx({"cat": 1.816497, "fish": 0.408248}, abs=5e-7)


def test_rm3_without_usable_terms_keeps_the_query() -> None:
    new = rm3(CAT_DOG, TERMS[:0], TF[:, :0], SCORES, 3, 0.5)
    assert new == {"cat": 0.25, "dog": 0.25}


@pytest.mark.parametrize(
    ("term", "df", "admitted"),
    [("cat", 10, True), ("cat", 11, False), ("a", 1, False), ("ab", 1, True), ("x" * 21, 1, False)],
)
def test_anserini_admits_terms_by_length_and_frequency(term: str, df: int, admitted: bool) -> None:
    usable = anserini_terms(objects([term]), np.array([df]), 100, alphanumeric=True)
    assert usable.tolist() == [admitted]


@pytest.mark.parametrize(("alphanumeric", "admitted"), [(True, False), (False, True)])
def test_only_rm3_asks_for_letters_and_digits(alphanumeric: bool, admitted: bool) -> None:
    usable = anserini_terms(objects(["café"]), np.array([1]), 100, alphanumeric)
    assert usable.tolist() == [admitted]


@pytest.mark.parametrize("fb_lambda", [-0.1, 1.1])
def test_rm3_refuses_a_weight_outside_zero_and_one(fb_lambda: float) -> None:
    with pytest.raises(SpecError, match=r"RM3\.fb_lambda is .* between 0 and 1"):
        RM3("i", fb_lambda=fb_lambda)


@pytest.fixture(scope="module")
def worked_index(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The two documents of the worked example among 98 others, so that no term is too frequent."""
    path = tmp_path_factory.mktemp("worked") / "index"
    docs = [("D1", "cat cat mouse fish"), ("D2", "dog mouse mouse")]
    build_lucene(path, docs + [(f"other{i}", "filler") for i in range(98)])
    return str(path)


WORKED = results(("q", "cat dog", "D1", 3.0), ("q", "cat dog", "D2", 1.0))


@pytest.mark.java
@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (RM3("", fb_terms=3), {"cat": 0.454545, "dog": 0.25, "mous": 0.193182, "fish": 0.102273}),
        (RM3("", fb_terms=2), {"cat": 0.583333, "dog": 0.25, "fish": 0.166667}),
        (RocchioTerms("", fb_terms=3), {"cat": 1.089568, "dog": 0.916590, "mous": 0.610197}),
        (RocchioTerms("", fb_terms=2), {"cat": 1.105421, "dog": 0.707107, "mous": 0.635489}),
    ],
    ids=repr,
)
def test_term_stage_gives_the_worked_example_on_an_index(
    stage: Any, expected: dict[str, float], worked_index: str
) -> None:
    """A11; Lucene's stemmer writes mouse as mous."""
    out = replace(stage, index=worked_index)(WORKED)
    assert out["query_toks"].iat[0] == pytest.approx(expected, abs=5e-7)


@pytest.mark.java
@pytest.mark.parametrize("n", [1, 2])
def test_term_feedback_reads_exactly_fb_docs(n: int, worked_index: str) -> None:
    deep = RM3(worked_index, fb_docs=n)(WORKED)
    assert plain(deep) == plain(RM3(worked_index)(WORKED.head(n)))


@pytest.mark.java
def test_query_without_documents_gets_its_analysed_terms(worked_index: str) -> None:
    """Q4."""
    out = RM3(worked_index).transform(WORKED.head(0), queries(("q", "Cats and dogs")))
    assert out["query_toks"].tolist() == [{"cat": 1.0, "dog": 1.0}]


@pytest.mark.java
def test_second_feedback_starts_from_the_terms_of_the_first(worked_index: str) -> None:
    once = RM3(worked_index)(WORKED)
    again = RM3(worked_index, fb_lambda=1.0).transform(WORKED, once)
    assert again["query_toks"].iat[0] == pytest.approx(once["query_toks"].iat[0], abs=1e-6)


@pytest.mark.java
def test_expanded_query_is_what_the_next_stage_searches(worked_index: str) -> None:
    """Q10: the output frame is the new query."""
    expanded = (RM3(worked_index) >> BM25(worked_index))(WORKED)
    assert expanded["docno"].tolist() == ["D1", "D2"]
    assert expanded["query"].tolist() == ["cat dog"] * 2


@pytest.mark.java
def test_document_that_is_not_in_the_index_is_named(worked_index: str) -> None:
    """Q7."""
    frame = results(("q", "cat dog", "nobody", 1.0))
    with pytest.raises(PrfError, match="'nobody'"):
        RM3(worked_index)(frame)


@pytest.mark.java
def test_plain_text_is_never_a_query_language(material: Material) -> None:
    """Q1: operators retrieve as the bag of their words."""
    stage = BM25(material.lucene, k=5, threads=1)
    pairs = [
        ("dogs AND -cats", "dogs cats"),
        ("title: fish", "title fish"),
        ("fish^2 ~oil", "fish 2 oil"),
    ]
    for written, words in pairs:
        left, right = (stage(queries(("1", text))) for text in (written, words))
        assert plain(left[["docno", "score"]]) == plain(right[["docno", "score"]])


@pytest.mark.java
@pytest.mark.filterwarnings("ignore:.* retrieve nothing:prf.PrfWarning")
@pytest.mark.filterwarnings("ignore:.* match no document:prf.PrfWarning")
def test_nasty_topics_run_through_sparse_feedback(material: Material) -> None:
    """Q2, Q3, Q4."""
    chain = BM25(material.lucene, k=3) >> RM3(material.lucene, fb_docs=2)
    assert chain(material.topics)["qid"].tolist() == material.topics["qid"].tolist()


@pytest.mark.java
def test_query_without_terms_is_named_once_and_has_no_rows(material: Material) -> None:
    """Q4."""
    topics = queries(("a", ""), ("b", "?!"), ("c", "fish"))
    with pytest.warns(UserWarning, match=r"no term left after analysis .*: 2 \(a, b\)"):
        out = BM25(material.lucene)(topics)
    assert set(out["qid"]) == {"c"}


# The scaffold around every method


@pytest.fixture
def own() -> Iterator[SimpleNamespace]:
    """Methods as a user would write them, known only during the test."""

    @dataclass(frozen=True, repr=False)
    class Returns(VectorFeedback):
        fb_docs: int = 2
        what: str = "nan"

        def reformulate(self, query: Query, docs: Docs) -> Any:
            table = {"nan": [np.nan] * 3, "short": [1.0], "words": "abc", "none": None}
            return table[self.what]

    @dataclass(frozen=True, repr=False)
    class Fails(VectorFeedback):
        fb_docs: int = 2

        def reformulate(self, query: Query, docs: Docs) -> Any:
            raise ZeroDivisionError("by hand")

    @dataclass(frozen=True, repr=False)
    class Sees(VectorFeedback):
        fb_docs: int = 2

        def reformulate(self, query: Query, docs: Docs) -> Any:
            seen.append((query, docs))
            return query.vec

    @dataclass(frozen=True, repr=False)
    class AddsWords(TextFeedback):
        fb_docs: int = 2

        def reformulate(self, query: Query, docs: Docs) -> str:
            return " ".join([query.text, *docs.texts])

    seen: list[tuple[Query, Docs]] = []
    yield SimpleNamespace(Returns=Returns, Fails=Fails, Sees=Sees, AddsWords=AddsWords, seen=seen)
    for cls in (Returns, Fails, Sees, AddsWords):
        del REGISTRY[cls.__name__]


@pytest.mark.parametrize("what", ["nan", "short", "words", "none"])
def test_bad_new_vector_is_refused_with_stage_and_qid(own: Any, what: str) -> None:
    """V12, A2."""
    with pytest.raises(FrameError, match=r"Returns\(.*\), qid 'q': the new vector"):
        own.Returns(what=what)(found())


def test_failing_method_names_stage_and_query_and_keeps_the_cause(own: Any) -> None:
    """A2."""
    with pytest.raises(PrfError, match=r"Fails\(\), qid 'q': ZeroDivisionError: by hand") as caught:
        own.Fails()(found())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_method_sees_the_first_documents_best_first(own: Any) -> None:
    own.Sees()(found())
    query, docs = own.seen[0]
    assert (query.qid, query.text, query.vec.tolist()) == ("q", "text", QUERY.tolist())
    assert (list(docs.docnos), docs.scores.tolist()) == (["v1", "v2"], [9.0, 8.0])
    assert docs.vecs.tolist() == DOCS[:2].tolist()


def test_method_sees_single_precision_arrays_whatever_the_frame_holds(own: Any) -> None:
    listed = found().assign(query_vec=lambda frame: [[1.0, 0.0, 2.0]] * len(frame))
    own.Sees()(listed)
    assert own.seen[0][0].vec.dtype == np.float32


def test_method_is_not_called_without_documents(own: Any) -> None:
    own.Fails(fb_docs=0)(found())
    own.Fails().transform(found().head(0), found().head(1)[["qid", "query", "query_vec"]])


def test_vectors_of_two_encoders_are_refused(own: Any) -> None:
    """V8."""
    frame = found().assign(doc_vec=lambda f: [np.ones(2)] * len(f))
    with pytest.raises(FrameError, match="query vector has 3 numbers, the document vectors 2"):
        own.Sees()(frame)


@pytest.mark.parametrize("bad", [None, np.ones(2), np.full(3, np.inf)])
def test_bad_document_vector_names_stage_column_qid_and_docno(bad: Any) -> None:
    frame = found().assign(doc_vec=lambda f: objects([DOCS[2], bad, DOCS[0]]))
    with pytest.raises(
        FrameError, match=r"AveragePrf\(\): column 'doc_vec' of qid 'q', docno 'v2', holds"
    ):
        AveragePrf()(frame)


def test_results_of_an_unknown_query_are_refused() -> None:
    others = queries(("other", "x")).assign(query_vec=[QUERY])
    with pytest.raises(FrameError, match="results hold qid 'q', which is not a query"):
        AveragePrf().transform(found(), others)


def test_text_feedback_pushes_the_old_text(own: Any) -> None:
    frame = results(("q", "cats", "d1", 1.0, "purr"), names="qid query docno score text")
    out = own.AddsWords()(frame)
    assert plain(out) == [{"qid": "q", "query": "cats purr", "query_0": "cats"}]
    assert original_query(out).tolist() == ["cats"]


def test_text_feedback_pushes_for_all_queries_alike(own: Any) -> None:
    frame = results(("q", "cats", "d1", 1.0, "purr"), names="qid query docno score text")
    out = own.AddsWords().transform(frame, queries(("p", "dogs"), ("q", "cats")))
    assert out[["query", "query_0"]].values.tolist() == [["dogs", "dogs"], ["cats purr", "cats"]]


def test_text_feedback_declares_the_columns_it_gives(own: Any) -> None:
    frame = results(("q", "cats", "d1", 1.0, "purr"), names="qid query docno score text")
    frame = frame.assign(query_vec=[QUERY], query_0="felines", mine=1)
    stage = own.AddsWords()
    assert stage.outputs(list(frame.columns)) == list(stage(frame).columns)


def test_missing_term_index_is_named(tmp_path: Path) -> None:
    """Q8, A13: found before the first query."""
    with pytest.raises(IndexStateError, match="nowhere"):
        RM3(tmp_path / "nowhere")(WORKED)


def table() -> Terms:
    """The two documents of methods' worked examples, with collection statistics of Bo1's."""
    names = np.array(["cat", "dog", "fish", "mouse"], dtype=object)
    tf = np.array([[2, 0, 1, 1], [0, 1, 0, 2]], dtype=np.float32)
    df, cf = np.full(4, 20), np.array([50, 40, 100, 20])
    return Terms(names, tf, df, cf, np.array([4, 3]), 1000, 100_000, {"cat": 20, "dog": 20})


TWO = Docs(np.array(["D1", "D2"], dtype=object), np.array([3.0, 1.0]), terms=table())
ASKED = Query("1", "cat dog", toks={"cat": 1.0, "dog": 1.0})


def test_terrier_rm3_worked_example() -> None:
    new = TerrierRM3("x", fb_terms=3).reformulate(ASKED, TWO)
    expected = {"cat": 0.483449, "dog": 0.3, "mouse": 0.124827, "fish": 0.091724}
    assert new == pytest.approx(expected, abs=1e-6)


def test_bo1_worked_example() -> None:
    new = Bo1("x").reformulate(ASKED, TWO)
    assert new == pytest.approx({"cat": 1.351952, "dog": 1.189073, "mouse": 0.677505}, abs=1e-6)


def test_kl_by_hand() -> None:
    """7 tokens: share x log2(share / F x T), divided by 3 log2(100000 / 7) / 7 of mouse."""
    new = KL("x").reformulate(ASKED, TWO)
    most = 3 / 7 * np.log2(100_000 / 7)
    hand = {
        "cat": 1 + 2 / 7 * np.log2(2 / 7 * 100_000 / 50) / most,
        "dog": 1 + 1 / 7 * np.log2(1 / 7 * 100_000 / 40) / most,
        "mouse": 3 / 7 * np.log2(3 / 7 * 100_000 / 20) / most,
    }
    assert new == pytest.approx(hand, abs=1e-9)


def test_bm25_prf_keeps_query_terms_and_scales_new_ones() -> None:
    """A term in both of two documents and in 20 of 1000 weighs 5.579730, a new one 0.2 of it."""
    new = BM25Prf("x").reformulate(ASKED, TWO)
    one = np.log((1 + 0.5) * (1000 - 20 - 2 + 1 + 0.5) / ((20 - 1 + 0.5) * (2 - 1 + 0.5)))
    assert new == pytest.approx({"cat": one, "dog": one, "mouse": 0.2 * 5.579730}, abs=1e-5)


def test_bm25_prf_keeps_a_query_term_that_no_feedback_document_has() -> None:
    own = replace(table(), query_df={"cat": 20, "bird": 9})
    query = Query("1", "cat bird", toks={"cat": 1.0, "bird": 1.0})
    new = BM25Prf("x").reformulate(query, replace(TWO, terms=own))
    none = np.log(0.5 * (1000 - 9 - 2 + 0.5) / ((9 + 0.5) * (2 + 0.5)))
    assert new["bird"] == pytest.approx(none, abs=1e-5)


@pytest.mark.java
def test_query_that_is_no_text_is_named(material: Material) -> None:
    with pytest.raises(FrameError, match=r"query of qid '2' is None, not text"):
        BM25(material.lucene)(queries(("1", "cat"), ("2", None)))

"""Evaluation: which queries count, in which order documents do, and what the tests say."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import ir_measures
import numpy as np
import pandas as pd
import pytest
import pytrec_eval
import scipy.stats

from prf.comparison import _bonferroni, _holm, compare
from prf.errors import EvaluationError, FileFormatError, FrameError, PrfWarning, SpecError
from prf.evaluation import PRESETS, Evaluation, evaluate, parse_measures
from prf.tables import render
from prf.trec import write_run

SHARED = Path(os.environ.get("PRF_SHARED", Path(__file__).parents[1].parent / "shared"))
POOL = SHARED / "data" / "msmarco-v1-dl-pool"
needs_shared = pytest.mark.skipif(
    not POOL.is_dir(), reason=f"no shared data in {SHARED}; set PRF_SHARED"
)
SYSTEMS = ["bm25", "bm25-rm3", "splade-pp-ed", "tas-b", "openai-ada2", "repllama"]

QRELS = pd.DataFrame(
    [
        ("1", "a", 2),
        ("1", "b", 0),
        ("2", "c", 1),
        ("2", "d", 3),
        ("7", "e", 1),
    ],
    columns=["qid", "docno", "label"],
)
RUN = pd.DataFrame(
    [("1", "b", 2.0), ("1", "a", 1.0), ("2", "d", 5.0), ("2", "x", 4.0), ("9", "a", 1.0)],
    columns=["qid", "docno", "score"],
)


def system(name: str, values: list[float], measure: str = "nDCG@10") -> Evaluation:
    qids = [str(i) for i in range(len(values))]
    frame = pd.DataFrame({measure: values}, index=pd.Index(qids, name="qid", dtype=object))
    return Evaluation(name, frame)


def random_judgments(rng: np.random.Generator, queries: int, docs: int) -> pd.DataFrame:
    pairs = [(str(q), f"d{d}") for q in range(queries) for d in range(docs)]
    frame = pd.DataFrame(pairs, columns=["qid", "docno"])
    return frame.assign(label=rng.integers(0, 4, size=len(frame)))


def random_run(
    rng: np.random.Generator, queries: int, docs: int, scores: np.ndarray
) -> pd.DataFrame:
    """A shuffled run over twice as many documents as are judged, with few different scores."""
    rows = pd.DataFrame(
        [(str(q), f"d{d}") for q in range(queries) for d in range(2 * docs)],
        columns=["qid", "docno"],
    )
    rows = rows.assign(score=rng.choice(scores, size=len(rows)))
    return rows.sample(frac=0.7, random_state=int(rng.integers(1 << 30)))


def write_qrels(frame: pd.DataFrame, path: Path) -> Path:
    lines = [f"{row.qid} 0 {row.docno} {row.label}\n" for row in frame.itertuples()]
    path.write_text("".join(lines), encoding="utf-8")
    return path


TREC = {
    "nDCG@10": (1, "ndcg_cut.10", "ndcg_cut_10"),
    "AP(rel=2)": (2, "map", "map"),
    "RR(rel=2)": (2, "recip_rank", "recip_rank"),
    "R(rel=2)@5": (2, "recall.5", "recall_5"),
    "P(rel=3)@5": (3, "P.5", "P_5"),
}
"""Relevance level, what pytrec_eval calls the measure, and what it calls the value."""


def by_pytrec_eval(run: dict, qrels: pd.DataFrame) -> pd.DataFrame:
    """Values straight from pytrec_eval, 0 for judged queries that it leaves out."""
    judged: dict[str, dict[str, int]] = {}
    for row in qrels.itertuples():
        judged.setdefault(row.qid, {})[row.docno] = int(row.label)
    columns = {}
    for name, (level, measure, key) in TREC.items():
        evaluator = pytrec_eval.RelevanceEvaluator(judged, {measure}, relevance_level=level)
        found = evaluator.evaluate(run)
        columns[name] = [found.get(qid, {}).get(key, 0.0) for qid in judged]
    return pd.DataFrame(columns, index=pd.Index(list(judged), name="qid", dtype=object))


# Measures by name


def test_names_and_presets_in_order_without_repeats():
    names = [str(m) for m in parse_measures(["RR@10", "msmarco-dev", "MRR@10", "nDCG@10"])]
    assert names == ["RR@10", "R@100", "R@1000", "nDCG@10"]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_measures_under_their_own_names(preset):
    """E13: the names of the columns are the names that ir-measures gives."""
    assert [str(m) for m in parse_measures([preset])] == list(PRESETS[preset])
    assert parse_measures([preset]) == [ir_measures.parse_measure(m) for m in PRESETS[preset]]


def test_two_spellings_are_one_measure():
    assert len(parse_measures(["AP(rel=2,judged_only=True)", "AP(judged_only=True, rel=2)"])) == 1


def test_one_name_may_stand_alone():
    assert parse_measures("nDCG@10") == [ir_measures.nDCG @ 10]


def test_measure_objects_are_measures():
    assert parse_measures([ir_measures.AP(rel=2) @ 1000]) == [ir_measures.AP(rel=2) @ 1000]


def test_all_bad_names_come_in_one_error():
    with pytest.raises(SpecError) as caught:
        parse_measures(["nDGC@10", "AP", "P", "AP(rle=2)", "ndcg_cut_20", "dl91", "x(", "RR@0"])
    message = str(caught.value)
    assert "'nDGC@10' is not a measure; did you mean 'nDCG@10'?" in message
    assert "'P' needs cutoff: add @10" in message
    assert "'AP(rle=2)' has no parameter 'rle'; did you mean 'rel'?" in message
    assert "did you mean 'nDCG@20'?" in message
    assert "did you mean 'dl19'?" in message or "did you mean 'dl20'?" in message
    assert "'x(' is not a measure" in message
    assert "cutoff is 0; it must be int of at least 1" in message
    assert "msmarco-dev" in message


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ndcg@10", "did you mean 'nDCG@10'?"),
        ("map", "did you mean 'AP'?"),
        ("recip_rank", "did you mean 'RR'?"),
        ("recall.1000", "did you mean 'R@1000'?"),
        ("nDCG@ten", "is not a measure"),
        ("nDCG@2.5", "cutoff is 2.5"),
        ("nDCG@True", "cutoff is True"),
        ("AP(rel='2')", "rel is '2'"),
        ("AP(2)", "is not a measure"),
        ("nDCG(dcg='cubic')@10", "dcg is 'cubic'"),
        ("alpha_nDCG@10", "needs judgments of subtopics"),
        ("RBP", "no installed provider"),
        ("", "is not a measure"),
        (None, "is not a name"),
        (7, "is not a name"),
    ],
)
def test_a_bad_name_says_why(name, part):
    with pytest.raises(SpecError) as caught:
        parse_measures([name])
    assert part in str(caught.value)


def test_no_names_is_an_error():
    with pytest.raises(SpecError, match="no measures given"):
        parse_measures([])


# Which queries count


def test_judged_query_without_results_counts_zero_and_is_named():
    """E1: the average goes over the judged queries, as trec_eval -c does."""
    found = evaluate(RUN, QRELS, ["RR(rel=1)"])
    assert found.per_query["RR"].to_dict() == {"1": 0.5, "2": 1.0, "7": 0.0}
    assert found.mean["RR"] == 0.5
    assert found.missing == ("7",)
    assert (found.n_judged, found.unjudged, found.dropped) == (3, 1, 0)
    assert render(found).splitlines()[-3:-1] == [
        "3 judged, 1 without results: 7",
        "1 unjudged query in the run ignored",
    ]


def test_judged_query_without_relevant_documents_counts_zero():
    """E1: as trec_eval -c does, which averages over every query of the judgments."""
    qrels = pd.concat([QRELS, pd.DataFrame({"qid": ["8"], "docno": ["a"], "label": [0]})])
    run = pd.concat([RUN, pd.DataFrame({"qid": ["8"], "docno": ["a"], "score": [1.0]})])
    names = ["nDCG@10", "AP(rel=2)", "RR(rel=2)@10", "RR(rel=3)", "Rprec(rel=1)", "Bpref(rel=1)"]
    found = evaluate(run, qrels, [*names, "infAP(rel=1)", "SetF(rel=1)", "ERR@10", "Judged@10"])
    assert found.n_judged == 4
    assert found.per_query.loc["8"].tolist() == [0.0] * 9 + [1.0]
    assert "8" not in found.missing
    assert np.isfinite(found.per_query.to_numpy()).all()


def test_values_follow_the_order_of_the_judgments():
    qrels = QRELS.iloc[::-1]
    found = evaluate(RUN, qrels, ["nDCG@10"])
    assert found.per_query.index.tolist() == ["7", "2", "1"]
    assert found.per_query.index.name == "qid"
    assert found.per_query.dtypes.tolist() == [np.float64]
    assert (found.mean == evaluate(RUN, QRELS, ["nDCG@10"]).mean).all()


def test_topics_limit_the_judgments_and_the_rest_is_counted():
    """E2: with topics given, qrels are limited to them; without, all judged queries count."""
    topics = pd.DataFrame({"qid": ["1", "2", "9"], "query": ["x", "y", "z"]})
    found = evaluate(RUN, QRELS, ["RR(rel=1)"], topics=topics)
    assert found.per_query.index.tolist() == ["1", "2"]
    assert (found.dropped, found.missing, found.unjudged) == (1, (), 1)
    assert "1 judged query not among the topics dropped" in render(found)


def test_topics_that_nobody_judged_are_an_error():
    """E2, E5: naming both sides."""
    with pytest.raises(EvaluationError, match=r"none of the 1 topics \('q1'\) is judged \('1'"):
        evaluate(RUN, QRELS, ["nDCG@10"], topics=pd.DataFrame({"qid": ["q1"]}))


def test_empty_run_is_zero_with_one_warning():
    """E3: every measure 0 for every judged query."""
    with pytest.warns(PrfWarning, match=r"the run is empty.*3 judged") as caught:
        found = evaluate(RUN.iloc[:0], QRELS, ["nDCG@10", "RR(rel=2)", "RR(rel=2)@10"])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert found.per_query.shape == (3, 3)
    assert (found.per_query == 0).all(axis=None)
    assert found.missing == ("1", "2", "7")


def test_systems_compare_when_one_lacks_a_query():
    """E3: a missing query is a value of 0, so the query sets are the same."""
    first = evaluate(RUN, QRELS, ["nDCG@10"], name="all")
    second = evaluate(RUN[RUN["qid"] != "1"], QRELS, ["nDCG@10"], name="some")
    row = compare([first, second]).table.iloc[0]
    assert (row["wins"], row["ties"], row["losses"]) == (0, 2, 1)


def test_no_common_query_is_an_error_with_examples():
    """E5: ids with a suffix match nothing; three examples of each side."""
    run = RUN.assign(qid=RUN["qid"] + "-a")
    with pytest.raises(EvaluationError) as caught:
        evaluate(run, QRELS, ["nDCG@10"])
    assert "none of the 3 queries of the run ('1-a', '2-a', '9-a')" in str(caught.value)
    assert "3 judged queries ('1', '2', '7')" in str(caught.value)


def test_no_common_document_is_an_error_with_examples():
    """E5: also of docnos, over all queries."""
    run = RUN.assign(docno="D" + RUN["docno"])
    with pytest.raises(EvaluationError) as caught:
        evaluate(run, QRELS, ["nDCG@10"])
    assert "no document of the run ('Db', 'Da', 'Dd')" in str(caught.value)
    assert "('a', 'b', 'c')" in str(caught.value)


def test_empty_judgments_are_an_error():
    with pytest.raises(EvaluationError, match="judgments are empty"):
        evaluate(RUN, QRELS.iloc[:0], ["nDCG@10"])


def test_evaluating_twice_gives_the_same_numbers():
    """E6: nothing is used up, also when the measures come from a generator."""
    names = ["nDCG@10", "RR(rel=2)@10", "AP(rel=2)"]
    first = evaluate(RUN, QRELS, (name for name in names))
    again = evaluate(RUN, QRELS, names)
    pd.testing.assert_frame_equal(first.per_query, again.per_query, check_exact=True)
    assert list(first.per_query.columns) == names


def test_an_iterator_is_no_run():
    """E6: only what can be read twice is accepted."""
    with pytest.raises(
        SpecError, match=r"run is <list_iterator.*give a frame with the columns qid"
    ):
        evaluate(iter([]), QRELS, ["nDCG@10"])
    with pytest.raises(SpecError, match=r"qrels is 7 \(int\)"):
        evaluate(RUN, 7, ["nDCG@10"])


def test_inputs_are_left_as_they_were():
    run, qrels = RUN.sample(frac=1, random_state=1), QRELS.copy()
    before = run.copy()
    evaluate(run, qrels, ["nDCG@10"])
    pd.testing.assert_frame_equal(run, before)
    pd.testing.assert_frame_equal(qrels, QRELS)


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_read(tmp_path, kind):
    """E7: `pathlib.Path` is a file like any other, never an empty run."""
    write_run(RUN, tmp_path / "mine.trec.gz", "mine")
    qrels = write_qrels(QRELS, tmp_path / "qrels.txt")
    found = evaluate(kind(tmp_path / "mine.trec.gz"), kind(qrels), ["nDCG@10"])
    pd.testing.assert_frame_equal(
        found.per_query, evaluate(RUN, QRELS, ["nDCG@10"]).per_query, check_exact=True
    )
    assert found.name == "mine"


@pytest.mark.parametrize(
    ("file", "name"),
    [("a.b.trec.gz", "a.b"), ("a.run", "a"), ("a.txt", "a"), ("bm25.k1_0.9", "bm25.k1_0.9")],
)
def test_the_system_is_named_after_the_file(tmp_path, file, name):
    write_run(RUN, tmp_path / file)
    assert evaluate(tmp_path / file, QRELS, ["nDCG@10"]).name == name
    assert evaluate(tmp_path / file, QRELS, ["nDCG@10"], name="x").name == "x"


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    """E7: for the run and for the judgments."""
    file = tmp_path / "empty.trec"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(FileFormatError, match="empty"):
        evaluate(file, QRELS, ["nDCG@10"])
    with pytest.raises(FileFormatError, match="empty"):
        evaluate(RUN, file, ["nDCG@10"])


def test_a_missing_file_is_an_error(tmp_path):
    """R8: one line that names the file; exit code 4."""
    with pytest.raises(FileFormatError, match=r"missing.run' does not exist") as caught:
        evaluate(tmp_path / "missing.run", QRELS, ["nDCG@10"])
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


# Types


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "Int64", object])
def test_any_real_score_works(dtype):
    """E8: pytrec_eval takes Python floats only; that is not the user's concern."""
    expected = evaluate(RUN, QRELS, ["nDCG@10", "RR(rel=1)@10"]).per_query
    found = evaluate(
        RUN.assign(score=RUN["score"].astype(dtype)), QRELS, ["nDCG@10", "RR(rel=1)@10"]
    ).per_query
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float32", "Int64", object])
def test_whole_grades_work_in_any_type(dtype):
    """E8: 1.0 is accepted."""
    qrels = QRELS.assign(label=QRELS["label"].astype(dtype))
    expected = evaluate(RUN, QRELS, ["nDCG@10"]).per_query
    pd.testing.assert_frame_equal(evaluate(RUN, qrels, ["nDCG@10"]).per_query, expected)


def test_numeric_identifiers_are_text():
    qrels = QRELS.assign(qid=QRELS["qid"].astype(int))
    run = RUN.assign(qid=RUN["qid"].astype(int))
    found = evaluate(run, qrels, ["nDCG@10"])
    pd.testing.assert_frame_equal(found.per_query, evaluate(RUN, QRELS, ["nDCG@10"]).per_query)


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_a_grade_that_is_not_whole_is_refused(value):
    """E10: never truncated to 0; says which document and query."""
    qrels = QRELS.assign(label=QRELS["label"].astype(float))
    qrels.loc[3, "label"] = value
    with pytest.raises(FrameError, match=r"label of docno 'd' for qid '2'.*whole numbers"):
        evaluate(RUN, qrels, ["nDCG@10"])


def test_a_grade_that_is_not_whole_is_refused_in_a_file(tmp_path):
    """E8, E10: with the line; 1.0 is accepted there, too."""
    file = tmp_path / "qrels.txt"
    file.write_text("1 0 a 1.0\n1 0 b 0.5\n", encoding="utf-8")
    with pytest.raises(FileFormatError, match=r"qrels.txt:2: grade '0.5'"):
        evaluate(RUN, file, ["nDCG@10"])


def test_words_as_grades_are_refused():
    with pytest.raises(FrameError, match="column 'label' of the qrels is not numeric"):
        evaluate(RUN, QRELS.assign(label="good"), ["nDCG@10"])


def test_missing_columns_name_the_likely_rename():
    """E15: with those found."""
    with pytest.raises(FrameError, match=r"needs docno, found only qid, doc_id, score.*'doc_id'"):
        evaluate(RUN.rename(columns={"docno": "doc_id"}), QRELS, ["nDCG@10"])
    with pytest.raises(FrameError, match="qrels needs label"):
        evaluate(RUN, QRELS.rename(columns={"label": "grade"}), ["nDCG@10"])
    with pytest.raises(FrameError, match="topics needs qid"):
        evaluate(RUN, QRELS, ["nDCG@10"], topics=pd.DataFrame({"id": ["1"]}))


def test_repeated_keys_and_bad_scores_are_refused():
    with pytest.raises(FrameError, match="stands twice"):
        evaluate(pd.concat([RUN, RUN.iloc[:1]]), QRELS, ["nDCG@10"])
    with pytest.raises(FrameError, match="finite"):
        evaluate(RUN.assign(score=[1, 2, np.nan, 3, 4]), QRELS, ["nDCG@10"])
    with pytest.raises(FrameError, match="stands twice"):
        evaluate(RUN, pd.concat([QRELS, QRELS.iloc[:1]]), ["nDCG@10"])


# Order of documents


def test_every_measure_sees_one_order_on_ties():
    """E9: RR comes from pytrec_eval and RR@20 from another provider; they must agree."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        qrels = random_judgments(rng, queries=3, docs=10)
        run = random_run(rng, 3, 10, np.array([1.0, 1.0 + 1e-12, 2.0]))
        found = evaluate(run, qrels, ["RR(rel=3)", "RR(rel=3)@20", "P(rel=3)@1", "RR(rel=3)@1"])
        assert (found.per_query["RR(rel=3)"] == found.per_query["RR(rel=3)@20"]).all()
        assert (found.per_query["P(rel=3)@1"] == found.per_query["RR(rel=3)@1"]).all()


def test_ties_of_a_frame_are_ordered_by_docno():
    """E9: ascending, whatever the order of the rows."""
    run = pd.DataFrame({"qid": "1", "docno": ["b", "a", "x"], "score": 1.0})
    assert evaluate(run, QRELS, ["RR(rel=1)"]).per_query.loc["1", "RR"] == 1.0
    assert evaluate(run.iloc[::-1], QRELS, ["RR(rel=1)"]).per_query.loc["1", "RR"] == 1.0


def test_ties_of_a_file_are_ordered_as_trec_eval_does(tmp_path):
    """E9, R2: descending, and scores equal in single precision are ties; as pytrec_eval."""
    file = tmp_path / "tied.run"
    lines = ["1 Q0 a 1 1.000000001 t", "1 Q0 b 2 1.0 t", "1 Q0 x 3 1.0 t"]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = evaluate(file, QRELS, ["RR(rel=1)", "RR(rel=1)@10"])
    assert found.per_query.loc["1"].tolist() == [1 / 3, 1 / 3]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "scores",
    [
        np.array([0.0, 1.0, 2.0]),
        np.array([700.0, 700.000001, 700.000002, 700.1, 699.999999]),
        np.array([-1e-30, 0.0, -0.0, 1e-45]),
    ],
    ids=["ties", "ance", "tiny"],
)
def test_frame_and_written_file_and_pytrec_eval_agree(tmp_path, scores, seed):
    """R1, R2: a run written by this package is measured in our order by anybody (204 runs)."""
    rng = np.random.default_rng(seed)
    for i in range(17):
        qrels = random_judgments(rng, queries=4, docs=12)
        run = random_run(rng, 4, 12, scores)
        run = run[run["qid"] != str(i % 5)]
        file = tmp_path / f"{i}.run"
        write_run(run, file)
        with file.open(encoding="utf-8") as stream:
            expected = by_pytrec_eval(pytrec_eval.parse_run(stream), qrels)
        for source in (run, file):
            found = evaluate(source, qrels, list(TREC)).per_query
            pd.testing.assert_frame_equal(found, expected, check_exact=True)


@pytest.mark.parametrize("scores", [[0.0, 1.0], [700.0, 700.000001, 700.1]], ids=["ties", "ance"])
def test_a_foreign_file_is_measured_as_pytrec_eval_does(tmp_path, scores):
    """R1, R2: ties and single precision included."""
    rng = np.random.default_rng(3)
    file = tmp_path / "foreign.run"
    for _ in range(20):
        qrels = random_judgments(rng, queries=4, docs=12)
        run = random_run(rng, 4, 12, np.array(scores))
        lines = [f"{r.qid} Q0 {r.docno} 1 {r.score!r} t\n" for r in run.itertuples()]
        file.write_text("".join(lines), encoding="utf-8")
        with file.open(encoding="utf-8") as stream:
            expected = by_pytrec_eval(pytrec_eval.parse_run(stream), qrels)
        found = evaluate(file, qrels, list(TREC)).per_query
        pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_huge_and_tiny_scores_keep_their_order():
    """R2: ranks go to the measures, so single precision loses nothing."""
    run = pd.DataFrame({"qid": "1", "docno": ["b", "a"], "score": [1e300, 1e300 * (1 + 1e-15)]})
    assert evaluate(run, QRELS, ["RR(rel=1)"]).per_query.loc["1", "RR"] == 1.0


# Thresholds


def test_binary_measure_on_graded_judgments_warns_once():
    """E11: and suggests the explicit form."""
    with pytest.warns(PrfWarning, match="grades up to 3, and AP@1000, R@5 count") as caught:
        evaluate(RUN, QRELS, ["nDCG@10", "AP@1000", "R@5", "P(rel=2)@5"])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "AP(rel=2)@1000, R(rel=2)@5" in str(caught[0].message)


def test_explicit_threshold_and_binary_judgments_do_not_warn():
    """E11: warnings are errors in these tests."""
    evaluate(RUN, QRELS, ["AP(rel=1)", "AP", "RR(rel=2)"])
    evaluate(RUN, QRELS.assign(label=QRELS["label"].clip(upper=1)), ["AP", "R@5"])


def test_threshold_stands_in_every_table():
    """E11: in the heading, or in a note where the name has none."""
    found = evaluate(RUN, QRELS, ["AP(rel=2)@1000", "RR(rel=1)", "nDCG@10"])
    assert list(found.per_query.columns) == ["AP(rel=2)@1000", "RR", "nDCG@10"]
    assert "AP(rel=2)@1000" in render(found).splitlines()[0]
    assert render(found).splitlines()[-1] == "RR: grade 1 and above counts as relevant"


def test_ndcg_uses_all_grades_beside_any_threshold():
    """E12: 1 / log2(2) for d (grade 3) and nothing for c (grade 1), of 3 + 1 / log2(3)."""
    alone = evaluate(RUN, QRELS, ["nDCG@10"]).per_query["nDCG@10"]
    beside = evaluate(RUN, QRELS, ["AP(rel=3)", "nDCG@10", "R(rel=2)@5"]).per_query["nDCG@10"]
    assert alone["2"] == pytest.approx(3 / (3 + 1 / math.log2(3)), abs=1e-15)
    assert beside.tolist() == alone.tolist()


def test_a_measure_has_the_same_values_alone_and_among_others():
    """ir-measures 0.4.3 mixes up nDCG with and without gains, in a way that changes by process."""
    names = ["nDCG@10", "nDCG(gains={3:0})@10", "nDCG", "AP(rel=2)", "NumRet", "SetF(rel=2)"]
    names += ["SetF(rel=2,beta=0.5)", "nDCG(judged_only=True)@10"]
    together = evaluate(RUN, QRELS, names).per_query
    alone = [evaluate(RUN, QRELS, [name]).per_query for name in names]
    pd.testing.assert_frame_equal(together, pd.concat(alone, axis=1), check_exact=True)
    assert together.loc["2", "nDCG(gains={3:0})@10"] == 0.0


def test_a_query_has_the_same_values_alone_and_among_others():
    """E14: values are per query, and averaged once."""
    rng = np.random.default_rng(5)
    qrels = random_judgments(rng, 6, 10)
    run = random_run(rng, 6, 10, np.arange(5.0))
    names = ["nDCG@10", "AP(rel=2)", "RR(rel=2)@10", "ERR@20"]
    whole = evaluate(run, qrels, names)
    parts = [
        evaluate(run[run["qid"] == qid], qrels[qrels["qid"] == qid], names).per_query
        for qid in whole.per_query.index
    ]
    pd.testing.assert_frame_equal(
        pd.concat(parts), whole.per_query, check_exact=True, check_index_type=False
    )
    for name in names:
        assert whole.mean[name] == math.fsum(whole.per_query[name]) / 6


def test_a_provider_in_perl_gets_any_qid():
    """gdeval.pl refuses qids with letters, and cuts what stands before a dash."""
    names = ["ERR@20", "nDCG(dcg='exp-log2')@10"]
    odd = {"1": "a-1", "2": "b-1", "7": "PLAIN 7", "9": "9"}
    found = evaluate(
        RUN.assign(qid=RUN["qid"].map(odd)), QRELS.assign(qid=QRELS["qid"].map(odd)), names
    )
    expected = evaluate(RUN, QRELS, names)
    assert found.per_query.index.tolist() == ["a-1", "b-1", "PLAIN 7"]
    assert found.per_query.to_numpy().tolist() == expected.per_query.to_numpy().tolist()
    assert expected.per_query.loc["2", "ERR@20"] == pytest.approx(7 / 16, abs=1e-5)


def test_a_provider_that_fails_is_an_error_that_names_the_measure():
    """Accuracy divides by zero where nothing but relevant documents was returned."""
    run = pd.DataFrame({"qid": ["1"], "docno": ["a"], "score": [1.0]})
    with pytest.raises(EvaluationError, match=r"fails on Accuracy\(rel=2\)"):
        evaluate(run, QRELS, ["Accuracy(rel=2)"])


# Published figures


def published(variant: int) -> dict[str, list[float]]:
    """The README's nDCG@10, R(rel=2)@100 and AP(rel=2) of every run, for one kind of judgments."""
    text = (SHARED / "data" / "README.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "| dl" in line[:5]]
    rows = [row for row in rows if "." in row[0]]
    return {row[0]: [float(x) for x in row[1 + 3 * variant : 4 + 3 * variant]] for row in rows}


@needs_shared
@pytest.mark.parametrize("variant", ["full", "pool", "retrieved"])
@pytest.mark.parametrize("track", ["dl19", "dl20"])
def test_published_runs_give_their_published_figures(track, variant):
    expected = published(["full", "pool", "retrieved"].index(variant))
    qrels = POOL / f"qrels.{track}.{variant}.txt"
    for name in SYSTEMS:
        found = evaluate(
            POOL / "runs" / f"{track}.{name}.trec.gz",
            qrels,
            ["nDCG@10", "R(rel=2)@100", "AP(rel=2)"],
        )
        assert found.mean.round(4).tolist() == expected[f"{track}.{name}"]
        assert found.name == f"{track}.{name}"
        assert found.n_judged == {"dl19": 43, "dl20": 54}[track]


# Comparison

A = [0.10, 0.20, 0.35, 0.50, 0.55, 0.60, 0.90, 0.42]
B = [0.20, 0.15, 0.45, 0.70, 0.58, 0.61, 0.90, 0.51]
C = [0.11, 0.20, 0.30, 0.40, 0.56, 0.50, 0.80, 0.40]


@pytest.mark.parametrize("seed", range(5))
def test_t_test_equals_scipy(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.random(43), rng.random(43)
    row = compare([system("a", a.tolist()), system("b", b.tolist())]).table.iloc[0]
    assert row["p"] == pytest.approx(scipy.stats.ttest_rel(b, a).pvalue, rel=1e-10)
    assert row["p_corrected"] == row["p"]
    assert row["difference"] == pytest.approx(b.mean() - a.mean(), abs=1e-15)


@pytest.mark.parametrize("n", [8, 43, 80])
@pytest.mark.parametrize("digits", [1, 15], ids=["tied", "distinct"])
def test_wilcoxon_equals_scipy(n, digits):
    rng = np.random.default_rng(n)
    a, b = rng.integers(0, 10**digits, n) / 10**digits, rng.integers(0, 10**digits, n) / 10**digits
    table = compare([system("a", a.tolist()), system("b", b.tolist())], test="wilcoxon").table
    difference = np.round(b - a, 9)  # as 0.3 - 0.2 and 0.1 are not equal
    assert table["p"][0] == pytest.approx(scipy.stats.wilcoxon(difference).pvalue, rel=1e-10)


def test_randomisation_is_exact_for_few_queries():
    """Of 2^3 sign patterns of (1, 2, 3), two reach |sum| = 6."""
    table = compare([system("a", [0, 0, 0, 5]), system("b", [1, 2, 3, 5])], test="randomisation")
    assert table.table["p"][0] == 2 / 8


def test_randomisation_is_near_scipy_and_the_same_each_time():
    rng = np.random.default_rng(2)
    a = rng.random(43)
    b = a + rng.normal(0.03, 0.1, 43)
    first, second = system("a", a.tolist()), system("b", b.tolist())
    p = compare([first, second], test="randomisation").table["p"][0]
    assert p == compare([first, second], test="randomisation").table["p"][0]
    assert p != compare([first, second], test="randomisation", seed=1).table["p"][0]
    reference = scipy.stats.permutation_test(
        ((b - a),), np.mean, permutation_type="samples", n_resamples=50_000, rng=rng
    ).pvalue
    assert p == pytest.approx(reference, abs=0.02)  # 4 standard errors at p = 0.5


def test_a_pair_has_the_same_p_whatever_else_is_compared():
    rng = np.random.default_rng(2)
    systems = [system(name, rng.random(40).tolist()) for name in "abc"]
    whole = compare(systems, test="randomisation").table.set_index("system")["p"]
    alone = compare([systems[0], systems[2]], test="randomisation").table.set_index("system")["p"]
    assert whole["c"] == alone["c"]


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.9 times 4, 3, 2, 1, never falling."""
    assert _holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert _holm([0.6, 0.5]) == pytest.approx([1.0, 1.0])
    assert _holm([]) == []


def test_bonferroni_by_hand():
    assert _bonferroni([0.03, 0.01, 0.5]) == pytest.approx([0.09, 0.03, 1.0])


@pytest.mark.parametrize(
    ("correction", "factors"), [("holm", (2, 1)), ("bonferroni", (2, 2)), ("none", (1, 1))]
)
def test_correction_goes_over_the_systems_of_a_measure(correction, factors):
    table = compare([system("a", A), system("b", B), system("c", C)], correction=correction).table
    by_p = table.sort_values("p")
    expected = np.maximum.accumulate(by_p["p"].to_numpy() * factors).tolist()
    assert by_p["p_corrected"].tolist() == pytest.approx(expected)


def test_wins_ties_losses_and_robustness():
    second = [0.20, 0.15, 0.45, 0.70, 0.58, 0.61, 0.90 + 1e-12, 0.51]
    row = compare([system("a", A), system("b", second)]).table.iloc[0]
    assert (row["wins"], row["ties"], row["losses"]) == (6, 1, 1)
    assert row["robustness"] == 5 / 8


@pytest.mark.parametrize("test", ["t", "wilcoxon", "randomisation"])
def test_equal_systems_have_p_one(test):
    """Without a warning of numpy or scipy: warnings are errors here."""
    table = compare([system("a", A), system("b", A)], test=test).table
    assert table["p"].tolist() == [1.0]
    assert not table["significant"][0]
    assert table["ties"].tolist() == [8]


@pytest.mark.parametrize("test", ["t", "wilcoxon", "randomisation"])
@pytest.mark.parametrize("other", [[x + 0.1 for x in A], [*A[:-1], 0.5]], ids=["shift", "one"])
def test_degenerate_differences_give_a_p_without_warnings(test, other):
    p = compare([system("a", A), system("b", other)], test=test).table["p"][0]
    assert 0 <= p <= 1


def test_baseline_may_be_any_and_order_is_kept():
    found = compare([system("a", A), system("b", B), system("c", C)], "b")
    assert found.baseline == "b"
    assert found.table["system"].tolist() == ["a", "c"]
    assert [e.name for e in found.evaluations] == ["a", "b", "c"]
    assert found.table["baseline"].tolist() == [found.evaluations[1].mean["nDCG@10"]] * 2


def test_order_of_queries_does_not_matter():
    first, second = system("a", A), system("b", B)
    turned = Evaluation("b", second.per_query.iloc[::-1])
    pd.testing.assert_frame_equal(
        compare([first, second]).table, compare([first, turned]).table, check_exact=True
    )


def test_other_queries_or_measures_are_an_error_naming_some():
    short = Evaluation("b", system("b", B).per_query.iloc[:5])
    with pytest.raises(EvaluationError, match="different queries: only 'a' has '5', '6', '7'"):
        compare([system("a", A), short])
    with pytest.raises(EvaluationError, match=r"different measures.*'nDCG@10'.*'AP'"):
        compare([system("a", A), system("b", B, "AP")])


def test_what_cannot_be_compared_is_an_error():
    with pytest.raises(EvaluationError, match="two are needed"):
        compare([system("a", A)])
    with pytest.raises(EvaluationError, match="named 'a'"):
        compare([system("a", A), system("a", B)])
    with pytest.raises(EvaluationError, match="at least two judged"):
        compare([system("a", [1.0]), system("b", [0.5])])
    with pytest.raises(SpecError, match="named 'bm52'; did you mean 'bm25'"):
        compare([system("bm25", A), system("b", B)], "bm52")


@pytest.mark.parametrize(
    "options", [{"test": "u"}, {"correction": "bonferoni"}, {"alpha": 0.0}, {"alpha": 5}]
)
def test_unknown_options_are_an_error(options):
    with pytest.raises(SpecError):
        compare([system("a", A), system("b", B)], **options)


# Tables


def two() -> list[Evaluation]:
    measures = ["nDCG@10", "AP(rel=2)@1000"]
    better = RUN.assign(score=[1.0, 2.0, 5.0, 4.0, 1.0])
    return [
        evaluate(RUN, QRELS, measures, name="base"),
        evaluate(better, QRELS, measures, name="x|y_z"),
    ]


def test_text_table_of_one_evaluation():
    table = render(evaluate(RUN, QRELS, ["RR(rel=2)", "nDCG@10"], name="base"), digits=2)
    assert table == (
        "system  RR(rel=2)  nDCG@10\n"
        "base         0.50     0.49\n"
        "\n"
        "3 judged, 1 without results: 7\n"
        "1 unjudged query in the run ignored"
    )


def test_text_table_of_a_comparison():
    values = [x + 0.1 + i / 1000 for i, x in enumerate(A)]
    table = render(compare([system("base", A), system("new", values), system("same", A)]))
    assert table == (
        "system  nDCG@10  W/T/L\n"
        "base    0.4525\n"
        "new     0.5560*  8/0/0\n"
        "same    0.4525   0/8/0\n"
        "\n"
        "8 judged\n"
        "* p < 0.05 against base: paired two-sided t-test, "
        "Holm's correction over the 2 systems compared, for each measure\n"
        "W/T/L: queries won, tied, lost against base"
    )


def test_notes_name_the_system_where_they_differ():
    first = evaluate(RUN, QRELS, ["nDCG@10"], name="all")
    second = evaluate(RUN[RUN["qid"] == "1"], QRELS, ["nDCG@10"], name="some")
    assert render([first, second]).splitlines()[-3:] == [
        "all: 3 judged, 1 without results: 7",
        "all: 1 unjudged query in the run ignored",
        "some: 3 judged, 2 without results: 2, 7",
    ]


def test_many_missing_queries_are_cut_short():
    found = Evaluation("a", system("a", A).per_query, tuple(map(str, range(12))), 2, 11)
    lines = render(found).splitlines()
    assert lines[-3].endswith("12 without results: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …")
    assert lines[-2] == "11 unjudged queries in the run ignored"
    assert lines[-1] == "2 judged queries not among the topics dropped"


def test_markdown_is_a_github_table():
    lines = render(compare(two()), "markdown", digits=3).splitlines()
    assert lines[0] == "| system | nDCG@10 | W/T/L | AP(rel=2)@1000 | W/T/L |"
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: |"
    assert lines[3].startswith("| x\\|y\\_z | ")
    assert {len(line.replace("\\|", "").split("|")) for line in lines[:4]} == {7}
    assert lines[4] == ""
    assert all(line.startswith("- ") for line in lines[5:])
    assert "- \\* p \\< 0.05 against base" in "\n".join(lines)


def test_json_carries_full_precision():
    found = compare(two(), test="wilcoxon")
    data = json.loads(render(found, "json", per_query=True))
    assert (data["baseline"], data["test"], data["alpha"]) == ("base", "wilcoxon", 0.05)
    base, other = data["systems"]
    assert base["mean"] == found.evaluations[0].mean.to_dict()
    assert (base["judged"], base["without_results"], base["unjudged"]) == (3, ["7"], 1)
    assert "compared" not in base
    assert other["compared"]["nDCG@10"]["p"] == found.table["p"][0]
    assert other["compared"]["AP(rel=2)@1000"]["wins"] == 1
    assert other["per_query"]["1"] == found.evaluations[1].per_query.loc["1"].to_dict()


def test_csv_carries_full_precision():
    found = compare(two())
    rows = list(csv.DictReader(io.StringIO(render(found, "csv"))))
    assert [row["system"] for row in rows] == ["base", "x|y_z"]
    assert float(rows[0]["nDCG@10"]) == found.evaluations[0].mean["nDCG@10"]
    assert float(rows[1]["nDCG@10 p"]) == found.table["p"][0]
    assert rows[0]["nDCG@10 p"] == ""
    assert (rows[1]["nDCG@10 wins"], rows[1]["without results"]) == ("1", "1")


def test_csv_per_query_has_a_row_for_each_query():
    evaluations = two()
    rows = list(csv.DictReader(io.StringIO(render(evaluations, "csv", per_query=True))))
    assert [(row["system"], row["qid"]) for row in rows[:3]] == [("base", q) for q in "127"]
    assert float(rows[4]["nDCG@10"]) == evaluations[1].per_query["nDCG@10"].iloc[1]


def test_per_query_adds_a_table():
    lines = render(two(), per_query=True).split("\n\n")[1].splitlines()
    assert lines[0].split() == ["system", "qid", "nDCG@10", "AP(rel=2)@1000"]
    assert lines[1].split() == ["base", "1", "0.6309", "0.5000"]
    assert len(lines) == 7


@pytest.mark.parametrize("format", ["text", "markdown", "csv", "json"])
def test_systems_with_other_measures_share_a_table(format):
    table = render([system("a", A), system("b", B, "AP(rel=2)")], format, per_query=True)
    assert "nDCG@10" in table
    assert "nan" not in table.lower()
    assert not table.endswith("\n")


@pytest.mark.parametrize("options", [{"format": "xml"}, {"digits": -1}])
def test_unknown_table_options_are_an_error(options):
    with pytest.raises(SpecError):
        render(system("a", A), **options)


def test_nothing_to_show_is_an_error():
    with pytest.raises(EvaluationError, match="no evaluations"):
        render([])
    with pytest.raises(EvaluationError, match="named 'a'"):
        render([system("a", A), system("a", B)])


def test_import_is_light():
    code = (
        "import sys, prf.tables;"
        "heavy = {'torch', 'faiss', 'jnius', 'scipy', 'ir_datasets'};"
        "print(sorted(heavy.intersection(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"

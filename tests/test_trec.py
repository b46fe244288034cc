"""Topics, documents, judgments and runs: strict readers with file and line, atomic writers."""

from __future__ import annotations

import gzip
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import DATA, LONG_TOPIC, plain, results
from hypothesis import given, settings
from hypothesis import strategies as st

from prf import FileFormatError, FrameError, SpecError, read_docs, read_qrels, read_run, read_topics
from prf.frames import ranks_of
from prf.trec import (
    RunWriter,
    atomic,
    read_json,
    read_lines,
    strictly_decreasing,
    write_json,
    write_run,
)

RUNS = DATA / "runs"

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def writer(name: str, text: str) -> Path:
        path = tmp_path / name
        data = text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return writer


# Topics


def test_nasty_topics_are_read_unchanged() -> None:
    """D1, D2, D5, Q3, L10: no identifier or text is parsed, stripped or normalised."""
    lines = (DATA / "topics.tsv").read_text(encoding="utf-8").split("\n")[:-1]
    topics = read_topics(DATA / "topics.tsv")
    assert topics.values.tolist() == [line.split("\t") for line in lines]
    assert topics.dtypes.tolist() == [object, object]


def test_empty_query_is_legal() -> None:
    """Q4."""
    topics = read_topics(DATA / "topics.tsv").set_index("qid")
    assert topics.at["empty", "query"] == ""


def test_long_query_is_read_whole(write: Write) -> None:
    topics = read_topics(write("t.tsv", "\t".join(LONG_TOPIC) + "\n"))
    assert topics["query"].tolist() == [LONG_TOPIC[1]]


TOPIC_FILES = {
    "t.tsv": "007\tcats and dogs\nNA\tnan\n",
    "t.jsonl": '{"qid": "007", "query": "cats and dogs"}\n{"qid": "NA", "query": "nan"}\n',
    "beir.jsonl": '{"_id": "007", "text": "cats and dogs"}\n{"_id": "NA", "text": "nan"}\n',
    "t.trec": "<top>\n<num> Number: 007\n<title> cats and dogs\n<desc> Description:\nx\n</top>\n"
    "<top>\n<num>NA</num>\n<title>\nnan\n</title>\n</top>\n",
    "topics.txt": "<top><num>007</num><title>cats and dogs</title></top>\n"
    "<top><num>NA</num><title>nan</title></top>",
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", TOPIC_FILES)
def test_every_topic_format_gives_the_same_frame(write: Write, name: str, suffix: str) -> None:
    topics = read_topics(write(name + suffix, TOPIC_FILES[name]))
    assert topics.values.tolist() == [["007", "cats and dogs"], ["NA", "nan"]]


@pytest.mark.parametrize("name", ["t.tsv", "t.jsonl", "t.trec"])
def test_windows_line_ends_and_byte_order_mark_are_no_text(write: Write, name: str) -> None:
    text = "\ufeff" + TOPIC_FILES[name].replace("\n", "\r\n")
    assert read_topics(write(name, text))["query"].tolist() == ["cats and dogs", "nan"]


def test_trec_title_keeps_a_less_than_sign(write: Write) -> None:
    text = "<top>\n<num> 1\n<title> a<b and c < d\n</top>\n"
    assert read_topics(write("t.trec", text))["query"].tolist() == ["a<b and c < d"]


def test_jsonl_whole_number_qid_becomes_text(write: Write) -> None:
    assert read_topics(write("t.jsonl", '{"qid": 7, "query": "x"}'))["qid"].tolist() == ["7"]


def test_duplicate_qid_names_both_lines(write: Write) -> None:
    """Q13."""
    path = write("t.tsv", "a\tx\nb\ty\na\tz\n")
    with pytest.raises(FileFormatError, match=r"t\.tsv:3: qid 'a' was already given in line 1"):
        read_topics(path)


class TinyQuery(NamedTuple):
    query_id: str
    text: str


class TinyDoc(NamedTuple):
    doc_id: str
    text: str

    def default_text(self) -> str:
        return self.text


class TinyQrel(NamedTuple):
    query_id: str
    doc_id: str
    relevance: int
    iteration: str


class TinyDataset:
    """A collection in memory with the methods of ir_datasets' own."""

    def queries_iter(self) -> Iterator[TinyQuery]:
        yield TinyQuery("007", "cats and dogs")

    def docs_iter(self) -> Iterator[TinyDoc]:
        yield TinyDoc("NA", "nan")

    def qrels_iter(self) -> Iterator[TinyQrel]:
        yield TinyQrel("007", "NA", 2, "0")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    ir_datasets = pytest.importorskip("ir_datasets")
    monkeypatch.setitem(ir_datasets.registry._registered, "prf-tiny", TinyDataset())
    return "ir_datasets:prf-tiny"


def test_topics_of_ir_datasets(tiny: str) -> None:
    assert plain(read_topics(tiny)) == [{"qid": "007", "query": "cats and dogs"}]


def test_docs_of_ir_datasets(tiny: str) -> None:
    assert list(read_docs(tiny)) == [("NA", "nan")]


def test_qrels_of_ir_datasets(tiny: str) -> None:
    assert plain(read_qrels(tiny)) == [{"qid": "007", "docno": "NA", "label": 2}]


def test_unknown_ir_datasets_name_is_an_error() -> None:
    pytest.importorskip("ir_datasets")
    with pytest.raises(FileFormatError, match="ir_datasets:nothing-here: ir_datasets has no such"):
        read_topics("ir_datasets:nothing-here")


# Documents


def test_nasty_documents_are_read_unchanged() -> None:
    """D2, D3, D7, L10."""
    lines = (DATA / "docs.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert list(read_docs(DATA / "docs.jsonl")) == [(r["docno"], r["text"]) for r in records]


DOC_FILES = {
    "d.jsonl": '{"docno": "007", "text": "one two"}\n\n{"id": "NA", "contents": "nan"}\n',
    "beir.jsonl": '{"_id": "007", "title": "", "text": "one two"}\n{"_id": "NA", "text": "nan"}\n',
    "d.tsv": "007\tone two\nNA\tnan\n\n",
    "d.trec": "<DOC>\n<DOCNO> 007 </DOCNO>\n<TEXT>one two</TEXT>\n</DOC>\n"
    "<DOC>\n<DOCNO>NA</DOCNO>\nnan\n</DOC>\n",
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", DOC_FILES)
def test_every_document_format_gives_the_same_pairs(write: Write, name: str, suffix: str) -> None:
    docs = list(read_docs(write(name + suffix, DOC_FILES[name])))
    assert docs == [("007", "one two"), ("NA", "nan")]


def test_fields_are_joined_in_the_order_given(write: Write) -> None:
    path = write("d.jsonl", '{"docno": "d", "text": "body", "title": "head", "url": "u"}')
    assert list(read_docs(path, ("title", "text"))) == [("d", "head\nbody")]


def test_missing_text_is_given_as_empty(write: Write) -> None:
    """X7: the index decides what to do with it."""
    assert list(read_docs(write("d.jsonl", '{"docno": "d", "text": null}'))) == [("d", "")]


def test_unknown_document_suffix_names_the_accepted_ones(write: Write) -> None:
    """X6."""
    with pytest.raises(
        FileFormatError, match=r"unknown suffix '\.csv'; accepted are \.jsonl, \.tsv"
    ):
        read_docs(write("d.csv", "d,text"))


# Judgments


def test_nasty_judgments_are_read_unchanged() -> None:
    """D7: a sign in a docno is no comment."""
    lines = [line.split(" ") for line in (DATA / "qrels.txt").read_text("utf-8").splitlines()]
    qrels = read_qrels(DATA / "qrels.txt")
    assert qrels.values.tolist() == [[qid, docno, int(grade)] for qid, _, docno, grade in lines]


def test_reading_twice_gives_equal_frames() -> None:
    """E6: frames, no iterators that are used up."""
    assert plain(read_qrels(DATA / "qrels.txt")) == plain(read_qrels(DATA / "qrels.txt"))


def test_whole_grade_may_be_written_with_a_point(write: Write) -> None:
    """E8."""
    assert read_qrels(write("q", "a 0 d 1.0\na 0 e -1\n"))["label"].tolist() == [1, -1]


def test_repeated_judgment_names_both_lines(write: Write) -> None:
    path = write("q", "a 0 d 1\nb 0 d 1\na 1 d 0\n")
    with pytest.raises(
        FileFormatError, match=r"q:3: docno 'd' of qid 'a' was already judged in line 1"
    ):
        read_qrels(path)


# Runs


def test_run_is_read_by_score_whatever_its_rank_column_says(write: Write) -> None:
    """R1, R5."""
    run = read_run(write("r", "q Q0 low 1 1 t\nq Q0 high 2 2 t\n"))
    assert run[["docno", "rank"]].values.tolist() == [["high", 0], ["low", 1]]


def test_ranks_from_zero_are_read_alike() -> None:
    """R5."""
    assert read_run(RUNS / "rank0.run")["rank"].tolist() == [0, 1]


def test_ties_are_read_in_our_order() -> None:
    assert read_run(RUNS / "tied.run")["docno"].tolist() == ["z", "a", "b", "c"]


def test_ties_are_read_in_the_order_of_trec_eval_when_asked() -> None:
    run = read_run(RUNS / "tied.run", ties="descending")
    assert run["docno"].tolist() == ["z", "c", "b", "a"]


def test_trec_eval_ties_scores_that_differ_only_beyond_single_precision() -> None:
    """R2."""
    run = read_run(RUNS / "near700.run", ties="descending")
    assert run["docno"].tolist() == ["c", "b", "a"]


@pytest.mark.parametrize("name", ["good.run.gz", "windows.run"])
def test_packed_and_windows_runs_are_the_same_run(name: str) -> None:
    assert plain(read_run(RUNS / name)) == plain(read_run(RUNS / "good.run"))


def test_odd_docno_is_one_field() -> None:
    """R3: fields are separated by white space only."""
    assert "IPCC_supplementary_report,_1992" in read_run(RUNS / "good.run")["docno"].tolist()


def test_repeated_docno_of_a_foreign_run_names_both_lines() -> None:
    """D6."""
    with pytest.raises(
        FileFormatError, match=r"duplicate\.run:3: docno 'd1' of qid '1' already stands in line 1"
    ):
        read_run(RUNS / "duplicate.run")


def test_repeated_docno_keeps_the_better_line_when_asked() -> None:
    """D6."""
    run = read_run(RUNS / "duplicate.run", on_duplicate="first")
    assert run[["docno", "score", "rank"]].values.tolist() == [["d1", 4.5, 0], ["d2", 3.0, 1]]


# Errors of readers


READERS: dict[str, Callable[[Any], Any]] = {
    "topics": read_topics,
    "docs": lambda path: list(read_docs(path)),
    "qrels": read_qrels,
    "run": read_run,
    "json": read_json,
    "lines": lambda path: list(read_lines(path, "some")),
}
GOOD = {
    "topics": DATA / "topics.tsv",
    "docs": DATA / "docs.jsonl",
    "qrels": DATA / "qrels.txt",
    "run": RUNS / "good.run",
    "json": DATA / "docs.jsonl",
    "lines": DATA / "qrels.txt",
}


@pytest.mark.parametrize("reader", [name for name in READERS if name != "json"])
@pytest.mark.parametrize("kind", [str, Path])
def test_text_and_path_are_read_alike(reader: str, kind: type) -> None:
    """X11, E7."""
    assert len(READERS[reader](kind(GOOD[reader]))) > 0


@pytest.mark.parametrize("reader", READERS)
def test_missing_file_is_an_error(reader: str, tmp_path: Path) -> None:
    """E7, R8: never an empty result."""
    with pytest.raises(FileFormatError, match=r"missing\.jsonl' does not exist; check the path"):
        READERS[reader](tmp_path / "missing.jsonl")


@pytest.mark.parametrize("reader", READERS)
def test_empty_file_is_an_error(reader: str, write: Write) -> None:
    """E7."""
    with pytest.raises(FileFormatError, match=r"empty\.jsonl' is empty"):
        READERS[reader](write("empty.jsonl", ""))


@pytest.mark.parametrize("reader", ["topics", "qrels", "run"])
def test_file_of_blank_lines_is_an_error(reader: str, write: Write) -> None:
    with pytest.raises(FileFormatError, match=r"blank\.tsv.*(is empty|no topics)"):
        READERS[reader](write("blank.tsv", "\n\n"))


@pytest.mark.parametrize("reader", READERS)
def test_folder_is_an_error(reader: str, tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(FileFormatError, match=r"folder\.jsonl' is a folder; name the file in it"):
        READERS[reader](tmp_path / "folder.jsonl")


@pytest.mark.parametrize("reader", READERS)
def test_other_encoding_is_an_error_with_line_and_column(reader: str, tmp_path: Path) -> None:
    """Q12."""
    (tmp_path / "latin.jsonl").write_bytes(
        b'{"qid": "1", "query": "' + "ü".encode("latin-1") + b'"}'
    )
    with pytest.raises(
        FileFormatError, match=r"latin\.jsonl:1: byte 0xfc at column 24 is not UTF-8"
    ):
        READERS[reader](tmp_path / "latin.jsonl")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "harm", [lambda b: b[:-9], lambda b: b"no gzip", lambda b: b[:20] + b"\0" * 40]
)
def test_broken_gzip_is_an_error(
    reader: str, harm: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    packed = gzip.compress(os.urandom(3000).hex().encode())
    (tmp_path / "broken.jsonl.gz").write_bytes(harm(packed))
    with pytest.raises(FileFormatError, match=r"broken\.jsonl\.gz: not a complete gzip file"):
        READERS[reader](tmp_path / "broken.jsonl.gz")


MALFORMED = [
    ("topics", "t.tsv", "a\tx\nb y\n", "t.tsv:2: expected qid<TAB>query, found no tab in 'b y'"),
    ("topics", "t.tsv", "a\tx\ty\n", "t.tsv:1: expected qid<TAB>query, found 2 tabs"),
    ("topics", "t.tsv", "\tx\n", "t.tsv:1: qid is ''; it must be non-empty text"),
    ("topics", "t.jsonl", '{"qid": "a", "query": "x"}\n{', "t.jsonl:2: not JSON"),
    ("topics", "t.jsonl", "[1]", "t.jsonl:1: expected a JSON object, found [1]"),
    (
        "topics",
        "t.jsonl",
        '{"id": "a", "query": "x"}',
        "t.jsonl:1: no field 'qid' or '_id'; found id, query",
    ),
    ("topics", "t.jsonl", '{"qid": 1.0, "query": "x"}', "t.jsonl:1: qid is 1.0; it must be"),
    ("topics", "t.jsonl", '{"qid": true, "query": "x"}', "t.jsonl:1: qid is True; it must be"),
    (
        "topics",
        "t.jsonl",
        '{"qid": "a", "query": null}',
        "t.jsonl:1: query is None; it must be text",
    ),
    ("topics", "t.trec", "a\tx\n", "t.trec: no <top> found"),
    ("topics", "t.trec", "\n<top>\n<num> 1\n<title> x\n", "t.trec:2: <top> is never closed"),
    ("topics", "t.trec", "<top>\n<title> x\n</top>\n", "t.trec:1: <num> is ''"),
    ("docs", "d.tsv", "d\tx\ne\n", "d.tsv:2: expected docno<TAB>text, found no tab in 'e'"),
    ("docs", "d.tsv", "\tx\n", "d.tsv:1: docno is ''; it must be"),
    ("docs", "d.jsonl", '{"docno": "d", "text": 1}', "d.jsonl:1: text of docno 'd' is 1, not text"),
    ("docs", "d.jsonl", '{"docno": "d"}', "d.jsonl:1: no field 'text' or 'contents'; found docno"),
    ("docs", "d.trec", "<DOC>\nx\n</DOC>\n", "d.trec:1: <DOC> without <DOCNO>"),
    ("docs", "d.trec", "<DOC>\n<DOCNO>d</DOCNO>\n", "d.trec:1: <DOC> is never closed by </DOC>"),
    ("docs", "d.trec", "<DOC>\n<DOC>\n</DOC>\n", "d.trec:1: <DOC> is never closed by </DOC>"),
    (
        "qrels",
        "q",
        "a 0 d 1\na 0 e\n",
        "q:2: expected 4 fields (qid iteration docno grade), found 3",
    ),
    ("qrels", "q", "a 0 d 0.5\n", "q:1: grade '0.5' is not a whole number"),
    ("qrels", "q", "a 0 d 1_0\n", "q:1: grade '1_0' is not a whole number"),
    ("qrels", "q", "a 0 d inf\n", "q:1: grade 'inf' is not a whole number"),
    ("qrels", "q", "a 0 d 1e30\n", "q:1: grade '1e30' is not a whole number"),
    ("run", "r", "q Q0 d 1 1_0 t\n", "r:1: score '1_0' is not a finite number"),
    ("run", "r", "q Q0 d 1 high t\n", "r:1: score 'high' is not a finite number"),
    ("json", "j.json", "{\n,}", "j.json: not JSON"),
]


@pytest.mark.parametrize(("reader", "name", "text", "message"), MALFORMED)
def test_malformed_file_is_an_error_with_file_and_line(
    reader: str, name: str, text: str, message: str, write: Write
) -> None:
    """R3, R4, E8, E10."""
    with pytest.raises(FileFormatError) as caught:
        READERS[reader](write(name, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seven.run", r"seven\.run:2: expected 6 fields .* found 7"),
        ("five.run", r"five\.run:1: expected 6 fields .* found 5"),
        ("msmarco.run", r"msmarco\.run:1: expected 6 fields .* found 3"),
        ("nan.run", r"nan\.run:2: score 'nan' is not a finite number"),
        ("empty.run", r"empty\.run' is empty"),
    ],
)
def test_malformed_run_is_an_error_with_file_and_line(name: str, message: str) -> None:
    """R3, R4, R11, E7."""
    with pytest.raises(FileFormatError, match=message):
        read_run(RUNS / name)


# Strictly decreasing scores

FINITE = st.floats(-(2.0**127), 2.0**127, width=32)
ANCE = st.floats(700, 700.001)
LISTS = st.lists(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.0, 1.0 + 1e-9, 700.0, 700.00001]) | FINITE | ANCE, max_size=12
    ),
    max_size=4,
)


def flat(lists: list[list[float]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    scores = [score for part in lists for score in sorted(part, reverse=True)]
    codes = [code for code, part in enumerate(lists) for _ in part]
    return np.array(scores), np.array(codes, dtype=np.int64)


@given(LISTS)
def test_order_survives_the_rule_of_trec_eval(lists: list[list[float]]) -> None:
    """R1, R2: score descending in single precision, then docno descending."""
    scores, codes = flat(lists)
    docnos = [f"{rank:04}" for rank in ranks_of(codes)]  # ascending, so any tie would turn round
    written = strictly_decreasing(scores, codes)
    rows = list(
        zip(codes.tolist(), [np.float32(float(str(w))) for w in written], docnos, strict=True)
    )
    theirs = sorted(
        sorted(rows, key=lambda row: row[2], reverse=True), key=lambda row: (row[0], -row[1])
    )
    assert theirs == rows


@given(LISTS)
def test_scores_change_as_little_as_possible(lists: list[list[float]]) -> None:
    """R2: one by one, the next float32 below the predecessor, or the score itself."""
    scores, codes = flat(lists)
    expected: list[np.float32] = []
    for place, score in enumerate(scores.astype(np.float32)):
        first = place == 0 or codes[place] != codes[place - 1]
        below = score if first else np.nextafter(expected[-1], np.float32(-np.inf))
        expected.append(min(score, below))
    assert strictly_decreasing(scores, codes).tolist() == [float(e) for e in expected]


@pytest.mark.parametrize("scores", [[1e39], [-1e39], [-3.4028235e38, -3.4028235e38]])
def test_score_beyond_single_precision_is_refused(scores: list[float]) -> None:
    with pytest.raises(FrameError, match="does not fit single precision; scale the scores down"):
        strictly_decreasing(scores, np.zeros(len(scores), dtype=np.int64))


# Writing runs

NASTY = ["d1", "0012", "NA", "null", "a,b", "x#1", 'a"b', "o'neill", "a:b/c%d\\e", "-5", "ü漢"]
NASTY.append("d" * 300)


@pytest.mark.parametrize("docno", NASTY)
def test_docno_survives_round_trip(docno: str, tmp_path: Path) -> None:
    """D2, D3, D7."""
    write_run(results((docno, "x", docno, 1.0)), tmp_path / "r")
    assert read_run(tmp_path / "r")[["qid", "docno"]].values.tolist() == [[docno, docno]]


def test_run_holds_six_fields_ranks_from_one(tmp_path: Path) -> None:
    """R5, R6."""
    write_run(results(("q", "x", "b", 1.0), ("q", "x", "a", 2.5)), tmp_path / "r", "my-tag_1.0")
    text = (tmp_path / "r").read_bytes()
    assert text == b"q Q0 a 1 2.5 my-tag_1.0\nq Q0 b 2 1.0 my-tag_1.0\n"


def test_queries_stand_in_the_run_in_the_order_given(tmp_path: Path) -> None:
    """Q11."""
    write_run(
        results(("9", "x", "d", 1.0), ("10", "x", "d", 5.0), ("1", "x", "d", 3.0)), tmp_path / "r"
    )
    assert read_run(tmp_path / "r")["qid"].tolist() == ["9", "10", "1"]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.text("abc", min_size=1, max_size=2), ANCE),
        unique_by=lambda r: r[0],
        min_size=1,
    )
)
def test_written_order_is_read_back_whatever_the_rule_for_ties(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, float]]
) -> None:
    """R1, R2."""
    path = tmp_path_factory.mktemp("run") / "r"
    write_run(results(*[("q", "x", docno, score) for docno, score in rows]), path)
    ours = [docno for docno, _ in sorted(rows, key=lambda row: (-row[1], row[0]))]
    assert read_run(path)["docno"].tolist() == ours
    assert read_run(path, ties="descending")["docno"].tolist() == ours


def test_score_is_the_shortest_decimal_that_restores_the_single(tmp_path: Path) -> None:
    """R2."""
    write_run(results(("q", "x", "d", float(np.float32(0.1)))), tmp_path / "r")
    assert (tmp_path / "r").read_text("utf-8").split()[4] == "0.1"


@pytest.mark.parametrize(
    ("qid", "docno", "name"),
    [("a b", "d", "qid 'a b'"), ("q", "d\u00a0e", "docno 'd"), ("q\t", "d", "qid")],
)
def test_white_space_in_an_identifier_is_refused(
    qid: str, docno: str, name: str, tmp_path: Path
) -> None:
    """R4."""
    with pytest.raises(FrameError, match=f"{name}.* holds white space"):
        write_run(results((qid, "x", docno, 1.0)), tmp_path / "r")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tag", ["", "my tag", "a/b", "ü"])
def test_tag_of_other_characters_is_refused(tag: str, tmp_path: Path) -> None:
    """R6."""
    with pytest.raises(SpecError, match=r"run tag .*: use letters, digits"):
        write_run(results(("q", "x", "d", 1.0)), tmp_path / "r", tag)


def test_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    """R7."""
    (tmp_path / "r").write_text("old", encoding="utf-8")
    with pytest.raises(SpecError, match="exists; choose another name or overwrite it"):
        write_run(results(("q", "x", "d", 1.0)), tmp_path / "r")
    assert (tmp_path / "r").read_text("utf-8") == "old"


def test_existing_run_is_overwritten_when_asked(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("old", encoding="utf-8")
    write_run(results(("q", "x", "d", 1.0)), tmp_path / "r", force=True)
    assert len(read_run(tmp_path / "r")) == 1


def test_missing_column_is_named(tmp_path: Path) -> None:
    """A12."""
    with pytest.raises(
        FrameError, match=r"writing run .* needs score, found only qid, query, docno"
    ):
        write_run(results(("q", "x", "d", 1.0)).drop(columns="score"), tmp_path / "r")


def test_nan_score_is_refused(tmp_path: Path) -> None:
    """R11."""
    with pytest.raises(FrameError, match="score of docno 'd' for qid 'q' is nan"):
        write_run(results(("q", "x", "d", float("nan"))), tmp_path / "r")


def test_batches_give_the_file_of_one_write(tmp_path: Path) -> None:
    """B1."""
    first, second = results(("a", "x", "d", 1.0)), results(("b", "x", "d", 1.0))
    with RunWriter(tmp_path / "batches") as writer:
        writer.write(first)
        writer.write(second)
    write_run(results(("a", "x", "d", 1.0), ("b", "x", "d", 1.0)), tmp_path / "whole")
    assert (tmp_path / "batches").read_bytes() == (tmp_path / "whole").read_bytes()


def test_query_in_two_batches_is_refused_and_nothing_written(tmp_path: Path) -> None:
    """R9: runs are written whole, never appended."""
    batch = results(("a", "x", "d", 1.0))
    writer = RunWriter(tmp_path / "r")

    def write_twice() -> None:
        with writer:
            writer.write(batch)
            writer.write(batch)

    with pytest.raises(FrameError, match="qid 'a' comes in two batches"):
        write_twice()
    assert not list(tmp_path.iterdir())


# Atomic files


@pytest.mark.parametrize("kind", [str, Path])
def test_text_and_path_are_written_alike(kind: type, tmp_path: Path) -> None:
    """X11."""
    write_run(results(("q", "x", "d", 1.0)), kind(tmp_path / "r"))
    write_json({"a": "ü"}, kind(tmp_path / "j"))
    assert read_json(kind(tmp_path / "j")) == {"a": "ü"}
    assert len(read_run(kind(tmp_path / "r"))) == 1


def test_file_appears_only_at_the_end(tmp_path: Path) -> None:
    with atomic(tmp_path / "f") as stream:
        stream.write("text")
        stream.flush()
        assert not (tmp_path / "f").exists()
    assert (tmp_path / "f").read_text("utf-8") == "text"


def test_old_file_stays_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old", encoding="utf-8")
    with pytest.raises(ZeroDivisionError), atomic(tmp_path / "f") as stream:
        stream.write(str(1 // 0))
    assert [path.read_text("utf-8") for path in tmp_path.iterdir()] == ["old"]


def test_missing_folder_is_made(tmp_path: Path) -> None:
    write_json(1, tmp_path / "a" / "b" / "j.json")
    assert read_json(tmp_path / "a" / "b" / "j.json") == 1


def test_file_has_the_rights_of_an_ordinary_one(tmp_path: Path) -> None:
    write_json(1, tmp_path / "ours")
    (tmp_path / "theirs").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "theirs")}
    assert len(modes) == 1


def test_same_text_gives_the_same_packed_bytes(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        with atomic(tmp_path / name) as stream:
            stream.write("text\n")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert list(read_lines(tmp_path / "a.gz", "text")) == [(1, "text")]


def test_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileFormatError, match="cannot be written"):
        write_json(1, tmp_path / "file" / "j.json")

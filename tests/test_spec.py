"""Pipelines as YAML, both ways; settings from outside; explain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyterrier as pt
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from prf import (
    BM25,
    RM3,
    AveragePrf,
    Compose,
    Concatenate,
    Cutoff,
    DenseRetriever,
    Features,
    FileFormatError,
    FrameError,
    Intersection,
    QueryEncoder,
    QueryVectors,
    Rocchio,
    RocchioTerms,
    Scale,
    SpecError,
    Sum,
    Text,
    Transformer,
    Union,
    Vectors,
    dumps,
    explain,
    load,
    loads,
)
from prf.pipeline import REGISTRY
from prf.spec import from_spec, override, read_pipeline, shipped, to_spec

FINITE = st.floats(allow_nan=False, allow_infinity=False)
NAME = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        "1e-3",
        "007",
        "no",
        "30_1",
        "null",
        "~",
        "=",
        "<<",
        "a: b",
        "- a",
        "#",
        "'",
        "\n",
        "2001-01-01",
    ]
)
STAGE = st.one_of(
    st.builds(Cutoff, st.integers(1)),
    st.builds(Scale, FINITE),
    st.builds(Text, NAME),
    st.builds(Vectors, NAME),
    st.builds(QueryVectors, NAME, NAME),
    st.builds(QueryEncoder, NAME, st.integers(1, 99), NAME),
    st.builds(BM25, NAME, k1=st.floats(0, 9), b=st.floats(0, 1), k=st.integers(1, 2000)),
    st.builds(
        DenseRetriever,
        NAME,
        backend=st.sampled_from(["numpy", "faiss"]),
        force_encoder=st.booleans(),
    ),
    st.builds(AveragePrf, st.integers(0, 9)),
    st.builds(Rocchio, st.integers(0, 9), FINITE, FINITE),
    st.builds(RM3, NAME, fb_lambda=st.floats(0, 1), filter_terms=st.booleans()),
    st.builds(RocchioTerms, NAME, gamma=FINITE, neg_docs=st.integers(1, 9)),
)
PIPELINE = st.recursive(
    STAGE,
    lambda inner: st.builds(
        lambda kind, parts: kind(tuple(parts)),
        st.sampled_from([Compose, Sum, Union, Intersection, Concatenate, Features]),
        st.lists(inner, min_size=2, max_size=3),
    ),
    max_leaves=6,
)


# Both ways


@settings(max_examples=100)
@given(PIPELINE)
def test_every_pipeline_survives_yaml(pipeline: Transformer) -> None:
    assert loads(dumps(pipeline)) == pipeline


@settings(max_examples=40)
@given(PIPELINE)
def test_every_pipeline_survives_yaml_with_all_defaults(pipeline: Transformer) -> None:
    assert loads(dumps(pipeline, defaults=True)) == pipeline


def test_yaml_of_the_design_is_read() -> None:
    text = """
    - Sum:
      - [{DenseRetriever: {index: a}}, {Scale: 0.7}]
      - DenseRetriever: {index: b}
    - Cutoff: 50
    """
    assert loads(text) == (DenseRetriever("a") * 0.7 + DenseRetriever("b")) % 50


def test_only_values_that_differ_from_the_default_are_written() -> None:
    assert to_spec(Rocchio(fb_docs=5, alpha=0.5)) == {"Rocchio": {"alpha": 0.5}}


def test_stage_of_defaults_is_its_name_alone() -> None:
    assert dumps(Rocchio() >> AveragePrf()) == "- Rocchio\n- AveragePrf\n"


def test_all_values_are_written_when_asked() -> None:
    assert to_spec(AveragePrf(), defaults=True) == {"AveragePrf": {"fb_docs": 3}}


def test_foreign_stage_has_no_yaml_form() -> None:
    foreign = pt.apply.generic(lambda frame: frame)
    with pytest.raises(SpecError, match=r"stage 1, pt\.apply\.generic\(\) has no YAML form"):
        dumps(Cutoff(1) >> foreign)


def test_list_of_one_stage_is_the_stage() -> None:
    assert loads("[Rocchio]") == Rocchio()


def test_anchors_serve_a_repeated_path() -> None:
    text = "- DenseRetriever: {index: &here indexes/a}\n- Vectors: {index: *here}\n"
    assert loads(text) == DenseRetriever("indexes/a") >> Vectors("indexes/a")


@pytest.fixture
def nested() -> Any:
    """Two stages that hold other stages, known only during the test."""

    @dataclass(frozen=True, repr=False)
    class HoldsStages(Transformer):
        one: Transformer
        maybe: Transformer | None = None
        several: tuple[Transformer, ...] = ()
        names: tuple[str, ...] = ()

    yield HoldsStages
    del REGISTRY["HoldsStages"]


def test_stage_in_an_argument_survives_yaml(nested: Any) -> None:
    stage = nested(Cutoff(3) >> Scale(2.0), Rocchio(), (Cutoff(1), Scale(0.5) >> Cutoff(2)), ("a",))
    assert loads(dumps(stage)) == stage


def test_stage_in_an_argument_is_set_from_outside(nested: Any) -> None:
    assert override(nested(Cutoff(3)), ["0.one.k=5"]) == nested(Cutoff(5))


# What is refused

REFUSED = [
    ("[Cutoff: 1, Rochio]", r"pipeline\[1\]: no stage named 'Rochio'; did you mean 'Rocchio'\?"),
    (
        "Rocchio: {apha: 1.0}",
        r"has no argument 'apha'; did you mean 'alpha'\?; signature is Rocchio\(fb_docs: int = 5",
    ),
    (
        "Rocchio: {beta: 1e-3}",
        r"Rocchio\.beta must be float, not '1e-3' \(in YAML write 0\.001 without",
    ),
    ("Rocchio: {beta: '0.5'}", r"Rocchio\.beta must be float, not '0\.5'"),
    ("Rocchio: {fb_docs: 2.0}", r"Rocchio\.fb_docs must be int, not 2\.0"),
    ("Rocchio: {fb_docs: yes}", r"Rocchio\.fb_docs must be int, not True"),
    ("Rocchio: {fb_docs: null}", r"Rocchio\.fb_docs must be int, not None"),
    ("Rocchio: {fb_docs: -1}", r"Rocchio\.fb_docs is -1; it must be at least 0"),
    ("Rocchio: {alpha: .nan}", r"Rocchio\.alpha is nan; it must be a finite number"),
    ("Rocchio: {gamma: 0.1}", r"negative feedback needs both, none needs neither"),
    ("BM25: {index: 7}", r"BM25\.index must be text, not 7"),
    ("BM25: {index: i, b: 2}", r"BM25 needs k1 >= 0 and 0 <= b <= 1"),
    ("RM3: {index: i, fb_lambda: 2}", r"RM3\.fb_lambda is 2\.0; it must be between 0 and 1"),
    ("RM3: {index: i, filter_terms: 1}", r"RM3\.filter_terms must be true or false, not 1"),
    ("DenseRetriever: {index: i, backend: gpu}", r"backend is 'gpu'; one of 'numpy', 'faiss'"),
    ("EncoderPrf", r"EncoderPrf\(model: str, .*max_length: int \| None = None, query_length: int"),
    ("BM25", r"pipeline: BM25 needs 'index'; signature is BM25\(index: str, k1: float = 0\.9"),
    ("Cutoff", r"Cutoff\.k must be int, not None"),
    (
        "BM25: indexes/a",
        r"BM25 takes its arguments by name, as in 'BM25: \{index: \.\.\.\}', not 'indexes/a'",
    ),
    ("Sum: {a: 1}", r"Sum takes a list of stages, not"),
    ("Sum: [Rocchio]", r"Sum joins two stages or more, not 1"),
    ("Sum: [Rocchio, [Cutoff: 1, Nope]]", r"pipeline\[1\]\[1\]: no stage named 'Nope'"),
    ("[]", r"an empty list; name at least one stage"),
    ("7", r"expected a stage such as .* found 7"),
    ("{Cutoff: 1, Scale: 2}", r"expected a stage such as"),
    ("Rocchio: {alpha: 1.0, alpha: 2.0}", r"pipeline:1: not YAML: key 'alpha' is given twice"),
    (
        "\nRocchio: {fb_docs: 1,\n fb_docs: 2}",
        r"pipeline:3: not YAML: key 'fb_docs' is given twice",
    ),
    ("Rocchio: {[1]: 2}", r"pipeline:1: not YAML: key \[1\] is not a name"),
    ("Rocchio: {1: 2}", r"pipeline:1: not YAML: key 1 is not a name"),
    ("Rocchio: {", r"pipeline:1: not YAML"),
    ("!!python/object/apply:os.getcwd []", r"not YAML: could not determine a constructor"),
    ("Feedback", r"no stage named 'Feedback'"),
    ("\x00", r"not YAML"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_wrong_yaml_is_refused_saying_where_and_what(text: str, message: str) -> None:
    """A1, B4."""
    with pytest.raises(SpecError, match=message):
        loads(text)


def test_whole_number_passes_for_a_real_one() -> None:
    assert loads("Rocchio: {alpha: 1}") == Rocchio(alpha=1.0)


def test_parsed_yaml_may_hold_numpy_numbers() -> None:
    assert from_spec({"Cutoff": np.int64(5)}) == Cutoff(5)


# Files


def write(folder: Path, text: str) -> Path:
    path = folder / "p.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_may_say_what_to_run_on(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "topics: t.tsv\nrun: {path: r.run, tag: mine}\nmeasures: [nDCG@10, AP]\n"
        "pipeline: [Rocchio]\n",
    )
    file = read_pipeline(path)
    assert (file.pipeline, file.topics, file.run, file.tag) == (Rocchio(), "t.tsv", "r.run", "mine")
    assert file.measures == ("nDCG@10", "AP")


def test_run_and_measures_may_be_plain_text(tmp_path: Path) -> None:
    file = read_pipeline(write(tmp_path, "run: r\nmeasures: AP\npipeline: Rocchio\n"))
    assert (file.run, file.tag, file.measures) == ("r", None, ("AP",))


@pytest.mark.parametrize("kind", [str, Path])
def test_file_may_be_text_or_path(kind: type, tmp_path: Path) -> None:
    """X11."""
    assert load(kind(write(tmp_path, "Rocchio"))) == Rocchio()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pipelin: [Rocchio]\ntopics: t\n",
            r"p\.yaml: top level holds 'pipelin'; allowed are pipeline",
        ),
        ("topics: t\nrun: r\n", r"p\.yaml: top level holds only topics, run; add 'pipeline'"),
        ("pipeline: Rocchio\ntopics: 7\n", r"p\.yaml: topics is 7; it must be text \(quote it\)"),
        ("pipeline: Rocchio\nrun: {path: r, tag: 007}\n", r"p\.yaml: tag is 7; it must be text"),
        (
            "pipeline: Rocchio\nrun: {file: r}\n",
            r"p\.yaml: run is .*; write a path, or path: and tag:",
        ),
        (
            "pipeline: Rocchio\nmeasures: {a: 1}\n",
            r"p\.yaml: measures is .*; write a list of names",
        ),
        (
            "pipeline: Rocchio\npipeline: RM3\n",
            r"p\.yaml:2: not YAML: key 'pipeline' is given twice",
        ),
        ("- Rocchio\n- Nope\n", r"p\.yaml: pipeline\[1\]: no stage named 'Nope'"),
    ],
)
def test_wrong_file_is_refused_with_its_name(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        read_pipeline(write(tmp_path, text))


def test_file_of_comments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"p\.yaml' holds only comments"):
        load(write(tmp_path, "# nothing\n"))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"pipeline file '.*' does not exist"):
        load(tmp_path / "none.yaml")


# Settings from outside

CHAIN = (BM25("a") + DenseRetriever("b") * 0.5) >> Rocchio() >> Cutoff(9)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("1.fb_docs=5", (BM25("a") + DenseRetriever("b") * 0.5) >> Rocchio(5) >> Cutoff(9)),
        ("2.k=3", (BM25("a") + DenseRetriever("b") * 0.5) >> Rocchio() >> Cutoff(3)),
        ("0.0.k=7", (BM25("a", k=7) + DenseRetriever("b") * 0.5) >> Rocchio() >> Cutoff(9)),
        ("0.1.1.factor=2", (BM25("a") + DenseRetriever("b") * 2.0) >> Rocchio() >> Cutoff(9)),
        ("0.0.index=x=y", (BM25("x=y") + DenseRetriever("b") * 0.5) >> Rocchio() >> Cutoff(9)),
    ],
)
def test_setting_replaces_one_argument(setting: str, expected: Transformer) -> None:
    assert override(CHAIN, [setting]) == expected


def test_settings_apply_one_after_another() -> None:
    assert override(Rocchio(), ["0.fb_docs=1", "0.alpha=0.1"]) == Rocchio(1, 0.1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("fb_docs=5", "write POSITION.argument=value"),
        ("1.fb_docs", "write POSITION.argument=value"),
        ("3.k=5", r"there is no stage 3 here; positions are 0 to 2, see `prf explain`"),
        ("1=5", "write POSITION.argument=value"),
        ("0.k=5", "has no arguments; give a position first"),
        ("1.fb_doc=5", r"has no argument 'fb_doc'; did you mean 'fb_docs'\?"),
        ("1.fb_docs=many", r"--set '1\.fb_docs=many': Rocchio\.fb_docs must be int, not 'many'"),
        ("1.alpha.x=5", r"Rocchio\.alpha is not a stage"),
        ("1.fb_docs={", "not YAML"),
    ],
)
def test_wrong_setting_is_refused(setting: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        override(CHAIN, [setting])


# Explain


def test_explain_says_columns_and_resources_of_every_stage() -> None:
    """A8."""
    steps = explain(QueryVectors("v.npy", "i.txt") >> DenseRetriever("nowhere"))
    assert [step.position for step in steps] == ["0", "1"]
    assert steps[0].columns_out == ("qid", "query", "query_vec")
    assert steps[1].columns_out == ("qid", "query", "query_vec", "docno", "score", "rank")
    assert steps[1].resources == (f"dense index {Path('nowhere').absolute()} (not there)",)


def test_explain_says_what_is_trimmed() -> None:
    steps = explain(BM25("a") >> Text("t") >> Cutoff(9))
    assert steps[0].note == "runs as BM25('a', k=9): later stages read no deeper"


def test_explain_fails_where_a_column_is_missing() -> None:
    """A4."""
    with pytest.raises(FrameError, match=r"^pipeline\[1\] Rocchio\(\) needs query_vec, doc_vec"):
        explain(BM25("a") >> Rocchio())


NUMBERED = [
    ((BM25("a") + BM25("b") * 0.5) >> Cutoff(9), ["0", "0.0", "0.1.0", "0.1.1", "1"]),
    (BM25("a") | BM25("b"), ["pipeline", "0", "1"]),
    (BM25("a"), ["0"]),
    (BM25("a") + (BM25("b") | BM25("c")), ["pipeline", "0", "1", "1.0", "1.1"]),
]


@pytest.mark.parametrize(("pipeline", "positions"), NUMBERED, ids=repr)
def test_positions_of_explain_count_into_operators(
    pipeline: Transformer, positions: list[str]
) -> None:
    assert [step.position for step in explain(pipeline)] == positions


@settings(max_examples=40)
@given(
    st.recursive(
        st.builds(BM25, st.just("i"), k=st.integers(1, 9)),
        lambda inner: st.builds(
            lambda kind, parts: kind(tuple(parts)),
            st.sampled_from([Compose, Sum, Union]),
            st.lists(inner, min_size=2, max_size=3),
        ),
        max_leaves=6,
    )
)
def test_every_position_of_explain_is_one_that_a_setting_takes(pipeline: Transformer) -> None:
    places = [step.position for step in explain(pipeline) if step.stage.startswith("BM25")]
    changed = override(pipeline, [f"{place}.k=77" for place in places])
    assert {step.stage for step in explain(changed) if "(" in step.stage} == {"BM25('i', k=77)"}


# The pipelines that come with the package

FILES = sorted(
    path
    for path in (ROOT / "pipelines").rglob("*.yaml")
    if path.parent.name != "training"  # configs of `prf train`, see test_training.py
)


def test_there_are_shipped_pipelines() -> None:
    assert {"bm25_rm3.yaml", "dense_prf.yaml"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_pipeline_loads_dumps_reloads_and_explains(path: Path) -> None:
    pipeline = load(path)
    assert loads(dumps(pipeline)) == pipeline
    assert {"docno", "score", "rank"} <= set(explain(pipeline)[-1].columns_out)


def test_shipped_pipeline_is_found_by_name() -> None:
    assert load(shipped("bm25.yaml")) == BM25("indexes/demo-bm25")


def test_unknown_shipped_pipeline_is_an_error() -> None:
    with pytest.raises(FileFormatError, match=r"no shipped pipeline 'none\.yaml'"):
        shipped("none.yaml")

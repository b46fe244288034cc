"""The contract of every registered stage; see contract.py."""

from __future__ import annotations

import pickle
import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Material, plain
from contract import DEPTH, EXAMPLES, MARKS, NO_SOURCE, QIDS, STAGES, Example, example
from weighted_average import WeightedAverage

import prf
from prf import FrameError, SpecError, dumps, explain, loads
from prf.feedback import Feedback
from prf.frames import PROVIDERS, is_results, queries_of, query_columns
from prf.pipeline import PARTS, REGISTRY, AtLeast, Transformer, _hints, _Nary

NAMES = [pytest.param(name, marks=MARKS.get(name, ())) for name in STAGES]
FEEDBACK = [
    pytest.param(name, marks=MARKS.get(name, ()))
    for name, cls in STAGES.items()
    if issubclass(cls, Feedback)
]
NEEDED = [
    pytest.param(name, needed, marks=MARKS.get(name, ()), id=f"{name}-{needed}")
    for name, cls in STAGES.items()
    for needed in cls.needs
]
KINDS = {"int": (np.int64, np.int32, np.uint16), "float": (np.float64, np.float32)}


def kind_of(hint: Any) -> str:
    """Returns the name of an argument's type, "" for one that may be None."""
    return getattr(getattr(hint, "__origin__", hint), "__name__", "")


def numeric(kind: str) -> list[tuple[str, str]]:
    """Returns (stage, argument) of every argument that is an int, or a float."""
    return [
        (name, item.name)
        for name, cls in STAGES.items()
        for item in fields(cls)
        if kind_of(_hints(cls)[item.name]) == kind
    ]


NUMBERS = [
    pytest.param(name, field, kind, marks=MARKS.get(name, ()), id=f"{name}.{field}-{kind.__name__}")
    for plain_kind, kinds in KINDS.items()
    for name, field in numeric(plain_kind)
    for kind in kinds
]
REALS = [
    pytest.param(name, field, marks=MARKS.get(name, ()), id=f"{name}.{field}")
    for name, field in numeric("float")
    if field not in ("gamma",)  # Rocchio takes it with neg_docs only
]
BOUNDED = [
    pytest.param(name, item.name, marks=MARKS.get(name, ()), id=f"{name}.{item.name}")
    for name, cls in STAGES.items()
    for item in fields(cls)
    if any(
        isinstance(bound, AtLeast) for bound in getattr(_hints(cls)[item.name], "__metadata__", ())
    )
]
DOCUMENTED = [
    pytest.param(name, marks=MARKS.get(name, ()))
    for name, cls in STAGES.items()
    if not issubclass(cls, _Nary)
]


@pytest.fixture
def given(name: str, material: Material) -> Example:
    return example(name, material)


def assert_same(left: pd.DataFrame, right: pd.DataFrame, atol: float = 0.0) -> None:
    """Same columns and rows; vectors and scores within ``atol``, all else exactly."""
    assert list(left.columns) == list(right.columns)
    assert len(left) == len(right)
    for name in left.columns:
        ours, theirs = left[name].tolist(), right[name].tolist()
        if ours and isinstance(ours[0], np.ndarray):
            np.testing.assert_allclose(np.stack(ours), np.stack(theirs), rtol=0, atol=atol)
        elif name == "score":
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
        else:
            assert ours == theirs, name


def in_query_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the frame with its queries in the order of QIDS, rows of a query as they stand."""
    place = frame["qid"].map(QIDS.index).to_numpy()
    return frame.iloc[np.argsort(place, kind="stable")].reset_index(drop=True)


# The twelve


@pytest.mark.parametrize("name", NAMES)
def test_empty_frame_gives_empty_frame_with_the_declared_columns(given: Example) -> None:
    """Q6, B3: zero rows keep columns and dtypes."""
    out = given.stage.transform(given.frame.head(0))
    assert len(out) == 0
    assert list(out.columns) == given.stage.outputs(list(given.frame.columns))
    full = given.stage.transform(given.frame)
    assert out.dtypes.to_dict() == full.dtypes.to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_full_frame_gives_the_declared_columns(given: Example) -> None:
    out = given.stage.transform(given.frame)
    assert list(out.columns) == given.stage.outputs(list(given.frame.columns))


@pytest.mark.parametrize("name", NAMES)
def test_input_frame_is_unchanged(given: Example) -> None:
    before = pickle.dumps(plain(given.frame))
    given.stage.transform(given.frame)
    assert pickle.dumps(plain(given.frame)) == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_shuffled_rows_give_the_same_output(given: Example, seed: int) -> None:
    shuffled = given.frame.sample(frac=1, random_state=seed)
    out = in_query_order(given.stage.transform(shuffled))
    assert_same(out, given.stage.transform(given.frame), given.atol)


@pytest.mark.parametrize("name", NAMES)
def test_queries_keep_their_order_and_none_is_lost(given: Example) -> None:
    """Q11."""
    out = given.stage.transform(given.frame.iloc[::-1])
    expected = list(dict.fromkeys(given.frame["qid"].iloc[::-1]))
    assert list(dict.fromkeys(out["qid"])) == expected


@pytest.mark.parametrize("name", FEEDBACK)
def test_query_without_documents_is_unchanged(name: str, given: Example) -> None:
    """Q4, Q7."""
    lost = given.frame[given.frame["qid"] != QIDS[2]]
    queries = queries_of(given.frame)
    out = given.stage.transform(lost, queries)
    assert list(out["qid"]) == QIDS
    before = queries[queries["qid"] == QIDS[2]][query_columns(queries.columns)]
    assert_same(out[out["qid"] == QIDS[2]][list(before.columns)], before)


@pytest.mark.parametrize("name", FEEDBACK)
def test_fb_docs_zero_is_identity(name: str, given: Example) -> None:
    stage = replace(given.stage, **zero(given.stage))
    out = stage.transform(given.frame)
    before = queries_of(given.frame)
    assert_same(out[list(before.columns)], before)


def zero(stage: Transformer) -> dict[str, Any]:
    """fb_docs=0, and no negative side, which a stage may refuse to have alone."""
    negative = {"gamma": 0.0} if hasattr(stage, "gamma") else {}
    last = {"neg_docs": 0} if isinstance(stage, prf.Rocchio | prf.SparseRocchio) else {}
    return {"fb_docs": 0, **negative, **last}


@pytest.mark.parametrize(("name", "field"), BOUNDED)
def test_number_out_of_range_is_refused_at_construction(given: Example, field: str) -> None:
    """B4: negative numbers are not Python slices here."""
    with pytest.raises(SpecError, match=f"{field} is -1; it must be at least"):
        replace(given.stage, **{field: -1})


@pytest.mark.parametrize("name", NAMES)
def test_all_queries_at_once_equal_one_by_one(given: Example) -> None:
    """Q7, P7, B5."""
    parts = [given.stage.transform(given.frame[given.frame["qid"] == qid]) for qid in QIDS]
    one_by_one = pd.concat(parts, ignore_index=True)
    assert_same(given.stage.transform(given.frame), one_by_one, given.atol)


@pytest.mark.parametrize("name", NAMES)
def test_twice_gives_the_same(given: Example) -> None:
    assert_same(given.stage.transform(given.frame), given.stage.transform(given.frame))


@pytest.mark.parametrize("name", NAMES)
def test_repr_evaluates_to_the_same_stage(given: Example) -> None:
    assert eval(repr(given.stage), {**PARTS, **REGISTRY}) == given.stage


@pytest.mark.parametrize("name", NAMES)
def test_repr_shows_only_values_that_differ_from_the_default(name: str, given: Example) -> None:
    """A10. Also notices a forgotten ``repr=False``."""
    assert type(given.stage).__repr__ in (Transformer.__repr__, _Nary.__repr__)


@pytest.mark.parametrize("name", NAMES)
def test_yaml_round_trip(given: Example) -> None:
    assert loads(dumps(given.stage)) == given.stage


@pytest.mark.parametrize("name", NAMES)
def test_yaml_round_trip_with_defaults(given: Example) -> None:
    assert loads(dumps(given.stage, defaults=True)) == given.stage


@pytest.mark.parametrize("name", NAMES)
def test_pickle_round_trip_has_the_same_hash(given: Example) -> None:
    again = pickle.loads(pickle.dumps(given.stage))
    assert again == given.stage
    assert hash(again) == hash(given.stage)


@pytest.mark.parametrize(("name", "needed"), NEEDED)
def test_missing_column_is_named_with_who_provides_it(given: Example, needed: str) -> None:
    """A4."""
    frame = given.frame.drop_duplicates("qid").drop(columns=[needed, "text"], errors="ignore")
    with pytest.raises(FrameError) as caught:
        given.stage.transform(frame)
    assert repr(given.stage) in str(caught.value)
    assert needed in str(caught.value)
    assert PROVIDERS.get(needed, "add a column" if needed in ("qid", "query") else "") in str(
        caught.value
    )


@pytest.mark.parametrize(("name", "needed"), NEEDED)
def test_missing_column_is_found_without_running(given: Example, needed: str) -> None:
    columns = [name for name in given.frame.columns if name not in (needed, "text")]
    with pytest.raises(FrameError, match=needed):
        given.stage.outputs(columns)


@pytest.mark.parametrize("name", NAMES)
def test_odd_identifiers_pass_unchanged(given: Example, material: Material) -> None:
    """D1, D2, D7."""
    out = given.stage.transform(given.frame)
    assert set(out["qid"]) == set(given.frame["qid"])
    docnos = set(out.get("docno", pd.Series(dtype=object)))
    assert docnos <= {docno for docno, _ in material.docs}
    assert all(type(value) is str for value in [*out["qid"], *docnos])


@pytest.mark.parametrize(("name", "field", "kind"), NUMBERS)
def test_numpy_numbers_are_taken_as_python_numbers(given: Example, field: str, kind: Any) -> None:
    value = getattr(given.stage, field)
    stage = replace(given.stage, **{field: kind(value)})
    assert type(getattr(stage, field)) is type(value)
    assert getattr(stage, field) == pytest.approx(value)


@pytest.mark.parametrize(("name", "field"), REALS)
def test_whole_number_passes_for_a_real_one(given: Example, field: str) -> None:
    assert type(getattr(replace(given.stage, **{field: 1}), field)) is float


# What is written about a stage


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_says_the_declared_columns(given: Example) -> None:
    doc = type(given.stage).__doc__ or ""
    needs = re.search(r"^\s*Needs: (.*)$", doc, re.M)
    gives = re.search(r"^\s*Gives: (.*)$", doc, re.M)
    assert needs, "docstring has no line Needs:"
    assert gives, "docstring has no line Gives:"
    assert needs[1].split(", ") == list(given.stage.needs)
    assert gives[1].split(", ") == given.stage.outputs(given.stage.needs)


@pytest.mark.parametrize("name", STAGES)
def test_docstring_names_its_source_or_there_is_none(name: str) -> None:
    assert ("Source: " in (STAGES[name].__doc__ or "")) != (name in NO_SOURCE)


@pytest.mark.parametrize("name", NAMES)
def test_explain_reads_nothing(given: Example) -> None:
    steps = explain(given.stage, list(given.frame.columns))
    assert steps[-1].stage


def test_every_registered_stage_has_an_example() -> None:
    assert set(STAGES) <= set(EXAMPLES)


def test_stage_without_example_fails_and_says_what_to_add(material: Material) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"add \"Novel\".* tests/contract.py"):
        example("Novel", material)


# A stage of a user's own file


def test_user_stage_works_after_an_operator(material: Material) -> None:
    frame = EXAMPLES["WeightedAverage"](material).frame
    out = (prf.Cutoff(DEPTH) >> WeightedAverage(2)).transform(frame)
    assert not is_results(out)
    assert list(out["qid"]) == QIDS


def test_user_stage_works_in_yaml() -> None:
    assert loads("[{Cutoff: 5}, {WeightedAverage: {fb_docs: 2}}]") == prf.Cutoff(
        5
    ) >> WeightedAverage(2)


def test_user_stage_is_explained() -> None:
    columns = ["qid", "query", "query_vec", "docno", "score", "doc_vec"]
    steps = explain(prf.Cutoff(5) >> WeightedAverage(2), columns)
    assert steps[1].columns_out == ("qid", "query", "query_vec")


def test_user_stage_is_suggested_for_a_misspelt_name() -> None:
    with pytest.raises(SpecError, match="did you mean 'WeightedAverage'"):
        loads("WeightedAvrage")


def test_two_stages_of_one_name_are_refused_naming_both_modules() -> None:
    with pytest.raises(
        SpecError, match=r"'Rocchio': in prf\.feedback\.vector and in test_contract"
    ):
        type("Rocchio", (Transformer,), {"__module__": "test_contract"})

"""A part of pipelines/RESULTS.md is measured anew; its tables come from one script."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from reference import NFCORPUS, ROOT, needs_data

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import results
import results_prp
import results_training

TRAINING = results_training.FILE.read_text(encoding="utf-8")
FILE = (ROOT / "pipelines" / "RESULTS.md").read_text(encoding="utf-8")


@pytest.mark.java
@pytest.mark.slow
@needs_data
@pytest.mark.filterwarnings("ignore:queries that match no document:prf.errors.PrfWarning")
def test_second_pass_on_nfcorpus_is_what_the_file_says(tmp_path: Path) -> None:
    assert results.second_pass(results.Indexes(tmp_path), [NFCORPUS]) in FILE


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        pytest.param(FILE, [*results.TABLES, results_prp.NAME], id="RESULTS.md"),
        pytest.param(TRAINING, [*results_training.SECTIONS, "fingerprints"], id="TRAINING.md"),
    ],
)
def test_file_holds_the_tables_of_the_script_and_no_others(text: str, tables: list[str]) -> None:
    names = [line[5:-4] for line in text.splitlines() if line.startswith("<!-- ")]
    assert [name for name in names if not name.startswith("/")] == tables
    assert sorted(names) == sorted([*tables, *(f"/{name}" for name in tables)])


@needs_data
def test_table_of_erring_judges_is_of_this_code() -> None:
    """If this fails, run tests/bench/results_prp.py again."""
    assert results_prp.fingerprints() in FILE


def said() -> dict[str, object]:
    found = re.search(r"```json\n(.*)\n```\n<!-- /fingerprints -->", TRAINING, re.S)
    assert found
    made: dict[str, object] = json.loads(found[1])
    return made


def test_trained_figures_are_of_this_code_and_these_configs() -> None:
    """If this fails, what was changed may change the figures: `make results-training`."""
    ours = results_training.fingerprints()
    assert {name: value for name, value in said().items() if name in ours} == ours


@needs_data
def test_trained_figures_are_of_this_data(tmp_path: Path) -> None:
    assert said()["data"] == results_training.data_fingerprints()
    models = results_training.Models(tmp_path)
    assert said()["prepared"] == results_training.prepared_fingerprints(models)


@pytest.mark.models
@pytest.mark.slow
@needs_data
def test_control_without_feedback_trained_anew_gives_what_the_file_says(tmp_path: Path) -> None:
    """Rounding differs between machines, and training makes more of it; seeds differ more."""
    models = results_training.Models(tmp_path)
    bench = results_training.Bench(NFCORPUS, models)
    kind = results_training.KINDS["tprf-gentle"]
    results_training.KINDS["tprf-gentle"] = kind._replace(seeds=1)
    try:
        name = "no feedback (vectors, gentle)"
        found = bench.trained("tprf-gentle", 0, name).seeds[0].mean
    finally:
        results_training.KINDS["tprf-gentle"] = kind
    row = re.search(rf"\| {re.escape(name)} \| (.*\(.* to .*\).*) \|", TRAINING)
    assert row
    for value, cell in zip(found, row[1].split(" | ")[:4], strict=True):
        low, high = (float(x) for x in re.findall(r"[0-9.]+", cell)[1:])
        assert low - 0.01 <= value <= high + 0.01

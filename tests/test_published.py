"""``prf evaluate`` gives the figures that are known of published runs, to four decimals."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import reference
from reference import POOL, SHARED, figure, readme_table

from prf.cli import main

pytestmark = reference.needs_data

RUNS = readme_table("published R@100")
CACM = readme_table("P@30")


def evaluate(
    capsys: pytest.CaptureFixture[str], qrels: Path, run: Path, measures: list[str]
) -> dict[str, float]:
    """Returns what the command prints for one run, rounded to four decimals."""
    options = [part for name in measures for part in ("--measure", name)]
    with warnings.catch_warnings():  # main() changes how warnings are shown
        code = main(["evaluate", str(qrels), str(run), "--format", "json", *options])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    (system,) = json.loads(printed.out)["systems"]
    assert system["name"] == run.name.removesuffix(".trec.gz")
    return {name: round(value, 4) for name, value in system["mean"].items()}


def test_tables_are_complete() -> None:
    assert len(RUNS) == 12
    assert len(CACM) == 2


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row["run"])
@pytest.mark.parametrize("judged", ["full", "pool", "retrieved"])
def test_published_run(
    row: dict[str, str], judged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    track = row["run"].split(".")[0]
    found = evaluate(
        capsys,
        SHARED / POOL / f"qrels.{track}.{judged}.txt",
        SHARED / POOL / "runs" / f"{row['run']}.trec.gz",
        ["nDCG@10", "R(rel=2)@100", "AP(rel=2)"],
    )
    assert found == {
        "nDCG@10": figure(row[f"{judged}: nDCG@10"]),
        "R(rel=2)@100": figure(row[f"{judged}: R@100"]),
        "AP(rel=2)": figure(row[f"{judged}: AP"]),
    }
    if judged == "full":
        for measure, column in [("nDCG@10", "nDCG@10"), ("R(rel=2)@100", "R@100")]:
            published = row[f"published {column}"]
            assert not published or found[measure] == figure(published)


@pytest.mark.parametrize("row", CACM, ids=lambda row: row["qrels"].split("`")[1])
def test_cacm_run(row: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    name = row["qrels"].split("`")[1]
    run = SHARED / "cacm" / "runs" / "bm25.trec.gz"
    measures = ["nDCG@10", "AP", "P@30"]
    found = evaluate(capsys, SHARED / "cacm" / name, run, measures)
    assert found == {measure: figure(row[measure]) for measure in measures}

"""A part of pipelines/RESULTS.md is measured anew; its tables come from one script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from reference import NFCORPUS, ROOT, needs_data

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import results

OTHERS = ("prp",)
"""Sections that scripts of their own write."""

FILE = (ROOT / "pipelines" / "RESULTS.md").read_text(encoding="utf-8")


@pytest.mark.java
@pytest.mark.slow
@needs_data
@pytest.mark.filterwarnings("ignore:queries that match no document:prf.errors.PrfWarning")
def test_second_pass_on_nfcorpus_is_what_the_file_says(tmp_path: Path) -> None:
    assert results.second_pass(results.Indexes(tmp_path), [NFCORPUS]) in FILE


def test_file_holds_the_tables_of_the_script_and_no_others() -> None:
    names = [line[5:-4] for line in FILE.splitlines() if line.startswith("<!-- ")]
    known = [*results.TABLES, *OTHERS]
    assert [name for name in names if not name.startswith("/")] == known
    assert sorted(names) == sorted([*known, *(f"/{name}" for name in known)])

"""What the README says is what happens."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import yaml

from prf.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HEAVY = (pytest.mark.java, pytest.mark.models, pytest.mark.slow)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def heavy(test):
    for mark in HEAVY:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Returns where the demo ran and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["demo", "--dir", str(folder), "--no-progress"]) == 0
    return folder, out.getvalue()


@heavy
def test_table_is_what_the_demo_prints(demo: tuple[Path, str]) -> None:
    shown = re.search(r"<!-- demo -->\n```\n(.*?)```", README, flags=re.DOTALL)[1]
    printed = demo[1]
    assert shown.strip() == printed[: printed.index("\n\nq")].strip()


@heavy
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_block_runs(demo: tuple[Path, str], number: int, monkeypatch, capsys) -> None:
    monkeypatch.chdir(demo[0])
    code = blocks("python")[number]
    # A class that registers itself may be defined once in a process; the tests define this one too.
    code = code.replace("class WeightedAverage", "class ReadmeAverage")
    exec(compile(code, f"README.md, block {number}", "exec"), {"__name__": "__main__"})
    assert "Traceback" not in capsys.readouterr().err


@heavy
def test_dense_index_from_texts_finds_the_right_one(
    demo: tuple[Path, str], monkeypatch, capsys
) -> None:
    """I2."""
    monkeypatch.chdir(demo[0])
    code = next(block for block in blocks("python") if "build_dense" in block)
    exec(code.replace("indexes/two", "indexes/two-again"), {})
    assert capsys.readouterr().out.strip() == "Bees dance to show where food is."


def test_yaml_block_is_the_shipped_file() -> None:
    shipped = yaml.safe_load((ROOT / "pipelines" / "dense_prf.yaml").read_text(encoding="utf-8"))
    assert yaml.safe_load(blocks("yaml")[0]) == shipped


def test_exit_codes_are_those_of_the_errors() -> None:
    from prf import errors

    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)}
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    known = {c.exit_code for c in classes if issubclass(c, errors.PrfError)}
    assert listed == known | {130}


def test_every_stage_is_named() -> None:
    from prf.pipeline import REGISTRY
    from prf.spec import _register_all

    _register_all()
    shipped = {name for name, stage in REGISTRY.items() if stage.__module__.startswith("prf.")}
    operators = {"Compose", "Cutoff", "Scale", "Sum", "Union", "Intersection", "Concatenate"}
    named = set(re.findall(r"`(\w+)`", README))
    assert shipped - operators - {"Features"} - named == set()


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [
        link for link in links if not link.startswith("http") and not (ROOT / link).exists()
    ] == []

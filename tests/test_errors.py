"""The exception tree, optional imports, and the small helpers of messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from prf import (
    EvaluationError,
    FileFormatError,
    FrameError,
    IndexStateError,
    MissingDependency,
    PrfError,
    SpecError,
)
from prf.errors import did_you_mean, require, shorten

CODES = [
    (PrfError, 1),
    (SpecError, 2),
    (FrameError, 3),
    (FileFormatError, 4),
    (IndexStateError, 5),
    (MissingDependency, 6),
    (EvaluationError, 7),
]


@pytest.mark.parametrize(("error", "code"), CODES)
def test_every_error_has_its_own_exit_code(error: type[PrfError], code: int) -> None:
    assert error.exit_code == code
    assert issubclass(error, PrfError)


@pytest.mark.parametrize(
    ("error", "plain"), [(SpecError, ValueError), (MissingDependency, ImportError)]
)
def test_error_is_also_pythons_own(error: type[PrfError], plain: type[Exception]) -> None:
    assert issubclass(error, plain)


def test_missing_module_names_the_extra() -> None:
    """I1."""
    with pytest.raises(MissingDependency) as caught:
        require("no_such_module.part", "cpu", "encoding")
    assert str(caught.value) == (
        "encoding needs 'no_such_module', which is not installed; run: pip install \"prf-ir[cpu]\""
    )


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise ImportError('wrong numpy')", ImportError),
        ("import no_such_module", ModuleNotFoundError),
        ("raise OSError('no such library')", OSError),
    ],
)
def test_installed_module_that_fails_is_not_called_missing(
    body: str, cause: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I10: the import error of an installed extra is passed on as the cause."""
    (tmp_path / "prf_broken.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependency, match="installed but does not import") as caught:
        require("prf_broken", "cpu", "encoding")
    assert isinstance(caught.value.__cause__, cause)


def test_installed_module_is_returned() -> None:
    assert require("json", "cpu", "this").__name__ == "json"


def test_nothing_close_gives_no_hint() -> None:
    assert did_you_mean("xyz", ["Rocchio"]) == ""


def test_long_value_is_cut() -> None:
    assert len(shorten("x" * 1000)) == 60

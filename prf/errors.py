"""The exception tree; the number is the exit code of the command line.

    PrfError            1   anything this package raises on purpose
      SpecError         2   a bad pipeline, argument or option (also a ValueError)
      FrameError        3   a frame with wrong columns, types or duplicate keys
      FileFormatError   4   a missing, unreadable or malformed file
      IndexStateError   5   an index that is missing, incomplete or does not fit
      MissingDependency 6   an extra, Java or a device that is not there (also an ImportError)
      EvaluationError   7   runs and judgments that cannot be compared

A message says where (stage, file and line, query), what was found, and what to do.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from types import ModuleType
from typing import Any, ClassVar


class PrfError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code: ClassVar[int] = 1

    def put_first(self, where: str) -> None:
        """Puts where it happened in front of the message."""
        self._say(where + str(self))

    def drop_first(self, text: str) -> bool:
        """Takes ``text`` off the front of the message if a position ``[`` follows it."""
        if not str(self).startswith(f"{text}["):
            return False
        self._say(str(self).removeprefix(text))
        return True

    def _say(self, message: str) -> None:
        self.args = (message,)


class SpecError(PrfError, ValueError):
    """A pipeline, argument or option that means nothing."""

    exit_code = 2


class FrameError(PrfError):
    """A frame whose columns, types or keys are not what a stage needs."""

    exit_code = 3
    missing: tuple[str, ...] = ()
    """The missing columns, if that is the trouble."""


class FileFormatError(PrfError):
    """A file that is missing, unreadable or not in the format it should have."""

    exit_code = 4


class IndexStateError(PrfError):
    """An index that is missing, incomplete, damaged or of another shape."""

    exit_code = 5


class MissingDependency(PrfError, ImportError):  # noqa: N818  (reads better than ...Error)
    """An optional library, Java runtime or device that is not there."""

    exit_code = 6

    def _say(self, message: str) -> None:
        self.args = (message,)
        self.msg = message  # what an ImportError prints


class EvaluationError(PrfError):
    """A run and judgments that cannot be put together."""

    exit_code = 7


class PrfWarning(UserWarning):
    """Something the user should know that does not stop the work; once per run, with counts."""


def require(module: str, extra: str, why: str) -> ModuleType:
    """Imports an optional module, or says which extra brings it.

    Args:
        module: Import name, dotted allowed.
        extra: The extra of this package that installs it.
        why: What needs it, for the message.

    Raises:
        MissingDependency: If it is not installed. If it is installed but fails to import, the
            message says so and the original error is the cause.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] == error.name.split(".")[0]:
            raise MissingDependency(
                f"{why} needs '{module.split('.')[0]}', which is not installed; "
                f'run: pip install "prf-ir[{extra}]"'
            ) from error
        raise MissingDependency(
            f"{why}: '{module}' is installed but does not import: {error}"
        ) from error
    except (ImportError, OSError) as error:
        raise MissingDependency(
            f"{why}: '{module}' is installed but does not import: {error}"
        ) from error


def did_you_mean(name: str, known: Any) -> str:
    """Returns ``; did you mean 'x'?`` for the closest known name, or an empty string.

    >>> did_you_mean("Rochio", ["Rocchio", "RM3"])
    "; did you mean 'Rocchio'?"
    """
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def shorten(value: object, limit: int = 60) -> str:
    """Returns repr(value), cut to ``limit`` characters, for messages."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"

"""Who answers: the base of all backends, and a plain Python function.

A backend is a value that a stage holds, like a stage itself: arguments are fields are YAML keys,
and nothing heavy happens before `Backend.open`. What it opens, a *session*, is kept and used by
every run in the process.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

from prf.errors import PrfError, SpecError, shorten
from prf.pipeline import Part, Resource
from prf.prp.answers import Answer, Question

Batch = list[tuple[int, Answer | PrfError]]
"""Answers with the positions of their questions; an error where no try brought an answer."""


class Session:
    """An opened backend.

    Attributes:
        counters: What happened since it was opened: ``batches``, ``padded_tokens``, ``retries``,
            ``failures``.
        fingerprint: What tells its weights from others under the same name; "" if nothing does.
    """

    fingerprint: str = ""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def tokens(self, questions: Sequence[Question]) -> list[int]:
        """Returns how many tokens each question and its answer take, or an estimate; (n,)."""
        return [0] * len(questions)

    def ask(self, questions: Sequence[Question]) -> Iterator[Batch]:
        """Yields the answers in batches, in any order, each once."""
        raise NotImplementedError


class Backend(Part, abstract=True):
    """Base of what compares two passages; `open` gives the `Session` that does it."""

    @property
    def has_margins(self) -> bool:
        """Whether answers say by how much a passage is better."""
        return True

    @property
    def prices(self) -> tuple[float, float] | None:
        """Price of a million tokens read, and written; None if not known."""
        return None

    def identity(self) -> dict[str, Any] | None:
        """Returns all that decides an answer besides the texts; None if nothing can say it."""
        raise NotImplementedError

    def open(self) -> Session:
        """Returns the session, opened once in this process."""
        return _opened(self, self.stamp)

    @property
    def stamp(self) -> tuple[object, ...]:
        """What tells that files behind the backend have changed, so that it is opened anew."""
        return ()

    def session(self) -> Session:
        """Opens anew."""
        raise NotImplementedError

    def resources(self) -> list[Resource]:
        """Returns what is opened on first use."""
        return []


@lru_cache(maxsize=4)
def _opened(backend: Backend, stamp: tuple[object, ...]) -> Session:
    return backend.session()


# A Python function


@dataclass(frozen=True, repr=False)
class Judge(Backend):
    """Compares by a Python function of query, first and second passage.

    The function returns a number, larger for a better first passage: above 0 the first wins, below
    0 the second, 0 is a tie; None is no verdict. For rules of consistency the number counts as the
    logarithm of the odds.

    Args:
        function: ``module:name`` of a function that can be imported, or the function itself. Only
            the first has a YAML form and may be used with a cache on disk; give the functions a
            new name when they change, as the cache knows them by it.
    """

    function: Any

    def check(self) -> None:
        if isinstance(self.function, str):
            module, colon, name = self.function.partition(":")
            if not (colon and module and name):
                raise SpecError(
                    f"Judge.function is {self.function!r}; write 'module:name' or give a function"
                )
        elif not callable(self.function):
            raise SpecError(
                f"Judge.function must be a function or 'module:name', not {shorten(self.function)}"
            )

    def identity(self) -> dict[str, Any] | None:
        return {"backend": "Judge", "model": self.function} if self._named else None

    @property
    def _named(self) -> bool:
        return isinstance(self.function, str)

    def session(self) -> Session:
        return _JudgeSession(self._function(), str(self.function))

    def _function(self) -> Callable[[str, str, str], Any]:
        if not self._named:
            return self.function  # type: ignore[no-any-return]
        module, _, name = self.function.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise SpecError(f"Judge.function {self.function!r} is not there: {error}") from error
        if not callable(found):
            raise SpecError(f"Judge.function {self.function!r} is {shorten(found)}, no function")
        return found  # type: ignore[no-any-return]


class _JudgeSession(Session):
    CHUNK = 256

    def __init__(self, function: Callable[[str, str, str], Any], name: str) -> None:
        super().__init__()
        self._function, self._name = function, name

    def ask(self, questions: Sequence[Question]) -> Iterator[Batch]:
        for start in range(0, len(questions), self.CHUNK):
            self.counters["batches"] += 1
            part = questions[start : start + self.CHUNK]
            yield [(start + i, self._answer(question)) for i, question in enumerate(part)]

    def _answer(self, question: Question) -> Answer:
        try:
            value = self._function(*question)
        except Exception as error:
            raise PrfError(
                f"Judge {self._name} fails for query {shorten(question.query)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if value is None:
            return Answer(0, valid=False)
        if not isinstance(value, Real) or math.isnan(float(value)):
            raise PrfError(
                f"Judge {self._name} returns {shorten(value)} for query {shorten(question.query)}; "
                "it must return a number, or None for no verdict"
            )
        margin = float(value)
        return Answer((margin > 0) - (margin < 0), margin=margin)

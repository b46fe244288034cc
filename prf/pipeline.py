"""Stages as values, and the operators that join them into pipelines.

A stage is a frozen dataclass: constructor arguments are fields are YAML keys. Building, printing
and comparing a pipeline opens nothing; indexes and models are opened on first use.

    >>  Compose        then
    %   Cutoff         keep the first k
    *   Scale          multiply scores
    +   Sum            add scores; a document missing on one side counts 0 there
    |   Union          documents of any side, by best rank
    &   Intersection   documents of all sides, by worst rank
    ^   Concatenate    the left list, then what only the right one has
    **  Features       scores of several rerankers side by side

Python's precedence holds: ``a | b >> c`` is ``a | (b >> c)``; printed pipelines show the
parentheses.
"""

from __future__ import annotations

import os
import time
import types
import typing
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import pandas as pd
import pyterrier as pt

from prf.errors import FrameError, PrfError, PrfWarning, SpecError, shorten
from prf.frames import (
    attach_queries,
    head,
    is_results,
    missing_error,
    need,
    normalise,
    queries_of,
    query_columns,
    ranked,
)

REGISTRY: dict[str, type[Transformer]] = {}
"""Every stage class by name; filled as classes are defined."""

PARTS: dict[str, type[Part]] = {}
"""Every class by name that stages hold as an argument and that is no stage itself."""


# Arguments


@dataclass(frozen=True)
class AtLeast:
    """A lower bound on a numeric argument, used in an annotation."""

    low: int


Count = Annotated[int, AtLeast(1)]
"""A whole number from 1: how many documents a retriever returns, a batch size."""

Depth = Annotated[int, AtLeast(0)]
"""A whole number from 0: how many documents feedback reads, 0 for none; threads, 0 for all."""


def _hints(cls: type[Part]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _mismatch(value: object, kind: str, where: str) -> SpecError:
    hint = ""
    if isinstance(value, str) and kind in ("int", "float"):
        try:
            hint = (
                f" (in YAML write {float(value):g} without quotes, with a dot before any exponent)"
            )
        except ValueError:
            pass
    return SpecError(f"{where} must be {kind}, not {shorten(value)}{hint}")


def check_value(value: Any, hint: Any, where: str) -> Any:
    """Returns an argument in its declared type (numpy numbers as Python's, paths as text).

    Raises:
        SpecError: If it is of another type or out of range; the message names the argument.
    """
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        value = check_value(value, options[0], where)
        for bound in options[1:]:
            if isinstance(bound, AtLeast) and value < bound.low:
                raise SpecError(f"{where} is {value}; it must be at least {bound.low}")
        return value
    if origin is Literal:
        if value in options and isinstance(value, type(options[options.index(value)])):
            return value
        raise SpecError(f"{where} is {shorten(value)}; one of {', '.join(map(repr, options))}")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return check_value(value, next(o for o in options if o is not type(None)), where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _mismatch(value, "a list", where)
        return tuple(check_value(v, options[0], f"{where}[{i}]") for i, v in enumerate(value))
    return _check_plain(value, hint, where)


def _check_plain(value: Any, hint: Any, where: str) -> Any:
    if hint is bool:
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        raise _mismatch(value, "true or false", where)
    if hint is int:
        if isinstance(value, Integral) and not isinstance(value, (bool, np.bool_)):
            return int(value)
        raise _mismatch(value, "int", where)
    if hint is float:
        if isinstance(value, Real) and not isinstance(value, (bool, np.bool_)):
            if not np.isfinite(float(value)):
                raise SpecError(f"{where} is {value}; it must be a finite number")
            return float(value)
        raise _mismatch(value, "float", where)
    if hint is str:
        if isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
        raise _mismatch(value, "text", where)
    if isinstance(hint, type) and issubclass(hint, pt.Transformer):
        if isinstance(value, pt.Transformer):
            return value
        raise _mismatch(value, "a stage", where)
    if isinstance(hint, type) and issubclass(hint, Part):
        if isinstance(value, hint):
            return value
        raise _mismatch(value, f"one of {', '.join(parts_of(hint))}", where)
    return value


# What a run reports about itself


@dataclass
class Log:
    """What happened while a pipeline ran: seconds per stage, and queries worth a notice.

    ``figures`` holds what a stage measured, one mapping for each query, by the stage's name.
    ``progress`` asks stages that take long to show a bar on stderr.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    notices: dict[str, list[str]] = field(default_factory=dict)
    figures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    progress: bool = False


_LOG: ContextVar[Log | None] = ContextVar("prf_log", default=None)


@contextmanager
def logging_to(log: Log) -> Iterator[Log]:
    """Collects seconds and notices of every pipeline run inside the block in ``log``."""
    token = _LOG.set(log)
    try:
        yield log
    finally:
        _LOG.reset(token)


def shows_progress() -> bool:
    """Tells whether the run that is going on was asked to show how far it is."""
    log = _LOG.get()
    return log is not None and log.progress


def notice(what: str, qids: Sequence[str]) -> None:
    """Tells about some queries: to the log of the run, or as one `PrfWarning` without a log."""
    if not qids:
        return
    log = _LOG.get()
    if log is not None:
        log.notices.setdefault(what, []).extend(qids)
    else:
        warnings.warn(notice_text(what, qids), PrfWarning, stacklevel=3)


def figures(stage: str, rows: Sequence[dict[str, Any]]) -> None:
    """Gives what a stage measured of each query to the log of the run, if there is one."""
    log = _LOG.get()
    if log is not None:
        log.figures.setdefault(stage, []).extend(rows)


def notice_text(what: str, qids: Sequence[str]) -> str:
    """Returns one line with count and the first few queries; ``what`` ends "queries that ..."."""
    shown = ", ".join(qids[:5]) + (", ..." if len(qids) > 5 else "")
    return f"queries that {what}: {len(qids)} ({shown})"


@dataclass(frozen=True)
class Resource:
    """Something a stage opens on first use: shown by ``explain``, never opened by it."""

    kind: str
    name: str
    path: str | None = None

    def __str__(self) -> str:
        if self.path is None:
            return f"{self.kind} {self.name}"
        path = os.path.abspath(self.path)
        return f"{self.kind} {path}" + ("" if os.path.exists(path) else " (not there)")


# The base class


class Part:
    """A value with checked arguments: constructor arguments are fields are YAML keys.

    Stages are parts; so is what a stage holds without being one, such as a language model. A
    subclass is a frozen dataclass with ``repr=False``, known by its class name in YAML; a base
    class says ``abstract=True``.
    """

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not abstract and not cls.__name__.startswith("_"):
            cls._register()

    @classmethod
    def _register(cls) -> None:
        PARTS[cls.__name__] = cls

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for item in fields(self):  # type: ignore[arg-type]  # a dataclass
            value = getattr(self, item.name)
            checked = check_value(value, hints[item.name], f"{type(self).__name__}.{item.name}")
            object.__setattr__(self, item.name, checked)
        self.check()

    def check(self) -> None:
        """Refuses arguments that do not go together; types and bounds are already checked."""

    def __repr__(self) -> str:
        shown = []
        for item in fields(self):  # type: ignore[arg-type]  # a dataclass
            value = getattr(self, item.name)
            if item.default is MISSING and item.default_factory is MISSING:
                shown.append(repr(value))
            elif value != item.default:
                shown.append(f"{item.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def parts_of(base: type[Part]) -> list[str]:
    """Returns the names of the parts that derive from ``base``."""
    return sorted(name for name, cls in PARTS.items() if issubclass(cls, base))


class Transformer(Part, pt.Transformer, abstract=True):  # type: ignore[misc]
    """A value that turns a frame into a frame; base of every stage.

    A subclass is a frozen dataclass with ``repr=False`` that implements `run` and declares the
    columns it reads in ``needs`` and those it adds in ``gives``. It is then known by its class name
    in YAML; a base class that is no stage itself says ``abstract=True``. `check` may refuse values;
    nothing heavy happens before `run`.
    """

    needs: ClassVar[tuple[str, ...]] = ("qid",)
    gives: ClassVar[tuple[str, ...]] = ()
    spec_form: ClassVar[Literal["mapping", "scalar", "list"]] = "mapping"
    __array_ufunc__ = None  # so that numpy leaves np.float32(0.5) * stage to us

    @classmethod
    def _register(cls) -> None:
        other = REGISTRY.get(cls.__name__)
        if other is not None and (other.__module__, other.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise SpecError(
                f"two stages are named '{cls.__name__}': in {other.__module__} and in "
                f"{cls.__module__}; rename one"
            )
        REGISTRY[cls.__name__] = cls

    # Running

    def transform(self, inp: pd.DataFrame, queries: pd.DataFrame | None = None) -> pd.DataFrame:
        """Returns the output frame; the input is never changed.

        Args:
            inp: A query or result frame; rows in any order, identifiers as text or whole numbers.
            queries: The query frame that led here; lets feedback keep queries without results.

        Raises:
            FrameError: For missing columns, repeated keys, or scores that are not finite.
        """
        if queries is not None:
            queries = normalise(queries, f"{self!r}, queries")
        return self.apply(normalise(inp, repr(self)), queries)

    def apply(self, frame: pd.DataFrame, queries: pd.DataFrame | None = None) -> pd.DataFrame:
        """Like `transform`, for a frame that is already normalised."""
        with self.named():
            need(frame, self.needs, repr(self))
            return self.run(frame, queries)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Puts the stage in front of an error's message, unless it says where already."""
        try:
            yield
        except PrfError as error:
            if not str(error).startswith((repr(self), "pipeline[")):
                error.put_first(f"{self!r}: ")
            raise

    def step(
        self, frame: pd.DataFrame, queries: pd.DataFrame | None
    ) -> tuple[pd.DataFrame, pd.DataFrame | None]:
        """Returns the output frame and the latest query frame behind it."""
        out = self.apply(frame, queries)
        return out, queries if is_results(out) else out

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        """Does the work on a normalised frame that has the needed columns."""
        raise NotImplementedError

    # What a pipeline asks its stages

    @property
    def depth(self) -> int | None:
        """How many of the first documents of each query are read; None for all."""
        return None

    @property
    def rowwise(self) -> bool:
        """Whether each row is treated by itself and order kept, so that a cut may come first."""
        return False

    def cut(self, k: int) -> Self:
        """Returns a stage that may stop after the first k documents of each query."""
        return self

    def at_most(self, documents: int | None) -> int | None:
        """Returns how many documents a query has at most after this stage; None if not known.

        Args:
            documents: The same before it; None where it is not known, or for a query frame.
        """
        return documents

    def cost(self, documents: int | None) -> str:
        """Returns what a run costs for each query, if one should know that before; else "".

        Args:
            documents: How many a query has at most before this stage; None if not known.
        """
        return ""

    def outputs(self, columns: Sequence[str]) -> list[str]:
        """Returns the columns given for these input columns, without running.

        Raises:
            FrameError: If a needed column is missing.
        """
        missing = [name for name in self.needs if name not in columns]
        if missing:
            raise missing_error(missing, columns, repr(self))
        return [*columns, *(name for name in self.gives if name not in columns)]

    def resources(self) -> list[Resource]:
        """Returns what is opened on first use."""
        return []

    def check_after(self, earlier: Sequence[pt.Transformer]) -> None:
        """Refuses to run after these stages, if they do not fit; called once before a run."""

    # PyTerrier's inspection

    def transform_inputs(self) -> list[list[str]]:
        """Returns the columns this needs at least, for ``pt.inspect``."""
        columns: list[str] = []
        while True:
            try:
                self.outputs(columns)
            except FrameError as error:
                new = [name for name in error.missing if name not in columns]
                if not new:  # a later stage lacks what no input column can give
                    raise pt.inspect.InspectError(str(error)) from error
                columns.extend(new)
            else:
                return [columns]

    def transform_outputs(self, input_columns: list[str]) -> list[str]:
        """Returns the columns this gives, for ``pt.inspect``."""
        pt.validate.columns(input_columns, includes=self.transform_inputs()[0])
        return self.outputs(input_columns)

    def schematic(self, *, input_columns: list[str] | None) -> dict[str, Any]:
        """Returns what PyTerrier's drawing shows of this stage besides its usual parts.

        Without ``help_url`` PyTerrier would download the index of its own documentation.
        """
        return {"help_url": None}

    # Operators

    def __rshift__(self, other: object) -> Transformer:
        return _joined(Compose, self, other, ">>")

    def __rrshift__(self, other: object) -> Transformer:
        return _joined(Compose, other, self, ">>")

    def __add__(self, other: object) -> Transformer:
        return _joined(Sum, self, other, "+")

    def __or__(self, other: object) -> Transformer:
        return _joined(Union, self, other, "|")

    def __and__(self, other: object) -> Transformer:
        return _joined(Intersection, self, other, "&")

    def __xor__(self, other: object) -> Transformer:
        return _joined(Concatenate, self, other, "^")

    def __pow__(self, other: object) -> Transformer:
        return _joined(Features, self, other, "**")

    def __mul__(self, factor: object) -> Transformer:
        return _joined(Compose, self, Scale(factor), "*")

    __rmul__ = __mul__

    def __mod__(self, k: object) -> Transformer:
        return _joined(Compose, self, Cutoff(k), "%")

    def __invert__(self) -> Transformer:
        raise SpecError(
            "~ has no meaning here: nothing is cached silently; keep a run file with "
            "prf.write_run and read it again"
        )


def _joined(kind: type[_Nary], left: object, right: object, sign: str) -> Transformer:
    for side in (left, right):
        if not isinstance(side, pt.Transformer):
            raise SpecError(f"{sign} joins stages; {shorten(side)} is not one")
    return kind((left, right))


# Operators


@dataclass(frozen=True, repr=False)
class _Nary(Transformer):
    """Several stages joined by one operator."""

    stages: tuple[pt.Transformer, ...]

    sign: ClassVar[str] = ""
    flat: ClassVar[bool] = True
    spec_form: ClassVar[Literal["mapping", "scalar", "list"]] = "list"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flat:
            flat: list[pt.Transformer] = []
            for stage in self.stages:
                flat.extend(stage.stages if type(stage) is type(self) else [stage])
            object.__setattr__(self, "stages", tuple(flat))
        if len(self.stages) < 2:
            raise SpecError(
                f"{type(self).__name__} joins two stages or more, not {len(self.stages)}"
            )

    def __repr__(self) -> str:
        return f" {self.sign} ".join(
            f"({stage!r})" if isinstance(stage, _Nary) else repr(stage) for stage in self.stages
        )

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, number: int) -> pt.Transformer:
        return self.stages[number]

    def __iter__(self) -> Iterator[pt.Transformer]:
        return iter(self.stages)

    def transform(self, inp: pd.DataFrame, queries: pd.DataFrame | None = None) -> pd.DataFrame:
        self.check_after(())
        return super().transform(inp, queries)

    def check_after(self, earlier: Sequence[pt.Transformer]) -> None:
        for number, stage in enumerate(self.stages):
            if isinstance(stage, Transformer):
                with _placed(number):
                    stage.check_after(earlier)

    def resources(self) -> list[Resource]:
        return [r for s in self.stages if isinstance(s, Transformer) for r in s.resources()]

    @property
    def label(self) -> str:
        """What ``explain`` shows of it; its stages follow on lines of their own."""
        return type(self).__name__


def applied(
    stage: pt.Transformer, frame: pd.DataFrame, queries: pd.DataFrame | None
) -> pd.DataFrame:
    """Runs a stage, ours or PyTerrier's, on a normalised frame; returns a normalised one."""
    if isinstance(stage, Transformer):
        return stage.apply(frame, queries)
    return normalise(stage.transform(frame.copy()), repr(stage))


def _at_most(stage: pt.Transformer, documents: int | None) -> int | None:
    return stage.at_most(documents) if isinstance(stage, Transformer) else None


def _outputs(stage: pt.Transformer, columns: Sequence[str]) -> list[str]:
    if isinstance(stage, Transformer):
        return stage.outputs(columns)
    return list(pt.inspect.transformer_outputs(stage, list(columns)))


@contextmanager
def _placed(number: int) -> Iterator[None]:
    """Puts the stage's position in front of an error's message."""
    try:
        yield
    except PrfError as error:
        error.put_first(
            f"pipeline[{number}]" if error.drop_first("pipeline") else f"pipeline[{number}] "
        )
        raise


@dataclass(frozen=True, repr=False)
class Compose(_Nary):
    """Stages one after another (``a >> b``).

    Before running, a retriever whose results only feed a feedback stage or a cut is told to stop
    after what that stage reads; the output is the same.
    """

    sign = ">>"
    needs = ()

    def trimmed(self) -> tuple[pt.Transformer, ...]:
        """Returns the stages as they run: retrievers reach only as deep as later stages read."""
        out, limit = list(self.stages), None
        for number in reversed(range(len(out))):
            stage = out[number]
            if not isinstance(stage, Transformer):
                limit = None
                continue
            if limit is not None:
                stage = out[number] = stage.cut(max(limit, 1))
            own = stage.depth
            if own is not None:
                limit = own if limit is None or not stage.rowwise else min(own, limit)
            elif not stage.rowwise:
                limit = None
        return tuple(out)

    def step(
        self, frame: pd.DataFrame, queries: pd.DataFrame | None
    ) -> tuple[pd.DataFrame, pd.DataFrame | None]:
        if not is_results(frame):
            queries = frame
        log = _LOG.get()
        for number, stage in enumerate(self.trimmed()):
            start = time.perf_counter()
            with _placed(number):
                if isinstance(stage, Transformer):
                    frame, queries = stage.step(frame, queries)
                else:
                    frame = normalise(stage.transform(frame.copy()), repr(stage))
                    queries = queries if is_results(frame) else frame
            if log is not None:
                name = f"{number} {type(stage).__name__}"
                log.seconds[name] = log.seconds.get(name, 0.0) + time.perf_counter() - start
        return frame, queries

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        return self.step(frame, queries)[0]

    def apply(self, frame: pd.DataFrame, queries: pd.DataFrame | None = None) -> pd.DataFrame:
        return self.run(frame, queries)

    def outputs(self, columns: Sequence[str]) -> list[str]:
        columns = list(columns)
        for number, stage in enumerate(self.stages):
            with _placed(number):
                columns = _outputs(stage, columns)
        return columns

    def at_most(self, documents: int | None) -> int | None:
        for stage in self.trimmed():
            documents = _at_most(stage, documents)
        return documents

    def check_after(self, earlier: Sequence[pt.Transformer]) -> None:
        for number, stage in enumerate(self.stages):
            if isinstance(stage, Transformer):
                with _placed(number):
                    stage.check_after([*earlier, *self.stages[:number]])

    def schematic(self, *, input_columns: list[str] | None) -> dict[str, Any]:
        """Returns PyTerrier's structured drawing of the chain."""
        drawn = []
        for stage in self.stages:
            drawn.append(pt.schematic.transformer_schematic(stage, input_columns=input_columns))
            input_columns = drawn[-1]["output_columns"]
        return {
            "type": "pipeline",
            "input_columns": drawn[0]["input_columns"],
            "output_columns": drawn[-1]["output_columns"],
            "title": None,
            "transformers": drawn,
        }


@dataclass(frozen=True, repr=False)
class _Combine(_Nary):
    """Several lists for the same queries made into one."""

    needs = ("qid",)

    def lists(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> list[pd.DataFrame]:
        """Runs every stage on the same input; returns ranked result frames."""
        out = []
        for number, stage in enumerate(self.stages):
            with _placed(number):
                results = applied(stage, frame, queries)
                need(results, ("qid", "docno", "score"), repr(stage))
            out.append(ranked(results))
        return out

    def combine(self, lists: Sequence[pd.DataFrame]) -> pd.DataFrame:
        """Returns qid, docno, score of the combined list."""
        raise NotImplementedError

    def at_most(self, documents: int | None) -> int | None:
        sizes = [_at_most(stage, documents) for stage in self.stages]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        lists = self.lists(frame, queries)
        source = frame if not is_results(frame) else queries_of(frame)
        base = queries_of(pd.concat([queries_of(part) for part in lists], ignore_index=True))
        # Columns every side gives survive; query columns come from the query, not from a side.
        shared = [str(name) for name in lists[0] if all(name in part for part in lists)]
        source = source[[c for c in source.columns if c in shared or c == "qid"]]
        extra = [c for c in query_columns(shared) if c not in source.columns and c in base.columns]
        if extra:
            source = source.merge(base[["qid", *extra]], on="qid", how="inner")
        combined = self.combine(lists)
        documents = [name for name in shared if name not in query_columns(shared)]
        documents = [name for name in documents if name not in ("docno", "score", "rank")]
        if documents:
            first = pd.concat([part[["qid", "docno", *documents]] for part in lists])
            first = first.drop_duplicates(["qid", "docno"])
            combined = combined.merge(first, on=["qid", "docno"], how="left")
        place = pd.Series(np.arange(len(source)), index=source["qid"].to_numpy(dtype=object))
        order = np.argsort(place.reindex(combined["qid"]).to_numpy(), kind="stable")
        combined = combined.take(order).reset_index(drop=True)
        return ranked(attach_queries(source.reset_index(drop=True), combined))

    def outputs(self, columns: Sequence[str]) -> list[str]:
        given = []
        for number, stage in enumerate(self.stages):
            with _placed(number):
                given.append(_outputs(stage, columns))
                missing = [c for c in ("docno", "score") if c not in given[-1]]
                if missing:
                    raise missing_error(missing, given[-1], repr(self))
        shared = [name for name in given[0] if all(name in part for part in given)]
        ours = query_columns(shared)
        rest = [n for n in shared if n not in ours and n not in ("docno", "score", "rank")]
        return [*ours, "docno", "score", *rest, "rank"]


@dataclass(frozen=True, repr=False)
class Sum(_Combine):
    """Sum of scores (``a + b``); a document missing on one side counts 0 there."""

    sign = "+"

    def combine(self, lists: Sequence[pd.DataFrame]) -> pd.DataFrame:
        rows = pd.concat([part[["qid", "docno", "score"]] for part in lists])
        sums = rows.groupby(["qid", "docno"], sort=False)["score"].sum()
        return sums.reset_index()


def _by_rank(
    lists: Sequence[pd.DataFrame], how: Literal["min", "max"], everywhere: bool
) -> pd.DataFrame:
    rows = pd.concat([part[["qid", "docno", "rank"]] for part in lists])
    groups = rows.groupby(["qid", "docno"], sort=False)["rank"]
    out = groups.agg([how, "size"]).reset_index()
    if everywhere:
        out = out[out["size"] == len(lists)]
    return out.assign(score=1.0 / (1.0 + out[how]))[["qid", "docno", "score"]]


@dataclass(frozen=True, repr=False)
class Union(_Combine):
    """Documents of any side (``a | b``); score = 1 / (1 + best rank), ranks from 0."""

    sign = "|"

    def combine(self, lists: Sequence[pd.DataFrame]) -> pd.DataFrame:
        return _by_rank(lists, "min", everywhere=False)


@dataclass(frozen=True, repr=False)
class Intersection(_Combine):
    """Documents of all sides (``a & b``); score = 1 / (1 + worst rank), ranks from 0."""

    sign = "&"

    def combine(self, lists: Sequence[pd.DataFrame]) -> pd.DataFrame:
        return _by_rank(lists, "max", everywhere=True)


@dataclass(frozen=True, repr=False)
class Concatenate(_Combine):
    """The left list as it is, then the documents only a later one has (``a ^ b``).

    Documents of a later list score 1, 2, 3, ... below the lowest score before them.
    """

    sign = "^"

    def combine(self, lists: Sequence[pd.DataFrame]) -> pd.DataFrame:
        out = lists[0][["qid", "docno", "score"]]
        for part in lists[1:]:
            known = pd.MultiIndex.from_frame(out[["qid", "docno"]])
            new = part[~pd.MultiIndex.from_frame(part[["qid", "docno"]]).isin(known)]
            lowest = out.groupby("qid")["score"].min().reindex(new["qid"]).fillna(0.0).to_numpy()
            place = new.groupby("qid").cumcount().to_numpy()
            new = new[["qid", "docno"]].assign(score=lowest - 1.0 - place)
            out = pd.concat([out, new], ignore_index=True)
        return out


@dataclass(frozen=True, repr=False)
class Features(_Nary):
    """Scores of several rerankers of one list side by side (``a ** b``).

    Column ``features`` holds one float64 vector per row, a number per stage (more for a stage that
    gives features itself); a document a stage does not return counts 0. Order and score stay.
    """

    sign = "**"
    needs = ("qid", "docno")
    gives = ("features",)

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        keys = pd.MultiIndex.from_frame(frame[["qid", "docno"]])
        columns = []
        for number, stage in enumerate(self.stages):
            with _placed(number):
                results = applied(stage, frame, queries)
                name = "features" if "features" in results.columns else "score"
                need(results, ("docno", name), repr(stage))
            values = results[name].tolist()
            table = np.array(values, dtype=np.float64).reshape(
                len(results), -1 if len(results) else 1
            )
            rows = pd.MultiIndex.from_frame(results[["qid", "docno"]]).get_indexer(keys)
            padded = np.concatenate([table, np.zeros((1, table.shape[1]))])  # row -1: not returned
            columns.append(padded[rows])
        stacked = np.concatenate(columns, axis=1) if columns else np.zeros((len(frame), 0))
        out = np.empty(len(frame), dtype=object)
        for row in range(len(frame)):
            out[row] = stacked[row]
        return frame.assign(features=pd.Series(out, dtype=object))

    def outputs(self, columns: Sequence[str]) -> list[str]:
        Transformer.outputs(self, columns)
        for number, stage in enumerate(self.stages):
            with _placed(number):
                _outputs(stage, columns)
        return [*columns, *(name for name in self.gives if name not in columns)]


@dataclass(frozen=True, repr=False)
class Cutoff(Transformer):
    """Keeps the first k documents of every query (``% k``).

    Needs: qid, docno, score
    Gives: qid, docno, score, rank

    Args:
        k: How many documents per query.
    """

    k: Count

    needs = ("qid", "docno", "score")
    gives = ("rank",)
    spec_form = "scalar"

    @property
    def depth(self) -> int:
        return self.k

    @property
    def rowwise(self) -> bool:
        return True

    def at_most(self, documents: int | None) -> int:
        return self.k if documents is None else min(self.k, documents)

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        return head(frame, self.k)


@dataclass(frozen=True, repr=False)
class Scale(Transformer):
    """Multiplies scores by a factor (``* 0.7``); a negative one turns the order round.

    Needs: qid, docno, score
    Gives: qid, docno, score, rank

    Args:
        factor: Any finite number.
    """

    factor: float

    needs = ("qid", "docno", "score")
    gives = ("rank",)
    spec_form = "scalar"

    @property
    def rowwise(self) -> bool:
        return self.factor > 0

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        return ranked(frame.assign(score=frame["score"] * self.factor))


class QueryTransformer(Transformer, abstract=True):
    """A stage that only adds to queries; on a result frame it works on the queries behind it."""

    @property
    def rowwise(self) -> bool:
        return True

    def run_queries(self, queries: pd.DataFrame) -> pd.DataFrame:
        """Returns the query frame with the new columns."""
        raise NotImplementedError

    def step(
        self, frame: pd.DataFrame, queries: pd.DataFrame | None
    ) -> tuple[pd.DataFrame, pd.DataFrame | None]:
        with self.named():
            need(frame, self.needs, repr(self))
            if not is_results(frame):
                out = self.run_queries(frame)
                return out, out
            queries = self.run_queries(queries_of(frame) if queries is None else queries)
            return attach_queries(queries, frame), queries

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        return self.step(frame, queries)[0]

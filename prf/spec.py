"""Pipelines as YAML: one grammar, read and written, and ``explain``.

    [A, B, C]                       A >> B >> C
    Rocchio                         Rocchio()
    {Rocchio: {fb_docs: 5}}         Rocchio(fb_docs=5)
    {Cutoff: 50}, {Scale: 0.7}      % 50, * 0.7
    {Sum: [A, B]}                   A + B (also Union, Intersection, Concatenate, Features)

A file holds a pipeline alone, or a mapping with ``pipeline`` and optionally ``topics``, ``run``
(``path``, ``tag``) and ``measures``. Only values that differ from the default are written.
"""

from __future__ import annotations

import importlib
import os
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyterrier as pt
import yaml

from prf.errors import FileFormatError, SpecError, did_you_mean, shorten
from prf.pipeline import (
    PARTS,
    REGISTRY,
    Compose,
    Part,
    Transformer,
    _at_most,
    _hints,
    _Nary,
    _outputs,
    parts_of,
)
from prf.trec import PathLike, read_lines


class _Loader(yaml.SafeLoader):
    """The safe loader, refusing a key given twice."""


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str) or key in seen:
            problem = "is given twice" if isinstance(key, str) else "is not a name"
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} {problem}", key_node.start_mark
            )
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _parse(text: str, name: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or str(error)
        raise SpecError(f"{where}: not YAML: {problem}") from error


# Reading


def from_spec(spec: Any, where: str = "pipeline") -> Transformer:
    """Builds a pipeline from parsed YAML.

    Args:
        spec: A list of stages, a stage name, or a mapping of one stage name to its arguments.
        where: Position for messages.

    Raises:
        SpecError: For an unknown stage or argument (with the nearest known one), or a wrong type.
    """
    if isinstance(spec, list):
        if not spec:
            raise SpecError(f"{where}: an empty list; name at least one stage")
        stages = [from_spec(item, f"{where}[{i}]") for i, item in enumerate(spec)]
        return stages[0] if len(stages) == 1 else Compose(tuple(stages))
    if isinstance(spec, str):
        name, value = spec, None
    elif isinstance(spec, dict) and len(spec) == 1:
        name, value = next(iter(spec.items()))
    else:
        raise SpecError(
            f"{where}: expected a stage such as 'Rocchio' or 'Rocchio: {{fb_docs: 3}}', "
            f"found {shorten(spec)}"
        )
    cls = _stage_class(name, where)
    if cls.spec_form == "list":
        if not isinstance(value, list):
            raise SpecError(f"{where}: {name} takes a list of stages, not {shorten(value)}")
        parts = tuple(from_spec(item, f"{where}[{i}]") for i, item in enumerate(value))
        return _build(cls, {"stages": parts}, where)
    if cls.spec_form == "scalar" and not isinstance(value, dict):
        return _build(cls, {fields(cls)[0].name: value}, where)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise SpecError(
            f"{where}: {name} takes its arguments by name, as in '{name}: "
            f"{{{_signature(cls).split(':')[0] or 'argument'}: ...}}', not {shorten(value)}"
        )
    return _build(cls, value, where)


def _stage_class(name: Any, where: str) -> type[Transformer]:
    _register_all()
    if not isinstance(name, str) or name not in REGISTRY:
        hint = did_you_mean(str(name), REGISTRY)
        raise SpecError(f"{where}: no stage named {name!r}{hint or '; see `prf stages`'}")
    return REGISTRY[name]


def _register_all() -> None:
    """Imports the modules that define stages; none of them loads anything heavy."""
    for module in ("encode", "feedback", "fuse", "prp", "rerank", "retrieve", "sparse"):
        importlib.import_module(f"prf.{module}")


def _signature(cls: type[Part]) -> str:
    parts = []
    hints = _hints(cls)
    for item in fields(cls):  # type: ignore[arg-type]  # a dataclass
        default = "" if item.default is MISSING else f" = {item.default!r}"
        parts.append(f"{item.name}: {_shown(hints[item.name])}{default}")
    return ", ".join(parts)


def _shown(hint: Any) -> str:
    """Returns a type as a user writes it, without the bounds of numbers."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _shown(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_shown(option) for option in inner)
    if hint is types.NoneType:
        return "None"
    shown = str(hint) if origin else getattr(hint, "__name__", str(hint))
    return shown.replace("typing.", "")


_P = typing.TypeVar("_P", bound=Part)


def _build(cls: type[_P], arguments: Mapping[Any, Any], where: str) -> _P:
    hints = _hints(cls)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    values = {}
    for name, value in arguments.items():
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise SpecError(
                f"{where}: {cls.__name__} has no argument {name!r}{hint}; "
                f"signature is {cls.__name__}({_signature(cls)})"
            )
        values[name] = _with_stages(value, hints[name], f"{where}.{name}")
    for name, item in known.items():
        if name not in values and item.default is MISSING:
            raise SpecError(
                f"{where}: {cls.__name__} needs '{name}'; "
                f"signature is {cls.__name__}({_signature(cls)})"
            )
    try:
        return cls(**values)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error


def _with_stages(value: Any, hint: Any, where: str) -> Any:
    """Returns the value with stages in place of their YAML form, where the annotation says so."""
    options = typing.get_args(hint) or (hint,)
    if value is None or isinstance(value, pt.Transformer):
        return value
    if typing.get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        return tuple(_with_stages(v, options[0], f"{where}[{i}]") for i, v in enumerate(value))
    if any(isinstance(option, type) and issubclass(option, pt.Transformer) for option in options):
        return from_spec(value, where)
    for option in options:
        if isinstance(option, type) and issubclass(option, Part) and not isinstance(value, Part):
            return _part(value, option, where)
    return value


def _part(spec: Any, base: type[Part], where: str) -> Part:
    """Builds what a stage holds: a name, or a mapping of one name to its arguments."""
    name, value = next(iter(spec.items())) if isinstance(spec, dict) and spec else (spec, None)
    known = parts_of(base)
    if not isinstance(name, str) or name not in known or (isinstance(spec, dict) and len(spec) > 1):
        raise SpecError(
            f"{where}: {shorten(spec)} is none of {', '.join(known)}"
            f"{did_you_mean(str(name), known)}"
        )
    if value is not None and not isinstance(value, dict):
        raise SpecError(f"{where}: {name} takes its arguments by name, not {shorten(value)}")
    return _build(PARTS[name], value or {}, where)


@dataclass(frozen=True)
class PipelineFile:
    """What a pipeline file says: the pipeline, and optionally what to run it on."""

    pipeline: Transformer
    topics: str | None = None
    run: str | None = None
    tag: str | None = None
    measures: tuple[str, ...] = ()


_KEYS = ("pipeline", "topics", "run", "measures")


def read_pipeline(path: PathLike) -> PipelineFile:
    """Reads a pipeline file.

    Raises:
        FileFormatError: If the file is missing or empty.
        SpecError: If it is not YAML or not a pipeline; names file and line or position.
    """
    name = os.fspath(path)
    spec = _parse("\n".join(line for _, line in read_lines(name, "pipeline")), name)
    if spec is None:
        raise FileFormatError(f"pipeline file '{name}' holds only comments")
    try:
        if not (isinstance(spec, dict) and (len(spec) != 1 or "pipeline" in spec)):
            return PipelineFile(from_spec(spec))
        unknown = [key for key in spec if key not in _KEYS]
        if unknown:
            raise SpecError(
                f"top level holds {unknown[0]!r}; allowed are {', '.join(_KEYS)}"
                f"{did_you_mean(str(unknown[0]), _KEYS)}"
            )
        if "pipeline" not in spec:
            raise SpecError(f"top level holds only {', '.join(spec)}; add 'pipeline'")
        run = spec.get("run") or {}
        if isinstance(run, str):
            run = {"path": run}
        if not isinstance(run, dict) or set(run) - {"path", "tag"}:
            raise SpecError(f"run is {shorten(run)}; write a path, or path: and tag:")
        measures = spec.get("measures") or []
        measures = [measures] if isinstance(measures, str) else measures
        for key, value in (("topics", spec.get("topics")), *run.items()):
            if value is not None and not isinstance(value, str):
                raise SpecError(f"{key} is {shorten(value)}; it must be text (quote it)")
        if not isinstance(measures, list) or not all(isinstance(m, str) for m in measures):
            raise SpecError(f"measures is {shorten(measures)}; write a list of names")
        return PipelineFile(
            from_spec(spec["pipeline"]),
            spec.get("topics"),
            run.get("path"),
            run.get("tag"),
            tuple(measures),
        )
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from error


def load(source: PathLike) -> Transformer:
    """Returns the pipeline of a YAML file; see `read_pipeline`."""
    return read_pipeline(source).pipeline


def loads(text: str) -> Transformer:
    """Returns the pipeline written as YAML text.

    >>> loads("[{Scale: 0.7}, {Cutoff: 50}]")
    Scale(0.7) >> Cutoff(50)
    """
    return from_spec(_parse(text, "pipeline"))


# Writing


def to_spec(pipeline: pt.Transformer, defaults: bool = False) -> Any:
    """Returns the pipeline as plain lists, mappings and numbers; the inverse of `from_spec`.

    Args:
        pipeline: Any pipeline of registered stages.
        defaults: Write every argument, also those at their default.

    Raises:
        SpecError: For a stage of another package, which has no YAML form.
    """
    if not isinstance(pipeline, Transformer):
        raise SpecError(f"{pipeline!r} has no YAML form; only this package's stages do")
    name = type(pipeline).__name__
    if isinstance(pipeline, _Nary) and pipeline.spec_form == "list":
        parts = []
        for i, stage in enumerate(pipeline.stages):
            try:
                parts.append(to_spec(stage, defaults))
            except SpecError as error:
                raise SpecError(f"stage {i}, {error}") from error
        return parts if isinstance(pipeline, Compose) else {name: parts}
    values = _arguments(pipeline, defaults)
    if pipeline.spec_form == "scalar":
        return {name: next(iter(values.values()))}
    return {name: values} if values else name


def _arguments(part: Part, defaults: bool) -> dict[str, Any]:
    values = {}
    for item in fields(part):  # type: ignore[arg-type]  # a dataclass
        value = getattr(part, item.name)
        if defaults or item.default is MISSING or value != item.default:
            if isinstance(value, tuple):
                value = [_plain(v, defaults) for v in value]
            values[item.name] = _plain(value, defaults)
    return values


def _plain(value: Any, defaults: bool) -> Any:
    if isinstance(value, pt.Transformer):
        return to_spec(value, defaults)
    if isinstance(value, Part):
        values = _arguments(value, defaults)
        return {type(value).__name__: values} if values else type(value).__name__
    if callable(value):
        raise SpecError(
            f"{value!r} has no YAML form; put the function into a file and name it "
            "'module:function'"
        )
    return value


def dumps(pipeline: pt.Transformer, defaults: bool = False) -> str:
    """Returns the pipeline as YAML text: ``loads(dumps(p)) == p``."""
    return yaml.safe_dump(to_spec(pipeline, defaults), sort_keys=False, allow_unicode=True)


def override(pipeline: Transformer, settings: Sequence[str]) -> Transformer:
    """Returns the pipeline with some arguments replaced.

    Args:
        pipeline: The pipeline.
        settings: ``POSITION.argument=value``, the position as ``explain`` prints it
            (``1.fb_docs=5``; inside an operator ``0.1.k=10``); the value is read as YAML.

    Raises:
        SpecError: For a position or argument that is not there, or a wrong value.
    """
    for setting in settings:
        path, sign, text = setting.partition("=")
        steps = path.strip().split(".")
        if not sign or len(steps) < 2:
            raise SpecError(
                f"--set {setting!r}: write POSITION.argument=value, such as 1.fb_docs=5"
            )
        # Where a fusion is the whole pipeline, `explain` calls its place "pipeline".
        steps = steps[1:] if steps[0] == "pipeline" else steps
        pipeline = _replaced(pipeline, steps, _parse(text, f"--set {setting}"), setting)
    return pipeline


def _replaced(stage: pt.Transformer | Part, steps: list[str], value: Any, setting: str) -> Any:
    head, rest = steps[0], steps[1:]
    if head.isdigit():
        number = int(head)
        stages = stage.stages if isinstance(stage, _Nary) else (stage,)
        if number >= len(stages) or not rest:
            raise SpecError(
                f"--set {setting!r}: there is no stage {head} here; "
                f"positions are 0 to {len(stages) - 1}, see `prf explain`"
            )
        new = _replaced(stages[number], rest, value, setting)
        if not isinstance(stage, _Nary):
            return new
        return replace(stage, stages=(*stages[:number], new, *stages[number + 1 :]))
    if not isinstance(stage, Part) or getattr(stage, "spec_form", "mapping") == "list":
        raise SpecError(f"--set {setting!r}: {stage!r} has no arguments; give a position first")
    if rest:
        inner = getattr(stage, head, None)
        if not isinstance(inner, pt.Transformer | Part):
            raise SpecError(f"--set {setting!r}: {type(stage).__name__}.{head} is not a stage")
        value = _replaced(inner, rest, value, setting)
    values = {item.name: getattr(stage, item.name) for item in fields(stage)}  # type: ignore[arg-type]
    return _build(type(stage), {**values, head: value}, f"--set {setting!r}")


# Explaining


@dataclass(frozen=True)
class Step:
    """One stage of `explain`: where it stands, what it does to the columns, what it opens.

    Positions count from 0, with a dot into an operator; an operator that is the whole pipeline
    stands at ``pipeline``.
    """

    position: str
    stage: str
    columns_in: tuple[str, ...]
    columns_out: tuple[str, ...]
    resources: tuple[str, ...]
    note: str = ""


def explain(pipeline: Transformer, columns: Sequence[str] = ("qid", "query")) -> list[Step]:
    """Returns what each stage needs and gives, and what it would open; opens nothing.

    Args:
        pipeline: The pipeline.
        columns: Columns of the input frame.

    Raises:
        FrameError: If a stage lacks a column; names the stage and who provides it.
    """
    pipeline.outputs(columns)  # the check, with positions in its message
    return _explain(pipeline, list(columns), (), pipeline, None)


def _explain(
    stage: pt.Transformer,
    columns: list[str],
    path: tuple[int, ...],
    runs: pt.Transformer,
    documents: int | None,
) -> list[Step]:
    steps: list[Step] = []
    if isinstance(stage, Compose):
        for number, (inner, trimmed) in enumerate(zip(stage, stage.trimmed(), strict=True)):
            steps.extend(_explain(inner, columns, (*path, number), trimmed, documents))
            columns = _outputs(inner, columns)
            documents = _at_most(trimmed, documents)
        return steps
    operator = isinstance(stage, _Nary)
    resources = stage.resources() if isinstance(stage, Transformer) and not operator else []
    notes = [f"runs as {runs!r}: later stages read no deeper"] if runs != stage else []
    if isinstance(runs, Transformer) and (cost := runs.cost(documents)):
        notes.append(cost)
    steps.append(
        Step(
            ".".join(map(str, path)) or ("pipeline" if operator else "0"),
            stage.label if isinstance(stage, _Nary) else repr(stage),
            tuple(columns),
            tuple(_outputs(stage, columns)),
            tuple(map(str, resources)),
            "; ".join(notes),
        )
    )
    for number, inner in enumerate(stage.stages if operator else ()):
        steps.extend(_explain(inner, columns, (*path, number), inner, documents))
    return steps


def shipped(name: str = "") -> Path:
    """Returns the folder of pipelines shipped with the package, or one file in it.

    Raises:
        FileFormatError: If there is no such file.
    """
    here = Path(__file__).parent
    folder = here / "pipelines" if (here / "pipelines").is_dir() else here.parent / "pipelines"
    path = folder / name if name else folder
    if not path.exists():
        raise FileFormatError(f"no shipped pipeline '{name}' in '{folder}'")
    return path

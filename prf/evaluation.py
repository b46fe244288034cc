"""Measures of runs against judgments, query by query.

The measures are those of ir-measures, under its names; nothing is computed here but means.
Averages go over the judged queries: every qid of the judgments counts, also one without a relevant
document, and one that the run lacks counts 0 (``trec_eval -c``). nDCG uses all grades whatever
``rel`` the other measures name.
"""

from __future__ import annotations

import ast
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import ir_measures
import numpy as np
import numpy.typing as npt
import pandas as pd
from ir_measures import Measure

from prf.errors import EvaluationError, FrameError, PrfWarning, SpecError, did_you_mean, shorten
from prf.frames import need, normalise, objects, query_codes, ranked
from prf.trec import PathLike, read_qrels, read_run

_DEEP_LEARNING = ("nDCG@10", "AP(rel=2)@1000", "RR(rel=2)", "R(rel=2)@100", "R(rel=2)@1000")

PRESETS: Mapping[str, tuple[str, ...]] = {
    "dl19": _DEEP_LEARNING,
    "dl20": _DEEP_LEARNING,
    "msmarco-dev": ("RR@10", "R@100", "R@1000"),
    "default": ("nDCG@10", "AP", "R@100", "R@1000"),
}
"""Names for sets of measures; TREC Deep Learning counts grades 2 and 3 as relevant."""


# Measures

_TREC_NAMES = {
    "map": "AP",
    "map_cut": "AP@{}",
    "ndcg_cut": "nDCG@{}",
    "recall": "R@{}",
    "recip_rank": "RR",
    "success": "Success@{}",
    "P": "P@{}",
}


def parse_measures(names: Sequence[str]) -> list[Measure]:
    """Returns the measures of ir-measures names and preset names, in order, without repeats.

    Args:
        names: Such as ``["nDCG@10", "AP(rel=2)@1000"]`` or ``["dl19"]``; one name may stand alone.

    Raises:
        SpecError: If there is no name, or for names that are no measure, lack a parameter, or need
            a provider that is not installed; one error for all of them.

    >>> parse_measures(["msmarco-dev", "R@100"])
    [RR@10, R@100, R@1000]
    """
    names = [names] if isinstance(names, str) else list(names)
    parts = [part for name in names for part in _expand(name)]
    if not parts:
        raise SpecError(
            f"no measures given; name some, such as 'nDCG@10', or a preset: {', '.join(PRESETS)}"
        )
    measures, problems = dict[str, Measure](), list[str]()
    for part in parts:
        try:
            measure = part if isinstance(part, Measure) else _build(part)
            _check_measure(measure)
        except SpecError as error:
            problems.append(str(error))
        else:
            # An explicit rel=1 has the same name as the default, but asks for no warning.
            key = str(measure)
            if key not in measures or "rel" in measure.params:
                measures[key] = measure
    if problems:
        raise SpecError(
            f"measures: {'; '.join(dict.fromkeys(problems))}. Names are those of "
            f"https://ir-measur.es, or a preset: {', '.join(PRESETS)}"
        )
    return list(measures.values())


def _expand(name: Any) -> Sequence[Any]:
    return PRESETS.get(name, (name,)) if isinstance(name, str) else (name,)


def _build(name: object) -> Measure:
    # ir_measures.parse_measure relies on ast.Num, which Python 3.12 warns of and 3.14 lacks.
    if not isinstance(name, str):
        raise SpecError(f"{shorten(name)} is not a name")
    params, at = dict[str, Any](), None
    try:
        node = ast.parse(name.strip(), mode="eval").body
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            at, node = ast.literal_eval(node.right), node.left
        if isinstance(node, ast.Call) and not node.args:
            params = {str(item.arg): ast.literal_eval(item.value) for item in node.keywords}
            node = node.func
    except (SyntaxError, ValueError):
        node = ast.Constant(None)
    registry = ir_measures.measures.registry
    if not isinstance(node, ast.Name) or node.id not in registry:
        raise SpecError(f"{shorten(name)} is not a measure{_suggestion(name)}")
    if at is not None:
        params[registry[node.id].AT_PARAM] = at
    known = registry[node.id].SUPPORTED_PARAMS
    unknown = next((key for key in params if key not in known), None)
    if unknown is not None:
        raise SpecError(
            f"{shorten(name)} has no parameter '{unknown}'"
            f"{did_you_mean(unknown, known) or '; it takes ' + (', '.join(known) or 'none')}"
        )
    # In one order, so that two spellings of a measure are one measure.
    return registry[node.id](**{key: params[key] for key in known if key in params})


def _suggestion(name: str) -> str:
    match = re.fullmatch(r"(\w+?)(?:[._](\d+))?", name.strip())
    if match and match[1] in _TREC_NAMES and (match[2] or "{}" not in _TREC_NAMES[match[1]]):
        return f"; did you mean '{_TREC_NAMES[match[1]].format(match[2])}'?"
    preset = did_you_mean(name, PRESETS)
    if preset:
        return preset
    base = re.split(r"[(@]", name.strip(), maxsplit=1)[0]
    rest = name.strip()[len(base) :]
    known = {key.lower(): item.NAME for key, item in ir_measures.measures.registry.items()}
    close = re.search("'(.*)'", did_you_mean(base.lower(), known))
    return f"; did you mean '{known[close[1]]}{rest}'?" if close else ""


def _check_measure(measure: Measure) -> None:
    name = str(measure)
    for key, info in measure.SUPPORTED_PARAMS.items():
        if key not in measure.params:
            if info.required:
                mark = f"@10, as in {name}@10" if key == "cutoff" else f"{key}=..."
                raise SpecError(f"'{name}' needs {key}: add {mark}")
            continue
        value = measure.params[key]
        good = info.validate(value) and (info.dtype is bool or not isinstance(value, bool))
        if not good or (key in ("cutoff", "rel") and value < 1):
            kind = getattr(info.dtype, "__name__", "another value")
            least = " of at least 1" if key in ("cutoff", "rel") else ""
            raise SpecError(f"'{name}': {key} is {shorten(value)}; it must be {kind}{least}")
    if ir_measures.pyndeval.supports(measure):
        raise SpecError(f"'{name}' needs judgments of subtopics, which are not read here")
    if not ir_measures.DefaultPipeline.supports(measure):
        raise SpecError(f"'{name}' is computed by no installed provider of ir-measures")


def is_binary(measure: Measure) -> bool:
    """Tells whether grade 1 and above counts as relevant unless ``rel`` says otherwise."""
    info = measure.SUPPORTED_PARAMS.get("rel")
    return info is not None and info.default == 1


# Evaluation


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The values of one run for every judged query.

    Attributes:
        name: The system, for tables and comparisons.
        per_query: float64, indexed by qid in the order of the judgments, one column per measure,
            named by it (``AP(rel=2)@1000``). No value is missing.
        missing: Judged queries without results, counted 0, in the order of the judgments.
        dropped: How many judged queries were left out because the topics lack them.
        unjudged: How many queries of the run no judgment exists for; they count nowhere.
    """

    name: str
    per_query: pd.DataFrame
    missing: tuple[str, ...] = ()
    dropped: int = 0
    unjudged: int = 0

    @property
    def n_judged(self) -> int:
        """How many queries the averages go over."""
        return len(self.per_query)

    @property
    def mean(self) -> pd.Series:
        """The arithmetic mean of every measure over the judged queries; of counts, too."""
        # Exactly rounded sums do not depend on the order of the queries.
        means = {name: math.fsum(values) / len(values) for name, values in self.per_query.items()}
        return pd.Series(means, dtype=np.float64, name=self.name)


def evaluate(
    run: pd.DataFrame | PathLike,
    qrels: pd.DataFrame | PathLike,
    measures: Sequence[str],
    *,
    topics: pd.DataFrame | None = None,
    name: str | None = None,
) -> Evaluation:
    """Measures a run against judgments, query by query.

    Equal scores are ordered by docno, ascending in a frame (the order of this package), descending
    in a file (trec_eval's, with scores compared in single precision). Every provider of ir-measures
    sees that one order. Where a measure is not defined for a query it is 0.

    Args:
        run: Result frame (``qid``, ``docno``, ``score``) or TREC run. A frame without rows gives 0
            throughout and one `PrfWarning`.
        qrels: Judgments (``qid``, ``docno``, ``label``: whole numbers), or what `read_qrels` takes.
        measures: Names of ir-measures or of `PRESETS`. One `PrfWarning` if a binary measure names
            no ``rel`` while the judgments hold grades above 1.
        topics: Limits the judged queries to these (``qid``).
        name: Name of the system; the file's name without suffix, or ``run``, unless given.

    Raises:
        SpecError: For names that are no measure (see `parse_measures`) or inputs of another type.
        FrameError: For missing columns, repeated keys, scores that are not finite, grades that are
            not whole.
        FileFormatError: For a missing, empty or malformed file.
        EvaluationError: If there are no judgments, or run and judgments share no qid or no docno.
    """
    parsed = parse_measures(measures)
    every = _judgments(qrels)
    judged = _limit(every, topics)
    rankings = _rankings(run)
    if rankings:
        _check_overlap(rankings, judged, every)
    else:
        warnings.warn(
            f"the run is empty: every measure is 0 for each of the {len(judged)} judged queries",
            PrfWarning,
            stacklevel=2,
        )
    vague = _vague_thresholds(parsed, judged)
    if vague:
        warnings.warn(vague, PrfWarning, stacklevel=2)
    return Evaluation(
        name=name if name is not None else run_name(run),
        per_query=_values(parsed, judged, rankings),
        missing=tuple(qid for qid in judged if qid not in rankings),
        dropped=len(every) - len(judged),
        unjudged=sum(qid not in every for qid in rankings),
    )


def run_name(run: pd.DataFrame | PathLike) -> str:
    """Returns what tables call a run: its file's name without a usual suffix, or ``run``."""
    if isinstance(run, pd.DataFrame):
        return "run"
    file = Path(run)
    file = file.with_suffix("") if file.suffix == ".gz" else file
    return file.stem if file.suffix in (".trec", ".run", ".res", ".txt") else file.name


def _path(value: object, what: str, columns: str) -> PathLike:
    if isinstance(value, (str, os.PathLike)):
        return value
    raise SpecError(
        f"evaluate: {what} is {shorten(value)} ({type(value).__name__}); "
        f"give a frame with the columns {columns}, or the path of a file"
    )


def _judgments(qrels: pd.DataFrame | PathLike) -> dict[str, dict[str, int]]:
    """Returns {qid: {docno: grade}}, queries by first appearance."""
    if isinstance(qrels, pd.DataFrame):
        where, columns = "evaluate: qrels", ["qid", "docno", "label"]
        need(qrels, columns, where)
        frame = normalise(qrels[columns], where)
    else:
        frame = read_qrels(_path(qrels, "qrels", "qid, docno, label"))
    out = dict[str, dict[str, int]]()
    rows = zip(frame["qid"], frame["docno"], _grades(frame).tolist(), strict=True)
    for qid, docno, grade in rows:
        out.setdefault(qid, {})[docno] = grade
    if not out:
        raise EvaluationError("evaluate: the judgments are empty; there is nothing to average over")
    return out


def _grades(frame: pd.DataFrame) -> npt.NDArray[np.int64]:
    try:
        grade = frame["label"].to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise FrameError(
            f"evaluate: column 'label' of the qrels is not numeric: {error}"
        ) from error
    bad = np.flatnonzero(~np.isfinite(grade) | (np.floor(grade) != grade))
    if bad.size:
        row = frame.iloc[int(bad[0])]
        raise FrameError(
            f"evaluate: label of docno {row['docno']!r} for qid {row['qid']!r} is "
            f"{grade[bad[0]]}; grades are whole numbers"
        )
    return grade.astype(np.int64)


def _limit(
    judged: dict[str, dict[str, int]], topics: pd.DataFrame | None
) -> dict[str, dict[str, int]]:
    if topics is None:
        return judged
    where = "evaluate: topics"
    need(topics, ("qid",), where)
    qids = set(normalise(topics[["qid"]].drop_duplicates(), where)["qid"])
    kept = {qid: grades for qid, grades in judged.items() if qid in qids}
    if not kept:
        raise EvaluationError(
            f"none of the {len(qids)} topics ({examples(sorted(qids))}) is judged "
            f"({examples(judged)}); check that their identifiers are written alike"
        )
    return kept


def _rankings(run: pd.DataFrame | PathLike) -> dict[str, list[str]]:
    """Returns {qid: docnos, best first}, queries by first appearance."""
    if isinstance(run, pd.DataFrame):
        where, columns = "evaluate: run", ["qid", "docno", "score"]
        need(run, columns, where)
        frame = ranked(normalise(run[columns], where))
    else:
        frame = read_run(_path(run, "run", "qid, docno, score"), ties="descending")
    codes, names = query_codes(frame["qid"])
    docnos = frame["docno"].tolist()
    bounds = np.searchsorted(codes, np.arange(len(names) + 1)).tolist()
    return {qid: docnos[bounds[i] : bounds[i + 1]] for i, qid in enumerate(names)}


def examples(values: Iterable[str]) -> str:
    """Returns the first three values, quoted, for messages."""
    shown = [repr(value) for value, _ in zip(values, range(3), strict=False)]
    return ", ".join(shown)


def _check_overlap(
    rankings: Mapping[str, list[str]],
    judged: Mapping[str, dict[str, int]],
    every: Mapping[str, dict[str, int]],
) -> None:
    advice = "check that run and judgments belong together and write identifiers alike"
    if rankings.keys().isdisjoint(judged):
        raise EvaluationError(
            f"none of the {len(rankings)} queries of the run ({examples(rankings)}) is among the "
            f"{len(judged)} judged queries ({examples(judged)}); {advice}"
        )
    known = {docno: None for grades in every.values() for docno in grades}
    if not any(docno in known for docnos in rankings.values() for docno in docnos):
        found = (docno for docnos in rankings.values() for docno in docnos)
        raise EvaluationError(
            f"no document of the run ({examples(found)}) is judged for any query "
            f"({examples(known)}); {advice}"
        )


def _vague_thresholds(measures: Sequence[Measure], judged: Mapping[str, dict[str, int]]) -> str:
    """Returns the warning about binary measures without ``rel`` on graded judgments, if any."""
    vague = [m for m in measures if is_binary(m) and "rel" not in m.params]
    highest = max(grade for grades in judged.values() for grade in grades.values())
    if not vague or highest <= 1:
        return ""
    return (
        f"the judgments hold grades up to {highest}, and {', '.join(map(str, vague))} count grade "
        f"1 and above as relevant; say which grade counts, as in "
        f"{', '.join(str(measure(rel=2)) for measure in vague)} (rel=1 keeps this)"
    )


def _values(
    measures: Sequence[Measure],
    judged: Mapping[str, dict[str, int]],
    rankings: Mapping[str, list[str]],
) -> pd.DataFrame:
    # Each provider gets ranks as scores, all different, since providers order ties differently;
    # and numbers as qids, since gdeval.pl cuts other qids short.
    number = {qid: str(i) for i, qid in enumerate(judged)}
    longest = max(map(len, rankings.values()), default=0)
    falling = np.arange(longest, 0, -1, dtype=np.float64).tolist()
    run = {
        number[qid]: dict(zip(docnos, falling, strict=False))
        for qid, docnos in rankings.items()
        if qid in number
    }
    grades = {number[qid]: values for qid, values in judged.items()}
    out = dict[str, npt.NDArray[np.float64]]()
    for measure in measures:
        values = np.full(len(judged), measure.DEFAULT, dtype=np.float64)
        for metric in _metrics(measure, grades, run) if run else ():
            if math.isfinite(metric.value):
                values[int(metric.query_id)] = metric.value
        out[str(measure)] = values
    return pd.DataFrame(out, index=pd.Index(objects(judged), name="qid", dtype=object))


def _metrics(
    measure: Measure,
    grades: Mapping[str, dict[str, int]],
    run: Mapping[str, dict[str, float]],
) -> list[Any]:
    # One call for each measure: in a common one, ir-measures 0.4.3 lets nDCG@10 take its grades
    # from nDCG(gains={1:0})@10, or not, as the hashes of the names fall.
    try:
        return list(ir_measures.iter_calc([measure], grades, run))
    except (ArithmeticError, ValueError, CalledProcessError) as error:
        raise EvaluationError(
            f"ir-measures fails on {measure}: {error}; leave out this measure, which its provider "
            "cannot compute for these data"
        ) from error

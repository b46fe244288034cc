"""Measures of runs against judgments, paired comparisons of systems, and tables of both.

The measures are those of ir-measures, under its names; nothing is computed here but means and
tests. Averages go over the judged queries: every qid of the judgments counts, also one without a
relevant document, and one that the run lacks counts 0 (``trec_eval -c``). nDCG uses all grades
whatever ``rel`` the other measures name.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, Literal

import ir_measures
import numpy as np
import numpy.typing as npt
import pandas as pd
from ir_measures import Measure

from prf.errors import EvaluationError, FrameError, PrfWarning, SpecError, did_you_mean, shorten
from prf.frames import need, normalise, objects, query_codes, ranked
from prf.trec import PathLike, read_qrels, read_run

FloatArray = npt.NDArray[np.float64]
Test = Literal["t", "wilcoxon", "randomisation"]
Correction = Literal["holm", "bonferroni", "none"]
Format = Literal["text", "markdown", "csv", "json"]

_DEEP_LEARNING = ("nDCG@10", "AP(rel=2)@1000", "RR(rel=2)", "R(rel=2)@100", "R(rel=2)@1000")

PRESETS: Mapping[str, tuple[str, ...]] = {
    "dl19": _DEEP_LEARNING,
    "dl20": _DEEP_LEARNING,
    "msmarco-dev": ("RR@10", "R@100", "R@1000"),
    "default": ("nDCG@10", "AP", "R@100", "R@1000"),
}
"""Names for sets of measures; TREC Deep Learning counts grades 2 and 3 as relevant."""

TIE = 1e-9
"""Differences of a query's values below this are rounding and count as ties."""

FLIPS = 10_000
"""Random sign flips of the randomisation test; all 2^n are enumerated where that is fewer."""


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


def _is_binary(measure: Measure) -> bool:
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
        name=name if name is not None else _name(run),
        per_query=_values(parsed, judged, rankings),
        missing=tuple(qid for qid in judged if qid not in rankings),
        dropped=len(every) - len(judged),
        unjudged=sum(qid not in every for qid in rankings),
    )


def _name(run: pd.DataFrame | PathLike) -> str:
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
            f"none of the {len(qids)} topics ({_examples(sorted(qids))}) is judged "
            f"({_examples(judged)}); check that their identifiers are written alike"
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


def _examples(values: Iterable[str]) -> str:
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
            f"none of the {len(rankings)} queries of the run ({_examples(rankings)}) is among the "
            f"{len(judged)} judged queries ({_examples(judged)}); {advice}"
        )
    known = {docno: None for grades in every.values() for docno in grades}
    if not any(docno in known for docnos in rankings.values() for docno in docnos):
        found = (docno for docnos in rankings.values() for docno in docnos)
        raise EvaluationError(
            f"no document of the run ({_examples(found)}) is judged for any query "
            f"({_examples(known)}); {advice}"
        )


def _vague_thresholds(measures: Sequence[Measure], judged: Mapping[str, dict[str, int]]) -> str:
    """Returns the warning about binary measures without ``rel`` on graded judgments, if any."""
    vague = [m for m in measures if _is_binary(m) and "rel" not in m.params]
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
    out = dict[str, FloatArray]()
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


# Comparison


@dataclass(frozen=True, eq=False)
class Comparison:
    """Systems against a baseline, query by query.

    Attributes:
        evaluations: All systems, the baseline among them, in the order given.
        baseline: Its name.
        test: ``t``, ``wilcoxon`` or ``randomisation``; paired and two-sided.
        correction: ``holm``, ``bonferroni`` or ``none``; over the systems, for each measure.
        alpha: ``significant`` means ``p_corrected < alpha``.
        seed: Of the randomisation test.
        table: One row per system (other than the baseline) and measure: ``system``, ``measure``,
            ``mean``, ``baseline`` (its mean), ``difference`` (of the means), ``p``,
            ``p_corrected``, ``significant``, ``wins``, ``ties``, ``losses`` (queries) and
            ``robustness``, (wins - losses) / queries.
    """

    evaluations: tuple[Evaluation, ...]
    baseline: str
    test: Test
    correction: Correction
    alpha: float
    seed: int
    table: pd.DataFrame


def compare(
    evaluations: Sequence[Evaluation],
    baseline: str | None = None,
    *,
    test: Test = "t",
    correction: Correction = "holm",
    alpha: float = 0.05,
    seed: int = 42,
) -> Comparison:
    """Tests every system against the baseline: paired, two-sided, over the same judged queries.

    For each measure, the p values of the systems are corrected together; measures are not. A
    difference below 1e-9 of a query's values is a tie and taken as 0; where all are ties, p is 1.

    Args:
        evaluations: At least two, of different names, over the same queries and measures.
        baseline: Name of one of them; the first unless given.
        test: Student's t, Wilcoxon's signed ranks (scipy's defaults, differences rounded to 9
            decimals), or randomisation of the signs: (extreme + 1) / (flips + 1) over 10,000
            flips, exact up to 13 queries that differ.
        correction: Over the systems compared; ``none`` leaves the p values as they are.
        alpha: Level of significance, between 0 and 1.
        seed: Of the randomisation; each pair of systems starts from it anew.

    Raises:
        SpecError: For an unknown baseline, test or correction, or alpha out of range.
        EvaluationError: For fewer than two evaluations, repeated names, other measures or queries
            than the baseline's, or fewer than two judged queries.
    """
    _choice(test, _TESTS, "test")
    _choice(correction, _CORRECTIONS, "correction")
    if not 0 < alpha < 1:
        raise SpecError(f"compare: alpha is {alpha!r}; it must lie between 0 and 1")
    systems = _distinct(evaluations)
    if len(systems) < 2:
        raise EvaluationError(f"compare: {len(systems)} evaluation given; at least two are needed")
    first = next(iter(systems)) if baseline is None else baseline
    if first not in systems:
        raise SpecError(
            f"compare: no evaluation is named {first!r}"
            f"{did_you_mean(first, systems) or '; there are ' + ', '.join(systems)}"
        )
    base = systems[first]
    others = [system for name, system in systems.items() if name != first]
    for other in others:
        _check_comparable(other, base)
    rows = list[dict[str, Any]]()
    for measure in base.per_query.columns:
        pairs = [_pair(other, base, measure, test, seed) for other in others]
        corrected = _CORRECTIONS[correction]([pair["p"] for pair in pairs])
        for pair, p in zip(pairs, corrected, strict=True):
            rows.append({**pair, "p_corrected": p, "significant": p < alpha})
    order = {system.name: i for i, system in enumerate(others)}
    rows.sort(key=lambda row: order[row["system"]])
    table = pd.DataFrame(rows)[list(_PAIR)].astype({"system": object, "measure": object})
    return Comparison(tuple(systems.values()), first, test, correction, alpha, seed, table)


_PAIR = (
    "system",
    "measure",
    "mean",
    "baseline",
    "difference",
    "p",
    "p_corrected",
    "significant",
    "wins",
    "ties",
    "losses",
    "robustness",
)


def _choice(value: str, known: Iterable[str], what: str) -> None:
    known = list(known)
    if value not in known:
        raise SpecError(
            f"{what} is {shorten(value)}; it must be one of {', '.join(known)}"
            f"{did_you_mean(str(value), known)}"
        )


def _distinct(evaluations: Iterable[Evaluation]) -> dict[str, Evaluation]:
    systems = dict[str, Evaluation]()
    for evaluation in evaluations:
        if evaluation.name in systems:
            raise EvaluationError(
                f"two evaluations are named {evaluation.name!r}; evaluate one with another name="
            )
        systems[evaluation.name] = evaluation
    return systems


def _check_comparable(other: Evaluation, base: Evaluation) -> None:
    for what, mine, theirs in (
        ("measures", base.per_query.columns, other.per_query.columns),
        ("queries", base.per_query.index, other.per_query.index),
    ):
        only_base, only_other = mine.difference(theirs), theirs.difference(mine)
        if len(only_base) or len(only_other):
            sides = [
                f"only {system.name!r} has {_examples(only)}{', …' if len(only) > 3 else ''}"
                for system, only in ((base, only_base), (other, only_other))
                if len(only)
            ]
            raise EvaluationError(
                f"compare: {base.name!r} and {other.name!r} were evaluated on different {what}: "
                f"{'; '.join(sides)}; evaluate both with the same judgments, topics and measures"
            )
    if base.n_judged < 2:
        raise EvaluationError("compare: a paired test needs at least two judged queries, found one")


def _pair(
    other: Evaluation, base: Evaluation, measure: str, test: str, seed: int
) -> dict[str, Any]:
    theirs = other.per_query[measure].reindex(base.per_query.index).to_numpy(np.float64)
    difference = theirs - base.per_query[measure].to_numpy(np.float64)
    difference[np.abs(difference) < TIE] = 0.0
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    mean, reference = float(other.mean[measure]), float(base.mean[measure])
    return {
        "system": other.name,
        "measure": measure,
        "mean": mean,
        "baseline": reference,
        "difference": mean - reference,
        "p": _TESTS[test](difference, seed) if difference.any() else 1.0,
        "wins": wins,
        "ties": len(difference) - wins - losses,
        "losses": losses,
        "robustness": (wins - losses) / len(difference),
    }


def _t_test(difference: FloatArray, seed: int) -> float:
    # scipy.stats takes two seconds to import, and its ttest_rel warns where all differences are
    # equal; the distribution alone does neither.
    from scipy.special import stdtr

    n = len(difference)
    spread = float(difference.std(ddof=1)) / math.sqrt(n)
    mean = abs(float(difference.mean()))
    if spread <= mean * 1e-15:  # equal but for rounding: t is infinite
        return 0.0
    return float(2 * stdtr(n - 1, -mean / spread))


def _wilcoxon(difference: FloatArray, seed: int) -> float:
    from scipy.stats import wilcoxon

    # Ranks must not tell 0.1 from 0.30000000000000004 - 0.2.
    return float(wilcoxon(np.round(difference, 9)).pvalue)


def _randomisation(difference: FloatArray, seed: int) -> float:
    change = difference[difference != 0]
    n = len(change)
    # Sums of the same numbers in another order differ by rounding; those are equal.
    reach = abs(float(change.sum())) - 1e-9 * float(np.abs(change).sum())
    if 2**n <= FLIPS:
        negative = np.arange(2**n)[:, None] >> np.arange(n) & 1
        return float((np.abs((1.0 - 2.0 * negative) @ change) >= reach).mean())
    rng = np.random.default_rng(seed)
    extreme, block = 0, 500
    for _ in range(FLIPS // block):
        signs = 1.0 - 2.0 * rng.integers(0, 2, size=(block, n), dtype=np.int8)
        extreme += int((np.abs(signs @ change) >= reach).sum())
    return (extreme + 1) / (FLIPS + 1)


def _holm(p: Sequence[float]) -> list[float]:
    """Returns Holm's step-down adjusted p values.

    >>> _holm([0.25, 0.125])
    [0.25, 0.25]
    """
    out, least = [0.0] * len(p), 0.0
    for step, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        least = max(least, min(1.0, (len(p) - step) * p[i]))
        out[i] = least
    return out


def _bonferroni(p: Sequence[float]) -> list[float]:
    return [min(1.0, len(p) * value) for value in p]


_TESTS: Mapping[str, Callable[[FloatArray, int], float]] = {
    "t": _t_test,
    "wilcoxon": _wilcoxon,
    "randomisation": _randomisation,
}
_CORRECTIONS: Mapping[str, Callable[[Sequence[float]], list[float]]] = {
    "holm": _holm,
    "bonferroni": _bonferroni,
    "none": list,
}


# Tables


def render(
    value: Comparison | Evaluation | Sequence[Evaluation],
    format: Format = "text",
    per_query: bool = False,
    digits: int = 4,
) -> str:
    """Returns a table: systems as rows, the means of the measures as columns.

    A comparison adds a mark for significance, queries won, tied and lost, and says in a note what
    was tested. Notes tell how many queries were judged and which had no results.

    Args:
        value: What `evaluate` or `compare` returned, or several evaluations.
        format: ``text``, ``markdown``, ``csv`` or ``json``. The last two carry full precision and p
            values and leave the notes to columns and fields.
        per_query: Adds the values of every query; in CSV they replace the means.
        digits: Decimals of text and markdown.

    Returns:
        Lines without a final line end. A measure that only some systems have shows as ``-``
        (empty in CSV).

    Raises:
        SpecError: For an unknown format or digits below 0.
        EvaluationError: If two evaluations share a name, or there are none.
    """
    comparison = value if isinstance(value, Comparison) else None
    if isinstance(value, Comparison):
        value = value.evaluations
    systems = list(_distinct([value] if isinstance(value, Evaluation) else value).values())
    if not systems:
        raise EvaluationError("render: no evaluations given")
    _choice(format, ("text", "markdown", "csv", "json"), "format")
    if digits < 0:
        raise SpecError(f"digits is {digits}; it must be 0 or more")
    if format == "json":
        return _json(systems, comparison, per_query)
    if format == "csv":
        return _csv(_query_rows(systems, repr) if per_query else _csv_rows(systems, comparison))

    def number(value: float) -> str:
        return f"{value:.{digits}f}"

    markdown = format == "markdown"
    table = _markdown if markdown else _text
    tables = [table(_mean_rows(systems, comparison, number, " " * (not markdown)), 1)]
    if per_query:
        tables.append(table(_query_rows(systems, number, "-"), 2))
    notes = _notes(systems, comparison)
    if markdown:
        notes = [f"- {_escape(note)}" for note in notes]
    return "\n\n".join([*tables, "\n".join(notes)])


def _union(systems: Sequence[Evaluation]) -> list[str]:
    return list(dict.fromkeys(name for system in systems for name in system.per_query.columns))


def _pairs(comparison: Comparison | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the comparison's numbers as Python values, by system and measure."""
    if comparison is None:
        return {}
    columns = {name: comparison.table[name].tolist() for name in _PAIR}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {(row["system"], row["measure"]): row for row in rows}


def _mean_rows(
    systems: Sequence[Evaluation],
    comparison: Comparison | None,
    number: Callable[[float], str],
    unmarked: str,
) -> list[list[str]]:
    measures, pairs = _union(systems), _pairs(comparison)
    compared = [] if comparison is None else ["W/T/L"]
    rows = [["system", *(cell for name in measures for cell in (name, *compared))]]
    for system in systems:
        mean, row = system.mean, [system.name]
        for name in measures:
            cell = number(mean[name]) if name in mean else "-"
            pair = pairs.get((system.name, name))
            if comparison is not None:
                row.append(cell + ("*" if pair and pair["significant"] else unmarked))
                row.append(f"{pair['wins']}/{pair['ties']}/{pair['losses']}" if pair else "")
            else:
                row.append(cell)
        rows.append(row)
    return rows


def _query_rows(
    systems: Sequence[Evaluation], number: Callable[[float], str], absent: str = ""
) -> list[list[str]]:
    measures = _union(systems)
    rows = [["system", "qid", *measures]]
    for system in systems:
        columns = [
            map(number, system.per_query[name].tolist())
            if name in system.per_query
            else [absent] * system.n_judged
            for name in measures
        ]
        for qid, *cells in zip(system.per_query.index, *columns, strict=True):
            rows.append([system.name, qid, *cells])
    return rows


def _csv_rows(systems: Sequence[Evaluation], comparison: Comparison | None) -> list[list[str]]:
    measures, pairs = _union(systems), _pairs(comparison)
    fields = _PAIR[4:] if comparison is not None else ()
    head = [cell for name in measures for cell in (name, *(f"{name} {part}" for part in fields))]
    rows = [["system", *head, "judged", "without results", "dropped", "unjudged"]]
    for system in systems:
        mean, row = system.mean, [system.name]
        for name in measures:
            pair = pairs.get((system.name, name), {})
            row.append(repr(float(mean[name])) if name in mean else "")
            row.extend(str(pair.get(part, "")) for part in fields)
        counts = (system.n_judged, len(system.missing), system.dropped, system.unjudged)
        rows.append([*row, *map(str, counts)])
    return rows


def _csv(rows: Sequence[Sequence[str]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue().removesuffix("\n")


def _json(systems: Sequence[Evaluation], comparison: Comparison | None, per_query: bool) -> str:
    pairs = _pairs(comparison)
    out = dict[str, Any]()
    if comparison is not None:
        for name in ("baseline", "test", "correction", "alpha", "seed"):
            out[name] = getattr(comparison, name)
    out["systems"] = [
        {
            "name": system.name,
            "judged": system.n_judged,
            "without_results": list(system.missing),
            "dropped": system.dropped,
            "unjudged": system.unjudged,
            "mean": system.mean.to_dict(),
        }
        for system in systems
    ]
    for system, entry in zip(systems, out["systems"], strict=True):
        compared = {
            measure: {part: pair[part] for part in _PAIR[4:]}
            for (name, measure), pair in pairs.items()
            if name == system.name
        }
        if compared:
            entry["compared"] = compared
        if per_query:
            entry["per_query"] = system.per_query.to_dict("index")
    return json.dumps(out, indent=2, ensure_ascii=False, allow_nan=False)


def _text(rows: Sequence[Sequence[str]], left: int) -> str:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _markdown(rows: Sequence[Sequence[str]], left: int) -> str:
    head, *body = [[_escape(cell) for cell in row] for row in rows]
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def _escape(text: str) -> str:
    return re.sub(r"([\\|*_`<])", r"\\\1", " ".join(text.split()))


def _notes(systems: Sequence[Evaluation], comparison: Comparison | None) -> list[str]:
    coverage = [_coverage(system) for system in systems]
    if all(lines == coverage[0] for lines in coverage):
        notes = coverage[0]
    else:
        notes = [
            f"{system.name}: {line}"
            for system, lines in zip(systems, coverage, strict=True)
            for line in lines
        ]
    vague = [name for name in _union(systems) if _hides_threshold(name)]
    if vague:
        notes = [*notes, f"{', '.join(vague)}: grade 1 and above counts as relevant"]
    if comparison is not None:
        notes = [*notes, *_test_notes(comparison)]
    return notes


def _coverage(system: Evaluation) -> list[str]:
    line = f"{system.n_judged} judged"
    if system.missing:
        more = ", …" if len(system.missing) > 10 else ""
        line += f", {len(system.missing)} without results: {', '.join(system.missing[:10])}{more}"
    lines = [line]
    for count, what in (
        (system.unjudged, "unjudged {} in the run ignored"),
        (system.dropped, "judged {} not among the topics dropped"),
    ):
        if count:
            lines.append(f"{count} {what.format('query' if count == 1 else 'queries')}")
    return lines


def _hides_threshold(column: str) -> bool:
    base = re.match(r"[^(@]*", column)
    measure = ir_measures.measures.registry.get(base[0] if base else "")
    return measure is not None and _is_binary(measure) and "rel=" not in column


def _test_notes(comparison: Comparison) -> list[str]:
    test = {
        "t": "t-test",
        "wilcoxon": "Wilcoxon signed-rank test",
        "randomisation": f"randomisation test (up to {FLIPS} flips, seed {comparison.seed})",
    }[comparison.test]
    n = len(comparison.evaluations) - 1
    over = f"over the {n} systems compared" if n > 1 else "over one system compared"
    corrected = {
        "holm": f"Holm's correction {over}, for each measure",
        "bonferroni": f"Bonferroni's correction {over}, for each measure",
        "none": "no correction",
    }[comparison.correction]
    return [
        f"* p < {comparison.alpha} against {comparison.baseline}: "
        f"paired two-sided {test}, {corrected}",
        f"W/T/L: queries won, tied, lost against {comparison.baseline}",
    ]


__all__ = [
    "PRESETS",
    "Comparison",
    "Evaluation",
    "compare",
    "evaluate",
    "parse_measures",
    "render",
]

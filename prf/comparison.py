"""Paired comparison of systems: differences, significance, queries won, tied and lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from prf.errors import EvaluationError, SpecError, did_you_mean, shorten
from prf.evaluation import Evaluation, examples

FloatArray = npt.NDArray[np.float64]
Test = Literal["t", "wilcoxon", "randomisation"]
Correction = Literal["holm", "bonferroni", "none"]

TIE = 1e-9
"""Differences of a query's values below this are rounding and count as ties."""

FLIPS = 10_000
"""Random sign flips of the randomisation test; all 2^n are enumerated where that is fewer."""


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
    choice(test, _TESTS, "test")
    choice(correction, _CORRECTIONS, "correction")
    if not 0 < alpha < 1:
        raise SpecError(f"compare: alpha is {alpha!r}; it must lie between 0 and 1")
    systems = distinct(evaluations)
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
    table = pd.DataFrame(rows)[list(PAIR)].astype({"system": object, "measure": object})
    return Comparison(tuple(systems.values()), first, test, correction, alpha, seed, table)


PAIR = (
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


def choice(value: str, known: Iterable[str], what: str) -> None:
    """Refuses a value that is none of the known ones, with a SpecError."""
    known = list(known)
    if value not in known:
        raise SpecError(
            f"{what} is {shorten(value)}; it must be one of {', '.join(known)}"
            f"{did_you_mean(str(value), known)}"
        )


def distinct(evaluations: Iterable[Evaluation]) -> dict[str, Evaluation]:
    """Returns the evaluations by name; two of one name are an EvaluationError."""
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
                f"only {system.name!r} has {examples(only)}{', …' if len(only) > 3 else ''}"
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

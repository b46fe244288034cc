"""What was compared, what it cost and how consistent it was, for each query and in total."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prf.prp.algorithms import Pair
from prf.prp.answers import Answer

COUNTERS = (
    "pairs_requested",
    "pairs_evaluated",
    "prompts",
    "prompts_sent",
    "cache_hits",
    "prompt_tokens",
    "completion_tokens",
    "empty_texts",
    "cut_passages",
    "censored",
)
"""Whole numbers that add up over queries. A pair has one prompt, or two in both orders; ``prompts``
were sent or found in the cache. Tokens are those of the prompts that were sent."""


@dataclass
class Compared:
    """The comparisons of one query.

    Attributes:
        n: Documents.
        outcomes: 1, 0 or -1 of each pair that was decided, by positions in the initial order.
        answers: The answers behind it: the first passage of the pair shown first, and second.
        counts: See `COUNTERS`.
        complete: Whether no budget stopped it.
        ranking: Positions, best first.
        cost: In the currency of the backend's prices; NaN without prices.
        error: Why answers are missing, where the stage was told to go on.
    """

    n: int
    outcomes: dict[Pair, int] = field(default_factory=dict)
    answers: dict[Pair, tuple[Answer | None, Answer | None]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    complete: bool = True
    ranking: list[int] = field(default_factory=list)
    cost: float = math.nan

    def figures(self) -> dict[str, Any]:
        """Returns counts and rates as plain numbers; NaN where nothing was measured.

        ``consistency``: of pairs asked in both orders with two verdicts, the share in which both
        orders name one passage. ``bias_first``: pairs in which both orders prefer the passage shown
        first, less those that prefer the second, by all pairs asked in both orders; -1 to 1.
        ``tie_rate``, ``invalid_rate``: of pairs, and of answers. ``mean_margin``: mean of the size
        of the margins. ``cycles``: circular triads i > j > k > i among the ``triples`` of which all
        three pairs were compared; ``zeta`` (Kendall's) where all pairs were and none tied: 1 is no
        cycle. ``tau``: Kendall's of the initial and the final order.
        """
        both = [(one, two) for one, two in self.answers.values() if one and two]
        answers = [a for pair in self.answers.values() for a in pair if a]
        verdicts = [(one.win, two.win) for one, two in both if one.valid and two.valid]
        decided = [(a, b) for a, b in verdicts if a and b]
        margins = [abs(a.margin) for a in answers if a.margin is not None]
        cycles, triples = circular_triads(self.n, self.outcomes)
        first = sum(a == b == 1 for a, b in verdicts) - sum(a == b == -1 for a, b in verdicts)
        return {
            **self.counts,
            "cost": self.cost,
            "complete": self.complete,
            "consistency": _share(sum(a == -b for a, b in decided), len(decided)),
            "bias_first": _share(first, len(both)),
            "tie_rate": _share(sum(v == 0 for v in self.outcomes.values()), len(self.outcomes)),
            "invalid_rate": _share(sum(not a.valid for a in answers), len(answers)),
            "mean_margin": float(np.mean(margins)) if margins else math.nan,
            "cycles": cycles,
            "triples": triples,
            "zeta": zeta(self.n, self.outcomes),
            "tau": kendall_tau(self.ranking),
        }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def circular_triads(n: int, outcomes: Mapping[Pair, int]) -> tuple[int, int]:
    """Returns the circular triads of the strict wins, and the triples compared in full.

    >>> circular_triads(3, {(0, 1): 1, (1, 2): 1, (0, 2): -1})
    (1, 1)
    """
    wins, known = np.zeros((n, n)), np.zeros((n, n))
    for (i, j), value in outcomes.items():
        known[i, j] = known[j, i] = 1
        if value:
            wins[(i, j) if value > 0 else (j, i)] = 1
    return (
        round(float(np.trace(wins @ wins @ wins)) / 3),
        round(float(np.trace(known @ known @ known)) / 6),
    )


def zeta(n: int, outcomes: Mapping[Pair, int]) -> float:
    """Returns Kendall's coefficient of consistence of a tournament; NaN if it is none.

    >>> zeta(3, {(0, 1): 1, (1, 2): 1, (0, 2): 1}), zeta(3, {(0, 1): 1, (1, 2): 1, (0, 2): -1})
    (1.0, 0.0)
    """
    if n < 3 or len(outcomes) < n * (n - 1) // 2 or not all(outcomes.values()):
        return math.nan
    most = (n**3 - n) / 24 if n % 2 else (n**3 - 4 * n) / 24
    return 1 - circular_triads(n, outcomes)[0] / most


def kendall_tau(ranking: list[int]) -> float:
    """Returns Kendall's tau of 0, 1, 2, ... and a permutation of it; NaN for fewer than two.

    >>> kendall_tau([0, 1, 2]), kendall_tau([2, 1, 0])
    (1.0, -1.0)
    """
    n = len(ranking)
    if n < 2:
        return math.nan
    order = np.asarray(ranking)
    signs = np.sign(order[None, :] - order[:, None])[np.triu_indices(n, 1)]
    return float(signs.mean())


def total(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sums of counts and the means of rates over queries, NaN left out of a mean."""
    rows = list(rows)
    out: dict[str, Any] = {"queries": len(rows)}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        if name == "complete":
            out[name] = all(values)
        elif name in COUNTERS or name in ("cycles", "triples", "cost"):
            out[name] = sum(values)
        elif name != "qid":
            known = [value for value in values if not math.isnan(value)]
            out[name] = float(np.mean(known)) if known else math.nan
    return out

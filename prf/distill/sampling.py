"""Which pairs of a list a teacher compares: a few of them, drawn by their ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from prf.frames import IntArray

Sampler = Literal["random", "rr", "rrsum", "rrdiff", "window", "all"]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Drawn:
    """Pairs of places in a list, from 0, ordered by the first, then the second.

    Attributes:
        first: (m,) the place of the better initial rank.
        second: (m,) the other one.
        chance: (m,) how likely the pair was drawn, above 0 and at most 1.
    """

    first: IntArray
    second: IntArray
    chance: Floats


def draw_pairs(
    count: int,
    sampler: Sampler = "random",
    *,
    rate: float = 0.02,
    least: int = 1,
    window: int = 1,
    spanning: bool = False,
    seed: int = 1,
    qid: str = "",
) -> Drawn:
    """Draws pairs of a list without replacement, by one key ``log(U) / weight`` for each pair.

    The weights are ours, the names those of Wu et al., ReNeuIR@SIGIR 2025, arXiv 2507.04820, who
    sample by reciprocal ranks; r is the initial rank from 1. The draw by keys is of Efraimidis and
    Spirakis, Information Processing Letters 97 (2006).

    Args:
        count: Documents of the list; with fewer than two there is no pair.
        sampler: The weight of a pair: ``random`` 1; ``rr`` 1/(r_i r_j), both near the top;
            ``rrsum`` 1/r_i + 1/r_j, one of them near the top; ``rrdiff`` |1/r_i - 1/r_j|, top
            against the rest; ``window`` 1 up to a distance of ranks, else 0; ``all`` takes all.
        rate: Share of all pairs that are drawn, rounded.
        least: The fewest that are drawn, if there are so many.
        window: The distance.
        spanning: Draw a random tree over all documents first, which counts towards the number and
            may exceed it.
        seed: Of the draw, with the qid.
        qid: The query.

    Returns:
        The pairs. ``chance`` is exact for ``random``, ``window`` and where all are drawn; otherwise
        it is 1 - exp(-weight t), with t such that the chances add up to the number of pairs, which
        is close but for lists of few documents. A pair is in the tree with chance 2/count.
    """
    first, second = np.triu_indices(count, 1)
    pairs = len(first)
    if pairs == 0:
        return Drawn(first, second, np.zeros(0))
    weight = _weights(first + 1, second + 1, sampler, window)
    wanted = pairs if sampler == "all" else max(least, round(rate * pairs))
    rng = np.random.default_rng([seed, *hashlib.sha256(qid.encode()).digest()[:8]])
    tree = np.zeros(pairs, dtype=bool)
    if spanning:
        tree[_tree(count, rng)] = True
    number = min(max(0, wanted - int(tree.sum())), int((weight[~tree] > 0).sum()))
    with np.errstate(divide="ignore"):
        keys = np.log(rng.random(pairs)) / weight
    keys[tree | (weight == 0)] = -np.inf
    taken = np.argsort(-keys, kind="stable")[:number]
    chosen = tree.copy()
    chosen[taken] = True
    hung = min(1.0, 2 / count) if spanning else 0.0  # chance of a place in the tree
    rest = number / (1 - hung) if hung < 1 else 0.0  # as the tree's pairs are drawn no more
    chance = hung + (1 - hung) * _chances(weight, min(rest, float((weight > 0).sum())))
    return Drawn(first[chosen], second[chosen], chance[chosen])


def _weights(one: IntArray, two: IntArray, sampler: Sampler, window: int) -> Floats:
    """Returns the weight of pairs of ranks, the first the better."""
    if sampler == "rr":
        return np.asarray(1 / (one * two))
    if sampler == "rrsum":
        return np.asarray(1 / one + 1 / two)
    if sampler == "rrdiff":
        return np.asarray(1 / one - 1 / two)
    if sampler == "window":
        return (two - one <= window).astype(np.float64)
    return np.ones(len(one))


def _tree(count: int, rng: np.random.Generator) -> IntArray:
    """Returns the numbers of the pairs of a random tree: each document hangs on an earlier one."""
    order = rng.permutation(count)
    parents = (rng.random(count - 1) * np.arange(1, count)).astype(np.int64)
    one, two = order[1:], order[parents]
    low, high = np.minimum(one, two), np.maximum(one, two)
    numbers: IntArray = low * (2 * count - low - 1) // 2 + high - low - 1
    return numbers


def _chances(weight: Floats, number: float) -> Floats:
    """Returns how likely each pair is among ``number`` drawn ones."""
    there = weight > 0
    if number == there.sum() or len(np.unique(weight[there])) == 1:
        return np.where(there, number / max(1, there.sum()), 0.0)
    low, high = 0.0, 1.0
    while (1 - np.exp(-weight * high)).sum() < number:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if (1 - np.exp(-weight * middle)).sum() < number:
            low = middle
        else:
            high = middle
    return np.asarray(1 - np.exp(-weight * high))

"""Rankings from comparisons: Allpair, Sorting and Sliding-K.

Each algorithm works on the positions 0, 1, ... of a list in its initial order. `rounds` is a
generator: it yields lists of pairs ``(i, j)`` that do not depend on each other, and is sent one
outcome a pair: 1 if i is better, -1 if j is, 0 for a tie, None if it stays unknown because a budget
is used up. `ranking` is a permutation at any moment, so that any stop leaves a valid ranking.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import combinations
from typing import Literal

import numpy as np

Pair = tuple[int, int]
Outcomes = Sequence[int | None]
Rounds = Generator[list[Pair], Outcomes, None]
Variant = Literal["sliding", "sorting", "allpair"]
Ties = Literal["initial", "noswap"]


class Allpair:
    """Every pair once; a document gets 1 for a win and 1/2 for a tie.

    Source: Qin et al., Findings of NAACL 2024, arXiv 2306.17563, section 3.2 (PRP-Allpair).
    """

    def __init__(self, n: int) -> None:
        self.points = np.zeros(n)
        self._seen = np.zeros(n)

    def rounds(self) -> Rounds:
        """Yields all n(n-1)/2 pairs at once."""
        pairs = list(combinations(range(len(self.points)), 2))
        if not pairs:
            return
        for (i, j), value in zip(pairs, (yield pairs), strict=True):
            if value is not None:
                self.points[[i, j]] += (1 + value) / 2, (1 - value) / 2
                self._seen[[i, j]] += 1

    def ranking(self) -> list[int]:
        """Returns the positions by mean points, best first, ties in the initial order.

        A document of which nothing is known stands at a half, where a tie with all would put it.
        """
        mean = np.divide(
            self.points, self._seen, out=np.full(len(self.points), 0.5), where=self._seen > 0
        )
        return [int(i) for i in np.argsort(-mean, kind="stable")]


class Sliding:
    """K bubble passes from the bottom of the list to its top; pass p settles rank p.

    A tie never swaps, so the order at hand wins, which is the initial one where neither document
    has moved. Pass p + 1 starts two steps behind pass p: the comparisons of a round touch different
    positions, and the result is that of one pass after another, in n + K - 2 rounds.

    Source: Qin et al., Findings of NAACL 2024, arXiv 2306.17563, section 3.4 (PRP-Sliding-K).
    """

    def __init__(self, n: int, k: int) -> None:
        self._order = list(range(n))
        self._passes = min(k, n - 1)

    def rounds(self) -> Rounds:
        """Yields up to K pairs at a time, the lower document of each first."""
        n, order = len(self._order), self._order
        for number in range(n + self._passes - 2 if self._passes > 0 else 0):
            steps = [(number - 2 * p, p) for p in range(self._passes)]
            lows = [n - 1 - step for step, p in steps if 0 <= step <= n - 2 - p]
            values = yield [(order[low], order[low - 1]) for low in lows]
            for low, value in zip(lows, values, strict=True):
                if value == 1:
                    order[low - 1], order[low] = order[low], order[low - 1]

    def ranking(self) -> list[int]:
        """Returns the list as it stands."""
        return list(self._order)


class Sorting:
    """Heapsort that stops after the K best; the rest keeps its initial order.

    With ties ``initial`` a tie goes to the document that stood higher, which makes an order of all
    documents; with ``noswap`` a tie moves nothing, as published code does, and a heap scrambles
    tied documents.

    Source: Qin et al., Findings of NAACL 2024, arXiv 2306.17563, section 3.3 (PRP-Sorting).
    """

    def __init__(self, n: int, k: int, ties: Ties = "initial") -> None:
        self._heap = list(range(n))
        self._k, self._ties = min(k, n), ties
        self._best: list[int] = []

    def rounds(self) -> Rounds:
        """Yields the pairs of one step: one, or while the heap is built one for each subtree."""
        heap = self._heap
        if len(heap) < 2:
            return
        # Subtrees of one level share no document, so each level sifts all of them side by side.
        first = 1 << (len(heap).bit_length() - 1)
        while first >= 1:
            nodes = range(min(2 * first - 1, len(heap) // 2) - 1, first - 2, -1)
            yield from _together([self._sift(node, len(heap)) for node in nodes])
            first //= 2
        for size in range(len(heap) - 1, -1, -1):
            self._best.append(heap[0])
            if len(self._best) == self._k:
                return
            heap[0] = heap[size]
            yield from self._sift(0, size)

    def _sift(self, node: int, size: int) -> Rounds:
        """Moves the document at a node down until no child is better."""
        heap = self._heap
        while True:
            best = node
            for child in (2 * node + 1, 2 * node + 2):
                if child < size and (yield from self._better(heap[child], heap[best])):
                    best = child
            if best == node:
                return
            heap[node], heap[best] = heap[best], heap[node]
            node = best

    def _better(self, i: int, j: int) -> Generator[list[Pair], Outcomes, bool]:
        value = (yield [(i, j)])[0]
        return value == 1 or (value == 0 and self._ties == "initial" and i < j)

    def ranking(self) -> list[int]:
        """Returns what was taken off the heap, then the rest in its initial order."""
        taken = set(self._best)
        return [*self._best, *(i for i in range(len(self._heap)) if i not in taken)]


def _together(generators: Sequence[Rounds]) -> Rounds:
    """Runs generators that yield one pair at a time side by side, a pair of each in a round."""
    waiting = []
    for generator in generators:
        try:
            waiting.append((generator, next(generator)[0]))
        except StopIteration:
            continue
    while waiting:
        values = yield [pair for _, pair in waiting]
        going = []
        for (generator, _), value in zip(waiting, values, strict=True):
            try:
                going.append((generator, generator.send([value])[0]))
            except StopIteration:
                continue
        waiting = going


Algorithm = Allpair | Sliding | Sorting


def algorithm(variant: Variant, n: int, k: int, ties: Ties = "initial") -> Algorithm:
    """Returns the algorithm of this name for a list of n documents."""
    if variant == "allpair":
        return Allpair(n)
    if variant == "sliding":
        return Sliding(n, k)
    return Sorting(n, k, ties)


def pairs_needed(variant: Variant, n: int, k: int) -> tuple[int, int]:
    """Returns the least and the largest number of pairs that are compared, repeats included.

    >>> pairs_needed("allpair", 100, 10), pairs_needed("sliding", 100, 10)
    ((4950, 4950), (945, 945))
    >>> pairs_needed("sorting", 100, 10)
    (117, 308)
    """
    if n < 2:
        return 0, 0
    if variant == "allpair":
        return n * (n - 1) // 2, n * (n - 1) // 2
    if variant == "sliding":
        k = min(k, n - 1)
        count = k * (n - 1) - k * (k - 1) // 2
        return count, count
    k = min(k, n)
    # Every node but the root is compared once while the heap is built, the children of the root
    # after each document taken off.
    low = n - 1 + sum(min(2, max(0, n - taken - 1)) for taken in range(1, k))
    return low, 2 * n + 2 * (k - 1) * (n.bit_length() - 1)

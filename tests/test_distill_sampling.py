"""Samplers of pairs: how many, which, how likely."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prf.distill.sampling import Sampler, draw_pairs

SAMPLERS: list[Sampler] = ["random", "rr", "rrsum", "rrdiff", "window", "all"]


@given(
    st.integers(0, 12),
    st.sampled_from(SAMPLERS),
    st.floats(0.01, 1),
    st.integers(0, 9),
    st.booleans(),
)
def test_pairs_are_different_in_order_and_as_many_as_asked(
    count: int, sampler: Sampler, rate: float, least: int, spanning: bool
) -> None:
    drawn = draw_pairs(count, sampler, rate=rate, least=least, window=2, spanning=spanning)
    both = list(zip(drawn.first.tolist(), drawn.second.tolist(), strict=True))
    assert both == sorted(set(both))
    assert all(0 <= i < j < count for i, j in both)
    assert ((drawn.chance > 0) & (drawn.chance <= 1)).all()
    pairs = count * (count - 1) // 2
    wanted = pairs if sampler == "all" else min(pairs, max(least, round(rate * pairs)))
    if spanning:
        wanted = max(wanted, min(pairs, max(0, count - 1)))
        reached = {0}
        for _ in range(count):
            reached |= {place for pair in both if reached & set(pair) for place in pair}
        assert len(reached) == max(1, count)
    if sampler != "window":
        assert len(both) == wanted


def test_numbers_of_the_paper_s_setting() -> None:
    assert len(draw_pairs(100, rate=0.02).first) == 99
    assert len(draw_pairs(20, rate=0.02).first) == 4
    assert len(draw_pairs(20, rate=0.02, least=19).first) == 19


def test_window_of_one_is_the_chain() -> None:
    drawn = draw_pairs(6, "window", rate=1.0)
    assert drawn.first.tolist() == [0, 1, 2, 3, 4]
    assert drawn.second.tolist() == [1, 2, 3, 4, 5]
    assert drawn.chance.tolist() == [1.0] * 5


def test_seed_and_qid_decide_the_draw() -> None:
    def drawn(**more: object) -> list[int]:
        found = draw_pairs(30, rate=0.1, **more)  # type: ignore[arg-type]
        return [*found.first.tolist(), *found.second.tolist()]

    assert drawn(seed=1, qid="a") == drawn(seed=1, qid="a")
    assert drawn(seed=1, qid="a") != drawn(seed=2, qid="a")
    assert drawn(seed=1, qid="a") != drawn(seed=1, qid="b")


@pytest.mark.parametrize("spanning", [False, True])
@pytest.mark.parametrize("sampler", ["random", "rr", "rrsum", "rrdiff", "window"])
def test_chances_are_those_of_many_draws(sampler: Sampler, spanning: bool) -> None:
    count, draws = 8, 2000
    often, chance = np.zeros((count, count)), np.zeros((count, count))
    for seed in range(draws):
        drawn = draw_pairs(count, sampler, rate=0.5, window=3, spanning=spanning, seed=seed)
        often[drawn.first, drawn.second] += 1 / draws
        chance[drawn.first, drawn.second] = drawn.chance
    # Exact but for the draws; else also for the formula, which is one of many pairs.
    exact = sampler in ("random", "window") and not spanning
    seen = often > 0
    np.testing.assert_allclose(often[seen], chance[seen], atol=0.04 if exact else 0.08)


def test_head_is_drawn_more_often_by_reciprocal_ranks() -> None:
    def head(sampler: Sampler) -> float:
        found = [draw_pairs(50, sampler, rate=0.02, seed=seed).first for seed in range(50)]
        return float((np.concatenate(found) < 5).mean())

    assert head("random") < head("rrsum") < head("rr")
    assert head("random") < head("rrdiff")

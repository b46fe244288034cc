"""Losses of a student: values worked out by hand, gradients, padding, queries with nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import e, exp, log, log2
from typing import Any

import pytest
import torch
from torch import Tensor

from prf.distill import losses
from prf.distill.losses import Pairs

pytestmark = pytest.mark.models

LISTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": losses.softmax,
    "listnet": lambda s, y, m: losses.listnet(s, y, m, 0.5),
    "listmle": losses.listmle,
    "rmse": losses.rmse,
    "mse": losses.mse,
    "bce": losses.bce,
    **{
        scheme: partial(losses.rank_loss, scheme=scheme, cutoff=3)  # type: ignore[arg-type]
        for scheme in (
            "none", "lambdarank", "ndcgloss1", "ndcgloss2", "ndcgloss2pp", "diff", "squarediff"
        )
    },
}  # fmt: skip
PAIRS: dict[str, Callable[[Tensor, Pairs], Tensor]] = {
    "logistic": lambda s, p: losses.logistic(s, p, 2.0),
    "margin_mse": lambda s, p: losses.margin_mse(s, p, 0.5),
    "hinge": losses.hinge,
}


def scores(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def pairs(*rows: tuple[int, int, int, float, float, float]) -> Pairs:
    columns: Any = list(zip(*rows, strict=True)) or [[]] * 6
    return Pairs(
        *[torch.tensor(column, dtype=torch.int64) for column in columns[:3]],
        *[torch.tensor(column, dtype=torch.float64) for column in columns[3:]],
    )


def value(loss: Tensor) -> float:
    assert loss.shape == (1,)
    return loss.item()


ONE = (1.0, 1.0)
S = scores([2.0, 0.0])
BOTH = torch.tensor([[True, True]])


@pytest.mark.parametrize(("p", "expected"), [(1.0, 0.126928), (0.0, 2.126928), (0.5, 1.126928)])
def test_logistic_by_hand(p: float, expected: float) -> None:
    assert value(losses.logistic(S, pairs((0, 0, 1, p, *ONE)))) == pytest.approx(expected, abs=1e-6)
    equal = value(losses.logistic(scores([3.0, 3.0]), pairs((0, 0, 1, p, *ONE))))
    assert equal == pytest.approx(log(2))


def test_logistic_weighs_pairs_and_divides_by_the_temperature() -> None:
    taught = pairs((0, 0, 1, 1.0, 1.0, 3.0), (0, 1, 0, 1.0, 1.0, 1.0))
    found = value(losses.logistic(S, taught, 2.0))
    assert found == pytest.approx((3 * log(1 + 1 / e) + log(1 + e)) / 4)


def test_margin_mse_and_hinge_by_hand() -> None:
    taught = pairs((0, 0, 1, 1.0, 3.0, 1.0), (0, 1, 0, 1.0, 1.0, 1.0), (0, 0, 1, 0.5, 0.0, 1.0))
    assert value(losses.margin_mse(S, taught, 0.5)) == pytest.approx((0.25 + 6.25 + 4) / 3)
    assert value(losses.hinge(S, taught)) == pytest.approx((0 + 3) / 2)  # the tie does not count


def test_list_losses_by_hand() -> None:
    y = scores([1.0, 0.5])
    assert value(losses.softmax(S, y, BOTH)) == pytest.approx(0.126928, abs=1e-6)
    assert value(losses.listnet(S, y, BOTH)) == pytest.approx(0.882009, abs=1e-6)
    assert value(losses.listmle(S, y, BOTH)) == pytest.approx(0.126928, abs=1e-6)
    assert value(losses.mse(S, y, BOTH)) == pytest.approx(0.625)
    assert value(losses.rmse(S, y, BOTH)) == pytest.approx(0.625**0.5)
    bce = (log(1 + exp(-2)) + log(2)) / 2
    assert value(losses.bce(S, y, BOTH)) == pytest.approx(bce)


def test_lambda_losses_by_hand() -> None:
    s, y = scores([0.0, 2.0]), scores([2.0, 1.0])  # the worse document stands first
    most = 3 / log2(2) + 1 / log2(3)
    gains = abs(3 - 1) / most
    places = 1 / log2(2) - 1 / log2(3)  # ranks 1 and 2, and a distance of 1 and 2
    loss = log(1 + exp(2)) / log(2)
    expected = {
        "none": loss,
        "lambdarank": places * gains * loss,
        "ndcgloss2": places * gains * loss,
        "ndcgloss2pp": 11 * places * gains * loss,
        "diff": loss,
        "squarediff": 3 * loss,
    }
    for scheme, known in expected.items():
        found = value(losses.rank_loss(s, y, BOTH, scheme))  # type: ignore[arg-type]
        assert found == pytest.approx(known), scheme
    one, two = 1 / most / log2(2), 3 / most / log2(3)  # in the order of the scores
    pairs_of_all = one * 1 + two * 1 + one * log2(1 + exp(-2)) + two * loss
    assert value(losses.rank_loss(s, y, BOTH, "ndcgloss1")) == pytest.approx(pairs_of_all / 4)
    assert value(losses.rank_loss(s, y, BOTH, "none", cutoff=1)) == 0


SCORES = scores([0.3, -1.2, 2.0, 0.1], [1.0, 0.2, -0.4, 0.0])
LABELS = scores([0.2, 1.0, 0.0, 0.6], [0.0, 1.0, 0.5, 0.0])
MASK = torch.tensor([[True] * 4, [True] * 3 + [False]])
TAUGHT = pairs((0, 0, 1, 0.9, 2.0, 1.0), (0, 2, 3, 0.2, -1.0, 2.0), (1, 0, 2, 1.0, 0.7, 1.0))


@pytest.mark.parametrize("name", [*LISTS, *PAIRS])
def test_gradients_are_right(name: str) -> None:
    given = SCORES.clone().requires_grad_()
    if name in LISTS:
        assert torch.autograd.gradcheck(lambda s: LISTS[name](s, LABELS, MASK), (given,))
    else:
        assert torch.autograd.gradcheck(lambda s: PAIRS[name](s, TAUGHT), (given,))


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("odd", [7.0, -1e6, float("inf"), float("nan")])
def test_padding_changes_nothing(name: str, odd: float) -> None:
    given = SCORES.clone()
    given[1, 3] = odd
    labels = LABELS.clone()
    labels[1, 3] = odd
    given.requires_grad_()
    found = LISTS[name](given, labels, MASK)
    alone = LISTS[name](SCORES[1:, :3], LABELS[1:, :3], MASK[1:, :3])
    assert found[1].item() == pytest.approx(alone.item())
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None
    assert given.grad[1, 3] == 0
    assert torch.isfinite(given.grad).all()


@pytest.mark.parametrize("name", [*LISTS, *PAIRS])
def test_query_with_nothing_has_loss_0_and_no_gradient(name: str) -> None:
    given = SCORES.clone().requires_grad_()
    if name in LISTS:
        found = LISTS[name](given, LABELS, torch.zeros_like(MASK))
    else:
        found = PAIRS[name](given, pairs())
    assert found.tolist() == [0.0, 0.0]
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert given.grad is None or not given.grad.any()


def test_perfect_scores_have_an_rmse_without_an_odd_gradient() -> None:
    given = LABELS.clone().requires_grad_()
    losses.rmse(given, LABELS, MASK).sum().backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None
    assert not given.grad.any()

"""LAMB as ANCE-PRF was trained with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's step of each tensor, made as long as a share of the tensor itself.

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes,
    ICLR 2020, arXiv 1904.00962, algorithm 2, in the form that ANCE-PRF's training code uses: the
    moments are not corrected for their start, and the length of a tensor counts as at most 10. The
    ratio is 1 where the tensor or its step is zero.

    Args:
        params: Tensors, or groups of them with a ``weight_decay`` of their own.
        lr: Step size.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Added to the step, times the tensor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Does one update; a closure, if given, is run first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._move(tensor, tensor.grad, group)
        return loss

    def _move(self, tensor: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[tensor], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(tensor),
                torch.zeros_like(tensor),
            )
        mean = state["exp_avg"].lerp_(gradient, 1 - first)
        square = state["exp_avg_sq"].lerp_(gradient * gradient, 1 - second)
        move = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * tensor
        length, own = move.norm(), tensor.norm().clamp(max=10)
        ratio = torch.where((length > 0) & (own > 0), own / length, torch.ones_like(own))
        tensor.sub_(move * (ratio * group["lr"]))

"""Several processes that train one network, as ``torchrun`` starts them; one alone needs nothing.

All draw the same batch, each computes its share of the queries, and gradients are summed, so the
update is that of one process (but for rounding and dropout). The first process alone measures and
writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from prf.checkpoints import check_device
from prf.errors import SpecError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: Its number, from 0.
        size: How many there are.
        device: Where it computes.
    """

    rank: int
    size: int
    device: str

    @property
    def first(self) -> bool:
        """Whether this process writes and measures."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Returns which of the queries of a batch are this process's."""
        each = -(-count // self.size)
        return slice(min(self.rank * each, count), min((self.rank + 1) * each, count))

    def wait(self) -> None:
        """Returns when all processes have come here."""
        if self.size > 1:
            dist.barrier()

    def told(self, value: T | None) -> T:
        """Returns the first process's value to all."""
        if self.size > 1:
            box = [value]
            dist.broadcast_object_list(box)
            value = box[0]
        return value  # type: ignore[return-value]

    def summed(self, network: nn.Module, total: float) -> float:
        """Sums the gradients of all processes in place, and returns the sum of their totals."""
        if self.size == 1:
            return total
        own = [p for p in network.parameters() if p.requires_grad]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        flat = torch.cat([part.float().flatten() for part in parts])
        dist.all_reduce(flat)
        place = 0
        for parameter in own:
            part = flat[place : place + parameter.numel()]
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
            place += parameter.numel()
        whole = torch.tensor([total], dtype=torch.float64, device=self.device)
        dist.all_reduce(whole)
        return float(whole)


@contextmanager
def ranks(device: str) -> Iterator[Ranks]:
    """Joins the processes that ``torchrun`` started, or stands alone.

    Args:
        device: ``cpu``, or ``cuda`` for one GPU per process.

    Raises:
        MissingDependency: For a GPU that is not there.
        SpecError: For one GPU that several processes would share.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        check_device(device, "training")
        yield Ranks(0, 1, device)
        return
    if ":" in device:
        raise SpecError(
            f"loop.device is '{device}', one GPU for {size} processes; write 'cuda' for one each"
        )
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        check_device(device, "training")
        torch.cuda.set_device(device)
    # The others wait while the first one prepares data or measures, which may take hours.
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=7))
    try:
        yield Ranks(dist.get_rank(), size, device)
    finally:
        dist.destroy_process_group()

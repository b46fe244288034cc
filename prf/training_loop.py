"""The loop behind ``prf train``: updates, safe points, the dev figure, the finished model.

The loop is our own rather than that of transformers: its safe points would keep the optimiser and
the random states as pickles, which this package neither writes nor reads, and what is trained here
has its whole data in memory. It promises that a training killed at any moment and started again
ends with the same weights, bit for bit, as one left alone (on a CPU with the same number of
threads).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from prf.batch import versions
from prf.distill.config import Distillation
from prf.distill.students import STUDENTS
from prf.errors import PrfError, PrfWarning
from prf.lamb import Lamb
from prf.ranks import Ranks, ranks
from prf.training_config import Loop, Training
from prf.training_state import State, Workplace, workplace
from prf.training_tasks import TASKS, Task
from prf.trec import write_json


def run_training(config: Training | Distillation, *, force: bool, progress: bool) -> dict[str, Any]:
    """Trains what a config says; see `prf.training.train`."""
    with ranks(config.loop.device) as group:
        own = replace(config, loop=replace(config.loop, device=group.device))
        with workplace(config.output, force, group.first) as place, _quietly(own.loop):
            torch.manual_seed(_seed(config.loop.seed, 0))
            task = _task(own, group, progress)
            identity = _identity(config, task, group.size)
            if group.first:
                place.claim(identity, force)
            group.wait()
            state = _Trainer(own.loop, task, place, group, progress and group.first).run()
            record = None
            if group.first:
                if state.best_step >= 0:
                    place.load_best(state.best_step, task.network)
                record = _publish(config, task, place, state)
            return group.told(record)


def _task(config: Training | Distillation, group: Ranks, progress: bool) -> Task:
    """Opens the task; the first process prepares the data that the others then find."""
    if group.first:
        task = _opened(config, progress)
    group.wait()
    return task if group.first else _opened(config, False)


def _opened(config: Training | Distillation, progress: bool) -> Task:
    if isinstance(config, Distillation):
        return STUDENTS[config.method](config, progress=progress)
    return TASKS[config.method](config, progress=progress)


@contextmanager
def _quietly(loop: Loop) -> Iterator[None]:
    """Puts global random states and the number of threads back afterwards."""
    threads = torch.get_num_threads()
    devices = [torch.device(loop.device)] if loop.device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        try:
            if loop.threads:
                torch.set_num_threads(loop.threads)
            yield
        finally:
            torch.set_num_threads(threads)


def _seed(seed: int, step: int) -> int:
    """Returns the seed of torch's generator for one update (0: the weights)."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> 1)


def _identity(config: Training | Distillation, task: Task, size: int) -> dict[str, Any]:
    """Returns what decides the weights; where they are put and cached does not."""
    spec = {k: v for k, v in config.spec().items() if k not in ("output", "cache")}
    return {"config": spec, "data": task.identity, "ranks": size}


def _publish(
    config: Training | Distillation, task: Task, place: Workplace, state: State
) -> dict[str, Any]:
    result = place.folder / "new-result"
    task.save(result)
    epochs = place.lines(state.step)
    record = {
        "config": config.spec(),
        "fingerprints": task.identity,
        "parameters": sum(p.numel() for p in task.network.parameters()),
        "steps": state.step,
        "kept_step": state.best_step if state.best_step >= 0 else state.step,
        "dev": state.best if state.best_step >= 0 else None,
        "seconds": round(state.seconds, 1),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "epochs": epochs,
    }
    write_json(record, result / "training.json")
    with suppress(FileNotFoundError):
        (place.folder / "tensorboard").rename(result / "tensorboard")
    place.publish(result)
    return record


class _Trainer:
    """Runs updates from the last safe point to the end."""

    def __init__(
        self, loop: Loop, task: Task, place: Workplace, group: Ranks, progress: bool
    ) -> None:
        self.loop, self.task, self.place = loop, task, place
        self.group, self.progress = group, progress
        self.per_epoch = math.ceil(len(task) / loop.batch_size)
        self.steps = loop.epochs * self.per_epoch
        self.per_figure = loop.figure_every or self.per_epoch
        matrices = [p for p in task.network.parameters() if p.dim() > 1]
        others = [p for p in task.network.parameters() if p.dim() < 2]
        kind = torch.optim.AdamW if loop.optimiser == "adamw" else Lamb
        self.optimiser = kind(
            [
                {"params": matrices, "weight_decay": loop.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=loop.learning_rate,
        )

    def run(self) -> State:
        state = self.place.point() or State()
        if state.step:
            self.place.restore(state, self.task.network, self.optimiser)
        self.group.wait()
        if self.group.first:
            self.place.rewind(state.step)
        self.task.network.train()
        with (
            tqdm(total=self.steps, initial=state.step, disable=not self.progress) as bar,
            _board(self.place.folder / "tensorboard", state.step, self.group.first) as board,
        ):
            while state.step < self.steps and not self._stopped(state):
                begun = time.perf_counter()
                state = self._update(state)
                bar.update()
                measured = state.step % self.per_figure == 0 or state.step == self.steps
                spent = time.perf_counter() - begun
                state = replace(state, seconds=state.seconds + spent)
                if measured:
                    state, entry = self._measure(state)
                    bar.set_postfix(loss=f"{entry['loss']:.4f}", dev=entry.get("dev", "none"))
                    for name in ("loss", "dev", "learning_rate"):
                        if name in entry:
                            board(name, entry[name], state.step)
                due = self.loop.save_every and state.step % self.loop.save_every == 0
                if self.group.first and (measured or due):
                    self.place.save(state, self.task.network, self.optimiser)
        return state

    def _stopped(self, state: State) -> bool:
        return 0 < self.loop.patience <= state.waited

    def _rate(self, step: int) -> float:
        """Returns the learning rate of an update, counted from 1: up in a line, then down."""
        rising = self.loop.warmup * self.steps
        falling = (self.steps - step + 1) / max(1.0, self.steps - rising)
        return self.loop.learning_rate * min(1.0, falling, step / rising if rising else 1.0)

    def _update(self, state: State) -> State:
        """Does one update; all it draws follows from the seed and its number."""
        step, loop, network = state.step + 1, self.loop, self.task.network
        epoch, number = divmod(state.step, self.per_epoch)
        order = np.random.default_rng([loop.seed, 1, epoch]).permutation(len(self.task))
        queries = order[number * loop.batch_size : (number + 1) * loop.batch_size]
        batch = self.task.batch(queries, np.random.default_rng([loop.seed, 2, step]))
        torch.manual_seed(_seed(loop.seed, step) + self.group.rank)
        total, own = 0.0, self.group.share(len(queries))
        size = math.ceil(loop.batch_size / loop.accumulate)
        for start in range(own.start, own.stop, size):
            losses = self.task.losses(batch, slice(start, min(start + size, own.stop)))
            (losses.sum() / len(queries)).backward()  # type: ignore[no-untyped-call]
            total += float(losses.detach().sum(dtype=torch.float64))
        total = self.group.summed(network, total)
        if not math.isfinite(total):
            raise PrfError(
                f"the loss of update {step} is {total}; lower loop.learning_rate or raise "
                f"loss.temperature, and start anew (--force)"
            )
        if loop.clip:
            nn.utils.clip_grad_norm_(network.parameters(), loop.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = self._rate(step)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return replace(
            state, step=step, loss_sum=state.loss_sum + total, seen=state.seen + len(queries)
        )

    def _measure(self, state: State) -> tuple[State, dict[str, Any]]:
        """Measures and logs; keeps the network if it is the best so far."""
        entry = {
            "step": state.step,
            "epoch": round(state.step / self.per_epoch, 3),
            "loss": state.loss_sum / state.seen,
            "learning_rate": self._rate(state.step),
        }
        begun = time.perf_counter()
        figure = self._figure(first=state.step == self.per_figure)
        if figure is not None:
            entry["dev"] = figure
            better = state.best_step < 0 or figure > state.best
            if better:
                if self.group.first:
                    self.place.save_best(state.step, self.task.network)
                state = replace(state, best_step=state.step, best=figure, waited=0)
            else:
                state = replace(state, waited=state.waited + 1)
        spent = state.seconds + time.perf_counter() - begun
        if self.group.first:
            self.place.note({**entry, "seconds": round(spent, 2)})
        return replace(state, loss_sum=0.0, seen=0, seconds=spent), entry

    def _figure(self, first: bool) -> float | None:
        if not self.group.first:
            return self.group.told(None)
        with warnings.catch_warnings():
            if not first:  # said once is enough
                warnings.simplefilter("ignore", PrfWarning)
            return self.group.told(self.task.figure())


@contextmanager
def _board(folder: Path, step: int, wanted: bool) -> Iterator[Any]:
    """Gives a function that writes a number for TensorBoard, or does nothing without it."""
    if not wanted:
        yield lambda *_: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warnings.warn(
            "tensorboard is not installed, so the log is log.jsonl alone; "
            'pip install "prf-ir[train]" brings it',
            PrfWarning,
            stacklevel=2,
        )
        yield lambda *_: None
        return
    writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
    try:
        yield lambda name, value, at: writer.add_scalar(name, value, at)
    finally:
        writer.close()

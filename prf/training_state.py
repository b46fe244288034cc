"""Safe points of a training: what is on disk at any moment is whole, and enough to go on exactly.

    <output>.training/
        fingerprint.json   what the training is; another one does not go on here
        step-00000041/     network, optimiser, state.json: a safe point
        best-00000041/     the network of the best dev figure
        log.jsonl          one line per dev figure

A folder is written under another name and renamed, best network first. Numbers that decide what
comes next (order, depths, dropout) are drawn from the seed and the number of the update, so no
random state is kept. No file is a pickle.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from prf.dense_build import _lock
from prf.errors import IndexStateError, SpecError
from prf.index import read_json
from prf.trec import PathLike, write_json


@dataclass(frozen=True)
class State:
    """Where a training stands.

    Attributes:
        step: Updates done.
        loss_sum: Sum of the losses of queries since the last dev figure.
        seen: How many those are.
        seconds: Time spent, over all tries.
        best_step: The update after which the dev figure was best; -1 before the first.
        best: That figure.
        waited: Figures since then.
    """

    step: int = 0
    loss_sum: float = 0.0
    seen: int = 0
    seconds: float = 0.0
    best_step: int = -1
    best: float = 0.0
    waited: int = 0


class Workplace:
    """The folder of an unfinished training; get one from `workplace`."""

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder, self.output = folder, output
        self.log = folder / "log.jsonl"

    def claim(self, identity: Mapping[str, Any], force: bool) -> None:
        """Makes the folder that of one training.

        Raises:
            SpecError: If another training was begun in it, unless ``force`` throws that away.
        """
        file = self.folder / "fingerprint.json"
        there = read_json(file)
        if there and there != identity:
            if not force:
                raise SpecError(
                    f"'{self.folder}' holds an unfinished training that differs in "
                    f"{', '.join(_differences(there, identity))}; finish that one, choose another "
                    "output, or start anew (--force)"
                )
            there = {}
        if not there:
            self._clear()
            write_json(identity, file)
        self._prune()

    def _clear(self) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()

    def point(self) -> State | None:
        """Returns the last safe point's state, None before the first."""
        points = sorted(self.folder.glob("step-*"))
        if not points:
            return None
        values = read_json(points[-1] / "state.json")
        if set(values) != {item.name for item in fields(State)}:
            raise self._damaged(points[-1], "state.json is not that of a safe point")
        return State(**values)

    def _damaged(self, folder: Path, why: object) -> IndexStateError:
        return IndexStateError(f"'{folder}' cannot be read ({why}); remove '{self.folder}'")

    def restore(self, state: State, network: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Puts the weights and the optimiser's moments of a safe point back.

        Raises:
            IndexStateError: If its files cannot be read.
        """
        folder = self.folder / f"step-{state.step:08d}"
        try:
            load_model(network, folder / "network.safetensors")
            moments: dict[int, dict[str, Any]] = {}
            for name, tensor in load_file(folder / "optimiser.safetensors").items():
                number, _, kind = name.partition(".")
                moments.setdefault(int(number), {})[kind] = tensor
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise self._damaged(folder, error) from error
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": moments, "param_groups": groups})

    def save(self, state: State, network: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Makes a safe point; the ones before are removed when it is there."""
        with self._new(f"step-{state.step:08d}") as place:
            save_model(network, str(place / "network.safetensors"))
            moments = {
                f"{number}.{kind}": tensor.contiguous()
                for number, kinds in optimiser.state_dict()["state"].items()
                for kind, tensor in kinds.items()
            }
            save_file(moments, place / "optimiser.safetensors")
            write_json(asdict(state), place / "state.json")
        self._prune()

    def save_best(self, step: int, network: nn.Module) -> None:
        """Keeps the network as the best so far; the safe point that says so comes after."""
        with self._new(f"best-{step:08d}") as place:
            save_model(network, str(place / "network.safetensors"))

    def load_best(self, step: int, network: nn.Module) -> None:
        """Puts the best weights into the network."""
        folder = self.folder / f"best-{step:08d}"
        try:
            load_model(network, folder / "network.safetensors")
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise self._damaged(folder, error) from error

    @contextmanager
    def _new(self, name: str) -> Iterator[Path]:
        place = Path(tempfile.mkdtemp(prefix="new-", dir=self.folder))
        yield place
        for file in place.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        shutil.rmtree(self.folder / name, ignore_errors=True)  # of a step done a second time
        os.replace(place, self.folder / name)

    def _prune(self) -> None:
        """Removes what no safe point needs: older ones, other networks, halves."""
        state = self.point()
        keep = set() if state is None else {f"step-{state.step:08d}", f"best-{state.best_step:08d}"}
        for pattern in ("step-*", "best-*", "new-*"):
            for entry in self.folder.glob(pattern):
                if entry.name not in keep:
                    shutil.rmtree(entry)

    def lines(self, up_to: int) -> list[dict[str, Any]]:
        """Returns the lines of the log up to an update; those of updates that were lost go."""
        if not self.log.exists():
            return []
        kept = []
        for line in self.log.read_text(encoding="utf-8").split("\n"):
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the end of a line that a kill cut off
            if entry["step"] <= up_to:
                kept.append(entry)
        return kept

    def rewind(self, up_to: int) -> None:
        """Cuts the log off after an update."""
        text = "".join(json.dumps(entry) + "\n" for entry in self.lines(up_to))
        self.log.write_text(text, encoding="utf-8")

    def note(self, entry: Mapping[str, Any]) -> None:
        """Adds a line to the log."""
        with self.log.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")

    def publish(self, result: Path) -> None:
        """Gives the finished model its name and removes everything else."""
        old = self.folder / "new-old"
        if self.output.exists():
            os.replace(self.output, old)
        os.replace(result, self.output)
        self._clear()
        shutil.rmtree(self.folder)


@contextmanager
def workplace(output: PathLike, force: bool, first: bool = True) -> Iterator[Workplace]:
    """Gives the folder in which a model is trained; the first of several processes locks it.

    Raises:
        SpecError: If the output is there, unless ``force`` is given.
        IndexStateError: If another process is training it.
    """
    path = Path(output).absolute()
    if path.exists():
        if not force:
            raise SpecError(f"model '{output}' exists; choose another name or --force")
        if not (path / "training.json").is_file() and (path.is_file() or any(path.iterdir())):
            raise SpecError(f"'{output}' is no trained model, so it is not replaced")
    place = path.with_name(f"{path.name}.training")
    if not first:
        yield Workplace(place, path)
        return
    try:
        lock = _lock(place)
    except IndexStateError as error:
        raise IndexStateError(f"another process is training in '{place}'; wait for it") from error
    try:
        yield Workplace(place, path)
    finally:
        lock.close()
        # What never began leaves no folder behind.
        if place.is_dir() and {entry.name for entry in place.iterdir()} <= {"lock"}:
            shutil.rmtree(place, ignore_errors=True)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], inside: str = "") -> list[str]:
    """Returns the names of what differs, with dots into mappings."""
    out: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            out += _differences(a, b, f"{inside}{name}.")
        elif a != b:
            out.append(f"{inside}{name}")
    return out

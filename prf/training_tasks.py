"""What is trained: for each kind of network its batches, its losses, and its dev figure.

`prf.training_loop` runs any `Task`; a new kind of network is one more class here and one more entry
in `TASKS`. All randomness of a batch comes from the generator it is given.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from prf.evaluation import evaluate
from prf.frames import IntArray
from prf.index import VectorIndex, open_index
from prf.losses import full_softmax, sampled_softmax
from prf.retrieve import result_frame
from prf.tprf import Tprf, save_tprf
from prf.training_config import Training
from prf.training_data import Lists, TrainingData, prepare
from prf.trec import read_qrels


class Task(Protocol):
    """What the loop asks of a kind of network."""

    @property
    def network(self) -> nn.Module:
        """The weights that are trained."""
        ...

    @property
    def identity(self) -> dict[str, str]:
        """Fingerprints of the data, by name."""
        ...

    def __len__(self) -> int:
        """Returns the number of training queries."""
        ...

    def batch(self, queries: IntArray, rng: np.random.Generator) -> Any:
        """Returns all that is drawn for one update on these queries."""
        ...

    def losses(self, batch: Any, part: slice) -> Tensor:
        """Returns one loss for each query of a part of the batch, with gradient."""
        ...

    def figure(self) -> float | None:
        """Returns the dev figure of the network as it is, None without a dev set."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the network as it is served."""
        ...


@dataclass(frozen=True)
class Batch:
    """One update of a vector network: queries, feedback depth, labels, drawn negatives."""

    queries: IntArray
    depth: int
    drawn: IntArray
    negatives: IntArray


class VectorTask:
    """TPRF: query and feedback vectors in, a query vector out; documents' vectors stay."""

    def __init__(self, config: Training, *, progress: bool = False) -> None:
        self.config, self.index = config, open_index(config.index)
        self.device = torch.device(config.loop.device)
        most, sampled = config.network.fb_docs, config.loss.kind == "sampled_softmax"
        self.data = prepare(
            config.train,
            config.index,
            config.cache,
            fb_docs=most,
            negative_depth=config.loss.negative_depth if sampled else 0,
            progress=progress,
        )
        self.identity: dict[str, str] = {"train": self.data.fingerprint}
        self.dev: TrainingData | None = None
        if config.dev is not None:
            self.dev = prepare(
                config.dev,
                config.index,
                config.cache,
                fb_docs=most,
                all_queries=True,
                progress=progress,
            )
            self.identity["dev"] = self.dev.fingerprint
            self.qrels = read_qrels(config.dev.qrels)
        self.network = Tprf(config.network, self.index.dim).to(self.device)
        self.documents = open_documents(self.index)
        if config.loss.documents_on == "device":
            self.documents = self.documents.to(self.device)

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, queries: IntArray, rng: np.random.Generator) -> Batch:
        depth = int(rng.choice(self.config.depths))
        drawn = negatives = np.zeros(0, dtype=np.int64)
        if self.config.loss.label == "random":
            sizes = np.diff(self.data.positives.of(queries).ptr)
            drawn = (rng.random(len(queries)) * sizes).astype(np.int64)
        if self.config.loss.kind == "sampled_softmax":
            negatives = draw(self.data.negatives.of(queries), self.config.loss.negatives, rng)
        return Batch(queries, depth, drawn, negatives)

    def losses(self, batch: Batch, part: slice) -> Tensor:
        loss, queries = self.config.loss, batch.queries[part]
        with torch.autocast(self.device.type, torch.bfloat16, self.config.loop.bf16):
            new = self.vectors(self.data, queries, batch.depth)
        if self.index.similarity == "cosine":
            new = nn.functional.normalize(new, dim=1)
        positives = self.data.positives.of(queries)
        chosen = self._tensor(positives.rows), self._tensor(positives.owners)
        drawn = None
        if loss.label == "random":
            drawn = self._tensor(positives.ptr[:-1] + batch.drawn[part])
        rest: dict[str, Any] = {"temperature": loss.temperature, "label": loss.label}
        if loss.kind == "sampled_softmax":
            negatives = self._tensor(batch.negatives[part])
            return sampled_softmax(new, self.documents, *chosen, negatives, drawn=drawn, **rest)
        return full_softmax(
            new, self.documents, *chosen, drawn=drawn, chunk_rows=loss.chunk_rows, **rest
        )

    def vectors(self, data: TrainingData, queries: IntArray, depth: int) -> Tensor:
        """Returns the network's vectors for some queries with that much feedback: (b, d)."""
        rows = np.asarray(data.feedback[queries, :depth])
        present = self._tensor(rows) >= 0
        documents = self.documents[torch.from_numpy(rows.clip(min=0)).to(self.documents.device)]
        own = torch.from_numpy(np.array(data.vectors[queries])).to(self.device)
        new: Tensor = self.network(own, documents.to(self.device), present)
        return new

    def figure(self) -> float | None:
        config = self.config.dev
        if config is None or self.dev is None:
            return None
        depth = self.config.network.fb_docs if config.fb_docs is None else config.fb_docs
        self.network.eval()
        with torch.inference_mode():
            new = np.concatenate(
                [
                    self.vectors(self.dev, part, depth).cpu().numpy()
                    for part in np.array_split(np.arange(len(self.dev)), 1 + len(self.dev) // 256)
                ]
            )
        self.network.train()
        hits = self.index.search(new.astype(np.float32), config.k, threads=self.config.loop.threads)
        run = result_frame(self.dev.queries, hits, self.index.docnos)
        found = evaluate(run, self.qrels, [config.measure], topics=self.dev.queries)
        return float(found.mean.iloc[0])

    def save(self, folder: Path) -> None:
        save_tprf(self.network, folder)

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


TASKS = {"tprf": VectorTask}
"""The kinds of network by the ``method`` of a config."""


def open_documents(index: VectorIndex) -> Tensor:
    """Returns the documents' vectors, (n, d) float32, mapped from the file and never written."""
    file = os.fspath(index.path / "vectors.f32")
    flat = torch.from_file(file, shared=False, size=len(index) * index.dim, dtype=torch.float32)
    return flat.view(len(index), index.dim)


def draw(lists: Lists, size: int, rng: np.random.Generator) -> IntArray:
    """Returns ``size`` rows of each list, drawn without replacement: (b, size), -1 for none."""
    lengths = np.diff(lists.ptr)
    width = max(size, int(lengths.max(initial=0)))
    there = np.arange(width) < lengths[:, None]
    table = np.full(there.shape, -1, dtype=np.int64)
    table[there] = lists.rows
    keys = np.where(there, rng.random(there.shape), 2.0)
    order = np.argsort(keys, axis=1, kind="stable")[:, :size]
    return np.take_along_axis(table, order, axis=1)

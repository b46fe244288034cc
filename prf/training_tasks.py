"""What is trained: for each kind of network its batches, its losses, and its dev figure.

`prf.training_loop` runs any `Task`. What all methods share is `FeedbackTask`: which revisions of a
query are made, and what their losses are. A new kind of network is one more subclass, which says
how a revision becomes a vector, and one more entry in `TASKS`. All randomness of a batch comes from
the generator it is given.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn

from prf.batch import checksums
from prf.checkpoints import weights_digest, write_feedback
from prf.encoders import LayoutEncoder
from prf.errors import FileFormatError, IndexStateError, SpecError
from prf.evaluation import evaluate
from prf.frames import FloatArray, IntArray, ObjectArray, column, objects
from prf.index import VectorIndex, open_index
from prf.layouts import Reader, padded
from prf.losses import (
    DenseMatrix,
    Matrix,
    SparseMatrix,
    comparative,
    full_softmax,
    sampled_softmax,
)
from prf.lucene import LuceneIndex
from prf.lucene import open_index as open_lucene
from prf.networks import read_network, save_network
from prf.pipeline import Resource
from prf.retrieve import Impact, Text, result_frame
from prf.sparse_models import PYSERINI, Weights, whole_terms
from prf.sparse_network import SparseEncoder
from prf.tprf import Tprf, save_tprf
from prf.training_config import EncoderNetwork, SparseNetwork, TprfNetwork, Training
from prf.training_data import Lists, TrainingData, prepare
from prf.trec import read_qrels, read_topics

N = TypeVar("N", TprfNetwork, EncoderNetwork, SparseNetwork)

TOGETHER = 64
"""Revisions of like length that go through a network of vectors at a time."""


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
class Revisions:
    """Some queries, each with an amount of feedback: what a network makes vectors of.

    Attributes:
        queries: (n,) their numbers in the data; one may occur several times.
        depths: (n,) how many documents each reads, at most.
        rows: (n, most) the documents in the order they are read in; -1, at the end, for none.
    """

    queries: IntArray
    depths: IntArray
    rows: IntArray

    def counts(self) -> IntArray:
        """Returns how many documents each reads in fact."""
        there: IntArray = (self.rows >= 0).sum(axis=1)
        return np.minimum(self.depths, there)


@dataclass(frozen=True)
class Batch:
    """One update: b queries, r revisions of each.

    Attributes:
        queries: (b,).
        depths: (b, r), the deepest revision first.
        rows: (b, most) documents as in `Revisions`; each revision reads the first of these.
        drawn: (b,) which of its positives is the query's label, or (0,).
        negatives: (b, s) rows, or (0,).
    """

    queries: IntArray
    depths: IntArray
    rows: IntArray
    drawn: IntArray
    negatives: IntArray


class FeedbackTask(Generic[N]):
    """Base of the tasks: the revisions of a query and their losses against frozen documents.

    ``N`` is the dataclass of the network's sizes that belongs to the method.
    """

    sparse: ClassVar[bool] = False
    reads_vectors: ClassVar[bool] = False
    network: nn.Module
    documents: Matrix

    def __init__(self, config: Training, *, progress: bool = False) -> None:
        self.config, self.device = config, torch.device(config.loop.device)
        self.identity: dict[str, str] = {}
        self.open()  # before the first pass, so that a wrong model or index costs no time
        index = Resource("index", config.index, config.index)
        self.identity |= {"index": str(checksums([index])[config.index])}
        kept: dict[str, Any] = {
            "fb_docs": config.network.fb_docs,
            "sparse": self.sparse,
            "vectors": self.reads_vectors,
            "progress": progress,
        }
        if config.dev is not None:
            self.qrels = read_qrels(config.dev.qrels)
            read_topics(config.dev.topics)  # so that a wrong one shows before the first pass
        sampled = config.loss.kind == "sampled_softmax"
        depth = config.loss.negative_depth if sampled else 0
        self.data = prepare(config.train, config.index, config.cache, negative_depth=depth, **kept)
        self.identity["train"] = self.data.fingerprint
        self.dev: TrainingData | None = None
        if config.dev is not None:
            self.dev = prepare(config.dev, config.index, config.cache, all_queries=True, **kept)
            self.identity["dev"] = self.dev.fingerprint

    @property
    def sizes(self) -> N:
        """The network's sizes."""
        return cast(N, self.config.network)  # of the method's kind, or there would be no config

    def open(self) -> None:
        """Opens documents and network."""
        raise NotImplementedError

    def made(self, data: TrainingData, revisions: Revisions) -> Iterator[tuple[IntArray, Tensor]]:
        """Gives the places of some revisions and the network's vectors, until all were made."""
        raise NotImplementedError

    def finished(self, vectors: Tensor) -> Tensor:
        """Returns the vectors as the loss compares them."""
        raise NotImplementedError

    def search(self, queries: pd.DataFrame, vectors: FloatArray, k: int) -> pd.DataFrame:
        """Returns the ranking that each query's vector finds."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Writes the network as it is served."""
        raise NotImplementedError

    def vectors(self, data: TrainingData, revisions: Revisions) -> Tensor:
        """Returns the network's vectors, (n, d), in the order of the revisions."""
        places, vectors = zip(*self.made(data, revisions), strict=True)
        back = self._tensor(np.argsort(np.concatenate(places)))
        return torch.cat(vectors)[back]

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, queries: IntArray, rng: np.random.Generator) -> Batch:
        config = self.config
        known, size = np.asarray(config.depths), 1 + config.loss.n_compare
        keys = rng.random((len(queries), len(known)))
        depths = -np.sort(-known[np.argsort(keys, axis=1)[:, :size]], axis=1)
        rows = np.asarray(self.data.feedback[queries])
        if config.loop.shuffle:
            keys = rng.random(rows.shape) + (rows < 0)  # what is not there stays at the end
            rows = np.take_along_axis(rows, np.argsort(keys, axis=1), axis=1)
        drawn = negatives = np.zeros(0, dtype=np.int64)
        if config.loss.label == "random":
            sizes = np.diff(self.data.positives.of(queries).ptr)
            drawn = (rng.random(len(queries)) * sizes).astype(np.int64)
        if config.loss.kind == "sampled_softmax":
            negatives = draw(self.data.negatives.of(queries), config.loss.negatives, rng)
        return Batch(queries, depths, rows, drawn, negatives)

    def losses(self, batch: Batch, part: slice) -> Tensor:
        loss, depths = self.config.loss, batch.depths[part]
        each = depths.shape[1]  # revisions of a query follow one another
        queries = np.repeat(batch.queries[part], each)
        rows = np.repeat(batch.rows[part], each, axis=0)
        with torch.autocast(self.device.type, torch.bfloat16, self.config.loop.bf16):
            new = self.vectors(self.data, Revisions(queries, depths.ravel(), rows))
        new = self.finished(new.float())
        positives = self.data.positives.of(queries)
        chosen = self._tensor(positives.rows), self._tensor(positives.owners)
        drawn = None
        if loss.label == "random":
            drawn = self._tensor(positives.ptr[:-1] + np.repeat(batch.drawn[part], each))
        rest: dict[str, Any] = {"temperature": loss.temperature, "label": loss.label}
        if loss.kind == "sampled_softmax":
            negatives = self._tensor(np.repeat(batch.negatives[part], each, axis=0))
            made = sampled_softmax(new, self.documents, *chosen, negatives, drawn=drawn, **rest)
        else:
            made = full_softmax(
                new, self.documents, *chosen, drawn=drawn, chunk_rows=loss.chunk_rows, **rest
            )
        made = made.view(-1, each)
        return made.mean(dim=1) + loss.lambda_cr * comparative(made)

    def figure(self) -> float | None:
        config = self.config.dev
        if config is None or self.dev is None:
            return None
        depth = self.config.network.fb_docs if config.fb_docs is None else config.fb_docs
        queries, runs = self.dev.queries, []
        self.network.eval()
        for part in np.array_split(np.arange(len(self.dev)), 1 + len(self.dev) // 256):
            with torch.inference_mode():
                vectors = self.vectors(self.dev, self.ranked(self.dev, part, depth))
            new = vectors.float().cpu().numpy()
            runs.append(self.search(queries.iloc[part].reset_index(drop=True), new, config.k))
        self.network.train()
        run = pd.concat(runs, ignore_index=True)
        found = evaluate(run, self.qrels, [config.measure], topics=queries)
        return float(found.mean.iloc[0])

    def ranked(self, data: TrainingData, queries: IntArray, depth: int) -> Revisions:
        """Returns the revisions of some queries with their first documents, as in a search."""
        return Revisions(queries, np.full(len(queries), depth), np.asarray(data.feedback[queries]))

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


class DenseTask(FeedbackTask[N]):
    """Base of tasks whose documents are a dense index."""

    index: VectorIndex

    def open(self) -> None:
        self.index = open_index(self.config.index)
        table = open_table(self.index)
        if self.config.loss.documents_on == "device":
            table = table.to(self.device)
        self.table, self.documents = table, DenseMatrix(table)

    def search(self, queries: pd.DataFrame, vectors: FloatArray, k: int) -> pd.DataFrame:
        hits = self.index.search(vectors, k, threads=self.config.loop.threads)
        return result_frame(queries, hits, self.index.docnos)

    def finished(self, vectors: Tensor) -> Tensor:
        if self.index.similarity == "cosine":
            return nn.functional.normalize(vectors, dim=1)
        return vectors


class VectorTask(DenseTask[TprfNetwork]):
    """TPRF: query and feedback vectors in, a query vector out."""

    reads_vectors = True

    def open(self) -> None:
        super().open()
        self.network: Tprf = Tprf(self.sizes, self.index.dim).to(self.device)

    def made(self, data: TrainingData, revisions: Revisions) -> Iterator[tuple[IntArray, Tensor]]:
        counts = revisions.counts()
        for place in grouped(counts, TOGETHER):
            rows = revisions.rows[place, : int(counts[place].max())]
            present = self._tensor(np.arange(rows.shape[1]) < counts[place, None])
            documents = self.table[torch.from_numpy(rows.clip(min=0)).to(self.table.device)]
            own = self._tensor(np.array(data.vectors[revisions.queries[place]]))
            yield place, self.network(own, documents.to(self.device), present)

    def save(self, folder: Path) -> None:
        save_tprf(self.network, folder)


class _Passages:
    """What both text encoders do: pack queries and passages, in groups of like length."""

    def __init__(
        self, config: Training, network: EncoderNetwork | SparseNetwork, reader: Reader
    ) -> None:
        # The methods that read texts have a source of them, or there would be no config.
        self.source = Text(cast(str, config.texts))
        self.reader, self.base, self.most = reader, network.base, config.loop.group
        self.device = config.loop.device
        self.packing: dict[str, Any] = {
            "truncation": network.truncation,
            "max_length": network.max_length,
            "query_length": network.query_length,
            "passage_length": network.passage_length,
        }
        self.two_parts = network.truncation == "lol"
        reader.feedback([""], [[]], **self.packing)  # refuses lengths the model does not have
        for resource in self.source.resources():
            if resource.path is not None and not os.path.exists(resource.path):
                raise FileFormatError(f"texts: there is no '{resource.path}'")

    @property
    def identity(self) -> dict[str, str]:
        """Fingerprints of the texts and of the model that training starts from."""
        found = checksums(self.source.resources())
        texts = str(next(iter(found.values()), self.source.source))
        return {"texts": texts, "base": weights_digest(self.base) or self.base}

    def read(
        self,
        data: TrainingData,
        docnos: ObjectArray,
        revisions: Revisions,
        forward: Callable[..., Tensor],
    ) -> Iterator[tuple[IntArray, Tensor]]:
        """Gives the places of some revisions and what ``forward`` makes of their ids and mask."""
        counts = revisions.counts()
        wanted = [rows[:count] for rows, count in zip(revisions.rows, counts, strict=True)]
        unique, place = np.unique(np.concatenate(wanted), return_inverse=True)
        texts: Sequence[Any] = self.source.load(docnos[unique]) if len(unique) else []
        cuts = np.split(place, np.cumsum(counts)[:-1])
        packed, _ = self.reader.feedback(
            list(data.texts[revisions.queries]),
            [[texts[number] for number in part] for part in cuts],
            **self.packing,
        )
        sizes = np.array([len(ids) for ids in packed], dtype=np.int64)
        for part in grouped(sizes, self.most):
            ids, mask = padded([packed[number] for number in part], self.reader.marks.pad)
            given = torch.from_numpy(ids).to(self.device), torch.from_numpy(mask).to(self.device)
            yield part, forward(*given, two_parts=self.two_parts)


class EncoderTask(DenseTask[EncoderNetwork]):
    """ANCE-PRF and its kin: the text of query and passages in, a dense query vector out."""

    def open(self) -> None:
        super().open()
        network = self.sizes
        read = read_network(network.base, self.config.loop.device, network.layout)
        if read.dim != self.index.dim:
            raise SpecError(
                f"network.base '{network.base}' gives vectors of {read.dim} numbers, index "
                f"'{self.config.index}' holds {self.index.dim}; take the encoder of the index"
            )
        self.encoder = LayoutEncoder(network.base, read, self.config.loop.device, "float32", {})
        self.read = read
        parts = {"backbone": read.backbone} | ({"head": read.head} if read.head else {})
        self.network = nn.ModuleDict(parts)
        set_dropout(self.network, network.dropout)
        self.passages = _Passages(self.config, network, read.reader)
        self.identity |= self.passages.identity

    def made(self, data: TrainingData, revisions: Revisions) -> Iterator[tuple[IntArray, Tensor]]:
        forward = partial(self.encoder.forward, pool=self.sizes.pool)
        return self.passages.read(data, self.index.docnos, revisions, forward)

    def save(self, folder: Path) -> None:
        save_network(self.read, folder)
        write_feedback(folder, "encoder", self.sizes.spec())


class SparseTask(FeedbackTask[SparseNetwork]):
    """LoL's sparse form: the text of query and passages in, weighted terms out."""

    sparse = True

    def open(self) -> None:
        network = self.sizes
        self.network: SparseEncoder = SparseEncoder(network).to(self.device)
        set_dropout(self.network, network.dropout)
        self.passages = _Passages(self.config, network, self.network.reader)
        self.identity |= self.passages.identity
        self.index = open_lucene(self.config.index)
        self.documents = open_impacts(self.index, self.network.vocabulary, self.config.loop.device)

    def made(self, data: TrainingData, revisions: Revisions) -> Iterator[tuple[IntArray, Tensor]]:
        return self.passages.read(data, self.index.docnos, revisions, self.network)

    def finished(self, vectors: Tensor) -> Tensor:
        l2 = self.sizes.norm == "l2"
        return nn.functional.normalize(vectors, dim=1) if l2 else vectors

    def search(self, queries: pd.DataFrame, vectors: FloatArray, k: int) -> pd.DataFrame:
        terms = [np.flatnonzero(row) for row in vectors]
        ptr = np.cumsum([0, *map(len, terms)], dtype=np.int64)
        weights = [row[own].astype(np.float64) for row, own in zip(vectors, terms, strict=True)]
        found = Weights(ptr, np.concatenate(terms), np.concatenate(weights))
        whole = whole_terms(found, self.network.vocabulary, PYSERINI)
        toks = ({term: float(weight) for term, weight in query.items()} for query in whole)
        asked = queries.assign(query_toks=column(objects(toks)))
        return Impact(self.config.index, k=k).transform(asked)

    def save(self, folder: Path) -> None:
        self.network.save(folder)
        write_feedback(folder, "sparse_encoder", self.sizes.spec())


TASKS: dict[str, type[FeedbackTask[Any]]] = {
    "tprf": VectorTask,
    "encoder": EncoderTask,
    "sparse_encoder": SparseTask,
}
"""The kinds of network by the ``method`` of a config."""


def open_table(index: VectorIndex) -> Tensor:
    """Returns the documents' vectors, (n, d) float32, mapped from the file and never written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that writing would be undefined
        return torch.from_numpy(np.asarray(index.table))


def open_impacts(index: LuceneIndex, vocabulary: ObjectArray, device: str) -> SparseMatrix:
    """Returns the documents' weights as rows over a model's vocabulary; other terms are left out.

    Raises:
        IndexStateError: If the index holds no term of the vocabulary.
    """
    found = index.term_vectors(np.arange(index.n_docs))
    column_of = {term: number for number, term in enumerate(vocabulary)}
    columns = np.array([column_of.get(term, -1) for term in found.vocabulary], dtype=np.int64)
    if not (columns >= 0).any():
        raise IndexStateError(
            f"impact index '{index.path}' holds no term of the model; build it with the model's "
            "own document encoder"
        )
    owners = np.repeat(np.arange(index.n_docs), np.diff(found.ptr))
    terms = columns[found.terms]
    keep = terms >= 0
    owners, terms, weights = owners[keep], terms[keep], found.tf[keep]
    order = np.lexsort((terms, owners))  # products want the columns of a row in their order
    ptr = np.searchsorted(owners, np.arange(index.n_docs + 1))
    return SparseMatrix(ptr, terms[order], weights[order], len(vocabulary), device)


def grouped(sizes: IntArray, most: int) -> list[IntArray]:
    """Returns the places of all sizes in groups of at most ``most`` like ones, largest first."""
    order = np.argsort(-sizes, kind="stable")
    return [order[start : start + most] for start in range(0, len(order), most)]


def set_dropout(network: nn.Module, share: float) -> None:
    """Sets how much every dropout layer of a network drops."""
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = share


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

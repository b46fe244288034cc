"""Pointwise students: what `prf.training_loop` trains when a config is a `Distillation`.

A batch is some queries. Each document of a query that is in a pair is read once, however many pairs
it is in; the losses compare the scores of a query's list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from prf.checkpoints import (
    FOLDER,
    check_device,
    model_path,
    reading,
    refuse_missing,
    weights_digest,
)
from prf.distill import losses
from prf.distill.config import OPA, BiNetwork, CrossNetwork, Distillation, StudentMethod
from prf.distill.teachers import Floats, Group, digest, groups, read_lists, teach, whole_groups
from prf.encoders import LayoutEncoder
from prf.errors import require
from prf.evaluation import evaluate
from prf.frames import IntArray, ranked
from prf.layouts import padded
from prf.networks import read_network, save_network
from prf.rerank import Classifier
from prf.training_tasks import grouped, set_dropout
from prf.trec import read_qrels, write_json

HEADS = {"classifier", "pre_classifier", "pooler", "score"}
"""Parts of a classifier that a base may lack, by their names in the architectures."""


class Student:
    """Base of the students: lists, losses and figures; a subclass scores documents."""

    network: nn.Module
    sizes: CrossNetwork | BiNetwork

    def __init__(self, config: Distillation, *, progress: bool = False) -> None:
        self.config, self.device = config, torch.device(config.loop.device)
        self.open()  # before the teacher, so that a wrong model costs no comparison
        if config.dev is not None and config.dev.qrels is not None:
            self.qrels = read_qrels(config.dev.qrels)
        lists = read_lists(config.train)
        pairs = teach(config.train, lists, progress=progress)
        self.groups = groups(lists, pairs)
        self.pairs = len(pairs)
        base = config.network.base
        self.identity = {"base": weights_digest(base) or base, "train": digest(lists, pairs)}
        self.dev: list[Group] = []
        if config.dev is not None:
            lists, pairs = read_lists(config.dev), []
            if config.dev.measure == OPA:
                pairs = teach(config.dev, lists, progress=progress)
            self.dev = groups(lists, pairs) if pairs else whole_groups(lists)
            self.identity["dev"] = digest(lists, pairs)
        self.rows = [self.read(group) for group in self.groups]
        self.dev_rows = [self.read(group) for group in self.dev]

    def open(self) -> None:
        """Opens the network."""
        raise NotImplementedError

    def read(self, group: Group) -> list[Any]:
        """Returns what the network reads of a query and its documents."""
        raise NotImplementedError

    def scored(self, rows: Sequence[list[Any]]) -> list[Tensor]:
        """Returns the scores of the documents of each of some queries, with gradient."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Writes the network as it is served, and how it was taught."""
        self.write(folder)
        told = {
            "config": self.config.spec(),
            "fingerprints": self.identity,
            "queries": len(self.groups),
            "pairs": self.pairs,
            "documents": sum(len(group.docnos) for group in self.groups),
        }
        write_json(told, folder / "prp_distill.json")

    def write(self, folder: Path) -> None:
        """Writes weights, config and tokenizer."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.groups)

    def batch(self, queries: IntArray, rng: np.random.Generator) -> IntArray:
        return queries  # pairs are drawn once, before training; nothing is drawn here

    def losses(self, batch: IntArray, part: slice) -> Tensor:
        chosen = [self.groups[int(query)] for query in batch[part]]
        with torch.autocast(self.device.type, torch.bfloat16, self.config.loop.bf16):
            lists = self.scored([self.rows[int(query)] for query in batch[part]])
        scores = nn.utils.rnn.pad_sequence([each.float() for each in lists], batch_first=True)
        sizes = torch.tensor([len(each) for each in lists], device=scores.device)
        mask = torch.arange(scores.shape[1], device=scores.device) < sizes[:, None]
        return student_losses(self.config, scores, mask, chosen)

    def figure(self) -> float | None:
        config = self.config.dev
        if config is None:
            return None
        self.network.eval()
        with torch.inference_mode():
            scores = [
                self.scored([rows])[0].float().cpu().numpy().astype(np.float64)
                for rows in self.dev_rows
            ]
        self.network.train()
        if config.measure == OPA:
            return pair_accuracy(self.dev, scores)
        run = pd.DataFrame(
            {
                "qid": [g.qid for g in self.dev for _ in g.docnos],
                "query": [g.query for g in self.dev for _ in g.docnos],
                "docno": [docno for g in self.dev for docno in g.docnos],
                "score": np.concatenate(scores),
            }
        )
        found = evaluate(ranked(run), self.qrels, [config.measure])
        return float(found.mean.iloc[0])


class CrossStudent(Student):
    """A cross-encoder: query and document together."""

    sizes: CrossNetwork

    def open(self) -> None:
        network = self.config.network
        assert isinstance(network, CrossNetwork)
        self.sizes = network
        self.classifier, self.network = new_classifier(self.sizes.base, self.config.loop.device)
        self.length = self.classifier.length(self.sizes.max_length)
        set_dropout(self.network, self.sizes.dropout)

    def read(self, group: Group) -> list[Any]:
        queries = [group.query] * len(group.docnos)
        return self.classifier.tokens(queries, group.texts, self.length)[0]

    def scored(self, rows: Sequence[list[Any]]) -> list[Tensor]:
        flat = [row for own in rows for row in own]
        lengths = np.array([len(row["input_ids"]) for row in flat])

        def forward(places: IntArray) -> Tensor:
            logits: Tensor = self.classifier.logits([flat[i] for i in places])
            return logits[:, 0]

        made = _in_groups(lengths, self.config.loop.group, forward)
        return list(torch.split(made, [*map(len, rows)]))

    def write(self, folder: Path) -> None:
        self.classifier.save(folder, self.length)


class BiStudent(Student):
    """A bi-encoder: query and document apart, compared by their inner product."""

    sizes: BiNetwork

    def open(self) -> None:
        network, device = self.config.network, self.config.loop.device
        assert isinstance(network, BiNetwork)
        self.sizes = network
        self.made = read_network(network.base, device, network.layout)
        limits: dict[Any, int] = {"query": network.query_length, "document": network.max_length}
        self.encoder = LayoutEncoder(network.base, self.made, device, "float32", limits)
        parts = {"backbone": self.made.backbone}
        self.network = nn.ModuleDict(parts | ({"head": self.made.head} if self.made.head else {}))
        set_dropout(self.network, network.dropout)

    def read(self, group: Group) -> list[Any]:
        query = self.encoder.read([group.query], "query").rows
        return [*query, *self.encoder.read(group.texts, "document").rows]

    def scored(self, rows: Sequence[list[Any]]) -> list[Tensor]:
        flat = [row for own in rows for row in own]

        def forward(places: IntArray) -> Tensor:
            ids, mask = padded([flat[i] for i in places], self.encoder.pad)
            given = torch.from_numpy(ids).to(self.device), torch.from_numpy(mask).to(self.device)
            vectors: Tensor = self.encoder.forward(*given)
            return vectors

        made = _in_groups(np.array([*map(len, flat)]), self.config.loop.group, forward)
        return [
            self.sizes.scale * (own[1:] @ own[0]) for own in torch.split(made, [*map(len, rows)])
        ]

    def write(self, folder: Path) -> None:
        save_network(self.made, folder)


STUDENTS: dict[StudentMethod, type[Student]] = {
    "cross_encoder": CrossStudent,
    "bi_encoder": BiStudent,
}
"""The students by the ``method`` of a config."""


def _in_groups(lengths: IntArray, most: int, forward: Callable[[IntArray], Tensor]) -> Tensor:
    """Returns what ``forward`` makes of all places, in their order, in groups of like length."""
    places = grouped(lengths, most)
    made = torch.cat([forward(part) for part in places])
    return made[torch.from_numpy(np.argsort(np.concatenate(places))).to(made.device)]


def student_losses(
    config: Distillation, scores: Tensor, mask: Tensor, chosen: Sequence[Group]
) -> Tensor:
    """Returns the loss of each query, (b,), that a config names.

    Args:
        config: Names the loss.
        scores: (b, n) scores of the documents of each query, padded.
        mask: (b, n) which are documents.
        chosen: The queries' pairs.
    """
    loss, device = config.loss, scores.device
    if loss.kind in ("logistic", "margin_mse", "hinge"):
        pairs = _pairs(chosen, device, known=loss.kind == "margin_mse")
        if loss.kind == "logistic":
            return losses.logistic(scores, pairs, loss.temperature)
        if loss.kind == "margin_mse":
            return losses.margin_mse(scores, pairs, loss.factor)
        return losses.hinge(scores, pairs)
    labels = nn.utils.rnn.pad_sequence(
        [torch.from_numpy(mean_points(group)).float() for group in chosen], batch_first=True
    ).to(device)
    if loss.kind == "lambda":
        return losses.rank_loss(scores, labels, mask, loss.scheme, loss.cutoff)
    if loss.kind == "listnet":
        return losses.listnet(scores, labels, mask, loss.temperature)
    plain = {
        "softmax": losses.softmax,
        "listmle": losses.listmle,
        "rmse": losses.rmse,
        "mse": losses.mse,
        "bce": losses.bce,
    }
    return plain[loss.kind](scores, labels, mask)


def _pairs(chosen: Sequence[Group], device: torch.device, known: bool) -> losses.Pairs:
    """Returns the pairs of some queries; on request only those whose margin is known."""
    owner = np.repeat(np.arange(len(chosen)), [len(group.p) for group in chosen])
    columns = [
        np.concatenate([getattr(group, name) for group in chosen])
        for name in ("first", "second", "p", "margin", "weight")
    ]
    keep = np.isfinite(columns[3]) if known else np.ones(len(owner), dtype=bool)
    made = [torch.from_numpy(column[keep]).to(device) for column in (owner, *columns)]
    return losses.Pairs(*made[:3], *[column.float() for column in made[3:]])


def mean_points(group: Group) -> Floats:
    """Returns each document's mean points over its pairs, from 0 to 1: a label for list losses."""
    points, seen = np.zeros(len(group.docnos)), np.zeros(len(group.docnos))
    np.add.at(points, group.first, group.p)
    np.add.at(points, group.second, 1 - group.p)
    np.add.at(seen, np.concatenate([group.first, group.second]), 1)
    mean: Floats = np.divide(points, seen, out=np.full(len(points), 0.5), where=seen > 0)
    return mean


def pair_accuracy(taught: Sequence[Group], scores: Sequence[Floats]) -> float:
    """Returns the share of the teacher's pairs without ties that scores order alike (OPA).

    Equal scores order nothing, which is wrong.

    Args:
        taught: Queries with pairs.
        scores: (n,) scores of each one's documents.

    Returns:
        The mean over queries with such a pair, 0 to 1; NaN if there is none.
    """
    shares = []
    for group, score in zip(taught, scores, strict=True):
        wins = np.sign(group.p - 0.5)
        right = np.sign(score[group.first] - score[group.second]) == wins
        if wins.any():
            shares.append(float(right[wins != 0].mean()))
    return float(np.mean(shares)) if shares else float("nan")


def new_classifier(base: str, device: str) -> tuple[Classifier, nn.Module]:
    """Returns a cross-encoder with one class made from an encoder, and its network.

    Weights of the head that the base lacks are drawn from torch's generator.

    Raises:
        IndexStateError: If the base cannot be found or read, or lacks other weights.
    """
    where = f"base '{base}'"
    check_device(device, where)
    transformers = require("transformers", "cpu", where)
    path = model_path(base)
    with reading(where, FOLDER):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, use_safetensors=True, output_loading_info=True
        )
    missing = [n for n in sorted(report["missing_keys"]) if HEADS.isdisjoint(n.split("."))]
    refuse_missing(where, missing, "an encoder")
    model = model.float().to(device)
    return Classifier(base, tokenizer, model, device), model

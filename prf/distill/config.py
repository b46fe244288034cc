"""What a distillation is told: the dataclasses of ``prf train`` for pointwise students.

method: cross_encoder             or bi_encoder
output: models/student
train:
  topics: topics.tsv
  run: bm25.txt                   the lists whose documents are compared
  texts: passages.jsonl
  teacher: {run: repllama.txt}    or {prp: {PRP: ...}}, or {pairs: pairs.jsonl}
  sample: {sampler: random, rate: 0.02}
dev: {topics: ..., run: ..., texts: ..., qrels: ..., measure: nDCG@10}
network: {base: minilm, max_length: 128}
loss: {kind: logistic}
loop: {epochs: 3, batch_size: 8, learning_rate: 2.0e-5}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyterrier as pt

from prf.distill.sampling import Sampler
from prf.errors import SpecError
from prf.evaluation import parse_measures
from prf.layouts import Layout
from prf.pipeline import Count, Depth, check_value
from prf.training_config import Config, Loop, named_stage, need_dev, share

StudentMethod = Literal["cross_encoder", "bi_encoder"]
Labels = Literal["hard", "soft"]
LossKind = Literal[
    "logistic", "margin_mse", "hinge", "lambda", "softmax", "listnet", "listmle", "rmse", "mse",
    "bce",
]  # fmt: skip
Scheme = Literal[
    "none", "lambdarank", "ndcgloss1", "ndcgloss2", "ndcgloss2pp", "diff", "squarediff"
]

OPA = "OPA"
"""Name of the dev measure that needs no judgments: ordered pair accuracy against a teacher."""


@dataclass(frozen=True)
class Teacher(Config):
    """Who compares the documents of a list; exactly one of the first three.

    Args:
        run: A run with scores of any method. The better score wins, equal ones tie; a document it
            lacks loses against one it holds, and two that it lacks are no pair.
        prp: A `PRP` stage. Its backend, order, consistency and cache decide; equal questions of a
            reranking with that cache are not asked again. ``offline`` takes from the cache what is
            there, and leaves out every other pair. Its variant, depth and budgets do not matter.
        pairs: A file of pairs, as ``prf pairs`` writes.
        labels: ``hard``: a win is 1, a tie 1/2. ``soft``: the sigmoid of the margin.
        temperature: Margins are divided by it for ``soft``.
        drop_ties: Leave pairs out that tie.
        min_abs_margin: Leave pairs out whose margin is smaller.
    """

    run: str | None = None
    prp: pt.Transformer | None = None
    pairs: str | None = None
    labels: Labels = "hard"
    temperature: float = 1.0
    drop_ties: bool = False
    min_abs_margin: float = 0.0

    def check(self) -> None:
        from prf.prp.stage import PRP

        name = type(self).__name__
        given = [key for key in ("run", "prp", "pairs") if getattr(self, key) is not None]
        if len(given) != 1:
            told = f"names {' and '.join(given)}" if given else "is empty"
            raise SpecError(f"{name} {told}; give one of run, prp and pairs")
        if self.prp is not None and not isinstance(self.prp, PRP):
            raise SpecError(f"{name}.prp is {self.prp!r}; give a PRP stage")
        if isinstance(self.prp, PRP) and not self.prp.backend.has_margins:
            if self.labels == "soft":
                raise SpecError(f"{name}.labels is 'soft', but {self.prp.backend!r} has no margins")
            if self.min_abs_margin:
                raise SpecError(
                    f"{name}.min_abs_margin is {self.min_abs_margin}, but {self.prp.backend!r} has "
                    "no margins"
                )
        if self.temperature <= 0:
            raise SpecError(f"{name}.temperature is {self.temperature}; above 0")
        if self.min_abs_margin < 0:
            raise SpecError(f"{name}.min_abs_margin is {self.min_abs_margin}; at least 0")


@dataclass(frozen=True)
class Sample(Config):
    """Which pairs of a list are compared (see `prf.distill.sampling.draw_pairs`).

    Args:
        sampler: How likely a pair is.
        rate: Share of all pairs.
        least: The fewest pairs of a list.
        window: For ``window``: the largest distance of ranks.
        spanning: Compare along a random tree first, so that all documents hang together.
        importance: Weigh each pair by one divided by its probability.
        most_weight: Larger weights are cut to this.
        seed: Of the draw, beside the qid.
    """

    sampler: Sampler = "random"
    rate: float = 0.02
    least: Count = 1
    window: Count = 1
    spanning: bool = False
    importance: bool = False
    most_weight: float = 100.0
    seed: Depth = 1

    def check(self) -> None:
        name = type(self).__name__
        if not 0 < self.rate <= 1:
            raise SpecError(f"{name}.rate is {self.rate}; above 0, at most 1")
        if self.most_weight < 1:
            raise SpecError(f"{name}.most_weight is {self.most_weight}; at least 1")


@dataclass(frozen=True)
class ListSet(Config):
    """Queries, their lists, and the teacher that compares documents of a list.

    Args:
        topics: Topics file, or ``ir_datasets:NAME``.
        texts: Where the documents' texts are, as for `Text`.
        run: A run with the lists.
        first_pass: A pipeline from topics to the lists, instead.
        depth: How many first documents of each list are taken.
        teacher: Who compares them.
        sample: Which pairs; a file of pairs is taken whole.
    """

    topics: str
    texts: str
    run: str | None = None
    first_pass: pt.Transformer | None = None
    depth: Count = 50
    teacher: Teacher | None = None
    sample: Sample = field(default_factory=Sample)

    def check(self) -> None:
        name = type(self).__name__
        if (self.run is None) == (self.first_pass is None):
            raise SpecError(f"{name} needs its lists from one of run and first_pass")
        named_stage(self.first_pass)


@dataclass(frozen=True)
class DevLists(ListSet):
    """Lists that decide which weights are kept.

    Args:
        measure: ``OPA``: the share of the teacher's pairs without ties that the student orders as
            the teacher does, mean over queries. Or a measure of ir-measures, of the reranked lists.
        qrels: Judgments, for the latter.
    """

    measure: str = "nDCG@10"
    qrels: str | None = None

    def check(self) -> None:
        super().check()
        name = type(self).__name__
        if self.measure == OPA:
            if self.teacher is None:
                raise SpecError(f"{name}.measure is {OPA}, which needs a teacher")
        elif self.qrels is None:
            raise SpecError(f"{name}.measure is '{self.measure}', which needs qrels")
        elif len(parse_measures([self.measure])) != 1:
            raise SpecError(f"{name}.measure is '{self.measure}'; name one measure")


@dataclass(frozen=True)
class CrossNetwork(Config):
    """A student that reads query and document together; served by `CrossEncoder`.

    Args:
        base: The encoder it starts from, or a cross-encoder with one class. Its head, and a pooler
            that is missing, begin as random numbers.
        max_length: Tokens of a pair, special ones included; what the student is served with.
        dropout: Share of activations dropped in training.
    """

    base: str
    max_length: Count = 256
    dropout: float = 0.1

    def check(self) -> None:
        share(self, "dropout")


@dataclass(frozen=True)
class BiNetwork(Config):
    """A student that reads query and document apart; served by `QueryEncoder` and an index.

    Args:
        base: The encoder it starts from, head included.
        layout: Its layout (see `QueryEncoder`).
        query_length: Tokens of a query.
        max_length: Tokens of a document.
        dropout: Share of activations dropped in training.
        scale: Factor of the inner product in the loss, as vectors of length 1 need.
    """

    base: str
    layout: Layout
    query_length: Count = 64
    max_length: Count = 256
    dropout: float = 0.0
    scale: float = 20.0

    def check(self) -> None:
        share(self, "dropout")
        if self.scale <= 0:
            raise SpecError(f"{type(self).__name__}.scale is {self.scale}; above 0")


STUDENTS: dict[StudentMethod, type[Config]] = {
    "cross_encoder": CrossNetwork,
    "bi_encoder": BiNetwork,
}
"""The dataclass of ``network`` for each method."""


@dataclass(frozen=True)
class StudentLoss(Config):
    """What is minimised (see `prf.distill.losses`).

    The first three compare pairs. The others read one label for each document of a list: its mean
    points over the pairs that it is in.

    Args:
        kind: The loss.
        temperature: Of ``logistic`` and ``listnet``.
        factor: Of ``margin_mse``: what the teacher's margins are multiplied by.
        scheme: Of ``lambda``: how a pair is weighed.
        cutoff: Of ``lambda``: the deepest rank that counts; 0 for all.
    """

    kind: LossKind = "logistic"
    temperature: float = 1.0
    factor: float = 1.0
    scheme: Scheme = "lambdarank"
    cutoff: Depth = 0

    def check(self) -> None:
        if self.temperature <= 0:
            raise SpecError(f"{type(self).__name__}.temperature is {self.temperature}; above 0")


@dataclass(frozen=True)
class Distillation(Config):
    """All that decides a student.

    Args:
        output: The folder to make.
        train: The lists it learns from.
        network: Its sizes, by the method: `CrossNetwork` or `BiNetwork`.
        dev: The lists that choose the weights that are kept; without them the last ones are.
        method: ``cross_encoder`` or ``bi_encoder``.
        loss: What is minimised.
        loop: How; a batch is counted in queries.
    """

    output: str
    train: ListSet
    network: CrossNetwork | BiNetwork
    dev: DevLists | None = None
    method: StudentMethod = "cross_encoder"
    loss: StudentLoss = field(default_factory=StudentLoss)
    loop: Loop = field(
        default_factory=lambda: Loop(epochs=3, batch_size=32, learning_rate=2e-5, warmup=0.05)
    )

    @classmethod
    def nested(
        cls, name: str, kinds: tuple[type[Config], ...], values: Mapping[str, Any]
    ) -> type[Config]:
        if name != "network":
            return kinds[0]
        return STUDENTS[check_value(values.get("method", "cross_encoder"), StudentMethod, "method")]

    def check(self) -> None:
        kind = STUDENTS[self.method]
        if not isinstance(self.network, kind):
            raise SpecError(
                f"method '{self.method}' has a {kind.__name__}, not {type(self.network).__name__}"
            )
        if self.train.teacher is None:
            raise SpecError("train.teacher is missing; name who compares the documents")
        if self.loop.depths or self.loop.shuffle:
            raise SpecError("loop.depths and loop.shuffle are of feedback; a student has none")
        need_dev(self.loop, self.dev)
        prp = self.train.teacher.prp
        if self.loss.kind == "margin_mse" and prp is not None and not prp.backend.has_margins:
            raise SpecError(f"loss.kind is 'margin_mse', but {prp.backend!r} has no margins")

"""What a training is told: dataclasses that map one to one onto the YAML of ``prf train``.

    method: tprf                      which network: tprf, encoder, sparse_encoder; the students of
                                      a distillation are in `prf.distill.config`
    output: models/tprf               the folder to make
    index: indexes/nfcorpus-minilm    dense index; its vectors stay as they are
    train: {topics: ..., qrels: ..., queries: {QueryEncoder: {model: minilm}}}
    dev: {topics: ..., qrels: ..., queries: ..., measure: nDCG@10}
    network: {fb_docs: 10, layers: 2}
    loss: {kind: full_softmax}
    loop: {epochs: 30, batch_size: 64}

Reading a config opens nothing and needs no torch, so that a mistake shows at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, get_type_hints

import pyterrier as pt

from prf.errors import FileFormatError, SpecError, did_you_mean, shorten
from prf.evaluation import parse_measures
from prf.layouts import Layout, Pool, Truncation
from prf.pipeline import Count, Depth, Transformer, check_value
from prf.sparse_models import Activation
from prf.spec import _parse, _with_stages, to_spec
from prf.trec import PathLike, read_lines

if TYPE_CHECKING:
    from prf.distill.config import Distillation

Method = Literal["tprf", "encoder", "sparse_encoder"]
Residual = Literal["none", "query", "rocchio"]
LossKind = Literal["full_softmax", "sampled_softmax"]
Label = Literal["lowest", "random", "each"]


class Config:
    """Base of the dataclasses: checks every value when it is made, and reads and writes mappings.

    A subclass is a frozen dataclass; a field whose type is another one is a mapping in YAML, one
    whose type is a stage a pipeline.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            where = f"{type(self).__name__}.{item.name}"
            inner = _inner(hints[item.name])
            if inner and not isinstance(value, (*inner, type(None))):
                raise SpecError(f"{where} must be a mapping, not {shorten(value)}")
            object.__setattr__(self, item.name, check_value(value, hints[item.name], where))
        self.check()

    def check(self) -> None:
        """Refuses values that do not go together; types and bounds are already checked."""

    @classmethod
    def read(cls, values: Any, where: str = "") -> Self:
        """Builds the dataclass from parsed YAML.

        Raises:
            SpecError: For an unknown, missing or wrong key; one line that says where.
        """
        if not isinstance(values, Mapping):
            raise SpecError(f"{where or 'the config'} is {shorten(values)}; write a mapping")
        known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
        hints = get_type_hints(cls, include_extras=True)
        inside = f" in {where}" if where else ""
        given = {}
        for name, value in values.items():
            if name not in known:
                close = did_you_mean(str(name), known)
                raise SpecError(f"unknown key {name!r}{inside}{close or _listed(known)}")
            place = f"{where}.{name}" if where else str(name)
            inner = _inner(hints[name])
            if inner and value is not None:
                given[name] = cls.nested(name, inner, values).read(value, place)
            else:
                given[name] = _with_stages(value, hints[name], place)
        for name, item in known.items():
            if name not in given and item.default is MISSING and item.default_factory is MISSING:
                raise SpecError(f"key '{name}' is missing{inside}")
        try:
            return cls(**given)
        except SpecError as error:
            # Python's name of the place becomes that of the file.
            place = f"{where}." if where else ""
            raise SpecError(str(error).replace(f"{cls.__name__}.", place, 1)) from error

    @classmethod
    def nested(
        cls, name: str, kinds: tuple[type[Config], ...], values: Mapping[str, Any]
    ) -> type[Config]:
        """Returns which of several dataclasses a nested mapping is, given all values beside it."""
        return kinds[0]

    def spec(self) -> dict[str, Any]:
        """Returns plain mappings, lists and numbers with every default; the inverse of `read`."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]


def _inner(hint: Any) -> tuple[type[Config], ...]:
    options = (hint, *get_args(hint))
    return tuple(o for o in options if isinstance(o, type) and issubclass(o, Config))


def _listed(known: Mapping[str, Any]) -> str:
    return f"; known are {', '.join(known)}"


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.spec()
    if isinstance(value, pt.Transformer):
        return to_spec(value, defaults=True)
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class QuerySet(Config):
    """Queries, their judgments, and where their vectors and first results come from.

    Args:
        topics: Topics file, or ``ir_datasets:NAME``.
        qrels: Judgments.
        queries: A stage that adds to topics what the first pass needs: ``query_vec``, or
            ``query_toks`` for an impact index. May be left out where nothing reads it.
        first_pass: A pipeline from there to a ranking; a search of the index if neither this nor
            ``run`` is given.
        run: A run file instead.
        rel: Grade from which a document is relevant.
    """

    topics: str
    qrels: str
    queries: pt.Transformer | None = None
    first_pass: pt.Transformer | None = None
    run: str | None = None
    rel: Count = 1

    def check(self) -> None:
        if self.queries is None and self.first_pass is None and self.run is None:
            raise SpecError(
                "queries, first_pass and run are all missing; name where results come from"
            )
        if self.first_pass is not None and self.run is not None:
            raise SpecError("first_pass and run both give first results; leave one out")
        named_stage(self.queries)
        named_stage(self.first_pass)


@dataclass(frozen=True)
class DevSet(QuerySet):
    """Queries that decide which epoch is kept, by a search with their new vectors.

    Args:
        measure: What is measured; larger is better.
        k: How deep is searched.
        fb_docs: Feedback depth; the network's own by default.
    """

    measure: str = "nDCG@10"
    k: Count = 1000
    fb_docs: Depth | None = None

    def check(self) -> None:
        super().check()
        if len(parse_measures([self.measure])) != 1:
            raise SpecError(f"{type(self).__name__}.measure is '{self.measure}'; name one measure")


@dataclass(frozen=True)
class TprfNetwork(Config):
    """Sizes of TPRF's network (see `prf.tprf`).

    Args:
        fb_docs: The most documents it reads; 0 for a network of the query alone.
        layers: Transformer layers.
        heads: Attention heads; they share the vector's dimensions.
        feed_forward: Width of each layer's feed-forward part.
        dropout: Share of activations dropped in training.
        residual: What the output is added to: nothing, the query, or Rocchio's vector.
        alpha: Weight of the query in Rocchio's vector.
        beta: Weight of the mean document in it.
        scale: Factor of the output before that sum. Below 1 the vector moves less for the same step
            of the weights, as one divided by the root of the dimensions for vectors of length 1.
    """

    fb_docs: Depth = 3
    layers: Count = 2
    heads: Count = 6
    feed_forward: Count = 768
    dropout: float = 0.1
    residual: Residual = "rocchio"
    alpha: float = 0.8
    beta: float = 0.2
    scale: float = 1.0

    def check(self) -> None:
        share(self, "dropout")
        if self.scale <= 0:
            raise SpecError(f"{type(self).__name__}.scale is {self.scale}; above 0")


@dataclass(frozen=True)
class EncoderNetwork(Config):
    """A text encoder that reads the feedback passages too, and how its input is packed.

    Args:
        base: The encoder it starts from, head included; the documents' vectors are of this one.
        layout: Its layout (see `QueryEncoder`).
        fb_docs: The most passages it reads; 0 for the query alone.
        truncation: ``official``, ``pyserini`` or ``lol`` (see `EncoderPrf`).
        max_length: Tokens read in all, special ones included.
        query_length: Tokens of the query, special ones included.
        passage_length: Tokens of each passage with two special ones; 0 for ``max_length``.
        pool: Of the ``mean`` layouts: ``all`` tokens, or those of the ``query``, which see the
            passages too. The latter starts near the base's own vector, at k = 0 from it (ours).
        dropout: Share of activations dropped in training.
    """

    base: str
    layout: Layout
    fb_docs: Depth = 3
    truncation: Truncation = "official"
    max_length: Count = 512
    query_length: Count = 64
    passage_length: Depth = 0
    pool: Pool = "all"
    dropout: float = 0.1

    def check(self) -> None:
        share(self, "dropout")
        _lengths(self)
        if self.pool == "query" and not self.layout.startswith("mean"):
            raise SpecError(f"{type(self).__name__}.pool 'query' is of the mean layouts only")


@dataclass(frozen=True)
class SparseNetwork(Config):
    """A masked language model that reads query and passages and weighs the terms of a new query.

    Args:
        base: The model it starts from.
        fb_docs: The most passages it reads.
        truncation: As for `EncoderNetwork`.
        max_length: As there.
        query_length: As there.
        passage_length: As there.
        dropout: Share of activations dropped in training.
        activation: Of the largest logit over the tokens: ``relu`` (LoL), or ``log1p`` of that
            (SPLADE).
        skip: Terms with a smaller id get no weight, but for [UNK]: BERT's special ones.
        norm: ``l2`` divides the weights in the loss by their length, so that the temperature holds
            for every query; a search ranks the same without.
    """

    base: str
    fb_docs: Depth = 5
    truncation: Truncation = "lol"
    max_length: Count = 512
    query_length: Count = 130
    passage_length: Depth = 130
    dropout: float = 0.1
    activation: Activation = "relu"
    skip: Depth = 999
    norm: Literal["l2", "none"] = "l2"

    def check(self) -> None:
        share(self, "dropout")
        _lengths(self)


NETWORKS: dict[Method, type[Config]] = {
    "tprf": TprfNetwork,
    "encoder": EncoderNetwork,
    "sparse_encoder": SparseNetwork,
}
"""The dataclass of ``network`` for each method."""


@dataclass(frozen=True)
class Loss(Config):
    """What is minimised (see `prf.losses`).

    LoL revises each query ``1 + n_compare`` times with different amounts of feedback. The loss of
    the query is the mean of theirs, and ``lambda_cr`` times what more feedback made worse.

    Args:
        kind: ``full_softmax`` over all documents, or ``sampled_softmax`` over drawn negatives.
        label: Which positive is the right one: the ``lowest`` scoring, a ``random`` one, or
            ``each`` in turn, averaged. The query's other positives are left out of the sum.
        temperature: Scores are divided by it.
        chunk_rows: Documents scored at a time by the full softmax; changes memory only.
        documents_on: Keep the vectors in the ``device``'s memory, or move them there from the
            ``host`` chunk by chunk.
        negatives: For ``sampled_softmax``: how many are drawn for a query at each step.
        negative_depth: For it: how far down the first results they are drawn from.
        n_compare: Further revisions of each query beside the first.
        lambda_cr: Weight of the comparison between them.
    """

    kind: LossKind = "full_softmax"
    label: Label = "lowest"
    temperature: float = 0.05
    chunk_rows: Count = 65536
    documents_on: Literal["device", "host"] = "device"
    negatives: Count = 20
    negative_depth: Count = 100
    n_compare: Depth = 0
    lambda_cr: float = 0.0

    def check(self) -> None:
        name = f"{type(self).__name__}.lambda_cr"
        if self.lambda_cr < 0:
            raise SpecError(f"{name} is {self.lambda_cr}; at least 0")
        if self.lambda_cr and not self.n_compare:
            raise SpecError(f"{name} is {self.lambda_cr}, but n_compare 0: nothing to compare")
        if self.temperature <= 0:
            raise SpecError(f"{type(self).__name__}.temperature is {self.temperature}; above 0")
        if self.kind == "sampled_softmax" and self.label == "each":
            raise SpecError(f"{type(self).__name__}.label 'each' is of full_softmax only")


@dataclass(frozen=True)
class Loop(Config):
    """How is trained.

    Args:
        epochs: Passes over the training queries, at most.
        batch_size: Queries per update.
        accumulate: Parts a batch is computed in; bounds memory.
        optimiser: ``adamw``, or ``lamb`` as ANCE-PRF (see `prf.lamb`).
        learning_rate: Its highest value.
        warmup: Share of all updates in which it rises from 0; then it falls to 0 in a line.
        weight_decay: On matrices only.
        clip: Largest length of the gradient; 0 for no limit.
        depths: Feedback depths; ``1 + n_compare`` different ones are drawn for each query. The
            network's own if empty.
        shuffle: Draw an order of the feedback documents for each query at each update, instead of
            that of their ranks; the revisions of a query share it.
        seed: Of weights, order, depths, dropout and drawn negatives.
        figure_every: Updates between two dev figures; 0 for one after each epoch.
        patience: Dev figures without a better one after which training stops; 0 for never.
        group: Texts of like length that go through an encoder at a time; changes rounding, and
            what is dropped, only.
        bf16: Compute the network in bfloat16 what torch holds safe for it.
        device: ``cpu``, ``cuda``, ...
        threads: CPU threads; 0 for torch's choice. Another number may change the last bits.
        save_every: Updates between two safe points; 0 for one with each dev figure.
    """

    epochs: Count = 30
    batch_size: Count = 64
    accumulate: Count = 1
    optimiser: Literal["adamw", "lamb"] = "adamw"
    learning_rate: float = 5e-4
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    depths: tuple[Depth, ...] = ()
    shuffle: bool = False
    seed: Depth = 1
    figure_every: Depth = 0
    patience: Depth = 0
    group: Count = 16
    bf16: bool = False
    device: str = "cpu"
    threads: Depth = 0
    save_every: Depth = 0

    def check(self) -> None:
        share(self, "warmup")
        for name in ("learning_rate", "weight_decay", "clip"):
            low = "above 0" if name == "learning_rate" else "at least 0"
            value = getattr(self, name)
            if value < 0 or (value == 0 and name == "learning_rate"):
                raise SpecError(f"{type(self).__name__}.{name} is {value}; it must be {low}")
        if self.accumulate > self.batch_size:
            raise SpecError(
                f"{type(self).__name__}.accumulate is {self.accumulate}, more parts than the "
                f"{self.batch_size} queries of a batch"
            )


def _lengths(config: EncoderNetwork | SparseNetwork) -> None:
    if not 3 <= config.query_length <= config.max_length:
        raise SpecError(
            f"{type(config).__name__}.query_length is {config.query_length}; from 3 to max_length, "
            f"{config.max_length}"
        )


def named_stage(stage: pt.Transformer | None) -> None:
    """Refuses a stage that a stored config could not name."""
    if stage is not None and not isinstance(stage, Transformer):
        raise SpecError(f"{stage!r} has no YAML form, so no model can name it")


def need_dev(loop: Loop, dev: Config | None) -> None:
    """Refuses settings of the dev figure where there is none."""
    for name in ("patience", "figure_every"):
        if dev is None and getattr(loop, name):
            raise SpecError(f"loop.{name} needs dev, the queries whose figure is meant")


def share(config: Config, name: str) -> None:
    """Refuses a field that is no share, from 0 to below 1."""
    value = getattr(config, name)
    if not 0 <= value < 1:
        raise SpecError(f"{type(config).__name__}.{name} is {value}; from 0 to below 1")


@dataclass(frozen=True)
class Training(Config):
    """All that decides a trained model.

    Args:
        output: The folder to make.
        index: The documents' vectors: a dense index, for ``sparse_encoder`` an impact index.
        train: The queries that are learnt from.
        dev: The queries that choose the weights that are kept; without them the last ones are.
        method: ``tprf``: a network over vectors (`TPRF`). ``encoder``: a dense text encoder that
            reads the feedback (`EncoderPrf`). ``sparse_encoder``: the same, sparse
            (`SparseEncoderPrf`).
        network: Its sizes, by the method: `TprfNetwork`, `EncoderNetwork` or `SparseNetwork`.
        texts: Where the passages' texts are, as for `Text`; for the encoders.
        loss: What is minimised.
        loop: How.
        cache: Folder for prepared training data.
    """

    output: str
    index: str
    train: QuerySet
    dev: DevSet | None = None
    method: Method = "tprf"
    network: TprfNetwork | EncoderNetwork | SparseNetwork = field(default_factory=TprfNetwork)
    texts: str | None = None
    loss: Loss = field(default_factory=Loss)
    loop: Loop = field(default_factory=Loop)
    cache: str = os.path.join("runs", "training-data")

    @classmethod
    def nested(
        cls, name: str, kinds: tuple[type[Config], ...], values: Mapping[str, Any]
    ) -> type[Config]:
        if name != "network":
            return kinds[0]
        return NETWORKS[check_value(values.get("method", "tprf"), Method, "method")]

    def check(self) -> None:
        kind = NETWORKS[self.method]
        if not isinstance(self.network, kind):
            raise SpecError(f"method '{self.method}' needs a network of its own ({kind.__name__})")
        if (self.texts is None) != (self.method == "tprf"):
            said = "reads no texts; leave" if self.texts else "reads texts; add"
            raise SpecError(f"method '{self.method}' {said} texts")
        if self.method == "sparse_encoder" and self.loss.documents_on == "host":
            raise SpecError("loss.documents_on 'host' is of dense documents only; leave it out")
        self._check_queries()
        most = self.network.fb_docs
        deep = next((k for k in self.loop.depths if k > most), None)
        if deep is not None:
            raise SpecError(f"loop.depths holds {deep}, more than network.fb_docs, {most}")
        if len(set(self.loop.depths)) < len(self.loop.depths):
            raise SpecError("loop.depths holds a depth twice")
        if self.loss.n_compare >= len(self.depths):
            raise SpecError(
                f"loss.n_compare is {self.loss.n_compare}, but loop.depths holds only "
                f"{len(self.depths)} depths to draw {1 + self.loss.n_compare} different ones from"
            )
        need_dev(self.loop, self.dev)
        if self.dev is not None and (self.dev.fb_docs or 0) > most:
            raise SpecError(f"dev.fb_docs is {self.dev.fb_docs}, network.fb_docs only {most}")

    def _check_queries(self) -> None:
        if self.method != "tprf":
            return
        for name, part in (("train", self.train), ("dev", self.dev)):
            if part is not None and part.queries is None:
                raise SpecError(f"method 'tprf' reads query vectors; add {name}.queries")

    @property
    def depths(self) -> tuple[int, ...]:
        """The feedback depths that are drawn from."""
        return self.loop.depths or (self.network.fb_docs,)


def read_config(path: PathLike, settings: Sequence[str] = ()) -> Training | Distillation:
    """Reads a training config.

    Args:
        path: YAML file.
        settings: ``key=value`` with dots into mappings, such as ``loop.seed=2``; read as YAML.

    Raises:
        FileFormatError: If the file is missing or empty.
        SpecError: If it is not YAML, or a key is unknown, missing or wrong; names file and key.
    """
    name = os.fspath(path)
    values = _parse("\n".join(line for _, line in read_lines(name, "training config")), name)
    if values is None:
        raise FileFormatError(f"training config '{name}' holds only comments")
    for setting in settings:
        keys, sign, text = setting.partition("=")
        if not sign:
            raise SpecError(f"--set {setting!r}: write KEY=VALUE, such as loop.seed=2")
        values = _set(values, keys.strip().split("."), _parse(text, f"--set {setting}"), setting)
    try:
        return _kind(values).read(values)
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from error


def _kind(values: Any) -> type[Training | Distillation]:
    """Returns which dataclass a whole config is: its method decides."""
    from prf.distill.config import STUDENTS, Distillation

    method = values.get("method") if isinstance(values, Mapping) else None
    if isinstance(method, str) and method in STUDENTS:
        return Distillation
    if isinstance(method, str) and method not in NETWORKS:
        known = ", ".join(map(repr, [*NETWORKS, *STUDENTS]))
        raise SpecError(f"method is {method!r}; one of {known}")
    return Training


def _set(values: Any, keys: list[str], value: Any, setting: str) -> Any:
    if not isinstance(values, Mapping):
        raise SpecError(f"--set {setting!r}: there is no mapping to put '{keys[0]}' in")
    new = value if len(keys) == 1 else _set(values.get(keys[0], {}), keys[1:], value, setting)
    return {**values, keys[0]: new}

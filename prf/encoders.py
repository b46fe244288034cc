"""Loaded encoders: text to dense vectors, by sentence-transformers or with a published layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from prf.checkpoints import check_device, model_path, reading
from prf.errors import IndexStateError, SpecError, require
from prf.frames import FloatArray, IntArray
from prf.jvm import utf8
from prf.layouts import TCT_QUERY, Ids, Layout, Pool, Side, padded, segments
from prf.networks import Network, load_network

Precision = Literal["float32", "autocast", "bfloat16"]
Layouts = Literal["auto", "sentence-transformers", "ance", "tct", "cls", "mean", "mean-l2"]

KNOWN: dict[str, Layout] = {
    "castorini/ance-msmarco-passage": "ance",
    "castorini/tct_colbert-msmarco": "tct",
    "castorini/tct_colbert-v2-msmarco": "tct",
    "castorini/tct_colbert-v2-hn-msmarco": "tct",
    "castorini/tct_colbert-v2-hnp-msmarco": "tct",
    "sebastian-hofstaetter/distilbert-dot-margin_mse-T2-msmarco": "cls",
    "sebastian-hofstaetter/distilbert-dot-tas_b-b256-msmarco": "cls",
}
"""Hub ids whose layout is published; of any other plain model the user must say it."""

LIMITS: dict[Layout, dict[Side, int]] = {
    "ance": {"query": 64, "document": 256},
    "tct": {"query": TCT_QUERY, "document": 512},
    "cls": {"query": 512, "document": 256},
    "mean": {"query": 512, "document": 256},
    "mean-l2": {"query": 512, "document": 256},
}
"""Length at which texts are cut unless told otherwise, special tokens included (Pyserini's)."""

ENDLESS = 10**6
"""Length of models that say they have no limit."""


class Encoder:
    """A loaded model; get one from `load_encoder`.

    Vectors of one text agree within 1e-5 for any batch size (in float32). ``max_length`` holds, for
    each side, the length in tokens, special ones included, at which texts are cut.
    """

    def __init__(self, name: str, device: str, dim: int, precision: Precision) -> None:
        self.name, self.device, self.dim, self.precision = name, device, dim, precision
        self.max_length: dict[Side, int] = {}

    @property
    def description(self) -> dict[str, object]:
        """What an index records about its encoder; goes into JSON."""
        return {
            "model": self.name,
            "dim": self.dim,
            "max_length": dict(self.max_length),
            "precision": self.precision,
        }

    def read(self, texts: Sequence[str], side: Side) -> Ids:
        """Returns the token ids of each text, and the positions of texts that were cut."""
        raise NotImplementedError

    def forward(self, ids: Any, mask: Any, *, two_parts: bool = False, pool: Pool = "all") -> Any:
        """Returns the vectors of a padded batch, (n, d) float32, as a tensor.

        Args:
            ids: (n, longest) int64 on the model's device.
            mask: (n, longest) bool, False where ``ids`` is padding.
            two_parts: Give what follows the first [SEP] the second token type, where there is one.
            pool: Whether a mean is taken over ``all`` positions or those up to the first [SEP].
        """
        raise NotImplementedError

    @property
    def pad(self) -> int:
        """The token id that fills up a batch."""
        raise NotImplementedError

    def encode(
        self,
        texts: Sequence[str],
        side: Side,
        *,
        batch_size: int = 32,
        truncated: Callable[[IntArray], None] | None = None,
    ) -> FloatArray:
        """Encodes texts.

        Args:
            texts: Any number of texts; none gives an array of shape (0, d).
            side: Whether they are queries or documents.
            batch_size: Texts per forward pass.
            truncated: Called with the positions of texts longer than the model takes.

        Returns:
            (n, d) float32 in the order of ``texts``.
        """
        rows, cut = self.read(texts, side)
        if truncated is not None:
            truncated(cut)
        return self.encode_ids(rows, batch_size)

    def encode_ids(
        self,
        rows: Sequence[Sequence[int]],
        batch_size: int = 32,
        *,
        two_parts: bool = False,
        pool: Pool = "all",
    ) -> FloatArray:
        """Encodes token ids, sorted by length inside so that batches hold little padding.

        Args:
            rows: What the model reads for each text, special tokens included.
            batch_size: Texts per forward pass.
            two_parts: As for `forward`.
            pool: As for `forward`.

        Returns:
            (n, d) float32 in the order of ``rows``.
        """
        torch = require("torch", "cpu", "encoding")
        out = np.zeros((len(rows), self.dim), dtype=np.float32)
        lengths = np.array([len(ids) for ids in rows], dtype=np.int64)
        order = np.argsort(-lengths, kind="stable")
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                part = order[start : start + batch_size]
                ids, mask = padded([rows[row] for row in part], self.pad)
                vectors = self.forward(
                    torch.from_numpy(ids).to(self.device),
                    torch.from_numpy(mask).to(self.device),
                    two_parts=two_parts,
                    pool=pool,
                )
                out[part] = vectors.float().cpu().numpy()
        return out

    def half(self) -> AbstractContextManager[object]:
        """Returns the context of the transformer's own forward pass."""
        if self.precision != "autocast":
            return nullcontext()
        torch = require("torch", "cpu", "encoding")
        context: AbstractContextManager[object] = torch.autocast(
            self.device.partition(":")[0], dtype=torch.bfloat16
        )
        return context


class SentenceEncoder(Encoder):
    """A sentence-transformers model: pooling, normalisation, prefixes and lengths are its own."""

    def __init__(self, name: str, model: Any, device: str, precision: Precision) -> None:
        super().__init__(name, device, int(model.get_embedding_dimension()), precision)
        self._model = model
        prompts = model.prompts or {}
        self.prefixes: dict[Side, str] = {
            "query": prompts.get("query") or "",
            "document": prompts.get("document") or prompts.get("passage") or "",
        }
        for side in get_args(Side):
            own = getattr(model[0], f"{side}_length", None)
            self.max_length[side] = int(min(own or model.max_seq_length or 0, ENDLESS))
        self.plain = self._plain()

    def _plain(self) -> bool:
        """Tells whether the model's own preparation of texts is its tokenizer and nothing else."""
        texts = ["A few Words,  to try.", "", "long " * 20]
        for side in get_args(Side):
            try:
                given = self._model.preprocess(texts, task=side)
                own, _ = self.read(texts, side, prefix="")
            except (AttributeError, TypeError, KeyError):
                return False
            if "input_ids" not in given or "attention_mask" not in given:
                return False
            pairs = zip(given["input_ids"].tolist(), given["attention_mask"].tolist(), strict=True)
            theirs = [[i for i, real in zip(ids, mask, strict=True) if real] for ids, mask in pairs]
            if theirs != own:
                return False
        return True

    @property
    def description(self) -> dict[str, object]:
        modules = [type(module).__name__ for module in self._model]
        dot = "Normalize" in modules or self._model.similarity_fn_name == "dot"
        return {
            **super().description,
            "layout": "sentence-transformers",
            "prefixes": dict(self.prefixes),
            "modules": modules,
            # Unit vectors need no second normalisation: their inner product is the cosine.
            "similarity": "dot" if dot else "cosine",
        }

    @property
    def pad(self) -> int:
        return int(self._model.tokenizer.pad_token_id or 0)

    def read(self, texts: Sequence[str], side: Side, prefix: str | None = None) -> Ids:
        if not texts:
            return Ids([], np.zeros(0, dtype=np.int64))
        start = self.prefixes[side] if prefix is None else prefix
        # Tokenised once, and cut there; that something was cut shows in what flowed over.
        encoded = self._model.tokenizer(
            [utf8(start + text).decode() for text in texts],
            truncation=True,
            max_length=self.max_length[side],
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        cut = np.flatnonzero([bool(one.overflowing) for one in encoded.encodings])
        return Ids(list(encoded["input_ids"]), cut)

    def encode(
        self,
        texts: Sequence[str],
        side: Side,
        *,
        batch_size: int = 32,
        truncated: Callable[[IntArray], None] | None = None,
    ) -> FloatArray:
        """As `Encoder.encode`; of a model with its own preparation, cut texts are not known."""
        if self.plain:
            return super().encode(texts, side, batch_size=batch_size, truncated=truncated)
        torch = require("torch", "cpu", "encoding")
        out = np.zeros((len(texts), self.dim), dtype=np.float32)
        order = np.argsort([-len(text) for text in texts], kind="stable")
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                part = order[start : start + batch_size]
                features = self._model.preprocess(
                    [self.prefixes[side] + utf8(texts[row]).decode() for row in part], task=side
                )
                moved = {
                    key: value.to(self.device) if hasattr(value, "to") else value
                    for key, value in features.items()
                }
                out[part] = self._vectors(moved).float().cpu().numpy()
        return out

    def forward(self, ids: Any, mask: Any, *, two_parts: bool = False, pool: Pool = "all") -> Any:
        return self._vectors({"input_ids": ids, "attention_mask": mask.long()})

    def _vectors(self, features: dict[str, Any]) -> Any:
        first, *others = self._model
        with self.half():
            features = first(features)
        # Pooling and all that follows is float32, whatever the transformer's numbers are.
        for key, value in features.items():
            if getattr(value, "is_floating_point", lambda: False)():
                features[key] = value.float()
        for module in others:
            features = module(features)
        return features["sentence_embedding"]


class LayoutEncoder(Encoder):
    """A transformers model with a published layout of its input and its pooling.

    ``ance``: position 0 of RoBERTa, a linear layer, LayerNorm. ``tct``: mean of the positions from
    4. ``cls``: position 0. ``mean``: mean of all positions; ``mean-l2`` the same at length 1. Means
    leave padding out. Pooling and head compute in float32.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        device: str,
        precision: Precision,
        limits: dict[Side, int],
    ) -> None:
        super().__init__(name, device, network.dim, precision)
        self.reader, self._network = network.reader, network
        self.max_length = dict(limits)

    @property
    def layout(self) -> Layout:
        """How input is laid out and output pooled."""
        return self.reader.layout

    @property
    def description(self) -> dict[str, object]:
        return {
            **super().description,
            "layout": self.layout,
            "backbone": self._network.backbone.config.model_type,
            "similarity": "dot",
        }

    @property
    def pad(self) -> int:
        return self.reader.marks.pad

    def read(self, texts: Sequence[str], side: Side) -> Ids:
        return self.reader.read(texts, side, self.max_length[side])

    def forward(self, ids: Any, mask: Any, *, two_parts: bool = False, pool: Pool = "all") -> Any:
        if self.layout == "ance":
            mask = ids != self.pad  # as Pyserini: a literal <pad> is not read
        given = {"input_ids": ids, "attention_mask": mask.long()}
        if two_parts and self._network.token_types > 1:
            given["token_type_ids"] = segments(ids, self.reader.marks.sep)
        with self.half():
            hidden = self._network.backbone(**given).last_hidden_state
        hidden = hidden.float()
        if self.layout in ("ance", "cls"):
            vectors = hidden[:, 0]
        else:
            first = 4 if self.layout == "tct" else 0  # [CLS] and the three pieces of [Q] or [D]
            if pool == "query":
                mask = mask & (segments(ids, self.reader.marks.sep) == 0)
            real = mask[:, first:, None].float()
            vectors = (hidden[:, first:] * real).sum(1) / real.sum(1).clamp(min=1)
        if self._network.head is not None:
            torch = require("torch", "cpu", "encoding")
            with torch.autocast(vectors.device.type, enabled=False):  # training's would reach it
                vectors = self._network.head(vectors)
        if self.layout == "mean-l2":
            torch = require("torch", "cpu", "encoding")
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors


# Loading


@lru_cache(maxsize=8)
def open_encoder(
    model: str,
    device: str,
    layout: Layouts,
    precision: Precision,
    query_length: int,
    document_length: int,
    stamp: int,
) -> Encoder:
    """Opens an encoder; what `load_encoder` does, with every argument and the weights' stamp."""
    where = f"encoder '{model}'"
    for value, options in ((layout, get_args(Layouts)), (precision, get_args(Precision))):
        if value not in options:
            raise SpecError(f"{where}: {value!r} is none of {', '.join(map(repr, options))}")
    check_device(device, where)
    found = _layout_of(model) if layout == "auto" else layout
    wanted: dict[Side, int] = {"query": query_length, "document": document_length}
    half = precision == "bfloat16"
    if found == "sentence-transformers":
        _need_modules(model)
        sentence = SentenceEncoder(
            model, _sentence_model(model, device, half, stamp), device, precision
        )
        own = dict(sentence.max_length)
        sentence.max_length = {
            side: _limit(where, side, wanted[side], own[side], 3) if wanted[side] else own[side]
            for side in own
        }
        return sentence
    network = load_network(model, device, found, half, stamp)
    positions = network.reader.positions
    low = 5 if found == "tct" else 3
    limits = {
        side: _limit(where, side, wanted[side] or min(own, positions), positions, low)
        for side, own in LIMITS[found].items()
    }
    return LayoutEncoder(model, network, device, precision, limits)


def _limit(where: str, side: Side, value: int, most: int, low: int) -> int:
    if not low <= value <= most:
        raise SpecError(
            f"{where}: {side} length {value} is not possible; from {low} to {most} tokens are"
        )
    return value


def _layout_of(model: str) -> Layout | Literal["sentence-transformers"]:
    """Returns the layout that is known for certain, by exact name or by what the model brings."""
    if model in KNOWN:
        return KNOWN[model]
    _need_modules(model)
    return "sentence-transformers"


def _need_modules(model: str) -> None:
    """Refuses what is no sentence-transformers model: the library would make a pooling up."""
    path = model_path(model)
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "modules.json")):
            return
        raise IndexStateError(
            f"encoder '{model}' has no modules.json, so it is no sentence-transformers model; say "
            f"which layout its input has: layout={', '.join(map(repr, get_args(Layout)))}"
        )
    utils = require("transformers.utils", "cpu", f"encoder '{model}'")
    with reading(
        f"encoder '{model}'",
        "a local folder with a sentence-transformers model (of a plain model name the layout)",
    ):
        utils.cached_file(path, "modules.json")


@lru_cache(maxsize=4)
def _sentence_model(name: str, device: str, half: bool, stamp: int) -> Any:
    library = require("sentence_transformers", "cpu", f"encoder '{name}'")
    torch = require("torch", "cpu", f"encoder '{name}'")
    with reading(f"encoder '{name}'", "a local folder with a sentence-transformers model"):
        model = library.SentenceTransformer(
            model_path(name), device=device, model_kwargs={"use_safetensors": True}
        )
    model.eval()
    if half:
        model[0].to(torch.bfloat16)
    return model

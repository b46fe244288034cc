"""Learned sparse models: text to weighted terms by uniCOIL and SPLADE, and whole-number weights.

Weights are encoded as real numbers and quantised to whole ones, which an impact index adds up. Both
follow Pyserini, so that its published indexes and encoded queries fit what is encoded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from prf.checkpoints import (
    FOLDER,
    check_device,
    fill,
    model_path,
    read_weights,
    reading,
    refuse_missing,
    weights_stamp,
)
from prf.errors import IndexStateError, SpecError, require
from prf.frames import IntArray, ObjectArray, objects
from prf.layouts import Reader, Side, padded, segments, token_ids

Kind = Literal["unicoil", "splade"]
Activation = Literal["relu", "log1p"]
Rounding = Literal["round", "ceil"]


# From real weights to whole ones


@dataclass(frozen=True)
class Quantisation:
    """How weights become whole numbers: ``weight / weight_range * 2**bits``, rounded; no clipping.

    >>> Quantisation()(np.array([1.234, 0.013, 2.5])).tolist()
    [63, 1, 128]
    >>> Quantisation(rounding="ceil")(np.array([1.234, 0.013, 2.5])).tolist()
    [64, 1, 128]
    >>> Quantisation(scale=100)(np.array([1.234, 0.004])).tolist()
    [123, 0]

    Args:
        weight_range: The weight that becomes ``2**bits``.
        bits: 8 gives 256 levels.
        scale: Multiplies the weights instead (100 for Distil-SPLADE's indexes); 0 for the above.
        rounding: ``round`` to the nearest, halves to even (Pyserini), or ``ceil`` (uniCOIL's
            training repository).
    """

    weight_range: float = 5.0
    bits: int = 8
    scale: float = 0.0
    rounding: Rounding = "round"

    def __post_init__(self) -> None:
        if not 0 < self.weight_range < np.inf or not 0 <= self.scale < np.inf:
            raise SpecError(
                f"quantisation needs weight_range > 0 and scale >= 0, not "
                f"weight_range={self.weight_range}, scale={self.scale}"
            )
        if not 1 <= self.bits <= 16:
            raise SpecError(f"quantisation takes 1 to 16 bits, not {self.bits}")
        if self.rounding not in get_args(Rounding):
            raise SpecError(f"rounding is {self.rounding!r}; one of 'round', 'ceil'")

    def __call__(self, weights: npt.NDArray[np.float64]) -> IntArray:
        """Returns the whole numbers, int64."""
        if self.scale:
            levels = weights * self.scale
        else:
            levels = weights / self.weight_range * 2**self.bits
        rounded = np.rint(levels) if self.rounding == "round" else np.ceil(levels)
        return rounded.astype(np.int64)


PYSERINI = Quantisation()
"""Range 5, 8 bits, to the nearest: what Pyserini does to queries."""


class Weights(NamedTuple):
    """Weighted terms of a batch of texts; text i owns the slice ``ptr[i]:ptr[i + 1]``.

    ``ids`` are rows of the model's vocabulary, ascending within a text; ``values`` are above 0.
    """

    ptr: IntArray
    ids: IntArray
    values: npt.NDArray[np.float64]


def whole_terms(
    weights: Weights, vocabulary: ObjectArray, quantisation: Quantisation
) -> list[dict[str, int]]:
    """Returns term to whole weight of each text; a weight that becomes 0 is left out."""
    levels = quantisation(weights.values)
    row = np.repeat(np.arange(len(weights.ptr) - 1), np.diff(weights.ptr))
    keep = levels > 0
    ptr = np.searchsorted(row[keep], np.arange(len(weights.ptr)))
    names, levels = vocabulary[weights.ids[keep]], levels[keep]
    slices = [slice(a, b) for a, b in pairwise(ptr)]
    return [dict(zip(names[s].tolist(), levels[s].tolist(), strict=True)) for s in slices]


# Models


class SparseModel:
    """A loaded model; get one from `load_unicoil` or `load_splade`.

    Weights are computed in float32; those of one text agree within 1e-5 for any batch size.
    """

    kind: ClassVar[Kind]
    limits: ClassVar[dict[Side, int]]
    """Length in tokens, special tokens included, at which texts are cut unless told otherwise."""

    def __init__(self, name: str, tokenizer: Any, config: Any, device: str) -> None:
        self.name, self.device = name, device
        self.positions = int(config.max_position_embeddings)
        self.vocabulary: ObjectArray = objects(
            tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        )
        self._tokenizer = tokenizer
        self._pad = int(tokenizer.pad_token_id or 0)
        special = tokenizer("")["input_ids"]
        if len(special) != 2:
            raise IndexStateError(
                f"{self.kind} model '{name}': its tokenizer puts {len(special)} special tokens "
                "round a text; expected 2, as [CLS] and [SEP]"
            )
        self._cls, self._sep = special

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, without special tokens, uncut."""
        return token_ids(self._tokenizer, texts)

    def layout(
        self, texts: Sequence[str], max_length: int, expansions: Sequence[str] | None = None
    ) -> tuple[list[list[int]], IntArray]:
        """Returns what the model reads for each text, and the positions of texts that were cut.

        That is ``[CLS] text [SEP]``, or nothing at all for a text without tokens.

        Raises:
            SpecError: For a length the model does not have, or expansions it does not take.
        """
        if not 3 <= max_length <= self.positions:
            raise SpecError(
                f"{self.kind} model '{self.name}': max_length is {max_length}; it must be from 3 "
                f"to {self.positions}"
            )
        if expansions is not None:
            raise SpecError(f"{self.kind} model '{self.name}' takes no expansions of documents")
        tokens, room = self.tokens(texts), max_length - 2
        rows = [[self._cls, *ids[:room], self._sep] if ids else [] for ids in tokens]
        return rows, np.flatnonzero([len(ids) > room for ids in tokens])

    def encode(
        self,
        texts: Sequence[str],
        side: Side,
        *,
        expansions: Sequence[str] | None = None,
        max_length: int = 0,
        max_terms: int = 0,
        batch_size: int = 32,
        truncated: Callable[[IntArray], None] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Weights:
        """Encodes texts, sorted by length inside the call so that batches hold little padding.

        Args:
            texts: Any number of texts. One without any token gets no terms.
            side: Whether they are queries or documents.
            expansions: What is added to each document (uniCOIL after doc2query).
            max_length: Tokens, special ones included, at which a text is cut; 0 for the model's.
            max_terms: Keeps the heaviest terms of each text; 0 keeps all.
            batch_size: Texts per forward pass.
            truncated: Called with the positions of texts that were cut.
            progress: Called with the number of texts done since the last call.
        """
        rows, cut = self.layout(texts, max_length or self.limits[side], expansions)
        if truncated is not None:
            truncated(cut)
        return self.encode_ids(
            rows, side, max_terms=max_terms, batch_size=batch_size, progress=progress
        )

    def encode_ids(
        self,
        rows: Sequence[Sequence[int]],
        side: Side,
        *,
        max_terms: int = 0,
        batch_size: int = 32,
        progress: Callable[[int], object] | None = None,
    ) -> Weights:
        """Encodes what the model reads for each text, special tokens included; see `encode`."""
        torch = require("torch", "cpu", "encoding")
        found = [(np.zeros(0, np.int64), np.zeros(0, np.float64))] * len(rows)
        order = sorted((i for i, ids in enumerate(rows) if ids), key=lambda i: -len(rows[i]))
        if progress is not None:
            progress(len(rows) - len(order))
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                part = order[start : start + batch_size]
                for place, pair in zip(
                    part, self._batch([rows[i] for i in part], side), strict=True
                ):
                    found[place] = _heaviest(*pair, max_terms)
                if progress is not None:
                    progress(len(part))
        ptr = np.cumsum([0, *(len(ids) for ids, _ in found)], dtype=np.int64)
        ids, values = zip(*found, strict=True) if found else ([], [])
        empty: list[Any] = [np.zeros(0)]
        return Weights(
            ptr,
            np.concatenate([*ids, *empty]).astype(np.int64),
            np.concatenate([*values, *empty]),
        )

    def terms(self, weights: Weights, quantisation: Quantisation) -> list[dict[str, int]]:
        """Returns term to whole weight of each text; a weight that becomes 0 is left out."""
        return whole_terms(weights, self.vocabulary, quantisation)

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Returns ids and a mask of what is no padding, (n, longest)."""
        torch = require("torch", "cpu", "encoding")
        table, mask = padded(rows, self._pad)
        return torch.from_numpy(table).to(self.device), torch.from_numpy(mask).to(self.device)

    def _batch(
        self, rows: Sequence[Sequence[int]], side: Side
    ) -> Iterable[tuple[IntArray, npt.NDArray[np.float64]]]:
        """Returns term ids, ascending, and weights above 0 of some texts' tokens."""
        raise NotImplementedError


def _heaviest(
    ids: IntArray, values: npt.NDArray[np.float64], count: int
) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Keeps the ``count`` heaviest terms (0 for all); of equal ones the first in the vocabulary."""
    if not count or len(ids) <= count:
        return ids, values
    chosen = np.sort(np.lexsort((ids, -values))[:count])
    return ids[chosen], values[chosen]


class UniCoilModel(SparseModel):
    """uniCOIL: one weight per token of the text itself, ReLU(linear(BERT)).

    A term that occurs several times has the sum of its weights in a query and the largest in a
    document. ``[CLS]`` counts nothing; ``[SEP]`` is a term, as in Pyserini and its indexes; a
    literal ``[PAD]`` ends the text.
    """

    kind = "unicoil"
    limits: ClassVar[dict[Side, int]] = {"query": 128, "document": 512}
    TEXT, EXPANSION = 400, 100
    """Tokens of a document and of its expansion, without special ones, where it has one."""

    def __init__(self, name: str, tokenizer: Any, bert: Any, projection: Any, device: str) -> None:
        super().__init__(name, tokenizer, bert.config, device)
        self._bert, self._projection = bert, projection

    def layout(
        self, texts: Sequence[str], max_length: int, expansions: Sequence[str] | None = None
    ) -> tuple[list[list[int]], IntArray]:
        """As `SparseModel.layout`; with an expansion ``[CLS] text [SEP] expansion [SEP]``.

        The text is cut at 400 tokens, the expansion at 100, of which each that the text does not
        have stands once. Only texts count as cut: most expansions are longer. ``max_length`` is
        for texts without expansion.
        """
        if expansions is None:
            return super().layout(texts, max_length)
        tokens, rows = self.tokens(texts), []
        for text, more in zip(tokens, self.tokens(expansions), strict=True):
            known = set(text[: self.TEXT])
            # The order is that of CPython's set, as Pyserini has it: positions change the weights.
            new = list({token for token in more[: self.EXPANSION] if token not in known})
            row = [self._cls, *text[: self.TEXT], self._sep, *new, self._sep]
            rows.append(row if text or new else [])
        return rows, np.flatnonzero([len(text) > self.TEXT for text in tokens])

    def _batch(
        self, rows: Sequence[Sequence[int]], side: Side
    ) -> Iterator[tuple[IntArray, npt.NDArray[np.float64]]]:
        ids, _ = self._padded(rows)
        hidden = self._bert(input_ids=ids, attention_mask=ids != self._pad).last_hidden_state
        weights = self._projection(hidden).relu().squeeze(-1).cpu().numpy().astype(np.float64)
        token = ids.cpu().numpy()
        counts = np.logical_and.accumulate(token != self._pad, axis=1) & (token != self._cls)
        size = len(self.vocabulary)
        key = (np.arange(len(rows))[:, None] * size + token)[counts]
        unique, place = np.unique(key, return_inverse=True)
        values: npt.NDArray[Any] = np.zeros(len(unique))
        if side == "query":
            values = np.bincount(place, weights[counts], len(unique))
        else:
            np.maximum.at(values, place, weights[counts])
        unique, values = unique[values > 0], values[values > 0]
        stops = np.searchsorted(unique, np.arange(len(rows) + 1) * size)
        for row, (start, stop) in enumerate(pairwise(stops)):
            yield unique[start:stop] - row * size, values[start:stop]


class SpladeModel(SparseModel):
    """SPLADE: a weight for any term, max over the text's tokens of log(1 + ReLU(logit)).

    Args:
        name: For messages.
        tokenizer: The model's.
        model: A masked language model of transformers.
        device: Where it is.
        activation: ``log1p``, or ``relu`` without the logarithm (LoL).
        skip: Terms with a smaller id have no weight, but for [UNK].
        two_parts: What follows the first [SEP] has the second token type.
    """

    kind = "splade"
    limits: ClassVar[dict[Side, int]] = {"query": 256, "document": 512}
    BLOCK = 4096
    """Terms whose logits are computed at a time; changes no bit of them."""

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        model: Any,
        device: str,
        *,
        activation: Activation = "log1p",
        skip: int = 0,
        two_parts: bool = False,
    ) -> None:
        super().__init__(name, tokenizer, model.config, device)
        torch = require("torch", "cpu", "encoding")
        self.activation, self.two_parts = activation, two_parts
        self.reader = Reader.of("cls", tokenizer, self.positions, f"model '{name}'")
        self.allowed = torch.from_numpy(allowed_terms(tokenizer, skip)).to(device)
        ids, mask = self._padded([[self._cls, self._sep]])
        with torch.inference_mode():
            expected = model(input_ids=ids, attention_mask=mask).logits[0]
            # Logits are made text by text in `_batch`, so the model itself stops before them.
            decoder = take_decoder(model)
            self._model = model
            self._weight, self._bias = decoder.weight.detach(), decoder.bias
            found = self._logits(model(input_ids=ids, attention_mask=mask).logits[0])
        size = len(self.vocabulary)
        if not torch.allclose(found, expected.amax(0), rtol=1e-4, atol=1e-4) or len(found) < size:
            raise IndexStateError(
                f"splade model '{name}': the head of {type(model).__name__} is no plain linear "
                f"layer over its {size} terms; this model is not supported"
            )

    def _logits(self, hidden: Any) -> Any:
        """Returns the largest logit of every term over the tokens of one text."""
        torch = require("torch", "cpu", "encoding")
        # Some thousand terms at a time, so that logits stay in the processor's cache. The bias is
        # the same at every token, so it can wait until after the maximum.
        parts = [(hidden @ part.T).amax(0) for part in self._weight.split(self.BLOCK)]
        largest = torch.cat(parts)
        return largest if self._bias is None else largest + self._bias

    def _batch(
        self, rows: Sequence[Sequence[int]], side: Side
    ) -> Iterator[tuple[IntArray, npt.NDArray[np.float64]]]:
        ids, mask = self._padded(rows)
        given = {"input_ids": ids, "attention_mask": mask}
        if self.two_parts and getattr(self._model.config, "type_vocab_size", 0) > 1:
            given["token_type_ids"] = segments(ids, self._sep)
        hidden = self._model(**given).logits
        size = len(self.vocabulary)  # a checkpoint may have more rows than there are terms
        for row, tokens in enumerate(rows):
            # log(1 + relu(x)) never falls as x grows, so the maximum may come first; text by text
            # there is no padding to compute, and never more than one text's logits in memory.
            weights = self._logits(hidden[row, : len(tokens)])[:size].relu()
            if self.activation == "log1p":
                weights = weights.add(1).log()
            weights = weights.mul(self.allowed).cpu().numpy()
            (terms,) = np.nonzero(weights)
            yield terms.astype(np.int64), weights[terms].astype(np.float64)


def allowed_terms(tokenizer: Any, skip: int) -> npt.NDArray[np.float32]:
    """Returns 1 for each term that may have a weight, 0 for ids below ``skip`` but for [UNK]."""
    allowed = np.ones(len(tokenizer), dtype=np.float32)
    allowed[:skip] = 0
    if tokenizer.unk_token_id is not None:
        allowed[tokenizer.unk_token_id] = 1
    return allowed


def take_decoder(model: Any) -> Any:
    """Takes the layer that makes logits out of a masked language model, and returns it."""
    torch = require("torch", "cpu", "loading a model")
    decoder = model.get_output_embeddings()
    put_decoder(model, decoder, torch.nn.Identity())
    return decoder


def put_decoder(model: Any, old: Any, new: Any) -> None:
    """Puts another layer in the place of one of a model's."""
    name = next(key for key, module in model.named_modules() if module is old)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


# Loading


def load_unicoil(model: str, device: str = "cpu") -> UniCoilModel:
    """Opens a uniCOIL model, once per model and device.

    Args:
        model: Local folder or hub id with ``model.safetensors``, such as
            ``castorini/unicoil-msmarco-passage`` converted. Its weights have the names that
            Pyserini gives them: ``bert.…`` and ``tok_proj.weight``, ``tok_proj.bias``.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...

    Raises:
        MissingDependency: If transformers or the device is not there.
        IndexStateError: If the model cannot be found or read, or lacks weights: a projection is
            never made up.
    """
    return _load_unicoil(model, device, weights_stamp(model))


def load_splade(model: str, device: str = "cpu") -> SpladeModel:
    """Opens a SPLADE model, once per model and device.

    Args:
        model: Local folder or hub id of a masked language model with ``model.safetensors``.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...

    Raises:
        MissingDependency: If transformers or the device is not there.
        IndexStateError: If the model cannot be found or read, or lacks weights such as those of
            its language model head.
    """
    return _load_splade(model, device, weights_stamp(model))


@lru_cache(maxsize=4)
def _load_unicoil(name: str, device: str, stamp: int) -> UniCoilModel:
    where, kind = f"unicoil model '{name}'", "a unicoil model"
    check_device(device, where)
    torch, transformers = (require(lib, "cpu", where) for lib in ("torch", "transformers"))
    path = model_path(name)
    with reading(where, FOLDER):
        tokenizer = transformers.BertTokenizerFast.from_pretrained(path)
        config = transformers.BertConfig.from_pretrained(path)
        weights = read_weights(path)
    bert = transformers.BertModel(config, add_pooling_layer=False)
    projection = torch.nn.Linear(config.hidden_size, 1)
    fill(where, projection, "tok_proj.", weights, kind)
    fill(where, bert, "bert.", weights, kind)
    bert.float().to(device).eval()
    return UniCoilModel(name, tokenizer, bert, projection.float().to(device), device)


def load_revised(
    model: str, device: str, activation: Activation, skip: int, two_parts: bool
) -> SpladeModel:
    """Opens a sparse model that reads feedback, as `prf train` makes it, once.

    Args:
        model: Local folder or hub id of a masked language model.
        device: ``cpu``, ``cuda``, ...
        activation: As for `SpladeModel`.
        skip: As there.
        two_parts: As there.

    Raises:
        MissingDependency: As `load_splade`.
        IndexStateError: As `load_splade`.
    """
    return _load_splade(model, device, weights_stamp(model), activation, skip, two_parts)


@lru_cache(maxsize=4)
def _load_splade(
    name: str,
    device: str,
    stamp: int,
    activation: Activation = "log1p",
    skip: int = 0,
    two_parts: bool = False,
) -> SpladeModel:
    where = f"splade model '{name}'"
    check_device(device, where)
    tokenizer, model = read_masked_model(name, where)
    return SpladeModel(
        name,
        tokenizer,
        model.float().to(device).eval(),
        device,
        activation=activation,
        skip=skip,
        two_parts=two_parts,
    )


def read_masked_model(name: str, where: str) -> tuple[Any, Any]:
    """Reads tokenizer and masked language model, all weights of which the checkpoint holds.

    Raises:
        IndexStateError: If it cannot be found or read, or lacks weights.
    """
    transformers = require("transformers", "cpu", where)
    path = model_path(name)
    with reading(where, FOLDER):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, report = transformers.AutoModelForMaskedLM.from_pretrained(
            path, use_safetensors=True, output_loading_info=True
        )
    refuse_missing(where, sorted(report["missing_keys"]), "a splade model")
    return tokenizer, model

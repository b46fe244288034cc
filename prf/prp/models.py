"""Language models of Hugging Face's transformers, on this machine: encoder-decoders and decoders.

A prompt ends where the answer is one token: both labels begin with the same words (``Passage``), so
those are written for the model, and the next token is the letter. One forward pass gives the
logits of both letters, which is the whole answer; nothing else is generated.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from prf.checkpoints import (
    FOLDER,
    check_device,
    model_path,
    reading,
    refuse_missing,
    weights_stamp,
)
from prf.errors import IndexStateError, PrfError, SpecError, require, shorten
from prf.layouts import padded
from prf.pipeline import Count, Resource
from prf.prp.answers import Answer, Question, read_verdict, shared_start
from prf.prp.backend import Backend, Batch, Session
from prf.prp.prompt import Limits, Template, fit, read_template

Mode = Literal["score", "generate"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Row = tuple[int, ...]

ENOUGH = {"cpu": 4, "cuda": 512, "mps": 64}
"""Rows from which a batch need not grow: a CPU is as fast with few, and few have less padding."""

SHORT = 0.8
"""Rows shorter than this part of the longest begin a batch of their own, if there are enough."""

PROBES = (
    Question("what do cows eat", "Cows eat grass and hay.", "The printer is out of paper."),
    Question("capital of France", "Trees lose leaves in autumn.", "Paris is the French capital."),
)
"""Asked in both orders before anything else, to see that answers can be read at all."""


class LanguageModel(Backend, abstract=True):
    """Base of backends that read a prompt: what they have in common, and what a cache knows of it.

    Subclasses have the fields ``model``, ``mode``, ``template``, ``labels``, ``max_query_tokens``
    and ``max_passage_tokens``.
    """

    model: str
    template: str
    labels: tuple[str, ...]
    max_query_tokens: Count
    max_passage_tokens: Count

    kind: ClassVar[str]

    def check(self) -> None:
        labels = self.labels
        if len(labels) != 2 or not all(label.strip() for label in labels) or labels[0] == labels[1]:
            raise SpecError(
                f"{type(self).__name__}.labels is {shorten(labels)}; give two different labels"
            )

    @property
    def stamp(self) -> tuple[object, ...]:
        return (read_template(self.template).digest,)

    def prompt_identity(self) -> dict[str, Any]:
        """Returns what decides the prompt of two texts; reads the template file."""
        return {
            "backend": type(self).__name__,
            "model": self.model,
            "template": read_template(self.template).digest,
            "labels": list(self.labels),
            "max_query_tokens": self.max_query_tokens,
            "max_passage_tokens": self.max_passage_tokens,
        }


@dataclass(frozen=True, repr=False)
class LocalModel(LanguageModel):
    """A model of Hugging Face on this machine: T5 and its kin, or a decoder such as Llama.

    A decoder with a chat template reads the prompt as a user's turn, any other as plain text. The
    tokens of the two letters are found when the model is opened, and four small questions are asked
    before the first real one.

    Source: Qin et al., Findings of NAACL 2024, arXiv 2306.17563, sections 3.1 and 4.1 (scoring and
    generation mode).

    Args:
        model: Local folder or hub id; weights as safetensors, or a GGUF file of the folder.
        mode: ``score``: the margin is the difference of the two letters' log-probabilities, and
            every answer is a verdict. ``generate``: the most likely token is read; one that is no
            letter is no verdict, and there are no margins.
        template: Name of a preset, or a text file with {query}, {a} and {b}.
        labels: What the template calls the two passages; they differ in their last word.
        answer_start: What is written before the last word of the label, for the model; None for
            the words both labels begin with.
        max_query_tokens: Longer queries are cut.
        max_passage_tokens: Longer passages are cut.
        batch_tokens: Tokens of a batch, padding included; halved when memory runs out, and changes
            margins by rounding only. 1 asks one question at a time.
        share_prefix: Whether a decoder reads what prompts have in common once for all of them;
            changes margins by rounding only.
        dtype: ``auto``: bfloat16 on a GPU, float32 elsewhere.
        device: ``cpu``, ``cuda``, ...
        gguf_file: Name of a GGUF file inside ``model``; needs the package gguf.
        revision: Branch, tag or commit of a hub id.
    """

    model: str
    mode: Mode = "score"
    template: str = "default"
    labels: tuple[str, ...] = ("Passage A", "Passage B")
    answer_start: str | None = None
    max_query_tokens: Count = 32
    max_passage_tokens: Count = 128
    batch_tokens: Count = 4096
    share_prefix: bool = True
    dtype: Dtype = "auto"
    device: str = "cpu"
    gguf_file: str | None = None
    revision: str | None = None

    kind = "language model"

    @property
    def has_margins(self) -> bool:
        return self.mode == "score"

    def identity(self) -> dict[str, Any] | None:
        return {
            **self.prompt_identity(),
            "mode": self.mode,
            "answer_start": self._start,
            "dtype": self._dtype,
            "gguf_file": self.gguf_file,
            "revision": self.revision,
        }

    @property
    def _start(self) -> str:
        return shared_start(self.labels) if self.answer_start is None else self.answer_start

    @property
    def _dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device.startswith("cpu") else "bfloat16"

    def resources(self) -> list[Resource]:
        local = self.model if os.path.isdir(self.model) else None
        if local is not None and self.gguf_file is not None:
            local = os.path.join(local, self.gguf_file)
        return [Resource(self.kind, self.model, local)]

    @property
    def stamp(self) -> tuple[object, ...]:
        return (*super().stamp, self._weights_stamp)

    @property
    def _weights_stamp(self) -> int:
        if self.gguf_file is None:
            return weights_stamp(self.model)
        file = Path(model_path(self.model)) / self.gguf_file
        return file.stat().st_mtime_ns if file.exists() else 0

    def session(self) -> Session:
        where = f"{self.kind} '{self.model}'"
        check_device(self.device, where)
        chosen = self.model, self.gguf_file, self.revision, self._dtype, self.device
        loaded = _load(where, *chosen, self._weights_stamp)
        wrapper = _EncoderDecoder if loaded.model.config.is_encoder_decoder else _Decoder
        session = wrapper(self, where, loaded.tokenizer, loaded.model)
        session.fingerprint = loaded.fingerprint
        session.probe()
        return session


class _Loaded(NamedTuple):
    tokenizer: Any
    model: Any
    fingerprint: str


@lru_cache(maxsize=2)
def _load(
    where: str,
    name: str,
    gguf_file: str | None,
    revision: str | None,
    dtype: str,
    device: str,
    stamp: int,
) -> _Loaded:
    """Opens weights and tokenizer; backends that differ in anything else share them."""
    transformers = require("transformers", "cpu", where)
    torch = require("torch", "cpu", where)
    path = model_path(name)
    settings: dict[str, Any] = {"revision": revision} if revision else {}
    if gguf_file is not None:
        require("gguf", "gguf", where)
        settings["gguf_file"] = gguf_file
    # Reading GGUF draws a bar that no setting of transformers turns off.
    bars = nullcontext() if gguf_file is None else redirect_stderr(io.StringIO())
    with reading(where, FOLDER if gguf_file is None else f"a local folder with {gguf_file}"), bars:
        config = transformers.AutoConfig.from_pretrained(path, **settings)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **settings)
        seq2seq = bool(getattr(config, "is_encoder_decoder", False))
        kind = "AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM"
        if gguf_file is None:
            settings["use_safetensors"] = True
        model, report = getattr(transformers, kind).from_pretrained(
            path, output_loading_info=True, **settings
        )
    refuse_missing(where, sorted(report["missing_keys"]), "a language model")
    model = model.to(device=device, dtype=getattr(torch, dtype)).eval()
    return _Loaded(tokenizer, model, fingerprint(path, gguf_file))


def fingerprint(path: str, gguf_file: str | None = None) -> str:
    """Returns a digest of a local model's weights: size, first and last MiB of every file.

    Not of all bytes, since a model may have very many; "" for a model that is no folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        return ""
    files = [folder / gguf_file] if gguf_file else sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode() + stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()


class _ModelSession(Session):
    """A loaded model: from questions to token rows, and from logits to answers."""

    def __init__(self, backend: LocalModel, where: str, tokenizer: Any, model: Any) -> None:
        super().__init__()
        if not getattr(tokenizer, "is_fast", False):
            raise IndexStateError(
                f"{where} has a slow tokenizer, which cannot say where tokens begin; save it with "
                "a tokenizer.json"
            )
        self._backend, self._where = backend, where
        self._tokenizer, self._model = tokenizer, model
        self._template: Template = read_template(backend.template)
        pad = tokenizer.pad_token_id
        self._pad = int(pad if pad is not None else (tokenizer.eos_token_id or 0))
        self._budget = float(backend.batch_tokens)
        self._limits = Limits(
            backend.max_query_tokens, backend.max_passage_tokens, self._context() or None
        )
        self._special = sorted(set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._cut = lru_cache(maxsize=1 << 16)(self._cut_text)
        # Both letters get the same variants, so that none has an advantage.
        ends = [label[len(shared_start(backend.labels)) :].strip() for label in backend.labels]
        forms = [[self._token(f"{blank}{end}") for blank in ("", " ")] for end in ends]
        kept = [
            (one, two)
            for one, two in zip(*forms, strict=True)
            if one is not None and two is not None and one != two
        ]
        if not kept:
            raise IndexStateError(
                f"{where}: {ends[0]!r} and {ends[1]!r} are not one token each, and different ones; "
                "choose other labels"
            )
        self._letters = [sorted({pair[side] for pair in kept}) for side in (0, 1)]

    def _context(self) -> int:
        """Returns how many tokens the model can read, 0 if it does not say."""
        config = self._model.config
        names = ("max_position_embeddings", "n_positions")
        values = [getattr(config, name, None) for name in names]
        known = [int(value) for value in values if isinstance(value, int) and value > 0]
        return min(known, default=0)

    def _ids(self, text: str) -> list[int]:
        """Returns the tokens of a text alone."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _token(self, text: str) -> int | None:
        """Returns the token that writes this text after the start of the answer, if it is one."""
        start = self._backend._start
        before, after = self._ids(start), self._ids(start + text)
        if start and after[:-1] == before and len(after) == len(before) + 1:
            found = after[-1]
        else:
            alone = self._ids(text)
            if len(alone) != 1:
                return None
            found = alone[0]
        return None if found == self._tokenizer.unk_token_id else int(found)

    # Prompts

    def _cut_text(self, text: str, limit: int) -> tuple[str, int, int]:
        for token in self._special:  # or a passage could end the user's turn
            if token in text:
                text = text.replace(token, f"{token[:1]} {token[1:]}")
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        offsets = encoded["offset_mapping"]
        if len(offsets) <= limit:
            return text, len(offsets), len(offsets)
        return text[: offsets[limit - 1][1]].rstrip(), limit, len(offsets)

    def _row(self, question: Question) -> Row:
        """Returns the tokens the model reads for a question that fits."""
        raise NotImplementedError

    def _fitted(self, question: Question) -> tuple[Question, int]:
        return fit(question, self._limits, self._cut, lambda q: len(self._row(q)), self._where)

    def tokens(self, questions: Sequence[Question]) -> list[int]:
        return [len(self._row(self._fitted(question)[0])) + 1 for question in questions]

    # Answers

    def ask(self, questions: Sequence[Question]) -> Iterator[Batch]:
        fitted = [self._fitted(question) for question in questions]
        rows = [self._row(question) for question, _ in fitted]
        for places, logits in self._logits(rows, [question for question, _ in fitted]):
            self.counters["batches"] += 1
            yield [
                (place, self._answer(values, len(rows[place]), fitted[place][1]))
                for place, values in zip(places, logits, strict=True)
            ]

    def _answer(self, logits: Any, read: int, cut: int) -> Answer:
        if not bool(logits.isfinite().all()):
            raise PrfError(
                f"{self._where}: its logits are not finite numbers in {self._backend._dtype}; use "
                "dtype='bfloat16' or 'float32'"
            )
        if self._backend.mode == "generate":
            raw = str(self._tokenizer.decode([int(logits.argmax())]))
            win = read_verdict(f"{shared_start(self._backend.labels)} {raw}", self._backend.labels)
            return Answer(win or 0, win is not None, None, raw, read, 1, cut=cut)
        one, two = (float(logits[ids].double().logsumexp(0)) for ids in self._letters)
        margin = one - two
        return Answer((margin > 0) - (margin < 0), True, margin, "", read, 1, cut=cut)

    def _logits(
        self, rows: Sequence[Row], questions: Sequence[Question]
    ) -> Iterator[tuple[list[int], Any]]:
        """Yields row numbers and their logits, (n, vocabulary), batch by batch."""
        raise NotImplementedError

    def _tried(self, rows: int, size: int, forward: Callable[[], Any]) -> Any:
        """Runs a batch; None if memory ran out, after which batches are half as large."""
        torch = require("torch", "cpu", self._where)
        try:
            with torch.inference_mode():
                out = forward()
        except torch.OutOfMemoryError as error:
            if rows == 1:
                raise PrfError(
                    f"{self._where}: no memory for one prompt of {size} tokens; lower "
                    "max_passage_tokens, or use another device or dtype"
                ) from error
            self._budget = size / 2
            if self._backend.device.startswith("cuda"):
                torch.cuda.empty_cache()
            return None
        self._budget = min(self._budget * 1.25, float(self._backend.batch_tokens))
        return out

    def probe(self) -> None:
        """Asks four small questions.

        Raises:
            PrfError: If no answer is a verdict.
        """
        asked = [question for probe in PROBES for question in (probe, probe.swapped())]
        answers = [a for batch in self.ask(asked) for _, a in batch if isinstance(a, Answer)]
        if not any(answer.valid for answer in answers):
            raise PrfError(
                f"{self._where} answers two plain questions with "
                f"{', '.join(sorted({shorten(answer.raw) for answer in answers}))} instead of "
                f"{' or '.join(self._backend.labels)}; use mode 'score', or another template"
            )

    def _padded(self, rows: Sequence[Sequence[int]], left: bool) -> tuple[Any, Any]:
        """Returns ids and mask, (n, longest) each, padded on one side."""
        torch = require("torch", "cpu", self._where)
        ids, mask = padded(rows, self._pad, left=left)
        device = self._backend.device
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device).long()


class _EncoderDecoder(_ModelSession):
    """T5 and its kin: the encoder reads the prompt, the decoder begins the answer."""

    def __init__(self, backend: LocalModel, where: str, tokenizer: Any, model: Any) -> None:
        super().__init__(backend, where, tokenizer, model)
        start = getattr(model.config, "decoder_start_token_id", None)
        if start is None:
            raise IndexStateError(f"{where}: its config has no decoder_start_token_id")
        self._begin = [int(start), *self._ids(backend._start)]

    def _row(self, question: Question) -> Row:
        text = self._template.fill(question)
        return tuple(self._tokenizer(text, verbose=False)["input_ids"])

    def _logits(
        self, rows: Sequence[Row], questions: Sequence[Question]
    ) -> Iterator[tuple[list[int], Any]]:
        order = sorted(range(len(rows)), key=lambda place: (-len(rows[place]), place))
        while order:
            width = len(rows[order[0]])
            batch = order[: max(1, int(self._budget // width))]
            chosen = [rows[place] for place in batch]
            out = self._tried(len(batch), width * len(batch), partial(self._forward, chosen))
            if out is not None:
                yield batch, out
                order = order[len(batch) :]

    def _forward(self, rows: Sequence[Row]) -> Any:
        torch = require("torch", "cpu", self._where)
        ids, mask = self._padded(rows, left=False)
        self.counters["padded_tokens"] += ids.numel()
        begin = torch.tensor([self._begin] * len(rows), device=self._backend.device)
        return self._model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=begin, use_cache=False
        ).logits[:, -1]


class _Shared(NamedTuple):
    """Rows that begin with the same tokens."""

    prefix: Row
    places: list[int]


class _Decoder(_ModelSession):
    """A decoder: the prompt goes up to the start of the answer, what prompts share is read once."""

    def __init__(self, backend: LocalModel, where: str, tokenizer: Any, model: Any) -> None:
        names = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in names else "cache"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self._kept: tuple[list[Row], Any, Any] | None = None
        self._shares = backend.share_prefix and _plain_cache(model.config)
        super().__init__(backend, where, tokenizer, model)

    def _row(self, question: Question) -> Row:
        text = self._template.fill(question)
        if not self._tokenizer.chat_template:
            text = f"{text} {self._backend._start}" if self._backend._start else text
            return tuple(self._tokenizer(text, verbose=False)["input_ids"])
        turn = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return tuple(self._ids(turn + self._backend._start))

    def _logits(
        self, rows: Sequence[Row], questions: Sequence[Question]
    ) -> Iterator[tuple[list[int], Any]]:
        groups = grouped(rows, questions) if self._shares else [
            _Shared((), [place]) for place in range(len(rows))
        ]  # fmt: skip
        groups = [
            _Shared(prefix, sorted(places, key=lambda place: (-len(rows[place]), place)))
            for prefix, places in groups
        ]
        groups.sort(key=lambda g: (-len(g.prefix), -len(rows[g.places[0]]), g.places))
        enough = ENOUGH[self._backend.device.partition(":")[0]]
        while groups:
            batch, rest, size = taken(groups, rows, self._budget, enough)
            count = sum(len(group.places) for group in batch)
            out = self._tried(count, size, partial(self._forward, rows, batch))
            if out is not None:
                yield [place for group in batch for place in group.places], out
                groups = rest

    def _forward(self, rows: Sequence[Row], groups: Sequence[_Shared]) -> Any:
        torch = require("torch", "cpu", self._where)
        ends = [rows[place][len(g.prefix) :] for g in groups for place in g.places]
        ids, mask = self._padded(ends, left=True)
        self.counters["padded_tokens"] += ids.numel()
        owner = torch.tensor([n for n, g in enumerate(groups) for _ in g.places], device=ids.device)
        past: dict[str, Any] = {"use_cache": False}
        before = torch.zeros((len(ends), 1), dtype=torch.int64, device=ids.device)
        if any(group.prefix for group in groups):
            cache, start_mask = self._prefixes([group.prefix for group in groups])
            cache.batch_select_indices(owner)
            start_mask = start_mask[owner]
            past = {self._cache_name: cache, "use_cache": True}
            before = start_mask.sum(1, keepdim=True)
            whole = torch.cat([start_mask, mask], 1)
        else:
            whole = mask
        positions = (before + mask.cumsum(1) - 1).clamp(min=0)
        return self._model(
            input_ids=ids, attention_mask=whole, position_ids=positions, **past, **self._last_only
        ).logits[:, -1]

    def _prefixes(self, prefixes: list[Row]) -> tuple[Any, Any]:
        """Returns what the model remembers of each prefix, a copy to write on, and its mask."""
        if self._kept is None or self._kept[0] != prefixes:
            utils = require("transformers.cache_utils", "cpu", self._where)
            ids, mask = self._padded(prefixes, left=True)
            self.counters["padded_tokens"] += ids.numel()
            cache = utils.DynamicCache(config=self._model.config)
            self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                use_cache=True,
                **{self._cache_name: cache},
                **self._last_only,
            )
            self._kept = (prefixes, cache, mask)  # a group may come in several batches
        return copy.deepcopy(self._kept[1]), self._kept[2]


def _plain_cache(config: Any) -> bool:
    """Tells whether every layer remembers every token, so that rows of it can be chosen."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"} and not getattr(config, "sliding_window", None)


def grouped(rows: Sequence[Row], questions: Sequence[Question]) -> list[_Shared]:
    """Groups rows that have a beginning in common: query and first passage, or the query alone.

    >>> q = [Question("q", "a", "b"), Question("q", "a", "c"), Question("q", "d", "a")]
    >>> [tuple(group) for group in grouped([(1, 2, 3), (1, 2, 4), (1, 5, 6)], q)]
    [((1, 2), [0, 1]), ((), [2])]
    """
    out, rest = _by_key(rows, range(len(rows)), [question[:2] for question in questions])
    more, alone = _by_key(rows, rest, [question[:1] for question in questions])
    return [*out, *more, *(_Shared((), [place]) for place in alone)]


def _by_key(
    rows: Sequence[Row], places: Sequence[int], keys: Sequence[tuple[str, ...]]
) -> tuple[list[_Shared], list[int]]:
    """Returns the groups of rows with one key, and the rows that share theirs with no other."""
    found: dict[tuple[str, ...], list[int]] = {}
    for place in places:
        found.setdefault(keys[place], []).append(place)
    groups = [
        _Shared(_common([rows[i] for i in members]), members)
        for members in found.values()
        if len(members) > 1
    ]
    return groups, [members[0] for members in found.values() if len(members) == 1]


def _common(rows: Sequence[Row]) -> Row:
    """Returns the tokens all rows begin with, leaving one at least of each."""
    low, high = min(rows), max(rows)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False)))
    return low[: min(same, min(map(len, rows)) - 1)]


def taken(
    groups: Sequence[_Shared], rows: Sequence[Row], budget: float, enough: int
) -> tuple[list[_Shared], list[_Shared], int]:
    """Returns the groups of the next batch, those that are left, and the batch's padded tokens.

    At least one row is taken. A group is split where the batch is full, or where its rows, the
    longest first, have become so short that a batch of their own wastes less.

    Args:
        groups: What is left.
        rows: All rows.
        budget: Tokens of a batch, prefixes counted for each row.
        enough: Rows from which a batch need not grow.
    """
    batch: list[_Shared] = []
    prefix = end = count = 0
    for number, group in enumerate(groups):
        # No model reads a prefix of nothing.
        if count and (count >= enough or bool(prefix) != bool(group.prefix)):
            return batch, list(groups[number:]), (prefix + end) * count
        wide = max(prefix, len(group.prefix))
        for done, place in enumerate(group.places):
            own = len(rows[place]) - len(group.prefix)
            full = (wide + max(end, own)) * (count + 1) > budget
            if count and (full or (count >= enough and own < SHORT * end)):
                rest = [_Shared(group.prefix, group.places[done:]), *groups[number + 1 :]]
                taken_now = [_Shared(group.prefix, group.places[:done])] if done else []
                return [*batch, *taken_now], rest, (prefix + end) * count
            prefix, end, count = wide, max(end, own), count + 1
        batch.append(group)
    return batch, [], (prefix + end) * count

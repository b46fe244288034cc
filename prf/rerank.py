"""Rerankers: the documents of a result list scored anew, by a model of text pairs or by vectors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyterrier as pt
from tqdm import tqdm

from prf.checkpoints import (
    FOLDER,
    check_device,
    model_path,
    reading,
    refuse_missing,
    weights_stamp,
)
from prf.errors import FrameError, IndexStateError, SpecError, require, shorten
from prf.frames import ObjectArray, original_query, query_codes, ranked, stack
from prf.index import open_index
from prf.jvm import utf8
from prf.pipeline import Count, Resource, Transformer, notice, shows_progress
from prf.retrieve import check_encoder

Scores = npt.NDArray[np.float64]
QueryField = Literal["original", "current"]

MOST_TOKENS = 512
"""Tokens of a pair where neither the user nor the model says less."""

CHUNK = 16384
"""Pairs tokenised, and sorted by length, at a time."""


# Models of text pairs


class PairModel:
    """A loaded model that scores pairs of texts; get one from `load_pair_model`.

    Computed in float32; scores of one pair agree within 1e-5 for any batch size.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, tokenizer: Any, model: Any, device: str) -> None:
        self.name, self.device = name, device
        self._tokenizer, self._model = tokenizer, model
        self._pad = int(tokenizer.pad_token_id or 0)

    def score(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        *,
        max_length: int | None = None,
        batch_size: int = 32,
        truncated: Callable[[npt.NDArray[np.int64]], object] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Scores:
        """Scores pairs, sorted by length inside the call so that batches hold little padding.

        Args:
            queries: (n,), one for each pair.
            texts: (n,).
            max_length: Tokens of a pair, all the model reads included; see `length`.
            batch_size: Pairs per forward pass.
            truncated: Called with the positions of pairs that were cut.
            progress: Called with the number of pairs done since the last call.

        Returns:
            (n,) float64, larger is more relevant.

        Raises:
            SpecError: For a length the model does not have.
        """
        torch = require("torch", "cpu", "reranking")
        max_length = self.length(max_length)
        out, cut = np.zeros(len(queries)), [np.zeros(0, dtype=np.int64)]
        with torch.inference_mode():
            for start in range(0, len(queries), CHUNK):
                part = slice(start, start + CHUNK)
                rows, too_long = self.tokens(
                    [utf8(query).decode() for query in queries[part]],
                    [utf8(text).decode() for text in texts[part]],
                    max_length,
                )
                cut.append(np.flatnonzero(too_long) + start)
                order = np.argsort([-len(row["input_ids"]) for row in rows], kind="stable")
                for first in range(0, len(order), batch_size):
                    chosen = order[first : first + batch_size]
                    out[chosen + start] = self._batch([rows[row] for row in chosen])
                    if progress is not None:
                        progress(len(chosen))
        if truncated is not None:
            truncated(np.concatenate(cut))
        return out

    def length(self, wanted: int | None) -> int:
        """Returns how many tokens of a pair are read: what is wanted, or as many as the model has.

        Args:
            wanted: None for the model's own limit, at most 512.

        Raises:
            SpecError: For a length that leaves no room, or that the model does not have.
        """
        raise NotImplementedError

    def _ids(self, *texts: Sequence[str], **settings: Any) -> list[dict[str, list[int]]]:
        """Returns what the tokenizer makes of each text or pair, one mapping each."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a text is long is ours to say
            encoded = self._tokenizer(
                *texts, padding=False, return_attention_mask=False, verbose=False, **settings
            )
        return [
            dict(zip(encoded, values, strict=True))
            for values in zip(*encoded.values(), strict=True)
        ]

    def tokens(
        self, queries: Sequence[str], texts: Sequence[str], max_length: int
    ) -> tuple[list[dict[str, list[int]]], npt.NDArray[np.bool_]]:
        """Returns what the model reads for each pair, and which pairs were cut."""
        raise NotImplementedError

    def _padded(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
        """Returns the inputs of a batch: (n, longest) each, with a mask of what is no padding."""
        torch = require("torch", "cpu", "reranking")
        lengths = np.array([len(row["input_ids"]) for row in rows])
        mask = np.arange(lengths.max()) < lengths[:, None]
        out = {"attention_mask": mask.astype(np.int64)}
        for name in rows[0]:
            table = np.full(mask.shape, self._pad if name == "input_ids" else 0, dtype=np.int64)
            table[mask] = np.concatenate([row[name] for row in rows])
            out[name] = table
        return {name: torch.from_numpy(table).to(self.device) for name, table in out.items()}

    def _batch(self, rows: Sequence[dict[str, list[int]]]) -> Scores:
        """Returns the scores of some pairs."""
        raise NotImplementedError


class Classifier(PairModel):
    """A pair classifier such as BERT on ``[CLS] query [SEP] text [SEP]``.

    With one logit the score is that logit as it is; with two it is the probability of the second
    class, by softmax.
    """

    kind = "cross-encoder"

    def __init__(self, name: str, tokenizer: Any, model: Any, device: str) -> None:
        super().__init__(name, tokenizer, model, device)
        labels = int(model.config.num_labels)
        if labels not in (1, 2):
            raise IndexStateError(
                f"cross-encoder '{name}' has {labels} classes; a reranker has 1 (relevance) or 2 "
                "(not relevant, relevant)"
            )

    def length(self, wanted: int | None) -> int:
        limits = [int(self._tokenizer.model_max_length)]
        positions = getattr(self._model.config, "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:
            limits.append(positions)
        low = self._tokenizer.num_special_tokens_to_add(pair=True) + 1
        length = min(MOST_TOKENS, *limits) if wanted is None else wanted
        if not low <= length <= min(limits):
            raise SpecError(
                f"cross-encoder '{self.name}': max_length is {length}; it must be from {low} "
                f"to {min(limits)}"
            )
        return length

    def tokens(
        self, queries: Sequence[str], texts: Sequence[str], max_length: int
    ) -> tuple[list[dict[str, list[int]]], npt.NDArray[np.bool_]]:
        rows = self._ids(queries, texts, truncation="longest_first", max_length=max_length)
        cut = np.array([len(row["input_ids"]) >= max_length for row in rows], dtype=bool)
        full = np.flatnonzero(cut).tolist()  # cut, or just as long as may be
        if full:
            whole = self._ids([queries[i] for i in full], [texts[i] for i in full])
            cut[full] = [len(row["input_ids"]) > max_length for row in whole]
        return rows, cut

    def logits(self, rows: Sequence[dict[str, list[int]]]) -> Any:
        """Returns the model's output for some of `tokens`, (n, classes), with gradient."""
        return self._model(**self._padded(rows)).logits

    def save(self, folder: Path, max_length: int) -> None:
        """Writes model and tokenizer, so that `CrossEncoder` reads them; weights as safetensors.

        Args:
            folder: Made if it is not there.
            max_length: Tokens of a pair that the model is made for.
        """
        self._model.save_pretrained(folder)
        self._tokenizer.model_max_length = max_length
        self._tokenizer.save_pretrained(folder)

    def _batch(self, rows: Sequence[dict[str, list[int]]]) -> Scores:
        logits: Scores = self.logits(rows).cpu().numpy().astype(np.float64)
        if logits.shape[1] == 1:
            return logits[:, 0]
        # In float64 probabilities near 1 keep their order.
        return _sigmoid(logits[:, 1] - logits[:, 0])


class Generator(PairModel):
    """monoT5: how much rather ``true`` than ``false`` follows ``Query: q Document: d Relevant:``.

    The score is the logarithm of the probability of ``true`` among the two, below 0. A pair that is
    too long loses the end of its text, never ``Relevant:``.
    """

    kind = "monoT5"

    def __init__(self, name: str, tokenizer: Any, model: Any, device: str) -> None:
        super().__init__(name, tokenizer, model, device)
        self._answers = [self._token(word) for word in ("true", "false")]
        self._end = self._ids(["Relevant:"])[0]["input_ids"]
        start = getattr(model.config, "decoder_start_token_id", None)
        if start is None:
            raise IndexStateError(
                f"monoT5 model '{name}': its config has no decoder_start_token_id"
            )
        self._start = int(start)

    def _token(self, word: str) -> int:
        ids = self._ids([word], add_special_tokens=False)[0]["input_ids"]
        if len(ids) != 1 or ids[0] == self._tokenizer.unk_token_id:
            raise IndexStateError(
                f"monoT5 model '{self.name}': {word!r} is not one token of its tokenizer, but "
                f"{self._tokenizer.convert_ids_to_tokens(ids)}; is it a T5 tokenizer?"
            )
        return int(ids[0])

    def length(self, wanted: int | None) -> int:
        length = MOST_TOKENS if wanted is None else wanted
        if length <= len(self._end):
            raise SpecError(
                f"monoT5 model '{self.name}': max_length is {length}; it must be more than "
                f"{len(self._end)}"
            )
        return length

    def tokens(
        self, queries: Sequence[str], texts: Sequence[str], max_length: int
    ) -> tuple[list[dict[str, list[int]]], npt.NDArray[np.bool_]]:
        bodies = [f"Query: {q} Document: {d}" for q, d in zip(queries, texts, strict=True)]
        rows = [
            {"input_ids": row["input_ids"]} for row in self._ids([f"{b} Relevant:" for b in bodies])
        ]
        cut = np.array([len(row["input_ids"]) > max_length for row in rows], dtype=bool)
        long = np.flatnonzero(cut).tolist()
        if long:
            short = self._ids([bodies[i] for i in long], add_special_tokens=False)
            room = max_length - len(self._end)
            for i, row in zip(long, short, strict=True):
                rows[i] = {"input_ids": [*row["input_ids"][:room], *self._end]}
        return rows, cut

    def _batch(self, rows: Sequence[dict[str, list[int]]]) -> Scores:
        torch = require("torch", "cpu", "reranking")
        begin = torch.full((len(rows), 1), self._start, device=self.device)
        logits = self._model(**self._padded(rows), decoder_input_ids=begin, use_cache=False).logits
        yes, no = logits[:, 0, self._answers].cpu().numpy().astype(np.float64).T
        return np.asarray(-np.logaddexp(0.0, no - yes), dtype=np.float64)


def _sigmoid(values: Scores) -> Scores:
    return np.asarray(np.exp(-np.logaddexp(0.0, -values)), dtype=np.float64)


def load_pair_model(model: str, kind: str, device: str = "cpu") -> PairModel:
    """Opens a model that scores text pairs, once per model and device.

    Args:
        model: Local folder or hub id with ``model.safetensors``.
        kind: ``cross-encoder`` or ``monoT5``.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...

    Raises:
        MissingDependency: If transformers or the device is not there.
        IndexStateError: If the model cannot be found or read, or lacks weights, such as those of
            its classifier: none is made up.
    """
    return _load(model, kind, device, weights_stamp(model))


@lru_cache(maxsize=4)
def _load(name: str, kind: str, device: str, stamp: int) -> PairModel:
    where = f"{kind} model '{name}'"
    check_device(device, where)
    transformers = require("transformers", "cpu", where)
    path = model_path(name)
    architecture, wrapper = {
        "cross-encoder": ("AutoModelForSequenceClassification", Classifier),
        "monoT5": ("AutoModelForSeq2SeqLM", Generator),
    }[kind]
    with reading(where, FOLDER):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, report = getattr(transformers, architecture).from_pretrained(
            path, use_safetensors=True, output_loading_info=True
        )
    refuse_missing(where, sorted(report["missing_keys"]), f"a {kind} model")
    return wrapper(name, tokenizer, model.float().to(device).eval(), device)


# Stages


class Reranker(Transformer, abstract=True):
    """Base of stages that score a result list anew: the same documents, new score and rank."""

    needs: ClassVar[tuple[str, ...]] = ("qid", "query", "docno", "text")
    gives = ("score", "rank")

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        scores = self.scores(frame) if len(frame) else np.zeros(0)
        wrong = np.flatnonzero(~np.isfinite(scores))
        if wrong.size:
            qid, docno = frame["qid"].iat[wrong[0]], frame["docno"].iat[wrong[0]]
            raise FrameError(
                f"{self!r}: the score of docno {docno!r} for qid {qid!r} is {scores[wrong[0]]}; "
                "check the model's weights"
            )
        return ranked(frame.assign(score=scores))

    def scores(self, frame: pd.DataFrame) -> Scores:
        """Returns (n,) scores of the rows, n >= 1; larger is better."""
        raise NotImplementedError


class _PairReranker(Reranker, abstract=True):
    """Base of rerankers that run a model over query and text of every row."""

    model: str
    batch_size: Count
    max_length: Count | None
    device: str
    query_field: QueryField

    kind: ClassVar[str]

    def resources(self) -> list[Resource]:
        local = self.model if os.path.isdir(self.model) else None
        return [Resource(f"{self.kind} model", self.model, local)]

    def cost(self, documents: int | None) -> str:
        if documents is None:
            return "scores one pair for each document of a query"
        return f"scores at most {documents:,} pairs for each query"

    def scores(self, frame: pd.DataFrame) -> Scores:
        model = load_pair_model(self.model, self.kind, self.device)
        query = original_query(frame) if self.query_field == "original" else frame["query"]
        queries = self._texts(frame, query.to_numpy(dtype=object), "query")
        texts = self._texts(frame, frame["text"].to_numpy(dtype=object), "text")
        # A pair that stands twice is scored once: less work, and equal texts tie exactly.
        query_code, query_names = query_codes(queries)
        text_code, text_names = query_codes(texts)
        pairs, place = np.unique(query_code * len(text_names) + text_code, return_inverse=True)
        qids = frame["qid"].to_numpy(dtype=object)

        def name_cut(rows: npt.NDArray[np.int64]) -> None:
            cut = qids[np.isin(place, rows)]
            notice(
                f"have documents that are too long: query and text have more than "
                f"{model.length(self.max_length)} tokens of '{self.model}' and were cut",
                list(dict.fromkeys(cut)),
            )

        with tqdm(
            total=len(pairs), desc=self.kind, unit="pair", leave=False, disable=not shows_progress()
        ) as bar:
            found = model.score(
                query_names[pairs // len(text_names)].tolist(),
                text_names[pairs % len(text_names)].tolist(),
                max_length=self.max_length,
                batch_size=self.batch_size,
                truncated=name_cut,
                progress=bar.update,
            )
        return found[place]

    def _texts(self, frame: pd.DataFrame, values: ObjectArray, name: str) -> ObjectArray:
        row = next((i for i, value in enumerate(values) if not isinstance(value, str)), None)
        if row is not None:
            qid, docno = frame["qid"].iat[row], frame["docno"].iat[row]
            raise FrameError(
                f"{self!r}: {name} of qid {qid!r}, docno {docno!r} is {shorten(values[row])}, "
                "not text"
            )
        return values


@dataclass(frozen=True, repr=False)
class CrossEncoder(_PairReranker):
    """Scores query and document together, by a pair classifier such as BERT.

    Needs: qid, query, docno, text
    Gives: qid, query, docno, text, score, rank

    ``score`` is, of a model with one logit, that logit as it is (any number; nothing is squashed);
    of one with two, the probability of the second class, 0 to 1. Larger is better. A pair longer
    than ``max_length`` tokens loses tokens from the end of the longer of its two texts until it
    fits, and its query is named once. A pair's score does not depend on the other pairs but for
    rounding: at most 1e-5, equal texts tie exactly. An empty list stays empty.

    Source: Nogueira and Cho, Passage Re-ranking with BERT, arXiv 1901.04085; layout and probability
    as in Li et al., ACM TOIS, arXiv 2108.11044.

    Args:
        model: Local folder or hub id of a sequence classification model with 1 or 2 classes (any
            cross-encoder of sentence-transformers), weights as safetensors.
        batch_size: Pairs per forward pass; changes scores by at most 1e-5.
        max_length: Tokens of a pair, special ones included; by default what the model says it was
            made for, at most 512.
        device: ``cpu``, ``cuda``, ...
        query_field: ``original``, the text the user wrote, whatever feedback made of it; or
            ``current``, the text as it is now.
    """

    model: str
    batch_size: Count = 32
    max_length: Count | None = None
    device: str = "cpu"
    query_field: QueryField = "original"

    kind = "cross-encoder"


@dataclass(frozen=True, repr=False)
class MonoT5(_PairReranker):
    """Scores query and document together, by how likely a T5 model says ``true``.

    Needs: qid, query, docno, text
    Gives: qid, query, docno, text, score, rank

    ``score`` is the logarithm of the probability of ``true`` against ``false`` as the first word
    after ``Query: q Document: d Relevant:``; below 0, larger is better. A prompt longer than
    ``max_length`` tokens loses the end of the document, and its query is named once. A pair's score
    does not depend on the other pairs but for rounding: at most 1e-5, equal texts tie exactly. An
    empty list stays empty.

    Source: Nogueira, Jiang, Pradeep and Lin, Document Ranking with a Pretrained
    Sequence-to-Sequence Model, Findings of EMNLP 2020, arXiv 2003.06713.

    Args:
        model: Local folder or hub id of a T5 model, weights as safetensors.
        batch_size: Pairs per forward pass; changes scores by at most 1e-5.
        max_length: Tokens of a prompt.
        device: ``cpu``, ``cuda``, ...
        query_field: ``original``, the text the user wrote, whatever feedback made of it; or
            ``current``, the text as it is now.
    """

    model: str
    batch_size: Count = 32
    max_length: Count = 512
    device: str = "cpu"
    query_field: QueryField = "original"

    kind = "monoT5"


@dataclass(frozen=True, repr=False)
class DenseRescorer(Reranker):
    """Scores the listed documents by the query's dense vector.

    Needs: qid, query_vec, docno
    Gives: qid, query_vec, docno, score, rank

    ``score`` is what `DenseRetriever` gives the document: the inner product (of unit vectors in a
    cosine index), rounded once to float32. Larger is better. After vector feedback, bring the list
    back first: ``... >> Rocchio() >> BM25(b) >> DenseRescorer(i)``. A docno the index does not hold
    is an error. An empty list stays empty.

    Source: Li et al., ACM TOIS, arXiv 2108.11044, section 4 (vector feedback for rerankers,
    BB+PRF-A and BB+PRF-R).

    Args:
        index: Folder of a dense index.
        force_encoder: Accept query vectors of another encoder than the index was built with.
    """

    index: str
    force_encoder: bool = False

    needs = ("qid", "query_vec", "docno")

    def resources(self) -> list[Resource]:
        return [Resource("dense index", self.index, self.index)]

    def check_after(self, earlier: Sequence[pt.Transformer]) -> None:
        if not self.force_encoder:
            check_encoder(self, self.index, earlier)

    def scores(self, frame: pd.DataFrame) -> Scores:
        codes, _ = query_codes(frame["qid"])
        order = np.argsort(codes, kind="stable")  # a list without scores may be in any order
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        vectors = stack(
            frame["query_vec"].iloc[order[starts]], repr(self), frame["qid"].iloc[order[starts]]
        )
        docnos = frame["docno"].to_numpy(dtype=object)[order]
        lists = [docnos[a:b] for a, b in pairwise([*starts, len(docnos)])]
        out = np.empty(len(frame))
        out[order] = open_index(self.index).score(vectors, lists)
        return out

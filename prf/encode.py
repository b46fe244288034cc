"""Encoding queries: a loaded encoder, and the stages that add query vectors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd

from prf.checkpoints import weights_stamp
from prf.encoders import Encoder, Layouts, Precision, open_encoder
from prf.errors import FileFormatError, FrameError
from prf.frames import FloatArray, column, objects
from prf.pipeline import Count, Depth, QueryTransformer, Resource, notice
from prf.trec import read_lines
from prf.vectors_io import read_npy


def load_encoder(
    model: str,
    device: str = "cpu",
    *,
    layout: Layouts = "auto",
    precision: Precision = "float32",
    query_length: int = 0,
    document_length: int = 0,
) -> Encoder:
    """Opens an encoder; its weights are read once for each model, device and layout.

    Args:
        model: Short name (``minilm``), local folder, or hub id. Weights are read from safetensors.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...
        layout: What the model reads and how its output is pooled (see `QueryEncoder`).
        precision: ``float32``, ``autocast`` or ``bfloat16`` (see `QueryEncoder`).
        query_length: Tokens, special ones included, at which queries are cut; 0 for the layout's.
        document_length: The same for documents.

    Raises:
        SpecError: For a layout or precision that is none, or a length the model does not have.
        MissingDependency: If a library or the device is not there.
        IndexStateError: If the model cannot be found or read (names the cache and
            ``HF_HUB_OFFLINE``), lacks weights, or is of another kind than its layout.
    """
    lengths = query_length, document_length
    return open_encoder(model, device, layout, precision, *lengths, weights_stamp(model))


@dataclass(frozen=True, repr=False)
class QueryEncoder(QueryTransformer):
    """Adds the query's dense vector.

    Needs: qid, query
    Gives: qid, query, query_vec

    ``query_vec`` is (d,) float32 with the model's own pooling and normalisation. Queries longer
    than the model takes are cut and named once. An empty query gets the vector of the empty text.
    May also follow a retriever: then it encodes the queries behind the results.

    Layouts: ``sentence-transformers``, as the model's folder says (prefixes, lengths, pooling,
    normalisation). ``ance``: ``<s> text </s>`` in lower case, 64 tokens, RoBERTa's first position,
    then ANCE's linear layer and LayerNorm. ``tct``: ``[CLS] [Q] text`` filled with [MASK] to 36
    tokens, the mean from position 4. ``cls``: ``[CLS] text [SEP]``, first position (DistilBERT KD,
    TAS-B). ``mean``: the same, mean of all positions; ``mean-l2``: that at length 1 (SBERT).
    ``auto`` knows the published ANCE, TCT-ColBERT, KD and TAS-B models by exact name and
    sentence-transformers models by their modules.json; of any other the layout must be named.

    Args:
        model: ``minilm`` (packaged), a local folder, or a hub id.
        batch_size: Texts per forward pass; changes vectors by at most 1e-5.
        device: ``cpu``, ``cuda``, ...
        layout: How the model's input is laid out and its output pooled.
        precision: ``float32``; ``autocast`` computes in bfloat16 what torch holds safe for it;
            ``bfloat16`` also keeps the weights so. Vectors are float32 in any case, pooling too.
        max_length: Tokens, special ones included, at which a query is cut; 0 for the layout's own.
    """

    model: str
    batch_size: Count = 32
    device: str = "cpu"
    layout: Layouts = "auto"
    precision: Precision = "float32"
    max_length: Depth = 0

    needs = ("qid", "query")
    gives = ("query_vec",)

    def resources(self) -> list[Resource]:
        local = self.model if os.path.isdir(self.model) else None
        return [Resource("encoder", self.model, local)]

    def run_queries(self, queries: pd.DataFrame) -> pd.DataFrame:
        if len(queries) == 0:
            return queries.assign(query_vec=column(np.empty(0, dtype=object)))
        encoder = load_encoder(
            self.model,
            self.device,
            layout=self.layout,
            precision=self.precision,
            query_length=self.max_length,
        )
        limit = encoder.max_length["query"]
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
                f"are longer than the {limit} tokens of '{self.model}' and were cut",
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

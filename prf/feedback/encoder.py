"""Feedback by a query encoder that was trained to read the feedback passages beside the query."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd

from prf.encode import load_encoder
from prf.encoders import LayoutEncoder, Precision
from prf.errors import FrameError, SpecError
from prf.feedback.base import Feedback
from prf.frames import FloatArray, ObjectArray, column, objects, stack
from prf.layouts import FeedbackLayout, Truncation
from prf.pipeline import Count, Depth, Resource, notice


@dataclass(frozen=True, repr=False)
class EncoderPrf(Feedback):
    """ANCE-PRF and its kin: encodes query and feedback passages together to a new query vector.

    Needs: qid, query, docno, score, text
    Gives: qid, query, query_vec

    The model replaces the query encoder; passages stay in the index of the encoder it was trained
    for. Their texts may come from any ranker. What it reads:

    - ``ance``: ``<s> q </s> d1 </s> ... dk </s>`` in lower case, position 0, ANCE's linear layer
      and LayerNorm.
    - ``cls``: ``[CLS] q [SEP] d1 [SEP] ... dk [SEP]``, position 0.
    - ``tct``: ``[CLS] [Q] q [SEP] d1 [SEP] ... dk``, [MASK] up to ``max_length``, the mean from
      position 4.

    ``query_vec`` is (d,) float32, not normalised by us. A query without documents keeps its
    ``query_vec``; where the frame has none, the model encodes the query alone (k = 0), and so it
    does with ``fb_docs=0``. Queries whose input was cut are named once. A model is trained for one
    k; others run, but are not what was published.

    Source: Yu, Xiong, Callan, Improving Query Representations for Dense Retrieval with Pseudo
    Relevance Feedback, CIKM 2021, arXiv 2108.13454, section 3; Li et al., ECIR 2022, arXiv
    2112.06400, for TCT-ColBERT and DistilBERT.

    Args:
        model: Local folder or hub id; weights are read from safetensors.
        fb_docs: Feedback depth.
        layout: ``ance``, ``tct`` or ``cls``.
        truncation: ``official`` cuts the query at ``query_length`` and each passage at
            ``max_length``, and of too long an input keeps the first ids and the final separator;
            ``pyserini`` cuts off the end only.
        max_length: Tokens read in all, special ones included.
        query_length: Tokens of the query, special ones included; for ``official``.
        batch_size: Queries per forward pass; changes vectors by at most 1e-5.
        device: ``cpu``, ``cuda``, ...
        precision: ``float32``, ``autocast`` or ``bfloat16`` (see `QueryEncoder`).
    """

    model: str
    fb_docs: Depth = 3
    layout: FeedbackLayout = "ance"
    truncation: Truncation = "official"
    max_length: Count = 512
    query_length: Count = 64
    batch_size: Count = 32
    device: str = "cpu"
    precision: Precision = "float32"

    needs: ClassVar[tuple[str, ...]] = ("qid", "query", "docno", "score", "text")
    gives: ClassVar[tuple[str, ...]] = ("query_vec",)

    def check(self) -> None:
        if self.query_length > self.max_length:
            raise SpecError(
                f"EncoderPrf.query_length is {self.query_length} and max_length "
                f"{self.max_length}; the query is part of the whole"
            )

    def resources(self) -> list[Resource]:
        local = self.model if os.path.isdir(self.model) else None
        return [Resource("PRF encoder", self.model, local)]

    def new_queries(self, frame: pd.DataFrame, queries: pd.DataFrame) -> pd.DataFrame:
        texts: list[Sequence[str]] = [()] * len(queries)
        for row, query, docs in self.feedback(frame, queries):
            texts[row] = self._passages(query.qid, docs.docnos, docs.texts)
        vectors = np.empty(len(queries), dtype=object)
        rows = np.arange(len(queries))
        if "query_vec" in queries.columns:
            vectors[:] = list(
                objects(stack(queries["query_vec"], repr(self), queries["qid"]))
            )  # kept where there is no feedback
            rows = np.flatnonzero([len(passages) > 0 for passages in texts])
        if len(rows):
            new = self._encode(queries.iloc[rows], [texts[row] for row in rows])
            if len(rows) < len(queries):
                self._check_lengths(vectors, new)
            vectors[rows] = objects(new)
        return queries.assign(query_vec=column(vectors))

    def _passages(self, qid: str, docnos: ObjectArray, texts: ObjectArray) -> list[str]:
        for docno, text in zip(docnos, texts, strict=True):
            if not isinstance(text, str):
                raise FrameError(
                    f"{self!r}: text of docno {docno!r} for qid {qid!r} is {text!r}, not text"
                )
        return list(texts)

    def _encode(self, queries: pd.DataFrame, passages: Sequence[Sequence[str]]) -> FloatArray:
        """Returns (n, d): all queries of a call in one go."""
        encoder = load_encoder(
            self.model, self.device, layout=self.layout, precision=self.precision
        )
        if not isinstance(encoder, LayoutEncoder):
            raise SpecError(f"{self!r}: layout {self.layout!r} reads no feedback")
        qids, texts = queries["qid"].to_numpy(dtype=object), list(queries["query"])
        bad = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
        if bad is not None:
            raise FrameError(f"{self!r}: query of qid {qids[bad]!r} is {texts[bad]!r}, not text")
        ids, cut = encoder.reader.feedback(
            texts,
            passages,
            truncation=self.truncation,
            max_length=self.max_length,
            query_length=self.query_length,
        )
        notice(
            f"with their feedback are longer than '{self.model}' reads and were cut",
            list(qids[cut]),
        )
        new = encoder.encode_ids(ids, self.batch_size)
        wrong = np.flatnonzero(~np.isfinite(new).all(axis=1))
        if wrong.size:
            raise FrameError(f"{self!r}: vector of qid {qids[wrong[0]]!r} is not finite")
        return new

    def _check_lengths(self, old: ObjectArray, new: FloatArray) -> None:
        """Refuses to mix vectors of two sizes: ``query_vec`` of an encoder that does not belong."""
        dim = new.shape[1]
        if len(old[0]) != dim:
            raise FrameError(
                f"{self!r}: query_vec has {len(old[0])} numbers, '{self.model}' gives {dim}, and "
                "queries without feedback keep theirs; use the encoder that the model was trained "
                "for, or drop the column first"
            )

"""Feedback by a query encoder that was trained to read the feedback passages beside the query."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import pandas as pd

from prf.checkpoints import read_feedback
from prf.encode import load_encoder
from prf.encoders import LayoutEncoder, Precision
from prf.errors import FrameError, SpecError
from prf.feedback.base import Feedback
from prf.frames import FloatArray, ObjectArray, column, objects, stack
from prf.layouts import Layout, Pool, Reader, Truncation
from prf.pipeline import Count, Depth, Resource, notice
from prf.sparse_models import Activation, Quantisation, load_revised


class Packing(NamedTuple):
    """How query and passages become one input (see `prf.layouts.feedback_ids`)."""

    truncation: Truncation = "official"
    max_length: int = 512
    query_length: int = 64
    passage_length: int = 0


class PassageEncoder(Feedback, abstract=True):
    """Base of stages whose model reads the text of the query and of its feedback passages."""

    model: str
    fb_docs: Depth
    truncation: Truncation | None
    max_length: Count | None
    query_length: Count | None
    passage_length: Depth | None
    query_alone: bool

    needs: ClassVar[tuple[str, ...]] = ("qid", "query", "docno", "score", "text")
    kind: ClassVar[str]
    """What a trained model's feedback.json must say."""

    def check(self) -> None:
        if (self.query_length or 0) > (self.max_length or 512):
            raise SpecError(
                f"{type(self).__name__}.query_length is {self.query_length} and max_length "
                f"{self.max_length or 512}; the query is part of the whole"
            )

    def resources(self) -> list[Resource]:
        local = self.model if os.path.isdir(self.model) else None
        return [Resource("PRF encoder", self.model, local)]

    def trained(self) -> dict[str, Any]:
        """Returns what the model's folder says about its input, empty for a published model."""
        return read_feedback(self.model, self.kind, repr(self))

    def packing(self, trained: dict[str, Any]) -> Packing:
        """Returns the own arguments, for those not given what the model says, or else defaults."""
        own = {name: getattr(self, name) for name in Packing._fields}
        given = {name: value for name, value in own.items() if value is not None}
        said = {name: trained[name] for name in Packing._fields if name in trained}
        return Packing(**{**said, **given})

    def new_queries(self, frame: pd.DataFrame, queries: pd.DataFrame) -> pd.DataFrame:
        texts, (name,) = self.texts(frame, queries), self.gives
        made, rows = np.empty(len(queries), dtype=object), np.arange(len(queries))
        if name in queries.columns and not self.query_alone:
            made = self.kept(queries)  # where there is no feedback
            rows = np.flatnonzero([len(passages) > 0 for passages in texts])
        if len(rows):
            new = self.encoded(queries.iloc[rows], [texts[row] for row in rows])
            if len(rows) < len(queries):
                self.check_kept(made[0], new[0])
            made[rows] = new
        return queries.assign(**{name: column(made)})

    def kept(self, queries: pd.DataFrame) -> ObjectArray:
        """Returns a copy of what the queries have in the column that the stage gives."""
        return queries[self.gives[0]].to_numpy(dtype=object).copy()

    def check_kept(self, old: Any, new: Any) -> None:
        """Refuses to mix what a query had with what the model makes, if they do not fit."""

    def encoded(self, queries: pd.DataFrame, passages: Sequence[Sequence[str]]) -> ObjectArray:
        """Returns what the model makes of each query with its passages; one at least."""
        raise NotImplementedError

    def texts(self, frame: pd.DataFrame, queries: pd.DataFrame) -> list[Sequence[str]]:
        """Returns the feedback passages of each query."""
        texts: list[Sequence[str]] = [()] * len(queries)
        for row, query, docs in self.feedback(frame, queries):
            for docno, text in zip(docs.docnos, docs.texts, strict=True):
                if not isinstance(text, str):
                    raise FrameError(
                        f"{self!r}: text of docno {docno!r} for qid {query.qid!r} is {text!r}, "
                        "not text"
                    )
            texts[row] = list(docs.texts)
        return texts

    def packed(
        self,
        reader: Reader,
        packing: Packing,
        queries: pd.DataFrame,
        passages: Sequence[Sequence[str]],
    ) -> list[list[int]]:
        """Returns the ids of each query with its passages, and names those that were cut."""
        qids, texts = queries["qid"].to_numpy(dtype=object), list(queries["query"])
        bad = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
        if bad is not None:
            raise FrameError(f"{self!r}: query of qid {qids[bad]!r} is {texts[bad]!r}, not text")
        ids, cut = reader.feedback(texts, passages, **packing._asdict())
        notice(
            f"with their feedback are longer than '{self.model}' reads and were cut",
            list(qids[cut]),
        )
        return ids


@dataclass(frozen=True, repr=False)
class EncoderPrf(PassageEncoder):
    """ANCE-PRF and its kin: encodes query and feedback passages together to a new query vector.

    Needs: qid, query, docno, score, text
    Gives: qid, query, query_vec

    The model replaces the query encoder; passages stay in the index of the encoder it was trained
    for. Their texts may come from any ranker. A model that `prf train` made says in its folder how
    it reads; of a published one the arguments say it. Layouts:

    - ``ance``: ``<s> q </s> d1 </s> ... dk </s>`` in lower case, position 0, ANCE's linear layer
      and LayerNorm.
    - ``cls``: ``[CLS] q [SEP] d1 [SEP] ... dk [SEP]``, position 0; ``mean``: the same, mean of all
      positions; ``mean-l2``: that at length 1.
    - ``tct``: ``[CLS] [Q] q [SEP] d1 [SEP] ... dk``, [MASK] up to ``max_length``, the mean from
      position 4.

    ``query_vec`` is (d,) float32, not normalised by us. A query without documents keeps its
    ``query_vec`` (every query does with ``fb_docs=0``); where the frame has none, or
    ``query_alone`` is set, the model encodes the query alone. Queries whose input was cut are named
    once. A published model is trained for one k; others run, but are not what was published.

    Source: Yu, Xiong, Callan, Improving Query Representations for Dense Retrieval with Pseudo
    Relevance Feedback, CIKM 2021, arXiv 2108.13454, section 3; Li et al., ECIR 2022, arXiv
    2112.06400, for TCT-ColBERT and DistilBERT; Zhu et al., LoL, SIGIR 2022, arXiv 2204.11545, for
    models of every k. The ``mean`` layouts are ours.

    Args:
        model: Local folder or hub id; weights are read from safetensors.
        fb_docs: Feedback depth.
        layout: ``ance``, ``tct``, ``cls``, ``mean`` or ``mean-l2``; the model's own by default,
            ``ance`` for one that does not say.
        truncation: ``official`` cuts the query at ``query_length`` and each passage at
            ``passage_length``, and of too long an input keeps the first ids and the final
            separator; ``lol`` the same, but the last passage ends early, so that what is left fits
            whole (BERT then has the second token type for passages); ``pyserini`` cuts off the end
            only. The model's own by default, as the lengths are, or ``official``.
        max_length: Tokens read in all, special ones included; 512 for a model that does not say.
        query_length: Tokens of the query, special ones included; 64 likewise.
        passage_length: Tokens of each passage with two special ones; 0 for ``max_length``.
        pool: Of the ``mean`` layouts, whether the mean is over ``all`` tokens or those of the
            ``query``; the model's own, or ``all``.
        batch_size: Queries per forward pass; changes vectors by at most 1e-5.
        device: ``cpu``, ``cuda``, ...
        precision: ``float32``, ``autocast`` or ``bfloat16`` (see `QueryEncoder`).
        query_alone: Encode queries without documents too, instead of keeping their vectors.
    """

    model: str
    fb_docs: Depth = 3
    layout: Layout | None = None
    truncation: Truncation | None = None
    max_length: Count | None = None
    query_length: Count | None = None
    passage_length: Depth | None = None
    pool: Pool | None = None
    batch_size: Count = 32
    device: str = "cpu"
    precision: Precision = "float32"
    query_alone: bool = False

    gives: ClassVar[tuple[str, ...]] = ("query_vec",)
    kind = "encoder"

    def kept(self, queries: pd.DataFrame) -> ObjectArray:
        return objects(stack(queries["query_vec"], repr(self), queries["qid"]))

    def check_kept(self, old: FloatArray, new: FloatArray) -> None:
        if len(old) != len(new):
            raise FrameError(
                f"{self!r}: query_vec has {len(old)} numbers, '{self.model}' gives {len(new)}, and "
                "queries without feedback keep theirs; use the encoder that the model was trained "
                "for, or drop the column first"
            )

    def encoded(self, queries: pd.DataFrame, passages: Sequence[Sequence[str]]) -> ObjectArray:
        trained = self.trained()
        own = trained.get("layout")
        if own is not None and self.layout not in (None, own):
            raise SpecError(
                f"{self!r}: the model was trained with layout {own!r}; leave layout out"
            )
        layout = own or self.layout or "ance"
        encoder = cast(  # what every layout but sentence-transformers' opens
            LayoutEncoder,
            load_encoder(self.model, self.device, layout=layout, precision=self.precision),
        )
        pool = self.pool or trained.get("pool", "all")
        if pool == "query" and not encoder.layout.startswith("mean"):
            raise SpecError(f"{self!r}: pool 'query' is of the mean layouts only")
        packing = self.packing(trained)
        ids = self.packed(encoder.reader, packing, queries, passages)
        new = encoder.encode_ids(
            ids,
            self.batch_size,
            two_parts=packing.truncation == "lol",
            pool=pool,
        )
        wrong = np.flatnonzero(~np.isfinite(new).all(axis=1))
        if wrong.size:
            qid = queries["qid"].iloc[wrong[0]]
            raise FrameError(f"{self!r}: vector of qid {qid!r} is not finite")
        return objects(new)


@dataclass(frozen=True, repr=False)
class SparseEncoderPrf(PassageEncoder):
    """LoL's sparse form: a masked language model reads query and passages and weighs terms.

    Needs: qid, query, docno, score, text
    Gives: qid, query, query_toks

    The model replaces the query encoder of a learned sparse retriever; documents stay in its impact
    index. The weight of a term is its largest logit over the tokens, ReLU, with ``log1p`` the
    logarithm of that plus 1; ``query_toks`` holds whole numbers as float, above 0, quantised as
    `Splade` does (training also brings weights to length 1, which changes no ranking). A query
    without documents keeps its ``query_toks`` (every query does with ``fb_docs=0``); where the
    frame has none, or ``query_alone`` is set, the model reads the query alone. Queries whose input
    was cut are named once.

    Source: Zhu et al., LoL, SIGIR 2022, arXiv 2204.11545, the sparse reformulator ``dqrsm``;
    quantisation is ours.

    Args:
        model: Folder that `prf train` made, or a masked language model (folder or hub id).
        fb_docs: Feedback depth.
        activation: ``relu`` or ``log1p``; the model's own by default, or ``relu``.
        skip: Terms with a smaller id get no weight, but for [UNK]; the model's own, or 999.
        truncation: As for `EncoderPrf`; the model's own, or ``lol``.
        max_length: Tokens read in all, special ones included; the model's own, or 512.
        query_length: Tokens of the query, special ones included; the model's own, or 130.
        passage_length: Tokens of each passage with two special ones; the model's own, or 130.
        max_terms: Keeps the heaviest terms of each query; 0 keeps all.
        batch_size: Queries per forward pass; changes weights before quantisation by at most 1e-5.
        device: ``cpu``, ``cuda``, ...
        weight_range: The weight that becomes ``2**bits``.
        bits: 8 gives 256 levels.
        query_alone: Read queries without documents too, instead of keeping their terms.
    """

    model: str
    fb_docs: Depth = 5
    activation: Activation | None = None
    skip: Depth | None = None
    truncation: Truncation | None = None
    max_length: Count | None = None
    query_length: Count | None = None
    passage_length: Depth | None = None
    max_terms: Depth = 0
    batch_size: Count = 32
    device: str = "cpu"
    weight_range: float = 5.0
    bits: Count = 8
    query_alone: bool = False

    gives: ClassVar[tuple[str, ...]] = ("query_toks",)
    kind = "sparse_encoder"

    def check(self) -> None:
        super().check()
        _ = self._quantisation  # refuses bad values

    @property
    def _quantisation(self) -> Quantisation:
        return Quantisation(self.weight_range, self.bits)

    def encoded(self, queries: pd.DataFrame, passages: Sequence[Sequence[str]]) -> ObjectArray:
        trained = {
            **Packing("lol", 512, 130, 130)._asdict(),
            "activation": "relu",
            "skip": 999,
            **self.trained(),
        }
        packing = self.packing(trained)
        model = load_revised(
            self.model,
            self.device,
            self.activation or trained["activation"],
            trained["skip"] if self.skip is None else self.skip,
            packing.truncation == "lol",
        )
        ids = self.packed(model.reader, packing, queries, passages)
        weights = model.encode_ids(
            ids, "query", max_terms=self.max_terms, batch_size=self.batch_size
        )
        terms = model.terms(weights, self._quantisation)
        return objects({term: float(weight) for term, weight in own.items()} for own in terms)

"""Stages of learned sparse retrieval: text to ``query_toks`` by uniCOIL, SPLADE, or a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pandas as pd

from prf.errors import FileFormatError, FrameError
from prf.frames import column, objects
from prf.pipeline import Count, Depth, QueryTransformer, Resource, notice
from prf.sparse_models import (
    Kind,
    Quantisation,
    Rounding,
    SparseModel,
    load_splade,
    load_unicoil,
)
from prf.vectors_io import read_encoded_queries


class _TermEncoder(QueryTransformer, abstract=True):
    """Base of stages that encode queries to ``query_toks``."""

    model: str
    batch_size: Count
    device: str
    max_length: Count

    needs = ("qid", "query")
    gives = ("query_toks",)
    kind: ClassVar[Kind]
    max_terms = 0

    def resources(self) -> list[Resource]:
        local = self.model if os.path.isdir(self.model) else None
        return [Resource(f"{self.kind} model", self.model, local)]

    def load(self) -> SparseModel:
        """Returns the model."""
        raise NotImplementedError

    @property
    def quantisation(self) -> Quantisation:
        """How weights become whole numbers."""
        raise NotImplementedError

    def check(self) -> None:
        _ = self.quantisation  # refuses bad values

    def run_queries(self, queries: pd.DataFrame) -> pd.DataFrame:
        if len(queries) == 0:
            return queries.assign(query_toks=column(np.empty(0, dtype=object)))
        qids = queries["qid"].to_numpy(dtype=object)
        texts = list(queries["query"])
        bad = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
        if bad is not None:
            raise FrameError(f"{self!r}: query of qid {qids[bad]!r} is {texts[bad]!r}, not text")
        model = self.load()
        weights = model.encode(
            texts,
            "query",
            max_length=self.max_length,
            max_terms=self.max_terms,
            batch_size=self.batch_size,
            truncated=lambda rows: notice(
                f"are longer than {self.max_length} tokens of '{self.model}' and were cut",
                list(qids[rows]),
            ),
        )
        toks = model.terms(weights, self.quantisation)
        real = ({term: float(weight) for term, weight in terms.items()} for terms in toks)
        return queries.assign(query_toks=column(objects(real)))


@dataclass(frozen=True, repr=False)
class UniCoil(_TermEncoder):
    """Adds the query's word pieces with uniCOIL's weights.

    Needs: qid, query
    Gives: qid, query, query_toks

    ``query_toks`` holds whole numbers as float, above 0: a piece's weights summed over its
    occurrences and quantised; a weight that becomes 0 is left out. ``[SEP]`` is among them with
    its weight, as Pyserini has it, and may be all that is left of a query. A query without any
    word piece (empty, white space) has no terms. Longer queries are cut and named once. May also
    follow a retriever: then it encodes the queries behind the results.

    Source: Lin and Ma, A Few Brief Notes on DeepImpact, COIL, and a Conceptual Framework for
    Information Retrieval Techniques, arXiv 2106.14807; quantised as in Pyserini.

    Args:
        model: Local folder or hub id of a uniCOIL model (see `load_unicoil`).
        batch_size: Texts per forward pass; changes weights before quantisation by at most 1e-5.
        device: ``cpu``, ``cuda``, ...
        max_length: Tokens, [CLS] and [SEP] included, at which a query is cut.
        weight_range: The weight that becomes ``2**bits``.
        bits: 8 gives 256 levels.
        rounding: ``round`` (Pyserini) or ``ceil`` (uniCOIL's training repository).
    """

    model: str
    batch_size: Count = 32
    device: str = "cpu"
    max_length: Count = 128
    weight_range: float = 5.0
    bits: Count = 8
    rounding: Rounding = "round"

    kind = "unicoil"

    def load(self) -> SparseModel:
        return load_unicoil(self.model, self.device)

    @property
    def quantisation(self) -> Quantisation:
        return Quantisation(self.weight_range, self.bits, 0.0, self.rounding)


@dataclass(frozen=True, repr=False)
class Splade(_TermEncoder):
    """Adds SPLADE's weighted terms of the query, its own and others.

    Needs: qid, query
    Gives: qid, query, query_toks

    ``query_toks`` holds whole numbers as float, above 0; a weight that becomes 0 is left out. A
    query without any word piece (empty, white space) has no terms. Longer queries are cut and named
    once. May also follow a retriever: then it encodes the queries behind the results.

    Source: Formal et al., From Distillation to Hard Negative Sampling: Making Sparse Neural IR
    Models More Effective, SIGIR 2022, arXiv 2205.04733; quantised as in Pyserini.

    Args:
        model: Local folder or hub id of a SPLADE model.
        max_terms: Keeps the heaviest terms of each query; 0 keeps all.
        batch_size: Texts per forward pass; changes weights before quantisation by at most 1e-5.
        device: ``cpu``, ``cuda``, ...
        max_length: Tokens, [CLS] and [SEP] included, at which a query is cut.
        weight_range: The weight that becomes ``2**bits``.
        bits: 8 gives 256 levels.
        scale: Multiplies the weights instead, such as 100; 0 for range and bits.
    """

    model: str
    max_terms: Depth = 0
    batch_size: Count = 32
    device: str = "cpu"
    max_length: Count = 256
    weight_range: float = 5.0
    bits: Count = 8
    scale: float = 0.0

    kind = "splade"

    def load(self) -> SparseModel:
        return load_splade(self.model, self.device)

    @property
    def quantisation(self) -> Quantisation:
        return Quantisation(self.weight_range, self.bits, self.scale)


@dataclass(frozen=True, repr=False)
class EncodedQueries(QueryTransformer):
    """Adds weighted terms of queries that were encoded elsewhere, by qid.

    Needs: qid
    Gives: qid, query_toks

    A term's weight is how often it stands in the file. A query whose qid is not in the file is an
    error that names it.

    Args:
        path: Anserini's form, ``qid<TAB>term term term``, such as ``topics.….tsv.gz``.
    """

    path: str

    needs = ("qid",)
    gives = ("query_toks",)

    def resources(self) -> list[Resource]:
        return [Resource("encoded queries", self.path, self.path)]

    def run_queries(self, queries: pd.DataFrame) -> pd.DataFrame:
        stamp = os.stat(self.path).st_mtime_ns if os.path.exists(self.path) else 0
        known = _encoded(self.path, stamp)
        missing = next((qid for qid in queries["qid"] if qid not in known), None)
        if missing is not None:
            raise FileFormatError(
                f"{self!r}: '{self.path}' holds no qid {missing!r}; encode it first"
            )
        toks = (
            {term: float(weight) for term, weight in known[qid].items()} for qid in queries["qid"]
        )
        return queries.assign(query_toks=column(objects(toks)))


@lru_cache(maxsize=4)
def _encoded(path: str, stamp: int) -> dict[str, dict[str, int]]:
    return dict(read_encoded_queries(path))

"""prf: pseudo-relevance feedback for sparse, dense and LLM retrieval, as composable pipelines.

Names are imported when first used, so that ``import prf`` and the command line start at once and
nothing loads torch, FAISS or Java before a stage needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from prf.batch import search
    from prf.build import build_dense, build_impact, build_lucene, build_vectors
    from prf.comparison import compare
    from prf.demo import collection
    from prf.encode import QueryEncoder, QueryVectors, load_encoder
    from prf.errors import (
        EvaluationError,
        FileFormatError,
        FrameError,
        IndexStateError,
        MissingDependency,
        PrfError,
        PrfWarning,
        SpecError,
    )
    from prf.evaluation import evaluate
    from prf.exchange import export_pyserini
    from prf.faiss_index import build_faiss
    from prf.feedback import (
        KL,
        RM3,
        TPRF,
        AveragePrf,
        BM25Prf,
        Bo1,
        ConcatenateText,
        Docs,
        EncoderPrf,
        Feedback,
        Query,
        Rocchio,
        RocchioTerms,
        SparseAverage,
        SparseEncoderPrf,
        SparseRocchio,
        TermFeedback,
        Terms,
        TerrierRM3,
        TextFeedback,
        TextFeedbackReranker,
        VectorFeedback,
    )
    from prf.frames import original_query
    from prf.fuse import BordaFusion, CombMnz, CombSum, Interpolate, ReciprocalRankFusion
    from prf.pipeline import (
        Compose,
        Concatenate,
        Cutoff,
        Features,
        Intersection,
        Scale,
        Sum,
        Transformer,
        Union,
    )
    from prf.prebuilt import download
    from prf.prp import PRP, ChatServer, Judge, LocalModel
    from prf.rerank import CrossEncoder, DenseRescorer, MonoT5
    from prf.retrieve import BM25, DenseRetriever, Impact, RunFile, Text, Vectors
    from prf.sparse import EncodedQueries, Splade, UniCoil
    from prf.sparse_build import build_sparse
    from prf.spec import dumps, explain, load, loads
    from prf.tables import render
    from prf.training import train
    from prf.training_config import read_config
    from prf.trec import read_docs, read_qrels, read_run, read_topics, write_run

_HOME = {
    "build": ["build_dense", "build_impact", "build_lucene", "build_vectors"],
    "comparison": ["compare"],
    "demo": ["collection"],
    "encode": ["QueryEncoder", "QueryVectors", "load_encoder"],
    "errors": [
        "EvaluationError",
        "FileFormatError",
        "FrameError",
        "IndexStateError",
        "MissingDependency",
        "PrfError",
        "PrfWarning",
        "SpecError",
    ],
    "evaluation": ["evaluate"],
    "exchange": ["export_pyserini"],
    "faiss_index": ["build_faiss"],
    "feedback": [
        "BM25Prf",
        "Bo1",
        "ConcatenateText",
        "KL",
        "RM3",
        "TPRF",
        "AveragePrf",
        "Docs",
        "EncoderPrf",
        "Feedback",
        "Query",
        "Rocchio",
        "RocchioTerms",
        "SparseAverage",
        "SparseEncoderPrf",
        "SparseRocchio",
        "TermFeedback",
        "Terms",
        "TerrierRM3",
        "TextFeedback",
        "TextFeedbackReranker",
        "VectorFeedback",
    ],
    "frames": ["original_query"],
    "fuse": ["BordaFusion", "CombMnz", "CombSum", "Interpolate", "ReciprocalRankFusion"],
    "pipeline": [
        "Compose",
        "Concatenate",
        "Cutoff",
        "Features",
        "Intersection",
        "Scale",
        "Sum",
        "Transformer",
        "Union",
    ],
    "prebuilt": ["download"],
    "prp": ["PRP", "ChatServer", "Judge", "LocalModel"],
    "rerank": ["CrossEncoder", "DenseRescorer", "MonoT5"],
    "retrieve": ["BM25", "DenseRetriever", "Impact", "RunFile", "Text", "Vectors"],
    "sparse": ["EncodedQueries", "Splade", "UniCoil"],
    "sparse_build": ["build_sparse"],
    "batch": ["search"],
    "spec": ["dumps", "explain", "load", "loads"],
    "tables": ["render"],
    "training": ["train"],
    "training_config": ["read_config"],
    "trec": ["read_docs", "read_qrels", "read_run", "read_topics", "write_run"],
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'prf' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"prf.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE})

"""What every stage owes, and an example of each.

A new stage needs one line in ``EXAMPLES``: its class name and how to make an instance and an input
frame of ``Material`` (see conftest.py). ``test_contract.py`` then runs every contract over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
import pytest
from conftest import LONG_DOC, Material
from weighted_average import WeightedAverage

from prf.encode import QueryEncoder, QueryVectors
from prf.feedback import (
    KL,
    RM3,
    TPRF,
    AveragePrf,
    BM25Prf,
    Bo1,
    ConcatenateText,
    EncoderPrf,
    Rocchio,
    RocchioTerms,
    SparseAverage,
    SparseEncoderPrf,
    SparseRocchio,
    TerrierRM3,
    TextFeedbackReranker,
)
from prf.frames import attach_queries, column, objects, ranked
from prf.fuse import BordaFusion, CombMnz, CombSum, Interpolate, ReciprocalRankFusion
from prf.pipeline import (
    REGISTRY,
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
from prf.prp import PRP, Judge
from prf.rerank import CrossEncoder, DenseRescorer, MonoT5
from prf.retrieve import BM25, DenseRetriever, Impact, RunFile, Text, Vectors
from prf.sparse import EncodedQueries, Splade, UniCoil

QIDS = ["NA", "007", "with space", "30_1", "ü漢", "1e3"]
TEXTS = ["cats and dogs", "fish oil", "nan", "information retrieval", "café", "hypertension"]
DEPTH = 8


@dataclass(frozen=True)
class Example:
    """A stage and a frame it takes; ``atol`` where a batch may change the last bits."""

    stage: Transformer
    frame: pd.DataFrame
    atol: float = 0.0


def query_frame(material: Material) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "qid": column(objects(QIDS)),
            "query": column(objects(TEXTS)),
            "query_vec": column(objects(material.vectors[: len(QIDS)])),
        }
    )


def result_frame(material: Material) -> pd.DataFrame:
    """Returns results with ties, in canonical order: DEPTH documents a query."""
    docnos = sorted(docno for docno, _ in material.docs)
    text, vec = (
        dict(material.docs),
        dict(zip((d for d, _ in material.docs), material.vectors, strict=True)),
    )
    chosen = [
        (qid, docnos[(3 * i + j) % len(docnos)], 9.0 - j // 3)
        for i, qid in enumerate(QIDS)
        for j in range(DEPTH)
    ]
    frame = pd.DataFrame(
        {
            "qid": column(objects(qid for qid, _, _ in chosen)),
            "docno": column(objects(docno for _, docno, _ in chosen)),
            "score": np.array([score for _, _, score in chosen]),
            "text": column(objects(text[docno] for _, docno, _ in chosen)),
            "doc_vec": column(objects(vec[docno] for _, docno, _ in chosen)),
        }
    )
    return ranked(attach_queries(query_frame(material), frame))


def _query_encoder(m: Material) -> Example:
    return Example(QueryEncoder("minilm"), query_frame(m)[["qid", "query"]], 1e-5)


def _query_vectors(m: Material) -> Example:
    np.save(m.folder / "odd.npy", m.vectors[: len(QIDS)])
    (m.folder / "odd.txt").write_text("\n".join(QIDS), encoding="utf-8")
    stage = QueryVectors(m.folder / "odd.npy", m.folder / "odd.txt")
    return Example(stage, query_frame(m)[["qid", "query"]])


def _texts(m: Material) -> pd.DataFrame:
    return query_frame(m)[["qid", "query"]]


def _weighted(m: Material) -> pd.DataFrame:
    words = [text.split()[0] for name, text in m.docs if text.strip()]
    toks = [{word: 2.0} for word in words[: len(TEXTS)]]
    return _texts(m).assign(query_toks=column(objects(toks)))


SIDES = (Scale(-2.0), Cutoff(5))


def _texts_found(m: Material) -> pd.DataFrame:
    frame = result_frame(m).drop(columns=["query_vec", "doc_vec"])
    return ranked(frame[frame["docno"] != LONG_DOC[0]])  # its queries would be named as cut


def _text_feedback(m: Material) -> Example:
    stage = TextFeedbackReranker(CrossEncoder(m.cross_encoder), fb_docs=2)
    return Example(stage, _texts_found(m), 1e-5)


def _in_run(m: Material) -> pd.DataFrame:
    """Returns the queries that a run can hold: a qid in it has no white space."""
    frame = _texts(m)
    return frame[frame["qid"] != "with space"].reset_index(drop=True)


def _bare(m: Material) -> pd.DataFrame:
    return result_frame(m).drop(columns=["text", "doc_vec"])


def _sparse(m: Material) -> pd.DataFrame:
    toks = dict(zip(QIDS, _weighted(m)["query_toks"], strict=True))
    frame = _bare(m)
    return frame.assign(query_toks=column(objects([toks[qid] for qid in frame["qid"]])))


def _short(m: Material) -> pd.DataFrame:
    """Returns results whose texts are short, so that nothing is cut."""
    frame = result_frame(m)
    return frame.assign(text=column(objects(text[:30] for text in frame["text"])))


EXAMPLES: dict[str, Callable[[Material], Example]] = {
    "AveragePrf": lambda m: Example(AveragePrf(2), result_frame(m)),
    "BM25": lambda m: Example(BM25(m.lucene, k=5, threads=1), query_frame(m)),
    "BM25Prf": lambda m: Example(BM25Prf(m.lucene, fb_docs=3, fb_terms=4), _bare(m)),
    "BordaFusion": lambda m: Example(BordaFusion(SIDES, (2.0, 0.5)), result_frame(m)),
    "Bo1": lambda m: Example(Bo1(m.lucene, fb_docs=3, fb_terms=4), _bare(m)),
    "CombMnz": lambda m: Example(CombMnz(SIDES, (2.0, 0.5)), result_frame(m)),
    "CombSum": lambda m: Example(CombSum(SIDES, (2.0, 0.5), "zscore"), result_frame(m)),
    "Compose": lambda m: Example(Compose((Scale(2.0), Cutoff(5))), result_frame(m)),
    "Concatenate": lambda m: Example(Concatenate((Cutoff(2), Scale(-1.0))), result_frame(m)),
    "ConcatenateText": lambda m: Example(ConcatenateText(2, 20), _texts_found(m)),
    "CrossEncoder": lambda m: Example(CrossEncoder(m.cross_encoder), _texts_found(m), 1e-5),
    "Cutoff": lambda m: Example(Cutoff(3), result_frame(m)),
    "DenseRescorer": lambda m: Example(DenseRescorer(m.dense), result_frame(m)),
    "DenseRetriever": lambda m: Example(DenseRetriever(m.dense, k=5), query_frame(m)),
    "EncodedQueries": lambda m: Example(EncodedQueries(m.encoded_queries), _texts(m)),
    "EncoderPrf": lambda m: Example(
        EncoderPrf(m.ance, fb_docs=2, max_length=64, query_length=16), _short(m), 1e-5
    ),
    "Features": lambda m: Example(Features((Scale(2.0), Cutoff(2))), result_frame(m)),
    "Impact": lambda m: Example(Impact(m.impact, k=5, threads=1), _weighted(m)),
    "Interpolate": lambda m: Example(Interpolate(SIDES, 0.3), result_frame(m)),
    "Intersection": lambda m: Example(Intersection((Scale(-2.0), Cutoff(5))), result_frame(m)),
    "KL": lambda m: Example(KL(m.lucene, fb_docs=3, fb_terms=4), _bare(m)),
    "MonoT5": lambda m: Example(MonoT5(m.monot5), _texts_found(m), 1e-5),
    "PRP": lambda m: Example(
        PRP(Judge("judges:more_letters"), k=3, rerank_docs=6, max_calls=40), _texts_found(m)
    ),
    "QueryEncoder": _query_encoder,
    "QueryVectors": _query_vectors,
    "RM3": lambda m: Example(RM3(m.lucene, fb_docs=3, fb_terms=4), _bare(m)),
    "ReciprocalRankFusion": lambda m: Example(ReciprocalRankFusion(SIDES, 5), result_frame(m)),
    "Rocchio": lambda m: Example(Rocchio(2, 0.4, 0.6, 0.1, 2), result_frame(m)),
    "RocchioTerms": lambda m: Example(RocchioTerms(m.lucene, fb_docs=3, gamma=0.15), _bare(m)),
    "RunFile": lambda m: Example(RunFile(m.run, k=4), _in_run(m)),
    "Scale": lambda m: Example(Scale(-0.5), result_frame(m)),
    "SparseAverage": lambda m: Example(SparseAverage(m.impact), _sparse(m)),
    "SparseEncoderPrf": lambda m: Example(
        SparseEncoderPrf(m.splade, fb_docs=2, skip=5, max_length=64, query_length=16), _short(m)
    ),
    "SparseRocchio": lambda m: Example(SparseRocchio(m.impact, 2, 0.8, 0.4, 0.1, 2), _sparse(m)),
    "Splade": lambda m: Example(Splade(m.splade), _texts(m)),
    "Sum": lambda m: Example(Sum((Scale(2.0), Cutoff(2))), result_frame(m)),
    "TPRF": lambda m: Example(TPRF(m.tprf, fb_docs=2), result_frame(m), 1e-5),
    "TerrierRM3": lambda m: Example(TerrierRM3(m.lucene, fb_docs=3, fb_terms=4), _bare(m)),
    "Text": lambda m: Example(Text(m.dense), _bare(m)),
    "TextFeedbackReranker": _text_feedback,
    "UniCoil": lambda m: Example(UniCoil(m.unicoil), _texts(m)),
    "Union": lambda m: Example(Union((Scale(-1.0), Cutoff(2))), result_frame(m)),
    "Vectors": lambda m: Example(Vectors(m.dense), _bare(m)),
    "WeightedAverage": lambda m: Example(WeightedAverage(2, 0.5), result_frame(m)),
}
MARKS: dict[str, pytest.MarkDecorator] = {
    "BM25": pytest.mark.java,
    "BM25Prf": pytest.mark.java,
    "Bo1": pytest.mark.java,
    "KL": pytest.mark.java,
    "RM3": pytest.mark.java,
    "TerrierRM3": pytest.mark.java,
    "RocchioTerms": pytest.mark.java,
    "EncoderPrf": pytest.mark.models,
    "CrossEncoder": pytest.mark.models,
    "MonoT5": pytest.mark.models,
    "QueryEncoder": pytest.mark.models,
    "TextFeedbackReranker": pytest.mark.models,
    "Impact": pytest.mark.java,
    "SparseAverage": pytest.mark.java,
    "SparseEncoderPrf": pytest.mark.models,
    "SparseRocchio": pytest.mark.java,
    "Splade": pytest.mark.models,
    "TPRF": pytest.mark.models,
    "UniCoil": pytest.mark.models,
}

NO_SOURCE = {
    "Compose": "an operator",
    "Concatenate": "an operator",
    "Cutoff": "an operator",
    "DenseRetriever": "exact inner products, no method",
    "EncodedQueries": "reads a file",
    "Features": "an operator",
    "Intersection": "an operator",
    "QueryEncoder": "runs the model it is given",
    "QueryVectors": "reads a file",
    "RunFile": "reads a file",
    "Scale": "an operator",
    "Sum": "an operator",
    "Text": "reads a source",
    "Union": "an operator",
    "Vectors": "reads an index",
}
"""Stages that implement no published method, and why."""

STAGES = {name: REGISTRY[name] for name in sorted(REGISTRY)}
"""What was registered when the tests were collected; other tests define stages of their own."""


@cache
def example(name: str, material: Material) -> Example:
    """Returns the example of a stage, or fails saying what to add."""
    if name not in EXAMPLES:
        pytest.fail(
            f"stage {name} has no example: "
            f'add "{name}": lambda m: Example({name}(...), result_frame(m)) to EXAMPLES in '
            "tests/contract.py, and a mark to MARKS if it needs Java or a model"
        )
    return EXAMPLES[name](material)

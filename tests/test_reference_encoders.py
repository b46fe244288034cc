"""Learned sparse encoders give what Pyserini's give, on real queries and passages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pandas as pd
import pytest
from conftest import queries, save_checkpoint
from reference import NFCORPUS, SHARED, needs_data, pyserini
from scipy.sparse import csr_matrix

from prf import Impact, Splade, UniCoil, evaluate, read_docs, read_qrels, read_topics
from prf.lucene_build import build_impact
from prf.sparse_models import PYSERINI, SparseModel, load_splade, load_unicoil

pytestmark = [pytest.mark.models, pytest.mark.slow, needs_data]

MODELS = SHARED.parent / "models"
ODD = [
    "",
    "   ",
    "FISH Oil",
    "fish " * 700,
    "fish 🐟 oil",
    "fish\x00\x07oil\u200b",
    "[PAD] fish [SEP]",
]


@pytest.fixture(scope="module")
def unicoil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of uniCOIL's architecture, random weights, BERT's vocabulary."""
    folder = tmp_path_factory.mktemp("models") / "unicoil"
    save_checkpoint(folder, "unicoil", MODELS / "splade-tiny", spread=0.1)
    return folder


@pytest.fixture(scope="module")
def topics() -> list[str]:
    return [*read_topics(NFCORPUS.topics)["query"][:200], *ODD]


@pytest.fixture(scope="module")
def passages() -> list[str]:
    return [text for (_, text), _ in zip(read_docs(NFCORPUS.docs), range(200), strict=False)] + ODD


def real(model: SparseModel, texts: list[str], **settings: Any) -> list[dict[str, float]]:
    weights = model.encode(texts, "document", **settings)
    names = model.vocabulary[weights.ids]
    return [
        dict(zip(names[a:b], weights.values[a:b].tolist(), strict=True))
        for a, b in zip(weights.ptr, weights.ptr[1:], strict=False)
    ]


def worth(weights: dict[str, float]) -> dict[str, float]:
    """Leaves out weights of 0, which Pyserini keeps and no search counts."""
    return {term: weight for term, weight in weights.items() if weight > 0}


def stage_terms(stage: UniCoil | Splade, texts: list[str]) -> list[dict[str, float]]:
    frame = queries(*((str(row), text) for row, text in enumerate(texts)))
    return list(stage(frame)["query_toks"])


@pytest.mark.filterwarnings("ignore:.*were cut:prf.errors.PrfWarning")
def test_unicoil_queries_are_pyserinis(unicoil: Path, topics: list[str]) -> None:
    expected, _ = pyserini().weights("UniCoilQueryEncoder", unicoil, topics)
    found = stage_terms(UniCoil(str(unicoil)), topics)
    # Pyserini encodes a query without text too, to [SEP]; ours has no terms then.
    for text, own, theirs in zip(topics, found, expected, strict=True):
        assert own == (worth(theirs) if text.strip() else {})


def test_unicoil_documents_are_pyserinis(unicoil: Path, passages: list[str]) -> None:
    expected, _ = pyserini().weights("UniCoilDocumentEncoder", unicoil, passages, 1)
    found = real(load_unicoil(str(unicoil)), passages, batch_size=1)
    for text, own, theirs in zip(passages, found, expected, strict=True):
        theirs = worth(theirs) if text.strip() else {}
        assert own.keys() == theirs.keys()
        np.testing.assert_allclose(
            [own[t] for t in theirs], list(theirs.values()), rtol=0, atol=1e-5
        )


def test_unicoil_documents_with_expansions_are_pyserinis(
    unicoil: Path, passages: list[str]
) -> None:
    texts, more = passages[:60], passages[60:120]
    expected, _ = pyserini().weights("UniCoilDocumentEncoder", unicoil, texts, 1, expands=more)
    found = real(load_unicoil(str(unicoil)), texts, expansions=more, batch_size=1)
    for own, theirs in zip(found, map(worth, expected), strict=True):
        assert own.keys() == theirs.keys()
        np.testing.assert_allclose(
            [own[t] for t in theirs], list(theirs.values()), rtol=0, atol=1e-5
        )


@pytest.mark.filterwarnings("ignore:.*were cut:prf.errors.PrfWarning")
def test_splade_queries_are_pyserinis(topics: list[str]) -> None:
    some = topics[:30] + ODD
    expected, _ = pyserini().weights("SpladeQueryEncoder", MODELS / "splade-tiny", some)
    found = stage_terms(Splade(str(MODELS / "splade-tiny")), some)
    for text, own, theirs in zip(some, found, expected, strict=True):
        assert own == (worth(theirs) if text.strip() else {})


def test_splade_documents_are_pyserinis(passages: list[str]) -> None:
    model, some = load_splade(str(MODELS / "splade-tiny")), passages[:20]
    expected, _ = pyserini().weights(
        "SpladeDocumentEncoder", MODELS / "splade-tiny", some, 4, max_length=128
    )
    weights = model.encode(some, "document", max_length=128)
    assert model.terms(weights, PYSERINI) == [worth(theirs) for theirs in expected]


@pytest.mark.java
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*were cut:prf.errors.PrfWarning")
def test_splade_figures_by_exact_product_and_by_impact_index(tmp_path: Path) -> None:
    """The README of the models gives .3056, .2575, .1491, with ties by docno descending."""
    path = str(MODELS / "splade-tiny")
    model, docs = load_splade(path), list(read_docs(NFCORPUS.docs))
    topics, qrels = read_topics(NFCORPUS.topics), read_qrels(NFCORPUS.qrels)
    sides = [
        model.encode([text for _, text in docs], "document", max_length=256),
        model.encode(list(topics["query"]), "query", max_length=256),
    ]
    d, q = (
        csr_matrix((w.values, w.ids, w.ptr), (len(w.ptr) - 1, len(model.vocabulary))) for w in sides
    )
    found = (q @ d.T).tocoo()
    names = np.array([docno for docno, _ in docs], dtype=object)
    exact = pd.DataFrame(
        {
            "qid": topics["qid"].to_numpy()[found.row],
            "docno": names[found.col],
            "score": found.data,
        }
    )
    measures = ["nDCG@10", "R(rel=1)@100", "AP(rel=1)@1000"]
    index = str(tmp_path / "index")
    vectors = zip(names, model.terms(sides[0], PYSERINI), (text for _, text in docs), strict=True)
    build_impact(index, vectors)
    results = (Splade(path, max_length=256) >> Impact(index))(topics)
    one = evaluate(exact, qrels, measures, topics=topics).mean
    other = evaluate(results, qrels, measures, topics=topics).mean
    np.testing.assert_allclose(one.to_numpy(), [0.3069, 0.2575, 0.1495], atol=5e-5)
    np.testing.assert_allclose(other.to_numpy(), one.to_numpy(), atol=5e-4)
    theirs = by_trec_eval(exact, qrels, measures)
    np.testing.assert_allclose(theirs, [0.3056, 0.2575, 0.1491], atol=5e-5)


def by_trec_eval(run: pd.DataFrame, qrels: pd.DataFrame, measures: list[str]) -> list[float]:
    """Returns the means with trec_eval's order of ties."""
    rows = run.rename(columns={"qid": "query_id", "docno": "doc_id"})
    rows = rows.sort_values(["query_id", "score"], ascending=[True, False], kind="stable")
    rows = rows.groupby("query_id").head(1000)
    truth = qrels.rename(columns={"qid": "query_id", "docno": "doc_id", "label": "relevance"})
    parsed = [ir_measures.parse_measure(name) for name in measures]
    found = ir_measures.calc_aggregate(parsed, truth, rows)
    return [found[measure] for measure in parsed]

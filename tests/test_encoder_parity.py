"""Encoders and ANCE-PRF give Pyserini's vectors, for checkpoints of the same architectures.

Golden values are Pyserini's, asked in a process of its own; the checkpoints are tiny and random,
the texts real ones of NFCorpus and some that go wrong easily.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference
import tiny_models
from reference import NFCORPUS

import prf
from prf import load_encoder
from prf.encoders import LayoutEncoder

pytestmark = [reference.needs_data, pytest.mark.models, pytest.mark.slow]

ODD = [
    "",
    " ",
    "WHAT Is THE Capital OF France",
    "fish oil " * 400,
    "naïve café 漢字 हिन्दी عربى",
    "🐟🐕 and 👩‍👩‍👧 families",
    "tab\tnew\nline\x00bell\x07zero\u200bwidth\ufeff",
    "literal [SEP] and [MASK] and </s> and <mask>",
    "[",
    "e\u0301 combining",
]


@pytest.fixture(scope="module")
def documents() -> list[str]:
    texts = [text for _, text in prf.read_docs(NFCORPUS.docs)]
    return [*texts[::18][:200], *ODD]


@pytest.fixture(scope="module")
def queries() -> list[str]:
    return [*prf.read_topics(NFCORPUS.topics)["query"].tolist()[:200], *ODD]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    tiny_models.save_ance(folder / "ance", documents)
    tiny_models.save_bert(folder / "tct", documents)
    tiny_models.save_distilbert(folder / "distilbert", documents)
    return folder


def assert_equal(ours: np.ndarray, theirs: np.ndarray, texts: list[str]) -> None:
    assert ours.shape == theirs.shape
    assert len(np.unique(theirs.round(3), axis=0)) > 0.9 * len(set(texts))  # they do differ
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["query", "document"])
def test_ance_vectors_are_those_of_pyserini_given_lower_case(
    side: str, folder: Path, queries: list[str], documents: list[str]
) -> None:
    """Pyserini sets a lower-casing flag that its tokenizer does not heed; we lower the text."""
    texts = queries if side == "query" else documents
    name = "AnceQueryEncoder" if side == "query" else "AnceDocumentEncoder"
    ours = load_encoder(str(folder / "ance"), layout="ance").encode(texts, side)
    lower = [text.lower() for text in texts]
    theirs = reference.pyserini().encode(name, str(folder / "ance"), lower)
    assert_equal(ours, theirs, texts)


def test_pyserini_leaves_upper_case_to_ance(folder: Path) -> None:
    """The difference that is meant: here both spellings give one vector, there two."""
    texts = ["WHAT Is THE Capital", "what is the capital"]
    theirs = reference.pyserini().encode("AnceQueryEncoder", str(folder / "ance"), texts)
    ours = load_encoder(str(folder / "ance"), layout="ance").encode(texts, "query")
    assert np.abs(theirs[0] - theirs[1]).max() > 0.1
    np.testing.assert_allclose(ours, theirs[[1, 1]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["query", "document"])
def test_tct_colbert_vectors_are_those_of_pyserini(
    side: str, folder: Path, queries: list[str], documents: list[str]
) -> None:
    texts = queries if side == "query" else documents
    name = "TctColBertQueryEncoder" if side == "query" else "TctColBertDocumentEncoder"
    ours = load_encoder(str(folder / "tct"), layout="tct").encode(texts, side)
    assert_equal(ours, reference.pyserini().encode(name, str(folder / "tct"), texts), texts)


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ("cls", {}),
        ("mean", {"pooling": "mean"}),
        ("mean-l2", {"pooling": "mean", "l2_norm": True}),
    ],
    ids=["TAS-B", "mean", "SBERT"],
)
def test_plain_vectors_are_those_of_pyserini(
    side: str,
    layout: str,
    arguments: dict[str, object],
    folder: Path,
    queries: list[str],
    documents: list[str],
) -> None:
    texts = queries if side == "query" else documents
    name = "AutoQueryEncoder" if side == "query" else "AutoDocumentEncoder"
    ours = load_encoder(str(folder / "distilbert"), layout=layout).encode(texts, side)
    theirs = reference.pyserini().encode(name, str(folder / "distilbert"), texts, **arguments)
    assert_equal(ours, theirs, texts)


def feedback_of(documents: list[str], n: int) -> list[list[str]]:
    """Returns n lists of 0 to 4 passages, some of which together are far over 512 tokens."""
    return [documents[3 * i : 3 * i + i % 5] for i in range(n)]


def test_ance_prf_vectors_are_those_of_pyserini(
    folder: Path, queries: list[str], documents: list[str]
) -> None:
    queries = queries[-60:]  # the odd ones among them
    passages = feedback_of(documents, len(queries))
    encoder = load_encoder(str(folder / "ance"), layout="ance")
    assert isinstance(encoder, LayoutEncoder)
    ids, cut = encoder.reader.feedback(queries, passages, truncation="pyserini")
    assert 10 < len(cut) < len(queries)
    theirs = reference.pyserini().ance_prf(
        str(folder / "ance"),
        [query.lower() for query in queries],
        [[text.lower() for text in texts] for texts in passages],
    )
    assert_equal(encoder.encode_ids(ids), theirs, queries)

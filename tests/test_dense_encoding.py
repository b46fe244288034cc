"""What this project encodes itself gives the published figures and the shared vectors.

The whole collection takes minutes and is left to `make test-all`; a sample is always encoded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference
from reference import NFCORPUS
from test_reference_dense import figures, pipeline, rows

import prf
from prf import QueryEncoder
from prf.index import open_index

pytestmark = [reference.needs_data, pytest.mark.models, pytest.mark.slow]


@pytest.fixture(scope="module")
def own_index(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the index of NFCorpus as this project encodes it; some minutes."""
    path = tmp_path_factory.mktemp("own") / "nfcorpus"
    with pytest.warns(prf.PrfWarning, match="longer than the"):
        prf.build_dense(path, NFCORPUS.docs, "minilm")
    return str(path)


@pytest.mark.long
def test_own_encoding(own_index: str, tmp_path: Path) -> None:
    frame = prf.read_topics(NFCORPUS.topics)
    expected = {ranking: values for topics, ranking, values in rows() if topics == NFCORPUS}
    for ranking in ("MiniLM", "Average k=3", "Rocchio k=3, .4/.6"):
        results = pipeline(QueryEncoder("minilm"), own_index, ranking)(frame)
        found = figures(results, NFCORPUS, tmp_path)
        assert found == pytest.approx(expected[ranking], abs=5e-4), ranking


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    theirs = theirs.astype(np.float32)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return (ours * theirs).sum(axis=1) / lengths


@pytest.mark.long
def test_own_vectors_agree_with_the_shared_ones(own_index: str) -> None:
    vectors, ids = NFCORPUS.encoded("docs")
    names = ids.read_text("utf-8").split()
    assert len(names) == 3633
    assert cosines(open_index(own_index).get(names), np.load(vectors)).min() > 0.999

    vectors, ids = NFCORPUS.encoded("queries")
    names = ids.read_text("utf-8").split()
    frame = QueryEncoder("minilm")(prf.read_topics(NFCORPUS.topics)).set_index("qid")
    ours = np.stack(frame["query_vec"].loc[names].tolist())
    assert cosines(ours, np.load(vectors)).min() > 0.999


def test_sample_of_documents_and_all_queries_agree_with_the_shared_vectors() -> None:
    """Their figures are those of the shared vectors, which test_reference_dense.py measures."""
    vectors, ids = NFCORPUS.encoded("docs")
    names = ids.read_text("utf-8").split()
    texts = dict(prf.read_docs(NFCORPUS.docs))
    rows = np.arange(0, len(names), 100)
    ours = prf.load_encoder("minilm").encode([texts[names[row]] for row in rows], "document")
    assert cosines(ours, np.load(vectors)[rows]).min() > 0.9999

    vectors, ids = NFCORPUS.encoded("queries")
    names = ids.read_text("utf-8").split()
    frame = QueryEncoder("minilm")(prf.read_topics(NFCORPUS.topics)).set_index("qid")
    ours = np.stack(frame["query_vec"].loc[names].tolist())
    assert cosines(ours, np.load(vectors)).min() > 0.9999

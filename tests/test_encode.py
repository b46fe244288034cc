"""Encoders: lengths, batches, cut texts, missing models; and vectors encoded elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, Material, queries

from prf import (
    FileFormatError,
    FrameError,
    IndexStateError,
    QueryEncoder,
    QueryVectors,
    load_encoder,
)
from prf.encode import Encoder
from prf.vectors_io import read_npy

# Vectors encoded elsewhere


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    np.save(tmp_path / "v.npy", np.arange(6, dtype=np.float16).reshape(3, 2))
    (tmp_path / "i.txt").write_text("NA\n007\na b\n", encoding="utf-8")
    return tmp_path / "v.npy", tmp_path / "i.txt"


def test_vectors_are_found_by_qid(files: tuple[Path, Path]) -> None:
    """D2: in any order, whatever the qid looks like."""
    out = QueryVectors(*files)(queries(("a b", "x"), ("NA", "y")))
    assert [vec.tolist() for vec in out["query_vec"]] == [[4.0, 5.0], [0.0, 1.0]]


def test_vectors_are_single_precision(files: tuple[Path, Path]) -> None:
    out = QueryVectors(*files)(queries(("NA", "y")))
    assert out["query_vec"].iat[0].dtype == np.float32


def test_changed_file_is_read_again(files: tuple[Path, Path]) -> None:
    stage, frame = QueryVectors(*files), queries(("NA", "y"))
    stage(frame)
    np.save(files[0], np.ones((3, 2), dtype=np.float32))
    assert stage(frame)["query_vec"].iat[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("NA\n007\n", "has 3 rows but .* 2 lines; they belong together"),
        ("NA\n007\nNA\n", "id 'NA' stands twice"),
    ],
)
def test_ids_that_do_not_fit_are_refused(ids: str, message: str, files: tuple[Path, Path]) -> None:
    """X3."""
    files[1].write_text(ids, encoding="utf-8")
    with pytest.raises(FileFormatError, match=message):
        QueryVectors(*files)(queries(("NA", "y")))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3, dtype=np.float32), r"shape \(3,\); expected"),
        (np.zeros((3, 2), dtype=np.int64), r"type int64"),
        (np.array([{}, {}]), "not an .npy file of numbers"),
    ],
)
def test_array_of_another_kind_is_refused(array: Any, message: str, tmp_path: Path) -> None:
    """A3: and no pickle is opened."""
    np.save(tmp_path / "v.npy", array)
    with pytest.raises(FileFormatError, match=message):
        read_npy(tmp_path / "v.npy")


def test_missing_vectors_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="it does not exist"):
        read_npy(tmp_path / "none.npy")


def test_file_that_is_no_array_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "v.npy").write_bytes(b"text")
    with pytest.raises(FileFormatError, match=r"not an \.npy file"):
        read_npy(tmp_path / "v.npy")


@pytest.mark.parametrize("kind", [str, Path])
def test_vectors_take_text_and_path(kind: type, files: tuple[Path, Path]) -> None:
    """X11."""
    assert read_npy(kind(files[0])).shape == (3, 2)


# A real model


@pytest.fixture(scope="module")
def minilm() -> Encoder:
    return load_encoder("minilm")


MIXED = ["", "cats", "cats and dogs " * 20, "fish oil", "भारत", "nan", "🐟", "x " * 600]


@pytest.mark.models
@pytest.mark.parametrize("side", ["query", "document"])
def test_no_texts_give_no_vectors_of_the_right_width(minilm: Encoder, side: Any) -> None:
    """B3."""
    assert minilm.encode([], side).shape == (0, 384)


@pytest.mark.models
def test_vectors_agree_for_any_batch_size(minilm: Encoder) -> None:
    """P1, B7: sorted by length inside, given back in the order of the texts."""
    alone = np.concatenate([minilm.encode([text], "query") for text in MIXED])
    for batch_size in (3, 100):
        together = minilm.encode(MIXED, "query", batch_size=batch_size)
        np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)


@pytest.mark.models
def test_same_batch_gives_the_same_bits(minilm: Encoder) -> None:
    """P1."""
    assert np.array_equal(minilm.encode(MIXED, "query"), minilm.encode(MIXED, "query"))


@pytest.mark.models
def test_cut_texts_are_counted(minilm: Encoder) -> None:
    """L1."""
    cut: list[int] = []
    minilm.encode(MIXED, "document", truncated=lambda rows: cut.extend(rows.tolist()))
    assert cut == [len(MIXED) - 1]


@pytest.mark.models
def test_cut_queries_are_named_once() -> None:
    """L1."""
    frame = queries(("short", "cats"), ("long", "x " * 600))
    with pytest.warns(UserWarning, match=r"longer than the .* and were cut: 1 \(long\)"):
        QueryEncoder("minilm")(frame)


@pytest.mark.models
def test_vectors_of_this_model_have_length_one(minilm: Encoder) -> None:
    """V7."""
    norms = np.linalg.norm(minilm.encode(MIXED, "query"), axis=1)
    np.testing.assert_allclose(norms, 1.0, atol=1e-6)


@pytest.mark.models
@pytest.mark.filterwarnings("ignore:.*were cut:prf.PrfWarning")
def test_nasty_topics_are_encoded(material: Material) -> None:
    """Q2, Q3, Q4: an empty query gets the vector of the empty text."""
    with pytest.warns(UserWarning, match="queries that are empty"):
        out = QueryEncoder("minilm")(material.topics)
    assert np.isfinite(np.stack(out["query_vec"].tolist())).all()
    assert out["query"].tolist() == material.topics["query"].tolist()


@pytest.mark.models
def test_query_that_is_no_text_is_named() -> None:
    """A2, A3."""
    with pytest.raises(FrameError, match="query of qid 'b' is nan, not text"):
        QueryEncoder("minilm")(queries(("a", "x"), ("b", float("nan"))))


@pytest.mark.models
def test_missing_model_fails_at_once_naming_model_cache_and_variable() -> None:
    """I7."""
    with pytest.raises(
        IndexStateError, match=r"encoder 'no/such-model'.*the cache.*HF_HUB_OFFLINE"
    ):
        load_encoder("no/such-model")


@pytest.mark.models
def test_loading_a_model_prints_nothing() -> None:
    """B2: nothing on stdout, no bar on stderr."""
    code = "from prf import load_encoder; load_encoder('minilm').encode(['x'], 'query')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_query_encoder_of_an_empty_frame_loads_nothing() -> None:
    """Q6."""
    frame = queries()
    out = QueryEncoder("no/such-model")(frame)
    assert list(out.columns) == ["qid", "query", "query_vec"]
    assert isinstance(out, pd.DataFrame)

"""Material every test may use: shared collections, and small real indexes of nasty documents."""

from __future__ import annotations

import os
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach a model hub
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "data"))  # a user's own module is there

from prf import build_lucene, build_vectors, read_docs, read_topics
from prf.frames import column, objects

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).parent / "data"
SHARED = Path(os.environ.get("PRF_SHARED", ROOT.parent / "shared"))

# The same examples on every machine and run; a busy machine is no failure.
settings.register_profile(
    "prf",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("prf")

LONG_DOC = ("long", "words " * 5000)
LONG_TOPIC = ("long", "fish " * 600)


class Material:
    """Nasty documents and topics, and indexes of them, each built when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def docs(self) -> list[tuple[str, str]]:
        return [*read_docs(DATA / "docs.jsonl"), LONG_DOC]

    @cached_property
    def vectors(self) -> np.ndarray[Any, Any]:
        table = np.load(DATA / "vectors.npy")
        return np.concatenate([table, table[:1]])

    @cached_property
    def topics(self) -> pd.DataFrame:
        return read_topics(DATA / "topics.tsv")

    @cached_property
    def query_vectors(self) -> tuple[str, str]:
        """Files of one vector per topic: a document's, so that ties and exact hits occur."""
        np.save(self.folder / "queries.npy", self.vectors[: len(self.topics)])
        (self.folder / "queries.txt").write_text("\n".join(self.topics["qid"]), encoding="utf-8")
        return str(self.folder / "queries.npy"), str(self.folder / "queries.txt")

    @cached_property
    def dense(self) -> str:
        docnos, texts = zip(*self.docs, strict=True)
        build_vectors(self.folder / "dense", self.vectors, docnos, texts=texts)
        return str(self.folder / "dense")

    @cached_property
    def lucene(self) -> str:
        build_lucene(self.folder / "lucene", self.docs, on_empty="keep")
        return str(self.folder / "lucene")


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"no shared collections in {SHARED}; set PRF_SHARED")
    return SHARED


def queries(*rows: tuple[Any, ...], names: str = "qid query") -> pd.DataFrame:
    """Returns a frame of these rows, identifiers and texts as object columns."""
    table = pd.DataFrame({name: column(objects([])) for name in names.split()})
    for place, name in enumerate(names.split()):
        values = [row[place] for row in rows]
        plain = name in ("score", "rank")
        table[name] = np.array(values, dtype=float) if plain else column(objects(values))
    return table


def results(*rows: tuple[Any, ...], names: str = "qid query docno score") -> pd.DataFrame:
    """Returns a result frame of these rows, scores as float64."""
    return queries(*rows, names=names)


def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns the rows as plain Python values, so that == compares them exactly."""
    return [
        {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()}
        for row in frame.to_dict("records")
    ]

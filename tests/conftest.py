"""Material every test may use: shared collections, and small real indexes of nasty documents."""

from __future__ import annotations

import gzip
import os
import sys
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny_models
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach a model hub
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "data"))  # a user's own module is there

from prf import build_lucene, build_vectors, read_docs, read_topics
from prf.frames import column, objects
from prf.lucene_build import build_impact

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

    @cached_property
    def impact(self) -> str:
        """An impact index whose weights are how often a word stands in a document."""
        vectors = ((name, dict(Counter(text.split())), text) for name, text in self.docs)
        build_impact(self.folder / "impact", vectors, on_empty="keep")
        return str(self.folder / "impact")

    @cached_property
    def encoded_queries(self) -> str:
        """A file in Anserini's form: a token as often as its weight."""
        path = self.folder / "encoded.tsv"
        lines = (f"{qid}\tcats fish fish\n" for qid in ("NA", "007", "30_1", "1e3", "with space"))
        path.write_text("".join(lines) + "ü漢\t\n", encoding="utf-8")
        return str(path)

    @cached_property
    def splade(self) -> str:
        """A masked language model of SPLADE's architecture with random weights."""
        folder = self.folder / "splade"
        save_checkpoint(folder, "splade")
        return str(folder)

    @cached_property
    def unicoil(self) -> str:
        """A checkpoint of uniCOIL's architecture with random weights."""
        folder = self.folder / "unicoil"
        save_checkpoint(folder, "unicoil")
        return str(folder)

    @cached_property
    def ance(self) -> str:
        """A checkpoint of ANCE's architecture with random weights; its vectors are (8,)."""
        folder = self.folder / "ance"
        tiny_models.save_ance(folder, [text for _, text in self.docs], dim=8)
        return str(folder)

    @cached_property
    def cross_encoder(self) -> str:
        """A pair classifier of BERT's architecture with one logit and random weights."""
        folder = self.folder / "cross-encoder"
        save_checkpoint(folder, "cross-encoder")
        return str(folder)

    @cached_property
    def classifier(self) -> str:
        """The same with two classes."""
        folder = self.folder / "classifier"
        save_checkpoint(folder, "classifier")
        return str(folder)

    @cached_property
    def monot5(self) -> str:
        """A T5 with random weights."""
        folder = self.folder / "monot5"
        save_t5(folder)
        return str(folder)

    @cached_property
    def run(self) -> str:
        """A run with odd identifiers; scores have more digits than float32 holds."""
        path = self.folder / "odd.run.gz"
        docnos = [docno for docno, _ in self.docs[:6]]
        lines = (
            f"{qid} Q0 {docno} {rank} {7 - rank // 2 + 1e-9} x\n"
            for qid in ("NA", "007", "30_1", "1e3", "ü漢")
            for rank, docno in enumerate(docnos, 1)
        )
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.writelines(lines)
        return str(path)

    @cached_property
    def tprf(self) -> str:
        """A network for the dense index's vectors with random weights."""
        folder = self.folder / "tprf"
        tiny_models.save_tprf(folder, self.vectors.shape[1])
        return str(folder)


WORDS = "cat dog fish oil the of and information retrieval hypertension a b c d e f ##s ##al na ##n"


def save_checkpoint(
    folder: Path,
    kind: str,
    tokenizer: Path | None = None,
    layers: int = 2,
    width: int = 16,
    spread: float = 0.5,
) -> None:
    """Writes a tiny BERT: a masked language model, uniCOIL, or a classifier of 1 or 2 classes.

    ``tokenizer`` is the folder of another model, whose vocabulary it takes.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BertForSequenceClassification,
        BertModel,
        BertTokenizerFast,
    )

    folder.mkdir(parents=True)
    if tokenizer is None:
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
        (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
        taken = BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    else:
        taken = BertTokenizerFast.from_pretrained(tokenizer)
    taken.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(taken),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 32),
        intermediate_size=2 * width,
        initializer_range=spread,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if kind == "splade":
            BertForMaskedLM(config).save_pretrained(folder)
            return
        if kind in ("classifier", "cross-encoder"):
            config.num_labels = 2 if kind == "classifier" else 1
            BertForSequenceClassification(config).save_pretrained(folder)
            return
        bert, head = BertModel(config), torch.nn.Linear(width, 1)
        torch.nn.init.normal_(head.weight)
    state = {f"bert.{name}": value for name, value in bert.state_dict().items()}
    state |= {f"tok_proj.{name}": value for name, value in head.state_dict().items()}
    config.save_pretrained(folder)
    save_file(state, str(folder / "model.safetensors"))


def save_t5(folder: Path) -> None:
    """Writes a tiny T5 whose tokenizer knows the words of monoT5's prompt."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration, T5TokenizerFast

    words = ["Query:", "Document:", "Relevant:", "true", "false", *WORDS.split()]
    pieces = ["<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in words), *"abcdefghilnorst:"]
    vocabulary = [(piece, -float(len(piece) == 1)) for piece in dict.fromkeys(pieces)]
    T5TokenizerFast(vocab=vocabulary, extra_ids=0).save_pretrained(folder)
    config = T5Config(
        vocab_size=len(vocabulary),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        initializer_factor=3.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        T5ForConditionalGeneration(config).save_pretrained(folder)


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

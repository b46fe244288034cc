"""Encoders with a published layout: exact ids, precision, and checkpoints of another kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from conftest import Material, queries

from prf import (
    DenseRetriever,
    IndexStateError,
    MissingDependency,
    PrfWarning,
    QueryEncoder,
    SpecError,
    build_dense,
    load_encoder,
)
from prf.checkpoints import read_weights
from prf.encoders import KNOWN, LayoutEncoder, SentenceEncoder
from prf.index import open_index

pytestmark = pytest.mark.models

TEXTS = ["cats and dogs", "", "Fish OIL", "भारत 🐟", "hypertension " * 100, "a b c"]
LAYOUTS = [("ance", "ance"), ("tct", "bert"), ("cls", "bert"), ("mean-l2", "distilbert")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, material: Material) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    texts = [text for _, text in material.docs] + TEXTS
    tiny_models.save_ance(folder / "ance", texts, dim=8)
    tiny_models.save_bert(folder / "bert", texts)
    tiny_models.save_distilbert(folder / "distilbert", texts)
    tiny_models.save_bert(folder / "masked", texts, "BertForMaskedLM")
    tiny_models.save_bert(folder / "cross", texts, "BertForSequenceClassification")
    return folder


def opened(folder: Path, layout: str, name: str, **options: Any) -> LayoutEncoder:
    encoder = load_encoder(str(folder / name), layout=layout, **options)
    assert isinstance(encoder, LayoutEncoder)
    return encoder


# What the models read


def names(encoder: LayoutEncoder, ids: list[int]) -> list[str]:
    return list(encoder.reader.tokenizer.convert_ids_to_tokens(ids))


def test_tct_query_is_36_tokens_filled_with_mask(folder: Path) -> None:
    encoder = opened(folder, "tct", "bert")
    (ids,), cut = encoder.read(["fish oil"], "query")
    assert len(ids) == 36
    assert names(encoder, ids)[:4] == ["[CLS]", "[", "q", "]"]
    assert ids[-20:] == [encoder.reader.marks.mask] * 20
    assert cut.tolist() == []


def test_tct_passage_has_no_closing_token(folder: Path) -> None:
    encoder = opened(folder, "tct", "bert")
    (ids,), _ = encoder.read(["fish oil"], "document")
    assert names(encoder, ids)[:4] == ["[CLS]", "[", "d", "]"]
    assert ids[-1] != encoder.reader.marks.sep


def test_tct_query_vector_is_the_mean_from_position_four(folder: Path) -> None:
    import torch
    from transformers import BertModel

    encoder = opened(folder, "tct", "bert")
    ids = torch.tensor(encoder.read(["fish oil"], "query").rows)
    with torch.inference_mode():
        hidden = BertModel.from_pretrained(folder / "bert").eval()(ids).last_hidden_state[0]
    expected = hidden[4:36].mean(0).numpy()
    np.testing.assert_allclose(encoder.encode(["fish oil"], "query")[0], expected, atol=1e-5)


def test_ance_reads_lower_case_between_its_two_tokens(folder: Path) -> None:
    encoder = opened(folder, "ance", "ance")
    upper, lower = encoder.read(["Fish OIL", "fish oil"], "document").rows
    assert upper == lower
    assert names(encoder, lower)[0] == "<s>"
    assert names(encoder, lower)[-1] == "</s>"


@pytest.mark.parametrize(
    ("layout", "name", "query", "document"),
    [("ance", "ance", 64, 256), ("tct", "bert", 36, 512), ("cls", "distilbert", 512, 256)],
)
def test_texts_are_cut_at_the_published_lengths(
    folder: Path, layout: str, name: str, query: int, document: int
) -> None:
    encoder = opened(folder, layout, name)
    for side, length in (("query", query), ("document", document)):
        (ids,), cut = encoder.read(["fish " * 600], side)
        assert (len(ids), cut.tolist()) == (length, [0])


def test_length_is_an_argument(folder: Path) -> None:
    encoder = opened(folder, "cls", "bert", query_length=8, document_length=10)
    assert [len(encoder.read(TEXTS[-2:-1], side).rows[0]) for side in ("query", "document")] == [
        8,
        10,
    ]


@pytest.mark.parametrize("length", [2, 513])
def test_length_the_model_does_not_have_is_refused(folder: Path, length: int) -> None:
    with pytest.raises(SpecError, match=f"query length {length} is not possible; from 3 to 512"):
        opened(folder, "cls", "bert", query_length=length)


# Vectors


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
@pytest.mark.parametrize("side", ["query", "document"])
def test_batches_do_not_matter(folder: Path, layout: str, name: str, side: Any) -> None:
    """P1, B7."""
    encoder = opened(folder, layout, name)
    alone = np.concatenate([encoder.encode([text], side) for text in TEXTS])
    np.testing.assert_allclose(encoder.encode(TEXTS, side, batch_size=4), alone, atol=1e-5)


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_no_texts_give_no_vectors_of_the_right_width(folder: Path, layout: str, name: str) -> None:
    """B3."""
    encoder = opened(folder, layout, name)
    assert encoder.encode([], "query").shape == (0, encoder.dim)


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_half_precision_is_near_and_gives_float32(
    folder: Path, layout: str, name: str, precision: Any
) -> None:
    """L7."""
    exact = opened(folder, layout, name).encode(TEXTS, "document")
    half = opened(folder, layout, name, precision=precision).encode(TEXTS, "document")
    assert half.dtype == np.float32
    assert not np.array_equal(half, exact)
    lengths = np.linalg.norm(half, axis=1) * np.linalg.norm(exact, axis=1)
    real = lengths > 0  # an empty passage has no position from 4 on: the zero vector
    assert ((half * exact).sum(1)[real] / lengths[real]).min() > 0.99


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_half_precision_of_a_sentence_transformers_model(precision: Any) -> None:
    exact = load_encoder("minilm").encode(TEXTS[:4], "query")
    half = load_encoder("minilm", precision=precision).encode(TEXTS[:4], "query")
    assert (exact * half).sum(1).min() > 0.99
    np.testing.assert_allclose(np.linalg.norm(half, axis=1), 1, atol=1e-6)


def test_sentence_transformers_vectors_are_the_library_s_own() -> None:
    encoder = load_encoder("minilm")
    assert isinstance(encoder, SentenceEncoder)
    assert encoder.plain
    expected = encoder._model.encode(TEXTS, show_progress_bar=False)
    np.testing.assert_allclose(encoder.encode(TEXTS, "document"), expected, atol=1e-5)


def test_model_that_prepares_its_input_itself_gives_the_library_s_vectors(
    tmp_path: Path, folder: Path
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "bert" / "tokenizer.json"))
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=16)])
    model.save(str(tmp_path / "static"))
    encoder = load_encoder(str(tmp_path / "static"))
    expected = model.encode(TEXTS[2:], show_progress_bar=False)
    np.testing.assert_allclose(
        encoder.encode(TEXTS[2:], "query", batch_size=2), expected, atol=1e-5
    )


# Which layout


def test_published_models_have_their_layout_by_exact_name() -> None:
    assert KNOWN["castorini/ance-msmarco-passage"] == "ance"
    assert KNOWN["castorini/tct_colbert-v2-hnp-msmarco"] == "tct"
    assert KNOWN["sebastian-hofstaetter/distilbert-dot-tas_b-b256-msmarco"] == "cls"


@pytest.mark.parametrize("model", ["someone/ance-of-mine", "castorini/tct_colbert-v3"])
def test_layout_of_an_unknown_model_must_be_named(model: str) -> None:
    with pytest.raises(IndexStateError, match=r"of a plain model name the layout.*HF_HUB_OFFLINE"):
        load_encoder(model)


@pytest.mark.parametrize("layout", ["auto", "sentence-transformers"])
def test_layout_of_an_unknown_folder_must_be_named(folder: Path, layout: Any) -> None:
    with pytest.raises(IndexStateError, match=r"no modules\.json.*layout='ance', 'tct', 'cls'"):
        load_encoder(str(folder / "bert"), layout=layout)


def test_unknown_layout_is_refused(folder: Path) -> None:
    with pytest.raises(SpecError, match="'colbert' is none of"):
        load_encoder(str(folder / "bert"), layout="colbert")  # type: ignore[arg-type]


def test_checkpoint_in_the_cache_opens_by_its_known_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I7: HF_HUB_OFFLINE is set in all tests."""
    import huggingface_hub.constants

    repository = tmp_path / "models--castorini--ance-msmarco-passage"
    shutil.copytree(folder / "ance", repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    import transformers.utils.hub

    for place in ("TRANSFORMERS_CACHE", "HF_HUB_CACHE"):
        monkeypatch.setattr(transformers.utils.hub, place, str(tmp_path), raising=False)
    encoder = load_encoder("castorini/ance-msmarco-passage")
    assert encoder.description["layout"] == "ance"
    expected = opened(folder, "ance", "ance").encode(TEXTS, "query")
    assert np.array_equal(encoder.encode(TEXTS, "query"), expected)


# Checkpoints


@pytest.mark.parametrize(
    ("layout", "name", "message"),
    [
        ("ance", "bert", r"needs a roberta model, config.json says 'bert' \(BertModel\)"),
        ("tct", "ance", r"needs a bert model, config.json says 'roberta'"),
        ("tct", "distilbert", "needs a bert model, config.json says 'distilbert'"),
        ("cls", "ance", r"does not read: embeddingHead\.bias"),
        ("mean", "cross", r"does not read: classifier\.bias"),
        ("cls", "nothing", "neither a local folder with config.json"),
    ],
)
def test_checkpoint_of_another_kind_is_refused(
    folder: Path, layout: str, name: str, message: str
) -> None:
    with pytest.raises(IndexStateError, match=message):
        opened(folder, layout, name)


def test_pretraining_head_does_not_matter(folder: Path) -> None:
    assert opened(folder, "cls", "masked").encode(TEXTS, "query").shape == (len(TEXTS), 32)


def changed(folder: Path, copy: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """Returns a copy of the ANCE checkpoint with other weights."""
    from safetensors.torch import save_file

    shutil.copytree(folder / "ance", copy)
    file = copy / "model.safetensors"
    save_file(change(read_weights(str(folder / "ance"))), str(file), metadata={"format": "pt"})
    return str(copy)


@pytest.mark.parametrize(
    "lost",
    [
        "embeddingHead.weight",
        "embeddingHead.bias",
        "norm.weight",
        "roberta.embeddings.LayerNorm.bias",
    ],
)
def test_missing_weight_is_an_error_never_made_up(folder: Path, tmp_path: Path, lost: str) -> None:
    model = changed(
        folder, tmp_path / "m", lambda w: {name: t for name, t in w.items() if name != lost}
    )
    with pytest.raises(IndexStateError, match=f"lacks 1 of its weights: {lost}; is it an ANCE"):
        load_encoder(model, layout="ance")


def test_missing_weight_of_a_plain_model_is_an_error(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = read_weights(str(folder / "bert"))
    shutil.copytree(folder / "bert", tmp_path / "m")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, str(tmp_path / "m" / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(IndexStateError, match=r"lacks 1 .*layer\.1\.output\.dense\.weight"):
        load_encoder(str(tmp_path / "m"), layout="tct")


@pytest.mark.parametrize("prefix", ["ance_encoder.roberta.", "ance_encoder.", ""])
def test_ance_weights_are_found_under_their_other_names(
    folder: Path, tmp_path: Path, prefix: str
) -> None:
    outer = "ance_encoder." if prefix.startswith("ance_encoder.") else ""
    model = changed(
        folder,
        tmp_path / "m",
        lambda w: {
            prefix + name.removeprefix("roberta.")
            if name.startswith("roberta.")
            else outer + name: t
            for name, t in w.items()
        },
    )
    expected = opened(folder, "ance", "ance").encode(TEXTS, "query")
    assert np.array_equal(load_encoder(model, layout="ance").encode(TEXTS, "query"), expected)


def test_weights_of_another_shape_are_an_error(folder: Path, tmp_path: Path) -> None:
    model = changed(
        folder, tmp_path / "m", lambda w: {**w, "norm.weight": w["norm.weight"].new_ones(5)}
    )
    with pytest.raises(IndexStateError, match=r"do not fit its config: size mismatch.*\[5\]"):
        load_encoder(model, layout="ance")


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    import torch

    shutil.copytree(folder / "bert", tmp_path / "m")
    weights = read_weights(str(folder / "bert"))
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(IndexStateError, match=r"model\.safetensors"):
        load_encoder(str(tmp_path / "m"), layout="cls")


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("gpu", SpecError, "write cpu, cuda, cuda:0"),
        ("cuda:x", SpecError, "write cpu, cuda, cuda:0"),
        ("cuda:99", MissingDependency, "was asked for, but"),
    ],
)
def test_device_that_is_not_there_is_an_error(
    folder: Path, device: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_encoder(str(folder / "bert"), device, layout="cls")


# Stage and index


def test_cut_queries_are_named(folder: Path) -> None:
    """L1."""
    stage = QueryEncoder(str(folder / "ance"), layout="ance")
    with pytest.warns(PrfWarning, match=r"longer than the 64 tokens .* were cut: 1 \(b\)"):
        stage(queries(("a", "cat"), ("b", "dog " * 70)))


def test_index_records_model_layout_precision_and_lengths(folder: Path, tmp_path: Path) -> None:
    """X9."""
    model = str(folder / "ance")
    docs = [("a", "cats"), ("b", "fish oil")]
    build_dense(tmp_path / "i", docs, model, layout="ance", precision="bfloat16", max_length=99)
    encoder = json.loads((tmp_path / "i" / "meta.json").read_text("utf-8"))["encoder"]
    assert encoder["model"] == model
    assert encoder["layout"] == "ance"
    assert encoder["precision"] == "bfloat16"
    assert encoder["max_length"] == {"query": 64, "document": 99}
    assert open_index(tmp_path / "i").meta["similarity"] == "dot"


def test_query_of_another_encoder_is_refused(folder: Path, tmp_path: Path) -> None:
    """X9."""
    build_dense(tmp_path / "i", [("a", "cats")], str(folder / "ance"), layout="ance")
    other = QueryEncoder(str(folder / "bert"), layout="cls") >> DenseRetriever(tmp_path / "i")
    with pytest.raises(IndexStateError, match="was built with encoder"):
        other.search("cats")


def test_query_of_another_layout_is_refused(folder: Path, tmp_path: Path) -> None:
    """X9: the same weights, another pooling."""
    model = str(folder / "bert")
    build_dense(tmp_path / "i", [("a", "cats")], model, layout="cls")
    same = QueryEncoder(model, layout="cls") >> DenseRetriever(tmp_path / "i")
    assert same.search("cats")["docno"].tolist() == ["a"]
    other = QueryEncoder(model, layout="mean") >> DenseRetriever(tmp_path / "i")
    with pytest.raises(IndexStateError, match=r"layout 'cls', the queries come from 'mean'"):
        other.search("cats")


def test_command_line_takes_layout_and_precision(folder: Path, tmp_path: Path) -> None:
    from prf.cli import main

    docs = tmp_path / "docs.jsonl"
    docs.write_text('{"docno": "a", "text": "cats"}\n', encoding="utf-8")
    options = ["--layout", "tct", "--precision", "bfloat16"]
    line = ["index", str(tmp_path / "i"), "--docs", str(docs), "--encoder", str(folder / "bert")]
    assert main([*line, *options]) == 0
    encoder = open_index(tmp_path / "i").meta["encoder"]
    assert (encoder["layout"], encoder["precision"]) == ("tct", "bfloat16")

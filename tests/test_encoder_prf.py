"""ANCE-PRF and its kin: exact ids of the input, and what happens with little or no feedback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models
from conftest import Material, queries, results

from prf import (
    DenseRetriever,
    EncoderPrf,
    FrameError,
    PrfWarning,
    QueryEncoder,
    SpecError,
    Text,
    build_dense,
    load_encoder,
)
from prf.encoders import LayoutEncoder
from prf.frames import column, objects
from prf.layouts import Marks, feedback_ids

MARKS = Marks(cls=1, sep=2, pad=0, mask=4)
NAMES = "qid query docno score text"


# The rule, on ids


def test_input_is_query_and_passages_with_one_separator_after_each() -> None:
    ids, cut = feedback_ids("ance", [10, 11], [[20], [30, 31]], MARKS)
    assert (ids, cut) == ([1, 10, 11, 2, 20, 2, 30, 31, 2], False)


def test_official_rule_keeps_the_last_id() -> None:
    """511 ids, then the closing one."""
    passages = [list(range(1000, 1300)), list(range(2000, 2300))]
    ids, cut = feedback_ids("ance", [10] * 62, passages, MARKS)
    whole = [1, *[10] * 62, 2, *passages[0], 2, *passages[1], 2]
    assert (ids, cut) == ([*whole[:511], 2], True)


def test_pyserini_rule_cuts_the_tail() -> None:
    passages = [list(range(1000, 1300)), list(range(2000, 2300))]
    ids, cut = feedback_ids("ance", [10] * 62, passages, MARKS, truncation="pyserini")
    assert (ids, cut) == ([1, *[10] * 62, 2, *passages[0], 2, *passages[1][:147]], True)


def test_official_rule_cuts_query_at_64_and_passages_at_512_with_their_tokens() -> None:
    ids, cut = feedback_ids("cls", [10] * 70, [], MARKS)
    assert (ids, cut) == ([1, *[10] * 62, 2], True)
    ids, _ = feedback_ids("cls", [10], [[7] * 600, [8]], MARKS, max_length=512)
    assert ids == [1, 10, 2, *[7] * 508, 2]
    assert feedback_ids("cls", [10] * 70, [], MARKS, truncation="pyserini")[0].count(10) == 70


def test_tct_input_is_filled_with_mask_and_has_no_last_separator() -> None:
    ids, cut = feedback_ids("tct", [10], [[20], [30]], MARKS, head=[5, 6, 7], max_length=14)
    assert (ids, cut) == ([1, 5, 6, 7, 10, 2, 20, 2, 30, 4, 4, 4, 4, 4], False)


@pytest.mark.parametrize("layout", ["ance", "cls"])
def test_without_passages_the_query_stands_alone(layout: str) -> None:
    assert feedback_ids(layout, [10, 11], [], MARKS)[0] == [1, 10, 11, 2]  # type: ignore[arg-type]


# With a model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, material: Material) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    texts = [text for _, text in material.docs]
    tiny_models.save_bert(folder / "tct", texts)
    tiny_models.save_distilbert(folder / "distilbert", texts)
    return folder


def encoder_of(model: str, layout: str) -> LayoutEncoder:
    encoder = load_encoder(model, layout=layout)  # type: ignore[arg-type]
    assert isinstance(encoder, LayoutEncoder)
    return encoder


@pytest.mark.models
def test_ids_of_a_text_are_those_of_its_parts_in_lower_case(material: Material) -> None:
    """P9: the whole input once, spelled out."""
    reader = encoder_of(material.ance, "ance").reader
    (ids,), _ = reader.feedback(["Fish OIL"], [["Cats and Dogs", "NaN"]])
    assert reader.tokenizer.decode(ids) == "<s>fish oil</s>cats and dogs</s>nan</s>"
    tokens = [reader.tokenizer(t, add_special_tokens=False)["input_ids"] for t in
              ("fish oil", "cats and dogs", "nan")]  # fmt: skip
    cls, sep = reader.marks.cls, reader.marks.sep
    assert ids == [cls, *tokens[0], sep, *tokens[1], sep, *tokens[2], sep]


@pytest.mark.models
@pytest.mark.parametrize(("layout", "name"), [("tct", "tct"), ("cls", "distilbert")])
def test_vector_is_that_of_the_whole_string(folder: Path, layout: str, name: str) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    frame = results(("1", "fish oil", "a", 2.0, "Cats"), ("1", "fish oil", "b", 1.0, "dogs"),
                    names=NAMES)  # fmt: skip
    stage = EncoderPrf(str(folder / name), layout=layout, max_length=64)
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    text = {
        "tct": "[CLS] [Q] fish oil[SEP]Cats[SEP]dogs" + "[MASK]" * 64,
        "cls": "[CLS] fish oil [SEP] Cats [SEP] dogs [SEP]",
    }[layout]
    inputs = tokenizer(
        text, add_special_tokens=False, truncation=True, max_length=64, return_tensors="pt"
    )
    with torch.inference_mode():
        hidden = (
            AutoModel.from_pretrained(folder / name)
            .eval()(inputs["input_ids"])
            .last_hidden_state[0]
        )
    expected = hidden[4:].mean(0) if layout == "tct" else hidden[0]
    np.testing.assert_allclose(stage(frame)["query_vec"].iat[0], expected.numpy(), atol=1e-5)


@pytest.mark.models
def test_feedback_is_the_first_documents_in_rank_order(material: Material) -> None:
    rows = [("1", "fish", d, s, t) for d, s, t in
            (("a", 1.0, "cats"), ("b", 3.0, "dogs"), ("c", 2.0, "oil"))]  # fmt: skip
    found = EncoderPrf(material.ance, fb_docs=2)(results(*rows, names=NAMES))["query_vec"].iat[0]
    encoder = encoder_of(material.ance, "ance")
    ids, _ = encoder.reader.feedback(["fish"], [["dogs", "oil"]])
    np.testing.assert_allclose(found, encoder.encode_ids(ids)[0], atol=1e-6)


@pytest.mark.models
def test_query_without_feedback_is_encoded_alone_where_it_has_no_vector(
    material: Material,
) -> None:
    frame = queries(("1", "fish"), ("2", "cats"))
    given = results(("2", "cats", "a", 1.0, "dogs"), names=NAMES)
    out = EncoderPrf(material.ance).transform(given, frame)
    alone = load_encoder(material.ance, layout="ance").encode(["fish"], "query")[0]
    np.testing.assert_allclose(out["query_vec"].iat[0], alone, atol=1e-6)


@pytest.mark.models
def test_query_without_feedback_keeps_a_vector_it_has(material: Material) -> None:
    vector = np.arange(8, dtype=np.float32)
    frame = queries(("1", "fish"), ("2", "cats")).assign(
        query_vec=column(objects([vector, vector]))
    )
    given = results(("2", "cats", "a", 1.0, "dogs"), names=NAMES)
    out = EncoderPrf(material.ance).transform(given, frame)
    assert out["query_vec"].iat[0].tolist() == vector.tolist()
    assert out["query_vec"].iat[1].tolist() != vector.tolist()


@pytest.mark.models
def test_kept_vector_of_another_size_is_refused(material: Material) -> None:
    frame = queries(("1", "fish"), ("2", "cats")).assign(
        query_vec=column(objects([np.ones(3), np.ones(3)]))
    )
    given = results(("2", "cats", "a", 1.0, "dogs"), names=NAMES)
    with pytest.raises(FrameError, match=r"query_vec has 3 numbers, .* gives 8"):
        EncoderPrf(material.ance).transform(given, frame)


@pytest.mark.models
def test_cut_input_is_named(material: Material) -> None:
    """L1."""
    frame = results(
        ("a", "fish", "x", 1.0, "cats"), ("b", "fish", "x", 1.0, "dog " * 600), names=NAMES
    )
    with pytest.warns(PrfWarning, match=r"longer than .* reads and were cut: 1 \(b\)"):
        EncoderPrf(material.ance)(frame)


@pytest.mark.models
def test_missing_text_names_document_and_query(material: Material) -> None:
    frame = results(("a", "fish", "x", 1.0, None), names=NAMES)
    with pytest.raises(FrameError, match="text of docno 'x' for qid 'a' is None"):
        EncoderPrf(material.ance)(frame)


@pytest.mark.models
def test_length_beyond_the_model_is_refused(material: Material) -> None:
    frame = results(("a", "fish", "x", 1.0, "cats"), names=NAMES)
    with pytest.raises(SpecError, match=r"max_length <= 512 \(the model's positions\)"):
        EncoderPrf(material.ance, max_length=600)(frame)


def test_query_longer_than_the_whole_is_refused() -> None:
    with pytest.raises(SpecError, match="the query is part of the whole"):
        EncoderPrf("x", max_length=32, query_length=64)


@pytest.mark.models
@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_do_not_matter(material: Material, batch_size: int) -> None:
    """P1."""
    frame = results(
        *(("q" * (i + 1), "fish", "d", 1.0, "cats and dogs " * i) for i in range(6)), names=NAMES
    )
    one, other = (
        np.stack(EncoderPrf(material.ance, batch_size=size)(frame)["query_vec"])
        for size in (batch_size, 32)
    )
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.models
def test_prf_encoder_searches_the_index_of_the_encoder_it_was_trained_for(
    material: Material, tmp_path: Path
) -> None:
    """X9 does not hold against it: it is another model by design."""
    docs = [("a", "fish oil"), ("b", "cats and dogs")]
    other = tmp_path / "prf"
    tiny_models.save_ance(other, [text for _, text in docs] * 9, dim=8)
    build_dense(tmp_path / "i", docs, material.ance, layout="ance", with_text=True)
    dense = DenseRetriever(tmp_path / "i")
    first = QueryEncoder(material.ance, layout="ance") >> dense >> Text(tmp_path / "i")
    out = (first >> EncoderPrf(str(other), fb_docs=1) >> dense).search("cats")
    assert set(out["docno"]) == {"a", "b"}

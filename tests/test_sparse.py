"""Learned sparse encoders: what a plain forward pass gives, quantised, pruned and searched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Material, queries

from prf import BM25, EncodedQueries, Impact, UniCoil
from prf.errors import IndexStateError, PrfWarning, SpecError
from prf.frames import column, objects
from prf.sparse_models import Quantisation, load_splade, load_unicoil

TEXTS = [
    "cat cats dog",
    "fish oil and hypertension",
    "",
    "of the",
    "retrieval na ü漢",
    "cat " * 200,
]


@pytest.mark.parametrize(
    ("weight", "rounded", "ceiled"), [(1.234, 63, 64), (0.013, 1, 1), (2.5, 128, 128)]
)
def test_quantisation_of_the_worked_examples(weight: float, rounded: int, ceiled: int) -> None:
    assert Quantisation()(np.array([weight])).tolist() == [rounded]
    assert Quantisation(rounding="ceil")(np.array([weight])).tolist() == [ceiled]


def test_quantisation_by_a_factor() -> None:
    assert Quantisation(scale=100)(np.array([0.123, 1.0])).tolist() == [12, 100]


def test_quantisation_refuses_what_means_nothing() -> None:
    with pytest.raises(SpecError, match="1 to 16 bits"):
        Quantisation(bits=0)


@pytest.mark.models
@pytest.mark.parametrize("text", TEXTS[:2] + TEXTS[4:])
def test_splade_is_the_largest_logit_of_each_term(material: Material, text: str) -> None:
    import torch
    from transformers import AutoTokenizer, BertForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(material.splade)
    model = BertForMaskedLM.from_pretrained(material.splade).eval()
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
    with torch.inference_mode():
        logits = model(**inputs).logits[0]
    expected = torch.log1p(logits.relu()).max(dim=0).values.numpy()
    found = load_splade(material.splade).encode([text], "query")
    dense = np.zeros(len(expected))
    dense[found.ids] = found.values
    np.testing.assert_allclose(dense, expected, atol=1e-5)


@pytest.mark.models
@pytest.mark.parametrize("side", ["query", "document"])
def test_unicoil_sums_in_queries_and_takes_the_largest_in_documents(
    material: Material, side: str
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, BertConfig, BertModel

    text = "cat dog cat fish cat"
    state = load_file(Path(material.unicoil) / "model.safetensors")
    bert = BertModel(BertConfig.from_pretrained(material.unicoil))
    bert.load_state_dict({k[5:]: v for k, v in state.items() if k.startswith("bert.")})
    ids = AutoTokenizer.from_pretrained(material.unicoil)(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        hidden = bert.eval()(ids).last_hidden_state[0]
        weights = (hidden @ state["tok_proj.weight"][0] + state["tok_proj.bias"]).relu().numpy()
    expected: dict[int, float] = {}
    for token, weight in zip(ids[0, 1:].tolist(), weights[1:].tolist(), strict=True):
        old = expected.get(token, 0.0)
        expected[token] = old + weight if side == "query" else max(old, weight)
    found = load_unicoil(material.unicoil).encode([text], side)
    assert found.ids.tolist() == sorted(token for token, w in expected.items() if w > 0)
    np.testing.assert_allclose(found.values, [expected[i] for i in found.ids], atol=1e-5)


@pytest.mark.models
@pytest.mark.parametrize("load", [load_splade, load_unicoil], ids=["splade", "unicoil"])
def test_batches_do_not_matter(material: Material, load) -> None:
    model = load(material.splade if load is load_splade else material.unicoil)
    one, many = (model.encode(TEXTS, "document", batch_size=size) for size in (1, 32))
    assert one.ptr.tolist() == many.ptr.tolist()
    assert one.ids.tolist() == many.ids.tolist()
    np.testing.assert_allclose(one.values, many.values, atol=1e-5)


@pytest.mark.models
def test_no_texts_give_no_terms(material: Material) -> None:
    """B3."""
    assert load_splade(material.splade).encode([], "query").ptr.tolist() == [0]


@pytest.mark.models
def test_pruning_keeps_the_heaviest(material: Material) -> None:
    model = load_splade(material.splade)
    every, few = (model.encode(TEXTS[:1], "query", max_terms=n) for n in (0, 3))
    assert sorted(few.values) == sorted(every.values)[-3:]


@pytest.mark.models
def test_checkpoint_of_another_kind_is_refused(material: Material) -> None:
    with pytest.raises(IndexStateError, match=r"lacks .* of its weights: tok_proj"):
        load_unicoil(material.splade)


@pytest.mark.models
def test_cut_queries_are_named(material: Material) -> None:
    """L1."""
    with pytest.warns(PrfWarning, match=r"longer than 20 tokens .* were cut: 1 \(b\)"):
        UniCoil(material.unicoil, max_length=20)(queries(("a", "cat"), ("b", "dog " * 50)))


def test_encoded_queries_are_read_by_qid(material: Material) -> None:
    out = EncodedQueries(material.encoded_queries)(queries(("007", "x"), ("NA", "y")))
    assert out["query_toks"].tolist() == [{"cats": 1.0, "fish": 2.0}] * 2


@pytest.mark.java
def test_impact_score_is_the_product_of_the_weights(material: Material) -> None:
    frame = queries(("1", "x")).assign(query_toks=column(objects([{"fish": 3.0}])))
    counts = {name: text.split().count("fish") for name, text in material.docs}
    found = Impact(material.impact)(frame)
    assert dict(zip(found["docno"], found["score"], strict=True)) == {
        name: 3.0 * count for name, count in counts.items() if count
    }


@pytest.mark.java
def test_text_search_of_an_impact_index_is_refused(material: Material) -> None:
    with pytest.raises(IndexStateError, match="impact"):
        BM25(material.impact)(queries(("1", "fish")))

"""Rerankers: what a plain forward pass gives, exact dense scores, and runs as first stages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
from conftest import Material, queries, results, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import DL19, DL20

import prf
from prf import (
    CrossEncoder,
    DenseRescorer,
    DenseRetriever,
    FileFormatError,
    FrameError,
    IndexStateError,
    MissingDependency,
    MonoT5,
    PrfWarning,
    QueryVectors,
    RunFile,
    SpecError,
    loads,
)
from prf.frames import column, objects
from prf.pipeline import Log, logging_to

COLUMNS = "qid query docno text"
QUERIES = ["cat", "fish oil and hypertension", ""]
TEXTS = ["cats and dogs", "the cat of the dog " * 9, "", "ü漢 nan", "oil", "oil"]
FRAME = results(
    *(
        (str(q), query, f"d{d}", text)
        for q, query in enumerate(QUERIES)
        for d, text in enumerate(TEXTS)
    ),
    names=COLUMNS,
)

models = pytest.mark.models


def scored(frame: pd.DataFrame) -> dict[tuple[str, str], float]:
    return dict(zip(zip(frame["qid"], frame["docno"], strict=True), frame["score"], strict=True))


def plain_logits(path: str, **inputs: Any) -> np.ndarray[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        encoded = tokenizer(
            **inputs, return_tensors="pt", padding=True, truncation=True, max_length=512
        )
        return model(**encoded).logits.double().numpy()


# Cross-encoders


@models
def test_one_logit_is_the_score(material: Material) -> None:
    logits = plain_logits(
        material.cross_encoder, text=list(FRAME["query"]), text_pair=list(FRAME["text"])
    )
    found = scored(CrossEncoder(material.cross_encoder)(FRAME))
    keys = zip(FRAME["qid"], FRAME["docno"], strict=True)
    np.testing.assert_allclose([found[key] for key in keys], logits[:, 0], atol=1e-5)


@models
def test_two_logits_give_the_probability_of_the_second_class(material: Material) -> None:
    import torch

    logits = plain_logits(
        material.classifier, text=list(FRAME["query"]), text_pair=list(FRAME["text"])
    )
    found = scored(CrossEncoder(material.classifier)(FRAME))
    expected = torch.softmax(torch.from_numpy(logits), dim=1)[:, 1].numpy()
    keys = zip(FRAME["qid"], FRAME["docno"], strict=True)
    np.testing.assert_allclose([found[key] for key in keys], expected, atol=1e-5)


@models
def test_equals_sentence_transformers(material: Material) -> None:
    """Of one logit sentence-transformers gives the sigmoid, which leaves the order."""
    from sentence_transformers import CrossEncoder as Theirs

    model = Theirs(material.cross_encoder, device="cpu", max_length=512)
    pairs = list(zip(FRAME["query"], FRAME["text"], strict=True))
    expected = model.predict(pairs, show_progress_bar=False)
    found = scored(CrossEncoder(material.cross_encoder)(FRAME))
    ours = np.array([found[key] for key in zip(FRAME["qid"], FRAME["docno"], strict=True)])
    np.testing.assert_allclose(1 / (1 + np.exp(-ours)), expected, atol=1e-5)


def stages(material: Material) -> list[Any]:
    return [CrossEncoder(material.cross_encoder), MonoT5(material.monot5)]


@models
@pytest.mark.parametrize("number", [0, 1], ids=["cross-encoder", "monot5"])
@settings(max_examples=12)
@given(size=st.integers(1, 20), random=st.randoms(use_true_random=False))
def test_batches_and_order_do_not_matter(
    material: Material, number: int, size: int, random: Any
) -> None:
    stage = stages(material)[number]
    other = type(stage)(stage.model, batch_size=size)
    shuffled = FRAME.iloc[random.sample(range(len(FRAME)), len(FRAME))]
    one, two = scored(stage(FRAME)), scored(other(shuffled))
    np.testing.assert_allclose([two[key] for key in one], list(one.values()), atol=1e-5)


@models
@pytest.mark.parametrize("number", [0, 1], ids=["cross-encoder", "monot5"])
def test_equal_texts_tie_exactly_and_stand_by_docno(material: Material, number: int) -> None:
    found = stages(material)[number](FRAME)
    for _, part in found.groupby("qid"):
        places = {docno: (rank, score) for docno, rank, score in
                  part[["docno", "rank", "score"]].itertuples(index=False)}  # fmt: skip
        assert places["d5"] == (places["d4"][0] + 1, places["d4"][1])


@models
@pytest.mark.parametrize(("field", "text"), [("original", "cat"), ("current", "fish oil")])
def test_which_query_text_is_read(material: Material, field: Any, text: str) -> None:
    frame = FRAME.assign(query="fish oil", query_0="dog", query_1="cat")
    found = CrossEncoder(material.cross_encoder, query_field=field)(frame)
    plain = CrossEncoder(material.cross_encoder)(FRAME.assign(query=text))
    assert scored(found) == pytest.approx(scored(plain), abs=1e-5)


@models
def test_long_pair_loses_the_end_of_its_longer_text_and_is_named(material: Material) -> None:
    frame = results(
        ("a", "cat", "x", "dog " * 600),
        ("b", "fish " * 400, "x", "oil " * 400),
        ("c", "cat", "x", "dog " * 508),  # 512 with [CLS] and two [SEP]
        names=COLUMNS,
    )
    with pytest.warns(PrfWarning, match=r"more than 512 tokens .* were cut: 2 \(a, b\)"):
        found = CrossEncoder(material.cross_encoder)(frame)
    logits = plain_logits(
        material.cross_encoder, text=list(frame["query"]), text_pair=list(frame["text"])
    )
    np.testing.assert_allclose(found["score"], logits[:, 0], atol=1e-5)


@models
@pytest.mark.parametrize("length", [3, 513])
def test_length_that_the_model_has_not_is_refused(material: Material, length: int) -> None:
    with pytest.raises(SpecError, match=f"max_length is {length}; it must be from 4 to 512"):
        CrossEncoder(material.cross_encoder, max_length=length)(FRAME)


@models
@pytest.mark.parametrize("stage", [CrossEncoder, MonoT5])
def test_missing_gpu_is_an_error(material: Material, stage: Any) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MissingDependency, match="no GPU is visible"):
        stage(material.monot5, device="cuda")(FRAME)


@models
@pytest.mark.parametrize("stage", [CrossEncoder, MonoT5])
def test_model_that_is_nowhere(stage: Any) -> None:
    with pytest.raises(IndexStateError, match=r"neither a local folder .* \(HF_HUB_OFFLINE is set"):
        stage("nobody/nothing")(FRAME)


@models
def test_classifier_is_never_made_up(material: Material) -> None:
    with pytest.raises(IndexStateError, match=r"lacks .* of its weights: .*classifier"):
        CrossEncoder(material.splade)(FRAME)


@models
def test_pickled_weights_are_not_read(material: Material, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folder = shutil.copytree(material.cross_encoder, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(IndexStateError, match="save it again as safetensors"):
        CrossEncoder(folder)(FRAME)


@models
def test_model_of_three_classes_is_refused(tmp_path: Path) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    save_checkpoint(tmp_path / "three", "classifier")
    config = BertConfig.from_pretrained(tmp_path / "three", num_labels=3)
    with torch.random.fork_rng():
        BertForSequenceClassification(config).save_pretrained(tmp_path / "three")
    with pytest.raises(IndexStateError, match="has 3 classes"):
        CrossEncoder(tmp_path / "three")(FRAME)


@models
@pytest.mark.parametrize("name", ["query", "text"])
def test_text_that_is_none_is_refused(material: Material, name: str) -> None:
    frame = FRAME.assign(**{name: column(objects([None, *FRAME[name][1:]]))})
    with pytest.raises(FrameError, match=f"{name} of qid '0', docno 'd0' is None, not text"):
        CrossEncoder(material.cross_encoder)(frame)


@models
@pytest.mark.parametrize("shown", [True, False])
def test_bar_is_shown_only_where_progress_is(material: Material, shown: bool, capsys) -> None:
    with logging_to(Log(progress=shown)):
        CrossEncoder(material.cross_encoder)(FRAME)
    assert ("0/15" in capsys.readouterr().err) == shown  # of 18 pairs, three stand twice


# monoT5


@models
def test_monot5_is_the_log_probability_of_true(material: Material) -> None:
    import torch
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(material.monot5)
    model = T5ForConditionalGeneration.from_pretrained(material.monot5).eval()
    pieces = [tokenizer.convert_tokens_to_ids(piece) for piece in ("▁true", "▁false")]
    found = scored(MonoT5(material.monot5)(FRAME))
    for qid, query, docno, text in FRAME[COLUMNS.split()].itertuples(index=False):
        prompt = f"Query: {query} Document: {text} Relevant:"
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            out = model.generate(
                ids, max_new_tokens=1, min_new_tokens=1, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        expected = torch.log_softmax(out.logits[0][0, pieces].double(), dim=0)[0].item()
        assert found[qid, docno] == pytest.approx(expected, abs=1e-5)


@models
def test_prompt_that_is_too_long_keeps_its_end(material: Material) -> None:
    from prf.rerank import load_pair_model

    model = load_pair_model(material.monot5, "monoT5")
    assert load_pair_model(material.monot5, "monoT5") is model
    ids = model._ids(["Query: cat Document: dog dog dog Relevant:"])[0]["input_ids"]
    rows, cut = model.tokens(["cat", "cat"], ["dog dog dog", "dog dog"], len(ids) - 1)
    assert cut.tolist() == [True, False]
    assert rows[0]["input_ids"] == rows[1]["input_ids"]


@models
def test_model_without_the_two_answers_is_refused(material: Material) -> None:
    with pytest.raises(IndexStateError):
        MonoT5(material.cross_encoder)(FRAME)


# Dense rescoring


def test_dense_rescorer_gives_the_retrievers_scores(material: Material) -> None:
    frame = queries(*((str(i), "x") for i in range(5)))
    frame = frame.assign(query_vec=column(objects(material.vectors[:5] * 1.7)))
    found = DenseRetriever(material.dense, k=9)(frame)
    again = DenseRescorer(material.dense)(found.assign(score=0.0).sample(frac=1, random_state=3))
    again = again.sort_values(["qid", "rank"], ignore_index=True)
    pd.testing.assert_frame_equal(again[found.columns], found)


def test_cosine_index_brings_the_query_to_length_1(tmp_path: Path) -> None:
    docs = np.array([[3.0, 4.0], [5.0, 0.0]], dtype=np.float32)
    prf.build_vectors(tmp_path / "i", docs, ["a", "b"], similarity="cosine")
    frame = results(("1", [10.0, 0.0], "a"), ("1", [10.0, 0.0], "b"), names="qid query_vec docno")
    found = DenseRescorer(tmp_path / "i")(frame)
    assert list(found["docno"]) == ["b", "a"]
    assert found["score"].tolist() == [1.0, float(np.float32(0.6))]


def test_document_that_the_index_lacks_is_named(material: Material) -> None:
    frame = results(("1", material.vectors[0], "absent"), names="qid query_vec docno")
    with pytest.raises(IndexStateError, match="has no docno 'absent'"):
        DenseRescorer(material.dense)(frame)


def test_vectors_of_another_encoder_are_refused(tmp_path: Path) -> None:
    docs = np.eye(2, dtype=np.float32)
    prf.build_vectors(tmp_path / "i", docs, ["a", "b"], encoder="other")
    chain = prf.QueryEncoder("minilm") >> RunFile("r") >> DenseRescorer(tmp_path / "i")
    with pytest.raises(IndexStateError, match=r"DenseRescorer.* was built with encoder 'other'"):
        chain(queries(("1", "x")))


# Runs as first stages


def write(path: Path, *lines: str) -> RunFile:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return RunFile(path)


def test_run_gives_its_lists_by_qid_in_canonical_order(tmp_path: Path) -> None:
    stage = write(
        tmp_path / "r", "2 Q0 b 1 1.0000000001 t", "2 Q0 c 2 1 t", "1 Q0 a 9 7 t", "2 Q0 a 3 1 t"
    )
    found = stage(queries(("1", "one"), ("2", "two")))
    assert found.to_numpy().tolist() == [
        ["1", "one", "a", 7.0, 0],
        ["2", "two", "b", 1.0000000001, 0],
        ["2", "two", "a", 1.0, 1],
        ["2", "two", "c", 1.0, 2],
    ]
    assert list((stage % 1)(queries(("2", "two")))["docno"]) == ["b"]


def test_query_that_the_run_lacks_is_named_once(tmp_path: Path) -> None:
    stage = write(tmp_path / "r", "1 Q0 a 1 7 t")
    with pytest.warns(PrfWarning, match=r"are not in run .*: 1 \(2\)"):
        found = stage(queries(("2", "two"), ("1", "one")))
    assert list(found["qid"]) == ["1"]


def test_changed_run_is_read_again(tmp_path: Path) -> None:
    import os

    stage = write(tmp_path / "r", "1 Q0 a 1 7 t")
    stage(queries(("1", "x")))
    write(tmp_path / "r", "1 Q0 b 1 7 t")
    os.utime(tmp_path / "r", ns=(1, 1))
    assert list(stage(queries(("1", "x")))["docno"]) == ["b"]


@pytest.mark.parametrize("line", ["1 Q0 a 1 nan t", "1 Q0 a 1 7", "1 Q0 b 1 7 t\n1 Q0 b 2 6 t"])
def test_bad_run_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(FileFormatError, match=r"r:[12]: "):
        write(tmp_path / "r", line)(queries(("1", "x")))


def test_missing_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="does not exist"):
        RunFile(tmp_path / "none")(queries(("1", "x")))


RUNS = [
    f"{topics}.{name}"
    for topics in ("dl19", "dl20")
    for name in ("bm25", "bm25-rm3", "openai-ada2", "repllama", "splade-pp-ed", "tas-b")
]
PRF_OF_A_RUN = """
- QueryVectors: {{vectors: {vectors}, ids: {ids}}}
- RunFile: {{path: {run}}}
- Vectors: {{index: {index}}}
- Rocchio: {{fb_docs: 5, alpha: 0.4, beta: 0.6}}
- RunFile: {{path: {run}}}
- DenseRescorer: {{index: {index}}}
"""


@pytest.fixture(scope="session")
def pool_index(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rescore") / "minilm"
    prf.build_vectors(path, *DL19.encoded("docs"))
    return str(path)


@reference.needs_data
@pytest.mark.parametrize("name", RUNS)
def test_published_run_is_rescored_with_feedback(pool_index: str, name: str) -> None:
    topics = DL19 if name.startswith("dl19") else DL20
    run = reference.SHARED / reference.POOL / "runs" / f"{name}.trec.gz"
    vectors, ids = topics.encoded("queries")
    text = PRF_OF_A_RUN.format(vectors=vectors, ids=ids, run=run, index=pool_index)
    frame = prf.read_topics(topics.topics)
    found = loads(text)(frame)
    given = prf.read_run(run)
    assert scored(found).keys() == scored(given).keys()
    # The first query by plain numpy.
    qid = frame["qid"].iat[0]
    query = QueryVectors(vectors, ids)(frame)["query_vec"].iat[0].astype(np.float64)
    row_of = {docno: row for row, docno in enumerate(topics.encoded("docs")[1].read_text().split())}
    table = np.load(topics.encoded("docs")[0], mmap_mode="r")
    docnos = given[given["qid"] == qid]["docno"].tolist()
    docs = table[[row_of[docno] for docno in docnos]].astype(np.float64)
    new = (0.4 * query + 0.6 * docs[:5].mean(axis=0)).astype(np.float32).astype(np.float64)
    scores = dict(zip(docnos, (docs @ new).astype(np.float32).tolist(), strict=True))
    ours = found[found["qid"] == qid]
    assert ours["docno"].tolist() == sorted(docnos, key=lambda docno: (-scores[docno], docno))
    np.testing.assert_allclose(ours["score"], [scores[d] for d in ours["docno"]], rtol=1e-6)

"""PRP on local models: what a plain forward pass gives, batches, shared prefixes, lengths."""

from __future__ import annotations

import gzip
import json
import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import SHARED
from reference import DL19

import prf
from prf import PRP, IndexStateError, LocalModel, PrfError, SpecError
from prf.pipeline import Log, logging_to
from prf.prp.answers import Answer, Question
from prf.prp.models import _Shared, grouped, taken

pytestmark = pytest.mark.models

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM = SHARED / "models" / "smollm2-135m-instruct"
needs_smollm = pytest.mark.skipif(
    not (SMOLLM / GGUF).is_file() or find_spec("gguf") is None,
    reason=f"no {GGUF} in {SMOLLM}, or no package gguf",
)
WORDS = (
    "which passage is better for query Passage A B A: B: : cat dog fish oil the of and what do "
    "cows eat Cows grass hay. printer out paper. capital France Trees lose leaves in autumn. "
    "Paris French capital. Reply one two three four five six seven eight nine ten"
).split()
TEMPLATE = "which passage is better for query {query} Passage A: {a} Passage B: {b} Reply"
TEXTS = ["cat dog", "fish oil " * 20, "the cat of the dog", "hay. " * 7, "six seven eight", "ten"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a template, a tiny T5, a tiny Llama and one that chats."""
    path = tmp_path_factory.mktemp("prp-models")
    (path / "template.txt").write_text(TEMPLATE + "\n", encoding="utf-8")
    save_t5(path / "t5")
    save_llama(path / "llama")
    save_llama(path / "chat", chat=True)
    return path


def save_t5(folder: Path) -> None:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration, T5TokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "▁", *(f"▁{w}" for w in WORDS), *"abcdefghilnorst:."]
    vocabulary = [(piece, -float(len(piece) == 1)) for piece in dict.fromkeys(pieces)]
    T5TokenizerFast(vocab=vocabulary, extra_ids=0).save_pretrained(folder)
    config = T5Config(
        vocab_size=len(vocabulary), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        decoder_start_token_id=0, initializer_factor=3.0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        T5ForConditionalGeneration(config).save_pretrained(folder)


def save_llama(folder: Path, chat: bool = False) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *dict.fromkeys(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip
    if chat:
        fast.chat_template = (
            "{% for m in messages %}<s> {{ m['content'] }} </s> {% endfor %}"
            "{% if add_generation_prompt %}<s> {% endif %}"
        )
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(9)
        LlamaForCausalLM(config).save_pretrained(folder)


def tiny(folder: Path, kind: str, **settings: Any) -> LocalModel:
    return LocalModel(str(folder / kind), template=str(folder / "template.txt"), **settings)


def answers(backend: LocalModel, questions: list[Question]) -> list[Answer]:
    found: dict[int, Answer] = {}
    for batch in backend.open().ask(questions):
        found.update(batch)
    assert sorted(found) == list(range(len(questions)))
    return [found[place] for place in range(len(questions))]


def asked() -> list[Question]:
    queries = ["cat", "fish oil and the dog"]
    return [Question(q, a, b) for q in queries for a in TEXTS for b in TEXTS if a != b]


def margins(found: list[Answer]) -> Any:
    return np.array([answer.margin for answer in found])


KINDS = ["t5", "llama", "chat"]


@pytest.mark.parametrize("kind", KINDS)
def test_margin_is_the_difference_of_the_letters_in_a_plain_forward_pass(
    folder: Path, kind: str
) -> None:
    import torch

    backend = tiny(folder, kind)
    session: Any = backend.open()
    tokenizer, model = session._tokenizer, session._model
    for question, answer in list(zip(asked(), answers(backend, asked()), strict=True))[::7]:
        text = TEMPLATE.replace("{query}", question.query)
        text = text.replace("{a}", question.first).replace("{b}", question.second)
        with torch.inference_mode():
            if kind == "t5":
                begin = torch.tensor([[0, tokenizer.convert_tokens_to_ids("▁Passage")]])
                ids = tokenizer(text, return_tensors="pt").input_ids
                logits = model(input_ids=ids, decoder_input_ids=begin).logits[0, -1]
            else:
                text = f"<s> {text} </s> <s> Passage" if kind == "chat" else f"{text} Passage"
                ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
                logits = model(input_ids=ids).logits[0, -1]
        letters = [[tokenizer.convert_tokens_to_ids(f"{m}{x}") for m in ("▁" * (kind == "t5"),)]
                   for x in "AB"]  # fmt: skip
        one, two = (float(logits[ids].double().logsumexp(0)) for ids in letters)
        assert answer.margin == pytest.approx(one - two, abs=1e-3)
        assert answer.prompt_tokens == ids.shape[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 200, 100000])
@pytest.mark.parametrize("share", [True, False])
def test_batches_and_shared_prefixes_change_nothing(
    folder: Path, kind: str, tokens: int, share: bool
) -> None:
    """Property 9."""
    backend = tiny(folder, kind)
    other = replace(backend, batch_tokens=tokens, share_prefix=share)
    expected = margins(answers(backend, asked()))
    assert np.unique(expected).size > 30
    np.testing.assert_allclose(margins(answers(other, asked())), expected, atol=1e-3)
    reverse = answers(other, asked()[::-1])[::-1]
    np.testing.assert_allclose(margins(reverse), expected, atol=1e-3)


def test_groups_share_what_they_begin_with() -> None:
    questions = [Question("q", "a", "b"), Question("q", "a", "c"), Question("q", "d", "a"),
                 Question("q", "e", "a"), Question("r", "e", "a")]  # fmt: skip
    rows = [(1, 2, 3, 4), (1, 2, 3, 5), (1, 6, 7), (1, 6), (9, 9)]
    groups = grouped(rows, questions)
    assert groups == [((1, 2, 3), [0, 1]), ((1,), [2, 3]), ((), [4])]
    batch, rest, size = taken(groups, rows, 10**6, 9)
    assert (batch, rest) == (groups[:2], groups[2:])
    assert size == 4 * (3 + 2)
    assert taken(groups, rows, 10**6, 2)[:2] == (groups[:1], groups[1:])
    batch, rest, size = taken(groups, rows, 1, 9)
    assert batch == [_Shared((1, 2, 3), [0])]
    assert rest == [_Shared((1, 2, 3), [1]), *groups[1:]]
    assert size == 4


def test_memory_running_out_halves_the_batch(folder: Path, monkeypatch: Any) -> None:
    import torch

    backend = tiny(folder, "llama", batch_tokens=99999)
    expected = margins(answers(tiny(folder, "llama"), asked()))
    session: Any = backend.open()
    forward, sizes = session._forward, []

    def small(rows: Any, groups: Any) -> Any:
        sizes.append(sum(len(group.places) for group in groups))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("no memory")
        return forward(rows, groups)

    monkeypatch.setattr(session, "_forward", small)
    np.testing.assert_allclose(margins(answers(backend, asked())), expected, atol=1e-3)
    assert sizes[0] > 2 >= sizes[-1]

    def never(rows: Any, groups: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(session, "_forward", never)
    with pytest.raises(PrfError, match=r"no memory for one prompt of \d+ tokens"):
        answers(backend, asked())


def test_logits_that_are_no_numbers_are_refused(folder: Path, monkeypatch: Any) -> None:
    backend = tiny(folder, "llama", batch_tokens=7777)
    session: Any = backend.open()
    forward = session._forward
    monkeypatch.setattr(session, "_forward", lambda *given: forward(*given) * float("nan"))
    with pytest.raises(PrfError, match="logits are not finite numbers in float32"):
        answers(backend, asked())


@pytest.mark.parametrize("kind", KINDS)
def test_only_passages_are_cut_and_told(folder: Path, kind: str) -> None:
    backend = tiny(folder, kind, max_passage_tokens=3)
    session: Any = backend.open()
    question = Question("cat", "one two three four five", "six seven")
    row, cut = session._fitted(question)
    assert (row, cut) == (Question("cat", "one two three", "six seven"), 1)
    (found,) = answers(backend, [question])
    (short,) = answers(tiny(folder, kind), [Question("cat", "one two three", "six seven")])
    assert found.margin == pytest.approx(short.margin, abs=1e-5)
    assert found.cut == 1


def test_prompt_longer_than_the_model_shares_what_is_left(folder: Path) -> None:
    backend = tiny(folder, "llama", max_passage_tokens=1000, max_query_tokens=1000)
    session: Any = backend.open()
    fitted, cut = session._fitted(Question("cat", "one " * 300, "six seven"))
    assert cut == 1
    assert fitted.second == "six seven"
    assert len(session._row(fitted)) == 128
    with pytest.raises(SpecError, match=r"prompt and query alone take \d+ of the 128 tokens"):
        session._fitted(Question("cat " * 200, "one", "six"))


def test_words_of_the_chat_template_inside_a_passage_are_no_command(folder: Path) -> None:
    session: Any = tiny(folder, "chat").open()
    row = session._row(session._fitted(Question("cat", "dog </s> <s> fish", "oil"))[0])
    special = [token for token in row if token in (1, 2)]
    assert special == [1, 2, 1]


def test_stage_names_queries_with_cut_passages(folder: Path) -> None:
    rows = pd.DataFrame(
        {"qid": "q", "query": "cat", "docno": ["a", "b"], "score": [2.0, 1.0],
         "text": ["one two three four", "six"]}
    )  # fmt: skip
    with logging_to(Log()) as log:
        PRP(tiny(folder, "llama", max_passage_tokens=3))(rows)
    assert log.notices == {"have passages that were cut to the backend's max_passage_tokens": ["q"]}


def test_labels_that_are_no_single_tokens_are_refused(folder: Path) -> None:
    with pytest.raises(IndexStateError, match=r"'printers' and 'papers' are not one token each"):
        tiny(folder, "t5", labels=("Passage printers", "Passage papers")).open()


def test_model_that_writes_no_label_is_refused_at_start(folder: Path) -> None:
    """A random model writes anything."""
    with pytest.raises(PrfError, match=r"answers two plain questions with .* instead of Passage A"):
        tiny(folder, "t5", mode="generate").open()


def test_model_without_some_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in (folder / "llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IndexStateError, match=r"lacks 1 of its weights: lm_head\.weight"):
        LocalModel(str(tmp_path)).open()


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(IndexStateError, match="language model 'no/such' is neither"):
        LocalModel("no/such").open()


def test_changed_template_or_weights_are_read_anew(folder: Path, tmp_path: Path) -> None:
    """As after an edit in a notebook, in one process."""
    (tmp_path / "m").mkdir()
    for file in (folder / "llama").iterdir():
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    template = tmp_path / "t.txt"
    template.write_text("{query} {a} {b}", encoding="utf-8")
    backend = LocalModel(str(tmp_path / "m"), template=str(template))
    identity, session = backend.identity(), backend.open()
    assert backend.open() is session
    template.write_text("{query}: {a} or {b}", encoding="utf-8")
    assert backend.identity() != identity
    other = backend.open()
    assert other is not session
    weights = tmp_path / "m" / "model.safetensors"
    os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1_000_000))
    assert backend.open() is not other


def test_soft_rule_needs_scores() -> None:
    with pytest.raises(SpecError, match="gives no margins; use hard"):
        PRP(LocalModel("m", mode="generate"), consistency="soft")


def test_cache_refuses_another_model_of_the_same_name(folder: Path, tmp_path: Path) -> None:
    rows = pd.DataFrame({"qid": "q", "query": "cat", "docno": ["a", "b"], "score": [2.0, 1.0],
                         "text": ["one two", "six"]})  # fmt: skip
    (tmp_path / "m").mkdir()
    for file in (folder / "llama").iterdir():
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    stage = PRP(LocalModel(str(tmp_path / "m")), cache=str(tmp_path / "c"))
    stage(rows)
    from prf.prp.backend import _opened

    changed: Any = stage.backend.open()
    changed.fingerprint = "other"
    with pytest.raises(IndexStateError, match="another model of the same name"):
        stage(rows.assign(query="dog"))
    _opened.cache_clear()


# A real model on real passages


def passages(queries: int = 2, n: int = 3) -> pd.DataFrame:
    """Returns the first passages BM25 finds for the first queries of dl19."""
    run = prf.read_run(DL19.topics.parent / "runs" / "dl19.bm25.trec.gz")
    topics = prf.read_topics(DL19.topics).head(queries)
    chosen = run[run["qid"].isin(topics["qid"]) & (run["rank"] < n)]
    wanted = set(chosen["docno"])
    with gzip.open(DL19.docs, "rt", encoding="utf-8") as lines:
        found = (json.loads(line) for line in lines)
        text = {doc["docno"]: doc["text"] for doc in found if doc["docno"] in wanted}
    out = chosen.merge(topics, on="qid").reset_index(drop=True)
    return out.assign(text=[text[docno] for docno in out["docno"]])


def smollm(**settings: Any) -> LocalModel:
    return LocalModel(str(SMOLLM), gguf_file=GGUF, **settings)


def pairs_of(frame: pd.DataFrame) -> list[Question]:
    return [
        Question(query, " ".join(a.split()), " ".join(b.split()))
        for query, part in frame.groupby("query", sort=False)
        for a in part["text"]
        for b in part["text"]
        if a != b
    ]


@pytest.fixture(scope="module")
def real() -> list[Question]:
    return pairs_of(passages())


@needs_smollm
@pytest.mark.slow
def test_real_scores_are_those_of_a_plain_forward_pass(real: list[Question]) -> None:
    import torch

    backend = smollm()
    session: Any = backend.open()
    tokenizer = session._tokenizer
    letters = [[tokenizer.encode(f"{blank}{x}")[0] for blank in ("", " ")] for x in "AB"]
    assert [tokenizer.decode(ids) for ids in letters] == ["A A", "B B"]
    for question, answer in list(zip(real, answers(backend, real), strict=True))[::3]:
        text = session._template.fill(question)
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(turn + "Passage", return_tensors="pt", add_special_tokens=False).input_ids
        with torch.inference_mode():
            logits = session._model(input_ids=ids).logits[0, -1].double()
        margin = float(logits[letters[0]].logsumexp(0) - logits[letters[1]].logsumexp(0))
        assert answer.margin == pytest.approx(margin, abs=1e-3)
        assert answer.win == np.sign(margin)


@needs_smollm
@pytest.mark.long
def test_real_verdicts_do_not_depend_on_the_batch(real: list[Question]) -> None:
    expected = answers(smollm(), real)
    for backend in (smollm(batch_tokens=1), smollm(share_prefix=False)):
        found = answers(backend, real)
        np.testing.assert_allclose(margins(found), margins(expected), atol=1e-3)
        assert [answer.win for answer in found] == [answer.win for answer in expected]


@needs_smollm
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["score", pytest.param("generate", marks=pytest.mark.long)])
def test_real_run_end_to_end_and_again_without_a_call(tmp_path: Path, mode: Any) -> None:
    frame = passages()
    stage = PRP(smollm(mode=mode), k=2, cache=str(tmp_path / "c"))
    with logging_to(Log()):
        out, first = stage.measured(frame)
        again, second = stage.measured(frame)
        offline = replace(stage, offline=True)(frame)
    assert sorted(out["docno"]) == sorted(frame["docno"])
    assert out.equals(again)
    assert out.equals(offline)
    assert first["prompts_sent"].sum() > 0 == second["prompts_sent"].sum()
    assert (first["invalid_rate"] == 0).all()
    assert (first["prompt_tokens"] > 100 * first["prompts_sent"]).all()


# The same as llm-rankers, whose template is read from its package


def their_source() -> str | None:
    """Returns the text of llm-rankers' pairwise ranker, which is not imported."""
    spec = find_spec("llmrankers")
    if spec is None or not spec.submodule_search_locations:
        return None
    return (Path(spec.submodule_search_locations[0]) / "pairwise.py").read_text(encoding="utf-8")


THEIRS = their_source()


@pytest.fixture(scope="module")
def their_template(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = re.search(r'self\.prompt = """(.*?)"""', str(THEIRS), flags=re.DOTALL)
    assert found
    text = found[1].replace("{doc1}", "{a}").replace("{doc2}", "{b}")
    path = tmp_path_factory.mktemp("theirs") / "pairwise.txt"
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


@needs_smollm
@pytest.mark.slow
@pytest.mark.parametrize("start", [" Passage:", "Passage"])
@pytest.mark.skipif(THEIRS is None, reason="llm-rankers is not installed")
def test_verdicts_equal_those_of_llm_rankers(
    real: list[Question], their_template: str, start: str, monkeypatch: Any
) -> None:
    """Its steps for chat models: " Passage:" after the template, one greedy token, upper case.

    This model then writes no letter, so it would be refused at the start.
    """
    import torch

    from prf.prp.models import _ModelSession

    monkeypatch.setattr(_ModelSession, "probe", lambda self: None)
    backend = smollm(mode="generate", template=their_template, answer_start=start)
    session: Any = backend.open()
    tokenizer, model = session._tokenizer, session._model
    for question, answer in list(zip(real, answers(backend, real), strict=True))[::3]:
        text = Path(their_template).read_text(encoding="utf-8").removesuffix("\n")
        text = text.format(query=question.query, a=question.first, b=question.second)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer([prompt + start], return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=1)
        written = tokenizer.decode(out[0][inputs.input_ids.shape[1] :]).strip().upper()
        assert answer.raw.strip().upper() == written
        assert answer.valid == (start == "Passage")
        assert (answer.win if answer.valid else None) == {"A": 1, "B": -1}.get(written)

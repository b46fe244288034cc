"""Text encoders that read feedback, dense and sparse: input, losses of LoL, trainings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from conftest import ROOT, queries, results, save_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from test_training import naive

import prf
from prf import EncoderPrf, SparseEncoderPrf, SpecError
from prf.cli import main
from prf.errors import IndexStateError
from prf.layouts import Marks, feedback_ids, segments
from prf.losses import DenseMatrix, SparseMatrix, comparative, full_softmax
from prf.lucene import open_index as open_lucene
from prf.sparse_models import load_revised
from prf.sparse_network import LargestLogits, SparseEncoder
from prf.spec import from_spec, to_spec
from prf.training_config import SparseNetwork, Training
from prf.training_tasks import EncoderTask, FeedbackTask, Revisions, SparseTask, open_impacts
from prf.trec import read_docs

MARKS = Marks(1, 2, 0)
COLLECTION = ROOT / "prf" / "collection"


# LoL's input


def lol(query: list[int], passages: list[list[int]], **lengths: int) -> tuple[list[int], bool]:
    lengths = {"max_length": 40, "query_length": 6, "passage_length": 12, **lengths}
    return feedback_ids("cls", query, passages, MARKS, truncation="lol", **lengths)


def test_lol_input_cuts_query_and_each_passage() -> None:
    ids, cut = lol([7] * 9, [[8] * 30, [9] * 3])
    assert ids == [1, *[7] * 4, 2, *[8] * 10, 2, *[9] * 3, 2]
    assert cut


def test_lol_last_passage_ends_early_so_that_its_separator_fits() -> None:
    ids, cut = lol([7] * 4, [[8] * 10, [9] * 10, [5] * 11], max_length=39, passage_length=13)
    assert ids == [1, *[7] * 4, 2, *[8] * 10, 2, *[9] * 10, 2, *[5] * 10, 2]
    assert (len(ids), cut) == (39, True)


def test_lol_starts_no_passage_where_fewer_than_ten_positions_are_left() -> None:
    first = [1, 7, 2, *[8] * 10, 2]
    assert lol([7], [[8] * 10, [9] * 10], max_length=14 + 9)[0] == first
    assert lol([7], [[8] * 10, [9] * 10], max_length=14 + 10)[0] == [*first, *[9] * 9, 2]
    # And none after it, however short: the order stays that of the ranks.
    assert lol([7], [[8] * 10, [9] * 10, [5]], max_length=14 + 9)[0] == first


def test_lol_input_without_passages_is_the_query() -> None:
    assert lol([7, 7], []) == ([1, 7, 7, 2], False)


@given(
    st.integers(0, 12),
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(12, 60),
    st.integers(3, 60),
)
def test_lol_input_always_fits_and_ends_with_a_separator(
    query: int, passages: list[int], most: int, each: int
) -> None:
    ids, cut = lol(
        [7] * query, [[8] * size for size in passages], max_length=most,
        passage_length=min(each, most),
    )  # fmt: skip
    assert len(ids) <= most
    assert (ids[0], ids[-1]) == (1, 2)
    assert cut == (ids.count(7) < query or ids.count(8) < sum(passages))


def test_token_types_change_after_the_query() -> None:
    ids = np.array([[1, 7, 2, 8, 2, 9, 2, 0], [1, 7, 7, 7, 2, 0, 0, 0]])
    expected = [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert segments(ids, 2).tolist() == expected
    assert segments(torch.from_numpy(ids), 2).tolist() == expected


# LoL's losses


def test_comparison_of_the_worked_example() -> None:
    """design: losses 2.0 with 5 passages, 1.5 with 3, 1.8 with 1."""
    losses = torch.tensor([[2.0, 1.5, 1.8]], dtype=torch.float64)
    assert comparative(losses).item() == pytest.approx(0.7 / 3, abs=1e-12)


def test_one_revision_alone_is_not_compared() -> None:
    assert comparative(torch.tensor([[3.0], [1.0]])).tolist() == [0.0, 0.0]


def test_gradient_of_the_comparison_reaches_both_sides() -> None:
    losses = torch.tensor([[2.0, 1.5, 1.8]], requires_grad=True)
    comparative(losses).sum().backward()
    np.testing.assert_allclose(losses.grad, [[2 / 3, -1 / 3, -1 / 3]], atol=1e-7)


def random_rows(dense: np.ndarray[Any, Any]) -> SparseMatrix:
    rows, terms = np.nonzero(dense)
    ptr = np.searchsorted(rows, np.arange(len(dense) + 1))
    return SparseMatrix(ptr, terms, dense[rows, terms].astype(np.float32), dense.shape[1])


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_lol_loss_and_gradient_are_those_of_the_definition(
    kind: str, chunk: int, weight: float
) -> None:
    """Three revisions of each of three queries; naive: one revision, one pair at a time."""
    rng = np.random.default_rng(8)
    dense = rng.standard_normal((19, 12)) * (rng.random((19, 12)) < 0.5)
    dense = dense.astype(np.float32).astype(np.float64)
    new = rng.standard_normal((3, 3, 12))  # the revision with the most feedback first
    lists = [[3, 8], [0], [5, 6, 18]]
    losses, gradient = np.zeros((3, 3)), np.zeros_like(new)
    steps = np.zeros((3, 3, 12))
    for revision in range(3):
        losses[:, revision], steps[:, revision] = naive(
            new[:, revision], dense, lists, 0.5, "lowest", [0, 0, 0]
        )
    total = 0.0
    for query in range(3):
        for revision in range(3):
            total += losses[query, revision] / 3
            gradient[query, revision] += steps[query, revision] / 3
        for more, fewer in ((0, 1), (0, 2), (1, 2)):
            if losses[query, more] > losses[query, fewer]:
                total += weight * (losses[query, more] - losses[query, fewer]) / 3
                gradient[query, more] += weight * steps[query, more] / 3
                gradient[query, fewer] -= weight * steps[query, fewer] / 3

    matrix = DenseMatrix(torch.tensor(dense)) if kind == "dense" else random_rows(dense)
    ours = torch.tensor(new, requires_grad=True)
    flat = [rows for rows in lists for _ in range(3)]
    made = full_softmax(
        ours.view(9, 12),
        matrix,
        torch.tensor([row for rows in flat for row in rows]),
        torch.tensor([number for number, rows in enumerate(flat) for _ in rows]),
        temperature=0.5,
        chunk_rows=chunk,
    ).view(3, 3)
    whole = (made.mean(dim=1) + weight * comparative(made)).sum()
    whole.backward()
    assert whole.item() == pytest.approx(total, abs=1e-6)
    np.testing.assert_allclose(ours.grad, gradient, rtol=0, atol=1e-6)


def test_sparse_rows_have_the_products_of_dense_ones() -> None:
    rng = np.random.default_rng(2)
    dense = (rng.random((9, 7)) * (rng.random((9, 7)) < 0.4)).astype(np.float32)
    dense[3] = 0  # a document without terms
    sparse, plain = random_rows(dense), DenseMatrix(torch.tensor(dense))
    q, weights = torch.randn(4, 7), torch.rand(4, 5)
    assert len(sparse) == len(plain) == 9
    for start, stop in ((0, 9), (2, 7)):
        torch.testing.assert_close(sparse.scores(q, start, stop), plain.scores(q, start, stop))
    torch.testing.assert_close(sparse.mixed(weights, 2, 7), plain.mixed(weights, 2, 7))
    owners, rows = torch.tensor([0, 0, 3, 2]), torch.tensor([3, 8, 0, 0])
    torch.testing.assert_close(sparse.paired(q, owners, rows), plain.paired(q, owners, rows))


def test_largest_logits_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    given = torch.randn(11, dtype=torch.float64)
    given[3] = 0
    gradients = []
    for largest in (LargestLogits.apply(hidden, weight), (hidden @ weight.T).amax(dim=0)):
        hidden.grad = weight.grad = None
        (largest * given).sum().backward()
        gradients.append((largest.detach(), hidden.grad, weight.grad))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# Trainings on the embedded collection with tiny models


@dataclass
class World:
    """Tiny models, indexes of the embedded collection made with them, and configs."""

    folder: Path

    def __post_init__(self) -> None:
        docs = list(read_docs(str(COLLECTION / "docs.jsonl")))[:120]
        self.docs = self.folder / "docs.jsonl"
        lines = [json.dumps({"docno": docno, "text": text}) for docno, text in docs]
        self.docs.write_text("\n".join(lines), encoding="utf-8")
        self.texts = [text for _, text in docs]
        known = {docno for docno, _ in docs}
        qrels = (COLLECTION / "qrels.txt").read_text("utf-8").splitlines()
        kept = [line for line in qrels if line.split()[2] in known]
        (self.folder / "qrels").write_text("\n".join(kept) + "\n", encoding="utf-8")
        judged = {line.split()[0] for line in kept if line.split()[3] != "0"}
        topics = (COLLECTION / "topics.tsv").read_text("utf-8").splitlines()
        topics = [line for line in topics if line.split("\t")[0] in judged]
        for name, part in (("train", topics[::2]), ("dev", topics[1::2])):
            (self.folder / f"{name}.tsv").write_text("\n".join(part[:16]) + "\n", "utf-8")

    def model(self, layout: str) -> str:
        folder = self.folder / layout
        if not folder.exists():
            made = {"ance": lambda: tiny_models.save_ance(folder, self.texts, dim=16)}
            made |= dict.fromkeys(
                ("tct", "mean-l2"), lambda: tiny_models.save_bert(folder, self.texts)
            )
            made |= dict.fromkeys(
                ("cls", "mean"), lambda: tiny_models.save_distilbert(folder, self.texts)
            )
            made["sparse"] = lambda: self._sparse(folder)
            made[layout]()
        return str(folder)

    def _sparse(self, folder: Path) -> Path:
        words = self.folder / "words"
        tiny_models.save_word_tokenizer(words, self.texts)
        save_checkpoint(folder, "splade", words, width=32, spread=0.3)
        return folder

    def index(self, layout: str) -> str:
        path = self.folder / f"index-{layout}"
        if not path.exists():
            docs = zip([f"d{i}" for i in range(len(self.texts))], self.texts, strict=True)
            docs = list(read_docs(str(self.docs)))
            if layout == "sparse":
                prf.build_sparse(path, docs, self.model(layout), kind="splade")
            else:
                prf.build_dense(path, docs, self.model(layout), layout=layout)
        return str(path)

    def first(self, layout: str) -> prf.Transformer:
        if layout == "sparse":
            return prf.Splade(self.model(layout)) >> prf.Impact(self.index(layout), k=20)
        encoder = prf.QueryEncoder(self.model(layout), layout=layout)
        return encoder >> prf.DenseRetriever(self.index(layout), k=20)

    def spec(self, layout: str, output: str = "m", **more: Any) -> dict[str, Any]:
        """Returns a config; mappings in ``more`` are added to, other values replaced."""
        sparse = layout == "sparse"
        encoder = {"QueryEncoder": {"model": self.model(layout), "layout": layout}}
        if sparse:
            encoder = {"Splade": {"model": self.model(layout)}}
        parts = {
            name: {
                "topics": f"{self.folder}/{name}.tsv",
                "qrels": f"{self.folder}/qrels",
                "queries": encoder,
            }
            for name in ("train", "dev")
        }
        network: dict[str, Any] = {"base": self.model(layout), "fb_docs": 3, "dropout": 0.1}
        network |= {"max_length": 64, "query_length": 24, "passage_length": 24}
        if sparse:
            network |= {"skip": 5, "activation": "log1p"}
        else:
            network |= {"layout": layout, "truncation": "lol"}
        spec: dict[str, Any] = {
            "method": "sparse_encoder" if sparse else "encoder",
            "output": f"{self.folder}/{output}",
            "index": self.index(layout),
            "cache": f"{self.folder}/cache",
            "texts": str(self.docs),
            "train": parts["train"],
            "dev": {**parts["dev"], "k": 20},
            "network": network,
            "loss": {"temperature": 5.0 if sparse else 1.0, "n_compare": 1, "lambda_cr": 1.0},
            "loop": {
                "epochs": 2,
                "batch_size": 4,
                "learning_rate": 1e-3,
                "threads": 1,
                "depths": [0, 1, 2, 3],
                "shuffle": True,
            },
        }
        for name, value in more.items():
            spec[name] = {**spec[name], **value} if isinstance(value, dict) else value
        return spec

    def config(self, layout: str, output: str = "m", **more: Any) -> Training:
        return Training.read(self.spec(layout, output, **more))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


DENSE = ["ance", "tct", "cls", "mean", "mean-l2"]
pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore:.*were cut")]


def marked(layouts: list[str]) -> list[Any]:
    sparse = pytest.param("sparse", marks=pytest.mark.java)
    return [*layouts, sparse]


def stage_of(layout: str, model: Path | str, **more: Any) -> prf.Transformer:
    kind = SparseEncoderPrf if layout == "sparse" else EncoderPrf
    return kind(str(model), fb_docs=3, **more)


def texts_found(world: World, layout: str, name: str = "dev") -> Any:
    frame = prf.read_topics(world.folder / f"{name}.tsv")
    return (world.first(layout) >> prf.Text(str(world.docs))).transform(frame)


@pytest.mark.parametrize("layout", marked(DENSE))
def test_training_learns_and_the_stage_serves_what_was_trained(
    world: World, layout: str, tmp_path: Path
) -> None:
    config = world.config(layout, f"served-{layout}", loop={"epochs": 4})
    record = prf.train(config, force=True)
    losses = [entry["loss"] for entry in record["epochs"]]
    assert losses[-1] < losses[0]
    # The dev figure is that of the pipeline a user builds.
    search = world.first(layout).stages[-1]
    stage = stage_of(layout, config.output, query_alone=True)
    run = (stage >> search).transform(texts_found(world, layout))
    frame = prf.read_topics(config.dev.topics)
    found = prf.evaluate(run, prf.read_qrels(config.dev.qrels), ["nDCG@10"], topics=frame)
    assert found.mean.iloc[0] == pytest.approx(record["dev"], abs=1e-9)
    assert set(record["fingerprints"]) == {"index", "train", "dev", "texts", "base"}


@pytest.mark.parametrize("layout", marked(["ance", "cls", "mean-l2"]))
def test_before_any_update_the_network_is_its_base(world: World, layout: str) -> None:
    """Head included: nothing is drawn anew, and k = 0 is the base's own query."""
    config = world.config(layout, network={"dropout": 0.0})
    task = (SparseTask if layout == "sparse" else EncoderTask)(config)
    task.network.eval()
    with torch.inference_mode():
        new = task.vectors(task.data, task.ranked(task.data, np.arange(4), 0)).numpy()
    frame = prf.read_topics(config.train.topics)
    own = config.train.queries.transform(frame).set_index("qid").loc[task.data.qids[:4]]
    if layout != "sparse":
        np.testing.assert_allclose(new, np.stack(own["query_vec"]), atol=1e-5)
        return
    column_of = {term: number for number, term in enumerate(task.network.vocabulary)}
    for row, toks in zip(new, own["query_toks"], strict=True):
        levels = np.rint(row / 5 * 256)
        skipped = {term for term in toks if column_of[term] < 5 and term != "[UNK]"}
        assert {t: levels[column_of[t]] for t in toks if t not in skipped} == pytest.approx(
            {t: w for t, w in toks.items() if t not in skipped}, abs=1
        )


def test_pooling_over_the_query_sees_the_passages_and_starts_from_the_base(world: World) -> None:
    config = world.config("mean-l2", "pooled", network={"dropout": 0.0, "pool": "query"})
    task = EncoderTask(config)
    task.network.eval()
    rows = np.array([[4, 9, -1]] * 2)
    with torch.inference_mode():
        alone, fed = task.vectors(task.data, Revisions(np.zeros(2, int), np.array([0, 2]), rows))
    text = str(task.data.texts[0])
    base = prf.load_encoder(world.model("mean-l2"), layout="mean-l2").encode([text], "query")[0]
    np.testing.assert_allclose(alone, base, atol=1e-5)
    assert not torch.allclose(alone, fed, atol=1e-3)
    # By hand: the mean over what stands up to the first separator, of the whole input.
    reader, network = task.read.reader, task.read.backbone
    passages = [[world.texts[4], world.texts[9]]]
    ids, _ = reader.feedback([text], passages, **task.passages.packing)
    given = torch.tensor(ids)
    end = ids[0].index(reader.marks.sep) + 1
    with torch.inference_mode():
        types = (torch.arange(len(ids[0])) >= end).long()[None]
        hidden = network(input_ids=given, token_type_ids=types).last_hidden_state[0, :end]
    expected = torch.nn.functional.normalize(hidden.mean(0), dim=0)
    torch.testing.assert_close(fed, expected, rtol=0, atol=1e-5)


def test_model_trained_anew_is_served_anew(world: World) -> None:
    frame, found = texts_found(world, "mean-l2"), []
    for seed in (1, 2):
        prf.train(world.config("mean-l2", "anew", loop={"epochs": 1, "seed": seed}), force=True)
        stage = EncoderPrf(f"{world.folder}/anew", query_alone=True)
        found.append(np.stack(stage.transform(frame)["query_vec"]))
    assert not np.allclose(found[0], found[1], atol=1e-4)


@pytest.mark.java
def test_sparse_network_and_the_served_model_agree(world: World) -> None:
    made = SparseNetwork(base=world.model("sparse"), skip=5, activation="relu")
    network = SparseEncoder(made).eval()
    served = load_revised(world.model("sparse"), "cpu", "relu", 5, True)
    packed, _ = network.reader.feedback(
        ["how birds find south", ""], [world.texts[:2], []], truncation="lol", query_length=20
    )
    found = served.encode_ids(packed, "query")
    for number, ids in enumerate(packed):
        with torch.inference_mode():
            row = network(
                torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), two_parts=True
            )[0]
        part = slice(found.ptr[number], found.ptr[number + 1])
        assert row.nonzero()[:, 0].tolist() == found.ids[part].tolist()
        np.testing.assert_allclose(row[row > 0], found.values[part], atol=1e-5)
        assert not set(range(5)) & set(found.ids[part].tolist()) - {1}  # [UNK] may stay


@pytest.mark.java
def test_impacts_are_the_rows_of_the_index(world: World) -> None:
    index = open_lucene(world.index("sparse"))
    vocabulary = load_revised(world.model("sparse"), "cpu", "relu", 5, True).vocabulary
    rows = open_impacts(index, vocabulary, "cpu")
    held = index.term_vectors(np.array([7]))
    expected = {held.vocabulary[t]: w for t, w in zip(held.terms, held.tf, strict=True)}
    part = slice(int(rows.ptr[7]), int(rows.ptr[8]))
    names = vocabulary[rows.terms[part].numpy()]
    assert dict(zip(names, rows.weights[part].tolist(), strict=True)) == expected
    assert (np.diff(rows.terms[part].numpy()) > 0).all()
    with pytest.raises(IndexStateError, match="holds no term of the model"):
        open_impacts(index, np.array(["##none"], dtype=object), "cpu")


def test_revisions_are_prefixes_of_one_order(world: World) -> None:
    task = EncoderTask(world.config("cls", loss={"n_compare": 2, "lambda_cr": 0.5}))
    feedback = np.array(task.data.feedback)
    feedback[1, 1:] = -1  # a query with one document only
    object.__setattr__(task.data, "feedback", feedback)
    orders = set()
    for seed in range(20):
        batch = task.batch(np.arange(4), np.random.default_rng(seed))
        assert batch.depths.shape == (4, 3)
        for depths, rows, query in zip(batch.depths, batch.rows, batch.queries, strict=True):
            assert (np.diff(depths) < 0).all()
            assert set(depths) <= {0, 1, 2, 3}
            assert sorted(rows) == sorted(feedback[query])
        assert batch.rows[1].tolist() == feedback[1].tolist()
        orders.add(tuple(batch.rows[0]))
    assert len(orders) > 2
    ranked = EncoderTask(world.config("cls", loop={"shuffle": False}))
    batch = ranked.batch(np.arange(4), np.random.default_rng(1))
    np.testing.assert_array_equal(batch.rows, ranked.data.feedback[:4])


def test_missing_passages_are_not_read(world: World) -> None:
    """A query with two documents is the same at every depth from two on."""
    task = EncoderTask(world.config("mean-l2", network={"dropout": 0.0}))
    rows = np.array([[4, 9, -1]] * 3)
    revisions = Revisions(np.zeros(3, dtype=np.int64), np.array([1, 2, 3]), rows)
    with torch.inference_mode():
        new = task.vectors(task.data, revisions)
    torch.testing.assert_close(new[1], new[2], rtol=0, atol=1e-6)
    assert not torch.allclose(new[0], new[1], atol=1e-3)


@pytest.mark.parametrize("group", [1, 3])
def test_groups_of_like_length_change_rounding_only(world: World, group: int) -> None:
    made = []
    for size in (group, 100):
        task = EncoderTask(world.config("ance", network={"dropout": 0.0}, loop={"group": size}))
        batch = task.batch(np.arange(6), np.random.default_rng(3))
        losses = task.losses(batch, slice(0, 6))
        losses.sum().backward()
        made.append([losses.detach(), *(p.grad for p in task.network.parameters())])
    for ours, theirs in zip(*made, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_losses_of_the_task_are_mean_and_comparison(world: World) -> None:
    config = world.config("cls", network={"dropout": 0.0}, loss={"lambda_cr": 2.0})
    task = EncoderTask(config)
    batch = task.batch(np.arange(5), np.random.default_rng(3))
    with torch.inference_mode():
        found = task.losses(batch, slice(0, 5))
        by_hand = []
        for place, query in enumerate(batch.queries):
            own = []
            for depth in batch.depths[place]:
                one = Revisions(np.array([query]), np.array([depth]), batch.rows[place][None])
                vector = task.vectors(task.data, one)[0].numpy().astype(np.float64)
                docs = np.asarray(task.index.vectors, dtype=np.float64)
                positives = task.data.positives.of(np.array([query])).rows.tolist()
                own.append(naive(vector[None], docs, [positives], 1.0, "lowest", [0])[0][0])
            more, fewer = own
            by_hand.append((more + fewer) / 2 + 2.0 * max(0.0, more - fewer))
    np.testing.assert_allclose(found, by_hand, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", marked(["mean-l2"]))
def test_interrupted_training_of_an_encoder_goes_on_exactly(
    world: World, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at five updates; shared weights (the masked language model's) come back shared."""
    more = {"loop": {"epochs": 2, "save_every": 1}}
    whole = world.config(layout, f"whole-{layout}", **more)
    prf.train(whole, force=True)
    broken = world.config(layout, f"broken-{layout}", **more)
    losses, left = FeedbackTask.losses, [0]

    def interrupted(*given: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return losses(*given)

    for tries in (1, 3, 0, 2, 1):
        left[0] = tries
        with monkeypatch.context() as patch:
            patch.setattr(FeedbackTask, "losses", interrupted)
            with pytest.raises(KeyboardInterrupt):
                prf.train(broken)
    prf.train(broken)
    one, other = (Path(c.output) / "model.safetensors" for c in (whole, broken))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("layout", marked(["cls"]))
def test_every_depth_from_none_on_is_served(world: World, layout: str) -> None:
    made = "query_toks" if layout == "sparse" else "query_vec"
    frame = texts_found(world, layout)
    kind = SparseEncoderPrf if layout == "sparse" else EncoderPrf
    more = {"activation": "log1p", "skip": 5} if layout == "sparse" else {"layout": layout}
    common = {"max_length": 64, "query_length": 24, **more}
    stages = [kind(world.model(layout), fb_docs=k, query_alone=True, **common) for k in range(6)]
    found = [stage.transform(frame)[made].iloc[0] for stage in stages]
    assert all(len(vector) > 0 for vector in found)
    kept = kind(world.model(layout), fb_docs=0, **common).transform(frame)[made].iloc[0]
    assert np.array_equal(kept, frame[made].iloc[0])


def test_trained_model_says_how_it_reads(world: World) -> None:
    config = world.config("mean-l2", "says", loop={"epochs": 1})
    prf.train(config, force=True)
    frame = texts_found(world, "mean-l2")
    plain = EncoderPrf(config.output, query_alone=True).transform(frame)["query_vec"]
    told = EncoderPrf(
        config.output, layout="mean-l2", truncation="lol", max_length=64, query_length=24,
        passage_length=24, query_alone=True,
    ).transform(frame)["query_vec"]  # fmt: skip
    assert all(np.array_equal(a, b) for a, b in zip(plain, told, strict=True))
    with pytest.raises(SpecError, match="was trained with layout 'mean-l2'; leave layout out"):
        EncoderPrf(config.output, layout="cls").transform(frame)
    with pytest.raises(IndexStateError, match="of kind 'encoder', not 'sparse_encoder'"):
        SparseEncoderPrf(config.output).transform(frame)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"method": "tprf"}, "unknown key 'base' in network"),
        ({"method": ["encoder"]}, "method is ['encoder']; one of 'tprf'"),
        ({"network": {"pool": "query"}}, "network.pool 'query' is of the mean layouts only"),
        ({"network": {"max_length": 9999}}, "(the model's positions)"),
        ({"network": {"passage_length": 2}}, "passage_length 0 or at least 3, not 2"),
        ({"texts": "nowhere.jsonl"}, "texts: there is no 'nowhere.jsonl'"),
        ({"texts": None}, "method 'encoder' reads texts; add texts"),
        ({"network": {"layout": "clss"}}, "network.layout is 'clss'; one of 'ance', 'tct'"),
        ({"loss": {"n_compare": 4}}, "loss.n_compare is 4, but loop.depths holds only 4"),
        ({"loss": {"n_compare": 0}}, "loss.lambda_cr is 1.0, but n_compare 0"),
        ({"loss": {"lambda_cr": -1.0}}, "loss.lambda_cr is -1.0; at least 0"),
        ({"loop": {"depths": [1, 1]}}, "loop.depths holds a depth twice"),
        ({"dev": None, "loop": {"figure_every": 3}}, "loop.figure_every needs dev"),
        ({"network": {"query_length": 99}}, "network.query_length is 99; from 3 to max_length, 64"),
        ({"network": {"base": "nowhere"}}, "encoder 'nowhere' is neither a local folder"),
        ({"index": "nowhere"}, "nowhere"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_config_of_an_encoder_fails_in_one_line(
    world: World, more: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    import yaml

    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(world.spec("cls", "bad", **more)), encoding="utf-8")
    capsys.readouterr()  # what making the models said
    assert main(["train", str(path), "--no-progress"]) in (2, 4, 5)
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not (world.folder / "bad.training").exists()


def test_stage_in_yaml_and_repr(tmp_path: Path) -> None:
    for stage in (EncoderPrf("m"), SparseEncoderPrf("m", truncation="pyserini", skip=0)):
        assert from_spec(to_spec(stage)) == stage
        assert eval(repr(stage)) == stage


def test_underscores_of_a_blank_become_three(world: World) -> None:
    reader = prf.load_encoder(world.model("cls"), layout="cls").reader
    asked = ["a ________ b", "a ___ b", "a _ b"]
    long, three, one = reader.feedback(asked, [[]] * 3, truncation="lol").rows
    assert long == three != one
    assert reader.feedback(asked[:1], [[]]).rows[0] != three


def test_result_without_texts_is_refused(world: World) -> None:
    frame = results(("1", "fish", "a", 1.0), names="qid query docno score")
    with pytest.raises(prf.FrameError, match="text"):
        SparseEncoderPrf("m").transform(frame, queries(("1", "fish")))

"""Losses, TPRF's network and stage, training data, and trainings that are killed and go on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, queries, results
from hypothesis import given
from hypothesis import strategies as st

import prf
from prf import SpecError
from prf.cli import main
from prf.errors import FrameError, IndexStateError, PrfError
from prf.frames import column, objects
from prf.index import open_index
from prf.lamb import Lamb
from prf.losses import DenseMatrix, full_softmax, sampled_softmax
from prf.tprf import Tprf, load_tprf, save_tprf
from prf.training_config import Loop, Loss, TprfNetwork, Training, read_config
from prf.training_data import prepare
from prf.training_tasks import VectorTask, draw

pytestmark = pytest.mark.models

DIM = 8
FORKS = multiprocessing.get_context("forkserver")
# One process imports once and is forked for each kill.
FORKS.set_forkserver_preload(["__main__", "test_training", "prf.training_loop", "torch._dynamo"])


# Losses


def naive(
    q: np.ndarray[Any, Any],
    docs: np.ndarray[Any, Any],
    lists: list[list[int]],
    temperature: float,
    label: str,
    drawn: list[int],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Losses and the gradient of their sum by the definition, one query and label at a time."""
    losses, gradient = np.zeros(len(q)), np.zeros_like(q)
    for i, positives in enumerate(lists):
        scores = docs @ q[i] / temperature
        labels = positives
        if label == "lowest":
            labels = [min(positives, key=lambda row: scores[row])]
        elif label == "random":
            labels = [positives[drawn[i]]]
        for row in labels:
            kept = np.array([r == row or r not in positives for r in range(len(docs))])
            logits = np.where(kept, scores, -np.inf)
            share = np.exp(logits - logits.max())
            share /= share.sum()
            losses[i] -= np.log(share[row]) / len(labels)
            gradient[i] += (share @ docs - docs[row]) / temperature / len(labels)
    return losses, gradient


@pytest.fixture(scope="module")
def some() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    lists = [[4], [0, 7, 11], [2, 3], [16]]
    return {
        "q": rng.standard_normal((4, DIM)),
        "docs": rng.standard_normal((17, DIM)),
        "lists": lists,
        "rows": torch.tensor([row for rows in lists for row in rows]),
        "owners": torch.tensor([i for i, rows in enumerate(lists) for _ in rows]),
        "drawn": [0, 2, 1, 0],
        "places": torch.tensor([0, 3, 5, 6]),
    }


@pytest.mark.parametrize("label", ["lowest", "random", "each"])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_full_softmax_and_its_gradient_are_those_of_the_definition(
    some: dict[str, Any], label: Any, chunk: int
) -> None:
    q = torch.tensor(some["q"], requires_grad=True)
    loss = full_softmax(
        q,
        DenseMatrix(torch.tensor(some["docs"])),
        some["rows"],
        some["owners"],
        temperature=0.3,
        label=label,
        drawn=some["places"],
        chunk_rows=chunk,
    )
    loss.sum().backward()
    expected = naive(some["q"], some["docs"], some["lists"], 0.3, label, some["drawn"])
    np.testing.assert_allclose(loss.detach(), expected[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(q.grad, expected[1], rtol=0, atol=1e-6)


def test_gradient_of_the_chunked_loss_passes_the_numerical_check(some: dict[str, Any]) -> None:
    docs, q = DenseMatrix(torch.tensor(some["docs"])), torch.tensor(some["q"], requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: full_softmax(
            x, docs, some["rows"], some["owners"], temperature=0.5, label="each", chunk_rows=4
        ),
        (q,),
    )


def test_query_whose_positives_are_all_documents_has_no_loss() -> None:
    docs = DenseMatrix(torch.randn(3, DIM, dtype=torch.float64))
    q = torch.randn(1, DIM, dtype=torch.float64, requires_grad=True)
    rows, owners = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    loss = full_softmax(q, docs, rows, owners, temperature=1.0)
    loss.sum().backward()
    assert loss.tolist() == [0.0]
    assert q.grad.abs().max() == 0


def test_sampled_softmax_over_all_others_is_the_full_one(some: dict[str, Any]) -> None:
    docs, q = DenseMatrix(torch.tensor(some["docs"])), torch.tensor(some["q"])
    others = [[r for r in range(17) if r not in rows] for rows in some["lists"]]
    table = torch.tensor([rows + [-1] * (16 - len(rows)) for rows in others])
    given = (q, docs, some["rows"], some["owners"])
    sampled = sampled_softmax(*given, table, temperature=0.3)
    full = full_softmax(*given, temperature=0.3)
    np.testing.assert_allclose(sampled, full, rtol=0, atol=1e-12)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 4))
def test_negatives_are_drawn_from_the_own_list_without_repeats(sizes: list[int], n: int) -> None:
    from prf.training_data import Lists

    ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    lists = Lists(ptr, np.arange(ptr[-1]))
    table = draw(lists, n, np.random.default_rng(1))
    for i, rows in enumerate(table):
        real = rows[rows >= 0]
        assert len(real) == len(set(real.tolist())) == min(n, sizes[i])
        assert set(real.tolist()) <= set(range(ptr[i], ptr[i + 1]))


# The network


def network(residual: Any = "rocchio", fb_docs: int = 4, seed: int = 1, dim: int = DIM) -> Tprf:
    """Returns a small network with random weights, none of them zero."""
    config = TprfNetwork(fb_docs=fb_docs, layers=2, heads=2, feed_forward=16, residual=residual)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = Tprf(config, dim)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def vectors(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


@pytest.mark.parametrize("residual", ["none", "query", "rocchio"])
@pytest.mark.parametrize("grad", [True, False])
def test_masked_positions_change_nothing_at_all(residual: Any, grad: bool) -> None:
    net, q, docs = network(residual), vectors(5, DIM), vectors(5, 4, DIM, seed=1)
    present = torch.arange(4) < torch.tensor([0, 1, 2, 3, 4])[:, None]
    with torch.set_grad_enabled(grad):
        expected = net(q, docs, present)
        for junk in (1e30, float("nan"), float("inf"), 0.0):
            other = torch.where(present[:, :, None], docs, torch.tensor(junk))
            assert torch.equal(net(q, other, present), expected)


def test_masked_positions_get_no_gradient() -> None:
    net, q, docs = network(), vectors(2, DIM), vectors(2, 4, DIM, seed=1).requires_grad_()
    present = torch.tensor([[True, True, False, False], [True, False, False, False]])
    net(q, docs, present).sum().backward()
    assert (docs.grad.abs().sum(dim=2) > 0).equal(present)


def test_fewer_positions_equal_masked_ones() -> None:
    net, q, docs = network(), vectors(3, DIM), vectors(3, 4, DIM, seed=1)
    present = (torch.arange(4) < 2).expand(3, 4)
    short = net(q, docs[:, :2], present[:, :2])
    torch.testing.assert_close(short, net(q, docs, present), rtol=0, atol=1e-5)


def test_rank_is_seen() -> None:
    net, q, docs = network(), vectors(1, DIM), vectors(1, 2, DIM, seed=1)
    present = torch.ones(1, 2, dtype=torch.bool)
    assert not torch.allclose(net(q, docs, present), net(q, docs.flip(1), present), atol=1e-3)


def test_untrained_network_is_the_method_it_starts_from() -> None:
    q, docs = vectors(3, DIM), vectors(3, 2, DIM, seed=1)
    present = torch.tensor([[True, True], [True, False], [False, False]])
    for residual in ("query", "rocchio"):
        config = TprfNetwork(fb_docs=2, heads=2, residual=residual, alpha=0.4, beta=0.6)
        new = Tprf(config, DIM).eval()(q, docs, present).detach()
        expected = q.clone()
        if residual == "rocchio":
            expected[0] = 0.4 * q[0] + 0.6 * docs[0].mean(0)
            expected[1] = 0.4 * q[1] + 0.6 * docs[1, 0]
        torch.testing.assert_close(new, expected)


def test_saved_network_comes_back_as_it_was(tmp_path: Path) -> None:
    net = network()
    save_tprf(net, tmp_path / "m")
    again = load_tprf(tmp_path / "m")
    assert again.config == net.config
    for name, tensor in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert load_tprf(tmp_path / "m") is again


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda m: (m / "model.safetensors").unlink(), r"has no model\.safetensors"),
        (lambda m: (m / "config.json").write_text("{}"), r"config\.json is not that of a TPRF"),
        (lambda m: (m / "model.safetensors").write_bytes(b"x" * 99), "cannot be read"),
        (lambda m: save_as(m, layers=3), "lacks 12 of its weights"),
        (lambda m: save_as(m, dim=16), "weights do not fit"),
        (lambda m: save_as(m, layers="two"), "layers must be int"),
        (lambda m: save_as(m, colour=1), "unknown key 'colour'"),
    ],
)
def test_damaged_model_is_refused(tmp_path: Path, spoil: Any, says: str) -> None:
    save_tprf(network(), tmp_path / "m")
    spoil(tmp_path / "m")
    with pytest.raises(IndexStateError, match=says):
        load_tprf(tmp_path / "m")


def save_as(folder: Path, **values: Any) -> None:
    """Changes values in a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values), encoding="utf-8")


# The stage


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tprf") / "m"
    save_tprf(network(), folder)
    return str(folder)


def found(counts: dict[str, int]) -> tuple[Any, Any]:
    """Returns results with that many documents of each query, and the query frame."""
    q = {qid: vectors(DIM, seed=i).numpy() for i, qid in enumerate(counts)}
    d = {f"d{j}": vectors(DIM, seed=100 + j).numpy() for j in range(6)}
    rows = [
        (qid, "t", q[qid], f"d{j}", 9.0 - j, d[f"d{j}"])
        for qid, count in counts.items()
        for j in range(count)
    ]
    names = "qid query query_vec docno score doc_vec"
    frame = queries(*((qid, "t", q[qid]) for qid in counts), names="qid query query_vec")
    return results(*rows, names=names), frame


def test_stage_gives_what_the_network_gives(model: str) -> None:
    frame, qs = found({"a": 6, "b": 2, "c": 0})
    out = prf.TPRF(model).transform(frame, qs)
    net = load_tprf(model)
    for row, (qid, k) in enumerate({"a": 3, "b": 2}.items()):
        part = frame[frame["qid"] == qid].head(k)
        docs = torch.from_numpy(np.stack(part["doc_vec"].tolist()))[None]
        own = torch.from_numpy(qs["query_vec"][row])[None]
        expected = net(own, docs, torch.ones(1, k, dtype=torch.bool)).detach().numpy()[0]
        np.testing.assert_allclose(out["query_vec"][row], expected, rtol=0, atol=1e-5)
    assert out["query_vec"][2].tolist() == qs["query_vec"][2].tolist()


def test_query_alone_is_rewritten_when_asked_for(model: str) -> None:
    frame, qs = found({"a": 2, "b": 0})
    stage = prf.TPRF(model, fb_docs=0, query_alone=True)
    out = stage.transform(frame, qs)
    net, none = load_tprf(model), torch.zeros(2, 0, dtype=torch.bool)
    own = torch.from_numpy(np.stack(qs["query_vec"].tolist()))
    expected = net(own, torch.zeros(2, 0, DIM), none).detach().numpy()
    np.testing.assert_allclose(np.stack(out["query_vec"].tolist()), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_batch_size_changes_the_last_bits_at_most(model: str, batch_size: int) -> None:
    frame, qs = found({f"q{i}": i % 5 for i in range(9)})
    whole = prf.TPRF(model, fb_docs=4).transform(frame, qs)
    parts = prf.TPRF(model, fb_docs=4, batch_size=batch_size).transform(frame, qs)
    for a, b in zip(whole["query_vec"], parts["query_vec"], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_deeper_feedback_than_the_model_reads_is_refused(model: str) -> None:
    frame, qs = found({"a": 6})
    with pytest.raises(SpecError, match="reads at most 4 documents"):
        prf.TPRF(model, fb_docs=5).transform(frame, qs)


def test_vectors_of_another_encoder_are_refused(model: str) -> None:
    frame, _ = found({"a": 2})
    frame["query_vec"] = column(objects([np.zeros(5, np.float32)] * 2))
    with pytest.raises(FrameError, match="query vector has 5 numbers, the document vectors 8"):
        prf.TPRF(model).transform(frame)
    frame["doc_vec"] = column(objects([np.zeros(5, np.float32)] * 2))
    with pytest.raises(FrameError, match="model is for vectors of 8 numbers, query_vec has 5"):
        prf.TPRF(model).transform(frame)


# Training data


class Tiny:
    """A collection of 40 random documents and 30 queries near one of them, on disk."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(5)
        self.folder = folder
        docs = rng.standard_normal((40, DIM)).astype(np.float32)
        docs /= np.linalg.norm(docs, axis=1, keepdims=True)
        # Relevant is what a hidden turn of the query leads to, so that there is something to learn.
        turn = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0].astype(np.float32)
        ids = [f"d{i}" for i in range(40)]
        prf.build_vectors(folder / "ix", docs, ids)
        for name, n in (("train", 30), ("dev", 10)):
            q = rng.standard_normal((n, DIM)).astype(np.float32)
            q /= np.linalg.norm(q, axis=1, keepdims=True)
            best = np.argsort(-(q @ turn @ docs.T), axis=1)[:, :3]
            lines = [f"{name}{i} 0 d{d} 1\n" for i in range(n) for d in best[i]]
            qids = [f"{name}{i}" for i in range(n)]
            np.save(folder / f"{name}.npy", q)
            (folder / f"{name}.ids").write_text("\n".join(qids), encoding="utf-8")
            (folder / f"{name}.qrels").write_text("".join(lines), encoding="utf-8")
            topics = "".join(f"{qid}\twords\n" for qid in qids)
            (folder / f"{name}.tsv").write_text(topics, encoding="utf-8")

    def spec(self, output: str = "m", **more: Any) -> dict[str, Any]:
        """Returns a config as plain mappings; ``more`` replaces whole keys."""
        f = self.folder

        def part(name: str) -> dict[str, Any]:
            files = {"vectors": f"{f}/{name}.npy", "ids": f"{f}/{name}.ids"}
            return {
                "topics": f"{f}/{name}.tsv",
                "qrels": f"{f}/{name}.qrels",
                "queries": {"QueryVectors": files},
            }

        spec = {
            "output": f"{f}/{output}",
            "index": f"{f}/ix",
            "cache": f"{f}/cache",
            "train": part("train"),
            "dev": {**part("dev"), "k": 10},
            "network": {"fb_docs": 3, "layers": 1, "heads": 2, "feed_forward": 16},
            "loop": {"epochs": 4, "batch_size": 8, "learning_rate": 0.01, "threads": 1},
        }
        return {**spec, **more}

    def config(self, output: str = "m", **more: Any) -> Training:
        return Training.read(self.spec(output, **more))


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)


def prepared(config: Training, **more: Any) -> Any:
    return prepare(config.train, config.index, config.cache, fb_docs=3, **more)


def test_data_holds_first_results_positives_and_the_rest(tiny: Tiny) -> None:
    data = prepared(tiny.config(), negative_depth=6)
    q = np.load(tiny.folder / "train.npy")
    docs = np.asarray(open_index(tiny.folder / "ix").vectors)
    order = np.argsort(-(q @ docs.T), axis=1, kind="stable")
    assert data.qids.tolist() == [f"train{i}" for i in range(30)]
    np.testing.assert_array_equal(data.vectors, q)
    np.testing.assert_array_equal(data.feedback, order[:, :3])
    qrels = prf.read_qrels(tiny.folder / "train.qrels")
    for i, qid in enumerate(data.qids):
        own = np.array([i])
        relevant = [int(d[1:]) for d in qrels["docno"][qrels["qid"] == qid]]
        assert data.positives.of(own).rows.tolist() == sorted(relevant)
        expected = [row for row in order[i, :6].tolist() if row not in relevant]
        assert data.negatives.of(own).rows.tolist() == expected


def test_run_file_in_place_of_a_search_gives_the_same_data(tiny: Tiny) -> None:
    config = tiny.config()
    search = config.train.queries >> prf.DenseRetriever(config.index, k=10)
    prf.search(search, config.train.topics, tiny.folder / "r.run")
    given = prepared(replace(config, train=replace(config.train, run=f"{tiny.folder}/r.run")))
    np.testing.assert_array_equal(given.feedback, prepared(config).feedback)


def test_queries_and_judgments_without_documents_are_left_out_and_counted(tiny: Tiny) -> None:
    config = tiny.config()
    qrels = tiny.folder / "train.qrels"
    lines = [line for line in qrels.read_text("utf-8").splitlines() if " d7 " not in line]
    lines = [line for line in lines if not line.startswith("train4 ")]
    qrels.write_text("\n".join([*lines, "train4 0 elsewhere 1"]), encoding="utf-8")
    data = prepared(config)
    assert "train4" not in data.qids
    assert data.counts["positives_not_in_index"] == 1
    assert data.counts["topics"] == 30
    assert data.counts["without_positive"] >= 1
    assert len(prepared(config, all_queries=True)) == 30


def test_no_positive_at_all_is_an_error(tiny: Tiny) -> None:
    (tiny.folder / "train.qrels").write_text("train1 0 elsewhere 1\n", encoding="utf-8")
    with pytest.raises(PrfError, match=r"no query of .* has a document of grade 1"):
        prepared(tiny.config())
    assert not list((tiny.folder / "cache").glob("*"))


def test_unchanged_inputs_use_the_cache_and_changed_ones_do_not(tiny: Tiny) -> None:
    config = tiny.config()
    first = prepared(config).fingerprint
    stamps = [p.stat().st_mtime_ns for p in sorted((tiny.folder / "cache").rglob("*"))]
    assert prepared(config).fingerprint == first
    assert [p.stat().st_mtime_ns for p in sorted((tiny.folder / "cache").rglob("*"))] == stamps
    seen = {first, prepared(config, negative_depth=5).fingerprint}
    for file in ("train.tsv", "train.qrels"):
        path = tiny.folder / file
        lines = path.read_text("utf-8").splitlines()
        path.write_text("\n".join(reversed(lines)), encoding="utf-8")
        seen.add(prepared(config).fingerprint)
    np.save(tiny.folder / "train.npy", np.load(tiny.folder / "train.npy")[::-1])
    seen.add(prepared(config).fingerprint)
    assert len(seen) == 5


def test_interrupted_first_pass_goes_on_where_it_was(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepared(tiny.config(cache=f"{tiny.folder}/other"))
    monkeypatch.setattr("prf.training_data.BATCH", 8)
    search, asked = prf.DenseRetriever.search, []

    def counted(stage: Any, queries: Any) -> Any:
        asked.append(len(queries))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return search(stage, queries)

    monkeypatch.setattr(prf.DenseRetriever, "search", counted)
    with pytest.raises(KeyboardInterrupt):
        prepared(tiny.config())
    assert not list((tiny.folder / "cache").glob("*/meta.json"))
    data = prepared(tiny.config())
    assert asked == [8, 8, 8, 8, 6]  # two batches, the broken one, and what was left
    assert data.fingerprint == whole.fingerprint
    np.testing.assert_array_equal(data.feedback, whole.feedback)
    np.testing.assert_array_equal(data.vectors, whole.vectors)
    assert [path.name for path in (tiny.folder / "cache").iterdir()] == [data.fingerprint[:16]]


def test_half_written_data_is_never_taken(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(OSError, match="No space left"):
            prepared(tiny.config())
    assert not list((tiny.folder / "cache").glob("*/meta.json"))
    assert len(prepared(tiny.config())) == 30


# Trainings


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_training_improves_the_dev_figure_and_the_model_serves(tiny: Tiny) -> None:
    loop = {"epochs": 30, "batch_size": 8, "learning_rate": 0.01, "threads": 1}
    record = prf.train(tiny.config(loop=loop))
    figures = [entry["dev"] for entry in record["epochs"]]
    config = tiny.config()
    first = config.dev.queries >> prf.DenseRetriever(config.index, k=10)
    frame, qrels = prf.read_topics(config.dev.topics), prf.read_qrels(config.dev.qrels)
    before = prf.evaluate(first.transform(frame), qrels, ["nDCG@10"]).mean.iloc[0]
    assert record["dev"] == max(figures) > before + 0.1
    served = first >> prf.Vectors(config.index) >> prf.TPRF(config.output)
    served = served >> prf.DenseRetriever(config.index, k=10)
    again = prf.evaluate(served.transform(frame), qrels, ["nDCG@10"]).mean.iloc[0]
    assert again == pytest.approx(record["dev"], abs=1e-9)
    assert record["config"] == json.loads(json.dumps(tiny.config(loop=loop).spec()))
    assert set(record["fingerprints"]) == {"index", "train", "dev"}
    assert not (tiny.folder / "m.training").exists()


def test_global_random_state_and_threads_are_as_before(tiny: Tiny) -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    prf.train(tiny.config(loop={"epochs": 1, "threads": threads + 1}))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_seed_decides_the_weights_and_nothing_else_does(tiny: Tiny) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(ord(name))
        prf.train(tiny.config(name, loop={"epochs": 2, "seed": seed, "threads": 1}))
    a, b, c = (weights(tiny.folder / name) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    "more",
    [
        {"loss": {"kind": "sampled_softmax", "negatives": 4, "negative_depth": 10}},
        {"loss": {"label": "random"}},
        {"loss": {"label": "each", "chunk_rows": 7, "documents_on": "host"}},
        {"network": {"fb_docs": 0, "heads": 2, "feed_forward": 16}},
        {"loop": {"epochs": 2, "bf16": True, "depths": [0, 1, 3]}},
        {"loop": {"epochs": 2, "optimiser": "lamb", "learning_rate": 0.01}},
        {"loop": {"epochs": 2, "depths": [0, 1, 2, 3]}, "loss": {"n_compare": 2, "lambda_cr": 1.0}},
        {"dev": None},
    ],
    ids=lambda more: str(more)[:30],
)
def test_kinds_of_training_run(tiny: Tiny, more: dict[str, Any]) -> None:
    record = prf.train(tiny.config(**{"loop": {"epochs": 2}, **more}))
    assert len(record["epochs"]) == 2
    assert all(np.isfinite(entry["loss"]) for entry in record["epochs"])
    assert (record["dev"] is None) == ("dev" in more)
    load_tprf(tiny.folder / "m")


def test_accumulated_parts_give_the_gradient_of_the_whole_batch(tiny: Tiny) -> None:
    task = VectorTask(tiny.config(network={"fb_docs": 3, "heads": 2, "dropout": 0.0}))
    torch.nn.init.normal_(task.network.output.weight)
    batch = task.batch(np.arange(10), np.random.default_rng(1))
    gradients = []
    for size in (10, 3):
        task.network.zero_grad()
        for start in range(0, 10, size):
            task.losses(batch, slice(start, start + size)).sum().backward()
        gradients.append([p.grad.clone() for p in task.network.parameters()])
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-3, atol=1e-4)


def test_accumulated_training_gives_the_weights_of_the_whole_batches(tiny: Tiny) -> None:
    network = {"fb_docs": 3, "layers": 1, "heads": 2, "feed_forward": 16, "dropout": 0.0}
    loop = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-4, "threads": 1}
    for name, parts in (("whole", 1), ("parts", 3)):
        prf.train(tiny.config(name, network=network, loop={**loop, "accumulate": parts}))
    whole, other = (load_tprf(tiny.folder / name).state_dict() for name in ("whole", "parts"))
    assert len(whole) == len(other) > 0
    for name, tensor in whole.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("file", ["state.json", "network.safetensors", "optimiser.safetensors"])
def test_damaged_safe_point_is_an_error_that_says_what_to_remove(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    losses, done = VectorTask.losses, [0]

    def interrupted(*given: Any) -> Any:
        done[0] += 1
        if done[0] == 6:
            raise KeyboardInterrupt
        return losses(*given)

    config = tiny.config(loop=LONG)
    with monkeypatch.context() as patch:
        patch.setattr(VectorTask, "losses", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prf.train(config)
    (point,) = (tiny.folder / "m.training").glob("step-*")
    (point / file).write_bytes(b"{}")
    with pytest.raises(
        IndexStateError, match=r"step-00000003' cannot be read .* remove '.*\.training'"
    ):
        prf.train(config)


def test_queries_without_first_results_are_named(tiny: Tiny) -> None:
    config = tiny.config()
    search = config.train.queries >> prf.DenseRetriever(config.index, k=10)
    prf.search(search, config.train.topics, tiny.folder / "r.run")
    lines = (tiny.folder / "r.run").read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("train3 ")]
    (tiny.folder / "r.run").write_text("".join(kept), encoding="utf-8")
    given = replace(config, train=replace(config.train, run=f"{tiny.folder}/r.run"))
    with pytest.warns(prf.PrfWarning, match=r"have no first results, .*: 1 \(train3\)"):
        data = prepared(given)
    assert data.counts["without_first_results"] == 1
    assert (data.feedback[3] == -1).all()


def test_training_stops_when_the_dev_figure_no_longer_rises(tiny: Tiny) -> None:
    loop = {"epochs": 50, "learning_rate": 1e-9, "patience": 2, "threads": 1}
    record = prf.train(tiny.config(loop=loop))
    assert len(record["epochs"]) == 3


def test_learning_rate_rises_and_falls(tiny: Tiny) -> None:
    record = prf.train(tiny.config(loop={"epochs": 10, "batch_size": 30, "warmup": 0.3}))
    rates = [entry["learning_rate"] / 5e-4 for entry in record["epochs"]]
    expected = [1 / 3, 2 / 3, 1, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7]
    np.testing.assert_allclose(rates, expected)


@pytest.mark.slow
def test_two_processes_of_torchrun_make_the_updates_of_one(tiny: Tiny) -> None:
    import subprocess
    import sys

    network = {"fb_docs": 3, "layers": 1, "heads": 2, "feed_forward": 16, "dropout": 0.0}
    more = {"network": network, "loop": {**LONG, "learning_rate": 1e-4, "depths": [1, 3]}}
    one, two = (write(tiny, name, **more) for name in ("one", "two"))
    assert main(["train", str(one), "--no-progress"]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "prf", "train", str(two), "--no-progress"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    records = [
        json.loads((tiny.folder / name / "training.json").read_text()) for name in ("one", "two")
    ]
    assert records[0]["steps"] == records[1]["steps"]
    for ours, theirs in zip(*(record["epochs"] for record in records), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    nets = [load_tprf(tiny.folder / name).state_dict() for name in ("one", "two")]
    for name, tensor in nets[0].items():
        torch.testing.assert_close(nets[1][name], tensor, rtol=1e-3, atol=2e-5)
    assert not (tiny.folder / "two.training").exists()


@given(st.integers(1, 70), st.integers(1, 9))
def test_shares_of_the_processes_are_the_whole_batch(count: int, size: int) -> None:
    from prf.ranks import Ranks

    parts = [Ranks(rank, size, "cpu").share(count) for rank in range(size)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))


def test_lamb_moves_each_tensor_by_a_share_of_its_length() -> None:
    """Two steps by hand; a tensor of zeros takes the step itself, a long one counts as 10."""
    weights = [torch.tensor([3.0, 4.0]), torch.zeros(2), torch.tensor([30.0, 40.0])]
    tensors = [w.clone().requires_grad_() for w in weights]
    optimiser = Lamb(tensors, lr=0.1, weight_decay=0.01)
    m = [np.zeros(2) for _ in weights]
    v = [np.zeros(2) for _ in weights]
    expected = [w.numpy().astype(float) for w in weights]
    for gradients in ([(1.0, -2.0), (0.5, 0.0)], [(0.5, 1.0), (1.0, 0.2)]):
        for i, gradient in enumerate([*gradients, gradients[0]]):
            g = np.array(gradient)
            tensors[i].grad = torch.tensor(gradient)
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            move = m[i] / (np.sqrt(v[i]) + 1e-8) + 0.01 * expected[i]
            own = min(10.0, np.linalg.norm(expected[i]))
            ratio = own / np.linalg.norm(move) if own > 0 else 1.0
            expected[i] = expected[i] - 0.1 * ratio * move
        optimiser.step()
    for ours, by_hand in zip(tensors, expected, strict=True):
        np.testing.assert_allclose(ours.detach(), by_hand, rtol=1e-5, atol=1e-6)


# Killed, and gone on with

LONG = {"epochs": 6, "batch_size": 4, "learning_rate": 0.01, "threads": 1, "save_every": 3}


def write(tiny: Tiny, name: str, **more: Any) -> Path:
    import yaml

    path = tiny.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tiny.spec(name, **more)), encoding="utf-8")
    return path


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.slow
def test_killed_training_ends_with_the_weights_of_an_uninterrupted_one(tiny: Tiny) -> None:
    network = {"fb_docs": 3, "layers": 1, "heads": 2, "feed_forward": 16, "dropout": 0.2}
    more = {"loop": {**LONG, "depths": [0, 1, 3]}, "network": network}
    whole, killed = (write(tiny, name, **more) for name in ("whole", "killed"))
    rng = np.random.default_rng(11)
    assert train_in_a_fork(whole) == 0
    for _ in range(5):
        # At a random update of this try, and a moment later: in it, or while a point is saved.
        assert train_in_a_fork(killed, int(rng.integers(1, 9)), rng.uniform(0, 0.03)) < 0
        assert not (tiny.folder / "killed").exists()
    assert train_in_a_fork(killed) == 0
    assert weights(tiny.folder / "killed") == weights(tiny.folder / "whole")
    entries = [
        [
            {k: v for k, v in entry.items() if k != "seconds"}
            for entry in json.loads((tiny.folder / name / "training.json").read_text())["epochs"]
        ]
        for name in ("whole", "killed")
    ]
    assert entries[0] == entries[1]


def train_in_a_fork(config: Path, update: int = 0, delay: float = 0.0) -> int | None:
    process = FORKS.Process(target=in_fork, args=(str(config), update, delay))
    process.start()
    process.join()
    return process.exitcode


def in_fork(config: str, update: int, delay: float) -> None:
    """Trains, and kills the process a little after it began an update of this try."""
    losses, seen = VectorTask.losses, [0]

    def counted(*given: Any) -> Any:
        seen[0] += 1
        if seen[0] == update:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return losses(*given)

    VectorTask.losses = counted  # type: ignore[method-assign]
    raise SystemExit(main(["train", config, "--no-progress"]))


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_interrupted_training_goes_on(
    tiny: Tiny, stop: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C at an update: exit code 130, nothing half made, and the same weights in the end."""
    path, whole = write(tiny, "m", loop=LONG), write(tiny, "w", loop=LONG)
    done = [0]
    losses = VectorTask.losses

    def interrupted(*given: Any) -> Any:
        done[0] += 1
        if done[0] > stop:
            raise KeyboardInterrupt
        return losses(*given)

    with monkeypatch.context() as patch:
        patch.setattr(VectorTask, "losses", interrupted)
        assert main(["train", str(path), "--no-progress"]) == 130
    assert not (tiny.folder / "m").exists()
    assert main(["train", str(path), "--no-progress"]) == 0
    assert main(["train", str(whole), "--no-progress"]) == 0
    assert weights(tiny.folder / "m") == weights(tiny.folder / "w")
    assert "Traceback" not in capsys.readouterr().err


def test_unfinished_training_of_another_config_is_not_gone_on_with(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(VectorTask, "losses", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prf.train(tiny.config())
    other = tiny.config(loop={"epochs": 1, "seed": 2})
    with pytest.raises(SpecError, match=r"differs in config\.loop\.epochs, .*config\.loop\.seed"):
        prf.train(other)
    assert prf.train(other, force=True)["steps"] == 1


def test_model_that_is_there_is_kept_unless_forced(tiny: Tiny) -> None:
    config = tiny.config(loop={"epochs": 1})
    prf.train(config)
    before = weights(tiny.folder / "m")
    with pytest.raises(SpecError, match=r"m' exists; choose another name or --force"):
        prf.train(config)
    prf.train(tiny.config(loop={"epochs": 1, "seed": 9}), force=True)
    assert weights(tiny.folder / "m") != before
    (tiny.folder / "mine").mkdir()
    (tiny.folder / "mine" / "thesis.tex").write_text("x", encoding="utf-8")
    with pytest.raises(SpecError, match="no trained model, so it is not replaced"):
        prf.train(tiny.config("mine"), force=True)


def test_loss_that_is_not_finite_is_an_error(tiny: Tiny) -> None:
    table = np.load(tiny.folder / "train.npy")
    np.save(tiny.folder / "train.npy", table * 1e38)
    with pytest.raises(PrfError, match=r"the loss of update 1 is"):
        prf.train(tiny.config(dev=None))


def test_without_tensorboard_there_is_one_note(tiny: Tiny, monkeypatch: Any) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(prf.PrfWarning, match=r"tensorboard is not installed") as caught:
        prf.train(tiny.config(loop={"epochs": 1}))
    assert len(caught) == 1


# Configs


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"colour": 1}, "unknown key 'colour'; known are output, index"),
        ({"loop": {"epoch": 3}}, "unknown key 'epoch' in loop; did you mean 'epochs'?"),
        ({"loop": {"epochs": 0}}, "loop.epochs is 0; it must be at least 1"),
        ({"loop": {"epochs": "ten"}}, "loop.epochs must be int, not 'ten'"),
        ({"loop": {"learning_rate": "1e-3"}}, "loop.learning_rate must be float"),
        ({"loop": {"learning_rate": 0}}, "loop.learning_rate is 0.0; it must be above 0"),
        ({"loop": {"depths": [1, 9]}}, "loop.depths holds 9, more than network.fb_docs, 3"),
        ({"loop": {"accumulate": 99}}, "more parts than the 32|more parts than the 64"),
        ({"loop": [1]}, "loop is [1]; write a mapping"),
        ({"loss": {"kind": "hinge"}}, "loss.kind is 'hinge'; one of 'full_softmax'"),
        ({"loss": {"temperature": 0}}, "loss.temperature is 0.0; above 0"),
        ({"network": {"dropout": 1.0}}, "network.dropout is 1.0; from 0 to below 1"),
        ({"network": {"heads": 3}}, "network.heads is 3, which does not divide the 8"),
        ({"dev": None, "loop": {"patience": 2}}, "loop.patience needs dev"),
        ({"method": "lol"}, "method is 'lol'; one of 'tprf'"),
        ({"train": {"topics": "t"}}, "key 'qrels' is missing in train"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_config_fails_in_one_line(
    tiny: Tiny, more: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tiny, "bad", **more)
    assert main(["train", str(path)]) == 2
    err = capsys.readouterr().err
    assert any(part in err for part in says.split("|"))
    assert err.count("\n") == 1
    assert not (tiny.folder / "bad.training").exists()


def test_bad_stage_in_a_config_is_named_with_its_place(tiny: Tiny) -> None:
    spec = tiny.spec()
    spec["dev"]["queries"] = {"QueryVector": {}}
    with pytest.raises(SpecError, match=r"dev\.queries: no stage named 'QueryVector'; did you"):
        Training.read(spec)
    spec["dev"] |= {"queries": "Rocchio", "measure": "nDGC@10"}
    with pytest.raises(SpecError, match=r"'nDGC@10' is not a measure; did you mean 'nDCG@10'"):
        Training.read(spec)


def test_config_comes_back_from_what_is_stored(tiny: Tiny) -> None:
    config = tiny.config()
    assert Training.read(json.loads(json.dumps(config.spec()))) == config


def test_setting_replaces_one_value(tiny: Tiny) -> None:
    path = write(tiny, "c")
    config = read_config(path, ["loop.seed=7", "network.fb_docs=0", "loss.label=each"])
    assert (config.loop.seed, config.network.fb_docs, config.loss.label) == (7, 0, "each")
    assert config.loop.epochs == 4
    with pytest.raises(SpecError, match="unknown key 'sed' in loop"):
        read_config(path, ["loop.sed=7"])
    with pytest.raises(SpecError, match="write KEY=VALUE"):
        read_config(path, ["loop.seed"])


FILES = sorted((ROOT / "pipelines" / "training").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_config_is_read(path: Path) -> None:
    assert read_config(path).output == f"models/{path.stem.replace('_', '-')}"


def test_reading_a_config_loads_no_torch() -> None:
    import subprocess
    import sys

    code = "import prf.training_config, prf.feedback, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_defaults_are_one_to_one_with_the_dataclasses() -> None:
    assert Loop() == Loop.read({})
    assert Loss().spec()["label"] == "lowest"

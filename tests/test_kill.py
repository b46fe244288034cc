"""Killed and interrupted commands: the old or the new, never a part; the same command goes on."""

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from prf import index as dense_index
from prf import lucene
from prf.cli import main
from prf.errors import IndexStateError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="needs signals")]

ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
# One process imports once and is forked for each kill; it starts neither Java nor a model.
FORKS.set_forkserver_preload(
    ["__main__", "prf.cli", "prf.batch", "prf.build", "prf.lucene", "sentence_transformers"]
)


def kills(
    number: int,
    arguments: Sequence[str],
    state: Callable[[], object],
    reset: Callable[[], None] = lambda: None,
) -> None:
    """Runs a command again and again, kills it after a random time, and looks at what is there."""
    rng = np.random.default_rng(7)
    whole = 0.0
    for turn in range(number + 1):
        reset()
        start = time.perf_counter()
        process = FORKS.Process(target=main, args=(list(arguments),))
        process.start()
        # The first time is for measuring how long the command takes.
        process.join(rng.uniform(0.0, 1.05 * whole) if turn else None)
        process.kill()
        process.join()
        whole = whole or time.perf_counter() - start
        state()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    np.save(tmp_path / "v.npy", rng.standard_normal((3000, 64)).astype(np.float32))
    (tmp_path / "v.ids").write_text("\n".join(f"d{i}" for i in range(3000)), encoding="utf-8")
    np.save(tmp_path / "q.npy", rng.standard_normal((200, 64)).astype(np.float32))
    (tmp_path / "q.ids").write_text("\n".join(f"q{i}" for i in range(200)), encoding="utf-8")
    topics = "".join(f"q{i}\tany\n" for i in range(200))
    (tmp_path / "t.tsv").write_text(topics, encoding="utf-8")
    docs = (json.dumps({"docno": f"d{i}", "text": f"word{i % 97} word{i}"}) for i in range(1000))
    (tmp_path / "docs.jsonl").write_text("\n".join(docs), encoding="utf-8")
    short = (json.dumps({"docno": f"d{i}", "text": f"a few words {i}"}) for i in range(40))
    (tmp_path / "short.jsonl").write_text("\n".join(short), encoding="utf-8")
    (tmp_path / "p.yaml").write_text(
        f"- QueryVectors: {{vectors: {tmp_path}/q.npy, ids: {tmp_path}/q.ids}}\n"
        f"- DenseRetriever: {{index: {tmp_path}/ix, k: 20}}\n",
        encoding="utf-8",
    )
    return tmp_path


def vectors_into(data: Path, name: str = "ix") -> list[str]:
    return ["index", f"{data}/{name}", "--vectors", f"{data}/v.npy", "--ids", f"{data}/v.ids"]


def search_in(data: Path, *more: str) -> list[str]:
    files = ["-p", f"{data}/p.yaml", "--topics", f"{data}/t.tsv", "--run", f"{data}/r.run"]
    return ["search", *files, "--batch-size", "20", *more]


def check_pair(data: Path, allowed: Sequence[bytes]) -> None:
    """A run is one of the whole ones, and a record beside it is its own."""
    run = (data / "r.run").read_bytes()
    assert run in allowed
    record = data / "r.run.json"
    if record.exists():
        made = json.loads(record.read_text(encoding="utf-8"))
        assert made["run_sha256"] == hashlib.sha256(run).hexdigest()


def test_a_killed_search_leaves_the_old_run_or_the_new_one(data: Path) -> None:
    """B1, X2"""
    assert main(vectors_into(data)) == 0
    assert main(search_in(data)) == 0
    new = (data / "r.run").read_bytes(), (data / "r.run.json").read_bytes()
    assert main(search_in(data, "--set", "1.k=3", "--tag", "old", "--force")) == 0
    old = (data / "r.run").read_bytes(), (data / "r.run.json").read_bytes()

    def reset() -> None:
        (data / "r.run").write_bytes(old[0])
        (data / "r.run.json").write_bytes(old[1])

    kills(20, search_in(data, "--force"), lambda: check_pair(data, (old[0], new[0])), reset)
    reset()
    assert main(search_in(data, "--force")) == 0
    assert (data / "r.run").read_bytes() == new[0]
    assert (data / "r.run.json").exists()


def check_index(path: Path, module: object) -> bool:
    """An index that opens is whole; returns whether there is one."""
    try:
        module.open_index(path)  # type: ignore[attr-defined]
    except IndexStateError:
        return False
    module.verify(path)  # type: ignore[attr-defined]
    return True


def settled(data: Path) -> set[str]:
    return {p.name for p in data.iterdir() if "building" in p.name}


def test_a_killed_build_from_vectors_is_whole_or_not_there(data: Path) -> None:
    """X1, X2"""
    command = [*vectors_into(data), "--force"]
    kills(20, command, lambda: check_index(data / "ix", dense_index))
    assert main(command) == 0
    assert main(vectors_into(data, "other")) == 0
    assert check_index(data / "ix", dense_index)
    for name in ("vectors.f32", "docid"):
        assert (data / "ix" / name).read_bytes() == (data / "other" / name).read_bytes()
    assert settled(data) == set()


@pytest.mark.java
def test_a_killed_lucene_build_is_whole_or_not_there(data: Path) -> None:
    """X1, X2"""
    command = ["index", f"{data}/ix", "--docs", f"{data}/docs.jsonl", "--force"]
    kills(8, command, lambda: check_index(data / "ix", lucene))
    assert main(command) == 0
    assert check_index(data / "ix", lucene)
    assert lucene.open_index(data / "ix").n_docs == 1000
    assert settled(data) == set()


@pytest.mark.models
def test_a_killed_encoding_build_is_whole_or_not_there(data: Path) -> None:
    """X1, X2"""
    command = ["index", f"{data}/ix", "--docs", f"{data}/short.jsonl", "--encoder", "minilm"]
    kills(6, [*command, "--force"], lambda: check_index(data / "ix", dense_index))
    assert main([*command, "--force"]) == 0
    assert check_index(data / "ix", dense_index)
    assert dense_index.open_index(data / "ix").n_docs == 40
    assert settled(data) == set()


# Ctrl-C, and a polite kill


def interrupted(
    arguments: Sequence[str], begun: Callable[[], bool], number: int
) -> tuple[int, str]:
    """Runs a command in a process of its own and sends it a signal as soon as it has begun."""
    process = subprocess.Popen(
        [sys.executable, "-m", "prf", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not begun() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out == ""
    return process.returncode, err


SAID = (130, "prf: interrupted; no unfinished file is left; run the same command again\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_leaves_what_was_there(data: Path, number: int) -> None:
    assert main(vectors_into(data)) == 0
    assert main(search_in(data, "--set", "1.k=3")) == 0
    names = sorted(data.iterdir())
    old = (data / "r.run").read_bytes(), (data / "r.run.json").read_bytes()
    command = search_in(data, "--force", "--batch-size", "1")
    assert interrupted(command, lambda: any(data.glob(".r.run.*.tmp")), number) == SAID
    assert ((data / "r.run").read_bytes(), (data / "r.run.json").read_bytes()) == old
    assert sorted(data.iterdir()) == names


@pytest.mark.java
def test_an_interrupted_lucene_build_leaves_nothing(data: Path) -> None:
    names = sorted(data.iterdir())
    command = ["index", f"{data}/ix", "--docs", f"{data}/docs.jsonl"]
    assert (
        interrupted(command, lambda: any(data.glob(".ix.building-*/write.lock")), signal.SIGINT)
        == SAID
    )
    assert sorted(data.iterdir()) == names


@pytest.mark.models
def test_an_interrupted_encoding_build_leaves_nothing(data: Path) -> None:
    names = sorted(data.iterdir())
    command = ["index", f"{data}/ix", "--docs", f"{data}/docs.jsonl", "--encoder", "minilm"]
    assert interrupted(command, (data / "ix.building" / "index").exists, signal.SIGINT) == SAID
    assert sorted(data.iterdir()) == names

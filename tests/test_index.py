"""Tests of the dense index: building, resuming, opening, looking up, exact search."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prf import dense_build, knn
from prf.dense_build import build, build_from_vectors
from prf.errors import FileFormatError, FrameError, IndexStateError, PrfWarning, SpecError
from prf.frames import Hits
from prf.index import VectorIndex, open_index, verify
from prf.knn import top_k, unit

ROOT = Path(__file__).resolve().parents[1]
ODD = ["NA", "007", "a,b", "null", "nan", "-", "x#1", 'a"b', "it's", "p/q%\\", "d" * 300, "é中😀"]
DOCS = [(f"d{i:02d}", f"text number {i}") for i in range(23)]


def encode(texts: Sequence[str]) -> np.ndarray:
    """A made-up encoder: 8 numbers from the SHA-256 of the text, alone."""
    digests = [hashlib.sha256(text.encode()).digest()[:8] for text in texts]
    return np.array([list(digest) for digest in digests], dtype=np.float32) - 100


def make(path: Path, docs=DOCS, **options):
    return build(path, docs, encode, **{"encoder": {"model": "toy"}, "shard_size": 5, **options})


def contents(folder: Path) -> dict[str, object]:
    """The bytes of every file; of meta.json all but the date."""
    files: dict[str, object] = {file.name: file.read_bytes() for file in folder.iterdir()}
    files["meta.json"] = json.loads(files["meta.json"])
    del files["meta.json"]["created"]
    return files


def vectors_index(path: Path, vectors, ids=None, **options) -> VectorIndex:
    vectors = np.asarray(vectors, dtype=np.float32)
    ids = [f"d{i:04d}" for i in range(len(vectors))] if ids is None else ids
    build_from_vectors(path, vectors, ids, **options)
    return open_index(path)


@pytest.fixture(scope="module", autouse=True)
def _fast_disk() -> Iterator[None]:
    """Waiting for the disk protects from power cuts, which no test here makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture
def small(tmp_path: Path) -> VectorIndex:
    make(tmp_path / "small", with_text=True)
    return open_index(tmp_path / "small")


# ---------------------------------------------------------------------------------------------
# Building


def test_folder_has_the_documented_format(tmp_path):
    make(tmp_path / "x", with_text=True)
    texts = [text for _, text in DOCS]
    raw = np.fromfile(tmp_path / "x" / "vectors.f32", dtype="<f4").reshape(len(DOCS), 8)
    np.testing.assert_array_equal(raw, encode(texts))
    assert (tmp_path / "x" / "docid").read_text() == "".join(f"{d}\n" for d, _ in DOCS)
    assert (tmp_path / "x" / "texts.bin").read_text() == "".join(texts)
    offsets = np.fromfile(tmp_path / "x" / "texts.idx", dtype="<i8")
    assert offsets.tolist() == [0, *np.cumsum([len(text) for text in texts])]
    assert sorted(os.listdir(tmp_path)) == ["x"]


def test_meta_says_what_the_index_is(tmp_path):
    """X9"""
    meta = make(tmp_path / "x", source="docs.jsonl")
    assert meta == json.loads((tmp_path / "x" / "meta.json").read_text())
    expected = {
        "format": 1,
        "kind": "dense",
        "complete": True,
        "documents": 23,
        "dim": 8,
        "similarity": "dot",
        "encoder": {"model": "toy"},
        "empty_documents": 0,
        "source": "docs.jsonl",
    }
    assert {name: meta[name] for name in expected} == expected
    digest = hashlib.sha256((tmp_path / "x" / "docid").read_bytes()).hexdigest()
    assert meta["files"]["docid"] == {"bytes": 23 * 4, "sha256": digest}


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_may_be_str_or_path(tmp_path, kind):
    """X11"""
    build(kind(tmp_path / "x"), DOCS, encode, encoder={})
    np.save(tmp_path / "v.npy", np.eye(3, dtype=np.float16))
    (tmp_path / "ids.txt").write_text("a\nb\nc\n")
    build_from_vectors(kind(tmp_path / "y"), kind(tmp_path / "v.npy"), kind(tmp_path / "ids.txt"))
    assert len(open_index(kind(tmp_path / "x"))) == 23
    assert len(open_index(kind(tmp_path / "y"))) == 3
    verify(kind(tmp_path / "y"))


def test_odd_docnos_survive(tmp_path):
    """D1 D2 D3 D7"""
    make(tmp_path / "x", [(docno, f"text of {docno}") for docno in ODD], with_text=True)
    opened = open_index(tmp_path / "x")
    assert opened.docnos.tolist() == ODD
    assert opened.rows(ODD[::-1]).tolist() == list(range(len(ODD)))[::-1]
    assert opened.texts(["NA", "é中😀"]) == ["text of NA", "text of é中😀"]


def test_an_id_is_the_whole_line(tmp_path):
    """D7"""
    (tmp_path / "ids.txt").write_bytes("a\tb\n  c\n\u2028d\x0c\n".encode())
    with pytest.warns(PrfWarning, match="3 of 3 docnos have white space"):
        build_from_vectors(tmp_path / "x", np.eye(3), tmp_path / "ids.txt")
    assert open_index(tmp_path / "x").docnos.tolist() == ["a\tb", "  c", "\u2028d\x0c"]


def test_docnos_with_white_space_give_one_warning(tmp_path):
    """R4"""
    docs = [("a b", "x"), ("c", "y"), (" d", "z")]
    with pytest.warns(PrfWarning, match="2 of 3 docnos have white space, such as 'a b'") as caught:
        make(tmp_path / "x", docs)
    assert len(caught) == 1


def test_repeated_docno_names_both_positions(tmp_path):
    """D6"""
    with pytest.raises(FileFormatError, match=r"docs\.tsv: docno 'd03' .* documents 4 and 24"):
        make(tmp_path / "x", [*DOCS, ("d03", "again")], source="docs.tsv")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("docno", ["", "a\nb", "a\rb", 7, None, "\ud800"])
def test_bad_docno_is_refused(tmp_path, docno):
    with pytest.raises(FileFormatError, match="docno"):
        make(tmp_path / "x", [("ok", "t"), (docno, "t")])


def test_no_documents_is_an_error(tmp_path):
    """X6"""
    with pytest.raises(FileFormatError, match="docs: no documents"):
        make(tmp_path / "x", [], source="docs")
    assert os.listdir(tmp_path) == []


EMPTY = [("a", "one"), ("b", None), ("c", "  "), ("d", float("nan")), ("e", "two")]


@pytest.mark.parametrize("text", [None, "", " \n", float("nan")])
def test_missing_text_is_an_error_naming_the_docno(tmp_path, text):
    """X7"""
    with pytest.raises(FileFormatError, match=r"document 2 \(docno 'b'\) has no text"):
        make(tmp_path / "x", [("a", "one"), ("b", text)])


def test_missing_text_may_be_skipped(tmp_path):
    """X7"""
    meta = make(tmp_path / "x", EMPTY, on_empty="skip", shard_size=2, with_text=True)
    assert (meta["documents"], meta["empty_documents"]) == (2, 3)
    assert open_index(tmp_path / "x").docnos.tolist() == ["a", "e"]
    assert open_index(tmp_path / "x").texts(["e"]) == ["two"]


def test_missing_text_may_be_kept_as_a_zero_vector(tmp_path):
    """X7: an encoder that gives NaN for it does no harm"""

    def nan_for_blank(texts):
        return np.array([[len(t) if t.strip() else np.nan] * 3 for t in texts], dtype=np.float32)

    meta = build(
        tmp_path / "x",
        EMPTY,
        nan_for_blank,
        encoder={},
        on_empty="keep",
        similarity="cosine",
        with_text=True,
    )
    opened = open_index(tmp_path / "x")
    assert (meta["documents"], meta["empty_documents"]) == (5, 3)
    assert not opened.get(["b", "c", "d"]).any()
    assert opened.texts(["b", "c"]) == ["", "  "]


def test_only_blank_texts_skipped_is_an_error(tmp_path):
    with pytest.raises(FileFormatError, match="all 2 documents have no text"):
        make(tmp_path / "x", [("a", ""), ("b", "")], on_empty="skip", with_text=True)


def test_first_shards_may_be_skipped_whole(tmp_path):
    docs = [*((f"e{i}", "") for i in range(6)), ("a", "one")]
    make(tmp_path / "x", docs, on_empty="skip", shard_size=2, with_text=True)
    assert open_index(tmp_path / "x").texts(["a"]) == ["one"]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_encoder_that_is_not_finite_names_the_docno(tmp_path, value):
    """V12"""

    def broken(texts):
        out = np.ones((len(texts), 2))
        out[["7" in text for text in texts]] = value
        return out

    with pytest.raises(FrameError, match="docno 'd07' holds NaN"):
        build(tmp_path / "x", DOCS, broken, encoder={})


@pytest.mark.parametrize(
    "output",
    [
        lambda n: np.ones((n + 1, 4)),
        lambda n: np.ones(n),
        lambda n: np.ones((n, 0)),
        lambda n: np.ones((n, 3 if n == 5 else 4)),
        lambda n: np.ones((n, 4), dtype=np.int64),
    ],
    ids=["rows", "flat", "no columns", "columns change", "integers"],
)
def test_encoder_of_wrong_shape_is_an_error(tmp_path, output):
    with pytest.raises(FrameError, match=r"encoder returned .* of shape .* expected floats"):
        build(tmp_path / "x", DOCS, lambda t: output(len(t)), encoder={}, shard_size=5)


def test_cosine_index_holds_unit_vectors(tmp_path):
    """V7: hand-computed, 3-4-5"""
    opened = vectors_index(tmp_path / "x", [[3, 4], [0, 2], [0, 0]], similarity="cosine")
    expected = np.array([[0.6, 0.8], [0, 1], [0, 0]], dtype=np.float32)
    np.testing.assert_array_equal(opened.vectors, expected)


def test_existing_path_needs_force(tmp_path):
    make(tmp_path / "x")
    with pytest.raises(IndexStateError, match="x exists"):
        make(tmp_path / "x", DOCS[:3])
    assert make(tmp_path / "x", DOCS[:3], force=True)["documents"] == 3
    assert len(open_index(tmp_path / "x")) == 3
    assert sorted(os.listdir(tmp_path)) == ["x"]


def test_force_does_not_replace_what_is_no_index(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.txt").write_text("years of work")
    with pytest.raises(IndexStateError, match="is no dense index"):
        make(tmp_path / "x", force=True)
    assert (tmp_path / "x" / "thesis.txt").exists()


def test_what_appears_at_the_path_during_a_build_is_not_replaced(tmp_path):
    def docs():
        yield from DOCS
        (tmp_path / "x").mkdir()

    with pytest.raises(IndexStateError, match="x exists"):
        make(tmp_path / "x", docs())


@pytest.mark.parametrize(
    ("name", "value"),
    [("similarity", "l2"), ("on_empty", "drop"), ("shard_size", 0), ("encoder", {"a": object()})],
)
def test_bad_option_is_refused(tmp_path, name, value):
    with pytest.raises(SpecError, match=name):
        make(tmp_path / "x", **{name: value})


def test_progress_goes_to_stderr(tmp_path, capsys):
    make(tmp_path / "x", progress=True, total=len(DOCS))
    out, err = capsys.readouterr()
    assert out == ""
    assert "23/23" in err


# ---------------------------------------------------------------------------------------------
# Ready vectors


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ready_vectors_come_back(tmp_path, dtype):
    vectors = np.random.default_rng(0).normal(size=(9, 4)).astype(dtype)
    np.save(tmp_path / "v.npy", vectors)
    ids = [f"d{i}" for i in range(9)]
    build_from_vectors(tmp_path / "x", tmp_path / "v.npy", ids, texts=[f"t{i}" for i in range(9)])
    opened = open_index(tmp_path / "x")
    np.testing.assert_array_equal(opened.get(ids), vectors.astype(np.float32))
    assert opened.texts(["d8", "d0"]) == ["t8", "t0"]
    assert opened.meta["encoder"] is None


def test_ready_vectors_longer_than_one_block(tmp_path, monkeypatch):
    monkeypatch.setattr(dense_build, "COPY_ROWS", 4)
    vectors = np.arange(22, dtype=np.float32).reshape(11, 2)
    np.testing.assert_array_equal(vectors_index(tmp_path / "x", vectors).vectors, vectors)


def test_counts_that_differ_are_both_named(tmp_path):
    """X3"""
    with pytest.raises(FileFormatError, match="3 vectors but 2 docnos"):
        build_from_vectors(tmp_path / "x", np.eye(3), ["a", "b"])
    with pytest.raises(FileFormatError, match="3 vectors but 1 texts"):
        build_from_vectors(tmp_path / "x", np.eye(3), ["a", "b", "c"], texts=["t"])


def test_ready_vectors_with_repeated_docno(tmp_path):
    """D6"""
    with pytest.raises(FileFormatError, match="documents 1 and 3"):
        build_from_vectors(tmp_path / "x", np.eye(3), ["a", "b", "a"])


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e39])
def test_ready_vectors_that_are_not_finite(tmp_path, value):
    """V12"""
    vectors = np.eye(3)
    vectors[1, 2] = value
    with pytest.raises(FileFormatError, match="docno 'b' holds NaN"):
        build_from_vectors(tmp_path / "x", vectors, ["a", "b", "c"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("vectors", [np.ones(3), np.ones((3, 0)), np.ones((3, 2), dtype=int)])
def test_ready_vectors_of_wrong_shape(tmp_path, vectors):
    with pytest.raises(FileFormatError, match="vectors are floats of shape"):
        build_from_vectors(tmp_path / "x", vectors, ["a", "b", "c"])


@pytest.mark.parametrize("content", [b"", b"not numpy"])
def test_vector_file_that_cannot_be_read(tmp_path, content):
    (tmp_path / "v.npy").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"v\.npy': not an \.npy file"):
        build_from_vectors(tmp_path / "x", tmp_path / "v.npy", ["a"])


def test_vector_file_that_is_not_there(tmp_path):
    with pytest.raises(FileFormatError, match=r"v\.npy': it does not exist"):
        build_from_vectors(tmp_path / "x", tmp_path / "v.npy", ["a"])


def test_id_file_that_cannot_be_read(tmp_path):
    with pytest.raises(FileFormatError, match=r"ids\.txt: cannot read docnos"):
        build_from_vectors(tmp_path / "x", np.eye(2), tmp_path / "ids.txt")


# ---------------------------------------------------------------------------------------------
# Stopping and going on


class StopError(Exception):
    """Stands for whatever ends a build."""


def stopping(after: int):
    """The toy encoder, which fails when it is called once more than ``after`` times."""
    calls = []

    def broken(texts):
        calls.append(len(texts))
        if len(calls) > after:
            raise StopError
        return encode(texts)

    return broken


def interrupt(path: Path, docs=DOCS, after: int = 3, **options) -> None:
    options = {"encoder": {"model": "toy"}, "shard_size": 5, **options}
    with pytest.raises(StopError):
        build(path, docs, stopping(after), **options)


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_resumed_build_equals_an_uninterrupted_one(tmp_path, after, similarity):
    """X1"""
    options = {"with_text": True, "similarity": similarity}
    make(tmp_path / "whole", **options)
    interrupt(tmp_path / "x", after=after, **options)
    make(tmp_path / "x", iter(DOCS), **options)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["whole", "x"]


def test_finished_shards_are_not_encoded_again(tmp_path):
    """X1"""
    interrupt(tmp_path / "x", after=3)
    encoded = []

    def counting(texts):
        encoded.append(len(texts))
        return encode(texts)

    build(tmp_path / "x", DOCS, counting, encoder={"model": "toy"}, shard_size=5)
    assert encoded == [5, 3]


def test_keyboard_interrupt_leaves_a_resumable_build(tmp_path):
    """X1"""

    def docs() -> Iterator[tuple[str, str]]:
        yield from DOCS[:17]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "x", docs())
    with pytest.raises(IndexStateError, match="incomplete: 15 documents done"):
        open_index(tmp_path / "x")
    assert make(tmp_path / "x")["documents"] == 23


def test_bytes_after_the_last_safe_point_are_dropped(tmp_path):
    """X1"""
    make(tmp_path / "whole", with_text=True)
    interrupt(tmp_path / "x", with_text=True)
    for file in (tmp_path / "x.building" / "index").iterdir():
        with open(file, "ab") as out:
            out.write(b"half a sha")
    make(tmp_path / "x", with_text=True)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


def test_files_that_lost_bytes_restart_the_build(tmp_path):
    interrupt(tmp_path / "x")
    os.truncate(tmp_path / "x.building" / "index" / "vectors.f32", 10)
    with pytest.warns(PrfWarning, match="has lost part of its files; starting from zero"):
        make(tmp_path / "x")
    verify(tmp_path / "x")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"shards": 3}'])
def test_unreadable_progress_restarts_the_build(tmp_path, text):
    interrupt(tmp_path / "x")
    (tmp_path / "x.building" / "progress.json").write_text(text)
    with pytest.warns(PrfWarning, match="starting from zero"):
        make(tmp_path / "x")
    verify(tmp_path / "x")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"encoder": {"model": "other"}}, "encoder {'model': 'toy'}, now {'model': 'other'}"),
        ({"similarity": "cosine"}, "similarity 'dot', now 'cosine'"),
        ({"shard_size": 4}, "shard_size 5, now 4"),
        ({"with_text": True}, "with_text False, now True"),
    ],
)
def test_other_options_restart_the_build(tmp_path, option, message):
    make(tmp_path / "whole", **option)
    interrupt(tmp_path / "x")
    with pytest.warns(PrfWarning) as caught:
        make(tmp_path / "x", **option)
    assert len(caught) == 1
    assert message in str(caught[0].message)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


@pytest.mark.parametrize("changed", [0, 4, 7, 14, 20])
def test_changed_input_keeps_only_what_is_the_same(tmp_path, changed):
    docs = [*DOCS[:changed], ("new", "other text"), *DOCS[changed + 1 :]]
    make(tmp_path / "whole", docs)
    interrupt(tmp_path / "x", after=4)
    kept = changed // 5 * 5
    expected = f"keeping the first {kept}" if kept else "starting from zero"
    if changed < 20:
        with pytest.warns(PrfWarning, match=expected):
            make(tmp_path / "x", docs)
    else:
        make(tmp_path / "x", docs)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


@pytest.mark.parametrize("count", [2, 5, 12])
def test_shorter_input_drops_the_rest(tmp_path, count):
    make(tmp_path / "whole", DOCS[:count])
    interrupt(tmp_path / "x", after=4)
    with pytest.warns(PrfWarning, match="no longer those of the unfinished build"):
        make(tmp_path / "x", DOCS[:count])
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


def test_stopped_again_right_after_going_back_is_still_right(tmp_path):
    """New bytes never stand under the hashes of old documents."""
    make(tmp_path / "whole")
    interrupt(tmp_path / "x", after=4)
    other = [*DOCS[:5], *((docno, f"other {text}") for docno, text in DOCS[5:])]
    with pytest.warns(PrfWarning, match="keeping the first 5"):
        interrupt(tmp_path / "x", other, after=0)
    make(tmp_path / "x")
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


def test_empty_input_leaves_an_interrupted_build_alone(tmp_path):
    interrupt(tmp_path / "x")
    with pytest.raises(FileFormatError, match="no documents"):
        make(tmp_path / "x", [])
    with pytest.raises(IndexStateError, match="15 documents done"):
        open_index(tmp_path / "x")


def test_ready_vectors_replace_an_interrupted_build(tmp_path):
    interrupt(tmp_path / "x")
    with pytest.warns(PrfWarning, match="is replaced by ready vectors"):
        build_from_vectors(tmp_path / "x", np.eye(2), ["a", "b"])
    assert sorted(os.listdir(tmp_path)) == ["x"]


def test_second_build_of_the_same_path_is_refused(tmp_path):
    errors = []

    def docs():
        yield from DOCS[:12]
        with pytest.raises(IndexStateError, match="another process is building") as caught:
            make(tmp_path / "x")
        errors.append(caught)
        yield from DOCS[12:]

    make(tmp_path / "x", docs())
    assert len(errors) == 1
    verify(tmp_path / "x")


KILLED = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
from test_index import DOCS, encode
from prf.dense_build import build
def slow(texts):
    time.sleep(0.02)
    return encode(texts)
print("ready", flush=True)
build({path!r}, DOCS, slow, encoder={{"model": "toy"}}, shard_size=1, with_text=True)
"""


def start_build(path: Path) -> subprocess.Popen[bytes]:
    """Starts a slow build in another process; returns when it is about to begin."""
    script = KILLED.format(root=str(ROOT), tests=str(ROOT / "tests"), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_lock_of_a_killed_process_does_not_block(tmp_path):
    """X1 X2"""
    process = start_build(tmp_path / "x")
    while not (tmp_path / "x.building" / "progress.json").exists():
        time.sleep(0.005)
    with pytest.raises(IndexStateError, match="another process is building"):
        make(tmp_path / "x", shard_size=1, with_text=True)
    kill(process)
    make(tmp_path / "whole", shard_size=1, with_text=True)
    make(tmp_path / "x", shard_size=1, with_text=True)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_killed_at_any_moment_resumes_to_the_same_bytes(tmp_path):
    """X1 X2"""
    make(tmp_path / "whole", shard_size=1, with_text=True)
    dice = random.Random(5)
    found = []
    for number in range(25):
        path = tmp_path / f"x{number}"
        process = start_build(path)
        time.sleep(dice.uniform(0, 0.75))
        kill(process)
        if path.exists():
            found.append(len(DOCS))
        else:
            with pytest.raises(IndexStateError) as caught:
                open_index(path)
            message = str(caught.value)
            found.append(int(message.split(":")[-1].split()[0]) if "incomplete" in message else 0)
            make(path, shard_size=1, with_text=True)
        assert contents(path) == contents(tmp_path / "whole")
    assert len(set(found)) > 5  # kills fell on many different states


MEMORY = """
import resource, sys
sys.path.insert(0, {root!r})
import numpy as np
from prf.dense_build import build
from prf.index import open_index
def encode(texts):
    return np.full((len(texts), 64), len(texts[0]), dtype=np.float32)
def docs():
    for i in range({count}):
        yield f"{{i:08d}}", "word " * 200
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
build({path!r} + ".warm", [("a", "b")], encode, encoder={{}})
before = peak()
build({path!r}, docs(), encode, encoder={{}}, with_text=True)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_memory_of_a_build_is_that_of_a_shard_and_the_docnos(tmp_path):
    """X4 V10: 51 MB of vectors and 200 MB of texts pass through; docnos are about 30 MB"""
    script = MEMORY.format(root=str(ROOT), path=str(tmp_path / "x"), count=200_000)
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert float(out.stdout) < 80


# ---------------------------------------------------------------------------------------------
# Opening and looking up


def test_same_folder_opens_once_until_it_is_rebuilt(tmp_path):
    make(tmp_path / "x")
    first = open_index(tmp_path / "x")
    assert open_index(str(tmp_path / "x")) is first
    os.utime(tmp_path / "x" / "meta.json", ns=(1, 1))
    assert open_index(tmp_path / "x") is not first


def test_missing_index(tmp_path):
    with pytest.raises(IndexStateError, match=r"there is no index at .*x; build it with"):
        open_index(tmp_path / "x")


def test_folder_without_meta_does_not_open(tmp_path):
    """X2"""
    make(tmp_path / "x")
    (tmp_path / "x" / "meta.json").unlink()
    with pytest.raises(IndexStateError, match=r"no meta\.json"):
        open_index(tmp_path / "x")


def test_half_built_index_does_not_open(tmp_path):
    """X2"""
    interrupt(tmp_path / "x")
    with pytest.raises(IndexStateError, match="incomplete: 15 documents done; run `prf index` ag"):
        open_index(tmp_path / "x")
    for folder in ("x.building", "x.building/index"):
        with pytest.raises(IndexStateError, match="is no dense index"):
            open_index(tmp_path / folder)


def test_old_index_opens_while_a_new_one_is_half_built(tmp_path):
    make(tmp_path / "x", DOCS[:2])
    interrupt(tmp_path / "x", force=True)
    assert len(open_index(tmp_path / "x")) == 2


@pytest.mark.parametrize("name", ["vectors.f32", "docid", "texts.bin", "texts.idx"])
def test_cut_file_is_named_with_both_sizes(tmp_path, small, name):
    """X3: also when the index was open before"""
    size = (small.path / name).stat().st_size
    os.truncate(small.path / name, size - 3)
    with pytest.raises(IndexStateError, match=f"{name} has {size - 3} bytes, .* need {size}"):
        open_index(small.path)


def test_missing_file_is_named(small):
    """X3"""
    (small.path / "docid").unlink()
    with pytest.raises(IndexStateError, match="docid is missing"):
        open_index(small.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2, this version reads 1"),
        ({"kind": "lucene"}, "kind 'lucene'"),
        ({"complete": False}, "complete False"),
        ({"documents": 0}, "documents 0"),
        ({"dim": None}, "dim None"),
        ({"similarity": "l2"}, "similarity 'l2'"),
        ({"documents": 22}, "vectors.f32 has 736 bytes, 22 documents need 704"),
    ],
)
def test_unfit_meta_is_refused(small, change, message):
    meta = small.path / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **change}))
    with pytest.raises(IndexStateError, match=message):
        open_index(small.path)


def test_garbled_meta_is_refused(small):
    (small.path / "meta.json").write_text("{")
    with pytest.raises(IndexStateError, match="not that of a dense index"):
        open_index(small.path)


def test_index_written_by_another_tool_opens(tmp_path):
    """Only vectors, docnos and the main facts are needed; a last line end is not."""
    vectors = np.array([[1, 0], [0, 2], [2, 0]], dtype="<f4")
    vectors.tofile(tmp_path / "vectors.f32")
    (tmp_path / "docid").write_text("a\nb\nc")
    meta = {"format": 1, "kind": "dense", "complete": True, "documents": 3, "dim": 2}
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "similarity": "dot"}))
    opened = open_index(tmp_path)
    assert opened.max_norm == 2
    assert opened.docnos[opened.search(np.eye(2, dtype=np.float32), 1).ids].tolist() == ["c", "b"]


@pytest.mark.parametrize(
    ("lines", "message"), [("a\nb\n", "2 lines for 3"), ("a\nb\na\n", "1 docnos twice")]
)
def test_docnos_that_do_not_fit_the_vectors(tmp_path, lines, message):
    """X3"""
    opened = vectors_index(tmp_path / "x", np.eye(3), ["a", "b", "c"])
    meta = json.loads((tmp_path / "x" / "meta.json").read_text())
    del meta["files"]["docid"]
    (tmp_path / "x" / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "x" / "docid").write_text(lines)
    opened = open_index(tmp_path / "x")
    with pytest.raises(IndexStateError, match=message):
        opened.rows(["a"])


@pytest.mark.parametrize("name", ["vectors.f32", "docid", "texts.bin", "texts.idx"])
def test_verify_finds_one_changed_byte(small, name):
    """X3"""
    verify(small.path)
    data = bytearray((small.path / name).read_bytes())
    data[3] ^= 1
    (small.path / name).write_bytes(data)
    with pytest.raises(IndexStateError, match=f"{name} has sha256"):
        verify(small.path)


def test_vectors_come_back_as_copies(small):
    """V6"""
    got = small.get(["d05", "d00", "d05"])
    np.testing.assert_array_equal(got, encode(["text number 5", "text number 0", "text number 5"]))
    assert type(got) is np.ndarray
    assert got.dtype == np.float32
    got[:] = 0
    assert small.get(["d05"]).any()


def test_nothing_asked_nothing_given(small):
    assert small.get([]).shape == (0, 8)
    assert small.texts([]) == []
    assert small.rows([]).shape == (0,)
    assert small.names([]).shape == (0,)


@pytest.mark.parametrize("lookup", ["rows", "get", "texts"])
@pytest.mark.parametrize("docno", ["nix", "", -1, 0, None])
def test_unknown_docno_is_named(small, lookup, docno):
    """X8 V2: a position is no docno"""
    with pytest.raises(IndexStateError, match=f"has no docno {docno!r}"):
        getattr(small, lookup)(["d00", docno])


@pytest.mark.parametrize("row", [-1, 23])
def test_row_outside_has_no_name(small, row):
    """V2"""
    with pytest.raises(IndexStateError, match=f"has no row {row}; rows are 0 to 22"):
        small.names([0, row])


def test_texts_come_back(small):
    """X8"""
    assert small.texts(["d07", "d01"]) == ["text number 7", "text number 1"]


def test_index_without_texts_says_how_to_get_them(tmp_path):
    """X8"""
    make(tmp_path / "x")
    with pytest.raises(IndexStateError, match="--with-text"):
        open_index(tmp_path / "x").texts(["d00"])


def test_docno_rank_is_the_order_of_the_text(tmp_path):
    opened = vectors_index(tmp_path / "x", np.eye(4), ["b", "10", "9", "é"])
    assert opened.docno_rank.tolist() == [2, 0, 1, 3]


# ---------------------------------------------------------------------------------------------
# Search


def exact_ranking(vectors, queries, docnos, k) -> list[list[tuple[str, float]]]:
    """The definition: exact inner products, rounded once to float32, ties by docno."""
    out = []
    for query in queries.tolist():
        scored = []
        for docno, vector in zip(docnos, vectors.tolist(), strict=True):
            exact = sum(Fraction(a) * Fraction(b) for a, b in zip(query, vector, strict=True))
            scored.append((docno, rounded(exact)))
        out.append(sorted(scored, key=lambda pair: (-pair[1], pair[0]))[:k])
    return out


def rounded(exact: Fraction) -> float:
    """The nearest float32, ties to even, by comparing with the neighbours of a first guess."""
    guess = np.float32(float(exact))
    near = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    ]
    best = min(abs(Fraction(float(value)) - exact) for value in near)
    nearest = [value for value in near if abs(Fraction(float(value)) - exact) == best]
    return float(min(nearest, key=lambda value: int(value.view(np.int32)) & 1)) + 0.0


def ranking(hits: Hits, docnos) -> list[list[tuple[str, float]]]:
    pairs = [(docnos[i], float(s)) for i, s in zip(hits.ids, hits.scores, strict=True)]
    return [pairs[a:b] for a, b in zip(hits.ptr[:-1], hits.ptr[1:], strict=True)]


def same(left: Hits, right: Hits) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def search_arrays(vectors, queries, k, docnos=None, **options) -> Hits:
    names = np.array(docnos or [f"d{i:05d}" for i in range(len(vectors))], dtype=object)
    longest = float(np.sqrt((vectors.astype(np.float64) ** 2).sum(axis=1).max()))
    return top_k(vectors, queries, k, lambda rows: names[rows], max_norm=longest, **options)


@st.composite
def cases(draw):
    """Vectors and queries: few small integers (many ties), wide ranges, or plain random."""
    seed = draw(st.integers(0, 2**32 - 1))
    n, m, d = draw(st.integers(1, 40)), draw(st.integers(1, 7)), draw(st.integers(1, 17))
    kind = draw(st.sampled_from(["ties", "random", "wide", "halfway", "tiny"]))
    dice = np.random.default_rng(seed)
    if kind == "ties":
        vectors, queries = dice.integers(-1, 2, (n, d)), dice.integers(-1, 2, (m, d))
    elif kind == "halfway":  # sums that need more than 24 bits and often end in exactly a half
        vectors, queries = (
            dice.integers(-(2**13), 2**13, (n, d)),
            dice.integers(-(2**12), 2**12, (m, d)),
        )
    else:
        vectors, queries = dice.normal(size=(n, d)), dice.normal(size=(m, d))
        vectors[n // 2 :] = vectors[: n - n // 2][::-1] if kind == "random" else vectors[n // 2 :]
        if kind == "wide":
            vectors *= 10.0 ** dice.integers(-8, 9, (n, d))
            queries *= 10.0 ** dice.integers(-8, 9, (m, d))
        if kind == "tiny":
            vectors *= 1e-22
            queries *= 1e-22
    docnos = [str(i) for i in dice.permutation(n)]
    k = draw(st.integers(1, 45))
    return vectors.astype(np.float32), queries.astype(np.float32), docnos, k


@settings(max_examples=80, deadline=None)
@given(
    case=cases(),
    threads=st.integers(1, 3),
    block=st.sampled_from([1, 100, 1000, 2**20]),
    backend=st.sampled_from(["numpy", "faiss"]),
)
def test_search_is_the_definition(case, threads, block, backend):
    """V1 P3 P4 P7: against exact fractions, whatever the block size, threads and back end"""
    vectors, queries, docnos, k = case
    options = {"threads": threads, "block_bytes": block, "backend": backend}
    hits = search_arrays(vectors, queries, k, docnos, **options)
    assert ranking(hits, docnos) == exact_ranking(vectors, queries, docnos, k)
    assert [a.dtype for a in hits] == [np.int64, np.int64, np.float32]


@settings(max_examples=40, deadline=None)
@given(case=cases(), smaller=st.integers(1, 45), backend=st.sampled_from(["numpy", "faiss"]))
def test_top_k_is_a_prefix_of_a_larger_one_and_of_any_batch(case, smaller, backend):
    """P3 P7"""
    vectors, queries, docnos, k = case
    smaller = min(smaller, k)
    whole = ranking(search_arrays(vectors, queries, k, docnos), docnos)
    for number, query in enumerate(queries):
        alone = search_arrays(vectors, query[None], smaller, docnos, backend=backend)
        assert ranking(alone, docnos) == [whole[number][:smaller]]


@pytest.mark.parametrize("d", [3, 384])
def test_results_are_bitwise_the_same_whatever_computes_them(tmp_path, d):
    """P7 V4: batch, threads, blocks, back end; near ties in thousands"""
    dice = np.random.default_rng(d)
    base = dice.normal(size=(40, d))
    vectors = (base[dice.integers(0, 40, 1500)] + 1e-8 * dice.normal(size=(1500, d))).astype("f4")
    queries = dice.normal(size=(30, d)).astype(np.float32)
    opened = vectors_index(tmp_path / "x", vectors)
    expected = opened.search(queries, 200)
    for options in (
        {"threads": 1},
        {"threads": 5, "block_bytes": 2**14},
        {"block_bytes": 7777},
        {"backend": "faiss"},
        {"backend": "faiss", "block_bytes": 2**17, "threads": 2},
    ):
        assert same(opened.search(queries, 200, **options), expected), options
    alone = [opened.search(queries[i : i + 1], 200) for i in range(30)]
    assert np.concatenate([hits.ids for hits in alone]).tolist() == expected.ids.tolist()
    assert np.concatenate([h.scores for h in alone]).tobytes() == expected.scores.tobytes()


@pytest.mark.parametrize("backend", ["numpy", "faiss"])
def test_equal_vectors_have_equal_scores_and_docno_order(tmp_path, backend):
    """P3 P4: top 5 at k = 5, 50, 500 identical; more ties than FAISS is asked for"""
    dice = np.random.default_rng(1)
    vectors = dice.normal(size=(5, 96))[np.arange(600) % 5].astype(np.float32)
    names = [f"d{i}" for i in dice.permutation(600)]
    opened = vectors_index(tmp_path / "x", vectors, names)
    query = dice.normal(size=(3, 96)).astype(np.float32)
    hits = {k: ranking(opened.search(query, k, backend=backend), names) for k in (5, 50, 500)}
    for i in range(3):
        assert hits[5][i] == hits[50][i][:5] == hits[500][i][:5]
        top = hits[50][i]
        assert len({score for _, score in top}) == 1
        assert [docno for docno, _ in top] == sorted(docno for docno, _ in top)


def test_shuffled_corpus_gives_the_same_ranking(tmp_path):
    """P4"""
    dice = np.random.default_rng(2)
    vectors = dice.integers(-2, 3, (500, 6)).astype(np.float32)
    queries = dice.integers(-2, 3, (9, 6)).astype(np.float32)
    names = [f"d{i}" for i in range(500)]
    order = dice.permutation(500)
    one = vectors_index(tmp_path / "x", vectors, names)
    two = vectors_index(tmp_path / "y", vectors[order], [names[i] for i in order])
    left, right = one.search(queries, 40), two.search(queries, 40)
    assert ranking(left, one.docnos) == ranking(right, two.docnos)


@pytest.mark.parametrize("backend", ["numpy", "faiss"])
def test_more_than_all_gives_all_once(small, backend):
    """V1"""
    hits = small.search(encode(["a", "b"]), 1000, backend=backend)
    assert hits.ptr.tolist() == [0, 23, 46]
    assert sorted(hits.ids[:23]) == sorted(hits.ids[23:]) == list(range(23))


@pytest.mark.parametrize("queries", [np.zeros((0, 8)), np.zeros((0, 0)), np.zeros(0)])
def test_no_queries_no_hits(small, queries):
    hits = small.search(queries.astype(np.float32), 5)
    assert [a.tolist() for a in hits] == [[0], [], []]
    assert [a.dtype for a in hits] == [np.int64, np.int64, np.float32]


def test_cosine_search_normalises_the_query(tmp_path):
    """V7: hand-computed"""
    opened = vectors_index(tmp_path / "x", [[3, 4], [1, 0], [0, 0]], similarity="cosine")
    hits = opened.search(np.array([[30, 40], [0, 0]], dtype=np.float32), 3)
    assert hits.ids.tolist() == [0, 1, 2, 0, 1, 2]
    unit_query = np.array([0.6, 0.8], dtype=np.float32).astype(np.float64)
    assert hits.scores[0] == np.float32(unit_query @ unit_query)
    assert hits.scores[1:].tolist() == [np.float32(0.6), 0, 0, 0, 0]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 30), d=st.integers(1, 40))
def test_normalising_does_not_depend_on_the_batch(seed, n, d):
    """P7"""
    rows = np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)
    alone = np.concatenate([unit(row[None]) for row in rows])
    assert alone.tobytes() == unit(rows).tobytes()


def test_zeros_of_either_sign_are_one_score(tmp_path):
    vectors = np.array([[-1e-30], [0], [1e-30], [-0.0]], dtype=np.float32)
    hits = vectors_index(tmp_path / "x", vectors).search(np.full((1, 1), 1e-30, "f4"), 4)
    assert hits.ids.tolist() == [0, 1, 2, 3]
    assert not np.signbit(hits.scores).any()


def test_very_many_ties_do_not_pile_up(tmp_path, monkeypatch):
    """V10: candidates are settled on the way; the result is the same"""
    dice = np.random.default_rng(3)
    vectors = dice.integers(0, 2, (400, 2)).astype(np.float32)
    queries = np.array([[0, 0], [1, 0], [1, 1]], dtype=np.float32)
    names = [f"d{i}" for i in dice.permutation(400)]
    opened = vectors_index(tmp_path / "x", vectors, names)
    expected = opened.search(queries, 7)
    monkeypatch.setattr(knn, "_SPARE", 3)
    assert same(opened.search(queries, 7, block_bytes=200), expected)


def test_groups_of_queries_do_not_show(tmp_path, monkeypatch):
    dice = np.random.default_rng(4)
    opened = vectors_index(tmp_path / "x", dice.normal(size=(300, 5)))
    queries = dice.normal(size=(20, 5)).astype(np.float32)
    expected = opened.search(queries, 9)
    monkeypatch.setattr(knn, "_GROUP", 3)
    assert same(opened.search(queries, 9), expected)


def test_wrong_dimension_names_both_and_the_encoder(small):
    """V8"""
    message = r"query vectors have 3 dimensions, index .*small has 8 \(built with toy\)"
    with pytest.raises(IndexStateError, match=message):
        small.search(np.ones((2, 3), dtype=np.float32), 5)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_query_that_is_not_finite_is_named(small, value):
    """V12"""
    queries = np.ones((3, 8))
    queries[1, 4] = value
    with pytest.raises(FrameError, match=r"query 1 .* holds NaN or infinity"):
        small.search(queries, 5)


def test_scores_that_would_overflow_are_an_error(tmp_path):
    opened = vectors_index(tmp_path / "x", np.full((2, 2), 1e30))
    with pytest.raises(FrameError, match="more than float32 holds"):
        opened.search(np.full((1, 2), 1e30, dtype=np.float32), 1)


def test_one_flat_query_is_an_error(small):
    with pytest.raises(FrameError, match=r"shape \(8,\); give one row per query"):
        small.search(np.ones(8, dtype=np.float32), 5)


@pytest.mark.parametrize(
    ("name", "value"), [("k", 0), ("k", -1), ("threads", -1), ("backend", "annoy")]
)
def test_bad_search_option_is_refused(small, name, value):
    with pytest.raises(SpecError, match=name):
        small.search(**{"queries": encode(["a"]), "k": 3, name: value})


def test_blas_threads_are_as_before(small):
    """P6: also when searches overlap and one fails"""
    before = [library["num_threads"] for library in knn._blas().info()]
    searches = [threading.Thread(target=small.search, args=(encode(["a"]), 3)) for _ in range(8)]
    for search in searches:
        search.start()
    for search in searches:
        search.join()
    with pytest.raises(RuntimeError, match="lost"), knn._one_blas_thread:
        raise RuntimeError("lost")
    assert [library["num_threads"] for library in knn._blas().info()] == before


def test_rounding_where_float64_is_exactly_halfway():
    """The last term decides, 2**-80 below what float64 can see."""
    half = 2.0**-24
    assert knn._rounded_sum([1.0, half]) == np.float32(1)
    assert knn._rounded_sum([1.0, half, 2.0**-80]) == np.float32(1) + np.float32(2**-23)
    assert knn._rounded_sum([1.0, half, -(2.0**-80)]) == np.float32(1)
    assert knn._rounded_sum([-1.0, -half, -(2.0**-80)]) == -np.float32(1) - np.float32(2**-23)


def test_scores_just_beside_halfway_are_rounded_right():
    """Through the search: one document halfway between two float32, two a hair beside."""
    query = np.array([[1, 2.0**-24, 2.0**-60]], dtype=np.float32)
    vectors = np.array([[1, 1, 0], [1, 1, 2.0**-60], [1, 1, -(2.0**-60)]], dtype=np.float32)
    above = float(np.float32(1) + np.float32(2.0**-23))
    hits = search_arrays(vectors, query, 3)
    assert hits.ids.tolist() == [1, 0, 2]
    assert hits.scores.tolist() == [above, 1.0, 1.0]


@pytest.mark.slow
def test_pool_ranking_is_exact_on_real_vectors(tmp_path):
    """P7: every score of the 97 real queries equals its exact sum"""
    folder = Path(os.environ.get("PRF_SHARED", ROOT.parent / "shared")) / "data" / "encodings"
    name = "msmarco-v1-dl-pool"
    if not folder.exists():
        pytest.skip("no shared data")
    build_from_vectors(
        tmp_path / "x", folder / f"{name}.docs.f16.npy", folder / f"{name}.docs.ids.txt"
    )
    opened = open_index(tmp_path / "x")
    queries = np.load(folder / f"{name}.dl19.queries.f16.npy").astype(np.float32)
    hits = opened.search(queries, 1000)
    assert np.diff(hits.ptr).tolist() == [1000] * len(queries)
    which = np.repeat(np.arange(len(queries)), 1000)
    terms = opened.vectors[hits.ids].astype(np.float64) * queries[which].astype(np.float64)
    exact = [float(knn._rounded_sum(row)) for row in terms.tolist()]
    assert hits.scores.tolist() == exact
    full = queries.astype(np.float64) @ opened.vectors.astype(np.float64).T
    kth = hits.scores[999::1000].astype(np.float64)
    assert ((full > kth[:, None] + 1e-6).sum(axis=1) <= 1000).all()
    for one, ptr in zip(full, hits.ptr, strict=False):
        assert set(np.flatnonzero(one > hits.scores[ptr + 999] + 1e-6)) <= set(
            hits.ids[ptr : ptr + 1000]
        )

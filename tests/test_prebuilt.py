"""Prebuilt indexes of Pyserini: names, places, and downloads that go wrong."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from prf import DenseRetriever, download, export_pyserini, prebuilt
from prf.cli import main
from prf.errors import FileFormatError, IndexStateError, MissingDependency, SpecError
from prf.index import open_index
from prf.lucene import open_index as open_lucene
from prf.prebuilt import Prebuilt, local_path, names

pytest.importorskip("pyserini")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYSERINI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "indexes"


class Server:
    """Serves what ``files`` says: a body, and how long it is said to be."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, int]] = {}
        files = self.files

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path not in files:
                    self.send_error(404)
                    return
                body, length = files[self.path]
                self.send_response(200)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    def offer(self, name: str, body: bytes, length: int | None = None) -> str:
        self.files[f"/{name}"] = (body, len(body) if length is None else length)
        return f"http://127.0.0.1:{self.http.server_port}/{name}"

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


def packed(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return out.getvalue()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that makes a name known, as if Pyserini's table held it."""
    table = dict(names())
    monkeypatch.setattr(prebuilt, "names", lambda: table)

    def add(name: str, urls: list[str], body: bytes) -> None:
        md5 = hashlib.md5(body).hexdigest()
        table[name] = Prebuilt(name, f"{name}.tar.gz", tuple(urls), md5, len(body))

    return add


def test_names_of_all_kinds_are_known() -> None:
    known = names()
    ance = known["msmarco-v1-passage.ance"]
    assert ance.file == "faiss-flat.msmarco-v1-passage.ance.20210224.060cef.tar.gz"
    assert ance.md5 == "e6cf0c1011200af81fd53aa7c5ce9414"
    assert ance.size == 25102344926
    for name in ("msmarco-v1-passage", "msmarco-v1-passage.splade-v3", "beir-v1.0.0-scifact.flat"):
        assert known[name].file.startswith("lucene-inverted.")
        assert known[name].urls[0].startswith("https://")
        assert known[name].size > 0


def test_place_is_pyserinis(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = names()["msmarco-v1-passage.ance"].folder
    stem = "faiss-flat.msmarco-v1-passage.ance.20210224.060cef"
    assert folder == cache / f"{stem}.e6cf0c1011200af81fd53aa7c5ce9414"
    monkeypatch.delenv("PYSERINI_CACHE")
    home = Path("~/.cache/pyserini/indexes").expanduser()
    assert names()["msmarco-v1-passage.ance"].folder.parent == home


@pytest.mark.parametrize("opener", [open_index, open_lucene])
def test_what_is_not_downloaded_is_told(opener, cache: Path) -> None:
    with pytest.raises(IndexStateError, match=r"prf download pyserini:msmarco-v1-passage.ance"):
        opener("pyserini:msmarco-v1-passage.ance")
    with pytest.raises(SpecError, match=r"did you mean 'msmarco-v1-passage.ance'"):
        opener("pyserini:msmarco-v1-passage.anse")


def test_explain_names_the_place(cache: Path) -> None:
    (resource,) = DenseRetriever("pyserini:msmarco-v1-passage.ance").resources()
    assert str(cache) in str(resource)
    assert "not there" in str(resource)


def test_without_pyserini_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "find_spec", lambda name: None)
    names.cache_clear()
    with pytest.raises(MissingDependency, match="pyserini"):
        local_path("pyserini:msmarco-v1-passage.ance")


def test_download_gives_an_index(cache, server, known, tmp_path, material) -> None:
    pytest.importorskip("faiss")
    export_pyserini(tmp_path / "x", material.dense)
    members = [(f"x/{name}", (tmp_path / "x" / name).read_bytes()) for name in ("index", "docid")]
    body = packed(*members)
    known("toy", [server.offer("gone", b"")[:-1], server.offer("toy", body)], body)
    path = download("pyserini:toy")
    assert sorted(os.listdir(cache)) == [path.name]
    opened = open_index("pyserini:toy")
    ours = open_index(material.dense)
    np.testing.assert_array_equal(opened.get(opened.docnos), ours.get(ours.docnos))
    server.files.clear()
    assert download("toy") == path  # not fetched again
    assert main(["download", "pyserini:toy", "--no-progress"]) == 0


@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        ("missing", IndexStateError, "404"),
        ("checksum", IndexStateError, "it should have"),
        ("cut", IndexStateError, r"IncompleteRead|broke off"),
        ("refused", IndexStateError, "refused"),
        ("no archive", FileFormatError, "cannot be unpacked"),
        ("outside", FileFormatError, "cannot be unpacked"),
        ("two folders", FileFormatError, "should hold one folder"),
    ],
)
def test_failed_download_leaves_nothing(cache, server, known, trouble, error, message) -> None:
    body = {
        "no archive": b"something else",
        "outside": packed(("../evil", b"x")),
        "two folders": packed(("a/index", b"x"), ("b/index", b"x")),
    }.get(trouble, packed(("a/index", b"x" * 1000)))
    url = {
        "missing": lambda: server.offer("other", body)[:-1],
        "cut": lambda: server.offer("toy", body[:-20], len(body)),
        "refused": lambda: "http://127.0.0.1:1/toy",
    }.get(trouble, lambda: server.offer("toy", body))()
    known("toy", [url], body + b"!" if trouble == "checksum" else body)
    with pytest.raises(error, match=message):
        download("toy")
    assert os.listdir(cache) == []
    assert not (cache.parent / "evil").exists()


def test_full_disk_is_seen_before(cache, server, known, monkeypatch) -> None:
    known("toy", [server.offer("toy", b"x")], b"x")
    monkeypatch.setattr(Prebuilt, "size", 10**18)
    with pytest.raises(IndexStateError, match="set PYSERINI_CACHE"):
        download("toy")
    assert os.listdir(cache) == []

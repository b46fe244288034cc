"""Measures pipelines on the test collections and writes the tables of pipelines/RESULTS.md.

    PRF_SHARED=../shared python tests/bench/results.py [TABLE ...] [--work FOLDER]

Without a table's name all are made. Each stands in the file between two comments with its name;
the others stay as they are. Indexes are kept in FOLDER, if one is given, and used again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import DL19, DL20, NFCORPUS, POOL, ROOT, SHARED, Topics

import prf
from prf import (
    BM25,
    RM3,
    AveragePrf,
    DenseRetriever,
    Impact,
    Interpolate,
    QueryVectors,
    Rocchio,
    RocchioTerms,
    SparseAverage,
    SparseRocchio,
    Splade,
    Transformer,
    Vectors,
)
from prf.frames import column, objects, ranked
from prf.sparse_models import PYSERINI, load_splade

FILE = ROOT / "pipelines" / "RESULTS.md"
SPLADE = str(SHARED.parent / "models" / "splade-tiny")
LENGTH = 256
DEPTHS = (1, 3, 5, 10)


class Indexes:
    """Indexes of the collections, each built when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _built(self, name: str, build: Callable[[Path], object]) -> str:
        path = self.folder / name
        if not path.exists():
            print(f"building {name}", file=sys.stderr)
            build(path)
        return str(path)

    def bm25(self, collection: str) -> str:
        docs = SHARED / collection / "docs.jsonl.gz"
        return self._built(f"{collection}-bm25", lambda p: prf.build_lucene(p, docs))

    def minilm(self, topics: Topics) -> str:
        files = topics.encoded("docs")
        return self._built(
            f"{topics.collection}-minilm", lambda p: prf.build_vectors(p, *files, encoder="minilm")
        )

    @cached_property
    def splade(self) -> str:
        return self._built(
            "nfcorpus-splade",
            lambda p: prf.build_sparse(p, NFCORPUS.docs, SPLADE, "splade", max_length=LENGTH),
        )


def measured(
    topics: Topics, systems: dict[str, Transformer | pd.DataFrame], measures: list[str]
) -> str:
    """Returns the table of some systems on one query set; the first is the baseline."""
    frame, qrels = prf.read_topics(topics.topics), prf.read_qrels(topics.qrels)
    evaluations = []
    for name, system in systems.items():
        print(f"{topics}: {name}", file=sys.stderr)
        run = system if isinstance(system, pd.DataFrame) else system(frame)
        evaluations.append(prf.evaluate(run, qrels, measures, topics=frame, name=name))
    return prf.render(prf.compare(evaluations), "markdown")


def common(topics: Topics) -> list[str]:
    rel = f"(rel={topics.rel})"
    return ["nDCG@10", f"AP{rel}@1000", f"R{rel}@100", f"R{rel}@1000"]


def exact_product() -> pd.DataFrame:
    """Returns the ranking of NFCorpus by the product of weights that were never rounded."""
    model = load_splade(SPLADE)
    docs, frame = list(prf.read_docs(NFCORPUS.docs)), prf.read_topics(NFCORPUS.topics)
    shape = len(model.vocabulary)
    weights = [
        model.encode([text for _, text in docs], "document", max_length=LENGTH),
        model.encode(list(frame["query"]), "query", max_length=LENGTH),
    ]
    d, q = (sp.csr_matrix((w.values, w.ids, w.ptr), shape=(len(w.ptr) - 1, shape)) for w in weights)
    found = (q @ d.T).tocoo()
    qids, names = frame["qid"].to_numpy(), objects(docno for docno, _ in docs)
    rows = pd.DataFrame(
        {
            "qid": column(qids[found.row]),
            "docno": column(names[found.col]),
            "score": found.data.astype(np.float64),
        }
    )
    results = ranked(rows)
    return results[results["rank"] < 1000]


def splade(indexes: Indexes) -> str:
    """Feedback on learned sparse vectors, NFCorpus."""
    index = indexes.splade
    query, search = Splade(SPLADE, max_length=LENGTH), Impact(index)
    first = query >> search
    systems: dict[str, Transformer | pd.DataFrame] = {
        "splade-tiny, impact index": first,
        "splade-tiny, exact product": exact_product(),
    }
    for name, stage in {
        "Average": lambda k: SparseAverage(index, fb_docs=k),
        "Rocchio .8/.2": lambda k: SparseRocchio(index, fb_docs=k),
        "RM3": lambda k: RM3(index, fb_docs=k),
        "RocchioTerms": lambda k: RocchioTerms(index, fb_docs=k),
    }.items():
        systems |= {f"{name}, k={k}": first >> stage(k) >> search for k in DEPTHS}
    note = (
        "Encoder `splade-tiny` (2 layers), texts cut at 256 word pieces, weights rounded to "
        f"{2**PYSERINI.bits} steps over {PYSERINI.weight_range:g}; new queries of the first two "
        "methods are cut to 64 terms. RM3 and RocchioTerms are Anserini's, with its defaults. "
        "The second row shows what rounding costs."
    )
    return f"{note}\n\n{measured(NFCORPUS, systems, common(NFCORPUS))}"


def second_pass(indexes: Indexes, sets: Sequence[Topics] = (NFCORPUS, DL19, DL20)) -> str:
    """BM25 with RM3, fed by BM25 and by MiniLM."""
    parts = []
    for topics in sets:
        index = indexes.bm25(topics.collection)
        bm25, rm3 = BM25(index), RM3(index)
        query = QueryVectors(*map(str, topics.encoded("queries")))
        dense = query >> DenseRetriever(indexes.minilm(topics))
        systems: dict[str, Transformer | pd.DataFrame] = {
            "BM25": bm25,
            "BM25 >> RM3 >> BM25": bm25 >> rm3 >> bm25,
            "MiniLM": dense,
            "MiniLM >> RM3 >> BM25": dense >> rm3 >> bm25,
        }
        parts.append(f"{_name(topics)}:\n\n{measured(topics, systems, common(topics))}")
    return "\n\n".join(parts)


def dense(indexes: Indexes) -> str:
    """Dense retrieval, feedback and interpolation on the pool."""
    parts = []
    for topics in (DL19, DL20):
        index = indexes.minilm(topics)
        bm25, search, vectors = (
            BM25(indexes.bm25(POOL)),
            DenseRetriever(index),
            Vectors(index),
        )
        query = QueryVectors(*map(str, topics.encoded("queries")))
        rocchio = vectors >> Rocchio(fb_docs=3, alpha=0.4, beta=0.6) >> search
        mixed = Interpolate((bm25, search))
        systems: dict[str, Transformer | pd.DataFrame] = {
            "MiniLM": query >> search,
            "BM25": bm25,
            "Average, k=3": query >> search >> vectors >> AveragePrf(fb_docs=3) >> search,
            "Rocchio .4/.6, k=3": query >> search >> rocchio,
            "Rocchio .4/.6, k=5": query >> search >> vectors >> Rocchio(fb_docs=5) >> search,
            "interpolation: No": query >> mixed,
            "interpolation: Pre": query >> mixed >> rocchio,
            "interpolation: Post": query >> Interpolate((bm25, search >> rocchio)),
            "interpolation: Both": query >> Interpolate((bm25, mixed >> rocchio)),
        }
        parts.append(f"{_name(topics)}:\n\n{measured(topics, systems, common(topics)[:3])}")
    note = (
        "Interpolation with BM25, half and half, both sides brought to 0 to 1 over their 1,000 "
        "documents, as in arXiv 2205.00235; its feedback is Rocchio with k=3."
    )
    return "\n\n".join([note, *parts])


def _name(topics: Topics) -> str:
    return f"pool, {topics.name}" if topics.collection == POOL else str(topics)


TABLES = {"splade": splade, "second-pass": second_pass, "dense": dense}


def code_fingerprint(modules: Sequence[str]) -> str:
    """Returns a checksum of modules of ``prf``, without their comments, docstrings and layout."""
    code = hashlib.sha256()
    for module in modules:
        tree = ast.parse((ROOT / "prf" / f"{module}.py").read_text("utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [n for n in body if not _is_text(n)] or [ast.Pass()]  # type: ignore[attr-defined]
        code.update(ast.unparse(tree).encode())
    return code.hexdigest()[:16]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def write(name: str, text: str, title: str, file: Path = FILE) -> None:
    """Puts a section between its comments, at the end of the file if it is new."""
    block = f"<!-- {name} -->\n## {title.strip().rstrip('.')}\n\n{text}\n<!-- /{name} -->"
    old = file.read_text(encoding="utf-8")
    pattern = re.compile(rf"<!-- {name} -->.*<!-- /{name} -->", re.S)
    new = pattern.sub(lambda _: block, old) if pattern.search(old) else f"{old}\n{block}\n"
    file.write_text(new, encoding="utf-8")


def main() -> None:
    """Makes the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], metavar="TABLE")
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        indexes = Indexes(given.work or Path(folder))
        for name in given.tables or TABLES:
            table = TABLES[name](indexes)
            write(name, table, TABLES[name].__doc__ or "")
            print(f"\n{table}")


if __name__ == "__main__":
    main()

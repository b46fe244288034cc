"""FAISS types on the pool's MiniLM vectors: recall, size, speed, build time, feedback.

Run with the shared collections in ``PRF_SHARED`` (default: ../shared). Prints two markdown tables.
Speeds are ratios to the exact search, measured in turns in one run: the median of ``TURNS``.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import DL19, DL20, Topics

import prf
from prf import DenseRetriever, QueryVectors, Rocchio, Vectors
from prf.faiss_index import build_faiss, search_faiss
from prf.frames import Hits
from prf.index import open_index

TYPES = [
    "HNSW32",
    "IVF256,Flat",
    "SQfp16",
    "SQ8",
    "SQ4",
    "IVF256,SQ8",
    "PQ96",
    "PQ48",
    "OPQ48,PQ48",
]
DEPTH, TURNS, THREADS = 100, 5, 1


def queries() -> np.ndarray:
    tables = [np.load(topics.encoded("queries")[0]) for topics in (DL19, DL20)]
    return np.concatenate(tables).astype(np.float32)


def overlap(found: Hits, exact: Hits) -> float:
    pairs = zip(rows(found), rows(exact), strict=True)
    return sum(len(a & b) for a, b in pairs) / len(exact.ids)


def rows(hits: Hits) -> list[set[int]]:
    return [set(hits.ids[a:b]) for a, b in pairwise(hits.ptr)]


def types_table(path: Path) -> None:
    built = {}
    for factory in TYPES:
        start = time.perf_counter()
        entry = build_faiss(path, factory)
        built[factory] = (time.perf_counter() - start, entry["bytes"])
    index, asked = open_index(path), queries()

    def run(factory: str, candidates: int, rescore: bool = True) -> Hits:
        if not factory:
            return index.search(asked, DEPTH, threads=THREADS)
        return search_faiss(
            index,
            factory,
            asked,
            DEPTH,
            candidates=candidates,
            rescore=rescore,
            threads=THREADS,
        )

    systems = ["", *TYPES]
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(TURNS):
        for factory in systems:
            for candidates in (100, 1000):
                start = time.perf_counter()
                run(factory, candidates)
                seconds.setdefault((factory, candidates), []).append(time.perf_counter() - start)
    exact = run("", 0)
    flat = [a for c in (100, 1000) for a in seconds["", c]]
    print(
        "| type | bytes a vector | build, s | R@100, its own scores "
        "| R@100, 100 re-scored | speed | R@100, 1,000 re-scored | speed |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    print(f"| exact (vectors.f32) | {index.dim * 4:,} | 0 | 1 | 1 | 1 | 1 | 1 |")
    for factory in TYPES:
        took, size = built[factory]
        cells = [f"{overlap(run(factory, 100, False), exact):.3f}"]
        for candidates in (100, 1000):
            cells.append(f"{overlap(run(factory, candidates), exact):.3f}")
            cells.append(f"{median(flat) / median(seconds[factory, candidates]):.2f}")
        print(f"| `{factory}` | {size / len(index):,.0f} | {took:.0f} | {' | '.join(cells)} |")


def feedback_table(path: Path) -> None:
    """Compares feedback from decoded vectors with that from the encoder's; search is exact."""
    print("\n| feedback vectors | dl19 nDCG@10 | AP | R@100 | dl20 nDCG@10 | AP | R@100 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    sources: dict[str, Path | None] = {"none (dense only)": None, "exact": path}
    for factory in TYPES:
        if factory.startswith(("SQ", "PQ", "OPQ")):
            sources[f"`{factory}`"] = path.parent / factory
            prf.export_pyserini(path.parent / factory, path, faiss=factory)
    for name, source in sources.items():
        figures = [value for topics in (DL19, DL20) for value in row(path, source, topics)]
        print(f"| {name} | {' | '.join(f'{value:.4f}' for value in figures)} |")


def row(path: Path, source: Path | None, topics: Topics) -> list[float]:
    vectors, ids = map(str, topics.encoded("queries"))
    pipeline = QueryVectors(vectors, ids) >> DenseRetriever(path)
    if source is not None:
        method = Rocchio(fb_docs=5, alpha=0.4, beta=0.6)
        pipeline = pipeline >> Vectors(source) >> method >> DenseRetriever(path)
    run = pipeline(prf.read_topics(topics.topics))
    return (
        prf.evaluate(run, prf.read_qrels(topics.qrels), topics.measures)
        .mean[["nDCG@10", f"AP(rel={topics.rel})", f"R(rel={topics.rel})@100"]]
        .tolist()
    )


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool"
        prf.build_vectors(path, *DL19.encoded("docs"))
        types_table(path)
        feedback_table(path)


if __name__ == "__main__":
    main()

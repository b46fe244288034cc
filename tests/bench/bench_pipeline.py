"""Times dense Rocchio end to end, frames included, against bare FAISS and other toolkits.

    DenseRetriever(k=1000) >> Vectors >> Rocchio(fb_docs=5) >> DenseRetriever(k=1000)

for the 97 query vectors of TREC DL 2019 and 2020 over the pool's 40,873 vectors, with two threads,
from the query frame to the result frame of 97,000 rows. The first row is two bare searches of
``faiss.IndexFlatIP`` with k=1000 of the same batch, without frames. The repetitions of all rows
alternate, so that other load falls on all alike; only the ratios mean something elsewhere.
Pyserini's ``FaissSearcher`` runs in a process of its own and ends with its own lists of hits.

    PRF_SHARED=../shared python tests/bench/bench_pipeline.py [--profile] [repetitions]
"""

from __future__ import annotations

import cProfile
import os
import pstats
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pandas as pd
import pyterrier_dr
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import DEPTH, DL19, DL20, pyserini

import prf
from prf import DenseRetriever, QueryEncoder, QueryVectors, Rocchio, Vectors
from prf.index import open_index
from prf.pipeline import Log, logging_to

THREADS = 2


def timed(job: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        job()
        return time.perf_counter() - start

    return seconds


def queries() -> pd.DataFrame:
    parts = [
        QueryVectors(*map(str, topics.encoded("queries")))(prf.read_topics(topics.topics))
        for topics in (DL19, DL20)
    ]
    return pd.concat(parts, ignore_index=True)


def pipeline(index: str, backend: str) -> prf.Transformer:
    search = DenseRetriever(index, k=DEPTH, threads=THREADS, backend=backend)
    return search >> Vectors(index) >> Rocchio(fb_docs=5) >> search  # which runs with k=5 first


def rows(folder: Path, frame: pd.DataFrame) -> dict[str, Callable[[], float]]:
    """Returns what is timed, by name: functions that return seconds."""
    ours = str(folder / "ours")
    prf.build_vectors(ours, *DL19.encoded("docs"))
    index = open_index(ours)
    vectors = np.array(index.vectors)
    batch = np.stack(frame["query_vec"].tolist())
    flat = faiss.IndexFlatIP(index.dim)
    flat.add(vectors)

    anserini = folder / "pyserini"  # a folder as Pyserini wants it
    anserini.mkdir()
    faiss.write_index(flat, str(anserini / "index"))
    shutil.copy(Path(ours) / "docid", anserini / "docid")
    np.save(folder / "queries.npy", batch)

    flex = pyterrier_dr.FlexIndex(str(folder / "flex"), verbose=False)
    flex.index(
        {"docno": docno, "doc_vec": vector}
        for docno, vector in zip(index.docnos, vectors, strict=True)
    )

    def terrier(first: object, second: object) -> Callable[[], float]:
        method = pyterrier_dr.VectorPrf(alpha=0.4, beta=0.6, k=5)
        stages = first >> flex.vec_loader() >> method >> second
        return timed(lambda: stages(frame))

    def retrievers(name: str) -> tuple[object, object]:
        if name == "faiss":
            whole = flex.faiss_flat_retriever()
            return whole % 5, whole % DEPTH
        make = getattr(flex, f"{name}_retriever")
        return make(num_results=5), make(num_results=DEPTH)

    stages = pipeline(ours, "numpy")
    results = stages(frame)
    assert len(results) == DEPTH * len(frame)
    return {
        "faiss.IndexFlatIP, k=1000, twice": timed(
            lambda: [flat.search(batch, DEPTH), flat.search(batch, DEPTH)]
        ),
        "prf": timed(lambda: stages(frame)),
        "prf, encoding the queries too": timed(
            lambda: (QueryEncoder("minilm") >> stages)(frame.drop(columns="query_vec"))
        ),
        "prf, backend='faiss'": timed(lambda: pipeline(ours, "faiss")(frame)),
        # As its manual writes it: the first pass is not cut to what feedback reads.
        "pyterrier_dr, numpy, k=1000 twice": terrier(
            *[flex.np_retriever(num_results=DEPTH) for _ in range(2)]
        ),
        "pyterrier_dr, torch, k=1000 twice": terrier(
            *[flex.torch_retriever(num_results=DEPTH) for _ in range(2)]
        ),
        "pyterrier_dr, FlexIndex, numpy": terrier(*retrievers("np")),
        "pyterrier_dr, FlexIndex, torch": terrier(*retrievers("torch")),
        "pyterrier_dr, FlexIndex, faiss": terrier(*retrievers("faiss")),
        "Pyserini, FaissSearcher": lambda: pyserini().ask(
            "dense_seconds",
            index=str(anserini),
            queries=str(folder / "queries.npy"),
            threads=THREADS,
        ),
    }


def main() -> None:
    """Prints one line per row: median, its part of the first row's, best; then our stages."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--profile"]
    repetitions = int(arguments[0]) if arguments else 7
    faiss.omp_set_num_threads(THREADS)
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # torch's
    torch.set_num_threads(THREADS)
    frame = queries()
    with tempfile.TemporaryDirectory() as folder:
        jobs = rows(Path(folder), frame)
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for repetition in range(repetitions + 1):
            for name, job in jobs.items():
                seconds = job()
                if repetition:  # the first one warms up
                    times[name].append(seconds)
        stages = pipeline(str(Path(folder) / "ours"), "numpy")
        logs = []
        for _ in range(repetitions):
            with logging_to(Log()) as log:
                stages(frame)
            logs.append(log.seconds)
        profile = cProfile.Profile()
        if "--profile" in sys.argv:
            profile.runcall(stages, frame)
    reference = next(iter(times.values()))
    print(
        f"{repetitions} repetitions, {THREADS} threads of {os.cpu_count()} hardware threads, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':36}{'median ms':>10}{'best ms':>10}{'/ faiss':>9}{'best/best':>11}")
    for name, own in times.items():
        median = statistics.median(own)
        print(
            f"{name:36}{1000 * median:10.1f}{1000 * min(own):10.1f}"
            f"{median / statistics.median(reference):9.2f}{min(own) / min(reference):11.2f}"
        )
    print("prf, by stage")
    for name in logs[0]:
        values = [1000 * log[name] for log in logs]
        print(f"  {name:34}{statistics.median(values):10.1f}{min(values):10.1f}")
    if "--profile" in sys.argv:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

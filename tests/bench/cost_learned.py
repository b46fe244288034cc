"""What a query costs in each feedback method: parameters, file, memory, time; one run.

    PRF_SHARED=../shared python tests/bench/cost_learned.py TPRF_FOLDER ENCODER_FOLDER INDEX

Each method runs in a process of its own, so that memory is its own; all methods of one number of
threads are timed in turns within the same minutes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import NFCORPUS, Topics

import prf
from prf import TPRF, AveragePrf, DenseRetriever, EncoderPrf, QueryVectors, Rocchio, Text, Vectors
from prf.trec import read_json

DEPTHS, BATCHES, THREADS = (3, 5, 10), (1, 64), (1, 2)
REPEATS = 5


def stages(models: dict[str, str]) -> dict[str, Callable[[int, int], prf.Transformer]]:
    """Returns the methods: from depth and batch size to a stage."""
    return {
        "Average": lambda k, size: AveragePrf(k),
        "Rocchio": lambda k, size: Rocchio(k, 0.4, 0.6),
        "TPRF": lambda k, size: TPRF(models["TPRF"], fb_docs=k, batch_size=size),
        # As long as all k passages need, at the length it was trained with for each.
        "text encoder": lambda k, size: EncoderPrf(
            models["text encoder"], fb_docs=k, batch_size=size, max_length=24 + 30 * k
        ),
    }


def measure(method: str, models: dict[str, str], index: str, topics: Topics) -> dict[str, Any]:
    """Returns the milliseconds of a query, by depth and batch, of the stage and of both searches.

    The frame of a batch is made beforehand; a batch is one call, as a search makes it.
    """
    import torch

    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    frame = prf.read_topics(topics.topics).head(64)
    table, ids = topics.encoded("queries")
    query, search = QueryVectors(str(table), str(ids)), DenseRetriever(index, threads=threads)
    encoded = query.transform(frame)
    first = (search % max(DEPTHS)).transform(encoded)
    needs = Text(str(topics.docs)) if method == "text encoder" else Vectors(index)
    found = needs.transform(first)
    empty = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out: dict[str, Any] = {}
    for size in BATCHES:
        parts = [
            found[found["qid"].isin(set(frame["qid"][start : start + size]))].reset_index(drop=True)
            for start in range(0, len(frame), size)
        ][:32]
        count = sum(part["qid"].nunique() for part in parts)
        for k in DEPTHS:
            stage = stages(models)[method](k, size)
            stage.transform(parts[0])
            times = []
            for _ in range(REPEATS):
                begun = time.perf_counter()
                for part in parts:
                    stage.transform(part)
                times.append((time.perf_counter() - begun) / count * 1000)
            out[f"{size}.{k}"] = float(np.median(times))
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out["memory"] = (whole - empty) / 1024
    for size in BATCHES:
        searched = []
        batches = [encoded[start : start + size] for start in range(0, len(encoded), size)][:32]
        for _ in range(REPEATS):
            begun = time.perf_counter()
            for batch in batches:
                (search % 10).transform(batch)
                search.transform(batch)
            searched.append((time.perf_counter() - begun) / sum(map(len, batches)) * 1000)
        out[f"{size}.search"] = float(np.median(searched))
    return out


def in_a_process(
    method: str, threads: int, models: dict[str, str], index: str, topics: Topics
) -> dict[str, Any]:
    task = json.dumps([method, models, index, list(topics)])
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, __file__, "--one", task],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def table(models: dict[str, str], index: str, topics: Topics) -> str:
    """Returns the tables of costs."""
    sizes = {
        name: Path(model, "model.safetensors").stat().st_size for name, model in models.items()
    }
    count = {
        name: read_json(Path(model, "training.json"))["parameters"]
        for name, model in models.items()
    }
    made = {
        threads: {
            method: in_a_process(method, threads, models, index, topics)
            for method in stages(models)
        }
        for threads in THREADS
    }
    lines = [
        "Milliseconds a query, median of "
        f"{REPEATS} rounds in one run: making the new query only (frames of results in, frames of "
        "queries out). The text encoder reads 30 ids of each passage, as in training. Memory is by "
        "how much the process's peak grew, model included. `search` is both searches of the index "
        "(3,633 documents, 1,000 results) of one query beside it.\n"
    ]
    for threads, methods in made.items():
        cells = [f"batch {size}, k={k}" for size in BATCHES for k in DEPTHS]
        lines.append(
            f"\n{threads} CPU thread{'s' if threads > 1 else ''}:\n\n"
            "| method | parameters | file, MB "
            f"| memory, MB | {' | '.join(cells)} | search, batch 1 | search, batch 64 |\n"
            f"| --- |{' ---: |' * (len(cells) + 5)}"
        )
        for method, values in methods.items():
            numbers = [f"{values[f'{size}.{k}']:.2f}" for size in BATCHES for k in DEPTHS]
            searched = [f"{values[f'{size}.search']:.2f}" for size in BATCHES]
            about = (
                [f"{count[method]:,}", f"{sizes[method] / 1e6:.1f}"]
                if method in count
                else ["", ""]
            )
            line = [method, *about, f"{values['memory']:.0f}", *numbers, *searched]
            lines.append(f"| {' | '.join(line)} |")
    lines.append("\n" + _ratios(made, sizes))
    return "\n".join(lines)


def _ratios(made: dict[int, dict[str, dict[str, Any]]], sizes: dict[str, int]) -> str:
    ratios = [
        values["text encoder"][f"{size}.{k}"] / values["TPRF"][f"{size}.{k}"]
        for values in made.values()
        for size in BATCHES
        for k in DEPTHS
    ]
    shares = [
        values["TPRF"][f"{size}.{k}"]
        / (values["TPRF"][f"{size}.{k}"] + values["TPRF"][f"{size}.search"])
        for values in made.values()
        for size in BATCHES
        for k in DEPTHS
    ]
    return (
        f"The text encoder takes {min(ratios):.1f} to {max(ratios):.1f} times as long as TPRF; its "
        f"file is {sizes['text encoder'] / sizes['TPRF']:.1f} times as large. Of the time of "
        f"feedback and both searches together, TPRF takes {100 * min(shares):.0f} to "
        f"{100 * max(shares):.0f} %."
    )


def main() -> None:
    """Prints the tables."""
    if sys.argv[1] == "--one":
        method, models, index, topics = json.loads(sys.argv[2])
        print(json.dumps(measure(method, models, index, Topics(*topics))))
        return
    tprf, encoder, index = sys.argv[1:]
    print(table({"TPRF": tprf, "text encoder": encoder}, index, NFCORPUS))


if __name__ == "__main__":
    main()

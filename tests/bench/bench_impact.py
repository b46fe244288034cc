"""Times impact search and sparse encoding of documents against Pyserini's, in one run.

Search: the 323 test queries of NFCorpus over its 3,633 abstracts, both encoded with splade-tiny,
1,000 results each. Ours ends with the result frame, Pyserini's loop over its impact searcher with
docid and score of every hit as Python values. Encoding: abstracts to whole-number weights, the same
texts, batch size and one Torch thread on either side, models loaded. The repetitions of a group
alternate, so that other load falls on all alike; only the ratios mean something elsewhere. At the
end, where our time goes.

    PRF_SHARED=../shared python tests/bench/bench_impact.py [repetitions]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from conftest import save_checkpoint
from reference import DEPTH, NFCORPUS, SHARED, pyserini

import prf
from prf import Impact, Splade
from prf.sparse_build import encode_documents
from prf.sparse_models import PYSERINI, SparseModel, load_splade, load_unicoil

SPLADE = SHARED.parent / "models" / "splade-tiny"
LENGTH, BATCH = 256, 16


def compare(title: str, rows: dict[str, Callable[[], float]], repetitions: int) -> None:
    """Prints median seconds of each row, and how many times faster it is than the first."""
    times = {name: list[float]() for name in rows}
    for repetition in range(repetitions + 1):
        for name, seconds in rows.items():
            taken = seconds()
            if repetition:  # the first is for warming up
                times[name].append(taken)
    first = statistics.median(next(iter(times.values())))
    print(title)
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"  {name:40}{median:9.3f} s{first / median:8.1f} times")


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def search(index: str, repetitions: int) -> None:
    topics = Splade(str(SPLADE))(prf.read_topics(NFCORPUS.topics))
    queries = [{term: int(w) for term, w in toks.items()} for toks in topics["query_toks"] if toks]
    compare(
        f"impact search, {len(queries)} queries",
        {
            "Pyserini, search() in a loop": lambda: pyserini().ask(
                "impact_seconds", index=index, queries=queries, k=DEPTH
            ),
            "prf, all cores": lambda: timed(lambda: Impact(index)(topics)),
            "prf, 1 thread": lambda: timed(lambda: Impact(index, threads=1)(topics)),
        },
        repetitions,
    )


def encoding(
    title: str, name: str, path: Path, model: SparseModel, texts: Sequence[str], repetitions: int
) -> None:
    def ours() -> None:
        encode_documents(model, texts, max_length=LENGTH, batch_size=BATCH)

    def theirs() -> float:
        return pyserini().weights(name, path, list(texts), BATCH, max_length=LENGTH)[1]

    compare(
        f"{title}, {len(texts)} abstracts",
        {"Pyserini": theirs, "prf": lambda: timed(ours)},
        repetitions,
    )
    whole = timed(ours)
    reading = timed(lambda: model.layout(texts, LENGTH))
    weights = model.encode(texts, "document", max_length=LENGTH, batch_size=BATCH)
    rounding = timed(lambda: model.terms(weights, PYSERINI))
    print(
        f"  of our time: tokenizing {reading / whole:.0%}, rounding {rounding / whole:.0%}, "
        f"the model {1 - (reading + rounding) / whole:.0%}"
    )


def main() -> None:
    """Prints a group for search and one for each encoder."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    torch.set_num_threads(1)
    texts = [text for _, text in islice(prf.read_docs(NFCORPUS.docs), 64)]
    with tempfile.TemporaryDirectory() as folder:
        index = f"{folder}/index"
        prf.build_sparse(index, NFCORPUS.docs, str(SPLADE), "splade", max_length=LENGTH)
        search(index, repetitions)
        small = Path(folder) / "unicoil"
        save_checkpoint(small, "unicoil", SPLADE, layers=6, width=384)
        for title, name, path, load in (
            ("SPLADE (2 layers, width 128)", "SpladeDocumentEncoder", SPLADE, load_splade),
            ("uniCOIL (6 layers, width 384)", "UniCoilDocumentEncoder", small, load_unicoil),
        ):
            encoding(title, name, path, load(str(path)), texts, repetitions)


if __name__ == "__main__":
    main()

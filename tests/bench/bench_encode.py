r"""Times encoding against sentence-transformers' own ``encode``, and shows what precision changes.

The documents are NFCorpus abstracts cut at 256 word pieces, the model is all-MiniLM-L6-v2. The
repetitions of all rows alternate, so that other load on the machine falls on all alike; only the
ratios mean something elsewhere. Reduced precision pays on processors that compute in bfloat16 (AMX
or AVX512-BF16; the head line says so) and on GPUs; elsewhere it is emulated and slower.

    PRF_SHARED=../shared python tests/bench/bench_encode.py \
        [repetitions [documents [device [precision ...]]]]
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np

import prf
from prf.encoders import Precision, SentenceEncoder

Job = Callable[[], Any]

MODEL = "minilm"
ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("PRF_SHARED", ROOT.parent / "shared")) / "data" / "nfcorpus"


def bfloat16() -> str:
    """Returns which instructions for bfloat16 this processor has."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    return ", ".join(sorted({"amx_bf16", "avx512_bf16"} & set(flags))) or "none"


def jobs(
    device: str, texts: list[str], queries: list[str], precisions: list[Precision]
) -> dict[str, tuple[Job, Job]]:
    """Returns what is timed, the reference first; each gives documents and queries."""
    plain = prf.load_encoder(MODEL, device)
    if not isinstance(plain, SentenceEncoder):
        raise TypeError("the reference is a sentence-transformers model")
    library = plain._model

    def ours(precision: Precision) -> tuple[Job, Job]:
        encoder = prf.load_encoder(MODEL, device, precision=precision)
        return lambda: encoder.encode(texts, "document"), lambda: encoder.encode(queries, "query")

    def theirs(part: list[str]) -> Any:
        return library.encode(part, batch_size=32, show_progress_bar=False)

    rows: dict[str, tuple[Job, Job]] = {
        "sentence-transformers": (lambda: theirs(texts), lambda: theirs(queries))
    }
    return rows | {f"ours, {precision}": ours(precision) for precision in precisions}


def changed(docs: Any, queries: Any, exact: tuple[Any, Any]) -> float:
    """Returns the share of queries whose ten best documents are others, or in another order."""
    tops = [np.argsort(-(q @ d.T), axis=1, kind="stable")[:, :10]
            for d, q in ((docs, queries), exact)]  # fmt: skip
    return float((tops[0] != tops[1]).any(axis=1).mean())


def main() -> None:
    """Prints one line per row: documents a second, ratio to the first, and what changed."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    precisions = list(dict.fromkeys(["float32", *(sys.argv[4:] or get_args(Precision))]))
    warnings.simplefilter("ignore")
    every = [text for _, text in prf.read_docs(FOLDER / "docs.jsonl.gz")]
    texts = every[:: max(1, len(every) // count)][:count]
    queries = prf.read_topics(FOLDER / "topics.test.tsv")["query"].tolist()
    timed = jobs(device, texts, queries, precisions)
    vectors = {name: (encode(), ask()) for name, (encode, ask) in timed.items()}  # also warms up
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(repetitions):
        for name, (encode, _) in timed.items():
            start = time.perf_counter()
            encode()
            times[name].append(time.perf_counter() - start)
    exact = vectors["ours, float32"]
    reference = statistics.median(next(iter(times.values())))
    print(
        f"{len(texts)} documents, {repetitions} repetitions, {device}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, bfloat16 instructions: {bfloat16()}"
    )
    print(f"{'':24}{'docs/s':>8}{'ratio':>8}{'cosine min':>12}{'mean':>10}{'top 10 changed':>16}")
    for name, seconds in times.items():
        docs, asked = vectors[name]
        cosine = (docs * exact[0]).sum(axis=1)  # this model's vectors have length 1
        middle = statistics.median(seconds)
        print(
            f"{name:24}{len(texts) / middle:8.1f}{reference / middle:8.2f}{cosine.min():12.6f}"
            f"{cosine.mean():10.6f}{changed(docs, asked, exact):16.1%}"
        )


if __name__ == "__main__":
    main()

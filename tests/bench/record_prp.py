"""Records the answers that notebooks/pairwise_prompting.ipynb reads, with SmolLM2-135M-Instruct.

    PRF_SHARED=../shared python tests/bench/record_prp.py

Every ordered pair of BM25's first passages of some queries, so that all variants find theirs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

import prf
from prf import BM25, PRP, LocalModel, Text

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(os.environ.get("PRF_SHARED", ROOT.parent / "shared")).resolve() / "models"
MODEL = LocalModel("smollm2-135m-instruct", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
DEPTH = 6


def main() -> None:
    """Writes the cache anew."""
    docs, topics, _ = prf.collection()
    cache = docs.parent.resolve() / "prp_smollm2.sqlite"
    cache.unlink(missing_ok=True)
    frame = prf.read_topics(topics).iloc[::10]
    with tempfile.TemporaryDirectory() as folder, chdir(MODELS):
        index = Path(folder) / "bm25"
        prf.build_lucene(index, docs)
        first = BM25(index, k=DEPTH) >> Text(index)
        stage = PRP(MODEL, "allpair", consistency="soft", cache=str(cache))
        _, figures = stage.measured(first(frame))
    print(figures.to_string(), file=sys.stderr)


if __name__ == "__main__":
    main()

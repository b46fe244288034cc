"""Times PRP on a local model against llm-rankers' pairwise ranker: same model, same pairs.

The model is SmolLM2-135M-Instruct, the pairs are all pairs of some BM25 passages of one dl19 query,
in both orders, and the prompt is llm-rankers' own, read from its package. Its class is run as it
is; only what it imports and does not use here (openai, tiktoken) is left out. For decoders it asks
the two orders of one pair at a time, which is the only batch it has. Rows alternate, so that other
load on the machine falls on all alike.

    PRF_SHARED=../shared python tests/bench/bench_prp.py [passages [repetitions]]
"""

from __future__ import annotations

import copy
import os
import re
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import test_prp_models as shared

from prf import LocalModel
from prf.prp.answers import Question
from prf.prp.models import _ModelSession


def their_ranker(folder: Path) -> Any:
    """Returns llm-rankers' pairwise ranker on the model in a folder."""
    sys.modules.setdefault("openai", types.ModuleType("openai"))
    sys.modules.setdefault("tiktoken", types.ModuleType("tiktoken"))
    # The package's __init__ imports every ranker and what those need.
    (place,) = find_spec("llmrankers").submodule_search_locations
    package = types.ModuleType("llmrankers")
    package.__path__ = [place]
    sys.modules["llmrankers"] = package
    from llmrankers.pairwise import PairwiseLlmRanker

    return PairwiseLlmRanker(str(folder), None, "cpu", method="heapsort")


def save_plain(model: Any, folder: str) -> None:
    """Saves a model that came from GGUF as an ordinary one, in float32."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)


def main() -> None:
    """Prints prompts a second, and the ratio to llm-rankers."""
    n, repetitions = (int(value) for value in (sys.argv[1:] + ["10", "1"][len(sys.argv) - 1 :])[:2])
    frame = shared.passages(queries=1, n=n)
    questions = shared.pairs_of(frame)
    pairs = [q for q in questions if q.first < q.second]
    _ModelSession.probe = lambda self: None  # with this prompt the model writes no letter
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "theirs.txt"
        found = re.search(r'self\.prompt = """(.*?)"""', str(shared.THEIRS), flags=re.DOTALL)
        text = found[1].replace("{doc1}", "{a}").replace("{doc2}", "{b}")
        template.write_text(text, encoding="utf-8")
        ours = shared.smollm(
            mode="generate", template=str(template), answer_start=" Passage:",
            max_passage_tokens=1000,
        )  # fmt: skip
        session: Any = ours.open()
        save_plain(session._model, folder)
        session._tokenizer.save_pretrained(folder)
        theirs = their_ranker(Path(folder))
        jobs: dict[str, Callable[[], tuple[list[str], int]]] = {
            "llm-rankers": lambda: their_answers(theirs, pairs),
            "prf, prefixes not shared": lambda: our_answers(
                replace(ours, share_prefix=False), questions, pairs
            ),
            "prf": lambda: our_answers(ours, questions, pairs),
        }
        report(jobs, len(questions), repetitions)


def their_answers(ranker: Any, pairs: list[Question]) -> tuple[list[str], int]:
    """Returns the answers, and the tokens the model computed, padding included."""
    before = ranker.total_prompt_tokens
    said = [said for q in pairs for said in ranker.compare(q.query, [q.first, q.second])]
    return said, ranker.total_prompt_tokens - before


def our_answers(
    backend: LocalModel, asked: list[Question], pairs: list[Question]
) -> tuple[list[str], int]:
    """Returns the answers, and the tokens the model computed, padding included."""
    counters = backend.open().counters
    before = counters["padded_tokens"]
    found = dict(zip(asked, shared.answers(backend, asked), strict=True))
    both = [found[q].raw.strip().upper() for p in pairs for q in (p, p.swapped())]
    return [f"Passage {raw}" for raw in both], counters["padded_tokens"] - before


def report(
    jobs: dict[str, Callable[[], tuple[list[str], int]]], prompts: int, repetitions: int
) -> None:
    """Runs all jobs in turn and prints a table."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    found: dict[str, tuple[list[str], int]] = {}
    for _ in range(repetitions):
        for name, job in jobs.items():
            start = time.perf_counter()
            found[name] = job()
            seconds[name].append(time.perf_counter() - start)
    theirs = found["llm-rankers"]
    base = statistics.median(seconds["llm-rankers"])
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print(f"{prompts} prompts, threads: {threads}, repetitions: {repetitions}")
    for name, values in seconds.items():
        said, tokens = found[name]
        median = statistics.median(values)
        same = sum(a == b for a, b in zip(said, theirs[0], strict=True))
        print(
            f"{name:<26} {prompts / median:7.2f} prompts/s  {base / median:5.2f}x  "
            f"{tokens:>7,} tokens computed ({theirs[1] / tokens:.2f}x fewer)  "
            f"{same}/{prompts} answers equal"
        )


if __name__ == "__main__":
    main()

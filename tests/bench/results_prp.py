"""Measures PRP with judges that err on purpose and writes the section of pipelines/RESULTS.md.

    PRF_SHARED=../shared python tests/bench/results_prp.py

Takes some minutes on one core; no language model is asked.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import results
from reference import DL19, DL20, ROOT, Topics

import prf
from prf import PRP, Judge
from prf.pipeline import Log, logging_to

NAME = "prp"
FLIPS = (0.0, 0.1, 0.2, 0.3)
FIRST = 0.1
VARIANTS = ("allpair", "sorting", "sliding")


def drawn(*parts: str) -> float:
    """Returns a number from 0 to 1 that depends on the texts alone."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


@dataclass(frozen=True)
class Collection:
    """BM25's first 100 of a query set with the docno as text, and the grades."""

    topics: Topics
    run: pd.DataFrame
    grades: dict[tuple[str, str], int]

    @classmethod
    def read(cls, topics: Topics) -> Collection:
        run = prf.read_run(_run_file(topics))
        rows = prf.read_qrels(topics.qrels)[["qid", "docno", "label"]]
        grades = {(qid, docno): int(label) for qid, docno, label in rows.itertuples(index=False)}
        return cls(topics, run.assign(query=run["qid"], text=run["docno"]), grades)

    def ndcg(self, run: pd.DataFrame) -> float:
        qrels = prf.read_qrels(self.topics.qrels)
        return float(prf.evaluate(run, qrels, ["nDCG@10"]).mean["nDCG@10"])

    def best(self) -> pd.DataFrame:
        """Returns the run in the best order its documents have."""
        keys = zip(self.run["qid"], self.run["docno"], strict=True)
        return self.run.assign(score=[float(self.grades.get(key, 0)) for key in keys])

    def perfect(self, qid: str, one: str, two: str) -> float:
        """Judges by the grades, with ties."""
        return float(self.grades.get((qid, one), 0) - self.grades.get((qid, two), 0))

    def erring(self, flips: float) -> Callable[[str, str, str], float]:
        """Returns a judge that errs; one that never errs knows ties, the others know none."""

        def judge(qid: str, one: str, two: str) -> float:
            if drawn("position", qid, one, two) < FIRST:
                return 1.0
            sign = self.perfect(qid, one, two) or drawn("tie", qid, one, two) - 0.5
            return -sign if drawn("flip", qid, one, two) < flips else sign

        return judge if flips else self.perfect


def _run_file(topics: Topics) -> Path:
    return topics.topics.parent / "runs" / f"{topics.name}.bm25.trec.gz"


def rows(collection: Collection) -> list[list[str]]:
    """Returns the table of one query set."""
    out = [
        ["", "BM25", f"{collection.ndcg(collection.run):.4f}", *[""] * 6],
        ["", "best order of its 100", f"{collection.ndcg(collection.best()):.4f}", *[""] * 6],
    ]
    for flips in FLIPS:
        for variant in VARIANTS:
            print(f"{collection.topics}: {flips:.0%} {variant}", file=sys.stderr)
            stage = PRP(Judge(collection.erring(flips)), variant)
            with logging_to(Log()):
                run, figures = stage.measured(collection.run)
            mean = figures.mean(numeric_only=True)
            out.append(
                [
                    f"{flips:.0%}" if flips else "none, with ties",
                    f"{variant}-10" if variant == "sliding" else variant,
                    f"{collection.ndcg(run):.4f}",
                    f"{2 * mean['pairs_requested']:,.0f}",
                    f"{mean['prompts']:,.0f}",
                    f"{mean['pairs_evaluated']:,.0f}",
                    f"{mean['consistency']:.3f}",
                    f"{mean['tie_rate']:.3f}",
                    f"{figures['cycles'].sum() / max(figures['triples'].sum(), 1):.4f}",
                ]
            )
    return out


HEAD = [
    "errors", "variant", "nDCG@10", "prompts, no cache", "prompts", "distinct pairs",
    "consistency", "tie rate", "cycles a triple",
]  # fmt: skip


def table(collection: Collection) -> str:
    """Returns one query set's table as markdown."""
    lines = [HEAD, ["---", "---", *["---:"] * (len(HEAD) - 2)], *rows(collection)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"pool, {collection.topics.name} (BM25's first 100):\n\n{body}"


def section() -> str:
    """Returns the whole section."""
    note = (
        "Judges instead of language models: one knows the grades (equal grades tie), the others "
        "name the wrong passage in the share of prompts given, say the first passage in "
        f"{FIRST:.0%} of prompts whatever stands there, and answer at random where grades are "
        "equal; errors are drawn from the texts, both orders apart. A model errs more where "
        "passages differ little; these judges err everywhere alike, which stops a document that "
        "Sliding carries upwards at every tie, so Sliding loses more here than with a model. Hard "
        "consistency, K = 10. "
        "Figures are means over queries. Prompts without a cache count every comparison of an "
        "algorithm in both orders (formulas: 9,900 for all pairs, 1,890 for sliding-10, 234 to 616 "
        "for sorting); the tool asks each distinct pair once. Cycles: circular triads by the "
        "triples of which all three pairs were compared."
    )
    parts = [table(Collection.read(topics)) for topics in (DL19, DL20)]
    return "\n\n".join([note, *parts, f"- {fingerprints()}"])


def fingerprints() -> str:
    """Returns digests of the code and the data behind the section."""
    modules = [f"prp/{file.stem}" for file in sorted((ROOT / "prf" / "prp").glob("*.py"))]
    data = hashlib.sha256()
    for topics in (DL19, DL20):
        data.update(_run_file(topics).read_bytes() + topics.qrels.read_bytes())
    code = results.code_fingerprint(modules)
    return f"Fingerprints: code {code}, data {data.hexdigest()[:16]}."


if __name__ == "__main__":
    made = section()
    results.write(NAME, made, "Pairwise ranking prompting with judges that err")
    print(made)

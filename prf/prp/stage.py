"""The stage: pairwise ranking prompting over a result list."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pandas as pd

from prf.errors import FrameError, PrfError, SpecError, shorten
from prf.frames import need, normalise, original_query, query_codes, ranked
from prf.pipeline import Count, Depth, Resource, Transformer, figures, notice
from prf.prp.algorithms import Ties, Variant, algorithm, pairs_needed
from prf.prp.answers import Consistency, Order, Question, clean_text
from prf.prp.backend import Backend
from prf.prp.compare import Comparer, OnError, Ranked, Rules
from prf.prp.statistics import Compared

QueryField = Literal["original", "current"]

FEW_PAIRS, FEW_ANSWERS = 45, 20
"""Below so many pairs or answers of a query its rates say nothing, and nothing is said of them."""


@dataclass(frozen=True, repr=False)
class PRP(Transformer):
    """Reranks by asking a language model which of two passages is better (PRP).

    Needs: qid, query, docno, score, text
    Gives: qid, query, docno, score, text, rank

    The first ``rerank_docs`` documents are reranked, the rest follows in its order; ``score`` is n
    for the first of n documents down to 1 for the last, whatever the model said. Initial order is
    that of the incoming scores, ties by docno. An empty list stays empty, a list of one document
    asks nothing. An empty passage loses against any other and equal passages tie without a
    question; a missing text (None, NaN) counts as empty. Passages that are too long lose their end,
    and their query is named once.

    A budget bounds each query by itself, so that a ranking does not depend on other queries, and
    counts answers from the cache like others, so that a second run gives the same. Where it ends
    the ranking is what was settled so far: of Allpair the mean points, of Sliding the list as it
    stands, of Sorting what was taken off the heap and then the initial order. ``max_calls`` is
    never passed; ``max_tokens`` and ``max_cost``, known after a prompt only, by at most the prompts
    of ``rerank_docs`` pairs.

    Answers do not depend on batches but for rounding; of a local model in float32 margins agree to
    1e-3, so a ranking can change only where a margin is smaller than that.

    Source: Qin et al., Large Language Models are Effective Text Rankers with Pairwise Ranking
    Prompting, Findings of NAACL 2024, arXiv 2306.17563, section 3. Soft consistency and the total
    order on ties are ours.

    Raises:
        FrameError: For an empty query, a text that is no text, or a missing column.
        PrfError: If more than ``max_invalid`` of a query's answers are no verdict, or the backend
            fails.

    Args:
        backend: Who compares: `LocalModel`, `ChatServer` or `Judge`.
        variant: ``sliding``: K passes from the bottom; ``sorting``: heapsort; ``allpair``: every
            pair.
        k: How many first ranks are settled; all-pair settles all.
        rerank_docs: How many documents are reranked.
        order: ``both``: each pair is asked in both orders. Else once: ``forward`` shows the
            document of the better initial rank first, ``lower_first`` the other, ``random`` draws
            it from ``seed``, the query and the texts.
        consistency: ``hard``: orders that disagree are a tie; ``soft``: the mean of the two margins
            decides, which needs a backend with margins.
        tau: For ``soft``: margins up to this are ties.
        ties: For ``sorting``: ``initial`` gives a tie to the document of the better initial rank;
            ``noswap`` leaves both where they are, as published code does.
        max_calls: Prompts for each query.
        max_tokens: Tokens for each query, read and written.
        max_cost: Cost of each query, in the currency of the backend's prices.
        cache: File that keeps every answer; None keeps them while one frame is reranked.
        offline: Answers come from the cache alone; a missing one is an error.
        on_error: What a question is that no try brought an answer to: an error (``raise``), or no
            verdict (``tie``), which counts for ``max_invalid``.
        max_invalid: Largest share of answers that are no verdict, for a query with 20 or more.
        query_field: ``original``, the text the user wrote, whatever feedback made of it; or
            ``current``, the text as it is now.
        seed: For ``random``.
    """

    backend: Backend
    variant: Variant = "sliding"
    k: Count = 10
    rerank_docs: Count = 100
    order: Order = "both"
    consistency: Consistency = "hard"
    tau: float = 0.0
    ties: Ties = "initial"
    max_calls: Count | None = None
    max_tokens: Count | None = None
    max_cost: float | None = None
    cache: str | None = None
    offline: bool = False
    on_error: OnError = "raise"
    max_invalid: float = 0.2
    query_field: QueryField = "original"
    seed: Depth = 0

    needs = ("qid", "query", "docno", "score", "text")
    gives = ("rank",)

    def check(self) -> None:
        if self.tau < 0:
            raise SpecError(f"PRP.tau is {self.tau}; it must be at least 0")
        if not 0 <= self.max_invalid <= 1:
            raise SpecError(f"PRP.max_invalid is {self.max_invalid}; it must be from 0 to 1")
        if self.consistency == "soft" and not self.backend.has_margins:
            raise SpecError(
                f"PRP.consistency is 'soft', but {self.backend!r} gives no margins; use hard"
            )
        if self.max_cost is not None and not (self.max_cost > 0 and self.backend.prices):
            raise SpecError(
                f"PRP.max_cost is {self.max_cost}; it must be above 0, and the backend needs prices"
            )
        if self.offline and self.cache is None:
            raise SpecError("PRP.offline is true without a cache; name the file of an earlier run")

    def resources(self) -> list[Resource]:
        # Without a path, by which a run's record would take another state for another pipeline.
        cache = [] if self.cache is None else [Resource("answers", self.cache)]
        return [*([] if self.offline else self.backend.resources()), *cache]

    def cost(self, documents: int | None) -> str:
        n = self.rerank_docs if documents is None else min(documents, self.rerank_docs)
        low, high = pairs_needed(self.variant, n, self.k)
        prompts = high * (2 if self.order == "both" else 1)
        if self.max_calls is not None:
            prompts = min(prompts, self.max_calls)
        between = f"{low:,} to {high:,}" if low < high else f"{high:,}"
        return (
            f"compares {between} pairs for each query of {n} documents: at most {prompts:,} prompts"
        )

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        out, rows, counters = self._reranked(ranked(frame))
        known = [{name: _or_none(value) for name, value in row.items()} for row in rows]
        figures(repr(self), known)
        figures(f"{self!r}, backend", [counters])
        return out

    def measured(self, frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Returns the reranked frame, and a frame with one row of statistics for each query.

        The statistics are explained in `prf.prp.statistics.Compared.figures`; what the backend did
        for all queries together (batches, padded tokens, retries, failures, seconds) is in the
        frame's ``attrs``.
        """
        out, rows, counters = self._reranked(self._checked(frame))
        table = pd.DataFrame(rows)
        table.attrs.update(counters)
        return out, table

    def estimate(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Returns what reranking a frame takes at most, before it is reranked.

        The number of ``pairs`` (least and largest), ``prompts``, ``tokens`` and ``cost``, repeats
        and cached answers not left out. Tokens are those of the first pairs of each query, counted
        by the backend's tokenizer, which is opened (a server gets its two plain questions), or
        estimated; NaN cost without prices.
        """
        lists, _ = self._lists(self._checked(frame))
        orders = 2 if self.order == "both" else 1
        session, prices = self.backend.open(), self.backend.prices
        low = high = prompts = 0
        tokens = 0.0
        for given in lists:
            least, most = pairs_needed(self.variant, len(given.texts), self.k)
            allowed = orders * most
            if self.max_calls is not None:
                allowed = min(allowed, self.max_calls)
            low, high, prompts = low + least, high + most, prompts + allowed
            texts = [text for text in given.texts if text]
            asked = [
                Question(given.query, one, two)
                for one, two in zip(texts, texts[1:][:50], strict=False)
            ]
            tokens += allowed * float(np.mean(session.tokens(asked))) if asked else 0.0
        cost = float("nan") if prices is None else tokens * prices[0] / 1e6
        return {
            "queries": len(lists),
            "pairs": (low, high),
            "prompts": prompts,
            "tokens": round(tokens),
            "cost": cost,
        }

    def _checked(self, frame: pd.DataFrame) -> pd.DataFrame:
        with self.named():
            given = normalise(frame, repr(self))
            need(given, self.needs, repr(self))
            return ranked(given)

    def _reranked(
        self, frame: pd.DataFrame
    ) -> tuple[pd.DataFrame, list[dict[str, Any]], dict[str, float]]:
        """Returns a ranked frame reranked, the statistics of each query, and what it took."""
        begin = time.perf_counter()
        lists, starts = self._lists(frame)
        rules = Rules(
            self.order,
            self.consistency,
            self.tau,
            self.seed,
            self.max_calls,
            self.max_tokens,
            self.max_cost,
            self.on_error,
        )
        comparer = Comparer(self.backend, rules, self.cache, self.offline)
        found = comparer.run(
            lists, [algorithm(self.variant, len(g.texts), self.k, self.ties) for g in lists]
        )
        score = np.empty(len(frame))
        for (start, end), compared in zip(pairwise([*starts, len(frame)]), found, strict=True):
            n = end - start
            score[start:end] = n - np.arange(n)
            score[start + np.asarray(compared.ranking, dtype=np.int64)] = n - np.arange(compared.n)
        rows = [
            {"qid": given.qid, "documents": compared.n, **compared.figures()}
            for given, compared in zip(lists, found, strict=True)
        ]
        self._judge(found, rows)
        counters = {**comparer.counters, "seconds": round(time.perf_counter() - begin, 4)}
        return ranked(frame.assign(score=score)), rows, counters

    def _lists(self, frame: pd.DataFrame) -> tuple[list[Ranked], list[int]]:
        """Returns each query's first documents, clean, and the row where its list begins."""
        text = original_query(frame) if self.query_field == "original" else frame["query"]
        codes, _ = query_codes(frame["qid"])
        starts = [int(i) for i in np.flatnonzero(np.diff(codes, prepend=-1))]
        out = []
        for start, end in pairwise([*starts, len(frame)]):
            stop = min(end, start + self.rerank_docs)
            qid, query = str(frame["qid"].iat[start]), text.iat[start]
            if not isinstance(query, str) or not clean_text(query):
                raise FrameError(
                    f"{self!r}: the query of qid {qid!r} is {shorten(query)}; a model needs a "
                    "query to compare by, so drop the query or give it a text"
                )
            docnos = frame["docno"].iloc[start:stop].tolist()
            texts = [
                self._clean(value, qid, docno)
                for value, docno in zip(frame["text"].iloc[start:stop], docnos, strict=True)
            ]
            out.append(Ranked(qid, clean_text(query), docnos, texts))
        return out, starts

    def _clean(self, value: object, qid: str, docno: str) -> str:
        if isinstance(value, str):
            return clean_text(value)
        if value is None or (isinstance(value, float) and np.isnan(value)) or value is pd.NA:
            return ""
        raise FrameError(
            f"{self!r}: text of qid {qid!r}, docno {docno!r} is {shorten(value)}, not text"
        )

    def _judge(self, found: Sequence[Compared], rows: Sequence[dict[str, Any]]) -> None:
        """Refuses answers that are no verdicts, and tells of queries that look wrong."""
        told: dict[str, list[str]] = {}
        for compared, row in zip(found, rows, strict=True):
            answers = [a for pair in compared.answers.values() for a in pair if a]
            invalid = row["invalid_rate"]
            if len(answers) >= FEW_ANSWERS and invalid > self.max_invalid:
                raw = next(answer.raw for answer in answers if not answer.valid)
                raise PrfError(
                    f"{self!r}: {invalid:.0%} of the {len(answers)} answers for qid {row['qid']!r} "
                    f"are no verdict, such as {shorten(raw)}; check model and prompt, or raise "
                    "max_invalid"
                )
            many = len(compared.outcomes) >= FEW_PAIRS
            tests = {
                "have passages that were cut to the backend's max_passage_tokens": bool(
                    row["cut_passages"]
                ),
                "have more than 1% answers that are no verdict": len(answers) >= FEW_ANSWERS
                and invalid > 0.01,
                "were stopped by their budget (their ranking is what was settled until then)": (
                    not compared.complete
                ),
                "have verdicts that change with the order in more than half of their pairs, so "
                "check model and prompt": many and row["consistency"] < 0.5,
            }
            for what, holds in tests.items():
                if holds:
                    told.setdefault(what, []).append(row["qid"])
        for what, qids in told.items():
            notice(what, qids)


def _or_none(value: Any) -> Any:
    """Returns the value for JSON, which has no NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value

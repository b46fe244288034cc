"""Runs the algorithms of many queries side by side over one backend and one cache.

In each turn every query says which pairs it needs next. What the texts alone decide, what was
compared before and what the cache holds is answered at once; all other questions of all queries go
to the backend together, which batches them as it likes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tqdm import tqdm

from prf.errors import PrfError, SpecError
from prf.pipeline import shows_progress
from prf.prp.algorithms import Algorithm, Pair
from prf.prp.answers import Answer, Consistency, Order, Question, outcome
from prf.prp.backend import Backend, Session
from prf.prp.cache import AnswerCache, Entry, Key, Memory, canonical, question_key
from prf.prp.statistics import Compared

OnError = Literal["raise", "tie"]


@dataclass(frozen=True)
class Rules:
    """How answers become outcomes, and what a query may cost; see `prf.prp.PRP`."""

    order: Order = "both"
    consistency: Consistency = "hard"
    tau: float = 0.0
    seed: int = 0
    max_calls: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    on_error: OnError = "raise"


class Ranked(NamedTuple):
    """One query's list in its initial order; ``texts`` are clean."""

    qid: str
    query: str
    docnos: Sequence[str]
    texts: Sequence[str]


class _Asked(NamedTuple):
    """One question of one pair; ``swapped`` if the second of the pair is shown first."""

    query: _Query
    pair: Pair
    swapped: bool
    question: Question
    key: Key


class _Query:
    """One query on its way: what its algorithm waits for, and what is known."""

    def __init__(
        self, given: Ranked, algorithm: Algorithm, rules: Rules, identity: str | None
    ) -> None:
        self.given, self._rules, self._identity = given, rules, identity
        self._algorithm, self._rounds = algorithm, algorithm.rounds()
        self.found = Compared(len(given.texts))
        self._answers: dict[tuple[Pair, bool], Answer] = {}
        self._waiting: list[Pair] = next(self._rounds, [])
        self._place, self._step = 0, 0
        self.found.ranking = algorithm.ranking()
        self.tokens, self.cost = 0, 0.0

    @property
    def running(self) -> bool:
        return bool(self._waiting)

    def questions(self) -> list[_Asked]:
        """Returns what has to be asked for the next pairs, as far as the budget reaches."""
        rules, out = self._rules, []
        # What a prompt costs is known after it, so a list with such a limit goes in small steps.
        limited = rules.max_tokens is not None or rules.max_cost is not None
        step = self.found.n if limited else len(self._waiting)
        stop = min(self._place + step, len(self._waiting))
        self._step = self._place
        asked: set[Pair] = set()
        for i, j in self._waiting[self._place : stop]:
            pair = (min(i, j), max(i, j))
            if pair not in self.found.outcomes and pair not in asked and not self._free(pair):
                new = self._asked(pair)
                if self._spent(len(new)):
                    self.found.complete = False
                    break
                asked.add(pair)
                out += new
                self.found.counts["prompts"] += len(new)
            self.found.counts["pairs_requested"] += 1
            self._step += 1
        return out

    def _free(self, pair: Pair) -> bool:
        """Decides a pair by its texts alone: an empty one loses, equal ones tie."""
        i, j = (self.given.texts[place] for place in pair)
        if i and j and i != j:
            return False
        self.found.outcomes[pair] = bool(i) - bool(j)
        return True

    def _spent(self, prompts: int) -> bool:
        rules, counts = self._rules, self.found.counts
        return (
            (rules.max_calls is not None and counts["prompts"] + prompts > rules.max_calls)
            or (rules.max_tokens is not None and self.tokens >= rules.max_tokens)
            or (rules.max_cost is not None and self.cost >= rules.max_cost)
        )

    def _asked(self, pair: Pair) -> list[_Asked]:
        one, two = (self.given.texts[place] for place in pair)
        question = Question(self.given.query, one, two)
        out = []
        for swapped in self._orders(question):
            shown = question.swapped() if swapped else question
            key = shown if self._identity is None else question_key(self._identity, shown)
            out.append(_Asked(self, pair, swapped, shown, key))
        return out

    def _orders(self, question: Question) -> tuple[bool, ...]:
        """Returns which orders are asked; the pair has the higher document first."""
        order = self._rules.order
        if order == "both":
            return False, True
        if order == "random":
            texts = sorted(question[1:])
            drawn = "\0".join([str(self._rules.seed), question.query, *texts])
            digest = hashlib.sha256(drawn.encode()).digest()
            return (bool(digest[0] & 1) != (question.first != texts[0]),)
        return (order == "lower_first",)

    def take(self, asked: _Asked, answer: Answer, prices: tuple[float, float] | None) -> None:
        """Takes an answer, from the backend or the cache."""
        self._answers[asked.pair, asked.swapped] = answer
        self.tokens += answer.prompt_tokens + answer.completion_tokens
        self.cost += cost_of(answer, prices)
        self.found.counts["cut_passages"] += answer.cut
        self.found.counts["censored"] += answer.censored

    def advance(self) -> None:
        """Decides the pairs that were asked; goes to the next step, round or the end."""
        for i, j in self._waiting[self._place : self._step]:
            pair = (min(i, j), max(i, j))
            if pair not in self.found.outcomes:
                self._decide(pair)
        self._place = self._step
        if self.found.complete and self._place < len(self._waiting):
            return
        values = []
        for i, j in self._waiting[: self._place]:
            value = self.found.outcomes[min(i, j), max(i, j)]
            values.append(value if i < j else -value)
        unknown: list[int | None] = [None] * (len(self._waiting) - len(values))
        try:
            self._waiting = self._rounds.send([*values, *unknown])
        except StopIteration:
            self._waiting = []
        self._place = 0
        self.found.ranking = self._algorithm.ranking()
        if not self.found.complete:
            self._rounds.close()
            self._waiting = []

    def _decide(self, pair: Pair) -> None:
        rules = self._rules
        one, two = self._answers.pop((pair, False), None), self._answers.pop((pair, True), None)
        self.found.answers[pair] = (one, two)
        self.found.counts["pairs_evaluated"] += 1
        if one is not None:
            value = outcome(one, two, rules.consistency, rules.tau)
        elif two is not None:
            value = -outcome(two, None, rules.consistency, rules.tau)
        self.found.outcomes[pair] = value


def cost_of(answer: Answer, prices: tuple[float, float] | None) -> float:
    """Returns the price of an answer; 0 without prices."""
    read, written = prices or (0.0, 0.0)
    return (answer.prompt_tokens * read + answer.completion_tokens * written) / 1e6


class Comparer:
    """Compares over a backend and a cache.

    Args:
        backend: Who answers.
        rules: How answers become outcomes, and budgets.
        cache: Path of the answers on disk; None for none.
        offline: Never ask the backend; what the cache lacks is an error.
    """

    def __init__(self, backend: Backend, rules: Rules, cache: str | None, offline: bool) -> None:
        self._backend, self._rules, self._offline = backend, rules, offline
        self._path = cache
        identity = backend.identity()
        if identity is None and cache is not None:
            raise SpecError(
                f"{backend!r} has no name that a cache could know it by; "
                "give the function as 'module:name', or no cache"
            )
        self._identity = canonical(identity or {})
        self._session: Session | None = None
        self.counters: Counter[str] = Counter()
        """What the backend did in `run`: batches, padded tokens, retries, failures."""

    def run(self, lists: Sequence[Ranked], algorithms: Sequence[Algorithm]) -> list[Compared]:
        """Returns the comparisons and the ranking of each list.

        Raises:
            PrfError: Whatever the backend raises; answers up to then are in the cache.
        """
        queries = [
            _Query(given, chosen, self._rules, None if self._path is None else self._identity)
            for given, chosen in zip(lists, algorithms, strict=True)
        ]
        bar = tqdm(desc="PRP", unit="prompt", leave=False, disable=not shows_progress())
        with bar, self._cache() as cache:
            while running := [query for query in queries if query.running]:
                asked = [item for query in running for item in query.questions()]
                for item, answer in self._answers(asked, cache):
                    item.query.take(item, answer, self._backend.prices)
                    bar.update(1)
                for query in running:
                    query.advance()
        if self._session is not None:
            self.counters = self._session.counters - self._before
        for query in queries:
            query.found.cost = query.cost if self._backend.prices else math.nan
            query.found.counts["empty_texts"] = sum(not text for text in query.given.texts)
        return [query.found for query in queries]

    def _cache(self) -> AnswerCache | Memory:
        return Memory() if self._path is None else AnswerCache(self._path, self._offline)

    def _answers(
        self, asked: Sequence[_Asked], cache: AnswerCache | Memory
    ) -> Iterator[tuple[_Asked, Answer]]:
        """Yields the answer of every question: from the cache, or asked once for equal ones."""
        if not asked:
            return
        known = cache.get(list({item.key for item in asked}))
        missing: dict[Key, list[_Asked]] = {}
        for item in asked:
            if item.key in known:
                item.query.found.counts["cache_hits"] += 1
                yield item, known[item.key]
            else:
                missing.setdefault(item.key, []).append(item)
        if not missing:
            return
        waiting = list(missing.values())
        for place, answer in self._asked([items[0] for items in waiting], cache):
            for number, item in enumerate(waiting[place]):
                counts = item.query.found.counts
                counts["cache_hits" if number else "prompts_sent"] += 1
                if not number:
                    counts["prompt_tokens"] += answer.prompt_tokens
                    counts["completion_tokens"] += answer.completion_tokens
                yield item, answer

    def _asked(
        self, items: Sequence[_Asked], cache: AnswerCache | Memory
    ) -> Iterator[tuple[int, Answer]]:
        session = self._open(items[0], len(items), cache)
        for batch in session.ask([item.question for item in items]):
            good, bad = [], []
            for place, answer in batch:
                item, given = items[place], items[place].query.given
                if isinstance(answer, PrfError):
                    bad.append((item, answer))
                    yield place, Answer(0, valid=False)
                    continue
                ids = [given.docnos[i] for i in item.pair]
                good.append(Entry(item.key, answer, given.qid, *ids[:: -1 if item.swapped else 1]))
                yield place, answer
            cache.put(good)
            if bad and self._rules.on_error == "raise":
                bad[0][1].put_first(f"qid {bad[0][0].query.given.qid!r}: ")
                raise bad[0][1]

    def _open(self, first: _Asked, count: int, cache: AnswerCache | Memory) -> Session:
        if self._offline:
            ids = [first.query.given.docnos[i] for i in first.pair]
            raise PrfError(
                f"offline=True, and cache '{self._path}' lacks {count} answers, the first of qid "
                f"{first.query.given.qid!r}, docnos {ids[0]!r} and {ids[1]!r}; run once without "
                "offline, with the same backend, prompt, labels and lengths"
            )
        if self._session is None:
            self._session = self._backend.open()
            self._before = self._session.counters.copy()
            if self._session.fingerprint:
                cache.check_model(self._identity, self._session.fingerprint)
        return self._session

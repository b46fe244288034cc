"""What a teacher says about pairs of documents: drawn, compared, written, read.

A pair's record is one line of JSON, so that what an expensive teacher said can be looked at, kept,
shared and trained on again. A `PRP` teacher answers through its cache, as in a reranking.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from prf.distill.config import ListSet, Sample, Teacher
from prf.distill.sampling import Drawn, draw_pairs
from prf.errors import FileFormatError, FrameError, SpecError, shorten
from prf.frames import IntArray, ranked
from prf.pipeline import Log, logging_to
from prf.prp.algorithms import Algorithm, Allpair, Pair, Rounds
from prf.prp.answers import Question, clean_text
from prf.prp.cache import AnswerCache, canonical, question_key
from prf.prp.compare import Comparer, Ranked, Rules
from prf.prp.stage import PRP
from prf.retrieve import Text
from prf.trec import PathLike, atomic, read_lines, read_run, read_topics

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TaughtPair:
    """One pair of documents, i above j in the initial order, and what the teacher said.

    Attributes:
        qid: The query.
        docno_i: The document of the better initial rank.
        docno_j: The other one.
        rank_i: Its initial rank, from 1.
        rank_j: That of the other one.
        margin_ij: By how much i is better when shown first: logarithm of odds, or difference of
            scores. None where the teacher does not tell, as for the next three.
        margin_ji: By how much j is better when shown first.
        verdict_ij: 1 if that answer names i, -1 for j, 0 for neither.
        verdict_ji: 1 if that answer names j, -1 for i, 0 for neither.
        p: Probability that i is better: of hard labels 1, 1/2 or 0.
        outcome: 1 if i is better, -1 if j is, 0 for a tie.
        sampler: How the pair was drawn.
        weight: Its weight in a loss.
        teacher: Who compared.
        template_hash: Digest of all that decides a PRP backend's answers; None for a run.
    """

    qid: str
    docno_i: str
    docno_j: str
    rank_i: int
    rank_j: int
    margin_ij: float | None
    margin_ji: float | None
    verdict_ij: int | None
    verdict_ji: int | None
    p: float
    outcome: int
    sampler: str
    weight: float
    teacher: str
    template_hash: str | None

    @property
    def margin(self) -> float:
        """By how much i is better, of both orders; NaN where the teacher does not tell."""
        known = []
        if self.margin_ij is not None:
            known.append(self.margin_ij)
        if self.margin_ji is not None:
            known.append(-self.margin_ji)
        return sum(known) / len(known) if known else math.nan


class Group(NamedTuple):
    """One query, documents of its list in their initial order, and pairs of their places.

    ``p``, ``margin`` (NaN for unknown) and ``weight`` are (m,), as ``first`` and ``second``.
    """

    qid: str
    query: str
    docnos: list[str]
    texts: list[str]
    first: IntArray
    second: IntArray
    p: Floats
    margin: Floats
    weight: Floats


def read_lists(config: ListSet) -> list[Ranked]:
    """Returns the first documents of each query's list, with clean texts, in the topics' order.

    Raises:
        FileFormatError: For a file that is missing or wrong, or lists without a query of the
            topics.
        FrameError: For a text that is no text.
    """
    topics = read_topics(config.topics)
    if config.run is not None:
        found = read_run(config.run)
    else:
        found = ranked(config.first_pass.transform(topics))  # type: ignore[union-attr]
    found = found[found["rank"] < config.depth]
    parts = dict(iter(found.groupby("qid", sort=False)))
    wanted = topics[topics["qid"].isin(parts)]
    if wanted.empty:
        raise FileFormatError(
            f"'{config.run or config.first_pass!r}' has no list for a query of '{config.topics}'"
        )
    every = pd.unique(np.concatenate([parts[qid]["docno"].to_numpy() for qid in wanted["qid"]]))
    texts = dict(zip(every, Text(config.texts).load(every), strict=True))
    out = []
    for qid, query in zip(wanted["qid"], wanted["query"], strict=True):
        docnos = parts[qid].sort_values("rank")["docno"].tolist()
        clean = [_clean(texts[docno], config.texts, docno) for docno in docnos]
        out.append(Ranked(qid, clean_text(query), docnos, clean))
    return out


def _clean(text: object, source: str, docno: str) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise FrameError(f"'{source}': text of docno {docno!r} is {shorten(text)}, not text")
    return clean_text(text)


def teach(config: ListSet, lists: Sequence[Ranked], *, progress: bool = False) -> list[TaughtPair]:
    """Draws pairs of each list and has the teacher compare them; a file of pairs is read.

    Pairs are in the order of the lists, then of ``rank_i`` and ``rank_j``. ``progress`` shows a bar
    of the prompts on stderr.

    Raises:
        SpecError: If the set has no teacher, or no pair is left.
        FileFormatError: For a file of pairs that is wrong.
        PrfError: Whatever a PRP backend raises; answers up to then are in its cache.
    """
    teacher = config.teacher
    if teacher is None:
        raise SpecError("the set has no teacher; name one")
    if teacher.pairs is not None:
        out = _kept(teacher, read_pairs(teacher.pairs))
    elif isinstance(teacher.prp, PRP):
        with logging_to(Log(progress=progress)):
            out = _kept(teacher, _compared(teacher, teacher.prp, config.sample, lists))
    else:
        out = _kept(teacher, _scored(teacher, config.sample, lists))
    if not out:
        raise SpecError(
            "the teacher leaves no pair of any list; raise sample.rate, or keep ties and small "
            "margins"
        )
    return out


def groups(lists: Sequence[Ranked], pairs: Iterable[TaughtPair]) -> list[Group]:
    """Returns the lists that have pairs, each with the documents that occur in them.

    Raises:
        FileFormatError: If a pair names a query or document that the lists do not hold.
    """
    by_query: dict[str, list[TaughtPair]] = {}
    for pair in pairs:
        by_query.setdefault(pair.qid, []).append(pair)
    unknown = by_query.keys() - {given.qid for given in lists}
    if unknown:
        raise FileFormatError(f"there are pairs of qid {min(unknown)!r}, but no list of it")
    return [_group(given, by_query[given.qid]) for given in lists if given.qid in by_query]


def whole_groups(lists: Sequence[Ranked]) -> list[Group]:
    """Returns the lists with all documents and no pairs."""
    none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
    return [
        Group(g.qid, g.query, list(g.docnos), list(g.texts), none, none, *[nothing] * 3)
        for g in lists
    ]


def _group(given: Ranked, pairs: Sequence[TaughtPair]) -> Group:
    place = {docno: number for number, docno in enumerate(given.docnos)}
    for pair in pairs:
        for docno in (pair.docno_i, pair.docno_j):
            if docno not in place:
                raise FileFormatError(
                    f"there is a pair with docno {docno!r} for qid {given.qid!r}, which its list "
                    f"of {len(place)} does not hold"
                )
    both = np.array([[place[p.docno_i], place[p.docno_j]] for p in pairs], dtype=np.int64)
    there, back = np.unique(both, return_inverse=True)
    back = back.reshape(both.shape)
    return Group(
        given.qid,
        given.query,
        [given.docnos[i] for i in there],
        [given.texts[i] for i in there],
        back[:, 0],
        back[:, 1],
        np.array([pair.p for pair in pairs]),
        np.array([pair.margin for pair in pairs]),
        np.array([pair.weight for pair in pairs]),
    )


# Teachers


def _scored(teacher: Teacher, sample: Sample, lists: Sequence[Ranked]) -> Iterable[TaughtPair]:
    """Compares by the scores of a run; what it lacks stands below its last document."""
    run = read_run(str(teacher.run))
    parts = {
        qid: dict(zip(part["docno"], part["score"], strict=True))
        for qid, part in run.groupby("qid", sort=False)
    }
    for given in lists:
        scores = parts.get(given.qid, {})
        last = min(scores.values(), default=0.0)
        for (i, j), weight in _drawn(sample, given):
            known = [given.docnos[place] in scores for place in (i, j)]
            if not any(known):
                continue
            one, two = (scores.get(given.docnos[place], last) for place in (i, j))
            win = (one > two) - (one < two) if all(known) else known[0] - known[1]
            p = _soft(one - two, teacher) if teacher.labels == "soft" else (1 + win) / 2
            yield TaughtPair(
                given.qid, given.docnos[i], given.docnos[j], i + 1, j + 1, one - two, two - one,
                win, -win, p, win, sample.sampler, weight, f"run {teacher.run}", None,
            )  # fmt: skip


class Sampled(Allpair):
    """The pairs that were drawn, instead of all of them."""

    def __init__(self, n: int, pairs: list[Pair]) -> None:
        super().__init__(n)
        self._pairs = pairs

    def rounds(self) -> Rounds:
        """Yields all of them at once."""
        if self._pairs:
            yield self._pairs


def _compared(
    teacher: Teacher, stage: PRP, sample: Sample, lists: Sequence[Ranked]
) -> Iterable[TaughtPair]:
    """Compares by the backend of a PRP stage, through its cache."""
    drawn = [_drawn(sample, given) for given in lists]
    if stage.offline:
        drawn = _in_cache(stage, lists, drawn)
    rules = Rules(stage.order, stage.consistency, stage.tau, stage.seed, on_error=stage.on_error)
    comparer = Comparer(stage.backend, rules, stage.cache, stage.offline)
    asked: list[Algorithm] = [
        Sampled(len(given.docnos), [pair for pair, _ in pairs])
        for given, pairs in zip(lists, drawn, strict=True)
    ]
    found = comparer.run(lists, asked)
    identity = stage.backend.identity()
    digest = None if identity is None else hashlib.sha256(canonical(identity).encode()).hexdigest()
    for given, compared, pairs in zip(lists, found, drawn, strict=True):
        for (i, j), weight in pairs:
            win = compared.outcomes[i, j]
            answers = compared.answers.get((i, j), (None, None))
            margins = [answer.margin if answer else None for answer in answers]
            verdicts = [answer.win if answer else None for answer in answers]
            pair = TaughtPair(
                given.qid, given.docnos[i], given.docnos[j], i + 1, j + 1,
                margins[0], margins[1], verdicts[0], verdicts[1],
                (1 + win) / 2, win, sample.sampler, weight, repr(stage.backend), digest,
            )  # fmt: skip
            if teacher.labels == "soft" and not math.isnan(pair.margin):
                pair = replace(pair, p=_soft(pair.margin, teacher))
            yield pair


Drawing = tuple[Pair, float]
"""The places of a pair, and its weight."""


def _in_cache(
    stage: PRP, lists: Sequence[Ranked], drawn: Sequence[list[Drawing]]
) -> list[list[Drawing]]:
    """Returns the pairs of which the cache holds all answers."""
    identity = canonical(stage.backend.identity() or {})
    needed = {"both": (False, True), "lower_first": (True,)}.get(stage.order, (False,))
    if stage.order == "random":
        raise SpecError("teacher.prp.order is 'random'; offline, take the order of the cache")
    out = []
    with AnswerCache(str(stage.cache), read_only=True) as cache:
        for given, pairs in zip(lists, drawn, strict=True):
            keys = []
            for (i, j), _ in pairs:
                asked = Question(given.query, given.texts[i], given.texts[j])
                keys.append(
                    [question_key(identity, asked.swapped() if s else asked) for s in needed]
                )
            known = cache.get(list({key for own in keys for key in own}))
            out.append(
                [
                    pair
                    for pair, own in zip(pairs, keys, strict=True)
                    if all(key in known for key in own)
                ]
            )
    return out


def _drawn(sample: Sample, given: Ranked) -> list[Drawing]:
    found: Drawn = draw_pairs(
        len(given.docnos),
        sample.sampler,
        rate=sample.rate,
        least=sample.least,
        window=sample.window,
        spanning=sample.spanning,
        seed=sample.seed,
        qid=given.qid,
    )
    weight = np.ones(len(found.first))
    if sample.importance:
        weight = np.minimum(1 / found.chance, sample.most_weight)
    return [
        ((int(i), int(j)), float(w))
        for i, j, w in zip(found.first, found.second, weight, strict=True)
    ]


def _soft(margin: float, teacher: Teacher) -> float:
    return float(np.exp(-np.logaddexp(0.0, -margin / teacher.temperature)))


def _kept(teacher: Teacher, pairs: Iterable[TaughtPair]) -> list[TaughtPair]:
    return [
        pair
        for pair in pairs
        if not (teacher.drop_ties and pair.outcome == 0)
        and not abs(pair.margin) < teacher.min_abs_margin
    ]


# Files


def write_pairs(path: PathLike, pairs: Iterable[TaughtPair]) -> None:
    """Writes pairs as JSON Lines, whole or not at all."""
    with atomic(path) as stream:
        for pair in pairs:
            stream.write(json.dumps(asdict(pair), ensure_ascii=False) + "\n")


def read_pairs(path: PathLike) -> list[TaughtPair]:
    """Reads what `write_pairs` wrote.

    Raises:
        FileFormatError: For a missing or empty file, or a line that is no pair; names it.
    """
    names = {item.name for item in fields(TaughtPair)}
    out = []
    for number, line in read_lines(path, "pairs"):
        try:
            values: Any = json.loads(line)
            if not isinstance(values, dict) or values.keys() != names:
                raise ValueError(f"its keys are not {', '.join(sorted(names))}")
            if not 0 <= values["p"] <= 1 or not values["weight"] >= 0:
                raise ValueError("p is from 0 to 1, weight at least 0")
            out.append(TaughtPair(**values))
        except (ValueError, TypeError) as error:
            raise FileFormatError(f"{path}:{number}: no pair: {error}") from error
    return out


def digest(lists: Sequence[Ranked], pairs: Sequence[TaughtPair]) -> str:
    """Returns a fingerprint of lists, texts and pairs."""
    found = hashlib.sha256()
    for given in lists:
        found.update(json.dumps(given, ensure_ascii=False).encode())
    for pair in pairs:
        found.update(json.dumps(asdict(pair), ensure_ascii=False).encode())
    return found.hexdigest()

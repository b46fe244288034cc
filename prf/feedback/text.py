"""Text feedback: new query texts from the first documents, for retrievers and for rerankers.

Li, Mourad, Zhuang, Koopman, Zuccon: Pseudo Relevance Feedback with Deep Language Models and Dense
Retrievers: Successes and Pitfalls. ACM TOIS, arXiv 2108.11044.

Lengths count words and punctuation marks (`words`). The paper's are those of NLTK's
``word_tokenize``, which needs a model that has to be downloaded. What differs: a contraction
(``don't``) is one word here and two there, an abbreviation (``U.S.``) two here and one there, and
quotation marks are kept here and replaced there. MS MARCO passages have about 3% more words here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyterrier as pt

from prf.errors import FrameError, shorten
from prf.feedback.base import Docs, Query, TextFeedback
from prf.frames import (
    IntArray,
    ObjectArray,
    column,
    objects,
    original_query,
    queries_of,
    query_columns,
    ranked,
)
from prf.pipeline import (
    Count,
    Depth,
    Log,
    Resource,
    Transformer,
    _outputs,
    applied,
    logging_to,
    notice,
    shows_progress,
)

How = Literal["truncate", "aggregate", "window"]
Aggregation = Literal["average", "borda", "max"]
Scores = npt.NDArray[np.float64]

_WORD = re.compile(r"\w+(?:[-.,'’/&]\w+)*|[^\w\s]")
PASSAGE = 65
"""Words of a usual passage (MS MARCO's mean), for predicting how many windows there will be."""


def words(text: str) -> list[str]:
    """Splits a text into words and single punctuation marks; white space separates.

    A mark between letters or digits belongs to the word: ``3.5``, ``well-known``, ``don't``.

    >>> words("Don't pay 1,000.50 (well-known).")
    ["Don't", 'pay', '1,000.50', '(', 'well-known', ')', '.']
    """
    return _WORD.findall(text)


def concatenate(texts: Sequence[str], max_words: int) -> str:
    """Returns the first ``max_words`` words of the texts one after another, joined by blanks.

    >>> concatenate(["who sings?", "Birds sing. They do."], 6)
    'who sings ? Birds sing .'
    """
    out: list[str] = []
    for text in texts:
        if len(out) >= max_words:
            break
        out += words(text)
    return " ".join(out[:max_words])


def windows(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of each window over a text of so many words; the last may be short.

    >>> windows(100, 65, 32)
    [(0, 65), (32, 97), (64, 100)]
    >>> windows(65, 65, 32)
    [(0, 65)]
    """
    out = [(0, min(window, length))]
    while out[-1][0] + window < length:
        start = out[-1][0] + stride
        out.append((start, min(start + window, length)))
    return out


def new_texts(
    query: str,
    docs: Sequence[str],
    how: How,
    window: int = 65,
    stride: int = 32,
    max_words: int = 256,
) -> list[str]:
    """Returns the new texts of one query, each cut after ``max_words`` words.

    Args:
        query: The query's text.
        docs: Texts of the feedback documents, best first, at least one.
        how: ``truncate``: one text, query and all documents. ``aggregate``: one for each document,
            query and document. ``window``: one for each window over all documents, query and
            window.
        window: Words of a window.
        stride: Words from the start of one window to that of the next.
        max_words: Length of a new text.

    >>> new_texts("q", ["a b c", "d e"], "aggregate")
    ['q a b c', 'q d e']
    >>> new_texts("q", ["a b c", "d e"], "window", window=3, stride=2)
    ['q a b c', 'q c d e']
    """
    if how == "truncate":
        return [concatenate([query, *docs], max_words)]
    if how == "aggregate":
        return [concatenate([query, doc], max_words) for doc in docs]
    own = words(query)
    every = [word for doc in docs for word in words(doc)]
    return [
        " ".join([*own, *every[start:stop]][:max_words])
        for start, stop in windows(len(every), window, stride)
    ]


def combined(scores: Scores, ranks: IntArray, how: Aggregation) -> Scores:
    """Returns the score of each candidate from those under every new text.

    Args:
        scores: (texts, candidates).
        ranks: (texts, candidates), from 0.
        how: ``average`` or ``max`` of the scores, or ``borda``: the sum of ``(n - r + 1) / n`` for
            n candidates, r counted from 1.

    >>> ranks = np.array([[0, 1, 2, 3], [1, 3, 0, 2]])
    >>> combined(-ranks.astype(float), ranks, "borda").tolist()
    [1.75, 1.0, 1.5, 0.75]
    """
    if how == "borda":
        # Whole numbers first, so that equal points are equal scores.
        points: Scores = (scores.shape[1] - ranks).sum(axis=0) / scores.shape[1]
        return points
    out: Scores = scores.mean(axis=0) if how == "average" else scores.max(axis=0)
    return out


@dataclass(frozen=True, repr=False)
class ConcatenateText(TextFeedback):
    """A new text: the query followed by its first documents, cut (concatenate and truncate, CT).

    Needs: qid, query, docno, score, text
    Gives: qid, query, query_0

    ``query`` is the words of query and documents joined by blanks, the first ``max_words`` of them;
    the old text moves to ``query_0``. May stand before any retriever or reranker; a reranker takes
    the new text only with ``query_field="current"``. A query without documents keeps its text.

    Source: Li et al., ACM TOIS, arXiv 2108.11044, section 4 (Concatenate and Truncate).

    Args:
        fb_docs: How many of the first documents.
        max_words: Length of the new text, in words and punctuation marks.
    """

    fb_docs: Depth = 10
    max_words: Count = 256

    def reformulate(self, query: Query, docs: Docs) -> str:
        return concatenate([query.text, *docs.texts], self.max_words)


@dataclass(frozen=True, repr=False)
class TextFeedbackReranker(Transformer):
    """Reranks a list with new texts made of the query and the list's own first documents.

    Needs: qid, query, docno, score, text
    Gives: qid, query, docno, score, text, rank

    Every new text scores every document of the list, and the scores are combined; the query's own
    ranking is not among them. ``score`` is the nested reranker's for ``average`` and ``max``; for
    ``borda`` points, from 1/n to 1 for each new text. The query columns stay as they are. The
    feedback documents are the first of the list as it comes, so put a reranker before this one as
    the paper does, or any other ranking. New texts start with the user's own text
    (`original_query`). A query without documents has no rows; with ``fb_docs=0`` the list stays as
    it is. The nested reranker is called once, with the new texts as queries of their own, and must
    return all documents it is given.

    Source: Li et al., ACM TOIS, arXiv 2108.11044, section 4: truncate (CT), aggregate (CA), window
    (SW); ``aggregate`` with ``borda`` is what it recommends.

    Args:
        reranker: Scores text pairs, such as `CrossEncoder` or a pipeline that ends with one.
        how: ``truncate``, one new text of query and all feedback documents; ``aggregate``, one for
            each feedback document; ``window``, one for each window over the feedback documents.
        aggregate: How scores of several new texts become one.
        fb_docs: How many of the first documents.
        window: Words of a window; the paper has 65 for MS MARCO.
        stride: Words between the starts of two windows; 32 there.
        max_words: Length of a new text, in words and punctuation marks.
    """

    reranker: pt.Transformer
    how: How = "aggregate"
    aggregate: Aggregation = "borda"
    fb_docs: Depth = 10
    window: Count = 65
    stride: Count = 32
    max_words: Count = 256

    needs = ("qid", "query", "docno", "score", "text")
    gives = ("rank",)

    def resources(self) -> list[Resource]:
        return self.reranker.resources() if isinstance(self.reranker, Transformer) else []

    def check_after(self, earlier: Sequence[pt.Transformer]) -> None:
        if isinstance(self.reranker, Transformer):
            self.reranker.check_after(earlier)

    def outputs(self, columns: Sequence[str]) -> list[str]:
        out = super().outputs(columns)
        with self.named():
            _outputs(self.reranker, _kept(columns))
        return out

    def cost(self, documents: int | None) -> str:
        texts, about = self.fb_docs, ""
        if self.how == "truncate":
            texts = min(self.fb_docs, 1)
        elif self.how == "window" and self.fb_docs:
            texts = len(windows(self.fb_docs * PASSAGE, self.window, self.stride))
            about = f"about (for passages of {PASSAGE} words) "
        if documents is None:
            return f"scores {about}{texts} pairs for each document of a query, one for each text"
        return (
            f"scores {about or 'at most '}{documents * texts:,} pairs for each query: "
            f"{documents:,} documents with {texts} new texts"
        )

    def run(self, frame: pd.DataFrame, queries: pd.DataFrame | None) -> pd.DataFrame:
        frame = ranked(frame)
        if self.fb_docs == 0 or len(frame) == 0:
            return frame
        variants = self._variants(frame)
        rows = np.concatenate([np.tile(rows, len(texts)) for rows, texts in variants])
        repeats = [len(rows) for rows, texts in variants for _ in texts]
        new = objects(text for _, texts in variants for text in texts)
        names = objects(
            # The last "#" splits it again, whatever the qid.
            f"{frame['qid'].iat[rows[0]]}#{number}"
            for rows, texts in variants
            for number in range(len(texts))
        )
        asked = frame[_kept(list(frame.columns))].take(rows).reset_index(drop=True)
        asked = asked.assign(
            qid=column(np.repeat(names, repeats)), query=column(np.repeat(new, repeats))
        )
        scores, ranks = self._answers(asked)
        fused, start = np.empty(len(frame)), 0
        for own, texts in variants:
            part = slice(start, start + len(texts) * len(own))
            shape = (len(texts), len(own))
            fused[own] = combined(
                scores[part].reshape(shape), ranks[part].reshape(shape), self.aggregate
            )
            start = part.stop
        return ranked(frame.assign(score=fused))

    def _variants(self, frame: pd.DataFrame) -> list[tuple[IntArray, list[str]]]:
        """Returns rows and new texts of each query."""
        queries: ObjectArray = original_query(frame).to_numpy(dtype=object)
        texts = frame["text"].to_numpy(dtype=object)
        starts = np.flatnonzero(frame["rank"].to_numpy() == 0).tolist()
        out = []
        for start, stop in pairwise([*starts, len(frame)]):
            docs = texts[start : min(start + self.fb_docs, stop)]
            for text in (queries[start], *docs):
                if not isinstance(text, str):
                    raise FrameError(
                        f"{self!r}: qid {frame['qid'].iat[start]!r} has {shorten(text)} where a "
                        "query or a feedback document has its text"
                    )
            new = new_texts(
                queries[start], list(docs), self.how, self.window, self.stride, self.max_words
            )
            out.append((np.arange(start, stop), new))
        return out

    def _answers(self, asked: pd.DataFrame) -> tuple[Scores, IntArray]:
        """Returns score and rank of every pair asked for, in that order."""
        with logging_to(Log(progress=shows_progress())) as log:
            found = applied(self.reranker, asked, queries_of(asked))
        for what, qids in log.notices.items():
            notice(what, list(dict.fromkeys(qid.rpartition("#")[0] for qid in qids)))
        missing = [name for name in ("docno", "score") if name not in found.columns]
        if missing:
            raise FrameError(
                f"{self!r}: the reranker {self.reranker!r} gives no {' and no '.join(missing)}; "
                "it must score the documents it is given"
            )
        found = ranked(found)
        place = pd.MultiIndex.from_frame(found[["qid", "docno"]]).get_indexer(
            pd.MultiIndex.from_frame(asked[["qid", "docno"]])
        )
        lost = np.flatnonzero(place < 0)
        if lost.size:
            qid, docno = (str(asked[name].iat[lost[0]]) for name in ("qid", "docno"))
            raise FrameError(
                f"{self!r}: the reranker {self.reranker!r} returned no score for docno {docno!r} "
                f"of qid {qid.rpartition('#')[0]!r}; it must return every document it is given, so "
                "take cuts out of it"
            )
        if len(found) > len(asked):
            raise FrameError(
                f"{self!r}: {self.reranker!r} returned {len(found):,} documents for the "
                f"{len(asked):,} it was given; it must rerank them, not retrieve others"
            )
        return found["score"].to_numpy(np.float64)[place], found["rank"].to_numpy(np.int64)[place]


def _kept(columns: Sequence[str]) -> list[str]:
    """Returns the columns a nested reranker sees: no earlier texts, nothing made of the old one."""
    old = [name for name in query_columns(columns) if re.fullmatch(r"query_(\d+|vec|toks)", name)]
    return [name for name in columns if name not in old]

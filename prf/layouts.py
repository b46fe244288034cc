"""What an encoder reads: the exact token ids for a query, a passage, a query with feedback.

A layout is how a published model lays out its input. The functions work on token ids, so that
training and search build the same input; `Reader` is the tokenizer in front of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from prf.errors import IndexStateError, SpecError
from prf.frames import IntArray
from prf.jvm import utf8

Side = Literal["query", "document"]
Layout = Literal["ance", "tct", "cls", "mean", "mean-l2"]
FeedbackLayout = Literal["ance", "tct", "cls"]
Truncation = Literal["official", "pyserini"]

TCT_QUERY = 36
"""TCT-ColBERT reads exactly so many tokens of a query."""


class Marks(NamedTuple):
    """Ids of a tokenizer's special tokens; ``mask`` is None where it has none."""

    cls: int
    sep: int
    pad: int
    mask: int | None = None


class Ids(NamedTuple):
    """Token ids of some texts, and the positions of the texts that were cut."""

    rows: list[list[int]]
    cut: IntArray


def enclosed(ids: Sequence[int], marks: Marks, max_length: int) -> list[int]:
    """Returns ``[CLS] ids [SEP]`` (``<s> ids </s>``) of at most ``max_length`` ids.

    >>> enclosed([7, 8, 9], Marks(1, 2, 0), 4)
    [1, 7, 8, 2]
    """
    return [marks.cls, *ids[: max_length - 2], marks.sep]


def filled(ids: Sequence[int], mask: int, length: int) -> list[int]:
    """Returns exactly ``length`` ids: the first ones, then ``[MASK]``.

    >>> filled([1, 7], 4, 5)
    [1, 7, 4, 4, 4]
    """
    return [*ids[:length], *[mask] * (length - len(ids))]


def feedback_ids(
    layout: FeedbackLayout,
    query: Sequence[int],
    passages: Sequence[Sequence[int]],
    marks: Marks,
    *,
    truncation: Truncation = "official",
    max_length: int = 512,
    query_length: int = 64,
    head: Sequence[int] = (),
) -> tuple[list[int], bool]:
    """Returns the ids a PRF encoder reads, and whether anything was cut.

    ``ance`` and ``cls``: ``[CLS] q [SEP] d1 [SEP] ... dk [SEP]``, of RoBERTa ``<s>`` and ``</s>``.
    ``tct``: ``[CLS] [Q] q [SEP] d1 [SEP] ... dk``, then ``[MASK]`` up to ``max_length``.

    >>> feedback_ids("ance", [7, 8], [[9], [5, 6]], Marks(1, 2, 0))
    ([1, 7, 8, 2, 9, 2, 5, 6, 2], False)
    >>> feedback_ids("ance", [7, 8], [[9], [5, 6]], Marks(1, 2, 0), max_length=7)
    ([1, 7, 8, 2, 9, 2, 2], True)

    Args:
        layout: ``ance``, ``tct`` or ``cls``.
        query: Ids of the query, without special tokens.
        passages: Ids of each feedback passage, best first, without special tokens; may be none.
        marks: The tokenizer's special ids.
        truncation: ``official`` cuts the query at ``query_length`` and each passage at
            ``max_length`` (special tokens included), and of too long an input keeps the first
            ``max_length - 1`` ids and the last one, [SEP]. ``pyserini`` only cuts off the end. The
            tct form has no last [SEP] to keep.
        max_length: Ids in all.
        query_length: Ids of the query, special tokens included.
        head: What stands between [CLS] and the query: of tct the ids of ``[Q]``.
    """
    opening, parts = [marks.cls, *head], [query, *passages]
    if truncation == "official":
        parts = [
            query[: query_length - len(opening) - 1],
            *(passage[: max_length - 2] for passage in passages),
        ]
    whole = opening
    for part in parts:
        whole = [*whole, *part, marks.sep]
    if layout == "tct":
        whole = whole[:-1]
    given = sum(map(len, [query, *passages]))
    cut = sum(map(len, parts)) < given or len(whole) > max_length
    if len(whole) > max_length:
        last = truncation == "official" and layout != "tct"
        whole = [*whole[: max_length - 1], whole[-1]] if last else whole[:max_length]
    if layout == "tct":
        if marks.mask is None:
            raise SpecError("layout 'tct' needs a tokenizer with a [MASK] token")
        whole = filled(whole, marks.mask, max_length)
    return whole, cut


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, uncut; special tokens only where the text spells them."""
    if not texts:
        return []
    with warnings.catch_warnings():
        # The tokenizer warns that some text is longer than the model takes; callers count them.
        warnings.simplefilter("ignore")
        encoded = tokenizer(
            [utf8(text).decode() for text in texts],
            add_special_tokens=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
    return list(encoded["input_ids"])


@dataclass(frozen=True, eq=False)
class Reader:
    """Turns texts into the ids that a model of one layout reads.

    Args:
        layout: The layout.
        tokenizer: A tokenizer of transformers.
        marks: Its special ids.
        positions: The longest input the model has positions for.
    """

    layout: Layout
    tokenizer: Any
    marks: Marks
    positions: int

    @classmethod
    def of(cls, layout: Layout, tokenizer: Any, positions: int, where: str) -> Reader:
        """Returns the reader of a tokenizer.

        Raises:
            IndexStateError: If it has no special tokens such as the layout needs.
        """
        names = ["cls", "sep", "pad", *(["mask"] if layout == "tct" else [])]
        ids = [getattr(tokenizer, f"{name}_token_id") for name in names]
        lacking = [name for name, number in zip(names, ids, strict=True) if number is None]
        if lacking:
            raise IndexStateError(
                f"{where}: its tokenizer has no {lacking[0]} token, which layout '{layout}' needs"
            )
        return cls(layout, tokenizer, Marks(*ids), positions)

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, uncut; special tokens only where the text spells them."""
        if self.layout == "ance":
            # ANCE is uncased, but fast tokenizers do not heed the flag that says so.
            texts = [text.lower() for text in texts]
        return token_ids(self.tokenizer, texts)

    def read(self, texts: Sequence[str], side: Side, max_length: int) -> Ids:
        """Returns the ids of queries or documents, at most ``max_length`` for each."""
        if self.layout != "tct":
            tokens = self.tokens(texts)
            rows = [enclosed(ids, self.marks, max_length) for ids in tokens]
            return Ids(rows, _longer(tokens, max_length - 2))
        start = "[CLS] [Q] " if side == "query" else "[CLS] [D] "
        tokens = self.tokens([start + text for text in texts])
        cut = _longer(tokens, max_length)
        if side == "document":
            return Ids([ids[:max_length] for ids in tokens], cut)
        if self.marks.mask is None:
            raise SpecError("layout 'tct' needs a tokenizer with a [MASK] token")
        return Ids([filled(ids, self.marks.mask, max_length) for ids in tokens], cut)

    def feedback(
        self,
        queries: Sequence[str],
        passages: Sequence[Sequence[str]],
        *,
        truncation: Truncation = "official",
        max_length: int = 512,
        query_length: int = 64,
    ) -> Ids:
        """Returns the ids of queries with their feedback passages; see `feedback_ids`.

        Raises:
            SpecError: For a layout that takes no feedback, or lengths the model does not have.
        """
        layout = self.layout
        if layout not in ("ance", "tct", "cls"):
            raise SpecError(f"layout '{layout}' takes no feedback; one of ance, tct, cls")
        head = self.tokens(["[Q]"])[0] if layout == "tct" else []
        if not len(head) + 3 <= query_length <= max_length <= self.positions:
            raise SpecError(
                f"feedback needs {len(head) + 3} <= query_length <= max_length <= "
                f"{self.positions} (the model's positions), not query_length={query_length}, "
                f"max_length={max_length}"
            )
        flat = self.tokens([*queries, *(text for texts in passages for text in texts)])
        rows, cut, place = [], [], len(queries)
        for number, texts in enumerate(passages):
            own = flat[place : place + len(texts)]
            place += len(texts)
            ids, short = feedback_ids(
                layout,
                flat[number],
                own,
                self.marks,
                truncation=truncation,
                max_length=max_length,
                query_length=query_length,
                head=head,
            )
            rows.append(ids)
            cut.append(short)
        return Ids(rows, np.flatnonzero(cut))


def _longer(tokens: Sequence[Sequence[int]], room: int) -> IntArray:
    return np.flatnonzero([len(ids) > room for ids in tokens])

"""What an encoder reads: the exact token ids for a query, a passage, a query with feedback.

A layout is how a published model lays out its input. The functions work on token ids, so that
training and search build the same input; `Reader` is the tokenizer in front of them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from prf.errors import IndexStateError, SpecError
from prf.frames import IntArray
from prf.jvm import utf8

Side = Literal["query", "document"]
Layout = Literal["ance", "tct", "cls", "mean", "mean-l2"]
Truncation = Literal["official", "pyserini", "lol"]
Pool = Literal["all", "query"]

TCT_QUERY = 36
"""TCT-ColBERT reads exactly so many tokens of a query."""

LOL_ROOM = 10
"""LoL starts no further passage where fewer positions are left, its [SEP] included."""


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
    layout: Layout,
    query: Sequence[int],
    passages: Sequence[Sequence[int]],
    marks: Marks,
    *,
    truncation: Truncation = "official",
    max_length: int = 512,
    query_length: int = 64,
    passage_length: int = 0,
    head: Sequence[int] = (),
) -> tuple[list[int], bool]:
    """Returns the ids a PRF encoder reads, and whether anything was cut.

    ``[CLS] q [SEP] d1 [SEP] ... dk [SEP]``, of RoBERTa ``<s>`` and ``</s>``; of ``tct`` ``[CLS] [Q]
    q [SEP] d1 [SEP] ... dk``, then ``[MASK]`` up to ``max_length``.

    >>> feedback_ids("ance", [7, 8], [[9], [5, 6]], Marks(1, 2, 0))
    ([1, 7, 8, 2, 9, 2, 5, 6, 2], False)
    >>> feedback_ids("ance", [7, 8], [[9], [5, 6]], Marks(1, 2, 0), max_length=7)
    ([1, 7, 8, 2, 9, 2, 2], True)

    Args:
        layout: The model's; all but ``tct`` read feedback in one form.
        query: Ids of the query, without special tokens.
        passages: Ids of each feedback passage, best first, without special tokens; may be none.
        marks: The tokenizer's special ids.
        truncation: ``official`` (ANCE-PRF) and ``lol`` cut the query at ``query_length`` and each
            passage at ``passage_length``. Of what is still too long, ``official`` keeps the first
            ``max_length - 1`` ids and the last one, [SEP]; ``lol`` shortens the last passage that
            fits so that its [SEP] does too, and starts none where fewer than 10 positions are left.
            ``pyserini`` only cuts off the end. The tct form has no last [SEP] to keep.
        max_length: Ids in all.
        query_length: Ids of the query, special tokens included.
        passage_length: Ids of each passage with two special tokens; 0 for ``max_length``.
        head: What stands between [CLS] and the query: of tct the ids of ``[Q]``.
    """
    opening, parts = [marks.cls, *head], [query, *passages]
    if truncation != "pyserini":
        most = (passage_length or max_length) - 2
        parts = [
            query[: query_length - len(opening) - 1],
            *(passage[:most] for passage in passages),
        ]
    if truncation == "lol":
        parts = _fitting(parts, max_length - len(opening))
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


def _fitting(parts: Sequence[Sequence[int]], room: int) -> list[Sequence[int]]:
    """Returns the query and the passages that LoL packs into ``room`` ids, a [SEP] after each."""
    query, *passages = parts
    kept = [query]
    room -= len(query) + 1
    for passage in passages:
        if room < LOL_ROOM:
            break
        kept.append(passage[: room - 1])
        room -= len(kept[-1]) + 1
    return kept


def padded(
    rows: Sequence[Sequence[int]], pad: int, *, left: bool = False
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Returns ids filled up to the longest, and what of them is real: (n, longest) each.

    Padding follows the ids, or stands before them on the ``left``.

    >>> padded([[5, 6], [7]], 0)[0].tolist()
    [[5, 6], [7, 0]]
    """
    lengths = np.array([len(ids) for ids in rows], dtype=np.int64)
    table = np.full((len(rows), int(lengths.max(initial=0))), pad, dtype=np.int64)
    width = table.shape[1]
    for place, ids in enumerate(rows):
        table[place, slice(width - len(ids), width) if left else slice(0, len(ids))] = ids
    real = np.arange(width) < lengths[:, None]
    return table, real[:, ::-1].copy() if left else real


def segments(ids: Any, sep: int) -> Any:
    """Returns token types: 0 up to the first [SEP], 1 after it.

    A literal [SEP] in a query ends it early.

    >>> segments(np.array([[1, 7, 2, 9, 2, 0]]), 2).tolist()
    [[0, 0, 0, 1, 1, 1]]

    Args:
        ids: (n, length) array or tensor.
        sep: Id of [SEP].
    """
    ends = (ids == sep) * 1
    return (ends.cumsum(1) - ends).clip(0, 1)


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
        passage_length: int = 0,
    ) -> Ids:
        """Returns the ids of queries with their feedback passages; see `feedback_ids`.

        For ``lol``, longer runs of underscores in queries become three.

        Raises:
            SpecError: For lengths the model does not have.
        """
        layout = self.layout
        head = self.tokens(["[Q]"])[0] if layout == "tct" else []
        if not len(head) + 3 <= query_length <= max_length <= self.positions:
            raise SpecError(
                f"feedback needs {len(head) + 3} <= query_length <= max_length <= "
                f"{self.positions} (the model's positions), not query_length={query_length}, "
                f"max_length={max_length}"
            )
        if passage_length in (1, 2):
            raise SpecError(f"feedback needs passage_length 0 or at least 3, not {passage_length}")
        if truncation == "lol":
            queries = [re.sub("_{3,}", "___", query) for query in queries]
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
                passage_length=passage_length,
                head=head,
            )
            rows.append(ids)
            cut.append(short)
        return Ids(rows, np.flatnonzero(cut))


def _longer(tokens: Sequence[Sequence[int]], room: int) -> IntArray:
    return np.flatnonzero([len(ids) > room for ids in tokens])

"""What is asked of a model, what it answers, and what two answers say about a pair.

A *question* shows two passages in one order; an *answer* says which of the two is better, and by
how much if the model tells. A pair asked in both orders gives two answers and one *outcome*.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Consistency = Literal["hard", "soft"]
Order = Literal["both", "forward", "lower_first", "random"]

NORMALISER = 1
"""Version of `clean_text`; part of every cache key, as it decides what a model reads."""


class Question(NamedTuple):
    """Two passages in the order in which they are shown."""

    query: str
    first: str
    second: str

    def swapped(self) -> Question:
        """Returns the same question with the passages in the other order."""
        return Question(self.query, self.second, self.first)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said to one question.

    Attributes:
        win: 1 if the first passage is better, -1 if the second is, 0 for neither.
        valid: Whether that was a verdict at all; always true of scores.
        margin: Logarithm of the odds that the first is better, where the model tells.
        raw: The text the model gave, if it gave one.
        prompt_tokens: Tokens read.
        completion_tokens: Tokens written.
        model: The name the model gave itself.
        censored: Whether one label's probability was only known to be below a bound.
        cut: How many of the two passages lost their end.
    """

    win: int
    valid: bool = True
    margin: float | None = None
    raw: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str = ""
    censored: bool = False
    cut: int = 0


def clean_text(text: str) -> str:
    """Returns the text in NFC with every run of white space as one blank; half characters as ``?``.

    >>> clean_text(" a\\n\\nb ")
    'a b'
    """
    whole = text.encode("utf-8", "replace").decode()  # half a character has no UTF-8
    return " ".join(unicodedata.normalize("NFC", whole).split())


def shared_start(labels: Sequence[str]) -> str:
    """Returns the words both labels begin with: ``Passage`` of ``Passage A`` and ``Passage B``.

    >>> shared_start(["Passage A", "Passage B"]), shared_start(["1", "2"])
    ('Passage', '')
    """
    one, two = (label.split() for label in labels)
    same = 0
    while same < min(len(one), len(two)) - 1 and one[same] == two[same]:
        same += 1
    return " ".join(one[:same])


def read_verdict(text: str, labels: Sequence[str], lenient: bool = False) -> int | None:
    """Returns 1 or -1 for the label that an answer names, None if it names none.

    Strict reading takes only an answer that is a label, with or without the words both labels
    share, whatever quotes or marks stand around it. Lenient reading also takes a longer answer in
    which one of the two whole labels occurs and the other does not; a letter alone inside a
    sentence is never a verdict.

    >>> read_verdict("**passage b.**", ["Passage A", "Passage B"])
    -1
    >>> read_verdict("Passage A is", ["Passage A", "Passage B"]) is None
    True
    >>> read_verdict("Passage A is", ["Passage A", "Passage B"], lenient=True)
    1
    """
    folded = clean_text(text).casefold()
    plain = folded.strip(" \"'`*_.,:;!“”‘’")
    start = shared_start(labels)
    rests = [label[len(start) :].strip().casefold() for label in labels]
    front = rf"(?:{re.escape(start.casefold())}\s*:?\s*)?" if start else ""
    for win, rest in zip((1, -1), rests, strict=True):
        if re.fullmatch(rf"{front}[(\[]?{re.escape(rest)}[)\]]?", plain):
            return win
    if lenient and start:
        found = {
            win
            for win, label in zip((1, -1), labels, strict=True)
            if re.search(rf"\b{re.escape(label.casefold())}\b", folded)
        }
        if len(found) == 1:
            return found.pop()
    return None


def outcome(
    one: Answer, other: Answer | None, consistency: Consistency = "hard", tau: float = 0.0
) -> int:
    """Returns 1 if passage i is better than j, -1 if j is, 0 for a tie.

    Args:
        one: The answer with i shown first.
        other: The answer with j shown first; None where a pair is asked once.
        consistency: ``hard``: both orders must name the same passage (Qin et al., arXiv
            2306.17563). ``soft``: half the difference of the two margins must be beyond ``tau``; a
            constant liking for one position cancels.
        tau: Width of the tie, in logits, for ``soft``.

    >>> outcome(Answer(1), Answer(-1)), outcome(Answer(1), Answer(1))
    (1, 0)
    >>> outcome(Answer(1, margin=3.0), Answer(1, margin=1.0), "soft")
    1
    """
    if consistency == "soft":
        margins = (one.margin, 0.0 if other is None else other.margin)
        if margins[0] is None or margins[1] is None:
            return 0
        middle = margins[0] if other is None else (margins[0] - margins[1]) / 2
        return (middle > tau) - (middle < -tau)
    if other is None:
        return one.win if one.valid else 0
    if not (one.valid and other.valid):
        return 0
    return one.win if one.win == -other.win else 0

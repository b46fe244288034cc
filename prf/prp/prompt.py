"""The prompt: its text, what is filled in, and how passages are cut to fit.

A template is plain text with ``{query}``, ``{a}`` and ``{b}``, each once. It is filled in one pass,
so that braces or labels inside a passage stay what they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prf.errors import FileFormatError, SpecError, did_you_mean
from prf.prp.answers import Question

PRESETS = {
    "default": (
        'Two passages were found for the search query "{query}". Decide which one answers it '
        "better.\n\n"
        "Passage A:\n{a}\n\n"
        "Passage B:\n{b}\n\n"
        "Reply with nothing but the name of the better passage, Passage A or Passage B. "
        "The better one is:"
    ),
    "letter": (
        'Two passages were found for the search query "{query}". Decide which one answers it '
        "better.\n\n"
        "Passage A:\n{a}\n\n"
        "Passage B:\n{b}\n\n"
        "Reply with nothing but the letter of the better passage, A or B. The letter is:"
    ),
}
"""Templates by name, written for this package in the four parts of Qin et al., arXiv 2306.17563: a
question with the query, the two passages under their labels, and an instruction whose natural
continuation is a label; ``letter`` asks for the letter alone, for servers that tell the probability
of the first token. A published name for another wording would need its own entry, since
answers and figures are valid for one wording only."""

_SLOT = re.compile(r"\{(query|a|b)\}")


@dataclass(frozen=True)
class Template:
    """A prompt's text, and its digest for cache keys."""

    text: str

    @property
    def digest(self) -> str:
        """First 16 digits of the SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def fill(self, question: Question) -> str:
        """Returns the prompt of a question.

        >>> Template("{query}: {a} or {b}?").fill(Question("q", "{b}", "y"))
        'q: {b} or y?'
        """
        values = dict(zip(("query", "a", "b"), question, strict=True))
        return _SLOT.sub(lambda match: values[match[1]], self.text)


def read_template(name: str) -> Template:
    """Returns a template: a preset by its name, or the text of a file as it is now.

    A file's last line break is dropped, all else stays.

    Raises:
        SpecError: If a slot is missing or stands twice, or there is no such preset or file.
        FileFormatError: If the file is not UTF-8.
    """
    if name in PRESETS:
        return Template(PRESETS[name])
    path = Path(name)
    if not path.is_file():
        raise SpecError(
            f"template {name!r} is neither a file nor one of {', '.join(PRESETS)}"
            f"{did_you_mean(name, PRESETS)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"template '{name}' cannot be read as UTF-8: {error}") from error
    found = _SLOT.findall(text)
    for slot in ("query", "a", "b"):
        if found.count(slot) != 1:
            raise SpecError(
                f"template '{name}' holds {{{slot}}} {found.count(slot)} times; it must hold "
                "{query}, {a} and {b} once each"
            )
    return Template(text.removesuffix("\n"))


def shares(room: int, one: int, other: int) -> tuple[int, int]:
    """Returns how many tokens each of two passages may keep: half, and what the other leaves.

    >>> shares(10, 3, 20), shares(10, 20, 20), shares(10, 4, 5)
    ((3, 7), (5, 5), (4, 5))
    """
    if one + other <= room:
        return one, other
    half = room // 2
    if one <= half:
        return one, room - one
    if other <= half:
        return room - other, other
    return half, half


@dataclass(frozen=True)
class Limits:
    """How long texts may be, in the tokens of who reads them.

    ``context`` is the room for the whole prompt; None where it is not known.
    """

    query: int
    passage: int
    context: int | None = None


Cut = Callable[[str, int], tuple[str, int, int]]
"""Cuts a text to at most so many tokens: the text, its tokens now, and its tokens before."""


def fit(
    question: Question, limits: Limits, cut: Cut, length: Callable[[Question], int], where: str
) -> tuple[Question, int]:
    """Returns the question with texts cut to fit, and how many of its passages lost their end.

    Only query and passages are cut, each to its own limit; where the prompt is still longer than
    the context the passages share what is left of it equally, a short one leaving its rest to the
    other.

    Args:
        question: Clean texts.
        limits: How long they may be.
        cut: See `Cut`.
        length: Tokens of a prompt, all that is around the texts included.
        where: The model, for messages.

    Raises:
        SpecError: If not even one token of each passage has room.
    """
    query, _, _ = cut(question.query, limits.query)
    (first, one, of_one), (second, two, of_two) = (cut(t, limits.passage) for t in question[1:])
    fitted = Question(query, first, second)
    if limits.context is not None:
        # Words at the seams may take a token more than counted alone, hence a second look.
        over = length(fitted) - limits.context
        while over > 0:
            room = one + two - over
            if room < 2:
                raise SpecError(
                    f"{where}: prompt and query alone take {length(Question(query, '', ''))} of "
                    f"the {limits.context} tokens it can read; shorten the template or "
                    "max_query_tokens"
                )
            keep = shares(room, one, two)
            first, one, _ = cut(question.first, keep[0])
            second, two, _ = cut(question.second, keep[1])
            fitted = Question(query, first, second)
            over = length(fitted) - limits.context
    return fitted, (one < of_one) + (two < of_two)

"""Servers that speak OpenAI's chat protocol: hosted ones, vLLM, llama.cpp, Ollama, and others.

Only Python's standard library is used. What may pass is tried again: a refusal for now (408, 409,
425, 429, 500 and above), a lost or slow connection, an answer that is no JSON. What will not pass
is an error at once: a wrong key, address or request.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import math
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal

from prf.errors import PrfError, SpecError, shorten
from prf.pipeline import Count, Resource
from prf.prp.answers import Answer, Question, read_verdict, shared_start
from prf.prp.backend import Batch, Session
from prf.prp.models import PROBES, LanguageModel, Mode
from prf.prp.prompt import Limits, fit, read_template

AGAIN = (408, 409, 425, 429)
"""Refusals that may pass, besides those of the server itself (500 and above)."""

LONGEST_WAIT = 60.0
ALTERNATIVES = 20
CHARS_PER_TOKEN = 4
"""For estimates only; what a server counts is what is reported."""


@dataclass(frozen=True, repr=False)
class ChatServer(LanguageModel):
    """A model behind a server that speaks OpenAI's chat protocol.

    Temperature is 0, which is not deterministic on every server; with a cache a second run is. The
    key is read from the environment and stands nowhere else. Two plain questions are asked before
    the first real one. Lengths are counted in words, as the model's tokens are not known here.

    Source: Qin et al., Findings of NAACL 2024, arXiv 2306.17563, section 3.1 (generation and
    scoring mode).

    Args:
        url: Address up to the version, such as ``http://localhost:8000/v1``.
        model: Name the server knows it by.
        mode: ``generate``: the answer is read. ``score``: the margin is the difference of the log-
            probabilities of the two letters as first token, which the server must tell.
        template: Name of a preset, or a text file with {query}, {a} and {b}.
        labels: What the template calls the two passages; they differ in their last word.
        parse: ``strict``: an answer is a label or its letter and nothing else; ``lenient``: one of
            the two whole labels may stand in a longer answer.
        max_query_tokens: Words; longer queries are cut.
        max_passage_tokens: Words; longer passages are cut.
        max_tokens: Tokens of an answer, in generation mode; models that think need 1,024 or more.
        extra: More fields of the request, as JSON, such as
            ``{"chat_template_kwargs": {"enable_thinking": false}}``.
        key: Name of the environment variable that holds the key; none is sent if it is not set.
        concurrency: Requests under way at once.
        requests_per_minute: No more than this, evenly spread.
        tokens_per_minute: No more than this, evenly spread, by an estimate before each request.
        tries: Of one request, the first included.
        wait: Seconds before the second try; doubled for each more, up to 60, plus or minus a
            quarter. A server's own Retry-After goes first.
        timeout: Seconds for an answer to one request.
        deadline: Seconds for one turn of questions, all tries included.
        price_in: Price of a million tokens read.
        price_out: Price of a million tokens written.
    """

    url: str
    model: str
    mode: Mode = "generate"
    template: str = "letter"
    labels: tuple[str, ...] = ("Passage A", "Passage B")
    parse: Literal["strict", "lenient"] = "strict"
    max_query_tokens: Count = 32
    max_passage_tokens: Count = 128
    max_tokens: Count = 8
    extra: str = "{}"
    key: str = "OPENAI_API_KEY"
    concurrency: Count = 8
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tries: Count = 6
    wait: float = 1.0
    timeout: float = 60.0
    deadline: float | None = None
    price_in: float | None = None
    price_out: float | None = None

    kind = "server"

    def check(self) -> None:
        super().check()
        if not re.match(r"https?://\S+$", self.url):
            raise SpecError(f"ChatServer.url is {self.url!r}; write http://host/v1 or https://...")
        if self.wait < 0 or self.timeout <= 0 or (self.deadline is not None and self.deadline <= 0):
            raise SpecError("ChatServer.wait, timeout and deadline must be above 0")
        if (self.price_in is None) != (self.price_out is None):
            raise SpecError("ChatServer.price_in and price_out go together; give both or none")
        try:
            extra = json.loads(self.extra)
        except json.JSONDecodeError as error:
            raise SpecError(f"ChatServer.extra is no JSON: {error}") from error
        if not isinstance(extra, dict):
            raise SpecError(f"ChatServer.extra is {shorten(self.extra)}; write a JSON object")

    @property
    def has_margins(self) -> bool:
        return self.mode == "score"

    @property
    def prices(self) -> tuple[float, float] | None:
        if self.price_in is None or self.price_out is None:
            return None
        return self.price_in, self.price_out

    def identity(self) -> dict[str, Any] | None:
        return {
            **self.prompt_identity(),
            "mode": self.mode,
            "parse": self.parse,
            "max_tokens": self.max_tokens,
            "extra": json.loads(self.extra),
        }

    def resources(self) -> list[Resource]:
        return [Resource("model", f"{self.model} at {self.url}")]

    def session(self) -> Session:
        session = _ServerSession(self)
        session.probe()
        return session


class _Again(Exception):  # noqa: N818  (no error of this package: it is caught here)
    """A request that may pass later; ``after`` seconds if the server says so."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class _Pace:
    """Spreads requests evenly, so that a limit per minute is never passed."""

    def __init__(self, per_minute: int | None) -> None:
        self._seconds = 60.0 / per_minute if per_minute else 0.0
        self._next, self._lock = 0.0, threading.Lock()

    def wait(self, amount: int = 1) -> None:
        if not self._seconds:
            return
        with self._lock:
            start = max(self._next, time.monotonic())
            self._next = start + self._seconds * amount
        time.sleep(max(0.0, start - time.monotonic()))


class _ServerSession(Session):
    def __init__(self, backend: ChatServer) -> None:
        super().__init__()
        self._backend = backend
        self._where = f"model '{backend.model}' at {backend.url}"
        self._template = read_template(backend.template)
        self._limits = Limits(backend.max_query_tokens, backend.max_passage_tokens)
        start = shared_start(backend.labels)
        self._ends = [label[len(start) :].strip() for label in backend.labels]
        self._requests = _Pace(backend.requests_per_minute)
        self._tokens = _Pace(backend.tokens_per_minute)
        self._random = random.Random()

    def _prompt(self, question: Question) -> tuple[str, int]:
        fitted, cut = fit(question, self._limits, _cut_words, lambda _: 0, self._where)
        return self._template.fill(fitted), cut

    def tokens(self, questions: Sequence[Question]) -> list[int]:
        return [
            len(self._prompt(question)[0]) // CHARS_PER_TOKEN + self._longest
            for question in questions
        ]

    @property
    def _longest(self) -> int:
        return 1 if self._backend.mode == "score" else self._backend.max_tokens

    def probe(self) -> None:
        """Asks two small questions.

        Raises:
            PrfError: If the server fails, or neither answer is a verdict.
        """
        answers = [self._one(question, math.inf) for question in PROBES]
        if not any(answer.valid for answer in answers):
            raise PrfError(
                f"{self._where} answers two plain questions with "
                f"{' and '.join(shorten(answer.raw) for answer in answers)} instead of "
                f"{' or '.join(self._ends)}; try parse='lenient', another template, or for a model "
                "that thinks a larger max_tokens"
            )

    def ask(self, questions: Sequence[Question]) -> Iterator[Batch]:
        backend = self._backend
        stop = math.inf if backend.deadline is None else time.monotonic() + backend.deadline
        pool = ThreadPoolExecutor(backend.concurrency)
        try:
            waiting = {pool.submit(self._tried, q, stop): i for i, q in enumerate(questions)}
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                self.counters["batches"] += 1
                yield [(waiting.pop(future), future.result()) for future in done]
        finally:
            pool.shutdown(cancel_futures=True)

    def _tried(self, question: Question, stop: float) -> Answer | PrfError:
        """Returns an answer, or why no try brought one; raises what will not pass."""
        try:
            return self._one(question, stop)
        except _NoAnswerError as error:
            return error

    def _one(self, question: Question, stop: float) -> Answer:
        backend = self._backend
        prompt, cut = self._prompt(question)
        for attempt in range(backend.tries):
            self._requests.wait()
            self._tokens.wait(len(prompt) // CHARS_PER_TOKEN + self._longest)
            try:
                return self._read(self._post(self._request(prompt)), prompt, cut)
            except _Again as error:
                reason, after = str(error), error.after
            pause = min(LONGEST_WAIT, backend.wait * 2**attempt) * self._random.uniform(0.75, 1.25)
            pause = pause if after is None else after
            if attempt + 1 < backend.tries and time.monotonic() + pause > stop:
                self.counters["failures"] += 1
                raise _NoAnswerError(
                    f"{self._where}: the deadline of {backend.deadline:g} s ended after "
                    f"{attempt + 1} tries, the last: {reason}; raise deadline, or run again: "
                    "answers so far are in the cache"
                )
            if attempt + 1 < backend.tries:
                self.counters["retries"] += 1
                time.sleep(pause)
        self.counters["failures"] += 1
        raise _NoAnswerError(
            f"{self._where}: {backend.tries} tries failed, the last: {reason}; is the server up? "
            "Run again: answers so far are in the cache"
        )

    def _request(self, prompt: str) -> dict[str, Any]:
        score = self._backend.mode == "score"
        return {
            "model": self._backend.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._longest,
            **({"logprobs": True, "top_logprobs": ALTERNATIVES} if score else {}),
            **json.loads(self._backend.extra),
        }

    def _post(self, content: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the answer's JSON."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._backend.key):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{self._backend.url.rstrip('/')}/chat/completions",
            json.dumps(content).encode(),
            headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=self._backend.timeout) as response:
                found = json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from error
        except json.JSONDecodeError as error:
            raise _Again(f"an answer that is no JSON ({error})") from error
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            reason = getattr(error, "reason", None) or error
            raise _Again(f"{type(error).__name__}: {reason}") from error
        if not isinstance(found, dict):
            raise _Again(f"an answer that is no object: {shorten(found)}")
        return found

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        try:
            said = error.read(2000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            said = ""
        reason = f"HTTP {error.code} {shorten(said, 200) if said else error.reason}"
        if error.code in AGAIN or error.code >= 500:
            return _Again(reason, _retry_after(error.headers.get("Retry-After")))
        advice = {
            401: f"put the key into the environment variable {self._backend.key}",
            403: f"put a key that may use it into the environment variable {self._backend.key}",
            404: "check url and model",
        }.get(error.code, "check model and extra")
        return PrfError(f"{self._where}: {reason}; {advice}")

    def _read(self, found: dict[str, Any], prompt: str, cut: int) -> Answer:
        """Returns the answer that a response holds."""
        try:
            choice = found["choices"][0]
            content = choice["message"].get("content") or ""
            usage = found.get("usage") or {}
            read = int(usage.get("prompt_tokens") or len(prompt) // CHARS_PER_TOKEN)
            written = int(usage.get("completion_tokens") or 1)
            text = re.sub(r"^.*</think>", "", str(content), flags=re.DOTALL).strip()
            entries = (choice.get("logprobs") or {}).get("content") or []
            tops = [(str(t["token"]), float(t["logprob"])) for t in entries[0]["top_logprobs"]] if (
                entries
            ) else []  # fmt: skip
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise _Again(f"an answer of another form: {shorten(found, 200)}") from error
        model = str(found.get("model") or self._backend.model)
        if self._backend.mode == "score":
            win, valid, margin, censored = self._scored(tops, text)
            return Answer(win, valid, margin, text, read, written, model, censored, cut)
        if not text and choice.get("finish_reason") == "length":
            raise PrfError(
                f"{self._where} writes {self._backend.max_tokens} tokens and no answer; raise "
                "max_tokens (1024 or more for a model that thinks), or switch its thinking off "
                "with extra"
            )
        verdict = read_verdict(text, self._backend.labels, self._backend.parse == "lenient")
        return Answer(verdict or 0, verdict is not None, None, text, read, written, model, cut=cut)

    def _scored(
        self, tops: Sequence[tuple[str, float]], text: str
    ) -> tuple[int, bool, float | None, bool]:
        """Returns win, validity, margin, and whether one letter was only known to be unlikely."""
        if not tops:
            raise PrfError(f"{self._where} tells no log-probabilities; use mode='generate'")
        sums = [
            [value for token, value in tops if token.strip(" \"'*([_") == end] for end in self._ends
        ]
        if not any(sums):
            verdict = read_verdict(text, self._backend.labels)
            return verdict or 0, verdict is not None, None, True
        least = min(value for _, value in tops)
        one, two = (math.log(sum(map(math.exp, s))) if s else least for s in sums)
        return (one > two) - (one < two), True, one - two, not all(sums)


class _NoAnswerError(PrfError):
    """No try brought an answer."""


def _cut_words(text: str, limit: int) -> tuple[str, int, int]:
    words = text.split()
    return (text, len(words), len(words)) if len(words) <= limit else (
        " ".join(words[:limit]), limit, len(words)
    )  # fmt: skip


def _retry_after(value: str | None) -> float | None:
    """Returns the seconds a server asks to wait: it writes a number, or a date."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None

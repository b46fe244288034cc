"""PRP over HTTP: a server of its own process that refuses, fails, dawdles and drops."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import results

import prf
from prf import PRP, ChatServer, PrfError, PrfWarning, SpecError
from prf.prp.answers import Answer, Question
from prf.prp.backend import _opened

PROBE = ["ok", "ok"]
TEXTS = ["short", "a longer passage", "the longest passage of them all"]
FRAME = results(
    *(("q", "x", f"d{i}", 9.0 - i, text) for i, text in enumerate(TEXTS)),
    names="qid query docno score text",
)

Served = Callable[..., tuple[ChatServer, Callable[[], list[dict[str, Any]]]]]


@pytest.fixture
def served() -> Iterator[Served]:
    """Starts a stub with these steps; returns a backend for it and how to read its log."""
    running = []

    def start(*steps: str, **settings: Any) -> Any:
        stub = str(Path(__file__).parent / "chat_stub.py")
        process = subprocess.Popen(
            [sys.executable, stub, *steps], stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        backend = ChatServer(f"{url}/v1", "stub", **{"wait": 0.01, **settings})

        def log() -> list[dict[str, Any]]:
            with urllib.request.urlopen(f"{url}/log") as response:
                found: list[dict[str, Any]] = json.loads(response.read())
            return found

        return backend, log

    yield start
    for process in running:
        process.kill()
        process.communicate()
    _opened.cache_clear()


def steps(log: Callable[[], list[dict[str, Any]]]) -> list[str]:
    return [entry["step"] for entry in log()]


def ask(backend: ChatServer, n: int = 1) -> list[Answer]:
    questions = [Question("x", "long " * (2 + i), "short") for i in range(n)]
    found: dict[int, Any] = {}
    for batch in backend.open().ask(questions):
        found.update(batch)
    return [found[place] for place in range(n)]


def test_answers_rank_and_are_counted(served: Served, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    backend, log = served(key="MY_KEY", price_in=1.0, price_out=2.0)
    stage = PRP(backend, "allpair", cache=str(tmp_path / "c"))
    out, figures = stage.measured(FRAME)
    assert out["docno"].tolist() == ["d2", "d1", "d0"]
    row = figures.iloc[0]
    assert (row["prompts_sent"], row["prompt_tokens"], row["completion_tokens"]) == (6, 300, 6)
    assert row["cost"] == pytest.approx((300 * 1.0 + 6 * 2.0) / 1e6)
    assert row["consistency"] == 1.0
    entries = log()
    assert len(entries) == 2 + 6  # two plain questions first
    assert {entry["path"] for entry in entries} == {"/v1/chat/completions"}
    assert {entry["key"] for entry in entries} == {"Bearer secret"}
    assert entries[0]["asked"]["temperature"] == 0
    # The second run asks nothing, and the key is nowhere.
    assert stage(FRAME).equals(out)
    assert len(log()) == 8
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"stub-2024-01-01" in content
    assert b"secret" not in content
    assert "secret" not in repr(stage) + prf.dumps(stage)


@pytest.mark.parametrize("step", ["500", "503", "408", "409", "drop", "badjson", "noform"])
def test_what_may_pass_is_tried_again(served: Served, step: str) -> None:
    backend, log = served(*PROBE, step, step)
    (answer,) = ask(backend)
    assert answer.win == 1
    assert steps(log) == [*PROBE, step, step, "ok"]
    assert backend.open().counters["retries"] == 2


def test_refusal_for_now_waits_as_long_as_the_server_says(served: Served) -> None:
    backend, log = served(*PROBE, "429")
    assert ask(backend)[0].win == 1
    times = [entry["time"] for entry in log()]
    assert 1.0 <= times[3] - times[2] < 5.0  # Retry-After is 1 second, our own wait 10 ms


def test_slow_answer_is_given_up_and_asked_again(served: Served) -> None:
    backend, log = served(*PROBE, "slow", timeout=0.5)
    assert ask(backend)[0].win == 1
    assert steps(log) == [*PROBE, "slow", "ok"]


@pytest.mark.parametrize(("code", "advice"), [("401", "environment variable OPENAI_API_KEY"),
                                              ("403", "environment variable"),
                                              ("404", "check url and model"),
                                              ("400", "check model and extra")])  # fmt: skip
def test_what_will_not_pass_is_one_request(served: Served, code: str, advice: str) -> None:
    backend, log = served(code)
    with pytest.raises(PrfError, match=rf"model 'stub' at http.*HTTP {code} .*{advice}"):
        PRP(backend)(FRAME)
    assert steps(log) == [code]


def test_refusal_in_the_middle_is_an_error_whatever_on_error_says(served: Served) -> None:
    backend, _ = served(*PROBE, "401")
    with pytest.raises(PrfError, match="HTTP 401"):
        PRP(backend, on_error="tie")(FRAME)


def test_empty_answer_cut_by_its_length_is_an_error_not_a_tie(served: Served) -> None:
    backend, log = served(*PROBE, "length", concurrency=1)
    with pytest.raises(PrfError, match=r"writes 8 tokens and no answer; raise max_tokens"):
        PRP(backend)(FRAME)
    assert steps(log)[:3] == [*PROBE, "length"]


def test_empty_answer_is_no_verdict(served: Served) -> None:
    backend, _ = served(*PROBE, "empty", "rubbish")
    assert [(a.win, a.valid) for a in ask(backend, 1)] == [(0, False)]
    (answer,) = ask(backend)
    assert (answer.valid, answer.raw) == (False, "I like both")


def test_thinking_is_not_read(served: Served) -> None:
    backend, _ = served(*PROBE, "think")
    assert (ask(backend)[0].win, ask(backend)[0].raw) == (1, "A")


def test_server_that_never_answers_a_plain_question_is_refused_at_start(served: Served) -> None:
    backend, log = served("rubbish", "rubbish")
    with pytest.raises(PrfError, match=r"answers two plain questions with 'I like both'"):
        PRP(backend)(FRAME)
    assert len(log()) == 2


def test_last_try_names_the_failure_and_answers_are_kept(served: Served, tmp_path: Path) -> None:
    backend, _ = served(*PROBE, "ok", *["500"] * 3, concurrency=1, tries=3)
    stage = PRP(backend, "allpair", cache=str(tmp_path / "c"))
    with pytest.raises(
        PrfError, match=r"qid 'q': model 'stub'.* 3 tries failed, the last: HTTP 500"
    ):
        stage(FRAME)
    _, figures = stage.measured(FRAME)
    # What was under way beside the question that failed may have been answered, too.
    hits, sent = figures["cache_hits"].item(), figures["prompts_sent"].item()
    assert hits >= 1
    assert hits + sent == 6


def test_failures_may_count_as_no_verdict(served: Served, tmp_path: Path) -> None:
    backend, log = served(*PROBE, *["500"] * 2, concurrency=1, tries=2)
    stage = PRP(backend, "allpair", on_error="tie", cache=str(tmp_path / "c"))
    _, figures = stage.measured(FRAME)
    assert figures["invalid_rate"].item() == 1 / 6
    # What failed is asked anew by the next run.
    _, figures = stage.measured(FRAME)
    assert figures["prompts_sent"].item() == 1
    assert len(log()) == 2 + 2 + 5 + 1


def test_too_many_failures_are_an_error(served: Served) -> None:
    rows = [("q", "x", f"d{i}", 9.0 - i, "w" * (i + 1)) for i in range(6)]
    frame = results(*rows, names="qid query docno score text")
    backend, _ = served(*PROBE, *["500"] * 8, tries=1)
    with pytest.raises(PrfError, match="27% of the 30 answers for qid 'q' are no verdict"):
        PRP(backend, "allpair", on_error="tie")(frame)


def test_deadline_ends_the_tries(served: Served) -> None:
    backend, _ = served(*PROBE, *["500"] * 9, wait=0.4, deadline=0.5)
    with pytest.raises(PrfError, match=r"the deadline of 0\.5 s ended after [12] tries"):
        PRP(backend)(FRAME)


def test_no_server_is_named() -> None:
    backend = ChatServer("http://127.0.0.1:9/v1", "m", tries=2, wait=0.0)
    with pytest.raises(PrfError, match=r"'m' at http://127\.0\.0\.1:9/v1: 2 tries failed"):
        PRP(backend)(FRAME)


def test_scores_are_differences_of_log_probabilities(served: Served) -> None:
    backend, log = served(mode="score")
    out, figures = PRP(backend, "allpair", consistency="soft").measured(FRAME)
    assert out["docno"].tolist() == ["d2", "d1", "d0"]
    assert figures["mean_margin"].item() == pytest.approx(1.8)
    asked = log()[-1]["asked"]
    assert (asked["logprobs"], asked["top_logprobs"], asked["max_tokens"]) == (True, 20, 1)


def test_missing_label_is_bounded_by_the_least_likely_and_marked(served: Served) -> None:
    backend, _ = served(*PROBE, "onelabel", "nolabel", mode="score")
    (one,) = ask(backend)
    assert (one.win, one.censored) == (1, True)
    assert one.margin == pytest.approx(-0.2 + 6.0)
    (none,) = ask(backend)
    assert (none.win, none.margin, none.censored) == (1, None, True)  # its text was read


def test_server_without_log_probabilities_is_told_from_the_start(served: Served) -> None:
    backend, _ = served("nologprobs", mode="score")
    with pytest.raises(PrfError, match="tells no log-probabilities; use mode='generate'"):
        PRP(backend)(FRAME)


def test_requests_keep_their_pace(served: Served) -> None:
    backend, log = served(requests_per_minute=600)
    ask(backend, 5)
    times = [entry["time"] for entry in log()]
    assert times[-1] - times[0] >= 0.1 * (len(times) - 1) - 0.06
    assert len(times) == 7


def test_tokens_keep_their_pace(served: Served) -> None:
    backend, log = served(tokens_per_minute=60000)
    ask(backend, 3)
    entries = log()
    asked = sum(len(e["asked"]["messages"][0]["content"]) // 4 + 8 for e in entries[:-1])
    assert entries[-1]["time"] - entries[0]["time"] >= asked / 1000 - 0.06


def test_cost_stops_a_query(served: Served) -> None:
    backend, _ = served(price_in=1000.0, price_out=0.0)  # 5 cents a question
    stage = PRP(backend, "allpair", max_cost=0.12)
    with pytest.warns(PrfWarning, match="stopped by their budget"):
        _, figures = stage.measured(many(6))
    assert figures["complete"].tolist() == [False]
    assert 0.12 <= figures["cost"].item() <= 0.12 + 6 * 2 * 0.05
    with pytest.warns(PrfWarning, match="stopped by their budget"):
        _, figures = replace(stage, max_cost=None, max_tokens=400).measured(many(6))
    assert figures["complete"].tolist() == [False]


def many(n: int) -> pd.DataFrame:
    rows = [("q", "x", f"d{i}", 9.0 - i, "w" * (i + 1)) for i in range(n)]
    return results(*rows, names="qid query docno score text")


def test_estimate_is_given_before_a_question_is_asked(served: Served) -> None:
    backend, log = served(price_in=1.0, price_out=1.0)
    found = PRP(backend, k=2).estimate(many(6))
    assert (found["pairs"], found["prompts"], found["queries"]) == ((9, 9), 18, 1)
    assert found["tokens"] > 18 * 50
    assert found["cost"] == pytest.approx(found["tokens"] / 1e6, rel=0.01)
    assert len(log()) == 2  # the plain questions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "ChatServer.url is 'localhost:8000'; write http"),
        ({"extra": "{"}, "ChatServer.extra is no JSON"),
        ({"extra": "[]"}, "write a JSON object"),
        ({"price_in": 1.0}, "go together"),
        ({"timeout": 0.0}, "must be above 0"),
        ({"tries": 0}, "ChatServer.tries is 0"),
        ({"labels": ("A", "A")}, "give two different labels"),
    ],
)
def test_bad_settings_are_refused_at_construction(settings: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace(".", r"\.").replace("[", r"\[")):
        ChatServer(**{"url": "http://x/v1", "model": "m", **settings})


def test_backend_is_written_and_read_as_yaml() -> None:
    text = (
        "PRP: {backend: {ChatServer: {url: 'http://x/v1', model: m, "
        'extra: \'{"chat_template_kwargs": {"enable_thinking": false}}\'}}}'
    )
    stage = prf.loads(text)
    assert prf.loads(prf.dumps(stage)) == stage
    assert "enable_thinking" in stage.backend.extra

"""Pairwise ranking prompting: algorithms, rules, budgets, cache and statistics, by plain judges."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import DATA, queries, results
from hypothesis import given
from hypothesis import strategies as st
from reference import DL19, DL20, Topics, needs_data

import prf
from prf import PRP, FileFormatError, FrameError, Judge, PrfError, PrfWarning, SpecError
from prf.frames import column, objects
from prf.pipeline import Log, logging_to
from prf.prp.algorithms import Allpair, Sliding, Sorting, algorithm, pairs_needed
from prf.prp.answers import Answer, Question, outcome, read_verdict
from prf.prp.prompt import Limits, Template, fit, read_template, shares

VARIANTS = ("allpair", "sliding", "sorting")
Oracle = Callable[[int, int], int]


def run(chosen: Any, oracle: Oracle) -> tuple[list[int], list[tuple[int, int]], int]:
    """Returns the ranking, the pairs compared in order, and the number of rounds."""
    rounds, asked, turns = chosen.rounds(), [], 0
    try:
        pairs = next(rounds)
        while True:
            assert pairs
            turns += 1
            asked += pairs
            pairs = rounds.send([oracle(i, j) for i, j in pairs])
    except StopIteration:
        return chosen.ranking(), asked, turns


def distinct(pairs: list[tuple[int, int]]) -> int:
    return len({frozenset(pair) for pair in pairs})


def table(wins: dict[tuple[int, int], int]) -> Oracle:
    """Returns an oracle of these outcomes; what is not there ties."""
    return lambda i, j: wins.get((i, j), -wins.get((j, i), 0))


def by_grade(grades: Any) -> Oracle:
    return lambda i, j: int(np.sign(grades[i] - grades[j]))


# The worked example: documents 1 to 4 are positions 0 to 3


EXAMPLE = table({(1, 0): 1, (3, 0): 1, (1, 2): 1, (2, 3): 1})


@pytest.mark.parametrize(
    ("chosen", "ranking", "pairs", "kinds"),
    [
        (Allpair(4), [2, 3, 4, 1], 6, 6),
        (Sliding(4, 1), [2, 1, 3, 4], 3, 3),
        (Sliding(4, 2), [2, 1, 3, 4], 5, 4),
        (Sliding(4, 3), [2, 1, 3, 4], 6, 4),
        (Sliding(4, 4), [2, 1, 3, 4], 6, 4),
        (Sorting(4, 1, "noswap"), [2], 4, None),
        (Sorting(4, 2, "noswap"), [2, 3], 6, 5),
        (Sorting(4, 3, "noswap"), [2, 3, 4], 7, 5),
        (Sorting(4, 4, "noswap"), [2, 3, 4, 1], 7, 5),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "rounds") else "",
)
def test_worked_example(chosen: Any, ranking: list[int], pairs: int, kinds: int | None) -> None:
    """prp.md 14.1."""
    found, asked, _ = run(chosen, EXAMPLE)
    assert [place + 1 for place in found][: len(ranking)] == ranking
    assert len(asked) == pairs
    assert kinds is None or distinct(asked) == kinds


def test_worked_example_gives_allpair_its_points() -> None:
    chosen = Allpair(4)
    run(chosen, EXAMPLE)
    assert chosen.points.tolist() == [0.5, 2.5, 1.5, 1.5]


# Properties of the algorithms


def drawn(seed: int, n: int, ties: float = 0.3) -> Oracle:
    """Returns an oracle with ties and cycles, the same for a pair in either order."""
    generator = random.Random(seed)
    wins = {
        pair: 0 if generator.random() < ties else generator.choice((-1, 1))
        for pair in itertools.combinations(range(n), 2)
    }
    return table(wins)


@given(st.integers(0, 25), st.integers(1, 30), st.integers(0, 10**6), st.sampled_from(VARIANTS))
def test_output_is_a_permutation_for_any_oracle(n: int, k: int, seed: int, variant: Any) -> None:
    """Property 1; a fresh verdict each time it is asked, so not even repeatable."""
    generator = random.Random(seed)
    for oracle in (drawn(seed, n), lambda i, j: generator.choice((-1, 0, 1))):
        for ties in ("initial", "noswap"):
            found, asked, _ = run(algorithm(variant, n, k, ties), oracle)
            assert sorted(found) == list(range(n))
            low, high = pairs_needed(variant, n, k)
            assert low <= len(asked) <= high


@given(st.permutations(range(17)), st.integers(1, 20), st.sampled_from(VARIANTS))
def test_perfect_oracle_gives_the_exact_top(order: list[int], k: int, variant: Any) -> None:
    """Property 2."""
    place = {document: rank for rank, document in enumerate(order)}
    found, _, _ = run(algorithm(variant, 17, k), lambda i, j: 1 if place[i] < place[j] else -1)
    top = 17 if variant == "allpair" else k
    assert found[:top] == order[:top]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("n", "k"), [(100, 10), (7, 7), (16, 3), (1, 1), (2, 5)])
def test_all_ties_keep_the_initial_order(variant: Any, n: int, k: int) -> None:
    """Property 3."""
    assert run(algorithm(variant, n, k), lambda i, j: 0)[0] == list(range(n))


def test_ties_that_swap_nothing_scramble_a_heap() -> None:
    """prp.md 4.3: why ``noswap`` is not the default."""
    found, _, _ = run(Sorting(100, 10, "noswap"), lambda i, j: 0)
    assert [place + 1 for place in found[:10]] == [1, *range(100, 91, -1)]


@given(st.integers(2, 20), st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_allpair_points_add_up_and_follow_the_documents(n: int, seed: int, shuffle: Any) -> None:
    """Property 5."""
    oracle, order = drawn(seed, n), list(range(n))
    shuffle.shuffle(order)
    one, other = Allpair(n), Allpair(n)
    run(one, oracle)
    run(other, lambda i, j: oracle(order[i], order[j]))
    assert one.points.sum() == n * (n - 1) / 2
    assert other.points.tolist() == one.points[order].tolist()


def sequential(n: int, k: int, oracle: Oracle) -> tuple[list[int], list[frozenset[int]]]:
    """One pass after another, as the paper has it."""
    order, asked = list(range(n)), []
    for done in range(min(k, n - 1)):
        for low in range(n - 1, done, -1):
            asked.append(frozenset((order[low], order[low - 1])))
            if oracle(order[low], order[low - 1]) == 1:
                order[low - 1], order[low] = order[low], order[low - 1]
    return order, asked


@given(st.integers(2, 24), st.integers(1, 26), st.integers(0, 10**6))
def test_wavefront_is_sequential_sliding(n: int, k: int, seed: int) -> None:
    """Property 6."""
    oracle = drawn(seed, n)
    order, asked = sequential(n, k, oracle)
    found, pairs, rounds = run(Sliding(n, k), oracle)
    assert found == order
    assert Counter(map(frozenset, pairs)) == Counter(asked)
    assert rounds == n + min(k, n - 1) - 2
    waves = Sliding(n, k).rounds()
    first = next(waves)
    assert len({place for pair in first for place in pair}) == 2 * len(first)


@pytest.mark.parametrize("seed", range(30))
def test_heap_pairs_lie_between_the_bounds(seed: int) -> None:
    """Property 7."""
    assert pairs_needed("sorting", 100, 10) == (117, 308)
    _, asked, rounds = run(Sorting(100, 10), drawn(seed, 100, ties=seed / 30))
    assert 117 <= len(asked) <= 308
    assert rounds < len(asked)  # subtrees of one level are built side by side


def test_heap_stops_early_in_an_ordered_list() -> None:
    """117 is reached where no document ever has to sink."""
    _, asked, _ = run(Sorting(100, 10), lambda i, j: -1 if i > j else 1)
    assert 117 <= len(asked) <= 215


# Outcomes and answers


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (Answer(1), Answer(-1), 1),
        (Answer(-1), Answer(1), -1),
        (Answer(1), Answer(1), 0),
        (Answer(-1), Answer(-1), 0),
        (Answer(0, valid=False), Answer(-1), 0),
        (Answer(1), Answer(0, valid=False), 0),
        (Answer(1), None, 1),
        (Answer(0, valid=False), None, 0),
    ],
)
def test_hard_rule(one: Answer, two: Answer | None, expected: int) -> None:
    assert outcome(one, two) == expected


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-3, 3))
def test_soft_rule_is_antisymmetric_and_a_constant_bias_cancels(
    one: float, two: float, bias: float
) -> None:
    def answers(a: float, b: float) -> int:
        return outcome(Answer(0, margin=a), Answer(0, margin=b), "soft", 0.5)

    assert answers(one, two) == -answers(two, one)
    if abs(abs(one - two) / 2 - 0.5) > 1e-9:
        assert answers(one + bias, two + bias) == answers(one, two)


LABELS = ("Passage A", "Passage B")


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("Passage A", 1, 1),
        (" passage b.", -1, -1),
        ("**(B)**", -1, -1),
        ("A", 1, 1),
        ('"Passage A"', 1, 1),
        ("Passage: B", -1, -1),
        ("Passage A is a better answer", None, 1),
        ("Passage A beats Passage B", None, None),
        ("a better answer", None, None),
        ("This is a tie", None, None),
        ("PASSAGE", None, None),
        ("", None, None),
        ("AB", None, None),
    ],
)
def test_which_answers_are_verdicts(text: str, strict: int | None, lenient: int | None) -> None:
    """prp.md 3.1."""
    assert read_verdict(text, LABELS) == strict
    assert read_verdict(text, LABELS, lenient=True) == lenient


def test_other_labels_are_read() -> None:
    assert read_verdict("2", ("1", "2")) == -1
    assert read_verdict("12", ("1", "2")) is None


# The prompt


@given(st.text(), st.text(), st.text())
def test_template_is_filled_in_one_pass(query: str, first: str, second: str) -> None:
    """Property 10: braces and labels inside a passage survive."""
    filled = Template("<{query}|{a}|{b}>").fill(Question(query, first, second))
    assert filled == f"<{query}|{first}|{second}>"


@pytest.mark.parametrize("text", ["{query} {a}", "{query} {a} {b} {b}", "no slot"])
def test_template_with_a_slot_missing_or_twice_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=r"\{query\}, \{a\} and \{b\} once each"):
        read_template(str(tmp_path / "t.txt"))


def test_unknown_template_suggests_a_preset() -> None:
    with pytest.raises(SpecError, match="did you mean 'default'"):
        read_template("defalt")


def words(text: str, limit: int) -> tuple[str, int, int]:
    parts = text.split()
    return " ".join(parts[:limit]), min(limit, len(parts)), len(parts)


@given(st.integers(1, 60), st.integers(0, 90), st.integers(0, 90), st.integers(10, 120))
def test_passages_share_the_room_and_nothing_else_is_cut(
    query: int, one: int, other: int, context: int
) -> None:
    template = Template("q {query} a {a} b {b} end")

    def length(question: Question) -> int:
        return len(template.fill(question).split())

    question = Question("q " * query, "a " * one, "b " * other)
    limits = Limits(8, 40, context)
    overhead = length(Question(words(question.query, 8)[0], "", ""))
    if min(one, 40) + min(other, 40) + overhead > context and context - overhead < 2:
        with pytest.raises(SpecError, match="shorten the template"):
            fit(question, limits, words, length, "x")
        return
    fitted, cut = fit(question, limits, words, length, "x")
    assert length(fitted) <= context
    kept = len(fitted.first.split()), len(fitted.second.split())
    assert kept == shares(context - overhead, min(one, 40), min(other, 40))
    assert cut == (kept[0] < one) + (kept[1] < other)


# The stage


def frame_of(n: int, queries: int = 1) -> pd.DataFrame:
    """Returns results whose text is their docno, best first."""
    rows = [
        (f"q{q}", f"query {q}", f"d{i:03}", float(n - i), f"d{i:03}")
        for q in range(queries)
        for i in range(n)
    ]
    return results(*rows, names="qid query docno score text")


def counting(judge: Callable[[str, str, str], Any]) -> tuple[Judge, list[tuple[str, str, str]]]:
    """Returns a backend and the list of what it was asked."""
    asked: list[tuple[str, str, str]] = []

    def function(query: str, first: str, second: str) -> Any:
        asked.append((query, first, second))
        return judge(query, first, second)

    return Judge(function), asked


def number(text: str) -> int:
    return int(text[1:])


def later_is_better(query: str, first: str, second: str) -> float:
    return number(first) - number(second)


def earlier_is_better(query: str, first: str, second: str) -> float:
    return number(second) - number(first)


@pytest.mark.parametrize(("variant", "prompts"), [("allpair", 9900), ("sliding", 1890)])
def test_prompts_are_those_of_the_formula(variant: Any, prompts: int) -> None:
    """Property 7: of 100 documents, K = 10, on an oracle that never swaps so that none repeats."""
    chosen = algorithm(variant, 100, 10)
    _, asked, _ = run(chosen, lambda i, j: 0)
    assert 2 * len(asked) == prompts
    stage = PRP(Judge(later_is_better), variant)
    out, figures = stage.measured(frame_of(100))
    assert 2 * figures["pairs_requested"].item() == prompts
    assert figures["prompts"].item() == 2 * figures["pairs_evaluated"].item() <= prompts
    assert stage.estimate(frame_of(100))["prompts"] == prompts
    assert out["docno"].tolist()[:10] == [f"d{i:03}" for i in range(99, 89, -1)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("margin", "bias"), [(1.0, 1.0), (-1.0, -1.0)])
def test_a_judge_that_only_likes_a_position_changes_nothing(
    variant: Any, margin: float, bias: float
) -> None:
    """Property 4."""
    stage = PRP(Judge(lambda *_: margin), variant, k=5)
    with logging_to(Log()) as log:
        out, figures = stage.measured(frame_of(20))
    assert out["docno"].tolist() == frame_of(20)["docno"].tolist()
    assert figures["consistency"].item() == 0
    assert figures["bias_first"].item() == bias
    assert figures["tie_rate"].item() == 1
    assert any("change with the order" in what for what in log.notices) == (
        figures["pairs_evaluated"].item() >= 45
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_tail_keeps_its_order_below_the_reranked(variant: Any) -> None:
    given = frame_of(9)
    out = PRP(Judge(later_is_better), variant, k=4, rerank_docs=4)(given)
    assert out["docno"].tolist() == [
        "d003",
        "d002",
        "d001",
        "d000",
        *(f"d00{i}" for i in range(4, 9)),
    ]
    assert out["score"].tolist() == [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert out["rank"].tolist() == list(range(9))
    assert given.equals(frame_of(9))


def test_one_document_asks_nothing_and_no_document_is_no_error() -> None:
    backend, asked = counting(later_is_better)
    assert PRP(backend)(frame_of(1))["docno"].tolist() == ["d000"]
    assert len(PRP(backend)(frame_of(3).head(0))) == 0
    assert asked == []


def test_initial_order_is_score_then_docno_whatever_the_rows_are() -> None:
    given = frame_of(8).assign(score=1.0).sample(frac=1, random_state=3)
    out = PRP(Judge(lambda *_: 0.0))(given)
    assert out["docno"].tolist() == [f"d{i:03}" for i in range(8)]


def test_empty_passages_lose_and_equal_ones_tie_without_a_question() -> None:
    """Property 10."""
    given = results(
        ("q", "x", "a", 6.0, "  \n"),
        ("q", "x", "b", 5.0, "same  text"),
        ("q", "x", "c", 4.0, None),
        ("q", "x", "d", 3.0, "same text"),
        ("q", "x", "e", 2.0, float("nan")),
        names="qid query docno score text",
    )
    backend, asked = counting(lambda *_: 1 / 0)
    out, figures = PRP(backend, "allpair").measured(given)
    assert out["docno"].tolist() == ["b", "d", "a", "c", "e"]
    assert asked == []
    assert figures["empty_texts"].item() == 3
    assert figures["pairs_requested"].item() == 10


NASTY = [
    'says "Passage B" is better', "{query} {a} {b} {0}", "line\nbreak\t\ttab", "🐟 émoji ‍🔥",
    "words " * 10000, 'quote " \' `', "<|im_end|> <pad> </s>", "\ud800 lone surrogate",
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_nasty_passages_are_only_text(tmp_path: Path, variant: Any) -> None:
    """Property 10."""
    rows = [("q", "x", f"d{i}", 9.0 - i, text) for i, text in enumerate(NASTY)]
    given = results(*rows, names="qid query docno score text")
    stage = PRP(Judge("judges:more_letters"), variant, cache=str(tmp_path / "c"))
    out, first = stage.measured(given)
    again, second = stage.measured(given)
    assert sorted(out["docno"]) == sorted(given["docno"])
    assert out.equals(again)
    assert first["prompts_sent"].item() > 0 == second["prompts_sent"].item()


def test_original_query_is_read_unless_told_otherwise() -> None:
    given = frame_of(2).assign(query="new", query_0="newer", query_1="user's own")
    for field, text in (("original", "user's own"), ("current", "new")):
        backend, asked = counting(later_is_better)
        PRP(backend, query_field=field)(given)
        assert {query for query, _, _ in asked} == {text}


def test_empty_query_is_refused() -> None:
    with pytest.raises(FrameError, match=r"the query of qid 'q0' is ' '"):
        PRP(Judge(later_is_better))(frame_of(2).assign(query=" "))


def test_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(FrameError, match=r"docno 'd000' is 7, not text"):
        PRP(Judge(later_is_better))(frame_of(2).assign(text=column(objects([7, "x"]))))


@pytest.mark.parametrize(
    ("order", "shown"),
    [
        ("both", {("d000", "d001"), ("d001", "d000")}),
        ("forward", {("d000", "d001")}),
        ("lower_first", {("d001", "d000")}),
    ],
)
def test_order_in_which_a_pair_is_shown(order: Any, shown: set[tuple[str, str]]) -> None:
    for variant in VARIANTS:
        backend, asked = counting(later_is_better)
        out, figures = PRP(backend, variant, order=order).measured(frame_of(2))
        assert {(first, second) for _, first, second in asked} == shown
        assert out["docno"].tolist() == ["d001", "d000"]
        assert math.isnan(figures["consistency"].item()) == (order != "both")


def test_random_order_depends_on_seed_and_texts_alone() -> None:
    def shown(seed: int, n: int = 20) -> list[bool]:
        backend, asked = counting(earlier_is_better)
        out = PRP(backend, "allpair", order="random", seed=seed)(frame_of(n))
        assert out["docno"].tolist() == frame_of(n)["docno"].tolist()
        return [first < second for _, first, second in asked]

    assert shown(1) == shown(1) != shown(2)
    assert 0.3 < np.mean(shown(1)) < 0.7
    assert set(shown(1, 5)) <= {True, False}


def test_soft_consistency_decides_what_hard_leaves_tied() -> None:
    judge = Judge(lambda _, first, second: 10.0 + number(first) - number(second))
    hard = PRP(judge, "allpair")(frame_of(6))
    soft = PRP(judge, "allpair", consistency="soft")(frame_of(6))
    wide = PRP(judge, "allpair", consistency="soft", tau=10.0)(frame_of(6))
    assert hard["docno"].tolist() == wide["docno"].tolist() == sorted(hard["docno"])
    assert soft["docno"].tolist() == sorted(hard["docno"], reverse=True)


def test_none_is_no_verdict_and_many_of_them_an_error() -> None:
    judge = Judge(lambda _, *pair: None if "d000" in pair or "d007" in pair else 1.0)
    stage = PRP(judge, "allpair", order="forward")
    message = r"46% of the 28 answers for qid 'q0' are no verdict, such as ''; .* raise max_invalid"
    with pytest.raises(PrfError, match=message):
        stage(frame_of(8))
    with pytest.warns(PrfWarning, match="more than 1% answers that are no verdict: 1"):
        _, figures = replace(stage, max_invalid=0.5).measured(frame_of(8))
    assert figures["invalid_rate"].item() == 13 / 28


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "PRP.k is 0; it must be at least 1"),
        ({"variant": "slidng"}, "PRP.variant is 'slidng'; one of 'sliding'"),
        ({"tau": -1.0}, "PRP.tau is -1.0"),
        ({"max_invalid": 1.5}, "PRP.max_invalid is 1.5"),
        ({"max_cost": 1.0}, "the backend needs prices"),
        ({"offline": True}, "PRP.offline is true without a cache"),
        ({"max_calls": 0}, "PRP.max_calls is 0; it must be at least 1"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace(".", r"\.")):
        PRP(Judge("judges:more_letters"), **arguments)


def test_backend_is_written_and_read_as_yaml() -> None:
    stage = PRP(Judge("judges:more_letters"), "sorting", k=5)
    text = (
        "PRP:\n  backend:\n    Judge:\n      function: judges:more_letters\n"
        "  variant: sorting\n  k: 5\n"
    )
    assert prf.dumps(stage) == text
    assert prf.loads(text) == stage
    local = prf.loads("PRP: {backend: {LocalModel: {model: m, mode: generate}}}")
    assert local.backend.mode == "generate"
    assert prf.loads(prf.dumps(local, defaults=True)) == local
    from prf.spec import override

    assert override(local, ["0.backend.batch_tokens=7"]).backend.batch_tokens == 7


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("{LocalModle: {model: m}}", "did you mean 'LocalModel'"),
        ("{LocalModel: {modle: m}}", "LocalModel has no argument 'modle'; did you mean 'mode"),
        ("LocalModel", "LocalModel needs 'model'"),
        ("{Rocchio: {}}", "is none of ChatServer, Judge, LocalModel"),
        ("3", "3 is none of"),
    ],
)
def test_bad_backend_in_yaml_is_named(backend: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        prf.loads(f"PRP: {{backend: {backend}}}")


def test_function_without_a_name_has_no_yaml_and_no_cache(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no YAML form"):
        prf.dumps(PRP(Judge(later_is_better)))
    with pytest.raises(SpecError, match="or no cache"):
        PRP(Judge(later_is_better), cache=str(tmp_path / "c"))(frame_of(2))


@pytest.mark.parametrize("name", ["judges:nothing", "no_such_module:f", "judges:__doc__"])
def test_judge_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(SpecError, match=f"Judge.function '{name}' is"):
        PRP(Judge(name))(frame_of(2))


def test_judge_that_fails_is_named() -> None:
    with pytest.raises(PrfError, match=r"fails for query 'query 0': ZeroDivisionError"):
        PRP(Judge(lambda *_: 1 / 0))(frame_of(2))
    with pytest.raises(PrfError, match=r"returns 'A' for query"):
        PRP(Judge(lambda *_: "A"))(frame_of(2))


def test_explain_says_what_a_query_costs() -> None:
    columns = ["qid", "query", "docno", "score", "text"]
    (step,) = prf.explain(PRP(Judge("judges:more_letters")), columns)
    assert step.note == "compares 945 pairs for each query of 100 documents: at most 1,890 prompts"
    (_, step) = prf.explain(prf.Cutoff(20) >> PRP(Judge("judges:more_letters"), "sorting"), columns)
    assert "37 to 112 pairs for each query of 20 documents: at most 224 prompts" in step.note


# Budgets


@pytest.mark.parametrize("variant", VARIANTS)
def test_budget_stop_anywhere_leaves_a_valid_ranking(variant: Any) -> None:
    """Property 12."""
    given = frame_of(9)
    grades = np.array([0, 2, 1, 3, 0, 1, 3, 2, 0])
    initial = dcg(grades)

    def judge(_: str, first: str, second: str) -> float:
        return float(grades[number(first)] - grades[number(second)])

    full = PRP(Judge(judge), variant, k=3).measured(given)[1]["prompts"].item()
    for calls in range(1, full + 1):
        backend, asked = counting(judge)
        with logging_to(Log()) as log:
            out, figures = PRP(backend, variant, k=3, max_calls=calls).measured(given)
        assert sorted(out["docno"]) == sorted(given["docno"])
        assert len(asked) == figures["prompts"].item() <= calls
        assert figures["complete"].item() == (calls == full) == (not log.notices)
        if variant == "sliding":
            assert dcg(grades[[number(docno) for docno in out["docno"]]]) >= initial
    assert calls - len(asked) == 0


def dcg(grades: Any) -> float:
    return float(sum((2.0**g - 1) / np.log2(2 + i) for i, g in enumerate(grades)))


def test_stopped_sorting_keeps_the_initial_order_of_the_rest() -> None:
    """prp.md 4.6: a stop while the heap is built must not show the heap."""
    with logging_to(Log()):
        out = PRP(Judge(later_is_better), "sorting", max_calls=20)(frame_of(30))
    assert out["docno"].tolist() == frame_of(30)["docno"].tolist()


def test_a_query_is_stopped_by_its_own_budget_alone() -> None:
    stage = PRP(Judge(later_is_better), "allpair", max_calls=30)
    with logging_to(Log()) as log:
        together = stage(frame_of(12, queries=3))
        alone = stage(frame_of(12))
    assert together[together["qid"] == "q0"].equals(alone)
    (what,) = log.notices
    assert what.startswith("were stopped by their budget")


def test_budget_is_told_once_without_a_log() -> None:
    with pytest.warns(
        PrfWarning, match=r"queries that were stopped by their budget .*: 2 \(q0, q1\)"
    ):
        PRP(Judge(later_is_better), max_calls=4)(frame_of(5, queries=2))


# Statistics


def test_counts_and_rates_of_a_small_list() -> None:
    """Three documents: a cycle of the first kind, by hand."""
    wins = {("d000", "d001"), ("d001", "d002"), ("d002", "d000")}
    stage = PRP(Judge(lambda _, a, b: 2.0 if (a, b) in wins else -2.0), "allpair")
    row = stage.measured(frame_of(3))[1].iloc[0]
    assert (row["pairs_requested"], row["pairs_evaluated"], row["prompts"]) == (3, 3, 6)
    assert (row["cycles"], row["triples"], row["zeta"]) == (1, 1, 0.0)
    assert (row["consistency"], row["bias_first"], row["tie_rate"]) == (1.0, 0.0, 0.0)
    assert row["mean_margin"] == 2.0
    assert row["tau"] == 1.0  # all points are equal, so the order stays


def test_statistics_stand_in_the_run_record(tmp_path: Path) -> None:
    given = frame_of(4, queries=2)
    prf.write_run(given.assign(rank=0), tmp_path / "in.run")
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(f'{{"docno": "d{i:03}", "text": "text {i}"}}\n' for i in range(4)))
    stage = (
        prf.RunFile(str(tmp_path / "in.run"))
        >> prf.Text(str(docs))
        >> PRP(Judge("judges:more_letters"))
    )
    topics = queries(("q0", "query 0"), ("q1", "query 1"))
    record = prf.search(stage, topics, tmp_path / "out.run").record
    rows, backend = record["figures"].values()
    assert backend[0]["batches"] >= 1
    assert backend[0]["seconds"] > 0
    assert [row["qid"] for row in rows] == ["q0", "q1"]
    assert all(row["prompts"] == 2 * row["pairs_evaluated"] for row in rows)


@pytest.mark.models
def test_feedback_reads_what_the_judge_put_first(material: Any) -> None:
    docnos = [docno for docno, text in material.docs if text.strip()][:6]
    text = dict(material.docs)
    rows = [("q", "x", d, 9.0 - i, text[d]) for i, d in enumerate(docnos)]
    given = results(*rows, names="qid query docno score text")
    given["query_vec"] = column(objects([material.vectors[0]] * len(docnos)))
    best = min(docnos, key=lambda docno: (len(" ".join(text[docno].split())), docno))
    stage = (
        PRP(Judge(lambda _, one, two: len(two) - len(one)))
        >> prf.Vectors(material.dense)
        >> prf.AveragePrf(1)
    )
    found = stage(given)["query_vec"].iloc[0]
    row = [docno for docno, _ in material.docs].index(best)
    expected = (material.vectors[0] + material.vectors[row]) / 2
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_run_with_a_cache_is_reused_by_its_record(tmp_path: Path) -> None:
    """The cache grows while a run is made; that does not make another pipeline of it."""
    prf.write_run(frame_of(4).assign(rank=0), tmp_path / "in.run")
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(f'{{"docno": "d{i:03}", "text": "text {i}"}}\n' for i in range(4)))
    stage = (
        prf.RunFile(str(tmp_path / "in.run"))
        >> prf.Text(str(docs))
        >> PRP(Judge("judges:more_letters"), cache=str(tmp_path / "c"))
    )
    topics = queries(("q0", "query 0"))
    assert not prf.search(stage, topics, tmp_path / "out.run").reused
    assert prf.search(stage, topics, tmp_path / "out.run", reuse=True).reused


# The cache


def test_second_run_asks_nothing_and_gives_the_same(tmp_path: Path) -> None:
    """Property 8."""
    stage = PRP(Judge("judges:more_letters"), cache=str(tmp_path / "sub" / "c.sqlite"))
    given = frame_of(12, queries=3)
    one, first = stage.measured(given)
    two, second = stage.measured(given)
    assert one.equals(two)
    assert first["prompts_sent"].sum() > 0
    assert second["prompts_sent"].sum() == 0
    assert (second["cache_hits"] == second["prompts"]).all()
    # Every other choice uses the same answers.
    out, third = replace(stage, consistency="soft", k=3, offline=True).measured(given)
    assert third["prompts_sent"].sum() == 0
    assert len(out) == len(given)


def test_offline_names_what_is_missing(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    stage = PRP(Judge("judges:more_letters"), cache=path)
    offline = PRP(Judge("judges:more_letters"), cache=path, offline=True)
    with pytest.raises(FileFormatError, match="is not there, and offline=True"):
        offline(frame_of(3))
    stage(frame_of(3))
    assert len(offline(frame_of(3))) == 3
    with pytest.raises(
        PrfError, match=r"lacks 2 answers, the first of qid 'q0', docnos 'd002' and 'd003'"
    ):
        offline(frame_of(4))


def test_budget_counts_cached_answers_too(tmp_path: Path) -> None:
    """A second run gives the same ranking, however much more it could afford."""
    stage = PRP(Judge("judges:more_letters"), max_calls=10, cache=str(tmp_path / "c"))
    with logging_to(Log()):
        first, one = stage.measured(frame_of(9))
        second, two = stage.measured(frame_of(9))
    assert first.equals(second)
    assert one["prompts"].tolist() == two["prompts"].tolist() == [10]
    assert two["prompts_sent"].item() == 0


@pytest.mark.parametrize("content", [b"not sqlite at all, but long enough " * 30, b"x"])
def test_file_that_is_no_cache_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"name another|no SQLite file"):
        PRP(Judge("judges:more_letters"), cache=str(path))(frame_of(2))
    assert path.read_bytes() == content


def test_another_sqlite_file_is_refused(tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "c") as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    with pytest.raises(FileFormatError, match="SQLite file of something else"):
        PRP(Judge("judges:more_letters"), cache=str(tmp_path / "c"))(frame_of(2))


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    from prf.prp.cache import AnswerCache

    with AnswerCache(str(tmp_path / "c")) as cache:
        cache.check_model("m", "one")
        cache.check_model("m", "one")
        with pytest.raises(prf.IndexStateError, match="another model of the same name"):
            cache.check_model("m", "two")


def process(tmp_path: Path, code: str) -> subprocess.Popen[str]:
    """Starts a process that has ``stage(cache, delay)`` and ``given`` of this file."""
    script = tmp_path / f"{abs(hash(code))}.py"
    script.write_text(
        "import sys\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(DATA)!r}]\n"
        "from test_prp import *\n"
        f"{code}\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )


SLOW = """
import judges
stage = PRP(Judge("judges:slow_letters"), k=4, cache={cache!r})
"""


@pytest.mark.slow
def test_killed_run_resumed_asks_only_for_the_rest(tmp_path: Path) -> None:
    """Property 8: together as many prompts as a run that nobody killed."""
    given, cache = frame_of(12, queries=2), str(tmp_path / "c")
    plain = PRP(Judge("judges:slow_letters"), k=4, cache=str(tmp_path / "whole"))
    expected, whole = plain.measured(given)
    run = process(tmp_path, SLOW.format(cache=cache) + "print(len(stage(frame_of(12, queries=2))))")
    while stored(cache) < 12:
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    before = stored(cache)
    out, rest = PRP(Judge("judges:slow_letters"), k=4, cache=cache).measured(given)
    assert out.equals(expected)
    assert 0 < before < whole["prompts_sent"].sum()
    assert before + rest["prompts_sent"].sum() == whole["prompts_sent"].sum()


def stored(path: str) -> int:
    import sqlite3

    if not Path(path).exists():
        return 0
    db = sqlite3.connect(path, timeout=60)
    try:
        return int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
    except sqlite3.OperationalError:  # not made yet
        return 0
    finally:
        db.close()


@pytest.mark.slow
def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    cache = str(tmp_path / "c")
    code = SLOW.format(cache=cache) + "print(*stage(frame_of(12, queries=2))['docno'])"
    runs = [process(tmp_path, code) for _ in range(2)]
    said = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    out, figures = PRP(Judge("judges:slow_letters"), k=4, cache=cache).measured(
        frame_of(12, queries=2)
    )
    assert figures["prompts_sent"].sum() == 0
    assert said == [" ".join(out["docno"]) + "\n"] * 2


# Real lists, a perfect judge


def judged(topics: Topics) -> tuple[pd.DataFrame, Judge, dict[tuple[str, str], int]]:
    """Returns BM25's first 100, a judge by grades, and the grades; the text is the docno."""
    run = prf.read_run(topics.topics.parent / "runs" / f"{topics.name}.bm25.trec.gz").reset_index(
        drop=True
    )
    grades = {
        (qid, docno): int(label)
        for qid, docno, label in prf.read_qrels(topics.qrels)[["qid", "docno", "label"]].itertuples(
            index=False
        )
    }
    given = run.assign(query=run["qid"], text=run["docno"])

    def judge(qid: str, first: str, second: str) -> float:
        return float(grades.get((qid, first), 0) - grades.get((qid, second), 0))

    return given, Judge(judge), grades


def ndcg(topics: Topics, run: pd.DataFrame) -> float:
    qrels = prf.read_qrels(topics.qrels)
    return float(prf.evaluate(run, qrels, ["nDCG@10"]).mean["nDCG@10"])


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("topics", [DL19, pytest.param(DL20, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_perfect_judge_reaches_the_best_order_of_real_lists(topics: Topics, variant: Any) -> None:
    """Ties among equal grades cannot cost anything, so each variant must reach the ideal."""
    given, judge, grades = judged(topics)
    label = [grades.get(key, 0) for key in zip(given["qid"], given["docno"], strict=True)]
    best = ndcg(topics, given.assign(score=np.array(label, dtype=float)))
    out, figures = PRP(judge, variant).measured(given)
    assert ndcg(topics, out) == pytest.approx(best, abs=1e-9)
    assert ndcg(topics, given) < best - 0.2
    n = given.groupby("qid").size().tolist()
    low, high = zip(*(pairs_needed(variant, count, 10) for count in n), strict=True)
    assert (figures["pairs_requested"].to_numpy() >= low).all()
    assert (figures["pairs_requested"].to_numpy() <= high).all()

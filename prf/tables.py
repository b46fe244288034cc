"""Tables of evaluations and comparisons: text, Markdown, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import ir_measures

from prf.comparison import FLIPS, PAIR, Comparison, choice, distinct
from prf.errors import EvaluationError, SpecError
from prf.evaluation import Evaluation, is_binary

Format = Literal["text", "markdown", "csv", "json"]


def render(
    value: Comparison | Evaluation | Sequence[Evaluation],
    format: Format = "text",
    per_query: bool = False,
    digits: int = 4,
) -> str:
    """Returns a table: systems as rows, the means of the measures as columns.

    A comparison adds a mark for significance, queries won, tied and lost, and says in a note what
    was tested. Notes tell how many queries were judged and which had no results.

    Args:
        value: What `evaluate` or `compare` returned, or several evaluations.
        format: ``text``, ``markdown``, ``csv`` or ``json``. The last two carry full precision and p
            values and leave the notes to columns and fields.
        per_query: Adds the values of every query; in CSV they replace the means.
        digits: Decimals of text and markdown.

    Returns:
        Lines without a final line end. A measure that only some systems have shows as ``-``
        (empty in CSV).

    Raises:
        SpecError: For an unknown format or digits below 0.
        EvaluationError: If two evaluations share a name, or there are none.
    """
    comparison = value if isinstance(value, Comparison) else None
    if isinstance(value, Comparison):
        value = value.evaluations
    systems = list(distinct([value] if isinstance(value, Evaluation) else value).values())
    if not systems:
        raise EvaluationError("render: no evaluations given")
    choice(format, ("text", "markdown", "csv", "json"), "format")
    if digits < 0:
        raise SpecError(f"digits is {digits}; it must be 0 or more")
    if format == "json":
        return _json(systems, comparison, per_query)
    if format == "csv":
        return _csv(_query_rows(systems, repr) if per_query else _csv_rows(systems, comparison))

    def number(value: float) -> str:
        return f"{value:.{digits}f}"

    markdown = format == "markdown"
    table = _markdown if markdown else _text
    tables = [table(_mean_rows(systems, comparison, number, " " * (not markdown)), 1)]
    if per_query:
        tables.append(table(_query_rows(systems, number, "-"), 2))
    notes = _notes(systems, comparison)
    if markdown:
        notes = [f"- {_escape(note)}" for note in notes]
    return "\n\n".join([*tables, "\n".join(notes)])


def _union(systems: Sequence[Evaluation]) -> list[str]:
    return list(dict.fromkeys(name for system in systems for name in system.per_query.columns))


def _pairs(comparison: Comparison | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the comparison's numbers as Python values, by system and measure."""
    if comparison is None:
        return {}
    columns = {name: comparison.table[name].tolist() for name in PAIR}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {(row["system"], row["measure"]): row for row in rows}


def _mean_rows(
    systems: Sequence[Evaluation],
    comparison: Comparison | None,
    number: Callable[[float], str],
    unmarked: str,
) -> list[list[str]]:
    measures, pairs = _union(systems), _pairs(comparison)
    compared = [] if comparison is None else ["W/T/L"]
    rows = [["system", *(cell for name in measures for cell in (name, *compared))]]
    for system in systems:
        mean, row = system.mean, [system.name]
        for name in measures:
            cell = number(mean[name]) if name in mean else "-"
            pair = pairs.get((system.name, name))
            if comparison is not None:
                row.append(cell + ("*" if pair and pair["significant"] else unmarked))
                row.append(f"{pair['wins']}/{pair['ties']}/{pair['losses']}" if pair else "")
            else:
                row.append(cell)
        rows.append(row)
    return rows


def _query_rows(
    systems: Sequence[Evaluation], number: Callable[[float], str], absent: str = ""
) -> list[list[str]]:
    measures = _union(systems)
    rows = [["system", "qid", *measures]]
    for system in systems:
        columns = [
            map(number, system.per_query[name].tolist())
            if name in system.per_query
            else [absent] * system.n_judged
            for name in measures
        ]
        for qid, *cells in zip(system.per_query.index, *columns, strict=True):
            rows.append([system.name, qid, *cells])
    return rows


def _csv_rows(systems: Sequence[Evaluation], comparison: Comparison | None) -> list[list[str]]:
    measures, pairs = _union(systems), _pairs(comparison)
    fields = PAIR[4:] if comparison is not None else ()
    head = [cell for name in measures for cell in (name, *(f"{name} {part}" for part in fields))]
    rows = [["system", *head, "judged", "without results", "dropped", "unjudged"]]
    for system in systems:
        mean, row = system.mean, [system.name]
        for name in measures:
            pair = pairs.get((system.name, name), {})
            row.append(repr(float(mean[name])) if name in mean else "")
            row.extend(str(pair.get(part, "")) for part in fields)
        counts = (system.n_judged, len(system.missing), system.dropped, system.unjudged)
        rows.append([*row, *map(str, counts)])
    return rows


def _csv(rows: Sequence[Sequence[str]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue().removesuffix("\n")


def _json(systems: Sequence[Evaluation], comparison: Comparison | None, per_query: bool) -> str:
    pairs = _pairs(comparison)
    out = dict[str, Any]()
    if comparison is not None:
        for name in ("baseline", "test", "correction", "alpha", "seed"):
            out[name] = getattr(comparison, name)
    out["systems"] = [
        {
            "name": system.name,
            "judged": system.n_judged,
            "without_results": list(system.missing),
            "dropped": system.dropped,
            "unjudged": system.unjudged,
            "mean": system.mean.to_dict(),
        }
        for system in systems
    ]
    for system, entry in zip(systems, out["systems"], strict=True):
        compared = {
            measure: {part: pair[part] for part in PAIR[4:]}
            for (name, measure), pair in pairs.items()
            if name == system.name
        }
        if compared:
            entry["compared"] = compared
        if per_query:
            entry["per_query"] = system.per_query.to_dict("index")
    return json.dumps(out, indent=2, ensure_ascii=False, allow_nan=False)


def _text(rows: Sequence[Sequence[str]], left: int) -> str:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _markdown(rows: Sequence[Sequence[str]], left: int) -> str:
    head, *body = [[_escape(cell) for cell in row] for row in rows]
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def _escape(text: str) -> str:
    return re.sub(r"([\\|*_`<])", r"\\\1", " ".join(text.split()))


def _notes(systems: Sequence[Evaluation], comparison: Comparison | None) -> list[str]:
    coverage = [_coverage(system) for system in systems]
    if all(lines == coverage[0] for lines in coverage):
        notes = coverage[0]
    else:
        notes = [
            f"{system.name}: {line}"
            for system, lines in zip(systems, coverage, strict=True)
            for line in lines
        ]
    vague = [name for name in _union(systems) if _hides_threshold(name)]
    if vague:
        notes = [*notes, f"{', '.join(vague)}: grade 1 and above counts as relevant"]
    if comparison is not None:
        notes = [*notes, *_test_notes(comparison)]
    return notes


def _coverage(system: Evaluation) -> list[str]:
    line = f"{system.n_judged} judged"
    if system.missing:
        more = ", …" if len(system.missing) > 10 else ""
        line += f", {len(system.missing)} without results: {', '.join(system.missing[:10])}{more}"
    lines = [line]
    for count, what in (
        (system.unjudged, "unjudged {} in the run ignored"),
        (system.dropped, "judged {} not among the topics dropped"),
    ):
        if count:
            lines.append(f"{count} {what.format('query' if count == 1 else 'queries')}")
    return lines


def _hides_threshold(column: str) -> bool:
    base = re.match(r"[^(@]*", column)
    measure = ir_measures.measures.registry.get(base[0] if base else "")
    return measure is not None and is_binary(measure) and "rel=" not in column


def _test_notes(comparison: Comparison) -> list[str]:
    test = {
        "t": "t-test",
        "wilcoxon": "Wilcoxon signed-rank test",
        "randomisation": f"randomisation test (up to {FLIPS} flips, seed {comparison.seed})",
    }[comparison.test]
    n = len(comparison.evaluations) - 1
    over = f"over the {n} systems compared" if n > 1 else "over one system compared"
    corrected = {
        "holm": f"Holm's correction {over}, for each measure",
        "bonferroni": f"Bonferroni's correction {over}, for each measure",
        "none": "no correction",
    }[comparison.correction]
    return [
        f"* p < {comparison.alpha} against {comparison.baseline}: "
        f"paired two-sided {test}, {corrected}",
        f"W/T/L: queries won, tied, lost against {comparison.baseline}",
    ]

"""The command line: each verb calls the library function behind it.

Data goes to stdout, talk to stderr. Exit codes are those of `prf.errors`; 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from prf.errors import FileFormatError, PrfError, PrfWarning, SpecError

if TYPE_CHECKING:
    from prf.demo import Example
    from prf.evaluate import Comparison, Evaluation
    from prf.pipeline import Transformer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Retrieval with pseudo-relevance feedback: index, search, evaluate, explain.",
)

Progress = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="Bars on stderr; default: if it is a terminal."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace an argument, as in 1.fb_docs=5; positions as in explain."),
]
Import = Annotated[
    list[Path] | None,
    typer.Option("--import", help="Python file with stages of your own, run before anything else."),
]
Measure = Annotated[
    list[str] | None,
    typer.Option(
        "--measure", "-m", help="ir-measures name or preset (dl19, dl20, msmarco-dev); repeatable."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def _shows(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress


def _say(text: str) -> None:
    print(text, file=sys.stderr)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where indexes and runs go.")] = Path("."),
    progress: Progress = None,
) -> None:
    """Run the main job on the embedded collection: index, search, compare."""
    from prf.demo import run_demo
    from prf.evaluate import render

    result = run_demo(folder, _shows(progress))
    print(render(result.comparison))
    for example in result.examples:
        _print_example(example)
    _say(f"runs and their records are in {os.path.relpath(result.runs[0].parent)}")


def _print_example(example: Example) -> None:
    print(f'\n{example.qid} "{example.query}": nDCG@10 {example.before:.3f} -> {example.after:.3f}')
    for move in example.moves:
        before, after = (
            "out" if rank is None else str(rank) for rank in (move.before, move.after)
        )
        text = move.text if len(move.text) <= 60 else move.text[:59] + "…"
        print(f"  {before:>3} -> {after:>3}  grade {move.grade}  {move.docno:<13} {text}")


@app.command()
def index(
    path: Annotated[Path, typer.Argument(help="The index folder to make.")],
    docs: Annotated[
        str | None,
        typer.Option(help="Documents: .jsonl, .tsv, .trec, each also .gz, or ir_datasets:NAME."),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(help="Build a dense index with this model (minilm, folder, hub id)."),
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option(help="Build a dense index from this .npy file.")
    ] = None,
    ids: Annotated[Path | None, typer.Option(help="Docnos of --vectors, one a line.")] = None,
    field: Annotated[
        list[str] | None, typer.Option(help="JSON field to index instead of text; repeatable.")
    ] = None,
    with_text: Annotated[bool, typer.Option(help="Store texts in a dense index too.")] = False,
    on_empty: Annotated[str, typer.Option(help="Documents without text: error, skip, keep.")] = "error",
    similarity: Annotated[str, typer.Option(help="For --vectors: dot or cosine.")] = "dot",
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per forward pass.")] = 32,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    force: Force = False,
    progress: Progress = None,
) -> None:
    """Build an index: Lucene for BM25, or dense with --encoder or --vectors."""
    from prf.build import build_dense, build_lucene, build_vectors

    if (vectors is None) != (ids is None):
        raise SpecError("--vectors and --ids belong together; give both or neither")
    if vectors is not None and ids is not None:
        if docs is not None or with_text or field:
            raise SpecError("--vectors takes neither documents nor texts; leave --docs out")
        meta = build_vectors(
            path, vectors, ids, similarity=similarity, encoder=encoder, force=force  # type: ignore[arg-type]
        )
    elif docs is None:
        raise SpecError("nothing to index: give --docs FILE, or --vectors and --ids")
    elif encoder is not None:
        meta = build_dense(
            path,
            docs,
            encoder,
            fields=field or (),
            with_text=with_text,
            on_empty=on_empty,  # type: ignore[arg-type]
            batch_size=batch_size,
            device=device,
            force=force,
            progress=_shows(progress),
        )
    else:
        meta = build_lucene(
            path,
            docs,
            fields=field or (),
            on_empty=on_empty,  # type: ignore[arg-type]
            force=force,
            progress=_shows(progress),
        )
    _say(f"{meta['kind']} index '{path}': {meta['documents']:,} documents, {meta['empty_documents']:,} empty")


@app.command()
def search(
    pipeline: Annotated[Path, typer.Option("--pipeline", "-p", help="Pipeline file (YAML).")],
    topics: Annotated[str | None, typer.Option(help="Topics file, or ir_datasets:NAME.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run file to write, also .gz.")] = None,
    query: Annotated[str | None, typer.Option(help="One query instead of --topics and --run.")] = None,
    show: Annotated[int, typer.Option(min=1, help="With --query: how many results.")] = 10,
    qrels: Annotated[str | None, typer.Option(help="Judgments: print measures at the end.")] = None,
    measure: Measure = None,
    set_: Set = None,
    tag: Annotated[str | None, typer.Option(help="Last column of the run.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Queries per batch.")] = 500,
    force: Force = False,
    reuse: Annotated[bool, typer.Option(help="Keep a run made in just this way.")] = False,
    import_: Import = None,
    progress: Progress = None,
) -> None:
    """Run topics, or one query, through a pipeline."""
    from prf.evaluate import evaluate as measure_run
    from prf.evaluate import parse_measures, render
    from prf.search import search as search_topics
    from prf.spec import override, read_pipeline
    from prf.trec import read_qrels, read_topics

    _import(import_)
    file = read_pipeline(pipeline)
    stages = override(file.pipeline, set_ or ())
    if query is not None:
        _print_results(stages, query, show)
        return
    topics = topics or file.topics
    if run is None and file.run is not None:
        run = Path(file.run)
    if topics is None or run is None:
        raise SpecError("give --topics and --run (here or in the pipeline file), or --query")
    measures = list(measure or file.measures or ("default",))
    # What can fail is read before the long work.
    frame = read_topics(topics)
    judged = None if qrels is None else read_qrels(qrels)
    parse_measures(measures)
    outcome = search_topics(
        stages,
        frame,
        run,
        tag=tag or file.tag or pipeline.stem,
        batch_size=batch_size,
        force=force,
        reuse=reuse,
        progress=_shows(progress),
    )
    counts = outcome.record["counts"]
    done = "kept" if outcome.reused else "written"
    _say(
        f"{counts['queries']} queries, {counts['results']:,} results {done} in '{outcome.run}' "
        f"({outcome.record['seconds']['total']:.2f} s)"
    )
    if judged is not None:
        if counts["results"] == 0:
            raise FileFormatError(f"run '{run}' holds no results, so there is nothing to measure")
        print(render(measure_run(outcome.run, judged, measures, topics=frame)))


def _print_results(stages: Transformer, query: str, show: int) -> None:
    from prf.search import single

    results = single(stages, query)
    for row in results.head(show).itertuples():
        text = f"  {row.text[:80]}" if hasattr(row, "text") else ""
        print(f"{row.rank + 1}\t{row.docno}\t{row.score:.4f}{text}")


@app.command()
def evaluate(
    qrels: Annotated[str, typer.Argument(help="Judgments (TREC), or ir_datasets:NAME.")],
    runs: Annotated[list[Path], typer.Argument(help="Run files.")],
    measure: Measure = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare with this run (its name without suffix).")
    ] = None,
    test: Annotated[str, typer.Option(help="t, wilcoxon or randomisation.")] = "t",
    correction: Annotated[str, typer.Option(help="holm, bonferroni or none.")] = "holm",
    topics: Annotated[str | None, typer.Option(help="Count only these queries.")] = None,
    format_: Annotated[str, typer.Option("--format", help="text, markdown, csv, json.")] = "text",
    per_query: Annotated[bool, typer.Option("--per-query", "-q")] = False,
) -> None:
    """Measure run files against judgments, and compare them."""
    from prf.evaluate import compare, render
    from prf.evaluate import evaluate as measure_run
    from prf.trec import read_qrels, read_topics

    judged = read_qrels(qrels)
    limit = None if topics is None else read_topics(topics)
    names = measure or ["default"]
    systems = [measure_run(run, judged, names, topics=limit) for run in runs]
    value: Comparison | list[Evaluation] = systems
    if len(systems) > 1 and baseline is not None:
        value = compare(systems, baseline, test=test, correction=correction)  # type: ignore[arg-type]
    print(render(value, format_, per_query))  # type: ignore[arg-type]


@app.command()
def explain(
    pipeline: Annotated[Path, typer.Argument(help="Pipeline file (YAML).")],
    set_: Set = None,
    import_: Import = None,
    query: Annotated[
        str | None, typer.Option(help="Also run this query and show what each stage does.")
    ] = None,
    qid: Annotated[str | None, typer.Option(help="The same for a query of --topics.")] = None,
    topics: Annotated[str | None, typer.Option(help="Where --qid is looked up.")] = None,
) -> None:
    """Show what each stage needs, gives and would open, without opening it."""
    from prf.spec import explain as explain_pipeline
    from prf.spec import override, read_pipeline

    _import(import_)
    stages = override(read_pipeline(pipeline).pipeline, set_ or ())
    print(repr(stages))
    for step in explain_pipeline(stages):
        indent = "  " * step.position.count(".")
        print(f"\n{indent}[{step.position}] {step.stage}")
        print(f"{indent}    in:  {', '.join(step.columns_in)}")
        print(f"{indent}    out: {', '.join(step.columns_out)}")
        for line in step.resources:
            print(f"{indent}    opens {line}")
        if step.note:
            print(f"{indent}    {step.note}")
    if qid is not None:
        query = _look_up(qid, topics)
    if query is not None:
        from prf.search import trace

        for line in trace(stages, query):
            print(line)


def _look_up(qid: str, topics: str | None) -> str:
    from prf.trec import read_topics

    if topics is None:
        raise SpecError("--qid needs --topics, the file it is looked up in")
    frame = read_topics(topics)
    found = frame.loc[frame["qid"] == qid, "query"]
    if found.empty:
        raise SpecError(f"topics '{topics}' hold no qid {qid!r}")
    return str(found.iloc[0])


@app.command()
def check(
    index: Annotated[Path | None, typer.Option(help="Also recompute this index's checksums.")] = None,
) -> None:
    """Report versions, extras, Java, GPU and folders, and what to do about each gap."""
    from rich.console import Console
    from rich.markup import escape

    from prf.check import check as check_all

    console = Console(soft_wrap=True, highlight=False)
    colours = {"ok": "green", "missing": "yellow", "warning": "yellow"}
    for finding in check_all(index):
        state = f"[{colours[finding.state]}]{finding.state:<8}[/]"
        console.print(f"{finding.what:<18}{state}{escape(finding.found)}")
        if finding.advice:
            console.print(f"{'':<26}{escape(finding.advice)}")


def _import(files: list[Path] | None) -> None:
    """Runs the user's own files, so that their stages are known by name."""
    import runpy

    for file in files or ():
        if not file.is_file():
            raise FileFormatError(f"--import '{file}' does not exist; check the path")
        try:
            runpy.run_path(str(file))
        except PrfError:
            raise
        except Exception as error:
            raise SpecError(f"--import '{file}': {type(error).__name__}: {error}") from error


def _show_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, PrfWarning):
        _say(f"prf: note: {message}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    debug = bool(os.environ.get("PRF_DEBUG"))
    warnings.showwarning = _show_warning
    warnings.simplefilter("always", PrfWarning)
    try:
        code = app(arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.Abort:
        _say("prf: interrupted; unfinished files were removed, an index build can be resumed")
        return 130
    except KeyboardInterrupt:
        _say("prf: interrupted; unfinished files were removed, an index build can be resumed")
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (head, less); not our error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PrfError as error:
        if debug:
            raise
        _say("prf: error: " + " ".join(str(error).split("\n")))
        return error.exit_code
    except Exception as error:
        if debug:
            raise
        _say(
            f"prf: internal error: {type(error).__name__}: {error}; "
            "please report it with the traceback that PRF_DEBUG=1 shows"
        )
        return 1


def _entry() -> None:
    sys.exit(main())

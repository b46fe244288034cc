"""Writing a dense index in the form of another library."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from prf.dense_build import sync_file
from prf.errors import IndexStateError, require
from prf.faiss_index import faiss_entry
from prf.foreign import foreign_files
from prf.index import VectorIndex, open_index

_ROWS = 65_536


def export_pyserini(
    path: str | os.PathLike[str],
    index: str | os.PathLike[str],
    *,
    faiss: str = "",
    force: bool = False,
) -> None:
    """Writes a dense index as Pyserini's FAISS folder (``index``, ``docid``), for its searchers.

    The folder appears when it is complete. Pyserini brings no query to length 1, so for a cosine
    index give it queries of length 1.

    Args:
        path: The new folder.
        index: Any dense index that `open_index` opens.
        faiss: Name or factory string of a FAISS index in it to write; empty for the vectors
            themselves, in a flat index.
        force: Replace a folder of that form.

    Raises:
        IndexStateError: If ``path`` exists, or the index does not hold that FAISS index.
        MissingDependency: Without FAISS.
    """
    library = require("faiss", "cpu", "writing Pyserini's form")
    opened = open_index(index)
    target = Path(path).absolute()
    _refuse_existing(target, force)
    source = opened.path / faiss_entry(opened, faiss)["file"] if faiss else None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as place:
        new = Path(place) / "new"
        new.mkdir()
        if source is not None:
            shutil.copyfile(source, new / "index")
        else:
            library.write_index(_flat(library, opened), str(new / "index"))
        names = "".join(f"{docno}\n" for docno in opened.docnos)
        (new / "docid").write_bytes(names.encode("utf-8"))
        sync_file(new / "index")
        sync_file(new / "docid")
        _refuse_existing(target, force)
        if target.exists():
            os.rename(target, Path(place) / "old")
        os.rename(new, target)


def _flat(library: Any, index: VectorIndex) -> Any:
    flat = library.IndexFlatIP(index.dim)
    for start in range(0, len(index), _ROWS):
        block = index.table[start : start + _ROWS]
        flat.add(np.require(block, np.float32, ["C", "A"]))
    return flat


def _refuse_existing(path: Path, force: bool) -> None:
    if not path.exists():
        return
    if not force:
        raise IndexStateError(f"{path} exists; choose another name or overwrite it (--force)")
    ours = path.is_dir() and {entry.name for entry in path.iterdir()} <= {"index", "docid"}
    if not ours or not (foreign_files(path) or not any(path.iterdir())):
        raise IndexStateError(
            f"{path} exists and is no FAISS folder of Pyserini's, so it is not replaced; "
            "remove it yourself"
        )

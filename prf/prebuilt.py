"""Prebuilt indexes of Pyserini, by name: where they lie, and fetching them.

``pyserini:NAME`` may stand wherever an index folder may. Names, addresses and checksums are read
from the installed pyserini package: the FAISS ones from its table, without importing it, the Lucene
ones (inverted and impact) from Anserini's jar. Indexes lie in Pyserini's own cache
(``PYSERINI_CACHE``, else ``~/.cache/pyserini``), so each system finds what the other downloaded.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from prf import jvm
from prf.errors import (
    FileFormatError,
    IndexStateError,
    MissingDependency,
    SpecError,
    did_you_mean,
    shorten,
)

PREFIX = "pyserini:"
_CHUNK = 2**20
_WAIT = 60  # seconds without an answer


class Prebuilt(NamedTuple):
    """What is known of a prebuilt index."""

    name: str
    file: str
    urls: tuple[str, ...]
    md5: str
    size: int
    """Bytes to download."""

    @property
    def folder(self) -> Path:
        """Where it lies, or will."""
        return cache_folder() / f"{self.file.partition('.tar.gz')[0]}.{self.md5}"


def cache_folder() -> Path:
    """Returns the folder in which Pyserini keeps its prebuilt indexes."""
    home = os.environ.get("PYSERINI_CACHE") or os.path.join("~", ".cache", "pyserini")
    return Path(home).expanduser() / "indexes"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Returns the folder of an index: that of a ``pyserini:`` name, else the path itself.

    Raises:
        SpecError: For a name that Pyserini does not have.
        IndexStateError: If that index was not downloaded; says how, and how large it is.
        MissingDependency: Without pyserini, which knows the names.
    """
    name = os.fspath(path)
    if not name.startswith(PREFIX):
        return Path(path)
    found = prebuilt(name)
    if not found.folder.is_dir():
        size = f"{found.size / 1e9:.1f} GB" if found.size else "of unknown size"
        raise IndexStateError(
            f"index {name} is not downloaded (looked for {found.folder}); "
            f"run `prf download {name}` ({size}), or build your own with `prf index`"
        )
    return found.folder


def prebuilt(name: str) -> Prebuilt:
    """Returns what is known of a prebuilt index, with or without ``pyserini:`` before its name.

    Raises:
        SpecError: For an unknown name.
        MissingDependency: Without pyserini.
    """
    name = name.removeprefix(PREFIX)
    known = names()
    if name not in known:
        raise SpecError(
            f"Pyserini has no prebuilt index {name!r} that can be used here"
            f"{did_you_mean(name, known)} ({len(known):,} names are known; "
            '`python -c "from prf.prebuilt import names; print(*names(), sep=chr(10))"` lists them)'
        )
    return known[name]


@lru_cache(maxsize=1)
def names() -> Mapping[str, Prebuilt]:
    """Returns the prebuilt indexes of the installed Pyserini by name: FAISS, inverted, impact.

    Raises:
        MissingDependency: Without pyserini.
    """
    spec = find_spec("pyserini")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise MissingDependency(
            "names of prebuilt indexes come with 'pyserini', which is not installed; "
            'run: pip install "prf-ir[cpu]"'
        )
    found = {**_of_jar(), **_of_table(Path(folders[0]) / "prebuilt_index_info.py")}
    if not found:
        raise MissingDependency(
            f"no names of prebuilt indexes found in {folders[0]}; "
            'pip install --upgrade "prf-ir[cpu]"'
        )
    return found


def _of_table(file: Path) -> dict[str, Prebuilt]:
    """Reads the entries that are written out; importing the file would start Java."""
    found: dict[str, Prebuilt] = {}
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Dict):
                try:
                    entry = ast.literal_eval(value)
                except ValueError:
                    continue
                _take(found, str(key.value), entry, entry.get("size compressed (bytes)"))
    return found


def _of_jar() -> dict[str, Prebuilt]:
    jar = jvm.find_jar()
    found: dict[str, Prebuilt] = {}
    if jar is None:
        return found
    with zipfile.ZipFile(jar) as archive:
        for member in archive.namelist():
            kind = member.removeprefix("prebuilt-indexes/")
            if (
                kind != member
                and kind.endswith(".json")
                and ("inverted" in kind or "impact" in kind)
            ):
                for entry in json.loads(archive.read(member)):
                    _take(found, str(entry.get("name")), entry, _size(entry))
    return found


def _size(entry: Mapping[str, Any]) -> Any:
    return next((entry[key] for key in entry if "compressed" in key.lower()), 0)


def _take(found: dict[str, Prebuilt], name: str, entry: Mapping[str, Any], size: Any) -> None:
    urls, md5 = entry.get("urls"), entry.get("md5")
    if not isinstance(urls, list) or not urls or not isinstance(md5, str):
        return
    file = str(entry.get("filename") or urls[0].rpartition("/")[2])
    if "lucene-hnsw" in file or "lucene-flat" in file:
        return  # vectors in Lucene, which nothing here searches
    found[name] = Prebuilt(name, file, tuple(urls), md5, int(size or 0))


def download(name: str, *, progress: bool = False) -> Path:
    """Fetches a prebuilt index of Pyserini into its cache and returns the folder.

    The folder appears when the archive is complete, has the checksum it should have, and is
    unpacked; whatever goes wrong before leaves nothing. One that is there is not fetched again.

    Args:
        name: A name such as ``msmarco-v1-passage.ance``, with or without ``pyserini:``.
        progress: Show a bar on stderr.

    Raises:
        SpecError: For an unknown name.
        MissingDependency: Without pyserini.
        IndexStateError: If no address answers, or the file is cut or has another checksum.
        FileFormatError: If it is no archive of one folder, or would write elsewhere.
    """
    wanted = prebuilt(name)
    if wanted.folder.is_dir():
        return wanted.folder
    wanted.folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(wanted.folder.parent).free
    if free < 2 * wanted.size:
        raise IndexStateError(
            f"index {PREFIX}{wanted.name} needs about {2 * wanted.size / 1e9:.1f} GB in "
            f"{wanted.folder.parent} until it is unpacked, {free / 1e9:.1f} GB are free; "
            "set PYSERINI_CACHE to a folder with more"
        )
    with tempfile.TemporaryDirectory(prefix=".prf-", dir=wanted.folder.parent) as place:
        archive = Path(place) / "archive.tar.gz"
        _fetch(wanted, archive, progress)
        inside = _unpack(archive, Path(place) / "unpacked")
        try:
            os.rename(inside, wanted.folder)
        except OSError:
            if not wanted.folder.is_dir():  # else another process was faster, and that is as good
                raise
    return wanted.folder


def _fetch(wanted: Prebuilt, archive: Path, progress: bool) -> None:
    """Tries one address after the other."""
    troubles = []
    for url in wanted.urls:
        try:
            with tqdm(
                total=wanted.size or None, unit="B", unit_scale=True, disable=not progress
            ) as b:
                found, expected = _copy(url, archive, b.update)
        except (urllib.error.URLError, OSError, HTTPException, ValueError) as error:
            troubles.append(f"{url}: {error}")
            continue
        if expected is not None and archive.stat().st_size != expected:
            size = archive.stat().st_size
            troubles.append(f"{url}: broke off after {size:,} of {expected:,} bytes")
        elif found != wanted.md5:
            troubles.append(f"{url}: the file has md5 {found}, it should have {wanted.md5}")
        else:
            return
    raise IndexStateError(
        f"index {PREFIX}{wanted.name} could not be downloaded; nothing was kept: "
        f"{'; '.join(troubles)}"
    )


def _copy(url: str, to: Path, tell: Callable[[int], object]) -> tuple[str, int | None]:
    """Copies what an address gives into a file; returns its md5 and how long it should be."""
    md5 = hashlib.md5(usedforsecurity=False)
    request = urllib.request.Request(url, headers={"User-Agent": "prf-ir"})
    with urllib.request.urlopen(request, timeout=_WAIT) as answer, open(to, "wb") as out:
        length = answer.headers.get("Content-Length")
        while chunk := answer.read(_CHUNK):
            out.write(chunk)
            md5.update(chunk)
            tell(len(chunk))
    return md5.hexdigest(), int(length) if length else None


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpacks an archive of one folder and returns that folder."""
    folder.mkdir()
    try:
        with tarfile.open(archive) as members:
            members.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FileFormatError(f"the downloaded archive cannot be unpacked: {error}") from error
    inside = [entry for entry in folder.iterdir() if entry.is_dir()]
    if len(inside) != 1:
        listed = shorten([entry.name for entry in folder.iterdir()])
        raise FileFormatError(f"the downloaded archive should hold one folder, it holds {listed}")
    return inside[0]

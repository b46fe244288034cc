"""FAISS indexes beside a dense index: building them by factory string, and searching with them.

A FAISS index is one more file of the index folder, ``faiss-NAME.index``, with an entry in meta.json
under ``faiss``. It only proposes candidates: vectors by docno, and exact scores, still come from
the stored vectors. A search hands FAISS one query at a time, each in one thread, so that neither
the batch nor the number of threads can change what is found.
"""

from __future__ import annotations

import os
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from prf.dense_build import building, sync_file, write_json
from prf.errors import (
    IndexStateError,
    MissingDependency,
    PrfWarning,
    SpecError,
    did_you_mean,
    require,
)
from prf.foreign import faiss_error, parts, read_faiss
from prf.frames import FloatArray, Hits
from prf.index import VectorIndex, open_index, read_json, sha256_of
from prf.knn import in_order, parallel, rescored, unit

_ADD_ROWS = 65_536  # rows handed to FAISS at a time
_TRAIN_ROWS = 65_536  # what FAISS uses at most to train codes of 8 bits
_ENOUGH = 39  # training vectors for each centroid, as FAISS advises
_TRAIN_PER_LIST = 64  # and what it needs at least, and some, for each list of an IVF index


def build_faiss(
    path: str | os.PathLike[str],
    factory: str,
    *,
    name: str = "",
    train: int = 0,
    seed: int = 7,
    ef_construction: int = 0,
    threads: int = 1,
    force: bool = False,
) -> dict[str, Any]:
    """Builds a FAISS index beside the vectors of a dense index and returns its entry in meta.json.

    The file appears when it is complete. With one thread the same vectors and arguments give the
    same file, byte for byte; with more, HNSW graphs differ from build to build.

    Args:
        path: A dense index of this package.
        factory: FAISS's factory string: ``HNSW32``, ``IVF1024,Flat``, ``OPQ48,PQ48``, ``SQ8``,
            ``SQfp16``, ... The measure is always the inner product.
        name: What ``DenseRetriever(faiss=...)`` calls it; the factory string unless given.
        train: Vectors to train on, a sample drawn with ``seed``; 0 for what the type needs, at
            most all: 65,536, or 64 for each list of an IVF index if that is more.
        seed: Seed of the sample and of k-means.
        ef_construction: Width of the search while an HNSW graph is built; 0 for FAISS's 40.
        threads: Threads; 0 for all cores.
        force: Replace one of the same name.

    Raises:
        SpecError: For a factory string that FAISS does not know or that does not fit the vectors
            (too few of them, or dimensions that the parts do not divide); quotes FAISS.
        IndexStateError: If the index is not one of ours, or holds one of this name already.
        MissingDependency: Without FAISS.

    Warns:
        PrfWarning: If there are fewer vectors to train on than FAISS advises.
    """
    faiss = require("faiss", "cpu", "build_faiss")
    index = open_index(path)
    if index.meta.get("form"):
        raise IndexStateError(
            f"index {index.path} is in the form of {index.meta['form']}; FAISS indexes are built "
            "beside a dense index of `prf index`"
        )
    if train < 0 or threads < 0 or ef_construction < 0:
        raise SpecError("build_faiss: train, threads and ef_construction are at least 0")
    name = name or factory
    file = f"faiss-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.index"
    with building(index.path):
        _refuse_existing(index, name, file, force)
        made, entry = _made(faiss, index, factory, train, seed, ef_construction, threads)
        new = index.path / f"{file}.new"
        try:
            faiss.write_index(made, str(new))
            sync_file(new)
            # The old entry goes first: a kill in between leaves no entry, never a wrong one.
            _enter(index.path, name, None)
            os.replace(new, index.path / file)
        finally:
            new.unlink(missing_ok=True)
        size = (index.path / file).stat().st_size
        entry |= {"file": file, "bytes": size, "sha256": sha256_of(index.path / file)}
        _enter(index.path, name, entry)
    return entry


def _refuse_existing(index: VectorIndex, name: str, file: str, force: bool) -> None:
    there = read_json(index.path / "meta.json").get("faiss", {})
    for other, entry in there.items():
        if other == name and not force:
            raise IndexStateError(
                f"index {index.path} holds a FAISS index {name!r} already; "
                "choose another name or overwrite it (--force)"
            )
        if other != name and entry.get("file") == file:
            raise SpecError(f"FAISS index {name!r} would have the file of {other!r}; rename it")


def _enter(folder: Path, name: str, entry: dict[str, Any] | None) -> None:
    meta = read_json(folder / "meta.json")
    there = {key: value for key, value in meta.get("faiss", {}).items() if key != name}
    if entry is not None:
        there[name] = entry
    if there != meta.get("faiss", {}):
        write_json(folder / "meta.json", {**meta, "faiss": there}, indent=2)


def _made(
    faiss: Any, index: VectorIndex, factory: str, train: int, seed: int, width: int, threads: int
) -> tuple[Any, dict[str, Any]]:
    """Returns the FAISS index of all vectors, and what its entry says."""
    before = faiss.omp_get_max_threads()  # a setting of this thread only
    faiss.omp_set_num_threads(threads or os.cpu_count() or 1)
    try:
        made = faiss.index_factory(index.dim, factory, faiss.METRIC_INNER_PRODUCT)
        nlist, centroids, parameters = _prepare(faiss, made, seed, width)
        kept = _quiet_rotations(faiss, made, seed)  # until it is trained
        rows = 0
        if not made.is_trained:
            rows = min(len(index), train or max(_TRAIN_ROWS, _TRAIN_PER_LIST * nlist))
            chosen = np.random.default_rng(seed).choice(len(index), rows, replace=False)
            _tell_of_few(index, factory, rows, centroids)
            made.train(np.ascontiguousarray(index.vectors[np.sort(chosen)], dtype=np.float32))
        for rotation, _ in kept:
            rotation.pq = None
        for start in range(0, len(index), _ADD_ROWS):
            block = index.vectors[start : start + _ADD_ROWS]
            made.add(np.ascontiguousarray(block, dtype=np.float32))
    except RuntimeError as error:
        raise SpecError(
            f"FAISS cannot build {factory!r} for the {len(index):,} x {index.dim} vectors of "
            f"{index.path}: {faiss_error(error)}"
        ) from error
    finally:
        faiss.omp_set_num_threads(before)
    entry = {
        "factory": factory,
        "train": rows,
        "seed": seed,
        "threads": threads,
        "parameters": parameters,
        "version": faiss.__version__,
    }
    return made, entry


def _prepare(faiss: Any, made: Any, seed: int, width: int) -> tuple[int, int, dict[str, int]]:
    """Sets seeds and defaults of a new index; returns its lists, most centroids, and settings."""
    nlist, centroids, parameters = 0, 0, {}
    for part in parts(faiss, made):
        if hasattr(part, "do_polysemous_training"):
            # It only renumbers codes, for a way of search that is not used here, and takes hours.
            part.do_polysemous_training = False
        if hasattr(part, "pq"):
            _set_clustering(part.pq.cp, seed)
            centroids = max(centroids, int(part.pq.ksub))
        if hasattr(part, "nlist") and hasattr(part, "nprobe"):
            _set_clustering(part.cp, seed)
            nlist = part.nlist
            centroids = max(centroids, nlist)
            # FAISS looks into one list; one in sixteen is a start that finds nearly all.
            part.nprobe = parameters["nprobe"] = max(1, -(-nlist // 16))
        if hasattr(part, "hnsw"):
            if width:
                part.hnsw.efConstruction = width
            parameters["efConstruction"] = part.hnsw.efConstruction
    if width and "efConstruction" not in parameters:
        raise SpecError("build_faiss: ef_construction is for HNSW types only; leave it out")
    return nlist, centroids, parameters


def _set_clustering(clustering: Any, seed: int) -> None:
    clustering.seed = seed
    clustering.min_points_per_centroid = 1  # FAISS would print what `_tell_of_few` says


def _quiet_rotations(faiss: Any, made: Any, seed: int) -> list[tuple[Any, Any]]:
    """Gives the rotations of OPQ quantizers to train with, seeded; returns both."""
    top = faiss.downcast_index(made)
    if not isinstance(top, faiss.IndexPreTransform):
        return []
    kept = []
    for place in range(top.chain.size()):
        rotation = faiss.downcast_VectorTransform(top.chain.at(place))
        if isinstance(rotation, faiss.OPQMatrix):
            quantizer = faiss.ProductQuantizer(rotation.d_out, rotation.M, 8)
            _set_clustering(quantizer.cp, seed)
            rotation.pq = quantizer
            kept.append((rotation, quantizer))
    return kept


def _tell_of_few(index: VectorIndex, factory: str, rows: int, centroids: int) -> None:
    if rows < _ENOUGH * centroids:
        warnings.warn(
            f"FAISS index {factory!r} of {index.path}: {rows:,} vectors to train {centroids:,} "
            f"centroids; FAISS advises {_ENOUGH * centroids:,} or more, so take fewer centroids",
            PrfWarning,
            stacklevel=4,
        )


def search_faiss(
    index: VectorIndex,
    name: str,
    queries: FloatArray,
    k: int,
    *,
    candidates: int = 1000,
    rescore: bool = True,
    nprobe: int = 0,
    ef_search: int = 0,
    threads: int = 0,
    device: str = "cpu",
) -> Hits:
    """Returns what a FAISS index finds for every query: at most k, fewer if it found fewer.

    Args:
        index: The open index.
        name: Name or factory string of the FAISS index in it.
        queries: (n, d) float32, as `VectorIndex.search` takes them.
        k: How many documents, at least 1.
        candidates: With ``rescore``, how many of FAISS's hits are scored exactly, at least k.
        rescore: Whether scores are the exact inner products with the stored vectors, rounded to
            float32, or FAISS's own.
        nprobe: Lists to look into (IVF); 0 for what the file says.
        ef_search: Width of the search (HNSW); 0 for as wide as hits are asked of FAISS. Its own 16
            stops long before it has found a thousand.
        threads: 0 for all cores. Changes nothing but the time.
        device: ``cpu``; ``cuda`` or ``cuda:N`` for the whole index on one GPU; ``cuda:all`` for
            float16 shards on all of them.

    Raises:
        IndexStateError: If there is no FAISS index of this name, or its file is damaged.
        SpecError: For ``nprobe`` or ``ef_search`` of another type of index.
        MissingDependency: If the device, or FAISS for it, is not there.
    """
    queries = index.checked(queries)
    entry = faiss_entry(index, name)
    faiss = require("faiss", "cpu", f"FAISS index {name!r}")
    made = _opened(faiss, index, entry, device)
    depth = min(max(k, candidates) if rescore else k, len(index))
    parameters = _parameters(faiss, made, nprobe, ef_search, depth, name)
    if index.similarity == "cosine":
        queries = unit(queries)

    def find(part: range) -> list[tuple[FloatArray, Any]]:
        before = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)
        try:
            return [_find(made, queries[row : row + 1], depth, parameters) for row in part]
        finally:
            faiss.omp_set_num_threads(before)

    try:
        if device == "cpu":
            found = [hit for part in parallel(find, len(queries), threads) for hit in part]
        else:
            found = _find_all(made, queries, depth, parameters)
    except RuntimeError as error:
        raise IndexStateError(
            f"FAISS index {name!r} of {index.path} cannot be searched: {faiss_error(error)}"
        ) from error
    ids = [hit[1] for hit in found]
    if rescore:
        return rescored(index.table, queries, ids, k, index.names, index.max_norm, threads)
    return in_order([hit[0] for hit in found], ids, k, index.names)


def _find(
    made: Any, queries: FloatArray, depth: int, parameters: Any
) -> tuple[FloatArray, np.ndarray[Any, np.dtype[np.int64]]]:
    return _find_all(made, queries, depth, parameters)[0]


def _find_all(
    made: Any, queries: FloatArray, depth: int, parameters: Any
) -> list[tuple[FloatArray, Any]]:
    """Returns scores and rows of each query; FAISS fills up with -1, which is no row."""
    scores, ids = made.search(queries, depth, params=parameters)
    return [(s[i >= 0], i[i >= 0]) for s, i in zip(scores, ids, strict=True)]


def faiss_entry(index: VectorIndex, name: str) -> dict[str, Any]:
    """Returns what meta.json says of a FAISS index.

    Args:
        index: The open index.
        name: Its name, or its factory string if only one was built with it.

    Raises:
        IndexStateError: If there is none; names those that there are.
    """
    there: dict[str, Any] = index.meta.get("faiss", {})
    if name in there:
        return dict(there[name])
    same = [entry for entry in there.values() if entry.get("factory") == name]
    if len(same) == 1:
        return dict(same[0])
    known = ", ".join(map(repr, there)) or "none"
    advice = (
        "" if index.meta.get("form") else f"; build it with `prf index {index.path} --faiss {name}`"
    )
    raise IndexStateError(
        f"index {index.path} holds no FAISS index {name!r}{did_you_mean(name, there)} "
        f"(it holds: {known}){advice}"
    )


def _opened(faiss: Any, index: VectorIndex, entry: dict[str, Any], device: str) -> Any:
    file = index.path / entry["file"]
    try:
        state = file.stat()
    except OSError as error:
        raise IndexStateError(f"{file} is missing; build it again (--faiss, --force)") from error
    size = entry.get("bytes", state.st_size)
    if state.st_size != size:
        raise IndexStateError(
            f"{file} has {state.st_size:,} bytes, meta.json says {size:,}; build it again"
        )
    made = _read(str(file), state.st_mtime_ns)
    if made.ntotal != len(index) or made.d != index.dim:
        raise IndexStateError(
            f"{file} holds {made.ntotal:,} x {made.d} vectors, the index {len(index):,} x "
            f"{index.dim}; build it again"
        )
    return made if device == "cpu" else _on_gpu(str(file), state.st_mtime_ns, device)


@lru_cache(maxsize=4)
def _read(file: str, stamp: int) -> Any:
    return read_faiss(Path(file))


@lru_cache(maxsize=2)
def _on_gpu(file: str, stamp: int, device: str) -> Any:
    """Returns a copy of an index on the GPU; the resources must live as long as it does."""
    faiss = require("faiss", "gpu", f"device {device!r}")
    gpus, chosen = gpus_of(faiss, device)
    made = _read(file, stamp)
    options = faiss.GpuMultipleClonerOptions() if chosen is None else faiss.GpuClonerOptions()
    try:
        if chosen is None:
            options.shard, options.useFloat16 = True, True
            return faiss.index_cpu_to_all_gpus(made, options, ngpu=gpus)
        resources = faiss.StandardGpuResources()
        copy = faiss.index_cpu_to_gpu(resources, chosen, made, options)
        copy.resources = resources
        return copy
    except RuntimeError as error:
        raise SpecError(
            f"FAISS cannot put {file} on device {device!r}: {faiss_error(error)}; "
            "HNSW and some coded types are for the CPU only"
        ) from error


def gpus_of(faiss: Any, device: str) -> tuple[int, int | None]:
    """Returns the number of GPUs FAISS sees, and the one a device names (None: all).

    Raises:
        SpecError: For a device that is none.
        MissingDependency: If this FAISS has no GPU code or sees no such GPU.
    """
    match = re.fullmatch(r"cuda(?::(\d+|all))?", device)
    if match is None:
        raise SpecError(f"device {device!r}: write cpu, cuda, cuda:0, ... or cuda:all")
    if not hasattr(faiss, "StandardGpuResources"):
        raise MissingDependency(
            f"device {device!r}: the installed FAISS is without GPU code; "
            "run: pip uninstall faiss-cpu, then pip install \"prf-ir[gpu]\"; or use device 'cpu'"
        )
    gpus = int(faiss.get_num_gpus())
    chosen = None if match[1] == "all" else int(match[1] or 0)
    if gpus == 0 or (chosen is not None and chosen >= gpus):
        raise MissingDependency(
            f"device {device!r}: FAISS sees {gpus} GPUs; use another device or 'cpu'"
        )
    return gpus, chosen


def _parameters(faiss: Any, made: Any, nprobe: int, ef_search: int, depth: int, name: str) -> Any:
    """Returns what FAISS calls search parameters, or None to leave all as the file says."""
    top = faiss.downcast_index(made)
    inner = faiss.downcast_index(top.index) if isinstance(top, faiss.IndexPreTransform) else top
    lists, graph = hasattr(inner, "nprobe"), hasattr(inner, "hnsw")
    quantizer = faiss.downcast_index(inner.quantizer) if lists else None
    in_lists = quantizer is not None and hasattr(quantizer, "hnsw")
    if nprobe and not lists:
        raise SpecError(f"FAISS index {name!r} has no lists, so nprobe means nothing; leave it out")
    if ef_search and not (graph or in_lists):
        raise SpecError(f"FAISS index {name!r} has no graph, so ef_search means nothing; drop it")
    if not graph and not nprobe and not ef_search:
        return None
    if lists:
        parameters = faiss.SearchParametersIVF(nprobe=nprobe or inner.nprobe)
        if ef_search:
            parameters.quantizer_params = faiss.SearchParametersHNSW(efSearch=ef_search)
            parameters.kept = parameters.quantizer_params
    else:
        parameters = faiss.SearchParametersHNSW(efSearch=ef_search or depth)
    if inner is not top:
        outer = faiss.SearchParametersPreTransform(index_params=parameters)
        outer.kept = parameters
        return outer
    return parameters

"""Trains the models of pipelines/training and writes the tables of pipelines/TRAINING.md.

    PRF_SHARED=../shared python tests/bench/results_training.py [--work FOLDER] [--train NAME ...]

Models, indexes and new queries are kept in FOLDER, if one is given, and used again while their
configs and the code are the same, so that an interrupted run goes on. With ``--train`` those models
alone are made (``encoder-1``: name and seed). All of it takes about two hours on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cost_learned
import results
from reference import DL19, DL20, NFCORPUS, POOL, ROOT, SHARED, Topics

import prf
from prf import (
    TPRF,
    AveragePrf,
    DenseRetriever,
    EncoderPrf,
    Impact,
    QueryVectors,
    Rocchio,
    SparseEncoderPrf,
    Splade,
    Text,
    Transformer,
    Vectors,
)
from prf.evaluation import Evaluation
from prf.frames import column, objects
from prf.index import open_index
from prf.losses import DenseMatrix, Matrix, full_softmax
from prf.lucene import open_index as open_lucene
from prf.sparse_models import load_splade
from prf.training_config import Training
from prf.training_data import prepare
from prf.training_tasks import open_impacts, open_table
from prf.trec import read_json

FILE = ROOT / "pipelines" / "TRAINING.md"
CONFIGS = ROOT / "pipelines" / "training"
DEV, TRAIN = Topics("nfcorpus", "dev"), Topics("nfcorpus", "train")
SETS = (NFCORPUS, DL19, DL20)
CHOICES = (1, 2, 3, 5, 10)
LOL_DEPTHS = range(6)
READS = max(CHOICES)


class Kind(NamedTuple):
    """A model of the tables: its config, what is changed in it, and how many seeds it has."""

    config: str
    changes: dict[str, Any]
    seeds: int


KINDS = {
    "tprf": Kind("tprf_nfcorpus", {}, 3),
    "tprf-control": Kind("tprf_nfcorpus", {"network.fb_docs": 0, "loop.depths": []}, 3),
    "tprf-gentle": Kind("no_feedback_nfcorpus", {}, 3),
    "encoder": Kind("encoder_nfcorpus", {}, 2),
    "encoder-control": Kind("encoder_nfcorpus", {"network.fb_docs": 0}, 3),
    "lol-0": Kind("lol_nfcorpus", {"loss.lambda_cr": 0.0}, 2),
    "lol-1": Kind("lol_nfcorpus", {"loss.lambda_cr": 1.0}, 2),
    "sparse-lol-0": Kind("lol_sparse_nfcorpus", {"loss.lambda_cr": 0.0}, 1),
    "sparse-lol-1": Kind("lol_sparse_nfcorpus", {"loss.lambda_cr": 1.0}, 1),
}


# Fingerprints

CODE = (
    "encoders",
    "feedback/encoder",
    "feedback/learned",
    "feedback/vector",
    "layouts",
    "losses",
    "networks",
    "sparse_models",
    "sparse_network",
    "tprf",
    "training_config",
    "training_loop",
    "training_tasks",
)
"""Modules that decide the figures, given the prepared data."""


def fingerprints() -> dict[str, str]:
    """Returns the checksums of the code (without comments and docstrings) and of every config."""
    made = {"code": results.code_fingerprint(CODE)}
    for name in sorted({kind.config for kind in KINDS.values()}):
        values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text("utf-8"))
        made[f"{name}.yaml"] = _sha(json.dumps(values, sort_keys=True).encode())
    return made


def prepared_fingerprints(models: Models) -> dict[str, str]:
    """Returns the checksums of what dense training reads: feedback and positives as rows."""
    config, made = models.config("tprf", 1), {}
    for name, part, every in (("train", config.train, False), ("dev", config.dev, True)):
        assert part is not None
        data = prepare(part, config.index, config.cache, fb_docs=10, all_queries=every)
        arrays = (data.feedback, data.positives.ptr, data.positives.rows)
        made[name] = _sha(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))
    return made


def data_fingerprints() -> dict[str, str]:
    """Returns the checksums of the files that the models are trained on."""
    files = [file for topics in (TRAIN, DEV) for file in (topics.topics, topics.qrels)]
    files += [NFCORPUS.docs, *NFCORPUS.encoded("docs"), *TRAIN.encoded("queries")]
    return {str(file.relative_to(SHARED)): _sha(file.read_bytes()) for file in files}


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# Models, and what they make of queries


class Models:
    """Indexes and trained models in a folder, each made when first asked for."""

    def __init__(self, folder: Path, trusted: Sequence[str] = ()) -> None:
        self.folder, self.indexes = folder, results.Indexes(folder)
        self.code = fingerprints()["code"]
        self.trusted = {self.code, *trusted}

    def index(self, topics: Topics) -> str:
        return self.indexes.minilm(topics)

    def config(self, kind: str, seed: int) -> Training:
        """Returns the config with the data's places on this machine."""
        name, changes, _ = KINDS[kind]
        values: dict[str, Any] = {"output": str(self.folder / f"{kind}-{seed}")}
        values |= {"cache": str(self.folder / "data"), "loop.seed": seed, **changes}
        sparse = kind.startswith("sparse")
        values["index"] = self.indexes.splade if sparse else self.index(NFCORPUS)
        if not kind.startswith("tprf"):
            values["texts"] = str(NFCORPUS.docs)
        if sparse:
            values["network.base"] = results.SPLADE
        for part, topics in (("train", TRAIN), ("dev", DEV)):
            values[f"{part}.topics"] = str(topics.topics)
            values[f"{part}.qrels"] = str(topics.qrels)
            queries = {"Splade": {"model": results.SPLADE, "max_length": results.LENGTH}}
            values[f"{part}.queries"] = queries if sparse else {"QueryVectors": vectors(topics)}
        settings = [f"{key}={yaml.safe_dump(value)}" for key, value in values.items()]
        return prf.read_config(CONFIGS / f"{name}.yaml", settings)

    def model(self, kind: str, seed: int) -> Path:
        """Returns a model's folder; trained unless it is there from this config and code."""
        config = self.config(kind, seed)
        path = Path(config.output)
        made = path / "training.json"
        same = made.exists() and read_json(made)["config"] == config.spec()
        if not same or self.made_by(kind, seed) not in self.trusted:
            print(f"training {path.name}", file=sys.stderr)
            prf.train(config, force=path.exists(), progress=True)
            self._code_file(kind, seed).write_text(self.code, encoding="utf-8")
        return path

    def _code_file(self, kind: str, seed: int) -> Path:
        return self.folder / f"{kind}-{seed}.code"

    def made_by(self, kind: str, seed: int) -> str:
        """Returns the fingerprint of the code that trained a model."""
        file = self._code_file(kind, seed)
        return file.read_text("utf-8") if file.exists() else "unknown"

    def record(self, kind: str, seed: int = 1) -> dict[str, Any]:
        record: dict[str, Any] = read_json(self.model(kind, seed) / "training.json")
        return record


def vectors(topics: Topics) -> dict[str, str]:
    table, ids = topics.encoded("queries")
    return {"vectors": str(table), "ids": str(ids)}


class Bench:
    """Runs systems on one query set; the first search is done once."""

    def __init__(self, topics: Topics, models: Models) -> None:
        self.topics, self.models, self.index = topics, models, models.index(topics)
        self.frame, self.qrels = prf.read_topics(topics.topics), prf.read_qrels(topics.qrels)
        self.measures = results.common(topics)
        if topics.collection == POOL:
            self.measures = self.measures[:3]
        self.search = DenseRetriever(self.index)
        self.encoded = QueryVectors(**vectors(topics)).transform(self.frame)
        self.first = self.search.transform(self.encoded)
        head = self.first[self.first["rank"] < READS].reset_index(drop=True)
        self.read = (Vectors(self.index) >> Text(str(topics.docs))).transform(head)

    def plain(self, name: str) -> Evaluation:
        return self._evaluated(self.first, name)

    def fixed(self, stage: Transformer, name: str) -> Evaluation:
        return self._evaluated((stage >> self.search).transform(self.read), name)

    def new_queries(self, kind: str, seed: int, k: int) -> pd.DataFrame:
        """Returns the new queries of a model, from the disk if they were made before."""
        model = self.models.model(kind, seed)
        file = self.models.folder / f"{kind}-{seed}.{self.topics}.{k}.npy"
        stamp = (model / "training.json").stat().st_mtime
        if not file.exists() or file.stat().st_mtime < stamp:
            print(f"{self.topics}: {kind}-{seed}, k={k}", file=sys.stderr)
            stage = TPRF if kind.startswith("tprf") else EncoderPrf
            new = stage(str(model), fb_docs=k, query_alone=True).transform(self.read, self.encoded)
            np.save(file, np.stack(new["query_vec"].tolist()))
        return self.frame.assign(query_vec=column(objects(np.load(file))))

    def trained(self, kind: str, k: int, name: str) -> Evaluations:
        """Returns what all seeds of a model give."""
        return Evaluations(
            name,
            [
                self._evaluated(self.search.transform(self.new_queries(kind, seed, k)), name)
                for seed in range(1, KINDS[kind].seeds + 1)
            ],
        )

    def _evaluated(self, run: pd.DataFrame, name: str) -> Evaluation:
        return prf.evaluate(run, self.qrels, self.measures, topics=self.frame, name=name)


class Evaluations(NamedTuple):
    """A system with several seeds."""

    name: str
    seeds: list[Evaluation]

    @property
    def mean(self) -> Evaluation:
        """Every query's mean over the seeds."""
        tables = [seed.per_query for seed in self.seeds]
        return Evaluation(self.name, sum(tables[1:], tables[0]) / len(tables))


def best_fixed(models: Models) -> dict[str, Transformer]:
    """Returns Average and Rocchio, each with what is best on dev (mean of nDCG@10 and R@100)."""
    dev = Bench(DEV, models)
    kinds: dict[str, dict[str, Transformer]] = {
        "Average": {f"Average, k={k}": AveragePrf(k) for k in CHOICES},
        "Rocchio": {
            f"Rocchio {a:g}/{b:g}, k={k}": Rocchio(k, a, b)
            for a, b in ((0.8, 0.2), (0.6, 0.4), (0.4, 0.6))
            for k in CHOICES
        },
    }
    out: dict[str, Transformer] = {}
    for stages in kinds.values():
        figures = {name: _chosen_by(dev.fixed(stage, name)) for name, stage in stages.items()}
        best = max(figures, key=lambda name: figures[name])
        out[best] = stages[best]
    return out


def _chosen_by(evaluation: Evaluation) -> float:
    mean = evaluation.mean
    return float(mean.iloc[0] + mean.iloc[2]) / 2


# The tables

SYSTEMS: list[tuple[str, str, int]] = [
    ("tprf-control", "no feedback (vectors)", 0),
    ("tprf-gentle", "no feedback (vectors, gentle)", 0),
    *(("tprf", f"TPRF, k={k}", k) for k in (3, 5, 10)),
    ("encoder-control", "no feedback (text)", 0),
    ("encoder", "text encoder, k=3", 3),
    *(("lol-0", f"LoL, λ=0, k={k}", k) for k in LOL_DEPTHS),
    *(("lol-1", f"LoL, λ=1, k={k}", k) for k in LOL_DEPTHS),
]


def effectiveness(models: Models) -> str:
    """Effectiveness"""
    fixed, parts = best_fixed(models), [_how(models)]
    for topics in SETS:
        bench = Bench(topics, models)
        base = [bench.plain("MiniLM"), *(bench.fixed(s, n) for n, s in fixed.items())]
        made = {name: bench.trained(kind, k, name) for kind, name, k in SYSTEMS}
        means = [system.mean for system in made.values()]
        where = results._name(topics)
        parts.append(f"### {where}\n\nMeans of the seeds, against MiniLM:\n")
        parts.append(prf.render(prf.compare([*base, *means]), "markdown") + "\n")
        parts.append("Mean (lowest to highest) over the seeds:\n")
        parts.append(spread(made.values(), bench.measures) + "\n")
        if topics == NFCORPUS:
            parts.append(_against(base, made))
    return "\n".join(parts)


def _against(base: list[Evaluation], made: dict[str, Evaluations]) -> str:
    """Returns how the trained systems stand against each method without training, and control."""
    parts = []
    systems = [made[name].mean for name in ("TPRF, k=3", "TPRF, k=5", "TPRF, k=10")]
    text = [made["text encoder, k=3"].mean]
    for name, own in (
        (base[1].name, [*systems, *text]),
        (base[2].name, [*systems, *text]),
        ("no feedback (vectors)", systems),
        ("no feedback (vectors, gentle)", systems),
        ("no feedback (text)", [*text, made["LoL, λ=1, k=3"].mean, made["LoL, λ=1, k=5"].mean]),
    ):
        against = next((e for e in base if e.name == name), None) or made[name].mean
        parts.append(f"Against {name}:\n")
        parts.append(prf.render(prf.compare([against, *own]), "markdown") + "\n")
    return "\n".join(parts)


def spread(systems: Iterable[Evaluations], measures: Sequence[str]) -> str:
    """Returns the table of means over seeds, with the lowest and highest."""
    lines = [f"| system | {' | '.join(measures)} | seeds |"]
    lines.append(f"| --- |{' ---: |' * (len(measures) + 1)}")
    for system in systems:
        cells = []
        for place in range(len(measures)):
            values = np.array([float(seed.mean.iloc[place]) for seed in system.seeds])
            cells.append(f"{values.mean():.4f} ({values.min():.4f} to {values.max():.4f})")
        lines.append(f"| {system.name} | {' | '.join(cells)} | {len(system.seeds)} |")
    return "\n".join(lines)


def _how(models: Models) -> str:
    lines = [
        "Trained on the 2,590 training queries of NFCorpus, weights chosen on its 324 dev queries. "
        "MiniLM's vectors of documents stay as they are. Settings: TPRF's are the best of eight on "
        "dev (temperature, dropout, scale of the output), which come from a dozen earlier trials "
        "that had shown test figures too; the gentle control's are from those trials; the text "
        "encoder's were chosen on dev alone (pooling, length, rate, temperature); LoL has these. "
        "Of Average and Rocchio, the best of dev (mean of nDCG@10 and R@100) is shown.\n\n"
        "Controls without feedback: the network over vectors with TPRF's settings, the same with "
        "gentler ones that keep nDCG@10, and the text encoder with its settings. LoL's own control "
        "is λ=0, or k=0; it is trained for one epoch with two revisions of each query, the text "
        "encoder for two. Queries of the pool were never seen in training, nor is there anything "
        "like them in it. Tests compare the means over seeds query by query, so they say nothing "
        "of other seeds.\n",
        "| model | config | parameters | updates (kept) | seconds | dev |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for kind, (config, changes, seeds) in KINDS.items():
        records = [models.record(kind, seed) for seed in range(1, seeds + 1)]
        changed = ", ".join(f"{key}={value}" for key, value in changes.items())
        cells = [
            kind,
            f"`{config}.yaml`" + (f" with {changed}" if changed else ""),
            f"{records[0]['parameters']:,}",
            " ".join(f"{r['steps']} ({r['kept_step']})" for r in records),
            " ".join(str(round(r["seconds"])) for r in records),
            f"{records[0]['config']['dev']['measure']} "
            + " ".join(f"{r['dev']:.4f}" for r in records),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


# LoL's claim


def query_losses(
    queries: Any, matrix: Matrix, positives: dict[str, Any], qids: Sequence[str], temperature: float
) -> np.ndarray[Any, Any]:
    """Returns the loss that training minimises for each query that has a positive: (n,)."""
    there = [number for number, qid in enumerate(qids) if len(positives.get(qid, ())) > 0]
    rows = [positives[qids[number]] for number in there]
    owners = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
    with torch.inference_mode():
        losses = full_softmax(
            torch.as_tensor(queries)[there],
            matrix,
            torch.from_numpy(np.concatenate(rows)),
            torch.from_numpy(owners),
            temperature=temperature,
            label="each",
        )
    return np.asarray(losses.numpy(), dtype=np.float64)


def positive_rows(qrels: pd.DataFrame, docnos: Sequence[str]) -> dict[str, Any]:
    row_of = {docno: row for row, docno in enumerate(docnos)}
    good = qrels[(qrels["label"] > 0) & qrels["docno"].isin(set(row_of))]
    return {
        qid: np.array(sorted(row_of[docno] for docno in own), dtype=np.int64)
        for qid, own in good.groupby("qid")["docno"]
    }


def curve(
    losses: Callable[[str, int, int], Any],
    found: Callable[[str, int, int], Evaluation],
    kinds: dict[str, str],
) -> str:
    """Returns the loss and AP at every k, and for how many queries more feedback makes it worse."""
    parts = []
    head = " | ".join(f"k={k}" for k in LOL_DEPTHS)
    for title, digits in (("Mean loss of a query", 4), ("AP@1000", 4)):
        parts.append(f"\n{title}, mean of the seeds:\n\n| λ | {head} |\n| --- |{' ---: |' * 6}")
        for kind, name in kinds.items():
            cells = []
            for k in LOL_DEPTHS:
                values = [
                    losses(kind, seed, k).mean()
                    if "loss" in title
                    else float(found(kind, seed, k).mean.iloc[1])
                    for seed in range(1, KINDS[kind].seeds + 1)
                ]
                cells.append(f"{np.mean(values):.{digits}f}")
            parts.append(f"| {name} | {' | '.join(cells)} |")
    head = " | ".join([*(f"{k} to {k + 1}" for k in range(5)), "0 to 5", "mean of all 15 pairs"])
    for title in ("loss grows", "AP falls"):
        parts.append(
            f"\nShare of queries whose {title} when k grows, mean of the seeds:\n\n"
            f"| λ | {head} |\n| --- |{' ---: |' * 7}"
        )
        for kind, name in kinds.items():
            shares = []
            for seed in range(1, KINDS[kind].seeds + 1):
                if "loss" in title:
                    table = np.stack([losses(kind, seed, k) for k in LOL_DEPTHS])
                else:
                    table = -np.stack(
                        [found(kind, seed, k).per_query.iloc[:, 1] for k in LOL_DEPTHS]
                    )
                pairs = [(k, k + 1) for k in range(5)] + [(0, 5)]
                worse = 1e-5 if "loss" in title else 1e-9  # below that it is rounding
                own = [float((table[b] > table[a] + worse).mean()) for a, b in pairs]
                every = [(a, b) for a in LOL_DEPTHS for b in LOL_DEPTHS if a < b]
                own.append(float(np.mean([(table[b] > table[a] + worse).mean() for a, b in every])))
                shares.append(own)
            cells = " | ".join(f"{100 * share:.1f} %" for share in np.mean(shares, axis=0))
            parts.append(f"| {name} | {cells} |")
    return "\n".join(parts)


def lol(models: Models) -> str:
    """LoL's claim: does more feedback hurt fewer queries?"""
    bench = Bench(NFCORPUS, models)
    index = open_index(bench.index)
    matrix = DenseMatrix(open_table(index))
    positives = positive_rows(bench.qrels, list(index.docnos))
    temperature = models.config("lol-1", 1).loss.temperature
    qids = list(bench.frame["qid"])

    @cache
    def losses(kind: str, seed: int, k: int) -> Any:
        new = np.stack(bench.new_queries(kind, seed, k)["query_vec"].tolist())
        return query_losses(new, matrix, positives, qids, temperature)

    @cache
    def found(kind: str, seed: int, k: int) -> Evaluation:
        run = bench.search.transform(bench.new_queries(kind, seed, k))
        return bench._evaluated(run, kind)

    note = (
        "The dense models above on the 323 test queries of NFCorpus: the loss that training "
        "minimises (cross-entropy over all documents, mean over the query's relevant ones), and "
        "AP. λ=0 is the same training with two revisions of each query that are not compared."
    )
    return note + "\n" + curve(losses, found, {"lol-0": "λ=0", "lol-1": "λ=1"})


def sparse(models: Models) -> str:
    """LoL's sparse form, from splade-tiny"""
    topics = NFCORPUS
    frame, qrels = prf.read_topics(topics.topics), prf.read_qrels(topics.qrels)
    index, measures = models.indexes.splade, results.common(topics)
    search = Impact(index)
    first = (Splade(results.SPLADE, max_length=results.LENGTH) >> search).transform(frame)
    read = Text(str(topics.docs)).transform(first[first["rank"] < 5].reset_index(drop=True))
    lucene, vocabulary = open_lucene(index), load_splade(results.SPLADE).vocabulary
    matrix = open_impacts(lucene, vocabulary, "cpu")
    positives = positive_rows(qrels, list(lucene.docnos))
    column_of = {term: number for number, term in enumerate(vocabulary)}
    temperature = models.config("sparse-lol-1", 1).loss.temperature
    qids = list(frame["qid"])

    @cache
    def new(kind: str, seed: int, k: int) -> pd.DataFrame:
        stage = SparseEncoderPrf(str(models.model(kind, seed)), fb_docs=k, query_alone=True)
        return stage.transform(read, frame)

    @cache
    def losses(kind: str, seed: int, k: int) -> Any:
        table = torch.zeros(len(frame), len(vocabulary))
        for row, toks in enumerate(new(kind, seed, k)["query_toks"]):
            for term, weight in toks.items():
                table[row, column_of[term]] = weight
        table = torch.nn.functional.normalize(table, dim=1)
        return query_losses(table, matrix, positives, qids, temperature)

    @cache
    def found(kind: str, seed: int, k: int) -> Evaluation:
        run = search.transform(new(kind, seed, k))
        return prf.evaluate(run, qrels, measures, topics=frame, name=kind)

    base = prf.evaluate(first, qrels, measures, topics=frame, name="splade-tiny")
    systems = [
        Evaluations(
            f"LoL, λ={kind[-1]}, k={k}",
            [found(kind, seed, k) for seed in range(1, KINDS[kind].seeds + 1)],
        )
        for kind in ("sparse-lol-0", "sparse-lol-1")
        for k in LOL_DEPTHS
    ]
    note = (
        "NFCorpus, test queries, one seed; documents stay as splade-tiny's impact index has them. "
        "Rows k=0 are the control: the same training, read without feedback. The loss is that of "
        "training, of the served (whole) weights at length 1.\n"
    )
    table = prf.render(prf.compare([base, *(system.mean for system in systems)]), "markdown")
    more = curve(losses, found, {"sparse-lol-0": "λ=0", "sparse-lol-1": "λ=1"})
    return "\n".join([note, table, more])


def cost(models: Models) -> str:
    """What a query costs"""
    models_of = {
        "TPRF": str(models.model("tprf", 1)),
        "text encoder": str(models.model("encoder", 1)),
    }
    return cost_learned.table(models_of, models.index(NFCORPUS), NFCORPUS)


SECTIONS = {"effectiveness": effectiveness, "lol": lol, "sparse": sparse, "cost": cost}


def prints(models: Models) -> str:
    """Fingerprints"""
    found = {
        **fingerprints(),
        "data": data_fingerprints(),
        "prepared": prepared_fingerprints(models),
        "trained by code": sorted(
            {models.made_by(k, s) for k, kind in KINDS.items() for s in range(1, kind.seeds + 1)}
        ),
        "versions": versions(),
    }
    return f"```json\n{json.dumps(found, indent=1)}\n```"


def versions() -> dict[str, str]:
    from prf.batch import versions as all_versions

    kept = ("python", "torch", "transformers", "numpy")
    return {name: version for name, version in all_versions().items() if name in kept}


def main() -> None:
    """Makes the sections that were asked for, or trains models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION")
    parser.add_argument("--work", type=Path)
    parser.add_argument(
        "--trust",
        nargs="*",
        default=[],
        metavar="CODE",
        help="fingerprints of older code whose models are taken as they are",
    )
    parser.add_argument("--train", nargs="*", default=[], metavar="NAME-SEED")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = Models(given.work or Path(folder), given.trust)
        for name in given.train:
            kind, _, seed = name.rpartition("-")
            models.model(kind, int(seed))
        if given.train:
            return
        for name in given.sections or SECTIONS:
            text = SECTIONS[name](models)
            results.write(name, text, SECTIONS[name].__doc__ or "", FILE)
            print(f"\n{text}")
        if not given.sections:  # they vouch for all of the file
            results.write("fingerprints", prints(models), prints.__doc__ or "", FILE)


if __name__ == "__main__":
    main()

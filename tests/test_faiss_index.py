"""FAISS indexes beside a dense index, and the folders of Pyserini and pyterrier_dr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import queries

from prf import DenseRetriever, Vectors, build_faiss, build_vectors, export_pyserini
from prf.cli import main
from prf.dense_build import building
from prf.errors import IndexStateError, MissingDependency, PrfWarning, SpecError
from prf.faiss_index import gpus_of, search_faiss
from prf.frames import column, objects
from prf.index import open_index, verify

faiss = pytest.importorskip("faiss")

DIM, DOCS = 32, 1200
DOCNOS = [f"d{(7 * i) % DOCS:04d}" for i in range(DOCS)]
TYPES = ["Flat", "HNSW16", "IVF20,Flat", "PQ8x4", "OPQ8,PQ8x4", "IVF20,PQ8x4", "SQ8", "SQfp16"]


def table() -> np.ndarray:
    """Vectors in clusters, as those of texts are, with a few that are equal."""
    rng = np.random.default_rng(5)
    centres = rng.standard_normal((30, DIM))
    rows = centres[rng.integers(30, size=DOCS)] + 0.6 * rng.standard_normal((DOCS, DIM))
    rows[100:110] = rows[0]
    return rows.astype(np.float32)


VECTORS = table()
QUERIES = VECTORS[::40] + np.float32(0.25)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("faiss") / "ix"
    build_vectors(path, VECTORS, DOCNOS)
    for factory in TYPES:
        build_faiss(path, factory)
    return str(path)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    build_vectors(tmp_path / "small", VECTORS[:300], DOCNOS[:300])
    return tmp_path / "small"


def asked():
    rows = [(f"q{i}", "any", vec) for i, vec in enumerate(QUERIES)]
    return queries(*rows, names="qid query query_vec")


def same(one, two) -> None:
    columns = ["qid", "docno", "score", "rank"]
    assert one[columns].to_dict("list") == two[columns].to_dict("list")


@pytest.mark.parametrize("factory", TYPES)
def test_all_candidates_rescored_are_the_exact_search(index, factory) -> None:
    exact = DenseRetriever(index, k=100)(asked())
    more = {"nprobe": 20} if factory.startswith("IVF") else {}
    found = DenseRetriever(index, k=100, faiss=factory, candidates=DOCS, **more)(asked())
    if factory.startswith("HNSW"):  # no link may lead to a document, of equal ones least of all
        score = exact.set_index(["qid", "docno"])["score"]
        mine = found.set_index(["qid", "docno"])["score"]
        both = score.index.intersection(mine.index)
        assert len(both) > 0.95 * len(score)
        assert (score[both] == mine[both]).all()
        return
    same(found, exact)


@pytest.mark.parametrize("factory", TYPES)
@pytest.mark.parametrize("rescore", [True, False])
def test_batch_and_threads_change_nothing(index, factory, rescore) -> None:
    opened = open_index(index)
    settings = {"candidates": 60, "rescore": rescore}
    whole = search_faiss(opened, factory, QUERIES, 20, threads=2, **settings)
    for row in (0, 7, len(QUERIES) - 1):
        one = search_faiss(opened, factory, QUERIES[row : row + 1], 20, threads=1, **settings)
        part = slice(whole.ptr[row], whole.ptr[row + 1])
        np.testing.assert_array_equal(one.ids, whole.ids[part])
        np.testing.assert_array_equal(one.scores, whole.scores[part])


def test_short_list_is_the_start_of_the_long_one(index) -> None:
    """P3"""
    stage = DenseRetriever(index, k=100, faiss="IVF20,PQ8x4", candidates=100)
    long = stage(asked())
    short = DenseRetriever(index, k=5, faiss="IVF20,PQ8x4", candidates=100)(asked())
    same(short, long[long["rank"] < 5])
    wide = DenseRetriever(index, k=200, faiss="IVF20,PQ8x4", candidates=5)
    same(wide.cut(5)(asked()), wide(asked()).query("rank < 5"))
    own = DenseRetriever(index, k=200, faiss="HNSW16", rescore=False)
    assert own.cut(5) == own


def test_ties_are_by_docno_and_nothing_fills_up(index) -> None:
    """V1"""
    found = DenseRetriever(index, k=2000, faiss="IVF20,Flat", nprobe=1)(asked())
    counts = found.groupby("qid").size()
    assert counts.max() < DOCS
    order = found.sort_values(["qid", "score", "docno"], ascending=[True, False, True])
    for qid, one in order.groupby("qid"):
        assert one["docno"].tolist() == found[found["qid"] == qid]["docno"].tolist()


def test_no_query_and_no_hit(index) -> None:
    assert len(DenseRetriever(index, faiss="SQ8")(asked().iloc[:0])) == 0


def test_more_lists_find_more(index) -> None:
    exact = open_index(index).search(QUERIES, 50)

    def recall(**more) -> float:
        hits = search_faiss(open_index(index), "IVF20,Flat", QUERIES, 50, **more)
        pairs = [set(h.ids[h.ptr[i] : h.ptr[i + 1]]) for h in (hits, exact) for i in range(30)]
        return sum(len(a & b) for a, b in zip(pairs[:30], pairs[30:], strict=True)) / 1500

    assert recall(nprobe=1) < recall() + 1e-9 <= recall(nprobe=20) + 1e-9
    assert recall(nprobe=20) == 1


def test_few_vectors_to_train_on_are_told_and_nothing_is_printed(small, capfd) -> None:
    for factory in ("IVF20,Flat", "OPQ8,PQ8"):
        with pytest.warns(PrfWarning, match=r"300 vectors to train (20|256) centroids"):
            build_faiss(small, factory)
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:FAISS index")  # few vectors, on purpose
def test_same_arguments_give_the_same_file(small) -> None:
    for factory in ("HNSW8", "IVF5,Flat", "PQ8x4"):
        first = build_faiss(small, factory, name="one", force=True)["sha256"]
        assert build_faiss(small, factory, name="two", force=True)["sha256"] == first
    other = build_faiss(small, "IVF5,Flat", name="two", force=True, seed=8)["sha256"]
    assert other != build_faiss(small, "IVF5,Flat", name="one", force=True)["sha256"]


@pytest.mark.filterwarnings("ignore:FAISS index")
def test_meta_says_how_it_was_built(small) -> None:
    build_faiss(small, "IVF16,Flat", train=200, seed=3)
    entry = json.loads((small / "meta.json").read_text())["faiss"]["IVF16,Flat"]
    assert entry["file"] == "faiss-IVF16_Flat.index"
    assert (entry["factory"], entry["train"], entry["seed"]) == ("IVF16,Flat", 200, 3)
    assert entry["parameters"] == {"nprobe": 1}
    assert entry["bytes"] == (small / entry["file"]).stat().st_size
    verify(small)
    data = bytearray((small / entry["file"]).read_bytes())
    data[-1] ^= 1
    (small / entry["file"]).write_bytes(data)
    with pytest.raises(IndexStateError, match=r"faiss-IVF16_Flat\.index has sha256"):
        verify(small)
    (small / entry["file"]).write_bytes(data[:-1])
    with pytest.raises(IndexStateError, match=r"meta\.json says"):
        search_faiss(open_index(small), "IVF16,Flat", QUERIES, 3)
    (small / entry["file"]).unlink()
    with pytest.raises(IndexStateError, match="is missing"):
        search_faiss(open_index(small), "IVF16,Flat", QUERIES, 3)
    assert len(open_index(small)) == 300  # exact search goes on


@pytest.mark.filterwarnings("ignore:FAISS index")
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("Nonsense", "could not parse index string Nonsense"),
        ("PQ7", "FAISS cannot build 'PQ7'"),
        ("IVF999,Flat", "300"),
        ("LSH", "LSH"),
    ],
)
def test_impossible_types_are_named(small, factory, message) -> None:
    """A3"""
    with pytest.raises(SpecError, match=message):
        build_faiss(small, factory)
    assert sorted(os.listdir(small)) == ["docid", "meta.json", "vectors.f32"]
    assert sorted(os.listdir(small.parent)) == ["small"]


def test_explain_says_approximate(index) -> None:
    """P6"""
    assert [str(r) for r in DenseRetriever(index, faiss="SQ8").resources()] == [
        f"dense index {index}",
        "approximate FAISS index SQ8",
    ]


def test_wrong_use_is_told(index, small) -> None:
    build_faiss(small, "SQ8")
    with pytest.raises(IndexStateError, match="holds a FAISS index 'SQ8' already"):
        build_faiss(small, "SQ8")
    with pytest.raises(SpecError, match="would have the file of"):
        build_faiss(small, "SQfp16", name="S/8") if build_faiss(small, "SQ8", name="S,8") else None
    with pytest.raises(IndexStateError, match=r"no FAISS index 'SQ9'; did you mean 'SQ8'"):
        search_faiss(open_index(small), "SQ9", QUERIES, 3)
    with pytest.raises(SpecError, match="nprobe means nothing"):
        search_faiss(open_index(small), "SQ8", QUERIES, 3, nprobe=2)
    with pytest.raises(SpecError, match="ef_search means nothing"):
        search_faiss(open_index(small), "SQ8", QUERIES, 3, ef_search=2)
    with pytest.raises(SpecError, match="candidates is for a FAISS index"):
        DenseRetriever("x", candidates=5)
    with pytest.raises(SpecError, match="HNSW types only"):
        build_faiss(small, "SQ4", ef_construction=50)


@pytest.mark.skipif(
    hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0, reason="there is a GPU"
)
def test_missing_gpu_is_an_error(index) -> None:
    for device in ("cuda", "cuda:0", "cuda:all"):
        with pytest.raises(MissingDependency, match=device):
            DenseRetriever(index, faiss="Flat", device=device)(asked())
    with pytest.raises(SpecError, match="write cpu"):
        gpus_of(faiss, "gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:all"])
@pytest.mark.parametrize("factory", ["Flat", "IVF20,Flat"])
def test_gpu_finds_the_same(index, factory, device) -> None:
    more = {"nprobe": 20} if factory.startswith("IVF") else {}
    stage = DenseRetriever(index, k=100, faiss=factory, candidates=300, device=device, **more)
    same(stage(asked()), DenseRetriever(index, k=100)(asked()))


def test_cosine_index(tmp_path) -> None:
    """V7"""
    build_vectors(tmp_path / "c", VECTORS, DOCNOS, similarity="cosine")
    build_faiss(tmp_path / "c", "SQ8")
    found = DenseRetriever(tmp_path / "c", k=20, faiss="SQ8", candidates=DOCS)(asked())
    same(found, DenseRetriever(tmp_path / "c", k=20)(asked()))


def test_command_line(small, tmp_path, capsys) -> None:
    assert main(["index", str(small), "--faiss", "SQ8", "--faiss", "HNSW8"]) == 0
    assert set(open_index(small).meta["faiss"]) == {"SQ8", "HNSW8"}
    assert main(["index", str(small), "--faiss", "SQ8"]) == 5
    assert main(["index", str(small), "--faiss", "SQ8", "--force"]) == 0
    assert main(["index", str(small), "--faiss", "SQ8", "--with-text"]) == 2
    np.save(tmp_path / "v.npy", VECTORS)
    (tmp_path / "ids").write_text("\n".join(DOCNOS))
    files = ["--vectors", str(tmp_path / "v.npy"), "--ids", str(tmp_path / "ids")]
    assert main(["index", str(tmp_path / "new"), *files, "--faiss", "IVF8,Flat"]) == 0
    assert set(open_index(tmp_path / "new").meta["faiss"]) == {"IVF8,Flat"}
    assert main(["export", str(tmp_path / "out"), str(small), "--faiss", "SQ8"]) == 0
    assert main(["export", str(tmp_path / "out"), str(small)]) == 5
    assert main(["export", str(tmp_path / "out"), str(small), "--force"]) == 0
    assert main(["check", "--index", str(tmp_path / "out")]) == 0
    assert "in the form of Pyserini" in capsys.readouterr().out


KILLED = """
import os, sys
import prf.faiss_index as module
real, count = os.replace, int(sys.argv[2])
def replace(a, b):
    global count
    count -= 1
    if count < 0:
        os._exit(9)
    real(a, b)
os.replace = replace
module.build_faiss(sys.argv[1], "SQ4", name="SQ8", force=True)
"""


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_killed_build_leaves_the_old_one_or_none(small, moment) -> None:
    """X2"""
    build_faiss(small, "SQ8")
    where = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", KILLED, str(small), str(moment)], env=where)
    assert done.returncode == 9
    verify(small)
    assert open_index(small).meta["faiss"].get("SQ8", {}).get("factory", "SQ8") == "SQ8"
    build_faiss(small, "SQ4", name="SQ8", force=True)
    verify(small)
    assert not [name for name in os.listdir(small) if name.endswith(".new")]


def test_two_builds_do_not_meet(small) -> None:
    with building(small), pytest.raises(IndexStateError, match="another process"):
        build_faiss(small, "SQ8")


# Folders of other libraries


def pyserini_folder(path: Path, made, docnos=DOCNOS) -> Path:
    path.mkdir()
    faiss.write_index(made, str(path / "index"))
    (path / "docid").write_text("".join(f"{docno}\n" for docno in docnos), encoding="utf-8")
    return path


def made(factory: str, metric: int = faiss.METRIC_INNER_PRODUCT):
    built = faiss.index_factory(DIM, factory, metric)
    if hasattr(built, "do_polysemous_training"):
        built.do_polysemous_training = False
    built.train(VECTORS)
    built.add(VECTORS)
    return built


def flex_folder(path: Path) -> Path:
    npids = pytest.importorskip("npids")
    path.mkdir()
    VECTORS.tofile(path / "vecs.f4")
    npids.Lookup.build(DOCNOS, str(path / "docnos.npids"), return_self=False)
    meta = {"type": "dense_index", "format": "flex", "vec_size": DIM, "doc_count": DOCS}
    (path / "pt_meta.json").write_text(json.dumps(meta))
    return path


@pytest.mark.parametrize("form", ["flat", "hnsw", "ivf", "flex"])
def test_foreign_folder_is_as_good_as_ours(index, form, tmp_path) -> None:
    types = {"flat": "Flat", "hnsw": "HNSW16", "ivf": "IVF20,Flat"}
    path = tmp_path / form
    if form == "flex":
        flex_folder(path)
    else:
        pyserini_folder(path, made(types[form]))
    expected = DenseRetriever(index)(asked())
    same(DenseRetriever(str(path))(asked()), expected)
    same(DenseRetriever(str(path), backend="faiss")(asked()), expected)
    docs = expected[["qid", "docno"]].head(50)
    ours, theirs = (Vectors(name)(docs)["doc_vec"].tolist() for name in (index, str(path)))
    np.testing.assert_array_equal(theirs, ours)
    verify(path)


def test_coded_vectors_are_decoded_and_said_to_be(index, tmp_path) -> None:
    coded = made("PQ8x4")
    path = pyserini_folder(tmp_path / "pq", coded)
    docs = queries(("q", "any", "d0007", 1.0), names="qid query docno score")
    with pytest.warns(PrfWarning, match="stores coded vectors"):
        vector = Vectors(str(path))(docs)["doc_vec"][0]
    Vectors(str(path))(docs)  # told once
    np.testing.assert_array_equal(vector, coded.reconstruct(1))
    found = DenseRetriever(str(path), k=10)(asked())
    build_vectors(tmp_path / "decoded", coded.reconstruct_n(0, DOCS), DOCNOS)
    same(found, DenseRetriever(str(tmp_path / "decoded"), k=10)(asked()))
    own = DenseRetriever(str(path), k=10, faiss="index", rescore=False)(asked())
    scores, ids = coded.search(QUERIES[:1], 10)
    assert set(own["docno"][:9]) <= {DOCNOS[i] for i in ids[0]}
    np.testing.assert_allclose(own["score"][:10], scores[0], rtol=1e-5)


def test_flat_vectors_stay_on_disk(tmp_path) -> None:
    """V5"""
    opened = open_index(pyserini_folder(tmp_path / "x", made("Flat")))
    assert isinstance(opened.vectors, np.memmap)
    assert not opened.lossy


def test_l2_is_opened_and_not_searched(tmp_path) -> None:
    opened = open_index(pyserini_folder(tmp_path / "x", made("Flat", faiss.METRIC_L2)))
    np.testing.assert_array_equal(opened.get(DOCNOS[:3]), VECTORS[:3])
    with pytest.raises(SpecError, match="L2 distance"):
        opened.search(QUERIES, 3)


# npids leaves a broken file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_foreign_folders_are_named(tmp_path) -> None:
    """X3"""
    path = pyserini_folder(tmp_path / "x", made("Flat"), DOCNOS[:-1])
    with pytest.raises(IndexStateError, match=r"docid has 1,199 lines for 1,200 vectors"):
        verify(path)
    data = (path / "index").read_bytes()
    (path / "index").write_bytes(data[:-5])
    with pytest.raises(IndexStateError, match="the file was cut"):
        open_index(path)
    (path / "index").write_bytes(b"no index at all" * 9)
    with pytest.raises(IndexStateError, match="cannot read"):
        open_index(path)
    flex = flex_folder(tmp_path / "flex")
    (flex / "docnos.npids").unlink()
    with pytest.raises(IndexStateError, match=r"docnos.npids is missing"):
        open_index(flex)
    (flex / "docnos.npids").write_bytes(b"garbage")
    with pytest.raises(IndexStateError, match=r"docnos.npids cannot be read"):
        _ = open_index(flex).docnos
    (flex / "vecs.f4").write_bytes(b"0" * 8)
    with pytest.raises(IndexStateError, match=r"vecs.f4 has 8 bytes"):
        open_index(flex)


def test_flex_without_npids_names_it(tmp_path, monkeypatch) -> None:
    flex = flex_folder(tmp_path / "flex")
    monkeypatch.setitem(sys.modules, "npids", None)
    with pytest.raises(MissingDependency, match="npids"):
        _ = open_index(flex).docnos


def test_nothing_is_built_inside_a_foreign_folder(tmp_path) -> None:
    path = pyserini_folder(tmp_path / "x", made("Flat"))
    with pytest.raises(IndexStateError, match="in the form of Pyserini"):
        build_faiss(path, "SQ8")


def test_export_refuses_what_is_no_such_folder(index, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(IndexStateError, match="not replaced"):
        export_pyserini(tmp_path / "mine", index, force=True)
    assert (tmp_path / "mine" / "notes").read_text() == "keep"
    assert sorted(os.listdir(tmp_path)) == ["mine"]


@pytest.mark.java
@pytest.mark.slow
def test_pyserini_opens_what_is_written_and_finds_the_same(index, tmp_path) -> None:
    from reference import pyserini

    np.save(tmp_path / "q.npy", QUERIES)
    export_pyserini(tmp_path / "flat", index)
    export_pyserini(tmp_path / "hnsw", index, faiss="HNSW16")
    exact = DenseRetriever(index)(asked())
    theirs = pyserini().ask(
        "faiss_search", index=str(tmp_path / "flat"), queries=str(tmp_path / "q.npy"), k=1000
    )
    here = DenseRetriever(str(tmp_path / "flat"))(asked())
    same(here, exact)
    for number, (docnos, scores) in enumerate(theirs):
        ours = exact[exact["qid"] == f"q{number}"]
        np.testing.assert_allclose(ours["score"], scores, atol=1e-4)
        place = dict(zip(docnos, scores, strict=True))
        missing = [s for d, s in zip(ours["docno"], ours["score"], strict=True) if d not in place]
        assert all(abs(score - scores[-1]) < 1e-4 for score in missing)
    graph = pyserini().ask(
        "faiss_search", index=str(tmp_path / "hnsw"), queries=str(tmp_path / "q.npy"), k=50
    )
    stage = DenseRetriever(str(tmp_path / "hnsw"), 50, faiss="index", candidates=50, ef_search=16)
    ours = stage(asked())
    assert [sorted(docnos) for docnos, _ in graph] == [
        sorted(ours[ours["qid"] == f"q{i}"]["docno"]) for i in range(len(QUERIES))
    ]


@pytest.mark.models
@pytest.mark.slow
def test_flex_index_of_pyterrier_dr_opens(index, tmp_path) -> None:
    from reference import pyserini

    np.save(tmp_path / "v.npy", VECTORS)
    np.save(tmp_path / "q.npy", QUERIES)
    theirs = pyserini().ask(
        "flex",
        index=str(tmp_path / "flex"),
        vectors=str(tmp_path / "v.npy"),
        docnos=DOCNOS,
        queries=str(tmp_path / "q.npy"),
        k=1000,
    )
    ours = DenseRetriever(str(tmp_path / "flex"))(asked())
    same(ours, DenseRetriever(index)(asked()))
    for number, (docnos, scores) in enumerate(theirs):
        mine = ours[ours["qid"] == f"q{number}"]
        np.testing.assert_allclose(mine["score"], scores, atol=1e-4)
        assert len(set(docnos) & set(mine["docno"])) >= 998


def test_columns_stay_objects(index) -> None:
    frame = asked().assign(query=column(objects(["x"] * len(QUERIES))))
    assert DenseRetriever(index, k=3, faiss="SQ8")(frame)["docno"].dtype == object

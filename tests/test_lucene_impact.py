"""Impact indexes: scores as the dot product and as Anserini's, weights back, kinds kept apart."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import sparse
from test_lucene import SHARED, ask_pyserini, documents, edit, foreign, listed

from prf import jvm, lucene, lucene_build
from prf.errors import FileFormatError, IndexStateError, SpecError
from prf.vectors_io import read_encoded_queries

pytestmark = pytest.mark.java

ENCODED = SHARED / "msmarco-v1-dl-pool" / "encoded-queries"
Vector = dict[str, int]


class Collection(NamedTuple):
    """Documents with vectors, an index of them, and queries."""

    docs: list[tuple[str, Vector, str]]
    index: lucene.LuceneIndex
    queries: list[dict[str, int]]


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    """NFCorpus with random small weights on its own words and on the published queries' terms."""
    if not SHARED.is_dir():
        pytest.skip(f"no test collections in {SHARED}")
    queries = [
        query
        for model in ("splade-pp-ed", "splade-v3", "unicoil")
        for query in list(read_encoded_queries(ENCODED / f"dl19.{model}.tsv.gz").values())[::3]
    ]
    rng = np.random.default_rng(11)
    words = sorted({term for query in queries for term in query})
    docs: list[tuple[str, Vector, str]] = []
    for docno, text in documents("nfcorpus"):
        terms = [*lucene.analyze([text])[0], *rng.choice(words, 40)]
        docs.append((docno, {term: int(rng.integers(0, 9)) for term in dict.fromkeys(terms)}, text))
    path = tmp_path_factory.mktemp("impact") / "index"
    lucene_build.build_impact(path, docs)
    return Collection(docs, lucene.open_index(path), queries)


def make(path: Path, docs: list[tuple[str, Any, Any]], **options: Any) -> lucene.LuceneIndex:
    lucene_build.build_impact(path, docs, **options)
    return lucene.open_index(path)


def found(index: lucene.LuceneIndex, queries: list[Any], k: int, **options: Any) -> Any:
    return listed(index, index.search_impacts(queries, k, **options))


def matrix(vectors: list[dict[str, int]], columns: dict[str, int]) -> sparse.csr_matrix:
    entries = [
        (row, columns[term], weight)
        for row, vector in enumerate(vectors)
        for term, weight in vector.items()
        if term in columns
    ]
    rows, terms, weights = zip(*entries, strict=True)
    shape = (len(vectors), len(columns))
    return sparse.csr_matrix((np.array(weights, dtype=np.int64), (rows, terms)), shape)


def products(docs: list[tuple[str, Vector, str]], queries: list[Any]) -> Iterator[Any]:
    """Yields docnos and scores above 0 of each query, best first, ties by docno."""
    columns = {term: i for i, term in enumerate({term for _, v, _ in docs for term in v})}
    scores = (
        matrix(queries, columns) @ matrix([vector for _, vector, _ in docs], columns).T
    ).toarray()
    for row in scores:
        hits = [(docs[i][0], int(row[i])) for i in np.flatnonzero(row)]
        yield sorted(hits, key=lambda hit: (-hit[1], hit[0]))


def words_of(index: lucene.LuceneIndex, ids: Any) -> list[dict[str, float]]:
    vectors = index.term_vectors(ids)
    return [
        {
            vectors.vocabulary[term]: tf
            for term, tf in zip(vectors.terms[i:j].tolist(), vectors.tf[i:j].tolist(), strict=True)
        }
        for i, j in zip(vectors.ptr[:-1], vectors.ptr[1:], strict=True)
    ]


# Scores


def test_top_1000_equals_the_dot_product(collection: Collection) -> None:
    expected = list(products(collection.docs, collection.queries))
    ours = found(collection.index, collection.queries, 1000)
    assert ours == [hits[:1000] for hits in expected]
    assert any(len(hits) > 1000 and hits[999][1] == hits[1000][1] for hits in expected)


def test_shorter_lists_and_threads_change_nothing(collection: Collection) -> None:
    full = found(collection.index, collection.queries, 5000, threads=1)
    for k in (1, 2, 10, 100, 1000):
        assert found(collection.index, collection.queries, k, threads=2) == [
            hits[:k] for hits in full
        ]


def test_query_weights_may_be_fractions(tmp_path: Path) -> None:
    index = make(tmp_path / "index", [("a", {"cat": 3, "dog": 1}, ""), ("b", {"cat": 5}, "")])
    assert found(index, [{"cat": 0.5, "dog": 2.25}], 5) == [[("a", 3.75), ("b", 2.5)]]


def test_large_scores_are_exact(tmp_path: Path) -> None:
    index = make(tmp_path / "index", [("a", {"x": 65_535, "y": 1}, ""), ("b", {"x": 65_535}, "")])
    assert found(index, [{"x": 256, "y": 255}], 5) == [[("a", 2**24 - 1), ("b", 65_535 * 256)]]


def test_what_counts_nothing_in_a_query(tmp_path: Path) -> None:
    index = make(tmp_path / "index", [("a", {"cat": 3}, "")])
    assert found(index, [{}, {"cat": 0}, {"cat": -1}, {"Cats": 2}, {"cat": 1e-60}], 5) == [[]] * 5
    with pytest.raises(SpecError, match="query 1: term 'cat' has weight inf"):
        index.search_impacts([{}, {"cat": float("inf")}], 5)
    with pytest.raises(SpecError, match="k=0"):
        index.search_impacts([{"cat": 1}], 0)


IMPACTS = """
    import json, sys
    from pyserini.index.lucene import LuceneIndexReader
    from pyserini.search.lucene import LuceneImpactSearcher
    class AsGiven:
        def encode(self, query):
            return query
    path, queries, docno = json.load(open(sys.argv[1], encoding="utf-8"))
    searcher = LuceneImpactSearcher(path, AsGiven())
    hits = [[(hit.docid, hit.score) for hit in searcher.search(q, 1000)] for q in queries]
    answer = [hits, json.loads(searcher.doc(docno).raw()),
              LuceneIndexReader(path).get_document_vector(docno)]
    json.dump(answer, open(sys.argv[2], "w", encoding="utf-8"))
"""


@pytest.mark.slow
def test_pyserini_opens_the_folder_and_ranks_alike(collection: Collection, tmp_path: Path) -> None:
    docno, vector, text = collection.docs[5]
    question = (str(collection.index.path), collection.queries, docno)
    expected, raw, stored = ask_pyserini(IMPACTS, question, tmp_path)
    ours = found(collection.index, collection.queries, 1000)
    assert [[name for name, _ in hits] for hits in ours] == [
        [name for name, _ in hits] for hits in expected
    ]
    # Anserini takes 1e-6 off for every tie; the scores are whole numbers.
    assert [[score for _, score in hits] for hits in ours] == [
        [round(score) for _, score in hits] for hits in expected
    ]
    kept = {term: weight for term, weight in vector.items() if weight}
    assert raw == {"id": docno, "contents": text, "vector": kept}
    assert stored == kept


def anserini(path: Path, docs: list[tuple[str, Vector, str]], *options: str) -> lucene.LuceneIndex:
    """Builds an index of the vectors with Anserini."""
    source = path.with_name("vectors")
    source.mkdir()
    with gzip.open(source / "part.jsonl.gz", "wt", encoding="utf-8") as file:
        for docno, vector, text in docs:
            file.write(json.dumps({"id": docno, "contents": text, "vector": vector}) + "\n")
    runtime = jvm.find_java()
    assert runtime is not None
    command = [runtime.home / "bin" / "java", "-cp", jvm.find_jar()]
    command += ["io.anserini.index.IndexCollection", "-collection", "JsonVectorCollection"]
    command += ["-generator", "DefaultLuceneDocumentGenerator", "-threads", "2"]
    command += ["-input", source, "-index", path, "-impact", "-pretokenized", *options]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return lucene.open_index(path)


@pytest.mark.slow
def test_index_of_anserini_gives_the_same(collection: Collection, tmp_path: Path) -> None:
    theirs = anserini(tmp_path / "index", collection.docs, "-storeDocvectors", "-storeRaw")
    ours = collection.index
    assert (theirs.meta, theirs.kind) == ({}, None)
    assert theirs.statistics == ours.statistics
    assert found(theirs, collection.queries, 1000) == found(ours, collection.queries, 1000)
    names = [docno for docno, _, _ in collection.docs[:50]]
    assert words_of(theirs, theirs.docids(names)) == words_of(ours, ours.docids(names))
    assert theirs.texts(theirs.docids(names)) == [text for _, _, text in collection.docs[:50]]
    assert listed(theirs, theirs.search([{"cat": 1.0}], 5, 0.9, 0.4))


@pytest.mark.slow
def test_index_of_anserini_without_vectors_is_searched(tmp_path: Path) -> None:
    theirs = anserini(tmp_path / "index", [("b", {"cat": 2}, ""), ("a", {"cat": 2}, "")])
    assert not theirs.has_term_vectors
    assert found(theirs, [{"cat": 3}], 1) == [[("a", 6)]]


# Documents


def test_weights_come_back_from_term_vectors(collection: Collection) -> None:
    rows = range(0, len(collection.docs), 5)
    expected = [
        {term: weight for term, weight in collection.docs[i][1].items() if weight} for i in rows
    ]
    assert words_of(collection.index, rows) == expected
    vectors = collection.index.term_vectors(rows)
    assert vectors.lengths.tolist() == [sum(vector.values()) for vector in expected]
    totals: dict[str, int] = {}
    for _, vector, _ in collection.docs:
        for term, weight in vector.items():
            totals[term] = totals.get(term, 0) + weight
    assert vectors.cf.tolist() == [totals[word] for word in vectors.vocabulary]


ODD = ["a", '"', "##ing", "é", "日本", "\U0001f600", "\uffee", "two words", "nul\0", "x" * 9000]


def test_odd_terms_come_back_unchanged(tmp_path: Path) -> None:
    vector = {term: i + 1 for i, term in enumerate(ODD)}
    index = make(tmp_path / "index", [("d", vector, 'text "quoted" \0\n'), ("e", {"b": 1}, "")])
    assert words_of(index, [0]) == [vector]
    assert found(index, [{term: 1} for term in ODD], 5) == [[("d", vector[t])] for t in ODD]
    assert index.texts([0, 1]) == ['text "quoted" \0\n', ""]
    lucene.verify(index.path)


def test_document_and_query_of_30000_terms(tmp_path: Path) -> None:
    vector = {f"w{i}": i % 7 + 1 for i in range(30_000)}
    index = make(tmp_path / "index", [("all", vector, ""), ("one", {"w5": 1}, "")])
    query = {term: 1 for term in vector}
    assert found(index, [query], 5) == [[("all", sum(vector.values())), ("one", 1)]]
    assert words_of(index, [0]) == [vector]


def test_same_documents_give_the_same_index_whatever_the_threads(
    collection: Collection, tmp_path: Path
) -> None:
    docs = collection.docs[:1500]
    one = make(tmp_path / "one", docs, threads=1)
    two = make(tmp_path / "two", docs[::-1], threads=2)
    assert list(two.docnos) == list(one.docnos)[::-1]
    assert found(one, collection.queries, 500) == found(two, collection.queries, 500)
    again = make(tmp_path / "again", [(d, dict(reversed(v.items())), t) for d, v, t in docs])
    assert again.meta["sha256"] == one.meta["sha256"]


def test_numbers_of_other_types_are_taken_if_whole(tmp_path: Path) -> None:
    vector = {"a": np.int32(3), "b": 2.0, "c": np.float32(5), "d": -1, "e": 0, "f": np.int8(-3)}
    assert words_of(make(tmp_path / "index", [("x", vector, "")]), [0]) == [
        {"a": 3, "b": 2, "c": 5}
    ]


@pytest.mark.parametrize(
    ("vector", "says"),
    [
        ({"cat": 1.5}, "term 'cat' has weight 1.5; .*quantise"),
        ({"cat": float("nan")}, "term 'cat' has weight nan"),
        ({"cat": float("inf")}, "term 'cat' has weight inf"),
        ({"cat": True}, "term 'cat' has weight True"),
        ({"cat": "3"}, "term 'cat' has weight '3'"),
        ({"cat": 65_536}, "term 'cat' has weight 65536; the largest is 65535"),
        ({f"w{i}": 65_535 for i in range(32_769)}, "weights that sum to 2147516415"),
        ({"": 1}, "has an empty term"),
        ({7: 1}, "a term that is not text"),
        ({"\ud800": 1}, "a term that is not text"),
        ({"x" * 32_767: 1}, "of 32767 bytes"),
        ([("cat", 1)], "it must be a dict from term to weight"),
    ],
)
def test_vectors_that_cannot_be_indexed_are_refused(tmp_path: Path, vector: Any, says: str) -> None:
    with pytest.raises(FileFormatError, match=rf"document 2 \(docno 'y'\).*{says}"):
        lucene_build.build_impact(tmp_path / "index", [("x", {"a": 1}, ""), ("y", vector, "")])
    assert list(tmp_path.iterdir()) == []


def test_document_without_weights_is_refused_skipped_or_kept(tmp_path: Path) -> None:
    docs = [("x", {"cat": 1}, ""), ("y", {"cat": 0}, "text"), ("z", {"cat": 1}, "")]
    with pytest.raises(FileFormatError, match=r"\(docno 'y'\) has no term with a weight above 0"):
        lucene_build.build_impact(tmp_path / "index", docs)
    skipped = make(tmp_path / "skip", docs, on_empty="skip")
    assert (list(skipped.docnos), skipped.meta["empty_documents"]) == (["x", "z"], 1)
    kept = make(tmp_path / "keep", docs, on_empty="keep")
    assert list(kept.docnos) == ["x", "y", "z"]
    assert words_of(kept, [1]) == [{}]
    assert found(kept, [{"cat": 1}], 5) == found(skipped, [{"cat": 1}], 5)
    lucene.verify(kept.path)


def test_repeated_docno_and_text_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="docno 'x' stands at documents 1 and 2"):
        lucene_build.build_impact(tmp_path / "index", [("x", {"a": 1}, ""), ("x", {"a": 1}, "")])
    broken: Any = [("x", {"a": 1}, None)]
    with pytest.raises(FileFormatError, match="has text None"):
        lucene_build.build_impact(tmp_path / "index", broken)


# Kinds and metadata


def test_metadata_says_where_the_vectors_are_from(tmp_path: Path) -> None:
    encoder, quantisation = {"model": "splade"}, {"method": "round", "factor": 100}
    index = make(
        tmp_path / "index",
        [("x", {"cat": 1}, "")],
        encoder=encoder,
        quantisation=quantisation,
        source="here",
    )
    meta = json.loads((index.path / "prf.json").read_text(encoding="utf-8"))
    assert (meta["kind"], meta["encoder"], meta["quantisation"], meta["source"]) == (
        "impact",
        encoder,
        quantisation,
        "here",
    )
    assert index.kind == "impact"


def test_encoder_that_json_cannot_express_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"encoder=.*cannot be written as JSON"):
        lucene_build.build_impact(
            tmp_path / "i", [("x", {"a": 1}, "")], encoder={"model": object()}
        )
    with pytest.raises(SpecError, match=r"quantisation=.*cannot be written as JSON"):
        lucene_build.build_impact(
            tmp_path / "i", [("x", {"a": 1}, "")], quantisation={"factor": float("nan")}
        )


def test_verify_notices_other_weights(tmp_path: Path) -> None:
    one = make(tmp_path / "one", [("x", {"cat": 1}, "t")])
    two = make(tmp_path / "two", [("x", {"cat": 2}, "t")])
    lucene.verify(one.path)
    edit(one.path, sha256=two.meta["sha256"])
    with pytest.raises(IndexStateError, match="damaged: sha256"):
        lucene.verify(one.path)


def test_kinds_are_not_confused(tmp_path: Path) -> None:
    impact = make(tmp_path / "impact", [("x", {"cat": 1}, "")])
    lucene_build.build(tmp_path / "text", [("x", "cat")])
    text = lucene.open_index(tmp_path / "text")
    with pytest.raises(IndexStateError, match=r"is of kind 'impact'; use UniCoil"):
        impact.search([{"cat": 1}], 5, 0.9, 0.4)
    with pytest.raises(IndexStateError, match=r"is of kind 'impact'; use UniCoil"):
        impact.analyze(["cat"])
    with pytest.raises(IndexStateError, match=r"is of kind 'lucene'; use BM25"):
        text.search_impacts([{"cat": 1}], 5)


def test_index_of_others_is_searched_either_way(tmp_path: Path) -> None:
    index = foreign(tmp_path / "index", vectors=True, raw=None)
    assert found(index, [{"cat": 2.0}], 5) == [[("a", 2.0), ("b", 2.0)]]
    assert listed(index, index.search([{"cat": 1.0}], 5, 0.9, 0.4))[0]

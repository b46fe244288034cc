"""Readers of learned sparse vectors."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from prf.errors import FileFormatError
from prf.vectors_io import read_encoded_queries, read_vectors_jsonl

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("PRF_SHARED", ROOT.parent / "shared")) / "data"
ENCODED = SHARED / "msmarco-v1-dl-pool" / "encoded-queries"


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_vectors_come_back_as_written(tmp_path: Path, name: str) -> None:
    path = write(
        tmp_path / name,
        '{"id": "007", "contents": "Text", "vector": {"é": 3, "##s": 2.0, "z": 0}, "x": [1]}\n'
        "\n"
        '{"id": 7, "vector": {}}\n',
    )
    assert list(read_vectors_jsonl(path)) == [
        ("007", {"é": 3, "##s": 2, "z": 0}, "Text"),
        ("7", {}, ""),
    ]


def test_folder_is_read_in_the_order_of_names_and_files_as_given(tmp_path: Path) -> None:
    line = '{{"id": "{}", "vector": {{}}}}\n'
    second = write(tmp_path / "b.jsonl.gz", line.format("b"))
    first = write(tmp_path / "a.jsonl", line.format("a"))
    write(tmp_path / "notes.txt", "no vectors")
    assert [docno for docno, _, _ in read_vectors_jsonl(tmp_path)] == ["a", "b"]
    assert [docno for docno, _, _ in read_vectors_jsonl([second, first])] == ["b", "a"]


def test_folder_without_vectors_says_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "notes.txt", "x")
    with pytest.raises(FileFormatError, match=r"holds no \*\.jsonl .*found notes\.txt"):
        list(read_vectors_jsonl(tmp_path))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, found"),
        ('{"vector": {}}', "no field 'id'; found vector"),
        ('{"id": "a"}', "no field 'vector'; found id"),
        ('{"id": "", "vector": {}}', "id is ''"),
        ('{"id": true, "vector": {}}', "id is True"),
        ('{"id": "a", "vector": [0.1, 0.2]}', "vector is .* object of term: weight"),
        ('{"id": "a", "vector": {}, "contents": 5}', "contents is 5"),
        ('{"id": "a", "vector": {"cat": 1.5}}', "term 'cat' has weight 1.5.*quantise"),
        ('{"id": "a", "vector": {"cat": NaN}}', "term 'cat' has weight nan"),
        ('{"id": "a", "vector": {"cat": true}}', "term 'cat' has weight True"),
        ('{"id": "a", "vector": {"cat": "1"}}', "term 'cat' has weight '1'"),
        ('{"id": "a", "vector": {"cat": 1, "cat": 2}}', "'cat' stands twice"),
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "x.jsonl", f'{{"id": "ok", "vector": {{"a": 1}}}}\n{line}\n')
    with pytest.raises(FileFormatError, match=rf"x\.jsonl:2: {says}"):
        list(read_vectors_jsonl(path))


@pytest.mark.parametrize("name", ["q.tsv", "q.tsv.gz"])
def test_repetition_is_weight(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, '9\tcat ##s cat\n\n010\t日本 " a a a\nempty\t\n')
    queries = read_encoded_queries(path)
    assert queries == {"9": {"cat": 2, "##s": 1}, "010": {"日本": 1, '"': 1, "a": 3}, "empty": {}}
    assert list(queries) == ["9", "010", "empty"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("cat dog", "expected qid<TAB>terms, found no tab"),
        ("1\tcat\tdog", "expected qid<TAB>terms, found 2 tabs"),
        ("\tcat", "the qid is empty"),
        ('1\t{"cat": 2}', "the terms are JSON"),
        ("0\tcat", "qid '0' was already given in line 1"),
    ],
)
def test_malformed_query_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "q.tsv", f"0\tcat\n{line}\n")
    with pytest.raises(FileFormatError, match=rf"q\.tsv:2: {says}"):
        read_encoded_queries(path)


def test_file_of_empty_lines_holds_no_queries(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="holds no queries"):
        read_encoded_queries(write(tmp_path / "q.tsv", "\n\n"))


@pytest.mark.skipif(not ENCODED.is_dir(), reason=f"no encoded queries in {ENCODED}")
@pytest.mark.parametrize(("topics", "n"), [("dl19", 43), ("dl20", 54)])
@pytest.mark.parametrize(
    "model", ["splade-pp-ed", "splade-pp-sd", "splade-v3", "unicoil", "unicoil-noexp"]
)
def test_published_queries_are_read(model: str, topics: str, n: int) -> None:
    queries = read_encoded_queries(ENCODED / f"{topics}.{model}.tsv.gz")
    assert len(queries) == n
    assert min(min(query.values()) for query in queries.values()) >= 1

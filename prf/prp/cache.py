"""Answers kept on disk, so that no question is paid for twice.

SQLite and not lines of JSON: two processes may write at once, a killed one leaves no half record,
and a lookup does not read the whole file. Every batch of answers is one transaction, so a killed
run loses the batch it waited for and nothing else. The first answer to a question stays: a
temperature of 0 is not deterministic on every server, but a second run is.

The key is a digest of all that decides an answer: backend, model, prompt, labels, lengths, and the
texts themselves, not their identifiers; so another algorithm, K or rule of consistency uses the
same answers, and a changed text asks anew. The file should be on a local disk, as SQLite's locks
are not to be trusted on some network file systems.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from prf.errors import FileFormatError, IndexStateError
from prf.prp.answers import NORMALISER, Answer, Question

APPLICATION = 0x50525031
"""What marks a SQLite file as a cache of this form ("PRP1")."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, win INTEGER NOT NULL, valid INTEGER NOT NULL, margin REAL,
    raw TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    model TEXT NOT NULL, censored INTEGER NOT NULL, cut INTEGER NOT NULL,
    qid TEXT NOT NULL, first TEXT NOT NULL, second TEXT NOT NULL, time REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS models (
    identity TEXT PRIMARY KEY, fingerprint TEXT NOT NULL
) WITHOUT ROWID;
"""
_MAGIC = b"SQLite format 3\0"
_ANSWER = "win, valid, margin, raw, prompt_tokens, completion_tokens, model, censored, cut"
_AT_ONCE = 500
"""Keys in one lookup; SQLite takes some thousand."""


Key = bytes | Question
"""A digest, or without a file the question itself, which costs nothing to make."""


class Entry(NamedTuple):
    """An answer and whose it was; identifiers are for people, the key has no use for them."""

    key: Key
    answer: Answer
    qid: str
    first: str
    second: str


def canonical(identity: Mapping[str, Any]) -> str:
    """Returns what decides a backend's answers as one line of JSON."""
    return json.dumps(
        {**identity, "normaliser": NORMALISER},
        sort_keys=True,
        ensure_ascii=False,
        separators=(",", ":"),
    )


def question_key(identity: str, question: Question) -> bytes:
    """Returns the digest of a backend's identity (see `canonical`) and the texts it is shown."""
    parts = json.dumps([identity, *question], ensure_ascii=False)
    return hashlib.sha256(parts.encode()).digest()


class Memory:
    """Answers of one run, kept nowhere."""

    def __init__(self) -> None:
        self._answers: dict[Key, Answer] = {}

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.clear()

    def get(self, keys: Sequence[Key]) -> dict[Key, Answer]:
        """Returns the answers that are there."""
        return {key: self._answers[key] for key in keys if key in self._answers}

    def put(self, entries: Iterable[Entry]) -> None:
        """Keeps answers until the run ends."""
        self._answers.update((entry.key, entry.answer) for entry in entries)

    def check_model(self, identity: str, fingerprint: str) -> None:
        """Has nothing to check: one run has one model."""


class AnswerCache:
    """Answers by key; use it in a ``with`` block.

    Raises:
        FileFormatError: If the file is something else, or cannot be opened or written.
    """

    def __init__(self, path: str, read_only: bool = False) -> None:
        self.path = path
        if read_only and not Path(path).exists():
            raise FileFormatError(
                f"cache '{path}' is not there, and offline=True asks no model; name the file "
                "of an earlier run"
            )
        try:
            self._check_file(Path(path))
            self._db = self._opened(read_only)
        except (OSError, sqlite3.Error) as error:
            raise FileFormatError(
                f"cache '{path}' cannot be opened: {error}; name another file"
            ) from error

    def _check_file(self, path: Path) -> None:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        with path.open("rb") as stream:
            start = stream.read(16)
        if start not in (b"", _MAGIC):
            raise FileFormatError(
                f"'{path}' is no SQLite file (it begins with {start!r}); name another cache"
            )

    def _opened(self, read_only: bool) -> sqlite3.Connection:
        if read_only:
            # A recorded cache may lie in a folder that nobody can write to.
            uri = f"file:{quote(str(Path(self.path).absolute()))}?mode=ro&immutable=1"
            db = sqlite3.connect(uri, uri=True)
            self._check(db)
            return db
        db = sqlite3.connect(self.path, timeout=120, isolation_level=None)
        db.execute("PRAGMA busy_timeout = 120000")
        known = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if known:
            self._check(db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute("COMMIT")
        return db

    def _check(self, db: sqlite3.Connection) -> None:
        if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
            raise FileFormatError(
                f"'{self.path}' is a SQLite file of something else; name another cache"
            )

    def __enter__(self) -> AnswerCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def get(self, keys: Sequence[Key]) -> dict[Key, Answer]:
        """Returns the answers that are there."""
        found: dict[Key, Answer] = {}
        for start in range(0, len(keys), _AT_ONCE):
            part = keys[start : start + _AT_ONCE]
            marks = ",".join("?" * len(part))
            rows = self._run(f"SELECT key, {_ANSWER} FROM answers WHERE key IN ({marks})", part)
            for key, win, valid, margin, raw, read, written, model, censored, cut in rows:
                found[key] = Answer(
                    win, bool(valid), margin, raw, read, written, model, bool(censored), cut
                )
        return found

    def put(self, entries: Iterable[Entry]) -> None:
        """Stores answers in one transaction; a question that has one already keeps it."""
        now = time.time()
        rows = [
            (e.key, a.win, a.valid, a.margin, a.raw, a.prompt_tokens, a.completion_tokens, a.model,
             a.censored, a.cut, e.qid, e.first, e.second, now)
            for e in entries
            for a in (e.answer,)
        ]  # fmt: skip
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(
                    f"INSERT OR IGNORE INTO answers (key, {_ANSWER}, qid, first, second, time) "
                    f"VALUES ({','.join('?' * 14)})",
                    rows,
                )
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def check_model(self, identity: str, fingerprint: str) -> None:
        """Remembers a model's weights; refuses others under the same name.

        Raises:
            IndexStateError: If the cache holds answers of other weights.
        """
        self._run("INSERT OR IGNORE INTO models VALUES (?, ?)", (identity, fingerprint))
        known = self._run("SELECT fingerprint FROM models WHERE identity = ?", (identity,))[0][0]
        if known != fingerprint:
            raise IndexStateError(
                f"cache '{self.path}' holds answers of another model of the same name (weights "
                f"{known[:12]}, not {fingerprint[:12]}); name another cache"
            )

    def _run(self, statement: str, values: Sequence[Any]) -> list[Any]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: sqlite3.Error) -> FileFormatError:
        return FileFormatError(
            f"cache '{self.path}': {error}; if it is damaged, move it away and run again"
        )

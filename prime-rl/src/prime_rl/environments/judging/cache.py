"""Answers of judges on disk, in an SQLite file that several processes may share. An entry is there whole, or not."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl.environments.judging.faults import JudgeLost

_WAIT_S = 30.0
"""Seconds to wait for another process that writes."""
_TABLE = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB NOT NULL) WITHOUT ROWID"


def key_of(model: str, body: Mapping[str, Any]) -> bytes:
    """Hash of a request: model, messages and everything that changes the answer. The order of keys does not count."""
    text = json.dumps({**body, "model": model}, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


class AnswerCache:
    """The answers of one judge. Any thread may use it."""

    def __init__(self, file: Path) -> None:
        """Raises JudgeLost if the file cannot be used."""
        self.file = file
        self._lock = threading.Lock()
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Before SQLite makes it: answers quote what the model wrote. Its journals get the same mode.
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._database = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def get(self, key: bytes) -> dict[str, Any] | None:
        """The answer to a request, if it is there. Raises JudgeLost."""
        try:
            with self._lock:
                row = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
            answer = None if row is None else json.loads(row[0])
        except (sqlite3.Error, ValueError) as error:
            raise self._unusable(error) from error
        return answer if isinstance(answer, dict) else None

    def put(self, key: bytes, answer: Mapping[str, Any]) -> None:
        """Raises JudgeLost."""
        try:
            with self._lock:
                entry = (key, json.dumps(answer).encode())
                self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", entry)
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _unusable(self, error: Exception) -> JudgeLost:
        return JudgeLost(
            f"the judge's cache {self.file} cannot be used: {error}; delete the file, or set cache = false"
        )

"""Calls one judge: queue, rate limit, retries, time budget, cache, counters, and the decision that it is lost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from prime_rl.configs.rollouts.judges import JudgeConfig
from prime_rl.utils.engine_keys import is_loopback
from prime_rl.utils.errors import RunError
from prime_rl.utils.limits import allow_connections
from prime_rl.utils.logger import get_logger
from prime_rl.utils.terminal import cut_inside
from prime_rl.utils.waiting import Wait

_WAIT_S = 30.0
"""Seconds to wait for a process that writes."""
_TABLE = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB NOT NULL) WITHOUT ROWID"
MILLION = 1_000_000
RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
"""Retried, like every status from 500."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MAX_ANSWER_BYTES = 16 << 20
_SHOWN_CHARS = 300


class JudgeLost(RunError):
    """The run's failure: a judge cannot be used any more. The run ends with this message."""


class CallFailed(RunError):
    """One call failed, after its retries."""


class CallRefused(RunError):
    """The judge's server refuses this request, for example because the prompt is too long."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _TryAgain(Exception):
    """A request failed, and may succeed if it is repeated."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class JudgeServer:
    """Address and key of a judge."""

    name: str
    url: str
    """Base URL, with `/v1`."""
    key: str | None = field(repr=False)
    key_var: str
    """Environment variable that holds the key, for messages."""


class Judge:
    """Calls one judge. Runs on one event loop."""

    def __init__(
        self,
        server: JudgeServer,
        config: JudgeConfig,
        cache: JudgeCache | None,
        on_lost: Callable[[JudgeLost], None],
        calling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`calling` is a context manager that wraps each call to the server."""
        self.server = server
        self.config = config
        self.total, self.step = Counters(), Counters()
        self._cache = cache
        self._on_lost = on_lost
        self._calling = calling
        self._turns = asyncio.Semaphore(config.max_concurrent)
        self._next_start_s = 0.0
        self._under_way: dict[bytes, asyncio.Task[dict[str, Any]]] = {}
        """Running calls whose answer will be cached, by request."""
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()
        self._failures_in_a_row = 0
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request, from the cache, from an equal running call, or from the server.

        Raises:
            CallRefused: the server refuses this request.
            CallFailed: the server gave no usable answer in time.
            JudgeLost: the judge cannot be used any more.
        """
        wanted = {**self.config.sampling, **{name: value for name, value in body.items() if value is not None}}
        wanted["model"] = self.config.model
        key = key_of(self.config.model, wanted)
        if self._cache is not None:
            if (answer := await asyncio.to_thread(self._kept, key)) is not None:
                self._count(Counters(calls=1, cached=1))
                return answer
            if (task := self._under_way.get(key)) is not None:
                answer = await asyncio.shield(task)
                self._count(Counters(calls=1, cached=1))
                return answer
        task = asyncio.create_task(self._asked(key, wanted))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(key, done))
        if self._cache is not None:
            self._under_way[key] = task
        # A caller that disconnects must not cancel a call that others await, too.
        return await asyncio.shield(task)

    def _ended(self, key: bytes, task: asyncio.Task[dict[str, Any]]) -> None:
        self._tasks.discard(task)
        self._under_way.pop(key, None)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, JudgeLost):
            self._on_lost(error)

    async def _asked(self, key: bytes, body: dict[str, Any]) -> dict[str, Any]:
        async with self._turns:
            await self._wait_for_rate()
            started_s = time.monotonic()
            with self._calling():
                try:
                    answer = await self._with_retries(body)
                except CallFailed as error:
                    raise self._failed(error) from error
            self._failures_in_a_row = 0
            counted = Counters(calls=1, asked_s=time.monotonic() - started_s)
            counted.add_usage(answer.get("usage"))
            self._count(counted)
        if self._cache is not None:
            await asyncio.to_thread(self._cache.put, key, answer)
        return answer

    def _kept(self, key: bytes) -> dict[str, Any] | None:
        assert self._cache is not None
        try:
            return self._cache.get(key)
        except JudgeLost as error:
            self._on_lost(error)
            raise

    def _failed(self, error: CallFailed) -> Exception:
        self._count(Counters(failed=1))
        self._failures_in_a_row += 1
        if self._failures_in_a_row > self.config.tolerated_failures:
            return JudgeLost(f"judge {self.server.name!r} does not answer: {error}")
        return error

    async def _wait_for_rate(self) -> None:
        if self.config.requests_per_minute is None:
            return
        now_s = time.monotonic()
        start_s = max(now_s, self._next_start_s)
        self._next_start_s = start_s + 60 / self.config.requests_per_minute
        await asyncio.sleep(start_s - now_s)

    async def _with_retries(self, body: dict[str, Any]) -> dict[str, Any]:
        last, attempt = "no answer", 0
        try:
            async with asyncio.timeout(self.config.timeout_s):
                for attempt in range(self.config.max_retries + 1):
                    try:
                        return await self._post(body)
                    except _TryAgain as error:
                        last = str(error)
                        if attempt == self.config.max_retries:
                            break
                        self._count(Counters(retries=1))
                        longest = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
                        # Random, because the calls of a batch tend to fail together, and must not return together.
                        pause_s = longest * random.uniform(0.5, 1.0)
                        await asyncio.sleep(pause_s if error.after_s is None else max(pause_s, error.after_s))
                        # A retry is a request like any other.
                        await self._wait_for_rate()
        except TimeoutError:
            limit = f"no usable answer within timeout_s = {self.config.timeout_s} s"
            raise CallFailed(f"{self.server.url}: {limit}; last: {last}") from None
        raise CallFailed(f"{self.server.url}: {last} ({attempt + 1} attempts: max_retries = {self.config.max_retries})")

    async def _post(self, body: dict[str, Any], needs_text: bool = True) -> dict[str, Any]:
        url = f"{self.server.url.rstrip('/')}/chat/completions"
        try:
            async with self._open().post(url, json=body, allow_redirects=False) as response:
                text = await response.content.read(MAX_ANSWER_BYTES)
                while len(text) < MAX_ANSWER_BYTES and (more := await response.content.read(MAX_ANSWER_BYTES)):
                    text += more
                if response.status != 200:
                    raise self._error(response.status, text, response.headers.get("Retry-After"))
        except aiohttp.ClientError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        return _completion(text, needs_text)

    def _error(self, status: int, text: bytes, retry_after: str | None) -> Exception:
        message = f"status {status}: {_message(text)}"
        if status in RETRYABLE_STATUS or status >= 500:
            return _TryAgain(message, _seconds(retry_after))
        where = f"judge {self.server.name!r} at {self.server.url}"
        if status in (401, 403):
            have = "its value is refused" if self.server.key else "it is not set"
            return JudgeLost(f"{where} refuses the key in {self.server.key_var} ({have}): {message}")
        if status in (404, 405) or 300 <= status < 400:
            return JudgeLost(f"{where} does not serve {self.config.model!r}: {message}; correct model or base_url")
        return CallRefused(status, f"the judge refuses the request: {_message(text)}")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {} if self.server.key is None else {"Authorization": f"Bearer {self.server.key}"}
            # Keep-alive ends before uvicorn's 5 s, so that no request meets a connection that closes.
            connector = aiohttp.TCPConnector(limit=allow_connections(self.config.max_concurrent), keepalive_timeout=4.0)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=not is_loopback(urlsplit(self.server.url).hostname or ""),
            )
        return self._session

    def _count(self, counted: Counters) -> None:
        self.total.add(counted)
        self.step.add(counted)

    async def warm(self) -> None:
        """Ask until the judge answers, while its model loads. The answer may lack text: a model may still reason.

        Raises:
            JudgeLost: the judge does not answer within `startup_timeout_s`, or refuses.
        """
        body: dict[str, Any] = {"model": self.config.model, "messages": [{"role": "user", "content": "Say yes."}]}
        # Another server gets only what its user set: OpenAI's reasoning models refuse max_tokens.
        body |= {"max_tokens": 1} if self.config.is_ours else {}
        limit_s = self.config.startup_timeout_s
        wait = Wait(f"judge {self.server.name!r} at {self.server.url}", "", limit_s, "startup_timeout_s")
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    await self._wait_for_rate()
                    try:
                        await self._post({**self.config.sampling, **body}, needs_text=False)
                    except _TryAgain as error:
                        if not self.config.is_ours and not wait.advice:
                            self._warn_of_wait(str(error))
                        wait.advice = f"last: {error}"
                        wait.is_over()  # logs each minute that the wait goes on
                    else:
                        return
                    await asyncio.sleep(FIRST_PAUSE_S)
        except TimeoutError:
            wait.advice = wait.advice or "no answer"
            raise JudgeLost(wait.fault) from None
        except CallRefused as error:
            raise JudgeLost(f"judge {self.server.name!r} at {self.server.url}: {error}") from error

    def _warn_of_wait(self, why: str) -> None:
        """Warn that a server which the run does not start does not answer: it may still load, or never start."""
        name, limit = self.server.name, f"{self.config.startup_timeout_s:g}"
        get_logger().warning(
            f"Judge {name!r} at {self.server.url} does not answer: {why}. Start that server, or correct "
            f"judge.{name}.base_url; the run waits {limit} s for it (judge.{name}.startup_timeout_s)"
        )

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._cache is not None:
            self._cache.close()


def _completion(text: bytes, needs_text: bool) -> dict[str, Any]:
    """Parse a chat completion. Raises _TryAgain if it is not one."""
    try:
        answer = json.loads(text)
        message = answer["choices"][0]["message"]
        usable = isinstance(message.get("content"), str) or bool(message.get("tool_calls"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _TryAgain(f"the answer is not a chat completion: {_message(text)}") from None
    if needs_text and not usable:
        raise _TryAgain("the answer has no text")
    found: dict[str, Any] = answer
    return found


def _message(text: bytes) -> str:
    """The message of an error body, as one printable line."""
    try:
        error = json.loads(text)["error"]
        shown = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, RecursionError):
        shown = text[: 4 * _SHOWN_CHARS].decode("utf-8", "replace")
    line = " ".join("".join(each if each.isprintable() else " " for each in shown).split())
    return cut_inside(line, _SHOWN_CHARS) or "an empty body"


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header. Its other form, a date, is ignored."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86_400 else None


class JudgeCache:
    """Answers of one judge in an SQLite file, which several processes may share. Thread-safe."""

    def __init__(self, file: Path) -> None:
        """Raises JudgeLost if the file cannot be used."""
        self.file = file
        self._lock = threading.Lock()
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Created here with a private mode, because answers quote the model. SQLite's journals inherit the mode.
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._database = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def get(self, key: bytes) -> dict[str, Any] | None:
        """The cached answer to a request, or None. Raises JudgeLost."""
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


def key_of(model: str, body: Mapping[str, Any]) -> bytes:
    """Hash of a request: model, messages and all parameters, in any order of keys."""
    text = json.dumps({**body, "model": model}, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


@dataclass(slots=True)
class Counters:
    """Counts of calls, since the start of the run or of a step."""

    calls: int = 0
    """Answered calls, including those from the cache."""
    cached: int = 0
    """Answered calls that took the answer from the cache or from an equal running call."""
    retries: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of calls to the server."""
    completion_tokens: int = 0
    asked_s: float = 0.0
    """Seconds of all answered calls to the server, including retries, excluding the queue."""

    def add_usage(self, usage: Any) -> None:
        """Add the tokens of an answer. A server that reports no usage adds none."""
        if isinstance(usage, Mapping):
            self.prompt_tokens += _whole(usage.get("prompt_tokens"))
            self.completion_tokens += _whole(usage.get("completion_tokens"))

    def add(self, other: Counters) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def cost(self, prompt_price: float, completion_price: float) -> float:
        """Cost, in the currency of the prices per million tokens."""
        return (self.prompt_tokens * prompt_price + self.completion_tokens * completion_price) / MILLION

    def metrics(self, prefix: str, prompt_price: float, completion_price: float) -> dict[str, float]:
        asked = self.calls - self.cached
        shares = {"cache_hit_rate": self.cached / self.calls} if self.calls else {}
        latency = {"latency_s": self.asked_s / asked} if asked else {}
        values = {
            "calls": self.calls,
            **shares,
            **latency,
            "retries": self.retries,
            "failed_calls": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost": self.cost(prompt_price, completion_price),
        }
        return {f"{prefix}/{name}": float(value) for name, value in values.items()}

    def describe(self, prompt_price: float, completion_price: float) -> str:
        share = f", {self.cached / self.calls:.0%} of them from the cache" if self.calls else ""
        cost = self.cost(prompt_price, completion_price)
        return (
            f"{self.calls:,} calls{share}, {self.retries:,} retries, {self.failed:,} failed; "
            f"{self.prompt_tokens:,} prompt tokens, {self.completion_tokens:,} completion tokens"
            + (f", cost {cost:.4g}" if cost else "")
        )


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0

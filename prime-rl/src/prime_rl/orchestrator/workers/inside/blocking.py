"""Watches an event loop from a thread, and names the environment's function that blocks it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextvars import copy_context
from pathlib import Path
from types import FrameType
from typing import Any

INTERVAL_S = 0.25
SAMPLE_S = 0.1
"""Time between two looks at the stack."""
MIN_SHARE = 1 / 3
"""Share of these looks that must find a function which is named."""
BLOCKED_S = 1.0
"""A loop that is later than this is blocked. Nothing else of the process runs meanwhile: it sends no request to an
engine, and reads no answer."""
WAITS_SHARE = 0.5
"""Code that blocks the loop, and runs or wants to run for less than this share of the time, waits for something."""
ALONE_S = 10.0
"""A process of its own prints what blocks it after this time, because its next answer may never come."""

_INSIDE = Path(__file__).resolve().parent
_PACKAGE = str(_INSIDE.parents[2]) + os.sep
_ENVIRONMENTS = str(_INSIDE.parents[2] / "environments") + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep
_EVENTS = asyncio.events.__file__
"""Where the loop runs its callbacks. Frames before it are those of the program."""
_WRAPPER = str(_INSIDE / "reward_records.py")
"""The file from which reward functions are called."""


class LoopWatch:
    """Measures how late an event loop is, and which code of an environment blocks it.

    A coroutine notes the time every quarter of a second. A thread reads that time, and while it is too old, reads the
    stack of the loop's thread.
    """

    def __init__(
        self, modules: Mapping[str, str], tell: Callable[[str, dict[str, Any]], None] = lambda name, block: None
    ) -> None:
        """`modules` are the modules of the environments that run in the loop, by name. `tell` is called in the thread,
        several times for a long block, with the environment's name (empty if it is not known) and what to add."""
        self._modules = {name: _plain_module(module) for name, module in modules.items()}
        self._tell = tell
        self._delays_s: list[float] = []
        self._blocks: dict[tuple[str, str, str], dict[str, Any]] = {}
        """Blocks since they were taken, by environment, function and place."""
        self._lock = threading.Lock()
        self._beat = 0.0
        self._busy_s = 0.0
        self._ended = threading.Event()

    async def measure(self) -> None:
        """Measure until cancelled."""
        ids = threading.get_ident(), threading.get_native_id()
        thread = threading.Thread(target=self._watch, args=ids, name="loop-watch", daemon=True)
        try:
            self._note()
            thread.start()
            while True:
                await asyncio.sleep(INTERVAL_S)
                late_s = time.monotonic() - self._beat - INTERVAL_S
                with self._lock:
                    self._delays_s.append(late_s)
                self._note()
        finally:
            self._ended.set()

    def take_delays(self) -> list[float]:
        """How late the loop was, in seconds, at each measurement since the last call."""
        with self._lock:
            taken, self._delays_s = self._delays_s, []
        return taken

    def take(self) -> dict[str, Any]:
        """For the answer to the orchestrator: the longest delay since the last call, and the blocks."""
        delays_s = self.take_delays()
        with self._lock:
            blocks, self._blocks = list(self._blocks.values()), {}
        return {"lag_s": max(delays_s, default=0.0), "blocks": blocks}

    def _note(self) -> None:
        self._beat, self._busy_s = time.monotonic(), _busy_s(threading.get_native_id())

    def _watch(self, thread: int, native: int) -> None:
        beat = -1.0
        while not self._ended.wait(SAMPLE_S):
            now, last, busy_s = time.monotonic(), self._beat, self._busy_s
            late_s = now - last - INTERVAL_S
            if late_s < INTERVAL_S:
                continue
            if last != beat:  # another block begins
                beat, counted_until, is_printed = last, last, False
                samples: Counter[tuple[str, str]] = Counter()
                blocks: dict[tuple[str, str], dict[str, Any]] = {}
                num_samples = 0
            frame = sys._current_frames().get(thread)
            found = None if frame is None else self._found(frame)
            num_samples += 1
            if found is not None:
                name, block = found
                samples[name, block["function"]] += 1
                blocks[name, block["function"]] = block
            if late_s < BLOCKED_S or not samples:
                continue
            # Thousands of short calls can follow each other. None of them blocks the loop.
            (key, number), *_ = samples.most_common(1)
            if number < MIN_SHARE * num_samples:
                continue
            waits = (_busy_s(native) - busy_s) / (now - last) < WAITS_SHARE
            block = {**blocks[key], "seconds": now - counted_until, "count": int(counted_until == last), "waits": waits}
            self._count(key[0], block)
            counted_until = now
            if now - last > ALONE_S and not is_printed:
                is_printed = True
                what = f"{block['function']} ({block['place']}) blocks this process, for {now - last:.0f} s so far"
                sys.stderr.write(f"{what}\n")
                sys.stderr.flush()

    def _count(self, name: str, block: dict[str, Any]) -> None:
        self._tell(name, block)
        with self._lock:
            key = name, block["function"], block["place"]
            known = self._blocks.setdefault(key, {**block, "seconds": 0.0, "count": 0})
            known["seconds"] += block["seconds"]
            known["count"] += block["count"]
            known["waits"] = block["waits"]

    def _found(self, innermost: FrameType) -> tuple[str, dict[str, Any]] | None:
        """The environment and its function that run, from the stack. None if no code of an environment does."""
        frames: list[FrameType] = []
        frame: FrameType | None = innermost
        while frame is not None:
            frames.append(frame)
            frame = None if frame.f_code.co_filename == _EVENTS else frame.f_back
        frames.reverse()
        at, name = self._entry(frames)
        if at is None:
            return None
        entry = frames[at]
        file = entry.f_code.co_filename
        # The deepest frame of the same file says which line it is.
        deepest = next(each for each in reversed(frames[at:]) if each.f_code.co_filename == file)
        caller = frames[at - 1].f_code.co_filename if at else ""
        is_called = caller == _WRAPPER or caller.endswith("verifiers/utils/async_utils.py")
        return name, {
            "function": getattr(entry.f_code, "co_qualname", entry.f_code.co_name),
            "place": f"{file}:{deepest.f_lineno}",
            # A plain reward function or tool: threads can run it.
            "is_plain": is_called and not entry.f_code.co_flags & inspect.CO_COROUTINE,
        }

    def _entry(self, frames: list[FrameType]) -> tuple[int | None, str]:
        """Where the environment's code begins, and its name: in one of its modules, or else in code that is neither
        installed nor ours, or else in a reward function."""
        for at, frame in enumerate(frames):
            module = frame.f_globals.get("__name__") or ""
            names = [name for name, own in self._modules.items() if module == own or module.startswith(f"{own}.")]
            if names:
                return at, " or ".join(names)
        only = next(iter(self._modules)) if len(self._modules) == 1 else ""
        for at, frame in enumerate(frames):
            if _is_users(frame.f_code.co_filename):
                return at, only
        for at, frame in enumerate(frames[1:], 1):
            if frames[at - 1].f_code.co_filename == _WRAPPER != frame.f_code.co_filename:
                return at, only
        return None, ""


def _plain_module(module: str) -> str:
    """The module of `owner/my-environment@1.0` or `my_agents:agent`."""
    return module.partition("@")[0].partition(":")[0].rpartition("/")[2].replace("-", "_")


def _busy_s(native: int) -> float:
    """Seconds in which a thread of this process ran, or waited for a processor that others used."""
    try:
        ran_ns, waited_ns, _ = Path(f"/proc/self/task/{native}/schedstat").read_text().split()
    except (OSError, ValueError):  # a kernel without these figures
        return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
    return (int(ran_ns) + int(waited_ns)) / 1e9


def _is_users(file: str) -> bool:
    if file.startswith(_PACKAGE):
        return file.startswith(_ENVIRONMENTS)
    return not file.startswith(("<", _LIBRARY)) and "-packages" + os.sep not in file


def in_threads(function: Callable[..., Any], threads: Executor) -> Callable[..., Any]:
    """A coroutine function that runs a plain function in one of `threads`. A coroutine function stays as it is."""
    if inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(copy_context().run, function, *args, **kwargs)
        value = await asyncio.get_running_loop().run_in_executor(threads, call)
        return await value if inspect.isawaitable(value) else value

    return run

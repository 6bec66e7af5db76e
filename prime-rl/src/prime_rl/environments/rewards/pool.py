"""A pool of worker processes that call reward functions. A worker that exceeds the time limit is killed."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from prime_rl.environments.rewards.wire import Ended, encode, receive, send
from prime_rl.utils.errors import RunError
from prime_rl.utils.limits import usable_cpus
from prime_rl.utils.logger import get_logger

START_LIMIT_S = 300.0
"""Time limit for a worker to import a function. Long: imports are slow on a busy machine."""
PIPE_BYTES = 2**16
"""Capacity of a pipe. A frame of up to this size is written at once, even if the worker does not read."""


class RewardError(RunError):
    """A reward function raised, returned no finite number, or ended its process."""


class RewardTimeout(RewardError):
    """A call of a reward function was ended at its time limit."""


def default_workers() -> int:
    """Half of the CPUs that this process may use, 1 to 8. The inference engine and the trainer need the others."""
    return min(8, max(1, usable_cpus() // 2))


class WorkerEnded(RewardError):
    """The worker process ended during a call."""


class RewardPool:
    """`workers` processes, each with a thread that waits for its replies. Use `shared_pool` to share it."""

    def __init__(
        self, workers: int, start_limit_s: float = START_LIMIT_S, owner: str = "", env: Mapping[str, str] | None = None
    ) -> None:
        self.owner = owner
        """What a shared pool is for; empty: any function."""
        self.env = env or {}
        """Variables of the workers that this process does not have."""
        self.start_limit_s = start_limit_s
        """Time limit for a worker to import a function."""
        self.timeouts: Counter[str] = Counter()
        """Number of calls that were ended at their time limit, by function."""
        self.deaths: Counter[str] = Counter()
        """Number of calls during which the worker process ended, by function."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._slots = [_Slot(self, self._jobs) for _ in range(workers)]
        for slot in self._slots:
            slot.start()

    def __len__(self) -> int:
        return len(self._slots)

    def processes(self) -> list[int]:
        """Process ids of the running workers."""
        return [slot.process.pid for slot in self._slots if slot.process is not None and slot.process.poll() is None]

    def describe(self, path: str, args: dict[str, Any] | None = None) -> Future[dict[str, Any]]:
        """Import a function in a worker. `args` are the keyword arguments of its calls.

        The future has the result of `worker.describe`, or raises RewardError.
        """
        request = {"do": "describe", "fn": path, "args": args or {}, "sys_path": _sys_path()}
        return self._submit(path, request, self.start_limit_s)

    def call(self, path: str, given: dict[str, Any], timeout_s: float) -> Future[float]:
        """Call a function. The future has its value, or raises RewardTimeout or RewardError.

        The time limit excludes the wait in the queue and a worker's first import of the function.
        """
        return self._submit(path, {"do": "call", "fn": path, "given": given}, timeout_s)

    def call_many(self, path: str, args: dict[str, Any], timeout_s: float) -> Future[list[float]]:
        """Call a function that returns several values. The future is that of `call`."""
        request = {"do": "call", "many": True, "fn": path, "given": {"args": args}}
        return self._submit(path, request, timeout_s)

    def _submit(self, path: str, request: dict[str, Any], timeout_s: float) -> Future[Any]:
        job = _Job(path, request, timeout_s)
        self._jobs.put(job)
        return job.result

    def close(self) -> None:
        """Kill the workers, including those that are in a call."""
        for slot in self._slots:
            slot.end()
            self._jobs.put(None)
        for slot in self._slots:
            slot.join()


class _Job:
    def __init__(self, path: str, request: dict[str, Any], timeout_s: float) -> None:
        self.path = path
        self.request = request
        self.timeout_s = timeout_s
        self.result: Future[Any] = Future()


class _Slot(threading.Thread):
    """A thread that owns one worker at a time. It lives as long as the pool: a worker dies with its parent thread."""

    def __init__(self, pool: RewardPool, jobs: queue.SimpleQueue[_Job | None]) -> None:
        super().__init__(name="reward worker", daemon=True)
        self._pool = pool
        self._jobs = jobs
        self._is_closed = False
        self._imported: set[str] = set()
        """Functions that the worker has imported, or tried to."""
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        self._ensure()
        while (job := self._jobs.get()) is not None:
            if not job.result.set_running_or_notify_cancel():
                continue
            try:
                job.result.set_result(self._do(job))
            except Exception as error:  # noqa: BLE001 - the caller gets it from the future
                job.result.set_exception(error)
            self._ensure()
        self.end()

    def end(self) -> None:
        """Kill the worker and the processes that its functions started. Thread-safe."""
        self._is_closed = True
        self._kill()

    def _do(self, job: _Job) -> Any:
        frame = encode(job.request)
        process = self._ensure()
        if process is None:
            raise RewardError("the pool of reward workers is closed")
        if job.request["do"] == "call":
            self._import(process, job.path)
        else:
            self._imported.add(job.path)
        deadline = time.monotonic() + job.timeout_s
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with _interrupted_at(deadline, process) if len(frame) > PIPE_BYTES else contextlib.nullcontext():
                send(process.stdin.fileno(), frame)
            reply = receive(process.stdout.fileno(), deadline)
        except TimeoutError:
            self._kill()
            self._pool.timeouts[job.path] += 1
            raise RewardTimeout(f"it ran for {job.timeout_s:g} s and was ended") from None
        except Ended:
            status = self._kill()
            if time.monotonic() >= deadline:
                self._pool.timeouts[job.path] += 1
                raise RewardTimeout(f"it ran for {job.timeout_s:g} s and was ended") from None
            self._pool.deaths[job.path] += 1
            cause = f"exit code {status}"
            if status is not None and status < 0:
                cause = f"signal {signal.Signals(-status).name}"
            raise WorkerEnded(f"its worker process ended ({cause})") from None
        if "error" in reply:
            raise RewardError("\n".join(filter(None, [reply.get("traceback", "").rstrip(), reply["error"]])))
        return reply["described"] if "described" in reply else reply["value"]

    def _ensure(self) -> subprocess.Popen[bytes] | None:
        """The running worker, started if necessary. None if the pool is closed."""
        if self._is_closed or (self.process is not None and self.process.poll() is None):
            return None if self._is_closed else self.process
        self._kill()
        command = [sys.executable, "-m", "prime_rl.environments.rewards.worker"]
        env = {**os.environ, **self._pool.env, "PYTHONPATH": os.pathsep.join(_sys_path())}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, env=env)
        self.process, self._imported = process, set()
        return process

    def _import(self, process: subprocess.Popen[bytes], path: str) -> None:
        """Have the worker import a function, once. If the import fails, the call that follows reports it."""
        if path in self._imported or process.poll() is not None:
            return
        self._imported.add(path)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin.fileno(), encode({"do": "import", "fn": path, "sys_path": _sys_path()}))
            receive(process.stdout.fileno(), time.monotonic() + self._pool.start_limit_s)
        except (Ended, TimeoutError):
            get_logger().warning(f"a reward worker ended while it imported {path!r}")
            with contextlib.suppress(
                ProcessLookupError
            ):  # its late reply would be taken for the reply to the next call
                os.killpg(process.pid, signal.SIGKILL)

    def _kill(self) -> int | None:
        """Kill the worker and the processes that its functions started. Returns its exit status."""
        process = self.process
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return status


def _sys_path() -> list[str]:
    """Folders in which a worker looks for modules: those of this process, an environment's folder among them.

    Each first import sends them too: an environment that is loaded after the worker started adds its own.
    """
    return [each for each in sys.path if each]


@contextlib.contextmanager
def _interrupted_at(deadline: float, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the worker at the deadline while the block writes to it: if it does not read, the write blocks."""
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Shared:
    """The shared pools of this process by number of workers and owner, with the number of their users."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pools: dict[tuple[int, str], RewardPool] = {}
        self.users: Counter[tuple[int, str]] = Counter()


_SHARED = _Shared()


def shared_pool(workers: int | None = None, owner: str = "", env: Mapping[str, str] | None = None) -> RewardPool:
    """The process-wide pool of an owner with this many workers. Call `release` once for each call of this function."""
    key = workers or default_workers(), owner
    with _SHARED.lock:
        if key not in _SHARED.pools:
            _SHARED.pools[key] = RewardPool(key[0], owner=owner, env=env)
        _SHARED.users[key] += 1
        return _SHARED.pools[key]


def release(pool: RewardPool) -> None:
    """Close a shared pool when its last user releases it. Pools that are not shared stay open."""
    key = len(pool), pool.owner
    with _SHARED.lock:
        if _SHARED.pools.get(key) is not pool:
            return
        _SHARED.users[key] -= 1
        if _SHARED.users[key] > 0:
            return
        _SHARED.pools.pop(key, None)
    pool.close()

"""A process of a launch: its heartbeat, its clearance to load a model, its completion, and its end with the launch.

Launcher and processes meet in files. Their paths come in environment variables; a process that no launcher has started
has none of them, and everything here does nothing in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import prime_rl
from prime_rl.run.paths import TRACE_VARIABLE
from prime_rl.utils.scratch import LAUNCH_VARIABLE, OWNER_LOCK
from prime_rl.utils.terminal import cut_inside

# The heartbeat. Each process has a file, `OUT/control/<process>.beat`. Its first line is overwritten in place; what
# follows is left from longer lines. A process writes when it makes progress, never by a timer, which would go on while
# the process hangs. A write takes a few microseconds and is not flushed to disk.


HEARTBEAT_VARIABLE = "BEAT_FILE"
"""Environment variable of a process: the file of its heartbeat."""

ANYONE = "*"
"""`Heartbeat.waits_for` of a server without a request: it is idle, and no other process is to blame for that."""

SERVERS_VARIABLE = "INFERENCE_SERVERS"
"""Environment variable of a process that uses several inference servers: their names by URL, as JSON."""

MAX_WORDS_CHARS = 300
TICK_INTERVAL_S = 1.0
"""Ticks that follow a record sooner are not written."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Activity of a process when it last made progress."""

    count: int
    """Number of records so far. A higher one is progress."""
    at_s: float
    """Time of the record, in seconds since the epoch."""
    doing: str
    waits_for: str | None = None
    """The process that it waits for, by name, or `ANYONE`. None if it works."""
    is_started: bool = True
    """False until the process has done everything that happens once: imports, loading, compilation."""
    pids: Sequence[int] = ()
    """The process, and others that work for it. If a signal stops one of them, the work stops."""


class HeartbeatWriter:
    """Writes the heartbeat of this process. Without a file it does nothing. Any thread may use it."""

    def __init__(self, file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fd = None if file is None else _opened(file)
        self._count = 0
        self._written_s = 0.0
        self._doing = "starting"
        self._waits_for: str | None = None
        self._is_started = False
        self._calls: dict[str, int] = {}
        self._counting = threading.Lock()
        self._pids = [os.getpid()]
        self._followers: list[Callable[[str, str | None], None]] = []

    def follow(self, follower: Callable[[str, str | None], None]) -> None:
        """Call `follower` with everything that is said, beginning with what was said last."""
        self._followers.append(follower)
        follower(self._doing, self._waits_for)

    def say(self, doing: str, waits_for: str | None = None) -> None:
        """Report what the process does from now on. A repeated text does not count as progress."""
        if (doing, waits_for) != (self._doing, self._waits_for):
            self._doing, self._waits_for = doing, waits_for
            self._write()
            for follower in self._followers:
                follower(doing, waits_for)

    def tick(self) -> None:
        """Report progress in what was said last."""
        if self._fd is not None and self._clock() - self._written_s >= TICK_INTERVAL_S:
            self._write()

    def started(self) -> None:
        """Report that everything that happens once is done. From now on `stall.timeout_s` holds."""
        if not self._is_started:
            self._is_started = True
            self._write()

    def include(self, pids: Iterable[int]) -> None:
        """Report that other processes do the work of this one."""
        self._pids += pids
        self._write()

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Report that the process waits for another during the block, unless it waits for something else."""
        if self._count_calls(name, 1) == 1:
            self._write()
        try:
            yield
        finally:
            if self._count_calls(name, -1):
                self.tick()
            else:
                self._write()

    def _count_calls(self, name: str, change: int) -> int:
        with self._counting:
            count = self._calls.get(name, 0) + change
            self._calls[name] = count
            if not count:
                del self._calls[name]
            return count

    def _write(self) -> None:
        if self._fd is None:
            return
        self._count += 1
        self._written_s = self._clock()
        with self._counting:
            # The one that is called for the longest time without a gap.
            called = next(iter(self._calls), None)
        waits_for = self._waits_for or called
        words = cut_inside(self._doing, MAX_WORDS_CHARS)
        record = json.dumps([self._count, time.time(), words, waits_for, self._is_started, self._pids]).encode()
        # A full disk must not end the process.
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, record + b"\n", 0)


def _opened(file: Path) -> int | None:
    try:
        return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # a full disk must not end the process here, either
        return None


@functools.cache
def own_beats() -> HeartbeatWriter:
    """The heartbeat of this process. It goes nowhere in a process that no launcher has started."""
    file = os.environ.get(HEARTBEAT_VARIABLE)
    return HeartbeatWriter(None if file is None else Path(file))


def replica_name(replica: int) -> str:
    """Process and log of an inference server of a launch: `inference`, `inference_1` and so on."""
    return f"inference_{replica}" if replica else "inference"


def is_replica(name: str) -> bool:
    """Whether a process is an inference server."""
    return re.fullmatch(r"inference(_\d+)?", name) is not None


def server_name(url: str) -> str:
    """The process that serves a URL. A wait for `inference` may be for any server of the launch."""
    return _server_names().get(url.rstrip("/"), replica_name(0))


@functools.cache
def _server_names() -> dict[str, str]:
    return dict(json.loads(os.environ.get(SERVERS_VARIABLE, "{}")))


def helper_heartbeat_env(name: str) -> dict[str, str]:
    """Variables for a process that helps this one: its heartbeat is progress of this process."""
    file = os.environ.get(HEARTBEAT_VARIABLE)
    # A trace belongs to one process.
    return {} if file is None else {HEARTBEAT_VARIABLE: f"{file}+{name.replace('/', '--')}", TRACE_VARIABLE: ""}


def read_heartbeats(file: Path) -> Iterator[Heartbeat]:
    """The newest heartbeat of a process, followed by those of its helpers. A process that has not begun has none."""
    helpers: list[Path] = []
    # A network file system may have a stale handle of the directory for a while.
    with contextlib.suppress(OSError):
        helpers = sorted(file.parent.glob(f"{file.name}+*"))
    for each in (file, *helpers):
        # Missing, or being written.
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield Heartbeat(*json.loads(each.read_bytes().partition(b"\n")[0]))


def clear_heartbeats(file: Path) -> None:
    """Remove the heartbeats of an earlier launch, and make their directory."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for each in (file, *file.parent.glob(f"{file.name}+*")):
        each.unlink(missing_ok=True)


# Clearance: an engine does not load its model until the environments of its run have been checked. Its process starts
# at once, because its imports take as long as those of the environments.


CLEARANCE_VARIABLE = "ENGINE_WAITS_FOR"
"""Environment variable of a server: the file that appears when it may load its model."""
_LOOK_S = 0.05


def wait_for_clearance(env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Return when the file that `env` names exists, or at once if it names none. `say` receives a line about a wait.

    There is no time limit: the launcher stops the server if the process that checks the environments ends.
    """
    file = env.get(CLEARANCE_VARIABLE)
    if file is not None and not Path(file).exists():
        _wait(Path(file), say)
    own_beats().say("loading the model")


def _wait(file: Path, say: Callable[[str], None]) -> None:
    own_beats().say("waiting until the environments are checked", waits_for="orchestrator")
    say(f"The model loads when the orchestrator has checked the environments and made {file}")
    while not file.exists():
        time.sleep(_LOOK_S)


def give_clearance(file: Path) -> None:
    """Let the engine load its model."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


# Completion: a process has done all of its work, or refuses the run. Exit code 0 is not enough: the code of an
# environment, or a library, may call `sys.exit(0)` or `os._exit(0)` at any time.


COMPLETION_VARIABLE = "COMPLETION_MARKER"
"""Environment variable of a process: the file that it makes when its work is done."""
REFUSED_EXIT_CODE = 2
"""Exit code of a process that refuses the run as configured, and would refuse it again."""

TRAINER_VARIABLE = "TRAINER_COMPLETION"
"""Environment variable of an evaluator next to a training: the file that the trainer makes when it is done."""


def report_completion() -> None:
    """Make the file that the launcher looks for. Does nothing in a process that no launcher has started."""
    marker = os.environ.get(COMPLETION_VARIABLE)
    if marker is not None:
        Path(marker).touch()


def clear_completion(marker: Path) -> None:
    """Remove the marker of an earlier launch, and make its directory."""
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)


# The lifeline ends a launch whose launcher and guard were both killed: the work falls to its children.
#
# Launcher and guard hold a lock on the launch's directory. A thread in each child waits for that lock. It gets it once
# both are gone, and starts a new guard, which ends the child too. The death of a child's parent continues it if it was
# stopped (SIGSTOP): a stopped child never ends.


_GUARD = Path(prime_rl.__file__).parent / "launch" / "reaper.py"
_PR_SET_PDEATHSIG = 1


def end_with_launch(environ: Mapping[str, str] = os.environ) -> None:
    """Watch over the launch that started this process, if one did. Call it first in `main`."""
    directory = Path(environ.get(LAUNCH_VARIABLE, ""))
    with contextlib.suppress(OSError):
        lock = os.open(directory / OWNER_LOCK, os.O_RDWR)
        _continue_when_parent_dies()
        Thread(target=_watch, args=(directory, lock), name="lifeline", daemon=True).start()


def _continue_when_parent_dies() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def _watch(directory: Path, lock: int) -> None:
    # Shared, so that a child that hangs with the lock does not keep the others from it.
    fcntl.flock(lock, fcntl.LOCK_SH)
    if directory.exists():
        start_guard(directory, lock, stdin=subprocess.DEVNULL)


def start_guard(directory: Path, *held: int, stdin: int) -> subprocess.Popen[bytes]:
    """A guard of the launch, which keeps the descriptors `held` open, and works once its stdin ends."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_GUARD), str(directory)],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Not one of the processes that it ends.
        env={name: value for name, value in os.environ.items() if name != LAUNCH_VARIABLE},
        start_new_session=True,
        pass_fds=held,
    )

"""Ends a launch whose launcher and guard were both killed: the work falls to its children.

Launcher and guard hold a lock on the launch's directory. A thread in each child waits for that lock. It gets it once
both are gone, and starts a new guard, which ends the child too. The death of a child's parent continues it if it was
stopped (SIGSTOP): a stopped child never ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Thread

import prime_rl
from prime_rl.utils.pydantic_config.environment import LAUNCH_VARIABLE
from prime_rl.utils.scratch import OWNER_LOCK

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

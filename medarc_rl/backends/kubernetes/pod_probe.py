"""`python -m medarc_rl.backends.kubernetes.pod_probe started|live|ready OUT`: exits with 0 or 1, for a pod's probes.

The launcher touches `OUT/run.lock` every ten seconds, also while a step takes hours. Hangs of its processes are its own
business: it ends the run with the name of the process.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from prime_rl.run.lock import LOCK_NAME, Holder
from prime_rl.run.process import read_heartbeats

MAX_SILENCE_S = 120.0
"""A launcher that has not touched its lock for longer has stopped, or its disk has."""


def started(out: Path, now_s: float) -> str | None:
    """Why the launcher does not hold the run's directory yet; None if it does."""
    if Holder.read(out / LOCK_NAME) is None:
        return "the launcher has not started yet"
    return _silence(out, now_s)


def live(out: Path, now_s: float) -> str | None:
    """Why the launcher is not alive. One that has released the run's directory is ending."""
    return None if Holder.read(out / LOCK_NAME) is None else _silence(out, now_s)


def ready(out: Path, now_s: float) -> str | None:
    """Why the run is not at work: processes that import or load."""
    if fault := started(out, now_s):
        return fault
    newest = {file.stem: next(read_heartbeats(file), None) for file in sorted((out / "control").glob("*.beat"))}
    waiting = [name for name, beat in newest.items() if beat is None or not beat.is_started]
    if not newest:
        return "no process has begun"
    return f"still starting: {', '.join(waiting)}" if waiting else None


def _silence(out: Path, now_s: float) -> str | None:
    try:
        silent_s = now_s - (out / LOCK_NAME).stat().st_mtime
    except OSError as error:
        return f"the lock cannot be read: {error.strerror}"
    return f"the launcher has not reported for {silent_s:.0f} s" if silent_s > MAX_SILENCE_S else None


_CHECKS = {"started": started, "live": live, "ready": ready}


def main(words: list[str]) -> int:
    if len(words) != 2 or words[0] not in _CHECKS:
        sys.stderr.write(f"usage: probe {'|'.join(_CHECKS)} OUT\n")
        return 2
    fault = _CHECKS[words[0]](Path(words[1]), time.time())
    if fault is not None:
        # Kubernetes shows it in the pod's events.
        sys.stdout.write(f"{fault}\n")
    return 0 if fault is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

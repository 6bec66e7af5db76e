"""A directory of caches that belongs to one launch alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_PREFIX = "medarc-rl-"
_LOCK = "launch.lock"


@contextlib.contextmanager
def private_caches(env: Mapping[str, str]) -> Iterator[Path]:
    """A new directory, mode 0700, below `$SLURM_TMPDIR` or the system's temporary one; removed at the end.

    A launch that was killed together with its guard, as Slurm does after its own grace, leaves its directory behind:
    the next one of the same user on that node removes it. A lock tells it from those in use.
    """
    slurm_tmp = Path(env.get("SLURM_TMPDIR") or "/nonexistent")
    base = slurm_tmp if os.access(slurm_tmp, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    _remove_abandoned(base)
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    try:
        with (root / "new.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Nobody ever sees the lock file without its lock.
            (root / "new.lock").rename(root / _LOCK)
            yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)  # a network file system may still hold a deleted file's stub


def cache_env(root: Path, child: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment that moves a child's caches of compiled code below `root`.

    A compile cache that `env` names stays where it is, warm from run to run. Downloaded models stay in the user's
    cache: HF_HOME is set, because Hugging Face libraries would otherwise follow XDG_CACHE_HOME.
    """
    directories = {"XDG_CACHE_HOME": root / child / "xdg"}
    for name, directory in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        if not env.get(name):
            directories[name] = root / child / directory
    user_caches = env.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    hf_home = env.get("HF_HOME") or str(Path(user_caches) / "huggingface")
    return {name: str(path) for name, path in directories.items()} | {"HF_HOME": hf_home}


def _remove_abandoned(base: Path) -> None:
    for root in base.glob(f"{_PREFIX}*"):
        # No lock file: its owner is just about to make one. Another user's directory cannot be read.
        with contextlib.suppress(OSError):
            if root.stat().st_uid == os.getuid() and _is_unlocked(root / _LOCK):
                shutil.rmtree(root, ignore_errors=True)


def _is_unlocked(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True

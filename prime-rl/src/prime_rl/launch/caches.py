"""Caches of compiled code: private ones for a launch, and one of bytecode for all launches of a user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

_PREFIX = "medarc-rl-"
_LOCK = "launch.lock"


@contextlib.contextmanager
def private_caches(env: Mapping[str, str]) -> Iterator[Path]:
    """Make a directory with mode 0700 in `$SLURM_TMPDIR` or the system's temporary directory, and remove it at the end.

    If a launch is killed together with its guard, as Slurm does after its grace period, its directory remains. The same
    user's next launch on that node removes it. A lock marks directories in use.
    """
    slurm_tmp = Path(env.get("SLURM_TMPDIR") or "/nonexistent")
    base = slurm_tmp if os.access(slurm_tmp, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    _remove_abandoned(base)
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    try:
        with (root / "new.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The lock file never appears without its lock.
            (root / "new.lock").rename(root / _LOCK)
            yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)  # a network file system may still hold a deleted file's stub


def cache_env(root: Path, child: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment that moves a child's caches of compiled code into `root`.

    A compile cache that `env` names is kept, so that it stays warm between runs. Downloaded models stay in the user's
    cache: HF_HOME is set, because Hugging Face libraries would otherwise follow XDG_CACHE_HOME.
    """
    directories = {"XDG_CACHE_HOME": root / child / "xdg"}
    for name, directory in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        if not env.get(name):
            directories[name] = root / child / directory
    user_caches = env.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    hf_home = env.get("HF_HOME") or str(Path(user_caches) / "huggingface")
    return {name: str(path) for name, path in directories.items()} | {"HF_HOME": hf_home}


def packages_are_compiled() -> bool:
    """Whether the environment's packages came with bytecode, or have been imported by a Python that keeps it."""
    torch = PathFinder.find_spec("torch")
    return torch is None or torch.cached is None or Path(torch.cached).exists()


def bytecode_env(env: Mapping[str, str], is_compiled: bool) -> dict[str, str]:
    """The environment that lets children keep bytecode where `env` forbids Python to write it next to the source.

    Without bytecode each child compiles torch and Transformers again, which takes most of its start. With
    `is_compiled` there is bytecode already, and nothing changes.
    """
    if is_compiled or not env.get("PYTHONDONTWRITEBYTECODE"):
        return {}
    user_caches = env.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    kept = env.get("PYTHONPYCACHEPREFIX") or str(Path(user_caches) / "prime-rl" / "bytecode")
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": kept}


def _remove_abandoned(base: Path) -> None:
    for root in base.glob(f"{_PREFIX}*"):
        # Without a lock file, its owner is about to make one. Another user's directory cannot be read.
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

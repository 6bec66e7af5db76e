"""The user's cache of compiled code, which launches share, and the memory allocator of the processes that compute.

Compilers key what they keep by source and options. A directory for each combination of versions and hardware keeps
apart what they would mix, for example machine code for the processors of two nodes with one home directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prime_rl.interpreters import VENVS_VARIABLE, venvs_root
from prime_rl.utils.errors import NotPrivate
from prime_rl.utils.files import locked_file
from prime_rl.utils.private import home_directory, home_env

CACHE_VARIABLE = "PRIME_RL_CACHE"
LIMIT_BYTES = 20 * 2**30
"""Compiled code of all combinations. A start removes the least recently used ones beyond this."""

BYTECODE_OF = 4
"""Environments whose bytecode is kept, each some 150 MB. A start removes that of the least recently used others."""

_PACKAGES = ("torch", "triton", "vllm", "transformers")
_LOCK = "in_use.lock"
_MADE_FOR = "made_for.txt"
_VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def cache_root(env: Mapping[str, str]) -> Path:
    """`$PRIME_RL_CACHE`, or else `prime-rl` in the user's cache directory."""
    user_caches = Path(env.get("XDG_CACHE_HOME") or home_directory() / ".cache")
    return Path(env.get(CACHE_VARIABLE) or user_caches / "prime-rl").absolute()


def made_for(gpu_names: Iterable[str], env: Mapping[str, str]) -> str:
    """The combination of versions and hardware that compiled code is for: lines of text."""
    versions = [f"{name} {_version(name)}" for name in _PACKAGES]
    # The interpreter of a vLLM in an environment of its own.
    others = [env.get("PRIME_RL_VLLM_PYTHON", ""), *sorted(set(gpu_names)), _processor()]
    return "\n".join([f"python {platform.python_version()}", *versions, *others]) + "\n"


@contextlib.contextmanager
def compile_caches(
    env: Mapping[str, str], combination: str, fallback: Path, limit_bytes: int = LIMIT_BYTES
) -> Iterator[Path]:
    """Use the cache directory of a combination (`made_for`) during the block. Several launches may do so at once.

    Without a writable home directory, `fallback` is used.

    Raises:
        NotPrivate: another user owns the cache.
        OSError: `$PRIME_RL_CACHE` cannot be written.
    """
    try:
        directory, lock = _claimed(cache_root(env) / "compiled", combination, limit_bytes)
    except NotPrivate:
        raise
    except OSError:  # read-only on this node, full, over its quota, or not there
        if env.get(CACHE_VARIABLE):
            raise
        yield fallback
        return
    try:
        yield directory
    finally:
        os.close(lock)


def _claimed(root: Path, combination: str, limit_bytes: int) -> tuple[Path, int]:
    """The directory of a combination, and the descriptor that keeps it from being removed."""
    _make_private(root.parent)
    root.mkdir(mode=0o700, exist_ok=True)
    # One launch at a time begins to use directories, or removes some.
    with locked_file(root / ".lock"):
        _evict(root, limit_bytes)
        directory = root / hashlib.sha256(combination.encode()).hexdigest()[:16]
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / _MADE_FOR).write_text(combination)
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        # Its time says when it was used last.
        os.utime(lock)
        _lock(lock, fcntl.LOCK_SH)
    return directory, lock


def cache_env(root: Path, child: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment that keeps a child's compiled code, and other caches of its libraries, in `root`.

    A compile cache that `env` names stays in use. Downloaded models and packages and the interpreters of environments
    stay in the user's cache: Hugging Face libraries and uv would otherwise follow XDG_CACHE_HOME. HOME is set
    if it is missing.
    """
    directories = {"XDG_CACHE_HOME": root / child / "xdg"}
    directories |= {name: root / child / part for name, part in _VARIABLES.items() if not env.get(name)}
    user_caches = env.get("XDG_CACHE_HOME") or str(home_directory() / ".cache")
    hf_home = env.get("HF_HOME") or str(Path(user_caches) / "huggingface")
    uv_cache = env.get("UV_CACHE_DIR") or str(Path(user_caches) / "uv")
    kept = {"HF_HOME": hf_home, "UV_CACHE_DIR": uv_cache, VENVS_VARIABLE: str(venvs_root(env))}
    return {name: str(path) for name, path in directories.items()} | kept | home_env(env)


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
    kept = env.get("PYTHONPYCACHEPREFIX") or str(_bytecode_directory(cache_root(env) / "bytecode"))
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": kept}


def _bytecode_directory(root: Path) -> Path:
    """The directory for this Python environment, whose time says when it was used last.

    Python compiles the source again where bytecode is missing: a process whose bytecode goes loses time only.
    """
    own = root / hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(own)
        used = sorted(root.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in used[:-BYTECODE_OF]:
            shutil.rmtree(old, ignore_errors=True)
    return own


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _processor() -> str:
    """Model and instruction sets, for which compilers make code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.getuid():
        raise NotPrivate(
            f"{directory} belongs to user {found.st_uid}: have it removed, or set {CACHE_VARIABLE} to another path"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        directory.chmod(0o700)


def _evict(root: Path, limit_bytes: int) -> None:
    """Remove the least recently used directories until the rest is within the limit. Those in use stay."""
    used = sorted((path for path in root.iterdir() if path.is_dir()), key=_used_at_s)
    sizes = {path: _size_bytes(path) for path in used}
    total_bytes = sum(sizes.values())
    for path in used:
        if total_bytes <= limit_bytes:
            return
        if _is_unused(path / _LOCK):
            shutil.rmtree(path, ignore_errors=True)
            total_bytes -= sizes[path]


def _used_at_s(directory: Path) -> float:
    try:
        return (directory / _LOCK).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size_bytes(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            # Compilers replace files while they work.
            with contextlib.suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_size
    return total


def _is_unused(lock: Path) -> bool:
    if not lock.exists():
        return True
    with lock.open("r+") as file:
        return _lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock(descriptor: int, operation: int) -> bool:
    """Whether the lock was taken. Some shared file systems have none: then nothing is known to be unused."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        return False
    return True


# Allocators: PyTorch's on a GPU, and tcmalloc on a CPU, if this machine has it. glibc's searches long lists of freed
# blocks, because PyTorch asks for aligned blocks of many sizes; the RL benchmarks compare the two. tcmalloc is part of
# Google's gperftools, which systems package.


PRELOAD_VARIABLE = "LD_PRELOAD"
CUDA_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"

_LIBRARIES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
_REPORT_VARIABLE = "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"
_NEVER_REPORT = str(2**63 - 1)
"""Bytes. Older versions write a line to stderr for each block of 1 GiB or more."""


def installed_tcmalloc(directories: Iterable[Path] | None = None) -> str | None:
    """The path of tcmalloc in `directories`, by default those of the Python environment and of the system.

    None if it is not installed.
    """
    places = library_directories() if directories is None else directories
    libraries = (directory / name for directory in places for name in _LIBRARIES)
    return next((str(library) for library in libraries if library.is_file() and _can_be_preloaded(library)), None)


def cpu_allocator_env(tcmalloc: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """Let a process allocate with the library `tcmalloc`, unless `env` sets LD_PRELOAD, also if it is empty."""
    if tcmalloc is None or PRELOAD_VARIABLE in env:
        return {}
    quiet = {} if _REPORT_VARIABLE in env else {_REPORT_VARIABLE: _NEVER_REPORT}
    return {PRELOAD_VARIABLE: tcmalloc, **quiet}


def cuda_allocator_env(env: Mapping[str, str]) -> dict[str, str]:
    """Let the segments of a trainer's GPU memory grow, unless `env` configures the allocator.

    Rows of varying lengths fragment fixed segments.
    """
    given = any(name in env for name in ("PYTORCH_ALLOC_CONF", CUDA_VARIABLE))
    return {} if given else {CUDA_VARIABLE: "expandable_segments:True"}


def _can_be_preloaded(library: Path) -> bool:
    """LD_PRELOAD separates paths by colons and spaces, and has no way to escape one."""
    return not re.search(r"[:\s]", str(library))


def library_directories() -> Iterator[Path]:
    """Those with libraries for this Python's architecture: /usr/lib may hold libraries of another one."""
    yield from (Path(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix) if prefix != "/usr")
    yield Path("/usr/local/lib")
    if multiarch := sysconfig.get_config_var("MULTIARCH"):
        yield Path("/usr/lib", multiarch)
    yield Path("/usr/lib64")

"""Layers of the sandbox (bubblewrap, namespaces, seccomp alone, a container), and how each starts on this machine."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field

from prime_rl.utils.errors import UserError

LayerName = Literal["bubblewrap", "namespaces", "seccomp", "docker", "podman"]
AUTOMATIC: tuple[LayerName, ...] = ("bubblewrap", "namespaces", "seccomp")
"""Order in which `auto` tries layers. Containers are used only if the user asks for one."""
INSIDE = Path(__file__).parent / "inside"
NOBODY = 65534
FIRST_OWN_UID = 1_000_000_000
"""Ids from here on are unused, so the kernel's count of a user's threads is the count of one sandbox."""
_SYSTEM = ("/lib", "/lib64", "/bin")
DEVICES = ("/dev/null", "/dev/urandom", "/dev/zero")


class SandboxFault(UserError):
    """The user's mistake: programs cannot be confined on this machine, or not by the chosen layer."""


class ProgramLimits(BaseModel):
    """Limits of one program. Its tests run in another process, with the same limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    time_s: float = Field(10.0, gt=0, le=600)
    """Wall-clock time in seconds, after which the process is killed."""
    memory_mb: int = Field(512, ge=64, le=65536)
    """Address space in MB, including Python's own (about 30 MB)."""
    output_bytes: int = Field(1_000_000, ge=0, le=100_000_000)
    """Most bytes of output. A program that prints more is killed."""
    threads: int = Field(32, ge=1, le=1024)
    """Most threads. Enforced in namespaces, and where the sandbox has a user to itself."""

    def of_kernel(self) -> dict[str, int]:
        """The limits that the kernel enforces. CPU time is only a backstop for the wall clock."""
        return {"cpu_s": int(self.time_s) + 2, "memory_mb": self.memory_mb, "threads": self.threads}


class Layer(NamedTuple):
    """How to start the zygote, the process that forks programs."""

    name: LayerName
    prefix: tuple[str, ...] = ()
    """Words before Python's command."""
    folder: str = "/"
    """Working directory of programs."""
    uid: int | None = None
    """User id that the zygote takes, if the layer does not change the user."""
    hides_files: bool = False
    """Whether the layer hides the machine's files. Otherwise Landlock does."""
    counts_threads: bool = True
    engine: str = ""
    """Container engine, if the layer is a container."""


def layer(name: LayerName) -> Layer:
    """Describe a layer on this machine. Raises SandboxFault if a program that it needs is not installed."""
    if name == "bubblewrap":
        return Layer(name, _bubblewrap(_program("bwrap", "bubblewrap")), "/box", hides_files=True)
    if name == "namespaces":
        unshare = _program("unshare", "util-linux")
        who = (f"--map-user={NOBODY}", f"--map-group={NOBODY}")
        spaces = ("--user", *who, "--pid", "--fork", "--kill-child", "--mount", "--net", "--ipc", "--uts")
        return Layer(name, (unshare, *spaces, "--"))
    if name == "seccomp":
        if os.geteuid() or not (_is_open_to_all(Path(sys.base_prefix)) and _is_open_to_all(INSIDE)):
            return Layer(name, counts_threads=False)
        uid = FIRST_OWN_UID + os.getpid()
        return Layer(name, uid=uid) if _is_mapped(uid) else Layer(name, uid=NOBODY, counts_threads=False)
    if name in ("docker", "podman"):
        # The engine limits the threads.
        return Layer(name, engine=_program(name, name), hides_files=True, counts_threads=False)
    raise SandboxFault(f"unknown layer {name!r}: the layers are {', '.join(get_args(LayerName))}")


def _program(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxFault(f"`{name}` is not installed (package {package})")
    return path


def _bubblewrap(program: str) -> tuple[str, ...]:
    arguments = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"]
    for name, target in linked_folders().items():
        arguments += ["--symlink", target, name]
    for name in python_folders():
        arguments += ["--ro-bind", name, name]
    for name in DEVICES:
        arguments += ["--dev-bind", name, name]
    return (program, *arguments, "--dir", "/box", "--remount-ro", "/", "--chdir", "/box", "--")


def _is_open_to_all(folder: Path) -> bool:
    """Whether every user can reach a folder."""
    return all(each.stat().st_mode & stat.S_IXOTH for each in (folder, *folder.parents))


def _is_mapped(uid: int) -> bool:
    """Whether a user id exists in this user namespace."""
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    ranges = [tuple(map(int, line.split())) for line in lines]
    return any(first <= uid < first + count for first, _, count in ranges)


def python() -> list[str]:
    """Command of the interpreter without site packages. Not `-I`, which would ignore the hash seed."""
    return [str(Path(sys.executable).resolve()), "-P", "-s", "-S", "-B"]


def linked_folders() -> dict[str, str]:
    """System folders that are symbolic links on this machine, with their targets."""
    return {name: str(Path(name).readlink()) for name in _SYSTEM if Path(name).is_symlink()}


def python_folders() -> list[str]:
    """Folders that Python and the zygote need."""
    system = [name for name in _SYSTEM if Path(name).is_dir() and not Path(name).is_symlink()]
    own = [name for name in (sys.base_prefix, str(INSIDE)) if not name.startswith("/usr/")]
    return ["/usr", *system, *own]

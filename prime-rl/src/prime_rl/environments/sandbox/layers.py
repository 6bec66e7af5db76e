"""What keeps programs in: bubblewrap, namespaces, seccomp alone, a container. Finds out how each would start here."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Literal, NamedTuple, get_args

LayerName = Literal["bubblewrap", "namespaces", "seccomp", "docker", "podman"]
AUTOMATIC: tuple[LayerName, ...] = ("bubblewrap", "namespaces", "seccomp")
"""Tried in this order. Containers are used by choice only."""
INSIDE = Path(__file__).parent / "inside"
NOBODY = 65534
FIRST_OWN_UID = 1_000_000_000
"""Ids from here on belong to nobody, so a process with one of them is alone in the kernel's count of its user."""
_SYSTEM = ("/lib", "/lib64", "/bin")
DEVICES = ("/dev/null", "/dev/urandom", "/dev/zero")


class SandboxFault(Exception):
    """Programs cannot be kept in on this machine, or not in the way that was asked for. The text is for users."""


class Layer(NamedTuple):
    """How the process starts that forks programs."""

    name: LayerName
    prefix: tuple[str, ...] = ()
    """What starts Python."""
    folder: str = "/"
    """Working directory of programs."""
    uid: int | None = None
    """The user to become, if the start does not change the user."""
    hides_files: bool = False
    """Whether the start itself hides the machine's files. Otherwise Landlock does."""
    counts_threads: bool = True
    engine: str = ""
    """Program that starts it in a container."""


def layer(name: LayerName) -> Layer:
    """Raises SandboxFault if a program that it needs is not installed."""
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
        # The engine's own limit counts the threads.
        return Layer(name, engine=_program(name, name), hides_files=True, counts_threads=False)
    raise SandboxFault(f"there is no layer {name!r}: the layers are {', '.join(get_args(LayerName))}")


def python() -> list[str]:
    """The interpreter without site packages. Without `-I`: the environment is empty except for the hash seed."""
    return [str(Path(sys.executable).resolve()), "-P", "-s", "-S", "-B"]


def linked_folders() -> dict[str, str]:
    """Folders of libraries and programs that are links on this machine, with their targets."""
    return {name: str(Path(name).readlink()) for name in _SYSTEM if Path(name).is_symlink()}


def python_folders() -> list[str]:
    """Folders that Python needs, and this package's own."""
    system = [name for name in _SYSTEM if Path(name).is_dir() and not Path(name).is_symlink()]
    own = [name for name in (sys.base_prefix, str(INSIDE)) if not name.startswith("/usr/")]
    return ["/usr", *system, *own]


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
    """Whether this user namespace has a user of this number."""
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    ranges = [tuple(map(int, line.split())) for line in lines]
    return any(first <= uid < first + count for first, _, count in ranges)

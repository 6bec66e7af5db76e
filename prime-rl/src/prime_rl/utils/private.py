"""Directories that only this user can read, and variables that hold secrets."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from prime_rl.utils.errors import NotPrivate

RUNTIME_VARIABLE = "PRIME_RL_RUNTIME_DIR"
_MODE = 0o700


def runtime_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """This user's sockets and keys on this machine: `$PRIME_RL_RUNTIME_DIR`, or else `/tmp/prime-rl-UID`.

    It does not depend on TMPDIR, because processes that were started separately must find each other there, nor on
    XDG_RUNTIME_DIR, which is deleted when the user logs out while a run goes on.

    Raises:
        NotPrivate: another user owns it, or others can enter it.
    """
    return private_directory(Path(environ.get(RUNTIME_VARIABLE) or f"/tmp/prime-rl-{os.getuid()}"))


def home_directory() -> Path:
    """This user's home directory.

    A container's random user has none. `runtime_directory` takes its place, which is lost with the container.

    Raises:
        NotPrivate: see `runtime_directory`.
    """
    try:
        return Path.home()
    except RuntimeError:
        return runtime_directory()


def home_env(env: Mapping[str, str]) -> dict[str, str]:
    """HOME for processes that would have none. Libraries fail without it. Raises NotPrivate."""
    return {} if env.get("HOME") else {"HOME": str(home_directory())}


def set_home() -> None:
    """Give this process a HOME if it has none. Call it before libraries are imported, which look for it.

    Raises:
        SystemExit: with one line, for the reason of NotPrivate.
    """
    try:
        os.environ.update(home_env(os.environ))
    except NotPrivate as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code) from error


def private_directory(directory: Path) -> Path:
    """Make `directory` with mode 0700 if it is missing, and check that it belongs to this user alone.

    Raises:
        NotPrivate: it is a link, another user owns it, or others can enter it.
    """
    directory.mkdir(mode=_MODE, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivate(f"{directory} is not a directory: remove it")
    if found.st_uid != os.getuid():
        raise NotPrivate(
            f"{directory} belongs to user {found.st_uid}: have it removed, or set {RUNTIME_VARIABLE} to another path"
        )
    if found.st_mode & 0o077:
        raise NotPrivate(f"{directory} can be entered by other users: run `chmod 700 {directory}`")
    return directory


_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:\w*(?:apikey|password|passwd|passphrase|secret)|auth|authorization|cookie|credentials?|headers|key|"
    r"pass|pat|token)(?=$|[._-])",
    re.IGNORECASE,
)
"""Matches a name with a part that means a secret: `api_key`, not `max_tokens` or `keys`."""
_OURS = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "MLFLOW_", "PRIME_", "SWANLAB_", "VLLM_", "WANDB_")
"""Beginnings of variables that trainers and servers read: those of the hub, of monitors and of the engine."""


def is_secret_name(name: str) -> bool:
    """Whether the name of an option, key or variable means a secret."""
    return _SECRET_NAME.search(name) is not None


def without_service_keys(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables whose names mean a secret, except those of the hub, monitors and the engine."""
    return {name: value for name, value in env.items() if name.startswith(_OURS) or not is_secret_name(name)}

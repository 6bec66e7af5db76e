"""Environments that `medarc_train env install` has put on this machine, and which of them a process uses.

They lie in a directory of the user, which `uv sync` does not touch. A file there lists them. A process that uses one
holds a shared lock on its directory until it ends, so that nothing is removed under it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import site
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from prime_rl.utils.errors import UserError
from prime_rl.utils.files import locked_file, replacing_file
from prime_rl.utils.private import home_directory

DIRECTORY_VARIABLE = "MEDARC_ENVIRONMENTS_DIR"
FILE = "registry.json"
FORMAT = 1
"""Changes when the file's layout does."""


@dataclass(frozen=True, slots=True)
class InstalledEnvironment:
    """One environment."""

    id: str
    module: str
    version: str
    verifiers: str
    """Version of verifiers that it runs with."""
    source: str
    """Source of the installation: a path, or a requirement."""
    directory: str
    """Holds an interpreter with all of its packages, or only the environment's own modules."""
    has_interpreter: bool
    file: str
    """File of its module."""

    @property
    def python(self) -> Path | None:
        """Its interpreter. None if it runs in the run's own."""
        return Path(self.directory, "bin", "python") if self.has_interpreter else None

    @property
    def is_whole(self) -> bool:
        """Whether its files are still there."""
        return os.path.isfile(self.file) and (self.python is None or os.access(self.python, os.X_OK))  # noqa: PTH113


def environments_directory(env: Mapping[str, str] = os.environ) -> Path:
    """`$MEDARC_ENVIRONMENTS_DIR`, or else `medarc-rl/environments` in the user's data directory."""
    user_data = Path(env.get("XDG_DATA_HOME") or home_directory() / ".local" / "share")
    return Path(env.get(DIRECTORY_VARIABLE) or user_data / "medarc-rl" / "environments").absolute()


def module_of(env_id: str) -> str:
    """The module that verifiers imports for an environment's id, which may end in `@version`."""
    return env_id.partition("@")[0].replace("-", "_").rpartition("/")[2]


def canonical_id(name: str) -> str:
    """The id of the environment in a package of this name."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Registry:
    """The list of environments in one directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or environments_directory()
        self.file = self.directory / FILE

    def all(self) -> list[InstalledEnvironment]:
        """Every environment, by id. Raises UserError."""
        try:
            table = json.loads(self.file.read_text(encoding="utf-8"))
            if table["format"] != FORMAT:
                raise UserError(
                    f"{self.file} was written by another version of medarc-rl (format {table['format']!r}, not "
                    f"{FORMAT}): delete it, and install the environments again"
                )
            found = [InstalledEnvironment(**each) for each in table["environments"]]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self.file} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.file} is damaged: delete it, and install the environments again") from error
        return sorted(found, key=lambda each: each.id)

    def find(self, env_id: str) -> InstalledEnvironment | None:
        """The environment of a config's id, if it is installed here. Raises UserError."""
        module = module_of(env_id)
        return next((each for each in self.all() if each.module == module), None)

    def add(self, environment: InstalledEnvironment) -> InstalledEnvironment | None:
        """Put an environment on the list. Returns the one that it replaces."""
        with self._changing():
            kept = [each for each in self.all() if each.module != environment.module]
            replaced = self.find(environment.id)
            self._write([*kept, environment])
        return replaced

    def remove(self, environment: InstalledEnvironment) -> None:
        with self._changing():
            self._write([each for each in self.all() if each.module != environment.module])

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked_file(self.directory / ".lock"):
            yield

    def _write(self, environments: list[InstalledEnvironment]) -> None:
        table = {"format": FORMAT, "environments": [asdict(each) for each in environments]}
        with replacing_file(self.file) as scratch:
            scratch.touch(mode=0o600)
            scratch.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def use_shared(environment: InstalledEnvironment) -> None:
    """Let this process import an environment that runs in the run's own interpreter."""
    if environment.directory not in sys.path:
        # Appended, so that it hides nothing of the run.
        site.addsitedir(environment.directory)


# Directories in use.


_DAY_S = 86_400.0


def use(directory: Path) -> None:
    """Keep a directory until this process ends, and note the time. Without such a directory, nothing happens.

    Each call leaves a descriptor open, which holds the lock: call it once when an environment is loaded.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:  # a file system without locks
        os.close(descriptor)
        return
    with suppress(OSError):  # somebody else's directory
        os.utime(directory)


def remove_unless_used(directory: Path) -> bool:
    """Whether the directory is gone. It stays as long as a process uses it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Nobody finds it under its name while its files go.
        grave = directory.with_name(f".removed-{secrets.token_hex(4)}")
        directory.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def unused_for(directory: Path, days: float) -> bool:
    """Whether a directory was last used, or made, so many days ago."""
    try:
        return time.time() - directory.stat().st_mtime > days * _DAY_S
    except OSError:
        return False

"""Environments that `medarc_train env install` has put on this machine, and where each is imported from.

They lie in a directory of the user, which `uv sync` does not touch. A file there lists them.
"""

from __future__ import annotations

import json
import os
import re
import site
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    """What was installed: a path, or a requirement."""
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
                raise UserError(f"{self.file} has the format {table['format']!r}, not {FORMAT}: install again")
            found = [InstalledEnvironment(**each) for each in table["environments"]]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self.file} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.file} is damaged: remove it, and install the environments again") from error
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

"""Interpreters and directories of environments that the run's own interpreter does not hold.

Virtual environments that uv makes are kept in the user's cache by a hash of what they are made from.

A directory of the cache is whole or absent: it is made under a lock and under another name, and renamed at the end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from prime_rl.utils.errors import NotPrivate, RunError, UserError, one_line
from prime_rl.utils.files import PARTIAL, locked_file, replacing_file
from prime_rl.utils.logger import get_logger
from prime_rl.utils.private import home_directory, private_directory
from prime_rl.utils.terminal import cut_inside
from prime_rl.utils.terminal import tell as tell_stderr
from prime_rl.utils.waiting import telling

# Environments that `medarc_train env install` has put on this machine, and which of them a process uses.
#
# They lie in a directory of the user, which `uv sync` does not touch. A file there lists them. A process that uses one
# holds a shared lock on its directory until it ends, so that nothing is removed under it.


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


VENVS_VARIABLE = "PRIME_RL_VENVS"
HASHED = ("pyproject.toml", "uv.lock", ".python-version")
"""Files that decide what is installed. The project itself is installed as editable: its code may change."""
KEPT_DAYS = 30
"""An interpreter that no run has used for so many days is removed when the next one is made."""
_TOLD_CHARS = 600
_MAX_SAID_BYTES = 1 << 20
_DISTURBING = frozenset(
    {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT", "UV_RUN_RECURSION_DEPTH"}
)
"""Variables of this process that point uv to another environment."""

Tell = Callable[[str], None]


def venvs_root(env: Mapping[str, str] = os.environ) -> Path:
    """`$PRIME_RL_VENVS`, or else `prime-rl/venvs` in the user's cache directory."""
    user_caches = Path(env.get("XDG_CACHE_HOME") or home_directory() / ".cache")
    return Path(env.get(VENVS_VARIABLE) or user_caches / "prime-rl" / "venvs").absolute()


def python_of(venv: Path) -> Path:
    """The interpreter of a virtual environment."""
    return venv / "bin" / "python"


def place_of_project(project: Path) -> Path:
    """Path of the virtual environment of a project, whether it exists or not.

    Raises:
        RunError: the directory has no readable `pyproject.toml`.
    """
    project = project.resolve()
    parts = {name: _digest(project / name) for name in HASHED if (project / name).is_file()}
    if HASHED[0] not in parts:
        raise RunError(f"{str(project)!r} has no pyproject.toml: name the directory of the environment's package")
    return _place(project.name, {"project": str(project), **parts})


def venv_of_project(project: Path, tell: Tell | None = None) -> Path:
    """The virtual environment of the project in a directory, with the project and its dependencies. uv makes it if
    there is none for the present `pyproject.toml` and `uv.lock`; without a lock file, uv resolves the dependencies.

    `tell` gets a line when work begins and when it is done; by default the log does.

    Raises:
        RunError: the directory is not a project, there is no uv, or uv cannot install the project.
    """
    project = project.resolve()

    def install(venv: Path, uv: Uv) -> None:
        if (project / "uv.lock").is_file():
            uv.run("sync", "--locked", "--no-dev", venv=venv)
        else:
            uv.run("pip", "install", "--python", str(python_of(venv)), "--editable", str(project))

    return _made(place_of_project(project), project, install, tell or _in_log)


def venv_of_packages(requirements: Sequence[str], tell: Tell | None = None) -> Path:
    """The virtual environment that has packages, such as `["verifiers==0.1.10"]`.

    Raises:
        RunError: there is no uv, or uv cannot install the packages.
    """

    def install(venv: Path, uv: Uv) -> None:
        uv.run("pip", "install", "--python", str(python_of(venv)), "--", *requirements)

    name = re.split(r"[^\w.-]", requirements[0])[0] or "packages"
    place = _place(name, {"requirements": "\n".join(requirements)})
    # Not in the current directory, whose project may have its own settings.
    return _made(place, place.parent, install, tell or _in_log)


class Uv:
    """The program `uv`, run for the project in a directory."""

    def __init__(self, directory: Path, tell: Tell) -> None:
        """Raises RunError if uv is not installed. `tell` gets a line now and then while uv works."""
        found = shutil.which("uv")
        if found is None:
            raise RunError("creating an interpreter needs uv, which is not installed: see https://docs.astral.sh/uv")
        self._program = found
        self._directory = directory
        self._tell = tell

    def run(self, *arguments: str, venv: Path | None = None) -> None:
        """Raises RunError with what uv said, if it fails."""
        env = {name: value for name, value in os.environ.items() if name not in _DISTURBING}
        if venv is not None:
            env["UV_PROJECT_ENVIRONMENT"] = str(venv)
        verb = " ".join(arguments[: 2 if arguments[0] == "pip" else 1])
        # A file, because uv is not to wait for a reader, and a line on how far it is needs what it has said so far.
        with tempfile.TemporaryFile() as said:
            with telling(f"`uv {verb}`", self._tell, lambda: _last_line(_said(said))):
                done = subprocess.run(
                    [self._program, "--no-progress", "--color=never", *arguments],
                    cwd=self._directory,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    check=False,
                )
            if done.returncode != 0:
                raise RunError(f"`uv {verb}` fails: {_one_line(_said(said))}")


def _said(file: IO[bytes]) -> str:
    # Not `read`, which would move the place where uv goes on writing.
    return os.pread(file.fileno(), _MAX_SAID_BYTES, 0).decode(errors="replace")


def _last_line(text: str) -> str:
    lines = text.split("\n")
    return next((one_line(line, 200) for line in reversed(lines) if line.strip()), "")


def _in_log(line: str) -> None:
    """To the log, if this program shows what is going on, or else to stderr: a check logs warnings alone."""
    log = get_logger()
    if log.isEnabledFor(logging.INFO):
        log.info(line)
    else:
        tell_stderr(line)


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from error


def _place(name: str, contents: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
    return venvs_root() / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)[:60] or 'project'}-{digest[:16]}"


def _made(place: Path, directory: Path, install: Callable[[Path, Uv], None], tell: Tell) -> Path:
    """`place`, once it holds a virtual environment with what `install` put there."""
    use(place)
    if python_of(place).exists():
        return place
    uv = Uv(directory, tell)
    try:
        place.parent.parent.mkdir(parents=True, exist_ok=True)
        private_directory(place.parent)
        with locked_file(
            place.with_name(f"{place.name}.lock"), lambda: tell(f"Waiting for another uv to make {place}")
        ):
            # Another process may have made it meanwhile. One without an interpreter was made for a removed one.
            if not python_of(place).exists():
                _make(place, uv, install, tell)
                _remove_old(place, tell)
            use(place)
    except NotPrivate as error:
        raise RunError(f"{error}; or set {VENVS_VARIABLE} to another directory") from error
    except OSError as error:
        raise RunError(f"{place}: {error.strerror or error}") from error
    return place


def _make(place: Path, uv: Uv, install: Callable[[Path, Uv], None], tell: Tell) -> None:
    start_s = time.monotonic()
    tell(f"Making an interpreter in {place}")
    scratch = place.with_name(f"{place.name}{PARTIAL}")
    for old in (scratch, place):
        shutil.rmtree(old, ignore_errors=True)
    try:
        # Relocatable: the scripts in it find their interpreter after the rename.
        uv.run("venv", "--relocatable", str(scratch))
        install(scratch, uv)
        scratch.rename(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    tell(f"Made {place} in {time.monotonic() - start_s:.1f} s")


def _remove_old(made: Path, tell: Tell) -> None:
    """Remove interpreters next to a new one that no run has used for `KEPT_DAYS`."""
    for venv in sorted(made.parent.iterdir()):
        is_venv = venv != made and not venv.is_symlink() and python_of(venv).is_file()
        if is_venv and unused_for(venv, KEPT_DAYS) and remove_unless_used(venv):
            tell(f"Removed {venv}, which no run has used for {KEPT_DAYS} days")


def _one_line(said: str) -> str:
    """What uv printed from its error on, without its drawings and control characters."""
    start = max(said.find("error:"), 0) or max(said.find("×"), 0)
    plain = re.sub(r"[╰─▶│├×]|[^\w\s!-~]", " ", said[start:].removeprefix("error:"))
    text = " ".join(plain.split())
    return cut_inside(text, _TOLD_CHARS)

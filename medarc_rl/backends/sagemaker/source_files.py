"""Chooses the project's files that a job gets, packs them into one archive, and unpacks it in the job."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from medarc_rl.backends.sagemaker.request import SHARED_CHANNEL, SOURCE_CHANNEL
from medarc_rl.errors import MedarcError, UsageError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


IGNORE_FILES = (".gitignore", ".medarcignore")
"""The later one wins. Both have git's syntax."""
_NEVER = (
    ".git .hg .svn .jj .venv .tox .nox __pycache__ node_modules .mypy_cache .pytest_cache .ruff_cache "
    ".import_linter_cache .ipynb_checkpoints"
).split()
"""Directories that no job needs."""
_SECRETS = (
    ".env .env.* *.env .envrc .netrc _netrc .pypirc .npmrc .git-credentials .pgpass .modal.toml "
    ".aws/ .ssh/ .kube/ .gnupg/ .docker/ .azure/ .huggingface/ "
    "id_rsa* id_ed25519* id_ecdsa* *.pem *.key *.p12 *.pfx *.kdbx *.keytab "
    "credentials credentials.json secrets.json secrets.toml secrets.yaml secrets.yml "
    "!.env.example !.env.template !*.pub"
).split()
"""Files that usually hold secrets, in git's syntax."""
_DIRECTORY = "ps_d"
"""Group of pathspec's expressions: the slash after a directory that a pattern names."""
_MOST_SHOWN = 3
SOURCE = "source"
"""Directory of the archive with the project's files."""
CONFIG = "run.toml"
"""The resolved config, next to it. The name reveals nothing about the run."""
_READ_BYTES = 1 << 20
JOB_ROOT = "/opt/ml"
_NAMES = ("name", "path", "directory", "file")
"""Last parts of keys whose value may be a path without a slash."""


# Choosing: all files of the project but what the ignore files name, and never a secret.


@dataclass(frozen=True, slots=True)
class StagedFile:
    name: str
    """Path in the project, with slashes."""
    path: Path
    size_bytes: int
    is_executable: bool


@dataclass(frozen=True, slots=True)
class Staged:
    """The files of a project, by name."""

    files: Mapping[str, StagedFile]
    left_out: Sequence[str] = field(default=())
    """One line for each thing that the user may expect in the job and that is not there."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


def stage(project: Path, include: Sequence[str], limit_bytes: int) -> Staged:
    """Find the files of a project directory. Reads no content but that of the ignore files.

    Args:
        project: the directory.
        include: files and directories in it that the job gets although an ignore file names them.
        limit_bytes: refuse more than this.

    Raises:
        UsageError: something to include is missing, outside, or a secret; a file cannot be read; or it is too much.
    """
    root = project.resolve()
    wanted = [_included(project, word) for word in include]
    walk = _Walk(root, wanted, _spec(_SECRETS))
    found = {file.name: file for file in sorted(walk.files(root, ()), key=lambda file: file.name)}
    if walk.faults:
        raise UsageError(*walk.faults)
    staged = Staged(found, tuple(walk.left_out))
    if staged.size_bytes > limit_bytes:
        raise UsageError(_too_much(staged, limit_bytes))
    return staged


def _included(project: Path, word: str) -> PurePosixPath:
    path = project / word
    if not path.exists():
        raise UsageError(f"--include {word}: no such file or directory in {project}")
    inner = Path(os.path.normpath(path.absolute()))
    if not inner.is_relative_to(project.absolute()):
        raise UsageError(f"--include {word}: outside of {project}; only its files are sent")
    return PurePosixPath(inner.relative_to(project.absolute()).as_posix())


def _spec(lines: Sequence[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(lines)


def is_never_staged(name: str) -> bool:
    """Whether a file is left out whatever the ignore files say: a cache, or what usually holds secrets."""
    return not set(_NEVER).isdisjoint(PurePosixPath(name).parts) or _spec(_SECRETS).match_file(name)


@dataclass(slots=True)
class _Walk:
    root: Path
    include: Sequence[PurePosixPath]
    secrets: GitIgnoreSpec
    faults: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def files(
        self, directory: Path, rules: tuple[tuple[Path, GitIgnoreSpec], ...], is_ignored: bool = False
    ) -> Iterator[StagedFile]:
        """The files below a directory; of one that is ignored, only those to include.

        `rules`: the ignore files above it, each with its directory.
        """
        try:
            rules = (*rules, *self._rules_of(directory))
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            self.faults.append(f"{error.filename}: {error.strerror}: fix this, or add it to .medarcignore")
            return
        for entry in entries:
            yield from self._of_entry(Path(entry.path), rules, is_ignored)

    def _rules_of(self, directory: Path) -> Iterator[tuple[Path, GitIgnoreSpec]]:
        for name in IGNORE_FILES:
            if (directory / name).is_file():
                yield directory, _spec((directory / name).read_text(encoding="utf-8", errors="replace").splitlines())

    def _of_entry(
        self, path: Path, rules: tuple[tuple[Path, GitIgnoreSpec], ...], is_ignored: bool
    ) -> Iterator[StagedFile]:
        name = path.relative_to(self.root).as_posix()
        is_link, is_directory = path.is_symlink(), path.is_dir()
        shown = f"{name}/" if is_directory else name
        if path.name in _NEVER or (is_directory and (path / "pyvenv.cfg").is_file()):
            return
        asked = self._is_included(name)
        if is_directory and not asked and _is_run(path):
            self.left_out.append(f"{shown}: the directory of a run")
            return
        if self.secrets.match_file(shown):
            if asked and PurePosixPath(name) in self.include:
                self.faults.append(
                    f"--include {name}: usually holds secrets; give them with --secret-env NAME=REFERENCE"
                )
            self.left_out.append(f"{shown}: usually holds secrets")
        elif (ignored := not asked and (is_ignored or _is_ignored(path, is_directory, rules))) and not (
            is_directory and self._leads_to(name)
        ):
            return
        elif is_link and (is_directory or not path.resolve().is_relative_to(self.root)):
            self.left_out.append(f"{shown}: a link {'to a directory' if is_directory else 'that leads outside'}")
        elif is_directory:
            yield from self.files(path, rules, ignored)
        else:
            yield from self._regular(path, name)

    def _regular(self, path: Path, name: str) -> Iterator[StagedFile]:
        try:
            facts = path.stat()
            name.encode()
        except OSError as error:
            self.left_out.append(f"{name}: {error.strerror}")
            return
        except UnicodeEncodeError:
            self.faults.append(f"{name!r}: a name that is not UTF-8: rename it, or add it to .medarcignore")
            return
        if not stat.S_ISREG(facts.st_mode):
            self.left_out.append(f"{name}: not a regular file")
        elif not os.access(path, os.R_OK):
            self.faults.append(f"{path}: cannot be read: fix this, or add it to .medarcignore")
        else:
            yield StagedFile(name, path, facts.st_size, bool(facts.st_mode & stat.S_IXUSR))

    def _is_included(self, name: str) -> bool:
        path = PurePosixPath(name)
        return any(path.is_relative_to(each) for each in self.include)

    def _leads_to(self, name: str) -> bool:
        """Whether something to include lies below this directory."""
        return any(each.is_relative_to(PurePosixPath(name)) for each in self.include)


def _is_run(path: Path) -> bool:
    """Whether a run was kept here, whose rollouts may hold text of patients; or a container of `--local`."""
    signs = ("run.lock", "metrics.jsonl", "input/config/hyperparameters.json")
    return any((path / sign).exists() for sign in signs)


def _is_ignored(path: Path, is_directory: bool, rules: Sequence[tuple[Path, GitIgnoreSpec]]) -> bool:
    """Decide as git does: by the last matching pattern of the innermost ignore file."""
    for directory, spec in reversed(rules):
        relative = path.relative_to(directory).as_posix()
        verdict = _verdict(spec, f"{relative}/" if is_directory else relative)
        if verdict is not None:
            return verdict
    return False


def _verdict(spec: GitIgnoreSpec, name: str) -> bool | None:
    """The verdict of the last pattern that matches the name itself.

    pathspec's patterns match everything below a directory, too. That is left to the walk, which does not enter ignored
    directories: `!c/` takes back the directory, and not the files in it.
    """
    for pattern in reversed(list(spec.patterns)):
        found = None if pattern.include is None else pattern.match_file(name)
        if found is None:
            continue
        groups = found.match.groupdict()
        is_below = groups.get(_DIRECTORY) is not None and found.match.end(_DIRECTORY) < len(name)
        if not is_below:
            return pattern.include
    return None


def _too_much(staged: Staged, limit_bytes: int) -> str:
    sizes: dict[str, int] = {}
    for file in staged.files.values():
        top = file.name.partition("/")[0]
        sizes[top] = sizes.get(top, 0) + file.size_bytes
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_MOST_SHOWN]
    shown = ", ".join(f"{name} ({megabytes(size)})" for name, size in largest)
    return (
        f"the project's files are {megabytes(staged.size_bytes)}, and --max-upload-mb is {limit_bytes // 1_000_000}; "
        f"the largest: {shown}. Add what the job does not need to .medarcignore, or raise --max-upload-mb"
    )


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


# Packing: one archive, whose bytes depend on nothing but names, contents and executable bits.


@dataclass(frozen=True, slots=True)
class Bundle:
    path: Path
    sha256: str
    size_bytes: int


@contextmanager
def packed(staged: Staged, config: str) -> Iterator[Bundle]:
    """A job's archive, in a temporary directory."""
    with TemporaryDirectory(prefix="medarc-sagemaker-") as scratch:
        yield pack(Path(scratch) / "source.tar.gz", staged.files, {CONFIG: config}, prefix=f"{SOURCE}/")


def pack(target: Path, files: Mapping[str, StagedFile], texts: Mapping[str, str], prefix: str = "") -> Bundle:
    """Write a `.tar.gz` of files, under `prefix`, and texts.

    Raises:
        MedarcError: a file cannot be read, or changed its size meanwhile.
    """
    with (
        target.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, text in sorted(texts.items()):
            content = text.encode()
            archive.addfile(_entry(name, len(content), False), io.BytesIO(content))
        for name, file in sorted(files.items()):
            _add(archive, f"{prefix}{name}", file)
    return Bundle(target, sha256_of(target), target.stat().st_size)


def _add(archive: tarfile.TarFile, name: str, file: StagedFile) -> None:
    try:
        with file.path.open("rb") as reading:
            size = os.fstat(reading.fileno()).st_size
            archive.addfile(_entry(name, size, file.is_executable), reading)
    except OSError as error:
        # tarfile raises this for a file that got shorter, without a number.
        raise MedarcError(f"{file.path}: {error.strerror or 'changed while it was read'}") from error


def _entry(name: str, size_bytes: int, is_executable: bool) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size_bytes
    entry.mode = 0o755 if is_executable else 0o644
    return entry


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as reading:
        while chunk := reading.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def unpack(archive: Path, target: Path) -> None:
    """Extract an archive. Entries that would leave `target`, links out of it and devices are refused.

    Raises:
        MedarcError: it is damaged or holds such an entry.
    """
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, mode="r:gz") as reading:
            reading.extractall(target, filter="data")
    except (OSError, EOFError, tarfile.TarError) as error:
        raise MedarcError(f"{archive.name} cannot be unpacked: {' '.join(str(error).split())}") from error


# In the job: where SageMaker puts them, and whether the config's files are among them.


@dataclass(frozen=True, slots=True)
class MlPaths:
    """The layout of a training container."""

    root: Path

    @property
    def hyperparameters(self) -> Path:
        return self.root / "input" / "config" / "hyperparameters.json"

    @property
    def resources(self) -> Path:
        return self.root / "input" / "config" / "resourceconfig.json"

    def channel(self, name: str) -> Path:
        return self.root / "input" / "data" / name

    @property
    def archive(self) -> Path:
        return self.channel(SOURCE_CHANNEL) / "source.tar.gz"

    @property
    def code(self) -> Path:
        """The directory in which the archive is unpacked."""
        return self.root / "code"

    @property
    def source(self) -> Path:
        return self.code / SOURCE

    @property
    def config(self) -> Path:
        return self.code / CONFIG

    @property
    def run(self) -> Path:
        """The run's directory on one instance."""
        return self.root / "checkpoints"

    def shared(self, run: str) -> Path:
        """The directory that the instances of a run share."""
        return self.channel(SHARED_CHANNEL) / run

    @property
    def failure(self) -> Path:
        """SageMaker shows the first 1024 characters of this file as the reason of a failure."""
        return self.root / "output" / "failure"


def relocated(table: Mapping[str, Any], project: Path, staged: Staged) -> tuple[dict[str, Any], list[str]]:
    """A config whose absolute paths in the project are relative to it, and one line for each path that is not staged.

    Only whole values are replaced, at their own keys. Hub ids, URLs and paths that exist only in the job stay.
    """
    faults: list[str] = []
    moved: dict[str, Any] = _moved(table, "", project.resolve(), staged, faults)
    return moved, faults


def _moved(value: Any, key: str, project: Path, staged: Staged, faults: list[str]) -> Any:
    if isinstance(value, Mapping):
        where = f"{key}." if key else ""
        return {name: _moved(item, f"{where}{name}", project, staged, faults) for name, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, f"{key}[{at}]", project, staged, faults) for at, item in enumerate(value)]
    if not isinstance(value, str) or not _may_be_path(key, value):
        return value
    try:
        path = project / value
        if not path.exists():
            return value
        # Not resolved: a link in the project is staged under its own name.
        name = _name_in(project, path)
    except (OSError, ValueError):  # too long, or with a zero byte
        return value
    faults.extend(_path_faults(key, value, name, path, staged))
    return name if name is not None and value.startswith("/") else value


def _may_be_path(key: str, value: str) -> bool:
    if not value or value in (".", "/") or "://" in value or value.startswith(f"{JOB_ROOT}/"):
        return False
    last = key.rpartition(".")[2].partition("[")[0]
    return "/" in value or "." in value or last in _NAMES


def _name_in(project: Path, path: Path) -> str | None:
    for candidate in (path, path.resolve()):
        if candidate.is_relative_to(project) and ".." not in candidate.parts:
            return candidate.relative_to(project).as_posix()
    return None


def _path_faults(key: str, value: str, name: str | None, path: Path, staged: Staged) -> Iterator[str]:
    if name is None:
        yield (
            f"{key} = {value}: outside of the project, so the job does not have it; copy it there, or upload it and "
            f"give --input NAME=s3://… ({JOB_ROOT}/input/data/NAME in the job)"
        )
    elif missing := _first_missing(name, path, staged):
        yield f"{key} = {value}: an ignore file leaves {missing} out of the job; add --include {name}"


def _first_missing(name: str, path: Path, staged: Staged) -> str | None:
    """A file of the path that is not staged. A model without its weights would be found missing only in the job."""
    if name == ".":
        return None
    if not path.is_dir():
        return None if name in staged.files else name
    files = sorted(child.relative_to(path).as_posix() for child in path.rglob("*") if child.is_file())
    expected = [f"{name}/{file}" for file in files if not is_never_staged(file)]
    return next((file for file in expected if file not in staged.files), None)

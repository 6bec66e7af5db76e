"""Chooses the files of a project that a job gets: all but what the ignore files name, and never a secret."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from medarc_rl.errors import UsageError

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

        `rules`: the ignore files above it, each with its own directory.
        """
        try:
            rules = (*rules, *self._rules_of(directory))
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            self.faults.append(f"{error.filename}: {error.strerror}: mend it, or add it to .medarcignore")
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
            self.faults.append(f"{path}: cannot be read: mend it, or add it to .medarcignore")
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
    """As git decides: the last matching pattern of the innermost ignore file."""
    for directory, spec in reversed(rules):
        relative = path.relative_to(directory).as_posix()
        verdict = _verdict(spec, f"{relative}/" if is_directory else relative)
        if verdict is not None:
            return verdict
    return False


def _verdict(spec: GitIgnoreSpec, name: str) -> bool | None:
    """What the last pattern that matches the name itself says.

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

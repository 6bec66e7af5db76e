"""`env install`, `env list` and `env uninstall`: environments that runs find and `uv sync` does not remove."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, distribution, distributions, version
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from medarc_rl.cli import say, warn
from medarc_rl.environments.options import InstallOptions, ListOptions, UninstallOptions
from medarc_rl.errors import MedarcError, UsageError
from prime_rl.checks.packages import LOADER, find_module, interpreter_fault, lacks_name, lacks_name_in
from prime_rl.interpreters import (
    InstalledEnvironment,
    Registry,
    Uv,
    canonical_id,
    module_of,
    python_of,
    remove_unless_used,
    unused_for,
)
from prime_rl.launch.job import command_prefix
from prime_rl.utils.errors import RunError, UserError, one_line
from prime_rl.utils.terminal import tell

VERIFIERS = "verifiers>=0.1.5,<0.4"
"""Requirement that is added for a package which does not name a version of verifiers."""
Kind = Literal["own", "shared", "fitting"]
"""Interpreter for an environment. `fitting`: the run's if it meets all requirements, otherwise a new one."""
_LOOK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
try:
    verifiers = version("verifiers")
except PackageNotFoundError:
    verifiers = ""
spec = find_spec(sys.argv[1])
print(json.dumps({"verifiers": verifiers, "file": spec.origin if spec else None}))
"""
"""Prints where a module is, without importing it."""
_LOOK_LIMIT_S = 60.0
_LEFT_DAYS = 1


@dataclass(frozen=True, slots=True)
class Source:
    """Argument of `uv pip install`."""

    text: str
    is_editable: bool

    @property
    def words(self) -> tuple[str, ...]:
        return ("--editable", self.text) if self.is_editable else ("--", self.text)


@dataclass(frozen=True, slots=True)
class Package:
    """Metadata of the environment's package."""

    name: str
    version: str
    requires: tuple[str, ...]
    pythons: str | None
    """Versions of Python that it runs with."""


def install(options: InstallOptions) -> int:
    """Install an environment for this user's runs."""
    if options.own and options.shared:
        raise UsageError("--own and --shared exclude each other: give one")
    if options.shared and options.python is not None:
        raise UsageError("--python creates a separate interpreter: leave out --shared")
    registry = Registry()
    kind: Kind = "own" if options.own or options.python is not None else "shared" if options.shared else "fitting"
    installed = install_into(registry, source_of(options.source, options.copy), kind, options.python)
    where = f"a separate interpreter ({installed.python})" if installed.python else "the run's interpreter"
    say(f"installed {installed.id} {installed.version} into {where}, verifiers {installed.verifiers}")
    say(f"next: {command_prefix(os.environ)}medarc_train env check {installed.id}")
    return 0


def install_into(
    registry: Registry, source: Source, kind: Kind = "fitting", python: str | None = None
) -> InstalledEnvironment:
    """Install an environment, and put it on the list in place of an earlier one.

    Raises:
        MedarcError: it cannot be installed.
        UsageError: it is not an environment, or does not fit.
    """
    try:
        registry.all()
        registry.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        installed = _install(source, kind, python, registry)
        replaced = registry.add(installed)
    except RunError as error:
        raise MedarcError(str(error)) from error
    except UserError as fault:
        raise UsageError(str(fault)) from fault
    except OSError as error:
        raise MedarcError(f"{error.filename}: {error.strerror}") from error
    if replaced is not None and not remove_files(replaced, registry):
        warn(f"a run uses the earlier {replaced.id}: its files stay until a later `env install`")
    _remove_left(registry)
    return installed


def source_of(text: str, copy: bool) -> Source:
    """A directory, an archive, or a requirement. Raises UsageError for anything else."""
    path = Path(text)
    if os.path.isdir(path):  # noqa: PTH112 - text that is too long for a path is no directory
        if not any((path / name).is_file() for name in ("pyproject.toml", "setup.py")):
            raise UsageError(f"PATH: {one_line(text)} has no pyproject.toml: name the directory of a package")
        return Source(str(path.resolve()), not copy)
    if text.endswith((".whl", ".tar.gz", ".zip")) and os.path.isfile(path):  # noqa: PTH113
        return Source(str(path.resolve()), False)
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        raise UsageError(f"'{one_line(text)}' is neither a directory, nor a wheel, nor a package's name") from None
    if os.path.exists(text):  # noqa: PTH110
        raise UsageError(f"PATH: {one_line(text)} is a file: name a directory or a wheel")
    return Source(str(requirement), False)


def _install(source: Source, kind: Kind, python: str | None, registry: Registry) -> InstalledEnvironment:
    uv = Uv(registry.directory, tell)
    place = final = registry.directory / f"new-{secrets.token_hex(4)}"
    try:
        target = ("--python", sys.executable, "--target", str(place), "--no-deps")
        uv.run("pip", "install", *target, *source.words)
        package = _package_in(place)
        misfits = list(misfits_of(package))
        if kind == "shared" and misfits:
            raise UsageError(*(f"--shared: {package.name} {misfit}" for misfit in misfits))
        module = module_of(canonical_id(package.name))
        final = registry.directory / f"{module}-{secrets.token_hex(4)}"
        is_own = kind == "own" or bool(misfits)
        if not is_own:
            place.rename(final)
            found = _found(module, Path(sys.executable), final)
        else:
            for misfit in misfits:
                warn(f"{package.name} {misfit}: it gets a separate interpreter")
            found = _found(module, _own_interpreter(uv, final, package, source, python))
        file = _file_of(module, package, found)
    except BaseException:
        shutil.rmtree(final, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return InstalledEnvironment(
        id=canonical_id(package.name),
        module=module,
        version=package.version,
        verifiers=found["verifiers"] or "?",
        source=source.text,
        directory=str(final),
        has_interpreter=is_own,
        file=file,
    )


def _package_in(directory: Path) -> Package:
    """The one package that was installed."""
    found = list(distributions(path=[str(directory)]))
    if len(found) != 1:
        raise MedarcError(f"uv installed {len(found)} packages instead of one")
    (one,) = found
    return Package(one.name, one.version, tuple(one.requires or ()), one.metadata["Requires-Python"])


def misfits_of(package: Package) -> Iterator[str]:
    """Each requirement of a package that the run's interpreter does not meet."""
    pythons = package.pythons
    if pythons and not SpecifierSet(pythons).contains(platform.python_version(), prereleases=True):
        yield f"requires Python {pythons}, and the run has {platform.python_version()}"
    for text in package.requires:
        yield from _misfits_of_requirement(text, "", frozenset())


def _misfits_of_requirement(text: str, extra: str, seen: frozenset[tuple[str, str]]) -> Iterator[str]:
    """`extra` is the one of the package that requires `text`; `seen` are packages with an extra that ask for it."""
    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
        return
    try:
        present = distribution(requirement.name)
    except PackageNotFoundError:
        yield f"requires {text}, which the run does not have"
        return
    if requirement.url is not None or not requirement.specifier.contains(present.version, prereleases=True):
        yield f"requires {text}, and the run has {present.version}"
        return
    name = canonical_id(requirement.name)
    for wanted in sorted(requirement.extras):
        if (name, wanted) in seen:
            continue
        if wanted not in map(canonical_id, present.metadata.get_all("Provides-Extra") or ()):
            continue  # pip and uv warn of it, and go on
        for below in present.requires or ():
            if "extra" in str(Requirement(below).marker or ""):
                yield from _misfits_of_requirement(below, wanted, seen | {(name, wanted)})


def _own_interpreter(uv: Uv, place: Path, package: Package, source: Source, python: str | None) -> Path:
    """Make an interpreter with the environment and all that it requires."""
    pythons = package.pythons or ">=3.10"
    fits = SpecifierSet(pythons).contains(platform.python_version(), prereleases=True)
    wanted = python or (sys.executable if fits else pythons)
    uv.run("venv", "--python", wanted, str(place))
    names = {canonical_id(Requirement(text).name) for text in package.requires}
    extra = () if "verifiers" in names else (VERIFIERS,)
    uv.run("pip", "install", "--python", str(python_of(place)), *extra, *source.words)
    return python_of(place)


def _found(module: str, python: Path, directory: Path | None = None) -> dict[str, str | None]:
    """File of a module, and version of verifiers, as an interpreter sees them."""
    added = "" if directory is None else f"import site; site.addsitedir({str(directory)!r})\n"
    try:
        done = subprocess.run(
            [str(python), "-c", added + _LOOK, module],
            env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
            cwd=python.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LOOK_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise MedarcError(f"{python} does not start within {_LOOK_LIMIT_S:g} s") from error
    if done.returncode != 0:
        raise MedarcError(f"{python} does not start: {one_line((done.stderr.splitlines() or ['no output'])[-1])}")
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def _file_of(module: str, package: Package, found: dict[str, str | None]) -> str:
    file = found["file"]
    if file is None:
        raise UsageError(
            f"{package.name} is not an environment: it has no module {module!r}, named as the package, with {LOADER}"
        )
    if lacks_name_in(Path(file), LOADER):
        raise UsageError(f"{package.name} is not an environment: {file} has no {LOADER}")
    return file


def remove_files(installed: InstalledEnvironment, registry: Registry) -> bool:
    """Delete what lies in the registry's directory, and nothing else. False if a run uses it: it stays."""
    directory = Path(installed.directory)
    is_ours = directory.parent == registry.directory and not directory.is_symlink()
    return not is_ours or remove_unless_used(directory)


def _remove_left(registry: Registry) -> None:
    """Delete files of earlier environments that a run used when they were replaced."""
    listed = {Path(each.directory) for each in registry.all()}
    for directory in registry.directory.iterdir():
        is_left = directory not in listed and directory.is_dir() and not directory.is_symlink()
        if is_left and unused_for(directory, _LEFT_DAYS):  # a newer one may be an install that is under way
            remove_unless_used(directory)


# The list of environments, and removing one


OWN, SHARED, RUN = "own interpreter", "the run's, added", "the run's"


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the list."""

    id: str
    version: str
    interpreter: str
    verifiers: str
    fault: str
    """Why it cannot be imported; empty if it can, as far as its files show."""
    directory: str
    source: str


def list_environments(options: ListOptions) -> int:
    """List the environments that runs find by id: installed ones, and those of the run's own interpreter."""
    entries = [*_installed(), *_of_the_run()]
    if options.json:
        sys.stdout.write(json.dumps([asdict(each) for each in entries], indent=2) + "\n")
        return 0
    if not entries:
        say("No environment is installed: medarc_train env install PATH")
        return 0
    rows = [("id", "version", "interpreter", "verifiers", "importable", "source")]
    rows += [
        (each.id, each.version, each.interpreter, each.verifiers, "no" if each.fault else "yes", each.source)
        for each in entries
    ]
    shown = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(rows[0]))]
    for row in shown:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for each in entries:
        if each.fault:
            warn(one_line(f"{each.id}: {each.fault}"))
    return 0


def uninstall(options: UninstallOptions) -> int:
    """Remove an environment that `env install` has installed."""
    registry = Registry()
    found = _entry(registry, options.id)
    registry.remove(found)
    if not remove_files(found, registry):
        warn(f"a run uses {found.id}: its files stay until a later `env install`")
    say(f"removed {found.id} {found.version}")
    return 0


def _entry(registry: Registry, env_id: str) -> InstalledEnvironment:
    try:
        found, known = registry.find(env_id), [each.id for each in registry.all()]
    except UserError as fault:
        raise UsageError(str(fault)) from fault
    if found is None:
        near = get_close_matches(env_id, known, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"installed are: {', '.join(known) or 'none'}"
        raise UsageError(f"ID: no environment '{one_line(env_id)}' is installed by `env install`; {advice}")
    return found


def _installed() -> Iterator[Entry]:
    try:
        environments = Registry().all()
    except UserError as fault:
        raise UsageError(str(fault)) from fault
    for each in environments:
        place = OWN if each.has_interpreter else SHARED
        yield Entry(each.id, each.version, place, each.verifiers, _fault(each), each.directory, each.source)


def _fault(installed: InstalledEnvironment) -> str:
    if not installed.is_whole:
        return f"its files are gone; install it again: medarc_train env install {installed.source}"
    if installed.python is None:
        return ""
    return interpreter_fault(installed.python, "verifiers", installed.module) or ""


def _of_the_run() -> Iterator[Entry]:
    """Packages of this interpreter that are environments: they require verifiers, and have a module that loads one."""
    for package in distributions():
        requires = [text.split()[0].partition(">")[0].partition("=")[0] for text in package.requires or ()]
        if not any(name.startswith("verifiers") for name in requires):
            continue
        env_id = canonical_id(package.name)
        spec = find_module(module_of(env_id))
        if spec is not None and spec.origin is not None and not lacks_name(spec, LOADER):
            yield Entry(env_id, package.version, RUN, _our_verifiers(), "", "", str(spec.origin))


def _our_verifiers() -> str:
    try:
        return version("verifiers")
    except PackageNotFoundError:
        return "none"

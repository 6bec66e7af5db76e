"""`env list` and `env uninstall`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, distributions, version

from medarc_rl.cli import say, warn
from medarc_rl.commands.environments import ListOptions, UninstallOptions
from medarc_rl.environments.installing import remove_files
from medarc_rl.errors import UsageError
from prime_rl.checks.packages import LOADER, find_module, interpreter_fault, lacks_name
from prime_rl.interpreters.registry import InstalledEnvironment, Registry, RegistryFault, canonical_id, module_of
from prime_rl.utils.errors import one_line

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
    """List the environments that runs find by id."""
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
    except RegistryFault as fault:
        raise UsageError(str(fault)) from fault
    if found is None:
        near = get_close_matches(env_id, known, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"installed are: {', '.join(known) or 'none'}"
        raise UsageError(f"ID: no environment '{one_line(env_id)}' is installed by `env install`; {advice}")
    return found


def _installed() -> Iterator[Entry]:
    try:
        environments = Registry().all()
    except RegistryFault as fault:
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

"""`env new`: writes the package of a new environment, which passes its tests, `env check`, and trains."""

from __future__ import annotations

import keyword
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import jinja2

from medarc_rl.cli import say
from medarc_rl.environments.options import NewOptions
from medarc_rl.errors import MedarcError, UsageError
from prime_rl.checks.packages import find_module, is_built_in
from prime_rl.interpreters import Registry, module_of
from prime_rl.launch.job import command_prefix
from prime_rl.utils.errors import UserError, one_line

NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
MAX_NAME_CHARS = 50
TEMPLATES = Path(__file__).parent / "templates"
ABOUT = {
    "single-turn": "Asks a question, and compares the answer with the right one.",
    "multi-turn": "Answers the model until it has found a number.",
    "tools": "Offers the model a tool.",
    "judge": "Lets another model grade the answers.",
}
_MAX_TOKENS = {"tools": 96, "judge": 32}
_DEFAULT_MAX_TOKENS = 16


def new(options: NewOptions) -> int:
    """Write the package of a new environment."""
    _check_name(options.name)
    target = options.directory / options.name
    try:
        _write(options, target)
    except FileExistsError as error:
        raise UsageError(
            f"{one_line(str(target))} already exists and was not changed: choose another NAME or --directory"
        ) from error
    except OSError as error:
        raise MedarcError(f"{one_line(str(error.filename))}: {error.strerror}") from error
    for file in sorted(target.iterdir()):
        say(f"written: {file}")
    say(f"next: {command_prefix(os.environ)}medarc_train env install {shlex.quote(str(target))}")
    return 0


def _check_name(name: str) -> None:
    """Raises UsageError: a name is part of a module's name and of file names, and must not hide a package."""
    shown, module = one_line(name), module_of(name)
    if NAME.fullmatch(name) is None or len(name) > MAX_NAME_CHARS:
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:MAX_NAME_CHARS].strip("-")
        advice = f", such as {near}" if NAME.fullmatch(near) else ""
        raise UsageError(f"NAME '{shown}': use lower case letters, digits and single dashes{advice}")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise UsageError(f"NAME '{shown}': Python has a module with this name; choose another")
    if is_built_in(name):
        raise UsageError(f"NAME '{shown}': medarc-rl has a built-in environment with this name; choose another")
    try:
        taken = Registry().find(name)
    except UserError as fault:
        raise UsageError(str(fault)) from fault
    spec = find_module(module)
    if taken is not None or spec is not None:
        where = taken.source if taken is not None else str(spec.origin if spec else "")
        raise UsageError(f"NAME '{shown}': a module {module!r} is installed already, from {where}; choose another")


def _write(options: NewOptions, target: Path) -> None:
    """Write all files next to the target, and rename the folder."""
    module, stem = module_of(options.name), options.kind.replace("-", "_")
    values = {
        "name": options.name,
        # The commands in the files work from here, as `next:` does.
        "folder": one_line(shlex.quote(str(target))),
        "template": one_line(shlex.quote(str(target / "short_tools.jinja"))),
        "rl_config": one_line(shlex.quote(str(target / "rl.toml"))),
        "prefix": command_prefix(os.environ),
        "module": module,
        "kind": options.kind,
        "about": ABOUT[options.kind],
        "max_tokens": _MAX_TOKENS.get(options.kind, _DEFAULT_MAX_TOKENS),
    }
    loader = jinja2.FileSystemLoader(TEMPLATES)
    # The files are no HTML, and `name` is checked.
    templates = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    files = {
        "pyproject.toml": "pyproject.toml.j2",
        "README.md": "README.md.j2",
        "rl.toml": "rl.toml.j2",
        f"{module}.py": f"{stem}.py.j2",
        f"test_{module}.py": f"test_{stem}.py.j2",
    }
    if options.kind == "tools":
        files["short_tools.jinja"] = "short_tools.jinja.j2"
    options.directory.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target):
        raise FileExistsError(target)
    scratch = Path(tempfile.mkdtemp(prefix=f".{options.name}-", dir=options.directory))
    try:
        for name, template in files.items():
            (scratch / name).write_text(templates.get_template(template).render(values), encoding="utf-8")
        scratch.chmod(0o777 & ~_umask())
        # Fails if somebody has made a folder with files there meanwhile.
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

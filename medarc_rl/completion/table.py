"""The commands, their options and config keys as one JSON table, which completion reads instead of importing them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import medarc_rl
import prime_rl
from medarc_rl.completion.hooks import SHELLS
from prime_rl.utils.private import home_directory

CONFIGS_OF = {
    "sft": ("sft",),
    "dpo": ("dpo",),
    "rm": ("rm",),
    "rl": ("rl",),
    "eval": ("eval",),
    "passk": ("eval",),
    "explain": ("rl", "sft", "dpo", "rm", "eval"),
    "check": ("rl", "sft", "dpo", "rm"),
}
"""Which configs' keys a command accepts as options."""
ARGUMENTS = {"RUN": "run", "RUN_OR_WEIGHTS": "run", "WEIGHTS": "run", "JOB": "job"}
"""What a command's first argument is, by its name in the help; others are files."""
MAX_HELP_CHARS = 90
FORMAT = 2
"""Changes when the table's layout does."""


def load(program: str) -> dict[str, Any]:
    """The table of a program: from its file in the cache, or built again if code has changed since."""
    file = cache_file(program)
    state = fingerprint()
    try:
        table = json.loads(file.read_bytes())
        if table["fingerprint"] == state:
            return dict(table)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    table = {"fingerprint": state, **build(program)}
    save(table, file)
    return table


def cache_file(program: str) -> Path:
    """In the same place as `launch/caches.py` keeps caches, whose import would take longer than the answer."""
    caches = os.environ.get("PRIME_RL_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or home_directory() / ".cache", "prime-rl"
    )
    return Path(caches, "completion", f"{program}.json")


def save(table: dict[str, Any], file: Path) -> None:
    """Keep a table for the next time. Where nothing can be written, each answer takes seconds."""
    scratch = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch.write_text(json.dumps(table), encoding="utf-8")
        scratch.replace(file)
    except OSError:
        scratch.unlink(missing_ok=True)


def fingerprint() -> str:
    """Changes when a module of the commands or of the configs does."""
    folders = (Path(str(medarc_rl.__file__)).parent, Path(str(prime_rl.__file__)).parent / "configs")
    newest_ns, count = 0, 0
    for folder in folders:
        for directory, _, files in os.walk(folder):
            for name in files:
                if name.endswith(".py"):
                    count += 1
                    newest_ns = max(newest_ns, os.stat(f"{directory}/{name}").st_mtime_ns)  # noqa: PTH116 - half the time
    return f"{FORMAT} {folders[0]} {count} {newest_ns}"


def build(program: str) -> dict[str, Any]:
    """Import the commands and the configs, and describe them."""
    import importlib

    import typer

    from prime_rl.configs.surface.root import ROOTS

    app = importlib.import_module(f"medarc_rl.{program}").app
    group: Any = typer.main.get_command(app)
    commands = {name: _command(name, each) for name, each in group.commands.items()}
    used = {kind for each in commands.values() for kind in each.get("configs", ())}
    return {
        "shells": list(SHELLS),
        "options": {
            "--help": "Show the commands.",
            "--show-completion": "Print the completion of a shell.",
            "--install-completion": "Install the completion of a shell.",
        },
        "commands": commands,
        "keys": {kind: dict(_keys(ROOTS[kind])) for kind in sorted(used)},
    }


def _command(name: str, command: Any) -> dict[str, Any]:
    if hasattr(command, "commands"):
        below = {key: _command(key, each) for key, each in command.commands.items()}
        return {"help": _short(command.help or ""), "commands": below}
    options, argument = {"--help": {"help": "Show this help.", "flag": True}}, None
    for parameter in command.params:
        annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
        if type(parameter).__name__ == "TyperArgument":
            argument = argument or ARGUMENTS.get(str(parameter.metavar).partition("...")[0], "file")
            continue
        described: dict[str, Any] = {"help": _short(parameter.help or "")}
        if getattr(parameter, "is_flag", False):
            described["flag"] = True
        elif get_origin(annotation) is Literal:
            described["choices"] = [str(choice) for choice in get_args(annotation)]
        elif annotation in (Path, list[Path]):
            described["path"] = True
        options |= dict.fromkeys((*parameter.opts, *parameter.secondary_opts), described)
    return {
        "help": _short(command.help or ""),
        "options": options,
        "argument": argument,
        "configs": list(CONFIGS_OF.get(name, ())),
        "names_keys": name == "explain",
    }


def _keys(root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of a config. The first item of a list stands for all."""
    from prime_rl.utils.pydantic_config.describe import field_doc
    from prime_rl.utils.pydantic_config.schema import alternatives, list_items, literals, sections_among

    def below(section: Any, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, field in section.model_fields.items():
            kinds = alternatives(field.annotation)
            items = sections_among(list_items(kinds) or ())
            children = sections_among(kinds)
            described: dict[str, Any] = {"help": _short(field_doc(section, name))}
            if children or items:
                described["section"] = True
            elif bool in kinds:
                described["flag"] = True
            elif choices := literals(kinds):
                described["choices"] = [str(choice) for choice in choices]
            key = f"{prefix}{name}"
            yield key, described
            if items:
                key = f"{key}.0"
                yield key, {"help": "The first item.", "section": True}
            for child in (*children, *items):
                yield from below(child, f"{key}.")

    merged: dict[str, dict[str, Any]] = {}
    for key, described in below(root, ""):
        known = merged.setdefault(key, described)
        # The variants of a union: `type` has one choice in each.
        for choice in described.get("choices", ()):
            if choice not in known.setdefault("choices", []):
                known["choices"].append(choice)
    return iter(merged.items())


def _short(text: str) -> str:
    """The first sentence, on one line."""
    line = " ".join(text.split()).partition(". ")[0].rstrip(".")
    return line if len(line) <= MAX_HELP_CHARS else line[: MAX_HELP_CHARS - 1] + "…"

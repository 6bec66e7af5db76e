"""Generates the reference of every command and option from the programs.

`uv run python docs/generate/commands.py > docs/commands.md`
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer

from medarc_rl import medarc_jobs, medarc_slurm, medarc_submit, medarc_train
from medarc_rl.cli import commands_of
from prime_rl.configs.surface.docs import ROOTS

ROOT = Path(__file__).resolve().parents[2]
APPS = {
    "medarc_train": medarc_train.app,
    "medarc_slurm": medarc_slurm.app,
    "medarc_submit": medarc_submit.app,
    "medarc_jobs": medarc_jobs.app,
}
CLASSES = {
    "rl": "RLConfig",
    "sft": "SFTConfig",
    "trainer": "TrainerConfig",
    "orchestrator": "OrchestratorConfig",
    "inference": "InferenceConfig",
    "eval": "OfflineEvalConfig",
    "passk": "OfflineEvalConfig",
    "env-server": "EnvServerConfig",
}
"""The config class of each program of the engine."""

INTRODUCTION = """\
# Commands

Generated with `uv run python docs/generate/commands.py > docs/commands.md`; a test checks that it is up to date.

```bash
uv run medarc_train rl examples/reverse_text/rl_cpu.toml --output-dir outputs/reverse-text --max-steps 40
```

`--output-dir` is an option of the command, `--max-steps` a key of the config. Every command that takes a CONFIG also
takes each of its keys as an option ([config.md](config.md#where-values-come-from)). A mistake is one `error:` line per
fault and exit code 2 ([exit codes](cli.md#exit-codes)).
"""

ENGINE = """\
## The engine's programs

```bash
uv run rl @ examples/reverse_text/rl_cpu.toml --output-dir outputs/reverse-text
```

They take `@ FILE` and every key of their config class; `--help` lists the keys. `rl`, `sft` and `eval` use the first
visible GPUs and the config's ports; on a node that others use, take `medarc_train`.

| program | config | does |
|---|---|---|"""


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for program, app in APPS.items():
        group: Any = typer.main.get_command(app)
        parts.append(f"## {program}\n\n{group.help}\n")
        if group.params:
            rows = [f"| {option_names(each)} | {default(each)} | {cell(each.help)} |" for each in group.params]
            parts.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows, ""]))
        parts += [command_text(f"{program} {name}", command) for name, command in commands_of(app).items()]
    parts.append("\n".join([ENGINE, *engine_rows()]) + "\n")
    return "\n".join(parts)


def command_text(name: str, command: Any) -> str:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    options = [parameter for parameter in shown if parameter.param_type_name == "option"]
    usage = " ".join([name, *(argument_name(each) for each in arguments), *(["[OPTIONS]"] if options else [])])
    rows = [f"| `{argument_name(each)}` | | {cell(each.help)} |" for each in arguments]
    rows += [f"| {option_names(each)} | {default(each)} | {cell(each.help)} |" for each in options]
    head = [f"### {name}", "", command.help or "", "", "```", usage, "```", ""]
    return "\n".join([*head, "| option | default (range) | meaning |", "|---|---|---|", *rows, ""])


def argument_name(argument: Any) -> str:
    name = f"{argument.metavar or argument.name.upper()}{'...' if argument.nargs == -1 else ''}"
    return name if argument.required else f"[{name}]"


def option_names(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or plain_type(option.type_descriptor.annotation)}"
    names = [*option.opts, *option.secondary_opts]
    return ", ".join(f"`{name}{value}`".replace("|", "\\|") for name in names)


def plain_type(annotation: Any) -> str:
    """The name of an option's type, of its items if it is a list; the values of a choice."""
    kinds = get_args(annotation) or (annotation,)
    if isinstance(kinds[0], str):
        return "|".join(kinds)
    return str(kinds[0].__name__).upper()


def default(option: Any) -> str:
    """The default, and the range of a number."""
    if option.is_flag:
        return f"`{option.opts[0] if option.default else option.secondary_opts[0]}`" if option.secondary_opts else ""
    shown = [] if option.default in (None, (), []) or callable(option.default) else [f"`{option.default}`"]
    if option.min is not None:
        shown.append(f"({option.min} to {option.max})" if option.max is not None else f"(from {option.min})")
    return " ".join(shown)


def cell(text: str | None) -> str:
    """The text on one line. Outside code, `<word>` would be HTML."""
    parts = " ".join((text or "").split()).replace("|", "\\|").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def engine_rows() -> Iterator[str]:
    scripts = tomllib.loads((ROOT / "prime-rl" / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    known = {root.__name__: root for root in ROOTS}
    for program in scripts:
        name = CLASSES[program]
        yield f"| `{program}` | [`{name}`](config.md#{name.lower()}) | {cell(known[name].__doc__)} |"


if __name__ == "__main__":
    sys.stdout.write(page())

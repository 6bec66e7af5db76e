"""Turns a dataclass of options into a Typer command with examples, and an error into one line on stderr."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from medarc_rl.completion.hooks import Shell, hook, install
from medarc_rl.errors import NothingToDo, UsageError
from prime_rl.utils.errors import PrimeError
from prime_rl.utils.private import home_directory

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# The examples at the end of each command's help page. `tests/test_command_line.py` checks that they parse.


EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "medarc_train sft": (
        "medarc_train sft examples/reverse_text/sft_cpu.toml --output-dir outputs/rt-sft",
        "medarc_train sft @ examples/reverse_text/sft_cpu.toml --optim.lr 1e-3 --resume latest",
        "medarc_train sft @ examples/reverse_text/sft.toml --estimate --gpu H100",
    ),
    "medarc_train rm": (
        "medarc_train rm examples/safe_advice/rm_cpu.toml --output-dir outputs/safe-advice-rm",
        "medarc_train rm examples/safe_advice/rm_cpu.toml --preflight",
    ),
    "medarc_train dpo": (
        "medarc_train dpo examples/safe_advice/dpo_cpu.toml --output-dir outputs/safe-advice",
        "medarc_train dpo @ examples/safe_advice/dpo_cpu.toml --loss.type simpo --loss.beta 2",
        "medarc_train dpo examples/safe_advice/dpo_cpu.toml --preflight",
    ),
    "medarc_train rl": (
        "medarc_train rl examples/reverse_text/rl_cpu.toml --output-dir outputs/rt",
        "medarc_train rl @ examples/reverse_text/rl_single.toml --single-gpu --max-steps 40",
        "medarc_train rl examples/med_calc/rl_cpu.toml --preflight",
    ),
    "medarc_train eval": ("medarc_train eval examples/med_calc/eval_cpu.toml --output-dir outputs/med-calc-eval",),
    "medarc_train passk": (
        "medarc_train passk examples/med_questions/eval_cpu.toml --attempts 8 --output-dir outputs/med-pass",
        "medarc_train passk examples/med_questions/eval_cpu.toml --output-dir outputs/med-pass --curriculum order.txt "
        "--order easy --min-pass-rate 0.1 --max-pass-rate 0.9",
    ),
    "medarc_train explain": (
        "medarc_train explain examples/reverse_text/rl_cpu.toml trainer.optim.lr",
        "medarc_train explain outputs/rt --diff examples/reverse_text/rl_cpu.toml --json",
    ),
    "medarc_train chat": (
        "medarc_train chat outputs/rt",
        'medarc_train chat outputs/rt/weights/step_80 --no-base --prompt "hello there"',
    ),
    "medarc_train watch": (
        "medarc_train watch outputs/rt",
        "medarc_train watch outputs/rt --once --json",
    ),
    "medarc_train report": (
        "medarc_train report outputs/rt",
        "medarc_train report outputs/seed0 outputs/seed1",
    ),
    "medarc_train rollouts": (
        "medarc_train rollouts outputs/rt --step 20 --worst 5",
        "medarc_train rollouts outputs/rt --step last --json",
    ),
    "medarc_train trace": ("medarc_train trace outputs/rt --out rt.json",),
    "medarc_train upload": (
        "medarc_train upload outputs/rt",
        "medarc_train upload outputs/rt --to s3://bucket/runs/rt --no-samples",
    ),
    "medarc_train lm-eval": (
        "medarc_train lm-eval outputs/rt --tasks gsm8k,ifeval --num-fewshot 4",
        "medarc_train lm-eval outputs/rt --tasks arc_easy --watch --limit 200",
    ),
    "medarc_train env new": (
        "medarc_train env new medqa",
        "medarc_train env new dosing --kind tools --directory environments",
    ),
    "medarc_train env check": (
        "medarc_train env check reverse-text",
        "medarc_train env check environments/dosing --rows 20 --json",
    ),
    "medarc_train env try": (
        "medarc_train env try reverse-text --model examples/reverse_text/checkpoint --max-tokens 40",
        "medarc_train env try dosing --model Qwen/Qwen3-0.6B -n 10 --html dosing.html",
    ),
    "medarc_train env install": (
        "medarc_train env install examples/reverse_text/environment",
        "medarc_train env install medqa==0.1.4 --own",
    ),
    "medarc_train env list": ("medarc_train env list", "medarc_train env list --json"),
    "medarc_train env uninstall": ("medarc_train env uninstall reverse-text",),
    "medarc_train migrate": ("medarc_train migrate old.toml",),
    "medarc_slurm sft": (
        "medarc_slurm sft examples/reverse_text/sft.toml --gpus 2 --output-dir outputs/rt-sft",
        "medarc_slurm sft @ examples/reverse_text/sft.toml --dry-run",
    ),
    "medarc_slurm rm": ("medarc_slurm rm examples/safe_advice/rm_cpu.toml --gpus 1 --output-dir outputs/rm --dry-run",),
    "medarc_slurm dpo": (
        "medarc_slurm dpo examples/safe_advice/dpo_cpu.toml --gpus 1 --output-dir outputs/safe-advice --dry-run",
    ),
    "medarc_slurm rl": (
        "medarc_slurm rl examples/reverse_text/rl_slurm.toml --single-gpu --output-dir outputs/rt",
        "medarc_slurm rl examples/reverse_text/rl_slurm.toml --train-gpus 1 --infer-gpus 1 --requeue",
    ),
    "medarc_slurm check": ("medarc_slurm check rl examples/reverse_text/rl_slurm.toml --single-gpu --json",),
    "medarc_slurm status": ("medarc_slurm status last",),
    "medarc_slurm logs": ("medarc_slurm logs 123 -f",),
    "medarc_slurm cancel": ("medarc_slurm cancel rl_slurm-rl",),
    "medarc_submit sft": (
        "medarc_submit sft examples/reverse_text/sft.toml --to kubernetes --image registry.example/medarc-rl:1.0 "
        "--gpus 2 --output-claim runs --dry-run",
        "medarc_submit sft examples/reverse_text/sft.toml --to sagemaker --build --instance-type ml.g5.2xlarge --wait",
        "medarc_submit sft examples/reverse_text/sft_cpu.toml --to sagemaker --local --image medarc-rl:dev",
        "medarc_submit sft examples/reverse_text/sft_cpu.toml --to ray --wait",
    ),
    "medarc_submit rm": ("medarc_submit rm examples/safe_advice/rm_cpu.toml --to ray --wait",),
    "medarc_submit dpo": ("medarc_submit dpo examples/safe_advice/dpo_cpu.toml --to ray --wait",),
    "medarc_submit sagemaker-policy": (
        "medarc_submit sagemaker-policy --role arn:aws:iam::123456789012:role/training --s3 s3://my-bucket/runs",
    ),
    "medarc_submit rl": (
        "medarc_submit rl examples/reverse_text/rl_slurm.toml --to kubernetes --image registry.example/medarc-rl:1.0 "
        "--output-claim runs --secret-env HF_TOKEN=hub/token",
    ),
    "medarc_submit eval": (
        "medarc_submit eval examples/med_calc/eval_cpu.toml --to kubernetes --image registry.example/medarc-rl:1.0 "
        "--gpus 0 --output-claim runs --wait",
    ),
    "medarc_jobs list": ("medarc_jobs list", "medarc_jobs list --to slurm --json"),
    "medarc_jobs status": ("medarc_jobs status last",),
    "medarc_jobs logs": ("medarc_jobs logs last -f", "medarc_jobs logs rt-sft --tail 100"),
    "medarc_jobs cancel": ("medarc_jobs cancel rt-sft",),
    "medarc_jobs wait": ("medarc_jobs wait last", "medarc_jobs wait rt-sft rt-rl --timeout 3600"),
}


def examples_text(program: str, command: str) -> str | None:
    """The end of a help page. Programs are started with `uv run`, unless the environment is active."""
    lines = EXAMPLES.get(f"{program} {command}")
    # The first line keeps Typer from joining the others.
    return None if lines is None else "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


_UNKNOWN_OPTION = re.compile(r"(?P<option>--[a-z][a-z-]*): unknown option(?:; did you mean (?P<keys>[^?]*)\?)?")

OptionsT = TypeVar("OptionsT", bound="DataclassInstance")

Resume = Annotated[
    str | None,
    typer.Option(
        metavar="latest|N|auto",
        help="Continue the run in its directory: from the newest checkpoint, from step N, or from the newest if there "
        "is one and otherwise from the start. Sets ckpt.resume_step.",
    ),
]


def resume_words(resume: str | None) -> list[str]:
    """The option `--resume` among the words of a config."""
    return [] if resume is None else [f"--resume={resume}"]


_KEY_OPTIONS = {
    "sft": "--optim.lr 1e-6",
    "dpo": "--loss.beta 0.05",
    "rm": "--optim.lr 1e-5",
    "eval": "--num-examples 50",
}
"""An option for a key of a command's own config; other commands take a config of RL."""


def _config_words(command: str) -> Any:
    """The type of the words of a command's config."""
    option = _KEY_OPTIONS.get(command, "--trainer.optim.lr 1e-6")
    argument = typer.Argument(
        metavar="CONFIG",
        help="A TOML file, written `config.toml`, `@ config.toml` or `@config.toml`; of several `@` files, the last "
        f"takes precedence. Any option that is not listed below sets a key of the config: `{option}`.",
    )
    return Annotated[list[str] | None, argument]


def say(line: str) -> None:
    """Print progress or a result on stdout."""
    sys.stdout.write(f"{line}\n")


def warn(line: str) -> None:
    sys.stderr.write(f"warning: {line}\n")


class OneLineErrors(TyperGroup):
    """Prints a user's mistakes as `error: …`, one line for each fault, without usage or traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        faults: Sequence[str] = ()
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except NothingToDo as done:
            say(str(done))
            code = done.exit_code
        except PrimeError as error:
            faults, code = error.faults, error.exit_code
        except OSError as error:
            # A file of another user's, say, or a folder in the place of a file, wherever a command reads.
            if error.filename is None:
                raise
            faults, code = (f"{error.filename}: {error.strerror}",), 1
        # Typer's own errors about options have no more specific public class.
        except typer.TyperException as error:
            said = " ".join(error.format_message().split())
            if "gpus': " in said and "valid integer" in said:
                said += "; it is the number of GPUs, and CUDA_VISIBLE_DEVICES=0,1 says which"
            faults, code = (said + _commands_instead(error),), error.exit_code
        except typer.Abort:
            faults, code = ("aborted",), 1
        sys.stderr.writelines(f"error: {fault}\n" for fault in faults)
        if standalone_mode:
            sys.exit(code)
        return code


def _commands_instead(error: typer.TyperException) -> str:
    """Names the commands, if the user has named none."""
    context = getattr(error, "ctx", None)
    if context is None or error.format_message() != "Missing command.":
        return ""
    return f" Give one of {', '.join(context.command.list_commands(context))}, or --help"


EXIT_CODES = "\b\nExit codes:\n" + "\n".join(
    (
        "  0        done",
        "  1        it failed; the last line gives the reason",
        "  2        it cannot be done as asked; one error line for each fault",
        "  128 + n  stopped by signal n: 130 Ctrl-C, 143 SIGTERM",
    )
)


def _show_completion(context: typer.Context, shell: Shell | None) -> None:
    if shell is not None:
        sys.stdout.write(hook(shell, _program(context)))
        raise typer.Exit(0)


def _install_completion(context: typer.Context, shell: Shell | None) -> None:
    if shell is not None:
        for file in install(shell, _program(context), os.environ, home_directory()):
            say(f"written: {file}")
        say("open a new shell to use it")
        raise typer.Exit(0)


def _program(context: typer.Context) -> str:
    return Path(context.info_name or "").name


def completion_options(
    # Eager, because they need no command.
    show_completion: Annotated[
        Shell | None,
        typer.Option(callback=_show_completion, is_eager=True, help="Print the completion script for this shell."),
    ] = None,
    install_completion: Annotated[
        Shell | None,
        typer.Option(callback=_install_completion, is_eager=True, help="Install the completion script for your user."),
    ] = None,
) -> None:
    """The options of a program itself."""


@dataclass(frozen=True, slots=True)
class Lazy:
    """A command whose module is imported when the command is called, or asked for its help."""

    target: str
    """`module:function`, which returns the exit code. Its parameter `options` is a dataclass, whose fields become the
    command's options; `words` gets the config's files and overrides. Without `options`, Typer reads its parameters."""
    summary: str
    """First sentence of its help, for the list of commands."""
    hidden: Sequence[str] = ()
    """Options that its help does not show."""
    options: str | None = None
    """`module:class` of the options, whose docstring is then the help. The target is imported when the command runs."""
    takes_config: bool = False
    """With `options`: the target takes `words`, too."""


@dataclass(frozen=True, slots=True)
class Group:
    """A command that has commands of its own, such as `medarc_train env`."""

    commands: Mapping[str, Lazy]
    summary: str


class Commands(Mapping[str, Any]):
    """The commands of a program by name, each imported when it is asked for."""

    def __init__(self, program: str, declared: Mapping[str, Lazy | Group], eager: Mapping[str, Any]) -> None:
        self.program = program
        self.declared = declared
        self.loaded = dict(eager)

    def __getitem__(self, name: str) -> Any:
        if name not in self.loaded:
            each = self.declared[name]
            self.loaded[name] = (
                _load(self.program, name, each) if isinstance(each, Lazy) else _group(self.program, name, each)
            )
        return self.loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.loaded or name in self.declared

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.declared, *self.loaded]))

    def __len__(self) -> int:
        return len({*self.declared, *self.loaded})

    def short_help(self, name: str, max_chars: int) -> str:
        summary = self.declared[name].summary if name in self.declared else self[name].help
        return TyperCommand(name, help=summary).get_short_help_str(max_chars)


def _program_class(base: type[TyperGroup], program: str, declared: Mapping[str, Lazy | Group]) -> type[TyperGroup]:
    """The class of a group with these commands. Typer makes an instance from keyword arguments alone."""

    class Program(base):  # type: ignore[misc, valid-type]
        commands: Any

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands = Commands(program, declared, self.commands)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            max_chars = formatter.width - 6 - max(map(len, self.commands))
            with formatter.section("Commands"):
                formatter.write_dl([(name, self.commands.short_help(name, max_chars)) for name in self.commands])

    return Program


_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


def new_app(program: str, help_text: str, commands: Mapping[str, Lazy | Group] | None = None) -> typer.Typer:
    """A Typer app with several commands. It does not use Rich, whose import takes longer than the rest of a dry run."""
    app = typer.Typer(
        name=program,
        cls=_program_class(OneLineErrors, program, commands or {}),
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_HELP_OPTIONS,
    )
    app.callback(help=help_text, epilog=EXIT_CODES)(completion_options)
    return app


def _group(program: str, name: str, group: Group) -> Any:
    below = f"{program} {name}"
    app = typer.Typer(
        name=name,
        cls=_program_class(TyperGroup, below, group.commands),
        add_completion=False,
        rich_markup_mode=None,
        context_settings=_HELP_OPTIONS,
    )
    # With a callback, a group of one command keeps that command's name.
    app.callback(help=group.summary)(lambda: None)
    return typer.main.get_command(app)


def _load(program: str, name: str, lazy: Lazy) -> Any:
    """Make a command. Its function is imported now, or when it runs if `lazy` names its options."""
    app = typer.Typer(name=program, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    run: Any
    if lazy.options is not None:
        options = _imported(lazy.options)

        def run(*arguments: Any) -> int:
            code: int = _imported(lazy.target)(*arguments)
            return code

        run.__doc__ = options.__doc__
        hints = {"options": options, **({"words": list[str]} if lazy.takes_config else {})}
    else:
        run = _imported(lazy.target)
        hints = get_type_hints(run)
    if "options" not in hints:
        app.command(name, epilog=examples_of(app, name), context_settings=_HELP_OPTIONS)(run)
    elif "words" in hints:
        add_command(app, name, hints["options"], run, lazy.hidden)
    else:
        add_command_without_config(app, name, hints["options"], run)
    command = typer.main.get_command(app)
    command.name = name
    return command


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def commands_of(app: typer.Typer) -> dict[str, Any]:
    """Every command that can be typed, by its words after the program's name: `rl`, `env install`."""

    def below(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from below(command, f"{prefix}{name} ")
            else:
                yield f"{prefix}{name}", command

    return dict(below(typer.main.get_command(app), ""))


def examples_of(app: typer.Typer, command: str) -> str | None:
    """The end of a command's help page."""
    return examples_text(str(app.info.name), command)


def add_command(
    app: typer.Typer,
    name: str,
    options: type[OptionsT],
    run: Callable[[list[str], OptionsT], int],
    hidden: Sequence[str] = (),
) -> None:
    """Add a command. The fields of the dataclass `options` become its options; `run` returns its exit code.

    `run` receives the words that are not options of the command: the config's files and overrides. The help page does
    not show the `hidden` ones.
    """

    def command(words: list[str] | None = None, **values: Any) -> int:
        try:
            return run(words or [], options(**values))
        except UsageError as error:
            own = [f"--{field.name.replace('_', '-')}" for field in fields(options)]
            raise UsageError(*(_with_own_option(fault, own) for fault in error.faults)) from error

    _declare(command, [_parameter("words", _config_words(name), None), *_parameters(options, hidden)])
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, help=inspect.getdoc(run), epilog=examples_of(app, name), context_settings=settings)(command)


def _with_own_option(fault: str, own: Sequence[str]) -> str:
    """The fault of an unknown option with the command's own options that were probably meant.

    Keys of the config are suggested where the fault was found, which does not know the options of commands.
    """
    found = _UNKNOWN_OPTION.fullmatch(fault)
    if found is None:
        return fault
    last = found["option"].rpartition("-")[2]
    near = [name for name in own if name.rpartition("-")[2] == last]
    if found["keys"] is None:
        near = list(dict.fromkeys([*get_close_matches(found["option"], own, 1), *near]))
    words = [*near, *([found["keys"]] if found["keys"] else [])]
    return f"{found['option']}: unknown option; did you mean {' or '.join(words)}?" if near else fault


def add_command_without_config(
    app: typer.Typer, name: str, options: type[OptionsT], run: Callable[[OptionsT], int]
) -> None:
    """Add a command that reads no config. The fields of the dataclass `options` are its arguments and options."""

    def command(**values: Any) -> int:
        return run(options(**values))

    _declare(command, _parameters(options))
    app.command(name, help=inspect.getdoc(run), epilog=examples_of(app, name))(command)


def _declare(command: Callable[..., int], parameters: Sequence[inspect.Parameter]) -> None:
    """Give a function the signature that Typer reads."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _parameters(options: type[DataclassInstance], hidden: Sequence[str] = ()) -> list[inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    for name in hidden:
        kind, option = get_args(hints[name])
        # A copy: other commands show the same option.
        option = copy.copy(option)
        option.hidden = True
        hints[name] = Annotated[kind, option]
    return [_parameter(field.name, hints[field.name], _default(field)) for field in fields(options)]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default

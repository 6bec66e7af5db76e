"""Tries an environment: `env check` on scripted answers, without a model, and `env try` with a model on a few examples.

Both run the environment's code in other processes. The one of `env check` is ended if that code never returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from medarc_rl.cli import say
from medarc_rl.environments.installing import install_into, source_of
from medarc_rl.environments.options import CheckOptions, TryOptions
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.launchers.shared_node import shared_node
from medarc_rl.utils import GivenConfig, load_run
from prime_rl.checks.chat_models import find_chat_models
from prime_rl.checks.packages import environment_faults
from prime_rl.checks.start_dir import StartDir, looks_like_path
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rollouts.environments import EnvConfig
from prime_rl.interpreters import DIRECTORY_VARIABLE, Registry
from prime_rl.launch.commands import EVAL
from prime_rl.launch.logs import tail
from prime_rl.launch.run import launch
from prime_rl.run.paths import RunPaths, step_of
from prime_rl.utils.errors import StartFault, one_line
from prime_rl.utils.gpus import MASK_VARIABLE
from prime_rl.utils.logger import count_of
from prime_rl.utils.scratch import scratch_directory
from prime_rl.watch.screens import eval_screen

if TYPE_CHECKING:
    from prime_rl.history.rollouts import KeptRollouts

# `env check`.


CHECK = "prime_rl.orchestrator.env_checks.environment_check"
LOAD_LIMIT_S = 600.0
"""For loading the environment and reading its rows, which may download them."""
_GRACE_S = 2.0
"""Between an answer's own limit and the end of the process: code that waits is cancelled, code that loops is killed."""
_TAIL_LINES = 8
_LEVELS = ("ok", "warn", "fail")


@dataclass(slots=True)
class Findings:
    """Rows of the check."""

    show: Callable[[dict[str, str]], None]
    rows: list[dict[str, str]] = field(default_factory=list)

    def add(self, level: str, subject: str, text: str) -> None:
        row = {"level": level if level in _LEVELS else "fail", "subject": subject, "text": text}
        self.rows.append(row)
        self.show(row)

    def count(self, level: str) -> int:
        return sum(row["level"] == level for row in self.rows)


def check(options: CheckOptions) -> int:
    """Look at an environment's dataset, and try its rewards. Ends with 1 if something failed."""
    if options.form is not None and "{answer}" not in options.form:
        raise UsageError("--form has no {answer}, which stands for the answer of a row")
    if options.model is not None and not (options.model / "tokenizer.json").is_file():
        raise UsageError(f"--model: {one_line(str(options.model))} has no tokenizer.json: name the folder of a model")
    arguments = arguments_of(options.args)
    findings = Findings(lambda row: None if options.json else say(_line(row)))
    with installed(options.environment, arguments) as (config, env):
        request = {
            "env": {"id": config.id, "args": arguments},
            "model": None if options.model is None else str(options.model),
            "rows": options.rows,
            "form": options.form,
            "turns": options.turn or [],
            "limit_s": options.limit_s,
        }
        run_check(request, env, findings)
    if options.json:
        sys.stdout.write(json.dumps(findings.rows, indent=2) + "\n")
    else:
        warnings, failures = count_of("warning", findings.count("warn")), count_of("failure", findings.count("fail"))
        say(f"{findings.count('ok')} ok, {warnings}, {failures}")
    return 1 if findings.count("fail") else 0


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of `load_environment` on the command line. Raises UsageError."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--args is not JSON: {one_line(str(error))}") from error
    if not isinstance(arguments, dict):
        raise UsageError('--args must be a JSON object: \'{"split": "test"}\'')
    return arguments


@contextlib.contextmanager
def installed(environment: str, arguments: dict[str, Any]) -> Iterator[tuple[EnvConfig, dict[str, str]]]:
    """The config of an environment, and the variables with which a process finds it. A package that lies in a directory
    is installed for as long as the block runs.

    Raises:
        UsageError: the environment does not exist, or a built-in one does not take the arguments.
    """
    if not environment.strip():
        raise UsageError("ID: it is empty")
    is_directory = os.path.isdir(environment)  # noqa: PTH112 - text that is too long for a path is no directory
    if not is_directory and looks_like_path(environment):
        raise UsageError(f"PATH: {one_line(environment)} does not exist")
    if not is_directory or (Path(environment).name == environment and Registry().find(environment) is not None):
        config = EnvConfig(id=environment, args=arguments)
        if faults := list(environment_faults("ID", [config], StartDir())):
            raise UsageError(*(one_line(_in_words(fault)) for fault in faults))
        yield config, {}
        return
    with scratch_directory("env-check") as scratch:
        registry = Registry(scratch)
        found = install_into(registry, source_of(environment, copy=False))
        yield EnvConfig(id=found.id), {DIRECTORY_VARIABLE: str(scratch)}


def _in_words(fault: str) -> str:
    """A fault of a config, with the words of the command line for its keys."""
    return fault.replace("ID[0].id =", "ID").replace("ID[0].args:", "--args:", 1)


def run_check(request: dict[str, Any], env: dict[str, str], findings: Findings) -> None:
    """Run the check in a process, and add its rows."""
    with scratch_directory("env-check") as scratch:
        log, (reading, writing) = scratch / "output.log", os.pipe()
        argv = [sys.executable, "-m", CHECK, str(writing), json.dumps(request)]
        with log.open("wb") as output, os.fdopen(reading, "rb", buffering=0) as pipe:
            process = subprocess.Popen(
                argv,
                env={**os.environ, **env, MASK_VARIABLE: ""},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                start_new_session=True,
            )
            os.close(writing)
            try:
                ended = _follow(pipe.fileno(), request["limit_s"] + _GRACE_S, findings)
                if ended != "done":
                    _end(process)
                    _explain(ended, process, findings, tail(log, _TAIL_LINES))
            finally:
                _end(process)


def _follow(descriptor: int, limit_s: float, findings: Findings) -> str:
    """Add rows until the process is done. Returns `done`, or what it tried when it ended or did not answer in time."""
    trying, buffer, limit = "starting", b"", LOAD_LIMIT_S
    deadline_s = time.monotonic() + limit
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return f"{trying}: it did not end within {limit:g} s"
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return trying
        *lines, buffer = (buffer + chunk).split(b"\n")
        for message in map(json.loads, lines):
            if message.get("done"):
                return "done"
            if "trying" in message:
                trying = str(message["trying"])
                limit = limit_s if trying.startswith("the answer") else LOAD_LIMIT_S
                deadline_s = time.monotonic() + limit
            else:
                findings.add(str(message["level"]), str(message["subject"]), str(message["text"]))


def _explain(ended: str, process: subprocess.Popen[bytes], findings: Findings, printed: Sequence[str]) -> None:
    if "does not end within" in ended:
        findings.add("fail", "process", f"{ended}; the other answers were not tried")
        return
    last = f"; it printed last: {printed[-1]}" if printed else ""
    findings.add("fail", "process", f"ended with code {process.returncode} while trying {ended}{last}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is ending; kill its whole group otherwise."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _line(row: dict[str, str]) -> str:
    return f"{row['level']:<5} {one_line(row['subject'])}: {one_line(row['text'])}"


def try_(options: TryOptions) -> int:
    """Roll out a few examples, and show what was said and what it earned."""
    if options.html is not None and options.html.is_dir():
        raise UsageError(f"--html {options.html} is a directory: name a file")
    if options.base_url is not None and options.chat_template is not None:
        raise UsageError("--chat-template: the server at --base-url uses its own template; leave the option out")
    arguments = arguments_of(options.args)
    with installed(options.environment, arguments) as (env, variables), scratch_directory("env-try") as scratch:
        file, out = scratch / "try.toml", scratch / "out"
        try:
            file.write_text(tomli_w.dumps(_settings(options, env.id, arguments)), encoding="utf-8")
        except TypeError as error:
            raise UsageError("--args: a config has no null: leave the argument out") from error
        run = load_run(GivenConfig.read(OfflineEvalConfig, [str(file)]), "eval", out, {})
        with _variables(variables):
            code = launch(EVAL, run.config, eval_screen, shared_node(os.environ))
        shown = _show(RunPaths(out), options)
    if code == 0 and not shown:
        raise MedarcError("no rollout was kept")
    return code


def _settings(options: TryOptions, env_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The evaluation's config, as a table."""
    env = {
        "id": env_id,
        "args": arguments,
        "num_examples": options.examples,
        "rollouts_per_example": options.rollouts,
    }
    sampling: dict[str, Any] = {"max_tokens": options.max_tokens}
    if options.temperature is not None:
        sampling["temperature"] = options.temperature
    settings: dict[str, Any] = {
        "env": [env],
        "sampling": sampling,
        "device": options.device,
    }
    if options.base_url is not None:
        return settings | {"model": {"name": options.model}, "client": {"base_url": [options.base_url]}}
    server = {} if options.chat_template is None else {"chat_template": options.chat_template}
    return settings | _weights(options.model) | {"inference": {"model": server}}


def _weights(model: str) -> dict[str, Any]:
    """Config keys that choose the weights. Raises UsageError if there are none."""
    try:
        found = find_chat_models(model).tuned
    except StartFault as fault:
        raise UsageError(f"--model {fault}") from fault
    if found.adapter is not None:
        raise UsageError(
            f"--model {model}: {found.adapter} is an adapter without its model: name a step of the run's weights, or "
            "ask a server that has loaded it, with --base-url"
        )
    if found.weights is None:
        return {"model": {"name": found.name}}
    folder = Path(found.weights).absolute()  # a broadcast, which holds tensors only
    return {
        "model": {"name": found.name},
        "weights_dir": str(folder.parent),
        "steps": [step_of(folder)],
        "eval_base": False,
    }


@contextlib.contextmanager
def _variables(added: dict[str, str]) -> Iterator[None]:
    """Set environment variables in the block, for the processes that it starts."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _show(paths: RunPaths, options: TryOptions) -> int:
    """Print the rollouts, and write the page. Returns their number."""
    # Imported here so that the other commands do not load it.
    from medarc_rl.rollouts.screen import Screen
    from prime_rl.history.rollouts import KeptRollouts

    kept = KeptRollouts(paths)
    screen, count = Screen(options.full), 0
    for rollout in kept.all():
        screen.show(rollout)
        count += 1
    if count:
        screen.note(_summary(kept))
    if options.html is not None and count:
        _write_page(paths, options.html)
    return count


def _summary(kept: KeptRollouts) -> str:
    shown = [rollout.reward for rollout in kept.all()]
    rewards = [reward for reward in shown if reward is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ""
    return f"{count_of('rollout', len(shown))}{mean}"


def _write_page(paths: RunPaths, file: Path) -> None:
    from medarc_rl.report.charts import group_runs, open_runs
    from medarc_rl.report.write import write_report

    try:
        written = write_report(group_runs(open_runs([paths.root]), ()), paths.root / "page", None, True, False)
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(written.page, file)
    except OSError as error:
        raise MedarcError(f"{error.filename or file}: {error.strerror or error}") from error
    say(f"written: {file}")

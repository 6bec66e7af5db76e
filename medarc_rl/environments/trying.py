"""`env try`: rolls out a few examples of an environment with a model, and shows what was said and what it earned."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from medarc_rl.cli import say
from medarc_rl.environments.checking import arguments_of, installed
from medarc_rl.environments.options import TryOptions
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.launchers.shared_node import shared_node
from medarc_rl.utils import GivenConfig, load_run
from prime_rl.checks.chat_models import find_chat_models
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.launch.commands import EVAL
from prime_rl.launch.run import launch
from prime_rl.run.paths import RunPaths, step_of
from prime_rl.utils.errors import StartFault
from prime_rl.utils.logger import count_of
from prime_rl.utils.scratch import scratch_directory
from prime_rl.watch.screens import eval_screen

if TYPE_CHECKING:
    from prime_rl.history.rollouts import KeptRollouts


def try_(options: TryOptions) -> int:
    """Roll out a few examples, and show what was said and what it earned."""
    if options.html is not None and options.html.is_dir():
        raise UsageError(f"--html {options.html} is a directory: name a file")
    if options.base_url is not None and options.chat_template is not None:
        raise UsageError("--chat-template: the server at --base-url has its own")
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

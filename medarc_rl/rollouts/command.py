"""The command `medarc_train rollouts`."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import os
import random
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from medarc_rl.cli import say, warn
from medarc_rl.errors import UsageError
from prime_rl.utils.errors import one_line
from prime_rl.utils.logger import count_of

if TYPE_CHECKING:
    from medarc_rl.rollouts.export import Export
    from prime_rl.history.rollouts import KeptRollout, KeptRollouts, RolloutFilter
    from prime_rl.run.paths import RunPaths

_EXPORTS = "--to-sft, --to-pairs and --to-kto"
SHOWN = 5
"""Rollouts to show, if nothing says how many."""


@dataclass(frozen=True, kw_only=True)
class RolloutsOptions:
    runs: Annotated[
        list[Path],
        Argument(
            metavar="RUN", help="Directory of a run or an evaluation; --to-sft, --to-pairs and --to-kto take several."
        ),
    ]
    step: Annotated[
        str | None, Option(metavar="N|last|all", help="Training step, from 0 as in the metrics; by default, the last.")
    ] = None
    eval: Annotated[
        str | None, Option(metavar="N|last|all", help="Evaluation of this policy version, or `eval`'s of this step.")
    ] = None
    env: Annotated[str | None, Option(metavar="NAME", help="Only this environment.")] = None
    worst: Annotated[int | None, Option(min=1, help="The N with the lowest rewards.")] = None
    best: Annotated[int | None, Option(min=1, help="The N with the highest rewards.")] = None
    random: Annotated[
        int | None,
        Option(min=1, help="N at random, of those that were kept at random. 5, if no other option chooses rollouts."),
    ] = None
    truncated: Annotated[bool, Option("--truncated", help="Only those that reached a limit on tokens.")] = False
    errors: Annotated[bool, Option("--errors", help="Only those with an error of the environment or a reward.")] = False
    min_reward: Annotated[float | None, Option(help="Only those with at least this reward.")] = None
    max_reward: Annotated[float | None, Option(help="Only those with at most this reward.")] = None
    search: Annotated[str | None, Option(metavar="TEXT", help="Only those whose messages contain TEXT.")] = None
    full: Annotated[bool, Option("--full", help="Show long messages whole.")] = False
    json: Annotated[bool, Option("--json", help="Print JSON lines: all that match, unless a number is given.")] = False
    to_sft: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write a dataset for `medarc_train sft`: rollouts of all steps with at least --min-reward, once each.",
        ),
    ] = None
    to_pairs: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write a dataset for `medarc_train dpo`: the best against the worst rollout of each prompt of a step.",
        ),
    ] = None
    to_kto: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write a dataset for `medarc_train dpo` with loss.type = 'kto': rollouts with at least --min-reward "
            "are good, others bad (or only those with at most --max-reward).",
        ),
    ] = None
    margin: Annotated[
        float | None, Option(min=0, help="--to-pairs: minimum difference of the rewards. By default, any.")
    ] = None
    per_prompt: Annotated[
        int | None,
        Option(
            min=1,
            help="--to-sft: at most N rollouts of a prompt, the best. --to-pairs: at most N pairs of a prompt, those "
            "with the largest differences. --to-kto: at most N good and N bad rollouts of a prompt.",
        ),
    ] = None

    @property
    def exports(self) -> dict[str, Path]:
        """The files to write, by option."""
        files = {"--to-sft": self.to_sft, "--to-pairs": self.to_pairs, "--to-kto": self.to_kto}
        return {option: file for option, file in files.items() if file is not None}

    @property
    def run(self) -> Path:
        """The only run."""
        return self.runs[0]


def rollouts(options: RolloutsOptions) -> int:
    """Show kept rollouts of a run: `rollouts RUN --step 20 --worst 5`. The run may still be going on.

    A run keeps a sample of every step, and all rollouts of evaluations.
    """
    # Imported here so that the other commands do not load it.
    from prime_rl.history.rollouts import KeptRollouts

    numbers = {"--min-reward": options.min_reward, "--max-reward": options.max_reward, "--margin": options.margin}
    for name, value in numbers.items():
        if value is not None and math.isnan(value):
            raise UsageError(f"{name} is not a number")
    if options.exports:
        return _export(options)
    for name, value in (("--per-prompt", options.per_prompt), ("--margin", options.margin)):
        if value is not None:
            raise UsageError(f"{name} works only with {'--to-pairs' if name == '--margin' else _EXPORTS}")
    if len(options.runs) > 1:
        raise UsageError(f"give one RUN; only {_EXPORTS} take several")
    kept = KeptRollouts(_paths(options.run))
    wanted = _filter(options)
    count = Counted(_rollouts(kept, options, wanted))
    try:
        chosen = list(_chosen(count, options)) if not options.json or _numbers(options) else count
        if options.json:
            _print_json(chosen)
        else:
            _print_screen(chosen, count, kept, options)
        sys.stdout.flush()
    except BrokenPipeError:  # `rollouts … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for fault in kept.faults:
        warn(one_line(fault))
    return 0


def _export(options: RolloutsOptions) -> int:
    """Write rollouts of several runs as a dataset."""
    from medarc_rl.rollouts.export import reasons, write_rows
    from prime_rl.history.rollouts import KeptRollouts
    from prime_rl.launch.job import command_prefix

    if len(options.exports) > 1:
        raise UsageError(f"give only one of {', '.join(options.exports)}")
    ((option, file),) = options.exports.items()
    wanted, export = _exported(option, options)
    useless = {"--json": options.json, "--full": options.full, "--errors": options.errors}
    useless |= {"--truncated": options.truncated} | dict.fromkeys(_numbers(options), True)
    useless |= {"--margin": options.margin is not None and option != "--to-pairs"}
    if given := [name for name, value in useless.items() if value]:
        raise UsageError(f"{option} excludes {', '.join(given)}")
    if file.exists():
        raise UsageError(f"{option} {file}: this file already exists; give another one, or delete it")
    looked_at = 0
    for run in options.runs:
        kept = KeptRollouts(_paths(run))
        # Evaluations are not trained on unless they are asked for, and of a training all steps count.
        asked = options if options.eval is not None or options.step is not None else replace(options, step="all")
        for each in _rollouts(kept, replace(asked, runs=[run]), wanted):
            looked_at += 1
            export.add(each, str(run))
        for fault in kept.faults:
            warn(one_line(fault))
    rows = export.rows()
    for reason in reasons(export.left_out):
        say(reason)
    if not rows:
        hint = "" if looked_at else "; for rollouts of evaluations, add --eval"
        raise UsageError(f"of {looked_at}, {_nothing_exported(option, options)}{hint}")
    write_rows(rows, file)
    train, name = f"{command_prefix(os.environ)}medarc_train", shlex.quote(str(file))
    prompts = count_of("prompt", len({row["prompt_id"] for row in rows}))
    command = {"--to-sft": "sft CONFIG", "--to-pairs": "dpo CONFIG", "--to-kto": "dpo CONFIG --loss.type kto"}[option]
    good = sum(row.get("label") is True for row in rows)
    labels = f" ({good} good, {len(rows) - good} bad)" if option == "--to-kto" else ""
    what = count_of("pair" if option == "--to-pairs" else "row", len(rows))
    say(f"{what} of {prompts}{labels} in {file}: `{train} {command} --data.name {name}`")
    return 0


def _exported(option: str, options: RolloutsOptions) -> tuple[RolloutFilter, Export]:
    """Selects rollouts of a run, and what is made of them."""
    from medarc_rl.rollouts.export import KTOExport, PairsExport, SFTExport

    low, high, most = options.min_reward, options.max_reward, options.per_prompt
    if option == "--to-sft":
        if low is None:
            raise UsageError("--to-sft needs --min-reward: the minimum reward of the rollouts to train on")
        return _filter(options), SFTExport(most)
    # The limits are those of good and of bad rollouts, not of all.
    of_all = _filter(replace(options, min_reward=None, max_reward=None))
    if option == "--to-pairs":
        return of_all, PairsExport(options.margin or 0.0, low, high, most)
    if low is None:
        raise UsageError("--to-kto needs --min-reward: the minimum reward of good rollouts")
    if high is not None and high >= low:
        raise UsageError(f"--to-kto needs a --max-reward below --min-reward {low:g}: bad rollouts have at most that")
    return of_all, KTOExport(low, high, most)


def _nothing_exported(option: str, options: RolloutsOptions) -> str:
    if option == "--to-pairs":
        limits = [f"differ by at least {options.margin:g}" if options.margin else "differ"]
        limits += [f"reach {options.min_reward:g}"] if options.min_reward is not None else []
        limits += [f"fall to {options.max_reward:g}"] if options.max_reward is not None else []
        return f"no rollouts of one prompt and step have rewards that {' and '.join(limits)}"
    if option == "--to-kto":
        return "none is good or bad"
    return f"none has a reward of at least {options.min_reward:g}"


class Counted:
    """Iterates once over rollouts, and counts them."""

    def __init__(self, rollouts: Iterator[KeptRollout]) -> None:
        self.rollouts = rollouts
        self.number = 0

    def __iter__(self) -> Iterator[KeptRollout]:
        for each in self.rollouts:
            self.number += 1
            yield each


def _paths(directory: Path) -> RunPaths:
    from medarc_rl.stored import local_run
    from prime_rl.run.paths import RunPaths

    run = local_run(directory)
    if not run.is_dir():
        raise UsageError(f"RUN: {run} {'is a file' if run.exists() else 'does not exist'}; give the directory of a run")
    return RunPaths.from_orchestrator_dir(run)


def _filter(options: RolloutsOptions) -> RolloutFilter:
    from prime_rl.history.rollouts import RolloutFilter

    if len(_numbers(options)) > 1:
        raise UsageError(f"give only one of {', '.join(_numbers(options))}")
    if options.step is not None and options.eval is not None:
        raise UsageError("give only one of --step and --eval")
    low, high = options.min_reward, options.max_reward
    if low is not None and high is not None and low > high:
        raise UsageError(f"--min-reward {low:g} is above --max-reward {high:g}")
    return RolloutFilter(
        env=options.env,
        min_reward=low,
        max_reward=high,
        truncated=options.truncated,
        errors=options.errors,
        search=options.search,
    )


def _numbers(options: RolloutsOptions) -> list[str]:
    given = {"--worst": options.worst, "--best": options.best, "--random": options.random}
    return [name for name, number in given.items() if number is not None]


def _rollouts(kept: KeptRollouts, options: RolloutsOptions, wanted: RolloutFilter) -> Iterator[KeptRollout]:
    """The rollouts that the options select.

    Raises:
        UsageError: nothing is kept of this step or evaluation.
    """
    steps = kept.steps()
    if options.eval is not None or (options.step is None and not steps):
        versions = kept.evaluations()
        if not versions and not steps:
            raise UsageError(_nothing(options.run))
        asked = options.eval or "all"
        chosen = versions if asked == "all" else [_number("--eval", asked, versions, "evaluation")]
        found = (kept.of_evaluation(version, wanted) for version in chosen)
    else:
        asked = options.step or "last"
        chosen = steps if asked == "all" else [_number("--step", asked, steps, "step")]
        found = (kept.of_step(step, wanted) for step in chosen)
    return itertools.chain.from_iterable(found)


def _nothing(run: Path) -> str:
    return (
        f"{run} has no kept rollouts: it has not finished a step or an evaluation, does not train with RL, or has "
        "orchestrator.keep_rollouts = None"
    )


def _number(option: str, text: str, kept: list[int], what: str) -> int:
    if not text.isdecimal() and text not in ("last", "all"):
        raise UsageError(f"{option} '{one_line(text)}' is neither a number nor `last` nor `all`")
    if not kept:
        raise UsageError(f"{option} {text}: no {what} has kept rollouts")
    if text == "last":
        return kept[-1]
    if int(text) not in kept:
        raise UsageError(f"{option} {text}: no rollouts of this {what} are kept, only those of {ranges(kept)}")
    return int(text)


def ranges(numbers: list[int]) -> str:
    """`0-3, 5, 7`; of many, the first and the last ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join([*words[:6], "…", *words[-6:]] if len(words) > 12 else words)


def _chosen(rollouts: Iterable[KeptRollout], options: RolloutsOptions) -> list[KeptRollout]:
    """The rollouts to show, of which only so many are in memory."""
    scored = ((each.reward, index, each) for index, each in enumerate(rollouts) if each.reward is not None)
    if options.worst is not None:
        return [each for *_, each in heapq.nsmallest(options.worst, scored, key=lambda entry: entry[:2])]
    if options.best is not None:
        return [each for *_, each in heapq.nlargest(options.best, scored, key=lambda entry: (entry[0], -entry[1]))]
    wanted = options.random or SHOWN
    generator = random.Random(0)
    sample: list[tuple[int, KeptRollout]] = []
    seen = 0
    # Reservoir sampling. A group that was kept as the best or worst is no random choice.
    for index, each in enumerate(rollouts):
        if not each.is_unbiased:
            continue
        seen += 1
        if len(sample) < wanted:
            sample.append((index, each))
        elif (place := generator.randrange(seen)) < wanted:
            sample[place] = (index, each)
    return [each for _, each in sorted(sample, key=lambda entry: entry[0])]


def _print_json(rollouts: Iterable[KeptRollout]) -> None:
    from prime_rl.history.rollouts import as_json

    for each in rollouts:
        say(json.dumps(as_json(each)))


def _print_screen(chosen: Iterable[KeptRollout], count: Counted, kept: KeptRollouts, options: RolloutsOptions) -> None:
    from medarc_rl.rollouts.screen import Screen

    screen = Screen(options.full)
    shown = Counted(iter(chosen))
    for each in shown:
        screen.show(each)
    matching = f"{shown.number} of {count_of('kept rollout', count.number)}"
    if not count.number:
        matching = "No kept rollout matches"
        if options.env is not None:
            names = sorted({each.env for each in kept.all()})
            matching += f"; environments: {', '.join(map(one_line, names))}"
    versions = kept.evaluations()
    steps = kept.steps()
    parts = [f"steps {ranges(steps)}" if steps else "", f"evaluations {ranges(versions)}" if versions else ""]
    screen.note(f"{matching}. Kept: {'; '.join(filter(None, parts))}.")

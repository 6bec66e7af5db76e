"""Runs `medarc_train lm-eval`: plans the evaluation, runs it, reports the scores."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from medarc_rl.cli import say, warn
from medarc_rl.errors import UsageError
from medarc_rl.lm_eval.options import LmEvalOptions
from medarc_rl.lm_eval.plan import (
    Engine,
    Found,
    Group,
    Job,
    LmEvalPaths,
    LmEvalPlan,
    Settings,
    adapter_rank,
    find_weights,
    run_group,
    screen_for,
)
from medarc_rl.lm_eval.scores import (
    OtherSettings,
    as_json,
    check_settings,
    is_done,
    print_table,
    read_results,
    rows_of,
    write_summary,
)
from medarc_rl.stored import local_weights
from prime_rl.configs.storage import is_on_s3

PACKAGE = "lm-eval"
_MOST_BYTES = 256 << 20


def lm_eval(options: LmEvalOptions) -> int:
    """Evaluate weights with lm-evaluation-harness: each checkpoint of a run next to its base model.

    Start the command again to continue.
    """
    if options.watch and is_on_s3(options.weights):
        raise UsageError("RUN: a run on S3 is downloaded once, and cannot be followed: leave out --watch")
    settings = _settings(options)
    steps = None if options.steps is None else _numbers("--steps", options.steps)
    weights, base = _local(options, steps)
    found = find_weights(weights, base, options.no_base, steps, options.watch)
    default_dir = Path("lm_eval") / Path(weights).name if is_on_s3(options.weights) else found.default_dir
    paths = LmEvalPaths(options.output_dir or default_dir)
    plans = [(_plan(options, settings, group, paths), _engine(options, group)) for group in found.groups]
    _check(plans[0][0], found)
    codes = [0]
    for plan, engine in plans:
        if _has_all(plan):
            continue
        codes.append(run_group(plan, engine, screen_for(options.json)))
        if codes[-1] >= 128:
            break
    _report(paths, plans[0][0], options.json)
    return max(codes)


def _local(options: LmEvalOptions, steps: Sequence[int] | None) -> tuple[str, str | None]:
    """The weights and their base, with copies of those on S3. Raises UsageError."""
    screen = screen_for(options.json)

    def show(line: str) -> None:
        screen.write(f"{line}\n")

    base = None if options.base is None else local_weights(options.base, None, show)
    return local_weights(options.weights, steps, show), base


def _settings(options: LmEvalOptions) -> Settings:
    folder = options.include_path
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--include-path {folder}: no such directory")
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"{PACKAGE} is not installed here: uv sync --inexact --extra {PACKAGE}") from None
    return Settings(
        limit=options.limit,
        gen_kwargs=dict(_pairs(options.gen_kwargs or "")),
        max_gen_toks=options.max_gen_toks,
        apply_chat_template=options.apply_chat_template,
        allow_unsafe_code=options.allow_unsafe_code,
        include_path=None if folder is None else str(folder),
        local_tasks="" if folder is None else _fingerprint(folder),
        lm_eval=version,
    )


def _plan(options: LmEvalOptions, settings: Settings, group: Group, paths: LmEvalPaths) -> LmEvalPlan:
    shots = [None] if options.num_fewshot is None else _numbers("--num-fewshot", options.num_fewshot)
    tasks = tuple(dict.fromkeys(filter(None, (word.strip() for word in options.tasks.split(",")))))
    if not tasks:
        raise UsageError("--tasks: name at least one")
    return LmEvalPlan(
        root=str(paths.root),
        served=group.served,
        tasks=tasks,
        shots=tuple(shots),
        settings=settings,
        candidates=group.candidates,
        batch_size=options.batch_size,
        sweep=group.sweep,
    )


def _engine(options: LmEvalOptions, group: Group) -> Engine:
    return Engine(options.device, options.backend, options.max_model_len, adapter_rank(group))


def _check(plan: LmEvalPlan, found: Found) -> None:
    try:
        check_settings(plan.paths, [Job(task, shots) for task in plan.tasks for shots in plan.shots], plan.settings)
    except OtherSettings as error:
        raise UsageError(str(error)) from error
    for line in found.warnings:
        warn(line)


def _has_all(plan: LmEvalPlan) -> bool:
    """Whether there is nothing left to evaluate. Tasks that a pattern names are not known yet."""
    named = not any(any(char in task for char in "*?[") for task in plan.tasks)
    jobs = [Job(task, shots) for task in plan.tasks for shots in plan.shots]
    done = all(is_done(plan.paths, candidate, job) for candidate in plan.candidates for job in jobs)
    return named and done and plan.sweep is None


def _report(paths: LmEvalPaths, plan: LmEvalPlan, is_json: bool) -> None:
    """Write the scores of all results to `summary.json`, and print those of this evaluation."""
    results = read_results(paths)
    every = rows_of(results)
    if not every:
        return
    write_summary(every, paths.summary)
    rows = rows_of([result for result in results if _is_asked(result.facts, plan)])
    if is_json:
        say(as_json(rows))
        return
    print_table(rows, sys.stdout)
    say(f"Results in {paths.root}")


def _is_asked(facts: Mapping[str, Any], plan: LmEvalPlan) -> bool:
    return facts["shots"] in plan.shots and any(fnmatchcase(facts["task"], task) for task in plan.tasks)


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise UsageError(f"{option} {text!r}: whole numbers separated by commas, such as 0 or 0,4")
    return list(dict.fromkeys(map(int, words)))


def _pairs(text: str) -> Iterator[tuple[str, Any]]:
    for word in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not key.isidentifier():
            raise UsageError(f"--gen-kwargs {word!r}: write KEY=VALUE, such as temperature=0.7")
        if key in ("max_tokens", "max_gen_toks"):
            raise UsageError(f"--gen-kwargs {word!r}: set the limit with --max-gen-toks {value}")
        yield key, _value(value)


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _fingerprint(folder: Path) -> str:
    """Changes when a file in a folder of tasks does."""
    digest = hashlib.sha256()
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for path in files:
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0")
        small = path.stat().st_size <= _MOST_BYTES
        digest.update(hashlib.sha256(path.read_bytes()).digest() if small else str(path.stat().st_mtime_ns).encode())
    return digest.hexdigest()[:16]

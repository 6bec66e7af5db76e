"""An evaluation's directory: which weights are evaluated, and with which settings."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.run.directory import set_aside
from prime_rl.run.lock import is_running
from prime_rl.run.paths import EvalPaths, RunPaths, stable_steps
from prime_rl.utils.contents import sampled_digest
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.files import nearest_path, replacing_file

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig

_WHOLE_BYTES = 2**28
"""Larger files of weights are compared by samples."""
BASE_STEP = 0
"""The step under which the base model's results are stored."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Weights to evaluate."""

    step: int
    weights: Path | None
    """Their directory; None is the base model."""

    def __str__(self) -> str:
        return "base" if self.weights is None else f"step {self.step}"

    def fingerprint(self, base: str) -> str | None:
        """Changes when the weights do, and not when they are copied. None if they cannot be read here."""
        folder = Path(base) if self.weights is None else self.weights
        try:
            files = sorted(folder.glob("*.safetensors"))
            return sampled_digest(files, _WHOLE_BYTES) if folder.is_dir() else None
        except OSError:
            return None  # a training run removes old ones; the error of loading them tells


def candidates_of(config: OfflineEvalConfig) -> list[Candidate]:
    """Candidates at the start of an evaluation. One that watches a run may start before there is a checkpoint.

    Raises:
        RunDirError: one of `steps` is missing or incomplete, or there is nothing to evaluate.
    """
    if config.watch and config.weights_dir is not None:
        due = Following(config.weights_dir, interval=config.interval).due()
        return find_candidates(config.eval_base, config.weights_dir if due else None, due or None)
    return find_candidates(config.eval_base, config.weights_dir, config.steps)


def find_candidates(eval_base: bool, weights_dir: Path | None, steps: Iterable[int] | None) -> list[Candidate]:
    """The base model, if requested, and the complete checkpoints in `weights_dir` (only `steps`, if given).

    Raises:
        RunDirError: one of `steps` is missing or incomplete, or there is nothing to evaluate.
    """
    base = [Candidate(BASE_STEP, None)] if eval_base else []
    if weights_dir is None:
        return base
    complete = stable_steps(weights_dir)
    wanted = complete if steps is None else sorted(set(steps))
    missing = [step for step in wanted if step not in complete]
    # The base model alone would look like the result of a run whose directory is misspelled.
    if missing or not wanted:
        there = ", ".join(map(str, complete)) or "none"
        lacking = f"step {', '.join(map(str, missing))}" if missing else "any step"
        raise RunDirError(f"{weights_dir} lacks {lacking}; complete steps: {there}{_other_folder(weights_dir)}")
    # The weights of step 0 are the base model again.
    steps_left = [step for step in wanted if not (base and step == BASE_STEP)]
    return [*base, *(Candidate(step, weights_dir / f"step_{step}") for step in steps_left)]


def _other_folder(weights_dir: Path) -> str:
    """Names the folder that was probably meant: that of the weights in a run's directory, or one of a similar name."""
    if stable_steps(weights_dir / "weights"):
        return f"; did you mean {weights_dir / 'weights'}?"
    if weights_dir.is_dir():
        return ""
    near = nearest_path(weights_dir)
    return "; there is no such folder" + (f": did you mean {near}?" if near else "")


class Following:
    """The checkpoints that a run is writing to `weights_dir`."""

    def __init__(
        self,
        weights_dir: Path,
        known: Iterable[int] = (),
        interval: int | None = None,
        completion: Path | None = None,
    ) -> None:
        """Follow a run.

        Args:
            known: steps that need not be returned.
            interval: of steps that are not multiples of it, only the last of the run is returned. None returns all.
            completion: the file that the run's trainer makes at its end. None: the end of the run is that of its lock.
        """
        self.weights_dir = weights_dir
        self._known = set(known)
        self._interval = interval
        self._completion = completion
        self.has_ended = False
        """The run had ended before the last look, so that no checkpoint follows."""

    def look(self) -> list[int]:
        """Complete checkpoints that have appeared since the last look."""
        # First: what appears afterwards is found by the next look.
        if self._completion is not None:
            self.has_ended = self._completion.is_file()
        else:
            self.has_ended = not is_running(self.weights_dir.absolute().parent)
        new = [step for step in self.due() if step not in self._known]
        self._known.update(new)
        return new

    def due(self) -> list[int]:
        """Complete checkpoints that are to be evaluated, ascending."""
        steps = stable_steps(self.weights_dir)
        last = steps[-1:] if self.has_ended else []
        return [step for step in steps if self._interval is None or step % self._interval == 0 or step in last]


class EvaluatedSteps:
    """The steps whose weights were evaluated next to a training.

    Weights that the trainer exported for an evaluation alone, or does not keep any longer, are deleted once they are
    evaluated. The trainer marks them, then looks whether they were evaluated; the evaluator records them, then looks
    for the mark. So one of the two deletes them.
    """

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._file = EvalPaths(paths.root).evaluated

    def read(self) -> list[int]:
        """Ascending. Empty if the file is missing or damaged: then evaluations are looked at again."""
        try:
            steps = json.loads(self._file.read_text(encoding="utf-8"))
            return sorted(int(step) for step in steps)
        except (OSError, ValueError, TypeError):
            return []

    def write(self, steps: Iterable[int]) -> None:
        with replacing_file(self._file) as scratch:
            scratch.write_text(json.dumps(sorted(set(steps))) + "\n", encoding="utf-8")

    def add(self, step: int) -> None:
        """Record an evaluation, and delete the weights if they were only kept for it."""
        self.write([*self.read(), step])
        if self.paths.only_for_evaluation(step).is_file():
            self.remove(step)

    def remove(self, step: int) -> None:
        """Delete the weights of a step, unless they are gone."""
        shutil.rmtree(self.paths.weight(step), ignore_errors=True)

    def leave(self, step: int) -> bool:
        """Let the evaluator delete the weights of a step. False if it has evaluated them already."""
        self.paths.only_for_evaluation(step).touch()
        return step not in self.read()


WEIGHTS = "weights"
"""Key of the settings that are kept: the fingerprint of the weights of each step."""
_AGENT_KEYS = {"workflow", "agent_dataset", "agent_eval_dataset", "agent_timeout_s"}
"""Settings of an agent that its results depend on."""


_SERVER_KEYS = {"dtype", "max_model_len", "tool_call_parser", "reasoning_parser", "chat_template", "rope_scaling"}
"""Settings of the server's model that results depend on."""
_JUDGE_KEYS: dict[str, Any] = {
    "model": True,
    "sampling": True,
    "engine": {"dtype", "max_model_len", "chat_template", "reasoning_parser"},
}


def settings_of(config: OfflineEvalConfig) -> dict[str, Any]:
    """The settings that results depend on, apart from their number."""
    described = {"id", "args", "extra_env_kwargs"}
    server = config.inference
    return {
        "model": config.model.name,
        "weights_dir": None if config.weights_dir is None else str(config.weights_dir.resolve()),
        "sampling": config.sampling.model_dump(),
        "inference.model": None if server is None else server.model.model_dump(include=_SERVER_KEYS),
        "environments": {
            env.name or env.id: {
                **env.model_dump(include=described),
                **({} if env.python is None else {"python": str(env.python)}),
                **(env.model_dump(include=_AGENT_KEYS) if env.is_agent else {}),
                **({} if env.project is None else {"project": str(env.project)}),
                **{key: table for key in ("taskset", "agent") if (table := getattr(env, key))},
                **({} if env.judge is None else {"judge": config.judge[env.judge].model_dump(include=_JUDGE_KEYS)}),
            }
            for env in config.environments
        },
    }


def check_settings(paths: EvalPaths, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `settings` with the environments of earlier starts; changes no file.

    Raises:
        RunDirError: the directory holds results that were made with other settings.
    """
    current: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    if not paths.settings.is_file():
        return current
    earlier = json.loads(paths.settings.read_text(encoding="utf-8"))
    environments = {**earlier["environments"], **current["environments"]}
    changed = [key for key in earlier if key not in ("environments", WEIGHTS) and earlier[key] != current.get(key)]
    changed += [f"environment {name!r}" for name, each in earlier["environments"].items() if environments[name] != each]
    if changed:
        raise RunDirError(
            f"{paths.root} holds results that were made with another {' and another '.join(changed)}: "
            "choose another --output-dir"
        )
    kept = {WEIGHTS: earlier[WEIGHTS]} if WEIGHTS in earlier else {}
    return {**current, "environments": environments, **kept}


def has_other_weights(paths: EvalPaths, step: int, fingerprint: str | None) -> bool:
    """Whether the results of a step were made with weights of another fingerprint. Remembers this one."""
    if fingerprint is None or not paths.settings.is_file():
        return False
    settings: dict[str, Any] = json.loads(paths.settings.read_text(encoding="utf-8"))
    known = settings.setdefault(WEIGHTS, {})
    earlier = known.get(str(step))
    if earlier != fingerprint:
        known[str(step)] = fingerprint
        save_settings(paths, settings)
    return earlier not in (None, fingerprint)


def prepare_evaluations(paths: RunPaths, resume_step: int | None, settings: Mapping[str, Any] | None) -> None:
    """Prepare a run's directory for the evaluations next to its training. `settings` is None if there are none.

    A new run renames weights and results of an earlier one, so that they are not taken for its own. A resumed run
    forgets the results of steps that it repeats. If the settings have changed, it renames all results, and the weights
    that are still there are evaluated again.
    """
    results = EvalPaths(paths.root)
    if settings is None:
        for component in ("eval", "inference"):
            paths.config(component).unlink(missing_ok=True)
        return
    if resume_step is None:
        set_aside(paths.weights)
    if resume_step is None or not _are_of(results, settings):
        for file in (results.results, results.settings, results.summary, results.evaluated):
            set_aside(file)
    else:
        if results.results.is_file():
            _forget_after(results.results, resume_step)
        # Even without results: a step may have been evaluated in which every rollout failed.
        if results.evaluated.is_file():
            evaluated = EvaluatedSteps(paths)
            evaluated.write(step for step in evaluated.read() if step <= resume_step)
    save_settings(results, check_settings(results, settings))


def _are_of(results: EvalPaths, settings: Mapping[str, Any]) -> bool:
    try:
        check_settings(results, settings)
    except (RunDirError, ValueError, KeyError, TypeError):  # ValueError and so on: the file is damaged
        return False
    return True


def _forget_after(results: Path, step: int) -> None:
    """Remove the results of steps after `step`."""
    kept = [line for line in results.read_bytes().splitlines(keepends=True) if _step_of(line) <= step]
    with replacing_file(results) as scratch:
        scratch.write_bytes(b"".join(kept))


def _step_of(line: bytes) -> int:
    """The step of a result; beyond all steps if the line is damaged."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return sys.maxsize


def save_settings(paths: EvalPaths, settings: Mapping[str, Any]) -> None:
    """Keep the settings with the results, so that a later start can compare them."""
    with replacing_file(paths.settings) as scratch:
        scratch.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

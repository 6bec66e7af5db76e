"""An evaluation's directory: which weights are evaluated, and with which settings.

EvaluationRefused
├── OtherEvaluation   the output directory holds results that were made with other settings
└── MissingSteps      a requested checkpoint is missing or incomplete
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.run.lock import is_running
from prime_rl.run.paths import EvalPaths, stable_steps
from prime_rl.utils.files import replacing_file

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig

BASE_STEP = 0
"""The step under which the base model's results are stored."""


class EvaluationRefused(Exception):
    """The evaluation cannot be done as asked. The message is one line."""


class OtherEvaluation(EvaluationRefused):
    """Results of different settings must not be mixed."""


class MissingSteps(EvaluationRefused):
    """The requested weights do not exist."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Weights to evaluate."""

    step: int
    weights: Path | None
    """Their directory; None is the base model."""

    def __str__(self) -> str:
        return "base" if self.weights is None else f"step {self.step}"


def candidates_of(config: OfflineEvalConfig) -> list[Candidate]:
    """What an evaluation starts with. One that watches a run may start before there is a checkpoint.

    Raises:
        MissingSteps: one of `steps` is missing or incomplete, or there is nothing to evaluate.
    """
    if config.watch and config.weights_dir is not None and not stable_steps(config.weights_dir):
        return find_candidates(config.eval_base, None, None)
    return find_candidates(config.eval_base, config.weights_dir, config.steps)


def find_candidates(eval_base: bool, weights_dir: Path | None, steps: Iterable[int] | None) -> list[Candidate]:
    """The base model, if requested, and the complete checkpoints in `weights_dir` (only `steps`, if given).

    Raises:
        MissingSteps: one of `steps` is missing or incomplete, or there is nothing to evaluate.
    """
    base = [Candidate(BASE_STEP, None)] if eval_base else []
    if weights_dir is None:
        return base
    complete = stable_steps(weights_dir)
    wanted = complete if steps is None else sorted(set(steps))
    missing = [step for step in wanted if step not in complete]
    if missing or not (wanted or base):
        there = ", ".join(map(str, complete)) or "none"
        lacking = f"step {', '.join(map(str, missing))}" if missing else "any step"
        raise MissingSteps(f"{weights_dir} lacks {lacking}; complete steps: {there}")
    # The weights of step 0 are the base model again.
    steps_left = [step for step in wanted if not (base and step == BASE_STEP)]
    return [*base, *(Candidate(step, weights_dir / f"step_{step}") for step in steps_left)]


class Following:
    """The checkpoints that a run is writing to `weights_dir`."""

    def __init__(self, weights_dir: Path, known: Iterable[int] = ()) -> None:
        """`known` are the steps that need not be returned."""
        self.weights_dir = weights_dir
        self._known = set(known)
        self.has_ended = False
        """The run had ended before the last look, so that no checkpoint follows."""

    def look(self) -> list[int]:
        """Complete checkpoints that have appeared since the last look."""
        # First: what appears afterwards is found by the next look.
        self.has_ended = not is_running(self.weights_dir.absolute().parent)
        new = [step for step in stable_steps(self.weights_dir) if step not in self._known]
        self._known.update(new)
        return new


def settings_of(config: OfflineEvalConfig) -> dict[str, Any]:
    """The settings that results depend on, apart from their number."""
    described = {"id", "args", "extra_env_kwargs"}
    return {
        "model": config.model.name,
        "weights_dir": None if config.weights_dir is None else str(config.weights_dir.resolve()),
        "sampling": config.sampling.model_dump(),
        "environments": {env.name or env.id: env.model_dump(include=described) for env in config.environments},
    }


def check_settings(paths: EvalPaths, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `settings` with the environments of earlier starts; changes no file.

    Raises:
        OtherEvaluation: the directory holds results that were made with other settings.
    """
    current: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    if not paths.settings.is_file():
        return current
    earlier = json.loads(paths.settings.read_text(encoding="utf-8"))
    environments = {**earlier["environments"], **current["environments"]}
    changed = [key for key in earlier if key != "environments" and earlier[key] != current[key]]
    changed += [f"environment {name!r}" for name, each in earlier["environments"].items() if environments[name] != each]
    if changed:
        raise OtherEvaluation(
            f"{paths.root} holds results that were made with another {' and another '.join(changed)}: "
            "choose another --output-dir"
        )
    return {**current, "environments": environments}


def save_settings(paths: EvalPaths, settings: Mapping[str, Any]) -> None:
    """Keep the settings with the results, so that a later start can compare them."""
    with replacing_file(paths.settings) as scratch:
        scratch.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

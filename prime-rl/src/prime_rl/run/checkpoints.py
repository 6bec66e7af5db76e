"""Checkpoints of a run: which one a resume continues from, what may have changed since, and which stay.

A resume takes the newest checkpoint that trainer and orchestrator both have whole.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from prime_rl.configs.ranges import AUTO
from prime_rl.configs.shared import EarlyStopConfig
from prime_rl.configs.surface.renamed import SFT_COMMANDS
from prime_rl.configs.surface.resuming import ResumeRule, rule_for
from prime_rl.run.early_stop import EarlyEnd
from prime_rl.run.paths import OrchestratorPaths, RunPaths, stable_steps, step_of
from prime_rl.utils.contents import find_damage, read_contents
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.files import PARTIAL, STABLE
from prime_rl.utils.pydantic_config import BaseSettings, ConfigWarning, to_toml
from prime_rl.utils.tables import dotted, leaves

if TYPE_CHECKING:
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig

# The checkpoint to continue from.


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Starting point of a run."""

    step: int | None
    """None starts a new run."""
    passed_over: tuple[str, ...] = ()
    """Why newer checkpoints are not used, one line each."""


@dataclass(frozen=True, slots=True)
class End:
    """Limits at which a run has done its work. Without either it continues until it is stopped."""

    max_steps: int | None = None
    num_epochs: float | None = None
    """Passes over the data. Only the trainer knows how many steps they take."""
    early_stop: EarlyStopConfig | None = None

    def __str__(self) -> str:
        return f"max_steps = {self.max_steps}" if self.max_steps is not None else f"num_epochs = {self.num_epochs:g}"

    @property
    def key(self) -> str:
        return "num_epochs" if self.max_steps is None else "max_steps"


class Finish(NamedTuple):
    """Why a run is finished, and how to continue it all the same."""

    why: str
    remedy: str


def end_of(config: SFTConfig | RLConfig) -> End:
    """Limits of a run. There are none if steps count from 0 again."""
    trainer: Any = getattr(config, "trainer", config)
    if trainer.ckpt is not None and trainer.ckpt.skip_progress:
        return End()
    early_stop = getattr(config, "orchestrator", trainer).early_stop
    return End(trainer.max_steps, getattr(trainer, "num_epochs", None), early_stop)


@dataclass(frozen=True, slots=True)
class SavedSteps:
    """The checkpoints of a run: those of the trainer and, in an RL run, their counterparts of the orchestrator."""

    paths: RunPaths
    run: OrchestratorPaths

    @classmethod
    def of(cls, paths: RunPaths) -> SavedSteps:
        return cls(paths, paths.orchestrator)

    @property
    def complete(self) -> list[int]:
        """Steps that the trainer has saved completely, ascending."""
        return stable_steps(self.paths.checkpoints)

    @property
    def has_orchestrator(self) -> bool:
        return bool(stable_steps(self.run.checkpoints))

    def choose(self, resume_step: int | None) -> ResumePoint:
        """Find the step that `ckpt.resume_step` stands for: a step, -1 (`latest`) or -2 (`auto`).

        Reads sizes of the trainer's files, not their contents.

        Raises:
            RunDirError: there is nothing to resume, or the step is not there or damaged. With `auto` only if there are
                checkpoints and none of them can be resumed.
        """
        if resume_step is None:
            return ResumePoint(None)
        if resume_step >= 0:
            if fault := self.fault_of(resume_step):
                raise RunDirError(fault)
            return ResumePoint(resume_step)
        found = self._newest_whole()
        if found.step is not None:
            return found
        if found.passed_over:
            raise RunDirError(
                f"no checkpoint in {self.paths.checkpoints} can be resumed: {'; '.join(found.passed_over)}; "
                "start a new run in another directory"
            )
        if resume_step == AUTO:
            return found
        raise RunDirError(
            f"nothing to resume: {self.paths.checkpoints} has no complete checkpoint; start a new run without "
            "--resume, or let --resume auto decide"
        )

    def fault_of(self, step: int) -> str | None:
        """Why the run cannot continue from `step`, and from which step it can; None if it can."""
        if step not in self.complete:
            there = ", ".join(map(str, self.complete)) or "none"
            nearest = min(self._whole(), key=lambda other: abs(other - step), default=None)
            advice = "" if nearest is None else f"; the nearest that can be resumed is --resume {nearest}"
            missing = self.paths.checkpoint(step)
            return f"no complete checkpoint {missing} to resume from (complete steps: {there}){advice}"
        if self.has_orchestrator and (fault := self.missing_counterpart(step)):
            return fault
        damage = self.damage_of(step)
        return None if damage is None else f"{damage}; {self.advice_for_damage(step)}"

    def damage_of(self, step: int) -> str | None:
        """The first file of `step` that is not as it was written, by its size; None if there is none."""
        part = self.run.checkpoint(step).parent
        # The orchestrator's files are small enough to compare their hashes.
        return find_damage(self.paths.checkpoint(step), hashes=False) or find_damage(part)

    def unchecked(self, step: int) -> list[Path]:
        """Markers of `step` without hashes. Older versions wrote such; otherwise the marker was emptied."""
        parts = [self.paths.checkpoint(step), self.run.checkpoint(step).parent]
        return [part / STABLE for part in parts if (part / STABLE).is_file() and not read_contents(part)]

    def advice_for_damage(self, step: int) -> str:
        """Advice about a damaged checkpoint of `step`."""
        earlier = next((other for other in self._whole() if other < step), None)
        if earlier is None:
            return "there is no earlier checkpoint: start a new run in another directory"
        return f"continue from an earlier checkpoint with --resume {earlier}"

    def missing_counterpart(self, step: int) -> str | None:
        """Why the orchestrator has nothing to continue from at a step that the trainer saved; None if it has."""
        saved = stable_steps(self.run.checkpoints)
        if step in saved:
            return None
        newest = next(self._whole(), None) if saved else None
        advice = (
            f"resume from {newest}, the newest step that both have"
            if newest is not None
            else "start again in another directory"
        )
        return (
            f"the trainer's checkpoint of step {step} has no matching checkpoint of the orchestrator, "
            f"{self.run.checkpoint(step)}: {advice}"
        )

    def why_finished(self, step: int, end: End) -> Finish | None:
        """Why the run that saved `step` has done all of its work, the end of it included; None if it has not."""
        parts = ["trainer", *(["orchestrator"] if self.has_orchestrator else [])]
        # Only SFT evaluates in a separate process.
        parts += ["evaluator"] if self.paths.config("eval").is_file() else []
        if not all(self.paths.completion(part).is_file() for part in parts):
            return None
        early = EarlyEnd.read(self.paths.early_end)
        # Decided again: the rules may have changed since.
        if early is not None and early.step == step and (why := early.history.why_to_end(end.early_stop)):
            return Finish(f"it ended early: {why}", "change or remove [early_stop]")
        if end.max_steps is not None:
            is_done = step >= end.max_steps
        else:
            epochs = self._epochs_of(step) if step == max(self.complete, default=None) else None
            is_done = end.num_epochs is not None and epochs is not None and epochs >= end.num_epochs
        return Finish(str(end), f"raise {end.key}") if is_done else None

    def _epochs_of(self, step: int) -> float | None:
        """The `num_epochs` that the run that saved `step` was to train for; None if it had none, or nothing tells."""
        files = [self.paths.saved_config(step, component) for component in SFT_COMMANDS]
        file = next((each for each in files if each.is_file()), files[0])
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            return None
        epochs = table.get("num_epochs")
        return float(epochs) if isinstance(epochs, int | float) and epochs is not True else None

    def _whole(self) -> Iterator[int]:
        """Steps that can be resumed, newest first."""
        return (step for step in reversed(self.complete) if self._why_not(step) is None)

    def _newest_whole(self) -> ResumePoint:
        passed_over: list[str] = []
        for step in sorted(self._begun(), reverse=True):
            fault = self._why_not(step)
            if fault is None:
                return ResumePoint(step, tuple(passed_over))
            passed_over.append(fault)
        return ResumePoint(None, tuple(passed_over))

    def _begun(self) -> set[int]:
        """Steps whose save has begun. A save that did not end counts only among others: alone, it left nothing."""
        names = [child.name for child in self.paths.checkpoints.iterdir()] if self.paths.checkpoints.is_dir() else []
        steps = {step_of(Path(name.removesuffix(PARTIAL))) for name in names}
        has_any = any(step_of(Path(name)) is not None for name in names)
        return {step for step in steps if step is not None} if has_any else set()

    def _why_not(self, step: int) -> str | None:
        directory = self.paths.checkpoint(step)
        if not directory.is_dir():
            return f"{directory} was still being written when the run ended"
        if not (directory / STABLE).is_file():
            return f"{directory} is not complete: it has no file {STABLE}"
        if self.has_orchestrator and step not in stable_steps(self.run.checkpoints):
            return (
                f"the trainer's step {step} has no matching checkpoint of the orchestrator, {self.run.checkpoint(step)}"
            )
        return self.damage_of(step)


# Changes of the config since the checkpoint.


UNSET = "unset"
_COMPONENTS = ("orchestrator", "inference")
"""Other components whose configs a checkpoint of the trainer holds."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key with another value than the checkpoint was made with."""

    key: str
    was: str
    now: str
    rule: ResumeRule
    is_refused: bool

    def __str__(self) -> str:
        return f"{self.key} {self.was} -> {self.now}"

    @property
    def becomes(self) -> str:
        """Effect of the new value in a resume: `applied`, `refused` or `without effect`."""
        if self.is_refused:
            return "refused"
        return "without effect" if self.rule.effect == "none" else "applied"


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes since the checkpoint of `step`."""

    step: int
    changes: tuple[Change, ...]
    unreadable: tuple[str, ...] = ()
    """Why configs could not be compared."""

    def faults(self) -> Iterator[str]:
        """One line for each change that cannot be applied."""
        for change in self.changes:
            if change.is_refused:
                forced = f", or add --{_flag(change)}" if change.rule.unless else ""
                yield (
                    f"cannot resume step {self.step} with {change}: {change.rule.why}; set it back, or start a new "
                    f"run{forced}"
                )

    def lines(self) -> Iterator[str]:
        """Lines for the log: changes that are applied, and changes without effect."""
        yield from self.unreadable
        applied = [change for change in self.changes if change.becomes == "applied"]
        if applied:
            yield f"applied from step {self.step}: {_listed(applied)}"
        if without := [change for change in self.changes if change.becomes == "without effect"]:
            yield f"changed without effect on the training: {_listed(without)}"


def compared_configs(config: BaseSettings) -> dict[str, BaseSettings]:
    """The configs that a resume compares, by component: the sections of an RL run, or else `config` itself."""
    names = () if type(config).component in SFT_COMMANDS else ("trainer", *_COMPONENTS)
    sections = {name: section for name in names if (section := getattr(config, name, None)) is not None}
    return sections or {type(config).component: config}


def changes_since(paths: RunPaths, step: int, configs: Mapping[str, BaseSettings]) -> Changes:
    """Compare `configs`, by component, with those in the checkpoint of `step`. Keys of several name their component.

    A component that the checkpoint has no config of is left out; checkpoints of older versions have none.
    """
    several = len(configs) > 1
    found: list[Change] = []
    unreadable = []
    for component, config in configs.items():
        file = paths.saved_config(step, component)
        if not file.is_file():
            continue
        try:
            saved = _validated(type(config), tomllib.loads(file.read_text(encoding="utf-8")))
        except (ValidationError, tomllib.TOMLDecodeError, UnicodeDecodeError):
            unreadable.append(f"{file} does not load with this version: changed keys of {component} are not listed")
            continue
        found += _changes(component, saved, config, f"{component}." if several else "")
    return Changes(step, tuple(found), tuple(unreadable))


def configs_to_save(paths: RunPaths, component: str, config: BaseSettings) -> dict[str, str]:
    """TOML of the configs that a checkpoint keeps: the trainer's own, and what the launcher wrote for the others."""
    files = {name: paths.config(name) for name in _COMPONENTS} if component == "trainer" else {}
    others = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return {component: to_toml(config), **others}


def _validated(config_cls: type[BaseSettings], table: dict[str, Any]) -> BaseSettings:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return config_cls.model_validate(table)


def _changes(component: str, saved: BaseSettings, config: BaseSettings, prefix: str) -> Iterator[Change]:
    was, now = ({dotted(path): value for path, value in leaves(each.model_dump())} for each in (saved, config))
    given = {key: value for key, value in now.items() if value is True}
    for key in dict.fromkeys((*was, *now)):
        if _is_below(key, was) or _is_below(key, now):
            continue  # the table as a whole was added or removed
        before, after = (_shown(key, values) for values in (was, now))
        rule = rule_for(component, key)
        if before != after and rule.effect != "attempt":
            is_refused = rule.effect == "refused" and rule.unless not in given
            yield Change(f"{prefix}{key}", before, after, rule, is_refused)


def _is_below(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a table around `key` is a value, as None is."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in values for length in range(1, len(parts)))


def _shown(key: str, values: Mapping[str, Any]) -> str:
    if key not in values:
        return "set" if any(other.startswith(f"{key}.") for other in values) else UNSET
    value = values[key]
    return str(value) if isinstance(value, Path | str) else UNSET if value is None else repr(value)


def _flag(change: Change) -> str:
    component = change.key.split(".")[0]
    prefix = f"{component}." if component in ("trainer", *_COMPONENTS) else ""
    return f"{prefix}{change.rule.unless}".replace("_", "-")


def _listed(changes: list[Change]) -> str:
    return ", ".join(f"{change} ({change.rule.why})" if change.rule.why else str(change) for change in changes)


# The rule for which checkpoints stay, common to trainer and orchestrator.


DEFAULT_KEPT = 2
"""Newest checkpoints that a trainer keeps if its config has no rule: one, and another if that turns out to be bad."""


def kept_steps(steps: Collection[int], last: int | None, interval: int | None) -> set[int]:
    """The steps to keep: the newest `last`, and the multiples of `interval`. With neither, all."""
    if last is None and interval is None:
        return set(steps)
    newest = sorted(steps)[-last:] if last else []
    return {*newest, *(step for step in steps if interval and step % interval == 0)}

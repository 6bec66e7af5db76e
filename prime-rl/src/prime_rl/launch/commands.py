"""The commands that launch jobs: `sft`, `dpo`, `rm`, `rl` and `eval`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prime_rl.checks import start_faults
from prime_rl.checks.disk import disk_forecast
from prime_rl.checks.environments import loss_faults, trial_faults
from prime_rl.configs.ranges import AUTO, LATEST
from prime_rl.configs.sft import evaluation_of
from prime_rl.configs.surface.not_built import unbuilt_faults
from prime_rl.configs.surface.renamed import SFT_COMMANDS
from prime_rl.launch.placement import Sharing
from prime_rl.launch.plan import eval_request, plan_eval, plan_rl, plan_sft, port_fault, rl_request, sft_request
from prime_rl.launch.run import Command
from prime_rl.run.checkpoints import SavedSteps, changes_since, compared_configs, end_of
from prime_rl.run.directory import REPLACED, check_run_dir, prepare_run_dir
from prime_rl.run.evaluations import candidates_of, check_settings, prepare_evaluations, save_settings, settings_of
from prime_rl.run.paths import EvalPaths, RunPaths, stable_steps

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig


def _sft_faults(config: SFTConfig, sharing: Sharing) -> list[str]:
    return [*_slurm_faults(config), *unbuilt_faults(config), *start_faults(config)]


def _slurm_faults(config: SFTConfig | RLConfig) -> list[str]:
    """`[slurm]` on one node asks for a submission."""
    if config.slurm is None or config.deployment.type == "multi_node":
        return []
    return [f"[slurm] asks for a submission: use `medarc_slurm {type(config).component}`, or leave the section out"]


def _rl_faults(config: RLConfig, sharing: Sharing) -> list[str]:
    faults = _slurm_faults(config)
    # On several nodes the launch chooses the ports.
    fault = None if sharing.free_ports or config.deployment.type == "multi_node" else port_fault(config)
    if fault is not None:
        faults.append(fault)
    return faults or [*unbuilt_faults(config), *start_faults(config)]


def _faults_of_own_code(config: RLConfig) -> list[str]:
    """Faults of environments, of an advantage function and of a loss."""
    return [*trial_faults(config.orchestrator), *loss_faults(config.trainer)]


def _sft_environment_faults(config: SFTConfig) -> list[str]:
    evaluation = evaluation_of(config)
    return [] if evaluation is None else trial_faults(evaluation)


def _eval_faults(config: OfflineEvalConfig, sharing: Sharing) -> list[str]:
    return [*unbuilt_faults(config), *start_faults(config)]


def _check_run(config: SFTConfig | RLConfig, paths: RunPaths) -> int | None:
    return check_run_dir(paths, resume_step_of(config), config.clean_output_dir, end_of(config))


def _prepare_run(config: SFTConfig | RLConfig, paths: RunPaths, resume_step: int | None) -> None:
    prepare_run_dir(paths, resume_step, config.clean_output_dir)


def _prepare_sft(config: SFTConfig, paths: RunPaths, resume_step: int | None) -> None:
    _prepare_run(config, paths, resume_step)
    evaluation = evaluation_of(config)
    prepare_evaluations(paths, resume_step, None if evaluation is None else settings_of(evaluation))


def _sft_notes(config: SFTConfig, paths: RunPaths, resume_step: int | None) -> list[str]:
    # During a run the trainer's log, which is on the screen, lists the changes.
    changes = _changes(config, paths, resume_step) if config.dry_run else []
    return [*disk_forecast(config, paths.root), *_resume_notes(config, paths, resume_step), *changes]


def _rl_notes(config: RLConfig, paths: RunPaths, resume_step: int | None) -> list[str]:
    resume_notes = _resume_notes(config, paths, resume_step)
    return [*disk_forecast(config.trainer, paths.root), *resume_notes, *_changes(config, paths, resume_step)]


def _resume_notes(config: SFTConfig | RLConfig, paths: RunPaths, resume_step: int | None) -> list[str]:
    """Why checkpoints after `resume_step` are not used, and which of its files cannot be checked."""
    if resume_step is None or (wanted := resume_step_of(config)) is None:
        return []
    saved = SavedSteps.of(paths)
    markers = saved.unchecked(resume_step)
    unchecked = [f"warning: {marker} has no hashes, so its files are not verified" for marker in markers]
    if wanted >= 0:
        return [*unchecked, *_moved_notes(paths, wanted)]
    return unchecked + [
        f"warning: resuming from step {resume_step}: {fault}" for fault in saved.choose(wanted).passed_over
    ]


def _moved_notes(paths: RunPaths, step: int) -> Iterator[str]:
    """What a resume from `step` moves aside."""
    for what, parent in (("steps", paths.checkpoints), ("weights", paths.weights)):
        if newer := [str(saved) for saved in stable_steps(parent) if saved > step]:
            yield (
                f"warning: resuming from step {step} moves the newer {what} {', '.join(newer)} to {parent / REPLACED}; "
                "delete them if you do not need them"
            )


def _changes(config: SFTConfig | RLConfig, paths: RunPaths, resume_step: int | None) -> list[str]:
    if resume_step is None:
        return []
    return list(changes_since(paths, resume_step, compared_configs(config)).lines())


def _check_evaluation(config: OfflineEvalConfig, paths: RunPaths) -> None:
    candidates_of(config)
    check_settings(EvalPaths(paths.root), settings_of(config))


def _prepare_evaluation(config: OfflineEvalConfig, paths: RunPaths, resume_step: int | None) -> None:
    eval_paths = EvalPaths(paths.root)
    save_settings(eval_paths, check_settings(eval_paths, settings_of(config)))


def resume_step_of(config: SFTConfig | RLConfig) -> int | None:
    """The step to resume from. In an RL config the shared `ckpt` section has set it for all components."""
    ckpt = getattr(config, "trainer", config).ckpt
    return None if ckpt is None else ckpt.resume_step


def _facts(config: SFTConfig | RLConfig, paths: RunPaths, resume_step: int | None) -> dict[str, Any]:
    asked = resume_step_of(config)
    words: dict[int | None, str] = {LATEST: "latest", AUTO: "auto"}
    facts: dict[str, Any] = {"command": type(config).component, "asked": words.get(asked, asked)}
    if resume_step is None:
        return facts | {"step": None}
    changes = changes_since(paths, resume_step, compared_configs(config))
    changed = [
        {"key": each.key, "was": each.was, "now": each.now, "becomes": each.becomes, "why": each.rule.why}
        for each in changes.changes
    ]
    passed_over = SavedSteps.of(paths).choose(asked).passed_over
    return facts | {"step": resume_step, "passed_over": passed_over, "changed_keys": changed}


def _eval_facts(config: OfflineEvalConfig, paths: RunPaths, resume_step: int | None) -> dict[str, Any]:
    return {"command": "eval", "asked": None, "step": None}


SFT: Command[SFTConfig] = Command(
    "sft",
    sft_request,
    plan_sft,
    _sft_faults,
    _check_run,
    _prepare_sft,
    _sft_environment_faults,
    _sft_notes,
    _facts,
    resume_step_of,
)
TRAININGS = {name: replace(SFT, name=name) for name in SFT_COMMANDS}
"""By the config's `component`. All are launched alike; the trainer is told the command."""
RL: Command[RLConfig] = Command(
    "rl",
    rl_request,
    plan_rl,
    _rl_faults,
    _check_run,
    _prepare_run,
    _faults_of_own_code,
    _rl_notes,
    _facts,
    resume_step_of,
)
EVAL: Command[OfflineEvalConfig] = Command(
    "eval", eval_request, plan_eval, _eval_faults, _check_evaluation, _prepare_evaluation, facts=_eval_facts
)

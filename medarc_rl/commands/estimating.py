"""`--estimate`: the memory and disk that a run needs, before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from medarc_rl.cli import say
from medarc_rl.errors import UsageError

if TYPE_CHECKING:
    from prime_rl.checks.memory import Device, Estimate, Gpu, ModelShape
    from prime_rl.checks.memory.changes import Change, Found, Variant
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.rollouts.judges import FrozenModel
    from prime_rl.configs.sft import SFTConfig

Option = typer.Option


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    estimate: Annotated[
        bool, Option("--estimate", help="Print the memory and disk that the run needs, whether it fits, and stop.")
    ] = False
    gpu: Annotated[
        str | None,
        Option(metavar="NAME|GIB", help="--estimate: the GPU, as in H100 or 80 (GiB); by default the one found here."),
    ] = None
    json: Annotated[bool, Option("--json", help="--estimate: print JSON.")] = False


@dataclass(frozen=True, slots=True)
class Answer:
    """An estimate, and the nearest change with which the run fits; None if it fits as it is, or nothing helps."""

    estimate: Estimate
    change: Found | None


def print_sft_estimate(config: SFTConfig, gpus: int, options: EstimateOptions, *, in_job: bool) -> int:
    """Print the estimate of an SFT run. Returns the exit code: 1 if it does not fit. `in_job`: it will run elsewhere.

    Raises:
        UsageError: the GPU or the model's shape is not known.
    """
    return _print(f"SFT of {config.model.name}", sft_answer(config, gpus, _gpu(options), in_job=in_job), options)


def print_rl_estimate(config: RLConfig, shares_gpus: bool, options: EstimateOptions, *, in_job: bool) -> int:
    """The same for RL."""
    answer = rl_answer(config, shares_gpus, _gpu(options), in_job=in_job)
    return _print(f"RL of {config.trainer.model.name}", answer, options)


def sft_answer(
    config: SFTConfig, gpus: int, gpu: Gpu | None, *, in_job: bool, place: Callable[[str], str] = str
) -> Answer:
    """Estimate an SFT run on `gpu`; None is one that is not known. `place` is where a model's files are.

    Raises:
        UsageError: the model's shape, or the length of the rows, is not known.
    """
    from prime_rl.checks.memory import estimate_sft
    from prime_rl.checks.memory.changes import Variant, sft_changes
    from prime_rl.configs.data import length_fault
    from prime_rl.configs.rollouts.judges import frozen_judges

    if (fault := length_fault(config.data)) is not None:
        raise UsageError(f"--estimate: {fault}")
    shape = _shape(place(config.model.name), config.model.debug.num_layers)
    judges = () if config.eval is None else frozen_judges(config.eval.judge, config.device)
    frozen = _frozen_shapes(judges, place)
    if config.distillation is not None:
        frozen[config.distillation.teacher] = _shape(place(config.distillation.teacher))

    def estimate(run: Variant) -> Estimate:
        return estimate_sft(run.config, shape, run.train, gpu, _device(config.device, gpu, in_job), frozen)

    return _answer(Variant(config, gpus), list(sft_changes(config, gpus)), estimate, shape)


def rl_answer(
    config: RLConfig, shares_gpus: bool, gpu: Gpu | None, *, in_job: bool, place: Callable[[str], str] = str
) -> Answer:
    """The same for RL, on the GPUs of its `deployment`. `shares_gpus`: each serves and trains."""
    from prime_rl.checks.memory import estimate_rl
    from prime_rl.checks.memory.changes import Variant, rl_changes
    from prime_rl.checks.memory.estimate import CRITIC

    trained = config.trainer.model
    shape = _shape(place(trained.name), trained.debug.num_layers)
    shapes = shape, _shape(place(config.inference.model.name)) if config.inference is not None else shape

    others = _frozen_shapes(config.frozen_models, place)
    if (critic := config.trainer.critic) is not None:
        others[CRITIC] = shape if critic.name is None else _shape(place(critic.name), trained.debug.num_layers)

    def estimate(run: Variant) -> Estimate:
        device = _device(config.device, gpu, in_job)
        return estimate_rl(run.config, shapes, (run.train, run.infer), gpu, device, others)

    train, infer = _gpus(config)
    infer = 0 if shares_gpus else infer
    trained_shapes = [shape] if critic is None else [shape, others[CRITIC]]
    return _answer(Variant(config, train, infer), list(rl_changes(config, train, infer)), estimate, *trained_shapes)


def _gpus(config: RLConfig) -> tuple[int, int]:
    """GPUs of the trainer on all nodes, and of one server."""
    deployment = config.deployment
    if deployment.type == "single_node":
        return deployment.num_train_gpus, deployment.num_infer_gpus
    return deployment.num_train_nodes * deployment.gpus_per_node, deployment.gpus_per_node


def _frozen_shapes(models: Sequence[FrozenModel], place: Callable[[str], str]) -> dict[str, ModelShape]:
    return {model.process: _shape(place(model.server.model.name)) for model in models}


def _shape(name: str, num_layers: int | None = None) -> ModelShape:
    from prime_rl.checks.memory import ModelShape
    from prime_rl.utils.errors import StartFault

    try:
        return ModelShape.of(name, num_layers)
    except StartFault as fault:
        raise UsageError(f"--estimate: {name}: {fault}") from fault


def _answer(
    run: Variant, changes: Sequence[Change], estimate: Callable[[Variant], Estimate], *trained: ModelShape
) -> Answer:
    from prime_rl.checks.memory.changes import nearest_change
    from prime_rl.checks.model_description import ModelDescription

    found = estimate(run)
    if found.verdict not in ("tight", "does not fit"):
        return Answer(found, None)
    return Answer(found, nearest_change(run, changes, estimate, [ModelDescription(each.config) for each in trained]))


def _print(title: str, answer: Answer, options: EstimateOptions) -> int:
    from prime_rl.checks.memory.changes import as_json, table_lines

    if options.json:
        say(json.dumps(as_json(answer.estimate, answer.change), indent=2))
    else:
        for line in table_lines(title, answer.estimate, answer.change):
            say(line)
    return 1 if answer.estimate.verdict == "does not fit" else 0


def _gpu(options: EstimateOptions) -> Gpu | None:
    from prime_rl.checks.memory import find_gpu, parse_gpu
    from prime_rl.utils.errors import UserError

    try:
        return find_gpu() if options.gpu is None else parse_gpu(options.gpu)
    except UserError as error:
        raise UsageError(str(error)) from error


def _device(configured: str, gpu: Gpu | None, in_job: bool) -> Device:
    """A job gets GPUs although this machine may have none."""
    if configured == "cpu":
        return "cpu"
    return "cuda" if gpu is not None or configured == "cuda" or in_job else "cpu"

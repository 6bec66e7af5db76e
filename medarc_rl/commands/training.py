"""The commands `medarc_train sft`, `rl` and `eval`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from typer import Option

from medarc_rl.backends.options import NODE_GPUS
from medarc_rl.cli import Resume, warn
from medarc_rl.commands.estimating import EstimateOptions

if TYPE_CHECKING:
    from prime_rl.configs.areal.launched import RecoverConfig


@dataclass(frozen=True, kw_only=True)
class SftOptions(EstimateOptions):
    output_dir: Annotated[Path | None, Option(help="Directory of the run, OUT.")] = None
    gpus: Annotated[
        int | None,
        Option(min=1, max=NODE_GPUS, help="GPUs, or processes on a CPU; by default deployment.num_gpus, which is 1."),
    ] = None
    resume: Resume = None
    preflight: Annotated[
        bool, Option("--preflight", help="Report on the data and stop: samples, lengths, packing, faults.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RlOptions(EstimateOptions):
    output_dir: Annotated[Path | None, Option(help="Directory of the run, OUT.")] = None
    train_gpus: Annotated[
        int | None, Option(min=1, max=4, help="GPUs of the trainer, or its processes on a CPU; by default 1.")
    ] = None
    infer_gpus: Annotated[int | None, Option(min=1, max=7, help="GPUs of the inference server; by default 1.")] = None
    single_gpu: Annotated[bool, Option("--single-gpu", help="One GPU for both.")] = False
    resume: Resume = None
    preflight: Annotated[
        bool,
        Option("--preflight", help="Load the environments, report on them and stop: rows, prompts, tools, faults."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    output_dir: Annotated[Path | None, Option(help="Directory of the evaluation; an earlier one continues.")] = None


OptionsT = TypeVar("OptionsT", SftOptions, RlOptions)


def sft(words: list[str], options: SftOptions) -> int:
    """Run supervised fine-tuning."""
    from medarc_rl.running import run_sft

    return _until_done(run_sft, words, options)


def rl(words: list[str], options: RlOptions) -> int:
    """Run reinforcement learning: inference server, orchestrator and trainer."""
    from medarc_rl.running import run_rl

    return _until_done(run_rl, words, options)


def evaluate(words: list[str], options: EvalOptions) -> int:
    """Evaluate a model and its checkpoints. Starts its own server unless client.base_url names one."""
    from medarc_rl.running import run_eval

    return run_eval(words, options)


def _until_done(
    run: Callable[[list[str], OptionsT], tuple[int, RecoverConfig]], words: list[str], options: OptionsT
) -> int:
    """Run, and again after a failure as often as the config's `recover` says."""
    from prime_rl.launch.restarting import until_done

    def start(more: Sequence[str]) -> tuple[int, RecoverConfig]:
        # The words of a later start say how to resume.
        return run([*words, *more], replace(options, resume=None)) if more else run(words, options)

    return until_done(start, warn)

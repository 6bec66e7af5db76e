"""The options of `medarc_train sft`, `dpo`, `rm`, `rl` and `eval`.

Help pages read them without importing the command itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from medarc_rl.backends.options import NODE_GPUS, RlGpus
from medarc_rl.cli import Resume
from medarc_rl.commands.estimating import EstimateOptions


@dataclass(frozen=True, kw_only=True)
class SftOptions(EstimateOptions):
    """Run supervised fine-tuning."""

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
class DpoOptions(SftOptions):
    """Train on preferences: DPO and its variants."""


@dataclass(frozen=True, kw_only=True)
class RmOptions(SftOptions):
    """Train a reward model on preferences."""


@dataclass(frozen=True, kw_only=True)
class RlOptions(RlGpus, EstimateOptions):
    """Run reinforcement learning: inference server, orchestrator and trainer."""

    output_dir: Annotated[Path | None, Option(help="Directory of the run, OUT.")] = None
    resume: Resume = None
    preflight: Annotated[
        bool,
        Option("--preflight", help="Load the environments, report on them and stop: rows, prompts, tools, faults."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Evaluate a model and its checkpoints. Starts its own server unless client.base_url names one."""

    output_dir: Annotated[Path | None, Option(help="Directory of the evaluation; an earlier one continues.")] = None

"""Models that a run serves and does not train: judges and the teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.rollouts.judges import JudgeConfig, started_judges
from prime_rl.configs.shared import Device

if TYPE_CHECKING:
    from prime_rl.configs.rl import RLConfig

TEACHER = "teacher_inference"
"""Name of the process that serves the teacher, of its log and of its config."""
TEACHER_AT_ONCE = 64
"""Samples that each server of a teacher scores at once."""


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A frozen model and the server that the run starts for it."""

    process: str
    """Name of its process, of its log and of its config."""
    title: str
    """For tables: `judge grader` or `teacher`."""
    server: InferenceConfig
    gpus: int
    """GPUs of its own. 0: none on a CPU, those of the inference server otherwise."""
    at_once: int
    """Requests that it answers at once."""
    longest_tokens: int | None = None
    """Longest sequence that it reads, if the config tells."""


def judge_process_name(judge: str) -> str:
    """Name of the process that serves a judge, of its log and of its config."""
    return f"judge_{judge}"


def frozen_judges(judges: Mapping[str, JudgeConfig], device: Device) -> tuple[FrozenModel, ...]:
    """The judges that a run on `device` starts."""
    return tuple(
        FrozenModel(
            judge_process_name(name), f"judge {name}", judge.server(device), judge.gpus_on(device), judge.max_concurrent
        )
        for name, judge in started_judges(judges).items()
    )


def frozen_models(config: RLConfig) -> tuple[FrozenModel, ...]:
    """The judges and the teacher that a run of RL starts. The teacher is last."""
    return *frozen_judges(config.orchestrator.judge, config.device), *_teacher(config)


def _teacher(config: RLConfig) -> Iterator[FrozenModel]:
    deployment = config.deployment
    if config.teacher_inference is not None and deployment.type == "single_node":
        gpus = 0 if config.device == "cpu" else deployment.num_teacher_gpus or 0
        longest = config.orchestrator.seq_len + 1
        yield FrozenModel(TEACHER, "teacher", config.teacher_inference, gpus, TEACHER_AT_ONCE, longest)

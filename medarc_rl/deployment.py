"""How many GPUs (without any, CPU processes) of one node a run takes, and what follows for its config."""

from __future__ import annotations

from dataclasses import dataclass

from medarc_rl.backends.slurm import NODE_GPUS
from medarc_rl.errors import UsageError
from medarc_rl.utils import OwnedKeys
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig

FULL_GPU_UTILIZATION = 0.9
"""From here on an inference server leaves a trainer on the same GPU no memory to speak of."""


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """GPUs that train and GPUs that serve; with `single_gpu` the same one does both."""

    train: int
    infer: int
    single_gpu: bool

    def __post_init__(self) -> None:
        """Raises UsageError for a split that no node has."""
        if self.single_gpu:
            if (self.train, self.infer) != (1, 1):
                raise UsageError(
                    "--single-gpu takes one GPU for both: leave out "
                    f"--train-gpus {self.train} and --infer-gpus {self.infer}"
                )
        elif self.total > NODE_GPUS:
            raise UsageError(
                f"--train-gpus {self.train} + --infer-gpus {self.infer} = {self.total} GPUs: "
                f"RL takes 2 to {NODE_GPUS} of one node, or --single-gpu"
            )

    @property
    def total(self) -> int:
        return 1 if self.single_gpu else self.train + self.infer

    @property
    def owned(self) -> OwnedKeys:
        """The keys of `RLConfig` that it decides."""
        return {
            "deployment.type": "single_node",
            "deployment.num_train_gpus": self.train,
            "deployment.num_infer_gpus": self.infer,
            "inference_gpu_ids": None,
            "trainer_gpu_ids": None,
        }


def check_rl(config: RLConfig, split: GpuSplit) -> None:
    """Raises UsageError, with one line for each rule that the run breaks."""
    faults = []
    if config.inference is None:
        faults.append("no [inference] table: this command starts the inference server; an empty table will do")
    if split.single_gpu and config.trainer.weight_broadcast.type == "nccl":
        faults.append("--single-gpu: weight_broadcast.type = 'nccl' needs two GPUs; set it to 'filesystem'")
    if faults:
        raise UsageError(*faults)


def advice(config: RLConfig, split: GpuSplit) -> list[str]:
    """One line for what works, but will likely not go well."""
    if not split.single_gpu or config.inference is None or config.device == "cpu":
        return []
    utilization = config.inference.gpu_memory_utilization
    if utilization < FULL_GPU_UTILIZATION:
        return []
    return [
        f"--single-gpu: inference.gpu_memory_utilization = {utilization} leaves the trainer little memory; "
        "0.7 to 0.8 is usual, as in --inference.gpu-memory-utilization 0.75"
    ]


def sft_owned(gpus: int | None) -> OwnedKeys:
    """The keys of `SFTConfig` that `--gpus` decides; without the flag the config's own number stays."""
    return {} if gpus is None else {"deployment.num_gpus": gpus}


def sft_gpus(config: SFTConfig) -> int:
    """GPUs of an SFT run.

    Raises:
        UsageError: more than one node, or more than a node has.
    """
    if config.deployment.type != "single_node":
        raise UsageError(f"deployment.type = {config.deployment.type!r}: this command runs on one node")
    gpus = config.deployment.num_gpus
    if not 1 <= gpus <= NODE_GPUS:
        raise UsageError(f"deployment.num_gpus = {gpus}: one node has 1 to {NODE_GPUS} GPUs")
    return gpus

"""Number of GPUs of a run on one node (or CPU processes, without GPUs), and the config keys that it sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medarc_rl.backends.slurm import NODE_GPUS
from medarc_rl.errors import UsageError
from medarc_rl.utils import OwnedKeys, written_value
from prime_rl.configs.areal.grammar import AllocationError
from prime_rl.configs.areal.mode import parse as parse_allocation
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.utils.pydantic_config import ConfigError

FULL_GPU_UTILIZATION = 0.9
"""At this utilization an inference server leaves almost no memory for a trainer on the same GPU."""


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """Numbers of GPUs that train and that serve. With `single_gpu` one GPU does both."""

    train: int
    infer: int
    single_gpu: bool

    def __post_init__(self) -> None:
        """Raises UsageError if a node does not have enough GPUs."""
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
        """The keys of `RLConfig` that it sets."""
        return {
            "deployment.type": "single_node",
            "deployment.num_train_gpus": self.train,
            "deployment.num_infer_gpus": self.infer,
            "inference_gpu_ids": None,
            "trainer_gpu_ids": None,
        }


def rl_split(words: Sequence[str], train: int | None, infer: int | None, single_gpu: bool) -> GpuSplit:
    """The GPUs that the options give. What they leave out follows from the config's `allocation_mode`, or is 1.

    Raises:
        UsageError: one node does not have the GPUs, or would have to share several between trainer and server.
    """
    trainer, servers = _allocated(words)
    shares = trainer is not None and servers is not None and trainer[1] == servers[1]
    asked = (trainer[0] if trainer else 1, servers[0] if servers else 1)
    if shares and asked != (1, 1):
        raise UsageError(
            f"allocation_mode shares {asked[0]} GPUs between trainer and servers: this command shares one; "
            "use `rl @ CONFIG`, or give each its own, as in vllm:d4+fsdp:d4"
        )
    return GpuSplit(train or asked[0], infer or asked[1], single_gpu or shares)


def _allocated(words: Sequence[str]) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """GPUs and component of trainer and of servers in the `allocation_mode`. None without them, or with a fault."""
    try:
        mode = parse_allocation(str(written_value(RLConfig, words, "allocation_mode") or ""))
    except (AllocationError, ConfigError, UsageError):
        return None, None  # loading the config reports it
    places = {
        each.role: (each.sizes.gpus, number) for number, component in enumerate(mode.components) for each in component
    }
    return places.get("training"), places.get("inference")


def check_rl(config: RLConfig, split: GpuSplit) -> None:
    """Raises UsageError with one line for each broken rule."""
    faults = []
    if config.inference is None:
        named = "elastic" if config.orchestrator.client.is_elastic else "base_url"
        faults.append(
            f"this command starts the inference server: remove orchestrator.client.{named}, or add an [inference] table"
        )
    if split.single_gpu and config.trainer.weight_broadcast.type == "nccl":
        faults.append("--single-gpu: weight_broadcast.type = 'nccl' needs two GPUs; set it to 'filesystem'")
    if faults:
        raise UsageError(*faults)


def advice(config: RLConfig, split: GpuSplit) -> list[str]:
    """One line for each setting that works but probably not well."""
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
    """The keys of `SFTConfig` that `--gpus` sets. Without the flag the config's number is used."""
    return {} if gpus is None else {"deployment.num_gpus": gpus}


def training_gpus(config: SFTConfig) -> int:
    """Number of GPUs that an SFT run trains on. Raises UsageError as `sft_gpus` does."""
    return sft_gpus(config) - _evaluating_gpus(config)


def _evaluating_gpus(config: SFTConfig) -> int:
    deployment = config.deployment
    return deployment.num_infer_gpus if config.eval is not None and deployment.type == "single_node" else 0


def sft_gpus(config: SFTConfig) -> int:
    """Number of GPUs of an SFT run, with those of the server of `[eval]`.

    Raises:
        UsageError: the run needs more than one node, or more GPUs than a node has.
    """
    if config.deployment.type != "single_node":
        raise UsageError(f"deployment.type = {config.deployment.type!r}: this command runs on one node")
    train, infer = config.deployment.num_gpus, _evaluating_gpus(config)
    if train + infer > NODE_GPUS:
        added = f" + deployment.num_infer_gpus = {infer}" if infer else ""
        raise UsageError(f"deployment.num_gpus = {train}{added}: one node has 1 to {NODE_GPUS} GPUs")
    return train + infer

"""Supervised fine-tuning: root of `sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from prime_rl.configs.root import RootConfig
from prime_rl.configs.shared import Device, HeartbeatConfig, LogConfig, SlurmConfig, WandbConfig
from prime_rl.configs.trainer import (
    AdamWConfig,
    BenchConfig,
    CheckpointConfig,
    ConstantSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
)
from prime_rl.utils.pydantic_config import BaseConfig


class BaseDataConfig(BaseConfig):
    """Batches and their sequences."""

    batch_size: int = Field(128, ge=1)
    """Sequences in a step, over all ranks."""

    seq_len: int = Field(128, ge=1)
    """Length of a sequence in tokens."""

    pack_function: Literal["cat", "stack"] = "cat"
    """Fill sequences with samples one after another, or give each sample its own."""

    micro_batch_size: int = Field(1, ge=1)
    """Sequences that a rank computes at once."""


class FakeDataConfig(BaseDataConfig):
    """Made-up tokens, for benchmarks."""

    type: Literal["fake"] = "fake"
    """Made up."""

    length: Literal["fixed", "variable"] = "fixed"
    """Lengths of the samples."""

    input_ids: Literal["increasing", "random"] = "increasing"
    """Tokens of the samples."""


class LossMaskConfig(BaseConfig):
    """Whose messages are trained on."""

    system: bool = False
    """System messages."""

    user: bool = False
    """User messages."""

    assistant: bool = True
    """Assistant messages."""

    tool: bool = False
    """Tool messages."""


class SFTDataConfig(BaseDataConfig):
    """A dataset of conversations."""

    type: Literal["sft"] = "sft"
    """Conversations."""

    name: str = "PrimeIntellect/Reverse-Text-SFT"
    """Dataset: a hub id, a directory, or a JSONL or Parquet file."""

    subsets: list[str] | None = None
    """Subsets; None is the default one."""

    splits: list[str] | None = None
    """Splits; None is `train`."""

    probabilities: list[float] | None = None
    """Share of each subset or split; None follows their sizes."""

    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "all_exhausted"
    """Whether an epoch ends with the first or the last of them."""

    shuffle: bool = True
    """Shuffle in every epoch."""

    seed: int = 0
    """Seed of the shuffle; the epoch is added to it."""

    loss_mask: LossMaskConfig = LossMaskConfig()
    """Whose messages are trained on."""


DataConfig = Annotated[FakeDataConfig | SFTDataConfig, Field(discriminator="type")]


class BaseDeploymentConfig(BaseConfig):
    """Where SFT runs."""

    gpus_per_node: int = 8
    """GPUs of a node."""


class SingleNodeDeploymentConfig(BaseDeploymentConfig):
    """One node."""

    type: Literal["single_node"] = "single_node"
    """One node."""

    num_gpus: int = 1
    """Processes, one a GPU."""


class MultiNodeDeploymentConfig(BaseDeploymentConfig):
    """Several nodes."""

    type: Literal["multi_node"] = "multi_node"
    """Several nodes."""

    num_nodes: int = 2
    """Nodes."""

    nodes_per_fsdp_group: int | None = None
    """Nodes that share one copy of the model; None shares it among all."""


SFTDeploymentConfig = Annotated[SingleNodeDeploymentConfig | MultiNodeDeploymentConfig, Field(discriminator="type")]


class SFTConfig(RootConfig):
    """Supervised fine-tuning. Read by `sft`."""

    component: ClassVar[str] = "sft"

    model: ModelConfig = ModelConfig()
    """The trained model."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""

    data: DataConfig = SFTDataConfig()
    """The dataset."""

    optim: OptimizerConfig = AdamWConfig()
    """The optimizer."""

    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """The learning rate schedule."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints; None writes none."""

    log: LogConfig = LogConfig()
    """Logs."""

    wandb: WandbConfig | None = None
    """Weights & Biases; None is off."""

    output_dir: Path = Path("outputs")
    """The run's directory."""

    clean_output_dir: bool = False
    """Delete the output directory first."""

    max_steps: int | None = None
    """Steps to train; None never ends."""

    memory_profiler_path: Path | None = None
    """Write a memory profile here."""

    bench: BenchConfig | None = None
    """Benchmark mode; None is off."""

    trace_path: Path | None = None
    """Write profiler traces to this directory; needs `max_steps` below 10."""

    dist_timeout_seconds: int = 600
    """Limit of a collective operation, in seconds."""

    loss_impl: Literal["liger", "torch"] = "torch"
    """Whose cross-entropy."""

    heartbeat: HeartbeatConfig | None = None
    """Heartbeat; None is off."""

    deployment: SFTDeploymentConfig = SingleNodeDeploymentConfig()
    """GPUs and nodes."""

    slurm: SlurmConfig | None = None
    """Submit through Slurm; None runs here."""

    dry_run: bool = False
    """Write the resolved config and stop."""

    device: Device = "auto"
    """Where to run: `auto` takes GPUs when there are any."""

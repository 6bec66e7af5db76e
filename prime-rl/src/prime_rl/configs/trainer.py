"""The RL trainer: root of `trainer` and `[trainer]` of `rl`. SFT shares most sections."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.losses import (
    ClipLossConfig,
    CustomLossConfig,
    DecoupledLossConfig,
    DefaultLossConfig,
    GSPOLossConfig,
    LossConfig,
    TruncatedLossConfig,
)
from prime_rl.configs.model import (
    DEFAULT_VOCAB_CHUNK,
    ActivationCheckpointConfig,
    ActivationOffloadingConfig,
    CompileConfig,
    DebugModelConfig,
    LoRAConfig,
    ModelConfig,
    TokenizerConfig,
)
from prime_rl.configs.optim import (
    AdamWConfig,
    BaseOptimizerConfig,
    ConstantSchedulerConfig,
    CosineSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
)
from prime_rl.configs.shared import (
    Device,
    FileSystemTransportConfig,
    HeartbeatConfig,
    LogConfig,
    MetricsServerConfig,
    TransportConfig,
    WandbConfig,
)
from prime_rl.configs.surface.root import RootConfig
from prime_rl.utils.pydantic_config import BaseConfig, derive, raise_faults

__all__ = [
    "ActivationCheckpointConfig",
    "ActivationOffloadingConfig",
    "AdamWConfig",
    "BaseOptimizerConfig",
    "BaseWeightBroadcastConfig",
    "BenchConfig",
    "CheckpointConfig",
    "ClipLossConfig",
    "CompileConfig",
    "ConstantSchedulerConfig",
    "CosineSchedulerConfig",
    "CustomLossConfig",
    "DataLoaderConfig",
    "DebugModelConfig",
    "DecoupledLossConfig",
    "DefaultLossConfig",
    "FakeDataLoaderConfig",
    "FileSystemWeightBroadcastConfig",
    "GSPOLossConfig",
    "LinearSchedulerConfig",
    "LoRAConfig",
    "LossConfig",
    "ModelConfig",
    "MuonConfig",
    "NCCLWeightBroadcastConfig",
    "OptimizerConfig",
    "ParityConfig",
    "SGDConfig",
    "SchedulerConfig",
    "TokenizerConfig",
    "TrainerConfig",
    "TruncatedLossConfig",
    "WeightBroadcastConfig",
    "WeightCheckpointConfig",
]

BENCH_STEPS = 4
MAX_TRACED_STEPS = 9
"""A profiler trace of more steps is too large to open."""


class WeightCheckpointConfig(BaseConfig):
    """Weights exported in the layout of Transformers."""

    save_sharded: bool = True
    """Several files instead of one."""

    save_format: Literal["safetensors", "torch"] = "safetensors"
    """File format."""

    save_adapter_separately: bool = False
    """Save the adapter alone as well; needs `model.lora`."""


class CheckpointConfig(BaseConfig):
    """Checkpoints. A step stays if `keep_last` or `keep_interval` keeps it; with neither, all stay."""

    interval: int | None = Field(None, ge=1)
    """Steps between two; None saves at the end only."""

    weights: WeightCheckpointConfig | None = WeightCheckpointConfig()
    """Export weights too; None does not."""

    resume_step: int | None = Field(None, ge=-1)
    """Step to continue from; -1 is the latest, None starts afresh."""

    keep_last: int | None = Field(None, ge=1)
    """Keep the newest n; None sets no such limit."""

    keep_interval: int | None = Field(None, ge=1)
    """Keep multiples of n for ever; None sets no such rule."""

    async_save: bool = False
    """Training goes on while a checkpoint is written. Needs memory for a copy of weights and optimizer."""

    keep_best: bool = False
    """SFT: save whenever the validation loss is the lowest so far, note that step in `checkpoints/best.json`, and keep
    it whatever the other rules say."""

    skip_progress: bool = False
    """SFT: continue without the saved progress."""

    skip_scheduler: bool = False
    """SFT: continue without the saved schedule."""

    skip_dataloader: bool = False
    """SFT: continue without the saved place in the data."""


class ParityConfig(BaseConfig):
    """A check of the first batch: trainer and inference must give the same tokens the same log-probabilities."""

    on_mismatch: Literal["stop", "warn", "off"] = "stop"
    """End the run, warn, or do not look."""

    max_mean_abs_diff: float | None = Field(None, gt=0)
    """Largest mean absolute difference, in nats; None is 0.1 for a trainer that computes in bfloat16, else 0.05. With
    135 million parameters 1e-5 was measured in float32, 0.04 to 0.055 where one or both sides compute in bfloat16."""


class FakeDataLoaderConfig(BaseConfig):
    """Random batches, for benchmarks."""

    batch_size: int = Field(2, ge=1)
    """Samples in a batch."""

    generate_samples: bool = False
    """Make separate samples and pack them."""


class DataLoaderConfig(BaseConfig):
    """Where batches come from."""

    fake: FakeDataLoaderConfig | None = None
    """Random batches; None takes the orchestrator's."""


class BaseWeightBroadcastConfig(BaseConfig):
    """Parent of the ways that weights travel to the inference servers."""


class FileSystemWeightBroadcastConfig(BaseWeightBroadcastConfig):
    """Weights travel as files in the output directory."""

    type: Literal["filesystem"] = "filesystem"
    """Through files."""

    save_sharded: bool = True
    """Several files instead of one."""

    save_format: Literal["safetensors", "torch"] = "safetensors"
    """File format."""


class NCCLWeightBroadcastConfig(BaseWeightBroadcastConfig):
    """Weights travel from the trainer's memory to the servers'. Needs `max_async_level` 1, and no adapters."""

    type: Literal["nccl"] = "nccl"
    """Through NCCL, from GPU to GPU; on a CPU through gloo."""

    host: str = "localhost"
    """Host of the rendezvous."""

    port: int = 29501
    """Port of the rendezvous."""

    timeout: int = Field(1200, ge=1)
    """Limit in seconds: for the servers to join, to ask for a version that is offered, and for its transfer."""

    inference_world_size: int = Field(1, ge=1)
    """Inference GPUs, on a CPU processes, of all servers; the group has one more. `rl` fills it in for its server."""


WeightBroadcastConfig = Annotated[
    FileSystemWeightBroadcastConfig | NCCLWeightBroadcastConfig, Field(discriminator="type")
]


class BenchConfig(BaseConfig):
    """Benchmark mode: four steps and a table of the last three; neither checkpoints nor weights are left."""

    output_json: Path | None = None
    """Write the results to this file as well."""


def training_faults(config: Any) -> Iterator[str]:
    """Broken rules that the RL and the SFT trainer share; `config` is the root of either."""
    if config.trace_path is not None and (config.max_steps is None or config.max_steps > MAX_TRACED_STEPS):
        yield f"trace_path needs max_steps of at most {MAX_TRACED_STEPS} (got {config.max_steps})"
    weights = config.ckpt.weights if config.ckpt is not None else None
    if weights is not None and weights.save_adapter_separately and config.model.lora is None:
        yield "ckpt.weights.save_adapter_separately needs model.lora"
    if config.optim.type == "muon" and config.model.fsdp_cpu_offload:
        yield "optim.type = 'muon' does not work with model.fsdp_cpu_offload"


def fill_tokenizer(tokenizer: TokenizerConfig, model: ModelConfig) -> None:
    """A tokenizer that names nothing is the model's."""
    if tokenizer.name is None:
        derive(tokenizer, name=model.name)
    if tokenizer.trust_remote_code is None:
        derive(tokenizer, trust_remote_code=model.trust_remote_code)


class TrainerConfig(RootConfig):
    """The RL trainer. Read by `trainer`."""

    component: ClassVar[str] = "trainer"

    model: ModelConfig = ModelConfig()
    """The trained model."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""

    data: DataLoaderConfig = DataLoaderConfig()
    """Where batches come from."""

    loss: LossConfig = DefaultLossConfig()
    """The loss."""

    parity: ParityConfig = ParityConfig()
    """The check that trainer and inference mean the same policy."""

    minibatches: int = Field(1, ge=1)
    """Optimizer steps that each batch is split into; a batch is one policy version all the same."""

    optim: OptimizerConfig = AdamWConfig()
    """The optimizer."""

    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """The learning rate schedule."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints; None writes none."""

    weight_broadcast: WeightBroadcastConfig = FileSystemWeightBroadcastConfig()
    """How weights reach the inference servers."""

    rollout_transport: TransportConfig = FileSystemTransportConfig()
    """How rollouts arrive."""

    log: LogConfig = LogConfig()
    """Logs."""

    wandb: WandbConfig | None = None
    """Weights & Biases; None is off."""

    output_dir: Path = Path("outputs")
    """The run's directory."""

    max_steps: int | None = None
    """Steps to train; None never ends."""

    max_async_level: int = Field(1, ge=0)
    """Steps that the rollouts' policy may lag behind; 0 is synchronous."""

    memory_profiler_path: Path | None = None
    """Write snapshots of the GPU's memory to this directory, one a step."""

    bench: BenchConfig | None = None
    """Benchmark mode; None is off."""

    trace_path: Path | None = None
    """Write a profiler trace of the run to this directory, one a process; needs `max_steps` below 10."""

    dist_timeout_seconds: int = 600
    """Limit of a collective operation, in seconds."""

    heartbeat: HeartbeatConfig | None = None
    """A URL to call after each step; None is off."""

    metrics_server: MetricsServerConfig | None = None
    """`/metrics` for Prometheus, and `/health`; None is off."""

    max_concurrent_runs: int = Field(1, ge=1)
    """LoRA runs trained side by side."""

    device: Device = "auto"
    """Where to run: `auto` takes GPUs when there are any."""

    @model_validator(mode="after")
    def _enter_bench_mode(self) -> Self:
        if self.bench is not None:
            derive(self, max_steps=BENCH_STEPS, ckpt=None)
            if self.data.fake is None:
                derive(self.data, fake=FakeDataLoaderConfig())
        return self

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults([*training_faults(self), *self._faults()])
        fill_tokenizer(self.tokenizer, self.model)
        if self.model.fused_lm_head_chunk_size == "auto":
            derive(self.model, fused_lm_head_chunk_size=DEFAULT_VOCAB_CHUNK)
        return self

    def _faults(self) -> Iterator[str]:
        broadcast_nccl = self.weight_broadcast.type == "nccl"
        if broadcast_nccl and self.max_async_level != 1:
            yield f"NCCL weight broadcast needs max_async_level = 1 (got {self.max_async_level})"
        if broadcast_nccl and self.model.lora is not None:
            yield "NCCL weight broadcast cannot send model.lora adapters: use weight_broadcast.type = 'filesystem'"
        if self.model.optim_cpu_offload and self.max_concurrent_runs > 1:
            yield f"model.optim_cpu_offload serves one run (got max_concurrent_runs = {self.max_concurrent_runs})"

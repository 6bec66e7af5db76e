"""The RL trainer: root of `trainer` and `[trainer]` of `rl`. SFT shares most sections."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.algorithms import (
    ClipLossConfig,
    CustomLossConfig,
    DecoupledLossConfig,
    DefaultLossConfig,
    GSPOLossConfig,
    LossConfig,
    MaskedLossConfig,
    ReferenceConfig,
    TruncatedLossConfig,
    top_measure_of,
)
from prime_rl.configs.critic import CriticConfig, critic_faults, critic_warnings, follow_policy
from prime_rl.configs.data import NOT_SET, SFTDataConfig, stack_fault
from prime_rl.configs.demonstrations import DemonstrationsConfig
from prime_rl.configs.distillation import DistillationConfig
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
    AdafactorConfig,
    AdamW4bitConfig,
    AdamW8bitConfig,
    AdamWConfig,
    BaseOptimizerConfig,
    ConstantSchedulerConfig,
    CosineSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
    optimizer_faults,
    schedule_faults,
)
from prime_rl.configs.ranges import (
    AUTO,
    LATEST,
    Count,
    Port,
    Processes,
    ResumeStep,
    Seconds,
    TransferSeconds,
    WholeNumber,
)
from prime_rl.configs.shared import (
    Device,
    FileSystemTransportConfig,
    HeartbeatConfig,
    LogConfig,
    MetricsServerConfig,
    MonitorConfig,
    TransportConfig,
    WandbConfig,
)
from prime_rl.configs.surface.root import RootConfig
from prime_rl.utils.pydantic_config import BaseConfig, ConfigWarning, derive, raise_faults

__all__ = [
    "ActivationCheckpointConfig",
    "ActivationOffloadingConfig",
    "AdafactorConfig",
    "AdamW4bitConfig",
    "AdamW8bitConfig",
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
    "MaskedLossConfig",
    "ModelConfig",
    "MuonConfig",
    "NCCLWeightBroadcastConfig",
    "OptimizerConfig",
    "ParityConfig",
    "ReferenceConfig",
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
"""Viewers cannot open a trace of more steps."""


class WeightCheckpointConfig(BaseConfig):
    """Exports weights in the layout of Transformers."""

    save_sharded: bool = True
    """Write several files instead of one."""

    save_format: Literal["safetensors", "torch"] = "safetensors"
    """File format. Evaluations of several checkpoints need `safetensors`; an engine starts with either."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the exported weights. `auto` is the one that the model was published in; float16 becomes bfloat16."""

    save_adapter_separately: bool = False
    """Also save the adapter alone. Needs `model.lora`."""


class CheckpointConfig(BaseConfig):
    """Checkpoints. A checkpoint and its exported weights are kept if `keep_last` or `keep_interval` keeps them. With
    neither, the newest two checkpoints and all exports are kept."""

    interval: Count | None = None
    """Steps between two checkpoints. None saves only at the end."""

    weights: WeightCheckpointConfig | None = WeightCheckpointConfig()
    """Also export the weights. None exports none."""

    resume_step: ResumeStep | None = None
    """Step to continue from; `--resume` is short for it. `latest` (or -1) is the newest that all parts of the run have
    whole. `auto` (or -2) is that too, but starts a new run if there is none. None starts a new run."""

    keep_last: Count | None = None
    """Number of newest checkpoints to keep. None disables the rule."""

    keep_interval: Count | None = None
    """Keep every checkpoint whose step is a multiple of n; 1 keeps all. None disables the rule."""

    async_save: bool = False
    """Continue training while a checkpoint is written. Needs memory for a copy of weights and optimizer state."""

    keep_best: bool = False
    """Record the best step in `checkpoints/best.json`, and keep its checkpoint regardless of the other rules. SFT takes
    the lowest validation loss, and saves such a step; RL takes the saved step with the best evaluation
    (`orchestrator.eval.metric`)."""

    skip_progress: bool = False
    """SFT: continue without the saved progress."""

    skip_scheduler: bool = False
    """SFT: continue without the saved schedule."""

    skip_dataloader: bool = False
    """SFT, and demonstrations in RL: continue from the beginning of the data instead of the saved position."""


class ParityConfig(BaseConfig):
    """Checks on the first batch that trainer and inference give the same tokens the same log-probabilities."""

    on_mismatch: Literal["stop", "warn", "off"] = "stop"
    """Stop the run, log a warning, or skip the check."""

    max_mean_abs_diff: float | None = Field(None, gt=0)
    """Maximum mean absolute difference, in nats. None is 0.1 for a trainer that computes in bfloat16, otherwise 0.05.
    Measured with 135 million parameters: 1e-5 in float32; 0.04 to 0.055 if either side computes in bfloat16."""


class FakeDataLoaderConfig(BaseConfig):
    """Random batches, for benchmarks."""

    batch_size: Count = 2
    """Samples per batch."""

    generate_samples: bool = False
    """Make samples of various lengths and pack them."""


class DataLoaderConfig(BaseConfig):
    """Source of the batches."""

    fake: FakeDataLoaderConfig | None = None
    """Random batches. None uses the orchestrator's."""


class BaseWeightBroadcastConfig(BaseConfig):
    """Base of the ways to send weights to the inference servers."""


class FileSystemWeightBroadcastConfig(BaseWeightBroadcastConfig):
    """Sends weights as files in the output directory."""

    type: Literal["filesystem"] = "filesystem"
    """Files."""

    save_sharded: bool = True
    """Write several files instead of one."""

    save_format: Literal["safetensors", "torch"] = "safetensors"
    """File format."""


class NCCLWeightBroadcastConfig(BaseWeightBroadcastConfig):
    """Sends weights from the trainer's memory to the servers'. Needs `max_async_level = 1` and no LoRA."""

    type: Literal["nccl"] = "nccl"
    """NCCL from GPU to GPU, or gloo on a CPU."""

    host: str = "localhost"
    """Host of the rendezvous."""

    port: Port = 29501
    """Port of the rendezvous."""

    timeout: TransferSeconds = 1200
    """Timeout in seconds: for the servers to join, to ask for an offered version, and for its transfer."""

    inference_world_size: Processes = 1
    """Number of inference workers of all servers: GPUs, or 1 for each embedded engine on a CPU. `rl` sets it for its
    own servers."""


WeightBroadcastConfig = Annotated[
    FileSystemWeightBroadcastConfig | NCCLWeightBroadcastConfig, Field(discriminator="type")
]


class BenchConfig(BaseConfig):
    """Benchmark mode: four steps at a constant learning rate, and a table of the last three. Writes no checkpoints."""

    output_json: Path | None = None
    """Also write the results to this file."""


NO_MEMORY_PROFILE = "memory_profiler_path records a GPU's memory, and this run has no GPU"


def beyond_end(step: int | None, max_steps: int | None) -> Iterator[str]:
    """Why a run cannot continue from `step`; nothing when it can."""
    if step is not None and max_steps is not None and step > max_steps:
        yield f"ckpt.resume_step = {step} is beyond max_steps = {max_steps}: nothing is left to train"


def scheduled_steps(max_steps: int | None, ckpt: CheckpointConfig | None, resume_step: int | None) -> int | None:
    """Length of the learning-rate schedule: all steps, or the remaining ones if the schedule restarts on resume."""
    if max_steps is None or ckpt is None or not ckpt.skip_scheduler or ckpt.skip_progress:
        return max_steps
    return max_steps - (resume_step or 0)


def training_faults(config: Any) -> Iterator[str]:
    """Broken rules that the RL and the SFT trainer share; `config` is the root of either."""
    if config.trace_path is not None and (config.max_steps is None or config.max_steps > MAX_TRACED_STEPS):
        yield f"trace_path needs max_steps of at most {MAX_TRACED_STEPS} (got {config.max_steps})"
    weights = config.ckpt.weights if config.ckpt is not None else None
    if weights is not None and weights.save_adapter_separately and config.model.lora is None:
        yield "ckpt.weights.save_adapter_separately needs model.lora"
    if weights is not None and weights.save_adapter_separately and config.model.adapter is not None:
        yield (
            "ckpt.weights.save_adapter_separately with model.adapter: the new adapter belongs to the merged weights, "
            "which are no model on their own; remove it and use the exported weights, or continue the adapter with "
            "model.lora.path"
        )
    yield from _step_faults(config)
    yield from optimizer_faults(config.optim, config.scheduler, config.model, config.model.lora)
    if config.memory_profiler_path is not None and config.device == "cpu":
        yield NO_MEMORY_PROFILE


def _step_faults(config: Any) -> Iterator[str]:
    """What does not fit into `max_steps`: the step to continue from, or the schedule."""
    ckpt = config.ckpt
    # The latest step is known only to the run's directory.
    resume_step = None if ckpt is None or ckpt.resume_step in (LATEST, AUTO) else ckpt.resume_step
    if ckpt is not None and not ckpt.skip_progress and (faults := list(beyond_end(resume_step, config.max_steps))):
        yield from faults
    elif getattr(config, "num_epochs", None) is None:  # SFT finds the number of steps once it knows its data
        steps = getattr(config, "policy_steps", config.max_steps)
        why = ""
        if steps != config.max_steps:
            why = f": the first critic.warmup_steps = {config.critic.warmup_steps} steps do not train the policy"
        for fault in schedule_faults(config.scheduler, scheduled_steps(steps, ckpt, resume_step)):
            yield fault + why


def fill_tokenizer(tokenizer: TokenizerConfig, model: ModelConfig) -> None:
    """Fill in unset keys of the tokenizer from the model."""
    if tokenizer.name is None:
        derive(tokenizer, "the model's own tokenizer", name=model.name)
    if tokenizer.trust_remote_code is None:
        derive(tokenizer, "as for the model", trust_remote_code=model.trust_remote_code)


class TrainerConfig(RootConfig):
    """The RL trainer. Read by `trainer`."""

    component: ClassVar[str] = "trainer"

    model: ModelConfig = ModelConfig()
    """The trained model."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""

    data: DataLoaderConfig = DataLoaderConfig()
    """Source of the batches."""

    loss: LossConfig = DefaultLossConfig()
    """The loss."""

    reference: ReferenceConfig | None = None
    """The reference model. None uses one only if `loss.kl_coef` is above 0."""

    critic: CriticConfig | None = None
    """PPO's critic. None uses the orchestrator's advantages."""

    distillation: DistillationConfig | None = None
    """Divergence from the teacher's distribution at each place. None leaves `loss.teacher_tau`, which compares the
    sampled tokens only."""

    demonstrations: DemonstrationsConfig | None = None
    """Rows that the policy imitates beside its rollouts. None disables it."""

    parity: ParityConfig = ParityConfig()
    """The check that trainer and inference use the same policy."""

    enable_router_replay: bool = False
    """Mixtures of experts: route every token to the experts that the engine chose when it sampled it. `rl` turns on
    `inference.enable_return_routed_experts`."""

    minibatches: Count = 1
    """Number of parts of a batch, with an optimizer step for each. A batch is still one policy version."""

    epochs_per_batch: Count = 1
    """Number of times that a batch is trained on. Each goes through the same minibatches in the same order."""

    optim: OptimizerConfig = AdamWConfig()
    """The optimizer."""

    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """The learning rate schedule."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints. None writes none."""

    weight_broadcast: WeightBroadcastConfig = FileSystemWeightBroadcastConfig()
    """How weights reach the inference servers."""

    rollout_transport: TransportConfig = FileSystemTransportConfig()
    """How rollouts reach the trainer."""

    batch_timeout: Seconds = 86400
    """Seconds to wait for the orchestrator's next batch."""

    log: LogConfig = LogConfig()
    """Logs."""

    wandb: WandbConfig | None = None
    """Weights & Biases. None disables it."""

    monitor: MonitorConfig = MonitorConfig()
    """TensorBoard, Trackio, SwanLab and MLflow."""

    output_dir: Path = Path("outputs")
    """The run's directory."""

    max_steps: WholeNumber | None = None
    """Number of steps. None trains until it is stopped."""

    max_async_level: WholeNumber = 1
    """Maximum number of steps that rollouts run ahead of the trainer. 0 is synchronous."""

    offload_while_sampling: bool = False
    """Keep weights and optimizer state in host memory while the engine samples: for one GPU that both share. Needs
    `max_async_level = 0`; the engine makes room in turn with `inference.enable_sleep_mode`. No effect on a CPU."""

    memory_profiler_path: Path | None = None
    """Write a snapshot of GPU memory to this directory after each step."""

    bench: BenchConfig | None = None
    """Benchmark mode. None disables it."""

    trace_path: Path | None = None
    """Write a profiler trace per process to this directory. Needs `max_steps` below 10."""

    dist_timeout_seconds: Seconds = 600
    """Timeout of a collective operation, in seconds."""

    heartbeat: HeartbeatConfig | None = None
    """A URL to call after each step. None disables it."""

    metrics_server: MetricsServerConfig | None = None
    """`/metrics` for Prometheus, and `/health`. None disables it."""

    max_concurrent_runs: Count = 1
    """Number of LoRA runs to train concurrently."""

    device: Device = "auto"
    """Where to run. `auto` uses GPUs if there are any."""

    @model_validator(mode="after")
    def _enter_bench_mode(self) -> Self:
        if self.bench is not None:
            derive(self, "bench", max_steps=BENCH_STEPS, ckpt=None, scheduler=ConstantSchedulerConfig())
            if self.critic is not None:
                derive(self.critic, "bench", scheduler=ConstantSchedulerConfig(), warmup_steps=0)
            if self.data.fake is None:
                derive(self.data, "bench", fake=FakeDataLoaderConfig())
        return self

    @model_validator(mode="after")
    def _share_sequence_length(self) -> Self:
        if self.demonstrations is not None and self.demonstrations.data.seq_len is NOT_SET:
            derive(self.demonstrations.data, "model.seq_len", seq_len=self.model.seq_len)
        return self

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if self.critic is not None:
            follow_policy(self.critic, self)
        raise_faults(self.faults())
        fill_tokenizer(self.tokenizer, self.model)
        for text in critic_warnings(self, self.critic) if self.critic is not None else ():
            warnings.warn(text, ConfigWarning, stacklevel=2)
        if self.model.lora is not None and self.model.lora.dropout > 0:
            text = f"model.lora.dropout = {self.model.lora.dropout} has no effect: RL trains without dropout"
            warnings.warn(text, ConfigWarning, stacklevel=2)
        if self.model.lora is not None and not self.model.sends_adapter:
            text = (
                f"model.{self.model.merging_key}: engines take plain adapters of linear layers of model.name alone, "
                "so they get whole weights, with it merged in"
            )
            warnings.warn(text, ConfigWarning, stacklevel=2)
        if self.model.fused_lm_head_chunk_size == "auto":
            derive(self.model, "what `auto` means", fused_lm_head_chunk_size=DEFAULT_VOCAB_CHUNK)
        return self

    @property
    def datasets(self) -> list[SFTDataConfig]:
        """The datasets that the trainer reads."""
        return [] if self.demonstrations is None else [self.demonstrations.data]

    @property
    def reference_source(self) -> Literal["adapter", "copy"] | None:
        """The model that computes the reference's log-probabilities; None if no loss needs them."""
        if self.reference is None and (self.loss.type == "custom" or self.loss.kl_coef == 0):
            return None
        source = "auto" if self.reference is None else self.reference.source
        if source != "auto":
            return source
        if self.reference is not None and self.reference.reset_every is not None:
            return "copy"
        lora = self.model.lora
        starts_alike = lora is not None and lora.path is None and lora.init == "default"
        return "adapter" if lora is not None and starts_alike and not lora.modules_to_save else "copy"

    @property
    def policy_steps(self) -> int | None:
        """Number of steps that train the policy: all but those in which only the critic is trained."""
        if self.max_steps is None or self.critic is None:
            return self.max_steps
        return max(0, self.max_steps - self.critic.warmup_steps)

    def faults(self) -> Iterator[str]:
        """Which of the keys do not go together."""
        yield from training_faults(self)
        yield from self._faults()

    def _faults(self) -> Iterator[str]:
        if self.reference is not None and self.loss.type != "custom" and self.loss.kl_coef == 0:
            yield "reference has no effect with loss.kl_coef = 0: set it above 0, or remove [reference]"
        if self.reference is not None and self.reference.source == "adapter":
            if self.reference.reset_every is not None:
                yield "reference.reset_every needs reference.source = 'copy': a model without adapters stays as it is"
            lora = self.model.lora
            if lora is None:
                yield "reference.source = 'adapter' needs model.lora: use 'copy'"
            elif lora.modules_to_save:
                yield (
                    f"reference.source = 'adapter' with model.lora.modules_to_save = {lora.modules_to_save}: the model "
                    "without adapters would hold their trained weights; use 'copy'"
                )
        if self.critic is not None:
            yield from critic_faults(self, self.critic)
        for name in ("cp", "tp") if self.distillation is not None else ():
            if (size := getattr(self.model, name)) > 1:
                yield f"[trainer.distillation] compares whole rows, and model.{name} ({size}) divides them: remove one"
        if self.data.fake is not None and (measure := top_measure_of(self.loss)) is not None:
            yield f"loss.measure = {measure!r} needs the tokens that an engine reports, which fake data does not have"
        if self.enable_router_replay and self.model.compile is not None:
            yield "enable_router_replay does not work with model.compile: remove one"
        if self.demonstrations is not None:
            data = self.demonstrations.data
            if data.seq_len > self.model.seq_len:
                yield (
                    f"{data.section}.seq_len ({data.seq_len}) is above trainer.model.seq_len ({self.model.seq_len}), "
                    "the length of the longest training sequence"
                )
            yield from filter(None, (stack_fault(data),))
        broadcast_nccl = self.weight_broadcast.type == "nccl"
        if broadcast_nccl and self.max_async_level != 1:
            yield f"NCCL weight broadcast needs max_async_level = 1 (got {self.max_async_level})"
        if broadcast_nccl and self.model.sends_adapter:
            yield "NCCL weight broadcast cannot send model.lora adapters: use weight_broadcast.type = 'filesystem'"
        if self.tokenizer.add_tokens:
            yield (
                f"tokenizer.add_tokens ({', '.join(self.tokenizer.add_tokens)}) is for SFT: the engines have the "
                "tokenizer of model.name; add the tokens in SFT, and set model.name to its export"
            )
        if self.offload_while_sampling and self.max_async_level:
            yield (
                f"offload_while_sampling needs max_async_level = 0 (got {self.max_async_level}): the trainer would "
                "compute while the engine samples"
            )
        if self.offload_while_sampling and self.model.fsdp_cpu_offload:
            yield "model.fsdp_cpu_offload always keeps everything in host memory: remove offload_while_sampling"
        if self.offload_while_sampling and self.max_concurrent_runs > 1:
            yield f"offload_while_sampling serves one run (got max_concurrent_runs = {self.max_concurrent_runs})"
        if self.model.optim_cpu_offload and self.max_concurrent_runs > 1:
            yield f"model.optim_cpu_offload serves one run (got max_concurrent_runs = {self.max_concurrent_runs})"

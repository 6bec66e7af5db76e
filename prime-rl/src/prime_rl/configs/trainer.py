"""The RL trainer: root of `trainer` and `[trainer]` of `rl`. SFT shares most sections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from prime_rl.configs.root import RootConfig
from prime_rl.configs.shared import (
    BaseModelConfig,
    Device,
    FileSystemTransportConfig,
    HeartbeatConfig,
    LogConfig,
    MetricsServerConfig,
    TransportConfig,
    WandbConfig,
)
from prime_rl.utils.pydantic_config import BaseConfig

AttentionKernel = Literal["sdpa", "flash_attention_2", "flash_attention_3", "fa4"]


class CompileConfig(BaseConfig):
    """`torch.compile` of the transformer blocks."""

    fullgraph: bool = False
    """Fail where a block does not compile as a whole."""


class ActivationCheckpointConfig(BaseConfig):
    """Activations computed again in the backward pass."""

    freq: int = Field(1, ge=1)
    """Every n-th layer."""


class ActivationOffloadingConfig(BaseConfig):
    """Activations kept in host memory."""

    pin_memory: bool = True
    """Use pinned host buffers."""

    max_inflight_activations: int = Field(5, ge=1)
    """Activations kept on the GPU while they are copied."""


class LoRAConfig(BaseConfig):
    """Low-rank adapters instead of full training."""

    rank: int = Field(16, ge=1)
    """Rank of an adapter."""

    alpha: float = Field(32.0, ge=0)
    """Scale of an adapter (times alpha / rank)."""

    dropout: float = Field(0.0, ge=0, le=1)
    """Dropout before an adapter."""

    target_modules: list[str] = Field(
        [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "experts",
        ]
    )
    """Modules that get an adapter: names or regular expressions."""

    modules_to_save: list[str] = Field([])
    """Modules trained in full: names or regular expressions."""


class DebugModelConfig(BaseConfig):
    """Switches for debugging the model."""

    num_layers: int | None = None
    """Keep the first n layers only; None keeps all."""

    random_init: bool = False
    """Start from random weights."""


class ModelConfig(BaseModelConfig):
    """The trained model: its code, memory and parallelism."""

    seq_len: int = 2048
    """RL: longest sequence that is trained, in tokens. SFT takes `data.seq_len`."""

    attn: AttentionKernel = "flash_attention_2"
    """Attention kernel; `flash_attention_4` is another name of `fa4`."""

    compile: CompileConfig | None = None
    """Compile the model; None does not."""

    ac: ActivationCheckpointConfig | None = None
    """Activation checkpointing; None keeps all activations."""

    ac_offloading: ActivationOffloadingConfig | None = None
    """Activations in host memory; switches `ac` on. None keeps them on the GPU."""

    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""

    optim_cpu_offload: bool = False
    """Keep the optimizer state alone in host memory."""

    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass."""

    dp_replicate: int = 1
    """Copies of the sharded model (HSDP)."""

    ep: int = 1
    """Expert parallel size."""

    tp: int = 1
    """Tensor parallel size."""

    cp: int = 1
    """Context parallel size."""

    impl: Literal["hf", "custom", "auto"] = "auto"
    """Whose model code: Transformers' or our own; `auto` prefers our own."""

    optimization_dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of the master weights."""

    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Type in which gradients are summed over ranks."""

    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the forward and backward pass: `auto` is bfloat16 on CUDA, float32 on a CPU."""

    moe_use_grouped_mm: bool = True
    """Grouped matrix products for the experts of an MoE model."""

    freeze_moe_router: bool = False
    """Do not train the router of an MoE model."""

    lora: LoRAConfig | None = None
    """Train adapters; None trains all weights."""

    debug: DebugModelConfig = DebugModelConfig()
    """Switches for debugging."""

    fused_lm_head_chunk_size: Annotated[int, Field(ge=512)] | Literal["auto", "disabled"] = "auto"
    """Vocabulary entries in one chunk of the fused output layer; RL's `auto` is 8192, SFT's `disabled`."""


class TokenizerConfig(BaseConfig):
    """The tokenizer."""

    name: str | None = None
    """Tokenizer id or directory; None is the model's name."""

    trust_remote_code: bool | None = None
    """Run code that comes with the tokenizer; None is the model's choice."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's own."""


class ConstantSchedulerConfig(BaseConfig):
    """A constant learning rate."""

    type: Literal["constant"] = "constant"
    """Constant."""


class LinearSchedulerConfig(BaseConfig):
    """Linear warm-up, constant, linear decay."""

    type: Literal["linear"] = "linear"
    """Linear."""

    warmup_steps: int = Field(10, ge=0)
    """Steps of the warm-up."""

    decay_steps: int = Field(10, ge=0)
    """Steps of the decay at the end."""

    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end."""


class CosineSchedulerConfig(BaseConfig):
    """Linear warm-up, then a cosine down to the end."""

    type: Literal["cosine"] = "cosine"
    """Cosine."""

    warmup_steps: int = Field(10, ge=0)
    """Steps of the warm-up."""

    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end."""


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]


class BaseOptimizerConfig(BaseConfig):
    """What every optimizer has."""

    lr: float = Field(1e-6, ge=0)
    """Learning rate."""

    weight_decay: float = Field(0.01, ge=0)
    """Weight decay."""

    max_norm: float = Field(1.0, ge=0)
    """Largest norm of the gradient; a larger one is scaled down."""


class SGDConfig(BaseOptimizerConfig):
    """Stochastic gradient descent."""

    type: Literal["sgd"] = "sgd"
    """SGD."""

    nesterov: bool = True
    """Nesterov momentum."""

    momentum: float = 0.9
    """Momentum."""


class AdamWConfig(BaseOptimizerConfig):
    """AdamW."""

    type: Literal["adamw"] = "adamw"
    """AdamW."""

    betas1: float = Field(0.9, ge=0)
    """Decay of the first moment."""

    betas2: float = Field(0.999, ge=0)
    """Decay of the second moment."""


class MuonConfig(BaseOptimizerConfig):
    """Muon for matrices, AdamW for the rest."""

    type: Literal["muon"] = "muon"
    """Muon."""

    mu: float = Field(0.95, ge=0)
    """Momentum of Muon."""

    betas1: float = Field(0.9, ge=0)
    """AdamW's decay of the first moment."""

    betas2: float = Field(0.95, ge=0)
    """AdamW's decay of the second moment."""


OptimizerConfig = Annotated[SGDConfig | AdamWConfig | MuonConfig, Field(discriminator="type")]


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

    skip_progress: bool = False
    """SFT: continue without the saved progress."""

    skip_scheduler: bool = False
    """SFT: continue without the saved schedule."""

    skip_dataloader: bool = False
    """SFT: continue without the saved place in the data."""


class DefaultLossConfig(BaseConfig):
    """The RL loss: a clipped and masked policy gradient on importance ratios."""

    type: Literal["default"] = "default"
    """The built-in loss."""

    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio of a token, or of its whole sequence."""

    token_mask_high: float = Field(8.0, ge=0)
    """Leave out tokens whose ratio is above."""

    token_mask_low: float = Field(0.125, ge=0)
    """Leave out tokens whose ratio is below."""

    sequence_clip_high: float = Field(10.0, ge=0)
    """Largest ratio of a sequence; a larger one is cut to it."""

    geo_mask_high: float = Field(10.0, ge=0)
    """Leave out sequences whose geometric mean ratio is above."""

    geo_mask_low: float = Field(0.1, ge=0)
    """Leave out sequences whose geometric mean ratio is below."""

    sequence_mask_low: float = Field(0.0, ge=0)
    """Leave out sequences with any token's ratio below."""

    sequence_mask_high: float = Field(100.0, ge=0)
    """Leave out sequences with any token's ratio above."""

    adv_tau: float = Field(1.0, ge=0)
    """Weight of the advantage."""

    teacher_tau: float = Field(0.0, ge=0)
    """Weight of the teacher's log-probabilities."""

    kl_tau: float = Field(0.0, ge=0)
    """Weight of the KL term."""


class CustomLossConfig(BaseConfig):
    """A loss of your own."""

    type: Literal["custom"] = "custom"
    """Your own."""

    import_path: str
    """Dotted path of the function."""

    kwargs: dict[str, Any] = Field({})
    """Keyword arguments for it."""


LossConfig = Annotated[DefaultLossConfig | CustomLossConfig, Field(discriminator="type")]


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
    """Weights travel from GPU to GPU."""

    type: Literal["nccl"] = "nccl"
    """Through NCCL."""

    host: str = "localhost"
    """Host of the rendezvous."""

    port: int = 29501
    """Port of the rendezvous."""

    timeout: int = 1200
    """Limit in seconds."""

    inference_world_size: int = 1
    """Inference GPUs; the group has one more."""


WeightBroadcastConfig = Annotated[
    FileSystemWeightBroadcastConfig | NCCLWeightBroadcastConfig, Field(discriminator="type")
]


class BenchConfig(BaseConfig):
    """Benchmark mode: four steps, no checkpoints."""

    output_json: Path | None = None
    """Write the results to this file as well."""


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
    """Write a memory profile here."""

    bench: BenchConfig | None = None
    """Benchmark mode; None is off."""

    trace_path: Path | None = None
    """Write profiler traces to this directory; needs `max_steps` below 10."""

    dist_timeout_seconds: int = 600
    """Limit of a collective operation, in seconds."""

    heartbeat: HeartbeatConfig | None = None
    """Heartbeat; None is off."""

    metrics_server: MetricsServerConfig | None = None
    """Prometheus endpoint; None is off."""

    max_concurrent_runs: int = Field(1, ge=1)
    """LoRA runs trained side by side."""

    device: Device = "auto"
    """Where to run: `auto` takes GPUs when there are any."""

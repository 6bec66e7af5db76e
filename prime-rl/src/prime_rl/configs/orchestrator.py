"""The orchestrator: root of `orchestrator` and `[orchestrator]` of `rl`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from prime_rl.configs.root import RootConfig
from prime_rl.configs.shared import (
    BaseModelConfig,
    ClientConfig,
    FileSystemTransportConfig,
    HeartbeatConfig,
    LogConfig,
    PrimeMonitorConfig,
    TransportConfig,
    WandbWithExtrasConfig,
)
from prime_rl.utils.pydantic_config import BaseConfig


class LoRAConfig(BaseConfig):
    """The adapter of this run."""

    name: str | None = None
    """Name of the adapter; None is made from rank and alpha."""

    rank: int | None = Field(None, ge=1)
    """Rank; None is the trainer's."""

    alpha: float | None = Field(None, ge=0)
    """Alpha; None is the trainer's."""


class ModelConfig(BaseModelConfig):
    """A model, as the servers know it."""

    lora: LoRAConfig | None = None
    """The adapter of this run; None trains all weights."""


class OptimizerConfig(BaseConfig):
    """The optimizer of this run, when one trainer serves several."""

    lr: float = Field(1e-4, ge=0)
    """Learning rate."""


class TeacherModelConfig(BaseConfig):
    """A model whose log-probabilities guide the policy."""

    client: ClientConfig = ClientConfig()
    """How to reach the teacher's server."""

    model: ModelConfig = ModelConfig()
    """The teacher."""


class TemperatureSchedulerConfig(BaseConfig):
    """A temperature that changes over the run."""

    type: Literal["linear", "cosine"] = "linear"
    """Shape of the curve."""

    start_temperature: float = Field(ge=0)
    """At step 0."""

    end_temperature: float = Field(ge=0)
    """At the last step."""

    total_steps: int | None = Field(None, ge=1)
    """Length; None is `max_steps`."""


class SamplingConfig(BaseConfig):
    """How training rollouts are sampled. `top_p` is always 1, `top_k` -1 and `min_p` 0."""

    temperature: float | None = Field(None, ge=0)
    """Temperature; None is 1.0 without `temp_scheduler`."""

    temp_scheduler: TemperatureSchedulerConfig | None = None
    """A changing temperature; None keeps it constant."""

    repetition_penalty: float = Field(1.0, ge=0)
    """Penalty of repeated tokens; 1 is none."""

    max_tokens: int | None = None
    """Tokens of one turn; None leaves it to the server."""

    min_tokens: int = Field(0, ge=0)
    """Fewest tokens of one turn."""

    seed: int | None = None
    """Seed of the sampler; None leaves it to the server."""

    extra_body: dict[str, Any] = Field({})
    """More keys for the request."""


class EvalSamplingConfig(BaseConfig):
    """How eval rollouts are sampled. None leaves a value to the server."""

    temperature: float | None = Field(None, ge=0)
    """Temperature."""

    repetition_penalty: float | None = Field(None, ge=0)
    """Penalty of repeated tokens; 1 is none."""

    top_p: float | None = None
    """Sample from the smallest set of tokens with this probability."""

    top_k: int | None = None
    """Sample from the k likeliest tokens."""

    min_p: float | None = None
    """Leave out tokens below this fraction of the likeliest one's probability."""

    max_tokens: int | None = None
    """Tokens of one turn."""

    min_tokens: int | None = None
    """Fewest tokens of one turn."""

    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None
    """Reasoning effort."""

    seed: int | None = None
    """Seed of the sampler."""

    extra_body: dict[str, Any] = Field({})
    """More keys for the request."""


class EnvConfig(BaseConfig):
    """An environment of the verifiers library."""

    id: str = "reverse-text"
    """Id of the environment, with or without @version."""

    args: dict[str, Any] = Field({})
    """Arguments of its constructor."""

    name: str | None = None
    """Name in logs and metrics; None is the id."""

    address: str | None = None
    """A running environment server; None starts one."""

    extra_env_kwargs: dict[str, Any] = Field({})
    """Arguments that the system sets: `seq_len` and `score_rollouts` come from the orchestrator."""


class EvalEnvConfig(EnvConfig):
    """An environment to evaluate on."""

    num_examples: int | None = None
    """Examples; None or 0 is the value of `eval`."""

    rollouts_per_example: int | None = None
    """Rollouts of an example; None or 0 is the value of `eval`."""

    skip_first: int = 0
    """Examples to skip at the start."""

    max_retries: int = 0
    """Attempts after a failed rollout."""


class EvalConfig(BaseConfig):
    """Evaluation during training."""

    env: list[EvalEnvConfig] = Field([EvalEnvConfig()])
    """The environments."""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How rollouts are sampled."""

    num_examples: int = -1
    """Examples of an environment; -1 is all."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts of an example."""

    interval: int = Field(100, ge=1)
    """Steps between two evaluations."""

    eval_base_model: bool = True
    """Evaluate before the first step too."""

    skip_eval_on_resume: bool = Field(
        True, validation_alias=AliasChoices("skip_eval_on_resume", "skip_eval_on_restart")
    )
    """Do not evaluate right after a resume. Also written `skip_eval_on_restart`."""

    cancel_inflight_rollouts_on_eval: bool = False
    """Cancel training rollouts first."""


class EvalSaveHFConfig(BaseConfig):
    """Where evaluation results go on the Hugging Face hub. No key holds one."""

    dataset_name: str | None = None
    """Dataset."""

    dataset_subset: str | None = None
    """Subset."""

    dataset_split: str | None = None
    """Split."""

    private: bool = False
    """Make the dataset private."""


class ValConfig(BaseConfig):
    """Validation rollouts."""

    num_examples: int = Field(16, ge=1)
    """Examples."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts of an example."""

    interval: int = 10
    """Steps between two validations."""


class CheckpointConfig(BaseConfig):
    """Checkpoints of the orchestrator. A step stays if `keep_last` or `keep_interval` keeps it."""

    interval: int | None = Field(None, ge=1)
    """Steps between two; None saves at the end only."""

    resume_step: int | None = Field(None, ge=-1)
    """Step to continue from; -1 is the latest, None starts afresh."""

    wait_for_weights_timeout: int | None = Field(None, ge=1)
    """Seconds to wait for the weights of the step; None does not wait."""

    keep_last: int | None = Field(None, ge=1)
    """Keep the newest n; None sets no such limit."""

    keep_interval: int | None = Field(None, ge=1)
    """Keep multiples of n for ever; None sets no such rule."""

    skip_progress: bool = False
    """Continue without the saved progress."""

    skip_buffer: bool = False
    """Continue without the saved buffer."""


class BufferConfig(BaseConfig):
    """Which examples are rolled out next."""

    seed: int | None = None
    """Seed of the choice; None differs from run to run."""

    env_ratios: list[float] | None = None
    """Share of each environment, above 0; None follows their sizes."""

    easy_threshold: float | None = None
    """Mean reward from which an example is easy; None finds none easy."""

    hard_threshold: float | None = None
    """Mean reward up to which an example is hard; None finds none hard."""

    easy_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the easy examples taken back at the start."""

    hard_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the hard examples taken back at the start."""

    online_difficulty_filtering: bool = False
    """Drop groups whose rewards are all 0 or all 1."""

    hash_keys: list[str] = Field(["task", "prompt"], min_length=1)
    """Columns that tell examples apart."""

    skip_verification: bool = False
    """Do not score; every reward is 0."""


class DefaultAdvantageConfig(BaseConfig):
    """Reward less the mean of its group."""

    type: Literal["default"] = "default"
    """The built-in one."""

    length_weighted_mean: bool = False
    """Weight the mean by the lengths of the answers."""


class CustomAdvantageConfig(BaseConfig):
    """An advantage function of your own."""

    type: Literal["custom"] = "custom"
    """Your own."""

    import_path: str
    """Dotted path of the function."""

    kwargs: dict[str, Any] = Field({})
    """Keyword arguments for it."""


AdvantageConfig = Annotated[DefaultAdvantageConfig | CustomAdvantageConfig, Field(discriminator="type")]


class GibberishFilterConfig(BaseConfig):
    """Finds answers with a rare token that the policy itself found unlikely."""

    type: Literal["gibberish"] = "gibberish"
    """Gibberish."""

    enforce: bool = False
    """Leave such rollouts out of the loss instead of counting them."""

    token_id_threshold: int = 100000
    """Token ids above are rare."""

    logprob_offset: float = 2.0
    """A token is unlikely below -ln(vocabulary size) minus this."""


class RepetitionFilterConfig(BaseConfig):
    """Finds answers with a long run of tokens that the policy was sure of."""

    type: Literal["repetition"] = "repetition"
    """Repetition."""

    enforce: bool = False
    """Leave such rollouts out of the loss instead of counting them."""

    window: int = Field(3000, ge=1)
    """Length of the run in tokens."""

    prob_threshold: float = Field(0.99, gt=0, le=1)
    """Probability from which the policy is sure."""


FilterConfig = Annotated[GibberishFilterConfig | RepetitionFilterConfig, Field(discriminator="type")]


class FileSystemWeightBroadcastConfig(BaseConfig):
    """Weights travel as files in the output directory."""

    type: Literal["filesystem"] = "filesystem"
    """Through files."""


class NCCLWeightBroadcastConfig(BaseConfig):
    """Weights travel from GPU to GPU."""

    type: Literal["nccl"] = "nccl"
    """Through NCCL."""

    host: str = "localhost"
    """Host of the rendezvous."""

    port: int = 29501
    """Port of the rendezvous."""

    timeout: int = 1200
    """Limit in seconds."""


WeightBroadcastConfig = Annotated[
    FileSystemWeightBroadcastConfig | NCCLWeightBroadcastConfig, Field(discriminator="type")
]


class OrchestratorConfig(RootConfig):
    """The orchestrator. Read by `orchestrator`."""

    component: ClassVar[str] = "orchestrator"

    client: ClientConfig = ClientConfig()
    """How to reach the policy's servers."""

    model: ModelConfig = ModelConfig()
    """The policy."""

    optim: OptimizerConfig = OptimizerConfig()
    """The optimizer of this run, when one trainer serves several."""

    teacher_model: TeacherModelConfig | None = None
    """A teacher for log-probabilities; None is off."""

    sampling: SamplingConfig = SamplingConfig()
    """How training rollouts are sampled."""

    env: list[EnvConfig] = Field([EnvConfig()])
    """Training environments."""

    eval: EvalConfig | None = None
    """Evaluation during training; None is off."""

    buffer: BufferConfig = BufferConfig()
    """Which examples come next."""

    advantage: AdvantageConfig | None = DefaultAdvantageConfig()
    """The advantage function; None takes rewards as they are."""

    filters: list[FilterConfig] = Field([GibberishFilterConfig(), RepetitionFilterConfig()])
    """Rollout filters, each kind at most once."""

    log: LogConfig = LogConfig()
    """Logs."""

    wandb: WandbWithExtrasConfig | None = None
    """Weights & Biases; None is off."""

    prime_monitor: PrimeMonitorConfig | None = None
    """The platform's monitor; None is off."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints; None writes none."""

    val: ValConfig | None = None
    """Validation rollouts; None is off."""

    weight_broadcast: WeightBroadcastConfig = FileSystemWeightBroadcastConfig()
    """How weights reach the inference servers."""

    rollout_transport: TransportConfig = FileSystemTransportConfig()
    """How rollouts reach the trainer."""

    output_dir: Path = Path("outputs/run_default")
    """The orchestrator's directory."""

    max_concurrent: int | None = None
    """Rollouts running at once; None sets no limit."""

    tasks_per_minute: int | None = Field(None, ge=1)
    """Tasks started in a minute by each worker; None sets no limit."""

    batch_size: int | None = Field(None, ge=1)
    """Rollouts in a step; None is 128 without `token_batch_size`."""

    token_batch_size: int | None = Field(None, ge=1)
    """Tokens in a step, instead of `batch_size`."""

    oversampling_factor: float | None = Field(None, ge=1)
    """`max_inflight_rollouts` as a multiple of `batch_size`."""

    max_inflight_rollouts: int | None = Field(None, ge=1)
    """Rollouts in flight; None is `batch_size` times `oversampling_factor`."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts of one example: its group."""

    seq_len: int = 2048
    """Longest sample in tokens."""

    num_train_workers: int = Field(1, ge=1)
    """Data ranks of the trainer."""

    max_steps: int | None = None
    """Steps to train; None never ends."""

    max_off_policy_steps: int = Field(8, ge=0)
    """Policies that one rollout may span."""

    max_async_level: int = Field(1, ge=0)
    """Steps that rollouts may run ahead of the trainer."""

    strict_async_level: bool = False
    """Run exactly that many steps ahead, not at most."""

    bench: bool = False
    """Benchmark mode: four steps, no evaluation."""

    seed: int | None = 42
    """Seed of the process; None differs from run to run."""

    heartbeat: HeartbeatConfig | None = None
    """Heartbeat; None is off."""

    use_token_client: bool = True
    """Send and receive tokens instead of text."""

"""The orchestrator: root of `orchestrator` and `[orchestrator]` of `rl`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.advantages import (
    AdvantageConfig,
    CustomAdvantageConfig,
    DefaultAdvantageConfig,
    NormalizedAdvantageConfig,
    OverlongConfig,
)
from prime_rl.configs.rollouts import (
    EnvConfig,
    EvalConfig,
    EvalEnvConfig,
    EvalSamplingConfig,
    EvalSaveHFConfig,
    SamplingConfig,
    TemperatureSchedulerConfig,
    ValConfig,
)
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
from prime_rl.configs.surface.root import RootConfig
from prime_rl.utils.pydantic_config import BaseConfig, derive, raise_faults

__all__ = [
    "AdvantageConfig",
    "BufferConfig",
    "CheckpointConfig",
    "CustomAdvantageConfig",
    "DefaultAdvantageConfig",
    "EnvConfig",
    "EvalConfig",
    "EvalEnvConfig",
    "EvalSamplingConfig",
    "EvalSaveHFConfig",
    "FileSystemWeightBroadcastConfig",
    "FilterConfig",
    "GibberishFilterConfig",
    "LoRAConfig",
    "ModelConfig",
    "NCCLWeightBroadcastConfig",
    "NormalizedAdvantageConfig",
    "OptimizerConfig",
    "OrchestratorConfig",
    "OverlongConfig",
    "RepetitionFilterConfig",
    "SamplingConfig",
    "TeacherModelConfig",
    "TemperatureSchedulerConfig",
    "ValConfig",
    "WeightBroadcastConfig",
]

DEFAULT_BATCH_SIZE = 128
BENCH_STEPS = 4
BENCH_ASYNC_LEVEL = 1_000_000_000
"""In a benchmark nobody waits for the trainer."""


class LoRAConfig(BaseConfig):
    """The adapter of this run."""

    name: str | None = None
    """Name of the adapter; None is made from rank and alpha."""

    rank: int | None = Field(None, ge=1)
    """Rank; None is the trainer's."""

    alpha: float | None = Field(None, ge=0)
    """Alpha; None is the trainer's."""

    @property
    def adapter_name(self) -> str:
        """The name that requests ask for."""
        parts = [f"{letter}{value}" for letter, value in (("r", self.rank), ("a", self.alpha)) if value is not None]
        return self.name or "-".join(parts) or "adapter"


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
    """Mean reward of a group from which its example is easy and does not come again; None finds none easy."""

    hard_threshold: float | None = None
    """Mean reward of a group up to which its example is hard and does not come again; None finds none hard."""

    easy_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the easy examples that come again after a resume."""

    hard_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the hard examples that come again after a resume."""

    online_difficulty_filtering: bool = False
    """Drop groups whose rewards are all 0 or all 1."""

    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal, which teach nothing, and roll out others (DAPO's dynamic sampling)."""

    hash_keys: list[str] = Field(["task", "prompt"], min_length=1)
    """Columns that tell examples apart when a run resumes; `task` is the environment's name."""

    skip_verification: bool = False
    """Do not score; every reward is 0."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            yield f"easy_threshold ({easy}) must be above hard_threshold ({hard})"
        if any(ratio <= 0 for ratio in self.env_ratios or []):
            yield f"env_ratios must all be above 0 (got {self.env_ratios})"
        thresholds = [name for name in ("easy_threshold", "hard_threshold") if getattr(self, name) is not None]
        filters = ("online_difficulty_filtering", "drop_equal_rewards")
        needing_scores = [*thresholds, *(name for name in filters if getattr(self, name))]
        if self.skip_verification and needing_scores:
            yield f"skip_verification gives no rewards, and {', '.join(needing_scores)} need them"


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
    """Weights travel from the trainer's memory to the servers'. Needs `max_async_level` 1, and no adapters."""

    type: Literal["nccl"] = "nccl"
    """Through NCCL, from GPU to GPU; on a CPU through gloo."""

    host: str = "localhost"
    """Host of the rendezvous."""

    port: int = 29501
    """Port of the rendezvous."""

    timeout: int = Field(1200, ge=1)
    """Limit in seconds: for the servers to join, to ask for a version that is offered, and for its transfer."""


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

    env_servers: bool = False
    """Run each environment that has no `address` in a process of its own, for environments that compute for long."""

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

    seq_len: int = Field(2048, ge=1)
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

    save_rollouts: bool = False
    """Write all rollouts, to `samples/step_<s>.jsonl` and, of evaluations, `samples/eval_<version>.jsonl`."""

    use_token_client: bool = True
    """Send and receive tokens instead of text."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults([*self._faults(), *self._batching_faults(), *self._temperature_faults()])
        return self

    @model_validator(mode="after")
    def _derive_values(self) -> Self:
        if self.token_batch_size is None:
            batch_size = self._rollouts_per_step
            derive(self, batch_size=batch_size)
            if self.max_inflight_rollouts is None:
                derive(self, max_inflight_rollouts=int(batch_size * (self.oversampling_factor or 1.0)))
        if self.bench:
            derive(self, max_steps=BENCH_STEPS, max_async_level=BENCH_ASYNC_LEVEL, eval=None)
            for monitor in (self.wandb, self.prime_monitor):
                if monitor is not None:
                    derive(monitor, log_extras=None)
        set_by_us = {"seq_len": self.seq_len, "score_rollouts": not self.buffer.skip_verification}
        for env in self.env:
            derive(env, extra_env_kwargs=env.extra_env_kwargs | set_by_us)
        if self.sampling.temperature is None and self.sampling.temp_scheduler is None:
            derive(self.sampling, temperature=1.0)
        return self

    @property
    def _rollouts_per_step(self) -> int:
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    def _faults(self) -> Iterator[str]:
        kinds = [item.type for item in self.filters]
        if len(set(kinds)) < len(kinds):
            yield f"filters has a type more than once: {', '.join(kinds)}"
        if self.max_concurrent is not None and self.max_concurrent < self.rollouts_per_example:
            yield (
                f"max_concurrent ({self.max_concurrent}) is below rollouts_per_example ({self.rollouts_per_example}): "
                "no group could run"
            )
        if self.weight_broadcast.type == "nccl" and self.max_async_level != 1 and not self.bench:
            yield f"NCCL weight broadcast needs max_async_level = 1 (got {self.max_async_level})"
        if isinstance(self.advantage, NormalizedAdvantageConfig) and self.rollouts_per_example == 1:
            compared = {self.advantage.baseline, self.advantage.scale} & {"group", "leave_one_out"}
            if compared or self.buffer.drop_equal_rewards:
                yield "rollouts_per_example is 1: with nothing to compare it to in its group, no rollout would teach"
        ratios = self.buffer.env_ratios
        if ratios is not None and len(ratios) != len(self.env):
            yield f"buffer.env_ratios has {len(ratios)} entries for {len(self.env)} environments"

    def _batching_faults(self) -> Iterator[str]:
        inflight, factor, group = self.max_inflight_rollouts, self.oversampling_factor, self.rollouts_per_example
        if self.token_batch_size is not None:
            if self.batch_size is not None:
                yield "batch_size and token_batch_size exclude each other: remove one"
            if factor is not None:
                yield "oversampling_factor needs batch_size: with token_batch_size, set max_inflight_rollouts"
            if inflight is None:
                yield "token_batch_size needs max_inflight_rollouts"
        else:
            batch_size = self._rollouts_per_step
            expected = int(batch_size * (factor or 1.0))
            if batch_size % group != 0:
                yield f"batch_size ({batch_size}) is not a multiple of rollouts_per_example ({group})"
            if inflight is not None and factor is not None and inflight != expected:
                yield (
                    f"max_inflight_rollouts ({inflight}) is not batch_size * oversampling_factor "
                    f"({batch_size} * {factor} = {expected}): remove one"
                )
            inflight = expected if inflight is None else inflight
        if inflight is not None and inflight < group:
            yield f"max_inflight_rollouts ({inflight}) is below rollouts_per_example ({group})"

    def _temperature_faults(self) -> Iterator[str]:
        schedule = self.sampling.temp_scheduler
        if schedule is None:
            return
        if self.sampling.temperature is not None:
            yield "sampling.temperature and sampling.temp_scheduler exclude each other: remove one"
        if schedule.total_steps is None and self.max_steps is None and not self.bench:
            yield "sampling.temp_scheduler needs its total_steps, or max_steps"

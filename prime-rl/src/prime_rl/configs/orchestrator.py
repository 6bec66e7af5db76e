"""The orchestrator: root of `orchestrator` and `[orchestrator]` of `rl`."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.algorithms import (
    AdvantageConfig,
    CustomAdvantageConfig,
    DefaultAdvantageConfig,
    NormalizedAdvantageConfig,
    OverlongConfig,
)
from prime_rl.configs.distillation import MAX_TOP_K
from prime_rl.configs.model import ImageLimitsConfig
from prime_rl.configs.ranges import (
    LARGEST,
    Count,
    Fraction,
    LearningRate,
    Port,
    Processes,
    ResumeStep,
    Seconds,
    Seed,
    TransferSeconds,
    WholeNumber,
)
from prime_rl.configs.rollouts.environments import (
    EnvConfig,
    EvalConfig,
    EvalEnvConfig,
    EvalSaveHFConfig,
    ValConfig,
    has_own_order,
    repeated_names,
)
from prime_rl.configs.rollouts.judges import Judges, judge_faults
from prime_rl.configs.rollouts.sampling import (
    EvalSamplingConfig,
    SamplingConfig,
    TemperatureSchedulerConfig,
    training_warnings,
)
from prime_rl.configs.shared import (
    BaseModelConfig,
    ClientConfig,
    EarlyStopConfig,
    FileSystemTransportConfig,
    HeartbeatConfig,
    LogConfig,
    MetricsServerConfig,
    MonitorConfig,
    PrimeMonitorConfig,
    TransportConfig,
    WandbWithExtrasConfig,
)
from prime_rl.configs.surface.root import RootConfig
from prime_rl.utils.images import ImageLimits
from prime_rl.utils.pydantic_config import BaseConfig, ConfigWarning, derive, raise_faults

# Which examples are rolled out.


class BufferConfig(BaseConfig):
    """Chooses the examples to roll out."""

    seed: Seed | None = None
    """Seed of the choice. None is different in every run."""

    order: Literal["random", "sequential"] = "random"
    """`random` draws rows with replacement. `sequential` takes the rows of each environment in their order, and begins
    again after the last one: a curriculum. The environment `rows` sets it if it mixes datasets or has an `order`."""

    env_ratios: list[Annotated[float, Field(gt=0)]] | None = None
    """Share of each environment, above 0. None is proportional to their sizes."""

    easy_threshold: float | None = None
    """Examples whose group has at least this mean reward are easy and are not sampled again. None disables the rule."""

    hard_threshold: float | None = None
    """Examples whose group has at most this mean reward are hard and are not sampled again. None disables the rule."""

    easy_fraction: Fraction = 0.0
    """Share of the easy examples that a resume returns to the pool."""

    hard_fraction: Fraction = 0.0
    """Share of the hard examples that a resume returns to the pool."""

    online_difficulty_filtering: bool = False
    """Drop groups whose rewards are all 0 or all 1."""

    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal, and roll out others instead (DAPO's dynamic sampling)."""

    hash_keys: list[str] = Field(["task", "prompt"], min_length=1)
    """Columns that identify an example when a run resumes. `task` is the environment's name."""

    skip_verification: bool = False
    """Do not score rollouts; every reward is 0."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            yield f"easy_threshold ({easy}) must be above hard_threshold ({hard})"
        thresholds = [name for name in ("easy_threshold", "hard_threshold") if getattr(self, name) is not None]
        filters = ("online_difficulty_filtering", "drop_equal_rewards")
        needing_scores = [*thresholds, *(name for name in filters if getattr(self, name))]
        if self.skip_verification and needing_scores:
            yield f"skip_verification gives no rewards, and {', '.join(needing_scores)} need them"


# Filters of finished rollouts.


class GibberishFilterConfig(BaseConfig):
    """Detects answers with a rare token that the policy itself considered unlikely."""

    type: Literal["gibberish"] = "gibberish"
    """Gibberish."""

    enforce: bool = False
    """Exclude such rollouts from the loss. False only counts them."""

    token_id_threshold: WholeNumber = 100000
    """Token ids above this are rare."""

    logprob_offset: float = 2.0
    """A token is unlikely if its log-probability is below -ln(vocabulary size) minus this."""


class RepetitionFilterConfig(BaseConfig):
    """Detects answers with a long series of tokens that the policy was certain of."""

    type: Literal["repetition"] = "repetition"
    """Repetition."""

    enforce: bool = False
    """Exclude such rollouts from the loss. False only counts them."""

    window: Count = 3000
    """Length of the series in tokens."""

    prob_threshold: float = Field(0.99, gt=0, le=1)
    """The policy is certain of a token above this probability."""


FilterConfig = Annotated[GibberishFilterConfig | RepetitionFilterConfig, Field(discriminator="type")]

# Which rollouts stay on disk.


class KeepRolloutsConfig(BaseConfig):
    """Rollouts that stay on disk in `RUN/samples`: some of each step, and all of the evaluations."""

    per_step: Count = 32
    """Rollouts of each step, in whole groups: one at random, the worst, the best, and more at random. One group is kept
    even if it is larger."""

    max_total_mib: Count = 1024
    """Size of all kept files in MiB. Beyond it steps between the first and the newest are deleted, evenly. Pictures of
    their images (`OUT/pictures`) are not counted: at most 10,000, of 5 to 30 kB each."""

    max_chars: Annotated[int, Field(ge=1000, le=LARGEST)] = 200_000
    """Characters of the messages of a rollout. Longer messages are cut in their middle."""

    max_tokens: Count = 32_768
    """Tokens of a rollout whose ids, log-probabilities and texts are kept."""


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
OF_ALL = ("batch", "none")
"""Baselines that are the same for all groups of a batch."""
INHERITED_SAMPLING = frozenset({"max_tokens", "min_tokens", "repetition_penalty", "extra_body"})
"""Keys of `sampling` that `eval.sampling` inherits. It does not inherit the temperature, which is for exploration."""
BENCH_STEPS = 4
BENCH_ASYNC_LEVEL = 1_000_000_000
"""Benchmarks do not wait for the trainer."""


class LoRAConfig(BaseConfig):
    """The adapter of this run."""

    name: str | None = None
    """Name of the adapter. None makes one from rank and alpha."""

    rank: Count | None = None
    """Rank. None takes the trainer's."""

    alpha: float | None = Field(None, ge=0)
    """Alpha. None takes the trainer's."""

    @property
    def adapter_name(self) -> str:
        """The model name in requests for the adapter."""
        parts = [f"{letter}{value}" for letter, value in (("r", self.rank), ("a", self.alpha)) if value is not None]
        return self.name or "-".join(parts) or "adapter"


class ModelConfig(BaseModelConfig):
    """A model, under the name that the servers use."""

    lora: LoRAConfig | None = None
    """The adapter of this run. None trains all weights."""

    chat_template: str | None = None
    """Chat template of the servers, to check tools with: Jinja text, a path, or `chatml`. None is the model's."""

    vision: ImageLimitsConfig | None = None
    """Limits of the images that environments show the policy. `rl` takes the trainer's. None refuses images."""

    @property
    def image_limits(self) -> ImageLimits | None:
        return None if self.vision is None else self.vision.limits


class OptimizerConfig(BaseConfig):
    """The optimizer of this run, if one trainer serves several runs."""

    lr: LearningRate = 1e-4
    """Learning rate."""


class TeacherModelConfig(BaseConfig):
    """A teacher: a model whose log-probabilities of the sampled tokens guide the policy."""

    client: ClientConfig = ClientConfig()
    """How to reach the teacher's servers, which take turns. `rl` sets it if it starts one."""

    model: ModelConfig = ModelConfig()
    """The teacher. `rl` sets its name if it starts the server."""

    tokenizer: str | None = Field(None, min_length=1)
    """The teacher's tokenizer, if it is not the policy's: a folder or a hub id. The teacher then reads the text of each
    answer in its own tokens, and stretches of the same text are compared. None: the policy's tokenizer."""

    top_k: int | None = Field(None, ge=1, le=MAX_TOP_K)
    """Number of the likeliest tokens to ask for at each trained place. `rl` sets it to `trainer.distillation.top_k`.
    None asks only for the log-probability of the sampled token."""

    weight: float = Field(1.0, gt=0)
    """Weight among the teachers that score the same sample; the weights are divided by their sum."""

    envs: list[str] | None = Field(None, min_length=1)
    """Names of the training environments whose samples it scores. None: all."""

    hint: str | None = Field(None, min_length=1)
    """What the teacher reads at the end of the last user message, and the policy does not: `The answer is {answer}.`,
    with the row's columns in braces. None: the policy's own prompt."""

    is_policy: bool = False
    """Score with the policy's servers, with the weights that they hold at the time, instead of `client` and `model`."""

    def scores(self, env: str) -> bool:
        """Whether it scores the samples of a training environment."""
        return self.envs is None or env in self.envs


class CheckpointConfig(BaseConfig):
    """Checkpoints of the orchestrator. Every checkpoint of the trainer has a matching one, which is kept as long as it.
    `interval`, `keep_last` and `keep_interval` keep more of them."""

    interval: Count | None = None
    """Steps between two checkpoints. None keeps only those that match the trainer's, and the last one."""

    resume_step: ResumeStep | None = None
    """Step to continue from; `--resume` is short for it. `latest` (or -1) is the newest that all parts of the run have
    whole. `auto` (or -2) is that too, but starts a new run if there is none. None starts a new run."""

    wait_for_weights_timeout: Seconds | None = None
    """Seconds to wait for the weights of the step to resume from. None does not wait. `rl` sets 600 for a run that
    resumes, because its trainer starts at the same time."""

    keep_last: Count | None = None
    """Number of newest checkpoints of `interval` to keep. With neither this nor `keep_interval`, all are kept."""

    keep_interval: Count | None = None
    """Keep every checkpoint of `interval` whose step is a multiple of n. None disables the rule."""

    keep_best: bool = False
    """Record the saved step with the best evaluation in `checkpoints/best.json`, for the trainer to keep it. Each
    evaluation then waits until the servers have the weights of its step."""

    skip_progress: bool = False
    """Count tokens, samples and problems from 0 again. The step, and the evaluations of `early_stop` and `keep_best`,
    stay."""

    skip_buffer: bool = False
    """Continue without the saved buffer."""


class FileSystemWeightBroadcastConfig(BaseConfig):
    """Sends weights as files in the output directory."""

    type: Literal["filesystem"] = "filesystem"
    """Files."""


class NCCLWeightBroadcastConfig(BaseConfig):
    """Sends weights from the trainer's memory to the servers'. Needs `max_async_level = 1` and no LoRA."""

    type: Literal["nccl"] = "nccl"
    """NCCL from GPU to GPU, or gloo on a CPU."""

    host: str = "localhost"
    """Host of the rendezvous."""

    port: Port = 29501
    """Port of the rendezvous."""

    timeout: TransferSeconds = 1200
    """Timeout in seconds: for the servers to join, to ask for an offered version, and for its transfer."""


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
    """The optimizer of this run, if one trainer serves several runs."""

    teacher_model: TeacherModelConfig | None = None
    """A teacher. None disables it."""

    teachers: list[TeacherModelConfig] = Field([])
    """More teachers, at servers that run already, or the policy itself. The loss is the weighted mean of the losses of
    all that score a sample."""

    sampling: SamplingConfig = SamplingConfig()
    """How training rollouts are sampled."""

    env: list[EnvConfig] = Field([EnvConfig()])
    """Training environments."""

    env_servers: bool = False
    """Run each environment without an `address` in its own process. Code that does not await then blocks only its own
    environment; `env[].num_workers` starts several processes for it."""

    judge: Judges = Field({})
    """Judges, by name: `[judge.NAME]`. Environments name theirs in `env[].judge`."""

    eval: EvalConfig | None = None
    """Evaluation during training. None disables it."""

    early_stop: EarlyStopConfig | None = None
    """Rules that end the run before `max_steps`. None disables it."""

    buffer: BufferConfig = BufferConfig()
    """Chooses the examples to roll out."""

    advantage: AdvantageConfig | None = DefaultAdvantageConfig()
    """The advantage function. None uses the rewards themselves."""

    filters: list[FilterConfig] = Field([GibberishFilterConfig(), RepetitionFilterConfig()])
    """Rollout filters, each kind at most once."""

    log: LogConfig = LogConfig()
    """Logs."""

    wandb: WandbWithExtrasConfig | None = None
    """Weights & Biases. None disables it."""

    metrics_server: MetricsServerConfig | None = None
    """Prometheus metrics over HTTP. None serves none."""

    monitor: MonitorConfig = MonitorConfig()
    """TensorBoard, Trackio, SwanLab and MLflow."""

    prime_monitor: PrimeMonitorConfig | None = None
    """The platform's monitor. None disables it."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints. None writes none."""

    val: ValConfig | None = None
    """Validation rollouts. None disables them."""

    weight_broadcast: WeightBroadcastConfig = FileSystemWeightBroadcastConfig()
    """How weights reach the inference servers."""

    rollout_transport: TransportConfig = FileSystemTransportConfig()
    """How rollouts reach the trainer."""

    trainer_timeout: Seconds = 86400
    """Seconds to wait for the trainer's next policy version."""

    await_first_version: bool = False
    """Whether the trainer publishes policy version 0, because it starts from an adapter. `rl` sets it."""

    output_dir: Path = Path("outputs/run_default")
    """The orchestrator's directory."""

    max_concurrent: Count | None = None
    """Maximum number of rollouts running at once. None sets no limit."""

    tasks_per_minute: Count | None = None
    """Maximum number of groups started per minute. None sets no limit."""

    batch_size: Count | None = None
    """Rollouts per step. None is 128, unless `token_batch_size` is set."""

    token_batch_size: Count | None = None
    """Tokens per step, instead of `batch_size`."""

    oversampling_factor: float | None = Field(None, ge=1, le=1000)
    """`max_inflight_rollouts` as a multiple of `batch_size`."""

    max_inflight_rollouts: Count | None = None
    """Maximum number of rollouts in flight. None is `batch_size * oversampling_factor`."""

    rollouts_per_example: Count = 1
    """Rollouts per example, which form a group."""

    seq_len: Count = 2048
    """Maximum length of a sample, in tokens."""

    max_model_len: Count | None = None
    """Longest prompt with its answer that the servers take, in tokens, for warnings. `rl` fills it in."""

    num_train_workers: Processes = 1
    """Trainer processes that share the batch of a step; `rl` fills it in. A `batch_size` below it gets a warning."""

    max_steps: WholeNumber | None = None
    """Number of steps. None trains until it is stopped."""

    max_off_policy_steps: WholeNumber = 8
    """A group of rollouts is cancelled after more than this number of weight updates. Its example is rolled out again;
    after the third time it is given up."""

    max_async_level: WholeNumber = 1
    """Maximum number of steps that rollouts run ahead of the trainer: the batch of step s is collected once the servers
    hold version s - `max_async_level`. Its rollouts may have started with older versions, unless `bound_lag` is set or
    this is 0, which is synchronous."""

    bound_lag: bool = False
    """Train each rollout at most `max_async_level` steps after the version that sampled its first token. Fewer rollouts
    run ahead, and batches wait for slow ones. Needs `batch_size`."""

    strict_async_level: bool = False
    """Run exactly `max_async_level` steps ahead, not at most."""

    servers_sleep: bool = False
    """Let the servers free the GPU's memory from a finished batch until the next weights. Needs
    `inference.enable_sleep_mode`, for which `rl` fills it in, and `max_async_level = 0`."""

    bench: bool = False
    """Benchmark mode: four steps, no evaluation."""

    seed: Seed | None = 42
    """Seed of the process. None is different in every run."""

    heartbeat: HeartbeatConfig | None = None
    """Heartbeat. None disables it."""

    keep_rollouts: KeepRolloutsConfig | None = KeepRolloutsConfig()
    """Which rollouts stay in `samples/`. None keeps none."""

    save_rollouts: bool = False
    """Keep all rollouts, whatever `keep_rollouts` says: whole, and without a limit on their size."""

    use_token_client: bool = True
    """Send later turns as the sampled token ids instead of text."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults([*self._faults(), *self._teacher_faults(), *self._batching_faults(), *self._temperature_faults()])
        for text in (*training_warnings(self.sampling), *self._advantage_warnings(), *self._filter_warnings()):
            warnings.warn(text, ConfigWarning, stacklevel=2)
        return self

    @property
    def all_teachers(self) -> dict[str, TeacherModelConfig]:
        """Every teacher by its key."""
        first = {} if self.teacher_model is None else {"teacher_model": self.teacher_model}
        return {**first, **{f"teachers.{number}": each for number, each in enumerate(self.teachers)}}

    def _teacher_faults(self) -> Iterator[str]:
        teachers, names = self.all_teachers, [env.name or env.id for env in self.env]
        for key, teacher in teachers.items():
            for name in teacher.envs or ():
                if name not in names:
                    yield f"{key}.envs: {name!r} is none of the training environments ({', '.join(names)})"
            if teacher.is_policy and self.model.lora is not None:
                yield f"{key}.is_policy: a policy with LoRA adapters cannot be its own teacher; name a server"
            if (self.client if teacher.is_policy else teacher.client).is_elastic:
                yield f"{key}: a teacher's servers cannot be elastic; name them in client.base_url"
            for env in self.env if teacher.hint or teacher.tokenizer else ():
                if env.is_agent and teacher.scores(env.name or env.id):
                    own = "hint" if teacher.hint else "tokenizer"
                    yield (
                        f"{key}.{own}: agents and workflows have several conversations, and the teacher reads one; "
                        f"leave {env.name or env.id!r} out of {key}.envs"
                    )
            if teacher.tokenizer and teacher.is_policy:
                yield f"{key}.tokenizer: the policy has its own tokenizer; remove it"
            if teacher.tokenizer and teacher.top_k is not None:
                yield (
                    f"{key}.tokenizer: trainer.distillation compares probabilities of the same tokens, which two "
                    "tokenizers do not have; remove it, and set trainer.loss.teacher_tau"
                )
            if teacher.is_policy and teacher.hint is None:
                yield f"{key}.is_policy: without a hint, the policy has nothing to teach itself; set {key}.hint"
        if teachers and len({teacher.top_k for teacher in teachers.values()}) > 1:
            yield "all teachers need the same top_k: set trainer.distillation.top_k"
        for name in names if teachers else ():
            if not any(teacher.scores(name) for teacher in teachers.values()):
                yield f"no teacher scores the environment {name!r}: add it to the envs of one"

    @model_validator(mode="after")
    def _derive_values(self) -> Self:
        if self.token_batch_size is None:
            batch_size = self._rollouts_per_step
            derive(self, "neither batch_size nor token_batch_size is set", batch_size=batch_size)
            if self.max_inflight_rollouts is None:
                in_flight = int(batch_size * (self.oversampling_factor or 1.0))
                derive(self, "batch_size times oversampling_factor", max_inflight_rollouts=in_flight)
        if self.bench:
            derive(self, "bench", max_steps=BENCH_STEPS, max_async_level=BENCH_ASYNC_LEVEL, eval=None)
            derive(self, "bench", early_stop=None)
            for monitor in filter(None, (self.wandb, self.prime_monitor)):
                derive(monitor, "bench", log_extras=None)
        set_by_us = {"seq_len": self.seq_len, "score_rollouts": not self.buffer.skip_verification}
        for env in self.env:
            derive(env, "seq_len and buffer.skip_verification", extra_env_kwargs=env.extra_env_kwargs | set_by_us)
        if "order" not in self.buffer.model_fields_set and any(map(has_own_order, self.env)):
            derive(self.buffer, "an environment `rows` mixes datasets or follows an order", order="sequential")
        if self.eval is not None:
            own = self.eval.sampling.model_fields_set
            # Only keys that the user chose: the defaults of training are not those of a server.
            shared = INHERITED_SAMPLING & self.sampling.model_fields_set - own
            derive(self.eval.sampling, "as in training", **{key: getattr(self.sampling, key) for key in shared})
        if self.sampling.temperature is None and self.sampling.temp_scheduler is None:
            derive(self.sampling, "neither temperature nor temp_scheduler is set", temperature=1.0)
        return self

    @property
    def compares_single_rollouts(self) -> bool:
        """Whether the default advantage subtracts the mean of groups of one rollout from its reward."""
        is_default = isinstance(self.advantage, DefaultAdvantageConfig)
        # Agents may give a reward for each call, which are compared with each other.
        return is_default and self.rollouts_per_example == 1 and not any(env.is_agent for env in self.env)

    @property
    def _rollouts_per_step(self) -> int:
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    @property
    def _compares_in_groups(self) -> bool:
        config = self.advantage
        within = {"group", "leave_one_out"}
        return isinstance(config, NormalizedAdvantageConfig) and not within.isdisjoint((config.baseline, config.scale))

    @property
    def _drops_every_single(self) -> bool:
        """Whether a group of one rollout is dropped because its rewards are equal. The calls of an agent may differ."""
        return self.buffer.drop_equal_rewards and not any(env.is_agent for env in self.env)

    def _faults(self) -> Iterator[str]:
        kinds = [item.type for item in self.filters]
        if len(set(kinds)) < len(kinds):
            yield f"filters has a type more than once: {', '.join(kinds)}"
        most, group = self.max_concurrent, self.rollouts_per_example
        if most is not None and most < group:
            yield f"max_concurrent ({most}) is below rollouts_per_example ({group}): no group could run"
        if self.weight_broadcast.type == "nccl" and self.max_async_level != 1 and not self.bench:
            yield f"NCCL weight broadcast needs max_async_level = 1 (got {self.max_async_level})"
        if self.servers_sleep and (self.max_async_level or self.bench):
            found = "bench = true" if self.bench else self.max_async_level
            yield (
                f"inference.enable_sleep_mode needs max_async_level = 0 (got {found}): a sleeping server cannot "
                "generate"
            )
        if self.weight_broadcast.type == "nccl" and self.client.is_elastic:
            yield "client.elastic needs weight_broadcast.type = 'filesystem': an NCCL group cannot change its members"
        if self.rollouts_per_example == 1 and self._compares_in_groups:
            yield (
                "rollouts_per_example is 1: a rollout alone in its group has advantage 0, so nothing would be learned; "
                "set 2 or more"
            )
        elif self.rollouts_per_example == 1 and self._drops_every_single:
            yield "rollouts_per_example is 1, and buffer.drop_equal_rewards drops every group of one rollout: raise it"
        yield from repeated_names("env", self.env)
        yield from repeated_names("eval.env", [] if self.eval is None else self.eval.env)
        if self.buffer.skip_verification and (scored := [env.name or env.id for env in self.env if env.is_agent]):
            yield (
                f"buffer.skip_verification cannot be used with workflow: the agent of {scored[0]!r} gives its own "
                "reward"
            )
        yield from self._best_faults()
        yield from judge_faults("env", self.env, self.judge)
        yield from judge_faults("eval.env", [] if self.eval is None else self.eval.env, self.judge)
        if (ratios := self.buffer.env_ratios) is not None and len(ratios) != len(self.env):
            yield f"buffer.env_ratios has {len(ratios)} entries for {len(self.env)} environments"

    def _best_faults(self) -> Iterator[str]:
        """Rules of `ckpt.keep_best` and `early_stop`."""
        rules, ckpt, evaluation = self.early_stop, self.ckpt, self.eval
        if rules is not None and rules.compares_evaluations and evaluation is None:
            yield "early_stop.patience and early_stop.target need [eval]: they compare evaluations"
        if evaluation is not None and evaluation.metric is not None:
            yield from evaluation.metric_faults()
        if ckpt is None or not ckpt.keep_best:
            return
        if evaluation is None:
            yield "ckpt.keep_best needs [eval]: the best step is the one with the best evaluation"
        elif ckpt.interval is None:
            yield "ckpt.keep_best needs ckpt.interval: only versions that are saved can be kept"
        elif evaluation.interval % ckpt.interval != 0:
            yield (
                f"ckpt.keep_best: eval.interval ({evaluation.interval}) is not a multiple of ckpt.interval "
                f"({ckpt.interval}): versions would be evaluated that are not saved"
            )

    def _advantage_warnings(self) -> Iterator[str]:
        config = self.advantage
        if isinstance(config, NormalizedAdvantageConfig) and config.scale == "group" and config.baseline in OF_ALL:
            yield (
                f"orchestrator.advantage: scale = 'group' with baseline = {config.baseline!r} makes large advantages "
                "of groups whose rewards are almost equal; use baseline = 'group', or scale = 'batch'"
            )

    def _filter_warnings(self) -> Iterator[str]:
        if self.rollouts_per_example == 1 and self.buffer.online_difficulty_filtering:
            yield (
                "rollouts_per_example is 1, and buffer.online_difficulty_filtering drops every rollout with reward 0 "
                "or 1: if rewards have no other values, no batch is ever full; remove it, or set 2 or more"
            )

    def _batching_faults(self) -> Iterator[str]:
        inflight, factor, group = self.max_inflight_rollouts, self.oversampling_factor, self.rollouts_per_example
        if self.token_batch_size is not None:
            if self.batch_size is not None:
                yield "batch_size and token_batch_size exclude each other: remove one"
            if factor is not None:
                yield "oversampling_factor needs batch_size: with token_batch_size, set max_inflight_rollouts"
            if self.bound_lag:
                yield "bound_lag needs batch_size, since it counts groups: remove token_batch_size or bound_lag"
            if inflight is None:
                yield "token_batch_size needs max_inflight_rollouts"
        else:
            batch_size = self._rollouts_per_step
            expected = int(batch_size * (factor or 1.0))
            if batch_size % group != 0:
                yield f"batch_size ({batch_size}) is not a multiple of rollouts_per_example ({group})"
            if inflight is not None and factor is not None and inflight != expected:
                wanted = f"batch_size * oversampling_factor ({batch_size} * {factor} = {expected})"
                yield f"max_inflight_rollouts ({inflight}) is not {wanted}: remove one"
            inflight = expected if inflight is None else inflight
        if inflight is not None and inflight > LARGEST:
            yield f"batch_size * oversampling_factor ({inflight}) is above {LARGEST:_}"
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

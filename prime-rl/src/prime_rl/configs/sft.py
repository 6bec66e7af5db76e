"""Supervised fine-tuning: root of `sft`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.areal import LaunchedConfig
from prime_rl.configs.data import (
    NOT_SET,
    DataConfig,
    FakeDataConfig,
    SFTDataConfig,
    Split,
    TokenLoss,
    batch_fault,
    stack_fault,
)
from prime_rl.configs.distillation import SFTDistillationConfig
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.model import division_fault, product_of
from prime_rl.configs.ranges import (
    LARGEST,
    Count,
    CountOrAll,
    Gpus,
    NetworkInterfaces,
    Nodes,
    Seconds,
    WholeNumber,
)
from prime_rl.configs.rollouts.environments import EvalEnvConfig, repeated_names
from prime_rl.configs.rollouts.judges import Judges, judge_faults, started_judges
from prime_rl.configs.rollouts.sampling import EvalSamplingConfig
from prime_rl.configs.shared import (
    BaseModelConfig,
    Device,
    EarlyStopConfig,
    FileAccess,
    HeartbeatConfig,
    LogConfig,
    MonitorConfig,
    SlurmConfig,
    StallConfig,
    TraceConfig,
    WandbConfig,
)
from prime_rl.configs.trainer import (
    BENCH_STEPS,
    AdamWConfig,
    BenchConfig,
    CheckpointConfig,
    ConstantSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    fill_tokenizer,
    training_faults,
)
from prime_rl.utils.pydantic_config import BaseConfig, derive, raise_faults
from prime_rl.utils.pydantic_config.base import Derivation, note_derivation


class SFTEvalConfig(BaseConfig):
    """Evaluation during SFT. A separate inference server loads the exported weights, while training goes on."""

    env: list[EvalEnvConfig] = Field([])
    """The environments."""

    judge: Judges = Field({})
    """Judges, by name: `[eval.judge.NAME]`. Environments name theirs in `env[].judge`."""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How rollouts are sampled."""

    num_examples: CountOrAll = -1
    """Examples per environment. -1 is all of them."""

    rollouts_per_example: Count = 1
    """Rollouts per example."""

    interval: Count = 100
    """Steps between two evaluations. The last step is always evaluated. Weights that are exported for this alone are
    deleted once they are evaluated."""

    eval_base_model: bool = True
    """Also evaluate the model before the first step."""

    max_concurrent: Count | None = 128
    """Maximum number of rollouts at once, over all environments. None sets no limit."""


TRAINED_VALIDATION = (
    "[val] names no other rows, so the validation loss is that of training rows: set val.fraction or val.size to hold "
    "some out, or val.data.name"
)


class ValConfig(BaseConfig):
    """Validation during training: the loss on other rows, each counted once."""

    interval: Count = 50
    """Steps between two validations. The last step is always validated."""

    on_start: bool = False
    """Also validate before the first step."""

    size: Count | None = None
    """Rows of `data` to hold out for validation, instead of another dataset; at most so many, since rows with the same
    prompt stay on one side. None holds out none, or `fraction`."""

    fraction: float | None = Field(None, gt=0, lt=1)
    """Share of the rows of `data` to hold out for validation, instead of another dataset. Seed and prompt decide for
    each row, so that rows which are added later move no other. None holds out none, or `size`."""

    data: SFTDataConfig = SFTDataConfig()
    """The dataset. Unset keys take the values of `data`, but `columns` is taken whole. Rows are always packed with
    `best_fit`."""

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        self.data.name_section("val.data")
        if self.data.streaming:
            raise ValueError("data.streaming = true: validation reads all of its rows at the start")
        if self.size is not None and self.fraction is not None:
            raise ValueError(f"size ({self.size}) and fraction ({self.fraction:g}) are both set: give one")
        return self

    @property
    def is_split(self) -> bool:
        """Whether rows of the training data are held out."""
        return self.size is not None or self.fraction is not None


class BaseDeploymentConfig(BaseConfig):
    """Where SFT runs."""

    gpus_per_node: Gpus = 8
    """GPUs of a node."""


class SingleNodeDeploymentConfig(BaseDeploymentConfig):
    """One node."""

    type: Literal["single_node"] = "single_node"
    """One node."""

    num_gpus: Gpus = 1
    """Number of processes, one per GPU."""

    num_infer_gpus: Gpus = 1
    """Number of GPUs of the inference server of `[eval]`, besides those that train. Without `[eval]` there is none."""

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.num_gpus > self.gpus_per_node:
            raise ValueError(f"num_gpus ({self.num_gpus}) is above gpus_per_node ({self.gpus_per_node})")
        return self


class MultiNodeDeploymentConfig(BaseDeploymentConfig):
    """Several nodes."""

    type: Literal["multi_node"] = "multi_node"
    """Several nodes."""

    num_nodes: Nodes = 2
    """Number of nodes."""

    num_infer_gpus: Gpus = 1
    """Number of GPUs of each node, of its `gpus_per_node`, that an inference server of `[eval]` uses. The others train.
    Without `[eval]` all train."""

    nodes_per_fsdp_group: Nodes | None = None
    """Number of nodes that share one copy of the model. None shares it among all nodes."""

    network_interface: NetworkInterfaces | None = None
    """Network interface through which the nodes reach each other, such as `eth1`: for all addresses of the run, gloo
    and NCCL. With several names, as in `ib0,eth1`, each node uses the first that it has. None takes
    `GLOO_SOCKET_IFNAME`, or chooses."""


SFTDeploymentConfig = Annotated[SingleNodeDeploymentConfig | MultiNodeDeploymentConfig, Field(discriminator="type")]


class SFTConfig(LaunchedConfig):
    """Supervised fine-tuning. Read by `sft`."""

    component: ClassVar[str] = "sft"

    model: ModelConfig = ModelConfig()
    """The trained model."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""

    data: DataConfig = SFTDataConfig()
    """The dataset."""

    distillation: SFTDistillationConfig | None = None
    """Learn a teacher's distribution of each trained token. None learns the tokens of the data."""

    val: ValConfig | None = None
    """Validation during training. None disables it."""

    eval: SFTEvalConfig | None = None
    """Evaluation on environments during training. None disables it."""

    inference: InferenceConfig | None = None
    """The inference server of `[eval]`. With `[eval]` there is always one; it serves `model.name`."""

    optim: OptimizerConfig = AdamWConfig()
    """The optimizer."""

    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """The learning rate schedule."""

    ckpt: CheckpointConfig | None = None
    """Checkpoints. None writes none."""

    early_stop: EarlyStopConfig | None = None
    """Rules that end the run before `max_steps`. None disables it."""

    log: LogConfig = LogConfig()
    """Logs."""

    wandb: WandbConfig | None = None
    """Weights & Biases. None disables it."""

    monitor: MonitorConfig = MonitorConfig()
    """TensorBoard, Trackio, SwanLab and MLflow."""

    trace: TraceConfig | None = None
    """Timeline of all processes, for `medarc_train trace`. None records none."""

    output_dir: Path = Path("outputs")
    """The run's directory."""

    clean_output_dir: bool = False
    """Delete the contents of the output directory first."""

    file_access: FileAccess = "owner"
    """Who can read the files of the run. `owner`: only you; `group`: your group too; `umask`: as your umask says."""

    stall: StallConfig = StallConfig()
    """When a process that hangs ends the run."""

    max_steps: WholeNumber | None = None
    """Number of steps. With neither this nor `num_epochs`, training goes on until it is stopped."""

    num_epochs: float | None = Field(None, gt=0, le=LARGEST)
    """Number of passes over the data, instead of `max_steps`. The number of steps is found from the data at the start:
    exactly for up to 50,000 rows, otherwise extrapolated from them."""

    memory_profiler_path: Path | None = None
    """Write a snapshot of GPU memory to this directory after each step."""

    bench: BenchConfig | None = None
    """Benchmark mode. None disables it."""

    trace_path: Path | None = None
    """Write a profiler trace per process to this directory. Needs `max_steps` below 10."""

    dist_timeout_seconds: Seconds = 600
    """Timeout of a collective operation, in seconds."""

    loss: TokenLoss = "cross_entropy"
    """`dft` weights the cross-entropy of each token by its probability p, as a constant: unlikely tokens pull less.
    `phi` by p (1 - p): likely tokens pull less too. Validation reports the plain cross-entropy with all."""

    loss_impl: Literal["liger", "torch"] = "torch"
    """Implementation of the cross-entropy."""

    heartbeat: HeartbeatConfig | None = None
    """A URL to call after each step. None disables it."""

    deployment: SFTDeploymentConfig = SingleNodeDeploymentConfig()
    """GPUs and nodes."""

    slurm: SlurmConfig | None = None
    """Submit through Slurm. None runs here."""

    dry_run: bool = False
    """Write the resolved config and stop."""

    device: Device = "auto"
    """Where to run. `auto` uses GPUs if there are any."""

    @property
    def infer_gpus_per_node(self) -> int:
        """GPUs of the server of `[eval]` on each node. 0 without `[eval]`."""
        return 0 if self.eval is None else self.deployment.num_infer_gpus

    @property
    def train_gpus_per_node(self) -> int:
        """Processes of the trainer on each node, one per GPU."""
        if self.deployment.type == "single_node":
            return self.deployment.num_gpus
        return self.deployment.gpus_per_node - self.infer_gpus_per_node

    @property
    def validates_on_training_rows(self) -> bool:
        """Whether `[val]` names no rows, so that the training rows are taken for both."""
        if self.val is None or self.val.is_split or not isinstance(self.data, SFTDataConfig):
            return False
        ours, theirs = self.data, self.val.data
        return all(getattr(ours, key) == getattr(theirs, key) for key in ("name", "sources", "subsets", "splits"))

    @property
    def datasets(self) -> list[SFTDataConfig]:
        """The datasets that the trainer reads."""
        sections = (self.data, *(() if self.val is None else (self.val.data,)))
        return [each for each in sections if isinstance(each, SFTDataConfig)]

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        table = super().prepare(data)
        deployment = table.get("deployment")
        if isinstance(deployment, dict) and deployment.get("type") == "multi_node":
            deployment.pop("num_gpus", None)
        if isinstance(table.get("val"), dict):
            table["val"] = _with_keys_of_data(table["val"], table.get("data"))
        return table

    @model_validator(mode="after")
    def _enter_bench_mode(self) -> Self:
        if self.bench is not None:
            constant = ConstantSchedulerConfig()
            derive(self, "bench", max_steps=BENCH_STEPS, num_epochs=None, ckpt=None, scheduler=constant)
            derive(self, "bench", eval=None, inference=None, early_stop=None)
        return self

    @model_validator(mode="after")
    def _share_sequence_length(self) -> Self:
        """`model.seq_len` is another name of `data.seq_len`, which validation takes too."""
        if "seq_len" in self.model.model_fields_set and "seq_len" not in self.data.model_fields_set:
            derive(self.data, "model.seq_len is set", seq_len=self.model.seq_len)
        if self.val is not None and "seq_len" not in self.val.data.model_fields_set:
            derive(self.val.data, "data.seq_len", seq_len=self.data.seq_len)
        return self

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self.faults())
        if self.data.seq_len is not NOT_SET:
            derive(self.model, "data.seq_len decides", seq_len=self.data.seq_len)
        fill_tokenizer(self.tokenizer, self.model)
        derive(self.model, "SFT has no fused output layer", fused_lm_head_chunk_size="disabled")
        self._split_data()
        prepare_server(self)
        deployment = self.deployment
        if isinstance(deployment, MultiNodeDeploymentConfig) and deployment.nodes_per_fsdp_group is not None:
            copies = deployment.num_nodes // deployment.nodes_per_fsdp_group
            derive(self.model, "deployment.nodes_per_fsdp_group", dp_replicate=copies)
        return self

    def faults(self) -> Iterator[str]:
        """Which of the keys do not go together."""
        yield from training_faults(self)
        yield from self._sequence_faults()
        yield from self._faults()
        yield from evaluation_faults(self)

    def _sequence_faults(self) -> Iterator[str]:
        data = self.data
        is_known = data.seq_len is not NOT_SET
        if is_known and "seq_len" in self.model.model_fields_set and self.model.seq_len != data.seq_len:
            yield f"model.seq_len ({self.model.seq_len}) and data.seq_len ({data.seq_len}) differ: set one"
        yield from filter(None, (stack_fault(data),))

    def _split_data(self) -> None:
        """Give `data` and `val.data` their sides of a split."""
        if self.val is None or not self.val.is_split:
            return
        assert isinstance(self.data, SFTDataConfig), "a split of other data is refused"
        for data, is_validation in ((self.data, False), (self.val.data, True)):
            data.take_side(Split(self.val.size, self.val.fraction, self.data.seed, is_validation))

    def _split_faults(self) -> Iterator[str]:
        if self.val is None or not self.val.is_split:
            return
        key = "val.size" if self.val.size is not None else "val.fraction"
        if not isinstance(self.data, SFTDataConfig):
            yield f"{key} needs a dataset (data.type = 'sft')"
        elif self.data.streaming:
            yield f"{key} reads all rows at the start, and data.streaming = true does not: give [val.data] a name"
        else:
            for name in ("name", "sources", "subsets", "splits", "probabilities", "columns", "roles"):
                if getattr(self.data, name) != getattr(self.val.data, name):
                    yield f"{key} holds out rows of data, and val.data.{name} names others: remove one of them"

    def _epoch_faults(self) -> Iterator[str]:
        if self.num_epochs is None:
            return
        if self.max_steps is not None:
            yield f"max_steps ({self.max_steps}) and num_epochs ({self.num_epochs:g}) are both set: give one"
        if isinstance(self.data, FakeDataConfig):
            yield "num_epochs needs a dataset (data.type = 'sft'): set max_steps"
        elif self.data.streaming:
            yield "num_epochs needs the number of rows, which data.streaming = true does not tell: set max_steps"

    def _faults(self) -> Iterator[str]:
        yield from self._epoch_faults()
        yield from self._split_faults()
        if self.ckpt is not None and self.ckpt.keep_best and self.val is None:
            yield "ckpt.keep_best needs [val]: the best step is the one with the lowest validation loss"
        if self.early_stop is not None:
            if self.early_stop.compares_evaluations and self.val is None:
                yield "early_stop.patience and early_stop.target need [val]: they compare validation losses"
            for key in ("min_entropy", "constant_reward_steps"):
                if getattr(self.early_stop, key) is not None:
                    yield f"early_stop.{key} is a rule for RL: set patience or target"
        if self.distillation is not None and self.distillation.sft_coef == 0 and self.loss in ("dft", "phi"):
            yield f"loss = {self.loss!r} weights the cross-entropy, and distillation.sft_coef = 0 omits it: set one"
        if self.model.vision is not None:
            yield from (f"[model.vision] {fault}" for fault in self._vision_faults())
        if isinstance(self.model.fused_lm_head_chunk_size, int):
            yield "model.fused_lm_head_chunk_size must be 'auto' or 'disabled': SFT has no fused output layer"
        deployment = self.deployment
        if not isinstance(deployment, MultiNodeDeploymentConfig):
            processes = deployment.num_gpus
            if fault := division_fault(self.model, processes) or self._batch_fault(processes):
                yield f"{fault} (deployment.num_gpus = {processes})"
            return
        if self.slurm is None and self.launcher != "ray":
            yield "deployment.type = 'multi_node' needs [slurm]"
        group = deployment.nodes_per_fsdp_group
        if group is not None and deployment.num_nodes % group != 0:
            yield f"deployment.num_nodes ({deployment.num_nodes}) is not a multiple of nodes_per_fsdp_group ({group})"
        if self.train_gpus_per_node > 0:
            processes = deployment.num_nodes * self.train_gpus_per_node
            yield from filter(None, (division_fault(self.model, processes) or self._batch_fault(processes),))

    def _vision_faults(self) -> Iterator[str]:
        if self.distillation is not None:
            yield "with [distillation]: a teacher reads text alone: remove one"
        if self.optim.type == "muon" and self.model.vision is not None and self.model.vision.tower_lr is not None:
            yield "with tower_lr and optim.type = 'muon', which makes all updates equally large: remove tower_lr"
        if self.tokenizer.add_tokens:
            yield "with tokenizer.add_tokens is not supported yet: remove one"
        if not isinstance(self.data, SFTDataConfig):
            yield "needs a dataset (data.type = 'sft')"
        elif self.data.overlong == "split":
            yield "with data.overlong = 'split': an image has no pieces: truncate, drop or error"

    def _batch_fault(self, processes: int) -> str | None:
        sharing, group = product_of(self.model, "cp", "tp")
        return batch_fault(self.data, processes // sharing, group)


def _with_keys_of_data(val: dict[str, Any], data: Any) -> dict[str, Any]:
    """The raw `[val]`, its `data` completed by the raw `[data]`."""
    own = val.get("data", {})
    if not isinstance(own, dict) or not isinstance(data, dict):
        return val
    left_out = {"streaming", "type", *(("length", "input_ids", "pack_function") if data.get("type") == "fake" else ())}
    if "name" in own or "sources" in own:
        left_out |= {"name", "sources", "subsets", "splits", "probabilities"}
    shared = {key: value for key, value in data.items() if key in SFTDataConfig.model_fields and key not in left_out}
    return {**val, "data": dict(_completed(own, shared, ("val", "data"), ("data",)))}


def _completed(
    own: dict[str, Any], shared: dict[str, Any], path: tuple[str, ...], origin: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    """The items of the raw table at `path`, completed by those of the raw table at `origin`, key by key."""
    for key in {**shared, **own}:
        mine, theirs = own.get(key, {}), shared.get(key, {})
        # Columns of one dataset say nothing of another that has columns of its own.
        is_whole = key in own and (key == "columns" or not (isinstance(mine, dict) and isinstance(theirs, dict)))
        if is_whole:
            yield key, mine
        elif isinstance(theirs, dict):
            yield key, dict(_completed(mine, theirs, (*path, key), (*origin, key)))
        else:
            note_derivation(Derivation(".".join((*path, key)), ".".join((*origin, key))))
            yield key, theirs


def evaluation_faults(config: SFTConfig) -> Iterator[str]:
    """Rules of `[eval]` and `[inference]`."""
    evaluation, server = config.eval, config.inference
    if evaluation is None:
        if server is not None:
            yield "[inference] is the server of [eval], which is missing: add [eval], or remove [inference]"
        return
    if not evaluation.env:
        yield "eval has no environment: add [[eval.env]]"
    if evaluation.num_examples == 0:
        yield "eval.num_examples is 0: at least 1, or -1 for all"
    yield from repeated_names("eval.env", evaluation.env)
    yield from judge_faults("eval.env", evaluation.env, evaluation.judge)
    yield from _deployment_faults(config)
    if config.model.debug.random_init or config.model.debug.num_layers is not None:
        yield "eval: model.debug trains another model than the server loads from model.name: remove one of them"
    if config.tokenizer.add_tokens:
        yield (
            "eval with tokenizer.add_tokens: the server starts from model.name, without these tokens; evaluate the "
            "exports after the run (medarc_eval)"
        )
    if server is not None and "name" in server.model.model_fields_set and server.model.name != config.model.name:
        yield f"inference.model.name ({server.model.name!r}) is not model.name: leave it out"
    if config.ckpt is not None and config.ckpt.weights is None:
        yield "eval loads the exported weights, and ckpt.weights is None: remove it"
    elif config.ckpt is not None and config.ckpt.weights is not None and config.ckpt.weights.save_format == "torch":
        yield "eval: ckpt.weights.save_format = 'torch': the engines read safetensors"


def _deployment_faults(config: SFTConfig) -> Iterator[str]:
    deployment = config.deployment
    judges = {} if config.eval is None else started_judges(config.eval.judge)
    of_judges = sum(each.gpus_on(config.device) for each in judges.values())
    total = config.train_gpus_per_node + deployment.num_infer_gpus + of_judges
    if judges and deployment.type == "multi_node":
        yield (
            f"eval.judge.{next(iter(judges))} is started on one node only: on several, start its server yourself, such "
            "as with `inference`, and set its base_url"
        )
    if deployment.type == "multi_node" and config.train_gpus_per_node < 1:
        yield (
            f"deployment.num_infer_gpus ({deployment.num_infer_gpus}) leaves none of the gpus_per_node "
            f"({deployment.gpus_per_node}) for training"
        )
    elif deployment.type == "single_node" and total > deployment.gpus_per_node:
        added = f" + {of_judges} of judges" if of_judges else ""
        yield (
            f"{deployment.num_gpus} training + {deployment.num_infer_gpus} inference{added} = {total} GPUs are above "
            f"deployment.gpus_per_node ({deployment.gpus_per_node})"
        )
    tp = 1 if config.inference is None else config.inference.parallel.tp
    if deployment.num_infer_gpus % tp != 0:
        yield (
            f"deployment.num_infer_gpus ({deployment.num_infer_gpus}) is not a multiple of inference.parallel.tp ({tp})"
        )


def prepare_server(config: SFTConfig) -> None:
    """Fill in the server of `[eval]`. Call it in a validator of the config, once the rules hold."""
    if config.eval is None:
        return
    if config.inference is None:
        derive(config, "[eval] needs a server", inference=InferenceConfig())
    server = config.inference
    assert server is not None
    if "device" not in server.model_fields_set:
        derive(server, "device of the run", device=config.device)
    derive(server.model, "model of the run", name=config.model.name)
    if "trust_remote_code" not in server.model.model_fields_set:
        derive(server.model, "model of the run", trust_remote_code=config.model.trust_remote_code)
    if server.model.chat_template is None:
        derive(server.model, "tokenizer of the run", chat_template=config.tokenizer.chat_template)
    copies = config.deployment.num_infer_gpus // server.parallel.tp
    derive(server.parallel, "deployment.num_infer_gpus", dp=copies)
    derive(server, "parallel.dp needs as many", api_server_count=max(server.api_server_count, copies))


def evaluation_of(config: SFTConfig) -> OfflineEvalConfig | None:
    """The evaluation that runs next to the training, in the run's own directory. None without `[eval]`."""
    ours = config.eval
    if ours is None:
        return None
    environments = [
        env.model_copy(
            update={
                "num_examples": env.num_examples or ours.num_examples,
                "rollouts_per_example": env.rollouts_per_example or ours.rollouts_per_example,
            }
        )
        for env in ours.env
    ]
    return OfflineEvalConfig(
        model=BaseModelConfig(name=config.model.name, trust_remote_code=config.model.trust_remote_code),
        env=environments,
        judge=ours.judge,
        max_concurrent=ours.max_concurrent,
        weights_dir=config.output_dir / "weights",
        watch=True,
        interval=ours.interval,
        eval_base=ours.eval_base_model,
        sampling=ours.sampling,
        inference=config.inference,
        device=config.device,
        output_dir=config.output_dir,
        log=config.log,
        wandb=config.wandb,
        monitor=config.monitor,
        trace=config.trace,
        file_access=config.file_access,
        stall=config.stall,
    )

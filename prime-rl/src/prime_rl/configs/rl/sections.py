"""Sections of an RL run: settings that its components share, the components, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.algorithms import Algorithm, top_measure_of
from prime_rl.configs.critic import advantage_faults
from prime_rl.configs.data import batch_fault
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.model import VisionConfig, division_fault, product_of
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.ranges import (
    Count,
    Gpus,
    NetworkInterfaces,
    Nodes,
    Port,
    ResumeStep,
    TransferSeconds,
    WholeNumber,
)
from prime_rl.configs.rollouts.judges import TEACHER, TEACHER_AT_ONCE, FrozenModel, Judges, frozen_judges
from prime_rl.configs.rollouts.sampling import SamplingConfig
from prime_rl.configs.shared import TEACHER_ELSEWHERE, Device, EarlyStopConfig, MonitorConfig, TraceConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import BaseConfig


class SharedLogConfig(BaseConfig):
    """Logs of trainer and orchestrator. A value here overrides theirs; None does not."""

    level: str | None = "info"
    """Log level of both."""

    file: bool | None = True
    """Also log to files."""

    json_logging: bool = False
    """Write one JSON object per line."""


class SharedCheckpointConfig(BaseConfig):
    """Checkpoints of trainer and orchestrator. A value here overrides theirs; None does not."""

    interval: Count | None = None
    """Steps between two checkpoints."""

    resume_step: ResumeStep | None = None
    """Step to continue from; `--resume` is short for it. `latest` (or -1) is the newest that all parts of the run have
    whole. `auto` (or -2) is that too, but starts a new run if there is none."""

    keep_last: Count | None = None
    """Number of newest checkpoints to keep."""

    keep_interval: Count | None = None
    """Keep every checkpoint whose step is a multiple of n."""

    keep_best: bool | None = None
    """Keep the checkpoint with the best evaluation (`orchestrator.eval.metric`) regardless of the other rules, and
    record its step in `checkpoints/best.json`. `orchestrator.eval.interval` must be a multiple of `interval`."""


class SharedWandbConfig(BaseConfig):
    """Weights & Biases of trainer and orchestrator."""

    project: str | None = "prime-rl"
    """Project name of both. None keeps their own."""

    name: str | None = None
    """Run name; `-trainer` and `-orchestrator` are appended. None keeps their own."""

    offline: bool | None = False
    """Write locally and upload nothing. Only `true` overrides the components."""


class SharedModelConfig(BaseConfig):
    """The model of trainer, orchestrator and inference."""

    name: str = "Qwen/Qwen3-0.6B"
    """Hugging Face model id, or a directory."""

    language_model_only: bool | None = None
    """Serve and export only the language model of a checkpoint with a vision tower. None leaves it to `trainer.model`
    and `inference.model`."""

    vision: VisionConfig | None = None
    """Train on images that environments show, with the vision tower of the checkpoint. None leaves it to
    `trainer.model`."""


class SharedWeightBroadcastConfig(BaseConfig):
    """How the trainer sends weights to the inference servers."""

    type: Literal["nccl", "filesystem"] = "filesystem"
    """`nccl`: from memory to memory over NCCL (gloo on a CPU); needs `max_async_level = 1`. `filesystem`: as files."""

    port: Port = 29501
    """NCCL: port of the rendezvous."""

    timeout: TransferSeconds = 1200
    """NCCL: timeout in seconds."""


class BaseDeploymentConfig(BaseConfig):
    """GPUs and nodes of the components."""

    gpus_per_node: Gpus = 8
    """Number of GPUs per node."""


class SingleNodeDeploymentConfig(BaseDeploymentConfig):
    """One node, its GPUs split among the components."""

    type: Literal["single_node"] = "single_node"
    """One node."""

    num_train_gpus: Gpus = 1
    """Number of GPUs of the trainer."""

    num_infer_gpus: int = Field(1, ge=0, le=1024)
    """Number of GPUs of the inference server."""

    num_teacher_gpus: int | None = Field(None, ge=0, le=1024)
    """Number of GPUs of the teacher's server. None starts none, unless there is `[teacher_inference]` on a CPU."""

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        train, infer, teacher = self.num_train_gpus, self.num_infer_gpus, self.num_teacher_gpus or 0
        if train + infer + teacher > self.gpus_per_node:
            parts = f"{train} train + {infer} infer" + (f" + {teacher} teacher" if teacher else "")
            raise ValueError(f"{parts} = {train + infer + teacher} GPUs, but gpus_per_node is {self.gpus_per_node}")
        return self


class MultiNodeDeploymentConfig(BaseDeploymentConfig):
    """Several nodes, split among the components."""

    type: Literal["multi_node"] = "multi_node"
    """Several nodes."""

    num_train_nodes: Nodes
    """Number of nodes of the trainer."""

    num_infer_nodes: Nodes
    """Number of nodes of the inference servers."""

    num_teacher_nodes: Nodes | None = None
    """Number of nodes of the teacher's server. Must be None."""

    nodes_per_fsdp_group: Nodes | None = None
    """Number of nodes that share one copy of the model. None shares it among all nodes."""

    network_interface: NetworkInterfaces | None = None
    """Network interface through which the nodes reach each other, such as `eth1`: for all addresses of the run, gloo
    and NCCL. With several names, as in `ib0,eth1`, each node uses the first that it has. None takes
    `GLOO_SOCKET_IFNAME`, or chooses."""

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.num_teacher_nodes is not None:
            raise ValueError(f"num_teacher_nodes must stay None: {TEACHER_ELSEWHERE}")
        return self


DeploymentConfig = Annotated[SingleNodeDeploymentConfig | MultiNodeDeploymentConfig, Field(discriminator="type")]


class SharedSettings(BaseConfig):
    """Settings that the components share. `propagate` writes them into the components' sections."""

    output_dir: Path = Path("outputs")
    """The run's directory. The orchestrator writes to `run_default` in it."""

    log: SharedLogConfig = SharedLogConfig()
    """Logs of trainer and orchestrator."""

    ckpt: SharedCheckpointConfig | None = None
    """Checkpoints of trainer and orchestrator. None keeps their own settings."""

    early_stop: EarlyStopConfig | None = None
    """Rules that end the run before `max_steps`. None keeps the orchestrator's own."""

    wandb: SharedWandbConfig | None = None
    """Weights & Biases of trainer and orchestrator. None keeps their own settings."""

    monitor: MonitorConfig = MonitorConfig()
    """TensorBoard, Trackio, SwanLab and MLflow of trainer and orchestrator. A key here overrides theirs."""

    trace: TraceConfig | None = None
    """Timeline of all processes, for `medarc_train trace`. None records none."""

    model: SharedModelConfig | None = None
    """The model of trainer, orchestrator and inference. None keeps their own settings."""

    algorithm: Algorithm = "default"
    """A published algorithm. Fills in keys of `trainer.loss`, `trainer.minibatches`, `trainer.critic`,
    `orchestrator.advantage` and `orchestrator.buffer` that the config leaves out. `default` fills in none."""

    max_steps: WholeNumber | None = None
    """Number of steps. None keeps the settings of trainer and orchestrator."""

    seq_len: Count | None = None
    """Sequence length of trainer and orchestrator, if they do not set their own."""

    max_async_level: WholeNumber | None = None
    """`max_async_level` of trainer and orchestrator. None keeps their own settings."""

    weight_broadcast: SharedWeightBroadcastConfig | None = None
    """How weights reach the inference servers. None keeps the components' own settings."""

    bench: bool = False
    """Benchmark mode of trainer and orchestrator."""

    deployment: DeploymentConfig = SingleNodeDeploymentConfig()
    """GPUs and nodes."""

    inference_gpu_ids: list[WholeNumber] | None = Field(None, min_length=1)
    """Ids of the inference server's GPUs; sets `deployment.num_infer_gpus`. None takes the first visible GPUs."""

    trainer_gpu_ids: list[WholeNumber] | None = Field(None, min_length=1)
    """Ids of the trainer's GPUs, which may include the server's; sets `deployment.num_train_gpus`. None takes the next
    visible GPUs."""

    judge: Judges = Field({})
    """Judges, by name: `[judge.NAME]`. Environments name theirs in `orchestrator.env[].judge`."""

    device: Device = "auto"
    """Where every component runs. `auto` uses GPUs if there are any."""


class RunSections(SharedSettings):
    """The shared settings, and a section for each component."""

    trainer: TrainerConfig = Field(default_factory=lambda: TrainerConfig.model_validate({}))
    """The trainer."""

    orchestrator: OrchestratorConfig = Field(default_factory=lambda: OrchestratorConfig.model_validate({}))
    """The orchestrator."""

    inference: InferenceConfig | None = None
    """The inference server. Without this table one is started with its default settings, unless
    `orchestrator.client.base_url` is set or `deployment.num_infer_gpus` is 0. `"None"` starts none."""

    teacher_inference: InferenceConfig | None = None
    """The teacher's server. None starts none, unless `deployment.num_teacher_gpus` is set: it then has the
    settings of `[inference]`."""

    @property
    def takes_turns(self) -> bool:
        """Whether, on a GPU that both share, the trainer leaves while the server samples and the other way round."""
        sleeps = self.inference is not None and self.inference.enable_sleep_mode
        return sleeps and self.trainer.offload_while_sampling

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """The judges and the teacher that the run starts. The teacher is last."""
        judges = frozen_judges(self.orchestrator.judge, self.device)
        if self.teacher_inference is None or self.deployment.type != "single_node":
            return judges
        gpus = 0 if self.device == "cpu" else self.deployment.num_teacher_gpus or 0
        longest = self.orchestrator.seq_len + 1
        return *judges, FrozenModel(TEACHER, "teacher", self.teacher_inference, gpus, TEACHER_AT_ONCE, longest)


# Rules that no component can check alone. They see the sections with the shared settings in them.


TOY_MODELS = "Jackmin108/"
"""Test models that are published under one name per component."""


def run_faults(run: RunSections, has_slurm: bool) -> Iterator[str]:
    """One line for each broken rule."""
    yield from _pairing_faults(run)
    yield from _model_faults(run)
    if isinstance(run.deployment, SingleNodeDeploymentConfig):
        yield from _single_node_faults(run, run.deployment)
    else:
        yield from _multi_node_faults(run, run.deployment, has_slurm)
    yield from _broadcast_faults(run)
    if run.inference is not None and run.orchestrator.client.is_elastic:
        yield (
            "orchestrator.client.elastic finds servers that the run does not start: remove it, or remove [inference]"
        )
    if run.orchestrator.servers_sleep and run.inference is not None and not run.inference.enable_sleep_mode:
        yield "orchestrator.servers_sleep needs inference.enable_sleep_mode = true: the server would refuse to sleep"
    yield from _teacher_faults(run)
    yield from advantage_faults(run.trainer.critic, run.orchestrator.advantage, run.algorithm)
    if isinstance(run.deployment, SingleNodeDeploymentConfig):
        yield from _port_faults(run)


def run_warnings(run: RunSections) -> Iterator[str]:
    """One line for each setting that works, but probably not as intended."""
    loss = run.trainer.loss
    learns = run.trainer.distillation is not None or loss.type != "default" or loss.teacher_tau > 0
    if run.orchestrator.all_teachers and not learns:
        yield "trainer.loss.teacher_tau is 0: the teacher scores every sample, and only the metric teacher_kl shows it"
    if run.orchestrator.all_teachers and not _samples_at_one(run.orchestrator.sampling):
        yield (
            "a teacher's log-probabilities are those at temperature 1, and the policy's are those at "
            "orchestrator.sampling.temperature: only 1 compares the same"
        )
    if run.orchestrator.all_teachers and run.orchestrator.sampling.top_k is not None:
        yield (
            "a teacher's log-probabilities are those over all tokens, and the policy's are those over the ones that "
            "orchestrator.sampling.top_k leaves: only without it are they compared alike"
        )
    if run.algorithm == "dapo" and run.orchestrator.sampling.max_tokens is None:
        yield "algorithm = 'dapo' has no overlong penalty without orchestrator.sampling.max_tokens"


def _samples_at_one(sampling: SamplingConfig) -> bool:
    return sampling.temp_scheduler is None and sampling.temperature in (None, 1.0)


def _pairing_faults(run: RunSections) -> Iterator[str]:
    """Settings on which trainer and orchestrator must agree."""
    trainer, orchestrator = run.trainer, run.orchestrator
    if orchestrator.sampling.top_logprobs is not None and top_measure_of(trainer.loss) is None:
        yield "orchestrator.sampling.top_logprobs has no effect without trainer.loss.measure = 'top_k_tv' or 'top_k_kl'"
    benches = trainer.bench is not None
    if benches != orchestrator.bench:
        yield "only one of trainer.bench and orchestrator.bench is on: set bench = true at the top instead"
    # A benchmark's trainer writes no checkpoints, and its orchestrator never waits.
    if not benches:
        yield from _unequal(run, "max_steps")
        yield from _unequal(run, "max_async_level")
        yield from _one_sided(run, "ckpt")
    yield from _one_sided(run, "wandb")
    if trainer.ckpt is not None and orchestrator.ckpt is not None:
        yield from _unequal(run, "ckpt.interval")
        yield from _unequal(run, "ckpt.resume_step")
        yield from _unequal(run, "ckpt.keep_best")
    if trainer.wandb is not None and orchestrator.wandb is not None:
        yield from _unequal(run, "wandb.project")
    templates = {
        "trainer.tokenizer.chat_template": trainer.tokenizer.chat_template,
        "orchestrator.model.chat_template": orchestrator.model.chat_template,
    } | ({} if run.inference is None else {"inference.model.chat_template": run.inference.model.chat_template})
    if len(set(templates.values())) > 1:
        yield f"{' and '.join(templates)} differ: set one"
    if trainer.model.seq_len < orchestrator.seq_len:
        yield (
            f"trainer.model.seq_len ({trainer.model.seq_len}) is below orchestrator.seq_len ({orchestrator.seq_len}): "
            "longer samples could not be trained"
        )
    if trainer.rollout_transport.type != orchestrator.rollout_transport.type:
        yield from _unequal(run, "rollout_transport.type")
    elif trainer.rollout_transport.type == "zmq":
        yield from _unequal(run, "rollout_transport.port")


def _unequal(run: RunSections, key: str) -> Iterator[str]:
    ours, theirs = _at(run.trainer, key), _at(run.orchestrator, key)
    if ours != theirs:
        once = "" if key.startswith("rollout_transport") else f": set {key} once, at the top"
        yield f"trainer.{key} ({ours}) and orchestrator.{key} ({theirs}) differ{once}"


def _one_sided(run: RunSections, key: str) -> Iterator[str]:
    has, lacks = ("trainer", "orchestrator") if _at(run.trainer, key) is not None else ("orchestrator", "trainer")
    if (_at(run.trainer, key) is None) != (_at(run.orchestrator, key) is None):
        yield f"{has}.{key} is set and {lacks}.{key} is not: set [{key}] once, at the top"


def _at(section: Any, key: str) -> Any:
    for part in key.split("."):
        section = getattr(section, part)
    return section


def _model_faults(run: RunSections) -> Iterator[str]:
    name = run.trainer.model.name
    others = {"orchestrator": run.orchestrator, "inference": run.inference}
    for other, section in others.items():
        if section is not None and section.model.name != name and not name.startswith(TOY_MODELS):
            yield (
                f"trainer.model.name ({name!r}) and {other}.model.name ({section.model.name!r}) differ: "
                "set model.name once, at the top"
            )
    yield from (f"[model.vision] {fault}" for fault in _vision_faults(run))
    ours, theirs = run.trainer.model.lora, run.orchestrator.model.lora
    if ours is None and theirs is not None:
        yield "orchestrator.model.lora is set and trainer.model.lora is not: set [trainer.model.lora]"
    if ours is None or theirs is None:
        return
    if not run.trainer.model.sends_adapter:
        yield (
            f"orchestrator.model.lora with trainer.model.{run.trainer.model.merging_key}: the trainer sends whole "
            "weights, with the adapter merged in; remove orchestrator.model.lora"
        )
        return
    for key in ("rank", "alpha"):
        if getattr(ours, key) != getattr(theirs, key):
            yield (
                f"trainer.model.lora.{key} ({getattr(ours, key)}) and orchestrator.model.lora.{key} "
                f"({getattr(theirs, key)}) differ: leave the orchestrator's out"
            )


def _vision_faults(run: RunSections) -> Iterator[str]:
    trainer, inference = run.trainer, run.inference
    if (trainer.model.vision is None) != (run.orchestrator.model.vision is None):
        yield "is set for only one of trainer and orchestrator: set it once, at the top"
    if trainer.model.vision is None:
        return
    if run.orchestrator.all_teachers or trainer.distillation is not None:
        yield "with a teacher, which reads text alone: remove one"
    if trainer.critic is not None:
        yield "with [trainer.critic], which reads text alone: remove one"
    if trainer.optim.type == "muon" and trainer.model.vision.tower_lr is not None:
        yield "with tower_lr and trainer.optim.type = 'muon', which makes all updates equally large: remove tower_lr"
    if inference is not None and inference.model.language_model_only:
        yield "with inference.model.language_model_only, which serves no vision tower: remove one"


def _single_node_faults(run: RunSections, deployment: SingleNodeDeploymentConfig) -> Iterator[str]:
    if run.inference is not None and deployment.num_infer_gpus == 0:
        yield "deployment.num_infer_gpus is 0: give [inference] a GPU, or remove it and use a running server"
    elif run.inference is not None:
        yield from _uneven_split("inference", run.inference, deployment.num_infer_gpus)
    if run.teacher_inference is not None and deployment.num_teacher_gpus:
        yield from _uneven_split("teacher_inference", run.teacher_inference, deployment.num_teacher_gpus)
    elif run.teacher_inference is not None and run.device != "cpu":
        yield "[teacher_inference] has no GPU: set deployment.num_teacher_gpus, or device = 'cpu'"
    yield from _judge_faults(run, deployment)
    yield from _division_faults(run, deployment.num_train_gpus)
    if run.trainer.weight_broadcast.type == "nccl" and run.device != "cpu":
        yield from _shared_gpu(run, deployment)


def _judge_faults(run: RunSections, deployment: SingleNodeDeploymentConfig) -> Iterator[str]:
    train, infer = deployment.num_train_gpus, deployment.num_infer_gpus if run.inference is not None else 0
    teacher = deployment.num_teacher_gpus or 0
    own = {f"judge.{name}": judge.gpus_on(run.device) for name, judge in run.orchestrator.judge.items()}
    own |= {"teacher": teacher} if teacher else {}
    if (total := train + infer + sum(own.values())) > deployment.gpus_per_node and any(own.values()):
        parts = " + ".join([f"{train} train", f"{infer} infer", *(f"{count} {name}" for name, count in own.items())])
        yield f"{parts} = {total} GPUs, but deployment.gpus_per_node is {deployment.gpus_per_node}"
    for name, judge in run.orchestrator.judge.items():
        shares = judge.is_ours and judge.gpus == 0 and "cpu" not in (judge.device, run.device)
        if shares and run.inference is None:
            yield f"judge.{name}.gpus = 0 shares the GPUs of [inference], and the run starts none: give it GPUs"


def _shared_gpu(run: RunSections, deployment: SingleNodeDeploymentConfig) -> Iterator[str]:
    """NCCL connects different GPUs; on a CPU gloo is used instead."""
    if deployment.num_train_gpus + deployment.num_infer_gpus < 2:
        yield (
            f"NCCL weight broadcast needs two GPUs (got {deployment.num_train_gpus} train + "
            f"{deployment.num_infer_gpus} infer): use weight_broadcast.type = 'filesystem'"
        )
    if shared := sorted({*(run.inference_gpu_ids or ())} & {*(run.trainer_gpu_ids or ())}):
        yield (
            f"NCCL weight broadcast needs GPUs of each side's own, and inference_gpu_ids and trainer_gpu_ids share "
            f"{', '.join(map(str, shared))}: use weight_broadcast.type = 'filesystem'"
        )


def _uneven_split(name: str, server: InferenceConfig, gpus: int) -> Iterator[str]:
    tp, dp = server.parallel.tp, server.parallel.dp
    if gpus % tp != 0:
        yield f"{name}: {gpus} GPUs / parallel.tp {tp} = {gpus / tp:g} copies of the model: not a whole number"
    elif gpus != tp * dp:
        yield f"{name}: {gpus} GPUs / parallel.dp {dp} = {gpus / dp:g} GPUs for each copy: not a whole number"


def _multi_node_faults(run: RunSections, deployment: MultiNodeDeploymentConfig, has_slurm: bool) -> Iterator[str]:
    if not has_slurm:
        yield "deployment.type = 'multi_node' needs [slurm]"
    if run.inference is None:
        yield "deployment.type = 'multi_node' needs [inference]"
    if ours := [name for name, judge in run.orchestrator.judge.items() if judge.is_ours]:
        yield (
            f"judge.{ours[0]} is started on one node only: with deployment.type = 'multi_node', start its server "
            "yourself, such as with `inference` on another node, and set its base_url"
        )
    if run.teacher_inference is not None:
        yield f"[teacher_inference]: {TEACHER_ELSEWHERE}"
    group = deployment.nodes_per_fsdp_group
    if group is not None and deployment.num_train_nodes % group != 0:
        nodes = deployment.num_train_nodes
        yield f"deployment.num_train_nodes ({nodes}) is not a multiple of nodes_per_fsdp_group ({group})"
    if run.inference is not None:
        yield from _uneven_split("inference", run.inference, deployment.gpus_per_node)
    yield from _division_faults(run, deployment.num_train_nodes * deployment.gpus_per_node)


def _division_faults(run: RunSections, processes: int) -> Iterator[str]:
    """Why these processes cannot share out the model, or the rows that they imitate."""
    model = run.trainer.model
    if fault := division_fault(model, processes):
        yield fault
        return
    sharing, group = product_of(model, "cp", "tp")
    for data in run.trainer.datasets:
        yield from filter(None, (batch_fault(data, processes // sharing, group),))


def _broadcast_faults(run: RunSections) -> Iterator[str]:
    kind = run.trainer.weight_broadcast.type
    others = {"orchestrator": run.orchestrator, "inference": run.inference}
    for other, section in others.items():
        if section is not None and section.weight_broadcast.type != kind:
            yield (
                f"trainer.weight_broadcast.type ({kind!r}) and {other}.weight_broadcast.type "
                f"({section.weight_broadcast.type!r}) differ: set weight_broadcast.type once, at the top"
            )


def _teacher_faults(run: RunSections) -> Iterator[str]:
    loss, teachers = run.trainer.loss, run.orchestrator.all_teachers
    if loss.type == "default" and loss.teacher_tau > 0 and not teachers:
        yield (
            "trainer.loss.teacher_tau needs a teacher: set deployment.num_teacher_gpus, [teacher_inference], or "
            "orchestrator.teacher_model.client.base_url for one that runs already"
        )
    if run.trainer.distillation is not None and not teachers:
        yield (
            "[trainer.distillation] needs a teacher: set deployment.num_teacher_gpus, [teacher_inference], or "
            "orchestrator.teacher_model.client.base_url for one that runs already"
        )
    if not teachers:
        return
    if loss.type not in ("default", "custom") and run.trainer.distillation is None:
        yield (
            f"a teacher has no effect with trainer.loss.type = {loss.type!r}: set [trainer.distillation], or the type "
            "'default' or 'custom'"
        )
    for key, teacher in teachers.items():
        if teacher.top_k is not None and run.trainer.distillation is None:
            yield f"orchestrator.{key}.top_k has no effect without [trainer.distillation]: set its top_k instead"
        is_started = run.teacher_inference is not None and key == "teacher_model"
        if teacher.is_policy and is_started:
            yield "orchestrator.teacher_model.is_policy and [teacher_inference] exclude each other: remove one"
        shares = set(teacher.client.base_url) & set(run.orchestrator.client.base_url)
        if shares and not is_started and not teacher.is_policy:
            yield (
                f"orchestrator.{key}.client.base_url names the server of the model that is trained: name the "
                "teacher's, let the run start it with [teacher_inference], or set is_policy = true and a hint"
            )
    if run.teacher_inference is not None and run.teacher_inference.enable_lora:
        yield "teacher_inference.enable_lora: a teacher serves no adapters; remove it, or name a merged model"
    served = run.teacher_inference.model.max_model_len if run.teacher_inference is not None else None
    if served is not None and served <= run.orchestrator.seq_len:
        yield (
            f"teacher_inference.model.max_model_len ({served}) is too short for sequences of orchestrator.seq_len "
            f"({run.orchestrator.seq_len}) tokens: set it to {run.orchestrator.seq_len + 1} or more"
        )


def _port_faults(run: RunSections) -> Iterator[str]:
    """Ports that two listeners of one machine share."""
    taken: dict[int, str] = {}
    for key, port in _ports(run):
        other = taken.setdefault(port, key)
        if other != key:
            yield f"{other} and {key} are both {port}: change one"


def _ports(run: RunSections) -> Iterator[tuple[str, int]]:
    """Every port that a process of the run listens on, and its key. 0, any free port, is left out."""
    servers = {"inference": run.inference, "teacher_inference": run.teacher_inference}
    for name, server in servers.items():
        if server is not None and server.server.port:
            yield f"{name}.server.port", server.server.port
    if run.trainer.metrics_server is not None:
        yield "trainer.metrics_server.port", run.trainer.metrics_server.port
    if run.orchestrator.metrics_server is not None:
        yield "orchestrator.metrics_server.port", run.orchestrator.metrics_server.port
    if run.trainer.weight_broadcast.type == "nccl":
        yield "trainer.weight_broadcast.port", run.trainer.weight_broadcast.port
    if run.trainer.rollout_transport.type == "zmq":
        port = run.trainer.rollout_transport.port
        yield "trainer.rollout_transport.port", port
        yield "trainer.rollout_transport.port + 1", port + 1

"""Sections of an RL run: settings that its components share, and the components."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.algorithms import Algorithm
from prime_rl.configs.inference import InferenceConfig
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
from prime_rl.configs.rollouts.judges import Judges
from prime_rl.configs.shared import TEACHER_ELSEWHERE, Device, MonitorConfig, TraceConfig
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
    """Network interface through which the nodes reach each other, such as `eth1`. Holds for all addresses of the run,
    gloo and NCCL. Of several, with commas between, each node uses the first that it has. None takes
    `GLOO_SOCKET_IFNAME`, or else chooses."""

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

    wandb: SharedWandbConfig | None = None
    """Weights & Biases of trainer and orchestrator. None keeps their own settings."""

    monitor: MonitorConfig = MonitorConfig()
    """TensorBoard, Trackio, SwanLab and MLflow of trainer and orchestrator. A key here overrides theirs."""

    trace: TraceConfig | None = None
    """Timeline of all processes, for `medarc_train trace`. None records none."""

    model: SharedModelConfig | None = None
    """The model of trainer, orchestrator and inference. None keeps their own settings."""

    algorithm: Algorithm = "default"
    """A published algorithm. Fills in keys of `trainer.loss`, `trainer.minibatches`, `orchestrator.advantage` and
    `orchestrator.buffer` that the config leaves out. `default` fills in none."""

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
    """The teacher's server. None starts none, unless `deployment.num_teacher_gpus` is set: it is then as
    `[inference]`."""

"""What a run of `rl` is made of: the settings that its components share, and the components."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.algorithms import Algorithm
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import Device
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import BaseConfig


class SharedLogConfig(BaseConfig):
    """Logs of trainer and orchestrator. A value here wins over theirs; None leaves them alone."""

    level: str | None = "info"
    """Level of both."""

    file: bool | None = True
    """Whether both log to files as well."""

    json_logging: bool = False
    """Whether both write one JSON object a line."""


class SharedCheckpointConfig(BaseConfig):
    """Checkpoints of trainer and orchestrator. A value here wins over theirs; None leaves them alone."""

    interval: int | None = Field(None, ge=1)
    """Steps between two."""

    resume_step: int | None = Field(None, ge=-1)
    """Step to continue from; -1 is the latest."""

    keep_last: int | None = Field(None, ge=1)
    """Keep the newest n."""

    keep_interval: int | None = Field(None, ge=1)
    """Keep multiples of n for ever."""


class SharedWandbConfig(BaseConfig):
    """Weights & Biases of trainer and orchestrator."""

    project: str | None = "prime-rl"
    """Project of both; None leaves theirs alone."""

    name: str | None = None
    """Name of the run; `-trainer` and `-orchestrator` are added. None leaves theirs alone."""

    offline: bool | None = False
    """Write locally, upload nothing; only true reaches both."""


class SharedModelConfig(BaseConfig):
    """The model of trainer, orchestrator and inference."""

    name: str = "Qwen/Qwen3-0.6B"
    """Hugging Face model id, or a directory."""


class SharedWeightBroadcastConfig(BaseConfig):
    """How weights travel from the trainer to the inference servers."""

    type: Literal["nccl", "filesystem"] = "filesystem"
    """Through memory (NCCL, on a CPU gloo; needs `max_async_level` 1), or through files."""

    port: int = 29501
    """NCCL: port of the rendezvous."""

    timeout: int = Field(1200, ge=1)
    """NCCL: limit in seconds."""


class BaseDeploymentConfig(BaseConfig):
    """Where the run's components run."""

    gpus_per_node: int = 8
    """GPUs of a node."""


class SingleNodeDeploymentConfig(BaseDeploymentConfig):
    """One node, its GPUs split among the components."""

    type: Literal["single_node"] = "single_node"
    """One node."""

    num_train_gpus: int = Field(1, ge=1)
    """GPUs of the trainer."""

    num_infer_gpus: int = Field(1, ge=0)
    """GPUs of the inference server."""

    num_teacher_gpus: int | None = Field(None, ge=0)
    """GPUs of the teacher's server; None starts none."""

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

    num_train_nodes: int = Field(ge=1)
    """Nodes of the trainer."""

    num_infer_nodes: int = Field(ge=1)
    """Nodes of the inference servers."""

    num_teacher_nodes: int | None = None
    """Nodes of the teacher's server; must stay None."""

    nodes_per_fsdp_group: int | None = Field(None, ge=1)
    """Nodes that share one copy of the model; None shares it among all."""

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.num_teacher_nodes is not None:
            raise ValueError("num_teacher_nodes must stay None: a teacher's server runs on a single node only")
        return self


DeploymentConfig = Annotated[SingleNodeDeploymentConfig | MultiNodeDeploymentConfig, Field(discriminator="type")]


class SharedSettings(BaseConfig):
    """What `rl` decides for its components; `propagate` writes it into their sections."""

    output_dir: Path = Path("outputs")
    """The run's directory; the orchestrator gets `run_default` in it."""

    log: SharedLogConfig = SharedLogConfig()
    """Logs of trainer and orchestrator."""

    ckpt: SharedCheckpointConfig | None = None
    """Checkpoints of trainer and orchestrator; None leaves theirs alone."""

    wandb: SharedWandbConfig | None = None
    """Weights & Biases of trainer and orchestrator; None leaves theirs alone."""

    model: SharedModelConfig | None = None
    """The model of trainer, orchestrator and inference; None leaves theirs alone."""

    algorithm: Algorithm = "default"
    """A published algorithm: fills the keys of `trainer.loss`, `trainer.minibatches`, `orchestrator.advantage` and
    `orchestrator.buffer` that the config leaves out. `default` fills none."""

    max_steps: int | None = None
    """Steps to train; None leaves trainer and orchestrator alone."""

    seq_len: int | None = Field(None, ge=1)
    """Sequence length of trainer and orchestrator where they set none."""

    max_async_level: int | None = Field(None, ge=0)
    """Async level of trainer and orchestrator; None leaves theirs alone."""

    weight_broadcast: SharedWeightBroadcastConfig | None = None
    """How weights travel; None leaves the components' own settings alone."""

    bench: bool = False
    """Benchmark mode of trainer and orchestrator."""

    deployment: DeploymentConfig = SingleNodeDeploymentConfig()
    """GPUs and nodes."""

    inference_gpu_ids: list[int] | None = Field(None, min_length=1)
    """GPUs of the inference server, by id; sets `deployment.num_infer_gpus`. None takes the first visible ones."""

    trainer_gpu_ids: list[int] | None = Field(None, min_length=1)
    """GPUs of the trainer, by id (they may be the server's); sets `deployment.num_train_gpus`. None takes the next."""

    device: Device = "auto"
    """Where every component runs: `auto` takes GPUs when there are any."""


class RunSections(SharedSettings):
    """The shared settings, and a section for each component."""

    trainer: TrainerConfig
    """The trainer; may be empty."""

    orchestrator: OrchestratorConfig
    """The orchestrator; may be empty."""

    inference: InferenceConfig | None = None
    """The inference server; None starts none and uses `orchestrator.client.base_url`."""

    teacher_inference: InferenceConfig | None = None
    """The teacher's server; None starts none."""

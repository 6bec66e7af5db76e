"""Sections that several components share."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from prime_rl.configs.ranges import LARGEST, Count, Port, Seconds, WholeNumber
from prime_rl.utils.pydantic_config import BaseConfig

ServerType = Literal["vllm", "openai"]
Device = Literal["auto", "cuda", "cpu"]
FileAccess = Literal["owner", "group", "umask"]

TEACHER_ELSEWHERE = (
    "a run on several nodes starts no teacher: start its server yourself, such as with `inference` on another node, "
    "and set orchestrator.teacher_model.client.base_url"
)
"""Why a run on several nodes has no teacher of its own, and what to do."""


def _of_a_function(path: str) -> str:
    if not re.fullmatch(r"[^.:/\s]+(\.[^.:/\s]+)*[.:][^.:/\s]+", path):
        raise ValueError(f"is not the path of a function: write module:function (got {path!r})")
    return path


ImportPath = Annotated[str, AfterValidator(_of_a_function)]
"""A function: `module:function` or `package.module:function`. A dot instead of the colon works too."""


def _with_scheme(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"is not a URL: write http://host:port/v1 (got {url!r})")
    return url


Url = Annotated[str, AfterValidator(_with_scheme)]
"""`http://` or `https://`."""


def _host(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})", name) or ".." in name:
        raise ValueError(f"is not a host name: write it without scheme and port, such as inference.svc (got {name!r})")
    return name


_SECRET_HEADER = re.compile(r"auth|cookie|credential|key|password|secret|token", re.IGNORECASE)


def _without_secrets(headers: dict[str, str]) -> dict[str, str]:
    """Refuse headers whose names promise a secret: a run writes its config to several files."""
    for name in headers:
        if _SECRET_HEADER.search(name):
            raise PydanticCustomError(
                "secret_header",
                "would write the value of {name} to the files of the run: put the value into an environment variable, "
                'and set headers_from_env.{name} = "NAME" instead',
                {"name": name},
            )
    return headers


class SlurmConfig(BaseConfig):
    """Submit the run to Slurm instead of starting it. `medarc_slurm` has more options; they win."""

    job_name: str = "prime-rl"
    """Name of the job. Not set, it is made of the file's name."""

    project_dir: Path = Path()
    """Directory that the job runs in, with `.venv`."""

    template_path: Path | None = None
    """Jinja2 template of the batch script, with PRIME-RL's variables. None takes ours."""

    partition: str = "cluster"
    """Partition. Not set, the cluster chooses."""


class BaseModelConfig(BaseConfig):
    """A model: the keys that every component has."""

    name: str = "Qwen/Qwen3-0.6B"
    """Hugging Face model id, or a directory."""

    trust_remote_code: bool = False
    """Run code that comes with the model or its tokenizer."""


class ElasticConfig(BaseConfig):
    """Inference servers found through DNS. Read by the orchestrator's client."""

    hostname: Annotated[str, AfterValidator(_host)]
    """DNS name that resolves to the servers, such as a headless Kubernetes service. Only its IPv4 addresses are used,
    or its IPv6 addresses if it has no others."""

    port: Port = 8000
    """Port of every server."""

    sync_interval: float = Field(5.0, gt=0, le=LARGEST)
    """Seconds between two DNS lookups, and between two attempts to bring up a server that is not ready."""

    empty_timeout: Seconds = 1800
    """Seconds to wait while no server is ready, before the run fails. Until the first server is ready,
    `client.startup_timeout` is the limit."""


class ClientConfig(BaseConfig):
    """How the orchestrator reaches inference servers."""

    timeout: Seconds = 1200
    """Timeout of one request, in seconds."""

    startup_timeout: Seconds = 1800
    """Seconds to wait at the start for a server to become ready."""

    base_url: list[Url] = Field(["http://localhost:8000/v1"])
    """URLs of OpenAI-compatible servers. Each new group of rollouts goes to the least busy one."""

    api_key_var: str = "VLLM_API_KEY"
    """Environment variable that holds the API key."""

    headers: Annotated[dict[str, str], AfterValidator(_without_secrets)] = Field({})
    """Headers added to every request. They are written to the run's files; see `headers_from_env` for secrets."""

    headers_from_env: dict[str, str] = Field({})
    """More headers, as the names of the environment variables that hold their values."""

    skip_model_check: bool = False
    """Skip the check that the server serves the model."""

    elastic: ElasticConfig | None = None
    """Find the servers through DNS instead of `base_url`."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if not self.base_url and self.elastic is None:
            raise ValueError("base_url is empty: name a server")
        return self

    @property
    def is_elastic(self) -> bool:
        return self.elastic is not None


class StallConfig(BaseConfig):
    """When the launcher ends a run because a process hangs. Read by the launcher."""

    timeout_s: Seconds | None = 1800
    """Seconds without progress of a process, and of what it waits for, after which the run ends with exit code 1.
    Progress is, for example, a row of a batch, a model call, a rollout or a generated token. None disables it."""

    startup_timeout_s: Seconds | None = 7200
    """The same limit for a process that is starting: imports, loading, compilation and the first step.
    None disables it."""

    stopped_timeout_s: Seconds | None = 60
    """Seconds that a process may be stopped by a signal, such as SIGSTOP. None disables it."""


class EarlyStopConfig(BaseConfig):
    """Ends a run early, as `max_steps` would: with a last checkpoint, exported weights and exit code 0. The rules
    compare validation losses in SFT, evaluations in RL (`orchestrator.eval.metric`)."""

    patience: Count | None = None
    """End after this number of evaluations in a row without improvement. None disables the rule."""

    min_delta: float = Field(0.0, ge=0)
    """`patience` counts an evaluation as improvement if it is better than the best one by more than this."""

    target: float | None = None
    """End after an evaluation that is at least as good as this: at most in SFT, at least in RL. None disables the
    rule."""

    min_entropy: float | None = Field(None, ge=0)
    """RL: end if `entropy/mean`, in nats, is below this for `min_entropy_steps` steps in a row. None disables the
    rule."""

    min_entropy_steps: Count = 10
    """Number of steps that `min_entropy` waits for."""

    constant_reward_steps: int | None = Field(None, ge=2, le=LARGEST)
    """RL: end if `reward/mean` is the same in this number of steps in a row. None disables the rule."""

    @property
    def compares_evaluations(self) -> bool:
        return self.patience is not None or self.target is not None

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if not self.compares_evaluations and self.min_entropy is None and self.constant_reward_steps is None:
            raise ValueError("has no rule: set patience, target, min_entropy or constant_reward_steps")
        return self


class LogConfig(BaseConfig):
    """Log lines on the terminal and in files."""

    level: str = "info"
    """Log level of this process."""

    vf_level: str = "info"
    """Log level of the verifiers library."""

    file: bool = True
    """Also log to a file in the output directory."""

    env_worker_logs: bool = False
    """Write a log file for each environment worker."""

    log_data: bool = False
    """SFT: log the first sample."""

    json_logging: bool = False
    """Write one JSON object per line."""


class LogExtrasConfig(BaseConfig):
    """Samples and distributions to send to a monitor."""

    samples: bool = False
    """Send prompts and answers. They may hold patient data, so the default is false; in PRIME-RL it is true."""

    distributions: bool = True
    """Send distributions of rewards and advantages."""

    interval: Count = 10
    """Steps between two uploads."""


class WandbConfig(BaseConfig):
    """Weights & Biases."""

    project: str = "prime-rl"
    """Project name."""

    name: str | None = None
    """Run name. None lets W&B choose."""

    offline: bool = False
    """Write locally and upload nothing."""

    id: str | None = None
    """Id of the run to continue."""


class WandbWithExtrasConfig(WandbConfig):
    """Weights & Biases, with samples and distributions."""

    log_extras: LogExtrasConfig | None = LogExtrasConfig()
    """Samples and distributions to send. None sends none."""


class TensorBoardConfig(BaseConfig):
    """TensorBoard: event files."""

    directory: Path | None = None
    """Directory of the event files; each part of the run has a folder in it. None: `tensorboard` in the run's
    directory."""


class SinkConfig(BaseConfig):
    """What the other sinks have in common."""

    project: str = Field("prime-rl", min_length=1)
    """Project that the run belongs to."""

    name: str | None = Field(None, min_length=1)
    """Name of the run; in RL, `-trainer` and `-orchestrator` are appended. None takes the run directory's name."""


class TrackioConfig(SinkConfig):
    """Trackio: a SQLite file, or a Hugging Face Space."""

    directory: Path | None = None
    """Directory of the database. None: `trackio` in the run's directory."""

    space: str | None = Field(None, min_length=1)
    """Id of the Hugging Face Space to send metrics to. None keeps them on this machine."""


class SwanLabConfig(SinkConfig):
    """SwanLab: files for a later `swanlab sync`, or its server."""

    directory: Path | None = None
    """Directory of the files. None: `swanlab` in the run's directory."""

    online: bool = False
    """Send metrics to the server that `swanlab login` gives access to."""


def _without_password(uri: str) -> str:
    if re.match(r"[^/]*//[^/]*@", uri):
        raise PydanticCustomError(
            "secret_in_uri",
            "would write a password to the files of the run: leave user and password out, and export "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )
    if not re.match(r"(https?|sqlite|databricks)(://|$)", uri):
        raise PydanticCustomError("mlflow_uri", "is not an address of MLflow: write http://host:port or sqlite:///FILE")
    return uri


class MlflowConfig(SinkConfig):
    """MLflow: a SQLite file, or a tracking server."""

    uri: Annotated[str, AfterValidator(_without_password)] | None = None
    """Tracking server or database. None: `mlflow.db` in the run's directory. `project` is the experiment."""


class MonitorConfig(BaseConfig):
    """More places for the metrics. Each table turns one on."""

    tensorboard: TensorBoardConfig | None = None
    """TensorBoard."""

    trackio: TrackioConfig | None = None
    """Trackio."""

    swanlab: SwanLabConfig | None = None
    """SwanLab."""

    mlflow: MlflowConfig | None = None
    """MLflow."""


class TraceConfig(BaseConfig):
    """A timeline of what each process does. Read by the launcher. `trace_path` is PyTorch's profiler."""

    max_mib: Count = 256
    """Size in MiB at which the file of a process ends."""


class PrimeMonitorConfig(BaseConfig):
    """The monitor of the Prime Intellect platform."""

    base_url: str = "https://api.primeintellect.ai/api/internal/rft"
    """Root URL of its API."""

    api_key_var: str = "PRIME_API_KEY"
    """Environment variable that holds the API key."""

    log_extras: LogExtrasConfig | None = LogExtrasConfig()
    """Samples and distributions to send. None sends none."""


class HeartbeatConfig(BaseConfig):
    """A URL that receives a GET request after every step."""

    url: str
    """URL of the request."""


class MetricsServerConfig(BaseConfig):
    """Prometheus metrics and health over HTTP."""

    port: Port = 8000
    """Port to listen on. `rl` takes the inference server's port plus 2 for the trainer, plus 3 for the orchestrator."""

    host: str = "127.0.0.1"
    """Address to bind. 0.0.0.0 listens on all addresses of the machine."""

    public: bool = False
    """Serve `/metrics` without a key."""


class BaseTransportConfig(BaseConfig):
    """Base of the transports that carry rollouts from the orchestrator to the trainer."""


class FileSystemTransportConfig(BaseTransportConfig):
    """Sends rollouts as files in the output directory."""

    type: Literal["filesystem"] = "filesystem"
    """Files."""


class ZMQTransportConfig(BaseTransportConfig):
    """Sends rollouts through ZeroMQ sockets."""

    type: Literal["zmq"] = "zmq"
    """ZeroMQ sockets."""

    host: str = "localhost"
    """Host of the socket."""

    port: int = Field(5555, ge=1, le=65534)
    """First of the ports."""

    hwm: WholeNumber = 10
    """High-water mark of the socket, in messages."""


TransportConfig = Annotated[FileSystemTransportConfig | ZMQTransportConfig, Field(discriminator="type")]

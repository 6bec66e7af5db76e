"""The inference server: root of `inference`, and `[inference]` and `[teacher_inference]` of `rl`."""

import json
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from prime_rl.configs.ranges import Count, NaturalSeed, Processes
from prime_rl.configs.shared import BaseModelConfig, Device
from prime_rl.configs.surface.root import RootConfig
from prime_rl.utils.pydantic_config import BaseConfig, derive

All2AllBackend = Literal[
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "flashinfer_all2allv",
    "naive",
    "pplx",
]


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM accepts."""


_TOOL_CALL_PARSERS = (
    ("zai-org/GLM-4.5", "glm45"),
    ("zai-org/GLM-4.7", "glm47"),
    ("MiniMaxAI/MiniMax-M2", "minimax_m2"),
    ("PrimeIntellect/INTELLECT-3", "hermes"),
    ("Qwen/Qwen3", "hermes"),
)
"""Parsers of model families, by the prefix of their hub names."""


class ServerConfig(BaseConfig):
    """Where the server listens."""

    host: str | None = None
    """Address to listen on. None is 127.0.0.1; 0.0.0.0 listens on all addresses of the machine."""

    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on."""

    public_metrics: bool = False
    """Serve `/metrics` without the server's key."""

    @property
    def address(self) -> str:
        return self.host or "127.0.0.1"


class ParallelConfig(BaseConfig):
    """How the server's GPUs share the work. On a CPU, the embedded engine uses the cores of `tp * dp` processes."""

    tp: Processes = 1
    """Tensor-parallel size: number of GPUs that hold one copy of the model."""

    dp: Processes = 1
    """Data-parallel size: number of copies of the model."""

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"tp={self.tp} dp={self.dp}"


class ModelConfig(BaseModelConfig):
    """The served model."""

    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Dtype of weights and activations. `auto` is the model's own on a GPU and float32 on a CPU, as in the trainer."""

    max_model_len: Count | None = None
    """Context length in tokens. None takes the model's own."""

    enforce_eager: bool = False
    """Do not use CUDA graphs. vLLM does not compile the model either."""

    tool_call_parser: str | None = "auto"
    """Parser of the model's tool calls. `auto` chooses by the model's name or its chat template; None parses no tool
    calls."""

    reasoning_parser: str | None = None
    """vLLM's reasoning parser. None parses no reasoning."""

    chat_template: str | None = None
    """Chat template that replaces the model's own: Jinja text, the path of a file, or `chatml`."""

    language_model_only: bool = False
    """Serve only the language model of a checkpoint with a vision tower: no tower is loaded, and images are refused."""

    allowed_local_media_path: Path | None = None
    """Folder with images that requests may name, as `file:///data/scans/7.png`. None: they send images as data URLs."""

    rope_scaling: dict[str, Any] | str | None = None
    """RoPE scaling, passed to vLLM. None takes the model's own."""

    @property
    def chosen_tool_call_parser(self) -> str | None:
        """`tool_call_parser`, or with `auto` the parser of a known model family; None if the name says nothing."""
        if self.tool_call_parser != "auto":
            return self.tool_call_parser
        return next((parser for prefix, parser in _TOOL_CALL_PARSERS if self.name.startswith(prefix)), None)


_ONE_SERVER = "a server runs on parallel.tp x parallel.dp GPUs of one node"
_NOT_THE_USERS = {
    "worker_extension_cls": "ours loads the trainer's weights",
    "weight_transfer_config": "weight_broadcast.type says how weights arrive",
    "logprobs_mode": "the trainer needs log-probabilities of the distribution that was sampled from",
    "max_logprobs": "the server's routes have a limit of their own",
    "served_model_name": "requests name the model as model.name does",
    "hf_token": "a config is written to the run's directory: export HF_TOKEN",
    **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size", "nnodes", "device_ids"), _ONE_SERVER),
}
"""Engine arguments of vLLM that a config cannot set, and why."""


def checked_vllm_options(options: dict[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    """Engine arguments of vLLM, with underscores in their names. `ours` says of arguments that we set what to do.

    Raises:
        ValueError: we set an argument, or its value is no JSON.
    """
    options = {name.replace("-", "_"): value for name, value in options.items()}
    taken = {**ours, **_NOT_THE_USERS}
    if faults := [f"{name} cannot be set here: {taken[name]}" for name in sorted(options.keys() & taken.keys())]:
        raise ValueError("; ".join(faults))
    try:
        json.dumps(options)
    except TypeError as error:
        raise ValueError(f"vLLM reads JSON ({error})") from error
    return options


class WeightBroadcastConfig(BaseConfig):
    """How new weights reach the server."""

    type: Literal["nccl", "filesystem"] = "filesystem"
    """`nccl`: from the trainer's memory, over NCCL, or gloo on a CPU. `filesystem`: from files."""


class InferenceConfig(RootConfig):
    """The inference server. Read by `inference`."""

    component: ClassVar[str] = "inference"

    server: ServerConfig = ServerConfig()
    """Where the server listens."""

    model: ModelConfig = ModelConfig()
    """The served model."""

    parallel: ParallelConfig = ParallelConfig()
    """Tensor and data parallel sizes."""

    enable_lora: bool = False
    """Serve LoRA adapters."""

    max_loras: Count = 8
    """Maximum number of adapters in one batch."""

    max_cpu_loras: Count = 100
    """Maximum number of loaded adapters; another one is refused. vLLM needs at least `max_loras`."""

    max_lora_rank: Count | None = None
    """Maximum rank of an adapter, rounded up to a size that vLLM supports (at most 512). None is 16."""

    enable_prefix_caching: bool | None = None
    """Reuse the keys and values of prompt prefixes. None leaves it to the engine; the embedded engine reuses them."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Fraction of the GPU's memory that the engine may use. On a CPU the default leaves most of the machine's memory
    free; any other value is the fraction that vLLM uses."""

    api_server_count: Processes = 1
    """Number of HTTP server processes. Raised to `parallel.dp`; always 1 with LoRA."""

    seed: NaturalSeed = 0
    """Seed of the engine."""

    enable_expert_parallel: bool = False
    """Split the experts of an MoE model over the GPUs."""

    all2all_backend: All2AllBackend = "allgather_reducescatter"
    """How tokens reach their experts."""

    enable_eplb: bool = False
    """Balance the load over the experts."""

    enable_return_routed_experts: bool = False
    """Answer with the experts that every token was routed to, for `trainer.enable_router_replay`."""

    weight_broadcast: WeightBroadcastConfig = WeightBroadcastConfig()
    """How new weights arrive."""

    enable_sleep_mode: bool = False
    """Answer `/sleep`, which frees the GPU's memory until the next weights arrive. In `rl`, the server sleeps while the
    trainer computes: for one GPU that both share. Needs `max_async_level = 0` there."""

    device: Device = "auto"
    """Where to run. `auto` uses a GPU if there is one."""

    backend: Literal["auto", "vllm", "embedded"] = "auto"
    """The engine. `auto` is vLLM if it is installed and a GPU is visible; otherwise the embedded engine."""

    vllm: dict[str, Any] = Field({})
    """More engine arguments of vLLM, by its own names: `max_num_seqs = 64`, `kv_cache_dtype = "fp8"`,
    `speculative_config = { method = "ngram", num_speculative_tokens = 4 }`. Those that other keys set are refused."""

    @field_validator("vllm")
    @classmethod
    def _check_vllm(cls, options: dict[str, Any]) -> dict[str, Any]:
        return checked_vllm_options(options, {name: f"set {key}" for name, key in keys_by_vllm_name().items()})

    @model_validator(mode="after")
    def _raise_lora_rank(self) -> Self:
        if self.max_lora_rank is not None:
            fitting = [rank for rank in LORA_RANKS if rank >= self.max_lora_rank]
            if not fitting:
                raise ValueError(f"max_lora_rank ({self.max_lora_rank}) is above {LORA_RANKS[-1]}, vLLM's largest")
            derive(self, "vLLM has buffers for some ranks only", max_lora_rank=fitting[0])
        return self

    @model_validator(mode="after")
    def _match_api_servers(self) -> Self:
        # An adapter is loaded through one server process and must reach every engine, so LoRA allows only one.
        count = 1 if self.enable_lora else max(self.api_server_count, self.parallel.dp)
        derive(self, "enable_lora allows one server, otherwise parallel.dp needs as many", api_server_count=count)
        return self

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        if self.enable_sleep_mode and (self.parallel.dp > 1 or self.api_server_count > 1):
            dp, count = self.parallel.dp, self.api_server_count
            raise ValueError(
                f"enable_sleep_mode needs one server process: parallel.dp = 1 and api_server_count = 1 (got {dp} and "
                f"{count})"
            )
        return self

    def to_vllm(self) -> Namespace:
        """These settings under the names of vLLM's own arguments."""
        values: dict[str, Any] = {}
        for name, key in keys_by_vllm_name().items():
            table, _, leaf = key.rpartition(".")
            values[name] = getattr(getattr(self, table) if table else self, leaf)
        values |= {"host": self.server.address, "logprobs_mode": "processed_logprobs"}
        optional = ("reasoning_parser", "rope_scaling", "chat_template", "allowed_local_media_path")
        dropped = {name for name in optional if values[name] is None}
        return Namespace(**{name: value for name, value in values.items() if name not in dropped})


@cache
def keys_by_vllm_name() -> Mapping[str, str]:
    """Keys of `[inference]` that set an argument of vLLM, by the argument's name."""
    not_arguments = {"toml_files", "server", "model", "parallel", "weight_broadcast", "device", "backend", "vllm"}
    return {
        **{name: name for name in InferenceConfig.model_fields if name not in not_arguments},
        **{name: f"model.{name}" for name in ModelConfig.model_fields if name != "name"},
        "model": "model.name",
        "host": "server.host",
        "port": "server.port",
        "tensor_parallel_size": "parallel.tp",
        "data_parallel_size": "parallel.dp",
    }

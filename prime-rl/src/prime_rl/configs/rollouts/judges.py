"""Judges and the teacher: frozen models, which a run serves and does not train. Environments ask the judges.

`[judge.NAME]` of `rl`, `orchestrator` and `eval`, `[eval.judge.NAME]` of `sft`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from prime_rl.configs.inference import InferenceConfig, checked_vllm_options, keys_by_vllm_name
from prime_rl.configs.ranges import Count, Processes, Seconds, WholeNumber
from prime_rl.configs.shared import Device, Url
from prime_rl.utils.pydantic_config import BaseConfig

if TYPE_CHECKING:
    from prime_rl.configs.rollouts.environments import EnvConfig

Price = Annotated[float, Field(ge=0, le=1_000_000)]


def _judge_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,40}", name):
        raise ValueError(f"is not a valid name for a judge: use lower-case letters, digits, - and _ (got {name!r})")
    return name


JudgeName = Annotated[str, AfterValidator(_judge_name)]


class JudgeEngineConfig(BaseConfig):
    """The engine of a judge that the run starts. The keys are those of `[inference]`."""

    backend: Literal["auto", "vllm", "embedded"] = "auto"
    """The engine. `auto` is vLLM if it is installed and a GPU is visible; otherwise the embedded engine."""

    tp: Processes = 1
    """Number of GPUs that hold one copy of the model."""

    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Dtype of weights and activations."""

    max_model_len: Count | None = None
    """Context length in tokens. None takes the model's own."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Fraction of the GPU's memory that the engine may use. With `gpus = 0`, leave room for the other engine: this and
    `inference.gpu_memory_utilization` add up to less than 1."""

    enforce_eager: bool = False
    """Do not use CUDA graphs. vLLM does not compile the model either."""

    chat_template: str | None = None
    """Chat template that replaces the model's own: Jinja text, the path of a file, or `chatml`."""

    reasoning_parser: str | None = None
    """vLLM's reasoning parser. None parses no reasoning."""

    trust_remote_code: bool = False
    """Run code that comes with the model or its tokenizer."""

    vllm: dict[str, Any] = Field({})
    """More engine arguments of vLLM, by its own names, as in `[inference.vllm]`."""

    @field_validator("vllm")
    @classmethod
    def _check_vllm(cls, options: dict[str, Any]) -> dict[str, Any]:
        leaves = {name: key.rpartition(".")[2] for name, key in keys_by_vllm_name().items()}
        own = {name: f"set engine.{leaf}" for name, leaf in leaves.items() if leaf in cls.model_fields}
        return checked_vllm_options(options, dict.fromkeys(leaves, "it follows from the judge's other keys") | own)


class JudgeConfig(BaseConfig):
    """A frozen model that environments ask. The run starts it, unless `base_url` names a server."""

    model: str
    """Hugging Face model id or directory; with `base_url`, the name that the server knows."""

    base_url: Url | None = None
    """URL of an OpenAI-compatible server, such as `https://api.openai.com/v1`. None starts one with the run."""

    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key for `base_url`. If it is not set, requests have no key."""

    gpus: int = Field(1, ge=0, le=1024)
    """Number of separate GPUs, if the run starts it. 0 shares those of the inference server. No effect on a CPU."""

    device: Device = "auto"
    """Where it runs, if the run starts it. `auto` is as the rest of the run; `cpu` needs no GPU."""

    engine: JudgeEngineConfig = JudgeEngineConfig()
    """Its engine, if the run starts it."""

    sampling: dict[str, Any] = Field({"temperature": 0.0})
    """Arguments of every request that does not set them itself, such as `temperature` and `max_tokens`."""

    max_concurrent: Count = 32
    """Maximum number of requests at once. More wait."""

    requests_per_minute: Count | None = None
    """Maximum number of requests per minute, retries included, evenly spread. None sets no limit."""

    timeout_s: Seconds = 300
    """Seconds that a call may take, with its retries. The time that it waits for its first turn does not count."""

    startup_timeout_s: Seconds = 1800
    """Seconds to wait at the start until the judge answers."""

    max_retries: WholeNumber = 8
    """Retries of a call after no answer, an unusable one, or one of status 408, 409, 425, 429 or 5xx."""

    tolerated_failures: WholeNumber = 0
    """Failed calls in a row, each after its retries, that do not end the run. The environment's code gets an error."""

    cache: bool = True
    """Keep answers on disk. The same request to the same model is then answered from there."""

    cache_dir: Path | None = None
    """Directory of the cache. Several runs may share it. None is `judges/` in the run's directory."""

    prompt_price: Price = 0.0
    """Price of a million prompt tokens, in any currency. It only serves the metrics."""

    completion_price: Price = 0.0
    """Price of a million completion tokens, in the same currency."""

    @field_validator("sampling")
    @classmethod
    def _refuse_what_a_request_has(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted({"model", "messages", "stream"} & sampling.keys()):
            raise ValueError(f"each request sets {', '.join(taken)} itself: remove it")
        return sampling

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.base_url is not None:
            # By value: the config that a run hands to its processes has every key.
            places = {"device": "auto", "engine": JudgeEngineConfig(), "gpus": 1}
            ours = [name for name, default in places.items() if getattr(self, name) != default]
            if ours:
                raise ValueError(f"base_url names a running server: remove it, or {', '.join(ours)}")
        elif self.gpus % self.engine.tp:
            raise ValueError(f"gpus ({self.gpus}) is not a multiple of engine.tp ({self.engine.tp})")
        return self

    @property
    def is_ours(self) -> bool:
        """Whether the run starts it."""
        return self.base_url is None

    def gpus_on(self, device: Device) -> int:
        """Number of GPUs of its own in a run on `device`."""
        return self.gpus if self.is_ours and "cpu" not in (device, self.device) else 0

    def server(self, device: Device) -> InferenceConfig:
        """The config of its server, in a run on `device`."""
        engine = self.engine.model_dump()
        tp = engine.pop("tp")
        own = {name: engine.pop(name) for name in ("backend", "gpu_memory_utilization", "vllm")}
        return InferenceConfig.model_validate(
            {
                "model": {"name": self.model, **engine},
                "parallel": {"tp": tp, "dp": max(1, self.gpus // tp)},
                "device": device if self.device == "auto" else self.device,
                **own,
            }
        )


Judges = dict[JudgeName, JudgeConfig]


def judge_faults(key: str, envs: Sequence[EnvConfig], judges: Mapping[str, JudgeConfig]) -> Iterator[str]:
    """One line for each environment that names a judge that is not there. `key` is that of the environments."""
    for index, env in enumerate(envs):
        if env.judge is not None and env.judge not in judges:
            known = f"there is {', '.join(judges)}" if judges else "there is none"
            yield f"{key}[{index}].judge = {env.judge!r}: no [judge.{env.judge}]; {known}"


def started_judges(judges: Mapping[str, JudgeConfig]) -> dict[str, JudgeConfig]:
    """Those that the run starts."""
    return {name: judge for name, judge in judges.items() if judge.is_ours}


# Models that a run serves and does not train: judges and the teacher.


TEACHER = "teacher_inference"
"""Name of the process that serves the teacher, of its log and of its config."""
TEACHER_AT_ONCE = 64
"""Samples that each server of a teacher scores at once."""


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A frozen model and the server that the run starts for it."""

    process: str
    """Name of its process, of its log and of its config."""
    title: str
    """For tables: `judge grader` or `teacher`."""
    server: InferenceConfig
    gpus: int
    """GPUs of its own. 0: none on a CPU, those of the inference server otherwise."""
    at_once: int
    """Requests that it answers at once."""
    longest_tokens: int | None = None
    """Longest sequence that it reads, if the config tells."""


def judge_process_name(judge: str) -> str:
    """Name of the process that serves a judge, of its log and of its config."""
    return f"judge_{judge}"


def frozen_judges(judges: Mapping[str, JudgeConfig], device: Device) -> tuple[FrozenModel, ...]:
    """The judges that a run on `device` starts."""
    return tuple(
        FrozenModel(
            judge_process_name(name), f"judge {name}", judge.server(device), judge.gpus_on(device), judge.max_concurrent
        )
        for name, judge in started_judges(judges).items()
    )

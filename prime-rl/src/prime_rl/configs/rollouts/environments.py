"""Environments for training and for evaluation, and when they are evaluated during a training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from prime_rl.configs.ranges import Count, CountOrAll, Fraction, Port, Seconds, SessionSeconds, WholeNumber
from prime_rl.configs.rollouts.sampling import EvalSamplingConfig
from prime_rl.utils.pydantic_config import BaseConfig, derive

# Environments that run an agent.


EXTERNAL = "external"
"""As an agent: processes that somebody else starts."""

ROW_FILES = (".json", ".jsonl", ".parquet")
"""Ends of datasets that are files. Others are functions."""

Samples = Literal["interleaved", "separate"]


@dataclass(frozen=True, slots=True)
class AgentKeys:
    """What an environment with `agent` or `workflow` is made of."""

    target: str
    """`module:object`, or `external`."""
    dataset: str
    eval_dataset: str | None
    turn_discount: float
    samples: Samples
    timeout_s: float
    port: int | None


_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*[:.][^\W\d]\w*(\.[^\W\d]\w*)*")


class EnvConfig(BaseConfig):
    """An environment of the verifiers library."""

    id: str = "reverse-text"
    """Id of the environment, with or without @version. With `workflow`, only its name: by default the last part of
    that."""

    args: dict[str, Any] = Field({})
    """Arguments of its constructor."""

    name: str | None = None
    """Name in logs and metrics. None takes the id."""

    address: str | None = None
    """Address of a running environment server. None runs the environment in the orchestrator, or with `env_servers` in
    a server that the orchestrator starts."""

    python: Path | None = None
    """Python interpreter of the environment, such as `envs/medqa/.venv/bin/python`: it then runs in a process of its
    own, with the packages of that interpreter. verifiers 0.1.5 to 0.4 may be installed there; with `workflow`, Python
    3.11 or later and the agent's own packages. None takes the run's own."""

    project: Path | None = None
    """Directory of the environment's package, with its `pyproject.toml`. The environment runs as with `python`, in an
    interpreter that uv makes before the run starts and keeps in the user's cache. A new `pyproject.toml` or `uv.lock`
    makes a new one."""

    judge: str | None = None
    """Name of a `[judge.NAME]`. The constructor gets it in those of these arguments that it has: `judge_client`,
    `judge_model`, `judge_sampling_args`, `judge_base_url`, `judge_api_key_var`, `judge_api_key`. With `workflow`, a
    function that is named there gets them with each call."""

    taskset: dict[str, Any] = Field({})
    """Table of a taskset of verifiers v1, as verifiers reads it. Its `id` is that of the environment. Needs `python` or
    `project`."""

    agent: dict[str, Any] = Field({})
    """Table of the agent that plays a taskset of verifiers v1, as verifiers reads it: `harness`, `runtime`, `max_turns`
    and others. By default a chat with the task's tools, in processes on this machine."""

    workflow: str | None = None
    """Code to train instead of a verifiers environment, as `module:object`: an `async def agent(task, client)` that
    returns a reward, a class with `async def run(data)`, or one with `async def arun_episode(engine, data)` that
    returns tensors. `external` lets processes that you start yourself begin sessions over HTTP."""

    agent_dataset: str | None = None
    """Rows for `workflow`: a `.jsonl`, `.json` or `.parquet` file, or `module:function` that returns
    rows."""

    agent_eval_dataset: str | None = None
    """Rows for evaluations. None takes those of `agent_dataset`."""

    agent_turn_discount: Fraction = 1.0
    """Each model call of an agent is worth its own reward plus this times the worth of the next call. 0 gives each call
    its own reward alone. With 1 and one reward for the session, all calls share it."""

    agent_samples: Samples = "interleaved"
    """`interleaved`: one sample for each line of conversation. `separate`: one sample for each model call."""

    agent_timeout_s: SessionSeconds = 3600.0
    """Time limit for an attempt of an agent. One that takes longer is not trained on."""

    agent_port: Port | None = None
    """Port on the loopback interface at which `workflow = "external"` starts sessions. None takes a free one."""

    extra_env_kwargs: dict[str, Any] = Field({})
    """Attributes to set on the environment. The orchestrator adds `seq_len` and `score_rollouts`."""

    max_failed_groups: Fraction = 0.5
    """End the run if more than this fraction of the last 32 groups of this environment failed, all of the first 8, or
    all of a shorter run; those that still run count as good. A group fails if the environment or one of its reward
    functions raises, calls `sys.exit` or gives no finite reward, if its process ends, or after `timeout_s`. 1 leaves it
    to the limit on failures in a row."""

    timeout_s: Seconds | None = None
    """Longest time of a group of rollouts with its scoring, in seconds. A group that takes longer fails and is repeated
    as after any error. A loop without `await` cannot be ended this way: it blocks its whole process. None sets
    no limit."""

    num_workers: Count | None = None
    """Number of processes that run the environment, each a share of the groups. Use it for code that computes, or waits
    without `await`: such code blocks only the groups of its process. Each process loads the environment. None runs it
    in the orchestrator's process, or with `env_servers`, `python`, `project` or `workflow` in one of its own."""

    threads: Count | None = None
    """Number of threads that run reward functions and tools that are a plain `def`. Use it for functions that wait (for
    a server, for example) and share nothing that only one thread at a time may use. None runs them in the event loop,
    one at a time."""

    @property
    def is_agent(self) -> bool:
        """Whether attempts are made by an agent or a workflow."""
        return self.workflow is not None

    @property
    def agent_keys(self) -> AgentKeys:
        """Raises ValueError if there is no agent."""
        target = self.workflow
        if target is None or self.agent_dataset is None:
            raise ValueError("no agent")
        return AgentKeys(
            target,
            self.agent_dataset,
            self.agent_eval_dataset,
            self.agent_turn_discount,
            self.agent_samples,
            self.agent_timeout_s,
            self.agent_port,
        )

    @model_validator(mode="after")
    def _check_agent(self) -> Self:
        set_keys = [
            name
            for name, field in type(self).model_fields.items()
            if name.startswith("agent_") and getattr(self, name) != field.default
        ]
        if not self.is_agent:
            if set_keys:
                raise ValueError(f"{set_keys[0]} needs workflow")
            return self
        target = self.workflow or ""
        if target != EXTERNAL and not _TARGET.fullmatch(target):
            raise ValueError(f"workflow = {target!r}: write module:object, as in my_agents.search:agent")
        if self.agent_dataset is None:
            raise ValueError('workflow needs rows: set agent_dataset, for example agent_dataset = "tasks.jsonl"')
        if self.threads is not None:
            raise ValueError("threads cannot be set together with workflow: plain functions run in threads as it is")
        for name in ("address", "taskset", "agent"):
            if getattr(self, name):
                raise ValueError(f"{name} cannot be set together with workflow: it is for verifiers environments")
        if self.agent_port is not None and target != EXTERNAL:
            raise ValueError('agent_port needs workflow = "external"')
        for name in ("args", "python", "project", "judge", "num_workers"):
            if target == EXTERNAL and getattr(self, name):
                raise ValueError(
                    f'{name} cannot be set together with workflow = "external": the run does not start that program'
                )
        if "id" not in self.model_fields_set:
            derive(self, "it is the name of the agent", id=target.replace(":", ".").rpartition(".")[2])
        return self

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.project is not None and self.python is not None:
            raise ValueError("project and python exclude each other: uv makes the interpreter of a project")
        if (self.taskset or self.agent) and self.project is None and self.python is None:
            raise ValueError(
                "taskset and agent need verifiers v1, which the run's own interpreter does not have: set project or "
                "python"
            )
        places = (("python", self.python), ("project", self.project), ("num_workers", self.num_workers))
        for name, value in places:
            if value is not None and self.address is not None:
                raise ValueError(f"{name} and address exclude each other: at an address, a server runs already")
        if self.threads is not None and (self.taskset or self.agent):
            raise ValueError("threads cannot be set together with taskset or agent: use num_workers")
        if self.judge is not None and self.address is not None:
            raise ValueError("judge and address exclude each other: the server at an address asks its own judge")
        return self


class EvalEnvConfig(EnvConfig):
    """An environment to evaluate on."""

    num_examples: CountOrAll | None = None
    """Number of examples. None or 0 takes the value of `eval`."""

    rollouts_per_example: WholeNumber | None = None
    """Rollouts per example. None or 0 takes the value of `eval`."""

    skip_first: WholeNumber = 0
    """Number of examples to skip at the start."""

    max_retries: WholeNumber = 0
    """Number of retries after a failed rollout."""


def repeated_names(key: str, envs: Sequence[EnvConfig]) -> Iterator[str]:
    """One line for each name that several environments share, in logs and metrics."""
    names = [env.name or env.id for env in envs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{key}: more than one environment is called {name!r}: set `name`"


def has_own_order(env: EnvConfig) -> bool:
    """Whether the order of an environment's rows means something: `rows` with several datasets or with a curriculum."""
    datasets = env.args.get("datasets")
    if env.id != "rows" or not isinstance(datasets, list):
        return False
    return len(datasets) > 1 or any(isinstance(each, dict) and each.get("order") is not None for each in datasets)


# Evaluation and validation during training.


class EvalConfig(BaseConfig):
    """Evaluation during training."""

    env: list[EvalEnvConfig] = Field([EvalEnvConfig()])
    """The environments."""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How rollouts are sampled."""

    num_examples: CountOrAll = -1
    """Examples per environment. -1 is all of them."""

    rollouts_per_example: Count = 1
    """Rollouts per example."""

    interval: Count = 100
    """Policy versions between two evaluations. The last version is always evaluated."""

    eval_base_model: bool = True
    """Also evaluate before the first step."""

    skip_eval_on_resume: bool = Field(
        True, validation_alias=AliasChoices("skip_eval_on_resume", "skip_eval_on_restart")
    )
    """Do not evaluate right after a resume, even if a stop has cut an evaluation short. The last version is evaluated
    nevertheless, unless it has been. Also written `skip_eval_on_restart`."""

    cancel_inflight_rollouts_on_eval: bool = False
    """Cancel training rollouts in flight before an evaluation."""

    metric: str | None = None
    """Metric by which `ckpt.keep_best` and `early_stop` compare versions, such as `eval/NAME/pass@1`; higher is better.
    A score of an environment: `avg@n`, `pass@k`, or the mean of a reward function. None is the mean of `avg@n` over the
    environments."""

    @property
    def compared_metrics(self) -> list[str]:
        """The metrics whose mean compares versions."""
        if self.metric is not None:
            return [self.metric]
        return [f"eval/{env.name or env.id}/avg@{self._rollouts_of(env)}" for env in self.env]

    def metric_faults(self) -> Iterator[str]:
        """Why no evaluation makes `metric`, as far as the config tells. Names of functions are not in it."""
        envs = {env.name or env.id: self._rollouts_of(env) for env in self.env}
        # A name may have slashes, as may that of a function.
        of = (f"eval/{name}/" for name in sorted(envs, key=len, reverse=True))
        prefix = next((each for each in of if (self.metric or "").startswith(each)), None)
        if prefix is None:
            known = ", ".join(f"eval/{name}/avg@{rollouts}" for name, rollouts in envs.items())
            yield f"eval.metric: {self.metric!r} is of none of the environments; there is {known}"
            return
        score, rollouts = (self.metric or "").removeprefix(prefix), envs[prefix.split("/", 1)[1][:-1]]
        powers = [2**exponent for exponent in range(rollouts.bit_length())]
        scores = [f"avg@{rollouts}", *(f"pass@{k}" for k in powers)]
        if score not in scores and not re.fullmatch(r"(reward_parts|metrics)/.+", score):
            listed = ", ".join(f"{prefix}{each}" for each in scores)
            yield (
                f"eval.metric: no evaluation makes {self.metric!r}; there is {listed}, and the environment's "
                "reward_parts/FUNCTION and metrics/FUNCTION"
            )

    def _rollouts_of(self, env: EvalEnvConfig) -> int:
        return env.rollouts_per_example or self.rollouts_per_example


class EvalSaveHFConfig(BaseConfig):
    """A dataset on the Hugging Face hub for evaluation results. No config has this section."""

    dataset_name: str | None = None
    """Dataset."""

    dataset_subset: str | None = None
    """Subset."""

    dataset_split: str | None = None
    """Split."""

    private: bool = False
    """Make the dataset private."""


class ValConfig(BaseConfig):
    """Validation: rolls out the same evaluation examples each time, with the sampling settings of training."""

    num_examples: Count = 16
    """Number of examples."""

    rollouts_per_example: Count = 1
    """Rollouts per example."""

    interval: Count = 10
    """Steps between two validations."""

"""Evaluation of checkpoints: root of `eval`."""

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.ranges import Count, CountOrAll, Seconds, WholeNumber
from prime_rl.configs.rollouts.environments import EvalEnvConfig, repeated_names
from prime_rl.configs.rollouts.judges import Judges, judge_faults
from prime_rl.configs.rollouts.sampling import EvalSamplingConfig
from prime_rl.configs.shared import (
    BaseModelConfig,
    ClientConfig,
    Device,
    FileAccess,
    LogConfig,
    MonitorConfig,
    StallConfig,
    TraceConfig,
    WandbConfig,
)
from prime_rl.configs.storage import KeptRunConfig
from prime_rl.utils.pydantic_config import derive, raise_faults


class EvalClientConfig(ClientConfig):
    """How the evaluation reaches inference servers."""

    timeout: Seconds = 36000
    """Timeout of one request, in seconds."""


class OfflineEvalConfig(KeptRunConfig):
    """Evaluation of a model and its checkpoints. Read by `eval`."""

    component: ClassVar[str] = "eval"

    model: BaseModelConfig = BaseModelConfig()
    """The base model, under the name that the server uses."""

    env: list[EvalEnvConfig] = Field([])
    """The environments. `environment_ids` adds more."""

    judge: Judges = Field({})
    """Judges, by name: `[judge.NAME]`. Environments name theirs in `env[].judge`."""

    environment_ids: list[str] = Field([])
    """Ids of environments, for the command line."""

    environment_args: dict[str, dict[str, Any]] = Field({})
    """Constructor arguments of `environment_ids`, by id."""

    num_examples: list[CountOrAll] = Field([])
    """Number of examples for each environment, or one for all of them. -1 is all examples, and so is an empty list."""

    rollouts_per_example: list[Count] = Field([])
    """Rollouts per example for each environment, or one for all of them. An empty list is 1."""

    max_concurrent: Count | None = 128
    """Maximum number of rollouts at once, over all environments. None sets no limit."""

    weights_dir: Path | None = None
    """Directory of `step_<n>` checkpoints, such as `outputs/weights`. None evaluates only the base model."""

    steps: list[WholeNumber] | None = None
    """Steps of the checkpoints to evaluate. None evaluates all complete ones."""

    watch: bool = False
    """Evaluate checkpoints of `weights_dir` as they appear, until the run that writes them ends."""

    interval: Count | None = None
    """With `watch`: evaluate only the steps that are multiples of this, and the last one. None evaluates all."""

    eval_base: bool = True
    """Evaluate the base model first, as step 0."""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How rollouts are sampled."""

    client: EvalClientConfig = EvalClientConfig()
    """How to reach a running inference server, if `client.base_url` is set."""

    inference: InferenceConfig | None = None
    """The inference server to start. Unless `client.base_url` is set, there is one with default settings."""

    device: Device = "auto"
    """Where the started server runs. `auto` uses a GPU if there is one."""

    output_dir: Path = Path("outputs/eval")
    """Directory of the evaluation. If it holds part of the same evaluation, the rest is added."""

    log: LogConfig = LogConfig()
    """Logs."""

    wandb: WandbConfig | None = None
    """Weights & Biases. None logs only to `metrics.jsonl`."""

    monitor: MonitorConfig = MonitorConfig()
    """TensorBoard, Trackio, SwanLab and MLflow."""

    trace: TraceConfig | None = None
    """Timeline of all processes, for `medarc_train trace`. None records none."""

    file_access: FileAccess = "owner"
    """Who can read the files of the run. `owner`: only you; `group`: your group too; `umask`: as your umask says."""

    stall: StallConfig = StallConfig()
    """When a process that hangs ends the run."""

    dry_run: bool = False
    """Write the resolved config and stop."""

    @model_validator(mode="after")
    def _start_a_server(self) -> Self:
        has_server = "base_url" in self.client.model_fields_set or self.client.is_elastic
        if not has_server and "inference" not in self.model_fields_set:
            derive(self, "client.base_url is empty: give the URL of a server", inference=InferenceConfig())
        return self

    @model_validator(mode="after")
    def _give_the_server_the_model(self) -> Self:
        if self.inference is not None:
            if "device" not in self.inference.model_fields_set:
                derive(self.inference, "device of the evaluation", device=self.device)
            if "name" not in self.inference.model.model_fields_set:
                derive(self.inference.model, "model of the evaluation", name=self.model.name)
            if "trust_remote_code" not in self.inference.model.model_fields_set:
                trusted = self.model.trust_remote_code
                derive(self.inference.model, "model of the evaluation", trust_remote_code=trusted)
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        faults = [*self._list_faults(), *self._step_faults()]
        if not self.env and not self.environment_ids:
            faults.append("there is no environment: give one with `environment_ids` or [[env]]")
        faults += repeated_names("env", [*self.env, *(EvalEnvConfig(id=each) for each in self.environment_ids)])
        faults += judge_faults("env", self.env, self.judge)
        if self.inference is not None and self.inference.model.name != self.model.name:
            faults.append(f"inference.model.name ({self.inference.model.name!r}) is not model.name: leave it out")
        raise_faults(faults)
        return self

    @property
    def environments(self) -> list[EvalEnvConfig]:
        """Every environment, with its own numbers of examples and rollouts."""
        named = [EvalEnvConfig(id=each, args=self.environment_args.get(each, {})) for each in self.environment_ids]
        everyone = [*self.env, *named]
        return [
            env.model_copy(
                update={
                    "num_examples": env.num_examples or _nth(self.num_examples, index, -1),
                    "rollouts_per_example": env.rollouts_per_example or _nth(self.rollouts_per_example, index, 1),
                }
            )
            for index, env in enumerate(everyone)
        ]

    def _list_faults(self) -> list[str]:
        count = len(self.env) + len(self.environment_ids)
        faults = []
        for key in ("num_examples", "rollouts_per_example"):
            values = getattr(self, key)
            if len(values) not in (0, 1, count):
                faults.append(f"{key} has {len(values)} values for {count} environments: give one for each, or one")
        faults += ["num_examples has 0: at least 1, or -1 for all"] if 0 in self.num_examples else []
        unknown = sorted(set(self.environment_args) - set(self.environment_ids))
        faults += [f"environment_args names {each!r}, which is not in environment_ids" for each in unknown]
        return faults

    def _step_faults(self) -> list[str]:
        faults = []
        if self.weights_dir is None and not self.eval_base and not self.watch:
            faults.append("eval_base = false without weights_dir leaves nothing to evaluate")
        if self.weights_dir is None and self.steps is not None:
            faults.append("steps are those of weights_dir: name it too")
        if self.watch and self.weights_dir is None:
            faults.append("watch needs weights_dir: the folder of checkpoints to watch, such as outputs/weights")
        if self.interval is not None and not self.watch:
            faults.append("interval chooses among the checkpoints that appear: it needs watch")
        if self.watch and self.steps is not None:
            faults.append("watch evaluates every checkpoint: leave out steps")
        return faults


def _nth(values: list[int], index: int, default: int) -> int:
    return default if not values else values[index if len(values) > 1 else 0]

"""Evaluation on environments during SFT: its section, its rules, and the evaluation that the launcher starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.ranges import Count, CountOrAll
from prime_rl.configs.rollouts.environments import EvalEnvConfig, repeated_names
from prime_rl.configs.rollouts.judges import Judges, judge_faults, started_judges
from prime_rl.configs.rollouts.sampling import EvalSamplingConfig
from prime_rl.utils.pydantic_config import BaseConfig, derive

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.configs.sft import SFTConfig


class SFTEvalConfig(BaseConfig):
    """Evaluation during SFT. An inference server of its own loads the exported weights, while training goes on."""

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


def evaluation_faults(config: SFTConfig) -> Iterator[str]:
    """Rules of `[eval]` and `[inference]`."""
    evaluation, server = config.eval, config.inference
    if evaluation is None:
        if server is not None:
            yield "[inference] is the server of [eval], which is missing: add [eval], or remove [inference]"
        return
    if not evaluation.env:
        yield "eval has no environment: name one with [[eval.env]]"
    if evaluation.num_examples == 0:
        yield "eval.num_examples is 0: at least 1, or -1 for all"
    yield from repeated_names("eval.env", evaluation.env)
    yield from judge_faults("eval.env", evaluation.env, evaluation.judge)
    yield from _deployment_faults(config)
    if config.model.debug.random_init or config.model.debug.num_layers is not None:
        yield "eval: model.debug trains another model than the server loads from model.name: remove one of them"
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
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.configs.shared import BaseModelConfig

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

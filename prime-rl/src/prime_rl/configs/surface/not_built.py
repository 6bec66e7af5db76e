"""The one list of keys that load, so that users' files resolve, but that no component honours yet."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from prime_rl.configs.surface.root import RootConfig


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """A key that must keep its default, because nothing reads it yet."""

    key: str
    """Dotted, from a component: `trainer.`, `orchestrator.`, `inference.`, `sft.` or `rl.`. A list stands for each of
    its items: `orchestrator.filters.window`."""
    why: str
    """Why, and what to do instead."""
    values: tuple[Any, ...] = ()
    """When only some values are not built, these; empty means every value but the default."""


def _of_both_trainers(key: str, why: str, values: tuple[Any, ...] = ()) -> tuple[NotBuilt, ...]:
    return tuple(NotBuilt(f"{component}.{key}", why, values) for component in ("trainer", "sft"))


NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt("rl.slurm", "submit with `medarc_slurm rl`"),
    NotBuilt("rl.deployment.type", "runs use one node", ("multi_node",)),
    NotBuilt("rl.deployment.num_teacher_gpus", "no teacher yet"),
    NotBuilt("rl.teacher_inference", "no teacher yet"),
    NotBuilt("rl.max_model_len", "set `inference.model.max_model_len`"),
    NotBuilt("sft.slurm", "submit with `medarc_slurm sft`"),
    NotBuilt("sft.deployment.type", "runs use one node", ("multi_node",)),
    *_of_both_trainers("model.attn", "use flash_attention_2, flash_attention_3 or sdpa", ("fa4",)),
    *_of_both_trainers("model.cp", "no context parallelism yet"),
    *_of_both_trainers("model.tp", "no tensor parallelism yet"),
    *_of_both_trainers("model.ep", "no expert parallelism yet"),
    *_of_both_trainers("model.impl", "models come from Transformers", ("custom",)),
    NotBuilt("sft.loss_impl", "use torch, which holds few logits at a time too", ("liger",)),
    *_of_both_trainers("log.env_worker_logs", "no environment worker logs yet"),
    NotBuilt("trainer.log.log_data", "only SFT logs its data"),
    NotBuilt("trainer.ckpt.keep_best", "only SFT validates"),
    NotBuilt("trainer.ckpt.skip_progress", "RL continues with everything it saved"),
    NotBuilt("trainer.ckpt.skip_scheduler", "RL continues with everything it saved"),
    NotBuilt("trainer.ckpt.skip_dataloader", "RL continues with everything it saved"),
    NotBuilt("trainer.weight_broadcast.save_format", "the engines read safetensors", ("torch",)),
    NotBuilt("trainer.max_concurrent_runs", "one run a trainer so far"),
    NotBuilt("trainer.loss.teacher_tau", "no teacher yet"),
    NotBuilt("orchestrator.log.log_data", "only SFT logs its data"),
    NotBuilt("orchestrator.log.env_worker_logs", "no environment worker logs yet"),
    NotBuilt("orchestrator.client.elastic", "list the servers in `client.base_url`"),
    NotBuilt("orchestrator.teacher_model", "no teacher yet"),
    NotBuilt("inference.model.rope_scaling", "set it in the model's config.json"),
    NotBuilt("orchestrator.prime_monitor", "metrics go to metrics.jsonl and W&B"),
    NotBuilt("orchestrator.optim.lr", "one run a trainer so far: set `trainer.optim.lr`"),
    NotBuilt("eval.client.elastic", "list the servers in `client.base_url`"),
    NotBuilt("eval.log.log_data", "only SFT logs its data"),
    NotBuilt("eval.log.env_worker_logs", "no environment worker logs yet"),
)


def unbuilt_faults(config: RootConfig, entries: Sequence[NotBuilt] = NOT_BUILT) -> list[str]:
    """One line for each key of `config` that is set to something that is not built."""
    return [
        f"{_shown(key, value)} is not built yet: {entry.why}"
        for entry in entries
        for key, value in _settings_of(config, entry)
    ]


def refuse_unbuilt(config: RootConfig) -> None:
    """Print those lines and exit with status 2, if there are any."""
    faults = unbuilt_faults(config)
    for fault in faults:
        sys.stderr.write(f"error: {fault}\n")
    if faults:
        raise SystemExit(2)


def _settings_of(config: RootConfig, entry: NotBuilt) -> Iterator[tuple[str, Any]]:
    """Key (as the user of this config writes it) and value, wherever `config` sets what `entry` names."""
    component, *path = entry.key.split(".")
    if component == type(config).component:
        section, prefix = config, ""
    elif component in ("trainer", "orchestrator", "inference") and component in type(config).model_fields:
        section, prefix = getattr(config, component), f"{component}."
    else:
        return
    for key, owner, name in _owners(section, path):
        value = getattr(owner, name)
        unbuilt = value in entry.values if entry.values else value != _default_of(owner, name)
        if unbuilt:
            yield f"{prefix}{key}", value


def _owners(section: Any, path: list[str]) -> Iterator[tuple[str, BaseModel, str]]:
    """Dotted key, owning section and field name of each place that `path` leads to; absent sections have none."""
    if isinstance(section, list):
        for index, item in enumerate(section):
            for key, owner, name in _owners(item, path):
                yield f"{index}.{key}", owner, name
    elif isinstance(section, BaseModel) and path[0] in type(section).model_fields:
        if len(path) == 1:
            yield path[0], section, path[0]
            return
        for key, owner, name in _owners(getattr(section, path[0]), path[1:]):
            yield f"{path[0]}.{key}", owner, name


def _default_of(owner: BaseModel, name: str) -> Any:
    return type(owner).model_fields[name].get_default(call_default_factory=True)


def _shown(key: str, value: Any) -> str:
    return f"[{key}]" if isinstance(value, BaseModel) else f"{key} = {value!r}"

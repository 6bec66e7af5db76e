"""The keys that no component reads yet. They are accepted, so that users' files load."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from prime_rl.utils.pydantic_config import BaseSettings


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """A key that is not supported, or not with every value."""

    key: str
    """Dotted key, with its component: `trainer`, `orchestrator`, `inference`, `sft`, `dpo`, `rm`, `rl`, `eval` or
    `env_server`. `dpo` and `rm` have what `sft` has. A list means each of its items: `orchestrator.filters.window`."""
    why: str = ""
    """Why, or what to do instead."""
    values: tuple[Any, ...] = ()
    """The values that are not supported. Empty: every value but the default."""
    refused: bool = True
    """Whether a run that sets the key is refused. Otherwise the key has no effect, and a warning says so."""


def _of_both_trainers(key: str, why: str, values: tuple[Any, ...] = (), refused: bool = True) -> tuple[NotBuilt, ...]:
    return tuple(NotBuilt(f"{component}.{key}", why, values, refused) for component in ("trainer", "sft"))


NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt("rl.max_model_len", "set `inference.model.max_model_len`"),
    *_of_both_trainers("model.attn", "use flash_attention_2, flash_attention_3 or sdpa", ("fa4",)),
    *_of_both_trainers("model.impl", "models come from Transformers, as with auto", ("custom",), refused=False),
    NotBuilt("sft.loss_impl", "use torch, which also holds few logits at a time", ("liger",)),
    *_of_both_trainers("log.env_worker_logs", "the trainer runs no environments"),
    *_of_both_trainers("log.vf_level", "the trainer runs no environments", refused=False),
    *(NotBuilt(f"{root}.model.vision", "only SFT and RL train on images") for root in ("dpo", "rm")),
    NotBuilt("trainer.log.log_data", "only SFT logs its data"),
    NotBuilt("trainer.ckpt.skip_progress", "RL resumes with everything that was saved"),
    NotBuilt("trainer.ckpt.skip_scheduler", "RL resumes with everything that was saved"),
    NotBuilt("trainer.weight_broadcast.save_format", "the engines read safetensors", ("torch",)),
    NotBuilt("trainer.max_concurrent_runs", "a trainer serves one run"),
    NotBuilt("orchestrator.log.log_data", "only SFT logs its data"),
    NotBuilt("orchestrator.log.env_worker_logs"),
    NotBuilt("orchestrator.model.trust_remote_code", "the orchestrator loads no model code", refused=False),
    NotBuilt("orchestrator.teacher_model.client.elastic", "name the teacher's servers in base_url"),
    NotBuilt("orchestrator.teacher_model.model.lora", "name the adapter in teacher_model.model.name"),
    NotBuilt("orchestrator.teacher_model.model.vision", "the teacher reads text alone"),
    NotBuilt("orchestrator.teacher_model.model.chat_template", "the teacher reads tokens", refused=False),
    NotBuilt("orchestrator.teacher_model.model.trust_remote_code", "the server loads the model", refused=False),
    NotBuilt("orchestrator.prime_monitor", "metrics go to metrics.jsonl and W&B"),
    NotBuilt("orchestrator.optim.lr", "a trainer serves one run: set `trainer.optim.lr`"),
    NotBuilt("inference.model.rope_scaling", "set it in the model's config.json"),
    NotBuilt("eval.log.log_data", "only SFT logs its data"),
    NotBuilt("eval.log.env_worker_logs"),
    NotBuilt("eval.log.file", "the launcher writes the log of each process to a file", refused=False),
    NotBuilt("env_server.env.python", "a run starts the environment in it: set it in orchestrator.env"),
    NotBuilt("env_server.env.project", "a run starts the environment in it: set it in orchestrator.env"),
    NotBuilt("env_server.env.workflow", "a run starts the process of a workflow: set it in orchestrator.env"),
    NotBuilt("env_server.log.log_data", "only SFT logs its data"),
    NotBuilt("env_server.log.env_worker_logs"),
)


def unbuilt_faults(config: BaseSettings, entries: Sequence[NotBuilt] = NOT_BUILT) -> list[str]:
    """Return one line for each key of `config` and its components that has an unsupported value."""
    return [
        f"{_shown(key, value)} is not supported yet" + (f": {entry.why}" if entry.why else "")
        for entry in entries
        if entry.refused
        for key, value in _settings_of(config, entry)
    ]


def ignored_keys(config: BaseSettings) -> list[str]:
    """Return one line for each key of `config`, without its components, that is set and has no effect."""
    return [
        f"{entry.key}{f' = {value!r}' * bool(entry.values)} has no effect: {entry.why}"
        for entry in NOT_BUILT
        if not entry.refused and entry.key.partition(".")[0] in _components(config)
        for _, value in _settings_of(config, entry)
    ]


def refuse_unbuilt(config: BaseSettings) -> None:
    """Print the lines of `unbuilt_faults` and exit with status 2, if there are any."""
    faults = unbuilt_faults(config)
    for fault in faults:
        sys.stderr.write(f"error: {fault}\n")
    if faults:
        raise SystemExit(2)


def _settings_of(config: BaseSettings, entry: NotBuilt) -> Iterator[tuple[str, Any]]:
    """Yield key and value wherever `config` sets what `entry` names. Keys are as in the user's file."""
    component, *path = entry.key.split(".")
    if component in _components(config):
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


def _components(config: BaseSettings) -> set[str]:
    """The component of a config and those that it extends: `dpo` has the keys of `sft`."""
    return {each.__dict__["component"] for each in type(config).__mro__ if "component" in each.__dict__}


def _owners(section: Any, path: list[str]) -> Iterator[tuple[str, BaseModel, str]]:
    """Yield dotted key, section and field name of each place that `path` leads to. Absent sections are skipped."""
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

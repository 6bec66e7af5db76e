"""Which modules of a model `model.lora` means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from prime_rl.configs.model import LoRAConfig, is_regex
from prime_rl.trainer.process.errors import ModelError

EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacked weights of a module of experts, and what each holds, one below the other."""

PARTS = tuple(part for parts in EXPERT_PARTS.values() for part in parts)
_STACKED_EXPERTS = "experts"
"""The default target of mixture-of-experts models; other models have no such module."""
_MODULES = dict[str, nn.Module]
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class ChosenModules:
    """Modules by path."""

    linear: dict[str, nn.Linear]
    experts: _MODULES
    saved: _MODULES
    """Trained in full. They own parameters themselves."""


def chosen_modules(model: PreTrainedModel, config: LoRAConfig) -> ChosenModules:
    """What `target_modules` adapt and `modules_to_save` train in full; the latter wins where both match.

    Raises:
        ModelError: a name matches nothing, or something that cannot be adapted.
    """
    owners = {path: module for path, module in model.named_modules() if any(True for _ in module.parameters(False))}
    linear = {path: module for path, module in owners.items() if isinstance(module, nn.Linear)}
    experts = {path: module for path, module in owners.items() if is_stacked(module)}
    saved = _selected(config.modules_to_save, owners)
    for pattern in config.modules_to_save:
        if not _selected([pattern], owners):
            raise ModelError(_no_match("modules_to_save", pattern, owners, "module with weights"))
    chosen = ChosenModules(
        {path: module for path, module in _selected(config.target_modules, linear).items() if path not in saved},
        {path: module for path, module in _selected(config.target_modules, experts).items() if path not in saved},
        saved,
    )
    for pattern in config.target_modules:
        _check_target(pattern, linear, experts, chosen)
    if not (chosen.linear or chosen.experts):
        raise ModelError(f"model.lora.target_modules leaves nothing to adapt: {_listed(config.target_modules)}")
    for path, layer in chosen.linear.items():
        _check_linear(path, layer, owners)
    for path, module in chosen.experts.items():
        _check_experts(path, module, model, config)
    return chosen


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` means the module at `path`.

    A plain name is a component of the path, or several that follow each other ("self_attn.q_proj"); a pattern with one
    of the characters ``^$*+?{}[]|()\\`` is a regular expression, searched anywhere.

    """
    if is_regex(pattern):
        return re.search(pattern, path) is not None
    return f".{pattern}." in f".{path}."


def _selected(patterns: Iterable[str], modules: Mapping[str, ModuleT]) -> dict[str, ModuleT]:
    return {path: module for path, module in modules.items() if any(matches(pattern, path) for pattern in patterns)}


def is_stacked(module: nn.Module) -> bool:
    """Whether `module` holds the weights of several experts in one tensor."""
    return any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def _check_target(pattern: str, linear: Mapping[str, nn.Linear], experts: _MODULES, chosen: ChosenModules) -> None:
    either: _MODULES = {**linear, **experts}
    if _selected([pattern], either):
        return
    inside = [path for path in experts for part in PARTS if matches(pattern, f"{path}.0.{part}")]
    if inside and not chosen.experts:
        raise ModelError(
            f'model.lora.target_modules: "{pattern}" is a part of {inside[0]}, whose experts are stacked: they are '
            f'adapted as a whole, with the name "{_STACKED_EXPERTS}"'
        )
    if not inside and pattern != _STACKED_EXPERTS:
        raise ModelError(_no_match("target_modules", pattern, either, "linear layer"))


def _no_match(key: str, pattern: str, modules: _MODULES, kind: str) -> str:
    components = {part for path in modules for part in path.split(".") if not part.isdigit()}
    leaves = {path.rpartition(".")[2] for path in modules}
    near = get_close_matches(pattern, sorted(components)) or sorted(leaves)
    return f'model.lora.{key}: "{pattern}" matches no {kind} of this model; nearest: {_listed(near)}'


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _check_linear(path: str, module: nn.Linear, owners: _MODULES) -> None:
    for other_path, other in owners.items():
        if other is not module and any(weight is module.weight for weight in other.parameters(recurse=False)):
            raise ModelError(
                f"model.lora.target_modules: {path} shares its weight with {other_path}, so it cannot be adapted "
                f'alone; to train both, set model.lora.modules_to_save = ["{path}"] and leave it out of target_modules'
            )


def _check_experts(path: str, module: nn.Module, model: PreTrainedModel, config: LoRAConfig) -> None:
    wanted = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    is_known = all(getattr(module, name, None) is value for name, value in wanted.items())
    if not (is_known and _has_hub_names(path, module, model)):
        raise ModelError(
            f"model.lora.target_modules: {path} ({type(module).__name__}) stores its experts in a way that cannot be "
            f"adapted yet; leave {_STACKED_EXPERTS} out of target_modules"
        )


def _has_hub_names(path: str, module: nn.Module, model: PreTrainedModel) -> bool:
    """Whether files hold each projection of each expert under the name that its adapter will get."""
    state = {f"{path}.{name}": torch.empty_like(getattr(module, name), device="meta") for name in EXPERT_PARTS}
    return {f"{path}.0.{part}.weight" for part in PARTS} <= revert_weight_conversion(model, state).keys()

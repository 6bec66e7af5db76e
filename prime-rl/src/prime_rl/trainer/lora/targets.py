"""Selects the modules that `model.lora` adapts or trains in full."""

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

EXPERT_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacked expert weights, and the projections that are concatenated in each of them."""

PROJECTIONS = tuple(part for parts in EXPERT_PROJECTIONS.values() for part in parts)
_STACKED_EXPERTS = "experts"
"""Target name of stacked experts. A default target, so models without experts may not have it."""
_MODULES = dict[str, nn.Module]
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class SelectedModules:
    """The selected modules by path: linear layers and stacked experts to adapt, and modules to train in full."""

    linear: dict[str, nn.Linear]
    experts: _MODULES
    saved: _MODULES
    """Modules to train in full. Each has parameters of its own."""


def select_modules(model: PreTrainedModel, config: LoRAConfig) -> SelectedModules:
    """Select the modules in `target_modules` and `modules_to_save`. If both match a module, it is trained in full.

    Raises:
        ModelError: a name matches no module, or a module that cannot be adapted.
    """
    owners = {path: module for path, module in model.named_modules() if any(True for _ in module.parameters(False))}
    linear = {path: module for path, module in owners.items() if isinstance(module, nn.Linear)}
    experts = {path: module for path, module in owners.items() if is_stacked(module)}
    saved = _selected(config.modules_to_save, owners)
    for pattern in config.modules_to_save:
        if not _selected([pattern], owners):
            raise ModelError(_no_match("modules_to_save", pattern, owners, "module with weights"))
    chosen = SelectedModules(
        {path: module for path, module in _selected(config.target_modules, linear).items() if path not in saved},
        {path: module for path, module in _selected(config.target_modules, experts).items() if path not in saved},
        saved,
    )
    for pattern in config.target_modules:
        _check_target(pattern, linear, experts, chosen)
    if not (chosen.linear or chosen.experts):
        raise ModelError(f"model.lora.target_modules matches nothing to adapt: {_listed(config.target_modules)}")
    for path, layer in chosen.linear.items():
        _check_linear(path, layer, owners)
    for path, module in chosen.experts.items():
        _check_experts(path, module, model, config)
    return chosen


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` matches the module at `path`.

    A plain name matches one or more consecutive components of the path ("self_attn.q_proj"). A pattern with one of the
    characters ``^$*+?{}[]|()\\`` is a regular expression that may match anywhere in the path.
    """
    if is_regex(pattern):
        return re.search(pattern, path) is not None
    return f".{pattern}." in f".{path}."


def _selected(patterns: Iterable[str], modules: Mapping[str, ModuleT]) -> dict[str, ModuleT]:
    return {path: module for path, module in modules.items() if any(matches(pattern, path) for pattern in patterns)}


def is_stacked(module: nn.Module) -> bool:
    """Whether `module` stores the weights of several experts in one tensor."""
    return any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def _check_target(pattern: str, linear: Mapping[str, nn.Linear], experts: _MODULES, chosen: SelectedModules) -> None:
    either: _MODULES = {**linear, **experts}
    if _selected([pattern], either):
        return
    inside = [path for path in experts for part in PROJECTIONS if matches(pattern, f"{path}.0.{part}")]
    if inside and not chosen.experts:
        raise ModelError(
            f'model.lora.target_modules: "{pattern}" is a projection of the stacked experts {inside[0]}, which '
            f'can only be adapted together: use "{_STACKED_EXPERTS}"'
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
                f'alone; to train both, set model.lora.modules_to_save = ["{path}"] and remove it from target_modules'
            )


def _check_experts(path: str, module: nn.Module, model: PreTrainedModel, config: LoRAConfig) -> None:
    wanted = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    is_known = all(getattr(module, name, None) is value for name, value in wanted.items())
    if not (is_known and _has_hub_names(path, module, model)):
        raise ModelError(
            f"model.lora.target_modules: {path} ({type(module).__name__}) stores its experts in a format that is not "
            f"supported; remove {_STACKED_EXPERTS} from target_modules"
        )


def _has_hub_names(path: str, module: nn.Module, model: PreTrainedModel) -> bool:
    """Whether the hub format names each expert's projections the way its adapter will be named."""
    state = {f"{path}.{name}": torch.empty_like(getattr(module, name), device="meta") for name in EXPERT_PROJECTIONS}
    return {f"{path}.0.{part}.weight" for part in PROJECTIONS} <= revert_weight_conversion(model, state).keys()

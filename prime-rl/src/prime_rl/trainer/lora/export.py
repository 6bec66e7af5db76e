"""Exports LoRA adapters in PEFT's format, which PEFT and vLLM load directly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.trainer.lora.adapters import LowRank, full_tensor
from prime_rl.trainer.lora.targets import PROJECTIONS, is_stacked

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """Contents of PEFT's files `adapter_model.safetensors` (`state`) and `adapter_config.json` (`config`)."""

    state: dict[str, Tensor]
    config: dict[str, Any]


@torch.no_grad()
def gather_adapter(model: PreTrainedModel, dtype: torch.dtype) -> PeftAdapter:
    """Copy all adapters and fully trained modules to host memory, in `dtype`. Collective.

    Only rank 0 gets the tensors; `state` is empty on the others.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in _trained_tensors(model):
        full = full_tensor(tensor)
        if dist.get_rank() == 0:
            state |= {_PREFIX + own: part.to("cpu", dtype, copy=True) for own, part in _hub_tensors(name, full)}
    return PeftAdapter(state, peft_config(model))


def peft_config(model: PreTrainedModel) -> dict[str, Any]:
    """The fields of PEFT's `LoraConfig` that describe the adapters of `model`."""
    lora = next(module for module in model.modules() if isinstance(module, LowRank))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _place(model.config.name_or_path),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        # PEFT does not support dropout for stacked experts, and inference does not need it.
        "lora_dropout": 0.0 if _has_adapted_experts(model) else lora.dropout.p,
        **_targets(model),
        "modules_to_save": [path for path, _ in _saved_modules(model)] or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def _place(model: str | None) -> str | None:
    """A hub id, or a folder's full path: read from another directory, a relative path would be taken for a hub id."""
    return str(Path(model).absolute()) if model and Path(model).is_dir() else model


def _targets(model: PreTrainedModel) -> dict[str, list[str]]:
    """PEFT's target names: the last component of an adapted path if it is unambiguous, otherwise the full path.

    In models with stacked experts, PEFT treats every module that is named like an expert's projection as one. Linear
    layers with such names outside the experts are therefore listed in `target_parameters`.
    """
    linear = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    has_adapter = {path: hasattr(module, "lora") for path, module in linear.items()}
    last = {path: path.rpartition(".")[2] for path in has_adapter}
    shared = {last[path] for path in has_adapter if not has_adapter[path]}
    taken = set(PROJECTIONS) if any(map(is_stacked, model.modules())) else set()
    adapted = [path for path in has_adapter if has_adapter[path]]
    names = {path if last[path] in shared else last[path] for path in adapted if last[path] not in taken}
    parameters = [f"{path}.weight" for path in adapted if last[path] in taken]
    parts = PROJECTIONS if _has_adapted_experts(model) else ()
    return {"target_modules": sorted(names.union(parts)), "target_parameters": parameters}


def _has_adapted_experts(model: PreTrainedModel) -> bool:
    return any(isinstance(getattr(module, "lora", None), nn.ModuleDict) for module in model.modules())


def _trained_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield trained tensors under PEFT's names, with the experts' tensors still stacked."""
    for path, module in model.named_modules():
        if isinstance(module, LowRank):
            # `<path>.lora` of a linear layer, `<path>.lora.<part>` of stacked experts.
            base = path.removesuffix(".lora").replace(".lora.", ".")
            yield f"{base}.lora_A.weight", module.A
            yield f"{base}.lora_B.weight", module.B
    for path, module in _saved_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter


def _saved_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not isinstance(module, LowRank) and own and all(parameter.requires_grad for parameter in own):
            yield path, module


def _hub_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor itself, or each expert's tensor if they are stacked, under its hub name."""
    if ".lora_" not in name or tensor.ndim == 2:
        yield name, tensor
        return
    module, part, factor, leaf = name.rsplit(".", 3)
    for index, own in enumerate(tensor):
        yield f"{module}.{index}.{part}.{factor}.{leaf}", own

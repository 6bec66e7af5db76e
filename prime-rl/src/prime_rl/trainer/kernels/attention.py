"""Selects the attention kernel of a run, and prepares the kernel's arguments for packed rows.

Attention must not cross the sequences of a packed row. Flash attention and PyTorch's varlen kernel take the sequence
bounds; flex attention takes a block mask that Transformers builds from the positions; SDPA runs on several shorter rows
(`packed_rows.fold`), with a mask only if two sequences share a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_kernels_available

from prime_rl.trainer.model.context import over_context
from prime_rl.trainer.model.layouts import sequence_bounds
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.versions import varlen_kernel

SDPA, EAGER, FLEX, VARLEN = "sdpa", "eager", "flex_attention", "varlen"
_MAX_VARLEN_HEAD = 256
_PYTORCH_VARLEN = varlen_kernel()
_FIRST_FLASH_GENERATION = 8
"""Lowest compute capability (Ampere) that PyTorch's flash kernels support."""


def is_installed(kernel: str) -> bool:
    """Whether a flash attention kernel is installed or can be downloaded."""
    if kernel == "flash_attention_3":
        # If the package is missing, Transformers downloads the kernel from the hub.
        return is_flash_attn_3_available() or is_kernels_available()
    return is_flash_attn_2_available()


def choose_attention(
    requested: str,
    model_config: PretrainedConfig,
    device: torch.device,
    compute: torch.dtype,
    has_kernel: Callable[[str], bool] = is_installed,
    capability_of: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
) -> tuple[str, str]:
    """Return Transformers' name of the kernel, and the reason if it is not the `requested` one (else "").

    Falls back from the requested kernel to PyTorch's varlen kernel, then flex attention, then SDPA. SDPA has neither
    soft caps nor sinks: models with those run Transformers' eager attention, or flex attention on a GPU.
    """
    instead = _without_sdpa(model_config)
    if device.type != "cuda":
        reason = "" if requested == SDPA else f"model.attn = {requested} needs a GPU"
        return (EAGER, instead[1]) if instead else (SDPA, reason)
    if requested == SDPA:
        return instead or (SDPA, "")
    model_class = _model_class(model_config)
    is_supported = model_class is None or model_class._supports_flash_attn
    if is_supported and has_kernel(requested):
        return requested, ""
    kernel = _best_pytorch_kernel(model_config, capability_of(device), compute)
    reason = f"model.attn = {requested} is not {'installed' if is_supported else 'supported by the model'}"
    return instead if instead and kernel == SDPA else (kernel, reason)


def varlen_arguments(kernel: str, position_ids_1T: Tensor, device: torch.device | None = None) -> dict[str, Any]:
    """Model arguments with the sequence bounds of a packed row; empty for kernels that take no bounds.

    The bounds are on `device`, by default that of the positions.
    """
    if kernel in (SDPA, EAGER, FLEX):
        return {}
    bounds, longest = sequence_bounds(position_ids_1T, device)
    arguments = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    if kernel != VARLEN:
        return arguments
    # Without any mask, Transformers looks on the device whether the row is packed, for which the host would wait.
    return arguments | {"attention_mask": torch.ones_like(position_ids_1T, device=bounds.device, dtype=torch.bool)}


def no_mask(*_: Any, **__: Any) -> None:
    """The varlen kernel follows sequence bounds. A mask of ones, the only one that a row has, says nothing more."""


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    varlen: Callable[..., Tensor | tuple[Tensor, ...]] = _PYTORCH_VARLEN,
    **options: Any,
) -> tuple[Tensor, None]:
    """PyTorch's varlen kernel behind Transformers' attention interface: [B, heads, T, D] in, [B, T, heads, D] out.

    If the options have no sequence bounds, they are derived from the position ids. Without position ids, each row is
    one sequence.

    Raises:
        ModelError: the model needs a mask, dropout, soft caps or sinks, which the kernel does not support.
    """
    wanted = {"softcap", "s_aux"}.intersection(name for name, option in options.items() if option is not None)
    if wanted or attention_mask is not None or options.get("dropout"):
        raise ModelError(f"{type(module).__name__} is not supported by the varlen kernel: set model.attn = 'sdpa'")
    rows, heads, tokens, _ = query.shape
    bounds, longest = _sequence_bounds(rows, tokens, query.device, options)
    window = options.get("sliding_window")
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    out = varlen(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        scale=options.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != heads,
    )
    assert isinstance(out, Tensor), "log-sum-exp was not requested"
    return out.view(rows, tokens, heads, -1), None


AttentionInterface.register(VARLEN, over_context(varlen_attention))
AttentionMaskInterface.register(VARLEN, no_mask)


def divide_kernel(kernel: str) -> None:
    """Let the flash attention function of Transformers that a model runs take the option `context`, as our own do.

    `kernel` is the name in the model's config: Transformers may have replaced a missing package by one of the hub.
    """
    if kernel not in (SDPA, EAGER, FLEX, VARLEN):
        AttentionInterface.register(kernel, over_context(ALL_ATTENTION_FUNCTIONS[kernel]))


def reads_attention_functions(model: PreTrainedModel) -> bool:
    """Whether the model's attention calls the function that its config names, with all arguments of the model."""
    module = sys.modules[next(each for each in type(model).__mro__ if not each.__name__.startswith("FSDP")).__module__]
    return hasattr(module, "ALL_ATTENTION_FUNCTIONS")


def _model_class(model_config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of a config's language model; None if Transformers has none."""
    # Transformers annotates the values as pairs of classes, but only tokenizer mappings hold pairs.
    found: object = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    return cast("type[PreTrainedModel] | None", found)


def _without_sdpa(model_config: PretrainedConfig) -> tuple[str, str] | None:
    """The kernel to use in place of SDPA on a GPU, and the reason; None for models that run SDPA."""
    model_class = _model_class(model_config)
    if getattr(model_config, "attn_logit_softcapping", None) is not None:
        has_flex = model_class is not None and model_class._supports_flex_attn
        return FLEX if has_flex else EAGER, "SDPA has no soft cap for attention scores"
    if model_config.model_type == "doge":
        return EAGER, "SDPA has no gradient for the mask of this model"
    if model_class is None or (model_class._supports_sdpa and model_class._supports_attention_backend):
        return None
    return EAGER, "the model has its own attention code"


def head_dims(model_config: PretrainedConfig) -> list[int]:
    """Channels of an attention head, of each layer: the config's `head_dim`, or hidden size / heads where it has none.

    Gemma 4 has larger heads in some layers. Its config then has no value for all, and one of each layer.
    """
    text = model_config.get_text_config()
    of_layers = getattr(text, "per_layer_config", None)  # of Transformers 5.19
    layers = [text if of_layers is None else of_layers[index] for index in range(text.num_hidden_layers)]
    return [getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads for each in layers]


def _best_pytorch_kernel(model_config: PretrainedConfig, capability: tuple[int, int], compute: torch.dtype) -> str:
    model_class = _model_class(model_config)
    if model_class is None:
        return SDPA
    heads = set(head_dims(model_config))
    is_plain = (
        model_class._supports_flash_attn
        # Set on models that need extra features of a kernel, such as learned sinks.
        and not getattr(model_class, "_compatible_flash_implementations", None)
        and getattr(model_config, "attn_logit_softcapping", None) is None
        and not hasattr(model_config, "v_head_dim")
    )
    is_half = compute in (torch.bfloat16, torch.float16)
    fits = all(head % 8 == 0 and head <= _MAX_VARLEN_HEAD for head in heads)
    if is_plain and is_half and capability[0] >= _FIRST_FLASH_GENERATION and fits:
        return VARLEN
    return FLEX if model_class._supports_flex_attn else SDPA


def _sequence_bounds(rows: int, tokens: int, device: torch.device, options: dict[str, Any]) -> tuple[Tensor, int]:
    if options.get("cu_seq_lens_q") is not None:
        return options["cu_seq_lens_q"], options["max_length_q"]
    if rows == 1 and options.get("position_ids") is not None:
        return sequence_bounds(options["position_ids"])
    return torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=device), tokens

"""A faster forward pass for the Llama family, over the very weights of the Transformers model.

Transformers' own modules spend a third of a small model's decode step in Python and in operations on few elements.
Here the projections that share an input are one product, and normalisation is one call. The model's parameters become
views of the joined matrices, so a weight update that writes into them reaches both.
Shapes: N tokens, H query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu
from transformers import PreTrainedModel

from prime_rl.inference.embedded.adapters import Site, StepAdapters
from prime_rl.inference.embedded.attention import SlotStep, attend

_ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class _Joined:
    """Linear layers with a common input, as one."""

    site: Site
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, prefix: str, parent: nn.Module, names: Sequence[str]) -> _Joined:
        """The layers `names` of the module `parent`, whose path is `prefix`."""
        layers = [parent.get_submodule(name) for name in names]
        weight = _join([layer.weight for layer in layers])
        bias = _join([layer.bias for layer in layers]) if layers[0].bias is not None else None
        return cls(tuple(f"{prefix}.{name}" for name in names), weight, bias)

    def __call__(self, inputs: Tensor, adapters: StepAdapters | None) -> Tensor:
        outputs = linear(inputs, self.weight, self.bias)
        return outputs if adapters is None else adapters.add(self.site, inputs, outputs)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer: its modules, with the projections joined."""

    index: int
    module: Any
    qkv: _Joined
    output: _Joined
    gate_up: _Joined
    down: _Joined
    window: int | None


class FusedDecoder:
    """Llama, Mistral, Qwen2 and Qwen3."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.model
        self._head = model.lm_head
        config = model.config
        self._layers = [self._layer(index, layer, config) for index, layer in enumerate(model.model.layers)]
        self._head_dim: int = model.model.layers[0].self_attn.head_dim
        self._num_heads = (config.num_attention_heads, config.num_key_value_heads)

    @property
    def sites(self) -> list[Site]:
        """Where adapters can change the model."""
        return [part.site for layer in self._layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        return type(model).__name__ in _ARCHITECTURES and model.config.hidden_act == "silu"

    def logits(self, step: SlotStep, token_ids_N: Tensor, position_ids_N: Tensor, wanted: Tensor) -> Tensor:
        """Logits of the tokens that `wanted` indexes, [W, vocabulary]."""
        hidden = embedding(token_ids_N, self._model.embed_tokens.weight)
        cosine, sine = (part[0][:, None] for part in self._model.rotary_emb(hidden[None], position_ids_N[None]))
        half = self._head_dim // 2
        # x * cos + (-x2, x1) * sin, with the sign moved from the vector into the sine.
        rotary = cosine, torch.cat((-sine[..., :half], sine[..., half:]), -1)
        for layer in self._layers:
            normed = _norm(hidden, layer.module.input_layernorm)
            hidden = hidden + self._attention(layer, step, normed, rotary)
            normed = _norm(hidden, layer.module.post_attention_layernorm)
            gate, up = layer.gate_up(normed, step.adapters).chunk(2, -1)
            hidden = hidden + layer.down(silu(gate) * up, step.adapters)
        return self._head(_norm(hidden[wanted], self._model.norm))

    def _attention(self, layer: _Layer, step: SlotStep, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        module = layer.module.self_attn
        num_query, num_key = self._num_heads
        heads = layer.qkv(hidden, step.adapters).unflatten(-1, (-1, self._head_dim))
        query, key, value = heads.split([num_query, num_key, num_key], dim=1)
        if hasattr(module, "q_norm"):
            query, key = _norm(query, module.q_norm), _norm(key, module.k_norm)
        turned = _rotate(torch.cat((query, key), dim=1), *rotary)
        new = (turned[:, :num_query], turned[:, num_query:], value)
        attended = attend(step, layer.index, new, module.scaling, layer.window)
        return layer.output(attended, step.adapters)

    @staticmethod
    def _layer(index: int, module: Any, config: Any) -> _Layer:
        attention, path = module.self_attn, f"model.layers.{index}"
        # Qwen decides layer by layer; Mistral has one window for all.
        owner = attention if hasattr(attention, "sliding_window") else config
        return _Layer(
            index=index,
            module=module,
            qkv=_Joined.of(f"{path}.self_attn", attention, ["q_proj", "k_proj", "v_proj"]),
            output=_Joined.of(f"{path}.self_attn", attention, ["o_proj"]),
            gate_up=_Joined.of(f"{path}.mlp", module.mlp, ["gate_proj", "up_proj"]),
            down=_Joined.of(f"{path}.mlp", module.mlp, ["down_proj"]),
            window=getattr(owner, "sliding_window", None),
        )


def _join(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Concatenate parameters along their first dimension, and make each a view of the result."""
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = view
    return joined


def _norm(hidden: Tensor, module: Any) -> Tensor:
    return rms_norm(hidden, module.weight.shape, module.weight, module.variance_epsilon)


def _rotate(heads: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Rotary positions on [N, heads, D]."""
    first, second = heads.chunk(2, -1)
    return torch.addcmul(heads * cosine, torch.cat((second, first), -1), signed_sine)

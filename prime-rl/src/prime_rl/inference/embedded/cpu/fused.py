"""A faster forward pass for the Llama family, over the very weights of the Transformers model.

Transformers' own modules spend a third of a small model's decode step in Python and in operations on few elements. Here
the projections that share an input are one product, what follows a product is part of it, and all heads are normalised
and turned at once. The model's parameters stay the place where weights are; what is derived from them is made anew by
`refresh`. Shapes: N tokens, H query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm
from transformers import PreTrainedModel

from prime_rl.inference.embedded.cpu.products import Product, is_packable
from prime_rl.inference.embedded.engine.attention import SlotStep, attend
from prime_rl.inference.embedded.engine.lora import Site

_ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


@dataclass(slots=True)
class _Layer:
    """One decoder layer."""

    index: int
    module: Any
    qkv: Product
    output: Product
    gate: Product
    up: Product
    down: Product
    window: int | None
    head_norm: Tensor | None = None
    """The norms' weights of every query and key head, [H + K, D]; None without such norms."""

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.output, self.gate, self.up, self.down


class FusedDecoder:
    """Llama, Mistral, Qwen2 and Qwen3."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.model
        config = model.config
        packs = is_packable(model)
        self._layers = [_layer(index, layer, config, packs) for index, layer in enumerate(model.model.layers)]
        self._head = Product([model.lm_head], packs=packs)
        self._head_dim: int = model.model.layers[0].self_attn.head_dim
        self._num_heads = (config.num_attention_heads, config.num_key_value_heads)
        self.refresh()

    @property
    def sites(self) -> list[Site]:
        """Where adapters can change the model."""
        return [product.site for layer in self._layers for product in layer.products]

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        return type(model).__name__ in _ARCHITECTURES and model.config.hidden_act == "silu"

    @torch.inference_mode()
    def refresh(self) -> None:
        """Follow a change of the model's weights."""
        num_query, num_key = self._num_heads
        self._head.refresh()
        for layer in self._layers:
            for product in layer.products:
                product.refresh()
            attention = layer.module.self_attn
            if hasattr(attention, "q_norm"):
                query, key = attention.q_norm.weight.data, attention.k_norm.weight.data
                layer.head_norm = torch.cat((query.expand(num_query, -1), key.expand(num_key, -1)))

    def logits(self, step: SlotStep, token_ids_N: Tensor, position_ids_N: Tensor, wanted: Tensor) -> Tensor:
        """Logits of the tokens that `wanted` indexes, [W, vocabulary]."""
        hidden = embedding(token_ids_N, self._model.embed_tokens.weight)
        rotary = self._rotary(hidden, position_ids_N)
        adapters = step.adapters
        for layer in self._layers:
            normed = _norm(hidden, layer.module.input_layernorm)
            hidden = layer.output.plus(self._attention(layer, step, normed, rotary), hidden, adapters)
            normed = _norm(hidden, layer.module.post_attention_layernorm)
            gated = layer.up.times(normed, layer.gate.swish(normed, adapters), adapters)
            hidden = layer.down.plus(gated, hidden, adapters)
        return self._head(_norm(hidden[wanted], self._model.norm))

    def _rotary(self, hidden: Tensor, position_ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [N, 1, D] of the positions; the minus of `(-x2, x1)` is moved from the vector to the sine."""
        cosine, sine = (part[0][:, None] for part in self._model.rotary_emb(hidden[None], position_ids_N[None]))
        half = self._head_dim // 2
        return cosine, torch.cat((-sine[..., :half], sine[..., half:]), -1)

    def _attention(self, layer: _Layer, step: SlotStep, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        num_query, num_key = self._num_heads
        num_turned = num_query + num_key
        heads = layer.qkv(hidden, step.adapters).view(len(hidden), -1, self._head_dim)
        turned = heads[:, :num_turned]
        if layer.head_norm is not None:
            turned = _scaled(turned, layer.head_norm, layer.module.self_attn.q_norm.variance_epsilon)
        turned = _rotate(turned, *rotary)
        new = (turned[:, :num_query], turned[:, num_query:], heads[:, num_turned:])
        return attend(step, layer.index, new, layer.module.self_attn.scaling, layer.window)


def _layer(index: int, module: Any, config: Any, packs: bool) -> _Layer:
    attention = module.self_attn

    def product(parent: str, *names: str) -> Product:
        owner = module.get_submodule(parent)
        site = tuple(f"model.layers.{index}.{parent}.{name}" for name in names)
        return Product([owner.get_submodule(name) for name in names], site, packs)

    # Qwen decides on a window layer by layer; Mistral has one for all.
    owner = attention if hasattr(attention, "sliding_window") else config
    return _Layer(
        index=index,
        module=module,
        qkv=product("self_attn", "q_proj", "k_proj", "v_proj"),
        output=product("self_attn", "o_proj"),
        gate=product("mlp", "gate_proj"),
        up=product("mlp", "up_proj"),
        down=product("mlp", "down_proj"),
        window=getattr(owner, "sliding_window", None),
    )


def _norm(hidden: Tensor, module: Any) -> Tensor:
    return _scaled(hidden, module.weight, module.variance_epsilon)


def _scaled(vectors: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension. In float32, by one reduction instead of a square, a mean and their products."""
    if vectors.dtype != torch.float32:
        return rms_norm(vectors, vectors.shape[-1:], None, epsilon) * weight
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    inverse = length.square_().div_(vectors.shape[-1]).add_(epsilon).rsqrt_()
    return vectors.mul(inverse).mul_(weight)


def _rotate(heads: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Rotary positions on [N, heads, D]."""
    first, second = heads.chunk(2, -1)
    return torch.addcmul(heads * cosine, torch.cat((second, first), -1), signed_sine)

"""Fused forward pass for Llama-family models, which shares its weights with the Transformers model.

For a small model, Transformers' modules spend a third of a decode step on Python overhead and tiny operations. Here,
projections with the same input are merged into one matrix product, activations and residual sums are fused into it,
and all heads are normalized and rotated together. The Transformers model still owns the weights; `refresh` rebuilds
everything derived from them.
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

from prime_rl.inference.embedded.engine.attention import Scoring, SlotStep, attend
from prime_rl.inference.embedded.engine.lora import Site, StepAdapters
from prime_rl.inference.embedded.engine.vision import StepImages
from prime_rl.utils.limits import usable_memory_bytes

# Linear layers on a CPU through oneDNN, with prepacked weights and fused activations or sums.
#
# For float32 matrix products on a CPU, PyTorch uses MKL, which is limited to AVX2 on non-Intel processors: half the
# speed of oneDNN's AVX-512 kernels, at the same accuracy. oneDNN also accepts prepacked weights (packing takes much
# of a small batch's time) and fuses an activation or a sum into the product. The operators used here are the ones
# that PyTorch's compiler emits. Shapes: N tokens, I inputs and O outputs.


PACKED_SHARE = 0.1
"""Fraction of the usable memory for a packed copy of the weights. Larger models are not packed."""

_TYPICAL_TOKENS = 64
"""Batch size to pack the weights for. The resulting layout is the best one for all batches of 2 or more tokens."""


class MergedLinear:
    """One or more linear layers with the same input, computed as one product. Shares its weights with the layers.

    Call `refresh` after the weights have changed.
    """

    def __init__(self, layers: Sequence[nn.Linear], site: Site = (), packs: bool = False) -> None:
        self.site = site
        self.weight_OI = _merged([layer.weight for layer in layers])
        self.bias_O = _merged([layer.bias for layer in layers]) if layers[0].bias is not None else None
        self._packs = packs
        self._operand: Tensor | None = None
        """The weights in oneDNN's format; None if PyTorch's own `linear` is used."""
        if uses_onednn(self.weight_OI):
            self._operand = self.weight_OI.detach()
            self.refresh()

    def refresh(self) -> None:
        """Repack the layers' current weights."""
        if self._operand is not None and self._packs:
            self._operand = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI.detach(), _TYPICAL_TOKENS)

    def __call__(self, inputs_NI: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Outputs [N, O], including the adapters' updates."""
        outputs = self._unary(inputs_NI, "none")
        return outputs if adapters is None else adapters.add(self.site, inputs_NI, outputs)

    def silu(self, inputs_NI: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """SiLU (swish) of the outputs."""
        if adapters is not None or self._operand is None:
            return silu(self(inputs_NI, adapters))
        return self._unary(inputs_NI, "swish")

    def mul(self, inputs_NI: Tensor, others_NO: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Elementwise product of the outputs and `others_NO`."""
        if adapters is not None or self._operand is None:
            return self(inputs_NI, adapters) * others_NO
        return self._binary(inputs_NI, others_NO, "mul")

    def add(self, inputs_NI: Tensor, others_NO: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Sum of the outputs and `others_NO`."""
        if adapters is not None or self._operand is None:
            return self(inputs_NI, adapters) + others_NO
        return self._binary(inputs_NI, others_NO, "add")

    def _unary(self, inputs_NI: Tensor, then: str) -> Tensor:
        if self._operand is None:
            return linear(inputs_NI, self.weight_OI, self.bias_O)
        return torch.ops.mkldnn._linear_pointwise(inputs_NI, self._operand, self.bias_O, then, [], "")

    def _binary(self, inputs_NI: Tensor, others_NO: Tensor, then: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(inputs_NI, others_NO, self._operand, self.bias_O, then)


def uses_onednn(weight: Tensor) -> bool:
    """Whether products with this weight run on oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_packable(model: nn.Module) -> bool:
    """Whether there is enough memory for a packed copy of the weights."""
    return sum(parameter.nbytes for parameter in model.parameters()) <= PACKED_SHARE * usable_memory_bytes()


def _merged(parameters: Sequence[Tensor]) -> Tensor:
    """Concatenate parameters along their first dimension and make each one a view of the result."""
    if len(parameters) == 1:
        return parameters[0]
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = view
    return joined


_WINDOW_OWNERS = {
    "LlamaForCausalLM": "nothing",
    "MistralForCausalLM": "config",
    "Qwen2ForCausalLM": "attention",
    "Qwen3ForCausalLM": "attention",
}
"""The supported architectures, and where their code looks for a sliding window. Llama has none: its code ignores a
`sliding_window` in the config."""


@dataclass(slots=True)
class _Layer:
    """The merged projections of one decoder layer."""

    index: int
    module: Any
    qkv: MergedLinear
    output: MergedLinear
    gate: MergedLinear
    up: MergedLinear
    down: MergedLinear
    window_owner: Any
    """Has the layer's window in `sliding_window`; None if the layer has none."""
    head_norm: Tensor | None = None
    """Weights of the per-head query and key norms, [H + K, D]; None if the model has none."""

    @property
    def window(self) -> int | None:
        return getattr(self.window_owner, "sliding_window", None)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.qkv, self.output, self.gate, self.up, self.down


class FusedDecoder:
    """Computes logits for Llama, Mistral, Qwen2 and Qwen3 models."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.model
        config = model.config
        packs = is_packable(model)
        owner = _WINDOW_OWNERS[type(model).__name__]
        self._layers = [
            _layer(index, layer, {"config": config, "attention": layer.self_attn}.get(owner), packs)
            for index, layer in enumerate(model.model.layers)
        ]
        self._head = MergedLinear([model.lm_head], packs=packs)
        self._head_dim: int = model.model.layers[0].self_attn.head_dim
        self._num_heads = (config.num_attention_heads, config.num_key_value_heads)
        self.refresh()

    @property
    def sites(self) -> list[Site]:
        """Sites where the model can apply adapters."""
        return [linear.site for layer in self._layers for linear in layer.linears]

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        return type(model).__name__ in _WINDOW_OWNERS and model.config.hidden_act == "silu"

    @torch.inference_mode()
    def refresh(self) -> None:
        """Rebuild everything derived from the model's weights. Call after they change."""
        num_query, num_key = self._num_heads
        self._head.refresh()
        for layer in self._layers:
            for merged in layer.linears:
                merged.refresh()
            attention = layer.module.self_attn
            if hasattr(attention, "q_norm"):
                query, key = attention.q_norm.weight.data, attention.k_norm.weight.data
                joined = torch.cat((query.expand(num_query, -1), key.expand(num_key, -1)))
                # In place, because captured graphs read it where it was.
                layer.head_norm = joined if layer.head_norm is None else layer.head_norm.copy_(joined)

    def logits(self, step: SlotStep, token_ids_N: Tensor, position_ids_N: Tensor, wanted: Tensor) -> Tensor:
        """Logits [W, V] at the indices `wanted` of the N tokens."""
        return self.head(self.hidden(step, token_ids_N, position_ids_N)[wanted])

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states."""
        return self._head(_norm(hidden, self._model.norm))

    def hidden(
        self, step: SlotStep, token_ids_N: Tensor, position_ids_N: Tensor, images: StepImages | None = None
    ) -> Tensor:
        """The last layer's hidden states [N, H]."""
        hidden = embedding(token_ids_N, self._model.embed_tokens.weight)
        rotary = self._rotary(hidden, position_ids_N, images)
        deep = [] if images is None else images.features.deep
        if images is not None:
            hidden[images.places_F] = images.features.values_FH
        adapters = step.adapters
        for layer in self._layers:
            normed = _norm(hidden, layer.module.input_layernorm)
            hidden = layer.output.add(self._attention(layer, step, normed, rotary), hidden, adapters)
            normed = _norm(hidden, layer.module.post_attention_layernorm)
            gated = layer.up.mul(normed, layer.gate.silu(normed, adapters), adapters)
            hidden = layer.down.add(gated, hidden, adapters)
            if images is not None and layer.index < len(deep):
                hidden.index_add_(0, images.places_F, deep[layer.index])
        return hidden

    def _rotary(
        self, hidden: Tensor, position_ids_N: Tensor, images: StepImages | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotary cosine and sine [N, 1, D]. The minus sign of `(-x2, x1)` is folded into the sine."""
        if images is not None and images.rope_positions_3N is not None and images.axes_D is not None:
            of_axes = self._model.rotary_emb(hidden[None], images.rope_positions_3N)
            index_1ND = images.axes_D.expand(1, len(hidden), -1)
            cosine, sine = (part.gather(0, index_1ND)[0][:, None] for part in of_axes)
        else:
            cosine, sine = (part[0][:, None] for part in self._model.rotary_emb(hidden[None], position_ids_N[None]))
        half = self._head_dim // 2
        return cosine, torch.cat((-sine[..., :half], sine[..., half:]), -1)

    def _attention(self, layer: _Layer, step: SlotStep, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        num_query, num_key = self._num_heads
        num_rotated = num_query + num_key
        heads = layer.qkv(hidden, step.adapters).view(len(hidden), -1, self._head_dim)
        rotated = heads[:, :num_rotated]
        if layer.head_norm is not None:
            rotated = _rms_norm(rotated, layer.head_norm, layer.module.self_attn.q_norm.variance_epsilon)
        rotated = _rotate(rotated, *rotary)
        new = (rotated[:, :num_query], rotated[:, num_query:], heads[:, num_rotated:])
        return attend(step, layer.index, new, Scoring(layer.module.self_attn.scaling, layer.window))


def _layer(index: int, module: Any, window_owner: Any, packs: bool) -> _Layer:
    def merged(parent: str, *names: str) -> MergedLinear:
        owner = module.get_submodule(parent)
        site = tuple(f"model.layers.{index}.{parent}.{name}" for name in names)
        return MergedLinear([owner.get_submodule(name) for name in names], site, packs)

    return _Layer(
        index=index,
        module=module,
        qkv=merged("self_attn", "q_proj", "k_proj", "v_proj"),
        output=merged("self_attn", "o_proj"),
        gate=merged("mlp", "gate_proj"),
        up=merged("mlp", "up_proj"),
        down=merged("mlp", "down_proj"),
        window_owner=window_owner,
    )


def _norm(hidden: Tensor, module: Any) -> Tensor:
    return _rms_norm(hidden, module.weight, module.variance_epsilon)


def _rms_norm(vectors: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension, computed in float32. On a CPU, one norm reduction replaces the separate square
    and mean."""
    if vectors.device.type != "cpu":
        return rms_norm(vectors, vectors.shape[-1:], None, epsilon) * weight
    values = vectors.float()
    length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    inverse = length.square_().div_(values.shape[-1]).add_(epsilon).rsqrt_()
    return values.mul(inverse).to(vectors.dtype).mul_(weight)


def _rotate(heads: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Apply rotary position embeddings to [N, heads, D]."""
    first, second = heads.chunk(2, -1)
    return torch.addcmul(heads * cosine, torch.cat((second, first), -1), signed_sine)

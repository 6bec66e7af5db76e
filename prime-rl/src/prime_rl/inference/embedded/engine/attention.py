"""Attention over the key-value cache slots, registered through Transformers' public attention interface.

One forward pass decodes the next token of every running sequence and prefills the new prompts, laid out as one row of
N tokens: first B decode tokens (token i belongs to slot row i), then the P prompts one after another.
Shapes: H query heads, K key-value heads, G = H / K, D head dim, L longest prompt or sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from prime_rl.inference.embedded.engine.cache import KVSlots
from prime_rl.inference.embedded.engine.common_start import CommonStart
from prime_rl.inference.embedded.engine.lora import StepAdapters
from prime_rl.inference.embedded.engine.tensors import on_device
from prime_rl.inference.embedded.errors import EngineError
from prime_rl.transport.weights import to_device

ATTENTION_NAME = "kv_slots"

_COPY_COST = 3
"""Cost of a batched product of part of each row in bfloat16 on a CPU, relative to one of whole rows of that length:
oneDNN copies the part first. Measured: 2.5 to 3.5."""

SCORES_AT_ONCE = 1 << 24
"""Most scores of prompts that are held at once, over all heads: 64 MB in float32."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores stored tokens, and turns scores into weights."""

    scaling: float
    window: int | None = None
    """Sliding window in tokens, including the token itself; None attends to all."""
    cap: float | None = None
    """Scores s become `cap * tanh(s / cap)`, as in Gemma 2."""
    sinks_H: Tensor | None = None
    """A further score for each query head, of a token without a value, as in gpt-oss: it takes weight from others."""

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch's fused attention computes it."""
        return self.cap is None and self.sinks_H is None

    def weights(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Weights of the stored tokens. `scores` [batch, K, G, L], or [batch, H, Q, L], are overwritten.

        `mask` is added: 0 or minus infinity.
        """
        if self.cap is not None:
            scores.div_(self.cap).tanh_().mul_(self.cap)
        scores.add_(mask)
        if self.sinks_H is None:
            return scores.softmax(-1)
        sinks = self.sinks_H.to(scores.dtype).view(1, scores.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


class PromptBatch:
    """The prompts of one forward pass: their slot rows and the positions of their tokens among the N tokens.

    `lengths` are the numbers of tokens to prefill now, and `num_cached` the numbers of earlier tokens whose keys and
    values are in the prompts' rows already. Prompts are padded on the right, where causal attention never looks.
    """

    def __init__(
        self,
        rows: SequenceOf[int],
        lengths: SequenceOf[int],
        num_cached: SequenceOf[int],
        offset: int,
        device: torch.device,
        last_seen: SequenceOf[np.ndarray | None] = (),
    ) -> None:
        """`last_seen`: of each prompt, the position of the last token that each one to prefill attends to, which may
        be behind it; None if that is itself."""
        self.rows = on_device(rows, device)
        self.width = max(lengths)
        starts = offset + torch.tensor([0, *lengths[:-1]]).cumsum(0)
        columns = torch.arange(self.width)
        sizes = torch.tensor(lengths)[:, None]
        self.token_index = to_device(starts[:, None] + columns.minimum(sizes - 1), device)
        # Found on the host: a boolean mask on a GPU would make every layer wait for the number of its true elements.
        prompt, column = (columns < sizes).nonzero(as_tuple=True)
        self.places = to_device(prompt, device), to_device(column, device)
        """Prompt and column of each token that is not padding."""
        self.has_cached = any(num_cached)
        """Whether any prompt has cached tokens in its row."""
        self.positions = to_device(torch.tensor(num_cached)[:, None] + columns, device)
        self.last_seen = self.positions
        self.sees_ahead = any(each is not None for each in last_seen)
        """Whether any token attends to one behind it."""
        if self.sees_ahead:
            last = torch.tensor(num_cached)[:, None] + columns
            for index, each in enumerate(last_seen):
                if each is not None:
                    last[index, : len(each)] = torch.from_numpy(each)
            self.last_seen = to_device(last, device)
        self.total = max(count + length for count, length in zip(num_cached, lengths, strict=True))
        self._visible: dict[int | None, Tensor] = {}
        self._bands: dict[int, Tensor] = {}

    def visible(self, window: int | None) -> Tensor:
        """Boolean mask [P, 1, width, total]: the stored tokens that each padded token attends to."""
        if window not in self._visible:
            self._visible[window] = self.visible_to(slice(None), self.total, window)
        return self._visible[window]

    def visible_to(self, block: slice, length: int, window: int | None) -> Tensor:
        """The same for some of the tokens, and the first `length` stored ones."""
        seen = _visible(self.last_seen[:, block], length, None)
        if window is not None:
            seen &= torch.arange(length, device=seen.device) > self.positions[:, block, None] - window
        return seen[:, None]

    def band(self, window: int | None) -> Tensor | None:
        """Boolean mask of a window among a prompt's own tokens; None if they attend to all before them, and no other.

        It is the same [width, width] for all prompts, unless tokens attend to others behind them.
        """
        if self.sees_ahead:
            return self.visible(window)
        if window is None or window >= self.width:
            return None
        if window not in self._bands:
            columns = torch.arange(self.width, device=self.positions.device)
            distance = columns[:, None] - columns
            self._bands[window] = (distance >= 0) & (distance < window)
        return self._bands[window]


def _visible(last: Tensor, length: int, window: int | None) -> Tensor:
    """Boolean mask [..., length]: the stored tokens that tokens at the positions `last` attend to."""
    columns = torch.arange(length, device=last.device)
    visible = columns <= last[..., None]
    return visible if window is None else visible & (columns > last[..., None] - window)


def _hidden_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask: minus infinity for tokens that are not visible."""
    return torch.full(visible.shape, -torch.inf, dtype=dtype, device=visible.device).masked_fill_(visible, 0.0)


class SlotStep:
    """Everything that the layers need to know about one forward pass."""

    def __init__(
        self,
        slots: KVSlots,
        decode_positions: SequenceOf[int] | Tensor,
        prompts: PromptBatch | None,
        adapters: StepAdapters | None = None,
        common_start: CommonStart | None = None,
        decode_length: int | None = None,
    ) -> None:
        """`common_start` groups decoding rows with a shared prompt; None computes attention row by row.

        Positions in a tensor are on the slots' device, and the host does not read them: the caller says by
        `decode_length` how many tokens of each row attention has to read.
        """
        self.slots = slots
        self.common_start = common_start
        self.adapters = adapters
        self.prompts = prompts
        self.num_decode = len(decode_positions)
        self._decode_targets: dict[int, Tensor] = {}
        if isinstance(decode_positions, Tensor):
            self.decode_positions = decode_positions
        else:
            self.decode_positions = on_device(decode_positions, slots.device, torch.long)
            decode_length = max(decode_positions, default=-1) + 1
        self.decode_length = decode_length or 0
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def decode_targets(self, num_heads: int) -> Tensor:
        """Flat index [B * K] of each row's and head's new token in the stored tensors viewed as [rows * K * L, D]."""
        if num_heads not in self._decode_targets:
            heads = torch.arange(self.num_decode * num_heads, device=self.slots.device).view(-1, num_heads)
            self._decode_targets[num_heads] = (heads * self.slots.length + self.decode_positions[:, None]).flatten()
        return self._decode_targets[num_heads]

    def decode_mask(self, window: int | None, length: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, 1, length] over each row's stored tokens, limited to the last `window` tokens."""
        if (window, length) not in self._masks:
            visible = _visible(self.decode_positions, length, window)
            self._masks[window, length] = _hidden_mask(visible, dtype)[:, None, None]
        return self._masks[window, length]

    def decode_span(self, stored: Tensor) -> tuple[CommonStart | None, int]:
        """The groups of rows with a common start, and the number of tokens [0, length) to read of each other row."""
        start = self.common_start.length if self.common_start is not None else 0
        width = stored.shape[2]
        copies = stored.device.type == "cpu" and stored.dtype == torch.bfloat16
        if copies and width <= _COPY_COST * (self.decode_length - start):
            return None, width
        return self.common_start, self.decode_length


def attend(step: SlotStep, layer_index: int, new: tuple[Tensor, Tensor, Tensor], scoring: Scoring) -> Tensor:
    """Store the new keys and values of a layer, and attend to all stored tokens.

    Args:
        new: query [N, H, D], key [N, K, D] and value [N, K, D], with rotary embeddings applied. The value may have
            another head dim than query and key.

    Returns:
        The attention output, [N, H * D].
    """
    stored = step.slots.layer(layer_index, *new[1:])
    parts = []
    if step.num_decode:
        parts.append(_decode(step, stored, new, scoring))
    if step.prompts is not None:
        read = _extend if step.prompts.has_cached else _prefill
        parts.append(read(step.prompts, stored, new, scoring))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class AttentionLayer(Protocol):
    """Attributes of Transformers' attention layers that are used here."""

    layer_idx: int


def slot_attention(
    module: AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slot_step: SlotStep | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`attend` with the signature of Transformers' attention functions: [1, heads, N, D] in, [1, N, H, D] out.

    `slot_step` is a keyword argument of the model's forward call, which Transformers passes through.

    Raises:
        EngineError: the model adds biases to its scores, or does not pass `slot_step` through.
    """
    if slot_step is None:
        raise EngineError(f"{type(module).__name__} takes no further arguments, which the embedded engine needs")
    if options.get("position_bias") is not None:
        raise EngineError(f"{type(module).__name__} adds biases to its scores, which is not supported")
    new = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    scaling = options.get("scaling")
    scoring = Scoring(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        # Qwen2-MoE gives its windows to the mask alone, which is not built here.
        window=options.get("sliding_window", getattr(module, "sliding_window", None)),
        cap=options.get("softcap"),
        sinks_H=options.get("s_aux"),
    )
    out = attend(slot_step, module.layer_idx, new, scoring)
    return out.view(1, len(out), query.shape[1], -1), None


def _decode(
    step: SlotStep, stored: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor, Tensor], scoring: Scoring
) -> Tensor:
    """Attend with one query per row. Uses plain matrix products, which are faster than the fused kernel on a CPU."""
    keys, values = stored
    batch = step.num_decode
    heads = keys.shape[1]
    query, *fresh = new
    targets = step.decode_targets(heads)
    for slot, tokens in zip(stored, fresh, strict=True):
        size = slot.shape[3]
        slot.view(-1, size).index_copy_(0, targets, tokens[:batch].reshape(-1, size))
    common, length = step.decode_span(keys)
    start = common.length if common is not None else 0
    grouped = (query[:batch] * scoring.scaling).view(batch, heads, -1, keys.shape[3])
    scores = grouped @ keys[:batch, :, start:length].transpose(2, 3)
    if common is not None:
        scores = torch.cat((common.scores(grouped, keys), scores), -1)
    weights = scoring.weights(scores, step.decode_mask(scoring.window, length, scores.dtype))
    mixed = weights[..., start:] @ values[:batch, :, start:length]
    if common is not None:
        mixed += common.mix(weights[..., :start], values)
    return mixed.view(batch, -1)


def _prefill(
    prompts: PromptBatch, stored: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor, Tensor], scoring: Scoring
) -> Tensor:
    """Causal attention within each prompt. Padding is stored past a prompt's end, masked, and overwritten later."""
    query, key, value = (tensor[prompts.token_index].transpose(1, 2) for tensor in new)
    for slot, fresh in zip(stored, (key, value), strict=True):
        slot[prompts.rows, :, : prompts.width] = fresh
    if scoring.is_plain:
        attended = _fused(query, key, value, prompts.band(scoring.window), scoring.scaling)
    else:
        attended = _in_blocks(query, key, value, prompts, scoring)
    return attended.transpose(1, 2)[prompts.places].flatten(1)


def _extend(
    prompts: PromptBatch, stored: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor, Tensor], scoring: Scoring
) -> Tensor:
    """Prefill prompts whose first tokens are cached: store the new tokens after them and attend to the whole row."""
    query, key, value = (tensor[prompts.token_index] for tensor in new)
    rows = prompts.rows[prompts.places[0]]
    positions = prompts.positions[prompts.places]
    for slot, fresh in zip(stored, (key, value), strict=True):
        slot[rows, :, positions] = fresh[prompts.places]
    keys, values = (slot[prompts.rows, :, : prompts.total] for slot in stored)
    query = query.transpose(1, 2)
    if scoring.is_plain:
        attended = _fused(query, keys, values, prompts.visible(scoring.window), scoring.scaling)
    else:
        attended = _in_blocks(query, keys, values, prompts, scoring)
    return attended.transpose(1, 2)[prompts.places].flatten(1)


def _fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention [P, H, width, D] of [P, heads, tokens, D]; causal if there is no mask.

    On a GPU, the flash kernel takes fewer key-value heads than query heads, but neither a mask nor float32. Without it,
    PyTorch may compute all scores in float32, which takes gigabytes for a long prompt. Keys and values are repeated
    there, for the kernel that takes both.
    """
    groups = query.shape[1] // keys.shape[1]
    if groups > 1 and query.device.type == "cuda" and (mask is not None or query.dtype == torch.float32):
        keys, values = _repeated(keys, groups), _repeated(values, groups)
    return scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def _in_blocks(query: Tensor, keys: Tensor, values: Tensor, batch: PromptBatch, scoring: Scoring) -> Tensor:
    """As `_fused`, for scores that PyTorch's kernels do not have: plain products, for a block of queries at a time."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = _repeated(keys, groups), _repeated(values, groups)
    prompts, heads, width, _ = query.shape
    step = max(1, SCORES_AT_ONCE // (prompts * heads * keys.shape[2]))
    parts = []
    for start in range(0, width, step):
        block = slice(start, start + step)
        scores = (query[:, :, block] * scoring.scaling) @ keys.mT
        visible = batch.visible_to(block, keys.shape[2], scoring.window)
        parts.append(scoring.weights(scores, _hidden_mask(visible, scores.dtype)) @ values)
    return torch.cat(parts, 2)


def _repeated(states: Tensor, groups: int) -> Tensor:
    """Key-value heads [P, K, tokens, D] once for each query head that reads them."""
    return states if groups == 1 else states[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def register_slot_attention() -> None:
    """Register `attn_implementation="kv_slots"` with Transformers. It needs no mask: the slots know their lengths."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)

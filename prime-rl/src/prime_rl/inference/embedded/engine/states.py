"""Decodes hybrid models: layers that carry a state from token to token keep it in the slots, one state per sequence.

A gated delta rule, a state space or a short convolution reads one sequence from left to right, so a step's row of N
tokens is split for it. The decode tokens are a batch of one token each, which continues the states of the slot rows.
Prompts of equal length are a batch that starts from nothing and leaves its last states in its rows; padding would
change those, so prompts of different lengths do not share a batch. A state stands for all tokens so far and cannot be
cut back to a common start: prompts of these models are always computed from their first token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from prime_rl.inference.embedded.engine.cache import KVSlots
from prime_rl.inference.embedded.engine.lora import Adapter, LinearHooks, StepAdapters
from prime_rl.inference.embedded.engine.tensors import on_device
from prime_rl.utils.model_lengths import state_layers


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens of one step that a layer computes at once: S sequences with L tokens each."""

    tokens_SL: Tensor
    """Their places among the step's N tokens."""
    rows: Tensor | None
    """Slot rows of the prompts; None for the decode tokens, whose sequence i is in row i."""
    cache: Cache
    """The states of a prompt's layers before they are in the slots; those of the slots when decoding."""
    adapters: StepAdapters | None


class StateLayers:
    """The state-carrying layers of a model, and the batches of the step that it is computing."""

    def __init__(self, model: PreTrainedModel, slots: KVSlots, hooks: Callable[[], LinearHooks]) -> None:
        """Wraps the `forward` of each of the layers, which stays Transformers' own outside of `on`.

        `hooks` are those of adapters. They find a token's adapter by its place, which differs in the layers' batches.
        """
        self._slots = slots
        self._hooks = hooks
        self._batches: list[TokenBatch] = []
        self.found = state_layers(model)
        self._num_layers = model.config.get_text_config().num_hidden_layers
        for layer in self.found:
            layer.forward = self._in_batches(layer.forward, layer.layer_idx)

    def __bool__(self) -> bool:
        return bool(self.found)

    def batches(
        self,
        num_decode: int,
        prompt_rows: SequenceOf[int],
        lengths: SequenceOf[int],
        adapters: SequenceOf[Adapter | None],
    ) -> list[TokenBatch]:
        """The batches of a step with `num_decode` decode tokens, then the prompts of these lengths.

        `adapters` are those of the decode tokens and then of the prompts; empty means none.
        """
        owners = list(adapters) or [None] * (num_decode + len(lengths))
        device, batches = self._slots.device, []
        if num_decode:
            tokens_SL = torch.arange(num_decode, device=device)[:, None]
            used = StepAdapters.from_owners(owners[:num_decode], [1] * num_decode, device)
            batches.append(TokenBatch(tokens_SL, None, self._cache_of_slots(num_decode), used))
        starts = [num_decode + sum(lengths[:index]) for index in range(len(lengths))]
        for length in dict.fromkeys(lengths):
            members = [index for index, each in enumerate(lengths) if each == length]
            tokens_SL = on_device([starts[index] for index in members], device)[:, None]
            rows = on_device([prompt_rows[index] for index in members], device)
            used = StepAdapters.from_owners(
                [owners[num_decode + index] for index in members], [length] * len(members), device
            )
            tokens_SL = tokens_SL + torch.arange(length, device=device)
            batches.append(TokenBatch(tokens_SL, rows, self._empty_cache(), used))
        return batches

    @contextmanager
    def on(self, batches: list[TokenBatch]) -> Iterator[None]:
        """Run the layers on these batches in the block."""
        self._batches = batches
        try:
            yield
        finally:
            self._batches = []

    def _empty_cache(self) -> Cache:
        return Cache(layers=[LinearAttentionLayer() for _ in range(self._num_layers)])

    def _cache_of_slots(self, rows: int) -> Cache:
        """The states in the first slot rows, which the layers update in place."""
        cache: Any = self._empty_cache()
        for layer in cache.layers:
            # Also of layers without a state: OLMo asks the last one whether there are earlier tokens.
            layer.has_previous_state[0] = True
        for index, (convolution, recurrent) in self._slots.states.items():
            layer = cache.layers[index]
            layer.device, layer.dtype = convolution.device, convolution.dtype
            layer.conv_states[0], layer.is_conv_states_initialized[0] = convolution[:rows], True
            layer.conv_kernel_size[0] = convolution.shape[-1]
            if recurrent is not None:
                layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = recurrent[:rows], True
        return cache

    def _in_batches(self, forward: Callable[..., Tensor], index: int) -> Callable[..., Tensor]:
        names = inspect.signature(forward).parameters
        takes_cache = "cache_params" if "cache_params" in names else "past_key_values"

        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self._batches:
                return forward(hidden_states, *args, **kwargs)
            out_NH = torch.empty_like(hidden_states[0])
            hooks = self._hooks()
            of_step = hooks.current
            for batch in self._batches:
                hooks.current = batch.adapters
                found_SLH = forward(hidden_states[0][batch.tokens_SL], **{takes_cache: batch.cache})
                out_NH[batch.tokens_SL] = found_SLH
                if batch.rows is not None:
                    state: Any = batch.cache.layers[index]
                    self._slots.write_state(index, batch.rows, state.conv_states[0], state.recurrent_states[0])
            hooks.current = of_step
            return out_NH[None]

        return run

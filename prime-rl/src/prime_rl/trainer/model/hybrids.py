"""Keeps the sequences of a packed row apart in the layers of hybrid models that carry a state from token to token.

Attention kernels keep sequences apart by masks or bounds. A gated delta rule, a state space or a short convolution
reads a row from left to right: the state after one sequence would enter the next. Each of these layers therefore runs
on batches of whole sequences, padded on the right, where a causal layer never looks; all other layers run on the packed
row. The layer's own forward pass is called as it is, with the kernel that Transformers picks.
Shapes: T tokens of a packed row, N tokens that the model computes (nodes or cells), S sequences of up to W tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prime_rl.trainer.model.context import own_slice, whole_row
from prime_rl.trainer.model.layouts import sequence_starts
from prime_rl.trainer.process.mesh import ContextAxis
from prime_rl.transport.weights import to_device
from prime_rl.utils.model_lengths import state_layers

_PADDING, _CALL_TOKENS = 1.25, 256
"""Sequences share a batch up to this ratio of padded to useful tokens. A batch of its own costs as much time as
`_CALL_TOKENS` more of them."""

_KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
"""Packages that Transformers takes kernels from, by their module."""


@dataclass(frozen=True, slots=True)
class SequenceBatches:
    """The sequences of a packed row in batches of similar length."""

    nodes_SW: list[Tensor]
    """For each batch, the index of every token among the N that the model computes; padding repeats the last."""
    cell_of_node_N: Tensor
    """Index of each node's result in the flattened results of all batches, one after another."""
    context: ContextAxis | None = None
    """The processes that divide the row; None if this one computes all of it."""

    def run(self, layer: Callable[[Tensor], Tensor], hidden_RWH: Tensor) -> Tensor:
        """Run a layer on each batch [S, W, H], and arrange the results like `hidden_RWH`, of N = R * W tokens.

        Of a divided row, `hidden_RWH` is this process's slice, and the layer runs on the whole.
        """
        if self.context is not None:
            whole = dataclasses.replace(self, context=None)
            return own_slice(whole.run(layer, whole_row(hidden_RWH, self.context)), self.context, 1)
        flat_NH = hidden_RWH.flatten(0, 1)
        results = [
            layer(flat_NH.index_select(0, nodes.flatten()).unflatten(0, nodes.shape)).flatten(0, 1)
            for nodes in self.nodes_SW
        ]
        return torch.cat(results).index_select(0, self.cell_of_node_N).unflatten(0, hidden_RWH.shape[:2])


def batch_sequences(
    position_ids_1T: Tensor,
    nodes: int,
    node_of_token_T: Tensor | None,
    device: torch.device,
    context: ContextAxis | None = None,
    *,
    uses_last: bool,
) -> SequenceBatches:
    """Batch the sequences of a packed row of which the model computes `nodes` tokens.

    `node_of_token_T` says where each token is among them, on `device`; None: in the same place. Without `uses_last`,
    the last token of a sequence may have no node, so it is left out.
    """
    positions = position_ids_1T[0].numpy()
    starts = sequence_starts(positions)
    lengths = np.diff(np.append(starts, len(positions)))
    if not uses_last:
        lengths = np.maximum(lengths - 1, 1)
    batches, cells, size = [], np.zeros(len(positions), dtype=np.int64), 0
    for members in _similar(lengths):
        width = int(lengths[members].max())
        columns = np.arange(width)
        is_token = columns < lengths[members][:, None]
        tokens = starts[members][:, None] + np.minimum(columns, lengths[members][:, None] - 1)
        cells[tokens[is_token]] = size + np.flatnonzero(is_token)
        batches.append(to_device(torch.from_numpy(tokens), device))
        size += tokens.size
    kept = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    kept_on_device, cells_on_device = (to_device(torch.from_numpy(each), device) for each in (kept, cells[kept]))
    # Tokens with a common prefix have one node and the same state, so any of their cells will do.
    if node_of_token_T is not None:
        kept_on_device = node_of_token_T[kept_on_device]
        batches = [node_of_token_T[tokens] for tokens in batches]
    cell_of_node_N = torch.zeros(nodes, dtype=torch.long, device=device)
    return SequenceBatches(batches, cell_of_node_N.index_put((kept_on_device,), cells_on_device), context)


def _similar(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Group sequences so that padding costs less than another call of the layer. Yields indices, longest first."""
    order = np.argsort(-lengths, kind="stable")
    first = useful = 0
    for place, index in enumerate(order):
        padded = (place - first + 1) * int(lengths[order[first]])
        if place > first and padded > _PADDING * (useful + int(lengths[index])) + _CALL_TOKENS:
            yield order[first:place]
            first, useful = place, 0
        useful += int(lengths[index])
    yield order[first:]


class StateLayers:
    """The state-carrying layers of a model, and the sequences of the row that it is computing."""

    def __init__(self, model: nn.Module) -> None:
        """Wraps the `forward` of each of the layers, which stays Transformers' own while there are no `sequences`."""
        self.sequences: SequenceBatches | None = None
        self._layers = state_layers(model)
        for layer in self._layers:
            layer.forward = self._keeping_apart(layer.forward)
            if any(hasattr(child, "lora") for child in layer.children()):
                # In training mode, the fused kernels of Mamba 2 read the output projection's weight alone, without
                # its adapter. These layers have no dropout, so nothing else depends on the mode.
                layer.train = partial(_train_children, layer)

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def description(self) -> str:
        """What computes the layers, for the log."""
        found = [name for module, name in _KERNELS.items() if find_spec(module) is not None]
        missing = [name for name in _KERNELS.values() if name not in found]
        return " and ".join(found) if found else f"PyTorch ({', '.join(missing)} are not installed)"

    @contextmanager
    def on(self, sequences: SequenceBatches | None) -> Iterator[None]:
        """Run the layers on these sequences in the block."""
        before, self.sequences = self.sequences, sequences
        try:
            yield
        finally:
            self.sequences = before

    def bound(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A `forward` that runs again on the sequences of now, as the backward pass of checkpointed blocks does."""
        sequences = self.sequences

        def on_these(*args: Any, **kwargs: Any) -> Any:
            with self.on(sequences):
                return forward(*args, **kwargs)

        return on_these

    def _keeping_apart(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.sequences is None:
                return forward(hidden_states, *args, **kwargs)
            # No mask and no bounds: a batch has whole sequences and padding on the right.
            return self.sequences.run(forward, hidden_states)

        return run


def _train_children(layer: nn.Module, mode: bool = True) -> nn.Module:
    nn.Module.train(layer, mode)
    layer.training = False
    return layer

"""Keeps the sequences of a packed row apart in the layers of hybrid models that carry a state from token to token.

Attention kernels keep sequences apart by masks or bounds. A gated delta rule, a state space or a short convolution
reads a row from left to right: the state after one sequence would enter the next. Each of these layers therefore runs
on batches of whole sequences, padded on the right, where a causal layer never looks; all other layers run on the packed
row. The layer's own forward pass is called as it is, with the kernel that Transformers picks.

Where processes divide a row (`model.cp`), the layer's projections run on the tokens of each process, and what lies
between them on all tokens of some of the heads or channels, as `Heads` says.

Shapes: T tokens of a packed row, N tokens that the model computes (nodes or cells), S sequences of up to W tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from prime_rl.trainer.model.context import own_slice, whole_heads, whole_row, whole_tokens
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

    def run(self, layer: Callable[[Tensor], Tensor], hidden_RWH: Tensor) -> Tensor:
        """Run a layer on each batch [S, W, H], and arrange the results like `hidden_RWH`, of N = R * W tokens."""
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
    return SequenceBatches(batches, cell_of_node_N.index_put((kept_on_device,), cells_on_device))


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


Segments = list[tuple[int, int]]
"""Numbers of heads and their widths, one after another along the first axis of a weight."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How the heads of a layer lie in its weights, up to the projection that it ends with, `out_proj`."""

    count: int
    """Each process needs as many as the others. Heads that others share may be fewer, and are repeated."""
    inputs: dict[str, Segments]
    """Outputs of the projections that the layer starts with."""
    weights: dict[str, Segments]
    """Weights in between. Those that are not named are the same for all heads."""
    sizes: Callable[[Callable[[int], int]], dict[str, int]]
    """Attributes of a layer with the heads of one process, from a function of a number of heads to that of its own."""
    normalized: int = 0
    """Width of a norm over all heads before `out_proj`, which the first outputs of the projections gate."""


def _delta_rule(layer: Any) -> Heads:
    keys, values = (layer.num_k_heads, layer.head_k_dim), (layer.num_v_heads, layer.head_v_dim)
    each = [(layer.num_v_heads, 1)]

    def sizes(own: Callable[[int], int]) -> dict[str, int]:
        found = {"num_k_heads": own(keys[0]), "num_v_heads": own(values[0])}
        return found | {"key_dim": found["num_k_heads"] * keys[1], "value_dim": found["num_v_heads"] * values[1]}

    weights = {"conv1d": [keys, keys, values], "A_log": each, "dt_bias": each}
    if hasattr(layer, "in_proj_qkvz"):
        # Each key head is followed by its values.
        of_keys = {name: [(keys[0], getattr(layer, name).out_features // keys[0])] for name in _QWEN3_NEXT_INPUTS}
        return Heads(keys[0], of_keys, weights, sizes)
    inputs = {"in_proj_qkv": weights["conv1d"], "in_proj_z": [values], "in_proj_b": each, "in_proj_a": each}
    return Heads(values[0], inputs, weights, sizes)


def _state_space(layer: Any) -> Heads:
    heads, groups = (layer.num_heads, layer.head_dim), (layer.n_groups, layer.ssm_state_size)
    each = [(layer.num_heads, 1)]
    convolved = [heads, groups, groups]

    def sizes(own: Callable[[int], int]) -> dict[str, int]:
        found = {"num_heads": own(heads[0]), "n_groups": own(groups[0])}
        width = found["num_heads"] * heads[1]
        conv_dim = width + 2 * found["n_groups"] * groups[1]
        return found | {"intermediate_size": width, "conv_dim": conv_dim}

    weights = {"conv1d": convolved, "A_log": each, "D": each, "dt_bias": each}
    return Heads(heads[0], {"in_proj": [heads, *convolved, *each]}, weights, sizes, layer.intermediate_size)


def _short_convolution(layer: Any) -> Heads:
    channels = (layer.conv.in_channels, 1)
    return Heads(channels[0], {"in_proj": [channels] * 3}, {"conv": [channels]}, lambda own: {})


_QWEN3_NEXT_INPUTS = ("in_proj_qkvz", "in_proj_ba")
_HEADS: dict[str, Callable[[Any], Heads]] = {
    **dict.fromkeys(
        ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        _delta_rule,
    ),
    **dict.fromkeys(("BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"), _state_space),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv"), _short_convolution),
}
"""By the names of layers."""


class DividedLayer:
    """A layer that computes all tokens of a row for some of its heads, in each of the processes that share the row.

    Projections and a norm over all heads run on the process's own tokens.
    """

    def __init__(self, layer: Any, heads: Heads, axis: ContextAxis) -> None:
        self._layer, self._heads, self._axis = layer, heads, axis
        self._sizes = heads.sizes(lambda count: math.lcm(count, axis.size) // axis.size)
        inputs = [segment for segments in heads.inputs.values() for segment in segments]
        self._inputs_of_processes = torch.cat([self._rows(inputs, rank) for rank in range(axis.size)])
        self._own = {name: self._rows(segments, axis.rank) for name, segments in heads.weights.items()}

    def run(self, sequences: SequenceBatches, hidden_1nH: Tensor) -> Tensor:
        """The layer's result for the tokens of this process. Collective."""
        layer, axis = self._layer, self._axis
        projected = torch.cat([getattr(layer, name)(hidden_1nH) for name in self._heads.inputs], dim=-1)
        columns = projected.index_select(-1, to_device(self._inputs_of_processes, projected.device))
        own_1Nc = whole_tokens(columns.unflatten(-1, (axis.size, -1)).transpose(1, 2), axis)[:, 0]
        mixed_1Nv = sequences.run(partial(type(layer).forward, self._part()), own_1Nc)
        mixed = whole_heads(mixed_1Nv[:, :, None], axis).flatten(2)
        if self._heads.normalized > 0:
            mixed = layer.norm(mixed, projected[..., : self._heads.normalized])
        return cast("Tensor", layer.out_proj(mixed.to(hidden_1nH.dtype)))

    def _rows(self, segments: Segments, rank: int) -> Tensor:
        """Where the heads of a process lie."""
        start, rows, size = 0, [], self._axis.size
        for count, width in segments:
            heads = torch.arange(count).repeat_interleave(size // math.gcd(count, size)).chunk(size)[rank]
            rows.append((start + heads[:, None] * width + torch.arange(width)).flatten())
            start += count * width
        return torch.cat(rows)

    def _part(self) -> nn.Module:
        """The layer with the heads of this process, which takes what the projections of these gave."""
        part = self._with_own(self._layer, "")
        vars(part).update(self._sizes)
        part.training = False  # else fused kernels read the weight of `out_proj`
        start = 0
        for name, segments in self._heads.inputs.items():
            width = len(self._rows(segments, 0))
            part._modules[name] = _Columns(slice(start, start + width))
            start += width
        part._modules["out_proj"] = _Columns(slice(None))
        if self._heads.normalized > 0:
            part._modules["norm"] = _Columns(slice(None))
        for name in self._own:
            if name in part._modules:
                part._modules[name] = self._with_own(getattr(self._layer, name), name)
        return part

    def _with_own(self, module: nn.Module, owner: str) -> nn.Module:
        """A copy of a module with the rows of this process of its weights."""
        part = copy.copy(module)
        part._modules, part._parameters = dict(module._modules), dict(module._parameters)
        for name, weight in module._parameters.items():
            rows = self._own.get(owner or name)
            if weight is not None and rows is not None:
                # Not a parameter: its gradient is that of the whole weight.
                part._parameters[name] = weight.index_select(0, to_device(rows, weight.device))  # type: ignore[assignment]
        return part


class _Columns(nn.Module):
    """Stands for a layer whose result is there."""

    def __init__(self, columns: slice) -> None:
        super().__init__()
        self._columns = columns

    def forward(self, states: Tensor, gate: Tensor | None = None) -> Tensor:
        return states[..., self._columns]


class StateLayers:
    """The state-carrying layers of a model, and the sequences of the row that it is computing."""

    def __init__(self, model: nn.Module, context: ContextAxis | None = None) -> None:
        """Wraps the `forward` of each of the layers, which stays Transformers' own while there are no `sequences`.

        `context`: the processes that divide rows.
        """
        self.sequences: SequenceBatches | None = None
        self._layers = state_layers(model)
        self._undivided: set[str] = set()
        for layer in self._layers:
            layer.forward = self._keeping_apart(layer, context)
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
        kernels = " and ".join(found) if found else f"PyTorch ({', '.join(missing)} are not installed)"
        undivided = "".join(f"; {name} on the whole row in every process" for name in sorted(self._undivided))
        return kernels + undivided

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

    def _keeping_apart(self, layer: nn.Module, context: ContextAxis | None) -> Callable[..., Tensor]:
        forward, name = layer.forward, type(layer).__name__
        divided = None
        if context is not None:
            heads = _HEADS[name](layer) if name in _HEADS else None
            if heads is None or heads.count % context.size:
                self._undivided.add(name)
            else:
                divided = DividedLayer(layer, heads, context)

        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            sequences = self.sequences
            if sequences is None:
                return cast("Tensor", forward(hidden_states, *args, **kwargs))
            if divided is not None:
                return divided.run(sequences, hidden_states)
            # No mask and no bounds: a batch has whole sequences and padding on the right.
            if context is None:
                return sequences.run(forward, hidden_states)
            return own_slice(sequences.run(forward, whole_row(hidden_states, context)), context, 1)

        return run


def _train_children(layer: nn.Module, mode: bool = True) -> nn.Module:
    nn.Module.train(layer, mode)
    layer.training = False
    return layer

"""Bytes that one process of a trainer sends for a packed row, and why: the price of a mesh.

Counts what collectives must send at least: of n processes, a gather or a scatter of b bytes sends b (n - 1) / n from
each, a sum twice as much. Experts are taken to be chosen equally often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import gcd

from prime_rl.checks.memory.shapes import Tensors, count
from prime_rl.checks.memory.training import Training, adapter_parameters, experts_per_token, recomputed_blocks

Traffic = dict[str, int]
"""Bytes by the key of the mesh that they are sent for; those of FSDP under `dp_shard`."""


def traffic_of_row(training: Training) -> Traffic:
    """Bytes that a process sends in the forward and backward pass of one row."""
    sent: Counter[str] = Counter()
    again = recomputed_blocks(training.blocks, training.model.ac, training.row_tokens)
    for index, block in enumerate(training.shape.blocks):
        # Forward, backward, and forward again.
        passes = 3 if index in again else 2
        sent.update({axis: passes * size for axis, size in _of_hidden_states(training, block)})
        sent.update(dict(_of_weights(training, block, training.shape.places[index])))
    sent.update(dict(_of_weights(training, training.shape.root, None)))
    if training.model.tp > 1:  # each process scores some of the tokens
        width = training.compute_bytes * training.row_tokens * training.shape.hidden
        sent["tp"] += _summed(width, training.model.tp)
    return {axis: size for axis, size in sent.items() if size}


def _gathered(size: int, processes: int) -> int:
    return size * (processes - 1) // processes


def _summed(size: int, processes: int) -> int:
    return 2 * _gathered(size, processes)


def _of_hidden_states(training: Training, block: Tensors) -> Iterator[tuple[str, int]]:
    """What a process sends in one pass of a block to those that share its rows, or its experts."""
    shape, model, tokens = training.shape, training.model, training.row_tokens
    cp, tp, ep = model.cp, model.tp, max(model.ep, model.tp)
    heads, kv_heads = max(1, shape.heads // tp), max(1, shape.kv_heads // tp)
    repeated = kv_heads * (cp // gcd(kv_heads, cp))
    channels = (heads + repeated) * (shape.key_dim + shape.value_dim)
    width = training.compute_bytes * tokens * shape.hidden
    yield "cp", _gathered(training.compute_bytes * tokens * channels, cp)
    is_sparse = any(len(size) == 3 for size in block.values())
    # Attention's outputs are summed, and so are a dense layer's; those of experts are only gathered.
    yield "tp", _summed(width, tp) + (_gathered(width, tp) if is_sparse else _summed(width, tp))
    if is_sparse:
        yield "ep", 2 * _gathered(width * experts_per_token(shape) // tp, ep)  # there and back


def _of_weights(training: Training, tensors: Tensors, place: str | None) -> Iterator[tuple[str, int]]:
    """What FSDP sends to gather weights and to sum gradients, and copies of the model to sum theirs.

    `place` is the path of a block; None for what is outside of the blocks.
    """
    model, lora, is_root = training.model, training.model.lora, place is None
    tp, ep = (1, 1) if is_root else (model.tp, max(model.ep, model.tp))
    gathers = 1 if is_root or not model.reshard_after_forward else 2
    experts: Tensors = {name: size for name, size in tensors.items() if len(size) == 3}
    others: Tensors = {name: size for name, size in tensors.items() if len(size) != 3}
    sharded = copied = 0
    for part, division in ((others, tp), (experts, ep)):
        own, shards = count(part) // division, max(1, training.shards // division)
        trained = own if lora is None else adapter_parameters(part, lora, place or "") // division
        sharded += gathers * _gathered(training.stored(own, [part], training.compute_bytes), shards)
        sharded += _gathered(trained * training.reduce_bytes, shards)
        copied += _summed(trained * training.reduce_bytes // shards, model.dp_replicate)
    yield "dp_shard", sharded
    yield "dp_replicate", copied

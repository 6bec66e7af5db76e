"""Key-value cache of the embedded engine: slots of the running sequences, and prefixes of earlier ones to start from.

A slot is one row of the cache: row i belongs to running sequence i. A conversation's next turn starts with all tokens
of the previous one, and the requests of a group share their prompt, so `Prefixes` keeps keys and values of earlier
tokens. They are reused only under the weights that computed them: every update of weights or adapters clears them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from prime_rl.inference.embedded.engine.generation import Sequence
from prime_rl.inference.embedded.engine.tensors import on_device, rounded_up

_LENGTH_STEP = 32
_ROW_STEP = 16
_AMPLE_LENGTH_STEP = 128


class KVSlots:
    """Key and value tensors `[rows, kv heads, length, head dim]` of every layer, grown on demand.

    Layers that carry a state from token to token have tensors `[rows, ...]` instead, whatever the length. All are
    initialized to zeros: masked positions are multiplied by 0, which would not remove a NaN.
    """

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        self.budget_bytes = budget_bytes
        self.device = device
        self.rows = 0
        self.length = 0
        self.generation = 0
        """Changes whenever tensors are replaced: their addresses in a captured graph are then those of freed memory."""
        self.states: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Convolution state of every layer that has one, and its recurrent state, which short convolutions lack."""
        self.routes: Tensor | None = None
        """The experts that every token was routed to, `[rows, 1, length, layers * experts per token]`. None if the
        engine does not return them. They are kept and copied with the keys of their tokens."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_layers(self) -> int:
        """Layers with keys and values, or a state, or both side by side."""
        return len(self._layers.keys() | self.states.keys())

    @property
    def bytes_per_token(self) -> int:
        """Size of one token of one sequence across all layers; 0 before the first forward pass."""
        return sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in self._token_tensors())

    @property
    def bytes_per_state(self) -> int:
        """Size of the states of one sequence across all layers; 0 before the first forward pass."""
        return sum(prod(tensor.shape[1:]) * tensor.element_size() for tensor in self._state_tensors())

    def fits(self, rows: int, length: int) -> bool:
        """Whether `rows` sequences of up to `length` tokens fit in the memory budget."""
        bytes_per_row = self._rounded_length(length) * self.bytes_per_token + self.bytes_per_state
        return self._rounded_rows(rows) * bytes_per_row <= self.budget_bytes

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` sequences of up to `length` tokens, keeping stored tokens.

        If keeping the larger of the old and new size in both dimensions would exceed the budget, the tensors are
        resized to exactly the requested size, so one dimension may shrink. On a GPU, the length doubles if that fits:
        attention reads no more for it, and every new size costs all captured graphs.
        """
        if rows <= self.rows and length <= self.length:
            return
        widest = max(rows, self.rows), max(length, self.length)
        if self.fits(*widest):
            rows, length = widest
        ample = rounded_up(length, _AMPLE_LENGTH_STEP, steps_per_doubling=1)
        if self.device.type == "cuda" and self.fits(rows, ample):
            length = ample
        self._resize(self._rounded_rows(rows), self._rounded_length(length))

    def free(self) -> None:
        """Give all memory back. The sizes of a token and of a state stay known."""
        self._resize(0, 0)

    def _resize(self, rows: int, length: int) -> None:
        for index, pair in self._layers.items():
            self._layers[index] = (self._resized(pair[0], rows, length), self._resized(pair[1], rows, length))
        if self.routes is not None:
            self.routes = self._resized(self.routes, rows, length)
        for index, (convolution, recurrent) in self.states.items():
            kept = None if recurrent is None else self._with_rows(recurrent, rows)
            self.states[index] = (self._with_rows(convolution, rows), kept)
        self.rows, self.length = rows, length
        self.generation += 1

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer. New tensors `[tokens, kv heads, head dim]` set the shapes and the dtype."""
        if index not in self._layers:
            shapes = [(self.rows, new.shape[1], self.length, new.shape[2]) for new in (key, value)]
            self._layers[index] = (key.new_zeros(shapes[0]), value.new_zeros(shapes[1]))
            self.generation += 1
        return self._layers[index]

    def write_state(self, index: int, rows: Tensor, convolution: Tensor, recurrent: Tensor | None) -> None:
        """Set the states of a layer in `rows`. New tensors set the shapes and the dtype."""
        if index not in self.states:
            empty = None if recurrent is None else recurrent.new_zeros((self.rows, *recurrent.shape[1:]))
            self.states[index] = (convolution.new_zeros((self.rows, *convolution.shape[1:])), empty)
            self.generation += 1
        for stored, new in zip(self.states[index], (convolution, recurrent), strict=True):
            if stored is not None and new is not None:
                stored[rows] = new

    def write_routes(self, rows: Tensor, positions: Tensor, chosen_NLk: Tensor) -> None:
        """Set the experts of N tokens. The first ones set the shape and the dtype."""
        flat = chosen_NLk.flatten(1)
        if self.routes is None:
            self.routes = flat.new_zeros((self.rows, 1, self.length, flat.shape[1]))
        self.routes[rows, 0, positions] = flat

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of one row, and its states, to other rows."""
        # A list as an index would be copied to the device for every tensor.
        into = targets[0] if len(targets) == 1 else on_device(targets, self.device)
        for tensor in self._token_tensors():
            # PyTorch refuses to copy between views that share memory if both are dense, as whole rows are.
            tensor[into, :, :length] = tensor[source, :, :length].clone()
        for tensor in self._state_tensors():
            tensor[into] = tensor[source].clone()

    def erase(self, row: int) -> None:
        """Overwrite a row with zeros."""
        for tensor in self._token_tensors():
            tensor[row].zero_()
        for tensor in self._state_tensors():
            tensor[row].zero_()

    def read_row(self, row: int, length: int) -> list[Tensor]:
        """Copy out the first `length` tokens of a row: key and value tensors [kv heads, length, head dim] per layer,
        and the routes if they are kept."""
        return [tensor[row, :, :length].clone() for tensor in self._token_tensors()]

    def write_row(self, tensors: list[Tensor], row: int, length: int) -> None:
        """Write the first `length` tokens of tensors from `read_row` into a row."""
        for tensor, copied in zip(self._token_tensors(), tensors, strict=True):
            tensor[row, :, :length] = copied[:, :length]

    def _token_tensors(self) -> Iterator[Tensor]:
        """Everything that is kept for each token."""
        yield from (tensor for pair in self._layers.values() for tensor in pair)
        if self.routes is not None:
            yield self.routes

    def _state_tensors(self) -> Iterator[Tensor]:
        return (tensor for pair in self.states.values() for tensor in pair if tensor is not None)

    @staticmethod
    def _with_rows(state: Tensor, rows: int) -> Tensor:
        resized = state.new_zeros((rows, *state.shape[1:]))
        kept = min(rows, len(state))
        resized[:kept] = state[:kept]
        return resized

    @staticmethod
    def _resized(tensor: Tensor, rows: int, length: int) -> Tensor:
        kept_rows, kept_length = min(rows, tensor.shape[0]), min(length, tensor.shape[2])
        resized = tensor.new_zeros((rows, tensor.shape[1], length, tensor.shape[3]))
        resized[:kept_rows, :, :kept_length] = tensor[:kept_rows, :, :kept_length]
        return resized

    @staticmethod
    def _rounded_rows(rows: int) -> int:
        return -(-rows // _ROW_STEP) * _ROW_STEP

    @staticmethod
    def _rounded_length(length: int) -> int:
        """At most 31 tokens or a quarter more. Attention reads whole rows, so a short step of growth saves time; the
        steps become longer with the rows, so that sequences are copied a few times only."""
        return rounded_up(length, _LENGTH_STEP, steps_per_doubling=4)


BLOCK_TOKENS = 16
"""Prompts are matched in blocks of this many tokens; shorter common prefixes are not reused."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """The keys and values of a finished sequence."""

    tokens: SequenceOf[int]
    """Those of images are the images themselves: `Sequence.identity`."""
    owner: object
    """The adapter that computed it; None is the base model."""
    tensors: list[Tensor]
    keys: list[int]
    """Keys of its blocks in the cache's index."""

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Match:
    """The first `length` tokens of a prompt are in a slot row or in a cache entry, `source`."""

    length: int
    source: int | CachedPrefix


class PrefixCache:
    """A cache of finished sequences' keys and values, evicted least recently used first. Not thread-safe."""

    def __init__(self, slots: KVSlots, budget_bytes: int) -> None:
        self.slots = slots
        self.budget_bytes = budget_bytes
        self.size_bytes = 0
        self.epoch = 0
        """Number of weight updates so far; identifies the live weights."""
        """Number of prompt tokens that were not prefilled again."""
        self._entries: OrderedDict[int, CachedPrefix] = OrderedDict()
        self._index: dict[int, CachedPrefix] = {}

    def clear(self) -> None:
        """Drop all entries, because the weights have changed."""
        self.epoch += 1
        self.size_bytes = 0
        self._entries.clear()
        self._index.clear()

    def find(self, sequence: Sequence, running: SequenceOf[Sequence]) -> Match | None:
        """Find the longest cached prefix of a waiting sequence. At least one token is left to prefill.

        A state stands for all tokens of its sequence so far and cannot be cut back to a prefix: models with states
        compute every prompt from its first token.
        """
        limit = len(sequence.tokens) - 1
        if (
            self.budget_bytes == 0
            or self.slots.states
            or limit < BLOCK_TOKENS
            or sequence.request.wants_prompt_logprobs
        ):
            return None
        request, tokens = sequence.request, sequence.identity
        for row, other in enumerate(running):
            same = other.request.identity == request.identity and other.request.adapter is request.adapter
            if same and other.epoch == self.epoch:
                return Match(min(limit, len(request.prompt)), row)
        found: CachedPrefix | None = None
        length = 0
        for key in _block_keys(tokens, request.adapter):
            if (entry := self._index.get(key)) is None:
                break
            found = entry
            length += BLOCK_TOKENS
        if found is None or found.owner is not request.adapter or found.tokens[:length] != tokens[:length]:
            return None
        end = min(limit, len(found.tokens))
        while length < end and found.tokens[length] == tokens[length]:
            length += 1
        return Match(min(length, limit), found)

    def load(self, match: Match, row: int) -> None:
        """Copy the keys and values of a match into a slot row."""
        if isinstance(match.source, CachedPrefix):
            self._entries.move_to_end(id(match.source))
            self.slots.write_row(match.source.tensors, row, match.length)
        elif match.source != row:
            self.slots.copy(match.source, [row], match.length)

    def store(self, sequence: Sequence, row: int) -> None:
        """Cache the keys and values of a finished sequence, except its last token, which has none yet."""
        length = len(sequence.tokens) - 1
        size_bytes = length * self.slots.bytes_per_token
        is_too_large = size_bytes > self.budget_bytes
        if self.slots.states or sequence.epoch != self.epoch or length < BLOCK_TOKENS or is_too_large:
            return
        while self.size_bytes + size_bytes > self.budget_bytes:
            self._drop_oldest()
        owner = sequence.request.adapter
        tokens = sequence.identity[:length]
        entry = CachedPrefix(tokens, owner, self.slots.read_row(row, length), list(_block_keys(tokens, owner)))
        self._entries[id(entry)] = entry
        self._index.update(dict.fromkeys(entry.keys, entry))
        self.size_bytes += entry.size_bytes

    def _drop_oldest(self) -> None:
        _, oldest = self._entries.popitem(last=False)
        self.size_bytes -= oldest.size_bytes
        for key in oldest.keys:
            if self._index.get(key) is oldest:
                del self._index[key]


def _block_keys(tokens: SequenceOf[int], owner: object) -> Iterator[int]:
    """Yield a key for each full block, hashed over all tokens up to the block's end."""
    key = id(owner)
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, *tokens[start : start + BLOCK_TOKENS]))
        yield key

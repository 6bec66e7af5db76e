"""Prefix cache: reuses the keys and values of earlier tokens instead of prefilling them again.

A conversation's next turn starts with all tokens of the previous one, and the requests of a group share their prompt.
Keys and values are reused only under the weights that computed them: every update of weights or adapters clears the
cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from prime_rl.inference.embedded.engine.generation import Sequence
from prime_rl.inference.embedded.engine.slots import KVSlots

BLOCK_TOKENS = 16
"""Prompts are matched in blocks of this many tokens; shorter common prefixes are not reused."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """The keys and values of a finished sequence."""

    tokens: list[int]
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
        self.num_reused_tokens = 0
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
        """Find the longest cached prefix of a waiting sequence. At least one token is left to prefill."""
        limit = len(sequence.tokens) - 1
        if self.budget_bytes == 0 or limit < BLOCK_TOKENS or sequence.request.wants_prompt_logprobs:
            return None
        request = sequence.request
        for row, other in enumerate(running):
            same = other.request.prompt == request.prompt and other.request.adapter is request.adapter
            if same and other.epoch == self.epoch:
                return Match(min(limit, len(request.prompt)), row)
        found: CachedPrefix | None = None
        length = 0
        for key in _block_keys(sequence.tokens, request.adapter):
            if (entry := self._index.get(key)) is None:
                break
            found = entry
            length += BLOCK_TOKENS
        if found is None or found.owner is not request.adapter or found.tokens[:length] != sequence.tokens[:length]:
            return None
        end = min(limit, len(found.tokens))
        while length < end and found.tokens[length] == sequence.tokens[length]:
            length += 1
        return Match(min(length, limit), found)

    def load(self, match: Match, row: int) -> None:
        """Copy the keys and values of a match into a slot row."""
        self.num_reused_tokens += match.length
        if isinstance(match.source, CachedPrefix):
            self._entries.move_to_end(id(match.source))
            self.slots.write_row(match.source.tensors, row, match.length)
        elif match.source != row:
            self.slots.copy(match.source, [row], match.length)

    def store(self, sequence: Sequence, row: int) -> None:
        """Cache the keys and values of a finished sequence, except its last token, which has none yet."""
        length = len(sequence.tokens) - 1
        size_bytes = length * self.slots.bytes_per_token
        if sequence.epoch != self.epoch or length < BLOCK_TOKENS or size_bytes > self.budget_bytes:
            return
        while self.size_bytes + size_bytes > self.budget_bytes:
            self._drop_oldest()
        owner = sequence.request.adapter
        tokens = sequence.tokens[:length]
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

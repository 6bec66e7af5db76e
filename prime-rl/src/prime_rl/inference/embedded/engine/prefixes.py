"""What the engine has read already: keys and values that a new prompt takes over instead of reading its tokens again.

The next turn of a conversation begins with all tokens of the last one, and the requests of a group have one prompt.
Keys and values are taken over only if they were made by the very weights that are live: every swap of weights or
adapters forgets what was kept.
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
"""Prompts are compared block by block; shorter common beginnings are read again."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The keys and values of a finished sequence."""

    tokens: list[int]
    owner: object
    """The adapter; None is the base model."""
    parts: list[Tensor]
    keys: list[int]
    """Of its blocks, in the index of the store."""

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Match:
    """The first `length` tokens of a prompt are in a row of the slots, or were kept."""

    length: int
    source: int | Kept


class PrefixStore:
    """Beginnings of prompts that need not be read. Used by the engine's thread only."""

    def __init__(self, slots: KVSlots, budget_bytes: int) -> None:
        self.slots = slots
        self.budget_bytes = budget_bytes
        self.size_bytes = 0
        self.epoch = 0
        """Which weights are live; counts their swaps."""
        self.num_reused = 0
        """Tokens that were not read again."""
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._index: dict[int, Kept] = {}

    def forget(self) -> None:
        """The weights have changed."""
        self.epoch += 1
        self.size_bytes = 0
        self._kept.clear()
        self._index.clear()

    def find(self, sequence: Sequence, running: SequenceOf[Sequence]) -> Match | None:
        """The longest beginning of a waiting sequence that is there. One token at least is left to read."""
        limit = len(sequence.tokens) - 1
        if self.budget_bytes == 0 or limit < BLOCK_TOKENS or sequence.request.wants_prompt_logprobs:
            return None
        request = sequence.request
        for row, other in enumerate(running):
            same = other.request.prompt == request.prompt and other.request.adapter is request.adapter
            if same and other.epoch == self.epoch:
                return Match(min(limit, len(request.prompt)), row)
        found: Kept | None = None
        length = 0
        for key in _block_keys(sequence.tokens, request.adapter):
            if (kept := self._index.get(key)) is None:
                break
            found = kept
            length += BLOCK_TOKENS
        if found is None or found.owner is not request.adapter or found.tokens[:length] != sequence.tokens[:length]:
            return None
        end = min(limit, len(found.tokens))
        while length < end and found.tokens[length] == sequence.tokens[length]:
            length += 1
        return Match(min(length, limit), found)

    def take(self, match: Match, row: int) -> None:
        """Put what was found into a row."""
        self.num_reused += match.length
        if isinstance(match.source, Kept):
            self._kept.move_to_end(id(match.source))
            self.slots.put(match.source.parts, row, match.length)
        elif match.source != row:
            self.slots.copy(match.source, [row], match.length)

    def keep(self, sequence: Sequence, row: int) -> None:
        """Keep the keys and values of a sequence that has ended. Its last token has none yet."""
        length = len(sequence.tokens) - 1
        size_bytes = length * self.slots.bytes_per_token
        if sequence.epoch != self.epoch or length < BLOCK_TOKENS or size_bytes > self.budget_bytes:
            return
        while self.size_bytes + size_bytes > self.budget_bytes:
            self._drop_oldest()
        owner = sequence.request.adapter
        tokens = sequence.tokens[:length]
        kept = Kept(tokens, owner, self.slots.parts(row, length), list(_block_keys(tokens, owner)))
        self._kept[id(kept)] = kept
        self._index.update(dict.fromkeys(kept.keys, kept))
        self.size_bytes += kept.size_bytes

    def _drop_oldest(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        self.size_bytes -= oldest.size_bytes
        for key in oldest.keys:
            if self._index.get(key) is oldest:
                del self._index[key]


def _block_keys(tokens: SequenceOf[int], owner: object) -> Iterator[int]:
    """A key for each whole block, which stands for all tokens up to its end."""
    key = id(owner)
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, *tokens[start : start + BLOCK_TOKENS]))
        yield key

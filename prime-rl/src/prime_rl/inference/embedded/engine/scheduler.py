"""Which sequences run: admission, and the upkeep of slot rows. Decides only; the engine runs the model."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from prime_rl.inference.embedded.engine.common_start import Origin
from prime_rl.inference.embedded.engine.generation import Sequence
from prime_rl.inference.embedded.engine.prefixes import Match, PrefixStore
from prime_rl.inference.embedded.engine.slots import KVSlots


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the engine's work."""

    max_running: int = 128
    max_waiting: int = 4096
    """Samples in the queue; a request that would exceed it is refused."""
    max_prefill_tokens: int = 4096
    """Prompt tokens, padding included, read in one forward pass. A longer prompt is read alone."""
    max_adapters: int = 8
    """Different adapters in the running batch; a sequence of one more waits."""
    max_prefix_bytes: int = 0
    """Of keys and values that are kept for later prompts with the same beginning; 0 reads every prompt anew."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """New sequences of one step. Sequences with equal tokens share one reading of them."""

    sequences: list[Sequence]
    leaders: list[int]
    """Indices into `sequences` of those that are read."""
    source: list[int]
    """For each sequence, the index into `leaders` of the one that it copies; its own for a leader."""
    known: list[int]
    """For each leader, how many of its tokens are in its row already."""


class Scheduler:
    """The queue and the running batch. Running sequence i owns slot row i, so the batch is always contiguous."""

    def __init__(self, limits: Limits, slots: KVSlots) -> None:
        self.limits = limits
        self.slots = slots
        self.prefixes = PrefixStore(slots, limits.max_prefix_bytes)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._numbers = itertools.count()
        self.has_unwanted = False
        """Set by any thread when a request is cancelled or fails."""

    def drop_unwanted(self) -> None:
        """Forget the samples of requests that were cancelled or have failed."""
        if not self.has_unwanted:
            return
        self.has_unwanted = False
        self._keep([sequence for sequence in self.running if not sequence.request.result.done()])
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.request.result.done())

    def retire_finished(self) -> list[Sequence]:
        """Take finished sequences out of the batch and return them."""
        finished = [sequence for sequence in self.running if sequence.completion is not None]
        if finished:
            if self.limits.max_prefix_bytes:
                self._keep_prefixes()
            self._keep([sequence for sequence in self.running if sequence.completion is None])
        return finished

    def make_room(self) -> None:
        """Reserve a token for every running sequence. Without memory for it, the youngest go back to the queue.

        They keep their tokens, and are read again like a prompt when there is room.
        """
        if not self.running:
            return
        length = max(len(sequence.tokens) for sequence in self.running)
        while len(self.running) > 1 and not self.slots.fits(len(self.running), length):
            self.waiting.appendleft(self.running.pop())
            length = max(len(sequence.tokens) for sequence in self.running)
        self.slots.reserve(len(self.running), length)

    def admit(self) -> Prompts:
        """Move sequences from the queue to the end of the batch, as far as rows, memory and the step's bound allow."""
        sequences: list[Sequence] = []
        leaders: list[int] = []
        source: list[int] = []
        matches: list[Match | None] = []
        known: dict[object, int] = {}
        before = list(self.running)
        longest = max((len(sequence.tokens) for sequence in before), default=0)
        width = 0
        while self.waiting and len(self.running) < self.limits.max_running:
            sequence = self.waiting[0]
            longest = max(longest, len(sequence.tokens))
            if self.running and not self.slots.fits(len(self.running) + 1, longest + 1):
                break
            if not self._has_adapter_room(sequence):
                break
            key = _reading(sequence)
            if key not in known:
                match = self.prefixes.find(sequence, before)
                width = max(width, len(sequence.tokens) - (match.length if match else 0))
                if leaders and width * (len(leaders) + 1) > self.limits.max_prefill_tokens:
                    break
                known[key] = len(leaders)
                leaders.append(len(sequences))
                matches.append(match)
            source.append(known[key])
            sequences.append(self.waiting.popleft())
            self.running.append(sequence)
        self._place(sequences, [(len(before) + leader, match) for leader, match in zip(leaders, matches, strict=True)])
        return Prompts(sequences, leaders, source, [match.length if match else 0 for match in matches])

    def _place(self, sequences: list[Sequence], matches: list[tuple[int, Match | None]]) -> None:
        """Reserve rows for new sequences, and fill in what is known of those that are read."""
        if not sequences:
            return
        self.slots.reserve(len(self.running), max(len(sequence.tokens) for sequence in self.running))
        origins = {_origin_key(sequence): sequence.origin for sequence in self.running if sequence.origin is not None}
        for sequence in sequences:
            sequence.epoch = self.prefixes.epoch
            fresh = Origin(next(self._numbers), len(sequence.request.prompt))
            sequence.origin = origins.setdefault(_origin_key(sequence), fresh)
        for row, match in matches:
            if match is not None:
                self.prefixes.take(match, row)

    def _keep_prefixes(self) -> None:
        for row, sequence in enumerate(self.running):
            if sequence.completion is not None:
                self.prefixes.keep(sequence, row)

    def _has_adapter_room(self, sequence: Sequence) -> bool:
        if sequence.request.adapter is None:
            return True
        running = {other.request.adapter for other in self.running} - {None}
        return sequence.request.adapter in running or len(running) < self.limits.max_adapters

    def _keep(self, kept: list[Sequence]) -> None:
        """Make `kept` the batch: sequences from its end move into the rows that others leave."""
        rows = {id(sequence): row for row, sequence in enumerate(self.running)}
        staying = {id(sequence) for sequence in kept}
        batch: list[Sequence | None] = [s if id(s) in staying else None for s in self.running[: len(kept)]]
        movers = [sequence for sequence in kept if rows[id(sequence)] >= len(kept)]
        for row, occupant in enumerate(batch):
            if occupant is None:
                mover = movers.pop()
                self.slots.copy(rows[id(mover)], [row], len(mover.tokens))
                batch[row] = mover
        self.running = [sequence for sequence in batch if sequence is not None]


def _origin_key(sequence: Sequence) -> tuple[object, ...]:
    """Equal for sequences whose prompts have the same keys and values."""
    return sequence.epoch, id(sequence.request.adapter), sequence.request.prompt


def _reading(sequence: Sequence) -> tuple[object, ...]:
    """Equal for sequences whose tokens are read only once; log-probabilities of a prompt need a reading each."""
    request = sequence.request
    return (*sequence.tokens, id(request.adapter), id(request) if request.wants_prompt_logprobs else None)

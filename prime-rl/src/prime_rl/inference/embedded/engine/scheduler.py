"""Scheduler of the embedded engine: admits sequences to the running batch, preempts them, and assigns slot rows."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from prime_rl.inference.embedded.engine.cache import KVSlots, Match, PrefixCache
from prime_rl.inference.embedded.engine.common_start import Origin
from prime_rl.inference.embedded.engine.generation import Sequence
from prime_rl.inference.protocol import MAX_CONNECTIONS, MAX_TOTAL_SAMPLES


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits on batch and queue sizes."""

    max_running: int = 128
    max_waiting: int = MAX_CONNECTIONS + MAX_TOTAL_SAMPLES
    """Maximum number of queued samples; requests beyond it are rejected. A call for one sample, as of a rollout, on
    every connection fits, and one request for many: clients give up on a server that rejects them for long."""
    max_prefill_tokens: int = 4096
    """Maximum number of prompt tokens, including padding, in one forward pass. A longer prompt is prefilled alone."""
    max_adapters: int = 8
    """Maximum number of different adapters in the running batch; sequences with another adapter wait."""
    max_prefix_bytes: int = 0
    """Size of the prefix cache in bytes; 0 disables it."""
    steps_without_prompts: int = 0
    """Number of steps that only decode after all waiting prompts that fit have joined. Prompts that arrive meanwhile
    join together: a step with prompts cannot be replayed as a captured graph, and takes several times as long."""


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The sequences admitted in one step. Sequences with equal tokens are prefilled once: one leads, the rest copy."""

    sequences: list[Sequence]
    leaders: list[int]
    """Indices into `sequences` of those that are prefilled."""
    source: list[int]
    """For each sequence, the index into `leaders` of the one it copies; a leader has its own index."""
    num_cached: list[int]
    """For each leader, the number of its tokens that are in its row already."""


class Scheduler:
    """The waiting queue and the running batch. Running sequence i owns slot row i, so the batch is contiguous."""

    def __init__(self, limits: EngineLimits, slots: KVSlots) -> None:
        self.limits = limits
        self.slots = slots
        self.prefixes = PrefixCache(slots, limits.max_prefix_bytes)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._numbers = itertools.count()
        self._steps_to_wait = 0
        """Number of steps that only decode before prompts may join."""
        self.has_aborted = False
        """Set by any thread when a request is cancelled or has failed."""

    def drop_aborted(self) -> None:
        """Drop the samples of requests that were cancelled or have failed."""
        if not self.has_aborted:
            return
        self.has_aborted = False
        self._compact([sequence for sequence in self.running if not sequence.request.result.done()])
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.request.result.done())

    def retire_finished(self) -> list[Sequence]:
        """Remove finished sequences from the batch and return them."""
        finished = [sequence for sequence in self.running if sequence.completion is not None]
        if finished:
            if self.limits.max_prefix_bytes:
                self._cache_prefixes()
            self._compact([sequence for sequence in self.running if sequence.completion is None])
        return finished

    def make_room(self) -> None:
        """Reserve space for one more token per running sequence, preempting the newest sequences if memory runs out.

        A preempted sequence returns to the queue with its tokens and is prefilled again when there is room.
        """
        if not self.running:
            return
        length = max(len(sequence.tokens) for sequence in self.running)
        while len(self.running) > 1 and not self.slots.fits(len(self.running), length):
            self.waiting.appendleft(self.running.pop())
            length = max(len(sequence.tokens) for sequence in self.running)
        self.slots.reserve(len(self.running), length)

    def admit(self) -> PrefillBatch:
        """Move sequences from the queue to the batch, within the limits on rows, memory and prefill tokens."""
        if self.running and self._steps_to_wait:
            self._steps_to_wait -= 1
            return PrefillBatch([], [], [], [])
        sequences: list[Sequence] = []
        leaders: list[int] = []
        source: list[int] = []
        matches: list[Match | None] = []
        leader_of: dict[object, int] = {}
        before = list(self.running)
        longest = max((len(sequence.tokens) for sequence in before), default=0)
        width = 0
        is_cut_short = False
        while self.waiting and len(self.running) < self.limits.max_running:
            sequence = self.waiting[0]
            longest = max(longest, len(sequence.tokens))
            if self.running and not self.slots.fits(len(self.running) + 1, longest + 1):
                break
            if not self._has_adapter_room(sequence):
                break
            key = _prefill_key(sequence)
            if key not in leader_of:
                match = self.prefixes.find(sequence, before)
                width = max(width, len(sequence.tokens) - (match.length if match else 0))
                is_cut_short = bool(leaders) and width * (len(leaders) + 1) > self.limits.max_prefill_tokens
                if is_cut_short:
                    break
                leader_of[key] = len(leaders)
                leaders.append(len(sequences))
                matches.append(match)
            source.append(leader_of[key])
            sequences.append(self.waiting.popleft())
            self.running.append(sequence)
        self._reserve_rows(
            sequences, [(len(before) + leader, match) for leader, match in zip(leaders, matches, strict=True)]
        )
        if sequences and not is_cut_short:
            self._steps_to_wait = self.limits.steps_without_prompts
        return PrefillBatch(sequences, leaders, source, [match.length if match else 0 for match in matches])

    def _reserve_rows(self, sequences: list[Sequence], matches: list[tuple[int, Match | None]]) -> None:
        """Reserve rows for new sequences, and copy cached prefixes into the rows of `matches`."""
        if not sequences:
            return
        self.slots.reserve(len(self.running), max(len(sequence.tokens) for sequence in self.running))
        origins = {_origin_key(sequence): sequence.origin for sequence in self.running if sequence.origin is not None}
        for sequence in sequences:
            sequence.epoch = self.prefixes.epoch
            request = sequence.request
            fresh = Origin(next(self._numbers), len(request.prompt), request.images)
            sequence.origin = origins.setdefault(_origin_key(sequence), fresh)
        for row, match in matches:
            if match is not None:
                self.prefixes.load(match, row)

    def _cache_prefixes(self) -> None:
        for row, sequence in enumerate(self.running):
            if sequence.completion is not None:
                self.prefixes.store(sequence, row)

    def _has_adapter_room(self, sequence: Sequence) -> bool:
        if sequence.request.adapter is None:
            return True
        running = {other.request.adapter for other in self.running} - {None}
        return sequence.request.adapter in running or len(running) < self.limits.max_adapters

    def _compact(self, kept: list[Sequence]) -> None:
        """Make `kept` the batch, moving sequences from its end into the rows that became free."""
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
    """A key that is equal for sequences whose prompts have the same keys and values."""
    return sequence.epoch, id(sequence.request.adapter), sequence.request.identity


def _prefill_key(sequence: Sequence) -> tuple[object, ...]:
    """A key that is equal for sequences that can share a prefill. Requests for prompt log-probabilities never share."""
    request = sequence.request
    return (*sequence.identity, id(request.adapter), id(request) if request.wants_prompt_logprobs else None)

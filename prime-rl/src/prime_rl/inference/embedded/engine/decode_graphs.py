"""Decodes by replaying CUDA graphs: a step of a small model is hundreds of kernels, and launching each from Python
takes longer than computing it.

A recorded step has a fixed shape and reads its inputs from fixed memory. Running sequences are padded to one of a few
numbers of rows, and attention reads one of a few numbers of tokens. Everything else in a step follows from token ids
and positions, on the device. All sequences of a recorded step have the same adapter, or none. Weights and adapters are
replaced in place, so that recorded steps stay right; slots that grow move, which drops them all.
Shapes: B rows, H hidden size.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from prime_rl.inference.embedded.engine.attention import SlotStep
from prime_rl.inference.embedded.engine.cache import KVSlots
from prime_rl.inference.embedded.engine.fused import FusedDecoder
from prime_rl.inference.embedded.engine.lora import Adapter, Layers, StepAdapters
from prime_rl.inference.embedded.engine.tensors import fill, rounded_up
from prime_rl.utils.errors import first_line
from prime_rl.utils.logger import get_logger

MOST_GRAPHS = 64
"""Recorded steps kept, the last used ones. One of a model with 30 layers takes some MiB in the driver."""

_ROW_STEP = 16
_LENGTH_STEP = 128
_TOLERANCE = 0.02
"""Largest norm of a row's difference between a replayed and an ordinary step, relative to the row's norm. The kernels
are the same; a step that reads or writes the wrong memory differs by about 1."""

Compute = Callable[[], Tensor]
"""Computes a result from inputs in fixed memory."""
Shape = tuple[int, int]
"""Number of rows, and number of tokens that attention reads of each."""
_Key = tuple[Shape, Adapter | None]


class Recorder(Protocol):
    """Records computations. What it returns computes the same again, from what the same memory then holds."""

    def record(self, compute: Compute) -> Compute: ...

    def has_room(self) -> bool:
        """Whether there is memory for another recording."""

    def forget(self) -> None:
        """All recordings are gone."""


class StaticStep:
    """A decode step of a fixed shape, with inputs in fixed memory.

    Rows after the running sequences are padding: token 0 at position 0 of slot rows that no sequence has. A sequence
    that gets such a row later overwrites this position before it reads it.
    """

    def __init__(self, decoder: FusedDecoder, slots: KVSlots, shape: Shape, adapter: Adapter | None = None) -> None:
        self._decoder = decoder
        self._slots = slots
        self._rows, self._length = shape
        self._adapters = StepAdapters.from_owners([adapter], [self._rows], slots.device)
        self._inputs = torch.zeros(3, self._rows, dtype=torch.long, device=slots.device)

    def load(self, tokens: SequenceOf[int], places: SequenceOf[int], positions: SequenceOf[int] = ()) -> None:
        """Set the inputs of the next computation. Positions are the places in the slots, unless images changed them."""
        padding = [0] * (self._rows - len(tokens))
        fill(self._inputs, [[*each, *padding] for each in (tokens, places, positions or places)])

    def compute(self) -> Tensor:
        """Store the tokens' keys and values, and return the last layer's hidden states [B, H]."""
        tokens, places, positions = self._inputs.unbind()
        step = SlotStep(self._slots, places, None, self._adapters, decode_length=self._length)
        return self._decoder.hidden(step, tokens, positions)


@dataclass(frozen=True, slots=True)
class _Recorded:
    step: StaticStep
    replay: Compute
    layers: Layers | None
    """The tensors of the adapter that the step reads; None without an adapter."""


class DecodeGraphs:
    """The recorded steps of a model. A shape is recorded when it occurs for the second time, for each adapter."""

    def __init__(self, decoder: FusedDecoder, slots: KVSlots, recorder: Recorder) -> None:
        self.most_graphs = MOST_GRAPHS
        self.num_recorded = 0
        self.num_replayed = 0
        self.is_off = False
        """True after a recording has failed: all steps are then computed without."""
        self._decoder = decoder
        self._slots = slots
        self._recorder = recorder
        self._generation = slots.generation
        self._recorded: OrderedDict[_Key, _Recorded] = OrderedDict()
        self._asked: Counter[_Key] = Counter()

    def hidden(
        self,
        tokens: SequenceOf[int],
        places: SequenceOf[int],
        adapter: Adapter | None = None,
        positions: SequenceOf[int] = (),
    ) -> Tensor | None:
        """Hidden states [B, H] of the running sequences' last tokens; None if the step is to be computed without.

        `adapter` is that of all sequences. `positions`: as in `StaticStep.load`. The result is valid until the next
        call.
        """
        if self.is_off:
            return None
        if self._slots.generation != self._generation:
            self.clear()
        key = self.shape_of(len(tokens), max(places) + 1), adapter
        recorded = self._recorded.get(key)
        if recorded is None or recorded.layers is not _layers_of(adapter):
            recorded = self._record(key, tokens, places)
        if recorded is None:
            return None
        self._recorded.move_to_end(key)
        recorded.step.load(tokens, places, positions)
        self.num_replayed += 1
        return recorded.replay()[: len(tokens)]

    def shape_of(self, rows: int, length: int) -> Shape:
        """The shape that computes `rows` sequences of up to `length` tokens.

        1, 2, 4, 8 or a multiple of 16 rows, so that at most an eighth more or 15 more are computed, and up to a quarter
        more tokens or 127 more.
        """
        padded = 1 << (rows - 1).bit_length() if rows <= _ROW_STEP else rounded_up(rows, _ROW_STEP, 8)
        return min(padded, self._slots.rows), min(rounded_up(length, _LENGTH_STEP, 4), self._slots.length)

    def _record(self, key: _Key, tokens: SequenceOf[int], places: SequenceOf[int]) -> _Recorded | None:
        """Record a shape that occurs again, and compare its first replay with an ordinary computation."""
        shape, adapter = key
        self._drop_unloaded()
        self._asked[key] += 1
        if self._asked[key] == 1:
            return None
        if not self._recorder.has_room():
            self._asked[key] = 0
            return None
        step = StaticStep(self._decoder, self._slots, shape, adapter)
        try:
            step.load(tokens, places)
            expected = step.compute()[: len(tokens)]
            if not expected.isfinite().all():
                return None
            replay = self._recorder.record(step.compute)
            if not _is_close(replay()[: len(tokens)], expected):
                raise RuntimeError(
                    f"a CUDA graph of {shape[0]} rows and {shape[1]} tokens gives other numbers than the model itself"
                )
        except Exception as exc:  # noqa: BLE001 - whatever failed, the ordinary path computes this step and says why
            self.is_off = True
            self.clear()
            get_logger().warning(f"Decoding goes on without CUDA graphs, because recording failed: {first_line(exc)}")
            return None
        self.num_recorded += 1
        while len(self._recorded) >= self.most_graphs:
            oldest, _ = self._recorded.popitem(last=False)
            del self._asked[oldest]
        self._recorded[key] = _Recorded(step, replay, _layers_of(adapter))
        return self._recorded[key]

    def _drop_unloaded(self) -> None:
        for key in [key for key in self._asked if key[1] is not None and not key[1].is_loaded]:
            del self._asked[key]
            self._recorded.pop(key, None)

    def clear(self) -> None:
        """Drop all recorded steps."""
        self._generation = self._slots.generation
        self._recorded.clear()
        self._asked.clear()
        self._recorder.forget()


def _layers_of(adapter: Adapter | None) -> Layers | None:
    return None if adapter is None else adapter.layers


def _is_close(found: Tensor, expected: Tensor) -> bool:
    norms = expected.float().norm(dim=-1)
    return bool(((found.float() - expected.float()).norm(dim=-1) <= _TOLERANCE * norms).all())


_LEAST_FREE_BYTES = 1 << 30
"""Free memory of the device below which nothing more is recorded: trainer and engine may share it."""


class CudaRecorder:
    """Records functions as CUDA graphs, all in one memory pool.

    A graph's intermediate results may lie where those of another do, because one is replayed after the other. Its
    inputs lie elsewhere, and its result stays where it is as long as someone holds it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all recordings, because cuBLAS keeps a workspace for each.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Compute) -> Compute:
        """Returns a function that replays the graph on the current stream."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # This block restores the caller's stream if the recording fails, which `torch.cuda.graph` then does not.
        with torch.cuda.stream(self._stream):
            compute()  # cuBLAS and Triton allocate and choose kernels at the first call, which cannot be recorded
            # Other threads of the server may use CUDA meanwhile, which the default mode would count as a failure.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def has_room(self) -> bool:
        free, _ = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + kept >= _LEAST_FREE_BYTES

    def forget(self) -> None:
        # PyTorch does not record into a pool that all graphs have left.
        self._pool = torch.cuda.graph_pool_handle()

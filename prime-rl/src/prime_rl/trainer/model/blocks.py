"""Applies compilation, activation checkpointing, chunks of MLPs and activation offloading to decoder blocks, and keeps
their weights gathered during a step.

Activation offloading keeps saved activations in host memory between the forward and the backward pass. Copies run on a
CUDA stream beside the computation. In the forward pass, the newest `max_inflight_activations` stay on the device until
they are copied; in the backward pass, that many are prefetched.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from prime_rl.checks.memory.shapes import ModelShape
from prime_rl.checks.memory.training import BlockActivations, activations_of, recomputed_blocks
from prime_rl.configs.trainer import ActivationCheckpointConfig, ActivationOffloadingConfig, ModelConfig
from prime_rl.trainer.model.hybrids import StateLayers
from prime_rl.trainer.model.vision import language_model
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.world import Process
from prime_rl.trainer.versions import compile_for_all_shapes
from prime_rl.transport.routing import Routers
from prime_rl.utils.logger import get_logger

MIN_BYTES = 1024
"""Smaller tensors are not offloaded: moving them is not worth the memory saved."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class OffloadedTensor:
    """An activation in host memory, and on the device while it is being copied or is prefetched."""

    host: Tensor
    on_device: Tensor | None
    copied: torch.cuda.Event | None
    """Event at the end of the latest copy, in either direction."""
    previous: weakref.ref[OffloadedTensor] | None
    """The tensor that was stored before this one; the backward pass needs it next."""


class ActivationOffload:
    """Autograd hooks that move saved tensors to host memory and back.

    On a CPU the hooks give the same results, but the copies are useless.
    """

    def __init__(self, config: ActivationOffloadingConfig, device: torch.device) -> None:
        self.device = device
        self.max_inflight = config.max_inflight_activations
        self.is_pinned = config.pin_memory and device.type == "cuda"
        self.moved_bytes = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._inflight: deque[OffloadedTensor] = deque()
        self._newest: weakref.ref[OffloadedTensor] | None = None

    def hooks(self) -> AbstractContextManager[Any]:
        """Context in which large tensors saved by autograd are moved to host memory. Parameters are not moved."""
        return saved_tensors_hooks(self._store, self._restore)

    def _store(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        if not self._is_worth_moving(tensor):
            # Detached, because the tensor itself would reference the graph that references it.
            return tensor.detach()
        while len(self._inflight) >= self.max_inflight:
            self._release(self._inflight.popleft())
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.is_pinned, requires_grad=False)
        with self._copying() as done:
            host.copy_(tensor.detach(), non_blocking=True)
        stored = OffloadedTensor(host, tensor.detach(), done, self._newest)
        self._newest = weakref.ref(stored)
        self._inflight.append(stored)
        self.moved_bytes += host.nbytes
        return stored

    def _restore(self, stored: Tensor | OffloadedTensor) -> Tensor:
        if not isinstance(stored, OffloadedTensor):
            return stored
        if self._inflight:
            self._end_of_forward()
        on_device = self._fetched(stored)
        ahead = stored
        for _ in range(self.max_inflight - 1):
            before = ahead.previous() if ahead.previous is not None else None
            if before is None:
                break
            ahead = before
            self._fetched(ahead)
        self._wait(stored)
        return on_device

    def _is_worth_moving(self, tensor: Tensor) -> bool:
        owner = tensor if tensor._base is None else tensor._base
        is_activation = tensor.device.type == self.device.type and not isinstance(owner, nn.Parameter)
        return is_activation and tensor.nbytes >= MIN_BYTES

    def _end_of_forward(self) -> None:
        """Keep the tensors that are still on the device: the backward pass needs them first."""
        for stored in self._inflight:
            self._wait(stored)
        self._inflight.clear()

    def _release(self, stored: OffloadedTensor) -> None:
        # The current stream waits for the copy, so that it does not reuse the memory too early.
        self._wait(stored)
        stored.on_device = None

    def _fetched(self, stored: OffloadedTensor) -> Tensor:
        if stored.on_device is None:
            # Allocated outside the copy stream, because the current stream uses and frees it.
            stored.on_device = torch.empty_like(stored.host, device=self.device)
            with self._copying() as stored.copied:
                stored.on_device.copy_(stored.host, non_blocking=True)
        return stored.on_device

    @contextmanager
    def _copying(self) -> Iterator[torch.cuda.Event | None]:
        """Run the block's copy on the copy stream, after all work queued so far. Yields the event at its end."""
        if self._stream is None:
            yield None
            return
        done = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield done
            done.record(self._stream)

    def _wait(self, stored: OffloadedTensor) -> None:
        if stored.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(stored.copied)
            stored.copied = None


Forward = Callable[..., Any]
_RECOMPILE_LIMIT = 32
"""Maximum number of compiled graphs; beyond it, blocks run uncompiled. Each kind of block (such as with a window)
needs four."""


def decoder_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Find the list of decoder blocks.

    Raises:
        ModelError: the model has no list of `num_hidden_layers` modules.
    """
    layers = model.config.get_text_config().num_hidden_layers
    for module in language_model(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return module
    raise ModelError(f"{type(model).__name__} has no list of decoder blocks: this architecture is not supported")


def prepare_blocks(
    model: PreTrainedModel,
    config: ModelConfig,
    device: torch.device,
    is_random: bool,
    state_layers: StateLayers | None = None,
    routers: Routers | None = None,
    shape: ModelShape | None = None,
) -> None:
    """Wrap each block's forward according to `compile`, `ac`, `mlp_chunk_tokens` and `ac_offloading`. Call before FSDP
    adds its hooks.

    `is_random` says that blocks draw random numbers, for dropout: recomputing them then restores the random state.
    Recomputed blocks run `state_layers` on the sequences of their forward pass, and `routers` choose as they did there.
    With `ac.memory_gib`, `shape` tells how much they keep.

    Raises:
        ModelError: no block has an MLP that can be chunked.
    """
    if config.mlp_chunk_tokens is not None:
        mlps = [mlp for block in decoder_blocks(model) for mlp in dense_mlps(block)]
        if not mlps:
            name = type(model).__name__
            raise ModelError(f"model.mlp_chunk_tokens: {name} has no MLP that can be chunked: remove it")
        for mlp in mlps:
            mlp.forward = _in_chunks(mlp.forward, config.mlp_chunk_tokens, is_random)
    offload = None
    if config.ac_offloading is not None and device.type == "cuda":
        offload = ActivationOffload(config.ac_offloading, device)
    elif config.ac_offloading is not None:
        get_logger().info("model.ac_offloading has no effect on a CPU: activations are in host memory already")
    of_blocks: list[BlockActivations] = []
    if config.ac is not None and config.ac.memory_gib is not None:
        assert shape is not None
        of_blocks = activations_of(shape, config, "cuda" if device.type == "cuda" else "cpu")
    for index, block in enumerate(decoder_blocks(model)):
        forward = block.forward
        if config.compile is not None:
            # Blocks share graphs. Single rows and masked rows need their own.
            forward = compile_for_all_shapes(
                forward, fullgraph=config.compile.fullgraph, recompile_limit=_RECOMPILE_LIMIT
            )
        if config.ac is not None and of_blocks:
            again = _checkpointed(forward, is_random, state_layers, routers)
            forward = _within_budget(forward, again, index, of_blocks, config.ac)
        elif config.ac is not None and index % config.ac.freq == 0:
            forward = _checkpointed(forward, is_random, state_layers, routers)
        if offload is not None:
            forward = offloaded(forward, offload)
        # Replace `forward` instead of wrapping the module, which would change parameter names.
        block.forward = forward


def _checkpointed(
    forward: Forward, preserve_rng_state: bool, state_layers: StateLayers | None, routers: Routers | None
) -> Forward:
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        again = forward
        for bound in (state_layers, routers):
            again = again if bound is None else bound.bound(again)
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)

    return recomputing


_FIRST_LAYERS = ("up_proj", "gate_up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "input_linear", "w1", "Wi")
"""Names that families give to the layer by which an MLP begins."""


def dense_mlps(block: nn.Module) -> list[nn.Module]:
    """The feed-forward layers of a block that are modules of their own."""
    inside = (module for module in block.modules() if module is not block)
    return [each for each in inside if any(isinstance(getattr(each, name, None), nn.Module) for name in _FIRST_LAYERS)]


def _in_chunks(forward: Forward, chunk_tokens: int, preserve_rng_state: bool) -> Forward:
    """Compute an MLP for `chunk_tokens` at a time, and again in the backward pass.

    Also of a row that is one chunk: its intermediate activations then exist in one block at a time.
    """

    def chunked(*states: Tensor) -> Tensor:
        parts = (each.reshape(1, -1, each.shape[-1]).split(chunk_tokens, dim=1) for each in states)
        outputs = [
            checkpoint(forward, *part, use_reentrant=False, preserve_rng_state=preserve_rng_state)
            for part in zip(*parts, strict=True)
        ]
        whole = torch.cat(outputs, dim=1)
        # Not as a view, which is also what Bloom's blocks return, and FSDP warns of those.
        return torch.ops.aten._unsafe_view(whole, [*states[0].shape[:-1], whole.shape[-1]])

    return chunked


def _within_budget(
    keeping: Forward, again: Forward, index: int, of_blocks: Sequence[BlockActivations], ac: ActivationCheckpointConfig
) -> Forward:
    """Recompute the block with this index in rows that need it, as `--estimate` counts them."""

    def choosing(*args: Any, **kwargs: Any) -> Any:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        tokens = prod(hidden.shape[-3:-1])  # Gemma 3n has several states of each, along a first axis
        return (again if index in recomputed_blocks(of_blocks, ac, tokens) else keeping)(*args, **kwargs)

    return choosing


def offloaded(forward: Forward, offload: ActivationOffload) -> Forward:
    """Wrap `forward` so that `offload` stores the tensors saved by autograd."""

    def offloading(*args: Any, **kwargs: Any) -> Any:
        with offload.hooks():
            return forward(*args, **kwargs)

    return offloading


Row = TypeVar("Row")


def accumulated(model: PreTrainedModel, rows: Sequence[Row], process: Process) -> Iterator[Row]:
    """The micro-batches of a step. Run forward and backward on each before taking the next.

    A single process on a CPU gathers the weights once per step, since gathering copies them within host memory. They
    are freed after the last backward pass. On a GPU the copies are cheap and the memory is not, so nothing is kept.
    """
    routers: Routers | None = getattr(model, "routers", None)
    if routers is not None:
        routers.rows = len(rows)
    if process.world_size > 1 or process.device.type != "cpu":
        yield from rows
        return
    _keep_weights_after_forward(model, keep=True)
    # Before the first activation, so that freeing them leaves no holes between activations.
    assert isinstance(model, FSDPModule)
    for unit in (model, *_blocks(model)):
        unit.unshard()
    for index, row in enumerate(rows):
        model.set_reshard_after_backward(index + 1 == len(rows))
        yield row
    _keep_weights_after_forward(model, keep=False)


def _keep_weights_after_forward(model: PreTrainedModel, keep: bool) -> None:
    for block in _blocks(model):
        block.set_reshard_after_forward(not keep, recurse=False)


def _blocks(model: PreTrainedModel) -> list[FSDPModule]:
    return [block for block in decoder_blocks(model) if isinstance(block, FSDPModule)]

"""Keeps optimizer states in host memory, and on the device only while their parameters are updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from prime_rl.trainer.optim.optimizer import local

SLICE_BYTES = 2**30
"""Size of the parameters that are updated at a time, at least one of them. AdamW's states take twice that."""


def offload_states(optimizer: Optimizer, device: torch.device, slice_bytes: int = SLICE_BYTES) -> None:
    """Make `optimizer` keep its states in host memory, pinned if `device` is a GPU.

    `step` updates a slice of the parameters at a time. The result is the same, since our optimizers update each
    parameter independently.
    """
    whole_step = optimizer.step
    host = _HostCopies(optimizer, device)

    def step(optimizer: Optimizer, closure: None = None) -> None:
        groups = optimizer.param_groups
        for group in groups:
            for parameters in _slices(group["params"], slice_bytes):
                host.bring(parameters)
                optimizer.param_groups = [{**group, "params": parameters}]
                try:
                    whole_step()
                finally:
                    optimizer.param_groups = groups
                host.take(parameters)

    # A bound method: learning-rate schedulers expect one, and replace it in turn.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    # `load_state_dict` would put all states on the devices of their parameters.
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: host.hold_back(saved))
    optimizer.register_load_state_dict_post_hook(lambda _: host.take_held_back())


class _HostCopies:
    """Moves states between the device and host memory that is allocated once."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.device = device
        self._copies: dict[tuple[Tensor, str], Tensor] = {}
        self._held_back: list[tuple[Tensor, str, Tensor]] = []

    def bring(self, parameters: Sequence[Tensor]) -> None:
        """Replace the states of `parameters` by copies on the device."""
        for parameter, name, state in self._states(parameters):
            self.optimizer.state[parameter][name] = _copy_on(self.device, state)

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Move the states of `parameters` to host memory, and free them on the device."""
        for parameter, name, state in self._states(parameters):
            self._keep(parameter, name, state, state.dtype)
        self._finish()

    def hold_back(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Take the tensors out of a saved state dict. Returns what is left of it, for the optimizer to load."""
        # A saved state names parameters by numbers or by text, in the order of the optimizer's own.
        ids, own = (
            [each for group in groups for each in group["params"]]
            for groups in (saved["param_groups"], self.optimizer.param_groups)
        )
        parameters, rest = dict(zip(ids, own, strict=False)), {}
        self._held_back.clear()
        for parameter_id, states in saved["state"].items():
            large = [name for name, state in states.items() if _is_large(state) and parameter_id in parameters]
            rest[parameter_id] = {name: state for name, state in states.items() if name not in large}
            self._held_back += ((parameters[parameter_id], name, states[name]) for name in large)
        return {**saved, "state": rest}

    def take_held_back(self) -> None:
        """Move the tensors that were held back to host memory, in the dtype that the optimizer would load them in."""
        for parameter, name, state in self._held_back:
            self._keep(parameter, name, state, parameter.dtype)
        self._held_back.clear()
        self._finish()

    def _keep(self, parameter: Tensor, name: str, state: Tensor, dtype: torch.dtype) -> None:
        copy = self._copies.get((parameter, name))
        if copy is None or copy.dtype != dtype:
            copy = self._copies[parameter, name] = self._room_for(state, dtype)
        local(copy).copy_(local(state), non_blocking=True)
        self.optimizer.state[parameter][name] = copy

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _states(self, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, str, Tensor]]:
        """The states except scalar counters, which stay where the optimizer put them."""
        for parameter in parameters:
            for name, state in list(self.optimizer.state.get(parameter, {}).items()):
                if _is_large(state):
                    yield parameter, name, state

    def _room_for(self, state: Tensor, dtype: torch.dtype) -> Tensor:
        copy = _copy_on(torch.device("cpu"), state).to(dtype)
        if self.device.type == "cuda":
            if isinstance(copy, DTensor):
                copy._local_tensor = copy._local_tensor.pin_memory()
            else:
                copy = copy.pin_memory()
        return copy


def _is_large(state: object) -> TypeGuard[Tensor]:
    return isinstance(state, Tensor) and state.ndim > 0


def _copy_on(device: torch.device, state: Tensor) -> Tensor:
    return state.to(device, non_blocking=True, copy=True)


def _slices(parameters: Sequence[nn.Parameter], slice_bytes: int) -> Iterator[list[nn.Parameter]]:
    taken: list[nn.Parameter] = []
    taken_bytes = 0
    for parameter in parameters:
        own_bytes = local(parameter).nbytes
        if taken and taken_bytes + own_bytes > slice_bytes:
            yield taken
            taken, taken_bytes = [], 0
        taken.append(parameter)
        taken_bytes += own_bytes
    if taken:
        yield taken

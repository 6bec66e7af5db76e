"""Optimizers (AdamW, also in 8 and 4 bits, Adafactor, SGD, Muon) and gradient clipping, on this process's shards.

The first time that PyTorch runs an operation on a list of DTensors, it works out how each result is sharded, and goes
through the whole list for each. That takes time in proportion to the square of the number of parameters. So the
operations here get plain tensors: this process's shards.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from types import MethodType
from typing import Any, Protocol, TypeGuard, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.nn.utils import get_total_norm
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from prime_rl.configs.optim import LOW_BITS, PIECE_VALUES, LowBits
from prime_rl.configs.trainer import (
    AdafactorConfig,
    AdamW4bitConfig,
    AdamW8bitConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
)
from prime_rl.trainer.model.lora import loraplus_parameters
from prime_rl.trainer.model.quantized import bitsandbytes_package
from prime_rl.trainer.model.vision import tower_parameters
from prime_rl.trainer.process.host_memory import keep_freed_memory
from prime_rl.trainer.process.world import Process
from prime_rl.transport.loading import full_tensor, index_of, local
from prime_rl.utils.logger import get_logger

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
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: host.hold_back(saved), prepend=True)
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
            # Our own keep the dtype of each state.
            dtype = state.dtype if isinstance(self.optimizer, _OneByOne) else parameter.dtype
            self._keep(parameter, name, state, dtype)
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


class ShardAdamW(AdamW):
    """AdamW that updates shards. States are sharded like their parameters, as those of AdamW."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill the lists with parameters, gradients and states, which AdamW then updates in place."""
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all tensors as one vector, of every process's shards. Collective."""
    alike: dict[Any, list[Tensor]] = {}
    for each in tensors:
        layout = (each.device_mesh, each.placements) if isinstance(each, DTensor) else ()
        alike.setdefault(layout, []).append(each)
    squares = []
    for of_layout in alike.values():
        squared = get_total_norm(list(map(local, of_layout)), foreach=True).square()
        if isinstance(first := of_layout[0], DTensor):
            for axis, placement in enumerate(first.placements):
                if not placement.is_replicate():
                    dist.all_reduce(squared, group=first.device_mesh.get_group(axis))
        squares.append(squared)
    return torch.stack(squares).sum().sqrt()


def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place."""
    with torch.no_grad():
        torch._foreach_mul_(list(map(local, tensors)), factor)


class _OneByOne(Optimizer, ABC):
    """Updates one parameter after another, on shards, with states in their own dtypes.

    With `is_rounded`, weights are in bfloat16 and updated in float32. The result is rounded at random to one of its two
    neighbours, more often to the nearer one, so that the mean is the result. Always rounded to the nearer one, updates
    of less than 1/512 of a weight would be lost.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], *, is_rounded: bool) -> None:
        super().__init__(groups, defaults)
        self._is_rounded = is_rounded
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters())}
        self._held_back: dict[Any, dict[str, Tensor]] = {}
        self._held_ids: list[Any] = []
        self.register_load_state_dict_pre_hook(lambda _, saved: self._hold_back(saved))
        self.register_load_state_dict_post_hook(lambda _: self._take_held_back())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no update here needs the loss again
        """Apply the gradients. Collective."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own, gradient = local(parameter), local(parameter.grad)
                if not self._is_rounded:
                    self.update(parameter, own, gradient, group)
                    continue
                values = own.float()
                self.update(parameter, values, gradient.float(), group)
                own.copy_(_rounded(values, self._noise(parameter)))

    @abstractmethod
    def update(self, parameter: nn.Parameter, values: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Change the `values` of this process's shard of `parameter` by its `gradient`."""

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _noise(self, parameter: nn.Parameter) -> torch.Generator:
        """The same for each copy of a shard, and after a resume."""
        step, start = int(self.state[parameter]["step"]), [part.start for part in index_of(parameter)]
        seed = xxhash.xxh3_64_intdigest(repr((step, self._numbers[parameter], start)).encode())
        return torch.Generator(local(parameter).device).manual_seed(seed)

    def _hold_back(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Take the states out of a saved state dict; PyTorch would turn them into the dtype of the parameter."""
        self._held_back = saved["state"]
        self._held_ids = [each for group in saved["param_groups"] for each in group["params"]]
        return {**saved, "state": {}}

    def _take_held_back(self) -> None:
        """Load the states in their own dtypes."""
        for parameter_id, parameter in zip(self._held_ids, self._parameters(), strict=True):
            for name, value in self._held_back.get(parameter_id, {}).items():
                device = value.device if name == "step" else parameter.device
                self.state[parameter][name] = value.to(device, copy=True)
        self._held_back = {}


def _rounded(values: Tensor, noise: torch.Generator) -> Tensor:
    """Float32 `values` in bfloat16, which has the upper half of their bits: the lower half decides how likely the next
    number away from zero is."""
    bits = torch.randint(2**16, values.shape, dtype=torch.int32, device=values.device, generator=noise)
    # NaN has all bits set on a GPU: with noise, it would become 0.
    bits.mul_(~values.isnan())
    return bits.add_(values.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).to(torch.bfloat16)


class RoundedAdamW(_OneByOne):
    """AdamW with float32 moments of weights in bfloat16."""

    def __init__(self, groups: list[dict[str, Any]], config: AdamWConfig) -> None:
        betas = (config.betas1, config.betas2)
        defaults = {"lr": config.lr, "betas": betas, "eps": 1e-8, "weight_decay": config.weight_decay}
        super().__init__(groups, defaults, is_rounded=True)

    def update(self, parameter: nn.Parameter, values: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Change the `values` as the fused AdamW does."""
        state, names = self.state[parameter], ("exp_avg", "exp_avg_sq")
        if not state:
            state |= {name: torch.zeros_like(parameter, dtype=torch.float32) for name in names}
            state["step"] = torch.zeros(())
        mean, square = (local(state[name]) for name in names)
        beta1, beta2 = group["betas"]
        adamw(
            [values],
            [gradient],
            [mean],
            [square],
            [],
            [state["step"].to(values.device, copy=True)],  # which it counts up
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        state["step"] += 1


class _LowBitAdamW(_OneByOne, ABC):
    """AdamW whose moments have few bits for large matrices, and 32 for the rest.

    Each row is filled up to whole blocks, which have a scale each. The moments [..., rows, bytes] and their scales
    [..., rows, blocks] are sharded like the parameter, so that a checkpoint fits any number of processes.
    """

    low: LowBits

    def __init__(self, groups: list[dict[str, Any]], config: AdamW8bitConfig | AdamW4bitConfig) -> None:
        betas = (config.betas1, config.betas2)
        defaults = {"lr": config.lr, "betas": betas, "eps": 1e-8, "weight_decay": config.weight_decay}
        super().__init__(groups, defaults, is_rounded=config.stochastic_rounding)

    def update(self, parameter: nn.Parameter, values: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Change the `values` as the package does."""
        state, columns = self.state[parameter], self.low.columns(parameter.shape)
        if not state:
            state |= self._moments(parameter, columns)
        state["step"] += 1
        if not values.numel():
            return
        moments = [local(state[name]) for name in ("state1", "absmax1", "state2", "absmax2") if name in state]
        if columns is None:
            self.update_plain(values, gradient.contiguous(), moments, state["step"], group)
            return
        missing = columns - values.shape[-1]
        padded, gradient = (
            nn.functional.pad(each, (0, missing)) if missing else each.contiguous() for each in (values, gradient)
        )
        self.update_blocks(padded, gradient, moments, state["step"], group)
        if padded is not values:
            values.copy_(padded[..., : values.shape[-1]])

    @abstractmethod
    def update_plain(
        self, values: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """Change `values` and both `moments`, which have 32 bits."""

    @abstractmethod
    def update_blocks(
        self, values: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """Change `values` of whole blocks; `moments`: first, its scales, second, its scales."""

    def _moments(self, parameter: nn.Parameter, columns: int | None) -> dict[str, Tensor]:
        """Moments of zero for `parameter`, of few bits if they have `columns`."""
        made: dict[str, Tensor] = {"step": torch.zeros(())}
        if columns is None:
            return made | {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
        own, row_bytes = local(parameter), columns * self.low.bits // 8
        for number in "12":
            for name, last, dtype in (
                ("state", row_bytes, torch.uint8),
                ("absmax", columns // self.low.block, torch.float32),
            ):
                value = own.new_zeros((*own.shape[:-1], last), dtype=dtype)
                if isinstance(parameter, DTensor):
                    whole = torch.empty((*parameter.shape[:-1], last), device="meta")
                    mesh, placements = parameter.device_mesh, parameter.placements
                    value = DTensor.from_local(value, mesh, placements, shape=whole.shape, stride=whole.stride())
                made[name + number] = value
        return made


class AdamW8bit(_LowBitAdamW):
    """With bitsandbytes' kernels (Dettmers et al., 2022)."""

    low = LOW_BITS["adamw8bit"]

    def __init__(self, groups: list[dict[str, Any]], config: AdamW8bitConfig) -> None:
        super().__init__(groups, config)
        self._kernels = functional = bitsandbytes_package().functional
        self._codes = [functional.create_dynamic_map(signed=is_signed) for is_signed in (True, False)]

    def update_plain(
        self, values: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """Change them as bitsandbytes does."""
        (first, second), (beta1, beta2), (eps, lr, decay) = moments, group["betas"], _rates(group)
        self._kernels.optimizer_update_32bit(
            "adam", gradient, values, first, beta1, eps, int(step), lr, second, beta2, weight_decay=decay
        )

    def update_blocks(
        self, values: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """Change them as bitsandbytes does."""
        (first, scales1, second, scales2), betas, (eps, lr, decay) = moments, group["betas"], _rates(group)
        self._codes = [code.to(values.device) for code in self._codes]
        scales = (scales1.view(-1), scales2.view(-1))
        self._kernels.optimizer_update_8bit_blockwise(
            "adam", gradient, values, first, second, *betas, 0.0, 0.0, eps, int(step), lr, *self._codes, *scales, decay
        )


def _rates(group: dict[str, Any]) -> tuple[float, float, float]:
    return group["eps"], group["lr"], group["weight_decay"]


class AdamW4bit(_LowBitAdamW):
    """With moments of 4 bits (Li et al., 2023), equal to torchao's AdamW4bit.

    Not by torchao: Transformers would load it in every process, and it compiles the update for each shape.
    """

    low = LOW_BITS["adamw4bit"]

    def update_plain(
        self, values: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """Change them as torchao does, which rounds after each of these operations."""
        (mean, square), (beta1, beta2) = moments, group["betas"]
        lr = torch.tensor(group["lr"], dtype=torch.float32)
        values.sub_(lr * group["weight_decay"] * values)
        mean.lerp_(gradient, 1 - beta1)
        square.lerp_(gradient.square(), 1 - beta2)
        size = (square.sqrt() / (1 - beta2**step).sqrt()).add_(group["eps"])
        values.sub_((lr * (mean / (1 - beta1**step))).div_(size))

    def update_blocks(
        self, values: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """Change them as torchao does."""
        levels = [each.to(values.device) for each in (_signed_levels(), _unsigned_levels())]
        rows = max(PIECE_VALUES // values.shape[-1], 1)
        pieces = (each.view(-1, each.shape[-1]).split(rows) for each in (values, gradient, *moments))
        for own, its_gradient, *stored in zip(*pieces, strict=True):
            kept = [*zip(levels, stored[::2], stored[1::2], strict=True)]
            unpacked = [_unpacked(*each).view(own.shape) for each in kept]
            self.update_plain(own, its_gradient, unpacked, step, group)
            for moment, each in zip(unpacked, kept, strict=True):
                _pack(moment, *each)


def _signed_levels() -> Tensor:
    """16 numbers from -0.8875 to 1: three decades with 1, 2 and 4 of each sign, 0 and 1 (after Dettmers, 2015)."""
    decades = [10.0 ** (power - 2) * torch.linspace(0.1, 1, 2**power + 1).unfold(0, 2, 1).mean(1) for power in range(3)]
    positive = torch.cat(decades)
    return torch.cat([-positive, torch.tensor([0.0, 1.0]), positive]).sort().values


def _unsigned_levels() -> Tensor:
    """16 numbers from 1/16 to 1. No zero, by whose root an update would be divided."""
    return torch.arange(1, 17) / 16


def _unpacked(levels: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Float32 values, in rows of a block each."""
    numbers = torch.stack([packed >> 4, packed & 15], dim=-1).int()
    return levels[numbers].view(scales.numel(), -1).mul_(scales.view(-1, 1))


def _pack(values: Tensor, levels: Tensor, packed: Tensor, scales: Tensor) -> None:
    """Store the level next to each of `values`, relative to the largest of its block; of two, the upper one."""
    blocks = values.view(scales.numel(), -1)
    scales.copy_(blocks.abs().amax(-1).clamp_(min=1e-12).view(scales.shape))
    numbers = torch.bucketize(
        blocks.div_(scales.view(-1, 1)), levels.unfold(0, 2, 1).mean(1), right=True, out_int32=True
    )
    numbers = numbers.to(torch.uint8).view(*packed.shape, 2)
    packed.copy_((numbers[..., 0] << 4).bitwise_or_(numbers[..., 1]))


class Adafactor(_OneByOne):
    """Adafactor (Shazeer and Stern, 2018) as PyTorch has it, on shards.

    Of a matrix, it keeps the mean squared gradient of each row and of each column. The update of a parameter is at most
    `lr` times as large as the parameter. `step` is collective: means and sizes are those of whole parameters.
    """

    def __init__(self, groups: list[dict[str, Any]], config: AdafactorConfig) -> None:
        defaults = {"lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__(groups, defaults, is_rounded=config.stochastic_rounding)

    def update(self, parameter: nn.Parameter, values: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Change the `values` as PyTorch does."""
        state, last = self.state[parameter], parameter.ndim - 1
        if not state:
            axes = {"variance": []} if last < 1 else {"row_var": [last], "col_var": [last - 1]}
            state |= {name: _reduced_zeros(parameter, of) for name, of in axes.items()} | {"step": torch.zeros(())}
        state["step"] += 1
        step, lr = int(state["step"]), group["lr"]
        change = step**_DECAY
        size = _size(values, parameter).clamp_(min=_SMALLEST_SIZE) * min(lr, step**-0.5)
        values.mul_(1 - lr * group["weight_decay"])
        if last < 1:
            estimate = local(state["variance"]).lerp_(gradient.float().square(), change).clone()
        else:
            rows, columns = local(state["row_var"]), local(state["col_var"])
            for means, axis in ((rows, last), (columns, last - 1)):
                squares = torch.linalg.vector_norm(gradient, dim=axis, keepdim=True, dtype=torch.float32).square_()
                means.lerp_(_summed(squares, parameter, [axis]) / parameter.shape[axis], change)
            mean = _summed(rows.sum(-2, keepdim=True), parameter, [last - 1]) / parameter.shape[-2]
            estimate = (rows @ columns).div_(mean.clamp_(min=_SMALLEST))
        update = estimate.clamp_(min=_SMALLEST**2).rsqrt_().mul_(gradient)
        values.sub_(update.mul_(size / _size(update, parameter).clamp_(min=1)))


_DECAY = -0.8
_SMALLEST = torch.finfo(torch.float32).eps
_SMALLEST_SIZE = 1e-3
"""PyTorch's defaults."""


def _reduced_zeros(parameter: nn.Parameter, axes: Sequence[int]) -> Tensor:
    """Float32 zeros of the shape of `parameter`, but for the `axes`, which have size 1; sharded likewise."""
    shape = [1 if axis in axes else size for axis, size in enumerate(parameter.shape)]
    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(shape, dtype=torch.float32)
    placements = [Replicate() if getattr(each, "dim", None) in axes else each for each in parameter.placements]
    own = [1 if axis in axes else size for axis, size in enumerate(local(parameter).shape)]
    value = local(parameter).new_zeros(own, dtype=torch.float32)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(value, parameter.device_mesh, placements, shape=torch.Size(shape), stride=stride)


def _summed(value: Tensor, parameter: nn.Parameter, axes: Sequence[int]) -> Tensor:
    """The sum of the processes' `value`s of their shards along the `axes` of `parameter`. Collective."""
    if isinstance(parameter, DTensor):
        for number, placement in enumerate(parameter.placements):
            if getattr(placement, "dim", None) in axes:
                dist.all_reduce(value, group=parameter.device_mesh.get_group(number))
    return value


def _size(values: Tensor, parameter: nn.Parameter) -> Tensor:
    """The root mean square of the whole tensor, of which `values` are this process's. Collective."""
    squares = torch.linalg.vector_norm(values, dtype=torch.float32).square()
    return (_summed(squares, parameter, range(parameter.ndim)) / parameter.numel()).sqrt_()


_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients with a steep slope at zero. Five iterations bring singular values to between about 0.7 and 1.2."""
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7
_RMS_OF_ADAMW = 0.2
_VOCABULARY = ("embed_tokens", "lm_head", "score")


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) with Nesterov momentum for one parameter group, and fused AdamW for the other.

    A matrix moves by `0.2 lr sqrt(max(rows, columns))` times the orthogonalized momentum. AdamW moves it about as far
    with the same rate (Liu et al., 2025, "Muon is scalable for LLM training"), so both groups share one `lr`. Tensors
    of more than two dimensions, such as experts, are stacks of matrices. `step` is collective: each process gathers a
    sharded matrix, orthogonalizes it, and keeps its own shard.
    """

    def __init__(self, config: MuonConfig, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> None:
        groups: list[dict[str, Any]] = []
        if matrices := list(matrices):
            groups.append({"params": matrices, "algorithm": "muon", "momentum": config.mu})
        self._adamw: ShardAdamW | None = None
        if others := list(others):
            self._adamw = ShardAdamW(others, lr=config.lr, betas=(config.betas1, config.betas2), fused=True)
            groups.append({**self._adamw.param_groups[0], "algorithm": "adamw"})
        for group in groups:
            group |= {"lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no update here needs the loss again
        """Apply the gradients."""
        for group in self.param_groups:
            if self._adamw is not None and group["algorithm"] == "adamw":
                self._adamw.param_groups, self._adamw.state = [group], self.state
                self._adamw.step()
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_matrix(parameter, parameter.grad, group)

    def _update_matrix(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = _orthogonal_of_all(gradient.lerp(buffer, momentum))
        own = local(parameter)
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.add_(update, alpha=-group["lr"] * _RMS_OF_ADAMW * math.sqrt(max(parameter.shape[-2:])))


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters for Muon (matrices except embeddings and head), and the other trainable ones."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim >= 2 and not any(part in name for part in _VOCABULARY)
        (matrices if is_matrix else others).append(parameter)
    return matrices, others


def orthogonalised(matrices: Tensor) -> Tensor:
    """Bring singular values near 1 by a quintic Newton-Schulz iteration in bfloat16; [..., rows, columns]."""
    first, second, third = _QUINTIC
    x = matrices.to(torch.bfloat16, copy=True).reshape(-1, *matrices.shape[-2:])
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x /= x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    return (x.mT if is_tall else x).reshape(matrices.shape)


def _keeps_matrices(placement: Placement) -> bool:
    """Whether a stack of matrices that is placed so has no matrix that processes divide."""
    return placement.is_replicate() or getattr(placement, "dim", None) == 0


def _orthogonal_of_all(update: Tensor) -> Tensor:
    """This process's part of the orthogonalized `update`. Collective."""
    if isinstance(update, DTensor) and update.ndim > 2 and all(map(_keeps_matrices, update.placements)):
        # Of stacked experts, a process has whole matrices: nobody needs those of others.
        own = local(update)
        return orthogonalised(own).to(update.dtype) if own.numel() else own
    whole = orthogonalised(full_tensor(update.to(torch.bfloat16)))
    return whole[index_of(update)].to(update.dtype)


def setup_optimizer(config: OptimizerConfig, model: nn.Module, states_on_host: bool = False) -> Optimizer:
    """The optimizer of all trainable parameters. Weight decay applies to each of them.

    With `states_on_host` its states are in host memory, and on the GPU only while their parameters are updated.
    """
    optimizer = _optimizer(config, model)
    device = next(model.parameters()).device
    if states_on_host and device.type == "cuda":
        offload_states(optimizer, device)
    elif states_on_host:
        get_logger().info("model.optim_cpu_offload has no effect on a CPU: optimizer state is in host memory already")
    if device.type == "cpu":
        if isinstance(optimizer, AdamW):
            _make_states(optimizer)
        # From here on, tensors live for a step at most.
        keep_freed_memory()
    return optimizer


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their norm is at most `max_norm`; returns the norm before. Collective."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return 0.0
    norm = global_norm(gradients)
    # As PyTorch's `clip_grad_norm_`: no division by zero, and no branch, for which a GPU would have to be waited for.
    scale(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


def _groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters. Those of LoRA+ or of a vision tower that have another rate are a group of their own,
    the last one."""
    ratio, fast = loraplus_parameters(model)
    other_rate, of_tower = tower_parameters(model)
    others = fast.union(of_tower)
    groups: list[dict[str, Any]] = []
    for rate, is_other in ((config.lr, False), (other_rate if of_tower else config.lr * ratio, True)):
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        if parameters := [parameter for parameter in trained if (parameter in others) is is_other]:
            groups.append({"params": parameters, "lr": rate})
    return groups


def _optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    match config:
        case AdamWConfig(stochastic_rounding=True):
            return RoundedAdamW(_groups(config, model), config)
        case AdafactorConfig():
            return Adafactor(_groups(config, model), config)
        case AdamWConfig():
            # The fused kernel updates all parameters in one pass. On a CPU it is five times as fast as the loop.
            return ShardAdamW(
                _groups(config, model),
                lr=config.lr,
                betas=(config.betas1, config.betas2),
                weight_decay=config.weight_decay,
                fused=True,
            )
        case AdamW8bitConfig():
            return AdamW8bit(_groups(config, model), config)
        case AdamW4bitConfig():
            return AdamW4bit(_groups(config, model), config)
        case SGDConfig():
            return torch.optim.SGD(
                _groups(config, model),
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
            )
        case MuonConfig():
            return Muon(config, *split_for_muon(model))


def _make_states(optimizer: AdamW) -> None:
    """Create AdamW's states now, instead of in the first update, when activations are already on the heap."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # These zeros are written here. Pages that the system zeroes (NumPy's zeros) would be mapped twice in the
            # first update, once to be read and once to be written, each time interrupting the other threads.
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}


# Keeps the gradients of a single process on a CPU in the same memory for the whole run.
#
# FSDP would sum the micro-batches of a step in its own tensors, copy them to a send buffer and from there to a receive
# buffer, and allocate all of these again in the next step. That takes time and leaves holes in the heap.


class KeptGradient:
    """The gradient of a sharded parameter, in float32. The first addition after `zero_grad` makes it `grad`."""

    def __init__(self, sharded: nn.Parameter) -> None:
        self._sharded = sharded
        # Its pages are allocated by the first gradient.
        self._kept = torch.empty_like(sharded, requires_grad=False)
        self._place = self._kept.to_local() if isinstance(self._kept, DTensor) else self._kept

    def take(self, gathered: Tensor) -> None:
        """Add the `grad` that autograd left on the gathered parameter, and clear it so that FSDP does not reduce it."""
        if gathered.grad is None:
            # The whole gradient was added without autograd.
            return
        if self._sharded.grad is None:
            self._place.copy_(gathered.grad)
            self._sharded.grad = self._kept
        else:
            self._place.add_(gathered.grad)
        gathered.grad = None

    def place(self) -> Tensor:
        """The tensor to add a gradient to, in float32."""
        if self._sharded.grad is None:
            self._place.zero_()
            self._sharded.grad = self._kept
        return self._place


class _Keeping(Protocol):
    """The attribute that `keep_gradients` adds to a gathered parameter."""

    kept_gradient: KeptGradient


def keep_gradients(model: nn.Module, process: Process) -> None:
    """Make backward passes of the sharded `model` add to gradients that stay in place.

    The sharded parameters get the same `grad` as from FSDP, also after `zero_grad(set_to_none=True)`. Does nothing with
    several processes, on a GPU, or for master weights in another dtype than float32, whose sums need another dtype.

    Leaves the weights gathered: `check_scoring`, which runs next, needs them gathered and then shards them.
    """
    if process.world_size > 1 or process.device.type != "cpu":
        return
    sharded = dict(model.named_parameters())
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
    for name, gathered in model.named_parameters():
        if gathered.requires_grad and sharded[name].dtype == torch.float32:
            kept = KeptGradient(sharded[name])
            cast("_Keeping", gathered).kept_gradient = kept
            gathered.register_post_accumulate_grad_hook(kept.take)


def kept_gradient_of(gathered: Tensor) -> KeptGradient | None:
    """The kept gradient of a gathered parameter, to add to without autograd; None if it is frozen or not kept."""
    return getattr(gathered, "kept_gradient", None) if gathered.requires_grad else None

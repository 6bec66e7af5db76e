"""Lays the trainer's processes out along axes: which weights a process holds, and which rows it trains on."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prime_rl.configs.model import ModelConfig, division_fault
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.process.world import Process

DATA_AXES = ("dp_replicate", "dp_shard")
"""Names of the mesh axes along which processes read different rows. Along any other axis they share rows."""


@dataclass(frozen=True, slots=True)
class DataAxis:
    """A process's position among those that read different rows.

    Use it to divide rows, to sum over rows and to normalize the loss. Processes with the same `data_rank` read the same
    rows, so a sum over processes would count those more than once.
    """

    data_rank: int
    data_size: int
    group: dist.ProcessGroup | None = None
    """Connects one process of each data rank, in order. None is the default group, of all processes."""

    @classmethod
    def from_ranks(cls, ranks: Tensor, axis_names: Sequence[str], rank: int) -> DataAxis:
        """The data axis of process `rank`; `ranks` and `axis_names` as in `data_groups`. Collective."""
        groups = data_groups(ranks, axis_names)
        own = next(group for group in groups if rank in group)
        # One group of all processes is the default group.
        group = dist.new_subgroups_by_enumeration(groups)[0] if len(groups) > 1 else None
        return cls(own.index(rank), len(own), group)

    @property
    def is_writer(self) -> bool:
        """Whether it is this process, of those that share rows, that writes what all of them have."""
        return self.group is None or 0 in dist.get_process_group_ranks(self.group)

    @property
    def collective_group(self) -> dist.ProcessGroup | None:
        """The group for a collective of another module; None if there is only one data rank."""
        return (self.group or dist.group.WORLD) if self.data_size > 1 else None

    def sum(self, values: Sequence[float], device: torch.device) -> list[float]:
        """Each of `values` summed over the data ranks, in float64. Collective."""
        if self.data_size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(totals, group=self.group)
        return totals.tolist()

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Each of `counts` summed over the data ranks, without waiting for a GPU. Collective."""
        if self.data_size == 1:
            return list(counts)
        totals = torch.tensor(counts)
        dist.all_reduce(totals, group=self.group)
        return totals.tolist()

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all data ranks, in order, on data rank 0; None on the others. Collective.

        A value may hold tensors, numbers and texts, in lists, tuples and dictionaries.
        """
        if self.data_size == 1:
            return [value]
        content = io.BytesIO()
        torch.save(value, content)
        gathered: list[Any] | None = [None] * self.data_size if self.data_rank == 0 else None
        dist.gather_object(content.getvalue(), gathered, group=self.group, group_dst=0)
        if gathered is None:
            return None
        # By itself torch pickles tensors in a way that loads without limits.
        return [torch.load(io.BytesIO(each), weights_only=True) for each in gathered]


def data_groups(ranks: Tensor, axis_names: Sequence[str]) -> list[list[int]]:
    """The groups of processes that read different rows, each in order of data rank.

    `ranks` is the mesh: process ranks by their position along the axes that `axis_names` lists.
    """
    data_axes = [axis for axis, name in enumerate(axis_names) if name in DATA_AXES]
    by_data_rank = ranks.movedim(data_axes, list(range(len(data_axes))))
    data_size = by_data_rank.shape[: len(data_axes)].numel()
    return by_data_rank.reshape(data_size, -1).T.tolist()


@dataclass(frozen=True, slots=True)
class ContextAxis:
    """A process's position among those that compute, or score, different tokens of the same rows."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class WeightAxis:
    """The processes that divide some weights, and those that hold the same part of them.

    Both meshes come from one root, as FSDP requires of weights that it shards further.
    """

    sharing: DeviceMesh
    """The processes that each hold a part."""
    fsdp: DeviceMesh
    """As `Mesh.fsdp`, of the processes that hold the same part."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """All processes of the trainer along axes, as seen from one of them.

    A function takes the part it needs: `process` to log, write files and place tensors, `fsdp` to shard weights,
    `data_axis` to divide rows and to sum over them.
    """

    process: Process
    fsdp: DeviceMesh
    """Weights are sharded over its last axis, and replicated over the first of two. It has all processes."""
    data_axis: DataAxis
    context_axis: ContextAxis | None = None
    """None if every process computes whole rows."""
    tensor_axis: WeightAxis | None = None
    """Divides the layers of decoder blocks. None if every process computes whole layers."""
    expert_axis: WeightAxis | None = None
    """Divides experts; with `model.tp` alone, it is `tensor_axis`. None if every process computes all experts."""
    row_axis: ContextAxis | None = None
    """The processes that share rows, along both axes above: each scores some tokens. None if they share none."""


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Sizes of the axes: `dp_replicate` copies of the model, each sharded over `dp_shard` times `cp` times `tp`
    processes.

    The first two axes together are the data axis. Processes along `cp` divide the tokens of a row, and those along
    `tp`, which are neighbours, the layers. Experts have axes of their own over the processes of a copy: each `ep`
    neighbours hold all experts together.
    """

    dp_replicate: int
    dp_shard: int
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def from_config(cls, config: ModelConfig, process: Process) -> ParallelDims:
        """Divide the processes as `config` says.

        Raises:
            TrainerError: the number of processes is not a multiple of `model.dp_replicate` times `model.cp` times
                `model.tp`, or of `model.dp_replicate` times `model.ep`.
        """
        if fault := division_fault(config, process.world_size):
            raise TrainerError(fault)
        sharing = config.dp_replicate * config.cp * config.tp
        shards = process.world_size // sharing
        return cls(config.dp_replicate, shards, config.cp, config.tp, max(config.ep, config.tp))

    def mesh(self, process: Process) -> Mesh:
        """Lay the processes out: one axis for FSDP, or two (replicate, shard) for HSDP. Collective."""
        ranks = torch.arange(process.world_size).view(self.dp_replicate, self.dp_shard, self.cp, self.tp)
        data_axis = DataAxis.from_ranks(ranks, (*DATA_AXES, "cp", "tp"), process.rank)
        fsdp = self._device_mesh(process, {"dp_shard": self.dp_shard * self.cp * self.tp})
        context_axis = _axis(ranks.movedim(2, -1).flatten(0, -2), process.rank)
        row_axis = context_axis if self.tp == 1 else _axis(ranks.flatten(2, 3).flatten(0, 1), process.rank)
        tensor_axis = self._weight_axis(process, "tp", self.tp)
        expert_axis = tensor_axis if self.ep == self.tp else self._weight_axis(process, "ep", self.ep)
        return Mesh(process, fsdp, data_axis, context_axis, tensor_axis, expert_axis, row_axis)

    def _weight_axis(self, process: Process, name: str, size: int) -> WeightAxis | None:
        if size == 1:
            return None
        root = self._device_mesh(process, {"dp_shard": self.dp_shard * self.cp * self.tp // size, name: size})
        assert root.mesh_dim_names is not None
        return WeightAxis(root[name], root[root.mesh_dim_names[:-1]])

    def _device_mesh(self, process: Process, axes: dict[str, int]) -> DeviceMesh:
        """A mesh of all processes along `axes`, after an axis for copies of the model if there are several."""
        if self.dp_replicate > 1:
            axes = {"dp_replicate": self.dp_replicate, **axes}
        return init_device_mesh(process.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _axis(groups: Tensor, rank: int) -> ContextAxis | None:
    """The axis of process `rank`, of `groups` of processes in order; None if each has only one. Collective."""
    size = groups.shape[1]
    if size == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration(groups.tolist())
    assert group is not None
    return ContextAxis(int((groups == rank).nonzero()[0, 1]), size, group)


def setup_mesh(config: ModelConfig, process: Process) -> Mesh:
    """The mesh that `config` asks for. Collective.

    Raises:
        TrainerError: the processes cannot be divided so.
    """
    return ParallelDims.from_config(config, process).mesh(process)

"""Lays the trainer's processes out along axes."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prime_rl.configs.model import ModelConfig, replication_fault
from prime_rl.trainer.process.data_axis import DataAxis
from prime_rl.trainer.process.errors import DeviceError
from prime_rl.trainer.process.world import Process


@dataclass(frozen=True, slots=True)
class Mesh:
    """All processes of the trainer along axes, as seen from one of them.

    A function takes the part it needs: `process` to log, write files and place tensors, `fsdp` to shard weights,
    `data_axis` to divide rows and to sum over them.
    """

    process: Process
    fsdp: DeviceMesh
    """Weights are sharded over its last axis, and replicated over the first of two."""
    data_axis: DataAxis


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Sizes of the data-parallel axes: `dp_replicate` copies of the model, each sharded over `dp_shard` processes.

    Each process reads its own rows, so the two axes together are the data axis.
    """

    dp_replicate: int
    dp_shard: int

    @classmethod
    def from_config(cls, config: ModelConfig, process: Process) -> ParallelDims:
        """Divide the processes as `config` says.

        Raises:
            DeviceError: the number of processes is not a multiple of `model.dp_replicate`.
        """
        if fault := replication_fault(config, process.world_size):
            raise DeviceError(fault)
        return cls(config.dp_replicate, process.world_size // config.dp_replicate)

    def mesh(self, process: Process) -> Mesh:
        """Lay the processes out: one axis for FSDP, or two (replicate, shard) for HSDP. Collective."""
        axes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}
        if self.dp_replicate == 1:
            del axes["dp_replicate"]
        fsdp = init_device_mesh(process.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        return Mesh(process, fsdp, DataAxis.from_mesh(fsdp))


def setup_mesh(config: ModelConfig, process: Process) -> Mesh:
    """The mesh that `config` asks for. Collective.

    Raises:
        DeviceError: the processes cannot be divided so.
    """
    return ParallelDims.from_config(config, process).mesh(process)

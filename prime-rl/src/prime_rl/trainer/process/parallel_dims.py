"""How the trainer's processes divide the work."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prime_rl.configs.model import ModelConfig, replication_fault
from prime_rl.trainer.process.errors import DeviceError
from prime_rl.trainer.process.world import World


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Sizes of the data-parallel axes: `dp_replicate` copies of the model, each sharded over `dp_shard` processes.

    Every process reads its own data, so both axes together are the data axis.
    """

    dp_replicate: int
    dp_shard: int

    @classmethod
    def of(cls, config: ModelConfig, world: World) -> ParallelDims:
        """Divide the world as the config asks.

        Raises:
            DeviceError: the number of processes is no multiple of `model.dp_replicate`.
        """
        if fault := replication_fault(config, world.world_size):
            raise DeviceError(fault)
        return cls(config.dp_replicate, world.world_size // config.dp_replicate)

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh that FSDP shards over: one axis, or two (replicate, shard) for HSDP."""
        if self.dp_replicate == 1:
            return init_device_mesh(device_type, (self.dp_shard,), mesh_dim_names=("dp_shard",))
        sizes = (self.dp_replicate, self.dp_shard)
        return init_device_mesh(device_type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))

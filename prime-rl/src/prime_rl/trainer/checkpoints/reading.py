"""Reads the sharded part of a checkpoint without running code that a damaged or foreign file may hold."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from prime_rl.trainer.checkpoints.files import first_reason
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.unpickling import PlainUnpickler


def read_sharded(state: dict[str, Any], directory: Path) -> None:
    """Fill the tensors and values in `state` from a checkpoint of `dcp.save`. Collective.

    Raises:
        CheckpointError: the checkpoint does not fit `state`, cannot be read, or holds anything but plain data.
    """
    try:
        dcp.load(state, storage_reader=_PlainReader(directory), planner=_PlainPlanner())
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"{directory} does not fit this model and optimizer: {first_reason(error)}") from error


class _PlainReader(FileSystemReader):
    """Reads the index with `PlainUnpickler`, where torch unpickles it without limits."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata: Metadata = PlainUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _PlainPlanner(DefaultLoadPlanner):
    """Reads values that are not tensors, such as an optimizer's settings, as plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

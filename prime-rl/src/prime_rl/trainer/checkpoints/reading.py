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

from prime_rl.trainer.checkpoints.files import first_line, first_reason
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.unpickling import PlainUnpickler


def read_sharded(state: dict[str, Any], directory: Path) -> None:
    """Fill the tensors and values in `state` from a checkpoint of `dcp.save`. Collective.

    Raises:
        CheckpointError: the checkpoint does not fit `state`, cannot be read, or holds anything but plain data.
    """
    reader = _PlainReader(directory)
    try:
        dcp.load(state, storage_reader=reader, planner=_PlainPlanner())
    except dcp.api.CheckpointException as error:
        reason = first_reason(error) if reader.index_fault is None else first_line(reader.index_fault)
        raise CheckpointError(f"{directory} does not fit this model and optimizer: {reason}") from error


class _PlainReader(FileSystemReader):
    """Reads the index with `PlainUnpickler`, where torch unpickles it without limits."""

    index_fault: Exception | None = None
    """Why the index could not be read. torch before 2.12 logs that away, and fails later without a reason."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            return self._read_index(kwargs.get("rank"))
        except Exception as error:
            self.index_fault = self.index_fault or error
            raise

    def _read_index(self, rank: int | None) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(rank), "rb") as file:
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

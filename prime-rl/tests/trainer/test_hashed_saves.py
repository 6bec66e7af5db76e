"""Checkpoints and exports are hashed while they are written; the hashes are those of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.serialization import get_crc32_options

from prime_rl.trainer.checkpoints.sharded import save_sharded
from prime_rl.utils.contents import CHUNK_BYTES, FileRecord, hash_file


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Tensors smaller than, as large as and larger than what is hashed at once; one of them empty, one a number."""
    counts = {"small": 3, "chunk": CHUNK_BYTES // 4, "large": CHUNK_BYTES + 1, "empty": 0}
    return {name: torch.randn(count) for name, count in counts.items()} | {"number": torch.tensor(7)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_recorded_hashes_are_those_of_the_files_which_load_as_they_were(
    state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    records = save_sharded(dict(state), tmp_path / "saved", None)

    assert records == {
        path: FileRecord(path.stat().st_size, hash_file(path)) for path in (tmp_path / "saved").glob("__*")
    }
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert get_crc32_options(), "other files keep their checksum"

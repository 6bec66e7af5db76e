"""Going on where a run stopped: what has to be the same for that, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import beyond_end
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.state import Progress
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.sft.data.fingerprint import DataFingerprint
from prime_rl.trainer.sft.data.packer import PackedRows
from prime_rl.trainer.sft.data.places import Place, saved_data_size
from prime_rl.utils.logger import get_logger

FINGERPRINT = "fingerprint"
"""Key of the fingerprint in what a checkpoint holds of the data."""


def check_same_rows(checkpoints: CheckpointManager, step: int, now: DataFingerprint) -> str:
    """Compare the data of a checkpoint with those of `now`; returns what that verified, for the receipt.

    Raises:
        CheckpointError: they give other rows, so a place in the ones means nothing in the others. With
            `ckpt.skip_dataloader`, which leaves the place aside, that is only a warning.
    """
    checkpoint = checkpoints.paths.checkpoint(step)
    saved = checkpoints.saved_data(step).get(FINGERPRINT)
    if saved is None:
        return "not the data, of which this checkpoint holds no fingerprint"
    differences = DataFingerprint.from_dict(saved).differences(now)
    if not differences:
        return "contents of the data, tokenizer, chat template and packing are the same"
    listed = "".join(f"\n  - {line}" for line in differences)
    if not checkpoints.config.skip_dataloader:
        raise CheckpointError(
            f"{checkpoint} was trained on other rows than this config gives:{listed}\n"
            "Undo that, or go on from the beginning of these rows with --ckpt.skip-dataloader"
        )
    if checkpoints.process.is_main:
        get_logger().warning(f"{checkpoint} was trained on other rows, and these start from their beginning:{listed}")
    return f"not the data: {len(differences)} differences, passed over by ckpt.skip_dataloader"


def go_on(rows: PackedRows, places: Sequence[Place]) -> str:
    """Put `rows` where the checkpoint's processes were, so that every sample is trained on that was not; returns how.

    Raises:
        CheckpointError: the checkpoint does not hold enough for that.
    """
    if not places:
        return "from the beginning of the data"
    if not all("left_over" in place for place in places):
        raise CheckpointError(
            "the checkpoint is of an older version, and its place in the data cannot be told exactly: "
            "go on from the beginning of the data with --ckpt.skip-dataloader"
        )
    rows.load_state(places)
    saved_by, now = saved_data_size(places[0]), rows.data_axis.data_size
    dealt = "" if saved_by == now else f", dealt anew from {saved_by} processes to {now}"
    return f"at entry {rows.stream.position} of the data (epoch {rows.stream.epoch}){dealt}"


def leave_receipt(
    config: SFTConfig, checkpoints: CheckpointManager, progress: Progress, place: str, verified: str
) -> None:
    """Say where a resumed run stands, and what has been checked.

    Raises:
        CheckpointError: that is beyond the end of the run.
    """
    for fault in beyond_end(progress.step, config.max_steps):
        raise CheckpointError(fault)
    if checkpoints.process.is_main:
        get_logger().info(
            f"Resumed from {checkpoints.paths.checkpoints}: step {progress.step}, {progress.tokens} tokens, "
            f"{progress.samples} samples; goes on {place}; verified: {verified}"
        )

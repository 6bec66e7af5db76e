"""Resumes a run: checks that its data has not changed, restores the position in it, and logs a receipt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import beyond_end
from prime_rl.run.attempts import report_restored
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.restored import summary_of
from prime_rl.trainer.process.errors import ResumeRefused
from prime_rl.trainer.sft.data.fingerprint import DataFingerprint
from prime_rl.trainer.sft.data.packer import PackedRows
from prime_rl.trainer.sft.data.places import Place, saved_data_size
from prime_rl.utils.logger import get_logger

FINGERPRINT = "fingerprint"
"""Key of the fingerprint in the data state of a checkpoint."""


def check_same_rows(checkpoints: CheckpointManager, step: int, now: DataFingerprint) -> str:
    """Compare the data of a checkpoint with the current data. Returns what was verified, for the receipt.

    Raises:
        ResumeRefused: the rows differ, so the saved position is invalid. With `ckpt.skip_dataloader`, which ignores
            that position, this is only a warning.
    """
    checkpoint = checkpoints.paths.checkpoint(step)
    saved = checkpoints.saved_data(step).get(FINGERPRINT)
    if saved is None:
        return "not the data: the checkpoint has no fingerprint of it"
    differences = DataFingerprint.from_dict(saved).differences(now)
    if not differences:
        return "data, tokenizer, chat template and packing are unchanged"
    listed = "; ".join(differences)  # the last line of a run that fails tells one line of its log
    if not checkpoints.config.skip_dataloader:
        raise ResumeRefused(
            f"{checkpoint} was trained on different rows than this config gives: {listed}. "
            "Undo the change, or continue from the beginning of the data with --ckpt.skip-dataloader"
        )
    if checkpoints.process.is_main:
        get_logger().warning(
            f"{checkpoint} was trained on different rows; continuing from the beginning of the data: {listed}"
        )
    return f"not the data: {len(differences)} differences ignored (ckpt.skip_dataloader)"


def restore_position(rows: PackedRows, places: Sequence[Place]) -> str:
    """Move `rows` to the saved position, so that no sample is skipped or repeated. Returns a description.

    Raises:
        ResumeRefused: the checkpoint does not hold the exact position.
    """
    if not places:
        return "from the beginning of the data"
    if not all("left_over" in place for place in places):
        raise ResumeRefused(
            "the checkpoint was written by an older version and does not hold the exact position in the data: "
            "continue from the beginning of the data with --ckpt.skip-dataloader"
        )
    rows.load_state(places)
    saved_by, now = saved_data_size(places[0]), rows.data_axis.data_size
    moved = "" if saved_by == now else f", redistributed from {saved_by} to {now} data ranks"
    return f"at entry {rows.stream.position} of the data (epoch {rows.stream.epoch}){moved}"


def leave_receipt(
    config: SFTConfig, checkpoints: CheckpointManager, facts: dict[str, Any], data: dict[str, Any]
) -> None:
    """Log and report where a resumed run continues and what has been checked.

    Raises:
        ResumeRefused: the step is beyond the end of the run.
    """
    for fault in beyond_end(facts["step"], config.max_steps):
        raise ResumeRefused(fault)
    if checkpoints.process.is_main:
        summary = f"{summary_of(facts)}; continues {data['place']}; verified: {data['verified']}"
        get_logger().info(f"Resumed from {checkpoints.paths.checkpoints}: {summary}")
        report_restored(summary, {**facts, "data": data})

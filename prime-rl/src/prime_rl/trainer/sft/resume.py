"""Resumes in the rows of a dataset: compares data, tokenizer and packing, and restores the position in the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.checks.data_files import Part
from prime_rl.configs.data import DataConfig, FakeDataConfig, SFTDataConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import beyond_end
from prime_rl.run.attempts import report_restored
from prime_rl.run.process import own_beats
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.state import summary_of
from prime_rl.trainer.process.errors import ResumeRefused
from prime_rl.trainer.sft.data.packer import PackedRows
from prime_rl.trainer.sft.data.places import Place, saved_data_size
from prime_rl.trainer.sft.data.sources import find_parts
from prime_rl.utils.contents import sampled_digest
from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prime_rl.trainer.model.images import Images


WHOLE_BYTES = 2**30
"""Files larger than this are identified by their size and by sampled blocks, because a full read delays the start."""
_NO_INFLUENCE: dict[str, Any] = {
    "name": True,
    "batch_size": True,
    "max_untrainable_share": True,
    "ignored_keys": True,
    # A bad row ends the run or is skipped: the others are the same.
    "on_bad_row": True,
    "sources": {"__all__": {"name": True}},
}
"""Keys of `data` that do not change the rows. A file may move: only its contents count."""


@dataclass(frozen=True, slots=True)
class DataFingerprint:
    """Equal fingerprints mean the same samples in the same order, and with as many processes the same rows."""

    contents: str
    """Digest of the dataset's files, or of name and revision of a hub dataset."""
    tokenizer: str
    """Digest of the tokenizer."""
    chat_template: str
    """Digest of the chat template."""
    settings: Mapping[str, Any]
    """Keys of `data` that determine the rows, dotted."""

    def differences(self, other: DataFingerprint, section: str = "data") -> list[str]:
        """One line for each difference between this, the saved fingerprint, and `other`, the current one."""
        named = (
            ("the contents of the data", self.contents, other.contents),
            ("the tokenizer", self.tokenizer, other.tokenizer),
            ("the chat template", self.chat_template, other.chat_template),
        )
        lines = [f"{what} changed ({was[:12]}, now {now[:12]})" for what, was, now in named if was != now]
        for key in sorted({*self.settings, *other.settings}):
            was, now = self.settings.get(key), other.settings.get(key)
            if was != now and key == "images":
                lines.append(
                    "the settings of the image processor changed (preprocessor_config.json), or [model.vision]"
                )
            elif was != now and key == "rows":
                lines.append(f"loss.type trained on {was or 'samples'} and now trains on {now or 'samples'}")
            elif was != now:
                lines.append(f"{section}.{key} was {was!r} and is {now!r}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataFingerprint:
        """The fingerprint that `as_dict` wrote."""
        return cls(**values)


def fingerprint_of(
    config: SFTDataConfig | FakeDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    whole_bytes: int = WHOLE_BYTES,
    images: Images | None = None,
) -> DataFingerprint:
    """Compute the fingerprint of a run's data. This takes about a second per GB of files up to `whole_bytes`. Of images
    that lie in files of their own, only the names count.

    Raises:
        DataError: there is no such dataset.
    """
    # The first call drops a truncation that the tokenizer's file may set. The digest must not depend on that call.
    tokenizer("a")
    is_loaded = isinstance(config, SFTDataConfig) and not config.streaming
    unread = {"shuffle_buffer": True} if is_loaded else {}
    contents = "made up" if isinstance(config, FakeDataConfig) else _digest_of_parts(find_parts(config), whole_bytes)
    settings = dict(_flat(config.model_dump(mode="json", exclude=_NO_INFLUENCE | unread)))
    if isinstance(config, SFTDataConfig) and config.split is not None:
        settings["held_out"] = str(config.split)
    if config.holds != "samples":
        settings["rows"] = config.holds
    if images is not None:
        settings["images"] = _digest([images.reader.identity])
    return DataFingerprint(
        contents=contents,
        tokenizer=_digest([tokenizer.backend_tokenizer.to_str(), repr(sorted(tokenizer.special_tokens_map.items()))]),
        chat_template=_digest([repr(tokenizer.chat_template)]),
        settings=settings,
    )


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _digest(texts: list[str]) -> str:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()


def _digest_of_parts(parts: list[Part], whole_bytes: int) -> str:
    return _digest([_digest_of_files(part.files, whole_bytes) if part.files else _hub_identity(part) for part in parts])


def _digest_of_files(files: tuple[Path, ...], whole_bytes: int) -> str:
    def ticking() -> Iterator[Path]:
        for file in files:
            own_beats().tick()
            yield file

    return sampled_digest(ticking(), whole_bytes)


def _hub_identity(part: Part) -> str:
    """Name and commit of a hub dataset; the commit is the one in the local hub cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = f"datasets--{part.name.replace('/', '--')}"
    reference = Path(HF_HUB_CACHE) / repository / "refs" / "main"
    commit = reference.read_text().strip() if reference.is_file() else "unknown revision"
    return f"{part.name} {part.subset} {part.split} {commit}"


FINGERPRINT = "fingerprint"
"""Key of the fingerprint in the data state of a checkpoint."""


def date_of_templates(
    config: SFTDataConfig | FakeDataConfig, tokenizer: PreTrainedTokenizerBase, saved: Mapping[str, Any] | None
) -> date | None:
    """The date that the chat template writes: the config's, that of the checkpoint's fingerprint, or today's.

    None if the template asks for no date. Without this, a run that is resumed tomorrow trains other tokens.
    """
    if isinstance(config, FakeDataConfig) or "strftime_now" not in repr(tokenizer.chat_template):
        return None
    kept = (saved or {}).get("settings", {}).get("template_date")
    return config.template_date or (date.fromisoformat(kept) if kept else date.today())


@dataclass(frozen=True, slots=True)
class IdentifiedData:
    """The data of a run, compared with that of the checkpoint that it resumes from."""

    config: DataConfig
    """With the date that the chat template writes."""
    fingerprint: DataFingerprint | None
    """For checkpoints; None if there are none."""
    verified: str
    """What was compared, for the receipt."""


def identify_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    checkpoints: CheckpointManager | None,
    step: int | None,
    images: Images | None = None,
) -> IdentifiedData:
    """Find out which rows a run trains on, and compare them with those of the checkpoint of `step`, if it resumes.

    Raises:
        ResumeRefused: the rows differ, so the saved position is invalid.
    """
    if checkpoints is None or step is None:
        today = date_of_templates(config, tokenizer, None)
    else:
        today = date_of_templates(config, tokenizer, checkpoints.saved_data(step).get(FINGERPRINT))
    data = config if today is None else config.model_copy(update={"template_date": today})
    if today is not None:
        key = f"{config.section}.template_date"
        get_logger().info(f"The chat template writes the date: {today} in all rows of this run ({key})")
    fingerprint = None if checkpoints is None else fingerprint_of(data, tokenizer, images=images)
    verified = ""
    if checkpoints is not None and fingerprint is not None and step is not None:
        verified = check_same_rows(checkpoints, step, fingerprint, config.section)
    return IdentifiedData(data, fingerprint, verified)


def check_same_rows(checkpoints: CheckpointManager, step: int, now: DataFingerprint, section: str) -> str:
    """Compare the data of a checkpoint with the current data. Returns what was verified, for the receipt.

    Raises:
        ResumeRefused: the rows differ, so the saved position is invalid. With `ckpt.skip_dataloader`, which ignores
            that position, this is only a warning.
    """
    checkpoint = checkpoints.paths.checkpoint(step)
    saved = checkpoints.saved_data(step).get(FINGERPRINT)
    if saved is None:
        return "not the data: the checkpoint has no fingerprint of it"
    before = DataFingerprint.from_dict(saved)
    dated = now.settings.get("template_date") is not None
    if dated and "template_date" not in before.settings:
        # A checkpoint of an earlier version: the date was that of each start.
        before = replace(before, settings={**before.settings, "template_date": now.settings["template_date"]})
        get_logger().warning(
            "The chat template writes the date, and the checkpoint does not say which one: the rows have "
            f"{now.settings['template_date']} from now on"
        )
    differences = before.differences(now, section)
    if not differences:
        return "data, tokenizer, chat template and packing are unchanged"
    listed = "; ".join(differences)  # the last line of a run that fails tells one line of its log
    if not checkpoints.config.skip_dataloader:
        raise ResumeRefused(
            f"{checkpoint} was trained on different rows than this config gives: {listed}. "
            f"Undo the change, or continue from the beginning of the data with {_skip_option(section)}"
        )
    if checkpoints.process.is_main:
        get_logger().warning(
            f"{checkpoint} was trained on different rows; continuing from the beginning of the data: {listed}"
        )
    return f"not the data: {len(differences)} differences ignored (ckpt.skip_dataloader)"


def _skip_option(section: str) -> str:
    return f"--{'trainer.' if section.startswith('trainer.') else ''}ckpt.skip-dataloader"


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
            f"continue from the beginning of the data with {_skip_option(rows.config.section)}"
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

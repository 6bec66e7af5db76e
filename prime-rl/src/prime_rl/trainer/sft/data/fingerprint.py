"""Fingerprint of everything that determines an SFT run's rows, saved in checkpoints and compared on resume."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.checks.data_files import Part
from prime_rl.configs.sft import FakeDataConfig, SFTDataConfig
from prime_rl.run.beats import own_beats
from prime_rl.trainer.sft.data.sources import find_parts
from prime_rl.utils.contents import sampled_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHOLE_BYTES = 2**30
"""Files larger than this are identified by their size and by sampled blocks, because a full read delays the start."""
_NO_INFLUENCE: dict[str, Any] = {
    "name": True,
    "batch_size": True,
    "max_untrainable_share": True,
    "ignored_keys": True,
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

    def differences(self, other: DataFingerprint) -> list[str]:
        """One line for each difference between this, the saved fingerprint, and `other`, the current one."""
        named = (
            ("the contents of the data", self.contents, other.contents),
            ("the tokenizer", self.tokenizer, other.tokenizer),
            ("the chat template", self.chat_template, other.chat_template),
        )
        lines = [f"{what} changed ({was[:12]}, now {now[:12]})" for what, was, now in named if was != now]
        for key in sorted({*self.settings, *other.settings}):
            was, now = self.settings.get(key), other.settings.get(key)
            if was != now:
                lines.append(f"data.{key} was {was!r} and is {now!r}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataFingerprint:
        """The fingerprint that `as_dict` wrote."""
        return cls(**values)


def fingerprint_of(
    config: SFTDataConfig | FakeDataConfig, tokenizer: PreTrainedTokenizerBase, whole_bytes: int = WHOLE_BYTES
) -> DataFingerprint:
    """Compute the fingerprint of a run's data. This takes about a second per GB of files up to `whole_bytes`.

    Raises:
        DataError: there is no such dataset.
    """
    # The first call drops a truncation that the tokenizer's file may set. The digest must not depend on that call.
    tokenizer("a")
    is_loaded = isinstance(config, SFTDataConfig) and not config.streaming
    unread = {"shuffle_buffer": True} if is_loaded else {}
    contents = "made up" if isinstance(config, FakeDataConfig) else _digest_of_parts(find_parts(config), whole_bytes)
    return DataFingerprint(
        contents=contents,
        tokenizer=_digest([tokenizer.backend_tokenizer.to_str(), repr(sorted(tokenizer.special_tokens_map.items()))]),
        chat_template=_digest([repr(tokenizer.chat_template)]),
        settings=dict(_flat(config.model_dump(mode="json", exclude=_NO_INFLUENCE | unread))),
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

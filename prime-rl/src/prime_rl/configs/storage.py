"""Names of places on S3, `s3://BUCKET/KEY`, and how a run is copied there."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, field_validator

from prime_rl.configs.ranges import Seconds, WholeNumber
from prime_rl.configs.surface.root import RootConfig
from prime_rl.utils.pydantic_config import BaseConfig, explicit_values
from prime_rl.utils.pydantic_config.base import Derivation, note_derivation

_NAME = re.compile(r"s3:/{1,2}([^/]*)(?:/(.*))?", re.DOTALL)
"""A `Path` keeps only one of the two slashes."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_LONGEST_KEY_BYTES = 1024
_SHOWN_CHARS = 200


class BadS3Name(ValueError):
    """A name begins with `s3:` and names no bucket or key. The message is one line."""


@dataclass(frozen=True, slots=True)
class S3Name:
    """An object, or everything below a prefix."""

    bucket: str
    key: str
    """Without slashes at its ends; empty for the whole bucket."""

    @classmethod
    def of(cls, text: str | Path) -> Self | None:
        """The place that a name or path stands for; None if it does not begin with `s3:/`.

        Raises:
            BadS3Name: S3 has no such names.
        """
        match = _NAME.fullmatch(str(text))
        if match is None:
            return None
        name = cls(match.group(1), (match.group(2) or "").rstrip("/"))
        if fault := name._fault():
            shown = str(name).encode("unicode_escape").decode()
            raise BadS3Name(f"{shown[:_SHOWN_CHARS]}: {fault}")
        return name

    def below(self, path: str) -> "S3Name":
        """The object at a relative path below this prefix."""
        return S3Name(self.bucket, f"{self.key}/{path}" if self.key else path)

    @property
    def prefix(self) -> str:
        """What the keys below this place begin with."""
        return f"{self.key}/" if self.key else ""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}" if self.key else f"s3://{self.bucket}"

    def _fault(self) -> str | None:
        if not _BUCKET.fullmatch(self.bucket):
            return "a bucket's name has 3 to 63 letters, digits, dots and hyphens; write s3://BUCKET/KEY"
        if len(self.key.encode("utf-8", "surrogatepass")) > _LONGEST_KEY_BYTES:
            return f"a key has at most {_LONGEST_KEY_BYTES} bytes"
        return path_fault(self.key) if self.key else None


def path_fault(path: str) -> str | None:
    """Why a key cannot also be a relative path below a directory; None if it can."""
    if not path.isprintable():
        return "it has control characters"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "parts of a key must not be empty, '.' or '..'"
    return None


def is_on_s3(name: str | Path) -> bool:
    """Whether a name or path begins with `s3:/`. It may still be malformed."""
    return _NAME.fullmatch(str(name)) is not None


class StorageConfig(BaseConfig):
    """Copies a run to S3 while it goes on. Needs the extra `s3`. Read by the launcher."""

    upload_to: str | None = None
    """Where to copy the run, `s3://BUCKET/PREFIX`. `output_dir = "s3://…"` sets it. None copies nothing."""

    work_dir: Path | None = None
    """The local directory of a run whose `output_dir` is on S3. None is `outputs/s3/BUCKET/PREFIX`."""

    samples: bool = True
    """Also upload kept rollouts, results of evaluations and small pictures of images, which may show patients' data."""

    upload_every: Seconds = 60
    """Seconds between two checks for new files. Failed uploads wait longer."""

    max_held: WholeNumber = 4
    """Maximum number of checkpoints kept on this disk only until they are uploaded. Beyond it, the oldest is deleted
    unless `[ckpt]` keeps it."""

    final_wait: WholeNumber = 600
    """Seconds that the end of a run waits for uploads while S3 fails."""

    @field_validator("upload_to")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        if value is not None and S3Name.of(value) is None:
            raise ValueError("is not the name of a place on S3: write s3://BUCKET/PREFIX")
        return value

    @property
    def target(self) -> S3Name | None:
        """`upload_to`, parsed."""
        return None if self.upload_to is None else S3Name.of(self.upload_to)


def work_dir_of(name: S3Name, work_dir: str | Path | None = None) -> Path:
    """The local directory of a run that is kept at `name`: `work_dir`, or one below `outputs/s3`."""
    return Path("outputs", "s3", name.bucket, *name.key.split("/")) if work_dir is None else Path(work_dir)


def placed_output(data: dict[str, Any]) -> dict[str, Any]:
    """Raw data of a run whose `output_dir` is a local one: if it is on S3, it becomes `storage.upload_to`.

    Raises:
        BadS3Name: S3 has no such names.
    """
    given, storage = data.get("output_dir"), data.get("storage")
    name = S3Name.of(given) if isinstance(given, str | Path) else None
    if name is None:
        return data
    table = explicit_values(storage) if isinstance(storage, BaseModel) else storage or {}
    if not isinstance(table, dict):
        return data  # a fault that validation reports
    work_dir = work_dir_of(name, table.get("work_dir"))
    note_derivation(Derivation("output_dir", "the run's directory is on S3"))
    note_derivation(Derivation("storage.upload_to", "output_dir"))
    return {**data, "output_dir": work_dir, "storage": {**table, "upload_to": str(name)}}


class KeptRunConfig(RootConfig):
    """Root of a run, whose `output_dir` may be on S3."""

    storage: StorageConfig = StorageConfig()
    """Copies the run to S3 while it goes on."""

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        return placed_output(super().prepare(data))

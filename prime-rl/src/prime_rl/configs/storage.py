"""Names of places on S3, `s3://BUCKET/KEY`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
    def of(cls, text: str | Path) -> S3Name | None:
        """The place that a name or path stands for; None if it does not begin with `s3:/`.

        Raises:
            BadS3Name: S3 has no such names.
        """
        match = _NAME.fullmatch(str(text))
        if match is None:
            return None
        name = cls(match.group(1), (match.group(2) or "").rstrip("/"))
        if fault := name._fault():
            shown = f"s3://{name.bucket}/{name.key}".encode("unicode_escape").decode()
            raise BadS3Name(f"{shown[:_SHOWN_CHARS]}: {fault}")
        return name

    def below(self, path: str) -> S3Name:
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

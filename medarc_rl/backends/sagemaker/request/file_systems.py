"""A directory that all instances of a job share: FSx for Lustre or EFS."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from medarc_rl.errors import UsageError

SHARED_CHANNEL = "shared"
"""SageMaker mounts the directory as the channel of this name."""
_TYPES = {"fsx": "FSxLustre", "efs": "EFS"}
_ID = re.compile(r"fs-[0-9a-f]{8,18}")
_EXAMPLE = "as in --file-system fsx:fs-0123456789abcdef0:/mountname/runs"


@dataclass(frozen=True, slots=True)
class FileSystem:
    kind: str
    """`fsx` or `efs`."""
    id: str
    path: str
    """Of the directory. On FSx it begins with the mount name of the file system."""

    @classmethod
    def of(cls, text: str) -> FileSystem:
        """Parse `KIND:ID:/PATH`. Raises UsageError."""
        kind, _, rest = text.partition(":")
        name, _, path = rest.partition(":")
        if kind not in _TYPES:
            raise UsageError(f"--file-system {text!r}: write fsx:ID:/PATH or efs:ID:/PATH, {_EXAMPLE}")
        if _ID.fullmatch(name) is None:
            raise UsageError(f"--file-system {text!r}: {name!r} is no file system's id; write it {_EXAMPLE}")
        parts = path.split("/")
        if parts[0] or len(path) > 4096 or not path.isprintable() or not {".", ".."}.isdisjoint(parts):
            raise UsageError(f"--file-system {text!r}: the path begins with / and has no '..'; write it {_EXAMPLE}")
        if kind == "fsx" and not path.strip("/"):
            raise UsageError(f"--file-system {text!r}: a path on FSx begins with its mount name, {_EXAMPLE}")
        return cls(kind, name, path.rstrip("/") or "/")

    def channel(self) -> dict[str, Any]:
        """The channel of a CreateTrainingJob request."""
        source = {
            "FileSystemId": self.id,
            "FileSystemAccessMode": "rw",
            "FileSystemType": _TYPES[self.kind],
            "DirectoryPath": self.path,
        }
        return {"ChannelName": SHARED_CHANNEL, "DataSource": {"FileSystemDataSource": source}, "InputMode": "File"}

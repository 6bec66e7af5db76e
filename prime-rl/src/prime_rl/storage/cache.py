"""Local copies of objects and prefixes on S3, one for each state that a listing has shown.

A copy is a directory named by a hash of the listing: keys, sizes and ETags. It appears whole, and never changes. If the
objects change, the next use makes another copy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.storage import S3Name
from prime_rl.storage.s3 import S3, S3Object
from prime_rl.storage.trees import download_objects, path_below
from prime_rl.utils.errors import NotPrivate, StorageError
from prime_rl.utils.files import DELETED, PARTIAL, fsync_tree, locked_file, size_text
from prime_rl.utils.private import home_directory, private_directory

CACHE_VARIABLE = "PRIME_RL_BUCKET_CACHE"
_SOURCE = "source.json"


@dataclass(frozen=True, slots=True)
class Listing:
    """The objects at a name, as they are now."""

    name: S3Name
    objects: tuple[S3Object, ...]

    @classmethod
    def of(cls, s3: S3, name: S3Name) -> Listing:
        """Raises StorageError: nothing is there, or it cannot be listed."""
        return cls(name, tuple(s3.find(name)))

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.objects)

    @property
    def digest(self) -> str:
        """Hash of what was listed."""
        table = [[str(each.name), each.size_bytes, each.etag] for each in self.objects]
        return hashlib.sha256(json.dumps([str(self.name), table]).encode()).hexdigest()[:24]

    def __str__(self) -> str:
        files = "1 file" if len(self.objects) == 1 else f"{len(self.objects)} files"
        return f"{files}, {size_text(self.size_bytes)}"


def cache_root(env: Mapping[str, str]) -> Path:
    """`$PRIME_RL_BUCKET_CACHE`, or else `prime-rl/s3` in the user's cache directory."""
    user_caches = Path(env.get("XDG_CACHE_HOME") or home_directory() / ".cache")
    return Path(env.get(CACHE_VARIABLE) or user_caches / "prime-rl" / "s3").absolute()


def local_copy(s3: S3, listing: Listing, root: Path, say: Callable[[str], None]) -> Path:
    """The file or directory that holds what was listed; it is downloaded if it is not there.

    Other processes that want the same wait for the download. If it is interrupted, the next one continues it.

    Raises:
        StorageError: it cannot be downloaded, or the disk has no room.
    """
    try:
        private_directory(root)
        with locked_file(root / f"{listing.digest}.lock", lambda: say(f"{listing.name}: waiting for another download")):
            return _copy(s3, listing, root, say)
    except NotPrivate as error:
        raise StorageError(f"{error}; or set {CACHE_VARIABLE} to another directory") from error
    except OSError as error:
        raise StorageError(
            f"{listing.name} cannot be stored in {root}: {error.strerror}; {CACHE_VARIABLE} names another directory"
        ) from error


def _copy(s3: S3, listing: Listing, root: Path, say: Callable[[str], None]) -> Path:
    name, target = listing.name, root / listing.digest
    # The last part of a name, because people read it.
    leaf = name.key.rpartition("/")[2] or name.bucket
    is_file = [each.name for each in listing.objects] == [name]
    if target.is_dir() and not _is_whole(listing, target if is_file else target / leaf):
        _remove(target)
    if not target.is_dir():
        scratch = root / f"{listing.digest}{PARTIAL}"
        files = scratch if is_file else scratch / leaf
        files.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_room(listing, files, root)
        say(f"{name}: downloading {listing}")
        download_objects(s3, name, listing.objects, files, keep=True)
        source = {"name": str(name), "files": len(listing.objects), "bytes": listing.size_bytes}
        (scratch / _SOURCE).write_text(json.dumps(source))
        fsync_tree(scratch)
        scratch.rename(target)
    return target / leaf


def _is_whole(listing: Listing, directory: Path) -> bool:
    """Whether every file is there with its size."""
    for each in listing.objects:
        file = directory / path_below(listing.name, each)
        if not file.is_file() or file.stat().st_size != each.size_bytes:
            return False
    return True


def _remove(target: Path) -> None:
    deleted = target.with_name(f"{target.name}{DELETED}")
    shutil.rmtree(deleted, ignore_errors=True)
    target.rename(deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def _check_room(listing: Listing, scratch: Path, root: Path) -> None:
    there = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    free = shutil.disk_usage(root).free
    if listing.size_bytes - there > free:
        raise StorageError(
            f"{listing.name} has {size_text(listing.size_bytes)}, and {root} has {size_text(free)} free: make room, or "
            f"set {CACHE_VARIABLE} to a directory on another disk"
        )

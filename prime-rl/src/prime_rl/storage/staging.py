"""Downloads the inputs on S3 that a config names, and puts the paths of the local copies in their place.

A copy is a directory of the user's cache named by a hash of the listing: keys, sizes and ETags. It appears whole and
never changes. If the objects change, the next use makes another copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from prime_rl.configs.storage import BadS3Name, S3Name
from prime_rl.storage.s3 import S3, S3Object
from prime_rl.storage.trees import download_objects, path_below
from prime_rl.utils.errors import NotPrivate, StagingRefused, StorageError
from prime_rl.utils.files import DELETED, PARTIAL, fsync_tree, locked_file, size_text
from prime_rl.utils.private import home_directory, private_directory

# The local copies.


CACHE_VARIABLE = "PRIME_RL_BUCKET_CACHE"
_SOURCE = "source.json"
_COPY = re.compile(r"[0-9a-f]{24}")
"""Names of directories of copies: `Listing.digest`."""


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
        raise StagingRefused(f"{error}; or set {CACHE_VARIABLE} to another directory") from error
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


def folder_of(file: Path) -> Path:
    """The folder where relative names in a data file begin: of a copy of one object, the folder of that on S3."""
    source = file.parent / _SOURCE
    # Elsewhere, a file of this name is the user's own.
    if not _COPY.fullmatch(file.parent.name) or not source.is_file():
        return file.parent
    if (name := S3Name.of(json.loads(source.read_text())["name"])) is None:
        return file.parent
    return Path(str(S3Name(name.bucket, name.key.rpartition("/")[0])))


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


WRITTEN_KEYS = frozenset({"output_dir", "upload_to", "work_dir", "toml_files"})
"""Keys that name no input."""

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, slots=True)
class Input:
    """Something on S3 that a config names."""

    key: str
    """The first key that names it."""
    listing: Listing

    def __str__(self) -> str:
        return f"{self.key} = {self.listing.name}: {self.listing}"


def has_s3_names(config: object) -> bool:
    """Whether a config names inputs on S3. Malformed names count."""
    try:
        return next(s3_names(config), None) is not None
    except BadS3Name:
        return True


def s3_names(value: Any, key: str = "") -> Iterator[tuple[str, S3Name]]:
    """Each input on S3 in a config, with the dotted key that names it.

    Raises:
        BadS3Name: S3 has no such names.
    """
    for inner, item in _items(value, key):
        if isinstance(item, str | Path):
            try:
                name = S3Name.of(item)
            except BadS3Name as error:
                raise BadS3Name(f"{inner}: {error}") from error
            if name is not None:
                yield inner, name
        else:
            yield from s3_names(item, inner)


def inputs_of(config: object, s3: S3 | None = None) -> list[Input]:
    """List every input on S3 that a config names.

    Raises:
        StagingRefused: one is missing or cannot be read, or boto3 is not installed.
    """
    try:
        names: dict[S3Name, str] = {}
        for key, name in s3_names(config):
            names.setdefault(name, key)
        s3 = s3 or S3.connect()
    except (BadS3Name, StorageError) as error:
        raise StagingRefused(str(error), known_here=isinstance(error, BadS3Name)) from error
    found, faults = [], {}
    for name, key in names.items():
        try:
            found.append(Input(key, Listing.of(s3, name)))
        except StorageError as error:
            faults[f"{key}: {error}"] = error.code in ("Nothing", "NoSuchBucket")
    if faults:
        raise StagingRefused(*faults, known_here=any(faults.values()))
    return found


def staged(config: ConfigT, say: Callable[[str], None]) -> ConfigT:
    """The config with the paths of local copies in place of names on S3. Downloads what is missing.

    Raises:
        StagingRefused: something cannot be downloaded.
    """
    if not has_s3_names(config):
        return config
    try:
        s3 = S3.connect()
        found = inputs_of(config, s3)
        root = cache_root(os.environ)
        paths = {each.listing.name: local_copy(s3, each.listing, root, say) for each in found}
    except StorageError as error:
        raise StagingRefused(str(error)) from error
    for each in found:
        say(f"{each}, in {paths[each.listing.name]}")
    replaced: ConfigT = _replaced(config, paths)
    return replaced


def _items(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            if name not in WRITTEN_KEYS:
                yield f"{key}.{name}" if key else name, getattr(value, name)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield f"{key}.{name}", item
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield f"{key}[{index}]", item


def _replaced(value: Any, paths: dict[S3Name, Path]) -> Any:
    """A copy with replaced names; `value` itself if it has none."""
    if isinstance(value, str | Path):
        name = S3Name.of(value)
        return value if name is None else type(value)(str(paths[name]))
    if isinstance(value, list):
        items = [_replaced(item, paths) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if not isinstance(value, BaseModel | dict):
        return value
    names = type(value).model_fields if isinstance(value, BaseModel) else value
    before = {
        name: getattr(value, name) if isinstance(value, BaseModel) else value[name]
        for name in names
        if name not in WRITTEN_KEYS
    }
    changed = {name: new for name, old in before.items() if (new := _replaced(old, paths)) is not old}
    if not changed:
        return value
    return value.model_copy(update=changed) if isinstance(value, BaseModel) else {**value, **changed}


class StoredImages:
    """The local copies of images that rows of data name `s3://…`, as `read_image` asks for them. Copies are kept."""

    def __init__(self) -> None:
        self._s3: S3 | None = None
        self._paths: dict[str, Path] = {}

    def __call__(self, name: str, max_bytes: int) -> Path:
        """Raises StorageError or BadS3Name: it is no such object, is too large, or cannot be downloaded."""
        if name not in self._paths:
            self._s3 = self._s3 or S3.connect()
            place = S3Name.of(name)
            if place is None:
                raise BadS3Name(f"{name}: not a name on S3")
            listing = Listing.of(self._s3, place)
            if [each.name for each in listing.objects] != [place]:
                raise StorageError(f"{name} is a folder of {listing}, not an image")
            if listing.size_bytes > max_bytes:
                raise StorageError(f"{name} has {size_text(listing.size_bytes)}, more than {size_text(max_bytes)}")
            self._paths[name] = local_copy(self._s3, listing, cache_root(os.environ), lambda line: None)
        return self._paths[name]

"""Copies trees of files from S3 to a directory, several parts at once and compared with their ETags, and back."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.storage import S3Name, path_fault
from prime_rl.storage.s3 import S3, S3Object
from prime_rl.utils.errors import StorageError
from prime_rl.utils.files import STABLE, TEMPORARY

# ETags: MD5 of the contents, or MD5 of the parts' MD5s.


_MD5 = re.compile(r"[0-9a-f]{32}(?:-(\d+))?")
_CHUNK_BYTES = 1 << 20


def etag_fault(s3: S3, item: S3Object, file: Path) -> str | None:
    """Why a file is not the object that was listed, in one line; None if it is, or if its ETag is not an MD5."""
    match = _MD5.fullmatch(item.etag)
    if match is None:
        return None
    if match.group(1) is None:
        sizes: Sequence[int] = [item.size_bytes]
        if _md5_of_parts(file, sizes) == item.etag or _is_encrypted(s3, item):
            return None
    else:
        count = int(match.group(1))
        try:
            sizes = _equal_parts(s3, item, count)
            if f"{_md5_of_parts(file, sizes)}-{count}" == item.etag or _is_encrypted(s3, item):
                return None
            sizes = [s3.part(item, number)["ContentLength"] for number in range(1, count + 1)]
        except StorageError:
            return None  # a server that tells nothing of parts
        if sum(sizes) != item.size_bytes or f"{_md5_of_parts(file, sizes)}-{count}" == item.etag:
            return None
    return f"{item.name}: the {item.size_bytes} bytes that arrived do not have its ETag {item.etag}"


def _is_encrypted(s3: S3, item: S3Object) -> bool:
    """Whether the ETag is one of encrypted contents, and so no MD5 of these."""
    answer = s3.part(item)
    return str(answer.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in answer


def _equal_parts(s3: S3, item: S3Object, count: int) -> list[int]:
    """Sizes of the parts, if all but the last are as large as the first."""
    first = s3.part(item)["ContentLength"]
    whole = [first] * (count - 1)
    return [*whole, item.size_bytes - sum(whole)]


def _md5_of_parts(file: Path, sizes: Sequence[int]) -> str:
    """MD5 of the contents for one size, else MD5 of the parts' MD5s."""
    digests = [_md5(file, start, size) for start, size in zip(_starts(sizes), sizes, strict=True)]
    if len(digests) == 1:
        return digests[0].hex()
    return hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    return itertools.islice(itertools.accumulate(sizes, initial=0), len(sizes))


def _md5(file: Path, start: int, size: int) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as opened:
        opened.seek(start)
        while size > 0 and (chunk := opened.read(min(size, _CHUNK_BYTES))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.digest()


WORKERS = 8
"""Parts or files that move at once."""
_WHOLE_ATTEMPTS = 3
"""Attempts at a file whose contents arrive damaged."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Files and bytes that were moved."""

    files: int
    size_bytes: int


def download_tree(
    s3: S3, name: S3Name, target: Path, wanted: Callable[[str], bool] = lambda path: True, keep: bool = False
) -> Tree:
    """Download an object, or everything below a prefix, into the directory `target`.

    A file appears under its name once it is whole: its size and ETag are compared. Other files stay.

    Args:
        wanted: chooses files by their path below the prefix.
        keep: leave files of the right size alone; they must be of an earlier download of the same objects.

    Raises:
        StorageError: nothing is there, or it cannot be read. Whole files stay.
        OSError: a file cannot be written.
    """
    objects = [each for each in s3.find(name) if wanted(path_below(name, each))]
    return download_objects(s3, name, objects, target, keep)


def download_objects(s3: S3, name: S3Name, objects: Sequence[S3Object], target: Path, keep: bool = False) -> Tree:
    """`download_tree` of objects below `name` that are already listed.

    Raises:
        StorageError: also if a key leads out of `target`.
    """
    for each in objects:
        if fault := path_fault(path_below(name, each)):
            raise StorageError(f"{name} holds the key {each.name.key!a}, which cannot be a file: {fault}")
    stop = threading.Event()
    files = [_Incoming(s3, each, target / path_below(name, each), stop) for each in objects]
    _refuse_clashes(name, [file.target for file in files])
    missing = [file for file in files if not (keep and file.is_there)]
    _all_done((job for file in missing for job in file.jobs()), stop)
    return Tree(len(objects), sum(each.size_bytes for each in objects))


def upload_tree(s3: S3, directory: Path, name: S3Name, files: Iterable[Path] | None = None) -> Tree:
    """Upload `files` of a directory; None takes all, in its subdirectories too. Files named `STABLE` come last.

    Raises:
        StorageError: S3 refuses one, or cannot be reached. What was uploaded stays.
        OSError: a file cannot be read.
    """
    chosen = sorted(path for path in directory.rglob("*") if path.is_file()) if files is None else list(files)
    pairs = [(path, name.below(path.relative_to(directory).as_posix())) for path in chosen]
    for is_last in (False, True):
        upload_files(s3, [pair for pair in pairs if (pair[0].name == STABLE) is is_last])
    return Tree(len(chosen), sum(path.stat().st_size for path in chosen))


def upload_files(
    s3: S3,
    pairs: Iterable[tuple[Path, S3Name]],
    on_done: Callable[[Path], None] = lambda path: None,
    stop: threading.Event | None = None,
) -> None:
    """Upload files, several at once. `on_done` is called in a thread with each that has arrived.

    Raises:
        StorageError: S3 refuses one, or cannot be reached, or `stop` was set. What was uploaded stays.
        OSError: a file cannot be read.
    """
    ending = threading.Event() if stop is None else stop

    def job(path: Path, target: S3Name) -> Job:
        def upload() -> None:
            s3.upload(path, target, ending)
            on_done(path)

        return upload

    _all_done([job(*pair) for pair in pairs], threading.Event())


def path_below(name: S3Name, item: S3Object) -> str:
    """The path of an object below a prefix; the file's own name for the object itself."""
    if item.name == name:
        return name.key.rpartition("/")[2]
    return item.name.key[len(name.prefix) :]


Job = Callable[[], None]


def _all_done(jobs: Iterable[Job], stop: threading.Event) -> None:
    """Run all jobs in threads; the first error ends all of them, and is raised."""
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="s3") as pool:
        try:
            futures = [pool.submit(job) for job in jobs]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _refuse_clashes(name: S3Name, targets: Iterable[Path]) -> None:
    """A key `a` next to `a/b` would be a file and a directory of one name."""
    files = set(targets)
    for target in files:
        if clash := next((parent for parent in target.parents if parent in files), None):
            raise StorageError(f"{name} holds both an object {clash.name!r} and objects below it: rename one of them")


class _Incoming:
    """A file that arrives in parts."""

    def __init__(self, s3: S3, item: S3Object, target: Path, stop: threading.Event) -> None:
        self.target = target
        self._s3 = s3
        self._item = item
        self._stop = stop
        self._scratch = target.with_name(f"{target.name}{TEMPORARY}")
        self._parts = [
            (start, min(start + s3.part_bytes, item.size_bytes)) for start in range(0, item.size_bytes, s3.part_bytes)
        ] or [(0, 0)]
        self._left = len(self._parts)
        self._lock = threading.Lock()

    @property
    def is_there(self) -> bool:
        return self.target.is_file() and self.target.stat().st_size == self._item.size_bytes

    def jobs(self) -> Iterator[Job]:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with self._scratch.open("wb") as file:
            file.truncate(self._item.size_bytes)
        return (lambda part=part: self._fetch(*part) for part in self._parts)  # type: ignore[misc]

    def _fetch(self, start: int, stop: int) -> None:
        self._read(start, stop)
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._complete()

    def _read(self, start: int, stop: int) -> None:
        if self._stop.is_set():
            raise StorageError(f"{self._item.name}: its download was stopped")
        descriptor = os.open(self._scratch, os.O_WRONLY)
        try:
            self._s3.read_into(self._item, start, stop, descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _complete(self) -> None:
        for attempt in range(1, _WHOLE_ATTEMPTS + 1):
            fault = etag_fault(self._s3, self._item, self._scratch)
            if fault is None:
                self._scratch.replace(self.target)
                return
            if attempt == _WHOLE_ATTEMPTS:
                self._scratch.unlink(missing_ok=True)
                raise StorageError(f"{fault}, {attempt} times")
            for part in self._parts:
                self._read(*part)

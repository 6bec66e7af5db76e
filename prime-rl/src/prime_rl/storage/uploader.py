"""Copies a run to S3 while it goes on, and keeps checkpoints on this disk until they have arrived."""

from __future__ import annotations

import hashlib
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prime_rl.configs.storage import S3Name
from prime_rl.run.paths import EvalPaths, RunPaths, stable_steps
from prime_rl.storage.s3 import S3, STOPPED, S3Object
from prime_rl.storage.trees import path_below, upload_files
from prime_rl.utils.contents import STABLE
from prime_rl.utils.errors import StorageError, one_line
from prime_rl.utils.files import DELETED, PARTIAL, TEMPORARY, replacing_file, size_text
from prime_rl.utils.logger import get_logger

# Checkpoints that wait for their upload, up to a number.


def write_plan(paths: RunPaths, target: str, max_held: int) -> None:
    """Tell the processes of a run that it is copied to S3."""
    with replacing_file(paths.upload_plan) as scratch:
        scratch.write_text(json.dumps({"upload_to": target, "max_held": max_held}) + "\n", encoding="utf-8")


def read_plan(paths: RunPaths) -> dict[str, Any] | None:
    """Plan of the upload of a run; None if it is not copied, or the file is damaged."""
    try:
        plan = json.loads(paths.upload_plan.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return plan if isinstance(plan, dict) else None


def mark_uploaded(paths: RunPaths, step_directory: Path, target: str) -> None:
    marker = paths.uploaded(step_directory)
    marker.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(marker) as scratch:
        scratch.write_text(_what_is_uploaded(step_directory, target), encoding="utf-8")


def is_uploaded(paths: RunPaths, step_directory: Path, target: str) -> bool:
    """Whether a step is on S3 at `target` as it is now.

    A run may be copied to several places, one after the other, and a resumed run writes steps again.
    """
    try:
        marker = paths.uploaded(step_directory).read_text(encoding="utf-8")
        return marker == _what_is_uploaded(step_directory, target)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _what_is_uploaded(step_directory: Path, target: str) -> str:
    return f"{target}\n{(step_directory / STABLE).stat().st_mtime_ns}\n"


class Hold:
    """Decides which checkpoints that a run no longer needs may be deleted."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        plan = read_plan(paths)
        self._max_held = None if plan is None else int(plan.get("max_held", 0))
        self._target = "" if plan is None else str(plan.get("upload_to", ""))

    def released(self, doomed: Sequence[Path]) -> list[Path]:
        """Those of the step directories, oldest first, that may be deleted now: the uploaded ones, and the oldest of
        the others beyond `storage.max_held`."""
        if self._max_held is None:
            return list(doomed)
        waiting = [each for each in doomed if not is_uploaded(self._paths, each, self._target)]
        lost = waiting[: max(0, len(waiting) - self._max_held)]
        for each in lost:
            get_logger().warning(
                f"{each} is deleted before it is on S3: {len(waiting)} checkpoints wait, and storage.max_held is "
                f"{self._max_held}"
            )
        return [each for each in doomed if each not in waiting or each in lost]


# The files of a run that are copied.


_UNFINISHED = (PARTIAL, TEMPORARY, DELETED)


def small_files(paths: RunPaths, samples: bool) -> Iterator[Path]:
    """Everything but steps: metrics, logs, configs, receipts, and with `samples` texts of rollouts and pictures."""
    run, evaluation = paths.orchestrator, EvalPaths(paths.root)
    shown = (*run.root.glob(f"{run.samples.name}*"), evaluation.results, paths.pictures) if samples else ()
    trees = (
        *(paths.configs, paths.logs, paths.attempts, paths.traces, paths.slurm),
        *(run.logs, run.ledger, evaluation.settings, evaluation.summary),
        *(paths.status, paths.best_checkpoint, paths.early_end),
        *sorted(paths.root.glob(f"{paths.metrics.stem}*{paths.metrics.suffix}")),
        *sorted(paths.control.glob("*.id")),
        *sorted(paths.control.glob("*.complete")),
        *shown,
    )
    for tree in trees:
        for path in sorted(tree.rglob("*")) if tree.is_dir() else (tree,):
            if path == paths.contact_sheet and not samples:
                continue
            if path.is_file() and not path.is_symlink() and path.suffix not in _UNFINISHED:
                yield path


def step_directories(paths: RunPaths) -> list[Path]:
    """Complete steps, in the order in which they are copied: the newest checkpoint first, exported weights last."""
    run = paths.orchestrator
    # The orchestrator saves every step; only those that the trainer has saved too can be resumed.
    steps = list(reversed(stable_steps(paths.checkpoints)))
    counterparts = set(stable_steps(run.checkpoints))
    found: list[Path] = []
    for step in steps:
        found += [run.checkpoint(step).parent] if step in counterparts else []
        found.append(paths.checkpoint(step))
    return [*found, *(paths.weight(step) for step in reversed(stable_steps(paths.weights)))]


LONGEST_PAUSE_S = 300.0
_LOOK_S, _PAUSE_AT_END_S = 0.1, 5.0
_MD5_BYTES = 1 << 20

Signature = tuple[int, int]
"""Size and time of the last change, in nanoseconds."""


class Uploader:
    """One look uploads everything that is new. A step's marker comes last, so that a step is whole or absent.

    Failures are counted, and `say` gets a line about the first one of a row and about its end.
    """

    def __init__(
        self,
        s3: S3,
        paths: RunPaths,
        name: S3Name,
        samples: bool,
        say: Callable[[str], None],
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`lost` tells why nothing may be uploaded any more: another run writes to the place."""
        self.name = name
        self.root = paths.root
        self.failures = 0
        self.fault: str | None = None
        """Why the last look failed; None if it did not."""
        self.files = 0
        self.size_bytes = 0
        self.stop = threading.Event()
        """Ends an upload that is going on."""
        self._s3 = s3
        self._paths = paths
        self._samples = samples
        self._say = say
        self._lost = lost
        self._done: dict[Path, Signature] = {}
        self._remote: dict[str, S3Object] | None = None
        """Listing of S3 at the start; None before it is known."""
        self._failed_in_a_row = 0
        self._lock = threading.Lock()

    def look(self) -> bool:
        """Upload what is new; returns whether nothing failed."""
        try:
            if (why := self._lost()) is not None:
                raise StorageError(why)
            if self._remote is None:
                self._remote = {path_below(self.name, each): each for each in self._s3.objects(self.name)}
            self._upload([path for path in small_files(self._paths, self._samples) if not self._is_done(path)])
            for directory in step_directories(self._paths):
                if not self._is_uploaded(directory):
                    self._upload_step(directory)
        except FileNotFoundError:
            return True  # a file that the run has deleted meanwhile; the next look sees the rest
        except (StorageError, OSError, UnicodeEncodeError) as error:  # a file's name may be no text
            return self._failed(error)
        if self.fault is not None:
            self._say(f"uploads to {self.name} work again")
        self.fault = None
        return True

    def pending(self) -> list[Path]:
        """Files and step directories that are not on S3 as they are now."""
        small = [path for path in small_files(self._paths, self._samples) if not self._is_done(path)]
        return [*small, *(each for each in step_directories(self._paths) if not self._is_uploaded(each))]

    @property
    def is_over(self) -> bool:
        """Whether no later look can upload anything."""
        return self._lost() is not None

    def pause_s(self, every_s: float) -> float:
        """Seconds until the next look."""
        if self.fault is None:
            return every_s
        return max(every_s, min(every_s * 2.0 ** min(self._failed_in_a_row, 20), LONGEST_PAUSE_S))

    def _failed(self, error: Exception) -> bool:
        if isinstance(error, StorageError) and error.code == STOPPED:
            if (why := self._lost()) is None:
                return False
            error = StorageError(why)
        self._failed_in_a_row = 1 if self.fault is None else self._failed_in_a_row + 1
        fault = one_line(str(error))
        if self.fault is None:
            self._say(f"warning: {fault}; the run goes on, and the upload is tried again")
        self.failures += 1
        self.fault = fault
        return False

    def _upload_step(self, directory: Path) -> None:
        """Upload a step, compare what arrived, and write the marker on both sides."""
        place = self.name.below(self._path_of(directory))
        marker = directory / STABLE
        if self._is_same(marker):
            remote = self._remote or {}
            is_there = all(
                (found := remote.get(self._path_of(path))) is not None and found.size_bytes == path.stat().st_size
                for path in _files(directory)
            )
            if is_there:
                mark_uploaded(self._paths, directory, str(self.name))
                return
        if self._path_of(marker) in (self._remote or {}):
            # Another step of that number, which is about to be replaced.
            self._s3.delete(place.below(STABLE))
            (self._remote or {}).pop(self._path_of(marker))
        files = [path for path in _files(directory) if path != marker]
        self._upload([path for path in files if not self._is_done(path)])
        arrived = {path_below(place, each): each.size_bytes for each in self._s3.objects(place)}
        for path in files:
            if arrived.get(path.relative_to(directory).as_posix()) != path.stat().st_size:
                self._done.pop(path, None)
                raise StorageError(f"{place}: {path.name} was not uploaded completely")
        self._upload([marker])
        mark_uploaded(self._paths, directory, str(self.name))

    def _is_uploaded(self, directory: Path) -> bool:
        return is_uploaded(self._paths, directory, str(self.name))

    def _upload(self, files: Sequence[Path]) -> None:
        signatures = {path: _signature(path) for path in files}

        def note(path: Path) -> None:
            with self._lock:
                self._done[path] = signatures[path]
                self.files += 1
                self.size_bytes += signatures[path][0]

        upload_files(self._s3, [(path, self.name.below(self._path_of(path))) for path in files], note, self.stop)

    def _is_done(self, path: Path) -> bool:
        """Whether S3 has the file as it is now. One that this process did not upload is compared once."""
        try:
            signature = _signature(path)
            if path not in self._done and self._is_same(path):
                self._done[path] = signature
        except FileNotFoundError:
            return True
        return self._done.get(path) == signature

    def _is_same(self, path: Path) -> bool:
        found = (self._remote or {}).get(self._path_of(path))
        size, changed_ns = _signature(path)
        if found is None or found.size_bytes != size:
            return False
        if "-" in found.etag:  # uploaded in parts, and too large to be read again
            return found.modified_s * 1e9 >= changed_ns
        return _md5(path) == found.etag

    def _path_of(self, path: Path) -> str:
        return path.relative_to(self._paths.root).as_posix()


def _signature(path: Path) -> Signature:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


class UploadThread:
    """Looks for what is new every `every_s` seconds, and uploads the rest at the end of a run."""

    def __init__(self, uploader: Uploader, every_s: float) -> None:
        self._uploader = uploader
        self._every_s = every_s
        self._limit_s = 0.0
        self._is_ending, self._is_stopped = threading.Event(), threading.Event()
        # A daemon: it must not keep the launcher alive after an error.
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def finish(self, limit_s: float, asked_to_stop: Callable[[float], bool]) -> None:
        """Return when everything is on S3, or S3 has failed for `limit_s` seconds, or somebody asks to stop.

        Args:
            asked_to_stop: waits at most so many seconds, and returns whether somebody asked.
        """
        self._limit_s = limit_s
        self._is_ending.set()
        while self._thread.is_alive():
            if asked_to_stop(_LOOK_S):
                self.stop()

    def stop(self) -> None:
        """End at once."""
        self._is_ending.set()
        self._is_stopped.set()
        self._uploader.stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._is_ending.wait(self._uploader.pause_s(self._every_s)):
            self._uploader.look()
        failing_since_s: float | None = None
        while not self._is_stopped.wait(_LOOK_S if failing_since_s is None else _PAUSE_AT_END_S):
            if self._uploader.look():
                failing_since_s = None
                if not self._uploader.pending():
                    return
            else:
                failing_since_s = failing_since_s or time.monotonic()
                if self._uploader.is_over or time.monotonic() - failing_since_s >= self._limit_s:
                    return


def summary_of(uploader: Uploader) -> tuple[bool, str]:
    """Whether everything is on S3, and a line for the user: what is missing and how to upload it."""
    missing = uploader.pending()
    failures = f"; {uploader.failures} uploads failed" if uploader.failures else ""
    if not missing:
        done = f"{uploader.files} files, {size_text(uploader.size_bytes)}"
        return True, f"uploaded to {uploader.name}: {done}{failures}"
    shown = one_line(
        ", ".join(path.name if path.is_file() else f"{path.parent.name}/{path.name}" for path in missing[:3])
    )
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    why = uploader.fault or "stopped"
    return False, (
        f"not uploaded to {uploader.name}: {shown}{more} ({why}{failures}); upload the rest with\n"
        f"  medarc_train upload {one_line(shlex.quote(str(uploader.root)))}"
    )

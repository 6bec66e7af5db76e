"""The copy of a run on S3, from the launcher's side: refuse, restore, upload, report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prime_rl.configs.storage import S3Name, StorageConfig
from prime_rl.run.paths import RunPaths
from prime_rl.storage.restoring import RemoteRun, Say
from prime_rl.storage.s3 import S3
from prime_rl.storage.uploader import Uploader, UploadThread, read_plan, summary_of, write_plan
from prime_rl.storage.writers import PlaceLock, Writer
from prime_rl.utils.errors import StorageError, UserError


class RunCopy:
    """Copies one run while it goes on."""

    def __init__(self, s3: S3, name: S3Name, config: StorageConfig, paths: RunPaths, say: Say) -> None:
        self._s3 = s3
        self._name = name
        self._config = config
        self._paths = paths
        self._say = say
        self._lock = PlaceLock(s3, name, Writer.this_process(paths.root, os.environ))

    @classmethod
    def of(cls, config: StorageConfig, paths: RunPaths, say: Say) -> RunCopy | None:
        """None if the run is not copied.

        Raises:
            UserError: boto3 is not installed, or the environment is not usable.
        """
        if config.target is None:
            return None
        try:
            return cls(S3.connect(), config.target, config, paths, say)
        except StorageError as error:
            raise UserError(f"storage.upload_to: {error}") from error

    def restore(self, resume_step: int | None, is_evaluation: bool, dry_run: bool) -> bool:
        """Download what the run continues from, and check that it may be written. Returns whether files have come.

        `resume_step` is a step, -1 (`latest`) or -2 (`auto`); None starts a new run. A dry run only lists.

        Raises:
            UserError: S3 cannot be read or written, or holds another run.
        """
        try:
            remote = RemoteRun(self._s3, self._name, self._paths)
            if dry_run:
                self._refuse_dry_run(remote, resume_step)
                return False
            is_new = resume_step is None and not is_evaluation
            self._refuse_steps(remote, is_new)
            # To write down who writes also shows that the credentials may.
            self._lock.take(self._say)
            try:
                # Another launch may have written until now.
                remote = RemoteRun(self._s3, self._name, self._paths)
                self._refuse_steps(remote, is_new)
                self._remove_parts(remote)
                if is_evaluation:
                    return remote.restore_evaluation(self._say)
                return resume_step is not None and remote.restore(resume_step, self._say)
            except BaseException:
                self._lock.release()
                raise
        except StorageError as error:
            raise UserError(f"storage.upload_to: {error}") from error

    def _refuse_steps(self, remote: RemoteRun, is_new: bool) -> None:
        if is_new and remote.steps:
            raise UserError(
                f"{self._name} holds the checkpoints of another run: choose another output_dir, or continue it "
                "with --resume latest; nothing is deleted on S3"
            )

    def _refuse_dry_run(self, remote: RemoteRun, resume_step: int | None) -> None:
        """A dry run downloads no checkpoint, and so cannot look at the one that a resume would take."""
        step = None if resume_step is None else remote.step_to_fetch(resume_step)
        if step is not None:
            raise UserError(
                f"{self._name} holds step {step}, which a dry run does not download: start without --dry-run to "
                "continue from it"
            )

    def start(self, step: int | None, say: Say) -> tuple[Uploader, UploadThread]:
        """Begin to copy a run that starts at `step`.

        Raises:
            UserError: steps on S3 that the run replaces cannot be removed.
        """
        try:
            if step is not None:
                RemoteRun(self._s3, self._name, self._paths).forget_after(step)
        except StorageError as error:
            raise UserError(f"storage.upload_to: {error}") from error
        write_plan(self._paths, str(self._name), self._config.max_held)
        uploader = Uploader(self._s3, self._paths, self._name, self._config.samples, say, lambda: self._lock.lost)
        self._lock.on_loss = uploader.stop.set
        return uploader, UploadThread(uploader, self._config.upload_every)

    @property
    def final_wait_s(self) -> float:
        return self._config.final_wait

    def end(self) -> None:
        """Let others write to the place."""
        self._lock.release()

    def _remove_parts(self, remote: RemoteRun) -> None:
        """Parts of uploads that were killed cost storage, and no listing shows them.

        Nobody else uploads here now, except runs whose places are below this one.
        """
        if not self._name.key:
            return  # the whole bucket, in which others may upload
        try:
            if count := self._s3.abort_uploads(self._name, remote.places_below):
                self._say(f"{self._name}: removed the parts of {count} uploads that were cut off")
        except StorageError as error:
            self._say(f"warning: parts of uploads that were cut off are not removed: {error}")


@dataclass
class CopiedRun:
    """A run that is going on, and may be copied."""

    say: Say
    """Shows a line about the upload."""
    code: int = 0
    """Exit code of the run."""


@contextlib.contextmanager
def copying(
    copy: RunCopy | None, step: int | None, asked_to_stop: Callable[[float], bool], say: Say
) -> Iterator[CopiedRun]:
    """Copy a run that starts at `step` during the block, and the rest after it. Then the last line says how it went.

    If the run succeeds and the copy is not whole, its exit code becomes 1.

    Args:
        asked_to_stop: waits at most so many seconds, and returns whether somebody asked to end.

    Raises:
        UserError: S3 cannot be written.
    """
    run = CopiedRun(say)
    if copy is None:
        yield run
        return
    try:
        uploader, thread = copy.start(step, lambda line: run.say(line))
    except UserError:
        copy.end()
        raise
    try:
        yield run
        thread.finish(copy.final_wait_s, asked_to_stop)
    finally:
        thread.stop()
        copy.end()
    is_whole, line = summary_of(uploader)
    say(line if is_whole else f"warning: {line}")
    if not is_whole and run.code == 0:
        run.code = 1


def upload_run(paths: RunPaths, target: S3Name | None, samples: bool, say: Say) -> tuple[bool, str]:
    """Upload what is missing of a run; `target` is by default where it was copied before.

    Raises:
        UserError: nothing says where, or S3 cannot be used.
    """
    plan = read_plan(paths)
    name = target or (S3Name.of(str(plan["upload_to"])) if plan and "upload_to" in plan else None)
    if name is None:
        raise UserError(f"{paths.root} was not copied to S3 before: say where with --to s3://BUCKET/PREFIX")
    try:
        s3 = S3.connect()
        lock = PlaceLock(s3, name, Writer.this_process(paths.root, os.environ))
        lock.refuse_if_held()
        lock.take(say)
    except StorageError as error:
        raise UserError(str(error)) from error
    try:
        uploader = Uploader(s3, paths, name, samples, say, lambda: lock.lost)
        lock.on_loss = uploader.stop.set
        uploader.look()
        return summary_of(uploader)
    finally:
        lock.release()

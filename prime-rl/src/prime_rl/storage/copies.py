"""The copy of a run on S3, from the launcher's side: refuse, restore, upload, report."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.storage import S3Name, StorageConfig
from prime_rl.run.checkpoints import SavedSteps
from prime_rl.run.paths import EvalPaths, RunPaths, step_of
from prime_rl.storage.s3 import S3, S3Object
from prime_rl.storage.trees import download_objects, path_below
from prime_rl.storage.uploader import Uploader, UploadThread, read_plan, summary_of, write_plan
from prime_rl.storage.writers import WRITER, PlaceLock, Writer
from prime_rl.utils.contents import STABLE, find_damage
from prime_rl.utils.errors import RunDirError, StorageError, UserError
from prime_rl.utils.files import PARTIAL, begin_directory, fsync_tree, size_text

# A run that comes back from S3, to continue on another machine or to be read there.


Say = Callable[[str], None]


class RemoteRun:
    """Files of a run on S3."""

    def __init__(self, s3: S3, name: S3Name, paths: RunPaths) -> None:
        """`paths` are those of its local directory. Raises StorageError if it cannot be listed."""
        self.name = name
        self._s3 = s3
        self._paths = paths
        self._objects = {path_below(name, each): each for each in s3.objects(name)}

    @property
    def is_empty(self) -> bool:
        return not self._objects

    @property
    def places_below(self) -> list[S3Name]:
        """Places of other runs below this one, whose launches write there."""
        end = f"/{WRITER}"
        return [self.name.below(path.removesuffix(end)) for path in self._objects if path.endswith(end)]

    @property
    def has_evaluation(self) -> bool:
        return self._has(EvalPaths(self._paths.root).settings)

    @property
    def steps(self) -> list[int]:
        """Steps that can be resumed, ascending: whole, and in an RL run with their counterpart."""
        run = self._paths.orchestrator
        trained, counterparts = self._whole(self._paths.checkpoints), self._whole(run.checkpoints)
        return sorted(trained & counterparts if counterparts else trained)

    def restore(self, resume_step: int, say: Say) -> bool:
        """Download the checkpoint to resume from, unless the local directory has it or a newer one; and with it, what
        else the run has written. `resume_step` is a step, -1 (`latest`) or -2 (`auto`). Returns whether it did.

        Raises:
            StorageError: it cannot be downloaded.
        """
        for step in self._steps_to_fetch(resume_step):
            if self._fetch_step(step, say):
                self.fetch_files(self._small(), say)
                return True
        return False

    def step_to_fetch(self, resume_step: int) -> int | None:
        """The step that `restore` would download; None if the local directory has what a resume needs."""
        return next(iter(self._steps_to_fetch(resume_step)), None)

    def _steps_to_fetch(self, resume_step: int) -> list[int]:
        if resume_step >= 0:
            return [resume_step] if resume_step in self.steps and not self._is_here(resume_step) else []
        here = self._newest_here()
        return [step for step in reversed(self.steps) if here is None or step > here]

    def restore_evaluation(self, say: Say) -> bool:
        """Download what an evaluation has written, unless the local directory holds one."""
        if not self.has_evaluation or EvalPaths(self._paths.root).settings.exists():
            return False
        self.fetch_files(self._small(), say)
        return True

    def mirror(self, say: Say) -> None:
        """Download everything but steps, as far as it has changed: what readers of a run need.

        Raises:
            StorageError: it cannot be downloaded.
        """
        places = tuple(f"{self._path_of(each)}/" for each in self._step_parents())
        paths = [path for path in self._objects if not path.startswith((WRITER, *places))]
        if changed := [path for path in paths if self._is_newer(path)]:
            self.fetch_files(changed, say)

    @property
    def is_run(self) -> bool:
        """Whether it has the configs of a run, and is not only some files of one."""
        place = f"{self._path_of(self._paths.configs)}/"
        return any(path.startswith(place) for path in self._objects)

    def fetch_weights(self, steps: Collection[int] | None, say: Say) -> None:
        """Download the weights of some steps, or of all, that are whole on S3 and not here.

        Raises:
            StorageError: they cannot be downloaded.
        """
        for step in sorted(self._whole(self._paths.weights)):
            target = self._paths.weight(step)
            is_missing = (steps is None or step in steps) and self._is_newer(self._path_of(target / STABLE))
            if is_missing and (fault := self._fetch_directory(target, say)):
                say(f"warning: {fault}; these weights on S3 are not used")

    def _is_newer(self, path: str) -> bool:
        file, item = self._paths.root / path, self._objects[path]
        if not file.is_file():
            return True
        found = file.stat()
        return found.st_size != item.size_bytes or found.st_mtime < item.modified_s

    def forget_after(self, step: int) -> None:
        """Remove the markers of later steps, which follow from another course than the one to come."""
        run = self._paths.orchestrator
        for parent in (self._paths.checkpoints, run.checkpoints, self._paths.weights):
            for later in sorted(self._whole(parent)):
                if later > step:
                    marker = parent / f"step_{later}" / STABLE
                    self._s3.delete(self.name.below(self._path_of(marker)))

    def fetch_files(self, paths: Sequence[str], say: Say) -> None:
        """Download files by their path below the run's directory, in place of those that are there."""
        objects = [self._objects[path] for path in paths]
        say(f"{self.name}: downloading {len(objects)} files, {size_text(sum(each.size_bytes for each in objects))}")
        download_objects(self._s3, self.name, objects, self._paths.root)

    def _fetch_step(self, step: int, say: Say) -> bool:
        """Download the checkpoint of a step, and compare it with the hashes in its marker."""
        run = self._paths.orchestrator
        targets = [self._paths.checkpoint(step)]
        targets += [run.checkpoint(step).parent] if self._whole(run.checkpoints) else []
        for target in targets:
            if fault := self._fetch_directory(target, say):
                say(f"warning: {fault}; step {step} on S3 is not used")
                return False
        return True

    def _fetch_directory(self, target: Path, say: Say) -> str | None:
        """Download a step's directory in place of the one that is here. Returns what is damaged, which is not kept."""
        objects = self._below(target)
        size = size_text(sum(each.size_bytes for each in objects))
        say(f"{self.name}: downloading {self._path_of(target)}, {size}")
        scratch = begin_directory(target)
        download_objects(self._s3, self.name.below(self._path_of(target)), objects, scratch)
        if fault := find_damage(scratch):
            shutil.rmtree(scratch)
            return fault.replace(PARTIAL, "")
        fsync_tree(scratch)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
        return None

    def _small(self) -> list[str]:
        """Everything that is in no step. Configs are left out: each launch writes its own."""
        left_out = (self._paths.configs, *self._step_parents())
        kept = (self._path_of(self._paths.best_checkpoint),)
        places = tuple(f"{self._path_of(each)}/" for each in left_out)
        return [path for path in self._objects if path in kept or not path.startswith((WRITER, *places))]

    def _step_parents(self) -> Iterable[Path]:
        return (self._paths.checkpoints, self._paths.weights, self._paths.orchestrator.checkpoints)

    def _newest_here(self) -> int | None:
        try:
            return SavedSteps.of(self._paths).choose(-2).step
        except RunDirError:
            return None

    def _is_here(self, step: int) -> bool:
        return SavedSteps.of(self._paths).fault_of(step) is None

    def _whole(self, parent: Path) -> set[int]:
        """Steps below a directory whose marker is on S3."""
        place = f"{self._path_of(parent)}/"
        found: Iterator[tuple[str, ...]] = (
            tuple(path[len(place) :].split("/")) for path in self._objects if path.startswith(place)
        )
        steps = {step_of(Path(parts[0])) for parts in found if len(parts) == 2 and parts[1] == STABLE}
        return {step for step in steps if step is not None}

    def _below(self, directory: Path) -> list[S3Object]:
        place = f"{self._path_of(directory)}/"
        return [item for path, item in self._objects.items() if path.startswith(place)]

    def _has(self, path: Path) -> bool:
        return self._path_of(path) in self._objects

    def _path_of(self, path: Path) -> str:
        return path.relative_to(self._paths.root).as_posix()


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

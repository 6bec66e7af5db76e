"""The copy of a run on S3, from the launcher's side: lock, refuse, restore, upload, report."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from prime_rl.configs.storage import S3Name, StorageConfig
from prime_rl.run.checkpoints import SavedSteps
from prime_rl.run.paths import EvalPaths, RunPaths, step_of
from prime_rl.storage.s3 import MISSING, S3, S3Object
from prime_rl.storage.trees import download_objects, path_below
from prime_rl.storage.uploader import Uploader, UploadThread, read_plan, summary_of, write_plan
from prime_rl.utils.contents import STABLE, find_damage
from prime_rl.utils.errors import RunDirError, StorageError, UserError, one_line
from prime_rl.utils.files import PARTIAL, begin_directory, fsync_tree, size_text

# Lets one launch at a time write to a place on S3.
#
# `writer.json` there says who does. Its writer renews it every 20 seconds, so that another launch sees whether it
# lives.


WRITER = "writer.json"
BEAT_S = 20.0
STALE_S = 3 * BEAT_S
"""A writer that has been silent for longer was killed."""
_LOOK_S = 2.0
_MAX_PID = 2**22
"""The largest process id that Linux allows."""
_CHANGED = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")
"""S3's words for: another one has written meanwhile."""
_BOOT, _PIDS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class Writer:
    """Writer to a place. Launches of older versions wrote less."""

    host: str
    pid: int
    since: str
    directory: str = ""
    token: str = ""
    """Differs between launches."""
    boot: str = ""
    """Differs between starts of a machine, between machines of one name, and between containers: a process id means
    something only where it is the same."""
    slurm_job: str | None = None
    slurm_start: str = ""
    """Number of times that Slurm has requeued the job."""
    beats: int = 0
    ended: bool = True
    """Nobody writes any more."""

    @classmethod
    def this_process(cls, directory: Path, env: Mapping[str, str]) -> Writer:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=now,
            directory=str(directory),
            token=uuid4().hex,
            boot=_boot(),
            slurm_job=env.get("SLURM_JOB_ID"),
            slurm_start=env.get("SLURM_RESTART_COUNT", "0"),
            ended=False,
        )

    @classmethod
    def parse(cls, data: bytes) -> Writer | None:
        """None if the object is damaged, or of another kind."""
        try:
            table = json.loads(data)
            writer = cls(**{name: table[name] for name in cls.__slots__ if name in table})
        except (ValueError, TypeError, RecursionError):
            return None
        texts = (writer.host, writer.since, writer.directory, writer.token, writer.boot, writer.slurm_start)
        is_sound = all(isinstance(text, str) for text in texts) and isinstance(writer.slurm_job, str | None)
        return writer if is_sound and isinstance(writer.pid, int) and 0 < writer.pid <= _MAX_PID else None

    def is_gone_for(self, other: Writer) -> bool:
        """Whether `other` knows, without waiting, that this one no longer writes."""
        is_same_job = self.slurm_job is not None and self.slurm_job == other.slurm_job
        if self.ended or (is_same_job and self.slurm_start != other.slurm_start):
            return True  # a job that Slurm requeues runs once at a time, but may hold several launches
        if (self.host, self.boot) != (other.host, other.boot):
            return False
        return self.pid == other.pid or not _is_alive(self.pid)

    def __str__(self) -> str:
        job = f" (Slurm job {self.slurm_job})" if self.slurm_job else ""
        return one_line(f"process {self.pid} on {self.host}{job} since {self.since}")


class PlaceLock:
    """Held by the launch that copies its run to a place."""

    def __init__(self, s3: S3, place: S3Name, me: Writer, pause: Callable[[float], object] = time.sleep) -> None:
        self.place = place
        self.lost: str | None = None
        """Message about the other writer, once there is one; None as long as the place is ours."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called once when the place is lost, in the thread that sees it."""
        self._s3 = s3
        self._name = place.below(WRITER)
        self._me = me
        self._pause = pause
        self._etag: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="writer of a place on S3", daemon=True)

    def take(self, say: Say) -> None:
        """Write down who writes, and go on doing so in a thread.

        Raises:
            StorageError: another launch does.
            StorageError: S3 cannot be read or written.
        """
        last, etag, silent_s = self._read()
        if last is not None and not last.is_gone_for(self._me) and silent_s <= STALE_S:
            etag = self._await_silence(last, etag, say)
        try:
            # In place of what was judged, so that of two that wait for the same silence one is refused.
            self._write(etag)
        except StorageError as error:
            if error.code not in _CHANGED:
                raise
            now, self._etag, _ = self._read()
            if now is None or now.token != self._me.token:  # else it is ours: the first answer was lost
                raise self._in_use(now) from error
        self._thread.start()

    def refuse_if_held(self) -> None:
        """Raise StorageError if a launch writes there, or was killed on another machine within the last minute."""
        last, _, silent_s = self._read()
        if last is not None and not last.is_gone_for(self._me) and silent_s < STALE_S:
            raise self._in_use(last)

    def release(self) -> None:
        """Write down that nobody writes any more. Errors of S3 are of no consequence."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._etag is not None and self.lost is None:
            self._me = replace(self._me, ended=True)
            self.renew()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S) and self.lost is None:
            self._me = replace(self._me, beats=self._me.beats + 1)
            self.renew()

    def renew(self) -> None:
        """Show that this launch lives, and see whether another one has taken the place."""
        try:
            self._write(self._etag)
        except StorageError as error:
            if error.code in _CHANGED:
                self.lost = self._who_took_it()
                if self.lost is not None:
                    self.on_loss()
            elif error.code in MISSING:  # somebody has deleted it: the next beat writes it again
                self._etag = None
            # Otherwise S3 does not answer for now; the uploads report that.

    def _who_took_it(self) -> str | None:
        """None if it is still ours: the answer to an earlier write was lost."""
        try:
            other, etag, _ = self._read()
        except StorageError:
            return None
        if other is not None and other.token == self._me.token:
            self._etag = etag
            return None
        return f"{self.place} is written by {other or 'another launch'} now, and no longer by this one"

    def _await_silence(self, last: Writer, first_etag: str | None, say: Say) -> str | None:
        """Return once the last writer can no longer be alive, with the ETag of what it left.

        Only changes count: clocks may differ.
        """
        say(f"{self.place} was left by {last}: waiting {STALE_S:.0f} s to see whether it still writes")
        for _ in range(int(STALE_S / _LOOK_S)):
            self._pause(_LOOK_S)
            now, etag, _ = self._read()
            if now is None or now.is_gone_for(self._me):
                return etag
            if etag != first_etag:
                raise self._in_use(now)
        return first_etag

    def _in_use(self, writer: Writer | None) -> StorageError:
        where = f", from {one_line(writer.directory)}" if writer is not None and writer.directory else ""
        return StorageError(
            f"{self.place} is in use by {writer or 'another launch'}{where}: wait or stop it, or choose another place"
        )

    def _read(self) -> tuple[Writer | None, str | None, float]:
        """Last writer, the object's ETag, and its age in seconds by S3's clock."""
        found = self._s3.read_if_there(self._name)
        return (None, None, 0.0) if found is None else (Writer.parse(found.data), found.etag, found.age_s)

    def _write(self, etag: str | None) -> None:
        self._etag = self._s3.write_over(json.dumps(asdict(self._me)).encode(), self._name, etag)


def _boot() -> str:
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()} {_PIDS.readlink()}"
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


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
        return self._path_of(EvalPaths(self._paths.root).settings) in self._objects

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

"""Lets one launch at a time write to a place on S3.

`writer.json` there says who does. Its writer renews it every 20 seconds, so that another launch sees whether it lives.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from prime_rl.configs.storage import S3Name
from prime_rl.storage.s3 import MISSING, S3
from prime_rl.utils.errors import StorageError, one_line

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

Say = Callable[[str], None]


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
            # Otherwise S3 is away for now, which the uploads tell.

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

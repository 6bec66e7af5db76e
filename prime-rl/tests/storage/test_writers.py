"""One launch at a time writes to a place on S3, and is known by name; parts of killed uploads are removed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock

import pytest
from s3_server import Handler, Proxy, failing, only

from prime_rl.configs.storage import StorageConfig
from prime_rl.run.paths import RunPaths
from prime_rl.storage import S3, S3Name
from prime_rl.storage.copies import STALE_S, WRITER, PlaceLock, RunCopy, Writer, copying, upload_run
from prime_rl.storage.uploader import Uploader, UploadThread, summary_of
from prime_rl.utils.errors import StorageError, UserError
from prime_rl.utils.files import STABLE

HERE = Writer.this_process(Path("/runs/here"), {})
ELSEWHERE = replace(HERE, host="node7", boot="another", token="another", directory="/runs/there")


@pytest.fixture
def place(bucket: str) -> S3Name:
    return S3Name(bucket, "runs/one")


def written(s3: S3, place: S3Name) -> Writer:
    found = Writer.parse(s3.read(place.below(WRITER)))
    assert found is not None
    return found


def note(s3: S3, place: S3Name, writer: Writer) -> None:
    s3.write(json.dumps(asdict(writer)).encode(), place.below(WRITER))


def test_a_place_is_taken_and_released(s3: S3, place: S3Name) -> None:
    lock = PlaceLock(s3, place, HERE)
    lock.take(pytest.fail)
    assert (written(s3, place).token, written(s3, place).ended) == (HERE.token, False)
    with pytest.raises(StorageError, match=f"{place} is in use by process {HERE.pid} on .*, from /runs/here: wait"):
        PlaceLock(s3, place, replace(ELSEWHERE, token="third")).refuse_if_held()
    lock.release()
    assert written(s3, place).ended
    PlaceLock(s3, place, ELSEWHERE).refuse_if_held()
    PlaceLock(s3, place, ELSEWHERE, pause=pytest.fail).take(pytest.fail)


def test_a_second_run_is_refused_by_name_while_the_first_one_lives(s3: S3, place: S3Name) -> None:
    note(s3, place, ELSEWHERE)
    lines: list[str] = []

    def beat(seconds: float) -> None:
        note(s3, place, replace(ELSEWHERE, beats=1))

    with pytest.raises(StorageError, match=r"in use by process \d+ on node7 since .*, from /runs/there"):
        PlaceLock(s3, place, HERE, pause=beat).take(lines.append)
    (line,) = lines
    assert line.endswith(f"waiting {STALE_S:.0f} s to see whether it still writes")
    assert written(s3, place).token == "another"


def test_a_launch_that_was_killed_elsewhere_is_waited_for_and_followed(s3: S3, place: S3Name) -> None:
    note(s3, place, ELSEWHERE)
    waited: list[float] = []
    lock = PlaceLock(s3, place, HERE, pause=waited.append)
    lock.take(print)
    assert sum(waited) == STALE_S
    assert written(s3, place).token == HERE.token
    lock.release()


def test_a_launch_that_was_killed_here_or_requeued_is_followed_at_once(s3: S3, place: S3Name) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    older = {"host": "node7", "pid": 1, "since": "then", "directory": "/runs/there"}
    for last in (replace(HERE, pid=gone.pid), replace(ELSEWHERE, slurm_job="17", slurm_start="0")):
        note(s3, place, last)
        lock = PlaceLock(s3, place, replace(HERE, slurm_job="17", slurm_start="1"), pause=pytest.fail)
        lock.take(pytest.fail)
        assert written(s3, place).token == HERE.token
        lock.release()
    for data in (b"{", b"[]", b'{"host": "x", "pid": "y", "since": ""}', json.dumps(older).encode()):
        s3.write(data, place.below(WRITER))
        lock = PlaceLock(s3, place, HERE, pause=pytest.fail)
        lock.take(pytest.fail)
        assert written(s3, place).token == HERE.token
        lock.release()


def test_a_second_launch_of_the_same_slurm_job_or_in_another_container_is_no_successor() -> None:
    me = Writer.this_process(Path("/runs/here"), {"SLURM_JOB_ID": "17"})
    other = replace(me, host="node7", boot="another", token="another")
    assert not other.is_gone_for(me)
    assert other.is_gone_for(replace(me, slurm_start="1"))
    container = replace(me, boot=f"{me.boot.split()[0]} pid:[1]")
    assert not container.is_gone_for(me)


def test_of_two_that_begin_at_once_one_is_refused(s3: S3, place: S3Name, proxy: Proxy) -> None:
    proxy.disturb(only("PUT", WRITER, failing(412, "PreconditionFailed")))
    with pytest.raises(StorageError, match="is in use by another launch: wait"):
        PlaceLock(s3, place, HERE).take(print)
    first, second = S3Name(place.bucket, "a"), S3Name(place.bucket, "b")
    etag = s3.write_over(b"1", first, None)
    for name, expected in ((first, None), (first, "0" * 32), (second, etag)):
        with pytest.raises(Exception, match=r"changed since|no such object"):
            s3.write_over(b"2", name, expected)
    assert s3.read(first) == b"1"
    proxy.disturb(only("PUT", "/c", failing(501, "NotImplemented")))
    s3.write_over(b"3", S3Name(place.bucket, "c"), None)
    assert s3.read(S3Name(place.bucket, "c")) == b"3", "a server without conditions"


def test_of_two_that_wait_for_the_same_silence_one_is_refused(s3: S3, place: S3Name) -> None:
    note(s3, place, ELSEWHERE)
    waited: list[float] = []
    first = PlaceLock(s3, place, replace(ELSEWHERE, host="node8", token="first"), pause=waited.append)

    class TakenBefore(S3):
        """The other one takes the place after the last look."""

        def write_over(self, data: bytes, name: S3Name, etag: str | None) -> str:
            first.take(print)
            return super().write_over(data, name, etag)

    with pytest.raises(StorageError, match=r"in use by process .* on node8"):
        PlaceLock(TakenBefore(s3.client), place, HERE, pause=waited.append).take(print)
    assert (written(s3, place).token, sum(waited)) == ("first", 2 * STALE_S)
    first.release()


def test_a_writer_knows_its_own_word(s3: S3, place: S3Name) -> None:
    class SendingTwice(S3):
        """The answer to the first request is lost, and the client sends it again."""

        def write_over(self, data: bytes, name: S3Name, etag: str | None) -> str:
            super().write_over(data, name, etag)
            return super().write_over(data, name, etag)

    lock = PlaceLock(SendingTwice(s3.client), place, HERE)
    lock.take(pytest.fail)
    lock.renew()
    assert (written(s3, place).token, lock.lost) == (HERE.token, None)
    lock.release()
    assert written(s3, place).ended


def test_a_writer_whose_word_was_deleted_writes_it_again(s3: S3, place: S3Name) -> None:
    lock = PlaceLock(s3, place, HERE)
    lock.take(pytest.fail)
    s3.delete(place.below(WRITER))
    lock.renew()
    lock.renew()
    assert (written(s3, place).token, lock.lost) == (HERE.token, None)
    lock.release()


def test_a_run_whose_place_was_taken_uploads_nothing_more_and_says_who_did(
    s3: S3, place: S3Name, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.metrics.write_text("{}\n")
    lock = PlaceLock(s3, place, HERE)
    lock.take(print)
    note(s3, place, ELSEWHERE)
    lock.renew()
    uploader = Uploader(s3, paths, place, True, lambda line: None, lambda: lock.lost)
    UploadThread(uploader, every_s=1000).finish(limit_s=10**6, asked_to_stop=lambda timeout_s: False)
    is_whole, line = summary_of(uploader)
    assert not is_whole
    assert f"{place} is written by process {ELSEWHERE.pid} on node7" in line
    assert "metrics.jsonl" not in {each.name.key.rpartition("/")[2] for each in s3.objects(place)}
    lock.release()
    assert not written(s3, place).ended, "the other one still writes"


def test_a_place_that_is_taken_during_a_long_upload_ends_it(
    s3: S3, proxy: Proxy, place: S3Name, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    with paths.metrics.open("wb") as file:
        file.truncate(30 << 20)
    small_parts = S3(s3.client, part_bytes=5 << 20)
    lock, taking = PlaceLock(s3, place, HERE), Lock()
    lock.take(print)
    uploader = Uploader(small_parts, paths, place, True, lambda line: None, lambda: lock.lost)
    lock.on_loss = uploader.stop.set

    def take_the_place(handler: Handler) -> bool:
        """No part arrives before the writer knows."""
        with taking:
            if lock.lost is None:
                note(s3, place, ELSEWHERE)
                lock.renew()
        return False

    proxy.disturb(only("PUT", "partNumber=", take_the_place), times=100)
    assert not uploader.look()
    assert uploader.fault is not None
    assert "is written by process" in uploader.fault
    assert "metrics.jsonl" not in {each.name.key.rpartition("/")[2] for each in s3.objects(place)}
    assert "Uploads" not in s3.client.list_multipart_uploads(Bucket=place.bucket)
    lock.release()


def test_what_another_launch_wrote_before_the_place_was_taken_is_seen(
    s3: S3, proxy: Proxy, place: S3Name, tmp_path: Path
) -> None:
    def write_a_step(handler: Handler) -> bool:
        s3.write(b"{}", place.below(f"checkpoints/step_2/{STABLE}"))
        return False

    proxy.disturb(only("PUT", WRITER, write_a_step))
    copy = RunCopy.of(StorageConfig(upload_to=str(place)), RunPaths(tmp_path / "run"), print)
    assert copy is not None
    with pytest.raises(UserError, match="holds the checkpoints of another run"):
        copy.restore(None, is_evaluation=False, dry_run=False)
    assert written(s3, place).ended


def test_a_copied_run_holds_its_place_and_removes_parts_of_killed_uploads(
    s3: S3, proxy: Proxy, place: S3Name, tmp_path: Path
) -> None:
    begun = {"Bucket": place.bucket, "Key": place.below("checkpoints/step_2/trainer/rank_0.pt").key}
    upload = s3.client.create_multipart_upload(**begun)["UploadId"]
    s3.client.upload_part(**begun, UploadId=upload, PartNumber=1, Body=b"half")
    nested = place.below("nested")
    note(s3, nested, ELSEWHERE)
    for key in ("runs/one-more/x", nested.below("x").key):
        s3.client.create_multipart_upload(Bucket=place.bucket, Key=key)
    paths, lines = RunPaths(tmp_path / "run"), []
    paths.root.mkdir()
    copy = RunCopy.of(StorageConfig(upload_to=str(place)), paths, lines.append)
    assert copy is not None
    copy.restore(None, is_evaluation=False, dry_run=False)
    assert lines == [f"{place}: removed the parts of 1 uploads that were cut off"]
    left = s3.client.list_multipart_uploads(Bucket=place.bucket)["Uploads"]
    assert sorted(each["Key"] for each in left) == ["runs/one-more/x", "runs/one/nested/x"]
    with copying(copy, None, lambda timeout_s: False, print):
        assert not written(s3, place).ended
    assert written(s3, place).ended
    note(s3, place, ELSEWHERE)
    with pytest.raises(UserError, match="in use by process"):
        upload_run(paths, place, True, print)
    proxy.disturb(only("GET", "?uploads", failing(403, "AccessDenied")))
    s3.delete(place.below(WRITER))
    other = RunCopy.of(StorageConfig(upload_to=str(place)), paths, lines.append)
    assert other is not None
    other.restore(None, is_evaluation=False, dry_run=False)
    assert "lack the right s3:ListBucketMultipartUploads" in lines[-1]
    other.end()


def test_names_of_missing_files_reach_no_terminal_as_they_are(
    s3: S3, proxy: Proxy, place: S3Name, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.logs.mkdir(parents=True)
    (paths.logs / "a\x1b[2Jb\n.log").write_text("x")
    uploader = Uploader(s3, paths, place, True, print)
    is_whole, line = summary_of(uploader)
    assert not is_whole
    assert line.startswith(f"not uploaded to {place}: a\\x1b[2Jb .log (stopped); upload the rest with\n")


@pytest.mark.parametrize(
    "wrong",
    [{"pid": 10**20}, {"pid": "5"}, {"directory": 5}, {"since": None}, {"slurm_job": 7}, {"token": []}],
    ids=repr,
)
def test_what_cannot_be_a_writer_is_damaged(wrong: dict[str, object]) -> None:
    whole = {"host": "a", "pid": 5, "since": "2026-01-01T00:00:00+00:00"}
    assert Writer.parse(json.dumps(whole).encode()) is not None
    assert Writer.parse(json.dumps({**whole, **wrong}).encode()) is None

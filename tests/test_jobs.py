"""The job log and `medarc_jobs`: what is kept of a job, what is hidden, and what becomes of damaged files."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl import medarc_jobs
from medarc_rl.backends import protocol
from medarc_rl.errors import MedarcError
from medarc_rl.jobs import HIDDEN, JobLog, JobRecord, Status, circumstances, follow_file, redacted, redacted_argv


def a_job(name: str = "rt", backend: str = "told", **values: object) -> JobRecord:
    texts = {"id": f"{name}-7", "kind": "rl", "config": "rt.toml", "output": "/runs/rt"}
    return JobRecord(**{"name": name, "backend": backend, **texts, **circumstances("medarc_submit"), **values})


class Told:
    """A back-end that says what the test tells it."""

    statuses: Iterator[Status]
    cancelled: list[str]

    def status(self, record: JobRecord) -> Status:
        found = next(Told.statuses)
        if found.detail == "silent":
            raise MedarcError("no answer")
        return found

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        return iter(["step 1", "\x1b[31m\tloss\x1b[0m \x07 2", "step 3"])

    def cancel(self, record: JobRecord) -> None:
        Told.cancelled.append(record.id)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> JobLog:
    Told.statuses, Told.cancelled = iter(()), []
    monkeypatch.setitem(protocol._CLASSES, "told", f"{__name__}:Told")
    return JobLog.of_user()


def jobs(*words: str) -> Result:
    return CliRunner().invoke(medarc_jobs.app, list(words))


def test_a_record_is_one_private_file_that_reads_back_equal(log: JobLog) -> None:
    record = a_job(details={"namespace": "ml"})
    file = log.save(record)
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
    assert log.read() == ([record], [])
    ended = record.with_end(Status("failed", "exit code 1"))
    assert log.save(ended) == file
    assert log.read() == ([ended], [])
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "damaged"),
        (b'{"format": 1, "key": "a', "damaged"),
        (b"\xff\x00", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"[]", "not a job record of this version"),
        (b'{"format": 2}', "not a job record of this version"),
        (b'{"format": 1, "key": 7}', "key is missing or of another type"),
        (b" " * (1 << 20) + b"{}", "larger than 1 MiB"),
    ],
    ids=repr,
)
def test_a_damaged_file_is_named_and_left_out(content: bytes, fault: str, log: JobLog) -> None:
    record = a_job()
    file = log.save(record).with_name("20260101000000-dead.json")
    file.write_bytes(content)
    (file.parent / "link.json").symlink_to("/etc/passwd")
    os.mkfifo(file.parent / "pipe.json")
    (file.parent / "folder.json").mkdir()
    records, faults = log.read()
    assert records == [record]
    assert f"{file.name} in the job log is left out: {fault}" in faults
    assert len(faults) == 4
    assert jobs("list", "--no-ask").exit_code == 0


def test_a_job_that_another_process_cancels_is_cancelled_for_one_that_waits(log: JobLog) -> None:
    record = a_job()
    log.save(record)

    def cancelled_meanwhile() -> Iterator[Status]:
        Told.statuses = iter([Status("running")])
        assert jobs("cancel", record.key).exit_code == 0
        yield Status("unknown")

    Told.statuses = chain([Status("running")], cancelled_meanwhile())
    result = jobs("wait", record.key, "--interval", "0.1")
    assert (result.exit_code, Told.cancelled) == (3, [record.id]), result.output
    assert log.latest(record).cancelled
    assert log.latest(record).last_status == Status("cancelled")


def test_an_end_that_cannot_be_recorded_is_told_all_the_same(log: JobLog) -> None:
    log.save(a_job())
    log.directory.chmod(0o755)
    Told.statuses = iter([Status("failed", "exit code 7")])
    result = jobs("wait", "rt")
    assert (result.exit_code, result.stdout) == (1, "rt (rt-7): failed: exit code 7\n")
    assert result.stderr.startswith("warning: the job log cannot be written: ")


def test_a_log_that_is_no_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MedarcError, match="Is a directory"):
        list(follow_file(tmp_path, lambda: True))


def test_submissions_at_once_all_arrive(log: JobLog) -> None:
    code = (
        "from medarc_rl.jobs import JobLog, JobRecord, circumstances\n"
        "for n in range(10):\n"
        "    JobLog.of_user().save(JobRecord(name='n', backend='ray', id=str(n), kind='sft', config='', output='',"
        " **circumstances('x')))"
    )
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [each.wait() for each in started] == [0, 0, 0]
    records, faults = log.read()
    assert (len(records), len({record.key for record in records}), faults) == (30, 30, [])


def test_a_log_that_others_can_enter_is_refused(log: JobLog) -> None:
    log.save(a_job())
    log.directory.chmod(0o755)
    with pytest.raises(MedarcError, match="can be entered by other users: run `chmod 700"):
        log.save(a_job())


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (["--wandb.api-key", "abc"], ["--wandb.api-key", HIDDEN]),
        (["--wandb.api_key=abc"], [f"--wandb.api_key={HIDDEN}"]),
        (["--client.headers", '{"X": "y"}'], ["--client.headers", HIDDEN]),
        (["--password", "-x"], ["--password", HIDDEN]),
        (["--env", "MY_TOKEN=abc"], ["--env", f"MY_TOKEN={HIDDEN}"]),
        (["--env=MY_TOKEN=abc"], [f"--env=MY_TOKEN={HIDDEN}"]),
        (["--max-tokens", "512"], ["--max-tokens", "512"]),
        (["--auto-auth", "rt.toml"], ["--auto-auth", "rt.toml"]),
        (["--secret-env", "HF_TOKEN=hub/token"], ["--secret-env", "HF_TOKEN=hub/token"]),
        (["--url", "https://me:pw@host/x?a=1&token=abc"], ["--url", f"https://{HIDDEN}@host/x?a=1&token={HIDDEN}"]),
        (["--name", "hf_abcdefghijklmnopqrstuv"], ["--name", HIDDEN]),
        (["--note", "is s3cr3t-value here"], ["--note", f"is {HIDDEN} here"]),
        (["--x", "Authorization: Bearer abc"], ["--x", f"Authorization: Bearer {HIDDEN}"]),
    ],
    ids=str,
)
def test_secrets_of_a_command_line_are_hidden(words: list[str], hidden: list[str]) -> None:
    assert redacted_argv(words, {"SOME_API_KEY": "s3cr3t-value", "HOME": "/root"}) == hidden


def test_short_values_and_paths_of_variables_hide_nothing() -> None:
    env = {"MY_KEY": "a", "SSH_AUTH_SOCK": "/tmp/agent.sock"}
    assert redacted("a banana in /tmp/agent.sock", env) == "a banana in /tmp/agent.sock"


def test_a_job_is_found_by_key_id_name_or_as_the_last(log: JobLog) -> None:
    old = a_job("rt", submitted="2026-01-01T00:00:00+00:00", id="8")
    new = a_job("rt", submitted="2026-01-02T00:00:00+00:00", id="9")
    log.save(new)
    log.save(old)
    assert [log.find(name) for name in (old.key, "8", "rt", "last")] == [old, old, new, new]
    result = jobs("status", "nothing")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: 'nothing': no such job in the job log; `medarc_jobs list` shows names, keys and ids\n",
    )


def test_a_list_of_one_back_end_does_not_say_that_there_are_no_jobs(log: JobLog) -> None:
    log.save(a_job())
    assert jobs("list", "--to", "ray").output == "no jobs of ray\n"
    misspelled = jobs("list", "--to", "slrum")
    assert (misspelled.exit_code, misspelled.stdout) == (2, "")
    assert "'slrum' is not one of 'slurm', 'kubernetes', 'ray', 'sagemaker'" in misspelled.stderr


def test_the_list_asks_only_for_jobs_that_may_still_run(log: JobLog) -> None:
    Told.statuses = iter([Status("running", "on n1")])
    log.save(a_job("done", submitted="2026-01-01T00:00:00+00:00").with_end(Status("succeeded")))
    log.save(a_job("on\x1b[2J", submitted="2026-01-02T00:00:00+00:00"))
    result = jobs("list", "--json")
    assert [(each["name"], each["state"]) for each in json.loads(result.stdout)] == [
        ("on\x1b[2J", "running"),
        ("done", "succeeded"),
    ]
    shown = jobs("list", "--no-ask").stdout
    assert "\x1b" not in shown
    assert [line.split()[4] for line in shown.splitlines()] == ["state", "unknown", "succeeded"]


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ([Status("queued"), Status("running"), Status("succeeded")], 0),
        ([Status("failed", "exit code 1")], 1),
        ([Status("cancelled")], 3),
        ([Status("unknown", "forgotten")], 4),
        ([Status("unknown", "silent"), Status("succeeded")], 0),
        ([Status("unknown", "silent")] * 10, 1),
    ],
)
def test_wait_exits_with_the_jobs_result(told: list[Status], code: int, log: JobLog) -> None:
    Told.statuses = iter(told)
    log.save(a_job())
    result = jobs("wait", "last", "--interval", "0.1")
    assert (result.exit_code, result.exception is None or isinstance(result.exception, SystemExit)) == (code, True)
    assert next(Told.statuses, None) is None
    # The end was recorded: nobody is asked a second time.
    if code in (0, 3):
        assert jobs("wait", "last").exit_code == code


def test_a_back_end_that_stays_silent_ends_a_wait_though_another_answers(log: JobLog) -> None:
    for name in ("loud", "mute"):
        log.save(a_job(name))
    Told.statuses = chain.from_iterable(repeat([Status("running"), Status("unknown", "silent")], 10))
    result = jobs("wait", "loud", "mute", "--interval", "0.1")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "error: no answer")


def test_wait_ends_after_its_timeout_and_the_job_goes_on(log: JobLog) -> None:
    Told.statuses = iter([Status("running")])
    log.save(a_job())
    assert jobs("wait", "last", "--timeout", "0").exit_code == 124
    assert Told.cancelled == []


def test_only_jobs_that_have_not_ended_are_cancelled(log: JobLog) -> None:
    Told.statuses = iter([Status("running")])
    log.save(a_job("first").with_end(Status("failed")))
    log.save(a_job("second"))
    result = jobs("cancel", "first", "second")
    assert (result.exit_code, Told.cancelled) == (1, ["second-7"])
    assert result.stderr == "error: first (first-7) has ended already: failed\n"


@pytest.mark.parametrize(
    ("words", "answer", "cancelled"), [((), "n", False), ((), "", False), ((), "y", True), (("--yes",), "", True)]
)
def test_on_a_terminal_cancel_names_the_job_and_asks(
    words: tuple[str, ...],
    answer: str,
    cancelled: bool,
    log: JobLog,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Told.statuses = iter([Status("running")])
    log.save(a_job("first"))
    ours, theirs = os.openpty()
    os.write(ours, f"{answer}\n".encode())
    with os.fdopen(theirs, encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        code = medarc_jobs.app(["cancel", "last", *words], standalone_mode=False)
    os.close(ours)
    asked = capsys.readouterr().err
    assert (code, Told.cancelled) == ((0, ["first-7"]) if cancelled else (1, []))
    assert ("first-7" in asked and asked.endswith("[y/N] ")) == (not words)


def test_log_lines_cannot_act_on_a_terminal(log: JobLog) -> None:
    log.save(a_job())
    assert jobs("logs", "last").stdout == "step 1\n    loss ? 2\nstep 3\n"
    assert jobs("logs", "last", "--tail", "1").stdout == "step 3\n"
    assert jobs("logs", "last", "--tail", "1", "-f").exit_code == 2


def test_following_reads_what_is_added_and_what_replaces_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.log"

    def write_begun(seconds: float) -> None:
        file.write_text("one\ntw")

    def write_rest(seconds: float) -> None:
        with file.open("a") as adding:
            adding.write("o\n")

    def replace_it(seconds: float) -> None:
        file.write_text("A")

    pauses = chain([write_begun, write_rest, replace_it], repeat(lambda seconds: None))
    lines = follow_file(
        file, lambda: file.exists() and file.read_text() == "A", pause=lambda seconds: next(pauses)(seconds)
    )
    assert list(lines) == ["one", "two", "A"]


def test_a_file_of_any_size_is_read_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "job.log"
    file.write_bytes(b"x" * 3_000_000 + b"\n" + b"\xff line\n" * 20_000 + b"end")
    lines = list(follow_file(file, lambda: True))
    assert sum(map(len, lines[:-20_001])) == 3_000_000
    assert (set(lines[-20_001:-1]), lines[-1]) == ({"\ufffd line"}, "end")
    assert list(follow_file(tmp_path / "missing.log", lambda: True)) == []


def test_a_job_of_another_versions_back_end_is_one_line(log: JobLog) -> None:
    log.save(a_job(backend="mainframe"))
    result = jobs("status", "last")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "known back-ends are" in result.stderr

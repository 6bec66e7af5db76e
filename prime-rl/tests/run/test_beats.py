"""What a process says of its progress, as the launcher reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prime_rl.run.process import (
    HEARTBEAT_VARIABLE,
    SERVERS_VARIABLE,
    Heartbeat,
    HeartbeatWriter,
    clear_heartbeats,
    helper_heartbeat_env,
    own_beats,
    read_heartbeats,
)
from prime_rl.utils.terminal import cut_inside


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "control" / "trainer.beat"
    clear_heartbeats(file)
    return file


def last(file: Path) -> Heartbeat:
    return next(read_heartbeats(file))


def test_a_process_that_has_said_nothing_has_no_beat(file: Path) -> None:
    assert list(read_heartbeats(file)) == []
    HeartbeatWriter(file)
    assert list(read_heartbeats(file)) == []


def test_a_beat_says_what_the_process_does_and_for_whom_it_waits(file: Path) -> None:
    beats = HeartbeatWriter(file)
    beats.say("step 3: waiting for a batch, and these are many words", waits_for="orchestrator")
    beat = last(file)
    assert (beat.doing[:7], beat.waits_for, beat.is_started) == ("step 3:", "orchestrator", False)
    assert beat.pids == [os.getpid()]
    beats.say("step 3")
    assert (last(file).doing, last(file).waits_for) == ("step 3", None)
    assert last(file).count == beat.count + 1


def test_saying_the_same_again_is_no_progress(file: Path) -> None:
    beats = HeartbeatWriter(file)
    for _ in range(3):
        beats.say("waiting")
    assert last(file).count == 1


def test_ticks_are_progress_but_not_written_more_than_once_a_second(file: Path) -> None:
    clock_s = [100.0]
    beats = HeartbeatWriter(file, clock=lambda: clock_s[0])
    beats.say("generating")
    for clock_s[0] in (100.0, 100.5, 101.0, 101.5, 102.0):
        beats.tick()
    assert last(file).count == 3


def test_a_process_waits_for_the_engine_as_long_as_one_call_is_in_flight(file: Path) -> None:
    beats = HeartbeatWriter(file)
    beats.say("collecting")
    with beats.calling("inference"), beats.calling("inference"):
        assert last(file).waits_for == "inference"
        beats.say("collecting", waits_for="trainer")
        assert last(file).waits_for == "trainer"
        beats.say("collecting")
    assert last(file).waits_for is None


def test_of_several_servers_a_process_waits_for_the_one_that_it_has_called_for_the_longest_time(file: Path) -> None:
    beats = HeartbeatWriter(file)
    with beats.calling("inference"), beats.calling("inference_1"), beats.calling("inference"):
        assert last(file).waits_for == "inference"
    with beats.calling("inference_1"):
        with beats.calling("inference"):
            assert last(file).waits_for == "inference_1"
        assert last(file).waits_for == "inference_1"


def test_a_server_has_the_name_that_the_launcher_gave_it() -> None:
    code = (
        "from prime_rl.run.process import server_name; print(server_name('http://b:1/v1/'), server_name('http://c/v1'))"
    )
    names = {"http://a:1/v1": "inference", "http://b:1/v1": "inference_1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, SERVERS_VARIABLE: json.dumps(names)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "inference_1 inference\n"


def test_a_start_is_over_once(file: Path) -> None:
    beats = HeartbeatWriter(file)
    beats.started()
    beats.started()
    assert (last(file).is_started, last(file).count) == (True, 1)


@pytest.mark.parametrize("words", ["é" * 5000, "line\nbreak", '"quoted" \\ \x00', ""])
def test_any_words_can_be_read_back(file: Path, words: str) -> None:
    beats = HeartbeatWriter(file)
    beats.say("x" * 300)
    beats.say(words)
    assert last(file).doing == cut_inside(words, 300)


def test_a_damaged_file_is_no_beat(file: Path) -> None:
    for damaged in (b"", b"[1, 2", b"\xff\xfe", b"{}", b"[]", b"7\n"):
        file.write_bytes(damaged)
        assert list(read_heartbeats(file)) == []


@pytest.mark.parametrize("place", ["/dev/full", "/dev/null/no/such/directory"])
def test_a_full_disk_does_not_end_the_process(place: str) -> None:
    beats, heard = HeartbeatWriter(Path(place)), []
    beats.follow(lambda doing, _: heard.append(doing))
    beats.say("saving")
    beats.say("training")
    assert heard[1:] == ["saving", "training"]


def test_any_thread_may_report(file: Path) -> None:
    beats = HeartbeatWriter(file)
    threads = [threading.Thread(target=lambda each=each: beats.say(f"thread {each}")) for each in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert last(file).doing.startswith("thread ")


def test_a_helper_has_beats_of_its_own_which_the_launcher_reads_with_those_of_the_process(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(file))
    HeartbeatWriter(file).say("collecting")
    env = helper_heartbeat_env("train-owner/name")
    code = "from prime_rl.run.process import own_beats; own_beats().say('running rollouts')"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, check=True)
    assert [beat.doing for beat in read_heartbeats(file)] == ["collecting", "running rollouts"]
    clear_heartbeats(file)
    assert list(file.parent.iterdir()) == []


def test_without_a_launcher_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT_VARIABLE, raising=False)
    own_beats.cache_clear()
    own_beats().say("training")
    with own_beats().calling("inference"):
        own_beats().tick()
    assert helper_heartbeat_env("x") == {}

"""A process records what it does, and the records of all processes become one timeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from prime_rl.history.traces import merge_traces
from prime_rl.monitors.trace import Trace, trace_env
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import UserError

MIB = 1 << 20


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def merged(paths: RunPaths) -> list[dict[str, Any]]:
    target = paths.root / "trace.json"
    merge_traces(paths, target)
    timeline = json.loads(target.read_text())
    check_chrome_format(timeline)
    return [event for event in timeline["traceEvents"] if event["ph"] != "M"]


def check_chrome_format(timeline: dict[str, Any]) -> None:
    """What the Trace Event Format asks for: required keys, blocks that nest, sessions that begin once and end."""
    assert set(timeline) == {"displayTimeUnit", "traceEvents"}
    blocks: dict[tuple[int, int], list[str]] = defaultdict(list)
    sessions: dict[tuple[str, str, str], int] = defaultdict(int)
    named = set()
    for event in timeline["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert event["ts"] >= 0
        row = event["pid"], event["tid"]
        match event["ph"]:
            case "M":
                named.add((event["name"], *row))
            case "X":
                assert event["dur"] >= 1
            case "B":
                blocks[row].append(event["name"])
            case "E":
                assert blocks[row].pop() == event["name"]
            case "b" | "e":
                sessions[event["cat"], event["name"], event["id"]] += 1 if event["ph"] == "b" else -1
            case kind:
                assert kind == "n"
        assert event["ph"] == "M" or {("process_name", event["pid"], 0), ("thread_name", *row)} <= named
    assert not any(blocks.values())
    assert set(sessions.values()) <= {0}


def test_spans_phases_and_sessions_become_one_timeline(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    trainer, orchestrator = (Trace(paths.trace(name), MIB) for name in ("trainer", "orchestrator"))
    trainer.phase("step 7: waiting for a batch", waits_for="orchestrator")
    trainer.phase("step 7: forward and backward, minibatch 3")
    with trainer.span("gather", "comm", version=8):
        pass
    orchestrator.begin("group", "0", env="letters", row=5)
    orchestrator.mark("finished", "0", reward=0.5)
    orchestrator.end("group", "0", status="accepted")
    trainer.close()
    orchestrator.close()
    events = merged(paths)
    waiting, training = [event for event in events if event["ph"] == "B"]
    assert (waiting["name"], waiting["cat"], waiting["args"]["step"]) == ("waiting for a batch", "sync", 7)
    assert (training["name"], training["cat"]) == ("forward and backward", "compute")
    (span,) = [event for event in events if event["ph"] == "X"]
    assert (span["name"], span["cat"], span["args"]) == ("gather", "comm", {"version": 8})
    assert [event["ph"] for event in events if event.get("cat") == "session"] == ["b", "n", "e"]


def test_what_a_killed_attempt_left_open_ends_before_the_next_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    trace = Trace(paths.trace("orchestrator"), MIB)
    trace.begin("group", "0")
    trace.phase("step 3: sending the batch")
    with paths.trace("orchestrator").open("ab") as file:  # and half a line
        file.write(b'{"ph":"B","na')
    again = Trace(paths.trace("orchestrator"), MIB)
    again.begin("group", "0")
    again.end("group", "0", status="accepted")
    again.close()
    summary = merge_traces(paths, tmp_path / "trace.json")
    assert summary.damaged_lines == 1
    events = merged(paths)
    assert [event["id"] for event in events if event["ph"] == "b"] == ["1:0", "2:0"]
    unfinished = [event for event in events if event.get("args") == {"status": "unfinished"}]
    assert [event["id"] for event in unfinished] == ["1:0"]


DAMAGED = (
    "[]",
    "{}",
    "null",
    '{"ph":"B"}',
    '{"ph":"X","name":"a","ts":"1","tid":0}',
    '{"ph":"B","name":1,"ts":1,"tid":0}',
    '{"ph":"X","name":"a","ts":-1,"tid":0}',
    '{"ph":"b","name":"a","ts":1e300,"tid":0}',
    "\x00\xff",
    "[" * 100_000,
)


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: line[:40])
def test_damaged_lines_are_left_out(line: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    trace = Trace(paths.trace("trainer"), MIB)
    trace.phase("loading the model")
    trace.close()
    with paths.trace("trainer").open("a") as file:
        file.write(f"{line}\n")
    assert merge_traces(paths, tmp_path / "trace.json").damaged_lines == 1
    assert [event["ph"] for event in merged(paths)] == ["B", "E"]


def test_a_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    trace = Trace(paths.trace("trainer"), MIB)
    trace.phase("loading the model")
    with paths.trace("trainer").open("a") as file:
        file.write('{"ph":"B","na')
    assert merge_traces(paths, tmp_path / "trace.json").damaged_lines == 0
    trace.close()


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.trace("trainer").mkdir(parents=True)
    with pytest.raises(UserError, match=f"{paths.trace('trainer')} cannot be read: Is a directory"):
        merge_traces(paths, tmp_path / "trace.json")


def test_a_run_without_traces_is_told_how_to_record_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="start the run with --trace"):
        merge_traces(RunPaths(tmp_path), tmp_path / "trace.json")


def test_a_trace_ends_at_its_limit_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "trainer.jsonl"
    trace = Trace(file, MIB)
    for index in range(20_000):
        trace.begin("group", str(index))
    trace.close()
    assert file.stat().st_size <= MIB
    assert [record.message for record in caplog.records] == ["The trace has 1 MiB (trace.max_mib): it ends here"]


def test_threads_have_rows_of_their_own(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trainer.jsonl", MIB)

    def work() -> None:
        with trace.span("saving", "io"):
            pass

    thread = threading.Thread(target=work, name="background save")
    thread.start()
    thread.join()
    trace.close()
    rows = {event["args"]["name"]: event["tid"] for event in records(tmp_path / "trainer.jsonl") if event["ph"] == "M"}
    (span,) = [event for event in records(tmp_path / "trainer.jsonl") if event["ph"] == "X"]
    assert span["tid"] == rows["background save"]


def test_a_trace_that_is_off_writes_nothing(tmp_path: Path) -> None:
    trace = Trace(None)
    with trace.span("gather", "comm"):
        trace.phase("waiting")
        trace.begin("group", "0")
    assert not trace.is_on
    assert list(tmp_path.iterdir()) == []


def test_the_launchers_variables_turn_on_the_trace_of_a_process_and_its_beats(tmp_path: Path) -> None:
    script = """
from prime_rl.monitors.trace import own_trace
from prime_rl.run.process import own_beats
own_trace()
own_beats().say("loading the model")
"""
    env = os.environ | trace_env(tmp_path / "traces" / "trainer.jsonl", 1)
    subprocess.run([sys.executable, "-c", script], env=env, check=True)
    assert [event["name"] for event in merged(RunPaths(tmp_path))] == [
        "starting",
        "starting",
        *["loading the model"] * 2,
    ]

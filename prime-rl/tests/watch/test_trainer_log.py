"""What the launchers show of a run while it goes on."""

from __future__ import annotations

import errno
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from prime_rl.watch.progress import Pace, figures

RUN = """
from prime_rl.utils.logger import setup_logger
from prime_rl.watch.progress import figures, progress_bar

logger = setup_logger("info")
with progress_bar("sft", 4) as bar:
    logger.info("trainer started")
    for step in range(3):
        logger.info(f"Step {step} of the trainer")
        record = {"loss/mean": 0.5, "perf/throughput": 1234.5, "perf/mfu": 31.2}
        bar.update(step + 1, figures(record))
"""


def test_a_terminal_shows_a_bar_below_the_log() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "NO_COLOR": "1"}
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=theirs, env=environment) as process:
        os.close(theirs)
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "".join(output_of(ours)))
    assert process.returncode == 0
    assert text.index("trainer started") < text.index("step 2 (3/4)")
    for step in range(3):
        assert f"Step {step} of the trainer" in text
    assert re.search(r"sft .* step 2 \(3/4\) loss 0\.5000  1,23[45] tokens/s  MFU 31%", text)
    assert text.endswith("\n")


def output_of(terminal: int) -> Iterator[str]:
    try:
        while block := os.read(terminal, 4096):
            yield block.decode(errors="replace")
    except OSError as error:
        # EIO is how Linux says that the other end is closed.
        if error.errno != errno.EIO:
            raise
    finally:
        os.close(terminal)


def test_a_file_gets_the_lines_of_the_log_alone() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line[-21:] for line in lines[-3:]] == [f"Step {step} of the trainer" for step in range(3)]
    assert "tokens/s" not in done.stdout
    assert "\x1b" not in done.stdout


def test_the_time_left_comes_from_the_last_steps_alone() -> None:
    pace = Pace(total_steps=110)
    # A run that was resumed at step 90.
    assert pace.left_s(91, now_s=1000.0) is None
    assert pace.left_s(92, now_s=1002.0) == pytest.approx(18 * 2)
    for step in range(93, 106):
        left_s = pace.left_s(step, now_s=1002.0 + (step - 92))
    assert left_s == pytest.approx(5)
    assert Pace(None).left_s(3, 4.0) is None


def test_a_bar_shows_what_is_known() -> None:
    assert figures({"loss/mean": 0.25, "perf/mfu": None, "perf/peak_memory": 1.25}) == "loss 0.2500  1.2 GiB"

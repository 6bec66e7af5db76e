"""Started by `test_processes_of_a_run.py` under torchrun: joins the process group, prints a line, and waits."""

from __future__ import annotations

import os
import signal
import sys

from prime_rl.trainer.process.world import setup_world

process = setup_world("cpu", timeout_s=3600)
os.write(sys.stdout.fileno(), f"joined {process.rank}\n".encode())
signal.pause()

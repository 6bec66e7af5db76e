"""Ctrl-C ends a command without a traceback, also while its modules are being imported."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

INTERRUPTED_IN_IMPORT = """
import os, signal, sys
from medarc_rl import scripts

class InterruptsImport:
    def find_spec(self, name, path=None, target=None):
        if name == "medarc_rl.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, InterruptsImport())
scripts.{command}()
"""


@pytest.mark.parametrize("command", ["medarc_train", "medarc_slurm", "medarc_submit", "medarc_jobs"])
def test_ctrl_c_during_the_imports_leaves_no_traceback(command: str) -> None:
    program = INTERRUPTED_IN_IMPORT.format(command=command)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("command", ["medarc_train", "medarc_slurm", "medarc_submit", "medarc_jobs"])
def test_commands_run_with_the_usual_handler(command: str) -> None:
    program = (
        "import importlib, signal\n"
        f"importlib.import_module('medarc_rl.{command}').main = "
        "lambda: print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
        f"from medarc_rl import scripts\nscripts.{command}()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")

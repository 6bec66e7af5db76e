"""Ctrl-C ends every program without a traceback, also while it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
PROJECTS = [REPOSITORY / name for name in ("pyproject.toml", "prime-rl/pyproject.toml")]
SCRIPTS = sorted(name for each in PROJECTS for name in tomllib.loads(each.read_text())["project"]["scripts"])
MODULES = ("prime_rl.trainer.sft.train", "prime_rl.trainer.sft.preflight", "prime_rl.eval.evaluate")
WRAPPERS = [("medarc_train", "rl"), ("medarc_train", "eval"), ("medarc_slurm", "sft")]
COMMANDS = [
    *((str(BIN / name),) for name in SCRIPTS if not name.startswith("medarc_")),
    *((str(BIN / name), kind) for name, kind in WRAPPERS),
    *((sys.executable, "-m", module) for module in MODULES),
]


STOPS_AT_THE_CONFIG = """
import os, signal, sys

def wait(event, args):
    if event == "open" and str(args[0]) == {config!r}:
        os.open({ready!r}, os.O_WRONLY)
        signal.pause()

sys.addaudithook(wait)
"""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command).rpartition("/")[2])
def test_ctrl_c_at_the_start_ends_a_program_without_a_traceback(command: tuple[str, ...], tmp_path: Path) -> None:
    config, ready = tmp_path / "config.toml", tmp_path / "ready"
    config.touch()
    os.mkfifo(ready)
    (tmp_path / "sitecustomize.py").write_text(STOPS_AT_THE_CONFIG.format(config=str(config), ready=str(ready)))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    argv = [*command, "@", config]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with ready.open():
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert output == ""

"""Scripts of verifiers' harnesses that run in the environment's own interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prime_rl.orchestrator.workers.inside.scripts import has_all, in_memory

PATH_OF_A_SCRIPT = """
import os, sys
from prime_rl.orchestrator.workers.inside.scripts import in_memory
print(in_memory("script.py", "print('grüße')"), flush=True)
os.read(0, 1)
"""


def test_a_script_runs_and_is_gone_when_the_process_that_wrote_it_is_killed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", PATH_OF_A_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        path = writer.stdout.readline().strip()
        ran = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, check=True, env={"PYTHONUTF8": "1"}
        )
        writer.kill()
    assert ran.stdout == "grüße\n"
    assert not Path(path).exists()
    assert list(tmp_path.iterdir()) == []


def test_several_scripts_are_kept_at_once() -> None:
    paths = [in_memory("script.py", f"print({number})") for number in range(3)]
    assert [Path(path).read_text(encoding="utf-8") for path in paths] == ["print(0)", "print(1)", "print(2)"]


def test_a_script_runs_here_only_if_this_interpreter_has_its_packages() -> None:
    assert has_all("print()")
    assert has_all('# dependencies = ["pytest"]')
    assert not has_all('# dependencies = ["pytest==0.1"]')
    assert not has_all('# dependencies = ["no-such-package"]')

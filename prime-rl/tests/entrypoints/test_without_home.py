"""The engine's programs for a user whom the system does not know, as in a container with a random user id."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.utils.private import RUNTIME_VARIABLE

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "reverse_text"
WITHOUT_HOME = ("unshare", "--user", "--map-user=12345", "env", "-u", "HOME")


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*WITHOUT_HOME, "true"]).returncode != 0,
    reason="unshare --user is missing or not allowed",
)
@pytest.mark.parametrize(("module", "config"), [("rl", "rl_cpu.toml"), ("sft", "sft_cpu.toml")])
def test_a_run_is_checked_with_its_environments_without_a_home_directory(
    module: str, config: str, tmp_path: Path
) -> None:
    words = ("@", EXAMPLES / config, "--dry-run", "--output-dir", tmp_path / "out")
    done = subprocess.run(
        [*WITHOUT_HOME, sys.executable, "-m", f"prime_rl.entrypoints.{module}", *words],
        env=os.environ | {RUNTIME_VARIABLE: str(tmp_path / "runtime")},
        cwd=EXAMPLES.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"HOME={tmp_path / 'runtime'}" in done.stdout

"""A run's files are for their owner, unless the config says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.configs.shared import FileAccess
from prime_rl.run.directory import files_readable_by

MAKE = "import os; os.makedirs('out/logs'); open('out/logs/file', 'w')"


@pytest.mark.parametrize(
    ("readers", "directory_mode", "file_mode"),
    [("owner", 0o700, 0o600), ("group", 0o750, 0o640), ("umask", 0o775, 0o664)],
)
def test_files_of_a_run_and_of_its_processes_get_the_mode_that_the_config_names(
    readers: FileAccess, directory_mode: int, file_mode: int, tmp_path: Path
) -> None:
    previous = os.umask(0o002)
    try:
        with files_readable_by(readers):
            subprocess.run([sys.executable, "-c", MAKE], cwd=tmp_path, check=True)
        assert os.umask(0o002) == 0o002, "the caller's mask is restored"
    finally:
        os.umask(previous)

    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"out": directory_mode, "logs": directory_mode, "file": file_mode}

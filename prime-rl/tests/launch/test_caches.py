"""Where launches keep compiled code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.launch.caches import bytecode_env

FORBIDDEN = {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": "/home/caches"}


@pytest.mark.parametrize(
    ("env", "is_compiled", "kept"),
    [
        (FORBIDDEN, False, "/home/caches/prime-rl/bytecode"),
        (FORBIDDEN | {"PYTHONPYCACHEPREFIX": "/elsewhere"}, False, "/elsewhere"),
        (FORBIDDEN, True, None),
        ({"PYTHONDONTWRITEBYTECODE": ""}, False, None),
        ({}, False, None),
    ],
)
def test_children_keep_bytecode_only_where_it_is_missing_and_forbidden(
    env: dict[str, str], is_compiled: bool, kept: str | None
) -> None:
    changed = bytecode_env(env, is_compiled)
    assert changed.get("PYTHONPYCACHEPREFIX") == kept
    assert bool(changed) == (kept is not None)


def test_python_keeps_bytecode_under_that_environment_and_not_next_to_the_source(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "heavy.py").write_text("")
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path / "caches")}
    env.pop("PYTHONPYCACHEPREFIX", None)
    child = {**env, **bytecode_env(env, is_compiled=False), "PYTHONPATH": str(tmp_path / "source")}
    subprocess.run([sys.executable, "-c", "import heavy"], env=child, check=True)
    assert [path.name for path in (tmp_path / "source").iterdir()] == ["heavy.py"]
    assert len(list((tmp_path / "caches").rglob("heavy.*.pyc"))) == 1

"""What the tests of launches share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.launch import LocalHost


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHost]:
    monkeypatch.setenv("PRIME_RL_RUNTIME_DIR", str(tmp_path / "runtime"))
    with LocalHost() as host:
        yield host

"""Environments of other packages' tasks when the package is not installed: one line, before anything is started."""

from __future__ import annotations

import sys

import pytest

from prime_rl.checks.packages import built_in_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.environments.adapters.options import READERS
from prime_rl.environments.builtin import BUILT_IN, PACKAGES

ARGS = {
    "gymnasium": {"game": "FrozenLake-v1"},
    "textarena": {"game": "TicTacToe-v0"},
    "reasoning-gym": {"task": "chain_sum"},
    "openenv": {"url": "http://127.0.0.1:8000"},
}
WITHOUT_PACKAGE = {"openenv"}
"""It speaks HTTP to a server, which runs elsewhere."""


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be imported that is not imported yet."""
    for package in PACKAGES.values():
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "path", [])


def test_every_adapter_is_in_the_table() -> None:
    assert {env_id for env_id, module in BUILT_IN.items() if module in READERS} == ARGS.keys()
    assert {env_id for env_id, module in BUILT_IN.items() if module in PACKAGES} == ARGS.keys() - WITHOUT_PACKAGE


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("env_id", ARGS)
def test_a_missing_package_is_one_line_with_the_key_the_package_and_the_command(env_id: str) -> None:
    faults = [
        str(each) for each in built_in_faults("orchestrator.env.0", EnvConfig(id=env_id, args=ARGS[env_id]), StartDir())
    ]
    install = "install it with `uv sync --inexact --extra environments`"
    fault = f"orchestrator.env.0.id = '{env_id}': no package '{env_id}': {install}"
    assert faults == ([] if env_id in WITHOUT_PACKAGE else [fault])

"""Module paths of PRIME-RL's surface keep working where the code lives elsewhere."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("prime_rl.utils.paths", "RunPaths"),
        ("prime_rl.utils.process", "Supervisor"),
        ("prime_rl.utils.monitor", "Monitor"),
        ("prime_rl.orchestrator.advantage", "AdvantageOutputs"),
    ],
)
def test_an_old_module_path_gives_the_names_of_its_new_home(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)

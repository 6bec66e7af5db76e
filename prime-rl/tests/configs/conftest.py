from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.utils.pydantic_config import ConfigError, ConfigWarning, load_config

RL = ("--trainer", "--orchestrator", "--inference")
"""The three sections of a run, empty."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove this machine's PRIME_ variables, and run in an empty directory."""
    for name in [name for name in os.environ if name.upper().startswith("PRIME_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def quiet_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        yield


@pytest.fixture
def toml(tmp_path: Path) -> Callable[..., Path]:
    """Write a TOML file and return its path."""

    def write(text: str, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def rl() -> Callable[..., RLConfig]:
    """Load a run with inference from options."""
    return lambda *options: load_config(RLConfig, [], [*RL, *options])


@pytest.fixture
def faults() -> Callable[..., list[str]]:
    """The faults of a config that must not load."""

    def load(config_cls: type, *options: str, files: tuple[Path, ...] = ()) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_config(config_cls, files, options)
        return list(caught.value.faults)

    return load


@pytest.fixture
def rl_faults(faults: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda *options: faults(RLConfig, *RL, *options)

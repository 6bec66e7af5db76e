"""A resumed RL run compares the sections of all its components with those in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl.checks import start_faults
from prime_rl.configs.rl import RLConfig
from prime_rl.run.checkpoints import changes_since, compared_configs
from prime_rl.run.paths import RunPaths
from prime_rl.utils.files import STABLE
from prime_rl.utils.pydantic_config import dump_toml, load_config

SECTIONS = ("--trainer", "--orchestrator", "--inference")
ENVS = '[{"id": "a"}, {"id": "b"}]'


@pytest.fixture
def resumed(tmp_path: Path) -> Callable[..., RLConfig]:
    """The config of a run that resumes from step 40, which was made without the given options."""

    def load(*options: str, env: str = ENVS) -> RLConfig:
        fixed = (*SECTIONS, "--output-dir", str(tmp_path), "--max-steps", "80", "--ckpt.interval", "20")
        paths = RunPaths(tmp_path)
        former = load_config(RLConfig, [], [*fixed, "--orchestrator.env", ENVS])
        for component, section in compared_configs(former).items():
            dump_toml(section, paths.saved_config(40, component))
        for place in (paths.checkpoint(40), paths.orchestrator.checkpoint(40).parent):
            place.mkdir(parents=True, exist_ok=True)
            (place / STABLE).touch()
        return load_config(RLConfig, [], [*fixed, "--orchestrator.env", env, "--ckpt.resume-step", "40", *options])

    return load


def lines(config: RLConfig) -> list[str]:
    return list(changes_since(RunPaths(config.output_dir), 40, compared_configs(config)).lines())


def faults(config: RLConfig) -> list[str]:
    return [fault for fault in start_faults(config) if "cannot resume" in fault]


def test_an_unchanged_config_has_no_changes(resumed: Callable[..., RLConfig]) -> None:
    config = resumed()
    assert lines(config) == faults(config) == []


def test_changes_of_every_component_are_listed(resumed: Callable[..., RLConfig]) -> None:
    config = resumed(
        *("--trainer.optim.lr", "1e-5"),
        *("--orchestrator.sampling.temperature", "0.7"),
        *("--inference.gpu-memory-utilization", "0.5"),
        *("--orchestrator.eval.interval", "7"),
        *("--wandb.project", "mine"),
        env='[{"id": "a"}, {"id": "c"}]',
    )
    applied, without = lines(config)
    assert applied.startswith("applied from step 40: ")
    assert applied.removeprefix("applied from step 40: ").split(", ") == [
        "trainer.optim.lr 1e-06 -> 1e-05",
        "orchestrator.sampling.temperature 1.0 -> 0.7",
        "orchestrator.env.1.id b -> c",
        "orchestrator.eval unset -> set",
        "inference.gpu_memory_utilization 0.9 -> 0.5",
    ]
    assert without == (
        "changed without effect on the training: trainer.wandb unset -> set, orchestrator.wandb unset -> set"
    )
    assert faults(config) == []


def test_a_removed_item_of_a_list_is_a_change(resumed: Callable[..., RLConfig]) -> None:
    (applied,) = lines(resumed(env='[{"id": "a"}]'))
    assert "orchestrator.env.1.id b -> unset" in applied


def test_another_adapter_is_refused_once_for_each_component(resumed: Callable[..., RLConfig]) -> None:
    config = resumed("--trainer.model.lora.rank", "4")
    assert faults(config) == [
        "cannot resume step 40 with trainer.model.lora unset -> set: the checkpoint does not fit another adapter; set "
        "it back, or start a new run"
    ]


def test_another_seed_of_the_examples_is_refused_unless_the_saved_buffer_is_skipped(
    resumed: Callable[..., RLConfig],
) -> None:
    (fault,) = faults(resumed("--orchestrator.buffer.seed", "3"))
    assert fault.endswith("set it back, or start a new run, or add --orchestrator.ckpt.skip-buffer")
    config = resumed("--orchestrator.buffer.seed", "3", "--orchestrator.ckpt.skip-buffer")
    assert faults(config) == []
    (applied,) = lines(config)
    assert "orchestrator.buffer.seed unset -> 3" in applied


def test_a_saved_config_that_this_version_cannot_load_is_reported(resumed: Callable[..., RLConfig]) -> None:
    config = resumed()
    file = RunPaths(config.output_dir).saved_config(40, "trainer")
    file.write_text("no_such_key = 1\n")
    (line,) = lines(config)
    assert line == f"{file} does not load with this version: changed keys of trainer are not listed"

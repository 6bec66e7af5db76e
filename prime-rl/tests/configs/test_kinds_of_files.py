"""A file that is a config of another command is one fault, which says what to do with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.root import ROOTS
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import load_config

TRAINER = '[optim]\nlr = 1e-5\n[loss]\ntype = "clip"\n'
ORCHESTRATOR = "batch-size = 8\n[sampling]\nmax-tokens = 3\n"
INFERENCE = "[server]\nport = 8000\n"
SFT = '[data]\nname = "rows.jsonl"\n[optim]\nlr = 1e-5\n'
RL = 'max_steps = 3\n[trainer.optim]\nlr = 1e-5\n[[orchestrator.env]]\nid = "a"\n'
EVAL = 'eval_base = false\nweights_dir = "weights"\n'
SEVERAL = "[optim]\nlr = 1e-5\n"


@pytest.mark.parametrize(
    ("config_cls", "text", "fault"),
    [
        (RLConfig, TRAINER, "is a config of trainer, not of rl: pass it as `--trainer @ {}`"),
        (RLConfig, ORCHESTRATOR, "is a config of orchestrator, not of rl: pass it as `--orchestrator @ {}`"),
        (RLConfig, INFERENCE, "is a config of inference, not of rl: pass it as `--inference @ {}`"),
        (RLConfig, SFT, "is a config of sft, not of rl: pass it to sft"),
        (RLConfig, EVAL, "is a config of eval, not of rl: pass it to eval"),
        (SFTConfig, RL, "is a config of rl, not of sft: pass it to rl"),
        (SFTConfig, TRAINER, "is a config of trainer, not of sft: pass it to trainer"),
        (TrainerConfig, ORCHESTRATOR, "is a config of orchestrator, not of trainer: pass it to orchestrator"),
        (OfflineEvalConfig, SFT, "is a config of sft, not of eval: pass it to sft"),
    ],
)
def test_the_right_command_is_named(toml: Callable[..., Path], faults, config_cls: type, text: str, fault: str) -> None:
    file = toml(text)
    assert faults(config_cls, files=(file,)) == [f"{file}: {fault.format(file)}"]


@pytest.mark.parametrize(("section", "text"), [("trainer", TRAINER), ("orchestrator", ORCHESTRATOR)])
def test_the_way_that_is_named_works(toml: Callable[..., Path], section: str, text: str) -> None:
    config = load_config(RLConfig, [], [f"--{section}", "@", str(toml(text))])
    found = {"trainer": config.trainer.optim.lr, "orchestrator": config.orchestrator.batch_size}[section]
    assert found == {"trainer": 1e-5, "orchestrator": 8}[section]


@pytest.mark.parametrize("text", ["typo = 1\n" + TRAINER, "no_key_of_anything = 1\n", SEVERAL])
def test_a_file_that_may_be_anything_is_not_guessed(toml: Callable[..., Path], faults, text: str) -> None:
    assert all("unknown key" in fault for fault in faults(RLConfig, files=(toml(text),)))


@pytest.mark.parametrize("component", ROOTS)
def test_a_wrong_value_is_not_taken_for_another_kind_of_file(toml: Callable[..., Path], component: str) -> None:
    assert ROOTS[component].fault_of_file(str(toml("max_steps = 'x'")), {"output_dir": 3}) is None

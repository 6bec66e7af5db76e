"""A loaded config is frozen: what a run was started with stays what it runs with."""

from __future__ import annotations

import ast
from pathlib import Path

import pydantic
import pytest

import prime_rl
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.surface.docs import ROOTS, sections_of_root
from prime_rl.configs.trainer import ModelConfig, TokenizerConfig, TrainerConfig

PACKAGE = Path(prime_rl.__file__).parent
SECTIONS = sorted(
    {section for root in ROOTS for section in sections_of_root(root)}, key=lambda section: section.__name__
)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: f"{section.__module__}.{section.__name__}")
def test_no_attribute_of_a_section_can_be_assigned(section: type[pydantic.BaseModel]) -> None:
    built = section.model_construct()
    for name in section.model_fields:
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(built, name, None)


def test_only_configs_derive_values() -> None:
    """`derive` passes the lock, so it stays with the validators."""
    users = set()
    for path in PACKAGE.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        if "derive" in names:
            users.add(path.relative_to(PACKAGE).parts[0])
    assert users == {"configs"}


def test_building_a_config_leaves_the_sections_it_is_given_as_they_are() -> None:
    model, tokenizer = ModelConfig(name="m"), TokenizerConfig()
    config = TrainerConfig(model=model, tokenizer=tokenizer)
    assert (config.tokenizer.name, config.model.fused_lm_head_chunk_size) == ("m", 8192)
    assert (tokenizer.name, model.fused_lm_head_chunk_size) == (None, "auto")


def test_building_a_run_leaves_the_components_it_is_given_as_they_are() -> None:
    trainer, server = TrainerConfig(), InferenceConfig()
    run = RLConfig(trainer=trainer, orchestrator={}, inference=server, max_steps=3, model={"name": "m"})
    assert (run.trainer.max_steps, run.inference.model.name) == (3, "m")
    assert (trainer.max_steps, server.model.name) == (None, "Qwen/Qwen3-0.6B")
    OfflineEvalConfig(environment_ids=["e"], inference=server, model={"name": "m"})
    assert server.model.name == "Qwen/Qwen3-0.6B"

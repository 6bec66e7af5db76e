"""For every family that Transformers registers, the start check's answer is what the trainer does.

docs/models.md has the families that are made tiny there. Here are the others, and those with a vision tower: what the
check accepts is trained, and what it refuses for its class or its parts, the trainer refuses too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from model_cases import SIZES, WHOLE, config_of_whole, families
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto import modeling_auto

from prime_rl.checks.model_description import SEPARABLE_FAMILIES, UNTRAINED_FAMILIES
from prime_rl.checks.model_files import describe, trained_model_fault
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.model import DebugModelConfig
from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.model.build import load_model_config, setup_model
from prime_rl.trainer.perf import flops_per_token
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh, ParallelDims
from prime_rl.trainer.process.world import destroy_world, setup_world

REGISTERED = frozenset[str]().union(
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 8, "num_key_value_heads": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "axk1": {"num_key_value_heads": 4},
    "axk2": INDEXER,
    "deepseek_v32": INDEXER,
    "glm_moe_dsa": INDEXER,
    "kimi_linear": {
        **{"num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "layer_types": ["linear_attention", "hybrid"]},
}
NOT_MADE = frozenset(
    "cohere_compass_text dbrx encoder-decoder gemma4_text musicgen musicgen_melody vision-encoder-decoder zamba "
    "zaya".split()
)
"""Families whose config has no defaults, or whose class fails with small sizes."""


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    yield ParallelDims(dp_replicate=1, dp_shard=1).mesh(setup_world("cpu", timeout_s=3600, environ={}))
    destroy_world()


def tiny(config: PretrainedConfig) -> dict[str, Any]:
    """Settings that make a default config small."""
    names = {*config.to_dict(), *config.attribute_map}
    small = {key: size for key, size in SIZES.items() if key in names and getattr(config, key, None) is not None}
    return small | SETTINGS.get(config.model_type, {})


@pytest.mark.slow
def test_the_start_check_says_what_the_trainer_does(mesh: Mesh, tmp_path: Path) -> None:
    different: dict[str, object] = {}
    for family in sorted(REGISTERED - NOT_MADE - SEPARABLE_FAMILIES - UNTRAINED_FAMILIES.union(families())):
        directory = tmp_path / family
        config = CONFIG_MAPPING[family]()
        config.save_pretrained(directory)
        run = ModelConfig(name=str(directory), attn="sdpa", seq_len=56, debug=DebugModelConfig(random_init=True))
        check = trained_model_fault(run, StartDir())
        try:
            if check is None:
                type(config)(**tiny(config)).save_pretrained(directory)
                flops_per_token(setup_model(run, mesh), 56)  # which each run counts first
            else:
                load_model_config(run)
                if type(config) in AutoModelForCausalLM._model_mapping:
                    different[family] = f"refused, and not by the trainer: {check}"
        except ModelError as refusal:
            if check is None:
                different[family] = refusal
    assert different == {}


OF_ALL_LAYERS = {"target_modules": ["all-linear", "experts"], "rank": 2}
SECTIONS: dict[str, dict[str, Any]] = {
    "images": {"vision": {}},
    "frozen routers": {"freeze_moe_router": True},
    "balanced routers": {"router_aux_loss_coef": 0.1},
    "DoRA": {"lora": OF_ALL_LAYERS | {"use_dora": True}},
    "4 bits": {"lora": OF_ALL_LAYERS, "quantization": {"type": "nf4"}},
    "reward model": {},
}
"""Settings that some models do not take."""


@pytest.mark.slow
def test_it_does_so_for_every_family_with_a_tower(mesh: Mesh, tmp_path: Path) -> None:
    assert WHOLE.keys() == SEPARABLE_FAMILIES
    different: dict[tuple[str, str], object] = {}
    for family, (section, settings) in product(sorted(WHOLE), SECTIONS.items()):
        directory, is_scored = tmp_path / family, section == "reward model"
        directory.mkdir(exist_ok=True)
        (directory / "preprocessor_config.json").write_text("{}")
        run = ModelConfig(
            name=str(directory), attn="sdpa", seq_len=56, debug=DebugModelConfig(random_init=True), **settings
        )
        checks: set[str | None] = set()
        for config in (CONFIG_MAPPING[family]().to_diff_dict(), config_of_whole(family)):
            (directory / "config.json").write_text(json.dumps(config))
            described = describe(run.name, StartDir())
            assert described is not None
            checks.add(trained_model_fault(run, StartDir()) or (described.scoring_fault() if is_scored else None))
        try:
            flops_per_token(setup_model(run, mesh, is_scored=is_scored), 56)
        except ModelError as refusal:
            if None in checks:
                different[family, section] = refusal
        else:
            if checks != {None}:
                different[family, section] = f"refused, and not by the trainer: {checks}"
    assert different == {}

"""Models that tensor and expert parallelism refuse. `tests/models/test_divided_rows.py` has those that they divide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from prime_rl.checks.model_description import ModelDescription
from prime_rl.configs.model import ModelConfig
from prime_rl.trainer.model.expert_parallel import divide_experts
from prime_rl.trainer.model.tensor_parallel import divide_layers
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh, WeightAxis

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 2}


def without_values(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("config", [Lfm2Config(num_hidden_layers=2), GptOssConfig(num_hidden_layers=2)])
def test_a_model_without_a_plan_is_refused(config: PretrainedConfig, mesh: Mesh) -> None:
    with pytest.raises(ModelError, match=r"no plan to divide the layers of (Lfm2|GptOss)ForCausalLM"):
        divide_layers(without_values(config), mesh.fsdp, mesh.process)


def test_a_plan_with_another_style_is_refused(mesh: Mesh) -> None:
    model = without_values(LlamaConfig(num_hidden_layers=2))
    model.tp_plan = {"model.layers.*.mlp.gate_proj": "packed_colwise"}
    with pytest.raises(ModelError, match="the plan of LlamaForCausalLM has packed_colwise, which is not supported"):
        divide_layers(model, mesh.fsdp, mesh.process)


@pytest.mark.parametrize("config", [LlamaConfig(num_hidden_layers=2), Llama4TextConfig(num_hidden_layers=2)])
def test_a_model_without_experts_that_take_tokens_one_by_one_is_refused(config: PretrainedConfig, mesh: Mesh) -> None:
    divided = replace(mesh, expert_axis=WeightAxis(mesh.fsdp, mesh.fsdp))
    with pytest.raises(ModelError, match=r"model\.ep: Llama\w*ForCausalLM has no experts that can be divided"):
        divide_experts(without_values(config), divided, needs_experts=True)
    fault = "model.ep = 2 divides experts, and LlamaForCausalLM has none"
    assert ModelDescription(LLAMA).division_fault(ModelConfig(ep=2)) == fault


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        ({"cp": 8}, None),
        ({"tp": 2}, None),
        ({"cp": 4, "tp": 2}, None),
        ({"cp": 3}, "model.cp = 3 does not divide the 8 attention heads of LlamaForCausalLM"),
        ({"cp": 8, "tp": 2}, "model.cp = 8 x model.tp = 2 does not divide the 8 attention heads of LlamaForCausalLM"),
        ({"tp": 4}, "model.tp = 4 does not divide the 2 key-value heads of LlamaForCausalLM"),
        ({"tp": 2, "ep": 6}, None),
        ({"ep": 8}, "model.ep = 8 does not divide the 12 experts of LlamaForCausalLM"),
    ],
    ids=str,
)
def test_processes_divide_the_heads_and_experts_of_a_model(sizes: dict[str, int], fault: str | None) -> None:
    assert ModelDescription(LLAMA | {"num_local_experts": 12}).division_fault(ModelConfig(**sizes)) == fault


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"intermediate_size": 96}, None),
        ({"intermediate_size": 90}, "model.tp = 4 does not divide intermediate_size = 90 of LlamaForCausalLM"),
        ({"intermediate_size": [96, 90]}, "model.tp = 4 does not divide intermediate_size = 90 of LlamaForCausalLM"),
        ({"intermediate_size": 90, "num_experts": 8}, None),
        (
            {"intermediate_size": 90, "num_experts": 8, "mlp_only_layers": [0]},
            "model.tp = 4 does not divide intermediate_size = 90 of LlamaForCausalLM",
        ),
        (
            {"attention_dropout": 0.1},
            "model.tp = 4 and attention_dropout = 0.1: set that to 0 in config.json, or remove model.tp",
        ),
    ],
)
def test_processes_divide_feed_forward_layers_and_draw_no_dropout_of_what_they_divide(
    settings: dict[str, Any], fault: str | None
) -> None:
    described, config = ModelDescription(LLAMA | {"num_key_value_heads": 8} | settings), ModelConfig(tp=4)
    assert (described.division_fault(config) or described.dropout_fault(config)) == fault


@pytest.mark.parametrize(("tp", "fault"), [(8, None), (3, "does not divide the 32"), (16, "neither divides")])
def test_a_server_divides_heads_and_divides_or_repeats_those_of_keys(tp: int, fault: str | None) -> None:
    heads = {"num_attention_heads": 48 if tp == 16 else 32, "num_key_value_heads": 12 if tp == 16 else 4}
    found = ModelDescription(LLAMA | heads).serving_fault(tp)
    assert found is None if fault is None else fault in str(found)

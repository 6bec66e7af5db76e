"""The start check of models beside the trained one, and of what a model and its tokenizer cannot do together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.checks import NotInstalled, start_faults
from prime_rl.checks.engines import engine_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.rm import RewardModelConfig
from prime_rl.configs.sft import SFTConfig

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 16, "num_hidden_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "mixture": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, **HEADS},
    "dense": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **HEADS},
    "small": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **HEADS, "vocab_size": 2},
    "parts": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {"model_type": "qwen3_vl_text", **HEADS},
        "vision_config": {"model_type": "qwen3_vl"},
    },
    "granite": {"model_type": "granite", "architectures": ["GraniteForCausalLM"], **HEADS},
    "classifier": {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"], **HEADS},
    "packed": {
        "model_type": "qwen3",
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        **HEADS,
    },
    "attending": {
        "model_type": "mllama",
        "text_config": {"model_type": "mllama_text_model", "cross_attention_layers": [0], "vocab_size": 3, **HEADS},
        "vision_config": {"model_type": "mllama_vision_model"},
    },
    "jetmoe": {"model_type": "jetmoe", "architectures": ["JetMoeForCausalLM"], "num_local_experts": 4, **HEADS},
}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": []}
    for name, config in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": 3} | config))
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return tmp_path


def test_what_a_model_cannot_do_is_told_before_the_start(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"name": str(folders / "rows.jsonl"), "seq_len": 8}

    def sft(model: str, **values: Any) -> list[str]:
        sizes = values.pop("sizes", {})
        model_section = {"name": str(folders / model), **sizes}
        return start_faults(SFTConfig.model_validate({"model": model_section, "data": rows, "device": "cpu", **values}))

    def rl(model: str, *, sizes: dict[str, Any] | None = None, **trainer: Any) -> list[str]:
        values = {
            "model": {"name": str(folders / model)},
            "trainer": {"model": sizes or {}, **trainer},
            "orchestrator": {"env": [{"id": "x"}], "client": {"base_url": ["http://localhost:1/v1"]}},
            "deployment": {"num_infer_gpus": 0, "num_train_gpus": 2},
        } | ({"algorithm": "ppo"} if "critic" in trainer else {})
        faults = start_faults(RLConfig.model_validate(values))
        return [fault for fault in faults if not fault.startswith("orchestrator.env")]

    def rm(model: str) -> list[str]:
        section = {"name": str(folders / model)}
        return start_faults(RewardModelConfig.model_validate({"model": section, "data": rows, "device": "cpu"}))

    dense, two_gpus = str(folders / "dense"), {"type": "single_node", "num_gpus": 2}
    in_4_bits: dict[str, Any] = {"lora": {}, "quantization": "nf4"}
    mixture = str(folders / "mixture")
    teacher, critic = {"distillation": {"teacher": dense}}, {"critic": {"name": dense}}
    few = "the tokenizer has token ids up to 2, but model.name = {} has embeddings for 0..1"
    assert sft("dense", **teacher) == sft("attending", tokenizer={"add_tokens": ["c"]}) == []
    trained = "quantization stores weights that are not trained: set [model.lora]; or name its version in bfloat16"
    for faults, fault in (
        (sft("packed"), f"its weights are in 4 bits, and {trained}"),
        (sft("packed", sizes={"lora": {"use_dora": True}}), "does not go with lora.use_dora"),
        (sft("packed", sizes={"lora": {"init": "pissa"}}), "does not go with lora.init = 'pissa'"),
        (sft("packed", sizes=in_4_bits), "its weights are in 4 bits already: remove model.quantization"),
        (
            sft("packed", sizes={"lora": {"init": "loftq"}, "quantization": "nf4"}),
            "its weights are in 4 bits already: remove model.quantization and lora.init",
        ),
        (rl("packed", sizes={"lora": {}}, critic={}), "trainer.critic.name: its weights are in 4 bits, and"),
    ):
        assert fault in faults[0]
    served = InferenceConfig.model_validate({"model": {"name": str(folders / "packed")}, "backend": "vllm"})
    assert "which vLLM 0.32 does not read" in list(engine_faults(served, StartDir(folders)))[-1]
    assert rl("dense", critic={}) == []
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as where it is not installed
    in_8_bits: dict[str, Any] = {"optim": {"type": "adamw8bit"}}
    for faults, lacking in (
        (sft("dense", sizes=in_4_bits, distillation={"teacher": mixture}), ["model.quantization needs"]),
        (rl("dense", sizes=in_4_bits, critic={"name": mixture}), ["trainer.model.quantization needs"]),
        (
            sft("packed", sizes={"lora": {}}),
            [f"model.name = {folders / 'packed'}: its weights are in 4 bits, which needs"],
        ),
        (sft("dense", **in_8_bits), ["optim.type = 'adamw8bit' needs"]),
        (
            rl("dense", **in_8_bits, critic=in_8_bits),
            ["trainer.optim.type = 'adamw8bit' needs", "trainer.critic.optim.type = 'adamw8bit' needs"],
        ),
    ):
        assert all(isinstance(fault, NotInstalled) for fault in faults)
        assert [fault.partition(" the package bitsandbytes: install it with ")[0] for fault in faults] == lacking
    assert rl("dense") == rl("small") == [], "RL without demonstrations tokenizes nothing"
    for faults, wanted in (
        (
            sft("mixture", sizes={"ep": 2}, deployment=two_gpus, **teacher),
            f"distillation.teacher = {dense}: model.ep = 2 divides experts, and Qwen3ForCausalLM has none",
        ),
        (sft("small"), few.format(folders / "small")),
        (rl("small", demonstrations={"data": rows}), few.format(folders / "small")),
        (rl("mixture", sizes={"ep": 2}, **critic), f"trainer.critic.name = {dense}: model.ep = 2 divides experts, and"),
        (rl("parts", critic={}), "a reward model of a checkpoint with several parts is not supported"),
        (rl("granite", critic={}), "Transformers has no class for a reward model of the type 'granite'"),
        (rm("granite"), f"model.name = {folders / 'granite'}: Transformers has no class for a reward model"),
        (rm("classifier"), "a classifier with 2 labels, and a reward model has one"),
        (sft("dense", sizes={"router_aux_loss_coef": 0.1}), "Qwen3ForCausalLM is no mixture of experts: remove it"),
        (
            sft("mixture", sizes={"lora": {"use_dora": True}}),
            "lora.use_dora is not for the experts of Qwen3MoeForCausalLM: remove 'experts' from lora.target_modules",
        ),
        (sft("mixture", sizes={"lora": {"init": "pissa"}}), "lora.init = 'pissa' is not for the experts of"),
        (
            sft("mixture", sizes={"mlp_chunk_tokens": 64}),
            "model.mlp_chunk_tokens: Qwen3MoeForCausalLM is a mixture of experts: remove it",
        ),
        (sft("dense", sizes={"freeze_moe_router": True}), "model.freeze_moe_router: Qwen3ForCausalLM is no mixture"),
        (
            sft("dense", sizes={"router_bias_update_rate": 0.1}),
            "model.router_bias_update_rate: Qwen3ForCausalLM is no mixture of experts: remove it",
        ),
        (
            sft("mixture", sizes={"router_bias_update_rate": 0.1}),
            "model.router_bias_update_rate: the routers of Qwen3MoeForCausalLM have no bias that could be moved",
        ),
        (
            sft("attending", tokenizer={"add_tokens": ["d"]}),
            "tokenizer.add_tokens: models of type 'mllama' have embeddings of images behind those of tokens, and",
        ),
        (rl("jetmoe", sizes={"ep": 2}), "model.ep: JetMoeForCausalLM has no experts that can be divided"),
        (rl("jetmoe", sizes={"tp": 2}), "model.tp: Transformers has no plan to divide the layers of JetMoeForCausalLM"),
    ):
        assert len(faults) == 1, faults
        assert wanted in faults[0]

"""The description of a model refuses what trainer and embedded engine refuse, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import LEFT_OUT, Case, cases, tiny_config
from model_table import outcomes_on
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from prime_rl.checks.engines import engine_faults
from prime_rl.checks.model_description import (
    CAUSAL_FAMILIES,
    PLAIN_LANGUAGE_PARTS,
    RENAMED_LAYERS,
    SEPARABLE_FAMILIES,
    UNBIASED_FAMILIES,
    UNCHUNKED_FAMILIES,
    UNDIVIDED_FAMILIES,
    UNSCORED_FAMILIES,
    UNTRAINED_FAMILIES,
    ModelDescription,
)
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.model import LoRAConfig, ModelConfig
from prime_rl.trainer.model.balance import bias_of
from prime_rl.trainer.model.blocks import decoder_blocks, dense_mlps
from prime_rl.trainer.model.lora import is_routed, select_modules
from prime_rl.trainer.model.tensor_parallel import plan_of_blocks
from prime_rl.trainer.process.errors import ModelError
from prime_rl.transport.routing import Routers

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs/models.md is not part of an installed prime-rl")


def described(config: PretrainedConfig, directory: Path) -> ModelDescription:
    """As `config.json` describes it, which Transformers writes without defaults of some families."""
    config.save_pretrained(directory)
    return ModelDescription(json.loads((directory / "config.json").read_text()))


def test_it_refuses_the_cases_that_the_page_says_are_refused(tmp_path: Path) -> None:
    outcomes, different = outcomes_on(PAGE.read_text()), []
    for case in cases():
        config = tiny_config(case)
        found = described(config, tmp_path)
        of_page = [outcomes[case.name].trainer, outcomes[case.name].engine]
        # What the trainer describes is the config that Transformers has loaded.
        for each in (found, ModelDescription(config.to_dict())):
            faults = [each.training_fault(case.seq_len), each.embedded_fault(case.seq_len)]
            if [fault is not None for fault in faults] != [said.startswith("refused") for said in of_page]:
                different.append((case.name, faults, of_page))
    assert different == []


def test_it_knows_the_causal_families_of_transformers() -> None:
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == CAUSAL_FAMILIES


def test_it_knows_the_families_without_a_class_for_rewards() -> None:
    without = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).union(PLAIN_LANGUAGE_PARTS) - UNTRAINED_FAMILIES
    assert without - set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES) == UNSCORED_FAMILIES


ADAPTERS = {
    "LoRA": LoRAConfig(),
    "DoRA": LoRAConfig(use_dora=True),
    "no experts": LoRAConfig(target_modules=["q_proj"]),
    "patterns": LoRAConfig(target_modules=["all-linear"], modules_to_save=["norm|ln_f"], rank_pattern={r"\.0\.": 8}),
    "no such target": LoRAConfig(target_modules=["all-linear", r"no\.such.*"]),
    "no such module": LoRAConfig(target_modules=["all-linear"], modules_to_save=["nope"]),
    "no such rank": LoRAConfig(target_modules=["all-linear"], rank_pattern={r"layers\.99\.": 2}),
    "a router": LoRAConfig(target_modules=["all-linear"], alpha_pattern={r"\.(gate|router)$": 2.0}),
    "the head": LoRAConfig(target_modules=["all-linear", "lm_head"]),
    "whole blocks": LoRAConfig(target_modules=[r"\.1\."]),
}


def test_it_refuses_to_divide_and_to_adapt_what_cannot_be() -> None:
    """Models without values, one of each family. Layers need a plan of Transformers, experts a stack, and chunks an MLP
    that is a module of its own."""
    families: dict[str, PretrainedConfig] = {}
    for case in cases():
        families.setdefault(tiny_config(case).model_type, tiny_config(case))
    unlike: dict[str, dict[str, object]] = {}
    without_plan, without_stack, refused, without_mlp, without_bias = set(), set(), set(), set(), set()
    for family, config in families.items():
        described = ModelDescription(config.to_dict())
        if described.training_fault() is not None:
            continue
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        state = model.state_dict()
        on_hub, tied = revert_weight_conversion(model, state), model.all_tied_weights_keys
        for name, lora in ADAPTERS.items():
            fault: ModelError | None = None
            try:
                select_modules(model, lora)
            except ModelError as refusal:
                fault = refusal
            for tensors in (state, on_hub):
                shapes = {tensor: each.shape for tensor, each in tensors.items() if tensor not in tied}
                said = described.adapter_fault(lora, shapes)
                if (said is None) != (fault is None):
                    unlike.setdefault(family, {})[name] = (said, str(fault))
        try:
            plan_of_blocks(model)
        except ModelError:
            without_plan.add(family)
        if not (described.has_experts or any(dense_mlps(block) for block in decoder_blocks(model))):
            without_mlp.add(family)
        routers = list(Routers(model).found.values()) if described.has_experts else []
        assert {each.top_k for each in routers if hasattr(each, "top_k")} <= {described.experts_per_token}, family
        biases = [bias_of(model, each) for each in routers]
        if described.has_experts and (not biases or any(bias is None for bias in biases)):
            without_bias.add(family)
        if described.has_experts and not any(map(is_routed, model.modules())):
            without_stack.add(family)
            refused |= (
                {family} if "no experts that can be" in (described.division_fault(ModelConfig(ep=2)) or "") else set()
            )
    # Of these, the names on the hub do not tell what adapters can name.
    assert unlike.keys() == RENAMED_LAYERS, unlike
    assert without_plan == UNDIVIDED_FAMILIES
    assert without_mlp == UNCHUNKED_FAMILIES
    # The first layers of DeepSeek-V4 have none, by its config.
    assert without_bias == UNBIASED_FAMILIES | {"deepseek_v4", "lfm2_moe"}
    # The first layers of LFM2-MoE are dense, and its tiny model has no others.
    assert refused == without_stack - {"lfm2_moe"}


def test_a_family_that_reads_more_than_text_is_refused_unless_its_language_part_is_compared(tmp_path: Path) -> None:
    # These three have no config without parts, and Aria's text part is a language model.
    unmade = {"musicgen", "musicgen_melody", "vision-encoder-decoder", "aria_text"}
    accepted = []
    left_out = {*LEFT_OUT["Models with images or sound"], *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    for family in left_out - unmade - SEPARABLE_FAMILIES:
        found = described(CONFIG_MAPPING[family](), tmp_path)
        if found.training_fault() is None or found.embedded_fault() is None:
            accepted.append(family)
    assert accepted == []
    assert ModelDescription({"model_type": "musicgen"}).training_fault() is not None


def test_a_checkpoint_as_on_the_hub_is_named_by_its_class() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 2, "vocab_size": 8}
    config: dict[str, Any] = {
        "model_type": "ovis2",
        "architectures": ["Ovis2ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    found = ModelDescription(config)
    assert (found.towers, found.language_part, found.setting("vocab_size")) == (("vision_config",), text, 8)
    assert found.training_fault() == (
        "Ovis2ForConditionalGeneration reads images, which is not supported yet: name a model for text alone"
    )
    assert ModelDescription(text).training_fault() is None


def test_vllm_needs_a_processor_of_a_model_with_a_tower_unless_it_serves_the_language_model_alone(
    tmp_path: Path,
) -> None:
    text = {"model_type": "qwen3_vl_text", "vocab_size": 8}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def is_refused(**model: Any) -> bool:
        asked = InferenceConfig(backend="vllm", model={"name": str(tmp_path), **model})
        return any("language_model_only = true" in fault for fault in engine_faults(asked, StartDir()))

    assert is_refused()
    assert not is_refused(language_model_only=True)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert not is_refused()


def test_a_model_with_code_is_judged_when_it_is_loaded() -> None:
    config = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    assert "trust_remote_code" in str(ModelDescription(config).training_fault())
    assert ModelDescription(config).training_fault(trusts_code=True) is None
    assert "no causal language model of type 't5'" in str(ModelDescription({"model_type": "t5"}).training_fault())


def test_lfm2_before_transformers_5_names_its_layers_with_attention() -> None:
    config = Case("lfm2")
    old = {"model_type": config.family, "num_hidden_layers": 4, "full_attn_idxs": [1, 3]}
    assert ModelDescription(old).layer_kinds == {"full_attention", "conv"}

"""Checkpoints with a vision tower: their language part is trained alone, and exports are whole checkpoints again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from prime_rl.checks.adapters import lora_fault
from prime_rl.checks.model_description import SEPARABLE_FAMILIES, ModelDescription
from prime_rl.configs.trainer import LoRAConfig, ModelConfig, TokenizerConfig, WeightCheckpointConfig
from prime_rl.inference.embedded.engine.model import load_model
from prime_rl.inference.embedded.engine.weights import load_weights, read_weights
from prime_rl.trainer.checkpoints.weights import export_model, gather_weights, save_adapter
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.lora import gather_adapter
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.model.tokenizer import embeddings_needed, setup_tokenizer
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.transport.language_part import with_other_tower
from prime_rl.transport.loading import full_tensor
from prime_rl.utils.logger import get_logger

from .vision_checkpoints import name_as_on_the_hub

TOKENS = torch.arange(7, 100, 3)
TEXT: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 128, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
CLIP = VISION | {"model_type": "clip_vision_model"}
QWEN_VISION = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
QWEN_TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 2, "head_dim": 16},
}
SLIDING, FULL = ["sliding_attention"], ["full_attention"]
EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

CONFIGS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "aya_vision": lambda: tf.AyaVisionConfig(
        text_config=TEXT | {"model_type": "cohere2", "sliding_window": 16}, vision_config=VISION, image_token_index=3
    ),
    "cohere2_vision": lambda: tf.Cohere2VisionConfig(
        text_config=TEXT | {"model_type": "cohere2", "sliding_window": 16}, vision_config=VISION, image_token_id=3
    ),
    "gemma3": lambda: tf.Gemma3Config(
        text_config=TEXT | {"head_dim": 16, "sliding_window": 16}, vision_config=VISION, mm_tokens_per_image=1
    ),
    "gemma3n": lambda: tf.Gemma3nConfig(
        text_config=TEXT
        | {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 5, "vocab_size_per_layer_input": 120}
        | {"hidden_size_per_layer_input": 8, "laurel_rank": 8, "num_kv_shared_layers": 2}
        | {"activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0], "layer_types": (SLIDING + FULL) * 2 + FULL},
        vision_config={"hidden_size": 32, "architecture": "test_efficientnet"},
        audio_config={"hidden_size": 32, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1},
    ),
    "gemma4": lambda: tf.Gemma4Config(
        text_config=TEXT | {"head_dim": 16, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8},
        vision_config=VISION | {"num_key_value_heads": 2, "head_dim": 16},
        audio_config=None,
    ),
    "glm4v": lambda: tf.Glm4vConfig(
        text_config=TEXT
        | {"head_dim": 16, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
        vision_config=QWEN_VISION | {"image_size": 28, "patch_size": 14},
        image_token_id=3,
        video_token_id=4,
    ),
    "got_ocr2": lambda: tf.GotOcr2Config(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=VISION
        | {"mlp_dim": 48, "image_size": 28, "output_channels": 64, "global_attn_indexes": [1], "window_size": 2},
        image_token_index=3,
    ),
    "idefics3": lambda: tf.Idefics3Config(
        text_config=TEXT | {"model_type": "llama"}, vision_config=VISION, scale_factor=1, image_token_id=3
    ),
    "internvl": lambda: tf.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=3,
    ),
    "lfm2_vl": lambda: tf.Lfm2VlConfig(
        text_config=TEXT | {"layer_types": ["conv", "full_attention", "conv"]}, vision_config=VISION, image_token_id=3
    ),
    "llama4": lambda: tf.Llama4Config(
        text_config=TEXT
        | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"attention_chunk_size": 16, "no_rope_layers": [1, 0, 1], "floor_scale": 8, "moe_layers": [0, 1]},
        vision_config=VISION
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 128},
        image_token_index=3,
    ),
    "llava": lambda: tf.LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=CLIP,
        image_token_index=3,
    ),
    "lighton_ocr": lambda: tf.LightOnOcrConfig(
        text_config=TEXT | {"model_type": "qwen3", "head_dim": 16},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 16},
        image_token_id=3,
    ),
    "llava_next": lambda: tf.LlavaNextConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=CLIP, image_token_index=3
    ),
    "llava_onevision": lambda: tf.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"}, vision_config=VISION, image_token_index=3, video_token_index=4
    ),
    "vipllava": lambda: tf.VipLlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=CLIP,
        vision_feature_layers=[-1, -2],
        image_token_index=3,
    ),
    "mistral3": lambda: tf.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "head_dim": 16},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 16},
        image_token_index=3,
    ),
    "mllama": lambda: tf.MllamaConfig(
        text_config=TEXT
        | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        vision_config={key: VISION[key] for key in ("hidden_size", "intermediate_size", "image_size", "patch_size")}
        | {"num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2, "intermediate_layers_indices": [0]}
        | {"vision_output_dim": 64},
        image_token_index=128,
    ),
    "paligemma": lambda: tf.PaliGemmaConfig(
        text_config=TEXT | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 16},
        vision_config=VISION | {"model_type": "siglip_vision_model"},
        image_token_index=3,
        projection_dim=64,
    ),
    "qwen2_vl": lambda: tf.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": dict(ROPE)},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1},
        **QWEN_TOKENS,
    ),
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": dict(ROPE)}, vision_config=QWEN_VISION, **QWEN_TOKENS
    ),
    "qwen3_vl": lambda: tf.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 16, "rope_parameters": dict(ROPE)},
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0]},
        **QWEN_TOKENS,
    ),
    "qwen3_5": lambda: tf.Qwen3_5Config(text_config=TEXT | LINEAR, vision_config=QWEN_VISION, **QWEN_TOKENS),
    "qwen3_5_moe": lambda: tf.Qwen3_5MoeConfig(
        text_config=TEXT | LINEAR | EXPERTS, vision_config=QWEN_VISION, **QWEN_TOKENS
    ),
    "qwen3_vl_moe": lambda: tf.Qwen3VLMoeConfig(
        text_config=TEXT | EXPERTS | {"moe_intermediate_size": 24, "head_dim": 16, "rope_parameters": dict(ROPE)},
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0]},
        **QWEN_TOKENS,
    ),
    "smolvlm": lambda: tf.SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=VISION, scale_factor=1, image_token_id=3
    ),
}


def save_checkpoint(family: str, directory: Path) -> tf.PreTrainedModel:
    """A tiny checkpoint as on the hub, with random weights everywhere, also where a family starts from ones."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        whole = tf.AutoModelForImageTextToText.from_config(with_other_tower(CONFIGS[family]()))
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    whole.save_pretrained(directory)
    CONFIGS[family]().save_pretrained(directory)
    if family == "gemma3":
        name_as_on_the_hub(directory / "model.safetensors")
    if family == "qwen3_vl_moe":  # on the hub, the inputs of its experts come first
        file = directory / "model.safetensors"
        turned = {name: each.mT.contiguous() if ".experts." in name else each for name, each in load_file(file).items()}
        save_file(turned, file, metadata={"format": "pt"})
    (directory / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    return whole_of(directory)


def whole_of(directory: Path) -> tf.PreTrainedModel:
    """The checkpoint as the class that it names; every tensor is used, and none is missing."""
    loaded: Any = tf.AutoModelForImageTextToText.from_pretrained(
        directory,
        config=with_other_tower(tf.AutoConfig.from_pretrained(directory)),
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    model, report = loaded
    assert not any(report.values()), report
    whole: tf.PreTrainedModel = model.eval()
    return whole


@torch.no_grad()
def logits_of(whole: tf.PreTrainedModel) -> Tensor:
    """Those of the class, and what these classes leave out of what their language model does, as vLLM does it too."""
    logits: Tensor = whole(input_ids=TOKENS[None]).logits[0]
    text = whole.config.get_text_config()
    if whole.config.model_type in ("aya_vision", "cohere2_vision"):
        return logits * text.logit_scale
    if whole.config.model_type == "paligemma":
        return (logits / text.final_logit_softcapping).tanh() * text.final_logit_softcapping
    return logits


def reshard(model: tf.PreTrainedModel) -> None:
    """Without a backward pass, weights stay gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def scored(model: tf.PreTrainedModel) -> Tensor:
    """Logits of two copies in one packed row; those of the second."""
    positions = torch.arange(len(TOKENS)).repeat(2)[None]
    with torch.no_grad():
        logits: Tensor = score_tokens(model, TOKENS.repeat(2)[None], positions, lambda hidden, head: head(hidden))
    return logits[len(TOKENS) :]


@pytest.mark.parametrize("family", [*sorted(CONFIGS), "qwen3_5_moe, stacked experts"])
def test_the_language_part_is_trained_alone_and_exported_in_the_whole(
    family: str, tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    start, export = tmp_path / "start", tmp_path / "export"
    family, _, stacked = family.partition(", ")
    whole = save_checkpoint(family, start)
    if stacked:
        save_file(whole.state_dict(), start / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(name=str(start), attn="sdpa", seq_len=128)
    model = setup_model(config, mesh)
    assert not any("vis" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(scored(model), logits_of(whole), rtol=1e-4, atol=1e-5)

    reshard(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    tokenizer = setup_tokenizer(TokenizerConfig(name=str(tiny_model_dir)), config)
    export_model(model, tokenizer, export, WeightCheckpointConfig(), torch.float32)
    before, after = (load_file(directory / "model.safetensors") for directory in (start, export))
    assert before.keys() == after.keys()
    sent = gather_weights(model, torch.float32)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    unchanged = {name for name in sent.keys() - changed if not name.endswith("layer_scalar")}  # Gemma 4's is a buffer
    assert (unchanged, changed <= sent.keys()) == (set(), True), "the language part changes, and nothing else"
    torch.testing.assert_close(logits_of(whole_of(export)), scored(model), rtol=1e-4, atol=1e-5)
    own, written = (json.loads((directory / "config.json").read_text()) for directory in (start, export))
    assert own == written
    assert (export / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'

    if ModelDescription(own).embedded_fault() is None:
        served, _ = load_model(str(start), "float32", torch.device("cpu"))
        load_weights(served, sent, export)
        exported, _ = load_model(str(export), "float32", torch.device("cpu"))
        pairs = zip(served.parameters(), exported.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        load_weights(served, read_weights(export), export)


def test_every_separable_family_is_compared() -> None:
    assert CONFIGS.keys() == SEPARABLE_FAMILIES
    described = {family: ModelDescription(make().to_dict()) for family, make in CONFIGS.items()}
    assert {family for family, found in described.items() if found.training_fault() is not None} == set()
    decoded = {family for family, found in described.items() if found.embedded_fault() is None}
    assert decoded == SEPARABLE_FAMILIES - {"gemma3n", "llama4"}


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_an_adapter_fits_the_class_of_the_checkpoint_and_is_continued(family: str, mesh: Mesh, tmp_path: Path) -> None:
    start, adapter = tmp_path / "start", tmp_path / "adapter"
    whole = save_checkpoint(family, start)
    lora: dict[str, Any] = {
        "rank": 4,
        "alpha": 8.0,
        "target_modules": ["all-linear"],
        "rank_pattern": {"model.layers.0": 8},
    }
    model = setup_model(ModelConfig(name=str(start), attn="sdpa", seq_len=128, lora=LoRAConfig(**lora)), mesh)
    reshard(model)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    save_adapter(gather_adapter(model, torch.float32), adapter)
    loaded = peft.PeftModel.from_pretrained(whole, adapter)
    missing = {name for name, _ in loaded.named_parameters() if "lora_" in name and "vis" in name}
    assert missing == set(), "the tower has layers of the same names, without adapters"
    torch.testing.assert_close(logits_of(loaded), scored(model), rtol=1e-4, atol=1e-5)
    if family in ("gemma3", "qwen3_5_moe"):
        settings = LoRAConfig(**lora, path=str(adapter))
        assert lora_fault(settings, adapter) is None, "patterns are of the language model, and names of the whole"
        continued = setup_model(ModelConfig(name=str(start), attn="sdpa", seq_len=128, lora=settings), mesh)
        assert torch.equal(scored(continued), scored(model))
        merged = setup_model(ModelConfig(name=str(start), attn="sdpa", seq_len=128, adapter=str(adapter)), mesh)
        torch.testing.assert_close(scored(merged), scored(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "qwen3_vl_moe"])
def test_language_model_only_exports_a_causal_model_and_names_what_it_leaves_out(
    family: str, tiny_model_dir: Path, mesh: Mesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start, export = tmp_path / "start", tmp_path / "export"
    save_checkpoint(family, start)
    config = ModelConfig(name=str(start), attn="sdpa", seq_len=128, language_model_only=True)
    caplog.set_level("INFO", logger=get_logger().name)
    model = setup_model(config, mesh)
    expected = scored(model)
    reshard(model)
    tokenizer = setup_tokenizer(TokenizerConfig(name=str(tiny_model_dir)), config)
    export_model(model, tokenizer, export, WeightCheckpointConfig(), torch.float32)
    loaded: Any = tf.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    alone, report = loaded
    assert not any(report.values()), report
    torch.testing.assert_close(logits_of(alone), expected, rtol=1e-4, atol=1e-5)
    held, before = load_file(export / "model.safetensors"), load_file(start / "model.safetensors")
    assert (
        f"as {type(alone).__name__}, without {len(before) - len(held)} other tensors of the checkpoint" in caplog.text
    )
    assert gather_weights(model, torch.float32).keys() <= before.keys(), "an engine of the run has the whole checkpoint"


def test_new_embeddings_are_the_mean_of_the_others(tiny_model_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    start, export = tmp_path / "start", tmp_path / "export"
    save_checkpoint("gemma3", start)
    tokenizer = setup_tokenizer(
        TokenizerConfig(name=str(tiny_model_dir), add_tokens=[f"<note{each}>" for each in range(40)]), ModelConfig()
    )
    assert embeddings_needed(tokenizer) == 140
    model = setup_model(ModelConfig(name=str(start), attn="sdpa"), mesh, embeddings=140)
    reshard(model)
    (before,) = (each for name, each in load_file(start / "model.safetensors").items() if "embed_tokens" in name)
    rows = full_tensor(model.get_input_embeddings().weight)
    assert torch.equal(rows[:128], before)
    torch.testing.assert_close(rows[128:], before.mean(0).expand(12, -1))
    export_model(model, tokenizer, export, WeightCheckpointConfig(), torch.float32)
    torch.testing.assert_close(logits_of(whole_of(export)), scored(model), rtol=1e-4, atol=1e-5)
    assert logits_of(whole_of(export)).shape[-1] == 140


def test_a_checkpoint_without_its_language_part_is_one_line(mesh: Mesh, tmp_path: Path) -> None:
    save_checkpoint("llava", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"expected one weight .* of a language model, found none"):
        setup_model(ModelConfig(name=str(tmp_path), attn="sdpa"), mesh)

"""Tiny models of every causal language model family that Transformers registers, with thresholds that short sequences
pass: windows of 8 tokens, rotary frequencies that change after 24."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SEQ_LEN = 56
"""Longest sequence of the runs, in tokens: beyond every threshold of the tiny configs, unless a case says otherwise."""

VOCABULARY = 64
WINDOW = 8
ORIGINAL_CONTEXT = 24
"""Length after which length-dependent rotary frequencies change."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # The same sizes under the names of different families.
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "d_embed"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("n_positions", "max_seq_len"), 64),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    # Mixtures of experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    # Multi-head latent attention.
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    # Linear attention and state spaces.
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "ssm_state_size"), 8),
    "n_groups": 1,
    # Low enough to change the results of tiny models.
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 2.0),
}
_WHERE_SET = {"attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "attention_chunk_size"}
"""Keys that are made small only in families whose default sets them."""

_LATENT_ATTENTION = {"num_key_value_heads": 4}
_MAMBA = {"mamba_d_state": 8, "mamba_chunk_size": 16}
_FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "glm4_moe_lite": _LATENT_ATTENTION,
    "minicpm3": _LATENT_ATTENTION | {"dim_model_base": 16},
    "youtu": _LATENT_ATTENTION,
    "dots1": {"n_shared_experts": 1, "num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, **_MAMBA},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, **_MAMBA},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        **_MAMBA,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8},
    # Of each kind of layer one that shares keys and values with an earlier one.
    "gemma3n_text": {
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 8},
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0]},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # Chunked attention with rotary positions, full attention with a temperature and none. Experts in one layer.
    "llama4_text": {"no_rope_layers": [1, 0], "floor_scale": 8, "moe_layers": [1], "intermediate_size_mlp": 48},
}

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "Encoders, whose tokens see later ones": tuple(
        "bert bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod reformer".split()
    ),
    "Decoders of models with an encoder": tuple(
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr "
        "whisper".split()
    ),
    "Not made tiny here": tuple(
        "axk1 axk2 blt cohere_compass_text dbrx deepseek_v32 gemma4_assistant gemma4_text "
        "gemma4_unified_assistant glm_moe_dsa kimi_linear longcat_flash mpt zamba zamba2 zaya".split()
    ),
    "Models with images or sound": tuple(
        "aria_text emu3 fuyu gemma4_unified git got_ocr2 moshi musicgen "
        "musicgen_melody phi4_multimodal qwen4_exp".split()
    ),
    "Checkpoints with a vision tower, in the second table": tuple(
        "gemma3 gemma3n gemma4 llama4 mllama qwen3_5 qwen3_5_moe".split()
    ),
}


@dataclass(frozen=True)
class Case:
    """One row of the table: a family with settings that matter to its numbers."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    rope_depends_on_length: bool = False
    """The reference then continues every sequence to the run's `seq_len`."""
    seq_len: int = SEQ_LEN

    @property
    def name(self) -> str:
        return f"{self.family}, {self.detail}" if self.detail else self.family

    @property
    def has_other_weights(self) -> bool:
        """Whether its weights have other names than those of the family, or it is the family."""
        return self.detail in ("", "tied head", "biases")


def families() -> list[str]:
    """The model types that have a row in the table."""
    left_out = {family for names in LEFT_OUT.values() for family in names}
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - left_out)


def cases() -> Iterator[Case]:
    """All rows: every family with its defaults, then settings that have gone wrong in some engine."""
    for family in families():
        yield Case(family)
    for family in ("llama", "qwen3", "mistral"):
        yield Case(family, {"tie_word_embeddings": True}, "tied head")
    for family in ("llama", "qwen2", "qwen3", "phi3", "olmo2"):
        yield Case(family, {"sliding_window": WINDOW}, "leftover sliding_window")
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    for family in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        yield Case(family, windows, "use_sliding_window")
    for family in ("gpt2", "gpt_neox", "opt", "seed_oss", "granite", "llama", "phi", "bloom", "stablelm"):
        yield Case(family, dropouts(family), "all dropouts 0.3")
    yield Case("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, "no soft caps")
    yield Case("gpt_neox", {"use_parallel_residual": False}, "sequential residual")
    yield Case("falcon", {"alibi": True}, "alibi")
    yield Case("llama", {"attention_bias": True, "mlp_bias": True}, "biases")
    yield Case("mixtral", {"router_jitter_noise": 0.3}, "router jitter")
    yield from _rope_cases()


def _rope_cases() -> Iterator[Case]:
    base = {"rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL_CONTEXT}
    kinds: dict[str, dict[str, Any]] = {
        "linear": {"factor": 2.0},
        "yarn": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
    for kind, numbers in kinds.items():
        yield Case("llama", {"rope_parameters": base | numbers | {"rope_type": kind}}, f"{kind} rope")
    factors = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 4.0, 8.0, 16.0]}
    longrope = base | factors | {"rope_type": "longrope", "factor": 64 / ORIGINAL_CONTEXT}
    dynamic = {"rope_theta": 10000.0, "factor": 4.0, "rope_type": "dynamic"}
    for family in ("phi3", "phimoe", "llama", "minicpm3"):
        settings = {"rope_parameters": longrope, "original_max_position_embeddings": ORIGINAL_CONTEXT}
        if family == "phimoe":
            settings["rope_parameters"] = longrope | {"short_mscale": 1.0, "long_mscale": 1.3}
        for seq_len in (ORIGINAL_CONTEXT, SEQ_LEN):
            yield Case(family, settings, f"longrope, seq_len {seq_len} of {ORIGINAL_CONTEXT}", True, seq_len)
    for family in ("llama", "qwen2", "granite"):
        settings = {"rope_parameters": dynamic, "max_position_embeddings": ORIGINAL_CONTEXT}
        for seq_len in (ORIGINAL_CONTEXT, SEQ_LEN):
            yield Case(family, settings, f"dynamic rope, seq_len {seq_len} of {ORIGINAL_CONTEXT}", True, seq_len)


@cache
def _defaults(family: str) -> PretrainedConfig:
    return CONFIG_MAPPING[family]()


def dropouts(family: str) -> dict[str, float]:
    """Every dropout of a family's config, at 0.3."""
    return {key: 0.3 for key in _defaults(family).to_dict() if "drop" in key}


def tiny_config(case: Case) -> PretrainedConfig:
    """The family's config with its sizes reduced, and the case's settings."""
    defaults, config_class = _defaults(case.family), CONFIG_MAPPING[case.family]
    names = {*defaults.to_dict(), *config_class.attribute_map}
    small = {key: value for key, value in SIZES.items() if key in names}
    small = {key: value for key, value in small.items() if key not in _WHERE_SET or getattr(defaults, key, None)}
    if getattr(defaults, "sliding_window", None):
        small["sliding_window"] = WINDOW
    if getattr(defaults, "attention_chunk_size", None):
        small["attention_chunk_size"] = WINDOW
    return config_class(**small | _FAMILY_SETTINGS.get(case.family, {}) | case.settings)


def save_tiny_model(case: Case, directory: Path) -> PreTrainedModel:
    """Save a model with random weights, and return it with Transformers' eager attention in evaluation mode.

    Matrices are larger than usual, so that attention is far from uniform and errors show.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(case), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5)
            elif name.endswith(("_proj.bias", ".sinks")):
                parameter.normal_()
    model.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


_TEXT: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 128, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
_VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
_CLIP = _VISION | {"model_type": "clip_vision_model"}
_QWEN_VISION = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
_QWEN_TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 2, "head_dim": 16},
}
_SLIDING, _FULL = ["sliding_attention"], ["full_attention"]
_EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

WHOLE: dict[str, Callable[[], PretrainedConfig]] = {
    "aya_vision": lambda: tf.AyaVisionConfig(
        text_config=_TEXT | {"model_type": "cohere2", "sliding_window": 16}, vision_config=_VISION, image_token_index=3
    ),
    "cohere2_vision": lambda: tf.Cohere2VisionConfig(
        text_config=_TEXT | {"model_type": "cohere2", "sliding_window": 16}, vision_config=_VISION, image_token_id=3
    ),
    "gemma3": lambda: tf.Gemma3Config(
        text_config=_TEXT | {"head_dim": 16, "sliding_window": 16}, vision_config=_VISION, mm_tokens_per_image=1
    ),
    "gemma3n": lambda: tf.Gemma3nConfig(
        text_config=_TEXT
        | {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 5, "vocab_size_per_layer_input": 120}
        | {"hidden_size_per_layer_input": 8, "laurel_rank": 8, "num_kv_shared_layers": 2}
        | {"activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0], "layer_types": (_SLIDING + _FULL) * 2 + _FULL},
        vision_config={"hidden_size": 32, "architecture": "test_efficientnet"},
        audio_config={"hidden_size": 32, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1},
    ),
    "gemma4": lambda: tf.Gemma4Config(
        text_config=_TEXT | {"head_dim": 16, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8},
        vision_config=_VISION | {"num_key_value_heads": 2, "head_dim": 16},
        audio_config=None,
    ),
    "glm4v": lambda: tf.Glm4vConfig(
        text_config=_TEXT
        | {"head_dim": 16, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
        vision_config=_QWEN_VISION | {"image_size": 28, "patch_size": 14},
        image_token_id=3,
        video_token_id=4,
    ),
    "got_ocr2": lambda: tf.GotOcr2Config(
        text_config=_TEXT | {"model_type": "qwen2"},
        vision_config=_VISION
        | {"mlp_dim": 48, "image_size": 28, "output_channels": 64, "global_attn_indexes": [1], "window_size": 2},
        image_token_index=3,
    ),
    "idefics3": lambda: tf.Idefics3Config(
        text_config=_TEXT | {"model_type": "llama"}, vision_config=_VISION, scale_factor=1, image_token_id=3
    ),
    "internvl": lambda: tf.InternVLConfig(
        text_config=_TEXT | {"model_type": "qwen2"},
        vision_config=_VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=3,
    ),
    "lfm2_vl": lambda: tf.Lfm2VlConfig(
        text_config=_TEXT | {"layer_types": ["conv", "full_attention", "conv"]}, vision_config=_VISION, image_token_id=3
    ),
    "llama4": lambda: tf.Llama4Config(
        text_config=_TEXT
        | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"attention_chunk_size": 16, "no_rope_layers": [1, 0, 1], "floor_scale": 8, "moe_layers": [0, 1]},
        vision_config=_VISION
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 128},
        image_token_index=3,
    ),
    "llava": lambda: tf.LlavaConfig(
        text_config=_TEXT | {"model_type": "llama"},
        vision_config=_CLIP,
        image_token_index=3,
    ),
    "lighton_ocr": lambda: tf.LightOnOcrConfig(
        text_config=_TEXT | {"model_type": "qwen3", "head_dim": 16},
        vision_config=_VISION | {"model_type": "pixtral", "head_dim": 16},
        image_token_id=3,
    ),
    "llava_next": lambda: tf.LlavaNextConfig(
        text_config=_TEXT | {"model_type": "llama"}, vision_config=_CLIP, image_token_index=3
    ),
    "llava_onevision": lambda: tf.LlavaOnevisionConfig(
        text_config=_TEXT | {"model_type": "qwen2"}, vision_config=_VISION, image_token_index=3, video_token_index=4
    ),
    "vipllava": lambda: tf.VipLlavaConfig(
        text_config=_TEXT | {"model_type": "llama"},
        vision_config=_CLIP,
        vision_feature_layers=[-1, -2],
        image_token_index=3,
    ),
    "mistral3": lambda: tf.Mistral3Config(
        text_config=_TEXT | {"model_type": "mistral", "head_dim": 16},
        vision_config=_VISION | {"model_type": "pixtral", "head_dim": 16},
        image_token_index=3,
    ),
    "mllama": lambda: tf.MllamaConfig(
        text_config=_TEXT
        | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        vision_config={key: _VISION[key] for key in ("hidden_size", "intermediate_size", "image_size", "patch_size")}
        | {"num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2, "intermediate_layers_indices": [0]}
        | {"vision_output_dim": 64},
        image_token_index=128,
    ),
    "paligemma": lambda: tf.PaliGemmaConfig(
        text_config=_TEXT | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 16},
        vision_config=_VISION | {"model_type": "siglip_vision_model"},
        image_token_index=3,
        projection_dim=64,
    ),
    "qwen2_vl": lambda: tf.Qwen2VLConfig(
        text_config=_TEXT | {"rope_parameters": dict(_ROPE)},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1},
        **_QWEN_TOKENS,
    ),
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLConfig(
        text_config=_TEXT | {"rope_parameters": dict(_ROPE)}, vision_config=_QWEN_VISION, **_QWEN_TOKENS
    ),
    "qwen3_vl": lambda: tf.Qwen3VLConfig(
        text_config=_TEXT | {"head_dim": 16, "rope_parameters": dict(_ROPE)},
        vision_config=_QWEN_VISION | {"deepstack_visual_indexes": [0]},
        **_QWEN_TOKENS,
    ),
    "qwen3_5": lambda: tf.Qwen3_5Config(text_config=_TEXT | _LINEAR, vision_config=_QWEN_VISION, **_QWEN_TOKENS),
    "qwen3_5_moe": lambda: tf.Qwen3_5MoeConfig(
        text_config=_TEXT | _LINEAR | _EXPERTS, vision_config=_QWEN_VISION, **_QWEN_TOKENS
    ),
    "qwen3_vl_moe": lambda: tf.Qwen3VLMoeConfig(
        text_config=_TEXT | _EXPERTS | {"moe_intermediate_size": 24, "head_dim": 16, "rope_parameters": dict(_ROPE)},
        vision_config=_QWEN_VISION | {"deepstack_visual_indexes": [0]},
        **_QWEN_TOKENS,
    ),
    "smolvlm": lambda: tf.SmolVLMConfig(
        text_config=_TEXT | {"model_type": "llama"}, vision_config=_VISION, scale_factor=1, image_token_id=3
    ),
}
"""Tiny checkpoints with a vision tower, by the model type."""


def config_of_whole(family: str) -> dict[str, Any]:
    """The `config.json` of one of `WHOLE`, laid out as the hub's: Qwen2-VL's have no part for the language model."""
    config = json.loads(WHOLE[family]().to_json_string())
    return config.pop("text_config") | config if family in ("qwen2_vl", "qwen2_5_vl") else config

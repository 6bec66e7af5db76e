"""Models of the kit: shapes of well-known models with random weights. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _QWEN3
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
    "135M": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "0.6B": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": _QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def config_dir(shape: str, parent: Path) -> Path:
    """A model directory with nothing but a config, for a trainer that starts from random weights."""
    directory = parent / f"config-{shape}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[shape]))
    return directory


def model_dir(shape: str, parent: Path, device: str, dtype: str = "bfloat16") -> Path:
    """A model directory with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = parent / f"model-{shape}-{dtype}"
    if not (directory / "model.safetensors").exists():
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(config_dir(shape, parent)), dtype=getattr(torch, dtype)
            )
        model.save_pretrained(directory, max_shard_size="100GB")
    return directory

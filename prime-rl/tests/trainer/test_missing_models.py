"""A model or a tokenizer that is not there is told under the key that the user wrote."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from prime_rl.configs.model import ModelConfig, TokenizerConfig
from prime_rl.inference.embedded.engine.model import load_model
from prime_rl.inference.embedded.errors import EngineError
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh


@pytest.mark.parametrize(("tokenizer", "key"), [(None, "model.name"), ("/gone/tokenizer", "tokenizer.name")])
def test_a_missing_tokenizer_is_told_under_the_key_that_names_it(tokenizer: str | None, key: str) -> None:
    name = tokenizer or "/gone/model"
    with pytest.raises(ModelError, match=f"^{key} = {name}: no such directory$"):
        setup_tokenizer(TokenizerConfig(name=tokenizer), ModelConfig(name="/gone/model"))


def without(names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names.split():
            del tensors[name]

    return change


def smaller(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (without("lm_head.weight"), "its files lack 1 weight (lm_head.weight): copy or download them again"),
        (
            without("model.norm.weight model.layers.1.mlp.up_proj.weight"),
            "its files lack 2 weights (model.layers.1.mlp.up_proj.weight, model.norm.weight): copy or download them",
        ),
        (smaller, "model.norm.weight has shape [3] in its files, and [64] by its config.json"),
    ],
    ids=["head", "layer", "shape"],
)
def test_no_weight_is_random_because_the_files_lack_it(
    tmp_path: Path, mesh: Mesh, change: Callable[[dict[str, Tensor]], None], fault: str
) -> None:
    directory = untied_model(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=re.escape(fault)):
        setup_model(ModelConfig(name=str(directory), attn="sdpa"), mesh)
    with pytest.raises(EngineError, match=re.escape(fault)):
        load_model(str(directory), "auto", torch.device("cpu"))


def test_weights_that_the_class_does_not_use_are_named(
    tmp_path: Path, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    directory = untied_model(tmp_path)
    tensors = load_file(directory / "model.safetensors") | {"model.tower.weight": torch.ones(3)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    setup_model(ModelConfig(name=str(directory), attn="sdpa"), mesh)
    assert "does not use 1 weight (model.tower.weight) of its files" in caplog.text


def untied_model(directory: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(**sizes, **heads, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory

"""Checkpoints with a vision tower: their language part is trained alone, and exports are whole checkpoints again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from model_cases import WHOLE, config_of_whole
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


def save_checkpoint(family: str, directory: Path) -> tf.PreTrainedModel:
    """A tiny checkpoint as on the hub, with random weights everywhere, also where a family starts from ones."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        whole = tf.AutoModelForImageTextToText.from_config(with_other_tower(WHOLE[family]()))
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    whole.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config_of_whole(family)))
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


@pytest.mark.parametrize("family", [*sorted(WHOLE), "qwen3_5_moe, stacked experts"])
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
    assert WHOLE.keys() == SEPARABLE_FAMILIES
    described = {family: ModelDescription(config_of_whole(family)) for family in WHOLE}
    assert {family for family, found in described.items() if found.training_fault() is not None} == set()
    decoded = {family for family, found in described.items() if found.embedded_fault() is None}
    assert decoded == SEPARABLE_FAMILIES - {"gemma3n", "llama4"}


@pytest.mark.parametrize("family", sorted(WHOLE))
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

"""Frozen weights in NF4: compared with PEFT on bitsandbytes, over processes, resumes and weight updates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: `uv sync --inexact --extra quantization`")

import peft
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft.utils.loftq_utils import _low_rank_decomposition
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.shared import FileSystemTransportConfig
from prime_rl.configs.trainer import DebugModelConfig, LoRAConfig, ModelConfig, TrainerConfig
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.checkpoints.weights import gather_weights, save_adapter
from prime_rl.trainer.kernels.product_choice import ProductChoice
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.lora import LowRank, gather_adapter
from prime_rl.trainer.model.quantized import QuantizedLinear, Quantizing
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.perf import flops_per_token
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.run import setup_reference, train
from prime_rl.transport import setup_batch_sender
from prime_rl.transport.loading import Checkpoint, full_tensor, put_own
from prime_rl.transport.messages import TrainingBatch, TrainingSample

TOKENS = torch.arange(4, 100, 3)


def quantized_settings(is_double: bool, dtype: torch.dtype = torch.float32, skipped: str | None = None) -> Any:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=is_double,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["lm_head", skipped] if skipped else None,
    )


@pytest.fixture
def packed_dir(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model as checkpoints of the hub in 4 bits: in bfloat16, one layer left out."""
    settings = quantized_settings(getattr(request, "param", True), torch.bfloat16, "model.layers.0.mlp.up_proj")
    made = AutoModelForCausalLM.from_pretrained(tiny_model_dir, quantization_config=settings, dtype=torch.bfloat16)
    folder = tmp_path / "packed"
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "packed_dir", "comes_packed"),
    [("nf4", True, False), ("nf4", False, False), ("nf4", True, True), ("nf4", False, True), ("int8", True, False)],
    indirect=["packed_dir"],
)
def test_loss_gradients_and_export_are_those_of_peft_on_bitsandbytes(
    request: pytest.FixtureRequest,
    tiny_model_dir: Path,
    packed_dir: Path,
    mesh: Mesh,
    tmp_path: Path,
    kind: str,
    comes_packed: bool,
) -> None:
    is_double = request.node.callspec.params["packed_dir"]
    quantization = None if comes_packed else {"type": kind, "double": is_double}
    folder = packed_dir if comes_packed else tiny_model_dir
    lora = LoRAConfig(rank=4, alpha=8.0, target_modules=["q_proj", "down_proj"])
    model = setup_model(ModelConfig(name=str(folder), lora=lora, quantization=quantization), mesh)
    generator = torch.Generator().manual_seed(0)
    for adapter in (module for module in model.modules() if isinstance(module, LowRank)):
        put_own(adapter.B, torch.randn(adapter.B.shape, generator=generator) / 10)
    logits = score_tokens(model, TOKENS[None], torch.arange(len(TOKENS))[None], lambda hidden, head: head(hidden))
    loss = nn.functional.cross_entropy(logits[:-1], TOKENS[1:])
    loss.backward()
    ours = {name: full_tensor(each.grad) for name, each in model.named_parameters() if each.requires_grad}
    exported = gather_weights(model, torch.float32)

    save_adapter(gather_adapter(model, torch.float32), tmp_path / "adapter")
    settings = quantized_settings(is_double) if kind == "nf4" else BitsAndBytesConfig(load_in_8bit=True)
    given = {} if comes_packed else {"quantization_config": settings}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
    for layer in base.modules():
        if isinstance(layer, Linear4bit):
            layer.compute_dtype = torch.float32
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    theirs.train()  # in evaluation mode, bitsandbytes may compute in bfloat16 on a CPU
    expected = nn.functional.cross_entropy(theirs(TOKENS[None]).logits[0, :-1], TOKENS[1:])
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    names = {"base_model.model.": "", ".lora_A.default.weight": ".lora.A", ".lora_B.default.weight": ".lora.B"}
    gradients = {name: each.grad for name, each in theirs.named_parameters() if each.requires_grad}
    assert len(gradients) == len(ours) == 8
    for name, gradient in gradients.items():
        for old, new in names.items():
            name = name.replace(old, new)
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-7)
    # An export is a plain model that computes the same. Published weights are 9% away, as normal values in NF4 are, or
    # in 8 bits by the root of a twelfth of a step, of 127 up to the largest of a row.
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    published = {name: each.clone() for name, each in plain.state_dict().items()}
    assert plain.load_state_dict(exported, strict=False).missing_keys == ["lm_head.weight"]
    torch.testing.assert_close(plain(TOKENS[None]).logits, theirs(TOKENS[None]).logits, rtol=1e-5, atol=1e-5)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        stored_as = torch.bfloat16 if comes_packed else torch.float32
        assert torch.equal(exported[name], published[name].to(stored_as).float())
    own, given = (weights["model.layers.1.mlp.up_proj.weight"] for weights in (exported, published))
    least, most = (0.08, 0.1) if kind == "nf4" else (0.004, 0.008)
    assert least < (own - given).norm() / given.norm() < most


@pytest.fixture
def base(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """SFT on questions whose answer repeats the question."""
    words = ["heart", "lung", "spleen", "aorta", "femur", "tibia", "iris", "uvula"]
    file = tmp_path / "echo.jsonl"
    file.write_text("".join(json.dumps({"prompt": a + b, "completion": a + b}) + "\n" for a in words for b in words))
    model = {"name": str(tiny_model_dir), "attn": "sdpa", "lora": {"rank": 8}, "quantization": "nf4"}
    data = {"name": str(file), "batch_size": 4, "micro_batch_size": 2, "seq_len": 64}
    return {"device": "cpu", "model": model, "data": data, "optim": {"lr": 1e-2}, "max_steps": 6}


def test_two_processes_train_like_one_and_resume_bit_identically(
    base: dict[str, Any], tmp_path: Path, assert_two_processes_train_like_one: Callable[[SFTConfig], None]
) -> None:
    assert_two_processes_train_like_one(SFTConfig(**{**base, "output_dir": tmp_path}))


@pytest.mark.parametrize("packed_dir", [True, False], indirect=True)
def test_a_process_takes_its_own_rows_of_a_packed_weight(packed_dir: Path) -> None:
    """Rows that two processes hold make the whole, in bytes and as numbers, which are bitsandbytes'."""
    held = Checkpoint.open(packed_dir.glob("*.safetensors")).tensors
    whole = AutoModelForCausalLM.from_pretrained(packed_dir).model.layers[1].mlp.down_proj.weight
    source = held["model.layers.1.mlp.down_proj.weight"]
    expected = dequantize_4bit(whole.data, whole.quant_state).float()
    assert torch.equal(source[...].to(torch.bfloat16).float(), expected)
    parts = []
    for rows in (slice(0, 24), slice(24, 64)):
        layer = QuantizedLinear.convert(nn.Linear(128, rows.stop - rows.start), "nf4", source.double is not None)
        assert type("Part", (Quantizing,), {"index": (rows, slice(0, 128))})(layer, is_kept=True).take(source)
        parts.append(layer.packed)
        assert torch.equal(source[rows, 3:70], source[...][rows, 3:70])
    assert torch.equal(torch.cat(parts).view(-1, 1), whole.data)


def batch() -> TrainingBatch:
    tokens = torch.randint(4, 100, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    sample = TrainingSample(
        prompt_ids=tokens[:10],
        prompt_mask=[False] * 10,
        completion_ids=tokens[10:],
        completion_mask=[True] * 30,
        inference_logprobs=[-4.8] * 30,
        completion_temperatures=[1.0] * 30,
        advantage=1.0,
    )
    return TrainingBatch([sample], 0)


def test_rl_sends_the_engines_the_weights_that_it_computes_with(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Version 0 too: the published weights, which they have loaded, have other log-probabilities."""
    setup_batch_sender(FileSystemTransportConfig(), RunPaths(tmp_path).orchestrator).send(batch())
    model = {"name": str(tiny_model_dir), "attn": "sdpa", "seq_len": 128, "lora": {}, "quantization": "nf4"}
    settings = {"device": "cpu", "parity": {"on_mismatch": "off"}, "optim": {"lr": 1e-2}, "max_steps": 1}
    train(TrainerConfig(output_dir=tmp_path, model=model, **settings), RunPaths(tmp_path))
    paths = RunPaths(tmp_path).orchestrator
    assert stable_steps(paths.broadcasts) == [0, 1]
    start, first = (load_file(paths.broadcast(version) / "model.safetensors") for version in (0, 1))
    published = load_file(tiny_model_dir / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert start.keys() == published.keys()
    assert len(start[name].unique()) < len(published[name].unique()) / 2
    assert not torch.equal(start[name], first[name])


def test_random_weights_are_quantized_too(tiny_model_dir: Path, mesh: Mesh) -> None:
    settings = {"name": str(tiny_model_dir), "debug": DebugModelConfig(random_init=True), "lora": LoRAConfig()}
    plain, packed = (setup_model(ModelConfig(**settings, **more), mesh) for more in ({}, {"quantization": "nf4"}))
    one, other = (
        gather_weights(model, torch.float32)["model.layers.0.mlp.up_proj.weight"] for model in (plain, packed)
    )
    assert 0.08 < (one - other).norm() / one.norm() < 0.1
    assert flops_per_token(plain, 10) == flops_per_token(packed, 10)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_loftq_starts_at_what_quantization_took_from_the_weight(tiny_model_dir: Path, mesh: Mesh, kind: str) -> None:
    """With a scale of 1 it is PEFT's start of a model that bitsandbytes has quantized."""
    published = load_file(tiny_model_dir / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    weights = {}
    for init, alpha in (("default", 4.0), ("loftq", 4.0), ("loftq", 8.0)):
        lora = LoRAConfig(rank=4, alpha=alpha, init=init, target_modules=["down_proj"])
        model = setup_model(ModelConfig(name=str(tiny_model_dir), lora=lora, quantization=kind), mesh)
        weights[init, alpha] = gather_weights(model, torch.float32)[f"{name}.weight"]
        if (init, alpha) == ("loftq", 4.0):
            adapter = gather_adapter(model, torch.float32).state
            residual = published[f"{name}.weight"] - weights["default", 4.0]
            expected = _low_rank_decomposition(residual, reduced_rank=4)
            for ours, theirs in (("lora_A", "R"), ("lora_B", "L")):
                torch.testing.assert_close(adapter[f"base_model.model.{name}.{ours}.weight"], expected[theirs])
    plain, one, two = ((each - published[f"{name}.weight"]).norm() for each in weights.values())
    assert one < 0.95 * plain
    assert two == pytest.approx(one)


def test_a_copied_reference_is_quantized_as_the_policy(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    lora = {"modules_to_save": ["down_proj"], "target_modules": ["q_proj"]}
    model = {"name": str(tiny_model_dir), "attn": "sdpa", "seq_len": 128, "lora": lora, "quantization": "nf4"}
    config = TrainerConfig(output_dir=tmp_path, model=model, loss={"kl_coef": 0.1}, device="cpu", max_steps=1)
    products = ProductChoice.without_measuring()
    policy = setup_model(config.model, mesh)
    reference = setup_reference(config, policy, mesh, products)
    assert reference is not None
    one, other = (
        gather_weights(each, torch.float32)["model.layers.0.mlp.down_proj.weight"] for each in (policy, reference.model)
    )
    assert torch.equal(one, other)

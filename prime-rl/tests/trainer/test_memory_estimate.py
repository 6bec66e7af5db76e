"""`--estimate` is right about a trainer's memory: compared with what PyTorch's allocator gives out in a step.

`benchmarks/memory/estimate.py` does the same for many more models and settings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch.profiler import ProfilerActivity, profile

from prime_rl.checks.memory import ModelShape
from prime_rl.checks.memory.estimate import estimate_sft
from prime_rl.checks.memory.training import BLOCK_QUERIES, BLOCK_SCORES, tower_activations
from prime_rl.checks.model_description import VISION_FAMILIES, is_of_tower
from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.model import layouts
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.process.mesh import Mesh

from .vision_checkpoints import save_checkpoint

sys.path[:0] = [str(Path(__file__).parents[3] / "benchmarks" / "memory")]

from cases import HEADS, LLAMA, NF4, Case  # noqa: E402
from estimate import compared  # noqa: E402

TINY = LLAMA | {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1000}
GEMMA3 = LLAMA | {
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 128,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
BLOCKS = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 256}
WIDE, LARGE = TINY | {"vocab_size": 16000}, TINY | {"vocab_size": 100_000}
HEAD = {"rank": 8, "target_modules": ["q_proj", "lm_head"]}
FAMILY_TEXT = {
    "gemma3": "gemma3_text",
    "idefics3": "llama",
    "smolvlm": "llama",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}
FLOAT32 = {"compute_dtype": "float32"}
HALF = BLOCKS | {"num_hidden_layers": 6}
BUDGET = {"memory_gib": 0.06}
ROUNDED = FLOAT32 | {"optimization_dtype": "bfloat16"}
CHUNKS = {"mlp_chunk_tokens": 128}
BFLOAT16 = {"compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "case",
    [
        Case("as on a GPU", TINY, seq_len=384),
        Case("as on a GPU, recomputed", TINY, seq_len=384, settings=BFLOAT16 | {"ac": {}}),
        Case("as on a GPU, adapters", TINY, seq_len=384, settings=BFLOAT16 | {"lora": {"rank": 8}}),
        Case("as on a GPU, an adapter of the head", TINY, seq_len=384, settings=BFLOAT16 | {"lora": HEAD}),
        Case("as on a GPU, rl", TINY, kind="rl", seq_len=384),
        Case("as on a GPU, rl, top-k", WIDE, kind="rl", seq_len=384, top_k=8),
        Case("on a CPU, rl, top-k", WIDE, as_on_gpu=False, kind="rl", seq_len=384, top_k=8),
        Case("as on a GPU, mostly blocks", BLOCKS, seq_len=256, settings={"compute_dtype": "float32"}),
        Case("as on a GPU, mostly blocks, rl", BLOCKS, kind="rl", seq_len=128),
        Case("on a CPU", as_on_gpu=False),
        Case("on a CPU, half of the blocks recomputed", HALF, as_on_gpu=False, settings=FLOAT32 | {"ac": BUDGET}),
        Case("on a CPU, gemma3", GEMMA3, as_on_gpu=False, settings={"compute_dtype": "float32"}),
        Case("on a CPU, gemma3, long", GEMMA3, as_on_gpu=False, seq_len=1024, settings={"compute_dtype": "float32"}),
        Case("on a CPU, mostly attention", HEADS, as_on_gpu=False, seq_len=2048),
        Case("as on a GPU, quantized", BLOCKS, seq_len=128, settings=NF4),
        Case("on a CPU, quantized", BLOCKS, as_on_gpu=False, seq_len=128, settings=NF4),
        Case("as on a GPU, in 8 bits", BLOCKS, seq_len=128, settings=NF4 | {"quantization": "int8"}),
        Case("as on a GPU, rounded", WIDE, settings=ROUNDED, is_rounded=True),
        Case("as on a GPU, rounded, 8 bits", WIDE, settings=ROUNDED, optimizer="adamw8bit", is_rounded=True),
        Case("as on a GPU, 4 bits", BLOCKS, seq_len=128, settings=FLOAT32, optimizer="adamw4bit"),
        Case("on a CPU, adafactor", WIDE, as_on_gpu=False, settings=FLOAT32, optimizer="adafactor"),
        Case("as on a GPU, pissa", BLOCKS, seq_len=128, settings=FLOAT32 | {"lora": {"rank": 64, "init": "pissa"}}),
        Case("as on a GPU, chunks", BLOCKS, seq_len=1024, settings=FLOAT32 | CHUNKS),
        Case("as on a GPU, chunks, recomputed", BLOCKS, seq_len=1024, settings=BFLOAT16 | CHUNKS | {"ac": {}}),
        Case("as on a GPU, chunks, quantized", BLOCKS, seq_len=1024, settings=NF4 | CHUNKS),
        Case("on a CPU, chunks", BLOCKS, as_on_gpu=False, seq_len=1024, settings=FLOAT32 | CHUNKS),
        Case("on a CPU, chunks, adapters", HALF, as_on_gpu=False, settings=CHUNKS | {"lora": {"rank": 8}, "ac": {}}),
        Case("on a CPU, adapters", WIDE, as_on_gpu=False, settings={"lora": {"rank": 8}}),
        Case("as on a GPU, adapters, head in parts", LARGE, seq_len=640, settings=BFLOAT16 | {"lora": {"rank": 8}}),
    ],
    ids=lambda case: case.name,
)
def test_the_estimated_peak_of_a_step_is_the_measured_one(case: Case, mesh: Mesh) -> None:
    if "quantization" in case.settings or case.optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    result = compared(case, mesh)
    assert result.estimated == pytest.approx(result.measured, rel=0.1), result.row


def test_the_estimate_knows_the_limits_of_a_block() -> None:
    assert (BLOCK_QUERIES, BLOCK_SCORES) == (layouts._MOST_QUERIES, layouts._LONG_SCORES)


def peak_bytes(compute: Callable[[], object]) -> int:
    """Most bytes that PyTorch's allocator for CPUs has given out at one time, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = compute()
    events = (each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]")
    sizes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    del kept
    return max(accumulate(sizes))


@pytest.mark.parametrize("widths", [(64, 160, 4), (128, 512, 6)], ids=str)
@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_the_estimated_activations_of_a_tower_are_the_measured_ones(family: str, widths: tuple[int, int, int]) -> None:
    hidden, inner, layers = widths
    tower: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": inner}
    text = {**LLAMA, "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 160, "pad_token_id": 0}
    if family.startswith("qwen"):
        tower |= {"depth": layers, "num_heads": 4, "out_hidden_size": 64}
        tower |= {"fullatt_block_indexes": [1]} if family == "qwen2_5_vl" else {"deepstack_visual_indexes": [0, 1]}
    else:
        tower |= {"num_hidden_layers": layers, "num_attention_heads": 4, "image_size": 224, "patch_size": 14}
    config = tf.AutoConfig.for_model(
        family, text_config=text | {"model_type": FAMILY_TEXT[family]}, vision_config=tower
    )
    if family == "gemma3":
        config.mm_tokens_per_image = 16
    model = tf.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").base_model
    patches, ones = 1024, torch.ones(1, 4, 224, 224, dtype=torch.long)
    patch = 3 * 2 * config.vision_config.patch_size**2
    given, tokens = {
        "gemma3": ({"pixel_values": torch.randn(4, 3, 224, 224)}, 64),
        "idefics3": ({"pixel_values": torch.randn(1, 4, 3, 224, 224), "pixel_attention_mask": ones}, 256),
        "smolvlm": ({"pixel_values": torch.randn(1, 4, 3, 224, 224), "pixel_attention_mask": ones}, 256),
    }.get(
        family, ({"pixel_values": torch.randn(patches, patch), "image_grid_thw": torch.tensor([[1, 16, 16]] * 4)}, 256)
    )
    stated = config.to_dict() | ({} if family.startswith(("qwen", "gemma")) else {"scale_factor": 2})

    def features() -> object:
        return model.get_image_features(**given, return_dict=True)

    trained = peak_bytes(features)
    with torch.no_grad():
        frozen = peak_bytes(features)
    for measured, is_trained in ((trained, True), (frozen, False)):
        estimated = tower_activations(stated, tokens, 4, is_trained=is_trained)
        assert estimated == pytest.approx(measured, rel=0.1), (is_trained, measured / estimated)


QLORA = {"lora": {"rank": 4, "target_modules": ["all-linear"]}, "quantization": "nf4"}
SAVED = {"lora": {"rank": 2, "target_modules": ["qkv"], "modules_to_save": ["merger"]}}


@pytest.mark.parametrize(
    ("optim", "model"),
    [
        ({"type": "adamw", "stochastic_rounding": True}, {"optimization_dtype": "bfloat16"}),
        ({"type": "adafactor"}, {}),
        ({"type": "adamw"}, QLORA),
        ({"type": "adamw"}, SAVED),
    ],
    ids=["rounded", "adafactor", "nf4", "in part"],
)
def test_a_tower_that_is_trained_has_the_estimated_weights_gradients_and_states(
    optim: dict[str, Any], model: dict[str, Any], tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    if "quantization" in model:
        pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    save_checkpoint("qwen3_vl", tmp_path, tiny_model_dir)
    given = {"name": str(tmp_path), "attn": "sdpa", "vision": {"tower_lr": 1e-3}, **model}
    data = {"name": "rows.jsonl", "seq_len": 64, "batch_size": 1}
    config = SFTConfig(device="cpu", max_steps=1, model=given, data=data, optim=optim)
    shape = ModelShape.of(str(tmp_path))
    (trainer,) = estimate_sft(config, shape, 1, None, "cpu", {}).components

    trained = setup_model(config.model, mesh)
    optimizer = setup_optimizer(config.optim, trained)
    for parameter in trained.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    tower = [each for name, each in trained.named_parameters() if is_of_tower(name)]
    held = [state for each in tower for state in optimizer.state.get(each, {}).values() if state.ndim]
    held += [*tower, *(each.grad for each in tower if each.grad is not None)]
    gathered = 4 * shape.of_tower.parameters
    assert trainer.parts["tower"] - gathered == pytest.approx(sum(each.nbytes for each in held), rel=0.02)

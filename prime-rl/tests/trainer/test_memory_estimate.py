"""`--estimate` is right about a trainer's memory: compared with what PyTorch's allocator gives out in a step.

`benchmarks/memory/estimate.py` does the same for many more models and settings.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prime_rl.checks.memory.training import BLOCK_QUERIES, BLOCK_SCORES
from prime_rl.trainer.model import layouts
from prime_rl.trainer.process.mesh import Mesh

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
WIDE = TINY | {"vocab_size": 16000}
HEAD = {"rank": 8, "target_modules": ["q_proj", "lm_head"]}
FLOAT32 = {"compute_dtype": "float32"}
HALF = BLOCKS | {"num_hidden_layers": 6}
BUDGET = {"memory_gib": 0.06}
BFLOAT16 = {"compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "case",
    [
        Case("as on a GPU", TINY, seq_len=384),
        Case("as on a GPU, recomputed", TINY, seq_len=384, settings=BFLOAT16 | {"ac": {}}),
        Case("as on a GPU, adapters", TINY, seq_len=384, settings=BFLOAT16 | {"lora": {"rank": 8}}),
        Case("as on a GPU, an adapter of the head", TINY, seq_len=384, settings=BFLOAT16 | {"lora": HEAD}),
        Case("as on a GPU, rl", TINY, kind="rl", seq_len=384),
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
        Case("on a CPU, adapters", WIDE, as_on_gpu=False, settings={"lora": {"rank": 8}}),
    ],
    ids=lambda case: case.name,
)
def test_the_estimated_peak_of_a_step_is_the_measured_one(case: Case, mesh: Mesh) -> None:
    if "quantization" in case.settings:
        pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    result = compared(case, mesh)
    assert result.estimated == pytest.approx(result.measured, rel=0.1), result.row


def test_the_estimate_knows_the_limits_of_a_block() -> None:
    assert (BLOCK_QUERIES, BLOCK_SCORES) == (layouts._MOST_QUERIES, layouts._LONG_SCORES)

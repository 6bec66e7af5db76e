"""The grid of runs whose memory is estimated and measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}
WIDE = LLAMA | {"vocab_size": 16000}
QWEN3 = LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True, "num_key_value_heads": 1, "vocab_size": 12000}
HEADS = LLAMA | {"num_attention_heads": 32, "intermediate_size": 128}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
BFLOAT16 = {"compute_dtype": "bfloat16"}
BLOCKS = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 256}
NF4 = {"compute_dtype": "float32", "lora": {"rank": 8}, "quantization": {"type": "nf4", "double": False}}


@dataclass(frozen=True)
class Case:
    """A model and how one process trains it."""

    name: str
    model: dict[str, Any] = field(default_factory=lambda: LLAMA)
    kind: Literal["sft", "rl"] = "sft"
    seq_len: int = 512
    micro_batch: int = 1
    rows: int = 2
    """Micro-batches of a step."""
    settings: dict[str, Any] = field(default_factory=lambda: BFLOAT16)
    """Keys of the trainer's `[model]`."""
    optimizer: str = "adamw"
    is_rounded: bool = False
    """With `optim.stochastic_rounding`."""
    top_k: int = 0
    """RL: number of likeliest tokens that the engine reports with every token."""
    as_on_gpu: bool = True
    """With the operations that a trainer on a GPU runs. False: with our kernels for CPUs."""


def grid() -> Iterator[Case]:
    """All cases: what a GPU would run, then what a CPU runs."""
    both = [
        Case("llama"),
        Case("llama, 1024 tokens", seq_len=1024),
        Case("llama, 4096 tokens", seq_len=4096),
        Case("llama, 2 x 512 tokens", micro_batch=2),
        Case("llama, 128 tokens", seq_len=128),
        Case("llama, 10 layers", LLAMA | {"num_hidden_layers": 10}),
        Case("llama, wide mlp", LLAMA | {"intermediate_size": 1024}),
        Case("llama, heads of 64, no groups", LLAMA | {"head_dim": 64, "num_key_value_heads": 4}),
        Case("llama, 32 heads, narrow mlp, 2048 tokens", HEADS, seq_len=2048),
        Case("llama, tied", LLAMA | {"tie_word_embeddings": True}),
        Case("llama, 100k vocabulary", LLAMA | {"vocab_size": 100_000, "hidden_size": 64}),
        Case("qwen3", QWEN3),
        Case("qwen3, 1024 tokens", QWEN3, seq_len=1024),
        Case("mistral, one row", LLAMA | {"model_type": "mistral"}, rows=1, seq_len=1024),
        Case("llama, float32", settings={"compute_dtype": "float32"}),
        Case("llama, ac", settings=BFLOAT16 | {"ac": {}}, seq_len=1024),
        Case("llama, ac of every second", settings=BFLOAT16 | {"ac": {"freq": 2}}, seq_len=1024),
        Case("llama, bfloat16 masters", settings=BFLOAT16 | {"optimization_dtype": "bfloat16"}),
        Case("llama, lora 16", settings=BFLOAT16 | {"lora": {"rank": 16}}, seq_len=1024),
        Case("llama, nf4", settings=BFLOAT16 | {"lora": {"rank": 16}, "quantization": "nf4"}, seq_len=1024),
        Case("llama, nf4, mostly blocks", BLOCKS, settings=NF4, seq_len=128),
        Case("llama, int8, mostly blocks", BLOCKS, settings=NF4 | {"quantization": "int8"}, seq_len=128),
        Case("llama, lora 16, ac", settings=BFLOAT16 | {"lora": {"rank": 16}, "ac": {}}, seq_len=1024),
        Case("llama, lora 16, head in parts", WIDE, settings=BFLOAT16 | {"lora": {"rank": 16}}, seq_len=3072),
        Case("llama, lora 16 and the head", settings=BFLOAT16 | {"lora": {"rank": 16, "modules_to_save": ["lm_head"]}}),
        Case("llama, sgd", optimizer="sgd"),
        Case("llama, muon", optimizer="muon"),
        Case("mixture of 8 experts", MOE),
        Case("mixture of 8 experts, 1024 tokens", MOE, seq_len=1024),
        Case("mixture of 8 experts, ac", MOE, settings=BFLOAT16 | {"ac": {}}, seq_len=1024),
        Case("rl, llama", kind="rl"),
        Case("rl, llama, disabled fused head", kind="rl", settings=BFLOAT16 | {"fused_lm_head_chunk_size": "disabled"}),
        Case("rl, llama, 1024 tokens", kind="rl", seq_len=1024),
        Case("rl, llama, lora 16", kind="rl", settings=BFLOAT16 | {"lora": {"rank": 16}}),
        Case("rl, llama, top-k", kind="rl", top_k=8),
        Case("rl, qwen3, ac", QWEN3, kind="rl", settings=BFLOAT16 | {"ac": {}}, seq_len=1024),
    ]
    yield from both
    for case in both:
        yield replace(case, as_on_gpu=False)

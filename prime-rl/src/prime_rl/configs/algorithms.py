"""The presets behind `algorithm`: keys of `trainer.loss`, `orchestrator.advantage` and `orchestrator.buffer`.

A preset fills in keys that the config leaves out, so the resolved config shows all of them and each can be overridden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Algorithm = Literal["default", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "decoupled_ppo"]

LOSS, ADVANTAGE, BUFFER = "trainer.loss", "orchestrator.advantage", "orchestrator.buffer"
GROUP_NORMALIZED = {"type": "normalized", "baseline": "group", "scale": "group"}

OVERLONG_SHARE = 5
"""DAPO's buffer is a fifth of the longest answer: 4,096 of 20,480 tokens."""

PRESETS: Mapping[Algorithm, Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    # Shao et al. 2024, DeepSeekMath
    "grpo": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "sequence"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # Liu et al. 2025, Understanding R1-Zero-Like Training: neither lengths nor standard deviations bias the sum.
    "dr_grpo": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "constant"},
        ADVANTAGE: {"type": "normalized", "baseline": "group", "scale": "none"},
    },
    # Yu et al. 2025, DAPO: clip higher, token level, dynamic sampling; the overlong penalty follows `max_tokens`.
    "dapo": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.28, "average": "token"},
        ADVANTAGE: GROUP_NORMALIZED,
        BUFFER: {"drop_equal_rewards": True},
    },
    # Ahmadian et al. 2024, Back to Basics: each sequence counts with its whole log-probability.
    "rloo": {
        LOSS: {"type": "truncated", "weight_low": 0.0, "weight_high": 2.0, "average": "constant", "constant_tokens": 1},
        ADVANTAGE: {"type": "normalized", "baseline": "leave_one_out", "scale": "none"},
    },
    # Hu et al. 2025, REINFORCE++
    "reinforce_pp": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "token"},
        ADVANTAGE: {"type": "normalized", "baseline": "batch", "scale": "batch"},
    },
    # Zheng et al. 2025, Group Sequence Policy Optimization
    "gspo": {
        LOSS: {"type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "average": "sequence"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # MiniMax 2025, MiniMax-M1; the largest weight as in Khatri et al. 2025, The Art of Scaling RL Compute
    "cispo": {
        LOSS: {"type": "truncated", "weight_low": 0.0, "weight_high": 5.0, "average": "token"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # Hilton et al. 2022, Batch size-invariance for policy optimization; Fu et al. 2025, AReaL
    "decoupled_ppo": {
        LOSS: {
            "type": "decoupled",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "behaviour_weight_cap": 5.0,
            "average": "token",
        },
        ADVANTAGE: GROUP_NORMALIZED,
        "trainer": {"minibatches": 4},
    },
}


def preset(algorithm: Algorithm, max_tokens: int | None, seq_len: int) -> dict[str, dict[str, Any]]:
    """Raw values of each section that the algorithm sets.

    `max_tokens` is the length limit of an answer, if it is known, and `seq_len` that of a sample.
    """
    sections = {section: dict(values) for section, values in PRESETS[algorithm].items()}
    if algorithm == "dr_grpo":
        sections[LOSS]["constant_tokens"] = max_tokens or seq_len
    if algorithm == "dapo" and max_tokens is not None:
        buffer_tokens = max(1, max_tokens // OVERLONG_SHARE)
        sections[ADVANTAGE]["overlong"] = {"max_tokens": max_tokens, "buffer_tokens": buffer_tokens, "penalty": 1.0}
    return sections

"""The messages between orchestrator, packer and trainer, as MessagePack arrays.

Fields travel by position, so new ones go to the end with a default: an older reader ignores them, a newer reader
fills them in.
"""

from __future__ import annotations

import msgspec


class TrainingSample(msgspec.Struct, array_like=True):
    """One token sequence to train on: N prompt tokens, then M completion tokens."""

    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    """False for tokens that the environment wrote."""
    completion_logprobs: list[float]
    """Log-probability of each completion token under the policy that sampled it; 0.0 for environment tokens."""
    completion_temperatures: list[float]
    teacher_logprobs: list[float] | None = None
    """N + M values; entry t scores token t."""
    advantage: float | None = None
    reward: float | None = None
    """For people; the loss reads `advantage` only."""
    pixel_values: list[list[float]] | None = None
    image_grid_thw: list[list[int]] | None = None
    version: int | None = None
    """Oldest policy version that sampled any of its tokens; None where that is not known."""


class TrainingBatch(msgspec.Struct, array_like=True):
    """What the trainer consumes at one step."""

    examples: list[TrainingSample]
    step: int
    run_idx: int | None = None
    """Set by the receiver."""


class MicroBatch(msgspec.Struct, array_like=True):
    """One packed row of T tokens for one data-parallel rank. A sequence starts wherever `position_ids` is 0."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    temperatures: list[float]
    teacher_logprobs: list[float] | None = None
    lora_num_tokens: list[int] | None = None
    pixel_values: list[list[float]] | None = None
    image_grid_thw: list[list[int]] | None = None
    versions: list[int] | None = None
    """Oldest policy version of each token's sequence; -1, or None for all, where it is not known."""
    minibatch: int = 0
    """Which of the step's optimizer updates this row belongs to."""

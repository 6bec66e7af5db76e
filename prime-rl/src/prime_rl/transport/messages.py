"""Messages between orchestrator, packer and trainer, encoded as MessagePack arrays.

Fields are identified by position. Add new fields at the end, with a default: older readers ignore them, and newer
readers use the default for messages without them.
"""

from __future__ import annotations

import msgspec


class TrainingSample(msgspec.Struct, array_like=True):
    """One token sequence to train on: N prompt tokens, then M completion tokens."""

    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    """False for tokens that the environment wrote; they are not trained on."""
    inference_logprobs: list[float]
    """Log-probability of each completion token under the policy that sampled it; 0.0 for environment tokens."""
    completion_temperatures: list[float]
    teacher_logprobs: list[float] | None = None
    """N + M values; entry t is the log-probability of token t."""
    advantage: float | None = None
    reward: float | None = None
    """For reports only; the loss uses `advantage`."""
    pixel_values: list[list[float]] | None = None
    image_grid_thw: list[list[int]] | None = None
    version: int | None = None
    """Oldest policy version that sampled any of its tokens; None if unknown."""
    kept_as: list[int] | None = None
    """Group, rollout and line of conversation of the kept rollout (`RUN/samples`) that it belongs to. None if none."""
    completion_advantages: list[float] | None = None
    """M values, if the tokens of several calls have different ones. None: `advantage`, for all of them."""


class TrainingBatch(msgspec.Struct, array_like=True):
    """All samples that the trainer consumes in one step."""

    examples: list[TrainingSample]
    step: int
    run_idx: int | None = None
    """Set by the receiver."""


class MicroBatch(msgspec.Struct, array_like=True):
    """One packed row of T tokens for one data-parallel rank. A sequence starts at each token with position 0."""

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
    """Oldest policy version of each token's sequence, -1 if unknown. None if no version is known."""
    minibatch: int = 0
    """Index of the optimizer update within the step that this row belongs to."""
    kept_as: list[list[int] | None] | None = None
    """`TrainingSample.kept_as` of each sequence. None if no sequence is kept."""

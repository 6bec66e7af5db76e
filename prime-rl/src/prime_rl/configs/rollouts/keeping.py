"""Which rollouts stay on disk."""

from typing import Annotated

from pydantic import Field

from prime_rl.configs.ranges import LARGEST, Count
from prime_rl.utils.pydantic_config import BaseConfig


class KeepRolloutsConfig(BaseConfig):
    """Which rollouts stay on disk, in `RUN/samples`: some of each step, and all of evaluations."""

    per_step: Count = 32
    """Rollouts of each step, in whole groups: one at random, the worst, the best, and more at random. One group is kept
    even if it is larger."""

    max_total_mib: Count = 1024
    """Size of all kept files in MiB. Beyond it steps between the first and the newest are deleted, evenly."""

    max_chars: Annotated[int, Field(ge=1000, le=LARGEST)] = 200_000
    """Characters of the messages of a rollout. Longer messages are cut in their middle."""

    max_tokens: Count = 32_768
    """Tokens of a rollout whose ids, log-probabilities and texts are kept."""

"""Which examples are rolled out."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.ranges import Fraction, Seed
from prime_rl.utils.pydantic_config import BaseConfig, raise_faults


class BufferConfig(BaseConfig):
    """Chooses the examples to roll out."""

    seed: Seed | None = None
    """Seed of the choice. None is different in every run."""

    order: Literal["random", "sequential"] = "random"
    """`random` draws rows with replacement. `sequential` takes the rows of each environment in their order, and begins
    again after the last one: a curriculum. The environment `rows` sets it if it mixes datasets or has an `order`."""

    env_ratios: list[Annotated[float, Field(gt=0)]] | None = None
    """Share of each environment, above 0. None is proportional to their sizes."""

    easy_threshold: float | None = None
    """Examples whose group has at least this mean reward are easy and are not sampled again. None disables the rule."""

    hard_threshold: float | None = None
    """Examples whose group has at most this mean reward are hard and are not sampled again. None disables the rule."""

    easy_fraction: Fraction = 0.0
    """Share of the easy examples that a resume returns to the pool."""

    hard_fraction: Fraction = 0.0
    """Share of the hard examples that a resume returns to the pool."""

    online_difficulty_filtering: bool = False
    """Drop groups whose rewards are all 0 or all 1."""

    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal, and roll out others instead (DAPO's dynamic sampling)."""

    hash_keys: list[str] = Field(["task", "prompt"], min_length=1)
    """Columns that identify an example when a run resumes. `task` is the environment's name."""

    skip_verification: bool = False
    """Do not score rollouts; every reward is 0."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            yield f"easy_threshold ({easy}) must be above hard_threshold ({hard})"
        thresholds = [name for name in ("easy_threshold", "hard_threshold") if getattr(self, name) is not None]
        filters = ("online_difficulty_filtering", "drop_equal_rewards")
        needing_scores = [*thresholds, *(name for name in filters if getattr(self, name))]
        if self.skip_verification and needing_scores:
            yield f"skip_verification gives no rewards, and {', '.join(needing_scores)} need them"

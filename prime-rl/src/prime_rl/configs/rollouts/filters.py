"""Filters of finished rollouts."""

from typing import Annotated, Literal

from pydantic import Field

from prime_rl.configs.ranges import Count, WholeNumber
from prime_rl.utils.pydantic_config import BaseConfig


class GibberishFilterConfig(BaseConfig):
    """Detects answers with a rare token that the policy itself considered unlikely."""

    type: Literal["gibberish"] = "gibberish"
    """Gibberish."""

    enforce: bool = False
    """Exclude such rollouts from the loss. False only counts them."""

    token_id_threshold: WholeNumber = 100000
    """Token ids above this are rare."""

    logprob_offset: float = 2.0
    """A token is unlikely if its log-probability is below -ln(vocabulary size) minus this."""


class RepetitionFilterConfig(BaseConfig):
    """Detects answers with a long series of tokens that the policy was certain of."""

    type: Literal["repetition"] = "repetition"
    """Repetition."""

    enforce: bool = False
    """Exclude such rollouts from the loss. False only counts them."""

    window: Count = 3000
    """Length of the series in tokens."""

    prob_threshold: float = Field(0.99, gt=0, le=1)
    """The policy is certain of a token above this probability."""


FilterConfig = Annotated[GibberishFilterConfig | RepetitionFilterConfig, Field(discriminator="type")]

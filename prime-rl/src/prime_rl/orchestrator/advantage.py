"""Alias of `prime_rl.orchestrator.batches.advantage`, for custom advantage functions that import it from here."""

from prime_rl.orchestrator.batches.advantage import *  # noqa: F403

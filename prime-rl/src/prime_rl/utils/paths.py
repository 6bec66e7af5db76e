"""Alias of `prime_rl.run.paths`, for code that imports it from here."""

from prime_rl.run.paths import *  # noqa: F403

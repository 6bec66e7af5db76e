"""Alias of `prime_rl.monitors`, for code that imports it from here."""

from prime_rl.monitors import *  # noqa: F403

"""Alias of `prime_rl.launch`, for code that imports it from here."""

from prime_rl.launch import *  # noqa: F403

"""Environments of Gymnasium, and opponents, for the tests of games."""

from __future__ import annotations

import os
import random
import string
import sys
import time
from typing import Any

import gymnasium
from gymnasium import spaces

SHOUT = "\x1b[2J\x1b]0;title\x07" + "loud \x00" + "x" * 2**20


class Echo(gymnasium.Env[str, str]):
    """Says a random number of the global generator with each answer, and misbehaves when it is told to."""

    observation_space = spaces.Text(2**21, charset=string.printable)
    action_space = spaces.Text(20, charset=string.ascii_lowercase)

    def __init__(self, worth: float = 0.25) -> None:
        self.worth = worth

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"start {random.random()}", {}

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        if action == "raise":
            raise ValueError("two\nlines \x1b[31m")
        if action == "exit":
            sys.exit(3)
        if action == "die":
            os._exit(1)
        if action == "hang":
            while True:
                time.sleep(1)
        reward = float("nan") if action == "nan" else self.worth
        said = SHOUT if action == "shout" else f"{action} {random.random()}"
        return said, reward, action == "end", action == "cut", {}


gymnasium.register("Echo-v0", entry_point=Echo)


def highest_cell(seen: str, rng: random.Random) -> str:
    """The highest cell of Tic Tac Toe that is free."""
    return f"[{max(int(cell) for cell in seen.rpartition('Available Moves:')[2] if cell.isdigit())}]"


def says_nothing(seen: str, rng: random.Random) -> None:
    """No answer at all."""


def leaves_the_board(seen: str, rng: random.Random) -> str:
    """A cell that Tic Tac Toe does not have."""
    return "[9]"

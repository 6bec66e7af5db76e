"""A real OpenEnv server for the tests: guess a number. `python guessing_server.py FD SESSIONS` serves on a socket."""

from __future__ import annotations

import random
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._guesses = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **settings: Any) -> Hint:
        rng = random.Random(seed)
        self._number, self._guesses = rng.randint(1, 20), 0
        bound = self._number + rng.randint(0, 5)
        return Hint(hint=f"Guess a number from 1 to {bound}.{settings.get('note', '')}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.guess == "crash":
            raise RuntimeError("the environment is broken")
        if action.guess == "shout":
            return Hint(hint="\x1b[2J\x07loud " + "x" * 2**20, reward=0.0)
        self._guesses += 1
        number = int(action.guess) if action.guess.isdigit() else 0
        if number == self._number:
            return Hint(hint="Right.", reward=1.0, done=True)
        return Hint(hint="It is higher." if number < self._number else "It is lower.", reward=-0.1)

    @property
    def state(self) -> State:
        return State(step_count=self._guesses)


def main() -> None:
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])


if __name__ == "__main__":
    main()

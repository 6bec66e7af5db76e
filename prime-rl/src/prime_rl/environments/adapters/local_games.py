"""Environments whose games run on this machine, each game in its own process. `game_host.py` is the other side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import verifiers as vf

from prime_rl.environments.adapters.options import GameConfig
from prime_rl.environments.adapters.playing import PlayedEnvironment, Rules
from prime_rl.environments.adapters.turns import GameError, GameFault, Turn, clean
from prime_rl.environments.builtin import missing_package
from prime_rl.environments.rewards.wire import Ended, encode, receive_from
from prime_rl.utils.logger import get_logger

_HOST = "prime_rl.environments.adapters.game_host"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The host forks a process for each game, which is safe only without threads."""
_MAX_ERROR_CHARACTERS = 500
_MOST_NAMED = 50


def local_environment(kind: str, module: str, config: GameConfig, unfinished_reward: float = 0.0) -> vf.Environment:
    """Make the environment of a game. `module` is the environment's module, whose package must be installed.

    Raises:
        GameFault: the package is missing, or the game cannot be used.
    """
    if (fault := missing_package(module)) is not None:
        raise GameFault(fault)
    settings = {"kind": kind, **config.model_dump(mode="json")}
    made = made_rows(settings)
    title = settings["game"]
    if not made["repeats"]:
        get_logger().warning(f"{title} starts differently with the same seed: rollouts of a group do not start alike")
    processes = GameProcesses(settings)
    system = _instruction(title, made["about"]["actions"]) if config.system_prompt is None else config.system_prompt
    rules = Rules(title, system, config.max_turns, unfinished_reward, processes.open, processes.close)
    return PlayedEnvironment(rules, made["train"], made["eval"])


def _instruction(title: str, actions: Sequence[str]) -> str:
    """Ask for one of the named actions. Without names, the game explains itself: TextArena, text actions."""
    if not actions:
        return ""
    shown = [*actions[:_MOST_NAMED], "…"] if len(actions) > _MOST_NAMED else list(actions)
    return f"You act in {title}. Each message shows what you observe. Answer with one action: {', '.join(shown)}."


def made_rows(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Start every row's game once, in another process, and return what its player sees first.

    Returns:
        `train` and `eval`: lists of `{"seed", "seat", "begins", "text"}`; `about`: `actions` and `players`; `repeats`:
        whether the same seed started the same game twice.

    Raises:
        GameFault: the game cannot be used.
    """
    done = subprocess.run(
        [sys.executable, "-m", _HOST, "rows"],
        input=json.dumps(settings).encode(),
        env=_environment(),
        capture_output=True,
        check=False,
    )
    if done.returncode < 0:
        raise GameFault(
            f"the start of {settings['game']} ended its process with signal {-done.returncode}; "
            f"it may take longer than step_timeout_s = {settings['step_timeout_s']:g} s"
        )
    if done.returncode != 0:
        raise GameFault(_last_line(done.stderr.decode(errors="replace")) or f"exit code {done.returncode}")
    made: dict[str, Any] = msgspec.msgpack.decode(done.stdout)
    return made


class GameProcesses:
    """Starts a process for each game, forked from a host that has loaded the game."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._host: subprocess.Popen[bytes] | None = None
        self._errors: Any = None

    async def open(self) -> GameProcess:
        """Start a process for one game. Raises GameError if that fails."""
        ours, theirs = socket.socketpair()
        with theirs:
            await asyncio.to_thread(self._send, theirs.fileno())
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=2**20)
        return GameProcess(self, reader, writer)

    def _send(self, descriptor: int) -> None:
        with self._lock:
            for _ in range(2):  # starts the host again if it has ended
                try:
                    socket.send_fds(self._running(), [b"g"], [descriptor])
                except OSError:
                    self._end()
                else:
                    return
        raise GameError(f"no process for {self.settings['game']} can be started{self.last_words()}")

    def _running(self) -> socket.socket:
        if self._control is not None and self._host is not None and self._host.poll() is None:
            return self._control
        self._end()
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        with theirs:
            self._host = subprocess.Popen(
                [sys.executable, "-m", _HOST, "serve", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=self._errors,
                stderr=self._errors,
                env=_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._host.stdin is not None
        with self._host.stdin as settings:
            settings.write(json.dumps(self.settings).encode())
        self._control = ours
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._host is not None:
            self._host.kill()
            self._host.wait()
        self._control = self._host = None

    def last_words(self) -> str:
        """The last line of the host's output, if it has ended."""
        if self._errors is None or (self._host is not None and self._host.poll() is None):
            return ""
        self._errors.seek(0)
        line = _last_line(self._errors.read(2**20).decode(errors="replace"))
        return f": {line}" if line else ""

    def close(self) -> None:
        """End the host. Running games end when they are closed."""
        with self._lock:
            self._end()


class GameProcess:
    """One game in its own process, which ends with the connection."""

    def __init__(self, host: GameProcesses, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._host = host
        self._reader = reader
        self._writer = writer

    async def reset(self, seed: int, seat: int) -> Turn:
        return await self._ask({"do": "reset", "seed": seed, "seat": seat})

    async def act(self, text: str) -> Turn:
        return await self._ask({"do": "act", "text": text})

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _ask(self, request: dict[str, Any]) -> Turn:
        settings = self._host.settings
        started_s = time.monotonic()
        try:
            self._writer.write(encode(request))
            await self._writer.drain()
            reply = await receive_from(self._reader)
        except (OSError, Ended) as error:
            if time.monotonic() - started_s >= settings["step_timeout_s"]:
                limit = f"step_timeout_s = {settings['step_timeout_s']:g} s"
                raise GameError(f"{settings['game']} took longer than {limit} and was ended") from error
            raise GameError(f"the process of {settings['game']} ended{self._host.last_words()}") from error
        if "error" in reply:
            raise GameError(str(reply["error"]))
        return msgspec.convert(reply["turn"], Turn)


def _environment() -> dict[str, str]:
    """Environment of the host: a fixed hash seed, so that sets have a fixed order, and this process's module path."""
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, **_ONE_THREAD, "PYTHONHASHSEED": "0", "PYTHONPATH": path}


def _last_line(text: str) -> str:
    lines = [line for line in clean(text[-100_000:], 100_000).splitlines() if line.strip()]
    return lines[-1].strip()[:_MAX_ERROR_CHARACTERS] if lines else ""

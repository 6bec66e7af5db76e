"""Host process of games: `python -m` this module with `rows` or `serve FD`, and settings on standard input.

`rows` writes what the player sees first, for each seed. `serve` forks a process for each connection that arrives on the
socket FD; the process plays one game. So games share no global random state, and a game that hangs ends alone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from prime_rl.environments.adapters.turns import GameError, GameFault, clean
from prime_rl.environments.rewards.wire import Ended, encode, receive, send

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "gymnasium": "prime_rl.environments.adapters.gymnasium_games:GymnasiumGame",
        "textarena": "prime_rl.environments.adapters.textarena_games:TextArenaGame",
    }
)
"""The class for each kind of game."""
_MAX_ERROR_CHARACTERS = 500


def main() -> int:
    """Make rows, or serve games. Returns the exit code."""
    settings = json.loads(sys.stdin.read())
    if sys.argv[1] == "rows":
        return _write_rows(settings)
    _serve(socket.socket(fileno=int(sys.argv[2])), settings)
    return 0


def _write_rows(settings: Mapping[str, Any]) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # keeps output of games out of the rows
        try:
            made = _rows(settings)
        except (GameFault, GameError) as fault:
            return _refused(str(fault))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a game may raise anything
            return _refused(f"{settings['game']} raised {type(error).__name__}: {error}")
    sys.stdout.buffer.write(msgspec.msgpack.encode(made))
    sys.stdout.flush()
    return 0


def _refused(reason: str) -> int:
    sys.stderr.write(f"{' '.join(clean(reason, _MAX_ERROR_CHARACTERS).split())}\n")
    return 1


def _rows(settings: Mapping[str, Any]) -> dict[str, Any]:
    module, game_class = _loaded(settings)
    with _time_limit(settings):
        module.warm(settings)
        game = game_class(settings)
    about = game.about()
    chosen = settings.get("seat")
    seats: Sequence[int] = range(about["players"]) if chosen is None else [chosen]
    made: dict[str, Any] = {"about": about}
    for split, first, count in (
        ("train", settings["seed"], settings["size"]),
        ("eval", settings["eval_seed"], settings["eval_size"]),
    ):
        rows = (_row(game, settings, first + index, seats[index % len(seats)]) for index in range(count))
        made[split] = [row for row in rows if row is not None]
        if count and not made[split]:
            raise GameFault(f"{settings['game']} is over before the model's first action, with every seed")
    again = made["train"][0]
    made["repeats"] = again == _row(game, settings, again["seed"], again["seat"])
    return made


def _row(game: Any, settings: Mapping[str, Any], seed: int, seat: int) -> dict[str, Any] | None:
    """Start a row's game. None if it is over before the model acts."""
    with _time_limit(settings):
        turn = _started(game, seed, seat)
        if turn.is_over:
            return None
        begins = turn.player == seat
        text = turn.text if begins else game.first_seen()
    return {"seed": seed, "seat": seat, "begins": begins, "text": clean(text, settings["max_chars"])}


def _loaded(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    name, _, game_class = KINDS[settings["kind"]].partition(":")
    module = importlib.import_module(name)
    return module, getattr(module, game_class)


def _started(game: Any, seed: int, seat: int) -> Any:
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    return game.reset(seed, seat)


@contextlib.contextmanager
def _time_limit(settings: Mapping[str, Any]) -> Any:
    """Have the kernel end the process at the limit, even if the game blocks the interpreter."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, settings["step_timeout_s"])
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _serve(control: socket.socket, settings: Mapping[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes the socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the games, so the kernel reaps them
    module, game_class = _loaded(settings)
    module.warm(settings)
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            try:
                control.close()
                _play(descriptors[0], game_class, settings)
            finally:
                os._exit(70)
        os.close(descriptors[0])


def _play(connection: int, game_class: Any, settings: Mapping[str, Any]) -> None:
    """Play one game, until the connection is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    game: Any = None
    while True:
        try:
            request = receive(connection)
        except Ended:
            os._exit(0)
        with _time_limit(settings):
            try:
                if request["do"] == "reset":
                    game = game_class(settings)
                    turn = _started(game, request["seed"], request["seat"])
                else:
                    turn = game.act(request["text"])
                text = clean(turn.text, settings["max_chars"])
                reply: dict[str, Any] = {"turn": msgspec.to_builtins(msgspec.structs.replace(turn, text=text))}
            except (GameFault, GameError) as fault:
                reply = {"error": str(fault)}
            except SystemExit as error:
                reply = {"error": f"{settings['game']} called sys.exit({error.code!r})"}
            except BaseException as error:  # noqa: BLE001 - a game may raise anything
                reply = {"error": f"{settings['game']} raised {type(error).__name__}: {error}"}
        if "error" in reply:
            reply["error"] = " ".join(clean(reply["error"], _MAX_ERROR_CHARACTERS).split())
        send(connection, encode(reply))


if __name__ == "__main__":
    sys.exit(main())

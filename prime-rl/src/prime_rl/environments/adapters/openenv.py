"""The environment `openenv`: an environment on an OpenEnv server.

[[orchestrator.env]]
id = "openenv"
args = { url = "http://localhost:8000" }

An episode is one WebSocket session at `/ws`, with JSON messages. A request has a `type` (`reset`, `step`, `state`,
`close`) and `data`. The reply has the type `observation`, with `observation`, `reward` and `done` as its data, or the
type `error`, with `code` and `message`. The server's plain `POST /reset` and `POST /step` make a new environment for
each request, so they cannot play episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import verifiers as vf

from prime_rl.environments.adapters.options import OpenEnvConfig, read_openenv_config
from prime_rl.environments.adapters.playing import PlayedEnvironment, Rules
from prime_rl.environments.adapters.turns import GameError, GameFault, Turn, clean, finite
from prime_rl.environments.rewards.text import without_thinking
from prime_rl.utils.logger import get_logger
from prime_rl.utils.waiting import Wait

MAX_MESSAGE_BYTES = 16 << 20
CLOSE_LIMIT_S = 5.0
CONNECT_PAUSE_S = 0.2
_FULL = "CAPACITY_REACHED"
_SHOWN_CHARACTERS = 300
_NOT_SHOWN = frozenset({"done", "reward", "metadata"})


def load_environment(**args: Any) -> vf.Environment:
    """Load the environment, and reset it once for each row. `args` are those of `OpenEnvConfig`.

    Raises:
        ConfigError: the arguments have faults.
        GameFault: no such server answers, or its environment cannot be used.
    """
    config = read_openenv_config(args)
    with ThreadPoolExecutor(1) as pool:  # asyncio.run needs a thread without an event loop
        server, train, held_out = pool.submit(asyncio.run, _read(config)).result()
    system = server.actions.instruction if config.system_prompt is None else config.system_prompt
    rules = Rules(server.url, system, config.max_turns, 0.0, server.open, lambda: None)
    return PlayedEnvironment(rules, train, held_out)


async def _read(config: OpenEnvConfig) -> tuple[OpenEnvServer, list[dict[str, Any]], list[dict[str, Any]]]:
    server = OpenEnvServer(config)
    await server.read_schema()
    try:
        session = await server.open()
        try:
            train = [await _row(session, config.seed + index) for index in range(config.size)]
            held_out = [await _row(session, config.eval_seed + index) for index in range(config.eval_size)]
            again = await _row(session, config.seed)
        finally:
            await session.close()
    except GameError as error:
        raise GameFault(str(error)) from error
    if again != train[0]:
        get_logger().warning(
            f"the environment at {server.url} starts differently with the same seed: "
            "the rollouts of a group do not start alike"
        )
    fresh = OpenEnvServer(config)  # the first one belongs to an event loop that has ended
    fresh.actions = server.actions
    return fresh, train, held_out


async def _row(session: Any, seed: int) -> dict[str, Any]:
    turn = await session.reset(seed, 0)
    if turn.is_over:
        raise GameError(f"the seed {seed} starts an episode that is already over")
    return {"seed": seed, "seat": 0, "begins": True, "text": turn.text}


class OpenEnvServer:
    """Opens sessions on one server: at most `max_sessions` at a time, fewer if the server accepts fewer."""

    def __init__(self, config: OpenEnvConfig) -> None:
        self.config = config
        self.url = config.url.rstrip("/")
        self.actions = ActionParser({}, config)
        self._most = config.max_sessions
        self._in_use = 0
        self._freed = asyncio.Condition()

    async def read_schema(self) -> None:
        """Read the schema of actions. Raises GameFault: there is no OpenEnv server."""
        timeout = aiohttp.ClientTimeout(total=self.config.step_timeout_s)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers(), timeout=timeout) as http,
                http.get(f"{self.url}/schema") as reply,
            ):
                body = await reply.content.read(MAX_MESSAGE_BYTES)
                if reply.status != 200:
                    raise GameFault(f"url = {self.url}: /schema answers {reply.status}, so it is not an OpenEnv server")
            schema = json.loads(body)["action"]
            self.actions = ActionParser(schema, self.config)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GameFault(f"url = {self.url}: no OpenEnv server answers: {_reason(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise GameFault(
                f"url = {self.url}: /schema holds no schema of actions, so it is not an OpenEnv server"
            ) from error

    async def open(self) -> OpenEnvSession:
        """Open a session, once the server has capacity. Raises GameError."""
        while True:
            async with self._freed:
                await self._freed.wait_for(lambda: self._in_use < self._most)
                self._in_use += 1
                is_only = self._in_use == 1
            try:
                return await self._connected()
            except _Refused as error:
                await self._free()
                if error.code != _FULL or is_only:
                    raise GameError(f"the OpenEnv server at {self.url} opens no session: {error}") from error
                self._most = max(1, self._in_use)  # the next session waits until one of these ends
            except BaseException:
                await self._free()
                raise

    async def _connected(self) -> OpenEnvSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.config.step_timeout_s)
        http = aiohttp.ClientSession(headers=self._headers(), timeout=timeout)
        session = OpenEnvSession(self, http)
        try:
            await session.connect()
        except BaseException:
            await http.close()
            raise
        return session

    async def release(self) -> None:
        """Count the end of a session, and try one session more: the server may have more capacity now."""
        self._most = min(self._most + 1, self.config.max_sessions)
        await self._free()

    async def _free(self) -> None:
        async with self._freed:
            self._in_use -= 1
            self._freed.notify_all()

    def _headers(self) -> dict[str, str]:
        """HTTP headers. Raises GameFault: the token's variable is not set."""
        if self.config.token_var is None:
            return {}
        if not (token := os.environ.get(self.config.token_var)):
            raise GameFault(f"token_var = {self.config.token_var!r}: this environment variable is not set")
        return {"Authorization": f"Bearer {token}"}


class _Refused(Exception):
    """The server replied with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {' '.join(clean(message, _SHOWN_CHARACTERS).split())}")
        self.code = code


class OpenEnvSession:
    """One episode. The server keeps its environment until the connection closes."""

    def __init__(self, server: OpenEnvServer, http: aiohttp.ClientSession) -> None:
        self._server = server
        self._http = http
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def connect(self) -> None:
        """Connect, with retries for `step_timeout_s`, because the server may be restarting.

        Raises:
            GameError: the server is gone.
            _Refused: it is full.
        """
        config = self._server.config
        advice = "start it again"
        wait = Wait(f"the OpenEnv server at {self._server.url}", advice, config.step_timeout_s, "step_timeout_s")
        while self._socket is None:
            try:
                self._socket = await self._http.ws_connect(f"{self._server.url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if wait.is_over():
                    raise self._gone(error) from error
                await asyncio.sleep(CONNECT_PAUSE_S)
        # A full server replies with an error at once; any other server answers this request.
        await self._ask({"type": "state"})

    async def reset(self, seed: int, seat: int) -> Turn:
        try:
            return self._turn(await self._ask({"type": "reset", "data": {**self._server.config.reset, "seed": seed}}))
        except _Refused as error:
            raise GameError(f"the OpenEnv server at {self._server.url} refuses a reset: {error}") from error

    async def act(self, text: str) -> Turn:
        action = self._server.actions.action(without_thinking(text))
        if isinstance(action, str):
            return Turn(action, is_invalid=True)
        try:
            return self._turn(await self._ask({"type": "step", "data": action}))
        except _Refused as error:
            if error.code == "VALIDATION_ERROR":
                return Turn("The environment does not accept this action.", is_invalid=True)
            raise GameError(f"the environment at {self._server.url} failed: {error}") from error

    async def close(self) -> None:
        """End the session, and wait up to 5 s for the server to release its environment."""
        try:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                if self._socket is not None and not self._socket.closed:
                    async with asyncio.timeout(CLOSE_LIMIT_S):
                        await self._socket.send_str(json.dumps({"type": "close"}))
                        await self._socket.receive()
                    await self._socket.close()
        finally:
            await self._http.close()
            await self._server.release()

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, and return the data of the reply. Raises GameError: no reply; _Refused: an error."""
        assert self._socket is not None
        limit_s = self._server.config.step_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._socket.send_str(json.dumps(message))
                reply = await self._socket.receive()
        except TimeoutError as error:
            raise GameError(
                f"the OpenEnv server at {self._server.url} took longer than step_timeout_s = {limit_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._gone(error) from error
        if reply.type is not aiohttp.WSMsgType.TEXT:
            raise self._gone(self._socket.exception())
        try:
            body = json.loads(reply.data)
            data = body["data"]
            if body["type"] == "error":
                raise _Refused(str(data.get("code")), str(data.get("message")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GameError(f"the server at {self._server.url} does not speak OpenEnv's protocol") from error
        if not isinstance(data, dict):
            raise GameError(f"the server at {self._server.url} does not speak OpenEnv's protocol")
        return data

    def _turn(self, data: Mapping[str, Any]) -> Turn:
        config = self._server.config
        text = clean(_shown(data.get("observation"), config.observation_field), config.max_chars)
        reward = data.get("reward")
        return Turn(
            text,
            0.0 if reward is None else finite(reward, f"the environment at {self._server.url}"),
            is_over=bool(data.get("done")),
        )

    def _gone(self, error: BaseException | None) -> GameError:
        return GameError(f"the OpenEnv server at {self._server.url} is gone{f': {_reason(error)}' if error else ''}")


class ActionParser:
    """Converts answers of the model to actions of the server's JSON schema."""

    def __init__(self, schema: Mapping[str, Any], config: OpenEnvConfig) -> None:
        """Raises GameFault: the schema has no such field."""
        self._constant = dict(config.action)
        self._properties: Mapping[str, Any] = schema.get("properties", {})
        open_fields = {
            name: each for name, each in self._properties.items() if name not in {*self._constant, "metadata"}
        }
        required = [name for name in schema.get("required", ()) if name in open_fields]
        named = config.action_field
        if named is not None and schema and named not in self._properties:
            raise GameFault(f"action_field = {named!r}: actions have the fields {', '.join(self._properties)}")
        fields = required or list(open_fields)
        self._field = named if named is not None else fields[0] if len(fields) == 1 else None
        self.schema = open_fields

    @property
    def instruction(self) -> str:
        """Instruction to the model; empty if its whole answer is the action."""
        if self._field is not None:
            return ""
        return f"Answer with a JSON object that has these fields: {json.dumps(self.schema)}"

    def action(self, answer: str) -> dict[str, Any] | str:
        """The action; a string if there is none, with the reason."""
        if self._field is not None:
            value = self._value(answer)
            return "This is no action: a number is needed." if value is None else {**self._constant, self._field: value}
        start, end = answer.find("{"), answer.rfind("}")
        try:
            found = json.loads(answer[start : end + 1])
        except (ValueError, RecursionError):
            return "This is no action: answer with one JSON object."
        return (
            {**found, **self._constant} if isinstance(found, dict) else "This is no action: answer with a JSON object."
        )

    def _value(self, answer: str) -> Any:
        kind = self._properties.get(self._field or "", {}).get("type")
        if kind not in ("integer", "number"):
            return answer
        try:
            return int(answer) if kind == "integer" else float(answer)
        except ValueError:
            return None


def _shown(observation: Any, field: str | None) -> str:
    """The observation as text. Raises GameError: the field is missing."""
    if not isinstance(observation, Mapping):
        return observation if isinstance(observation, str) else json.dumps(observation)
    if field is not None:
        if field not in observation:
            raise GameError(f"observation_field = {field!r}: observations have the fields {', '.join(observation)}")
        value = observation[field]
    else:
        rest = {name: each for name, each in observation.items() if name not in _NOT_SHOWN}
        value = next(iter(rest.values())) if len(rest) == 1 else rest
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _reason(error: BaseException | None) -> str:
    return " ".join(clean(str(error) or type(error).__name__, _SHOWN_CHARACTERS).split())

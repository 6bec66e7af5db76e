"""Starts an environment in its own interpreter, and exchanges messages with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.guests.inside.frames import PROTOCOL, BadFrame, encode, receive, receive_now
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE, TEACHER_KEY_VARIABLE
from prime_rl.utils.gpus import MASK_VARIABLE

LOOPBACK = "127.0.0.1"
INSIDE = Path(__file__).parent / "inside"
STOP_GRACE_S = 5.0
_OURS = frozenset(
    {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "UV_RUN_RECURSION_DEPTH", ENGINE_KEY_VARIABLE, TEACHER_KEY_VARIABLE}
)
"""Variables of this process that an interpreter of another environment must not get."""

_ADDED = {MASK_VARIABLE: "", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


class GuestError(Exception):
    """The environment's own code failed in a request."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        """Name of the class of what it raised."""


@dataclass(frozen=True, slots=True)
class Guest:
    """What to load, and in which interpreter."""

    place: str
    """Config key, for messages."""
    python: Path
    module: str
    args: Mapping[str, Any]
    attributes: Mapping[str, Any]
    judge: str | None = None
    taskset: Mapping[str, Any] = field(default_factory=dict)
    agent: Mapping[str, Any] = field(default_factory=dict)
    """Tables of verifiers v1."""
    program: tuple[str, ...] = (str(INSIDE / "__main__.py"),)
    """Arguments of the interpreter, before the number of the socket."""
    added: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it gets besides those of this process."""


class GuestProcess:
    """One running environment.

    Until `connect`, requests block: environments are loaded before the event loop runs.
    """

    def __init__(self, guest: Guest, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.guest = guest
        self._process = process
        self._connection = connection
        self._numbers = itertools.count()
        self._opening: asyncio.Task[asyncio.StreamWriter] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._fault = ""
        """Why the process no longer answers."""

    @classmethod
    def start(cls, guest: Guest) -> Self:
        """Load the environment. Its output goes to the log of this process.

        Raises:
            EnvironmentFault: the interpreter cannot be started, or the environment does not load in it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [str(guest.python), *guest.program, str(theirs.fileno())]
            env = {name: value for name, value in os.environ.items() if name not in _OURS} | _ADDED | dict(guest.added)
            # The proxy of the run is on this machine, behind no other proxy.
            env |= {name: ",".join(filter(None, (env.get(name), LOOPBACK))) for name in ("NO_PROXY", "no_proxy")}
            try:
                process = subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
                )
            except OSError as error:
                ours.close()
                raise EnvironmentFault(f"{guest.place}.python = {str(guest.python)!r}: {error.strerror}") from error
        started = cls(guest, process, ours)
        try:
            started._greet()
        except BaseException:
            started.kill()
            raise
        return started

    def _greet(self) -> None:
        guest = self.guest
        tables = {name: dict(getattr(guest, name)) for name in ("args", "attributes", "taskset", "agent")}
        settings = {"protocol": PROTOCOL, "module": guest.module, "judge": guest.judge, **tables}
        hello = self._exchange(settings)
        if "fault" in hello:
            raise EnvironmentFault(f"{guest.place}: {guest.module!r} does not load in {guest.python}: {hello['fault']}")
        names = (("verifiers", "verifiers"), ("python", "Python"))
        self.versions = ", ".join(f"{shown} {hello[name]}" for name, shown in names if name in hello)

    def ask_now(self, do: str, **arguments: Any) -> Any:
        """What `ask` does, before the event loop runs."""
        return _value(self._exchange({"id": next(self._numbers), "do": do, "with": arguments}))

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._connection.sendall(encode(message))
            answer = receive_now(self._connection)
        except (BadFrame, ConnectionError) as error:
            raise self._gone(str(error)) from error
        if answer is None:
            raise self._gone()
        return answer

    async def ask(self, do: str, **arguments: Any) -> Any:
        """The answer of the environment to one request. Cancelling it cancels the work there.

        Raises:
            GuestError: the environment's code failed.
            EnvironmentFault: the process is gone.
        """
        writer = await self._connect()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            writer.write(encode({"id": number, "do": do, "with": arguments}))
            return _value(await answer)
        except asyncio.CancelledError:
            with contextlib.suppress(ConnectionError):
                writer.write(encode({"do": "cancel", "of": number}))
            raise
        finally:
            del self._waiting[number]

    async def _connect(self) -> asyncio.StreamWriter:
        if self._opening is None:
            self._connection.setblocking(False)
            self._opening = asyncio.create_task(self._open())
        writer = await asyncio.shield(self._opening)
        assert self._reading is not None
        if self._reading.done():
            raise EnvironmentFault(self._fault)
        return writer

    async def _open(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(sock=self._connection)
        self._reading = asyncio.create_task(self._read(reader))
        return writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = ""
        try:
            while (answer := await receive(reader)) is not None:
                number = answer.get("id")
                if not isinstance(number, int):
                    raise BadFrame("a message that answers no request")
                if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                    waiting.set_result(answer)
        except BadFrame as error:
            why = str(error)
        await self._end(STOP_GRACE_S)
        self._fault = str(self._fault_of(why))
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EnvironmentFault(self._fault))

    def _gone(self, why: str = "") -> EnvironmentFault:
        self._await_end(STOP_GRACE_S)
        return self._fault_of(why)

    def _fault_of(self, why: str) -> EnvironmentFault:
        code = self._exit_code()
        how = "no longer answers" if code is None else f"ended with code {code}"
        reason = f": {why}" if why else "; what it printed is in this log"
        return EnvironmentFault(f"{self.guest.place}: the process of {self.guest.module!r} {how}{reason}")

    @contextlib.contextmanager
    def _end_descriptor(self) -> Iterator[int | None]:
        """A descriptor that becomes readable when the process ends. None if it is reaped.

        Waiting for it does not reap the process: as long as it is not reaped, its number names its group.
        """
        if self._process.returncode is not None:
            yield None
            return
        descriptor = os.pidfd_open(self._process.pid)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _await_end(self, limit_s: float) -> None:
        """What `_end` does, before the event loop runs."""
        with self._end_descriptor() as descriptor:
            if descriptor is not None:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(1000 * limit_s)

    async def _end(self, limit_s: float) -> None:
        """Wait for the end of the process, at most `limit_s`."""
        with self._end_descriptor() as descriptor:
            if descriptor is None:
                return
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(descriptor, ended.set)
            try:
                async with asyncio.timeout(limit_s):
                    await ended.wait()
            except TimeoutError:
                return  # the caller says so, or kills it
            finally:
                loop.remove_reader(descriptor)

    def _exit_code(self) -> int | None:
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    async def close(self) -> None:
        """Let the process end by itself; kill it, and all that it started, after `STOP_GRACE_S`."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._disconnect()
        await self._end(STOP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the process, and all that it started, at once."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the connection, through the event loop if the loop reads it. The loop knows connections by their
        numbers: if this one were closed without it, the next process could get the number, and the loop would stop
        reading that process's answers when it drops this one."""
        if self._opening is None or self._opening.get_loop().is_closed():
            self._connection.close()
        elif not self._opening.done():
            self._opening.cancel()
        elif not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().transport.abort()


def _value(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise GuestError(str(answer["error"]), str(answer.get("kind", "")))
    return answer.get("value")

"""Runs the code of an environment or an agent in a process of its own: starts it, asks it, and replaces it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import select
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from prime_rl.launch import ProcessSpec
from prime_rl.launch.logs import opened_for_attempt, tail
from prime_rl.launch.reaper import kill_marked
from prime_rl.orchestrator.errors import EnvironmentFault, GroupFailed
from prime_rl.orchestrator.proxy.routes import RecordingProxy
from prime_rl.orchestrator.rollouts.rollout import Rollout
from prime_rl.orchestrator.workers.blocked import Report, ignore_report
from prime_rl.orchestrator.workers.environment import Described, GroupRequest, Split, TextRows
from prime_rl.orchestrator.workers.failures import GroupTimeout, in_time
from prime_rl.orchestrator.workers.inside.frames import PROTOCOL, BadFrame, encode, receive, receive_now
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE, TEACHER_KEY_VARIABLE, direct_loopback
from prime_rl.utils.gpus import MASK_VARIABLE
from prime_rl.utils.logger import get_logger

INSIDE = Path(__file__).parent / "inside"
STOP_GRACE_S = 5.0
ROWS_AT_ONCE = 256
SHOWN_ROWS = 16
"""Rows of an endless environment that are read at the start, to look at their prompts."""
MARK_VARIABLE = "PRIME_RL_ENVIRONMENT_PROCESS"
GREETING = -1
"""The id of the first message, which names what to load."""
BLOCKED_S = 30.0
"""Seconds after the end of a time limit in which a process must answer. One that does not is blocked by its code."""
LAST_ANSWERS_S = 1.0
"""Seconds in which answers of an ended process are still read."""
TAIL_LINES = 20
"""Lines of its own log that the error of an ended process shows."""
MAX_ENDS_IN_A_ROW = 5
"""Ends of the process without an answer between them, after which its code counts as broken."""
_OURS = frozenset(
    {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "UV_RUN_RECURSION_DEPTH", ENGINE_KEY_VARIABLE, TEACHER_KEY_VARIABLE}
)
"""Variables of this process that an interpreter of another environment must not get."""

_ADDED = {MASK_VARIABLE: "", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


class WorkerError(Exception):
    """The environment's own code failed in a request."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        """Name of the class of what it raised."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
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
    is_ours: bool = False
    """Whether it is this interpreter with our packages, which gets all variables of this process."""
    threads: int | None = None
    """Threads for plain reward functions and tools. None runs them in the event loop."""
    log: Path | None = None
    """File of its output. None: the log of this process."""
    server_of: str = ""
    """The environment that it serves instead of this process, for messages."""

    @property
    def who(self) -> str:
        if self.server_of:
            return f"the server of environment {self.server_of!r}"
        return f"{self.place}: the process of {self.module!r}"


class WorkerProcess:
    """One running environment.

    Until `connect`, requests block: environments are loaded before the event loop runs.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        log_offset: int,
        mark: str,
    ) -> None:
        self.spec = spec
        self._mark = mark
        """Value of a variable that all processes inherit which its code starts."""
        self.versions = ""
        self._process = process
        self._connection = connection
        self._log_offset = log_offset
        """Byte offset in its own log at which its output starts."""
        self._numbers = itertools.count()
        self._opening: asyncio.Task[asyncio.StreamWriter] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._cancelled: set[int] = set()
        """Requests that may be answered, although nobody waits any more."""
        self._fault = ""
        """Why the process no longer answers."""
        self.report: Report = ignore_report

    @classmethod
    def spawn(cls, spec: WorkerSpec) -> Self:
        """Start the process, which loads nothing before it is greeted. It dies with the thread that calls this.

        Raises:
            EnvironmentFault: the interpreter cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as opened:
            argv = [str(spec.python), *spec.program, str(theirs.fileno())]
            env = dict(os.environ)
            if not spec.is_ours:
                env = {name: value for name, value in env.items() if name not in _OURS} | _ADDED
            mark = secrets.token_hex(8)
            env |= {**spec.added, MARK_VARIABLE: mark}
            # The proxy of the run is on this machine, behind no other proxy.
            env |= direct_loopback(env)
            output, offset = None, 0
            if spec.log is not None:
                logged = ProcessSpec(spec.server_of, tuple(argv), spec.log)
                output, offset = opened.enter_context(opened_for_attempt(logged))
            try:
                process = subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    pass_fds=(theirs.fileno(),), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise EnvironmentFault(f"{spec.place}.python = {str(spec.python)!r}: {error.strerror}") from error
        if spec.log is not None:
            where = f"process {process.pid}; its log is {spec.log}"
            get_logger().info(f"Environment {spec.server_of!r} is served by {where}")
        return cls(spec, process, ours, offset, mark)

    @classmethod
    def start(cls, spec: WorkerSpec) -> Self:
        """Start the process and load the environment, before the event loop runs.

        Raises:
            EnvironmentFault: the interpreter cannot be started, or the environment does not load in it.
        """
        started = cls.spawn(spec)
        try:
            started._welcome(started._exchange(started._greeting()))
        except BaseException:
            started.kill()
            raise
        return started

    async def greet(self) -> None:
        """Load the environment. Raises EnvironmentFault as `start`."""
        self._welcome(await self._answer(self._greeting()))

    def _greeting(self) -> dict[str, Any]:
        spec = self.spec
        tables = {name: dict(getattr(spec, name)) for name in ("args", "attributes", "taskset", "agent")}
        settings = {"protocol": PROTOCOL, "module": spec.module, "judge": spec.judge, "threads": spec.threads, **tables}
        return {"id": GREETING, **settings}

    def _welcome(self, hello: Mapping[str, Any]) -> None:
        spec = self.spec
        if "fault" in hello:
            raise EnvironmentFault(f"{spec.place}: {spec.module!r} does not load in {spec.python}: {hello['fault']}")
        names = (("verifiers", "verifiers"), ("python", "Python"))
        self.versions = ", ".join(f"{shown} {hello[name]}" for name, shown in names if name in hello)

    def ask_now(self, do: str, **arguments: Any) -> Any:
        """What `ask` does, before the event loop runs."""
        return value_of(self._exchange({"id": next(self._numbers), "do": do, "with": arguments}))

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
            WorkerError: the environment's code failed.
            EnvironmentFault: the process is gone.
        """
        return value_of(await self._answer({"id": next(self._numbers), "do": do, "with": arguments}))

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        writer = await self._connect()
        number = message["id"]
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            writer.write(encode(message))
            answered: dict[str, Any] = await answer
            return answered
        except asyncio.CancelledError:
            with contextlib.suppress(ConnectionError):
                writer.write(encode({"do": "cancel", "of": number}))
            self._cancelled.add(number)
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
        self._ending = asyncio.create_task(self._close_at_end(writer))
        return writer

    async def _close_at_end(self, writer: asyncio.StreamWriter) -> None:
        """Close the connection some time after the process has ended: a child of it may hold the other end open."""
        await self._end(None)
        await asyncio.sleep(LAST_ANSWERS_S)
        writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = ""
        try:
            while (answer := await receive(reader)) is not None:
                number = answer.get("id")
                if not isinstance(number, int):
                    raise BadFrame("a message that answers no request")
                if "loop" in answer:
                    self.report(answer["loop"])
                waiting = self._waiting.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
                elif number in self._cancelled:
                    self._cancelled.discard(number)
                else:
                    raise BadFrame("a message that answers no request")
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
        lines: list[str] = []
        if why:
            reason = f": {why}"
        elif self.spec.log is None:
            reason = "; what it printed is in this log"
        else:
            reason = f"; its log is {self.spec.log}"
            lines = [f"  | {line}" for line in tail(self.spec.log, TAIL_LINES, self._log_offset)]
        return EnvironmentFault("\n".join([f"{self.spec.who} {how}{reason}", *lines]))

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

    async def _end(self, limit_s: float | None) -> None:
        """Wait for the end of the process, at most `limit_s` unless that is None."""
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
        tasks = [task for task in (self._reading, self._ending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._disconnect()
        await self._end(STOP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the process, and all that it started, at once."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            # A daemon that its code started has left the group.
            kill_marked(MARK_VARIABLE, self._mark)
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
        if self._ending is not None and not self._ending.get_loop().is_closed():
            self._ending.cancel()


def value_of(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise WorkerError(str(answer["error"]), str(answer.get("kind", "")))
    return answer.get("value")


class WorkerEnded(GroupFailed):
    """The process ended or did not answer. Its requests fail; later ones get a new process."""


class RestartingProcess:
    """Asks a process that is replaced when it is gone."""

    def __init__(self, spec: WorkerSpec, process: WorkerProcess | None = None) -> None:
        """`process` has loaded the environment already. None: the first request starts one."""
        self.spec = spec
        self.blocked_s = BLOCKED_S
        self._process = process
        self._greeting: asyncio.Task[None] | None = None
        """Ends once the environment is loaded in the process."""
        self._ends_in_a_row = 0
        self.report: Report = ignore_report

    @contextlib.contextmanager
    def chosen(self) -> Iterator[RestartingProcess]:
        """This one: there is no other."""
        yield self

    async def ask(self, do: str, limit_s: float | None = None, **arguments: Any) -> Any:
        """The answer to one request. `limit_s` is a time after which the process counts as blocked.

        Raises:
            WorkerError: the code failed.
            WorkerEnded: the process ended, or does not answer within `limit_s`.
            EnvironmentFault: it ends whenever it is started.
        """
        process = await self._running()
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                value = await process.ask(do, **arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._lost(process, f"it blocks its process: no answer within {limit_s:g} s", "Blocked") from error
        except EnvironmentFault as error:
            raise self._lost(process, str(error), "EnvironmentEnded") from error
        self._ends_in_a_row = 0
        return value

    async def open(self) -> None:
        """Start the process. Raises EnvironmentFault if its environment does not load."""
        await self._running()

    async def _running(self) -> WorkerProcess:
        """The process, once its environment is loaded. A request that is cancelled meanwhile leaves it to the next."""
        if self._process is None:
            if self._ends_in_a_row >= MAX_ENDS_IN_A_ROW:
                raise EnvironmentFault(
                    f"{self.spec.who} ended {self._ends_in_a_row} times in a row before it answered anything; "
                    f"what it printed is in {self.spec.log or 'this log'}"
                )
            self._process = WorkerProcess.spawn(self.spec)
            self._greeting = asyncio.create_task(self._process.greet())
        process = self._process
        process.report = self.report
        if self._greeting is not None:
            try:
                await asyncio.shield(self._greeting)
            except EnvironmentFault:
                if process is self._process:
                    self._process = None
                    process.kill()
                raise
        return process

    def _lost(self, process: WorkerProcess, why: str, reason: str) -> WorkerEnded:
        """The first request that notices ends the process, and alone counts against the environment."""
        is_first = process is self._process
        if is_first:
            self._process = None
            self._ends_in_a_row += 1
            get_logger().warning(f"The process of {self.spec.module!r} is gone or blocked, and starts again: {why}")
            process.kill()
        return WorkerEnded(why.splitlines()[0], reason, is_of_environment=is_first)

    async def close(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
            await asyncio.gather(self._greeting, return_exceptions=True)
        if self._process is not None:
            await self._process.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


class ProcessPool:
    """Several processes with the same environment. Each group is run by the one that has the fewest."""

    def __init__(self, processes: Sequence[RestartingProcess]) -> None:
        self._processes = list(processes)
        self._running = [0] * len(self._processes)
        self.blocked_s = BLOCKED_S

    @property
    def report(self) -> Report:
        return self._processes[0].report

    @report.setter
    def report(self, report: Report) -> None:
        for each in self._processes:
            each.report = report

    @contextlib.contextmanager
    def chosen(self) -> Iterator[RestartingProcess]:
        """The process that runs the fewest groups, which gets one more while the block runs."""
        at = self._running.index(min(self._running))
        self._running[at] += 1
        try:
            yield self._processes[at]
        finally:
            self._running[at] -= 1

    async def open(self) -> None:
        """Start all processes. Raises EnvironmentFault if the environment does not load in one."""
        await asyncio.gather(*(each.open() for each in self._processes))

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._processes))

    def kill(self) -> None:
        for each in self._processes:
            each.kill()


def pool_of(specs: Iterable[WorkerSpec], started: WorkerProcess | None = None) -> RestartingProcess | ProcessPool:
    """A process for each spec. `started` is that of the first one, if it has loaded the environment already."""
    first, *others = specs
    if not others:
        return RestartingProcess(first, started)
    return ProcessPool([RestartingProcess(first, started), *(RestartingProcess(each) for each in others)])


class ProcessWorker:
    """Runs a verifiers environment of any supported version in an interpreter of its own.

    It asks the model through a proxy of this process, which listens on the loopback interface.
    """

    def __init__(self, name: str, process: WorkerProcess, proxy: RecordingProxy, num_processes: int = 1) -> None:
        self.name = name
        self.process = pool_of([process.spec] * num_processes, process)
        self.proxy = proxy
        self._first = process

    @classmethod
    def start(cls, name: str, spec: WorkerSpec, num_processes: int = 1) -> Self:
        """Start the first process; the others start with the first group, or by `open`.

        Raises EnvironmentFault if the environment does not load in its interpreter.
        """
        process = WorkerProcess.start(spec)
        get_logger().info(f"Environment {name!r} runs in {spec.python} ({process.versions})")
        return cls(name, process, RecordingProxy(), num_processes)

    def describe(self, split: Split) -> Described:
        """Ask the process, before the event loop runs. Raises EnvironmentFault if it cannot make its dataset."""
        process = self._first
        try:
            found = process.ask_now("describe", split=split)
            count = SHOWN_ROWS if found["rows"] is None else found["rows"]
            texts = list(_row_texts(process, split, count))
        except WorkerError as error:
            raise EnvironmentFault(
                f"{process.spec.place}: cannot build the dataset of {self.name!r}: {error}"
            ) from error
        return Described(
            TextRows(texts),
            found["rows"] is None,
            found["functions"],
            found["tools"],
            falls_back=found.get("falls_back", False),
        )

    async def open(self) -> None:
        await self.proxy.open()
        await self.process.open()

    def report_to(self, report: Report) -> None:
        self.process.report = report

    async def roll_out(self, group: GroupRequest) -> list[Rollout]:
        """A group that raises, or in which a rollout ends with an error, is rolled out again up to `max_retries` times.

        Raises:
            WorkerError: the environment's code failed.
            WorkerEnded: its process ended; the next group gets a new one.
            EnvironmentFault: its process ends whenever it is started.
            GroupTimeout: it took longer than `timeout_s` of the environment.
        """
        await self.proxy.open()
        for retries_left in range(group.max_retries, -1, -1):
            try:
                with self.process.chosen() as process:
                    rollouts = await self._once(group, process)
                fault = next((each.error_detail or each.error for each in rollouts if each.error), None)
            except WorkerError as error:
                if not retries_left:
                    raise
                fault = str(error)
            if fault is None or not retries_left:
                break
            get_logger().warning(f"Environment {self.name!r}, row {group.example.row}: {fault}; trying once more")
        return rollouts

    async def _once(self, group: GroupRequest, process: RestartingProcess) -> list[Rollout]:
        sessions_of_group = self.proxy.sessions.opened(group.size, group.server, group.sampling_args)
        # The proxy asks for log-probabilities by itself: answers need not carry them to an environment that drops them.
        sampling = {name: each for name, each in group.sampling_args.items() if name not in ("logprobs", "extra_body")}
        try:
            async with in_time(group.timeout_s, group.example.env, group.example.row):
                with sessions_of_group as sessions:
                    outputs = await process.ask(
                        "run_group",
                        split=group.split,
                        row=group.example.row,
                        base_url=self.proxy.base_url,
                        model=group.server.model,
                        sampling_args=sampling,
                        sessions=[session.key for session in sessions],
                        proxy_key=self.proxy.key,
                    )
        except GroupTimeout:
            # A process that code without `await` blocks answers nothing, and is replaced.
            await process.ask("describe", process.blocked_s, split=group.split)
            raise
        by_key = {session.key: session for session in sessions}
        return group.read(outputs, lambda key: by_key[key].recorded)

    def waits_for(self) -> str:
        return ""

    async def close(self) -> None:
        # First the process: the proxy waits for its open requests.
        await self.process.close()
        await self.proxy.close()


def _row_texts(process: WorkerProcess, split: str, count: int) -> Iterator[str]:
    """The rows of the dataset as JSON."""
    start, at_once = 0, ROWS_AT_ONCE
    while start < count:
        try:
            rows = process.ask_now("rows", split=split, start=start, stop=min(start + at_once, count))
        except WorkerError as error:
            if error.kind != BadFrame.__name__ or at_once == 1:
                raise
            at_once //= 2  # more than one message can hold
            continue
        yield from (json.dumps(row) for row in rows)
        start += at_once

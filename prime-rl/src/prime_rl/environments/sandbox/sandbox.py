"""Runs programs and tests in a sandbox: `Sandbox().run("print(input())", "7")`, `Sandbox().check(program, tests)`."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal, NamedTuple, TypeVar

from prime_rl.environments.sandbox.layers import AUTOMATIC, Layer, LayerName, ProgramLimits, SandboxFault, layer
from prime_rl.environments.sandbox.zygotes import START_LIMIT_S, STOP_LIMIT_S, Zygote, ZygoteEnded

MAX_STARTS = 3
"""Starts of the sandbox for one program, if the sandbox ends for a reason other than the program."""
MAX_MESSAGE_BYTES = 64 * 1024
_CONTAINER = "a container without network and capabilities, read-only, as user nobody; Python's files alone"
Ended = Literal["exit", "time", "output"]
Result = TypeVar("Result")


class Ran(NamedTuple):
    """How a program ended, and what it printed. `code` is negative for a signal."""

    ended: Ended
    code: int
    output: str
    raised: str
    """The exception that the program reports. Not trustworthy."""


class Verdict(NamedTuple):
    """Number of tests that passed until one failed, and the reason of that failure."""

    passed: int
    total: int
    reason: str

    @property
    def all_passed(self) -> bool:
        return self.total > 0 and self.passed == self.total


class Sandbox:
    """Runs one program at a time. Not thread-safe.

    Two zygotes fork the processes: one for programs, one (from the first `check` on) for tests.

    Raises:
        SandboxFault: no layer, or not the chosen one, can run here.
    """

    def __init__(
        self,
        layer_name: LayerName | Literal["auto"] = "auto",
        limits: ProgramLimits | None = None,
        layer_of: Callable[[LayerName], Layer] = layer,
    ) -> None:
        self._layer_of = layer_of
        self.limits = limits or ProgramLimits()
        self.skipped: dict[str, str] = {}
        """Layers that cannot run here, with the reason."""
        self._candidates, self.layer = self._first(AUTOMATIC if layer_name == "auto" else (layer_name,))
        self._testers: Zygote | None = None

    def describe(self) -> str:
        """One line: the layer in force, and what it does not hide from programs."""
        hello, name = self._candidates.hello, self.layer.name
        user = "a user of its own" if self.layer.uid is not None else f"user {hello['uid']}"
        parts = {
            "bubblewrap": "bubblewrap (own user, process, network and mount namespaces; an empty root)",
            "namespaces": "own user, process, network and mount namespaces",
            "seccomp": f"no namespaces ({user})",
            "docker": f"docker ({_CONTAINER})",
            "podman": f"podman ({_CONTAINER})",
        }
        files = "Landlock hides all files but Python's" if hello["landlock"] else ""
        if not files and not self.layer.hides_files:
            files = "programs can READ every file that this user may read: the kernel has no Landlock"
        skipped = "".join(f"; no {each}: {reason}" for each, reason in self.skipped.items())
        return ", ".join(filter(None, [parts[name], "seccomp", "rlimits", files])) + skipped

    def run(self, source: str, text: str = "", time_s: float | None = None) -> Ran:
        """Run a program with this text as its input. `time_s` replaces the sandbox's time limit."""
        return self._with_restarts(lambda: self._run(source, text, time_s or self.limits.time_s))

    def check(
        self,
        source: str,
        tests: Sequence[str],
        setup: str = "",
        exposed: Sequence[str] | None = None,
        aliases: dict[str, str] | None = None,
        time_s: float | None = None,
    ) -> Verdict:
        """Load a program in one process and run tests of its functions in another, until one fails.

        `exposed` are the names that the tests take from the program; unset, names that nothing else defines. `aliases`
        are other names for them. `setup` runs before the tests, without the program.
        """
        tested = {"tests": list(tests), "setup": setup, "exposed": exposed and list(exposed), "aliases": aliases or {}}
        return self._with_restarts(lambda: self._check(source, tested, time_s or self.limits.time_s))

    def pids(self) -> list[int]:
        """Process ids of the zygotes, or of ancestors of them."""
        return [each.pid for each in (self._candidates, self._testers) if each is not None]

    def close(self) -> None:
        """End the processes."""
        self._candidates.close()
        if self._testers is not None:
            self._testers.close()

    def _first(self, names: Sequence[LayerName]) -> tuple[Zygote, Any]:
        for name in names:
            try:
                found = self._layer_of(name)
                zygote = Zygote(found, self.limits)
            except SandboxFault as error:
                self.skipped[name] = str(error)
                continue
            if not zygote.hello["seccomp"]:
                self.skipped[name] = "the kernel does not filter system calls"
            elif name == "namespaces" and not zygote.hello["landlock"]:
                self.skipped[name] = "the kernel has no Landlock, which has to hide files"
            elif name == "seccomp" and not zygote.hello["landlock"] and os.geteuid() == 0 and found.uid is None:
                self.skipped[name] = (
                    "it would run as root and could read all files, because other users cannot read Python's folder"
                )
            elif not (failure := self._failure_of_a_first_program(zygote)):
                return zygote, found
            else:
                self.skipped[name] = failure
            zygote.close()
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
        raise SandboxFault(
            f"no sandbox for programs works on this machine ({reasons}): use Linux with seccomp, or install bubblewrap"
        )

    def _failure_of_a_first_program(self, zygote: Zygote) -> str:
        """Reason why an empty program fails, or "": if it did, every program of the model would count as 0."""
        self._candidates = zygote
        try:
            ran = self._run("", "", START_LIMIT_S)
        except ZygoteEnded:
            return "it ended while it ran an empty program"
        return "" if ran[:2] == ("exit", 0) else f"an empty program ends with {ran.code} {ran.raised}".strip()

    def _with_restarts(self, action: Callable[[], Result]) -> Result:
        for _ in range(MAX_STARTS):
            try:
                return action()
            except ZygoteEnded:
                self.close()
                self._candidates, self._testers = Zygote(self.layer, self.limits), None
        raise SandboxFault("the sandbox ended three times while it ran one program")

    def _run(self, source: str, text: str, time_s: float) -> Ran:
        deadline = time.monotonic() + time_s
        with ExitStack() as stack:
            ours, theirs = map(stack.enter_context, map(closing, socket.socketpair()))
            reader, writer = os.pipe()
            stack.callback(os.close, reader)
            try:
                self._candidates.start(theirs, writer)
            finally:
                os.close(writer)
                theirs.close()
            sent = _send(ours, {"do": "program", "source": source, "input": text}, deadline)
            output, ended = self._collected(reader, deadline) if sent else (b"", "time")
            code = self._code(ended, deadline)
            if code is None:
                ended, code = "time", -9
            said = _received(ours)
        raised = str(said.get("raised", ""))[:300]
        return Ran(ended, code, output.decode("utf-8", "replace"), raised)

    def _collected(self, reader: int, deadline: float) -> tuple[bytes, Ended]:
        """Read the program's output until it ends or exceeds a limit."""
        output = bytearray()
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([reader], [], [], left)[0]:
                return bytes(output), "time"
            if not (part := os.read(reader, 2**16)):
                return bytes(output), "exit"
            output += part
            if len(output) > self.limits.output_bytes:
                return bytes(output[: self.limits.output_bytes]), "output"

    def _code(self, ended: Ended, deadline: float) -> int | None:
        """The exit code of the program, which is killed if it still runs. None if it closed its output and ran on."""
        if ended == "exit":
            try:
                return self._candidates.wait(deadline)
            except TimeoutError:
                self._candidates.stop()
                return None
        self._candidates.stop()
        return -9

    def _check(self, source: str, tested: dict[str, Any], time_s: float) -> Verdict:
        total = len(tested["tests"])
        if self._testers is None:
            self._testers = Zygote(self.layer, self.limits)
        deadline = time.monotonic() + time_s
        with ExitStack() as stack:
            programs, tests = map(stack.enter_context, map(closing, socket.socketpair()))
            ours, tester = map(stack.enter_context, map(closing, socket.socketpair()))
            request_end, program_end = map(stack.enter_context, map(closing, socket.socketpair()))
            self._candidates.start(program_end, programs.fileno())
            self._testers.start(tester, tests.fileno())
            for each in (program_end, programs, tester, tests):
                each.close()
            message: dict[str, Any] = {}
            if _send(request_end, {"do": "serve", "source": source}, deadline) and _send(
                ours, {"do": "test", **tested}, deadline
            ):
                message = _received(ours, deadline)
            for zygote in (self._testers, self._candidates):
                if message and zygote is self._testers:
                    zygote.wait(time.monotonic() + STOP_LIMIT_S)
                else:
                    zygote.stop()
        if not message:
            late = time.monotonic() >= deadline
            return Verdict(0, total, f"ended at {time_s:g} s" if late else "its tests ended early")
        return Verdict(int(message["passed"]), total, str(message["reason"]))


def _send(connection: socket.socket, message: dict[str, Any], deadline: float) -> bool:
    """Send a message. Returns whether the process took it in time."""
    body = json.dumps(message).encode()
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        connection.sendall(struct.pack("<I", len(body)) + body)
    except OSError:
        return False
    return True


def _received(connection: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """Read the report of a process; {} if there is none. Without a deadline, only a report that is already there."""
    body = b""
    try:
        while not body or len(body) < 4 + struct.unpack("<I", body[:4])[0]:
            connection.settimeout(0.0 if deadline is None else max(0.001, deadline - time.monotonic()))
            part = connection.recv(2**16)
            if not part or len(body) > MAX_MESSAGE_BYTES:
                return {}
            body += part
        message = json.loads(body[4:])
    except (OSError, ValueError, struct.error, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}

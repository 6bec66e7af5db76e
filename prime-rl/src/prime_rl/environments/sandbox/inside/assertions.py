"""Runs the tests of a program. The program is in another process; its functions are called through a connection.

Tests compare the data that they receive with Python's own operators, in a process that the program cannot reach. So the
program can only answer calls: it sees arguments, never an expected value.
"""

from __future__ import annotations

import ast
import builtins
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .plain_data import Closed, Unsendable, decode, encode, receive, send

NOT_PASSED_ON = ("StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt")
"""Exceptions of the program that would end a loop of the tests, or the tests themselves, early."""


class Program:
    """The other end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def ask(self, do: str, on: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Perform an operation on an object of the program. Returns or raises the result."""
        send(
            self.connection,
            {
                "do": do,
                "on": on,
                "args": [encode(each, self.number) for each in args],
                "kwargs": {name: encode(each, self.number) for name, each in (kwargs or {}).items()},
            },
        )
        reply = receive(self.connection)
        if not isinstance(reply, dict):
            raise Closed("a reply that is not an object")
        if "value" in reply:
            return decode(reply["value"], lambda number: Remote(self, number))
        name, text = str(reply.get("raised")), str(reply.get("text"))[:300]
        if do == "next" and name == "StopIteration":
            raise StopIteration
        kind = getattr(builtins, name, None)
        if name in NOT_PASSED_ON or not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise RuntimeError(text)
        try:
            raised = kind(text)
        except TypeError:  # UnicodeDecodeError and its like want more
            raised = RuntimeError(text)
        raise raised

    @staticmethod
    def number(value: object) -> dict[str, Any]:
        """The reference to an object of the program in a message to it."""
        if type(value) is Remote:
            return {"ref": object.__getattribute__(value, "_on")}
        raise Unsendable(f"a test cannot pass a {type(value).__name__} to the program")


class Remote:
    """An object of the program. It never equals data, whatever its class defines."""

    def __init__(self, program: Program, on: object) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_on", on)

    def _ask(self, do: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return object.__getattribute__(self, "_program").ask(do, object.__getattribute__(self, "_on"), args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", [name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", [name, value])

    def __iter__(self) -> Any:
        return self._ask("iterate")

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return int(self._ask("length"))

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", [key])

    def __str__(self) -> str:
        return str(self._ask("text"))

    def __eq__(self, other: object) -> bool:
        return self._ask("equal", [other]) is True if type(other) is Remote else NotImplemented

    def __hash__(self) -> int:
        return hash(("remote", object.__getattribute__(self, "_on")))


def run_tests(connection: socket.socket, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run tests one after another until one fails: `passed`, `total`, and the `reason` of the failure."""
    tests, passed = request["tests"], 0
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        loaded = receive(connection)
        if not isinstance(loaded, dict) or loaded.get("loaded") is not True:
            failed = str(loaded.get("failed") if isinstance(loaded, dict) else loaded)[:300]
            return _verdict(0, tests, f"the program does not load: {failed}")
        program = Program(connection)
        names = {**{name: name for name in exposed_names(request)}, **request["aliases"]}
        remotes = {alias: Remote(program, name) for alias, name in names.items()}
        namespace |= remotes | {name: __import__(name) for name in modules_used(request)}
        exec(compile(request["setup"], "setup.py", "exec"), namespace)
        namespace |= remotes  # the setup may have a stub of the same name
        for test in tests:
            exec(compile(test, "tests.py", "exec"), namespace)
            passed += 1
    except Closed as error:
        return _verdict(passed, tests, f"the program ended or broke off: {error}")
    except AssertionError as error:
        return _verdict(passed, tests, f"AssertionError: {str(error)[:200]}".rstrip(": "))
    except BaseException as error:  # noqa: BLE001 - tests raise anything
        return _verdict(passed, tests, f"{type(error).__name__}: {' '.join(str(error)[:300].split())}")
    return _verdict(passed, tests, "")


def _verdict(passed: int, tests: Sequence[str], reason: str) -> dict[str, Any]:
    return {"passed": passed, "total": len(tests), "reason": reason}


def exposed_names(request: Mapping[str, Any]) -> list[str]:
    """Names that the tests take from the program: names that neither the tests, nor Python, nor a module defines.

    So a program that defines `sorted` or `math` changes nothing in its tests.
    """
    if request.get("exposed") is not None:
        return list(request["exposed"])
    loaded: set[str] = set()
    defined = modules_used(request)
    for source in [request["setup"], *request["tests"]]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                (loaded if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                defined.add(node.name)
    return sorted(name for name in loaded - defined if not hasattr(builtins, name))


def modules_used(request: Mapping[str, Any]) -> set[str]:
    """Standard modules that tests use as in `math.isclose`. Tests often rely on the program's imports."""
    return {
        node.value.id
        for source in [request["setup"], *request["tests"]]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in sys.stdlib_module_names
    }

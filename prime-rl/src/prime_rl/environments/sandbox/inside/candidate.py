"""Runs an untrusted program, or serves calls of its functions."""

from __future__ import annotations

import io
import os
import socket
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from .plain_data import Closed, Unsendable, decode, encode, receive, send


def run_program(source: str, report: Callable[[str], None]) -> int:
    """Run a program on descriptors 0 (input) and 1 (output). Returns the exit code."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="replace"
    )
    code = 0
    try:
        exec(compile(source, "program.py", "exec"), _module("__main__").__dict__)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
    except BaseException as error:  # noqa: BLE001 - programs raise anything
        report(_one_line(error))
        code = 1
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = code or 1
    return code & 0xFF


def serve(connection: socket.socket, source: str) -> None:
    """Load a program, then answer calls from its tests."""
    objects: dict[int, Any] = {}

    def reference(value: Any) -> dict[str, int]:
        objects[number := len(objects) + 1] = value
        return {"ref": number}

    module = _module("candidate")
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except BaseException as error:  # noqa: BLE001 - programs raise anything
        send(connection, {"failed": _one_line(error)})
        return
    send(connection, {"loaded": True})
    while True:
        try:
            call = receive(connection)
        except Closed:
            return
        send(connection, _answer(call, module, objects, reference))


def _answer(
    call: Mapping[str, Any], module: types.ModuleType, objects: Mapping[int, Any], reference: Callable[[Any], Any]
) -> dict[str, Any]:
    def resolve(name: Any) -> Any:
        return getattr(module, name) if isinstance(name, str) else objects[name]

    try:
        target = resolve(call["on"])
        positional = [decode(each, resolve) for each in call.get("args", ())]
        keywords = {name: decode(each, resolve) for name, each in call.get("kwargs", {}).items()}
        return {"value": encode(_OPERATIONS[call["do"]](target, *positional, **keywords), reference)}
    except (Unsendable, RecursionError) as error:
        return {"raised": "TypeError", "text": _one_line(error)}
    except BaseException as error:  # noqa: BLE001 - programs raise anything
        kind = next((each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins"), "Exception")
        return {"raised": kind, "text": _one_line(error)}


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "iterate": iter,
    "next": next,
    "length": len,
    "item": lambda target, key: target[key],
    "text": str,
    "equal": lambda target, other: bool(target == other),
}


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def _one_line(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    except BaseException:  # noqa: BLE001 - programs raise anything
        text = type(error).__name__
    return text[:300]


def input_from(text: str) -> int:
    """A file descriptor with this text. In memory, so that a program may seek and reopen it."""
    descriptor = os.memfd_create("input")
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor

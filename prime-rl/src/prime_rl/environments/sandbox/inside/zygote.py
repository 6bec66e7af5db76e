"""The zygote: a warm Python that forks a process for each program. Arguments: this package's folder, CONTROL, SETTINGS.

CONTROL is a socket: its descriptor or, in a container, its path. A message is one byte: `r` (run) with two descriptors,
the connection of the program and its output; or `s` (stop). The reply to every `r` is a line: the wait status of the
process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from . import assertions, candidate, confinement
from .plain_data import Closed, receive, send

COMMON = (
    "bisect collections copy dataclasses datetime decimal fractions functools heapq itertools math operator random re "
    "statistics string time typing"
)
"""Modules that programs import most. A forked process has them already."""


def main() -> None:
    is_in_container = not sys.argv[2].isdigit()
    control = socket.socket(socket.AF_UNIX) if is_in_container else socket.socket(fileno=int(sys.argv[2]))
    if is_in_container:
        control.connect(sys.argv[2])
    settings = json.loads(sys.argv[3])
    nothing = os.open(os.devnull, os.O_RDWR)
    confinement.drop_privileges(settings["uid"])
    if not is_in_container:  # in a container, the parent is a thread of the engine, which may end
        confinement.end_with_parent()
    hello = {"landlock": confinement.hide_files(), "seccomp": _filters_calls(), "uid": os.getuid()}
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for name in COMMON.split():
        importlib.import_module(name)
    control.sendall(json.dumps(hello).encode() + b"\n")
    sys.set_int_max_str_digits(0)  # programs may print numbers of any length; time is limited anyway
    gc.freeze()
    while True:
        try:
            command, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        except OSError:
            return
        if not command:
            return
        if command == b"r":
            _run(control, descriptors, settings)


def _filters_calls() -> bool:
    """Whether system calls can be filtered here. Tested in a child, because a filter is for good."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if confinement.forbid_system_calls() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _run(control: socket.socket, descriptors: Sequence[int], settings: dict[str, Any]) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _child(control, descriptors, settings, parent)
        finally:
            os._exit(70)
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(pid)
    while ended not in select.select([ended, control.fileno()], [], [])[0]:
        command = control.recv(1)
        os.kill(pid, signal.SIGKILL)  # `s`, or nobody waits any more
        if not command:
            os._exit(0)
    os.close(ended)
    _, status = os.waitpid(pid, 0)
    control.sendall(b"%d\n" % status)


def _child(control: socket.socket, descriptors: Sequence[int], settings: dict[str, Any], parent: int) -> None:
    confinement.end_with_parent()
    if os.getppid() != parent:
        return
    control.close()
    connection = socket.socket(fileno=descriptors[0])
    request = receive(connection)
    if request["do"] == "program":
        os.dup2(candidate.input_from(request["input"]), 0)
        os.dup2(descriptors[1], 1)
        os.close(descriptors[1])
        other = connection
    else:
        other = socket.socket(fileno=descriptors[1])  # before the filter: it asks the kernel for the socket's kind
    os.chdir(settings["folder"])
    confinement.limit(settings["limits"])
    if confinement.forbid_system_calls():
        _act(connection, other, request)


def _act(connection: socket.socket, other: socket.socket, request: dict[str, Any]) -> None:
    try:
        if request["do"] == "program":
            os._exit(candidate.run_program(request["source"], lambda text: send(connection, {"raised": text})))
        elif request["do"] == "serve":
            candidate.serve(other, request["source"])
        else:
            send(connection, assertions.run_tests(other, request))
    except Closed:
        os._exit(71)
    os._exit(0)

"""Connects the driver to a Ray cluster, or starts one that only this user on this machine can use."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from medarc_rl.backends.ray.listeners import open_listeners
from medarc_rl.errors import MedarcError
from prime_rl.launch.host import LocalHost
from prime_rl.launch.reaper import MARK_VARIABLE
from prime_rl.launch.spec import Signalled
from prime_rl.utils.gpus import masked_gpus, usable_gpus
from prime_rl.utils.private import RUNTIME_VARIABLE
from prime_rl.utils.scratch import scratch_directory

TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_STARTS = 4
"""Ray gives a node 30 seconds to start, which a busy machine may exceed."""
_LONGEST = 44
"""Of the directory's name, because Ray appends 62 characters to name a socket, and a socket's name has at most 107."""
_TIMED_OUT = "timed out during startup"


@contextmanager
def connected(address: str | None, gpus: int | None = None) -> Iterator[None]:
    """Connect to the cluster at `address`, or start one with `gpus` GPUs on this machine for the block.

    Call it in the main thread.

    Raises:
        MedarcError: the cluster cannot be reached or started, or others could use it.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Started by `uv run`, Ray would upload the current directory and let uv make another environment for its workers.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    # Workers that ask for no GPU see none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    if address is not None:
        if _listens_on_loopback_alone(address):
            os.environ[_LOOPBACK_VARIABLE] = "0"
        with _initialised(address=address):
            yield
        return
    # Its guard ends Ray's processes, which carry the mark, if this process is killed.
    with LocalHost() as guarded, scratch_directory("ray") as directory:
        os.environ[MARK_VARIABLE] = str(guarded.directory)
        if len(str(directory)) > _LONGEST:
            raise MedarcError(f"{directory}: too long for the names of Ray's sockets: set {RUNTIME_VARIABLE}")
        _keep_to_this_user(os.environ, directory)
        # Reads the variables above when it is imported.
        count = len(masked_gpus(os.environ) or usable_gpus(os.environ)) if gpus is None else gpus
        with _initialised(address="local", num_gpus=count, include_dashboard=False, _temp_dir=str(directory)):
            _end_if_asked(guarded)
            if listeners := open_listeners(os.getpid()):
                raise MedarcError(f"Ray listens where other machines reach it ({', '.join(listeners)}): nothing is run")
            yield


def _end_if_asked(guarded: LocalHost) -> None:
    """Raises SystemExit if a signal arrived while Ray started: `guarded` has received it."""
    while (event := guarded.next_event(0)) is not None:
        if isinstance(event, Signalled) and event.signal in (signal.SIGINT, signal.SIGTERM):
            raise SystemExit(128 + event.signal)


def _keep_to_this_user(env: MutableMapping[str, str], directory: Path) -> None:
    """Let a local cluster listen on the loopback address alone, and ask for a token there.

    Ray makes directories that others may write to; these are in one that they cannot enter.
    """
    token = directory / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    for name in (*TOKEN_VARIABLES, "RAY_ADDRESS"):
        env.pop(name, None)
    env["RAY_AUTH_MODE"] = "token"
    env["RAY_AUTH_TOKEN_PATH"] = str(token)
    # Workers that nobody has asked for take the processor from the run.
    env["RAY_prestart_worker_first_driver"] = "0"
    # A cluster of one machine then uses 127.0.0.1.
    env[_LOOPBACK_VARIABLE] = "0"


def _listens_on_loopback_alone(address: str) -> bool:
    """Whether a cluster on this machine is one that other machines do not reach. Ray would look for it at the machine's
    outward address."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost"):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only asks for the address of the route.
            probe.connect(("192.0.2.1", 9))
            socket.create_connection((probe.getsockname()[0], int(port)), 1.0).close()
        except OSError:
            return True
    return False


@contextmanager
def _initialised(**options: Any) -> Iterator[None]:
    import ray

    for left in reversed(range(_STARTS)):
        try:
            ray.init(configure_logging=False, log_to_driver=False, **options)
            break
        except SystemExit as ended:
            # Ray's handler of SIGTERM exits with the number of the signal.
            raise SystemExit(128 + ended.code if isinstance(ended.code, int) else 1) from ended
        # Ray's errors have no common class.
        except Exception as error:
            ray.shutdown()
            if not left or _TIMED_OUT not in str(error):
                where = "on this machine" if options["address"] == "local" else f"at {options['address']}"
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise MedarcError(f"no Ray cluster {where}: {lines[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def asks_for_token() -> bool:
    """Whether the cluster that this process is connected to accepts only those who know its token."""
    raylet = import_module("ray._raylet")
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)

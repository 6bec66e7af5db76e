"""The Ray back-end: starts a driver in the background of this machine, and shows, follows and stops it later."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from medarc_rl.backends.protocol import CONFIGS, RAY_DRIVER, Prepared, Request, Submitted
from medarc_rl.cli import warn
from medarc_rl.deployment import device_of, gpus_of_nodes
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.external import NoAnswer, ask
from medarc_rl.jobs import JobRecord, State, Status, log_lines
from medarc_rl.utils import (
    Run,
    check_startable,
    prepare_directory,
    reporting_directory_errors,
    write_components,
)
from prime_rl.launch.reaper import Leader
from prime_rl.run.directory import files_readable_by
from prime_rl.run.paths import RunPaths
from prime_rl.utils.pydantic_config import to_toml

PROBE = "medarc_rl.backends.ray.cluster"
_KEY = re.compile(r"[0-9a-f]{8}")
_CONNECT_LIMIT_S = 5.0
_PROBE_LIMIT_S = 120.0
"""Time limit of the process that asks a cluster for its GPUs, in seconds: it imports Ray, from a cold disk perhaps."""


@dataclass(frozen=True, kw_only=True)
class PreparedDriver(Prepared):
    """The command and the config of a driver that is not started yet."""

    run: Run[Any]
    kind: str
    argv: Sequence[str]
    config: Path
    """The driver's config. Each job has its own file, so that no other one replaces it."""


class Ray:
    """Implements `Backend`."""

    def prepare(self, request: Request) -> PreparedDriver:
        options = request.options
        if importlib.util.find_spec("ray") is None:
            raise UsageError("--to ray needs Ray: install it with `uv sync --inexact --extra ray`")
        # On one node the node's launcher starts the run, which has no other one.
        owned = {"launcher": "ray"} if request.nodes > 1 else {}
        output_dir = None if request.output_dir is None else Path(request.output_dir)
        run = request.load("ray", output_dir, owned)
        if request.kind != "eval":
            check_startable(run, options.dry_run)
        counts = gpus_of_nodes(run.config, request.shares_gpus)
        gpus = [0] * len(counts) if device_of(run.config) == "cpu" else counts
        address = _checked_address(options.ray_address, request)
        if address is not None and not options.dry_run:
            _check_cluster(address, gpus, run.config)
        key = secrets.token_hex(4)
        ours = run.paths.ray
        log, end, config = (ours / f"{key}.{ending}" for ending in ("log", "end", "toml"))
        # Without an option, RAY_ADDRESS in the environment must not lead elsewhere than this command says.
        flags = (
            "--address",
            address or "local",
            "--strategy",
            options.ray_strategy,
            *(request.split.option.split() if request.split is not None and request.split.shares_gpus else ()),
        )
        words = ("--end", str(end), request.kind, "@", str(config))
        argv = (sys.executable, "-m", RAY_DRIVER, *flags, *words)
        return PreparedDriver(
            name=request.name or f"{run.stem}-{request.kind}",
            output=str(run.paths.root),
            text=_text(argv, gpus, options.ray_strategy, address, to_toml(run.config)),
            details={"key": key, "host": socket.gethostname(), "log": str(log), "end": str(end)},
            run=run,
            kind=request.kind,
            argv=argv,
            config=config,
        )

    def submit(self, prepared: PreparedDriver) -> Submitted:
        run, details = prepared.run, prepared.details
        component = CONFIGS[prepared.kind]
        with (
            reporting_directory_errors(),
            files_readable_by(getattr(run.config, "file_access", "owner")),
            held_for_driver(run.paths) as lock,
        ):
            if getattr(run.config, "clean_output_dir", False):
                prepare_directory(run)  # the driver's config lacks this key
            write_components(run, {component: run.config}, dry_run=False)
            run.paths.ray.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run.paths.config(component), prepared.config)
            with Path(details["log"]).open("xb") as log:
                driver = subprocess.Popen(
                    prepared.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # It goes on after this command, and Ctrl-C is not for it.
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        # Until it is waited for, a driver that was killed looks alive to `--wait`.
        Thread(target=driver.wait, name="driver", daemon=True).start()
        leader = Leader.of(driver.pid)
        return Submitted(f"{leader.pid}.{leader.started_ticks}.{leader.boot}")

    def status(self, record: JobRecord) -> Status:
        end = Path(record.details.get("end", ""))
        if (code := _code(end)) is not None:
            return _status_of(code)
        if record.details.get("host") != socket.gethostname():
            return Status(
                "unknown", f"its driver runs on {record.details.get('host')}: run this command on that machine"
            )
        if _driver_of(record).is_alive:
            return Status("running", f"driver {_driver_of(record).pid} on this machine")
        # It may have ended between the two looks.
        code = _code(end)
        return Status("failed", "its driver was killed") if code is None else _status_of(code)

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        return log_lines(Path(record.details.get("log", "")), follow, lambda: self.status(record))

    def cancel(self, record: JobRecord) -> None:
        if record.details.get("host") != socket.gethostname():
            raise MedarcError(
                f"the driver of job {record.key} runs on {record.details.get('host')}: run `medarc_jobs cancel` on "
                "that machine"
            )
        driver = _driver_of(record)
        with contextlib.suppress(ProcessLookupError):  # it may end between the two
            if driver.is_alive:
                os.kill(driver.pid, signal.SIGTERM)


@contextlib.contextmanager
def held_for_driver(paths: RunPaths) -> Iterator[int]:
    """Hold a run's directory while a job is written to it. The driver goes on holding it with the yielded descriptor.

    Between the submission and the launcher's own lock, Ray may take hours to find GPUs.

    Raises:
        UsageError: a driver of another job holds it.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    # The directory itself: a file in it could be cleaned away.
    descriptor = os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{paths.root} is in use by Ray job {_open_job(paths)}: wait for it, cancel it with medarc_jobs, or "
                "choose another --output-dir"
            ) from None
        except OSError:
            # Some file systems have no locks. Then only the launcher's own, which it holds once it has started, counts.
            warn(
                f"{paths.root}: its file system does not support locks: do not submit another job with this directory "
                "until this one has ended"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _open_job(paths: RunPaths) -> str:
    """Keys of the jobs in a directory that have begun and not ended."""
    begun = sorted(paths.ray.glob("*.log"), key=lambda log: log.stat().st_mtime)
    keys = [log.stem for log in begun if not log.with_suffix(".end").exists() and _KEY.fullmatch(log.stem)]
    return keys[-1] if keys else "that is being submitted"


def _checked_address(address: str | None, request: Request) -> str | None:
    """Raises UsageError: it is not an address, or one of a service that runs drivers itself."""
    if address is None:
        return None
    if address.startswith(("http://", "https://")):
        driver = ("python", "-m", RAY_DRIVER, request.kind, *request.given.words)
        raise UsageError(
            f"--ray-address {address}: this is Ray's job server; let it run the driver, with "
            f"`ray job submit --address {shlex.quote(address)} -- {shlex.join(driver)}`"
        )
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--ray-address {address!r}: write HOST:PORT, as `ray start --head` prints it")
    return address


def _check_cluster(address: str, gpus: Sequence[int], config: Any) -> None:
    """Raises UsageError: nothing answers there, or the cluster is too small."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_LIMIT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(
            f"--ray-address {address}: {why}; start a cluster with `ray start --head`, or leave the option out"
        ) from error
    try:
        answer = ask([sys.executable, "-m", PROBE, address, json.dumps(list(gpus)), device_of(config)], _PROBE_LIMIT_S)
    except NoAnswer as error:
        raise UsageError(f"--ray-address {address}: {error}") from error
    if answer.code != 0:
        raise UsageError(f"--ray-address {address}: {answer.last_line.removeprefix('error: ')}")


def _text(argv: Sequence[str], gpus: Sequence[int], strategy: str, address: str | None, config: str) -> str:
    bundles = json.dumps([{"CPU": 1, **({"GPU": count} if count else {})} for count in gpus])
    where = "a cluster of this machine alone" if address is None else address
    return (
        f"# cluster: {where}\n# placement group: {strategy.upper()} {bundles}\n# driver: {shlex.join(argv)}\n\n{config}"
    )


def _driver_of(record: JobRecord) -> Leader:
    try:
        pid, started, boot = record.id.split(".", 2)
        return Leader(int(pid), int(started), boot)
    except ValueError:
        return Leader(0, 0, "")


def _code(end: Path) -> int | None:
    try:
        return int(end.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _status_of(code: int) -> Status:
    states: Mapping[int, State] = {0: "succeeded", 130: "cancelled", 143: "cancelled"}
    state: State = states.get(code, "failed")
    return Status(state, "" if code == 0 else f"exit code {code}")

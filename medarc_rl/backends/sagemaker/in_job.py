"""The entry point of a training job: `python -m medarc_rl.backends.sagemaker.in_job`.

Unpacks the project's files, reads secrets, and starts the run's launcher, or on several hosts Ray and its driver. Its
output goes to CloudWatch. SageMaker sends SIGTERM to each host when a job is stopped or loses its spot capacity, and
SIGKILL 120 s later.

On several hosts the first one writes Ray's token to the directory that all share, starts Ray's head, and then listens
at the rendezvous. Each other host connects there, starts Ray, sends its name with a proof that it knows the token, and
keeps the connection until it receives the job's exit code. A closed connection therefore means a lost host, on either
side.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread, Timer
from types import FrameType
from typing import IO, Any

from medarc_rl.backends.protocol import LAUNCHERS, RAY_DRIVER
from medarc_rl.backends.sagemaker.request import SHARES_GPUS, SOURCE_CHANNEL, name_fault, resolved
from medarc_rl.backends.sagemaker.source_files import CONFIG, MlPaths, sha256_of, unpack
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.launchers.shared_node import SINGLE_GPU_VARIABLE
from prime_rl.storage.staging import CACHE_VARIABLE
from prime_rl.utils.files import replacing_file
from prime_rl.utils.gpus import masked_gpus, usable_gpus
from prime_rl.utils.private import private_directory
from prime_rl.utils.scratch import scratch_directory
from prime_rl.utils.terminal import cut_inside, say
from prime_rl.utils.waiting import Wait

# The hosts of a job become one Ray cluster, which the first host leads.


RAY_PORT = 6379
_STARTS = 4
"""Ray gives a node 30 seconds to start, which a busy machine may exceed."""
_STARTED = "Ray runtime started"
_STOP_LIMIT_S = 115.0
"""Seconds after SIGTERM that a host waits for the first one, which saves the run."""
JOIN_LIMIT_S = 600.0
"""Seconds for all hosts to join. Each unpacks its sources and loads Ray first."""
_PROOF_LIMIT_S = 30.0
"""Seconds for a connection to prove that it is a host of the job. Others are closed then."""
_LOOK_S = 1.0
_LONGEST_LINE = 256
"""Bytes of a greeting. Whoever sends more without a line's end is not a host of the job."""


@dataclass(slots=True)
class Hosts:
    """The hosts of a job, as one host knows them."""

    names: Sequence[str]
    """The first leads."""
    own: str
    directory: Path
    """Shared by all; this user's alone."""
    env: Mapping[str, str]
    """Environment of Ray's processes, without the run's secrets."""
    port: int = RAY_PORT
    """Port of Ray's head on the first host. The rendezvous listens on the next one."""
    lost: list[str] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        return self.own == self.names[0]

    @property
    def token_file(self) -> Path:
        return self.directory / "token"

    @property
    def ray_address(self) -> str:
        return f"{resolved_address(self.names[0])}:{self.port}"

    def ray_env(self) -> dict[str, str]:
        """The environment of every process that talks to this cluster."""
        kept = {name: value for name, value in self.env.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
        return {
            **kept,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_prestart_worker_first_driver": "0",
            # Workers that ask for no GPU see none.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
            "PYTHONUNBUFFERED": "1",
        }

    @contextmanager
    def led(self, say: Callable[[str], None], on_loss: Callable[[], None]) -> Iterator[Callable[[int], None]]:
        """On the first host: lead the cluster, once all hosts have joined. Yields a function that sends the exit code.

        `on_loss` is called from a thread when a host is lost. Call it in the main thread.

        Raises:
            MedarcError: Ray does not start, or a host does not join.
        """
        private_directory(self.directory)
        token = secrets.token_hex(32)
        with replacing_file(self.token_file) as scratch:
            scratch.touch(0o600)
            scratch.write_text(token, encoding="ascii")
        own = resolved_address(self.own)
        head = ("--head", f"--port={self.port}", "--include-dashboard=false")
        try:
            with (
                _ray_node(head, own, self.ray_env()),
                socket.create_server((own, self.port + 1), backlog=len(self.names)) as server,
            ):
                rendezvous = Rendezvous(server, token, self.names[1:], self.lost, say, on_loss)
                rendezvous.open()
                try:
                    rendezvous.await_all()
                    yield rendezvous.close
                except SystemExit as ended:
                    rendezvous.close(ended.code if isinstance(ended.code, int) else 1)
                    raise
                finally:
                    rendezvous.close(1)
        finally:
            self.token_file.unlink(missing_ok=True)

    def follow(self) -> int:
        """On every other host: be a node of the cluster until the first host says how the job ended.

        Returns its exit code. Call it in the main thread.

        Raises:
            MedarcError: the first host cannot be reached or is lost, or Ray ends here.
        """
        signal.signal(signal.SIGTERM, end)
        with connect(self.names[0], self.port + 1) as rendezvous:
            # The rendezvous opens after the token is written. One of an earlier attempt cannot be read here.
            token = self.token_file.read_text(encoding="ascii")
            own = resolved_address(self.own)
            with _ray_node((f"--address={self.ray_address}",), own, self.ray_env()) as ray:
                ended = Thread(target=_close_after, args=(ray, rendezvous), daemon=True)
                ended.start()
                signal.signal(signal.SIGTERM, _wait_for_the_first)
                rendezvous.sendall(f"{self.own} {proof_of(token, self.own)}\n".encode())
                answer = read_line(rendezvous)
                if not answer and ray.poll() is not None:
                    raise MedarcError(f"Ray on {self.own} has ended")
        if not answer.isdecimal():
            raise MedarcError(f"host {self.names[0]} is gone: its connection to {self.own} has ended")
        return int(answer)


@contextmanager
def _ray_node(words: Sequence[str], address: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Ray on this host. Raises MedarcError if it does not start."""
    gpus = len(masked_gpus(env) or usable_gpus(env))
    with scratch_directory("ray") as scratch:
        flags = (
            "--block",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            f"--node-ip-address={address}",
            f"--num-gpus={gpus}",
        )
        argv = (sys.executable, "-m", "ray.scripts.scripts", "start", *flags, f"--temp-dir={scratch}", *words)
        for left in reversed(range(_STARTS)):
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            try:
                if (last := _until_started(process)) is None:
                    yield process
                    return
            finally:
                # All of Ray's processes on this host are in this group.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if not left:
                raise MedarcError(f"Ray does not start at {address}: {last}")


def _until_started(process: subprocess.Popen[str]) -> str | None:
    """Read until Ray reports its start, then drain the rest in a thread. Returns the last line if Ray ends before."""
    assert process.stdout is not None
    last = "it says nothing"
    for line in process.stdout:
        if _STARTED in line:
            Thread(target=process.stdout.read, name="ray's lines", daemon=True).start()
            return None
        last = line.strip() or last
    return last


def _close_after(process: subprocess.Popen[str], connection: socket.socket) -> None:
    process.wait()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _wait_for_the_first(number: int, frame: FrameType | None) -> None:
    """The first host got SIGTERM, too, and ends the run, which needs this host to save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limit = Timer(_STOP_LIMIT_S, os.kill, (os.getpid(), signal.SIGKILL))
    limit.daemon = True
    limit.start()


# The rendezvous on the first host: the other hosts report there, and receive the exit code of the job.


class Rendezvous:
    """Accepts the other hosts. Each keeps its connection until the job's end."""

    def __init__(
        self,
        server: socket.socket,
        token: str,
        names: Sequence[str],
        lost: list[str],
        say: Callable[[str], None],
        on_loss: Callable[[], None],
    ) -> None:
        self._server = server
        self._token = token
        self._names = names
        self._lost = lost
        self._say = say
        self._on_loss = on_loss
        self._joined: dict[str, socket.socket] = {}
        self._changed = Condition()
        self._is_closed = False

    def open(self) -> None:
        Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def await_all(self) -> None:
        """Raises MedarcError: hosts have not joined in time, or one was lost."""
        advice = "see their lines in the job's log; the security group must allow all traffic between its members"
        with self._changed:
            self._changed.wait_for(lambda: self._lost or len(self._joined) == len(self._names), JOIN_LIMIT_S)
            missing = [name for name in self._names if name not in self._joined]
        if self._lost:
            raise MedarcError(f"host {self._lost[0]} is gone")
        if missing:
            raise MedarcError(f"not joined within {JOIN_LIMIT_S:g} s: {', '.join(missing)}: {advice}")

    def close(self, code: int) -> None:
        """Tell every host the exit code. Only the first call counts."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            connections = list(self._joined.values())
        for connection in connections:
            with suppress(OSError):
                connection.sendall(f"{code}\n".encode())
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._server.accept()
            except OSError:  # the server is closed
                return
            Thread(target=self._serve, args=(connection, address), name=f"rendezvous to {address}", daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with connection:
            _keep_alive(connection)
            connection.settimeout(_PROOF_LIMIT_S)
            name, _, proof = read_line(connection).partition(" ")
            if name not in self._names or not hmac.compare_digest(proof.encode(), proof_of(self._token, name).encode()):
                return
            connection.settimeout(None)
            with self._changed:
                self._joined[name] = connection
                self._changed.notify_all()
            self._say(f"{name} ({address}) has joined")
            read_line(connection)
            with self._changed:
                if self._is_closed:
                    return
                self._lost.append(name)
                self._changed.notify_all()
        self._say(f"error: host {name} ({address}) is gone")
        self._on_loss()


def resolved_address(host: str) -> str:
    """The IPv4 address of a host, whose name may be known a while after this host has started. Raises MedarcError."""
    waiting = Wait(
        f"the address of {host}", "SageMaker names hosts when they start", JOIN_LIMIT_S, "join", 10.0, tell=say
    )
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            if waiting.is_over():
                raise MedarcError(f"host {host}: {error.strerror or error}") from error
        time.sleep(_LOOK_S)


def connect(host: str, port: int) -> socket.socket:
    """Connect to the rendezvous, which may open only a while later. Raises MedarcError."""
    address = resolved_address(host)
    waiting = Wait(f"{host} at {address}:{port}", "it starts Ray first", JOIN_LIMIT_S, "join", 30.0, tell=say)
    while True:
        try:
            connection = socket.create_connection((address, port), 10.0)
        except OSError as error:
            if waiting.is_over():
                raise MedarcError(f"host {host} ({address}:{port}): {error.strerror or error}") from error
        else:
            connection.settimeout(None)
            _keep_alive(connection)
            return connection
        time.sleep(_LOOK_S)


def _keep_alive(connection: socket.socket) -> None:
    """A host that answers no longer is lost after 20 seconds, although nothing closes its connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 5)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def read_line(connection: socket.socket) -> str:
    """A line without its end. Empty if the connection ends first."""
    found = b""
    with suppress(OSError):
        while not found.endswith(b"\n") and len(found) < _LONGEST_LINE:
            if not (byte := connection.recv(1)):
                return ""
            found += byte
    return found.decode(errors="replace").strip()


def proof_of(token: str, name: str) -> str:
    """Shows that a host knows the token."""
    return hmac.new(token.encode(), name.encode(), hashlib.sha256).hexdigest()


COMMANDS = ("sft", "dpo", "rm", "rl", "eval")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Both libraries would otherwise guess the network interface between the hosts."""
STOP_LIMIT_S = 110.0
"""Seconds after SIGTERM at which a run that has not stopped is killed, before SageMaker kills the container."""
_LOSS_LIMIT_S = 60.0
"""Seconds for a driver to end after a host was lost. It says which processes ran there."""
_KEPT_LINES = 30
"""Last lines of the output, for the failure file of a run without an `error:` line."""
_FAILURE_CHARS = 1024
"""SageMaker shows no more of the failure file."""
_NOT_COPIED = ("run_default/broadcasts", "run_default/rollouts", "rollouts")
"""Directories through which the run's processes exchange data. SageMaker would copy them to S3 in every step and never
delete the copies."""


def main(words: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description="Runs a training job of medarc_submit inside its container.")
    parser.add_argument("--root", type=Path, default=Path("/opt/ml"), help="where SageMaker puts inputs")
    parser.add_argument(
        "--local-disk", type=Path, default=Path("/tmp/medarc-run"), help="for files that no restart needs"
    )
    parser.add_argument("--ray-port", type=int, default=RAY_PORT, help="on several hosts; the next one is used, too")
    options = parser.parse_args(words)
    paths = MlPaths(options.root)
    try:
        return _run(paths, options.local_disk, options.ray_port)
    except MedarcError as error:
        for fault in error.faults:
            sys.stderr.write(f"error: {fault}\n")
        write_failure(paths, [f"error: {fault}" for fault in error.faults], ())
        return error.exit_code
    except OSError as error:  # such as a shared directory that may not be written
        sys.stderr.write(f"error: {error}\n")
        write_failure(paths, [f"error: {error}"], ())
        return 1


def _run(paths: MlPaths, local_disk: Path, ray_port: int) -> int:
    inputs = JobInputs.read(paths)
    if len(inputs.hosts) > 1 and inputs.shared_run is None:
        raise UsageError(f"{len(inputs.hosts)} instances without a shared directory: submit the run with --file-system")
    unpack_source(inputs, paths)
    if inputs.shared_run is not None:
        return _run_on_hosts(inputs, paths, inputs.shared_run, local_disk, ray_port)
    secrets = resolved(inputs.secrets)
    if inputs.command == "rl":
        keep_off_s3(paths.run, local_disk)
    child = Child(argv_of(inputs, paths), paths.source, child_env(inputs, paths, secrets, os.environ, local_disk))
    return _finished(child.run(), paths, child.last_lines, secrets)


def _run_on_hosts(inputs: JobInputs, paths: MlPaths, run: str, local_disk: Path, ray_port: int) -> int:
    """Train on all hosts: Ray's driver runs on the first one, and the others end with its exit code."""
    env = child_env(inputs, paths, {}, os.environ, local_disk)
    if inputs.interface is not None:
        env |= {name: env.get(name, inputs.interface) for name in _INTERFACE_VARIABLES}
    shared = private_directory(paths.shared(run))
    # What the config names on S3 is downloaded once, to where all hosts find it.
    env.setdefault(CACHE_VARIABLE, str(shared / "inputs"))
    hosts = Hosts(inputs.hosts, inputs.current_host, shared / "hosts", env, ray_port)
    if not hosts.leads:
        return hosts.follow()
    # No child has started yet while hosts join.
    signal.signal(signal.SIGTERM, end)
    secrets = resolved(inputs.secrets)
    argv = driver_argv(inputs, paths, shared / "run", hosts.ray_address)
    child = Child(argv, paths.source, {**hosts.ray_env(), **secrets})
    with hosts.led(say, child.end_soon) as tell:
        code = child.run()
        code = 1 if hosts.lost and code == 128 + signal.SIGTERM else code
        tell(code)
    gone = [f"error: host {name} is gone" for name in hosts.lost]
    return _finished(code, paths, [*gone, *child.last_lines], secrets)


def _finished(code: int, paths: MlPaths, lines: Sequence[str], secrets: Mapping[str, str]) -> int:
    if code not in (0, 128 + signal.SIGTERM):
        write_failure(paths, list(lines), tuple(secrets.values()))
    return code


def driver_argv(inputs: JobInputs, paths: MlPaths, run: Path, address: str) -> tuple[str, ...]:
    """Ray's driver. It copies the run to S3 itself: SageMaker would do so on each host."""
    kept = () if inputs.upload_to is None else (f"--storage.upload-to={inputs.upload_to}",)
    flags = ("--address", address, "--strategy", "spread")
    words = (inputs.command, "@", str(paths.config), f"--output-dir={run}", *kept)
    return (sys.executable, "-m", RAY_DRIVER, *flags, *words)


def argv_of(inputs: JobInputs, paths: MlPaths) -> tuple[str, ...]:
    return (sys.executable, "-m", *LAUNCHERS[inputs.command], "@", str(paths.config), f"--output-dir={paths.run}")


def child_env(
    inputs: JobInputs, paths: MlPaths, secrets: Mapping[str, str], env: Mapping[str, str], local_disk: Path
) -> dict[str, str]:
    """The environment of the launcher. A project that is a checkout of this package runs its own code."""
    ours = [paths.source / "prime-rl" / "src", paths.source]
    is_checkout = (ours[0] / "prime_rl").is_dir() and (paths.source / "medarc_rl").is_dir()
    given = env.get("PYTHONPATH", "")
    path = [*(str(each) for each in ours if is_checkout), *([given] if given else [])]
    found = {**env, **secrets, "PYTHONUNBUFFERED": "1"}
    found.setdefault("HF_HOME", str(local_disk / "hf"))
    if path:
        found["PYTHONPATH"] = os.pathsep.join(path)
    if inputs.shares_gpus:
        found[SINGLE_GPU_VARIABLE] = "1"
    return found


def keep_off_s3(run: Path, local_disk: Path) -> None:
    """Put what no restart needs on the instance's disk, behind links, unless S3 gave back a directory of that name."""
    for name in _NOT_COPIED:
        target, link = local_disk / name, run / name
        target.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() and not link.exists():
            link.symlink_to(target)


def write_failure(paths: MlPaths, lines: Sequence[str], secrets: Sequence[str]) -> None:
    """Tell SageMaker why the job failed: the `error:` lines if there are any, or else the last ones."""
    errors = [line for line in lines if line.startswith("error:")]
    text = "\n".join(errors or lines)
    for secret in secrets:
        text = text.replace(secret, "***") if secret else text
    plain = "".join(char if char.isprintable() or char == "\n" else " " for char in text)
    try:
        paths.failure.parent.mkdir(parents=True, exist_ok=True)
        paths.failure.write_text(
            cut_inside(plain, _FAILURE_CHARS) if errors else plain[-_FAILURE_CHARS:], encoding="utf-8"
        )
    except OSError as error:
        sys.stderr.write(f"warning: {paths.failure}: {error.strerror}\n")


# Inputs: the files in which SageMaker describes the job to its container, all below /opt/ml.


@dataclass(frozen=True, slots=True)
class JobInputs:
    """The command to run, and the hosts that run it."""

    command: str
    source_sha256: str
    shares_gpus: bool
    secrets: Mapping[str, str]
    current_host: str
    hosts: tuple[str, ...]
    interface: str | None = None
    """Network interface between the hosts."""
    shared_run: str | None = None
    """Name of the run's directory in the shared one. None if the hosts share no directory."""
    upload_to: str | None = None
    """With a shared directory: where on S3 the run is kept."""

    @classmethod
    def read(cls, paths: MlPaths) -> JobInputs:
        """Raises UsageError: the job was not made by this package, or by another version of it."""
        given, resources = _table(paths.hyperparameters), _table(paths.resources)
        command, digest = given.get("command"), given.get("source_sha256")
        if command not in COMMANDS or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise UsageError(f"{paths.hyperparameters}: not a job of medarc_submit: no command, or no source_sha256")
        secrets = _parsed(paths.hyperparameters, given.get("secrets", "{}"))
        hosts = resources.get("hosts")
        if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
            raise UsageError(f"{paths.resources}: contains no hosts")
        run, interface = given.get("run"), resources.get("network_interface_name")
        if run is not None and (not isinstance(run, str) or name_fault(run)):
            raise UsageError(f"{paths.hyperparameters}: not a job of medarc_submit: run is {run!r}")
        return cls(
            command=command,
            source_sha256=digest,
            shares_gpus=given.get(SHARES_GPUS) == "1",
            secrets={str(name): str(reference) for name, reference in secrets.items()},
            current_host=str(resources.get("current_host", hosts[0])),
            # Every host gets the same list, in the same order.
            hosts=tuple(sorted(hosts)),
            interface=interface if isinstance(interface, str) else None,
            shared_run=run,
            upload_to=str(given["upload_to"]) if "upload_to" in given else None,
        )


def _table(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    return _parsed(path, text)


def _parsed(path: Path, text: Any) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: no JSON object")
    return found


def unpack_source(inputs: JobInputs, paths: MlPaths) -> None:
    """Check and extract the project's files.

    Raises:
        MedarcError: they are missing, damaged, or not those that the job was submitted with.
    """
    if not paths.archive.is_file():
        raise UsageError(
            f"{paths.archive}: missing, because the job has no input channel {SOURCE_CHANNEL!r}: submit it with "
            "medarc_submit"
        )
    if (found := sha256_of(paths.archive)) != inputs.source_sha256:
        raise UsageError(
            f"{paths.archive}: not the files that were submitted: SHA-256 is {found[:12]}…, not "
            f"{inputs.source_sha256[:12]}…; submit again"
        )
    unpack(paths.archive, paths.code)
    if not paths.config.is_file():
        raise UsageError(f"{paths.archive}: holds no {CONFIG}")


# The run's launcher, or Ray's driver.


@dataclass(slots=True)
class Child:
    """The launcher, whose output is passed on and whose last lines are kept."""

    argv: Sequence[str]
    directory: Path
    env: Mapping[str, str]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    _process: subprocess.Popen[bytes] | None = None
    _is_stopping: bool = False

    def run(self) -> int:
        """Start it, pass signals on, and return its exit code: 128 + n after signal n. Call it in the main thread."""
        # Before the child: a stop may come at once.
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        self._process = subprocess.Popen(
            self.argv,
            cwd=self.directory,
            env=dict(self.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if self._is_stopping:
            self._process.terminate()
        assert self._process.stdout is not None
        # A thread reads: a grandchild that holds the pipe open must not keep the job.
        copying = threading.Thread(target=self._copy, args=(self._process.stdout,), daemon=True)
        copying.start()
        code = self._process.wait()
        copying.join(timeout=10.0)
        return code if code >= 0 else 128 - code

    def end_soon(self) -> None:
        """Ask it to end in a while, unless it has ended by then."""
        limit = threading.Timer(_LOSS_LIMIT_S, self._stop, (signal.SIGTERM, None))
        limit.daemon = True
        limit.start()

    def _copy(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\r\n")
            self.last_lines.append(text)
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        first, self._is_stopping = not self._is_stopping, True
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(number)
        if first:
            limit = threading.Timer(STOP_LIMIT_S, self._kill)
            limit.daemon = True
            limit.start()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())

"""The entry point of a training job: `python -m medarc_rl.backends.sagemaker.job.in_job`.

Unpacks the project's files, reads secrets, and starts the run's launcher, or on several hosts Ray and its driver. Its
output goes to CloudWatch. SageMaker sends SIGTERM to each host when a job is stopped or loses its spot capacity, and
SIGKILL 120 s later.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from argparse import ArgumentParser
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from medarc_rl.backends.protocol import LAUNCHERS, RAY_DRIVER
from medarc_rl.backends.sagemaker.job.hosts import RAY_PORT, Hosts, end
from medarc_rl.backends.sagemaker.request import SOURCE_CHANNEL, name_fault, resolved
from medarc_rl.backends.sagemaker.source_files import CONFIG, MlPaths, sha256_of, unpack
from medarc_rl.errors import MedarcError, UsageError
from prime_rl.storage.cache import CACHE_VARIABLE
from prime_rl.utils.private import private_directory

COMMANDS = ("sft", "rl", "eval")
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
        raise UsageError(f"{len(inputs.hosts)} instances, which share no directory: submit with --file-system")
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
    # While hosts join there is no child to pass it to.
    signal.signal(signal.SIGTERM, end)
    secrets = resolved(inputs.secrets)
    argv = driver_argv(inputs, paths, shared / "run", hosts.ray_address)
    child = Child(argv, paths.source, {**hosts.ray_env(), **secrets})
    with hosts.led(_say, child.end_soon) as tell:
        code = child.run()
        code = 1 if hosts.lost and code == 128 + signal.SIGTERM else code
        tell(code)
    gone = [f"error: host {name} is gone" for name in hosts.lost]
    return _finished(code, paths, [*gone, *child.last_lines], secrets)


def _finished(code: int, paths: MlPaths, lines: Sequence[str], secrets: Mapping[str, str]) -> int:
    if code not in (0, 128 + signal.SIGTERM):
        write_failure(paths, list(lines), tuple(secrets.values()))
    return code


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def driver_argv(inputs: JobInputs, paths: MlPaths, run: Path, address: str) -> tuple[str, ...]:
    """Ray's driver. It copies the run to S3 itself: SageMaker would do so on each host."""
    kept = () if inputs.upload_to is None else (f"--storage.upload-to={inputs.upload_to}",)
    flags = ("--address", address, "--strategy", "spread")
    words = (inputs.command, "@", str(paths.config), f"--output-dir={run}", *kept)
    return (sys.executable, "-m", RAY_DRIVER, *flags, *words)


def argv_of(inputs: JobInputs, paths: MlPaths) -> tuple[str, ...]:
    return (sys.executable, "-m", LAUNCHERS[inputs.command], "@", str(paths.config), f"--output-dir={paths.run}")


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
    if inputs.single_gpu:
        found["MEDARC_SINGLE_GPU"] = "1"
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
        paths.failure.write_text(plain[:_FAILURE_CHARS] if errors else plain[-_FAILURE_CHARS:], encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"warning: {paths.failure}: {error.strerror}\n")


# Inputs: the files in which SageMaker describes the job to its container, all below /opt/ml.


@dataclass(frozen=True, slots=True)
class JobInputs:
    """The command to run, and the hosts that run it."""

    command: str
    source_sha256: str
    single_gpu: bool
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
            raise UsageError(f"{paths.resources}: names no hosts")
        run, interface = given.get("run"), resources.get("network_interface_name")
        if run is not None and (not isinstance(run, str) or name_fault(run)):
            raise UsageError(f"{paths.hyperparameters}: not a job of medarc_submit: run is {run!r}")
        return cls(
            command=command,
            source_sha256=digest,
            single_gpu=given.get("single_gpu") == "1",
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
        raise UsageError(f"{paths.archive}: missing: the job has no channel {SOURCE_CHANNEL!r}")
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

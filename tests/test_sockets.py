"""What a stranger on the node finds of a running job: every socket that its processes listen on, and every file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from prime_rl.launch import reserved_ports
from prime_rl.utils.private import runtime_directory

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
EXAMPLE = "examples/reverse_text"
LISTENS = "0A"
MARK = "SOCKETS_OF"
LONG = ("--max-steps", "100000")
NOBODY = 65534

REQUESTS = (("POST", "/update_weights"), ("POST", "/v1/completions"), ("GET", "/metrics"))
STRANGER = """
import json, os, socket, sys
from concurrent.futures import ThreadPoolExecutor
if os.getuid() == 0:
    os.setuid({nobody})

def answer(question):
    port, request = question
    with socket.socket() as stranger:
        stranger.settimeout(5)  # what is no HTTP server says nothing
        try:
            stranger.connect(("127.0.0.1", port))
            stranger.sendall(request.encode())
            return stranger.recv(100).partition(b"\\r")[0].decode(errors="replace")
        except (TimeoutError, ConnectionError):
            return ""

questions = json.loads(sys.argv[1])
with ThreadPoolExecutor(len(questions)) as pool:
    print(json.dumps(list(pool.map(answer, questions))))
"""
"""Sends requests as another user, all at once, and prints the first line of each answer."""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(autouse=True)
def own_runtime_directory(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets and keys of other runs on this machine are elsewhere."""
    monkeypatch.setenv("PRIME_RL_RUNTIME_DIR", str(runtime / "private"))


@dataclass(frozen=True)
class Listener:
    """A listening socket of a run."""

    process: str
    address: str
    """`host:port`, or the path of a Unix socket."""

    @property
    def is_unix(self) -> bool:
        return self.address.startswith("/")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@contextmanager
def running(*words: str) -> Iterator[str]:
    """Run a command from the repository's root; yields its mark once it has trained a step or is ready."""
    mark = uuid4().hex
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    process = subprocess.Popen(
        [str(BIN / words[0]), *words[1:]],
        cwd=ROOT,
        env={**environ, MARK: mark, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line)
            if any(sign in line for sign in ("step 1 (2/", "Step 2 |", "Inference ready")):
                break
        else:
            pytest.fail("the command ended:\n" + "".join(said[-30:]))
        yield mark
        assert process.poll() is None, "the run has ended before the check"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def pids_of(mark: str) -> Iterator[tuple[int, str]]:
    """The processes of a run, and the last words of their commands."""
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and f"{MARK}={mark}".encode() in (directory / "environ").read_bytes():
                yield int(directory.name), (directory / "cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            continue  # it has ended


def listeners_of(mark: str) -> set[Listener]:
    tables = tcp_listeners() | unix_listeners()
    found = set()
    for pid, command in pids_of(mark):
        for descriptor in descriptors_of(pid):
            if descriptor in tables:
                found.add(Listener(command, tables[descriptor]))
    return found


def descriptors_of(pid: int) -> Iterator[str]:
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                yield str(descriptor.readlink())
            except OSError:
                continue  # closed meanwhile
    except OSError:
        return  # the process has ended


def tcp_listeners() -> dict[str, str]:
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                address, _, port = fields[1].partition(":")
                host = ".".join(str(byte) for byte in bytes.fromhex(address)[::-1]) if table == "tcp" else address
                found[f"socket:[{fields[9]}]"] = f"{host}:{int(port, 16)}"
    return found


def unix_listeners() -> dict[str, str]:
    lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    accepts = "00010000"
    return {f"socket:[{each[6]}]": each[7] for each in lines if len(each) == 8 and each[3] == accepts}


def answers_to_a_stranger(ports: list[int]) -> list[tuple[int, str, str]]:
    """Port, path and first line of what a process of another user reads from it; empty if it reads nothing."""
    asked = [(port, method, path) for port in ports for method, path in REQUESTS]
    head = "{} {} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
    questions = json.dumps([(port, head.format(method, path)) for port, method, path in asked])
    argv = [sys.executable, "-c", STRANGER.format(nobody=NOBODY), questions]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    return [(port, path, answer) for (port, _, path), answer in zip(asked, answers, strict=True)]


def check_sockets(mark: str) -> set[Listener]:
    """Everything that strangers must not find. Returns the sockets that the run listens on."""
    found = listeners_of(mark)
    for listener in found:
        if listener.is_unix:
            directory = Path(listener.address).parent
            assert (directory.stat().st_mode & 0o777, directory.stat().st_uid) == (0o700, os.getuid()), listener
        else:
            assert listener.address.startswith("127.0.0.1:"), listener
    for port, path, answer in answers_to_a_stranger([listener.port for listener in found if not listener.is_unix]):
        # 501: a metrics server knows no POST.
        assert not answer or answer.split()[1] in ("401", "501"), (found, port, path, answer)
    return found


def check_files(out: Path, mark: str) -> None:
    """No file or directory of the run is open to others, and none holds the key of its server."""
    keys = {key.decode() for pid, _ in pids_of(mark) for key in key_of(pid)}
    for path in [out, *out.rglob("*")]:
        if path.exists() and not path.is_symlink():
            assert not path.stat().st_mode & 0o077, f"{path} is open to others"
            content = path.read_bytes() if path.is_file() else b""
            assert not any(key.encode() in content for key in keys), f"{path} holds the key"
    assert not any(key in command for key in keys for _, command in pids_of(mark))


def key_of(pid: int) -> list[bytes]:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
    return [each.partition(b"=")[2] for each in variables if each.startswith(b"VLLM_API_KEY=")]


def test_rl_with_two_ranks_and_every_kind_of_transport(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--train-gpus", "2", "--weight-broadcast.type", "nccl", "--orchestrator.env-servers", *LONG]
    options += ["--trainer.rollout-transport.type", "zmq", "--orchestrator.rollout-transport.type", "zmq"]
    with reserved_ports(1) as (port,):
        options += ["--trainer.metrics-server.port", str(port)]
        with running("medarc_train", "rl", f"{EXAMPLE}/rl_cpu.toml", "--output-dir", str(out), *options) as mark:
            found = check_sockets(mark)
            check_files(out, mark)

    who = {listener.process.split(" @ ")[0].rpartition("/")[2] for listener in found}
    assert {"inference"} <= who, found
    assert any(listener.is_unix for listener in found), "batches and environments use Unix sockets"
    assert any(not listener.is_unix and listener.port == port for listener in found), "the metrics server"


def test_sft_with_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--gpus", "2", "--output-dir", str(out), *LONG]
    with running("medarc_train", "sft", f"{EXAMPLE}/sft_cpu.toml", *options) as mark:
        check_sockets(mark)
        check_files(out, mark)


def test_a_server_started_by_hand() -> None:
    with reserved_ports(1) as (port,):
        options = ["--model.name", f"{EXAMPLE}/checkpoint", "--server.port", str(port)]
        with running("inference", *options) as mark:
            found = check_sockets(mark)

    assert {listener.port for listener in found if not listener.is_unix} == {port}


def test_nothing_of_the_runs_stays_in_the_runtime_directory() -> None:
    assert not [path for path in runtime_directory().iterdir() if path.name.startswith(("ranks-", "engine-"))]

"""A real S3 server on loopback (moto's), with a proxy before it that disturbs what tests name."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from prime_rl.storage import S3

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTOFSTORAGE001",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-test-which-no-file-may-hold",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""

Fault = Callable[["Handler"], bool]
"""Answers a request in the server's place, and returns whether it did."""


@dataclass
class Proxy:
    """An HTTP server that passes requests on, except those that a fault takes."""

    url: str
    seen: list[tuple[str, str]] = field(default_factory=list)
    """Method and path, with the query, of each request."""
    faults: list[tuple[Fault, int]] = field(default_factory=list)
    """Each with the number of times that it still happens."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def disturb(self, fault: Fault, times: int = 1) -> None:
        with self.lock:
            self.faults.append((fault, times))

    def calm(self) -> None:
        with self.lock:
            self.faults.clear()
            self.seen.clear()

    def take(self, handler: Handler) -> bool:
        """Let the first fault that wants a request have it."""
        with self.lock:
            for at, (fault, times) in enumerate(self.faults):
                if times > 0 and getattr(fault, "wants", lambda handler: True)(handler):
                    self.faults[at] = (fault, times - 1)
                    break
            else:
                return False
        return fault(handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    upstream: str

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _pass_on(self) -> None:
        self.proxy.seen.append((self.command, self.path))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.proxy.take(self):
            self.answer(*self.ask())

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def ask(self) -> tuple[int, dict[str, str], bytes]:
        """The server's own answer."""
        connection = http.client.HTTPConnection(self.upstream)
        connection.request(self.command, self.path, self.body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        headers = {
            name: value for name, value in answer.getheaders() if name.lower() not in ("connection", "date", "server")
        }
        connection.close()
        return answer.status, headers, data

    def answer(self, status: int, headers: dict[str, str], data: bytes, sent_bytes: int | None = None) -> None:
        """Send an answer, or only its first bytes, after which the connection ends."""
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding"):
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data if sent_bytes is None else data[:sent_bytes])
        if sent_bytes is not None:
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def reset(handler: Handler) -> bool:
    """End the connection with a TCP reset."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    handler.connection.close()
    handler.close_connection = True
    return True


def failing(status: int, code: str) -> Fault:
    def fault(handler: Handler) -> bool:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
        handler.answer(status, {"Content-Type": "application/xml"}, text.encode())
        return True

    return fault


def truncated(sent_bytes: int) -> Fault:
    def fault(handler: Handler) -> bool:
        handler.answer(*handler.ask(), sent_bytes=sent_bytes)
        return True

    return fault


def corrupted(handler: Handler) -> bool:
    """Change a byte of the body, and leave out the checksum that would show it."""
    status, headers, data = handler.ask()
    kept = {name: value for name, value in headers.items() if "checksum" not in name.lower()}
    handler.answer(status, kept, bytes([data[0] ^ 1]) + data[1:] if data else data)
    return True


def only(method: str, part: str, fault: Fault) -> Fault:
    """The fault, for requests of a method whose path contains `part`."""

    def chosen(handler: Handler) -> bool:
        return fault(handler)

    chosen.wants = lambda handler: handler.command == method and part in handler.path  # type: ignore[attr-defined]
    return chosen


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """Host and port of a server in a process of its own."""
    for package in ("boto3", "moto"):
        pytest.importorskip(package, reason=f"{package} is not installed: `uv sync --inexact --extra s3 --group aws`")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield f"127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.communicate()


@pytest.fixture(scope="session")
def shared_proxy(moto_server: str) -> Iterator[Proxy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = type("Bound", (Handler,), {"proxy": proxy, "upstream": moto_server})
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="proxy")
    thread.start()
    yield proxy
    server.shutdown()
    server.server_close()
    thread.join()


def use_server(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Set what boto3 reads in the environment, and nothing else of the user's."""
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    nowhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    for name, value in {**CREDENTIALS, **nowhere, "AWS_ENDPOINT_URL": url}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def s3(shared_proxy: Proxy) -> S3:
    """A client; each takes a second to make."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_server(monkeypatch, shared_proxy.url)
        return S3.connect()


@pytest.fixture
def proxy(shared_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy without faults, in the environment that boto3 reads."""
    use_server(monkeypatch, shared_proxy.url)
    shared_proxy.calm()
    yield shared_proxy
    shared_proxy.calm()


@pytest.fixture
def bucket(s3: S3, proxy: Proxy) -> str:
    """A new bucket."""
    name = f"bucket-{os.urandom(6).hex()}"
    s3.client.create_bucket(Bucket=name)
    return name

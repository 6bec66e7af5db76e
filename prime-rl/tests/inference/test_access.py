"""Only requests with the server's key are served, by both engines."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from prime_rl.utils.engine_keys import key_file

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/tokens"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/update_weights"),
    ("POST", "/reload_weights"),
    ("POST", "/load_lora_adapter"),
    ("POST", "/init_broadcaster"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/v1/models"),
    ("GET", "/is_paused"),
    ("GET", "/load"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/route"),
]
KEYS = ["", "Bearer", "Bearer wrong", "Basic a2V5", "Bearer EMPTY", "Bearer \u00e9"]


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_a_request_without_the_key_is_refused(server, method: str, route: str) -> None:
    for authorization in KEYS:
        headers = {"Authorization": authorization.encode()} if authorization else {}
        answer = httpx.request(method, f"{server.client.base_url}{route}", headers=headers, json={}, timeout=None)
        assert answer.status_code == 401, (route, authorization, answer.text)
    assert not server.client.get("/is_paused").json()["is_paused"]


def test_health_needs_no_key(server) -> None:
    assert httpx.get(f"{server.client.base_url}/health", timeout=None).status_code == 200


def test_the_server_listens_on_loopback_only(server) -> None:
    sockets = _listening_addresses(server.client.base_url.port)

    assert sockets == {"127.0.0.1"}


def test_the_key_is_in_no_argument_list_and_in_no_log(server) -> None:
    arguments = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().decode()

    assert server.key(str(server.client.base_url)) not in arguments + "".join(server.lines)


def test_only_the_user_can_read_the_key(server) -> None:
    file = key_file(server.client.base_url.port)

    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def _listening_addresses(port: int) -> set[str]:
    """IPv4 and IPv6 addresses on which anything listens on `port`."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, local_port = local.partition(":")
            if state == "0A" and int(local_port, 16) == port:
                octets = bytes.fromhex(address)[::-1]
                found.add(".".join(map(str, octets)) if len(octets) == 4 else address)
    return found

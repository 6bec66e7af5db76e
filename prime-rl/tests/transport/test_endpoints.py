"""Strangers can neither send to the sockets of a run nor read from them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
import zmq.utils.monitor

from prime_rl.transport.endpoints import Endpoint, TransportError
from prime_rl.utils.engine_keys import TRANSPORT_KEY_VARIABLE
from prime_rl.utils.private import runtime_directory

KEYED = {TRANSPORT_KEY_VARIABLE: "a key that both ends share"}
NOBODY = 65534


def passes(sender: Endpoint, receiver: Endpoint) -> bool:
    """Whether a message from one end arrives at the other, which binds."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        push.linger = 0
        receiver.bind(pull)
        sender.connect(push)
        push.send(b"row")
        return bool(pull.poll())


def refused(sender: Endpoint, receiver: Endpoint) -> bool:
    """Whether the receiver refuses the handshake of a sender. Waits for the event, so that silence proves nothing."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        push.linger = 0
        events = push.get_monitor_socket()
        receiver.bind(pull)
        sender.connect(push)
        with contextlib.suppress(zmq.Again):  # already refused
            push.send(b"row", zmq.NOBLOCK)
        seen = set()
        while not seen & {zmq.EVENT_HANDSHAKE_SUCCEEDED, *FAILURES}:
            seen.add(zmq.utils.monitor.recv_monitor_message(events)["event"])
        push.disable_monitor()
        return bool(seen & FAILURES) and not pull.poll(0)


FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_DISCONNECTED,
}


@pytest.fixture
def over_tcp(zmq_port: int, tmp_path: Path) -> Endpoint:
    return Endpoint.of_run("0.0.0.0", zmq_port, tmp_path, "batches", KEYED)


def test_both_ends_of_a_run_meet(over_tcp: Endpoint, tmp_path: Path, zmq_port: int) -> None:
    local = Endpoint.of_run("localhost", zmq_port, tmp_path, "batches", {})

    assert passes(over_tcp, over_tcp)
    assert passes(local, local)
    other = zmq_port + 1
    assert passes(Endpoint.of_address(f"tcp://localhost:{other}"), Endpoint.of_address(f"tcp://127.0.0.1:{other}"))


@pytest.mark.parametrize("key", [None, "a key that one end guessed"])
def test_a_sender_without_the_key_is_refused(over_tcp: Endpoint, key: str | None) -> None:
    assert refused(Endpoint(over_tcp.address, key), over_tcp)


def test_a_subscriber_without_the_key_reads_nothing(over_tcp: Endpoint) -> None:
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        over_tcp.bind(publisher)
        with context.socket(zmq.SUB) as stranger, context.socket(zmq.SUB) as friend:
            Endpoint(over_tcp.address).connect(stranger)
            stranger.subscribe(b"")
            over_tcp.connect(friend)
            friend.subscribe(b"rows")
            assert publisher.recv() == b"\x01rows"
            publisher.send(b"rows of a patient")
            assert friend.recv() == b"rows of a patient"
            assert not stranger.poll(0)


def test_runs_on_one_machine_have_sockets_of_their_own(tmp_path: Path) -> None:
    addresses = {
        Endpoint.of_run("localhost", 5555, tmp_path / run, channel).address
        for run in ("one", "two")
        for channel in ("batches", "rows")
    }

    assert len(addresses) == 4
    assert all(address.startswith(f"ipc://{runtime_directory()}/") for address in addresses)


def test_a_second_run_in_the_same_directory_does_not_take_the_socket_away(tmp_path: Path) -> None:
    endpoint = Endpoint.of_run("localhost", 5555, tmp_path, "batches", {})

    with zmq.Context() as context, context.socket(zmq.PULL) as first, context.socket(zmq.PULL) as second:
        endpoint.bind(first)
        with pytest.raises(TransportError, match="Address already in use"):
            endpoint.bind(second)
    assert passes(endpoint, endpoint)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_connect_to_a_unix_socket(tmp_path: Path) -> None:
    endpoint = Endpoint.of_run("localhost", 5555, tmp_path, "batches", {})
    path = endpoint.address.removeprefix("ipc://")
    connect = f"import os, socket; os.setuid({NOBODY}); socket.socket(socket.AF_UNIX).connect({path!r})"

    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        endpoint.bind(pull)
        as_owner = subprocess.run([sys.executable, "-c", connect.replace(f"os.setuid({NOBODY})", "os")], check=False)
        as_other = subprocess.run([sys.executable, "-c", connect], capture_output=True, text=True, check=False)

    assert as_owner.returncode == 0
    assert "PermissionError" in as_other.stderr


@pytest.mark.parametrize("environ", [{}, {TRANSPORT_KEY_VARIABLE: "short"}])
def test_tcp_without_a_good_key_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    expected = r"node7 is another machine, .* set PRIME_RL_TRANSPORT_KEY to the same random text of at least 16"

    with pytest.raises(TransportError, match=expected):
        Endpoint.of_run("node7", 5555, tmp_path, "batches", environ)
    with pytest.raises(TransportError, match=expected):
        Endpoint.of_address("tcp://node7:5000", environ)


def test_the_key_is_not_printed(over_tcp: Endpoint) -> None:
    assert KEYED[TRANSPORT_KEY_VARIABLE] not in repr(over_tcp)

"""Reserved ports: no other process can bind them, but the child that they are passed to can."""

import socket
import subprocess
import sys

from prime_rl.launch import reserved_ports

LISTENER = """
import socket, sys
server = socket.socket(socket.{family})
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("{host}", {port}))
server.listen()
print("listening", flush=True)
sys.stdin.read()
"""


def test_many_launches_at_once_never_share_a_port() -> None:
    with reserved_ports(100) as first, reserved_ports(100) as second:
        assert len({*first, *second}) == 200


def test_any_free_port_is_never_a_reserved_one() -> None:
    with reserved_ports(300) as ports:
        for _ in range(3000):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", 0))
                assert other.getsockname()[1] not in ports


def test_the_child_can_listen_on_its_port_and_is_reached_there() -> None:
    with reserved_ports(2) as (inference, rendezvous):
        for family, host, port in [("AF_INET", "127.0.0.1", inference), ("AF_INET6", "::", rendezvous)]:
            argv = [sys.executable, "-c", LISTENER.format(family=family, host=host, port=port)]
            with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout.readline() == "listening\n"
                socket.create_connection(("127.0.0.1", port)).close()
                child.communicate()

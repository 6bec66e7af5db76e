"""Processes of a run as values; starts, watches and stops them."""

from prime_rl.launch.host import FakeHost, Host, LocalHost
from prime_rl.launch.logs import Follower, shown
from prime_rl.launch.placement import reserved_ports
from prime_rl.launch.spec import Event, Exited, Outcome, ProcessSpec, Signalled
from prime_rl.launch.supervisor import Supervisor
from prime_rl.utils.errors import CannotStart

__all__ = [
    "CannotStart",
    "Event",
    "Exited",
    "FakeHost",
    "Follower",
    "Host",
    "LocalHost",
    "Outcome",
    "ProcessSpec",
    "Signalled",
    "Supervisor",
    "reserved_ports",
    "shown",
]

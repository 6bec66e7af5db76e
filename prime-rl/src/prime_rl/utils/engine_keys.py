"""Keys that protect inference servers from other users of the machine.

A server accepts requests only with its key, as `Authorization: Bearer KEY`. A launch chooses a random key and passes it
to its processes in the environment variable `VLLM_API_KEY`. A server that was started without the variable chooses one
itself. Every server on this machine also keeps its key in a file that only its user can read, where that user's clients
find it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl.utils.errors import NotPrivate
from prime_rl.utils.private import runtime_directory
from prime_rl.utils.scratch import locked_file, remove_abandoned

ENGINE_KEY_VARIABLE = "VLLM_API_KEY"
"""The variable that vLLM reads for its own `--api-key`."""

TRANSPORT_KEY_VARIABLE = "PRIME_RL_TRANSPORT_KEY"
"""Environment variable with the key of ZeroMQ sockets, which machines share."""

JUDGE_SERVERS_VARIABLE = "JUDGE_SERVERS"
"""Environment variable with the addresses of judges that the launch has started, by name, as JSON."""

JUDGE_SERVER_KEY_VARIABLE = "JUDGE_SERVER_KEY"
"""Environment variable with the key of these."""

TEACHER_KEY_VARIABLE = "TEACHER_KEY"
"""Environment variable with the key of a run's teacher, wherever it runs."""

_NO_KEY = ("", "EMPTY")
"""Values that people set for servers without a key."""


def new_engine_key() -> str:
    return secrets.token_urlsafe(32)


def named_key(variable: str, environ: Mapping[str, str]) -> str | None:
    """The key in an environment variable; None if it is unset, empty or `EMPTY`."""
    key = environ.get(variable, "").strip()  # one from a file ends in a line break, which no header may hold
    return None if key in _NO_KEY else key


def client_key(base_url: str, variable: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The key for requests to `base_url`: from `variable`, or from the file of this user's server on this machine."""
    if (key := named_key(variable, environ)) is not None:
        return key
    url = urlsplit(base_url)
    if url.port is None or not is_loopback(url.hostname or ""):
        return None
    try:
        return key_file(url.port).read_text()
    except FileNotFoundError:
        return None
    except NotPrivate:
        # The server would have refused to write a key there.
        return None


@contextlib.contextmanager
def published_key(port: int, key: str, service: str = "engine") -> Iterator[Path]:
    """Keep the key of the server on `port` in a file with mode 0600 during the block.

    If this process is killed, the next one that publishes a key, or the next launch, removes the file.

    Raises:
        NotPrivate: the directory for keys does not belong to this user alone.
    """
    file = key_file(port, service)
    remove_abandoned(file.parent)
    lock = locked_file(file, key)
    try:
        yield file
    finally:
        os.close(lock)
        # Another server may have written its own since.
        if file.exists() and file.read_text() == key:
            file.unlink()


def key_file(port: int, service: str = "engine") -> Path:
    """Raises NotPrivate."""
    return runtime_directory() / f"{service}-{port}.key"


def is_bearer(authorization: str, key: str) -> bool:
    """Whether the value of an Authorization header is `Bearer KEY`. Takes the same time for every wrong key."""
    scheme, _, given = authorization.partition(" ")
    # aiohttp decodes bytes that are not UTF-8 to surrogates.
    return scheme.lower() == "bearer" and secrets.compare_digest(given.encode(errors="surrogateescape"), key.encode())


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's loopback address. Names other than `localhost` are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def direct_loopback(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep clients from asking a proxy for this machine's own servers, which it cannot reach.

    Clients differ in which of the two spellings they read. A lone `*` already excludes every host.
    """
    named = env.get("no_proxy") or env.get("NO_PROXY") or ""
    if named.strip() == "*":
        return {}
    hosts = dict.fromkeys([*filter(None, map(str.strip, named.split(","))), "127.0.0.1", "localhost", "::1"])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts))

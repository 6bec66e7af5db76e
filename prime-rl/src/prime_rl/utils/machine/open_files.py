"""The limit on open files of a process, usually 1,024 at first. Each connection is an open file."""

from __future__ import annotations

import resource

OTHER_FILES = 256
"""Files that a process keeps open besides its connections."""
MAX_CONNECTIONS = 65_535
"""As many as there are ports."""


def allow_connections(wanted: int) -> int:
    """Raise this process's limit on open files as far as `wanted` connections need it, and the system allows.

    Returns the number of connections that it leaves room for: at least 1, and at most `wanted`.
    """
    wanted = min(wanted, MAX_CONNECTIONS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(allowed - OTHER_FILES, allowed // 2, 1)

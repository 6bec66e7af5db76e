"""The limit on open files of a process. Each connection counts, and most shells and services allow 1,024 of them."""

from __future__ import annotations

import resource

OTHER_FILES = 256
"""Files that a process keeps open besides its connections."""


def allow_connections(wanted: int) -> int:
    """Raise this process's limit on open files as far as `wanted` connections need it, and the system allows.

    Returns the number of connections that it leaves room for, at most `wanted`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(allowed - OTHER_FILES, allowed // 2)

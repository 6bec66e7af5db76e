"""Names of training jobs: opaque by default, because everybody with access to the account can list them."""

from __future__ import annotations

import re
import secrets
import time

MOST_CHARS = 63
PATTERN = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_RULE = f"letters, digits and inner hyphens, at most {MOST_CHARS} characters"


def opaque_name(now_s: float, token: str | None = None) -> str:
    """`medarc-20260131-120000-1a2b3c4d`: the time in UTC, and random digits, so that no two submissions collide."""
    return f"medarc-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now_s))}-{token or secrets.token_hex(4)}"


def name_fault(name: str) -> str | None:
    """Why SageMaker would refuse a job's name, with the nearest name that it accepts."""
    # The pattern alone lets longer names through: it counts groups, in each of which hyphens are free.
    if len(name) <= MOST_CHARS and PATTERN.fullmatch(name):
        return None
    near = nearest_name(name)
    return f"--name {name!r}: SageMaker takes {_RULE}" + (f"; for example {near}" if near else "")


def nearest_name(name: str) -> str:
    """The name with everything else as hyphens, cut to the longest length. Empty if nothing is left."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", name)[: MOST_CHARS + 1].strip("-")[:MOST_CHARS].strip("-")

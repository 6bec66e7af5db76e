"""The wrapper's errors, which a user sees instead of a traceback.

MedarcError            exit 1: a valid request failed
├── NothingToDo        exit 0: the run has done all of its work
└── UsageError         exit 2: the request is not possible; nothing was started or overwritten
    └── HeaderError    a value that the header of a Slurm script cannot contain
"""

from __future__ import annotations

from prime_rl.utils.errors import PrimeError


class MedarcError(PrimeError):
    """Printed as `error: …`, one line for each fault."""


class NothingToDo(MedarcError):
    """Printed without `error:`."""

    exit_code = 0


class UsageError(MedarcError):
    exit_code = 2


class HeaderError(UsageError):
    def __init__(self, option: str, value: str) -> None:
        super().__init__(
            f"{option} {value!r}: Slurm cannot carry control characters or invalid UTF-8 in a script's header"
        )

"""The wrapper's errors, which a user sees instead of a traceback.

MedarcError            exit 1: a valid request failed
├── NothingToDo        exit 0: the run has done all of its work
└── UsageError         exit 2: the request is not possible; nothing was started or overwritten
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

"""Defines the error and the warning that users see."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """The config has faults. Each is one line: where, which key, what is wrong, what to do."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = [" ".join(fault.split()) for fault in faults]
        super().__init__("\n".join(self.faults))


class ConfigWarning(UserWarning):
    """A setting that works, but not as its author may think."""

"""What can go wrong between orchestrator and trainer that a person can mend."""

from __future__ import annotations


class TransportError(Exception):
    """A fault that the message alone explains."""

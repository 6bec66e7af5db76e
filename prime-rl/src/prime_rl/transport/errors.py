"""Errors in communication between orchestrator, trainer and inference servers that the user can fix."""

from __future__ import annotations


class TransportError(Exception):
    """A transport failure; the message alone explains it, without a traceback."""

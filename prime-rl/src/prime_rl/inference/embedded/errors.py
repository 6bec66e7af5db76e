"""What can go wrong in the embedded engine. Loads nothing, so that the HTTP routes can name these from the start."""

from __future__ import annotations


class EngineError(Exception):
    """Base of the errors below; each message is one line for a person."""


class ModelNotFound(EngineError):
    """The model's name is neither a directory with a model nor a hub model that can be fetched."""


class UnsupportedModel(EngineError):
    """The model, or what the config asks of it, is beyond this engine."""


class TemplateFailed(EngineError):
    """The chat template does not take these messages, or there is none."""


class EngineBusy(EngineError):
    """The queue is full."""


class EngineStopped(EngineError):
    """The engine no longer takes requests, or stopped before it had answered this one."""


class GenerationFailed(EngineError):
    """The model gave no usable distribution."""


def first_line(error: Exception) -> str:
    """What a library said, without its advice and traces."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

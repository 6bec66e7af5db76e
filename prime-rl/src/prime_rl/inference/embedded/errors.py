"""Errors of the embedded engine. Imports nothing heavy, so that the HTTP routes can use them before torch is loaded."""

from __future__ import annotations


class EngineError(Exception):
    """Base class; each message is one line for the user."""


class ModelNotFound(EngineError):
    """The model name is neither a local model directory nor a hub model that can be downloaded."""


class UnsupportedModel(EngineError):
    """This engine does not support the model, or a setting for it."""


class TemplateFailed(EngineError):
    """The chat template rejects the messages, or the tokenizer has no template."""


class EngineBusy(EngineError):
    """The request queue is full."""


class EngineStopped(EngineError):
    """The engine no longer accepts requests, or stopped before it completed this one."""


class GenerationFailed(EngineError):
    """The model produced logits that cannot be sampled from, or the request's adapter was unloaded."""


def first_line(error: Exception) -> str:
    """The first line of a library's error message, without its advice and traceback."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

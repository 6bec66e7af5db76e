"""Errors of the embedded engine. Imports nothing heavy, so that the HTTP routes can use them before torch is loaded.

EngineError (RunError)   one line for the user; raised itself for a model that is missing or not supported
├── TemplateFailed       status 400
├── EngineBusy           status 429
├── EngineStopped        status 503
└── GenerationFailed     status 500
"""

from __future__ import annotations

from prime_rl.utils.errors import RunError


class EngineError(RunError):
    """Base class; each message is one line for the user."""


class TemplateFailed(EngineError):
    """The chat template rejects the messages, or the tokenizer has no template."""


class EngineBusy(EngineError):
    """The request queue is full."""


class EngineStopped(EngineError):
    """The engine no longer accepts requests, or stopped before it completed this one."""


class GenerationFailed(EngineError):
    """The model produced logits that cannot be sampled from, or the request's adapter was unloaded."""

"""The clients with which an environment asks the model: one for each rollout, with the key of its session."""

from __future__ import annotations

import hashlib
from typing import Any

from .loopback import http_client

TIMEOUT_S = 7200.0
SESSION_HEADER = "X-Session-ID"
"""verifiers 0.3 and later send the id of a rollout's trace in it."""
NO_SESSION = "no-session"
"""The key of requests outside of a rollout. The proxy refuses it."""


def session_name(key: str) -> str:
    """The name of the session with a key, which does not tell the key. Where requests cannot carry a key each, they
    carry this name in `SESSION_HEADER` and the proxy's own key."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class Clients:
    """Clients of the proxy at `base_url`, which share their connections."""

    def __init__(self, base_url: str) -> None:
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(
            base_url=base_url, api_key=NO_SESSION, max_retries=2, timeout=TIMEOUT_S, http_client=http_client(base_url)
        )

    def of_session(self, key: str) -> Any:
        """An `openai.AsyncOpenAI` for one session."""
        return quick(self._client.copy(api_key=key))


def quick(client: Any) -> Any:
    """The same `openai.AsyncOpenAI`, which sends messages of text as they are.

    It would walk through every message once for each kind that a message can be, to rename keys: a tenth of the core of
    a process that runs environments. Messages with tools, images or objects of `openai` still go that way.
    """
    create = client.chat.completions.create

    async def send(**options: Any) -> Any:
        messages = options.get("messages")
        if "extra_body" not in options and isinstance(messages, list) and all(map(_is_text, messages)):
            options |= {"messages": [], "extra_body": {"messages": messages}}
        return await create(**options)

    client.chat.completions.create = send
    return client


def _is_text(message: object) -> bool:
    return isinstance(message, dict) and all(type(value) is str for value in message.values())


def for_verifiers(client: Any) -> Any:
    """The client in the form that the installed version of verifiers takes: since 0.1.11 it wraps OpenAI's."""
    try:
        from verifiers.clients import OpenAIChatCompletionsClient
    except ImportError:
        return client
    return OpenAIChatCompletionsClient(client)

"""Limits on what one request may ask for. Requests beyond them are refused with status 4xx."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MAX_BODY_BYTES = 8 << 20
MAX_MARKS = 500_000
"""Opening brackets and quotation marks in a body. They bound the objects, lists and strings that parsing it makes."""
BODY_TIMEOUT_S = 60.0
"""Time for a body to arrive after its headers."""

HEAD_TIMEOUT_S = 10.0
"""Time for the first request of a new connection to begin."""
MAX_CONNECTIONS = 8192
"""Open connections. Beyond it, a new connection replaces one that waits for its next request."""

MAX_SAMPLES = 256
"""Samples of one prompt, `n`."""
MAX_TOTAL_SAMPLES = 4096
"""Samples of one request: number of prompts times `n`."""
MAX_TOP_LOGPROBS = 20
MAX_STOP_CHARS = 1000
MAX_CHARS_PER_TOKEN = 64
"""A text with more characters than this per token of the model's context is refused without tokenizing it."""
MAX_NAME_CHARS = 1000
MAX_PATH_CHARS = 4095

MAX_ARGUMENTS = 100
MAX_ENTRIES: Mapping[str, int] = MappingProxyType(
    {
        "prompt": 1024,
        "messages": 4096,
        "tools": 1024,
        "stop": 64,
        "stop_token_ids": 1024,
        "logit_bias": 1024,
        "chat_template_kwargs": 64,
    }
)
"""Entries of each list or object in a body. For `prompt`: the prompts, not the tokens of a single one."""

MAX_INT32 = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1
MIN_INT64 = -(1 << 63)
MIN_TEMPERATURE = 0.0001
"""The smallest temperature besides 0. Logits divided by a much smaller one overflow float32."""
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_TIMEOUT_S = 7 * 24 * 3600

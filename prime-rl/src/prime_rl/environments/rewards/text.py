"""Extracts text and answers from completions: `<answer>`, `\\boxed{}`, the last number, text without thinking."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def text_of(messages: Any, role: str | None = None) -> str:
    """The text of a list of messages (of one role), joined by line breaks. A string is returned unchanged."""
    if messages is None:
        return ""
    if isinstance(messages, str):
        return messages
    if not isinstance(messages, Sequence):
        return str(messages)
    texts = [_content(each) for each in messages if role is None or _field(each, "role") == role]
    return "\n".join(filter(None, texts))


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)


def _content(message: Any) -> str:
    content = message if isinstance(message, str) else _field(message, "content")
    if isinstance(content, str):
        return content
    return "".join(str(_field(part, "text") or "") for part in content or ())


THINKING_TAGS = ("think", "thinking", "reasoning")


def without_thinking(text: str) -> str:
    """The text after the last thinking block. Empty if a block is not closed: it has no answer."""
    for tag in THINKING_TAGS:
        _, closed, after = text.rpartition(f"</{tag}>")
        if closed:
            return after.strip()
        if f"<{tag}>" in text:
            return ""
    return text.strip()


def last_boxed(text: str) -> str | None:
    r"""The contents of the last complete `\boxed{…}` or `\fbox{…}`, with balanced braces."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position]
    return None


def last_number(text: str) -> str | None:
    """The last number, without thousands separators."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "").rstrip(".") if found else None


def as_number(text: str) -> float | None:
    """Parse a number that may have `$`, `%`, thousands separators or a final dot."""
    try:
        return float(text.strip().strip("$%").replace("-$", "-").replace(",", "").rstrip("."))
    except ValueError:
        return None


def last_answer_tag(text: str) -> str | None:
    """The contents of the last `<answer>…</answer>`."""
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return found[-1].strip() if found else None

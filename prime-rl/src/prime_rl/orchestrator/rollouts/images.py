"""Finds images in messages. Training on images is not supported yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

IMAGE_TYPES = frozenset({"image_url", "image", "input_image"})
ADVICE = "training on images is not supported yet: use an environment of text"


def has_image(messages: Any) -> bool:
    """Whether a conversation has an image. A prompt of plain text has none."""
    if not isinstance(messages, list):
        return False
    contents = (message.get("content") for message in messages if hasattr(message, "get"))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(hasattr(part, "get") and part.get("type") in IMAGE_TYPES for part in parts)


def first_row_with_image(rows: Sequence[Any], prompt_of: Callable[[int], Any]) -> int | None:
    """The first row whose prompt has an image. Prompts of a `Dataset` that can only hold text are not read."""
    features = getattr(rows, "features", None)
    if features is not None:
        feature = features.get("prompt")
        if feature is None or _is_text(feature) or _is_text(_content_of(feature)):
            return None
    return next((row for row in range(len(rows)) if has_image(prompt_of(row))), None)


def _content_of(feature: Any) -> Any:
    """The feature of a message's `content`, in the feature of a list of messages."""
    message = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    return message.get("content") if isinstance(message, Mapping) else None


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")

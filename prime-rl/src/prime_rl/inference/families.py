"""Model families, recognized by the prefix of their hub names, and the settings that each family shares."""

from __future__ import annotations

_TOOL_CALL_PARSERS = (
    ("zai-org/GLM-4.5", "glm45"),
    ("zai-org/GLM-4.7", "glm47"),
    ("MiniMaxAI/MiniMax-M2", "minimax_m2"),
    ("PrimeIntellect/INTELLECT-3", "hermes"),
    ("Qwen/Qwen3", "hermes"),
)


def tool_call_parser(setting: str | None, model: str) -> str | None:
    """Resolve `model.tool_call_parser`: `auto` picks the parser of a known model family, or None (no parsing)."""
    if setting != "auto":
        return setting
    return next((parser for prefix, parser in _TOOL_CALL_PARSERS if model.startswith(prefix)), None)

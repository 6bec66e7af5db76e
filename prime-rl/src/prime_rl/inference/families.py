"""What models of a family have in common, known by how their hub names start."""

from __future__ import annotations

_TOOL_CALL_PARSERS = (
    ("zai-org/GLM-4.5", "glm45"),
    ("zai-org/GLM-4.7", "glm47"),
    ("MiniMaxAI/MiniMax-M2", "minimax_m2"),
    ("PrimeIntellect/INTELLECT-3", "hermes"),
    ("Qwen/Qwen3", "hermes"),
)


def tool_call_parser(setting: str | None, model: str) -> str | None:
    """The parser to use: `auto` knows some families by their hub name, and parses nothing for the rest."""
    if setting != "auto":
        return setting
    return next((parser for prefix, parser in _TOOL_CALL_PARSERS if model.startswith(prefix)), None)

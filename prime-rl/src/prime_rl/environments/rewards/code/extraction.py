"""Finds the program in a completion."""

from __future__ import annotations

import ast
import re

from prime_rl.environments.rewards.text import THINKING_TAGS, without_thinking

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
"""A fenced block. One that is not closed ends with the text."""
_PYTHON = ("python", "py", "python3")


def program_in(completion: str) -> str:
    """All Python blocks, else all other blocks, else the whole text; up to `[DONE]`."""
    # A body without thinking keeps the indentation of its first line.
    text = without_thinking(completion) if any(f"{tag}>" in completion for tag in THINKING_TAGS) else completion
    blocks = [(name.lower(), body) for name, body in _FENCE.findall(text)]
    chosen = [body for name, body in blocks if name in _PYTHON] or [body for name, body in blocks if not name]
    source = "\n".join(chosen) if chosen else text if not blocks else "\n".join(body for _, body in blocks)
    return source.partition("[DONE]")[0].removeprefix("[BEGIN]").strip("\n")


def completed(prompt: str, completion: str, entry_point: str) -> str:
    """A prompt that ends in a signature and docstring, with the completion: the whole function, or its body."""
    source = program_in(completion)
    if re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b", source, re.MULTILINE):
        return f"{prompt}\n\n{source}\n"
    return f"{prompt.rstrip()}\n{_body(source)}\n"


def _body(source: str) -> str:
    """Lines of a body, indented, up to the next statement at the left margin."""
    lines = source.splitlines()
    if lines and lines[0].strip() and not lines[0][0].isspace():
        indented = all(not line.strip() or line[0].isspace() for line in lines[1:])
        lines = [f"    {lines[0]}", *lines[1:]] if indented and len(lines) > 1 else [f"    {line}" for line in lines]
    kept: list[str] = []
    for line in lines:
        if line.strip() and not line[0].isspace() and not line.startswith("#"):
            break
        kept.append(line)
    return "\n".join(kept)


def is_python(source: str) -> bool:
    """Whether it compiles."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True

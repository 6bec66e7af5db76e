"""Scores that others have published. They are shown only next to a score of exactly the same setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True, slots=True)
class Published:
    """A published score."""

    value: float
    source: str


@cache
def _entries() -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))["scores"]
    return content


def published_score(
    task: str, metric: str, filter_name: str, shots: int | None, facts: Mapping[str, Any]
) -> Published | None:
    """The published score of the same model, task, metric and number of shots; None unless the whole setting is equal.

    That is: greedy decoding without a chat template, all questions, and the same limit on new tokens.
    """
    settings = facts["settings"]
    if facts["chat_template"] or settings["limit"] is not None or settings["gen_kwargs"]:
        return None
    wanted = (facts["model"], task, metric, filter_name, shots, settings.get("used_max_gen_toks"))
    keys = ("model", "task", "metric", "filter", "shots", "max_gen_toks")
    for entry in _entries():
        if tuple(entry[key] for key in keys) == wanted:
            return Published(entry["value"], entry["source"])
    return None

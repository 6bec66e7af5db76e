"""The arguments through which an environment's constructor gets a judge. Standard library, for every interpreter."""

from __future__ import annotations

import importlib
import inspect
import json
import os
from typing import Any

JUDGES_VARIABLE = "ENVIRONMENT_JUDGES"
JUDGE_KEY_VARIABLE = "ENVIRONMENT_JUDGE_KEY"
WAYS = ("judge_client", "judge_base_url")
"""A constructor needs one of these to reach the judge."""


class NoJudge(Exception):
    """The environment cannot get its judge."""


def judge_arguments(module: str, judge: str | None) -> dict[str, Any]:
    """The arguments for the constructor in `module`, of those that it has. Empty without a judge.

    Raises:
        NoJudge: the run offers no such judge, or the constructor takes none.
    """
    if judge is None:
        return {}
    offered = json.loads(os.environ.get(JUDGES_VARIABLE) or "{}")
    if judge not in offered:
        raise NoJudge(f"judge = {judge!r}: no run offers it to this process")
    names = _parameters(module)
    if names is None:
        return {}  # verifiers says why it does not import
    if not any(way in names for way in WAYS):
        raise NoJudge(f"judge = {judge!r}: load_environment of {module!r} has none of the arguments {', '.join(WAYS)}")
    found, key = offered[judge], os.environ.get(JUDGE_KEY_VARIABLE, "")
    values = {
        "judge_model": found["model"],
        "judge_base_url": found["base_url"],
        "judge_api_key_var": JUDGE_KEY_VARIABLE,
        "judge_api_key": key,
        # The gateway adds them to requests that set none. A rubric may want to see them.
        "judge_sampling_args": found["sampling"],
    }
    arguments = {name: value for name, value in values.items() if name in names}
    if "judge_client" in names:
        from openai import AsyncOpenAI

        # The gateway has retried already.
        arguments["judge_client"] = AsyncOpenAI(base_url=found["base_url"], api_key=key, max_retries=0, timeout=None)
    return arguments


def _parameters(module: str) -> set[str] | None:
    try:
        loaded = importlib.import_module(module.replace("-", "_").split("/")[-1])
    except ImportError:
        return None
    function = getattr(loaded, "load_environment", None)
    return None if function is None else set(inspect.signature(function).parameters)

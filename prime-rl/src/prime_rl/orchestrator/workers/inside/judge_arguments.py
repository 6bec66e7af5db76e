"""The arguments through which an environment's constructor gets a judge. Standard library, for every interpreter."""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from .model_client import http_client

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
    _offer(judge)
    constructor = _constructor(module)
    if constructor is None:
        return {}  # verifiers says why it does not import
    return offered_arguments(judge, f"load_environment of {module!r}", constructor)


def offered_arguments(judge: str | None, who: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments for a function, of those that it has. Empty without a judge. `who` names it in messages.

    Raises:
        NoJudge: the run offers no such judge, or the function takes none.
    """
    if judge is None:
        return {}
    found, key = _offer(judge), os.environ.get(JUDGE_KEY_VARIABLE, "")
    names = set(inspect.signature(function).parameters)
    if not any(way in names for way in WAYS):
        raise NoJudge(f"judge = {judge!r}: {who} has none of the arguments {', '.join(WAYS)}")
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

        url = found["base_url"]
        # The gateway, which is on this machine, has retried already.
        arguments["judge_client"] = AsyncOpenAI(
            base_url=url, api_key=key, max_retries=0, timeout=None, http_client=http_client(url)
        )
    return arguments


def _offer(judge: str) -> Mapping[str, Any]:
    offered: dict[str, Mapping[str, Any]] = json.loads(os.environ.get(JUDGES_VARIABLE) or "{}")
    if judge not in offered:
        raise NoJudge(f"judge = {judge!r}: this process is not part of a run that starts the judge")
    return offered[judge]


def _constructor(module: str) -> Callable[..., Any] | None:
    try:
        loaded = importlib.import_module(module.replace("-", "_").split("/")[-1])
    except ImportError:
        return None
    function: Callable[..., Any] | None = getattr(loaded, "load_environment", None)
    return function

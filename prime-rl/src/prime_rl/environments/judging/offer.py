"""Tells environments how to reach their judges: two environment variables, which child processes inherit.

`inside/judge_arguments.py` of the orchestrator's guests reads them, in every interpreter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from prime_rl.configs.rollouts.judges import JudgeConfig

JUDGES_VARIABLE = "ENVIRONMENT_JUDGES"
"""JSON with `base_url`, `model` and `sampling` of each judge, by name."""
JUDGE_KEY_VARIABLE = "ENVIRONMENT_JUDGE_KEY"
"""The key of the gateway: `judge_api_key_var` of environments."""
LOOPBACK = "127.0.0.1"


@contextmanager
def offered(
    judges: Mapping[str, JudgeConfig],
    base_urls: Mapping[str, str],
    key: str,
    environ: MutableMapping[str, str] = os.environ,
) -> Iterator[None]:
    """Offer judges to the environments that this process loads in the block, and to those of its children."""
    if not judges:
        yield
        return
    shown = {
        name: {"base_url": base_urls[name], "model": judge.model, "sampling": judge.sampling}
        for name, judge in judges.items()
    }
    added = {JUDGES_VARIABLE: json.dumps(shown), JUDGE_KEY_VARIABLE: key}
    # The gateway is on this machine: a proxy could not reach it.
    added |= {name: ",".join(filter(None, (environ.get(name), LOOPBACK))) for name in ("NO_PROXY", "no_proxy")}
    before = {name: environ.get(name) for name in added}
    environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


@contextmanager
def offered_in_a_trial(judges: Mapping[str, JudgeConfig]) -> Iterator[None]:
    """Offer judges that do not answer, to environments that are loaded but not run."""
    nowhere = {name: f"http://{LOOPBACK}:9/{name}/v1" for name in judges}
    with offered(judges, nowhere, "no-key-in-a-trial"):
        yield

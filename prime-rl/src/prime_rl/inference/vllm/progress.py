"""Reports the progress of vLLM's engine to the launcher."""

from __future__ import annotations

import psutil
from prometheus_client import REGISTRY
from vllm.engine.protocol import EngineClient

from prime_rl.monitors.trace import own_trace
from prime_rl.run.beats import ANYONE, own_beats

_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


class EngineProgress:
    """Looks at what the engine has done since the last look. Call `look` several times a second."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._seen: tuple[float, int] | None = None
        # The engine runs in processes of its own, which a signal may stop.
        own_beats().include(child.pid for child in psutil.Process().children(recursive=True))
        own_beats().started()
        own_trace()

    def look(self, why_idle: str | None) -> None:
        """`why_idle` says why the engine generates nothing; None if it may."""
        unfinished = self._engine.get_num_unfinished_requests()
        seen = (_tokens(), unfinished)
        if why_idle is not None:
            own_beats().say(why_idle)
        elif not unfinished:
            own_beats().say("waiting for requests", waits_for=ANYONE)
        else:
            own_beats().say("generating")
            if seen != self._seen:
                own_beats().tick()
        self._seen = seen


def _tokens() -> float:
    """Number of tokens so far, of prompts and of answers. 0 if vLLM's statistics are off, or in several processes."""
    metrics = REGISTRY.restricted_registry(_TOKENS).collect()
    return sum(sample.value for metric in metrics for sample in metric.samples if sample.name in _TOKENS)

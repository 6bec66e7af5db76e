"""Records groups in the trace: their fate, and when their rollouts generated, used tools and were scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_rl.monitors.trace import Trace, own_trace
from prime_rl.orchestrator.rollouts.rollout import ExampleRef
from prime_rl.run.ledger import Ledger

PHASES = {"generation": "generate", "model": "model call", "env": "tool", "scoring": "reward"}
"""Phases that verifiers measures, with their names in the trace."""


class GroupSessions:
    """Follows the ledger: a group begins when its example is drawn, and ends when it is trained on or dropped."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def take(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"drawn": draw, "env": env, "row": row}:
                self._trace.begin("group", str(draw), env=env, row=row, status="submitted")
            case {"finished": draw, "reward": reward}:
                self._trace.mark("finished", str(draw), reward=reward)
            case {"requeued": draw, "reason": reason}:
                self._trace.mark("attempted again", str(draw), reason=reason)
            case {"trained": draws, "step": step}:
                for draw in draws:
                    self._trace.end("group", str(draw), status="accepted", step=step)
            case {"dropped": draw, "reason": reason}:
                self._trace.end("group", str(draw), status="dropped", reason=reason)


def traced_ledger(path: Path) -> Ledger:
    """A run's ledger, which the trace follows."""
    ledger = Ledger(path)
    ledger.follow(GroupSessions(own_trace()).take)
    return ledger


def record_rollouts(trace: Trace, outputs: Sequence[Mapping[str, Any]], example: ExampleRef) -> None:
    """Record the phases of a group's rollouts, at the times that verifiers measured."""
    if not trace.is_on or example.draw is None:
        return
    for index, output in enumerate(outputs):
        id = f"{example.draw}/{index}"
        for phase, start_s, end_s in _phases(output.get("timing")):
            trace.begin(phase, id, at_us=int(1e6 * start_s))
            trace.end(phase, id, at_us=int(1e6 * end_s))


def _phases(timing: Any) -> list[tuple[str, float, float]]:
    """Name, start and end of each phase. An environment of an older verifiers gives durations only: none then."""
    found = []
    for key, name in PHASES.items():
        measured = timing.get(key) if isinstance(timing, Mapping) else None
        spans = measured.get("spans", [measured]) if isinstance(measured, Mapping) else []
        for span in spans if isinstance(spans, list) else []:
            start_s, end_s = (span.get("start"), span.get("end")) if isinstance(span, Mapping) else (None, None)
            if isinstance(start_s, float) and isinstance(end_s, float) and 0 < start_s <= end_s:
                found.append((name, start_s, end_s))
    return found

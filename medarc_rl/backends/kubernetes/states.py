"""What became of a job, from what the cluster shows of a JobSet, a RayJob and their pods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from medarc_rl.backends.ray.own_job import STOPS_ITSELF
from medarc_rl.jobs.record import State, Status
from prime_rl.watch.overview.words import printable

Shown = Mapping[str, Any]
_MOST_FAULTS = 3
_OF_RAY: Mapping[str, State] = {
    "": "queued",
    "Initializing": "queued",
    "Suspended": "queued",
    "Suspending": "running",
    "Retrying": "queued",
    "Waiting": "queued",
    "Running": "running",
    "Complete": "succeeded",
    "Failed": "failed",
    "ValidationFailed": "failed",
}


def jobset_status(jobset: Shown, pods: Sequence[Shown]) -> Status:
    """The state of a JobSet: its own word once it has ended, before that its pods'."""
    shown = jobset.get("status") or {}
    conditions = {each.get("type"): each for each in shown.get("conditions") or () if each.get("status") == "True"}
    if "Completed" in conditions:
        return Status("succeeded")
    if "Failed" in conditions:
        words = [str(conditions["Failed"].get("message", "")), *map(_end_of, pods[-1:])]
        return Status("failed", "; ".join(filter(None, words)))
    if "Suspended" in conditions or (jobset.get("spec") or {}).get("suspend"):
        return Status("queued", "suspended, as a job of Kueue is until it is admitted")
    return _pods_status(pods)


def rayjob_status(rayjob: Shown, pods: Sequence[Shown]) -> Status:
    shown = rayjob.get("status") or {}
    deployment, job = str(shown.get("jobDeploymentStatus") or ""), str(shown.get("jobStatus") or "")
    state = _OF_RAY.get(deployment, "unknown")
    if job == "STOPPED" and state != "running":
        return Status("cancelled", "the Ray job was stopped")
    if deployment == "Complete" and job == "FAILED":
        state = "failed"
    detail = str(shown.get("message") or shown.get("reason") or "")
    if state == "queued" and not detail:
        return Status("queued", _pods_status(pods).detail)
    return Status(state, detail)


def refusal(lines: Sequence[str]) -> Status | None:
    """How a Ray job ended that stopped itself, as its last lines tell; None if it did not."""
    if not any(STOPS_ITSELF in line for line in lines):
        return None
    faults = [line for line in lines if line.startswith("error: ")]
    return Status("failed", "; ".join(printable(line) for line in faults[:_MOST_FAULTS]) or "the run was refused")


def _pods_status(pods: Sequence[Shown]) -> Status:
    if not pods:
        return Status("queued", "no pod yet")
    newest = pods[-1]
    phase = (newest.get("status") or {}).get("phase")
    retried = f"attempt {len(pods)}" if len(pods) > 1 else ""
    if phase == "Running":
        node = (newest.get("spec") or {}).get("nodeName", "")
        return Status("running", "; ".join(filter(None, [f"on {node}" if node else "", retried])))
    waits = next(_waits_for(newest), "") if phase == "Pending" else _end_of(newest)
    # A pod that has ended is followed by another one, or by the end of the job.
    return Status("queued", "; ".join(filter(None, [waits, retried])))


def _waits_for(pod: Shown) -> Iterator[str]:
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason"):
            yield ": ".join(filter(None, [waiting["reason"], waiting.get("message", "")]))
    for condition in status.get("conditions") or ():
        if condition.get("status") == "False" and condition.get("message"):
            yield f"{condition.get('reason', '')}: {condition['message']}"


def _end_of(pod: Shown) -> str:
    """How a pod's container ended, as `exit code 137 (OOMKilled)`."""
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            reason = ended.get("reason", "")
            return f"exit code {ended.get('exitCode')}" + (f" ({reason})" if reason not in ("", "Error") else "")
    return str((pod.get("status") or {}).get("message") or "")

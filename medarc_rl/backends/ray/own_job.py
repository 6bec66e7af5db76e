"""Stops the Ray job that this process runs in, so that KubeRay does not start it again.

KubeRay starts a RayJob again whose Ray job has failed, whatever its exit code; one that was stopped has ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping

STOPS_ITSELF = "this Ray job stops itself, so that nothing starts it again"
"""In the job's output, by which its status is told from a job that somebody else stopped."""
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_LIMIT_S = 60.0
"""Seconds until the signal must have come."""


def submission_id(env: Mapping[str, str]) -> str | None:
    """The job's id of `ray job submit`; None if this process is in no such job."""
    try:
        found = json.loads(env[_JOB_VARIABLE])["metadata"]["job_submission_id"]
    except (KeyError, TypeError, ValueError):
        return None
    return found if isinstance(found, str) else None


def stop_own_job() -> None:
    """Ask Ray to stop this job, and wait for its signal, which ends the process. Returns if it cannot be stopped."""
    job = submission_id(os.environ)
    if job is None:
        sys.stderr.write("warning: --stop-if-refused: this process is in no job of `ray job submit`\n")
        return
    import requests
    from ray.job_submission import JobSubmissionClient

    sys.stderr.write(f"{STOPS_ITSELF}\n")
    sys.stderr.flush()
    try:
        JobSubmissionClient().stop_job(job)
    except (RuntimeError, ConnectionError, ValueError, requests.RequestException) as error:
        sys.stderr.write(f"warning: it could not be stopped: {type(error).__name__}: {error}\n")
        return
    # The handler of SIGTERM ends the wait.
    threading.Event().wait(_LIMIT_S)

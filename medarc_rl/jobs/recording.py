"""Records what was submitted."""

from __future__ import annotations

from medarc_rl.cli import say, warn
from medarc_rl.errors import MedarcError
from medarc_rl.jobs.log import JobLog
from medarc_rl.jobs.record import JobRecord


def record_job(record: JobRecord) -> bool:
    """Add a job that was submitted to the job log. A log that cannot be written is only warned of."""
    try:
        JobLog.of_user().save(record)
    except MedarcError as error:
        warn(f"the job was submitted, but not recorded: {error}")
        return False
    say(f"job {record.key}: medarc_jobs status|logs|cancel|wait {record.key}")
    return True

"""`medarc_jobs list|status|logs|cancel|wait`: the jobs that you submitted, whatever back-end runs them."""

from __future__ import annotations

from medarc_rl.cli import add_command_without_config, new_app
from medarc_rl.jobs.command import (
    CancelOptions,
    ListOptions,
    LogsOptions,
    StatusOptions,
    WaitOptions,
    cancel,
    list_jobs,
    logs,
    status,
    wait,
)

app = new_app("medarc_jobs", "Look after the jobs that you submitted with medarc_slurm and medarc_submit.")
add_command_without_config(app, "list", ListOptions, list_jobs)
add_command_without_config(app, "status", StatusOptions, status)
add_command_without_config(app, "logs", LogsOptions, logs)
add_command_without_config(app, "cancel", CancelOptions, cancel)
add_command_without_config(app, "wait", WaitOptions, wait)


def main() -> None:
    app()

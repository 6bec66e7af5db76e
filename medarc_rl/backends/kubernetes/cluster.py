"""Jobs of Kubernetes, through kubectl."""

from __future__ import annotations

from collections.abc import Iterator

from medarc_rl.backends.backend import Prepared, Request
from medarc_rl.errors import UsageError
from medarc_rl.jobs.record import JobRecord, Status

_NOT_YET = "--to kubernetes is not part of this version yet"


class Kubernetes:
    """Implements `Backend`."""

    def prepare(self, request: Request) -> Prepared:
        raise UsageError(_NOT_YET)

    def submit(self, prepared: Prepared) -> str:
        raise UsageError(_NOT_YET)

    def status(self, record: JobRecord) -> Status:
        raise UsageError(_NOT_YET)

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        raise UsageError(_NOT_YET)

    def cancel(self, record: JobRecord) -> None:
        raise UsageError(_NOT_YET)

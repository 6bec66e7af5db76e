"""Writing files while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundJobs:
    """Runs jobs in a thread of their own, one after the other. What comes after a failed one is left out."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._pending: list[Future[None]] = []
        self._has_failed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` when those before it are done."""
        self._pending.append(self._thread.submit(self._run, job))

    def wait(self) -> None:
        """Return when all jobs are done, or raise what one of them raised; once."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _run(self, job: Callable[[], None]) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        job()
        self._has_failed = False

"""Follows the output of a pod, also when the connection to it breaks."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from medarc_rl.backends.kubernetes.kubectl import Kubectl, NotFound
from medarc_rl.errors import MedarcError

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) ")
_MOST_FAILURES = 10
"""In a row, without a new line."""
_LONGEST_PAUSE_S = 30.0
_LASTING_S = 30.0
"""A connection that broke after this time did work: a proxy may end those that are silent."""
_ENDED = ("Succeeded", "Failed")


class PodLog:
    """The lines of one pod, each once.

    Kubernetes only knows whole seconds to continue from, so the lines of the last two are remembered and left out.
    """

    def __init__(
        self, kubectl: Kubectl, name: str, job_has_ended: Callable[[], bool], pause: Callable[[float], object]
    ) -> None:
        self._kubectl = kubectl
        self._name = name
        self._job_has_ended = job_has_ended
        self._pause = pause
        self._since: str | None = None
        """The second before that of the newest line."""
        self._recent: Counter[str] = Counter()
        """Lines from that second on, with their times."""

    def follow(self, has_ended: bool) -> Iterator[str]:
        """The lines until the pod has ended.

        Args:
            has_ended: whether it has, as far as is known; otherwise the cluster is asked.

        Raises:
            MedarcError: the connection broke ten times in a row.
        """
        failures = 0
        while True:
            begun_s, fault = time.monotonic(), None
            try:
                for line in self._read(is_last=has_ended):
                    failures = 0
                    yield line
            except NotFound:
                return
            except MedarcError as error:
                fault = error
                failures = 1 if time.monotonic() - begun_s > _LASTING_S else failures + 1
                if failures == _MOST_FAILURES:
                    raise MedarcError(
                        f"the output of pod {self._name} breaks off, {failures} times: {error}"
                    ) from error
            if has_ended and fault is None:
                return
            self._pause(min(2.0**failures, _LONGEST_PAUSE_S))
            # Asked before the next reading, which then has everything.
            has_ended = has_ended or self._has_ended()

    def _read(self, is_last: bool) -> Iterator[str]:
        """What one connection brings that is new. A last line without an end may be half of one."""
        known = Counter(self._recent)
        since = [] if self._since is None else [f"--since-time={self._since}Z"]
        for line in self._kubectl.stream("logs", self._name, "--all-containers", "--follow", "--timestamps", *since):
            if known[line] > 0:
                known[line] -= 1
            elif line.endswith("\n") or is_last:
                self._note(line)
                yield _STAMP.sub("", line, count=1).removesuffix("\n")

    def _note(self, line: str) -> None:
        if (stamp := _STAMP.match(line)) is None:
            return
        self._recent[line] += 1
        since = (datetime.fromisoformat(stamp[1]) - timedelta(seconds=1)).isoformat()
        if self._since is None or since > self._since:
            self._since = since
            self._recent = Counter({each: count for each, count in self._recent.items() if each >= since})

    def _has_ended(self) -> bool:
        try:
            # The pod of a lost node seems to run for a long time.
            return is_over(self._kubectl.get("pod", self._name)) or self._job_has_ended()
        except NotFound:
            return True
        except MedarcError:
            # The next reading tells what is wrong.
            return False


def is_over(pod: Mapping[str, Any]) -> bool:
    """Whether a pod writes no more."""
    return (pod.get("status") or {}).get("phase") in _ENDED

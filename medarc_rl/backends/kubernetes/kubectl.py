"""Asks the cluster through kubectl, which has the user's rights and addresses. Never through a shell."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from medarc_rl.errors import MedarcError
from medarc_rl.external import Answer, NoAnswer, ask
from prime_rl.watch.overview.words import printable

_LIMIT_S = 60.0
_REQUEST_S = 20
_MOST_LINES = 5
_MAX_LINE_CHARS = 1000
_LOG_LINE = re.compile(r"[EFIW]\d{4} \d\d:\d\d:\d\d")
"""Begins a line of kubectl's own log."""


class NotFound(MedarcError):
    """The cluster has no such object, or not any more."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl for one namespace of one cluster."""

    namespace: str
    context: str | None = None

    def argv(self, *words: str) -> list[str]:
        context = [] if self.context is None else [f"--context={self.context}"]
        return ["kubectl", *context, f"--namespace={self.namespace}", *words]

    def run(self, *words: str, stdin: str = "") -> str:
        """What kubectl prints.

        Raises:
            NotFound: the cluster has no such object.
            MedarcError: there is no kubectl, the cluster does not answer, or it refuses.
        """
        try:
            answer = ask(self.argv(f"--request-timeout={_REQUEST_S}s", *words), _LIMIT_S, stdin=stdin)
        except NoAnswer as error:
            raise MedarcError(_no_kubectl(str(error))) from error
        if answer.code != 0:
            raise _refusal(answer)
        return answer.stdout

    def get(self, *words: str) -> Any:
        """Objects of the cluster, parsed. Raises as `run`."""
        text = self.run("get", *words, "--output=json")
        try:
            return json.loads(text)
        except ValueError as error:
            raise MedarcError("kubectl: its answer is no JSON") from error

    def stream(self, *words: str) -> Iterator[str]:
        """The lines that kubectl prints until it ends, with their ends. Raises as `run`, also after some lines."""
        try:
            program = subprocess.Popen(
                self.argv(*words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise MedarcError(_no_kubectl(f"kubectl: {error.strerror}")) from error
        with program:
            try:
                yield from program.stdout or ()
                complaint = program.stderr.read() if program.stderr is not None else ""
                if program.wait() != 0:
                    raise _refusal(Answer(program.returncode, "", complaint))
            finally:
                program.kill()


def current_context() -> str | None:
    """kubectl's current context; None if it has none, as in a pod."""
    try:
        answer = ask(["kubectl", "config", "current-context"], _LIMIT_S)
    except NoAnswer:
        return None  # whatever is asked next tells why
    return answer.stdout.strip() or None if answer.code == 0 else None


def _no_kubectl(fault: str) -> str:
    if "No such file" in fault:
        return "kubectl: not found: install it, or print the manifest with --dry-run and send it from elsewhere"
    return fault


def _refusal(answer: Answer) -> MedarcError:
    lines = [printable(line, _MAX_LINE_CHARS) for line in answer.stderr.splitlines() if line.strip()]
    # Its log says the same before, once for each try.
    told = [line for line in lines if not _LOG_LINE.match(line)] or lines[-1:]
    faults = [line.removeprefix("error: ") for line in told[:_MOST_LINES]]
    if "(NotFound)" in answer.stderr:
        return NotFound(*faults)
    if "no matches for kind" in answer.stderr or "doesn't have a resource type" in answer.stderr:
        faults.append("the cluster does not have the controller of this kind: JobSet and KubeRay are installed apart")
    return MedarcError(*(faults or [f"kubectl ended with exit code {answer.code}"]))

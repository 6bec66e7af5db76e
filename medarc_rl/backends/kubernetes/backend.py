"""The Kubernetes back-end, through kubectl: sends a job's objects, and shows, follows and deletes them later."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from medarc_rl.backends.kubernetes.manifest import CONTAINER, JOB_LABEL, Table, manifest_of, to_yaml
from medarc_rl.backends.kubernetes.request import cluster_job, uses_ray
from medarc_rl.backends.protocol import STOPS_ITSELF, Prepared, Request, Submitted
from medarc_rl.cli import warn
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.external import Answer, NoAnswer, ask
from medarc_rl.jobs import JobRecord, State, Status
from prime_rl.watch.progress import printable

MANAGER = "medarc-rl"
"""Owner of the fields that `kubectl apply` sets, as the cluster records it."""
_LOOK_EVERY_S = 2.0
_LAST_LINES = 50
"""Last lines of a job's output that are searched for a refusal."""
Shown = Mapping[str, Any]
_MOST_FAULTS = 3
_RAYJOB_STATES: Mapping[str, State] = {
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
_LIMIT_S = 60.0
"""Time limit of one kubectl, in seconds: it may make several requests, and start a program to log in."""
_REQUEST_S = 20
"""Time limit of one request of kubectl to the cluster, in seconds."""
_MOST_LINES = 5
_MAX_LINE_CHARS = 1000
_LOG_LINE = re.compile(r"[EFIW]\d{4} \d\d:\d\d:\d\d")
"""Begins a line of kubectl's own log."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) ")
_MOST_FAILURES = 10
"""Failed connections in a row, without a new line."""
_LONGEST_PAUSE_S = 30.0
_LASTING_S = 30.0
"""A connection that broke after this time did work: a proxy may end those that are silent."""
_ENDED = ("Succeeded", "Failed")
"""Phases of a pod that writes no more."""


@dataclass(frozen=True, kw_only=True)
class PreparedManifest(Prepared):
    kubectl: Kubectl
    resource: str
    """`jobset` or `rayjob`."""


class Kubernetes:
    """Implements `Backend`."""

    def __init__(self, pause: Callable[[float], object] = time.sleep) -> None:
        self._pause = pause

    def prepare(self, request: Request) -> PreparedManifest:
        options = request.options
        job, output = cluster_job(request)
        ray = uses_ray(request, options)
        resource = "rayjob" if ray else "jobset"
        # Kept with the job: after a switch to another cluster, `cancel` would delete a job of the same name there.
        context = options.context or (None if options.dry_run else current_context())
        return PreparedManifest(
            name=job.name,
            output=output if job.claim is None or output != job.local_output else f"{job.claim}:{output}",
            text=to_yaml(manifest_of(job, ray)),
            details={"namespace": job.namespace, "context": context or "", "resource": resource},
            kubectl=Kubectl(job.namespace, context),
            resource=resource,
        )

    def submit(self, prepared: PreparedManifest) -> Submitted:
        """Send the manifest, which the cluster first checks as a whole without keeping any of it."""
        kubectl = prepared.kubectl
        # Another one's ConfigMap of this name would be changed, and be deleted with the job.
        kinds = f"{prepared.resource},{_rest(prepared.resource)}"
        found = kubectl.run("get", kinds, prepared.name, "--ignore-not-found", "--output=name").split()
        if found:
            kind = re.split("[./]", found[0])[0]
            raise UsageError(
                f"--name {prepared.name}: namespace {kubectl.namespace} has such a {kind}: give another name, or "
                "delete it"
            )
        apply = ("apply", "--server-side", f"--field-manager={MANAGER}", "--filename=-")
        kubectl.run(*apply, "--dry-run=server", stdin=prepared.text)
        kubectl.run(*apply, stdin=prepared.text)
        details = {}
        try:
            owner = _owner(kubectl, prepared)
            details["uid"] = owner["uid"]
            _give_to_job(kubectl, prepared, owner)
        except MedarcError as error:
            warn(f"the config of {prepared.name} stays in the cluster when the job is deleted: {error}")
        return Submitted(f"{prepared.resource}/{prepared.name}", details)

    def status(self, record: JobRecord) -> Status:
        kubectl = _kubectl(record)
        try:
            shown = _shown(kubectl, record)
        except NotFound as error:
            return Status("unknown", str(error))
        pods = _pods(kubectl, record)
        if _resource(record) != "rayjob":
            return jobset_status(shown, pods)
        found = rayjob_status(shown, pods)
        return found if found.state != "cancelled" else _refusal(kubectl, pods) or found

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """The output of each pod, the oldest first: the run's, or that of `ray job submit`."""
        kubectl, shown = _kubectl(record), set()
        while True:
            # Asked first: a pod that ends between the two looks has begun before the second one.
            found = self.status(record)
            # Of a job that was deleted, pods with its name may be another's.
            pods = [] if found.state == "unknown" else _pods(kubectl, record)
            for pod in _talking(pods):
                name = pod["metadata"]["name"]
                if name not in shown:
                    shown.add(name)
                    yield from self._output(record, pod, follow)
            if not follow and not shown:
                yet = " yet" if found.goes_on else ""
                raise MedarcError(f"no output{yet}: the job is {found.state}{f': {found.detail}' * bool(found.detail)}")
            if not follow or not found.goes_on:
                return
            self._pause(_LOOK_EVERY_S)

    def _output(self, record: JobRecord, pod: Table, follow: bool) -> Iterator[str]:
        kubectl, name = _kubectl(record), pod["metadata"]["name"]
        if follow:
            return PodLog(kubectl, name, lambda: not self.status(record).goes_on, self._pause).follow(is_over(pod))
        return (line.removesuffix("\n") for line in kubectl.stream("logs", name, "--all-containers"))

    def cancel(self, record: JobRecord) -> None:
        """Delete the job and what belongs to it. Its pods get SIGTERM, and save."""
        kubectl, name, resource = _kubectl(record), _name(record), _resource(record)
        _shown(kubectl, record)
        kubectl.run("delete", resource, name, "--wait=false")
        kubectl.run("delete", _rest(resource), f"--selector={JOB_LABEL}={name}", "--wait=false", "--ignore-not-found")


def _rest(resource: str) -> str:
    """Kinds of the other objects of a job."""
    return "configmap,networkpolicy" if resource == "rayjob" else "configmap"


def _owner(kubectl: Kubectl, prepared: PreparedManifest) -> dict[str, str]:
    """The job, as its other objects name it in `ownerReferences`."""
    job = kubectl.get(prepared.resource, prepared.name)
    try:
        uid = str(job["metadata"]["uid"])
        return {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": prepared.name, "uid": uid}
    except (KeyError, TypeError) as error:
        raise MedarcError("the cluster's answer has no uid") from error


def _give_to_job(kubectl: Kubectl, prepared: PreparedManifest, owner: dict[str, str]) -> None:
    """Make the job the owner of its other objects, so that they are deleted with it, also after `--keep` seconds."""
    change = json.dumps({"metadata": {"ownerReferences": [owner]}})
    for kind in _rest(prepared.resource).split(","):
        kubectl.run("patch", kind, prepared.name, "--type=merge", f"--patch={change}")


def _kubectl(record: JobRecord) -> Kubectl:
    return Kubectl(record.details.get("namespace") or "default", record.details.get("context") or None)


def _name(record: JobRecord) -> str:
    return record.id.rpartition("/")[2]


def _resource(record: JobRecord) -> str:
    return record.details.get("resource", "jobset")


def _shown(kubectl: Kubectl, record: JobRecord) -> Table:
    """A job, as the cluster shows it. Raises NotFound if it was deleted, also if another one has its name now."""
    try:
        shown: Table = kubectl.get(_resource(record), _name(record))
    except NotFound as error:
        raise NotFound("the job is no longer in the cluster: it was deleted") from error
    own, found = record.details.get("uid"), (shown.get("metadata") or {}).get("uid")
    if own and found != own:
        raise NotFound("this job was deleted: the cluster has a newer job with the same name")
    return shown


def _pods(kubectl: Kubectl, record: JobRecord) -> list[Table]:
    """The pods of a job, the oldest first."""
    found = kubectl.get("pods", f"--selector={JOB_LABEL}={_name(record)}")
    pods = [each for each in found.get("items") or () if isinstance(each, dict)]
    return sorted(pods, key=lambda pod: str(pod.get("metadata", {}).get("creationTimestamp", "")))


def _talking(pods: Sequence[Table]) -> Iterator[Table]:
    """Pods that have begun, whose container prints the run's output."""
    for pod in pods:
        containers = {each.get("name") for each in pod.get("spec", {}).get("containers") or ()}
        if pod.get("status", {}).get("phase") != "Pending" and containers & {CONTAINER, "ray-job-submitter"}:
            yield pod


# States: what became of a job, from what the cluster shows of a JobSet, a RayJob and their pods.


def jobset_status(jobset: Shown, pods: Sequence[Shown]) -> Status:
    """The state of a JobSet: its own condition once it has ended, before that the state of its pods."""
    shown = jobset.get("status") or {}
    conditions = {each.get("type"): each for each in shown.get("conditions") or () if each.get("status") == "True"}
    if "Completed" in conditions:
        return Status("succeeded")
    if "Failed" in conditions:
        words = [str(conditions["Failed"].get("message", "")), *map(_end_of, pods[-1:])]
        return Status("failed", "; ".join(filter(None, words)))
    if "Suspended" in conditions or (jobset.get("spec") or {}).get("suspend"):
        return Status("queued", "suspended; with Kueue, a job is suspended until it is admitted")
    return _pods_status(pods)


def rayjob_status(rayjob: Shown, pods: Sequence[Shown]) -> Status:
    shown = rayjob.get("status") or {}
    deployment, job = str(shown.get("jobDeploymentStatus") or ""), str(shown.get("jobStatus") or "")
    state = _RAYJOB_STATES.get(deployment, "unknown")
    if job == "STOPPED" and state != "running":
        return Status("cancelled", "the Ray job was stopped")
    if deployment == "Complete" and job == "FAILED":
        state = "failed"
    detail = str(shown.get("message") or shown.get("reason") or "")
    if state == "queued" and not detail:
        return Status("queued", _pods_status(pods).detail)
    return Status(state, detail)


def _refusal(kubectl: Kubectl, pods: Sequence[Table]) -> Status | None:
    """Why a Ray job stopped itself; None if it did not, or if the pod with its output is gone."""
    names = [pod["metadata"]["name"] for pod in _talking(pods)]
    try:
        return refusal(kubectl.run("logs", names[-1], f"--tail={_LAST_LINES}").splitlines()) if names else None
    except NotFound:
        return None


def refusal(lines: Sequence[str]) -> Status | None:
    """The end of a Ray job that stopped itself, from its last lines. None if it did not stop itself."""
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
    """The end of a pod's container, as in `exit code 137 (OOMKilled)`."""
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            reason = ended.get("reason", "")
            return f"exit code {ended.get('exitCode')}" + (f" ({reason})" if reason not in ("", "Error") else "")
    return str((pod.get("status") or {}).get("message") or "")


# Output: the lines of one pod, also when the connection to it breaks.


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
        """The new lines of one connection. A last line without an end may be incomplete."""
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
            # The next reading reports the fault.
            return False


def is_over(pod: Mapping[str, Any]) -> bool:
    """Whether a pod writes no more."""
    return (pod.get("status") or {}).get("phase") in _ENDED


# kubectl, which has the user's rights and addresses. Never through a shell.


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
        """kubectl's output.

        Raises:
            NotFound: the cluster has no such object.
            MedarcError: there is no kubectl, the cluster does not answer, or it refuses.
        """
        try:
            answer = ask(self.argv(f"--request-timeout={_REQUEST_S}s", *words), _LIMIT_S, stdin=stdin)
        except NoAnswer as error:
            raise MedarcError(_no_kubectl(str(error))) from error
        if answer.code != 0:
            raise _refused_by_cluster(answer)
        return answer.stdout

    def get(self, *words: str) -> Any:
        """Objects of the cluster, parsed. Raises as `run`."""
        text = self.run("get", *words, "--output=json")
        try:
            return json.loads(text)
        except ValueError as error:
            raise MedarcError("kubectl: its answer is not JSON") from error

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
                    raise _refused_by_cluster(Answer(program.returncode, "", complaint))
            finally:
                program.kill()


def current_context() -> str | None:
    """kubectl's current context; None if it has none, as in a pod."""
    try:
        answer = ask(["kubectl", "config", "current-context"], _LIMIT_S)
    except NoAnswer:
        return None  # the next call reports the fault
    return answer.stdout.strip() or None if answer.code == 0 else None


def _no_kubectl(fault: str) -> str:
    if "No such file" in fault:
        return "kubectl: not found: install it, or print the manifest with --dry-run and send it from elsewhere"
    return fault


def _refused_by_cluster(answer: Answer) -> MedarcError:
    lines = [printable(line, _MAX_LINE_CHARS) for line in answer.stderr.splitlines() if line.strip()]
    # Its log says the same before, once for each try.
    plain = [line for line in lines if not _LOG_LINE.match(line)] or lines[-1:]
    faults = [line.removeprefix("error: ") for line in plain[:_MOST_LINES]]
    if "(NotFound)" in answer.stderr:
        return NotFound(*faults)
    if "no matches for kind" in answer.stderr or "doesn't have a resource type" in answer.stderr:
        faults.append(
            "the cluster has no controller for this kind of job: install JobSet or KubeRay in it, or choose the other "
            "--engine"
        )
    return MedarcError(*(faults or [f"kubectl ended with exit code {answer.code}"]))

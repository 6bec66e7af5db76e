"""Jobs of Kubernetes, through kubectl."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from medarc_rl.backends.backend import Prepared, Request, Submitted
from medarc_rl.backends.kubernetes.kubectl import Kubectl, NotFound, current_context
from medarc_rl.backends.kubernetes.manifest import CONTAINER, JOB_LABEL, ClusterJob, Table, config_map, jobset
from medarc_rl.backends.kubernetes.pod_logs import PodLog, is_over
from medarc_rl.backends.kubernetes.preparation import cluster_job, uses_ray
from medarc_rl.backends.kubernetes.rayjob import network_policy, rayjob
from medarc_rl.backends.kubernetes.states import jobset_status, rayjob_status, refusal
from medarc_rl.cli import warn
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.jobs.record import JobRecord, Status

MANAGER = "medarc-rl"
_LOOK_EVERY_S = 2.0
_LAST_LINES = 50
"""Of a job's output, in which a refusal is looked for."""


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and repeats a table in place of a reference to it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(tables: Sequence[Table]) -> str:
    return str(yaml.dump_all(tables, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000))


def manifest_of(job: ClusterJob, ray: bool) -> list[Table]:
    """All objects of a job, in the order in which they are made."""
    return [config_map(job), network_policy(job), rayjob(job)] if ray else [config_map(job), jobset(job)]


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
                yet = " yet" if found.state in ("queued", "running") else ""
                raise MedarcError(f"no output{yet}: the job is {found.state}{f': {found.detail}' * bool(found.detail)}")
            if not follow or found.state not in ("queued", "running"):
                return
            self._pause(_LOOK_EVERY_S)

    def _output(self, record: JobRecord, pod: Table, follow: bool) -> Iterator[str]:
        kubectl, name = _kubectl(record), pod["metadata"]["name"]
        if follow:
            has_ended = lambda: self.status(record).state not in ("queued", "running")  # noqa: E731
            return PodLog(kubectl, name, has_ended, self._pause).follow(is_over(pod))
        return (line.removesuffix("\n") for line in kubectl.stream("logs", name, "--all-containers"))

    def cancel(self, record: JobRecord) -> None:
        """Delete the job and what belongs to it. Its pods get SIGTERM, and save."""
        kubectl, name, resource = _kubectl(record), _name(record), _resource(record)
        _shown(kubectl, record)
        kubectl.run("delete", resource, name, "--wait=false")
        kubectl.run("delete", _rest(resource), f"--selector={JOB_LABEL}={name}", "--wait=false", "--ignore-not-found")


def _refusal(kubectl: Kubectl, pods: Sequence[Table]) -> Status | None:
    """Why a Ray job stopped itself; None if it did not, or if the pod with its output is gone."""
    names = [pod["metadata"]["name"] for pod in _talking(pods)]
    try:
        return refusal(kubectl.run("logs", names[-1], f"--tail={_LAST_LINES}").splitlines()) if names else None
    except NotFound:
        return None


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
        raise NotFound("the cluster has no such job: it was deleted") from error
    own, found = record.details.get("uid"), (shown.get("metadata") or {}).get("uid")
    if own and found != own:
        raise NotFound("the cluster has another job of this name: this one was deleted")
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

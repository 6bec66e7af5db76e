"""The objects that are sent to Kubernetes for a job, as plain tables: a ConfigMap with a JobSet or a RayJob."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

Table = dict[str, Any]
CONFIG_DIR = "/etc/medarc"
OUTPUT_DIR = "/output"
SCRATCH_DIR = "/scratch"
CONTAINER = "medarc"
REPLICATED_JOB = "run"
JOB_LABEL = "medarc-rl/job"
PROBE = "medarc_rl.backends.kubernetes.pod_probe"
GRACE_S = 120
"""Seconds from SIGTERM until a pod is killed: a run needs at most 60 to save and stop."""
START_LIMIT_S = 900
"""Seconds until the launcher must hold the run's directory."""
DOWNLOAD_LIMIT_S = 14_400
"""Start limit of a run that first downloads models or data from S3."""
USAGE_EXIT_CODE = 2
"""Exit code of a run that cannot be done as asked, which would fail in the same way again."""
DASHBOARD_PORT = 8265
"""Ray's port for `ray job submit`, which KubeRay's operator uses, too."""
_LOOK_S = 60
"""Seconds that the cluster stays after the job, so that its last lines can be read."""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A job of Kubernetes; everything was checked."""

    name: str
    namespace: str
    kind: str
    config: str
    """The resolved config, TOML."""
    argv: Sequence[str]
    """The command of a single pod, or of the driver of a Ray cluster."""
    image: str
    nodes: int = 1
    gpus: int = 0
    """Number of GPUs of each pod."""
    gpu_resource: str = "nvidia.com/gpu"
    cpus: str = "8"
    memory: str = "32Gi"
    shm: str = "8Gi"
    claim: str | None = None
    local_output: str = f"{OUTPUT_DIR}/run"
    """The run's directory in the pod, which the probes read."""
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()
    service_account: str | None = None
    pull_secrets: Sequence[str] = ()
    user_id: int = 1000
    retries: int = 3
    deadline_s: int | None = None
    keep_s: int = 604_800
    start_limit_s: int = START_LIMIT_S
    queue: str | None = None

    @property
    def config_file(self) -> str:
        return f"{self.kind}.toml"

    @property
    def labels(self) -> Table:
        return {
            "app.kubernetes.io/name": "medarc-rl",
            "app.kubernetes.io/managed-by": "medarc-submit",
            JOB_LABEL: self.name,
        }

    def metadata(self, name: str | None = None) -> Table:
        return {"name": name or self.name, "namespace": self.namespace, "labels": self.labels}


def manifest_of(job: ClusterJob, ray: bool) -> list[Table]:
    """All objects of a job, in the order in which they are made."""
    return [config_map(job), network_policy(job), rayjob(job)] if ray else [config_map(job), jobset(job)]


def config_map(job: ClusterJob) -> Table:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": job.metadata(),
        "immutable": True,
        "data": {job.config_file: job.config},
    }


# One node: a JobSet.


def jobset(job: ClusterJob) -> Table:
    """A JobSet of one Job with one pod.

    After an eviction or preemption a new pod starts, which is not counted. Exit code 2 fails the job. After any other
    failure a new pod starts, `retries` times.
    """
    metadata = job.metadata()
    if job.queue is not None:
        metadata["labels"] = {**job.labels, "kueue.x-k8s.io/queue-name": job.queue}
    job_spec = {
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": job.retries,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [USAGE_EXIT_CODE]},
                },
            ]
        },
        **({} if job.deadline_s is None else {"activeDeadlineSeconds": job.deadline_s}),
        "template": pod_template(job, container(job, job.argv, probes(job))),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            # The controller makes the headless service of this name.
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            # The Job itself starts pods again.
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": job.keep_s,
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job_spec}}],
        },
    }


def probes(job: ClusterJob) -> Table:
    """Startup: the launcher holds the run. Liveness: it still does. Readiness: all processes have started."""

    def probe(what: str, period_s: int, failures: int) -> Table:
        command = ["python", "-m", PROBE, what, _literal(job.local_output)]
        return {
            "exec": {"command": command},
            "periodSeconds": period_s,
            "timeoutSeconds": 20,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": probe("started", 10, job.start_limit_s // 10),
        "livenessProbe": probe("live", 30, 4),
        "readinessProbe": probe("ready", 30, 1),
    }


# Several nodes: KubeRay's RayJob, whose driver is that of the Ray back-end.


def rayjob(job: ClusterJob) -> Table:
    """A Ray cluster of `nodes` equal pods, the head among them, and the job that it is made for."""
    metadata = job.metadata()
    if job.queue is not None:
        metadata["labels"] = {**job.labels, "kueue.x-k8s.io/queue-name": job.queue}
    spec: Table = {
        # Ray gives this text to a shell.
        "entrypoint": shlex.join(job.argv),
        "submissionMode": "K8sJobMode",
        "backoffLimit": job.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _LOOK_S,
        **({} if job.deadline_s is None else {"activeDeadlineSeconds": job.deadline_s}),
        "submitterPodTemplate": _submitter(job),
        "rayClusterSpec": {
            # Pods of the cluster get a token from a Secret that the operator makes.
            "authOptions": {"mode": "token"},
            "headGroupSpec": {"rayStartParams": _start(job), "template": _node(job, "ray-head")},
            "workerGroupSpecs": _workers(job),
        },
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _start(job: ClusterJob) -> dict[str, str]:
    return {"num-gpus": str(job.gpus)}


def _workers(job: ClusterJob) -> list[Table]:
    count = job.nodes - 1
    if not count:
        return []
    size = {"replicas": count, "minReplicas": count, "maxReplicas": count}
    return [{"groupName": "nodes", **size, "rayStartParams": _start(job), "template": _node(job, "ray-worker")}]


def _node(job: ClusterJob, name: str) -> Table:
    # KubeRay sets restart policy, command and probes.
    return pod_template(job, container(job, None, {}, name), restart_policy=None)


def _submitter(job: ClusterJob) -> Table:
    """The pod of `ray job submit`, which needs neither GPUs nor files."""
    small: Table = {"cpu": "500m", "memory": "1Gi"}
    main: dict[str, Any] = {
        "name": "ray-job-submitter",
        "image": job.image,
        "resources": {"requests": small, "limits": dict(small)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    template = pod_template(job, main)
    del template["spec"]["volumes"]
    return template


def network_policy(job: ClusterJob) -> Table:
    """Ray trusts everyone who reaches its ports: only pods of the same job do, and KubeRay's operator."""
    operator = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}, "namespaceSelector": {}}
    same_job = {"podSelector": {"matchLabels": {JOB_LABEL: job.name}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": job.metadata(),
        "spec": {
            "podSelector": {"matchLabels": {JOB_LABEL: job.name}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [same_job]},
                {"from": [operator], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]},
            ],
        },
    }


# Pods.


def pod_template(job: ClusterJob, main: Table, restart_policy: str | None = "Never") -> Table:
    """A pod with the least rights: not root, without privileges, without a token of the cluster."""
    spec: Table = {
        **({} if restart_policy is None else {"restartPolicy": restart_policy}),
        "terminationGracePeriodSeconds": GRACE_S,
        "enableServiceLinks": False,
        "automountServiceAccountToken": job.service_account is not None,
        **({} if job.service_account is None else {"serviceAccountName": job.service_account}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": job.user_id,
            "runAsGroup": job.user_id,
            "fsGroup": job.user_id,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [main],
        "volumes": _volumes(job),
    }
    if job.node_selector:
        spec["nodeSelector"] = dict(job.node_selector)
    if job.tolerations:
        spec["tolerations"] = [dict(each) for each in job.tolerations]
    if job.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in job.pull_secrets]
    return {"metadata": {"labels": job.labels}, "spec": spec}


def container(job: ClusterJob, argv: Sequence[str] | None, checks: Table, name: str = CONTAINER) -> Table:
    """The container of a pod. Without `argv`, the controller sets the command."""
    amounts: Table = {"cpu": job.cpus, "memory": job.memory}
    if job.gpus:
        amounts[job.gpu_resource] = job.gpus
    mounts: list[Table] = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "scratch", "mountPath": SCRATCH_DIR},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "output", "mountPath": OUTPUT_DIR},
    ]
    found: Table = {
        "name": name,
        "image": job.image,
        **({} if argv is None else {"command": [_literal(word) for word in argv]}),
        "env": _environment(job),
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
        **checks,
    }
    if job.secrets:
        found["envFrom"] = [{"secretRef": {"name": name}} for name in job.secrets]
    return found


def _literal(text: str) -> str:
    """A text in which Kubernetes replaces no `$(NAME)`, nor `$$`."""
    return text.replace("$", "$$")


def _environment(job: ClusterJob) -> list[Table]:
    # A user without a home could write no cache.
    values = {"HOME": SCRATCH_DIR, "HF_HOME": f"{SCRATCH_DIR}/huggingface", "PYTHONUNBUFFERED": "1", **job.env}
    # Each name once: the cluster refuses a list that names one twice.
    kept = {name: value for name, value in values.items() if name not in job.secret_env}
    plain: list[Table] = [{"name": name, "value": _literal(value)} for name, value in kept.items()]
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, (secret, key) in job.secret_env.items()
    ]


def _volumes(job: ClusterJob) -> list[Table]:
    claim = {"persistentVolumeClaim": {"claimName": job.claim}}
    return [
        {"name": "config", "configMap": {"name": job.name}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}},
        # Without a claim, a run is kept on S3.
        {"name": "output", **({"emptyDir": {}} if job.claim is None else claim)},
    ]


# YAML.


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and repeats a table in place of a reference to it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def to_yaml(tables: Sequence[Table]) -> str:
    return str(yaml.dump_all(tables, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000))

"""A job on several nodes: KubeRay's RayJob, whose driver is the entry point of the Ray back-end."""

from __future__ import annotations

import shlex
from typing import Any

from medarc_rl.backends.kubernetes.manifest import JOB_LABEL, ClusterJob, Table, container, pod_template

DASHBOARD_PORT = 8265
_LOOK_S = 60
"""Seconds that the cluster stays after the job, so that its last lines can be read."""


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

"""JSON schemas of the custom resources JobSet and RayJob: the documented fields that our manifests use, and no others.

Sources: the Go types of `jobset.x-k8s.io/v1alpha2` (kubernetes-sigs/jobset) and of `ray.io/v1` (ray-project/kuberay).
Pod templates are objects here; tests check them as kinds Pod and Job, whose schemas `kubernetes-validate` ships.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def table(required: str = "", **fields: Any) -> Schema:
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
ANY: Schema = {"type": "object"}
LABEL: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
METADATA = table("name", name={**LABEL, "maxLength": 47}, namespace=LABEL, labels=TEXTS)

JOBSET = table(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=METADATA,
    spec=table(
        "replicatedJobs",
        network=table(enableDNSHostnames=FLAG, subdomain=LABEL, publishNotReadyAddresses=FLAG),
        failurePolicy=table(
            maxRestarts=COUNT, restartStrategy={"enum": ["Recreate", "BlockingRecreate"]}, rules={"type": "array"}
        ),
        successPolicy=table("operator", operator={"enum": ["All", "Any"]}, targetReplicatedJobs={"type": "array"}),
        suspend=FLAG,
        ttlSecondsAfterFinished=COUNT,
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": table(
                "name template",
                name=LABEL,
                replicas=COUNT,
                template=table("spec", metadata=ANY, spec=ANY),
                groupName=LABEL,
            ),
        },
    ),
)

TEMPLATE = table("spec", metadata=ANY, spec=ANY)
RAYJOB = table(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=METADATA,
    spec=table(
        "entrypoint rayClusterSpec",
        activeDeadlineSeconds=COUNT,
        backoffLimit=COUNT,
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        submitterPodTemplate=TEMPLATE,
        rayClusterSpec=table(
            "headGroupSpec",
            authOptions=table("mode", mode={"enum": ["disabled", "token"]}),
            headGroupSpec=table("template", rayStartParams=TEXTS, template=TEMPLATE),
            workerGroupSpecs={
                "type": "array",
                "items": table(
                    "groupName template",
                    groupName=LABEL,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=TEXTS,
                    template=TEMPLATE,
                ),
            },
        ),
    ),
)

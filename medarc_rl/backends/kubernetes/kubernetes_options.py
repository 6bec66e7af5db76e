"""Options of `medarc_submit --to kubernetes`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from typer import Option

from medarc_rl.backends.shared_options import ContainerOptions


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions(ContainerOptions):
    """Imports nothing but Typer, because every help page needs it."""

    namespace: Annotated[str, Option(help="kubernetes: namespace.")] = "default"
    context: Annotated[str | None, Option(help="kubernetes: context of kubectl; by default the current one.")] = None
    engine: Annotated[
        Literal["auto", "jobset", "ray"],
        Option(help="kubernetes: a JobSet, or a RayJob of KubeRay; auto takes ray for several nodes."),
    ] = "auto"
    output_claim: Annotated[
        str | None, Option(help="kubernetes: claim of a volume, mounted at /output; OUT is a directory in it.")
    ] = None
    secret: Annotated[
        list[str], Option(metavar="SECRET", help="kubernetes: Secret whose keys all become variables; may be repeated.")
    ] = field(default_factory=list)
    cpus: Annotated[float | None, Option(min=0.1, max=4096, help="kubernetes: CPUs of a pod; by default 8 a GPU.")] = (
        None
    )
    memory: Annotated[str | None, Option(help="kubernetes: memory of a pod, as in 64Gi; by default 32Gi a GPU.")] = None
    shm: Annotated[str, Option(help="kubernetes: size of /dev/shm, in the pod's memory.")] = "8Gi"
    gpu_resource: Annotated[str, Option(help="kubernetes: name of the GPU resource.")] = "nvidia.com/gpu"
    node_selector: Annotated[
        list[str], Option(metavar="LABEL=VALUE", help="kubernetes: label that a node must have; may be repeated.")
    ] = field(default_factory=list)
    toleration: Annotated[
        list[str],
        Option(metavar="KEY[=VALUE][:EFFECT]", help="kubernetes: taint that the job tolerates; may be repeated."),
    ] = field(default_factory=list)
    service_account: Annotated[str | None, Option(help="kubernetes: service account of the pods.")] = None
    pull_secret: Annotated[list[str], Option(help="kubernetes: Secret to pull the image with; may be repeated.")] = (
        field(default_factory=list)
    )
    user_id: Annotated[int, Option(min=1, max=2_147_483_647, help="kubernetes: user and group id in the pod.")] = 1000
    retries: Annotated[
        int, Option(min=0, max=100, help="kubernetes: how often a pod that failed or was evicted starts again.")
    ] = 3
    keep: Annotated[
        int, Option(min=0, max=31_536_000, metavar="SECONDS", help="kubernetes: delete the ended job after this time.")
    ] = 604_800
    queue: Annotated[str | None, Option(help="kubernetes: queue of Kueue that admits the job.")] = None

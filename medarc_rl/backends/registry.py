"""The back-ends by name. Each is imported only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from medarc_rl.backends.backend import Backend, Tracker
from medarc_rl.backends.kubernetes.kubernetes_options import KubernetesOptions
from medarc_rl.backends.ray.ray_options import RayOptions
from medarc_rl.backends.sagemaker.sagemaker_options import SageMakerOptions
from medarc_rl.errors import UsageError

OPTIONS: Mapping[str, type] = {
    "kubernetes": KubernetesOptions,
    "ray": RayOptions,
    "sagemaker": SageMakerOptions,
}
"""What `medarc_submit --to` takes, and the options of each. A common base class has those of several back-ends."""

_CLASSES = {
    "slurm": "medarc_rl.backends.slurm_jobs:SlurmJobs",
    "ray": "medarc_rl.backends.ray.ray_jobs:RayJobs",
    "kubernetes": "medarc_rl.backends.kubernetes.cluster:Kubernetes",
    "sagemaker": "medarc_rl.backends.sagemaker.training_jobs:SageMaker",
}
"""Module and class of each back-end. The class is made without arguments."""


def backend(name: str) -> Backend[Any]:
    """A back-end that `--to` names."""
    found: Backend[Any] = _made(name)
    return found


def tracker(name: str) -> Tracker:
    """The back-end of a recorded job. Raises UsageError for one that this version does not have."""
    found: Tracker = _made(name)
    return found


def _made(name: str) -> Any:
    if name not in _CLASSES:
        raise UsageError(f"back-end {name!r}: this version knows {', '.join(_CLASSES)}")
    module, _, cls = _CLASSES[name].partition(":")
    return getattr(importlib.import_module(module), cls)()

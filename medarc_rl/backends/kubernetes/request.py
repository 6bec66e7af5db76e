"""Makes a job of Kubernetes from a request. Checks everything that is known here and reports all faults at once."""

from __future__ import annotations

import re
import secrets
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from medarc_rl.backends.kubernetes.manifest import CONFIG_DIR, DOWNLOAD_LIMIT_S, OUTPUT_DIR, START_LIMIT_S, ClusterJob
from medarc_rl.backends.options import VARIABLE, KubernetesOptions, pairs, plain_variables
from medarc_rl.backends.protocol import RAY_DRIVER, Request
from medarc_rl.cli import warn
from medarc_rl.deployment import check_rl
from medarc_rl.errors import UsageError
from medarc_rl.jobs import redacted
from medarc_rl.utils import OwnedKeys, Run
from prime_rl.configs.surface.not_built import unbuilt_faults
from prime_rl.storage.staging import has_s3_names
from prime_rl.utils.pydantic_config.base import to_toml

MAX_CONFIG_BYTES = 1_000_000
"""A ConfigMap holds 1 MiB, with its metadata."""
MAX_FILE_NAME_BYTES = 255
"""The limit of Linux file systems."""
_CPUS_PER_GPU, _GIB_PER_GPU = 8, 32
"""Resource request of a pod for each GPU, if the options give none. A pod without GPUs gets it once."""
MAX_JOB_NAME = 47
"""Characters. JobSet and KubeRay add to a job's name, and a pod's hostname has at most 63."""
MAX_LABEL = 63
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
"""RFC 1123, without its length."""
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_KEY_NAME = re.compile(r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(rf"({_KEY_NAME.pattern})?", re.ASCII)
_LABEL_KEY = re.compile(rf"({_SUBDOMAIN.pattern}/)?{_KEY_NAME.pattern}", re.ASCII)
_SECRET_KEY = re.compile(r"[\w.-]{1,253}", re.ASCII)
_QUANTITY = re.compile(r"(?=[\d.]*[1-9])\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?", re.ASCII)
"""A positive number: zero would mean no limit."""
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::\d+)?/)?{_COMPONENT}(?:/{_COMPONENT})*"
    r"(?P<tag>:[A-Za-z0-9_][\w.-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?",
    re.ASCII,
)


_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def cluster_job(request: Request) -> tuple[ClusterJob, str]:
    """The job, and where its run is kept.

    Raises:
        UsageError: one line for each fault.
    """
    options: KubernetesOptions = request.options
    stem = Path(request.config.split()[0]).stem if request.config else request.kind
    name = job_name(request.name, stem, request.kind)
    faults = [*_name_faults(name, options), *_engine_faults(request, options)]
    output, local_output = _output(request, options, name, faults)
    # Of a run that is kept on S3, the pod has a copy.
    owned: OwnedKeys = {} if output == local_output else {"output_dir": local_output, "storage.work_dir": local_output}
    if request.nodes > 1:
        owned = {**owned, "launcher": "ray"}
    try:
        run = request.load("ray" if uses_ray(request, options) or request.nodes > 1 else "local", Path(output), owned)
        if request.split is not None and not uses_ray(request, options):
            check_rl(run.config)  # the command in the pod would refuse it
    except UsageError as error:
        raise UsageError(*faults, *error.faults) from error
    gpus = _gpus(request, run, faults)
    if not run.checkpoints and options.retries and request.kind != "eval":
        warn("the config has no [ckpt]: a pod that starts again begins the run again")
    config = to_toml(run.config)
    faults += _config_faults(run, config)
    job = ClusterJob(
        name=name,
        namespace=options.namespace,
        kind=request.kind,
        config=config,
        argv=_argv(request, options, output, local_output),
        image=options.image or "",
        nodes=request.nodes,
        gpus=gpus,
        gpu_resource=options.gpu_resource,
        cpus=f"{_CPUS_PER_GPU * max(gpus, 1) if options.cpus is None else options.cpus:g}",
        memory=options.memory or f"{_GIB_PER_GPU * max(gpus, 1)}Gi",
        shm=options.shm,
        claim=options.output_claim,
        local_output=local_output,
        env=variables(options.env, faults),
        secret_env=secret_variables(options.secret_env, faults),
        secrets=options.secret,
        node_selector=node_labels(options.node_selector, faults),
        tolerations=tolerations(options.toleration, faults),
        service_account=options.service_account,
        pull_secrets=list(dict.fromkeys(options.pull_secret)),
        user_id=options.user_id,
        retries=options.retries,
        deadline_s=options.deadline,
        keep_s=options.keep,
        start_limit_s=DOWNLOAD_LIMIT_S if has_s3_names(run.config) else START_LIMIT_S,
        queue=options.queue,
    )
    faults += [f"--env {name}: also given with --secret-env" for name in job.env if name in job.secret_env]
    if faults:
        raise UsageError(*faults)
    return job, output


def uses_ray(request: Request, options: KubernetesOptions) -> bool:
    return options.engine == "ray" or (options.engine == "auto" and request.nodes > 1)


def job_name(given: str | None, stem: str, kind: str) -> str:
    """The name that was given, or one made of the config's file name, different for each submission."""
    if given is not None:
        return given
    ending = f"-{kind}-{secrets.token_hex(3)}"
    begin = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[: MAX_JOB_NAME - len(ending)].strip("-")
    return f"{begin or 'run'}{ending}"


def _argv(request: Request, options: KubernetesOptions, output: str, local_output: str) -> Sequence[str]:
    """The command in the pod. The config holds all that the user gave; the options hold what follows from the pod."""
    where = ["--output-dir", output]
    if output != local_output:
        where += ["--storage.work-dir", local_output]
    # A pod that starts again continues. An evaluation does so by itself.
    resume = [] if request.kind == "eval" else ["--resume", request.resume or "auto"]
    file, split = f"{CONFIG_DIR}/{request.kind}.toml", request.split
    if uses_ray(request, options):
        shared = split.option.split() if split is not None and split.shares_gpus else []
        # CPU runs would fit into one pod.
        apart = ["--strategy", "spread"] if request.nodes > 1 else []
        # A fault of the config would come again, and KubeRay does not look at exit codes.
        driver = ["python", "-m", RAY_DRIVER, "--address", "auto", "--stop-if-refused", *apart, *shared]
        return [*driver, request.kind, "@", file, *where, *resume]
    shape = [] if split is None else split.option.split()
    return ["medarc_train", request.kind, "@", file, *shape, *where, *resume]


# Faults, reported all at once.


def _name_faults(name: str, options: KubernetesOptions) -> Iterator[str]:
    yield from label_fault("--name", name, MAX_JOB_NAME)
    yield from label_fault("--namespace", options.namespace)
    yield from image_fault(options.image)
    for secret in options.secret:
        yield from subdomain_fault("--secret", secret)
    for secret in options.pull_secret:
        yield from subdomain_fault("--pull-secret", secret)
    for option, value in (
        ("--output-claim", options.output_claim),
        ("--service-account", options.service_account),
    ):
        if value is not None:
            yield from subdomain_fault(option, value)
    if options.queue is not None:
        # The value of a label, which is shorter than a name.
        yield from subdomain_fault("--queue", options.queue, MAX_LABEL)
    if not re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9_.-]+", options.gpu_resource):
        yield f"--gpu-resource {options.gpu_resource!r}: write VENDOR/NAME, as in nvidia.com/gpu or amd.com/gpu"
    yield from quantity_fault("--memory", options.memory)
    yield from quantity_fault("--shm", options.shm)


def _engine_faults(request: Request, options: KubernetesOptions) -> Iterator[str]:
    if request.nodes > 1 and options.engine == "jobset":
        yield "--engine jobset: several nodes need --engine ray"
    if request.nodes > 1 and options.output_claim is None:
        yield (
            f"{request.nodes} nodes: all pods need the run's directory: add --output-claim CLAIM, of a volume that "
            "several nodes may mount (ReadWriteMany)"
        )
    if options.retries and (request.resume or "").isdigit():
        yield f"--resume {request.resume}: each retry would go back to step {request.resume}; add --retries 0"
    output = request.output_dir or ""
    if output and uses_ray(request, options) and shlex.quote(output) != output:
        # Some versions of KubeRay take quotes off.
        yield f"--output-dir {output!r}: a RayJob gives it to shells: write only letters, digits and @%+=:,./_-"
    if uses_ray(request, options) and request.kind == "eval":
        yield "--engine ray: an evaluation runs on one node, with --engine jobset"


def _output(request: Request, options: KubernetesOptions, name: str, faults: list[str]) -> tuple[str, str]:
    """The run's permanent location, and its directory in the pod. With a claim they are the same."""
    given = request.output_dir
    if given is not None and given.startswith("s3:/"):
        return given, f"{OUTPUT_DIR}/{name}"
    if options.output_claim is None:
        faults.append("a pod's own disk is lost with it: add --output-claim CLAIM, or --output-dir s3://BUCKET/PREFIX")
    path = PurePosixPath(OUTPUT_DIR, given or name)
    is_inside = ".." not in path.parts and path.is_relative_to(OUTPUT_DIR) and path != PurePosixPath(OUTPUT_DIR)
    if given is not None and (not is_inside or "://" in given):
        faults.append(
            f"--output-dir {given!r}: name a directory in the claim, which is {OUTPUT_DIR} in the pod, or "
            "s3://BUCKET/PREFIX"
        )
        path = PurePosixPath(OUTPUT_DIR, "run")
    if any(len(part.encode()) > MAX_FILE_NAME_BYTES for part in path.parts):
        faults.append(f"--output-dir {given!r}: each name in it has at most {MAX_FILE_NAME_BYTES} bytes")
    return str(path), str(path)


def _gpus(request: Request, run: Run[Any], faults: list[str]) -> int:
    """GPUs of each pod."""
    device = getattr(run.config, "device", "auto")
    if device == "cpu":
        return 0
    if request.gpus == 0 and device == "cuda":
        faults.append("--gpus 0: the config has device = 'cuda'; set it to 'cpu', or ask for GPUs")
    return request.gpus_of_node(run.config)


def _config_faults(run: Run[Any], config: str) -> Iterator[str]:
    yield from unbuilt_faults(run.config)
    if run.checkpoints and getattr(run.config, "clean_output_dir", False):
        yield (
            "clean_output_dir: each pod would delete what the pod before it wrote; leave it out, and give a new "
            "--output-dir"
        )
    size = len(config.encode())
    if size > MAX_CONFIG_BYTES:
        yield f"the config has {size:,} bytes, and a ConfigMap holds {MAX_CONFIG_BYTES:,}: move tables into files"
    for key in _secret_keys(tomllib.loads(config)):
        yield (
            f"{key}: the resolved config holds a secret, and everyone who can see the ConfigMap can read it: name a "
            "variable, "
            "and pass it with --secret-env"
        )


def _secret_keys(value: Any, key: str = "") -> Iterator[str]:
    """Dotted keys of the texts that hold a secret. As values: TOML escapes some characters, or writes several lines."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        inner = f"{key}[{name}]" if isinstance(value, list) else f"{key}.{name}" if key else str(name)
        if redacted(str(name)) != str(name) or (isinstance(item, str) and redacted(item) != item):
            yield redacted(inner)
        yield from _secret_keys(item, inner)


# The rules of Kubernetes for names and values.


def label_fault(option: str, value: str, longest: int = MAX_LABEL) -> Iterator[str]:
    """One line if a name is not a label of RFC 1123."""
    if not _LABEL.fullmatch(value) or len(value) > longest:
        nearest = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:longest].strip("-")
        advice = f": write {nearest!r}" if nearest else ""
        yield f"{option} {value!r}: 1 to {longest} lower-case letters, digits and inner hyphens{advice}"


def subdomain_fault(option: str, value: str, longest: int = 253) -> Iterator[str]:
    """One line if a name is not a DNS subdomain, as names of Secrets, claims and service accounts must be."""
    if not _SUBDOMAIN.fullmatch(value) or len(value) > longest:
        yield f"{option} {value!r}: 1 to {longest} lower-case letters, digits, inner hyphens and dots"


def image_fault(image: str | None) -> Iterator[str]:
    if image is None:
        yield "--image is missing: name an image with this package, as in --image registry.example/medarc-rl:1.0"
        return
    found = _IMAGE.fullmatch(image)
    if found is None:
        yield f"--image {image!r} is not an image: write [REGISTRY/]NAME:TAG or [REGISTRY/]NAME@sha256:DIGEST"
    elif found["tag"] is None and found["digest"] is None:
        yield f"--image {image!r}: add a tag or a digest, as in {image}:1.0"


def quantity_fault(option: str, value: str | None) -> Iterator[str]:
    if value is not None and not _QUANTITY.fullmatch(value):
        yield f"{option} {value!r}: write a number of bytes with a unit, as in 64Gi"


def variables(options: Sequence[str], faults: list[str]) -> dict[str, str]:
    """`--env NAME=VALUE`, parsed."""
    return plain_variables(options, faults, "put it into a Secret and write --secret-env {name}=SECRET/KEY")


def secret_variables(options: Sequence[str], faults: list[str]) -> dict[str, tuple[str, str]]:
    """`--secret-env NAME=SECRET/KEY`, parsed: Secret and key by the variable's name."""

    def reference(text: str) -> tuple[str, str] | None:
        secret, _, key = text.partition("/")
        return (secret, key) if _SUBDOMAIN.fullmatch(secret) and _SECRET_KEY.fullmatch(key) else None

    advice = "write NAME=SECRET/KEY: the name of a Secret and a key in it, not the secret itself"
    return pairs("--secret-env", options, faults, advice, reference, VARIABLE)


def node_labels(options: Sequence[str], faults: list[str]) -> dict[str, str]:
    """`--node-selector LABEL=VALUE`, parsed."""
    advice = "write LABEL=VALUE, as in nvidia.com/gpu.product=NVIDIA-H100"
    return pairs(
        "--node-selector",
        options,
        faults,
        advice,
        lambda text: text if _LABEL_VALUE.fullmatch(text) else None,
        _LABEL_KEY,
    )


def tolerations(options: Sequence[str], faults: list[str]) -> list[dict[str, str]]:
    """`--toleration KEY[=VALUE][:EFFECT]`, as a pod has them."""
    found = []
    for word in options:
        taint, colon, effect = word.partition(":")
        key, equals, value = taint.partition("=")
        fits = _LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value) and (not colon or effect in _EFFECTS)
        if not fits:
            faults.append(
                f"--toleration {word!r}: write KEY, KEY=VALUE or KEY=VALUE:EFFECT; EFFECT is {', '.join(_EFFECTS)}"
            )
            continue
        rule = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
        found.append({**rule, "effect": effect} if colon else rule)
    return found

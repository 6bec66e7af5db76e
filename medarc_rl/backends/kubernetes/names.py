"""Checks what a user names against the rules of Kubernetes, before anything is sent."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence

from medarc_rl.backends.pairs import VARIABLE, pairs, plain_variables

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
"""More than nothing, which would mean no limit."""
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::\d+)?/)?{_COMPONENT}(?:/{_COMPONENT})*"
    r"(?P<tag>:[A-Za-z0-9_][\w.-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def job_name(given: str | None, stem: str, kind: str) -> str:
    """The name that was given, or one made of the config's file name, different for each submission."""
    if given is not None:
        return given
    ending = f"-{kind}-{secrets.token_hex(3)}"
    begin = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[: MAX_JOB_NAME - len(ending)].strip("-")
    return f"{begin or 'run'}{ending}"


def label_fault(option: str, value: str, longest: int = MAX_LABEL) -> Iterator[str]:
    """One line if a name is no label of RFC 1123."""
    if not _LABEL.fullmatch(value) or len(value) > longest:
        nearest = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:longest].strip("-")
        advice = f": write {nearest!r}" if nearest else ""
        yield f"{option} {value!r}: 1 to {longest} lower-case letters, digits and inner hyphens{advice}"


def subdomain_fault(option: str, value: str, longest: int = 253) -> Iterator[str]:
    """One line if a name is no DNS subdomain, as names of Secrets, claims and service accounts are."""
    if not _SUBDOMAIN.fullmatch(value) or len(value) > longest:
        yield f"{option} {value!r}: 1 to {longest} lower-case letters, digits, inner hyphens and dots"


def image_fault(image: str | None) -> Iterator[str]:
    if image is None:
        yield "--image is missing: name an image with this package, as in --image registry.example/medarc-rl:1.0"
        return
    found = _IMAGE.fullmatch(image)
    if found is None:
        yield f"--image {image!r} is no image: write [REGISTRY/]NAME:TAG or [REGISTRY/]NAME@sha256:DIGEST"
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

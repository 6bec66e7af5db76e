"""Secrets of a job by reference: a request names where each is kept, and the job reads it there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from medarc_rl.backends.pairs import VARIABLE, pairs
from medarc_rl.backends.sagemaker.aws_calls import Aws, calling
from medarc_rl.errors import MedarcError, UsageError

_SECRETS_MANAGER = re.compile(r"arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:[A-Za-z0-9/_+=.@-]+(#[\w.-]+)?")
_PARAMETER = re.compile(r"arn:aws[a-z-]*:ssm:[a-z0-9-]+:\d{12}:parameter/[A-Za-z0-9/_.-]+")
_EXAMPLE = (
    "NAME=arn:aws:secretsmanager:REGION:ACCOUNT:secret:ID, with #KEY for one key of a JSON secret, or "
    "NAME=arn:aws:ssm:REGION:ACCOUNT:parameter/PATH"
)


def references(words: Sequence[str]) -> dict[str, str]:
    """Variables and the ARNs of their values, from `--secret-env NAME=ARN`.

    Raises:
        UsageError: one line for each that is no reference. The lines hold no values: they may be the secret itself.
    """
    faults: list[str] = []
    found = pairs("--secret-env", words, faults, f"write {_EXAMPLE}", _reference, VARIABLE)
    if faults:
        raise UsageError(*faults)
    return found


def _reference(text: str) -> str | None:
    return text if _SECRETS_MANAGER.fullmatch(text) or _PARAMETER.fullmatch(text) else None


def resource_of(reference: str) -> str:
    """The ARN that a policy names: without the key of a JSON secret."""
    return reference.partition("#")[0]


def is_parameter(reference: str) -> bool:
    return _PARAMETER.fullmatch(reference) is not None


def resolved(names: Mapping[str, str]) -> dict[str, str]:
    """The values of references, as variables of an environment. Runs inside the job.

    Raises:
        MedarcError: one cannot be read, or has another form. The line holds the reference, never a value.
    """
    return {name: _value(name, reference) for name, reference in names.items()}


def _value(name: str, reference: str) -> str:
    aws = Aws(region=reference.split(":")[3])
    arn, _, key = reference.partition("#")
    if is_parameter(reference):
        with calling(f"secret {name}: ssm:GetParameter"):
            path = arn.partition(":parameter")[2]
            answer = aws.client("ssm").get_parameter(Name=path, WithDecryption=True)
            return str(answer["Parameter"]["Value"])
    with calling(f"secret {name}: secretsmanager:GetSecretValue"):
        text = aws.client("secretsmanager").get_secret_value(SecretId=arn).get("SecretString")
    if text is None:
        raise MedarcError(f"secret {name}: {arn} is binary; store text")
    return str(text) if not key else _of_key(name, arn, key, text)


def _of_key(name: str, arn: str, key: str, text: str) -> str:
    try:
        value = json.loads(text)[key]
    except (ValueError, KeyError, TypeError):
        # Without the cause, which quotes the secret.
        raise MedarcError(f"secret {name}: {arn} is no JSON object with the key {key!r}") from None
    return str(value)

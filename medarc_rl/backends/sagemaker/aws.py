"""Clients of AWS: every call has time limits and a bounded number of attempts, and every failure is one line."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from medarc_rl.errors import MedarcError, UsageError
from prime_rl.storage.s3 import named_region

EXTRA = "sagemaker"
_ADVICE: Mapping[str, str] = {
    "AccessDenied": "`medarc_submit sagemaker-policy` prints what is needed",
    "AccessDeniedException": "`medarc_submit sagemaker-policy` prints what is needed",
    "ExpiredToken": "log in again, as with `aws sso login`",
    "ExpiredTokenException": "log in again, as with `aws sso login`",
    "InvalidClientTokenId": "check AWS_PROFILE and the AWS_ACCESS_KEY_ID in use",
    "UnrecognizedClientException": "check AWS_PROFILE and the AWS_ACCESS_KEY_ID in use",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
    "ResourceLimitExceeded": "ask for a higher quota of this instance type in Service Quotas, or take another one",
    "NoSuchBucket": "make the bucket, or name another one with --s3",
}


class AwsError(MedarcError):
    """A call failed. `code` is AWS's own, or empty if there was no answer."""

    def __init__(self, line: str, code: str = "") -> None:
        super().__init__(line)
        self.code = code


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of one call."""

    connect_s: float = 10.0
    read_s: float = 60.0
    attempts: int = 4
    """With a growing pause between them. Errors that another attempt cannot mend are not repeated."""


class Aws:
    """Makes clients, of one region and one profile."""

    def __init__(self, region: str | None, profile: str | None = None, patience: Patience | None = None) -> None:
        """Reads the user's AWS configuration. Contacts nobody.

        Raises:
            UsageError: boto3 is not installed, the profile is not there, or no region is known.
        """
        require_boto3()
        import boto3
        from botocore.exceptions import BotoCoreError

        try:
            self._session = boto3.session.Session(profile_name=profile, region_name=region or named_region(os.environ))
        except BotoCoreError as error:
            raise UsageError(_line(str(error))) from error
        found = self._session.region_name
        if not found:
            raise UsageError("no AWS region: give --region, as in --region eu-central-1, or export AWS_REGION")
        self.region: str = found
        self._patience = patience or Patience()

    def client(self, service: str) -> Any:
        """Raises UsageError for a region or an endpoint that cannot be one."""
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        limits = self._patience
        config = Config(
            connect_timeout=limits.connect_s,
            read_timeout=limits.read_s,
            retries={"mode": "standard", "total_max_attempts": limits.attempts},
        )
        try:
            return self._session.client(service, config=config)
        except (BotoCoreError, ValueError) as error:
            raise UsageError(f"{service} in {self.region}: {_line(str(error))}") from error


def require_boto3() -> None:
    """Raises UsageError if the extra is not installed."""
    missing = [name for name in ("boto3", "pathspec") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{missing[0]} is not installed: uv sync --extra {EXTRA}")


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn a failed call into one line that begins with `what`. Raises AwsError."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise _refused(what, error.response.get("Error", {})) from error
    except Boto3Error as error:
        # A failed upload holds the refusal, in words that name a temporary file.
        if isinstance(error.__context__, ClientError):
            raise _refused(what, error.__context__.response.get("Error", {})) from error
        raise AwsError(f"{what}: {_line(str(error))}") from error
    except BotoCoreError as error:
        raise AwsError(f"{what}: {_line(str(error))}{_no_answer_advice(error)}") from error


def _refused(what: str, answer: Mapping[str, Any]) -> AwsError:
    code, message = str(answer.get("Code", "")), _line(str(answer.get("Message", "")))
    advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
    return AwsError(f"{what}: {code or 'refused'}{f': {message}' if message else ''}{advice}", code)


def _no_answer_advice(error: Exception) -> str:
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return "; log in, as with `aws sso login`, or set AWS_PROFILE"
    if name in ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError", "ReadTimeoutError"):
        return "; check the network and --region"
    return ""


def _line(text: str) -> str:
    """One line without control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())

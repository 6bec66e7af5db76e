"""A client of S3 with timeouts and bounded retries, and one exception for all that can go wrong."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self

from prime_rl.configs.storage import S3Name, path_fault
from prime_rl.utils.errors import StorageError

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
ATTEMPTS = 5
"""Attempts at one request; the pauses between them grow up to 20 s."""
BODY_ATTEMPTS = 6
"""Attempts at one part of a download, whose body may end early."""
PART_BYTES = 32 << 20
"""Size of the parts in which files are downloaded, several at once, and uploaded."""
_MOST_PARTS = 9_000
_CHUNK_BYTES = 1 << 20
_THREADS_PER_UPLOAD = 4
_CONNECTIONS = 32
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0

STOPPED = "Stopped"
"""Code of the error of a transfer that was stopped."""

MISSING = frozenset({"NoSuchKey", "404"})
"""Codes of the errors that there is no such object."""

_NOT_IMPLEMENTED = "NotImplemented"
_RIGHTS = {
    "ListObjectsV2": "s3:ListBucket",
    "HeadObject": "s3:GetObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
}
"""Names of rights that differ from those of the operations."""
_DENIED = frozenset({"AccessDenied", "403", "AllAccessDisabled", "AccountProblem", "UnauthorizedOperation"})
_BAD_CREDENTIALS = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken"}
    | {"RequestTimeTooSkewed", "SignatureDoesNotMatch", "UnrecognizedClientException"}
)
_NO_CREDENTIALS = (
    "no AWS credentials are found: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where a "
    "role provides them"
)


@dataclass(frozen=True, slots=True)
class S3Object:
    """An object as a listing shows it."""

    name: S3Name
    size_bytes: int
    etag: str
    """Without quotes. The MD5 of the contents, or `<hash>-<number of parts>`."""
    modified_s: float = 0.0
    """When it was written, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Contents:
    """A small object."""

    data: bytes
    etag: str
    age_s: float
    """Seconds since it was written, by S3's clock."""


def named_region(env: Mapping[str, str]) -> str | None:
    """`AWS_REGION`, which AWS's other programs read before `AWS_DEFAULT_REGION`, and boto3 does not read."""
    return env.get("AWS_REGION") or None


def aws_client(service: str, region: str | None = None) -> Any:
    """A boto3 client with timeouts and bounded retries. Endpoint, region and credentials come from the environment.

    Raises:
        StorageError: boto3 is not installed, or the environment is not usable.
    """
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError as error:
        raise StorageError(
            f"{service.upper()} needs the package {error.name}: install it with `uv sync --inexact --extra s3`",
            "NotInstalled",
        ) from error
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=_CONNECTIONS,
        tcp_keepalive=True,
    )
    try:
        with told(service):
            region = region or named_region(os.environ)
            return boto3.session.Session().client(service, region_name=region, config=config)
    except ValueError as error:  # an endpoint that is not a URL
        raise StorageError(f"{service}: {error}") from error


class S3:
    """Operations on S3 that runs need. The methods raise StorageError, and may be called in several threads."""

    def __init__(self, client: Any, part_bytes: int = PART_BYTES) -> None:
        self.client = client
        self.part_bytes = part_bytes

    @classmethod
    def connect(cls) -> Self:
        return cls(aws_client("s3"))

    def objects(self, name: S3Name) -> Iterator[S3Object]:
        """Everything below a prefix, in the order of keys, without markers of empty folders."""
        with told(name):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=name.bucket, Prefix=name.prefix)
            for page in pages:
                yield from (
                    _listed(name.bucket, each) for each in page.get("Contents", ()) if not each["Key"].endswith("/")
                )

    def find(self, name: S3Name) -> list[S3Object]:
        """Everything below a prefix, or the one object of this name.

        Raises:
            StorageError: there is neither, or a key cannot be a path.
        """
        found = list(self.objects(name))
        for each in found:
            if fault := path_fault(each.name.key[len(name.prefix) :]):
                raise StorageError(f"{name} holds the key {each.name.key!a}, which cannot be a file: {fault}")
        if found or not name.key:
            return found or _nothing_at(name)
        # Keys are listed in order: the object of this name comes before those that begin with it.
        with told(name):
            page = self.client.list_objects_v2(Bucket=name.bucket, Prefix=name.key, MaxKeys=1)
        first = [_listed(name.bucket, each) for each in page.get("Contents", ())]
        return first if first and first[0].name == name else _nothing_at(name)

    def read_into(self, item: S3Object, start: int, stop: int, descriptor: int) -> None:
        """Write the bytes from `start` up to `stop` of an object to the same place in an open file.

        A body that ends early is continued where it ended.

        Raises:
            StorageError: it failed several times, or the object has changed since it was listed.
        """
        position, failures = start, 0
        while position < stop:
            try:
                for chunk in self._body(item, position, stop):
                    position += os.pwrite(descriptor, chunk, position)
            except StorageError as error:
                failures += 1
                if error.code or failures == BODY_ATTEMPTS:
                    raise
                if position == stop:  # everything came, with another checksum
                    position = start
                time.sleep(pause_s(failures))

    def _body(self, item: S3Object, start: int, stop: int) -> Iterator[bytes]:
        # Without a range, S3 also sends the checksum of the whole, which botocore compares.
        is_whole = (start, stop) == (0, item.size_bytes)
        part = {} if is_whole else {"Range": f"bytes={start}-{stop - 1}"}
        left = stop - start
        with told(item.name):
            answer = self.client.get_object(
                Bucket=item.name.bucket, Key=item.name.key, IfMatch=f'"{item.etag}"', **part
            )
            if answer["ContentLength"] != left:
                length = answer["ContentLength"]
                raise StorageError(f"{item.name}: S3 sent {length} bytes instead of {left}", "WrongLength")
            for chunk in answer["Body"].iter_chunks(_CHUNK_BYTES):
                left -= len(chunk)
                yield chunk
        if left:
            raise StorageError(f"{item.name}: its body ended {left} bytes early")

    def read(self, name: S3Name) -> bytes:
        """The contents of a small object."""
        with told(name):
            body: bytes = self.client.get_object(Bucket=name.bucket, Key=name.key)["Body"].read()
            return body

    def part(self, item: S3Object, number: int = 1) -> dict[str, Any]:
        """Report of S3 about one part of an object that was uploaded in parts, without its contents."""
        with told(item.name):
            answer: dict[str, Any] = self.client.head_object(
                Bucket=item.name.bucket, Key=item.name.key, PartNumber=number
            )
            return answer

    def upload(self, file: Path, name: S3Name, stop: threading.Event | None = None) -> None:
        """Upload a file; a large one in parts. It appears whole or not at all. What is appended meanwhile is left out.

        Raises:
            StorageError: also if `stop` was set meanwhile.
            OSError: the file cannot be read.
        """
        from boto3.s3.transfer import TransferConfig

        def look(count: int) -> None:
            if stop is not None and stop.is_set():
                raise StorageError(f"{name}: its upload was stopped", STOPPED)

        part_bytes = max(self.part_bytes, file.stat().st_size // _MOST_PARTS + 1)
        config = TransferConfig(
            multipart_threshold=part_bytes,
            multipart_chunksize=part_bytes,
            max_concurrency=_THREADS_PER_UPLOAD,
            preferred_transfer_client="classic",
        )
        with told(name):
            self.client.upload_file(str(file), name.bucket, name.key, Config=config, Callback=look)

    def write(self, data: bytes, name: S3Name) -> None:
        """Write a small object."""
        with told(name):
            self.client.put_object(Bucket=name.bucket, Key=name.key, Body=data)

    def read_if_there(self, name: S3Name) -> Contents | None:
        """A small object; None if there is none."""
        try:
            with told(name):
                answer = self.client.get_object(Bucket=name.bucket, Key=name.key)
                data = answer["Body"].read()
        except StorageError as error:
            if error.code in MISSING:
                return None
            raise
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return Contents(data, answer["ETag"].strip('"'), (now - answer["LastModified"]).total_seconds())

    def write_over(self, data: bytes, name: S3Name, etag: str | None) -> str:
        """Write a small object in place of the one with this ETag, or of none. Returns its ETag.

        Raises:
            StorageError: `PreconditionFailed` if something else is there. Servers that know no conditions write it.
        """
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": f'"{etag}"'}
        try:
            with told(name):
                answer = self.client.put_object(Bucket=name.bucket, Key=name.key, Body=data, **condition)
        except StorageError as error:
            if error.code != _NOT_IMPLEMENTED:
                raise
            with told(name):
                answer = self.client.put_object(Bucket=name.bucket, Key=name.key, Body=data)
        return str(answer["ETag"]).strip('"')

    def abort_uploads(self, name: S3Name, but: Collection[S3Name] = ()) -> int:
        """Remove the parts of uploads below a prefix that never ended. Returns how many uploads that were.

        Args:
            but: prefixes below it that are left alone.
        """
        others = tuple(each.prefix for each in but)
        count = 0
        with told(name):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=name.bucket, Prefix=name.prefix)
            for page in pages:
                for each in page.get("Uploads", ()):
                    if each["Key"].startswith(others):
                        continue
                    self.client.abort_multipart_upload(Bucket=name.bucket, Key=each["Key"], UploadId=each["UploadId"])
                    count += 1
        return count

    def delete(self, name: S3Name) -> None:
        """Delete an object, if it is there."""
        with told(name):
            self.client.delete_object(Bucket=name.bucket, Key=name.key)


def pause_s(failures: int) -> float:
    """Seconds to wait after so many failures: doubled each time, and not the same for all clients."""
    longest: float = _FIRST_PAUSE_S * 2 ** min(failures, 20)
    return min(longest, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)


@contextlib.contextmanager
def told(what: object) -> Iterator[None]:
    """Turn errors of boto3 and botocore in the block into a StorageError about `what`."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError, HTTPClientError) as error:
        # A failed `upload_file` wraps the error that says why.
        cause = error.__context__ if isinstance(error, Boto3Error) and error.__context__ else error
        reason, code = _reason(cause)
        raise StorageError(f"{what}: {reason}", code) from error


def _reason(error: BaseException) -> tuple[str, str]:
    """Why a request failed, in words, and S3's own word for it."""
    from botocore import exceptions as known

    if isinstance(error, known.ClientError):
        return _refusal(error)
    if isinstance(error, known.NoCredentialsError | known.PartialCredentialsError | known.CredentialRetrievalError):
        return _NO_CREDENTIALS, "NoCredentials"
    if isinstance(error, known.SSOError | known.UnauthorizedSSOTokenError | known.TokenRetrievalError):
        return f"the login has expired: run `aws sso login` ({error})", "NoCredentials"
    if isinstance(error, known.ProfileNotFound | known.NoRegionError | known.ConfigParseError):
        return str(error), "BadSettings"
    return str(error) or type(error).__name__, ""


def _refusal(error: Any) -> tuple[str, str]:
    answer, operation = error.response, error.operation_name
    code = str(answer.get("Error", {}).get("Code", ""))
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code == "NoSuchBucket":
        return "there is no such bucket", code
    if code in _DENIED:
        return f"access is denied: the credentials lack the right {_RIGHTS.get(operation, f's3:{operation}')}", code
    if code in _BAD_CREDENTIALS:
        return f"S3 does not accept the credentials ({code}): renew them", code
    if code in MISSING:
        return "there is no such object", code
    if code in ("PreconditionFailed", "412"):
        return "it has changed since it was listed: start again", code
    attempts = answer.get("ResponseMetadata", {}).get("RetryAttempts", 0) + 1
    message = answer.get("Error", {}).get("Message", "")
    # A server's own fault may pass: no word for it.
    word = "" if isinstance(status, int) and status >= 500 and code != _NOT_IMPLEMENTED else code
    return f"{operation} failed with {code} (HTTP {status}) after {attempts} attempts: {message}", word


def _listed(bucket: str, entry: dict[str, Any]) -> S3Object:
    return S3Object(
        S3Name(bucket, entry["Key"]), entry["Size"], entry["ETag"].strip('"'), entry["LastModified"].timestamp()
    )


def _nothing_at(name: S3Name) -> list[S3Object]:
    raise StorageError(f"{name}: there is no object and no prefix with this name", "Nothing")

"""Compares downloaded files with ETags: MD5 of the contents, or MD5 of the parts' MD5s."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from prime_rl.storage.s3 import S3, S3Object
from prime_rl.utils.errors import StorageError

_MD5 = re.compile(r"[0-9a-f]{32}(?:-(\d+))?")
_CHUNK_BYTES = 1 << 20


def etag_fault(s3: S3, item: S3Object, file: Path) -> str | None:
    """Why a file is not the object that was listed, in one line; None if it is, or if its ETag is no MD5."""
    match = _MD5.fullmatch(item.etag)
    if match is None:
        return None
    if match.group(1) is None:
        sizes: Sequence[int] = [item.size_bytes]
        if _md5_of_parts(file, sizes) == item.etag or _is_encrypted(s3, item):
            return None
    else:
        count = int(match.group(1))
        try:
            sizes = _equal_parts(s3, item, count)
            if f"{_md5_of_parts(file, sizes)}-{count}" == item.etag or _is_encrypted(s3, item):
                return None
            sizes = [s3.part(item, number)["ContentLength"] for number in range(1, count + 1)]
        except StorageError:
            return None  # a server that tells nothing of parts
        if sum(sizes) != item.size_bytes or f"{_md5_of_parts(file, sizes)}-{count}" == item.etag:
            return None
    return f"{item.name}: the {item.size_bytes} bytes that arrived do not have its ETag {item.etag}"


def _is_encrypted(s3: S3, item: S3Object) -> bool:
    """Whether the ETag is one of encrypted contents, and so no MD5 of these."""
    answer = s3.part(item)
    return str(answer.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in answer


def _equal_parts(s3: S3, item: S3Object, count: int) -> list[int]:
    """Sizes of the parts, if all but the last are as large as the first."""
    first = s3.part(item)["ContentLength"]
    whole = [first] * (count - 1)
    return [*whole, item.size_bytes - sum(whole)]


def _md5_of_parts(file: Path, sizes: Sequence[int]) -> str:
    """MD5 of the contents for one size, else MD5 of the parts' MD5s."""
    digests = [_md5(file, start, size) for start, size in zip(_starts(sizes), sizes, strict=True)]
    if len(digests) == 1:
        return digests[0].hex()
    return hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    return itertools.islice(itertools.accumulate(sizes, initial=0), len(sizes))


def _md5(file: Path, start: int, size: int) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as opened:
        opened.seek(start)
        while size > 0 and (chunk := opened.read(min(size, _CHUNK_BYTES))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.digest()

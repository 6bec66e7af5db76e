"""Where a job's files are in S3: one prefix for each job, below the one that the user names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from medarc_rl.backends.pairs import pairs
from medarc_rl.errors import UsageError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_KEY = re.compile(r"[A-Za-z0-9!_.*'()/=+@,-]*")
_MOST_KEY_CHARS = 700
"""S3 allows 1024 bytes; SageMaker appends names of its own."""


@dataclass(frozen=True, slots=True)
class S3Prefix:
    bucket: str
    key: str
    """Without slashes at its ends; may be empty."""

    @classmethod
    def of(cls, uri: str, option: str = "--s3") -> S3Prefix:
        """Raises UsageError for anything but `s3://BUCKET` or `s3://BUCKET/PREFIX`."""
        scheme, _, rest = uri.partition("://")
        bucket, _, key = rest.partition("/")
        if scheme != "s3" or not bucket:
            raise UsageError(f"{option} {uri!r}: write s3://BUCKET/PREFIX")
        if not _BUCKET.fullmatch(bucket) or ".." in bucket:
            raise UsageError(
                f"{option}: {bucket!r} is no bucket's name: 3 to 63 lower-case letters, digits, dots and hyphens"
            )
        if not _KEY.fullmatch(key) or len(key) > _MOST_KEY_CHARS:
            raise UsageError(
                f"{option}: the prefix {key[:80]!r} is longer than {_MOST_KEY_CHARS} characters, or has others than "
                "letters, digits and !_.*'()/=+@,-"
            )
        return cls(bucket, key.strip("/"))

    def below(self, *names: str) -> S3Prefix:
        return S3Prefix(self.bucket, "/".join(part for part in (self.key, *names) if part))

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class JobPlaces:
    """The prefixes of one job."""

    root: S3Prefix
    earlier_run: S3Prefix | None = None
    """The directory of an earlier job's run, which this job continues."""

    @property
    def source(self) -> S3Prefix:
        """A channel: SageMaker copies all of it into the job."""
        return self.root.below("source")

    @property
    def archive(self) -> S3Prefix:
        return self.source.below("source.tar.gz")

    @property
    def run(self) -> S3Prefix:
        """The run's directory, which SageMaker copies here while the job runs, and back when it restarts."""
        return self.earlier_run or self.root.below("run")

    @property
    def output(self) -> S3Prefix:
        return self.root.below("output")


def input_channels(words: Sequence[str], faults: list[str]) -> dict[str, str]:
    """`--input NAME=s3://BUCKET/PREFIX`, parsed: the place of each channel, as typed."""
    return pairs("--input", words, faults, "write NAME=s3://BUCKET/PREFIX", str)

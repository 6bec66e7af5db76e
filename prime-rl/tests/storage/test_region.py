"""The region of S3, which the environment names as for any AWS program."""

from __future__ import annotations

import os

import pytest

from prime_rl.storage.s3 import aws_client


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"AWS_REGION": "eu-central-1"}, "eu-central-1"),
        ({"AWS_REGION": "eu-central-1", "AWS_DEFAULT_REGION": "us-west-2"}, "eu-central-1"),
        ({"AWS_REGION": "", "AWS_DEFAULT_REGION": "us-west-2"}, "us-west-2"),
    ],
)
def test_the_region_of_s3_is_the_one_that_aws_s_own_programs_take(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert aws_client("s3").meta.region_name == expected

"""Checks a request against the rules that botocore's own model of the API states, before anything is sent.

botocore itself checks types and required members only; names, lengths, ranges and lists of values come back from the
service as an error, after the upload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from botocore.model import Shape

_SHOWN_CHARS = 80

OPTIONS: Mapping[str, str] = {
    "TrainingJobName": "--name",
    "RoleArn": "--role",
    "AlgorithmSpecification.TrainingImage": "--image",
    "ResourceConfig.InstanceType": "--instance-type",
    "ResourceConfig.InstanceCount": "--nodes",
    "ResourceConfig.VolumeSizeInGB": "--volume-gb",
    "ResourceConfig.VolumeKmsKeyId": "--kms-key",
    "OutputDataConfig.KmsKeyId": "--kms-key",
    "OutputDataConfig.S3OutputPath": "--s3",
    "CheckpointConfig.S3Uri": "--s3",
    "InputDataConfig[].ChannelName": "--input",
    "InputDataConfig[].DataSource.S3DataSource.S3Uri": "--input",
    "InputDataConfig": "--input",
    "InputDataConfig[].DataSource.FileSystemDataSource.FileSystemId": "--file-system",
    "InputDataConfig[].DataSource.FileSystemDataSource.DirectoryPath": "--file-system",
    "VpcConfig.SecurityGroupIds": "--security-group",
    "VpcConfig.SecurityGroupIds[]": "--security-group",
    "VpcConfig.Subnets": "--subnet",
    "VpcConfig.Subnets[]": "--subnet",
    "StoppingCondition.MaxRuntimeInSeconds": "--deadline",
    "StoppingCondition.MaxWaitTimeInSeconds": "--max-wait",
    "Tags": "--tag",
    "Tags[].Key": "--tag",
    "Tags[].Value": "--tag",
    "Environment": "--env",
    "Environment.key": "--env",
    "Environment.value": "--env",
    "HyperParameters.value": "--secret-env",
}
"""The option that sets a member of the request. `[]` is any item of a list."""

EXAMPLES: Mapping[str, str] = {
    "RoleArn": "arn:aws:iam::123456789012:role/medarc-training",
    "ResourceConfig.InstanceType": "ml.g5.2xlarge",
    "OutputDataConfig.S3OutputPath": "s3://BUCKET/PREFIX",
    "CheckpointConfig.S3Uri": "s3://BUCKET/PREFIX",
    "InputDataConfig[].DataSource.S3DataSource.S3Uri": "--input data=s3://BUCKET/PREFIX",
    "InputDataConfig[].ChannelName": "--input data=s3://BUCKET/PREFIX",
    "VpcConfig.Subnets[]": "subnet-0123456789abcdef0",
    "VpcConfig.SecurityGroupIds[]": "sg-0123456789abcdef0",
    "Environment.key": "--env OMP_NUM_THREADS=8",
    "Tags[].Key": "--tag team=radiology",
}


def request_faults(request: Mapping[str, Any]) -> list[str]:
    """One line for each value of a CreateTrainingJob request that the API does not take."""
    import botocore.session

    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    assert shape is not None
    return list(dict.fromkeys(_faults(shape, request, "")))


def _faults(shape: Shape, value: Any, path: str) -> Iterator[str]:
    where = f"{path}." if path else ""
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from _faults(shape.members[name], member, f"{where}{name}")
    elif shape.type_name == "list":
        yield from _size_faults(shape, value, path, "items")
        for item in value:
            yield from _faults(shape.member, item, f"{path}[]")
    elif shape.type_name == "map":
        yield from _size_faults(shape, value, path, "entries")
        for key, item in value.items():
            yield from _faults(shape.key, key, f"{where}key")
            yield from _faults(shape.value, item, f"{where}value")
    elif shape.type_name == "string":
        yield from _text_faults(shape, value, path)
    elif shape.type_name in ("integer", "long"):
        yield from _number_faults(shape, value, path)


def _size_faults(shape: Shape, value: Sequence[Any], path: str, unit: str) -> Iterator[str]:
    most = shape.metadata.get("max")
    if most is not None and len(value) > most:
        yield f"{named(path)}: {len(value)} {unit}; SageMaker takes at most {most}"


def _text_faults(shape: Shape, value: str, path: str) -> Iterator[str]:
    rules = shape.metadata
    allowed, most = rules.get("enum"), rules.get("max")
    if allowed and value not in allowed:
        near = get_close_matches(value, allowed, 3)
        yield f"{named(path)} {_shown(value)}: SageMaker has no such value; nearest: {', '.join(near or allowed[:3])}"
    elif most is not None and len(value) > most:
        yield f"{named(path)} {_shown(value)}: {len(value)} characters; SageMaker takes at most {most}"
    elif len(value) < rules.get("min", 0) or not _fits(rules.get("pattern"), value):
        yield f"{named(path)} {_shown(value)}: SageMaker does not take this{_example(path)}"


def _number_faults(shape: Shape, value: int, path: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if (least is not None and value < least) or (most is not None and value > most):
        nearest = least if least is not None and value < least else most
        yield f"{named(path)} {value}: SageMaker takes {least} to {most or 'any'}; nearest: {nearest}"


def _fits(pattern: str | None, value: str) -> bool:
    if pattern is None:
        return True
    # Java's character classes, which Python's `re` does not know.
    translated = pattern.replace(r"\p{L}\p{Z}\p{N}_", r"\w\s").replace(r"\p{Alnum}", "a-zA-Z0-9")
    return re.fullmatch(translated, value) is not None


def _example(path: str) -> str:
    return f"; write it as in {EXAMPLES[path]}" if path in EXAMPLES else ""


def _shown(value: str) -> str:
    return repr(value if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]}...")


def named(path: str) -> str:
    """The option that sets a member, or else the member."""
    return OPTIONS.get(path, path)

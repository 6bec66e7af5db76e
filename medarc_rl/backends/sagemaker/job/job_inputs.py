"""What SageMaker tells a container: hyperparameters, hosts, channels; all below /opt/ml."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medarc_rl.backends.sagemaker.request.file_systems import SHARED_CHANNEL
from medarc_rl.backends.sagemaker.request.job_names import name_fault
from medarc_rl.backends.sagemaker.request.training_request import SOURCE_CHANNEL
from medarc_rl.backends.sagemaker.source.bundle import CONFIG, SOURCE, sha256_of, unpack
from medarc_rl.errors import UsageError

COMMANDS = ("sft", "rl", "eval")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class MlPaths:
    """The layout of a training container."""

    root: Path

    @property
    def hyperparameters(self) -> Path:
        return self.root / "input" / "config" / "hyperparameters.json"

    @property
    def resources(self) -> Path:
        return self.root / "input" / "config" / "resourceconfig.json"

    def channel(self, name: str) -> Path:
        return self.root / "input" / "data" / name

    @property
    def archive(self) -> Path:
        return self.channel(SOURCE_CHANNEL) / "source.tar.gz"

    @property
    def code(self) -> Path:
        """Where the archive is unpacked."""
        return self.root / "code"

    @property
    def source(self) -> Path:
        return self.code / SOURCE

    @property
    def config(self) -> Path:
        return self.code / CONFIG

    @property
    def run(self) -> Path:
        """The run's directory on one instance."""
        return self.root / "checkpoints"

    def shared(self, run: str) -> Path:
        """What the instances of a run share."""
        return self.channel(SHARED_CHANNEL) / run

    @property
    def failure(self) -> Path:
        """SageMaker shows the first 1024 characters of this file as the reason of a failure."""
        return self.root / "output" / "failure"


@dataclass(frozen=True, slots=True)
class JobInputs:
    """What to run, and on which hosts."""

    command: str
    source_sha256: str
    single_gpu: bool
    secrets: Mapping[str, str]
    current_host: str
    hosts: tuple[str, ...]
    interface: str | None = None
    """Network interface between the hosts."""
    shared_run: str | None = None
    """Name of the run's directory in the shared one. None: the hosts share none."""
    upload_to: str | None = None
    """With a shared directory: where on S3 the run is kept."""

    @classmethod
    def read(cls, paths: MlPaths) -> JobInputs:
        """Raises UsageError: the job was not made by this package, or by another version of it."""
        given, resources = _table(paths.hyperparameters), _table(paths.resources)
        command, digest = given.get("command"), given.get("source_sha256")
        if command not in COMMANDS or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise UsageError(f"{paths.hyperparameters}: not a job of medarc_submit: no command, or no source_sha256")
        secrets = _parsed(paths.hyperparameters, given.get("secrets", "{}"))
        hosts = resources.get("hosts")
        if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
            raise UsageError(f"{paths.resources}: names no hosts")
        run, interface = given.get("run"), resources.get("network_interface_name")
        if run is not None and (not isinstance(run, str) or name_fault(run)):
            raise UsageError(f"{paths.hyperparameters}: not a job of medarc_submit: run is {run!r}")
        return cls(
            command=command,
            source_sha256=digest,
            single_gpu=given.get("single_gpu") == "1",
            secrets={str(name): str(reference) for name, reference in secrets.items()},
            current_host=str(resources.get("current_host", hosts[0])),
            # Every host gets the same list, in the same order.
            hosts=tuple(sorted(hosts)),
            interface=interface if isinstance(interface, str) else None,
            shared_run=run,
            upload_to=str(given["upload_to"]) if "upload_to" in given else None,
        )


def _table(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    return _parsed(path, text)


def _parsed(path: Path, text: Any) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: no JSON object")
    return found


def unpack_source(inputs: JobInputs, paths: MlPaths) -> None:
    """Check and extract the project's files.

    Raises:
        MedarcError: they are missing, damaged, or not those that the job was submitted with.
    """
    if not paths.archive.is_file():
        raise UsageError(f"{paths.archive}: missing: the job has no channel {SOURCE_CHANNEL!r}")
    if (found := sha256_of(paths.archive)) != inputs.source_sha256:
        raise UsageError(
            f"{paths.archive}: not the files that were submitted: SHA-256 is {found[:12]}…, not "
            f"{inputs.source_sha256[:12]}…; submit again"
        )
    unpack(paths.archive, paths.code)
    if not paths.config.is_file():
        raise UsageError(f"{paths.archive}: holds no {CONFIG}")

"""`--local`: runs a job in a container on this machine, laid out as SageMaker lays out its own, without AWS."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from medarc_rl.backends.sagemaker.job.job_inputs import MlPaths
from medarc_rl.backends.sagemaker.request.training_request import JOB_MODULE, SOURCE_CHANNEL, TrainingJob
from medarc_rl.backends.sagemaker.source.bundle import Bundle
from medarc_rl.errors import MedarcError, UsageError
from prime_rl.utils.gpus import masked_gpus, usable_gpus

_AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
)
HOST = "algo-1"
"""What SageMaker calls the first instance."""


@dataclass(frozen=True, slots=True)
class LocalContainer:
    job: TrainingJob
    root: Path
    """Becomes /opt/ml."""
    env: Mapping[str, str]
    """This process's environment, of which the job gets secrets and credentials."""
    dev: Path = Path("/dev")

    def argv(self) -> list[str]:
        """`docker run`. Variables with secrets are given by name; docker takes their values from its environment."""
        if any(char in str(self.root) for char in ":,"):
            raise UsageError(f"{self.root}: docker cannot mount a directory with ':' or ',' in its name")
        plain = [word for name, value in self.job.env.items() for word in ("--env", f"{name}={value}")]
        named = [word for name in self._named() for word in ("--env", name)]
        entry = ["--entrypoint", "python", self.job.image, "-m", JOB_MODULE]
        # Files are the user's, not root's. A user without a name in the image still has one.
        user = ["--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp", "--env", "USER=medarc"]
        # Data loaders and gloo share memory between processes; docker's default of 64 MiB is too little.
        return [
            *("docker", "run", "--rm", "--init", "--name", self.job.name, "--shm-size", "8g"),
            *("--stop-timeout", "120", "--volume", f"{self.root}:/opt/ml"),
            *user,
            *self._gpus(),
            *plain,
            *named,
            *entry,
        ]

    def _gpus(self) -> list[str]:
        """Only the GPUs of this user's mask. Docker reads the value as CSV, so several need quotes."""
        usable = usable_gpus(self.env, self.dev)
        if not usable:
            return []
        return ["--gpus", "all" if masked_gpus(self.env) is None else f'"device={",".join(usable)}"']

    def _named(self) -> list[str]:
        return [name for name in (*self.job.secrets, *_AWS_VARIABLES) if self.env.get(name)]

    def lay_out(self, bundle: Bundle) -> None:
        """Write what SageMaker would mount. A secret that is set here is not looked up in the job."""
        paths = MlPaths(self.root)
        values = self.job.hyperparameters()
        kept = {name: arn for name, arn in self.job.secrets.items() if not self.env.get(name)}
        values.pop("secrets", None)
        if kept:
            values["secrets"] = json.dumps(kept)
        resources = {"current_host": HOST, "hosts": [HOST], "network_interface_name": "eth0"}
        for path, content in ((paths.hyperparameters, values), (paths.resources, resources)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        for place in (paths.channel(SOURCE_CHANNEL), paths.run, paths.failure.parent, self.root / "model"):
            place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.path, paths.archive)
        paths.failure.unlink(missing_ok=True)

    def run(self, say: Callable[[str], None]) -> int:
        """Run the container to its end. Returns its exit code. Ctrl-C and SIGTERM go to the container.

        Raises:
            MedarcError: docker cannot be started.
        """
        argv = self.argv()
        say(f"$ {' '.join(argv)}")
        # docker passes signals on; this process waits for the end.
        previous = {number: signal.signal(number, _ignored) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=dict(self.env))
            signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
            code = process.wait()
        except OSError as error:
            raise MedarcError(f"docker: {error.strerror}") from error
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        failure = MlPaths(self.root).failure
        if code != 0 and failure.is_file():
            for line in failure.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]:
                say(line)
        return code if code >= 0 else 128 - code


def _ignored(number: int, frame: FrameType | None) -> None:
    """Docker is in the same process group and gets Ctrl-C itself."""


def require_docker(what: str, path: str | None = None) -> None:
    """Raises UsageError if there is no docker."""
    if shutil.which("docker", path=path or os.environ.get("PATH")) is None:
        raise UsageError(f"{what}: docker is not installed here; run without a container: medarc_train")

"""Docker on this machine: builds and pushes the image of a job (`--build`), or runs the job here (`--local`)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import medarc_rl
from medarc_rl.backends.sagemaker.request import EXTRA, JOB_MODULE, SOURCE_CHANNEL, Aws, AwsError, TrainingJob, calling
from medarc_rl.backends.sagemaker.source_files import Bundle, MlPaths, Staged, pack, stage
from medarc_rl.errors import MedarcError, UsageError
from prime_rl.utils.gpus import masked_gpus, usable_gpus

DOCKERFILE = Path(__file__).parent / "image" / "Dockerfile"
PLATFORM = "linux/amd64"
"""The platform of SageMaker's GPU instances, also if the image is built on another one."""
_CONTEXT_BYTES = 500_000_000
"""Largest checkout that is sent to docker: ours is far smaller, so that more means data in the wrong place."""
_TAG_CHARS = 16
"""Characters of a tag: 64 bits of a hash, which no two checkouts share by accident."""
_LOGIN_LIMIT_S = 120.0
"""Docker's login may ask a credential helper that never answers."""


@dataclass(frozen=True, slots=True)
class ImageBuild:
    """An image that is made from this package's own checkout. Its tag is a hash of everything that goes in."""

    repository: str
    context: Staged
    tag: str
    extras: Sequence[str] = ()
    """Extras of this package, besides the one that every job needs."""

    @classmethod
    def of(cls, repository: str, extras: Sequence[str] = ()) -> ImageBuild:
        """Raises UsageError: no docker, an unknown extra, or this package is not installed from a checkout."""
        if shutil.which("docker") is None:
            raise UsageError("--build: docker is not installed here; build elsewhere and give --image URI")
        checkout = Path(medarc_rl.__file__).resolve().parents[1]
        if not (checkout / "pyproject.toml").is_file() or not (checkout / "prime-rl" / "pyproject.toml").is_file():
            raise UsageError(
                f"--build: needs a checkout of medarc-rl, and {checkout} is not one; give --image URI instead"
            )
        _check_extras(checkout, extras)
        context = stage(checkout, (), _CONTEXT_BYTES)
        return cls(repository, context, _tag(context, extras), tuple(extras))

    def plan(self, registry: str) -> list[list[str]]:
        """The commands that build and push. Tokens go through stdin."""
        image = self.uri(registry)
        names = " ".join(f"--extra {extra}" for extra in (EXTRA, *self.extras))
        arguments = ["--platform", PLATFORM, "--build-arg", f"EXTRAS={names}", "--file", "Dockerfile", "--tag", image]
        build = ["docker", "build", *arguments, "-"]
        login = ["docker", "login", "--username", "AWS", "--password-stdin", registry]
        return [build, login, ["docker", "push", image]]

    def uri(self, registry: str) -> str:
        return f"{registry}/{self.repository}:{self.tag}"


def _check_extras(checkout: Path, extras: Sequence[str]) -> None:
    known = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    unknown = {extra: get_close_matches(extra, known, 1, 0) for extra in extras if extra not in known}
    if unknown:
        lines = [
            f"--build-extra {extra}: medarc-rl has no such extra; nearest: {near[0]}" for extra, near in unknown.items()
        ]
        raise UsageError(*lines)


def _tag(context: Staged, extras: Sequence[str]) -> str:
    digest = hashlib.sha256(DOCKERFILE.read_bytes() + " ".join(extras).encode())
    for name, file in sorted(context.files.items()):
        digest.update(f"\0{name}\0{file.is_executable}\0".encode())
        digest.update(hashlib.sha256(file.path.read_bytes()).digest())
    return digest.hexdigest()[:_TAG_CHARS]


def build_and_push(build: ImageBuild, aws: Aws, say: Callable[[str], None]) -> str:
    """Build and push an image, unless the repository has it. Returns its URI.

    Raises:
        MedarcError: docker or ECR failed. The line names the command.
    """
    ecr = aws.client("ecr")
    _ensure_repository(ecr, build.repository)
    with calling("ecr:GetAuthorizationToken"):
        granted = ecr.get_authorization_token()["authorizationData"][0]
    registry = str(granted["proxyEndpoint"]).partition("://")[2]
    image = build.uri(registry)
    if _has_tag(ecr, build):
        say(f"image: {image} is in the repository")
        return image
    commands = build.plan(registry)
    with TemporaryDirectory(prefix="medarc-image-") as scratch:
        texts = {"Dockerfile": DOCKERFILE.read_text(encoding="utf-8")}
        bundle = pack(Path(scratch) / "context.tar.gz", build.context.files, texts)
        with bundle.path.open("rb") as stdin:
            _docker(commands[0], say, stdin=stdin)
    password = base64.b64decode(granted["authorizationToken"]).partition(b":")[2]
    _docker(commands[1], say, content=password)
    _docker(commands[2], say)
    return image


def _ensure_repository(ecr: Any, name: str) -> None:
    try:
        with calling(f"ecr:CreateRepository {name}"):
            ecr.create_repository(
                repositoryName=name,
                imageTagMutability="IMMUTABLE",
                imageScanningConfiguration={"scanOnPush": True},
            )
    except AwsError as error:
        if error.code != "RepositoryAlreadyExistsException":
            raise


def _has_tag(ecr: Any, build: ImageBuild) -> bool:
    try:
        with calling(f"ecr:BatchGetImage {build.repository}"):
            answer = ecr.batch_get_image(repositoryName=build.repository, imageIds=[{"imageTag": build.tag}])
    except AwsError as error:
        if error.code != "ImageNotFoundException":
            raise
        return False
    return bool(answer.get("images"))


def _docker(argv: Sequence[str], say: Callable[[str], None], stdin: Any = None, content: bytes | None = None) -> None:
    """Run docker. Its output goes to the terminal, except at the login. Raises MedarcError."""
    say(f"$ {' '.join(argv)}")
    try:
        if content is None:
            code = subprocess.run(argv, stdin=stdin or subprocess.DEVNULL, check=False).returncode
        else:
            code = subprocess.run(
                argv, input=content, stdout=subprocess.DEVNULL, timeout=_LOGIN_LIMIT_S, check=False
            ).returncode
    except OSError as error:
        raise MedarcError(f"docker: {error.strerror}; nothing was submitted") from error
    except subprocess.TimeoutExpired as error:
        raise MedarcError(f"docker {argv[1]} did not end within {_LOGIN_LIMIT_S:g} s; nothing was submitted") from error
    if code != 0:
        raise MedarcError(f"docker {argv[1]} ended with exit code {code}; nothing was submitted")


_AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
)
HOST = "algo-1"
"""SageMaker's name of the first instance."""


@dataclass(frozen=True, slots=True)
class LocalContainer:
    job: TrainingJob
    root: Path
    """Becomes /opt/ml."""
    env: Mapping[str, str]
    """This process's environment. The job gets secrets and credentials from it."""
    dev: Path = Path("/dev")

    def argv(self) -> list[str]:
        """`docker run`. Variables with secrets are given by name; docker takes their values from its environment."""
        if any(char in str(self.root) for char in ":,"):
            raise UsageError(f"{self.root}: docker cannot mount a directory with ':' or ',' in its name")
        plain = [word for name, value in self.job.env.items() for word in ("--env", f"{name}={value}")]
        secret = [name for name in (*self.job.secrets, *_AWS_VARIABLES) if self.env.get(name)]
        named = [word for name in secret for word in ("--env", name)]
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
        for directory in (paths.channel(SOURCE_CHANNEL), paths.run, paths.failure.parent, self.root / "model"):
            directory.mkdir(parents=True, exist_ok=True)
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

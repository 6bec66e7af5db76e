"""Builds the image of a job with docker and pushes it to ECR. Without docker, one line says what to do instead."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import medarc_rl
from medarc_rl.backends.sagemaker.aws_calls import EXTRA, Aws, AwsError, calling
from medarc_rl.backends.sagemaker.source.bundle import Bundle, pack
from medarc_rl.backends.sagemaker.source.staging import Staged, stage
from medarc_rl.errors import MedarcError, UsageError

DOCKERFILE = Path(__file__).parent / "image" / "Dockerfile"
PLATFORM = "linux/amd64"
_CONTEXT_BYTES = 500_000_000
_TAG_CHARS = 16
_LOGIN_LIMIT_S = 120.0


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
            raise UsageError(f"--build: needs a checkout of medarc-rl, and {checkout} is none; give --image URI")
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
        bundle = _context_archive(build, Path(scratch))
        with bundle.path.open("rb") as stdin:
            _docker(commands[0], say, stdin=stdin)
    password = base64.b64decode(granted["authorizationToken"]).partition(b":")[2]
    _docker(commands[1], say, content=password)
    _docker(commands[2], say)
    return image


def _context_archive(build: ImageBuild, scratch: Path) -> Bundle:
    return pack(scratch / "context.tar.gz", build.context.files, {"Dockerfile": DOCKERFILE.read_text(encoding="utf-8")})


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
    """Run docker; its own output goes to the terminal, except at the login. Raises MedarcError."""
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

"""Runs the scripts of verifiers' harnesses in this interpreter, if it has what they need.

verifiers lets uv make an environment for each script, which needs a network, and so fails on many a cluster's nodes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import sys
from typing import Any

_DEPENDENCIES = re.compile(r"^# dependencies = (\[.*\])$", re.MULTILINE)
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:==([A-Za-z0-9.]+))?")


def run_scripts_here() -> None:
    """Let the subprocess runtime run scripts in this interpreter. It goes on asking uv for all others."""
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    of_uv = SubprocessRuntime.prepare_uv_script
    paths: dict[str, str] = {}

    async def prepare_uv_script(
        self: Any, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        text = script if isinstance(script, str) else script.decode()
        if not has_all(text):
            found: list[str] = await of_uv(self, script, env, activate=activate)
            return found
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if digest not in paths:
            paths[digest] = in_memory(f"{digest}.py", text)
        return [sys.executable, paths[digest]]

    SubprocessRuntime.prepare_uv_script = prepare_uv_script


def in_memory(name: str, script: str) -> str:
    """A path that this process's children can read the script from. The script is gone when this process ends, even by
    SIGKILL, with which it usually does."""
    with os.fdopen(os.memfd_create(name), "w", encoding="utf-8", closefd=False) as file:
        file.write(script)
        return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def has_all(script: str) -> bool:
    """Whether this interpreter has the packages that a script names in its head."""
    head = _DEPENDENCIES.search(script)
    try:
        return all(map(_has, json.loads(head.group(1)) if head else []))
    except ValueError:
        return False


def _has(requirement: str) -> bool:
    named = _REQUIREMENT.fullmatch(requirement.replace(" ", ""))
    if named is None:
        return False
    try:
        version = importlib.metadata.version(named.group(1))
    except importlib.metadata.PackageNotFoundError:
        return False
    return named.group(2) in (None, version)

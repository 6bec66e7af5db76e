"""Weight versions in vLLM: encodes the versions of all models in vLLM's weight label, and salts the prefix cache."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prime_rl.utils.scratch import scratch_directory

_VARIABLE = "PRIME_RL_UPDATE_COUNT"
_SIZE_BYTES = 8


def label_of(base: int, adapters: Mapping[str, int]) -> str:
    """Encode versions as vLLM's weight label: the base version, or a JSON object if there are adapters."""
    return json.dumps({"": base, **adapters}) if adapters else str(base)


def version_of(label: str, model: str) -> int:
    """Decode the version of `model` from a label. Any name that is not an adapter's means the base model."""
    versions = json.loads(label)
    return versions if isinstance(versions, int) else versions.get(model, versions[""])


class UpdateCount:
    """The number of weight updates so far, shared by all API server processes through a memory-mapped file.

    It is part of the hash of every cached prefix. vLLM does not clear its prefix cache while requests are running, so
    without it a request could reuse keys and values computed with old weights.
    """

    def __init__(self) -> None:
        with Path(os.environ[_VARIABLE]).open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), _SIZE_BYTES)

    @staticmethod
    @contextmanager
    def shared() -> Iterator[None]:
        """Create a count for this process and its children, which exists while the block runs."""
        with scratch_directory("vllm") as directory:
            file = directory / "updates"
            file.write_bytes(bytes(_SIZE_BYTES))
            os.environ[_VARIABLE] = str(file)
            yield

    @property
    def value(self) -> int:
        return int.from_bytes(self._bytes[:_SIZE_BYTES], "little")

    def advance(self) -> None:
        self._bytes[:_SIZE_BYTES] = (self.value + 1).to_bytes(_SIZE_BYTES, "little")

    def salt(self, prompt: dict[str, Any]) -> None:
        """Restrict a rendered prompt to prefixes cached under the current weights, through vLLM's `cache_salt`."""
        prompt["cache_salt"] = f"{self.value}:{prompt.get('cache_salt', '')}"

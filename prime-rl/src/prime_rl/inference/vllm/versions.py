"""What vLLM's one label of its weights says about the version of each model, and which cached prefixes may be used."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

_VARIABLE = "PRIME_RL_UPDATE_COUNT"
_SIZE_BYTES = 8


def label_of(base: int, adapters: Mapping[str, int]) -> str:
    """The label of weights with these versions: a number, or with adapters a JSON object. Every process can read it."""
    return json.dumps({"": base, **adapters}) if adapters else str(base)


def version_of(label: str, model: str) -> int:
    """The version of `model`, an adapter's name or any other for the base model, in weights with this label."""
    versions = json.loads(label)
    return versions if isinstance(versions, int) else versions.get(model, versions[""])


class UpdateCount:
    """How often the weights have changed, known to all API server processes.

    It goes into the hash of every cached prefix. vLLM does not empty its prefix cache while requests run, so without
    it a request could be answered on keys and values of weights from before.
    """

    def __init__(self) -> None:
        with Path(os.environ[_VARIABLE]).open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), _SIZE_BYTES)

    @staticmethod
    @contextmanager
    def shared() -> Iterator[None]:
        """Let this process and those that it starts share a count, for as long as the block runs."""
        with NamedTemporaryFile(prefix="prime-rl-", suffix=".count") as file:
            file.write(bytes(_SIZE_BYTES))
            file.flush()
            os.environ[_VARIABLE] = file.name
            yield

    @property
    def value(self) -> int:
        return int.from_bytes(self._bytes[:_SIZE_BYTES], "little")

    def advance(self) -> None:
        self._bytes[:_SIZE_BYTES] = (self.value + 1).to_bytes(_SIZE_BYTES, "little")

    def mark(self, prompt: dict[str, Any]) -> None:
        """Let a rendered prompt find only what the present weights have cached."""
        prompt["cache_salt"] = f"{self.value}:{prompt.get('cache_salt', '')}"

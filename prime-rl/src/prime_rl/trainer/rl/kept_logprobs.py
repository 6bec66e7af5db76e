"""Writes the trainer's log-probabilities of kept rollouts, for readers who compare them with the engine's."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from torch import Tensor

from prime_rl.run.paths import OrchestratorPaths
from prime_rl.trainer.process.mesh import DataAxis
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger

_DECIMALS = 5
_LEVEL = 5


class KeptLogprobs:
    """Collects values that the loss computes anyway, and writes a file per step and data rank in a thread.

    They are those of the policy that each token was trained on. With several minibatches, later ones have already been
    updated by earlier ones.
    """

    def __init__(self, paths: OrchestratorPaths, data_axis: DataAxis) -> None:
        self.paths = paths
        self.data_rank = data_axis.data_rank
        self.is_writer = data_axis.is_writer
        self._places: list[tuple[list[int], int]] = []
        """Place and minibatch of each kept sequence."""
        self._values: list[Tensor] = []
        """Mask, log-probability and entropy of each kept sequence: [3, T]."""
        self._thread = ThreadPoolExecutor(1, "kept-logprobs")
        self._writing: Future[None] | None = None

    def add(
        self, kept_as: Sequence[list[int] | None], minibatch: int, lengths: Sequence[int], values_3T: Tensor
    ) -> None:
        """Note the kept sequences of a packed row of T tokens: mask, log-probabilities and entropies."""
        if not self.is_writer:
            return
        for place, values in zip(kept_as, values_3T.split(list(lengths), dim=1), strict=True):
            if place is not None:
                self._places.append((place, minibatch))
                self._values.append(values)

    def write(self, step: int) -> None:
        """Write what `add` noted, in the background."""
        if not self._places:
            return
        lengths = [values.shape[1] for values in self._values]
        values = torch.cat(self._values, dim=1).cpu().split(lengths, dim=1)  # one copy from the GPU
        self.wait()
        self._writing = self._thread.submit(self._write, step, self._places, values)
        self._places, self._values = [], []

    def wait(self) -> None:
        """Wait until the last file is written. A disk that fails is a warning."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        except OSError as error:
            get_logger().warning(f"The trainer's log-probabilities of kept rollouts were not written: {error}")
        self._writing = None

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()

    def _write(self, step: int, places: Sequence[tuple[list[int], int]], values: Sequence[Tensor]) -> None:
        records = (_record(*place, each) for place, each in zip(places, values, strict=True))
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        with replacing_file(self.paths.trainer_samples(step, self.data_rank)) as scratch:
            scratch.write_bytes(gzip.compress(lines, _LEVEL, mtime=0))


def _record(kept_as: list[int], minibatch: int, values_3T: Tensor) -> dict[str, Any]:
    mask, logprobs, entropy = values_3T.double()
    scored = mask.bool()
    # Starts and ends of the runs of scored tokens.
    edges = torch.diff(mask, prepend=mask.new_zeros(1), append=mask.new_zeros(1)).nonzero().flatten()
    return {
        "kept_as": kept_as,
        "minibatch": minibatch,
        "scored": edges.reshape(-1, 2).tolist(),
        "logprobs": logprobs[scored].round(decimals=_DECIMALS).tolist(),
        "entropy": entropy[scored].round(decimals=_DECIMALS).tolist(),
    }

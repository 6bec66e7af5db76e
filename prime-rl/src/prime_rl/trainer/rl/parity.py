"""Do trainer and inference engine mean the same policy? Asked once, of the first batch after a start or a resume."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prime_rl.configs.trainer import ParityConfig
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.process.parallel_dims import Mesh
from prime_rl.trainer.rl.rows import Row
from prime_rl.trainer.rl.step import ForwardBackward
from prime_rl.utils.logger import get_logger

LIKELY_CAUSES = (
    "sampling settings that the engine applies and orchestrator.sampling does not tell (temperature, penalties); "
    "weights of another version, or a tied head that an update left stale; "
    "another model, tokenizer or chat template behind the server; "
    "a coarser dtype or quantisation there"
)

BOUND, BFLOAT16_BOUND = 0.05, 0.1
"""Nats a token. In bfloat16 two implementations that round anywhere differently end up 0.05 apart, in either direction:
each is 0.04 from float32, and 0.02 of that is the rounding of the logits alone."""


class ParityMismatch(TrainerError):
    """Trainer and inference engine give the same tokens different log-probabilities."""


class ParityGate:
    """Compares the two log-probabilities of tokens that the engine sampled from the version that the trainer holds.

    Rounding apart they are equal; where they are not, importance ratios are wrong from the first step on and the run
    would learn little or nothing.
    """

    def __init__(self, config: ParityConfig, mesh: Mesh, compute_dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.process = mesh.process
        self.data_axis = mesh.data_axis
        default = BFLOAT16_BOUND if compute_dtype == torch.bfloat16 else BOUND
        self.bound = default if config.max_mean_abs_diff is None else config.max_mean_abs_diff
        self._is_due = config.on_mismatch != "off"

    def check(self, rows: Sequence[Row], forward_backward: ForwardBackward, version: int) -> None:
        """Look at one row of each data rank, on the first call only. Collective.

        Raises:
            ParityMismatch: the mean absolute difference is above the bound, on every rank alike.
        """
        if not self._is_due:
            return
        self._is_due = False
        row = max(rows, key=lambda row: int(row.is_fresh(version).sum()))
        (scored,) = forward_backward.with_proximal([row])
        difference = (scored.proximal_logprobs - row.inference_logprobs)[row.is_fresh(version)].abs()
        own = [difference.double().sum().item(), difference.numel()]
        total, tokens = self.data_axis.sum(own, self.process.device)
        if tokens == 0:
            self._log(f"Parity: no token of this batch was sampled from version {version}, so nothing can be compared")
            return
        mean = total / tokens
        finding = f"log-probabilities of trainer and inference differ by {mean:.2g} on average over {tokens:.0f} tokens"
        if mean <= self.bound:  # false for NaN
            self._log(f"Parity: {finding} of version {version}")
            return
        fault = (
            f"version {version}: {finding}, more than parity.max_mean_abs_diff = {self.bound:g}. "
            f"Likely causes: {LIKELY_CAUSES}"
        )
        if self.config.on_mismatch == "stop":
            raise ParityMismatch(f'{fault}. To go on all the same, set trainer.parity.on_mismatch = "warn"')
        if self.process.is_main:
            get_logger().warning(fault)

    def _log(self, line: str) -> None:
        if self.process.is_main:
            get_logger().info(line)

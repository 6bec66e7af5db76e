"""Parity check: compares log-probabilities of trainer and inference engine on the first batch after each start."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prime_rl.configs.trainer import ParityConfig
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.rows import Row
from prime_rl.trainer.rl.step import ForwardBackward
from prime_rl.utils.logger import get_logger

LIKELY_CAUSES = (
    "sampling settings of the engine that are not in orchestrator.sampling (temperature, penalties); "
    "weights of another version, or a tied head left stale by an update; "
    "another model, tokenizer or chat template on the server; "
    "a coarser dtype or quantization on the server"
)

BOUND, BFLOAT16_BOUND = 0.05, 0.1
"""Default bounds in nats per token. In bfloat16, two implementations that round differently are 0.05 apart: each one
differs from float32 by 0.04, of which 0.02 are due to rounding of the logits alone."""


class ParityGate:
    """Compares log-probabilities of trainer and engine for tokens sampled from the trainer's current version.

    They must be equal up to rounding. Otherwise, importance ratios are wrong from the first step on, and the run would
    learn little or nothing.
    """

    def __init__(self, config: ParityConfig, mesh: Mesh, compute_dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.process = mesh.process
        self.data_axis = mesh.data_axis
        default = BFLOAT16_BOUND if compute_dtype == torch.bfloat16 else BOUND
        self.bound = default if config.max_mean_abs_diff is None else config.max_mean_abs_diff
        self._is_due = config.on_mismatch != "off"

    def check(self, rows: Sequence[Row], forward_backward: ForwardBackward, version: int) -> None:
        """Compare one row per data rank, on the first call only. Collective.

        Raises:
            TrainerError: the mean absolute difference exceeds the bound. Raised on all ranks.
        """
        if not self._is_due:
            return
        self._is_due = False
        row = max(rows, key=lambda row: int(row.on_policy_mask(version).sum()))
        (scored,) = forward_backward.with_proximal([row])
        assert scored.proximal_logprobs is not None
        difference = (scored.proximal_logprobs - row.inference_logprobs)[row.on_policy_mask(version)].abs()
        own = [difference.double().sum().item(), difference.numel()]
        total, tokens = self.data_axis.sum(own, self.process.device)
        if tokens == 0:
            self._log(f"Parity: not checked, because no token of this batch was sampled from version {version}")
            return
        mean = total / tokens
        finding = f"log-probabilities of trainer and inference differ by {mean:.2g} on average over {tokens:.0f} tokens"
        if mean <= self.bound:  # False if the mean is NaN
            self._log(f"Parity: {finding} of version {version}")
            return
        fault = (
            f"version {version}: {finding}, more than parity.max_mean_abs_diff = {self.bound:g}. "
            f"Likely causes: {LIKELY_CAUSES}"
        )
        if self.config.on_mismatch == "stop":
            raise TrainerError(f'{fault}. To continue anyway, set trainer.parity.on_mismatch = "warn"')
        if self.process.is_main:
            get_logger().warning(fault)

    def _log(self, line: str) -> None:
        if self.process.is_main:
            get_logger().info(line)

"""The load of a mixture's experts: its metrics, and the bias that balances it without a loss.

Experts have no capacity here: every token reaches all k experts that its router chose, and none is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.trainer.model.scoring import scoring_of
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.world import Process, sum_over_processes

BIASES = ("e_score_correction_bias", "expert_bias")
"""Names that families give the bias which is added to the scores for the choice alone, not to the weights."""


class Balance:
    """Counts an update's tokens by expert, and moves the biases of the routers towards an equal load."""

    def __init__(self, model: PreTrainedModel, bias_update_rate: float, process: Process) -> None:
        """
        Raises:
            ModelError: there is a rate, and the routers have no bias.
        """
        self._routers = scoring_of(model).routers
        self._rate, self._process = bias_update_rate, process
        self._biases = [] if self._routers is None else [bias_of(model, each) for each in self._routers.found.values()]
        if bias_update_rate > 0 and (not self._biases or any(bias is None for bias in self._biases)):
            name = type(model).__name__.removeprefix("FSDP")
            raise ModelError(
                f"model.router_bias_update_rate: the routers of {name} have no bias ({' or '.join(BIASES)})"
            )

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Move the biases after an optimizer step, and return metrics. Collective; does nothing without experts.

        Wang et al. 2024, DeepSeek-V3: `b_i += rate * sign(mean load - load_i)` in every layer.
        """
        if self._routers is None or not self._routers.load:
            return {}
        counts, entropies = self._routers.load.take()
        # Processes that compute the same tokens count them twice, which changes no ratio.
        own = [*self._routers.load.take_losses(), *counts.flatten().tolist(), *entropies.tolist()]
        loss, rows, *of_experts = sum_over_processes(own, self._process)
        summed = torch.tensor(of_experts)
        loads_LE, entropies_L = summed[: counts.numel()].view_as(counts), summed[counts.numel() :]
        mean_L = loads_LE.mean(1)
        if self._rate > 0:
            for bias, load_E, mean in zip(self._biases, loads_LE, mean_L, strict=True):
                assert bias is not None
                bias.add_(torch.sign(mean - load_E).to(bias), alpha=self._rate)
        ratios_L = loads_LE.amax(1) / mean_L.clamp(min=1e-9)
        tokens = loads_LE.sum() / self._routers.top_k
        entropy = {"experts/router_entropy": (entropies_L.sum() / tokens.clamp(min=1)).item()}
        return {
            "experts/max_load/mean": ratios_L.mean().item(),
            "experts/max_load/max": ratios_L.max().item(),
            "experts/unused": (loads_LE == 0).double().mean().item(),
            **(entropy if len(entropies_L) else {}),
            **({"experts/aux_loss": loss / rows} if rows else {}),
        }


def bias_of(model: nn.Module, router: Any) -> Tensor | None:
    """The bias of a router, which it has itself or gets from the block around it."""
    name = next(name for name, module in model.named_modules() if module is router)
    for owner in (router, model.get_submodule(name.rpartition(".")[0])):
        for bias in BIASES:
            found = getattr(owner, bias, None)
            # A parameter, as in AFMoE, is sharded, and frozen ones are not in checkpoints.
            if isinstance(found, Tensor) and not isinstance(found, nn.Parameter):
                return found
    return None

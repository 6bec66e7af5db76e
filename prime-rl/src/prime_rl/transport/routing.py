"""Routers of mixture-of-experts models: records the experts that they choose, counts their tokens, and makes them
choose given ones.

A router scores E experts for each of N tokens, takes the k best with `topk`, and computes their weights from the
scores. Families differ in the scores and the weights, not in the `topk`. So the choice is read, or replaced, there: the
family's own code computes the weights at the given experts. This is routing replay (Ma et al. 2025, R3): the trainer
routes every token as the engine did that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prime_rl.utils.errors import StartFault


class Routing:
    """What the routers of one forward pass do: choose the `given` experts, or their own. It keeps what they chose."""

    def __init__(self, given_NLk: Tensor | None = None, weights_N: Tensor | None = None) -> None:
        """`given_NLk` are expert ids for each token of the pass and each layer of the model. `weights_N` say how often
        each token counts in the load; None counts none."""
        self.given_NLk = given_NLk
        self.weights_N = weights_N
        self.chosen: dict[int, Tensor] = {}
        """Expert ids [N, k] by layer."""


class Routers:
    """The routers of a model, by the number of their layer. False for a model without experts."""

    def __init__(self, model: nn.Module) -> None:
        """Wraps the `forward` of each router, which stays Transformers' own outside of `on`."""
        self._routing: Routing | None = None
        self.load = RouterLoad()
        self.found: dict[int, Any] = {}
        self.fault: str | None = None
        """Why the choices of the model can neither be read nor replaced."""
        routers = list(_routers(model))
        self.found = dict(routers)
        if not routers:
            self.fault = f"{type(model).__name__} has no router of experts"
        elif len(self.found) < len(routers):
            self.fault = f"{type(model).__name__} has several routers in one layer, which is not supported"
        elif len({_sizes(router) for router in self.found.values()}) > 1:
            self.fault = f"{type(model).__name__} has layers with different numbers of experts, which is not supported"
        if self.fault is not None:
            self.found = {}
        for layer, router in self.found.items():
            router.forward = self._routed(router, layer)

    def __bool__(self) -> bool:
        return bool(self.found)

    @property
    def num_experts(self) -> int:
        return _sizes(next(iter(self.found.values())))[0]

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return _sizes(next(iter(self.found.values())))[1]

    @contextmanager
    def on(self, routing: Routing | None) -> Iterator[None]:
        """Run the routers with this routing in the block."""
        before, self._routing = self._routing, routing
        try:
            yield
        finally:
            self._routing = before

    def bound(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A `forward` that runs again with the routing of now, as the backward pass of checkpointed blocks does."""
        routing = self._routing

        def with_this_routing(*args: Any, **kwargs: Any) -> Any:
            nonlocal routing
            with self.on(routing):
                outputs = forward(*args, **kwargs)
            # The load is counted once.
            routing = None if routing is None else Routing(routing.given_NLk)
            return outputs

        return with_this_routing

    def _routed(self, router: Any, layer: int) -> Callable[..., Any]:
        forward, sizes = router.forward, _sizes(router)
        # Some families first choose groups of experts, and hide the scores of all others.
        groups = int(getattr(router, "num_group", None) or 1)

        def route(*args: Any, **kwargs: Any) -> Any:
            routing = self._routing
            if routing is None:
                return forward(*args, **kwargs)
            given = None if routing.given_NLk is None else routing.given_NLk[:, layer].long()
            with _Choice(*sizes, groups, given) as choice:
                outputs = forward(*args, **kwargs)
            if choice.chosen_Nk is not None:
                routing.chosen[layer] = choice.chosen_Nk
                if routing.weights_N is not None and torch.is_grad_enabled():
                    self.load.add(layer, sizes[0], choice.chosen_Nk, _logits(outputs, sizes[0]), routing.weights_N)
            elif given is not None:
                raise StartFault(
                    f"{type(router).__name__} does not choose its experts with topk, which is not supported"
                )
            return outputs

        return route


def _logits(outputs: Any, experts: int) -> Tensor | None:
    """A router's scores [N, E], before it normalizes them in most families; of several such outputs, families return
    them last. None if it returns none, as LongCat's in Transformers 5.16."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    found = [part for part in parts if part.ndim == 2 and part.shape[1] == experts and part.is_floating_point()]
    return found[-1].detach() if found else None


class RouterLoad:
    """Tokens of each expert, and the entropy of the routers, in the passes with a gradient since the last `take`."""

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}
        """Tokens [E] of a layer's experts."""
        self._entropies: dict[int, Tensor] = {}
        """Sum over a layer's tokens; none of routers that do not return their scores."""

    def add(self, layer: int, experts: int, chosen_Nk: Tensor, logits_NE: Tensor | None, weights_N: Tensor) -> None:
        counts = weights_N.new_zeros(experts)
        counts.index_add_(0, chosen_Nk.flatten(), weights_N.repeat_interleave(chosen_Nk.shape[1]))
        self._counts[layer] = self._counts[layer] + counts if layer in self._counts else counts
        if logits_NE is None:
            return
        scores = logits_NE.float()
        # Gemma 4 returns probabilities, and others what these are the softmax of.
        are_probabilities = (scores >= 0).all() & ((scores.sum(-1) - 1).abs() < 1e-3).all()
        logs = torch.where(are_probabilities, scores.clamp(min=1e-30).log(), scores.log_softmax(-1))
        entropy = -((logs.exp() * logs).sum(-1) * weights_N).sum()
        self._entropies[layer] = self._entropies[layer] + entropy if layer in self._entropies else entropy

    def take(self) -> tuple[Tensor, Tensor]:
        """Tokens by layer and expert [L, E] and sums of entropies [L], of the layers in order. Starts again.

        There are no entropies if the routers do not return their scores.
        """
        counts = torch.stack([self._counts[layer] for layer in sorted(self._counts)]).double()
        summed = [self._entropies[layer] for layer in sorted(self._entropies)]
        entropies = torch.stack(summed).double() if summed else counts.new_zeros(0)
        self._counts, self._entropies = {}, {}
        return counts, entropies

    def __bool__(self) -> bool:
        return bool(self._counts)


def _routers(model: nn.Module) -> Iterator[tuple[int, Any]]:
    for name, module in model.named_modules():
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        if type(module).__name__.endswith(("Router", "Gate")) and numbers and all(_sizes(module)):
            yield numbers[0], module


def _sizes(router: Any) -> tuple[int, int]:
    """Number of experts, and of experts per token; 0 if the module does not say."""
    config = getattr(router, "config", None)
    experts = getattr(router, "num_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(router, "top_k", None) or getattr(config, "top_k_experts", None)
    return int(experts or 0), int(chosen or 0)


class _Choice(TorchFunctionMode):
    """Reads, or replaces, the choice of one router during its forward pass."""

    def __init__(self, experts: int, top_k: int, groups: int, given_Nk: Tensor | None) -> None:
        super().__init__()
        self.chosen_Nk: Tensor | None = None
        self._given_Nk = given_Nk
        self._experts, self._top_k, self._groups = experts, top_k, groups

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if scores.ndim == 2 and (scores.shape[1], k) == (self._experts, self._top_k):
            result = func(*args, **kwargs) if self._given_Nk is None else _taken(scores, self._given_Nk)
            self.chosen_Nk = result[1].detach()
            return result
        if self._given_Nk is not None and scores.ndim == 2 and scores.shape[1] == self._groups:
            return _taken(scores, self._given_Nk // (self._experts // self._groups))
        return func(*args, **kwargs)


def _taken(scores: Tensor, indices: Tensor) -> Any:
    return torch.return_types.topk((scores.gather(1, indices), indices))

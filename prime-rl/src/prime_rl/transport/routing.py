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
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prime_rl.utils.errors import StartFault


class Routing:
    """What the routers of one forward pass do: choose the `given` experts, or their own. It keeps what they chose."""

    def __init__(
        self,
        given_NLk: Tensor | None = None,
        weights_N: Tensor | None = None,
        auxiliary: AuxiliaryLoss | None = None,
        *,
        is_counted: bool = True,
    ) -> None:
        """`given_NLk` are expert ids for each token of the pass and each layer of the model. `weights_N` say how often
        each token counts in the load and in the `auxiliary` loss; None counts none. Only a first pass is counted."""
        self.given_NLk = given_NLk
        self.weights_N = weights_N
        self.auxiliary = auxiliary
        self.is_counted = is_counted
        self.chosen: dict[int, Tensor] = {}
        """Expert ids [N, k] by layer."""


class Routers:
    """The routers of a model, by the number of their layer. False for a model without experts."""

    def __init__(self, model: nn.Module) -> None:
        """Wraps the `forward` of each router, which stays Transformers' own outside of `on`."""
        self._routing: Routing | None = None
        self.load = RouterLoad()
        self.auxiliary_coef = 0.0
        """Weight of the auxiliary loss; 0 computes none."""
        self.rows = 1
        """Rows of this process in the update, over which the auxiliary loss is averaged."""
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
            if routing is not None:
                routing = Routing(routing.given_NLk, routing.weights_N, routing.auxiliary, is_counted=False)
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
                    logits_NE = _logits(outputs, sizes[0])
                    if routing.is_counted:
                        detached = None if logits_NE is None else logits_NE.detach()
                        self.load.add(layer, sizes[0], choice.chosen_Nk, detached, routing.weights_N)
                    if routing.auxiliary is not None:
                        outputs = self._with_auxiliary(outputs, logits_NE, choice.chosen_Nk, routing)
            elif given is not None:
                raise StartFault(
                    f"{type(router).__name__} does not choose its experts with topk, which is not supported"
                )
            return outputs

        return route

    def auxiliary_loss(self) -> AuxiliaryLoss | None:
        """That of the next row; None without a weight, or without a gradient."""
        if self.auxiliary_coef == 0 or not torch.is_grad_enabled():
            return None
        return AuxiliaryLoss(self.auxiliary_coef / self.rows)

    def _with_auxiliary(self, outputs: Any, logits_NE: Tensor | None, chosen_Nk: Tensor, routing: Routing) -> Any:
        """The outputs of a router, of which the weights carry the gradient of the auxiliary loss to its scores."""
        assert routing.auxiliary is not None
        assert routing.weights_N is not None
        parts = list(outputs) if isinstance(outputs, tuple) else [outputs]
        own = (
            at
            for at, part in enumerate(parts)
            if part is not logits_NE and part.is_floating_point() and part.shape == chosen_Nk.shape
        )
        at = next(own, None)
        if logits_NE is None or at is None:
            raise StartFault("router_aux_loss_coef: the routers of this model do not return their scores: set it to 0")
        if routing.is_counted:
            routing.auxiliary.add(chosen_Nk, logits_NE.detach(), routing.weights_N)
        parts[at] = _carries_loss(parts[at], logits_NE, routing.weights_N, routing.auxiliary)
        return type(outputs)(parts) if isinstance(outputs, tuple) else parts[0]


class AuxiliaryLoss:
    """The load-balancing loss of one row (Fedus et al. 2021, Switch Transformers; as `load_balancing_loss_func` of
    Transformers): `E * sum over experts of f_e * P_e`, f_e the experts' choices per token and P_e the mean of the
    softmax of the routers' scores, both over the tokens of all layers. 1 times k is balanced.

    Its gradient joins that of the row in each router, so that the blocks run backward once and in their order.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._counts_E: Tensor | None = None
        self._probabilities_E: Tensor | None = None
        self._tokens: Tensor | None = None

    def add(self, chosen_Nk: Tensor, scores_NE: Tensor, weights_N: Tensor) -> None:
        """Count the choices of one layer."""
        counts = weights_N.new_zeros(scores_NE.shape[1])
        counts.index_add_(0, chosen_Nk.flatten(), weights_N.repeat_interleave(chosen_Nk.shape[1]))
        probabilities = weights_N @ _probabilities(scores_NE)[0]
        if self._counts_E is None or self._probabilities_E is None or self._tokens is None:
            self._counts_E, self._probabilities_E, self._tokens = counts, probabilities, weights_N.sum()
            return
        self._counts_E, self._probabilities_E = self._counts_E + counts, self._probabilities_E + probabilities
        self._tokens = self._tokens + weights_N.sum()

    def finish(self, group: dist.ProcessGroup | None, size: int) -> Tensor | None:
        """Add up what the `size` processes of `group` counted, which divide the row's tokens. Returns the loss; None
        if no router has chosen. Collective."""
        if self._counts_E is None or self._probabilities_E is None or self._tokens is None:
            return None
        if group is not None:
            for summed in (self._counts_E, self._probabilities_E, self._tokens):
                dist.all_reduce(summed, group=group)
        # Gradients of processes that divide a row are averaged, and each has those of its own tokens.
        self.scale *= size
        tokens = self._tokens.clamp(min=1)
        return len(self._counts_E) * (self._counts_E / tokens * self._probabilities_E / tokens).sum()

    def gradient(self, scores_NE: Tensor, weights_N: Tensor) -> Tensor:
        """The gradient of the scaled loss, in which the choices are constant, after `finish`."""
        assert self._counts_E is not None
        assert self._tokens is not None
        tokens = self._tokens.clamp(min=1)
        of_probabilities_E = self.scale * len(self._counts_E) * self._counts_E / tokens / tokens
        probabilities_NE, are_given = _probabilities(scores_NE)
        mean_N1 = (probabilities_NE * of_probabilities_E).sum(-1, keepdim=True)
        of_scores = torch.where(are_given, of_probabilities_E, probabilities_NE * (of_probabilities_E - mean_N1))
        return (of_scores * weights_N[:, None]).to(scores_NE.dtype)


class _CarriesLoss(torch.autograd.Function):
    """Returns a router's weights, and adds the gradient of the auxiliary loss to that of its scores."""

    @staticmethod
    def forward(ctx: Any, weights_Nk: Tensor, scores_NE: Tensor, weights_N: Tensor, loss: AuxiliaryLoss) -> Tensor:
        ctx.save_for_backward(scores_NE, weights_N)
        ctx.loss = loss
        return weights_Nk.view_as(weights_Nk)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gradient, ctx.loss.gradient(*ctx.saved_tensors), None, None


_carries_loss: Callable[..., Tensor] = _CarriesLoss.apply  # torch leaves it untyped


def _probabilities(scores_NE: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of a router's scores, float32, and whether the scores are that already, as those of Gemma 4."""
    scores = scores_NE.float()
    are_given = (scores >= 0).all() & ((scores.sum(-1) - 1).abs() < 1e-3).all()
    return torch.where(are_given, scores, scores.softmax(-1)), are_given


def _logits(outputs: Any, experts: int) -> Tensor | None:
    """A router's scores [N, E], before it normalizes them in most families; of several such outputs, families return
    them last. None if it returns none, as LongCat's in Transformers 5.16."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    found = [part for part in parts if part.ndim == 2 and part.shape[1] == experts and part.is_floating_point()]
    return found[-1] if found else None


class RouterLoad:
    """Tokens of each expert, and the entropy of the routers, in the passes with a gradient since the last `take`."""

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}
        """Tokens [E] of a layer's experts."""
        self._entropies: dict[int, Tensor] = {}
        """Sum over a layer's tokens; none of routers that do not return their scores."""
        self._lost: Tensor | None = None
        """Sum of the rows' auxiliary losses, and their number, without rows that count no token. Two numbers, because
        nobody takes those of a critic."""

    def add(self, layer: int, experts: int, chosen_Nk: Tensor, logits_NE: Tensor | None, weights_N: Tensor) -> None:
        counts = weights_N.new_zeros(experts)
        counts.index_add_(0, chosen_Nk.flatten(), weights_N.repeat_interleave(chosen_Nk.shape[1]))
        self._counts[layer] = self._counts[layer] + counts if layer in self._counts else counts
        if logits_NE is None:
            return
        probabilities = _probabilities(logits_NE)[0]
        entropy = (torch.special.entr(probabilities).sum(-1) * weights_N).sum()
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

    def lost(self, auxiliary: Tensor) -> None:
        """Note the auxiliary loss of a row."""
        own = torch.stack([auxiliary, (auxiliary > 0).to(auxiliary)]).double()
        self._lost = own if self._lost is None else self._lost + own

    def take_losses(self) -> tuple[float, float]:
        """The sum of those since the last call, and their number."""
        total, rows = (0.0, 0.0) if self._lost is None else self._lost.tolist()
        self._lost = None
        return total, rows

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

"""Collects statistics of masked tensors and reduces them over the processes of a run."""

from __future__ import annotations

import contextvars
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

Reduce = Literal["avg", "avg_min_max", "sum", "min", "max", "scalar"]
"""Reduction of values to one metric.

Averages weigh each masked-in element, or each recorded scalar, the same on all ranks.

`avg_min_max` gives three metrics: `NAME/avg`, `NAME/min` and `NAME/max`.
"""

TIMING = "timing"


@dataclass(slots=True)
class _Total:
    """Record of one metric."""

    reduce: Reduce
    sum: Tensor | float = 0.0
    count: Tensor | float = 0.0
    min: Tensor | float = math.inf
    max: Tensor | float = -math.inf


class Stats:
    """Records statistics under keys, and exports them as one number each.

    Values are added up where they lie, without waiting for a GPU; `export` waits. Scopes belong to the task or thread
    that opens them.

        stats.denominator(tokens=mask)
        with stats.scope("loss"):
            stats.stat(of="tokens", clipped=is_clipped.float())    # loss/clipped/{avg,min,max}
        metrics = stats.export(group)
    """

    def __init__(self) -> None:
        self._totals: dict[str, _Total] = {}
        self._masks: dict[str, Tensor] = {}
        self._scope: contextvars.ContextVar[str] = contextvars.ContextVar("scope", default="")

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put `name/` before the keys of the block."""
        token = self._scope.set(f"{self._scope.get()}{name}/")
        try:
            yield
        finally:
            self._scope.reset(token)

    def denominator(self, **masks: Tensor) -> None:
        """Name masks that later statistics count over. Each is exported too, as its number of true elements.

        Raises:
            ValueError: a mask is empty or not boolean.
        """
        import torch

        for name, mask in masks.items():
            if mask.dtype != torch.bool or mask.numel() == 0:
                raise ValueError(f"the denominator {name} must be a boolean tensor with elements (got {_kind(mask)})")
            key = self._key(name)
            self._masks[key] = mask.detach()
            self._total(key, "sum").sum += mask.sum(dtype=torch.float64)
            self._total(key, "sum").count += 1.0

    def stat(self, of: str, reduce: Reduce = "avg_min_max", **values: Tensor) -> None:
        """Record tensors of the shape of the denominator `of`, which must be named in this scope or one around it.

        Elements outside of the mask do not count, and may be NaN.

        Raises:
            ValueError: the denominator is unknown, a tensor has another shape, or holds no floating-point numbers.
        """
        import torch

        mask = self._mask(of)
        for name, value in values.items():
            key = self._key(name)
            if reduce == "scalar":
                raise ValueError(f"{key}: a tensor has no reduce type 'scalar': use `scalar`, or another type")
            if value.shape != mask.shape or not value.is_floating_point():
                raise ValueError(f"{key} is {_kind(value)}; its denominator {of} is {_kind(mask)}")
            value = value.detach()
            total = self._total(key, reduce)
            total.sum += torch.where(mask, value, 0).sum(dtype=torch.float64)
            total.count += mask.sum(dtype=torch.float64)
            total.min = _least(total.min, torch.where(mask, value, math.inf).amin().double())
            total.max = -_least(-total.max, -torch.where(mask, value, -math.inf).amax().double())

    def scalar(self, **values: float) -> None:
        """Record numbers; their mean is exported."""
        for name, value in values.items():
            total = self._total(self._key(name), "scalar")
            total.sum += float(value)
            total.count += 1.0

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Record the duration of the block in seconds, as `timing/NAME` whatever the scope."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            total = self._total(f"{TIMING}/{name}", "scalar")
            total.sum += time.perf_counter() - started_s
            total.count += 1.0

    def export(self, group: ProcessGroup | None = None, reset: bool = True) -> dict[str, float]:
        """The metrics by key, the same on every rank of `group`. Collective if a group is given.

        A rank need not have every key. A key that nothing was recorded for, or only masked-out elements, is missing.

        Raises:
            ValueError: the ranks recorded a key with different reduce types.
        """
        reduces, numbers = self._reduced(group)
        if reset:
            self._totals.clear()
            self._masks.clear()
        metrics: dict[str, float] = {}
        for (key, reduce), (total, count, least, most) in zip(reduces.items(), numbers, strict=True):
            if count:
                metrics |= _exported(key, reduce, total, count, least, most)
        return metrics

    def _reduced(self, group: ProcessGroup | None) -> tuple[dict[str, Reduce], list[list[float]]]:
        """Each key with its type, and sum, count, minimum and maximum of each, over all ranks."""
        import torch

        reduces = {key: self._totals[key].reduce for key in sorted(self._totals)}
        if group is not None:
            reduces = _all_keys(reduces, group)
        rows = [self._totals.get(key, _Total(reduce)) for key, reduce in reduces.items()]
        if not rows:
            return {}, []
        own = next((x.device for row in rows for x in (row.sum, row.min) if not isinstance(x, float)), "cpu")
        # A rank that recorded no tensor must join the others' collectives on their device.
        device = own if group is None else collective_device(group)
        sums, least, most = (
            torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in column])
            for column in (
                [value for row in rows for value in (row.sum, row.count)],
                [row.min for row in rows],
                [row.max for row in rows],
            )
        )
        if group is not None:
            for tensor, operation in ((sums, "SUM"), (least, "MIN"), (most, "MAX")):
                torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, operation), group=group)
        return reduces, torch.cat([sums.view(-1, 2), least[:, None], most[:, None]], dim=1).tolist()

    def _key(self, name: str) -> str:
        return f"{self._scope.get()}{name}"

    def _mask(self, name: str) -> Tensor:
        """The mask of this scope, or of the nearest one around it."""
        scopes = self._scope.get().split("/")[:-1]
        for depth in range(len(scopes), -1, -1):
            mask = self._masks.get("/".join([*scopes[:depth], name]))
            if mask is not None:
                return mask
        raise ValueError(f"no denominator {name!r}: record it first, with `denominator({name}=mask)`")

    def _total(self, key: str, reduce: Reduce) -> _Total:
        total = self._totals.setdefault(key, _Total(reduce))
        if total.reduce != reduce:
            raise ValueError(f"{key} was recorded as {total.reduce!r} and as {reduce!r}")
        return total


def collective_device(group: ProcessGroup) -> str:
    """Type of the device for small tensors in collectives of `group`, the same on all ranks: "cpu" if it has a backend
    for it."""
    from torch.distributed import get_backend_config

    devices = [part.partition(":")[0] for part in get_backend_config(group).split(",")]
    return "cpu" if "cpu" in devices else devices[0]


def _all_keys(own: dict[str, Reduce], group: ProcessGroup) -> dict[str, Reduce]:
    """The keys of all ranks, in one order, so that their collectives match."""
    import torch.distributed as dist

    parts: list[dict[str, Reduce]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, own, group=group)
    reduces: dict[str, Reduce] = {}
    for part in parts:
        for key, reduce in part.items():
            if reduces.setdefault(key, reduce) != reduce:
                raise ValueError(f"{key} was recorded as {reduces[key]!r} and, on another rank, as {reduce!r}")
    return dict(sorted(reduces.items()))


def _exported(key: str, reduce: Reduce, total: float, count: float, least: float, most: float) -> dict[str, float]:
    match reduce:
        case "avg" | "scalar":
            return {key: total / count}
        case "avg_min_max":
            return {f"{key}/avg": total / count, f"{key}/min": least, f"{key}/max": most}
        case "sum":
            return {key: total}
        case "min":
            return {key: least}
        case "max":
            return {key: most}


def _least(one: Tensor | float, other: Tensor) -> Tensor:
    import torch

    return torch.minimum(torch.as_tensor(one, dtype=other.dtype, device=other.device), other)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

"""Statistics over ranks equal those of plain PyTorch over all values at once."""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the fake backend

from prime_rl.monitors.stats import Stats, collective_device

RANKS = 3


def values_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    values, mask = torch.randn(4, 5 + rank, generator=generator), torch.rand(4, 5 + rank, generator=generator) < 0.4
    return torch.where(mask, values, math.nan), mask


def record(rank: int) -> Stats:
    stats = Stats()
    for _ in range(2):
        values, mask = values_of(rank)
        stats.denominator(tokens=mask, none=torch.zeros_like(mask))
        with stats.scope("loss"):
            for reduce in ("avg", "avg_min_max", "sum", "min", "max"):
                stats.stat("tokens", reduce, **{reduce: values})
            stats.stat("none", nothing=values)
    for count in range(rank):
        stats.scalar(only_some_ranks=10.0 * rank + count)
    if rank == 1:
        stats.scalar(a_key_of_rank_1=7.0)
    return stats


def run_rank(rank: int, directory: str) -> None:
    store = torch.distributed.FileStore(f"{directory}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=9))
    stats = record(rank)
    metrics = stats.export(torch.distributed.group.WORLD)
    other = Stats()
    (other.scalar if rank else lambda **values: other.denominator(mixed=torch.ones(1, dtype=torch.bool)))(mixed=1.0)
    with pytest.raises(ValueError, match="on another rank"):
        other.export(torch.distributed.group.WORLD)
    again = stats.export(torch.distributed.group.WORLD)
    Path(directory, f"{rank}.json").write_text(json.dumps([metrics, again]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "device"),
    [("gloo", "cpu"), ("cpu:gloo,cuda:fake", "cpu"), ("cuda:fake,cpu:gloo", "cpu"), ("cuda:fake", "cuda")],
)
def test_the_device_of_collectives_depends_on_the_group_alone(backend: str, device: str) -> None:
    """A rank without records has no tensor whose device it could take. The fake backend stands in for NCCL."""
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    chosen = collective_device(torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()
    assert chosen == device


def test_ranks_give_what_plain_torch_gives(tmp_path: Path) -> None:
    mp.spawn(run_rank, (str(tmp_path),), RANKS)
    (metrics, again), *others = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(other == [metrics, again] for other in others)
    assert again == {}  # an export empties the stats
    chosen = torch.cat([values[mask] for values, mask in map(values_of, range(RANKS))])
    assert metrics == pytest.approx(
        {
            "tokens": 2 * len(chosen),
            "none": 0,
            "loss/avg": chosen.mean().item(),
            "loss/avg_min_max/avg": chosen.mean().item(),
            "loss/avg_min_max/min": chosen.min().item(),
            "loss/avg_min_max/max": chosen.max().item(),
            "loss/sum": 2 * chosen.sum().item(),
            "loss/min": chosen.min().item(),
            "loss/max": chosen.max().item(),
            "only_some_ranks": (10 + 20 + 21) / 3,
            "a_key_of_rank_1": 7.0,
        },
        rel=1e-5,
    )


def test_scopes_belong_to_their_task_and_thread() -> None:
    stats = Stats()

    async def record_in(name: str) -> None:
        with stats.scope(name):
            await asyncio.sleep(0)
            stats.scalar(reward=1.0)

    async def record_all() -> None:
        with stats.scope("rollout"):
            await asyncio.gather(record_in("a"), record_in("b"))

    asyncio.run(record_all())
    with stats.scope("main"):
        thread = threading.Thread(target=contextvars.Context().run, args=(lambda: stats.scalar(alone=1.0),))
        thread.start()
        thread.join()
    assert set(stats.export()) == {"rollout/a/reward", "rollout/b/reward", "alone"}


def test_timings_ignore_the_scope() -> None:
    stats = Stats()
    with stats.scope("loss"), stats.timing("forward"):
        pass
    assert set(stats.export(reset=False)) == set(stats.export()) == {"timing/forward"}
    assert stats.export() == {}


MASK = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda stats: stats.denominator(tokens=torch.ones(2)), "must be a boolean tensor"),
        (lambda stats: stats.denominator(tokens=MASK[:0]), "must be a boolean tensor with elements"),
        (lambda stats: stats.stat("others", loss=torch.ones(2)), "no denominator 'others'"),
        (
            lambda stats: stats.stat("known", loss=torch.ones(3)),
            r"loss is float32 \[3\]; .* known is bool \[2\]",
        ),
        (lambda stats: stats.stat("known", loss=torch.ones(2, dtype=torch.long)), r"loss is int64 \[2\]"),
        (lambda stats: stats.stat("known", "scalar", loss=torch.ones(2)), "no reduce type 'scalar'"),
        (
            lambda stats: (stats.scalar(loss=1.0), stats.stat("known", loss=torch.ones(2))),
            "'scalar' and as 'avg_min_max'",
        ),
    ],
)
def test_what_cannot_be_recorded_says_why(record, message: str) -> None:
    stats = Stats()
    stats.denominator(known=MASK)
    with pytest.raises(ValueError, match=message):
        record(stats)

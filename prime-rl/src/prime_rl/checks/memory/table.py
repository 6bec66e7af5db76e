"""Prints an estimate as a table of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from prime_rl.checks.memory.estimate import Component, Estimate

WIDTH = 80
_LABEL, _COLUMN = 24, 12
_GIB, _MIB = 2**30, 2**20
LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "gathered and reduced",
    "working": "step and CUDA graphs",
    "cache": "key-value cache",
    "copy": "copy for a checkpoint",
    "reserve": "CUDA and libraries",
}


def table_lines(title: str, estimate: Estimate, change: tuple[str, Estimate] | None) -> Iterator[str]:
    """The lines of the table. `change` is the nearest change with which the run fits."""
    on_cpu = estimate.device == "cpu"
    where = "the CPU" if on_cpu else _gpu_text(estimate)
    yield from textwrap.wrap(f"{title} on {where}", WIDTH)
    yield ""
    components = estimate.components
    largest = max(part.needed_bytes for part in components)
    size = _GIB if largest >= _GIB else _MIB
    unit = f"{'GiB' if size == _GIB else 'MiB'} {'of each process' if on_cpu else 'on each GPU'}"
    yield _row(unit, [_heading(part) for part in components])
    for key, label in LABELS.items():
        if any(part.parts.get(key) for part in components):
            label = "Python and libraries" if on_cpu and key == "reserve" else label
            yield _row(label, [_in(size, part.parts.get(key)) for part in components])
    yield _row("needed", [_in(size, part.needed_bytes) for part in components])
    if any(part.room_bytes is not None for part in components):
        yield _row("available", [_in(size, part.room_bytes) for part in components])
        yield _row("", [part.verdict or "" for part in components])
    yield ""
    for part in components:
        for note in part.notes:
            yield from textwrap.wrap(note, WIDTH)
    if estimate.disk is not None:
        yield from textwrap.wrap(f"disk: {estimate.disk}", WIDTH)
    yield from _conclusion(estimate, change)


def as_json(estimate: Estimate, change: tuple[str, Estimate] | None) -> dict[str, Any]:
    """The same as plain values; sizes in bytes."""
    gpu, disk = estimate.gpu, estimate.disk
    return {
        "device": estimate.device,
        "gpu": None if gpu is None else {"name": gpu.name, "bytes": gpu.total_bytes},
        "components": [_component(part) for part in estimate.components],
        "disk": None if disk is None else {"needed_bytes": disk.needed_bytes, "free_bytes": disk.free_bytes},
        "verdict": estimate.verdict,
        "change": None if change is None else {"set": change[0], "verdict": change[1].verdict},
    }


def verdict_line(estimate: Estimate, change: tuple[str, Estimate] | None) -> str:
    """The verdict in one line, for a table of checks."""
    advice = f"; {change[0]}: {change[1].verdict}" if change is not None else ""
    return f"{estimate.verdict or 'needs'}: {_sizes(estimate.components)}{advice}"


def _heading(part: Component) -> str:
    """Its name, cut to the width of a column: a judge's is in a note, too."""
    count = f" x {part.processes}"
    room = _COLUMN + 1 - len(count)
    return (part.name if len(part.name) <= room else f"{part.name[: room - 1]}…") + count


def _gpu_text(estimate: Estimate) -> str:
    if estimate.gpu is None:
        return "a GPU"
    name = estimate.gpu.name
    return name if name.endswith("GiB") else f"{name} ({estimate.gpu.total_bytes / _GIB:.1f} GiB)"


def _row(label: str, values: Sequence[str]) -> str:
    return (f"{label:<{_LABEL}}" + "".join(f"{value:>{_COLUMN + 2}}" for value in values)).rstrip()


def _in(unit: int, size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / unit:,.1f}"


def _sizes(components: Sequence[Component]) -> str:
    return ", ".join(f"{part.name} {part.needed_bytes / _GIB:.1f} GiB" for part in components)


def _conclusion(estimate: Estimate, change: tuple[str, Estimate] | None) -> Iterator[str]:
    if estimate.verdict is None:
        yield "No GPU is known here: name one, as in --gpu H100 or --gpu 80 (GiB)."
        return
    yield f"{estimate.verdict}: {estimate.share:.0%} of what is available"
    if estimate.verdict == "fits":
        return
    if change is None:
        yield "No setting of this estimate makes it fit: use a smaller model or a larger GPU."
        return
    after = change[1]
    yield from textwrap.wrap(
        f"nearest change: {change[0]} ({_sizes(after.components)}: {after.verdict}, {after.share:.0%})", WIDTH
    )


def _component(part: Component) -> dict[str, Any]:
    return {
        "name": part.name,
        "processes": part.processes,
        "parts": dict(part.parts),
        "needed_bytes": part.needed_bytes,
        "room_bytes": part.room_bytes,
        "verdict": part.verdict,
        "notes": list(part.notes),
    }

"""Finds the nearest change of a config with which a run fits, and prints an estimate as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import TYPE_CHECKING, Any, TypeVar

from prime_rl.checks.memory.estimate import Component, Estimate
from prime_rl.checks.model_description import ModelDescription
from prime_rl.configs.model import (
    ActivationCheckpointConfig,
    ActivationOffloadingConfig,
    LoRAConfig,
    ModelConfig,
    QuantizationConfig,
    division_fault,
    product_of,
)
from prime_rl.configs.optim import AdamW8bitConfig, AdamWConfig

if TYPE_CHECKING:
    from pydantic import BaseModel

    from prime_rl.configs.optim import OptimizerConfig
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig

ModelT = TypeVar("ModelT", bound="BaseModel")
MESH = "mesh"
_MORE_GPUS = ("gpus", "nodes", "infer_gpus")
_MOST_CHANGES = 3
_NODE_GPUS = (2, 4, 8)
_MOST_TRAIN_GPUS = 4
_MORE_NODES = (2, 4)
"""Times as many nodes."""
_LEAST_GIB = 0.1
"""So small a budget of activations that all blocks are recomputed."""
_CHUNK_TOKENS = 2048
_UTILIZATIONS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


@dataclass(frozen=True, slots=True)
class Variant:
    """A config and its GPUs: of the trainer on all nodes, and of an engine. An engine of 0 shares the trainer's GPU."""

    config: Any
    train: int
    infer: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """One setting to change."""

    key: str
    text: str
    """The key with its new value, as the user would write it."""
    apply: Callable[[Variant], Variant]
    is_free: bool = False
    """It costs less than sending more would."""
    cost: str = ""
    """Its price, in a few words."""
    keeping: Callable[[float], Change] | None = None
    """If it recomputes all blocks: the same for those alone that a budget of activations in GiB takes."""


@dataclass(frozen=True, slots=True)
class Found:
    """Changes, and the estimate with them."""

    changes: Sequence[Change]
    estimate: Estimate
    on_same_gpus: Found | None = None
    """Changes without more GPUs; only if `changes` have more."""

    @property
    def needs_more_gpus(self) -> bool:
        return any(change.key in _MORE_GPUS for change in self.changes)

    @property
    def text(self) -> str:
        return ", ".join(change.text for change in self.changes)


def nearest_change(
    start: Variant,
    changes: Sequence[Change],
    estimate: Callable[[Variant], Estimate],
    models: Sequence[ModelDescription] = (),
) -> Found | None:
    """The cheapest combination of `changes` with which the run fits, and the one on the same GPUs, if it needs more."""
    found = _cheapest(start, changes, estimate, models)
    if found is None or not found.needs_more_gpus:
        return found
    others = [change for change in changes if change.key not in _MORE_GPUS]
    return replace(found, on_same_gpus=_cheapest(start, others, estimate, models))


def _cheapest(
    start: Variant,
    changes: Sequence[Change],
    estimate: Callable[[Variant], Estimate],
    models: Sequence[ModelDescription],
) -> Found | None:
    """The cheapest combination of `changes`, which are in the order of their costs, with which the run fits: its most
    expensive change costs least, and it is as small as possible. Of the blocks, it recomputes as few as it takes.

    If none fits, the one that needs least and is at most tight. None if nothing helps. `models` are trained: nothing is
    proposed that cannot divide them. Of several meshes, the one that sends least counts as the first.
    """

    def tried(combination: Iterable[Change]) -> Found | None:
        variant, combination = start, tuple(combination)
        for change in combination:
            variant = change.apply(variant)
        return None if _is_refused(variant.config, models) else Found(combination, estimate(variant))

    tried_meshes = [(change, found.estimate) for change in changes if change.key == MESH and (found := tried([change]))]
    meshes = [change for change, _ in sorted(tried_meshes, key=lambda pair: _sent(pair[1]))]
    others = [change for change in changes if change.key != MESH]
    if meshes:
        smallest, _ = min(tried_meshes, key=lambda pair: pair[1].share)
        others.insert(sum(change.is_free for change in others), smallest)
    best: Found | None = None
    for combination in _by_cost(others):
        if len({change.key for change in combination}) < len(combination) or (found := tried(combination)) is None:
            continue
        if found.estimate.verdict == "fits":
            # If the smallest mesh is among them, a cheaper one may do.
            cheaper = ([mesh if change.key == MESH else change for change in combination] for mesh in meshes)
            each = filter(None, map(tried, cheaper)) if any(one.key == MESH for one in combination) else ()
            return _recomputing_less(next((one for one in each if one.estimate.verdict == "fits"), found), tried)
        if found.estimate.verdict == "tight" and (best is None or found.estimate.share < best.estimate.share):
            best = found
    return best


def _by_cost(changes: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    for last, most_expensive in enumerate(changes):
        for size in range(_MOST_CHANGES):
            for cheaper in combinations(changes[:last], size):
                yield *cheaper, most_expensive


def _recomputing_less(found: Found, tried: Callable[[Iterable[Change]], Found | None]) -> Found:
    """Give what is left of the GPU to activations that are kept, if blocks are recomputed."""
    gpu, best = found.estimate.gpu, found
    if gpu is None or all(change.keeping is None for change in found.changes):
        return found
    low, high = 0, 10 * gpu.total_bytes // _GIB
    while high - low > 1:  # in tenths of a GiB
        tenths = (low + high) // 2
        changes = [change if change.keeping is None else change.keeping(tenths / 10) for change in found.changes]
        less = tried(changes)
        if less is not None and less.estimate.verdict == "fits":
            low, best = tenths, less
        else:
            high = tenths
    return best


def _sent(estimate: Estimate) -> int:
    return estimate.components[0].sent_bytes


def _is_refused(config: Any, models: Iterable[ModelDescription]) -> bool:
    """Whether a changed config breaks a rule that a written one is held to."""
    trainer = getattr(config, "trainer", config)
    faults = chain(trainer.model.faults(), trainer.faults(), config.faults())
    divisions = [model.division_fault(trainer.model) for model in models]
    if trainer is config:  # RL trains without dropout
        divisions += [model.dropout_fault(trainer.model) for model in models]
    if getattr(config, "inference", None) is not None:
        divisions += [model.serving_fault(config.inference.parallel.tp) for model in models]
    return any(True for _ in chain(faults, filter(None, divisions)))


def _meshes(model: ModelConfig, path: str, processes: int) -> Iterator[Change]:
    """Other divisions of the same processes, for the same rows."""
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    own = {axis: getattr(model, axis) for axis in ("dp_replicate", "cp", "tp", "ep")}
    for found in product([size for size in sizes if own["dp_replicate"] % size == 0], sizes, sizes, sizes):
        mesh = dict(zip(own, found, strict=True))
        is_repeated = mesh["ep"] == mesh["tp"] > 1  # `tp` alone divides experts, too
        if mesh == own or is_repeated or division_fault(model.model_copy(update=mesh), processes) is not None:
            continue
        changed = {f"{path}.{axis}": size for axis, size in mesh.items() if size != own[axis]}
        text = ", ".join(f"{key} = {size}" for key, size in changed.items())
        yield Change(MESH, text, lambda run, changed=changed: _with_all(run, changed))  # type: ignore[misc]


def sft_changes(config: SFTConfig, processes: int) -> Iterator[Change]:
    """Changes that may make a run of SFT smaller, cheapest first."""
    seq_len = config.data.seq_len
    # Processes that divide rows or layers share rows, so that fewer must divide the batch.
    sharing, _ = product_of(config.model, "cp", "tp")
    rows = config.data.micro_batch_size
    yield from _free_changes(config.model, "model")
    if rows > 1:
        yield replace(_set("data.micro_batch_size", 1), is_free=True, cost="shorter products")
    yield from _meshes(config.model, "model", processes)
    if config.deployment.type == "multi_node":
        for times in _MORE_NODES:
            if config.data.batch_size % (times * processes // sharing * rows) == 0:
                yield _more_nodes("--nodes", "deployment.num_nodes", times * config.deployment.num_nodes)
    for gpus in _NODE_GPUS if config.deployment.type == "single_node" else ():
        is_possible = gpus > processes and division_fault(config.model, gpus) is None
        if is_possible and config.data.batch_size % (gpus // sharing * rows) == 0:
            yield _more_gpus("--gpus", "deployment.num_gpus", gpus)
    yield from _slow_changes(config.model, config.optim, "model")
    for part in (2, 4):
        if seq_len // part >= 128:
            lengths = {"data.seq_len": seq_len // part, "model.seq_len": seq_len // part}
            text = f"data.seq_len = {seq_len // part}"
            yield Change("data.seq_len", text, lambda run, lengths=lengths: _with_all(run, lengths))  # type: ignore[misc]


def rl_changes(config: RLConfig, train: int, infer: int) -> Iterator[Change]:
    """Changes that may make a run of RL smaller, cheapest first."""
    inference, limits = config.inference, config.orchestrator
    yield from _free_changes(config.trainer.model, "trainer.model")
    yield from _meshes(config.trainer.model, "trainer.model", train)
    if inference is not None:
        longest = inference.model.max_model_len
        if longest is None or longest > limits.seq_len:
            yield _set("inference.model.max_model_len", limits.seq_len)
        if infer == 0:
            for share in _UTILIZATIONS:
                if share < inference.gpu_memory_utilization:
                    yield _set("inference.gpu_memory_utilization", share)
        elif inference.gpu_memory_utilization < 0.9:
            yield _set("inference.gpu_memory_utilization", 0.9)
    if infer == 0 and train <= _MOST_TRAIN_GPUS:
        shared = "--single-gpu" if train == 1 else f"--colocate {train}"
        text = f"--train-gpus {train} --infer-gpus 1 instead of {shared}"
        yield Change("gpus", text, lambda run: replace(run, infer=1))
    deployment = config.deployment
    if deployment.type == "multi_node":
        for times in _MORE_NODES:
            yield _more_nodes("--train-nodes", "deployment.num_train_nodes", times * deployment.num_train_nodes)
    if inference is not None and infer:
        yield from (_split(tp) for tp in _NODE_GPUS if infer % tp == 0 and tp > inference.parallel.tp)
    for gpus in _NODE_GPUS if deployment.type == "single_node" else ():
        if infer and train < gpus <= _MOST_TRAIN_GPUS:
            yield _more_gpus("--train-gpus", "deployment.num_train_gpus", gpus)
        if infer and inference is not None and infer < gpus < 8:
            yield _tensor_parallel(gpus)
    yield from _slow_changes(config.trainer.model, config.trainer.optim, "trainer.model")
    for part in (2, 4):
        if limits.seq_len // part >= 128:
            yield _shorter(limits.seq_len // part, inference is not None)


def _free_changes(model: ModelConfig, path: str) -> Iterator[Change]:
    """Changes that cost time, but leave the result as it is."""
    ac, key = model.ac, f"{path}.ac"

    def keeping(memory_gib: float) -> Change:
        value, cost = ActivationCheckpointConfig(memory_gib=memory_gib), "blocks beyond it run forward twice"
        text = f"{key}.memory_gib = {memory_gib}" + _every_block(model, path)
        return Change(key, text, lambda run: _with(run, key, value), is_free=True, cost=cost, keeping=keeping)

    if ac is None or ac.freq > 1:
        text, cost = f"{key}.freq = 1", "a second forward pass"
        yield replace(keeping(_LEAST_GIB), text=text, cost=cost, apply=lambda run: _with(run, key, _EVERY_BLOCK))
    elif ac.memory_gib is not None and ac.memory_gib > _LEAST_GIB:
        yield keeping(_LEAST_GIB)


def _every_block(model: ModelConfig, path: str) -> str:
    """The key to write besides another one of `ac`, with which all blocks may be recomputed."""
    return f", {path}.ac.freq = 1" if model.ac is not None and model.ac.freq > 1 else ""


def _slow_changes(model: ModelConfig, optim: OptimizerConfig, path: str) -> Iterator[Change]:
    if model.ac_offloading is None:
        values = {f"{path}.ac": _EVERY_BLOCK, f"{path}.ac_offloading": ActivationOffloadingConfig()}
        text, cost = f"{path}.ac_offloading.pin_memory = true", "a second forward pass, copies"
        text += _every_block(model, path)
        if model.ac is not None and model.ac.memory_gib is not None:
            text += f" instead of {path}.ac.memory_gib"
        yield Change(f"{path}.ac", text, lambda run: _with_all(run, values), cost=cost)
    if model.mlp_chunk_tokens is None and model.compile is None:
        yield replace(_set(f"{path}.mlp_chunk_tokens", _CHUNK_TOKENS), cost="MLPs run forward once more")
    if model.lora is not None:  # the next ones move all weights in each pass
        yield from _quantizing(model, path)
    if isinstance(optim, AdamWConfig) and model.lora is None:
        key = f"{path.removesuffix('model')}optim"
        small = AdamW8bitConfig(**optim.model_dump(exclude={"type"}))
        text, cost = f'{key}.type = "adamw8bit"', "moments of 8 bits: another result"
        yield Change(f"{path}.optim_cpu_offload", text, lambda run: _with(run, key, small), cost=cost)
    if not (model.optim_cpu_offload or model.fsdp_cpu_offload):
        yield replace(_set(f"{path}.optim_cpu_offload", True), cost="states cross the bus twice a step")
    if not model.fsdp_cpu_offload:
        text, cost = f"{path}.fsdp_cpu_offload = true", "weights cross it in each pass"
        text += f", {path}.optim_cpu_offload = false" if model.optim_cpu_offload else ""
        yield Change(f"{path}.optim_cpu_offload", text, _offloading(path), cost=cost)
    if model.lora is None:
        text, cost = f"{path}.lora.rank = 16", "adapters instead of all weights"
        yield Change(f"{path}.lora", text, lambda run: _with(run, f"{path}.lora", LoRAConfig()), cost=cost)
        yield from _quantizing(model, path)


def _quantizing(model: ModelConfig, path: str) -> Iterator[Change]:
    """Frozen weights in 4 bits, and adapters if there are none."""
    if model.quantization is None:
        with_lora = "" if model.lora is not None else f"{path}.lora.rank = 16, "
        text = f'{with_lora}{path}.quantization.type = "nf4"'
        cost = "frozen weights of 4 bits"
        yield Change(f"{path}.lora", text, lambda run: _with(run, path, _quantized(run, path)), cost=cost)


def _quantized(run: Variant, path: str) -> ModelConfig:
    model: ModelConfig = run.config.model if path == "model" else run.config.trainer.model
    return model.model_copy(update={"lora": model.lora or LoRAConfig(), "quantization": _NF4})


def _offloading(path: str) -> Callable[[Variant], Variant]:
    def apply(run: Variant) -> Variant:
        return _with(_with(run, f"{path}.optim_cpu_offload", False), f"{path}.fsdp_cpu_offload", True)

    return apply


def _tensor_parallel(gpus: int) -> Change:
    text = f"--infer-gpus {gpus}, inference.parallel.tp = {gpus}"

    def apply(run: Variant) -> Variant:
        changed = {"deployment.num_infer_gpus": gpus, "inference.parallel.tp": gpus, "inference.parallel.dp": 1}
        return _with_all(replace(run, infer=gpus), changed)

    return Change("infer_gpus", text, apply)


def _more_gpus(option: str, key: str, gpus: int) -> Change:
    """More GPUs of a node for the trainer."""
    return Change("gpus", f"{option} {gpus}", lambda run: replace(_with(run, key, gpus), train=gpus))


def _more_nodes(option: str, key: str, nodes: int) -> Change:
    """More nodes for the trainer."""

    def apply(run: Variant) -> Variant:
        before = getattr(run.config.deployment, key.rpartition(".")[2])
        return replace(_with(run, key, nodes), train=run.train // before * nodes)

    return Change("nodes", f"{option} {nodes}", apply)


def _split(tp: int) -> Change:
    """Fewer copies of the model on the GPUs of each server."""

    def apply(run: Variant) -> Variant:
        return _with(_with(run, "inference.parallel.tp", tp), "inference.parallel.dp", run.infer // tp)

    return Change("infer_gpus", f"inference.parallel.tp = {tp}", apply)


def _shorter(seq_len: int, has_engine: bool) -> Change:
    lengths = {"trainer.model.seq_len": seq_len, "orchestrator.seq_len": seq_len}
    text = f"seq_len = {seq_len}"
    if has_engine:  # else the engine keeps room for the model's own length
        lengths["inference.model.max_model_len"] = seq_len
        text += f", inference.model.max_model_len = {seq_len}"
    return Change("seq_len", text, lambda run: _with_all(run, lengths))


def _set(path: str, value: float | bool) -> Change:
    shown = str(value).lower() if isinstance(value, bool) else value
    return Change(path, f"{path} = {shown}", lambda run: _with(run, path, value))


def _with(run: Variant, path: str, value: object) -> Variant:
    return Variant(_replaced(run.config, path, value), run.train, run.infer)


def _with_all(run: Variant, values: Mapping[str, object]) -> Variant:
    for path, value in values.items():
        run = _with(run, path, value)
    return run


def _replaced(config: ModelT, path: str, value: object) -> ModelT:
    """A copy of `config` with another value at a dotted path, not validated."""
    head, _, rest = path.partition(".")
    return config.model_copy(update={head: _replaced(getattr(config, head), rest, value) if rest else value})


_EVERY_BLOCK = ActivationCheckpointConfig()
_NF4 = QuantizationConfig(type="nf4")

# The table, of at most 80 columns.


WIDTH = 80
_LABEL, _COLUMN, _KEY = 24, 12, 34
_GIB, _MIB = 2**30, 2**20
LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "gathered and reduced",
    "reference": "reference model",
    "critic": "critic",
    "teacher": "teacher",
    "tower": "vision tower",
    "images": "images in it, at most",
    "working": "step and CUDA graphs",
    "cache": "key-value cache",
    "copy": "copy for a checkpoint",
    "reserve": "CUDA and libraries",
}


def table_lines(title: str, estimate: Estimate, change: Found | None) -> Iterator[str]:
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
    if host := estimate.host_share:
        yield f"host memory of the trainer: {host:.0%} of this machine's"
    if estimate.disk is not None:
        yield from textwrap.wrap(f"disk: {estimate.disk}", WIDTH)
    yield from _conclusion(estimate, change)


def as_json(estimate: Estimate, change: Found | None) -> dict[str, Any]:
    """The same as plain values; sizes in bytes."""
    gpu, disk = estimate.gpu, estimate.disk
    return {
        "device": estimate.device,
        "gpu": None if gpu is None else {"name": gpu.name, "bytes": gpu.total_bytes},
        "components": [_component(part) for part in estimate.components],
        "disk": None if disk is None else {"needed_bytes": disk.needed_bytes, "free_bytes": disk.free_bytes},
        "verdict": estimate.verdict,
        "change": _as_set(change),
        "change_on_same_gpus": None if change is None else _as_set(change.on_same_gpus),
    }


def _as_set(change: Found | None) -> dict[str, Any] | None:
    return None if change is None else {"set": change.text, "verdict": change.estimate.verdict}


def verdict_line(estimate: Estimate, change: Found | None) -> str:
    """The verdict in one line, for a table of checks."""
    advice = f"; {change.text}: {change.estimate.verdict}" if change is not None else ""
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


def _conclusion(estimate: Estimate, change: Found | None) -> Iterator[str]:
    if estimate.verdict is None:
        yield "No GPU is known here: name one, as in --gpu H100 or --gpu 80 (GiB)."
        return
    yield f"{estimate.verdict}: {estimate.share:.0%} of what is available"
    if estimate.verdict == "fits":
        return
    if change is None:
        yield "No setting of this estimate makes it fit: use a smaller model or a larger GPU."
        return
    yield from _change_lines("nearest change", change)
    if change.on_same_gpus is not None:
        yield from _change_lines("on the same GPUs", change.on_same_gpus)


def _change_lines(title: str, change: Found) -> Iterator[str]:
    """The change in a line, and each of its keys with what it costs."""
    after = change.estimate
    text = f"{title}: {change.text} ({_sizes(after.components)}: {after.verdict}, {after.share:.0%})"
    yield from textwrap.wrap(text, WIDTH)
    if not any(one.cost for one in change.changes):
        return
    yield ""
    for one in change.changes:
        first, *others = one.text.split(", ")
        yield f"{first:<{_KEY}} # {one.cost}" if one.cost else first
        yield from others
    yield ""


def _component(part: Component) -> dict[str, Any]:
    return {
        "name": part.name,
        "processes": part.processes,
        "parts": dict(part.parts),
        "needed_bytes": part.needed_bytes,
        "room_bytes": part.room_bytes,
        "verdict": part.verdict,
        "sent_bytes": part.sent_bytes,
        "notes": list(part.notes),
    }

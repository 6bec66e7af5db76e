"""An `allocation_mode` as values: which part computes with what parallelism, and on how many GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NoReturn

from prime_rl.configs.areal.grammar import AllocationError, Parser, RawAllocation

MAX_UNNAMED = 2
"""Components that a reader can tell apart without names."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of an allocation."""

    data: int = 1
    """Copies; of an inference backend: servers."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def gpus(self) -> int:
        """Experts are placed on the same GPUs, so they do not multiply."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def expert_data(self) -> int:
        return self.gpus // (self.pipeline * self.expert_tensor * self.expert)


@dataclass(frozen=True, slots=True)
class Allocation:
    """One part of a run: servers, or a trainer."""

    role: Literal["inference", "training"]
    backend: str
    name: str | None
    sizes: Sizes
    text: str
    """As written, without whitespace."""


@dataclass(frozen=True, slots=True)
class AllocationMode:
    """Components with GPUs of their own. The allocations of a component share its GPUs."""

    components: tuple[tuple[Allocation, ...], ...]

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        return tuple(allocation for component in self.components for allocation in component)

    @property
    def gpus(self) -> int:
        return sum(component[0].sizes.gpus for component in self.components)

    def of_role(self, role: Literal["inference", "training"]) -> tuple[Allocation, ...]:
        return tuple(allocation for allocation in self.allocations if allocation.role == role)

    def __getitem__(self, name: str) -> Allocation:
        """The allocation of a name. Raises KeyError."""
        return {allocation.name: allocation for allocation in self.allocations if allocation.name}[name]


def parse(text: str) -> AllocationMode:
    """Parse an `allocation_mode`.

    Raises:
        AllocationError: it breaks the grammar or a rule; one line that says where.
    """
    raw = Parser(text).mode()
    _check_names(text, raw)
    components = tuple(tuple(_checked(text, each) for each in component) for component in raw)
    for component, written in zip(components, raw, strict=True):
        for allocation, its_text in zip(component[1:], written[1:], strict=True):
            if allocation.sizes.gpus != component[0].sizes.gpus:
                here, there = allocation.sizes.gpus, component[0].sizes.gpus
                _fail(text, its_text.at, f"{here} GPUs, but {component[0].text}, which shares them, has {there}")
    return AllocationMode(components)


def _check_names(text: str, components: Sequence[Sequence[RawAllocation]]) -> None:
    allocations = [allocation for component in components for allocation in component]
    for component in components:
        for each in component if len(component) > 1 else ():
            if each.name is None:
                _fail(text, each.at, f"{each.text} shares GPUs and has no name: write {_named(each)}")
    unnamed = [each for each in allocations if each.name is None]
    if unnamed and len(components) > MAX_UNNAMED:
        each = unnamed[0]
        _fail(text, each.at, f"{each.text} has no name, and there are {len(components)} parts: write {_named(each)}")
    alike = [each for each in unnamed if each.role == "training" and each.backend is None]
    if len(alike) > 1:
        _fail(text, alike[1].at, f"two trainers without backend or name: write {_named(alike[1])}")
    seen: set[str] = set()
    for each in allocations:
        if each.name is not None and each.name in seen:
            _fail(text, each.at, f"the name {each.name!r} is given twice")
        seen.update(filter(None, [each.name]))


def _named(each: RawAllocation) -> str:
    start = each.backend or ""
    return f"{start}[NAME]:{each.text.removeprefix(start).removeprefix(':')}"


def _checked(text: str, raw: RawAllocation) -> Allocation:
    if raw.role == "inference":
        sizes = Sizes(raw.dims["d"], raw.dims["t"], raw.dims["p"])
        return Allocation("inference", raw.backend or "", raw.name, sizes, raw.text)
    sizes = _plain_sizes(text, raw) if raw.experts is None else _expert_sizes(text, raw)
    is_sparse = raw.experts is not None or sizes.pipeline > 1 or sizes.expert > 1
    backend = raw.backend or ("megatron" if is_sparse else "fsdp")
    if backend == "fsdp" and is_sparse:
        _fail(text, raw.at, f"{raw.text}: fsdp takes d, t and c: write megatron for p or e")
    return Allocation("training", backend, raw.name, sizes, raw.text)


def _plain_sizes(text: str, raw: RawAllocation) -> Sizes:
    sizes = Sizes(*(raw.dims[letter] for letter in "dtpce"))
    shared = sizes.pipeline * sizes.expert
    # fsdp has its own fault for experts.
    if sizes.expert > 1 and raw.backend != "fsdp" and sizes.gpus % shared:
        _fail(text, raw.dims.at, f"{raw.text}: {sizes.gpus} GPUs are not a multiple of p * e = {shared}")
    return sizes


def _expert_sizes(text: str, raw: RawAllocation) -> Sizes:
    """Sizes of a mixture of experts, whose feed-forward layers are laid out over the GPUs of attention."""
    attention, experts = raw.dims, raw.experts
    assert experts is not None, "asked for"
    pipeline = experts.sizes.get("p", attention["p"])
    if pipeline != attention["p"]:
        _fail(text, experts.at, f"p{pipeline} of ffn and p{attention['p']} of attn differ: give the same")
    gpus = prod(attention[letter] for letter in "dtpc")
    rest = experts["e"] * experts["t"] * pipeline
    if "d" not in experts.sizes and gpus % rest:
        _fail(text, experts.at, f"the {gpus} GPUs of attn are not a multiple of e * t * p = {rest} of ffn")
    its_gpus = experts.sizes.get("d", gpus // rest) * rest
    if its_gpus != gpus:
        _fail(text, experts.at, f"attn takes {gpus} GPUs and ffn {its_gpus}: both run on the same GPUs")
    own = (attention["d"], attention["t"], attention["p"], attention["c"])
    return Sizes(*own, experts["e"], experts["t"])


def _fail(text: str, at: int, problem: str) -> NoReturn:
    raise AllocationError(f"{text!r}, character {at + 1}: {problem}")

"""Parses `allocation_mode`: `vllm:d2t4+fsdp:d4` says which part computes with what parallelism, and on how many GPUs.

The parser yields allocations as written, with their places in the text; `parse` then checks the rules between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from typing import Literal, NoReturn

# The grammar.


SERVERS = ("sglang", "vllm")
TRAINERS = ("fsdp", "megatron", "archon")
MAX_CHARACTERS = 1000
_MAX_DIGITS = 5
"""Maximum number of digits of a size."""
_LETTERS = {"inference": "dtp", "training": "dtpce", "attn": "dtpc", "ffn": "dtpe"}
_REMOVED = {
    "eval": "AReaL has removed `+eval`: leave it out, and set [orchestrator.eval]",
    "cpu": "AReaL has removed `+cpu`: leave it out",
}


class AllocationError(ValueError):
    """An `allocation_mode` that means nothing. The message says where and why, in one line."""


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes by letter, as written."""

    sizes: dict[str, int]
    at: int
    """Index of the first character in the text."""

    def __getitem__(self, letter: str) -> int:
        return self.sizes.get(letter, 1)


@dataclass(frozen=True, slots=True)
class RawAllocation:
    """One allocation as written, before its rules are checked."""

    role: Literal["inference", "training"]
    at: int
    text: str
    dims: Dims
    """Parallel sizes; for a mixture of experts, those of attention."""
    backend: str | None = None
    name: str | None = None
    experts: Dims | None = None
    """The sizes after `ffn:`."""


@dataclass
class Parser:
    """Reads a text from left to right. Whitespace is skipped."""

    text: str
    place: int = 0
    characters: list[tuple[int, str]] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARACTERS:
            raise AllocationError(f"has {len(self.text)} characters: at most {MAX_CHARACTERS} are read")
        self.characters = [(index, char) for index, char in enumerate(self.text) if not char.isspace()]
        if not self.characters:
            raise AllocationError("is empty: write for example vllm:d4+fsdp:d4")

    def mode(self) -> list[list[RawAllocation]]:
        """`a|b+c`: allocations that share GPUs, in a list of components. Raises AllocationError."""
        components = [self._component()]
        while self._take("+"):
            components.append(self._component())
        if self._rest():
            self._expected("`+`, `|` or the end")
        return components

    def _component(self) -> list[RawAllocation]:
        allocations = [self._allocation()]
        while self._take("|"):
            allocations.append(self._allocation())
        return allocations

    def _allocation(self) -> RawAllocation:
        at, first = self._at(), self.place
        word = self._word()
        if word in SERVERS:
            self._skip(word)
            name = self._name()
            self._need(":", f"`:` and sizes after {word!r}, as in {word}:d4")
            dims = self._dims("inference")
            return RawAllocation("inference", at, self._since(first), dims, word, name)
        backend = word if word in TRAINERS else None
        if backend is not None:
            self._skip(backend)
        name = self._name()
        if backend is not None or name is not None:
            self._need(":", f"`:` and sizes after {self._since(first)!r}, as in {self._since(first)}:d4")
        if self._word() == "attn" or self._rest().startswith("("):
            if name is not None:
                self._fail(f"attn:…|ffn:… cannot have a name: leave out [{name}]")
            attention, experts = self._experts()
            return RawAllocation("training", at, self._since(first), attention, backend, None, experts)
        dims = self._dims("training", is_start=backend is None and name is None)
        return RawAllocation("training", at, self._since(first), dims, backend, name)

    def _experts(self) -> tuple[Dims, Dims]:
        closes = self._take("(")
        self._need("attn:", "`attn:` and its sizes")
        attention = self._dims("attn")
        self._need("|ffn:", "`|ffn:` and its sizes")
        experts = self._dims("ffn")
        if closes:
            self._need(")", "`)`")
        return attention, experts

    def _dims(self, kind: str, is_start: bool = False) -> Dims:
        letters, at = _LETTERS[kind], self._at()
        sizes: dict[str, int] = {}
        while (char := self._rest()[:1]).isalpha():
            if char not in letters or not self._rest()[1:2].isdigit():
                self._bad_letter(char, letters, kind, is_start and not sizes)
            if char in sizes:
                self._fail(f"{char!r} is given twice: give each letter once")
            self.place += 1
            sizes[char] = self._size(char)
        if not sizes:
            what = "an allocation, such as vllm:d4 or fsdp:d4" if is_start else "a size, such as d4"
            self._expected(what)
        return Dims(sizes, at)

    def _size(self, letter: str) -> int:
        digits = ""
        while (char := self._rest()[:1]) and char in "0123456789":
            digits += char
            self.place += 1
        if not digits or digits.startswith("0") or len(digits) > _MAX_DIGITS:
            self.place -= len(digits)
            self._fail(f"{letter}{digits[:_MAX_DIGITS]}: expected a whole number from 1 to {10**_MAX_DIGITS - 1}")
        return int(digits)

    def _bad_letter(self, char: str, letters: str, kind: str, is_start: bool) -> NoReturn:
        word = self._word()
        if is_start and word in _REMOVED:
            self._fail(_REMOVED[word])
        if char.lower() in letters and char != char.lower() and self._rest()[1:2].isdigit():
            self._fail(f"{char!r}: letters are lower case: write {char.lower()!r}")
        if is_start and len(word) > 1:
            near = get_close_matches(word.lower(), (*SERVERS, *TRAINERS), 1)
            advice = f"write {near[0]}" if near else f"known are {', '.join((*SERVERS, *TRAINERS))}"
            self._fail(f"unknown backend {word[:40]!r}: {advice}")
        if char in letters:
            self._fail(f"{char!r}: expected a number after it, as in {char}2")
        self._fail(f"{char!r}: sizes of {kind} are {', '.join(letters)}")

    def _name(self) -> str | None:
        if not self._take("["):
            return None
        name = ""
        while (char := self._rest()[:1]) and char.isascii() and (char.isalnum() or char == "_"):
            name += char
            self.place += 1
        if not name or name[0].isdigit():
            self._fail(f"[{name[:40]}: a name has letters, digits and `_`, and does not begin with a digit")
        self._need("]", "`]`")
        return name

    # Characters.

    def _rest(self) -> str:
        return "".join(char for _, char in self.characters[self.place :])

    def _word(self) -> str:
        rest = self._rest()
        return rest[: next((index for index, char in enumerate(rest) if not char.isalpha()), len(rest))]

    def _at(self) -> int:
        return self.characters[self.place][0] if self.place < len(self.characters) else len(self.text)

    def _since(self, place: int) -> str:
        return "".join(char for _, char in self.characters[place : self.place])

    def _skip(self, text: str) -> None:
        self.place += len(text)

    def _take(self, text: str) -> bool:
        found = self._rest().startswith(text)
        if found:
            self._skip(text)
        return found

    def _need(self, text: str, what: str) -> None:
        if text == ":" and self._rest().startswith("."):
            self._fail("AReaL has replaced dots by colons: write sglang:d4, not sglang.d4")
        if not self._take(text):
            self._expected(what)

    def _expected(self, what: str) -> NoReturn:
        found = self._rest()[:1]
        self._fail(f"expected {what}, found {found!r}" if found else f"expected {what} at the end")

    def _fail(self, problem: str) -> NoReturn:
        raise AllocationError(f"{self.text!r}, character {self._at() + 1}: {problem}")


MAX_UNNAMED = 2
"""Components that a reader can tell apart without names."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of an allocation."""

    data: int = 1
    """Number of copies; for an inference backend, of servers."""
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

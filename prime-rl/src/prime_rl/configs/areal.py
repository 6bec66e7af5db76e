"""The keys that users of AReaL know (`allocation_mode`, `launcher`, `recover`), and what they set in our keys."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from typing import Annotated, Any, Literal, NoReturn, get_args

from pydantic import AfterValidator, Field

from prime_rl.configs.ranges import AUTO, LATEST
from prime_rl.configs.storage import KeptRunConfig
from prime_rl.configs.surface.renamed import SFT_COMMANDS
from prime_rl.utils.pydantic_config import BaseConfig, raise_faults
from prime_rl.utils.pydantic_config.base import NULL_TEXT, Derivation, note_derivation
from prime_rl.utils.pydantic_config.layers import set_at, value_at

# Parses `allocation_mode`: `vllm:d2t4+fsdp:d4` says which part computes with what parallelism, and on how many GPUs.
#
# The parser yields allocations as written, with their places in the text; `parse` then checks the rules between them.


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
    # AReaL has experts only on other backends.
    is_megatron = raw.experts is not None or sizes.pipeline > 1
    backend = raw.backend or ("megatron" if is_megatron else "fsdp")
    if backend == "fsdp" and is_megatron:
        _fail(text, raw.at, f"{raw.text}: fsdp takes d, t, c and e: write megatron for p, attn or ffn")
    return Allocation("training", backend, raw.name, sizes, raw.text)


def _plain_sizes(text: str, raw: RawAllocation) -> Sizes:
    sizes = Sizes(*(raw.dims[letter] for letter in "dtpce"))
    shared = sizes.pipeline * sizes.expert
    if sizes.expert > 1 and sizes.gpus % shared:
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


# What an `allocation_mode` means in our keys: GPUs, nodes, and the parallelism of the servers.


Keys = Mapping[str, Any]
"""Dotted keys and their values."""

GPUS_PER_NODE = 8
"""The default of `deployment.gpus_per_node`."""


def sft_keys(mode: AllocationMode, gpus_per_node: int) -> Keys:
    """The keys of an SFT run.

    Raises:
        ValueError: it asks for what SFT does not have; one line for each fault.
    """
    if mode.of_role("inference"):
        raise ValueError(f"{mode.of_role('inference')[0].text}: SFT starts no inference server: leave it out")
    trainer = _only(mode, "training")
    raise_faults(_trainer_faults(trainer))
    gpus, keys = trainer.sizes.gpus, _division_keys("model", trainer)
    if gpus <= gpus_per_node:
        return {**keys, "deployment.type": "single_node", "deployment.num_gpus": gpus}
    return {**keys, "deployment.type": "multi_node", "deployment.num_nodes": _nodes(trainer, gpus_per_node)}


def rl_keys(mode: AllocationMode, gpus_per_node: int) -> Keys:
    """The keys of an RL run. Without servers, the run uses those of `orchestrator.client.base_url`.

    Raises:
        ValueError: it asks for what RL does not have; one line for each fault.
    """
    trainer = _only(mode, "training")
    servers = _only(mode, "inference") if mode.of_role("inference") else None
    raise_faults([*_trainer_faults(trainer), *([] if servers is None else _server_faults(servers))])
    train, infer = trainer.sizes.gpus, 0 if servers is None else servers.sizes.gpus
    keys = _division_keys("trainer.model", trainer)
    if servers is not None:
        keys |= {"inference.parallel.tp": servers.sizes.tensor, "inference.parallel.dp": servers.sizes.data}
    if servers is not None and len(mode.components) == 1:
        return {**keys, **_shared_gpus(trainer, gpus_per_node)}
    if train + infer <= gpus_per_node:
        counts = {"deployment.num_train_gpus": train, "deployment.num_infer_gpus": infer}
        return {**keys, "deployment.type": "single_node", **counts}
    if servers is None:
        raise ValueError(
            f"{trainer.text}: {train} GPUs without servers, but deployment.gpus_per_node is {gpus_per_node}"
        )
    nodes = {
        "deployment.num_train_nodes": _nodes(trainer, gpus_per_node),
        "deployment.num_infer_nodes": _nodes(servers, gpus_per_node),
    }
    # A server on several nodes is started once on each.
    keys.pop("inference.parallel.dp")
    return {**keys, "deployment.type": "multi_node", **nodes}


def _division_keys(model: str, trainer: Allocation) -> dict[str, Any]:
    sizes = {"cp": trainer.sizes.context, "tp": trainer.sizes.tensor, "ep": trainer.sizes.expert}
    return {f"{model}.{name}": size for name, size in sizes.items() if size > 1}


def _shared_gpus(trainer: Allocation, gpus_per_node: int) -> Keys:
    gpus = trainer.sizes.gpus
    if gpus > gpus_per_node:
        raise ValueError(f"{trainer.text}: {gpus} shared GPUs, but deployment.gpus_per_node is {gpus_per_node}")
    ids = list(range(gpus))
    counts = {"deployment.num_train_gpus": gpus, "deployment.num_infer_gpus": gpus}
    # GPUs that are counted twice, because both parts use them.
    room = {"deployment.gpus_per_node": 2 * gpus} if 2 * gpus > gpus_per_node else {}
    return {"deployment.type": "single_node", **counts, **room, "trainer_gpu_ids": ids, "inference_gpu_ids": ids}


def conflicts(keys: Keys, data: Mapping[str, Any]) -> Iterator[str]:
    """One line for each of the keys that the raw config gives another value."""
    if "inference.parallel.tp" in keys and value_at(data, ("inference",), _ABSENT) in (None, NULL_TEXT):
        yield "allocation_mode asks for inference servers, but the config sets inference to None: remove one of them"
    for key, value in keys.items():
        given = value_at(data, tuple(key.split(".")), _ABSENT)
        if given is not _ABSENT and given not in (None, NULL_TEXT) and str(given) != str(value):
            yield f"allocation_mode makes {key} {value!r}, but the config sets {given!r}: remove one of them"


def _only(mode: AllocationMode, role: Any) -> Allocation:
    found = mode.of_role(role)
    if not found:
        raise ValueError(f"{mode.allocations[0].text} alone trains nothing: add a trainer, as in vllm:d4+fsdp:d4")
    if len(found) > 1:
        raise ValueError(f"{found[1].text}: a run has one {'trainer' if role == 'training' else 'inference backend'}")
    return found[0]


def _trainer_faults(trainer: Allocation) -> Iterator[str]:
    sizes = trainer.sizes
    if sizes.pipeline > 1:
        yield f"{trainer.text}: the trainer has no pipeline parallelism (p) yet: use d"
    elif sizes.expert_tensor > 1:
        yield f"{trainer.text}: the trainer has no tensor parallelism (t) of experts: use e"
    elif trainer.backend != "fsdp":
        yield f"{trainer.text}: the trainer is FSDP: write fsdp instead of {trainer.backend}"


def _server_faults(servers: Allocation) -> Iterator[str]:
    if servers.backend != "vllm":
        yield f"{servers.text}: {servers.backend} is not supported: write vllm instead"
    if servers.sizes.pipeline > 1:
        yield f"{servers.text}: inference has no pipeline parallelism (p): use d and t"


def _nodes(allocation: Allocation, gpus_per_node: int) -> int:
    gpus = allocation.sizes.gpus
    if gpus % gpus_per_node:
        raise ValueError(
            f"{allocation.text}: {gpus} GPUs are not a whole number of nodes with {gpus_per_node} GPUs "
            "(deployment.gpus_per_node)"
        )
    return gpus // gpus_per_node


RecoverMode = Literal["disabled", "off", "on", "auto", "resume", "fault"]
Launcher = Literal["local", "ray", "slurm"]

RESUME_STEPS = {"on": AUTO, "auto": AUTO, "resume": LATEST}
"""`ckpt.resume_step` for each mode of recovery. Other modes leave the key alone."""
_KEYS: Mapping[str, Callable[[AllocationMode, int], Keys]] = {
    **dict.fromkeys(SFT_COMMANDS, sft_keys),
    "rl": rl_keys,
}
_CHECKPOINTS = {**dict.fromkeys(SFT_COMMANDS, ("ckpt",)), "rl": ("ckpt", "trainer.ckpt")}
_ABSENT = object()


def _parsed(text: str) -> str:
    parse(text)
    return text


class RecoverConfig(BaseConfig):
    """How a start uses the checkpoints of its run, and how often a failed run is started again."""

    mode: RecoverMode = "disabled"
    """`auto` and `on` continue from the newest checkpoint if there is one. `resume` requires one. `fault` continues
    only after a failure of this launch. `disabled` and `off` do none of it. An explicit `ckpt.resume_step` wins."""

    retries: int = Field(3, ge=0, le=100)
    """With `auto`, `on` and `fault`: how often a run that fails is started again, from its newest checkpoint."""

    @property
    def starts_again(self) -> int:
        return self.retries if self.mode in ("on", "auto", "fault") else 0


class LaunchedConfig(KeptRunConfig):
    """A config that a launcher starts. Read by the commands."""

    allocation_mode: Annotated[str, AfterValidator(_parsed)] | None = None
    """GPUs and parallelism in AReaL's notation, such as `vllm:d4+fsdp:d4`; sets `deployment` and
    `inference.parallel`. None leaves these keys as they are."""

    launcher: Launcher | None = None
    """Launcher of the run: this machine, Ray or Slurm. Commands of the others refuse the config. None allows all."""

    recover: RecoverConfig = RecoverConfig()
    """Restarts from checkpoints, with AReaL's keys."""

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        return super().prepare(with_derived_keys(cls.component, data))


def with_derived_keys(component: str, data: dict[str, Any]) -> dict[str, Any]:
    """Raw data of a run with what `allocation_mode` and `recover.mode` set.

    Raises:
        ValueError: the run cannot do what they ask for, or other keys contradict them; one line for each fault.
    """
    return _with_recovery(component, _with_allocation(component, data))


def _with_allocation(component: str, data: dict[str, Any]) -> dict[str, Any]:
    text = data.get("allocation_mode")
    per_node = str(value_at(data, ("deployment", "gpus_per_node"), GPUS_PER_NODE))
    if not isinstance(text, str) or text == NULL_TEXT or not (per_node.isdecimal() and per_node.strip("0")):
        return data
    try:
        mode = parse(text)
    except AllocationError:
        return data  # the field's own validator reports it
    try:
        keys = _KEYS[component](mode, int(per_node))
    except ValueError as error:
        raise ValueError("\n".join(f"allocation_mode: {line}" for line in str(error).splitlines())) from error
    if lines := list(conflicts(keys, data)):
        raise ValueError("\n".join(lines))
    return _with_keys(data, keys, "allocation_mode")


def _with_recovery(component: str, data: dict[str, Any]) -> dict[str, Any]:
    mode = value_at(data, ("recover", "mode"))
    if mode not in get_args(RecoverMode) or mode in ("disabled", "off"):
        return data
    saved = (value_at(data, tuple(key.split("."))) for key in _CHECKPOINTS[component])
    if all(section in (None, NULL_TEXT) for section in saved):
        raise ValueError(f"recover.mode = {mode!r} needs [ckpt]: without checkpoints there is nothing to continue from")
    step = RESUME_STEPS.get(mode)
    return data if step is None else _with_keys(data, {"ckpt.resume_step": step}, "recover.mode")


def _with_keys(data: dict[str, Any], keys: Keys, because: str) -> dict[str, Any]:
    """The data with keys that it lacks."""
    table = copy.deepcopy(data)
    for key, value in keys.items():
        path = tuple(key.split("."))
        if value_at(table, path, _ABSENT) is _ABSENT:
            note_derivation(Derivation(key, because))
            set_at(table, path, value)
    return table

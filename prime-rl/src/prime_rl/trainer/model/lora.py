"""Low-rank adapters (LoRA, Hu et al. 2021): `W x + alpha / rank * B A x` with W frozen and A and B trained.

DoRA (Liu et al. 2024) also trains the length of each row of `W + alpha / rank * B A`. PiSSA (Meng et al. 2024) trains
the principal part of W: `W x + alpha / rank * (B A - B0 A0) x`, where A and B start at A0 and B0. W stays as it is.

An adapted module keeps its class, weights and parameter names, and gets a submodule `lora`: a `LowRank`, or one per
projection for stacked experts. FSDP, activation checkpointing and exports therefore work as for the plain model.
Exports are in PEFT's format, which PEFT and vLLM load directly.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Protocol, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key, revert_weight_conversion

from prime_rl.checks.adapters import ADAPTER_TENSORS, PROJECTIONS, ModulePaths, adapter_folder, read_settings
from prime_rl.configs.model import ALL_LINEAR, STACKED_EXPERTS, LoRAConfig, matches
from prime_rl.run.process import own_beats
from prime_rl.trainer.model.vision import language_modules, trainable_modules, vision_of
from prime_rl.trainer.process.errors import ModelError
from prime_rl.transport.language_part import part_of
from prime_rl.transport.loading import Index, float32_names, full_tensor, has_score, index_of, local, put, put_own
from prime_rl.utils.errors import StartFault
from prime_rl.utils.logger import get_logger

EXPERT_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacked expert weights, and the projections that are concatenated in each of them."""

_MODULES = dict[str, nn.Module]
ModuleT = TypeVar("ModuleT", bound=nn.Module)
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class SelectedModules:
    """The selected modules by path: linear layers and stacked experts to adapt, and modules to train in full."""

    linear: dict[str, nn.Linear]
    experts: _MODULES
    saved: _MODULES
    """Modules to train in full. Each has parameters."""


def select_modules(model: PreTrainedModel, config: LoRAConfig) -> SelectedModules:
    """Select the modules in `target_modules` and `modules_to_save`. If both match a module, it is trained in full.

    Raises:
        ModelError: a name matches no module, or a module that cannot be adapted.
    """
    modules = trainable_modules(model)
    owners = {path: module for path, module in modules if any(True for _ in module.parameters(False))}
    linear = {path: module for path, module in owners.items() if is_plain_linear(module)}
    experts = {path: module for path, module in owners.items() if is_stacked(module)}
    head = model.get_output_embeddings()
    bypassed = {path for path in linear if _is_bypassed(path, model)}
    all_linear = {
        path
        for path, module in linear.items()
        if module is not head and path not in bypassed and not _is_refused_by_peft(path, model)
    }
    paths = ModulePaths(owners, linear, all_linear, experts, bypassed)
    if fault := paths.fault(config):
        raise ModelError(f"model.{fault}")
    adapted, stacks, saved = paths.adapted(config), paths.adapted_stacks(config), paths.saved(config)
    chosen = SelectedModules(
        {path: module for path, module in linear.items() if path in adapted},
        {path: module for path, module in experts.items() if path in stacks},
        {path: module for path, module in owners.items() if path in saved},
    )
    of_tower = owners.keys() - dict(language_modules(model)).keys()
    if (vision := vision_of(model)) and vision.tower_lr is not None and not of_tower & (adapted | saved):
        leaves = {path.rpartition(".")[2] for path in linear.keys() & of_tower}
        raise ModelError(
            f"model.vision.tower_lr: model.lora.target_modules matches nothing of the tower, which has "
            f'{", ".join(sorted(leaves))}: add some, or "{ALL_LINEAR}", or remove tower_lr'
        )
    for path, layer in chosen.linear.items():
        _check_linear(path, layer, owners)
    for path, module in chosen.experts.items():
        _check_experts(path, module, model, config)
    return chosen


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` computes `W x + b`. Subclasses may not: routers return choices, and some layers take groups."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_stacked(module: nn.Module) -> bool:
    """Whether `module` stores the weights of several experts in one tensor.

    Depthwise convolutions and vectors that are kept ready for broadcasting have three dimensions, too.
    """
    return any(parameter.ndim == 3 and 1 not in parameter.shape for parameter in module.parameters(recurse=False))


def is_routed(module: nn.Module) -> bool:
    """Whether `module` is a stack of experts that takes hidden states, and each token's experts and their weights."""
    return is_stacked(module) and len(inspect.signature(type(module).forward).parameters) == 1 + 3


def _check_linear(path: str, module: nn.Linear, owners: _MODULES) -> None:
    for other_path, other in owners.items():
        if other is not module and any(weight is module.weight for weight in other.parameters(recurse=False)):
            raise ModelError(
                f"model.lora.target_modules: {path} shares its weight with {other_path}, so it cannot be adapted "
                f'alone; to train both, set model.lora.modules_to_save = ["{path}"] and remove it from target_modules'
            )


def _is_bypassed(path: str, model: PreTrainedModel) -> bool:
    """Whether the module that holds the layer at `path` computes with the layer's weight itself.

    Kernels of state spaces take the weights of some layers, such as Mamba's `dt_proj` and `out_proj`. Some of them run
    on GPUs only, so that trying the layer out here would not tell. Mamba 2 passes `outproj_weight` to a kernel that
    `StateLayers` keeps it from, if it is adapted.
    """
    parent, _, name = path.rpartition(".")
    owner_class: Any = type(model.get_submodule(parent))  # Any: mypy takes no class of modules for hashable
    return _reads_weight(owner_class, name)


@functools.lru_cache
def _reads_weight(owner_class: Any, name: str) -> bool:
    read = rf"(?<!outproj_weight=)\bself\.{name}\.weight\b(?!\.(dtype|device|shape))"
    return re.search(read, source_of(owner_class)) is not None


_MAMBA_FAMILIES = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Families whose `out_proj` PEFT refuses to adapt, because a kernel may take its weight."""


def _is_refused_by_peft(path: str, model: PreTrainedModel) -> bool:
    return path.endswith(".out_proj") and model.config.model_type in _MAMBA_FAMILIES


@functools.lru_cache
def source_of(module_class: type[nn.Module]) -> str:
    """The code of a class. Cached: Python parses the whole file for it, and all blocks have the same few classes."""
    try:
        return inspect.getsource(module_class)
    except (OSError, TypeError):  # code that came from no file
        return ""


def _check_experts(path: str, module: nn.Module, model: PreTrainedModel, config: LoRAConfig) -> None:
    if config.use_dora:
        raise ModelError(
            f"model.lora.use_dora: {path} is a stack of experts, which have no DoRA; remove {STACKED_EXPERTS} from "
            "target_modules"
        )
    if config.init == "pissa":
        raise ModelError(
            f"model.lora.init = 'pissa': {path} is a stack of experts, which are not decomposed; remove "
            f"{STACKED_EXPERTS} from target_modules"
        )
    wanted = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    is_known = all(getattr(module, name, None) is value for name, value in wanted.items())
    if not (is_known and _has_hub_names(path, module, model)):
        raise ModelError(
            f"model.lora.target_modules: {path} ({type(module).__name__}) stores its experts in a format that is not "
            f"supported; remove {STACKED_EXPERTS} from target_modules"
        )


def _has_hub_names(path: str, module: nn.Module, model: PreTrainedModel) -> bool:
    """Whether the hub format names each expert's projections the way its adapter will be named."""
    state = {f"{path}.{name}": torch.empty_like(getattr(module, name), device="meta") for name in EXPERT_PROJECTIONS}
    return {f"{path}.0.{part}.weight" for part in PROJECTIONS} <= revert_weight_conversion(model, state).keys()


_SEED = 0


class LowRank(nn.Module):
    """Computes `scale * B A x`, which is zero before training.

    A [*stack, rank, in] and B [*stack, out, rank] have the dtype and the device of the adapted weight, and no values
    before `draw`. `stack` is empty or the number of experts. `magnitude` [out] is DoRA's, the frozen A0 and B0 are
    PiSSA's.
    """

    is_on = True
    """Whether the layer computes with its adapter."""

    between: Callable[[Tensor], Tensor] | None = None
    """What becomes of `A x` before B, where processes divide one of the two."""

    def __init__(self, config: LoRAConfig, path: str, weight: Tensor, out_features: int) -> None:
        super().__init__()
        *stack, _, in_features = weight.shape
        self.config = config
        self.rank, self.alpha, self.scale = config.rank_of(path), config.alpha_of(path), config.scale_of(path)
        self.exported_rank = self.rank * config.ranks_per_export
        self.A = nn.Parameter(weight.new_empty(*stack, self.rank, in_features))
        self.B = nn.Parameter(weight.new_empty(*stack, out_features, self.rank))
        self.A0, self.B0 = (
            nn.Parameter(torch.empty_like(each), requires_grad=False) if config.init == "pissa" else None
            for each in (self.A, self.B)
        )
        self.magnitude = nn.Parameter(weight.new_empty(out_features)) if config.use_dora else None
        self.dropout = nn.Dropout(config.dropout)

    start: tuple[Tensor, Tensor] | None = None
    """The whole A and B that it starts with, instead of random ones."""

    @torch.no_grad()
    def approximate(self, difference: Tensor) -> None:
        """Start with the product of this rank that is nearest to `difference` [out, in]: what quantization took from
        the weight (LoftQ, Li et al. 2023, with one iteration), or the weight itself."""
        u, s, v = torch.linalg.svd(difference, full_matrices=False)
        roots = (s[: self.rank] / self.scale).sqrt()
        a, b = torch.zeros(self.A.shape), torch.zeros(self.B.shape)
        a[: len(roots)] = roots[:, None] * v[: self.rank]
        b[:, : len(roots)] = u[:, : self.rank] * roots
        self.start = a, b

    def share_start(self, owner: int) -> None:
        """Start as in process `owner`. Collective."""
        a, b = self.start or (torch.empty(self.A.shape), torch.empty(self.B.shape))
        dist.broadcast(a, src=owner)
        dist.broadcast(b, src=owner)
        self.start = a, b

    @torch.no_grad()
    def draw(self, generator: torch.Generator, layer: nn.Module | None) -> None:
        """Initialize A uniformly in ±1/sqrt(in) (Kaiming with a = sqrt(5)) and B with zeros, or both with their start,
        and the lengths with those of the rows of the `layer`'s weight, which is sharded like them."""
        bound = 1 / math.sqrt(self.A.shape[-1])
        # Drawn whole and on the CPU, so that values do not depend on device or number of processes.
        a, b = self.start or (
            torch.empty(self.A.shape).uniform_(-bound, bound, generator=generator),
            torch.zeros(()).expand(self.B.shape),
        )
        self.start = None
        if self.A0 is not None and self.B0 is not None:
            put_own(self.A0, a)
            put_own(self.B0, b)
            # They may be in the compute dtype. A and B start at the same numbers, so that the model is that of the hub.
            a, b = a.to(self.A0.dtype), b.to(self.B0.dtype)
        put_own(self.A, a)
        put_own(self.B, b)
        if self.magnitude is not None and layer is not None:
            local(self.magnitude).copy_(_row_norms(local(cast("Tensor", layer.weight))))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        output = self.product(self.dropout(x), local(self.A), local(self.B))
        if self.A0 is None or self.B0 is None:
            return output
        # The same operations, so that both are equal before training.
        return output - self.product(x, local(self.A0), local(self.B0))

    def product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """`scale * B A x`."""
        low = nn.functional.linear(x, a)
        return nn.functional.linear(low if self.between is None else self.between(low), b) * self.scale

    def adapted(self, output: Tensor, x: Tensor, layer: nn.Linear) -> Tensor:
        """The output of the adapted `layer`, whose own is `output` for the input `x`."""
        changed = output + self(x)
        if self.magnitude is None:
            return changed
        # A quantized layer, which has no such weight, has no DoRA.
        stretch = (self.magnitude.float() / self._norms(layer.weight)).to(changed.dtype)
        return changed * stretch if layer.bias is None else (changed - layer.bias) * stretch + layer.bias

    @torch.no_grad()
    def _norms(self, weight: Tensor) -> Tensor:
        """Lengths of the rows of `weight + scale * B A`, which the paper treats as constants.

        They are found without that sum, which would be as large as the weight: `|w + s A'b|^2` is
        `|w|^2 + 2 s (A w)'b + s^2 b'(A A')b`.
        """
        a, b = self.A.float(), self.B.float()
        projected = nn.functional.linear(weight, self.A.to(weight.dtype)).float()
        cross = (projected * b).sum(-1) * (2 * self.scale)
        own = (b @ (a @ a.t()) * b).sum(-1) * self.scale**2
        return (_row_norms(weight).square() + cross + own).clamp(min=0).sqrt()

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """The full `weight` that computes what it and the adapter compute, float32 [*stack, out, in]. Collective."""
        changed = weight.float() + self.exported_B().float() @ self.exported_A().float() * self.scale
        return changed if self.magnitude is None else _stretched(changed, full_tensor(self.magnitude))

    # A and B of an adapter that computes the same on the weight of the hub:

    def exported_A(self) -> Tensor:
        """[*stack, exported rank, in]. Collective."""
        a = full_tensor(self.A)
        return a if self.A0 is None else torch.cat([a, full_tensor(self.A0).to(a)])

    def exported_B(self) -> Tensor:
        """[*stack, out, exported rank]. Collective."""
        b = full_tensor(self.B)
        return b if self.B0 is None else torch.cat([b, -full_tensor(self.B0).to(b)], dim=1)


def _row_norms(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)


def _stretched(rows: Tensor, lengths: Tensor) -> Tensor:
    return rows * (lengths.to(rows) / _row_norms(rows))[:, None]


class _StackedExperts(Protocol):
    """A module of stacked experts (one weight tensor per projection) after adapters have been added."""

    down_proj: Tensor
    lora: nn.ModuleDict
    first_expert: int
    """Number of the first expert, of a process that holds some of them."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor: ...


def add_adapters(model: PreTrainedModel, config: LoRAConfig | None, compute_dtype: torch.dtype) -> PreTrainedModel:
    """Freeze `model` except for `modules_to_save`, and add the adapters in `config`, without values. None changes
    nothing.

    Frozen weights are only read in the compute dtype, so they are stored in it if it is smaller than their own. Those
    that Transformers loads in float32 stay in it, because exports do too.

    Raises:
        ModelError: a target name matches no module, or a module that cannot be adapted.
    """
    if config is None:
        return model
    if has_score(model) and not any(matches(pattern, "score") for pattern in config.modules_to_save):
        # As PEFT does for its task SEQ_CLS: the head is new.
        config = config.model_copy(update={"modules_to_save": [*config.modules_to_save, "score"]})
    chosen = select_modules(model, config)
    model.requires_grad_(False)
    for module in chosen.saved.values():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(True)
    for path, module in chosen.linear.items():
        module.lora = LowRank(config, path, module.weight, module.weight.shape[0])
        module.register_forward_hook(_adapt)
    for path, module in chosen.experts.items():
        _adapt_experts(path, module, config)
    in_float32 = float32_names(model, compute_dtype)
    for name, parameter in model.named_parameters():
        is_larger = compute_dtype.itemsize < parameter.dtype.itemsize
        if not parameter.requires_grad and is_larger and not in_float32.search(name):
            parameter.data = parameter.data.to(compute_dtype)
    return model


def draw_adapters(model: nn.Module) -> None:
    """Initialize the adapters of a sharded model: first those of linear layers, then those of experts."""
    generator = torch.Generator().manual_seed(_SEED)
    adapted = [module for module in model.modules() if isinstance(getattr(module, "lora", None), nn.Module)]
    _decompose([module for module in adapted if isinstance(module.lora, LowRank) and module.lora.A0 is not None])
    for module in adapted:
        if isinstance(module.lora, LowRank):
            module.lora.draw(generator, module)
    for module in adapted:
        for part in module.lora.values() if isinstance(module.lora, nn.ModuleDict) else ():
            cast("LowRank", part).draw(generator, None)


@torch.no_grad()
def _decompose(layers: Sequence[nn.Module]) -> None:
    """Find PiSSA's starts of the adapters of `layers`. Each process decomposes some of the weights. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for first in range(0, len(layers), size):
        some = layers[first : first + size]
        own: Tensor | None = None
        for owner, layer in enumerate(some):
            whole = full_tensor(cast("Tensor", layer.weight))
            own = whole if owner == rank else own
        if own is not None:
            cast("LowRank", some[rank].lora).approximate(own.float())
        for owner, layer in enumerate(some):
            cast("LowRank", layer.lora).share_start(owner)
        own_beats().tick()


@torch.no_grad()
def load_adapter(model: PreTrainedModel, path: Path, *, is_main: bool) -> None:
    """Continue the adapter at `path`: fill the adapters of the sharded `model`, and its modules trained in full.

    Modules that the file does not have start as in a new run; a warning names them. Process `is_main` logs.

    Raises:
        ModelError: the file holds tensors of other modules, or of other shapes.
    """
    folder, _, state = _read_adapter("model.lora.path", path, model)
    fresh: list[str] = []
    for name, tensor in _trained_tensors(model):
        for own, expert in _hub_names(name, tensor.shape):
            given = state.pop(own, None)
            shape = tensor.shape if expert is None else tensor.shape[1:]
            if given is None:
                fresh.append(own.partition(".lora_")[0])
            elif given.shape != shape:
                raise ModelError(f"{folder}: {own} has shape {list(given.shape)}, and this model's {list(shape)}")
            elif expert is None:
                put_own(tensor, given)
            else:
                at, *rest = index_of(tensor)
                if at.start <= expert < at.stop:
                    put(tensor, (slice(expert, expert + 1), *rest), given[None])
    if state:
        raise ModelError(
            f"{folder} has {len(state)} tensors that this config does not train, such as {next(iter(state))}: name "
            "their modules in model.lora.target_modules or model.lora.modules_to_save, or merge it with model.adapter"
        )
    if not is_main:
        return
    get_logger().info(f"LoRA: continues the adapter {folder}")
    if fresh:
        modules = list(dict.fromkeys(fresh))
        get_logger().warning(
            f"{folder} has no adapter for {len(modules)} modules, such as {modules[0]}: they start new"
        )


@dataclass(frozen=True, slots=True)
class Merge:
    """An adapter that is added to the weights of a model, in float32, while they are read."""

    folder: Path
    updates: Mapping[str, Sequence[tuple[Index, Tensor, Tensor, float]]]
    """By the name of a weight: a place in it, A, B and their scale."""
    saved: Mapping[str, Tensor]
    """Values of modules that were trained in full."""
    lengths: Mapping[str, Tensor]
    """DoRA's lengths of the rows, by the name of a weight."""

    @classmethod
    def of(cls, model: PreTrainedModel, path: Path) -> Merge:
        """Read the adapter at `path`, for a `model` that may be on the meta device.

        Raises:
            ModelError: a tensor fits no weight of the model.
        """
        folder, scales, state = _read_adapter("model.adapter", path, model)
        modules = dict(model.named_modules())
        updates: dict[str, list[tuple[Index, Tensor, Tensor, float]]] = {}
        lengths: dict[str, Tensor] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in [name for name in state if name.endswith(".lora_A.weight")]:
            a, b = state.pop(name), state.pop(name.replace(".lora_A.", ".lora_B."), None)
            module = name.removesuffix(".lora_A.weight")
            weight, at = _place_of(modules, module)
            shape = None if weight is None else parameters[weight][at].shape[-2:]
            if weight is None or b is None or (b.shape[0], a.shape[1]) != shape or b.shape[1] != a.shape[0]:
                raise ModelError(f"model.adapter = {path}: {name} fits no weight of this model")
            updates.setdefault(weight, []).append((at, a, b, scales[module]))
            if (magnitude := state.pop(f"{module}.lora_magnitude_vector", None)) is not None:
                lengths[weight] = magnitude
        for name, value in state.items():
            if name not in parameters or parameters[name].shape != value.shape:
                raise ModelError(f"model.adapter = {path}: {name} fits no weight of this model")
        return cls(folder, updates, state, lengths)

    @property
    def changed(self) -> frozenset[str]:
        """Names of the weights that it changes."""
        return frozenset((*self.updates, *self.saved))

    def change(self, name: str, values: Tensor, index: Index) -> Tensor:
        """The merged values of parameter `name` at `index`, whose values in the checkpoint are `values`."""
        if name in self.saved:
            return self.saved[name][index].to(values.dtype)
        for at, a, b, scale in self.updates.get(name, ()):
            # Whole products, so that values do not depend on the number of processes.
            delta = b.float() @ a.float() * scale
            if len(index) == 2:
                changed = values.float() + delta[index]
                if name in self.lengths:
                    if changed.shape[1] != delta.shape[1]:
                        raise ModelError(f"{self.folder} is DoRA, which needs whole rows of {name}: remove model.tp")
                    changed = _stretched(changed, self.lengths[name][index[0]])
                values = changed.to(values.dtype)
                continue
            (expert, rows), (own_experts, own_rows, columns) = at, index
            # FSDP divides the rows of experts where there are fewer experts than processes.
            start, stop = max(rows.start, own_rows.start), min(rows.stop, own_rows.stop)
            if own_experts.start <= expert.start < own_experts.stop and start < stop:
                part = values[expert.start - own_experts.start, start - own_rows.start : stop - own_rows.start]
                part.copy_(part.float() + delta[start - rows.start : stop - rows.start, columns])
        return values


def _read_adapter(key: str, path: Path, model: PreTrainedModel) -> tuple[Path, Mapping[str, float], dict[str, Tensor]]:
    """The folder, the scales of the layers, and the tensors, both by their names in the model.

    Raises:
        ModelError: the adapter cannot be read, or changes one of two weights that the model shares.
    """
    try:
        folder = adapter_folder(path)
        settings = read_settings(folder)
        tensors = load_file(folder / ADAPTER_TENSORS)
    except (StartFault, SafetensorError, OSError) as error:
        raise ModelError(f"{key} = {path}: {error}") from error
    part = part_of(model)
    own = (lambda name: name) if part is None else part.module_in_part
    given = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    state = {own(name): tensor for name, tensor in given.items()}
    # Patterns match the names of the file, which are those of the checkpoint's class.
    layers = {name.partition(".lora_A.")[0] for name in given if ".lora_A." in name}
    scales = {own(layer): settings.scale_of(layer) for layer in layers}
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in (names for names in names_of.values() if len(names) > 1):
        # PEFT trains a head in `modules_to_save` apart from the embeddings that it shares its weight with.
        values = [state[name] for name in names if name in state]
        is_one = len(values) == len(names) and all(value.equal(values[0]) for value in values)
        adapted = [name for name in names if f"{name.removesuffix('.weight')}.lora_A.weight" in state]
        if adapted or (values and not is_one):
            shared = ", ".join(names)
            raise ModelError(f"{key} = {path}: it changes only one of {shared}, which share their weight")
    return folder, scales, state


def _place_of(modules: Mapping[str, nn.Module], path: str) -> tuple[str | None, Index]:
    """The name of the weight that an adapter at `path` updates, and the place in it.

    It is a linear layer's, or one expert's part of a stacked weight; None if there is none.
    """
    if (module := modules.get(path)) is not None:
        return (f"{path}.weight" if isinstance(module, nn.Linear) else None), ()
    experts, _, rest = path.rpartition(f".{STACKED_EXPERTS}.")
    index, _, part = rest.partition(".")
    stacked = modules.get(f"{experts}.{STACKED_EXPERTS}")
    for name, parts in EXPERT_PROJECTIONS.items():
        weight = getattr(stacked, name, None)
        if part in parts and index.isdigit() and isinstance(weight, Tensor) and int(index) < len(weight):
            rows = weight.shape[-2] // len(parts)
            start = rows * parts.index(part)
            place = (slice(int(index), int(index) + 1), slice(start, start + rows))
            return f"{experts}.{STACKED_EXPERTS}.{name}", place
    return None, ()


def lost_in_peft(model: PreTrainedModel) -> str | None:
    """What PEFT does not load of an adapter; None if it loads all.

    These are experts of a family whose format it does not know, layers that it refuses to adapt, and layers whose names
    it takes for the hub's.
    """
    if has_adapted_experts(model) and not _knows_experts(model):
        return "adapted experts"
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    for path in (path for path, module in model.named_modules() if part_of(model) is None and hasattr(module, "lora")):
        name = f"{path}.lora_A.weight"
        if _is_refused_by_peft(path, model) or rename_source_key(name, renamings, [])[0] != name:
            return path
    return None


def _knows_experts(model: PreTrainedModel) -> bool:
    """Whether PEFT converts adapters of the experts of this family to its own format."""
    return part_of(model) is None and _MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type) == "qwen2_moe"


def loraplus_parameters(model: nn.Module) -> tuple[float, set[nn.Parameter]]:
    """LoRA+ (Hayou et al. 2024): the ratio of the higher learning rate to the other, and the parameters that have it.

    These are B and, as in PEFT, all vectors.
    """
    adapters = [module for module in model.modules() if isinstance(module, LowRank)]
    if not adapters or (ratio := adapters[0].config.loraplus_lr_ratio) == 1:
        return 1.0, set()
    vectors = {parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim == 1}
    return ratio, vectors.union(adapter.B for adapter in adapters)


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` has adapters."""
    return any(isinstance(module, LowRank) for module in model.modules())


def log_adapters(model: PreTrainedModel) -> None:
    """Log the number of adapters and of trained parameters."""
    count = sum(isinstance(module, LowRank) for module in model.modules())
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained, total = sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)
    get_logger().info(f"LoRA: {count} adapters, {trained:,} of {total:,} parameters trained ({trained / total:.2%})")
    if lost := lost_in_peft(model):
        name = type(model).__name__
        get_logger().warning(f"LoRA: PEFT does not load {lost} of {name}; exports hold them merged into the weights")


def frozen_names(model: nn.Module) -> set[str]:
    """The names of weights that come with the model, so that checkpoints do not hold them. PiSSA's starts they hold:
    other machines would find slightly different ones."""
    weights = model.named_parameters(remove_duplicate=False)
    return {name for name, weight in weights if not (weight.requires_grad or is_start(name))}


def is_start(name: str) -> bool:
    """Whether the parameter of this name holds where an adapter started: it is frozen, but no weight of the model."""
    return name.endswith((".lora.A0", ".lora.B0"))


def adapter_parameter_names(model: nn.Module) -> set[str]:
    """Names of the adapters' parameters, which are not part of the model's hub format."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, LowRank)
        for name, _ in module.named_parameters()
    }


def merge_adapter(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Return the full `weight` of parameter `name` with its adapter, if there is one. Collective."""
    path, _, leaf = name.rpartition(".")
    lora = getattr(model.get_submodule(path), "lora", None)
    if isinstance(lora, LowRank) and leaf == "weight":
        return lora.merged(weight)
    if isinstance(lora, nn.ModuleDict) and leaf in EXPERT_PROJECTIONS:
        parts = _parts_of(lora, leaf)
        own = weight.chunk(len(parts), dim=-2)
        return torch.cat([part.merged(rows) for part, rows in zip(parts, own, strict=True)], dim=-2)
    return weight


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Let `model` compute without its adapters inside the block, as the model that they were added to."""
    adapters = [module for module in model.modules() if isinstance(module, LowRank)]
    try:
        for adapter in adapters:
            adapter.is_on = False
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def _adapt(module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    lora = module.lora
    assert isinstance(lora, LowRank)
    return lora.adapted(output, inputs[0], module) if lora.is_on else output


def _adapt_experts(path: str, experts: nn.Module, config: LoRAConfig) -> None:
    loras = nn.ModuleDict()
    experts.lora = loras
    cast("_StackedExperts", experts).first_expert = 0
    for name, parts in EXPERT_PROJECTIONS.items():
        weight = getattr(experts, name)
        for part in parts:
            loras[part] = LowRank(config, path, weight, weight.shape[-2] // len(parts))
    experts.forward = MethodType(_experts_forward, experts)


def _parts_of(loras: nn.ModuleDict, name: str) -> list[LowRank]:
    """The adapters of the stacked weight `name`."""
    return [cast("LowRank", loras[part]) for part in EXPERT_PROJECTIONS[name]]


def _experts_forward(
    experts: _StackedExperts, hidden_NH: Tensor, top_k_index_NK: Tensor, top_k_weights_NK: Tensor
) -> Tensor:
    """Forward pass of Transformers' stacked experts, with each expert's adapters applied separately.

    Merging adapters into the weights would need no loop over experts, but bfloat16 rounding would lose small updates.
    """
    order = top_k_index_NK.flatten().argsort(stable=True)
    token = order // top_k_index_NK.shape[1]
    counts = top_k_index_NK.flatten().bincount(minlength=len(experts.down_proj)).tolist()
    seed = _seed_of_masks(experts)
    gate_up, down = (_expert_projections(experts, name, seed) for name in ("gate_up_proj", "down_proj"))
    outputs = [
        down_of(experts._apply_gate(gate_up_of(x)))
        for x, gate_up_of, down_of in zip(hidden_NH[token].split(counts), gate_up, down, strict=True)
    ]
    weighted = torch.cat(outputs) * top_k_weights_NK.flatten()[order, None]
    return torch.zeros_like(hidden_NH).index_add_(0, token, weighted.to(hidden_NH.dtype))


def _seed_of_masks(experts: _StackedExperts) -> int | None:
    """A seed for the dropout of the experts' adapters; None without dropout.

    Processes that divide experts hold different numbers of tokens. Each takes one number from the random state, so that
    those that compute the same tokens otherwise keep drawing the same masks, and an expert has the mask that it has in
    a process with all experts.
    """
    dropouts = [cast("LowRank", part).dropout for part in experts.lora.values()]
    is_random = any(each.training and each.p > 0 for each in dropouts)
    return int(torch.randint(2**62, ())) if is_random else None


def _seeded_dropout(x: Tensor, p: float, seed: int) -> Tensor:
    kept = torch.empty_like(x).bernoulli_(1 - p, generator=torch.Generator(x.device).manual_seed(seed))
    return x * kept / (1 - p) if p < 1 else x * kept


def _expert_projections(experts: _StackedExperts, name: str, seed: int | None) -> list[partial[Tensor]]:
    """For each expert, a function that projects its tokens with weight `name` and its adapters."""
    loras = _parts_of(experts.lora, name)
    first = PROJECTIONS.index(EXPERT_PROJECTIONS[name][0])
    # Unbind once instead of indexing per expert, so that the backward pass is linear in the number of experts.
    weights = getattr(experts, name).unbind()
    factors = [zip(local(lora.A).unbind(), local(lora.B).unbind(), strict=True) for lora in loras]
    numbers = range(experts.first_expert, experts.first_expert + len(weights))
    seeds = [None if seed is None else seed + len(PROJECTIONS) * number + first for number in numbers]
    return [
        partial(_project, weight, loras, own, mask) for mask, weight, *own in zip(seeds, weights, *factors, strict=True)
    ]


def _project(
    weight: Tensor, loras: list[LowRank], factors: list[tuple[Tensor, Tensor]], seed: int | None, x: Tensor
) -> Tensor:
    own = nn.functional.linear(x, weight)
    if not loras[0].is_on:
        return own
    added = [
        lora.product(lora.dropout(x) if seed is None else _seeded_dropout(x, lora.dropout.p, seed + part), a, b)
        for part, (lora, (a, b)) in enumerate(zip(loras, factors, strict=True))
    ]
    return own + torch.cat(added, dim=-1)


_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """Contents of PEFT's files `adapter_model.safetensors` (`state`) and `adapter_config.json` (`config`)."""

    state: dict[str, Tensor]
    config: dict[str, Any]


@torch.no_grad()
def gather_adapter(model: PreTrainedModel, dtype: torch.dtype, *, is_served: bool = False) -> PeftAdapter:
    """Copy all adapters and fully trained modules to host memory, in `dtype`. Collective.

    Only rank 0 gets the tensors; `state` is empty on the others. With `is_served`, layers of different scales get the
    same one, of which B holds the rest: vLLM has a single scale for an adapter.
    """
    state: dict[str, Tensor] = {}
    named = _name_in_peft(model)
    config = peft_config(model)
    scales: dict[str, float] = {}
    if is_served and config["alpha_pattern"] | config["rank_pattern"]:
        adapters = dict(_adapters(model))
        scales = {f"{path}.lora_B.weight": lora.scale for path, lora in adapters.items()}
        rank = max(lora.exported_rank for lora in adapters.values())
        ranks = _pattern({named(path): lora.exported_rank for path, lora in adapters.items()}, rank)
        config |= {"r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": ranks, "alpha_pattern": ranks}
    exported = {
        f"{path}.lora_{factor}.weight": whole
        for path, lora in _adapters(model)
        for factor, whole in (("A", lora.exported_A), ("B", lora.exported_B))
    }
    for name, tensor in _trained_tensors(model):
        full = exported[name]() if name in exported else full_tensor(tensor)
        if name in scales:
            full = full.float() * scales[name]
        if dist.get_rank() == 0:
            state |= {_PREFIX + named(own): each.to("cpu", dtype, copy=True) for own, each in _hub_tensors(name, full)}
    return PeftAdapter(state, config)


def peft_config(model: PreTrainedModel) -> dict[str, Any]:
    """The fields of PEFT's `LoraConfig` that describe the adapters of `model`."""
    adapters = dict(_adapters(model))
    own, named, has_experts = next(iter(adapters.values())).config, _name_in_peft(model), has_adapted_experts(model)
    is_rslora = own.use_rslora and not has_experts

    times = own.ranks_per_export

    def alpha_of(alpha: float, rank: int) -> float:
        # PEFT joins the ranks of two stacked projections, and doubles alpha too, which only keeps alpha / rank.
        alpha = alpha * math.sqrt(rank) if own.use_rslora and not is_rslora else alpha
        alpha *= math.sqrt(times) if is_rslora else times  # the scale stays that of the trained rank
        return int(alpha) if alpha == int(alpha) else alpha

    ranks = {named(path): each.exported_rank for path, each in adapters.items()}
    alphas = {named(path): alpha_of(each.alpha, each.rank) for path, each in adapters.items()}
    alpha = alpha_of(own.alpha, own.rank)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_score(model) else "CAUSAL_LM",
        "base_model_name_or_path": _place(model.config.name_or_path),
        "r": own.rank * times,
        "lora_alpha": alpha,
        "rank_pattern": _pattern(ranks, own.rank * times),
        "alpha_pattern": _pattern(alphas, alpha),
        # PEFT does not support dropout for stacked experts, and inference does not need it.
        "lora_dropout": 0.0 if has_experts else own.dropout,
        **_targets(model),
        "modules_to_save": [named(path) for path, _ in _saved_modules(model)] or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": is_rslora,
        "use_dora": own.use_dora,
        "inference_mode": True,
    }


def _pattern(values: Mapping[str, ValueT], default: ValueT) -> dict[str, ValueT]:
    """PEFT's pattern for values by path: by the last component of the path, if its layers have the same value."""
    by_name: dict[str, set[ValueT]] = {}
    for path, value in values.items():
        by_name.setdefault(path.rpartition(".")[2], set()).add(value)
    # A key is a regular expression. Files name the experts of a stack one by one.
    keys = {path: re.sub(rf"(?<=\.{STACKED_EXPERTS})(?=\.\w+$)", r".\\d+", path) for path in values}
    return {
        keys[path] if len(by_name[name := path.rpartition(".")[2]]) > 1 else name: value
        for path, value in values.items()
        if value != default
    }


def _name_in_peft(model: PreTrainedModel) -> Callable[[str], str]:
    """Turns paths of modules of `model` into those of the class that its checkpoint names."""
    part = part_of(model)
    return (lambda name: name) if part is None else part.module_in_whole


def _place(model: str | None) -> str | None:
    """A hub id, or a folder's full path: read from another directory, a relative path would be taken for a hub id."""
    return str(Path(model).absolute()) if model and Path(model).is_dir() else model


def _targets(model: PreTrainedModel) -> dict[str, list[str]]:
    """PEFT's target names: the last component of an adapted path if it is unambiguous, otherwise the full path.

    Where PEFT knows the experts, it treats every module that is named like an expert's projection as one. Linear layers
    with such names outside the experts are therefore listed in `target_parameters`.
    """
    linear = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    has_adapter = {path: hasattr(module, "lora") for path, module in linear.items()}
    last = {path: path.rpartition(".")[2] for path in has_adapter}
    shared = {path.rpartition(".")[2] for path, _ in model.named_modules() if not has_adapter.get(path)}
    taken = set(PROJECTIONS) if _knows_experts(model) and any(map(is_stacked, model.modules())) else set()
    adapted = [path for path in has_adapter if has_adapter[path]]
    if (part := part_of(model)) is not None:  # a vision tower has layers of the same names
        return {"target_modules": sorted(map(part.module_in_whole, adapted)), "target_parameters": []}
    names = {path if last[path] in shared else last[path] for path in adapted if last[path] not in taken}
    parameters = [f"{path}.weight" for path in adapted if last[path] in taken]
    parts = PROJECTIONS if has_adapted_experts(model) else ()
    return {"target_modules": sorted(names.union(parts)), "target_parameters": parameters}


def has_adapted_experts(model: nn.Module) -> bool:
    """Whether stacked experts of `model` have adapters."""
    return any(isinstance(getattr(module, "lora", None), nn.ModuleDict) for module in model.modules())


def _adapters(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """The adapters by the path of what they adapt: a linear layer, or a projection of stacked experts."""
    for path, module in model.named_modules():
        if isinstance(module, LowRank):
            # `<path>.lora` of a linear layer, `<path>.lora.<part>` of stacked experts.
            yield path.removesuffix(".lora").replace(".lora.", "."), module


def _trained_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield trained tensors under PEFT's names, with the experts' tensors still stacked."""
    for path, lora in _adapters(model):
        yield f"{path}.lora_A.weight", lora.A
        yield f"{path}.lora_B.weight", lora.B
        if lora.magnitude is not None:
            yield f"{path}.lora_magnitude_vector", lora.magnitude
    for path, module in _saved_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter


def _saved_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not isinstance(module, LowRank) and own and all(parameter.requires_grad for parameter in own):
            yield path, module


def _hub_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor itself, or each expert's tensor if they are stacked, under its hub name."""
    for own, expert in _hub_names(name, tensor.shape):
        yield own, tensor if expert is None else tensor[expert]


def _hub_names(name: str, shape: torch.Size) -> Iterator[tuple[str, int | None]]:
    """Yield the name itself, or each expert's hub name and number if their adapters are stacked."""
    if ".lora_" not in name or len(shape) <= 2:
        yield name, None
        return
    module, part, factor, leaf = name.rsplit(".", 3)
    for expert in range(shape[0]):
        yield f"{module}.{expert}.{part}.{factor}.{leaf}", expert

"""Reads folders of LoRA adapters in PEFT's format: where a run keeps them, and what `adapter_config.json` says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.checks.disk import tensor_shapes
from prime_rl.configs.model import ALL_LINEAR, STACKED_EXPERTS, matches
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.utils.errors import StartFault

if TYPE_CHECKING:
    from prime_rl.configs.model import LoRAConfig

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_DIRECTORY = "lora_adapters"
"""Directory of the adapter in an export, with `ckpt.weights.save_adapter_separately`."""

_PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": ([], None),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    # Other starts change the base weights too, so that the matrices belong to weights that are not in the base model.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
"""Accepted values of the keys in `adapter_config.json` that change what the matrices mean."""

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of the linear layers of one expert."""
_EXPERT = re.compile(r"(?<=\.experts)\.\d+\.\w+$")


def selected(patterns: Iterable[str], paths: Iterable[str]) -> set[str]:
    """The modules that some names or regular expressions match."""
    patterns = tuple(patterns)
    return {path for path in paths if any(matches(pattern, path) for pattern in patterns)}


@dataclass(frozen=True, slots=True)
class ModulePaths:
    """The modules that names in `[model.lora]` can mean, by path. The start check has those of the model's files, and
    the trainer those of the model.
    """

    weighted: Collection[str]
    """Modules that have weights themselves."""
    linear: Collection[str]
    all_linear: Collection[str]
    """The linear layers that `all-linear` names."""
    stacks: Collection[str]
    """Stacks of experts."""
    bypassed: Collection[str]
    """Linear layers whose weight the model's code reads without calling them."""

    def adapted(self, lora: LoRAConfig) -> set[str]:
        """The linear layers that get an adapter."""
        named = selected(lora.target_modules, self.linear)
        return named.union(self.all_linear if ALL_LINEAR in lora.target_modules else ()) - self.saved(lora)

    def adapted_stacks(self, lora: LoRAConfig) -> set[str]:
        return selected(lora.target_modules, self.stacks) - self.saved(lora)

    def saved(self, lora: LoRAConfig) -> set[str]:
        """The modules that are trained in full."""
        return selected(lora.modules_to_save, self.weighted)

    def fault(self, lora: LoRAConfig) -> str | None:
        """That a name or regular expression matches nothing; None if each matches some module."""
        for pattern in lora.modules_to_save:
            if not selected([pattern], self.weighted):
                return _no_match("modules_to_save", pattern, self.weighted, "module with weights")
        either, stacks = {*self.linear, *self.stacks}, self.adapted_stacks(lora)
        for pattern in lora.target_modules:
            inside = [p for p in self.stacks if any(matches(pattern, f"{p}.0.{each}") for each in PROJECTIONS)]
            if pattern in (ALL_LINEAR, STACKED_EXPERTS) or selected([pattern], either) or (inside and stacks):
                continue
            if not inside:
                return _no_match("target_modules", pattern, either, "linear layer")
            return (
                f'lora.target_modules: "{pattern}" is a projection of the stacked experts {min(inside)}, which can '
                f'only be adapted together: use "{STACKED_EXPERTS}"'
            )
        adapted = self.adapted(lora)
        if not (adapted or stacks):
            return f"lora.target_modules matches no module that can be adapted: {_listed(lora.target_modules)}"
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(lora, key):
                if of_stacks := selected([pattern], stacks):
                    return (
                        f'lora.{key}: "{pattern}" matches the stack of experts {min(of_stacks)}, whose adapters have '
                        "lora.rank and lora.alpha; write it more narrowly"
                    )
                if not selected([pattern], adapted):
                    return _no_match(key, pattern, adapted, "adapted linear layer")
        for path in sorted(adapted.intersection(self.bypassed)):
            return (
                f"lora.target_modules: the model's code reads the weight of {path} without calling it, and would "
                f"ignore an adapter; remove {path.rpartition('.')[2]} from target_modules"
            )
        return None


def _no_match(key: str, pattern: str, paths: Collection[str], kind: str) -> str:
    components = {part for path in paths for part in path.split(".") if not part.isdigit()}
    near = get_close_matches(pattern, sorted(components)) or sorted({path.rpartition(".")[2] for path in paths})
    return f'lora.{key}: "{pattern}" matches no {kind} of this model; nearest: {_listed(near)}'


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What `adapter_config.json` says. A layer's weight update is `scale * lora_B @ lora_A`."""

    rank: int
    alpha: float
    modules_to_save: tuple[str, ...]
    """Modules that were trained in full, whose weights are in the adapter's file."""
    use_rslora: bool
    use_dora: bool
    """Whether rows of the sum of weight and update have the trained length `lora_magnitude_vector`."""
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def of(cls, config: dict[str, Any]) -> AdapterSettings:
        """Settings in the contents of an `adapter_config.json`.

        Raises:
            StartFault: they are those of an adapter that is not supported.
        """
        rank, alpha = config.get("r"), config.get("lora_alpha")
        patterns = {key: config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise StartFault(f"{ADAPTER_CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}")
        for name, supported in _PLAIN_LORA.items():
            if config.get(name, supported[0]) not in supported:
                raise StartFault(f"{ADAPTER_CONFIG} has {name} = {config[name]!r}, which is not supported")
        for key, pattern in patterns.items():
            least = 1 if key == "rank_pattern" else 0
            if not isinstance(pattern, dict) or not all(_is_number(value, least) for value in pattern.values()):
                raise StartFault(f"{ADAPTER_CONFIG} has {key} = {pattern!r}")
            try:
                _matching(pattern, "")
            except re.error as error:
                raise StartFault(f"{ADAPTER_CONFIG} has a {key} that is no regular expression: {error}") from error
        saved = tuple(config.get("modules_to_save") or ())
        is_rslora, is_dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
        return cls(rank, alpha, saved, is_rslora, is_dora, patterns["rank_pattern"], patterns["alpha_pattern"])

    def rank_of(self, path: str) -> int:
        """Rank of the layer at `path`."""
        return self.rank_pattern.get(_matching(self.rank_pattern, path), self.rank)

    def scale_of(self, path: str) -> float:
        """Scale of the layer at `path`."""
        rank = self.rank_of(path)
        # rsLoRA (Kalajdzievski 2023) divides by the root of the rank.
        divisor = math.sqrt(rank) if self.use_rslora else rank
        return self.alpha_pattern.get(_matching(self.alpha_pattern, path), self.alpha) / divisor

    @property
    def scale(self) -> float:
        """Scale of layers that no pattern matches."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def largest_rank(self) -> int:
        return max([self.rank, *self.rank_pattern.values()])


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= least


def _matching(pattern: Mapping[str, Any], path: str) -> str:
    """The first key that PEFT finds for a layer: a regular expression for the last components of its path."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", path)), "")


def adapter_folder(path: Path) -> Path:
    """The adapter at `path`: a folder in PEFT's format, a run's directory (its last step), or one of its exports.

    Raises:
        StartFault: there is none.
    """
    if not path.is_dir():
        raise StartFault("no such directory; download an adapter of the hub first: hf download OWNER/NAME")
    weights = RunPaths(path).weights
    steps = [weights / f"step_{step}" for step in stable_steps(weights)]
    # A run's exports of other steps may be merged alone, for instance those that were only evaluated.
    for folder in (path, path / ADAPTER_DIRECTORY, *(step / ADAPTER_DIRECTORY for step in reversed(steps))):
        if (folder / ADAPTER_CONFIG).is_file():
            return folder
    if steps:
        raise StartFault(
            "this run kept no adapter apart from its weights: set model.name to its export "
            f"{steps[-1]}, which contains it, or train it with ckpt.weights.save_adapter_separately = true"
        )
    raise StartFault(f"it holds no {ADAPTER_CONFIG}, so it is neither an adapter in PEFT's format nor a run with one")


def read_settings(folder: Path) -> AdapterSettings:
    """The settings of the adapter in `folder`.

    Raises:
        StartFault: a file is missing, cannot be read, or describes an adapter that is not supported.
    """
    if not (folder / ADAPTER_TENSORS).is_file():
        raise StartFault(f"{folder} has no {ADAPTER_TENSORS}")
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartFault(f"cannot read {folder / ADAPTER_CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise StartFault(f"{folder / ADAPTER_CONFIG} is not a JSON object")
    return AdapterSettings.of(config)


def lora_fault(lora: LoRAConfig, path: Path) -> str | None:
    """Why training with `lora` cannot start from the adapter at `path`; None if nothing shows before it is loaded."""
    try:
        folder = adapter_folder(path)
        given = read_settings(folder)
    except StartFault as fault:
        return str(fault)
    if given.use_dora != lora.use_dora:
        kind = "DoRA" if given.use_dora else "no DoRA"
        return f"this adapter is {kind}: set use_dora = {str(given.use_dora).lower()}"
    if unfit := _scale_fault(lora, given, tensor_shapes(folder)):
        return unfit
    if given.modules_to_save and not lora.modules_to_save:
        names = ", ".join(f'"{name}"' for name in given.modules_to_save)
        return f"this adapter holds modules that were trained in full: set modules_to_save = [{names}]"
    return None


def _agrees(lora: LoRAConfig, path: str, rank: int, scale: float) -> bool:
    return lora.rank_of(path) == rank and math.isclose(scale, lora.scale_of(path), rel_tol=1e-6)


def _scale_fault(lora: LoRAConfig, given: AdapterSettings, names: Iterable[str]) -> str | None:
    """That a layer has another rank or scale in the adapter, whose tensors have these `names`, than in the config."""
    for name in names:
        path, is_factor, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        own = _EXPERT.sub("", path)
        rank, scale = given.rank_of(path), given.scale_of(path)
        # Patterns of a config are for the language model's own paths. Adapters of a checkpoint of several parts have
        # those of the whole, as `model.language_model.layers`.
        part = f"model.{own[own.index('layers.') :]}" if ".layers." in own else own
        if not is_factor or any(_agrees(lora, each, rank, scale) for each in (own, part)):
            continue
        asked, divisor = lora.rank_of(own), math.sqrt(rank) if lora.use_rslora else rank
        # What the config would have to say about this layer.
        found = f"rank {rank} and alpha {scale * divisor:g}"
        given_alpha = lora.scale_of(own) * (math.sqrt(asked) if lora.use_rslora else asked)
        text = f"and the config asks for rank {asked} and alpha {given_alpha:g}: set"
        if given.rank_pattern or given.alpha_pattern or lora.rank_pattern or lora.alpha_pattern:
            return f"this adapter has {found} at {path}, {text} rank_pattern and alpha_pattern as {ADAPTER_CONFIG} does"
        return f"this adapter has {found}, {text} rank = {rank} and alpha = {scale * divisor:g}"
    return None

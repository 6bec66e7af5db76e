"""LoRA adapters beside the base weights: loaded under a name, replaced in place, applied to whoever names them.

An adapter is never added to the weights. So one batch holds sequences of the base model and of several adapters, a new
version takes effect between two decode steps, and nothing of a small change is lost to rounding in bfloat16.
Shapes: N tokens, R rank, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from prime_rl.inference.adapter_files import AdapterSpec, check_name, read_adapter_spec
from prime_rl.inference.checkpoint_files import Shapes, WeightError, misfit
from prime_rl.run.paths import step_of

Site = tuple[str, ...]
"""Paths of the linear layers that one matrix product computes: several where they share their input."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds at a site: `up @ down`, with the adapter's scale in `up`."""

    down_RI: Tensor
    up_OR: Tensor

    @classmethod
    def join(cls, parts: SequenceOf[LowRank]) -> LowRank:
        """Of layers with a common input, whose outputs lie side by side."""
        if len(parts) == 1:
            return parts[0]
        return cls(torch.cat([part.down_RI for part in parts]), torch.block_diag(*(part.up_OR for part in parts)))


@dataclass(slots=True, eq=False)
class Adapter:
    """A loaded adapter. Requests hold on to it; a new version changes its fields between two decode steps."""

    name: str
    directory: Path
    version: int
    layers: dict[Site, LowRank]
    is_loaded: bool = True
    """False once the weights under it have been replaced: nothing may be generated with it any more."""


class StepAdapters:
    """Which of the N tokens of a forward pass go through which adapter."""

    def __init__(self, owners: SequenceOf[Adapter | None], lengths: SequenceOf[int], device: torch.device) -> None:
        """`owners` are the adapters of the step's sequences, and `lengths` how many of its tokens each has."""
        used = list(dict.fromkeys(owners))
        self._parts: list[tuple[Adapter, Tensor | None]] = []
        if len(used) == 1 and used[0] is not None:
            self._parts.append((used[0], None))
            return
        indices = torch.tensor([used.index(owner) for owner in owners])
        owner_N = indices.repeat_interleave(torch.tensor(lengths))
        for index, adapter in enumerate(used):
            if adapter is not None:
                self._parts.append((adapter, (owner_N == index).nonzero().squeeze(1).to(device)))

    @classmethod
    def of(
        cls, owners: SequenceOf[Adapter | None], lengths: SequenceOf[int], device: torch.device
    ) -> StepAdapters | None:
        """None when all sequences are the base model's."""
        return cls(owners, lengths, device) if any(owner is not None for owner in owners) else None

    def add(self, site: Site, inputs_NI: Tensor, outputs_NO: Tensor) -> Tensor:
        """The outputs of a site, with what the adapters add to their tokens' rows. Works in place."""
        for adapter, rows in self._parts:
            if (change := adapter.layers.get(site)) is None:
                continue
            if rows is None:
                outputs_NO.addmm_(linear(inputs_NI, change.down_RI), change.up_OR.t())
            else:
                outputs_NO.index_add_(0, rows, linear(linear(inputs_NI[rows], change.down_RI), change.up_OR))
        return outputs_NO


@dataclass(slots=True)
class LinearHooks:
    """Adapters in the linear layers of a Transformers model that runs by its own code."""

    sites: list[Site] = field(default_factory=list)
    current: StepAdapters | None = None
    """Of the forward pass that runs."""

    @classmethod
    def on(cls, model: nn.Module) -> LinearHooks:
        hooks = cls()
        for path, module in model.named_modules():
            # An expert sees only some tokens, and the head only the last ones.
            if isinstance(module, nn.Linear) and "expert" not in path and not path.endswith("lm_head"):
                hooks._add_to(path, module)
        return hooks

    def _add_to(self, path: str, module: nn.Linear) -> None:
        site = (path,)
        self.sites.append(site)

        def add(_: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            if self.current is not None:
                self.current.add(site, inputs[0].flatten(0, -2), outputs.view(-1, outputs.shape[-1]))

        module.register_forward_hook(add)


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What the server was started for."""

    max_loaded: int
    max_rank: int


@dataclass(slots=True)
class AdapterStore:
    """The adapters of a server, by name. Changed by the engine's thread only, and as a whole: any thread may read."""

    base_model: str
    sites: list[Site]
    """Where the model can add an adapter's change."""
    base: Shapes
    limits: AdapterLimits
    dtype: torch.dtype
    device: torch.device
    loaded: dict[str, Adapter] = field(default_factory=dict)

    def load(self, name: str, directory: Path) -> Adapter:
        """Load an adapter, or a new version of it, in place.

        Its version is the number in a name `step_<n>`; another name counts one up from the last version, or from 0.

        Raises:
            AdapterMissing: a file is not there.
            WeightError: the adapter does not fit this model or this server. The old version then stays.
        """
        check_name(name, self.base_model, self.loaded, self.limits.max_loaded)
        layers = self._read(directory, read_adapter_spec(directory, self.base, self.limits.max_rank))
        step = step_of(directory)
        if (adapter := self.loaded.get(name)) is None:
            adapter = Adapter(name, directory, 1 if step is None else step, layers)
            self.loaded = {**self.loaded, name: adapter}
        else:
            adapter.version = adapter.version + 1 if step is None else step
            adapter.directory, adapter.layers = directory, layers
        return adapter

    def unload_all(self) -> None:
        """Forget the adapters, because the weights under them are replaced."""
        for adapter in self.loaded.values():
            adapter.is_loaded = False
        self.loaded = {}

    def _read(self, directory: Path, spec: AdapterSpec) -> dict[Site, LowRank]:
        known = {path for site in self.sites for path in site}
        if odd := [path for path in spec.paths if path not in known]:
            raise misfit(directory, f"this engine adds no adapter to {odd[0]}")
        try:
            tensors = load_file(spec.tensors)
        except (OSError, SafetensorError) as exc:
            raise WeightError(f"cannot read {str(spec.tensors)!r}: {exc}") from exc

        def part(path: str) -> LowRank:
            if path not in spec.paths:
                num_outputs, num_inputs = self.base[f"{path}.weight"]
                return LowRank(torch.zeros(0, num_inputs), torch.zeros(num_outputs, 0))
            down, up = (tensors[spec.key(path, side)].float() for side in "AB")
            return LowRank(down, up * spec.scale)

        touched = [site for site in self.sites if not set(site).isdisjoint(spec.paths)]
        return {site: self._placed(LowRank.join([part(path) for path in site])) for site in touched}

    def _placed(self, change: LowRank) -> LowRank:
        return LowRank(*(tensor.to(self.device, self.dtype) for tensor in (change.down_RI, change.up_OR)))

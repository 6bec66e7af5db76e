"""Multi-LoRA serving: loads named adapters and applies each one to the tokens of the requests that select it.

Adapters are never merged into the weights. One batch can therefore mix the base model and several adapters, a new
version takes effect between two decode steps, and small updates are not lost to bfloat16 rounding.
Shapes: N tokens, R rank, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from prime_rl.inference.embedded.engine.weights import read_weights
from prime_rl.inference.model_files import AdapterSpec, Shapes, check_name, mismatch_error, read_adapter_spec
from prime_rl.run.paths import step_of
from prime_rl.transport.weights import to_device

Site = tuple[str, ...]
"""Module paths of the linear layers computed by one matrix product: one layer, or several with the same input."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's weight update at a site: `up @ down`, with the adapter's scale folded into `up`."""

    down_RI: Tensor
    up_OR: Tensor

    @classmethod
    def join(cls, updates: SequenceOf[LowRank]) -> LowRank:
        """Combine the updates of layers with the same input into one update of their concatenated outputs."""
        if len(updates) == 1:
            return updates[0]
        down_RI = torch.cat([update.down_RI for update in updates])
        return cls(down_RI, torch.block_diag(*(update.up_OR for update in updates)))


Layers = dict[Site, LowRank]


@dataclass(slots=True, eq=False)
class Adapter:
    """A loaded adapter. Requests keep a reference; loading a new version updates its fields between decode steps."""

    name: str
    directory: Path
    version: int
    layers: Layers
    is_loaded: bool = True
    """False once the base weights have been replaced; requests with this adapter then fail."""


class StepAdapters:
    """The adapters used in one forward pass, and the tokens that each of them applies to."""

    def __init__(self, owners: SequenceOf[Adapter | None], lengths: SequenceOf[int], device: torch.device) -> None:
        """`owners` holds the adapter of each sequence in the step, and `lengths` its number of tokens."""
        used = list(dict.fromkeys(owners))
        self._rows: list[tuple[Adapter, Tensor | None]] = []
        """Each adapter with the indices of its tokens; None means all N tokens."""
        if len(used) == 1 and used[0] is not None:
            self._rows.append((used[0], None))
            return
        indices = torch.tensor([used.index(owner) for owner in owners])
        owner_N = indices.repeat_interleave(torch.tensor(lengths))
        for index, adapter in enumerate(used):
            if adapter is not None:
                self._rows.append((adapter, to_device((owner_N == index).nonzero().squeeze(1), device)))

    @classmethod
    def from_owners(
        cls, owners: SequenceOf[Adapter | None], lengths: SequenceOf[int], device: torch.device
    ) -> StepAdapters | None:
        """Return None if all sequences use the base model."""
        return cls(owners, lengths, device) if any(owner is not None for owner in owners) else None

    def add(self, site: Site, inputs_NI: Tensor, outputs_NO: Tensor) -> Tensor:
        """Add the adapters' updates to the outputs of a site, in place, and return them."""
        for adapter, rows in self._rows:
            if (change := adapter.layers.get(site)) is None:
                continue
            if rows is None:
                outputs_NO.addmm_(linear(inputs_NI, change.down_RI), change.up_OR.t())
            else:
                outputs_NO.index_add_(0, rows, linear(linear(inputs_NI[rows], change.down_RI), change.up_OR))
        return outputs_NO


@dataclass(slots=True)
class LinearHooks:
    """Applies adapters through forward hooks, for models that run Transformers' own forward pass."""

    sites: list[Site] = field(default_factory=list)
    current: StepAdapters | None = None
    """Adapters of the current forward pass."""

    @classmethod
    def attach_to(cls, model: nn.Module, without: SequenceOf[str]) -> LinearHooks:
        """`without` are the paths of layers whose hooks never run."""
        hooks = cls()
        for path, module in model.named_modules():
            # Experts and the head process only some of the tokens, so token indices do not apply to them.
            is_linear = isinstance(module, nn.Linear) and path not in without
            if is_linear and "expert" not in path and not path.endswith("lm_head"):
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
    """The server's limits on adapters."""

    max_loaded: int
    max_rank: int


@dataclass(slots=True)
class AdapterStore:
    """The server's adapters by name. Only the engine's thread replaces `loaded`; any thread may read it."""

    base_model: str
    sites: list[Site]
    """Sites where the model can apply adapters."""
    base: Shapes
    limits: AdapterLimits
    dtype: torch.dtype
    device: torch.device
    named: Callable[[str], str]
    """Turns the path of a module into its name in adapters."""
    loaded: dict[str, Adapter] = field(default_factory=dict)

    def load(self, name: str, directory: Path) -> Adapter:
        """Load an adapter under `name`, or replace its current version in place.

        The version is n for a directory named `step_<n>`, otherwise the previous version plus one (1 for the first).

        Raises:
            AdapterMissing: the directory or one of its files does not exist.
            WeightError: the adapter does not fit the model or exceeds the server's limits. The old version stays live.
        """
        check_name(name, self.base_model, self.loaded, self.limits.max_loaded)
        base = {self.named(name): shape for name, shape in self.base.items()}
        layers = self._read(directory, read_adapter_spec(directory, base, self.limits.max_rank))
        step = step_of(directory)
        if (adapter := self.loaded.get(name)) is None:
            adapter = Adapter(name, directory, 1 if step is None else step, layers)
            self.loaded = {**self.loaded, name: adapter}
        else:
            adapter.version = adapter.version + 1 if step is None else step
            adapter.directory = directory
            _replace(adapter, layers)
        return adapter

    def unload_all(self) -> None:
        """Unload all adapters, because their base weights are being replaced."""
        for adapter in self.loaded.values():
            adapter.is_loaded = False
        self.loaded = {}

    def _read(self, directory: Path, spec: AdapterSpec) -> Layers:
        known = {self.named(path) for site in self.sites for path in site}
        if odd := [path for path in spec.scales if path not in known]:
            raise mismatch_error(directory, f"adapters on {odd[0]} are not supported")
        tensors = read_weights(directory)

        def update_of(path: str) -> LowRank:
            scale = spec.scales.get(self.named(path))
            if scale is None:
                num_outputs, num_inputs = self.base[f"{path}.weight"]
                return LowRank(torch.zeros(0, num_inputs), torch.zeros(num_outputs, 0))
            down, up = (tensors[spec.key(self.named(path), side)].float() for side in "AB")
            return LowRank(down, up * scale)

        touched = [site for site in self.sites if not set(map(self.named, site)).isdisjoint(spec.scales)]
        return {site: self._to_device(LowRank.join([update_of(path) for path in site])) for site in touched}

    def _to_device(self, change: LowRank) -> LowRank:
        return LowRank(*(tensor.to(self.device, self.dtype) for tensor in (change.down_RI, change.up_OR)))


@torch.inference_mode()
def _replace(adapter: Adapter, layers: Layers) -> None:
    """Give an adapter new tensors: in place if they have the shapes of the old, because captured graphs read those."""
    old = adapter.layers
    pairs = [
        (mine, new)
        for site in old.keys() & layers.keys()
        for mine, new in ((old[site].down_RI, layers[site].down_RI), (old[site].up_OR, layers[site].up_OR))
    ]
    if old.keys() != layers.keys() or any(mine.shape != new.shape for mine, new in pairs):
        adapter.layers = layers
        return
    for mine, new in pairs:
        mine.copy_(new)

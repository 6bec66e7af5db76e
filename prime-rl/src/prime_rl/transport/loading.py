"""Loads checkpoints, in the trainer and in the embedded engine: each rank reads only its own slices of the files.

The model is built without values (`torch.device("meta")`), and sharded first if it is trained. `find_weights` then
finds, from names and shapes alone, how each of the model's tensors is made from those of the files, and what is
missing. `fill` reads them: no process ever holds more than its shards and one piece of a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeGuard, cast
from zipfile import is_zipfile

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    SkipParameters,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import _get_resolved_checkpoint_files, load_state_dict
from transformers.utils.loading_report import LoadStateDictInfo

from prime_rl.checks.model_files import loading_fault
from prime_rl.transport.language_part import LanguagePart, attach, find_part
from prime_rl.transport.packed import Packed, read_packed
from prime_rl.utils.errors import StartFault
from prime_rl.utils.logger import get_logger

_PIECE_BYTES = 64 * 2**20
"""Largest part of a tensor that is read at once, unless Transformers has to convert it as a whole."""
Index = tuple[slice, ...]
Change = Callable[[str, Tensor, Index], Tensor]
"""What becomes of a parameter's values from the files: its name, the values at an index, and the index."""


class Stored(Protocol):
    """A weight that the model holds in another form than the files, such as a quantized one."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device:
        """Where the ranks exchange it."""

    @property
    def index(self) -> Index:
        """This rank's part."""

    def take(self, source: Packed) -> bool:
        """Take this rank's part of the whole weight as a file holds it; False if it has to be read as numbers."""

    def put(self, index: Index, values: Tensor) -> None:
        """Take `values`, which are at `index` in the whole weight. Parts come in order, and are whole rows."""

    def finish(self) -> None:
        """Do what needs all values. Collective."""


class Ranks(Protocol):
    """This process among those that load a model together."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True)
class Alone:
    """A process that loads a model by itself."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def find_weights(
    model: PreTrainedModel,
    name: str,
    dtype: torch.dtype,
    ranks: Ranks,
    *,
    is_part: bool,
    draws_score: bool = False,
    adds_embeddings: bool = False,
) -> Plan:
    """Find the weights of `model`, which has no values yet, in the checkpoint `name`. Collective.

    With `is_part`, the checkpoint has several parts, and the model is its language part. With `draws_score`, the head
    of a reward model is new. With `adds_embeddings`, the model has more rows for tokens than the files. Weights that
    the config ties and the files do not get a tensor each; values are compared in `dtype`.

    Raises:
        StartFault: the files lack a weight, or have it in another shape.
        OSError, ValueError, ImportError, SafetensorError: the files cannot be found or read.
    """
    if is_part:
        part = find_part(model, name)
        if adds_embeddings and part.layers is not None:
            raise StartFault("its embeddings cannot be more: those of images follow them")
        if adds_embeddings:
            part = replace(part, vocab_size=model.config.vocab_size)
        attach(model, part)
        checkpoint = Checkpoint.open(sorted(part.folder.glob("*.safetensors"))).only(part)
    else:
        checkpoint = Checkpoint.open(checkpoint_files(name, model, ranks))
    plan = checkpoint.plan(model, enlarges_vocabulary=adds_embeddings)
    if draws_score:
        plan = plan.without_head()
    if fault := loading_fault(plan.report):
        raise StartFault(fault)
    untie_different(model, plan, dtype, ranks)
    return plan


def checkpoint_files(name: str, model: PreTrainedModel, process: Ranks) -> list[Path]:
    """The files of weights of the checkpoint `name`, which is downloaded if it is a hub id. Collective then.

    Raises:
        OSError: there are none.
    """

    def resolve() -> list[Path]:
        explicit = getattr(model.config, "transformers_weights", None)
        files, _ = _get_resolved_checkpoint_files(
            name,
            variant=None,
            gguf_file=None,
            use_safetensors=None,
            user_agent=None,
            is_remote_code=model.is_remote_code(),
            transformers_explicit_filename=explicit,
        )
        return [Path(file) for file in files or ()]

    if Path(name).is_dir():
        return resolve()
    # The first process of each machine downloads; the others find the files in its cache.
    files = resolve() if process.local_rank == 0 else []
    if process.world_size > 1:
        dist.barrier()
    return files or resolve()


@dataclass(slots=True)
class Recipe:
    """How tensors of the model are made from those of the files."""

    first: str
    """The first tensor that it makes."""
    converter: WeightConverter | None
    """Transformers' conversion; None if the tensor is as in the files."""
    sources: dict[str, list[Any]] = field(default_factory=dict)
    """Slices of the files, by the converter's patterns."""

    @property
    def source(self) -> Any:
        """The slice that it reads, of a recipe without conversion."""
        return next(iter(self.sources.values()))[0]

    def make(
        self, model: PreTrainedModel, read: Callable[[Any], Tensor], within: slice = slice(None)
    ) -> dict[str, Tensor]:
        """The tensors by name, with the sources read by `read`; of stacked ones, the part `within` their number."""
        if self.converter is None:
            return {self.first: read(self.source)}
        converter = deepcopy(self.converter)
        for pattern, sources in self.sources.items():
            for source in sources[within]:
                converter.add_tensor(self.first, pattern, pattern, cast("Any", partial(read, source)))
        made = converter.convert(self.first, model=model, config=model.config, loading_info=_no_faults())
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def stacks(self, shape: torch.Size) -> bool:
        """Whether it stacks one source of each pattern per row of its only result, and leaves rows apart after that."""
        if self.converter is None or len(self.converter.target_patterns) != 1:
            return False
        first, *rest = self.converter.operations
        apart = all(
            (isinstance(each, Concatenate) and each.dim > 0)
            or (isinstance(each, Transpose) and not each.check_dims and min(each.dim0, each.dim1) > 0)
            for each in rest
        )
        counts = {len(sources) for sources in self.sources.values()}
        return isinstance(first, MergeModulelist) and first.dim == 0 and apart and counts == {shape[0]}


@dataclass(frozen=True, slots=True)
class Plan:
    """How to fill a model."""

    recipes: Mapping[str, Recipe]
    """By the name of each tensor of the model. Those of names that share a tensor may differ."""
    conversions: list[Any]
    """Those of Transformers' conversions that the files needed. An export reverts them."""
    report: Mapping[str, Any]
    """As Transformers' `output_loading_info`."""

    @property
    def packed(self) -> Mapping[str, Packed]:
        """The weights that the files hold in 4 bits."""
        alone = {name: recipe.source for name, recipe in self.recipes.items() if recipe.converter is None}
        return {name: source for name, source in alone.items() if isinstance(source, Packed)}

    def without_head(self) -> Plan:
        """The plan for a model whose head `score` is new: the files have another one instead, or none."""
        unused = {name for name in self.report["unexpected_keys"] if not name.startswith("lm_head.")}
        missing = set(self.report["missing_keys"]) - {"score.weight"}
        return replace(self, report={**self.report, "missing_keys": missing, "unexpected_keys": unused})


@dataclass(frozen=True, slots=True)
class _Turned:
    """A stack of matrices in a file, read with rows and columns swapped."""

    held: Any

    def get_shape(self) -> list[int]:
        count, rows, columns = _shape(self.held)
        return [count, columns, rows]

    def __getitem__(self, index: Any) -> Tensor:
        full = (slice(None), slice(None), slice(None))
        given = full if index is ... else (*index, *full[len(index) :])
        of_count, of_rows, of_columns = given
        values: Tensor = self.held[of_count, of_columns, of_rows]
        return values.mT.contiguous()


@dataclass(frozen=True, slots=True)
class _First:
    """The first rows of a tensor in a file."""

    held: Any
    rows: int

    def get_shape(self) -> list[int]:
        return [self.rows, *_shape(self.held)[1:]]

    def __getitem__(self, index: Any) -> Tensor:
        at, *rest = (slice(None),) if index is ... else index
        values: Tensor = self.held[(slice(*at.indices(self.rows)), *rest)]
        return values


@dataclass(frozen=True, slots=True)
class _Enlarged:
    """A tensor in a file with more rows, which hold the mean of its own, as Transformers fills new embeddings."""

    held: Any
    rows: int

    def get_shape(self) -> list[int]:
        return [self.rows, *_shape(self.held)[1:]]

    def __getitem__(self, index: Any) -> Tensor:
        at, *rest = (slice(0, self.rows),) if index is ... else index
        own = _shape(self.held)[0]
        start, stop, _ = at.indices(self.rows)
        values: Tensor = self.held[(slice(min(start, own), min(stop, own)), *rest)]
        added = stop - max(start, own)
        if added <= 0:
            return values
        total = torch.zeros(values.shape[1:], dtype=torch.float64)
        for piece, *_ in _pieces(self.held, (slice(0, own),)):
            total += self.held[(piece, *rest)].double().sum(0)
        return torch.cat([values, (total / own).to(values.dtype).expand(added, *values.shape[1:])])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint, opened and not read."""

    tensors: Mapping[str, Any]
    """By name; `tensor[index]` reads a slice."""

    @classmethod
    def open(cls, files: Iterable[Path]) -> Checkpoint:
        tensors: dict[str, Any] = {}
        for file in files:
            if file.suffix == ".safetensors":
                # Pages of a mapped file would count as the process's memory until it is closed.
                held = safe_open(file, framework="pt", backend="pread")
                tensors |= {name: held.get_slice(name) for name in held.keys()}  # noqa: SIM118 - not a dict
            else:
                if not is_zipfile(file):
                    get_logger().warning(f"{file.name} is of a torch before 1.6: every process reads it whole")
                tensors |= load_state_dict(file)  # maps the file, if it is a zip file
        return cls(read_packed(tensors))

    def only(self, part: LanguagePart) -> Checkpoint:
        """The tensors of a language part, as its model has them."""
        own: dict[str, Any] = {}
        for name, old in part.names.items():
            held = self.tensors[old]
            own[name] = _Turned(held) if part.is_turned(name) else held
            if name in part.rows:
                own[name] = _First(held, part.rows[name])
        return Checkpoint(own)

    def plan(self, model: PreTrainedModel, *, enlarges_vocabulary: bool = False) -> Plan:
        """Find how each tensor of `model`, which has no values yet, is made. Reads names and shapes only.

        The names are matched as in Transformers' own loading: renamings first, then at most one conversion. With
        `enlarges_vocabulary`, the model may have more embeddings than the files.
        """
        conversions = get_model_conversion_mapping(model)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        expected, base = model.state_dict(), model.base_model_prefix
        enlarged = _vocabulary(model) if enlarges_vocabulary else set()
        first: dict[str, Recipe] = {}
        unexpected: set[str] = set()
        for name in sorted(self.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, base, expected)
            if target not in expected and name in expected:
                target, pattern = rename_source_key(name, [], [], base, expected)
            if target in expected:
                recipe = first.setdefault(target, Recipe(target, by_pattern[pattern] if pattern else None))
                held = self.tensors[name]
                if target in enlarged and _shape(held)[0] < len(expected[target]):
                    held = _Enlarged(held, len(expected[target]))
                recipe.sources.setdefault(pattern or name, []).append(held)
            else:
                made = by_pattern[pattern].target_patterns if pattern else []
                unexpected.update([target.replace(made[0], each) for each in made] or [target])
        recipes: dict[str, Recipe] = {}
        mismatched: set[Any] = set()
        for recipe in first.values():
            try:
                shaped = recipe.make(model, lambda source: torch.empty(_shape(source), device="meta"))
            except SkipParameters:  # its sources are incomplete: what they should make is missing
                continue
            for name, value in shaped.items():
                if name in expected:
                    recipes[name] = recipe
                if name in expected and value.shape != expected[name].shape:
                    mismatched.add((name, tuple(value.shape), tuple(expected[name].shape)))
        shared = [names for names in names_of_shared(model) if any(name in recipes for name in names)]
        missing = expected.keys() - recipes.keys() - {name for names in shared for name in names}
        info = LoadStateDictInfo(set(missing), unexpected, mismatched, [], {}, set())
        model._adjust_missing_and_unexpected_keys(info)
        return Plan(recipes, [each for each in conversions if each.was_used()], info.to_dict())


def has_score(model: nn.Module) -> bool:
    """Whether the model's head is that of a reward model, `score`: one value per token."""
    return isinstance(getattr(model, "score", None), nn.Linear)


def _vocabulary(model: PreTrainedModel) -> set[str]:
    """The names of weights that have a row for each token: embeddings, and the head with its bias."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    named = model.named_modules(remove_duplicate=False)
    paths = [(path, module) for path, module in named if any(module is end for end in ends)]
    return {f"{path}.{name}" for path, module in paths for name, _ in module.named_parameters(recurse=False)}


def names_of_shared(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return [names for names in names_of.values() if len(names) > 1]


def untie_different(model: PreTrainedModel, plan: Plan, dtype: torch.dtype, process: Ranks) -> None:
    """Give weights that the config ties a tensor each, if the files hold different values for them. Collective.

    The ranks compare a part of the rows each.
    """
    for names in names_of_shared(model):
        held = [name for name in names if name in plan.recipes]
        kept = min(held, key=lambda name: name in model.all_tied_weights_keys, default="")
        for name in (name for name in held if name != kept):
            one, other = (plan.recipes[each].source for each in (kept, name))
            rows, world = _shape(one)[0], process.world_size
            own = (slice(rows * process.rank // world, rows * (process.rank + 1) // world),)
            is_equal = all(
                torch.equal(_read(one, index, dtype), _read(other, index, dtype)) for index in _pieces(one, own)
            )
            verdict = torch.tensor(is_equal, dtype=torch.int32, device=process.device)
            if process.world_size > 1:
                dist.all_reduce(verdict, dist.ReduceOp.MIN)
            if not verdict.item():
                del model.all_tied_weights_keys[name]
                owner, _, own_name = name.rpartition(".")
                own_weight = nn.Parameter(torch.empty_like(model.get_parameter(name)))
                setattr(model.get_submodule(owner), own_name, own_weight)


def compute_buffers(model: PreTrainedModel, in_float32: re.Pattern[str]) -> None:
    """Compute the buffers of a `model` without values, such as its rotary frequencies, which files do not hold.

    Those that files do hold are overwritten later. Of these, the ones `in_float32` get that dtype.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # `initialize_weights` leaves it as it is
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Not by `register_buffer`, which would make it persistent.
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    model.initialize_weights()
    held = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if name in held and in_float32.search(name):
            owner, _, own_name = name.rpartition(".")
            model.get_submodule(owner)._buffers[own_name] = buffer.float()


def float32_names(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Matches the names of weights that Transformers loads in float32 if the model is in `dtype`, such as routers."""
    return re.compile("|".join(model._get_dtype_plan(dtype)).replace("*", ".*") or "(?!)")


def allocate(model: nn.Module, device: torch.device, in_float32: re.Pattern[str]) -> None:
    """Give a `model` that is not sharded memory on `device`: parameters without values, and buffers with theirs.

    Parameters with several names stay shared, and those `in_float32` get that dtype.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in made:
                dtype = torch.float32 if in_float32.search(f"{path}.{name}") else parameter.dtype
                empty = torch.empty_like(parameter, device=device, dtype=dtype)
                made[parameter] = nn.Parameter(empty, parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


@torch.no_grad()
def fill(
    model: PreTrainedModel,
    plan: Plan,
    dtype: torch.dtype | None,
    change: Change,
    stored: Mapping[str, Stored] | None = None,
    *,
    only: Container[str] | None = None,
) -> tuple[int, int]:
    """Read the weights of `model` from its files. Each rank reads its own shards. Returns the count of tensors that it
    read, and of all.

    Parameters are read in `dtype` (None: as they are), then `change` may add to them, then they are stored in their
    own. Buffers are read in their own. `stored` has the weights that the model holds in another form, which are read in
    float32. Collective with them. With `only`, other tensors than those and the ones of these names are left alone.
    """
    held = _destinations(model, plan)
    wanted = {name: tensor for name, tensor in held.items() if only is None or name in only}
    unread: dict[str, Tensor | Stored] = {**wanted, **(stored or {})}
    counts = len(unread), len({**held, **(stored or {})})
    packed = plan.packed
    while unread:
        name, destination = next(iter(unread.items()))
        recipe, own = plan.recipes[name], index_of(destination)
        read_as = destination.dtype if _is_buffer(destination) else dtype
        if not isinstance(destination, Tensor):
            # Whatever dtype other weights are stored in.
            read_as = torch.float32
        if name in packed and not isinstance(destination, Tensor) and destination.take(packed[name]):
            del unread[name]
        elif recipe.converter is None:
            for index in _pieces(recipe.source, own):
                put(destination, index, change(name, _read(recipe.source, index, read_as), index))
            _finish(unread.pop(name))
        elif isinstance(destination, Tensor) and recipe.stacks(destination.shape):
            # A rank reads only the experts that it keeps.
            for index in _pieces(destination, own):
                (made,) = recipe.make(model, partial(_read, dtype=read_as), index[0]).values()
                put(destination, index, change(name, made[(slice(None), *index[1:])], index))
            del unread[name]
        else:
            for each, value in recipe.make(model, partial(_read, dtype=read_as)).items():
                if each in unread:
                    index = index_of(unread[each])
                    put(unread[each], index, change(each, value[index], index))
                    _finish(unread.pop(each))
    _zero_padding(model)
    return counts


@torch.no_grad()
def spread(
    model: PreTrainedModel,
    whole: dict[str, Tensor],
    names: Iterable[str],
    dtype: torch.dtype,
    stored: Mapping[str, Stored] | None = None,
) -> None:
    """Fill the tensors `names` of a sharded `model` from those that rank 0 holds in `whole`, which it empties.
    Collective.

    The other ranks receive one parameter at a time, in `dtype`, and keep their shards. `stored`: as in `fill`.
    """
    held = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    own: dict[str, Tensor | Stored] = {**held, **(stored or {})}
    names_of: dict[int, list[str]] = {}
    for name in names:
        names_of.setdefault(id(own[name]), []).append(name)
    for name, *others in names_of.values():
        tensor = own[name]
        received_as = tensor.dtype if _is_buffer(tensor) else dtype
        values = torch.empty(tensor.shape, dtype=received_as, device=tensor.device)
        if name in whole:
            values = whole.pop(name).to(values)
            for other in others:
                whole.pop(other, None)
        if dist.get_world_size() > 1:
            on = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device
            values = values.to(on)
            dist.broadcast(values, src=0)
        put_own(tensor, values)


def unchanged(name: str, values: Tensor, index: Index) -> Tensor:
    return values


def _zero_padding(model: PreTrainedModel) -> None:
    """Zero the padding token's embedding where the model's code does so whenever it loads files, as Youtu's.

    Engines that load the model with Transformers have it so.
    """
    # Code that a model brings with it may draw weights anew in `_init_weights`. FSDP's class hides where it is from.
    if any(each.__module__.startswith("transformers_modules.") for each in type(model).__mro__):
        return
    padded = [each for each in model.modules() if isinstance(each, nn.Embedding) and each.padding_idx is not None]
    for module in padded:
        row = cast("int", module.padding_idx)
        probe = nn.Embedding(row + 1, 1, row)
        nn.init.ones_(probe.weight)
        probe.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        model._init_weights(probe)
        at, *rest = index_of(module.weight)
        if not probe.weight[row].any() and at.start <= row < at.stop:
            put(module.weight, (slice(row, row + 1), *rest), torch.zeros(()))


def _destinations(model: PreTrainedModel, plan: Plan) -> dict[str, Tensor]:
    """The parameters and buffers to fill, each by one name that the files have."""
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if name in plan.recipes:
            found.setdefault(id(tensor), []).append((name, tensor))
    tied = model.all_tied_weights_keys
    return dict(min(each, key=lambda pair: pair[0] in tied) for each in found.values())


def _is_buffer(destination: Tensor | Stored) -> TypeGuard[Tensor]:
    return isinstance(destination, Tensor) and not isinstance(destination, nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All ranks' parts of a sharded tensor together, or the tensor itself if it is not sharded. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    # Axis by axis, FSDP's first, which has sharded the parts of tensor parallelism. Asked for all at once, PyTorch does
    # the same, and warns that it cannot do better.
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def index_of(tensor: Tensor | Stored) -> Index:
    """Where this rank's part of a sharded `tensor` begins and ends; all of another tensor.

    The part is one block, also where FSDP shards what tensor parallelism has divided: our plans have no packed styles.
    """
    if not isinstance(tensor, Tensor):
        return tensor.index
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


@torch.no_grad()
def put(tensor: Tensor | Stored, index: Index, values: Tensor) -> None:
    """Write `values`, which are at `index` in the whole tensor, into this rank's part of `tensor`."""
    own = index_of(tensor)
    if not isinstance(tensor, Tensor):
        tensor.put(index, values)
        return
    local(tensor)[
        tuple(slice(at.start - of.start, at.stop - of.start) for at, of in zip(index, own, strict=True))
    ].copy_(values)


def put_own(tensor: Tensor | Stored, values: Tensor) -> None:
    """Write this rank's part of the whole `values` into `tensor`. Collective for a `Stored` weight."""
    index = index_of(tensor)
    put(tensor, index, values[index])
    _finish(tensor)


def _finish(destination: Tensor | Stored) -> None:
    if not isinstance(destination, Tensor):
        destination.finish()


def _read(source: Any, index: Index = (), dtype: torch.dtype | None = None) -> Tensor:
    values: Tensor = source[index or ...]
    return values if dtype is None else values.to(dtype)


def _pieces(source: Any, own: Index) -> Iterator[Index]:
    """Divide an index along its first axis, so that a piece of `source` is small."""
    shape = _shape(source)
    if not shape:
        yield ()
        return
    own = (*own, *(slice(0, size) for size in shape[len(own) :]))
    row_bytes = 4
    for size in shape[1:]:
        row_bytes *= size
    rows = max(1, _PIECE_BYTES // max(1, row_bytes))
    for start in range(own[0].start, own[0].stop, rows):
        yield (slice(start, min(start + rows, own[0].stop)), *own[1:])


def _shape(source: Any) -> tuple[int, ...]:
    return tuple(source.shape if isinstance(source, Tensor) else source.get_shape())


def _no_faults() -> LoadStateDictInfo:
    """Makes Transformers raise `SkipParameters` if a conversion fails, and record why."""
    return LoadStateDictInfo(set(), set(), set(), [], {}, set())

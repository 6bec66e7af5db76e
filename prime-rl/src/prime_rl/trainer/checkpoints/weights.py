"""Exports weights: gathers the shards, renames them as on the hub, and writes files for Transformers and vLLM."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from prime_rl.checks.adapters import ADAPTER_CONFIG, ADAPTER_DIRECTORY, ADAPTER_TENSORS
from prime_rl.configs.trainer import WeightCheckpointConfig
from prime_rl.run.process import own_beats
from prime_rl.trainer.model.build import own_class
from prime_rl.trainer.model.lora import (
    PeftAdapter,
    adapter_parameter_names,
    gather_adapter,
    merge_adapter,
)
from prime_rl.trainer.model.quantized import QuantizedLinear, scale_names
from prime_rl.trainer.model.vision import vision_of
from prime_rl.transport.language_part import PROCESSOR_FILES, part_of
from prime_rl.transport.loading import float32_names, full_tensor, has_score
from prime_rl.transport.weights import bundles_of
from prime_rl.utils.files import replacing_directory

SaveFormat = Literal["safetensors", "torch"]
HUB_FILE_SIZE = "5GB"
"""The hub's limit for a file of weights."""
CRITIC_DIRECTORY = "critic"
"""Where a policy's export holds that of its critic."""
_GPT_NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
"""Names of these values in GPT-NeoX for Transformers 4; 5 still reads them."""
_FILE_PATTERNS = {"safetensors": "model{suffix}.safetensors", "torch": "pytorch_model{suffix}.bin"}


def gather_weights(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """A copy of all weights in host memory on rank 0, and an empty dict on the others. Collective.

    See `gather_bundles`.
    """
    bundles = gather_bundles(model, dtype, [0] * len(bundles_of(model.state_dict())))
    return {name: tensor for bundle in bundles for name, tensor in bundle.items()}


@torch.no_grad()
def gather_bundles(model: PreTrainedModel, dtype: torch.dtype, owners: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    """Copies of the weights outside the decoder layers, then of each layer's: in host memory on the rank that
    `owners` names for the bundle, empty on the others. Collective: every process exhausts the iterator.

    Names are those of the hub. Of tied weights, only the one that Transformers keeps is returned. Floating-point
    tensors are cast to `dtype`, except those that Transformers loads in float32 whatever the model's dtype. Adapters
    are merged into their weights. No process holds more whole tensors than its own and one that is gathered.
    """
    in_float32, part = float32_names(model, dtype), part_of(model)
    left_out = adapter_parameter_names(model).union(model.all_tied_weights_keys, scale_names(model))
    state = model.state_dict()
    for names, owner in zip(bundles_of(state), owners, strict=True):
        bundle: dict[str, Tensor] = {}
        for name in names:
            own_beats().tick()
            if name in left_out:
                continue
            layer, tensor = model.get_submodule(name.rpartition(".")[0]), state[name]
            if isinstance(layer, QuantizedLinear) and name.endswith(".packed"):
                name, whole = name.removesuffix("packed") + "weight", layer.full_weight()
            else:
                whole = full_tensor(tensor)
            full = merge_adapter(model, name, whole)
            if dist.get_rank() == owner:
                wanted = torch.float32 if in_float32.search(name) else dtype
                target = wanted if full.is_floating_point() else full.dtype
                # Always a copy: training continues in the tensors of the model.
                bundle[name] = full.to("cpu", target, copy=True)
            del whole, full  # before the next one is gathered
        # A conversion never joins tensors of different layers.
        if not bundle:
            yield {}
        elif part is None:
            yield dict(revert_weight_conversion(model, bundle))
        else:
            yield part.names_of_files(model, bundle)


def share_out(model: PreTrainedModel, ranks: int) -> list[int]:
    """The rank that keeps each bundle of `gather_bundles`, so that all ranks keep about as much."""
    state, held, owners = model.state_dict(), [0] * ranks, []
    for names in bundles_of(state):
        owners.append(held.index(min(held)))
        held[owners[-1]] += sum(state[name].nbytes for name in names)
    return owners


def save_own_weights(weights: Mapping[str, Tensor], directory: Path, save_format: SaveFormat) -> None:
    """Write the weights that this rank keeps, as one of a checkpoint's files, and on rank 0 the index. Collective.

    When it returns on rank 0, all files are there.
    """
    pattern, rank, size = _FILE_PATTERNS[save_format], dist.get_rank(), dist.get_world_size()
    file = pattern.format(suffix=f"-{rank + 1:05}-of-{size:05}")
    if weights:
        _save_file(dict(weights), directory / file, save_format)
    # Tensors of other ranks are known only to them, as a conversion may rename or split them.
    own = (dict.fromkeys(weights, file), sum(tensor.nbytes for tensor in weights.values()))
    every: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(own, every)
    if every is not None:
        weight_map = {name: held for files, _ in every for name, held in files.items()}
        index = {"metadata": {"total_size": sum(total for _, total in every)}, "weight_map": weight_map}
        write_index(index, directory, save_format)


def save_weights(
    state: Mapping[str, Tensor],
    directory: Path,
    save_sharded: bool = True,
    save_format: SaveFormat = "safetensors",
    largest_file: int | str = HUB_FILE_SIZE,
) -> None:
    """Write weights for Transformers: one file, or with `save_sharded` several files and an index."""
    from huggingface_hub import split_torch_state_dict_into_shards

    pattern = _FILE_PATTERNS[save_format]
    if not save_sharded:
        _save_file(dict(state), directory / pattern.format(suffix=""), save_format)
        return
    split = split_torch_state_dict_into_shards(dict(state), filename_pattern=pattern, max_shard_size=largest_file)
    for file_name, names in split.filename_to_tensors.items():
        own_beats().tick()
        _save_file({name: state[name] for name in names}, directory / file_name, save_format)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_index(index, directory, save_format)


def write_index(index: Mapping[str, Any], directory: Path, save_format: SaveFormat) -> None:
    """Write which of a checkpoint's files holds which tensor."""
    name = f"{_FILE_PATTERNS[save_format].format(suffix='')}.index.json"
    (directory / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def save_adapter(adapter: PeftAdapter, directory: Path) -> None:
    """Write PEFT's two files into `directory`, and create it if necessary."""
    directory.mkdir(exist_ok=True)
    _save_file(adapter.state, directory / ADAPTER_TENSORS, "safetensors")
    (directory / ADAPTER_CONFIG).write_text(json.dumps(adapter.config, indent=2, sort_keys=True) + "\n")


@dataclass(frozen=True, slots=True)
class Export:
    """The tensors of an export, in host memory."""

    weights: dict[str, Tensor]
    dtype: torch.dtype
    """Dtype of the weights, except those that Transformers loads in float32."""
    adapter: PeftAdapter | None = None
    critic: tuple[PreTrainedModel, Export] | None = None
    """The critic of the model and its own export, merged if it has adapters."""


def gather_export(
    model: PreTrainedModel, config: WeightCheckpointConfig, dtype: torch.dtype, critic: PreTrainedModel | None = None
) -> Export:
    """A copy of the tensors that `config` asks for, weights in `dtype`, on rank 0. Collective."""
    # In float32, so that training can continue from it. It is small.
    adapter = gather_adapter(model, torch.float32) if config.save_adapter_separately else None
    of_critic = None if critic is None else (critic, Export(gather_weights(critic, dtype), dtype))
    return Export(gather_weights(model, dtype), dtype, adapter, of_critic)


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    config: WeightCheckpointConfig,
    dtype: torch.dtype,
    critic: PreTrainedModel | None = None,
) -> None:
    """Write a directory that `from_pretrained` loads. Collective.

    It holds weights in `dtype`, config, generation config, tokenizer, chat template and `STABLE`, and appears whole.
    The `critic` is in a directory of the same kind in it.
    """
    export = gather_export(model, config, dtype, critic)
    if dist.get_rank() == 0:
        write_export(export, model, tokenizer, target, config)


def write_export(
    export: Export,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    config: WeightCheckpointConfig,
    marker: str | None = None,
) -> None:
    """Write a gathered `export` to `target`, with an empty file `marker`. Reads only the configs of `model`."""
    part, weights = part_of(model), export.weights
    if part is not None and part.is_exported_alone:
        weights = part.from_checkpoint(weights)
        weights, part = revert_weight_conversion(model, weights) if part.is_stacked else weights, None
    with replacing_directory(target) as scratch:
        others = {} if part is None else part.others()
        save_weights({**others, **weights}, scratch, config.save_sharded, config.save_format)
        model_config = copy.deepcopy(model.config)
        model_config.dtype = str(export.dtype).removeprefix("torch.")
        model_config.architectures = [type(model).__name__.removeprefix("FSDP")]
        if not model.all_tied_weights_keys:
            # Transformers unties what the files hold apart, also where the config ties it. vLLM goes by the config.
            model_config.get_text_config().tie_word_embeddings = model_config.tie_word_embeddings = False
        save_code(model, model_config, scratch)
        if part is None:
            model_config.save_pretrained(scratch)
            _change_json(scratch / "config.json", add_older_keys)
            vision = vision_of(model)
            for name, content in (vision.files if vision is not None else {}).items():
                (scratch / name).write_bytes(content)
        else:
            (scratch / "config.json").write_text(json.dumps(part.config(export.dtype), indent=2, sort_keys=True) + "\n")
            for file in filter(Path.is_file, (part.folder / name for name in PROCESSOR_FILES)):
                (scratch / file.name).write_bytes(file.read_bytes())
        if not has_score(model):
            generation_config = copy.deepcopy(model.generation_config)
            generation_config.use_cache = True
            if generation_config.eos_token_id is None:
                generation_config.eos_token_id = tokenizer.eos_token_id
            # `save_pretrained` refuses the inconsistent sampling defaults that many hub models ship.
            generation_config.to_json_file(scratch / "generation_config.json")
        save_tokenizer(tokenizer, scratch)
        if export.adapter is not None:
            save_adapter(export.adapter, scratch / ADAPTER_DIRECTORY)
        if export.critic is not None:
            critic, of_critic = export.critic
            write_export(of_critic, critic, tokenizer, scratch / CRITIC_DIRECTORY, config)
        if marker is not None:
            (scratch / marker).touch()


def save_code(model: PreTrainedModel, config: PretrainedConfig, directory: Path) -> None:
    """Copy the code that a model brought with it into `directory`, and make `config` name those files alone.

    Many models of Transformers also name code in their repository. It was not used, and loading it would fail.
    """
    named: dict[str, str] = getattr(config, "auto_map", None) or {}
    vars(config).pop("auto_map", None)
    code = own_class(model)
    if code is None:
        return
    custom_object_save(code, directory)
    file = code.__module__.rpartition(".")[2]
    # A name may start with the repository that holds the file: `owner/name--file.Class`.
    local = {kind: reference.rpartition("--")[2] for kind, reference in named.items()}
    config.auto_map = {
        kind: reference
        for kind, reference in (local | {"AutoModelForCausalLM": f"{file}.{code.__name__}"}).items()
        if (directory / f"{reference.partition('.')[0]}.py").is_file()
    }


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the files of a tokenizer. Its config names code only if the code is there, as for models."""
    tokenizer.save_pretrained(directory)
    has_code = type(tokenizer).__module__.startswith("transformers_modules.")

    def change(content: dict[str, Any]) -> None:
        if not has_code:
            content.pop("auto_map", None)
        # Transformers 4 knows neither this class nor a list under this key, and 5 still reads both older names.
        if content.get("tokenizer_class") == "TokenizersBackend":
            content["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(content.get("extra_special_tokens"), list):
            content["additional_special_tokens"] = content.pop("extra_special_tokens")

    _change_json(directory / "tokenizer_config.json", change)


def add_older_keys(config: dict[str, Any]) -> None:
    """Add what Transformers 4 reads to a config of 5, which also reads it.

    Without the keys, 4 loads the weights with the default rotary frequencies of their class, and says nothing.
    """
    if "dtype" in config:
        config["torch_dtype"] = config["dtype"]
    kind = str(config.get("model_type"))
    # 5 has one name for the number of experts, under which Qwen3-MoE in 4 does not look: it takes its default, 128.
    names = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    if names.get("num_experts") == "num_local_experts" and "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    rope = config.get("rope_parameters") or {}
    # Models with a set for each kind of layer, as Gemma 3, have other names in 4.
    if "rope_theta" not in rope:
        return
    names = _GPT_NEOX_NAMES if kind.startswith("gpt_neox") else {}
    elsewhere = {"rope_theta", "partial_rotary_factor"}
    config |= {names.get(key, key): rope[key] for key in elsewhere & rope.keys()}
    rotary = rope.get("rope_type", "default")
    if rotary == "default":
        return
    # Classes of 4 count the keys: Phi-3 takes three, and OLMo two. So the type has one name, and no value is repeated.
    if "type" in rope or rotary == "longrope":
        elsewhere |= {"rope_type", "type"}
    if rotary == "longrope" and "original_max_position_embeddings" in config:
        elsewhere.add("original_max_position_embeddings")
    config["rope_scaling"] = {key: value for key, value in rope.items() if key not in elsewhere}
    if "rope_type" in elsewhere:
        config["rope_scaling"]["type"] = rotary


def _change_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _save_file(state: dict[str, Tensor], path: Path, save_format: SaveFormat) -> None:
    if save_format == "torch":
        torch.save(state, path)
        return
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})
    # safetensors creates files that only their owner can read. Anyone who can read the directory should load them.
    path.chmod(path.parent.stat().st_mode & 0o666)

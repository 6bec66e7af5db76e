"""The language model inside a checkpoint of several parts, such as Gemma 3's: its config and its weights' names.

Trainer and engine run the language part alone, as Transformers' causal class of its config. Files keep the checkpoint's
names, exports also its other tensors, so that they load as the class that the checkpoint names. A vision tower costs no
memory: it stays on the disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from prime_rl.checks.disk import tensor_shapes
from prime_rl.checks.model_description import PLAIN_LANGUAGE_PARTS, ModelDescription, is_of_tower
from prime_rl.utils.errors import StartFault

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files that a checkpoint of several parts has besides those of a language model."""
_ATTRIBUTE = "_language_part"
_STACKED = ".experts.down_proj"
_LAYER = re.compile(r"(?<=\.layers\.)\d+")


@dataclass(frozen=True, slots=True)
class LanguagePart:
    """Where the weights of a language model are in a checkpoint."""

    folder: Path
    names: Mapping[str, str]
    """The checkpoint's name of each of the model's weights. Tied weights that it does not hold are left out."""
    base: str
    """Path of the layers in the language model, as `model`."""
    path: str
    """The same path in the class that the checkpoint names, as `model.language_model`."""
    is_stacked: bool = False
    """Whether the checkpoint holds a layer's experts in one tensor, as the model does. Others hold them one by one."""
    is_transposed: bool = False
    """Whether its stacked experts are [expert, inputs, outputs], as Qwen3-VL-MoE's. The model's have outputs first."""
    vocab_size: int | None = None
    """Number of embeddings, if the model has been given more than the checkpoint."""
    layers: tuple[int, ...] | None = None
    """The number in the checkpoint of each of the model's layers. None if it has the same layers."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Number of rows of the model's embeddings, by name, where the checkpoint has further ones for images."""
    is_exported_alone: bool = False
    """Whether exports leave the other tensors out. Weights on their way to an engine have the same names either way."""

    @classmethod
    def of(cls, model: PreTrainedModel, whole: PreTrainedModel, folder: Path) -> LanguagePart:
        """Find the weights of `model` in the safetensors files of `folder`, and its modules in `whole`.

        Both models may be on the meta device.

        Raises:
            StartFault: the files have no such weights, or several.
        """
        from transformers.core_model_loading import revert_weight_conversion

        shapes, state = tensor_shapes(folder), model.state_dict()
        held = [name for name in shapes if not is_of_tower(name)]
        is_stacked = any(name.endswith(_STACKED) for name in held)
        own = list(state if is_stacked else revert_weight_conversion(model, state))
        base = f"{model.base_model_prefix}."
        layers = ModelDescription(whole.config.to_dict()).layers_on_text
        in_a_block = next(_numbered(name, layers).removeprefix(base) for name in own if ".layers.0." in name)
        start = _only_start(held, in_a_block)
        path = _only_start([name for name in whole.state_dict() if not is_of_tower(name)], in_a_block)
        names: dict[str, str] = {}
        for name in own:
            # The head stands beside the layers or, in older checkpoints, beside the part that holds them.
            places = (
                [start + _numbered(name, layers).removeprefix(base)]
                if name.startswith(base)
                else [each for each in held if each == name or each.endswith(f".{name}")]
            )
            present = [place for place in places if place in held]
            if len(present) == 1:
                names[name] = present[0]
            elif present or name not in model.all_tied_weights_keys:
                raise StartFault(f"{name} is {', '.join(present) or 'missing'} in the checkpoint")
        # By this tensor, as the other is a square where experts are half as wide as the model.
        turned = [tuple(state[name].shape) != tuple(shapes[names[name]]) for name in own if name.endswith(_STACKED)]
        # Mllama's head has no rows for the tokens of images, which are never sampled.
        rows = {
            name: len(state[name])
            for name, held_as in names.items()
            if layers is not None and len(state[name]) < shapes[held_as][0]
        }
        return cls(
            *(folder, names, model.base_model_prefix, path.removesuffix("."), is_stacked, any(turned)),
            layers=layers,
            rows=rows,
        )

    def names_of_files(self, model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """All weights of the model by the checkpoint's names."""
        from transformers.core_model_loading import revert_weight_conversion

        return self.to_checkpoint(state if self.is_stacked else revert_weight_conversion(model, state))

    def module_in_whole(self, name: str) -> str:
        """The name in the class that the checkpoint names, of a module or weight of the model. PEFT and vLLM use it."""
        if name.startswith(f"{self.base}."):
            return f"{self.path}{_numbered(name, self.layers).removeprefix(self.base)}"
        return f"{self._causal_model}{name}"

    def module_in_part(self, name: str) -> str:
        """The reverse of `module_in_whole`."""
        if name.startswith(f"{self.path}."):
            back = None if self.layers is None else {number: index for index, number in enumerate(self.layers)}
            return f"{self.base}{_numbered(name.removeprefix(self.path), back)}"
        return name.removeprefix(self._causal_model)

    @property
    def _causal_model(self) -> str:
        """Where the whole holds the causal class, as Llama 4's, with its head; empty if it has the head itself."""
        return self.path.removesuffix(self.base) if self.path.endswith(f".{self.base}") else ""

    def others(self) -> dict[str, Tensor]:
        """The checkpoint's other tensors, such as a vision tower's, by the checkpoint's names."""
        return dict(_tensors(self.folder, self.names_of_others()))

    def names_of_others(self) -> set[str]:
        return tensor_shapes(self.folder).keys() - frozenset(self.names.values())

    def to_checkpoint(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights by the checkpoint's names."""
        whole = {self.names[name]: self._turned(name, tensor) for name, tensor in weights.items()}
        added = {self.names[name]: rows for name, rows in self.rows.items() if name in weights}
        for name, tensor in _tensors(self.folder, added):
            whole[name] = torch.cat([whole[name], tensor[added[name] :].to(whole[name])])
        return whole

    def from_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The language model's weights among `tensors`, by its own names."""
        own = {held: name for name, held in self.names.items()}
        mine = {own[name]: self._turned(own[name], tensor) for name, tensor in tensors.items() if name in own}
        return mine | {name: mine[name][:rows] for name, rows in self.rows.items() if name in mine}

    def is_turned(self, name: str) -> bool:
        """Whether the files hold a weight of the model with its last two dimensions swapped."""
        return self.is_transposed and ".experts." in name

    def _turned(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous() if self.is_turned(name) else tensor

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """The checkpoint's `config.json`, with the dtype of an export."""
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        stated = [each for each in (config, config.get("text_config")) if isinstance(each, dict)]
        for each in stated:
            each.update({key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in each})
        if self.vocab_size is not None:
            text = config.get("text_config", config)
            text["vocab_size"] = self.vocab_size
            config.update({key: self.vocab_size for key in ("vocab_size",) if key in config})
        return config


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the language model; `config` itself if that is all it describes."""
    from transformers import AutoConfig

    text = config.get_text_config()
    if text is not config:
        if text.model_type in PLAIN_LANGUAGE_PARTS:
            settings = {key: value for key, value in text.to_dict().items() if key != "model_type"}
            if text.model_type == "qwen3_vl_moe_text":  # its routers always do, and its config does not say so
                settings["norm_topk_prob"] = True
            if (layers := ModelDescription(settings).layers_on_text) is not None:
                settings |= {"num_hidden_layers": len(layers), "attention_dropout": settings.pop("dropout")}
            rope = settings["rope_parameters"]
            settings["rope_parameters"] = {key: rope[key] for key in rope if not key.startswith("mrope")}
            text = AutoConfig.for_model(PLAIN_LANGUAGE_PARTS[text.model_type], **settings)
        # The class of the whole model ties the head, if its own config says so. Mllama's has no such key.
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
        text.name_or_path = config.name_or_path
    return text


def attach(model: PreTrainedModel, part: LanguagePart | None) -> None:
    """Remember that `model` is a part of a checkpoint."""
    setattr(model, _ATTRIBUTE, part)


def part_of(model: PreTrainedModel) -> LanguagePart | None:
    """The part of a checkpoint that `model` is; None if it is all of it."""
    part = getattr(model, _ATTRIBUTE, None)
    assert part is None or isinstance(part, LanguagePart)
    return part


def find_part(model: PreTrainedModel, name: str) -> LanguagePart:
    """Find the weights of `model`, which may be on the meta device, in the checkpoint `name`.

    Raises:
        StartFault: the files do not hold it.
        OSError: a hub id cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from transformers import AutoConfig, AutoModelForImageTextToText

    patterns = ["*.safetensors", "*.json", "*.jinja"]
    folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, allow_patterns=patterns))
    with torch.device("meta"):
        of_whole = with_other_tower(AutoConfig.from_pretrained(folder))
        whole: PreTrainedModel = AutoModelForImageTextToText.from_config(of_whole)  # type: ignore[no-untyped-call]
    return LanguagePart.of(model, whole, folder)


def with_other_tower(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a whole checkpoint, changed where its tower needs a package, for uses that do not run the tower.

    That of Gemma 3n needs timm.
    """
    from transformers import SiglipVisionConfig

    if config.model_type == "gemma3n":
        kept = {key: getattr(config.vision_config, key) for key in ("vocab_size", "vocab_offset", "rms_norm_eps")}
        sizes = {"hidden_size": config.vision_config.hidden_size, "num_hidden_layers": 1, "num_attention_heads": 1}
        vars(config)["vision_config"] = SiglipVisionConfig(**kept, **sizes)  # past the check of its type
    return config


def _numbered(name: str, numbers: Sequence[int] | Mapping[int, int] | None) -> str:
    """A name with the number of its layer replaced by that of `numbers`."""
    return name if numbers is None else _LAYER.sub(lambda found: str(numbers[int(found[0])]), name)


def _only_start(names: Iterable[str], end: str) -> str:
    """What precedes `end` in the only name that has it.

    Raises:
        StartFault: there is none, or several.
    """
    found = [name for name in names if name.endswith(f".{end}")]
    if len(found) != 1:
        raise StartFault(f"expected one weight {end} of a language model, found {', '.join(found) or 'none'}")
    return found[0].removesuffix(end)


def _tensors(folder: Path, wanted: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    names = frozenset(wanted)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118 - not a dict
                if name in names:
                    yield name, held.get_tensor(name)

"""How checkpoints write and read images: the text that stands for an image, and the pixels for the vision tower.

Shared by trainer and embedded engine. Of a checkpoint's processor, its image processor is used as it is, and its chat
template; what is written in place of an image is written here, because the processors of most families cannot be loaded
without those for videos. Without torch, so that a preflight counts the tokens of images too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from prime_rl.utils.errors import StartFault
from prime_rl.utils.logger import count_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Span = tuple[int, int]
"""Characters [begin, end), or height and width."""

_INPUTS = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
"""What models take of an image processor's result."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models writes and reads images."""

    placeholder: str
    """What the chat template writes for an image."""
    token: str
    """The token that stands for one feature."""
    expand: Callable[[Any, PretrainedConfig, Span], tuple[str, int]]
    """From image processor, model config, height and width: the text for one image, and its number of features."""
    is_nested: bool = False
    """Whether the image processor takes a list of images for each text."""
    has_rope_positions: bool = False
    """Whether the tokens of an image have positions of time, height and width, as in Qwen's models."""
    sees_whole_images: bool = False
    """Whether the tokens of an image also attend to those behind them in the same image, as in Gemma 3."""


def _expand_tiles(processor: Any, config: PretrainedConfig, size: Span) -> tuple[str, int]:
    """Idefics 3 and SmolVLM: the tiles of a large image row by row, then all of it, each with as many features."""
    vision: Any = config.vision_config
    features = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    _, rows, columns = processor.get_number_of_image_patches(*size)
    mark, one = "<fake_token_around_image>", "<image>" * features
    tiles = (
        "".join(f"{mark}<row_{row}_col_{column}>{one}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    )
    whole = f"{mark}<global-img>{one}{mark}"
    text = "".join(tiles) + (f"\n{whole}" if rows else whole)
    return text, features * (rows * columns + 1)


def _expand_patches(processor: Any, config: PretrainedConfig, size: Span) -> tuple[str, int]:
    """Qwen: one feature for each square of `merge_size` x `merge_size` patches."""
    features = processor.get_number_of_image_patches(*size) // processor.merge_size**2
    return "<|image_pad|>" * features, features


def _expand_soft_tokens(processor: Any, config: PretrainedConfig, size: Span) -> tuple[str, int]:
    """Gemma 3: as many features for every image."""
    features: int = config.mm_tokens_per_image
    return f"\n\n<start_of_image>{'<image_soft_token>' * features}<end_of_image>\n\n", features


_QWEN = Family("<|image_pad|>", "<|image_pad|>", _expand_patches, has_rope_positions=True)
_TILES = Family("<image>", "<image>", _expand_tiles, is_nested=True)
FAMILIES: Mapping[str, Family] = {
    "gemma3": Family("<start_of_image>", "<image_soft_token>", _expand_soft_tokens, sees_whole_images=True),
    "idefics3": _TILES,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": _TILES,
}


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Writes and reads images as a checkpoint does."""

    family: Family
    config: PretrainedConfig
    """Of the whole model."""
    processor: Any
    """The checkpoint's image processor."""
    token_id: int
    """Of the token that stands for one feature."""

    @property
    def identity(self) -> str:
        """Changes with all that decides how many tokens an image takes, and its pixels."""
        return str(self.processor.to_json_string())

    def written(self, image: Image) -> tuple[str, int]:
        """The text that stands for an image, and its number of features."""
        return self.family.expand(self.processor, self.config, (image.height, image.width))

    def expanded(self, text: str, written: Sequence[str]) -> tuple[str, Callable[[int], int]]:
        """A rendered conversation with the texts of its images in place of their placeholders, and a function that
        tells where a place in it has moved to.

        Raises:
            ValueError: it has not as many placeholders as there are images.
        """
        mark = self.family.placeholder
        pieces = text.split(mark)
        if len(pieces) - 1 != len(written):
            raise ValueError(
                f"{count_of('image', len(written))}, and {mark} is {len(pieces) - 1} times in the rendered text: the "
                "chat template must write it once for each image, and no message may hold it"
            )
        joined, at, grown = [pieces[0]], len(pieces[0]), [(0, 0)]
        for each, behind in zip(written, pieces[1:], strict=True):
            joined += [each, behind]
            at += len(mark)
            grown.append((at, grown[-1][1] + len(each) - len(mark)))
            at += len(behind)
        return "".join(joined), lambda place: place + next(by for end, by in reversed(grown) if place >= end)

    def inputs(self, images: Sequence[Image]) -> dict[str, np.ndarray]:
        """Arguments of the model's `get_image_features`."""
        made = self.processor([list(images)] if self.family.is_nested else list(images))
        return {
            name: np.stack(value) if isinstance(value, list) else np.asarray(value)
            for name, value in made.items()
            if name in _INPUTS
        }

    def grids(self, inputs: Mapping[str, np.ndarray]) -> list[list[int]]:
        """Rows and columns of the features of each image, for families with positions of height and width."""
        grids: list[list[int]] = (inputs["image_grid_thw"][:, 1:] // self.processor.merge_size).tolist()
        return grids


def rope_positions(is_image_T: np.ndarray, grids: Sequence[Sequence[int]]) -> np.ndarray:
    """Positions of time, height and width of a sequence's tokens: [3, T]. `grids`: rows and columns of each image.

    Text has three equal positions. An image begins where the text before it ends, its features are told apart by row
    and column, and the text behind it continues after its longer side (Qwen2-VL, Wang et al. 2024).
    """
    positions = np.zeros((3, len(is_image_T)), dtype=np.int64)
    begins = np.flatnonzero(np.diff(is_image_T, prepend=~is_image_T[:1]))
    sizes, start = iter(grids), 0
    for begin, end in pairwise([*begins.tolist(), len(is_image_T)]):
        at = begin
        while at < end:  # images may stand side by side
            rows, columns = next(sizes) if is_image_T[at] else (1, 0)
            count = min(rows * columns, end - at) or end - at
            if is_image_T[at]:
                places = np.arange(rows * columns)
                grid = np.stack([np.zeros_like(places), *np.divmod(places, columns)])
                positions[:, at : at + count] = start + grid[:, :count]
                start += max(rows, columns)
            else:
                positions[:, at:end] = start + np.arange(count)
                start += count
            at += count
    return positions


def image_reader(name: str, tokenizer: PreTrainedTokenizerBase) -> ImageReader:
    """The reader of the checkpoint `name`, whose type is one of `FAMILIES`.

    Raises:
        StartFault: images are not read with its settings.
        OSError, ValueError, KeyError, ImportError: it has no image processor, or that cannot be loaded.
    """
    # The libraries of models take seconds.
    from transformers import AutoConfig, AutoImageProcessor

    config = AutoConfig.from_pretrained(name)
    processor = AutoImageProcessor.from_pretrained(name, backend="pil")  # type: ignore[no-untyped-call]
    family = FAMILIES[config.model_type]
    token_id, wanted = tokenizer.convert_tokens_to_ids(family.token), config.image_token_id
    if token_id != wanted:
        raise StartFault(f"its tokenizer has the id {token_id} for {family.token}, not {wanted}")
    if fault := _settings_fault(processor):
        raise StartFault(f"its preprocessor_config.json has {fault}")
    return ImageReader(family, config, processor, wanted)


def image_features(base: Any, inputs: Mapping[str, np.ndarray], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The features [F, H] that `base`, the body of a checkpoint's class, makes of images, and those that further layers
    add (DeepStack): with the dtype of `like` and on its device."""
    import torch

    from prime_rl.transport.weights import to_device

    def flat(features: Any) -> Tensor:
        joined: Tensor = torch.cat(list(features)) if isinstance(features, list | tuple) else features
        return joined.flatten(0, -2).to(like.dtype)

    given = {name: to_device(torch.from_numpy(value), like.device) for name, value in inputs.items()}
    given["pixel_values"] = given["pixel_values"].to(like.dtype)
    found = base.get_image_features(**given, return_dict=True)
    return flat(found.pooler_output), [flat(each) for each in getattr(found, "deepstack_features", None) or ()]


def _settings_fault(processor: Any) -> str | None:
    """Why an image processor makes other numbers of features than `Family.expand` counts; None if it does not."""
    if getattr(processor, "do_pan_and_scan", None):
        return "do_pan_and_scan, which is not supported"
    if not processor.do_resize:
        return "do_resize = false, which is not supported"
    if hasattr(processor, "do_image_splitting") and not processor.do_normalize:
        return "do_normalize = false, with which the model takes black tiles for padding"
    if getattr(processor, "do_image_splitting", None):
        longest, tile = processor.size["longest_edge"], processor.max_image_size["longest_edge"]
        if longest % tile:
            return f"size.longest_edge = {longest}, which must be a multiple of max_image_size.longest_edge = {tile}"
    return None

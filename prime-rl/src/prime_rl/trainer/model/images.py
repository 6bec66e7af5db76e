"""Images in training data: the tokens that stand for them, and the pixels for the model's vision tower.

Without torch, so that a preflight counts the tokens of images too. A row's images are decoded when it is tokenized,
which tells how many tokens they take, and again when it is trained on: samples hold where their images are, not pixels.

Of a checkpoint's processor, its image processor is used as it is, and its chat template; what is written in place of an
image is written here, because the processors of most families cannot be loaded without those for videos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prime_rl.checks.model_description import vision_fault
from prime_rl.configs.model import ModelConfig
from prime_rl.run.contact_sheet import SmallPicture
from prime_rl.storage.staging import StoredImages
from prime_rl.trainer.process.errors import BadRow, DataError, ModelError
from prime_rl.utils.images import Fetch, ImageFault, ImageLimits, located, read_image, thumbnail
from prime_rl.utils.logger import count_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from prime_rl.trainer.sft.data.conversation import TokenizedSample

Span = tuple[int, int]
"""Characters [begin, end)."""

_INPUTS = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
"""What models take of an image processor's result."""


@dataclass(frozen=True, slots=True)
class SampleImage:
    """An image of a sample."""

    source: str | bytes
    """An absolute path, a data URL, or the bytes of a file."""
    tokens: int
    """Number of tokens that its features replace."""


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of a packed row of T tokens, for the model."""

    inputs: Mapping[str, np.ndarray]
    """Arguments of the model's `get_image_features`."""
    features: int
    """How many features the model makes of them."""
    feature_of_token_T: np.ndarray
    """Index of the feature that replaces each token's embedding, plus 1; 0 for text."""
    rope_positions_3T: np.ndarray | None
    """Positions of time, height and width, for models that have them."""


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
class Images:
    """Reads the images of a run's data as its model takes them."""

    family: Family
    config: PretrainedConfig
    """Of the whole model."""
    processor: Any
    """The checkpoint's image processor."""
    token_id: int
    limits: ImageLimits
    fetch: Fetch = field(default_factory=StoredImages)
    """Gets images that lie on S3."""

    @property
    def identity(self) -> str:
        """Changes with all that decides how many tokens an image takes, and its pixels."""
        return self.processor.to_json_string()

    def expanded(
        self, text: str, spans: Sequence[Span], sources: Sequence[Any], folder: Path
    ) -> tuple[str, list[Span], tuple[SampleImage, ...]]:
        """A rendered conversation and its trained spans, with each image in place of its placeholder.

        Raises:
            BadRow: an image cannot be read, or the template has not written as many placeholders as there are images.
        """
        mark = self.family.placeholder
        pieces = text.split(mark)
        if len(pieces) - 1 != len(sources):
            raise BadRow(
                f"{count_of('image', len(sources))}, and {mark} is {len(pieces) - 1} times in the rendered text: the "
                "chat template must write it once for each image, and no message may hold it"
            )
        if len(sources) > self.limits.max_images:
            raise BadRow(f"{len(sources)} images, more than model.vision.max_images = {self.limits.max_images}")
        images: list[SampleImage] = []
        expanded, at, grown = [pieces[0]], len(pieces[0]), [(0, 0)]
        for number, (source, behind) in enumerate(zip(sources, pieces[1:], strict=True), start=1):
            try:
                image = read_image(source, folder, self.limits, self.fetch)
            except ImageFault as fault:
                raise BadRow(f"image {number}: {fault}") from fault
            written, features = self.family.expand(self.processor, self.config, (image.height, image.width))
            images.append(SampleImage(located(source, folder), features))
            expanded += [written, behind]
            at += len(mark)
            grown.append((at, grown[-1][1] + len(written) - len(mark)))
            at += len(behind)

        def moved(place: int) -> int:
            return place + next(by for end, by in reversed(grown) if place >= end)

        return "".join(expanded), [(moved(begin), moved(end)) for begin, end in spans], tuple(images)

    def masked(self, sample: TokenizedSample, images: tuple[SampleImage, ...]) -> TokenizedSample:
        """A sample with its images, whose tokens are not trained.

        Raises:
            BadRow: a text holds the token that stands for images.
        """
        is_image = sample.token_ids == self.token_id
        features = sum(each.tokens for each in images)
        if not is_image.any() and features == 0:
            return sample
        if is_image.sum() > features or (is_image.sum() < features and not sample.is_cut):
            raise BadRow(f"a text holds {self.family.token}, the token that stands for images: remove it")
        return replace(sample, is_trained=sample.is_trained & ~is_image, images=images)

    def of_row(self, samples: Iterable[TokenizedSample], row_tokens: int) -> RowImages | None:
        """The images of a packed row that holds `samples`, cut or padded to `row_tokens`; None if it has none.

        Raises:
            DataError: an image has changed since its row was tokenized.
        """
        images: list[SampleImage] = []
        of_samples: list[tuple[np.ndarray, int]] = []
        room, features, feature_of_token = row_tokens, 0, []
        for sample in samples:
            is_image = sample.token_ids[:-1][:room] == self.token_id
            room -= len(is_image)
            feature_of_token.append(np.where(is_image, features + np.cumsum(is_image), 0))
            # What is cut off needs no features. Of an image that is cut in two, the rest is computed in vain.
            needed, kept = int(is_image.sum()), 0
            for each in sample.images:
                if needed > 0:
                    images.append(each)
                    needed -= each.tokens
                    features += each.tokens
                    kept += 1
            of_samples.append((is_image, kept))
        if not images:
            return None
        inputs = self._inputs(images)
        rope = None
        if self.family.has_rope_positions:
            grids = iter((inputs["image_grid_thw"][:, 1:] // self.processor.merge_size).tolist())
            parts = [_rope_positions(is_image, list(islice(grids, kept))) for is_image, kept in of_samples]
            rope = np.concatenate([*parts, np.zeros((3, room), dtype=np.int64)], axis=1)
        return RowImages(inputs, features, np.concatenate([*feature_of_token, np.zeros(room, dtype=np.int64)]), rope)

    def _inputs(self, images: Sequence[SampleImage]) -> dict[str, np.ndarray]:
        read = [self._again(each) for each in images]
        made = self.processor([read] if self.family.is_nested else read)
        return {
            name: np.stack(value) if isinstance(value, list) else np.asarray(value)
            for name, value in made.items()
            if name in _INPUTS
        }

    def small_pictures(self, images: Sequence[SampleImage]) -> list[SmallPicture]:
        """The images of samples, for a contact sheet."""
        return [
            SmallPicture(thumbnail(pixels), pixels.width, pixels.height, image.tokens)
            for image in images
            for pixels in [self._again(image)]
        ]

    def _again(self, image: SampleImage) -> Image:
        """The pixels of an image that has been read before."""
        try:
            pixels = read_image(image.source, Path(), self.limits, self.fetch)
        except ImageFault as fault:
            raise DataError(f"an image has changed since its row was read: {fault}") from fault
        _, features = self.family.expand(self.processor, self.config, (pixels.height, pixels.width))
        if features != image.tokens:
            raise DataError(f"an image has another size than when its row was read: {str(image.source)[:200]}")
        return pixels


def _rope_positions(is_image_T: np.ndarray, grids: Sequence[Sequence[int]]) -> np.ndarray:
    """Positions of time, height and width of a sample's tokens: [3, T]. `grids`: rows and columns of each image.

    Text has three equal positions. An image begins where the text before it ends, its features are told apart by row
    and column, and the text behind it continues after its longer side (Qwen2-VL, Wang et al. 2024).
    """
    positions = np.zeros((3, len(is_image_T)), dtype=np.int64)
    begins = np.flatnonzero(np.diff(is_image_T, prepend=~is_image_T[:1]))
    sizes, start = iter(grids), 0
    for begin, end in pairwise([*begins.tolist(), len(is_image_T)]):
        count = end - begin
        if not is_image_T[begin]:
            positions[:, begin:end] = start + np.arange(count)
            start += count
            continue
        rows, columns = next(sizes)
        grid = np.stack([np.zeros(rows * columns, dtype=np.int64), *np.divmod(np.arange(rows * columns), columns)])
        positions[:, begin:end] = start + grid[:, :count]
        start += max(rows, columns)
    return positions


def setup_images(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Images | None:
    """What reads the images of a run; None without `[model.vision]`.

    Raises:
        ModelError: images cannot be trained on with the model.
    """
    if config.vision is None:
        return None
    # The readers of samples come before the libraries of models, which take seconds.
    from transformers import AutoConfig, AutoImageProcessor

    from prime_rl.trainer.model.tokenizer import load_error, loading_code

    try:
        with loading_code(config.trust_remote_code):
            model_config = AutoConfig.from_pretrained(config.name)
            processor = AutoImageProcessor.from_pretrained(config.name, backend="pil")
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(load_error("model.name", config.name, error)) from error
    if fault := vision_fault(model_config.model_type):
        raise ModelError(f"model.name = {config.name}: {fault}")
    family = FAMILIES[model_config.model_type]
    token_id, wanted = tokenizer.convert_tokens_to_ids(family.token), model_config.image_token_id
    if token_id != wanted:
        raise ModelError(
            f"model.name = {config.name}: its tokenizer has the id {token_id} for {family.token}, not {wanted}"
        )
    if fault := _settings_fault(processor):
        raise ModelError(f"model.name = {config.name}: its preprocessor_config.json has {fault}")
    limits = ImageLimits(max_pixels=config.vision.max_pixels, max_images=config.vision.max_images)
    return Images(family, model_config, processor, wanted, limits)


def _settings_fault(processor: Any) -> str | None:
    """Why an image processor makes other numbers of features than `Family.expand` counts; None if it does not."""
    if getattr(processor, "do_pan_and_scan", None):
        return "do_pan_and_scan, which is not supported"
    if not processor.do_resize:
        return "do_resize = false, which is not supported"
    if getattr(processor, "do_image_splitting", None):
        longest, tile = processor.size["longest_edge"], processor.max_image_size["longest_edge"]
        if longest % tile:
            return f"size.longest_edge = {longest}, which must be a multiple of max_image_size.longest_edge = {tile}"
    return None

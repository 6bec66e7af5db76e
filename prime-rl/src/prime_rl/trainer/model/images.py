"""Images in training data: the tokens that stand for them, and the pixels for the model's vision tower.

Without torch, so that a preflight counts the tokens of images too. A row's images are decoded when it is tokenized,
which tells how many tokens they take, and again when it is trained on: samples hold where their images are, not pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prime_rl.checks.model_description import vision_fault
from prime_rl.configs.model import ModelConfig
from prime_rl.run.pictures import SmallPicture
from prime_rl.storage.staging import StoredImages
from prime_rl.trainer.process.errors import BadRow, DataError, ModelError
from prime_rl.transport.images import ImageReader, Span, image_reader, rope_positions
from prime_rl.transport.messages import ImageReference
from prime_rl.utils.errors import StartFault
from prime_rl.utils.images import Fetch, ImageFault, ImageLimits, located, read_image, thumbnail

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from prime_rl.trainer.sft.data.conversation import TokenizedSample


class RowImage(NamedTuple):
    """Where an image is in the data. Samples that wait for their turn, also in checkpoints, have no more of it: bytes
    would fill the memory, and a path would bind a run to the place of its data."""

    row: int
    """Number of the row among all rows of the data."""
    number: int
    """Number of the image in its row, from 0."""


@dataclass(frozen=True, slots=True)
class SampleImage:
    """An image of a sample."""

    source: str | bytes | RowImage
    """An absolute path, a data URL, or the bytes of a file; or where these are."""
    tokens: int
    """Number of tokens that its features replace."""
    digest: str | None = None
    """SHA-256 of the file that the policy has seen; None: no policy has."""


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
class Images:
    """Reads the images of a run's data as its model takes them."""

    reader: ImageReader
    limits: ImageLimits
    fetch: Fetch = field(default_factory=StoredImages)
    """Gets images that lie on S3."""

    def expanded(
        self, text: str, spans: Sequence[Span], sources: Sequence[Any], folder: Path
    ) -> tuple[str, list[Span], tuple[SampleImage, ...]]:
        """A rendered conversation and its trained spans, with each image in place of its placeholder.

        Raises:
            BadRow: an image cannot be read, or the template has not written as many placeholders as there are images.
        """
        if len(sources) > self.limits.max_images:
            raise BadRow(f"{len(sources)} images, more than model.vision.max_images = {self.limits.max_images}")
        images: list[SampleImage] = []
        texts: list[str] = []
        for number, source in enumerate(sources, start=1):
            try:
                image = read_image(source, folder, self.limits, self.fetch)
            except ImageFault as fault:
                raise BadRow(f"image {number}: {fault}") from fault
            written, features = self.reader.written(image)
            texts.append(written)
            images.append(SampleImage(located(source, folder), features))
        try:
            expanded, moved = self.reader.expanded(text, texts)
        except ValueError as fault:
            raise BadRow(str(fault)) from fault
        return expanded, [(moved(begin), moved(end)) for begin, end in spans], tuple(images)

    def masked(self, sample: TokenizedSample, images: tuple[SampleImage, ...]) -> TokenizedSample:
        """A sample with its images, whose tokens are not trained.

        Raises:
            BadRow: a text holds the token that stands for images.
        """
        is_image = sample.token_ids == self.reader.token_id
        features = sum(each.tokens for each in images)
        if not is_image.any() and features == 0:
            return sample
        if is_image.sum() > features or (is_image.sum() < features and not sample.is_cut):
            raise BadRow(f"a text holds {self.reader.family.token}, the token that stands for images: remove it")
        return replace(sample, is_trained=sample.is_trained & ~is_image, images=images)

    def of_row(
        self, sequences: Iterable[tuple[np.ndarray, Sequence[SampleImage]]], row_tokens: int
    ) -> RowImages | None:
        """The images of a packed row, which is cut or padded to `row_tokens`; None if it has none.

        `sequences`: which tokens of each stand for images, and its images. One that is there several times, as in the
        rollouts of a group, is computed once: what they begin with alike is then also shared.

        Raises:
            DataError: an image has changed since its row was tokenized.
        """
        begins: dict[SampleImage, int] = {}
        of_sequences: list[tuple[np.ndarray, list[SampleImage]]] = []
        room, features, feature_of_token = row_tokens, 0, []
        for is_image_T, images in sequences:
            is_image_T = is_image_T[:room]
            room -= len(is_image_T)
            # What is cut off needs no features. Of an image that is cut in two, the rest is computed in vain.
            needed, kept, numbers = int(is_image_T.sum()), list[SampleImage](), list[np.ndarray]()
            for each in images:
                if sum(map(len, numbers)) >= needed:
                    break
                if each not in begins:
                    begins[each] = features
                    features += each.tokens
                kept.append(each)
                numbers.append(begins[each] + 1 + np.arange(each.tokens))
            feature_of_token.append(np.zeros(len(is_image_T), dtype=np.int64))
            if kept:
                feature_of_token[-1][is_image_T] = np.concatenate(numbers)[:needed]
            of_sequences.append((is_image_T, kept))
        if not begins:
            return None
        inputs = self.reader.inputs([self._again(each) for each in begins])
        rope = None
        if self.reader.family.has_rope_positions:
            grids = dict(zip(begins, self.reader.grids(inputs), strict=True))
            parts = [rope_positions(is_image_T, [grids[each] for each in kept]) for is_image_T, kept in of_sequences]
            rope = np.concatenate([*parts, np.zeros((3, room), dtype=np.int64)], axis=1)
        return RowImages(inputs, features, np.concatenate([*feature_of_token, np.zeros(room, dtype=np.int64)]), rope)

    def of_rollout(self, image: ImageReference) -> SampleImage:
        """An image that the policy has seen, by what the orchestrator says of it."""
        size = image.height, image.width
        _, features = self.reader.family.expand(self.reader.processor, self.reader.config, size)
        return SampleImage(image.source, features, image.digest)

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
            pixels = read_image(image.source, Path(), self.limits, self.fetch, image.digest)
        except ImageFault as fault:
            raise DataError(f"an image has changed since its row was read: {fault}") from fault
        if self.reader.written(pixels)[1] != image.tokens:
            raise DataError(f"an image has another size than when its row was read: {str(image.source)[:200]}")
        return pixels


def setup_images(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Images | None:
    """What reads the images of a run; None without `[model.vision]`.

    Raises:
        ModelError: images cannot be trained on with the model.
    """
    if config.vision is None:
        return None
    # The readers of samples come before the libraries of models, which take seconds.
    from transformers import AutoConfig

    from prime_rl.trainer.model.tokenizer import load_error

    try:
        if fault := vision_fault(AutoConfig.from_pretrained(config.name).model_type):
            raise StartFault(fault)
        reader = image_reader(config.name, tokenizer)
    except StartFault as fault:
        raise ModelError(f"model.name = {config.name}: {fault}") from fault
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(load_error("model.name", config.name, error)) from error
    return Images(reader, config.vision.limits)

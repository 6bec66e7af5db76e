"""Images of prompts: read once in the threads that answer, and turned into features once by the engine's thread.

A prompt's tokens do not tell its images apart: every image of a size has the same ones. So an image is named by the
hash of its file, and prompts share a prefill or a prefix only if these are equal too (`PromptImages.identity`).
Shapes: T tokens of a prompt, N tokens of a step, F features, H hidden size, D head dim.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from prime_rl.inference.embedded.engine.tensors import on_device
from prime_rl.transport.images import Family, ImageReader, image_features, rope_positions
from prime_rl.transport.loading import Checkpoint, Plan, allocate, compute_buffers, fill, float32_names, unchanged
from prime_rl.utils.errors import StartFault
from prime_rl.utils.images import ImageLimits, decoded_image
from prime_rl.utils.logger import count_of

CACHE_BYTES = 1 << 28
"""Most bytes of images that are kept for further requests, and of features: 256 MB each."""


class _Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


Value = TypeVar("Value", bound=_Sized)


class _Recent(Generic[Value]):
    """The last used values that have so many bytes together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: OrderedDict[int, Value] = OrderedDict()

    def get(self, key: int, make: Callable[[], Value]) -> Value:
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        value = self._values[key]
        while sum(each.num_bytes for each in self._values.values()) > self._most_bytes:
            self._values.popitem(last=False)
        return value

    def clear(self) -> None:
        self._values.clear()


@dataclass(frozen=True, slots=True, eq=False)
class ReadImage:
    """An image as the model takes it."""

    digest: int
    """SHA-256 of its file."""
    written: str
    """The text that stands for it."""
    tokens: int
    """Number of its features, and so of the tokens that stand for them."""
    inputs: Mapping[str, np.ndarray]
    """Arguments of the model's `get_image_features`."""
    grid: SequenceOf[int]
    """Rows and columns of its features; empty if the model's positions do not tell them apart."""

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.inputs.values())


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt of T tokens."""

    images: SequenceOf[ReadImage]
    feature_of_token_T: np.ndarray
    """Index of the feature that replaces each token's embedding, plus 1; 0 for text."""
    last_seen_T: np.ndarray | None
    """Position of the last token that each one attends to: for an image, its last one. None if that is itself."""
    rope_positions_3T: np.ndarray | None
    """Positions of time, height and width, for models that have them."""
    identity: tuple[int, ...]
    """The prompt's tokens with those of an image replaced by its digest."""

    @property
    def shift(self) -> int:
        """What tokens behind the prompt add to their place to have their position: an image takes fewer than tokens."""
        rope = self.rope_positions_3T
        return 0 if rope is None else int(rope.max()) + 1 - len(self.identity)

    def rope_positions(self, begin: int, end: int) -> np.ndarray | None:
        """Of the places [begin, end): [3, end - begin]. They may be behind the prompt: a sequence that was preempted is
        read again with what it has sampled."""
        if self.rope_positions_3T is None:
            return None
        behind = np.arange(max(begin, len(self.identity)), end) + self.shift
        return np.concatenate([self.rope_positions_3T[:, begin:end], np.broadcast_to(behind, (3, len(behind)))], 1)


class ImageStore:
    """Reads the images of requests. Any thread may call its methods."""

    def __init__(self, reader: ImageReader, limits: ImageLimits | None = None) -> None:
        self.reader = reader
        self.limits = limits or ImageLimits()
        self._recent: _Recent[ReadImage] = _Recent(CACHE_BYTES)
        # One at a time: an image takes up to 1.2 GB while it is decoded.
        self._lock = threading.Lock()

    def read(self, content: bytes) -> ReadImage:
        """The image in a file of this content.

        Raises:
            ImageFault: it cannot be used.
        """
        digest = int.from_bytes(hashlib.sha256(content).digest())
        with self._lock:
            return self._recent.get(digest, lambda: self._read(digest, content))

    def _read(self, digest: int, content: bytes) -> ReadImage:
        pixels = decoded_image(content, self.limits)
        written, tokens = self.reader.written(pixels)
        inputs = self.reader.inputs([pixels])
        grid = self.reader.grids(inputs)[0] if self.reader.family.has_rope_positions else ()
        return ReadImage(digest, written, tokens, inputs, grid)

    def of_prompt(self, tokens: SequenceOf[int], images: SequenceOf[ReadImage]) -> PromptImages:
        """The images of a prompt with these token ids.

        Raises:
            ValueError: the prompt has another number of tokens that stand for images.
        """
        ids = np.asarray(tokens)
        is_image = ids == self.reader.token_id
        wanted = sum(each.tokens for each in images)
        if (found := int(is_image.sum())) != wanted:
            raise ValueError(
                f"the prompt has {found} times {self.reader.family.token}, the token that stands for images, and "
                f"{count_of('image', len(images))} of {wanted} tokens: no message may hold it"
            )
        family, places = self.reader.family, np.flatnonzero(is_image)
        ends = np.cumsum([each.tokens for each in images])
        identity = list(tokens)
        last_seen = np.arange(len(ids))
        for each, end in zip(images, ends.tolist(), strict=True):
            own = places[end - each.tokens : end]
            for place in own.tolist():
                identity[place] = each.digest
            last_seen[own] = own[-1]
        rope = rope_positions(is_image, [each.grid for each in images]) if family.has_rope_positions else None
        return PromptImages(
            tuple(images),
            np.where(is_image, np.cumsum(is_image), 0),
            last_seen if family.sees_whole_images else None,
            rope,
            tuple(identity),
        )


@dataclass(frozen=True, slots=True)
class Features:
    """The features of an image."""

    values_FH: Tensor
    deep: SequenceOf[Tensor]
    """What the first layers add to them (DeepStack): [F, H] each."""

    @property
    def num_bytes(self) -> int:
        return self.values_FH.nbytes + sum(each.nbytes for each in self.deep)


@dataclass(frozen=True, slots=True)
class StepImages:
    """The images among the N tokens of a step."""

    places_F: Tensor
    """The tokens that stand for features."""
    features: Features
    """Of all of them, in order."""
    rope_positions_3N: Tensor | None
    axes_D: Tensor | None
    """Which of the three positions each value of a head is rotated by."""


class Tower:
    """The vision tower of a checkpoint, and what joins it to the language model."""

    def __init__(self, whole: PreTrainedModel, family: Family, dtype: torch.dtype) -> None:
        """`whole` is the checkpoint's class without its language model, which computes in `dtype`."""
        self.family = family
        self.whole = whole
        self._like = torch.empty(0, whole.config.get_text_config().hidden_size, dtype=dtype, device=whole.device)
        self._recent: _Recent[Features] = _Recent(CACHE_BYTES)
        self._proven: set[object] = set()
        axes = _rope_axes(whole.config) if family.has_rope_positions else None
        self._axes_D = None if axes is None else on_device(axes, whole.device)

    def planned(self, tensors: Mapping[str, Any]) -> Plan | None:
        """How to load new weights, by the checkpoint's names; None if none of them is the tower's.

        Raises:
            StartFault: some of the tower's are missing, or have another shape.
        """
        plan = Checkpoint(tensors).plan(self.whole)
        if not plan.recipes:
            return None
        for name in sorted(plan.report["missing_keys"]):
            raise StartFault(f"{name} of the vision tower is missing")
        for name, given, wanted in sorted(plan.report["mismatched_keys"]):
            raise StartFault(f"{name} of the vision tower has shape {list(given)} instead of {list(wanted)}")
        return plan

    def load(self, plan: Plan) -> None:
        fill(self.whole, plan, None, unchanged)
        self.forget()

    def prove(self, images: PromptImages) -> None:
        """Raises whatever the tower raises for images of these sizes: in a step it would end all requests."""
        for image in images.images:
            key = (image.tokens, tuple(image.grid), *(each.shape for each in image.inputs.values()))
            if key not in self._proven:
                self._recent.get(image.digest, partial(self._features, image))
                self._proven.add(key)

    def forget(self) -> None:
        """Keep no features."""
        self._recent.clear()

    def step(
        self, prompts: SequenceOf[tuple[PromptImages | None, int, int]], lead: SequenceOf[int]
    ) -> StepImages | None:
        """The images of a step; None if it reads none.

        Args:
            prompts: of each, its images, and its places [begin, end) that are read in this step.
            lead: positions of the tokens before the prompts.
        """
        if not any(images is not None for images, *_ in prompts):
            return None
        places: list[int] = []
        parts: list[Features] = []
        at = len(lead)
        rope = [np.broadcast_to(np.asarray(lead, dtype=np.int64), (3, len(lead)))]
        for images, begin, end in prompts:
            own = np.broadcast_to(np.arange(begin, end), (3, end - begin))
            if images is not None:
                index = images.feature_of_token_T[begin:end]
                places += (at + np.flatnonzero(index)).tolist()
                parts += list(self._parts(images, index[index > 0] - 1))
                if (of_images := images.rope_positions(begin, end)) is not None:
                    own = of_images
            rope.append(own)
            at += end - begin
        device = self._like.device
        joined = Features(
            torch.cat([self._like, *(each.values_FH for each in parts)]),
            [torch.cat(each) for each in zip(*(part.deep for part in parts), strict=True)],
        )
        of_rope = torch.from_numpy(np.concatenate(rope, axis=1)).to(device) if self.family.has_rope_positions else None
        return StepImages(on_device(places, device, torch.long), joined, of_rope, self._axes_D)

    def _parts(self, images: PromptImages, wanted: np.ndarray) -> Iterator[Features]:
        """Of the prompt's features, those `wanted`, which are in order."""
        begin = 0
        for image in images.images:
            own = wanted[(wanted >= begin) & (wanted < begin + image.tokens)] - begin
            begin += image.tokens
            if len(own):
                whole = self._recent.get(image.digest, partial(self._features, image))
                part = slice(int(own[0]), int(own[-1]) + 1)
                yield Features(whole.values_FH[part], [each[part] for each in whole.deep])

    def _features(self, image: ReadImage) -> Features:
        values, deep = image_features(self.whole.base_model, image.inputs, self._like)
        if len(values) != image.tokens:
            raise ValueError(
                f"an image has {count_of('feature', len(values))}, and {image.tokens} tokens stand for it: "
                "the checkpoint's image processor does not belong to its vision tower"
            )
        return Features(values, deep)


def load_tower(
    config: PreTrainedConfig, family: Family, tensors: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> Tower:
    """The tower of a checkpoint with this config and these tensors.

    Raises:
        StartFault: tensors are missing.
    """
    with torch.device("meta"):
        whole: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    base = cast("PreTrainedModel", whole.base_model)
    decoder = base.get_decoder()
    for owner in (whole, base):
        for name, module in list(owner.named_children()):
            if module is decoder or module is whole.get_output_embeddings():
                setattr(owner, name, nn.Identity())
    in_float32 = float32_names(whole, dtype)
    compute_buffers(whole, in_float32)
    allocate(whole, device, in_float32)
    tower = Tower(whole.requires_grad_(False).eval(), family, dtype)
    if (plan := tower.planned(tensors)) is None:
        raise StartFault("the checkpoint has no vision tower")
    tower.load(plan)
    return tower


def _rope_axes(config: PreTrainedConfig) -> list[int]:
    """Which position, of time, height and width, each of a head's D values is rotated by. Both halves are alike."""
    text: Any = config.get_text_config()
    sections = text.rope_parameters["mrope_section"]
    if text.model_type == "qwen3_vl_text":  # in turns: time, height, width
        axes = [0] * (sum(sections))
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    else:
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    return [*axes, *axes]

"""Runs the whole class of a checkpoint with a vision tower: features of images take the place of embeddings.

The tower computes the images of a packed row once, whatever the arrangement of its tokens. The language model then gets
embeddings, as it does inside of Transformers' class, whose own forward knows only rows of one sequence each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.trainer.model.images import RowImages
from prime_rl.transport.images import FAMILIES, Family, image_features

_ATTRIBUTE = "_vision"


@dataclass(frozen=True, slots=True)
class Vision:
    """What is known of a model that is trained on images."""

    family: Family
    files: Mapping[str, bytes]
    """The files of the checkpoint's processor, for exports."""
    tower_lr: float | None = None
    """The learning rate of all but the language model; None if that is all that is trained."""


def attach_vision(model: PreTrainedModel, files: Mapping[str, bytes], tower_lr: float | None) -> None:
    """Have `model`, the whole class of a checkpoint, run on images. Without `tower_lr`, freeze all but its language
    model."""
    setattr(model, _ATTRIBUTE, Vision(FAMILIES[model.config.model_type], files, tower_lr))
    if tower_lr is None:
        model.base_model.requires_grad_(False)
        language_model(model).requires_grad_(True)


def vision_of(model: nn.Module) -> Vision | None:
    """What is known of a model that is trained on images; None for other models."""
    return cast("Vision | None", getattr(model, _ATTRIBUTE, None))


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The module that holds embeddings and decoder blocks."""
    base = cast("PreTrainedModel", model.base_model)
    return base if vision_of(model) is None else base.get_decoder()


def tower_parameters(model: nn.Module) -> tuple[float, list[nn.Parameter]]:
    """The learning rate of a vision tower that is trained, and its trained parameters; none of a model without one."""
    vision = vision_of(model)
    if vision is None or vision.tower_lr is None:
        return 0.0, []
    others = {id(parameter) for parameter in language_model(cast("PreTrainedModel", model)).parameters()}
    of_base = cast("PreTrainedModel", model).base_model.parameters()
    return vision.tower_lr, [each for each in of_base if each.requires_grad and id(each) not in others]


def language_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules by path, but those of a vision tower and of what joins it to the rest."""
    if vision_of(model) is None:
        yield from model.named_modules()
        return
    kept = {*language_model(model).modules(), model.get_output_embeddings()}
    yield from ((path, module) for path, module in model.named_modules() if module in kept)


def trainable_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules that adapters may change, by path: those of a vision tower only if it has a learning rate."""
    vision = vision_of(model)
    return language_modules(model) if vision and vision.tower_lr is None else iter(model.named_modules())


@dataclass(frozen=True, slots=True)
class ArrangedImages:
    """The images of a row whose tokens are arranged as [R, W]."""

    images: RowImages | None
    feature_of_cell_RW: Tensor | None
    """Index of the feature in each cell, plus 1; 0 for text."""
    rope_positions_3RW: Tensor | None


def run_vision(model: PreTrainedModel, inputs: Mapping[str, Any], arranged: ArrangedImages) -> Tensor:
    """The final hidden states of a row [R, W, H]. `inputs` are those of a model for text."""
    vision, language, others = vision_of(model), language_model(model), dict(inputs)
    assert vision is not None
    ids_RW, positions_RW = others.pop("input_ids"), others["position_ids"]
    feature_RW = arranged.feature_of_cell_RW
    is_image_RW = None if feature_RW is None else feature_RW > 0
    # The token that stands for images may be beyond the embeddings, as in Gemma 3.
    embeddings = language.get_input_embeddings()(ids_RW if is_image_RW is None else ids_RW.masked_fill(is_image_RW, 0))
    if vision.family.has_rope_positions:
        rope = arranged.rope_positions_3RW
        rope = positions_RW.expand(3, -1, -1) if rope is None else rope
        # The first are not rotated by: they tell sequences apart.
        others["position_ids"] = torch.cat((positions_RW[None], rope))
    if (tower := tower_parameters(model)[1]) and torch.is_grad_enabled():
        # Processes reduce the gradients of the same weights, also if one has a row without images.
        embeddings = embeddings + 0.0 * torch.stack([parameter.flatten()[0] for parameter in tower]).sum()
    if arranged.images is not None and feature_RW is not None and is_image_RW is not None:
        features_FH, deep = _features(model, arranged.images, embeddings)
        places = feature_RW[is_image_RW] - 1
        embeddings = embeddings.masked_scatter(is_image_RW[..., None], features_FH.index_select(0, places))
        if vision.family.sees_whole_images:
            others["attention_mask"] = _masks(is_image_RW, positions_RW, model.config.get_text_config().sliding_window)
        if deep:
            others["visual_pos_masks"] = is_image_RW
            others["deepstack_visual_embeds"] = [each.index_select(0, places) for each in deep]
    hidden: Tensor = language(inputs_embeds=embeddings, use_cache=False, **others).last_hidden_state
    return hidden


def _masks(is_image_RW: Tensor, positions_RW: Tensor, window: int) -> dict[str, Tensor]:
    """What each token attends to, by kind of layer, as bools [R, 1, W, W]: earlier tokens of its sequence, and all of
    its own image. A window also limits what it sees of the image."""
    after = nn.functional.pad(positions_RW, (1, 0), value=-2)[:, :-1] + 1
    sequence_RW = (positions_RW != after).cumsum(1)
    begins_RW = is_image_RW & ~nn.functional.pad(is_image_RW, (1, 0))[:, :-1]
    image_RW = begins_RW.cumsum(1).masked_fill(~is_image_RW, 0)
    places = torch.arange(is_image_RW.shape[1], device=is_image_RW.device)
    behind = places[:, None] - places
    is_same_image = (image_RW[:, :, None] == image_RW[:, None, :]) & is_image_RW[:, :, None]
    is_same_sequence = sequence_RW[:, :, None] == sequence_RW[:, None, :]
    seen = (is_same_sequence & ((behind >= 0) | is_same_image))[:, None]
    return {"full_attention": seen, "sliding_attention": seen & (behind < window)}


def _features(model: PreTrainedModel, images: RowImages, like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The features of all images [F, H], and those that further layers add (DeepStack)."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and bool(tower_parameters(model)[1])):
        features, deep = image_features(model.base_model, images.inputs, like)
    assert len(features) == images.features, "the text has been written for as many"
    return features, deep

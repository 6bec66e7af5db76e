"""Tiny checkpoints that read images, with tokenizer and image processor, and the numbers of Transformers' own class."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

TEXT: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 160, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
TOWER: dict[str, Any] = {
    # As many layers as the language model, which must not be taken for its blocks.
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 7},
}
QWEN_TOWER = {"hidden_size": 32, "intermediate_size": 48, "depth": 3, "num_heads": 2, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
TILES = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)),
]
PATCHES = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
SOFT = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]

TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Family:
    tokens: Sequence[str]
    """Special tokens; the first stands for one feature."""
    written: str
    """What the chat template writes for an image."""
    config: Callable[[dict[str, int]], tf.PretrainedConfig]
    """From the ids of the tokens."""
    image_processor: Callable[[], Any]
    processor: Callable[[Any, Any], Any]
    """Transformers' own processor, from image processor and tokenizer."""


def _without_video(kind: type) -> Callable[[Any, Any], Any]:
    """A processor without one for videos, which needs torchvision."""
    bare = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, argument: None})
    return lambda images, tokenizer: bare(images, tokenizer, None)


def _tiles() -> Any:
    return tf.Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})


def _qwen(kind: type, **more: Any) -> Callable[[dict[str, int]], tf.PretrainedConfig]:
    def config(ids: dict[str, int]) -> tf.PretrainedConfig:
        names = dict(zip(("image", "vision_start", "vision_end", "video"), PATCHES, strict=True))
        tokens = {f"{name}_token_id": ids[token] for name, token in names.items()}
        text = TEXT | {"head_dim": 16, "rope_parameters": dict(ROPE)}
        return kind(text_config=text, vision_config=QWEN_TOWER | more, **tokens)

    return config


def _qwen_processor(patch: int) -> Any:
    factor = (2 * patch) ** 2
    return tf.Qwen2VLImageProcessorPil(patch_size=patch, size={"shortest_edge": factor, "longest_edge": 6 * factor})


FAMILIES: Mapping[str, Family] = {
    "idefics3": Family(
        TILES,
        "<image>",
        lambda ids: tf.Idefics3Config(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=TOWER,
            scale_factor=2,
            image_token_id=ids["<image>"],
        ),
        _tiles,
        lambda images, tokenizer: tf.Idefics3Processor(images, tokenizer, image_seq_len=4),
    ),
    "smolvlm": Family(
        TILES,
        "<image>",
        lambda ids: tf.SmolVLMConfig(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=TOWER,
            scale_factor=2,
            image_token_id=ids["<image>"],
        ),
        lambda: tf.SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        # SmolVLM's own needs num2words for videos, and writes images as Idefics 3 does.
        lambda images, tokenizer: tf.Idefics3Processor(images, tokenizer, image_seq_len=4),
    ),
    "qwen2_5_vl": Family(
        PATCHES,
        "<|vision_start|><|image_pad|><|vision_end|>",
        _qwen(tf.Qwen2_5_VLConfig, fullatt_block_indexes=[1], window_size=56),
        lambda: _qwen_processor(14),
        _without_video(tf.Qwen2_5_VLProcessor),
    ),
    "qwen3_vl": Family(
        PATCHES,
        "<|vision_start|><|image_pad|><|vision_end|>",
        _qwen(tf.Qwen3VLConfig, deepstack_visual_indexes=[0, 1]),
        lambda: _qwen_processor(16),
        _without_video(tf.Qwen3VLProcessor),
    ),
    "gemma3": Family(
        SOFT,
        "<start_of_image>",
        lambda ids: tf.Gemma3Config(
            text_config=TEXT
            | {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
            vision_config=TOWER,
            mm_tokens_per_image=4,
            image_token_id=ids["<image_soft_token>"],
            boi_token_index=ids["<start_of_image>"],
            eoi_token_index=ids["<end_of_image>"],
        ),
        lambda: tf.Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
        lambda images, tokenizer: tf.Gemma3Processor(images, tokenizer, image_seq_length=4),
    ),
}


def save_checkpoint(name: str, directory: Path, text: Path) -> None:
    """A tiny checkpoint as on the hub, with random weights everywhere. `text` has its tokenizer."""
    family = FAMILIES[name]
    tokenizer = tf.AutoTokenizer.from_pretrained(text)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens)})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", family.written)
    if name == "gemma3":
        marks = dict(zip(("image_token", "boi_token", "eoi_token"), SOFT, strict=True))
        tokenizer.save_pretrained(directory)
        tokenizer = tf.AutoTokenizer.from_pretrained(directory, extra_special_tokens=marks)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in family.tokens}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = tf.AutoModelForImageTextToText.from_config(family.config(ids))
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    if name == "gemma3":
        name_as_on_the_hub(directory / "model.safetensors")
    tokenizer.save_pretrained(directory)
    family.image_processor().save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))


def name_as_on_the_hub(file: Path) -> None:
    """Name the tower of Gemma 3 as its checkpoints do, and MedGemma's. Transformers reads these names, and writes
    others."""
    start = "vision_tower."
    named = {name.replace(start, f"{start}vision_model.", 1): each for name, each in load_file(file).items()}
    save_file(named, file, metadata={"format": "pt"})


def picture(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


SIZES = ((40, 30), (64, 33), (28, 28), (90, 60))


def save_rows(folder: Path) -> Path:
    """Rows with one image, several, and none, in a file beside the images."""
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(SIZES):
        picture(*size, number).save(folder / f"{number}.png")

    def image(number: int) -> dict[str, str]:
        return {"type": "image", "image": f"{number}.png"}

    def text(words: str) -> dict[str, str]:
        return {"type": "text", "text": words}

    rows = [
        [("user", [image(0), text("What is it?")]), ("assistant", "A cat.")],
        [("user", "Say yes."), ("assistant", "yes")],
        [
            ("user", [text("one"), image(1), text("two"), image(2)]),
            ("assistant", "three"),
            ("user", [image(3)]),
            ("assistant", "a b c"),
        ],
        [("user", [image(0), text("What else?")]), ("assistant", "A dog.")],
        [("user", [image(3), text("What is it?")]), ("assistant", "A cat.")],
    ]
    file = folder / "rows.jsonl"
    lines = [{"messages": [{"role": role, "content": content} for role, content in row]} for row in rows]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def reference(
    name: str, directory: Path, file: Path, **options: Any
) -> tuple[list[list[int]], tf.PreTrainedModel, Callable[..., Tensor]]:
    """Of each row, the token ids of Transformers' processor; its model; and its loss of a row, summed over the tokens
    that the mask marks. `options` are those of `from_pretrained`."""
    family = FAMILIES[name]
    tokenizer = tf.AutoTokenizer.from_pretrained(directory)
    processor = family.processor(tf.AutoImageProcessor.from_pretrained(directory, backend="pil"), tokenizer)
    options |= {"dtype": torch.float32, "attn_implementation": "eager"}
    model = tf.AutoModelForImageTextToText.from_pretrained(directory, **options)
    inputs = []
    for line in file.read_text().splitlines():
        messages = json.loads(line)["messages"]
        for message in messages:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        parts = [part for message in messages for part in message["content"]]
        images = [Image.open(file.parent / part["image"]) for part in parts if part["type"] == "image"]
        written = tokenizer.apply_chat_template(messages, tokenize=False)
        nested = {"images": [images]} if images else {}
        inputs.append(processor(text=[written], return_tensors="pt", return_mm_token_type_ids=True, **nested))

    def loss(row: int, is_trained: np.ndarray) -> Tensor:
        given = dict(inputs[row])
        if name in ("idefics3", "smolvlm"):
            given.pop("mm_token_type_ids", None)
        logits = model(**given, use_cache=False).logits[0, :-1]
        labels = given["input_ids"][0].clone()
        labels[~torch.from_numpy(is_trained)] = -100
        return torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")

    return [each["input_ids"][0].tolist() for each in inputs], model.eval(), loss

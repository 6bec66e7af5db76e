"""Makes the inputs of this example: a model folder without weights, and drawn X-rays of the chest with their findings.

    uv run python examples/xray_findings/make_inputs.py

A picture has two lungs and up to three findings, at most one in each quarter. The answer says how many there are and
where: `2 UL LR` is two, upper left and lower right. No picture is of a person.

The demonstrations are deliberately poor: their reader overlooks four findings in ten. A model that imitates them has
learned to see findings, but not to name all of them: what is left is reinforcement learning's job.
"""

from __future__ import annotations

import argparse
import base64
import json
import string
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil, Qwen3VLConfig

SIDE, PATCH = 32, 8
QUARTERS = {"UL": (8, 8), "UR": (8, 24), "LL": (24, 8), "LR": (24, 24)}
"""Row and column of their middle."""
QUESTION = "How many, and where?"
SHARE_OVERLOOKED = 0.4
VOCABULARY_SIZE = 128
WEIGHTS_STD = 0.1
"""With Transformers' 0.02, layers this small hardly pass a picture on."""
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|unk|>", *ROLE_TOKENS, *IMAGE_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{{ part.text if 'text' in part else '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% endfor %}{% endif %}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def picture(places: Iterable[str], draw: np.random.Generator) -> str:
    """A data URL. Eight levels of grey make it small."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    grey = np.full((SIDE, SIDE), 150.0)
    for _, middle in (QUARTERS["UL"], QUARTERS["UR"]):
        # Lungs are full of air, and dark.
        grey[((rows - SIDE / 2) / 14.5) ** 2 + ((columns - middle) / 7) ** 2 < 1] = 60
    for place in places:
        row, column = np.array(QUARTERS[place]) + draw.integers(-2, 3, 2)
        distance = np.hypot(rows - row, columns - column) / draw.uniform(2, 3)
        grey += 130 * np.exp(-(distance**4))
    grey += draw.normal(0, 15, grey.shape)
    levels = (grey.clip(0, 255) // 32 * 36).astype(np.uint8)
    buffer = BytesIO()
    Image.fromarray(levels).quantize(8).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def rows(count: int, share_overlooked: float, seed: int) -> Iterable[dict[str, str]]:
    draw = np.random.default_rng(seed)
    for _ in range(count):
        there = list(draw.permutation(list(QUARTERS))[: draw.integers(4)])
        image = picture(there, draw)
        named = [name for name in QUARTERS if name in there and draw.random() >= share_overlooked]
        yield {"question": QUESTION, "answer": " ".join([*named, str(len(named))]), "image": image}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, one a role of the chat template, and those of images."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=[*ROLE_TOKENS, *IMAGE_TOKENS],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """A Qwen3-VL of 0.2 million parameters."""
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(IMAGE_TOKENS), strict=True))
    text = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": WEIGHTS_STD,
        "dtype": "float32",
    }
    tower = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "initializer_range": WEIGHTS_STD,
    }
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="folder to write to (default: here)")
    folder: Path = parser.parse_args().to
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    build_config(tokenizer).save_pretrained(folder / "model")
    pixels = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    half = [0.5, 0.5, 0.5]
    Qwen2VLImageProcessorPil(patch_size=PATCH, size=pixels, image_mean=half, image_std=half).save_pretrained(
        folder / "model"
    )
    files = {"demonstrations": (1000, SHARE_OVERLOOKED), "train": (300, 0.0), "held_out": (100, 0.0)}
    for seed, (name, (count, share)) in enumerate(files.items()):
        lines = (json.dumps(row) for row in rows(count, share, seed))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

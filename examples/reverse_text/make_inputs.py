"""Make the two inputs of `sft_cpu.toml`: a model folder without weights, and demonstrations.

    uv run python examples/reverse_text/make_inputs.py

Both are small, committed, and come out the same on every machine; a test compares them.

The demonstrations are deliberately poor: most repeat the text, and one in ten reverses it. A model that imitates
them scores below 0.4, yet has seen what a reversed text looks like: what is left is reinforcement learning's job.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from reverse_text import sample_texts

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCABULARY_SIZE = 128
NUM_DEMONSTRATIONS = 4000
SHARE_REVERSED = 0.1


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, and one a role of the chat template."""
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
        additional_special_tokens=list(SPECIAL_TOKENS[2:6]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """A Qwen3 of 0.8 million parameters."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def demonstrations() -> list[dict[str, list[dict[str, str]]]]:
    """Rows of `prompt` and `completion` messages."""
    rng = random.Random(1)
    rows = []
    for text in sample_texts(NUM_DEMONSTRATIONS, max_terms=2, seed=1):
        reply = text[::-1] if rng.random() < SHARE_REVERSED else text
        prompt = [{"role": "user", "content": text}]
        rows.append({"prompt": prompt, "completion": [{"role": "assistant", "content": reply}]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="folder to write to (default: here)")
    folder: Path = parser.parse_args().to
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    build_config(tokenizer).save_pretrained(folder / "model")
    lines = (json.dumps(row) for row in demonstrations())
    (folder / "demonstrations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

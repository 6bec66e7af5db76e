"""Tokenization, stop strings and chat templates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from prime_rl.inference.embedded.engine.generation import Completion
from prime_rl.inference.embedded.engine.model import load_model, model_config
from prime_rl.inference.embedded.engine.text import (
    IncrementalDetokenizer,
    StopStringMatcher,
    Text,
    generation_defaults,
    load_text,
)
from prime_rl.inference.embedded.errors import EngineError, TemplateFailed
from prime_rl.inference.embedded.http.answers import completion_text
from prime_rl.inference.protocol import CompletionBody


@pytest.fixture(scope="module")
def text(tiny_model_dir) -> Text:
    return load_text(str(tiny_model_dir), False, generation_defaults(tiny_model_dir))


@pytest.fixture(scope="module")
def text_of_bytes() -> Text:
    """A tokenizer whose tokens are single bytes."""
    tokenizer = Tokenizer(models.BPE(dict(zip(pre_tokenizers.ByteLevel.alphabet(), range(256), strict=True)), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Text(PreTrainedTokenizerFast(tokenizer_object=tokenizer), frozenset())


def watched(stops: list[str], pieces: list[bytes]) -> list[str | None]:
    """The matcher's result after each token, where token i decodes to `pieces[i]`."""
    watch = StopStringMatcher(stops, lambda ids: b"".join(pieces[index] for index in ids).decode(errors="replace"))
    return [watch.push(token) for token in range(len(pieces))]


def test_a_stop_string_is_found_across_tokens() -> None:
    assert watched(["END"], [b"aE", b"N", b"Dx", b"y"]) == [None, None, "END", None]


def test_the_first_of_several_stop_strings_wins() -> None:
    assert watched(["b", "a"], [b"xab"]) == ["a"]


def test_a_character_split_across_tokens_is_found_once_it_is_complete() -> None:
    first, rest = "é".encode()[:1], "é".encode()[1:]
    assert watched(["é"], [b"caf", first, rest]) == [None, None, "é"]


@pytest.mark.parametrize("stop", ["。", "用户：", "xé", "é!", "🙂"])
def test_a_stop_string_whose_last_character_has_several_tokens_is_cut_off_whole(text_of_bytes, stop) -> None:
    ids = text_of_bytes.encode(f"你好{stop}", add_special_tokens=False)
    matcher = text_of_bytes.stop_matcher([stop], skip_special_tokens=True)
    assert [matcher.push(token) for token in ids] == [*[None] * (len(ids) - 1), stop]
    ended = Completion(ids, [0.0] * len(ids), [], finish_reason="stop", stop_reason=stop, versions=[])
    texts = [
        completion_text(CompletionBody(prompt="", include_stop_str_in_output=kept), text_of_bytes, ended)
        for kept in (False, True)
    ]
    assert texts == ["你好", f"你好{stop}"]


def test_bytes_that_are_part_of_no_character_are_decoded_a_few_times_only() -> None:
    pieces = [*[b"\xe3"] * 1000, *(bytes([byte]) for byte in "。é".encode()), *[b"\xe3", b"\x80"] * 1000, b"\x82!"]
    counts: list[int] = []

    def decode(ids: list[int]) -> str:
        counts.append(len(ids))
        return b"".join(pieces[index] for index in ids).decode(errors="replace")

    detokenizer = IncrementalDetokenizer(decode)
    assert "".join(detokenizer.push([token]) for token in range(len(pieces))) == decode(list(range(len(pieces))))
    assert max(counts[:-1]) < 20


@example([b"\xf0", b"\x9f", b"\x82", b"\xe3", b"\x80\x9f\x82", b"\x9f", b"\x99\xc3\xa9"])
@given(st.lists(st.lists(st.sampled_from(b"\xe3\x80\x82\xf0\x9f\xed\xa0a"), min_size=1, max_size=3).map(bytes)))
def test_any_bytes_give_the_same_text_piece_by_piece(pieces: list[bytes]) -> None:
    def decode(ids: list[int]) -> str:
        return b"".join(pieces[index] for index in ids).decode(errors="replace")

    detokenizer = IncrementalDetokenizer(decode)
    found = "".join(detokenizer.push([token]) for token in range(len(pieces)))
    assert decode(list(range(len(pieces)))).startswith(found)


def test_messages_are_rendered_with_the_chat_template(text) -> None:
    rendered = text.render_chat([{"role": "user", "content": "Hi"}], None, {"add_generation_prompt": True})
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    parts = [{"type": "text", "text": "Hi"}]
    assert text.render_chat([{"role": "user", "content": parts}], None, {"add_generation_prompt": True}) == rendered


def test_a_template_that_fails_says_why(text) -> None:
    with pytest.raises(TemplateFailed, match="chat template"):
        text.render_chat([{"role": "user", "content": {"no": "text"}}], None, {})


def test_end_of_sequence_tokens_come_from_the_tokenizer(text) -> None:
    assert {text.token_text(token) for token in text.eos_token_ids} == {"<|im_end|>"}


def test_a_model_without_a_tokenizer_is_named(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(EngineError, match="tokenizer"):
        load_text(str(tmp_path), False, generation_defaults(tmp_path))


def test_code_of_a_model_that_needs_another_package_is_refused_in_one_line(tmp_path) -> None:
    (tmp_path / "own.py").write_text("import no_such_package\n")
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": [null, "own.Tokenizer"]}}')
    for load in (
        lambda name: load_text(name, True, GenerationConfig()),
        lambda name: load_model(name, "float32", torch.device("cpu"), trust_remote_code=True),
        lambda name: model_config(name, trust_remote_code=True),
    ):
        with pytest.raises(EngineError, match=r"cannot load .*: .*not found in your environment: no_such_package\."):
            load(str(tmp_path))

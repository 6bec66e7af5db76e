"""A chat template is Jinja text, a file that holds it, or a known name. Anything else is a fault, not a template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.checks.chat_templates import NAMED, read_template
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.rl import RLConfig
from prime_rl.inference.embedded.engine.text import TOOL_PARSERS, generation_defaults, load_text
from prime_rl.utils.errors import StartFault
from prime_rl.utils.pydantic_config import ConfigError, load_config

TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"
USER = {"role": "user", "content": "2+3"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def read(template: str, directory: Path) -> str:
    return read_template("tokenizer.chat_template", template, StartDir(directory))


def test_text_is_itself_and_a_path_is_its_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEXT)
    assert read(TEXT, tmp_path) == read("chat.jinja", tmp_path) == read(str(tmp_path / "chat.jinja"), tmp_path) == TEXT


@pytest.mark.parametrize(
    ("template", "advice"),
    [
        ("chta.jinja", "did you mean 'chat.jinja'?"),
        ("./caht.jinja", "did you mean 'chat.jinja'?"),
        ("sub/chat.jinja", "built-in names: chatml"),
        ("chat-ml", "did you mean 'chatml'?"),
        ("User: {message}", "built-in names: chatml"),
        ("", "no such file"),
        ("x" * 5000, "no such file"),
    ],
)
def test_anything_else_is_a_fault_with_the_nearest_file_or_name(template: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEXT)
    with pytest.raises(StartFault) as fault:
        read(template, tmp_path)
    assert str(fault.value).startswith(f"tokenizer.chat_template = '{template[:80]}")
    assert ": no such file, and not Jinja text" in str(fault.value)
    assert advice in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("content", [b"plain words", b"", b"\xff{{ x }}"])
def test_a_file_that_is_no_template_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes(content)
    with pytest.raises(StartFault, match="the file"):
        read("chat.jinja", tmp_path)


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}", "{{ m.content", "{% if x %}{% endfor %}", "{% nope %}"]
)
def test_text_that_jinja_cannot_read_is_named_with_its_line(template: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(f"\n{template}")
    with pytest.raises(
        StartFault, match=r"^tokenizer\.chat_template = 'chat\.jinja': not valid Jinja, line 2: "
    ) as fault:
        read("chat.jinja", tmp_path)
    assert "\n" not in str(fault.value)
    with pytest.raises(StartFault, match=r"^tokenizer\.chat_template: not valid Jinja, line 1: "):
        read(template, tmp_path)


def test_the_tags_of_transformers_are_known(tmp_path: Path) -> None:
    template = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert read(template, tmp_path) == template


def test_a_batch_job_may_read_a_file_that_is_not_visible_here(tmp_path: Path) -> None:
    start = StartDir.of_job(tmp_path)
    assert read_template("key", "/nowhere/at/all/chat.jinja", start) == ""
    with pytest.raises(StartFault):
        read_template("key", "chat.jinja", start)


def test_engine_and_trainer_of_a_run_use_one_template() -> None:
    files = ["--trainer.max_steps", "1", "--orchestrator.max_steps", "1", "--inference.device", "cpu"]
    for key in ("--trainer.tokenizer.chat_template", "--inference.model.chat_template"):
        config = load_config(RLConfig, [], [*files, key, "chatml"])
        assert config.inference is not None
        assert config.trainer.tokenizer.chat_template == config.inference.model.chat_template == "chatml"
    both = ["--trainer.tokenizer.chat_template", "chatml", "--inference.model.chat_template", "other.jinja"]
    with pytest.raises(ConfigError, match="differ: set one"):
        load_config(RLConfig, [], [*files, *both])


def test_the_engine_renders_with_the_template_of_the_config(tiny_model_dir: Path) -> None:
    text = load_text(str(tiny_model_dir), False, generation_defaults(tiny_model_dir), TEXT)
    assert text.decode(text.encode(text.render_chat([USER], None, {}), False)) == "2+3"


# --- chatml


@pytest.fixture(scope="module")
def chatml(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = NAMED["chatml"]
    return tokenizer


def test_chatml_is_chatml(chatml: PreTrainedTokenizerBase) -> None:
    text = chatml.apply_chat_template(
        [{"role": "system", "content": "be brief"}, USER], tokenize=False, add_generation_prompt=True
    )
    assert text == ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'])
def test_chatml_renders_tools_thoughts_calls_and_parts(chatml: PreTrainedTokenizerBase, arguments: object) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    parts = {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+3"}]}
    answer = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call, call]}
    text = chatml.apply_chat_template(
        [parts, answer, {"role": "tool", "content": "5"}],
        tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        tokenize=False,
    )
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert '<tools>\n{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}\n' in text
    assert text.endswith(
        f"<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n{written}\n{written}"
        "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n"
    )


def test_the_engine_parses_the_calls_that_chatml_writes(chatml: PreTrainedTokenizerBase) -> None:
    text = chatml.apply_chat_template(
        [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}], tokenize=False
    )
    found = TOOL_PARSERS["hermes"].parse(text.partition("assistant\n")[2].partition("<|im_end|>")[0])
    assert json.loads(found.calls[0].arguments) == {"a": 2}

"""Chooses the parser of a model's tool calls by how its chat template writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prime_rl.checks.chat_templates import read_template
from prime_rl.configs.inference import ModelConfig

_MARKS = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<arg_key>",), "glm45"),
    (("<function=",), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>",), "llama3_json"),
)
"""What a template writes around a call, and vLLM's parser for it. The first of which all parts occur decides: GLM and
Qwen3-Coder write `<tool_call>` too, and DeepSeek V3.1 no longer fences the arguments."""
_FILES = ("chat_template.jinja", "tokenizer_config.json")


def parser_of_template(template: str) -> str | None:
    """The parser for what a chat template writes; None if it writes no tools, or in an unknown form."""
    if "tools" not in template:
        return None
    return next((parser for marks, parser in _MARKS if all(mark in template for mark in marks)), None)


def tool_call_parser(model: ModelConfig, template: str | None) -> str | None:
    """The parser of a served model: the configured one, or with `auto` that of its family, or of its chat template.

    `template` is the model's own, if it is known.
    """
    if model.tool_call_parser != "auto":
        return model.tool_call_parser
    if model.chat_template is not None:
        return parser_of_template(read_template("model.chat_template", model.chat_template))
    return model.chosen_tool_call_parser or (None if template is None else parser_of_template(template))


def model_template(name: str) -> str | None:
    """The chat template in a model's files: those of a folder, or of a hub id, which may be downloaded. None if it has
    none, or if they cannot be read: loading the model then says why."""
    for file in _FILES:
        path = Path(name, file)
        if not Path(name).is_dir():
            downloaded = _downloaded(name, file)
            if downloaded is None:
                continue
            path = downloaded
        if path.is_file() and (text := _template_in(path)) is not None:
            return text
    return None


def _downloaded(name: str, file: str) -> Path | None:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file))
    except (OSError, ValueError):  # also of the hub's own errors
        return None


def _template_in(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jinja":
            return text
        found: Any = json.loads(text).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(found, list):  # several templates with names
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else None

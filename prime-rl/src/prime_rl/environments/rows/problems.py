"""Rows as problems: a prompt, an answer, and an id that stays the same whatever is filtered or mixed."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prime_rl.environments.rewards.registry import RewardSpec
from prime_rl.environments.rows.arguments import DatasetConfig
from prime_rl.environments.rows.formats import Format, MissingColumn, Row, column, own_id

Messages = list[dict[str, Any]]
_HASH_LENGTH = 16
"""Hexadecimal digits. Of ten million rows, two share a hash with a probability of 3e-6."""
_IMAGES = ("images", "image")


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt to roll out."""

    id: str
    dataset: str
    """Name of its dataset."""
    prompt: Messages
    answer: str
    rewards: tuple[RewardSpec, ...]
    """What scores its answers."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What reward functions need besides the answer."""
    row: Row = field(default_factory=dict, repr=False)
    """The row of the source."""

    @property
    def text(self) -> str:
        """The texts of the prompt."""
        return "\n".join(_text_of(message["content"]) for message in self.prompt)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the environment gives to rows that say nothing themselves."""

    system_prompt: str | None = None
    template: str | None = None
    rewards: tuple[RewardSpec, ...] | None = None


def problem_of(row: Row, number: int, dataset: DatasetConfig, of: Format, defaults: Defaults) -> Problem:
    """Make a problem of a row. `number` counts the rows of the source from 0, before any filter.

    Raises:
        MissingColumn: the row lacks a column, or a column holds something else.
    """
    question = (column(dataset.columns["prompt"]) if "prompt" in dataset.columns else of.question)(row)
    chosen = tuple(dataset.rewards) if dataset.rewards is not None else defaults.rewards
    answer = _answer(row, dataset, of, is_needed=chosen is None)
    system = dataset.system_prompt or defaults.system_prompt
    prompt = _prompt(question, row, dataset.template or defaults.template or of.template, system)
    rewards = chosen or (RewardSpec(fn=of.reward_of(row) if of.reward_of else of.reward),)
    extra = dict(of.extra(row)) if of.extra else {}
    return Problem(
        _id(row, number, dataset, of, content_id(question, answer)), dataset.title, prompt, answer, rewards, extra, row
    )


def content_id(question: Any, answer: str) -> str:
    """A hash of what a row asks and expects. Template and system message are left out, so that they may change."""
    text = json.dumps([question, answer], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]


def _id(row: Row, number: int, dataset: DatasetConfig, of: Format, content: str) -> str:
    if dataset.id == "row" or (dataset.id is None and of.id_column == "row"):
        return f"{of.id_prefix}{number}"
    if dataset.id not in (None, "content"):
        given = own_id(row, dataset.id)
        if given is None:
            raise MissingColumn(f"has no id in the column {dataset.id}")
        return given
    given = None if dataset.id == "content" else own_id(row, of.id_column)
    if given is None:
        return f"{of.id_prefix}{content}"
    return given if given.startswith(of.id_prefix) else f"{of.id_prefix}{given}"


def _answer(row: Row, dataset: DatasetConfig, of: Format, is_needed: bool) -> str:
    try:
        value = column(dataset.columns["answer"])(row) if "answer" in dataset.columns else of.answer(row)
    except MissingColumn:
        if is_needed or "answer" in dataset.columns:
            raise
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _prompt(question: Any, row: Row, template: str | None, system: str | None) -> Messages:
    if isinstance(question, list):
        messages = [_message(each) for each in question]
        if not messages:
            raise MissingColumn("has an empty list of messages as its prompt")
    else:
        text = str(question)
        if template is not None:
            text = _filled(template, row, text)
        if not text.strip():
            raise MissingColumn("has an empty prompt")
        messages = [{"role": "user", "content": text}]
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # the source's own answer
    images = [part for name in _IMAGES for part in _image_parts(row.get(name))]
    if images:
        last = messages[-1]
        messages[-1] = {**last, "content": [*images, {"type": "text", "text": _text_of(last["content"])}]}
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def _message(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str) or value.get("content") is None:
        raise MissingColumn("has a prompt whose messages lack `role` or `content`")
    return {"role": value["role"], "content": value["content"]}


def _filled(template: str, row: Row, question: str) -> str:
    try:
        return template.format_map({**{str(name): value for name, value in row.items()}, "question": question})
    except KeyError as error:
        raise MissingColumn(f"has no column {error} for the template; it has {', '.join(map(str, row))}") from error


def _image_parts(value: Any) -> list[dict[str, Any]]:
    """Images as parts of a message. Training refuses them; they are not dropped silently."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    parts = []
    for each in values:
        content = each.get("bytes") if isinstance(each, Mapping) else None
        if content:
            data = base64.b64encode(bytes(content)).decode()
            parts.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}})
    return parts


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))

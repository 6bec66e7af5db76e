"""Prompts as the model sees them: rendered with the chat template, with the tools, and counted in tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.checks.chat_templates import Arguments, read_template
from prime_rl.checks.time_limit import MAX_RENDER_S, OutOfTime, time_limit
from prime_rl.configs.orchestrator import ModelConfig
from prime_rl.orchestrator.rollouts.token_texts import read_tokenizer
from prime_rl.utils.conversations import plain_messages
from prime_rl.utils.errors import StartFault, one_line

CountTokens = Callable[[str], int]
Render = Callable[[Arguments], str]
Tools = Sequence[Mapping[str, Any]]


class Refused(Exception):
    """The chat template refuses a conversation."""


def token_counter(model: str) -> CountTokens | None:
    """Counts the tokens of a text; None without a whole `tokenizer.json` on this machine."""
    try:
        tokenizer = read_tokenizer(model)
    except StartFault:  # other checks say what is wrong with the model's files
        return None
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def renderer(model: ModelConfig) -> Render:
    """Renders conversations with the chat template of the servers. The result raises Refused.

    Raises:
        StartFault: the template cannot be read.
        OSError, ValueError: the tokenizer cannot be loaded.
    """
    import jinja2

    # `AutoTokenizer` loads torch, which takes seconds. A model without a tokenizer.json needs it.
    if read_tokenizer(model.name) is None:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model.name)
    else:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(model.name)
    if model.chat_template is not None:
        tokenizer.chat_template = read_template("orchestrator.model.chat_template", model.chat_template)

    def render(arguments: Arguments) -> str:
        others = {name: value for name, value in arguments.items() if name != "messages"}
        try:
            with time_limit(MAX_RENDER_S):
                messages = plain_messages(arguments["messages"], tokenizer.chat_template)
                text = tokenizer.apply_chat_template(messages, tokenize=False, **others)
        except OutOfTime:
            raise Refused(f"rendering it takes more than {MAX_RENDER_S:g} s, so the template may loop") from None
        except (jinja2.TemplateError, AttributeError, TypeError, IndexError, KeyError, ValueError) as error:
            raise Refused(one_line(str(error))) from error
        return str(text)

    return render


@dataclass(slots=True)
class PromptLengths:
    """Counts the tokens of prompts as the engine gets them: with the tools, and with what begins the answer."""

    count: CountTokens
    render: Render | None
    """None: there is no template that could be read."""

    @classmethod
    def of(cls, model: ModelConfig) -> PromptLengths | None:
        """None without a `tokenizer.json` on this machine."""
        count = token_counter(model.name)
        if count is None:
            return None
        try:
            return cls(count, renderer(model))
        except (OSError, ValueError, StartFault):  # other checks say what is wrong with the model's files
            return cls(count, None)

    def of_prompt(self, prompt: Any, tools: Tools) -> int:
        """The number of tokens; of the text alone, if the template does not render the prompt."""
        if isinstance(prompt, str):
            return self.count(prompt)
        if self.render is not None:
            arguments = {"messages": messages_of(prompt), "tools": list(tools) or None}
            try:
                return self.count(self.render({**arguments, "add_generation_prompt": True}))
            except Refused:
                self.render = None  # refusing one prompt may take a minute
        return self.count(text_of(prompt))


def messages_of(prompt: Any) -> list[Mapping[str, Any]]:
    """The messages of a prompt, which may be a text."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def text_of(prompt: Any) -> str:
    """The texts of a prompt's messages."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") or "" for message in prompt]
    parts = [content if isinstance(content, list) else [content] for content in contents]
    return "\n".join(
        str(part.get("text", "") if isinstance(part, Mapping) else part) for each in parts for part in each
    )

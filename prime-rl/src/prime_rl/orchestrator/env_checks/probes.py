"""Answers that an environment must stand: right and wrong ones, nothing, much, and what a model would exploit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RIGHT, WRONG, EMPTY, BLANK, NO_MESSAGE = "right", "wrong", "empty", "blank", "no message"
REPEATED, ALL_AT_ONCE = "prompt repeated", "all answers at once"
CONTROL, UNICODE, LONG = "control characters", "huge unicode", "very long"
EXPLOITS = (EMPTY, BLANK, REPEATED, ALL_AT_ONCE, CONTROL, UNICODE, LONG)
"""Answers that must not earn what a right answer earns."""

FORMS = (
    "{answer}",
    "<answer>{answer}</answer>",
    "<think>\nThis is known.\n</think>\n\n<answer>\n{answer}\n</answer>",
    "\\boxed{{answer}}",
    "#### {answer}",
    "The answer is {answer}.",
    "Final answer: {answer}",
    "Answer: {answer}",
    "({answer})",
    '{"answer": "{answer}"}',
    "<think>\nThis is known.\n</think>\n\n{answer}",
    "```python\n{answer}\n```",
)
"""How a model may write an answer. The form that earns most is taken for right answers."""

LONG_CHARS = 200_000
MOST_ANSWERS = 2000
_CALL_ID = "call00001"
_EXAMPLES: Mapping[str, Any] = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True, slots=True)
class Probe:
    """One answer to try, by its kind."""

    kind: str
    script: tuple[Mapping[str, Any], ...]
    """What the model says, message by message; the last one is repeated."""


def saying(kind: str, text: str) -> Probe:
    return Probe(kind, ({"content": text},))


def written(form: str, answer: str) -> str:
    """An answer in a form. Not `str.format`: both are data."""
    return form.replace("{answer}", answer)


def exploits(form: str, prompt: str, answers: Iterable[str]) -> Iterator[Probe]:
    """Answers without knowledge."""
    several = list(dict.fromkeys(answers))[:MOST_ANSWERS]
    yield saying(EMPTY, "")
    yield saying(BLANK, " \n\t\n ")
    yield saying(REPEATED, prompt)
    if len(several) > 1:
        yield saying(ALL_AT_ONCE, written(form, ", ".join(several)))
        yield saying(ALL_AT_ONCE, "\n".join(written(form, each) for each in several))
    yield saying(CONTROL, written(form, "\x00\x07\x1b[31m\x1b]0;x\x07\r\b\u202e\ufeff{}{0}%s$(id)`id`</answer>"))
    yield saying(UNICODE, written(form, "\U0001f600e\u0301\u0e33\ufdfd" * 5000 + "\u0663" * 5000))
    yield saying(LONG, written(form, "because " * (LONG_CHARS // 8)))


def no_message() -> Probe:
    """The engine refuses the prompt: the completion has no message."""
    return Probe(NO_MESSAGE, ())


def tool_probes(tools: Sequence[Mapping[str, Any]], final: str) -> Iterator[Probe]:
    """Calls of each tool, of one that does not exist, and with arguments that are no JSON, each before an answer."""
    last = {"content": final}
    for tool in tools:
        function = tool["function"]
        arguments = json.dumps(example_arguments(function.get("parameters") or {}))
        yield Probe(f"tool {function['name']}", (_calling(str(function["name"]), arguments), last))
    if tools:
        name = str(tools[0]["function"]["name"])
        yield Probe("tool that does not exist", (_calling("no_such_tool", "{}"), last))
        yield Probe("tool arguments that are no JSON", (_calling(name, '{"a": '), last))
        yield Probe("tool without arguments", (_calling(name, "{}"), last))


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the right types, for every parameter."""
    properties = schema.get("properties") or {}
    return {name: _example(each) for name, each in properties.items() if isinstance(each, Mapping)}


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    return _EXAMPLES.get(str(kind), "x")


def _calling(name: str, arguments: str) -> dict[str, Any]:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"content": "", "tool_calls": [call]}

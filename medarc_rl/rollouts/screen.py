"""Shows rollouts on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from prime_rl.history.rollouts import Json, KeptRollout, content_text

MAX_CHARS = 1200
"""Characters of a message that are shown without `--full`."""
_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


class Screen:
    """Prints rollouts: wrapped and in colour on a terminal, as plain lines elsewhere."""

    def __init__(self, is_full: bool) -> None:
        self.is_full = is_full
        self.is_terminal = sys.stdout.isatty()
        self.console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)

    def show(self, rollout: KeptRollout) -> None:
        self._line(title(rollout), "bold")
        for facts in filter(None, fact_lines(rollout)):
            self._line(facts)
        for role, text in messages(rollout):
            self._message(role, text, _ROLES.get(role, "blue"))
        if rollout.error:
            self._message("error", rollout.error, "red")
        self._line("")

    def _message(self, role: str, text: str, style: str) -> None:
        self._line(visible(role), style, indent=2)
        shown = visible(text) if self.is_full else shortened(visible(text))
        for line in shown.split("\n"):
            self._line(line, indent=4 if line else 0)

    def note(self, line: str) -> None:
        self._line(line, "dim")

    def _line(self, line: str, style: str = "", indent: int = 0) -> None:
        text = Text(line, style)
        if self.is_terminal:
            self.console.print(Padding(text, (0, 0, 0, indent), expand=False))
        else:
            self.console.print(Text(" " * indent) + text, soft_wrap=True)


def title(rollout: KeptRollout) -> str:
    """Origin of a rollout in one line: step or evaluation, environment, row, group."""
    place = f"evaluation {rollout.eval_version}" if rollout.step is None else f"step {rollout.step}"
    numbers = [f"group {rollout.group}"] if rollout.group is not None else []
    numbers += [f"rollout {rollout.rollout}"] if rollout.rollout is not None else []
    row = "" if rollout.row is None else f", row {rollout.row}"
    return " ".join([f"{place}: {visible(rollout.env)}{row}", *([f"({', '.join(numbers)})"] if numbers else [])])


def fact_lines(rollout: KeptRollout) -> Iterator[str]:
    """Reward, its parts, how it ended, and by which policy it was sampled."""
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:.4g}"
    advantage = "" if rollout.advantage is None else f"advantage {rollout.advantage:+.4g}"
    kept = [each for each in rollout.kept if each not in ("all", "random")]
    masked = f"not trained on: filter {visible(rollout.masked_by)}" if rollout.masked_by else ""
    yield _joined(reward, advantage, f"kept as the {' and '.join(kept)} group" if kept else "", masked)
    weights = rollout.weights
    # Whether a filter excluded the rollout stands in the line above.
    shown = {name: value for name, value in rollout.metrics.items() if not name.startswith("filter/")}
    parts = [f"{visible(name)} {value:.4g}{_times(weights.get(name))}" for name, value in shown.items()]
    if parts:
        yield "  ".join(parts)
    tokens = "" if rollout.completion_tokens is None else f"{rollout.completion_tokens} tokens"
    version = "" if rollout.policy_version is None else f"policy version {rollout.policy_version}"
    lag = "" if rollout.lag is None else f"lag {rollout.lag}"
    ended = f"ended by {visible(rollout.stop_condition)}" if rollout.stop_condition else ""
    yield _joined(tokens, ended, "truncated" if rollout.is_truncated else "", version, lag)
    if logprobs := logprob_line(rollout):
        yield logprobs
    if rollout.cut_chars or rollout.cut_tokens:
        yield f"not kept: {rollout.cut_chars:,} characters of the messages, {rollout.cut_tokens:,} tokens"


def logprob_line(rollout: KeptRollout) -> str:
    """Mean log-probability per sampled token, of the engine and the trainer."""
    tokens = [token for line in rollout.conversations for token in line.completion if token.engine_logprob is not None]
    if not tokens:
        return ""
    engine = [token.engine_logprob or 0.0 for token in tokens]
    shown = f"log-probability per token: engine {sum(engine) / len(engine):.4f}"
    pairs = [
        (token.trainer_logprob, token.engine_logprob or 0.0) for token in tokens if token.trainer_logprob is not None
    ]
    if not pairs:
        return shown
    mean = sum(own for own, _ in pairs if own is not None) / len(pairs)
    largest = max(abs(own - other) for own, other in pairs if own is not None)
    return f"{shown}, trainer {mean:.4f}, largest difference {largest:.4f}"


def messages(rollout: KeptRollout) -> Iterator[tuple[str, str]]:
    """Role and text of each message; a tool call is a message of its own."""
    for message in (*rollout.prompt, *rollout.completion):
        role = str(message.get("role") or "?")
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            yield f"{role}, thinking", content_text(reasoning)
        calls = message.get("tool_calls")
        text = content_text(message.get("content"))
        if text or not calls:
            yield role, text or "(empty)"
        for call in calls if isinstance(calls, list) else []:
            yield f"{role}, tool call", _call(call)


def visible(text: str) -> str:
    """A text in which characters that act on a terminal, or cannot be seen, are written as escapes."""
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)


def shortened(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} more characters: --full …\n{text[-half:]}"


def _escaped(char: str) -> str:
    return "    " if char == "\t" else char.encode("unicode_escape", "surrogatepass").decode("ascii")


def _call(call: Any) -> str:
    """`name(arguments)`, from a call as OpenAI or verifiers writes it."""
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            return str(call)
    if not isinstance(call, Mapping):
        return _json(call)
    nested = call.get("function")
    named: Json = nested if isinstance(nested, Mapping) else call
    arguments = named.get("arguments")
    return f"{named.get('name', '?')}({arguments if isinstance(arguments, str) else _json(arguments)})"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _times(weight: float | None) -> str:
    return "" if weight in (None, 1.0) else f" (weight {weight:g})"


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)

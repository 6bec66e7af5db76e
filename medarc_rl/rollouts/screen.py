"""Shows rollouts on the terminal, or writes good ones as a dataset for SFT."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from prime_rl.history.rollouts import Json, KeptRollout
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import count_of

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
            yield f"{role}, thinking", _text(reasoning)
        calls = message.get("tool_calls")
        text = _text(message.get("content"))
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


def _text(content: object) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return _json(content)


def _part(part: object) -> str:
    if isinstance(part, Mapping):
        return str(part["text"]) if isinstance(part.get("text"), str) else f"[{part.get('type', '?')}]"
    return str(part)


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


# `medarc_train rollouts RUN --to-sft FILE`: good rollouts become a dataset for SFT.


CUT = "whose kept text was cut (orchestrator.keep_rollouts.max_chars)"
TRUNCATED = "that reached a limit on tokens"
FAILED = "with an error"
MASKED = "that a filter kept from training"
EMPTY = "without an answer"
REPEATED = "that repeat another one"
SURPLUS = "beyond --per-prompt"


_RENDERING = ("tools", "chat_template_kwargs")
"""Arguments of the chat template besides the messages."""


@dataclass(slots=True)
class Export:
    """Rows for SFT, and why other rollouts are left out."""

    per_prompt: int | None = None
    """Most rows of one prompt: those with the highest rewards, of equal ones the earlier."""
    left_out: Counter[str] = field(default_factory=Counter)
    _rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By a hash of the conversation."""

    def add(self, rollout: KeptRollout, run: str) -> None:
        """Take a rollout, unless a reason in `left_out` counts it."""
        if (reason := _reason(rollout)) is not None:
            self.left_out[reason] += 1
            return
        row = _row(rollout, run)
        names = ("messages", "prompt", "completion", *_RENDERING)
        text = json.dumps([row.get(name) for name in names], sort_keys=True)
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if self._rows.setdefault(key, row) is not row:
            self.left_out[REPEATED] += 1

    def rows(self) -> list[dict[str, Any]]:
        """The rows in the order of the rollouts."""
        rows = list(self._rows.values())
        if self.per_prompt is None:
            return rows
        best: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            best.setdefault(row["prompt_id"], []).append(index)
        chosen = set()
        for indices in best.values():
            chosen.update(sorted(indices, key=lambda index: (-rows[index]["reward"], index))[: self.per_prompt])
        self.left_out[SURPLUS] = len(rows) - len(chosen)
        return [row for index, row in enumerate(rows) if index in chosen]

    def reasons(self) -> Iterator[str]:
        """One line for each reason to leave rollouts out."""
        for reason, number in sorted(self.left_out.items()):
            if number:
                yield f"left out {count_of('rollout', number)} {reason}"


def write_rows(rows: Iterable[dict[str, Any]], file: Path) -> None:
    """Write a dataset that only its owner can read."""
    with replacing_file(file) as scratch:
        scratch.touch(mode=0o600)
        with scratch.open("w", encoding="utf-8", errors="backslashreplace") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _reason(rollout: KeptRollout) -> str | None:
    if rollout.cut_chars:
        return CUT
    if rollout.is_truncated:
        return TRUNCATED
    if rollout.error is not None:
        return FAILED
    if rollout.masked_by is not None:
        return MASKED
    has_answer = any(message.get("content") or message.get("tool_calls") for message in rollout.completion)
    return None if has_answer and rollout.prompt else EMPTY


def _row(rollout: KeptRollout, run: str) -> dict[str, Any]:
    prompt, completion = rollout.fields.get("prompt"), rollout.fields.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):  # a model without chat template
        texts: dict[str, Any] = {"prompt": prompt, "completion": completion}
    else:
        asked = [_message(each) for each in rollout.prompt]
        # Answers in a prompt are examples: the run did not train on them, and SFT must not either.
        asked = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in asked]
        texts = {"messages": [*asked, *map(_message, rollout.completion)]}
        texts |= {name: rollout.fields[name] for name in _RENDERING if rollout.fields.get(name)}
    return {
        **texts,
        "run": run,
        "step": rollout.step if rollout.step is not None else rollout.eval_version,
        "is_evaluation": rollout.step is None,
        "env": rollout.env,
        "row": rollout.row,
        "prompt_id": _prompt_id(rollout),
        "reward": rollout.reward,
        "model_version": rollout.policy_version if rollout.policy_version is not None else rollout.eval_version,
    }


def _message(message: Any) -> dict[str, Any]:
    role = "user" if message.get("role") == "text" else message.get("role")
    return {"role": role, **{name: value for name, value in message.items() if value is not None and name != "role"}}


def _prompt_id(rollout: KeptRollout) -> str:
    """The id that the run kept; for runs of earlier versions, a hash of the prompt."""
    kept = rollout.fields.get("prompt_id")
    if isinstance(kept, str) and kept:
        return kept
    text = json.dumps([rollout.env, rollout.prompt], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

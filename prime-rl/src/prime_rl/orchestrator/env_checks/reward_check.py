"""Tries scripted answers on a few rows, and judges the rewards that they earn.

The answers are right and wrong ones, nothing, very much, and what a model would exploit.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_rl.orchestrator.env_checks.dataset_check import Rows
from prime_rl.orchestrator.env_checks.findings import Reporter
from prime_rl.orchestrator.env_checks.scripted_engine import ECHO, MAX_CALLS, ScriptedEngine
from prime_rl.orchestrator.errors import EnvironmentFault, OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.inside.reward_records import RewardFailure
from prime_rl.orchestrator.workers.process import WorkerError
from prime_rl.utils.errors import one_line
from prime_rl.utils.logger import count_of

RIGHT, WRONG, EMPTY, BLANK, NO_MESSAGE = "right", "wrong", "empty", "blank", "no message"
REPEATED, ALL_AT_ONCE = "prompt repeated", "all answers at once"
CONVERSATION = "conversation"
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


def conversations(form: str, answer: str, other: str, turns: Sequence[str]) -> Iterator[Probe]:
    """Conversations to try in an environment of several turns, where a right answer may come after the first message.

    `turns` is a conversation that the user knows to be right; the others are guesses.
    """
    if turns:
        yield Probe(CONVERSATION, tuple({"content": written(turn, answer)} for turn in turns))
        return
    right, wrong = {"content": written(form, answer)}, {"content": written(form, other)}
    yield Probe(CONVERSATION, (wrong, right))
    yield Probe(CONVERSATION, ({"content": "I am ready."}, right))
    yield Probe(CONVERSATION, (ECHO,))
    yield Probe(CONVERSATION, (right, ECHO))
    # An answer of several parts may be asked for part by part.
    parts = [part for part in re.split(r"[\n,;|]|\s->\s", answer.strip("[]()")) if part.strip()]
    if len(parts) > 1:
        yield Probe(CONVERSATION, tuple({"content": written(form, part.strip().strip("'\""))} for part in parts))
    if len(words := answer.split()) > 1:
        yield Probe(CONVERSATION, tuple({"content": written(form, word)} for word in words))


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
        yield Probe("tool arguments that are not JSON", (_calling(name, '{"a": '), last))
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


NO_ANSWER = "an answer"
"""Said where the dataset has no answers."""
SLOW_S = 1.0
"""A reward that takes longer than this holds up a run."""
MORE_ROWS = 64
"""First rows whose right answers are tried, in addition to the rows in which all kinds of answers are."""
MORE_ROWS_S = 30.0
_CLOSE = 1e-9
_OURS = re.compile(rf"[\w.]*\b{RewardFailure.__name__}: ")
"""How a traceback names it, here and in an environment's own interpreter."""
_SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "extra_body": {}}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one answer earned."""

    kind: str
    row: int
    rollout: Rollout | None
    """None if there is none, because of `fault`."""
    seconds: float
    fault: str = ""


@dataclass(slots=True)
class Trials:
    """Tries answers one after the other, so that the engine knows which one is asked for."""

    environment: Environment
    engine: ScriptedEngine
    server: InferenceServer
    report: Reporter
    limit_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    endless: set[str] = field(default_factory=set)
    """Kinds of answers after which the environment asked for more and more."""
    are_games: bool = False
    """Whether rows are starts of a game, which scripted answers cannot play."""
    has_turns: bool = False
    """Whether the environment has answered a message without a call, so that a reward may need several turns."""

    async def try_(self, probe: Probe, row: int, size: int = 1) -> list[Outcome]:
        """Roll out one answer `size` times in one group."""
        self.report.tries(f"the answer {probe.kind!r} in row {row}")
        self.engine.play(probe.script, size)
        started_s = time.perf_counter()
        fault, rollouts = "", []
        try:
            async with asyncio.timeout(self.limit_s):
                rollouts = await self.environment.evaluate(
                    ExampleRef(self.environment.name, row), size, self.server, dict(_SAMPLING), 0
                )
        except TimeoutError:
            fault = f"it does not end within {self.limit_s:g} s"
        except EnvironmentFault:
            raise
        except (OrchestratorError, WorkerError) as error:
            fault = one_line(str(error))
        except Exception as error:  # noqa: BLE001 - an environment's own code may raise anything
            fault = one_line(error)
        seconds = time.perf_counter() - started_s
        if self.engine.is_endless:
            self.endless.add(probe.kind)
        is_plain = not any(message.get("tool_calls") for message in probe.script)
        self.has_turns |= is_plain and bool(probe.script) and self.engine.num_calls > size
        found = [Outcome(probe.kind, row, rollout, seconds) for rollout in rollouts]
        found = found or [Outcome(probe.kind, row, None, seconds, fault)]
        self.outcomes += found
        return found


async def check_rewards(trials: Trials, rows: Rows, count: int, form: str | None, turns: Sequence[str] = ()) -> None:
    """Try every kind of answer in `count` rows, and report. `turns`: messages of a conversation that is right."""
    spread = range(0, min(rows.count, len(rows.prompts)), max(1, len(rows.prompts) // count))[:count]
    with_answers = [row for row in spread if rows.answers[row].strip()]
    form = form or await _best_form(trials, rows, with_answers)
    trials.are_games = rows.are_games
    trials.outcomes.clear()
    for row in spread:
        answer = rows.answers[row].strip() or NO_ANSWER
        for outcome in await trials.try_(saying(RIGHT, written(form, answer)), row, size=2):
            if outcome.fault:
                break
        await trials.try_(saying(WRONG, written(form, _other(rows, row))), row)
        for probe in (no_message(), *exploits(form, rows.prompts[row], rows.answers)):
            await trials.try_(probe, row)
        for probe in tool_probes(trials.environment.tools(row), written(form, answer)):
            await trials.try_(probe, row)
        if (trials.has_turns or turns) and not rows.are_games:
            for probe in conversations(form, answer, _other(rows, row), turns):
                await trials.try_(probe, row)
    tried = [] if rows.are_games else await _more_right_answers(trials, rows, spread, form)
    read, right = len(rows.prompts), len(tried) or len(spread)
    words = f"all kinds of answers tried in {len(spread)} of {read:,}, right ones in {right}"
    trials.report.found("ok", "rows", words)
    judge(trials, bool(with_answers), form)


async def _more_right_answers(trials: Trials, rows: Rows, spread: Sequence[int], form: str) -> list[int]:
    """Try the right answers of the first rows too, which is quick. Returns all rows whose right answer was tried."""
    tried = [row for row in spread if rows.answers[row].strip()]
    deadline_s = time.perf_counter() + MORE_ROWS_S
    for row in range(min(len(rows.prompts), MORE_ROWS)):
        if time.perf_counter() > deadline_s:
            break
        if rows.answers[row].strip() and row not in spread:
            await trials.try_(saying(RIGHT, written(form, rows.answers[row].strip())), row)
            tried.append(row)
    return tried


async def _best_form(trials: Trials, rows: Rows, chosen: Sequence[int]) -> str:
    """The form in which right answers earn most; the first of those that earn the same."""
    earned: dict[str, float] = {}
    for form in FORMS if chosen else ():
        outcomes = [
            outcome
            for row in chosen
            for outcome in await trials.try_(saying(RIGHT, written(form, rows.answers[row].strip())), row)
        ]
        earned[form] = sum(_reward(outcome) or 0.0 for outcome in outcomes) / len(outcomes)
    return max(earned, key=lambda form: earned[form], default=FORMS[0])


def _other(rows: Rows, row: int) -> str:
    """The answer of another row, which is wrong here."""
    own = rows.answers[row].strip().casefold()
    others = (text.strip() for text in rows.answers if text.strip() and text.strip().casefold() != own)
    return next(others, "something else")


def _reward(outcome: Outcome) -> float | None:
    return None if outcome.rollout is None else outcome.rollout.reward


def judge(trials: Trials, has_answers: bool, form: str) -> None:
    """Report on what all answers earned."""
    report = trials.report
    by_kind: dict[str, list[float]] = defaultdict(list)
    for outcome in trials.outcomes:
        if outcome.rollout is not None and outcome.rollout.error is None:
            by_kind[outcome.kind].append(outcome.rollout.reward)
    means = {kind: sum(values) / len(values) for kind, values in by_kind.items()}
    for kind, values in by_kind.items():
        spread = "" if min(values) == max(values) else f" ({min(values):g} to {max(values):g})"
        shown = f", written as {form!r}" if kind == RIGHT and has_answers else ""
        report.found("ok", f"reward: {kind}", f"{means[kind]:.4g}{spread} in {len(values)} rollouts{shown}")
    faults = [*_faults(trials), *_function_faults(trials), *_determinism(trials), *_values(trials, means, has_answers)]
    for level, subject, text in faults:
        report.found(level, subject, text)  # type: ignore[arg-type]
    if not any(level == "fail" for level, _, _ in faults):
        unearned = "" if trials.are_games else ", and none without a right answer"
        report.found("ok", "rewards", f"finite numbers, the same each time{unearned}")
    _check_time(trials)


Row = tuple[str, str, str]
"""Level, subject and text of a finding."""


def _faults(trials: Trials) -> Iterator[Row]:
    """Rollouts that gave nothing, one row for each reason; errors that ended one."""
    reasons: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in trials.outcomes:
        if outcome.fault:
            reasons[outcome.fault].append(outcome)
    for reason, outcomes in reasons.items():
        yield "fail", "rollouts", f"{reason} ({_kinds(outcomes)})"
    errors: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in trials.outcomes:
        if outcome.kind == NO_MESSAGE or outcome.kind in trials.endless:
            continue
        if outcome.rollout is not None and outcome.rollout.error:
            errors[one_line(outcome.rollout.error_detail or outcome.rollout.error)].append(outcome)
    for reason, outcomes in errors.items():
        expected = all(outcome.kind in EXPLOITS for outcome in outcomes) and "Empty" in reason
        yield "warn" if expected else "fail", "rollouts", f"ended by {reason} ({_kinds(outcomes)})"
    for kind in sorted(trials.endless):
        yield "warn", "rollouts", f"no end after {MAX_CALLS} turns with the answer {kind!r}: set max_turns"


def _function_faults(trials: Trials) -> Iterator[Row]:
    """Reward functions that raise, or give no number."""
    raised: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    silent: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in trials.outcomes:
        if outcome.rollout is None or (outcome.rollout.error and outcome.kind != NO_MESSAGE):
            continue
        for function, trace in outcome.rollout.reward_errors.items():
            raised[function, _OURS.sub("", trace.splitlines()[-1], count=1)].append(outcome)
        scored = {**(outcome.rollout.metrics or {}), **outcome.rollout.reward_errors}
        for function in trials.environment.reward_functions if outcome.kind != NO_MESSAGE else ():
            if function not in scored:
                silent[function].append(outcome)
    for (function, line), outcomes in raised.items():
        # A run does not score a rollout without a message.
        level = "warn" if all(outcome.kind == NO_MESSAGE for outcome in outcomes) else "fail"
        yield level, f"reward function {function}", f"{line} ({_kinds(outcomes)})"
    for function, outcomes in silent.items():
        yield "fail", f"reward function {function}", f"gives no finite number ({_kinds(outcomes)})"


def _kinds(outcomes: Sequence[Outcome]) -> str:
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    more = f" and {len(kinds) - 4} more" if len(kinds) > 4 else ""
    return f"answer: {', '.join(kinds[:4])}{more}; row {outcomes[0].row}"


def _determinism(trials: Trials) -> Iterator[Row]:
    """Equal answers to the same row must earn the same."""
    seen: dict[int, Rollout] = {}
    for outcome in trials.outcomes:
        if outcome.kind != RIGHT or outcome.rollout is None or outcome.rollout.error:
            continue
        first = seen.setdefault(outcome.row, outcome.rollout)
        for name in [*trials.environment.reward_functions, ""]:
            one, other = (_part(rollout, name) for rollout in (first, outcome.rollout))
            if one is not None and other is not None and not math.isclose(one, other, abs_tol=_CLOSE):
                whose = f"reward function {name}" if name else "reward"
                yield "fail", whose, f"the same answer earns {one:.4g} and {other:.4g} in row {outcome.row}"
                return


def _part(rollout: Rollout, name: str) -> float | None:
    return (rollout.metrics or {}).get(name) if name else rollout.reward


def _values(trials: Trials, means: Mapping[str, float], has_answers: bool) -> Iterator[Row]:
    """What kinds of answers earn, compared with each other."""
    good = [outcome.rollout for outcome in trials.outcomes if outcome.rollout is not None and not outcome.rollout.error]
    if good and all(rollout.reward == good[0].reward for rollout in good):
        constant = f"constant: {good[0].reward:g} for every answer"
        if trials.are_games:
            yield "warn", "reward", f"{constant}. Scripted answers cannot play a game: let a model play with `env try`"
        elif trials.has_turns:
            yield (
                "warn",
                "reward",
                f"{constant}, also after several turns. If a reward needs a certain conversation, give its messages "
                "with --turn, or let a model try with `env try`",
            )
        else:
            yield "fail", "reward", f"{constant}, so the model cannot learn anything from it"
        return
    for name, weight in trials.environment.reward_functions.items():
        values = {_part(rollout, name) for rollout in good}
        if weight and len(values) == 1 and None not in values:
            yield "warn", f"reward function {name}", f"constant: {values.pop():g} for every answer"
    if not has_answers or RIGHT not in means:
        return
    right, wrong = means[RIGHT], means.get(WRONG, 0.0)
    if right <= wrong + _CLOSE and any(_earns_more(outcome, wrong) for outcome in trials.outcomes):
        return  # only a conversation of several turns is right, so single answers say nothing about each other
    if right <= wrong + _CLOSE:
        yield (
            "warn",
            "reward: right",
            f"earns {right:.4g}, and a wrong one {wrong:.4g}: if answers must have a certain form, give it with --form",
        )
        return
    unearned = {outcome.row for outcome in trials.outcomes if outcome.kind == RIGHT and _earns_at_most(outcome, wrong)}
    if unearned:
        count = count_of("row", len(unearned))
        yield "warn", "reward: right", f"earns no more than a wrong answer in {count}, row {min(unearned)} first"
    for kind in EXPLOITS:
        if kind in means and means[kind] > wrong + 0.9 * (right - wrong):
            yield (
                "fail",
                f"reward: {kind}",
                f"earns {means[kind]:.4g}, and a right answer {right:.4g}: a model will learn to exploit it",
            )
        elif kind in means and means[kind] > wrong + 0.5 * (right - wrong):
            yield "warn", f"reward: {kind}", f"earns {means[kind]:.4g}, and a right answer {right:.4g}"


def _earns_more(outcome: Outcome, reward: float) -> bool:
    rollout = outcome.rollout
    is_conversation = outcome.kind == CONVERSATION
    return is_conversation and rollout is not None and rollout.error is None and rollout.reward > reward + _CLOSE


def _earns_at_most(outcome: Outcome, reward: float) -> bool:
    rollout = outcome.rollout
    return rollout is not None and rollout.error is None and rollout.reward <= reward + _CLOSE


def _check_time(trials: Trials) -> None:
    slowest = max(trials.outcomes, key=lambda outcome: outcome.seconds, default=None)
    if slowest is None:
        return
    scoring_s = max(
        (each.rollout.scoring_ms / 1e3 for each in trials.outcomes if each.rollout is not None), default=0.0
    )
    text = f"slowest rollout {slowest.seconds:.2g} s (answer: {slowest.kind}); longest scoring {scoring_s:.2g} s"
    trials.report.found("warn" if max(scoring_s, slowest.seconds) > SLOW_S else "ok", "time", text)

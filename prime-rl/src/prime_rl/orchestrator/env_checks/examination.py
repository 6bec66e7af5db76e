"""Checks loaded environments before a model is: their prompts fit, and the chat template shows their tools.

By itself, `python -m prime_rl.orchestrator.env_checks.examination @ orchestrator.toml` reports on the environments of
a run: `medarc_train rl CONFIG --preflight`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from prime_rl.checks.chat_templates import TemplateTraces
from prime_rl.checks.model_files import context_length
from prime_rl.configs.orchestrator import ModelConfig, OrchestratorConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.environments.judging.gateway import offered_in_a_trial
from prime_rl.orchestrator.env_checks.prompts import PromptLengths, Refused, messages_of, renderer, text_of
from prime_rl.orchestrator.errors import EnvironmentFault, OrchestratorError
from prime_rl.utils.errors import StartFault
from prime_rl.utils.imports import import_verifiers, import_without_gc
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program

if TYPE_CHECKING:
    from prime_rl.orchestrator.workers.environment import Environment

EVAL_KEY = "orchestrator.eval.env"
_ROWS = 256
_CHARACTERS = 2_000_000
"""No more rows are read after this many characters."""
_SHOWN_CHARACTERS = 600
_CALL_ID = "call00001"
"""Nine letters and digits: Mistral's templates refuse other ids."""


@dataclass(slots=True)
class Examined:
    """What was found in one environment."""

    name: str
    rows: int | None
    """None if there is no end of them."""
    tools: int
    first_prompt: str
    lengths: list[int] = field(default_factory=list)
    """Tokens of each prompt that was read, as the engine gets it. Empty if nothing counts them."""
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def describe(self) -> str:
        tools = f"{self.tools or 'no'} {'tool' if self.tools == 1 else 'tools'}"
        rows = "endless" if self.rows is None else f"{self.rows:,} rows"
        if not self.lengths:
            return f"{self.name}: {rows}, {tools}"
        low, middle, high = min(self.lengths), round(median(self.lengths)), max(self.lengths)
        return (
            f"{self.name}: {rows}, {tools}; tokens of a prompt: {low:,} to {high:,}, median {middle:,} "
            f"({len(self.lengths):,} rows read)"
        )


@dataclass(frozen=True, slots=True)
class Room:
    """The longest prompt with its answer, in tokens, and what limits it."""

    tokens: int
    limit: str
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: OrchestratorConfig) -> Room:
        """The smallest of what samples may have, what the servers take and what the model takes."""
        own = f"orchestrator.seq_len = {config.seq_len}"
        served, context = config.max_model_len, context_length(Path(config.model.name))
        limits = [(config.seq_len, own)]
        limits += [] if served is None else [(served, f"inference.model.max_model_len = {served}")]
        limits += [] if context is None else [(context, f"the model's context is {context} tokens")]
        tokens, limit = min(limits, key=lambda each: each[0])
        if tokens == config.seq_len:
            return cls(tokens, limit)
        return cls(tokens, limit, (f"longer answers are cut off: {limit}, and {own}",))


def config_warnings(config: OrchestratorConfig, room: Room) -> list[str]:
    """One line for each setting with which a run goes on, but not as intended."""
    lines = list(room.warnings)
    if config.compares_single_rollouts and not config.all_teachers and not config.bench:
        lines.append(
            "orchestrator.rollouts_per_example is 1: a group has only one rollout, so all "
            "advantages are 0 and nothing is learned; set 2 or more, or another orchestrator.advantage"
        )
    return lines


def examine(environments: Sequence[tuple[str, Environment]], model: ModelConfig, room: Room) -> list[Examined]:
    """Examine environments, each with its config key, for a model whose prompts and answers must fit into `room`."""
    lengths = PromptLengths.of(model)
    return [_examine(place, environment, model, room, lengths) for place, environment in environments]


def refuse_unusable(environments: Sequence[tuple[str, Environment]], config: OrchestratorConfig) -> None:
    """Examine environments and log warnings.

    Raises:
        EnvironmentFault: prompts leave no room for an answer, or the model would not see the tools.
    """
    room = Room.of(config)
    for line in config_warnings(config, room):
        get_logger().warning(line)
    for found in examine(environments, config.model, room):
        for line in found.warnings:
            get_logger().warning(line)
        if found.faults:
            raise EnvironmentFault("; ".join(found.faults))


def _examine(
    place: str, environment: Environment, model: ModelConfig, room: Room, lengths: PromptLengths | None
) -> Examined:
    tools = list(environment.tools(0))
    rows = list(_rows(environment))
    first = environment.prompt(0)
    found = Examined(environment.name, environment.num_rows, len(tools), text_of(first))
    if lengths is not None:
        found.lengths = [lengths.of_prompt(environment.prompt(row), environment.tools(row)) for row in rows]
        _check_lengths(found, place, room)
    if tools:
        found.faults += _tool_faults(place, environment.name, messages_of(first), tools, model)
    return found


def _check_lengths(found: Examined, place: str, room: Room) -> None:
    too_long = sum(length >= room.tokens for length in found.lengths)
    if too_long == len(found.lengths):
        found.faults.append(
            f"{place}: no prompt of environment {found.name!r} leaves room for an answer: the shortest of {too_long} "
            f"has {min(found.lengths)} tokens, and {room.limit}"
        )
    elif too_long:
        found.warnings.append(
            f"{place}: {too_long} of {len(found.lengths)} prompts of environment {found.name!r} leave no room for an "
            f"answer: the longest has {max(found.lengths)} tokens, and {room.limit}"
        )


def _tool_faults(
    place: str, name: str, prompt: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], model: ModelConfig
) -> Iterator[str]:
    """What the chat template leaves out of a conversation in which the first tool is called."""
    function = tools[0]["function"]
    arguments = dict.fromkeys((function.get("parameters") or {}).get("properties") or {}, "x")
    call = {"id": _CALL_ID, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
    messages = [
        *prompt,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "result", "tool_call_id": _CALL_ID, "name": function["name"]},
        {"role": "assistant", "content": "answer"},
    ]
    advice = "set trainer.tokenizer.chat_template (chatml renders tools), or take a model whose template renders them"
    whose = f"{place}: environment {name!r} has tools, and the chat template of {model.name}"
    try:
        left_out = TemplateTraces(renderer(model), Refused).left_out({"messages": messages, "tools": list(tools)})
    except Refused as error:
        yield f"{whose} refuses a conversation with a call: {error}; {advice}"
    except (OSError, ValueError, StartFault) as error:
        yield f"{whose} cannot be read: {' '.join(str(error).split())}"
    else:
        if left_out:
            yield f"{whose} leaves out {', '.join(left_out)}: {advice}"


def _rows(environment: Environment) -> Iterator[int]:
    """Rows spread over the environment, the first one first."""
    characters = 0
    for row in range(0, len(environment), max(1, len(environment) // _ROWS)):
        yield row
        characters += len(text_of(environment.prompt(row)))
        if characters > _CHARACTERS:
            return


def main() -> None:
    """Print the report. Exit codes: 0 ok, 1 the run would not start, 2 bad config."""
    start_program()
    config = parse_argv_or_exit(OrchestratorConfig)
    refuse_unbuilt(config)
    setup_logger("warning")
    with import_without_gc():
        import_verifiers()
        from prime_rl.orchestrator.batches.advantage import try_advantage
        from prime_rl.orchestrator.workers.loading import load_environments

    try:
        try_advantage(config)
        with offered_in_a_trial(config.judge):
            train = load_environments(config.env, config.log)
            evals = load_environments(config.eval.env, config.log, EVAL_KEY, "eval") if config.eval else {}
        for environment in (*train.values(), *evals.values()):
            environment.image_limits = config.model.image_limits
            environment.check_images()
    except OrchestratorError as fault:
        sys.stderr.write(f"error: {fault}\n")
        raise SystemExit(1) from fault
    room = Room.of(config)
    found = examine(placed(train, evals), config.model, room)
    for each in found:
        sys.stdout.write(f"{each.describe()}\n")
        sys.stdout.write(f"  first prompt: {each.first_prompt[:_SHOWN_CHARACTERS]!r}\n")
    warnings = [*config_warnings(config, room), *(line for each in found for line in each.warnings)]
    faults = [line for each in found for line in each.faults]
    sys.stdout.writelines(f"warning: {line}\n" for line in warnings)
    sys.stdout.write("" if warnings or faults else "No problems found.\n")
    sys.stdout.flush()
    sys.stderr.writelines(f"error: {line}\n" for line in faults)
    raise SystemExit(1 if faults else 0)


def placed(train: Mapping[str, Environment], evals: Mapping[str, Environment]) -> list[tuple[str, Environment]]:
    """The environments of a run with their config keys."""
    kinds = (("orchestrator.env", train), (EVAL_KEY, evals))
    return [(f"{key}[{at}]", each) for key, kind in kinds for at, each in enumerate(kind.values())]


if __name__ == "__main__":
    main()

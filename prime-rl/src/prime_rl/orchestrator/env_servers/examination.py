"""Checks loaded environments before a model is: their prompts fit, and the chat template shows their tools.

By itself, `python -m prime_rl.orchestrator.env_servers.examination @ orchestrator.toml` reports on the environments of
a run: `medarc_train rl CONFIG --preflight`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from prime_rl.checks.chat_templates import read_template
from prime_rl.checks.start_dir import StartFault
from prime_rl.checks.template_traces import Arguments, TemplateTraces
from prime_rl.checks.time_limit import MAX_RENDER_S, OutOfTime, time_limit
from prime_rl.configs.orchestrator import ModelConfig, OrchestratorConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.environments.judging.offer import offered_in_a_trial
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.rollouts.token_texts import read_tokenizer
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit

if TYPE_CHECKING:
    from prime_rl.orchestrator.env_servers.environments import Environment

EVAL_KEY = "orchestrator.eval.env"
_ROWS = 256
_CHARACTERS = 2_000_000
"""No more rows are read after this many characters."""
_SHOWN_CHARACTERS = 600
_CALL_ID = "call00001"
"""Nine letters and digits: Mistral's templates refuse other ids."""

CountTokens = Callable[[str], int]


class _Refused(Exception):
    """The chat template refuses a conversation."""


@dataclass(slots=True)
class Examined:
    """What was found in one environment."""

    name: str
    rows: int | None
    """None if there is no end of them."""
    tools: int
    first_prompt: str
    lengths: list[int] = field(default_factory=list)
    """Tokens of each prompt that was read, without what the template adds. Empty if nothing counts them."""
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


def examine(environments: Sequence[tuple[str, Environment]], model: ModelConfig, seq_len: int) -> list[Examined]:
    """Examine environments, each with its config key, for a model whose samples have at most `seq_len` tokens."""
    count = token_counter(model.name)
    return [_examine(place, environment, model, seq_len, count) for place, environment in environments]


def refuse_unusable(environments: Sequence[tuple[str, Environment]], model: ModelConfig, seq_len: int) -> None:
    """Examine environments and log warnings.

    Raises:
        EnvironmentFault: prompts leave no room for an answer, or the model would not see the tools.
    """
    for found in examine(environments, model, seq_len):
        for line in found.warnings:
            get_logger().warning(line)
        if found.faults:
            raise EnvironmentFault("; ".join(found.faults))


def token_counter(model: str) -> CountTokens | None:
    """Counts the tokens of a text; None without a `tokenizer.json` on this machine."""
    tokenizer = read_tokenizer(model)
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _examine(
    place: str, environment: Environment, model: ModelConfig, seq_len: int, count: CountTokens | None
) -> Examined:
    tools = list(environment.tools(0))
    prompts = list(_prompts(environment))
    found = Examined(environment.name, environment.num_rows, len(tools), text_of(prompts[0]))
    if count is not None:
        found.lengths = [count(text_of(prompt)) for prompt in prompts]
        _check_lengths(found, place, seq_len)
    if tools:
        found.faults += _tool_faults(place, environment.name, _messages(prompts[0]), tools, model)
    return found


def _check_lengths(found: Examined, place: str, seq_len: int) -> None:
    too_long = sum(length >= seq_len for length in found.lengths)
    limit = f"orchestrator.seq_len = {seq_len}"
    if too_long == len(found.lengths):
        found.faults.append(
            f"{place}: no prompt of environment {found.name!r} leaves room for an answer: the shortest of {too_long} "
            f"has {min(found.lengths)} tokens, and {limit}"
        )
    elif too_long:
        found.warnings.append(
            f"{place}: {too_long} of {len(found.lengths)} prompts of environment {found.name!r} leave no room for an "
            f"answer: the longest has {max(found.lengths)} tokens, and {limit}"
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
        left_out = TemplateTraces(_renderer(model), _Refused).left_out({"messages": messages, "tools": list(tools)})
    except _Refused as error:
        yield f"{whose} refuses a conversation with a call: {error}; {advice}"
    except (OSError, ValueError, StartFault) as error:
        yield f"{whose} cannot be read: {' '.join(str(error).split())}"
    else:
        if left_out:
            yield f"{whose} leaves out {', '.join(left_out)}: {advice}"


def _renderer(model: ModelConfig) -> Callable[[Arguments], str]:
    import jinja2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.name)
    if model.chat_template is not None:
        tokenizer.chat_template = read_template("orchestrator.model.chat_template", model.chat_template)

    def render(arguments: Arguments) -> str:
        try:
            with time_limit(MAX_RENDER_S):
                text = tokenizer.apply_chat_template(arguments["messages"], tools=arguments["tools"], tokenize=False)
        except OutOfTime:
            raise _Refused(f"rendering it takes more than {MAX_RENDER_S:g} s, so the template may loop") from None
        except (jinja2.TemplateError, TypeError, IndexError, KeyError, ValueError) as error:
            raise _Refused(" ".join(str(error).split())) from error
        return str(text)

    return render


def _prompts(environment: Environment) -> Iterator[Any]:
    """Prompts of rows spread over the environment, the first one first."""
    characters = 0
    for row in range(0, len(environment), max(1, len(environment) // _ROWS)):
        prompt = environment.prompt(row)
        yield prompt
        characters += len(text_of(prompt))
        if characters > _CHARACTERS:
            return


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def text_of(prompt: Any) -> str:
    """The texts of a prompt's messages."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") or "" for message in prompt]
    parts = [content if isinstance(content, list) else [content] for content in contents]
    return "\n".join(
        str(part.get("text", "") if isinstance(part, Mapping) else part) for each in parts for part in each
    )


def main() -> None:
    """Print the report. Exit codes: 0 ok, 1 the run would not start, 2 bad config."""
    config = parse_argv_or_exit(OrchestratorConfig)
    refuse_unbuilt(config)
    setup_logger("warning")
    from prime_rl.orchestrator.env_servers.environments import load_environments

    try:
        with offered_in_a_trial(config.judge):
            train = load_environments(config.env, config.log)
            evals = load_environments(config.eval.env, config.log, EVAL_KEY, "eval") if config.eval else {}
        for environment in (*train.values(), *evals.values()):
            environment.refuse_images()
    except EnvironmentFault as fault:
        sys.stderr.write(f"error: {fault}\n")
        raise SystemExit(1) from fault
    found = examine(placed(train, evals), config.model, config.seq_len)
    for each in found:
        sys.stdout.write(f"{each.describe()}\n")
        sys.stdout.write(f"  first prompt: {each.first_prompt[:_SHOWN_CHARACTERS]!r}\n")
    warnings = [line for each in found for line in each.warnings]
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

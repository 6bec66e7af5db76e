"""Loads an environment of verifiers 0.1.5 to 0.3, and runs groups of it through interfaces that differ by version.

The orchestrator uses it in its own process, and other interpreters use it for environments that need another verifiers.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from .blocking import in_threads
from .frames import finite
from .model_client import NO_SESSION, Clients, for_verifiers
from .reward_records import KEY as REWARD_ERRORS
from .reward_records import NAMES as REWARD_LISTS
from .reward_records import OVERLONG_PROMPT, leaves, record_reward_errors, reward_functions

SESSION_KEY = "prime_rl_session"
"""Key of a rollout's state that names the session in which it asked the model."""
TURNS = "prime_rl_turns"
"""Key of a rollout's state that names the answers which the environment kept (`kept_turns`)."""
HOOKS = ("setup_state", "env_response", "is_completed", "rollout")
"""Methods of an environment that run its author's code. verifiers may run each of the first three in a task of its own,
and an event loop ends at once if a task raises SystemExit."""
REWARD_CALLERS = (
    *("score_rollout", "score_group", "score_rollouts"),
    *("_call_individual_reward_func", "_call_group_reward_func", "call_reward_func"),
)
"""Methods of rubrics that call reward functions, of all supported versions."""
_COUNTS = re.compile(
    r"context length is (\d+) tokens.*?(?:prompt has|contains(?: at least)?) (\d+) (?:input )?tokens", re.DOTALL
)
"""How our engine and vLLM refuse a prompt that is too long."""
_SESSIONS: ContextVar[Iterator[tuple[Any, str]]] = ContextVar("sessions")
"""Client and key of each of the group's rollouts that have not begun. A group is run in a task of its own."""


class WrongType(TypeError):
    """An environment's author gave verifiers a value that is not an environment or a dataset."""


def load(start: Mapping[str, Any]) -> Served:
    """The environment of `module`, made with `args`, with its `attributes` set.

    With `threads`, that many threads run its plain reward functions and tools.

    Raises WrongType, or whatever the environment's code raises.
    """
    import verifiers as vf

    attributes = start["attributes"]
    try:
        env = vf.load_environment(start["module"], **start["args"])
        if hasattr(env, "set_kwargs"):
            env.set_kwargs(**attributes)
        else:  # until verifiers 0.1.8
            for name, value in attributes.items():
                setattr(env, name, value)
        if not start.get("threads"):
            return Served(env)
        threads = ThreadPoolExecutor(start["threads"], "environment")
        use_threads(env, threads)
        return Served(env, threads)
    except Exception as error:  # an environment's own code may raise anything
        if (words := wrong_type(error)) is not None:
            raise WrongType(words) from error
        raise


def use_threads(env: Any, threads: Executor) -> None:
    """Let threads run plain reward functions and tools where verifiers itself calls them, and so awaits what they
    return. A class that overrides the calling method may need the value at once."""
    for part in leaves(getattr(env, "rubric", None)):
        if all(_is_of_verifiers(part, name) for name in REWARD_CALLERS):
            for name in REWARD_LISTS:
                if isinstance(functions := getattr(part, name, None), list):
                    setattr(part, name, [in_threads(each, threads) for each in functions])
    for each in (env, *getattr(env, "env_map", {}).values()):
        tools = getattr(each, "tool_map", None)
        if isinstance(tools, dict) and _is_of_verifiers(each, "call_tool"):
            each.tool_map = {name: in_threads(tool, threads) for name, tool in tools.items()}


def _is_of_verifiers(owner: Any, name: str) -> bool:
    """Whether a method is verifiers' own, or does not exist in this version."""
    method = getattr(type(owner), name, None)
    return method is None or str(method.__module__).startswith("verifiers.")


class Served:
    """A loaded environment, and the groups that it runs."""

    def __init__(self, env: Any, threads: Executor | None = None) -> None:
        self.env = env
        self._threads = threads
        self.rubric = getattr(env, "rubric", None)
        contain_exits(env)
        record_reward_errors(self.rubric)
        record_overlong_prompts(env)
        env.rollout = _signed(env.rollout)
        self._clients: dict[str, Clients] = {}
        self._datasets: dict[str, Any] = {}

    def describe(self, split: str) -> dict[str, Any]:
        """Number of rows, reward functions with their weights, and tools of the environment.

        `falls_back` says that the evaluation rows are the training rows, because there are no others.
        """
        return {
            "rows": len(self.dataset(split)),
            "falls_back": split == "eval" and lacks_eval_rows(self.env),
            "functions": reward_functions(self.rubric),
            "tools": getattr(self.env, "tool_defs", None) or getattr(self.env, "oai_tools", None) or [],
        }

    def dataset(self, split: str) -> Any:
        if split not in self._datasets:
            is_train = split == "train"
            self._datasets[split] = self.env.get_dataset() if is_train else self.env.get_eval_dataset()
        return self._datasets[split]

    def rows(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        dataset = self.dataset(split)
        return [dataset[row] for row in range(start, min(stop, len(dataset)))]

    async def run_group(
        self, split: str, row: int, base_url: str, model: str, sampling_args: dict[str, Any], sessions: list[str],
        proxy_key: str,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """One rollout for each session of the proxy at `base_url`. They come in any order and name their sessions."""
        if base_url not in self._clients:
            self._clients[base_url] = Clients(base_url)
        clients = self._clients[base_url]
        signed = ((for_verifiers(clients.of_session(key)), key) for key in sessions)
        outside = for_verifiers(clients.of_session(NO_SESSION))
        inputs = [dict(self.dataset(split)[row]) for _ in sessions]
        outputs = await self.run_inputs(inputs, signed, outside, model, sampling_args)
        # The proxy samples as the run says, whatever the environment makes of its arguments.
        return [{**output, "sampling_args": None} for output in outputs]

    async def run_inputs(
        self,
        inputs: list[dict[str, Any]],
        sessions: Iterator[tuple[Any, str]],
        outside: Any,
        model: str,
        sampling_args: dict[str, Any],
        max_retries: int = 0,
    ) -> list[dict[str, Any]]:
        """One rollout for each input, scored together.

        Each rollout takes a client and a key from `sessions`; a retried group takes new ones. `outside` is the client
        of requests that belong to no rollout.
        """
        _SESSIONS.set(sessions)
        run_group = getattr(self.env, "run_group", None)
        if run_group is None:
            states = await self._generated(inputs, outside, model, sampling_args)
        elif "gen_sem" in inspect.signature(run_group).parameters:  # 0.1.6 to 0.1.9
            free = _NoLimit()
            states = await run_group(
                inputs, outside, model, gen_sampling_args=sampling_args, gen_sem=free, score_sem=free
            )
        else:
            columns = [SESSION_KEY, TURNS, REWARD_ERRORS, OVERLONG_PROMPT, "sampling_args"]
            states = await run_group(inputs, outside, model, sampling_args, max_retries, state_columns=columns)
        return [_output(state) for state in states]

    def after_answer(self) -> None:
        """Nothing ends the process."""

    async def close(self) -> None:
        """Let the threads end. One that waits for something ends later."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def _generated(
        self, inputs: list[dict[str, Any]], client: Any, model: str, sampling_args: dict[str, Any]
    ) -> Sequence[Mapping[str, Any]]:
        """verifiers 0.1.5 and earlier, whose rollouts take columns and return pairs."""
        columns = {name: [each.get(name) for each in inputs] for name in inputs[0]}
        if isinstance(inputs[0].get("info"), str):
            columns["info"] = [json.loads(each["info"]) for each in inputs]
        done = await self.env.a_generate(columns, client, model, sampling_args, interleave_scoring=False)
        return [
            {
                **state,
                "prompt": done.prompt[at],
                "completion": done.completion[at],
                "reward": done.reward[at],
                "metrics": {name: values[at] for name, values in done.metrics.items()},
            }
            for at, state in enumerate(done.state)
        ]


def wrong_type(error: BaseException) -> str | None:
    """Which value of a wrong type verifiers got from the environment's author. It reports a missing attribute instead.

    None if something else went wrong.
    """
    for each in (error, error.__cause__):
        if isinstance(each, AttributeError) and each.name == "env_id":
            return _no_environment(each.obj)
        if isinstance(each, AttributeError) and each.name == "column_names":
            return f"its dataset is {_kind(each.obj)}, not a Dataset of `datasets`: Dataset.from_list(rows) makes one"
    return None


def _no_environment(returned: object) -> str:
    if inspect.iscoroutine(returned):
        returned.close()  # or Python warns that it was never awaited
        return "load_environment is an `async def`, and verifiers does not await it: write `def`"
    return f"load_environment returned {_kind(returned)}, not an environment of verifiers"


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def lacks_eval_rows(env: Any) -> bool:
    """Whether verifiers gives training rows as evaluation rows. A group does if one of its environments does."""
    members = getattr(env, "envs", None) or ()
    return any(map(lacks_eval_rows, members)) if members else getattr(env, "eval_dataset", None) is None


def contain_exits(env: Any) -> None:
    """Turn SystemExit in the rollouts of an environment, or of any member of a group, into an error of the rollout."""
    import verifiers as vf

    # verifiers ends a rollout, not the group, with an error of this class. Earlier versions have none.
    base: Any = getattr(vf, "Error", RuntimeError)
    called_exit = type("CalledExit", (base,), {"__doc__": "The code of an environment called `sys.exit`."})
    for name in HOOKS:
        hook = getattr(env, name, None)
        if inspect.iscoroutinefunction(hook):
            setattr(env, name, _contained(hook, called_exit))
    for member in getattr(env, "env_map", {}).values():
        contain_exits(member)


def _contained(hook: Callable[..., Any], called_exit: type[Exception]) -> Callable[..., Any]:
    @functools.wraps(hook)
    async def contained(*args: Any, **kwargs: Any) -> Any:
        try:
            return await hook(*args, **kwargs)
        except SystemExit as exit_:
            raise called_exit(f"the environment called sys.exit({exit_.code!r})") from exit_

    return contained


def record_overlong_prompts(env: Any) -> None:
    """Write into a rollout's state, or that of any member of a group, why the engine refused its prompt as too long."""
    hook = getattr(env, "get_model_response", None)
    if hook is not None:

        @functools.wraps(hook)
        async def recording(*args: Any, **kwargs: Any) -> Any:
            try:
                return await hook(*args, **kwargs)
            except Exception as error:
                state = kwargs.get("state", args[0] if args else None)
                if type(error).__name__ == "OverlongPromptError" and isinstance(state, dict):
                    state[OVERLONG_PROMPT] = overlong_prompt(str(error))
                raise

        env.get_model_response = recording
    for member in getattr(env, "env_map", {}).values():
        record_overlong_prompts(member)


def overlong_prompt(message: str) -> str:
    """What the engine said of a prompt that is too long, in few words if it has a known form."""
    if (found := _COUNTS.search(message)) is None:
        return f"prompt too long: {' '.join(message.split())}"
    return f"prompt too long ({found[2]} tokens, limit {found[1]})"


def _signed(rollout: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, which asks the model in the name of the group's next session."""
    signature = inspect.signature(rollout)

    async def signed(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments["client"], key = next(_SESSIONS.get())
        done = await rollout(*given.args, **given.kwargs)
        state = done[1] if isinstance(done, tuple) else done
        state[SESSION_KEY] = key
        state[TURNS] = kept_turns(state)
        state.setdefault(REWARD_ERRORS, [])
        return done

    signed.__signature__ = signature  # type: ignore[attr-defined]
    return signed


def kept_turns(state: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The answers that the environment kept in its trajectory: `id` of each, and what differs from the answer itself.

    A game keeps the answers of one seat, for example. `cut` are the numbers of prompt and completion tokens that are
    left, and the masks say which of them may be trained on. None until verifiers 0.1.7, which keeps no trajectory.
    """
    steps = state.get("trajectory")
    if steps is None:
        return None
    turns = []
    for step in steps:
        response, tokens = step.get("response"), step.get("tokens")
        turn: dict[str, Any] = {"id": str(getattr(response, "id", None) or "")}
        own = getattr(getattr(response, "message", None), "tokens", None)
        if tokens is not None:
            kept = [len(tokens["prompt_ids"]), len(tokens["completion_ids"])]
            if own is None or kept != [len(own.prompt_ids), len(own.completion_ids)]:
                turn["cut"] = kept
            if any(tokens["prompt_mask"]):
                turn["prompt_mask"] = list(map(bool, tokens["prompt_mask"]))
            if not all(tokens["completion_mask"]):
                turn["completion_mask"] = list(map(bool, tokens["completion_mask"]))
        elif own is not None:  # the environment removed them
            turn["cut"] = [0, 0]
        turns.append(turn)
    return turns


class _NoLimit:
    async def __aenter__(self) -> None:
        """Let everybody in."""

    async def __aexit__(self, *error: object) -> None:
        """Nothing to release."""


def _output(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the orchestrator reads of a rollout."""
    error = state.get("error")
    if isinstance(error, BaseException):
        error = {"error": type(error).__name__, "error_chain_repr": repr(error)}
    metrics = {str(name): finite(value) for name, value in (state.get("metrics") or {}).items()}
    return {
        "session": state[SESSION_KEY],
        "turns": state.get(TURNS),
        "reward": state.get("reward"),
        "metrics": {name: value for name, value in metrics.items() if value is not None},
        "error": error,
        "timing": state.get("timing"),
        "is_truncated": bool(state.get("is_truncated")),
        "stop_condition": state.get("stop_condition"),
        "token_usage": state.get("token_usage"),
        "sampling_args": state.get("sampling_args"),
        "prompt": state.get("prompt"),
        "completion": state.get("completion"),
        REWARD_ERRORS: state.get(REWARD_ERRORS) or [],
        OVERLONG_PROMPT: state.get(OVERLONG_PROMPT),
    }

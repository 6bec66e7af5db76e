"""One environment behind the interfaces of verifiers 0.1.5 to 0.3, which differ from version to version."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from .frames import finite
from .model_client import NO_SESSION, Clients, for_verifiers
from .returned import wrong_type
from .reward_records import KEY as REWARD_ERRORS
from .reward_records import functions_with_weights, leaves, record_reward_errors

SESSION_KEY = "prime_rl_session"
"""Key of a rollout's state that tells which session asked the model."""
_SESSIONS: ContextVar[Iterator[tuple[Any, str]]] = ContextVar("sessions")
"""Client and key of each of the group's rollouts that have not begun. A group is run in a task of its own."""


class Served:
    """An environment as the orchestrator asks for it."""

    def __init__(self, start: dict[str, Any]) -> None:
        import verifiers as vf

        attributes = start["attributes"]
        try:
            self.env = vf.load_environment(start["module"], **start["args"])
        except Exception as error:  # an environment's own code may raise anything
            if (words := wrong_type(error)) is not None:
                raise TypeError(words) from error
            raise
        if hasattr(self.env, "set_kwargs"):
            self.env.set_kwargs(**attributes)
        else:
            for name, value in attributes.items():
                setattr(self.env, name, value)
        rubric = getattr(self.env, "rubric", None)
        record_reward_errors(rubric)
        self._rubrics = list(leaves(rubric))
        self.env.rollout = _signed(self.env.rollout)
        self._clients: dict[str, Clients] = {}
        self._datasets: dict[str, Any] = {}

    def describe(self, split: str) -> dict[str, Any]:
        """Number of rows, reward functions with their weights, and tools of the environment.

        `falls_back` says that the evaluation rows are the training rows, because there are no others.
        """
        return {
            "rows": len(self._dataset(split)),
            "falls_back": split == "eval" and getattr(self.env, "eval_dataset", None) is None,
            "functions": dict(pair for rubric in self._rubrics for pair in functions_with_weights(rubric)),
            "tools": getattr(self.env, "tool_defs", None) or getattr(self.env, "oai_tools", None) or [],
        }

    def rows(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        dataset = self._dataset(split)
        return [dataset[row] for row in range(start, min(stop, len(dataset)))]

    async def run_group(
        self, split: str, row: int, base_url: str, model: str, sampling_args: dict[str, Any], sessions: list[str],
        proxy_key: str,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """One rollout for each session, scored together. Rollouts come in any order and name their sessions."""
        inputs = [dict(self._dataset(split)[row]) for _ in sessions]
        if base_url not in self._clients:
            self._clients[base_url] = Clients(base_url)
        clients = self._clients[base_url]
        _SESSIONS.set((clients.of_session(key), key) for key in sessions)
        outside = for_verifiers(clients.of_session(NO_SESSION))
        states = await self._states(inputs, outside, model, sampling_args)
        return [_output(state) for state in states]

    def after_answer(self) -> None:
        """Nothing ends the process."""

    async def close(self) -> None:
        """Nothing outlives the process."""

    async def _states(
        self, inputs: list[dict[str, Any]], client: Any, model: str, sampling_args: dict[str, Any]
    ) -> Sequence[Mapping[str, Any]]:
        run_group = getattr(self.env, "run_group", None)
        if run_group is None:
            return await self._generated(inputs, client, model, sampling_args)
        asked = inspect.signature(run_group).parameters
        if "gen_sem" in asked:  # 0.1.6 to 0.1.9
            free = _NoLimit()
            states: Sequence[Mapping[str, Any]] = await run_group(
                inputs, client, model, gen_sampling_args=sampling_args, gen_sem=free, score_sem=free
            )
            return states
        columns = [SESSION_KEY, REWARD_ERRORS]
        outputs: Sequence[Mapping[str, Any]] = await run_group(
            inputs, client, model, sampling_args, max_retries=0, state_columns=columns
        )
        return outputs

    async def _generated(
        self, inputs: list[dict[str, Any]], client: Any, model: str, sampling_args: dict[str, Any]
    ) -> list[dict[str, Any]]:
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

    def _dataset(self, split: str) -> Any:
        if split not in self._datasets:
            is_train = split == "train"
            self._datasets[split] = self.env.get_dataset() if is_train else self.env.get_eval_dataset()
        return self._datasets[split]


def _signed(rollout: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, which asks the model in the name of the group's next session."""
    signature = inspect.signature(rollout)

    async def signed(*args: Any, **kwargs: Any) -> Any:
        client, key = next(_SESSIONS.get())
        given = signature.bind(*args, **kwargs)
        given.arguments["client"] = for_verifiers(client)
        try:
            done = await rollout(*given.args, **given.kwargs)
        except SystemExit as exit_:
            raise RuntimeError(f"the environment called sys.exit({exit_.code!r})") from exit_
        state = done[1] if isinstance(done, tuple) else done
        state[SESSION_KEY] = key
        state.setdefault(REWARD_ERRORS, [])
        return done

    signed.__signature__ = signature  # type: ignore[attr-defined]
    return signed


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
        "reward": state.get("reward"),
        "metrics": {name: value for name, value in metrics.items() if value is not None},
        "error": error,
        "timing": state.get("timing"),
        "is_truncated": bool(state.get("is_truncated")),
        "stop_condition": state.get("stop_condition"),
        "prompt": state.get("prompt"),
        "completion": state.get("completion"),
        REWARD_ERRORS: state.get(REWARD_ERRORS) or [],
    }

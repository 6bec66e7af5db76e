"""Keys of an environment that is an agent: those that would have no effect are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from prime_rl.configs.rollouts.environments import EnvConfig

AGENT = {"workflow": "agents:play", "agent_dataset": "tasks.jsonl"}
EXTERNAL = {**AGENT, "workflow": "external"}


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"agent_dataset": "tasks.jsonl"}, "agent_dataset needs workflow"),
        ({"workflow": "agents:play"}, "workflow needs rows: set agent_dataset"),
        ({**AGENT, "workflow": "agents play"}, "write module:object"),
        ({**AGENT, "address": "tcp://127.0.0.1:5000"}, "address cannot be set together with workflow"),
        ({**AGENT, "taskset": {"id": "x"}}, "taskset cannot be set together with workflow"),
        ({**AGENT, "agent": {"harness": {}}}, "agent cannot be set together with workflow"),
        ({**AGENT, "agent_port": 8000}, 'agent_port needs workflow = "external"'),
        *(
            (
                {**EXTERNAL, key: value},
                f'{key} cannot be set together with workflow = "external": the run does not start',
            )
            for key, value in {"args": {"level": 1}, "python": "python", "project": "mine", "judge": "grader"}.items()
        ),
    ],
)
def test_a_key_without_effect_is_refused(keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        EnvConfig.model_validate(keys)


def test_an_agent_is_named_after_its_function_and_keeps_its_arguments() -> None:
    config = EnvConfig.model_validate({**AGENT, "args": {"level": 1}})
    assert (config.id, config.args) == ("play", {"level": 1})
    assert EnvConfig.model_validate({**EXTERNAL, "agent_port": 8000}).agent_port == 8000

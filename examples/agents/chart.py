"""An agent of the package openai-agents: it must look a bed up with its tool, and repeat the diagnosis.

`rl_tool_cpu.toml` trains it. Nothing here knows about training: the agent gets an OpenAI client, and returns a reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

MAX_TURNS = 3
FOR_LOOKING = 0.25
"""Part of the reward for a call of the tool with the right bed. The rest is for the answer."""


async def agent(task: Mapping[str, Any], client: AsyncOpenAI, model: str) -> float:
    """The reward: 0.25 for looking at the right chart, and 0.75 for the diagnosis that it says."""
    has_looked = False

    @function_tool
    def chart(bed: str) -> str:
        """The diagnosis of the patient in a bed."""
        nonlocal has_looked
        has_looked = has_looked or bed == task["bed"]
        return str(task["diagnosis"]) if bed == task["bed"] else "empty"

    nurse = Agent(
        name="nurse",
        tools=[chart],
        model=OpenAIResponsesModel(model, client),
        model_settings=ModelSettings(max_tokens=80),
    )
    try:
        # Without tracing: nothing leaves this machine.
        quiet = RunConfig(tracing_disabled=True)
        said = str((await Runner.run(nurse, task["question"], max_turns=MAX_TURNS, run_config=quiet)).final_output)
    except AgentsException:  # too many turns, or a call of a tool that does not exist
        said = ""
    return FOR_LOOKING * has_looked + (1 - FOR_LOOKING) * (said.strip() == task["diagnosis"])

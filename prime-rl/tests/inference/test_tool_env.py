"""Tool use end to end: a model trained to call a tool, an engine, and verifiers' own `ToolEnv`."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import verifiers as vf
from datasets import Dataset

from prime_rl.configs.data import LossMaskConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.environments.rows.single_turn import load_environment
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout, read_rollout, to_samples
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.workers.in_memory import VerifiersWorker
from prime_rl.orchestrator.workers.inside.verifiers_api import Served
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer
from prime_rl.transport.messages import TrainingSample
from prime_rl.utils.rows import read_file

QUESTION = {"role": "user", "content": "2+3"}
ARGUMENTS = '{"a": 2, "b": 3}'


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CONVERSATION = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is 5"},
]


@pytest.fixture(scope="session")
def learned_weights(served_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the tiny model after memorizing one conversation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served_model_dir)
    model = AutoModelForCausalLM.from_pretrained(served_model_dir, dtype=torch.float32)
    text = tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False)
    tokens = torch.tensor([tokenizer(text)["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(300):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.02:
            break
    directory = tmp_path_factory.mktemp("learned") / "step_1"
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def caller(server: Any, learned_weights: Path) -> Any:
    """A server with the model that calls its tool."""
    server.post("/update_weights", {"weight_dir": str(learned_weights)})
    return server


def chat(caller: Any, **options: Any) -> dict[str, Any]:
    body = {"messages": [QUESTION], "tools": [TOOL], "temperature": 0, "max_tokens": 200}
    return caller.post("/v1/chat/completions", {"model": caller.model} | body | options)["choices"][0]


def test_a_call_comes_back_as_a_tool_call(caller) -> None:
    choice = chat(caller)
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": ARGUMENTS})
    assert call["id"]
    assert not choice["message"]["content"]
    assert choice["finish_reason"] == "tool_calls"


def test_a_tool_result_is_rendered_with_the_template(caller) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, CONVERSATION[2]]
    choice = chat(caller, messages=messages)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It is 5", "stop")
    assert not choice["message"].get("tool_calls")


def test_a_call_stays_text_if_tool_choice_is_none(caller) -> None:
    choice = chat(caller, tool_choice="none")
    assert choice["message"]["content"].startswith("<tool_call>")
    assert (choice["finish_reason"], choice["message"].get("tool_calls") or []) == ("stop", [])


def test_a_streamed_call_adds_up_to_the_call(caller) -> None:
    body = {"messages": [QUESTION], "tools": [TOOL], "temperature": 0, "max_tokens": 200, "return_token_ids": True}
    parts = [part for chunk in caller.events("/v1/chat/completions", body) for part in chunk["choices"]]
    deltas = [part["delta"] for part in parts]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert {call["index"] for call in calls} == {0}
    names = [call["function"]["name"] for call in calls if call["function"].get("name")]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert (names, json.loads(arguments)) == (["add"], {"a": 2, "b": 3})
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == ""
    assert parts[-1]["finish_reason"] == "tool_calls"
    whole = chat(caller, return_token_ids=True)["token_ids"]
    assert [token for part in parts for token in part.get("token_ids") or []] == whole


def rollouts(caller: Any, environment: vf.Environment, size: int) -> list[Rollout]:
    async def run() -> list[Rollout]:
        server = InferenceServer(f"{caller.client.base_url}/v1", ClientConfig(), caller.model)
        args = {"temperature": 0, "max_tokens": 200, "logprobs": True, "extra_body": {"return_token_ids": True}}
        worker, row = VerifiersWorker(Served(environment)), environment.get_dataset()[0]
        outputs, sessions = await worker.run(row, size, server, server.model, True, args, 0)
        await server.close()
        recorded = [sessions[output["session"]].recorded for output in outputs]
        return [read_rollout(*each, ExampleRef("sums", 0), 0.0, 0) for each in zip(outputs, recorded, strict=True)]

    return asyncio.run(run())


def test_verifiers_tool_env_turns_a_conversation_with_tools_into_one_exact_sample(caller, caplog) -> None:
    async def correct(completion: Any, answer: str) -> float:
        return float(completion[-1].content == f"It is {answer}")

    rows = Dataset.from_list([{"prompt": [QUESTION], "answer": "5"}])
    environment = vf.ToolEnv(tools=[add], dataset=rows, rubric=vf.Rubric([correct]), max_turns=4)
    for rollout in rollouts(caller, environment, size=2):
        assert (rollout.error, rollout.reward, rollout.num_turns) == (None, 1.0, 2)
        assert rollout.metrics["add_calls"] == 1
        (sample,) = to_samples(rollout)
        assert text_of(caller, trained(sample)) == (
            f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>It is 5<|im_end|>'
        )
        assert (
            text_of(caller, sample.completion_ids).count("<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n") == 1
        )
    assert "fell back" not in caplog.text


AWKWARD: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "Be brief."}, *CONVERSATION], "tools": [TOOL], "answer": "5"},
    {"conversations": [{"from": "human", "value": "2+3"},
                       {"from": "function_call", "value": json.dumps(CALL["function"])},
                       {"from": "observation", "value": "5"}, {"from": "gpt", "value": "It is 5"}],
     "system": "Be brief.", "tools": json.dumps([TOOL])},
    {"prompt": [QUESTION, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"b": None}}]},
                {"role": "tool", "content": "5"}], "completion": [{"role": "assistant", "content": "It is 5"}]},
    {"messages": [{"role": "developer", "content": "Be brief."},
                  {"role": "user", "content": [{"type": "text", "text": "2+3"}, {"type": "text", "text": "?"}]},
                  {"role": "assistant", "content": "It is 5"}]},
]  # fmt: skip
"""Rows whose calls have different arguments, so that columns of a table would fill them with nulls."""


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_row_has_the_tokens_of_sft_as_prompt_and_answer_of_rl(caller: Any, suffix: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(caller.model)
    tokenize = ConversationTokenizer(tokenizer, LossMaskConfig())
    for number, row in enumerate(AWKWARD):
        file = tmp_path / f"{number}{suffix}"
        if suffix == ".parquet" and number < 3:  # a column cannot hold both texts and lists
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
        elif suffix == ".csv":
            with file.open("w", newline="") as opened:
                texts = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
                csv.writer(opened).writerows([row, texts])
        else:
            file = file.with_suffix(".jsonl")
            file.write_text(json.dumps(row))
        (each,) = rollouts(caller, load_environment(datasets=[{"path": str(file)}], rewards=["exact_match"]), size=1)
        (sample,) = to_samples(each)
        whole = tokenize(read_file(file)[0]).token_ids.tolist()
        assert text_of(caller, sample.prompt_ids) == text_of(caller, whole[: len(sample.prompt_ids)]), number
        assert sample.prompt_ids == whole[: len(sample.prompt_ids)]
        assert each.reward == float(text_of(caller, trained(sample)) == "It is 5<|im_end|>")


def trained(sample: TrainingSample) -> list[int]:
    return [token for token, used in zip(sample.completion_ids, sample.completion_mask, strict=True) if used]


def text_of(caller: Any, tokens: list[int]) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(caller.model).decode(tokens)

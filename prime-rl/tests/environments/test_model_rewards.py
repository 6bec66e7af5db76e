"""Rewards of a reward model: those of Transformers, from one worker process, and one line for what cannot be one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from prime_rl.configs.data import LossMaskConfig
from prime_rl.environments.rewards.building import build
from prime_rl.environments.rewards.model import token_ids_of
from prime_rl.environments.rewards.pool import RewardError
from prime_rl.environments.rewards.registry import RewardFault, RewardSpec
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer


@pytest.mark.slow
def test_rewards_are_those_of_transformers_from_one_process(tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(
            tiny_model_dir, num_labels=1, pad_token_id=tokenizer.pad_token_id
        ).eval()
    model.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    rollouts: list[tuple[Any, Any]] = [("abc:", "cba"), ("x", "")]
    for at in range(1, 8):
        asked, answered = {"role": "user", "content": "ab" * at}, {"role": "assistant", "content": "d" * (9 - at)}
        rollouts.append(([asked], [answered]))

    refused = ([{"role": "user", "content": "a"}], [{"content": "a message without a role"}])

    def expected(prompt: Any, completion: Any) -> float:
        if isinstance(prompt, str):
            ids = tokenizer(prompt + completion + tokenizer.eos_token, return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt + completion, return_dict=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return float(model(input_ids=ids).logits)

    spec = {"fn": f"model:{tmp_path}/rm", "weight": 2}
    one, other = build([spec], workers=1), build([spec, "exact_match"], workers=1)
    try:

        async def scored() -> list[Any]:
            scores = [one.score(*each, {}) for each in (*rollouts, refused)]
            return await asyncio.gather(*scores, return_exceptions=True)

        # One conversation that fails does not fail those that are scored with it.
        *found, fault = asyncio.run(scored())
        assert isinstance(fault, RewardError)
        assert str(fault).startswith("the chat template refuses the conversation: ")
        assert "\n" not in str(fault)
        rewards = [each["reward_model"] for each in found]
        assert rewards == pytest.approx([expected(*each) for each in rollouts], abs=1e-5)
        assert found[0]["reward"] == pytest.approx(2 * rewards[0])
        again = asyncio.run(other.score(*rollouts[0], {"answer": "d"}))
        assert again["reward_model"] == pytest.approx(rewards[0], abs=1e-5)
        pool, shared = (each.parts[0].model.pool for each in (one, other) if each.parts[0].model is not None)
        assert pool is shared
        processes = pool.processes()
        assert len(processes) == 1
        one.close()
        assert pool.processes() == processes
    finally:
        one.close()
        other.close()
    assert pool.processes() == []


_TOOL = {"name": "dose", "description": "", "parameters": {}}
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments.mg }}{% endfor %}\n{% endfor %}"
)


def test_the_tokens_of_a_rollout_are_those_of_a_row_of_preferences(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    asked = [{"role": "user", "content": "how much?"}]
    answered = [{"role": "assistant", "content": "ask"}]
    # Verifiers' forms of tools and calls, with nulls, against OpenAI's.
    theirs = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "name": "dose", "arguments": '{"mg": 5}'}],
    }
    function = {"name": "dose", "arguments": {"mg": 5}}
    ours = {"role": "assistant", "tool_calls": [{"type": "function", "id": "a", "function": function}]}
    for template in (tokenizer.chat_template, _TEMPLATE):
        tokenizer.chat_template = template
        train = ConversationTokenizer(tokenizer, LossMaskConfig(), ignored_keys=["tools", "tool_calls"])
        for rollout, row in (
            ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}),
            (
                {"prompt": [{"role": "text", "content": "a"}], "completion": answered},
                {"prompt": "a", "completion": "ask"},
            ),
            ({"prompt": "a", "completion": "b<|im_end|>"}, {"prompt": "a", "completion": "b<|im_end|>"}),
            ({"prompt": asked, "completion": answered}, {"prompt": asked, "completion": answered}),
            (
                {"prompt": asked, "completion": [theirs], "tools": [{**_TOOL, "strict": None}]},
                {"prompt": asked, "completion": [ours], "tools": [{"type": "function", "function": _TOOL}]},
            ),
        ):
            assert token_ids_of(tokenizer, rollout) == train(row).token_ids.tolist()


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("model:./nowhere", "model:./nowhere: no such folder"),
        (
            "model:{causal}",
            "is no reward model (its config.json names Qwen3ForCausalLM): train one with",
        ),
        ("model:{empty}", "the folder holds no model"),
        ({"fn": "model:owner/name", "args": {"device": "gpu"}}, "device must be 'cpu' or such as 'cuda:3', got 'gpu'"),
        ({"fn": "model:owner/name", "args": {"devise": "cpu"}}, "unknown argument 'devise'; there is device"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_what_is_no_reward_model_is_refused_in_one_line(
    tiny_model_dir: Path, tmp_path: Path, spec: Any, fault: str
) -> None:
    if isinstance(spec, str):
        spec = spec.format(causal=tiny_model_dir, empty=tmp_path)
    with pytest.raises(RewardFault) as caught:
        build([spec], workers=1)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_of_a_module_named_model_is_no_reward_model() -> None:
    assert RewardSpec(fn="model:score").model is None
    assert RewardSpec(fn="model:./score").model == "./score"

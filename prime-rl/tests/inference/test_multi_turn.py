"""Multi-turn conversations: verifiers, our clients and an engine turn each one into a single exact sample."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch
import verifiers as vf
from datasets import Dataset

from prime_rl.configs.orchestrator import SamplingConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout, read_rollout, to_samples
from prime_rl.orchestrator.rollouts.sampling import train_sampling_args
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.workers.in_memory import VerifiersWorker
from prime_rl.orchestrator.workers.inside.verifiers_api import Served
from prime_rl.trainer.rl.batches import row_from_sample
from prime_rl.trainer.rl.rows import Row

NUM_TURNS = 4


class Chatter(vf.MultiTurnEnv):
    """An environment that responds after every turn."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [vf.UserMessage(content=f"And {len(state['trajectory'])}?")]


def rollouts(server: Any, size: int, **sampling: Any) -> list[Rollout]:
    async def run() -> list[Rollout]:
        rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Talk"}], "answer": ""}])
        environment = Chatter(dataset=rows, rubric=vf.Rubric(), max_turns=NUM_TURNS)
        target = InferenceServer(f"{server.client.base_url}/v1", ClientConfig(), server.model)
        args = {"temperature": 1.0, "logprobs": True, **sampling}
        args["extra_body"] = {"return_token_ids": True, "top_k": -1, **args.get("extra_body", {})}
        worker, row = VerifiersWorker(Served(environment)), environment.get_dataset()[0]
        outputs, sessions = await worker.run(row, size, target, target.model, True, args, 0)
        await target.close()
        recorded = [sessions[output["session"]].recorded for output in outputs]
        return [read_rollout(*each, ExampleRef("chatter", 0), 1.0, 0) for each in zip(outputs, recorded, strict=True)]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"max_tokens": 200, "logit_bias": {"1": -100, "2": 6.0}}, id="turns-that-end"),
        pytest.param({"max_tokens": 7, "extra_body": {"ignore_eos": True}}, id="turns-that-are-cut-off"),
        pytest.param({"max_tokens": 12, "logit_bias": {"1": -100, "2": 3.0}}, id="some-of-both"),
    ],
)
def test_a_conversation_is_one_sample_of_the_sampled_tokens(server, reference, caplog, sampling) -> None:
    for rollout in rollouts(server, size=3, **sampling):
        assert (rollout.error, rollout.num_turns) == (None, NUM_TURNS)
        (sample,) = to_samples(rollout)
        if "logit_bias" in sampling:
            assert sample.completion_ids.count(1) == 2 * (NUM_TURNS - 1), "a header for each turn of either side"
        else:
            assert_exact(reference, sample)
    assert "fell back" not in caplog.text


@pytest.mark.parametrize(
    "cut", [{"top_k": 5}, {"top_k": 9, "top_p": 0.6}, {"top_k": 9, "min_p": 0.3}, {"top_logprobs": 4}], ids=str
)
def test_the_tokens_that_the_sampler_kept_reach_the_sample(server, reference, cut) -> None:
    """And the log-probabilities are those of the model over the same tokens."""
    config = SamplingConfig(max_tokens=6, temperature=0.8, extra_body={"ignore_eos": True}, **cut)
    (rollout,) = rollouts(server, size=1, **train_sampling_args(config, 0.8))
    (sample,) = to_samples(rollout)
    assert rollout.error is None
    row = Row.from_message(row_from_sample(msgspec.structs.replace(sample, advantage=1.0), 512), torch.device("cpu"))
    tokens = sample.prompt_ids + sample.completion_ids
    logits = reference.model(torch.tensor([tokens])).logits[0].detach().double() / 0.8
    for number, place in enumerate(row.layout.trained_M.tolist()):
        probs = logits[place - 1].softmax(-1)
        order = probs.argsort(descending=True)[: config.top_k].tolist()
        within = probs[order] / probs[order].sum()
        least = config.min_p * probs.max()
        kept = [
            token
            for at, token in enumerate(order)
            if within[:at].sum() < config.top_p and probs[token] >= least and (config.top_k or at < 4)
        ]
        reported = {token for token in row.sampler_top.ids_MK[number].tolist() if token >= 0}
        assert {*kept, tokens[place]} <= reported
        assert len(reported) <= len(kept) + (config.top_k is None)
        total = probs[kept].sum() if config.top_k else 1.0
        expected = (probs[tokens[place]] / total).log().item()
        assert row.inference_logprobs[place].item() == pytest.approx(expected, abs=2e-4)
        assert row.sampler_top.is_support_M[number].item() == (config.top_k is not None)


def assert_exact(reference: Any, sample: Any) -> None:
    """The recorded log-probabilities equal the model's for the sample's own tokens in context."""
    expected = torch.tensor(reference.logprobs(sample.prompt_ids, sample.completion_ids))
    used = torch.tensor(sample.completion_mask)
    torch.testing.assert_close(torch.tensor(sample.inference_logprobs)[used], expected[used], atol=2e-4, rtol=1e-4)

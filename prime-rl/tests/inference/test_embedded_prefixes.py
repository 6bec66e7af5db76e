"""Prefix cache: tokens are not prefilled again while the weights stay the same, and results do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import Completion, GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.scheduler import EngineLimits

PROMPT = tuple((5 + 7 * place) % 64 for place in range(40))
OTHER = tuple((1 + 3 * place) % 64 for place in range(40))


class ReadingRunner(ModelRunner):
    """Counts the prompt tokens that it prefills."""

    num_read = 0

    def forward(self, running, prompts, prompt_rows, num_cached=(), *rest, **options):
        self.num_read += sum(map(len, prompts)) - sum(num_cached)
        return super().forward(running, prompts, prompt_rows, num_cached, *rest, **options)


# The last two have no fused forward pass and run Transformers' own code, gpt-oss with sinks and a window.
@pytest.fixture(scope="module", params=["qwen3", "mistral_with_longer_window", "llama_with_gelu", "gpt_oss"])
def directory(request: pytest.FixtureRequest, small_model: Callable[..., Path]) -> Path:
    return small_model(request.param)


@contextmanager
def running(directory: Path, max_prefix_bytes: int = 1 << 20) -> Iterator[tuple[Engine, ReadingRunner]]:
    model, source = load_model(str(directory), "float32", torch.device("cpu"))
    runner = ReadingRunner(model, 1 << 30, source)
    runner.num_read = 0
    with Engine(runner, EngineLimits(max_prefix_bytes=max_prefix_bytes)).in_thread() as engine:
        yield engine, runner


def answer(engine: Engine, prompt: tuple[int, ...], max_tokens: int = 24) -> Completion:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return engine.submit(GenerationRequest(prompt=prompt, params=params, seed=0)).result().completions[0]


@torch.no_grad()
def assert_greedy(directory: Path, prompt: tuple[int, ...], completion: Completion) -> None:
    """Check that every token is the model's most likely one, up to rounding, and has the model's log-probability."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.tensor([*prompt, *completion.token_ids])
    logprobs = model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, tokens[len(prompt) :, None]).squeeze(1)
    torch.testing.assert_close(own, logprobs.amax(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), own, atol=1e-4, rtol=0)


def test_the_next_turn_prefills_only_its_new_tokens(directory) -> None:
    with running(directory) as (engine, runner):
        first = answer(engine, PROMPT)
        second_prompt = (*PROMPT, *first.token_ids, 3, 4, 5)
        runner.num_read = 0
        second = answer(engine, second_prompt)
        assert runner.num_read == 4, "the last sampled token, which was never read, and three new ones"
        third_prompt = (*second_prompt, *second.token_ids, 6)
        third = answer(engine, third_prompt)
        assert runner.num_read == 6
    assert_greedy(directory, second_prompt, second)
    assert_greedy(directory, third_prompt, third)


def test_turns_of_several_conversations_continue_in_one_batch(directory) -> None:
    with running(directory) as (engine, runner):
        starts = [PROMPT, OTHER, PROMPT[:25]]
        prompts = [(*start, *answer(engine, start).token_ids, 9) for start in starts]
        prompts.append((60, 61, 62))  # not in the cache
        engine.pause().result()
        params = SamplingParams(max_tokens=24, temperature=0)
        futures = [engine.submit(GenerationRequest(prompt=prompt, params=params, seed=0)) for prompt in prompts]
        runner.num_read = 0
        engine.resume().result()
        completions = [future.result().completions[0] for future in futures]
        assert runner.num_read == 3 * 2 + 3
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_greedy(directory, prompt, completion)


def test_a_later_request_of_the_same_group_reuses_the_running_prompt(directory) -> None:
    with running(directory) as (engine, runner):
        early = engine.submit(
            GenerationRequest(prompt=PROMPT, params=SamplingParams(max_tokens=400, temperature=0), seed=0)
        )
        assert answer(engine, OTHER).token_ids, "the first one has been read by now"
        runner.num_read = 0
        late = answer(engine, PROMPT)
        assert runner.num_read == 1
        assert early.result().completions[0].token_ids[:24] == late.token_ids
    assert_greedy(directory, PROMPT, late)


def test_a_different_continuation_reuses_the_common_prefix(directory) -> None:
    with running(directory) as (engine, runner):
        answer(engine, PROMPT)
        runner.num_read = 0
        branched = (*PROMPT[:30], 1, 2, 3)
        completion = answer(engine, branched)
        assert runner.num_read == 3
    assert_greedy(directory, branched, completion)


def test_new_weights_prefill_the_prompt_again(directory, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    newer = tmp_path / "step_1"
    newer.mkdir()
    save_file({name: tensor * 1.05 for name, tensor in tensors.items()}, newer / "model.safetensors", {"format": "pt"})
    (newer / "config.json").write_text((directory / "config.json").read_text())
    with running(directory) as (engine, runner):
        prompt = (*PROMPT, *answer(engine, PROMPT).token_ids, 3)
        engine.update_weights(newer).result()
        runner.num_read = 0
        completion = answer(engine, prompt)
        assert runner.num_read == len(prompt)
    assert_greedy(newer, prompt, completion)


def test_a_sequence_with_two_weight_versions_is_not_cached(directory) -> None:
    with running(directory) as (engine, runner):
        params = SamplingParams(max_tokens=400, temperature=0)
        future = engine.submit(GenerationRequest(prompt=PROMPT, params=params, seed=0))
        answer(engine, OTHER)
        engine.update_weights(None).result()
        tokens = future.result().completions[0].token_ids
        runner.num_read = 0
        prompt = (*PROMPT, *tokens, 3)
        answer(engine, prompt, max_tokens=1)
        assert runner.num_read == len(prompt)


def test_memory_is_bounded_and_the_oldest_entry_is_evicted_first(directory) -> None:
    with running(directory, max_prefix_bytes=100 * 256) as (engine, runner):
        assert runner.slots.bytes_per_token == 256
        for prompt in (PROMPT, OTHER):  # 63 tokens each: one fits
            answer(engine, prompt)
        runner.num_read = 0
        answer(engine, OTHER)
        assert runner.num_read == 1
        answer(engine, PROMPT)
        assert runner.num_read == 1 + len(PROMPT)


def test_prompt_logprobs_are_computed_for_every_token(directory) -> None:
    params = SamplingParams(max_tokens=1, temperature=0)
    with running(directory) as (engine, _):
        answer(engine, PROMPT)
        request = GenerationRequest(prompt=PROMPT, params=params, seed=0, num_prompt_logprobs=0)
        assert len(engine.submit(request).result().prompt_logprobs) == len(PROMPT) - 1


def test_nothing_is_cached_without_memory_for_it(directory) -> None:
    with running(directory, max_prefix_bytes=0) as (engine, runner):
        answer(engine, PROMPT)
        runner.num_read = 0
        answer(engine, PROMPT)
        assert runner.num_read == len(PROMPT)

"""A teacher's scores on both engines, against Transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from prime_rl.configs.orchestrator import TeacherModelConfig
from prime_rl.orchestrator.batches.teacher import Teachers
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Line, Rollout
from prime_rl.orchestrator.rollouts.trace import CallDetails, ModelCall, Prompt, TokenTrace
from prime_rl.transport.messages import TrainingSample

from .conftest import Server, vllm_python


@pytest.fixture(scope="module")
def teacher_server(engine: str, served_model_dir) -> Iterator[Server]:
    """As a run starts it. vLLM 0.32 on a CPU dies of prompt log-probabilities if it serves adapters."""
    python = sys.executable if engine == "embedded" else vllm_python()
    if python is None:
        pytest.skip("needs vLLM: install prime-rl[vllm], or name an interpreter that has it in PRIME_RL_VLLM_PYTHON")
    options = ("--backend", engine, "--model.enforce-eager", "--gpu-memory-utilization", "0.1")
    server = Server(python, served_model_dir, *options)
    yield server
    assert server.stop() == 0, "".join(server.lines[-30:])


def sample_of(prompt: list[int], completion: list[int]) -> TrainingSample:
    count = len(completion)
    return TrainingSample(prompt, [False] * len(prompt), completion, [True] * count, [-1.0] * count, [1.0] * count)


async def test_scores_are_those_of_transformers(teacher_server, served_model_dir) -> None:
    # Two samples share a prompt: an engine that reuses it still scores all of it.
    samples = [sample_of([7] * 40, [12, 13, 14]), sample_of([7] * 40, [9]), sample_of([3], [10, 11])]
    client = {"base_url": [f"{teacher_server.client.base_url}/v1"], "api_key_var": "UNSET_VARIABLE"}
    settings = {"client": client, "model": {"name": str(served_model_dir)}, "top_k": 30}
    teacher = Teachers([TeacherModelConfig.model_validate(settings)])
    await teacher.wait_ready(None)
    for _ in range(2):
        await teacher.score([Line(sample) for sample in samples])
    await teacher.close()
    model = AutoModelForCausalLM.from_pretrained(served_model_dir, dtype=torch.float32).eval()
    for sample in samples:
        tokens = torch.tensor(sample.prompt_ids + sample.completion_ids)
        with torch.inference_mode():
            logprobs_LV = model(tokens[None]).logits[0].log_softmax(-1)
        expected = [0.0, *logprobs_LV[:-1].gather(1, tokens[1:, None])[:, 0].tolist()]
        assert sample.teacher_logprobs == pytest.approx(expected, abs=1e-3)
        places = slice(len(sample.prompt_ids) - 1, -1)
        top = sample.teacher_top
        assert top.fault(len(sample.completion_ids), "teacher_top") is None
        ids, values = (
            np.frombuffer(each, kind).reshape(-1, 30) for each, kind in ((top.ids, "<i4"), (top.logprobs, "<f4"))
        )
        likeliest = logprobs_LV[places].topk(30)
        assert values == pytest.approx(likeliest.values.numpy(), abs=1e-3)
        assert logprobs_LV[places].gather(1, torch.tensor(ids).long()).numpy() == pytest.approx(values, abs=1e-3)


ANSWERS = ["The dose is 12 mg.", "No: the dose is 2 mg"]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory) -> Path:
    """A policy whose tokens are several letters, while its teacher's are single ones."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=280, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(ANSWERS * 3, trainer)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=300, **sizes, **heads)).save_pretrained(folder)
    return folder


def logprobs_of(folder: Path, tokens: list[int]) -> list[float]:
    """Of each token but the first, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        values_LV = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return values_LV[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


async def test_a_teacher_with_another_tokenizer_scores_the_same_text(
    teacher_server, served_model_dir, policy_dir
) -> None:
    policy, theirs = (
        Tokenizer.from_file(str(policy_dir / "tokenizer.json")),
        AutoTokenizer.from_pretrained(served_model_dir),
    )
    end, prompt = policy.token_to_id("</s>"), [{"role": "user", "content": "Dose?"}]
    said = [{"role": "assistant", "content": ANSWERS[0]}, {"role": "user", "content": "Sure?"}]
    trace, tokens, starts = TokenTrace(), policy.encode("Dose?").ids, list[int]()
    for answer, stop in ((ANSWERS[0], [end]), (ANSWERS[1], [])):  # the second one is cut
        ids = policy.encode(answer).ids + stop
        starts.append(len(tokens))
        given = logprobs_of(policy_dir, tokens + ids)[-len(ids) :]
        details = CallDetails(finish_reason="stop")
        trace.append(ModelCall(Prompt.of(tokens), ids, given, [True] * len(ids), details))
        tokens = tokens + ids + policy.encode("Sure?").ids
    rollout = Rollout(ExampleRef("doses", 0), 0.0, trace, 1.0, 0, prompt=prompt)
    rollout.completion = [*said, {"role": "assistant", "content": ANSWERS[1]}]
    client = {"base_url": [f"{teacher_server.client.base_url}/v1"], "api_key_var": "UNSET_VARIABLE"}
    settings = {"client": client, "model": {"name": str(served_model_dir)}, "tokenizer": str(served_model_dir)}
    teachers = Teachers([TeacherModelConfig.model_validate(settings)], policy=str(policy_dir))
    await teachers.wait_ready(None)
    ((sample,),) = await teachers.begin([rollout])

    for number, (call, start) in enumerate(zip(trace.calls, starts, strict=True)):
        before = [*prompt, *said] if number else prompt
        context = theirs.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
        letters = theirs.encode(ANSWERS[number], add_special_tokens=False)
        assert len(letters) == len(ANSWERS[number])
        scored = logprobs_of(served_model_dir, [*context, *letters, theirs.eos_token_id])[len(context) - 1 :]
        at, expected = 0, list[float]()
        for token in call.completion_ids:
            # Each of the policy's tokens is a span of its own, as every letter is a token of the teacher.
            length = 1 if token == end else len(policy.decode([token]))
            expected.append(sum(scored[at : at + length]))
            at += length
        assert sample.teacher_logprobs[start : start + len(expected)] == pytest.approx(expected, abs=1e-3)
        if number == 0:
            assert len(call.completion_ids) < len(letters)

    # The other way round, several of the policy's tokens are one span; an equal tokenizer changes no number.
    plain, aligned = (
        Teachers([TeacherModelConfig.model_validate({**settings, "tokenizer": name})], policy=str(served_model_dir))
        for name in (None, str(served_model_dir))
    )
    ids = [*theirs.encode(ANSWERS[0], add_special_tokens=False), theirs.eos_token_id]
    context = theirs.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    only = TokenTrace([ModelCall(Prompt.of(context), ids, [-1.0] * len(ids), [True] * len(ids))])
    found = []
    for each in (plain, aligned):
        await each.wait_ready(None)
        ((one,),) = await each.begin([Rollout(ExampleRef("doses", 0), 0.0, only, 1.0, 0, prompt=prompt)])
        found.append(one.teacher_logprobs[len(context) :])
        await each.close()
    assert found[0] == found[1]
    await teachers.close()

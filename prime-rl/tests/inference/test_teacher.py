"""A teacher's scores on both engines, against Transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.configs.orchestrator import TeacherModelConfig
from prime_rl.orchestrator.batches.teacher import Teachers
from prime_rl.transport.messages import TrainingSample

from .conftest import Server, vllm_python


@pytest.fixture
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
        await teacher.score([(sample, None) for sample in samples])
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
        assert top.fault(len(sample.completion_ids)) is None
        ids, values = (
            np.frombuffer(each, kind).reshape(-1, 30) for each, kind in ((top.ids, "<i4"), (top.logprobs, "<f4"))
        )
        likeliest = logprobs_LV[places].topk(30)
        assert values == pytest.approx(likeliest.values.numpy(), abs=1e-3)
        assert logprobs_LV[places].gather(1, torch.tensor(ids).long()).numpy() == pytest.approx(values, abs=1e-3)

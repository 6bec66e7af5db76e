"""What the embedded engine takes from a model's `generation_config.json`, as vLLM does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.http.service import Service
from prime_rl.inference.embedded.startup import start_service
from prime_rl.inference.protocol import ChatBody, CompletionBody

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Service:
    model = tmp_path_factory.mktemp("defaults") / "model"
    shutil.copytree(tiny_model_dir, model)
    own = {"temperature": 0.7, "top_k": 20, "max_new_tokens": 9}
    (model / "generation_config.json").write_text(json.dumps(own))
    return start_service(InferenceConfig.model_validate({"model": {"name": str(model)}, "device": "cpu"}))


def test_a_chat_that_sets_no_limit_ends_at_the_models_own(service: Service) -> None:
    (request,) = service.chat_requests(ChatBody(messages=MESSAGES))
    assert (request.params.max_tokens, request.params.temperature, request.params.top_k) == (9, 0.7, 20)
    (request,) = service.chat_requests(ChatBody(messages=MESSAGES, max_tokens=24, temperature=0.0))
    assert (request.params.max_tokens, request.params.temperature) == (24, 0.0)


def test_a_text_completion_ends_at_the_usual_limit(service: Service) -> None:
    (request,) = service.completion_requests(CompletionBody(prompt=[5]))
    assert request.params.max_tokens == 16


def test_the_defaults_of_a_model_are_named(service: Service) -> None:
    assert service.model.default_texts() == ["temperature = 0.7", "top_k = 20", "max_new_tokens = 9"]

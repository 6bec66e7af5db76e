"""Random numbers of requests that bring no seed."""

from __future__ import annotations

from pathlib import Path

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.http.service import Service
from prime_rl.inference.embedded.startup import start_service
from prime_rl.inference.protocol import CompletionBody


def seeds(service: Service, *prompts: list[int]) -> list[int]:
    bodies = [CompletionBody(prompt=prompt) for prompt in prompts]
    return [request.seed for body in bodies for request in service.completion_requests(body)]


def test_servers_with_one_seed_sample_different_prompts_with_different_numbers(tiny_model_dir: Path) -> None:
    config = InferenceConfig.model_validate({"model": {"name": str(tiny_model_dir)}, "device": "cpu"})
    one, other, same = (start_service(config) for _ in range(3))
    asked = seeds(one, [5, 6], [5, 6], [7, 8])
    assert len({*asked, *seeds(other, [9, 6], [6, 5], [8, 7])}) == 6
    assert seeds(same, [5, 6], [5, 6], [7, 8]) == asked

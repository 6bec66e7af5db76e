"""HTTP contract of both engines for LoRA adapters, checked against PEFT's own model."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

PROMPT = [12, 9, 16, 16, 19]
LONG_PROMPT = [5 + (7 * place) % 90 for place in range(300)]
NAME = "r4-a8.0"


def assert_close(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def make_adapter(base: Path, directory: Path, seed: int, rank: int = 4, **options: Any) -> Path:
    """An adapter in PEFT's format, as published by the trainer. Its B is not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, **options))
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
        peft.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def adapters(served_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Adapter directories of versions 4 and 5."""
    parent = tmp_path_factory.mktemp("adapters")
    return {version: make_adapter(served_model_dir, parent / f"step_{version}", version) for version in (4, 5)}


@pytest.fixture(scope="session")
def adapted(served_model_dir: Path, adapters: dict[int, Path]) -> Callable[[int, list[int], list[int]], list[float]]:
    """Log-probabilities of a completion, computed by PEFT with one version's adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load(directory: Path) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(served_model_dir, dtype=torch.float32)
        return PeftModel.from_pretrained(model, directory)

    models = {version: load(directory) for version, directory in adapters.items()}

    @torch.no_grad()
    def logprobs(version: int, prompt: list[int], completion: list[int]) -> list[float]:
        logits = models[version](torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist()

    return logprobs


def load(server, directory: Path) -> dict:
    return server.post("/load_lora_adapter", {"lora_name": NAME, "lora_path": str(directory)})


def test_an_adapter_is_served_under_its_name_next_to_the_base_model(server, reference, adapters, adapted) -> None:
    assert load(server, adapters[4])["status"] == "ok"
    prompts = [PROMPT, LONG_PROMPT, [40, 41], [7, 8, 9]]
    with ThreadPoolExecutor(8) as pool:
        ask = [(prompt, name) for prompt in prompts for name in (NAME, server.model)]
        answers = list(pool.map(lambda one: server.complete(one[0], model=one[1], max_tokens=24, seed=1), ask))
    for (prompt, name), answer in zip(ask, answers, strict=True):
        (choice,) = answer["choices"]
        tokens, version = choice["token_ids"], 4 if name == NAME else 0
        expected = adapted(4, prompt, tokens) if name == NAME else reference.logprobs(prompt, tokens)
        assert_close(choice["logprobs"]["token_logprobs"], expected)
        assert answer["model"] == name
        assert choice["weight_versions"] == [{"version": version, "start": 0, "end": len(tokens)}]


def test_a_loaded_adapter_is_listed_with_its_path(server, adapters) -> None:
    for version in (4, 5):
        load(server, adapters[version])
        base, adapter = server.client.get("/v1/models").json()["data"]
        assert base["id"] == server.model
        assert (adapter["id"], adapter["root"], adapter["parent"]) == (NAME, str(adapters[version]), server.model)


def test_every_route_accepts_an_adapters_name(server, adapters, adapted) -> None:
    load(server, adapters[4])
    messages = [{"role": "user", "content": "Hi"}]
    counted = server.post("/tokenize", {"model": NAME, "messages": messages, "add_generation_prompt": True})
    options = {"model": NAME, "messages": messages, "logprobs": True, "return_token_ids": True, "max_tokens": 8}
    chat = server.post("/v1/chat/completions", options)
    continued = server.post("/v1/chat/completions/tokens", options | {"tokens": PROMPT})
    for answer, prompt in ((chat, counted["tokens"]), (continued, PROMPT)):
        (choice,) = answer["choices"]
        assert answer["prompt_token_ids"] == prompt
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert_close(found, adapted(4, prompt, choice["token_ids"]))
        assert {span["version"] for span in choice["weight_versions"]} == {4}


def test_a_new_version_replaces_the_old_one_in_running_requests(server, adapters, adapted) -> None:
    load(server, adapters[4])
    with ThreadPoolExecutor(2) as pool:
        running = {
            name: pool.submit(server.complete, LONG_PROMPT, model=name, max_tokens=600, ignore_eos=True, seed=1)
            for name in (NAME, server.model)
        }
        while not all(one.done() for one in running.values()):
            for version in (5, 4):
                load(server, adapters[version])
                # Running requests hold keys and values of the same prompt under old weights, which must not be reused.
                (choice,) = server.complete(LONG_PROMPT, model=NAME, max_tokens=4)["choices"]
                expected = adapted(version, LONG_PROMPT, choice["token_ids"])
                assert_close(choice["logprobs"]["token_logprobs"], expected)
    spans = {name: one.result()["choices"][0]["weight_versions"] for name, one in running.items()}
    assert spans[server.model] == [{"version": 0, "start": 0, "end": 600}]
    assert {span["version"] for span in spans[NAME]} == {4, 5}
    assert [span["start"] for span in spans[NAME][1:]] == [span["end"] for span in spans[NAME][:-1]]
    assert (spans[NAME][0]["start"], spans[NAME][-1]["end"]) == (0, 600)


def test_a_shared_prompt_is_prefilled_again_after_a_weight_update(server, next_weights, next_reference) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, LONG_PROMPT, max_tokens=600, ignore_eos=True, seed=1)
        server.complete(LONG_PROMPT, max_tokens=4)
        server.post("/update_weights", {"weight_dir": str(next_weights)})
        (choice,) = server.complete(LONG_PROMPT, max_tokens=8)["choices"]
        assert not running.done()
        assert {span["version"] for span in choice["weight_versions"]} == {3}
        assert_close(choice["logprobs"]["token_logprobs"], next_reference.logprobs(LONG_PROMPT, choice["token_ids"]))
        assert {span["version"] for span in running.result()["choices"][0]["weight_versions"]} == {0, 3}


@torch.no_grad()
def test_an_adapter_of_several_ranks_is_served_but_vllm_needs_one_scale(
    server, engine, served_model_dir, tmp_path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    pattern = {"q_proj": 2, "layers.1.mlp.down_proj": 6}
    scales = {"rank_pattern": pattern, "alpha_pattern": {name: 2 * rank for name, rank in pattern.items()}}
    for version, options in ((6, scales), (7, {"alpha_pattern": {"q_proj": 1}, "use_rslora": True})):
        directory = make_adapter(served_model_dir, tmp_path / f"step_{version}", version, **options)
        if engine == "vllm" and version == 7:
            answer = server.client.post("/load_lora_adapter", json={"lora_name": NAME, "lora_path": str(directory)})
            assert answer.status_code == 400
            assert "vLLM scales all layers by 4" in answer.json()["error"]["message"]
            continue
        load(server, directory)
        (choice,) = server.complete(LONG_PROMPT, model=NAME, max_tokens=16)["choices"]
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(served_model_dir), directory)
        tokens = choice["token_ids"]
        logits = model(torch.tensor([LONG_PROMPT + tokens])).logits[0, len(LONG_PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
        assert_close(choice["logprobs"]["token_logprobs"], expected)


def rank_of_64(base: Path, directory: Path) -> None:
    make_adapter(base, directory, seed=1, rank=64)


def of_a_wider_model(base: Path, directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base)
    config.intermediate_size *= 2
    AutoModelForCausalLM.from_config(config).save_pretrained(directory.parent / "wider")
    make_adapter(directory.parent / "wider", directory, seed=1)


def with_another_kind_of_adapter(base: Path, directory: Path) -> None:
    path = make_adapter(base, directory, seed=1) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))


def nothing(base: Path, directory: Path) -> None:
    directory.mkdir()


@pytest.mark.parametrize(
    "fault",
    [
        (nothing, 404, "has no adapter_config.json"),
        (rank_of_64, 400, "its rank is 64, but this server's max_lora_rank is 8"),
        (of_a_wider_model, 400, "instead of"),
        (with_another_kind_of_adapter, 400, "use_dora"),
    ],
    ids=lambda fault: fault[0].__name__,
)
def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays_live(
    server, served_model_dir, adapters, adapted, tmp_path, fault
) -> None:
    fill, status, message = fault
    load(server, adapters[4])
    fill(served_model_dir, tmp_path / "step_9")
    body = {"lora_name": NAME, "lora_path": str(tmp_path / "step_9")}
    answer = server.client.post("/load_lora_adapter", json=body)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    (choice,) = server.complete(PROMPT, model=NAME, max_tokens=8)["choices"]
    assert_close(choice["logprobs"]["token_logprobs"], adapted(4, PROMPT, choice["token_ids"]))
    assert choice["weight_versions"] == [{"version": 4, "start": 0, "end": len(choice["token_ids"])}]


def test_adapters_are_unloaded_when_the_base_weights_change(server, adapters, next_weights) -> None:
    load(server, adapters[4])
    server.post("/update_weights", {"weight_dir": str(next_weights)})
    (entry,) = server.client.get("/v1/models").json()["data"]
    assert entry["id"] == server.model
    assert server.client.post("/v1/completions", json={"model": NAME, "prompt": PROMPT}).status_code == 404
    refused = server.client.post("/load_lora_adapter", json={"lora_name": NAME, "lora_path": str(adapters[4])})
    assert refused.status_code == 400
    assert "has weights of version 3" in refused.json()["error"]["message"]
    server.post("/reload_weights", {})
    load(server, adapters[4])


def test_new_base_weights_end_only_requests_with_adapters(server, adapters, wait_for_load) -> None:
    load(server, adapters[4])
    server.post("/pause", {})
    body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(2) as pool:
        lost, kept = (
            pool.submit(server.client.post, "/v1/completions", json=body | {"model": name})
            for name in (NAME, server.model)
        )
        wait_for_load(lambda load: load == 2)
        server.post("/reload_weights", {})
        server.post("/resume", {})
        assert len(kept.result().json()["choices"][0]["token_ids"]) == 20
        answer = lost.result()
    # The embedded engine returns an error, vLLM the partial completion.
    assert answer.status_code == 500 or answer.json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("body", [{"lora_name": "x"}, {"lora_path": "x"}, {"lora_name": 1, "lora_path": "x"}], ids=str)
def test_a_load_without_name_and_path_is_refused(server, body) -> None:
    answer = server.client.post("/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert "lora_" in answer.json()["error"]["message"]


def test_an_adapter_cannot_have_the_base_models_name(server, adapters) -> None:
    body = {"lora_name": server.model, "lora_path": str(adapters[4])}
    answer = server.client.post("/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert "it is the base model" in answer.json()["error"]["message"]

"""LoRA adapters in the embedded engine (without HTTP), checked against PEFT's own model."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import Generation, GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.lora import AdapterLimits
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.scheduler import EngineLimits
from prime_rl.inference.embedded.errors import GenerationFailed
from prime_rl.inference.model_files import AdapterMissing, WeightError

ARCHITECTURES = ("qwen3", "qwen2", "llama", "mistral_with_window", "qwen3_moe", "gemma3")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
PATTERNS = {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"layers.1.self_attn.q_proj": 4}, "use_rslora": True}
PROMPTS = [tuple((5 + 7 * index + place) % 64 for place in range(2 + 3 * index)) for index in range(4)]


def reference(base: Path, adapter: Path | None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter) if adapter is not None else model


def engine_of(base: Path, max_in_batch: int = 8, max_loaded: int = 3, max_rank: int = 8) -> Engine:
    model, source = load_model(str(base), "float32", torch.device("cpu"))
    runner = ModelRunner(model, 1 << 30, source)
    store = runner.adapter_store("base", AdapterLimits(max_loaded, max_rank))
    return Engine(runner, EngineLimits(max_adapters=max_in_batch), store)


def submit(engine: Engine, prompt: tuple[int, ...], name: str | None, max_tokens: int = 16) -> Future[Generation]:
    assert engine.adapters is not None
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    adapter = engine.adapters.loaded[name] if name is not None else None
    return engine.submit(GenerationRequest(prompt=prompt, params=params, seed=0, adapter=adapter))


@torch.no_grad()
def assert_greedy(model: torch.nn.Module, prompt: tuple[int, ...], generation: Generation) -> None:
    """Check that every token is the model's most likely one, up to rounding, and has the model's log-probability."""
    (completion,) = generation.completions
    tokens = torch.tensor([*prompt, *completion.token_ids])
    logprobs = model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, tokens[len(prompt) :, None]).squeeze(1)
    torch.testing.assert_close(own, logprobs.amax(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), own, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def qwen3(small_model: Callable[..., Path]) -> Path:
    return small_model("qwen3")


@pytest.fixture(scope="module")
def adapters(qwen3: Path, adapter_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters with different ranks and targets, in directories step_1 and step_2."""
    parent = tmp_path_factory.mktemp("broadcasts")
    return [
        adapter_of(qwen3, parent / "step_1", seed=1, targets=ALL),
        adapter_of(qwen3, parent / "step_2", seed=2, targets=["q_proj", "v_proj", "down_proj"], rank=8),
    ]


@pytest.mark.parametrize(("name", "max_in_batch"), [*((name, 2) for name in ARCHITECTURES), ("qwen3", 1)])
def test_a_batch_of_the_base_and_of_two_adapters_equals_peft(
    name, max_in_batch, small_model, adapter_of, tmp_path
) -> None:
    base = small_model(name)
    targets = ATTENTION if name == "qwen3_moe" else ALL
    paths = {
        "first": adapter_of(base, tmp_path / "step_1", 1, targets),
        "second": adapter_of(base, tmp_path / "step_2", 2, ["q_proj", "v_proj"], rank=8, **PATTERNS),
        None: None,
    }
    with engine_of(base, max_in_batch).in_thread() as engine:
        for chosen in ("first", "second"):
            engine.load_adapter(chosen, paths[chosen]).result()
        engine.pause().result()
        futures = {(prompt, chosen): submit(engine, prompt, chosen) for prompt in PROMPTS for chosen in paths}
        engine.resume().result()
        models = {chosen: reference(base, path) for chosen, path in paths.items()}
        for (prompt, chosen), future in futures.items():
            assert_greedy(models[chosen], prompt, future.result())


def test_a_new_version_takes_effect_between_two_steps_of_running_requests(qwen3, adapters) -> None:
    with engine_of(qwen3).in_thread() as engine:
        assert engine.load_adapter("mine", adapters[0]).result() == 1
        longer = {name: submit(engine, PROMPTS[0], name, max_tokens=200) for name in ("mine", None)}
        while not all(future.done() for future in longer.values()):
            for directory in (adapters[1], adapters[0]):
                engine.load_adapter("mine", directory).result()
    spans = {name: future.result().completions[0].versions for name, future in longer.items()}
    assert {span.version for span in spans["mine"]} == {1, 2}
    assert [span.version for span in spans[None]] == [0]
    assert [span.start for span in spans["mine"][1:]] == [span.end for span in spans["mine"][:-1]]


def test_completions_after_a_new_version_equal_peft_with_that_version(qwen3, adapters) -> None:
    with engine_of(qwen3).in_thread() as engine:
        for directory in adapters:
            engine.load_adapter("mine", directory).result()
            assert_greedy(reference(qwen3, directory), PROMPTS[1], submit(engine, PROMPTS[1], "mine").result())


def test_replacing_the_base_weights_ends_only_requests_with_adapters(qwen3, adapters) -> None:
    with engine_of(qwen3).in_thread() as engine:
        engine.load_adapter("mine", adapters[0]).result()
        engine.pause().result()
        lost, kept = submit(engine, PROMPTS[0], "mine"), submit(engine, PROMPTS[0], None)
        engine.update_weights(None).result()
        engine.resume().result()
        assert len(kept.result().completions[0].token_ids) == 16
        with pytest.raises(GenerationFailed, match="adapter 'mine' was unloaded"):
            lost.result()
        assert engine.adapters.loaded == {}


def test_adapters_require_the_initial_weights(qwen3, adapters, tmp_path) -> None:
    (tmp_path / "step_7").symlink_to(qwen3)
    with engine_of(qwen3).in_thread() as engine:
        engine.update_weights(tmp_path / "step_7").result()
        with pytest.raises(WeightError, match="has weights of version 7"):
            engine.load_adapter("mine", adapters[0]).result()


def rewrite_config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def rewrite_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        path = directory / "adapter_model.safetensors"
        save_file(change(load_file(path)), path)

    return rewrite


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "its rank is 64": (rewrite_config(r=64), "server's max_lora_rank is 8"),
    "use_dora = True": (rewrite_config(use_dora=True), "is not supported"),
    "modules_to_save": (rewrite_config(modules_to_save=["lm_head"]), "is not supported"),
    "r = None": (rewrite_config(r=None), "lora_alpha = 8"),
    "not JSON": (lambda directory: (directory / "adapter_config.json").write_text("{"), "cannot read"),
    "damaged": (lambda directory: (directory / "adapter_model.safetensors").write_bytes(b"x" * 40), "cannot read"),
    "another width": (
        rewrite_tensors(lambda t: {name: torch.zeros(4, 48) if "lora_A" in name else x for name, x in t.items()}),
        r"has shape \[4, 48\] instead of \[4, 64\]",
    ),
    "half a layer": (
        rewrite_tensors(
            lambda t: {name: x for name, x in t.items() if not name.endswith("1.mlp.up_proj.lora_B.weight")}
        ),
        r"up_proj.lora_B.weight is missing",
    ),
    "another depth": (
        rewrite_tensors(lambda t: {name.replace("layers.1.", "layers.9."): x for name, x in t.items()}),
        "the model has no linear layer model.layers.9",
    ),
    "the head": (
        rewrite_tensors(
            lambda t: (
                t
                | {
                    "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32),
                    "base_model.model.lm_head.lora_B.weight": torch.zeros(64, 4),
                }
            )
        ),
        "adapters on lm_head are not supported",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_that_does_not_fit_is_refused_and_the_old_version_stays(
    fault, qwen3, adapters, adapter_of, tmp_path
) -> None:
    break_it, message = FAULTS[fault]
    broken = adapter_of(qwen3, tmp_path / "step_5", seed=5, targets=ALL)
    break_it(broken)
    with engine_of(qwen3).in_thread() as engine:
        engine.load_adapter("mine", adapters[0]).result()
        with pytest.raises(WeightError, match=message):
            engine.load_adapter("mine", broken).result()
        generation = submit(engine, PROMPTS[1], "mine").result()
    assert [span.version for span in generation.completions[0].versions] == [1]
    assert_greedy(reference(qwen3, adapters[0]), PROMPTS[1], generation)


def test_a_missing_file_is_a_different_error_than_an_unfit_adapter(qwen3, adapters, tmp_path) -> None:
    (tmp_path / "step_1").mkdir()
    with engine_of(qwen3).in_thread() as engine:
        for directory in (tmp_path / "nowhere", tmp_path / "step_1"):
            with pytest.raises(AdapterMissing, match="has no adapter_config"):
                engine.load_adapter("mine", directory).result()


def test_no_more_adapters_are_loaded_than_the_limit(qwen3, adapters) -> None:
    with engine_of(qwen3, max_loaded=2).in_thread() as engine:
        for name in ("first", "second", "first"):
            engine.load_adapter(name, adapters[0]).result()
        with pytest.raises(WeightError, match="max_cpu_loras is 2"):
            engine.load_adapter("third", adapters[0]).result()
        with pytest.raises(WeightError, match="it is the base model"):
            engine.load_adapter("base", adapters[0]).result()

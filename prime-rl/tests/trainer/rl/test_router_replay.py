"""Routing replay: the engine returns the experts of every token, and the trainer routes its tokens to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl.checks.engines import engine_faults
from prime_rl.checks.start import start_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import ModelConfig, TrainerConfig
from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import Completion, GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.scheduler import EngineLimits
from prime_rl.inference.embedded.errors import EngineError
from prime_rl.inference.embedded.http.answers import _npy
from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.rollouts.replies import ChatMessage, ChatReply, Choice, Logprobs, TokenLogprob
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout, to_samples
from prime_rl.orchestrator.rollouts.trace import TokenTrace, routed_experts_of
from prime_rl.orchestrator.workers.remote import packed, unpacked
from prime_rl.trainer.model.build import check_routers, setup_model
from prime_rl.trainer.process.errors import ModelError, TrainerError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.batches import pack_batch
from prime_rl.trainer.rl.rows import Row, check_routes, score_row
from prime_rl.transport.messages import RoutedExperts, TrainingBatch, TrainingSample
from prime_rl.transport.routing import Routers, Routing

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4}
        | LATENT,
    ),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 8, "sliding_window": 16}),
    "dense": ("Qwen3Config", {}),
}
PROMPTS = [[(7 * index + 3 * place) % 60 + 3 for place in range(18)] for index in range(3)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        import transformers

        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            name, settings = FAMILIES[family]
            with torch.random.fork_rng():
                torch.manual_seed(1)
                model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES | settings))
                for each, buffer in model.named_buffers():
                    if each.endswith("e_score_correction_bias"):
                        buffer.copy_(torch.randn(buffer.shape) / 4)
            model.save_pretrained(made[family])
        return made[family]

    return make


def completions(folder: Path, prompts: Sequence[Sequence[int]], dtype: str = "float32", n: int = 2) -> list[Completion]:
    """`n` samples of each prompt, and then one of the first sample's continuation, which starts from a kept prefix."""
    model, source = load_model(str(folder), dtype, CPU)
    keeps_routes = "Experts" in str(model)
    runner = ModelRunner(model, 1 << 28, source, keeps_routes=keeps_routes)
    with Engine(runner, EngineLimits(max_prefix_bytes=1 << 24)).in_thread() as engine:

        def ask(prompt: Sequence[int], count: int) -> list[Completion]:
            params = SamplingParams(max_tokens=12, min_tokens=12)
            return engine.submit(GenerationRequest(tuple(prompt), params, seed=3, n=count)).result().completions

        engine.pause().result()
        params = SamplingParams(max_tokens=12)
        futures = [engine.submit(GenerationRequest(tuple(prompt), params, seed=3, n=n)) for prompt in prompts]
        engine.resume().result()
        found = [each for future in futures for each in future.result().completions]
        ask([9] * 25, 8)  # takes over the slot rows
        return [*found, *ask([*prompts[0], *found[0].token_ids, 5, 6, 7], 1)]


def reply_of(prompt: Sequence[int], completion: Completion) -> ChatReply:
    routes = completion.routed_experts
    choice = Choice(
        ChatMessage("x"),
        token_ids=completion.token_ids,
        logprobs=Logprobs([TokenLogprob(value) for value in completion.logprobs]),
        routed_experts=None if routes is None else _npy(routes),
    )
    return ChatReply([choice], prompt_token_ids=list(prompt))


def samples_of(prompts: Sequence[Sequence[int]], found: Sequence[Completion]) -> list[TrainingSample]:
    """The first completion and its continuation are one conversation."""
    owners = [prompt for prompt in prompts for _ in range((len(found) - 1) // len(prompts))]
    replies = [[reply_of(prompt, each)] for prompt, each in zip(owners, found[:-1], strict=True)]
    replies[0].append(reply_of([*prompts[0], *found[0].token_ids, 5, 6, 7], found[-1]))
    samples = []
    for calls in replies:
        trace = TokenTrace()
        for call in calls:
            trace.record(call)
        # As an environment in another process sends them.
        sent = msgspec.json.decode(msgspec.json.encode(packed([("x", call) for call in trace.calls])))
        trace = TokenTrace([call for _, call in unpacked(sent)])
        samples += to_samples(Rollout(ExampleRef("e", 0), 1.0, trace, 1.0, 0, advantage=1.0))
    return samples


def rows_of(samples: list[TrainingSample]) -> list[Row]:
    (messages,) = pack_batch(TrainingBatch(samples, 0), 128, 256, 1, group_tokens=256)
    return [Row.from_message(message, CPU) for message in messages]


def scored(model: PreTrainedModel, rows: Sequence[Row]) -> torch.Tensor:
    return torch.cat([score_row(model, row, row.layout.trained_M, None)[0][row.layout.trained_M] for row in rows])


def given_by_engine(rows: Sequence[Row]) -> torch.Tensor:
    return torch.cat([row.inference_logprobs[row.layout.trained_M] for row in rows])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_the_engine_returns_its_routes_and_the_trainer_takes_them(folder_of, family: str, mesh: Mesh) -> None:
    folder = folder_of(family)
    found = completions(folder, PROMPTS)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    routers = Routers(reference)
    owners = [prompt for prompt in PROMPTS for _ in range(2)] + [[*PROMPTS[0], *found[0].token_ids, 5, 6, 7]]
    for prompt, completion in zip(owners, found, strict=True):
        routing = Routing()
        with torch.no_grad(), routers.on(routing):
            reference(torch.tensor([[*prompt, *completion.token_ids[:-1]]]))
        assert completion.routed_experts is not None
        assert completion.routed_experts.dtype == np.uint8
        for layer in range(3):
            chosen = routing.chosen.get(layer, torch.zeros(len(completion.routed_experts), 2)).sort(-1).values
            assert np.array_equal(np.sort(completion.routed_experts[:, layer]), chosen.numpy())

    samples = samples_of(PROMPTS, found)
    assert len(samples) == 6
    model = setup_model(ModelConfig(name=str(folder), attn="sdpa"), mesh)
    rows = rows_of(samples)
    check_routes(rows, model)
    with torch.no_grad():
        torch.testing.assert_close(scored(model, rows), given_by_engine(rows), atol=1e-4, rtol=0)

    # Other experts than the model's own: as Transformers computes each sequence alone with them.
    drawn = np.random.default_rng(0)
    for sample in samples:
        length = len(sample.prompt_ids) + len(sample.completion_ids)
        own = np.argsort(drawn.random((length, 3, 8)))[..., :2].astype(np.uint8)
        own[: len(sample.prompt_ids)] = own[:1]  # a prompt that the samples of a group share
        sample.routed_experts = RoutedExperts(3, 2, 1, own.tobytes())
    rows = rows_of(samples)
    expected = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        routes = np.frombuffer(sample.routed_experts.ids, np.uint8).reshape(-1, 3, 2)
        with torch.no_grad(), routers.on(Routing(torch.from_numpy(routes.copy()))):
            logprobs = reference(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor((sample.prompt_mask + sample.completion_mask)[1:])
        expected.append(logprobs[mask])
    gradients = []
    for settings in ({}, {"ac": {}}):
        model = setup_model(ModelConfig(name=str(folder), attn="sdpa", **settings), mesh)
        found_logprobs = scored(model, rows)
        own = sorted(found_logprobs.tolist())
        np.testing.assert_allclose(own, sorted(torch.cat(expected).tolist()), atol=1e-4)
        found_logprobs.sum().backward()
        gradients.append([each.grad.full_tensor() for each in model.parameters() if each.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_replay_brings_the_mismatch_of_bfloat16_to_that_of_a_dense_model(folder_of, mesh: Mesh) -> None:
    kl = {}
    for family in ("qwen3_moe", "dense"):
        rows = rows_of(samples_of(PROMPTS, completions(folder_of(family), PROMPTS, n=16)))
        model = setup_model(ModelConfig(name=str(folder_of(family)), attn="sdpa", compute_dtype="bfloat16"), mesh)
        free = [dataclasses.replace(row, routed_experts=None) for row in rows]
        for name, each in {family: free, f"{family}, replayed": rows}.items():
            with torch.no_grad():
                log_ratio = scored(model, each) - given_by_engine(each)
            kl[name] = (log_ratio.exp() - log_ratio - 1).mean().item()
    # Measured: 0.0056 falls to 0.0004, and the dense model has 0.0007.
    assert kl["qwen3_moe"] > 4 * kl["qwen3_moe, replayed"]
    assert kl["qwen3_moe, replayed"] < 2 * kl["dense"]


def test_what_cannot_be_replayed_is_one_line(folder_of, mesh: Mesh, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="enable_return_routed_experts: Qwen3ForCausalLM has no router of experts"):
        ModelRunner(load_model(str(folder_of("dense")), "float32", CPU)[0], 1 << 28, keeps_routes=True)
    with pytest.raises(ModelError, match="enable_router_replay: Qwen3ForCausalLM has no router of experts"):
        check_routers(setup_model(ModelConfig(name=str(folder_of("dense")), attn="sdpa"), mesh))
    with pytest.raises(ValidationError, match=r"enable_router_replay does not work with model\.compile"):
        TrainerConfig(enable_router_replay=True, model={"compile": {}})

    model = setup_model(ModelConfig(name=str(folder_of("qwen3_moe")), attn="sdpa"), mesh)
    sample = TrainingSample([3, 4], [False] * 2, [5], [True], [-1.0], [1.0], advantage=1.0)
    for routes, fault in {
        None: "a sample has no routed experts: .* tensors that a workflow returns have none",
        (3, 2, bytes([0, 8] * 9)): "chose 2 experts in 3 layers, up to number 8, and the model takes 2 of 8 in 3",
        (1, 2, bytes([0, 1] * 3)): "chose 2 experts in 1 layers",
    }.items():
        sample.routed_experts = None if routes is None else RoutedExperts(routes[0], routes[1], 1, routes[2])
        with pytest.raises(TrainerError, match=fault):
            check_routes(rows_of([sample]), model)

    answer = _npy(np.zeros((4, 3, 2), np.uint8))
    for wrong, tokens in {answer: 6, "%": 5, "": 5, answer[:-20]: 5, _npy(np.zeros(3)): 5}.items():
        with pytest.raises(MalformedRollout, match="a server answered with"):
            routed_experts_of(wrong, tokens)
    wide = routed_experts_of(_npy(np.full((4, 3, 2), 300, np.int32)), 5)
    assert wide is not None
    assert (len(wide), wide.width, wide.tokens(1, 3).ids) == (4, 2, np.full(12, 300, "<u2").tobytes())


def test_rl_makes_the_engine_return_what_the_trainer_replays(folder_of) -> None:
    for given in (True, "true"):  # from a file, and from the command line
        run = RLConfig.model_validate(
            {"trainer": {"enable_router_replay": given}, "orchestrator": {"env": [{"id": "x"}]}}
        )
        assert run.inference is not None
        assert run.inference.enable_return_routed_experts
        assert run.inference.to_vllm().enable_return_routed_experts
    models = {folder: {"model": {"name": str(folder_of(folder))}} for folder in ("dense", "qwen3_moe")}
    faults = {
        name: [fault for fault in start_faults(RLConfig.model_validate(run_of(model))) if "replay" in fault]
        for name, model in models.items()
    }
    assert faults == {
        "dense": ["trainer.enable_router_replay: Qwen3ForCausalLM is no mixture of experts: remove it"],
        "qwen3_moe": [],
    }


def test_routes_that_vllm_cannot_return_are_refused(folder_of) -> None:
    for values, wanted in (
        ({"device": "cpu"}, "vLLM returns routed experts only on a GPU"),
        ({"device": "cpu", "enable_prefix_caching": False}, "vLLM returns routed experts only with prefix caching"),
        ({"device": "cpu", "backend": "embedded", "enable_prefix_caching": False}, None),
    ):
        config = InferenceConfig.model_validate(
            {"model": {"name": str(folder_of("qwen3_moe"))}, "enable_return_routed_experts": True, "backend": "vllm"}
            | values
        )
        faults = [fault for fault in engine_faults(config, StartDir()) if "routed experts" in fault]
        assert any(wanted in fault for fault in faults) if wanted else not faults


def run_of(model: dict[str, Any]) -> dict[str, Any]:
    return {**model, "trainer": {"enable_router_replay": True}, "orchestrator": {"env": [{"id": "x"}]}}

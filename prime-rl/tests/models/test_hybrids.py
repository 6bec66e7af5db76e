"""Hybrid models: no state crosses the border between the sequences of a row, or between the requests of a batch.

The embedded engine's test also has models whose attention caps its scores or has sinks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from model_cases import Case, save_tiny_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.configs.model import LoRAConfig
from prime_rl.configs.trainer import ActivationCheckpointConfig, ModelConfig
from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.lora import AdapterLimits
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.scheduler import EngineLimits
from prime_rl.inference.model_files import WeightError
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.layouts import SequenceBlocks
from prime_rl.trainer.model.scoring import LogitsOf, cross_entropy_sum, score_tokens, scoring_of
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh, ParallelDims
from prime_rl.trainer.process.world import destroy_world, setup_world
from prime_rl.utils.logger import setup_logger

ATTENDING = {"layer_types": ["linear_attention", "full_attention"]}
HYBRIDS = {
    "gated delta rule of Qwen3-Next": Case("qwen3_next", ATTENDING),
    "gated delta rule of Qwen3.5": Case("qwen3_5_text", ATTENDING),
    "Mamba 2 of Nemotron-H": Case("nemotron_h"),
    "Mamba 2 of Granite 4": Case("granitemoehybrid"),
    "Mamba 2 beside attention, of Falcon-H1": Case("falcon_h1"),
    "Mamba 2 of Bamba": Case("bamba"),
    "short convolutions of LFM2": Case("lfm2"),
}
DECODED = {name: case for name, case in HYBRIDS.items() if case.family != "nemotron_h"} | {
    "caps and windows of Gemma 2": Case("gemma2"),
    "sinks, windows and biases of gpt-oss": Case("gpt_oss"),
    "sinks and windows of Granite SWA": Case("granite_swa"),
    "sinks of MiMo's windows": Case("mimo_v2_flash"),
}
"""Without the one that has a least time step, which the engine refuses."""
ROWS = ((7, 1, 30, 12, 2), (25, 3), (40,))


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    yield ParallelDims(dp_replicate=1, dp_shard=1).mesh(setup_world("cpu", timeout_s=3600, environ={}))
    destroy_world()


def rows() -> list[list[Tensor]]:
    """Rows of several sequences. In the first, two sequences start with the same tokens, as in a group of RL."""
    drawn = [[torch.randint(3, 64, (length,)) for length in lengths] for lengths in ROWS]
    drawn[0][3][:7] = drawn[0][0]
    return drawn


def loss_of(model: PreTrainedModel, sequences: list[Tensor], *, uses_last: bool = True) -> Tensor:
    """Cross-entropy of a packed row by the trainer."""
    ids, positions = torch.cat(sequences), torch.cat([torch.arange(len(each)) for each in sequences])
    is_predicted = torch.cat([torch.arange(len(each)) < len(each) - 1 for each in sequences])

    def score(hidden: Tensor, logits_of: LogitsOf) -> Tensor:
        return cross_entropy_sum(hidden[is_predicted], ids.roll(-1)[is_predicted], logits_of, 64)

    return score_tokens(model, ids[None], positions[None], score, uses_last=uses_last)


def gradients(model: nn.Module) -> Tensor:
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([(each.full_tensor() if hasattr(each, "full_tensor") else each).flatten() for each in found])


@pytest.mark.parametrize("case", HYBRIDS.values(), ids=HYBRIDS)
def test_a_packed_row_has_the_loss_and_gradients_of_its_sequences_alone(
    case: Case, mesh: Mesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, drawn = save_tiny_model(case, tmp_path), rows()
    expected = []
    for sequences in drawn:
        alone = [reference(input_ids=each[None], labels=each[None], use_cache=False).logits[0] for each in sequences]
        losses = [
            nn.functional.cross_entropy(a[:-1], each[1:], reduction="sum")
            for a, each in zip(alone, sequences, strict=True)
        ]
        expected.append(torch.stack(losses).sum())
    torch.autograd.backward(expected)
    setup_logger("info")
    for ac in (None, ActivationCheckpointConfig()):
        model = setup_model(ModelConfig(name=str(tmp_path), seq_len=56, ac=ac), mesh)
        assert scoring_of(model).shares_rows or SequenceBlocks in scoring_of(model).layouts
        # All rows go forward before the first goes backward, where checkpointed blocks are computed again.
        losses = [loss_of(model, sequences, uses_last=bool(place)) for place, sequences in enumerate(drawn)]
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-5, atol=0)
        torch.autograd.backward(losses)
        ours, wanted = gradients(model), gradients(reference)
        assert (ours - wanted).norm() <= 1e-5 * wanted.norm()
    assert capsys.readouterr().out.count("Layers with a state: ") == 2


PROMPTS = ((5, 9, 3), tuple(range(3, 12)), tuple(range(20, 29)), tuple(range(3, 24)), (7,) * 17)
"""More than run at once, so that rows get another sequence while others go on. Two of them have the same length."""


@torch.no_grad()
@pytest.mark.parametrize("case", DECODED.values(), ids=DECODED)
def test_the_embedded_engine_decodes_with_the_log_probabilities_of_transformers(case: Case, tmp_path: Path) -> None:
    reference = save_tiny_model(case, tmp_path / "first")
    model, source = load_model(str(tmp_path / "first"), "float32", torch.device("cpu"), max_model_len=56)
    limits = EngineLimits(max_running=6, max_prefix_bytes=1 << 24)

    def leave(request: GenerationRequest) -> None:
        """After its first token."""
        request.result.cancel()

    def requests() -> list[GenerationRequest]:
        params = SamplingParams(max_tokens=18, top_k=64)
        return [GenerationRequest(prompt=prompt, params=params, seed=1, n=2) for prompt in PROMPTS]

    with Engine(ModelRunner(model, 1 << 28, source), limits).in_thread() as engine:
        for weights in ("first", "step_1"):
            if weights == "step_1":
                for parameter in reference.parameters():
                    parameter.mul_(1.05)
                reference.save_pretrained(tmp_path / weights)
                assert engine.update_weights(tmp_path / weights).result() == 1
            asked = requests()
            asked[1].on_progress = partial(leave, asked[1])
            engine.pause().result()
            futures = [engine.submit(request) for request in asked]
            engine.resume().result()
            assert [future.cancelled() for future in futures if future is not futures[1]] == [False] * 4
            for request, future in zip(asked, futures, strict=True):
                for found in [] if future is futures[1] else future.result().completions:
                    tokens = torch.tensor([*request.prompt, *found.token_ids])
                    logprobs = reference(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
                    own = logprobs[:-1].gather(1, tokens[1:, None])[len(request.prompt) - 1 :, 0]
                    torch.testing.assert_close(torch.tensor(found.logprobs), own, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def write_adapter(model: PreTrainedModel, folder: Path) -> list[str]:
    """Write an adapter on every linear layer as PEFT does, and merge it into the model. Returns its targets."""
    generator, state, targets = torch.Generator().manual_seed(1), {}, set()
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and "expert" not in path and path != "lm_head":
            a = torch.randn(4, layer.in_features, generator=generator) * 0.1
            b = torch.randn(layer.out_features, 4, generator=generator) * 0.1
            layer.weight += 2 * b @ a
            prefix = f"base_model.model.{path}.lora"
            state |= {f"{prefix}_A.weight": a, f"{prefix}_B.weight": b}
            targets.add(path.rpartition(".")[2])
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": sorted(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return sorted(targets)


@pytest.mark.parametrize("case", DECODED.values(), ids=DECODED)
def test_adapters_on_all_projections_equal_merged_weights_in_both_engines(
    case: Case, mesh: Mesh, tmp_path: Path
) -> None:
    merged, base = save_tiny_model(case, tmp_path / "model"), save_tiny_model(case, tmp_path / "model")
    targets = write_adapter(merged, tmp_path / "step_1")
    lora = LoRAConfig(rank=4, alpha=8, target_modules=targets, path=str(tmp_path / "step_1"))
    trained = setup_model(ModelConfig(name=str(tmp_path / "model"), seq_len=56, lora=lora), mesh)
    model, source = load_model(str(tmp_path / "model"), "float32", torch.device("cpu"), max_model_len=56)
    runner = ModelRunner(model, 1 << 28, source)
    store = runner.adapter_store("base", AdapterLimits(max_loaded=2, max_rank=4))
    with Engine(runner, EngineLimits(max_running=6), store).in_thread() as engine, torch.no_grad():
        assert engine.load_adapter("tuned", tmp_path / "step_1").result() == 1
        params, owners = SamplingParams(max_tokens=18, top_k=64), (store.loaded["tuned"], None)
        asked = [
            GenerationRequest(prompt=prompt, params=params, seed=1, n=2, adapter=owners[place % 2])
            for place, prompt in enumerate(PROMPTS)
        ]
        engine.pause().result()
        futures = [engine.submit(request) for request in asked]
        engine.resume().result()
        adapted = []
        for request, future in zip(asked, futures, strict=True):
            for found in future.result().completions:
                tokens = torch.tensor([*request.prompt, *found.token_ids])
                reference = base if request.adapter is None else merged
                logprobs = reference(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
                own = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
                sampled = own[len(request.prompt) - 1 :]
                torch.testing.assert_close(torch.tensor(found.logprobs), sampled, atol=1e-5, rtol=1e-5)
                adapted += [(tokens, -own.sum())] if request.adapter is not None else []
        losses = loss_of(trained, [tokens for tokens, _ in adapted])
        torch.testing.assert_close(losses, torch.stack([loss for _, loss in adapted]).sum(), rtol=1e-5, atol=0)


def test_an_adapter_on_a_layer_that_is_never_called_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    """Mamba reads the weight of `dt_proj` alone."""
    model = save_tiny_model(Case("jamba"), tmp_path / "model")
    targets = write_adapter(model, tmp_path / "step_1")
    with pytest.raises(ModelError, match=r"reads the weight of model\.layers\.0\.mamba\.dt_proj without calling it"):
        setup_model(ModelConfig(name=str(tmp_path / "model"), lora=LoRAConfig(target_modules=targets)), mesh)
    loaded, source = load_model(str(tmp_path / "model"), "float32", torch.device("cpu"), max_model_len=56)
    store = ModelRunner(loaded, 1 << 28, source).adapter_store("base", AdapterLimits(max_loaded=2, max_rank=4))
    with pytest.raises(WeightError, match="dt_proj are not supported"):
        store.load("tuned", tmp_path / "step_1")

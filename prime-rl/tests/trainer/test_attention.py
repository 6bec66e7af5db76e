"""Attention kernels: a packed row has the same results as its sequences computed separately."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    Qwen3Config,
)
from transformers.masking_utils import flash_attention_mask

from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.kernels.attention import FLEX, SDPA, VARLEN, choose_attention, varlen_arguments, varlen_attention
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.packed_rows import sequence_bounds
from prime_rl.trainer.model.scoring import enable_scoring
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.parallel_dims import Mesh
from prime_rl.utils.logger import setup_logger

LENGTHS = (7, 12, 1, 30)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
QWEN = Qwen3Config(head_dim=128)


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def sdpa_of_each_sequence(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, _bounds, _longest, _longest_key, **options
) -> Tensor:
    """Reference for PyTorch's varlen kernel, which has no CPU version: [tokens, heads, D]."""
    (window, ahead), out = options["window_size"], []
    assert ahead == 0
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
        places = torch.arange(end - start)
        back = places[:, None] - places[None, :]
        mask = (back >= 0) & (back <= (end if window == -1 else window))
        out.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=options["scale"], enable_gqa=options["enable_gqa"]
            ).transpose(0, 1)
        )
    return torch.cat(out)


CPU_VARLEN = "varlen_on_a_cpu"
varlen_on_a_cpu = partial(varlen_attention, varlen=sdpa_of_each_sequence)
AttentionInterface.register(CPU_VARLEN, varlen_on_a_cpu)
AttentionMaskInterface.register(CPU_VARLEN, flash_attention_mask)


def logits_of(model_dir: Path, kernel: str, tokens: Tensor, places: Tensor, **options) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation=kernel)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return model(input_ids=tokens, position_ids=places, use_cache=False, **options).logits[0]


@pytest.mark.parametrize("kernel", [FLEX, CPU_VARLEN])
def test_a_packed_row_has_the_logits_of_its_sequences_alone(tiny_model_dir: Path, kernel: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens, places = torch.randint(0, 128, (1, sum(LENGTHS)), generator=generator), positions(*LENGTHS)
    packed = logits_of(tiny_model_dir, kernel, tokens, places, **varlen_arguments(kernel, places))
    alone = [
        logits_of(tiny_model_dir, SDPA, sequence, positions(sequence.shape[1]))
        for sequence in tokens.split(LENGTHS, dim=1)
    ]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=0)


def test_varlen_derives_missing_bounds_from_the_positions(tiny_model_dir: Path) -> None:
    tokens, places = torch.arange(50)[None], positions(*LENGTHS)
    told = logits_of(tiny_model_dir, CPU_VARLEN, tokens, places, **varlen_arguments(CPU_VARLEN, places))
    assert torch.equal(logits_of(tiny_model_dir, CPU_VARLEN, tokens, places), told)


@pytest.mark.parametrize("window", [None, 3])
def test_varlen_looks_back_as_far_as_the_window_of_the_layer(window: int | None) -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, heads, 10, 8, generator=generator) for heads in (4, 2, 2))
    out, _ = varlen_on_a_cpu(torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window)
    back = torch.arange(10)[:, None] - torch.arange(10)[None, :]
    mask = (back >= 0) & (back < (window or 10))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("wanted", [{"softcap": 30.0}, {"s_aux": torch.ones(4)}, {"dropout": 0.1}])
def test_varlen_refuses_unsupported_options(wanted: dict) -> None:
    states = torch.ones(1, 4, 5, 8)
    with pytest.raises(ModelError, match=r"model\.attn = 'sdpa'"):
        varlen_attention(torch.nn.Module(), states, states, states, None, **wanted)


def test_bounds_are_the_starts_of_the_sequences_and_the_end() -> None:
    bounds, longest = sequence_bounds(positions(*LENGTHS))
    assert (bounds.tolist(), bounds.dtype, longest) == ([0, 7, 19, 20, 50], torch.int32, 30)


@pytest.mark.parametrize(
    ("requested", "reason"), [("flash_attention_2", "needs a GPU"), ("flash_attention_3", "needs a GPU"), (SDPA, "")]
)
def test_a_cpu_runs_sdpa_and_says_why(requested: str, reason: str) -> None:
    kernel, said = choose_attention(requested, QWEN, CPU, torch.float32)
    assert kernel == SDPA
    assert reason in said


@pytest.mark.parametrize(
    ("config", "capability", "compute", "kernel"),
    [
        pytest.param(QWEN, (9, 0), torch.bfloat16, VARLEN, id="a hopper"),
        pytest.param(QWEN, (9, 0), torch.float32, FLEX, id="float32"),
        pytest.param(QWEN, (7, 5), torch.bfloat16, FLEX, id="a GPU before Ampere"),
        pytest.param(Qwen3Config(head_dim=288), (9, 0), torch.bfloat16, FLEX, id="large heads"),
        pytest.param(Gemma2Config(), (9, 0), torch.bfloat16, FLEX, id="capped scores"),
        pytest.param(GptOssConfig(), (9, 0), torch.bfloat16, FLEX, id="learned sinks"),
    ],
)
def test_a_gpu_without_flash_attention_runs_the_best_kernel_of_pytorch(
    config, capability: tuple[int, int], compute: torch.dtype, kernel: str
) -> None:
    chosen = choose_attention("flash_attention_2", config, GPU, compute, lambda name: False, lambda device: capability)
    assert chosen == (kernel, "model.attn = flash_attention_2 is not installed")


def test_an_installed_kernel_is_used() -> None:
    chosen = choose_attention("flash_attention_3", QWEN, GPU, torch.bfloat16, lambda name: True)
    assert chosen == ("flash_attention_3", "")


def test_the_choice_is_logged_once(tiny_model_dir: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger("info")
    setup_model(ModelConfig(name=str(tiny_model_dir)), mesh)
    assert capsys.readouterr().out.count("Attention: sdpa (model.attn = flash_attention_2 needs a GPU)") == 1


def test_a_model_that_mixes_packed_sequences_is_refused(tiny_model_dir: Path, mesh: Mesh) -> None:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn=SDPA), mesh)
    # Mix tokens outside attention, as a recurrent layer does.
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output + output.cumsum(1))
    with pytest.raises(ModelError, match="influence each other"):
        enable_scoring(model, mesh.process.device)

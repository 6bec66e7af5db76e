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
    BertGenerationConfig,
    DeepseekV32Config,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from prime_rl.configs.trainer import DebugModelConfig, ModelConfig
from prime_rl.trainer.kernels.attention import (
    EAGER,
    FLEX,
    SDPA,
    VARLEN,
    choose_attention,
    varlen_arguments,
    varlen_attention,
)
from prime_rl.trainer.model.build import check_scoring, setup_model
from prime_rl.trainer.model.layouts import PrefixTree, SequenceBlocks, sequence_bounds
from prime_rl.trainer.model.scoring import enable_scoring, output_head, score_tokens
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.critic import start_at_zero
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


@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_installed_torch_takes_what_varlen_gets(key_heads: int) -> None:
    """Torch 2.11 has no `enable_gqa`. On the meta device its own function runs, up to the kernel."""
    query, key, value = (torch.empty(1, heads, 10, 8, device="meta") for heads in (4, key_heads, key_heads))
    out, _ = varlen_attention(torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=3)
    assert out.shape == (1, 10, 4, 8)


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


@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        pytest.param(Llama4TextConfig(), FLEX, id="llama4"),
        pytest.param(DeepseekV32Config(), SDPA, id="deepseek_v32"),
    ],
)
def test_an_installed_kernel_that_the_model_does_not_support_is_not_used(config: PretrainedConfig, kernel: str) -> None:
    chosen = choose_attention(
        "flash_attention_2", config, GPU, torch.bfloat16, lambda name: True, lambda device: (9, 0)
    )
    assert chosen == (kernel, "model.attn = flash_attention_2 is not supported by the model")


def test_the_choice_is_logged_once(tiny_model_dir: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger("info")
    setup_model(ModelConfig(name=str(tiny_model_dir)), mesh)
    assert capsys.readouterr().out.count("Attention: sdpa (model.attn = flash_attention_2 needs a GPU)") == 1


def test_a_model_that_mixes_the_sequences_of_a_row_gets_a_row_for_each(tiny_model_dir: Path, mesh: Mesh) -> None:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn=SDPA), mesh)
    # Mix tokens outside attention, as a recurrent layer does.
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output + output.cumsum(1))
    enable_scoring(model)
    check_scoring(model, mesh.process.device, 64, [PrefixTree, SequenceBlocks])
    tokens = torch.arange(50)[None]

    def logits_of_row(tokens: Tensor, *lengths: int) -> Tensor:
        return score_tokens(model, tokens, positions(*lengths), lambda hidden, logits_of: logits_of(hidden))

    with torch.no_grad():
        packed = logits_of_row(tokens, *LENGTHS)
        alone = [logits_of_row(sequence, sequence.shape[1]) for sequence in tokens.split(LENGTHS, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=0)


def test_a_model_that_sees_later_tokens_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    BertGenerationConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64).save_pretrained(tmp_path)
    encoder = ModelConfig(name=str(tmp_path), attn=SDPA, seq_len=56, debug=DebugModelConfig(random_init=True))
    with pytest.raises(ModelError, match="lets sequences of a packed row influence each other"):
        setup_model(encoder, mesh)


@pytest.mark.parametrize("is_critic", [False, True], ids=["policy", "critic that was never updated"])
def test_a_model_that_mixes_the_rows_of_a_batch_is_refused(tiny_model_dir: Path, mesh: Mesh, is_critic: bool) -> None:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn=SDPA), mesh, is_scored=is_critic)
    if is_critic:
        start_at_zero(model)
        check_scoring(model, mesh.process.device, 64, [])
        assert not output_head(model).weight.full_tensor().any()
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output + output.cumsum(1) + output.cumsum(0).cumsum(1)
    )
    enable_scoring(model)
    with pytest.raises(ModelError, match="not supported"):
        check_scoring(model, mesh.process.device, 64, [])


FORGETS_WINDOWS = "sdpa_without_windows"
AttentionInterface.register(
    FORGETS_WINDOWS,
    lambda module, query, key, value, mask, **options: sdpa_attention_forward(
        module, query, key, value, None, scaling=options["scaling"]
    ),
)
AttentionMaskInterface.register(FORGETS_WINDOWS, flash_attention_mask)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        pytest.param(
            Gemma2Config(**SIZES, **HEADS, query_pre_attn_scalar=1),
            SDPA,
            id="a cap of 50 that short sequences do not reach",
        ),
        pytest.param(MistralConfig(**SIZES, **HEADS, sliding_window=4096), FORGETS_WINDOWS, id="a window of 4096"),
    ],
)
def test_a_kernel_that_ignores_a_limit_is_refused_before_any_sequence_reaches_it(
    config, kernel: str, tmp_path: Path, mesh: Mesh
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = setup_model(ModelConfig(name=str(tmp_path)), mesh)
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform attention
            parameter *= 8
    enable_scoring(model)
    check_scoring(model, mesh.process.device, 64, [])
    model.config._attn_implementation = kernel
    with pytest.raises(ModelError, match=f"has other logits with {kernel} than with eager attention"):
        check_scoring(model, mesh.process.device, 64, [])


@pytest.mark.parametrize(
    ("requested", "device", "kernel"), [(SDPA, CPU, EAGER), ("flash_attention_2", CPU, EAGER), (SDPA, GPU, FLEX)]
)
def test_capped_scores_never_run_on_sdpa(requested: str, device: torch.device, kernel: str) -> None:
    assert choose_attention(requested, Gemma2Config(), device, torch.float32)[0] == kernel

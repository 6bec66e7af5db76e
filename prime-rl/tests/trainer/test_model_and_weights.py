from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_rl.configs.trainer import (
    ActivationCheckpointConfig,
    DebugModelConfig,
    ModelConfig,
    TokenizerConfig,
    WeightCheckpointConfig,
)
from prime_rl.trainer.checkpoints.weights import add_older_keys, export_model, gather_weights, save_weights
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.optim.optimizer import clip_gradients
from prime_rl.trainer.perf import Throughput, flops_per_token
from prime_rl.trainer.process.errors import ModelError, TrainerError
from prime_rl.trainer.process.mesh import Mesh, setup_mesh
from prime_rl.trainer.process.world import resolve_device


def config_of(directory: Path, **fields) -> ModelConfig:
    return ModelConfig(name=str(directory), attn="sdpa", **fields)


def logits_of_row(model, tokens: torch.Tensor) -> torch.Tensor:
    row = tokens[None]
    return score_tokens(model, row, torch.arange(len(tokens))[None], lambda hidden, logits_of: logits_of(hidden))


def test_an_export_is_loaded_by_transformers_and_gives_the_same_logits(
    tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    config = config_of(tiny_model_dir, debug=DebugModelConfig(random_init=True))
    model = setup_model(config, mesh)
    tokenizer = setup_tokenizer(TokenizerConfig(), config)
    target = tmp_path / "step_1"
    export_model(model, tokenizer, target, WeightCheckpointConfig(), torch.float32)

    tokens = torch.arange(40)
    reloaded = AutoModelForCausalLM.from_pretrained(target, attn_implementation="sdpa")
    with torch.no_grad():
        torch.testing.assert_close(logits_of_row(model, tokens), reloaded(tokens[None]).logits[0])
    assert reloaded.dtype == torch.float32
    assert (target / "STABLE").is_file()
    assert json.loads((target / "generation_config.json").read_text())["use_cache"] is True
    assert AutoTokenizer.from_pretrained(target).chat_template == tokenizer.chat_template


def test_a_tokenizer_in_a_sentencepiece_model_alone_is_loaded_and_exported(
    tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    """Transformers converts it with the package's protobuf definitions, which not every version's protobuf takes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    text, base = "a fever of 39 degrees, ümlaut", tmp_path / "base"
    shutil.copytree(tiny_model_dir, base, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text]), model_prefix=str(base / "tokenizer"), model_type="bpe",
        vocab_size=40, hard_vocab_limit=False,
    )  # fmt: skip
    (base / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    config = config_of(base)
    tokenizer = setup_tokenizer(TokenizerConfig(), config)
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    export_model(setup_model(config, mesh), tokenizer, tmp_path / "export", WeightCheckpointConfig(), torch.float32)
    assert AutoTokenizer.from_pretrained(tmp_path / "export")(text).input_ids == tokenizer(text).input_ids


PHI_3 = {"rope_theta": 2e4, "max_position_embeddings": 512, "original_max_position_embeddings": 128, "pad_token_id": 0}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.1, 2.2, 2.3]}


@pytest.mark.parametrize(
    ("model_type", "published"),
    [
        ("phi3", PHI_3 | {"rope_scaling": {"type": "longrope", **FACTORS}}),
        ("olmo2", {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("gpt_neox", {"rotary_emb_base": 2e4, "rotary_pct": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("qwen3", {"rope_theta": 2e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("glm4", {"rope_theta": 2e4, "partial_rotary_factor": 0.25}),
        # Transformers 4 knows this name only, and takes 128 without it.
        ("qwen3_moe", {"rope_theta": 2e4, "num_experts": 4}),
    ],
)
def test_an_exported_config_names_its_settings_as_the_published_one(
    model_type: str, published: dict[str, Any], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, hidden_size=32, num_attention_heads=4, **copy.deepcopy(published))
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    add_older_keys(written)
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert published.items() <= written.items()
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


def test_an_export_says_what_transformers_4_reads_too(tiny_model_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model_dir, base)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"] = yarn | {"rope_theta": 5e6}
    (base / "config.json").write_text(json.dumps(config))
    model = setup_model(config_of(base), mesh)
    tokenizer = setup_tokenizer(TokenizerConfig(), config_of(base))
    export_model(model, tokenizer, tmp_path / "export", WeightCheckpointConfig(), torch.bfloat16)

    written = json.loads((tmp_path / "export/config.json").read_text())
    assert written["rope_theta"] == 5e6
    assert yarn.items() <= written["rope_scaling"].items()
    assert written["torch_dtype"] == "bfloat16"
    assert AutoConfig.from_pretrained(tmp_path / "export").rope_parameters == model.config.rope_parameters
    written = json.loads((tmp_path / "export/tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == tokenizer.extra_special_tokens == ["<|im_start|>"]
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert type(again) is type(tokenizer)
    assert again.extra_special_tokens == tokenizer.extra_special_tokens


def test_the_export_of_a_head_that_the_file_holds_apart_says_that_it_is_not_tied(
    tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    base, target = tmp_path / "base", tmp_path / "export"
    shutil.copytree(tiny_model_dir, base)
    weights = load_file(base / "model.safetensors")
    head = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file({**weights, "lm_head.weight": head}, base / "model.safetensors", {"format": "pt"})
    config = config_of(base)
    model, tokenizer = setup_model(config, mesh), setup_tokenizer(TokenizerConfig(), config)
    export_model(model, tokenizer, target, WeightCheckpointConfig(), torch.float32)
    assert torch.equal(load_file(target / "model.safetensors")["lm_head.weight"], head)
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"] is True
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is False


def test_gathered_weights_have_hub_names_and_dtype_and_no_tied_copy(tiny_model_dir: Path, mesh: Mesh) -> None:
    on_disk = load_file(tiny_model_dir / "model.safetensors")
    model = setup_model(config_of(tiny_model_dir, ac=ActivationCheckpointConfig()), mesh)
    gathered = gather_weights(model, torch.bfloat16)
    assert gathered.keys() == on_disk.keys()
    assert {tensor.dtype for tensor in gathered.values()} == {torch.bfloat16}
    assert torch.equal(gather_weights(model, torch.float32)["model.norm.weight"], on_disk["model.norm.weight"])


def test_gathered_weights_do_not_change_with_further_training(tiny_model_dir: Path, mesh: Mesh) -> None:
    model = setup_model(config_of(tiny_model_dir), mesh)
    gathered = gather_weights(model, torch.float32)
    before = gathered["model.norm.weight"].clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(gathered["model.norm.weight"], before)


def test_experts_are_exported_one_by_one_as_on_the_hub(tmp_path: Path, mesh: Mesh) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    model = setup_model(config_of(tmp_path), mesh)
    on_disk = load_file(tmp_path / "model.safetensors")
    gathered = gather_weights(model, torch.float32)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in gathered
    assert gathered.keys() == on_disk.keys()
    assert all(torch.equal(gathered[name], on_disk[name]) for name in on_disk)


def test_large_weights_are_split_with_an_index(tmp_path: Path) -> None:
    state = {f"layer.{index}.weight": torch.full((1000,), float(index)) for index in range(3)}
    save_weights(state, tmp_path, largest_file=5000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    file = index["weight_map"]["layer.2.weight"]
    assert torch.equal(load_file(tmp_path / file)["layer.2.weight"], state["layer.2.weight"])


def test_the_torch_format_has_the_hub_file_name(tmp_path: Path) -> None:
    save_weights({"weight": torch.ones(2)}, tmp_path, save_format="torch")
    assert torch.equal(torch.load(tmp_path / "pytorch_model.bin")["weight"], torch.ones(2))


def test_weights_are_readable_by_everyone_with_access_to_the_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    save_weights({"weight": torch.ones(2)}, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_activation_checkpointing_and_layer_limit_do_not_change_the_gradient(tiny_model_dir: Path, mesh: Mesh) -> None:
    tokens = torch.arange(30)

    def gradient_norm(**fields) -> float:
        model = setup_model(config_of(tiny_model_dir, **fields), mesh)
        logits_of_row(model, tokens).logsumexp(-1).sum().backward()
        return clip_gradients(model, 1.0)

    assert gradient_norm(ac=ActivationCheckpointConfig(freq=1)) == gradient_norm()
    assert gradient_norm(debug=DebugModelConfig(num_layers=1)) != gradient_norm()


def test_random_weights_are_the_same_in_every_run(tiny_model_dir: Path, mesh: Mesh) -> None:
    config = config_of(tiny_model_dir, debug=DebugModelConfig(random_init=True))
    torch.manual_seed(7)
    first = gather_weights(setup_model(config, mesh), torch.float32)
    torch.manual_seed(8)
    second = gather_weights(setup_model(config, mesh), torch.float32)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bfloat16_compute_keeps_float32_master_weights(tiny_model_dir: Path, mesh: Mesh) -> None:
    model = setup_model(config_of(tiny_model_dir, compute_dtype="bfloat16"), mesh)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert logits_of_row(model, torch.arange(5)).dtype == torch.bfloat16
    on_disk = load_file(tiny_model_dir / "model.safetensors")
    gathered = gather_weights(model, torch.float32)
    assert all(torch.equal(gathered[name], on_disk[name]) for name in on_disk)


def test_a_missing_model_is_named_in_one_line(tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"model\.name = .*nowhere: no such directory") as raised:
        setup_model(config_of(tmp_path / "nowhere"), mesh)
    assert "\n" not in str(raised.value)


LOADS_FROM_A_HUB = """
from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.model.build import load_model_config
from prime_rl.trainer.process.errors import ModelError

for name in ("a/b", "a/nowhere"):
    try:
        load_model_config(ModelConfig(name=name))
    except ModelError as error:
        print(error)
"""


def test_a_hub_model_that_cannot_be_loaded_is_missing_only_if_it_was_not_found(tmp_path: Path) -> None:
    cached = tmp_path / "models--a--b"
    for file, text in (("refs/main", "0" * 40), (f"snapshots/{'0' * 40}/config.json", '{"model_type": "unheard_of"}')):
        (cached / file).parent.mkdir(parents=True)
        (cached / file).write_text(text)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOADS_FROM_A_HUB], env=environment, capture_output=True, text=True, check=True
    )
    unsupported, missing = done.stdout.splitlines()
    assert unsupported.startswith("model.name = a/b: The checkpoint you are trying to load has model type `unheard_of`")
    start = "model.name = a/nowhere: no such directory, and not found in the model hub or its local cache: "
    assert missing.startswith(start)
    assert "offline" in missing.removeprefix(start) or "connect" in missing.removeprefix(start)


def test_a_directory_without_weights_points_at_random_init(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    (tmp_path / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    with pytest.raises(ModelError, match=r"model\.debug\.random_init"):
        setup_model(config_of(tmp_path), mesh)


def test_a_quantized_model_is_refused(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    config = json.loads((tiny_model_dir / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ModelError, match=r"^model\.name = .*: its weights are quantized \(fp8\)"):
        setup_model(config_of(tmp_path), mesh)


def test_the_chat_template_can_be_replaced_by_text_or_by_a_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ 'from a file' }}")
    config = config_of(tiny_model_dir)
    for template, rendered in (("{{ 'given' }}", "given"), (str(file), "from a file")):
        tokenizer = setup_tokenizer(TokenizerConfig(chat_template=template), config)
        assert tokenizer.apply_chat_template([{"role": "user"}], tokenize=False) == rendered


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    assert resolve_device("auto") == "cpu"
    with pytest.raises(TrainerError, match="CUDA_VISIBLE_DEVICES"):
        resolve_device("cuda")


def test_replicas_must_divide_the_processes(tiny_model_dir: Path, mesh: Mesh) -> None:
    with pytest.raises(TrainerError, match="dp_replicate = 2"):
        setup_mesh(config_of(tiny_model_dir, dp_replicate=2), mesh.process)


def test_throughput_counts_the_steps_after_the_first_of_its_window() -> None:
    throughput = Throughput()
    assert [throughput.step(tokens, now_s) for tokens, now_s in ((100, 1.0), (10, 2.0), (30, 3.0))] == [None, 10, 20]


def test_the_time_of_a_validation_does_not_lower_the_throughput() -> None:
    throughput = Throughput()
    throughput.step(10, now_s=1.0)
    throughput.leave_out(100.0)
    assert throughput.step(10, now_s=103.0) == 5.0


def test_flops_count_matrix_parameters_and_attention(tiny_model_dir: Path, mesh: Mesh) -> None:
    model = setup_model(config_of(tiny_model_dir), mesh)
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128
    head = 64 * 128
    assert flops_per_token(model, row_tokens=10) == 6 * (2 * layer + head) + 12 * 2 * 64 * 10

"""LoRA adapters: computation, training and export, compared with PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from prime_rl.checks.adapters import lora_fault, read_settings
from prime_rl.checks.disk import tensor_shapes
from prime_rl.configs.trainer import (
    ActivationCheckpointConfig,
    AdamWConfig,
    CompileConfig,
    DebugModelConfig,
    FileSystemWeightBroadcastConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    SGDConfig,
    TokenizerConfig,
    WeightCheckpointConfig,
)
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.checkpoints.weights import export_model, gather_weights, save_adapter
from prime_rl.trainer.kernels.heads import ChunkSizes, linear_cross_entropy_sum
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.lora import LowRank, Merge, gather_adapter, peft_config
from prime_rl.trainer.model.scoring import LogitsOf, cross_entropy_sum, score_tokens
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.perf import flops_per_token
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.broadcast import FileSystemBroadcast
from prime_rl.trainer.rl.rows import Row, score_row
from prime_rl.transport.loading import full_tensor
from prime_rl.transport.messages import MicroBatch

TOKENS = torch.arange(4, 100, 3)


@pytest.fixture(scope="module")
def moe_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE with 2 layers of 4 experts, 2 of them active per token, and an untied head."""
    directory = tmp_path_factory.mktemp("moe")
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(vocab_size=128, num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def mixed_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-4-MoE: the first layer is dense, the second has stacked experts and a shared expert."""
    directory = tmp_path_factory.mktemp("mixed")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    config = Glm4MoeConfig(vocab_size=128, pad_token_id=0, **sizes, **heads, **experts)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Glm4MoeForCausalLM(config).save_pretrained(directory)
    return directory


def config_of(directory: Path, lora: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    adapter = LoRAConfig(**{"rank": 4, "alpha": 8.0, **(lora or {})})
    return ModelConfig(name=str(directory), attn="sdpa", lora=adapter, **fields)


def logits_of(model: PreTrainedModel) -> Tensor:
    positions = torch.arange(len(TOKENS))[None]
    return score_tokens(model, TOKENS[None], positions, lambda hidden, logits_of: logits_of(hidden)).float()


def loss_of(logits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:-1], TOKENS[1:])


def train(model: PreTrainedModel, steps: int = 3, config: OptimizerConfig | None = None) -> PreTrainedModel:
    # Without a backward pass, the weights stay gathered.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    optimizer = setup_optimizer(config or AdamWConfig(lr=1e-2), model)
    for _ in range(steps):
        loss_of(logits_of(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def in_peft(model: PreTrainedModel, base: Path, directory: Path, **options: Any) -> peft.PeftModel:
    """`base` with the adapter of `model`, saved to files and loaded by PEFT."""
    save_adapter(gather_adapter(model, torch.float32), directory)
    own = AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa")
    return peft.PeftModel.from_pretrained(own, directory, **options)


PATTERNS = {
    "rank_pattern": {r"layers\.0\..*v_proj": 6, "v_proj": 2, "self_attn.o_proj": 3},
    "alpha_pattern": {"o_proj": 30.0},
}
KINDS = [
    pytest.param({"use_rslora": True}, id="rslora"),
    pytest.param({"use_dora": True}, id="dora"),
    pytest.param(PATTERNS, id="patterns"),
    pytest.param({**PATTERNS, "use_rslora": True, "use_dora": True, "modules_to_save": ["norm"]}, id="all-of-them"),
]


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param({}, id="every-linear-layer"),
        pytest.param({"target_modules": [r"layers\.1\..*(q|down)_proj$", "k_proj"]}, id="some-layers-by-pattern"),
        pytest.param({"modules_to_save": ["norm", "layers.0.mlp"], "alpha": 6.0}, id="with-modules-trained-in-full"),
        pytest.param({"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]}, id="with-tied-embeddings"),
        *KINDS,
    ],
)
def test_peft_matches_the_trained_model(tiny_model_dir: Path, mesh: Mesh, tmp_path: Path, lora: dict[str, Any]) -> None:
    model = train(setup_model(config_of(tiny_model_dir, lora), mesh))
    loaded = in_peft(model, tiny_model_dir, tmp_path / "adapter")
    start = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        ours, theirs, before = logits_of(model), loaded(TOKENS[None]).logits[0], start(TOKENS[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (ours - before).abs().max() > 0.1


def test_the_files_match_peft_s_own(tiny_model_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    model = train(setup_model(config_of(tiny_model_dir, {"modules_to_save": ["norm"]}), mesh))
    in_peft(model, tiny_model_dir, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    own, other = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs"))
    assert own["target_modules"] == sorted(other.pop("target_modules"))
    assert {name: other[name] for name in own if name in other} == {name: own[name] for name in own if name in other}


@pytest.mark.parametrize("lora", [pytest.param({}, id="plain"), *KINDS])
def test_loss_and_gradients_are_those_of_peft(
    tiny_model_dir: Path, mesh: Mesh, tmp_path: Path, lora: dict[str, Any]
) -> None:
    model = train(setup_model(config_of(tiny_model_dir, lora, ac=ActivationCheckpointConfig()), mesh))
    loaded = in_peft(model, tiny_model_dir, tmp_path / "adapter", is_trainable=True)
    ours, theirs = loss_of(logits_of(model)), loss_of(loaded(TOKENS[None]).logits[0])
    ours.backward()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    expected = {name.replace(".default", ""): weight.grad for name, weight in loaded.named_parameters()}
    compared = 0
    for path, module in model.named_modules():
        if isinstance(module, LowRank):
            names = {"lora_A": module.A, "lora_B": module.B, "lora_magnitude_vector": module.magnitude}
            for factor, own in names.items():
                if own is not None:
                    other = expected[f"base_model.model.{path.removesuffix('.lora')}.{factor}.weight"]
                    torch.testing.assert_close(own.grad.full_tensor(), other, rtol=1e-4, atol=1e-7)
                    compared += 1
    assert compared == 2 * 7 * (3 if lora.get("use_dora") else 2)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param({}, {"lora_alpha": 8}, id="plain"),
        pytest.param(
            {"use_rslora": True, "rank_pattern": {"v_proj": 2, "o_proj": 3}},
            {"lora_alpha": 8, "use_rslora": True, "rank_pattern": {"v_proj": 2, "o_proj": 3}},
            id="rslora-by-pattern",
        ),
    ],
)
def test_pissa_trains_and_exports_what_peft_s_does(
    tiny_model_dir: Path, mesh: Mesh, tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """PEFT trains beside a residual. Ours stays beside the weights of the hub, which its exports fit."""
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    model = setup_model(config_of(tiny_model_dir, {"init": "pissa", "target_modules": targets, **ours}), mesh)
    plain = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    assert torch.equal(logits_of(model), logits_of(plain)), "it starts as the model"
    own = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa")
    reference = peft.get_peft_model(
        own, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights="pissa", **theirs)
    )
    optimizer = torch.optim.SGD([each for each in reference.parameters() if each.requires_grad], lr=0.1)
    for _ in range(3):
        loss_of(reference(TOKENS[None]).logits[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(model, config=SGDConfig(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0))
    with torch.no_grad():
        logits = reference(TOKENS[None]).logits[0]
    assert (logits - logits_of(plain)).abs().max() > 0.1
    torch.testing.assert_close(logits_of(model), logits, rtol=1e-4, atol=1e-5)
    for is_served in (False, True):
        save_adapter(gather_adapter(model, torch.float32, is_served=is_served), tmp_path / str(is_served))
        base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa")
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / str(is_served))
        torch.testing.assert_close(loaded(TOKENS[None]).logits[0], logits, rtol=1e-4, atol=1e-5)
    merged = reference.merge_and_unload().state_dict()
    for name, weight in gather_weights(model, torch.float32).items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-4, atol=1e-5)


def test_an_untrained_adapter_changes_nothing_and_its_initialization_is_fixed(tiny_model_dir: Path, mesh: Mesh) -> None:
    torch.manual_seed(1)
    one = setup_model(config_of(tiny_model_dir), mesh)
    torch.manual_seed(2)
    other = setup_model(config_of(tiny_model_dir), mesh)
    plain = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    assert torch.equal(logits_of(one), logits_of(plain))
    first, second = (gather_adapter(model, torch.float32).state for model in (one, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    drawn = first["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert 0.9 / 8 < drawn.abs().max() <= 1 / 8, "uniform in 1 / sqrt(64)"


def peft_adapter(base: Path, directory: Path, **config: Any) -> peft.PeftModel:
    """An adapter that PEFT has made and written, with random matrices."""
    own = AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa")
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **config}
    model = peft.get_peft_model(own, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    return model


STARTS: list[Any] = [
    pytest.param({}, {}, id="linear-layers"),
    pytest.param(
        {"modules_to_save": ["model.norm"]}, {"modules_to_save": ["model.norm"]}, id="with-modules-trained-in-full"
    ),
    pytest.param({"use_rslora": True}, {"alpha": 16.0}, id="rslora"),
    pytest.param({"use_rslora": True, "use_dora": True}, {"use_rslora": True, "use_dora": True}, id="dora"),
    pytest.param(
        {"rank_pattern": {"q_proj": 2, "model.layers.1.mlp.down_proj": 6}, "alpha_pattern": {"q.*": 3}},
        {"rank_pattern": {"q_proj": 2, "layers.1": 6}, "alpha_pattern": {"q_proj": 3.0}},
        id="patterns",
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), STARTS)
def test_training_continues_peft_s_adapter(
    tiny_model_dir: Path, mesh: Mesh, tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    reference = peft_adapter(tiny_model_dir, tmp_path / "theirs", **theirs)
    lora = {"target_modules": ["q_proj", "down_proj"], "path": str(tmp_path / "theirs"), **ours}
    config = config_of(tiny_model_dir, lora)
    assert config.lora is not None
    assert lora_fault(config.lora, tmp_path / "theirs") is None
    for key, value in {"alpha": 7.0, "rank": 5, "use_dora": not config.lora.use_dora}.items():
        assert "set " in str(lora_fault(config.lora.model_copy(update={key: value}), tmp_path / "theirs"))
    model = setup_model(config, mesh)
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-5)
    written = gather_adapter(model, torch.float32).state
    given = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert written.keys() == given.keys()
    assert all(torch.equal(written[name], given[name]) for name in given)


@pytest.mark.parametrize("theirs", [each.values[0] for each in STARTS], ids=[each.id for each in STARTS])
@pytest.mark.parametrize("lora", [None, {"target_modules": ["k_proj"]}], ids=["train-all", "stack"])
def test_an_adapter_is_merged_as_by_peft(
    tiny_model_dir: Path, mesh: Mesh, tmp_path: Path, theirs: dict[str, Any], lora: dict[str, Any] | None
) -> None:
    merged = peft_adapter(tiny_model_dir, tmp_path / "theirs", **theirs).merge_and_unload()
    config = config_of(tiny_model_dir, lora, adapter=str(tmp_path / "theirs"))
    model = setup_model(config if lora else config.model_copy(update={"lora": None}), mesh)
    weights = gather_weights(model, torch.float32)
    expected = merged.state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("k_proj.lora" in name for name in names) if lora else len(names) == len(weights)


def test_an_adapter_of_experts_continues_and_merges(moe_model_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    trained = train(setup_model(config_of(moe_model_dir), mesh))
    save_adapter(gather_adapter(trained, torch.float32), tmp_path / "own")
    continued = setup_model(config_of(moe_model_dir, {"path": str(tmp_path / "own")}), mesh)
    assert torch.equal(logits_of(continued), logits_of(trained))
    merged = setup_model(ModelConfig(name=str(moe_model_dir), attn="sdpa", adapter=str(tmp_path / "own")), mesh)
    for name, weight in gather_weights(trained, torch.float32).items():
        torch.testing.assert_close(gather_weights(merged, torch.float32)[name], weight, rtol=1e-6, atol=1e-7)


def test_dora_merges_into_the_rows_that_a_process_holds_but_not_into_parts_of_rows() -> None:
    weight, update = torch.randn(8, 6), ((), torch.randn(2, 6), torch.randn(8, 2), 0.5)
    merge = Merge(Path("of_peft"), {"layer": [update]}, {}, {"layer": torch.rand(8)})
    whole = merge.change("layer", weight.clone(), (slice(0, 8), slice(0, 6)))
    torch.testing.assert_close(whole.norm(dim=1), merge.lengths["layer"])
    rows = (slice(3, 8), slice(0, 6))
    assert torch.equal(merge.change("layer", weight[rows].clone(), rows), whole[rows])
    columns = (slice(0, 8), slice(0, 3))
    with pytest.raises(ModelError, match=r"of_peft is DoRA, which needs whole rows of layer: remove model\.tp"):
        merge.change("layer", weight[columns].clone(), columns)


def test_an_adapter_merges_into_the_rows_of_experts_that_a_process_holds() -> None:
    places = [(slice(expert, expert + 1), slice(start, start + 4)) for expert in range(3) for start in (0, 4)]
    updates = [(place, torch.randn(2, 6), torch.randn(4, 2), 0.5) for place in places]
    merge, weight = Merge(Path(), {"experts": updates}, {}, {}), torch.randn(3, 8, 6)
    whole = merge.change("experts", weight.clone(), (slice(0, 3), slice(0, 8), slice(0, 6)))
    assert not torch.isclose(whole, weight).any(-1).any()
    for rows in (slice(0, 3), slice(3, 8)):
        held = (slice(1, 3), rows, slice(0, 6))
        assert torch.equal(merge.change("experts", weight[held].clone(), held), whole[held])


def test_an_adapter_that_does_not_fit_is_one_line(
    tiny_model_dir: Path, moe_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    peft_adapter(tiny_model_dir, tmp_path / "theirs", modules_to_save=["model.norm"])
    start = str(tmp_path / "theirs")
    faults = {
        "has 1 tensors that this config does not train, such as model.norm.weight": config_of(
            tiny_model_dir, {"path": start}
        ),
        "lora_A.weight has shape": config_of(
            tiny_model_dir, {"path": start, "rank": 2, "modules_to_save": ["model.norm"]}
        ),
        "fits no weight of this model": ModelConfig(name=str(moe_model_dir), attn="sdpa", adapter=start),
        "no such directory": ModelConfig(name=str(tiny_model_dir), attn="sdpa", adapter="outputs/none"),
    }
    for text, config in faults.items():
        with pytest.raises(ModelError, match=text) as caught:
            setup_model(config, mesh)
        assert "\n" not in str(caught.value)
    # PEFT loads this one into weights without their first singular vectors.
    pissa = peft_adapter(tiny_model_dir, tmp_path / "pissa", init_lora_weights="pissa")
    assert pissa.peft_config["default"].init_lora_weights == "pissa"
    with pytest.raises(ModelError, match="has init_lora_weights = 'pissa', which is not supported"):
        setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa", adapter=str(tmp_path / "pissa")), mesh)
    # PEFT unties a head that it trains in full. Its weight would replace the embeddings, too.
    peft_adapter(tiny_model_dir, tmp_path / "head", modules_to_save=["lm_head"])
    with pytest.raises(ModelError, match="which share their weight"):
        setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa", adapter=str(tmp_path / "head")), mesh)


def test_modules_without_an_adapter_in_the_file_start_new(
    tiny_model_dir: Path, mesh: Mesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peft_adapter(tiny_model_dir, tmp_path / "theirs")
    setup_model(config_of(tiny_model_dir, {"path": str(tmp_path / "theirs")}), mesh)
    assert "has no adapter for 10 modules, such as model.layers.0.self_attn.k_proj" in caplog.text


def test_only_adapters_and_modules_to_save_are_trained(tiny_model_dir: Path, mesh: Mesh) -> None:
    config = config_of(tiny_model_dir, {"target_modules": ["self_attn.q_proj"], "modules_to_save": ["model.norm"]})
    model = setup_model(config, mesh)
    before = gather_weights(model, torch.float32)
    optimizer = setup_optimizer(AdamWConfig(lr=1e-2), model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 * 2 + 1
    train(model)
    after = gather_weights(model, torch.float32)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"model.norm.weight", *(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))}


def test_an_export_is_merged_and_has_the_adapter_if_requested(tiny_model_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    config = config_of(tiny_model_dir)
    model = train(setup_model(config, mesh))
    options = WeightCheckpointConfig(save_adapter_separately=True)
    tokenizer = setup_tokenizer(TokenizerConfig(), config)
    export_model(model, tokenizer, tmp_path / "step_3", options, torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "step_3", attn_implementation="sdpa")
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "step_3" / "lora_adapters")
    with torch.no_grad():
        for other in (merged, loaded):
            torch.testing.assert_close(logits_of(model), other(TOKENS[None]).logits[0], rtol=1e-5, atol=1e-5)
    stored = load_file(tmp_path / "step_3" / "model.safetensors")
    assert stored.keys() == load_file(tiny_model_dir / "model.safetensors").keys()


def test_an_adapter_names_the_folder_of_its_base_model_so_that_it_is_found_from_any_directory(
    tiny_model_dir: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model_dir.parent)
    model = setup_model(config_of(Path(tiny_model_dir.name)), mesh)
    assert peft_config(model)["base_model_name_or_path"] == str(tiny_model_dir)


def test_an_adapter_for_engines_has_one_scale_for_all_layers(tiny_model_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    model = train(setup_model(config_of(tiny_model_dir, {**PATTERNS, "use_rslora": True}), mesh))
    save_adapter(gather_adapter(model, torch.float32, is_served=True), tmp_path)
    settings = read_settings(tmp_path)
    paths = {path.removesuffix(".lora") for path, module in model.named_modules() if isinstance(module, LowRank)}
    assert {settings.scale_of(path) for path in paths} == {settings.scale} == {1.0}
    assert {settings.rank_of(path) for path in paths} == {2, 3, 4, 6}
    assert settings.rank == 6
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), loaded(TOKENS[None]).logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_served", [False, True])
def test_ranks_of_shared_experts_leave_those_of_stacked_ones(
    mixed_model_dir: Path, mesh: Mesh, tmp_path: Path, is_served: bool
) -> None:
    lora = {"rank_pattern": {"shared_experts": 6}, "alpha_pattern": {"q_proj": 3.0}}
    model = train(setup_model(config_of(mixed_model_dir, lora), mesh))
    save_adapter(gather_adapter(model, torch.float32, is_served=is_served), tmp_path)
    settings = read_settings(tmp_path)
    factors = {name: shape for name, shape in tensor_shapes(tmp_path).items() if ".lora_A." in name}
    names = {name: name.removeprefix("base_model.model.").partition(".lora_A.")[0] for name in factors}
    assert {name: settings.rank_of(path) for name, path in names.items()} == {
        name: rank for name, (rank, _) in factors.items()
    }
    merged = setup_model(ModelConfig(name=str(mixed_model_dir), attn="sdpa", adapter=str(tmp_path)), mesh)
    expected = gather_weights(model, torch.float32)
    for name, weight in gather_weights(merged, torch.float32).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6)


def test_lora_plus_trains_like_peft_s_optimizer(tiny_model_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    lora = {"loraplus_lr_ratio": 8.0, "use_dora": True, "modules_to_save": ["norm"]}
    model = setup_model(config_of(tiny_model_dir, lora), mesh)
    theirs = in_peft(model, tiny_model_dir, tmp_path / "start", is_trainable=True)
    train(model, config=AdamWConfig(lr=1e-3, weight_decay=0.0))
    reference = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=8.0)
    for _ in range(3):
        loss_of(theirs(TOKENS[None]).logits[0]).backward()
        reference.step()
        reference.zero_grad()
    theirs.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    torch.testing.assert_close(gather_adapter(model, torch.float32).state, expected, rtol=1e-4, atol=2e-5)


def test_a_broadcast_has_only_the_adapter_in_peft_s_format(tiny_model_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    model = train(setup_model(config_of(tiny_model_dir), mesh))
    run = RunPaths(tmp_path).orchestrator
    broadcast = FileSystemBroadcast(
        FileSystemWeightBroadcastConfig(), RunPaths(tmp_path), mesh.process, 1, sends_adapter=True
    )
    broadcast.publish(model, 3, torch.float32)
    files = {path.name for path in run.broadcast(3).iterdir()}
    assert files == {"adapter_model.safetensors", "adapter_config.json", "STABLE"}
    config = json.loads((run.broadcast(3) / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    assert expected.items() <= config.items()
    linear = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["target_modules"], config["modules_to_save"]) == (linear, None)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir), run.broadcast(3))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), loaded(TOKENS[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_frozen_weights_are_stored_in_the_compute_dtype_with_identical_results(
    tiny_model_dir: Path, mesh: Mesh
) -> None:
    model = setup_model(config_of(tiny_model_dir, compute_dtype="bfloat16"), mesh)
    plain = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa", compute_dtype="bfloat16"), mesh)
    dtypes = {(weight.requires_grad, weight.dtype) for weight in model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    assert torch.equal(logits_of(model), logits_of(plain))
    losses = [loss_of(logits_of(train(model, steps))).item() for steps in (0, 5)]
    assert losses[1] < losses[0] - 0.05


@pytest.mark.parametrize(("of_adapters", "of_model"), [(0.5, 0.0), (0.0, 0.5)])
def test_dropout_is_the_same_when_activations_are_recomputed(
    tiny_model_dir: Path, tmp_path: Path, mesh: Mesh, of_adapters: float, of_model: float
) -> None:
    directory = shutil.copytree(tiny_model_dir, tmp_path / "model")
    AutoConfig.from_pretrained(directory, attention_dropout=of_model).save_pretrained(directory)

    def trained(*, has_dropout: bool = True, **fields: Any) -> dict[str, Tensor]:
        model = setup_model(config_of(directory, {"dropout": of_adapters}, **fields), mesh, has_dropout=has_dropout)
        torch.manual_seed(0)
        return gather_adapter(train(model), torch.float32).state

    kept, again, without = trained(), trained(ac=ActivationCheckpointConfig()), trained(has_dropout=False)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert not all(torch.equal(kept[name], without[name]) for name in kept)


@pytest.mark.slow
def test_a_compiled_model_trains_the_same_adapters(tiny_model_dir: Path, mesh: Mesh) -> None:
    def trained(compile: CompileConfig | None) -> dict[str, Tensor]:
        config = config_of(tiny_model_dir, debug=DebugModelConfig(num_layers=1), compile=compile)
        return gather_adapter(train(setup_model(config, mesh), steps=2), torch.float32).state

    torch.testing.assert_close(trained(None), trained(CompileConfig()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "lora", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}}]
)
def test_stacked_experts_are_adapted_and_exported_one_by_one(
    moe_model_dir: Path, mesh: Mesh, tmp_path: Path, lora: dict[str, Any]
) -> None:
    model = setup_model(config_of(moe_model_dir, lora), mesh)
    plain = setup_model(ModelConfig(name=str(moe_model_dir), attn="sdpa"), mesh)
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-5, atol=1e-6)
    loaded = in_peft(train(model), moe_model_dir, tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight" in names
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), loaded(TOKENS[None]).logits[0], rtol=1e-5, atol=1e-5)
    assert lora_fault(LoRAConfig(rank=4, alpha=8.0, **lora), tmp_path / "adapter") is None
    merged, start = gather_weights(model, torch.float32), load_file(moe_model_dir / "model.safetensors")
    assert merged.keys() == start.keys()
    changed = {name.rpartition(".layers.1.")[2] for name in start if not torch.equal(merged[name], start[name])}
    assert {"mlp.experts.0.gate_proj.weight", "mlp.experts.3.down_proj.weight"} <= changed


def test_peft_finds_linear_layers_next_to_stacked_experts(mixed_model_dir: Path, mesh: Mesh, tmp_path: Path) -> None:
    model = train(setup_model(config_of(mixed_model_dir, {"dropout": 0.1}), mesh)).eval()
    loaded = in_peft(model, mixed_model_dir, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), loaded(TOKENS[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_an_adapted_head_is_used_with_the_fused_head_enabled(moe_model_dir: Path, mesh: Mesh) -> None:
    model = train(setup_model(config_of(moe_model_dir, {"target_modules": ["lm_head"]}), mesh))
    length = len(TOKENS)
    fields = {"advantages": [1.0] * length, "inference_logprobs": [0.0] * length, "temperatures": [1.0] * length}
    message = MicroBatch(TOKENS.tolist(), [True] * length, position_ids=list(range(length)), **fields)
    row = Row.from_message(message, torch.device("cpu"))
    scored, _ = score_row(model, row, row.layout.trained_M[1:], vocab_chunk=512)  # nothing predicts the first token
    expected = logits_of(model).log_softmax(-1)[:-1].gather(1, TOKENS[1:, None])[:, 0]
    torch.testing.assert_close(scored[1:], expected)


@pytest.mark.parametrize("most_logits", [2**25, 16 * 128], ids=["head in one part", "head in parts"])
def test_sft_trains_the_adapter_of_a_head(moe_model_dir: Path, mesh: Mesh, most_logits: int) -> None:
    model = train(setup_model(config_of(moe_model_dir, {"target_modules": ["lm_head"]}), mesh))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def score(hidden: Tensor, logits_of: LogitsOf) -> Tensor:
        return cross_entropy_sum(hidden[:-1], TOKENS[1:], logits_of, 128, ChunkSizes(logits=most_logits))

    def loss_and_gradients(loss: Tensor) -> list[Tensor]:
        loss.backward()
        gradients = [full_tensor(parameter.grad).clone() for parameter in trained]
        model.zero_grad()
        return [loss.detach(), *gradients]

    expected = loss_and_gradients(loss_of(logits_of(model)) * (len(TOKENS) - 1))
    found = loss_and_gradients(score_tokens(model, TOKENS[None], torch.arange(len(TOKENS))[None], score))
    torch.testing.assert_close(found, expected)
    assert all(gradient.any() for gradient in found)


@pytest.mark.parametrize("most_logits", [2**25, 8 * 50], ids=["head in one part", "head in parts"])
def test_a_frozen_head_has_no_weight_gradient_to_compute(most_logits: int) -> None:
    generator, targets = torch.Generator().manual_seed(0), torch.arange(17)
    hidden, weight = torch.randn(17, 6, generator=generator), torch.randn(50, 6, generator=generator)
    gradients, shapes = {}, {}
    for is_frozen in (False, True):
        shapes[is_frozen] = made = set()

        def product(a_NK: Tensor, b_MK: Tensor, made: set[tuple[int, int]] = made) -> Tensor:
            made.add((len(a_NK), len(b_MK)))
            return a_NK @ b_MK.t()

        leaf = hidden.clone().requires_grad_()
        head = weight.clone().requires_grad_(not is_frozen)
        linear_cross_entropy_sum(leaf, head, targets, ChunkSizes(logits=most_logits), product).backward()
        gradients[is_frozen] = leaf.grad
    assert torch.equal(gradients[True], gradients[False])
    assert shapes[False] - shapes[True] == {(50, 6)}


def test_unknown_names_are_one_line_with_the_nearest_ones(
    tiny_model_dir: Path, moe_model_dir: Path, mesh: Mesh
) -> None:
    def fault(directory: Path = tiny_model_dir, **lora: Any) -> str:
        with pytest.raises(ModelError) as raised:
            setup_model(config_of(directory, lora), mesh)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert '"q_prj" matches no linear layer of this model; nearest: q_proj' in fault(target_modules=["q_prj"])
    assert "nearest: down_proj, gate_proj, k_proj" in fault(target_modules=["zzz"])
    assert '"nrm" matches no module' in fault(modules_to_save=["nrm"])
    assert "matches no module that can be adapted: experts" in fault(target_modules=["experts"])
    assert "lm_head shares its weight with model.embed_tokens" in fault(target_modules=["q_proj", "lm_head"])
    assert "can only be adapted together" in fault(moe_model_dir, target_modules=["q_proj", "up_proj"])
    assert 'rank_pattern: "q_prj" matches no adapted linear layer of this model; nearest: q_proj' in fault(
        rank_pattern={"q_prj": 2}
    )
    assert 'alpha_pattern: "layers.1" matches the stack of experts' in fault(
        moe_model_dir, alpha_pattern={"layers.1": 2}
    )
    assert "experts, which have no DoRA; remove experts from target_modules" in fault(moe_model_dir, use_dora=True)


def test_all_linear_leaves_out_the_head_and_layers_whose_weight_is_read_without_a_call(
    tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    def adapted(directory: Path, *targets: str) -> set[str]:
        model = setup_model(config_of(directory, {"target_modules": list(targets)}), mesh)
        return {path.split(".")[-2] for path, module in model.named_modules() if isinstance(module, LowRank)}

    linear = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adapted(tiny_model_dir, "all-linear") == linear
    sizes = {"vocab_size": 128, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path)
    # A kernel takes the weights of the others.
    assert adapted(tmp_path, "all-linear") == {"in_proj"}
    with pytest.raises(ModelError, match=r"reads the weight of \S+\.out_proj without calling it"):
        adapted(tmp_path, "in_proj", "out_proj")


def test_flops_of_frozen_weights_exclude_their_gradient(tiny_model_dir: Path, mesh: Mesh) -> None:
    model = setup_model(config_of(tiny_model_dir, {"target_modules": ["q_proj"]}), mesh)
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128
    adapters = 2 * 4 * (64 + 64)
    expected = 4 * (2 * layer + 64 * 128) + 6 * adapters + 12 * 2 * 64 * 10
    assert flops_per_token(model, row_tokens=10) == expected

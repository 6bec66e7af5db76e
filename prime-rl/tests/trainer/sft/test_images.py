"""SFT on images: packed rows have the loss and the gradients of Transformers' own class, one row at a time."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

from prime_rl.checks.model_description import VISION_FAMILIES
from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import AdamWConfig, ModelConfig, TokenizerConfig
from prime_rl.run.paths import RunPaths
from prime_rl.run.pictures import read_contact_sheet
from prime_rl.trainer.checkpoints.weights import save_adapter
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.images import setup_images
from prime_rl.trainer.model.lora import gather_adapter
from prime_rl.trainer.model.quantized import QuantizedLinear
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.optim.optimizer import _groups
from prime_rl.trainer.process.errors import DataError, ModelError
from prime_rl.trainer.process.mesh import DataAxis, Mesh
from prime_rl.trainer.sft.data.packer import lay_out, setup_rows
from prime_rl.trainer.sft.data.samples import DatasetStream, SampleMaker, as_bytes, from_bytes
from prime_rl.trainer.sft.data.sources import setup_entries
from prime_rl.trainer.sft.run import run
from prime_rl.trainer.sft.step import CrossEntropy, forward_backward
from prime_rl.trainer.sft.validation import Validation
from prime_rl.transport.loading import full_tensor
from prime_rl.utils.pydantic_config import ConfigError, dump_toml, load_config

from ...utils.test_images import BROKEN_FILES
from ..vision_checkpoints import FAMILIES, picture, reference, save_checkpoint, save_rows
from .images_of_two_processes import gradient_of

LANGUAGE = ("lm_head", "model.language_model", "model.text_model")
SCRIPT = Path(__file__).with_name("images_of_two_processes.py")


def test_every_family_is_compared() -> None:
    assert FAMILIES.keys() == VISION_FAMILIES


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_with_images_have_the_loss_and_gradients_of_transformers(
    family: str, tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    save_checkpoint(family, start, tiny_model_dir)
    file = save_rows(tmp_path / "data")
    ids, theirs, loss_of = reference(family, start, file)

    config = ModelConfig(name=str(start), attn="sdpa", seq_len=256, vision={"tower_lr": 1e-3})
    data = SFTDataConfig(name=str(file), shuffle=False, seq_len=256, batch_size=2, pack_function="best_fit")
    tokenizer = setup_tokenizer(TokenizerConfig(name=str(start)), config)
    images = setup_images(config, tokenizer)
    stream = setup_rows(data, tokenizer, len(tokenizer), DataAxis(0, 1), images)
    packed = list(islice(stream, 4))
    samples = [stream.stream._make(stream.stream.entries.at(row)).sample for row in range(len(ids))]
    assert [sample.token_ids.tolist() for sample in samples] == ids, "those of Transformers' processor"
    counts = [len(row.members) for row in packed]
    assert max(counts) > 2, "a row holds several samples"

    expected = torch.tensor(0.0)
    # Two rows have the same tokens and different images.
    rows_of = {(sample.token_ids.tobytes(), sample.images): row for row, sample in enumerate(samples)}
    for member in (member for row in packed for member in row.members):
        expected = expected + loss_of(rows_of[member.token_ids.tobytes(), member.images], member.is_trained)
    total = sum(int(row.is_trained.sum()) for row in packed)
    (expected / total).backward()

    model = setup_model(config, mesh, has_dropout=True)
    ours = forward_backward(model, packed, CrossEntropy(images=images), [total], mesh)["loss"]
    assert ours == pytest.approx(float(expected.detach()) / total, abs=1e-5)
    of_theirs = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        # A weight that images do not reach, as of a later layer of the tower, has a gradient of zeros.
        wanted = torch.zeros_like(of_theirs[name]) if of_theirs[name].grad is None else of_theirs[name].grad
        torch.testing.assert_close(full_tensor(parameter.grad), wanted, rtol=1e-4, atol=1e-5)
    tower = {name for name in of_theirs if not name.startswith(LANGUAGE)}
    assert sum(float(of_theirs[name].grad.norm()) > 1e-3 for name in tower if of_theirs[name].grad is not None) > 10
    groups = _groups(AdamWConfig(lr=1e-2), model)
    assert [(len(group["params"]), group["lr"]) for group in groups] == [
        (len(of_theirs) - len(tower), 1e-2),
        (len(tower), 1e-3),
    ]


def test_a_run_with_images_exports_its_class_and_resumes_exactly(tiny_model_dir: Path, tmp_path: Path) -> None:
    start, (straight, halves) = tmp_path / "start", (tmp_path / "straight", tmp_path / "halves")
    save_checkpoint("qwen2_5_vl", start, tiny_model_dir)
    file = save_rows(tmp_path / "data")
    base: dict[str, Any] = {
        "device": "cpu",
        "model": {"name": str(start), "attn": "sdpa", "vision": {}},
        # Samples wait for a row when the first half ends.
        "data": {"name": str(file), "seq_len": 160, "batch_size": 2},
        "val": {"interval": 4},
        "optim": {"lr": 1e-2},
        "max_steps": 8,
    }
    assert run(SFTConfig(**base, output_dir=straight)) == 0
    assert run(SFTConfig(**{**base, "max_steps": 4}, output_dir=halves, ckpt={"interval": 4})) == 0
    # The data may move: a checkpoint has the numbers of rows, and neither paths nor content of the images that wait.
    saved = [each.read_bytes() for each in RunPaths(halves).trainer_checkpoint(4).rglob("*") if each.is_file()]
    assert saved
    assert not any(f"{file.parent}/".encode() in each for each in saved)
    file = file.parent.rename(tmp_path / "moved") / file.name
    base["data"]["name"] = str(file)
    assert run(SFTConfig(**base, output_dir=halves, ckpt={"interval": 4, "resume_step": 4})) == 0
    before, one, other = (load_file(each / "model.safetensors") for each in (start, *exports(straight, halves)))
    assert one.keys() == before.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    changed = {name for name in one if not torch.equal(one[name], before[name])}
    assert changed == {name for name in before if "visual" not in name}
    losses = [json.loads(line) for line in RunPaths(straight).metrics.read_text().splitlines()]
    of_val = [each["val/loss"] for each in losses if "val/loss" in each]
    assert of_val[-1] < of_val[0] / 2, "it learns"
    pictures = read_contact_sheet(RunPaths(straight).contact_sheet)
    assert len(pictures) > 2
    assert all(each.tokens > 0 for each in pictures)

    # Transformers has the loss of the validation with the export.
    (export,) = exports(straight)
    ids, whole, loss_of = reference("qwen2_5_vl", export, file)
    assert type(whole).__name__ == json.loads((start / "config.json").read_text())["architectures"][0]
    config = SFTConfig(**base)
    tokenizer = setup_tokenizer(config.tokenizer, config.model)
    make = SampleMaker(config.data, tokenizer, images=setup_images(config.model, tokenizer))
    samples = [
        make(setup_entries(config.data.model_copy(update={"shuffle": False})).at(row)).sample for row in range(len(ids))
    ]
    with torch.no_grad():
        sums = [float(loss_of(row, sample.is_trained)) for row, sample in enumerate(samples)]
    assert of_val[-1] == pytest.approx(sum(sums) / sum(sample.targets for sample in samples), abs=1e-5)


def test_samples_that_wait_do_not_hold_the_bytes_of_their_images(
    tiny_model_dir: Path, tmp_path: Path, mesh: Mesh
) -> None:
    start, data = tmp_path / "start", tmp_path / "rows.parquet"
    save_checkpoint("smolvlm", start, tiny_model_dir)
    files = []
    for number in range(4):
        content = io.BytesIO()
        picture(40, 30, number).save(content, "PNG")
        files.append(content.getvalue())
    asked = {"role": "user", "content": "<image><image>Which?"}
    answer = {"role": "assistant", "content": "yes"}
    rows = [{"messages": [asked, answer], "images": files[2 * row : 2 * row + 2]} for row in range(2)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    model = {"name": str(start), "vision": {}}
    config = SFTConfig(device="cpu", model=model, data={"name": str(data), "seq_len": 512, "shuffle": False})
    tokenizer = setup_tokenizer(config.tokenizer, config.model)
    stream = DatasetStream(config.data, tokenizer, DataAxis(0, 1), setup_images(config.model, tokenizer))
    waiting = [next(stream) for _ in rows]
    assert [[image.source for image in each.images] for each in waiting] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    again = next(iter(stream.own_share())).samples[0]
    assert again.token_ids is waiting[0].token_ids, "what is kept for the next epoch holds no image either"
    validation = Validation(config.data, tokenizer, mesh, CrossEntropy(), setup_images(config.model, tokenizer))
    assert [each.images for row in validation._own_rows for each in row.sequences] == [each.images for each in waiting]
    restored = from_bytes(as_bytes(waiting))
    assert [each.images for each in restored] == [each.images for each in waiting]
    assert [image.source for each in stream.with_images(restored) for image in each.images] == files
    # A checkpoint of an earlier version has the bytes themselves.
    ids, trained, images = as_bytes(stream.with_images(waiting[:1]))[0]
    assert [image.source for image in from_bytes([(ids, trained, images)])[0].images] == files[:2]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": [answer]}] * 2), data)
    with pytest.raises(DataError, match="its images have changed since it was read"):
        DatasetStream(config.data, tokenizer, DataAxis(0, 1)).with_images(restored[1:])


def test_a_preflight_tells_each_broken_image_by_its_line_and_counts_the_others(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    save_checkpoint("smolvlm", start, tiny_model_dir)
    (tmp_path / "data").mkdir()
    whole = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(whole, "PNG")
    files = {"whole.png": whole.getvalue(), **{name: content for name, (content, _) in BROKEN_FILES.items()}}
    for name, content in files.items():
        (tmp_path / "data" / name).write_bytes(content)
    answer = {"role": "assistant", "content": "yes"}
    rows = [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": name}]}, answer]}
        for name in (*files, "missing.png")
    ]
    data = tmp_path / "data" / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = tmp_path / "data" / "text.jsonl"
    text.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, answer], "scan": "whole.png"}) + "\n")
    config: dict[str, Any] = {
        "model": {"name": str(start), "vision": {"max_pixels": 10_000}},
        "data": {"name": str(data), "seq_len": 256, "batch_size": 2, "shuffle": False},
        "val": {"interval": 1, "data": {"name": str(text), "seq_len": 256}},
    }

    def preflight(**keys: Any) -> subprocess.CompletedProcess[str]:
        dump_toml(SFTConfig(**config | {"data": config["data"] | keys}), tmp_path / "sft.toml")
        words = ["-m", "prime_rl.trainer.sft.preflight", "@", str(tmp_path / "sft.toml")]
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)

    done = preflight()
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if "rows.jsonl:" in line]
    assert f"{data}:2: image 1: empty.png: it is empty" in lines[0]
    assert len(lines) == 20, "the first kinds"
    assert "more kinds of faults; those above are the first" in done.stdout
    skipped = preflight(on_bad_row="skip", max_untrainable_share=1.0)
    assert skipped.returncode == 0, skipped.stderr
    figures = {" ".join(line.split()) for line in skipped.stdout.splitlines()}
    assert figures >= {"images per epoch 1", "tokens of an image 20 on average"}
    assert f"warning: {len(rows) - 1} of {len(rows)} rows are skipped" in skipped.stdout
    assert "warning: [model.vision] is set, and no row has an image: val.data.columns.images names" in skipped.stdout


def test_settings_of_processors_whose_tokens_cannot_be_counted_are_one_line(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    save_checkpoint("smolvlm", tmp_path, tiny_model_dir)
    config = ModelConfig(name=str(tmp_path), vision={})
    tokenizer = setup_tokenizer(TokenizerConfig(name=str(tmp_path)), config)
    file = tmp_path / "preprocessor_config.json"
    whole = json.loads(file.read_text())
    for settings, fault in (
        ({"do_resize": False}, "do_resize = false, which is not supported"),
        ({"do_normalize": False}, "do_normalize = false, with which the model takes black tiles for padding"),
        ({"size": {"longest_edge": 70}}, "size.longest_edge = 70, which must be a multiple of .* = 28"),
    ):
        file.write_text(json.dumps(whole | settings))
        with pytest.raises(ModelError, match=fault):
            setup_images(config, tokenizer)
    file.write_text(json.dumps(whole | {"size": {"longest_edge": 70}, "do_image_splitting": False}))
    assert setup_images(config, tokenizer) is not None


def exports(*runs: Path) -> list[Path]:
    return [RunPaths(each).weight(8) for each in runs]


def test_two_processes_of_which_one_has_images_have_the_gradient_of_one(
    tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    start, results, file = tmp_path / "start", tmp_path / "results.pt", save_rows(tmp_path / "data")
    save_checkpoint("qwen3_vl", start, tiny_model_dir)
    base = {"name": str(start), "attn": "sdpa", "seq_len": 256, "vision": {}}
    settings = [base, {**base, "lora": {"rank": 4}}, {**base, "vision": {"tower_lr": 1e-3}}]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, SCRIPT, results, file, *map(json.dumps, settings)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = torch.load(results)
    for each in settings:
        expected, gradient = gradient_of(ModelConfig(**each), file, mesh), found[json.dumps(each)]
        assert gradient.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(gradient[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "stored", "vision"),
    [
        ("idefics3", None, {}),
        ("gemma3", "nf4", {"tower_lr": 1e-3}),
        ("qwen3_vl", "nf4 in the files", {}),
        ("qwen3_vl", None, {"tower_lr": 1e-3}),
    ],
)
def test_an_adapter_fits_the_class_in_peft(
    family: str, stored: str | None, vision: dict[str, Any], tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    start, adapter = tmp_path / "start", tmp_path / "adapter"
    save_checkpoint(family, start, tiny_model_dir)
    file = save_rows(tmp_path / "data")
    options: dict[str, Any] = {}
    if stored is not None:
        pytest.importorskip("bitsandbytes")
        # The tower stays as it is. Rows of `down_proj` and of Qwen's tower are not whole blocks of 64 values, which
        # bitsandbytes dequantizes wrongly on a CPU.
        tower = ["model.vision_tower", "model.multi_modal_projector"]
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            llm_int8_skip_modules=["lm_head", "down_proj", *(tower if stored == "nf4" else ["model.visual.blocks"])],
        )
    if stored == "nf4 in the files":
        AutoModelForImageTextToText.from_pretrained(start, **options).save_pretrained(start)
        options = {}
    _, whole, loss_of = reference(family, start, file, **options)
    in_4_bits = [
        module
        for path, module in whole.named_modules()
        if type(module).__name__ == "Linear4bit" and ".language_model." in path
    ]
    for layer in whole.modules():
        if type(layer).__name__ == "Linear4bit":
            layer.compute_dtype = torch.float32
    quantization = "nf4" if stored == "nf4" else None
    lora: dict[str, Any] = {"rank": 4, "alpha": 8.0, "target_modules": ["all-linear"]}
    config = ModelConfig(name=str(start), attn="sdpa", seq_len=256, vision=vision, lora=lora, quantization=quantization)
    model = setup_model(config, mesh)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == len(in_4_bits)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    save_adapter(gather_adapter(model, torch.float32), adapter)
    loaded = peft.PeftModel.from_pretrained(whole, adapter, is_trainable=True)
    whole.train(stored is not None)  # in evaluation mode, bitsandbytes may compute in bfloat16 on a CPU
    sums = losses_of(model, config, file)
    expected = [loss_of(row, is_trained) for row, (_, is_trained) in enumerate(sums)]
    assert [float(loss) for loss, _ in sums] == pytest.approx([float(loss) for loss in expected], rel=1e-5)
    torch.stack([loss for loss, _ in sums]).sum().backward()
    torch.stack(expected).sum().backward()
    ours = {name: full_tensor(each.grad) for name, each in model.named_parameters() if each.requires_grad}
    # A pooling head of the tower has no effect.
    theirs = {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in loaded.named_parameters()
        if each.requires_grad
    }
    assert len(ours) == len(theirs)
    for name, gradient in theirs.items():
        for old, new in {
            "base_model.model.": "",
            ".lora_A.default.weight": ".lora.A",
            ".lora_B.default.weight": ".lora.B",
        }.items():
            name = name.replace(old, new)
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))
    of_tower = any(part in name for name in theirs for part in ("vision", "visual"))
    assert of_tower is bool(vision)
    if stored is None:  # otherwise the published weights are others than those in 4 bits
        merged = config.model_copy(update={"lora": None, "adapter": str(adapter)})
        with torch.no_grad():
            found = [float(loss) for loss, _ in losses_of(setup_model(merged, mesh), merged, file)]
        assert found == pytest.approx([float(loss) for loss in expected], rel=1e-5)


def losses_of(model: Any, config: ModelConfig, file: Path) -> list[tuple[float, Any]]:
    """The loss of each row, and which of its tokens are trained."""
    tokenizer = setup_tokenizer(TokenizerConfig(name=config.name), config)
    images = setup_images(config, tokenizer)
    data = SFTDataConfig(name=str(file), shuffle=False, seq_len=256)
    make, entries = SampleMaker(data, tokenizer, images=images), setup_entries(data)
    samples = [make(entries.at(row)).sample for row in range(entries.row_count)]
    objective, device = CrossEntropy(images=images), torch.device("cpu")
    sums = [objective.sums(model, lay_out([each], 256, 256), device).losses[0] for each in samples]
    return [(loss, each.is_trained) for loss, each in zip(sums, samples, strict=True)]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"model": {"vision": {}, "cp": 2}}, "[vision] with cp = 2"),
        ({"model": {"vision": {}, "language_model_only": True}}, "language_model_only exports a part of it"),
        (
            {"model": {"vision": {"tower_lr": 1e-6}, "lora": {"loraplus_lr_ratio": 4}}},
            "tower_lr with lora.loraplus_lr_ratio",
        ),
        ({"model": {"vision": {}}, "data": {"overlong": "split"}}, "with data.overlong = 'split'"),
        ({"model": {"vision": {}}, "data": {"type": "fake"}}, "needs a dataset"),
        ({"model": {"vision": {"tower_lr": 1e-6}}, "optim": {"type": "muon"}}, "optim.type = 'muon'"),
    ],
)
def test_what_does_not_go_with_images_is_one_line(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(SFTConfig, overrides={"data": {"seq_len": 256}, **settings})
    assert fault in str(error.value)

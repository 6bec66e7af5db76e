"""The forecast of what a run writes, compared with what a run of the same kind leaves on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.checks.disk import disk_forecast, model_size
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.trainer.sft.run import run
from prime_rl.utils.files import size_text


@pytest.fixture
def base(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {"type": "fake", "input_ids": "random", "batch_size": 2, "seq_len": 64},
        "max_steps": 6,
        "output_dir": tmp_path / "out",
    }


def bytes_in(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def parameters_of(model_dir: Path) -> int:
    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(model_dir).parameters())


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_model_is_measured_from_its_headers(
    tiny_model_dir: Path, tmp_path: Path, dtype: torch.dtype, bytes_each: int
) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).to(dtype).save_pretrained(tmp_path / "model")
    size = model_size(str(tmp_path / "model"))
    assert size is not None
    assert (size.parameters, size.bytes_each) == (parameters_of(tiny_model_dir), bytes_each)


def test_a_model_of_the_hub_is_measured_in_its_cache(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc").symlink_to(tiny_model_dir)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_size("owner/name") == model_size(str(tiny_model_dir))


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x10\x00\x00\x00\x00\x00\x00\x00not json at all "])
def test_what_is_no_model_has_no_forecast(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert model_size(str(tmp_path)) is None
    assert model_size("no/such") is None


@pytest.mark.parametrize(
    ("ckpt", "checkpoints", "exports"),
    [
        (None, 0, 1),
        ({}, 1, 1),
        ({"interval": 1}, 2, 6),
        ({"interval": 2}, 2, 3),
        ({"interval": 4}, 2, 2),
        ({"interval": 1, "keep_last": 1}, 1, 1),
        ({"interval": 1, "keep_interval": 3}, 2, 2),
        ({"interval": 1, "weights": None}, 2, 0),
    ],
)
def test_a_run_leaves_what_was_forecast(
    base: dict[str, Any], ckpt: dict[str, Any] | None, checkpoints: int, exports: int
) -> None:
    config = SFTConfig(**base, ckpt=ckpt)
    (line,) = disk_forecast(config, config.output_dir)
    counts = [f"{count} {what}{'s' if count > 1 else ''} of" for count, what in ((exports, "export"),) if count]
    # One more checkpoint exists while it is written.
    counts += [f"{checkpoints + 1} checkpoints of"] if checkpoints else []
    assert all(count in line for count in counts), line
    assert ("export" in line) == bool(exports)
    run(config)
    kept = list((config.output_dir / "checkpoints").glob("step_*"))
    assert (len(kept), len(list((config.output_dir / "weights").glob("step_*")))) == (checkpoints, exports)
    state = 12 * parameters_of(Path(base["model"]["name"]))
    assert all(state <= bytes_in(path) <= 1.1 * state + 2**20 for path in kept)


def test_a_run_that_does_not_fit_is_warned_about(base: dict[str, Any]) -> None:
    layers = {"name": base["model"]["name"]}
    config = TrainerConfig(model=layers, max_steps=10**8, ckpt={"interval": 1}, device="cpu")
    (line,) = disk_forecast(config, base["output_dir"])
    assert line.startswith("warning: this run needs up to ")
    assert line.endswith("set ckpt.keep_last, a larger ckpt.interval or another output_dir")


def test_a_run_without_an_end_tells_the_size_of_each_export(base: dict[str, Any]) -> None:
    config = SFTConfig(**base | {"max_steps": None}, ckpt={"interval": 5})
    (line,) = disk_forecast(config, base["output_dir"])
    assert "3 checkpoints of" in line
    assert "for each export" in line


def test_sizes_of_small_models_are_not_zero() -> None:
    assert [size_text(size) for size in (0, 472_204, 10_400_000, 999_000_000, 1_500_000_000)] == [
        "1 MB",
        "1 MB",
        "10 MB",
        "999 MB",
        "1.5 GB",
    ]

"""Complete SFT runs on the tiny model."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from prime_rl.configs.sft import SFTConfig
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.sft.run import run
from prime_rl.utils.pydantic_config import dump_toml

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions whose answers repeat the question."""
    file = tmp_path_factory.mktemp("data") / "echo.jsonl"
    words = ["heart", "lung", "spleen", "aorta", "femur", "tibia", "iris", "uvula"]
    pairs = [f"{a} {b}" for a in words for b in words]
    rows = [
        {"prompt": [{"role": "user", "content": pair}], "completion": [{"role": "assistant", "content": pair}]}
        for pair in pairs
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def base(tiny_model_dir: Path, dataset: Path) -> dict[str, Any]:
    return {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {
            "name": str(dataset),
            "batch_size": 4,
            "micro_batch_size": 2,
            "seq_len": 64,
            "pack_function": "cat",  # rows without padding
        },
        "optim": {"lr": 3e-3},
        "scheduler": {"type": "linear", "warmup_steps": 2, "decay_steps": 2},
        "max_steps": 6,
    }


def run_sft(base: dict[str, Any], output_dir: Path, **changes: Any) -> int:
    return run(SFTConfig(**{**base, "output_dir": output_dir, **changes}))


def metrics_of(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunPaths(output_dir).metrics.read_text().splitlines()]


def losses_of(output_dir: Path) -> list[float]:
    return [record["loss/mean"] for record in metrics_of(output_dir)]


def weights_of(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(RunPaths(output_dir).weight(step) / "model.safetensors")


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_learns_reports_and_exports_weights(base: dict[str, Any], tmp_path: Path, capsys) -> None:
    assert run_sft(base, tmp_path, max_steps=30) == 0
    records = metrics_of(tmp_path)
    assert [record["step"] for record in records] == list(range(30))
    assert {record["source"] for record in records} == {"sft"}
    assert records[-1]["loss/mean"] < records[0]["loss/mean"] - 1
    assert records[-1]["progress/num_tokens"] == 30 * 4 * 64
    assert records[-1]["progress/epoch"] > 1
    named = {"optim/lr", "optim/grad_norm", "perf/peak_memory", "time/step", "progress/num_samples"}
    assert named <= records[0].keys()
    assert "perf/throughput" not in records[0]
    assert all(record["perf/throughput"] > 0 for record in records[1:])
    out = capsys.readouterr().out
    (first,) = (line for line in out.splitlines() if "SUCCESS Step 0 | Time: " in line)
    assert "tokens/s" not in first
    assert f"Loss: {records[-1]['loss/mean']:.4f}" in out
    assert "finished" in out
    assert AutoModelForCausalLM.from_pretrained(RunPaths(tmp_path).weight(30)).config.vocab_size == 128
    assert (RunPaths(tmp_path).rank_log(0)).read_text().count("Step ") == 30


def test_the_logged_rate_is_the_one_that_was_used(base: dict[str, Any], tmp_path: Path) -> None:
    run_sft(base, tmp_path)
    rates = [record["optim/lr"] / base["optim"]["lr"] for record in metrics_of(tmp_path)]
    assert rates == pytest.approx([1e-8, 0.5, 1, 1, 1, 1e-8])


def test_a_resumed_run_is_bit_identical(base: dict[str, Any], tmp_path: Path, capsys) -> None:
    base["model"]["name"] = str(shutil.copytree(base["model"]["name"], tmp_path / "model"))
    run_sft(base, tmp_path / "straight")
    run_sft(base, tmp_path / "halves", ckpt={"interval": 3})
    RunPaths(tmp_path / "halves").metrics.unlink()
    # The checkpoint holds all weights: the model's own are not read.
    file = tmp_path / "model" / "model.safetensors"
    save_file(
        {name: torch.full_like(each, torch.nan) for name, each in load_file(file).items()}, file, {"format": "pt"}
    )
    assert run_sft(base, tmp_path / "halves", ckpt={"resume_step": 3}) == 0
    assert losses_of(tmp_path / "halves") == losses_of(tmp_path / "straight")[3:]
    assert_same_weights(weights_of(tmp_path / "halves", 6), weights_of(tmp_path / "straight", 6))
    out = capsys.readouterr().out
    assert "step 3, 768 tokens" in out
    assert f"Read 0 of {len(load_file(file))} tensors from {tmp_path / 'model'}: the checkpoint holds the others" in out


def test_a_run_with_dropout_can_be_repeated(base: dict[str, Any], tmp_path: Path) -> None:
    base["model"]["lora"] = {"rank": 4, "dropout": 0.5}
    for name in ("one", "other"):
        torch.seed()  # as in a new process
        run_sft(base, tmp_path / name)
    assert losses_of(tmp_path / "one") == losses_of(tmp_path / "other")


def test_a_finished_run_resumed_says_so_and_does_nothing(base: dict[str, Any], tmp_path: Path) -> None:
    run_sft(base, tmp_path, ckpt={})
    before = metrics_of(tmp_path)
    assert run_sft(base, tmp_path, ckpt={"resume_step": -1}) == 0
    assert metrics_of(tmp_path) == before


def test_the_loss_does_not_depend_on_micro_batches(base: dict[str, Any], tmp_path: Path) -> None:
    # Fake samples fill exactly one row each, so only the division into micro-batches differs.
    first_steps = []
    for size in (1, 4):
        data = {"type": "fake", "input_ids": "random", "batch_size": 4, "micro_batch_size": size, "seq_len": 32}
        data["pack_function"] = "cat"  # the order of the samples
        run_sft(base, tmp_path / str(size), data=data, max_steps=4)
        first_steps.append(metrics_of(tmp_path / str(size))[0])
    for name in ("loss/mean", "optim/grad_norm"):
        assert first_steps[0][name] == pytest.approx(first_steps[1][name], rel=1e-5)


def failure_of(base: dict[str, Any], output_dir: Path, capsys, **changes: Any) -> str:
    """Run a config that fails with exit code 1, and return its single error line."""
    with pytest.raises(SystemExit) as stopped:
        run_sft(base, output_dir, **changes)
    assert stopped.value.code == 1
    captured = capsys.readouterr()
    errors = [line for line in captured.out.splitlines() if "ERROR" in line]
    assert len(errors) == 1, captured.out
    assert "Traceback" not in captured.out + captured.err
    return errors[0]


def test_user_errors_are_one_line_each(base: dict[str, Any], tmp_path: Path, capsys) -> None:
    def line(**changes: Any) -> str:
        return failure_of(base, tmp_path / "out", capsys, **changes)

    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": \n')
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"question": "abc"}\n')
    data = base["data"]
    assert "nowhere: no such directory" in line(model={"name": str(tmp_path / "nowhere")})
    assert "nowhere.jsonl: no such file" in line(data={**data, "name": str(tmp_path / "nowhere.jsonl")})
    assert "broken.jsonl:1" in line(data={**data, "name": str(broken)})
    assert "found the columns question" in line(data={**data, "name": str(texts)})
    assert "step_5 to resume from (complete steps: none)" in line(ckpt={"resume_step": 5})
    assert "lower optim.lr" in line(optim={"lr": 100.0, "weight_decay": 100.0}, scheduler={}, max_steps=40).lower()


def test_another_runs_checkpoints_are_never_overwritten(base: dict[str, Any], tmp_path: Path, capsys) -> None:
    run_sft(base, tmp_path, ckpt={})
    assert "holds the checkpoints of another run" in failure_of(base, tmp_path, capsys)
    assert run_sft(base, tmp_path, clean_output_dir=True, max_steps=4) == 0
    assert stable_steps(RunPaths(tmp_path).checkpoints) == []
    assert stable_steps(RunPaths(tmp_path).weights) == [4]


def test_signals_save_on_demand_and_at_the_end(base: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = SFTConfig(**{**base, "output_dir": out, "max_steps": None, "scheduler": {}, "ckpt": {}})
    dump_toml(config, tmp_path / "sft.toml")
    command = [sys.executable, "-m", "prime_rl.trainer.sft.train", "@", str(tmp_path / "sft.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_for("Step 1 ", process)
        process.send_signal(signal.SIGUSR1)
        wait_for("Saved ", process)
        wait_for("Step ", process)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 143
    steps = stable_steps(RunPaths(out).checkpoints)
    assert f"Stopped after {steps[-1]} steps; checkpoint in {RunPaths(out).checkpoint(steps[-1])}" in rest
    assert len(steps) == 2
    assert run_sft(base, out, max_steps=steps[-1] + 1, scheduler={}, ckpt={"resume_step": -1}) == 0
    assert metrics_of(out)[-1]["step"] == steps[-1]


def wait_for(text: str, process: subprocess.Popen) -> None:
    assert any(text in line for line in process.stdout), f"the run ended before it said {text!r}"


def test_the_time_of_a_checkpoint_that_is_both_the_best_and_due_is_reported(
    base: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    val = {"interval": 1, "data": {"name": base["data"]["name"]}}
    run_sft(base, out, max_steps=2, scheduler={}, val=val, ckpt={"keep_best": True, "interval": 1})
    steps = [record for record in metrics_of(out) if "loss/mean" in record]
    assert [step["time/save_ckpt"] > 0 for step in steps] == [False, True]


def test_two_processes_train_like_one_and_export_how_the_base_model_generates(
    base: dict[str, Any],
    tiny_model_dir: Path,
    tmp_path: Path,
    assert_two_processes_train_like_one: Callable[[SFTConfig], None],
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2, 50], "top_k": 7}))
    out = tmp_path / "out"
    assert_two_processes_train_like_one(SFTConfig(**{**base, "model": {"name": str(model)}, "output_dir": out}))
    exported = GenerationConfig.from_pretrained(RunPaths(out / "straight").weight(6))
    assert (exported.eos_token_id, exported.top_k) == ([0, 2, 50], 7)


def test_exported_weights_stop_at_the_token_that_ends_the_answers(
    base: dict[str, Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    """As with a base model, whose text ends with another token than the messages of its chat template."""
    model, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(tiny_model_dir, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(model)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(model)

    assert run_sft({**base, "model": {"name": str(model), "attn": "sdpa"}}, out, max_steps=5) == 0
    exported = GenerationConfig.from_pretrained(RunPaths(out).weight(5))
    assert exported.eos_token_id == [tokenizer.eos_token_id, end_id]

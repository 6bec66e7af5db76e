"""The receipt of a resumed run says what was restored, and that is what was saved: SFT, and RL of an adapter."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from prime_rl.run.paths import RunPaths

ROOT = Path(__file__).resolve().parents[1]
LORA = ROOT / "examples" / "reverse_text" / "rl_lora_cpu.toml"
TINY = ROOT / "examples" / "reverse_text" / "checkpoint"


def train(command: str, out: Path, *options: object) -> str:
    program = Path(sys.executable).with_name("medarc_train")
    words = [program, command, *options, "--output-dir", out, "--device", "cpu"]
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def receipt(paths: RunPaths, number: int) -> dict[str, Any]:
    return json.loads(paths.receipt(number).read_text())


def adapters_served(paths: RunPaths) -> list[int]:
    """Versions of the adapter that the engine has loaded after the first."""
    log = paths.log("inference").read_text()
    return [int(version) for version in re.findall(r"Adapter r16-a32\.0: version ([1-9]\d*) live", log)]


def norm(tensors: list[torch.Tensor]) -> float:
    return sum(torch.linalg.vector_norm(each, dtype=torch.float64).item() ** 2 for each in tensors) ** 0.5


def assert_is_as_saved(trainer: dict[str, Any], paths: RunPaths, step: int, scratch: Path) -> None:
    """Compare the trainer's section with the files of its checkpoint, read by other means."""
    directory = paths.trainer_checkpoint(step)
    dcp_to_torch_save(directory, scratch)
    saved = torch.load(scratch, weights_only=True)["policy"]
    own = torch.load(directory / "rank_0.pt", weights_only=True)
    assert {key: trainer[key] for key in ("step", "tokens", "samples")} == own["progress"]
    states = saved["optimizer"]["state"].values()
    optimizer = trainer["policy"]["optimizer"]
    assert {int(state["step"]) for state in states} == {optimizer["updates"]} == {step}
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizer["norms"][name] == pytest.approx(norm([state[name] for state in states]), rel=1e-12)
    assert trainer["policy"]["schedule"]["step"] == own["schedulers"]["policy"]["last_epoch"] == step
    assert trainer["random_xxh3_64"] == {
        "python": xxhash.xxh3_64_hexdigest(repr(own["random"]["python"]).encode()),
        "torch": xxhash.xxh3_64_hexdigest(own["random"]["torch"].numpy().tobytes()),
    }
    files = trainer["files"]["xxh3_128"]
    assert {"trainer/rank_0.pt", "trainer/.metadata", "trainer/__0_0.distcp"} < files.keys()
    for name, digest in files.items():
        assert xxhash.xxh3_128_hexdigest((paths.checkpoint(step) / name).read_bytes()) == digest


@pytest.mark.slow
def test_the_receipt_of_sft_says_what_was_saved(tmp_path: Path) -> None:
    numbers = random.Random(0)
    rows = [{"prompt": str(numbers.random()), "completion": str(numbers.random())} for _ in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sft.toml").write_text(
        f'[model]\nname = "{TINY}"\nattn = "sdpa"\n[ckpt]\ninterval = 1\nkeep_interval = 1\n'
        f'[data]\nname = "{tmp_path}/rows.jsonl"\nbatch_size = 2\nseq_len = 128\n'
    )
    paths = RunPaths(tmp_path / "out")
    train("sft", paths.root, tmp_path / "sft.toml", "--max-steps", 3)
    (paths.trainer_checkpoint(3) / "rank_0.pt").write_bytes(b"")  # the newest is damaged: the one before is taken
    shown = train("sft", paths.root, tmp_path / "sft.toml", "--max-steps", 4, "--resume", "auto", "--optim.lr", "1e-5")

    found = receipt(paths, 2)
    assert (found["attempt"], found["asked"], found["step"], found["outcome"]) == (2, "auto", 2, "complete")
    (passed_over,) = found["passed_over"]
    assert "step_3/trainer/rank_0.pt has 0 bytes" in passed_over
    changed = {change["key"]: (change["now"], change["becomes"]) for change in found["changed_keys"]}
    assert changed == {"optim.lr": ("1e-05", "applied"), "max_steps": ("4", "applied")}
    trainer = found["parts"]["trainer"]
    assert_is_as_saved(trainer, paths, 2, tmp_path / "saved.pt")
    assert min(trainer["policy"]["optimizer"]["norms"].values()) > 0
    own = torch.load(paths.trainer_checkpoint(2) / "rank_0.pt", weights_only=True)
    assert trainer["data"]["entry"] == own["data"]["position"]
    assert trainer["data"]["verified"] == "data, tokenizer, chat template and packing are unchanged"
    assert f"attempt 2 continues at step 2 in every part (trainer); receipt: {paths.receipt(2)}" in shown
    log = paths.log("trainer").read_text()
    assert log.index("==== attempt 1, trainer started") < log.index("==== attempt 2, trainer started")


@pytest.mark.slow
def test_rl_of_an_adapter_is_resumed_and_its_receipt_says_what_was_saved_and_that_all_parts_stand_at_one_step(
    tmp_path: Path,
) -> None:
    small = "--orchestrator.batch-size 8 --orchestrator.rollouts-per-example 4 --max-async-level 0 "
    small += "--ckpt.interval 1 --ckpt.keep-interval 1"
    paths = RunPaths(tmp_path / "out")
    train("rl", paths.root, LORA, *small.split(), "--max-steps", 2)
    published = paths.orchestrator.broadcast(2)
    assert {path.name for path in published.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "STABLE"}
    assert adapters_served(paths) == [1]
    shutil.rmtree(paths.orchestrator.checkpoint(2).parent)  # the newest of one part is gone: the newest common is taken
    # The resumed attempt saves step 1 again, with what its ledger holds by then.
    part = shutil.copytree(paths.orchestrator.checkpoint(1).parent, tmp_path / "step_1") / "orchestrator"
    shown = train("rl", paths.root, LORA, *small.split(), "--max-steps", 3, "--resume", "latest")

    found = receipt(paths, 2)
    assert (found["step"], found["outcome"]) == (1, "complete")
    assert found["gpus"] == {}
    assert found["passed_over"] == [
        f"the trainer's step 2 has no matching checkpoint of the orchestrator, {paths.orchestrator.checkpoint(2)}"
    ]
    assert f"warning: resuming from step 1: {found['passed_over'][0]}" in shown
    assert "Resumed at step 1" in paths.log("orchestrator").read_text()
    assert adapters_served(paths) == [1, 1, 2]
    records = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    steps = [record for record in records if record["source"] == "trainer"]
    assert [record["step"] for record in steps] == [0, 1, 1, 2]
    # No lag between sampling and training: what differs is only what the engine's adapter differs from the trainer's.
    assert max(record["mismatch_kl/mean"] for record in steps) < 1e-6
    assert paths.weight(3).is_dir()
    trainer, orchestrator = found["parts"]["trainer"], found["parts"]["orchestrator"]
    assert trainer["step"] == orchestrator["step"] == orchestrator["policy_version"] == 1
    assert "attempt 2 continues at step 1 in every part (trainer, orchestrator)" in shown
    assert_is_as_saved(trainer, paths, 1, tmp_path / "saved.pt")

    assert orchestrator["progress"] == json.loads((part / "progress.json").read_text())
    buffer = json.loads((part / "buffer.json").read_text())
    assert (orchestrator["buffer"]["seed"], orchestrator["buffer"]["draws"]) == (buffer["seed"], buffer["draws"])
    assert len(orchestrator["buffer"]["to_draw_again"]) == len(buffer["waiting"])
    for name, digest in orchestrator["files"]["xxh3_128"].items():
        assert xxhash.xxh3_128_hexdigest((part.parent / name).read_bytes()) == digest
    assert orchestrator["ledger"]["trained"] == orchestrator["progress"]["total_problems"]
    assert orchestrator["ledger"]["skipped"] == orchestrator["ledger"]["twice"] == 0

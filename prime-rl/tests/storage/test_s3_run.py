"""A whole SFT run on S3: model, data and output; killed in an upload, continued on a machine that has nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from s3_server import CREDENTIALS, Proxy, only

from prime_rl.run.paths import RunPaths
from prime_rl.storage import S3, S3Name, upload_tree
from prime_rl.storage.copies import RemoteRun
from prime_rl.storage.staging import CACHE_VARIABLE

pytestmark = pytest.mark.slow

SFT = Path(sys.executable).with_name("sft")
CONFIG = """
device = "cpu"
max_steps = {max_steps}
output_dir = "{output}"
[model]
name = "{model}"
attn = "sdpa"
[data]
name = "{data}"
batch_size = 4
micro_batch_size = 2
seq_len = 64
[optim]
lr = 3e-3
[ckpt]
interval = 2
keep_last = 1
{storage}
"""
STORAGE = "[storage]\nupload_every = 1\n"


@pytest.fixture
def inputs(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Path]:
    rows = tmp_path / "inputs" / "rows.jsonl"
    rows.parent.mkdir()
    pairs = [f"{one} {other}" for one in ("heart", "lung", "aorta") for other in ("femur", "iris", "uvula", "tibia")]
    rows.write_text("".join(json.dumps({"prompt": pair, "completion": pair[::-1]}) + "\n" for pair in pairs))
    return {"model": tiny_model_dir, "data": rows}


def started(machine: Path, words: tuple[str, ...] = (), **values: object) -> subprocess.Popen[str]:
    """`sft` in a directory that stands for a machine: with a cache and outputs of its own."""
    machine.mkdir(exist_ok=True)
    config = machine / "sft.toml"
    config.write_text(CONFIG.format(**{"storage": STORAGE, **values}), encoding="utf-8")
    env = {**os.environ, CACHE_VARIABLE: str(machine / "cache")}
    return subprocess.Popen(
        [SFT, "@", str(config), *words],
        cwd=machine,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    output = process.communicate()[0]
    assert process.returncode == code, output
    return output


def losses_of(root: Path) -> dict[int, float]:
    """Loss by step; a repeated step has the last one."""
    records = map(json.loads, RunPaths(root).metrics.read_text().splitlines())
    return {record["step"]: record["loss/mean"] for record in records if "loss/mean" in record}


def test_a_run_on_s3_survives_the_kill_of_its_launcher_in_an_upload(
    s3: S3, proxy: Proxy, bucket: str, inputs: dict[str, Path], tmp_path: Path
) -> None:
    upload_tree(s3, inputs["model"], S3Name(bucket, "models/tiny"))
    s3.upload(inputs["data"], S3Name(bucket, "data/rows.jsonl"))
    remote = {"model": f"s3://{bucket}/models/tiny", "data": f"s3://{bucket}/data/rows.jsonl"}
    output = S3Name(bucket, "runs/one")
    local = tmp_path / "local"
    reference = started(local, max_steps=6, output=local / "out", storage="", **inputs)
    first, second = tmp_path / "first", tmp_path / "second"
    work_dir = Path("outputs", "s3", bucket, "runs", "one")

    lines = finished(started(first, max_steps=2, output=output, **remote))
    assert f"model.name = s3://{bucket}/models/tiny: " in lines
    assert lines.splitlines()[-1].startswith(f"uploaded to {output}: ")
    finished(reference)

    # The next one is killed while the files of a later step are on their way.
    reached, go_on = threading.Event(), threading.Event()

    def on_hold(handler: object) -> bool:
        reached.set()
        go_on.wait()
        return False

    for step in (4, 6):
        proxy.disturb(only("PUT", f"checkpoints/step_{step}/trainer", on_hold), times=1000)
    killed = started(first, ("--ckpt.resume-step=latest",), max_steps=6, output=output, **remote)
    reached.wait()
    killed.kill()
    go_on.set()
    killed.communicate()
    proxy.calm()
    assert RemoteRun(s3, output, RunPaths(first / work_dir)).steps == [2], "no step is half there"

    lines = finished(started(second, ("--ckpt.resume-step=latest",), max_steps=6, output=output, **remote))
    assert f"{output}: downloading checkpoints/step_2" in lines
    assert losses_of(second / work_dir) == losses_of(local / "out")
    assert RemoteRun(s3, output, RunPaths(second / work_dir)).steps == [2, 4, 6]
    assert not (second / work_dir / "checkpoints" / "step_2").exists(), "keep_last counts once it is on S3"

    lines = finished(started(second, ("--ckpt.resume-step=auto",), max_steps=6, output=output, **remote))
    assert "is finished: its last checkpoint is step 6" in lines
    lines = finished(started(tmp_path / "third", max_steps=6, output=output, **remote), code=2)
    assert f"error: {output} holds the checkpoints of another run" in lines
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode() not in file.read_bytes(), file

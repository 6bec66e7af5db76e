"""Full disk: existing files stay intact, the run fails with one line, and it continues once there is space."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from prime_rl.configs.sft import SFTConfig
from prime_rl.monitors import JsonlMonitor
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.process.errors import exit_on_error
from prime_rl.trainer.sft.run import run
from prime_rl.utils.files import disk_fault
from prime_rl.utils.logger import get_logger, setup_logger

Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Creates a file system of the given size in KiB. Calling it again resizes the file system."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small file system")
    root = tmp_path / "small"
    root.mkdir()

    def resized(size_kib: int) -> Path:
        options = f"size={size_kib}k" + (",remount" if root.is_mount() else "")
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", root], capture_output=True, text=True)
        if mounted.returncode != 0:
            pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
        return root

    yield resized
    if root.is_mount():
        # The last run's log is still open.
        subprocess.run(["umount", "--lazy", root], check=True)


def fill(root: Path) -> Path:
    """Fill the remaining space."""
    file = root / "filler"
    with file.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError:
            return file


@pytest.fixture
def config(tiny_model_dir: Path) -> dict[str, Any]:
    return {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {"type": "fake", "input_ids": "random", "batch_size": 2, "seq_len": 64},
        "max_steps": 6,
    }


def errors_of(config: SFTConfig, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The error lines of a run that fails with exit code 1 and no traceback."""
    with pytest.raises(SystemExit) as stopped:
        run(config)
    assert stopped.value.code == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return [line for line in captured.out.splitlines() if "ERROR" in line]


@pytest.mark.parametrize("async_save", [False, True], ids=["between_steps", "in_the_background"])
def test_the_last_good_checkpoint_stays_intact_and_can_be_resumed(
    async_save: bool, config: dict[str, Any], disk: Disk, tmp_path: Path, capsys
) -> None:
    # A checkpoint takes 1.1 MiB, an export 0.4.
    root = disk(4096)
    paths = RunPaths(root / "out")
    ckpt = {"interval": 1, "async_save": async_save}
    errors = errors_of(SFTConfig(**config, output_dir=paths.root, ckpt=ckpt), capsys)
    assert len(errors) == 1
    assert "could not write a checkpoint; earlier checkpoints are complete: " in errors[0]
    assert "No space left on device" in errors[0]
    good = stable_steps(paths.checkpoints)
    assert good
    assert good[-1] < 6
    assert [path.name for path in paths.checkpoints.iterdir() if path.name.endswith(".partial")] == []
    assert paths.rank_log(0).read_text().count("could not write a checkpoint") == 1

    disk(65_536)
    resumed = {"resume_step": -1, "interval": 1}
    assert run(SFTConfig(**config, output_dir=paths.root, ckpt=resumed)) == 0
    assert run(SFTConfig(**config, output_dir=tmp_path / "straight")) == 0
    one, other = (
        load_file(RunPaths(out).weight(6) / "model.safetensors") for out in (paths.root, tmp_path / "straight")
    )
    assert all(one[name].equal(other[name]) for name in other)


def test_weights_that_do_not_fit_are_one_line(config: dict[str, Any], disk: Disk, capsys) -> None:
    paths = RunPaths(disk(200) / "out")
    errors = errors_of(SFTConfig(**config, output_dir=paths.root), capsys)
    assert len(errors) == 1
    assert "the disk is full: " in errors[0]
    assert stable_steps(paths.weights) == []
    assert len(paths.metrics.read_text().splitlines()) == 6


def test_a_disk_that_has_become_read_only_is_one_line_and_loses_nothing(config, disk: Disk, capsys) -> None:
    root = disk(8192)
    paths = RunPaths(root / "out")
    ckpt = {"interval": 1, "weights": None}
    assert run(SFTConfig(**config | {"max_steps": 2}, output_dir=paths.root, ckpt=ckpt)) == 0
    setup_logger("info")  # closes the run's log
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)
    resumed = SFTConfig(**config | {"max_steps": 4}, output_dir=paths.root, ckpt=ckpt | {"resume_step": -1})
    assert len(errors := errors_of(resumed, capsys)) == 1
    assert "Read-only file system" in errors[0]
    subprocess.run(["mount", "-o", "remount,rw", root], check=True)
    assert stable_steps(paths.checkpoints) == [1, 2]
    assert run(resumed) == 0


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ENOSPC, "the disk is full: [Errno 28] No space left on device: 'model.safetensors'"),
        (errno.EDQUOT, "the disk quota is used up: [Errno 122] Disk quota exceeded: 'model.safetensors'"),
        (errno.EROFS, "the disk is read-only: [Errno 30] Read-only file system: 'model.safetensors'"),
        (errno.EIO, "the disk failed: [Errno 5] Input/output error: 'model.safetensors'"),
    ],
)
def test_every_error_of_a_disk_is_one_line(number: int, fault: str, capsys) -> None:
    setup_logger("info")
    with pytest.raises(SystemExit), exit_on_error():
        raise OSError(number, os.strerror(number), "model.safetensors")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f"ERROR {fault}")
    # What Rust and C++ raise has no number.
    assert disk_fault(RuntimeError(f"write failed:\n{os.strerror(number)}")) is not None
    assert disk_fault(OSError(errno.ENOENT, "No such file", "model.safetensors")) is None


def test_lost_metrics_are_reported_and_writing_continues_with_space(disk: Disk, capsys) -> None:
    root = disk(64)
    setup_logger("info")
    monitor = JsonlMonitor(root / "metrics.jsonl", "sft")
    monitor.log({"loss/mean": 1.0}, 0)
    filler = fill(root)
    # A few more lines fit in the file's last block.
    for step in range(1, 200):
        monitor.log({"loss/mean": 1.0}, step)
    filler.unlink()
    monitor.log({"loss/mean": 2.0}, 200)
    monitor.close()
    out = capsys.readouterr().out
    assert out.count("Cannot write to") == 1
    assert "lines could not be written to" in out
    records = []
    for line in (root / "metrics.jsonl").read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            # The one line that was cut off when the disk was full.
            records.append(None)
    assert records.count(None) <= 1
    assert records[0]["step"] == 0
    assert records[-1] == records[-1] | {"step": 200, "loss/mean": 2.0}


def test_a_log_that_cannot_be_written_is_one_warning(disk: Disk, capsys) -> None:
    root = disk(64)
    setup_logger("info", root / "run.log")
    filler = fill(root)
    for number in range(200):
        get_logger().info(f"line {number} of many that the disk has no room for")
    captured = capsys.readouterr()
    assert captured.out.count("of many") == 200
    assert captured.err == f"warning: cannot write to the log {root / 'run.log'}: No space left on device\n"
    filler.unlink()
    get_logger().info("room again")
    assert (root / "run.log").read_text().splitlines()[-1].endswith(" INFO room again")
    setup_logger("info")

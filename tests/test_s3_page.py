"""The commands of docs/s3.md, against a real S3 server."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from s3_server import Proxy, moto_server, proxy, s3, shared_proxy
from typer.testing import CliRunner

from medarc_rl.errors import UsageError
from medarc_rl.medarc_train import app
from medarc_rl.stored import local_weights
from prime_rl.run.paths import RunPaths
from prime_rl.storage import S3, S3Name, upload_tree
from prime_rl.storage.staging import CACHE_VARIABLE
from prime_rl.utils.files import replacing_directory

__all__ = ["moto_server", "proxy", "s3", "shared_proxy"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "s3.md"
COMMANDS = [
    shlex.split(line)[3:]
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("uv run medarc_train")
]
INPUTS = {
    "models/Qwen3-0.6B/config.json": b'{"model_type": "qwen3"}',
    "models/Qwen3-0.6B/model.safetensors": b"weights",
    "data/train.jsonl": b'{"prompt": "a", "completion": "b"}\n',
}


@pytest.fixture
def place(s3: S3, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Name:
    """The page's bucket, and a directory with its config."""
    s3.client.create_bucket(Bucket="bucket")
    for key, data in INPUTS.items():
        s3.write(data, S3Name("bucket", key))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    Path("sft.toml").write_text(
        'device = "cpu"\nmax_steps = 1\n[data]\nname = "s3://bucket/data/train.jsonl"\nseq_len = 64\n[ckpt]\n'
    )
    return S3Name("bucket", "runs/first")


def test_the_page_s_commands_do_what_it_says(s3: S3, place: S3Name) -> None:
    start, resume = COMMANDS
    shown = CliRunner().invoke(app, [*start, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "model.name = s3://bucket/models/Qwen3-0.6B: 2 files, 1 MB, downloaded when the run starts" in shown.output
    s3.write(b"", place.below("checkpoints/step_2/STABLE"))
    shown = CliRunner().invoke(app, [*resume, "--dry-run"])
    assert shown.exit_code == 2
    assert f"error: {place} holds step 2, which a dry run does not download" in shown.output
    shown = CliRunner().invoke(app, [*start, "--model.name", "s3://bucket/models/none"])
    assert shown.exit_code == 2
    assert shown.output.endswith(
        "error: model.name: s3://bucket/models/none: there is no object and no prefix with this name\n"
    )
    assert "outputs" not in [path.name for path in Path.cwd().iterdir()] or not list(Path("outputs").rglob("logs"))


def test_a_trace_of_a_run_on_s3_is_written_here(s3: S3, place: S3Name) -> None:
    paths = RunPaths(Path("there"))
    event = {"name": "step", "ph": "X", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
    s3.write(b"max_steps = 1\n", place.below("configs/sft.toml"))
    shown = CliRunner().invoke(app, ["trace", str(place)])
    assert (shown.exit_code, shown.output.count("error: ")) == (2, 1), shown.output
    recorded = paths.traces / "trainer.1.jsonl"
    s3.write(f"{json.dumps(event)}\n".encode(), place.below(recorded.relative_to(paths.root).as_posix()))
    shown = CliRunner().invoke(app, ["trace", str(place)])
    assert shown.exit_code == 0, shown.output
    assert Path("first-trace.json").is_file()


def test_a_run_that_goes_on_elsewhere_is_unknown_here(s3: S3, place: S3Name) -> None:
    started = {"attempt": 1, "started": "2026-01-01T00:00:00+00:00", "host": "node7"}
    s3.write(b"max_steps = 1\n", place.below("configs/sft.toml"))
    s3.write(json.dumps(started).encode(), place.below("attempts/001.json"))
    shown = CliRunner().invoke(app, ["watch", str(place), "--once", "--json"])
    assert json.loads(shown.output)["state"]["name"] == "unknown", shown.output


def test_weights_on_s3_are_copied_for_an_evaluation(s3: S3, place: S3Name) -> None:
    with replacing_directory(RunPaths(Path("there")).weight(4)) as scratch:
        (scratch / "model.safetensors").write_bytes(b"weights")
    upload_tree(s3, Path("there"), place)
    for key in ("configs/sft.toml", "weights/step_8/half"):
        s3.write(b"", place.below(key))
    lines: list[str] = []
    run = RunPaths(Path(local_weights(str(place), None, lines.append)))
    assert [path.name for path in run.weights.iterdir()] == ["step_4"]
    assert sum("weights/step_4" in line for line in lines) == 1
    local_weights(str(place), None, lines.append)
    assert sum("weights/step_4" in line for line in lines) == 1, "it is here"
    assert Path(local_weights("s3://bucket/models/Qwen3-0.6B", None, lines.append), "config.json").is_file()
    with pytest.raises(UsageError, match="there is no object"):
        local_weights("s3://bucket/models/none", None, lines.append)
    words = ["lm-eval", str(place), "--tasks", "x", "--watch"]
    shown = CliRunner().invoke(app, words)
    assert (shown.exit_code, "cannot be followed: leave out --watch" in shown.output) == (2, True), shown.output

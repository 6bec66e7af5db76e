"""The commands of docs/s3.md, against a real S3 server."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from s3_server import Proxy, moto_server, proxy, s3, shared_proxy
from typer.testing import CliRunner

from medarc_rl.medarc_train import app
from prime_rl.storage import S3, S3Name

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
    Path("sft.toml").write_text(
        'device = "cpu"\nmax_steps = 1\n[data]\nname = "s3://bucket/data/train.jsonl"\n[ckpt]\n'
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
        "error: model.name: s3://bucket/models/none: nothing is there, neither an object nor a prefix with objects\n"
    )
    assert "outputs" not in [path.name for path in Path.cwd().iterdir()] or not list(Path("outputs").rglob("logs"))

"""docs/choices.md: multiple choice from a CSV file, by the configs and commands of the page."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "choices.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SMALL = ("--model.name", "examples/reverse_text/checkpoint", "--device", "cpu")
TRAIN = ("--max-steps", "1", "--seq-len", "256", "--orchestrator.batch-size", "8", "--orchestrator.sampling.max-tokens")


def test_it_trains_and_evaluates_by_the_page(tmp_path: Path) -> None:
    """With a tiny model, which answers nonsense. The last command needs the weights of the run before."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    header, row = next(text for kind, text in BLOCKS if kind == "csv").splitlines()
    rows = [f"{number}. {row}" for number in range(8)]
    (tmp_path / "train.csv").write_text("\n".join([header, *rows]), encoding="utf-8-sig")  # as Excel saves it
    (tmp_path / "test.csv").write_text("\n".join([header, *(f"Test {each}" for each in rows)]), encoding="utf-8")
    trains, scores = (text for kind, text in BLOCKS if kind == "toml")
    (tmp_path / "choices.toml").write_text(trains, encoding="utf-8")
    (tmp_path / "choices_eval.toml").write_text(scores, encoding="utf-8")
    for line in "".join(text for kind, text in BLOCKS if kind == "bash").splitlines():
        program, *words = shlex.split(line.removeprefix("uv run "))
        more = (*TRAIN, "8") if words[1] == "choices.toml" else ("--sampling.max-tokens", "8")
        words = [str(Path(sys.executable).with_name(program)), *words, *SMALL, *more]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        if "--preflight" in words:
            assert "scurvy?\\nA. A\\nB. B12\\nC. C\\nD. D\\nEnd with: The answer is (letter)." in done.stdout
    metrics = (tmp_path / "outputs" / "choices" / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"eval/choices-test/avg@1"' in metrics
    (code,) = (text for kind, text in BLOCKS if kind == "python")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    first, *_ = map(json.loads, (tmp_path / "choices.jsonl").read_text(encoding="utf-8").splitlines())
    assert first["prompt"].startswith("0. Which vitamin prevents scurvy?\nA. A\nB. B12")
    assert first["response"] == "The answer is (C)."

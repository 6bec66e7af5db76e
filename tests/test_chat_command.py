"""`medarc_train chat`: from a model that a run left to its answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medarc_rl.medarc_train import app

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "examples" / "reverse_text" / "checkpoint"


def chat(*words: object) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("medarc_train")
    return subprocess.run([program, "chat", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_prompt_is_answered_by_both_models_under_their_names() -> None:
    greedy = ["--temperature", "0", "--max-tokens", "40", "--device", "cpu"]
    done = chat(CHECKPOINT, "--base", f"{CHECKPOINT}/", "--prompt", "clinic cramp", *greedy)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[{CHECKPOINT}/]\nclinic cramp\n\n[{CHECKPOINT}]\nclinic cramp\n\n"


@pytest.mark.slow
def test_a_model_without_a_base_is_told_once_it_is_loaded(tmp_path: Path) -> None:
    done = chat(CHECKPOINT, "--prompt", "a", "--max-tokens", "2", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "warning: chatting without the base model: name one with --base\n")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    done = chat(tmp_path, "--prompt", "a", "--device", "cpu")
    assert (done.returncode, "no base model" in done.stderr) == (1, False)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "Missing argument 'WEIGHTS'."),
        (["/gone"], "/gone: no such directory"),
        ([ROOT / "examples"], f"{ROOT / 'examples'}: the folder has no config.json"),
        (["examples/revrese_text"], "examples/revrese_text: no such directory; did you mean examples/reverse_text?"),
        (["examples/nope/weights"], "examples/nope/weights: no such directory"),
        ([CHECKPOINT, "--base", "/gone"], "--base /gone: no such directory"),
        ([CHECKPOINT, "--base", CHECKPOINT, "--no-base"], "--base and --no-base exclude each other: give one"),
        ([CHECKPOINT, "--chat-template", "gone.jinja"], "--chat-template = 'gone.jinja': no such file"),
        ([CHECKPOINT, "--temprature", "1"], "No such option: --temprature"),
        ([CHECKPOINT, "--temperature", "-1"], "'--temperature'"),
    ],
)
def test_a_mistake_is_one_line(words: list[object], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["chat", *map(str, words)])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert fault in line
    assert done.stdout == ""

"""docs/use_model.md: its Python code loads what a run exports. vLLM, llama.cpp and the hub are not asked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "use_model.md").read_text(encoding="utf-8")
TRANSFORMERS, PEFT = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def python(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_transformers_and_peft_load_an_export(tmp_path: Path) -> None:
    config = "examples/reverse_text/sft_lora_cpu.toml"
    program = str(Path(sys.executable).with_name("medarc_train"))
    short = ["--max-steps", "2", "--ckpt.interval", "2", "--scheduler.type", "constant"]
    python(program, "sft", config, *short, "--output-dir", str(tmp_path))
    export = str(tmp_path / "weights" / "step_2")
    assert python("-c", re.sub(r"outputs/[\w-]+/weights/step_\d+", export, TRANSFORMERS)).strip()
    loaded = re.sub(r"outputs/[\w-]+/weights/step_\d+", export, PEFT) + "print(type(merged).__name__)\n"
    assert "Qwen3ForCausalLM" in python("-c", loaded)

"""Every shipped example works: each file's own command is dry-run, and the CPU files are run."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from medarc_rl import medarc_slurm
from prime_rl.history.catalog import is_described
from prime_rl.history.rollouts import KeptRollouts
from prime_rl.run.paths import RunPaths

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
REVERSE_TEXT = EXAMPLES / "reverse_text"
TOML_FILES = [path for kind in ("rl", "sft", "dpo", "rm") for path in sorted(EXAMPLES.rglob(f"{kind}*.toml"))]


def header_command(path: Path) -> list[str]:
    """The words behind `uv run` in the comment at the top of a TOML file."""
    line = next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#   uv run "))
    return shlex.split(line.removeprefix("#   uv run "))


def run_command(*words: object) -> subprocess.CompletedProcess[str]:
    """Run one of the wrapper's commands from the repository's root, as the READMEs say."""
    executable = Path(sys.executable).with_name(str(words[0]))
    arguments = [str(word) for word in words[1:]]
    return subprocess.run([executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def metric_values(output_dir: Path, source: str, name: str) -> list[float]:
    records = map(json.loads, (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record[name] for record in records if record["source"] == source and name in record]


def metrics_without_description(output_dir: Path) -> set[str]:
    """Names in `metrics.jsonl` that docs/metrics.md lacks."""
    records = map(json.loads, (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    names = {name for record in records for name in record} - {"time", "source", "step"}
    return {name for name in names if not is_described(name)}


@pytest.mark.parametrize("path", TOML_FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_the_command_in_the_header_of_every_example_is_dry_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    _, kind, *arguments = header_command(path)
    output_dir = arguments.index("--output-dir") + 1
    arguments[output_dir] = str(tmp_path)
    result = CliRunner().invoke(medarc_slurm.app, [kind, *arguments, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("sbatch ")
    assert (tmp_path / f"{kind}.sh").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("folder", [REVERSE_TEXT, EXAMPLES / "agents"], ids=lambda folder: folder.name)
def test_the_shipped_inputs_are_what_their_script_makes(folder: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, folder / "make_inputs.py", "--to", tmp_path], check=True)
    for made in filter(Path.is_file, tmp_path.rglob("*")):
        shipped = folder / made.relative_to(tmp_path)
        assert made.read_bytes() == shipped.read_bytes(), shipped.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("reverse-text", {}),
        ("reverse-text", {"max_terms": 1, "seed": 3}),
        ("med-calc", {}),
        ("med-calc", {"calculators": ["map"], "difficulty": "easy", "style": "compact", "num_examples": 4000}),
    ],
)
def test_no_prompt_of_an_evaluation_is_for_training(name: str, arguments: dict[str, Any]) -> None:
    import verifiers

    environment = verifiers.load_environment(name, **arguments)
    rows, held_out = environment.get_dataset(), environment.get_eval_dataset()
    assert len(held_out) == len(rows) // 10
    assert not set(held_out["question"]) & set(rows["question"])


def test_the_sft_example_trains_and_exports(tmp_path: Path) -> None:
    config = REVERSE_TEXT / "sft_cpu.toml"
    shorter = ("--max-steps", "8", "--scheduler.warmup-steps", "2", "--scheduler.decay-steps", "2")
    result = run_command("medarc_train", "sft", "@", config, "--output-dir", tmp_path, *shorter)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = metric_values(tmp_path, "sft", "loss/mean")
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert metrics_without_description(tmp_path) == set()
    shipped = {path.name for path in (REVERSE_TEXT / "checkpoint").iterdir()}
    assert shipped <= {path.name for path in (tmp_path / "weights" / "step_8").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rl_cpu.toml", "rl_lora_cpu.toml"])
def test_the_rl_example_learns(name: str, tmp_path: Path) -> None:
    result = run_command("medarc_train", "rl", REVERSE_TEXT / name, "--output-dir", tmp_path, "--max-steps", 30)
    assert result.returncode == 0, result.stdout + result.stderr
    rewards = metric_values(tmp_path, "orchestrator", "reward/mean")
    # In three runs it rose from about 0.3 to more than 0.7. The first steps differ by 0.05 between runs.
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:5]) + 0.15
    assert metrics_without_description(tmp_path) == set()
    assert (tmp_path / "weights" / f"step_{len(rewards)}" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_example_with_images_learns_and_is_evaluated(tmp_path: Path) -> None:
    folder, run = EXAMPLES / "xray_findings", tmp_path / "run"
    result = run_command("medarc_train", "rl", folder / "rl_cpu.toml", "--output-dir", run, "--max-steps", 16)
    assert result.returncode == 0, result.stdout + result.stderr
    rewards = metric_values(run, "orchestrator", "reward/mean")
    # In three runs it rose from about 0.5 to 0.75 or more.
    assert statistics.mean(rewards[-4:]) > statistics.mean(rewards[:4]) + 0.1
    assert metrics_without_description(run) == set()
    words = ("--weights-dir", run / "weights", "--num-examples", 40, "--output-dir", tmp_path / "eval")
    result = run_command("medarc_train", "eval", folder / "eval_cpu.toml", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    scores = dict(re.findall(r"^(base|step 16) +xray-findings +(\S+)", result.stdout, re.MULTILINE))
    assert float(scores["step 16"]) > float(scores["base"]) + 0.1


@pytest.mark.slow
def test_rl_continues_the_adapter_of_sft(tmp_path: Path) -> None:
    sft, rl = tmp_path / "sft", tmp_path / "rl"
    shorter = ("--max-steps", 4, "--data.batch-size", 4, "--model.lora.rank", 4)
    result = run_command("medarc_train", "sft", "@", REVERSE_TEXT / "sft_lora_cpu.toml", "--output-dir", sft, *shorter)
    assert result.returncode == 0, result.stdout + result.stderr
    start = ("--trainer.model.lora.path", sft, "--trainer.model.lora.rank", 4, "--max-steps", 2)
    shorter = ("--orchestrator.batch-size", 16, "--ckpt.interval", 1)
    words = ("medarc_train", "rl", REVERSE_TEXT / "rl_lora_cpu.toml", "--output-dir", rl, *start, *shorter)
    result = run_command(*words)
    assert result.returncode == 0, result.stdout + result.stderr
    log = RunPaths(rl).log("orchestrator").read_text(encoding="utf-8")
    assert f"The servers loaded the first policy version, {RunPaths(rl).orchestrator.broadcast(0)}" in log
    # The gate compares the trainer's log-probabilities of the first rollouts with the engine's.
    assert "tokens of version 0" in result.stdout
    result = run_command(*words[:-2], "--ckpt.interval", 1, "--max-steps", 3, "--resume", "latest")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_agent_of_openai_agents_trains_with_its_tool(tmp_path: Path) -> None:
    """The checkpoint that it starts from uses the tool in about two of three attempts."""
    shorter = ("--max-steps", "2", "--orchestrator.keep-rollouts.per-step", "16")
    config = EXAMPLES / "agents" / "rl_tool_cpu.toml"
    result = run_command("medarc_train", "rl", config, "--output-dir", tmp_path, *shorter)
    assert result.returncode == 0, result.stdout + result.stderr
    assert metric_values(tmp_path, "trainer", "loss/mean")
    rollouts = [each for step in (0, 1) for each in KeptRollouts(RunPaths(tmp_path)).of_step(step)]
    assert {rollout.error for rollout in rollouts} == {None}
    assert {rollout.fields["num_turns"] for rollout in rollouts} >= {1, 2}, "with the tool, and without"
    assert {rollout.reward for rollout in rollouts} <= {0.0, 0.25, 0.75, 1.0}

"""Every recipe of examples/ and every TOML block of the pages trains a step, through the configs that a launch writes.

What cannot train on a machine without GPU, hub and other nodes is read, written for each process and read back, and the
reason stands beside it. `forked_launches.py` runs all launches with one import of the heavy packages.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import tomli_w

from prime_rl.configs.dpo import DPOConfig
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.rm import RewardModelConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch.plan import component_configs
from prime_rl.run.directory import write_configs
from prime_rl.run.paths import RunPaths
from prime_rl.utils.pydantic_config import load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
BLOCK = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^`([\w.]+)`:\n\n```(?:jsonl|csv|tsv)\n(.*?)^```", re.MULTILINE | re.DOTALL)
KINDS = ("rl", "rm", "sft", "dpo", "eval")
RECIPES = sorted(path for path in (ROOT / "examples").rglob("*.toml") if path.name.startswith(KINDS))

CHECKPOINT, CONTEXT = "examples/reverse_text/checkpoint", "512"
SMALL_SFT = ("--device", "cpu", "--max-steps", "1", "--data.batch-size", "4", "--data.micro-batch-size", "2")
SMALL_RL = ("--device", "cpu", "--max-steps", "1", "--orchestrator.batch-size", "4")
SMALL_RL += ("--orchestrator.rollouts-per-example", "2", "--orchestrator.sampling.max-tokens", "8")

NOT_HERE: Mapping[str, str] = {
    "examples/agents/rl_external_cpu.toml": "prime-rl/tests/orchestrator/test_foreign_agents.py runs its agent",
    "examples/agents/rl_tool_cpu.toml": "tests/test_examples.py runs it",
    "examples/alphabet_sort/rl.toml": "eight GPUs and an environment of the hub",
    "examples/hendrycks_sanity/rl.toml": "four GPUs and environments of the hub",
    "examples/med_calc/eval_cpu.toml": "tests/test_eval_command.py runs it",
    "examples/med_calc/rl_cpu.toml": "tests/test_med_calc.py runs it",
    "examples/med_calc/rl_gpu.toml": "two GPUs",
    "examples/med_calc/sft_cpu.toml": "tests/test_med_calc.py runs it",
    "examples/med_calc/sft_eval_cpu.toml": "tests/test_med_calc.py runs it",
    "examples/med_questions/eval_cpu.toml": "an evaluation, of the kind that tests/test_eval_command.py runs",
    "examples/reverse_text/rl_cpu.toml": "tests/test_examples.py runs it",
    "examples/reverse_text/rl_lora_cpu.toml": "tests/test_examples.py runs it",
    "examples/reverse_text/rl_multi.toml": "two GPUs",
    "examples/reverse_text/rl_single.toml": "a GPU",
    "examples/reverse_text/rl_slurm.toml": "a GPU",
    "examples/reverse_text/sft.toml": "a GPU and data of the hub",
    "examples/reverse_text/sft_lora_cpu.toml": "tests/test_examples.py runs it",
    "examples/rubric/rl_cpu.toml": "a judge with 12 GB of memory",
    "examples/three_verifiers/rl_cpu.toml": "makes two interpreters from a registry",
    "examples/xray_findings/eval_cpu.toml": "tests/test_examples.py runs it",
    "examples/xray_findings/rl_cpu.toml": "tests/test_examples.py runs it",
}
"""Recipes that are not run here, and why, or where they are."""

BLOCKS_NOT_HERE: Mapping[str, str] = {
    "num_teacher_gpus": "a GPU for a teacher; rl_distill_cpu.toml trains from one",
    "teacher_inference.model": "GPUs for a teacher; rl_distill_cpu.toml trains from one",
    "actor.ppo_n_minibatches": "one of the algorithms that tests compare with float64; blocks are one run",
    'model.name = "Qwen/Qwen3-32B"': "servers of a large teacher; test_teachers.py has two",
    'id = "medqa"': "an environment that the page only imagines; tests/test_environment_page.py makes one",
    'id = "gsm8k-tasks"': "docker, and an environment that the page only imagines",
    'id = "textarena"': "its prompts are longer than the tiny model reads; prime-rl/tests/environments plays it",
    'id = "openenv"': "an environment server",
    'workflow = "my_agents:Grading"': "the reader's own agent",
    "interval = 20                     # steps": "the evaluation of sft_eval_cpu.toml",
    "num_examples = [100]": "the evaluation of eval_cpu.toml",
    "# not carried: workers_per_env": "what `migrate` prints for a run on GPUs",
    "allocation_mode": "eight GPUs",
    "monitor.mlflow": "a tracking server",
    'id = "blocker"': "an environment that the page only imagines",
    "is_policy": "its hint names a column of one environment's rows; test_teachers.py fills it",
    'teacher = "Qwen/Qwen3-4B"': "a model of the hub; test_division_of_work.py has a teacher",
    "[reference]": "a model of the hub; prime-rl/tests/trainer/preferences has another reference",
    "model:./reward_model": "a reward model; examples/safe_advice trains with one",
    "my_rl:clipped": "tests/test_own_loss_page.py trains with it",
    "train.csv": "tests/test_choices_page.py trains on it",
    "my_rewards:short": "the reader's own reward; prime-rl/tests/environments trains with one",
    'id = "my-rubric"': "a GPU for a judge",
    'type = "mbpp"': "a sandbox and data of the hub",
    "[orchestrator.client]": "servers on other machines",
    "orchestrator.client.elastic": "servers on other machines",
    "num_train_nodes": "several nodes",
    'id = "rubric"': "a GPU for a judge",
    "num_train_gpus = 4": "a mixture of experts on four GPUs; prime-rl/tests/models/test_divided_rows.py divides one",
    "enable_router_replay": "a mixture of experts; prime-rl/tests/trainer/rl/test_router_replay.py replays one",
    "router_aux_loss_coef": "a mixture of experts; prime-rl/tests/trainer/test_mixture_of_experts.py balances one",
    "router_bias_update_rate": "a mixture of experts; prime-rl/tests/trainer/test_mixture_of_experts.py balances one",
    "[model.vision]": "a model of the hub with a vision tower; prime-rl/tests/trainer/sft/test_images.py trains one",
    "[inference.vllm]": "vLLM; tests/test_weight_updates.py serves with an argument of it",
    "[trainer.critic]": "advantages of one algorithm; rl_ppo_cpu.toml trains with a critic",
}
"""Parts of blocks that are not run here, and why."""

ENVIRONMENTS_OF = {"gymnasium": "gymnasium", "reasoning-gym": "reasoning_gym"}
"""Packages that environments need (`uv sync --extra environments`)."""


def root_of_training(table: Mapping[str, Any]) -> type[SFTConfig]:
    """The root of a block of SFT, DPO or a reward model, which have a loss of their own."""
    if "reference" not in table and not isinstance(table.get("loss"), dict):
        return SFTConfig
    return RewardModelConfig if "center_rewards_coefficient" in table.get("loss", {}) else DPOConfig


@dataclass(frozen=True)
class Block:
    """A TOML block, and the files that its page shows before it."""

    page: Path
    text: str
    files: Mapping[str, str]

    @property
    def table(self) -> dict[str, Any]:
        return tomllib.loads(self.text)

    @property
    def kind(self) -> type[SFTConfig | OfflineEvalConfig | RLConfig]:
        """Blocks of RL are pieces of its sections, or keys that all runs share."""
        if self.table.keys() & {"data", "distillation", "eval", "reference"}:
            return root_of_training(self.table)
        return OfflineEvalConfig if self.table.keys() & {"env", "num_examples"} else RLConfig

    @property
    def reason(self) -> str | None:
        """Why it is not run here."""
        return next((reason for part, reason in BLOCKS_NOT_HERE.items() if part in self.text), None)


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text, start = page.read_text(encoding="utf-8"), 0
        for found in BLOCK.finditer(text):
            yield Block(page, found[1], dict(FILE.findall(text[start : found.start()])))
            start = found.end()


def write_data(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".zst":
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(text.encode())
    else:
        path.write_text(text, encoding="utf-8")


def train(cases: Mapping[str, list[str]], directory: Path) -> None:
    """Run `medarc_train` for each case, and require a step of training of each."""
    logs = {name: directory / f"{number}.log" for number, name in enumerate(cases)}
    outputs = {name: directory / f"out{number}" for number, name in enumerate(cases)}
    listed = [[name, [*words, "--output-dir", str(outputs[name])], str(logs[name])] for name, words in cases.items()]
    (directory / "cases.json").write_text(json.dumps(listed))
    argv = [sys.executable, str(ROOT / "tests" / "forked_launches.py"), str(directory / "cases.json")]
    # One import serves processes with different numbers of threads: OpenMP reads its variable only once.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    failed = {name: logs[name].read_text()[-2000:] for name, code in codes.items() if code != 0}
    assert failed == {}
    assert [
        name for name, output in outputs.items() if '"loss/mean"' not in (output / "metrics.jsonl").read_text()
    ] == []


def small_sft(block: Block, directory: Path) -> list[str]:
    """The words of `medarc_train` for a block of SFT on the rows that its page shows, or on the shipped ones."""
    table, command = block.table, block.kind.component
    rows = "reverse_text/demonstrations.jsonl" if command == "sft" else "safe_advice/preferences.jsonl"
    for name, text in block.files.items():
        write_data(directory / name, text)
    sources = table["data"].get("sources", [table["data"]])
    for source in sources:
        there = directory / source["name"]
        source["name"] = str(there if there.is_file() else ROOT / "examples" / rows)
    (directory / "sft.toml").write_text(tomli_w.dumps(table))
    small = (*SMALL_SFT, "--data.seq-len", "512", "--model.name", CHECKPOINT, "--tokenizer.chat-template", "chatml")
    return [command, "@", str(directory / "sft.toml"), *small]


def merged_rl(chosen: list[Block]) -> dict[str, Any]:
    """One table of several blocks; environments are collected."""
    table: dict[str, Any] = {}
    environments: list[dict[str, Any]] = []
    for block in chosen:
        for key, value in block.table.items():
            if key == "orchestrator":
                environments += value.pop("env", [])
            old = table.get(key)
            table[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return {**table, "orchestrator": {**table.get("orchestrator", {}), "env": environments}}


@pytest.mark.slow
def test_blocks_and_recipes_of_sft_train(tmp_path: Path) -> None:
    cases: dict[str, list[str]] = {}
    for number, block in enumerate(blocks()):
        is_lacking = "[model.quantization]" in block.text and find_spec("bitsandbytes") is None
        if issubclass(block.kind, SFTConfig) and block.reason is None and not is_lacking:
            directory = tmp_path / f"rows{number}"
            directory.mkdir()
            cases[f"{block.page.name} {number}"] = small_sft(block, directory)
    for recipe in RECIPES:
        name = recipe.relative_to(ROOT).as_posix()
        if recipe.name.startswith("sft") and name not in NOT_HERE:
            short = ("--scheduler.warmup-steps", "0", "--scheduler.decay-steps", "1")
            cases[name] = ["sft", "@", name, *SMALL_SFT, *short]
        if recipe.name.startswith(("dpo", "rm")):
            cases[name] = [recipe.name.partition("_")[0], "@", name, *SMALL_SFT]
    assert len(cases) > 15
    train(cases, tmp_path)


@pytest.mark.slow
def test_blocks_and_recipes_of_rl_train(tmp_path: Path) -> None:
    chosen = [block for block in blocks() if block.kind is RLConfig and block.reason is None]
    table = merged_rl(chosen)
    needed = {each.get("id"): ENVIRONMENTS_OF.get(str(each.get("id"))) for each in table["orchestrator"]["env"]}
    missing = {name for name, package in needed.items() if package is not None and find_spec(package) is None}
    environments = [each for each in table["orchestrator"]["env"] if each.get("id") not in missing]
    assert {each.get("id", each.get("workflow")) for each in environments} >= {"rows", "reverse-text"}
    for each in environments:
        if each.get("id") == "reasoning-gym":
            # Its own prompt is long, and the tiny model has a token for each character.
            each["args"]["system_prompt"] = ""
    table["orchestrator"]["env"] = environments
    (tmp_path / "rl.toml").write_text(tomli_w.dumps(table))
    small = (*SMALL_RL, "--model.name", CHECKPOINT, "--seq-len", CONTEXT, "--inference.model.max-model-len", CONTEXT)
    evaluation = ("--orchestrator.eval.num-examples", "2")
    cases = {"blocks": ["rl", "@", str(tmp_path / "rl.toml"), *small, *evaluation]}
    for recipe in RECIPES:
        name = recipe.relative_to(ROOT).as_posix()
        if recipe.name.startswith("rl") and name not in NOT_HERE:
            cases[name] = ["rl", "@", name, *SMALL_RL]
    train(cases, tmp_path)


def test_what_is_not_run_is_read_and_written_for_each_process(tmp_path: Path) -> None:
    tables = [(block.kind, block.table) for block in blocks() if block.reason is not None]
    kinds = {"rl": RLConfig, "sft": SFTConfig, "eval": OfflineEvalConfig}
    tables += [
        (kinds[Path(name).name.split("_")[0].split(".")[0]], tomllib.loads((ROOT / name).read_text()))
        for name in NOT_HERE
    ]
    base = tmp_path / "base.toml"
    for number, (kind, table) in enumerate(tables):
        base.write_text("[trainer]\n[orchestrator]\nrollouts_per_example = 8\n" if kind is RLConfig else "")
        config = load_config(kind, [base], {**table, "output_dir": str(tmp_path / str(number))})
        parts = component_configs(config) if isinstance(config, RLConfig) else {type(config).component: config}
        write_configs(RunPaths(tmp_path / str(number)), parts)
        for name, part in parts.items():
            read = load_config(type(part), [RunPaths(tmp_path / str(number)).config(name)])
            launch_keys = {"slurm", "dry_run", "clean_output_dir"}
            assert read.model_dump(exclude=launch_keys) == part.model_dump(exclude=launch_keys), (name, table)


def test_every_reason_belongs_to_something() -> None:
    assert {name for name in NOT_HERE if not (ROOT / name).is_file()} == set()
    texts = "\n".join(block.text for block in blocks())
    assert [part for part in BLOCKS_NOT_HERE if part not in texts] == []

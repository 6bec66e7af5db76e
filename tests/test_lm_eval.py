"""`medarc_train lm-eval`: real tasks, a real server and lm-eval itself, on the weights of a run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from medarc_rl.medarc_train import app
from prime_rl.run.lock import run_lock

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm-eval is not installed: uv sync --inexact --extra lm-eval", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "examples" / "med_calc" / "checkpoint"
TASKS = ROOT / "examples" / "lm_eval"
SMOLLM2 = os.environ.get("MEDARC_SMOLLM2", "")
QUESTIONS, FEW = 12, 4


@dataclass(frozen=True)
class Evaluated:
    """What a command printed, and the files that it left."""

    out: Path
    done: subprocess.CompletedProcess[str]

    def result(self, candidate: str, task: str, shots: str = "own") -> dict[str, Any]:
        return json.loads((self.out / candidate / f"{task}.{shots}-shot.json").read_text())

    def samples(self, candidate: str, task: str, shots: str = "own") -> list[dict[str, Any]]:
        lines = (self.out / candidate / f"{task}.{shots}-shot.samples.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def lm_eval(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("medarc_train")
    return subprocess.run(
        [program, "lm-eval", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        # A cluster's proxy, which reaches no server of this machine.
        env={**os.environ, "HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", **env},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory whose step 20 is the base model again, step 30 is damaged, and step 40 has other weights."""
    run = tmp_path_factory.mktemp("run")
    (run / "configs").mkdir()
    (run / "configs" / "sft.toml").write_text(f'[model]\nname = "{CHECKPOINT}"\n')
    tensors = load_file(CHECKPOINT / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for step in (20, 30, 40):
        folder = shutil.copytree(CHECKPOINT, run / "weights" / f"step_{step}")
        (folder / "STABLE").touch()
    moved = {name: each + 0.03 * torch.randn(each.shape, generator=generator) for name, each in tensors.items()}
    save_file(moved, run / "weights" / "step_40" / "model.safetensors", metadata={"format": "pt"})
    whole = (run / "weights" / "step_30" / "model.safetensors").read_bytes()
    (run / "weights" / "step_30" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    half_written = run / "weights" / "step_50"
    half_written.mkdir()
    return run


@pytest.fixture(scope="module")
def words(run: Path) -> list[object]:
    tasks = ["--tasks", "med_terms,med_arithmetic", "--include-path", TASKS, "--limit", QUESTIONS, "--device", "cpu"]
    return [run, *tasks, "--max-gen-toks", 12]


@pytest.fixture(scope="module")
def evaluated(run: Path, words: list[object]) -> Evaluated:
    return Evaluated(run / "lm_eval", lm_eval(*words))


def rows(evaluated: Evaluated) -> list[dict[str, Any]]:
    return json.loads((evaluated.out / "summary.json").read_text())


def test_a_question_may_hold_any_character_that_json_leaves_as_it_is(tmp_path: Path) -> None:
    from medarc_rl.lm_eval.scores import Result

    sample = {"question": "a\u2028b\u2029c\u0085d"}
    (tmp_path / "task.own-shot.samples.jsonl").write_text(f"{json.dumps(sample, ensure_ascii=False)}\n" * 2)
    assert Result(tmp_path / "task.own-shot.json", {}).samples() == [sample] * 2


@pytest.mark.slow
def test_every_checkpoint_stands_beside_its_base_and_a_damaged_one_is_named(evaluated) -> None:
    done = evaluated.done
    assert done.returncode == 1, done.stderr
    assert "failed: step 30: the server refused: " in done.stdout
    assert {row["candidate"] for row in rows(evaluated)} == {"base", "step_20", "step_40"}
    assert "step 50" not in done.stdout
    for name in ("acc", "acc_norm", "exact_match (strict-match)", "exact_match (flexible-extract)"):
        base, same, other = (row for row in rows(evaluated) if row["metric"] == name)
        assert (base["difference"], same["difference"]["value"], same["significant"]) == (None, 0.0, False)
        assert other["difference"]["value"] == pytest.approx(other["value"] - base["value"])
        assert other["difference"]["is_paired"]
    table = [line.split() for line in done.stdout.splitlines()]
    assert [line[3] for line in table if line[:3] == ["med_terms,", "0-shot", "acc"]] == ["base", "step", "step"]


@pytest.mark.slow
def test_answers_that_were_cut_off_are_counted_and_warned_of(evaluated) -> None:
    (note, *_) = evaluated.result("base", "med_arithmetic")["medarc"]["notes"]
    cut = [sample for sample in evaluated.samples("base", "med_arithmetic") if sample["filter"] == "strict-match"]
    assert note.endswith("were cut off at the limit of 12 tokens: raise --max-gen-toks")
    assert note.startswith(f"{len([each for each in cut if len(each['resps'][0][0]) >= 12])} of {QUESTIONS} answers")
    assert f"warning: base | med_arithmetic: {note}" in evaluated.done.stdout


@pytest.mark.slow
def test_files_are_for_their_owner_alone_and_hold_no_key(evaluated) -> None:
    files = [path for path in evaluated.out.rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o077) for path in files} == {"0o0"}
    assert not [path for path in files if b"Bearer" in path.read_bytes()]


@pytest.mark.slow
def test_scores_are_those_of_lm_evals_own_transformers_backend(evaluated, run) -> None:
    folder = run / "weights" / "step_40"
    assert_same_as_transformers(evaluated, folder, is_chat=True, limit=QUESTIONS, gen_kwargs={"max_gen_toks": 12})


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2, reason="MEDARC_SMOLLM2 names no folder with SmolLM2-135M")
def test_smollm2_has_the_scores_of_lm_evals_own_transformers_backend(tmp_path) -> None:
    tasks = ["--tasks", "med_terms,med_arithmetic", "--include-path", TASKS, "--limit", FEW, "--device", "cpu"]
    done = lm_eval(
        SMOLLM2, *tasks, "--num-fewshot", 2, "--apply-chat-template", "no", "--output-dir", tmp_path, "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {(row["shots"], row["n"]) for row in found} == {(2, FEW)}
    assert_same_as_transformers(Evaluated(tmp_path, done), Path(SMOLLM2), is_chat=False, limit=FEW, shots=2)


def assert_same_as_transformers(
    evaluated: Evaluated,
    folder: Path,
    *,
    is_chat: bool,
    limit: int,
    shots: int | None = None,
    gen_kwargs: dict[str, int] | None = None,
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    here = Path.cwd()
    os.chdir(ROOT)
    try:
        reference = simple_evaluate(
            model=HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4),
            tasks=["med_terms", "med_arithmetic"],
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            num_fewshot=shots,
            limit=limit,
            gen_kwargs=gen_kwargs,
            apply_chat_template=is_chat,
        )
    finally:
        os.chdir(here)
    for task in ("med_terms", "med_arithmetic"):
        stem = (folder.name, task, "own" if shots is None else str(shots))
        ours, theirs = evaluated.samples(*stem), reference["samples"][task]
        assert [sample["arguments"] for sample in ours] == json.loads(json.dumps([s["arguments"] for s in theirs]))
        for own, other in zip(ours, theirs, strict=True):
            if task == "med_arithmetic":
                assert own["resps"] == other["resps"]
                continue
            for (one,), (two,) in zip(own["resps"], other["resps"], strict=True):
                assert one[0] == pytest.approx(two[0], abs=1e-3)
                assert one[1] == two[1]
        scores = evaluated.result(*stem)["results"][task]
        for key, value in reference["results"][task].items():
            assert scores[key] == pytest.approx(value)


@pytest.mark.slow
def test_a_second_start_makes_only_what_is_missing(evaluated, run, words) -> None:
    kept = evaluated.out / "base" / "med_terms.own-shot.json"
    before = kept.stat().st_mtime_ns
    (evaluated.out / "step_40" / "med_terms.own-shot.json").unlink()
    shutil.copy(CHECKPOINT / "model.safetensors", run / "weights" / "step_30" / "model.safetensors")
    done = lm_eval(*words)
    assert done.returncode == 0, done.stderr
    assert f"base | med_terms: done before, in {kept}" in done.stdout
    assert kept.stat().st_mtime_ns == before
    assert {row["candidate"] for row in rows(evaluated)} == {"base", "step_20", "step_30", "step_40"}
    again = lm_eval(*words)
    assert again.returncode == 0
    assert "started" not in again.stdout
    other = lm_eval(*words[:-1], 13)
    assert other.returncode == 2
    assert "was made with max_gen_toks = 12, now 13: choose another --output-dir" in other.stderr


def test_checkpoints_are_taken_as_they_appear_until_the_run_ends(tmp_path) -> None:
    from medarc_rl.lm_eval.worker import new_steps

    run, said = tmp_path / "run", []
    weights = run / "weights"
    appearing: Iterator[int | None] = iter([2, None, 4])

    def sleep(seconds: float) -> None:
        try:
            step = next(appearing)
        except StopIteration:
            (weights / "step_6").mkdir()
            (weights / "step_6" / "STABLE").touch()
            lock.close()
            return
        if step is not None:
            (weights / f"step_{step}").mkdir(parents=True)
            (weights / f"step_{step + 1}").mkdir()  # half-written
            (weights / f"step_{step}" / "STABLE").touch()

    held = run_lock(run)
    held.__enter__()

    class Lock:
        def close(self) -> None:
            held.__exit__(None, None, None)

    lock = Lock()
    assert list(new_steps(weights, said.append, sleep)) == [2, 4, 6]
    assert said[0].startswith("waiting for the next checkpoint in ")
    assert len(said) == 3


@pytest.mark.slow
def test_unknown_tasks_are_named_before_a_model_is_loaded() -> None:
    from medarc_rl.lm_eval.worker import TaskFaults, find_tasks

    with pytest.raises(TaskFaults) as found:
        find_tasks(["gsm8", "med_term", "humaneval", "med_terms"], str(TASKS), allow_unsafe_code=False)
    first, second, third = found.value.faults
    assert first.startswith(f"--tasks gsm8: lm-eval has no such task, and {TASKS} has none; did you mean gsm8k")
    assert "did you mean med_terms" in second
    assert third.startswith("--tasks humaneval: runs code that the model wrote")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([CHECKPOINT], "Missing option '--tasks'."),
        (["/gone", "--tasks", "t"], "/gone: no such directory"),
        ([CHECKPOINT, "--tasks", ","], "--tasks: name at least one"),
        ([CHECKPOINT, "--tasks", "t", "--num-fewshot", "-1"], "--num-fewshot '-1': whole numbers separated by commas"),
        ([CHECKPOINT, "--tasks", "t", "--num-fewshot", "1.5"], "--num-fewshot '1.5'"),
        ([CHECKPOINT, "--tasks", "t", "--steps", "2"], "--steps and --watch are for a run's directory"),
        ([CHECKPOINT, "--tasks", "t", "--base", CHECKPOINT, "--no-base"], "--base and --no-base exclude each other"),
        ([CHECKPOINT, "--tasks", "t", "--include-path", "/gone"], "--include-path /gone: no such directory"),
        ([CHECKPOINT, "--tasks", "t", "--gen-kwargs", "temperature"], "--gen-kwargs 'temperature': write KEY=VALUE"),
        ([CHECKPOINT, "--tasks", "t", "--gen-kwargs", "max_tokens=9"], "set the limit with --max-gen-toks 9"),
        ([CHECKPOINT, "--tasks", "t", "--limit", "0"], "'--limit'"),
        ([CHECKPOINT, "--tasks", "t", "--max-model-len", "99999"], "max_model_len"),
    ],
)
def test_a_mistake_is_one_line(words: list[object], fault: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = CliRunner().invoke(app, ["lm-eval", *map(str, words), "--output-dir", str(tmp_path / "out")])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("error: ")
    assert fault in line
    assert done.stdout == ""


def test_a_published_score_is_shown_only_for_the_same_setting() -> None:
    from medarc_rl.lm_eval.scores import published_score

    settings = {"limit": None, "gen_kwargs": {}, "used_max_gen_toks": 256}
    facts = {"model": "Qwen/Qwen3-1.7B-Base", "chat_template": False, "settings": settings}
    score = ("gsm8k", "exact_match", "strict-match", 8)
    assert published_score(*score, facts).value == 0.696
    others = [{"model": "Qwen/Qwen3-1.7B"}, {"chat_template": True}]
    others += [{"settings": settings | change} for change in ({"limit": 10}, {"used_max_gen_toks": 1024})]
    assert [published_score(*score, facts | other) for other in others] == [None] * 4
    assert published_score("gsm8k", "exact_match", "strict-match", 5, facts) is None


def test_metrics_are_read_under_the_keys_that_lm_eval_writes() -> None:
    from medarc_rl.lm_eval.scores import metrics_of

    scores = {"alias": "x", "sample_len": 3, "pass@1,create_test": 0.5, "pass@1_stderr,create_test": "N/A"}
    scores |= {"acc,none": 1, "acc_stderr,none": math.nan}
    first, second = metrics_of({"results": {"humaneval": scores}}, "humaneval")
    assert (first.metric, first.value, first.stderr) == ("pass@1 (create_test)", 0.5, None)
    assert (second.metric, second.value, second.stderr) == ("acc", 1.0, None)
    group = {"results": {"mmlu": {"alias": "mmlu"}, "mmlu_a": {"acc,none": 0.25}}, "groups": {}}
    assert [each.task for each in metrics_of(group, "mmlu")] == ["mmlu_a"]

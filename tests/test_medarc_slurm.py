"""`medarc_slurm` up to the call of sbatch: words, directories, rules, artifacts, secrets."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl import medarc_slurm, medarc_submit
from medarc_rl.utils import maybe_autoset_auth_env
from prime_rl.run.lock import run_lock


def run(command: str, *words: object) -> Result:
    """Run a command without its checks of the cluster, which test_readiness.py tests."""
    return CliRunner().invoke(medarc_slurm.app, [command, "--no-check", *map(str, words)])


def dry_run(*words: object) -> Result:
    result = run(*words, "--dry-run")
    assert result.exit_code == 0, result.output
    return result


def written(out: Path, component: str = "rl") -> dict:
    return tomllib.loads((out / "configs" / f"{component}.toml").read_text())


def header(out: Path, command: str = "rl") -> list[str]:
    lines = (out / f"{command}.sh").read_text().splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_a_dry_run_writes_everything_and_submits_nothing(stand_ins, rl_toml: Path, tmp_path: Path) -> None:
    stand_ins.add("sbatch")
    out = tmp_path / "out"
    result = dry_run("rl", rl_toml, "--output-dir", out)
    assert shlex.split(result.stdout.splitlines()[-1]) == ["sbatch", f"{out}/rl.sh"]
    assert sorted(path.name for path in out.iterdir()) == ["configs", "rl.sh", "slurm"]
    assert stand_ins.calls == []


def test_a_submission_calls_sbatch_as_the_dry_run_says(stand_ins, rl_toml: Path, tmp_path: Path) -> None:
    stand_ins.add("sbatch", says="Submitted batch job 42")
    out = tmp_path / "out"
    said = dry_run("rl", rl_toml, "--output-dir", out).stdout.splitlines()[-1]
    result = run("rl", rl_toml, "--output-dir", out)
    assert result.exit_code == 0, result.output
    (call,) = stand_ins.calls
    assert call["argv"][1:] == shlex.split(said)[1:]
    assert result.stdout.splitlines()[-3:-1] == ["Submitted batch job 42", f"log: {out}/slurm/job_42.log"]


def test_medarc_submit_to_slurm_is_the_same_submission(stand_ins, rl_toml: Path, tmp_path: Path) -> None:
    stand_ins.add("sbatch", says="Submitted batch job 42")
    out = tmp_path / "out"
    words = ("--no-check", str(rl_toml), "--output-dir", str(out), "--time", "90", "--infer-gpus", "2")
    run("rl", *words[1:], "--job-name", "mine")
    script = (out / "rl.sh").read_text()
    again = CliRunner().invoke(medarc_submit.app, ["rl", "--to", "slurm", "--name", "mine", *words])
    assert (again.exit_code, (out / "rl.sh").read_text()) == (0, script), again.output
    assert "Submitted batch job 42" in again.stdout
    refused = CliRunner().invoke(medarc_submit.app, ["eval", "--to", "slurm"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --to slurm: submits only sft, dpo, rm and rl")


@pytest.mark.parametrize(
    "form", ["{0}", "@ {0}", "@{0}", "--max-steps 3 {0}", "--clean-output-dir {0}", "--bench @ {0}"]
)
def test_every_form_of_config_is_understood(form: str, rl_toml: Path, tmp_path: Path) -> None:
    dry_run("rl", *form.format(rl_toml).split(), "--output-dir", tmp_path / "out")
    assert written(tmp_path / "out")["model"]["name"] == "some/model"


def test_several_files_layer_from_left_to_right(rl_toml: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.toml"
    more.write_text('max_steps = 7\n[trainer.optim]\nlr = 1e-3\n[model]\nname = "another/model"\n')
    dry_run("rl", "@", rl_toml, "@", more, "--output-dir", tmp_path / "out", "--trainer.optim.lr", "1e-4")
    config = written(tmp_path / "out")
    assert (config["max_steps"], config["model"]["name"], config["trainer"]["optim"]["lr"]) == (
        7,
        "another/model",
        1e-4,
    )


def test_overrides_go_to_the_config_with_and_without_dashes_before(rl_toml: Path, tmp_path: Path) -> None:
    before = ("--wandb.project", "my_project", "--inference.gpu-memory-utilization=0.4")
    behind = ("--", "--wandb.name", "n", "--ckpt.resume-step", "auto", "--orchestrator.seed", "3")
    dry_run("rl", rl_toml, "--output-dir", tmp_path / "out", *before, *behind)
    config = written(tmp_path / "out")
    assert config["trainer"]["wandb"]["project"] == "my_project"
    assert config["orchestrator"]["wandb"]["name"] == "n-orchestrator"
    assert config["trainer"]["ckpt"]["resume_step"] == -2
    assert config["inference"]["gpu_memory_utilization"] == 0.4


def test_the_directory_is_the_flag_else_the_files_else_named_after_it(
    rl_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dry_run("rl", rl_toml)
    assert written(tmp_path / "outputs" / "tiny-rl")["output_dir"] == str(tmp_path / "outputs" / "tiny-rl")
    rl_toml.write_text('output_dir = "runs/mine"\n' + rl_toml.read_text())
    dry_run("rl", rl_toml)
    assert (tmp_path / "runs" / "mine" / "rl.sh").is_file()
    dry_run("rl", rl_toml, "--output-dir", "flag")
    assert written(tmp_path / "flag")["orchestrator"]["output_dir"] == str(tmp_path / "flag" / "run_default")


def test_what_the_wrapper_decides_wins_and_what_loses_is_named(rl_toml: Path, tmp_path: Path) -> None:
    rl_toml.write_text(rl_toml.read_text() + "[deployment]\nnum_infer_gpus = 5\n")
    lost = ("--deployment.num-train-gpus", 3, "--", "--output-dir", "elsewhere")
    result = dry_run("rl", rl_toml, "--output-dir", tmp_path / "out", "--infer-gpus", 2, *lost)
    config = written(tmp_path / "out")
    assert (config["deployment"]["num_train_gpus"], config["deployment"]["num_infer_gpus"]) == (1, 2)
    assert config["inference"]["parallel"]["dp"] == 2
    for key in ("deployment.num_train_gpus = '3'", "deployment.num_infer_gpus = 5", "'elsewhere'"):
        assert key in result.stderr


def test_the_slurm_section_says_what_the_options_leave_open(sft_toml: Path, tmp_path: Path) -> None:
    sft_toml.write_text(sft_toml.read_text() + "[slurm]\npartition = 'gpu'\njob_name = 'mine'\n")
    dry_run("sft", sft_toml, "--output-dir", tmp_path / "a")
    assert {"--partition=gpu", "--job-name=mine"} <= set(header(tmp_path / "a", "sft"))
    assert "slurm" not in written(tmp_path / "a", "trainer")
    dry_run("sft", sft_toml, "--output-dir", tmp_path / "b", "--partition", "other", "--job-name", "yours")
    assert {"--partition=other", "--job-name=yours"} <= set(header(tmp_path / "b", "sft"))


def test_a_template_of_the_user_has_the_variables_of_prime_rl(sft_toml: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.sbatch.j2"
    sft_toml.write_text(sft_toml.read_text() + f"[slurm]\ntemplate_path = '{template}'\n")
    line = "{{ job_name }} {{ config_path }} {{ output_dir }} {{ num_nodes }} {{ gpus_per_node }} {{ partition | sh }}"
    template.write_text(f"#!/bin/bash\n# {line}\n")
    out = tmp_path / "out"
    dry_run("sft", sft_toml, "--output-dir", out, "--gpus", 2)
    assert (out / "sft.sh").read_text() == f"#!/bin/bash\n# tiny-sft {out}/configs/trainer.toml {out} 1 2 ''\n"

    faults = {"#!/bin/bash\n{{ no_such }}": "'no_such' is undefined", "#!/bin/bash\n{% if %}": ", line 2: Expected"}
    faults |= {"#!/bin/bash\n{{ 1 / 0 }}": "division by zero", "#!/bin/bash\n{{ 'a' + 1 }}": "can only concatenate"}
    for text, fault in {**faults, "echo": "the script must begin with #!", None: "no such file"}.items():
        template.write_text(text) if text is not None else template.unlink()
        result = run("sft", sft_toml, "--output-dir", tmp_path / "none", "--dry-run")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: slurm.template_path {template}")
        assert fault in result.stderr
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("command", "gpus"), [("sft", 1), ("rl", 3)])
def test_sft_and_rl_submit_a_config_with_a_slurm_section(
    command: str, gpus: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    toml = request.getfixturevalue(f"{command}_toml")
    toml.write_text(toml.read_text() + "[deployment]\nnum_train_gpus = 2\n" * (command == "rl") + "[slurm]\n")
    program = Path(sys.executable).parent / command
    words = [str(program), "@", str(toml), "--output-dir", str(tmp_path / command), "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"--gres=gpu:{gpus}" in header(tmp_path / command, command)


def test_sft_takes_its_gpus_from_the_flag_or_the_file(sft_toml: Path, tmp_path: Path) -> None:
    sft_toml.write_text(sft_toml.read_text() + "[deployment]\nnum_gpus = 2\n")
    dry_run("sft", sft_toml, "--output-dir", tmp_path / "a")
    assert "--gres=gpu:2" in header(tmp_path / "a", "sft")
    dry_run("sft", sft_toml, "--output-dir", tmp_path / "b", "--gpus", 4)
    assert "--gres=gpu:4" in header(tmp_path / "b", "sft")
    assert written(tmp_path / "b", "trainer")["deployment"]["num_gpus"] == 4


def test_the_header_says_what_was_asked_and_nothing_else(rl_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    dry_run("rl", rl_toml, "--output-dir", out)
    log = f"{out}/slurm/job_%j.log"
    assert header(out) == [
        "--job-name=tiny-rl",
        "--nodes=1",
        "--ntasks=1",
        "--gres=gpu:2",
        "--cpus-per-gpu=8",
        "--export=ALL",
        f"--output={log}",
        f"--error={log}",
        "--open-mode=append",
    ]
    asked = ["--account=a", "--time=2:00:00", "--partition=p", "--qos=q", "--mem=10G", "--constraint=h100|h200"]
    asked += ["--nodelist=n[1-3]", "--exclude=n9"]
    dry_run("rl", rl_toml, "--output-dir", out, *asked, "--sbatch-arg=--requeue", "--sbatch-arg", "--nice=3")
    stop = "--signal=B:TERM@120"
    expected = [line.replace("h100|h200", '"h100|h200"') for line in asked]
    assert header(out)[9:] == [*expected, stop, "--requeue", "--nice=3"]


def test_a_whole_node_is_taken_whole(rl_toml: Path, tmp_path: Path) -> None:
    dry_run("rl", rl_toml, "--output-dir", tmp_path / "out", "--train-gpus", 2, "--infer-gpus", 6)
    assert "--exclusive" in header(tmp_path / "out")
    assert not any("cpus-per-gpu" in line for line in header(tmp_path / "out"))


@pytest.mark.parametrize(
    ("words", "gpus"),
    [(("--single-gpu",), 1), (("--colocate", 8), 8), (("--allocation-mode", "vllm[r]:d8|fsdp[a]:d4t2"), 8)],
)
def test_the_same_gpus_for_both(words: tuple[object, ...], gpus: int, rl_toml: Path, tmp_path: Path) -> None:
    result = dry_run("rl", rl_toml, "--output-dir", tmp_path / "out", *words)
    assert f"--gres=gpu:{gpus}" in header(tmp_path / "out")
    deployment = tomllib.loads((tmp_path / "out" / "configs" / "rl.toml").read_text())["deployment"]
    assert (deployment["num_train_gpus"], deployment["num_infer_gpus"]) == (gpus, 1)
    assert "export MEDARC_SINGLE_GPU=1" in (tmp_path / "out" / "rl.sh").read_text()
    assert "0.7 to 0.8" in result.stderr
    written = tmp_path / "out" / "configs" / "rl.toml"  # what a pod starts
    again = ("--output-dir", tmp_path / "b", "--colocate", gpus, "--inference.gpu-memory-utilization=0.7")
    assert "0.7 to 0.8" not in dry_run("rl", written, *again).stderr


def test_the_account_comes_from_the_environment(rl_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ACCOUNT", "second")
    dry_run("rl", rl_toml, "--output-dir", tmp_path / "a")
    assert "--account=second" in header(tmp_path / "a")
    monkeypatch.setenv("SBATCH_ACCOUNT", "first")
    dry_run("rl", rl_toml, "--output-dir", tmp_path / "b")
    assert "--account=first" in header(tmp_path / "b")


LOGS = ["--output=/tmp/x.log", "--ou=x", "--error=x", "-ox", "-Qex"]
ARRAYS = ["--array=0-3", "--arr=1", "-a0-3", "-Qa1"]
RL_FAULTS = [
    ("", "no config"),
    ("missing.toml", "missing.toml: no such file"),
    ("{rl} --train-gpus 4 --infer-gpus 7", "--train-gpus 4 + --infer-gpus 7 = 11"),
    ("{rl} --train-gpus 9", "--train-gpus"),
    ("{rl} --single-gpu --weight-broadcast.type nccl --max-async-level 1", "'nccl' needs two GPUs"),
    ("{rl} --weight-broadcast.type nccl --max-async-level 2", "max_async_level = 1"),
    ("{rl} --infer-gpus 3 --inference.parallel.tp 2", "3 GPUs / parallel.tp 2 = 1.5"),
    ("{rl} --no-inference", "[inference]"),
    (
        "{rl} --single-gpu --infer-gpus 2",
        "error: --single-gpu takes one GPU for trainer and server: leave it out, or --infer-gpus 2",
    ),
    ("{rl} --colocate 0", "'--colocate': Input should be greater than or equal to 1"),
    ("{rl} --colocate 9", "'--colocate': Input should be less than or equal to 8"),
    ("{rl} --colocate 2 --single-gpu", "error: --single-gpu, --colocate 2: leave one out"),
    ("{rl} --colocate 2 --infer-gpus 2", "error: --colocate 2 takes 2 GPUs for trainer and server: leave it out, or"),
    ("{rl} --colocate 2 --infer-nodes 1", "error: --colocate 2, --infer-nodes 1: trainer and inference share GPUs of"),
    ("{rl} --colocate 2 --weight-broadcast.type nccl --max-async-level 1", "'nccl' needs two GPUs, one on each side"),
    ("{rl} --single-gpu --train-gpus 2 --infer-gpus 3", "leave it out, or --train-gpus 2 --infer-gpus 3"),
    ("{rl} --single-gpu --allocation-mode vllm:d2+fsdp:d2", "leave it out, or allocation_mode"),
    ("{rl} --allocation-mode vllm[r]:d1t2|fsdp[a]:d2", "vllm[r]:d1t2: each shared GPU has a server of its own with"),
    ("{rl} --single-gpu --train-gpus 2 --train-nodes 2", "--single-gpu, --train-nodes 2: trainer and inference share"),
    ("{rl} --single-gpu --deployment.type multi_node", "--single-gpu, deployment.type = 'multi_node': trainer and"),
    ("{rl} --requeue --ckpt --sbatch-arg=--no-requeue", "--requeue, --sbatch-arg '--no-requeue': leave out one"),
    ("{rl} --max-requeues 3", "--max-requeues 3 has an effect only with --requeue"),
    ("{rl} --container-mount /data", "--container: name an image"),
    ("{rl} --container=", "--container: name an image"),
    ("{rl} --trainer.optm.lr 1", "--trainer.optim"),
    ("{rl} --deployment.type multi_node --deployment.num-infer-nodes two", "num_infer_nodes = 'two': write a whole"),
    ("{rl} --max-steps many", "--max-steps: should be a valid integer (got 'many')"),
    ("{rl} --time soon", "--time 'soon'"),
    ("{rl} --dependency foo", "--dependency 'foo': write a condition and numbers of jobs, as afterany:123"),
    ("{rl} --sbatch-arg requeue", "--sbatch-arg=--requeue"),
    *((f"{{rl}} --sbatch-arg={log}", f"'{log}': a job's log is in OUT/slurm") for log in LOGS),
    *((f"{{rl}} --sbatch-arg={array}", f"'{array}': the tasks of a job array") for array in ARRAYS),
    ("{rl} --project-dir nowhere", "nowhere: no such directory"),
    ("{rl} --max-model-len 5", "max_model_len = 5 is not supported yet"),
    ("{broken}", "broken.toml:2:"),
    ("{typo}", "typo.toml: max_step: unknown key; did you mean max_steps?"),
]


@pytest.mark.parametrize(("words", "says"), RL_FAULTS, ids=[says for _, says in RL_FAULTS])
def test_what_cannot_be_is_one_line_and_changes_nothing(words: str, says: str, rl_toml: Path, tmp_path: Path) -> None:
    broken, typo = tmp_path / "broken.toml", tmp_path / "typo.toml"
    broken.write_text("[trainer]\nlr = = 2\n")
    typo.write_text("max_step = 1\n" + rl_toml.read_text())
    out = tmp_path / "out"
    result = run("rl", *words.format(rl=rl_toml, broken=broken, typo=typo).split(), "--output-dir", out)
    assert result.exit_code == 2, result.output
    faults = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert all(line.startswith("error: ") for line in faults)
    assert any(says in line for line in faults), result.stderr
    assert not out.exists()


def test_a_node_has_eight_gpus(sft_toml: Path, tmp_path: Path) -> None:
    assert run("sft", sft_toml, "--gpus", 9, "--output-dir", tmp_path / "out").exit_code == 2
    nine = ("--data.batch-size", 9, "--deployment.gpus-per-node", 9, "--deployment.num-gpus", 9)
    result = run("sft", sft_toml, "--output-dir", tmp_path / "out", *nine)
    assert (result.exit_code, result.stderr) == (2, "error: deployment.num_gpus = 9: one node has 1 to 8 GPUs\n")
    several = ("--nodes", 2, "--data.batch-size", 18, "--deployment.gpus-per-node", 9)
    result = run("sft", sft_toml, "--output-dir", tmp_path / "out", *several)
    assert (result.exit_code, result.stderr) == (2, "error: deployment.gpus_per_node = 9: a node has 1 to 8 GPUs\n")
    result = run("rl", sft_toml, "--train-nodes", 1, "--train-gpus", 2, "--infer-gpus", 4)
    assert result.exit_code == 2
    assert "error: --train-gpus 2, --infer-gpus 4: the nodes of a job have the same number of GPUs" in result.stderr


def test_a_job_on_several_nodes_asks_for_gpus_per_node_and_not_for_whole_nodes(sft_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--nodes", 3, "--gpus", 2, "--data.batch-size", 6, "--output-dir", out)
    dry_run("sft", sft_toml, *words)
    script = (out / "sft.sh").read_text()
    for option in ("--nodes=3", "--ntasks-per-node=1", "--gres=gpu:2", "--cpus-per-gpu=8"):
        assert f"\n#SBATCH {option}\n" in script
    assert "--exclusive" not in script
    refused = run("sft", sft_toml, *words, "--dry-run", "--container", "image.sif")
    assert (refused.exit_code, refused.stderr.startswith("error: --container: agents on several nodes")) == (2, True)


def test_an_allocation_mode_asks_for_whole_nodes(rl_toml: Path, tmp_path: Path) -> None:
    sft_toml = tmp_path / "sft.toml"
    sft_toml.write_text('max_steps = 2\n[model]\nname = "some/model"\nseq_len = 64\n')
    dry_run("rl", rl_toml, "--output-dir", tmp_path, "--allocation-mode", "vllm:d8+fsdp:d16")
    dry_run("sft", sft_toml, "--output-dir", tmp_path, "--allocation-mode", "fsdp:d16", "--data.batch-size", 16)
    assert "\n#SBATCH --nodes=3\n" in (tmp_path / "rl.sh").read_text()
    assert "\n#SBATCH --nodes=2\n" in (tmp_path / "sft.sh").read_text()
    for name in ("rl.sh", "sft.sh"):
        assert "\n#SBATCH --gres=gpu:8\n" in (tmp_path / name).read_text()


def test_a_dry_run_only_warns_of_keys_that_are_not_built(rl_toml: Path, tmp_path: Path) -> None:
    result = dry_run("rl", rl_toml, "--output-dir", tmp_path / "out", "--max-model-len", 5)
    assert "warning: max_model_len = 5 is not supported yet" in result.stderr


def test_another_runs_checkpoints_are_left_alone(stand_ins, rl_toml: Path, tmp_path: Path) -> None:
    stand_ins.add("sbatch", says="Submitted batch job 1")
    out = tmp_path / "out"
    checkpoint = out / "checkpoints" / "step_4"
    counterpart = out / "run_default" / "checkpoints" / "step_4"
    for part in (checkpoint, counterpart):
        part.mkdir(parents=True)
        (part / "STABLE").touch()
    result = run("rl", rl_toml, "--output-dir", out)
    assert result.exit_code == 2
    assert "--clean-output-dir" in result.stderr
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "run_default"]
    resumed = run("rl", rl_toml, "--output-dir", out, "--ckpt.resume-step", -1, "--max-steps", 5)
    assert resumed.exit_code == 0, resumed.output
    assert checkpoint.exists()
    dry_run("rl", rl_toml, "--output-dir", out, "--clean-output-dir")
    assert checkpoint.exists()
    assert run("rl", rl_toml, "--output-dir", out, "--clean-output-dir").exit_code == 0
    assert not checkpoint.exists()
    assert "clean_output_dir" not in written(out)


def test_a_chain_queues_while_its_first_job_runs(stand_ins, sft_toml: Path, tmp_path: Path) -> None:
    stand_ins.add("sbatch", says="Submitted batch job 2")
    out = tmp_path / "out"
    words = ("sft", sft_toml, "--output-dir", out)
    assert run(*words).exit_code == 0
    first = (out / "configs" / "trainer.toml").read_text()
    with run_lock(out):
        assert run(*words, "--resume", "auto").exit_code == 2
        for resume in ("auto", "latest", 2):
            longer = ("--max-steps", 4, "--dependency", "afterany:1", "--resume", resume)
            result = run(*words, *longer)
            assert result.exit_code == 0, result.output
    queued = out / "slurm" / "queued_3"
    assert "--dependency=afterany:1" in header(queued, "sft")
    assert f"@ {queued}/configs/trainer.toml" in (queued / "sft.sh").read_text()
    assert (out / "configs" / "trainer.toml").read_text() == first
    assert tomllib.loads((queued / "configs" / "trainer.toml").read_text())["output_dir"] == str(out)
    cleaning = run(*words, "--dependency", "afterany:1", "--clean-output-dir")
    assert (cleaning.exit_code, "--clean-output-dir would remove" in cleaning.stderr) == (2, True)


def test_a_queue_that_does_not_answer_is_told_and_does_not_stop_a_submission(
    stand_ins, sft_toml: Path, tmp_path: Path
) -> None:
    stand_ins.add("sbatch", says="Submitted batch job 4711")
    stand_ins.add("squeue", says="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    first, second = (run("sft", sft_toml, "--output-dir", tmp_path / "out") for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stderr == "", "nothing could be overwritten"
    assert second.stderr.splitlines() == [
        f"warning: whether a job of {tmp_path}/out still waits in the queue is not known: "
        "squeue: slurm_load_jobs error: Unable to contact slurm controller"
    ]


def test_only_the_directory_of_a_run_is_cleaned(stand_ins, rl_toml: Path, tmp_path: Path) -> None:
    stand_ins.add("sbatch")
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.tex").touch()
    result = run("rl", rl_toml, "--output-dir", out, "--clean-output-dir")
    assert result.exit_code == 2
    assert (out / "chapter.tex").exists()


def test_a_directory_that_cannot_be_written_is_one_line(rl_toml: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("rl", rl_toml, "--output-dir", tmp_path / "file" / "out", "--dry-run")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"{tmp_path / 'file'} is not a directory" in result.stderr


@pytest.mark.parametrize(
    ("says", "job_id"),
    [
        ("Submitted batch job 77", "77"),
        ("Budget 2026: 1500 hours are left.\nSubmitted batch job 77 on cluster big", "77"),
        ("77;big", "77"),
        ("caf\udce9\n77", "77"),
        ("Budget 2026: 1500 hours are left.", None),
    ],
)
def test_the_number_of_a_job_is_the_one_that_sbatch_says(
    says: str, job_id: str | None, stand_ins, sft_toml: Path, tmp_path: Path
) -> None:
    stand_ins.add("sbatch")
    (tmp_path / "says").write_bytes(says.encode(errors="surrogateescape"))
    (stand_ins.directory / "sbatch").write_text(f"#!/bin/sh\ncat '{tmp_path}/says'\n")
    result = run("sft", sft_toml, "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    logs = [line for line in result.stdout.splitlines() if line.startswith("log: ")]
    assert logs == ([] if job_id is None else [f"log: {tmp_path}/out/slurm/job_{job_id}.log"])
    assert ("sbatch printed no job number" in result.stderr) == (job_id is None)


def test_without_slurm_the_artifacts_stay(rl_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("rl", rl_toml, "--output-dir", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "error: sbatch: not found: submit where Slurm is, or run here with medarc_train",
        f"error: nothing was submitted; the script is {tmp_path}/out/rl.sh",
    ]
    assert (tmp_path / "out" / "rl.sh").is_file()


def test_the_token_reaches_sbatch_and_no_file_or_argument(
    stand_ins, rl_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins.add("sbatch", says="Submitted batch job 1")
    monkeypatch.setattr("huggingface_hub.utils.get_token", lambda: "hf_secret")
    out = tmp_path / "out"
    result = run("rl", rl_toml, "--output-dir", out, "--auto-auth")
    assert result.exit_code == 0, result.output
    (call,) = stand_ins.calls
    assert call["env"]["HF_TOKEN"] == "hf_secret"
    assert "hf_secret" not in str(call["argv"]) + result.output
    assert not any(b"hf_secret" in path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert "HF_TOKEN" not in os.environ


def test_a_token_is_only_filled_in_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils.get_token", lambda: "local")
    env = {"HF_TOKEN": "mine"}
    assert maybe_autoset_auth_env(env, enabled=True) == []
    assert env == {"HF_TOKEN": "mine"}
    env = {}
    assert maybe_autoset_auth_env(env, enabled=False) == []
    assert env == {}
    assert len(maybe_autoset_auth_env(env, enabled=True)) == 1
    assert env == {"HF_TOKEN": "local"}
    monkeypatch.setattr("huggingface_hub.utils.get_token", lambda: None)
    assert maybe_autoset_auth_env({}, enabled=True) == []


@pytest.mark.parametrize(
    ("kind", "words", "says"),
    [
        ("rl", "--gpus 3 --nodes 2", "--gpus, --nodes: no option of rl, which takes --train-gpus, --infer-gpus,"),
        (
            "sft",
            "--train-gpus 3 --colocate 3",
            "--train-gpus, --colocate: no option of sft, which takes --gpus, --nodes",
        ),
    ],
)
def test_check_refuses_gpus_that_only_the_other_command_takes(
    kind: str, words: str, says: str, rl_toml: Path, tmp_path: Path
) -> None:
    argv = ["check", kind, str(rl_toml), *words.split(), "--output-dir", str(tmp_path / "out")]
    result = CliRunner().invoke(medarc_slurm.app, argv)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {says}")

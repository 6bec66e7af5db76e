"""`medarc_slurm check`, and the same table before a job is submitted."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl import medarc_slurm
from medarc_rl.backends.options import SlurmRequest
from medarc_rl.backends.slurm.job import BatchJob, Container, launcher_job
from medarc_rl.checks import Row, State, failed, ok, table
from medarc_rl.checks.job import (
    HubAccess,
    cluster_rows,
    gpu_of_type,
    hub_rows,
    job_environment,
    memory_row,
    offered_gpu,
    software_rows,
    storage_rows,
    token_rows,
)
from medarc_rl.errors import MedarcError
from medarc_rl.external import NoAnswer, ask
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.dpo import DPOConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch.job import Resources
from prime_rl.run.paths import RunPaths
from prime_rl.utils.pydantic_config import load_config

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "reverse_text"

PARTITION = "PartitionName=main AllowAccounts=med,{allowed} Default=YES DefaultTime=NONE MaxTime=2:00:00 State={state}"
NODE = "NodeName=n1 Gres=gpu:h100:{gpus}(S:0-1) State={state} Partitions=main,other Comment=Gres=gpu:64"

SCONTROL = """#!{python}
import sys
answers = {answers!r}
print(answers[sys.argv[-1]])
"""


def check(*words: object) -> Result:
    return CliRunner().invoke(medarc_slurm.app, ["check", *map(str, words)])


def make_job(tmp_path: Path, gpus: int = 2, **request: object) -> BatchJob:
    job = launcher_job("sft", RunPaths(tmp_path / "out"), Resources(1, gpus))
    return BatchJob(job, "name", 8, tmp_path, tmp_path / "hf", request=SlurmRequest(**request))


def failures(rows: Iterator[Row] | list[Row]) -> dict[str, str]:
    return {row.what: row.detail for row in rows if row.state is State.FAILED}


Describe = Callable[..., None]


@pytest.fixture
def scontrol(stand_ins) -> Describe:
    """Puts a cluster of one partition and one node behind `scontrol`, and an sbatch that accepts everything."""

    def describe(
        allowed: str = "bio", partition: str = "UP", gpus: int = 4, node: str = "IDLE", ping: str = "is UP"
    ) -> None:
        answers = {
            "ping": f"Slurmctld(primary) at head {ping}",
            "partition": PARTITION.format(allowed=allowed, state=partition),
            "node": NODE.format(gpus=gpus, state=node),
        }
        program = stand_ins.directory / "scontrol"
        program.write_text(SCONTROL.format(python=sys.executable, answers=answers))
        program.chmod(0o755)
        stand_ins.add("sbatch", says="Job 1 to start")

    return describe


def test_a_table_has_one_line_for_each_row() -> None:
    rows = [ok("gpus", "2 of one node"), failed("hub token", "two\nlines")]
    assert table(rows) == ["gpus       ok      2 of one node", "hub token  FAILED  two lines"]


def test_a_program_is_asked_without_a_shell(tmp_path: Path) -> None:
    hostile = "$(touch pwned); `id` ' \""
    answer = ask([sys.executable, "-c", "import sys; print(sys.argv[1])", hostile], 60, cwd=tmp_path)
    assert (answer.code, answer.stdout) == (0, f"{hostile}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_does_not_answer_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    code = f"import os, signal; child = os.fork(); open({str(pids)!r}, 'a').write('here\\n'); signal.pause()"
    opened = os.open(pids, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(NoAnswer, match="did not answer within"):
        ask([sys.executable, "-c", code], 3)
    os.set_blocking(opened, True)
    with os.fdopen(opened) as pipe:
        pipe.read()  # to its end, which comes only when nobody holds the pipe


def test_a_program_that_is_not_there_is_one_line() -> None:
    with pytest.raises(NoAnswer, match="no-such-program"):
        ask(["no-such-program"], 5)


def test_a_cluster_that_takes_the_job_has_no_failure(scontrol: Describe, stand_ins, tmp_path: Path) -> None:
    scontrol()
    rows = list(cluster_rows(make_job(tmp_path, gpus=4, time="1:59:00", account="bio", partition="main")))
    assert failures(rows) == {}
    assert [row.what for row in rows] == ["slurm", "partition", "time limit", "account", "gpus", "sbatch --test-only"]
    (call,) = stand_ins.calls
    assert call["argv"][1:] == ["--test-only"]


@pytest.mark.parametrize(
    ("request_", "found", "what", "says"),
    [
        ({"partition": "gpu"}, {}, "partition", "no partition gpu; there are: main"),
        ({}, {"partition": "DOWN"}, "partition", "main is DOWN"),
        ({"time": "2:00:01"}, {}, "time limit", "main allows 2:00:00"),
        ({"time": "UNLIMITED"}, {}, "time limit", "too long"),
        ({"account": "law"}, {}, "account", "law may not use main"),
        ({}, {"gpus": 1}, "gpus", "2 asked for; the largest of 1 nodes in main has 1"),
        ({}, {"node": "IDLE+DRAIN"}, "gpus", "no node in main with 2 GPUs is in service: n1 IDLE+DRAIN"),
        ({}, {"node": "DOWN*"}, "gpus", "in service"),
    ],
)
def test_what_the_cluster_does_not_have_is_told(
    request_: dict, found: dict, what: str, says: str, scontrol: Describe, tmp_path: Path
) -> None:
    scontrol(**found)
    found_failures = failures(cluster_rows(make_job(tmp_path, **request_)))
    assert list(found_failures) == [what]
    assert says in found_failures[what]


def test_what_sbatch_says_against_the_job_is_told(scontrol: Describe, stand_ins, tmp_path: Path) -> None:
    scontrol()
    stand_ins.add("sbatch", says="sbatch: error: Invalid qos specification", code=1)
    assert failures(cluster_rows(make_job(tmp_path))) == {"sbatch --test-only": "Invalid qos specification"}


def test_a_controller_that_is_down_is_one_row(scontrol: Describe, tmp_path: Path) -> None:
    # As Slurm says it, with a frame around a request to its administrator.
    stars = "*" * 41
    scontrol(ping=f"is DOWN\n{stars}\n** RESTORE SLURMCTLD DAEMON TO SERVICE **\n{stars}")
    rows = list(cluster_rows(make_job(tmp_path)))
    assert failures(rows) == {"slurm": "the controller (slurmctld) does not answer: Slurmctld(primary) at head is DOWN"}
    assert len(rows) == 1


def test_a_controller_that_hangs_is_one_row(scontrol: Describe, stand_ins, tmp_path: Path) -> None:
    scontrol()
    (stand_ins.directory / "scontrol").write_text(f"#!{sys.executable}\nimport signal\nsignal.pause()\n")
    (row,) = cluster_rows(make_job(tmp_path), limit_s=0.5)
    assert "scontrol did not answer within 0.5 s" in row.detail


def test_without_slurm_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (row,) = cluster_rows(make_job(tmp_path))
    assert (row.what, row.state) == ("slurm", State.FAILED)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("h100", "H100"),
        ("nvidia_h100_80gb_hbm3", "H100"),
        ("a100_40gb", "A100-40"),
        ("a100-sxm4-80gb", "A100-80"),
        ("rtx_4090", "RTX-4090"),
        ("a100_3g.20gb", None),
        ("gpu", None),
        ("80", None),
        ("tesla", None),
    ],
)
def test_a_type_of_gpu_is_known_by_the_names_that_clusters_use(name: str, gpu: str | None) -> None:
    found = gpu_of_type(name)
    assert (found and found.name) == gpu


def test_the_run_is_compared_with_the_gpu_that_slurm_offers(scontrol: Describe, sft_toml: Path, tmp_path: Path) -> None:
    scontrol()
    job = make_job(tmp_path)
    gpu = offered_gpu(job)
    assert gpu is not None
    assert gpu.name == "H100"
    assert offered_gpu(make_job(tmp_path, sbatch_arg=["--gres=gpu:a100:2"])) is None, "the job asks for another"
    config = SFTConfig(model={"name": str(EXAMPLES / "checkpoint")}, data={"name": "x", "seq_len": 128}, device="cuda")
    row = memory_row(config, job, gpu)
    assert (row.what, row.state) == ("gpu memory", State.OK)
    assert row.detail.startswith("fits: trainer 0.")
    assert row.detail.endswith("H100 has 79.1 GiB")
    small = replace(gpu, name="a slice", total_bytes=2**28)
    assert memory_row(config, job, small).state is State.FAILED
    assert "does not fit" in memory_row(config, job, small).detail
    assert memory_row(config, job, None).state is State.UNKNOWN
    assert "compare with --estimate --gpu NAME" in memory_row(config, job, None).detail
    elsewhere = SFTConfig(model={"name": "some/model"}, data={"name": "x", "seq_len": 128}, device="cuda")
    assert memory_row(elsewhere, job, gpu, lambda name: str(EXAMPLES / "checkpoint")).state is State.OK, "in its cache"
    assert memory_row(elsewhere, job, gpu).detail == (
        f"some/model: not in the local cache: run `HF_HOME={tmp_path}/hf hf download some/model config.json` first"
    )


class Hub(BaseHTTPRequestHandler):
    """A hub with one public model, one gated model, and nothing else."""

    def do_GET(self) -> None:
        kind, name = self.path.removeprefix("/api/").split("?")[0].split("/", 1)
        if name.endswith("/auth-check"):
            gated = "gated" in name
            self._answer(403 if gated else 200, {"error": "no"}, "GatedRepo" if gated else None)
        elif kind == "models" and name in ("some/model", "some/gated"):
            self._answer(200, {"id": name, "siblings": [{"rfilename": "config.json"}, {"rfilename": "a.safetensors"}]})
        else:
            self._answer(404, {"error": "Repository not found"}, "RepoNotFound")

    def _answer(self, status: int, body: dict, code: str | None = None) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def access_to(endpoint: str, tmp_path: Path, offline: bool = False) -> HubAccess:
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf")}
    return HubAccess(StartDir.of_job(tmp_path), tmp_path / "hf" / "hub", offline, env)


def test_a_model_is_looked_up_on_the_hub(hub: str, tmp_path: Path) -> None:
    access = access_to(hub, tmp_path)
    assert access.model_row("some/model", needs_weights=True).detail.startswith("some/model: on the hub, 2 files")
    gated = access.model_row("some/gated", needs_weights=True)
    assert (gated.state, "that account's token; HF_TOKEN is not set" in gated.detail) == (State.FAILED, True)
    missing = access.dataset_row("some/data")
    assert (missing.state, "no dataset with this name" in missing.detail) == (State.FAILED, True)


def test_a_hub_that_cannot_be_reached_is_told(tmp_path: Path) -> None:
    row = access_to("http://127.0.0.1:9", tmp_path).model_row("some/model", needs_weights=True)
    assert (row.state, "cannot be reached from here" in row.detail) == (State.FAILED, True)


def make_cached_model(cache: Path, shards: int) -> Path:
    """`some/model` in a hub's cache, with the first of its two files of weights, or both."""
    repository = cache / "models--some--model"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    names = [f"model-{number}.safetensors" for number in (1, 2)]
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", names, strict=True))})
    )
    for name in names[:shards]:
        (snapshot / name).touch()
    return snapshot


def test_a_complete_cache_needs_no_hub_and_half_of_one_does(tmp_path: Path) -> None:
    snapshot = make_cached_model(tmp_path / "hf" / "hub", shards=1)
    access = access_to("http://127.0.0.1:9", tmp_path, offline=True)
    row = access.model_row("some/model", needs_weights=True)
    assert (row.state, "not complete in the cache" in row.detail) == (State.FAILED, True)
    (snapshot / "model-2.safetensors").touch()
    assert access.model_row("some/model", needs_weights=True).detail == "some/model: complete in the cache"


def test_a_model_in_the_users_own_cache_is_told_with_the_option_that_finds_it(tmp_path: Path) -> None:
    usual = tmp_path / "home" / ".cache" / "huggingface" / "hub"
    make_cached_model(usual, shards=2)
    access = replace(access_to("http://127.0.0.1:9", tmp_path, offline=True), usual_cache=usual)
    told = f"not in the cache {tmp_path}/hf/hub (it is in another one: --hf-cache-dir {usual.parent}), and"
    assert told in access.model_row("some/model", needs_weights=True).detail
    assert "another one" not in access.model_row("some/other", needs_weights=True).detail
    assert "another one" not in access.dataset_row("some/model").detail


def test_models_beside_the_trained_one_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    base = {"data": {"name": str(tmp_path / "rows.jsonl"), "seq_len": 8}}
    rollouts = {"env": [{"id": "reverse-text"}], "rollouts_per_example": 4, "batch_size": 8}
    rl = {"algorithm": "ppo", "trainer": {"critic": {"name": "my/critic"}}, "orchestrator": rollouts, "max_steps": 4}
    configs = {
        "my/teacher": SFTConfig.model_validate({**base, "distillation": {"teacher": "my/teacher"}}),
        "my/reference": DPOConfig.model_validate({**base, "reference": {"name": "my/reference"}}),
        "my/critic": load_config(RLConfig, overrides=rl),
    }
    access = access_to("http://127.0.0.1:9", tmp_path, offline=True)
    for name, config in configs.items():
        assert any(name in row.detail and row.state is State.FAILED for row in hub_rows(config, access)), name


def test_an_output_folder_that_cannot_be_written_is_told() -> None:
    config = SFTConfig.model_validate({"model": {"name": "some/model"}})
    assert "cannot be written" in failures(storage_rows(config, Path("/proc/out"), None))["output folder"]


def test_room_for_the_planned_checkpoints_is_compared_with_what_is_free(tmp_path: Path) -> None:
    model = EXAMPLES / "checkpoint"
    few = SFTConfig.model_validate({"model": {"name": str(model)}, "max_steps": 10, "ckpt": {"interval": 5}})
    assert failures(storage_rows(few, tmp_path / "out", model)) == {}
    kept = {"interval": 1, "keep_last": 10**9}
    many = SFTConfig.model_validate({"model": {"name": str(model)}, "max_steps": 10**9, "ckpt": kept})
    assert "are free" in failures(storage_rows(many, tmp_path / "out", model))["disk space"]


def test_the_environment_of_the_job_holds_what_dot_env_sets(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=\"two words\"\nB=$UNSET_NAME\nexport C='$(touch pwned)'\necho noise\n")
    found = job_environment(make_job(tmp_path), {"PATH": os.environ["PATH"], "A": "old"})
    assert (found["A"], found["B"], found["C"]) == ("two words", "", "$(touch pwned)")
    assert found["HF_HOME"] == str(tmp_path / "hf")
    (tmp_path / ".env").write_text("exit 3\n")
    with pytest.raises(MedarcError, match="exit code 3"):
        job_environment(make_job(tmp_path), os.environ)


def test_secrets_are_named_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = SFTConfig.model_validate({"model": {"name": "some/model"}, "wandb": {}})
    assert list(failures(token_rows(config, {}))) == ["W&B key"]
    rows = list(token_rows(config, {"WANDB_API_KEY": "hush", "HF_TOKEN": "hush"}))
    assert failures(rows) == {}
    assert "hush" not in "".join(table(rows))
    assert failures(token_rows(config, {"WANDB_MODE": "offline"})) == {}
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password hush\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert failures(token_rows(config, {})) == {}


def test_a_project_that_cannot_import_the_launcher_is_told(project, tmp_path: Path) -> None:
    config = SFTConfig.model_validate({"model": {"name": "some/model"}})
    job = make_job(tmp_path)
    assert ".venv is missing" in failures(software_rows(config, job, dict(os.environ)))["project"]
    project(tmp_path).add("python", says="ModuleNotFoundError: No module named 'medarc_rl'", code=1)
    env = {**os.environ, "RECORD": str(tmp_path / "calls.jsonl")}
    assert "No module named 'medarc_rl'" in failures(software_rows(config, job, env))["project"]


def test_a_container_needs_no_venv_but_its_image(tmp_path: Path) -> None:
    config = SFTConfig.model_validate({"model": {"name": "some/model"}})
    job = replace(make_job(tmp_path), container=Container(str(tmp_path / "image.sif")))
    assert "no such file" in failures(software_rows(config, job, {}))["container"]
    (tmp_path / "image.sif").touch()
    assert failures(software_rows(config, job, {})) == {}


def test_the_kind_of_a_job_is_found_or_asked_for(sft_toml: Path, tmp_path: Path) -> None:
    sft_toml.write_text('max_steps = 1\n[model]\nname = "tiny"\n')
    result = check(sft_toml, "--output-dir", tmp_path / "out")
    assert (result.exit_code, "write `check sft` or `check rl`" in result.stderr) == (2, True)
    assert check("--output-dir", tmp_path / "out").exit_code == 2
    sft_toml.write_text("[typo]\nx = 1\n")
    assert check("sft", sft_toml).exit_code == 2


def test_a_job_that_would_fail_is_not_submitted(scontrol: Describe, stand_ins, project, tmp_path: Path) -> None:
    scontrol(gpus=0)
    project(tmp_path / "project")
    out = tmp_path / "out"
    data, model = EXAMPLES / "demonstrations.jsonl", EXAMPLES / "model"
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'max_steps = 1\n[model]\nname = "{model}"\n[model.debug]\nrandom_init = true\n[data]\nseq_len = 128\n'
    )
    words = ["sft", toml, "--data.name", data, "--output-dir", out, "--project-dir", tmp_path / "project"]
    result = CliRunner().invoke(medarc_slurm.app, [*map(str, words)])
    assert result.exit_code == 1, result.output
    assert result.stderr == "error: nothing was submitted: see FAILED above, or submit all the same with --no-check\n"
    assert "the largest of 1 nodes in main has 0" in result.stdout
    assert not out.exists()
    scontrol(gpus=8)
    result = CliRunner().invoke(medarc_slurm.app, [*map(str, words)])
    assert result.exit_code == 0, result.output
    assert [call["argv"][1:] for call in stand_ins.calls if call["argv"][0].endswith("sbatch")] == [
        ["--test-only"],
        ["--test-only"],
        [str(out / "sft.sh")],
    ]


@pytest.mark.slow
@pytest.mark.slurm
def test_the_table_of_a_real_cluster(slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    project_dir = tmp_path / "project"
    project_dir.mkdir()
    (project_dir / ".venv").symlink_to(sys.prefix)
    (project_dir / "examples").symlink_to(ROOT / "examples")
    where = ("--project-dir", project_dir, "--output-dir", tmp_path / "out", "--cpus-per-gpu", 1)
    result = check(EXAMPLES / "rl_cpu.toml", *where)
    assert result.exit_code == 0, result.output
    assert "to start at" in result.stdout
    assert "reverse-text: imported, loaded and examined" in result.stdout
    assert not (tmp_path / "out").exists()
    refused = check("sft", EXAMPLES / "sft_cpu.toml", *where, "--partition", "nowhere", "--gpus", 2)
    assert refused.exit_code == 1
    assert "no partition nowhere; there are: main, urgent" in refused.stdout
    assert slurm.ask("squeue", "--noheader") == ""

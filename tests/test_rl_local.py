"""The RL launcher with stand-ins for the three programs: real processes, real signals, no model.

Every stand-in holds one named pipe open for writing, so the pipe's end says that all of them are gone.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from medarc_rl.launchers.rl_local import rl_local
from prime_rl.configs.rl import RLConfig
from prime_rl.utils.pydantic_config import dump_toml

STAND_IN = """#!{python}
import json, os, signal, socket, sys, time
from pathlib import Path

name = Path(sys.argv[0]).name
if "prime_rl.trainer.rl.train" in sys.argv:
    name = "trainer" if os.environ["RANK"] == "0" else "trainer_rank_" + os.environ["RANK"]
pipe = os.open(os.environ["PIPE"], os.O_WRONLY)
record = Path(os.environ["RECORDS"])
out = Path(sys.argv[sys.argv.index("@") + 1]).parent.parent

def tell(word): os.write(pipe, f"{{word}}\\n".encode())
def flag(key): return sys.argv[sys.argv.index(key) + 1]
def wait():
    while True: signal.pause()
def meet(): os.close(os.open(os.environ["MEETING"], os.O_WRONLY if name == "inference" else os.O_RDONLY))
def metrics(source, step, **values):
    line = dict(time=time.time(), source=source, step=step, **{{k.replace("_", "/"): v for k, v in values.items()}})
    with (out / "metrics.jsonl").open("a") as file: file.write(json.dumps(line) + "\\n")

seen = dict(argv=sys.argv[1:], env=dict(os.environ))
scratch = record / f"{{name}}.{{os.getpid()}}"  # two launches may write their records at once
scratch.write_text(json.dumps(seen))
scratch.rename(record / f"{{name}}.json")
print(name, "says hello", flush=True)
exec(os.environ.get(f"DO_{{name.upper()}}", "tell('ready'); meet(); wait()"))
if name != "inference": Path(os.environ["COMPLETION_MARKER"]).touch()
"""

TRAINING = """
meet()
print("Loading the model", flush=True)
for step in range(3):
    metrics("orchestrator", step, reward_mean=0.1 + 0.2 * step)
    metrics("trainer", step, loss_mean=0.5, perf_throughput=1234.0)
    print(f"12:00:00 SUCCESS Step {step} | Time: 1.00s | Loss: 0.5", flush=True)
"""


class Stage:
    """A place for launches: programs that are stand-ins, what they recorded, and the pipe that they hold."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "out"
        self.bin, self.records = root / "bin", root / "records"
        for directory in (self.bin, self.records):
            directory.mkdir()
        for name in ("inference", "orchestrator", "python"):
            (self.bin / name).write_text(STAND_IN.format(python=sys.executable))
            (self.bin / name).chmod(0o755)
        os.mkfifo(root / "pipe")
        os.mkfifo(root / "meeting")
        self._pipe = os.open(root / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        self._ends: list[int] = []

    @property
    def env(self) -> dict[str, str]:
        return {
            "PIPE": str(self.root / "pipe"),
            "MEETING": str(self.root / "meeting"),
            "RECORDS": str(self.records),
            "PRIME_RL_RUNTIME_DIR": str(self.root / "runtime"),
            "HOME": str(self.root / "home"),
        }

    def config(self, **values: Any) -> RLConfig:
        sections: dict[str, Any] = {"trainer": {}, "orchestrator": {}, "inference": {}, "max_steps": 3, "device": "cpu"}
        return RLConfig.model_validate({**sections, "output_dir": self.out, **values})

    def launch(self, config: RLConfig) -> int:
        return rl_local(config, self.bin)

    def start(self, config: RLConfig) -> subprocess.Popen[str]:
        """A launcher in a process of its own."""
        toml = self.root / f"{config.output_dir.name}.toml"
        dump_toml(config, toml)
        code = (
            "import sys; from pathlib import Path; from prime_rl.configs.rl import RLConfig;"
            "from prime_rl.utils.pydantic_config import load_config; from medarc_rl.launchers.rl_local import rl_local;"
            "sys.exit(rl_local(load_config(RLConfig, [sys.argv[1]]), Path(sys.argv[2])))"
        )
        launcher = subprocess.Popen(
            [sys.executable, "-c", code, str(toml), str(self.bin)],
            env=os.environ | self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._ends.append(os.pidfd_open(launcher.pid))
        return launcher

    def expect(self, word: str, times: int) -> None:
        """Wait until stand-ins have written `word` `times` times. All started launchers must live until then."""
        text = ""
        while text.count(word) < times:
            ready, _, _ = select.select([self._pipe, *self._ends], [], [])
            assert self._pipe in ready, f"a launcher ended before {times} times {word!r}: {text!r}"
            text += os.read(self._pipe, 4096).decode()

    def wait_until_all_are_gone(self) -> None:
        os.set_blocking(self._pipe, True)
        while os.read(self._pipe, 4096):
            pass

    def seen_by(self, child: str) -> dict[str, Any]:
        return json.loads((self.records / f"{child}.json").read_text())

    def flag(self, child: str, name: str) -> str:
        argv = self.seen_by(child)["argv"]
        return argv[argv.index(name) + 1]

    def left(self) -> list[Path]:
        """What launches have in the runtime directory."""
        runtime = self.root / "runtime"
        return [path for path in runtime.iterdir() if path.name != ".lock"] if runtime.exists() else []

    def close(self) -> None:
        for descriptor in (self._pipe, *self._ends):
            os.close(descriptor)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A stage whose inference server serves, and whose trainer works as soon as it does."""
    stage = Stage(tmp_path)
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "MEDARC_SINGLE_GPU",
        "OMP_NUM_THREADS",
        "HF_HOME",
        "XDG_CACHE_HOME",
        "PRIME_RL_CACHE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in (stage.env | {"DO_ORCHESTRATOR": "", "DO_TRAINER": TRAINING, "DO_TRAINER_RANK_1": ""}).items():
        monkeypatch.setenv(name, value)
    yield stage
    stage.close()


@pytest.fixture
def waiting_stage(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage whose three children run until they are stopped."""
    monkeypatch.delenv("DO_ORCHESTRATOR")
    monkeypatch.delenv("DO_TRAINER")
    return stage


def test_a_run_that_learned_nothing_says_so_last(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = "Nothing was learned: in all 3 steps, every advantage was 0. Read some: medarc_train rollouts out"
    said = f"print('12:00:00 WARNING {verdict}', flush=True)"
    monkeypatch.setenv("DO_ORCHESTRATOR", f"{os.environ['DO_ORCHESTRATOR']}\n{said}")
    assert stage.launch(stage.config()) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"warning: {verdict}"


def test_a_run_shows_each_step_and_ends_with_what_it_learned(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.launch(stage.config()) == 0
    stdout, stderr = capsys.readouterr()
    lines = stdout.splitlines()
    assert any(
        line.startswith('device = "cpu": everything runs on the CPU (1 inference + 1 training') for line in lines
    )
    assert [line[:49] for line in lines if line.startswith("step")] == [
        "step 0 (1/3)  reward 0.100  loss 0.5000  1234 tok",
        "step 1 (2/3)  reward 0.300  loss 0.5000  1234 tok",
        "step 2 (3/3)  reward 0.500  loss 0.5000  1234 tok",
    ]
    assert "Loading the model" in lines
    assert not any("SUCCESS" in line for line in lines), "a finished step is shown once"
    assert lines[-1].startswith("3 steps in 0:")
    assert lines[-1].endswith("mean reward 0.100 -> 0.500 (first and last step)")
    assert stderr == ""


def test_each_child_reads_its_own_config_and_writes_its_own_log(stage: Stage) -> None:
    stage.launch(stage.config())
    assert sorted(path.name for path in (stage.out / "configs").iterdir()) == [
        "inference.toml",
        "orchestrator.toml",
        "rl.toml",
        "trainer.toml",
    ]
    for child in ("inference", "orchestrator", "trainer"):
        assert stage.flag(child, "@") == str(stage.out / "configs" / f"{child}.toml")
        assert f"{child} says hello" in (stage.out / "logs" / f"{child}.log").read_text()
    assert "trainer finished" in (stage.out / "logs" / "rl.log").read_text()


def test_the_orchestrator_is_told_where_the_server_listens(stage: Stage) -> None:
    stage.launch(stage.config())
    port = stage.flag("inference", "--server.port")
    assert stage.flag("inference", "--server.host") == "127.0.0.1"
    assert stage.flag("orchestrator", "--client.base-url") == f"http://127.0.0.1:{port}/v1"


def test_without_an_inference_table_the_server_is_somebody_elses(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DO_TRAINER", "")
    assert stage.launch(stage.config(inference=None)) == 0
    assert not (stage.records / "inference.json").exists()
    assert "--client.base-url" not in stage.seen_by("orchestrator")["argv"]


def test_each_child_sees_the_gpus_that_slurm_gave_for_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-2a,7")
    deployment = {"type": "single_node", "num_train_gpus": 2, "num_infer_gpus": 1}
    assert stage.launch(stage.config(deployment=deployment)) == 0
    masks = {child: stage.seen_by(child)["env"]["CUDA_VISIBLE_DEVICES"] for child in ("inference", "orchestrator")}
    assert masks == {"inference": "5", "orchestrator": ""}
    trainer = stage.seen_by("trainer")
    assert trainer["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-2a,7"
    assert trainer["env"]["WORLD_SIZE"] == "2"


def test_in_single_gpu_mode_both_see_the_one_gpu(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7f")
    monkeypatch.setenv("MEDARC_SINGLE_GPU", "1")
    assert stage.launch(stage.config()) == 0
    assert [stage.seen_by(child)["env"]["CUDA_VISIBLE_DEVICES"] for child in ("inference", "trainer")] == ["MIG-7f"] * 2


def test_the_next_launch_finds_the_caches_of_each_child(stage: Stage) -> None:
    names = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    places = []
    for _ in range(2):
        stage.launch(stage.config())
        children = [stage.seen_by(child)["env"] for child in ("inference", "orchestrator", "trainer")]
        places.append([Path(env[name]) for env in children for name in names])
    assert places[0] == places[1]
    assert len(set(places[0])) == 9
    root = stage.root / "home" / ".cache" / "prime-rl"
    assert root.stat().st_mode & 0o777 == 0o700
    assert all(place.is_relative_to(root) for place in places[0])
    assert {env["HF_HOME"] for env in children} == {str(stage.root / "home" / ".cache" / "huggingface")}


@pytest.mark.parametrize("child", ["inference", "orchestrator", "trainer"])
def test_the_child_that_fails_is_named_with_the_end_of_its_log(
    waiting_stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], child: str
) -> None:
    monkeypatch.setenv(f"DO_{child.upper()}", "sys.exit('it broke')")
    assert waiting_stage.launch(waiting_stage.config()) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: {child} exited with code 1; its log is {waiting_stage.out}/logs/{child}.log",
        "its last lines:",
        f"  | {child} says hello",
        "  | it broke",
    ]
    waiting_stage.wait_until_all_are_gone()
    assert waiting_stage.left() == []


def test_inference_that_ends_early_ends_the_run(
    waiting_stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DO_INFERENCE", "pass")
    assert waiting_stage.launch(waiting_stage.config()) == 1
    assert capsys.readouterr().err.startswith("error: inference exited with code 0, although the run was not complete")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_leaves_no_process_and_no_file(waiting_stage: Stage, signum: signal.Signals) -> None:
    launcher = waiting_stage.start(waiting_stage.config())
    waiting_stage.expect("ready", times=3)
    assert [path.stat().st_mode & 0o777 for path in waiting_stage.left()] == [0o700]
    launcher.send_signal(signum)
    _, stderr = launcher.communicate()
    assert launcher.returncode == 128 + signum
    by = "Ctrl-C" if signum is signal.SIGINT else signum.name
    assert (
        stderr == f"stopped by {by}\nno checkpoint was saved, because [ckpt] is not set: the run cannot be continued\n"
    )
    waiting_stage.wait_until_all_are_gone()
    assert waiting_stage.left() == []


def test_a_launcher_that_is_killed_leaves_no_process_and_no_file(waiting_stage: Stage) -> None:
    launcher = waiting_stage.start(waiting_stage.config())
    waiting_stage.expect("ready", times=3)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ends = [os.pidfd_open(int(pid)) for pid in children]
    launcher.kill()
    launcher.communicate()
    waiting_stage.wait_until_all_are_gone()
    for end in ends:
        select.select([end], [], [])
        os.close(end)
    assert waiting_stage.left() == []


def test_two_launches_at_the_same_moment_share_nothing(waiting_stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = """
server = socket.socket(); server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(flag("--server.port")))); server.listen()
tell("listening"); wait()
"""
    monkeypatch.setenv("DO_INFERENCE", listen)
    launchers = [waiting_stage.start(waiting_stage.config(output_dir=waiting_stage.root / name)) for name in "ab"]
    waiting_stage.expect("listening", times=2)
    assert len(waiting_stage.left()) == 2, "a directory each"
    for launcher in launchers:
        launcher.terminate()
    for launcher in launchers:
        launcher.communicate()
        assert launcher.returncode == 143
    assert waiting_stage.left() == []


def test_a_second_attempt_keeps_the_logs_and_metrics_of_the_first(stage: Stage) -> None:
    stage.launch(stage.config())
    stage.launch(stage.config())
    assert (stage.out / "logs" / "trainer.log").read_text().count("trainer says hello") == 2
    assert len((stage.out / "metrics.1.jsonl").read_text().splitlines()) == 6
    assert len((stage.out / "metrics.jsonl").read_text().splitlines()) == 6


def test_the_latest_checkpoint_is_the_same_for_both_sides(stage: Stage) -> None:
    for parent in (stage.out, stage.out / "run_default"):
        (parent / "checkpoints" / "step_2").mkdir(parents=True)
        (parent / "checkpoints" / "step_2" / "STABLE").touch()
    assert stage.launch(stage.config(ckpt={"resume_step": -1})) == 0
    assert stage.flag("orchestrator", "--ckpt.resume-step") == stage.flag("trainer", "--ckpt.resume-step") == "2"


@pytest.mark.slow
def test_a_dry_run_shows_the_commands_and_starts_none(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.launch(stage.config(dry_run=True)) == 0
    commands = capsys.readouterr().out.splitlines()
    assert [any(f"/{name} " in line for line in commands) for name in ("inference", "orchestrator", "python")] == [
        True
    ] * 3
    assert list(stage.records.iterdir()) == []
    assert (stage.out / "configs" / "trainer.toml").exists()


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"max_model_len": 128}, "max_model_len = 128 is not supported yet: set `inference.model.max_model_len`"),
        ({"device": "cuda"}, 'device = "cuda", but no GPU can be used here'),
    ],
)
def test_what_cannot_be_done_here_is_refused_before_anything_is_written(
    stage: Stage, capsys: pytest.CaptureFixture[str], values: dict[str, Any], fault: str
) -> None:
    assert stage.launch(stage.config(**values)) == 2
    assert capsys.readouterr().err.startswith(f"error: {fault}")
    assert not stage.out.exists()


def test_another_runs_checkpoints_are_not_touched(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    (stage.out / "checkpoints" / "step_9").mkdir(parents=True)
    assert stage.launch(stage.config()) == 2
    assert "holds the checkpoints of another run" in capsys.readouterr().err
    assert [path.name for path in stage.out.iterdir()] == ["checkpoints"]


def test_a_missing_program_is_named(stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("PATH", str(stage.root))
    (stage.bin / "orchestrator").unlink()
    assert stage.launch(stage.config()) == 1
    assert capsys.readouterr().err.startswith("error: orchestrator is neither in")

"""The engine's own `rl` and `sft`, with stand-ins for the programs that they start."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.entrypoints import rl, sft
from prime_rl.run.paths import RunPaths

STAND_IN = """#!{python}
import json, os, signal, sys
from pathlib import Path

# The trainer is a module, the others are programs.
name = "trainer" if "-m" in sys.argv else Path(sys.argv[0]).name
if os.environ.get("RANK", "0") != "0": name += "_rank_" + os.environ["RANK"]
root = Path(__file__).parent.parent
(root / f"{{name}}.json").write_text(json.dumps(dict(argv=sys.argv[1:], env=dict(os.environ))))
print(name, "says hello", flush=True)
if name == "inference": signal.pause()
saves = Path(root / f"{{name}}.saves")
if saves.exists():
    Path(saves.read_text()).mkdir(parents=True)
    Path(saves.read_text(), "STABLE").touch()
fails = Path(root / f"{{name}}.fails")
if fails.exists(): print(fails.read_text(), file=sys.stderr); sys.exit(2 if "refused" in fails.read_text() else 1)
if not Path(root / f"{{name}}.leaves").exists(): Path(os.environ["COMPLETION_MARKER"]).touch()
"""


class Programs:
    """Stand-ins for every program of the engine, and what they recorded."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin = root, root / "bin"
        self.bin.mkdir()
        for name in ("inference", "orchestrator", "python"):
            (self.bin / name).write_text(STAND_IN.format(python=sys.executable))
            (self.bin / name).chmod(0o755)

    def fail(self, name: str, last_words: str = "it broke") -> None:
        (self.root / f"{name}.fails").write_text(last_words)

    def save(self, name: str, checkpoint: Path) -> None:
        """Let a program save `checkpoint` before it ends."""
        (self.root / f"{name}.saves").write_text(str(checkpoint))

    def leave_early(self, name: str) -> None:
        """Let a program exit with 0 before its work is done."""
        (self.root / f"{name}.leaves").touch()

    def seen_by(self, name: str) -> dict[str, Any]:
        return json.loads((self.root / f"{name}.json").read_text())


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return Programs(tmp_path)


@pytest.fixture
def out(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "out")


def rl_config(out: RunPaths, **values: Any) -> RLConfig:
    sections = {"trainer": {}, "orchestrator": {}, "inference": {}, "device": "cpu", "output_dir": out.root}
    return RLConfig.model_validate({**sections, **values})


def sft_config(out: RunPaths, **values: Any) -> SFTConfig:
    return SFTConfig.model_validate({"device": "cpu", "output_dir": out.root, "data": {"seq_len": 64}, **values})


def test_rl_runs_its_children_and_shows_the_trainers_log(
    programs: Programs, out: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rl.run(rl_config(out), programs.bin) == 0
    shown = capsys.readouterr().out
    assert "trainer says hello" in shown
    assert "orchestrator says hello" not in shown
    assert "orchestrator says hello" in out.log("orchestrator").read_text()
    assert "trainer finished" in out.log("rl").read_text()
    assert programs.seen_by("trainer")["argv"] == ["-m", "prime_rl.trainer.rl.train", "@", str(out.config("trainer"))]
    assert programs.seen_by("orchestrator")["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_the_ports_of_rl_are_those_of_the_config(programs: Programs, out: RunPaths) -> None:
    client = {"client": {"base_url": ["http://localhost:8123/v1"]}}
    assert rl.run(rl_config(out, inference={"server": {"port": 8123}}, orchestrator=client), programs.bin) == 0
    for name in ("inference", "orchestrator"):
        # The log's heading has the command. The server may be stopped before it has recorded anything.
        assert out.log(name).read_text().splitlines()[0].endswith(f"/{name} @ {out.config(name)}")


def test_a_client_that_looks_at_another_port_is_refused(
    programs: Programs, out: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rl.run(rl_config(out, inference={"server": {"port": 8123}}), programs.bin) == 2
    assert capsys.readouterr().err.startswith(
        "error: orchestrator.client.base_url is http://localhost:8000/v1, but the server listens on port 8123"
    )
    assert not out.root.exists()


@pytest.mark.parametrize("name", ["orchestrator", "trainer", "trainer_rank_1"])
def test_a_child_that_leaves_with_zero_before_its_work_is_done_fails_the_run(
    programs: Programs, out: RunPaths, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = rl_config(out, deployment={"num_train_gpus": 2})
    assert rl.run(config, programs.bin) == 0
    programs.leave_early(name)
    assert rl.run(config, programs.bin) == 1, "the marker of the earlier launch does not count"
    assert f"error: {name} exited with code 0 before its work was done; its log is" in capsys.readouterr().err


def test_the_child_that_fails_is_named_with_the_end_of_its_log(
    programs: Programs, out: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    programs.fail("orchestrator")
    assert rl.run(rl_config(out), programs.bin) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: orchestrator exited with code 1; its log is {out.log('orchestrator')}",
        "its last lines:",
        "  | orchestrator says hello",
        "  | it broke",
    ]


def test_a_dry_run_writes_the_configs_and_starts_nothing(programs: Programs, out: RunPaths) -> None:
    out.orchestrator.broadcast(3).mkdir(parents=True)
    assert rl.run(rl_config(out, dry_run=True), programs.bin) == 0
    assert sorted(path.stem for path in out.configs.iterdir()) == ["inference", "orchestrator", "rl", "trainer"]
    assert not (programs.root / "trainer.json").exists()
    assert out.orchestrator.broadcast(3).exists()


def test_one_sft_process_is_started_alone_and_seen_live(
    programs: Programs, out: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft.run(sft_config(out), programs.bin) == 0
    assert "trainer says hello" in capsys.readouterr().out
    assert "trainer says hello" in out.log("trainer").read_text()
    assert programs.seen_by("trainer")["argv"] == ["-m", "prime_rl.trainer.sft.train", "@", str(out.config("sft"))]


def test_each_rank_of_sft_is_a_process_with_a_log(programs: Programs, out: RunPaths) -> None:
    assert sft.run(sft_config(out, deployment={"num_gpus": 2}), programs.bin) == 0
    for rank, name in enumerate(("trainer", "trainer_rank_1")):
        env = programs.seen_by(name)["env"]
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "2")
        assert not Path(env["PRIME_RL_STORE"]).parent.exists(), "the launch has removed it"
        assert f"{name} says hello" in out.log(name).read_text()


def test_a_rank_that_fails_is_named_with_the_end_of_its_own_log(
    programs: Programs, out: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    programs.fail("trainer_rank_1")
    assert sft.run(sft_config(out, deployment={"num_gpus": 2}), programs.bin) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: trainer_rank_1 exited with code 1; its log is {out.log('trainer_rank_1')}",
        "its last lines:",
        "  | trainer_rank_1 says hello",
        "  | it broke",
    ]


def test_a_failed_sft_run_is_one_line_under_the_log_that_was_just_shown(
    programs: Programs, out: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    programs.fail("trainer")
    assert sft.run(sft_config(out), programs.bin) == 1
    stdout, stderr = capsys.readouterr()
    assert "it broke" in stdout
    assert "Done" not in stdout
    assert stderr == f"error: trainer exited with code 1; its log is {out.log('trainer')}\n"


def test_the_last_error_of_a_failed_child_is_the_reason_on_the_terminal_and_in_the_run(
    programs: Programs, out: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    programs.fail("trainer", "12:30:06   ERROR rows.jsonl:12: not valid JSON")
    assert sft.run(sft_config(out), programs.bin) == 1
    reason = f"trainer: rows.jsonl:12: not valid JSON (exit code 1; log {out.log('trainer')})"
    assert capsys.readouterr().err == f"error: {reason}\n"
    assert json.loads(out.receipt(1).read_text())["outcome"] == reason
    assert f"Why it ended: `{reason}`" in out.status.read_text()


@pytest.mark.parametrize(("last_words", "code", "is_advised"), [("it broke", 1, True), ("it is refused", 2, False)])
def test_a_run_is_not_advised_to_continue_as_it_would_be_refused_again(
    programs: Programs, out: RunPaths, capsys: pytest.CaptureFixture[str], last_words: str, code: int, is_advised: bool
) -> None:
    programs.fail("trainer", last_words)
    programs.save("trainer", out.checkpoint(1))
    assert sft.run(sft_config(out, ckpt={}), programs.bin) == code
    assert ("--resume latest" in capsys.readouterr().err) == is_advised


def test_another_runs_checkpoints_are_refused(
    programs: Programs, out: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    out.checkpoint(4).mkdir(parents=True)
    assert sft.run(sft_config(out), programs.bin) == 2
    assert "holds the checkpoints of another run" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_a_mistyped_key_is_one_line_and_exit_code_2(command: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(
        "max_step = 3\n[trainer]\n[orchestrator]\n" if command == "rl" else "max_step = 3\n"
    )
    argv = [sys.executable, "-c", f"from prime_rl.entrypoints.{command} import main; main()", "@", "bad.toml"]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "max_step" in ended.stderr

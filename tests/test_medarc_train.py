"""`medarc_train`: what it writes, and what it hands to the launchers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner, Result

from medarc_rl import medarc_train
from medarc_rl.errors import UsageError
from medarc_rl.launchers.shared_node import first_gpus
from prime_rl.launch.placement import Sharing


class Launches:
    """Stands in for `rl_local` and `sft_local`: remembers what it was given, and says that all is ready."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.configs: list[Any] = []
        self.sharing: list[Sharing | None] = []

    def __call__(self, config: Any, on_ready: Callable[[], None], sharing: Sharing | None = None) -> int:
        self.configs.append(config)
        self.sharing.append(sharing)
        on_ready()
        return self.code


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    stand_in = Launches()
    monkeypatch.setattr("medarc_rl.launchers.rl_local.rl_local", stand_in)
    monkeypatch.setattr("medarc_rl.launchers.sft_local.sft_local", stand_in)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return stand_in


COUNTED = """
import atexit, collections, json, os, sys
opened, parsed = collections.Counter(), []

def count(event, args):
    if event == "open" and isinstance(args[0], str):
        opened[args[0]] += 1

def calls(frame, event, arg):
    if event == "call" and frame.f_code.co_name == "parse_arguments":
        parsed.append(frame)

sys.addaudithook(count)
sys.setprofile(calls)
atexit.register(lambda: print("\\n" + json.dumps([opened, len(parsed)]), file=sys.stderr))
from medarc_rl.medarc_train import main
main()
"""


def shared(**settings: Any) -> Sharing:
    return Sharing(free_ports=True, exact_gpus=True, **settings)


def run(*words: object) -> Result:
    return CliRunner().invoke(medarc_train.app, [*map(str, words)])


def test_sft_is_handed_to_the_launcher(launches: Launches, sft_toml: Path, tmp_path: Path) -> None:
    words = ("--output-dir", tmp_path / "out", "--gpus", 2, "--optim.lr", "1e-3", "--device", "cpu")
    result = run("sft", "@", sft_toml, *words)
    assert result.exit_code == 0, result.output
    (config,) = launches.configs
    assert config.deployment.num_gpus == 2
    written = tomllib.loads((tmp_path / "out" / "configs" / "trainer.toml").read_text())
    assert written["optim"]["lr"] == config.optim.lr == 1e-3


@pytest.mark.parametrize(
    ("command", "module"),
    [("sft", ["prime_rl.trainer.sft.preflight", "sft"]), ("rl", ["prime_rl.orchestrator.env_checks.examination"])],
)
def test_a_preflight_reads_the_resolved_config_and_leaves_the_runs_directory_alone(
    command: str, module: list[str], stand_ins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request
) -> None:
    stand_ins.add("python", says="4 samples")
    monkeypatch.setattr(sys, "executable", str(stand_ins.directory / "python"))
    toml = request.getfixturevalue(f"{command}_toml")
    result = run(command, toml, "--output-dir", tmp_path / "out", "--preflight")
    assert result.exit_code == 0, result.output
    (call,) = [call for call in stand_ins.calls if "-m" in call["argv"]]
    assert call["argv"][1 : 3 + len(module)] == ["-m", *module, "@"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "options", "fault"),
    [
        ("sft", "--scheduler.type cosine --scheduler.warmup-steps 9", "max_steps above scheduler.warmup_steps = 9"),
        (
            "rl",
            "--trainer.scheduler.type cosine --trainer.scheduler.warmup-steps 9",
            "above scheduler.warmup_steps = 9",
        ),
        ("sft", "--tokenizer.chat-template nowhere.jinja", "no such file, and not Jinja text"),
        ("sft", "--val.data.name nowhere.jsonl", "val.data.name = nowhere.jsonl: no such file"),
        pytest.param(
            "rl",
            "--orchestrator.env.0.args {'no_such_argument':1}",
            "unexpected keyword argument 'no_such_argument'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dry_run_finds_what_would_stop_the_run(
    command: str, options: str, fault: str, tmp_path: Path, request
) -> None:
    toml = request.getfixturevalue(f"{command}_toml")
    words = [word.replace("'", '"') for word in options.split()]
    result = run(command, toml, "--output-dir", tmp_path / "out", *words, "--device", "cpu", "--dry-run")
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert line.startswith("error: ")
    assert fault in line


SAMPLING = """
[orchestrator.sampling]
repetition_penalty = 1.1
min_tokens = 4
[orchestrator.sampling.extra_body]
presence_penalty = 0.5
frequency_penalty = 0.0
logit_bias = {"7" = -5}
top_p = 0.9
top_k = -1
stop = ["x"]
guided_regex = "a+"
temperature = 0.5
novel = 1
min_tokens = 2
"""


def test_sampling_that_changes_what_is_trained_on_is_named_one_line_each(rl_toml: Path, tmp_path: Path) -> None:
    rl_toml.write_text(rl_toml.read_text() + SAMPLING)
    result = run("rl", rl_toml, "--output-dir", tmp_path / "out", "--device", "cpu", "--dry-run")
    assert result.exit_code == 0, result.output
    found = dict(re.findall(r"^warning: orchestrator\.sampling\.(\S+) (.*)$", result.stderr, re.MULTILINE))
    assert sum("warning: orchestrator.sampling." in line for line in result.stderr.splitlines()) == len(found)
    off_policy = {key for key, line in found.items() if "makes training off-policy" in line}
    assert off_policy == {
        "repetition_penalty",
        "min_tokens",
        "extra_body.presence_penalty",
        "extra_body.logit_bias",
        "extra_body.guided_regex",
    }
    without_effect = {key for key, line in found.items() if "has no effect on training" in line}
    assert without_effect == {"extra_body.top_p", "extra_body.temperature", "extra_body.min_tokens"}
    assert set(found) - off_policy - without_effect == {"extra_body.novel"}


@pytest.mark.parametrize(
    ("key", "why"),
    [("top_p", "needs top_k"), ("min_p", "needs top_k"), ("frequency_penalty", "training"), ("logit_bias", "training")],
)
def test_a_sampling_key_that_training_lacks_says_why(rl_toml: Path, tmp_path: Path, key: str, why: str) -> None:
    words = (f"--orchestrator.sampling.{key.replace('_', '-')}", "0.5", "--dry-run")
    result = run("rl", rl_toml, "--output-dir", tmp_path / "out", "--device", "cpu", *words)
    assert result.exit_code == 2
    assert why in result.stderr


def test_evaluation_samples_as_it_likes(rl_toml: Path, tmp_path: Path) -> None:
    rl_toml.write_text(
        rl_toml.read_text()
        + "[orchestrator.eval.sampling]\ntop_p = 0.9\nmin_p = 0.1\nrepetition_penalty = 1.2\n"
        + 'extra_body = {presence_penalty = 1.0}\n[[orchestrator.eval.env]]\nid = "reverse-text"\n'
    )
    result = run("rl", rl_toml, "--output-dir", tmp_path / "out", "--device", "cpu", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "sampling" not in result.stderr


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["sft", "{toml}", "optim.lr=1e-4"], "optim.lr=1e-4: unexpected argument; a key is set as --optim.lr 1e-4"),
        (["sft", "{toml}", "+data.seq_len=9"], "a key is set as --data.seq-len 9"),
        (["sft", "@", "{yaml}"], "run.yaml: a YAML file; configs are TOML: write `a: 1` as `a = 1`"),
        (["sft", "{toml}", "--gpus", "0,1"], "it is the number of GPUs, and CUDA_VISIBLE_DEVICES=0,1 says which"),
        (["sft", "{toml}", "--push"], "hf upload"),
        (["sft", "{toml}", "--seed", "1"], "use --data.seed"),
    ],
)
def test_the_words_of_other_tools_are_answered_with_what_serves_here(
    words: list[str], answer: str, sft_toml: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("max_steps: 2\n")
    result = run(*(word.format(toml=sft_toml, yaml=tmp_path / "run.yaml") for word in words), "--dry-run")
    assert result.exit_code == 2
    assert answer in result.stderr


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_a_dry_run_shows_the_command_of_every_process(command: str, tmp_path: Path, request) -> None:
    toml = request.getfixturevalue(f"{command}_toml")
    gpus = ("--gpus", 2) if command == "sft" else ("--train-gpus", 2)
    result = run(command, toml, "--output-dir", tmp_path / "out", *gpus, "--device", "cpu", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "WORLD_SIZE=2" in result.stdout
    trainer = rf"^\S+ -m prime_rl\.trainer\.{command}\.train @ .*"
    rank = "# trainer_rank_1: the same with LOCAL_RANK=1 RANK=1"
    assert re.search(f"{trainer}\n{rank}$", result.stdout, re.MULTILINE)
    assert not (tmp_path / "out" / "logs").exists()


def test_rl_is_handed_to_the_launcher(launches: Launches, rl_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("rl", rl_toml, "--output-dir", out, "--train-gpus", 2, "--infer-gpus", 1, "--seq-len", 64)
    assert result.exit_code == 0, result.output
    (config,) = launches.configs
    assert (config.deployment.num_train_gpus, config.deployment.num_infer_gpus) == (2, 1)
    assert config.trainer.model.seq_len == 64
    assert launches.sharing == [shared(gpus=("0", "1", "2"))]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.slow
def test_a_launch_writes_each_config_once_and_where_its_values_come_from(
    rl_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    rename = os.replace

    def noted(source: Any, target: Any, **more: Any) -> None:
        written.append(Path(target).name if Path(target).parent.name == "configs" else "")
        rename(source, target, **more)

    monkeypatch.setattr(os, "replace", noted)
    result = run("rl", rl_toml, "--output-dir", tmp_path / "out", "--device", "cpu", "--dry-run")
    assert result.exit_code == 0, result.output
    tomls = [name for name in written if name.endswith(".toml")]
    assert sorted(tomls) == ["inference.toml", "orchestrator.toml", "rl.toml", "trainer.toml"]
    assert sorted(path.name for path in (tmp_path / "out" / "configs").iterdir()) == [
        "inference.toml",
        "orchestrator.toml",
        "origins.json",
        "rl.toml",
        "trainer.toml",
    ]


@pytest.mark.slow
def test_the_process_of_a_command_opens_the_config_once_and_parses_the_options_once(
    rl_toml: Path, tmp_path: Path
) -> None:
    """Counted by the interpreter itself, for files that the config inherits from, too."""
    top = tmp_path / "top.toml"
    top.write_text(f'toml_files = ["{rl_toml}"]\n', encoding="utf-8")
    words = ["rl", str(top), "--output-dir", str(tmp_path / "out"), "--device", "cpu", "--max-steps", "2", "--dry-run"]
    done = subprocess.run([sys.executable, "-c", COUNTED, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    opened, parsed = json.loads(done.stderr.splitlines()[-1])
    assert {name: count for name, count in opened.items() if name in (str(top), str(rl_toml))} == {
        str(top): 1,
        str(rl_toml): 1,
    }
    assert parsed == 1


@pytest.mark.parametrize(("words", "gpus"), [(["--single-gpu"], ("0",)), (["--colocate", 2], ("0", "1"))])
def test_gpus_for_both(
    words: list[object], gpus: tuple[str, ...], launches: Launches, rl_toml: Path, tmp_path: Path
) -> None:
    assert run("rl", rl_toml, "--output-dir", tmp_path / "out", *words).exit_code == 0
    assert launches.sharing == [shared(gpus=gpus, shares_gpus=True)]
    refused = run("rl", rl_toml, "--output-dir", tmp_path / "other", *words, "--infer-gpus", 2)
    assert refused.exit_code == 2


def test_the_first_of_the_visible_ids_are_taken(
    launches: Launches, rl_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab,MIG-cd,7")
    assert run("rl", rl_toml, "--output-dir", tmp_path / "out").exit_code == 0
    assert launches.sharing == [shared(gpus=("GPU-ab", "MIG-cd"))]


def test_the_launchers_exit_code_is_the_commands(launches: Launches, rl_toml: Path, tmp_path: Path) -> None:
    launches.code = 3
    assert run("rl", rl_toml, "--output-dir", tmp_path / "out").exit_code == 3


def test_another_runs_checkpoints_are_left_alone(rl_toml: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoints" / "step_4").mkdir(parents=True)
    result = run("rl", rl_toml, "--output-dir", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 2
    assert not (tmp_path / "out" / "configs").exists()


def test_what_is_not_built_is_refused_before_the_start(rl_toml: Path, tmp_path: Path) -> None:
    result = run("rl", rl_toml, "--output-dir", tmp_path / "out", "--max-model-len", 5)
    assert result.exit_code == 2
    assert "max_model_len = 5 is not supported yet" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    """A `/dev` with two GPUs."""
    for index in range(2):
        (tmp_path / f"nvidia{index}").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("device", "mask", "gpus"),
    [
        ("auto", None, ("0", "1")),
        ("auto", "1,0", ("1", "0")),
        ("cpu", None, ("0", "1")),
        ("auto", "", ()),
    ],
)
def test_where_a_run_of_two_goes_on_a_machine_with_two_gpus(
    device: Literal["auto", "cpu"], mask: str | None, gpus: tuple[str, ...], two_gpus: Path
) -> None:
    env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert first_gpus(device, 2, env, two_gpus) == gpus


def test_more_gpus_than_there_are_is_an_error(two_gpus: Path) -> None:
    with pytest.raises(UsageError, match="takes 3 GPUs, and 2 can be used here"):
        first_gpus("auto", 3, {}, two_gpus)


def test_cuda_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cuda"):
        first_gpus("cuda", 1, {}, tmp_path)

"""What all commands have in common: examples in their help, exit codes, plain text where nobody sees colours."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medarc_rl import medarc_jobs, medarc_slurm, medarc_submit, medarc_train
from medarc_rl.cli import EXAMPLES, EXIT_CODES, commands_of
from prime_rl.utils.private import RUNTIME_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
BIN = Path(sys.executable).parent
APPS = {
    "medarc_train": medarc_train.app,
    "medarc_slurm": medarc_slurm.app,
    "medarc_submit": medarc_submit.app,
    "medarc_jobs": medarc_jobs.app,
}
COMMANDS = {f"{program} {name}": command for program, app in APPS.items() for name, command in commands_of(app).items()}
GROUPS = {command.split()[1] for command in COMMANDS if len(command.split()) == 3}
"""Commands that have commands of their own."""


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_help_page_ends_with_its_examples(command: str) -> None:
    program, *names = command.split()
    result = CliRunner().invoke(APPS[program], [*names, "--help"])
    end = "\n".join(["  Examples:", *(f"    {example}" for example in EXAMPLES[command]), ""])
    assert (result.exit_code, result.output[-len(end) :]) == (0, end)


@pytest.mark.parametrize("example", [example for examples in EXAMPLES.values() for example in examples])
def test_an_example_can_be_typed(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options exist, and its config loads with the keys that are not options of the command."""
    monkeypatch.chdir(ROOT)
    program, name, *words = shlex.split(example)
    name = f"{name} {words.pop(0)}" if name in GROUPS else name
    context = COMMANDS[f"{program} {name}"].make_context(name, list(words))
    config_words = [*(context.params.get("words") or []), *context.args]
    if name == "explain" or not any(word.endswith(".toml") for word in config_words):
        return
    result = CliRunner().invoke(medarc_train.app, ["explain", *(word for word in config_words if word != "rl")])
    assert result.exit_code == 0, result.output


def table_in(text: str) -> dict[str, str]:
    """Exit codes and their meaning, from a table of a page."""
    return dict(re.findall(r"^\| (\d+|128 \+ n) \| ([^|]+) \|$", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("", "Missing command. Give one of sft, dpo, rm, rl, eval, "),
        ("env", "Missing command. Give one of new, check, try, install, list, uninstall, or --help"),
        ("sft {sft} --train-gpus 2", "--train-gpus: unknown option; did you mean --gpus?"),
        (
            "rl {rl} --gpus 2",
            "--gpus: unknown option; use --train-gpus N and --infer-gpus N; CUDA_VISIBLE_DEVICES says which",
        ),
        ("sft {sft} --data foo", "foo: unexpected argument; --data is a section: did you mean --data.name?"),
        ("sft {sft} --ckpt foo", "foo: unexpected argument; --ckpt is a section: set one of its keys, as --ckpt.KEY"),
        ("sft {sft} foo", "foo: unexpected argument"),
    ],
)
def test_a_slip_names_what_was_probably_meant(words: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    configs = {name: f"examples/reverse_text/{name}_cpu.toml" for name in ("sft", "rl")}
    result = CliRunner().invoke(medarc_train.app, words.format(**configs).split())
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {fault}")


def test_the_page_and_the_help_list_the_same_exit_codes() -> None:
    documented = set(table_in(PAGE.read_text(encoding="utf-8")))
    assert documented == {"0", "1", "2", "128 + n"}
    assert documented == set(re.findall(r"^  (\d+|128 \+ n)  ", EXIT_CODES, re.MULTILINE))


def test_each_command_ends_with_0_or_2_as_documented(tmp_path: Path) -> None:
    wrong = {name: [str(tmp_path)] for name in ("watch", "report", "rollouts")} | {
        "migrate": [str(tmp_path / "no.toml")]
    }
    for command in COMMANDS:
        program, *names = command.split()
        assert CliRunner().invoke(APPS[program], [*names, "--help"]).exit_code == 0, command
        words = wrong.get(names[0], [str(tmp_path / "no.toml")])
        result = CliRunner().invoke(APPS[program], [*names, *words])
        assert result.exit_code == 2, f"{command}: {result.output}"
        assert result.stderr.startswith("error: "), command


def test_a_run_on_s3_cannot_be_followed() -> None:
    result = CliRunner().invoke(medarc_train.app, ["watch", "s3://bucket/runs/first"])
    told = "error: RUN: a run on S3 is downloaded once, and cannot be followed: add --once\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", told)


def test_ctrl_c_ends_watching_with_130_and_leaves_the_run_alone(tmp_path: Path) -> None:
    """The launcher of the run is this process."""
    for file, table in {
        "configs/rl.toml": "max_steps = 3\n",
        "attempts/001.json": json.dumps({"attempt": 1, "started": "2026-11-22T12:00:00+00:00", "host": "here"}),
        "run.lock": json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": "now"}),
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(table)
    before = sorted(tmp_path.rglob("*"))
    command = [str(BIN / "medarc_train"), "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == f"{tmp_path.name}: rl, running, no step yet\n"
        watching.send_signal(signal.SIGINT)
        shown, complaints = watching.communicate()
    assert (watching.returncode, complaints) == (130, "stopped watching; the run was not touched\n")
    assert "Traceback" not in shown
    assert sorted(tmp_path.rglob("*")) == before


def words_of_commands() -> Iterator[tuple[str, list[str]]]:
    config = "examples/reverse_text/rl_cpu.toml"
    yield from ((each.split()[0], [*each.split()[1:], "--help"]) for each in COMMANDS)
    yield "medarc_train", ["explain", config]
    yield "medarc_train", ["rl", config, "--no-such-key", "1"]
    yield "medarc_train", ["watch", "examples"]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("medarc_slurm", "sft {toml} --dry-run --setup {path}"),
        ("medarc_slurm", "sft {toml} --dry-run --dependency afterany:1 --output-dir {path}"),
        ("medarc_train", "explain {path}"),
        ("medarc_train", "chat {path}"),
    ],
)
def test_a_path_that_the_system_refuses_is_one_line(
    program: str, words: str, sft_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the paths of another user are. Root may see these; a name that is too long stops it, too."""
    monkeypatch.chdir(tmp_path)
    path = f"{tmp_path}/{'x' * 300}"
    result = CliRunner().invoke(APPS[program], words.format(toml=sft_toml, path=path).split())
    assert result.exit_code in (1, 2), result.output
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert line.startswith(f"error: {path}")
    assert line.endswith(": File name too long")


WITHOUT_HOME = ("unshare", "--user", "--map-user=12345", "env", "-u", "HOME", "-u", "XDG_STATE_HOME")
"""A user whom the system does not know, as in a container with a random user id."""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*WITHOUT_HOME, "true"]).returncode != 0,
    reason="unshare --user is missing or not allowed",
)
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("medarc_jobs", "list"),
        ("medarc_train", "env list"),
        ("medarc_train", "sft tiny.toml --device cpu --dry-run --output-dir out --clean-output-dir"),
        ("medarc_slurm", "sft tiny.toml --dry-run --output-dir out"),
    ],
)
def test_commands_run_for_a_user_without_a_home_directory(
    program: str, words: str, sft_toml: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / "configs").mkdir(parents=True)
    start = f"from medarc_rl.scripts import {program}; {program}()"
    env = os.environ | {RUNTIME_VARIABLE: str(tmp_path / "runtime")}
    argv = [*WITHOUT_HOME, sys.executable, "-c", start, *words.split()]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "~").exists()


RUN_EACH = """
import json, os, sys, traceback
from medarc_rl import medarc_jobs, medarc_slurm, medarc_submit, medarc_train, scripts
for program, words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        try:
            sys.argv = [program, *words]
            getattr(scripts, program)()
        except SystemExit:
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.wait()
"""
"""Runs each command in a fork of one interpreter, because importing the commands takes over a second each time."""


def test_no_command_prints_colours_into_a_pipe() -> None:
    env = {"PATH": "/usr/bin:/bin", "TERM": "xterm-256color", "HOME": "/nonexistent"}
    argv = [sys.executable, "-c", RUN_EACH, json.dumps(list(words_of_commands()))]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env, cwd=ROOT)
    shown = done.stdout + done.stderr
    assert "\x1b" not in shown
    assert "Traceback" not in shown
    assert shown.count("Usage: ") == len(COMMANDS)
    assert "--no-such-key: unknown option" in shown


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "examples/reverse_text/rl_cpu.toml", "--json"],
        ["explain", "examples/reverse_text/rl_cpu.toml", "--diff", "examples/reverse_text/rl_lora_cpu.toml", "--json"],
        ["rl", "examples/reverse_text/rl_cpu.toml", "--estimate", "--json"],
    ],
    ids=" ".join,
)
def test_json_is_one_document(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert json.loads(CliRunner().invoke(medarc_train.app, words).stdout)


@pytest.mark.parametrize(
    "command",
    [
        "medarc_train sft --dry-run @ examples/reverse_text/sft_cpu.toml --scheduler.type constant",
        "medarc_train sft --estimate --gpu H100 @ examples/reverse_text/sft_cpu.toml --scheduler.type constant",
        pytest.param("medarc_train rl --dry-run examples/reverse_text/rl_cpu.toml", marks=pytest.mark.slow),
        "medarc_slurm sft --dry-run @ examples/reverse_text/sft_cpu.toml --scheduler.type constant",
        pytest.param("medarc_slurm rl --dry-run examples/reverse_text/rl_cpu.toml", marks=pytest.mark.slow),
        "sft --dry-run @ examples/reverse_text/sft_cpu.toml --scheduler.type constant",
        pytest.param("rl --dry-run @ examples/reverse_text/rl_cpu.toml", marks=pytest.mark.slow),
    ],
)
def test_a_warning_about_the_config_is_one_line_and_said_once(command: str, tmp_path: Path) -> None:
    program, *words = command.split()
    argv = [str(BIN / program), *words, "--output-dir", str(tmp_path / "out")]
    env = {**os.environ, "PRIME_RL_TYPO": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if "PRIME_RL_TYPO" in line or "scheduler.type" in line]
    kind = "sft" if "sft" in words or program == "sft" else "rl"
    assert f"warning: PRIME_RL_TYPO is ignored: {kind} has no key typo" in said
    assert len(said) == len(set(said)) == (2 if "constant" in words else 1)
    assert all(line.startswith("warning: ") for line in said)
    assert "Warning" not in done.stderr


def test_a_folder_in_the_place_of_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sft.toml").touch()
    (tmp_path / "metrics.jsonl").mkdir()
    result = CliRunner().invoke(medarc_train.app, ["watch", str(tmp_path), "--once"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {tmp_path / 'metrics.jsonl'}: Is a directory\n"


HOSTILE = "x\x1b]52;c;aGk=\x07\x1b[2J\u202e\x9b31m"
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.mark.parametrize(
    "words",
    [
        "explain {file}",
        "sft @ {file} --dry-run --output-dir {out}",
        "migrate {file}",
        pytest.param("sft @ {file} --output-dir {out}", marks=pytest.mark.slow),
    ],
)
def test_no_value_of_a_config_acts_on_the_terminal(words: str, tmp_path: Path) -> None:
    file = tmp_path / "sft.toml"
    file.write_text(
        f"max_steps = 5\n[model]\nname = {json.dumps(HOSTILE)}\n[data]\nseq_len = 128\nname = {json.dumps(HOSTILE)}\n"
    )
    argv = [BIN / "medarc_train", *words.format(file=file, out=tmp_path / "out").split()]
    # A terminal in Latin-1 takes the rest, too.
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, check=False)
    logs = [log.read_text(encoding="utf-8", errors="replace") for log in tmp_path.glob("out/logs/*.log")]
    said = "".join([(done.stdout + done.stderr).decode("latin-1"), *logs])
    assert done.returncode in (0, 1, 2)
    assert "]52;c" in said
    assert ACTING.search(said) is None
    assert "Traceback" not in said


@pytest.mark.parametrize("given", ["{fifo}", "{toml} --data.name {fifo}", "{toml} --data.name /dev/zero"])
def test_a_pipe_or_a_device_is_one_line_and_not_waited_for(given: str, sft_toml: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    words = given.format(fifo=tmp_path / "pipe", toml=sft_toml).split()
    result = CliRunner().invoke(medarc_train.app, ["sft", *words, "--output-dir", str(tmp_path / "out"), "--dry-run"])
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert result.exit_code == 2
    assert re.match(r"error: .*(pipe|/dev/zero).*: .*a pipe or a device", line)

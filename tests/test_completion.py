"""Shells complete commands, options, config keys, values, files and runs."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medarc_rl import medarc_jobs, medarc_slurm, medarc_submit, medarc_train
from medarc_rl.completion.answers import answers, bash_lines, words_of_line
from medarc_rl.completion.hooks import LINE_VARIABLE, SHELLS, VARIABLE, hook, install
from medarc_rl.completion.table import build, cache_file
from medarc_rl.jobs import JobLog, JobRecord, circumstances

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def table() -> dict[str, object]:
    return build("medarc_train")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, two runs and a file with a space in its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "my files").mkdir()
    for name in ("old", "new"):
        (tmp_path / "outputs" / name / "configs").mkdir(parents=True)
    os.utime(tmp_path / "outputs" / "old", (1, 1))
    return tmp_path


def values(table: dict[str, object], line: str) -> list[str]:
    return [answer.value for answer in answers(table, words_of_line(line)[1:])]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("medarc_train expl", ["explain"]),
        ("medarc_train env in", ["install"]),
        ("medarc_train env new x --kind t", ["tools"]),
        ("medarc_train rl --infer-g", ["--infer-gpus"]),
        ("medarc_train rl --trainer.opt", ["--trainer.optim."]),
        ("medarc_train rl --trainer.optim.weight", ["--trainer.optim.weight-decay"]),
        ("medarc_train rl --trainer.optim.weight_d", ["--trainer.optim.weight_decay"]),
        ("medarc_train rl --orchestrator.env.0.id", ["--orchestrator.env.0.id"]),
        ("medarc_train rl --trainer.optim.type mu", ["muon"]),
        ("medarc_train rl --trainer.optim.type=mu", ["--trainer.optim.type=muon"]),
        ("medarc_train sft --trainer.opt", []),
        ("medarc_train rl ba", ["base.toml"]),
        ("medarc_train rl @ ba", ["base.toml"]),
        ("medarc_train rl @ba", ["@base.toml"]),
        ("medarc_train rl @ base.toml --seq-l", ["--seq-len"]),
        ("medarc_train watch ", ["outputs/new", "outputs/old", "my files/", "outputs/"]),
        ("medarc_train watch outputs/o", ["outputs/old"]),
        ("medarc_train explain base.toml trainer.optim.l", ["trainer.optim.lr"]),
        ("medarc_train explain base.toml --as ", ["rl", "sft", "dpo", "rm", "eval"]),
        ("medarc_train explain base.toml --as sft val.in", ["val.interval"]),
        ("medarc_train nothing ", []),
        ("medarc_train --show-completion f", ["fish"]),
        ("medarc_train rl --no.such.key ", ["base.toml", "my files/", "outputs/"]),
        ("medarc_train rl /no/such/folder/", []),
        ("medarc_train rl 'my f", ["my files/"]),
    ],
)
def test_the_word_at_the_cursor_is_completed(
    table: dict[str, object], place: Path, line: str, expected: list[str]
) -> None:
    assert values(table, line) == expected


def test_jobs_are_completed_by_name_and_key(tmp_path: Path) -> None:
    for name in ("rt-sft", "rt-rl"):
        texts = {"backend": "ray", "id": "1", "kind": "rl", "config": "", "output": ""}
        JobLog.of_user().save(JobRecord(name=name, **texts, **circumstances("medarc_submit")))
    jobs = build("medarc_jobs")
    assert values(jobs, "medarc_jobs logs rt-s") == ["rt-sft"]
    assert set(values(jobs, "medarc_jobs wait ")) == {"last", "rt-sft", "rt-rl"}
    key = JobLog.of_user().find("rt-sft").key
    assert values(jobs, f"medarc_jobs cancel {key[:-1]}") == [key]


def test_every_key_of_a_config_can_be_reached(table: dict[str, object]) -> None:
    keys = table["keys"]["rl"]  # type: ignore[index]
    assert len(keys) > 400
    for key in ("trainer.optim.lr", "orchestrator.sampling.max_tokens", "inference.model.name"):
        found = values(table, f"medarc_train rl --{key}")
        assert f"--{key.rpartition('.')[0]}.{key.rpartition('.')[2]}" in found
    assert json.loads(json.dumps(table)) == table


def test_bash_gets_the_part_after_its_own_word_breaks(table: dict[str, object], place: Path) -> None:
    found = answers(table, ["rl", "--trainer.optim.type=mu"])
    assert list(bash_lines(found, "--trainer.optim.type=mu")) == ["muon"]
    assert list(bash_lines(answers(table, ["rl", "my"]), "my")) == ["my\\ files/"]


@pytest.mark.parametrize("line", ["", "medarc_train", "medarc_train 'a", 'medarc_train "a\\', "a\\", "a # b"])
def test_any_line_has_words(line: str) -> None:
    assert isinstance(words_of_line(line), list)


@pytest.mark.parametrize("app", [medarc_train.app, medarc_slurm.app, medarc_submit.app, medarc_jobs.app])
@pytest.mark.parametrize("shell", SHELLS)
def test_a_program_prints_its_completion(app: object, shell: str) -> None:
    result = CliRunner().invoke(app, ["--show-completion", shell], prog_name="medarc_train")  # type: ignore[arg-type]
    assert (result.exit_code, result.output) == (0, hook(shell, "medarc_train"))  # type: ignore[arg-type]


def test_installing_twice_writes_one_line(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("alias a=b")
    for _ in range(2):
        file, start = install("bash", "medarc_train", {}, tmp_path)
    assert start.read_text() == f"alias a=b\nsource {file}\n"
    assert install("fish", "medarc_train", {}, tmp_path) == [tmp_path / ".config/fish/completions/medarc_train.fish"]


@pytest.fixture(scope="module")
def shell_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user whose table of commands is in the cache."""
    home = tmp_path_factory.mktemp("home")
    env = {"HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    asking = {**env, VARIABLE: "bash", LINE_VARIABLE: "medarc_train rl --trainer.opt"}
    told = subprocess.run(["medarc_train"], env=asking, capture_output=True, text=True, check=True)
    assert (told.stdout, told.stderr) == ("--trainer.optim.\n", "")
    return env


def test_an_answer_imports_neither_the_commands_nor_pydantic(shell_env: dict[str, str]) -> None:
    code = (
        "import sys; sys.argv = ['medarc_train']; from medarc_rl.scripts import medarc_train; medarc_train()\n"
        "assert not {'pydantic', 'typer', 'jinja2', 'medarc_rl.medarc_train'} & set(sys.modules)"
    )
    env = {**shell_env, VARIABLE: "bash", LINE_VARIABLE: "medarc_train wat"}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "watch\n")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"fingerprint": "of other code"}'])
def test_a_damaged_or_old_table_is_built_again(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell_env: dict[str, str]
) -> None:
    from medarc_rl.completion.table import load

    monkeypatch.setenv("PRIME_RL_CACHE", str(tmp_path))
    file = cache_file("medarc_train")
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert "watch" in load("medarc_train")["commands"]
    assert "watch" in json.loads(file.read_text())["commands"]


START = {"bash": ["--norc", "-i"], "zsh": ["-f", "-i"], "fish": ["--no-config", "-i"]}


def typed(shell: str, env: dict[str, str], folder: Path, dialogue: Sequence[tuple[str, str]]) -> str:
    """What an interactive shell shows. A dialogue is keys, and the pattern to wait for before the next ones."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(shell, [shell, *START[shell]], env)
    shown = ""
    try:
        for keys, pattern in dialogue:
            os.write(terminal, keys.encode())
            while re.search(pattern, shown, re.DOTALL) is None:
                shown += os.read(terminal, 4096).decode(errors="replace")
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return shown


READY = r"ready\r\n.*[#$>%] "
"""The shell has run the first line, and shows its prompt again."""
LINE_START = "\x01"
"""Ctrl-A."""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_tab_key_completes_in_a_real_shell(shell: str, shell_env: dict[str, str], place: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = place / f"completion.{shell}"
    script.write_text(hook(shell, "medarc_train"))  # type: ignore[arg-type]
    start = f"source {script}; echo rea''dy\n"
    # A shell draws only what changes, so the completed line is printed by a command put before it.
    line = "medarc_train rl --trainer.optim.weight\t 7 --trainer.optim.type mu\tX"
    done = r"rl\|--trainer\.optim\.weight-decay\|7\|--trainer\.optim\.type\|muon\|X\|"
    shown = typed(shell, shell_env, place, [(start, READY), (f"{line}{LINE_START}printf '%s|' \n", done)])
    assert re.search(done, shown)

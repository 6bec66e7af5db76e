"""`medarc_train migrate` at the command line: what it prints, writes, refuses and returns."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl import medarc_train

OLD = "async_level = 1\n[trainer]\n[orchestrator]\nworkers_per_env = 2\n"
NEW = "max_async_level = 1\n[trainer]\n[orchestrator]\n# not carried: workers_per_env = 2\n"


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(medarc_train.app, ["migrate", *map(str, words)])


DOCS = Path(__file__).resolve().parents[1] / "docs" / "migrate.md"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.toml"
    path.write_text(OLD, encoding="utf-8")
    return path


def test_the_new_file_goes_to_stdout_and_the_report_to_stderr(old: Path) -> None:
    result = run(old)
    assert (result.exit_code, result.stdout) == (1, NEW)
    assert f"{old}:1: moved: async_level -> max_async_level\n" in result.stderr
    assert f"{old}:4: not carried: orchestrator.workers_per_env = 2: it was removed\n" in result.stderr
    assert result.stderr.endswith(f"{old}: rl config of an older version: 1 moved, 1 not carried\n")
    assert old.read_text(encoding="utf-8") == OLD


def test_a_byte_order_mark_is_no_part_of_a_file(old: Path) -> None:
    old.write_text(OLD, encoding="utf-8-sig")
    assert run(old).stdout == NEW


def test_the_example_in_the_documentation_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, old, new, report, *_ = re.findall(
        r"^```\w*\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    Path("old.toml").write_text(old, encoding="utf-8")
    result = run("old.toml")
    assert (result.exit_code, result.stdout, result.stderr) == (1, new, report)


def test_the_exit_code_is_0_when_everything_was_carried(old: Path) -> None:
    old.write_text("async_level = 1\n[trainer]\n[orchestrator]\n", encoding="utf-8")
    assert run(old).exit_code == 0


def test_a_file_is_written_and_not_overwritten_unasked(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.toml"
    result = run(old, "--output", new)
    assert (result.exit_code, result.stdout, new.read_text(encoding="utf-8")) == (1, "", NEW)
    new.write_text("mine", encoding="utf-8")
    refused = run(old, "-o", new)
    assert (refused.exit_code, refused.stderr) == (2, f"error: {new}: exists already: use --force to overwrite it\n")
    assert new.read_text(encoding="utf-8") == "mine"
    assert run(old, "-o", new, "--force").exit_code == 1
    assert new.read_text(encoding="utf-8") == NEW


def test_the_file_itself_is_changed_only_in_place_and_kept(old: Path) -> None:
    backup = old.with_name("old.toml.bak")
    assert run(old, "--output", old, "--force").exit_code == 2
    assert old.read_text(encoding="utf-8") == OLD
    assert run(old, "--in-place").exit_code == 1
    assert (old.read_text(encoding="utf-8"), backup.read_text(encoding="utf-8")) == (NEW, OLD)
    assert run(old, "--in-place").exit_code == 0
    assert (old.read_text(encoding="utf-8"), backup.read_text(encoding="utf-8")) == (NEW, OLD)
    old.write_text("async_level = 2\n[trainer]\n[orchestrator]\n", encoding="utf-8")
    assert run(old, "--in-place").exit_code == 2
    assert backup.read_text(encoding="utf-8") == OLD


def test_in_place_keeps_a_link_and_the_rights_of_the_file(old: Path, tmp_path: Path) -> None:
    old.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(old)
    assert run(link, "--in-place").exit_code == 1
    assert link.is_symlink()
    assert old.read_text(encoding="utf-8") == NEW
    assert old.stat().st_mode & 0o777 == 0o640


def test_the_kept_content_has_the_rights_of_the_file(old: Path) -> None:
    old.chmod(0o600)
    assert run(old, "--in-place").exit_code == 1
    kept = old.with_name(f"{old.name}.bak")
    assert (kept.read_text(encoding="utf-8"), kept.stat().st_mode & 0o777) == (OLD, 0o600)


def test_line_ends_stay_as_they_are(old: Path, tmp_path: Path) -> None:
    old.write_bytes(OLD.replace("\n", "\r\n").encode())
    run(old, "-o", tmp_path / "new.toml")
    assert (tmp_path / "new.toml").read_bytes() == NEW.replace("\n", "\r\n").encode()


def test_the_command_that_the_file_is_for_can_be_named(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text("max_steps = 3\n", encoding="utf-8")
    assert "choose one with --as" in run(file).stderr
    assert run(file, "--as", "sft").exit_code == 0
    assert run(file, "--as", "nothing").exit_code == 2


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"a = \n", ":1:5: not TOML: Invalid value"),
        (b"\xff\xfe\x00", ": not UTF-8 text (byte 0)"),
        (b"{}", ":1:1: not TOML: Invalid statement"),
        (b"a = " + b"[" * 20_000 + b"]" * 20_000, ": tables or lists are nested too deeply"),
        (b"a." * 2_000 + b"a = 1", f": {'a.' * 30}...: more than 64 levels of nested tables and lists"),
        (b"# " + b"x" * 300_000, ": more than 64 KiB: not a config"),
        (b"a = [" + b"1," * 3000 + b"]", ": more than 1000 values: not a config"),
        (b"", ": no PRIME-RL command has any of its keys: give the command with --as, such as --as rl"),
        (b"max_steps = 1\nmax_steps = 2\n", ":2:14: not TOML: Cannot overwrite a value"),
    ],
    ids=["no value", "not UTF-8", "JSON", "deep list", "deep key", "huge", "long", "empty", "twice"],
)
def test_what_is_no_config_is_refused_in_one_line(tmp_path: Path, content: bytes, fault: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    result = run(file)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {file}{fault}\n")


def test_what_is_no_file_is_refused_in_one_line(old: Path, tmp_path: Path) -> None:
    assert run(tmp_path).stderr == f"error: {tmp_path}: a directory, not a TOML file\n"
    assert run(tmp_path / "gone").stderr == f"error: {tmp_path / 'gone'}: no such file\n"
    assert run("/dev/zero").stderr == "error: /dev/zero: more than 64 KiB: not a config\n"
    assert run(old, "-o", tmp_path).stderr == f"error: {tmp_path}: a directory\n"
    missing = tmp_path / "no" / "new.toml"
    assert run(old, "-o", missing).stderr.endswith(f"error: {missing}: No such file or directory\n")
    assert run(old, "-o", missing, "--in-place").stderr == (
        "error: --in-place and --output exclude each other: give one\n"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_refused_in_one_line(old: Path) -> None:
    old.chmod(0)
    assert run(old).stderr == f"error: {old}: cannot be read (Permission denied)\n"


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"[[train.source]]\nenv.taskset.id = 'e{i}'\n" for i in range(150)),
        "".join(f"unknown_{i} = {i}\n" for i in range(450)),
        "[[eval.env]]\n" + "".join(f"args.a{i} = {{ b = {i} }}\n" for i in range(450)),
        "group_size = 4\nbatch_size = 8\n[eval]\nenvironment_ids = [" + "'x', " * 900 + "]\n",
        "async_level = 1\nextra = [" + "{ a = 1 }, " * 400 + "]\n",
    ],
    ids=["sources", "unknown keys", "inline tables", "ids", "list"],
)
def test_a_file_of_hundreds_of_keys_is_carried(tmp_path: Path, text: str) -> None:
    file = tmp_path / "large.toml"
    file.write_text(text, encoding="utf-8")
    assert run(file, "--as", "orchestrator").exit_code in (0, 1)


def test_a_run_with_a_file_of_another_version_suggests_to_migrate_it(old: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(medarc_train.app, ["rl", str(old), "--output-dir", str(tmp_path / "out"), "--dry-run"])
    assert result.exit_code == 2
    advice, *faults = result.stderr.splitlines()
    assert advice == f"warning: {old} is for another version of PRIME-RL: `medarc_train migrate {old}` rewrites it"
    assert sorted(fault.split(": ")[:3] for fault in faults) == [
        ["error", str(old), "async_level"],
        ["error", str(old), "orchestrator.workers_per_env"],
    ]

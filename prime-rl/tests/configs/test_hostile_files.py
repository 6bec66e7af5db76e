"""Files and options that no config should look like: each is refused in one line, without a traceback and soon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prime_rl.checks import start_faults
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.utils.errors import MAX_FAULTS
from prime_rl.utils.pydantic_config import ConfigError, load_config, parse_argv

DEEP = 5000
DEEPER = 50_000
"""Beyond what `json` reads, also with Python 3.13."""
LONG_INT = "9" * 5000
MANY_BYTES = 3 << 20
MANY_KEYS = 60_000
SOME_KEYS = 9000
LONG_CHAIN = 1200


def only_fault(*args: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_argv(RLConfig, argv=args)
    assert len(error.value.faults) == 1
    return error.value.faults[0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"max_steps = {'[' * DEEP}{']' * DEEP}", "nested too deeply"),
        (f"{'.'.join(['a'] * DEEP)} = 1", "more than 64 levels of nested tables and lists"),
        (f"[{'.'.join(['a'] * DEEP)}]\nx = 1", "more than 64 levels of nested tables and lists"),
        (
            f"orchestrator.sampling.extra_body = {'{a=' * 300}1{'}' * 300}",
            "more than 64 levels of nested tables and lists",
        ),
        (f"max_steps = {LONG_INT}", "an integer with too many digits"),
        (f"max_steps = 0x{'f' * 5000}", "max_steps: an integer that does not fit into 64 bits"),
        (f"trainer.optim.lr = 0x{'f' * 5000}", "trainer.optim.lr: an integer that does not fit into 64 bits"),
        ('model.name = "a\\u0000b"', "model.name: holds a NUL character"),
        ('toml_files = ["a\\u0000b"]', "toml_files.0: holds a NUL character"),
        ('"a\\u0000b" = 1', "the key 'a\\x00b' holds a NUL character"),
        ("x = [" + "1," * (MANY_BYTES // 2) + "]", "more than 1 MiB, too large for a config"),
        ("".join(f"k{number}=1\n" for number in range(MANY_KEYS)), "more than 10000 keys"),
    ],
    ids=range(12),
)
def test_a_hostile_file_is_one_line(toml, text: str, fault: str) -> None:
    path = toml(text)
    message = only_fault("@", str(path))
    assert message.startswith(f"{path}: ")
    assert fault in message


def test_a_file_without_an_end_is_not_read_to_its_end() -> None:
    assert only_fault("@", "/dev/zero") == "/dev/zero: cannot be read (a pipe or a device; write its text to a file)"


def test_thousands_of_faults_are_cut(toml) -> None:
    path = toml("".join(f"k{number}=1\n" for number in range(SOME_KEYS)))
    with pytest.raises(ConfigError) as error:
        load_config(RLConfig, [path])
    assert error.value.faults[-1] == f"and {SOME_KEYS - MAX_FAULTS} more faults"


def test_a_symlink_that_leads_to_itself_is_one_line(toml, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    unreadable = f"{loop}: cannot be read (Too many levels of symbolic links)"
    assert only_fault("@", str(loop)) == unreadable
    assert only_fault("@", str(toml('toml_files = ["loop"]'))) == unreadable


@pytest.mark.parametrize(
    "key", ["output_dir", "model.name", "trainer.tokenizer.name", "trainer.tokenizer.chat_template"]
)
@pytest.mark.parametrize("component", [RLConfig, SFTConfig])
def test_a_path_that_leads_nowhere_is_told_before_the_start(component: type, key: str, tmp_path: Path) -> None:
    key = key if component is RLConfig else key.removeprefix("trainer.")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop / "x", Path("./" + "x" * 5000), Path("/" + "x/" * 3000)):
        faults = start_faults(load_config(component, overrides=[f"--{key}={path}"]))
        assert any(str(path)[:50] in fault for fault in faults), path
        assert all(len(fault) < 1000 and "\n" not in fault for fault in faults)


@pytest.mark.parametrize(
    ("component", "key"), [(SFTConfig, "data.name"), (SFTConfig, "output_dir"), (RLConfig, "output_dir")]
)
def test_a_tilde_is_not_replaced(component: type, key: str) -> None:
    faults = start_faults(load_config(component, overrides=[f"--{key}=~/runs/x"]))
    assert any(fault.endswith("; ~ is not expanded here: write the full path") for fault in faults)


def test_a_long_chain_of_bases_is_refused(toml) -> None:
    for number in range(LONG_CHAIN):
        toml(f'toml_files = ["{number + 1}.toml"]', f"{number}.toml")
    first = toml(f'toml_files = ["0.toml"]\nmax_steps = {LONG_CHAIN}', "child.toml")
    assert "too many files inherit from one another through toml_files: at most 50 in one line" in only_fault(
        "@", str(first)
    )


def test_a_crowd_of_bases_is_refused(toml) -> None:
    names = ", ".join(f'"{number}.toml"' for number in range(LONG_CHAIN))
    assert "at most 1000 in all" in only_fault("@", str(toml(f"toml_files = [{names}]")))


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--orchestrator.sampling.extra-body", '{"a":' * DEEPER + "1" + "}" * DEEPER, "nested too deeply"),
        ("--orchestrator.sampling.extra-body", f'{{"a":{LONG_INT}}}', "an integer with too many digits"),
        ("--orchestrator.sampling.extra-body", f'{{"a":{10**30}}}', "a: an integer that does not fit into 64 bits"),
        ("--orchestrator.sampling.extra-body", '{"a":"\\ud800"}', "a: is not UTF-8"),
        ("--orchestrator.sampling.extra-body", '{"a":"\\u0000"}', "a: holds a NUL character"),
        ("--trainer-gpu-ids", "[" * DEEPER, "nested too deeply"),
        ("--output-dir", os.fsdecode(b"/tmp/\xff"), "is not UTF-8"),
        (f"--orchestrator.env.{10**30}.id", "x", "so the next index is 1"),
        (f"--orchestrator.env.{LONG_INT}.id", "x", " … "),
    ],
)
def test_a_hostile_option_is_one_line(option: str, value: str, fault: str) -> None:
    message = only_fault(option, value)
    assert message.startswith(option[:30])
    assert fault in message


def test_a_command_line_of_many_words_is_refused() -> None:
    assert only_fault(*["--x"] * 20_000) == "20000 words: at most 10_000; write the values to a file"


def test_no_character_of_a_file_acts_on_the_terminal(toml) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(RLConfig, [toml('"\\u001b[31mred\\u202e" = 1')])
    assert str(error.value).isprintable()

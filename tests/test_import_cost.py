"""Help and dry runs answer at once: they import nothing of what trains."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from medarc_rl import medarc_train
from medarc_rl.cli import Group, Lazy, commands_of
from medarc_rl.medarc_train import COMMANDS

HEAVY = ("torch", "transformers", "datasets", "verifiers", "vllm", "wandb", "numpy", "rich")
MODEL = Path(__file__).parents[1] / "examples" / "reverse_text" / "model"

RUN = """
import sys
from medarc_rl.{command} import main
sys.argv = ["{command}", *{words!r}]
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
sys.stderr.write(" ".join(name for name in {heavy!r} if name in sys.modules))
"""


LIGHT = ("prime_rl.configs", "prime_rl.launch", "prime_rl.run", "prime_rl.storage", "pydantic_settings")


def commands_below(declared: Mapping[str, Lazy | Group], prefix: str = "") -> Iterator[tuple[str, Lazy]]:
    for name, each in declared.items():
        if isinstance(each, Group):
            yield from commands_below(each.commands, f"{name} ")
        else:
            yield f"{prefix}{name}", each


@pytest.mark.parametrize("words", ["--help", *(f"{name} --help" for name, _ in commands_below(COMMANDS))])
def test_help_imports_no_more_than_typer_and_the_options(words: str) -> None:
    code = RUN.format(command="medarc_train", words=words.split(), heavy=(*HEAVY, *LIGHT))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_list_of_commands_shows_the_first_sentence_of_each_help() -> None:
    texts = commands_of(medarc_train.app)
    for name, lazy in commands_below(COMMANDS):
        assert " ".join(texts[name].help.split()).startswith(lazy.summary), name


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("medarc_slurm", "--help"),
        ("medarc_slurm", "rl --help"),
        ("medarc_slurm", "rl {config} --output-dir {out} --dry-run"),
        ("medarc_submit", "rl --help"),
        ("medarc_jobs", "list --no-ask"),
        ("medarc_train", "rl --help"),
        ("medarc_train", "migrate --help"),
        pytest.param("medarc_train", "rl {config} --output-dir {out} --dry-run", marks=pytest.mark.slow),
        ("medarc_train", "rl {config} --output-dir {out} --model.name {model} --estimate --gpu 40"),
    ],
)
def test_nothing_heavy_is_imported(command: str, words: str, rl_toml: Path, tmp_path: Path) -> None:
    arguments = words.format(config=rl_toml, out=tmp_path / "out", model=MODEL).split()
    code = RUN.format(command=command, words=arguments, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_migration_imports_nothing_heavy(rl_toml: Path) -> None:
    code = RUN.format(command="medarc_train", words=["migrate", str(rl_toml)], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == rl_toml.read_text(encoding="utf-8")
    assert done.stderr == f"{rl_toml}: rl config of this version: nothing to change\n"

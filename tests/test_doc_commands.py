"""Every command line in the documents is run, dry-run or parsed, or is in a list that says what it needs."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from medarc_rl import medarc_jobs, medarc_slurm, medarc_submit, medarc_train
from medarc_rl.cli import commands_of
from prime_rl.configs.surface.docs import ROOTS
from prime_rl.inference.guards import METRICS
from prime_rl.inference.protocol import parse_body
from prime_rl.inference.reference import ROUTES
from prime_rl.run.paths import RunPaths
from prime_rl.utils.files import STABLE
from prime_rl.utils.pydantic_config import parse_argv

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "prime-rl/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(page for room in ("examples", "benchmarks") for page in (ROOT / room).glob("*/README.md")),
]
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONTROL = {"&&", "||", ";", "|", "&"}
REDIRECTIONS = {">", ">>", "<", "2>"}
CONFIG_CLASSES = {root.component.replace("_", "-"): root for root in ROOTS}

Check = Callable[[Sequence[str], Path], None]

NOT_RUN = {
    "ray": "Ray's job server on another machine",
    "cat": "shows a file",
    "cd": "changes the directory",
    "command": "looks for uv",
    "cp": "copies a file",
    "export": "sets a variable",
    "kill": "signals a process of a run",
    "open": "shows a file on the reader's machine",
    "prime": "downloads environments from a hub, with another package",
    "torchrun": "starts the ranks of one of several machines",
    "source": "reads a file of shell completion",
    "sbatch": "needs Slurm; tests/test_slurm.py submits with it",
    "scp": "copies from another machine",
    "squeue": "needs Slurm",
    "ssh": "needs another machine",
    "tail": "follows a log",
    "uvx": "runs another project's program",
    "wandb": "needs an account",
}
"""Programs that no test runs, and why."""


RUN_BY = {
    "docs/choices.md": "tests/test_choices_page.py",
    "docs/environments.md": "tests/test_environment_page.py",
    "docs/own_loss.md": "tests/test_own_loss_page.py",
    "docs/s3.md": "tests/test_s3_page.py",
}
"""Pages whose commands a test of their own runs."""


def simple_commands(block: str) -> Iterator[list[str]]:
    """The words of each command in a block, without comments."""
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in CONTROL:
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def cleaned(words: Sequence[str]) -> list[str]:
    """A command without its redirections and the variables that are set for it alone."""
    kept: list[str] = []
    skipped = False
    for word in words:
        if skipped or word in REDIRECTIONS:
            skipped = word in REDIRECTIONS
        elif kept or not re.match(r"[A-Z_]+=", word):
            kept.append(word)
    return kept


def commands() -> Iterator[tuple[Path, tuple[str, ...]]]:
    for page in PAGES:
        for block in BASH.findall(page.read_text(encoding="utf-8")):
            for words in simple_commands(block):
                if (command := cleaned(words)) and page.relative_to(ROOT).as_posix() not in RUN_BY:
                    yield page, tuple(command)


COMMANDS = list(dict.fromkeys(commands()))


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=[f"{page.relative_to(ROOT)}: {' '.join(words)}" for page, words in COMMANDS]
)
def test_every_command_in_a_page_can_be_run(
    page: Path, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = without_uv(command)
    if words[0] not in NOT_RUN:
        check = CHECKS.get(words[0])
        assert check is not None, f"{words[0]}: a check for it belongs in CHECKS, or the reason for none in NOT_RUN"
        check(words, tmp_path)


def without_uv(words: Sequence[str]) -> list[str]:
    """The command that `uv run` runs; a script of the repository is one of Python."""
    rest = list(words)
    if rest[:2] == ["uv", "run"]:
        rest = rest[2:]
        while rest[0].startswith("-"):
            assert rest[0] in ("--group", "--extra"), rest[0]
            assert rest[1] in known_extras(), rest[1]
            rest = rest[2:]
    return ["python", *rest] if rest[0].endswith(".py") else rest


def known_extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {*project["dependency-groups"], *project["project"]["optional-dependencies"]}


APPS = {
    "medarc_train": medarc_train.app,
    "medarc_slurm": medarc_slurm.app,
    "medarc_submit": medarc_submit.app,
    "medarc_jobs": medarc_jobs.app,
}


def check_wrapper(words: Sequence[str], tmp_path: Path) -> None:
    """Runs are dry runs. Other commands are run if they only read configs, else their words are parsed."""
    program, kind, *rest = words
    app = APPS[program]
    if program == "medarc_submit":
        # Back-ends are asked only in tests of their own.
        assert [word for word in rest if word.endswith(".toml") and not Path(word).is_file()] == []
    elif kind in ("sft", "rl", "eval"):
        check_dry_run(kind, rest, tmp_path)
        return
    if kind == "explain" and rest[0].endswith(".toml"):
        result = CliRunner().invoke(app, [kind, *rest])
        assert result.exit_code == 0, result.output
    elif kind.startswith("-"):
        program_options: Any = typer.main.get_command(app).params
        assert kind == "--help" or kind in [name for option in program_options for name in option.opts]
    else:
        known = commands_of(app)
        if kind not in known and rest:
            kind, rest = f"{kind} {rest[0]}", rest[1:]
        assert kind in known, f"{program} has no command {kind}"
        known[kind].make_context(kind, rest)


def check_dry_run(kind: str, rest: Sequence[str], tmp_path: Path) -> None:
    """`medarc_slurm` stands in for `medarc_train`: it takes the same words, and looks for no GPU. A run that a command
    resumes or evaluates has saved one step."""
    words = [word for word in rest if word not in ("--preflight", "--dry-run")]
    run = RunPaths(tmp_path)
    for saved in (run.checkpoint(1), run.orchestrator.checkpoint(1).parent) if "--resume" in words else ():
        saved.mkdir(parents=True)
        (saved / STABLE).touch()
    if "--weights-dir" in words:
        weights = tmp_path / "trained" / "weights"
        (weights / "step_5").mkdir(parents=True)
        (weights / "step_5" / STABLE).touch()
        words[words.index("--weights-dir") + 1] = str(weights)
    if "--trainer.model.lora.path" in words:
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16, "lora_alpha": 32}')
        (adapter / "adapter_model.safetensors").touch()
        words[words.index("--trainer.model.lora.path") + 1] = str(adapter)
    app = medarc_train.app if kind == "eval" else medarc_slurm.app
    result = CliRunner().invoke(app, [kind, *words, "--dry-run", "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output


def check_engine(words: Sequence[str], tmp_path: Path) -> None:
    """The config loads. `sft.toml` without a folder stands for the reader's own file."""
    program, *rest = words
    if rest != ["@", f"{program}.toml"]:
        parse_argv(CONFIG_CLASSES[program], argv=rest)


def check_python(words: Sequence[str], tmp_path: Path) -> None:
    """The module or script exists, and knows the options. What generators print is compared in tests of their own."""
    if words[1] == "-m":
        assert find_spec(words[2]) is not None, words[2]
        return
    script = Path(words[1])
    assert script.is_file(), script
    source = script.read_text(encoding="utf-8")
    assert [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source] == []


def check_pytest(words: Sequence[str], tmp_path: Path) -> None:
    """The files exist, and so do markers."""
    expressions = [words[index + 1] for index, word in enumerate(words) if word == "-m"]
    markers = {name for each in expressions for name in each.split()} - {"not", "and", "or"}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert markers <= {marker.partition(":")[0] for marker in declared["markers"]}
    assert [word for word in words[1:] if "/" in word and not Path(word).exists()] == []


def check_curl(words: Sequence[str], tmp_path: Path) -> None:
    """The inference server has the route, which takes the body. The trainer's metrics server has `/metrics`."""
    address = next(word for word in words if re.match(r"(http://)?(localhost|127\.0\.0\.1):", word))
    if address.endswith(METRICS):
        return
    (route,) = [route for route in ROUTES if address.endswith(route.path)]
    parse_body(route.body, words[words.index("-d") + 1].encode())


def check_uv(words: Sequence[str], tmp_path: Path) -> None:
    """`uv sync`: the extras exist, and those that are installed stay."""
    assert words[1] == "sync", words
    assert ("--extra" in words) <= ("--inexact" in words), "without --inexact, uv removes all other extras"
    assert {name for option, name in pairwise(words) if option in ("--extra", "--group")} <= known_extras()


def check_path(words: Sequence[str], tmp_path: Path) -> None:
    """The script, or the folder to install, exists."""
    names = [word for word in words[1:] if "/" in word and not word.startswith(("~", "-"))]
    assert [name for name in names if not Path(name).exists()] == []


def check_script(words: Sequence[str], tmp_path: Path) -> None:
    """The script exists, and the command that it runs can be run."""
    start = words.index("uv") if "uv" in words else len(words)
    check_path(words[:start], tmp_path)
    if start < len(words):
        command = without_uv(words[start:])
        CHECKS[command[0]](command, tmp_path)


CHECKS: dict[str, Check] = {
    **dict.fromkeys(APPS, check_wrapper),
    **dict.fromkeys(CONFIG_CLASSES, check_engine),
    "python": check_python,
    "pytest": check_pytest,
    "curl": check_curl,
    "uv": check_uv,
    "bash": check_script,
    "pip": check_path,
    # CI runs these, and tests/test_site.py builds the site.
    "ruff": lambda words, tmp_path: None,
    "lint-imports": lambda words, tmp_path: None,
    "mypy": lambda words, tmp_path: None,
    "mkdocs": lambda words, tmp_path: None,
}


def test_a_command_that_does_not_exist_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wrong = [
        "medarc_train watch outputs/x --onse",
        "medarc_train wach outputs/x",
        "uv run benchmarks/plot.py outputs/x",
    ]
    wrong += [
        "medarc_slurm rl examples/reverse_text/rl_slurm.toml --single-gpus",
        "uv sync --inexact --extra vlm",
        "uv sync --extra vllm",
    ]
    wrong += ["trainer --modl.name x", "pytest tests/test_dcos.py"]
    for line in wrong:
        words = without_uv(line.split())
        with pytest.raises((AssertionError, Exception)):
            CHECKS[words[0]](words, tmp_path)


def test_the_tests_that_run_whole_pages_exist() -> None:
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


def test_a_line_is_split_into_its_commands() -> None:
    line = "command -v uv >/dev/null || pip install -q uv; A=1 uv run x --name 'a b' > out.md   # isn't; a command\n"
    assert [cleaned(words) for words in simple_commands(line)] == [
        ["command", "-v", "uv"],
        ["pip", "install", "-q", "uv"],
        ["uv", "run", "x", "--name", "a b"],
    ]
    assert json.loads(next(simple_commands("""curl -d '{"a": "b|c"}'"""))[2]) == {"a": "b|c"}

"""`medarc_train env`: packages that are made work, installed ones are found, and broken rewards are named."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from medarc_rl.environments.installing import Package, misfits_of
from medarc_rl.environments.making import ABOUT
from medarc_rl.medarc_train import app
from prime_rl.checks.packages import interpreter_fault
from prime_rl.interpreters import DIRECTORY_VARIABLE, Registry

ROOT = Path(__file__).resolve().parents[1]

BROKEN = """
import asyncio
import itertools
import os
import time
import verifiers as vf
from datasets import Dataset

NUMBERS = itertools.count()
REFUSED = []


def text_of(completion):
    return str(completion[-1]["content"] or "")


def contains(completion, answer):
    return float(answer in text_of(completion) and answer not in REFUSED)


def raises(completion):
    return {}["no such key"]


def not_a_number(completion):
    return float("nan")


def constant(completion):
    return 0.5


def different(completion):
    return float(next(NUMBERS))


def words(completion):
    return "good"


async def never_ends(completion):
    while True:
        pass


async def keeps_a_thread(completion):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
    return 0.0


def leaves(completion):
    os._exit(7)


def load_environment(functions=("contains",), repeated=False, refuses=None):
    rows = [{"question": f"Say {at}.", "answer": f"word {at}"} for at in range(8)]
    REFUSED.append(f"word {refuses}")
    rows += [{"question": "Say 1.", "answer": ""}] if repeated else []
    funcs = [globals()[name] for name in functions]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]),
        rubric=vf.Rubric(funcs=funcs, weights=[1.0 if name == "contains" else 0.0 for name in functions]),
    )
"""

USER = """
import sys
from pathlib import Path
from prime_rl.interpreters import use

use(Path(sys.argv[1]))
print("used", flush=True)
sys.stdin.read()
"""
"""A process that uses a directory until its input ends."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module, and a list of environments of its own."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "installed"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "broken_rewards.py").write_text(BROKEN)
    return tmp_path


def env(*words: object) -> Result:
    return CliRunner().invoke(app, ["env", *map(str, words)])


def rows_of(*words: object) -> tuple[int, dict[tuple[str, str], str]]:
    """Exit code, and the rows of a check by level and subject."""
    result = env("check", "broken-rewards", "--json", *words)
    return result.exit_code, {(row["level"], row["subject"]): row["text"] for row in json.loads(result.stdout)}


def functions(*names: str, **more: object) -> str:
    return json.dumps({"functions": ["contains", *names], **more})


@pytest.mark.slow
def test_rows_with_images_pass_and_a_missing_image_is_named(place: Path) -> None:
    rows = [{"question": "<image>A fracture?", "answer": "no", "image": f"{number}.png"} for number in range(3)]
    for row in rows[:2]:
        Image.new("RGB", (8, 8)).save(place / row["image"])
    for name, count in (("whole", 2), ("missing", 3)):
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[:count])))
    args = {"datasets": [{"path": "whole.jsonl"}], "rewards": [{"fn": "exact_match"}]}
    whole = env("check", "rows", "--rows", 1, "--args", json.dumps(args))
    assert whole.exit_code == 0, whole.output
    assert "2 prompts have images, which a model reads with [model.vision]" in whole.output
    assert "no prompt occurs twice" in whole.output, "other images are other prompts"
    missing = env("check", "rows", "--args", json.dumps(args | {"datasets": [{"path": "missing.jsonl"}]}))
    assert missing.exit_code == 1
    assert "2.png: no such file in" in missing.output


@pytest.mark.slow
def test_every_broken_reward_and_row_is_named() -> None:
    broken = ("raises", "not_a_number", "words", "different")
    code, rows = rows_of("--args", functions(*broken, repeated=True), "--rows", 2)
    assert code == 1
    assert "KeyError: 'no such key'" in rows["fail", "reward function raises"]
    assert "it returned nan instead of a finite number" in rows["fail", "reward function not_a_number"]
    assert "it returned good instead of a finite number" in rows["fail", "reward function words"]
    assert "the same answer earns" in rows["fail", "reward function different"]
    assert "a model will learn to exploit it" in rows["fail", "reward: all answers at once"]
    assert "2 prompts of the evaluation (100%) are trained on" in rows["fail", "dataset: leaks"]
    assert "1 prompts occur with different answers" in rows["fail", "dataset: train"]
    assert "IndexError: list index out of range (answer: no message; row 0)" in rows["warn", "reward function contains"]


@pytest.mark.slow
def test_the_last_line_counts_the_rows() -> None:
    result = env("check", "broken-rewards", "--args", '{"functions": ["no_such_function"]}')
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "0 ok, 0 warnings, 1 failure"


@pytest.mark.slow
def test_right_answers_are_tried_in_more_rows_and_rows_that_refuse_theirs_are_named() -> None:
    _, rows = rows_of("--args", functions(refuses=6), "--rows", 2)
    assert rows["ok", "rows"] == "all kinds of answers tried in 2 of 8, right ones in 8"
    assert rows["warn", "reward: right"] == "earns no more than a wrong answer in 1 row, row 6 first"


@pytest.mark.slow
def test_code_that_never_returns_or_ends_the_process_is_a_row() -> None:
    code, rows = rows_of("--args", functions("never_ends"), "--limit-s", 0.5, "--rows", 1)
    assert code == 1
    assert "the answer 'right' in row 0: it did not end within" in rows["fail", "process"]
    code, rows = rows_of("--args", functions("leaves"), "--rows", 1)
    assert code == 1
    assert "ended with code 7 while trying the answer 'right' in row 0" in rows["fail", "process"]


TURNS = """
import verifiers as vf
from datasets import Dataset


def unlocked(state):
    said = [step["completion"][-1]["content"] for step in state["trajectory"]]
    return float(said[0] == state["info"]["first"] and state["answer"] in said[1:])


class Doors(vf.MultiTurnEnv):
    @vf.stop
    async def is_over(self, state):
        return len(state["trajectory"]) > 1

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Which number?"}]


def load_environment(first):
    rows = [{"question": f"Open door {at}.", "answer": str(at), "info": {"first": first}} for at in range(8)]
    return Doors(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[unlocked]), max_turns=4)
"""


@pytest.mark.slow
def test_an_environment_of_several_turns_does_not_fail_though_no_single_answer_is_right(place: Path) -> None:
    (place / "modules" / "doors.py").write_text(TURNS)

    def found(first: str, *words: str) -> tuple[int, dict[tuple[str, str], str]]:
        result = env("check", "doors", "--rows", "2", "--json", "--args", json.dumps({"first": first}), *words)
        return result.exit_code, {(row["level"], row["subject"]): row["text"] for row in json.loads(result.stdout)}

    code, rows = found("I am ready.")
    assert rows["ok", "reward: conversation"].endswith("(0 to 1) in 8 rollouts")
    assert code == 0, rows
    assert not [subject for level, subject in rows if level == "fail"]
    code, rows = found("look")
    assert "give its messages with --turn" in rows["warn", "reward"]
    assert code == 0
    code, rows = found("look", "--turn", "look", "--turn", "{answer}")
    assert rows["ok", "reward: conversation"].startswith("1 in 2 rollouts")
    assert code == 0


@pytest.mark.slow
def test_threads_that_an_environment_leaves_do_not_keep_the_check() -> None:
    _, rows = rows_of("--args", functions("keeps_a_thread"), "--limit-s", 20, "--rows", 1)
    assert ("fail", "process") not in rows
    assert ("ok", "rows") in rows


@pytest.mark.slow
def test_packages_that_are_made_pass_their_tests(place: Path) -> None:
    for kind in ABOUT:
        assert env("new", f"made-{kind}", "--kind", kind).exit_code == 0
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"made-{kind}" for kind in ABOUT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "12 passed" in done.stdout


@pytest.mark.parametrize("prefix", ["", "uv run "])
def test_a_new_package_names_commands_that_run_where_it_was_made(
    prefix: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if prefix:
        monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    else:
        monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    said = env("new", "placed", "--directory", "my envs").stdout.splitlines()
    assert said[-1] == f"next: {prefix}medarc_train env install 'my envs/placed'"
    page = (place / "my envs" / "placed" / "README.md").read_text()
    commands = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1].splitlines()
    assert commands[:2] == [f"{prefix}medarc_train env install 'my envs/placed'", f"{prefix}pytest 'my envs/placed'"]
    trains = f"{prefix}medarc_train rl 'my envs/placed/rl.toml' --model.name MODEL --output-dir outputs/placed"
    assert commands[-1] == trains
    first, *_ = (place / "my envs" / "placed" / "rl.toml").read_text().splitlines()
    assert first == f"# A first run: {trains}"


@pytest.mark.parametrize("kind", ["multi-turn", "tools"])
@pytest.mark.slow
def test_packages_that_are_made_pass_the_check(kind: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single-turn: tests/test_environment_page.py."""
    name = f"checked-{kind}"
    assert env("new", name, "--kind", kind).exit_code == 0
    monkeypatch.setenv("PYTHONPATH", str(place / name))
    monkeypatch.syspath_prepend(place / name)
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    result = env("check", name, "--rows", 2, "--json")
    assert result.exit_code == 0, result.output
    # A slow machine makes the time a warning.
    assert [row for row in json.loads(result.stdout) if row["level"] != "ok" and row["subject"] != "time"] == []


@pytest.mark.slow
def test_a_package_with_a_tool_trains_on_a_cpu_by_the_commands_of_its_page(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model of the repository and the short chat template of the package."""
    assert env("new", "calculator", "--kind", "tools").exit_code == 0
    (place / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PYTHONPATH", str(place / "calculator"))
    page = (place / "calculator" / "README.md").read_text()
    tries, trains = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[1].splitlines()
    for line, more in ((tries, ["-n", "1"]), (trains, ["--max-steps", "1"])):
        program, *words = shlex.split(line.removeprefix("uv run "))
        words = [str(Path(sys.executable).with_name(program)), *words, *more]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Med QA", "use lower case letters, digits and single dashes, such as med-qa"),
        ("../up", "use lower case letters, digits and single dashes, such as up"),
        ("a\x1b[31m", "NAME 'a\\x1b[31m': use lower case"),
        ("json", "Python has a module with this name; choose another"),
        ("class", "Python has a module with this name; choose another"),
        ("reverse-text", "a module 'reverse_text' is installed already"),
        ("rows", "medarc-rl has a built-in environment with this name"),
        ("rubric", "medarc-rl has a built-in environment with this name"),
        ("x" * 51, "use lower case letters"),
    ],
)
def test_a_name_that_is_none_is_refused(name: str, fault: str, place: Path) -> None:
    before = sorted(place.iterdir())
    result = env("new", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert fault in result.stderr
    assert sorted(place.iterdir()) == before


def test_nothing_is_overwritten(place: Path) -> None:
    (place / "mine").mkdir()
    (place / "mine" / "notes.txt").write_text("keep")
    result = env("new", "mine")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: mine already exists and was not changed: choose another NAME or --directory\n",
    )
    assert [path.name for path in (place / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("check", "nowhere"), "ID 'nowhere': no module named 'nowhere'; install the environment's package with"),
        (("check", "Reasoning_Gim"), "or correct the id (did you mean 'reasoning-gym'?)"),
        (("check", "./nowhere"), "PATH: ./nowhere does not exist"),
        (("check", "reverse-text", "--form", "x"), "--form has no {answer}"),
        (("check", "reverse-text", "--args", "["), "--args is not JSON"),
        (("check", "reverse-text", "--args", "[]"), "--args must be a JSON object"),
        (("check", "openenv", "--args", '{"url": "localhost"}'), "--args: url = 'localhost': give a base URL such as"),
        (("check", "reverse-text", "--model", "."), "--model: . has no tokenizer.json"),
        (("try", "nowhere", "--model", "x"), "ID 'nowhere': no module named 'nowhere'"),
        (("install", "modules"), "PATH: modules has no pyproject.toml"),
        (("install", "--", "--index-url=x"), "'--index-url=x' is neither a directory"),
        (("install", "x", "--own", "--shared"), "--own and --shared exclude each other"),
        (("uninstall", "nowhere"), "no environment 'nowhere' is installed by `env install`"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], fault: str) -> None:
    result = env(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert fault in result.stderr
    assert result.stderr.count("\n") == 1


def test_misfits_are_named() -> None:
    requires = ("verifiers>=0.1.11", "verifiers<0.1.11", "no-such-package>1", 'absent-too; python_version < "3"')
    package = Package("medqa", "1", requires, ">=3.99")
    version, verifiers, absent = misfits_of(package)
    assert "requires Python >=3.99" in version
    assert "requires verifiers<0.1.11, and the run has 0.1.14" in verifiers
    assert "requires no-such-package>1, which the run does not have" in absent


def test_what_an_extra_requires_must_fit_too(place: Path) -> None:
    info = place / "modules" / "letters_of_more-1.0.dist-info"
    info.mkdir()
    requires = [
        "letters-of-more[more]; extra == 'all'",
        "no-such-package>2; extra == 'more'",
        "absent; extra == 'else'",
    ]
    lines = ["Metadata-Version: 2.1", "Name: letters-of-more", "Version: 1.0", "Provides-Extra: all"]
    lines += ["Provides-Extra: more", "Provides-Extra: else", *(f"Requires-Dist: {text}" for text in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    wanted = ("letters-of-more>=1", "letters-of-more[all]>=1", "letters-of-more[no-such-extra]")
    (misfit,) = misfits_of(Package("medqa", "1", wanted, None))
    assert misfit == "requires no-such-package>2; extra == 'more', which the run does not have"


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_an_installed_package_is_listed_found_and_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = place / "wheels"
    _write_wheel(source, "listed_letters", "verifiers>=0.1.11")
    result = env("install", source / "listed_letters-1.0-py3-none-any.whl")
    assert result.exit_code == 0, result.output
    assert "installed listed-letters 1.0 into the run's interpreter" in result.stdout
    (row,) = [each for each in json.loads(env("list", "--json").stdout) if each["id"] == "listed-letters"]
    assert (row["interpreter"], row["fault"]) == ("the run's, added", "")
    (installed,) = Registry().all()
    assert os.path.isfile(installed.file)  # noqa: PTH113
    assert env("uninstall", "listed-letters").stdout == "removed listed-letters 1.0\n"
    assert not Path(installed.directory).exists()
    assert env("install", source / "listed_letters-1.0-py3-none-any.whl").exit_code == 0
    (used,) = Registry().all()
    with subprocess.Popen([sys.executable, "-c", USER, used.directory], stdin=PIPE, stdout=PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        result = env("install", source / "listed_letters-1.0-py3-none-any.whl")
        assert "a run uses the earlier listed-letters: its files stay" in result.stderr
        assert os.path.isfile(used.file)  # noqa: PTH113
        run.communicate()
    two_days_ago_s = time.time() - 2 * 86_400
    os.utime(used.directory, (two_days_ago_s, two_days_ago_s))
    assert env("install", source / "listed_letters-1.0-py3-none-any.whl").exit_code == 0
    assert not Path(used.directory).exists()
    assert env("uninstall", "listed-letters").exit_code == 0
    _write_wheel(source, "unlisted_letters", "no-such-package")
    result = env("install", source / "unlisted_letters-1.0-py3-none-any.whl", "--shared")
    fault = "error: --shared: unlisted-letters requires no-such-package, which the run does not have\n"
    assert (result.exit_code, result.stderr) == (2, fault)
    assert [path.name for path in Registry().directory.iterdir()] == [".lock", "registry.json"]


def test_an_interpreter_of_its_own_is_not_searched_in_the_current_directory(place: Path) -> None:
    (place / "lies_here.py").write_text("")
    fault = interpreter_fault(Path(sys.executable), "lies_here")
    assert fault is not None
    assert "has no module named 'lies_here'" in fault


def _write_wheel(folder: Path, module: str, requirement: str) -> None:
    """A wheel that no package from an index builds."""
    import zipfile

    folder.mkdir(exist_ok=True)
    head, info = f"{module}-1.0", f"{module}-1.0.dist-info"
    name = module.replace("_", "-")
    files = {
        f"{module}.py": "def load_environment():\n    raise NotImplementedError\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requirement}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{head}-py3-none-any.whl", "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(file, text)

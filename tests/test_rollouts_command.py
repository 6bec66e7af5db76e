"""`medarc_train rollouts`: what did the model say at step 20?"""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from medarc_rl.medarc_train import app
from medarc_rl.rollouts.command import ranges
from prime_rl.run.paths import EvalPaths, RunPaths

HOSTILE = "\x1b[31mred\x07 \u202eback\r\n\tEnd <b>[bold]x[/bold]"


def record(number: int, **more: Any) -> dict[str, Any]:
    return {
        "env": "letters",
        "row": number,
        "group": number // 2,
        "rollout": number % 2,
        "kept": ["worst"] if number == 0 else ["random"],
        "reward": number / 8,
        "advantage": number / 8 - 0.5,
        "metrics": {"right": number / 8, "short": 1.0},
        "weights": {"right": 1.0, "short": 0.2},
        "policy_version": 19,
        "lag": 1,
        "completion_tokens": 2,
        "stop_condition": "stop",
        "prompt": [{"role": "user", "content": f"question {number}"}],
        "completion": [{"role": "assistant", "content": f"answer {number}"}],
        "sequences": [
            {"prompt_ids": [1], "completion_ids": [2, 3], "sampled": [[0, 2]], "engine_logprobs": [-0.5, -1.5]}
        ],
        **more,
    }


def write(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(f"{json.dumps(each)}\n" for each in records).encode()))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with rollouts of steps 0, 1 and 20, and of an evaluation at version 8."""
    paths = RunPaths(tmp_path / "run").orchestrator
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    tools = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    write(paths.step_samples(0), record(3, completion=tools), record(4, completion=HOSTILE))
    write(paths.step_samples(1), record(5, completion=[{"role": "assistant", "content": "x" * 3000}], cut_chars=17))
    write(paths.step_samples(20), *(record(number, is_truncated=number == 2) for number in range(8)))
    own = {"kept_as": [3, 1, 0], "minibatch": 0, "scored": [[1, 3]], "logprobs": [-0.5, -1.25], "entropy": [1, 1]}
    write(paths.trainer_samples(20, 0), own)
    write(
        paths.eval_samples(8),
        record(1, env="held-out"),
        {"env": "held-out", "row": 9, "reward": None, "error": "Bad\nluck"},
    )
    return tmp_path / "run"


def test_an_image_is_a_line_and_never_its_content(tmp_path: Path) -> None:
    kept = {"type": "image", "image": "scans/7.png", "sha256": "ab12" * 16, "width": 512, "height": 256}
    old = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    lost = {"type": "image", "image": "x\x1b[31m.png", "fault": "no such file"}
    asked = [{"role": "user", "content": [kept, {"type": "text", "text": "Is it broken?"}, old, lost]}]
    write(RunPaths(tmp_path / "run").orchestrator.step_samples(0), record(1, prompt=asked))
    text = shown(tmp_path / "run")
    assert "[image 7.png 512x256, sha256 ab12ab12ab12]\n    Is it broken?\n    [image (26 characters of data)]" in text
    assert "[image x\\x1b[31m.png: no such file]" in text
    assert "AAAA" not in text


def rollouts(*words: object) -> Result:
    return CliRunner().invoke(app, ["rollouts", *map(str, words)])


def shown(*words: object) -> str:
    result = rollouts(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(*words: object) -> list[int]:
    return [json.loads(line)["row"] for line in shown(*words, "--json").splitlines()]


def test_the_worst_and_the_best_of_a_step(run: Path) -> None:
    text = shown(run, "--step", 20, "--worst", 1)
    assert text.splitlines()[:5] == [
        "step 20: letters, row 0 (group 0, rollout 0)",
        "reward 0  advantage -0.5  kept as the worst group",
        "right 0  short 1 (weight 0.2)",
        "2 tokens  ended by stop  policy version 19  lag 1",
        "log-probability per token: engine -1.0000",
    ]
    assert "  user\n    question 0\n  assistant\n    answer 0\n" in text
    assert text.endswith("\n1 of 8 kept rollouts. Kept: steps 0-1, 20; evaluations 8.\n")
    assert "engine -1.0000, trainer -0.8750, largest difference 0.2500" in shown(run, "--best", 1)
    assert rows(run, "--step", 20, "--worst", 2) == [0, 1]
    assert rows(run, "--best", 3) == [7, 6, 5], "of the last step, by default"
    assert rows(run, "--step", "all", "--best", 2) == [7, 6]


def test_rollouts_are_chosen_at_random_and_by_filters(run: Path) -> None:
    assert len(rows(run, "--random", 3)) == 3
    assert 0 not in rows(run, "--random", 100), "the worst group was not kept at random"
    assert rows(run, "--random", 3) == rows(run, "--random", 3)
    assert shown(run).count("question") == 5
    assert rows(run) == list(range(8))
    assert rows(run, "--truncated") == [2]
    assert rows(run, "--min-reward", 0.5, "--max-reward", 0.75) == [4, 5, 6]
    assert rows(run, "--search", "ANSWER 6") == [6]
    assert rows(run, "--eval", 8) == [1, 9]
    assert rows(run, "--eval", "last", "--errors") == [9]
    assert rows(run, "--step", "all", "--env", "letters") == [3, 4, 5, *range(8)]
    assert shown(run, "--search", "nowhere") == "No kept rollout matches. Kept: steps 0-1, 20; evaluations 8.\n"
    assert "No kept rollout matches; environments: held-out, letters." in shown(run, "--env", "leters")
    assert json.loads(shown(run, "--best", 1, "--json"))["trainer"][0]["logprobs"] == [-0.5, -1.25]


def test_tools_long_texts_errors_and_hostile_characters(run: Path) -> None:
    text = shown(run, "--step", 0)
    assert '  assistant, tool call\n    add({"a": 1})\n  tool\n    2\n' in text
    assert "\n    \\x1b[31mred\\x07 \\u202eback\\r\n        End <b>[bold]x[/bold]\n" in text
    assert not any(char in text for char in "\x1b\x07\r\u202e")
    assert "1,800 more characters: --full" in shown(run, "--step", 1)
    assert "not kept: 17 characters of the messages, 0 tokens" in shown(run, "--step", 1)
    assert "x" * 3000 in shown(run, "--step", 1, "--full")
    assert "evaluation 8: held-out, row 9\nno reward\n  error\n    Bad\n    luck\n" in shown(run, "--eval", 8)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--step", "5"], "--step 5: no rollouts of this step are kept, only those of 0-1, 20"),
        (["--eval", "9"], "--eval 9: no rollouts of this evaluation are kept, only those of 8"),
        (["--step", "-1"], "--step '-1' is neither a number nor `last` nor `all`"),
        (["--step", "\x1b[31m"], "--step '\\x1b[31m' is neither a number nor `last` nor `all`"),
        (["--step", "1", "--eval", "8"], "give only one of --step and --eval"),
        (["--best", "1", "--worst", "1"], "give only one of --worst, --best"),
        (["--best", "0"], "Invalid value for '--best': Input should be greater than or equal to 1"),
        (["--min-reward", "1", "--max-reward", "0"], "--min-reward 1 is above --max-reward 0"),
        (["--min-reward", "nan"], "--min-reward is not a number"),
    ],
)
def test_a_mistake_is_one_line(run: Path, words: list[str], fault: str) -> None:
    result = rollouts(run, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {fault}\n"


def test_directories_without_rollouts_say_why(tmp_path: Path, run: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, fault in (
        (tmp_path / "none", "does not exist; give the directory of a run"),
        (tmp_path / "file", "is a file; give the directory of a run"),
        (tmp_path, "has no kept rollouts: it has not finished a step"),
    ):
        result = rollouts(place)
        assert result.exit_code == 2
        assert fault in result.stderr
    assert shown(run / "run_default") == shown(run)


def test_a_damaged_file_is_a_warning(run: Path) -> None:
    path = RunPaths(run).orchestrator.step_samples(20)
    path.write_bytes(path.read_bytes()[:-20])
    result = rollouts(run, "--step", 20)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"warning: {path} is damaged after ")
    assert len(result.stderr.splitlines()) == 1


def test_results_of_eval_are_shown(tmp_path: Path) -> None:
    results = EvalPaths(tmp_path).results
    results.parent.mkdir()
    lines = [
        {"step": step, "env": "e", "example": step + 1, "rollout": 0, "reward": 1, "completion": "yes"}
        for step in (0, 40)
    ]
    results.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "evaluation 40: e, row 41 (rollout 0)\nreward 1\n  text\n    yes\n" in shown(tmp_path, "--eval", 40)
    assert "2 of 2 kept rollouts. Kept: evaluations 0, 40." in shown(tmp_path)


def test_lines_fit_a_terminal_of_80_columns(run: Path) -> None:
    main, child = pty.openpty()
    command = [
        sys.executable,
        "-c",
        "from medarc_rl.medarc_train import main; main()",
        "rollouts",
        str(run),
        "--step",
        "1",
    ]
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdout=child, env=environment) as process:
        os.close(child)
        content = b""
        try:
            while part := os.read(main, 65536):
                content += part
        except OSError:  # Linux says so at the end of a terminal
            pass
        os.close(main)
    assert process.returncode == 0
    lines = re.sub(r"\x1b\[\d*m|\r", "", content.decode()).split("\n")
    assert max(map(len, lines)) <= 80
    assert sum(line.strip() != "" and set(line.strip()) == {"x"} for line in lines) >= 16, "long lines are wrapped"


def test_ranges_of_many_numbers_are_shortened() -> None:
    assert ranges([0, 1, 2, 5, 9, 10]) == "0-2, 5, 9-10"
    assert ranges(list(range(0, 100, 2))) == "0, 2, 4, 6, 8, 10, …, 88, 90, 92, 94, 96, 98"

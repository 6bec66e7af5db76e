"""Environments that cannot be used are found before a model is loaded: at a start, in a dry run, in a preflight."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl.checks.chat_templates import NAMED
from prime_rl.checks.environments import EXAMINATION, trial_faults
from prime_rl.configs.orchestrator import EnvConfig, ModelConfig, OrchestratorConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.orchestrator.env_checks.examination import Room, config_warnings, examine, main
from prime_rl.orchestrator.env_checks.prompts import token_counter
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.loading import load_environments
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.run.process import CLEARANCE_VARIABLE, give_clearance, wait_for_clearance
from prime_rl.utils.pydantic_config import dump_toml

pytestmark = pytest.mark.usefixtures("importable_environments")

REFUSES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
)


def load(**args: Any) -> Environment:
    (environment,) = load_environments([EnvConfig(id="letters-env", args=args)], LogConfig(vf_level="warning")).values()
    return environment


def found(model: Path, seq_len: int = 1000, template: str | None = None, **args: Any) -> Any:
    config = ModelConfig(name=str(model), chat_template=template)
    room = Room(seq_len, f"orchestrator.seq_len = {seq_len}")
    (result,) = examine([("orchestrator.env[0]", load(**args))], config, room)
    return result


ADDED = len("user\n" + "\n" + "assistant\n") + 3
"""Tokens that the template adds to the one message of a prompt: each special token is one."""


def test_prompts_are_counted_in_tokens_as_the_template_renders_them(tiny_model_dir: Path) -> None:
    result = found(tiny_model_dir)
    assert result.lengths == [len(text) + ADDED for text in ("abc", "hello", "verifiers", "noon time")]
    assert (result.faults, result.warnings) == ([], [])
    assert result.describe() == (
        f"letters-env: 4 rows, no tools; tokens of a prompt: {3 + ADDED} to {9 + ADDED}, median {7 + ADDED} "
        "(4 rows read)"
    )


def test_tools_are_part_of_a_prompts_length(tiny_model_dir: Path) -> None:
    plain, with_tools = (found(tiny_model_dir, 9999, "chatml", kind=kind).lengths for kind in ("single", "tools"))
    assert min(with_tools) > max(plain) + len("You can call these functions:")


def test_a_prompt_that_the_template_refuses_is_counted_without_it(tiny_model_dir: Path) -> None:
    result = found(tiny_model_dir, template="{{ raise_exception('no') }}")
    assert result.lengths == [3, 5, 9, 9]


def test_prompts_that_leave_no_room_are_a_fault_if_all_do_else_a_warning(tiny_model_dir: Path) -> None:
    (warning,) = found(tiny_model_dir, seq_len=9 + ADDED).warnings
    assert warning == (
        "orchestrator.env[0]: 2 of 4 prompts of environment 'letters-env' leave no room for an answer: the longest has "
        f"{9 + ADDED} tokens, and orchestrator.seq_len = {9 + ADDED}"
    )
    (fault,) = found(tiny_model_dir, seq_len=9).faults
    assert fault.startswith("orchestrator.env[0]: no prompt of environment 'letters-env' leaves room for an answer")
    assert f"the shortest of 4 has {3 + ADDED} tokens, and orchestrator.seq_len = 9" in fault


@pytest.mark.parametrize(
    ("seq_len", "served", "tokens", "limit"),
    [
        (128, 256, 128, "orchestrator.seq_len = 128"),
        (512, 256, 256, "inference.model.max_model_len = 256"),
        (4096, None, 1024, "the model's context is 1024 tokens"),
        (4096, 2048, 1024, "the model's context is 1024 tokens"),
    ],
)
def test_the_smallest_limit_counts_and_one_below_seq_len_is_warned_of(
    seq_len: int, served: int | None, tokens: int, limit: str, tiny_model_dir: Path
) -> None:
    room = Room.of(OrchestratorConfig(model={"name": str(tiny_model_dir)}, seq_len=seq_len, max_model_len=served))
    assert (room.tokens, room.limit) == (tokens, limit)
    warnings = (f"longer answers are cut off: {limit}, and orchestrator.seq_len = {seq_len}",)
    assert room.warnings == (() if tokens == seq_len else warnings)


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 1), ({"rollouts_per_example": 2}, 0), ({"advantage": None}, 0), ({"teacher_model": {}}, 0)],
)
def test_groups_of_one_rollout_are_warned_of(settings: dict[str, Any], count: int) -> None:
    lines = config_warnings(OrchestratorConfig(**settings), Room(2048, ""))
    assert len(lines) == count
    assert all("a group has only one rollout, so all advantages are 0" in line for line in lines)


@pytest.mark.parametrize("model", ["letters", "someone/letters", "/nowhere/letters", "./letters"])
def test_lengths_are_left_out_without_a_tokenizer(model: str) -> None:
    assert token_counter(model) is None
    assert found(Path(model)).describe() == "letters-env: 4 rows, no tools"


def test_tools_that_the_template_does_not_show_are_a_fault(tiny_model_dir: Path) -> None:
    result = found(tiny_model_dir, kind="tools")
    assert result.tools == 1
    (fault,) = result.faults
    assert fault.startswith(
        f"orchestrator.env[0]: environment 'letters-env' has tools, and the chat template of {tiny_model_dir} leaves "
        "out tool_calls of assistant messages, tools: set trainer.tokenizer.chat_template"
    )


def test_a_template_that_shows_tools_passes(tiny_model_dir: Path, tmp_path: Path) -> None:
    assert found(tiny_model_dir, template="chatml", kind="tools").faults == []
    file = tmp_path / "chat.jinja"
    file.write_text(NAMED["chatml"])
    assert found(tiny_model_dir, template=str(file), kind="tools").faults == []


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (REFUSES_TOOLS, "refuses a conversation with a call: no tools here"),
        (
            NAMED["chatml"].replace("tool | tojson", "tool.function.name"),
            "leaves out tools.function.description, tools.",
        ),
        ("nowhere.jinja", "cannot be read: orchestrator.model.chat_template = 'nowhere.jinja': no such file"),
    ],
)
def test_what_is_wrong_with_a_template_is_said(template: str, said: str, tiny_model_dir: Path) -> None:
    (fault,) = found(tiny_model_dir, template=template, kind="tools").faults
    assert said in fault
    assert "\n" not in fault


# --- at the start of a run


def test_an_orchestrator_clears_the_engine_when_its_environments_can_be_used(
    orchestrate: Callable[..., tuple[int, str]], tiny_model_dir: Path, tmp_path: Path
) -> None:
    marker = OrchestratorPaths(tmp_path / "run_default").environments_checked
    status, log = orchestrate(
        env=[{"id": "letters-env", "args": {"kind": "tools"}}], model={"name": str(tiny_model_dir)}
    )
    assert status == 1
    assert "has tools, and the chat template of" in log
    assert not marker.exists()
    status, log = orchestrate(env=[{"id": "letters-env", "args": {"rows": 0}}])
    assert (status, marker.exists()) == (1, False)


def test_the_engine_waits_for_the_file_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "control" / "ENVIRONMENTS_CHECKED"
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        give_clearance(file)

    for _ in range(2):
        wait_for_clearance({CLEARANCE_VARIABLE: str(file)}, hear)
    wait_for_clearance({}, hear)
    assert said == [f"The model loads when the orchestrator has checked the environments and made {file}"]


# --- in a process of its own


@pytest.fixture
def config_of(environments_dir: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("PYTHONPATH", str(environments_dir))

    def config(seq_len: int = 100, **env: Any) -> OrchestratorConfig:
        env = {"id": "letters-env", **env}
        return OrchestratorConfig(
            env=[env],
            eval={"env": [env]},
            model={"name": str(tiny_model_dir)},
            seq_len=seq_len,
            max_steps=1,
            rollouts_per_example=2,
        )

    return config


def test_a_trial_tells_every_fault_in_one_line(config_of) -> None:
    first, second = trial_faults(config_of(seq_len=3))
    assert first.startswith("orchestrator.env[0]: no prompt")
    assert second.startswith("orchestrator.eval.env[0]: no prompt")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"id": "broken-env"}, "orchestrator.env[0]: environment 'broken-env' does not import: "),
        (
            {"args": {"kind": "none"}},
            "orchestrator.env[0]: RuntimeError: Failed to load environment 'letters-env': 'no such kind",
        ),
        ({"args": {"rows": 0}}, "orchestrator.env[0]"),
        ({"args": {"kind": "images"}}, "environment 'letters-env': the prompt of row 1 has an image"),
    ],
)
def test_environments_that_cannot_be_loaded_are_one_line(
    settings: dict[str, Any], said: str, config_of, tmp_path: Path, monkeypatch, capsys
) -> None:
    """What the trial's process prints, printed by this one."""
    dump_toml(config_of(**settings), tmp_path / "orchestrator.toml")
    monkeypatch.setattr(sys, "argv", [EXAMINATION, "@", str(tmp_path / "orchestrator.toml")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    faults = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(faults) == 1, faults
    assert faults[0].startswith(f"error: {said}")


def test_the_report_shows_rows_lengths_and_a_prompt(config_of, tmp_path: Path) -> None:
    dump_toml(config_of(seq_len=9 + ADDED), tmp_path / "orchestrator.toml")
    argv = [sys.executable, "-m", EXAMINATION, "@", str(tmp_path / "orchestrator.toml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert f"letters-env: 4 rows, no tools; tokens of a prompt: {3 + ADDED} to {9 + ADDED}" in done.stdout
    assert "first prompt: 'abc'" in done.stdout
    assert "warning: orchestrator.env[0]: 2 of 4 prompts" in done.stdout
    assert "No problems" not in done.stdout
    dump_toml(config_of(), tmp_path / "orchestrator.toml")
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("No problems found.\n")

"""What an evaluation keeps: results line by line, the settings they were made with, the candidates, the table."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.eval.run import CandidateScores, Key, Result, ResultsFile, other_template, print_table
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.rollouts.trace import TokenTrace
from prime_rl.orchestrator.scores import unscored_line
from prime_rl.run.evaluations import Candidate, Following, check_settings, find_candidates, save_settings, settings_of
from prime_rl.run.lock import run_lock
from prime_rl.run.paths import EvalPaths
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.pydantic_config import load_config

SETTINGS = {"model": "tiny", "sampling": {"top_p": None}, "environments": {"a": {"args": {"seed": 1}}}}


def result(number: int, reward: float = 1.0, step: int = 0) -> Result:
    completion = [{"role": "assistant", "content": "naïve ∛"}]
    rollout = Rollout(
        ExampleRef("a", 0), reward, TokenTrace(), 1.0, step, usage_output_tokens=3, prompt=[], completion=completion
    )
    return Result.from_rollout(Key(step, "a", 0, number), rollout, seconds=0.5)


def test_results_are_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "results.jsonl"
    with ResultsFile(path) as results:
        results.add(result(0))
        results.add(result(1, reward=0.0, step=4))
    with ResultsFile(path) as again:
        assert len(again) == 2
        assert Key(4, "a", 0, 1) in again
        assert Key(4, "a", 0, 0) not in again
        (kept,) = again.select(0, "a")
    assert kept == result(0)
    assert (kept.as_rollout().reward, kept.as_rollout().completion_tokens) == (1.0, 3)


def test_a_rollout_that_is_made_again_is_in_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    failed = replace(result(0, reward=0.0), reward_errors={"score": "ValueError: no score today"})
    with ResultsFile(path) as results:
        results.add(failed)
        results.add(result(1))
    with ResultsFile(path) as results:
        assert failed.key not in results
        results.add(result(0))
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()] == [1.0, 1.0]


def test_half_a_line_of_a_crash_is_dropped_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path) as results:
        results.add(result(0))
    with path.open("a") as file:
        file.write('{"step": 0, "env": "a", "exam')
    with ResultsFile(path) as results:
        assert len(results) == 1
        results.add(result(1))
    assert [json.loads(line)["rollout"] for line in path.read_text().splitlines()] == [0, 1]


def test_more_environments_may_join_an_evaluation(tmp_path: Path) -> None:
    paths = EvalPaths(tmp_path)
    save_settings(paths, check_settings(paths, SETTINGS))
    joined = check_settings(paths, {**SETTINGS, "environments": {"b": {"args": {}}}})
    assert set(joined["environments"]) == {"a", "b"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "other"}, "another model"),
        ({"sampling": {"top_p": 0.5}}, "another sampling"),
        ({"environments": {"a": {"args": {"seed": 2}}}}, "another environment 'a'"),
    ],
)
def test_results_of_other_settings_are_not_mixed(tmp_path: Path, change: dict, named: str) -> None:
    paths = EvalPaths(tmp_path)
    save_settings(paths, check_settings(paths, SETTINGS))
    with pytest.raises(RunDirError, match=named):
        check_settings(paths, {**SETTINGS, **change})


JUDGE = '{"j": {"model": "judge", "sampling": {"temperature": %s}}}'


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--inference.model.chat-template", "chatml"], "another inference.model"),
        (["--inference.model.max-model-len", "64"], "another inference.model"),
        (["--client.base-url", "http://127.0.0.1:1/v1"], "another inference.model"),
        (["--judge", JUDGE % 1], "another environment 'a'"),
        (["--env", '[{"id": "a"}]'], "another environment 'a'"),
        (["--inference.gpu-memory-utilization", "0.5"], None),
    ],
)
def test_results_of_another_server_or_judge_are_not_mixed(
    tmp_path: Path, options: list[str], named: str | None
) -> None:
    paths = EvalPaths(tmp_path)
    asked = {"--judge": JUDGE % 0, "--env": '[{"id": "a", "judge": "j"}]'}

    def settings(more: list[str]) -> dict:
        words = {**asked, **dict(zip(more[::2], more[1::2], strict=True))}
        return settings_of(load_config(OfflineEvalConfig, [], [word for pair in words.items() for word in pair]))

    save_settings(paths, check_settings(paths, settings([])))
    with nullcontext() if named is None else pytest.raises(RunDirError, match=named):
        check_settings(paths, settings(options))


def test_an_evaluation_of_an_earlier_version_goes_on_with_the_server_it_has(tmp_path: Path) -> None:
    paths = EvalPaths(tmp_path)
    save_settings(paths, check_settings(paths, SETTINGS))
    assert check_settings(paths, {**SETTINGS, "inference.model": {"dtype": "auto"}})["inference.model"]


@pytest.mark.parametrize(
    ("own", "named", "asked_with"),
    [
        ("{{ base }}", None, None),
        ("{{ other }}", None, "that of BASE"),
        ("{{ other }}", "{{ other }}", None),
        ("{{ base }}", "{{ other }}", "that of inference.model.chat_template"),
    ],
)
def test_weights_that_are_asked_with_another_chat_template_than_their_own_are_told(
    tmp_path: Path, own: str, named: str | None, asked_with: str | None
) -> None:
    for name, template in (("base", "{{ base }}\n"), ("step_4", own)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat_template.jinja").write_text(template)
    server = InferenceConfig(model={"name": str(tmp_path / "base"), "chat_template": named})
    line = other_template(Candidate(4, tmp_path / "step_4"), server)
    if asked_with is None:
        assert line is None
    else:
        assert line is not None
        assert asked_with.replace("BASE", str(tmp_path / "base")) in line
    assert other_template(Candidate(0, None), server) is None


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Steps 0, 20 and 100 are complete; step 60 is not."""
    for step in (20, 100, 0):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "STABLE").touch()
    (tmp_path / "step_60").mkdir()
    return tmp_path


def test_the_base_model_is_first_and_checkpoints_follow_in_order(weights: Path) -> None:
    assert list(map(str, find_candidates(True, weights, None))) == ["base", "step 20", "step 100"]
    assert list(map(str, find_candidates(False, weights, [100, 0]))) == ["step 0", "step 100"]
    assert list(map(str, find_candidates(True, None, None))) == ["base"]


def test_checkpoints_of_a_running_run_are_found_once_each_until_it_ends(tmp_path: Path) -> None:
    following = Following(tmp_path / "weights", known=[20])
    with run_lock(tmp_path):
        assert following.look() == []
        for step in (20, 40, 60):
            (tmp_path / "weights" / f"step_{step}").mkdir(parents=True)
        for step in (20, 40):
            (tmp_path / "weights" / f"step_{step}" / "STABLE").touch()
        assert (following.look(), following.look(), following.has_ended) == ([40], [], False)
        (tmp_path / "weights" / "step_60" / "STABLE").touch()
    assert (following.look(), following.has_ended) == ([60], True)


def test_a_step_that_is_not_complete_is_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="lacks step 60; complete steps: 0, 20, 100"):
        find_candidates(True, weights, [20, 60])
    with pytest.raises(RunDirError, match="lacks any step; complete steps: none"):
        find_candidates(False, tmp_path / "empty", None)


def test_a_base_model_does_not_stand_in_for_weights_that_are_not_there(weights: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    weights_dir = run / "weights"
    (weights_dir / "step_5").mkdir(parents=True)
    with pytest.raises(RunDirError, match=r"lacks any step; complete steps: none$"):
        find_candidates(True, weights_dir, None)
    (weights_dir / "step_5" / "STABLE").touch()
    with pytest.raises(RunDirError, match=rf"^{run} lacks any step; .*; did you mean {weights_dir}\?$"):
        find_candidates(True, run, None)
    with pytest.raises(RunDirError, match=rf"there is no such folder: did you mean {weights_dir}\?$"):
        find_candidates(True, run / "wieghts", None)
    with pytest.raises(RunDirError, match=rf"there is no such folder: did you mean {weights_dir}\?$"):
        find_candidates(True, tmp_path / "rum" / "weights", None)
    with pytest.raises(RunDirError, match=r"there is no such folder$"):
        find_candidates(True, Path("/nowhere/at/all"), None)


def test_the_table_is_plain_text_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    scores = {"avg@4": 0.25, "pass@1": 0.25, "pass@4": 1.0, "completion_len/mean": 9.5, "is_truncated/mean": 0.5}
    rows = [
        CandidateScores("base", 0, "a", {**scores, "failed/count": 0, "time": 2.0}),
        CandidateScores("step 20", 20, "b", {"avg@4": 0.5}),
    ]
    print_table(rows, file)
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert lines[0] == "weights environment avg@4 pass@1 pass@4 length truncated failed seconds".split()
    assert lines[1] == ["base", "a", "0.250", "0.250", "1.000", "9.5", "50.0%", "0", "2.0"]
    assert lines[2] == ["step", "20", "b", "0.500"]
    assert "\x1b" not in file.getvalue()


def test_the_table_has_the_parts_of_the_reward_and_what_is_only_measured() -> None:
    file = io.StringIO()
    parts = {"reward_parts/right": 0.4, "reward_parts/layout": 0.9, "metrics/words": 12.5}
    print_table([CandidateScores("base", 0, "a", {"avg@1": 0.85, "completion_len/mean": 9.5, **parts})], file)
    titles, values = (line.split() for line in file.getvalue().splitlines())
    assert titles[2:7] == ["avg@1", "right", "layout", "words", "length"]
    assert values[2:7] == ["0.850", "0.400", "0.900", "12.500", "9.5"]


def test_scores_that_failed_reward_functions_lowered_are_told() -> None:
    trace = "Traceback (most recent call last):\n  File\nRuntimeError: boom\n"
    whole, lowered = (result(number).as_rollout() for number in range(2))
    lowered.reward_errors["right"] = trace
    assert unscored_line([whole]) is None
    assert unscored_line([whole, lowered]) == (
        "1 of 2 rollouts had a reward function that failed, which counts as 0; the first: right: RuntimeError: boom"
    )
    file = io.StringIO()
    print_table([CandidateScores("base", 0, "a", {"avg@1": 0.5, "reward_errors/mean": 0.5})], file)
    titles, values = file.getvalue().splitlines()
    assert (titles.split()[-2:], values.split()[-1]) == (["reward", "errors"], "50.0%")


def test_weights_that_are_removed_while_they_are_looked_at_have_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "removed")
    assert Candidate(4, tmp_path).fingerprint("base") is None

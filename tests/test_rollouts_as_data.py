"""`medarc_train rollouts RUN --to-sft FILE`, `--to-pairs` and `--to-kto`: kept rollouts as a dataset."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from medarc_rl.medarc_train import app
from prime_rl.configs.data import SFTDataConfig
from prime_rl.run.paths import EvalPaths, RunPaths

HOSTILE = "\x1b[31m\u202e\udce4 [bold]\r\n"


def record(answer: str, reward: float | None, **more: Any) -> dict[str, Any]:
    return {
        "env": "letters",
        "row": 1,
        "prompt_id": "p1",
        "reward": reward,
        "policy_version": 4,
        "prompt": [{"role": "user", "content": "question"}],
        "completion": [{"role": "assistant", "content": answer, "tool_calls": None}],
        **more,
    }


def write(run: Path, step: int, *records: dict[str, Any]) -> Path:
    path = RunPaths(run).orchestrator.step_samples(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(f"{json.dumps(each)}\n" for each in records).encode()))
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    bad = [
        record("half", 0.5),
        record("cut", 1.0, cut_chars=3),
        record("long", 1.0, is_truncated=True),
        record("late", 1.0, error="Timeout"),
        record("noise", 1.0, masked_by="gibberish"),
        record("", 1.0),
        record("none", reward=None),
    ]
    write(tmp_path / "run", 0, record("right", 1.0), *bad)
    write(
        tmp_path / "run", 3, record("right", 1.0), record("better", 1.5), record("other", 1.0, prompt_id="p2", env="b")
    )
    results = EvalPaths(tmp_path / "run").results
    results.parent.mkdir(parents=True)
    results.write_text(json.dumps(record("held out", 1.0, step=3, example=0)) + "\n", encoding="utf-8")
    return tmp_path / "run"


def export(file: Path, *words: object, to: str = "--to-sft") -> Result:
    return CliRunner().invoke(app, ["rollouts", *map(str, words), to, str(file)])


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_good_rollouts_of_training_are_exported_once_and_the_others_are_counted(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "sft.jsonl"
    result = export(file, run, "--min-reward", 1)
    assert result.exit_code == 0, result.output
    assert [each["messages"][-1] for each in rows(file)] == [
        {"role": "assistant", "content": answer} for answer in ("right", "better", "other")
    ]
    assert {name: value for name, value in rows(file)[0].items() if name != "messages"} == {
        "run": str(run),
        "step": 0,
        "is_evaluation": False,
        "env": "letters",
        "row": 1,
        "prompt_id": "p1",
        "reward": 1.0,
        "model_version": 4,
    }
    assert file.stat().st_mode & 0o777 == 0o600
    for line in (
        "left out 1 rollout whose kept text was cut (orchestrator.keep_rollouts.max_chars)",
        "left out 1 rollout that reached a limit on tokens",
        "left out 1 rollout with an error",
        "left out 1 rollout that a filter kept from training",
        "left out 1 rollout without an answer",
        "left out 1 rollout that repeat another one",
        f"3 rows of 2 prompts in {file}",
    ):
        assert line in result.stdout
    again = export(file, run, "--min-reward", 1)
    assert (again.exit_code, "this file already exists" in again.stderr) == (2, True)


def test_tools_go_with_the_prompt_and_its_own_answers_are_not_trained(tmp_path: Path) -> None:
    asked = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "count"}}]
    write(tmp_path / "run", 0, record("two", 1.0, prompt=asked, tools=tools, chat_template_kwargs={"brief": True}))
    file = tmp_path / "rows.jsonl"
    assert export(file, tmp_path / "run", "--min-reward", 1).exit_code == 0
    (row,) = rows(file)
    assert (row["tools"], row["chat_template_kwargs"]) == (tools, {"brief": True})
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, None]


def test_the_printed_command_has_a_config_and_the_start_that_the_user_typed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    file = tmp_path / "my rows.jsonl"
    result = export(file, run, "--min-reward", 1)
    assert f"`uv run medarc_train sft CONFIG --data.name '{file}'`" in result.stdout


def test_the_best_of_each_prompt_of_several_runs(run: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", 0, record("best", 2.0), record(HOSTILE, 1.2, prompt_id="p3"))
    file = tmp_path / "sft.jsonl"
    result = export(file, run, other, "--min-reward", 1, "--per-prompt", 1, "--env", "letters")
    assert result.exit_code == 0, result.output
    assert [(each["messages"][-1]["content"][:4], Path(each["run"]).name) for each in rows(file)] == [
        ("best", "other"),
        (HOSTILE[:4], "other"),
    ]
    assert "left out 2 rollouts beyond --per-prompt" in result.stdout


def test_evaluations_are_exported_only_when_asked_for(run: Path, tmp_path: Path) -> None:
    result = export(tmp_path / "sft.jsonl", run, "--min-reward", 1, "--eval", "last")
    assert result.exit_code == 0, result.output
    (row,) = rows(tmp_path / "sft.jsonl")
    assert (row["messages"][-1]["content"], row["is_evaluation"], row["step"]) == ("held out", True, 3)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "--to-sft needs --min-reward"),
        (["--min-reward", "9"], "of 0, none has a reward of at least 9"),
        (["--min-reward", "1", "--json", "--best", "2"], "--to-sft excludes --json, --best"),
        (["--min-reward", "nan"], "--min-reward is not a number"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(run: Path, tmp_path: Path, words: list[str], fault: str) -> None:
    result = export(tmp_path / "sft.jsonl", run, *words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert fault in result.stderr
    assert not (tmp_path / "sft.jsonl").exists()


def test_several_runs_and_a_number_per_prompt_are_for_the_export(run: Path) -> None:
    for words, fault in (
        ([run, run], "give one RUN; only --to-sft, --to-pairs and --to-kto"),
        ([run, "--per-prompt", "2"], "works only with --to-sft, --to-pairs and --to-kto"),
        ([run, "--margin", "2"], "--margin works only with --to-pairs"),
        ([run, "--to-sft", "a", "--to-kto", "b"], "give only one of --to-sft, --to-kto"),
    ):
        result = CliRunner().invoke(app, ["rollouts", *map(str, words)])
        assert (result.exit_code, fault in result.stderr) == (2, True)


def test_the_sft_trainer_reads_what_was_exported(run: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from prime_rl.trainer.sft.data.conversation import ConversationTokenizer
    from prime_rl.trainer.sft.data.sources import load_rows

    file = tmp_path / "sft.jsonl"
    assert export(file, run, "--min-reward", 1).exit_code == 0
    config = SFTDataConfig(name=str(file))
    model = Path(__file__).resolve().parents[1] / "examples" / "reverse_text" / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenize = ConversationTokenizer(tokenizer, config.loss_mask, config.ignored_keys, config.seq_len)
    samples = [tokenize(each) for each in load_rows(config)]
    trained = [tokenizer.decode(sample.token_ids[sample.is_trained]) for sample in samples]
    assert [text.split("<")[0].strip() for text in trained] == ["right", "better", "other"]


TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<{{ message.role }}>"
    "{% generation %}{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.id }}"
    "{{ call.function | tojson }}{% endfor %}{% endgeneration %}{{ message.tool_call_id or '' }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"type": "function", "id": "c", "function": {"name": "count", "arguments": "{}"}}


@pytest.fixture
def graded(tmp_path: Path) -> Path:
    """Two steps: a group with three rewards, one with a call of a tool, one with equal rewards; the first again."""
    calling = [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    with_tools = {"prompt_id": "p2", "group": 2, "tools": TOOLS}
    first = [record("mid", 0.5, group=1), record("good", 1.0, group=1), record("bad", 0.0, group=1)]
    equal = [record("same", 1.0, group=3, prompt_id="p3"), record("also", 1.0, group=3, prompt_id="p3")]
    others = [record("cut", 2.0, group=1, is_truncated=True), record("none", None, group=1)]
    tooled = [record("", 0.9, **with_tools) | {"completion": calling}, record("two", 0.6, **with_tools)]
    write(tmp_path / "graded", 0, *first, *equal, *others, *tooled)
    return write(tmp_path / "graded", 1, record("good", 1.0, group=1), record("worse", -1.0, group=1))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [("good", "bad"), ("three", "two"), ("good", "worse")]),
        (["--margin", 0.5], [("good", "bad"), ("good", "worse")]),
        (["--max-reward", -0.5], [("good", "worse")]),
        (["--min-reward", 1, "--max-reward", 0], [("good", "bad"), ("good", "worse")]),
        (["--per-prompt", 1], [("three", "two"), ("good", "worse")]),
        (["--step", "last"], [("good", "worse")]),
    ],
    ids=str,
)
def test_the_best_rollout_of_a_group_is_paired_with_the_worst(
    graded: Path, tmp_path: Path, words: list[object], expected: list[tuple[str, str]]
) -> None:
    file = tmp_path / "pairs.jsonl"
    result = export(file, graded, *words, to="--to-pairs")
    assert result.exit_code == 0, result.output
    found = rows(file)
    assert [tuple(each[side][-1]["content"] for side in ("chosen", "rejected")) for each in found] == expected
    assert all(each["score_chosen"] > each["score_rejected"] for each in found)
    assert f"in {file}: `medarc_train dpo CONFIG --data.name {file}`" in result.stdout.replace("uv run ", "")
    tooled = [each for each in found if each["prompt_id"] == "p2"]
    assert all((each["tools"], len(each["chosen"])) == (TOOLS, 3) for each in tooled)


def test_rollouts_get_labels_by_their_rewards(graded: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    words = ("--min-reward", 0.9, "--max-reward", 0)
    result = export(file, graded, *words, to="--to-kto")
    assert result.exit_code == 0, result.output
    labels = [(each["completion"][-1]["content"], each["label"]) for each in rows(file)]
    assert labels == [
        *[("good", True), ("bad", False), ("same", True), ("also", True), ("three", True), ("worse", False)],
    ]
    for line in (
        "left out 2 rollouts between --max-reward and --min-reward",
        "left out 1 rollout without a reward",
        "6 rows of 3 prompts (4 good, 2 bad)",
        "--loss.type kto",
    ):
        assert line in result.stdout


@pytest.mark.parametrize(
    ("to", "words", "fault"),
    [
        ("--to-pairs", ["--margin", "9"], "no rollouts of one prompt and step have rewards that differ by at least 9"),
        ("--to-kto", [], "--to-kto needs --min-reward"),
        ("--to-kto", ["--min-reward", "1", "--max-reward", "1"], "needs a --max-reward below --min-reward 1"),
        ("--to-kto", ["--min-reward", "1", "--margin", "1"], "--to-kto excludes --margin"),
    ],
)
def test_a_mistake_with_preferences_is_one_line(
    graded: Path, tmp_path: Path, to: str, words: list[str], fault: str
) -> None:
    result = export(tmp_path / "out.jsonl", graded, *words, to=to)
    assert (result.exit_code, result.stderr.count("\n"), fault in result.stderr) == (2, 1, True), result.stderr


@pytest.mark.parametrize(("to", "keys"), [("--to-pairs", {}), ("--to-kto", {"type": "kto"})])
def test_dpo_trains_on_what_was_exported(graded: Path, tmp_path: Path, to: str, keys: dict[str, str]) -> None:
    from transformers import AutoTokenizer

    from prime_rl.configs.dpo import DPOConfig
    from prime_rl.trainer.process.mesh import DataAxis
    from prime_rl.trainer.sft.data.samples import DatasetStream

    file = tmp_path / "rows.jsonl"
    words = ("--min-reward", 0.9) if to == "--to-kto" else ()
    assert export(file, graded, *words, to=to).exit_code == 0
    config = DPOConfig(data={"name": str(file), "seq_len": 512, "shuffle": False}, loss=keys)
    tokenizer = AutoTokenizer.from_pretrained(
        Path(__file__).resolve().parents[1] / "examples" / "reverse_text" / "model"
    )
    tokenizer.chat_template = WITH_TOOLS
    stream = DatasetStream(config.data, tokenizer, DataAxis(0, 1))
    samples = [sample for made in stream.own_share() for sample in made.samples]
    assert len(samples) == len(rows(file))
    texts = {
        tokenizer.decode(each.token_ids[each.is_trained]).strip() for sample in samples for each in sample.sequences
    }
    assert any("three" in text and '"count"' in text for text in texts), texts

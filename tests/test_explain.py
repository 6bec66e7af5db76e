"""`medarc_train explain`: where each value of a config comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl.explain.screen import reader_of
from medarc_rl.medarc_train import app
from prime_rl.configs.surface.root import ROOTS
from prime_rl.utils.pydantic_config.schema import walk_fields

BASE = """
max_steps = 10

[trainer.optim]
lr = 1e-5
"""
MIDDLE = """
toml_files = ["base.toml"]
[trainer]
optim.lr = 2e-5
[orchestrator]
rollouts_per_example = 4
[[orchestrator.env]]
id = "first"
[[orchestrator.env]]
id = "second"
[orchestrator.env.args]
x = 1
"""
TOP = """
[orchestrator]
batch_size = 16
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"base": BASE, "middle": MIDDLE, "top": TOP}.items():
        (tmp_path / f"{name}.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def explain(*words: object) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, words)])


def explained(*words: object) -> dict[str, dict[str, object]]:
    result = explain(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_each_value_names_the_line_that_set_it_and_what_it_overrode(files: Path, monkeypatch) -> None:
    monkeypatch.setenv("PRIME_RL_MAX_STEPS", "3")
    found = explained("@", "middle.toml", "@", "top.toml", "--trainer.optim.lr", "5e-5", "--as", "rl")
    assert found["trainer.optim.lr"] == {
        "value": 5e-5,
        "origin": "--trainer.optim.lr",
        "overrides": [{"value": 2e-5, "origin": "middle.toml:4"}, {"value": 1e-5, "origin": "base.toml:5"}],
    }
    assert found["max_steps"]["origin"] == "base.toml:2"
    assert found["max_steps"]["overrides"] == [{"value": "3", "origin": "PRIME_RL_MAX_STEPS"}]
    assert found["orchestrator.env.1.id"]["origin"] == "middle.toml:10"
    assert found["orchestrator.env.1.args"] == {"value": {"x": 1}, "origin": "middle.toml:11", "overrides": []}
    assert found["orchestrator.batch_size"]["origin"] == "top.toml:3"


def test_values_that_follow_from_others_name_the_rule(files: Path) -> None:
    found = explained("middle.toml")
    assert found["trainer.max_steps"] == {"value": 10, "origin": "follows: max_steps", "overrides": []}
    assert found["orchestrator.max_inflight_rollouts"]["origin"] == "follows: batch_size times oversampling_factor"


def test_a_value_that_a_rule_replaces_is_listed_as_overridden(files: Path) -> None:
    (files / "own.toml").write_text("max_steps = 10\n[trainer]\nmax_steps = 7\n[orchestrator]\n")
    lost = explained("own.toml")["trainer.max_steps"]["overrides"]
    assert lost == [{"value": 7, "origin": "own.toml:3"}]


def test_a_list_of_a_stronger_file_hides_the_items_of_a_weaker_one(files: Path) -> None:
    (files / "over.toml").write_text('[orchestrator]\n[[orchestrator.env]]\nid = "other"\n')
    found = explained("@", "middle.toml", "@", "over.toml", "orchestrator.env")
    assert found["orchestrator.env.0.id"] == {"value": "other", "origin": "over.toml:3", "overrides": []}
    assert "orchestrator.env.1.id" not in found


def test_an_item_that_an_option_changes_keeps_its_other_keys(files: Path) -> None:
    found = explained("middle.toml", "orchestrator.env", "--orchestrator.env.0.id", "changed")
    assert found["orchestrator.env.0.id"]["origin"] == "--orchestrator.env.0.id"
    assert found["orchestrator.env.0.id"]["overrides"] == [{"value": "first", "origin": "middle.toml:8"}]
    assert found["orchestrator.env.1.id"]["origin"] == "middle.toml:10"


def test_one_key_is_told_with_its_meaning_and_its_reader(files: Path) -> None:
    lines = explain("middle.toml", "trainer.optim.lr").stdout.splitlines()
    assert lines[0] == "trainer.optim.lr = 2e-05"
    assert lines[1] == "  Learning rate."
    told = {line[:24].strip(): line[24:] for line in lines[2:]}
    assert told["origin"] == "middle.toml:4"
    assert told["overrides"] == "1e-05  base.toml:5"
    assert told["read by"] == "the trainer"


def test_a_shared_key_names_what_follows_it(files: Path) -> None:
    text = explain("middle.toml", "max_steps").stdout
    assert "trainer.max_steps = 10" in text
    assert "orchestrator.max_steps = 10" in text


def test_only_defaults_are_left_out_unless_asked_for(files: Path) -> None:
    assert "trainer.optim.betas1" not in explain("middle.toml").stdout
    assert "trainer.optim.betas1" in explain("middle.toml", "--all").stdout


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("middle.toml trainer.optm.lr", "middle.toml has no key trainer.optm.lr: did you mean trainer.optim.lr?"),
        ("gone.toml", "gone.toml: no such file"),
        ("", "no config: name a TOML file or the directory of a run, as in `explain config.toml`"),
        ("middle.toml a b", "one KEY at a time (got a and b)"),
        ("empty", "empty is not the directory of a run: it has no configs/rl.toml, sft.toml or eval.toml"),
        ("middle.toml --trainer.optim.lr x", "--trainer.optim.lr: should be a number, unable to parse string as a"),
    ],
)
def test_what_cannot_be_explained_is_one_line(files: Path, words: str, fault: str) -> None:
    (files / "empty").mkdir()
    result = explain(*words.split())
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")


def test_two_configs_are_compared_with_the_origins_of_both(files: Path) -> None:
    (files / "other.toml").write_text('toml_files = ["middle.toml"]\n[trainer.optim]\nlr = 9e-5\n')
    text = explain("middle.toml", "--diff", "other.toml").stdout
    assert text.splitlines() == [
        "trainer.optim.lr",
        "  middle.toml  2e-05  (middle.toml:4)",
        "  other.toml   9e-05  (other.toml:3)",
    ]
    assert explain("middle.toml", "--diff", "middle.toml").stdout.strip().endswith("have the same values")


def test_a_run_remembers_where_its_values_came_from(files: Path) -> None:
    out = files / "out"
    (files / "sft.toml").write_text('[model]\nname = "no/model"\n[data]\nseq_len = 64\n[optim]\nlr = 3e-5\n')
    started = CliRunner().invoke(
        app, ["sft", "sft.toml", "--output-dir", str(out), "--dry-run", "--data.batch-size", "8", "--data.type", "fake"]
    )
    assert "sft.toml:6" in started.stdout, started.output
    found = explained(out)
    assert found["optim.lr"]["origin"] == "sft.toml:6"
    (files / "sft.toml").write_text("# Another line.\n" + (files / "sft.toml").read_text())
    assert explained("sft.toml", "--as", "sft")["optim.lr"]["origin"] == "sft.toml:7"
    assert found["data.batch_size"]["origin"] == "--data.batch-size"
    differing = explain(out, "--diff", "sft.toml", "--json").stdout
    assert {"output_dir", "data.batch_size"} <= json.loads(differing).keys()


@pytest.mark.parametrize("record", [{"model.name": 3}, {"model.name": {"origin": "a", "overrides": {}}}])
def test_a_damaged_record_of_a_run_is_one_line(record: dict[str, object], files: Path) -> None:
    configs = files / "run" / "configs"
    configs.mkdir(parents=True)
    (configs / "sft.toml").write_text("")
    (configs / "origins.json").write_text(json.dumps(record))
    result = explain(files / "run")
    assert result.exit_code == 2
    assert "origins.json cannot be read" in result.stderr


@pytest.mark.parametrize("origin", ["\x1b[31m", "\ud800", 1, None])
def test_an_origin_of_any_kind_is_shown_as_plain_text(origin: object, files: Path) -> None:
    configs = files / "run" / "configs"
    configs.mkdir(parents=True)
    (configs / "sft.toml").write_text("max_steps = 3")
    (configs / "origins.json").write_text(json.dumps({"max_steps": {"origin": origin, "overrides": []}}))
    result = explain(files / "run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert all(line.isprintable() for line in result.stdout.splitlines())


@pytest.mark.parametrize("component", ["rl", "sft", "eval"])
def test_every_key_has_a_reader_and_a_rule_for_resuming(component: str, files: Path) -> None:
    for path, _, _ in walk_fields(ROOTS[component]):
        assert reader_of(component, path)


def test_a_value_that_validation_takes_from_the_data_names_its_key_there(tmp_path: Path) -> None:
    config = tmp_path / "sft.toml"
    config.write_text(
        "[data]\nname = 'a.jsonl'\nseq_len = 64\nloss_mask.user = true\n"
        "[val.data]\nname = 'b.jsonl'\nloss_mask.tool = true\n"
    )
    values = explained(config, "val.data")
    assert values["val.data.seq_len"]["origin"] == "follows: data.seq_len"
    assert (values["val.data.loss_mask.user"]["value"], values["val.data.loss_mask.user"]["origin"]) == (
        True,
        "follows: data.loss_mask.user",
    )
    assert values["val.data.name"]["origin"].endswith("sft.toml:6")
    assert values["val.data.shuffle"]["origin"] == "default"
    assert "also sets" in explain(config, "data.seq_len").stdout


def test_the_items_of_a_list_follow_the_list_that_they_were_taken_from(tmp_path: Path) -> None:
    config = tmp_path / "sft.toml"
    config.write_text(
        "[data]\nsources = [{ name = 'a.jsonl', weight = 3 }, { name = 'b.jsonl' }]\n[val.data]\nseq_len = 64\n"
    )
    values = explained(config, "val.data")
    assert values["val.data.sources.0.weight"]["origin"] == "follows: data.sources.0.weight"
    assert values["val.data.sources.1.name"]["origin"] == "follows: data.sources.1.name"
    assert values["val.data.sources.1.split"]["origin"] == "default"
    assert "also sets" in explain(config, "data.sources.1.name").stdout


def test_the_values_of_a_section_that_a_rule_set_name_the_rule(tmp_path: Path) -> None:
    config = tmp_path / "sft.toml"
    config.write_text("bench = {}\n[data]\nname = 'a.jsonl'\n[scheduler]\ntype = 'cosine'\n")
    kind = explained(config, "scheduler")["scheduler.type"]
    assert (kind["value"], kind["origin"]) == ("constant", "follows: bench")
    assert [each["value"] for each in kind["overrides"]] == ["cosine"]

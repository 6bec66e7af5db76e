"""Which models answer in a chat, for everything that a user may name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prime_rl.checks.chat_models import ChatModel, ChatPlan, find_chat_models
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import StartFault
from prime_rl.utils.files import replacing_directory


def model(folder: Path, template: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    if template:
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def adapter(folder: Path, base: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "base_model_name_or_path": base}))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return model(tmp_path / "base")


@pytest.fixture
def run(tmp_path: Path, base: Path) -> RunPaths:
    """A run with weights of steps 5 and 10, a checkpoint of step 10, and one of step 12 that was only broadcast."""
    run = RunPaths(tmp_path / "out")
    run.configs.mkdir(parents=True)
    run.config("trainer").write_text(f'[model]\nname = "{base}"\n')
    for step in (5, 10):
        with replacing_directory(run.weight(step)) as scratch:
            model(scratch)
    for step in (10, 12, 13):
        with replacing_directory(run.checkpoint(step)) as scratch:
            (scratch / "trainer").mkdir()
    with replacing_directory(run.orchestrator.broadcast(12)) as scratch:
        (scratch / "model.safetensors").touch()
    return run


@pytest.mark.parametrize(
    ("named", "answers"),
    [
        ("", "weights/step_10"),
        ("weights", "weights/step_10"),
        ("weights/step_5", "weights/step_5"),
        ("checkpoints/step_10", "weights/step_10"),
        ("checkpoints/step_10/trainer", "weights/step_10"),
    ],
)
def test_every_place_of_a_run_stands_for_its_exported_model(
    run: RunPaths, base: Path, named: str, answers: str
) -> None:
    found = find_chat_models(str(run.root / named))
    assert found.tuned == ChatModel(str(run.root / answers), str(run.root / answers))
    assert found.base == ChatModel(str(base), str(base), is_optional=True)


@pytest.mark.parametrize("named", ["checkpoints/step_12", "run_default/broadcasts/step_12", "run_default/broadcasts"])
def test_broadcast_weights_replace_those_of_the_base(run: RunPaths, base: Path, named: str) -> None:
    tuned = find_chat_models(str(run.root / named)).tuned
    folder = str(run.orchestrator.broadcast(12))
    assert tuned == ChatModel(folder, str(base), weights=folder)


def test_an_adapter_of_a_run_answers_from_any_directory(tmp_path: Path, base: Path, run: RunPaths) -> None:
    run.config("trainer").write_text('[model]\nname = "folder/where/the/run/was/started"\n')
    folder = adapter(run.weight(10) / "lora_adapters", str(base))
    assert find_chat_models(str(folder)).tuned == ChatModel(str(folder), str(base), adapter=str(folder))


def test_an_adapter_of_a_moved_model_answers_with_the_runs_model(tmp_path: Path, base: Path, run: RunPaths) -> None:
    folder = adapter(run.weight(10) / "lora_adapters", str(tmp_path / "moved"))
    assert find_chat_models(str(folder)).tuned.name == str(base)


def test_a_broadcast_needs_the_model_that_the_run_started_from(run: RunPaths) -> None:
    run.config("trainer").write_text('[model]\nname = "./elsewhere"\n')
    with pytest.raises(StartFault, match=r"holds weights of \./elsewhere: no such directory.*with --base"):
        find_chat_models(str(run.orchestrator.broadcast(12)))


def test_an_adapter_answers_with_its_base(tmp_path: Path, base: Path) -> None:
    folder = adapter(tmp_path / "adapter", str(base))
    found = find_chat_models(str(folder))
    assert found.tuned == ChatModel(str(folder), str(base), adapter=str(folder))
    assert found.base == ChatModel(str(base), str(base))
    other = model(tmp_path / "other")
    assert find_chat_models(str(folder), str(other)).tuned.name == str(other)


def test_a_base_without_a_template_uses_the_one_that_was_trained_on(tmp_path: Path) -> None:
    base, tuned = model(tmp_path / "base", template=False), model(tmp_path / "tuned")
    found = find_chat_models(str(tuned), str(base))
    assert found.base is not None
    assert found.base.chat_template == str(tuned / "chat_template.jinja")


def test_a_model_alone_has_no_base(base: Path) -> None:
    found = find_chat_models(str(base))
    assert (found.base, found.no_base) == (None, "name one with --base")
    assert find_chat_models(str(base), str(base)).no_base == "it is the same model"
    assert find_chat_models("owner/model").tuned == ChatModel("owner/model", "owner/model")


def test_a_base_that_is_gone_is_told_and_the_weights_still_answer(run: RunPaths) -> None:
    run.config("trainer").write_text('[model]\nname = "/gone/model"\n')
    found = find_chat_models(str(run.root))
    assert (found.base, found.no_base) == (None, "/gone/model: no such directory; there is no directory /gone")


def test_what_is_no_model_is_one_line(tmp_path: Path, run: RunPaths, base: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    young = RunPaths(tmp_path / "young")
    young.configs.mkdir(parents=True)
    faults = {
        "/gone/model": "/gone/model: no such directory; there is no directory /gone",
        str(
            base / "config.json"
        ): f"{base}/config.json: this is a file; give the folder of a model, an adapter or a run",
        str(empty): f"{empty}: the folder has no config.json",
        str(tmp_path): f"{tmp_path}: the folder has no config.json; did you mean {base}?",
        str(young.root): f"{young.root}: this run has no weights yet; they are written to {young.weights}",
        str(run.checkpoint(13)): (
            f"{run.checkpoint(13)}: the trainer's state, to resume from; the model of step 13 was not exported to "
            f"{run.weights}; exported steps: 5, 10"
        ),
        str(adapter(tmp_path / "lone" / "adapter", None)): (
            f"{tmp_path}/lone/adapter: this is an adapter; give its base model with --base"
        ),
    }
    for named, fault in faults.items():
        with pytest.raises(StartFault) as caught:
            find_chat_models(named)
        assert str(caught.value) == fault
    with pytest.raises(StartFault, match="--base /gone/base: no such directory"):
        find_chat_models(str(base), "/gone/base")


def test_a_plan_reaches_the_chats_process_unchanged() -> None:
    models = (ChatModel("base", "base", is_optional=True), ChatModel("tuned", "base", adapter="a"))
    plan = ChatPlan(models, {"temperature": 0.5, "max_tokens": 9}, ("hi", "ça va?"), "be brief", "cpu")
    assert ChatPlan.from_json(plan.to_json()) == plan

"""What a check can know of the place where a run will start: here, or on the node of a batch job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from prime_rl.checks import start_faults
from prime_rl.checks.packages import environment_faults, environment_module, find_module, function_fault
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rollouts.environments import EnvConfig
from prime_rl.configs.sft import SFTConfig


def sft_faults(job_dir: Path | None = None, **values: object) -> list[str]:
    return start_faults(SFTConfig.model_validate({"model": {"name": "some/model", "seq_len": 64}, **values}), job_dir)


def test_a_hub_id_is_never_refused(tmp_path: Path) -> None:
    hub = {"data": {"name": "owner/data"}, "tokenizer": {"name": "owner/tokenizer"}, "output_dir": tmp_path}
    assert sft_faults(**hub) == []
    assert sft_faults(tmp_path, **hub) == []


def test_a_path_of_a_job_is_missing_only_if_its_parent_is_here(tmp_path: Path) -> None:
    near, far = tmp_path / "no.jsonl", tmp_path / "scratch-of-the-node" / "no.jsonl"
    assert sft_faults(data={"name": str(far)}) == [
        f"data.name = {far}: no such file or directory; there is no directory {far.parent}"
    ]
    assert sft_faults(tmp_path, data={"name": str(far)}) == []
    assert sft_faults(tmp_path, data={"name": str(near)}) == [f"data.name = {near}: no such file or directory"]


def test_a_relative_path_of_a_job_starts_in_its_project(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert sft_faults(data={"name": "./rows.jsonl"}) == [
        f"data.name = ./rows.jsonl: no such file or directory; looked in {Path.cwd()}"
    ]
    assert sft_faults(tmp_path, data={"name": "./rows.jsonl"}) == []


def test_a_reward_model_in_the_directory_that_is_cleaned_is_an_input(tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = f"model:{out / 'weights' / 'step_40'}"
    (out / "weights" / "step_40").mkdir(parents=True)
    for rewards, key in (([model, "math"], "rewards"), ([{"fn": model, "args": {"device": "tpu"}}], "rewards.0.fn")):
        env = {"id": "rows", "args": {"rewards": rewards, "datasets": [{"path": "owner/rows"}]}}
        values = {"data": {"name": "owner/data", "seq_len": 64}, "output_dir": out, "clean_output_dir": True}
        of_reward, cleaned = sft_faults(**values, eval={"env": [env]})
        assert ("device must be 'cpu' or such as 'cuda:3', got 'tpu'" in of_reward) == (key != "rewards")
        assert f"eval.env.0.args.{key} = {model}: --clean-output-dir would delete it with {out}" in cleaned


def test_packages_of_a_job_are_looked_for_only_in_an_environment_that_is_ours(tmp_path: Path) -> None:
    config = OfflineEvalConfig(environment_ids=["not-here"], output_dir=tmp_path)
    assert start_faults(config, tmp_path) == []
    (tmp_path / ".venv").symlink_to(sys.prefix)
    assert len(start_faults(config, tmp_path)) == 1


def test_an_engine_that_the_node_of_a_job_chooses_is_not_judged_here(tmp_path: Path) -> None:
    parallel = {"parallel": {"dp": 2}, "enable_eplb": True}
    config = OfflineEvalConfig(environment_ids=["reverse-text"], inference=parallel, output_dir=tmp_path)
    assert start_faults(config, tmp_path) == []
    on_cpu = config.model_copy(update={"inference": config.inference.model_copy(update={"device": "cpu"})})
    (fault,) = start_faults(on_cpu, tmp_path)
    assert "enable_eplb = True: only the vllm engine supports it" in fault


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A directory with a package that must not be imported."""
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "mine" / "sub" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "mine" / "sub" / "losses.py").write_text("from other import function as renamed\n\n\ndef loss(): ...\n")
    (tmp_path / "mine" / "open.py").write_text("from other import *\n")
    (tmp_path / "mine" / "broken.py").write_text("def loss(:\n")
    return tmp_path


def test_a_module_is_found_without_importing_its_package(package: Path) -> None:
    spec = find_module("mine.sub.losses", package)
    assert spec is not None
    assert spec.origin == str(package / "mine" / "sub" / "losses.py")
    assert "mine" not in sys.modules
    assert find_module("mine.sub.losses.deeper", package) is None
    assert find_module("mine.sub.losses") is None


def test_a_module_in_folders_without_init_is_found(tmp_path: Path) -> None:
    (tmp_path / "agents_of_mine" / "inner").mkdir(parents=True)
    (tmp_path / "agents_of_mine" / "inner" / "plain.py").write_text("raise SystemExit('imported')")
    found = find_module("agents_of_mine.inner.plain", tmp_path)
    assert found is not None
    assert found.origin == str(tmp_path / "agents_of_mine" / "inner" / "plain.py")
    assert find_module("agents_of_mine.inner.nothing", tmp_path) is None


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("mine.sub.losses.loss", None),
        ("mine.sub.losses.renamed", None),
        ("mine.sub.losses.other", "losses.py has no other"),
        # What these have shows only when they are imported.
        ("mine.open.loss", None),
        ("mine.broken.loss", None),
        (
            "mine.nothing.loss",
            "no module named 'mine.nothing': put mine/nothing.py where the run starts, or install its package",
        ),
        ("mine.sub.losses:loss", None),
        ("mine.sub.losses:other", "losses.py has no other"),
    ],
)
def test_a_function_is_looked_for_in_the_source(package: Path, path: str, fault: str | None) -> None:
    found = function_fault("loss.import_path", path, StartDir(package))
    assert (found is None) if fault is None else (found is not None and found.endswith(fault))


@pytest.mark.parametrize("env_id", ["reverse-text", "reverse-text@0.1.0", "owner/reverse-text"])
def test_an_environment_is_known_by_any_form_of_its_id(env_id: str) -> None:
    assert environment_module(env_id) == "reverse_text"
    assert list(environment_faults("env", [EnvConfig(id=env_id)], StartDir())) == []


def test_an_interpreter_of_its_own_must_be_one_and_must_have_the_environment(tmp_path: Path) -> None:
    text = tmp_path / "python.txt"
    text.write_text("")

    def faults(python: Path | str, env_id: str = "json") -> list[str]:
        return [str(fault) for fault in environment_faults("env", [EnvConfig(id=env_id, python=python)], StartDir())]

    assert faults(sys.executable) == []
    for wrong in ("/no/such/python", text, tmp_path):
        (fault,) = faults(wrong)
        advice = "give the path of an interpreter, such as env/.venv/bin/python"
        assert fault == f"env[0]: python = {str(wrong)!r} is not a program: {advice}"
    (fault,) = faults("/bin/false")
    assert "is not Python 3.10 or later" in fault
    (fault,) = faults(sys.executable, "no-such-env")
    assert (
        fault == f"env[0]: {sys.executable} has no module named 'no_such_env': install the environment's package there"
    )


def test_an_environment_runs_at_an_address_or_in_an_interpreter() -> None:
    with pytest.raises(ValidationError, match="python and address exclude each other"):
        EnvConfig(python=sys.executable, address="tcp://127.0.0.1:5000")


def test_a_path_that_is_mistyped_names_the_one_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("{}\n")
    meant = tmp_path / "data" / "rows.jsonl"
    for given in (tmp_path / "data" / "rwos.jsonl", tmp_path / "daat" / "rows.jsonl"):
        assert sft_faults(data={"name": str(given)}) == [
            f"data.name = {given}: no such file or directory; did you mean {str(meant)!r}?"
        ]
    assert sft_faults(tmp_path, data={"name": "./data/rwos.jsonl"}) == [
        "data.name = ./data/rwos.jsonl: no such file or directory; did you mean 'data/rows.jsonl'?"
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_data_that_the_user_may_not_read_is_named_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    file.chmod(0)
    assert sft_faults(data={"name": str(file)}) == [f"data.name = {file}: you do not have permission to read {file}"]
    assert sft_faults(tmp_path, data={"name": str(file)}) == []

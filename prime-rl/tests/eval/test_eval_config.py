"""The config of `eval`: which environments, how much of each, and what contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.surface.not_built import unbuilt_faults
from prime_rl.utils.pydantic_config import ConfigError, dump_toml, load_config


def load(*options: str) -> OfflineEvalConfig:
    return load_config(OfflineEvalConfig, [], options)


def sizes(config: OfflineEvalConfig) -> list[tuple[str, int | None, int | None]]:
    return [(env.id, env.num_examples, env.rollouts_per_example) for env in config.environments]


def test_environments_come_from_tables_and_from_ids() -> None:
    config = load("--env", '{"id": "a", "num_examples": 7}', "--environment-ids", "b,c")
    assert sizes(config) == [("a", 7, 1), ("b", -1, 1), ("c", -1, 1)]


def test_one_number_is_for_every_environment_and_several_are_one_each() -> None:
    config = load("--environment-ids", "a,b", "--num-examples", "5", "--rollouts-per-example", "2,4")
    assert sizes(config) == [("a", 5, 2), ("b", 5, 4)]


def test_ids_have_their_own_arguments() -> None:
    config = load("--environment-ids", "a,b", "--environment-args", '{"b": {"seed": 3}}')
    assert [env.args for env in config.environments] == [{}, {"seed": 3}]


def test_the_started_server_serves_the_model_on_the_same_device() -> None:
    config = load("--environment-ids", "a", "--model.name", "tiny", "--device", "cpu", "--inference")
    assert config.inference is not None
    assert (config.inference.model.name, config.inference.device) == ("tiny", "cpu")


@pytest.mark.parametrize(
    ("options", "starts_one"),
    [
        ([], True),
        (["--client.timeout", "60"], True),
        (["--client.base-url", "http://localhost:8000/v1"], False),
        (["--no-inference"], False),
        (["--client.base-url", "http://localhost:8000/v1", "--inference"], True),
    ],
)
def test_a_server_is_started_unless_one_is_named(options: list[str], starts_one: bool, tmp_path: Path) -> None:
    config = load("--environment-ids", "a", "--model.name", "tiny", "--device", "cpu", *options)
    assert (config.inference is not None) == starts_one
    if config.inference is not None:
        assert (config.inference.model.name, config.inference.device) == ("tiny", "cpu")
    dump_toml(config, tmp_path / "eval.toml")
    assert load_config(OfflineEvalConfig, [tmp_path / "eval.toml"]) == config


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ([], "there is no environment: give one with `environment_ids` or [[env]]"),
        (["--environment-ids", "a,b,c", "--num-examples", "1,2"], "num_examples has 2 values for 3 environments"),
        (["--environment-ids", "a", "--num-examples", "0"], "num_examples has 0: at least 1, or -1 for all"),
        (["--environment-ids", "a,a"], "env: more than one environment is called 'a': set `name`"),
        (["--environment-ids", "a", "--environment-args", '{"b": {}}'], "environment_args names 'b'"),
        (["--environment-ids", "a", "--no-eval-base"], "eval_base = false without weights_dir leaves nothing"),
        (["--environment-ids", "a", "--steps", "1"], "steps are those of weights_dir"),
        (["--environment-ids", "a", "--watch"], "watch needs weights_dir"),
        (["--environment-ids", "a", "--watch", "--weights-dir", "w", "--steps", "1"], "leave out steps"),
        (["--environment-ids", "a", "--inference.model.name", "x"], "inference.model.name ('x') is not model.name"),
        (["--environment-ids", "a", "--use-tqdm", "true"], "--use-tqdm: unknown option; remove it"),
    ],
)
def test_what_contradicts_itself_is_one_line(options: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*options)
    (line,) = caught.value.faults
    assert fault in line


def test_defaults_ask_for_nothing_that_is_not_built() -> None:
    assert unbuilt_faults(load("--environment-ids", "a", "--inference")) == []
    assert unbuilt_faults(load("--environment-ids", "a", "--client.elastic.hostname", "x")) == []

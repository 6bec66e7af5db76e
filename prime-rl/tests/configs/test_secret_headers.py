"""A secret header is refused in a config, because configs are written to files, and read from a variable instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.checks import start_faults
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.utils.pydantic_config import BaseSettings, ConfigError, parse_argv

SECRET = "hunter2-is-my-password"
URL = "http://node7:8000/v1"


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key", "cookie", "X-Auth-Token", "Proxy-Authorization"])
@pytest.mark.parametrize(
    ("root", "key"),
    [(OrchestratorConfig, "client"), (RLConfig, "orchestrator.client"), (OfflineEvalConfig, "client")],
    ids=["orchestrator", "rl", "eval"],
)
def test_it_is_refused_without_being_printed(root: type[BaseSettings], key: str, header: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_argv(root, argv=[f"--{key}.headers", f"{header}={SECRET}"])

    assert f'set headers_from_env.{header} = "NAME" instead' in str(refused.value)
    assert SECRET not in str(refused.value)


def test_other_headers_stay_in_the_config() -> None:
    config = parse_argv(OrchestratorConfig, argv=["--client.headers", "X-Tenant=oncology"])

    assert config.client.headers == {"X-Tenant": "oncology"}


def test_its_value_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    monkeypatch.setenv("VLLM_API_KEY", "key of the server")
    config = ClientConfig(headers={"X-Tenant": "oncology"}, headers_from_env={"X-Api-Key": "MY_KEY"})

    server = InferenceServer(URL, config, "model")

    assert server.headers == {
        "Authorization": "Bearer key of the server",
        "X-Tenant": "oncology",
        "X-Api-Key": SECRET,
    }
    assert SECRET not in repr(config)


def test_a_variable_that_is_not_set_is_told_before_a_run_starts_here(tmp_path: Path) -> None:
    config = OfflineEvalConfig(client={"headers_from_env": {"X-Api-Key": "NO_SUCH_VARIABLE"}}, environment_ids=["x"])
    fault = "client.headers_from_env.X-Api-Key: the environment variable NO_SUCH_VARIABLE is not set: export it"

    assert fault in start_faults(config)
    assert fault not in start_faults(config, job_dir=tmp_path), "a batch job may have other variables"

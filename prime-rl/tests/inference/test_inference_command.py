"""The `inference` command: engine selection, config errors, and exit status."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from prime_rl.checks.engines import EMBEDDED_TOOL_PARSERS, choose_backend, embedded_faults, option_faults
from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.engine.text import TOOL_PARSERS
from prime_rl.launch import reserved_ports
from prime_rl.launch.devices import SPIN_VARIABLE, spin_env
from prime_rl.utils.pydantic_config import load_config
from prime_rl.utils.scratch import LAUNCH_VARIABLE

from .conftest import Server


def config_of(**settings: object) -> InferenceConfig:
    return load_config(InferenceConfig, [], settings)


def inference(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "prime_rl.inference.server", "--server.host", "127.0.0.1", *options]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **env})


@pytest.mark.parametrize(
    ("settings", "has_vllm", "has_gpu", "expected"),
    [
        ({}, True, True, "vllm"),
        ({}, True, False, "embedded"),
        ({}, False, True, "embedded"),
        ({"device": "cpu"}, True, True, "embedded"),
        ({"backend": "embedded"}, True, True, "embedded"),
        ({"backend": "vllm"}, False, False, "vllm"),
    ],
)
def test_auto_selects_vllm_if_it_is_installed_and_there_is_a_gpu(settings, has_vllm, has_gpu, expected) -> None:
    backend, reason = choose_backend(config_of(**settings), lambda: has_vllm, lambda: has_gpu)
    assert backend == expected
    assert reason


def test_settings_that_only_vllm_reads_are_refused_by_name() -> None:
    config = config_of(enable_expert_parallel=True, api_server_count=2, model={"tool_call_parser": "mistral"})
    faults = [*embedded_faults(config, lambda: True), *option_faults(["--swap-space", "4"])]
    assert [fault.split(":")[0] for fault in faults] == [
        "enable_expert_parallel = True",
        "model.tool_call_parser = 'mistral'",
        "api_server_count = 2",
        "unknown option --swap-space",
    ]
    assert embedded_faults(config_of(model={"tool_call_parser": "hermes"}), lambda: True) == []


def test_the_start_check_knows_every_parser_of_the_embedded_engine() -> None:
    assert set(EMBEDDED_TOOL_PARSERS) == TOOL_PARSERS.keys()


@pytest.mark.parametrize("settings", [{"parallel": {"dp": 2}}, {"parallel": {"tp": 2}}])
def test_parallel_processes_become_one_on_a_cpu_and_are_refused_on_gpus(settings) -> None:
    (fault,) = embedded_faults(config_of(**settings), lambda: True)
    assert "uses one GPU" in fault
    assert embedded_faults(config_of(**settings), lambda: False) == []
    assert embedded_faults(config_of(**settings, device="cpu"), lambda: True) == []


def test_an_option_that_the_engine_would_ignore_ends_the_command_with_2() -> None:
    done = inference("--backend", "embedded", "--enable-expert-parallel")
    assert done.returncode == 2
    assert "enable_expert_parallel = True" in done.stderr


needs_no_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="needs no vLLM in this Python")


@needs_no_vllm
def test_vllm_is_served_by_the_interpreter_that_the_environment_names(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "serving: $*, not again: ${PRIME_RL_VLLM_PYTHON-}"; exit 7\n')
    python.chmod(0o755)
    done = inference("--backend", "vllm", "--seed", "3", PRIME_RL_VLLM_PYTHON=str(python))
    assert done.returncode == 7
    options = "-m prime_rl.inference.server --server.host 127.0.0.1 --backend vllm --seed 3"
    assert f"serving: {options}, not again: \n" in done.stdout


@needs_no_vllm
@pytest.mark.parametrize(
    ("python", "advice"),
    [("", "set PRIME_RL_VLLM_PYTHON to an interpreter that has it"), ("/no/python", "'/no/python': No such file")],
)
def test_a_missing_vllm_is_one_line(python: str, advice: str) -> None:
    done = inference("--backend", "vllm", PRIME_RL_VLLM_PYTHON=python)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert advice in line


@pytest.mark.parametrize(("name", "missing"), [("./no/such/model", Path("no").absolute()), ("/no/such/model", "/no")])
def test_a_missing_model_is_one_line(name: str, missing: object) -> None:
    done = inference("--backend", "embedded", "--model.name", name, "--server.port", "0")
    assert (done.returncode, done.stderr) == (
        2,
        f"error: model.name = {name}: no such directory; there is no directory {missing}\n",
    )


def test_a_context_beyond_the_models_is_one_line(tiny_model_dir: Path) -> None:
    options = ("--model.name", str(tiny_model_dir), "--model.max-model-len", "4096", "--server.port", "0")
    done = inference("--backend", "embedded", *options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "max_model_len is 4096, but the model's context is 1024" in line


def test_a_port_in_use_is_reported_before_the_model_loads(tiny_model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = inference("--backend", "embedded", "--model.name", str(tiny_model_dir), "--server.port", port)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use" in done.stdout


def answer_while_loading(port: int) -> httpx.Response:
    """The first response to a health check, retried until the server listens."""
    while True:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=None)
        except httpx.ConnectError:
            continue


def test_a_loading_server_responds_with_503_and_stops_on_sigterm(tiny_model_dir: Path) -> None:
    with reserved_ports(1) as (port,):
        argv = [sys.executable, "-m", "prime_rl.inference.server", "--model.name", str(tiny_model_dir)]
        argv += ["--backend", "embedded", "--server.host", "127.0.0.1", "--server.port", str(port)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        answer = answer_while_loading(port)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"
    process.terminate()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "Traceback" not in output


@pytest.mark.parametrize("launched", [False, True], ids=["by hand", "by a launch"])
def test_threads_of_a_server_spin_unless_a_launch_has_divided_the_cores(
    served_model_dir: Path, tmp_path: Path, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (SPIN_VARIABLE, LAUNCH_VARIABLE, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(variable, raising=False)
    env = {LAUNCH_VARIABLE: str(tmp_path)} if launched else {}
    server = Server(sys.executable, served_model_dir, "--backend", "embedded", OMP_DISPLAY_ENV="verbose", **env)
    assert server.stop() == 0
    (spins,) = {line.split("'")[1] for line in server.lines if SPIN_VARIABLE in line}
    assert spins == ("0" if launched else spin_env({})[SPIN_VARIABLE])

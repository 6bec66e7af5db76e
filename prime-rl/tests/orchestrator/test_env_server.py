"""The `env-server` command as a process, asked by the orchestrator's own client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.configs.env_server import EnvServerConfig
from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.orchestrator.env_server import main
from prime_rl.orchestrator.rollouts.rollout import ExampleRef
from prime_rl.orchestrator.rollouts.sampling import SamplingConfig, train_sampling_args
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.workers.inside.frames import encode, receive_now
from prime_rl.orchestrator.workers.loading import load_environments
from prime_rl.utils.engine_keys import TRANSPORT_KEY_VARIABLE

COMMAND = Path(sys.executable).with_name("env-server")


@pytest.mark.usefixtures("importable_environments")
@pytest.mark.parametrize(
    "host", [pytest.param("127.0.0.1", id="on this machine"), pytest.param("0.0.0.0", id="over the network")]
)
async def test_an_environment_answers_from_a_process_of_its_own(
    host: str, policy_server, environments_dir: Path, tmp_path: Path, unused_tcp_port: int, monkeypatch
) -> None:
    monkeypatch.setenv(TRANSPORT_KEY_VARIABLE, "a key that both ends share")
    address = f"tcp://{host}:{unused_tcp_port}"
    arguments = ["--env.id", "letters-env", "--env.address", address, "--output-dir", str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": str(environments_dir), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([COMMAND, *arguments], env=variables)
    (environment,) = load_environments(
        [EnvConfig(id="letters-env", address=address)], LogConfig(vf_level="warning")
    ).values()
    pool = InferencePool(ClientConfig(base_url=[policy_server.url]), "letters")
    policy_server.version = 1
    try:
        await environment.connect()
        args = train_sampling_args(SamplingConfig(), 1.0)
        rollouts = await environment.run_group(ExampleRef("letters-env", 1), 2, pool.servers[0], args, 1)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
        await environment.close()
        await pool.close()
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    assert bytes(rollouts[0].trace.calls[0].completion_ids) == b"olleh\x03"
    assert (tmp_path / "logs" / "train" / "letters-env.log").is_file()


def test_a_server_does_not_stay_without_the_orchestrator_that_started_it(environments_dir: Path) -> None:
    config = EnvServerConfig(env=EnvConfig(id="letters-env"))
    variables = {**os.environ, "PYTHONPATH": str(environments_dir)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [COMMAND, "--socket", str(theirs.fileno())]
        process = subprocess.Popen(argv, env=variables, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.sendall(encode({"id": 0, "args": config.model_dump(mode="json")}))
        assert receive_now(ours)["id"] == 0
    assert process.wait() == 0


def test_an_environment_that_does_not_import_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["env-server", "--env.id", "no-such-env"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "environment 'no-such-env' does not import: No module named 'no_such_env'" in line


def test_a_server_on_the_network_needs_a_key_that_both_ends_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environments_dir: Path, tmp_path: Path
) -> None:
    monkeypatch.delenv(TRANSPORT_KEY_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(environments_dir)
    arguments = ["--env.id", "letters-env", "--env.address", "tcp://0.0.0.0:5000", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["env-server", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "env.address: 0.0.0.0 is another machine, or an address that other machines reach: set PRIME_RL_" in line

"""Nodes with addresses of their own: namespaces without a loopback interface, and a store between machines."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from prime_rl.run.paths import STORE_VARIABLE
from prime_rl.trainer.process.store import open_store

HEAD = """
import sys
from pathlib import Path
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch.commands import SFT
from prime_rl.launch.nodes.channels import PipeChannel, agent_argv
from prime_rl.launch.run import launch
from prime_rl.watch.screens import sft_screen

class Namespaces:
    names = sys.argv[3:]
    def channels(self):
        return [PipeChannel(name, ("ip", "netns", "exec", name, *agent_argv())) for name in self.names]
    def address(self, name):
        return None

config = SFTConfig.model_validate({
    "model": {"name": sys.argv[1], "attn": "sdpa"},
    "data": {"type": "fake", "input_ids": "random", "seq_len": 32, "batch_size": 2},
    "max_steps": 2, "output_dir": sys.argv[2], "device": "cpu", "slurm": {},
    "deployment": {"type": "multi_node", "num_nodes": 2, "gpus_per_node": 1},
})
raise SystemExit(launch(SFT, config, sft_screen, cluster=Namespaces()))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, joined by a cable. Their loopback interfaces are down."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip: apt-get install iproute2")
    first, second = (f"prime{os.getpid()}{side}" for side in "ab")
    try:
        ip("netns", "add", first)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces need root and CAP_SYS_ADMIN: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", second)
        cable = (f"p{os.getpid()}a", f"p{os.getpid()}b")
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for number, (name, end) in enumerate(zip((first, second), cable, strict=True), start=1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        yield first, second
    finally:
        for name in (first, second):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.timeout(300)
def test_two_nodes_train_over_their_own_addresses_without_a_loopback_interface(
    namespaces: tuple[str, str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    head = [sys.executable, "-c", HEAD, str(tiny_model_dir), str(out), *namespaces]
    done = subprocess.run(head, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(10.77.0.1): trainer rank 0; CPU" in done.stdout
    assert "(10.77.0.2): trainer rank 1; CPU" in done.stdout
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "loss/mean" in step] == [0, 1]


def test_a_store_between_machines_listens_on_its_address_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {STORE_VARIABLE: f"tcp://127.0.0.1:{port}"}
    first = open_store({**environ, "RANK": "0"}, 2, timedelta(seconds=60))
    second = open_store({**environ, "RANK": "1"}, 2, timedelta(seconds=60))
    assert first is not None
    assert second is not None
    first.set("word", "met")
    assert second.get("word") == b"met"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))

"""Nodes with addresses of their own: namespaces without a loopback interface, and a store between machines."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from prime_rl.launch import LocalHost
from prime_rl.launch.caches import PRELOAD_VARIABLE, installed_tcmalloc
from prime_rl.launch.nodes.cluster import ClusterHost, PipeChannel, agent_argv
from prime_rl.launch.nodes.placing import cluster_placement
from prime_rl.launch.placement import ResourceRequest
from prime_rl.launch.programs import Programs
from prime_rl.run.paths import STORE_VARIABLE
from prime_rl.trainer.process.world import open_store
from prime_rl.utils.errors import DeviceError

HEAD = """
import sys
from pathlib import Path
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch.commands import SFT
from prime_rl.launch.nodes.cluster import PipeChannel, agent_argv
from prime_rl.launch.run import launch
from prime_rl.watch.screens import sft_screen

class Namespaces:
    names = sys.argv[3:5]
    def channels(self):
        return [PipeChannel(name, ("ip", "netns", "exec", name, *agent_argv())) for name in self.names]
    def address(self, name):
        return None

# Each end of the cable has a name of its own.
interfaces = ",".join(sys.argv[5:])
config = SFTConfig.model_validate({
    "model": {"name": sys.argv[1], "attn": "sdpa"},
    "data": {"type": "fake", "input_ids": "random", "seq_len": 32, "batch_size": 2},
    "max_steps": 2, "output_dir": sys.argv[2], "device": "cpu", "slurm": {},
    "deployment": {"type": "multi_node", "num_nodes": 2, "gpus_per_node": 1, "network_interface": interfaces},
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


def test_two_nodes_train_over_their_own_addresses_without_a_loopback_interface(
    namespaces: tuple[str, str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    head = [
        sys.executable,
        "-c",
        HEAD,
        str(tiny_model_dir),
        str(out),
        *namespaces,
        f"p{os.getpid()}a",
        f"p{os.getpid()}b",
    ]
    done = subprocess.run(head, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(10.77.0.1): trainer rank 0; CPU" in done.stdout
    assert "(10.77.0.2): trainer rank 1; CPU" in done.stdout
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "loss/mean" in step] == [0, 1]


class Two:
    """Two nodes on this machine."""

    names = ("n0", "n1")

    def channels(self) -> list[PipeChannel]:
        return [PipeChannel(name, agent_argv(), {**os.environ, "SLURMD_NODENAME": name}) for name in self.names]

    def address(self, name: str) -> None:
        return None


def test_an_interface_that_nodes_do_not_have_is_refused_with_the_names_of_theirs(
    local: LocalHost, tmp_path: Path
) -> None:
    demand, programs = ResourceRequest("cpu", train=1, train_nodes=2), Programs("python", "inference", "orchestrator")
    cases = {
        "deployment.network_interface = loo": (replace(demand, interface="loo"), {"GLOO_SOCKET_IFNAME": "lo"}),
        "GLOO_SOCKET_IFNAME=loo": (demand, {"GLOO_SOCKET_IFNAME": "loo"}),
    }
    store = tmp_path / "control" / "store"
    with ClusterHost(local, Two().channels()) as host:
        for words, (asked, env) in cases.items():
            with pytest.raises(DeviceError) as refused, cluster_placement(host, Two(), asked, env, store, programs):
                pass
            fault = str(refused.value)
            assert fault.startswith(f"{words}: no such network interface with an IPv4 address on every node: n0 has lo")
            assert fault.endswith("; use lo")
        asked = replace(demand, interface="eth77,lo")
        with cluster_placement(host, Two(), asked, {}, store, programs) as site:
            assert [(each.interface, each.address) for each in site.each] == [("lo", "127.0.0.1")] * 2


def test_a_node_gets_tcmalloc_unless_something_is_preloaded_there(local: LocalHost, tmp_path: Path) -> None:
    if (library := installed_tcmalloc()) is None:
        pytest.skip("tcmalloc is not installed (Debian and Ubuntu: libtcmalloc-minimal4)")
    env = {name: value for name, value in os.environ.items() if name != PRELOAD_VARIABLE}
    agents = [
        PipeChannel(name, agent_argv(), {**env, "SLURMD_NODENAME": name, **preloads})
        for name, preloads in (("n0", {}), ("n1", {PRELOAD_VARIABLE: ""}))
    ]
    demand, programs = ResourceRequest("cpu", train=1, train_nodes=2), Programs("python", "inference", "orchestrator")
    with (
        ClusterHost(local, agents) as host,
        cluster_placement(host, Two(), demand, env, tmp_path / "control" / "store", programs) as site,
    ):
        assert [each.allocator.get(PRELOAD_VARIABLE) for each in site.each] == [library, None]


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


LATER_RANK = """
import os
from datetime import timedelta
from prime_rl.trainer.process.world import open_store
print("asks", flush=True)
print(open_store(os.environ, 2, timedelta(minutes=10)).get("word").decode())
"""


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_rank_waits_for_a_first_one_whose_node_is_slow(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {STORE_VARIABLE: f"tcp://127.0.0.1:{port}" if kind == "tcp" else str(tmp_path / "control" / "store")}
    argv = [sys.executable, "-c", LATER_RANK]
    env = os.environ | environ | {"RANK": "1"}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as later:
        assert later.stdout is not None
        assert later.stdout.readline() == "asks\n"
        first = open_store({**environ, "RANK": "0"}, 2, timedelta(minutes=10))
        assert first is not None
        first.set("word", "met")
        assert later.stdout.read() == "met\n"

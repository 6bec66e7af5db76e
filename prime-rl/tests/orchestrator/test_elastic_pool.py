"""Servers that come and go under one DNS name. They listen on 127.0.0.2, 127.0.0.3 and so on, at one port."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.responses import JSONResponse

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.rollouts.evaluation import EvalGroup, run_eval_groups
from prime_rl.orchestrator.rollouts.rollout import ExampleRef
from prime_rl.orchestrator.servers.discovery import LookupFault, SystemResolver
from prime_rl.orchestrator.servers.elastic import ElasticPool, inference_pool
from prime_rl.run.ledger import check_ledger
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.transport.batches import FileSystemBatchReceiver
from prime_rl.utils.files import replacing_directory
from prime_rl.utils.pydantic_config import ConfigError, load_config

ADAPTER = "r16-a32.0"


class Names:
    """A resolver whose answer the test decides."""

    def __init__(self) -> None:
        self.now: set[str] = set()
        self.fault: LookupFault | None = None

    async def addresses(self, hostname: str) -> frozenset[str]:
        if self.fault is not None:
            raise self.fault
        return frozenset(self.now)


class Fleet:
    """Fake servers at one port, and the pool that finds them."""

    def __init__(self, serve: Callable[..., Any], kind: type) -> None:
        self.serve, self.kind, self.names, self.port = serve, kind, Names(), 0
        self.changed = asyncio.Condition()

    def start(self, number: int, server: Any = None) -> Any:
        """Start a server at 127.0.0.<number>. The name does not resolve to it yet."""
        started = self.serve(server or self.kind(), f"127.0.0.{number}", self.port)
        self.port = urlsplit(started.url).port
        return started

    def name(self, *numbers: int) -> None:
        self.names.now = {f"127.0.0.{number}" for number in numbers}

    @asynccontextmanager
    async def pool(self, adapter: str | None = None, **config: Any) -> AsyncIterator[ElasticPool]:
        elastic = {"hostname": "inference", "port": self.port, "sync_interval": 0.01, **config.pop("elastic", {})}
        pool = inference_pool(ClientConfig(elastic=elastic, **config), "letters", adapter, self.names)
        assert isinstance(pool, ElasticPool)
        pool.sleep = self._pause
        try:
            yield pool
        finally:
            await pool.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _pause(self, seconds: float) -> None:
        """Instead of a pause, let the test look."""
        async with self.changed:
            self.changed.notify_all()
        await asyncio.sleep(0)


@pytest.fixture
def fleet(serve: Callable[..., Any], policy_server: Any) -> Fleet:
    return Fleet(serve, type(policy_server))


def urls(pool: ElasticPool) -> list[str]:
    return sorted(server.root_url for server in pool.serving)


@pytest.mark.parametrize("adapter", [None, ADAPTER])
async def test_a_newcomer_holds_the_current_weights_before_it_gets_work(fleet, adapter, tmp_path) -> None:
    fleet.start(2)
    fleet.name(2)
    async with fleet.pool(adapter) as pool:
        assert await pool.wait_ready(use_token_client=True) == 0
        await pool.update_weights(tmp_path / "step_3")
        newcomer = fleet.start(3)
        fleet.name(2, 3)
        await fleet.until(lambda: len(pool.serving) == 2)
        assert newcomer.loaded == [str(tmp_path / "step_3")]
        assert (newcomer.version, newcomer.adapters) == ((3, {}) if adapter is None else (0, {ADAPTER: 3}))
        server = pool.least_loaded()
        assert {each.model for each in pool.serving} == {adapter or "letters"}
        assert server.takes_tokens
        assert {request["messages"][0]["content"] for request in newcomer.requests} == {"Hello"}, "probes"
        assert pool.take_metrics() == {
            "elastic/num_servers": 2,
            "elastic/num_ready_servers": 2,
            "elastic/joined": 2,
            "elastic/left": 0,
        }


async def test_weights_that_another_run_left_on_a_newcomer_are_replaced(fleet) -> None:
    server = fleet.start(2, fleet.kind(version=7))
    fleet.name(2)
    async with fleet.pool() as pool:
        assert await pool.wait_ready(use_token_client=False) == 0
    assert (server.version, server.loaded) == (0, [None])


async def test_a_newcomer_that_is_slower_than_the_updates_joins_with_the_newest(fleet, tmp_path) -> None:
    loading, may_load = threading.Event(), threading.Event()

    class Slow(fleet.kind):
        async def _update_weights(self, request):
            loading.set()
            await asyncio.to_thread(may_load.wait)
            return await super()._update_weights(request)

    fleet.start(2)
    fleet.name(2)
    async with fleet.pool() as pool:
        await pool.wait_ready(use_token_client=False)
        await pool.update_weights(tmp_path / "step_1")
        newcomer = fleet.start(3, Slow())
        fleet.name(2, 3)
        await asyncio.to_thread(loading.wait)
        await pool.update_weights(tmp_path / "step_2")
        assert len(pool.serving) == 1
        may_load.set()
        await fleet.until(lambda: len(pool.serving) == 2)
        assert newcomer.loaded == [str(tmp_path / "step_1"), str(tmp_path / "step_2")]


async def test_a_newcomer_with_another_model_is_refused_by_name_and_said_once(fleet, caplog) -> None:
    class Numbers(fleet.kind):
        async def _models(self, request):
            return JSONResponse({"data": [{"id": "numbers"}]})

    caplog.set_level(logging.INFO, "prime_rl")
    other = fleet.start(3, Numbers())
    fleet.start(2)
    fleet.name(3)
    async with fleet.pool() as pool:
        waiting = asyncio.create_task(pool.wait_ready(use_token_client=False))
        await fleet.until(lambda: bool(pool.reasons))
        assert pool.missing() == (
            f"'inference' resolves to 1 address, none is ready: {other.url} does not serve 'letters' but 'numbers': "
            "correct model.name, or set client.skip_model_check"
        )
        fleet.name(2, 3)
        await waiting
        assert urls(pool) == [f"http://127.0.0.2:{fleet.port}"]
    assert (other.requests, other.loaded) == ([], [])
    assert sum("does not serve 'letters' but 'numbers'" in record.message for record in caplog.records) == 1


async def test_a_server_that_loads_other_weights_than_it_was_told_is_refused(fleet, tmp_path) -> None:
    class Liar(fleet.kind):
        async def _update_weights(self, request):
            return JSONResponse({"status": "ok"})

    fleet.start(2)
    fleet.name(2)
    async with fleet.pool() as pool:
        await pool.wait_ready(use_token_client=False)
        await pool.update_weights(tmp_path / "step_4")
        fleet.start(3, Liar())
        fleet.name(2, 3)
        await fleet.until(lambda: bool(pool.reasons))
        (reason,) = pool.reasons.values()
        assert reason == f"http://127.0.0.3:{fleet.port} holds policy version 0 after it loaded 4"


async def test_a_server_leaves_with_its_address_and_comes_back_with_new_weights(fleet, tmp_path) -> None:
    first, second = fleet.start(2), fleet.start(3)
    fleet.name(2, 3)
    async with fleet.pool() as pool:
        lost: list[str] = []
        pool.on_lost.append(lambda server: lost.append(server.root_url))
        await pool.wait_ready(use_token_client=False)
        await fleet.until(lambda: len(pool.serving) == 2)
        fleet.name(2)
        await fleet.until(lambda: len(pool.servers) == 1)
        assert (lost, urls(pool)) == ([second.url.removesuffix("/v1")], [first.url.removesuffix("/v1")])
        await pool.update_weights(tmp_path / "step_5")
        fleet.name(2, 3)
        await fleet.until(lambda: len(pool.serving) == 2)
        assert (first.version, second.version) == (5, 5)
        metrics = pool.take_metrics()
        assert (metrics["elastic/joined"], metrics["elastic/left"]) == (3, 1)


async def test_a_server_that_fails_its_health_check_leaves_though_it_has_an_address(fleet) -> None:
    server = fleet.start(2)
    fleet.name(2)
    async with fleet.pool() as pool:
        await pool.wait_ready(use_token_client=False)
        server.ready = False
        await fleet.until(lambda: not pool.serving)
        assert pool.least_loaded() is None
        await fleet.until(lambda: bool(pool.reasons))
        assert pool.missing().endswith(f"none is ready: http://127.0.0.2:{fleet.port} is not healthy")
        server.ready = True
        await pool.wait_for_server()
        assert len(pool.serving) == 1


async def test_a_failed_lookup_keeps_the_servers_and_an_empty_answer_does_not(fleet) -> None:
    fleet.start(2)
    fleet.name(2)
    async with fleet.pool(elastic={"empty_timeout": 1}) as pool:
        await pool.wait_ready(use_token_client=False)
        fleet.names.fault = LookupFault("'inference' cannot be looked up: try again")
        looks = 0

        def looked() -> bool:
            nonlocal looks
            looks += 1
            return looks > 5

        await fleet.until(looked)
        assert len(pool.serving) == 1
        fleet.names.fault = None
        fleet.name()
        (supervision,) = pool.watchers()
        with pytest.raises(InferenceFault) as caught:
            await supervision
        line = str(caught.value)
        assert line.startswith("waited for an inference server at inference since ")
        assert "(limit: client.elastic.empty_timeout = 1 s): start one with `inference --model.name letters" in line
        assert line.endswith("; 'inference' resolves to no address")


async def test_an_evaluation_is_done_elsewhere_when_its_server_is_lost(fleet) -> None:
    fleet.start(2)
    fleet.start(3)
    fleet.name(2)
    started: list[str] = []

    class Environment:
        async def evaluate(self, example, size, server, *args, **kwargs):
            started.append(server.root_url)
            if len(started) == 1:
                fleet.name(3)
                await asyncio.Event().wait()
            return [rollout_of(example)]

    def rollout_of(example):
        return type("Rollout", (), {"error": None, "error_detail": None, "example": example})()

    async with fleet.pool() as pool:
        await pool.wait_ready(use_token_client=False)
        attempts = [EvalGroup(Environment(), ExampleRef("letters", row), {}) for row in range(3)]
        outcomes = await run_eval_groups(attempts, pool, 0, max_concurrent=1)
    assert [outcome.example.row for outcome in outcomes] == [0, 1, 2]
    assert [outcome.failed for outcome in outcomes] == [0, 0, 0]
    assert [urlsplit(url).hostname for url in started] == ["127.0.0.2", *["127.0.0.3"] * 3]


class Churn:
    """Changes the fleet during a run: each new request may be the event that a server was waiting for."""

    def __init__(self, fleet: Fleet, run: OrchestratorPaths) -> None:
        self.fleet, self.run, self.requests = fleet, run, 0
        self.lock = threading.Lock()
        self.servers: dict[int, Any] = {}

    def start(self, number: int) -> None:
        churn = self

        class Watched(self.fleet.kind):
            async def _chat(self, request):
                await asyncio.to_thread(churn.note_request)
                return await super()._chat(request)

        self.servers[number] = self.fleet.start(number, Watched())

    def note_request(self) -> None:
        with self.lock:
            self.requests += 1
            event = {12: self.crash, 30: self.publish, 40: self.replace, 60: self.empty}.get(self.requests)
            if event is not None:
                event()

    def crash(self) -> None:
        """Server 3 is gone with its requests, and its address stays."""
        threading.Thread(target=self.servers[3].close).start()

    def publish(self) -> None:
        with replacing_directory(self.run.broadcast(1)):
            pass
        (self.run.broadcast(1) / "STABLE").touch()

    def replace(self) -> None:
        """A new server comes, and the first one's address goes while it works on requests."""
        self.start(4)
        self.fleet.name(3, 4)

    def empty(self) -> None:
        """Nothing is left for a while: a new server comes later."""
        self.fleet.name()
        threading.Thread(target=self._refill).start()

    def _refill(self) -> None:
        self.start(5)
        self.fleet.name(5)


@pytest.mark.usefixtures("importable_environments")
def test_no_rollout_is_lost_while_servers_come_crash_and_go(orchestrate, fleet, monkeypatch, tmp_path) -> None:
    resolve = socket.getaddrinfo

    def answer(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "inference.test":
            return resolve(host, port, *args, **kwargs)
        if not fleet.names.now:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in sorted(fleet.names.now)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    run = OrchestratorPaths(tmp_path / "run_default")
    churn = Churn(fleet, run)
    churn.start(2)
    churn.start(3)
    fleet.name(2, 3)
    elastic = {"hostname": "inference.test", "port": fleet.port, "sync_interval": 0.02}
    code, log = orchestrate(
        client={"elastic": elastic}, max_steps=12, batch_size=8, max_inflight_rollouts=16, max_async_level=12
    )
    assert code == 0, log
    assert churn.requests > 60
    account, faults = check_ledger(run)
    assert faults == []
    assert (account.num_trained, len(account.skipped), len(account.twice), dict(account.dropped)) == (48, 0, 0, {})
    receiver = FileSystemBatchReceiver(run)
    batches = [receiver.receive(step) for step in range(12)]
    assert [len(batch.examples) for batch in batches] == [8] * 12
    for number in (4, 5):
        server = churn.servers[number]
        versions = [json.loads(each)["choices"][0]["weight_versions"][0]["version"] for each in server.answers]
        assert server.loaded == [str(run.broadcast(1))]
        asked = [request["messages"][0]["content"] for request in server.requests]
        assert [version for text, version in zip(asked, versions, strict=False) if text != "Hello"].count(0) == 0
    assert "no longer resolves to http://127.0.0.2" in log
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["elastic/joined"] for row in metrics) >= 4
    assert {row["elastic/num_servers"] for row in metrics} <= {0, 1, 2}


@pytest.mark.parametrize(
    ("found", "addresses"),
    [
        ([(socket.AF_INET, "10.0.0.1"), (socket.AF_INET, "10.0.0.2")], {"10.0.0.1", "10.0.0.2"}),
        ([(socket.AF_INET, "10.0.0.1"), (socket.AF_INET6, "fd00::1")], {"10.0.0.1"}),
        ([(socket.AF_INET6, "fd00::1")], {"fd00::1"}),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), set()),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), None),
    ],
)
async def test_a_pod_counts_once_and_a_name_server_that_fails_is_no_answer(found, addresses, monkeypatch) -> None:
    def answer(*args: Any, **kwargs: Any) -> Any:
        if isinstance(found, Exception):
            raise found
        return [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for family, address in found]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    if addresses is None:
        with pytest.raises(LookupFault, match="'inference' cannot be looked up: try again"):
            await SystemResolver().addresses("inference")
    else:
        assert await SystemResolver().addresses("inference") == addresses


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            {"client": {"elastic": {"hostname": "a"}}, "weight_broadcast": {"type": "nccl"}, "max_async_level": 1},
            "client.elastic needs weight_broadcast.type = 'filesystem': an NCCL group cannot change its members",
        ),
        (
            {"client": {"elastic": {"hostname": "http://a:8000"}}},
            "client.elastic.hostname: is not a host name: write it without scheme and port",
        ),
    ],
)
def test_settings_that_cannot_work_are_one_line(settings: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(OrchestratorConfig, overrides={"output_dir": tmp_path, "env": [{"id": "a"}], **settings})
    (line,) = caught.value.faults
    assert fault in line

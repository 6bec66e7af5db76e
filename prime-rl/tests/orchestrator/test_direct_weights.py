"""The servers join the trainer's weight group together, receive its weights, and fail together."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.orchestrator import NCCLWeightBroadcastConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.servers.policy import DirectWeights
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.run.paths import OrchestratorPaths

CONFIG = NCCLWeightBroadcastConfig(host="trainer", port=29501, timeout=7)


@pytest.fixture
def run(tmp_path: Path) -> OrchestratorPaths:
    return OrchestratorPaths(tmp_path)


def pool_of(*servers) -> InferencePool:
    return InferencePool(ClientConfig(base_url=[server.url for server in servers]), "letters")


async def test_each_server_joins_with_its_rank(serve, policy_server, run) -> None:
    other = serve(type(policy_server)())
    pool = pool_of(policy_server, other)
    await DirectWeights.connect(CONFIG, pool, run)
    assert policy_server.joins + other.joins == [
        {"host": "trainer", "port": 29501, "server_rank": rank, "num_inference_server": 2, "timeout": 7}
        for rank in (0, 1)
    ]
    await pool.close()


async def test_a_server_that_cannot_join_says_why(policy_server, run) -> None:
    pool = pool_of(policy_server)
    with pytest.raises(InferenceFault, match=r"did not join the trainer's weight group: .*the trainer did not come"):
        await DirectWeights.connect(CONFIG.model_copy(update={"port": 1}), pool, run)
    await pool.close()


async def test_an_update_asks_the_trainer_to_send_the_version(policy_server, run) -> None:
    pool = pool_of(policy_server)
    await DirectWeights.connect(CONFIG, pool, run)
    run.broadcast(2).mkdir(parents=True)
    await pool.update_weights(run.broadcast(2))
    assert run.broadcast_ready(2).exists()
    assert policy_server.version == 2
    await pool.close()


async def test_the_base_model_is_not_requested_from_the_trainer(policy_server, run) -> None:
    pool = pool_of(policy_server)
    await DirectWeights.connect(CONFIG, pool, run)
    await pool.update_weights(None)
    assert policy_server.loaded == [None]
    assert not run.broadcasts.exists()
    await pool.close()


async def test_a_group_cannot_lose_a_server(serve, policy_server, run) -> None:
    other = serve(type(policy_server)())
    pool = pool_of(policy_server, other)
    await DirectWeights.connect(CONFIG, pool, run)
    run.broadcast(1).mkdir(parents=True)
    other.close()
    with pytest.raises(InferenceFault, match="did not load the weights"):
        await pool.update_weights(run.broadcast(1))
    await pool.close()


async def test_close_tells_the_trainer_that_no_more_versions_are_needed(policy_server, run) -> None:
    pool = pool_of(policy_server)
    (await DirectWeights.connect(CONFIG, pool, run)).close()
    assert run.broadcasts_closed.exists()
    await pool.close()

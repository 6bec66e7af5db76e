"""The gauges of each process are listed in the documentation."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from prime_rl.configs.shared import MetricsServerConfig
from prime_rl.launch.placement import reserved_ports
from prime_rl.monitors.prometheus import ORCHESTRATOR, TRAINER, Gauges, MetricsServer

PAGE = Path(__file__).parents[3] / "docs" / "monitors.md"


@pytest.mark.parametrize("gauges", [TRAINER, ORCHESTRATOR], ids=["trainer", "orchestrator"])
def test_every_gauge_is_documented(gauges: Gauges) -> None:
    listed = set(re.findall(r"`([a-z_]+)`", PAGE.read_text(encoding="utf-8")))
    assert {*gauges.metrics, *gauges.steps, *gauges.ones, *gauges.of_run, *gauges.states_of_run} <= listed


def test_the_orchestrators_gauges_need_the_key_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_METRICS_KEY", "secret")
    with reserved_ports(1) as (port,):
        server = MetricsServer(MetricsServerConfig(port=port), gauges=ORCHESTRATOR)
    url = f"http://127.0.0.1:{port}/metrics"
    server.log({"reward/mean": 0.25, "batch/async_level": 1, "time/step": 2.0}, step=4)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url)
    request = urllib.request.Request(url, headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request) as answer:
        lines = answer.read().decode().splitlines()
    server.close()
    assert {"orchestrator_step 4.0", "orchestrator_reward 0.25", "orchestrator_step_seconds 2.0"} <= set(lines)
    assert not any(line.startswith("trainer_") for line in lines)

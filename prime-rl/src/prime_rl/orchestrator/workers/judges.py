"""The judges of a run: started before its environments load, watched while it runs."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from prime_rl.configs.rollouts.judges import JudgeConfig, judge_process_name
from prime_rl.environments.judging.gateway import JudgeGateway, offered
from prime_rl.environments.judging.judge import JudgeCache, JudgeLost, JudgeServer
from prime_rl.orchestrator.errors import JudgeFault
from prime_rl.run.paths import RunPaths
from prime_rl.run.process import own_beats
from prime_rl.utils.engine_keys import JUDGE_SERVER_KEY_VARIABLE, JUDGE_SERVERS_VARIABLE, named_key
from prime_rl.utils.logger import get_logger


class RunJudges:
    """What the judges of a run can be asked."""

    def __init__(self, gateway: JudgeGateway | None) -> None:
        """`gateway` is None in a run without judges."""
        self._gateway = gateway
        self._is_warm = gateway is None

    def say_wait(self) -> None:
        """Report that the process waits for a judge, if it does."""
        if self._gateway is not None and not self._is_warm:
            own_beats().say(f"waiting for an answer of each judge: {', '.join(self._gateway.judges)}")

    async def warm(self) -> None:
        """Wait until every judge has answered once. Raises JudgeFault."""
        if self._gateway is None:
            return
        get_logger().info(f"Waiting until each judge answers: {', '.join(self._gateway.judges)}")
        try:
            await self._gateway.warm()
            self._is_warm = True
        except JudgeLost as error:
            raise JudgeFault(str(error)) from error

    async def watch(self) -> None:
        """Wait until cancelled, or until a judge is lost. Raises JudgeFault."""
        if self._gateway is None:
            await asyncio.Event().wait()
            return
        try:
            await asyncio.shield(asyncio.wrap_future(self._gateway.lost))
        except JudgeLost as error:
            raise JudgeFault(str(error)) from error

    def conclude(self) -> None:
        """Call it after the last rollout. Raises JudgeFault if a judge was lost meanwhile."""
        lost = None if self._gateway is None or not self._gateway.lost.done() else self._gateway.lost.exception()
        if lost is not None:
            raise JudgeFault(str(lost)) from lost

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the time since the last call."""
        return {} if self._gateway is None else self._gateway.take_metrics()

    def log_totals(self) -> None:
        for name, judge in () if self._gateway is None else self._gateway.judges.items():
            shown = judge.total.describe(judge.config.prompt_price, judge.config.completion_price)
            get_logger().info(f"Judge {name!r} ({judge.config.model}): {shown}")


@contextmanager
def run_judges(configs: Mapping[str, JudgeConfig], run: RunPaths) -> Iterator[RunJudges]:
    """Let environments that load in the block, here and in other processes, ask the judges.

    Raises:
        JudgeFault: nothing has started a judge that has no `base_url`, or its cache cannot be used.
    """
    if not configs:
        yield RunJudges(None)
        return
    servers = _servers(configs)
    with ExitStack() as closing:
        try:
            caches = {
                name: JudgeCache(run.judge_cache(name, config.cache_dir)) if config.cache else None
                for name, config in configs.items()
            }
        except JudgeLost as error:
            raise JudgeFault(str(error)) from error
        gateway = closing.enter_context(
            JudgeGateway(
                {name: (servers[name], config, caches[name]) for name, config in configs.items()},
                lambda name: own_beats().calling(judge_process_name(name)),
            )
        )
        urls = {name: gateway.base_url(name) for name in configs}
        closing.enter_context(offered(configs, urls, gateway.key))
        judges = RunJudges(gateway)
        closing.callback(judges.log_totals)
        yield judges


def _servers(configs: Mapping[str, JudgeConfig]) -> dict[str, JudgeServer]:
    started = json.loads(os.environ.get(JUDGE_SERVERS_VARIABLE) or "{}")
    # Environments, whose processes inherit the variables of this one, ask the gateway and need neither.
    our_key = os.environ.pop(JUDGE_SERVER_KEY_VARIABLE, None)
    servers = {}
    for name, config in configs.items():
        if config.base_url is not None:
            key = named_key(config.api_key_var, os.environ)
            servers[name] = JudgeServer(name, config.base_url, key, config.api_key_var)
        elif name in started:
            servers[name] = JudgeServer(name, started[name], our_key, JUDGE_SERVER_KEY_VARIABLE)
        else:
            raise JudgeFault(
                f"judge.{name}: no server was started for it: set judge.{name}.base_url, or start the run with `rl` or "
                "`eval`"
            )
    return servers

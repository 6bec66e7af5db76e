"""Runs the evaluation of one group of candidates: an inference server, and the process that asks it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.launchers.shared_node import shared_node
from medarc_rl.lm_eval.plan import LmEvalPaths, LmEvalPlan
from prime_rl.checks import start_faults
from prime_rl.configs.inference import InferenceConfig
from prime_rl.launch import LocalHost, ProcessSpec, Supervisor
from prime_rl.launch.logs import Follower, polled
from prime_rl.launch.placement import Placement, ResourceRequest, claimed_placement
from prime_rl.launch.plan import inference_url, plan_server
from prime_rl.launch.spec import Outcome
from prime_rl.run.directory import files_readable_by, write_configs
from prime_rl.run.lock import run_lock
from prime_rl.run.paths import RunPaths
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE
from prime_rl.utils.errors import CannotStart, DeviceError, RunDirError
from prime_rl.utils.gpus import MASK_VARIABLE

EVALUATOR = "lm_eval"
WORKER = "medarc_rl.lm_eval.worker"


@dataclass(frozen=True, slots=True)
class Engine:
    """How a group's model is served."""

    device: Literal["auto", "cuda", "cpu"]
    backend: Literal["auto", "vllm", "embedded"]
    max_model_len: int | None
    adapter_rank: int | None
    """None serves no adapters."""

    def config(self, model: str) -> InferenceConfig:
        return InferenceConfig.model_validate(
            {
                "model": {"name": model, "max_model_len": self.max_model_len},
                "device": self.device,
                "backend": self.backend,
                "enable_lora": self.adapter_rank is not None,
                "max_lora_rank": self.adapter_rank,
            }
        )


def run_group(plan: LmEvalPlan, engine: Engine, screen: TextIO) -> int:
    """Evaluate a group and return the exit code; progress goes to `screen`.

    Raises:
        UsageError: the evaluation cannot start.
        MedarcError: the server failed.
    """
    config, paths = engine.config(plan.served), plan.paths
    if faults := start_faults(config):
        raise UsageError(*faults)
    try:
        with (
            files_readable_by("owner"),
            run_lock(paths.root) as lock,
            LocalHost(held_by_guard=(lock,)) as host,
            claimed_placement(
                ResourceRequest(config.device, infer=1), shared_node(os.environ), os.environ, host.directory
            ) as site,
        ):
            _prepare(plan, config, site)
            with _shown(paths.progress, screen):
                processes = _processes(plan, config, site)
                stopping = "stopping; results of finished tasks are kept"
                outcome = Supervisor(processes, host, partial(_say, screen), stopping=stopping).run()
    except (DeviceError, RunDirError) as error:
        raise UsageError(str(error)) from error
    except CannotStart as error:
        raise MedarcError(str(error)) from error
    return _exit_code(outcome, paths)


def _prepare(plan: LmEvalPlan, config: InferenceConfig, site: Placement) -> None:
    paths = plan.paths
    for file in (paths.faults, paths.tasks_found):
        file.unlink(missing_ok=True)
    for folder in (paths.faults.parent, paths.progress.parent):
        folder.mkdir(parents=True, exist_ok=True)
    write_configs(RunPaths(paths.root), {"inference": config})
    paths.plan.write_text(replace(plan, url=inference_url(site)).to_json(), encoding="utf-8")


def _processes(plan: LmEvalPlan, config: InferenceConfig, site: Placement) -> tuple[ProcessSpec, ...]:
    paths, run = plan.paths, RunPaths(plan.paths.root)
    server = plan_server("medarc_train lm-eval", config, run, site, waits_for=paths.tasks_found)
    # lm-eval itself computes nothing with a model; datasets and tokenizers print bars of their own.
    env = {**site.bytecode, MASK_VARIABLE: "", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    evaluator = ProcessSpec(
        EVALUATOR,
        (site.programs.python, "-m", WORKER, str(paths.plan)),
        paths.log,
        {"PYTHONUNBUFFERED": "1", **env},
        secrets={ENGINE_KEY_VARIABLE: site.engine_key},
        completes_run=True,
        completion=run.completion(EVALUATOR),
    )
    return server, evaluator


def _exit_code(outcome: Outcome, paths: LmEvalPaths) -> int:
    """0 or 1 if the evaluation came to its end, 128 + n after signal n.

    Raises:
        UsageError: the tasks cannot be used.
        MedarcError: a process failed.
    """
    if paths.faults.is_file():
        raise UsageError(*json.loads(paths.faults.read_text(encoding="utf-8")))
    if outcome.succeeded or outcome.was_stopped:
        return outcome.exit_code
    if RunPaths(paths.root).completion(EVALUATOR).exists():
        return 1
    raise MedarcError(*outcome.report().splitlines())


@contextlib.contextmanager
def _shown(log: Path, screen: TextIO) -> Iterator[None]:
    follower = Follower.at_end(log)

    def look() -> None:
        for line in follower.lines():
            _say(screen, line)

    with polled(look, name="evaluation"):
        yield


def _say(screen: TextIO, line: str) -> None:
    screen.write(f"{line}\n")
    screen.flush()


def screen_for(as_json: bool) -> TextIO:
    """Where progress goes: not between the results, if a program reads them."""
    return sys.stderr if as_json else sys.stdout

"""Everything that can stop a run at its start and needs neither a model nor a GPU: one line for each fault."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.checks.model_files import model_fault, tokenizer_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.model import ModelConfig, TokenizerConfig
from prime_rl.configs.surface.root import RootConfig

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig


def start_faults(config: RootConfig, job_dir: Path | None = None) -> list[str]:
    """One line for each file, package or program that the config names and that is not there.

    `job_dir` is the project directory of a batch job that will run the config; None means that it runs here.
    """
    start = StartDir() if job_dir is None else StartDir.of_job(job_dir)
    # One fault may show in several sections.
    return list(dict.fromkeys(_FAULTS[config.component](config, start))) if config.component in _FAULTS else []


def refuse_unstartable(config: RootConfig) -> None:
    """Print those lines and exit with status 2, if there are any."""
    faults = start_faults(config)
    for fault in faults:
        sys.stderr.write(f"error: {fault}\n")
    if faults:
        raise SystemExit(2)


def _sft_faults(config: SFTConfig, start: StartDir) -> Iterator[str]:
    # `sft` loads none of RL's configs, nor `rl` those of SFT.
    from prime_rl.checks.data_files import data_faults

    yield from _trained_model_faults(config.model, config.tokenizer, start)
    yield from data_faults(config, start)


def _rl_faults(config: RLConfig, start: StartDir) -> Iterator[str]:
    trained = config.trainer.model
    served = {} if config.inference is None else {"inference.model.name": config.inference.model.name}
    key = "model.name" if list(served.values()) == [trained.name] else "trainer.model.name"
    yield from _model_faults({key: trained.name}, start, needs_weights=not trained.debug.random_init)
    yield from tokenizer_faults(config.trainer.tokenizer, trained, start)
    if key == "trainer.model.name":
        yield from _model_faults(served, start)


def _eval_faults(config: OfflineEvalConfig, start: StartDir) -> Iterator[str]:
    if config.inference is not None:
        yield from _model_faults({"model.name": config.inference.model.name}, start)


def _inference_faults(config: InferenceConfig, start: StartDir) -> Iterator[str]:
    yield from _model_faults({"model.name": config.model.name}, start)


_FAULTS: Mapping[str, Callable[[Any, StartDir], Iterator[str]]] = {
    "sft": _sft_faults,
    "rl": _rl_faults,
    "eval": _eval_faults,
    "inference": _inference_faults,
}
"""By `component`, which also names the class of the config."""


def _trained_model_faults(model: ModelConfig, tokenizer: TokenizerConfig, start: StartDir) -> Iterator[str]:
    yield from _model_faults({"model.name": model.name}, start, needs_weights=not model.debug.random_init)
    yield from tokenizer_faults(tokenizer, model, start)


def _model_faults(names: Mapping[str, str], start: StartDir, needs_weights: bool = True) -> Iterator[str]:
    for key, name in names.items():
        if (fault := model_fault(name, start, needs_weights)) is not None:
            yield f"{key} = {name}: {fault}"

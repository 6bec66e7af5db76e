"""Checks that the models and datasets of a run are there: in a folder, complete in the hub's cache, or on the hub."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from medarc_rl.checks import Row, failed, ok
from medarc_rl.external import NoAnswer, ask
from prime_rl.checks.data_files import find_parts
from prime_rl.checks.disk import snapshot_in_cache
from prime_rl.checks.model_files import model_fault
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig, SFTDataConfig

HUB_LIMIT_S = 30.0
"""Seconds for one question to the hub, the start of a Python process included."""
LOOKUP = "medarc_rl.checks.lookup"


@dataclass(frozen=True, slots=True)
class HubAccess:
    """The job's access to the hub."""

    start: StartDir
    cache: Path
    """The job's cache of repositories."""
    offline: bool
    env: Mapping[str, str]
    """The job's environment, with its token."""
    usual_cache: Path | None = None
    """The cache of this user's other commands."""

    def model_row(self, name: str, needs_weights: bool) -> Row:
        folder = self.folder(name)
        if folder is not None and model_fault(str(folder), StartDir(), needs_weights) is None:
            return ok("model", f"{name}: {'complete in the cache' if self.is_remote(name) else 'folder'}")
        if not self.is_remote(name):
            return failed("model", f"{name}: {model_fault(name, self.start, needs_weights)}")
        return self._remote_row("model", name, "not complete in" if folder is not None else "not in")

    def dataset_row(self, name: str) -> Row:
        if self._dataset_is_cached(name):
            return ok("dataset", f"{name}: in the cache {self.cache}")
        return self._remote_row("dataset", name, "not in")

    def folder(self, name: str) -> Path | None:
        """The folder of a model on this machine: its own, or one in the cache."""
        folder = self.start.find(name) if not self.is_remote(name) else snapshot_in_cache(name, self.cache)
        return folder if folder is not None and folder.is_dir() else None

    def is_remote(self, name: str) -> bool:
        return not self.start.find(name).is_dir()

    def _dataset_is_cached(self, name: str) -> bool:
        snapshot = snapshot_in_cache(name, self.cache, "datasets")
        prepared = self.cache.parent / "datasets" / name.replace("/", "___")
        return any(path is not None and path.is_dir() and any(path.iterdir()) for path in (snapshot, prepared))

    def _remote_row(self, kind: str, name: str, state: str) -> Row:
        missing = f"{name}: {state} the cache {self.cache}{self._elsewhere(kind, name)}"
        if self.offline:
            return failed(kind, f"{missing}, and --hf-hub-offline forbids to download it")
        env = {**self.env, "HF_HUB_OFFLINE": "0", "PYTHONUNBUFFERED": "1"}
        try:
            answer = ask([sys.executable, "-m", LOOKUP, kind, name], HUB_LIMIT_S, env)
        except NoAnswer:
            return failed(kind, f"{missing}, and the hub did not answer within {HUB_LIMIT_S:g} s")
        if answer.code != 0:
            return failed(kind, f"{missing}, and {answer.last_line}")
        found = json.loads(answer.stdout)
        return ok(kind, f"{name}: on the hub, {found['files']} files to download; the node needs the network, too")

    def _elsewhere(self, kind: str, name: str) -> str:
        """Names the option that finds a repository which other commands have downloaded."""
        usual = self.usual_cache
        if usual is None or usual.name != "hub" or usual == self.cache:
            return ""
        found = snapshot_in_cache(name, usual, f"{kind}s")
        is_there = found is not None and found.is_dir()
        return f" (it is in another one: --hf-cache-dir {shlex.quote(str(usual.parent))})" if is_there else ""


def hub_rows(config: SFTConfig | RLConfig, access: HubAccess) -> Iterator[Row]:
    """One row for each model, tokenizer and dataset that the config names."""
    for name, needs_weights in _models(config).items():
        yield access.model_row(name, needs_weights)
    for name in _remote_datasets(config, access.start):
        yield access.dataset_row(name)


def trained_model(config: SFTConfig | RLConfig) -> str:
    """The model that is trained: a folder or a hub id."""
    return (config.trainer if isinstance(config, RLConfig) else config).model.name


def _models(config: SFTConfig | RLConfig) -> dict[str, bool]:
    """Each name, and whether its weights are needed."""
    trainer = config.trainer if isinstance(config, RLConfig) else config
    served = config.inference.model.name if isinstance(config, RLConfig) and config.inference is not None else None
    tokenizer = trainer.tokenizer.name
    names = {} if tokenizer is None else {tokenizer: False}
    names |= {trainer.model.name: not trainer.model.debug.random_init}
    return names if served is None else names | {served: True}


def _remote_datasets(config: SFTConfig | RLConfig, start: StartDir) -> list[str]:
    if isinstance(config, RLConfig):
        return []  # environments load theirs
    sections = [config.data] + ([] if config.val is None else [config.val.data])
    parts = [part for data in sections if isinstance(data, SFTDataConfig) for part in find_parts(data, start)]
    return list(dict.fromkeys(part.name for part in parts if not part.files))

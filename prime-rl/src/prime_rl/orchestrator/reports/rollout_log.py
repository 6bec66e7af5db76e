"""Keeps rollouts on disk: some of each step, and all of evaluations."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rollouts.keeping import KeepRolloutsConfig
from prime_rl.orchestrator.batches.batch import Batch
from prime_rl.orchestrator.reports.records import RecordEncoder, record, token_fields
from prime_rl.orchestrator.reports.selection import choose_groups
from prime_rl.orchestrator.reports.thinning import thin_out
from prime_rl.orchestrator.rollouts.attempts import Outcome
from prime_rl.orchestrator.rollouts.rollout import Group, Rollout
from prime_rl.orchestrator.rollouts.token_texts import TokenTexts, read_tokenizer
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.utils.errors import one_line
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger

ALL = "all"
"""Reason to keep a rollout when all are kept."""
_SIZES_EVERY = 16
"""Files between two looks at the size of all files. In between, the files that this process writes are added up."""
_LEVEL = 1
"""A higher one takes three times as long, and saves 7%: log-probabilities are nearly random."""


class RolloutLog:
    """Writes one file of compressed JSON lines per batch and evaluation.

    A thread does it: 5 ms of processor time for 32 rollouts of 100 tokens, 60 ms for 32 of 2,000. The step itself waits
    for 0.2 ms, in which it chooses and marks rollouts.
    """

    weights: Mapping[str, Mapping[str, float]]
    """Weight of each reward function, by environment."""

    def __init__(self, paths: OrchestratorPaths, keep: KeepRolloutsConfig | None, keep_all: bool, model: str) -> None:
        """`model` is the directory or hub id of the tokenizer."""
        self.paths = paths
        self.weights = {}
        self.enabled = keep_all or keep is not None
        self._bounds = None if keep_all else keep
        self._encoder = RecordEncoder(self._bounds)
        self._texts = self._find_texts(model) if self.enabled else None
        self._bytes = 0
        self._looks = itertools.count()
        self._thread = ThreadPoolExecutor(1, "rollout-log")

    @classmethod
    def from_config(cls, config: OrchestratorConfig, weights: Mapping[str, Mapping[str, float]]) -> RolloutLog:
        log = cls(OrchestratorPaths(config.output_dir), config.keep_rollouts, config.save_rollouts, config.model.name)
        log.weights = weights
        return log

    def choose(self, batch: Batch, step: int) -> Mapping[int, list[str]]:
        """Reasons to keep a group of the batch, by its index. The batch's samples of these groups are marked."""
        if not self.enabled:
            return {}
        if self._bounds is None:
            chosen = {index: [ALL] for index in range(len(batch.groups))}
        else:
            chosen = choose_groups(batch.groups, self._bounds.per_step, step)
        places = ((index, number) for index, group in enumerate(batch.groups) for number in range(len(group.rollouts)))
        for (index, number), (_, samples) in zip(places, batch.samples, strict=True):
            if index in chosen:
                for line, sample in enumerate(samples):
                    sample.kept_as = [index, number, line]
        return chosen

    def write_batch(self, step: int, groups: Sequence[Group], chosen: Mapping[int, list[str]]) -> None:
        """Write the groups that `choose` returned, in the background."""
        if self.enabled:
            self._submit(self.paths.step_samples(step), self._batch_records(step, groups, chosen))

    def write_evaluation(self, version: int, outcomes: Sequence[Outcome]) -> None:
        """Write one line per rollout, in the background. A failed rollout has an error and a null reward."""
        if self.enabled:
            records = (each for outcome in outcomes for each in self._evaluation_records(version, outcome))
            self._submit(self.paths.eval_samples(version), records)

    def wait(self) -> None:
        """Wait until everything so far is written."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Wait until everything is written, and end the thread."""
        self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _batch_records(
        self, step: int, groups: Sequence[Group], chosen: Mapping[int, list[str]]
    ) -> Iterator[dict[str, Any]]:
        in_batch = sum(len(group.rollouts) for group in groups)
        for index, reasons in chosen.items():
            for number, rollout in enumerate(groups[index].rollouts):
                place = {"step": step, "group": index, "rollout": number, "kept": reasons, "in_batch": in_batch}
                lag = step - rollout.version
                yield self._record(rollout, **place, lag=lag, off_policy_level=groups[index].off_policy_level)

    def _evaluation_records(self, version: int, outcome: Outcome) -> list[dict[str, Any]]:
        place = {"eval_version": version, "kept": [ALL]}
        example = outcome.example
        failure = {"env": example.env, "row": example.row, **place, "reward": None, "error": outcome.reason}
        return [self._record(each, **place) for each in outcome.rollouts] + [failure] * outcome.failed

    def _record(self, rollout: Rollout, /, **more: Any) -> dict[str, Any]:
        max_tokens = None if self._bounds is None else self._bounds.max_tokens
        more["weights"] = self.weights.get(rollout.example.env)
        return record(rollout, **more) | token_fields(rollout, max_tokens, self._texts)

    def _submit(self, path: Path, records: Iterable[dict[str, Any]]) -> None:
        self._thread.submit(self._try, path, records)

    def _try(self, path: Path, records: Iterable[dict[str, Any]]) -> None:
        # A run without kept rollouts is better than no run. If the disk is full, its checkpoints will say so.
        try:
            self._write(path, records)
        except Exception as error:  # noqa: BLE001 - the texts are the environment's, and may be anything
            get_logger().warning(
                f"The rollouts of {path} were not kept: {one_line(f'{type(error).__name__}: {error}')}"
            )

    def _write(self, path: Path, records: Iterable[dict[str, Any]]) -> None:
        content = gzip.compress(self._encoder.lines(records), _LEVEL, mtime=0)
        with replacing_file(path) as scratch:
            scratch.write_bytes(content)
        self._bytes += len(content)
        self._bound_size()

    def _bound_size(self) -> None:
        if self._bounds is None:
            return
        max_bytes = self._bounds.max_total_mib << 20
        if self._bytes > max_bytes or next(self._looks) % _SIZES_EVERY == 0:
            self._bytes = thin_out(self.paths.samples, max_bytes)

    def _find_texts(self, model: str) -> TokenTexts | None:
        tokenizer = read_tokenizer(model)
        if tokenizer is None:
            get_logger().info(f"Kept rollouts have no text for each token: {model!r} has no tokenizer.json here")
            return None
        return TokenTexts(tokenizer)

"""Reads the kept rollouts of a run: `RUN/samples`, and the results of `eval`. Needs no torch.

for rollout in KeptRollouts(RunPaths(out)).of_step(20):
    print(rollout.reward, rollout.completion)
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from prime_rl.history.kept_rollout import Json, KeptRollout
from prime_rl.run.paths import EvalPaths, RunPaths, SamplesFile
from prime_rl.utils.logger import count_of

MAX_LINE_BYTES = 256 * 2**20
"""A longer line is damage, and would fill the memory."""
_UNREADABLE = (OSError, EOFError, zlib.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which rollouts to return. The default is all."""

    env: str | None = None
    min_reward: float | None = None
    """Rollouts without a reward never have it."""
    max_reward: float | None = None
    truncated: bool = False
    """Only those that reached a limit on tokens."""
    errors: bool = False
    """Only those that ended with an error, or whose reward functions failed."""
    search: str | None = None
    """Only those whose messages contain this text. Ignores case."""

    def accepts(self, rollout: KeptRollout) -> bool:
        reward = rollout.reward
        return (
            (self.env is None or rollout.env == self.env)
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
            and (not self.truncated or rollout.is_truncated)
            and (not self.errors or rollout.error is not None)
            and (self.search is None or rollout.contains(self.search))
        )


EVERY = RolloutFilter()


class KeptRollouts:
    """The kept rollouts of a run, read one at a time.

    A damaged file is never an error: what can be read of it is returned, and a line in `faults` says the rest. A file
    that the run replaces or deletes meanwhile is skipped.
    """

    def __init__(self, paths: RunPaths) -> None:
        self.samples = paths.orchestrator.samples
        self.results = EvalPaths(paths.root).results
        self._faults: dict[str, None] = {}

    @property
    def faults(self) -> list[str]:
        """What could not be read so far: one line for each damaged file."""
        return list(self._faults)

    def steps(self) -> list[int]:
        """Steps of which rollouts are kept, ascending."""
        return sorted({file.number for file in self._files() if file.kind == "step" and file.data_rank is None})

    def evaluations(self) -> list[int]:
        """Policy versions of which evaluation rollouts are kept, ascending. Those of `eval` are steps of weights."""
        kept = {file.number for file in self._files() if file.kind == "eval"}
        return sorted(kept.union(rollout.eval_version or 0 for rollout in self._of_results(None)))

    def of_step(self, step: int, wanted: RolloutFilter = EVERY) -> Iterator[KeptRollout]:
        """The rollouts of a step, with the trainer's log-probabilities if it has trained on them."""
        return self._of_step(step, [file for file in self._files() if file.number == step], wanted)

    def _of_step(self, step: int, files: Sequence[SamplesFile], wanted: RolloutFilter) -> Iterator[KeptRollout]:
        """The same, from the files with the step's number."""
        scores: dict[tuple[Any, Any], dict[int, Json]] | None = None
        for file in _best("step", files):
            for record in self._records(file.path):
                scores = self._scores(files) if scores is None else scores
                of_lines = scores.get(_place(record), {})
                rollout = KeptRollout(step, None, record, of_lines)
                if wanted.accepts(rollout):
                    yield rollout

    def of_evaluation(self, version: int, wanted: RolloutFilter = EVERY) -> Iterator[KeptRollout]:
        """The rollouts of an evaluation during training, then those of `eval`."""
        files = [file for file in self._files() if file.number == version]
        for rollout in chain(self._of_kept_evaluation(version, files), self._of_results(version)):
            if wanted.accepts(rollout):
                yield rollout

    def all(self, wanted: RolloutFilter = EVERY) -> Iterator[KeptRollout]:
        """The rollouts of all steps, then those of all evaluations."""
        # Listed once: a listing for each step would take as long as there are steps, each time.
        files: dict[int, list[SamplesFile]] = {}
        for file in self._files():
            files.setdefault(file.number, []).append(file)
        for number in sorted(files):
            yield from self._of_step(number, files[number], wanted)
        for number in sorted(files):
            yield from filter(wanted.accepts, self._of_kept_evaluation(number, files[number]))
        yield from filter(wanted.accepts, self._of_results(None))

    def _of_kept_evaluation(self, version: int, files: Sequence[SamplesFile]) -> Iterator[KeptRollout]:
        for file in _best("eval", files):
            yield from (KeptRollout(None, version, record) for record in self._records(file.path))

    def _of_results(self, version: int | None) -> Iterator[KeptRollout]:
        if not self.results.is_file():
            return
        for record in self._records(self.results):
            step = record.get("step")
            if type(step) is int and version in (None, step):
                yield KeptRollout(None, step, record)

    def _files(self) -> list[SamplesFile]:
        try:
            return SamplesFile.all_in(self.samples)
        except OSError as error:
            self._note(self.samples, f"cannot be listed: {error.strerror or error}")
            return []

    def _scores(self, files: Sequence[SamplesFile]) -> dict[tuple[Any, Any], dict[int, Json]]:
        """The trainer's records of a step, by group and rollout, then by line of conversation."""
        found: dict[tuple[Any, Any], dict[int, Json]] = {}
        for file in files:
            if file.kind != "step" or file.data_rank is None:
                continue
            for record in self._records(file.path):
                place = record.get("kept_as")
                if isinstance(place, list) and len(place) == 3 and all(type(each) is int for each in place):
                    found.setdefault((place[0], place[1]), {})[place[2]] = record
        return found

    def _records(self, path: Path) -> Iterator[Json]:
        """The JSON objects in a file's lines."""
        whole = damaged = 0
        try:
            with closing(_lines(path)) as lines:
                for line in lines:
                    record = _object(line)
                    if record is not None:
                        whole += 1
                        yield record
                    elif path.suffix == ".gz" or line.endswith(b"\n"):  # the last line of results may be half written
                        damaged += 1
        except FileNotFoundError:
            return
        except _UNREADABLE as error:
            after = count_of("whole rollout", whole)
            self._note(path, f"is damaged after {after}: {' '.join(str(error).split())}")
        if damaged:
            self._note(path, f"has {count_of('damaged line', damaged)} and {count_of('whole rollout', whole)}")

    def _note(self, path: Path, fault: str) -> None:
        self._faults[f"{path} {fault}"] = None


def _best(kind: str, files: Sequence[SamplesFile]) -> list[SamplesFile]:
    """The file of the rollouts of one step or evaluation: a compressed one goes before one of an earlier release."""
    of_kind = [file for file in files if file.kind == kind and file.data_rank is None]
    return sorted(of_kind, key=lambda file: file.path.suffix != ".gz")[:1]


def _lines(path: Path) -> Generator[bytes]:
    """Raises OSError, EOFError or zlib.error where the file is damaged."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                raise OSError(f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
            if line.strip():
                yield line


def _object(line: bytes) -> Json | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _place(record: Json) -> tuple[Any, Any]:
    group, rollout = record.get("group"), record.get("rollout")
    return (group, rollout) if type(group) is int and type(rollout) is int else (None, None)

"""Keeps rollouts on disk: some of each step, and all of evaluations.

Chooses groups, writes their rollouts as compressed JSON lines in a thread, and deletes files when they get too large.
"""

from __future__ import annotations

import dataclasses
import gzip
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from prime_rl.configs.orchestrator import KeepRolloutsConfig, OrchestratorConfig
from prime_rl.orchestrator.batches.batch import Batch
from prime_rl.orchestrator.rollouts.evaluation import Outcome
from prime_rl.orchestrator.rollouts.rollout import Group, Rollout, to_samples
from prime_rl.orchestrator.rollouts.token_texts import TokenTexts, read_tokenizer
from prime_rl.orchestrator.rollouts.trace import ModelCall
from prime_rl.run.paths import OrchestratorPaths, RunPaths, SamplesFile
from prime_rl.run.pictures import PictureWriter
from prime_rl.storage.staging import StoredImages
from prime_rl.transport.messages import TrainingSample
from prime_rl.utils.errors import StartFault, one_line
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger

_NOT_JSON = (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError, msgspec.MsgspecError)
_DECIMALS = 5
RANDOM, WORST, BEST = "random", "worst", "best"
"""Reasons to keep a group. The groups chosen at random are an unbiased sample of the step's groups."""
FILL = 0.8
"""Files are deleted down to this fraction of the limit, so that not every step deletes some."""
ALL = "all"
"""Reason to keep a rollout when all are kept."""
_SIZES_EVERY = 16
"""Number of files between two looks at the size of all files. In between, sizes of written files are added up."""
_LEVEL = 1
"""Compression level. A higher one takes three times as long and saves 7%, as log-probabilities are nearly random."""


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
        self._pictures = PictureWriter(RunPaths.from_orchestrator_dir(paths.root).pictures, StoredImages())
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
        positions = (
            (index, number) for index, group in enumerate(batch.groups) for number in range(len(group.rollouts))
        )
        for (index, number), (_, samples) in zip(positions, batch.samples, strict=True):
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
                fields = {"step": step, "group": index, "rollout": number, "kept": reasons, "in_batch": in_batch}
                fields |= {"lag": step - rollout.version, "off_policy_level": groups[index].off_policy_level}
                yield self._record(rollout, **fields)

    def _evaluation_records(self, version: int, outcome: Outcome) -> list[dict[str, Any]]:
        fields = {"eval_version": version, "kept": [ALL]}
        example = outcome.example
        failure = {"env": example.env, "row": example.row, **fields, "reward": None, "error": outcome.reason}
        return [self._record(each, **fields) for each in outcome.rollouts] + [failure] * outcome.failed

    def _record(self, rollout: Rollout, /, **more: Any) -> dict[str, Any]:
        max_tokens = None if self._bounds is None else self._bounds.max_tokens
        more["weights"] = self.weights.get(rollout.example.env)
        more |= kept_messages(rollout, self._pictures)
        return record(rollout, **more) | token_fields(rollout, max_tokens, self._texts)

    def _submit(self, path: Path, records: Iterable[dict[str, Any]]) -> None:
        self._thread.submit(self._try, path, records)

    def _try(self, path: Path, records: Iterable[dict[str, Any]]) -> None:
        # A failure must not end the run. If the disk is full, saving a checkpoint reports it.
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
        try:
            tokenizer, why = read_tokenizer(model), f"{model!r} has no tokenizer.json here"
        except StartFault as fault:
            tokenizer, why = None, str(fault)
        if tokenizer is None:
            get_logger().info(f"Kept rollouts have no text for each token: {why}")
            return None
        return TokenTexts(tokenizer)


# Choice of the groups that are kept.


def choose_groups(groups: Sequence[Group], max_rollouts: int, step: int) -> dict[int, list[str]]:
    """Choose the groups to keep. Returns reasons by group index.

    One group at random in any case; then the worst and the best by mean reward, as far as `max_rollouts` allows; the
    rest at random. How many are chosen at random does not depend on rewards. A group may have several reasons.
    """
    if not groups:
        return {}
    room = max_rollouts // max(len(group.rollouts) for group in groups)
    extremes = min(2, max(0, room - 1))
    # A separate generator, so that keeping rollouts does not change which examples are drawn.
    generator = random.Random(f"kept rollouts of step {step}")
    reasons: dict[int, list[str]] = {
        index: [RANDOM] for index in generator.sample(range(len(groups)), min(len(groups), max(1, room - extremes)))
    }
    by_reward = sorted(range(len(groups)), key=lambda index: groups[index].mean_reward)
    for index, reason in ((by_reward[0], WORST), (by_reward[-1], BEST))[:extremes]:
        reasons.setdefault(index, []).append(reason)
    return dict(sorted(reasons.items()))


# A kept rollout as a JSON object.


def record(rollout: Rollout, /, **more: Any) -> dict[str, Any]:
    """A rollout without its tokens."""
    return {
        "env": rollout.example.env,
        "row": rollout.example.row,
        "prompt_id": rollout.prompt_id or None,
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        **more,
        **rollout.rendering,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "metrics": rollout.metrics,
        "policy_version": rollout.version,
        "temperature": rollout.temperature,
        "prompt_tokens": len(rollout.trace.calls[0].prompt) if rollout.trace else None,
        "completion_tokens": rollout.completion_tokens,
        "num_turns": rollout.num_turns,
        "is_truncated": rollout.is_truncated,
        "stop_condition": rollout.stop_condition,
        "masked_by": rollout.masked_by,
        "generation_ms": rollout.generation_ms,
        "scoring_ms": rollout.scoring_ms,
        "error": rollout.error_detail or rollout.error,
        "reward_errors": rollout.reward_errors or None,
    }


def kept_messages(rollout: Rollout, pictures: PictureWriter) -> dict[str, Any]:
    """The messages of a rollout as they are kept: without the content of images, whose pictures are written."""
    shown = {image.source: image for call in rollout.trace.calls for image in call.images}
    return {name: pictures.kept(getattr(rollout, name), shown) for name in ("prompt", "completion")}


def token_fields(rollout: Rollout, max_tokens: int | None, texts: TokenTexts | None) -> dict[str, Any]:
    """Model calls, and the tokens of each line of conversation, which are those that are trained on."""
    # Untrained rollouts have empty masks; here the mask says which tokens the model sampled.
    lines = to_samples(dataclasses.replace(rollout, error=None, masked_by=None))
    length = sum(len(line.prompt_ids) + len(line.completion_ids) for line in lines)
    left = length if max_tokens is None else min(length, max_tokens)
    cut = length - left
    sequences = []
    for line in lines:
        sequences.append(_sequence(line, left))
        left -= len(sequences[-1]["prompt_ids"]) + len(sequences[-1]["completion_ids"])
    ids: set[int] = set()
    for each in sequences:
        ids.update(each["prompt_ids"], each["completion_ids"])
    return {
        "is_trained": rollout.trains,
        "calls": [_call(call) for call in rollout.trace.calls],
        "versions": {str(version): n for version, n in rollout.trace.trainable_by_version(rollout.version).items()},
        "sequences": sequences,
        "token_texts": None if texts is None else texts.of(ids),
        "cut_tokens": cut,
    }


def _sequence(line: TrainingSample, left: int) -> dict[str, Any]:
    """At most `left` tokens of a sample: the first of the completion, then the last of the prompt."""
    end = min(left, len(line.completion_ids))
    start = max(0, len(line.prompt_ids) - (left - end))
    return {
        "prompt_ids": line.prompt_ids[start:],
        "prompt_start": start,
        "completion_ids": line.completion_ids[:end],
        "sampled": _runs(line.completion_mask[:end]),
        "engine_logprobs": np.round(np.asarray(line.inference_logprobs[:end], np.float64), _DECIMALS).tolist(),
    }


def _runs(mask: Sequence[bool]) -> list[list[int]]:
    """Start and end of each run of true entries."""
    edges: list[int] = np.flatnonzero(np.diff(np.asarray(mask, np.int8), prepend=0, append=0)).tolist()
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def _call(call: ModelCall) -> dict[str, Any]:
    details = call.details
    return {
        "prompt_tokens": len(call.prompt),
        "completion_tokens": len(call.completion_ids),
        "versions": [[span.start, span.end, span.version] for span in details.weight_versions],
        "finish_reason": details.finish_reason,
        "started_s": details.started_s,
        "ended_s": details.ended_s,
    }


class RecordEncoder:
    """Encodes records as lines of JSON, with messages of at most `max_chars` characters."""

    def __init__(self, config: KeepRolloutsConfig | None) -> None:
        self.max_chars = None if config is None else config.max_chars
        # Messages may contain the environment's own objects.
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)

    def lines(self, records: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(self._line(each) + b"\n" for each in records)

    def _line(self, values: dict[str, Any]) -> bytes:
        """One line of JSON. A value that JSON cannot hold is replaced by the name of its type."""
        try:
            return self._bounded(values, self._encoder.encode(values))
        except _NOT_JSON:
            kept = {key: self._kept(value) for key, value in values.items()}
            return self._bounded(kept, self._encoder.encode(kept))

    def _kept(self, value: Any) -> Any:
        try:
            self._encoder.encode(value)
        except _NOT_JSON:
            return f"<{type(value).__name__}>"
        return value

    def _bounded(self, values: dict[str, Any], line: bytes) -> bytes:
        """The line, or one with shorter messages. `line` has at least as many bytes as the messages have characters."""
        if self.max_chars is None or len(line) <= self.max_chars:
            return line
        texts = ("prompt", "completion", "error", "reward_errors")
        plain = {key: msgspec.json.decode(self._encoder.encode(values.get(key))) for key in texts}
        lengths = [len(text) for text in _texts(plain)]
        if sum(lengths) <= self.max_chars:
            return line
        longest = longest_text(lengths, self.max_chars)
        bounded = _map_texts(plain, lambda text: shortened(text, longest))
        cut = sum(max(0, length - longest) for length in lengths)
        return self._encoder.encode({**values, **bounded, "cut_chars": cut})


def longest_text(lengths: Sequence[int], total: int) -> int:
    """The length to cut longer texts to, so that all of them have about `total` characters."""
    left = len(lengths)
    for length in sorted(lengths):
        if length * left > total:
            return total // left
        total -= length
        left -= 1
    return max(lengths, default=0)


def shortened(text: str, limit: int) -> str:
    """A text whose middle is replaced by a note of how much is missing, if it is longer than the limit."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 3, limit // 3
    return f"{text[:head]}\n[… {len(text) - head - tail:,} characters cut …]\n{text[len(text) - tail :]}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(each, change) for each in value]
    if isinstance(value, dict):
        return {key: _map_texts(each, change) for key, each in value.items()}
    return value


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if dump else str(value)


# The size of all files.


def thin_out(samples: Path, max_bytes: int) -> int:
    """Delete steps, then evaluations, until the files fit; returns the size of what is left, in bytes.

    The first and the newest of each kind stay. The others are deleted where they are densest, so that steps of the
    whole run remain.
    """
    files = SamplesFile.all_in(samples)
    sizes: dict[tuple[str, int], int] = {}
    for file in files:
        sizes[file.kind, file.number] = sizes.get((file.kind, file.number), 0) + file.path.stat().st_size
    total = sum(sizes.values())
    if total <= max_bytes:
        return total
    excess = total - int(FILL * max_bytes)
    deleted: set[tuple[str, int]] = set()
    for kind in ("step", "eval"):
        of_kind = {number: size for (each, number), size in sizes.items() if each == kind}
        for number in densest(of_kind, excess):
            deleted.add((kind, number))
            excess -= of_kind[number]
    for file in files:
        if (file.kind, file.number) in deleted:
            file.path.unlink()
    left = total - sum(sizes[each] for each in deleted)
    evaluations = sum(kind == "eval" for kind, _ in deleted)
    get_logger().warning(
        f"Kept rollouts take {total / 2**20:.1f} MiB, more than keep_rollouts.max_total_mib = {max_bytes >> 20}: "
        f"deleted those of {len(deleted) - evaluations} steps and {evaluations} evaluations, spread over the run; "
        f"{left / 2**20:.1f} MiB are left"
    )
    return left


def densest(sizes: Mapping[int, int], excess: int) -> list[int]:
    """Numbers to delete, so that `excess` bytes are freed if possible, never the first and the last.

    Each is the one whose neighbours are closest together.
    """
    numbers = sorted(sizes)
    before = {right: left for left, right in pairwise(numbers)}
    after = dict(pairwise(numbers))
    heap = [(after[number] - before[number], number) for number in numbers[1:-1]]
    heapq.heapify(heap)
    chosen: list[int] = []
    while excess > 0 and heap:
        gap, number = heapq.heappop(heap)
        left, right = before[number], after[number]
        if gap != right - left:  # a neighbour has been deleted since
            heapq.heappush(heap, (right - left, number))
            continue
        chosen.append(number)
        excess -= sizes[number]
        after[left], before[right] = right, left
    return chosen

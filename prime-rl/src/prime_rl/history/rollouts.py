"""Reads the kept rollouts of a run: `RUN/samples`, and the results of `eval`. Needs no torch.

    for rollout in KeptRollouts(RunPaths(out)).of_step(20):
        print(rollout.reward, rollout.completion)

A value of the wrong type reads as if it were absent: another version may have written the file.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from prime_rl.run.paths import EvalPaths, RunPaths, SamplesFile
from prime_rl.run.pictures import read_picture
from prime_rl.utils.images import is_data_url, is_image, source_of
from prime_rl.utils.logger import count_of

# One kept rollout.


Json = Mapping[str, Any]
RANDOM, ALL = "random", "all"


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a rollout. Log-probabilities are at the temperature of sampling."""

    id: int
    text: str | None
    """None if the run had no tokenizer to decode it. If tokens share a character, the first has it, the others ''."""
    engine_logprob: float | None = None
    """Under the policy that sampled it. None for tokens that the model did not sample."""
    trainer_logprob: float | None = None
    """Under the trainer's policy when it trained on the token. None if it did not, or has not yet."""
    entropy: float | None = None
    """Entropy of the trainer's distribution, in nats."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The tokens of one line of conversation, as they are trained on. Most rollouts have one line."""

    prompt: list[Token]
    completion: list[Token]
    """Tokens that were sampled, and those that the environment wrote between turns."""


@dataclass(frozen=True)
class KeptRollout:
    """One kept rollout of a step or an evaluation."""

    step: int | None
    """None if it belongs to an evaluation."""
    eval_version: int | None
    """Policy version of the evaluation; None if it belongs to a training step."""
    fields: Json = field(repr=False)
    """The record as it is in the file."""
    trainer: Mapping[int, Json] = field(default_factory=dict, repr=False)
    """The trainer's records, by line of conversation."""

    @property
    def env(self) -> str:
        return self._text("env") or "?"

    @property
    def row(self) -> int | None:
        """Row of the environment's dataset. `eval` calls it `example`."""
        return self._whole("row") if "row" in self.fields else self._whole("example")

    @property
    def group(self) -> int | None:
        return self._whole("group")

    @property
    def rollout(self) -> int | None:
        """Its number in its group, or among those of its row in an evaluation."""
        return self._whole("rollout")

    @property
    def kept(self) -> tuple[str, ...]:
        """Why it is kept: `random`, `worst`, `best` or `all`."""
        reasons = self.fields.get("kept")
        return tuple(each for each in reasons if isinstance(each, str)) if isinstance(reasons, list) else (ALL,)

    @property
    def is_unbiased(self) -> bool:
        """Whether statistics over the rollouts of its step may count it."""
        return RANDOM in self.kept or ALL in self.kept

    @property
    def in_batch(self) -> int | None:
        """Number of rollouts in the batch that it was kept from."""
        return self._whole("in_batch")

    @property
    def reward(self) -> float | None:
        return _float(self.fields.get("reward"))

    @property
    def advantage(self) -> float | None:
        return _float(self.fields.get("advantage"))

    @property
    def metrics(self) -> dict[str, float]:
        """Values of the reward functions and other metrics of the environment."""
        values = self.fields.get("metrics")
        found = {name: _float(value) for name, value in values.items()} if isinstance(values, dict) else {}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward function of the environment."""
        values = self.fields.get("weights")
        found = {name: _float(value) for name, value in values.items()} if isinstance(values, dict) else {}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def policy_version(self) -> int | None:
        """Oldest version that sampled any of its tokens."""
        return self._whole("policy_version")

    @property
    def versions(self) -> dict[int, int]:
        """Number of tokens that each policy version sampled."""
        values = self.fields.get("versions")
        pairs = values.items() if isinstance(values, dict) else ()
        return {int(version): n for version, n in pairs if version.isdecimal() and type(n) is int}

    @property
    def lag(self) -> int | None:
        """Steps from the oldest version that sampled it to the step that trains on it."""
        return self._whole("lag")

    @property
    def stop_condition(self) -> str | None:
        return self._text("stop_condition")

    @property
    def is_truncated(self) -> bool:
        return bool(self.fields.get("is_truncated"))

    @property
    def masked_by(self) -> str | None:
        """The filter that excluded it from training."""
        return self._text("masked_by")

    @property
    def error(self) -> str | None:
        """The error that ended it, or else the tracebacks of reward functions that failed."""
        failed = self.fields.get("reward_errors")
        traces = failed.items() if isinstance(failed, dict) else ()
        return self._text("error") or "; ".join(f"reward function {name}: {trace}" for name, trace in traces) or None

    @property
    def completion_tokens(self) -> int | None:
        return self._whole("completion_tokens")

    @property
    def prompt(self) -> list[Json]:
        """Messages."""
        return _messages(self.fields.get("prompt"))

    @property
    def completion(self) -> list[Json]:
        """Messages: answers, tool calls and tool results."""
        return _messages(self.fields.get("completion"))

    @property
    def cut_chars(self) -> int:
        """Characters of messages that were not kept."""
        return self._whole("cut_chars") or 0

    @property
    def cut_tokens(self) -> int:
        """Tokens whose ids and log-probabilities were not kept."""
        return self._whole("cut_tokens") or 0

    @property
    def images(self) -> list[str]:
        """SHA-256 of each image of its messages that has one, once each."""
        return list(dict.fromkeys(name for each in (*self.prompt, *self.completion) for name in image_digests(each)))

    def contains(self, text: str) -> bool:
        """Whether a message, an error or the stop condition contains `text`. Ignores case."""
        wanted = text.casefold()
        texts = (*_strings(self.prompt), *_strings(self.completion), self.error or "", self.stop_condition or "")
        return any(wanted in each.casefold() for each in texts)

    @cached_property
    def conversations(self) -> list[Conversation]:
        """The tokens of each line of conversation. Empty if the file has none."""
        lines = self.fields.get("sequences")
        lines = lines if isinstance(lines, list) else []
        return [self._conversation(index, line) for index, line in enumerate(lines) if isinstance(line, dict)]

    def _conversation(self, index: int, line: Json) -> Conversation:
        prompt, completion = _token_ids(line.get("prompt_ids")), _token_ids(line.get("completion_ids"))
        ids = [*prompt, *completion]
        texts = token_texts(ids, self.fields.get("token_texts"))
        # The engine's values belong to the completion, the trainer's to the whole sequence.
        logprobs = _list(line.get("engine_logprobs"))
        sampled = (place for place in _positions(line.get("sampled"), len(logprobs)))
        engine = {len(prompt) + place: _float(logprobs[place]) for place in sampled}
        scores = self.trainer.get(index, {})
        start = line.get("prompt_start")
        start = start if type(start) is int and start > 0 else 0  # of a long prompt, only the last tokens are kept
        scored = [place - start for place in _positions(scores.get("scored"), start + len(ids))]
        trainer = dict(zip(scored, map(_float, _list(scores.get("logprobs"))), strict=False))
        entropy = dict(zip(scored, map(_float, _list(scores.get("entropy"))), strict=False))
        tokens = [
            Token(token, texts[place], engine.get(place), trainer.get(place), entropy.get(place))
            for place, token in enumerate(ids)
        ]
        return Conversation(tokens[: len(prompt)], tokens[len(prompt) :])

    def _whole(self, name: str) -> int | None:
        value = self.fields.get(name)
        return value if type(value) is int else None

    def _text(self, name: str) -> str | None:
        value = self.fields.get(name)
        return value if isinstance(value, str) and value else None


def as_json(rollout: KeptRollout) -> dict[str, Any]:
    """The record, with the trainer's values joined to it."""
    trainer = [rollout.trainer[line] for line in sorted(rollout.trainer)]
    place = {"step": rollout.step, "eval_version": rollout.eval_version}
    return {**place, **rollout.fields, **({"trainer": trainer} if trainer else {})}


def token_texts(ids: Sequence[int], table: object) -> list[str | None]:
    """The text of each token, from a table by id in which a part of a character is a list of bytes."""
    if not isinstance(table, dict):
        return [None] * len(ids)
    texts: list[str | None] = []
    index = 0
    while index < len(ids):
        entry = table.get(str(ids[index]))
        if not isinstance(entry, list):
            texts.append(entry if isinstance(entry, str) else None)
            index += 1
            continue
        run = index
        content = b""
        while run < len(ids) and isinstance(part := table.get(str(ids[run])), list):
            content += bytes(byte for byte in part if type(byte) is int and 0 <= byte < 256)
            run += 1
            if _is_text(content):
                break
        texts += [content.decode(errors="replace"), *[""] * (run - index - 1)]
        index = run
    return texts


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def image_digests(message: Json) -> list[str]:
    """SHA-256 of each image of a message that has one, in order."""
    found = (part.get("sha256") for part in _list(message.get("content")) if is_image(part))
    return [digest for digest in found if isinstance(digest, str)]


def content_text(content: object) -> str:
    """The text of a message's content: itself, or that of its parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(map(_part_text, content))
    return json.dumps(content, ensure_ascii=False, default=str)


def _part_text(part: object) -> str:
    if is_image(part):
        return image_words(part)
    text = part.get("text", f"[{part.get('type', '?')}]") if hasattr(part, "get") else part
    return text if isinstance(text, str) else "[no text]"


def image_words(part: Any) -> str:
    """What stands for an image in a text: `[image 7.png 512x512, sha256 ab12cd34]`."""
    source, digest = source_of(part), part.get("sha256")
    held = f" ({len(source):,} characters of data)" if is_data_url(source) else ""  # of an earlier version
    name = f" {Path(source).name[:_NAME_CHARS]}" if isinstance(source, str) and not held else ""
    width, height = part.get("width"), part.get("height")
    size = f" {width}x{height}" if type(width) is int and type(height) is int else ""
    content = f", sha256 {digest[:_SHOWN_DIGITS]}" if isinstance(digest, str) else ""
    fault = part.get("fault")
    return f"[image{name}{held}{size}{content}{f': {fault}' if isinstance(fault, str) else ''}]"


_NAME_CHARS = 80
_SHOWN_DIGITS = 12


def _messages(value: object) -> list[Json]:
    """A plain text, as completion environments have it, is one message."""
    if isinstance(value, str):
        return [{"role": "text", "content": value}] if value else []
    return [each if isinstance(each, dict) else {"role": "?", "content": str(each)} for each in _list(value)]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        # Arguments of tool calls are JSON in a string.
        if value.startswith("{") and "\\" in value:
            yield from _strings(_decoded(value))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _token_ids(value: object) -> list[int]:
    return [token if type(token) is int else -1 for token in _list(value)]


def _positions(runs: object, end: int) -> list[int]:
    """The positions in a list of [start, end) runs."""
    pairs: Iterable[Any] = (run for run in _list(runs) if isinstance(run, list) and len(run) == 2)
    bounds = ((a, b) for a, b in pairs if type(a) is int and type(b) is int)
    return [place for a, b in bounds for place in range(max(a, 0), min(b, end))]


def _float(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None


MAX_LINE_BYTES = 256 * 2**20
"""A longer line is damage, and would fill the memory."""
_UNREADABLE = (OSError, EOFError, zlib.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Selection of rollouts. The default is all."""

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
        self._pictures = paths.pictures
        self._faults: dict[str, None] = {}

    @property
    def faults(self) -> list[str]:
        """Damaged files that were found so far, one line each."""
        return list(self._faults)

    def picture(self, digest: str) -> str | None:
        """A small picture of an image, as a data URL; None if the run has kept none."""
        return read_picture(self._pictures, digest)

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

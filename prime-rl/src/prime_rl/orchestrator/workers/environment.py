"""One environment as the rest of the orchestrator sees it, wherever its code runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, overload

from prime_rl.monitors.trace import own_trace
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.reports.sessions import record_rollouts
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Recorded, Rollout, check_trainable, read_rollout
from prime_rl.orchestrator.scheduling.buffer import fingerprint
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.workers.blocked import BlockedLoops, Report
from prime_rl.orchestrator.workers.failures import Failures, refuse_failed
from prime_rl.utils.conversations import NO_IMAGES, first_row_with_image, has_image
from prime_rl.utils.images import ImageFault, ImageLimits, check_sources

PROMPT_ID_LENGTH = 16
"""Hexadecimal digits of a prompt's hash."""
Split = Literal["train", "eval"]


class TextRows(Sequence[dict[str, Any]]):
    """Rows kept as JSON texts, which need less memory than dictionaries."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, row: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, row: slice) -> TextRows: ...

    def __getitem__(self, row: int | slice) -> dict[str, Any] | TextRows:
        if isinstance(row, slice):
            return TextRows(self._texts[row])
        content: dict[str, Any] = json.loads(self._texts[row])
        return content


@dataclass(frozen=True, slots=True)
class Described:
    """What a worker knows of its environment before rollouts."""

    rows: Sequence[dict[str, Any]]
    """All rows of a split. Of an endless one, some at its start, to look at their prompts."""
    is_endless: bool = False
    reward_functions: Mapping[str, float] = field(default_factory=dict)
    """Weight of each reward function, by name; 0 for one that is only measured."""
    tools: Sequence[Any] | None = ()
    """Tools of rows that name none of their own. None: no tool is known before rollouts."""
    prompt_columns: tuple[str, ...] = ("prompt",)
    """Where a row's prompt is: the first of these columns that holds messages or a text."""
    falls_back: bool = False
    """Whether these rows are asked for as evaluation rows, and are the training rows, because there are no others."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Rollouts of one example, which are scored together."""

    example: ExampleRef
    split: Split
    row: Mapping[str, Any]
    """The columns of the example's row; empty for one of an endless environment that was not read."""
    size: int
    server: InferenceServer
    sampling_args: dict[str, Any]
    version: int
    """Policy version at submission."""
    max_retries: int
    timeout_s: float | None
    """Longest time of the group, as in the config."""
    vocab_size: int | None
    """That of the trained model, if it is known: no rollout may have other tokens."""

    @property
    def temperature(self) -> float:
        return float(self.sampling_args.get("temperature", 1.0))

    def read(self, outputs: Sequence[Mapping[str, Any]], recorded: Callable[[str], Recorded]) -> list[Rollout]:
        """The rollouts that an environment returned. `recorded` gives the model calls of a session by its key.

        Raises:
            MalformedRollout: one cannot be used.
        """
        record_rollouts(own_trace(), outputs, self.example)
        given = (self.example, self.temperature, self.version, self.vocab_size)
        return [read_rollout(output, recorded(output["session"]), *given) for output in outputs]


class Worker(Protocol):
    """Runs the code of one environment: in this process, in a process that it starts, or behind a port.

    It asks the model through the recording proxy, and gives back rollouts whose tokens the proxy recorded.
    """

    def describe(self, split: Split) -> Described:
        """Raises EnvironmentFault, or whatever the environment's code raises, if there is no such dataset."""

    async def open(self) -> None:
        """Get ready for groups. Raises EnvironmentFault."""

    def report_to(self, report: Report) -> None:
        """Give `report` what the environment's process says of its event loop, if it has one of its own."""

    async def roll_out(self, group: GroupRequest) -> list[Rollout]:
        """Raises GroupFailed, EnvironmentFault, or whatever the environment's code raises."""

    def waits_for(self) -> str:
        """What running groups wait for, other than the model and the environment's own code; empty if nothing."""

    async def close(self) -> None: ...


class Environment:
    """The training rows or the evaluation rows of an environment, and the worker that rolls them out.

    An environment without evaluation rows uses its training rows, as in verifiers.
    """

    def __init__(self, name: str, worker: Worker, split: Split = "train", max_failed_groups: float = 0.5) -> None:
        self.name = name
        self.worker = worker
        self.timeout_s: float | None = None
        """Longest time of a group, as in the config."""
        self.vocab_size: int | None = None
        """That of the trained model, if it is known: no rollout may have other tokens."""
        self.image_limits: ImageLimits | None = None
        """Of the images that the policy sees; None if it reads text alone."""
        self.failures = Failures(name, max_failed_groups)
        self._split: Split = split
        self._described = worker.describe(split)
        self._rows = self._described.rows
        self.reward_functions = dict(self._described.reward_functions)
        """Weight of each reward function, by name; 0 for one that is only measured."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_rows(self) -> int | None:
        """None if the environment makes rows without end, as they are drawn."""
        return None if self._described.is_endless else len(self._rows)

    @property
    def falls_back(self) -> bool:
        """Whether the evaluation rows are the training rows, because the environment has no others."""
        return self._described.falls_back

    def columns(self, rows: range, names: Sequence[str]) -> Iterator[Mapping[str, Sequence[Any]]] | None:
        """Those of the named columns that rows of a `Dataset` have, in batches. None if the rows are no `Dataset`."""
        dataset: Any = self._rows
        if not hasattr(dataset, "select_columns"):
            return None
        chosen = dataset.select_columns([name for name in names if name in dataset.column_names]).select(rows)
        batches: Iterator[Mapping[str, Sequence[Any]]] = iter(chosen.iter(batch_size=1_000))
        return batches

    def held_out(self) -> Environment:
        """The same environment with its evaluation rows."""
        other = Environment(self.name, self.worker, "eval", self.failures.max_share)
        other.timeout_s, other.image_limits = self.timeout_s, self.image_limits
        return other

    def content(self, row: int) -> dict[str, Any]:
        """All columns of a row."""
        return dict(self._rows[row])

    def prompt(self, row: int) -> Any:
        """The prompt of a row: messages, or text. The whole row, if no column says what is asked."""
        content = self.content(row)
        for name in self._described.prompt_columns:
            if isinstance(content.get(name), str | list):
                return content[name]
        return json.dumps(content, default=str)

    def tools(self, row: int) -> list[dict[str, Any]]:
        """The tools that the environment offers in a row, as the engine receives them."""
        if self._described.tools is None:
            return []
        info = self._rows[row].get("info") or {}
        info = json.loads(info) if isinstance(info, str) else info
        # `oai_tools` until verifiers 0.1.8.
        tools = info.get("tool_defs") or info.get("oai_tools") or self._described.tools
        plain = (tool if isinstance(tool, Mapping) else tool.model_dump(exclude_none=True) for tool in tools)
        return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in plain]

    def check_images(self) -> None:
        """Raises EnvironmentFault if the prompt of a row has an image that cannot be shown: the policy reads text
        alone, or its file is missing. The images of the first such row are decoded."""
        first = first_row_with_image(self._rows, self.prompt)
        if first is not None and self.image_limits is None:
            raise EnvironmentFault(
                f"environment {self.name!r}: the prompt of row {first} has an image, and {NO_IMAGES}"
            )
        if first is None or self.image_limits is None:
            return
        for row in range(first, len(self._rows)):
            try:
                check_sources(self.prompt(row), self.image_limits, decodes=row == first)
            except ImageFault as fault:
                raise EnvironmentFault(f"environment {self.name!r}: the prompt of row {row}: {fault}") from fault

    def fingerprint(self, row: int, keys: Sequence[str]) -> str:
        """Hash of a row's content, which identifies the row even if its index changes."""
        if self._described.is_endless:  # its rows are not known here, only their numbers
            return fingerprint(self.name, {"row": row}, ["task", "row"])
        return fingerprint(self.name, self._rows[row], keys)

    def prompt_id(self, row: int) -> str:
        """The id that the dataset gives a row's prompt, or else a hash of its prompt and answer."""
        if self._described.is_endless:
            return self.fingerprint(row, ())[:PROMPT_ID_LENGTH]
        content = self.content(row)
        own = content.get("prompt_id")
        return str(own) if own not in (None, "") else fingerprint("", content, ("prompt", "answer"))[:PROMPT_ID_LENGTH]

    def waits_for(self) -> str:
        """What running groups wait for, other than the model and the environment's own code; empty if nothing."""
        return self.worker.waits_for()

    async def connect(self, blocked: BlockedLoops | None = None) -> None:
        """Get ready for groups. `blocked` counts what blocks its process. Raises EnvironmentFault."""
        if blocked is not None:
            self.worker.report_to(partial(blocked.add_report, self.name))
        await self.worker.open()

    async def run_group(
        self, example: ExampleRef, size: int, server: InferenceServer, sampling_args: dict[str, Any], version: int
    ) -> list[Rollout]:
        """Roll out one example `size` times to train on it.

        Whatever the environment's code raises passes through.

        Raises:
            GroupFailed: a reward function failed, the environment's code ended a rollout, it took longer than
                `timeout_s`, or nothing that came back can be trained on.
            EnvironmentFault: the environment showed an image to a policy that reads text, or too many of its groups
                failed.
        """
        with self.failures.group(server.lost):
            rollouts = await self._roll_out(example, size, server, sampling_args, version, 0)
            if self.image_limits is None and any(
                has_image(rollout.prompt) or has_image(rollout.completion) for rollout in rollouts
            ):
                raise EnvironmentFault(f"environment {self.name!r} shows the model images, and {NO_IMAGES}")
            refuse_failed(rollouts)
            check_trainable(rollouts)
        return rollouts

    async def evaluate(
        self,
        example: ExampleRef,
        size: int,
        server: InferenceServer,
        sampling_args: dict[str, Any],
        version: int,
        max_retries: int = 0,
    ) -> list[Rollout]:
        """Roll out one example `size` times and score the rollouts, whether or not they can be trained on.

        Up to `max_retries` times, the worker tries again what failed. Errors of environment code propagate.

        Raises:
            EnvironmentFault: reward functions failed in too many groups.
            GroupTimeout: it took longer than `timeout_s` of the environment.
        """
        rollouts = await self._roll_out(example, size, server, sampling_args, version, max_retries)
        self.failures.observe_scored(rollouts)
        return rollouts

    async def _roll_out(
        self,
        example: ExampleRef,
        size: int,
        server: InferenceServer,
        sampling_args: dict[str, Any],
        version: int,
        max_retries: int,
    ) -> list[Rollout]:
        row = {} if self._described.is_endless else self._rows[example.row]
        given = (size, server, sampling_args, version, max_retries, self.timeout_s, self.vocab_size)
        rollouts = await self.worker.roll_out(GroupRequest(example, self._split, row, *given))
        for rollout in rollouts:
            rollout.prompt_id = self.prompt_id(example.row)
        return rollouts

    async def close(self) -> None:
        await self.worker.close()


def rows_to_evaluate(environment: Environment, skip_first: int, count: int) -> range:
    """`count` rows after the first `skip_first`; a negative `count` takes all.

    Raises:
        EnvironmentFault: `skip_first` skips every row, or `count` takes all of an endless environment.
    """
    size = environment.num_rows
    if size is None:
        if count < 0:
            raise EnvironmentFault(f"environment {environment.name!r} has endless rows: set num_examples")
        return range(skip_first, skip_first + count)
    if skip_first >= size:
        raise EnvironmentFault(f"skip_first = {skip_first} leaves none of the {size} rows of {environment.name!r}")
    return range(skip_first, size if count < 0 else min(skip_first + count, size))

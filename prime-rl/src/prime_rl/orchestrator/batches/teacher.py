"""The teacher of a run: a frozen model that scores the samples before they are sent to the trainer."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from prime_rl.configs.orchestrator import TeacherModelConfig
from prime_rl.configs.rollouts.judges import TEACHER_AT_ONCE
from prime_rl.orchestrator.batches.batch import Batch
from prime_rl.orchestrator.errors import InferenceFault, OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import Rollout, to_samples
from prime_rl.orchestrator.servers.channel import ChatChannel, OverlongPrompt, ServerAnswered
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.servers.server import MAX_RETRIES
from prime_rl.transport.messages import TeacherTop, TrainingSample


class _Entry(msgspec.Struct):
    logprob: float | None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a teacher says of a sample."""

    logprobs: list[float]
    """Of every token, at temperature 1. The first token is not predicted, so its entry is 0."""
    top_ids: np.ndarray
    """int32 [M, k]: the likeliest tokens at each of the M places that are trained on."""
    top_logprobs: np.ndarray


class Teacher:
    """Asks the teacher's servers, in turn, for the log-probabilities of given tokens."""

    def __init__(self, config: TeacherModelConfig) -> None:
        self.model = config.model.name
        self.top_k = config.top_k or 0
        self._pool = InferencePool(config.client, self.model)
        self._timeout_s = config.client.timeout
        self._channels: list[ChatChannel] = []
        self._turns: Iterator[ChatChannel] = iter(())
        self._room = asyncio.Semaphore(TEACHER_AT_ONCE * len(self._pool.servers))
        self._decoder = msgspec.json.Decoder(_Reply)

    async def wait_ready(self, server_log: Path | None) -> None:
        """Wait until every server is healthy and serves the model, and score one token.

        `server_log` is the log of the server that was started for this run; None if the user starts it.

        Raises:
            OrchestratorError: a server is not ready in time, serves another model, or does not score tokens.
        """
        try:
            await self._pool.wait_served(server_log)
        except InferenceFault as error:
            raise OrchestratorError(f"teacher: {error}") from error
        self._channels = [
            ChatChannel(server.base_url, server.headers, self._timeout_s, MAX_RETRIES) for server in self._pool.servers
        ]
        self._turns = itertools.cycle(self._channels)
        await asyncio.gather(*(self._scores(channel, [0, 0], [1]) for channel in self._channels))

    def begin(self, rollouts: Sequence[Rollout]) -> asyncio.Task[list[list[TrainingSample]]]:
        """Start to score the samples of a group that has just ended. The task returns them by rollout."""

        async def score() -> list[list[TrainingSample]]:
            samples = [to_samples(rollout) for rollout in rollouts]
            await self.score([each for of_rollout in samples for each in of_rollout if any(each.completion_mask)])
            return samples

        task = asyncio.create_task(score())
        # `finish` raises its error. Of a group that no batch takes, nobody would read it, and asyncio would log it.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    async def finish(self, batch: Batch) -> None:
        """Wait for the scores of the batch's groups, and give them to its samples.

        Raises:
            OrchestratorError: as in `score`.
        """
        of_rollouts = iter(batch.samples)
        for group in batch.groups:
            scored = await (group.scored_samples or self.begin(group.rollouts))
            own = itertools.islice(of_rollouts, len(group.rollouts))
            for (_, samples), with_scores in zip(own, scored, strict=True):
                for sample, source in zip(samples, with_scores, strict=True):
                    sample.teacher_logprobs, sample.teacher_top = source.teacher_logprobs, source.teacher_top

    async def score(self, samples: Sequence[TrainingSample]) -> None:
        """Set `teacher_logprobs` of the samples: entry t is the teacher's log-probability of token t at temperature 1.

        The first token is not predicted, so its entry is 0.

        Raises:
            OrchestratorError: a server does not answer after its retries, or cannot score a sample.
        """
        turns = zip(samples, self._turns, strict=False)
        try:
            async with asyncio.TaskGroup() as group:
                for sample, channel in turns:
                    group.create_task(self._score(sample, channel))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0]  # noqa: B904 - keep the error's own cause, not the group

    async def _score(self, sample: TrainingSample, channel: ChatChannel) -> None:
        tokens = sample.prompt_ids + sample.completion_ids
        async with self._room:
            scores = await self._scores(channel, tokens, _trained_places(sample))
        sample.teacher_logprobs = scores.logprobs
        sample.teacher_top = None if not self.top_k else _packed([scores], [1.0])

    async def _scores(self, channel: ChatChannel, tokens: list[int], places: Sequence[int]) -> Scores:
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0}
        body["prompt_logprobs"] = self.top_k
        where = f"the teacher at {channel.base_url}"
        try:
            reply = await channel.exchange("/completions", body)
            (choice,) = self._decoder.decode(reply.body).choices
        except OverlongPrompt as error:
            raise OrchestratorError(
                f"{where} cannot read a sample of {len(tokens)} tokens and one more: raise its max_model_len "
                f"({error.message})"
            ) from error
        except (ServerAnswered, aiohttp.ClientError, TimeoutError) as error:
            raise OrchestratorError(f"{where} does not answer: {str(error) or type(error).__name__}") from error
        except (msgspec.DecodeError, ValueError) as error:
            raise OrchestratorError(f"{where} sends a reply that cannot be read: {error}") from error
        entries = choice.prompt_logprobs or []
        scored = [
            _finite(entry[str(token)].logprob) if entry is not None and str(token) in entry else math.nan
            for token, entry in zip(tokens[1:], entries[1:], strict=False)
        ]
        if len(scored) != len(tokens) - 1 or not all(map(math.isfinite, scored)):
            raise OrchestratorError(
                f"{where} does not return log-probabilities of a prompt: it needs `prompt_logprobs`"
            )
        ids = np.empty((len(places), self.top_k), np.int32)
        logprobs = np.empty((len(places), self.top_k), np.float32)
        for row, place in enumerate(places if self.top_k else ()):
            # The token itself is among them, too, also if it is not one of the likeliest.
            entry = entries[place] or {}
            top = heapq.nlargest(self.top_k, ((_finite(each.logprob), int(token)) for token, each in entry.items()))
            if len(top) < self.top_k:
                raise OrchestratorError(
                    f"{where} returns {len(top)} of the {self.top_k} likeliest tokens that "
                    "trainer.distillation.top_k asks for: lower it, or raise --max-logprobs of its vLLM"
                )
            logprobs[row], ids[row] = zip(*top, strict=True)
        return Scores([0.0, *scored], ids, logprobs)

    async def close(self) -> None:
        await asyncio.gather(self._pool.close(), *(channel.close() for channel in self._channels))


LEAST_LOGPROB = -1e4
"""Stands for a log-probability of minus infinity, which JSON has no number for."""


def _finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None or logprob == -math.inf else logprob


def _trained_places(sample: TrainingSample) -> list[int]:
    """Indices of the tokens that are trained on. Nothing predicts the first token."""
    mask = sample.prompt_mask + sample.completion_mask
    return [place for place, is_trained in enumerate(mask) if is_trained and place]


def _packed(scores: Sequence[Scores], weights: Sequence[float]) -> TeacherTop:
    """The likeliest tokens of several teachers, side by side."""
    ids, logprobs = (
        np.stack(parts, 1) for parts in zip(*((each.top_ids, each.top_logprobs) for each in scores), strict=True)
    )
    of_places = np.tile(np.array(weights, "<f4"), (len(ids), 1))
    return TeacherTop(
        len(scores),
        ids.shape[2],
        ids.astype("<i4").tobytes(),
        logprobs.astype("<f4").tobytes(),
        of_places.tobytes(),
    )

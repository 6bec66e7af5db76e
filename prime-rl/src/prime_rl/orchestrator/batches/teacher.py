"""The teacher of a run: a frozen model that scores the samples before they are sent to the trainer."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import msgspec

from prime_rl.configs.orchestrator import TeacherModelConfig
from prime_rl.configs.rollouts.judges import TEACHER_AT_ONCE
from prime_rl.orchestrator.batches.batch import Batch
from prime_rl.orchestrator.errors import InferenceFault, OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import Rollout, to_samples
from prime_rl.orchestrator.servers.channel import ChatChannel, OverlongPrompt, ServerAnswered
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.servers.server import MAX_RETRIES
from prime_rl.transport.messages import TrainingSample


class _Entry(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]


class Teacher:
    """Asks the teacher's servers, in turn, for the log-probabilities of given tokens."""

    def __init__(self, config: TeacherModelConfig) -> None:
        self.model = config.model.name
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
        await asyncio.gather(*(self._logprobs(channel, [0, 0]) for channel in self._channels))

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
                    sample.teacher_logprobs = source.teacher_logprobs

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
            sample.teacher_logprobs = await self._logprobs(channel, tokens)

    async def _logprobs(self, channel: ChatChannel, tokens: list[int]) -> list[float]:
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
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
            entry[str(token)].logprob if entry is not None and str(token) in entry else math.nan
            for token, entry in zip(tokens[1:], entries[1:], strict=False)
        ]
        if len(scored) != len(tokens) - 1 or not all(map(math.isfinite, scored)):
            raise OrchestratorError(
                f"{where} does not return log-probabilities of a prompt: it needs `prompt_logprobs`"
            )
        return [0.0, *scored]

    async def close(self) -> None:
        await asyncio.gather(self._pool.close(), *(channel.close() for channel in self._channels))

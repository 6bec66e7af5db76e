"""The teachers of a run: models that score the samples before they are sent to the trainer."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np

from prime_rl.configs.orchestrator import TeacherModelConfig
from prime_rl.configs.rollouts.judges import TEACHER_AT_ONCE
from prime_rl.orchestrator.batches.batch import Batch
from prime_rl.orchestrator.errors import InferenceFault, OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Line, Rollout, to_lines
from prime_rl.orchestrator.rollouts.token_texts import Alignment, read_tokenizer, spread_spans
from prime_rl.orchestrator.servers.channel import ChatChannel, OverlongPrompt, ServerAnswered
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.servers.server import MAX_RETRIES
from prime_rl.transport.messages import LikeliestTokens, TrainingSample
from prime_rl.utils.errors import StartFault
from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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


class _Unreadable(OrchestratorError):
    """A teacher cannot read a sample: it is too long for its server, or the conversation is not known."""


class Teacher:
    """Asks the teacher's servers, in turn, for the log-probabilities of given tokens."""

    def __init__(self, config: TeacherModelConfig, policy: str) -> None:
        """`policy` has the tokenizer of the samples, if the teacher has another one.

        Raises:
            OrchestratorError: one of the two tokenizers is not on this machine.
        """
        self.model = config.model.name
        self.alignment: Alignment | None = None
        """With the teacher's own tokenizer. None: it reads the policy's tokens."""
        self._end_of_turn: int | None = None
        if config.tokenizer is not None:
            self.alignment = Alignment(_tokenizer(policy), _tokenizer(config.tokenizer))
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
        if self.alignment is not None:
            self._end_of_turn = await self._find_end_of_turn(self.alignment)

    async def scores(self, tokens: list[int], places: Sequence[int]) -> Scores:
        """Score all tokens, and find the likeliest ones at `places`. Raises OrchestratorError."""
        channel = next(self._turns)
        async with self._room:
            return await self._scores(channel, tokens, places)

    async def prompt(self, messages: list[dict[str, Any]], rendering: Mapping[str, Any]) -> list[int]:
        """The tokens of a conversation before an answer, by the teacher's template. Raises OrchestratorError."""
        return await self._tokens({"messages": messages, **rendering, "add_generation_prompt": True})

    async def text_prompt(self, text: str) -> list[int]:
        """The tokens of a prompt without messages. Raises OrchestratorError."""
        return await self._tokens({"prompt": text})

    async def answer_logprobs(
        self, prompt: list[int], ids: Sequence[int], logprobs: Sequence[float], alignment: Alignment
    ) -> list[float]:
        """What the teacher says of an answer of the policy, at each of the policy's tokens `ids` (`spread_spans`).

        `logprobs` are the policy's. The end of the answer is compared with the end in the teacher's template.

        Raises:
            OrchestratorError: as `scores`.
        """
        ours, is_ended = alignment.read(ids)
        theirs, tokens = alignment.write(ours.text)
        ends = [self._end_of_turn] if is_ended and self._end_of_turn is not None else []
        found = (await self.scores([*prompt, *tokens, *ends], ())).logprobs[len(prompt) :]
        spread = spread_spans(ours, logprobs[: len(ours.ends)], theirs, found[: len(tokens)])
        return [*spread, *(found[len(tokens) :] or logprobs[len(ours.ends) :])]

    async def _find_end_of_turn(self, alignment: Alignment) -> int | None:
        """The token that ends an answer in the teacher's template; None without a template."""
        asked = {"role": "user", "content": "a"}
        try:
            one, other = [
                await self._tokens(
                    {
                        "messages": [asked, {"role": "assistant", "content": answer}],
                        "add_generation_prompt": False,
                    }
                )
                for answer in ("b", "c")
            ]
        except OrchestratorError as error:
            get_logger().warning(f"The teacher does not score the ends of answers: {error}")
            return None
        return alignment.end_of_turn(one, other)

    async def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        channel = next(self._turns)
        try:
            return await channel.tokenize({"model": self.model, **body})
        except (ServerAnswered, aiohttp.ClientError, TimeoutError) as error:
            raise OrchestratorError(f"the teacher at {channel.base_url} does not render a prompt: {error}") from error

    async def _scores(self, channel: ChatChannel, tokens: list[int], places: Sequence[int]) -> Scores:
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0}
        body["prompt_logprobs"] = self.top_k
        where = f"the teacher at {channel.base_url}"
        try:
            reply = await channel.exchange("/completions", body)
            (choice,) = self._decoder.decode(reply.body).choices
        except OverlongPrompt as error:
            raise _Unreadable(
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


class Teachers:
    """Scores the samples of finished groups with all teachers, and mixes the scores.

    The trainer's losses are linear in a teacher's log-probabilities (`teacher_tau`) and in its divergence
    (`trainer.distillation`), so their weighted mean over teachers is the loss of the mixture that it documents.
    """

    def __init__(
        self,
        configs: Sequence[TeacherModelConfig],
        content: Callable[[ExampleRef], Mapping[str, Any]] | None = None,
        policy: str = "",
    ) -> None:
        """`content` gives the columns of an example's row, for hints. `policy` is the policy's model, for the texts of
        its tokens. Raises OrchestratorError: as `Teacher`."""
        self._teachers = [(config, Teacher(config, policy)) for config in configs]
        self._content = content

    def check_hints(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises OrchestratorError: a hint names a column that the first row of an environment, in `rows`, lacks."""
        for config, _ in self._teachers:
            for env, row in rows.items():
                if config.hint is not None and config.scores(env):
                    filled_hint(config.hint, row, env)

    async def wait_ready(self, server_log: Path | None) -> None:
        """Wait for each teacher. `server_log` is that of the first one's server, if the run started it.

        Raises:
            OrchestratorError: as `Teacher.wait_ready`.
        """
        for number, (_, teacher) in enumerate(self._teachers):
            await teacher.wait_ready(None if number else server_log)

    def begin(self, rollouts: Sequence[Rollout]) -> asyncio.Task[list[list[TrainingSample]]]:
        """Start to score the samples of a group that has just ended. The task returns them by rollout."""

        async def score() -> list[list[TrainingSample]]:
            lines = [to_lines(rollout) for rollout in rollouts]
            trained = [line for of_rollout in lines for line in of_rollout if any(line.sample.completion_mask)]
            await self.score(trained, rollouts[0].example.env)
            return [[line.sample for line in of_rollout] for of_rollout in lines]

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
                    if not any(source.completion_mask):
                        sample.completion_mask = [False] * len(sample.completion_mask)

    async def score(self, lines: Sequence[Line], env: str = "") -> None:
        """Set `teacher_logprobs` of samples of an environment, and `teacher_top` if likeliest tokens are asked for.

        Entry t of `teacher_logprobs` is the log-probability of token t at temperature 1. The first token is not
        predicted, so its entry is 0. Hints are put into the lines that begin with their rollout's first prompt.

        Raises:
            OrchestratorError: a server does not answer after its retries, or cannot score a sample.
        """
        teachers = [each for each in self._teachers if each[0].scores(env)]
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(self._score(line, teachers))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0]  # noqa: B904 - keep the error's own cause, not the group

    async def _score(self, line: Line, teachers: Sequence[tuple[TeacherModelConfig, Teacher]]) -> None:
        sample = line.sample
        try:
            scores = await asyncio.gather(
                *(
                    self._scores_of(config, teacher, line)
                    if teacher.alignment is None
                    else self._aligned_scores_of(config, teacher, line, teacher.alignment)
                    for config, teacher in teachers
                )
            )
        except _Unreadable as error:
            has_hint = line.opens and any(config.hint for config, _ in teachers)
            if not has_hint and all(config.tokenizer is None for config, _ in teachers):
                raise
            # With a hint or in other tokens, an answer may not fit that its own server has cut: one sample less, not
            # the run.
            get_logger().warning(f"A sample is not trained on, because a teacher cannot read it: {error}")
            sample.completion_mask = [False] * len(sample.completion_mask)
            sample.teacher_logprobs = [0.0] * (len(sample.prompt_ids) + len(sample.completion_ids))
            if (top_k := teachers[0][0].top_k) is not None:
                sample.teacher_top = LikeliestTokens(self._most_teachers(), top_k, b"", b"", b"")
            return
        total = sum(config.weight for config, _ in teachers)
        weights = [config.weight / total for config, _ in teachers]
        columns = zip(*(each.logprobs for each in scores), strict=True)
        sample.teacher_logprobs = [
            sum(weight * each for weight, each in zip(weights, column, strict=True)) for column in columns
        ]
        if teachers[0][0].top_k is not None:
            # Rows of the trainer are tensors: all samples have places for the most teachers that any of them has.
            unused = self._most_teachers() - len(scores)
            sample.teacher_top = _packed(scores, weights, unused)

    async def _scores_of(self, config: TeacherModelConfig, teacher: Teacher, line: Line) -> Scores:
        sample, rollout = line.sample, line.rollout
        prompt_ids = sample.prompt_ids
        if config.hint is not None and line.opens and rollout is not None:
            messages = self._hinted(config, rollout, _plain(rollout.prompt))
            prompt_ids = await teacher.prompt(messages, rollout.rendering)
        shift = len(prompt_ids) - len(sample.prompt_ids)
        places = [place + shift for place in _trained_places(sample)]
        scores = await teacher.scores(prompt_ids + sample.completion_ids, places)
        # Prompts are not trained on; those with a hint are other tokens.
        logprobs = (
            scores.logprobs if shift == 0 else [0.0] * len(sample.prompt_ids) + scores.logprobs[len(prompt_ids) :]
        )
        return replace(scores, logprobs=logprobs)

    async def _aligned_scores_of(
        self, config: TeacherModelConfig, teacher: Teacher, line: Line, alignment: Alignment
    ) -> Scores:
        """The scores of a teacher with a tokenizer of its own, which reads each answer after its own prompt.

        What is not trained on keeps 0, and tokens that have no counterpart the policy's own log-probability.
        """
        rollout, sample = line.rollout, line.sample
        logprobs = [0.0] * len(sample.prompt_ids) + sample.inference_logprobs

        async def score(number: int, start: int) -> None:
            assert rollout is not None
            call, messages = rollout.trace.calls[number], _messages_before(rollout, number)
            if isinstance(messages, str):
                prompt = await teacher.text_prompt(messages)
            else:
                hinted = messages if config.hint is None else self._hinted(config, rollout, messages)
                prompt = await teacher.prompt(hinted, call.details.rendering)
            found = await teacher.answer_logprobs(prompt, call.completion_ids, call.inference_logprobs, alignment)
            begin = len(sample.prompt_ids) + start
            logprobs[begin : begin + len(found)] = found

        await asyncio.gather(
            *(
                score(number, start)
                for number, start in line.calls
                if rollout is not None and any(rollout.trace.calls[number].completion_mask)
            )
        )
        return Scores(logprobs, np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))

    def _hinted(
        self, config: TeacherModelConfig, rollout: Rollout, messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The messages with the teacher's hint at the end of the last one of a user in the rollout's first prompt.

        Raises:
            OrchestratorError: the prompt is no conversation, or the hint names a column that the row lacks.
        """
        if config.hint is None or self._content is None:
            return messages
        hint = filled_hint(config.hint, self._content(rollout.example), rollout.example.env)
        first = len(rollout.prompt) if isinstance(rollout.prompt, list) else 0
        place = next((at for at in reversed(range(first)) if messages[at].get("role") == "user"), None)
        if place is None:
            raise OrchestratorError(
                f"the hint of the teacher {config.model.name} needs a prompt with a user's message, and environment "
                f"{rollout.example.env!r}, row {rollout.example.row}, has none"
            )
        said = messages[place]
        if isinstance(said["content"], list):
            content: Any = [*said["content"], {"type": "text", "text": f"\n\n{hint}"}]
        else:
            content = f"{said['content']}\n\n{hint}"
        return [*messages[:place], {**said, "content": content}, *messages[place + 1 :]]

    def _most_teachers(self) -> int:
        everywhere = sum(config.envs is None for config, _ in self._teachers)
        names = {name for config, _ in self._teachers for name in config.envs or ()}
        return max([everywhere, *(sum(config.scores(name) for config, _ in self._teachers) for name in names)])

    async def close(self) -> None:
        await asyncio.gather(*(teacher.close() for _, teacher in self._teachers))


_COLUMN = re.compile(r"\{(\w+)\}")


def filled_hint(hint: str, row: Mapping[str, Any], env: str) -> str:
    """The hint with the row's columns. Raises OrchestratorError: the row lacks one."""

    def column(name: re.Match[str]) -> str:
        if name[1] not in row:
            raise OrchestratorError(
                f"the teacher's hint names the column {name[1]!r}, and rows of environment {env!r} have "
                f"{', '.join(sorted(row))}"
            )
        return str(row[name[1]])

    return _COLUMN.sub(column, hint)


def _plain(prompt: Any) -> list[dict[str, Any]]:
    """The messages of a prompt, which verifiers may give as models of Pydantic. Empty for a text."""
    if not isinstance(prompt, list):
        return []
    return [dict(each) if isinstance(each, Mapping) else each.model_dump(exclude_none=True) for each in prompt]


def _messages_before(rollout: Rollout, number: int) -> list[dict[str, Any]] | str:
    """What the model read before its answer of call `number`; a text if the prompt is one.

    Raises:
        _Unreadable: the conversation does not show it.
    """
    if isinstance(rollout.prompt, str) and number == 0:
        return rollout.prompt
    prompt, said = _plain(rollout.prompt), _plain(rollout.completion)
    answers = [place for place, each in enumerate(said) if each.get("role") == "assistant"]
    if not prompt or (number and len(answers) != len(rollout.trace.calls)):
        raise _Unreadable(
            f"environment {rollout.example.env!r}, row {rollout.example.row}: {len(rollout.trace.calls)} calls of the "
            f"model and {len(answers)} answers in the conversation"
        )
    return prompt + said[: answers[number]] if number else prompt


def _tokenizer(model: str) -> Tokenizer:
    """Raises OrchestratorError: it has no `tokenizer.json`, here or on the hub, or a damaged one."""
    try:
        tokenizer = read_tokenizer(model)
        if tokenizer is None and not Path(model).is_dir():
            from huggingface_hub import hf_hub_download

            # huggingface_hub raises errors of many kinds; each means that there is no file.
            with suppress(OSError, ValueError):
                hf_hub_download(model, "tokenizer.json")
                tokenizer = read_tokenizer(model)
    except StartFault as fault:
        raise OrchestratorError(f"orchestrator.teacher_model.tokenizer: {fault}") from fault
    if tokenizer is None:
        raise OrchestratorError(
            f"orchestrator.teacher_model.tokenizer: {model!r} has no tokenizer.json, and the texts of both tokenizers "
            "are compared"
        )
    return tokenizer


LEAST_LOGPROB = -1e4
"""Stands for a log-probability of minus infinity, which JSON has no number for."""


def _finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None or logprob == -math.inf else logprob


def _trained_places(sample: TrainingSample) -> list[int]:
    """Indices of the tokens that are trained on. Nothing predicts the first token."""
    mask = sample.prompt_mask + sample.completion_mask
    return [place for place, is_trained in enumerate(mask) if is_trained and place]


def _packed(scores: Sequence[Scores], weights: Sequence[float], unused: int) -> LikeliestTokens:
    """The likeliest tokens of several teachers, side by side, and `unused` empty places with weight 0."""
    places, k = scores[0].top_ids.shape
    ids = np.zeros((places, len(scores) + unused, k), "<i4")
    logprobs = np.zeros(ids.shape, "<f4")
    for number, each in enumerate(scores):
        ids[:, number], logprobs[:, number] = each.top_ids, each.top_logprobs
    of_places = np.tile(np.array([*weights, *[0.0] * unused], "<f4"), (places, 1))
    return LikeliestTokens(len(scores) + unused, k, ids.tobytes(), logprobs.tobytes(), of_places.tobytes())

"""The model of an evaluation, as lm-eval sees it: our inference server's `/v1/completions`, asked with token ids."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from medarc_rl.lm_eval.plan import Candidate
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE

DEFAULT_MAX_GEN_TOKS = 1024
"""Longest answer in tasks that set none. lm-eval's own 256 cuts many off."""
_TIMEOUT_S = 36000
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling is the task's: the model's own defaults do not apply."""
_OF_TRANSFORMERS = ("do_sample", "num_beams", "use_cache")


class CannotEvaluate(Exception):
    """A task does not work with this model. The message is one line."""


@dataclass(slots=True)
class Counts:
    """Counts of answers and prompts of a task, and of those that were cut."""

    answers: int = 0
    truncated: int = 0
    """Answers that reached the limit of new tokens."""
    prompts: int = 0
    cut_prompts: int = 0
    """Prompts that lost their beginning, because they were longer than the context."""

    def notes(self, max_gen_toks: int | None) -> list[str]:
        """Reasons to doubt the scores, one line each."""
        lines = []
        if self.truncated:
            limit = "" if max_gen_toks is None else f" of {max_gen_toks} tokens"
            lines.append(
                f"{self.truncated} of {self.answers} answers ({self.truncated / self.answers:.0%}) were cut off at the "
                f"limit{limit}: raise --max-gen-toks"
            )
        if self.cut_prompts:
            lines.append(
                f"{self.cut_prompts} of {self.prompts} prompts were longer than the model's context and lost their "
                "beginning: use fewer --num-fewshot"
            )
        return lines


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and limits of the server for a candidate."""

    url: str
    model: str
    """Name of the model in requests."""
    max_model_len: int
    concurrency: int


@dataclass(slots=True)
class Asked:
    """The limits that a task's requests have named, and what became of the requests."""

    counts: Counts = field(default_factory=Counts)
    max_gen_toks: int | None = None


class ServedModel(LocalCompletionsAPI):
    """One candidate on our inference server."""

    def __init__(self, candidate: Candidate, endpoint: Endpoint) -> None:
        super().__init__(
            model=endpoint.model,
            base_url=f"{endpoint.url}/v1/completions",
            tokenizer=candidate.tokenizer,
            tokenizer_backend="huggingface",
            tokenized_requests=True,
            batch_size=1,
            num_concurrent=max(endpoint.concurrency, 2),
            max_length=endpoint.max_model_len,
            max_gen_toks=min(DEFAULT_MAX_GEN_TOKS, endpoint.max_model_len // 2),
            timeout=_TIMEOUT_S,
        )
        self.asked = Asked()
        self._stop_token_ids = _stop_token_ids(candidate)
        self._bos_for_text = _begins_with_bos(self.tokenizer)

    @cached_property
    def api_key(self) -> str:
        return os.environ[ENGINE_KEY_VARIABLE]

    def begin_task(self, chat_template: bool) -> None:
        """Count from zero. A text without a chat template begins with the token that the tokenizer puts first."""
        self.asked = Asked()
        self.add_bos_token = self._bos_for_text and not chat_template

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        limits = {int(request.args[1].get("max_gen_toks", self._max_gen_toks)) for request in requests}
        self.asked.max_gen_toks = max(limits)
        if max(limits) >= self.max_length:
            raise CannotEvaluate(
                f"it asks for {max(limits)} new tokens, and the model's context has {self.max_length + 1}: set a lower "
                "--max-gen-toks"
            )
        lengths = [len(tokens) for tokens in self.tok_encode([request.args[0] for request in requests])]
        limit = self.max_length - max(limits)
        self.asked.counts.prompts += len(lengths)
        self.asked.counts.cut_prompts += sum(length > limit for length in lengths)
        answers: list[str] = super().generate_until(requests, disable_tqdm)
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        self.asked.counts.prompts += len(lengths)
        self.asked.counts.cut_prompts += sum(length > self.max_length for length in lengths)
        scored: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, **kwargs)
        return scored

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        for output in outputs if isinstance(outputs, list) else [outputs]:
            for choice in output["choices"]:
                self.asked.counts.answers += 1
                self.asked.counts.truncated += choice["finish_reason"] == "length"
        answers: list[str] = super().parse_generations(outputs, **kwargs)
        return answers

    def _create_payload(
        self,
        messages: Any,
        generate: bool = False,
        gen_kwargs: dict[str, Any] | None = None,
        seed: int = 1234,
        eos: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        payload: dict[str, Any] = super()._create_payload(messages, generate, gen_kwargs, seed, eos, **kwargs)
        if not generate:
            # Two tokens may have the same text, under which one would hide the other.
            return {**payload, "return_tokens_as_token_ids": True}
        asked = {key: value for key, value in payload.items() if key not in _OF_TRANSFORMERS}
        return {**_NEUTRAL, "stop_token_ids": self._stop_token_ids, **asked}


def _begins_with_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts a first token, and nothing else, around a text."""
    bare, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    return tokenizer.bos_token_id is not None and whole == [tokenizer.bos_token_id, *bare]


def _stop_token_ids(candidate: Candidate) -> list[int]:
    """Tokens that end an answer according to the candidate's own files; the server knows those of its first model."""
    try:
        content = json.loads((Path(candidate.tokenizer) / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    ends = content.get("eos_token_id") if isinstance(content, Mapping) else None
    listed = ends if isinstance(ends, list) else [ends]
    return [token for token in listed if isinstance(token, int)]

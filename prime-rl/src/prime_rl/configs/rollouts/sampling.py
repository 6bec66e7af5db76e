"""How rollouts are sampled: for training and for evaluation."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.distillation import MAX_TOP_K
from prime_rl.configs.ranges import (
    LARGEST,
    Count,
    EvalTemperature,
    Fraction,
    RepetitionPenalty,
    Seed,
    TrainTemperature,
    WholeNumber,
)
from prime_rl.utils.pydantic_config import BaseConfig, raise_faults

SAMPLED_OTHERWISE: Mapping[str, tuple[Any, str]] = {
    "repetition_penalty": (1.0, "let a reward, or the filter `repetition`, count against repetition"),
    "presence_penalty": (0.0, "let a reward, or the filter `repetition`, count against repetition"),
    "frequency_penalty": (0.0, "let a reward, or the filter `repetition`, count against repetition"),
    "min_tokens": (0, "let a reward ask for the length"),
    "logit_bias": ({}, "let a reward ask for the words"),
    "bad_words": ([], "let a reward ask for the words"),
    "allowed_token_ids": ([], "let a reward ask for the words"),
    "thinking_token_budget": (None, "let a reward ask for the length"),
    **dict.fromkeys(
        (
            "response_format",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structural_tag",
        ),
        (None, "let a reward ask for the format"),
    ),
    "logits_processors": ([], "training cannot apply them"),
    "use_beam_search": (False, "beam search does not sample"),
}
"""Arguments of a request that change which tokens are sampled, their neutral values, and what serves instead.

The trainer computes log-probabilities from the temperature alone. With one of these, the tokens come from another
distribution than the one that it trains, so the ratio of both is not 1 even for a policy that has not changed."""

FIXED_BY_TRAINING: Mapping[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "top_logprobs": (),
    "return_tokens_as_token_ids": (),
    "logprobs": (),
    "return_token_ids": (),
}
"""Arguments of a request that training sets itself, and the values that agree with it."""
OF_A_KEY = ("repetition_penalty", "min_tokens")
"""Arguments that `SamplingConfig` has keys for, which replace those in `extra_body`."""
HARMLESS = frozenset(
    (
        "stop stop_token_ids ignore_eos include_stop_str_in_output skip_special_tokens "
        "spaces_between_special_tokens chat_template_kwargs add_generation_prompt continue_final_message "
        "add_special_tokens chat_template documents mm_processor_kwargs user metadata store priority "
        "cache_salt request_id service_tier logprobs return_token_ids "
        "prompt_logprobs max_tokens max_completion_tokens seed n stream tools tool_choice "
        "parallel_tool_calls reasoning_effort truncate_prompt_tokens echo detokenize "
    ).split()
)
"""Arguments that do not change the distribution of a token after those before it."""


class TemperatureSchedulerConfig(BaseConfig):
    """A temperature that changes over the run."""

    type: Literal["linear", "cosine"] = "linear"
    """Shape of the curve."""

    start_temperature: TrainTemperature
    """Temperature at step 0."""

    end_temperature: TrainTemperature
    """Temperature at the last step. Above 0, because the trainer divides logits by it."""

    total_steps: Count | None = None
    """Number of steps. None takes `max_steps`."""


class SamplingConfig(BaseConfig):
    """How training rollouts are sampled. The trainer computes the probabilities of the same distribution."""

    temperature: TrainTemperature | None = None
    """Temperature, by which the trainer divides logits. None is 1.0, unless `temp_scheduler` is set."""

    temp_scheduler: TemperatureSchedulerConfig | None = None
    """Schedule of the temperature. None keeps it constant."""

    repetition_penalty: RepetitionPenalty = 1.0
    """Penalty for repeated tokens. 1 is no penalty. Others make training off-policy, with a warning."""

    max_tokens: Count | None = None
    """Maximum tokens per turn. None leaves it to the server."""

    min_tokens: WholeNumber = 0
    """Minimum tokens per turn. Above 0 makes training off-policy, with a warning."""

    top_k: int | None = Field(None, ge=1, lt=MAX_TOP_K)
    """Sample from the k likeliest tokens. The engine reports them with every token, and the trainer normalizes over
    the same ones. None samples from all."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities sum to at least this. Below 1 it needs `top_k`."""

    min_p: Fraction = 0.0
    """Exclude tokens below this fraction of the likeliest token's probability. Above 0 it needs `top_k`."""

    top_logprobs: int | None = Field(None, ge=1, lt=MAX_TOP_K)
    """Number of likeliest tokens that the engine reports with every token, for `trainer.loss.measure = "top_k_tv"` and
    `"top_k_kl"`. `rl` sets it to `trainer.loss.top_k`. None reports none, unless `top_k` is set."""

    seed: Seed | None = None
    """Seed of the sampler. Each group of rollouts starts from a hash of it and of the example that was drawn, and its
    rollouts differ. None leaves it to the server."""

    extra_body: dict[str, Any] = Field({})
    """Additional keys of the request body. A warning names those that make training off-policy."""

    @property
    def reported(self) -> int:
        """Number of tokens that the engine is asked for with every token: one more than are wanted, for the token
        itself. 0 asks for none."""
        wanted = max(self.top_k or 0, self.top_logprobs or 0)
        return wanted + 1 if wanted else 0

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if self.top_k is None and (cut := [f"{n} = {v:g}" for n, v, all_ in self._cuts() if v != all_]):
            raise_faults(
                [
                    f"{' and '.join(cut)} needs top_k, such as top_k = 50: the engine reports the tokens that may be "
                    f"sampled, at most {MAX_TOP_K - 1}, and the trainer normalizes over them"
                ]
            )
        return self

    def _cuts(self) -> Iterator[tuple[str, float, float]]:
        yield "top_p", self.top_p, 1.0
        yield "min_p", self.min_p, 0.0


def training_warnings(sampling: SamplingConfig) -> Iterator[str]:
    """One line for each setting with which tokens are sampled from another distribution than the trained one."""
    section = "orchestrator.sampling"
    given = {OF_A_KEY[0]: sampling.repetition_penalty, OF_A_KEY[1]: sampling.min_tokens}
    given |= {f"extra_body.{name}": value for name, value in sampling.extra_body.items() if name not in OF_A_KEY}
    for name in sampling.extra_body:
        if name in OF_A_KEY:
            yield f"{section}.extra_body.{name} has no effect on training: {section}.{name} is sent"
    for key, value in given.items():
        name, shown = key.removeprefix("extra_body."), f"{section}.{key} = {_short(value)}"
        if name in HARMLESS:
            continue
        if name in FIXED_BY_TRAINING:
            if value not in FIXED_BY_TRAINING[name]:
                has_key = name in SamplingConfig.model_fields
                instead = f"set {section}.{name}" if has_key else "training sets it"
                yield f"{shown} has no effect on training: {instead}; [orchestrator.eval.sampling] may set it"
        elif name in SAMPLED_OTHERWISE:
            neutral, instead = SAMPLED_OTHERWISE[name]
            if value is not None and value != neutral:
                yield (
                    f"{shown} makes training off-policy: tokens are sampled with it, and trained without it; "
                    f"remove it, and {instead}; [orchestrator.eval.sampling] may use it"
                )
        else:
            yield (
                f"{shown} is sent to the servers as it is: if it changes which tokens are sampled, remove it, because "
                "the trainer knows the temperature alone"
            )


_SHOWN_CHARS = 60


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."


class EvalSamplingConfig(BaseConfig):
    """How evaluation rollouts are sampled. None leaves a value to the server.

    Evaluation during training takes `max_tokens`, `min_tokens`, `repetition_penalty` and `extra_body` from
    `orchestrator.sampling` if it does not set them itself.
    """

    temperature: EvalTemperature | None = None
    """Temperature."""

    repetition_penalty: RepetitionPenalty | None = None
    """Penalty for repeated tokens. 1 is no penalty."""

    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities sum to at least this."""

    top_k: int | None = Field(None, ge=-1, le=LARGEST)
    """Sample from the k most likely tokens. -1 and 0 sample from all."""

    min_p: Fraction | None = None
    """Exclude tokens below this fraction of the most likely token's probability."""

    max_tokens: Count | None = None
    """Maximum tokens per turn."""

    min_tokens: WholeNumber | None = None
    """Minimum tokens per turn."""

    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None
    """Reasoning effort."""

    seed: Seed | None = None
    """Seed of the sampler. Each rollout uses a hash of it and of the rollout's environment, row and number, so rollouts
    differ, and another evaluation with the seed repeats them."""

    extra_body: dict[str, Any] = Field({})
    """Additional keys of the request body."""

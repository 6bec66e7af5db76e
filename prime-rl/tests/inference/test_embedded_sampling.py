"""Sampling: truncation, penalties, and drawing from the distribution."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from prime_rl.inference.embedded.engine.generation import GenerationRequest, SamplingParams, Sequence
from prime_rl.inference.embedded.engine.sampling import BatchSampler, Drawn, prompt_logprobs

LOGITS = [2.0, 1.0, 0.0, -1.0, -torch.inf]
CPU = torch.device("cpu")


def sequences(*params: SamplingParams, generated: tuple[int, ...] = ()) -> list[Sequence]:
    made = [GenerationRequest(prompt=(0, 2), params=one, seed=row).sequences[0] for row, one in enumerate(params)]
    for sequence in made:
        for token in generated:
            sequence.append(token, 0.0, None, version=0)
    return made


def draw(rows: list[Sequence], logits: list[float] = LOGITS) -> Drawn:
    return BatchSampler([row.params for row in rows], len(logits), CPU).draw(torch.tensor([logits] * len(rows)), rows)


def shares(params: SamplingParams, generated: tuple[int, ...] = (), count: int = 4000) -> dict[int, float]:
    """Relative frequency of each token in many draws."""
    rows = sequences(params, generated=generated)
    sampler = BatchSampler([params], len(LOGITS), CPU)
    drawn = Counter(sampler.draw(torch.tensor([LOGITS]), rows).tokens[0] for _ in range(count))
    return {token: times / count for token, times in drawn.items()}


def softmax(logits: dict[int, float]) -> dict[int, float]:
    total = sum(math.exp(value) for value in logits.values())
    return {token: math.exp(value) / total for token, value in logits.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0: 2.0, 1: 1.0, 2: 0.0, 3: -1.0}),
        ({"temperature": 0.5}, {0: 4.0, 1: 2.0, 2: 0.0, 3: -2.0}),
        ({"top_k": 2}, {0: 2.0, 1: 1.0}),
        ({"top_p": 0.7}, {0: 2.0, 1: 1.0}),
        ({"top_p": 0.5}, {0: 2.0}),
        ({"min_p": 0.2}, {0: 2.0, 1: 1.0}),
        ({"top_k": 3, "top_p": 0.95}, {0: 2.0, 1: 1.0, 2: 0.0}),
        ({"repetition_penalty": 2.0}, {0: 1.0, 1: 1.0, 2: 0.0, 3: -1.0}),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_processed_distribution(options, expected) -> None:
    found = shares(SamplingParams(max_tokens=10_000, **options))
    assert found == pytest.approx(softmax(expected), abs=0.03)


def test_presence_and_frequency_penalties_count_only_generated_tokens() -> None:
    params = SamplingParams(max_tokens=10_000, presence_penalty=0.5, frequency_penalty=0.25)
    found = shares(params, generated=(1, 1))
    assert found == pytest.approx(softmax({0: 2.0, 1: 0.0, 2: 0.0, 3: -1.0}), abs=0.03)


def test_logprobs_are_those_of_the_processed_distribution() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.5, top_k=2, top_logprobs=2)
    drawn = draw(sequences(params))
    expected = softmax({0: 4.0, 1: 2.0})
    assert drawn.logprobs[0] == pytest.approx(math.log(expected[drawn.tokens[0]]), abs=1e-6)
    assert [token for token, _ in drawn.top[0]] == [0, 1]


def test_a_greedy_row_among_others_is_greedy_and_scored_at_temperature_one() -> None:
    rows = sequences(SamplingParams(max_tokens=9, temperature=0, top_k=1), SamplingParams(max_tokens=9, temperature=2))
    drawn = draw(rows)
    assert drawn.tokens[0] == 0
    assert drawn.logprobs[0] == pytest.approx(math.log(softmax({0: 2.0, 1: 1.0, 2: 0.0, 3: -1.0})[0]), abs=1e-6)


def test_stop_tokens_are_impossible_before_the_minimum_length() -> None:
    params = SamplingParams(max_tokens=9, temperature=0, min_tokens=1, stop_token_ids=frozenset({0}))
    rows = sequences(params)
    assert draw(rows).tokens == [1]
    rows[0].append(1, 0.0, None, version=0)
    assert draw(rows).tokens == [0]


class Highest:
    """A generator that returns the largest value, for which rounding could step past the last token."""

    def random(self) -> float:
        return 1.0 - 2.0**-53


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    rows = sequences(SamplingParams(max_tokens=9))
    rows[0].rng = Highest()
    assert draw(rows).tokens == [3]


@pytest.mark.parametrize("vocab_size", [2, 255, 256, 4096, 4097, 5000, 49152, 151_936])
def test_draws_of_any_vocabulary_are_those_of_the_cumulative_weights_in_float64(vocab_size: int) -> None:
    logits = torch.randn((70, vocab_size), generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 1::3] = -torch.inf
    rows = sequences(*[SamplingParams(max_tokens=4)] * len(logits))
    uniforms = torch.tensor([sequence.rng.random() for sequence in sequences(*(row.params for row in rows))])
    drawn = BatchSampler([row.params for row in rows], vocab_size, CPU).draw(logits, rows)
    exact = logits.double().softmax(-1)
    cdf = exact.cumsum(-1).gather(1, torch.tensor(drawn.tokens)[:, None]).squeeze(1)
    own = exact.gather(1, torch.tensor(drawn.tokens)[:, None]).squeeze(1)
    assert (own > 0).all()
    # The uniform number lies in the token's part of the unit interval, as far as float32 can tell.
    assert (uniforms < cdf + 1e-6).all()
    assert (uniforms >= cdf - own - 1e-6).all()
    assert drawn.logprobs == pytest.approx(own.log().tolist(), abs=2e-5)


@pytest.mark.parametrize("vocab_size", [128, 49152])
def test_a_draw_does_not_depend_on_the_other_rows(vocab_size: int) -> None:
    logits = torch.randn((70, vocab_size), generator=torch.Generator().manual_seed(0))
    variants = [
        SamplingParams(
            max_tokens=4,
            temperature=row % 3 / 2,
            repetition_penalty=1 + row % 4,
            min_tokens=row % 5,
            stop_token_ids=frozenset({row}),
            top_logprobs=3 if row < 3 else 0,
        )
        for row in range(70)
    ]
    rows = sequences(*variants)
    together = BatchSampler(variants, vocab_size, CPU).draw(logits, rows)
    for index, alone in enumerate(sequences(*variants)):
        single = BatchSampler([alone.params], vocab_size, CPU).draw(logits[index : index + 1], [alone])
        assert single.tokens == [together.tokens[index]]
        assert single.logprobs == pytest.approx([together.logprobs[index]], abs=1e-6)
        count = alone.params.top_logprobs
        wanted = [token for token, _ in together.top[index][:count]]
        assert [token for token, _ in (single.top or [[]])[0]] == wanted
        assert len(wanted) == count


def test_prompt_logprobs_carry_ranks() -> None:
    (scored,) = prompt_logprobs([torch.tensor([LOGITS])], [4, 2], num_top=1)
    assert (scored.token_id, scored.rank) == (2, 3)
    assert scored.logprob == pytest.approx(math.log(softmax({0: 2.0, 1: 1.0, 2: 0.0, 3: -1.0})[2]), abs=1e-6)
    assert scored.top[0][0] == 0


def test_the_samples_of_a_request_differ_for_a_negative_seed_too() -> None:
    request = GenerationRequest(prompt=(0,), params=SamplingParams(max_tokens=1), seed=-2, n=5)
    assert len({sequence.rng.random() for sequence in request.sequences}) == 5

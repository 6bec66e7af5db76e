"""Sampling contract of both engines: each argument's distribution and its exact log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

PROMPT = [12, 9, 16, 16, 19]
BIAS = {"7": 3.0, "30": -100.0, "41": 2.5}


def biased(logits: Tensor, generated: list[int]) -> Tensor:
    for token, bias in BIAS.items():
        logits[int(token)] += bias
    return logits


def top_three(logits: Tensor, generated: list[int]) -> Tensor:
    return logits.masked_fill(logits < logits.topk(3).values[-1], -torch.inf)


def likely(logits: Tensor, generated: list[int]) -> Tensor:
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < 0.3 * probs.max(), -torch.inf)


def nucleus(logits: Tensor, generated: list[int]) -> Tensor:
    probs, tokens = logits.softmax(-1).sort(descending=True)
    beyond = tokens[probs.cumsum(-1) - probs >= 0.4]
    logits[beyond] = -torch.inf
    return logits


def counted(logits: Tensor, generated: list[int]) -> Tensor:
    for token in set(generated):
        logits[token] -= 0.75 + 0.5 * generated.count(token)
    return logits


def repeated(logits: Tensor, generated: list[int]) -> Tensor:
    seen = sorted({*PROMPT, *generated})
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
    return logits


def warm_and_biased(logits: Tensor, generated: list[int]) -> Tensor:
    return repeated(biased(logits, generated), generated) / 0.6


@pytest.mark.parametrize(
    ("options", "process"),
    [
        ({"logit_bias": BIAS}, biased),
        ({"top_k": 3}, top_three),
        ({"min_p": 0.3}, likely),
        ({"top_p": 0.4}, nucleus),
        ({"presence_penalty": 0.75, "frequency_penalty": 0.5}, counted),
        ({"repetition_penalty": 1.5}, repeated),
        ({"logit_bias": BIAS, "repetition_penalty": 1.5, "temperature": 0.6}, warm_and_biased),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value),
)
def test_logprobs_are_those_of_the_requested_distribution(server, reference, options, process) -> None:
    (choice,) = server.complete(PROMPT, max_tokens=24, seed=4, ignore_eos=True, **options)["choices"]
    found = choice["logprobs"]["token_logprobs"]
    expected = processed_logprobs(reference, choice["token_ids"], process)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=2e-4, rtol=1e-4)


def processed_logprobs(reference: Any, completion: list[int], process: Callable[..., Tensor]) -> list[float]:
    with torch.no_grad():
        rows = reference.model(torch.tensor([PROMPT + completion])).logits[0, len(PROMPT) - 1 : -1]
    return [
        process(row.clone(), completion[:place]).log_softmax(-1)[token].item()
        for place, (row, token) in enumerate(zip(rows, completion, strict=True))
    ]


def test_a_bias_can_force_and_forbid_tokens(server, reference) -> None:
    forced = server.complete(PROMPT, max_tokens=6, seed=1, ignore_eos=True, logit_bias={"50": 100})["choices"][0]
    assert forced["token_ids"] == [50] * 6
    likeliest = reference.greedy(PROMPT, 1)[0]
    options = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    other = server.complete(PROMPT, logit_bias={str(likeliest): -100}, **options)["choices"][0]
    assert other["token_ids"] != [likeliest]


def test_a_bias_changes_its_own_request_only(server, reference) -> None:
    plain = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    server.complete(PROMPT, logit_bias={"50": 100}, n=4, **plain | {"temperature": 1})
    (choice,) = server.complete(PROMPT, **plain)["choices"]
    assert choice["token_ids"] == reference.greedy(PROMPT, 8)


@pytest.mark.parametrize("bias", [{"1000": 1.0}, {"x": 1.0}], ids=str)
def test_a_bias_for_an_invalid_token_is_refused(server, bias) -> None:
    answer = server.client.post("/v1/completions", json={"model": server.model, "prompt": PROMPT, "logit_bias": bias})
    assert answer.status_code == 400
    assert "logit_bias" in answer.text


def test_a_seed_reproduces_its_samples(server) -> None:
    def samples(seed: int) -> list[list[int]]:
        choices = server.complete(PROMPT, n=3, max_tokens=12, seed=seed, ignore_eos=True)["choices"]
        return [choice["token_ids"] for choice in choices]

    assert samples(6) == samples(6) != samples(60)


def test_a_completion_has_at_least_its_minimum_length(server, reference) -> None:
    stop = reference.greedy(PROMPT, 1)[0]
    options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "stop_token_ids": [stop]}
    assert server.complete(PROMPT, **options)["choices"][0]["token_ids"] == [stop]
    longer = server.complete(PROMPT, min_tokens=5, **options)["choices"][0]["token_ids"]
    assert len(longer) >= 5
    assert stop not in longer[:5]


def test_end_of_sequence_ends_a_completion_unless_it_is_ignored(server) -> None:
    end = server.post("/tokenize", {"prompt": "<|im_end|>"})["tokens"][0]
    bias = {str(end): 100}
    (ended,) = server.complete(PROMPT, max_tokens=5, logit_bias=bias)["choices"]
    assert (ended["token_ids"], ended["finish_reason"], ended["stop_reason"]) == ([end], "stop", None)
    assert ended["text"] == ""
    (ignored,) = server.complete(PROMPT, max_tokens=5, logit_bias=bias, ignore_eos=True)["choices"]
    assert (ignored["token_ids"], ignored["finish_reason"]) == ([end] * 5, "length")


def test_a_stop_token_is_in_the_text_if_stops_are_included(server, reference) -> None:
    expected = reference.greedy(PROMPT, 12)
    stop = expected[5]
    options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "stop_token_ids": [stop]}
    without = server.complete(PROMPT, **options)["choices"][0]
    included = server.complete(PROMPT, include_stop_str_in_output=True, **options)["choices"][0]
    assert included["token_ids"] == without["token_ids"]
    assert included["text"].startswith(without["text"])
    assert len(included["text"]) == len(without["text"]) + 1

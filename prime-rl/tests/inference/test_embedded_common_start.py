"""Shared-prefix attention: groups rows with the same prompt and does not change results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.inference.embedded.engine.attention import Scoring, SlotStep, attend
from prime_rl.inference.embedded.engine.cache import KVSlots
from prime_rl.inference.embedded.engine.common_start import CommonStart, Origin
from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import Completion, GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model

CPU = torch.device("cpu")
HEADS, QUERIES, SIZE = 2, 3, 8
GROUPS = [16, 12, 10, 1, 1]
"""Number of rows in each group."""
LENGTH = 18
"""Number of tokens shared within each group."""
PROMPTS = [tuple((5 + 7 * index + 3 * place) % 64 for place in range(20 + 2 * index)) for index in range(4)]


def origins_of(groups: list[int], length: int = LENGTH) -> list[Origin]:
    """Origins of all rows, with the groups interleaved."""
    waiting = [[Origin(number, length)] * count for number, count in enumerate(groups)]
    return [group.pop() for _ in range(max(groups)) for group in waiting if group]


@pytest.mark.parametrize("window", [None, 7])
def test_shared_prefix_attention_equals_attention_per_row(window) -> None:
    origins = origins_of(GROUPS)
    slots = KVSlots(1 << 24, CPU)
    slots.reserve(len(origins), 40)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randn(2, len(GROUPS), HEADS, LENGTH, SIZE, generator=generator)
    stored = slots.layer(0, *[torch.zeros(1, HEADS, SIZE)] * 2)
    for part, slot in enumerate(stored):
        slot.copy_(torch.randn(slot.shape, generator=generator))
        slot[: len(origins), :, :LENGTH] = starts[part, [origin.number for origin in origins]]
    # Groups of one row may be shorter than the shared length.
    positions = [LENGTH + row % 11 if GROUPS[origin.number] > 1 else 4 + row for row, origin in enumerate(origins)]
    new = tuple(
        torch.randn(len(origins), heads, SIZE, generator=generator) for heads in (HEADS * QUERIES, HEADS, HEADS)
    )
    common = CommonStart.from_origins(origins, CPU)
    assert common is not None
    apart, together = (
        attend(SlotStep(slots, positions, None, common_start=one), 0, new, Scoring(0.3, window))
        for one in (None, common)
    )
    torch.testing.assert_close(together, apart, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("groups", "length"),
    [([1] * 40, 50), ([20, 20], 5), ([4, 4], 50), ([30, *[1] * 12], 50)],
    ids=["nothing in common", "short", "few rows", "mostly alone"],
)
def test_rows_are_not_grouped_if_that_would_be_slower(groups, length) -> None:
    assert CommonStart.from_origins(origins_of(groups, length), CPU) is None


@pytest.fixture(params=["qwen3_with_tied_head", "mistral_with_window"])
def directories(request: pytest.FixtureRequest, small_model: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """Directories of two versions of a model's weights."""
    newer = tmp_path / "step_1"
    newer.symlink_to(small_model(request.param, seed=1))
    return small_model(request.param), newer


@torch.no_grad()
def assert_drawn_from(directory: Path, prompt: tuple[int, ...], completion: Completion) -> None:
    """Check that every token has the model's log-probability."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.tensor([*prompt, *completion.token_ids])
    logprobs = model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, tokens[len(prompt) :, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(completion.logprobs), own, atol=1e-4, rtol=0)


def test_groups_of_different_weight_versions_are_not_merged(directories) -> None:
    start, newer = directories
    found: list[CommonStart | None] = []

    def find_common_start(origins: Sequence[Origin], device: torch.device) -> CommonStart | None:
        found.append(CommonStart.from_origins(origins, device, fewest_rows=8))
        return found[-1]

    model, source = load_model(str(start), "float32", CPU)
    engine = Engine(ModelRunner(model, 1 << 28, source, find_common_start))

    def submit(max_tokens: int) -> list:
        """Run groups of ten samples that end at different lengths."""
        engine.pause().result()
        return [
            engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=max_tokens + 3 * row), seed=row))
            for row in range(10)
            for prompt in PROMPTS
        ]

    with engine.in_thread():
        first = submit(200)
        engine.resume().result()
        engine.submit(GenerationRequest((1, 2, 3), SamplingParams(max_tokens=4), seed=0)).result()
        engine.pause().result()
        engine.update_weights(newer).result()
        second = submit(10)
        engine.resume().result()
        answers = [[future.result().completions[0] for future in wave] for wave in (first, second)]
    assert any(found)
    for prompt, completion in zip(PROMPTS * 10, answers[1], strict=True):
        assert_drawn_from(newer, prompt, completion)
    for prompt, completion in zip(PROMPTS * 10, answers[0], strict=True):
        end = completion.versions[0].end
        before = Completion(completion.token_ids[:end], completion.logprobs[:end], [], "length", None, [])
        assert_drawn_from(start, prompt, before)

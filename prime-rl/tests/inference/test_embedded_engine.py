"""The embedded engine without HTTP: batching, memory, weight updates and shutdown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from prime_rl.inference.embedded.engine.attention import SCORES_AT_ONCE, PromptBatch, Scoring, SlotStep, attend
from prime_rl.inference.embedded.engine.cache import KVSlots
from prime_rl.inference.embedded.engine.common_start import CommonStart
from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import Completion, GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.model import TOKENS_AT_ONCE, ModelRunner, load_model
from prime_rl.inference.embedded.engine.scheduler import EngineLimits
from prime_rl.inference.embedded.engine.text import StopStringMatcher
from prime_rl.inference.embedded.engine.weights import read_weights
from prime_rl.inference.embedded.errors import EngineBusy, EngineError, EngineStopped, GenerationFailed
from prime_rl.inference.protocol import MAX_CONNECTIONS, MAX_TOTAL_SAMPLES

ARCHITECTURES = ("qwen3", "qwen2", "llama", "mistral_with_window", "qwen3_moe")
PROMPTS = [tuple((5 + 7 * index + place) % 64 for place in range(2 + 3 * index)) for index in range(6)]
PLENTY_BYTES = 1 << 30


def runner_of(directory: Path, budget_bytes: int = PLENTY_BYTES) -> ModelRunner:
    model, source = load_model(str(directory), "float32", torch.device("cpu"))
    return ModelRunner(model, budget_bytes, source)


@pytest.fixture(scope="module")
def qwen3_dir(small_model: Callable[..., Path]) -> Path:
    return small_model("qwen3")


def request_of(prompt: tuple[int, ...], max_tokens: int = 20, n: int = 1, temperature: float = 0) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    return GenerationRequest(prompt=prompt, params=params, seed=0, n=n)


def answers(engine: Engine, prompts: list[tuple[int, ...]], max_tokens: int = 20) -> list[Completion]:
    """Greedy completions of prompts that run concurrently."""
    engine.pause().result()
    futures = [engine.submit(request_of(prompt, max_tokens)) for prompt in prompts]
    engine.resume().result()
    return [future.result().completions[0] for future in futures]


@torch.no_grad()
def assert_greedy(model: torch.nn.Module, prompt: tuple[int, ...], completion: Completion) -> None:
    """Check that every token is the model's most likely one, up to rounding, and has the model's log-probability."""
    tokens = torch.tensor([*prompt, *completion.token_ids])
    logprobs = model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, tokens[len(prompt) :, None]).squeeze(1)
    torch.testing.assert_close(own, logprobs.amax(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), own, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_mixed_batch_equals_transformers(name, small_model) -> None:
    directory = small_model(name)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with Engine(runner_of(directory)).in_thread() as engine:
        for prompt, completion in zip(PROMPTS, answers(engine, PROMPTS), strict=True):
            assert_greedy(reference, prompt, completion)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_in_hub_naming_replace_the_live_ones(name, small_model) -> None:
    runner = runner_of(small_model(name))
    newer = small_model(name, seed=1)
    runner.load_weights(read_weights(newer), newer)
    expected = AutoModelForCausalLM.from_pretrained(newer, dtype=torch.float32).state_dict()
    for key, tensor in runner.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[key], atol=0, rtol=0)


def test_a_model_with_another_attention_is_refused_before_it_serves(small_model) -> None:
    with pytest.raises(EngineError, match="DiffLlamaForCausalLM has an attention that the embedded engine does not"):
        runner_of(small_model("diffllama"))


def test_more_requests_than_rows_wait_their_turn(qwen3_dir) -> None:
    reference = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    with Engine(runner_of(qwen3_dir), EngineLimits(max_running=2, max_prefill_tokens=8)).in_thread() as engine:
        for prompt, completion in zip(PROMPTS, answers(engine, PROMPTS), strict=True):
            assert_greedy(reference, prompt, completion)


def test_sequences_that_outgrow_the_memory_are_preempted_and_prefilled_again(qwen3_dir) -> None:
    reference = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    bytes_per_token = runner_of(qwen3_dir).slots.bytes_per_token
    # The budget fits 32 rows of 128 tokens, but only 16 rows of 160.
    runner = runner_of(qwen3_dir, budget_bytes=32 * 128 * bytes_per_token)
    prompts = [(row % 64, 3, row // 2) for row in range(20)]
    with Engine(runner).in_thread() as engine:
        for prompt, completion in zip(prompts, answers(engine, prompts, max_tokens=140), strict=True):
            assert_greedy(reference, prompt, completion)
        assert runner.slots.length == 160
        assert runner.slots.rows == 16


def test_samples_of_a_prompt_that_fills_its_rows_equal_transformers(qwen3_dir) -> None:
    reference = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    prompts = [tuple((3 * place + length) % 64 for place in range(length)) for length in (32, 64, 128, 256)]
    with Engine(runner_of(qwen3_dir)).in_thread() as engine:
        for prompt in prompts:
            for completion in engine.submit(request_of(prompt, max_tokens=3, n=4)).result().completions:
                assert_greedy(reference, prompt, completion)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 128, 129, 1000])
def test_a_row_is_copied_and_kept_while_rows_grow(length) -> None:
    slots = KVSlots(PLENTY_BYTES, torch.device("cpu"))
    slots.reserve(3, length)
    new = torch.zeros(1, 2, 4)
    stored = torch.randn(slots.rows, 2, slots.length, 4)[:, :, :length]
    for tensor in slots.layer(0, new, new):
        tensor[:, :, :length] = stored
    slots.copy(2, [0, 1], length)
    slots.reserve(40, length + 100)
    for tensor in slots.layer(0, new, new):
        torch.testing.assert_close(tensor[:3, :, :length], stored[2].expand(3, -1, -1, -1), atol=0, rtol=0)
        assert tensor.shape[2] >= length + 100


@given(length=st.integers(1, 1 << 20))
def test_rows_grow_in_few_steps_and_waste_little(length) -> None:
    slots = KVSlots(PLENTY_BYTES, torch.device("cpu"))
    slots.reserve(1, length)
    assert length <= slots.length <= max(length + 31, 1.25 * length)
    slots.reserve(1, slots.length + 1)
    assert slots.length >= min(1.125 * length, length + 32)


class CountingRunner(ModelRunner):
    """Counts the prompts that it prefills."""

    num_prompts = 0

    def forward(self, running, prompts, *rest, **options):
        self.num_prompts += len(prompts)
        return super().forward(running, prompts, *rest, **options)


def test_samples_of_one_prompt_prefill_it_once(qwen3_dir) -> None:
    model, _ = load_model(str(qwen3_dir), "float32", torch.device("cpu"))
    runner = CountingRunner(model, PLENTY_BYTES)
    runner.num_prompts = 0
    with Engine(runner).in_thread() as engine:
        engine.pause().result()
        both = [engine.submit(request_of(PROMPTS[3], n=4, temperature=1)) for _ in range(2)]
        engine.resume().result()
        first, second = [[c.token_ids for c in future.result().completions] for future in both]
    assert runner.num_prompts == 1
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 4


class LargestLogits(TorchDispatchMode):
    """Notes how many rows of logits an operator made at most."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (self.vocab_size,):
            self.rows = max(self.rows, result.shape[0])
        return result


def test_log_probabilities_of_long_prompts_take_the_memory_of_a_few_hundred_tokens(tmp_path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    reference = LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=2048, **sizes))
    reference.save_pretrained(tmp_path)
    prompts = [tuple((start + 7 * place) % 1000 for place in range(length)) for start, length in ((3, 900), (5, 600))]
    runner = runner_of(tmp_path)
    engine = Engine(runner)
    requests = [request_of(prompt, max_tokens=2) for prompt in prompts]
    for request in requests:
        request.num_prompt_logprobs = 0
        engine.submit(request).add_done_callback(lambda _: engine.stop() if engine.load == 0 else None)
    with LargestLogits(1000) as largest:
        engine.run()
    assert TOKENS_AT_ONCE <= largest.rows < 300
    for request in requests:
        tokens = torch.tensor(request.prompt)
        with torch.no_grad():
            logprobs = reference(tokens[None]).logits[0, :-1].log_softmax(-1)
        found = torch.tensor([token.logprob for token in request.prompt_logprobs or ()])
        torch.testing.assert_close(found, logprobs.gather(1, tokens[1:, None]).squeeze(1), atol=1e-4, rtol=0)


def test_a_full_queue_refuses(qwen3_dir) -> None:
    engine = Engine(runner_of(qwen3_dir), EngineLimits(max_running=2, max_waiting=3))
    engine.submit(request_of(PROMPTS[0], n=5))
    with pytest.raises(EngineBusy):
        engine.submit(request_of(PROMPTS[1]))


def test_a_call_on_every_connection_fits_into_the_queue_whoever_sends_them(qwen3_dir) -> None:
    engine = Engine(runner_of(qwen3_dir))
    for _ in range(MAX_CONNECTIONS):
        engine.submit(request_of(PROMPTS[0]))
    assert engine.load == MAX_CONNECTIONS
    engine.submit(request_of(PROMPTS[0], n=MAX_TOTAL_SAMPLES))


def test_a_cancelled_request_leaves_the_batch_and_the_others_continue(qwen3_dir) -> None:
    with Engine(runner_of(qwen3_dir)).in_thread() as engine:
        engine.pause().result()
        unwanted = engine.submit(request_of(PROMPTS[0], max_tokens=200))
        wanted = engine.submit(request_of(PROMPTS[1], max_tokens=10))
        assert unwanted.cancel()
        engine.resume().result()
        assert len(wanted.result().completions[0].token_ids) == 10
        assert engine.load == 0


def test_a_request_cancelled_between_the_inbox_and_the_step_is_not_generated(qwen3_dir, monkeypatch) -> None:
    with Engine(runner_of(qwen3_dir)).in_thread() as engine:
        wanted, unwanted = request_of(PROMPTS[0], max_tokens=3), request_of(PROMPTS[1])
        ahead: list[str] = []
        read_clock = time.perf_counter

        def clock() -> float:
            """A step reads the clock when it ends, and the next one after the inbox was emptied."""
            if ahead and ahead.pop() == "the next step begins":
                engine.submit(unwanted)
                assert unwanted.result.cancel()
            return read_clock()

        def first_token() -> None:
            wanted.on_progress = None
            ahead.extend(["the next step begins", "this step ends"])

        wanted.on_progress = first_token
        monkeypatch.setattr(time, "perf_counter", clock)
        assert len(engine.submit(wanted).result().completions[0].token_ids) == 3
        engine.pause().result()
    assert (unwanted.sequences[0].num_generated, ahead) == (0, [])


def test_stopping_fails_pending_requests_and_calls_to_sleep(qwen3_dir) -> None:
    """A server cancels calls that are open when it stops."""
    with Engine(runner_of(qwen3_dir)).in_thread() as engine:
        engine.pause().result()
        left, asleep = engine.sleep(), engine.sleep()
        assert left.cancel()
        engine.resume().result()
        asleep.result()
        engine.update_weights(None).result()
        engine.pause().result()
        waiting = engine.submit(request_of(PROMPTS[0]))
        left, asleep = engine.sleep(), engine.sleep()
        assert left.cancel()
        engine.pause().result()
    for pending in (waiting, asleep):
        with pytest.raises(EngineStopped):
            pending.result()
    with pytest.raises(EngineStopped):
        engine.submit(request_of(PROMPTS[0]))


def test_weights_that_produce_nan_fail_the_request_but_not_the_engine(qwen3_dir, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(qwen3_dir / "model.safetensors")
    save_file({key: tensor * torch.nan for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with Engine(runner_of(qwen3_dir)).in_thread() as engine:
        engine.update_weights(tmp_path).result()
        with pytest.raises(GenerationFailed, match="version 1"):
            engine.submit(request_of(PROMPTS[5])).result()
        engine.update_weights(None).result()
        # A short sequence takes the row of the failed one, and a long one makes the batch read the row to its end.
        short, started, others = request_of(PROMPTS[0]), threading.Event(), []

        def join() -> None:
            if not started.is_set():
                others.append(engine.submit(request_of(PROMPTS[5])))
                started.set()

        short.on_progress = join
        assert len(engine.submit(short).result().completions[0].token_ids) == 20
        assert len(others[0].result().completions[0].token_ids) == 20


@pytest.mark.parametrize("shared", [0, 6])
def test_bfloat16_rows_give_the_same_read_whole_or_in_part(shared: int) -> None:
    """On a CPU, a product of parts of rows copies them, so rows are read whole unless much of them is empty."""
    count, positions = 40, [20 + row % 30 for row in range(40)]
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(2, count, 2, 64, 8, generator=generator)
    tensors[:, :, :, :shared] = tensors[:, :1, :, :shared]
    new = [torch.randn(count, heads, 8, generator=generator).bfloat16() for heads in (6, 2, 2)]
    results = []
    for width in (64, 512):
        slots = KVSlots(PLENTY_BYTES, torch.device("cpu"))
        slots.reserve(count, width)
        for slot, values in zip(slots.layer(0, *[torch.zeros(1, 2, 8).bfloat16()] * 2), tensors, strict=True):
            slot[:count, :, :64] = values
        common = CommonStart([range(count)], shared, torch.device("cpu")) if shared else None
        step = SlotStep(slots, positions, None, common_start=common)
        assert step.decode_span(slots.layer(0, *new[1:])[0])[1] == (64 if width == 64 else 50)
        results.append(attend(step, 0, (new[0], new[1], new[2]), Scoring(0.3)).float())
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 700])
def test_capped_scores_of_long_prompts_are_the_same_in_blocks(window: int | None) -> None:
    """Together, the prompts have more scores than are held at once."""
    lengths, heads = (1100, 1000, 900, 1050), 4
    scoring = Scoring(0.5, window, cap=2.0, sinks_H=torch.tensor([1.0, -1.0, 3.0, 0.0]))
    assert len(lengths) * heads * max(lengths) ** 2 > SCORES_AT_ONCE > heads * max(lengths) ** 2
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    prompts = [[torch.randn(length, each, 8, generator=generator) for each in (heads, 2, 2)] for length in lengths]

    def attended(members: Sequence[int]) -> torch.Tensor:
        slots = KVSlots(PLENTY_BYTES, device)
        slots.reserve(len(members), max(lengths))
        sizes = [lengths[index] for index in members]
        batch = PromptBatch(range(len(members)), sizes, [0] * len(members), 0, device)
        query, key, value = (torch.cat(parts) for parts in zip(*(prompts[index] for index in members), strict=True))
        return attend(SlotStep(slots, [], batch), 0, (query, key, value), scoring)

    together = attended(range(len(lengths)))
    torch.testing.assert_close(together, torch.cat([attended([index]) for index in range(len(lengths))]))


def unheld() -> GenerationRequest:
    """A request whose `top_k` does not fit into a tensor."""
    return GenerationRequest(prompt=PROMPTS[1], params=SamplingParams(max_tokens=20, top_k=2**63), seed=0)


def undecodable() -> GenerationRequest:
    """A request with a stop string whose tokens cannot be decoded."""

    def decode(tokens: Sequence[int]) -> str:
        raise RuntimeError(f"no text for {tokens}")

    request = request_of(PROMPTS[1])
    request.sequences[0].stop_matcher = StopStringMatcher(["x"], decode)
    return request


def unwatched() -> GenerationRequest:
    """A request whose listener raises."""

    def raises() -> None:
        raise RuntimeError("the event loop is closed")

    request = request_of(PROMPTS[1])
    request.on_progress = raises
    return request


@pytest.mark.parametrize("faulty", [unheld, undecodable, unwatched])
def test_an_error_in_one_request_fails_that_request_alone(qwen3_dir, faulty: Callable[[], GenerationRequest]) -> None:
    def together(*extra: GenerationRequest) -> list[list[int]]:
        engine.pause().result()
        others = [engine.submit(request_of(prompt, n=2, temperature=1)) for prompt in PROMPTS[2:4]]
        for request in extra:
            engine.submit(request)
        engine.resume().result()
        return [completion.token_ids for other in others for completion in other.result().completions]

    with Engine(runner_of(qwen3_dir)).in_thread() as engine:
        expected = together()
        request = faulty()
        assert together(request) == expected
        with pytest.raises(GenerationFailed, match=request.id):
            request.result.result()
        assert together() == expected
        assert engine.load == 0

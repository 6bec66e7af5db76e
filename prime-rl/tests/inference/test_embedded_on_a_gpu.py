"""The embedded engine on a GPU: decoding by CUDA graphs against decoding without, and nothing that waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.inference.embedded.engine.decode_graphs import Compute, CudaRecorder
from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import Completion, GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.lora import Adapter, AdapterLimits
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.scheduler import EngineLimits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MODELS = ("qwen3_with_tied_head", "qwen2", "llama", "mistral_with_window")
PROMPTS = [tuple((5 + 7 * index + place) % 64 for place in range(1 + 6 * index)) for index in range(24)]


def runner_of(directory: Path, dtype: str = "float32", enforce_eager: bool = False) -> ModelRunner:
    model, source = load_model(str(directory), dtype, torch.device("cuda"))
    return ModelRunner(model, 1 << 28, source, enforce_eager=enforce_eager)


@contextmanager
def running(runner: ModelRunner) -> Iterator[Engine]:
    # Fewer rows than prompts: some sequences join while others are being decoded.
    with Engine(runner, EngineLimits(max_running=18)).in_thread() as engine:
        yield engine


def answers(engine: Engine, temperature: float = 0.0, adapter: Adapter | None = None) -> list[Completion]:
    """Completions of different lengths, so that the batch shrinks row by row."""
    engine.pause().result()
    futures = [
        engine.submit(
            GenerationRequest(
                prompt,
                SamplingParams(max_tokens=20 + 5 * index, temperature=temperature),
                seed=index,
                adapter=adapter,
            )
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    engine.resume().result()
    return [future.result().completions[0] for future in futures]


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    """Token for token. Other numbers of rows round differently, so one answer of all may leave the other's path."""
    assert sum(one.token_ids != other.token_ids for one, other in zip(found, expected, strict=True)) <= 1
    for one, other in zip(found, expected, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        common = next((place for place, (token, twin) in enumerate(pairs) if token != twin), len(one.token_ids))
        ours, theirs = torch.tensor(one.logprobs[:common]), torch.tensor(other.logprobs[:common])
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_graphs_draw_the_tokens_that_eager_decoding_draws(name, small_model) -> None:
    with running(runner_of(small_model(name), enforce_eager=True)) as engine:
        expected = [answers(engine, temperature) for temperature in (0.0, 1.0)]
    runner = runner_of(small_model(name))
    with running(runner) as engine:
        found = [answers(engine, temperature) for temperature in (0.0, 1.0)]
    assert runner.graphs is not None
    assert not runner.graphs.is_off
    assert runner.graphs.num_replayed > 100
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_have_the_log_probabilities_of_transformers(dtype, small_model) -> None:
    directory = small_model("qwen3_with_tied_head")
    with running(runner_of(directory, dtype)) as engine:
        found = answers(engine)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to("cuda")
    differences = []
    for prompt, answer in zip(PROMPTS, found, strict=True):
        tokens = torch.tensor([*prompt, *answer.token_ids], device="cuda")
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own = logprobs.gather(1, tokens[len(prompt) :, None]).squeeze(1).cpu()
        differences.append((torch.tensor(answer.logprobs) - own).abs())
    if dtype == "float32":
        assert torch.cat(differences).max() < 2e-3
    else:
        # On a CPU the mean is 0.07. Some tokens differ by 1.8, because this model's weights are large.
        assert torch.cat(differences).mean() < 0.2


def test_recorded_steps_compute_with_the_newest_weights(small_model, tmp_path) -> None:
    directory, newer = small_model("qwen3_with_tied_head"), tmp_path / "step_1"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(newer)
    with running(runner_of(newer, enforce_eager=True)) as engine:
        expected = answers(engine)
    torch.cuda.empty_cache()
    others_bytes = torch.cuda.memory_reserved()
    runner = runner_of(directory)
    with running(runner) as engine:
        assert [one.token_ids for one in answers(engine)] != [one.token_ids for one in expected]
        engine.update_weights(newer).result()
        assert_same(answers(engine), expected)
        awake_bytes = torch.cuda.memory_reserved() - others_bytes
        # An engine that slept has new addresses, so that it records all steps again.
        replayed = runner.num_replayed
        for source in (directory, newer):
            engine.sleep().result()
            assert torch.cuda.memory_reserved() - others_bytes < 0.1 * awake_bytes
            waiting = engine.submit(GenerationRequest(PROMPTS[1], SamplingParams(max_tokens=4), seed=1))
            assert not waiting.done()
            assert engine.is_asleep
            engine.update_weights(source).result()
            assert len(waiting.result().completions[0].token_ids) == 4
        assert_same(answers(engine), expected)
        assert runner.num_replayed > replayed


def test_recorded_steps_compute_with_the_newest_version_of_an_adapter(small_model, adapter_of, tmp_path) -> None:
    base = small_model("qwen3_with_tied_head")
    versions = [adapter_of(base, tmp_path / f"step_{seed}", seed) for seed in (1, 2)]

    def answers_of(runner: ModelRunner) -> list[list[Completion]]:
        store = runner.adapter_store("base", AdapterLimits(max_loaded=1, max_rank=4))
        with running(runner) as engine:
            return [answers(engine, adapter=store.load("mine", directory)) for directory in versions]

    runner = runner_of(base)
    found, expected = answers_of(runner), answers_of(runner_of(base, enforce_eager=True))
    assert runner.graphs is not None
    assert runner.graphs.num_replayed > 200
    assert found[0] != found[1]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


class Waiting(CudaRecorder):
    """Records computations that wait for the GPU, which CUDA refuses."""

    def record(self, compute: Compute) -> Compute:
        return super().record(lambda: compute() + float(compute().sum()))


def test_a_refused_recording_leaves_an_engine_that_decodes_without(small_model, caplog) -> None:
    directory = small_model("llama")
    with running(runner_of(directory, enforce_eager=True)) as engine:
        expected = answers(engine)
    runner = runner_of(directory)
    runner.replay_with(Waiting(runner.device))
    before = torch.cuda.current_stream()
    with running(runner) as engine:
        found = answers(engine)
    assert runner.graphs is not None
    assert runner.graphs.is_off
    assert len([record for record in caplog.records if "CUDA graphs" in record.message]) == 1
    assert torch.cuda.current_stream() == before
    assert_same(found, expected)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", MODELS)
def test_no_step_waits_for_the_gpu(name, small_model, request) -> None:
    runner = runner_of(small_model(name))
    rows = [list(prompt) for prompt in PROMPTS[1:6]]
    runner.slots.reserve(16, 128)

    @torch.inference_mode()
    def steps() -> None:
        runner.forward(rows[:3], rows[3:], [3, 4])
        runner.forward(rows[:3], rows[3:], [3, 4], num_cached=[2, 3])
        for _ in range(3):
            runner.forward(rows, [], [])
            runner.slots.copy(0, [6, 7], 1)

    steps()  # libraries start, and graphs are recorded, which waits
    request.getfixturevalue("no_waiting")
    steps()
    assert runner.graphs is not None
    assert runner.graphs.num_replayed >= 5


def test_slots_that_grow_drop_their_graphs(small_model) -> None:
    directory = small_model("llama")
    runner, eager = runner_of(directory), runner_of(directory, enforce_eager=True)
    assert eager.graphs is None
    tokens = [3, 1, 4]
    for each in (runner, eager):
        each.slots.reserve(1, 4)
        each.forward([], [tokens[:-1]], [0])
    generations = set()
    for _ in range(300):
        for each in (runner, eager):
            each.slots.reserve(1, len(tokens))
        generations.add(runner.slots.generation)
        (found, _), (expected, _) = (each.forward([tokens], [], []) for each in (runner, eager))
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
        tokens.append(int(expected.argmax()))
    assert len(generations) == 3
    assert runner.graphs is not None
    assert runner.graphs.num_replayed > 280

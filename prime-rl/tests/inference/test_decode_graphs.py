"""Recorded decode steps: what a replay computes, when a step is recorded, and what ends a recording.

A GPU records kernels with the addresses that they read and write. `Tape` does the same with operators on a CPU: a
replay runs the recorded operators on the recorded tensors, and nothing of the code that launched them. The reference
is Transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from prime_rl.inference.embedded.engine.decode_graphs import Compute, DecodeGraphs
from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import Completion, GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.lora import Adapter, AdapterLimits
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.weights import read_weights

MODELS = ("qwen3_with_tied_head", "qwen2", "llama", "mistral_with_window", "mistral_with_longer_window")
VOCAB = 64


class Tape(TorchDispatchMode):
    """Records operators, and runs them again on the tensors that they had, into the tensors that they returned."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, _tensors(result)))
        return result

    def replay(self) -> None:
        for func, args, kwargs, results in self._calls:
            for target, again in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if target.data_ptr() != again.data_ptr():
                    target.copy_(again)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


class TapeRecorder:
    def __init__(self) -> None:
        self.free = True
        self.num_forgotten = 0

    def record(self, compute: Compute) -> Compute:
        tape = Tape()
        with tape:
            result = compute()

        def replay() -> Tensor:
            result.fill_(torch.nan)
            tape.replay()
            return result

        return replay

    def has_room(self) -> bool:
        return self.free

    def forget(self) -> None:
        self.num_forgotten += 1


@pytest.fixture(autouse=True)
def unpacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed copy for oneDNN, which only CPUs have, is a new tensor after every update."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


def replaying(directory: Path, recorder: Any = None, budget_bytes: int = 1 << 30) -> tuple[ModelRunner, DecodeGraphs]:
    model, source = load_model(str(directory), "float32", torch.device("cpu"))
    runner = ModelRunner(model, budget_bytes, source)
    runner.replay_with(recorder or TapeRecorder())
    assert runner.graphs is not None
    return runner, runner.graphs


class Batch:
    """Running sequences, of which every decoded position's logits are kept."""

    def __init__(self, runner: ModelRunner, adapter: Adapter | None = None) -> None:
        self.runner = runner
        self.adapter = adapter
        self.rows: list[list[int]] = []
        self.logits: list[dict[int, Tensor]] = []
        self.ended: list[tuple[list[int], dict[int, Tensor]]] = []

    def join(self, *prompts: list[int]) -> None:
        """Prefill prompts, in a step of their own."""
        first = len(self.rows)
        self.rows += [list(prompt) for prompt in prompts]
        self.logits += [{} for _ in prompts]
        self.runner.slots.reserve(len(self.rows), max(map(len, self.rows)))
        self.runner.forward([], prompts, list(range(first, len(self.rows))), adapters=[self.adapter] * len(prompts))
        for row in self.rows[first:]:
            row.append((row[-1] * 5 + 3) % VOCAB)

    def end(self, count: int) -> None:
        """The last rows end."""
        for _ in range(count):
            self.ended.append((self.rows.pop(), self.logits.pop()))

    def decode(self, times: int = 1) -> None:
        for _ in range(times):
            self.runner.slots.reserve(len(self.rows), max(map(len, self.rows)))
            logits, _ = self.runner.forward(self.rows, [], [], adapters=[self.adapter] * len(self.rows))
            for row, kept, own in zip(self.rows, self.logits, logits, strict=True):
                kept[len(row) - 1] = own.clone()
                row.append(int(own.argmax()))

    @torch.no_grad()
    def assert_equals_transformers(self, directory: Path) -> None:
        self.end(len(self.rows))
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        for tokens, kept in self.ended:
            expected = reference(torch.tensor([tokens])).logits[0].float()
            for position, logits in kept.items():
                torch.testing.assert_close(logits, expected[position], atol=3e-4, rtol=1e-4)


def prompt_of(number: int, length: int) -> list[int]:
    return [(5 + 11 * number + place * (1 + number % 3)) % VOCAB for place in range(length)]


@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_of_1_to_65_rows_equal_transformers(name, small_model) -> None:
    runner, graphs = replaying(small_model(name))
    batch = Batch(runner)
    runner.slots.reserve(65, 400)
    batch.join(*[prompt_of(number, 2 + 3 * number) for number in range(65)])
    for _ in range(65):
        batch.decode(2)
        batch.end(1)
    assert graphs.num_replayed > 65
    assert graphs.num_recorded < 20
    assert not graphs.is_off
    batch.assert_equals_transformers(small_model(name))


@pytest.mark.parametrize("name", ["qwen3_with_tied_head", "mistral_with_window"])
def test_rows_that_join_and_end_between_replays_equal_transformers(name, small_model) -> None:
    runner, graphs = replaying(small_model(name))
    batch = Batch(runner)
    for number in range(12):
        batch.join(*[prompt_of(number + 20 * other, 1 + 37 * number % 150) for other in range(1 + number % 4)])
        batch.decode(3)
        batch.end(number % 3)
    assert graphs.num_replayed > 5
    batch.assert_equals_transformers(small_model(name))


def test_slots_that_grow_are_read_where_they_are(small_model) -> None:
    directory = small_model("qwen3_with_tied_head")
    recorder = TapeRecorder()
    runner, graphs = replaying(directory, recorder)
    batch = Batch(runner)
    batch.join([1, 2, 3], [4, 5])
    batch.decode(140)
    assert recorder.num_forgotten > 2
    assert graphs.num_replayed > 110
    batch.join(*[prompt_of(number, 9) for number in range(30)])
    batch.decode(5)
    batch.assert_equals_transformers(directory)


@torch.no_grad()
def changed(directory: Path, target: Path) -> Path:
    """Another version of a model's weights, in which every tensor differs."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(target)
    return target


@pytest.mark.parametrize("name", ["qwen3_with_tied_head", "qwen2", "llama"])
def test_a_recorded_step_computes_with_the_newest_weights(name, small_model, tmp_path) -> None:
    runner, graphs = replaying(small_model(name))
    newer = changed(small_model(name), tmp_path)
    before = Batch(runner)
    before.join(*[prompt_of(number, 20) for number in range(4)])
    before.decode(6)
    before.assert_equals_transformers(small_model(name))
    recorded = graphs.num_recorded
    runner.load_weights(read_weights(newer), newer)
    after = Batch(runner)
    after.join(*[prompt_of(number, 20) for number in range(4)])
    after.decode(6)
    assert graphs.num_recorded == recorded > 0
    after.assert_equals_transformers(newer)


def test_padding_touches_no_sequence(small_model) -> None:
    runner, graphs = replaying(small_model("qwen3_with_tied_head"))
    batch = Batch(runner)
    batch.join(*[prompt_of(number, 20) for number in range(5)])
    batch.decode(3)
    before = [tensor.clone() for pair in runner.slots._layers.values() for tensor in pair]
    batch.decode(1)
    assert graphs.num_replayed >= 2
    after = [tensor for pair in runner.slots._layers.values() for tensor in pair]
    own, padding = {(row, 23) for row in range(5)}, {(row, 0) for row in range(5, 8)}
    for old, new in zip(before, after, strict=True):
        changed = {(row, place) for row, place in (old != new).any(-1).any(1).nonzero().tolist()}
        assert own <= changed <= own | padding


def test_steps_with_prompts_or_different_adapters_are_not_replayed(small_model) -> None:
    runner, graphs = replaying(small_model("qwen2"))
    runner.slots.reserve(2, 8)
    adapter = Adapter("some", Path(), 1, {})
    for _ in range(3):
        runner.forward([[1, 2]], [[3, 4]], [1])
        runner.forward([[1, 2], [3, 4]], [], [], adapters=[adapter, None])
    assert graphs.num_recorded == graphs.num_replayed == 0
    for _ in range(3):
        runner.forward([[1, 2]], [], [], adapters=[None])
    assert (graphs.num_recorded, graphs.num_replayed) == (1, 2)


@torch.no_grad()
def merged(base: Path, adapter: Path) -> Path:
    """The base model with an adapter merged into its weights."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    model.merge_and_unload().save_pretrained(adapter / "merged")
    return adapter / "merged"


@pytest.mark.parametrize("name", ["qwen3_with_tied_head", "llama"])
def test_replayed_steps_compute_with_an_adapters_newest_version(name, small_model, adapter_of, tmp_path) -> None:
    base = small_model(name)
    runner, graphs = replaying(base)
    store = runner.adapter_store("base", AdapterLimits(max_loaded=2, max_rank=8))
    runner.slots.reserve(16, 128)

    def decode_with(adapter: Adapter | None, reference: Path) -> int:
        """Compare 6 decoded steps with the reference, and return the number of recorded steps so far."""
        batch = Batch(runner, adapter)
        batch.join(*[prompt_of(number, 20) for number in range(4)])
        batch.decode(6)
        batch.assert_equals_transformers(reference)
        return graphs.num_recorded

    first, second, other = (adapter_of(base, tmp_path / str(seed), seed) for seed in range(3))
    for directory in (first, second):
        mine = store.load("mine", directory)
        assert decode_with(mine, merged(base, directory)) == 1, "a new version is read where the old one was"
    assert decode_with(None, base) == 2
    assert decode_with(store.load("other", other), merged(base, other)) == 3
    assert decode_with(mine, second / "merged") == 3
    wider = adapter_of(base, tmp_path / "wider", 3, rank=8)
    assert decode_with(store.load("mine", wider), merged(base, wider)) == 4, "another rank lies elsewhere"
    store.unload_all()
    decode_with(None, base)
    runner.forward([[1, 2]] * 9, [], [])
    assert {adapter for _, adapter in graphs._asked} == {None}, "an unloaded adapter is not kept"
    assert graphs.num_replayed > 20


def test_a_model_that_transformers_computes_is_not_recorded(small_model) -> None:
    model, source = load_model(str(small_model("qwen3_moe")), "float32", torch.device("cpu"))
    runner = ModelRunner(model, 1 << 30, source)
    runner.replay_with(TapeRecorder())
    assert runner.graphs is None


def test_only_the_last_used_shapes_are_kept(small_model) -> None:
    directory = small_model("llama")
    runner, graphs = replaying(directory)
    graphs.most_graphs = 2
    runner.slots.reserve(16, 128)
    batch = Batch(runner)
    batch.join(*[prompt_of(number, 4) for number in range(9)])
    for _ in range(4):
        batch.decode(3)
        batch.end(2)
    assert graphs.num_recorded > 2
    assert len(graphs._recorded) == 2
    batch.assert_equals_transformers(directory)


def test_without_memory_nothing_is_recorded_until_there_is_some(small_model) -> None:
    directory, recorder = small_model("llama"), TapeRecorder()
    recorder.free = False
    runner, graphs = replaying(directory, recorder)
    batch = Batch(runner)
    batch.join([1, 2, 3])
    batch.decode(6)
    assert graphs.num_recorded == 0
    recorder.free = True
    batch.decode(4)
    assert graphs.num_recorded == 1
    batch.assert_equals_transformers(directory)


class Failing(TapeRecorder):
    def record(self, compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing\nand more lines")


class Lying(TapeRecorder):
    """Replays a result, but another one."""

    def record(self, compute: Compute) -> Compute:
        return lambda: compute().roll(1, 0)


@pytest.mark.parametrize("recorder", [Failing(), Lying()], ids=["fails", "differs"])
def test_a_recording_that_fails_is_one_line_and_the_engine_goes_on(recorder, small_model, caplog) -> None:
    directory = small_model("qwen3_with_tied_head")
    runner, graphs = replaying(directory, recorder)
    batch = Batch(runner)
    batch.join(*[prompt_of(number, 4 + number) for number in range(3)])
    batch.decode(8)
    assert graphs.is_off
    assert [record.message.count("\n") for record in caplog.records if record.levelname == "WARNING"] == [0]
    batch.assert_equals_transformers(directory)


def test_weights_of_nan_do_not_end_replaying(small_model) -> None:
    directory = small_model("llama")
    runner, graphs = replaying(directory)
    runner.slots.reserve(16, 64)
    good = read_weights(directory)
    runner.load_weights({name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}, directory)
    for _ in range(4):
        runner.forward([[1, 2], [3, 4], [5, 6]], [], [])
    assert graphs.num_recorded == 0
    runner.load_weights(good, directory)
    for row in range(3):
        runner.slots.erase(row)
    batch = Batch(runner)
    batch.join(*[prompt_of(number, 4 + number) for number in range(3)])
    batch.decode(6)
    assert graphs.num_replayed > 3
    batch.assert_equals_transformers(directory)


@pytest.mark.parametrize("name", ["qwen3_with_tied_head", "mistral_with_longer_window"])
def test_an_engine_that_replays_answers_as_transformers(name, small_model) -> None:
    directory = small_model(name)
    runner, graphs = replaying(directory)
    prompts = [tuple(prompt_of(number, 1 + 7 * number)) for number in range(20)]
    with Engine(runner).in_thread() as engine:
        futures = [
            engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=5 + 4 * number), seed=number))
            for number, prompt in enumerate(prompts)
        ]
        answers = [future.result().completions[0] for future in futures]
        said = str(engine.stats)
    assert graphs.num_replayed > 20
    assert f", {graphs.num_replayed} of {engine.stats.steps} steps replayed" in said
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_drawn_from(directory, prompt, answer)


@torch.no_grad()
def assert_drawn_from(directory: Path, prompt: tuple[int, ...], completion: Completion) -> None:
    """Check that every token has the model's log-probability."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    tokens = torch.tensor([*prompt, *completion.token_ids])
    logprobs = model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, tokens[len(prompt) :, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(completion.logprobs), own.float(), atol=3e-4, rtol=0)


def test_there_are_few_shapes(small_model: Callable[..., Path]) -> None:
    runner, graphs = replaying(small_model("llama"))
    runner.slots.rows, runner.slots.length = 256, 4096
    shapes = {graphs.shape_of(rows, length) for rows in range(1, 257) for length in range(1, 4097)}
    assert len({rows for rows, _ in shapes}) <= 20
    assert len({length for _, length in shapes}) <= 16
    for rows in range(1, 257):
        padded, _ = graphs.shape_of(rows, 1)
        assert rows <= padded < rows + 16 or rows <= padded <= rows * 9 / 8
    for length in range(1, 4097):
        _, padded = graphs.shape_of(1, length)
        assert length <= padded < length + 128 or length <= padded <= length * 5 / 4

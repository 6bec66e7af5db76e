"""An engine whose key-value cache cannot hold a sequence refuses to start, and says what would help."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.engine.cache import KVSlots
from prime_rl.inference.embedded.errors import EngineError
from prime_rl.inference.embedded.startup import CacheBudget, start_service

GIB = 2**30
TOKEN_BYTES = 2**17


def slots_of(budget: CacheBudget) -> KVSlots:
    """Slots whose tokens have `TOKEN_BYTES` each."""
    slots = KVSlots(budget.num_bytes, torch.device("cpu"))
    slots.layer(0, torch.zeros(1, 2, TOKEN_BYTES // 16), torch.zeros(1, 2, TOKEN_BYTES // 16))
    return slots


def shortage(budget: CacheBudget, max_model_len: int | None = None, context: int = 2048) -> str | None:
    return budget.shortage(slots_of(budget), max_model_len, context)


def test_a_gpu_that_others_fill_is_refused_with_the_key_and_the_numbers() -> None:
    budget = CacheBudget.on_gpu(free_bytes=30 * GIB, total_bytes=80 * GIB, gpu_memory_utilization=0.6)
    with pytest.raises(EngineError) as fault:
        shortage(budget, max_model_len=1024)
    assert str(fault.value) == (
        "the key-value cache has room for 0 tokens (0.0 MiB: half of what gpu_memory_utilization = 0.6 of the GPU's "
        "80.0 GiB leaves beyond the 50.0 GiB in use by this model and other programs), but one sequence of "
        "model.max_model_len = 1024 needs 0.1 GiB: raise gpu_memory_utilization, stop other programs that use the GPU, "
        "or lower "
        "model.max_model_len"
    )


def test_a_gpu_with_room_for_many_sequences_starts_without_a_word() -> None:
    budget = CacheBudget.on_gpu(free_bytes=70 * GIB, total_bytes=80 * GIB, gpu_memory_utilization=0.9)
    assert budget.num_bytes == 31 * GIB
    assert shortage(budget, max_model_len=4096) is None


def test_a_cache_for_few_sequences_warns_with_their_number() -> None:
    budget = CacheBudget.on_cpu(memory_bytes=8 * GIB)
    assert shortage(budget, max_model_len=4096) == (
        "the key-value cache has room for 16384 tokens (2.0 GiB: 0.25 of the 8.0 GiB of memory that this process "
        "may use), so long sequences run one at a time: 4.0 of model.max_model_len = 4096 fit. To run more, use a "
        "machine or a job with more memory, or lower model.max_model_len"
    )


def test_without_max_model_len_a_long_context_need_not_fit_whole() -> None:
    budget = CacheBudget.on_cpu(memory_bytes=8 * GIB)
    warning = shortage(budget, context=131_072)
    assert warning is not None
    assert warning.endswith("or set model.max_model_len")
    with pytest.raises(EngineError, match=r"set model\.max_model_len$"):
        shortage(CacheBudget.on_cpu(memory_bytes=1 * GIB), context=131_072)


def test_a_context_that_no_memory_holds_ends_the_start_with_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 10**9}))
    config = InferenceConfig.model_validate({"model": {"name": str(model), "max_model_len": 10**9}, "device": "cpu"})
    with pytest.raises(EngineError, match=r"but one sequence of model\.max_model_len = 1000000000 needs"):
        start_service(config)

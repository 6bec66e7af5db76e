from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prime_rl.run.paths import RunPaths
from prime_rl.trainer.kernels.product_choice import (
    LayerLibraries,
    Library,
    ProductChoice,
    cached_choice,
    choose_products,
)
from prime_rl.trainer.kernels.products import Products, has_onednn_products
from prime_rl.trainer.process.world import Process
from prime_rl.utils.logger import setup_logger

ALL_PYTORCH, ALL_ONEDNN = LayerLibraries.only(Library.PYTORCH), LayerLibraries.only(Library.ONEDNN)
ONLY_PYTORCH = ProductChoice(ALL_PYTORCH, ALL_PYTORCH)
MIXED = ProductChoice(LayerLibraries(Library.ONEDNN, Library.ONEDNN, Library.PYTORCH), ALL_ONEDNN)
IN_FLOAT32 = replace(MIXED, bfloat16_in_float32=True)
THIS_PROCESS = Process(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))

needs_both = pytest.mark.skipif(not has_onednn_products(), reason="PyTorch without oneDNN")


@needs_both
def test_a_choice_in_the_cache_is_not_measured_again(tmp_path: Path) -> None:
    for choice in (ONLY_PYTORCH, MIXED, IN_FLOAT32):
        choice.write(tmp_path / "cache" / "choice.json")
        assert cached_choice(tmp_path / "cache" / "choice.json") == choice


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"narrow": "pytorch"}',
        b'{"narrow": "blas", "wide": "onednn"}',
        b'{"narrow": {"outputs": "onednn"}, "wide": "pytorch"}',
        b'{"narrow": {"x": "pytorch"}, "wide": "pytorch"}',
        b'{"narrow": "pytorch", "bfloat16_in_float32": true}',
        b'{"narrow": "pytorch", "wide": "pytorch", "bfloat16_in_float32": "true"}',
    ],
)
def test_a_damaged_file_of_the_cache_is_replaced(tmp_path: Path, damaged: bytes) -> None:
    file = tmp_path / "choice.json"
    file.write_bytes(damaged)
    measured = cached_choice(file)
    assert ProductChoice.read(file) == measured
    assert sorted(json.loads(file.read_text())) == ["bfloat16_in_float32", "narrow", "wide"]


def test_without_a_place_to_keep_it_the_choice_is_still_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cached_choice(tmp_path / "file" / "choice.json").of(256).outputs in Library


@needs_both
def test_a_run_of_an_earlier_version_recorded_one_name_for_all_three_products(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.attempts.mkdir()
    paths.matrix_products.write_text('{"narrow": "onednn", "wide": "pytorch"}\n')
    assert choose_products(paths, THIS_PROCESS, is_resumed=True) == ProductChoice(ALL_ONEDNN, ALL_PYTORCH)


def test_the_log_names_the_product_only_where_libraries_differ() -> None:
    assert f"{MIXED.wide}" == "onednn"
    assert f"{MIXED.narrow}" == "onednn for outputs, onednn for input grads, pytorch for weight grads"


@needs_both
def test_a_resumed_run_keeps_the_choice_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_CACHE", str(tmp_path / "cache"))
    paths = RunPaths(tmp_path / "run")
    begun = choose_products(paths, THIS_PROCESS, is_resumed=False)
    assert ProductChoice.read(paths.matrix_products) == begun
    (cached,) = (tmp_path / "cache" / "matrix_products").glob("*.json")
    for choice in (ONLY_PYTORCH, MIXED, IN_FLOAT32):
        # The cache may change between two attempts; the record of the run decides.
        choice.write(paths.matrix_products)
        begun.write(cached)
        assert choose_products(paths, THIS_PROCESS, is_resumed=True) == choice
    assert choose_products(paths, THIS_PROCESS, is_resumed=False) == begun


def test_a_run_without_a_record_resumes_as_it_began(tmp_path: Path) -> None:
    resumed = choose_products(RunPaths(tmp_path), THIS_PROCESS, is_resumed=True)
    assert resumed == ProductChoice.without_measuring()


def test_a_damaged_record_of_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger("info")
    paths = RunPaths(tmp_path)
    paths.attempts.mkdir()
    paths.matrix_products.write_bytes(b"{")
    assert choose_products(paths, THIS_PROCESS, is_resumed=True) == ProductChoice.without_measuring()
    assert f"{paths.matrix_products} cannot be used here" in capsys.readouterr().out


def test_models_are_wide_from_a_hidden_size_of_512() -> None:
    assert [MIXED.of(size) for size in (64, 511, 512, 4096)] == [MIXED.narrow] * 2 + [ALL_ONEDNN] * 2


@needs_both
def test_only_the_products_of_bfloat16_matrices_are_computed_in_another_dtype() -> None:
    for size in (64, 4096):
        for choice in (MIXED, IN_FLOAT32):
            assert choice.products(size, torch.float32) == choice.of(size).products
        assert MIXED.products(size, torch.bfloat16) == MIXED.of(size).products
        assert IN_FLOAT32.products(size, torch.bfloat16) == IN_FLOAT32.of(size).products.for_bfloat16()


@pytest.mark.parametrize(
    ("converted", "is_chosen"), [([0.2, 0.3, 1.0], True), ([0.9, 1.0, 1.0], False), ([2.0, 2.0, 2.0], False)]
)
def test_the_faster_dtype_is_chosen(converted: list[float], is_chosen: bool) -> None:
    def timing(ways: Sequence[Products], operands: object) -> list[list[float]]:
        return [converted if way.dtype == torch.bfloat16 else [1.0, 1.0, 1.0] for way in ways]

    assert ProductChoice.measured(timing).bfloat16_in_float32 is is_chosen

"""Chooses how matrix products are computed on a CPU, by measuring.

In float32, PyTorch's default (MKL) or oneDNN is faster, depending on the processor, the versions, the number of
threads, the size and the memory order of the factors. In bfloat16, some processors are slower than in float32. The name
of a processor tells neither. A layer's three products are measured once in two sizes; the result is kept in the user's
cache for each machine and version. Each way rounds differently. A run therefore records its choice, and keeps it when
it resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.launch.caches import cache_root, made_for
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.kernels.products import (
    ONEDNN,
    PLAIN,
    Products,
    has_onednn_products,
    onednn_product,
    plain_product,
)
from prime_rl.trainer.process.host_memory import memory_of_a_step
from prime_rl.trainer.process.world import Process
from prime_rl.utils.files import locked_file, replacing_file
from prime_rl.utils.logger import get_logger

_NARROW, _WIDE = (2048, 256, 512), (256, 576, 1536)
"""Rows, inputs and outputs of the products that are measured: about 5 ms, so that even on a busy machine some of
them run without interruption. A narrow model's rows are long: with 512, the libraries differ less."""
_WIDE_FROM = 512
"""Hidden size from which a model is wide."""
_BFLOAT16 = (512, 576, 1536)
"""Converting the factors takes a sixth of the time of such a product in float32."""
_ROUNDS = 10
_HEADROOM = 0.95
"""oneDNN has to take less than this share of the time, because it compiles a kernel for each shape. So does float32
instead of bfloat16, because it takes more memory."""


Operands = Sequence[tuple[Tensor, Tensor]]
"""The factors of a layer's three products."""
Timing = Callable[[Sequence[Products], Operands], list[list[float]]]
"""Seconds of each of the three products, for each way to compute them."""


class Library(StrEnum):
    """A library that multiplies float32 matrices."""

    PYTORCH = "pytorch"
    ONEDNN = "onednn"


@dataclass(frozen=True, slots=True)
class LayerLibraries:
    """The library for each of the three products of a linear layer."""

    outputs: Library
    input_grads: Library
    weight_grads: Library

    @classmethod
    def only(cls, library: Library) -> LayerLibraries:
        return cls(library, library, library)

    @classmethod
    def parsed(cls, value: Any) -> LayerLibraries:
        """From JSON: one name for all three, as earlier versions wrote it, or a name for each."""
        return (
            cls(**{key: Library(name) for key, name in value.items()})
            if isinstance(value, dict)
            else cls.only(Library(value))
        )

    @property
    def all(self) -> tuple[Library, ...]:
        return self.outputs, self.input_grads, self.weight_grads

    @property
    def products(self) -> Products:
        outputs, input_grads, weight_grads = (
            onednn_product if library is Library.ONEDNN else plain_product for library in self.all
        )
        return Products(outputs, input_grads, weight_grads)

    def __str__(self) -> str:
        if len(set(self.all)) == 1:
            return self.outputs
        return ", ".join(
            f"{library} for {field.name.replace('_', ' ')}"
            for field, library in zip(fields(self), self.all, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """The libraries for narrow and for wide models, and whether bfloat16 matrices are multiplied in float32."""

    narrow: LayerLibraries
    wide: LayerLibraries
    bfloat16_in_float32: bool = False

    @classmethod
    def without_measuring(cls) -> ProductChoice:
        """The rule for runs without a recorded choice: oneDNN on a processor with AVX-512."""
        has_width = torch.backends.cpu.get_cpu_capability() == "AVX512"
        libraries = LayerLibraries.only(Library.ONEDNN if has_width and has_onednn_products() else Library.PYTORCH)
        return cls(libraries, libraries)

    @classmethod
    def measured(cls, timing: Timing | None = None) -> ProductChoice:
        """Measure here and now. Takes a few tenths of a second. `timing` stands in for the clock in tests."""
        timing = timing or best_seconds
        only_pytorch = LayerLibraries.only(Library.PYTORCH)
        with memory_of_a_step():
            narrow, wide = (
                _faster(_operands(*shape, torch.float32), timing) if has_onednn_products() else only_pytorch
                for shape in (_NARROW, _WIDE)
            )
            return cls(narrow, wide, _is_faster_in_float32(wide.products, timing))

    @classmethod
    def read(cls, file: Path) -> ProductChoice | None:
        """A written choice; None if there is none that can be read and used here."""
        try:
            table = json.loads(file.read_bytes())
            narrow, wide = (LayerLibraries.parsed(table[width]) for width in ("narrow", "wide"))
            # Earlier versions, which did not write it, computed in bfloat16.
            in_float32 = table.get("bfloat16_in_float32", False)
            if not isinstance(in_float32, bool):
                return None
            choice = cls(narrow, wide, in_float32)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return choice if has_onednn_products() or Library.ONEDNN not in choice.all else None

    def write(self, file: Path) -> None:
        """Write the choice: whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing_file(file) as scratch:
            scratch.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @property
    def all(self) -> tuple[Library, ...]:
        """The six libraries: narrow, then wide."""
        return *self.narrow.all, *self.wide.all

    def of(self, hidden_size: int) -> LayerLibraries:
        """The libraries for a model."""
        return self.wide if hidden_size >= _WIDE_FROM else self.narrow

    def products(self, hidden_size: int, dtype: torch.dtype) -> Products:
        """The products of a model that computes in `dtype`."""
        products = self.of(hidden_size).products
        return products.for_bfloat16() if dtype == torch.bfloat16 and self.bfloat16_in_float32 else products

    def __str__(self) -> str:
        of_bfloat16 = "float32" if self.bfloat16_in_float32 else "bfloat16"
        return f"narrow models: {self.narrow}; wide models: {self.wide}; of bfloat16 matrices: in {of_bfloat16}"


def choose_products(paths: RunPaths, process: Process, is_resumed: bool) -> ProductChoice:
    """The choice of a run, recorded in its directory. All ranks get that of rank 0. Collective.

    A resumed run keeps what it began with. One that began before choices were recorded keeps the rule of that time.
    """
    if process.device.type != "cpu":
        return ProductChoice.without_measuring()
    choice = _choice_of_main(paths, is_resumed) if process.is_main else ProductChoice.without_measuring()
    if process.world_size > 1:
        names = list(Library)
        shared = torch.tensor([*(names.index(library) for library in choice.all), choice.bfloat16_in_float32])
        dist.broadcast(shared, src=0)
        *indices, in_float32 = shared.tolist()
        found = [names[index] for index in indices]
        choice = ProductChoice(LayerLibraries(*found[:3]), LayerLibraries(*found[3:]), bool(in_float32))
    return choice


def _choice_of_main(paths: RunPaths, is_resumed: bool) -> ProductChoice:
    if is_resumed:
        begun = ProductChoice.read(paths.matrix_products)
        if begun is None and paths.matrix_products.exists():
            get_logger().warning(
                f"{paths.matrix_products} cannot be used here: matrix products may be rounded differently than before "
                "the resume"
            )
        return begun or ProductChoice.without_measuring()
    choice = cached_choice(_cache_file())
    choice.write(paths.matrix_products)
    get_logger().info(f"Matrix products: {choice}")
    return choice


def cached_choice(file: Path) -> ProductChoice:
    """The choice in a file of the cache. Measured and written if there is none, by one process at a time."""
    known = ProductChoice.read(file)
    if known is not None:
        return known
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked_file(file.with_suffix(".lock")):
            choice = ProductChoice.read(file) or ProductChoice.measured()
            choice.write(file)
    except OSError as error:
        get_logger().debug(f"the next run measures matrix products again: {file}: {error.strerror}")
        return ProductChoice.measured()
    return choice


def _cache_file() -> Path:
    """One file for each processor, set of versions and number of threads."""
    key = f"{made_for((), os.environ)}{torch.get_num_threads()} threads, three products, bfloat16, as in a step\n"
    return cache_root(os.environ) / "matrix_products" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _faster(operands: Operands, timing: Timing) -> LayerLibraries:
    onednn, pytorch = timing((ONEDNN, PLAIN), operands)
    chosen = (
        Library.ONEDNN if own < _HEADROOM * other else Library.PYTORCH
        for own, other in zip(onednn, pytorch, strict=True)
    )
    return LayerLibraries(*chosen)


def _is_faster_in_float32(products: Products, timing: Timing) -> bool:
    """Whether the three products of bfloat16 matrices together take less time in float32, conversions included."""
    converted, direct = timing((products.for_bfloat16(), PLAIN), _operands(*_BFLOAT16, torch.bfloat16))
    return sum(converted) < _HEADROOM * sum(direct)


def _operands(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> Operands:
    """The factors of a linear layer's output, of the gradient of its input, and of that of its weight."""
    generator = torch.Generator().manual_seed(0)
    sizes = (rows, inputs), (outputs, inputs), (rows, outputs)
    x, weight, grad = (torch.randn(*size, generator=generator).to(dtype) for size in sizes)
    return (x, weight), (grad, weight.t()), (grad.t(), x.t())


def best_seconds(ways: Sequence[Products], operands: Operands) -> list[list[float]]:
    """The least time of each of the three products, for each way to compute them. They alternate."""
    seconds = [[float("inf")] * len(operands) for _ in ways]
    for _ in range(1 + _ROUNDS):  # the first round compiles kernels, and is never the fastest
        for way, best in zip(ways, seconds, strict=True):
            products = (way.outputs, way.input_grads, way.weight_grads)
            for index, (product, pair) in enumerate(zip(products, operands, strict=True)):
                started_s = time.perf_counter()
                product(*pair)
                best[index] = min(best[index], time.perf_counter() - started_s)
    return seconds

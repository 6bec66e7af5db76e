"""CUDA graphs and compilation: a graph writes down its operators, and replays them on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")


class _Written(TorchDispatchMode):
    """The operators of a block with their arguments and results. Refuses what CUDA cannot record."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copies_between = func.name() == "aten::copy_" and args[0].device != args[1].device
        if func.name() in _WAITING or (copies_between and not (args[0].is_cuda and args[1].is_pinned())):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        result = func(*args, **kwargs)
        made = tensors_of(result)
        if any(tensor.is_cuda for tensor in made):
            self.operators.append((func, args, kwargs, made))
        elif any(tensor.is_cuda for tensor in tensors_of((args, kwargs))):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        return result


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class CUDAGraph:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.written: _Written | None = None

    def replay(self) -> None:
        assert self.written is not None, "replayed before it is recorded"
        for func, args, kwargs, made in self.written.operators:
            for old, new in zip(made, tensors_of(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr() and old.numel():
                    old.copy_(new)

    def reset(self) -> None:
        self.written = None


@contextmanager
def graph(graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    written = _Written()
    with written:
        yield
    graph.written = written


def install() -> None:
    torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.graph_pool_handle = CUDAGraph, graph, object
    torch.cuda.is_current_stream_capturing = lambda: False
    whole = torch.compile

    def compile(model: Any = None, **options: Any) -> Any:
        """Without the kernels, which Triton would write for a real GPU."""
        options = {name: value for name, value in options.items() if name not in ("mode", "options")}
        options["backend"] = "aot_eager"
        return (lambda function: whole(function, **options)) if model is None else whole(model, **options)

    torch.compile = compile
    # It looks into CUDA's allocator.
    torch.compiler.reset = lambda: None
    profiled = torch.profiler.profile
    torch.profiler.profile = lambda activities=None, **options: profiled(
        activities=[torch.profiler.ProfilerActivity.CPU], **options
    )

"""Keeps PyTorch's compiler out of a process that compiles nothing, until something uses it.

`torch._dynamo` is imported by Transformers, which marks functions as not to be compiled, and by optimizers and FSDP,
which switch compilation off inside themselves. SymPy is imported by DTensor, which compares sizes that may be
symbols during compilation. Together they take a fifth of the imports of a trainer. While the compiler is not loaded,
nothing is compiled: there is nothing to mark or to switch off, and every size is a number.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from types import ModuleType
from typing import Any

from prime_rl.utils.gpus import machine_gpus
from prime_rl.utils.stand_ins.deferred import defer, is_deferred, load
from prime_rl.utils.stand_ins.plain_sizes import defer_symbols

_DYNAMO = "torch._dynamo"
_TORCH = "2.13."
"""The version that the stand-ins were compared with. Others get the real modules: 2.11 asks them for more."""


def computes_without_gpu(device: str) -> bool:
    """Whether a process with this `device` in its config computes on the CPU, without asking torch."""
    return device == "cpu" or not machine_gpus()


def defer_compiler(installed: str | None = None) -> None:
    """Import torch with stand-ins in the places of `torch._dynamo` and of the module that imports SymPy.

    Does nothing with another version of torch than 2.13; `installed` is its version, None looks it up.
    """
    if not (installed or version("torch")).startswith(_TORCH):
        return
    importlib.import_module("torch.fx.experimental")
    marks = _Marks()
    answers = {
        "allow_in_graph": marks.recorder("allow_in_graph"),
        "assume_constant_result": marks.recorder("assume_constant_result"),
        "disable": _disable,
        "disallow_in_graph": marks.recorder("disallow_in_graph"),
        "graph_break": lambda msg="": None,
        "trace_rules": _TraceRules(),
    }
    defer(_DYNAMO, answers, apart=("config", "_trace_wrapped_higher_order_op"), on_load=marks.repeat)
    defer_symbols()


def computing_eagerly() -> AbstractContextManager[object]:
    """Run compiled functions of the block as they are written. Without the compiler, there are none."""
    if is_deferred(_DYNAMO):
        return nullcontext()
    stance: AbstractContextManager[object] = sys.modules["torch"].compiler.set_stance("force_eager")
    return stance


class _TraceRules:
    """`torch._dynamo.trace_rules`, whose cache is cleared whenever a process group is made."""

    def clear_lru_cache(self) -> None:
        if not is_deferred(_DYNAMO):
            sys.modules[_DYNAMO].trace_rules.clear_lru_cache()

    def __getattr__(self, name: str) -> Any:
        load(sys.modules[_DYNAMO])
        return getattr(sys.modules[_DYNAMO].trace_rules, name)


class _Marks:
    """Functions that were marked before the compiler was loaded."""

    def __init__(self) -> None:
        self._made: list[tuple[str, Any]] = []

    def recorder(self, name: str) -> Callable[[Any], Any]:
        def mark(function: Any) -> Any:
            if not is_deferred(_DYNAMO):
                return getattr(sys.modules[_DYNAMO], name)(function)
            self._made.append((name, function))
            return function

        return mark

    def repeat(self, dynamo: ModuleType) -> None:
        for name, function in self._made:
            getattr(dynamo, name)(function)


def _disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True) -> Any:
    """`torch._dynamo.disable`. What it returns looks whether the compiler has been loaded since, at each call."""
    options: dict[str, Any] = {"recursive": recursive, "reason": reason, "wrapping": wrapping}
    if not is_deferred(_DYNAMO):
        return sys.modules[_DYNAMO].disable(fn, **options)
    if fn is None:
        return functools.partial(_disable, **options)
    if not inspect.isroutine(fn):
        load(sys.modules[_DYNAMO])
        return sys.modules[_DYNAMO].disable(fn, **options)
    disabled: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_deferred(_DYNAMO):
            return fn(*args, **kwargs)
        if not disabled:
            disabled.append(sys.modules[_DYNAMO].disable(fn, **options))
        return disabled[0](*args, **kwargs)

    if wrapping:
        functools.update_wrapper(call, fn)
    # What the compiler looks at, if it comes to compile the caller.
    vars(call).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg=reason,
        _torchdynamo_disable_recursive=recursive,
        _torchdynamo_orig_callable=fn,
    )
    return call

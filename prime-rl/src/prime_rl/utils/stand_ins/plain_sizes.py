"""Answers for `torch.fx.experimental.symbolic_shapes` while every size is a number. It imports SymPy, which takes long.

DTensor, and tensors without data, ask its functions about each size. They only have work to do where a size is a
symbol, as it may be during compilation. For numbers they return what is in the tables here. Everything else is passed
on to the module, which is loaded for that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import chain
from types import ModuleType
from typing import Any

from prime_rl.utils.stand_ins.deferred import defer, is_deferred, load

SHAPES = "torch.fx.experimental.symbolic_shapes"
SYMPY = "sympy"


class GuardOnDataDependentSymNode(RuntimeError):
    """In the place of an exception of the same name, which only the module that is not loaded raises."""


class _Expressions:
    """`sympy.Basic`, the class of all expressions: it has no instances before SymPy is loaded."""

    def __instancecheck__(self, value: Any) -> bool:
        return not is_deferred(SYMPY) and isinstance(value, self._real())

    def __subclasscheck__(self, value: type) -> bool:
        return issubclass(value, self._real())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def _real(self) -> Any:
        load(sys.modules[SYMPY])
        return sys.modules[SYMPY].Basic


_NeverRaised = GuardOnDataDependentSymNode

_OF_BOOL: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("expect_true", "guard_bool", "guard_or_false", "guard_or_true"), bool),
    "guarding_hint_or_throw": bool,
    "statically_known_true": bool,
    "sym_and": lambda *values: all(values),
    "sym_or": lambda *values: any(values),
}
_OF_INT: Mapping[str, Callable[..., Any]] = {
    "guard_int": int,
    "guarding_hint_or_throw": int,
    "has_free_unbacked_symbols": lambda value: False,
    "has_guarding_hint": lambda value: True,
    "optimization_hint": lambda value, fallback=None: value,
    "is_nested_int": lambda value: False,
    "sym_eq": lambda left, right: left == right,
}

_ONLY_IMPORTED = ("free_unbacked_symbols", "guard_size_oblivious")
"""Imported together with the others, and called with symbols only."""


def defer_symbols() -> None:
    """Put a stand-in in the place of the module. Call when `torch.fx.experimental` has been imported."""
    of_numbers = {name: _of_numbers(name) for name in (*_OF_BOOL, *_OF_INT, *_ONLY_IMPORTED)}
    iterations = {name: _nothing_in_plain(name) for name in ("_iterate_exprs", "_iterate_nodes")}
    answers = {
        **of_numbers,
        **iterations,
        "compute_unbacked_bindings": _new_symbols,
        _NeverRaised.__name__: _NeverRaised,
    }
    defer(SHAPES, answers, on_load=_replace_exception)
    defer(SYMPY, {"Basic": _Expressions()})


def _of_numbers(name: str) -> Callable[..., Any]:
    of_bool, of_int = _OF_BOOL.get(name), _OF_INT.get(name)

    def answer(*values: Any, **options: Any) -> Any:
        types = set(map(type, values))
        if of_bool is not None and types == {bool} and not options:
            return of_bool(*values)
        if of_int is not None and types == {int} and options.keys() <= {"fallback"}:
            return of_int(*values)
        if name == "sym_eq" and not options and types <= {list, tuple} | _shape_types() and _is_plain(values):
            return tuple(values[0]) == tuple(values[1])
        return _real(name)(*values, **options)

    return answer


def _nothing_in_plain(name: str) -> Callable[[Any], Any]:
    return lambda value: iter(()) if _is_plain(value) else _real(name)(value)


def _new_symbols(shape_env: Any, *values: Any, **options: Any) -> Any:
    return None if shape_env is None else _real("compute_unbacked_bindings")(shape_env, *values, **options)


def _is_plain(value: Any) -> bool:
    """Whether a value has no symbols: a number, shapes of numbers, or a tensor with such a shape."""
    torch = sys.modules["torch"]
    if type(value) in (bool, int):
        return True
    if type(value) in {list, tuple} | _shape_types():
        return all(map(_is_plain, value))
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return all(type(number) is int for number in chain(value.size(), value.stride(), (value.storage_offset(),)))


def _shape_types() -> set[type]:
    return {sys.modules["torch"].Size}


def _real(name: str) -> Any:
    """A function of the module."""
    load(sys.modules[SHAPES])
    return getattr(sys.modules[SHAPES], name)


def _replace_exception(shapes: ModuleType) -> None:
    """Give the real exception to the modules that have imported ours, so that they catch it."""
    name = _NeverRaised.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is _NeverRaised and module.__name__ != __name__:
            setattr(module, name, getattr(shapes, name))

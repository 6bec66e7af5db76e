"""Stands in for a module that a library imports and this process may never use. The first use loads the real one.

The stand-in is the module object itself, still empty, so code that refers to it has the real module afterwards. It
answers a few names by itself, with what they mean as long as the module has not been loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_loading = threading.RLock()


class DeferredModule(ModuleType):
    """A module that is executed at the first use of a name that it does not answer by itself."""

    _answers: Mapping[str, Any]
    _on_load: Callable[[ModuleType], None]

    def __getattr__(self, name: str) -> Any:
        # Others look for such names in every module, and find none in most.
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        load(self)
        return getattr(self, name)


def is_deferred(name: str) -> bool:
    """Whether a stand-in for a module is in place, and has not been used."""
    return isinstance(sys.modules.get(name), DeferredModule)


def defer(
    name: str,
    answers: Mapping[str, Any],
    apart: Sequence[str] = (),
    on_load: Callable[[ModuleType], None] = lambda module: None,
) -> None:
    """Put a stand-in in the place of a module, unless it has been imported already or is not installed.

    A parent package has to be imported. `apart` are submodules that can be imported without their package. `on_load`
    is called with the real module, as soon as it is loaded.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = DeferredModule
    module.__dict__.update(answers, _answers=answers, _on_load=on_load)
    sys.modules[name] = module
    parent, _, own_name = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own_name, module)
    if spec.submodule_search_locations is not None:
        sys.meta_path.insert(0, _Submodules(name, frozenset(f"{name}.{each}" for each in apart)))


def load(module: ModuleType) -> None:
    """Execute the module, unless this has been done."""
    with _loading:
        if not isinstance(module, DeferredModule):
            return
        answers, on_load = module._answers, module._on_load
        spec = module.__spec__
        assert spec is not None, "`defer` found it"
        assert spec.loader is not None, "`defer` found it"
        for name in (*answers, "_answers", "_on_load"):
            del module.__dict__[name]
        module.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.exec_module(module)
        on_load(module)


class _Submodules(MetaPathFinder):
    """Loads a deferred package before its submodules, as Python would."""

    def __init__(self, package: str, apart: frozenset[str]) -> None:
        self._package = package
        self._apart = apart

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = sys.modules.get(self._package)
        if not fullname.startswith(f"{self._package}.") or fullname in self._apart:
            return None
        if not isinstance(package, DeferredModule):
            return None
        load(package)
        # The package may have imported the submodule, which must not be executed twice. As long as it is listed, Python
        # would take the spec that the module has, and with it the loader that executes it.
        found = sys.modules.pop(fullname, None)
        return None if found is None else ModuleSpec(fullname, _Loaded(found))


class _Loaded(Loader):
    """Gives the module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec

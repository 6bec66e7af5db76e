"""Imports functions that a config names, and makes imports of large packages such as torch faster."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_rl.utils.errors import UserError, one_line

KERNELS_KEPT = 128
"""Enough for the shapes of most batches: 64 were measured to be as fast, with 16 layers too."""
_CACHE_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's cache, and PyTorch's own in front of it. Each holds 1,024 kernels unless set."""


def bound_kernel_caches() -> None:
    """Limit how many of its CPU kernels oneDNN keeps, unless the environment says how many. Call before torch computes.

    oneDNN compiles a kernel for each new shape, about half a megabyte. With the limits that it has by itself, memory
    grows by a gigabyte while sequences of new lengths appear. To compile one again takes less than a millisecond.
    """
    for name in _CACHE_VARIABLES:
        os.environ.setdefault(name, str(KERNELS_KEPT))


@contextmanager
def import_without_gc() -> Iterator[None]:
    """Disable garbage collection in the block, and exempt all objects that exist at its end from later collections.

    Imports create a million objects and free few of them. Python rescans all of them whenever their number has grown
    by a quarter, which takes a sixth of the import time of torch and Transformers. Each later full collection would
    take a tenth of a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class Distributions(Mapping[str, list[str]]):
    """`importlib.metadata.packages_distributions()`, made when it is needed.

    Transformers looks up torch and accelerate in it to get their versions. Their distributions have the same names.
    """

    _NAMED_ALIKE = ("torch", "accelerate")

    def __init__(self, make: Callable[[], Mapping[str, list[str]]]) -> None:
        self._make = make

    @functools.cached_property
    def whole(self) -> Mapping[str, list[str]]:
        return self._make()

    def __getitem__(self, package: str) -> list[str]:
        if package in self._NAMED_ALIKE and "whole" not in vars(self):
            with suppress(PackageNotFoundError):
                return [distribution(package).metadata["Name"]]
        return self.whole[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


@contextmanager
def _distributions_on_demand() -> Iterator[None]:
    original = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: Distributions(original)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = original


def import_transformers() -> None:
    """Import `transformers` and `transformers.models`, scan their files only once, and leave out SciPy.

    Both packages read the same 3,000 files to list the names that they define. Here, `transformers.models` derives its
    list from that of `transformers`, which saves a fifth of a second. The lists are identical.

    Transformers imports scikit-learn and SciPy, if they are installed, for assisted generation and object detection,
    which nothing here uses. With the packages of `--extra lm-eval` that would take 1.5 seconds.

    It also lists which installed distribution has which package, and reads the metadata of all of them for that. See
    `Distributions`.
    """
    with _distributions_on_demand():
        import transformers

    transformers.utils.is_sklearn_available = transformers.utils.is_scipy_available = lambda: False
    try:
        from transformers.utils import import_utils

        original = import_utils.define_import_structure
    except (ImportError, AttributeError):
        # This version of Transformers has no such function.
        return
    directory = Path(transformers.__file__).parent / "models"

    # Cached, like the function that it replaces.
    @functools.lru_cache
    def reuse_list(path: str, prefix: str | None = None) -> dict[frozenset[str], dict[str, set[str]]]:
        if Path(path) != directory / "__init__.py" or prefix is not None:
            return original(path, prefix)
        # Cached: `transformers` made the same call.
        of_transformers = original(directory, prefix="models")
        return {
            backends: {
                name.removeprefix("models."): objects for name, objects in of.items() if name.startswith("models.")
            }
            for backends, of in of_transformers.items()
        }

    import_utils.define_import_structure = reuse_list
    try:
        import transformers.models
    finally:
        import_utils.define_import_structure = original


def import_verifiers() -> None:
    """Import verifiers without the packages of Anthropic and of OpenAI's agents, which take half of its import.

    verifiers imports both for a client that few environments use, and for one function. Here they are imported when
    that client is made or the function is called, or when an environment imports them.
    """
    with _imported_when_called(_OF_VERIFIERS):
        import verifiers.utils.env_utils  # noqa: F401 - what loads environments, and imports all the rest
    sys.meta_path.insert(0, _ErrorsOfAnthropic())


_ANTHROPIC_CLIENT = "verifiers.clients.anthropic_messages_client"
_OF_VERIFIERS = {
    "anthropic": ("Anthropic", "AsyncAnthropic", "AuthenticationError", "PermissionDeniedError"),
    "agents.function_schema": ("function_schema",),
    _ANTHROPIC_CLIENT: ("AnthropicMessagesClient",),
}


class _ErrorsOfAnthropic(MetaPathFinder):
    """Tells verifiers the errors of Anthropic's package, once its client for it is imported."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == _ANTHROPIC_CLIENT:
            sys.meta_path.remove(self)
            from anthropic import AuthenticationError, PermissionDeniedError
            from verifiers.clients import client

            client.AUTH_ERRORS = (*client.AUTH_ERRORS, AuthenticationError, PermissionDeniedError)


@contextmanager
def _imported_when_called(of_modules: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Let the block import these names. The modules are imported when one of the names is called."""
    stand_ins = {}
    for module, names in of_modules.items():
        if module not in sys.modules:
            stand_ins[module] = ModuleType(module)
            vars(stand_ins[module]).update({name: _stand_in(module, name) for name in names})
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for module in stand_ins:
            del sys.modules[module]


def _stand_in(module: str, name: str) -> type[Exception]:
    """A class, for annotations and `except`. A call is one of the real class or function."""

    def call(cls: type, *args: object, **kwargs: object) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return type(name, (Exception,), {"__new__": call})


def module_and_name(path: str) -> tuple[str, str]:
    """The two parts of `module:function`; `module.function` works too."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    return module, name


def import_function(path: str) -> Callable[..., Any]:
    """The function that `module:function` names, in an installed package or in the directory that the run starts in.

    Raises:
        UserError: it cannot be imported, or is not a function.
    """
    # A program such as `orchestrator` does not search that directory by itself. It comes last, so that a file there
    # replaces no installed module.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    module, name = module_and_name(path)
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise UserError(f"cannot import {path!r}: {one_line(error)}{place_of(error)}") from error
    if not callable(function):
        raise UserError(f"{path!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def place_of(error: BaseException) -> str:
    """Where a user's code raised an error, as ` (losses.py, line 12)`. Empty if that was not in a file of the user's:
    the innermost frame outside of installed packages, of the standard library and of ours."""
    own = Path(__file__).resolve().parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        is_installed = "site-packages" in file.parts or file.is_relative_to(sys.base_prefix) or file.is_relative_to(own)
        if not is_installed and file.suffix == ".py":
            return f" ({file.name}, line {frame.lineno})"
    return ""

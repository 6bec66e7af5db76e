"""Unpickling that runs no code: for the index of a checkpoint, and for objects that ranks exchange.

torch pickles both. Otherwise, a user who can write a checkpoint or connect to a rank could run code as this user.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import pathlib
import pickle
import sys
import traceback
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

_VALUES: tuple[object, ...] = (
    collections.OrderedDict,
    pathlib.PosixPath,
    torch.Size,
    torch.device,
    torch.serialization._get_layout,
    traceback.FrameSummary,
    traceback.StackSummary,
)
"""Classes and functions without effects that torch pickles by name."""

_SCATTERED = "torch.distributed._state_dict_utils"
"""Names the shapes of the tensors that `set_model_state_dict` scatters."""

_RAISED_BY = ("builtins", "_pickle", "json", "pickle", "prime_rl", "safetensors", "torch", "zipfile")
"""Packages whose exceptions a rank may report to the others."""


class ForbiddenPickle(pickle.UnpicklingError):
    """A pickle names something other than plain values and torch's records of a checkpoint."""


class RankError(Exception):
    """Stands for an exception of another rank whose class is not loaded."""


class PlainUnpickler(pickle.Unpickler):
    """Loads plain values, exceptions, and the records that torch exchanges and saves for checkpoints.

    Raises:
        ForbiddenPickle: the pickle names anything else. Nothing has run then.
    """

    def find_class(self, module: str, name: str) -> Any:
        # Modules are looked up, not imported. A dotted name would reach what a module imports, such as `os.system`.
        found = getattr(sys.modules.get(module), name, None) if "." not in name else None
        if _is_plain(found, module):
            return found
        if isinstance(found, type) and issubclass(found, BaseException):
            return RankError
        raise ForbiddenPickle(f"a pickle names {module}.{name}, which may not be loaded")


def exchange_plain_objects() -> None:
    """Make the object collectives of torch load what they receive with `PlainUnpickler`.

    Raises:
        AttributeError: this torch unpickles in another way, and ranks would trust each other's pickles.
    """
    if not hasattr(c10d, "_unpickler"):
        raise AttributeError(
            "torch.distributed.distributed_c10d has no _unpickler: this torch unpickles in another way"
        )
    c10d._unpickler = PlainUnpickler


def _is_plain(found: object, module: str) -> bool:
    if isinstance(found, torch.dtype) or any(found is value for value in _VALUES):
        return True
    if not isinstance(found, type) or found.__module__ != module:
        return False
    if issubclass(found, BaseException):
        return module.partition(".")[0] in _RAISED_BY
    is_named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    is_record = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum) or is_named_tuple
    return is_record and (module == _SCATTERED or module.startswith("torch.distributed.checkpoint."))

"""User code that a config names as `module:object`: agents and workflows."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prime_rl.utils.errors import one_line
from prime_rl.utils.imports import module_and_name

Kind = Literal["workflow", "agent"]
CLIENTS = ("client", "http_client")
"""Arguments whose values are objects of the package openai."""
EPISODE, RUN = "arun_episode", "run"


Offered = Callable[[Callable[..., Any]], Mapping[str, Any]]


class BadTarget(Exception):
    """A name leads to nothing that can be run. The message is one line."""


@dataclass(frozen=True, slots=True)
class Target:
    """Code to run for each attempt.

    A workflow is called as `call(engine, row)`, an agent as `call(row, ...)` with those of the extras that its
    signature names.
    """

    kind: Kind
    call: Callable[..., Any]
    arguments: Mapping[str, Any]
    """Further keyword arguments of a plain function."""


def resolve(name: str) -> Any:
    """The object that `module:object` names; `module.object` works too.

    Raises:
        BadTarget: the module cannot be imported, or has no such object.
    """
    module_name, path = module_and_name(name)
    if not module_name or not path:
        raise BadTarget(f"{name!r} names no object: write module:object")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise BadTarget(f"{module_name!r} does not import: {one_line(error, 500)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise BadTarget(f"{module_name!r} has no {path!r}")
        found = getattr(found, part)
    return found


def load_target(name: str, arguments: Mapping[str, Any], offered: Offered = lambda _: {}) -> Target:
    """Import what a config names. A class is made with `arguments`; a function gets them with each call.

    `offered(function)` are arguments of the run for that class or function, over which those of the config win.

    Raises:
        BadTarget: it cannot be imported or made, or has neither `arun_episode` nor `run` and is no function.
    """
    found = resolve(name)
    is_made = inspect.isclass(found)
    if callable(found):
        arguments = {**offered(found), **arguments}
    if is_made:
        try:
            found = found(**arguments)
        except (Exception, SystemExit) as error:
            raise BadTarget(f"{name!r} cannot be made with {sorted(arguments)}: {one_line(error, 500)}") from error
    elif arguments and not inspect.isroutine(found):
        raise BadTarget(f"{name!r} is an instance and takes no arguments: give its class instead")
    left = {} if is_made else dict(arguments)
    if callable(getattr(found, EPISODE, None)):
        return Target("workflow", getattr(found, EPISODE), left)
    if callable(getattr(found, RUN, None)):
        return Target("agent", getattr(found, RUN), left)
    if callable(found):
        return Target("agent", found, left)
    raise BadTarget(f"{name!r} has no {EPISODE}(engine, data) and no {RUN}(data), and is not a function")


def needs_client(target: Target) -> bool:
    """Whether it asks the model through the client of `openai` that it is given."""
    return target.kind == "workflow" or bool(accepted(target.call, dict.fromkeys(CLIENTS)))


def accepted(call: Callable[..., Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Those extras that a function's signature names; all of them if it takes any keyword."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return dict(extras)
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return dict(extras)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {each.name for each in parameters if each.kind in by_name}
    return {name: value for name, value in extras.items() if name in named}

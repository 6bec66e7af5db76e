"""Says which wrong type an environment's author gave to verifiers, which reports a missing attribute of it."""

from __future__ import annotations

import inspect


def wrong_type(error: BaseException) -> str | None:
    """What is no environment, or no dataset, in words, if that is why verifiers could not load it. None otherwise."""
    for each in (error, error.__cause__):
        if isinstance(each, AttributeError) and each.name == "env_id":
            return _no_environment(each.obj)
        if isinstance(each, AttributeError) and each.name == "column_names":
            return f"its dataset is {_kind(each.obj)}, not a Dataset of `datasets`: Dataset.from_list(rows) makes one"
    return None


def _no_environment(returned: object) -> str:
    if inspect.iscoroutine(returned):
        returned.close()  # or Python warns that it was never awaited
        return "load_environment is an `async def`, and verifiers does not await it: write `def`"
    return f"load_environment returned {_kind(returned)}, not an environment of verifiers"


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"a value of type {type(value).__name__}"

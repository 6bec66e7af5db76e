"""The rewards that ship, by name. Nothing here imports them."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from prime_rl.environments.rewards.specs import DEFAULT_TIME_LIMIT_S, RewardFault, RewardSpec

_ROOM = "prime_rl.environments.rewards"
CODE_TIME_LIMIT_S = 120.0
"""A code reward runs many programs, each with a limit of its own in the sandbox."""


class Registered(NamedTuple):
    """A reward that ships: where it is, its time limit, and what it computes."""

    path: str
    summary: str
    timeout_s: float = DEFAULT_TIME_LIMIT_S


REWARDS: dict[str, Registered] = {
    "math": Registered(
        f"{_ROOM}.math_equality:math", "1 if the final expression equals the answer (math-verify), else 0"
    ),
}

ALIASES: dict[str, str] = {}
"""Other names of the same rewards: verifier types of RLVR."""


def resolve(spec: RewardSpec) -> tuple[str, float]:
    """`module:function` of a spec, and its time limit in seconds.

    Raises:
        RewardFault: the name is not registered.
    """
    if "." in spec.fn or ":" in spec.fn:
        module, _, function = spec.fn.rpartition(":" if ":" in spec.fn else ".")
        return f"{module}:{function}", spec.timeout_s or DEFAULT_TIME_LIMIT_S
    name = ALIASES.get(spec.fn, spec.fn).replace("-", "_")
    registered = REWARDS.get(name)
    if registered is None:
        near = difflib.get_close_matches(name, [*REWARDS, *ALIASES], n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise RewardFault(
            f"no reward is named {spec.fn!r}: {meant}the names are {', '.join(sorted(REWARDS))}; "
            "a function of your own is `package.module:function`"
        )
    return registered.path, spec.timeout_s or registered.timeout_s


def for_dataset(path: str) -> str:
    """The reward of a dataset that AReaL's registry knows by a part of its path.

    Raises:
        RewardFault: the path has none of the known parts.
    """
    known = {"clevr_count_70k": "clevr_count", "geometry3k": "geometry3k", "gsm8k": "gsm8k"}
    for part, name in known.items():
        if part in path:
            return name
    raise RewardFault(f"no reward belongs to the dataset {path!r}: the known parts of a path are {', '.join(known)}")

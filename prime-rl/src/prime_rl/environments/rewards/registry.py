"""The rewards that ship, by name. Nothing here imports them."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from prime_rl.environments.rewards.specs import DEFAULT_TIME_LIMIT_S, RewardFault, RewardSpec

_ROOM = "prime_rl.environments.rewards"
CODE_TIME_LIMIT_S = 120.0
"""A code reward runs many programs, each with a limit of its own in the sandbox."""


class Registered(NamedTuple):
    """A reward that ships: where it is, what it computes, and its time limit."""

    path: str
    summary: str
    timeout_s: float = DEFAULT_TIME_LIMIT_S


REWARDS: dict[str, Registered] = {
    "math": Registered(f"{_ROOM}.answers.math_equality:math", "the final expression equals `answer` (math-verify)"),
    "hendrycks_math": Registered(f"{_ROOM}.answers.math_equality:hendrycks_math", "`\\boxed{}`, or the text after *answer is*, equals `answer`"),
    "minerva_math": Registered(f"{_ROOM}.answers.math_equality:minerva_math", "a final answer, as Minerva's prompts ask for it, is `answer` as text"),
    "gsm8k": Registered(f"{_ROOM}.answers.gsm8k:gsm8k", "the number equals `answer`; `mode`: `strict`, `flexible`, `last_number`, `any`"),
    "allenai_gsm8k": Registered(f"{_ROOM}.answers.gsm8k:allenai_gsm8k", "the last number equals `answer`"),
    "multiple_choice": Registered(f"{_ROOM}.answers.choices:multiple_choice", "the letter or text chosen is `answer`"),
    "numeric": Registered(f"{_ROOM}.answers.units:numeric", "the number is `answer` within `rel_tol`, after conversion of units"),
    "exact_match": Registered(f"{_ROOM}.answers.matching:exact_match", "the text is `answer`, or one of a list"),
    "fuzzy_match": Registered(f"{_ROOM}.answers.matching:fuzzy_match", "similarity to `answer`, 0 to 1; with `threshold`, 1 or 0"),
    "json_schema": Registered(f"{_ROOM}.answers.json_schema:json_schema", "JSON that `schema` allows"),
    "geometry3k": Registered(f"{_ROOM}.answers.puzzles:geometry3k", "the last `[…]` or number equals that of `answer`"),
    "clevr_count": Registered(f"{_ROOM}.answers.puzzles:clevr_count", "the last `[number]` is `answer`"),
    "countdown": Registered(f"{_ROOM}.answers.puzzles:countdown", "uses each of `nums` once and gives `target`; 0.1 for a wrong try"),
    "ifeval": Registered(f"{_ROOM}.ifeval.instructions:ifeval", "the instructions of `ground_truth` are all followed"),
    "if_multi": Registered(f"{_ROOM}.ifeval.instructions:if_multi", "share of the instructions of `ground_truth` that are followed"),
    "mbpp": Registered(f"{_ROOM}.code.programs:mbpp", "all asserts of `test_list` hold", CODE_TIME_LIMIT_S),
    "humaneval": Registered(f"{_ROOM}.code.programs:humaneval", "`check(entry_point)` of `test` passes", CODE_TIME_LIMIT_S),
    "apps": Registered(f"{_ROOM}.code.programs:apps", "share of the cases of `input_output` that pass", CODE_TIME_LIMIT_S),
}  # fmt: skip

ALIASES: dict[str, str] = {
    "deepscaler": "math",
    "aime": "math",
    "allenai_math": "minerva_math",
    "clevr_count_70k": "clevr_count",
    "bracketed_number": "clevr_count",
    "exact": "exact_match",
    "fuzzy": "fuzzy_match",
    "if_multi_constraints": "if_multi",
}
"""Other names of the same rewards: verifier types of RLVR, datasets of AReaL, names in formats of rows."""


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

"""Reward specs as users write them, and the registry of the rewards that ship. Imports none of them."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from prime_rl.utils.errors import UserError
from prime_rl.utils.imports import module_and_name

_PACKAGE = "prime_rl.environments.rewards"
MODEL_PREFIX = "model:"
DEFAULT_TIME_LIMIT_S = 15.0
MODEL_TIME_LIMIT_S = 600.0
"""A rollout waits for those that the model scores before it."""
CODE_TIME_LIMIT_S = 120.0
"""A code reward runs many programs, each under the sandbox's own limit."""
OnTimeout = Literal["zero", "fail"]


class RewardFault(UserError):
    """The user's mistake: an unknown reward, or one that cannot be imported or called. The text is for users."""


class RewardSpec(BaseModel):
    """One part of the reward. A string alone is its `fn`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fn: str
    """A registered name (`math`), `package.module:function` (`package.module.function` works, too), or `model:PATH`, the
    reward model at a path or of the hub."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of this part in the reward. 0 only measures it."""
    args: dict[str, Any] = {}
    """Keyword arguments for the function, in addition to the row's columns. They win over columns of the same name."""
    timeout_s: float | None = Field(None, gt=0, le=3600)
    """Time limit of one call. Unset: the registered function's own, or 15 s."""
    on_timeout: OnTimeout | None = None
    """Result of a call that times out: `zero` is a reward of 0, `fail` a failed reward. Unset: `zero` for registered
    functions, which are slow only on strange answers, and for AReaL's signature, as in AReaL; `fail` for others."""
    name: str | None = None
    """Name of the metric. Unset: the function's name."""

    @field_validator("fn")
    @classmethod
    def _names_something(cls, fn: str) -> str:
        if not re.fullmatch(rf"[\w-]+|\w+(\.\w+)*[.:]\w+|{MODEL_PREFIX}.*/.*", fn):
            raise ValueError(f"{fn!r} is neither a registered name nor `package.module:function` nor `model:PATH`")
        return fn

    @property
    def metric(self) -> str:
        if self.model is not None:
            return self.name or "reward_model"
        return self.name or re.split(r"[.:]", self.fn)[-1].replace("-", "_")

    @property
    def model(self) -> str | None:
        """The path or hub id of a reward model; None for a function, such as one of a module `model`."""
        return self.fn.removeprefix(MODEL_PREFIX) if self.fn.startswith(MODEL_PREFIX) and "/" in self.fn else None

    @property
    def is_registered(self) -> bool:
        """Whether `fn` is a name, not a path."""
        return "." not in self.fn and ":" not in self.fn


Reward = Annotated[RewardSpec, BeforeValidator(lambda value: {"fn": value} if isinstance(value, str) else value)]
"""A `RewardSpec`, or the name of its function."""


class Registered(NamedTuple):
    """A reward that ships: `module:function`, a summary, and the time limit of a call."""

    path: str
    summary: str
    timeout_s: float = DEFAULT_TIME_LIMIT_S


REWARDS: dict[str, Registered] = {
    "math": Registered(f"{_PACKAGE}.math_equality:math", "the final expression equals `answer` (math-verify)"),
    "hendrycks_math": Registered(f"{_PACKAGE}.math_equality:hendrycks_math", "`\\boxed{}`, or the text after *answer is*, equals `answer`"),
    "minerva_math": Registered(f"{_PACKAGE}.math_equality:minerva_math", "a final answer, as Minerva's prompts ask for it, is `answer` as text"),
    "gsm8k": Registered(f"{_PACKAGE}.answers:gsm8k", "the number equals `answer`; `mode`: `strict`, `flexible`, `last_number`, `any`"),
    "allenai_gsm8k": Registered(f"{_PACKAGE}.answers:allenai_gsm8k", "the last number equals `answer`"),
    "multiple_choice": Registered(f"{_PACKAGE}.choices:multiple_choice", "the letter or text chosen is `answer`"),
    "numeric": Registered(f"{_PACKAGE}.units:numeric", "the number is `answer` within `rel_tol`, after conversion of units"),
    "exact_match": Registered(f"{_PACKAGE}.answers:exact_match", "the text is `answer`, or one of a list"),
    "fuzzy_match": Registered(f"{_PACKAGE}.answers:fuzzy_match", "similarity to `answer`, 0 to 1; with `threshold`, 1 or 0"),
    "json_schema": Registered(f"{_PACKAGE}.json_schema:json_schema", "JSON that `schema` allows"),
    "geometry3k": Registered(f"{_PACKAGE}.math_equality:geometry3k", "the last `[…]` or number equals that of `answer`"),
    "clevr_count": Registered(f"{_PACKAGE}.answers:clevr_count", "the last `[number]` is `answer`"),
    "countdown": Registered(f"{_PACKAGE}.answers:countdown", "uses each of `nums` once and gives `target`; 0.1 for a wrong try"),
    "ifeval": Registered(f"{_PACKAGE}.ifeval:ifeval", "the instructions of `ground_truth` are all followed"),
    "if_multi": Registered(f"{_PACKAGE}.ifeval:if_multi", "share of the instructions of `ground_truth` that are followed"),
    "mbpp": Registered(f"{_PACKAGE}.code:mbpp", "all asserts of `test_list` hold", CODE_TIME_LIMIT_S),
    "humaneval": Registered(f"{_PACKAGE}.code:humaneval", "`check(entry_point)` of `test` passes", CODE_TIME_LIMIT_S),
    "apps": Registered(f"{_PACKAGE}.code:apps", "share of the cases of `input_output` that pass", CODE_TIME_LIMIT_S),
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
"""Other names of these rewards: RLVR's verifier types, AReaL's datasets, names in the formats of `rows`."""


def resolve(spec: RewardSpec, folder: Path = Path()) -> tuple[str, float]:
    """Return `module:function` of a spec, and its time limit in seconds. Paths of models are relative to `folder`.

    Raises:
        RewardFault: the name is not registered, there is no such reward model, or it takes no such argument.
    """
    if spec.model is not None:
        if fault := _model_args_fault(spec) or model_fault(spec.model, folder):
            raise RewardFault(fault)
        return spec.fn, spec.timeout_s or MODEL_TIME_LIMIT_S
    if not spec.is_registered:
        module, function = module_and_name(spec.fn)
        return f"{module}:{function}", spec.timeout_s or DEFAULT_TIME_LIMIT_S
    name = ALIASES.get(spec.fn, spec.fn).replace("-", "_")
    registered = REWARDS.get(name)
    if registered is None:
        near = difflib.get_close_matches(name, [*REWARDS, *ALIASES], n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise RewardFault(
            f"there is no reward {spec.fn!r}: {meant}the names are {', '.join(sorted(REWARDS))}; "
            "a function of your own is `package.module:function`"
        )
    return registered.path, spec.timeout_s or registered.timeout_s


def _model_args_fault(spec: RewardSpec) -> str | None:
    if unknown := spec.args.keys() - {"device"}:
        return f"{spec.fn}: unknown argument {sorted(unknown)[0]!r}; there is device"
    device = str(spec.args.get("device", "cpu"))
    if not re.fullmatch(r"cpu|cuda:\d+", device):
        return f"{spec.fn}: device must be 'cpu' or such as 'cuda:3', got {device!r}"
    return None


def model_fault(path: str, folder: Path = Path()) -> str | None:
    """Why there is no reward model at `path`, from `folder`. None if there is one, or if it is an id of the hub."""
    found = folder / path
    if not found.is_dir():
        is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(".") and not found.parent.is_dir()
        return None if is_id else f"model:{path}: no such folder"
    try:
        config = json.loads((found / "config.json").read_text(encoding="utf-8"))
        names = list(config.get("architectures") or [])
    except (OSError, ValueError, AttributeError, TypeError):
        return f"model:{path}: the folder holds no model: name one with a config.json, such as OUT/weights/step_40"
    if not any(str(name).endswith("ForSequenceClassification") for name in names):
        kind = ", ".join(map(str, names)) or "no class"
        return f"model:{path}: is no reward model (its config.json names {kind}): train one with `medarc_train rm`"
    return None


def for_dataset(path: str) -> str:
    """The reward of a dataset, recognized by a part of its path as in AReaL's registry.

    Raises:
        RewardFault: the path has none of the known parts.
    """
    known = {"clevr_count_70k": "clevr_count", "geometry3k": "geometry3k", "gsm8k": "gsm8k"}
    for part, name in known.items():
        if part in path:
            return name
    raise RewardFault(f"no reward is known for the dataset {path!r}: the known parts of a path are {', '.join(known)}")

"""Every numeric key of every config has a range, and a value outside it is refused in one line that names the range."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import annotated_types
import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.docs import ROOTS
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import ConfigError, load_config
from prime_rl.utils.pydantic_config.describe import bounds_text
from prime_rl.utils.pydantic_config.schema import Section, alternatives, list_items, walk_fields

ANY_FINITE = {
    "a reward may be any number": ("correct_reward", "easy_threshold", "hard_threshold", "target"),
    "a divergence estimated by k1 may be negative": ("high", "low"),
    "an offset to a log-probability, in either direction": ("logprob_offset",),
}
"""Numbers without bounds, by reason."""

NO_UPPER = {
    "a very large limit switches the rule off": (
        "behaviour_weight_cap",
        "clip_high",
        "dual_clip",
        "geo_mask_high",
        "geo_mask_low",
        "kl_target",
        "limit",
        "max_mean_abs_diff",
        "max_norm",
        "min_delta",
        "min_entropy",
        "ratio_cap",
        "sequence_clip_high",
        "sequence_mask_high",
        "sequence_mask_low",
        "token_mask_high",
        "token_mask_low",
        "value_clip",
        "weight_high",
        "weight_low",
    ),
    "a factor of a term, whose scale is the user's": (
        "adv_tau",
        "alpha",
        "entropy_coef",
        "final_weight",
        "kl_coef",
        "kl_tau",
        "observation_coef",
        "penalty",
        "sft_coef",
        "teacher_tau",
    ),
    "only its ratio to the others counts": ("env_ratios", "weight"),
}
"""Floating-point numbers with a lower bound only, by reason."""


def numeric_keys() -> Iterator[tuple[str, Section, FieldInfo, type]]:
    seen = set()
    for root in ROOTS:
        for path, owner, field in walk_fields(root):
            kinds = alternatives(field.annotation)
            number = next((kind for kind in (*kinds, *(list_items(kinds) or ())) if kind in (int, float)), None)
            if number is not None and (owner, path[-1]) not in seen:
                seen.add((owner, path[-1]))
                yield path[-1], owner, field, number


KEYS = [pytest.param(*each, id=f"{each[1].__module__}.{each[1].__name__}.{each[0]}") for each in numeric_keys()]


def test_there_are_numeric_keys_to_check() -> None:
    assert len(KEYS) > 200


def accepts(owner: Section, field: FieldInfo, value: Any) -> bool:
    """Whether a key of `owner` takes `value`, or a list of it."""
    if list_items(alternatives(field.annotation)) is not None:
        value = [value]
    # Config classes carry the setting that refuses NaN and infinity, so the key is checked with it.
    finite = {"allow_inf_nan": owner.model_config.get("allow_inf_nan", True)}
    adapter = TypeAdapter(field.rebuild_annotation(), config=finite)
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def limits(field: FieldInfo) -> tuple[list[float], list[float]]:
    """Lower and upper bounds, wherever they are declared."""
    text = bounds_text(field).replace("_", "").split(", ")
    lower = [float(bound.split()[1]) for bound in text if bound.startswith(">")]
    return lower, [float(bound.split()[1]) for bound in text if bound.startswith("<")]


@pytest.mark.parametrize(("name", "owner", "field", "number"), KEYS)
def test_a_key_declares_its_range_or_stands_in_a_table(
    name: str, owner: Section, field: FieldInfo, number: type
) -> None:
    lower, upper = limits(field)
    unbounded = [key for keys in ANY_FINITE.values() for key in keys]
    half_bounded = [key for keys in NO_UPPER.values() for key in keys]
    assert bool(lower) == (name not in unbounded)
    assert bool(upper) == (name not in unbounded + half_bounded)


@pytest.mark.parametrize(("name", "owner", "field", "number"), KEYS)
def test_a_key_refuses_impossible_values(name: str, owner: Section, field: FieldInfo, number: type) -> None:
    lower, upper = limits(field)
    impossible: list[Any] = [math.inf, -math.inf, math.nan, "inf", "nan", 10**400, "1e999", "9" * 5000]
    impossible += [bound - 1 - abs(bound) for bound in lower] + [bound * 2 + 1 for bound in upper]
    if number is int:
        impossible += [2**63, -(2**63) - 1, str(2**63), 0.5]
    for value in impossible:
        assert not accepts(owner, field, value), value


@pytest.mark.parametrize(("name", "owner", "field", "number"), KEYS)
def test_a_key_accepts_its_default_and_both_ends_of_its_range(
    name: str, owner: Section, field: FieldInfo, number: type
) -> None:
    default = field.get_default(call_default_factory=True)
    ends = [each.ge for each in field.metadata if isinstance(each, annotated_types.Ge)]
    ends += [each.le for each in field.metadata if isinstance(each, annotated_types.Le)]
    values = [default] if isinstance(default, int | float) and not isinstance(default, bool) else []
    assert all(accepts(owner, field, value) for value in (*values, *ends))


@pytest.mark.parametrize(
    ("root", "options", "fault"),
    [
        (TrainerConfig, "optim.lr=inf", "--optim.lr: should be at least 0 and at most 100 (got 'inf')"),
        (TrainerConfig, "optim.betas1=1e308", "--optim.betas1: should be at least 0 and below 1 (got '1e308')"),
        (TrainerConfig, "loss.kl-tau=nan", "--loss.kl-tau: should be a finite number at least 0 (got 'nan')"),
        (InferenceConfig, "server.port=-1", "--server.port: should be at least 0 and at most 65535 (got '-1')"),
        (
            InferenceConfig,
            "gpu-memory-utilization=-1",
            "--gpu-memory-utilization: should be above 0 and at most 1 (got '-1')",
        ),
        (
            OrchestratorConfig,
            "sampling.repetition-penalty=0",
            "--sampling.repetition-penalty: should be at least 0.01 and at most 100 (got '0')",
        ),
        (
            OrchestratorConfig,
            "eval.sampling.temperature=1e-9",
            "--eval.sampling.temperature: should be 0, or from 0.0001 to 100 (got '1e-9')",
        ),
        (
            OrchestratorConfig,
            "buffer.easy-threshold=nan",
            "--buffer.easy-threshold: should be a finite number (got 'nan')",
        ),
        (RLConfig, "max-steps=-4", "--max-steps: should be at least 0 and at most 1_000_000_000 (got '-4')"),
        (
            RLConfig,
            "deployment.gpus-per-node=1000000",
            "--deployment.gpus-per-node: should be at least 1 and at most 1024 (got '1000000')",
        ),
        (SFTConfig, "data.seed=-1", "--data.seed: should be at least 0 and at most 4_294_967_295 (got '-1')"),
    ],
)
def test_the_line_names_key_and_range(root: type[Any], options: str, fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(root, overrides=[f"--{options}"])
    assert error.value.faults == (fault,)


@pytest.mark.parametrize(
    ("root", "options"),
    [
        (RLConfig, ["--ckpt.resume-step", "-1"]),
        (RLConfig, ["--max-steps", "0"]),
        (RLConfig, ["--orchestrator.eval.num-examples", "-1"]),
        (RLConfig, ["--orchestrator.eval.sampling.top-k", "-1"]),
        (RLConfig, ["--orchestrator.eval.sampling.temperature", "0"]),
        (RLConfig, ["--orchestrator.seed", "-7"]),
        (RLConfig, ["--orchestrator.buffer.easy-threshold", "-0.5"]),
        (RLConfig, ["--trainer.optim.max-norm", "1e30"]),
        (RLConfig, ["--trainer.loss.sequence-mask-high", "1e12"]),
        (SFTConfig, ["--optim.lr", "0"]),
    ],
)
def test_what_files_of_prime_rl_say_stays_accepted(root: type[Any], options: list[str]) -> None:
    assert load_config(root, overrides=options)

"""Every key says what a resume does when it has changed."""

from __future__ import annotations

from collections import Counter

import pytest

from prime_rl.configs.surface.docs import ROOTS
from prime_rl.configs.surface.resuming import RESUME_RULES, rule_for
from prime_rl.configs.surface.root import RootConfig
from prime_rl.utils.pydantic_config.schema import walk_fields

RESUMED = [root for root in ROOTS if root.component not in ("eval", "env_server")]
"""Configs of runs that can be resumed: all but evaluations and environment servers."""


def keys_of(root: type[RootConfig]) -> set[str]:
    return {".".join(path) for path, _, _ in walk_fields(root)}


@pytest.mark.parametrize("root", RESUMED, ids=lambda root: root.component)
def test_every_key_has_a_rule(root: type[RootConfig]) -> None:
    assert {key: rule_for(root.component, key).effect for key in keys_of(root)}.keys() == keys_of(root)


def test_no_key_has_two_rules() -> None:
    named = Counter(
        f"{component}{key[1:]}" if key.startswith("*") else key
        for rule in RESUME_RULES
        for key in rule.keys
        for component in (("sft", "trainer") if key.startswith("*") else ("",))
    )
    assert [key for key, count in named.items() if count > 1] == []


@pytest.mark.parametrize("key", [key for rule in RESUME_RULES for key in rule.keys])
def test_every_rule_is_for_a_key_that_exists(key: str) -> None:
    component, _, rest = key.partition(".")
    components = ("sft", "trainer") if component == "*" else (component,)
    owners = [root for root in RESUMED if root.component in components]
    assert len(owners) == len(components)
    assert rest == "" or all(rest in keys_of(root) for root in owners)


@pytest.mark.parametrize("rule", [rule for rule in RESUME_RULES if rule.unless], ids=lambda rule: rule.keys[0])
def test_what_lifts_a_refusal_is_a_key_of_the_component(rule) -> None:
    for key in rule.keys:
        (root,) = [root for root in RESUMED if root.component == key.split(".")[0]]
        assert rule.unless in keys_of(root)


@pytest.mark.parametrize(
    "rule", [rule for rule in RESUME_RULES if rule.effect == "refused"], ids=lambda rule: rule.keys[0]
)
def test_a_refusal_says_why(rule) -> None:
    assert rule.why

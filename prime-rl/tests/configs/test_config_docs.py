"""The reference of every key, and the list of what is not built."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.docs import ROOTS, reference
from prime_rl.configs.surface.not_built import NOT_BUILT, NotBuilt, refuse_unbuilt, unbuilt_faults
from prime_rl.configs.surface.root import RootConfig
from prime_rl.utils.pydantic_config import ConfigWarning, load_config
from prime_rl.utils.pydantic_config.describe import field_doc
from prime_rl.utils.pydantic_config.schema import walk_fields

PAGE = Path(__file__).parents[3] / "docs" / "config.md"
RL = ("--trainer", "--orchestrator", "--inference")


@pytest.mark.skipif(not PAGE.is_file(), reason="docs/config.md is not part of an installed prime-rl")
def test_the_reference_is_current() -> None:
    advice = "run: python -m prime_rl.configs.surface.docs > docs/config.md"
    assert PAGE.read_text() == reference(), advice


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_every_key_and_section_says_what_it_means(root: type[RootConfig]) -> None:
    undocumented = [".".join(path) for path, owner, _ in walk_fields(root) if not field_doc(owner, path[-1])]
    nameless = {owner.__name__ for _, owner, _ in walk_fields(root) if not owner.__doc__}
    assert (undocumented, nameless) == ([], set())


@pytest.mark.parametrize("entry", NOT_BUILT, ids=lambda entry: entry.key)
def test_what_is_not_built_is_a_key_of_a_class(entry) -> None:
    component, _, key = entry.key.partition(".")
    (root,) = [root for root in ROOTS if root.component == component]
    assert tuple(key.split(".")) in {path for path, _, _ in walk_fields(root)}


def test_defaults_ask_for_nothing_that_is_not_built() -> None:
    assert unbuilt_faults(load_config(RLConfig, [], RL)) == []
    assert unbuilt_faults(SFTConfig()) == []


def test_a_run_is_refused_for_what_is_not_built(capsys) -> None:
    options = ["--trainer.max-concurrent-runs=2", "--deployment.num-train-gpus=2", "--max-model-len=9"]
    run = load_config(RLConfig, [], [*RL, *options])
    with pytest.raises(SystemExit) as caught:
        refuse_unbuilt(run)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert "error: max_model_len = 9 is not supported yet: set `inference.model.max_model_len`" in lines
    assert any(line.startswith("error: trainer.max_concurrent_runs = 2 is not supported yet") for line in lines)


def test_what_is_not_built_is_found_in_every_item_of_a_list() -> None:
    entries = [NotBuilt("orchestrator.eval.env.skip_first", "why")]
    eval_env = '{"env": [{"id": "x"}, {"id": "y", "skip_first": 3}]}'
    run = load_config(RLConfig, [], [*RL, "--orchestrator.eval", eval_env])
    assert unbuilt_faults(run, entries) == ["orchestrator.eval.env.1.skip_first = 3 is not supported yet: why"]


def test_a_key_without_effect_is_warned_of_and_not_refused() -> None:
    options = [
        *RL,
        "--trainer.log.vf-level=debug",
        "--orchestrator.model.trust-remote-code",
        "--trainer.model.impl=custom",
    ]
    with pytest.warns(ConfigWarning) as caught:
        assert unbuilt_faults(load_config(RLConfig, [], options)) == []
    assert [str(warning.message) for warning in caught] == [
        "trainer.model.impl = 'custom' has no effect: models come from Transformers, as with auto",
        "trainer.log.vf_level has no effect: the trainer runs no environments",
        "orchestrator.model.trust_remote_code has no effect: the orchestrator loads no model code",
    ]


def test_only_the_named_values_are_refused() -> None:
    assert unbuilt_faults(load_config(SFTConfig, [], ["--model.attn=sdpa"])) == []
    assert (
        "model.attn = 'fa4'"
        in unbuilt_faults(load_config(SFTConfig, [], ["--model.attn=fa4", "--model.impl=custom"]))[0]
    )

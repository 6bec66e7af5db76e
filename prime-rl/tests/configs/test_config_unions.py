"""Unions: sections whose `type` chooses their keys. Both spellings of every key, and a `type` that a layer changes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import BaseModel

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.docs import ROOTS
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import ConfigError, ConfigWarning, load_config
from prime_rl.utils.pydantic_config.layers import Layer, merge_layers, set_at, with_underscores
from prime_rl.utils.pydantic_config.schema import alternatives, list_items, sections_among, tag_of, walk_fields

NEEDED = {
    "eval": {"environment_ids": ["x"]},
    "sft": {"data": {"seq_len": 64}},
    "dpo": {"data": {"seq_len": 64}},
    "rm": {"data": {"seq_len": 64}},
}
"""What a root has no default for, by component."""
REQUIRED = {"import_path": "x.y", "num_train_nodes": 1, "num_infer_nodes": 1}
"""Keys without a default, of some variant."""

Section = type[BaseModel]


def unions() -> Iterator[tuple[type, str, tuple[Section, ...]]]:
    """Root, key and variants of every union. Those in lists have no key that a stronger layer could change alone."""
    for root in ROOTS:
        for path, _, field in walk_fields(root):
            variants = sections_among(alternatives(field.annotation))
            if len(variants) > 1:
                yield root, ".".join(path), variants


def variants() -> Iterator[tuple[type, str, Section]]:
    for root, key, sections in unions():
        for section in sections:
            yield root, key, section


def changes() -> Iterator[tuple[type, str, Section, Section]]:
    """Every change of a union's type that leaves keys behind."""
    for root, key, sections in unions():
        for old in sections:
            for new in sections:
                if set(old.model_fields) - set(new.model_fields):
                    yield root, key, old, new


def table_at(key: str, value: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    set_at(data, key.split("."), value)
    return data


def values_of(section: Section) -> dict[str, Any]:
    """A raw value for each key of a variant, `type` included."""
    values = {}
    for name, field in section.model_fields.items():
        value = REQUIRED[name] if field.is_required() else field.get_default(call_default_factory=True)
        if not isinstance(value, BaseModel):
            values[name] = 1 if value is None else value
    return values


def kebab(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.replace("_", "-"): kebab(item) for key, item in value.items()}
    return value


def merged_of(root: type, *tables: dict[str, Any]) -> dict[str, Any]:
    layers = [Layer(f"{index}.toml", table) for index, table in enumerate(tables)]
    return merge_layers(root, [with_underscores(root, layer) for layer in layers])


def test_there_are_unions_in_every_root_that_has_components() -> None:
    found = {(root.component, key) for root, key, _ in unions()}
    assert {
        ("rl", "trainer.optim"),
        ("rl", "orchestrator.advantage"),
        ("rl", "deployment"),
        ("sft", "data"),
        ("sft", "scheduler"),
        ("trainer", "loss"),
        ("orchestrator", "rollout_transport"),
    } <= found


@pytest.mark.parametrize(("root", "key", "section"), list(variants()), ids=str)
def test_every_key_of_a_union_takes_dashes(root: type, key: str, section: Section) -> None:
    plain = table_at(key, values_of(section))
    assert merged_of(root, kebab(plain)) == plain


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.component)
def test_every_key_of_a_root_takes_dashes(root: type) -> None:
    for path, _, field in walk_fields(root):
        lists = sections_among(list_items(alternatives(field.annotation)) or ())
        plain: dict[str, Any] = {}
        set_at(plain, path, [] if lists else 1)
        if not any(isinstance(item, list) for item in plain.values()):
            assert merged_of(root, kebab(plain)) == plain


def test_files_with_dashes_load(toml) -> None:
    file = toml(
        "max-steps = 4\n[data]\nmicro-batch-size = 2\nbatch-size = 8\n[data.loss-mask]\nuser = true\n"
        "[optim]\nweight-decay = 0.5\n"
    )
    config = load_config(SFTConfig, [file])
    assert (config.max_steps, config.data.micro_batch_size, config.data.loss_mask.user) == (4, 2, True)
    assert config.optim.weight_decay == 0.5


def test_items_of_a_list_take_dashes(toml) -> None:
    file = toml("[trainer]\n[[orchestrator.filters]]\ntype = 'repetition'\nprob-threshold = 0.5")
    assert load_config(RLConfig, [file]).orchestrator.filters[0].prob_threshold == 0.5


def test_keys_of_the_users_own_stay_as_they_are(toml) -> None:
    file = toml(
        "[trainer]\n[orchestrator.client.headers]\nX-Team-Name = 'a'\n"
        "[orchestrator.sampling.extra-body]\ntop-n = 1\n[[orchestrator.env]]\nargs = {max-turns = 2}\n"
    )
    orchestrator = load_config(RLConfig, [file]).orchestrator
    assert orchestrator.client.headers == {"X-Team-Name": "a"}
    assert orchestrator.sampling.extra_body == {"top-n": 1}
    assert orchestrator.env[0].args == {"max-turns": 2}


def test_one_spelling_overrides_the_other_in_a_weaker_file(toml) -> None:
    base = toml("[optim]\nweight-decay = 0.1", "base.toml")
    over = toml("[optim]\nweight_decay = 0.2", "over.toml")
    assert load_config(TrainerConfig, [base, over]).optim.weight_decay == 0.2
    assert load_config(TrainerConfig, [over, base]).optim.weight_decay == 0.1


def test_both_spellings_in_one_file_are_a_fault(toml, faults) -> None:
    file = toml("[optim]\nweight-decay = 0.1\nweight_decay = 0.2")
    assert faults(TrainerConfig, files=(file,)) == [
        f"{file}: optim.weight_decay: is written twice, with dashes and with underscores: remove one of them"
    ]


@pytest.mark.parametrize(("root", "key", "old", "new"), list(changes()), ids=str)
def test_a_stronger_type_drops_the_keys_of_the_type_before(root: type, key: str, old: Section, new: Section) -> None:
    """File over file: the keys that both types have stay, the others go with one warning that names them."""
    union = key.split(".")[-1]
    with pytest.warns(ConfigWarning) as caught:
        result = merged_of(root, table_at(key, values_of(old)), table_at(key, {"type": tag_of(new)}))
    for part in key.split("."):
        result = result[part]
    shared = {name: value for name, value in values_of(old).items() if name in new.model_fields}
    assert result == shared | {"type": tag_of(new)}
    (warning,) = {str(item.message) for item in caught}
    assert warning.startswith(f"1.toml: {key}.type = {tag_of(new)!r} replaces {tag_of(old)!r}; ignored: {key}.")
    assert warning.endswith("(0.toml)")
    for name in set(values_of(old)) - set(shared):
        assert f"{union}.{name}" in warning


LINEAR = "max_steps = 100\n[scheduler]\ntype = 'linear'\nmin_lr = 1e-7\ndecay_steps = 3\nwarmup_steps = 2"
"""A file whose keys another type of scheduler lacks in part."""


def load_with_warnings(files: list[Path], *options: str) -> tuple[TrainerConfig, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        config = load_config(TrainerConfig, files, options)
    return config, list(dict.fromkeys(str(item.message) for item in caught))


def test_an_argument_changes_the_type_of_a_file(toml) -> None:
    file = toml(LINEAR)
    config, warned = load_with_warnings([file], "--scheduler.type", "cosine")
    assert (config.scheduler.type, config.scheduler.min_lr, config.scheduler.warmup_steps) == ("cosine", 1e-7, 2)
    assert warned == [
        f"--scheduler.type: scheduler.type = 'cosine' replaces 'linear'; ignored: scheduler.decay_steps ({file})"
    ]
    assert load_with_warnings([file], "--scheduler.type", "constant")[0].scheduler.type == "constant"


def test_json_and_a_section_file_change_the_type_too(toml) -> None:
    file, section = toml(LINEAR), toml("type = 'constant'", "section.toml")
    assert load_with_warnings([file], "--scheduler", '{"type": "constant"}')[0].scheduler.type == "constant"
    config, warned = load_with_warnings([file], "--scheduler", "@", str(section))
    assert config.scheduler.type == "constant"
    assert len(warned) == 1


def test_a_file_changes_the_type_of_the_environment(toml, monkeypatch) -> None:
    monkeypatch.setenv("PRIME_RL_SCHEDULER__TYPE", "linear")
    monkeypatch.setenv("PRIME_RL_SCHEDULER__DECAY_STEPS", "3")
    file = toml("max_steps = 100\n[scheduler]\ntype = 'cosine'")
    config, warned = load_with_warnings([file])
    assert config.scheduler.type == "cosine"
    assert warned == [
        f"{file}: scheduler.type = 'cosine' replaces 'linear'; ignored: scheduler.decay_steps "
        "(PRIME_RL_SCHEDULER__DECAY_STEPS)"
    ]


def test_the_constructor_follows_the_same_rule(toml) -> None:
    config = TrainerConfig(_cli_parse_args=["@", str(toml(LINEAR)), "--scheduler.type", "constant"])
    assert config.scheduler.type == "constant"


def test_the_default_type_counts_as_the_type_before(toml) -> None:
    file = toml("[optim]\nbetas1 = 0.8\nbetas2 = 0.9")
    config, warned = load_with_warnings([file], "--optim.type", "sgd")
    assert config.optim.type == "sgd"
    assert "ignored: optim.betas1, optim.betas2" in warned[0]


def test_the_same_type_again_drops_nothing(toml) -> None:
    config, warned = load_with_warnings([toml(LINEAR)], "--scheduler.type", "linear")
    assert (config.scheduler.decay_steps, warned) == (3, [])


def test_a_wrong_key_is_no_key_of_the_type_before(toml, faults) -> None:
    """Misspelled keys are reported for every type, and so are keys that do not fit their own layer's type."""
    file = toml("[scheduler]\ntype = 'linear'\ndecay_stepss = 3")
    assert faults(TrainerConfig, "--scheduler.type", "cosine", files=(file,)) == [
        f"{file}: scheduler.decay_stepss: unknown key; did you mean scheduler.decay_steps?"
    ]
    file = toml("[scheduler]\ndecay_steps = 3")
    assert faults(TrainerConfig, "--scheduler.type", "cosine", files=(file,)) == [
        f"{file}: scheduler.decay_steps: unknown key; it belongs to scheduler.type = 'linear', "
        "but scheduler.type is 'cosine' (from --scheduler.type)"
    ]


@pytest.mark.parametrize("root", [root for root in ROOTS if root not in (RLConfig,)], ids=lambda root: root.component)
def test_a_config_with_dashes_is_the_same_config(root: type, toml) -> None:
    """The resolved defaults, written out and read with dashes."""
    try:
        plain = load_config(root, [], NEEDED.get(root.component, {}))
    except ConfigError as error:
        pytest.fail(str(error))
    dump = plain.model_dump(mode="json", exclude_none=True)
    file = toml(tomli_w.dumps(kebab_sections(root, dump)))
    assert load_config(root, [file]) == plain


def kebab_sections(root: type, dump: dict[str, Any]) -> dict[str, Any]:
    """The dump with dashes in the keys that are ours."""
    paths = {path for path, _, _ in walk_fields(root)}

    def spelled(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [spelled(item, path) for item in value]
        if not isinstance(value, dict):
            return value
        return {
            key.replace("_", "-") if (*path, key) in paths else key: spelled(item, (*path, key))
            for key, item in value.items()
        }

    return spelled(dump, ())

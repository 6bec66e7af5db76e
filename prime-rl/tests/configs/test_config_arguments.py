"""The command line: every way to write a value."""

from __future__ import annotations

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import get_unknown_args, load_config, parse_argv


def trainer(*args: str) -> TrainerConfig:
    return parse_argv(TrainerConfig, argv=args)


def orchestrator(*args: str) -> OrchestratorConfig:
    return parse_argv(OrchestratorConfig, argv=args)


@pytest.mark.parametrize(
    "args", [("--model.seq-len", "9"), ("--model.seq_len", "9"), ("--model.seq-len=9",), ("--Model.SEQ-LEN", "9")]
)
def test_names_take_dashes_underscores_and_any_case(args: tuple[str, ...]) -> None:
    assert trainer(*args).model.seq_len == 9


def test_a_value_after_an_equals_sign_is_never_altered() -> None:
    config = trainer("--wandb.name=my_run=--x", "--output_dir=a_b/@c")
    assert (config.wandb.name, str(config.output_dir)) == ("my_run=--x", "a_b/@c")


def test_a_repeated_scalar_takes_the_last_value() -> None:
    assert trainer("--max-steps", "1", "--max-steps", "2").max_steps == 2


def test_negative_numbers_are_values() -> None:
    assert trainer("--ckpt.resume-step", "-1").ckpt.resume_step == -1


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--model.fsdp-cpu-offload",), True),
        (("--model.fsdp-cpu-offload", "true"), True),
        (("--model.fsdp-cpu-offload=false",), False),
        (("--no-model.fsdp-cpu-offload",), False),
        (("--no_model.fsdp_cpu_offload",), False),
    ],
)
def test_booleans_are_flags_or_take_a_value(args: tuple[str, ...], expected: bool) -> None:
    assert trainer(*args).model.fsdp_cpu_offload is expected


@pytest.mark.parametrize(("args", "expected"), [(("null",), None), (("false",), False), ((), True)])
def test_an_optional_boolean_takes_null_too(args: tuple[str, ...], expected: bool | None) -> None:
    assert parse_argv(InferenceConfig, argv=["--enable-prefix-caching", *args]).enable_prefix_caching is expected


def test_a_bare_section_is_switched_on_with_its_defaults() -> None:
    assert trainer("--ckpt").ckpt.interval is None


def test_the_key_of_a_section_wins_over_json_for_it_in_any_order() -> None:
    config = trainer("--ckpt.interval", "5", "--ckpt", '{"interval": 1, "keep_last": 2}')
    assert (config.ckpt.interval, config.ckpt.keep_last) == (5, 2)


@pytest.mark.parametrize("args", [("--no-ckpt",), ("--ckpt", "null"), ("--ckpt", "None"), ("--ckpt=null",)])
def test_a_section_of_a_file_can_be_switched_off(toml, args: tuple[str, ...]) -> None:
    file = toml("[ckpt]\ninterval = 5")
    assert load_config(TrainerConfig, [file], args).ckpt is None


@pytest.mark.parametrize(
    "args",
    [
        ("--client.base-url", "http://a,http://b"),
        ("--client.base-url", "http://a", "--client.base-url", "http://b"),
        ("--client.base-url", '["http://a", "http://b"]'),
        ("--client.base-url", "[http://a,http://b]"),
    ],
)
def test_lists_by_commas_repetition_or_json(args: tuple[str, ...]) -> None:
    assert orchestrator(*args).client.base_url == ["http://a", "http://b"]


def test_an_empty_list_is_empty() -> None:
    assert trainer("--model.lora.modules-to-save", "[]").model.lora.modules_to_save == []


@pytest.mark.parametrize(
    "args", [("--env", '{"id": "x"}', "--env", '{"id": "y"}'), ("--env", '[{"id": "x"}, {"id": "y"}]')]
)
def test_lists_of_sections_by_json(args: tuple[str, ...]) -> None:
    assert [env.id for env in orchestrator(*args).env] == ["x", "y"]


def test_a_list_replaces_the_file_s(toml) -> None:
    file = toml('[[env]]\nid = "a"')
    assert [env.id for env in load_config(OrchestratorConfig, [file], ["--env", '{"id": "b"}']).env] == ["b"]


def test_tables_by_json_or_pairs_join_the_file_s(toml) -> None:
    file = toml("[sampling.extra_body]\na = 1")
    args = ["--sampling.extra-body", '{"b": [1]}', "--sampling.extra-body", "c=2,d=x", "--client.headers", "n=1"]
    config = load_config(OrchestratorConfig, [file], args)
    assert config.sampling.extra_body == {"a": 1, "b": [1], "c": 2, "d": "x"}
    assert config.client.headers == {"n": "1"}


def test_a_union_is_chosen_by_its_type() -> None:
    config = trainer("--optim.type", "muon", "--optim.mu", "0.9")
    assert (config.optim.type, config.optim.mu) == ("muon", 0.9)


def test_a_partial_union_stays_the_default_variant() -> None:
    assert trainer("--optim.lr", "1e-5").optim.type == "adamw"
    assert parse_argv(SFTConfig, argv=["--data.name", "x"]).data.type == "sft"


def test_the_optional_advantage_is_a_union_like_the_others() -> None:
    assert orchestrator("--advantage", "null").advantage is None
    assert orchestrator("--no-advantage").advantage is None
    assert orchestrator("--advantage.length-weighted-mean").advantage.length_weighted_mean
    assert orchestrator("--advantage", '{"type": "custom", "import_path": "a.b"}').advantage.import_path == "a.b"
    assert orchestrator("--advantage.type", "custom", "--advantage.import-path", "a.b").advantage.type == "custom"


@pytest.mark.parametrize("name", ["skip-eval-on-resume", "skip_eval_on_restart"])
def test_the_eval_alias_works_with_its_negation(name: str) -> None:
    assert orchestrator(f"--no-eval.{name}").eval.skip_eval_on_resume is False


def test_flash_attention_4_is_fa4() -> None:
    assert trainer("--model.attn", "flash_attention_4", "--model.impl", "custom").model.attn == "fa4"


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--max-step", "5"], "--max-step: unknown option; did you mean --max-steps?"),
        (["--trainer.lr", "5"], "--trainer.lr: unknown option; did you mean --optim.lr or --critic.optim.lr?"),
        (["--max-steps"], "--max-steps: needs a value"),
        (["--max-steps", "--ckpt"], "--max-steps: needs a value"),
        (["--no-max-async-level"], "--no-max-async-level: unknown option"),
        (["--no-ckpt=3"], "--no-ckpt: takes no value"),
        (["-x"], "-x: unknown option; options start with two dashes"),
        (["x.toml"], "x.toml: unexpected argument; to read a config file, write `@ x.toml`"),
        (["--ckpt", "{"], "--ckpt: '{' is not JSON"),
        (["--ckpt=5"], "--ckpt: '5' is not a JSON object"),
        (["--loss.type", "custom", "--loss.kwargs", "x"], "--loss.kwargs: 'x' is neither a JSON object nor key=value"),
        (["--max-steps", "abc"], "--max-steps: should be a valid integer (got 'abc')"),
        (["--max-async-level=-4"], "--max-async-level: should be at least 0 and at most 1_000_000_000 (got '-4')"),
    ],
)
def test_a_bad_option_is_one_line(faults, args: list[str], fault: str) -> None:
    found = faults(TrainerConfig, *args)
    assert len(found) == 1
    assert found[0].startswith(fault)


def test_every_bad_option_is_told(faults) -> None:
    assert len(faults(RLConfig, "--trainer", "--nope", "1", "--max-steps", "--also-nope")) == 3


def test_inference_leaves_other_options_to_the_engine() -> None:
    argv = ["--server.port=9", "--no-enable-lora", "--seed", "7", "--max-num-seqs", "4", "--tool=x", "-tp", "2"]
    config = parse_argv(InferenceConfig, allow_extras=True, argv=argv)
    assert (config.server.port, config.seed) == (9, 7)
    assert get_unknown_args() == ["--max-num-seqs", "4", "--tool=x", "-tp", "2"]


def test_a_negative_number_after_an_option_of_inference_is_its_value() -> None:
    with pytest.raises(ValueError, match=r"--seed: should be at least 0 and at most 4_294_967_295 \(got '-1'\)"):
        parse_argv(InferenceConfig, allow_extras=True, argv=["--seed", "-1", "--max-num-seqs", "4"])


def test_a_mistyped_key_of_an_inference_section_is_no_extra() -> None:
    with pytest.raises(ValueError, match=r"did you mean --server\.port"):
        parse_argv(InferenceConfig, allow_extras=True, argv=["--server.prot", "9"])


def test_help_lists_every_option_and_ends_well(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_argv(RLConfig, argv=["--help"])
    assert caught.value.code == 0
    assert "--trainer.optim.betas2  (float, >= 0, < 1, default 0.999)" in capsys.readouterr().out

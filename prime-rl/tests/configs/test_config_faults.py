"""What a wrong config says: where, which key, what is wrong, what to write instead."""

from __future__ import annotations

import pytest

from prime_rl.configs.env_server import EnvServerConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.docs import ROOTS
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import ConfigError, load_config, parse_argv_or_exit
from prime_rl.utils.pydantic_config.schema import walk_fields


@pytest.mark.parametrize(
    ("config_cls", "text", "fault"),
    [
        (TrainerConfig, "max-step = 3", "max-step: unknown key; did you mean max_steps?"),
        (TrainerConfig, "[optim]\nlrr = 1", "optim.lrr: unknown key; did you mean optim.lr?"),
        (TrainerConfig, "lr = 1", "lr: unknown key; did you mean optim.lr or critic.optim.lr?"),
        (TrainerConfig, "[trainer.optim]\nlr = 1", "trainer: unknown key; leave out `trainer`"),
        (
            TrainerConfig,
            "[scheduler]\nmin_lrr = 1\ntype = 'cosine'",
            "scheduler.min_lrr: unknown key; did you mean scheduler.min_lr?",
        ),
        (TrainerConfig, "[rollout_transport]\nprot = 1", "rollout_transport.prot: unknown key; did you mean"),
        (
            SFTConfig,
            "[data.loss_mask]\nasistant = true",
            "data.loss_mask.asistant: unknown key; did you mean data.loss_mask.assistant?",
        ),
        (SFTConfig, "[data]\nnmae = 'x'", "data.nmae: unknown key; did you mean data.name?"),
        (
            OrchestratorConfig,
            "[advantage]\ntype = 'custom'\nimport_path = 'x.y'\nkwarg = 1",
            "advantage.kwarg: unknown key; did you mean advantage.kwargs?",
        ),
        (
            OrchestratorConfig,
            "[[filters]]\ntype = 'repetition'\nwindows = 3",
            "filters.0.windows: unknown key; did you mean filters.0.window?",
        ),
        (OrchestratorConfig, "[[env]]\nidd = 'x'", "env.0.idd: unknown key; did you mean env.0.id?"),
        (InferenceConfig, "[parallel]\ntpp = 2", "parallel.tpp: unknown key; did you mean parallel.tp?"),
        (EnvServerConfig, "[env]\nidd = 'x'", "env.idd: unknown key; did you mean env.id?"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(toml, faults, config_cls: type, text: str, fault: str) -> None:
    file = toml(text)
    found = faults(config_cls, files=(file,))
    assert len(found) == 1
    assert found[0].startswith(f"{file}: {fault}")


@pytest.mark.parametrize(
    ("config_cls", "text", "fault"),
    [
        (TrainerConfig, "max_steps = 'abc'", "max_steps: should be a valid integer (got 'abc')"),
        (
            TrainerConfig,
            "max_steps = 10.5",
            "max_steps: should be a valid integer, got a number with a fractional part (got 10.5)",
        ),
        (
            TrainerConfig,
            "max_steps = [10]",
            "max_steps: should be one integer, at least 0 and at most 1_000_000_000 (got [10])",
        ),
        (
            OrchestratorConfig,
            "[eval]\nrollouts_per_example = [3, 4]",
            "eval.rollouts_per_example: should be one integer, at least 1 and at most 1_000_000_000 (got [3, 4]); "
            "set rollouts_per_example in each [[eval.env]] to have one for each",
        ),
        (SFTConfig, "[data]\nsplits = 'test'", "data.splits: should be a list, such as [\"test\"] (got 'test')"),
        (SFTConfig, "[data]\nsplits = 3", "data.splits: should be a list (got 3)"),
        (
            SFTConfig,
            "[data]\nsources = 'a'",
            "data.sources: should be a list of tables: write [[data.sources]] (got 'a')",
        ),
        (TrainerConfig, "ckpt = 3", "ckpt: should be a table (got 3)"),
        (TrainerConfig, "output_dir = 3", "output_dir: should be a path (got 3)"),
        (TrainerConfig, "[optim]\nlr = -1", "optim.lr: should be at least 0 and at most 100 (got -1)"),
        (
            TrainerConfig,
            "[optim]\ntype = 'muonn'",
            "optim: its `type` should be 'sgd', 'adamw', 'adamw8bit', 'adamw4bit', 'adafactor' or 'muon' (got 'muonn')",
        ),
        (
            TrainerConfig,
            "[model]\nattn = 'flash_attention_1'",
            "model.attn: should be 'sdpa', 'flash_attention_2', 'flash_attention_3' or 'fa4' (got "
            "'flash_attention_1'); did you mean 'flash_attention_3'?",
        ),
        (
            TrainerConfig,
            "[model]\nfused_lm_head_chunk_size = 12",
            "model.fused_lm_head_chunk_size: should be at least 512 and at most 1_000_000_000 or should be "
            "'auto' or 'disabled' (got 12)",
        ),
        (TrainerConfig, "[loss]\ntype = 'custom'", "loss.import_path: is required"),
        (
            OrchestratorConfig,
            "[[filters]]\nenforce = true",
            "filters.0: its `type` is required: 'gibberish' or 'repetition'",
        ),
        (
            OrchestratorConfig,
            "[sampling]\ntemperature = 0",
            "sampling.temperature: should be at least 0.0001 and at most 100 (got 0)",
        ),
        (
            OrchestratorConfig,
            "[sampling.temp_scheduler]\nstart_temperature = 1\nend_temperature = 0",
            "sampling.temp_scheduler.end_temperature: should be at least 0.0001 and at most 100 (got 0)",
        ),
        (
            OrchestratorConfig,
            "[sampling.temp_scheduler]\nend_temperature = 1",
            "sampling.temp_scheduler.start_temperature: is required",
        ),
        (
            OrchestratorConfig,
            "[buffer]\nhash_keys = []",
            "buffer.hash_keys: List should have at least 1 item after validation, not 0 (got [])",
        ),
        (RLConfig, "orchestrator = 3\n[trainer]", "orchestrator: should be a table (got 3)"),
        (
            OrchestratorConfig,
            "[eval]\nskip_eval_on_resume = true\nskip_eval_on_restart = true",
            "eval.skip_eval_on_restart: is another name for a key that is also set: remove one of them",
        ),
    ],
)
def test_a_wrong_value_is_told_with_its_key(toml, faults, config_cls: type, text: str, fault: str) -> None:
    file = toml(text)
    assert faults(config_cls, files=(file,)) == [f"{file}: {fault}"]


def test_no_key_tells_twice_what_it_got() -> None:
    tried, told = set(), []
    for root in ROOTS:
        for path, owner, _ in walk_fields(root):
            if (owner, path[-1]) in tried:
                continue
            tried.add((owner, path[-1]))
            try:
                load_config(root, [], [f"--{'.'.join(path)}", "misspelled"])
            except ConfigError as error:
                told += error.faults
    assert len(told) > 500
    assert [fault for fault in told if fault.count("(got ") > 1] == []


def test_a_key_of_another_variant_names_the_variant_and_who_chose(toml, faults) -> None:
    file = toml("[optim]\ntype = 'adamw'\nnesterov = false")
    assert faults(TrainerConfig, files=(file,)) == [
        f"{file}: optim.nesterov: unknown key; it belongs to optim.type = 'sgd', "
        f"but optim.type is 'adamw' (from {file})"
    ]
    assert faults(TrainerConfig, "--optim.mu", "1") == [
        "--optim.mu: unknown key; it belongs to optim.type = 'muon', but optim.type is 'adamw'"
    ]


def test_each_fault_names_the_file_that_holds_it(toml, faults) -> None:
    base = toml("[optim]\nlr = 'x'\nweight_decay = 'x'", "base.toml")
    over = toml("[optim]\nlr = 'y'", "over.toml")
    assert faults(TrainerConfig, "--max-steps=z", files=(base, over)) == [
        f"{over}: optim.lr: should be a valid number (got 'y')",
        f"{base}: optim.weight_decay: should be a valid number (got 'x')",
        "--max-steps: should be a valid integer (got 'z')",
    ]


def test_a_broken_rule_names_every_source_of_its_section(toml, faults) -> None:
    file = toml("[model]\nfsdp_cpu_offload = true")
    assert faults(TrainerConfig, "--model.optim-cpu-offload", files=(file,)) == [
        f"{file}, command line: model: fsdp_cpu_offload holds the optimizer state too: remove optim_cpu_offload"
    ]


def test_every_broken_rule_of_a_section_is_told(faults) -> None:
    found = faults(TrainerConfig, "--loss.token-mask-low", "9", "--loss.geo-mask-low", "99")
    assert [fault.split(" (")[0] for fault in found] == [
        "command line: loss: token_mask_low",
        "command line: loss: geo_mask_low",
    ]


def test_a_command_prints_faults_and_warnings_as_lines(capsys, toml) -> None:
    file = toml("[trainer.log]\nlevel = 'debug'\n[trainer.optim]\nlrr = 1\n[orchestrator]\nnope = 1")
    with pytest.raises(SystemExit) as caught:
        parse_argv_or_exit(RLConfig, argv=["@", str(file)])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["warning", "error", "error"]


def test_a_fault_that_validation_takes_from_the_data_is_told_once(toml, faults) -> None:
    file = toml("[data]\nseq_len = 'big'\nloss_mask.usr = true\n[val.data]\nname = 'x'\n")
    assert sorted(faults(SFTConfig, files=(file,))) == [
        f"{file}: data.loss_mask.usr: unknown key; did you mean data.loss_mask.user?",
        f"{file}: data.seq_len: should be a valid integer (got 'big')",
    ]

"""Files: the `@` syntax, inheritance, deep merging, and what a broken file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import ConfigError, load_config, parse_argv


def test_a_child_file_overrides_its_base_key_by_key(toml) -> None:
    toml("max_steps = 5\n[optim]\nlr = 1.0\nweight_decay = 0.5", "base.toml")
    child = toml('toml_files = ["base.toml"]\n[optim]\nlr = 2.0', "child.toml")
    config = load_config(TrainerConfig, [child])
    assert (config.max_steps, config.optim.lr, config.optim.weight_decay) == (5, 2.0, 0.5)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    base, child = tmp_path / "base.toml", tmp_path / "child.toml"
    base.write_text("max_steps = 5\n", encoding="utf-8-sig")
    child.write_text('toml_files = ["base.toml"]\nmax_async_level = 2\n', encoding="utf-8-sig")
    config = load_config(TrainerConfig, [child])
    assert (config.max_steps, config.max_async_level) == (5, 2)


def test_the_child_wins_over_every_ancestor_and_a_later_base_over_an_earlier_one(toml) -> None:
    toml("max_steps = 1\nmax_async_level = 1\ndist_timeout_seconds = 1", "grandparent.toml")
    toml('toml_files = ["grandparent.toml"]\nmax_steps = 2\nmax_async_level = 2', "first.toml")
    toml("max_async_level = 3", "second.toml")
    child = toml('toml_files = ["first.toml", "second.toml"]\nmax_steps = 9', "child.toml")
    config = load_config(TrainerConfig, [child])
    assert (config.max_steps, config.max_async_level, config.dist_timeout_seconds) == (9, 3, 1)


def test_files_that_stand_on_each_other_are_read_once(toml) -> None:
    toml('toml_files = ["b.toml"]\nmax_steps = 1', "a.toml")
    b = toml('toml_files = ["a.toml"]\nmax_async_level = 3', "b.toml")
    assert load_config(TrainerConfig, [b]).max_steps == 1


def test_bases_are_relative_to_the_file_that_names_them(toml) -> None:
    toml("max_steps = 7", "deep/base.toml")
    child = toml('toml_files = ["base.toml"]', "deep/child.toml")
    assert load_config(TrainerConfig, [child]).max_steps == 7


def test_several_files_layer_left_to_right_and_inherit(toml) -> None:
    toml("max_steps = 1\n[optim]\nlr = 1.0", "base.toml")
    first = toml('toml_files = ["base.toml"]\n[optim]\nweight_decay = 0.5', "first.toml")
    second = toml("[optim]\nlr = 3.0", "second.toml")
    config = parse_argv(TrainerConfig, argv=["@", str(first), f"@{second}"])
    assert (config.max_steps, config.optim.lr, config.optim.weight_decay) == (1, 3.0, 0.5)


def test_lists_are_replaced_whole(toml) -> None:
    base = toml('[model.lora]\ntarget_modules = ["a", "b"]', "base.toml")
    over = toml('[model.lora]\ntarget_modules = ["c"]', "over.toml")
    assert load_config(TrainerConfig, [base, over]).model.lora.target_modules == ["c"]


@pytest.mark.parametrize("section", ["--trainer.model.ac", "--trainer.Model.AC"])
def test_a_dotted_section_takes_a_file(toml, section: str) -> None:
    ac = toml("freq = 3", "ac.toml")
    config = parse_argv(RLConfig, argv=["--orchestrator", section, "@", str(ac)])
    assert config.trainer.model.ac.freq == 3


@pytest.mark.parametrize("section", ["--rollout-transport", "--rollout_transport"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_section_takes_a_file_under_either_spelling(toml, section: str, joined: bool) -> None:
    zmq = str(toml('type = "zmq"\nport = 7', "zmq.toml"))
    argv = [section, f"@{zmq}"] if joined else [section, "@", zmq]
    assert parse_argv(TrainerConfig, argv=argv).rollout_transport.port == 7


def test_a_section_file_is_merged_into_the_section_of_the_root_file(toml) -> None:
    root = toml("[model]\nname = 'm'\nseq_len = 64", "root.toml")
    model = toml('toml_files = ["more.toml"]\nseq_len = 128', "model.toml")
    toml("impl = 'hf'", "more.toml")
    config = parse_argv(TrainerConfig, argv=["@", str(root), "--model", "@", str(model)])
    assert (config.model.name, config.model.seq_len, config.model.impl) == ("m", 128, "hf")


@pytest.mark.parametrize("flag", ["--dry-run", "--no-dry-run", "--bench", "--no-ckpt"])
def test_a_flag_before_an_at_is_not_a_section(toml, flag: str) -> None:
    run = toml("[trainer]\n[orchestrator]\n[inference]\nmax_loras = 3")
    config = parse_argv(RLConfig, argv=[flag, "@", str(run)])
    assert config.inference.max_loras == 3


def test_three_section_files_and_gpu_ids_make_a_run(toml) -> None:
    trainer = toml("max_steps = 4\n[model]\nname = 'm'", "trainer.toml")
    orchestrator = toml("max_steps = 4\n[model]\nname = 'm'", "orchestrator.toml")
    inference = toml("[model]\nname = 'm'", "inference.toml")
    argv = [
        "--trainer",
        "@",
        str(trainer),
        "--orchestrator",
        "@",
        str(orchestrator),
        "--inference",
        "@",
        str(inference),
    ]
    config = parse_argv(RLConfig, argv=[*argv, "--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "6,7"])
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ([0, 1], [6, 7])
    assert (config.deployment.num_infer_gpus, config.deployment.num_train_gpus) == (2, 2)
    assert (config.inference.parallel.dp, config.orchestrator.num_train_workers) == (2, 2)


def test_options_win_wherever_they_stand(toml) -> None:
    file = str(toml("max_steps = 5"))
    assert parse_argv(TrainerConfig, argv=["--max-steps", "6", "@", file]).max_steps == 6


def test_a_syntax_error_names_file_line_and_column(toml, faults) -> None:
    file = toml("max_steps = 5\nx = = 3")
    assert faults(TrainerConfig, files=(file,)) == [f"{file}:2:5: not TOML: Invalid value"]


def test_a_syntax_error_at_the_end_has_a_place_too(toml, faults) -> None:
    file = toml('name = "abc')
    assert faults(TrainerConfig, files=(file,))[0].startswith(f"{file}:1:12: not TOML: ")


def test_each_missing_file_is_a_fault(tmp_path: Path, faults) -> None:
    gone = tmp_path / "gone.toml"
    assert faults(TrainerConfig, files=(gone, tmp_path)) == [
        f"{gone}: no such file",
        f"{tmp_path}: a directory, not a TOML file",
    ]


def test_a_missing_base_is_a_fault(toml, tmp_path: Path, faults) -> None:
    child = toml('toml_files = ["gone.toml"]')
    assert faults(TrainerConfig, files=(child,)) == [f"{tmp_path / 'gone.toml'}: no such file"]


def test_toml_files_is_never_accepted_and_ignored(toml, faults) -> None:
    inside = toml('[trainer]\ntoml_files = ["base.toml"]')
    assert "trainer.toml_files: move it to the top of the file" in faults(RLConfig, files=(inside,))[0]
    wrong = toml("toml_files = 3")
    assert "should be a list of file names" in faults(TrainerConfig, files=(wrong,))[0]
    assert "name a file with `@ file`" in faults(TrainerConfig, "--toml-files", "x.toml")[0]


@pytest.mark.parametrize("argv", [["@"], ["--trainer", "@"]])
def test_an_at_without_a_file_is_a_fault(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="write a file after it"):
        parse_argv(RLConfig, argv=argv)


def test_text_that_is_not_utf8_is_a_fault(tmp_path: Path, faults) -> None:
    file = tmp_path / "latin.toml"
    file.write_bytes(b"name = '\xe9'")
    assert faults(TrainerConfig, files=(file,)) == [f"{file}: not UTF-8 text (byte 8)"]


def test_loading_leaves_no_file_behind(toml, tmp_path: Path) -> None:
    file = toml("max_steps = 5")
    parse_argv(RLConfig, argv=["--trainer", "@", str(file), "--orchestrator", "@", str(file)])
    assert list(tmp_path.iterdir()) == [file]

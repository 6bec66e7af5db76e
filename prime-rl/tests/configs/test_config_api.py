"""The helpers that code outside of this package calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pydantic_settings
import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils import pydantic_config as api


@pytest.fixture
def run_file(toml) -> Path:
    return toml("max_steps = 5\n[trainer.optim]\nlr = 1.0\n[orchestrator]\n[inference]")


@pytest.fixture
def rl_files(run_file: Path):
    RLConfig.set_toml_files([run_file])
    yield
    RLConfig.clear_toml_files()


def test_options_beat_files_beat_keywords_beat_the_environment(monkeypatch, rl_files) -> None:
    monkeypatch.setenv("PRIME_RL_MAX_STEPS", "1")
    monkeypatch.setenv("PRIME_RL_MAX_ASYNC_LEVEL", "3")
    args = api.to_kebab_case(["--trainer.optim.weight_decay", "0.5", "--orchestrator.batch_size=7"])
    run = RLConfig(_cli_parse_args=args, max_steps=2, seq_len=64, trainer={"optim": {"lr": 2.0, "betas1": 0.5}})
    assert (run.max_steps, run.max_async_level, run.seq_len) == (5, 3, 64)
    optim = run.trainer.optim
    assert (optim.lr, optim.betas1, optim.weight_decay, run.orchestrator.batch_size) == (1.0, 0.5, 0.5, 7)


def test_files_belong_to_the_class_they_were_set_on(rl_files) -> None:
    assert TrainerConfig().max_steps is None
    RLConfig.clear_toml_files()
    assert RLConfig().max_steps is None


def test_the_paths_of_arguments_can_be_set_as_they_are(toml) -> None:
    toml("[optim]\nlr = 3.0\nweight_decay = 0.5", "base.toml")
    trainer = toml('toml_files = ["base.toml"]\n[optim]\nlr = 4.0', "trainer.toml")
    args = ["--orchestrator", "--trainer", "@", str(trainer), "--max-steps", "3"]
    paths, rest = api.extract_toml_paths(args)
    assert [path.name for path in paths] == ["base.toml", "trainer.toml"]
    assert rest == ["--orchestrator", "--max-steps", "3"]
    assert len(args) == 6
    RLConfig.set_toml_files(paths)
    try:
        run = RLConfig(_cli_parse_args=rest)
    finally:
        RLConfig.clear_toml_files()
    assert (run.trainer.optim.lr, run.trainer.optim.weight_decay, run.max_steps) == (4.0, 0.5, 3)


def test_a_boolean_flag_keeps_its_place_when_the_class_is_known(run_file: Path) -> None:
    paths, rest = api.extract_toml_paths(["--dry-run", "@", str(run_file)], RLConfig)
    assert (paths, rest) == ([run_file], ["--dry-run"])


def test_inheritance_is_followed_once(toml) -> None:
    base = toml("max_steps = 1", "base.toml")
    child = toml('toml_files = ["base.toml"]', "child.toml")
    seen: list[Path] = []
    assert api.check_path_and_handle_inheritance(child, seen, None) is True
    assert seen == [base, child]
    assert api.check_path_and_handle_inheritance(child, seen, None) is None


def test_kebab_case_changes_names_only() -> None:
    args = ["--a_b.c_d=e_f", "g_h", "-i_j", "--k_l"]
    assert api.to_kebab_case(args) is args
    assert args == ["--a-b.c-d=e_f", "g_h", "-i_j", "--k-l"]


def test_all_fields_come_parents_first_without_optional_sections() -> None:
    fields = api.get_all_fields(InferenceConfig)
    assert fields.index("server") < fields.index("server.port") < fields.index("model.name")
    assert "inference.model" not in api.get_all_fields(RLConfig)
    assert api.get_all_fields(InferenceConfig()) == fields


def test_unknown_arguments_are_split_off_with_their_values() -> None:
    args = ["--server.port=9", "--foo", "a", "b", "--seed", "-1", "--no-enable-lora", "--bar"]
    known, unknown = api.parse_unknown_args(args, InferenceConfig)
    assert known == ["--server.port=9", "--seed", "-1", "--no-enable-lora"]
    assert unknown == ["--foo", "a", "b", "--bar"]


def test_unknown_arguments_are_kept_for_later() -> None:
    api.set_unknown_args(["--x"])
    assert api.get_unknown_args() == ["--x"]


def test_a_temporary_file_has_a_fresh_path(tmp_path: Path) -> None:
    first, second = api.get_temp_toml_file(), api.get_temp_toml_file()
    assert first != second
    assert first.parent == Path(".pydantic_config")
    assert first.parent.is_dir()
    assert not first.exists()


def test_roots_are_settings_and_sections_are_not() -> None:
    assert issubclass(RLConfig, pydantic_settings.BaseSettings)
    assert issubclass(OrchestratorConfig, api.BaseSettings)
    assert not issubclass(OrchestratorConfig, api.BaseConfig)
    assert issubclass(ClientConfig, api.BaseConfig)
    assert ClientConfig(elastic={"hostname": "h"}).is_elastic


def test_a_subclass_may_choose_its_sources(monkeypatch) -> None:
    class KeywordsOnly(TrainerConfig):
        @classmethod
        def settings_customise_sources(cls, settings_cls, init_settings, **_):
            return (init_settings,)

    monkeypatch.setenv("PRIME_RL_MAX_STEPS", "1")
    assert KeywordsOnly(max_async_level=3).max_async_level == 3
    assert KeywordsOnly().max_steps is None


def test_a_dict_of_overrides_is_stronger_than_files(run_file: Path) -> None:
    run = api.load_config(RLConfig, [run_file], {"max_steps": 9, "output_dir": Path("out")})
    assert (run.trainer.max_steps, run.output_dir) == (9, Path("out"))


def test_overrides_may_name_files_too(run_file: Path, toml) -> None:
    more = toml("max_steps = 8", "more.toml")
    assert api.load_config(RLConfig, [run_file], ["@", str(more)]).max_steps == 8


HEAVY = ("torch", "transformers", "numpy", "datasets", "verifiers", "wandb", "httpx")


def test_configs_load_without_anything_heavy(run_file: Path) -> None:
    code = (
        "import sys\nfrom prime_rl.configs import rl, sft, env_server\n"
        "from prime_rl.configs.surface import not_built, docs\n"
        "from prime_rl.utils.pydantic_config import parse_argv\n"
        f"parse_argv(rl.RLConfig, argv=['@', {str(run_file)!r}])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_command_s_mistake_ends_with_status_2_and_no_traceback() -> None:
    code = (
        "from prime_rl.configs.rl import RLConfig\nfrom prime_rl.utils.pydantic_config import parse_argv_or_exit\n"
        "parse_argv_or_exit(RLConfig)"
    )
    done = subprocess.run([sys.executable, "-c", code, "@", "gone.toml"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: gone.toml: no such file\n")

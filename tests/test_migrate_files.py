"""Whole files: of other versions, with what they become, and of this version, which stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medarc_rl.errors import UsageError
from medarc_rl.migrate.rules import migrate
from medarc_rl.migrate.text import split_statements
from prime_rl.configs.surface.not_built import unbuilt_faults
from prime_rl.configs.surface.root import ROOTS
from prime_rl.utils.pydantic_config import load_config, to_toml

ROOT = Path(__file__).resolve().parents[1]
EXPECTED = sorted((ROOT / "tests" / "migrations").glob("*.expected.toml"))
OLD = [path.with_name(path.name.replace(".expected", "")) for path in EXPECTED]
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.toml") if path.name != "pyproject.toml")

MEANT: dict[str, dict[str, Any]] = {
    "older_rl": {
        "inference_gpu_ids": [0],
        "trainer.max_async_level": 2,
        "orchestrator.max_async_level": 2,
        "orchestrator.ckpt.keep_last": 2,
        "trainer.model.lora.rank": 8,
        "trainer.model.lora.alpha": 16.0,
        "trainer.loss.token_mask_high": 8.0,
        "orchestrator.env.0.id": "reverse-text",
        "orchestrator.env.0.args": {"min_words": 3},
        "orchestrator.eval.env.1.id": "gsm8k",
        "orchestrator.eval.env.1.num_examples": 64,
        "orchestrator.eval.env.1.args": {"split": "test"},
        "orchestrator.eval.rollouts_per_example": 4,
        "orchestrator.client.timeout": 600,
    },
    "older_sft": {"clean_output_dir": False, "model.lora.rank": 16, "ckpt.keep_last": 3, "data.seq_len": 512},
    "older_eval": {"environments.1.num_examples": 20, "environments.1.rollouts_per_example": 4, "steps": [10, 20]},
    "older_trainer": {"max_async_level": 1, "loss.sequence_mask_low": 0.01},
    "older_orchestrator": {"env.1.id": "code", "buffer.env_ratios": [0.25, 0.75], "max_async_level": 1},
    "older_inference": {"gpu_memory_utilization": 0.8, "parallel.tp": 2},
    "newer_rl": {
        "output_dir": Path("outputs/math"),
        "clean_output_dir": True,
        "trainer.ckpt.resume_step": 20,
        "trainer.wandb.project": "math",
        "trainer.rollout_transport.port": 5600,
        "orchestrator.rollout_transport.port": 5600,
        "orchestrator.rollouts_per_example": 8,
        "orchestrator.max_inflight_rollouts": 256,
        "orchestrator.sampling.max_tokens": 512,
        "orchestrator.env.1.id": "math",
        "orchestrator.buffer.env_ratios": [0.25, 0.75],
        "orchestrator.eval.env.0.num_examples": 30,
        "orchestrator.eval.eval_base_model": False,
        "orchestrator.eval.skip_eval_on_resume": True,
        "orchestrator.eval.sampling.max_tokens": 300,
        "orchestrator.client.base_url": ["http://localhost:8000/v1"],
        "inference.parallel.tp": 2,
        "inference.gpu_memory_utilization": 0.8,
    },
    "newer_sft": {"output_dir": Path("runs/sft"), "ckpt.resume_step": -1, "deployment.num_gpus": 2, "val": None},
    "newer_eval": {"environments.0.num_examples": 50, "environments.0.rollouts_per_example": 4},
    "newer_trainer": {"dist_timeout_seconds": 3600, "model.compile.fullgraph": True, "loss.type": "custom"},
    "newer_orchestrator": {"rollouts_per_example": 8, "env.0.id": "reverse-text", "eval.sampling.max_tokens": 64},
    "newer_inference": {"parallel.dp": 2, "seed": 3, "model.enforce_eager": True, "server.port": 8000},
}
"""Values of the config that the new file loads as."""


def kind_in(path: Path) -> str:
    return path.name.split("_")[1].split(".")[0]


def setting(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


@pytest.mark.parametrize(("old", "expected"), list(zip(OLD, EXPECTED, strict=True)), ids=lambda path: path.stem)
def test_a_file_keeps_its_meaning_its_order_and_its_comments(old: Path, expected: Path) -> None:
    assert migrate(old).text == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda path: path.stem)
def test_the_new_file_loads_as_what_was_meant(expected: Path) -> None:
    config = load_config(ROOTS[kind_in(expected)], [expected])
    meant = MEANT[expected.name.removesuffix(".expected.toml")]
    assert {key: setting(config, key) for key in meant} == meant
    assert unbuilt_faults(config) == []


@pytest.mark.parametrize("path", EXPECTED + EXAMPLES, ids=lambda path: path.parent.name + path.stem)
def test_a_file_of_this_version_stays_as_it_is(path: Path) -> None:
    kind = kind_in(path) if path in EXPECTED else path.stem.split("_")[0]
    migration = migrate(path, kind)
    assert migration.text == path.read_text(encoding="utf-8")
    assert migration.report == (f"{path}: {kind} config of this version: nothing to change",)
    assert migration.complete


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name + path.stem)
def test_every_key_of_this_version_stays_as_it_is(path: Path, tmp_path: Path) -> None:
    """A resolved config has them all."""
    kind = path.stem.split("_")[0]
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(to_toml(load_config(ROOTS[kind], [path])), encoding="utf-8")
    migration = migrate(resolved)
    assert migration.text == resolved.read_text(encoding="utf-8")
    assert migration.complete, migration.report


COMBINATIONS = {
    "0 at the top was ignored by older versions": (
        "rl",
        "max_steps = 0\nasync_level = 1\n[trainer]\n[orchestrator]\n",
        "# not carried: max_steps = 0\nmax_async_level = 1\n[trainer]\n[orchestrator]\n",
    ),
    "both components of older versions set the run's directory": (
        "rl",
        'async_level = 1\n[trainer]\noutput_dir = "runs/a"\n[orchestrator]\noutput_dir = "runs/a"\n',
        'max_async_level = 1\noutput_dir = "runs/a"\n[trainer]\n[orchestrator]\n',
    ),
    "run.dir overrides run.name and output_dir": (
        "sft",
        'output_dir = "a"\nrun = { dir = "b", name = "c" } # here\n',
        'output_dir = "b" # here\n',
    ),
    "environments in two forms": (
        "orchestrator",
        'batch_size = 8\nenvironment_ids = ["a"]\n[[env]]\nid = "b"\n',
        'batch_size = 8\n# not carried: environment_ids = ["a"]\n[[env]]\nid = "b"\n',
    ),
    "counts that do not fit the environments": (
        "orchestrator",
        '[eval]\nenvironment_ids = ["a", "b"]\nnum_examples = [1, 2, 3]\n',
        '[[eval.env]]\nid = "a"\n# not carried: eval.num_examples = [1, 2, 3]\n\n[[eval.env]]\nid = "b"\n',
    ),
    "sources with different group sizes": (
        "orchestrator",
        '[[train.source]]\nenv.taskset.id = "a"\ngroup_size = 4\n'
        '[[train.source]]\nenv.taskset.id = "b"\ngroup_size = 8\n',
        '[[env]]\nid = "a"\n# not carried: train.source.group_size = 4\n'
        '\n[[env]]\nid = "b"\n# not carried: train.source.group_size = 8\n',
    ),
    "a ratio for only one of two sources": (
        "orchestrator",
        'group_size = 2\n[[train.source]]\nenv.taskset.id = "a"\nratio = 0.5\n[[train.source]]\nenv.taskset.id = "b"\n',
        'rollouts_per_example = 2\n\n[[env]]\nid = "a"\n# not carried: train.source.ratio = 0.5\n\n[[env]]\nid = "b"\n',
    ),
    "several nodes": (
        "rl",
        '[deployment]\ntype = "multi_node"\nnum_train_nodes = 2\nnum_infer_nodes = 1\n[trainer]\n[orchestrator]\n'
        "[inference]\n[slurm]\n",
        '[deployment]\ntype = "multi_node"\nnum_train_nodes = 2\nnum_infer_nodes = 1\n[trainer]\n[orchestrator]\n'
        "[inference]\n[slurm]\n",
    ),
}
"""Command, old file and new file."""


@pytest.mark.parametrize(("kind", "old", "new"), COMBINATIONS.values(), ids=COMBINATIONS)
def test_settings_that_depend_on_each_other(kind: str, old: str, new: str, tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(old, encoding="utf-8")
    migration = migrate(file, kind)
    assert migration.text == new, migration.report


def test_a_file_that_several_commands_could_read_is_not_guessed_at(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text('max_steps = 3\n[model]\nname = "x"\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"some\.toml: its keys belong to .*sft.* and .*: choose one with --as"):
        migrate(file)
    assert migrate(file, "sft").complete


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\nname = "x"\n[tool.ruff]\nline-length = 120\n', encoding="utf-8")
    with pytest.raises(UsageError, match="no PRIME-RL command has any of its keys"):
        migrate(file)


def test_the_report_says_where_what_why_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text('batch_size = 8\n\nworkers_per_env = 4\ntrajectory_strategy = "branching"\n', encoding="utf-8")
    not_carried = [line for line in migrate(file).report if "not carried: " in line]
    assert not_carried[:2] == [
        f"{file}:3: not carried: workers_per_env = 4: it was removed",
        f'{file}:4: not carried: trajectory_strategy = "branching": it was removed',
    ]


def test_a_fault_that_remains_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text("async_level = 1\n[trainer.optim]\nlr = -1.0\n[orchestrator]\n", encoding="utf-8")
    migration = migrate(file)
    assert not migration.complete
    assert migration.report[1] == (f"fault: {file}: trainer.optim.lr: should be at least 0 and at most 100 (got -1.0)")


def test_no_example_environment_takes_the_place_of_one_that_was_not_carried(tmp_path: Path) -> None:
    file = tmp_path / "new.toml"
    file.write_text('group_size = 4\n[[train.source]]\nenv.taskset.path = "x"\n', encoding="utf-8")
    assert (
        "fault: env: no environment was carried, and the default is reverse-text: add [[env]]" in migrate(file).report
    )


def test_two_names_of_one_key_are_not_merged(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text("batch_size = 8\nasync_level = 1\nmax_async_level = 2\n", encoding="utf-8")
    migration = migrate(file, "orchestrator")
    assert migration.text == "batch_size = 8\n# not carried: async_level = 1\nmax_async_level = 2\n"
    file.write_text("batch_size = 8\nasync_level = 1\nmax_async_level = 1\n", encoding="utf-8")
    assert migrate(file, "orchestrator").text == "batch_size = 8\nmax_async_level = 1\n"


def test_files_that_the_file_stands_on_are_read_and_left_alone(tmp_path: Path) -> None:
    base, file = tmp_path / "base.toml", tmp_path / "old.toml"
    base.write_text("[trainer]\n[orchestrator]\n", encoding="utf-8")
    file.write_text('toml_files = ["base.toml"]\nasync_level = 1\n', encoding="utf-8")
    migration = migrate(file, "rl")
    assert migration.text == 'toml_files = ["base.toml"]\nmax_async_level = 1\n'
    assert migration.complete
    assert "migrate these files too" in "\n".join(migration.report)
    base.unlink()
    assert f"fault: {base}: no such file" in migrate(file, "rl").report


HARD_TOML = '''# A comment.

a = 1 # one
b . "c d" = "# no comment"
x = { y = 1, "z.z" = [ { q = 2 } ] } # end
long = [
  1, # first ]
  "]#", \'\'\'
]\'\'\',
] # last
quotes = """a""\\"b"""""
   indented = 1979-05-27T07:32:00Z

# Apart.

# Near.
[t . u]  # header
v = inf
[[list]]
id = 1
[list.args]
z = 1
[between]
[[list]]
id = 2
  [[list.inner]]
[[list.inner]]
# The end.'''


@pytest.mark.parametrize("text", [HARD_TOML, HARD_TOML.replace("\n", "\r\n"), "", "# only\n", "\n\n", "a = 1"])
def test_statements_are_all_of_the_text(text: str) -> None:
    assert split_statements(text).text == text


def test_statements_know_their_line_and_their_full_path() -> None:
    places = [(each.line, each.path) for each in split_statements(HARD_TOML).statements]
    assert places[:6] == [
        (3, ("a",)),
        (4, ("b", "c d")),
        (5, ("x",)),
        (6, ("long",)),
        (11, ("quotes",)),
        (12, ("indented",)),
    ]
    assert places[6:9] == [(17, ("t", "u")), (18, ("t", "u", "v")), (19, ("list", 0))]
    assert places[-3:] == [(25, ("list", 1, "id")), (26, ("list", 1, "inner", 0)), (27, ("list", 1, "inner", 1))]

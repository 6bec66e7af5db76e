"""`[eval]` of an SFT config: what it derives, and what contradicts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.sft import SFTConfig, evaluation_of
from prime_rl.configs.surface.not_built import unbuilt_faults
from prime_rl.run.checkpoints import compared_configs
from prime_rl.run.evaluations import EvaluatedSteps, prepare_evaluations, settings_of
from prime_rl.run.paths import RunPaths
from prime_rl.utils.pydantic_config import ConfigError, dump_toml, load_config

ENV = ["--eval.env", '[{"id": "a", "num_examples": 3}, {"id": "b"}]']


def load(*options: str) -> SFTConfig:
    return load_config(SFTConfig, [], options)


def test_the_evaluation_watches_the_run_s_own_exports(tmp_path: Path) -> None:
    config = load(*ENV, "--eval.num-examples", "7", "--model.name", "tiny", "--output-dir", str(tmp_path))
    evaluation = evaluation_of(config)
    assert evaluation is not None
    assert [(env.id, env.num_examples, env.rollouts_per_example) for env in evaluation.environments] == [
        ("a", 3, 1),
        ("b", 7, 1),
    ]
    assert (evaluation.weights_dir, evaluation.output_dir) == (tmp_path / "weights", tmp_path)
    assert (evaluation.watch, evaluation.interval, evaluation.model.name) == (True, 100, "tiny")
    assert unbuilt_faults(config) == []
    assert evaluation_of(load()) is None


def test_the_server_follows_from_the_run(tmp_path: Path) -> None:
    config = load(*ENV, "--model.name", "tiny", "--device", "cpu", "--tokenizer.chat-template", "chatml")
    assert config.inference is not None
    served = config.inference.model
    assert (served.name, served.chat_template, config.inference.device) == ("tiny", "chatml", "cpu")
    split = load(*ENV, "--deployment.num-infer-gpus", "4", "--inference.parallel.tp", "2")
    assert split.inference is not None
    assert (split.inference.parallel.dp, split.inference.api_server_count) == (2, 2)
    for each in (config, split):
        dump_toml(each, tmp_path / "sft.toml")
        assert load_config(SFTConfig, [tmp_path / "sft.toml"]) == each


def test_a_benchmark_evaluates_nothing() -> None:
    config = load(*ENV, "--bench")
    assert (config.eval, config.inference) == (None, None)


def test_a_resume_compares_the_training_and_not_only_its_server() -> None:
    assert list(compared_configs(load(*ENV))) == ["sft"]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--eval"], "eval has no environment: add [[eval.env]]"),
        (["--inference"], "[inference] is the server of [eval], which is missing"),
        ([*ENV, "--eval.num-examples", "0"], "eval.num_examples is 0: at least 1, or -1 for all"),
        ([*ENV, "--eval.interval", "0"], "--eval.interval: should be at least 1"),
        (["--eval.env", '[{"id": "a"}, {"id": "a"}]'], "eval.env: more than one environment is called 'a': set `name`"),
        ([*ENV, "--model.debug.random-init"], "eval: model.debug trains another model than the server loads"),
        ([*ENV, "--inference.model.name", "x"], "inference.model.name ('x') is not model.name"),
        ([*ENV, "--ckpt", "--no-ckpt.weights"], "eval loads the exported weights, and ckpt.weights is None"),
        ([*ENV, "--ckpt.weights.save-format", "torch"], "ckpt.weights.save_format = 'torch'"),
        ([*ENV, "--deployment.num-gpus", "8"], "8 training + 1 inference = 9 GPUs are above deployment.gpus_per_node"),
        (
            [*ENV, "--deployment.num-infer-gpus", "3", "--inference.parallel.tp", "2"],
            "deployment.num_infer_gpus (3) is not a multiple of inference.parallel.tp (2)",
        ),
        (
            [*ENV, "--deployment.type", "multi_node", "--slurm", "--deployment.num-infer-gpus", "8"],
            "deployment.num_infer_gpus (8) leaves none of the gpus_per_node (8) for training",
        ),
        ([*ENV, "--eval.skip-eval-on-resume"], "a resumed run evaluates what it has not evaluated yet"),
        ([*ENV, "--eval.cancel-inflight-rollouts-on-eval"], "sft trains on no rollouts"),
        ([*ENV, "--deployment.num-eval-gpus", "2"], "unknown option; use --deployment.num-infer-gpus"),
    ],
)
def test_what_contradicts_itself_is_one_line(options: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*options)
    (line,) = caught.value.faults
    assert fault in line


def test_a_resumed_run_forgets_evaluations_of_steps_that_it_repeats_even_without_results(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    config = evaluation_of(load(*ENV, "--output-dir", str(tmp_path)))
    assert config is not None
    prepare_evaluations(paths, None, settings_of(config))
    EvaluatedSteps(paths).write([100, 200])
    prepare_evaluations(paths, 100, settings_of(config))
    assert EvaluatedSteps(paths).read() == [100]

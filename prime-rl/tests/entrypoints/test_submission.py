"""Which configs `sft` and `rl` submit, and what they ask `medarc_slurm` for."""

from __future__ import annotations

from typing import Any

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.entrypoints.submission import submission

NODES = {"type": "multi_node", "num_train_nodes": 2, "num_infer_nodes": 1, "gpus_per_node": 4}
IN_A_JOB = {"SLURM_JOB_ID": "7"}
WORDS = ["@", "x.toml"]


def rl(**keys: Any) -> RLConfig:
    return RLConfig.model_validate({"max_steps": 1, "seq_len": 64, "inference": {}, **keys})


def test_the_gpus_and_nodes_of_deployment_become_options() -> None:
    one = rl(slurm={}, deployment={"num_train_gpus": 2, "num_infer_gpus": 3})
    assert submission(one, WORDS, {}) == ["medarc_slurm", "rl", "--train-gpus", "2", "--infer-gpus", "3", *WORDS]
    gpus, nodes = ["--train-gpus", "4", "--infer-gpus", "4"], ["--train-nodes", "2", "--infer-nodes", "1"]
    assert submission(rl(slurm={}, deployment=NODES), WORDS, {}) == ["medarc_slurm", "rl", *gpus, *nodes, *WORDS]


def test_no_gpus_for_inference_are_no_option() -> None:
    elsewhere = {"client": {"base_url": ["http://10.0.0.1:8000/v1"]}}
    config = RLConfig.model_validate(
        {"max_steps": 1, "seq_len": 64, "slurm": {}, "deployment": {"num_infer_gpus": 0}, "orchestrator": elsewhere}
    )
    assert submission(config, WORDS, {}) == ["medarc_slurm", "rl", "--train-gpus", "1", *WORDS]


@pytest.mark.parametrize(("keys", "starts_here"), [({}, True), ({"slurm": {}}, False)])
def test_sft_is_submitted_if_it_has_the_section(keys: dict[str, Any], starts_here: bool) -> None:
    assert (submission(SFTConfig.model_validate(keys), WORDS, {}) is None) == starts_here


def test_a_run_on_several_nodes_starts_in_a_job_and_any_other_is_submitted_from_there_too() -> None:
    assert submission(rl(slurm={}, deployment=NODES), WORDS, IN_A_JOB) is None
    assert submission(rl(slurm={}), WORDS, IN_A_JOB) is not None

from __future__ import annotations

import pytest

from prime_rl.configs.orchestrator import SamplingConfig, TemperatureSchedulerConfig
from prime_rl.orchestrator.rollouts.sampling import temperature_at, train_sampling_args


@pytest.mark.parametrize(
    ("curve", "expected"),
    [("linear", [1.0, 0.9, 0.8, 0.7, 0.6, 0.6]), ("cosine", [1.0, 0.9414, 0.8, 0.6586, 0.6, 0.6])],
)
def test_the_schedule_goes_from_start_to_end_and_stays_there(curve: str, expected: list[float]) -> None:
    schedule = TemperatureSchedulerConfig(type=curve, start_temperature=1.0, end_temperature=0.6, total_steps=5)
    config = SamplingConfig(temp_scheduler=schedule)
    assert [temperature_at(config, step, max_steps=100) for step in range(6)] == pytest.approx(expected, abs=1e-4)


def test_a_schedule_without_length_lasts_the_whole_run() -> None:
    config = SamplingConfig(temp_scheduler=TemperatureSchedulerConfig(start_temperature=0.5, end_temperature=1.5))
    assert [temperature_at(config, step, max_steps=3) for step in range(3)] == [0.5, 1.0, 1.5]
    assert temperature_at(config, 0, max_steps=1) == 1.5


def test_the_temperature_is_one_unless_set() -> None:
    assert temperature_at(SamplingConfig(), 7, None) == 1.0
    assert temperature_at(SamplingConfig(temperature=0.5), 7, None) == 0.5


CUTS = {"top_k": 5, "top_p": 0.5, "min_p": 0.5, "temperature": 0.1, "logprobs": False}


def test_nothing_that_a_user_adds_can_cut_the_sampled_distribution() -> None:
    config = SamplingConfig(max_tokens=8, min_tokens=2, extra_body=CUTS | {"stop": ["x"]})
    args = train_sampling_args(config, 0.7)
    assert (args["temperature"], args["top_p"], args["logprobs"], args["max_tokens"]) == (0.7, 1.0, True, 8)
    assert args["extra_body"] == {
        "stop": ["x"],
        "return_token_ids": True,
        "top_k": -1,
        "min_p": 0.0,
        "min_tokens": 2,
        "repetition_penalty": 1.0,
    }


def test_what_is_not_set_is_left_to_the_server() -> None:
    assert not {"max_tokens", "seed"} & set(train_sampling_args(SamplingConfig(), 1.0))

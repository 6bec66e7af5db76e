"""Translation of the config to vLLM's arguments. Runs without vLLM, with a plain parser in place of vLLM's."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from prime_rl.checks.chat_templates import NAMED
from prime_rl.configs.inference import InferenceConfig, ModelConfig
from prime_rl.inference.vllm.serve import WORKER_EXTENSION, vllm_arguments
from prime_rl.utils.pydantic_config import load_config


def parser() -> ArgumentParser:
    made = ArgumentParser()
    made.add_argument("--max-model-len", type=int, default=77)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--swap-space", type=float, default=4.0)
    return made


def test_the_config_sets_arguments_and_leaves_the_rest_to_vllm() -> None:
    config = load_config(InferenceConfig, [], {"seed": 5, "parallel": {"tp": 2}})
    args = vllm_arguments(config, [], parser())
    assert (args.seed, args.max_model_len, args.tensor_parallel_size) == (5, 77, 2)
    assert args.logprobs_mode == "processed_logprobs"
    assert args.worker_extension_cls == WORKER_EXTENSION


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"parallel": {"tp": 2}}, (2, 1, 1)),
        ({"parallel": {"tp": 2, "dp": 3}}, (2, 3, 3)),
        ({"parallel": {"dp": 2}, "api_server_count": 4}, (1, 2, 4)),
        ({"parallel": {"dp": 2}, "enable_lora": True}, (1, 2, 1)),  # adapters are loaded through a single server
    ],
)
def test_each_copy_of_the_model_has_a_server_process(settings, expected) -> None:
    args = vllm_arguments(load_config(InferenceConfig, [], settings), [], parser())
    assert (args.tensor_parallel_size, args.data_parallel_size, args.api_server_count) == expected


def test_raw_options_override_the_config() -> None:
    config = load_config(InferenceConfig, [], {"seed": 5})
    args = vllm_arguments(config, ["--seed", "6", "--swap-space", "0"], parser())
    assert (args.seed, args.swap_space) == (6, 0.0)


@pytest.mark.parametrize(
    ("setting", "model", "expected"),
    [
        ("auto", "Qwen/Qwen3-0.6B", "hermes"),
        ("auto", "zai-org/GLM-4.5-Air", "glm45"),
        ("auto", "someone/else", None),
        ("mistral", "Qwen/Qwen3-0.6B", "mistral"),
        (None, "Qwen/Qwen3-0.6B", None),
    ],
)
def test_tool_calls_are_parsed_by_the_familys_parser(setting, model, expected) -> None:
    assert ModelConfig(name=model, tool_call_parser=setting).chosen_tool_call_parser == expected
    config = load_config(InferenceConfig, [], {"model": {"name": model, "tool_call_parser": setting}})
    args = vllm_arguments(config, [], parser())
    assert getattr(args, "tool_call_parser", None) == expected
    assert getattr(args, "enable_auto_tool_choice", False) == (expected is not None)


def test_the_chat_template_is_handed_over_as_text(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    for template, text in (("chatml", NAMED["chatml"]), (str(file), "{{ messages }}"), ("{{ x }}", "{{ x }}")):
        config = load_config(InferenceConfig, [], {"model": {"chat_template": template}})
        assert vllm_arguments(config, [], parser()).chat_template == text
    assert not hasattr(vllm_arguments(load_config(InferenceConfig, [], {}), [], parser()), "chat_template")

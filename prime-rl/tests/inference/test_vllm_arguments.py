"""Translation of the config to vLLM's arguments. Runs without vLLM, with a plain parser in place of vLLM's."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from prime_rl.checks.chat_templates import NAMED
from prime_rl.checks.engines import engine_faults, vllm_arguments_in, vllm_option_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.inference import InferenceConfig, ModelConfig
from prime_rl.configs.rollouts.judges import JudgeConfig
from prime_rl.inference.vllm.serve import NO_DOMAIN, WORKER_EXTENSION, engine_error, vllm_arguments
from prime_rl.utils.errors import ConfigError
from prime_rl.utils.pydantic_config import load_config


def parser() -> ArgumentParser:
    made = ArgumentParser()
    made.add_argument("--max-model-len", type=int, default=77)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--swap-space", type=float, default=4.0)
    made.add_argument("--max-num-seqs", type=int)
    made.add_argument("--speculative-config", type=json.loads)
    made.add_argument("--async-scheduling", action=BooleanOptionalAction)
    made.add_argument("--cudagraph-capture-sizes", type=int, nargs="+")
    return made


ARGUMENTS = """
@dataclass
class EngineArgs:
    model: str = ModelConfig.model
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: CacheDType = CacheConfig.cache_dtype
    cpu_offload_gb: float = 0
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    limit_mm_per_prompt: dict[str, int | dict[str, int]] = get_field(MultiModalConfig, "limit_per_prompt")
@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""
"""Laid out as in vLLM 0.32."""


@pytest.fixture
def faults_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], list[str]]:
    """What the start check says of options, before a server of another interpreter starts."""
    file = tmp_path / "lib/python3.11/site-packages/vllm/engine/arg_utils.py"
    file.parent.mkdir(parents=True)
    file.write_text(ARGUMENTS)
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PRIME_RL_VLLM_PYTHON", str(python))

    def faults(options: dict[str, Any]) -> list[str]:
        config = load_config(InferenceConfig, [], {"backend": "vllm", "vllm": options})
        return list(engine_faults(config, StartDir(), judges_model=False))

    return faults


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


def test_every_kind_of_option_reaches_vllms_parser() -> None:
    options = {
        "max-num-seqs": 64,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "async_scheduling": False,
        "cudagraph_capture_sizes": [1, 8],
    }
    config = load_config(InferenceConfig, [], {"vllm": options})
    args = vllm_arguments(config, ["--swap-space", "0"], parser())
    assert (args.max_num_seqs, args.speculative_config) == (64, options["speculative_config"])
    assert (args.async_scheduling, args.cudagraph_capture_sizes, args.swap_space) == (False, [1, 8], 0.0)
    assert vllm_arguments(config, ["--max-num-seqs", "6"], parser()).max_num_seqs == 6


def test_vllm_fetches_images_only_from_the_domains_of_the_config() -> None:
    made = parser()
    made.add_argument("--allowed-media-domains", type=str, nargs="+")
    assert vllm_arguments(load_config(InferenceConfig, [], {}), [], made).allowed_media_domains == [NO_DOMAIN]
    config = load_config(InferenceConfig, [], {"vllm": {"allowed_media_domains": ["pacs.example.org"]}})
    assert vllm_arguments(config, [], made).allowed_media_domains == ["pacs.example.org"]


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        (
            "max_num_seq",
            8,
            "vllm.max_num_seq: vLLM has no engine argument of this name: did you mean vllm.max_num_seqs?",
        ),
        (
            "enforce_eage",
            True,
            "vllm.enforce_eage: vLLM has no engine argument of this name: did you mean model.enforce_eager?",
        ),
        ("zzz", 1, "vllm.zzz: vLLM has no engine argument of this name: see `vllm serve --help`"),
        ("max_num_seqs", "many", "vllm.max_num_seqs = 'many': vLLM's max_num_seqs is int | None"),
        ("max_num_seqs", True, "vllm.max_num_seqs = True: vLLM's max_num_seqs is int | None"),
        ("async_scheduling", 1, "vllm.async_scheduling = 1: vLLM's async_scheduling is bool | None"),
        ("cpu_offload_gb", 4, None),
        ("max_num_batched_tokens", "16k", None),
        ("kv_cache_dtype", "fp8", None),  # a type of vLLM's own, which its parser checks
        ("limit_mm_per_prompt", {"image": 0}, None),
        ("enable_log_requests", True, None),
    ],
)
def test_an_option_is_checked_before_the_start_without_importing_vllm(faults_of, name, value, fault) -> None:
    assert faults_of({name: value}) == ([fault] if fault else [])


def test_a_layout_that_is_not_known_leaves_the_check_to_vllm() -> None:
    assert list(vllm_option_faults({"zzz": 1}, vllm_arguments_in("class Arguments:\n    zz: int"))) == []


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"tensor-parallel-size": 2}, "tensor_parallel_size cannot be set here: set parallel.tp"),
        ({"seed": 2, "model": "x"}, "model cannot be set here: set model.name; seed cannot be set here: set seed"),
        ({"worker_extension_cls": "x.y"}, "ours loads the trainer's weights"),
        ({"hf_token": "x"}, "export HF_TOKEN"),
        ({"pipeline_parallel_size": 2}, "parallel.tp x parallel.dp GPUs"),
        ({"speculative_config": {"since": date(2026, 1, 1)}}, "vLLM reads JSON"),
    ],
)
def test_an_option_that_we_set_is_refused_with_our_key(options, advice) -> None:
    with pytest.raises(ConfigError, match=re.escape(advice)):
        load_config(InferenceConfig, [], {"vllm": options})


def test_a_judge_has_the_same_options() -> None:
    engine = {"vllm": {"max_num_seqs": 8}, "tp": 1}
    judge = JudgeConfig.model_validate({"model": "x", "engine": engine})
    assert judge.server("cpu").vllm == {"max_num_seqs": 8}
    for name, advice in (("dtype", "set engine.dtype"), ("seed", "follows from the judge's other keys")):
        with pytest.raises(ValidationError, match=f"{name} cannot be set here: .*{advice}"):
            JudgeConfig.model_validate({"model": "x", "engine": {"vllm": {name: 1}}})


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


def test_the_last_error_of_vllms_engine_is_read_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "inference.log"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-28 08:58:59 [core.py:1510] ValueError: not enough memory\n"
        "Process EngineCore:\nTraceback (most recent call last):\n"
        "RuntimeError: Worker failed with error 'No common block size for 7 (CPU_ATTN: [MultipleOf(32)]).', please "
        "check the stack trace above for the root cause\nUserWarning: leaked\n"
    )
    with log.open("ab") as file:
        assert engine_error(file.fileno()) == "No common block size for 7 (CPU_ATTN: [MultipleOf(32)])."
    log.write_text(log.read_text().partition("Process")[0])
    with log.open("ab") as file:
        assert engine_error(file.fileno()) == "not enough memory"
    log.write_text(
        "(Worker pid=8) ERROR 11-28 10:46:59 [multiproc_executor.py:953] ImportError: \n"
        "(Worker pid=8) ERROR 11-28 10:46:59 [multiproc_executor.py:953] It requires the timm library\n"
        "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace\n"
    )
    with log.open("ab") as file:
        assert engine_error(file.fileno()) == "ImportError: It requires the timm library"
    with Path("/dev/null").open("ab") as file:
        assert engine_error(file.fileno()) is None

"""Everything that the engine uses of vLLM 0.32 is there, read from the real package; no model is loaded."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from .conftest import vllm_python

pytestmark = pytest.mark.vllm

SCRIPT = """
import contextlib, dataclasses, inspect, io, json
import vllm.engine.arg_utils
from argparse import Namespace
from prime_rl.checks.engines import vllm_arguments_in
from prime_rl.configs.inference import _NOT_THE_USERS, InferenceConfig, keys_by_vllm_name
from prime_rl.inference.vllm.serve import WORKER_EXTENSION, _refuse_settings, vllm_arguments
from prime_rl.inference.vllm.worker import CheckpointLoading
from prime_rl.utils.pydantic_config import load_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

def parameters(function):
    return list(inspect.signature(function).parameters)

parser = make_arg_parser(FlexibleArgumentParser())
def engine(settings):
    args = vllm_arguments(load_config(InferenceConfig, [], settings), [], parser)
    made = AsyncEngineArgs.from_cli_args(args)
    return {name: getattr(made, name) for name in ("tensor_parallel_size", "data_parallel_size", "enable_sleep_mode",
            "worker_extension_cls", "enable_prefix_caching", "gpu_memory_utilization", *settings.get("vllm", {}))}

def lines(**options):
    config = load_config(InferenceConfig, [], {"model": {"name": MODEL, "max_model_len": 64}, "vllm": options})
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.suppress(SystemExit):
        _refuse_settings(vllm_arguments(config, [], parser))
    return [line for line in told.getvalue().splitlines() if line.startswith("error:")]

own = {name for name in vars(CheckpointLoading) if not name.startswith("__")}
known = {action.dest for action in parser._actions}
refused = ""
try:
    args = vllm_arguments(load_config(InferenceConfig, [], {"enable_sleep_mode": True}), [], parser)
    AsyncEngineArgs.from_cli_args(Namespace(**{**vars(args), "model": MODEL})).create_engine_config()
except Exception as error:
    refused = str(error)
print(json.dumps({
    "unknown": sorted(set(vars(vllm_arguments(load_config(InferenceConfig, [], {}), [], parser))) - known),
    "clashes": sorted(name for name in own if hasattr(Worker, name) or hasattr(CPUWorker, name)),
    "extension": resolve_obj_by_qualname(WORKER_EXTENSION) is CheckpointLoading,
    "engine": {name: parameters(getattr(AsyncLLM, name)) for name in ENGINE},
    "reload_weights": parameters(GPUModelRunner.reload_weights),
    "split": engine({"parallel": {"tp": 2, "dp": 3}}),
    "sleeping": engine({"enable_sleep_mode": True, "gpu_memory_utilization": 0.6}),
    "with_options": engine({"vllm": OPTIONS}),
    "unread": sorted({each.name for each in dataclasses.fields(AsyncEngineArgs)}
                     ^ vllm_arguments_in(inspect.getsource(vllm.engine.arg_utils)).keys()),
    "not_theirs": sorted({*keys_by_vllm_name(), *_NOT_THE_USERS} - known),
    "platform": current_platform.device_type,
    "refused": refused,
    "settings": [lines(max_num_batched_tokens=16, max_num_seqs=8, enable_chunked_prefill=False),
                 lines(speculative_config={"method": "ngram", "num_speculative_tokens": -3}), lines(max_num_seqs=8)],
    "native": sorted(WeightTransferEngineFactory._registry),
}))
"""

ENGINE = {
    "pause_generation": ("mode", "clear_cache"),
    "resume_generation": (),
    "is_paused": (),
    "sleep": ("level", "mode"),
    "wake_up": ("tags",),
    "reset_prefix_cache": (),
    "update_weight_version": (),
    "collective_rpc": ("method", "args"),
    "add_lora": (),
    "abort": ("internal",),
    "get_num_unfinished_requests": (),
}
"""What the routes call of vLLM's engine client, and the names that they pass."""

OPTIONS = {
    "max_num_seqs": 7,
    "kv_cache_dtype": "fp8",
    "max_num_batched_tokens": "16k",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    "async_scheduling": False,
    "cudagraph_capture_sizes": [1, 8],
}
"""Of `[inference.vllm]`: one of each kind."""

NOT_VLLMS = ["may_sleep", "public_metrics", "weight_broadcast"]
"""Arguments that only our routes read."""


@pytest.fixture(scope="module")
def vllm(served_model_dir) -> dict[str, Any]:
    python = vllm_python()
    if python is None:
        pytest.skip("needs vLLM: `bash .ci/make-vllm-env DIR`, and DIR/bin/python in PRIME_RL_VLLM_PYTHON")
    script = f"ENGINE, MODEL, OPTIONS = {list(ENGINE)!r}, {str(served_model_dir)!r}, {OPTIONS!r}\n{SCRIPT}"
    done = subprocess.run([python, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_worker_extension_adds_methods_to_vllms_workers_and_replaces_none(vllm) -> None:
    assert vllm["extension"]
    assert vllm["clashes"] == []
    assert "weights_iterator" in vllm["reload_weights"]


def test_the_engine_client_has_what_the_routes_call(vllm) -> None:
    missing = {name: set(used) - set(vllm["engine"][name]) for name, used in ENGINE.items()}
    assert not any(missing.values()), missing


def test_vllm_knows_every_argument_but_three_of_our_own(vllm) -> None:
    assert vllm["unknown"] == NOT_VLLMS


def test_parallel_sizes_prefixes_and_sleep_mode_arrive(vllm) -> None:
    assert (vllm["split"]["tensor_parallel_size"], vllm["split"]["data_parallel_size"]) == (2, 3)
    assert (vllm["sleeping"]["enable_sleep_mode"], vllm["sleeping"]["gpu_memory_utilization"]) == (True, 0.6)
    assert not vllm["split"]["enable_sleep_mode"]


def test_options_of_the_config_arrive_under_vllms_names(vllm) -> None:
    assert {name: vllm["with_options"][name] for name in OPTIONS} == OPTIONS | {"max_num_batched_tokens": 16_000}


def test_what_the_engine_refuses_of_them_is_one_line(vllm) -> None:
    (too_small,), negative, accepted = vllm["settings"]
    assert too_small.startswith("error: vLLM: max_num_batched_tokens (16) is smaller than max_model_len (64)")
    assert negative == ["error: vLLM: num_speculative_tokens: Input should be greater than 0"]
    assert accepted == []


def test_the_start_check_reads_exactly_vllms_engine_arguments_from_its_source(vllm) -> None:
    assert vllm["unread"] == []
    assert vllm["not_theirs"] == ["rope_scaling"]  # which is refused: not_built.py


def test_the_cpu_build_refuses_sleep_mode(vllm) -> None:
    """Which is why a server on a CPU starts without it."""
    if vllm["platform"] != "cpu":
        pytest.skip("needs vLLM's CPU build")
    assert "Sleep mode is not supported" in vllm["refused"]


def test_no_native_weight_transfer_reads_files_or_works_without_a_gpu(vllm) -> None:
    """Were there one, the worker extension could go: docs/gpus.md says why it stays."""
    assert vllm["native"] == ["ipc", "modelexpress", "nccl", "nccl_m2n", "sharded_rdt", "sparse_nccl"]

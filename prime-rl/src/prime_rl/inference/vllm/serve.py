"""Start vLLM's own OpenAI server, in this process, with our routes and our worker extension in it."""

from __future__ import annotations

import os
from argparse import Namespace
from importlib.metadata import entry_points
from pathlib import Path

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.vllm.arguments import vllm_arguments
from prime_rl.inference.vllm.versions import UpdateCount
from prime_rl.utils.logger import get_logger

PLUGIN_NAME = "prime_rl"
"""Of the entry point in the group `vllm.endpoint_plugins`, which brings `prime_rl.inference.vllm.plugin`."""

CPU_CACHE_SHARE = 0.1
"""Of a machine's memory, for keys and values on a CPU: a trainer and environments live there too."""

_MEMORY_NODES = Path("/sys/devices/system/node")


def serve(config: InferenceConfig, extras: list[str]) -> int:
    """Serve until stopped; the exit status. API server and worker processes load the same plugin and extension."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    _allow_plugin()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    wanted = config.device
    if wanted != "auto" and (wanted == "cpu") != current_platform.is_cpu():
        get_logger().error(
            f'Inference failed: device = "{wanted}", but this vLLM runs on {current_platform.device_type}'
        )
        return 1
    cli_env_setup()
    args = vllm_arguments(config, extras, make_arg_parser(FlexibleArgumentParser()))
    if current_platform.is_cpu():
        _fit_cpu(args)
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    with UpdateCount.shared():
        ServeSubcommand.cmd(args)
    return 0


def _allow_plugin() -> None:
    """vLLM loads endpoint plugins only by name, and naming one shuts out the general plugins that are not named."""
    if (named := os.environ.get("VLLM_PLUGINS")) is not None:
        others = named.split(",")
    else:
        others = [plugin.name for plugin in entry_points(group="vllm.general_plugins")]
    os.environ["VLLM_PLUGINS"] = ",".join([*others, PLUGIN_NAME])


def _fit_cpu(args: Namespace) -> None:
    """What vLLM's defaults, made for a GPU of its own, should be on a CPU that is shared with a trainer.

    It would take most of the machine's memory, and not start where that much is not free. And the trainer computes in
    float32 here, so `auto` means that for the engine too: in bfloat16 the two differ by 0.02 nats a token.
    """
    default = InferenceConfig.model_fields["gpu_memory_utilization"].default
    if args.gpu_memory_utilization == default and args.kv_cache_memory_bytes is None:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        args.kv_cache_memory_bytes = int(CPU_CACHE_SHARE * total_bytes)
    if args.dtype == "auto":
        args.dtype = "float32"
    # It gives each process of a copy the cores of one memory node, and refuses to start where there are too few.
    memory_nodes = len(list(_MEMORY_NODES.glob("node[0-9]*"))) or 1
    if args.tensor_parallel_size > memory_nodes and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        os.environ.setdefault("VLLM_CPU_SIM_MULTI_NUMA", "1")

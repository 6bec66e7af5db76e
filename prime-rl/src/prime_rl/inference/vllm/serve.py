"""Starts vLLM's OpenAI server in this process, with PRIME-RL's routes and worker extension."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from prime_rl.checks.chat_templates import model_template, read_template, tool_call_parser
from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.protocol import MAX_TOP_LOGPROBS
from prime_rl.inference.vllm.versions import UpdateCount
from prime_rl.run.process import wait_for_clearance
from prime_rl.utils.errors import one_line
from prime_rl.utils.limits import usable_memory_bytes
from prime_rl.utils.logger import get_logger

NO_DOMAIN = "nothing-is-fetched.invalid"
"""A domain that never exists (RFC 2606)."""
WORKER_EXTENSION = "prime_rl.inference.vllm.worker.CheckpointLoading"


def vllm_arguments(
    config: InferenceConfig, extras: list[str], parser: ArgumentParser, template: str | None = None
) -> Namespace:
    """Build the argument namespace for vLLM's server.

    vLLM's parser reads the config's own `[vllm]`, then `extras`: raw options, which override the config.

    `template` is the model's own chat template, if it is known: it decides how tool calls are parsed.

    Settings that are None in the config keep vLLM's default.
    """
    values = {name: value for name, value in vars(config.to_vllm()).items() if value is not None}
    values.pop("tool_call_parser", None)
    if chosen := tool_call_parser(config.model, template):
        values |= {"tool_call_parser": chosen, "enable_auto_tool_choice": True}
    if config.model.chat_template is not None:
        values["chat_template"] = read_template("model.chat_template", config.model.chat_template)
    values |= {
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_uvicorn_access_log": True,
        "max_logprobs": MAX_TOP_LOGPROBS,
        # By default, vLLM fetches whatever address a request names. An empty list means the same. `[vllm]` overrides.
        "allowed_media_domains": [NO_DOMAIN],
        # Not vLLM arguments: our routes read them, because they have no other access to the config.
        "weight_broadcast": config.weight_broadcast.type,
        "public_metrics": config.server.public_metrics,
        "may_sleep": config.enable_sleep_mode,
    }
    return parser.parse_args([*_words(config.vllm, parser), *extras], namespace=Namespace(**values))


def _words(options: Mapping[str, Any], parser: ArgumentParser) -> Iterator[str]:
    """Engine arguments as words of vLLM's command line, whose parser checks the values. Tables become JSON."""
    known = {action.dest: action for action in parser._actions}  # argparse has no public list
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name not in known:
            parser.error(f"[vllm] {name}: vLLM has no such option")
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        elif isinstance(value, list) and known[name].nargs is not None:
            yield from (flag, *map(str, value))
        else:
            yield f"{flag}={value if isinstance(value, str) else json.dumps(value)}"


PLUGIN_NAME = "prime_rl"
"""Name of the entry point for `prime_rl.inference.vllm.plugin` in the group `vllm.endpoint_plugins`."""

CPU_CACHE_SHARE = 0.1
"""Fraction of the usable memory for the key-value cache on a CPU, which is shared with trainer and environments."""

_MEMORY_NODES = Path("/sys/devices/system/node")


def serve(config: InferenceConfig, extras: list[str]) -> int:
    """Serve until stopped and return the exit status. API server and worker processes load the plugin and extension."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # An allowed domain could send vLLM on to any other: it checks only the address that a request names.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
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
            f'device = "{wanted}", but the installed vLLM is built for {current_platform.device_type}: set device to '
            'that or to "auto", or install another vLLM'
        )
        return 1
    cli_env_setup()
    template = model_template(config.model.name) if config.model.tool_call_parser == "auto" else None

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            """One line; vLLM's own prints its usage first."""
            sys.stderr.write(f"error: vLLM: {message}\n")
            raise SystemExit(2)

    args = vllm_arguments(config, extras, make_arg_parser(Parser()), template)
    if current_platform.is_cpu():
        _fit_cpu(args)
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    if config.vllm or extras:
        _refuse_settings(args)
    wait_for_clearance(os.environ, get_logger().info)
    with UpdateCount.shared():
        try:
            ServeSubcommand.cmd(args)
        except RuntimeError as error:
            if not str(error).startswith(_NO_ENGINE):
                raise
            given = ", ".join(f"{name} = {value!r}" for name, value in config.vllm.items())
            what = f"vLLM's engine did not start{given and f' with [vllm] {given}'}"
            sys.stderr.write(f"error: {what}: {engine_error(sys.stderr.fileno()) or 'its error is above'}\n")
            return 1
    return 0


_NO_ENGINE = "Engine core initialization failed"
_PREFIX = re.compile(r"^\(\w+ pid=.*?\] ?", re.MULTILINE)
_EXCEPTION = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception):\s+.+)$", re.MULTILINE)
_SPEAKING = re.compile(r"^(ValueError|RuntimeError|Exception): ")
_CONSEQUENCE = "initialization failed due to"
_OF_WORKER = re.compile(r"Worker failed with error '(.*)', please check.*")
_TAIL_BYTES = 2**16


def engine_error(log: int) -> str | None:
    """The last error of vLLM's engine process, read from the file behind the descriptor `log`.

    vLLM does not pass it on to its parent process. None if the descriptor is no file, such as a terminal.
    """
    if not stat.S_ISREG(os.fstat(log).st_mode):
        return None
    with Path(f"/proc/self/fd/{log}").open("rb") as file:  # a launch opens logs for appending only
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = _PREFIX.sub("", file.read().decode(errors="replace"))
    found = [error for error in _EXCEPTION.findall(text) if _CONSEQUENCE not in error]
    return one_line(_OF_WORKER.sub(r"\1", _SPEAKING.sub("", found[-1]))) if found else None


def _refuse_settings(args: Namespace) -> None:
    """End with one line if vLLM's engine refuses what its parser took, such as numbers that contradict each other.

    Made of a copy, because vLLM adds to the tables of its arguments. The server makes it again.
    """
    from pydantic import ValidationError
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        AsyncEngineArgs.from_cli_args(deepcopy(args)).create_engine_config()
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        faults = [str(error)]
        if isinstance(error, ValidationError):
            faults = [
                ": ".join([*map(str, each["loc"]), each["msg"].removeprefix("Value error, ")])
                for each in error.errors()
            ]
        sys.stderr.writelines(f"error: vLLM: {one_line(fault) or type(error).__name__}\n" for fault in faults)
        raise SystemExit(2) from error


def _allow_plugin() -> None:
    """Add our plugin to `VLLM_PLUGINS`.

    vLLM loads endpoint plugins only if they are listed there. Setting the variable disables all unlisted general
    plugins, so those are listed too.
    """
    if (named := os.environ.get("VLLM_PLUGINS")) is not None:
        others = named.split(",")
    else:
        others = [plugin.name for plugin in entry_points(group="vllm.general_plugins")]
    os.environ["VLLM_PLUGINS"] = ",".join([*others, PLUGIN_NAME])


def _fit_cpu(args: Namespace) -> None:
    """Replace vLLM's defaults, which assume a dedicated GPU, by ones that suit a CPU shared with a trainer.

    By default vLLM takes most of the machine's memory and fails to start if that much is not free. The trainer
    computes in float32 on a CPU, so `auto` becomes float32 here too: with bfloat16, log-probabilities of engine and
    trainer would differ by 0.02 nats per token.
    """
    default = InferenceConfig.model_fields["gpu_memory_utilization"].default
    if args.gpu_memory_utilization == default and args.kv_cache_memory_bytes is None:
        args.kv_cache_memory_bytes = int(CPU_CACHE_SHARE * usable_memory_bytes())
    if args.dtype == "auto":
        args.dtype = "float32"
    if args.enable_sleep_mode:
        # The CPU build refuses to start with it. It answers `sleep`, but keeps its memory.
        args.enable_sleep_mode = False
    if args.enable_expert_parallel:
        # Its kernel for experts reads the weights of those that another process holds, and ends by a signal (0.32).
        get_logger().warning("enable_expert_parallel has no effect: vLLM's CPU build cannot divide experts")
        args.enable_expert_parallel = False
    # vLLM binds each tensor-parallel process to one NUMA node and refuses to start if there are too few nodes.
    memory_nodes = len(list(_MEMORY_NODES.glob("node[0-9]*"))) or 1
    if args.tensor_parallel_size > memory_nodes and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        os.environ.setdefault("VLLM_CPU_SIM_MULTI_NUMA", "1")

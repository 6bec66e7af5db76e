"""The `inference` command: selects the engine and serves until SIGTERM or SIGINT.

Exit status: 0 after SIGTERM or SIGINT, 1 if the server cannot start or its engine fails, 2 if the engine does not
support a setting in the config.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.inference.embedded.http.tool_calls import TOOL_PARSERS
from prime_rl.inference.families import tool_call_parser
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import get_unknown_args, parse_argv_or_exit

Backend = Literal["vllm", "embedded"]

VLLM_PYTHON_VARIABLE = "PRIME_RL_VLLM_PYTHON"
"""Environment variable: path of a Python interpreter with vLLM and prime_rl, used when the current one has no vLLM."""

# Settings that only vLLM reads. `enforce_eager` is not listed because the embedded engine never compiles, and
# `gpu_memory_utilization` is not listed because the embedded engine uses it on a GPU.
VLLM_ONLY = (
    "model.reasoning_parser",
    "model.rope_scaling",
    "enable_expert_parallel",
    "enable_eplb",
    "all2all_backend",
)


def main() -> None:
    """Run `inference @ inference.toml --server.port 8000`. The vLLM engine also receives all unknown options."""
    config = parse_argv_or_exit(InferenceConfig, allow_extras=True)
    extras = get_unknown_args()
    refuse_unbuilt(config)
    setup_logger("info")
    if _looks_like_path(config.model.name) and not Path(config.model.name).is_dir():
        get_logger().error(f"Inference failed: model path {config.model.name!r} does not exist")
        raise SystemExit(1)
    backend, reason = choose_backend(config, lambda: vllm_installed() or vllm_python() is not None, gpu_visible)
    if backend == "embedded" and (faults := embedded_faults(config, extras, gpu_visible)):
        sys.stderr.writelines(f"error: {fault}\n" for fault in faults)
        raise SystemExit(2)
    get_logger().info(f"Inference engine: {backend} ({reason})")
    if backend == "vllm":
        raise SystemExit(_serve_vllm(config, extras))
    _exit_now(_serve_embedded(config))


def choose_backend(
    config: InferenceConfig, has_vllm: Callable[[], bool], has_gpu: Callable[[], bool]
) -> tuple[Backend, str]:
    """Return the engine and the reason. `auto` is vLLM if it is installed and a GPU is used, else embedded."""
    if config.backend != "auto":
        return config.backend, "as configured"
    if not has_vllm():
        return "embedded", "vLLM is not installed"
    if config.device == "cpu":
        return "embedded", 'device = "cpu"'
    return ("vllm", "vLLM and a GPU are available") if has_gpu() else ("embedded", "no GPU is visible")


def vllm_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def vllm_python() -> str | None:
    """The interpreter named by `PRIME_RL_VLLM_PYTHON`, if any."""
    return os.environ.get(VLLM_PYTHON_VARIABLE) or None


def gpu_visible() -> bool:
    import torch

    return torch.cuda.is_available()


def embedded_faults(config: InferenceConfig, extras: list[str], has_gpu: Callable[[], bool]) -> list[str]:
    """Return one error line for each setting that the embedded engine does not support."""
    advice = 'only the vllm engine supports it: remove it, or set backend = "vllm"'
    defaults = InferenceConfig.model_construct()
    faults = [f"{key} = {_at(config, key)!r}: {advice}" for key in VLLM_ONLY if _at(config, key) != _at(defaults, key)]
    if (parser := tool_call_parser(config.model.tool_call_parser, config.model.name)) not in (None, *TOOL_PARSERS):
        known = ", ".join(TOOL_PARSERS)
        faults.append(
            f'model.tool_call_parser = {parser!r}: the embedded engine supports {known}; set backend = "vllm"'
        )
    # On a CPU, one engine uses the cores of all tp * dp processes instead.
    if config.parallel.tp * config.parallel.dp > 1 and config.device != "cpu" and has_gpu():
        faults.append(f'parallel ({config.parallel}): the embedded engine uses one GPU; set backend = "vllm" for more')
    if config.api_server_count > config.parallel.dp:
        faults.append(f"api_server_count = {config.api_server_count}: {advice}")
    return [*faults, *(f"unknown option {extra}: {advice}" for extra in extras if extra.startswith("-"))]


def _at(config: InferenceConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _looks_like_path(name: str) -> bool:
    """Hub names are `owner/model` or `model`; anything else must be a path."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _serve_embedded(config: InferenceConfig) -> int:
    from prime_rl.inference.embedded.errors import EngineError
    from prime_rl.inference.embedded.process import EmbeddedServer

    try:
        # Bind before the model loads, so that a port in use fails at once. Connections are refused until `listen`.
        with _bound_socket(config) as listener:
            EmbeddedServer(config).serve_until_stopped(listener)
    except EngineError as exc:
        get_logger().error(f"Inference failed: {exc}")
        return 1
    except OSError as exc:
        get_logger().error(f"Inference cannot listen on {config.server.host}:{config.server.port}: {exc.strerror}")
        return 1
    return 0


def _exit_now(status: int) -> NoReturn:
    """Exit without interpreter teardown, which takes seconds with torch and waits for a model that is still loading."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _bound_socket(config: InferenceConfig) -> socket.socket:
    host = config.server.host or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, config.server.port))
    except OSError:
        listener.close()
        raise
    return listener


def _serve_vllm(config: InferenceConfig, extras: list[str]) -> int:
    if vllm_installed():
        from prime_rl.inference.vllm.serve import serve

        return serve(config, extras)
    if (python := vllm_python()) is not None:
        return _exec_under(python)
    get_logger().error(
        f'Inference failed: backend = "vllm", but {sys.executable} has no vLLM: install prime-rl[vllm], or set '
        f"{VLLM_PYTHON_VARIABLE} to an interpreter that has it"
    )
    return 1


def _exec_under(python: str) -> int:
    """Replace this process with the same command under another interpreter; the process id stays the same."""
    env = {name: value for name, value in os.environ.items() if name != VLLM_PYTHON_VARIABLE}
    get_logger().info(f"vLLM runs under {python} ({VLLM_PYTHON_VARIABLE})")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(python, [python, "-m", "prime_rl.inference.server", *sys.argv[1:]], env)
    except OSError as exc:
        get_logger().error(f"Inference failed: {VLLM_PYTHON_VARIABLE} = {python!r}: {exc.strerror}")
        return 1


if __name__ == "__main__":
    main()

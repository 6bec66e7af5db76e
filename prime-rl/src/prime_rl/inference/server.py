"""The `inference` command: selects the engine and serves until SIGTERM or SIGINT.

Exit status: 0 after SIGTERM or SIGINT, 1 if the server cannot start or its engine fails, 2 if the engine does not
support a setting in the config, or a file that the config names is missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import NoReturn

from prime_rl.checks import refuse_unstartable
from prime_rl.checks.engines import (
    VLLM_PYTHON_VARIABLE,
    choose_backend,
    embedded_faults,
    has_vllm,
    no_vllm,
    option_faults,
    vllm_installed,
    vllm_python,
)
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.launch.devices import spin_env
from prime_rl.monitors.trace import own_trace
from prime_rl.run.process import end_with_launch
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE, named_key, new_engine_key, published_key
from prime_rl.utils.errors import NotPrivate
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import get_unknown_args, parse_argv_or_exit
from prime_rl.utils.scratch import LAUNCH_VARIABLE
from prime_rl.utils.signals import start_program, write_stacks_on_signal


def main() -> None:
    """Run `inference @ inference.toml --server.port 8000`. The vLLM engine also receives all unknown options."""
    end_with_launch()
    start_program()
    write_stacks_on_signal()
    config = parse_argv_or_exit(InferenceConfig, allow_extras=True)
    extras = get_unknown_args()
    refuse_unbuilt(config)
    refuse_unstartable(config)
    setup_logger("info")
    own_trace()
    if LAUNCH_VARIABLE not in os.environ:  # started by hand: no launch has given cores to other processes
        os.environ |= spin_env(os.environ)
    backend, reason = choose_backend(config, has_vllm, gpu_visible)
    # Checked again, because torch may see other GPUs than the start check, which does not import torch.
    if backend == "embedded" and (faults := [*embedded_faults(config, gpu_visible), *option_faults(extras)]):
        sys.stderr.writelines(f"error: {fault}\n" for fault in faults)
        raise SystemExit(2)
    get_logger().info(f"Inference engine: {backend} ({reason})")
    if backend == "vllm":
        raise SystemExit(_serve_vllm(config, extras))
    _exit_now(_serve_embedded(config))


def gpu_visible() -> bool:
    import torch

    return torch.cuda.is_available()


def _serve_embedded(config: InferenceConfig) -> int:
    from prime_rl.inference.embedded.errors import EngineError
    from prime_rl.inference.embedded.process import EmbeddedServer

    try:
        # Bind before the model loads, so that a port in use fails at once. Connections are refused until `listen`.
        with _bound_socket(config) as listener, _key(listener.getsockname()[1]) as key:
            EmbeddedServer(config, key).serve_until_stopped(listener)
    except EngineError as exc:
        get_logger().error(str(exc))
        return 1
    except OSError as exc:
        _report(exc, config)
        return exc.exit_code if isinstance(exc, NotPrivate) else 1
    return 0


def _report(error: OSError, config: InferenceConfig) -> None:
    if isinstance(error, NotPrivate):
        get_logger().error(str(error))
    else:
        get_logger().error(f"Inference cannot listen on {config.server.address}:{config.server.port}: {error.strerror}")


@contextlib.contextmanager
def _key(port: int) -> Iterator[str]:
    """The key that requests need, in the environment and in a file for this user's clients.

    Raises:
        NotPrivate: the directory for keys does not belong to this user alone.
    """
    key = named_key(ENGINE_KEY_VARIABLE, os.environ) or new_engine_key()
    # vLLM reads the variable, in its server processes too.
    os.environ[ENGINE_KEY_VARIABLE] = key
    with published_key(port, key) as file:
        get_logger().info(f"Requests need the key in {file}")
        yield key


def _exit_now(status: int) -> NoReturn:
    """Exit without interpreter teardown, which takes seconds with torch and waits for a model that is still loading."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _bound_socket(config: InferenceConfig) -> socket.socket:
    host = config.server.address
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

        with contextlib.ExitStack() as held:
            try:
                # A port in use fails here, before the key of the server on it is replaced.
                _bound_socket(config).close()
                held.enter_context(_key(config.server.port))
            except OSError as exc:
                _report(exc, config)
                return 1
            return serve(config, extras)
    if (python := vllm_python()) is not None:
        return _exec_under(python)
    get_logger().error(no_vllm())
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
        get_logger().error(f"{VLLM_PYTHON_VARIABLE} = {python!r}: {exc.strerror}")
        return 1


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # A process that vLLM has spawned, which otherwise outlives a server that is killed, and shows no stacks.
    end_with_launch()
    write_stacks_on_signal()

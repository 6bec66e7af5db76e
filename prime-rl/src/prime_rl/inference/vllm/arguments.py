"""Translates an inference config into vLLM's server arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from prime_rl.configs.inference import InferenceConfig

WORKER_EXTENSION = "prime_rl.inference.vllm.worker.CheckpointLoading"


def vllm_arguments(config: InferenceConfig, extras: list[str], parser: ArgumentParser) -> Namespace:
    """Build the argument namespace for vLLM's server. `extras` are raw vLLM options, which override the config.

    Settings that are None in the config keep vLLM's default.
    """
    values = {name: value for name, value in vars(config.to_vllm()).items() if value is not None}
    values.pop("tool_call_parser", None)
    if chosen := config.model.chosen_tool_call_parser:
        values |= {"tool_call_parser": chosen, "enable_auto_tool_choice": True}
    values |= {
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_server_load_tracking": True,
        "disable_uvicorn_access_log": True,
        # Not a vLLM argument: our routes read it, because they have no other access to the config.
        "weight_broadcast": config.weight_broadcast.type,
    }
    return parser.parse_args(extras, namespace=Namespace(**values))

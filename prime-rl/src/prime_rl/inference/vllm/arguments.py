"""Translates an inference config into vLLM's server arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from prime_rl.checks.chat_templates import read_template, tool_call_parser
from prime_rl.configs.inference import InferenceConfig

WORKER_EXTENSION = "prime_rl.inference.vllm.worker.CheckpointLoading"


def vllm_arguments(
    config: InferenceConfig, extras: list[str], parser: ArgumentParser, template: str | None = None
) -> Namespace:
    """Build the argument namespace for vLLM's server. `extras` are raw vLLM options, which override the config.

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
        "enable_server_load_tracking": True,
        "disable_uvicorn_access_log": True,
        # Not vLLM arguments: our routes read them, because they have no other access to the config.
        "weight_broadcast": config.weight_broadcast.type,
        "public_metrics": config.server.public_metrics,
        "may_sleep": config.enable_sleep_mode,
    }
    return parser.parse_args(extras, namespace=Namespace(**values))

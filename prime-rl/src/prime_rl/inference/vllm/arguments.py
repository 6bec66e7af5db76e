"""vLLM's own arguments for an inference config."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from prime_rl.configs.inference import InferenceConfig

WORKER_EXTENSION = "prime_rl.inference.vllm.worker.CheckpointLoading"

_TOOL_CALL_PARSERS = (
    ("zai-org/GLM-4.5", "glm45"),
    ("zai-org/GLM-4.7", "glm47"),
    ("MiniMaxAI/MiniMax-M2", "minimax_m2"),
    ("PrimeIntellect/INTELLECT-3", "hermes"),
    ("Qwen/Qwen3", "hermes"),
)
"""Families of models, by how their hub names start."""


def tool_call_parser(setting: str | None, model: str) -> str | None:
    """The parser to use: `auto` knows some families by their hub name, and parses nothing for the rest."""
    if setting != "auto":
        return setting
    return next((parser for prefix, parser in _TOOL_CALL_PARSERS if model.startswith(prefix)), None)


def vllm_arguments(config: InferenceConfig, extras: list[str], parser: ArgumentParser) -> Namespace:
    """The namespace that vLLM's server starts from. `extras` are raw options of vLLM, which win over the config.

    What the config leaves at None is left to vLLM's own default.
    """
    values = {name: value for name, value in vars(config.to_vllm()).items() if value is not None}
    values.pop("tool_call_parser", None)
    if chosen := tool_call_parser(config.model.tool_call_parser, config.model.name):
        values |= {"tool_call_parser": chosen, "enable_auto_tool_choice": True}
    values |= {
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_server_load_tracking": True,
        "disable_uvicorn_access_log": True,
    }
    return parser.parse_args(extras, namespace=Namespace(**values))

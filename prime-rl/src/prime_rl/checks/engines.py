"""Chooses the inference engine of a config, and finds settings that it does not support."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from prime_rl.checks.model_files import PROCESSOR_CONFIGS, context_length, describe
from prime_rl.checks.start_dir import NotInstalled, StartDir, gpus_here
from prime_rl.configs.inference import InferenceConfig, keys_by_vllm_name

Backend = Literal["vllm", "embedded"]

VLLM_PYTHON_VARIABLE = "PRIME_RL_VLLM_PYTHON"
"""Environment variable: path of a Python interpreter with vLLM and prime_rl, used when the current one has no vLLM."""

EMBEDDED_TOOL_PARSERS = ("hermes", "llama3_json", "llama4_json")
"""Tool call parsers of the embedded engine, by vLLM's names."""

# Settings that only vLLM reads. `enforce_eager` and `gpu_memory_utilization` are not listed because the embedded engine
# uses them on a GPU.
VLLM_ONLY = (
    "model.reasoning_parser",
    "model.rope_scaling",
    "enable_expert_parallel",
    "enable_eplb",
    "all2all_backend",
    "vllm",
)
_ADVICE = 'only the vllm engine supports it: remove it, or set backend = "vllm"'


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


def has_vllm() -> bool:
    return vllm_installed() or vllm_python() is not None


def engine_of(config: InferenceConfig, start: StartDir) -> Backend | None:
    """The engine that serves a config; None if the node of the job decides."""
    if not start.is_here and config.backend == "auto" and config.device != "cpu":
        return None
    return choose_backend(config, has_vllm, lambda: not start.is_here or gpus_here())[0]


def engine_faults(config: InferenceConfig, start: StartDir, *, judges_model: bool = True) -> Iterator[str]:
    """One line for each reason why the server of a config would not start, as far as it shows without a model.

    Without `judges_model`, nothing is said of a model that the trainer has refused already.
    """
    backend = engine_of(config, start)
    if backend is None:
        yield from _vllm_option_faults(config, start)
        return
    if backend == "vllm":
        yield from _vllm_faults(config, start)
        return
    yield from embedded_faults(config, lambda: not start.is_here or gpus_here())
    description = describe(config.model.name, start) if judges_model else None
    if description is not None and (fault := description.embedded_fault(config.model.max_model_len)):
        yield f"model.name = {config.model.name}: {fault}"
    longest, wanted = context_length(start.find(config.model.name)), config.model.max_model_len
    if fault := context_fault(wanted, longest):
        yield fault


def embedded_faults(config: InferenceConfig, has_gpu: Callable[[], bool]) -> list[str]:
    """Return one error line for each setting that the embedded engine does not support."""
    defaults = InferenceConfig.model_construct()
    faults = [f"{key} = {_at(config, key)!r}: {_ADVICE}" for key in VLLM_ONLY if _at(config, key) != _at(defaults, key)]
    if (parser := config.model.tool_call_parser) not in (None, "auto", *EMBEDDED_TOOL_PARSERS):
        known = ", ".join(EMBEDDED_TOOL_PARSERS)
        faults.append(
            f'model.tool_call_parser = {parser!r}: the embedded engine supports {known}; set backend = "vllm"'
        )
    # On a CPU, one engine uses the cores of all tp * dp processes instead.
    if config.parallel.tp * config.parallel.dp > 1 and config.device != "cpu" and has_gpu():
        faults.append(f'parallel ({config.parallel}): the embedded engine uses one GPU; set backend = "vllm" for more')
    if config.api_server_count > config.parallel.dp:
        faults.append(f"api_server_count = {config.api_server_count}: {_ADVICE}")
    return faults


def option_faults(extras: list[str]) -> list[str]:
    """One line for each option of vLLM that is given to the embedded engine."""
    return [f"unknown option {extra}: {_ADVICE}" for extra in extras if extra.startswith("-")]


def no_vllm() -> str:
    return (
        f'backend = "vllm", but {sys.executable} has no vLLM: install prime-rl[vllm], or set {VLLM_PYTHON_VARIABLE} to '
        "an interpreter that has it"
    )


def context_fault(wanted: int | None, longest: int | None) -> str | None:
    """Why the embedded engine cannot serve a context of `wanted` tokens; None where either is not given."""
    if wanted is None or longest is None or wanted <= longest:
        return None
    return f"inference.model.max_model_len is {wanted}, but the model's context is {longest}"


def _vllm_faults(config: InferenceConfig, start: StartDir) -> Iterator[str]:
    python = vllm_python()
    if not start.has_our_packages or not vllm_installed():
        if python is not None and start.lacks(python):
            yield f"{VLLM_PYTHON_VARIABLE} = {python!r}: No such file or directory"
        elif python is not None and start.find(python).exists() and not os.access(start.find(python), os.X_OK):
            yield f"{VLLM_PYTHON_VARIABLE} = {python!r}: Permission denied"
        elif python is None and start.has_our_packages:
            yield NotInstalled(no_vllm())
    yield from _vllm_option_faults(config, start)
    folder, description = start.find(config.model.name), describe(config.model.name, start)
    if description is not None and description.packed is not None:
        yield (
            f"model.name = {config.model.name}: its weights are in bitsandbytes' 4 bits, which vLLM 0.32 does not "
            'read: set inference.backend = "embedded", or name its version in bfloat16'
        )
    if description is not None and (fault := description.serving_fault(config.parallel.tp)):
        yield fault
    has_tower = folder.is_dir() and description is not None and description.has_known_language_part
    if (
        has_tower
        and not config.model.language_model_only
        and not any(map(Path.is_file, map(folder.joinpath, PROCESSOR_CONFIGS)))
    ):
        yield (
            f"model.name = {config.model.name}: the checkpoint has a vision tower and none of "
            f"{', '.join(PROCESSOR_CONFIGS)}, which vLLM needs: "
            "set inference.model.language_model_only = true, or copy them from the hub"
        )
    # vLLM 0.32 collects routes in its second model runner, which needs Triton, beside the blocks of its prefix cache.
    if config.enable_return_routed_experts and (config.device == "cpu" or (start.is_here and not gpus_here())):
        yield (
            "enable_return_routed_experts (trainer.enable_router_replay): vLLM returns routed experts only on a GPU: "
            'set backend = "embedded"'
        )
    if config.enable_return_routed_experts and config.enable_prefix_caching is False:
        yield (
            "enable_return_routed_experts (trainer.enable_router_replay): vLLM returns routed experts only with prefix "
            "caching: remove enable_prefix_caching = false"
        )
    if config.enable_lora and config.max_cpu_loras < config.max_loras:
        yield (
            f"max_cpu_loras ({config.max_cpu_loras}) is below max_loras ({config.max_loras}), which vLLM does not "
            "accept: raise it"
        )


_ARGUMENT_CLASSES = ("EngineArgs", "AsyncEngineArgs")
"""Classes of `vllm/engine/arg_utils.py` whose fields are vLLM's engine arguments."""
_TYPES: dict[str, type | tuple[type, ...]] = {
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
    "list": list,
    "set": list,
    "dict": dict,
}
"""Types of a value in a config, by the word in an annotation."""


def vllm_arguments_in(source: str) -> dict[str, str]:
    """vLLM's engine arguments and their types, from the text of its `engine/arg_utils.py`: an import takes seconds.

    Empty if the file is laid out differently; then vLLM itself judges names and values at the server's start.
    """
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: ast.unparse(field.annotation)
        for each in classes
        if each.name in _ARGUMENT_CLASSES
        for field in each.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def vllm_option_faults(options: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[str]:
    """One line for each of a config's options that is no engine argument of vLLM, or has a value of another type."""
    for name, value in options.items():
        if known and name not in known:
            ours = {each: f"vllm.{each}" for each in known} | dict(keys_by_vllm_name())
            near = get_close_matches(name, ours, 1)
            advice = f"did you mean {ours[near[0]]}?" if near else "see `vllm serve --help`"
            yield f"vllm.{name}: vLLM has no engine argument of this name: {advice}"
        elif known and not _may_hold(known[name], value):
            yield f"vllm.{name} = {value!r}: vLLM's {name} is {known[name]}"


def _vllm_option_faults(config: InferenceConfig, start: StartDir) -> Iterator[str]:
    if config.vllm and (file := _vllm_arguments_file(start)) is not None:
        yield from vllm_option_faults(config.vllm, vllm_arguments_in(file.read_text(encoding="utf-8")))


def _may_hold(annotation: str, value: Any) -> bool:
    """Whether a value may be of the type; types that vLLM defines itself may hold anything."""
    plain = [part.strip().partition("[")[0] for part in annotation.strip("'").split("|")]
    kinds = [_TYPES.get(name) for name in plain if name != "None"]
    if None in kinds:
        return True
    if isinstance(value, str) and value[:1].isdecimal() and "int" in plain:
        return True  # vLLM reads 16k as an integer
    is_flag = isinstance(value, bool)
    return any(kind is bool if is_flag else isinstance(value, kind) for kind in kinds if kind is not None)


def _vllm_arguments_file(start: StartDir) -> Path | None:
    """The file that defines vLLM's engine arguments where the server will run, if this machine can see it."""
    folders = []
    if start.has_our_packages and (spec := importlib.util.find_spec("vllm")) is not None:
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    elif (python := vllm_python()) is not None:
        folders = [*start.find(python).parent.parent.glob("lib/python3*/site-packages/vllm")]
    files = (folder / "engine" / "arg_utils.py" for folder in folders)
    return next(filter(Path.is_file, files), None)


def _at(config: InferenceConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value

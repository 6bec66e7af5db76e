"""What the processes of a run import: nothing heavy before a config is checked, then nothing that they do not use."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import packages_distributions

import pytest

from prime_rl.utils.imports import Distributions, import_without_gc

HEAVY = ("torch", "transformers", "numpy", "rich", "datasets", "pandas", "pyarrow", "verifiers", "vllm", "wandb")
OF_NOTEBOOKS = ("IPython", "matplotlib", "sklearn", "scipy", "tensorboard")
OF_DATASETS = ("datasets", "pandas", "pyarrow")
OF_ENVIRONMENTS = ("verifiers", "openai", "anthropic", "aiohttp")
OF_SERVERS = ("uvicorn", "starlette", "fastapi", "vllm")


@pytest.mark.parametrize(
    "module",
    [
        "prime_rl.entrypoints.sft",
        "prime_rl.entrypoints.rl",
        "prime_rl.entrypoints.eval",
        "prime_rl.trainer.sft.train",
        "prime_rl.trainer.rl.train",
        "prime_rl.orchestrator.orchestrator",
        "prime_rl.orchestrator.env_server",
        "prime_rl.inference.server",
    ],
)
def test_a_command_checks_its_config_before_it_loads_anything_heavy(module: str) -> None:
    assert loaded_by(f"import {module}", HEAVY) == []


def test_the_sft_command_loads_no_config_of_rl() -> None:
    others = ("prime_rl.configs.rl", "prime_rl.configs.orchestrator")
    assert loaded_by("import prime_rl.entrypoints.sft", others) == []


@pytest.mark.parametrize(
    ("module", "unused"),
    [
        # Rows of JSON Lines are read without the libraries of tables.
        ("prime_rl.trainer.sft.run", OF_DATASETS + OF_ENVIRONMENTS + OF_SERVERS + OF_NOTEBOOKS),
        ("prime_rl.trainer.rl.run", OF_DATASETS + OF_ENVIRONMENTS + OF_SERVERS + OF_NOTEBOOKS),
        ("prime_rl.inference.embedded.startup", OF_DATASETS + OF_ENVIRONMENTS + OF_NOTEBOOKS),
        (
            "prime_rl.orchestrator.run",
            ("torch", "transformers", "wandb", "anthropic", "agents", "mcp", *OF_SERVERS, *OF_NOTEBOOKS),
        ),
    ],
)
def test_a_process_of_a_run_loads_nothing_of_another_s_work(module: str, unused: tuple[str, ...]) -> None:
    start = "import_verifiers()" if "transformers" in unused else "import_transformers()"
    assert loaded_by(f"from prime_rl.utils.imports import *; {start}; import {module}", ("wandb", *unused)) == []


def test_the_distributions_of_packages_are_those_that_python_lists() -> None:
    made: list[Mapping[str, list[str]]] = []

    def make() -> Mapping[str, list[str]]:
        made.append(packages_distributions())
        return made[-1]

    ours = Distributions(make)
    assert (ours["torch"], ours.get("accelerate")) == (["torch"], packages_distributions().get("accelerate"))
    assert not made
    assert dict(ours) == packages_distributions()
    assert ours.get("no_such_package", []) == []
    assert len(made) == 1


def test_transformers_is_the_same_when_it_lists_its_models_once() -> None:
    code = """
from prime_rl.utils.imports import import_transformers
import_transformers()
import transformers
models = transformers.models
from transformers.utils.import_utils import define_import_structure
listed = define_import_structure(models.__file__)
assert len(listed[frozenset()]) > 300
expected = type(models)(models.__name__, models.__file__, listed, module_spec=models.__spec__)
assert dir(models) == dir(expected)
assert models._class_to_module == expected._class_to_module
assert models._object_missing_backend == expected._object_missing_backend
assert transformers.models.llama.LlamaConfig is transformers.LlamaConfig
"""
    assert loaded_by(code, ()) == []


def test_verifiers_does_the_same_when_it_imports_other_vendors_packages_on_demand() -> None:
    code = """
from prime_rl.utils.imports import import_verifiers
import_verifiers()
import verifiers
from verifiers.utils.tool_utils import convert_func_to_tool_def
def tool(number: int) -> str: pass
assert convert_func_to_tool_def(tool).parameters["properties"] == {"number": {"title": "Number", "type": "integer"}}
from anthropic import AsyncAnthropic, AuthenticationError, PermissionDeniedError
from verifiers.clients import AnthropicMessagesClient, client
made = AnthropicMessagesClient(AsyncAnthropic(api_key="key"))
assert type(made) is verifiers.AnthropicMessagesClient
assert {AuthenticationError, PermissionDeniedError} < set(client.AUTH_ERRORS)
from agents.function_schema import function_schema
assert function_schema(tool).name == "tool"
"""
    assert loaded_by(code, ()) == []


def test_importing_leaves_garbage_collection_as_it_was() -> None:
    frozen = gc.get_freeze_count()
    with import_without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen
    gc.unfreeze()


def loaded_by(code: str, modules: tuple[str, ...]) -> list[str]:
    """Which of `modules` a new interpreter has after `code`."""
    told = f"\nimport os, sys\nprint([name for name in {modules!r} if name in sys.modules], flush=True)\nos._exit(0)"
    done = subprocess.run([sys.executable, "-c", code + told], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [name for name in modules if repr(name) in done.stdout.splitlines()[-1]]

"""Tests pass limits, clocks and functions in; none replaces a name of our own modules behind their back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "prime-rl" / "tests").rglob("*.py")])
OURS = ("prime_rl", "medarc_rl")

ALLOWED = {
    "medarc_rl.launchers.rl_local.rl_local": "public: code outside replaces it, so the command looks it up late",
    "medarc_rl.launchers.sft_local.sft_local": "the same",
    "nltk.tokenize.tokenize._get_punkt_tokenizer": "gives lm-eval NLTK's model of sentences, which it would download",
    "lm_eval.tasks.ifeval.instructions_util._get_sentence_tokenizer": "the same",
}


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Where each imported name of a file is from, dotted."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """A target of a patch, as far as the file tells it: `prime_rl.launch.devices`; empty for the result of a call."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, names)):
        return f"{owner}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def patches(source: str) -> Iterator[str]:
    """What `monkeypatch.setattr` and `mock.patch` of a file replace."""
    tree = ast.parse(source)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        function = dotted(node.func, names)
        if function.endswith(".setattr") and len(node.args) == 3:
            yield f"{dotted(node.args[0], names)}.{dotted(node.args[1], {})}"
        elif function.endswith((".setattr", "mock.patch")):
            yield dotted(node.args[0], names)
        elif function.endswith("patch.object"):
            yield f"{dotted(node.args[0], names)}.{dotted(node.args[1], {})}"


def is_ours_or_private(target: str) -> bool:
    owner, _, name = target.rpartition(".")
    return name.startswith("_") or owner.split(".")[0] in OURS


def test_no_test_patches_a_name_of_ours_or_a_private_one() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {target}"
        for path in TESTS
        for target in patches(path.read_text(encoding="utf-8"))
        if is_ours_or_private(target) and target not in ALLOWED
    }
    assert found == set()


def test_every_way_to_patch_is_seen() -> None:
    source = """
import sys
from unittest import mock
from unittest.mock import patch
from prime_rl.trainer.sft import step
from prime_rl.launch import devices as gpus

monkeypatch.setattr(step, "row_loss_sum", 0)
monkeypatch.setattr(gpus.GpuAssignment, "all", 0)
monkeypatch.setattr("medarc_rl.cli._default", 0)
monkeypatch.setattr(f"prime_rl.{room}.LIMIT", 0)
monkeypatch.setattr(get_logger(), "handlers", 0)
monkeypatch.setattr(sys, "argv", 0)
mock.patch("prime_rl.run.paths.RunPaths")
patch.object(step, "train_step")
"""
    assert [target for target in patches(source) if is_ours_or_private(target)] == [
        "prime_rl.trainer.sft.step.row_loss_sum",
        "prime_rl.launch.devices.GpuAssignment.all",
        "medarc_rl.cli._default",
        "prime_rl.{}.LIMIT",
        "prime_rl.run.paths.RunPaths",
        "prime_rl.trainer.sft.step.train_step",
    ]

"""The reference of metrics is up to date, and has every name that the code writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from prime_rl.history.catalog import CATALOG, expanded, is_described, page

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "prime-rl" / "src" / "prime_rl"
MODULES = [
    path
    for room in ("trainer", "orchestrator", "eval", "environments/judging")
    for path in sorted((SOURCES / room).rglob("*.py"))
]

NAME = re.compile(r"[a-z_*]+(/[a-z_*0-9@]+)+")
NOT_METRICS = {"distributions/rewards", "distributions/advantages"}
"""Keys with a slash that are not in `metrics.jsonl`: histograms for W&B."""
NOT_MEASURED = {"token", "sequence", "constant", "stats", "mean", "sum", "max", "k1", "k2", "k3"}
"""Other keys in the modules of losses: kinds of averages and of estimates, an argument."""


def test_the_reference_is_up_to_date() -> None:
    advice = "run: uv run python -m prime_rl.history.catalog > docs/metrics.md"
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page(), advice


def keys_with_a_slash(module: Path) -> Iterator[str]:
    """Keys such as `reward/mean` of dictionaries and assignments, with `*` for what a format string inserts."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.times":
            yield f"time/{ast.literal_eval(node.args[0])}"
        keys = list(node.keys) if isinstance(node, ast.Dict) else []
        keys += [node.key] if isinstance(node, ast.DictComp) else []
        keys += [node.slice] if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else []
        for key in keys:
            parts = key.values if isinstance(key, ast.JoinedStr) else [key]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
            if NAME.fullmatch(text) and text not in NOT_METRICS:
                yield text


def keys(module: Path) -> Iterator[str]:
    """Keys of the dictionaries in a module."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant))


def test_every_name_that_the_code_writes_is_described() -> None:
    described = [name for metrics in CATALOG.values() for metric in metrics for name in expanded(metric.names)]
    # What the losses and the critic measure; statistics of it are metrics.
    losses = [SOURCES / "trainer" / "rl" / f"{name}.py" for name in ("loss", "step")]
    critic = SOURCES / "trainer" / "rl" / "critic.py"
    written = {key for module in MODULES if module != critic for key in keys_with_a_slash(module)}
    written |= {f"{key}/mean" for key in keys_with_a_slash(critic) if key != "critic/explained_variance"}
    written |= {f"{key}/mean" for module in losses for key in keys(module) if key not in NOT_MEASURED}
    unknown = set()
    for each in written:
        pattern = ".+".join(map(re.escape, each.split("*")))
        # An evaluation's names get their prefix where they are logged.
        if not any(re.fullmatch(rf"(eval/<environment>/)?{pattern}", name) for name in described):
            unknown.add(each)
    assert unknown == set()
    assert len(written) > 100


def test_every_described_name_is_one_that_the_code_writes() -> None:
    words = set(re.findall(r"[a-z_]+", " ".join(module.read_text(encoding="utf-8") for module in MODULES)))
    names = {name for metrics in CATALOG.values() for metric in metrics for name in expanded(metric.names)}
    unknown = {name for name in names if not set(re.findall(r"[a-z_]{4,}", re.sub(r"<.*?>", "", name))) <= words}
    assert {name for name in unknown if not name.startswith(("val_", "filter/", "data/"))} == set()


def test_a_name_that_nobody_writes_is_not_described() -> None:
    assert is_described("reward_parts/similarity")
    assert is_described("eval/reverse-text/pass@8")
    assert not is_described("reward_part/similarity")
    assert not is_described("loss")
